"""NorMuon as published: a second moment for every output row, also in wide matrices.

    X = P(M)                          the polar factor of the momentum
    v <- beta2 v + (1 - beta2) mean over columns of X^2       (m, 1)
    W <- W - lr s X / sqrt(v), scaled back to the norm of X

The recipe instead has one value per index of the longer side: in a wide matrix, per column.

Source: "NorMuon", arXiv 2510.05491.
"""

import torch

from nanomuon import recipe
from nanomuon.orthogonalize import orthogonalize


def buffers_of(m, n):
    return {"second_momentum_buffer": (m, 1)}


def param_groups(model, *, beta2=0.95, **keywords):
    def direction(U, buffers, ok, hyper):
        """U: (k, m, n). buffers["second_momentum_buffer"]: (k, m, 1)."""
        X = orthogonalize(U, ns_dtype=model.compute_dtype).to(ok.dtype)  # (k, m, n)
        second = buffers["second_momentum_buffer"]
        second.lerp_(X.square().mean(dim=2, keepdim=True), hyper.one_minus_beta2 * ok)
        scaled = X * second.clamp(min=1e-10).rsqrt()
        norm_before = torch.linalg.matrix_norm(X, keepdim=True)  # (k, 1, 1)
        norm_after = torch.linalg.matrix_norm(scaled, keepdim=True)
        return scaled, norm_before / norm_after.clamp(min=1e-10)

    direction.buffers = buffers_of
    groups = recipe.param_groups(model, **keywords)
    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction, beta2=beta2)
    return groups
