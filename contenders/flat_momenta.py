"""Momentum and beta1 that do not depend on the length of the run.

The recipe's short runs average over fewer gradients: 0.90 and 0.62 at 300 steps, 0.95 and 0.8 from 2,289 on.

Source: modded-nanogpt and nanochat (momentum .95, beta1 .8 at every length).
"""

from nanomuon import recipe


def param_groups(model, *, momentum=0.95, beta1=0.8, **keywords):
    groups = recipe.param_groups(model, **keywords)
    for group in groups:
        if group["kind"] == "muon":
            group["momentum"] = momentum
        else:
            group["betas"] = (beta1, group["betas"][1])
    return groups
