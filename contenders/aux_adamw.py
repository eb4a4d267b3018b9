"""The recipe with other averages of AdamW's second moments, by role.

    v <- beta2 v + (1 - beta2) g^2        beta2 .997 for scalars, taps and gates; .99 for embedding and head

In the record, raising only the one-dimensional parameters' beta2, .99 to .997, saved 45 of 2,875 steps.
The recipe has .99 for all. Until 2026-11-28 it had .95, see docs/recipe.md.

Source: modded-nanogpt, track 3, 2026-06-09 (auxiliary beta2 split, 2,750 steps).
"""

from nanomuon import recipe

DIAL = ("head", 0.95, 0.999)


def param_groups(model, *, embedding=0.99, head=0.99, scalars=0.997, **keywords):
    groups = recipe.param_groups(model, **keywords)
    beta2_of = {"wte.weight": embedding, "lm_head.weight": head}
    for group in groups:
        if group["kind"] == "adamw":
            group["betas"] = (group["betas"][0], beta2_of.get(group["names"][0], scalars))
    return groups
