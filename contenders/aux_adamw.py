"""The recipe with longer averages of AdamW's second moments, by role.

    v <- beta2 v + (1 - beta2) g^2        beta2 .997 for scalars, taps and gates, .99 for embeddings and head

In the record, raising only the one-dimensional parameters' beta2, .99 to .997, saved 45 of 2,875 steps.
The recipe has .95 for all.

Source: modded-nanogpt, track 3, 2026-06-09 (auxiliary beta2 split, 2,750 steps).
"""

from nanomuon import recipe

DIAL = ("beta2", 0.95, 0.999)
SCALARS = ("x0_scalars", "taps")


def param_groups(model, *, beta2=0.99, scalar_beta2=0.997, **keywords):
    groups = recipe.param_groups(model, **keywords)
    for group in groups:
        is_scalar = any(name.endswith(SCALARS) for name in group["names"])
        if group["kind"] == "adamw":
            group["betas"] = (group["betas"][0], scalar_beta2 if is_scalar else beta2)
    return groups
