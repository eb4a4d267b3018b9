"""Matrices that the ranks of a tensor-parallel group orthogonalize together, after Megatron's own.

An (m, n) matrix is cut by rows or columns over T ranks; s and l are its short and its long side.
`tensor_parallel` of a Muon group says how they work:

  mode         default where             sent by a rank               computed by a rank      result
  distributed  the long side is cut,     2(T-1)/T s^2 a step, twice   products with X: 1/T,   the whole
               or a square               in all in Gram form          of s x s: all           matrix's
  duplicated   the short side is cut,    (T-1)/T l s                  all of it               the whole
               or rows of fused parts                                                         matrix's
  blockwise    never                     nothing                      its block               each block's

`distributed` falls back to `duplicated` where that is the default: Gram matrices are sums over the long side.
`blockwise` is no direction of its own, each block being a matrix; the other two are the classes below.
"""

import torch
import torch.distributed as dist

from nanomuon import fused, orthogonalize
from nanomuon.param_groups import split_rows


def choose_mode(group, shape, dim, world):
    """The mode that the group asks for, else `distributed` if the cut side is the long one, over which Gram
    matrices sum. ValueError for a `blockwise` that cannot be.
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


class Duplicated:
    """Pieces of the (m, n) matrices of `whole`, a direction, cut along `dim` (1 rows, 2 columns of a batch)
    over the ranks of `world`. Every rank keeps all of the state. It has the attributes of `optim.Direction`.
    """

    def __init__(self, whole, world, dim):
        self.whole, self.world, self.dim = whole, world, dim
        self.shape, self.state, self.flops, self.scale = whole.shape, whole.state, whole.flops, whole.scale
        if dim == 1 and isinstance(self.scale, torch.Tensor):  # one for each row
            lo, hi = world.share(len(self.scale))
            self.scale = self.scale[lo:hi]

    def __call__(self, U, kept, ok, square_weight):
        X, gain = self.whole(self.gathered(U), kept, ok, square_weight)
        return self.mine(X), self.mine(gain)

    def gathered(self, piece):
        """The whole of a batch from the pieces of all ranks."""
        length, piece = self.shape[self.dim - 1], piece.transpose(0, self.dim)
        each = -(-length // self.world.size)
        whole = piece.new_empty(each * self.world.size, *piece.shape[1:])
        whole[each * self.world.rank :][: len(piece)] = piece
        return self.world.all_gather(whole).wait()[:length].transpose(0, self.dim).contiguous()

    def mine(self, whole):
        """This rank's piece of a batch; all of it where it has one value for the cut dimension."""
        length = self.shape[self.dim - 1]
        if whole.size(self.dim) != length:
            return whole
        lo, hi = self.world.share(length)
        return whole.narrow(self.dim, lo, hi - lo)


class Distributed(Duplicated):
    """The same, computed together. It communicates inside, so it is not compiled."""

    def __call__(self, U, kept, ok, square_weight):
        second, weight = kept.get("second_momentum_buffer"), square_weight * ok
        if not isinstance(self.whole, fused.FusedDirection):
            return self.direction(U, second, weight, self.shape)
        # Columns are cut: each part is, like the matrix
        split = self.whole.heads, self.whole.groups, self.whole.rows

        def part_direction(part, part_second, part_weight):
            return self.direction(part, part_second, part_weight, (part.size(1), self.shape[1]))

        return fused.of_parts(part_direction, U, second, weight, split, self.shape[1])

    def sum(self, partial, *dims):
        """The sum over ranks of what is a sum over these dimensions (1 rows, 2 columns) of the pieces."""
        if self.dim in dims:
            self.world.all_reduce(partial, dist.ReduceOp.SUM).wait()
        return partial

    def direction(self, U, second, square_weight, shape):
        """`optim.muon_direction` with the sums over all ranks. U: pieces of (m, n) = shape."""
        m, n = shape
        short, options = min(m, n), self.whole.options
        if options["row_equilibrate"]:
            row_norm = self.sum(U.square().sum(dim=2, keepdim=True), 2).sqrt()  # (k, rows, 1)
            mean_norm = self.sum(row_norm.sum(dim=1, keepdim=True), 1) / m
            U = U * (mean_norm / row_norm.clamp(min=1e-7))
        X = self.orthogonalize(U, shape)
        gain = torch.ones_like(square_weight)  # (k, 1, 1)
        if options["renormalize"]:
            norm = self.sum(X.to(gain.dtype).square().sum(dim=(1, 2), keepdim=True), 1, 2).sqrt()
            gain = short**0.5 / norm.clamp(min=1e-7)
        if second is None:
            return X, gain
        mean_over = 2 if m >= n else 1
        v = self.sum(X.to(gain.dtype).square().sum(dim=mean_over, keepdim=True), mean_over)
        v = v / short * gain.square()
        if self.dim != mean_over:
            v = self.gathered_vector(v, shape)
        second.lerp_(v, square_weight)
        s = second.clamp(min=1e-10).rsqrt()
        norm_before = (v.sum(dim=(1, 2), keepdim=True) * short).sqrt()
        norm_after = ((v * s.square()).sum(dim=(1, 2), keepdim=True) * short).sqrt()
        return X, self.mine(gain * s * norm_before / norm_after.clamp(min=1e-10))

    def gathered_vector(self, v, shape):
        """All values of what has one for each element of the cut dimension."""
        # Of parts the rows differ, and are not cut here
        assert shape[self.dim - 1] == self.shape[self.dim - 1]
        return self.gathered(v)

    def orthogonalize(self, U, shape):
        """`orthogonalize.orthogonalize` of pieces: Gram matrices are sums over the cut dimension."""
        options = self.whole.options
        table = orthogonalize.triples(options["coefficients"], options["ns_steps"])
        gram_form, iteration_dtype = orthogonalize.newton_schulz_form(
            *shape, len(table), U.device.type, options["ns_dtype"]
        )
        X = orthogonalize.in_norm_dtype(U)
        norm = self.sum(torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True).square(), 1, 2).sqrt()
        X = orthogonalize.normalized(X, norm, options["coefficients"])
        X = orthogonalize.in_iteration_dtype(X, iteration_dtype)
        if gram_form:
            for part in (table[:2], table[2:]):
                if part:
                    Q = orthogonalize.gram_polynomial(self.gram_matrix(X), part)
                    X = X @ Q if self.dim == 1 else Q @ X
            return X
        for a, b, c in table:
            A = self.gram_matrix(X)
            B = torch.baddbmm(A, A, A, beta=b, alpha=c)
            X = torch.baddbmm(X, X, B, beta=a) if self.dim == 1 else torch.baddbmm(X, B, X, beta=a)
        return X

    def gram_matrix(self, X):
        """(k, s, s), over the cut dimension of all ranks."""
        return self.sum(orthogonalize.gram_matrix(X, of_columns=self.dim == 1), self.dim)
