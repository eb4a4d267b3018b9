"""Who shares the work on a parameter, and how its matrices get to where they are worked on and back.

Replicated parameters are stacked, reduce-scattered and all-gathered (`World`; the optimizer stacks them). A
DTensor parameter lives in pieces, and what happens to a piece depends on the dimension of the device mesh
that cuts it:

  a dimension called "tp"           tensor parallelism: the ranks orthogonalize together (`TensorParallel`)
  the experts of (E, m, n)          whole matrices on every rank: nothing moves
  any other (FSDP2)                 data parallelism: an all_to_all brings the shards of each matrix to its owner, and
                                    another one the shards of its update back (`to_owners`, `to_shards`)

The gradient of a DTensor is final over its mesh: FSDP2 has averaged it, and in tensor parallelism it is
exact.
"""

import functools
import math
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

from nanomuon.orthogonalize import newton_schulz_flops, triples

# Since torch 2.13 the collectives on one tensor are called *_single and the old names warn.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


BATCH_BYTES = {
    "cpu": 2**22,
    "cuda": 2**29,
}  # Muon computes on this much of a bank at a time: bounded temporaries
CHUNK_BYTES = {
    "cpu": 2**22,
    "cuda": 2**26,
}  # of whole matrices that the pipeline brings to an owner at a time


@dataclass
class World:
    """The ranks that share the work. Transfers start here; what they return waits, and keeps their tensors
    alive.
    """

    group: dist.ProcessGroup = None
    size: int = 1
    rank: int = 0
    comm_dtype: torch.dtype = None
    load: list = field(default_factory=lambda: [0])  # Newton-Schulz FLOPs per rank

    @classmethod
    def of(cls, group, comm_dtype=None):
        size = dist.get_world_size(group)
        return cls(group, size, dist.get_rank(group), comm_dtype, [0] * size)

    def mesh(self, like):
        return DeviceMesh.from_group(self.group, like.device.type)

    def share(self, rows, rank=None):
        """(lo, hi) of a rank's ceil(rows/W) rows, the last ones short or empty: DTensor's Shard. Default this
        rank.
        """
        each, rank = -(-rows // self.size), self.rank if rank is None else rank
        return min(rows, each * rank), min(rows, each * (rank + 1))

    def padded(self, tensor):
        """(W*c, ...) with `tensor` at the top, itself if it is as long; nobody reads the rest."""
        rows = -(-len(tensor) // self.size) * self.size
        rest = tensor.new_empty(rows - len(tensor), *tensor.shape[1:])
        return torch.cat([tensor, rest]) if len(rest) else tensor.contiguous()

    def reduce_scatter(self, send):
        """send: (W*c, ...). Waiting gives (c, ...), the mean over ranks of this rank's part, and lets go of
        `send`.
        """
        received = send.new_empty(len(send) // self.size, *send.shape[1:])
        work = reduce_scatter_single(received, send, dist.ReduceOp.AVG, group=self.group, async_op=True)
        return waiting(work, send, received)

    def all_gather(self, whole):
        """whole: (W*c, ...) with this rank's c rows in place. Waiting fills and gives all of it."""
        work = all_gather_single(whole, whole.chunk(self.size)[self.rank], group=self.group, async_op=True)
        return waiting(work, None, whole)

    def all_to_all(self, send, sent, received):
        """send: flat, `sent` elements to each rank. Waiting gives the `received` elements from each, and lets
        go.
        """
        out = send.new_empty(sum(received))
        work = dist.all_to_all_single(out, send, received, sent, group=self.group, async_op=True)
        return waiting(work, send, out)


def waiting(work, send, received):
    """A function that waits for `work` and gives `received`; `send` stays alive until then."""

    def wait():
        nonlocal send
        work.wait()
        send = None
        return received

    return wait


# ------------------------------------------------------------------------------------------------------------
# Where a parameter lives


def local(tensor):
    """What this rank holds of a tensor: its piece of a DTensor, all of any other."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient(param):
    """What this rank holds of p.grad, zero where there is none."""
    grad = param.grad
    if (
        isinstance(grad, DTensor) and grad.placements != param.placements
    ):  # tensor parallelism may leave partial sums
        grad = grad.redistribute(param.device_mesh, param.placements)
    return torch.zeros_like(local(param)) if grad is None else local(grad)


def cuts(param):
    """(mesh dimension, dimension of the parameter) of each cut; none for a plain or a replicated
    parameter.
    """
    if not isinstance(param, DTensor):
        return []
    placed = enumerate(param.placements)
    return [
        (i, place.dim) for i, place in placed if not place.is_replicate() and param.device_mesh.size(i) > 1
    ]


@dataclass
class TensorParallel:
    """Matrices of `shape` (m, n), cut along `dim` (1 rows, 2 columns of a batch) over the ranks of
    `world`.
    """

    world: World
    dim: int
    shape: tuple
    mode: str  # duplicated | distributed | blockwise

    def sum(self, partial):
        dist.all_reduce(partial, group=self.world.group)
        return partial

    def gather(self, piece):
        """The whole of a batch from the pieces of all ranks."""
        rows, piece = self.shape[self.dim - 1], piece.transpose(0, self.dim)
        each = -(-rows // self.world.size)
        whole = piece.new_empty(each * self.world.size, *piece.shape[1:])
        whole[each * self.world.rank :][: len(piece)] = piece
        return self.world.all_gather(whole)()[:rows].transpose(0, self.dim).contiguous()

    def mine(self, whole):
        """This rank's piece of a batch; all of it where there is one value for the cut dimension."""
        lo, hi = self.world.share(self.shape[self.dim - 1])
        return (
            whole.narrow(self.dim, lo, hi - lo) if whole.size(self.dim) == self.shape[self.dim - 1] else whole
        )


@dataclass
class Layout:
    """Where the matrices of a Muon parameter live.

    Replicated over `world` if dim is None (a world of one: whole here), else cut over it along dim (1 rows, 2
    columns of a batch). shape: (m, n) of what is orthogonalized, whole matrices or blocks of them. held: (m,
    n) of what a rank of the tensor-parallel group has of it.
    """

    world: World
    shape: tuple
    held: tuple
    dim: int = None
    tp: TensorParallel = None


def layout(param, mode, split, replicated, world_of):
    """The Layout of a Muon parameter. ValueError for cuts that are not provided for.

    mode: what the group asks of tensor parallelism, or None. split: of a fused matrix, see `split_rows`.
    replicated: the World of parameters that are not cut. world_of: the World of a process group.
    """
    batch = param.ndim == 3
    shape = m, n = tuple(param.shape[1:]) if batch else (len(param), param.shape[1:].numel())
    if not cuts(param):
        return Layout(replicated, shape, shape)
    found, mesh, names = (
        Layout(World(), shape, shape),
        param.device_mesh,
        param.device_mesh.mesh_dim_names or (),
    )
    for axis, cut in cuts(param):
        if batch and cut == 0:
            continue
        dim = cut + 1 - batch
        if dim > (1 if param.ndim == 4 else 2) or names[axis : axis + 1] != ("tp",) and (batch or found.dim):
            raise ValueError(f"cut as {param.placements} over {mesh}: Muon has no transport for this")
        if names[axis : axis + 1] != ("tp",):
            found.world, found.dim = world_of(mesh.get_group(axis)), dim
        elif found.dim == dim and isinstance(param.placements[0], Shard):
            raise ValueError(
                "cut by data and then by tensor parallelism: call parallelize_module before fully_shard"
            )
        else:
            found.tp = TensorParallel(world_of(mesh.get_group(axis)), dim, shape, mode)
    if tp := found.tp:
        lo, hi = tp.world.share(shape[tp.dim - 1])
        found.held = (hi - lo, n) if tp.dim == 1 else (m, hi - lo)
        fused = split is not None and tp.dim == 1  # a rank's rows are not the parts'
        rows = [m] if split is None else [split[1] * each for each in split[2]]
        summed = all(each >= n if tp.dim == 1 else each <= n for each in rows)  # the cut side is the long one
        if mode != "blockwise":
            tp.mode = "distributed" if summed and not fused and mode != "duplicated" else "duplicated"
        elif fused or shape[tp.dim - 1] % tp.world.size:
            raise ValueError(
                "tensor_parallel=blockwise takes neither split rows nor uneven blocks: use duplicated"
            )
        else:
            found.shape = found.held
    return found


# ------------------------------------------------------------------------------------------------------------
# Pieces of work


@dataclass(eq=False)
class Rows:
    """Rows lo to hi of a parameter that is updated element by element: all that is here, or this rank's
    slice.
    """

    param: torch.Tensor
    group: dict
    world: World
    lo: int = 0
    hi: int = 0
    split: bool = False  # over ranks

    def of(self, tensor):
        tensor = local(tensor)
        return tensor[self.lo : self.hi] if self.split else tensor


@dataclass(eq=False)
class Matrix:
    """One matrix of a Muon parameter: a 2-D one, (out, rest) of a convolution, or the index-th of a 3-D
    one.
    """

    param: torch.Tensor
    group: dict
    index: int | None
    transposed: bool  # against the shape of its bank
    slot: int = 0  # row in the stacked bank
    owner: int = 0  # rank

    def of(self, tensor):
        tensor = local(tensor)
        tensor = tensor.flatten(1) if self.index is None else tensor[self.index]
        return tensor.mT if self.transposed else tensor  # (m, n)


@dataclass(eq=False)
class Bank:
    """Matrices of one shape or its transpose, with the same static options: one collective, one batch."""

    layout: Layout
    options: dict  # of muon_direction
    nesterov: bool
    cautious: bool
    variance: bool  # reduction
    like: torch.Tensor  # a parameter
    matrices: list
    slots: int = 0  # rows of the stacked bank: W*c, or K where every matrix travels alone
    owned: list = ()  # the k matrices of this rank, in consecutive slots
    alone: bool = False  # fills less than half of the world: stacking would more than double its bytes
    momentum: torch.Tensor = None  # (k, m, n); in the pipeline shards of all, (K, rows, columns)
    second: torch.Tensor = None  # (k, m, 1) or (k, 1, n); (k, S, 1) of fused matrices
    part_of_row: torch.Tensor = (
        ...
    )  # of fused matrices: the part that each row on this rank belongs to; else all

    @property
    def shape(self):
        return self.layout.shape  # (m, n)

    @property
    def flops(self):
        steps = triples(self.options["coefficients"], self.options["ns_steps"])
        return newton_schulz_flops(*self.shape, len(steps))

    def batches(self):
        """Equal runs of the owned matrices, each within BATCH_BYTES, as (lo, hi): one shape to compile."""
        k, most = len(self.owned), BATCH_BYTES[self.momentum.device.type] // (4 * math.prod(self.shape))
        size = next((size for size in range(min(k, most), 0, -1) if k % size == 0), 1)
        return [(lo, lo + size) for lo in range(0, k, size)]

    def add(self, param, group, transposed):
        for index in range(len(local(param))) if param.ndim == 3 else [None]:
            self.matrices.append(Matrix(param, group, index, transposed))

    def chunks(self, size):
        """Banks of at most `size` matrices for the pipeline; None: of about CHUNK_BYTES on each owner."""
        world, matrices = self.layout.world, self.matrices
        size = size or world.size * max(1, CHUNK_BYTES[self.like.device.type] // (4 * math.prod(self.shape)))
        return [replace(self, matrices=matrices[lo : lo + size]) for lo in range(0, len(matrices), size)]

    def place(self):
        """Owners and slots of the matrices, then momentum and second moment of those owned here.

        Owners are as even as whole matrices allow; what is left over goes to the ranks with the least work so
        far.
        """
        world, K = self.layout.world, len(self.matrices)
        ranks, each = range(world.size), -(-K // world.size)
        if self.like.ndim == 3:
            owners = [i // each for i in range(K)]
        else:
            even, left = divmod(K, world.size)
            idlest = sorted(ranks, key=lambda rank: world.load[rank])[:left]
            owners = [rank for rank in ranks for _ in range(even + (rank in idlest))]
        self.alone = 2 * K < world.size
        self.slots = K if self.alone else each * world.size
        for i, (matrix, owner) in enumerate(zip(self.matrices, owners, strict=True)):
            matrix.owner, matrix.slot = owner, i if self.alone else owner * each + i - owners.index(owner)
            world.load[owner] += self.flops
        self.owned = [matrix for matrix in self.matrices if matrix.owner == world.rank]

        m, n = self.shape
        second = (m, 1) if m >= n else (1, n)
        if self.options["split"]:
            heads, groups, rows = self.options["split"]
            second = heads * sum(max(groups * each, n) for each in rows), 1
            if len(rows) > 1:
                part = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).repeat(groups)
                for cut in (self.layout.tp, self.layout):  # to the rows of this rank
                    part = (
                        part[slice(*cut.world.share(len(part)))] if cut is not None and cut.dim == 1 else part
                    )
                self.part_of_row = part.to(self.like.device)
        zeros = functools.partial(torch.zeros, dtype=state_dtype(self.like), device=self.like.device)
        shard = self.matrices[0].of(self.matrices[0].param).shape if self.layout.dim else self.layout.held
        self.momentum = zeros(K if self.layout.dim else len(self.owned), *shard)
        self.second = zeros(len(self.owned), *second) if self.variance else None

    def state(self):
        """(parameter, [what this rank keeps or None, Kept] of momentum and second moment) for every
        parameter.

        State is a view of the bank's buffers, in the parameter's orientation.
        """
        batch, buffers = (
            self.like.ndim == 3,
            [(self.matrices if self.layout.dim else self.owned, self.momentum)],
        )
        buffers += [(self.owned, self.second)] if self.variance else []
        for matrix in self.matrices[:1] or [Matrix(self.like, {}, 0, False)] if batch else self.matrices:
            entries = []
            for (holders, buffer), kept in zip(buffers, keep(self, matrix), strict=False):
                mine = buffer if batch else None
                if not batch and matrix in holders:
                    mine = buffer[holders.index(matrix)]
                    mine = mine.mT if matrix.transposed else mine
                    mine = mine.view(local(matrix.param).shape) if buffer is self.momentum else mine
                entries.append((mine, kept))
            yield matrix.param, entries


# ------------------------------------------------------------------------------------------------------------
# The pipeline's transfers, of K matrices of one layout in the order of their owners; k of them are owned by
# this rank


def shards(layout, count):
    """The shape of `count` shards on each rank."""
    for rank in range(layout.world.size):
        lo, hi = layout.world.share(layout.held[layout.dim - 1], rank)
        yield count, *((hi - lo, layout.held[1]) if layout.dim == 1 else (layout.held[0], hi - lo))


def to_owners(layout, U, owners):
    """U: (K, rows, columns), shards of the matrices of these owners. Waiting gives (k, m, n), whole
    matrices.
    """
    world = layout.world
    shapes = list(shards(layout, owners.count(world.rank)))
    sent = [owners.count(rank) * U[0].numel() for rank in range(world.size)]
    received = [math.prod(shape) for shape in shapes]
    wait = world.all_to_all(U.flatten(), sent, received)

    def finish():
        pieces = zip(wait().split(received), shapes, strict=True)
        return torch.cat([piece.view(shape) for piece, shape in pieces], dim=layout.dim)

    return finish


def to_shards(layout, X, owners):
    """X: (k, m, n), whole matrices. Waiting gives (K, rows, columns), this rank's shards of those of all
    owners.
    """
    world = layout.world
    shapes = list(shards(layout, len(X)))
    pieces = X.split([shape[layout.dim] for shape in shapes], dim=layout.dim)
    mine = list(shards(layout, len(owners)))[world.rank]
    received = [owners.count(rank) * math.prod(mine[1:]) for rank in range(world.size)]
    wait = world.all_to_all(
        torch.cat([piece.flatten() for piece in pieces]), list(map(math.prod, shapes)), received
    )
    return lambda: wait().view(mine)


# ------------------------------------------------------------------------------------------------------------
# State


@dataclass
class Kept:
    """Where a state tensor of this shape is kept: in pieces over `mesh` (None: whole), on the rank `owner` of
    `world` (None: on all ranks).
    """

    shape: tuple
    mesh: DeviceMesh = None
    placements: tuple = ()
    world: World = None
    owner: int = None

    def as_dtensor(self, mine):
        """What this rank keeps, with what it is a piece of; it shares memory."""
        if self.mesh is None:
            return mine
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            mine, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    def whole(self, mine, like):
        """A copy of the whole on every rank. mine: None where another rank owns it. Collective."""
        if mine is not None:
            mine = mine.clone() if self.mesh is None else self.as_dtensor(mine).full_tensor()
        if self.owner is None:
            return mine
        whole = torch.empty(self.shape, dtype=state_dtype(like), device=like.device) if mine is None else mine
        whole = whole.contiguous()
        dist.broadcast(whole, group=self.world.group, group_src=self.owner)
        return whole

    def mine(self, saved):
        """This rank's piece of a tensor that is whole, or in pieces of any layout (then collective)."""
        if isinstance(saved, DTensor):
            if saved.device_mesh == self.mesh and tuple(saved.placements) == tuple(self.placements):
                return saved.to_local()
            saved = saved.full_tensor()
        if self.mesh is None:
            return saved
        return distribute_tensor(saved, self.mesh, self.placements, src_data_rank=None).to_local()


def keep(bank, matrix):
    """Kept of the momentum and of the second moment of the parameter of a matrix."""
    param, at, world, batch = matrix.param, bank.layout, bank.layout.world, bank.like.ndim == 3
    momentum, second = tuple(param.shape), bank.second.shape[1:] if bank.variance else (0, 0)
    second = (*param.shape[: int(batch)], *(second[::-1] if matrix.transposed else second))
    if not cuts(param):
        home = {} if world.size == 1 else dict(world=world, owner=matrix.owner)
        if batch and home:  # cut over ranks like Shard(0)
            home = dict(mesh=world.mesh(param), placements=(Shard(0),))
        return Kept(momentum, **home), Kept(second, **home)
    mesh = param.device_mesh
    places = [Shard(0) if batch and (axis, 0) in cuts(param) else Replicate() for axis in range(mesh.ndim)]
    if at.tp and at.tp.mode == "blockwise":  # the vectors of the blocks one below the other
        places[mesh.mesh_dim_names.index("tp")] = Shard(int(batch))
        second = (*second[:-2], second[-2] * at.tp.world.size, second[-1])
    home = dict(mesh=mesh, placements=tuple(places)) if any(place.is_shard() for place in places) else {}
    if at.dim:
        home = dict(mesh=mesh["tp"], placements=(Shard(0),)) if home else {}
        home |= dict(world=world, owner=matrix.owner)
    return Kept(momentum, mesh, param.placements), Kept(second, **home)


def state_dtype(param):
    """float32 whatever the parameter, float64 for float64."""
    return torch.promote_types(param.dtype, torch.float32)
