"""AdamW for the matrices too, the baseline of most papers.

The other parameters have fixed rates by role, and all rates fall linearly to zero. These values do not change
when the recipe does, so that old races can be compared with new ones.

Source: arXiv 1711.05101; betas and decay of the matrices are the usual ones for language models.
"""

from nanomuon import recipe
from nanomuon.optim_groups import build_param_groups


def param_groups(
    model, *, matrix_lr=0.004, embedding_lr=0.1, unembedding_lr=0.01, scalar_lr=0.02, weight_decay=0.1
):
    groups = build_param_groups(
        model,
        muon=dict(lr=matrix_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay),
        adamw=dict(lr=scalar_lr, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.0),
        skip_keys=["value_gate"],
        roles={"wte": dict(lr=embedding_lr), "lm_head": dict(lr=unembedding_lr)},
    )
    for group in groups:
        group["kind"] = "adamw"
    return groups


def schedule(group, step, steps, *, warmup_ratio=0.0, warmdown_ratio=1.0):
    return {"lr": group["lr"] * recipe.lr_multiplier(step, steps, warmup_ratio, warmdown_ratio)}
