"""Hyperball (MuonH): weights stay on a sphere, and every update has the same length relative to it.

    W <- R norm(W - lr R norm(P(M)))        norm(X) = X / ||X||_F

R = sqrt(m n / width) is the norm that random initialization gives a matrix of this shape. Matrices
that start at zero grow until they reach R. Norms never fall, so the others are on their sphere from the first
steps on. There is no weight decay.

Source: "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization", arXiv
2606.16899; modded-nanogpt, track 3, 2026-04-30 (rate .018; there no matrix starts at zero).
"""

import math

import torch

from nanomuon import recipe
from nanomuon.optim import DistMuonAdamW
from nanomuon.orthogonalize import orthogonalize


def norms(param):
    """Frobenius norms of a parameter's matrices: (1, 1), or (E, 1, 1) for (E, m, n)."""
    return torch.linalg.vector_norm(param, dim=(-2, -1), keepdim=True)


def build_optimizer(model, batch, steps, *, matrix_lr=0.018):
    def direction(U, buffers, ok, hyper):
        """U: (k, m, n)."""
        X = orthogonalize(U, ns_dtype=model.compute_dtype).to(ok.dtype)
        return X, 1 / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=1e-10)

    def radius(m, n):
        return math.sqrt(m * n / model.config.width)

    groups = recipe.param_groups(model, batch, steps, matrix_lr=matrix_lr, weight_decay=0.0)
    matrices = []
    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=direction, beta2=None, scale=radius)
            matrices += group["params"]
    before = {}  # parameter -> norms before the step

    @torch.no_grad()
    def remember(optimizer, arguments, keywords):
        for param in matrices:
            before[param] = norms(param)

    @torch.no_grad()
    def project(optimizer, arguments, keywords):
        for param in matrices:
            after = norms(param)
            wanted = torch.maximum(after, before[param]).clamp(max=radius(*param.shape[-2:]))
            param.mul_(wanted / after.clamp(min=1e-20))

    optimizer = DistMuonAdamW(groups, ns_dtype=model.compute_dtype)
    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(project)
    return optimizer
