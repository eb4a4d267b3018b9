"""Aurora: a polar factor whose rows have equal norm, so that no neuron of a tall matrix is left behind.

    D = diag(1 / row norm of M)
    X = P(D M);  D <- D (n/m / (row norm of X)^2)^(1/2);  X = P(D M)        m > n
    W <- W - lr s X

n/m is the squared norm of each of the m rows if all are equal and the columns orthonormal. A wide matrix is
first transposed. The polar factor of a square matrix already has rows of norm 1, so there it is plain Muon.

Source: "Aurora: A Leverage-Aware Spectral Optimizer", arXiv 2606.27715, and
https://github.com/tilde-research/aurora-release (two iterations, exponent 1/2).
"""

import torch

from nanomuon import recipe
from nanomuon.orthogonalize import orthogonalize


def even_rows(M, iterations, ns_dtype):
    """(k, m, n), m > n, with nearly orthonormal columns and rows of nearly equal norm."""
    m, n = M.shape[1:]
    D = 1 / torch.linalg.vector_norm(M, dim=2, keepdim=True).clamp(min=1e-10)  # (k, m, 1)
    X = orthogonalize(D * M, ns_dtype=ns_dtype).to(M.dtype)
    for _ in range(iterations - 1):
        squared = X.square().sum(dim=2, keepdim=True)  # (k, m, 1)
        D = D * (n / m / squared.clamp(min=1e-10)).sqrt()
        X = orthogonalize(D * M, ns_dtype=ns_dtype).to(M.dtype)
    return X


def aurora(U, iterations, ns_dtype=None):
    """U: (k, m, n). Returns (k, m, n)."""
    m, n = U.shape[1:]
    if m > n:
        return even_rows(U, iterations, ns_dtype)
    if m < n:
        return even_rows(U.mT, iterations, ns_dtype).mT
    return orthogonalize(U, ns_dtype=ns_dtype)


def param_groups(model, *, iterations=2, **keywords):
    groups = recipe.param_groups(model, **keywords)

    def direction(U, buffers, ok, hyper):
        return aurora(U, iterations, model.compute_dtype), torch.ones_like(ok)

    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction, beta2=None)
    return groups
