"""Fused matrices (QKV, heads), whose parts are orthogonalized one by one: an extension of `optim.py`.

Parts are independent matrices: each has its own second moment and the scale of its own shape. The second
moments of the parts are kept one after the other, (S, 1), so a fused parameter has one state tensor of each
name like any other.
"""

import torch

from nanomuon.optim import Direction, muon_direction
from nanomuon.optim_state import state_dtype
from nanomuon.param_groups import split_rows


class FusedDirection(Direction):
    """The direction of a group with `split`, for parameters of m rows: `heads` equal matrices one after the
    other, each of `groups` equal runs of rows[i] rows of part i.
    """

    def __init__(self, group, m, n, param, ns_dtype, run):
        super().__init__(group, m, n, param, ns_dtype, run)
        self.heads, self.groups, self.rows = split_rows(group["split"], m)
        self.flops, scales, moments = 0, [], 0
        for rows in self.rows:
            plain = Direction(group, self.groups * rows, n, param, ns_dtype, run)
            scales += [plain.scale] * rows
            self.flops += self.heads * plain.flops
            moments += self.heads * max(self.groups * rows, n)  # one for each element of the long side
        rows_of_all = scales * (self.heads * self.groups)
        self.scale = torch.tensor(rows_of_all, dtype=state_dtype(param), device=param.device).view(m, 1)
        if self.state:
            self.state = {"second_momentum_buffer": (moments, 1)}

    def __call__(self, U, kept, ok, square_weight):
        second, split = kept.get("second_momentum_buffer"), (self.heads, self.groups, self.rows)
        return self.run(fused_direction, U, second, square_weight * ok, split=split, **self.options)


def fused_direction(U, second_momentum_buffer, square_weight, *, split, **options):
    """`optim.muon_direction` of every part. U: (k, m, n). Returns X with the gain of each part in it, and
    ones.
    """

    def direction(part, second, part_weight):
        return muon_direction(part, second, part_weight, **options)

    return of_parts(direction, U, second_momentum_buffer, square_weight, split, U.size(2))


def of_parts(direction, U, second_momentum_buffer, square_weight, split, n):
    """direction(part, second moment, weight) of the parts of fused matrices, put together again.

    n: columns of the whole matrices, of which U may hold some. Each part is (k*heads, groups*rows, columns).
    """
    heads, groups, rows = split
    k, columns = len(U), U.size(2)
    parts = U.view(k * heads, groups, -1, columns).split(rows, dim=2)  # each (k*heads, groups, rows, columns)
    part_weight = square_weight.repeat_interleave(heads, 0)
    X, start = [], 0
    for each, part in zip(rows, parts, strict=True):
        m, second = groups * each, None
        if second_momentum_buffer is not None:
            of_all_parts = second_momentum_buffer.view(k * heads, -1, 1)
            second = of_all_parts[:, start : start + max(m, n)]
            start += max(m, n)
            if m < n:  # one value a column
                second = second.mT
        part_X, gain = direction(part.flatten(1, 2), second, part_weight)
        X.append((part_X * gain).view(part.shape))
    return torch.cat(X, dim=2).view(U.shape), torch.ones_like(square_weight)
