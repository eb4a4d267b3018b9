"""Row floor: no output row moves by less than a share of its own length.

    w_i <- w_i - lr u_i max(1, floor ||w_i|| / ||u_i||)        i a row, u the recipe's update, floor .38

A row that has grown is not left behind by updates that stay as they are. The floor does what weight decay is
for, which there is none of.

Source: modded-nanogpt, track 3: u/w-floor for whole matrices (2026-05-01, .35), by row (2026-06-19, .3825).
"""

import torch

from nanomuon import recipe
from nanomuon.optim import DistMuonAdamW

DIAL = ("floor", 0.2, 0.6)


def row_norms(matrix):
    return torch.linalg.vector_norm(matrix, dim=-1, keepdim=True)


def build_optimizer(model, batch=None, steps=None, *, matrix_lr=0.02, floor=0.3825):
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=0.0)
    optimizer = DistMuonAdamW(groups, ns_dtype=model.compute_dtype)
    muon_groups = [group for group in optimizer.param_groups if group["kind"] == "muon"]
    before = {}  # parameter -> its weights before the step

    @torch.no_grad()
    def remember(optimizer, arguments, keywords):
        for group in muon_groups:
            for param in group["params"]:
                before[param] = param.clone()

    @torch.no_grad()
    def lift(optimizer, arguments, keywords):
        for group in muon_groups:
            for param in group["params"]:
                old = before.pop(param)
                moved = param - old
                least = group["lr"] * floor * row_norms(old)
                factor = (least / row_norms(moved).clamp(min=1e-20)).clamp(min=1)
                param.copy_(old + moved * factor)

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(lift)
    return optimizer
