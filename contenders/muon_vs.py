"""Muon-VS: the momentum is divided by the deviation of the gradient, entry by entry, then orthogonalized.

    Gamma <- beta Gamma + beta (1 - beta) (M - G)^2,  M <- beta M + (1 - beta) G
    N = G + beta / (1 - beta) M^,  W <- W - lr s P(N / sqrt(Gamma^))        ^: divided by 1 - beta^t

Source: "Variance-Adaptive Muon", arXiv 2601.14603, and the code beside it,
https://github.com/jingru-lee/Variance-Adaptive-Muon (beta .95, 1e-8 beside the root).
"""

from nanomuon import recipe
from nanomuon.orthogonalize import orthogonalize


def state(m, n):
    return {"exp_avg": (m, n), "variance": (m, n), "count": (1, 1)}


def param_groups(model, batch=None, steps=None, *, matrix_lr=0.02, weight_decay=0.2, beta=0.95):
    def direction(U, kept, ok, square_weight):
        """U: (k, m, n), the mean gradients, since the group has momentum 0."""
        M, variance, count = kept["exp_avg"], kept["variance"], kept["count"]
        variance.lerp_(beta * (M - U).square(), (1 - beta) * ok)
        M.lerp_(U, (1 - beta) * ok)
        count += ok
        bias = 1 - beta ** count.clamp(min=1)  # (k, 1, 1)
        N = U + beta / (1 - beta) * M / bias
        N = N / ((variance / bias).sqrt() + 1e-8)
        return orthogonalize(N, ns_dtype=model.compute_dtype), ok

    direction.state = state
    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=weight_decay)
    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction, beta2=None, momentum=0.0)
    return groups


def schedule(group, step, steps):
    values = recipe.schedule(group, step, steps)
    values.pop("momentum", None)  # the direction has its own
    return values
