"""MuonEq: the rows of the momentum get equal norms before Newton-Schulz. Muon+: the norm is restored after.

    W <- W - lr s P(D M)      D = diag(mean row norm / row norm);  Muon+: ||P|| set to sqrt(min(m, n))

The second moment comes after both. Together they have been nanochat's default since July 2026; here no race
has distinguished them from ours.

Source: "MuonEq: Balancing Before Orthogonalization with Lightweight Equilibration", arXiv 2603.28254, and
"Muon+", arXiv 2602.21545.
"""

import torch

from nanomuon import recipe
from nanomuon.optim import second_moment_gain
from nanomuon.orthogonalize import orthogonalize


def equilibrated(U):
    """U (k, m, n) with rows of equal norm."""
    row_norm = torch.linalg.vector_norm(U, dim=2, keepdim=True)  # (k, m, 1)
    return U * (row_norm.mean(dim=1, keepdim=True) / row_norm.clamp(min=1e-7))


def renormalized(X):
    """X (k, m, n) with the norm of an exact polar factor."""
    norm = torch.linalg.matrix_norm(X, keepdim=True)  # (k, 1, 1)
    return X * (min(X.shape[1:]) ** 0.5 / norm.clamp(min=1e-7))


def buffers_of(m, n):
    return {"second_momentum_buffer": (m, 1) if m >= n else (1, n)}


def param_groups(model, *, equilibrate=True, renormalize=False, **keywords):
    groups = recipe.param_groups(model, **keywords)

    def direction(U, buffers, ok, hyper):
        U = equilibrated(U) if equilibrate else U
        X = orthogonalize(U, ns_dtype=model.compute_dtype).to(ok.dtype)
        X = renormalized(X) if renormalize else X
        m, n = X.shape[1:]
        v = X.square().mean(dim=2 if m >= n else 1, keepdim=True)
        return X, second_moment_gain(v, min(m, n), buffers["second_momentum_buffer"], ok, hyper)

    direction.buffers = buffers_of
    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction)
    return groups
