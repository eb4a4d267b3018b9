"""nanochat's optimizer on this repo's parameters, a peer for the benchmark of an optimizer's step.

    git clone https://github.com/karpathy/nanochat && git -C nanochat checkout 92d63d4
    PYTHONPATH=nanochat python -m scripts.optim_bench --peer examples/nanochat_optimizer.py:build_optimizer

Momentum, beta2 and decay are nanochat's. None of the values affects the time of a step.
"""

from nanochat.optim import MuonAdamW

from nanomuon import recipe


def build_optimizer(model):
    groups = []
    for group in recipe.param_groups(model, batch=524288, steps=2289):
        if group["kind"] == "adamw":
            keys = ("kind", "params", "lr", "betas", "eps", "weight_decay")
            groups.append({key: group[key] for key in keys})
            continue
        for shape in sorted({param.shape for param in group["params"]}):  # nanochat stacks a group's matrices
            matrices = [param for param in group["params"] if param.shape == shape]
            values = dict(lr=group["lr"], momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=0.28)
            groups.append(dict(kind="muon", params=matrices, **values))
    return MuonAdamW(groups)
