"""Two momenta: the direction is the polar factor of a mixture of a fast and a slow mean of the gradients.

    F <- lerp(F, G, 1 - fast),  S <- lerp(S, G, 1 - slow),  U = (1 - share) lerp(G, F, fast) + share S
    W <- W - lr s P(U)

A mean of one time scale forgets either the noise or the valley; two hold both.

Source: the bi-Maxwell momentum of modded-nanogpt, pull requests 340 and 357, as an idea: the constants here
are not theirs.
"""

import torch

from nanomuon import recipe
from nanomuon.orthogonalize import orthogonalize

DIAL = ("share", 0.1, 0.6)


def state(m, n):
    return {"fast": (m, n), "slow": (m, n)}


def param_groups(
    model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2, fast=0.9, slow=0.99, share=0.3
):
    def direction(U, kept, ok, square_weight):
        """U: (k, m, n), the mean gradients, since the group has momentum 0."""
        kept["fast"].lerp_(U, (1 - fast) * ok)
        kept["slow"].lerp_(U, (1 - slow) * ok)
        mixed = U.lerp(kept["fast"], fast).lerp(kept["slow"], share)
        return orthogonalize(mixed, ns_dtype=model.compute_dtype), torch.ones_like(ok)

    direction.state = state
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)
    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction, beta2=None, momentum=0.0)
    return groups


def schedule(group, step, steps):
    values = recipe.schedule(group, step, steps)
    values.pop("momentum", None)  # the direction has its own
    return values
