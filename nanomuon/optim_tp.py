"""Matrices that the ranks of a tensor-parallel group orthogonalize jointly, modeled on Megatron's.

An (m, n) matrix is cut by rows or columns over T ranks; s and l are its short and long side. The option
`tensor_parallel` of a Muon group is one of these modes:

  mode         default if                collectives                  a rank computes         polar factor of
  distributed  the long side, or a       all_reduce of U's squared    its share of products   the whole matrix
               square, is cut            norm and each s x s Gram     with the long side; all
                                         matrix; all_gather of l      products of s x s
                                         mean squares                 matrices
  duplicated   the short side is cut;    all_gather of U              everything              the whole matrix
               or rows of a matrix with
               `split` are; or there is
               a custom `direction`
  blockwise    never                     none                         its block               each block

These collectives run inside `compute` of a `BankOfShards`, which sends nothing else, since gradients are
final. With FSDP2 they run inside `compute` of a `Pipeline`, between the owners of a matrix's shards. If a
square matrix is cut by columns, each rank has only a part of each row's sum of squares, so these sums are
all-reduced instead of gathered. With `split`, the sides in the table are those of each part. In all modes,
momentum, decay and update are computed on the shard. In `distributed` and `duplicated` every rank stores the
whole second moment; in `blockwise` second moment and scale are those of its block. Gram matrices are sent in
the dtype of the iteration, everything else in that of the state. Newton-Schulz computes a Gram matrix in
every iteration; its Gram form computes one at its start and one at its restart (`orthogonalize.py`). Where
`duplicated` is the default, it replaces `distributed` even if that is requested: Gram matrices are sums over
the long side, with `split` a rank's rows are not those of whole parts, and a `direction` needs whole
matrices. The functions `duplicated` and `distributed` turn the rule for whole matrices into one for shards;
`blockwise` needs no such function (`optim_fsdp.sharding_of`).
"""

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanomuon import optim
from nanomuon.optim_fused import fused_normuon
from nanomuon.optim_groups import split_rows
from nanomuon.orthogonalize import polar_factor


def choose_mode(group, shape, dim, world):
    """The mode that the group requests, else the default of the table above. `distributed` becomes
    `duplicated` if the table's second row applies. ValueError for an impossible `blockwise`.
    """
    m, n = shape
    rows, parts_are_cut = [m], False
    if group["split"] is not None:
        _, groups, rows = split_rows(group["split"], m)
        rows = [groups * each for each in rows]
        parts_are_cut = dim == 1  # a rank's rows are not those of whole parts
    if group["tensor_parallel"] == "blockwise":
        if parts_are_cut or shape[dim - 1] % world.size:
            raise ValueError(
                "tensor_parallel=blockwise supports neither split rows nor uneven blocks: use duplicated"
            )
        return "blockwise"
    short_side_is_cut = any(each < n if dim == 1 else each > n for each in rows)
    if short_side_is_cut or parts_are_cut or group["direction"] is not None:
        return "duplicated"
    return group["tensor_parallel"] or "distributed"


@dataclass(frozen=True)
class Cut:
    """Matrices cut over the ranks of `world` along `dim` of a batch: 1 rows, 2 columns.

    length: the size of that dimension in the whole matrix. A rank has the lines of its `World.span`.
    """

    world: object  # optim.World
    dim: int
    length: int

    def sum(self, partial):
        """Add up the ranks' partial sums, each over the cut dimension of a shard. In place."""
        return self.world.all_reduce(partial, dist.ReduceOp.SUM).wait()

    def gathered(self, shard):
        """The batch of whole matrices, gathered from the ranks."""
        shard = shard.transpose(0, self.dim)
        each = -(-self.length // self.world.size)
        whole = shard.new_empty(each * self.world.size, *shard.shape[1:])
        whole[each * self.world.rank :][: len(shard)] = shard
        return self.world.all_gather(whole).wait()[: self.length].transpose(0, self.dim).contiguous()

    def shard(self, whole):
        """This rank's shard of a batch, or all of it if its cut dimension is broadcast (size 1)."""
        if whole.size(self.dim) != self.length:
            return whole
        lo, hi = self.world.span(self.length, self.world.rank)
        return whole.narrow(self.dim, lo, hi - lo)


def duplicated(rule, cut):
    """The rule for shards: every rank gathers U, computes everything, and takes its shard of X and gain."""
    scale = rule.scale
    if isinstance(scale, torch.Tensor):  # (m, 1), one per row
        scale = cut.shard(scale[None])[0]

    def function(U, buffers, ok, hyper):
        X, gain = rule(cut.gathered(U), buffers, ok, hyper)
        return cut.shard(X), cut.shard(gain)

    return dataclasses.replace(rule, function=function, options={}, scale=scale)


def distributed(rule, cut):
    """The rule, NorMuon's or that of fused parts, computed jointly by all ranks on their shards. It is not
    compiled, since it communicates.
    """
    if "split" in rule.options:
        options = dict(rule.options, of_part=normuon_on_shards, cut=cut)
        return dataclasses.replace(rule, function=fused_normuon, options=options)
    return dataclasses.replace(rule, function=normuon_on_shards, options=dict(rule.options, cut=cut))


def normuon_on_shards(
    U,  # (12, 768, 1536), this rank's shards of (12, 768, 3072)
    buffers,  # {"second_momentum_buffer": (12, 1, 3072)}, whole on every rank, or {}
    ok,  # (12, 1, 1)
    hyper,  # optim.MuonHyper
    *,
    cut,
    coefficients,
    ns_steps,
    ns_dtype,
):
    """`optim.normuon` on shards cut along the long side: the squared norm and Gram matrices are summed over
    ranks. The mean squares, one per line of the long side, are gathered, since each rank has those of its own
    lines. Exception: of a square cut by columns, each rank has a part of every mean square, so these are
    summed. Returns shards of X and of its gain.
    """
    shape = list(U.shape[1:])
    shape[cut.dim - 1] = cut.length
    m, n = shape
    rows_are_cut = cut.dim == 1  # then they are the long side
    X = polar_factor(U, shape, rows_are_cut, coefficients, ns_steps, ns_dtype, cut.sum)
    if not buffers:
        return X, torch.ones_like(ok)
    short, mean_over = min(m, n), 2 if m >= n else 1
    v = X.to(ok.dtype).square().sum(dim=mean_over, keepdim=True)
    v = (cut.sum(v) if cut.dim == mean_over else cut.gathered(v)) / short
    gain = optim.second_moment_gain(v, short, buffers["second_momentum_buffer"], ok, hyper)
    return X, cut.shard(gain)
