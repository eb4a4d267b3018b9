"""Dion2: only the largest quarter of the rows is orthogonalized, and the rest waits in the momentum.

    M <- M + G,  K = the rows of M with the largest sums of absolute values
    W_K <- W_K - lr s P(M_K),  M_K <- mu M_K        error feedback: other rows of M keep all they have

Columns in place of rows where the matrix is tall. By the clock, not by the step.

Source: "Dion2: A Simple Method to Shrink Matrix in Muon", arXiv 2512.16928; https://github.com/microsoft/dion
(fraction .25, mu .95).
"""

import math

import torch

from nanomuon import recipe
from nanomuon.orthogonalize import orthogonalize

DIAL = ("fraction", 0.125, 0.5)


def state(m, n):
    return {"accumulated": (m, n)}


def selected_rows(M, ok, fraction, mu, ns_dtype):
    """(k, m, n): the polar factor of the selected rows of M, and zeros. M: (k, m, n), decayed in place."""
    count = math.ceil(fraction * M.size(1))
    rows = M.abs().sum(dim=2).topk(count, dim=1).indices.unsqueeze(2)  # (k, count, 1)
    elements = rows.expand(-1, -1, M.size(2))
    P = orthogonalize(M.gather(1, elements), ns_dtype=ns_dtype).to(M.dtype)  # (k, count, n)
    X = torch.zeros_like(M).scatter(1, elements, P)
    is_selected = torch.zeros_like(M[:, :, :1]).scatter(1, rows, 1.0)  # (k, m, 1)
    M.mul_(1 - (1 - mu) * is_selected * ok)
    return X


def param_groups(model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2, fraction=0.25, mu=0.95):
    def direction(U, kept, ok, square_weight):
        """U: (k, m, n), the mean gradients, since the group has momentum 0."""
        M = kept["accumulated"]
        M.add_(U * ok)
        if M.size(1) > M.size(2):
            X = selected_rows(M.mT, ok, fraction, mu, model.compute_dtype).mT
        else:
            X = selected_rows(M, ok, fraction, mu, model.compute_dtype)
        return X, torch.ones_like(square_weight)

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
