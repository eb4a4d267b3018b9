"""Rates that are flat at first, then fall as 1 - sqrt to zero.

    lr = lr_0 (1 - sqrt(max(0, (t - t_0) / (T - t_0))))        t_0 = 0.4 T

Source: "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", arXiv 2405.18392;
modded-nanogpt, pull request 343.
"""

from nanomuon import recipe

FLAT = 0.4  # fraction of the run


def schedule(group, step, steps):
    values = recipe.schedule(group, step, steps)
    fallen = max(0.0, (step / steps - FLAT) / (1 - FLAT))
    return {**values, "lr": group["lr"] * (1 - fallen**0.5)}
