"""Fused matrices (QKV, heads), whose parts are orthogonalized one by one: the direction of a bank of them.

Parts are independent matrices: each has its own second moment and the scale of its own shape. The second
moments of the parts are kept one after the other, (S, 1), so a fused parameter has one state tensor of each
name like any other.
"""

from dataclasses import dataclass, fields

import torch

from nanomuon.optim import MuonDirection, muon_direction, run
from nanomuon.orthogonalize import update_scale
from nanomuon.param_groups import split_rows


@dataclass(frozen=True)
class FusedDirection(MuonDirection):
    """`heads` equal matrices one after the other, each of `groups` equal runs of rows[i] rows of part i."""

    heads: int
    groups: int
    rows: tuple
    transposable = False  # rows must stay rows

    @classmethod
    def of(cls, group, m, device_type, ns_dtype):
        """The direction of a group with `split`, for parameters of m rows."""
        plain = MuonDirection.of(group, device_type, ns_dtype)
        options = {field.name: getattr(plain, field.name) for field in fields(plain)}
        heads, groups, rows = split_rows(group["split"], m)
        return cls(**options, heads=heads, groups=groups, rows=rows)

    def state(self, m, n):
        if not self.variance_reduction:
            return {}
        return {"second_momentum_buffer": (sum(self.second_moments(n)), 1)}

    def second_moments(self, n):
        """How many values the second moment of each part has: one for each element of its long side."""
        return [self.heads * max(self.groups * each, n) for each in self.rows]

    def row_scales(self, rule, m, n):
        one_run = []
        for each in self.rows:
            one_run += [update_scale(rule, self.groups * each, n)] * each
        return one_run * (self.heads * self.groups)

    def flops(self, m, n):
        return self.heads * sum(
            super(FusedDirection, self).flops(self.groups * each, n) for each in self.rows
        )

    def __call__(self, U, kept, ok, square_weight):
        return run(
            fused_direction,
            U,
            kept.get("second_momentum_buffer"),
            square_weight * ok,
            split=(self.heads, self.groups, self.rows),
            **self.options(),
        )


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
