"""Muon on parameters that live in pieces (DTensors), modeled on Motif's parallel Muon; extends `optim.py`.

A DTensor that is not cut anywhere counts as replicated. Otherwise its gradient counts as final (FSDP2 has
averaged it; in tensor parallelism it is exact, and the loop averages it over data-parallel ranks), and
momentum and AdamW's moments are cut like it. The dimension of the device mesh that cuts the matrices decides
how they are updated:

  the experts of (E, m, n)    whole matrices on every rank: nothing moves
  a dimension called "tp"     tensor parallelism: the ranks orthogonalize together (`optim_tp.py`)
  any other (FSDP2)           data parallelism: an all_to_all brings the shards of each matrix to its owner,
                              which keeps its second moment; another one returns the shards of its update

The first two are a `Bank` of this rank's pieces. The third is a `Pipeline`, one work item made of chunks
of same-shaped matrices, about CHUNK_BYTES of them per owner: one chunk is admitted per round, so that its
collect overlaps the compute of the one before; the first one's overlaps the AdamW groups and the experts. A
rank sends 2(W-1)/W times the bytes of its shards.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from nanomuon import optim_tp
from nanomuon.optim import (
    Bank,
    World,
    assign_owners,
    direction_of,
    gradient,
    gradient_dtype,
    matrices,
    muon_momentum,
    muon_update,
)
from nanomuon.optim_state import Place, like_param, local

# Whole matrices that an owner receives at a time
CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**26}


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


def plain_shards(param):
    """How many placements are Shard. FSDP2 makes a _StridedShard of what tensor parallelism has cut."""
    return sum(isinstance(placement, Shard) for placement in param.placements)


def is_tensor_parallel(mesh, axis):
    return mesh.mesh_dim_names is not None and mesh.mesh_dim_names[axis] == "tp"


def whole_shape(param):
    """(m, n) of the whole matrices of a cut parameter."""
    shape = tuple(getattr(param, "planned_shape", param.shape))
    return shape[1:] if len(shape) == 3 else (shape[0], math.prod(shape[1:]))


@dataclass
class Sharding:
    """How a Muon parameter is cut, and what a rank computes of its matrices.

    shape: (m, n) of the direction's input: the whole matrix, or a tensor-parallel rank's piece of it.
    data_parallel: the World of FSDP2, or None; dim: the one of a batch that it cuts, 1 rows or 2 columns.
    blocks: how many blocks tensor parallelism orthogonalizes separately; 1 unless its mode is blockwise.
    """

    shape: tuple
    direction: object
    data_parallel: World | None = None
    dim: int = 0
    blocks: int = 1


def sharding_of(param, group, cuts_of_param, ns_dtype, run_kernel):
    """The Sharding of a Muon parameter. ValueError for unsupported cuts."""
    batch = int(param.ndim == 3)
    shape = m, n = whole_shape(param)
    data_parallel, dim, tp, tp_dim = None, 0, None, 0
    for cut in cuts_of_param:
        if batch and cut.dim == 0:
            continue  # experts: each rank has whole matrices
        cut_dim = cut.dim + 1 - batch
        matrix_dims = (1, 2) if param.ndim < 4 else (1,)  # a convolution is (out, rest)
        possible = cut_dim in matrix_dims
        if not cut.is_tensor_parallel:
            possible = possible and not batch and data_parallel is None
        if not possible:
            where = f"{param.placements} over {param.device_mesh}"
            raise ValueError(
                f"cut as {where}: Muon does not support this. The mesh dimension of tensor parallelism "
                'must be called "tp" (mesh_dim_names)'
            )
        if not cut.is_tensor_parallel:
            data_parallel, dim = cut.world, cut_dim
        elif dim == cut_dim and isinstance(param, DTensor) and plain_shards(param) > 1:
            raise ValueError(
                "cut by data and then by tensor parallelism: call parallelize_module before fully_shard"
            )
        else:
            tp, tp_dim = cut.world, cut_dim
    if tp is None:
        return Sharding(shape, direction_of(group, m, n, ns_dtype, run_kernel), data_parallel, dim)
    mode = optim_tp.choose_mode(group, shape, tp_dim, tp)
    lo, hi = tp.share(shape[tp_dim - 1], tp.rank)
    held = (hi - lo, n) if tp_dim == 1 else (m, hi - lo)
    if mode == "blockwise":  # each block is its own matrix
        direction = direction_of(group, *held, ns_dtype, run_kernel)
        return Sharding(held, direction, data_parallel, dim, blocks=tp.size)
    direction = direction_of(group, m, n, ns_dtype, run_kernel)
    kind = optim_tp.Duplicated if mode == "duplicated" else optim_tp.Distributed
    pieces = optim_tp.Pieces(tp, tp_dim, shape)
    return Sharding(held, kind(direction, pieces), data_parallel, dim)


# ------------------------------------------------------------------------------------------------------------
# The plan


def plan_group(optimizer, group, params, run_kernel):
    """The work items of the cut parameters of a Muon group."""
    names = dict(zip(group["params"], group["names"], strict=True))

    def world_of(process_group):
        """One for all groups of the optimizer: it counts the work that its ranks have already."""
        if process_group not in optimizer.worlds:
            optimizer.worlds[process_group] = World(process_group, optimizer.world.comm_dtype)
        return optimizer.worlds[process_group]

    alike = {}  # what must be equal -> (sharding, parameters)
    for param in params:
        found = cuts(param, world_of)
        try:
            sharding = sharding_of(param, group, found, optimizer.ns_dtype, run_kernel)
        except ValueError as error:
            raise ValueError(f"{names[param]}: {error}") from None
        alone = id(param) if param.ndim == 3 else None  # a batch of matrices is its own bank
        key = whole_shape(param), tuple(found), param.dtype, gradient_dtype(param), alone
        alike.setdefault(key, (sharding, []))[1].append(param)
    items, chunks = [], []
    for sharding, together in alike.values():
        if sharding.data_parallel is None:
            items.append(BankOfPieces(together, group, sharding, run_kernel))
            continue
        size = chunk_size(sharding, together[0].device)
        chunks += [(together[lo : lo + size], sharding) for lo in range(0, len(together), size)]
    # The most expensive matrices are assigned first, and go first in the pipeline
    chunks.sort(key=lambda chunk: -chunk[1].direction.cost)
    pipelines = {}  # one per dtype of the state, in which numbers are on the device
    for together, sharding in chunks:
        owners = assign_owners(len(together), sharding.direction.cost, sharding.data_parallel.owned_cost)
        chunk = Chunk(together, group, sharding, owners, run_kernel)
        pipelines.setdefault(chunk.dtype, []).append(chunk)
    return [Pipeline(chunks, group) for chunks in pipelines.values()] + items


def chunk_size(sharding, device):
    """How many matrices go through the pipeline together: about CHUNK_BYTES per owner."""
    most = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])
    on_each_owner = most // (4 * math.prod(sharding.direction.shape))
    return sharding.data_parallel.size * max(1, on_each_owner)


def state_placements(param, sharding):
    """How a direction's state is cut over the parameter's mesh: by experts, or by blocks."""
    placements = [Replicate()] * param.device_mesh.ndim
    for axis, placement in enumerate(param.placements):
        if param.ndim == 3 and not placement.is_replicate() and placement.dim == 0:
            placements[axis] = placement  # strided, if two dimensions of the mesh cut the experts
        elif sharding.blocks > 1 and is_tensor_parallel(param.device_mesh, axis):
            placements[axis] = Shard(int(param.ndim == 3))
    return placements


def whole_state_shape(param, buffer, sharding):
    """The shape of a direction's whole state; this rank has `buffer`, (k, *shape)."""
    shape = buffer.shape[1:]
    if sharding.blocks > 1:  # the vectors of the blocks, concatenated
        shape = (shape[0] * sharding.blocks, *shape[1:])
    return (len(param), *shape) if param.ndim == 3 else shape


# ------------------------------------------------------------------------------------------------------------
# The work items


class BankOfPieces(Bank):
    """A bank of this rank's whole experts, or of pieces that tensor parallelism orthogonalizes together."""

    def __init__(self, params, group, sharding, run_kernel):
        self.sharding = sharding
        held = len(matrices([local(param) for param in params]))
        super().__init__(params, group, sharding.direction, [0] * held, World(), run_kernel)

    def place(self, i, name, buffer):
        param = self.params[i]
        mine = buffer if param.ndim == 3 else buffer[i]
        if name == "momentum_buffer":
            return like_param(param, mine.view(local(param).shape))
        if not isinstance(param, DTensor):  # planned only
            return Place(mine)
        placements = state_placements(param, self.sharding)
        if all(placement.is_replicate() for placement in placements):
            return Place(mine)
        return Place(mine, whole_state_shape(param, buffer, self.sharding), param.device_mesh, placements)


class Chunk(Bank):
    """Same-shaped matrices that go through the pipeline together: K in all; this rank owns k and gets them
    whole. Not a work item of its own: the Pipeline drives it.

    Momentum, weight decay and update are elementwise and happen on the shards; the direction, with its state,
    at the owner. The owners are ascending, so a rank's matrices are consecutive. A shard is some lines of its
    matrix: rows, or columns if `dim` is 2.
    """

    momentum_at_owner = False

    def __init__(self, params, group, sharding, owners, run_kernel):
        self.sharding, self.dim = sharding, sharding.dim
        super().__init__(params, group, sharding.direction, owners, sharding.data_parallel, run_kernel)
        length, self.other = sharding.shape[self.dim - 1], sharding.shape[2 - self.dim]
        ranks = range(self.world.size)
        shares = [self.world.share(length, rank) for rank in ranks]
        self.lines = [hi - lo for lo, hi in shares]  # of a matrix, on each rank
        # Elements sent to each rank: shards of the matrices it owns; and received from it: shards of ours
        self.send_counts = [owners.count(rank) * math.prod(self.shape) for rank in ranks]
        self.receive_counts = [owners.count(self.world.rank) * lines * self.other for lines in self.lines]
        if self.dim == 1 and self.scale.ndim:  # one per row
            lo, hi = shares[self.world.rank]
            self.scale = self.scale[lo:hi]

    def place(self, i, name, buffer):
        """Momentum with its shard, the rest at the owner: cut over the ranks of tensor parallelism if they
        work on blocks.
        """
        param, owner = self.params[i], self.owners[i]
        if name == "momentum_buffer":
            return like_param(param, buffer[i].view(local(param).shape))
        mesh, placements = None, []
        if self.sharding.blocks > 1 and isinstance(param, DTensor):
            mesh, placements = param.device_mesh["tp"], [Shard(0)]
        mine = buffer[i - self.owned.start] if owner == self.world.rank else None
        shape = whole_state_shape(param, buffer, self.sharding)
        return Place(mine, shape, mesh, placements, self.world, owner, like=buffer)

    def update(self, ok, numbers):
        """A generator of three stages: momentum, sent to the owners; the direction, sent back; weight decay
        and update. ok: (K,).
        """
        ok = ok.view(-1, 1, 1).to(self.dtype)
        grads = [gradient(param).contiguous() for param in self.params]
        transfer = self.send_to_owners(torch.stack(matrices(grads)), ok, numbers)
        yield
        transfer = self.compute_at_owner(transfer.wait(), ok[self.owned], numbers)
        yield
        self.update_shards(transfer.wait(), ok, numbers)

    def send_to_owners(self, grads, ok, numbers):
        """Update the momentum of all shards. grads: (K, ...) shards."""
        U = self.run_kernel(muon_momentum, grads, self.momentum, ok, numbers, nesterov=self.group["nesterov"])
        U = U.to(self.world.comm_dtype or grads.dtype)
        return self.all_to_all(U.transpose(1, self.dim).flatten(), self.send_counts, self.receive_counts)

    def compute_at_owner(self, shards, ok, numbers):
        """shards: U of the owned matrices, rank after rank, flat. ok: of the owned matrices."""
        parts = zip(shards.split(self.receive_counts), self.lines, strict=True)
        U = torch.cat([part.view(len(ok), lines, self.other) for part, lines in parts], dim=1)
        U = U.transpose(1, self.dim).to(self.dtype)  # (k, m, n)
        square_weight = numbers[-1].expand_as(ok)
        for batch in self.batches:
            kept = {name: buffer[batch] for name, buffer in self.kept.items()}
            X, gain = self.direction(U[batch], kept, ok[batch], square_weight[batch])
            torch.mul(X, gain.to(self.dtype), out=U[batch])  # now the direction of the update
        parts = U.to(shards.dtype).transpose(1, self.dim).split(self.lines, dim=1)
        X = torch.cat([part.flatten() for part in parts])
        return self.all_to_all(X, self.receive_counts, self.send_counts)

    def update_shards(self, X, ok, numbers):
        """X: shards of all directions, flat."""
        lines_first = self.momentum.transpose(1, self.dim).shape
        X = X.view(lines_first).transpose(1, self.dim)
        params = self.matrices()
        P, one = torch.stack(params), self.momentum.new_ones(1, 1, 1)
        self.run_kernel(muon_update, P, X, one, ok, numbers, self.scale, cautious=self.cautious)
        torch._foreach_copy_(params, P.unbind())

    def all_to_all(self, send, send_sizes, receive_sizes):
        """send: flat, send_sizes[r] elements for rank r. The Transfer brings receive_sizes[r] from each r."""
        result, collective = send.new_empty(sum(receive_sizes)), dist.all_to_all_single
        return self.world.start(result, collective, result, send, receive_sizes, send_sizes, sent=send)


class Pipeline:
    """All chunks as one work item: `step` does not know them.

    One chunk is admitted per round: while it sends its momentum, the one before computes and the one before
    that delivers. So at most three have buffers to send and receive at once.
    """

    def __init__(self, chunks, group):
        self.chunks, self.group, self.dtype = chunks, group, chunks[0].dtype
        self.params, self.places = [], {}
        for chunk in chunks:
            self.params += chunk.params
            self.places |= chunk.places

    def __str__(self):
        return f"pipeline of {len(self.chunks)} chunks"

    def update(self, numbers):
        ok = yield  # nothing to collect before: momentum comes first, and needs `ok`
        sizes = [len(chunk.params) for chunk in self.chunks]
        parts = zip(self.chunks, ok.split(sizes), strict=True)
        chunks = [chunk.update(part, numbers) for chunk, part in parts]
        next(chunks[0])  # its transfer runs during the other work items
        yield
        for admitted in range(1, len(chunks) + 2):
            for i in (admitted, admitted - 1, admitted - 2):
                if 0 <= i < len(chunks):
                    next(chunks[i], None)
