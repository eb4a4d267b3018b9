"""NAMO: the polar factor with one step size for each matrix, Adam's: large where gradients agree.

    M <- mu1 M + (1 - mu1) G,  v <- mu2 v + (1 - mu2) ||G||_F^2,  N = (1 - mu1) G + mu1 M
    W <- W - lr a s P(N)        a = sqrt(1 - mu2^t) / (1 - mu1^t) ||N||_F / sqrt(v)

The scale is the recipe's in place of 0.2 sqrt(max(m, n)), and weight decay is not multiplied by a.

Source: "Adam Improves Muon: Adaptive Moment Estimation with Orthogonalized Momentum", arXiv 2602.17080, and
https://github.com/minxin-zhg/namo (mu1 .95, mu2 .99, Nesterov).
"""

import torch

from nanomuon import recipe
from nanomuon.orthogonalize import orthogonalize


def state(m, n):
    return {"exp_avg": (m, n), "squared_norm": (1, 1), "count": (1, 1)}


def param_groups(model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2, mu1=0.95, mu2=0.99):
    def direction(U, kept, ok, square_weight):
        """U: (k, m, n), the mean gradients, since the group has momentum 0."""
        M, v, count = kept["exp_avg"], kept["squared_norm"], kept["count"]
        M.lerp_(U, (1 - mu1) * ok)
        v.lerp_(U.square().sum(dim=(1, 2), keepdim=True), (1 - mu2) * ok)
        count += ok
        N = U.lerp(M, mu1)
        step = count.clamp(min=1)
        correction = (1 - mu2**step).sqrt() / (1 - mu1**step)  # (k, 1, 1)
        norm = torch.linalg.matrix_norm(N, keepdim=True)
        X = orthogonalize(N, ns_dtype=model.compute_dtype)
        return X, correction * norm / (v.sqrt() + 1e-8)

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
