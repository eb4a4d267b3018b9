"""The recipe with plain Muon instead of NorMuon: no variance reduction.

    W <- W - lr s P(M)        P(U S V^T) = U V^T, s the scale by shape

The files that change P without variance reduction are compared with this one.

Source: Keller Jordan, https://kellerjordan.github.io/posts/muon (Newton-Schulz by Polar Express).
"""

from nanomuon import recipe


def param_groups(model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2):
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)
    for group in groups:
        if group["kind"] == "muon":
            group["beta2"] = None
    return groups
