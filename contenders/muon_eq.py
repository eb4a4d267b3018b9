"""MuonEq: the rows of the momentum get equal norms before Newton-Schulz. Muon+: the norm is restored after.

    W <- W - lr s P(D M)      D = diag(mean row norm / row norm);  Muon+: ||P|| snapped to sqrt(min(m, n))

Both are options of Muon groups here, `row_equilibrate` and `renormalize`; together they are nanochat's
default since July 2026.

Source: "MuonEq: Balancing Before Orthogonalization with Lightweight Equilibration", arXiv 2603.28254, and
"Muon+", arXiv 2602.21545.
"""

from nanomuon import recipe


def param_groups(
    model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2, equilibrate=True, renormalize=False
):
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)
    for group in groups:
        if group["kind"] == "muon":
            group.update(row_equilibrate=equilibrate, renormalize=renormalize)
    return groups
