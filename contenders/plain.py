"""The recipe with plain Muon instead of NorMuon: no variance reduction.

    W <- W - lr s P(M)        P(U S V^T) = U V^T, s the scale by shape

It is the baseline for the files that change P and have no variance reduction.

Source: Keller Jordan, https://kellerjordan.github.io/posts/muon (Newton-Schulz by Polar Express).
"""

from nanomuon import recipe


def param_groups(model, **keywords):
    groups = recipe.param_groups(model, **keywords)
    for group in groups:
        if group["kind"] == "muon":
            group["beta2"] = None
    return groups
