"""The recipe with a cooldown that is a power of what is left of the run.

    rate(t) = lr min(1, ((T - t) / (share T))^power)        power 1.2 as in the record; 1 is the recipe's

Source: modded-nanogpt, track 3: power 1.5 (2026-05-11, KL-SOAP-H), 1.2 in the records since ("PowerCool").
"""

from nanomuon import recipe
from nanomuon.recipe import param_groups  # noqa: F401 - the recipe's groups are this file's

DIAL = ("power", 1.0, 2.0)


def schedule(group, step, steps, *, power=1.2, share=1.0):
    values = recipe.schedule(group, step, steps, warmdown_ratio=share)
    fall = values["lr"] / group["lr"] if group["lr"] else 0.0
    values["lr"] = group["lr"] * fall**power
    return values
