"""Partial tail average: in the end the weights go part of the way to a running mean of the last steps.

    mean <- mean + (W - mean) / tau        from 73% of the run on, tau 5.5% of its steps
    W <- (1 - lambda) W + lambda mean      once, after the last step, lambda .6

A full average (lambda 1) lags behind weights that are still descending. Of all parameters but the token
embedding.

Source: modded-nanogpt, track 3, 2026-06-11 (tail EMA: from step 2,000 of 2,720, tau 150).
"""

import torch

from nanomuon import recipe
from nanomuon.optim import DistMuonAdamW
from nanomuon.optim_state import like_param, local

DIAL = ("blend", 0.2, 1.0)


def build_optimizer(model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2):
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)
    optimizer = DistMuonAdamW(groups, ns_dtype=model.compute_dtype)
    optimizer.plan()
    for group in optimizer.param_groups:
        group.update(mean_weight=1.0, blend=0.0)  # the schedule writes both
        for param in group["params"]:
            mean = local(param).detach().clone()  # saved and loaded with the rest, in the parameter's layout
            optimizer.places[param]["mean"] = place = like_param(param, mean)
            optimizer.state[param]["mean"] = place.value

    @torch.no_grad()
    def average(optimizer, arguments, keywords):
        for group in optimizer.param_groups:
            for param in group["params"]:
                weights, mean = local(param), local(optimizer.state[param]["mean"])
                mean.lerp_(weights, group["mean_weight"])
                weights.lerp_(mean, group["blend"])

    optimizer.register_step_post_hook(average)
    return optimizer


def schedule(group, step, steps, *, start=0.73, tau=0.055, blend=0.6):
    values = recipe.schedule(group, step, steps)
    values["mean_weight"] = 1.0  # the mean is the weights themselves
    if step / steps > start:
        values["mean_weight"] = min(1.0, 1 / (tau * steps))
    is_embedding = "wte.weight" in group["names"]
    is_last = step == steps - 1
    values["blend"] = blend if is_last and not is_embedding else 0.0
    return values
