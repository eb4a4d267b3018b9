"""The usual momentum up to a fraction of the run, then a mix of a fast and a slow one (bi-Maxwell).

    M_i <- lerp(M_i, G, 1 - mu_i)        mu = the recipe's (.95 in long runs), .85, .98
    U = G + mu_0 (M_0 - G) before `start`, then the same sum over i = 1, 2 with weights .4385, .5615

Source: modded-nanogpt, pull requests 339 and 340 (from step 1,000 of 2,690 on).
"""

import torch

from nanomuon import recipe
from nanomuon.optim import normuon

FAST, SLOW = 0.85, 0.98
FAST_WEIGHT = 0.4385


def buffers_of(m, n):
    momenta = {"usual": (m, n), "fast": (m, n), "slow": (m, n), "count": (1, 1)}
    return {**momenta, "second_momentum_buffer": (m, 1) if m >= n else (1, n)}


def param_groups(model, *, start=0.37, steps=2000, **keywords):
    groups = recipe.param_groups(model, steps=steps, **keywords)

    def direction(U, buffers, ok, hyper):
        nesterov = {}
        for name, momentum in {"usual": usual_momentum, "fast": FAST, "slow": SLOW}.items():
            buffers[name].lerp_(U, (1 - momentum) * ok)
            nesterov[name] = U.lerp(buffers[name], momentum)
        mixed = nesterov["slow"].lerp(nesterov["fast"], FAST_WEIGHT)
        buffers["count"].add_(ok)
        U = torch.where(buffers["count"] > start * steps, mixed, nesterov["usual"])
        second_moment = {"second_momentum_buffer": buffers["second_momentum_buffer"]}
        options = dict(coefficients="polar_express", ns_steps=5, ns_dtype=model.compute_dtype)
        return normuon(U, second_moment, ok, hyper, **options)

    direction.buffers = buffers_of
    for group in groups:
        if group["kind"] == "muon":
            usual_momentum = group["momentum"]
            group.update(direction=direction, momentum=None)
    return groups
