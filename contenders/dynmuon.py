"""DynMuon: singular values to a power that falls over the run, in place of all to 1.

    M = U S V^T,  W <- W - lr s U S^p V^T        S of M / ||M||_F
    p = p_min + (p_max - p_min) / (1 + exp((t/T - center) / width))

p above 0 follows the strong directions at first, slightly below 0 it favours the weak ones later. Exact, by
the eigenvalues of the Gram matrix, where the released code approximates by polynomials and takes M itself for
p from .25 on. Singular values below 1e-3 of the norm count as that in the factor S^(p-1).

Source: "DynMuon: A Dynamic Spectral Shaping View of Muon", arXiv 2605.17109;
https://github.com/fzwark/DynMuon (1, -.25, .04, .04), where the norm's power p is a factor too.
"""

import torch

from nanomuon import recipe

DIAL = ("p_min", -0.5, 0.5)
SMALLEST = 1e-3  # of the singular values, in parts of the Frobenius norm


def shaped(M, p):
    """U S^p V^T of M / ||M||_F. M: (k, m, n), p: (k, 1, 1)."""
    if M.size(1) > M.size(2):
        return shaped(M.mT, p).mT
    M = M / torch.linalg.matrix_norm(M, keepdim=True).clamp(min=1e-20)
    values, vectors = torch.linalg.eigh(M @ M.mT)  # (k, m), squares of singular values; (k, m, m)
    powers = values.clamp(min=SMALLEST**2).unsqueeze(1) ** ((p - 1) / 2)  # (k, 1, m)
    return (vectors * powers) @ (vectors.mT @ M)


def param_groups(
    model,
    batch=None,
    steps=None,
    *,
    matrix_lr=0.02,
    weight_decay=0.2,
    p_max=1.0,
    p_min=-0.25,
    center=0.04,
    width=0.04,
):
    def direction(U, kept, ok, square_weight):
        """square_weight: 1 - beta2, and beta2 is the share of the run that is over (see schedule)."""
        share = 1 - square_weight  # (k, 1, 1)
        p = p_min + (p_max - p_min) * torch.sigmoid((center - share) / width)
        return shaped(U, p), torch.ones_like(square_weight)

    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)
    for group in groups:
        if group["kind"] == "muon":
            group["direction"] = direction
    return groups


def schedule(group, step, steps):
    values = recipe.schedule(group, step, steps)
    if group["kind"] == "muon":
        values["beta2"] = step / steps  # nothing else reads it: it tells the direction where the run is
    return values
