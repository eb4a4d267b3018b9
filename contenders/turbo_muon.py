"""Turbo-Muon: a scaling that makes the momentum almost orthogonal saves one of five Newton-Schulz steps.

    A = M M^T,  s_i = (sum over j of |A_ij|)^(-1/2),  X = diag(s) M        then ||X||_2 <= 1
    W <- W - lr s' NS4(X)

M is transposed where it is tall, so that A is of the short side. The four steps are the last ones of the
`quintic` set. The result is near the polar factor of diag(s) M, not of M. By the clock, not by the step.

Source: "Turbo-Muon: Accelerating Orthogonality-Based Optimization with Pre-Conditioning", arXiv 2512.04632;
https://github.com/thib-s/flash-newton-schulz
"""

import torch

from nanomuon import recipe
from nanomuon.orthogonalize import COEFFICIENTS, newton_schulz, newton_schulz_form

TABLE = COEFFICIENTS["quintic"][1:]


def almost_orthogonal(M):
    """(k, m, n) with the rows (of a tall matrix the columns) scaled so that no singular value is above 1."""
    if M.size(1) > M.size(2):
        return almost_orthogonal(M.mT).mT
    sums = (M @ M.mT).abs().sum(dim=2, keepdim=True)  # (k, m, 1)
    return M * sums.clamp(min=1e-20).rsqrt()


def param_groups(model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2):
    def direction(U, kept, ok, square_weight):
        """U: (k, m, n)."""
        # Of a square matrix, which is never worked in the Gram form: these steps are the plain ones
        _, dtype = newton_schulz_form(1, 1, len(TABLE), U.device.type, model.compute_dtype)
        X = almost_orthogonal(U)
        X = newton_schulz(X if X.dtype == torch.float64 else X.to(dtype), TABLE, tall=X.size(1) > X.size(2))
        return X, torch.ones_like(square_weight)

    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)
    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction, beta2=None)
    return groups
