"""Contra-Muon subtracts a little of the momentum itself, so that weak directions get more than strong ones.

    X = P(M) - c/2 M / ||M||_2          ||M||_2 the largest singular value, by power iteration
    W <- W - lr s X ||P(M)||_F / ||X||_F

Singular values become 1 - c/2 sigma / sigma_max, times a common factor. c = 0.4 as in the record.

Source: https://github.com/nilin/contra-muon; modded-nanogpt, track 3, 2026-05-01 (3,225 steps), where it was
followed by variance reduction by row.
"""

import torch

from nanomuon import recipe
from nanomuon.orthogonalize import orthogonalize

DIAL = ("c", 0.1, 0.8)
POWER_ITERATIONS = 5


def largest_singular_value(M):
    """(k, 1, 1) of (k, m, n): an estimate from below, starting from the sum of the columns."""
    v = torch.ones_like(M[:, :1]).mT  # (k, n, 1)
    for _ in range(POWER_ITERATIONS):
        u = torch.nn.functional.normalize(M @ v, dim=1)
        v = torch.nn.functional.normalize(M.mT @ u, dim=1)
    return torch.linalg.matrix_norm(M @ v, keepdim=True)


def contra(U, c, ns_dtype=None):
    """(X, gain) of U, (k, m, n)."""
    P = orthogonalize(U, ns_dtype=ns_dtype).to(U.dtype)
    X = P - c / 2 * U / largest_singular_value(U).clamp(min=1e-10)
    norm = torch.linalg.matrix_norm(X, keepdim=True)  # (k, 1, 1)
    return X, torch.linalg.matrix_norm(P, keepdim=True) / norm.clamp(min=1e-10)


def param_groups(model, *, c=0.4, **keywords):
    groups = recipe.param_groups(model, **keywords)

    def direction(U, buffers, ok, hyper):
        return contra(U, c, model.compute_dtype)

    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction, beta2=None)
    return groups
