"""Muon on parameters that live in pieces (DTensors), after Motif's parallel Muon: an extension of `optim.py`.

A DTensor that is not cut anywhere counts as replicated. Otherwise its gradient is final over its mesh (FSDP2
has averaged it, and in tensor parallelism it is exact), and momentum and AdamW's moments are cut as it is.
What happens to the matrices depends on the dimension of the device mesh that cuts them:

  the experts of (E, m, n)    whole matrices on every rank: nothing moves
  a dimension called "tp"     tensor parallelism: the ranks orthogonalize together (`tensor_parallel.py`)
  any other (FSDP2)           data parallelism: an all_to_all brings the shards of each matrix to its owner,
                              which keeps its second moment, another one the shards of its update back

The first two are a `Bank` of what this rank holds. The third is a `Pipeline`, one piece of work made of
chunks of same-shaped matrices: one chunk is admitted a round, so that its collect runs under the compute of
the one before; the first one's runs under the AdamW groups and the experts. A rank sends 2(W-1)/W times the
bytes of its shards. The optimizer's chunk_size: matrices in a chunk (default: about CHUNK_BYTES of them on
each owner). Its max_in_flight: chunks that hold buffers at once, each what it sends and what it receives; 3
hide both transfers, 2 the collect, 1 nothing.
"""

import functools
import math
from collections import deque
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.profiler import record_function

from nanomuon import tensor_parallel
from nanomuon.optim import (
    Bank,
    InPieces,
    OwnedElsewhere,
    OwnedHere,
    WholeEverywhere,
    World,
    assign_owners,
    batches,
    drop_gradients,
    gradient,
    like_param,
    local,
    matrices_of,
    matrix_shape,
    muon_hyperparameters,
    state_dtype,
    update_matrices,
    update_momentum,
    update_scales,
)

# Of whole matrices that come to an owner at a time
CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**26, "meta": 2**26}


# ------------------------------------------------------------------------------------------------------------
# How a parameter is cut


@dataclass(frozen=True)
class Cut:
    """One dimension of the parameter, cut over the ranks of one dimension of its device mesh."""

    world: World
    dim: int  # of the parameter
    is_tensor_parallel: bool


def cuts(param, world_of):
    """The cuts of a parameter in the order of its mesh. world_of: the World of a process group."""
    if not isinstance(param, DTensor):
        return param.planned_cuts
    mesh, found = param.device_mesh, []
    for axis, placement in enumerate(param.placements):
        if not placement.is_replicate() and mesh.size(axis) > 1:
            found.append(Cut(world_of(mesh.get_group(axis)), placement.dim, is_tensor_parallel(mesh, axis)))
    return found


def is_tensor_parallel(mesh, axis):
    return mesh.mesh_dim_names is not None and mesh.mesh_dim_names[axis] == "tp"


def whole_shape(param):
    """(m, n) of the matrices of a parameter in pieces, whole."""
    shape = tuple(getattr(param, "planned_shape", param.shape))
    return shape[1:] if len(shape) == 3 else (shape[0], math.prod(shape[1:]))


@dataclass(frozen=True)
class Layout:
    """Where the matrices of a cut parameter live, and what a rank computes of them.

    shape: (m, n) of what the direction is asked for: the whole matrix, or a tensor-parallel rank's piece of
    it. data_parallel, tensor_parallel: the cut of either sort, or nothing. dim: of a batch, 1 rows or 2
    columns, that data_parallel cuts. vectors_cut: whether the state of the direction is in pieces over "tp"
    (blockwise).
    """

    shape: tuple
    direction: object
    data_parallel: tuple = ()
    dim: int = 0
    tensor_parallel: tuple = ()
    vectors_cut: bool = False


def layout(param, group, direction, cuts):
    """The Layout of a Muon parameter. ValueError for cuts that are not provided for."""
    batch = int(param.ndim == 3)
    shape = m, n = whole_shape(param)
    data_parallel, dim, tp, tp_dim = (), 0, (), 0
    for cut in cuts:
        if batch and cut.dim == 0:
            continue  # experts: each rank has whole matrices
        cut_dim = cut.dim + 1 - batch
        matrix_dims = (1, 2) if param.ndim < 4 else (1,)  # a convolution is (out, rest)
        cuts_matrix = cut_dim in matrix_dims
        if cut.is_tensor_parallel:
            possible = cuts_matrix
        else:
            possible = cuts_matrix and not batch and not data_parallel
        if not possible:
            where = f"{param.placements} over {param.device_mesh}"
            raise ValueError(
                f"cut as {where}: Muon has no transport for this. The mesh dimension of tensor parallelism "
                'has to be called "tp" (mesh_dim_names)'
            )
        if not cut.is_tensor_parallel:
            data_parallel, dim = (cut,), cut_dim
        elif dim == cut_dim and isinstance(param, DTensor) and isinstance(param.placements[0], Shard):
            raise ValueError(
                "cut by data and then by tensor parallelism: call parallelize_module before fully_shard"
            )
        else:
            tp, tp_dim = (cut,), cut_dim
    if not tp:
        return Layout(shape, direction, data_parallel, dim)
    world = tp[0].world
    mode = tensor_parallel.choose_mode(group, shape, tp_dim, world)
    direction = tensor_parallel.direction_of_pieces(mode, direction, world, tp_dim, shape)
    lo, hi = world.share(shape[tp_dim - 1])
    held = (hi - lo, n) if tp_dim == 1 else (m, hi - lo)
    return Layout(held, direction, data_parallel, dim, tp, vectors_cut=mode == "blockwise")


# ------------------------------------------------------------------------------------------------------------
# The plan


def pieces_of_work(optimizer, named):
    """The works of Muon parameters that are cut over a mesh. named: (name, parameter, group)."""
    world_of = functools.cache(functools.partial(World.of, comm_dtype=optimizer.world.comm_dtype))
    alike = {}  # what has to be equal -> [(parameter, group)]
    for name, param, group in named:
        if 0 in whole_shape(param):
            continue  # without elements it has no polar factor
        direction = optimizer.direction(group, whole_shape(param)[0], param.device)
        try:
            where = layout(param, group, direction, cuts(param, world_of))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        batch = name if param.ndim == 3 else ""  # one by itself
        form = group["nesterov"], group["weight_decay_form"], param.dtype, param.device
        alike.setdefault((where, batch, *form), []).append((param, group))
    shared = optimizer.hyperparameters, optimizer.free_grads
    works, chunks = [], []
    for (where, *_), entries in reversed(alike.items()):
        if where.data_parallel:
            chunks += [(part, where) for part in cut_into_chunks(entries, where, optimizer.chunk_size)]
        else:
            works.append(BankOfPieces(entries, where, *shared))
    if chunks:
        # The most expensive matrices choose their owners first, and are the first in the pipeline
        chunks.sort(key=lambda chunk: -chunk[1].direction.flops(*chunk[1].shape))
        chunks = [Chunk(entries, where, *shared) for entries, where in chunks]
        # First, so that its first transfer runs under the other works
        works.insert(0, Pipeline(chunks, optimizer.max_in_flight))
    return works


def cut_into_chunks(entries, where, size):
    """Runs of `size` matrices, by default of about CHUNK_BYTES on each owner."""
    if size is None:
        bytes_of_one = 4 * math.prod(where.direction.whole_shape(*where.shape))
        on_each_owner = CHUNK_BYTES[entries[0][0].device.type] // bytes_of_one
        size = where.data_parallel[0].world.size * max(1, on_each_owner)
    return [entries[lo : lo + size] for lo in range(0, len(entries), size)]


def state_placements(param, where):
    """How a direction's state is cut over the parameter's mesh: experts with their matrices, vectors of
    blocks.
    """
    placements = [Replicate()] * param.device_mesh.ndim
    for axis, placement in enumerate(param.placements):
        if param.ndim == 3 and not placement.is_replicate() and placement.dim == 0:
            placements[axis] = placement  # strided, where two dimensions of the mesh cut the experts
        elif where.vectors_cut and is_tensor_parallel(param.device_mesh, axis):
            placements[axis] = Shard(int(param.ndim == 3))
    return tuple(placements)


def whole_state_shape(param, name, buffer, where):
    """The shape of the whole of a direction's state, of which this rank has `buffer`, (k, *shape)."""
    shape = list(buffer.shape[1:])
    if where.vectors_cut:  # the vectors of the blocks, one below the other
        shape[-2] *= where.tensor_parallel[0].world.size
    return (len(param), *shape) if param.ndim == 3 else tuple(shape)


# ------------------------------------------------------------------------------------------------------------
# The pieces of work


class BankOfPieces(Bank):
    """A bank of what this rank holds: whole experts, or pieces that tensor parallelism orthogonalizes
    together.
    """

    def __init__(self, entries, where, hyperparameters, free_grads):
        self.where = where
        super().__init__(entries, where.direction, World(), hyperparameters, free_grads)

    def place(self, i, param, name, buffer):
        mine = self.as_parameter(buffer, i, param, name)
        if not isinstance(param, DTensor):  # planned only
            return WholeEverywhere(mine)
        if name == "momentum_buffer":
            return InPieces(mine, param.shape, param.device_mesh, param.placements)
        placements = state_placements(param, self.where)
        if all(placement.is_replicate() for placement in placements):
            return WholeEverywhere(mine)
        shape = whole_state_shape(param, name, buffer, self.where)
        return InPieces(mine, shape, param.device_mesh, placements)


class Chunk:
    """Same-shaped matrices that go through the pipeline together: K in all, k of them whole at this rank,
    their owner.

    Momentum, weight decay and update are elementwise and happen on the shards; the direction, with what it
    keeps, at the owner. The owners are ascending, so a rank's matrices are consecutive.
    """

    def __init__(self, entries, where, hyperparameters, free_grads):
        self.params = [param for param, _ in entries]
        self.matrices = matrices_of(entries)
        self.where, self.direction, self.free_grads = where, where.direction, free_grads
        self.shape, self.dim, self.world = where.shape, where.dim, where.data_parallel[0].world
        self.owners = assign_owners(len(entries), self.world.load)
        for owner in self.owners:
            self.world.load[owner] += self.direction.flops(*self.shape)
        self.first = sum(owner < self.world.rank for owner in self.owners)  # of the owned ones
        self.count = self.owners.count(self.world.rank)  # k

        param, group = entries[0]
        self.nesterov = group["nesterov"]
        self.cautious = group["weight_decay_form"] == "cautious"
        zeros = functools.partial(torch.zeros, dtype=state_dtype(param), device=param.device)
        self.momentum = zeros(len(entries), *matrix_shape(local(param)))
        self.kept = {
            name: zeros(self.count, *shape) for name, shape in self.direction.state(*self.shape).items()
        }
        self.scale = self.scales_of_shards()
        self.batches = batches(self.count, self.direction.whole_shape(*self.shape), param.device)
        self.table = hyperparameters.table(
            muon_hyperparameters, [group for _, group in entries], self.momentum
        )
        self.ok_index = hyperparameters.positions(self.params, param.device)
        self.places = {}
        for i, param in enumerate(self.params):
            self.places[param] = {
                "momentum_buffer": like_param(param, self.momentum[i].view(local(param).shape))
            }
            self.places[param] |= {name: self.place(i, param, name, kept) for name, kept in self.kept.items()}

    def scales_of_shards(self):
        """(K, 1, 1), or (K, rows, 1) of the rows of fused matrices that are here."""
        scale = update_scales(self.direction, self.matrices, self.shape, self.momentum)
        if self.dim == 1 and scale.size(1) > 1:
            lo, hi = self.world.share(scale.size(1))
            return scale[:, lo:hi]
        return scale

    def place(self, i, param, name, kept):
        """At the owner, over the ranks of tensor parallelism in pieces if it is so."""
        shape = whole_state_shape(param, name, kept, self.where)
        if self.owners[i] != self.world.rank:
            return OwnedElsewhere(shape, param, self.world, self.owners[i])
        mine = kept[i - self.first]
        if self.where.vectors_cut and isinstance(param, DTensor):
            return OwnedInPieces(mine, shape, param.device_mesh["tp"], (Shard(0),), self.world)
        return OwnedHere(mine, self.world)

    def collect(self, ok):
        """Momentum of the shards, and their way to the owners."""
        with record_function("muon.collect"):
            grads = [matrix.of(gradient(matrix.param)) for matrix in self.matrices]
            grads = torch.stack(grads)  # (K, rows, columns)
            hyper = self.table.batch(0, len(grads))
            self.ok = ok[self.ok_index].view(-1, 1, 1).to(self.momentum.dtype)
            U = update_momentum(self, grads, self.momentum, self.ok, hyper).to(self.world.sent_dtype(grads))
            if self.free_grads:
                drop_gradients(self.params)
            sent = [self.owners.count(rank) * U[0].numel() for rank in range(self.world.size)]
            self.transfer = self.world.all_to_all(U.flatten(), sent, self.shard_sizes())

    def compute(self):
        """The direction of the owned matrices, and the way of its shards back."""
        with record_function("muon.compute"):
            X = self.join_shards(self.transfer.wait())
            comm_dtype, X = X.dtype, X.to(self.momentum.dtype)  # (k, m, n)
            last = self.first + self.count
            ok, weight = self.ok[self.first : last], self.table.batch(self.first, last)["square_weight"]
            for lo, hi in self.batches:
                kept = {name: buffer[lo:hi] for name, buffer in self.kept.items()}
                direction, gain = self.direction(X[lo:hi], kept, ok[lo:hi], weight[lo:hi])
                torch.mul(direction, gain, out=X[lo:hi])
            mine = math.prod(self.momentum.shape[1:])
            received = [self.owners.count(rank) * mine for rank in range(self.world.size)]
            shards = self.cut_into_shards(X.to(comm_dtype))
            self.transfer = self.world.all_to_all(shards, self.shard_sizes(), received)

    def deliver(self):
        """Weight decay and update of the shards."""
        with record_function("muon.deliver"):
            params = [matrix.of(matrix.param) for matrix in self.matrices]
            X = self.transfer.wait().view(self.momentum.shape)
            del self.transfer
            P, one = torch.stack(params), self.momentum.new_ones(1, 1, 1)
            update_matrices(self, P, X, one, self.ok, self.table.batch(0, len(params)), self.scale)
            torch._foreach_copy_(params, P.unbind())

    def shard_sizes(self):
        """Elements that each rank holds of the owned matrices."""
        sizes = []
        for rank in range(self.world.size):
            lo, hi = self.world.share(self.shape[self.dim - 1], rank)
            sizes.append(self.count * (hi - lo) * self.shape[2 - self.dim])
        return sizes

    # The first ranks hold `each` lines (rows or columns), the next one what is left, the last ones nothing:
    # two operations cut a matrix for a thousand ranks.

    def cut_into_shards(self, X):
        """(k, m, n) owned matrices. Gives their shards, rank after rank, flat."""
        each, in_full_shards = self.full_shards()
        full = X.narrow(self.dim, 0, in_full_shards).unflatten(self.dim, (-1, each)).movedim(self.dim, 0)
        left = X.narrow(self.dim, in_full_shards, X.size(self.dim) - in_full_shards)
        return torch.cat([full.flatten(), left.flatten()]) if left.numel() else full.flatten()

    def join_shards(self, shards):
        """The inverse of cut_into_shards."""
        each, in_full_shards = self.full_shards()
        m, n = self.shape
        shape = (self.count, each, n) if self.dim == 1 else (self.count, m, each)
        full, left = shards.tensor_split([in_full_shards * self.count * self.shape[2 - self.dim]])
        full = full.view(in_full_shards // each, *shape).movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        if not left.numel():
            return full
        left = left.view(self.count, -1, n) if self.dim == 1 else left.view(self.count, m, -1)
        return torch.cat([full, left], dim=self.dim)

    def full_shards(self):
        """Lines of a full shard, and lines in all full shards."""
        lines = self.shape[self.dim - 1]
        _, each = self.world.share(lines, 0)
        each = max(1, each)  # tensor parallelism may have left no lines here
        return each, lines - lines % each


class OwnedInPieces(InPieces):
    """In pieces over some ranks, each of which owns its piece within `world`."""

    def __init__(self, tensor, shape, mesh, placements, world):
        super().__init__(tensor, shape, mesh, placements)
        self.world = world

    def gathered(self):
        return self.world.broadcast_from(self.world.rank, super().gathered().contiguous()).wait()


class Pipeline:
    """All chunks, as one piece of work: `step` never hears of them.

    One chunk is admitted a round, so that its collect runs under the compute of the one before. The first one
    is admitted in compute(), under the other works.
    """

    def __init__(self, chunks, max_in_flight):
        self.chunks, self.max_in_flight = chunks, max_in_flight
        self.collected = []
        self.places = {}
        for chunk in chunks:
            self.places |= chunk.places

    def in_flight_bytes(self):
        """What the largest chunks send and receive."""
        sizes = sorted(chunk.momentum.nbytes for chunk in self.chunks)
        return 2 * sum(sizes[-self.max_in_flight :])

    def batch_bytes(self):
        sizes = [4 * chunk.count * math.prod(chunk.shape) * chunk.momentum.itemsize for chunk in self.chunks]
        return max(sizes)

    def collect(self):
        """Momentum comes first, and needs to know that all gradients are finite."""

    def compute(self, ok):
        self.ok = ok
        self.waiting, self.in_flight = deque(self.chunks), deque()
        self.admit()

    def deliver(self):
        while self.in_flight:
            if self.waiting and len(self.in_flight) == self.max_in_flight:
                for stage in self.in_flight.popleft():  # all that is left of the oldest
                    stage()
            earlier = list(self.in_flight)
            if self.waiting:
                self.admit()
            for stages in reversed(earlier):  # the oldest last: its delivery runs under the others' compute
                stages.popleft()()
            self.in_flight = deque(stages for stages in self.in_flight if stages)

    def admit(self):
        chunk = self.waiting.popleft()
        chunk.collect(self.ok)
        self.in_flight.append(deque([chunk.compute, chunk.deliver]))
