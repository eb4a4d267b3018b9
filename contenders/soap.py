"""SOAP for the matrices: Adam in the eigenbasis of Shampoo's preconditioners.

    L <- beta2 L + (1 - beta2) G G^T,  R <- beta2 R + (1 - beta2) G^T G        with eigenvectors Q_L, Q_R
    M <- beta1 M + (1 - beta1) G,      V <- beta2 V + (1 - beta2) (Q_L^T G Q_R)^2
    W <- W - lr (Q_L [(Q_L^T M Q_R) / sqrt(V)] Q_R^T + lambda W)        with Adam's bias corrections

The other parameters and the schedules of rates and decay are the recipe's.

The first gradient only initializes the bases (eigh); every tenth step one orthogonal iteration (QR) updates
them.

Source: "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321; github.com/nikhilvyas/SOAP
"""

import torch

from nanomuon import recipe

BETA1, BETA2, EPS = 0.95, 0.95, 1e-8


def unscaled(m, n):
    return 1.0


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


def param_groups(model, *, matrix_lr=0.003, weight_decay=0.1, every=10, **keywords):
    def direction(U, buffers, ok, hyper):
        """U: (k, m, n), the mean gradients, since the group has no momentum."""
        M, V, count = buffers["exp_avg"], buffers["exp_avg_sq"], buffers["count"]
        left, right = buffers["left"], buffers["right"]  # (k, m, m), (k, n, n)
        moves = ok * (count > 0)  # (k, 1, 1)
        M.lerp_(U, (1 - BETA1) * moves)
        V.lerp_((left.mT @ U @ right).square(), (1 - BETA2) * moves)
        step = count.clamp(min=1)
        bias1, bias2 = 1 - BETA1**step, 1 - BETA2**step
        N = (left.mT @ M @ right / bias1) / ((V / bias2).sqrt() + EPS)
        X = left @ N @ right.mT

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
            group.update(lr=matrix_lr, weight_decay=weight_decay, weight_decay_form="decoupled")
            group.update(direction=direction, momentum=None, beta2=None, scale=unscaled)
    return groups
