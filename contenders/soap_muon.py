"""SOAP before Newton-Schulz: the momentum is scaled in Shampoo's eigenbasis, then orthogonalized.

    L, R, M, V and the eigenvectors Q_L, Q_R as in soap.py
    W <- W - lr s P(Q_L [(Q_L^T M Q_R) / sqrt(V)] Q_R^T)

QR runs every 10 steps (every step in the record of 2,750 steps). The first gradient only initializes the
bases.

Source: https://github.com/nikhilvyas/SOAP_MUON (betas .95 and .98; its version for modded-nanogpt also takes
signed roots of the entries, which is left out here); modded-nanogpt, track 3, 2026-05-04 and 2026-06-09.
"""

from contenders.soap import buffers_of, turn_basis
from nanomuon import recipe
from nanomuon.orthogonalize import orthogonalize

BETA1, BETA2, EPS = 0.95, 0.98, 1e-15


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
