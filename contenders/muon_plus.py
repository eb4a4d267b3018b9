"""Muon+: what Newton-Schulz leaves is normalized once more.

    W <- W - lr s P sqrt(min(m, n)) / ||P||_F        P the approximate polar factor of the momentum

An option of Muon groups here, `renormalize`: to the Frobenius norm that an exact polar factor has. The paper
also has norms by row and by column; the variance reduction of the recipe does much of that.

Source: "Muon+", arXiv 2602.21545.
"""

from nanomuon import recipe


def param_groups(model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2):
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)
    for group in groups:
        if group["kind"] == "muon":
            group["renormalize"] = True
    return groups
