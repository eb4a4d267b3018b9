"""Matrices that the ranks of a tensor-parallel group orthogonalize together, modeled on Megatron's.

An (m, n) matrix is cut by rows or columns over T ranks; s and l are its short and its long side. The option
`tensor_parallel` of a Muon group is one of these modes:

  mode         default if                sent by a rank               computed by a rank      result
  distributed  the long side is cut,     2(T-1)/T s^2 per iteration,  products with X: 1/T,   the whole
               or a square               in Gram form two in all      of s x s: all           matrix's
  duplicated   the short side is cut,    (T-1)/T l s                  all of it               the whole
               rows of fused parts, or                                                        matrix's
               a custom `direction`
  blockwise    never                     nothing                      its block               each block's

`distributed`, even if requested, becomes `duplicated` wherever that is the default: Gram matrices are sums
over the long side. `blockwise` needs no class, because each block is a matrix; the other two are the classes
below. `distributed` is `optim.muon_direction` with sums over ranks whenever it sums over a cut side.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanomuon.optim_groups import split_rows


def choose_mode(group, shape, dim, world):
    """The mode that the group requests, else `distributed`, which becomes `duplicated` unless the cut side is
    the long one, over which Gram matrices sum. ValueError for an impossible `blockwise`.
    """
    m, n = shape
    rows, fused_rows = [m], False
    if group["split"] is not None:
        _, groups, run_rows = split_rows(group["split"], m)
        rows = [groups * each for each in run_rows]
        fused_rows = dim == 1  # a rank's rows are not the parts'
    if group["tensor_parallel"] == "blockwise":
        if fused_rows or shape[dim - 1] % world.size:
            raise ValueError(
                "tensor_parallel=blockwise takes neither split rows nor uneven blocks: use duplicated"
            )
        return "blockwise"
    long_side_is_cut = all(each >= n if dim == 1 else each <= n for each in rows)
    can_be_distributed = long_side_is_cut and not fused_rows and group["direction"] is None
    if can_be_distributed and group["tensor_parallel"] != "duplicated":
        return "distributed"
    return "duplicated"


@dataclass(frozen=True)
class Pieces:
    """Matrices cut over the ranks of `world` along `dim` of a batch: 1 rows, 2 columns.

    shape: (m, n) of the whole matrices. A rank's lines are those of `World.share`.
    """

    world: object  # optim.World
    dim: int
    shape: tuple

    def sum(self, partial, *dims):
        """The sum over ranks of their partial sums over these dimensions of their pieces. In place."""
        if self.dim in dims:
            self.world.all_reduce(partial, dist.ReduceOp.SUM).wait()
        return partial

    def gathered(self, piece):
        """A batch of whole matrices."""
        length, piece = self.shape[self.dim - 1], piece.transpose(0, self.dim)
        each = -(-length // self.world.size)
        whole = piece.new_empty(each * self.world.size, *piece.shape[1:])
        whole[each * self.world.rank :][: len(piece)] = piece
        return self.world.all_gather(whole).wait()[:length].transpose(0, self.dim).contiguous()

    def mine(self, whole):
        """This rank's piece of a batch; all of it if it has one value for the cut dimension."""
        length = self.shape[self.dim - 1]
        if whole.size(self.dim) != length:
            return whole
        lo, hi = self.world.share(length, self.world.rank)
        return whole.narrow(self.dim, lo, hi - lo)


class Duplicated:
    """The direction `whole` for pieces of matrices, which every rank gathers. Every rank keeps the whole
    state. It has the attributes of `optim.Direction`.
    """

    def __init__(self, whole, pieces):
        self.whole, self.pieces = whole, pieces
        self.shape, self.state, self.cost, self.scale = whole.shape, whole.state, whole.cost, whole.scale
        if isinstance(self.scale, torch.Tensor):  # (m, 1), one per row
            self.scale = pieces.mine(self.scale[None])[0]

    def __call__(self, U, kept, ok, square_weight):
        X, gain = self.whole(self.pieces.gathered(U), kept, ok, square_weight)
        return self.pieces.mine(X), self.pieces.mine(gain)


class Distributed(Duplicated):
    """The direction `whole`, computed by all ranks together on their pieces."""

    def __call__(self, U, kept, ok, square_weight):
        return self.whole(U, kept, ok, square_weight, self.pieces)
