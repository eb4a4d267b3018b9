"""Muown: every row has a length and a direction of its own; Adam trains the lengths, Muon the directions.

    W = g v / ||v|| by row
    v <- v - lr 0.2 sqrt(max(m, n)) P(momentum of dL/dv),  g <- g - lr Adam(dL/dg)
    dL/dg = <G, v/||v||>,  dL/dv = g/||v|| (G - v/||v|| dL/dg)

v is not normalized: as it grows, its direction turns more slowly. Rows that the model starts at zero get
length 0 and a random direction. No weight decay.

Source: "Muown: Row-Norm Control for Muon Optimization", arXiv 2605.10797; https://github.com/kcc-lion/muown;
modded-nanogpt, track 3, 2026-05-08 (rate .0035, betas .9 and .95).
"""

import torch
from torch.nn.functional import normalize

from nanomuon import recipe
from nanomuon.optim import DistMuonAdamW
from nanomuon.optim_state import named_parameters, whole
from nanomuon.orthogonalize import orthogonalize

MOMENTUM, BETA1, BETA2, EPS = 0.95, 0.9, 0.95, 1e-8


def difference(U, kept, ok, rate, ns_dtype):
    """W before the step minus W after it. U: (k, m, n), the mean gradients. rate: 0 where ok is."""
    v, g, M = kept["v"], kept["g"], kept["v_momentum"]  # (k, m, n), (k, m, 1), (k, m, n)
    unit = normalize(v, dim=2)
    before = g * unit
    g_grad = (U * unit).sum(dim=2, keepdim=True)
    v_grad = g / torch.linalg.vector_norm(v, dim=2, keepdim=True) * (U - unit * g_grad)
    M.lerp_(v_grad, (1 - MOMENTUM) * ok)
    P = orthogonalize(v_grad.lerp(M, MOMENTUM), ns_dtype=ns_dtype).to(v.dtype)
    v.sub_(P * (0.2 * max(v.shape[1:]) ** 0.5 * rate))
    kept["g_mean"].lerp_(g_grad, (1 - BETA1) * ok)
    kept["g_square"].lerp_(g_grad.square(), (1 - BETA2) * ok)
    kept["count"].add_(ok)
    step = kept["count"].clamp(min=1)
    mean, square = kept["g_mean"] / (1 - BETA1**step), kept["g_square"] / (1 - BETA2**step)
    g.sub_(mean / (square.sqrt() + EPS) * rate)
    return before - g * normalize(v, dim=2)


def state(m, n):
    rows = {"g": (m, 1), "g_mean": (m, 1), "g_square": (m, 1), "count": (1, 1)}
    return {"v": (m, n), "v_momentum": (m, n), **rows}


def build_optimizer(model, batch=None, steps=None, *, matrix_lr=0.0035):
    def direction(U, kept, ok, square_weight):
        X = difference(U, kept, ok, square_weight * ok, model.compute_dtype)  # see schedule
        return X, torch.ones_like(ok)

    direction.state = state
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=0.0)
    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction, momentum=0.0, scale=lambda m, n: 1.0)
    optimizer = DistMuonAdamW(groups, ns_dtype=model.compute_dtype)
    random = torch.Generator().manual_seed(0)  # the same on all ranks
    saved = optimizer.full_state_dict()
    for name, param, group in named_parameters(optimizer.param_groups):
        if group["kind"] == "muon":
            weight = whole(param.detach())
            g = torch.linalg.vector_norm(weight, dim=-1, keepdim=True)
            other = normalize(torch.randn(weight.shape, generator=random, dtype=weight.dtype), dim=-1)
            v = torch.where(g > 0, weight, other.to(weight.device))
            saved["state"][name].update(v=v, g=g)
    optimizer.load_state_dict(saved, hyperparameters="keep")
    return optimizer


def schedule(group, step, steps):
    values = recipe.schedule(group, step, steps)
    if group["kind"] == "muon":  # the direction needs the rate itself, and gives back the whole difference
        return {"lr": 1.0, "beta2": 1 - values["lr"]}
    return values
