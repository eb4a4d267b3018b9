"""MUD (momentum decorrelation): one triangular solve in place of Newton-Schulz.

    Q <- diag(1 / row norm) Q,  T = lower triangle of Q Q^T,  Q <- T^-1 Q,  Q <- diag(1 / row norm) Q
    W <- W - lr s Q                        beginning with Q = M, one pass

Rows that are orthonormal are a fixed point. Of a tall matrix, whose rows cannot be, the transpose is taken.
The paper's scale, 0.2 sqrt(max(m, n)), is the recipe's `shape` here, so that one rate means the same. By the
clock, not by the step.

Source: "Beyond Muon: MUD (MomentUm Decorrelation) for Faster Transformer Training", arXiv 2603.17970.
"""

import torch

from nanomuon import recipe


def decorrelated(Q, passes):
    """(k, m, n) with rows (of a tall matrix columns) of norm 1 that are nearly orthogonal; zeros stay."""
    if Q.size(1) > Q.size(2):
        return decorrelated(Q.mT, passes).mT
    for _ in range(passes):
        Q = torch.nn.functional.normalize(Q, dim=2, eps=1e-10)
        # It reads the lower triangle alone, and takes the diagonal, the squared norms, to be 1
        Q = torch.linalg.solve_triangular(Q @ Q.mT, Q, upper=False, unitriangular=True)
        Q = torch.nn.functional.normalize(Q, dim=2, eps=1e-10)
    return Q


def param_groups(model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2, passes=1):
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)

    def direction(U, kept, ok, square_weight):
        return decorrelated(U, passes), torch.ones_like(square_weight)

    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction, beta2=None)
    return groups
