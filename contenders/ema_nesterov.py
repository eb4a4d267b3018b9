"""EMA-Nesterov: gradients are taken ahead of the weights, along a running mean of the steps.

    x' = A(x + beta m),  m <- gamma m + (1 - gamma) (x' - x)        A a step of the recipe, of all parameters

beta is 0 in the first tenth and in the last third of the run, in between `lookahead` times the course of the
rate. The model's weights are x + beta m, which is x in the end. `plain=True`: on plain Muon.

Source: arXiv 2605.25395; modded-nanogpt, track 3, 2026-05-22 (gamma .99; beta .3 on Aurora, .6 on Muon).
"""

import torch

from nanomuon import recipe
from nanomuon.optim import DistMuonAdamW
from nanomuon.optim_state import like_param, local

DIAL = ("lookahead", 0.1, 0.8)
FIRST, LAST = 0.1, 0.67  # shares of the run between which there is a lookahead


def build_optimizer(
    model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2, gamma=0.99, plain=False
):
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)
    for group in groups:
        if plain and group["kind"] == "muon":
            group["beta2"] = None
    optimizer = DistMuonAdamW(groups, ns_dtype=model.compute_dtype)
    optimizer.plan()
    for group in optimizer.param_groups:
        group["lookahead"] = 0.0  # beta, which the schedule writes
        for param in group["params"]:
            kept = {"point": local(param).detach().clone(), "mean_step": torch.zeros_like(local(param))}
            for name, tensor in kept.items():  # saved and loaded with the rest, in the parameter's own layout
                optimizer.places[param][name] = place = like_param(param, tensor)
                optimizer.state[param][name] = place.value

    @torch.no_grad()
    def look_ahead(optimizer, arguments, keywords):
        for group in optimizer.param_groups:
            for param in group["params"]:
                weights = local(param)
                state = {name: local(tensor) for name, tensor in optimizer.state[param].items()}
                state["mean_step"].lerp_(weights - state["point"], 1 - gamma)
                state["point"].copy_(weights)
                weights.add_(state["mean_step"], alpha=group["lookahead"])

    optimizer.register_step_post_hook(look_ahead)
    return optimizer


def schedule(group, step, steps, *, lookahead=0.3):
    values = recipe.schedule(group, step, steps)
    values["lookahead"] = 0.0
    if FIRST <= step / steps < LAST and group["lr"]:
        values["lookahead"] = lookahead * values["lr"] / group["lr"]
    return values
