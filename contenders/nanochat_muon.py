"""nanochat's Muon of 2026: momentum rises, then falls; beta2 0.9; equal rows before, a fixed norm after.

    momentum    .85 -> .97 over `rise` steps, then .97, then .97 -> .90 over the last `fall` of the run
    direction   MuonEq and Muon+, see muon_eq.py, then the second moment with beta2 = .9

Rates and weight decay, and their schedules, are the recipe's.

Source: nanochat, commit 92d63d4, `get_muon_momentum` in scripts/base_train.py and nanochat/optim.py.
"""

from contenders import muon_eq
from nanomuon import recipe


def param_groups(model, *, beta2=0.9, **keywords):
    groups = muon_eq.param_groups(model, renormalize=True, **keywords)
    for group in groups:
        if group["kind"] == "muon":
            group["beta2"] = beta2
    return groups


def schedule(group, step, steps, *, rise=400, fall=0.65, **ratios):
    values = recipe.schedule(group, step, steps, **ratios)
    if group["kind"] == "muon":
        if step < rise:
            values["momentum"] = 0.85 + 0.12 * step / rise
        else:
            fallen = max(0, (step - (1 - fall) * steps) / (fall * steps))  # of the last part of the run
            values["momentum"] = 0.97 - 0.07 * fallen
    return values
