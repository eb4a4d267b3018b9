"""Muon on parameters that are sharded (DTensors), modeled on Motif's parallel Muon; extends `optim.py`.

A DTensor that is whole on every rank counts as replicated. The gradient of any other DTensor counts as final
(FSDP2 has averaged it; in tensor parallelism it is exact, and the loop averages it over data-parallel ranks),
and its momentum or AdamW moments are sharded like the parameter. How its matrices are updated depends on what
is sharded, and by which dimension of the device mesh:

  what is sharded            mesh dimension   how matrices are updated
  the experts of (E, m, n)   any              every rank has whole matrices: nothing is sent
  each matrix                "tp"             tensor parallelism: the ranks orthogonalize jointly
                                              (`optim_tp.py`)
  each matrix                another (FSDP2)  data parallelism: each matrix has an owner; an all_to_all sends
                                              it the shards, others return the direction's and the state
  each matrix                both             as under FSDP2, but each tensor-parallel shard has an owner, and
                                              the owners of a matrix's shards orthogonalize jointly

The first two are a `BankOfShards`. The others are a `Pipeline`: one work item for each group and dtype of the
state, made of chunks. The matrices of a chunk have one shape. Momentum, weight decay and update are
elementwise and happen on the shards; the rule, which needs whole matrices, runs on their owner (by
`assign_owners` over FSDP2's ranks, chunk by chunk, the most expensive first). After the shards of a
direction, the owner sends all ranks the updated state of the rule, in the dtype of the state. So every rank
has all of the rule's state, and it is saved like any replicated state. For NorMuon that costs each rank a
vector per matrix, and with a direction of your own, whatever state it declares. One matrix (m, n), with its
rows on four ranks and float32 parameters:

    phase           rank 0   rank 1   rank 2   rank 3
    send_U          rows     rows     rows     rows     momentum and U of the shard, (m/4, n), float32
    all_to_all                                          U, in comm_dtype or the gradient's dtype
    send_back                (m, n)                     the owner, here rank 1: U to float32, then the rule
    all_to_all                                          the direction, in the same dtype as U
    all_to_all                                          each tensor of the rule's state, in its own dtype
    update_shards   rows     rows     rows     rows     decay and update of the shard; all copy the state

A chunk has up to W * max(1, CHUNK_BYTES // (4 * m * n)) matrices, and at most three have transfers in memory
(`Pipeline`). With W ranks, a rank sends 2(W-1)/W times the bytes of its shards, and the state of the matrices
that it owns to each of the W-1 others.
"""

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate, Shard

from nanomuon import optim_tp
from nanomuon.optim import (
    Bank,
    Matrices,
    Rule,
    Transfer,
    WorkItem,
    World,
    as_matrices,
    assign_owners,
    bank_key,
    gradient,
    gradient_dtype,
    matrix_shape,
    muon_momentum,
    muon_update,
    rule_of,
    write,
)
from nanomuon.optim_state import Place, local, place_like

# Bytes of whole matrices, counted as float32, that an owner receives at a time
CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**26}


# ------------------------------------------------------------------------------------------------------------
# How a parameter is sharded


def is_tensor_parallel(mesh, axis):
    return mesh.mesh_dim_names is not None and mesh.mesh_dim_names[axis] == "tp"


@dataclass
class Sharding:
    """How a Muon parameter is sharded, and the rule for its matrices.

    input_shape: (m, n) of the rule's input: the whole matrix, or a tensor-parallel rank's shard of it.
    data_parallel: FSDP2's World, or None; dim: what FSDP2 shards, 1 for rows, 2 for columns. blocks: how many
    blocks tensor parallelism orthogonalizes separately; 1 unless its mode is blockwise.
    """

    input_shape: tuple
    rule: Rule
    data_parallel: World | None = None
    dim: int = 0  # 0: nothing
    blocks: int = 1


def sharding_of(param, group, comm_dtype, ns_dtype):
    """The Sharding of a Muon parameter. ValueError if it is not supported."""
    batch, mesh = int(param.ndim == 3), param.device_mesh
    shape = m, n = matrix_shape(param)
    data_parallel, dim, tp = None, 0, None
    for axis, placement in enumerate(param.placements):
        if placement.is_replicate() or mesh.size(axis) == 1:
            continue
        if batch and placement.dim == 0:
            continue  # every rank has some of the experts, whole
        batch_dim, world = placement.dim + 1 - batch, World(mesh.get_group(axis), comm_dtype)
        possible = batch_dim == 1 or param.ndim < 4  # a convolution is a matrix (out, rest)
        if is_tensor_parallel(mesh, axis):
            # FSDP2's dimension comes first in the mesh: `dim` is set by now. If FSDP2 was applied first, too,
            # both are plain Shards; after tensor parallelism it makes a _StridedShard, which is not a Shard
            if dim == batch_dim and sum(isinstance(each, Shard) for each in param.placements) > 1:
                raise ValueError(
                    "sharded by data parallelism before tensor parallelism: call parallelize_module before "
                    "fully_shard"
                )
            tp = optim_tp.Cut(world, batch_dim, shape[batch_dim - 1])
        else:
            possible = possible and not batch and data_parallel is None
            data_parallel, dim = world, batch_dim
        if not possible:
            raise ValueError(
                f"sharded as {param.placements} over {mesh}: Muon does not support this. If this is tensor "
                'parallelism, its mesh dimension must be called "tp" (mesh_dim_names)'
            )
    if tp is None:
        return Sharding(shape, rule_of(group, m, n, ns_dtype), data_parallel, dim)
    mode = optim_tp.choose_mode(group, shape, tp.dim, tp.world)
    lo, hi = tp.world.span(tp.length, tp.world.rank)
    input_shape = (hi - lo, n) if tp.dim == 1 else (m, hi - lo)
    if mode == "blockwise":  # each block is a matrix of its own
        rule = rule_of(group, *input_shape, ns_dtype)
        return Sharding(input_shape, rule, data_parallel, dim, blocks=tp.world.size)
    make_rule = optim_tp.duplicated if mode == "duplicated" else optim_tp.distributed
    return Sharding(input_shape, make_rule(rule_of(group, m, n, ns_dtype), tp), data_parallel, dim)


# ------------------------------------------------------------------------------------------------------------
# The plan


def plan_sharded(optimizer, group, params):
    """The work items of the sharded parameters of a Muon group."""
    names = dict(zip(group["params"], group["names"], strict=True))
    same = {}  # what must be the same -> (sharding, parameters)
    for param in params:
        try:
            sharding = sharding_of(param, group, optimizer.world.comm_dtype, optimizer.ns_dtype)
        except ValueError as error:
            raise ValueError(f"{names[param]}: {error}") from None
        key = bank_key(param), param.device_mesh, tuple(param.placements)
        same.setdefault(key, (sharding, []))[1].append(param)
    banks, chunks = [], []
    for sharding, params_together in same.values():
        if sharding.data_parallel is None:
            banks.append(BankOfShards(params_together, group, sharding))
            continue
        most = CHUNK_BYTES.get(params_together[0].device.type, CHUNK_BYTES["cuda"])
        on_each_owner = max(1, most // (4 * math.prod(sharding.rule.whole_shape)))
        size = sharding.data_parallel.size * on_each_owner
        chunks += [(params_together[lo : lo + size], sharding) for lo in range(0, len(params_together), size)]
    # The most expensive matrices get their owners first, and are first in the pipeline
    chunks.sort(key=lambda chunk: -chunk[1].rule.cost)
    pipelines = {}  # one per dtype of the state, since an item has one dtype
    for params_together, sharding in chunks:
        world = sharding.data_parallel
        owned_cost = optimizer.owned_cost.setdefault(world, [0] * world.size)
        owners = assign_owners(len(params_together), sharding.rule.cost, owned_cost)
        chunk = Chunk(params_together, group, sharding, owners)
        pipelines.setdefault(chunk.dtype, []).append(chunk)
    return [Pipeline(chunks, group) for chunks in pipelines.values()] + banks


# ------------------------------------------------------------------------------------------------------------
# The work items


class OfShards:
    """Mixin that knows where the state of sharded matrices lives."""

    def place(self, i, name, buffer):
        """The Place of a state tensor of the i-th parameter. buffer: this state of all parameters."""
        param, blocks = self.params[i], self.sharding.blocks
        batch = int(param.ndim == 3)
        tensor = buffer if batch else buffer[i]
        if name == "momentum_buffer":
            return place_like(param, tensor.view(local(param).shape))
        # The rule's state is whole on every rank, unless the ranks have different experts or blocks
        placements = [Replicate()] * param.device_mesh.ndim
        for axis, placement in enumerate(param.placements):
            if batch and not placement.is_replicate() and placement.dim == 0:
                placements[axis] = placement  # strided, if two dimensions of the mesh shard the experts
            elif blocks > 1 and is_tensor_parallel(param.device_mesh, axis):
                placements[axis] = Shard(batch)
        if all(placement.is_replicate() for placement in placements):
            return Place(tensor)
        shape = list(tensor.shape)
        if batch:
            shape[0] = len(param)
        if blocks > 1:  # vectors, one below the other: those of 4 blocks, (1, n/4), as (4, n/4)
            shape[batch] *= blocks
        return Place(tensor, shape, param.device_mesh, placements)


class BankOfShards(OfShards, Bank):
    """A bank in which every rank works on what it has: whole experts, or its shards of matrices that the
    ranks of tensor parallelism orthogonalize jointly. Its world is a single process: only its rule may send.
    """

    def __init__(self, params, group, sharding):
        self.sharding = sharding
        count = len(local(params[0])) if params[0].ndim == 3 else len(params)
        super().__init__(params, group, sharding.rule, [0] * count, World())


class Chunk(OfShards, Matrices):
    """K matrices that go through the pipeline together, of which this rank owns k.

    A shard consists of lines of its matrix: rows, or columns if `dim` is 2. U and the directions are sent
    line by line: (matrices, lines, length of a line). transpose(1, dim), which does nothing for rows, turns
    matrices into lines, and back.
    """

    def __init__(self, params, group, sharding, owners):
        self.sharding, self.dim = sharding, sharding.dim
        super().__init__(params, group, sharding.rule, owners, sharding.data_parallel, len(params))
        m, n = sharding.input_shape
        all_lines, self.line_length = (m, n) if self.dim == 1 else (n, m)
        ranks = range(self.world.size)
        spans = [self.world.span(all_lines, rank) for rank in ranks]
        self.owned_counts = [owners.count(rank) for rank in ranks]  # how many matrices each rank owns
        self.line_counts = [hi - lo for lo, hi in spans]  # how many lines of every matrix each rank has
        self.sent_dtype = self.world.comm_dtype or gradient_dtype(params[0])
        self.rule_buffers = {name: self.buffers[name] for name in self.rule.buffers}  # (K, *shape) each
        if self.dim == 1 and self.scale.ndim:  # one per row
            self.scale = self.scale[slice(*spans[self.world.rank])]

    def send_U(self, ok, hyper):
        """Update the momentum of all shards, and send U to the owners. ok: (K, 1, 1). Receives U of the owned
        matrices, as a list of the lines (k, lines, length) from each rank.
        """
        grads = torch.stack(as_matrices(self.each_matrix(gradient)))
        buffer = self.buffers.get("momentum_buffer")
        U = muon_momentum(grads, buffer, ok, hyper, nesterov=self.group["nesterov"])
        U = U.transpose(1, self.dim).to(self.sent_dtype)
        k, own_lines = self.owned_counts[self.world.rank], self.line_counts[self.world.rank]
        send = [count * own_lines * self.line_length for count in self.owned_counts]
        receive = [k * lines * self.line_length for lines in self.line_counts]
        transfer = self.world.all_to_all(U.flatten(), send, receive)
        from_ranks = zip(transfer.received.split(receive), self.line_counts, strict=True)
        return Transfer([part.view(k, lines, self.line_length) for part, lines in from_ranks], [transfer])

    def send_back(self, parts, ok, hyper):
        """Apply the rule to the owned matrices. Send each rank its shards of the directions, and all ranks
        the rule's state of these matrices. parts: U, as `send_U` received it. Receives a list of flat tensors
        for all K matrices: this rank's shards of the directions, then each buffer of the rule.
        """
        U = torch.cat(parts, dim=1).transpose(1, self.dim).to(self.dtype)  # (k, m, n)
        owned = {name: buffer[self.owned] for name, buffer in self.rule_buffers.items()}
        ok = ok[self.owned]
        for batch in self.batches():
            buffers = {name: buffer[batch] for name, buffer in owned.items()}
            X, gain = self.rule(U[batch], buffers, ok[batch], hyper)
            torch.mul(X, gain.to(self.dtype), out=U[batch])
        directions = U  # in its memory
        to_ranks = directions.transpose(1, self.dim).to(self.sent_dtype).split(self.line_counts, dim=1)
        transfers = [self.from_owners(to_ranks)]
        for buffer in owned.values():
            transfers.append(self.from_owners([buffer] * self.world.size))
        return Transfer([transfer.received for transfer in transfers], transfers)

    def from_owners(self, to_ranks):
        """Send each rank a tensor (k, ...) about the owned matrices. Receives one flat tensor for all K."""
        send = [tensor.numel() for tensor in to_ranks]
        each = math.prod(to_ranks[self.world.rank].shape[1:])  # elements received for a matrix
        receive = [count * each for count in self.owned_counts]
        return self.world.all_to_all(torch.cat([tensor.flatten() for tensor in to_ranks]), send, receive)

    def update_shards(self, received, ok, hyper):
        """Apply weight decay and update to all shards, and store the rule's state of all matrices."""
        X, *state = received
        for buffer, values in zip(self.rule_buffers.values(), state, strict=True):
            buffer.copy_(values.view(buffer.shape))
        X = X.view(len(self.params), -1, self.line_length).transpose(1, self.dim)
        tensors = self.each_matrix(local)
        P = torch.stack(as_matrices(tensors))
        one = ok.new_ones(1, 1, 1)  # X includes its gain
        muon_update(P, X, one, self.scale, ok, hyper, cautious=self.cautious)
        write(P.unbind(), tensors)


class Pipeline(WorkItem):
    """All chunks of one group and state dtype as one work item. In round i, chunk i + 1 updates its momentum
    and sends U, chunk i computes and sends back, and chunk i - 1 is updated, so at most three chunks have
    transfers in memory: one arrives, one computes, one returns. U of chunk 0 is in flight while the other
    work items compute.
    """

    def __init__(self, chunks, group):
        self.chunks, self.group, self.dtype = chunks, group, chunks[0].dtype
        self.params, self.places = [], {}
        for chunk in chunks:
            self.params += chunk.params
            self.places |= chunk.places

    def ok_of_chunks(self, ok):
        """(K, 1, 1) for each chunk."""
        return ok.to(self.dtype).view(-1, 1, 1).split([len(chunk.params) for chunk in self.chunks])

    def collect(self, ok, hyper):
        """A Transfer without handles around that of chunk 0, so that `step` does not wait for it yet:
        `compute` does, after it has started chunk 1.
        """
        return Transfer([self.chunks[0].send_U(self.ok_of_chunks(ok)[0], hyper)])

    def compute(self, first, ok, hyper):
        """first: [the Transfer of chunk 0], taken out so that its memory is freed early."""
        ok, chunks = self.ok_of_chunks(ok), self.chunks
        arriving, returning = {0: first.pop()}, {}
        for i in range(len(chunks) + 1):
            if i + 1 < len(chunks):
                arriving[i + 1] = chunks[i + 1].send_U(ok[i + 1], hyper)
            if i < len(chunks):
                returning[i] = chunks[i].send_back(arriving.pop(i).wait(), ok[i], hyper)
            if i > 0:
                chunks[i - 1].update_shards(returning.pop(i - 1).wait(), ok[i - 1], hyper)
