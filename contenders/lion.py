"""Lion for the matrices: the sign of an interpolation between momentum and gradient.

    W <- W - lr (sign(beta1 m + (1 - beta1) g) + lambda W)
    m <- beta2 m + (1 - beta2) g

The other parameters and the schedules of rates and decay are the recipe's.

Source: "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675 (betas .9 and .99; rates 3 to 10
times smaller than AdamW's, decay as many times larger).
"""

import torch

from nanomuon import recipe


def unscaled(m, n):
    return 1.0


def param_groups(model, *, matrix_lr=0.0008, weight_decay=0.5, betas=(0.9, 0.99), **keywords):
    beta1, beta2 = betas

    def direction(U, buffers, ok, hyper):
        """U: (k, m, n), the mean gradients: the group has no momentum. buffers["exp_avg"]: (k, m, n)."""
        X = buffers["exp_avg"].lerp(U, 1 - beta1).sign()
        buffers["exp_avg"].lerp_(U, (1 - beta2) * ok)
        return X, torch.ones_like(ok)

    def buffers_of(m, n):
        return {"exp_avg": (m, n)}

    direction.buffers = buffers_of
    groups = recipe.param_groups(model, **keywords)
    for group in groups:
        if group["kind"] == "muon":
            group.update(lr=matrix_lr, weight_decay=weight_decay, weight_decay_form="decoupled")
            group.update(direction=direction, momentum=None, beta2=None, scale=unscaled)
    return groups
