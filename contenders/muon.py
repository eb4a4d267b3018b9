"""Muon as its author published it; with beta2=0.95, NorMuon.

    M <- mu M + (1 - mu) G,  U = (1 - mu) G + mu M,  W <- W - lr s P(U)        P by five steps of `simple`

The rest is trained as in adamw.py. These values do not change when the recipe does, so that old races can be
compared with new ones.

Source: Keller Jordan, https://kellerjordan.github.io/posts/muon; NorMuon, arXiv 2510.05491.
"""

from contenders import adamw
from nanomuon.optim_groups import build_param_groups


def param_groups(
    model,
    *,
    matrix_lr=0.02,
    embedding_lr=0.1,
    unembedding_lr=0.01,
    scalar_lr=0.02,
    beta2=None,
    weight_decay=0.0,
):
    return build_param_groups(
        model,
        muon=dict(
            lr=matrix_lr,
            momentum=0.95,
            ns_steps=5,
            beta2=beta2,
            weight_decay=weight_decay,
            coefficients="simple",
            weight_decay_form="decoupled",
        ),
        adamw=dict(lr=scalar_lr, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.0),
        skip_keys=["value_gate"],
        roles={"wte": dict(lr=embedding_lr), "lm_head": dict(lr=unembedding_lr)},
    )


schedule = adamw.schedule
