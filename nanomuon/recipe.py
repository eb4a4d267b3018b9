"""The recipe: which parameter is trained how, and how that changes over a run.

Both functions are pure. Their keywords are flags of base_train. The laboratory (scripts/optim_race.py)
compares them with others, and a user's own file may define either in their place (nanomuon/user_file.py).
"""

import nanomuon.schedule
from nanomuon.param_groups import build_param_groups


def param_groups(
    model,
    batch=None,
    steps=None,
    *,
    matrix_lr=0.02,
    embedding_lr=0.3,
    unembedding_lr=0.004,
    scalar_lr=0.01,
    weight_decay=0.2,
):
    """Groups of a GPT: Muon for the matrices, AdamW with a learning rate per role for the rest.

    batch: tokens per step; steps: of the run. The rates and the decay are those of 4,096 tokens and about
    2,300 steps, and follow nanomuon.schedule from there: horizon_lr_scale, horizon_decay_scale and
    matrix_lr_scale. AdamW's rates are those of width 768, and follow adamw_lr_scale. weight_decay is of
    Muon's matrices. docs/recipe.md has the measurements.
    """
    batch_scale = nanomuon.schedule.matrix_lr_scale(batch) if batch else 1
    lr_scale, decay_scale = 1, 1
    if steps:
        lr_scale = nanomuon.schedule.horizon_lr_scale(steps)
        decay_scale = nanomuon.schedule.horizon_decay_scale(steps)
    width_scale = nanomuon.schedule.adamw_lr_scale(model.config.width)
    muon = dict(
        lr=matrix_lr * batch_scale * lr_scale,
        momentum=0.95,
        ns_steps=5,
        beta2=0.95,
        # a step decays by the product of rate and decay, which the batch leaves as it is
        weight_decay=weight_decay * decay_scale / batch_scale,
    )
    # a smaller eps makes rounding into updates, and two world sizes into two runs (docs/log.md)
    adamw = dict(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    embedding = dict(adamw, lr=embedding_lr * width_scale * lr_scale)
    head = dict(adamw, lr=unembedding_lr * width_scale * lr_scale)
    # ten times as fast, the fullest of 8 experts gets 2.7 times the mean in place of 1.2 (docs/log.md)
    router = dict(adamw, lr=head["lr"] / 10)
    return build_param_groups(
        model,
        muon=muon,
        adamw=dict(adamw, lr=scalar_lr * lr_scale),
        skip_keys=["value_gate", "router"],
        expert_keys=["mlp.w1", "mlp.w2"],
        roles={
            "wte": embedding,
            "value_embeds": embedding,
            "lm_head": head,
            "router": router,
            "taps": dict(adamw, lr=0.02 * lr_scale),
        },
    )


def schedule(group, step, steps, *, warmup_ratio=0.0, warmdown_ratio=1.0):
    """{hyperparameter: value} that a group gets at `step` (from 0) of `steps`. group: as it was built."""
    values = {"lr": group["lr"] * nanomuon.schedule.lr_multiplier(step, steps, warmup_ratio, warmdown_ratio)}
    if group.get("kind") == "muon":
        decay = nanomuon.schedule.weight_decay_multiplier(step, steps)
        values["momentum"] = nanomuon.schedule.muon_momentum(step, steps)
        values["weight_decay"] = group["weight_decay"] * decay
    return values
