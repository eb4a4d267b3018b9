"""SOAP before Newton-Schulz: the momentum is scaled in Shampoo's eigenbasis, then orthogonalized.

    L, R, M, V and the eigenvectors Q_L, Q_R as in soap.py
    W <- W - lr s P(Q_L [(Q_L^T M Q_R) / sqrt(V)] Q_R^T)

QR runs every 10 steps (every step in the record of 2,750 steps). The first gradient only initializes the
bases.

Source: https://github.com/nikhilvyas/SOAP_MUON (betas .95 and .98; its version for modded-nanogpt also takes
signed roots of the entries, which is left out here); modded-nanogpt, track 3, 2026-05-04 and 2026-06-09.
"""

import torch

from nanomuon import recipe
from nanomuon.orthogonalize import orthogonalize

BETA1, BETA2, EPS = 0.95, 0.98, 1e-15


def turn_basis(Q, gram, V, first, due):
    """Set Q (k, s, s) to eigenvectors, or do one iteration, which also sorts Q's columns and V's rows."""
    # The first gradients leave most of the space of a long side undetermined. Without this ramp rounding
    # would choose its basis, a different one for each number of ranks
    ramp = torch.linspace(0, 1e-4, gram.size(1), dtype=gram.dtype, device=gram.device)
    gram = gram + torch.diag(ramp) * gram.diagonal(dim1=1, dim2=2).mean(dim=1).view(-1, 1, 1)
    estimates = (Q * (gram @ Q)).sum(dim=1, keepdim=True)  # (k, 1, s) eigenvalues
    order = estimates.argsort(dim=2, descending=True)
    moved = torch.linalg.qr(gram @ Q.gather(2, order.expand_as(Q))).Q
    V.copy_(torch.where(due, V.gather(1, order.mT.expand_as(V)), V))
    Q.copy_(torch.where(due, moved, Q))
    eigenvectors = torch.linalg.eigh(gram).eigenvectors.flip(2)
    Q.copy_(torch.where(first, eigenvectors, Q))


def buffers_of(m, n):
    grams = {"left_gram": (m, m), "right_gram": (n, n), "left": (m, m), "right": (n, n)}
    return {"exp_avg": (m, n), "exp_avg_sq": (m, n), "count": (1, 1), **grams}


def param_groups(model, *, every=10, **keywords):
    def direction(U, buffers, ok, hyper):
        """U: (k, m, n), the mean gradients, since the group has no momentum."""
        M, V, count = buffers["exp_avg"], buffers["exp_avg_sq"], buffers["count"]
        left, right = buffers["left"], buffers["right"]  # (k, m, m), (k, n, n)
        moves = ok * (count > 0)  # (k, 1, 1)
        M.lerp_(U, (1 - BETA1) * moves)
        V.lerp_((left.mT @ U @ right).square(), (1 - BETA2) * moves)
        N = left.mT @ M @ right / (V.sqrt() + EPS)
        X = orthogonalize(left @ N @ right.mT, ns_dtype=model.compute_dtype)

        buffers["left_gram"].lerp_(U @ U.mT, (1 - BETA2) * ok)
        buffers["right_gram"].lerp_(U.mT @ U, (1 - BETA2) * ok)
        first = (count == 0) & (ok > 0)
        due = (count > 0) & (count % every == 0) & (ok > 0)
        if (first | due).any():  # here the host waits for the GPU
            turn_basis(left, buffers["left_gram"], V, first, due)
            # V.mT is a view, whose rows are the columns of V
            turn_basis(right, buffers["right_gram"], V.mT, first, due)
        count += ok
        return X, moves

    direction.buffers = buffers_of
    groups = recipe.param_groups(model, **keywords)
    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction, beta2=None, momentum=None)
    return groups
