"""Radial brake: a step may turn a matrix freely, but lengthens it by half of what it would.

    r = <u, W> / ||W||, the part of the step u along W, halved if it is outward
    W <- (W + u with that part) at the length ||W|| + r

The second line also takes away the growth that turning by a finite angle brings. It is in the place of weight
decay, which there is none of. A matrix that is still zero is left as it is.

Source: modded-nanogpt, track 3, 2026-05-11 (2,990 steps).
"""

import torch

from nanomuon import recipe
from nanomuon.optim import DistMuonAdamW

DIAL = ("outward", 0.0, 1.0)


def total(matrices):
    """Sums over each matrix: (1, 1), or (E, 1, 1) of (E, m, n)."""
    return matrices.sum(dim=(-2, -1), keepdim=True)


def braked(old, new, outward):
    """The weights after the step from `old` to `new`, both (m, n) or (E, m, n)."""
    length = total(old.square()).sqrt()
    unit = old / length.clamp(min=1e-20)
    along = total((new - old) * unit)
    kept = torch.where(along > 0, outward * along, along)
    turned = new + (kept - along) * unit
    turned_length = total(turned.square()).sqrt()
    return torch.where(length > 0, turned * ((length + kept) / turned_length.clamp(min=1e-20)), new)


def build_optimizer(model, batch=None, steps=None, *, matrix_lr=0.02, outward=0.5):
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=0.0)
    optimizer = DistMuonAdamW(groups, ns_dtype=model.compute_dtype)
    matrices = []
    for group in optimizer.param_groups:
        if group["kind"] == "muon":
            matrices += group["params"]
    before = {}  # parameter -> its weights before the step

    @torch.no_grad()
    def remember(optimizer, arguments, keywords):
        for param in matrices:
            before[param] = param.clone()

    @torch.no_grad()
    def brake(optimizer, arguments, keywords):
        for param in matrices:
            param.copy_(braked(before.pop(param), param, outward))

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(brake)
    return optimizer
