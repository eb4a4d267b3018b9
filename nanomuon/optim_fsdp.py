"""Muon on parameters that are sharded (DTensors), modeled on Motif's parallel Muon; extends `optim.py`.

A DTensor that is not cut anywhere counts as replicated. Otherwise its gradient counts as final (FSDP2 has
averaged it; in tensor parallelism it is exact, and the loop averages it over data-parallel ranks), and
momentum and AdamW's moments are cut like it. The dimension of the device mesh that cuts the matrices decides
how they are updated:

  the experts of (E, m, n)    whole matrices on every rank: nothing moves
  a dimension called "tp"     tensor parallelism: the ranks orthogonalize together (`optim_tp.py`)
  any other (FSDP2)           data parallelism: an all_to_all brings the shards of each matrix to its owner;
                              another one returns the shards of its update, and what the rule has changed of
                              its state

The first two are a `Bank` of this rank's shards. The third is a `Pipeline`, one work item made of chunks of
same-shaped matrices, about CHUNK_BYTES of them per owner. Momentum, weight decay and update are elementwise
and happen on the shards; the rule, which needs whole matrices, at their owner. Every rank keeps the rule's
state of all matrices, a vector each, so that it is saved like any state that is whole on every rank. With W
ranks, a rank sends 2(W-1)/W times the bytes of its shards, and (W-1) times those of the vectors it owns.
"""

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate, Shard

from nanomuon import optim_tp
from nanomuon.optim import (
    Bank,
    Exchange,
    MuonItem,
    Rule,
    Transfer,
    World,
    as_matrices,
    assign_owners,
    batches,
    gradient_dtype,
    muon_momentum,
    muon_update,
    owned_by,
    rule_of,
    unbound,
    write,
)
from nanomuon.optim_state import Place, like_param, local

# Whole matrices that an owner receives at a time
CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**26}


# ------------------------------------------------------------------------------------------------------------
# How a parameter is cut


def is_tensor_parallel(mesh, axis):
    return mesh.mesh_dim_names is not None and mesh.mesh_dim_names[axis] == "tp"


def whole_shape(param):
    """(m, n) of the whole matrices of a cut parameter."""
    return tuple(param.shape[1:]) if param.ndim == 3 else (param.shape[0], math.prod(param.shape[1:]))


@dataclass
class Sharding:
    """How a Muon parameter is cut, and what a rank computes of its matrices.

    shape: (m, n) of the rule's input: the whole matrix, or a tensor-parallel rank's shard of it.
    data_parallel: the World of FSDP2, or None; dim: the one of a batch that it cuts, 1 rows or 2 columns.
    blocks: how many blocks tensor parallelism orthogonalizes separately; 1 unless its mode is blockwise.
    """

    shape: tuple
    rule: Rule
    data_parallel: World | None = None
    dim: int = 0
    blocks: int = 1


def sharding_of(param, group, comm_dtype, ns_dtype):
    """The Sharding of a Muon parameter. ValueError for unsupported cuts."""
    batch, mesh = int(param.ndim == 3), param.device_mesh
    shape = m, n = whole_shape(param)
    data_parallel, dim, tp = None, 0, None
    for axis, placement in enumerate(param.placements):
        if placement.is_replicate() or mesh.size(axis) == 1 or (batch and placement.dim == 0):
            continue  # of experts each rank has whole matrices
        cut_dim, world = placement.dim + 1 - batch, World.of(mesh.get_group(axis), comm_dtype)
        possible = cut_dim in ((1, 2) if param.ndim < 4 else (1,))  # a convolution is (out, rest)
        if is_tensor_parallel(mesh, axis):
            # FSDP2 makes a _StridedShard of what tensor parallelism has cut before
            if dim == cut_dim and sum(isinstance(each, Shard) for each in param.placements) > 1:
                raise ValueError(
                    "cut by data and then by tensor parallelism: call parallelize_module before fully_shard"
                )
            tp = optim_tp.Cut(world, cut_dim, shape[cut_dim - 1])
        else:
            possible = possible and not batch and data_parallel is None
            data_parallel, dim = world, cut_dim
        if not possible:
            raise ValueError(
                f"cut as {param.placements} over {mesh}: Muon does not support this. The mesh dimension of "
                'tensor parallelism must be called "tp" (mesh_dim_names)'
            )
    if tp is None:
        return Sharding(shape, rule_of(group, m, n, ns_dtype), data_parallel, dim)
    mode = optim_tp.choose_mode(group, shape, tp.dim, tp.world)
    lo, hi = tp.world.span(tp.length, tp.world.rank)
    held = (hi - lo, n) if tp.dim == 1 else (m, hi - lo)
    if mode == "blockwise":  # each block is its own matrix
        rule = rule_of(group, *held, ns_dtype)
        return Sharding(held, rule, data_parallel, dim, blocks=tp.world.size)
    make_rule = optim_tp.duplicated if mode == "duplicated" else optim_tp.distributed
    return Sharding(held, make_rule(rule_of(group, m, n, ns_dtype), tp), data_parallel, dim)


# ------------------------------------------------------------------------------------------------------------
# The plan


def plan_group(optimizer, group, params):
    """The work items of the cut parameters of a Muon group."""
    names = dict(zip(group["params"], group["names"], strict=True))
    same = {}  # what must be equal -> (sharding, parameters)
    for param in params:
        try:
            sharding = sharding_of(param, group, optimizer.world.comm_dtype, optimizer.ns_dtype)
        except ValueError as error:
            raise ValueError(f"{names[param]}: {error}") from None
        own = id(param) if param.ndim == 3 else None  # a batch of matrices is its own bank
        cut = param.device_mesh, tuple(param.placements)
        key = whole_shape(param), cut, param.dtype, gradient_dtype(param), own
        same.setdefault(key, (sharding, []))[1].append(param)
    banks, chunks = [], []
    for sharding, params_of_one in same.values():
        if sharding.data_parallel is None:
            exchange = InPlace(params_of_one, sharding)
            banks.append(Bank(params_of_one, group, sharding.rule, exchange))
            continue
        size = chunk_size(sharding, params_of_one[0].device)
        chunks += [(params_of_one[lo : lo + size], sharding) for lo in range(0, len(params_of_one), size)]
    # The most expensive matrices are assigned first, and go first in the pipeline
    chunks.sort(key=lambda chunk: -chunk[1].rule.cost)
    pipelines = {}  # one per dtype of the state, in which numbers are on the device
    for params_of_one, sharding in chunks:
        world = sharding.data_parallel
        owned_cost = optimizer.owned_cost.setdefault(world, [0] * world.size)
        owners = assign_owners(len(params_of_one), sharding.rule.cost, owned_cost)
        chunk = Chunk(params_of_one, group, sharding, owners)
        pipelines.setdefault(chunk.dtype, []).append(chunk)
    return [Pipeline(chunks, group) for chunks in pipelines.values()] + banks


def chunk_size(sharding, device):
    """How many matrices go through the pipeline together: about CHUNK_BYTES per owner."""
    most = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])
    on_each_owner = most // (4 * math.prod(sharding.rule.shape))
    return sharding.data_parallel.size * max(1, on_each_owner)


def state_placements(param, sharding):
    """How a rule's state is cut over the parameter's mesh: by experts, or by blocks."""
    placements = [Replicate()] * param.device_mesh.ndim
    for axis, placement in enumerate(param.placements):
        if param.ndim == 3 and not placement.is_replicate() and placement.dim == 0:
            placements[axis] = placement  # strided, if two dimensions of the mesh cut the experts
        elif sharding.blocks > 1 and is_tensor_parallel(param.device_mesh, axis):
            placements[axis] = Shard(int(param.ndim == 3))
    return placements


def place_of(param, i, name, buffer, sharding):
    """The Place of a state tensor of the i-th parameter; buffer: those of all, stacked."""
    tensor = buffer if param.ndim == 3 else buffer[i]
    if name == "momentum_buffer":
        return like_param(param, tensor.view(local(param).shape))
    placements = state_placements(param, sharding)
    if all(placement.is_replicate() for placement in placements):
        return Place(tensor)
    shape = buffer.shape[1:]
    if sharding.blocks > 1:  # the vectors of the blocks, concatenated
        shape = (shape[0] * sharding.blocks, *shape[1:])
    if param.ndim == 3:
        shape = (len(param), *shape)
    return Place(tensor, shape, param.device_mesh, placements)


# ------------------------------------------------------------------------------------------------------------
# Transport


class InPlace(Exchange):
    """Of a bank of whole experts, or of shards that tensor parallelism orthogonalizes together: every rank
    works on what it has.
    """

    def __init__(self, params, sharding):
        self.sharding = sharding
        super().__init__(params, [0] * len(unbound([local(param) for param in params])), World())

    def place(self, i, name, buffer):
        return place_of(self.params[i], i, name, buffer, self.sharding)


class ShardExchange:
    """How the shards of K matrices travel to the owners and back, by all_to_all.

    owners: the rank of each matrix, ascending, so a rank's matrices are consecutive. A shard is some lines of
    its matrix: rows, or columns if `dim` is 2; here lines are always the first dimension of a matrix.
    """

    def __init__(self, params, owners, sharding):
        self.params, self.sharding, self.world = params, sharding, sharding.data_parallel
        ranks = range(self.world.size)
        self.counts = [owners.count(rank) for rank in ranks]  # matrices that each rank owns
        self.owned = owned_by(self.world.rank, owners)
        dim, shape = sharding.dim, sharding.shape
        self.spans = [self.world.span(shape[dim - 1], rank) for rank in ranks]
        self.lines = [hi - lo for lo, hi in self.spans]  # of a matrix, on each rank
        self.length = shape[2 - dim]  # of a line
        self.dtype = self.world.comm_dtype or gradient_dtype(params[0])  # of both transfers

    def to_owners(self, shards):
        """shards: (K, lines, length), this rank's. Receives those of the owned matrices, a list of
        (k, lines, length) of each rank.
        """
        owned, mine = self.counts[self.world.rank], self.lines[self.world.rank]
        send = [count * mine * self.length for count in self.counts]
        receive = [owned * lines * self.length for lines in self.lines]
        transfer = self.world.all_to_all(shards.to(self.dtype).flatten(), send, receive)
        views = []
        for part, lines in zip(transfer.received.split(receive), self.lines, strict=True):
            views.append(part.view(owned, lines, self.length))
        return Transfer(views, [transfer])

    def from_owners(self, matrices, buffers):
        """matrices: (k, lines, length), the owned ones; buffers: {name: (K, ...)}, in which the owned entries
        have changed. Receives bytes, for `unpack`.

        The state goes behind the shards, to all ranks alike: bits, which no dtype of transfers rounds.
        """
        changed = [as_bytes(buffer[self.owned]) for buffer in buffers.values()]
        messages = []
        for lines in matrices.to(self.dtype).split(self.lines, dim=1):
            messages.append(torch.cat([as_bytes(lines), *changed]))
        receive = [count * sum(self.bytes_of_matrix(buffers)) for count in self.counts]
        return self.world.all_to_all(torch.cat(messages), [len(each) for each in messages], receive)

    def bytes_of_matrix(self, buffers):
        """That a rank receives: of its shard, and of each buffer."""
        shard = self.lines[self.world.rank] * self.length * self.dtype.itemsize
        return [shard, *[buffer[:1].nbytes for buffer in buffers.values()]]

    def unpack(self, received, buffers):
        """This rank's shards of all matrices, (K, lines, length). Writes all entries of the buffers."""
        sizes = self.bytes_of_matrix(buffers)
        of_ranks = received.split([count * sum(sizes) for count in self.counts])
        fields = []  # of each rank: the shards, and every buffer
        for part, count in zip(of_ranks, self.counts, strict=True):
            fields.append(part.split([count * size for size in sizes]))
        shards, *state = [torch.cat(of_all) for of_all in zip(*fields, strict=True)]
        for buffer, values in zip(buffers.values(), state, strict=True):
            buffer.copy_(values.view(buffer.dtype).view(buffer.shape))
        return shards.view(self.dtype).view(sum(self.counts), -1, self.length)

    def place(self, i, name, buffer):
        return place_of(self.params[i], i, name, buffer, self.sharding)


def as_bytes(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


# ------------------------------------------------------------------------------------------------------------
# The pipeline


class Chunk(MuonItem):
    """Same-shaped matrices that go through the pipeline together: K in all, of which this rank owns k."""

    def __init__(self, params, group, sharding, owners):
        super().__init__(params, group, sharding.rule, ShardExchange(params, owners, sharding), len(params))
        self.dim, self.owned = sharding.dim, self.exchange.owned
        self.batches = batches(self.owned.stop - self.owned.start, sharding.rule.shape, self.device)
        if self.dim == 1 and self.scale.ndim:  # one per row
            self.scale = self.scale[slice(*self.exchange.spans[self.exchange.world.rank])]

    def rule_buffers(self):
        return {name: self.buffers[name] for name in self.rule.buffers}

    def send_momentum(self, ok, hyper):
        """Update the momentum of all shards, and send U to the owners. ok: (K, 1, 1)."""
        grads, buffer = torch.stack(self.gradients()), self.buffers.get("momentum_buffer")
        U = muon_momentum(grads, buffer, ok, hyper, nesterov=self.group["nesterov"])
        return self.exchange.to_owners(U.transpose(1, self.dim))

    def send_directions(self, shards, ok, hyper):
        """The rule, on the owned matrices. shards: of U, of each rank."""
        U = torch.cat(shards, dim=1).transpose(1, self.dim).to(self.dtype)  # (k, m, n)
        ok, buffers = ok[self.owned], self.rule_buffers()
        for batch in self.batches:
            of_batch = {name: buffer[self.owned][batch] for name, buffer in buffers.items()}
            X, gain = self.rule.function(U[batch], of_batch, ok[batch], hyper)
            torch.mul(X, gain.to(self.dtype), out=U[batch])  # now the direction of the update
        return self.exchange.from_owners(U.transpose(1, self.dim), buffers)

    def update_shards(self, received, ok, hyper):
        """Weight decay and update of all shards."""
        X = self.exchange.unpack(received, self.rule_buffers()).transpose(1, self.dim)
        del received
        tensors, one = self.tensors(), ok.new_ones(1, 1, 1)
        P, cautious = torch.stack(as_matrices(tensors)), self.group["weight_decay_form"] == "cautious"
        muon_update(P, X, one, self.scale, ok, hyper, cautious=cautious)
        write(P.unbind(), tensors)


class Pipeline:
    """All chunks as one work item. While a chunk computes, the next one's momentum and the one before's
    directions travel: at most three have buffers to send and receive at once. The first chunk's momentum
    travels while the other work items compute.
    """

    def __init__(self, chunks, group):
        self.chunks, self.group, self.dtype = chunks, group, chunks[0].dtype
        self.params, self.places = [], {}
        for chunk in chunks:
            self.params += chunk.params
            self.places |= chunk.places

    def __str__(self):
        return f"pipeline of {len(self.chunks)} chunks"

    def of_chunks(self, ok):
        """(K, 1, 1) of each chunk."""
        return ok.to(self.dtype).view(-1, 1, 1).split([len(chunk.params) for chunk in self.chunks])

    def collect(self, ok, hyper):
        return self.chunks[0].send_momentum(self.of_chunks(ok)[0], hyper)

    def compute(self, shards, ok, hyper):
        ok, chunks = self.of_chunks(ok), self.chunks
        arriving, returning = {0: Transfer(shards)}, {}
        del shards  # popped below, or the first stack would live to the end
        for i in range(len(chunks) + 1):
            if i + 1 < len(chunks):
                arriving[i + 1] = chunks[i + 1].send_momentum(ok[i + 1], hyper)
            if i < len(chunks):
                returning[i] = chunks[i].send_directions(arriving.pop(i).wait(), ok[i], hyper)
            if i > 0:
                chunks[i - 1].update_shards(returning.pop(i - 1).wait(), ok[i - 1], hyper)

    def send(self):
        return Transfer(None)

    def deliver(self, nothing):
        pass
