"""MuonEq: the rows of the momentum get equal norms before Newton-Schulz.

    W <- W - lr s P(D M)      D = diag(mean row norm / row norm)

An option of Muon groups here, `row_equilibrate`.

Source: "MuonEq: Balancing Before Orthogonalization with Lightweight Equilibration", arXiv 2603.28254.
"""

from nanomuon import recipe


def param_groups(model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2):
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)
    for group in groups:
        if group["kind"] == "muon":
            group["row_equilibrate"] = True
    return groups
