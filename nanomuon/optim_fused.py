"""Fused matrices (QKV, heads), whose parts are orthogonalized separately: an extension of `optim.py`.

Parts are independent matrices: each has its own second moment, and the scale for its own shape. Their second
moments are concatenated, (S, 1), so a fused parameter has one state tensor per name, like any other.
"""

import math

import torch

from nanomuon import optim
from nanomuon.optim_groups import split_rows


def fused_normuon(
    U,  # (12, 2304, 768)
    buffers,  # {"second_momentum_buffer": (12, 2304, 1)}, or {}
    ok,  # (12, 1, 1)
    hyper,  # optim.MuonHyper
    *,
    of_part,
    split,
    shapes,
    **options,
):
    """The directions of all parts, concatenated. Each is already X times its gain, so the gain returned is 1.

    of_part: `optim.normuon`, or `optim_tp.normuon_on_shards`, called for each part with the options. split:
    (heads, groups, rows) from `split_rows`: `heads` equal matrices, each of `groups` equal blocks, each with
    rows[i] rows of part i. shapes: the shapes of the parts' second moments.
    """
    heads, groups, rows = split
    k, n = len(U), U.size(2)
    parts = U.reshape(k * heads, groups, -1, n).split(rows, dim=2)  # (k*heads, groups, rows[i], n)
    ok_of_heads = ok.repeat_interleave(heads, 0)
    buffers_of_parts = [{}] * len(parts)
    if buffers:
        lines = buffers["second_momentum_buffer"].view(k * heads, -1)
        moments = lines.split([math.prod(shape) for shape in shapes], dim=1)
        views = [moment.view(k * heads, *shape) for moment, shape in zip(moments, shapes, strict=True)]
        buffers_of_parts = [{"second_momentum_buffer": view} for view in views]
    directions = []
    for part, buffers_of_part in zip(parts, buffers_of_parts, strict=True):
        X, gain = of_part(part.flatten(1, 2), buffers_of_part, ok_of_heads, hyper, **options)
        directions.append((X * gain).view(part.shape))
    return torch.cat(directions, dim=2).view(U.shape), torch.ones_like(ok)


def fused_rule(group, m, n, ns_dtype):
    """The optim.Rule of a group with `split`, for (m, n) parameters."""
    heads, groups, rows = split = split_rows(group["split"], m)
    without_split = dict(group, split=None)
    parts = [optim.rule_of(without_split, groups * each, n, ns_dtype) for each in rows]
    scales, buffers, shapes = [], {}, []
    for each, part in zip(rows, parts, strict=True):
        scales += [part.scale] * each
        shapes += part.buffers.values()
    if shapes:
        buffers["second_momentum_buffer"] = (heads * sum(map(math.prod, shapes)), 1)
    scale = torch.tensor(scales * (heads * groups), dtype=torch.float64, device="cpu").view(m, 1)
    options = dict(parts[0].options, of_part=optim.normuon, split=split, shapes=tuple(shapes))
    cost = heads * sum(part.cost for part in parts)
    return optim.Rule(optim.kernel(fused_normuon), options, (m, n), buffers, scale, cost)
