"""Fused matrices (QKV, heads), whose parts are orthogonalized one by one: an extension of `optim.py`.

Parts are independent matrices: each has its own second moment and the scale of its own shape. Their second
moments are concatenated, (S, 1), so a fused parameter has one state tensor per name like any other.
"""

import dataclasses

import torch

from nanomuon.optim import Direction, muon_direction
from nanomuon.optim_groups import split_rows


def fused_direction(U, second_momentum_buffer, second_weight, split, pieces=None, **options):
    """`optim.muon_direction` of every part, reassembled. U: (k, m, n). Returns X times the gain of each part,
    and ones.

    split: (heads, groups, rows) of `split_rows`. pieces: set if U's columns, and so the parts', are cut.
    """
    heads, groups, rows = split
    k, columns = len(U), U.size(2)
    n = columns if pieces is None else pieces.shape[1]
    parts = U.reshape(k * heads, groups, -1, columns).split(rows, dim=2)  # (k*heads, groups, rows, columns)
    part_weight = second_weight.repeat_interleave(heads, 0)
    X, start = [], 0
    for each, part in zip(rows, parts, strict=True):
        m, second = groups * each, None
        if second_momentum_buffer is not None:
            of_all_parts = second_momentum_buffer.view(k * heads, -1, 1)
            second = of_all_parts[:, start : start + max(m, n)]
            start += max(m, n)
            if m < n:  # one value per column
                second = second.mT
        if pieces is not None:
            pieces = dataclasses.replace(pieces, shape=(m, n))
        part_X, gain = muon_direction(part.flatten(1, 2), second, part_weight, pieces=pieces, **options)
        X.append((part_X * gain).view(part.shape))
    return torch.cat(X, dim=2).view(U.shape), torch.ones_like(second_weight)


class FusedDirection(Direction):
    """The direction of a group with `split`, for parameters of m rows: `heads` equal matrices, each of
    `groups` equal blocks, each with rows[i] rows of part i.
    """

    kernel = staticmethod(fused_direction)

    def __init__(self, group, m, n, ns_dtype, run_kernel):
        super().__init__(group, m, n, ns_dtype, run_kernel)
        heads, groups, rows = self.options["split"] = split_rows(group["split"], m)
        self.cost, scales, moments = 0, [], 0
        for each in rows:
            plain = Direction(group, groups * each, n, ns_dtype, run_kernel)
            scales += [plain.scale] * each
            self.cost += heads * plain.cost
            moments += heads * max(groups * each, n)  # one per element of the long side
        self.scale = torch.tensor(scales * (heads * groups), dtype=torch.float64).view(m, 1)
        if self.state:
            self.state = {"second_momentum_buffer": (moments, 1)}
