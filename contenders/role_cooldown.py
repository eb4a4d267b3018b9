"""The recipe with cooldowns of different length: long for Muon's matrices, short for what AdamW trains.

    rate(t) = lr min(1, (T - t) / (share T))        share .8 for matrices, .4 for the rest

Source: modded-nanogpt, track 3, 2026-05-09 (split cooldown, 3,175 steps against 3,225).
"""

from nanomuon import recipe
from nanomuon.recipe import param_groups  # noqa: F401 - the recipe's groups are this file's

DIAL = ("matrix_share", 0.5, 1.0)


def schedule(group, step, steps, *, matrix_share=0.8, other_share=0.4):
    share = matrix_share if group["kind"] == "muon" else other_share
    return recipe.schedule(group, step, steps, warmdown_ratio=share)
