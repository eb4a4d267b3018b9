"""MuonAdamW for one process and DistMuonAdamW for many: Muon for matrices, AdamW for everything else.

    muon = dict(kind="muon", params=[...], lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0)
    adamw = dict(kind="adamw", params=[...], lr=3e-4, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    groups = [muon, adamw]
    optimizer = DistMuonAdamW(groups)  # under torchrun; in one process MuonAdamW(groups)

The parameters are cut into pieces of work, and every piece has the same life:

    collect   launch the transfer that brings mean gradients to the rank that works on them
    compute   wait for it, do the mathematics, launch the transfer of the result
    deliver   wait for that, write the result where the parameter lives

`step` takes all pieces through the three rounds, so that the transfers of one run under the mathematics of
another. In one process nothing is transferred, and there is no second copy of the mathematics.

The file in its order: the kernels (the mathematics), the kinds, what reaches the kernels from the param
groups, the ranks and their transfers, where state lives, the pieces of work and who owns which matrix, what a
bank asks for the direction of an update, what ranks tell each other, the optimizers. What it leaves to
others: `orthogonalize.py` has the polar factor; parameters that are cut over a device mesh (FSDP2, tensor
parallelism) come in through `sharded.py`, fused matrices through `fused.py`.
docs/optimizer.md draws the same story.
"""

import contextlib
import contextvars
import functools
import itertools
import logging
import math
import os
import types
import warnings
import weakref
import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor
from torch.profiler import record_function

from nanomuon.orthogonalize import (
    newton_schulz_flops,
    newton_schulz_form,
    orthogonalize,
    triples,
    update_scale,
)
from nanomuon.param_groups import (
    MUON_OPTIONS,
    build_param_groups,
    check_group,
    check_matrix,
    check_values,
    clean_name,
    default_names,
)
from nanomuon.runtime import compile_enabled, missing_compiler

# AdamW parameters of up to this many elements travel together and are updated on every rank; the rows of
# larger ones are cut over the ranks.
SMALL = 16_384
BATCH_BYTES = {"cpu": 2**22, "cuda": 2**29, "meta": 2**29}  # Muon works on this much of a bank at a time
COMPILE_FROM = 1024  # elements; below, a kernel is not worth compiling
CACHE_BLOCK = 2**18  # elements; see `cache_blocks`
RUNS = 4  # a bank that ranks share is cut into up to so many, so that not all of it waits for the first layer

# Set for the length of a step
OPTIMIZER_COMPILES = contextvars.ContextVar("optimizer_compiles", default=True)
HAVE_OVERLAPPED = weakref.WeakSet()  # optimizers that have ever been in overlap_backward

# Since torch 2.13 the collectives on one tensor are called *_single, and the old names warn.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# ------------------------------------------------------------------------------------------------------------
# Kernels. Rates are tensors (`Table`), of which a compilation knows the shape alone (`describe`), so changing
# them recompiles nothing. Options (nesterov, coefficients) are Python values: each choice of them is compiled
# once. `ok` is 1, or 0 where a parameter is to be left alone: it has no gradient, or some gradient is not
# finite. Its gradient is then replaced by 0 and its rates multiplied by 0, so every line is a no-op; the
# parameter is kept by torch.where, since 0 times infinity is NaN. All arithmetic is in the state's dtype.


def adamw_update(
    param, grad, exp_avg, exp_avg_sq, ok, *, step_size, rescale, grad_weight, square_weight, decay, eps
):
    """AdamW (arXiv 1711.05101) in place on tensors of one shape.

    ok and what comes by name are 0-D, or have a value for each element: step_size lr/(1-b1^t), rescale
    (1-b2^t)^-1/2, grad_weight 1-b1, square_weight 1-b2, decay lr times weight decay.
    """
    grad = torch.where(ok > 0, grad, 0).to(exp_avg.dtype)
    exp_avg.lerp_(grad, grad_weight * ok)
    exp_avg_sq.lerp_(grad.square(), square_weight * ok)
    eps = eps + (1 - ok)  # eps may be 0, and so may the rest where nothing is updated
    update = exp_avg * (step_size * ok) / (exp_avg_sq.sqrt() * rescale + eps)
    new = param.to(exp_avg.dtype) * (1 - decay * ok) - update
    param.copy_(torch.where(ok > 0, new.to(param.dtype), param))


def muon_momentum(grad, momentum_buffer, ok, *, momentum, grad_weight, nesterov):
    """Momentum in place. Returns what is to be orthogonalized, U, all (k, m, n). The others are (k, 1, 1).

    M <- lerp(M, G, 1 - mu) is 1 - mu times the M <- mu M + G of other projects: the same direction at
    constant mu.
    """
    grad = torch.where(ok > 0, grad, 0).to(momentum_buffer.dtype)
    momentum_buffer.lerp_(grad, grad_weight * ok)
    if nesterov:
        return grad.lerp(momentum_buffer, momentum)
    return momentum_buffer.clone()


def muon_direction(
    U,
    second_momentum_buffer,
    square_weight,
    *,
    coefficients,
    ns_steps,
    row_equilibrate,
    renormalize,
    ns_dtype=None,
):
    """Polar factor and variance reduction (NorMuon, arXiv 2510.05491) of a batch of matrices.

    U: (k, m, n). second_momentum_buffer: (k, m, 1) if m >= n, else (k, 1, n), updated in place; None for
    plain Muon. square_weight: (k, 1, 1), 1 - beta2 times ok. Returns X (k, m, n) in the dtype of the
    iteration and its gain, in the dtype of the state and shaped like the second moment or (k, 1, 1): their
    product is the direction of the update.
    """
    m, n = U.shape[1:]
    short = min(m, n)
    if row_equilibrate:  # MuonEq, arXiv 2603.28254: rows of equal norm
        row_norm = U.square().sum(dim=2, keepdim=True).sqrt()  # (k, m, 1)
        U = U * (row_norm.mean(dim=1, keepdim=True) / row_norm.clamp(min=1e-7))
    X = orthogonalize(U, coefficients, ns_steps, ns_dtype=ns_dtype)
    gain = torch.ones_like(square_weight)  # (k, 1, 1)
    if renormalize:  # Muon+, arXiv 2602.21545: the norm of an exact polar factor
        norm = X.to(gain.dtype).square().sum(dim=(1, 2), keepdim=True).sqrt()
        gain = math.sqrt(short) / norm.clamp(min=1e-7)
    if second_momentum_buffer is None:
        return X, gain
    # One value for each row of a tall matrix or column of a wide one. ||X||^2 and ||X s||^2 are sums over
    # these values, so X is read once.
    mean_over = 2 if m >= n else 1
    v = X.to(gain.dtype).square().sum(dim=mean_over, keepdim=True) / short * gain.square()
    second_momentum_buffer.lerp_(v, square_weight)
    s = second_momentum_buffer.clamp(min=1e-10).rsqrt()
    norm_before = (v.sum(dim=(1, 2), keepdim=True) * short).sqrt()  # (k, 1, 1) Frobenius norms
    norm_after = ((v * s.square()).sum(dim=(1, 2), keepdim=True) * short).sqrt()
    return X, gain * s * norm_before / norm_after.clamp(min=1e-10)


def muon_update(param, X, gain, ok, *, lr, scale, weight_decay, cautious):
    """Weight decay and update in place. param, X: (k, m, n).

    gain, lr, weight_decay and scale broadcast to it. The step is lr * scale, and so is the rate of a cautious
    decay.
    """
    P = param.to(gain.dtype)
    X = X.to(gain.dtype) * gain
    rate = lr * scale * ok
    if cautious:  # decay only what the update also shrinks
        decay = torch.where(X * P >= 0, P, 0) * (rate * weight_decay)
    else:
        decay = P * (lr * weight_decay * ok)
    new = P - X * rate - decay
    param.copy_(torch.where(ok > 0, new.to(param.dtype), param))


def run(kernel, *tensors, **arguments):
    """Call a kernel: compiled where the optimizer compiles (see `MuonAdamW`), unless it would not pay."""
    nothing_to_gain = tensors[0].numel() < COMPILE_FROM or tensors[0].is_meta  # which computes nothing
    if nothing_to_gain or not kernels_compile():
        return kernel(*tensors, **arguments)
    signature = [describe(tensor) for tensor in tensors]
    signature += [(name, describe(argument)) for name, argument in arguments.items()]
    return compiled(kernel, *signature)(*tensors, **arguments)


def kernels_compile():
    """Whether kernels are compiled one by one: not where torch.compile has the whole step."""
    return not torch.compiler.is_compiling() and compile_enabled(OPTIMIZER_COMPILES.get())


def describe(argument):
    """What a compilation depends on: layout and type of a tensor, the value of anything else."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    return argument


@functools.cache
def compiled(kernel, *signature):
    """One compilation per signature. Dynamo allows a code object eight of them, so each gets its own copy."""
    code = kernel.__code__.replace()
    copy = types.FunctionType(code, kernel.__globals__, kernel.__name__, kernel.__defaults__)
    copy.__kwdefaults__ = kernel.__kwdefaults__
    logging.getLogger("nanomuon").info("compiling %s: this step takes a while", kernel.__name__)
    return torch.compile(copy, dynamic=False, fullgraph=True)


def cache_blocks(*tensors):
    """Runs of rows of these tensors that stay in a CPU's cache, where a kernel passes over them eagerly."""
    first = tensors[0]
    if kernels_compile() or first.numel() <= CACHE_BLOCK or first.device.type != "cpu":
        return [tensors]
    rows = max(1, CACHE_BLOCK * len(first) // first.numel())
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


# ------------------------------------------------------------------------------------------------------------
# Kinds


def as_they_are(step, **hyperparameters):
    """The rates of a kind whose kernel takes its hyperparameters as they are."""
    return hyperparameters


@dataclass(frozen=True)
class ElementwiseKind:
    """A way to train a parameter element by element. Adding one is one entry of KINDS.

    required: the hyperparameters a group must have. state: the names of what is kept for every element,
    beside `step`. hyperparameters(group): what is read of it, {name: number}. rates(step, **hyperparameters):
    what the kernel takes by name, on the device, where the step count is. update: the kernel, called as
    update(param, grad, *state, ok, **rates).
    """

    required: frozenset
    state: tuple
    hyperparameters: callable
    update: callable
    rates: callable = as_they_are
    options = {}
    structure = frozenset()


@dataclass(frozen=True)
class MatrixKind:
    """Muon: whole matrices, in banks. `options` are keys that a group may have, with their defaults."""

    required: frozenset
    options: dict
    hyperparameters: callable
    structure: frozenset  # those keys that decide how the work is done, and stay as they were constructed


def adamw_hyperparameters(group):
    beta1, beta2 = group["betas"]
    return {
        "lr": group["lr"],
        "log_beta1": math.log(beta1) if beta1 else -math.inf,
        "log_beta2": math.log(beta2) if beta2 else -math.inf,
        "grad_weight": 1 - beta1,
        "square_weight": 1 - beta2,
        "decay": group["lr"] * group["weight_decay"],
        "eps": group["eps"],
    }


def adamw_rates(step, *, lr, log_beta1, log_beta2, **others):
    """With the corrections of the bias of the averages, 1 - beta^t, where t is 0 if the first step is
    skipped.
    """
    t = step.clamp(min=1)
    bias1 = -torch.expm1(t * log_beta1)  # beta^t near 1 would cost float32 its digits
    bias2 = -torch.expm1(t * log_beta2)
    return {"step_size": lr / bias1, "rescale": bias2.rsqrt(), **others}


def muon_hyperparameters(group):
    return {
        "lr": group["lr"],
        "momentum": group["momentum"],
        "grad_weight": 1 - group["momentum"],
        "square_weight": 1 - (group["beta2"] or 0),  # None: no variance reduction, nobody reads it
        "weight_decay": group["weight_decay"],
    }


KINDS = {
    "adamw": ElementwiseKind(
        required=frozenset({"lr", "betas", "eps", "weight_decay"}),
        state=("exp_avg", "exp_avg_sq"),
        hyperparameters=adamw_hyperparameters,
        update=adamw_update,
        rates=adamw_rates,
    ),
    "muon": MatrixKind(
        required=frozenset({"lr", "momentum", "ns_steps", "beta2", "weight_decay"}),
        options=MUON_OPTIONS,
        hyperparameters=muon_hyperparameters,
        structure=frozenset({*MUON_OPTIONS, "ns_steps"}),
    ),
}


class Table:
    """Numbers of some groups, parameters or matrices, by name: a tensor with one value for each of them."""

    def __init__(self, read, sources):
        self.read, self.sources = read, sources  # read(source): {name: number}
        self.names, self.columns = [], {}

    def values(self):
        """What the sources say now, on the host, one name after the other."""
        rows = [self.read(source) for source in self.sources]
        self.names = list(rows[0]) if rows else []
        return [row[name] for name in self.names for row in rows]

    def fill(self, values):
        columns = values.view(len(self.names), len(self.sources)).unbind() if self.names else []
        self.columns = dict(zip(self.names, columns, strict=True))

    def entry(self, index):
        """{name: 0-D} of one of them."""
        return {name: column[index] for name, column in self.columns.items()}

    def batch(self, lo, hi):
        """{name: (hi - lo, 1, 1)} of consecutive ones."""
        return {name: column[lo:hi].view(-1, 1, 1) for name, column in self.columns.items()}


class Hyperparameters:
    """Every number that a step takes from the host, brought to the device in one copy: hyperparameters, which
    parameters have a gradient, fingerprints. And the order of the parameters in `ok`.
    """

    def __init__(self):
        self.tables = {}  # (device, dtype) -> tables
        self.params = []  # of all groups, in their order: that of `ok`
        self.position = {}  # parameter -> its place in that order

    def add(self, params):
        for param in params:
            self.position[param] = len(self.params)
            self.params.append(param)

    def positions(self, params, device):
        """(k,) int64: where in `ok` these parameters are."""
        return torch.tensor([self.position[param] for param in params], dtype=torch.int64, device=device)

    def table(self, read, sources, like):
        """A Table that is filled anew in every step, with tensors of the device and dtype of `like`."""
        table = Table(read, sources)
        self.tables.setdefault((like.device, like.dtype), []).append(table)
        return table

    def refresh(self):
        for (device, dtype), tables in self.tables.items():
            values = [table.values() for table in tables]
            # Rounded once, from Python's float64. The host does not wait for a copy of so few bytes, though
            # it is from pageable memory
            on_host = torch.tensor([value for part in values for value in part], dtype=dtype)
            on_device = on_host.to(device, non_blocking=True)
            for table, part in zip(tables, on_device.split([len(part) for part in values]), strict=True):
                table.fill(part)


# ------------------------------------------------------------------------------------------------------------
# The ranks that share the work, and the transfers between them


class Transfer:
    """A collective in flight. What it sends and receives stays referenced until it has been waited for."""

    def __init__(self, received, work=None, sent=None):
        self.received, self.work, self.sent = received, work, sent

    def wait(self):
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
        return self.received


class World:
    """The ranks of a process group; one process by default.

    comm_dtype: of the gradients that are sent; None for their own.
    """

    def __init__(self, process_group=None, size=1, rank=0, comm_dtype=None):
        self.process_group, self.size, self.rank, self.comm_dtype = process_group, size, rank, comm_dtype
        self.gradients_averaged = False  # whether they are means over the ranks already, and nothing is sent
        self.load = [0] * size  # Newton-Schulz FLOPs a step of the matrices that each rank owns

    @classmethod
    def of(cls, process_group, comm_dtype=None):
        size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        if rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group of its optimizer")
        return cls(process_group, size, rank, comm_dtype)

    @property
    def averages(self):
        """Whether gradients have to be sent to be averaged."""
        return self.size > 1 and not self.gradients_averaged

    def sent_dtype(self, *gradients):
        """In which these travel together: neighbours may have other ones (a parameter's grad_dtype)."""
        return self.comm_dtype or functools.reduce(torch.promote_types, {grad.dtype for grad in gradients})

    def share(self, rows, rank=None):
        """(lo, hi) of a rank's ceil(rows/W) rows, the last ones short or empty, as in DTensor's Shard."""
        if rank is None:
            rank = self.rank
        each = -(-rows // self.size)
        return min(rows, each * rank), min(rows, each * (rank + 1))

    def padded(self, tensor):
        """(W*c, ...) with `tensor` at the top, or itself if it is that long; nobody reads the rest."""
        missing = -(-len(tensor) // self.size) * self.size - len(tensor)
        if not missing:
            return tensor.contiguous()
        return torch.cat([tensor, tensor.new_empty(missing, *tensor.shape[1:])])

    def reduce_scatter(self, send):
        """send: (W*c, ...). Gives (c, ...): the mean over ranks of this rank's part."""
        received = send.new_empty(len(send) // self.size, *send.shape[1:])
        work = reduce_scatter_single(
            received, send, dist.ReduceOp.AVG, group=self.process_group, async_op=True
        )
        return Transfer(received, work, send)

    def all_gather(self, whole):
        """whole: (W*c, ...) with this rank's c rows in place. Fills and gives all of it."""
        mine = whole.chunk(self.size)[self.rank]
        work = all_gather_single(whole, mine, group=self.process_group, async_op=True)
        return Transfer(whole, work, mine)

    def all_reduce(self, tensor, operation=dist.ReduceOp.AVG):
        """Gives the same tensor, with the mean over ranks in it."""
        if self.size == 1:
            return Transfer(tensor)
        work = dist.all_reduce(tensor, operation, group=self.process_group, async_op=True)
        return Transfer(tensor, work, tensor)

    def reduce_to(self, owner, tensor):
        """Gives the same tensor: at its owner the mean over ranks, elsewhere nothing of use."""
        operation = dist.ReduceOp.AVG
        work = dist.reduce(tensor, op=operation, group=self.process_group, group_dst=owner, async_op=True)
        return Transfer(tensor, work, tensor)

    def broadcast_from(self, owner, tensor):
        """Gives the same tensor, with the owner's values."""
        work = dist.broadcast(tensor, group=self.process_group, group_src=owner, async_op=True)
        return Transfer(tensor, work, tensor)

    def all_to_all(self, send, send_counts, receive_counts):
        """send: flat, send_counts[r] elements for rank r. Gives receive_counts[r] from each rank r, flat."""
        received = send.new_empty(sum(receive_counts))
        work = dist.all_to_all_single(
            received, send, receive_counts, send_counts, group=self.process_group, async_op=True
        )
        return Transfer(received, work, send)

    def mesh(self, device):
        return DeviceMesh.from_group(self.process_group, device.type)


def local(tensor):
    """What this rank holds of a tensor: its piece of a DTensor, all of any other."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def some_elements(tensor):
    """Up to eight of them, as a copy of this rank's; 0 for those that are NaN, which equals nothing."""
    return local(tensor).flatten()[:8].nan_to_num()


def gradient(param):
    """What this rank holds of p.grad; zeros where there is none, or where the parameter is frozen and an old
    one is left.
    """
    grad = param.grad
    if not has_gradient(param):
        held = local(param)
        dtype = getattr(param, "grad_dtype", None)  # of newer PyTorch; None: any
        return torch.zeros_like(held, dtype=dtype or held.dtype)
    if isinstance(grad, DTensor) and grad.placements != param.placements:
        # Tensor parallelism may leave partial sums
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)


def is_cut(param):
    """Whether each rank holds a piece only. A DTensor that is whole on every rank counts as replicated."""
    if not isinstance(param, DTensor):
        return bool(getattr(param, "planned_cuts", ()))  # footprint.py plans pieces without a process group
    for axis, placement in enumerate(param.placements):
        if not placement.is_replicate() and param.device_mesh.size(axis) > 1:
            return True
    return False


def state_dtype(param):
    """float32 whatever the parameter's, float64 for float64."""
    return torch.promote_types(param.dtype, torch.float32)


# ------------------------------------------------------------------------------------------------------------
# Where a state tensor lives. Each place has the shape of the whole and can show, gather and take over its
# tensor.


class WholeEverywhere:
    """Every rank keeps all of it, and all keep the same."""

    here = True

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def shown(self):
        """What state_dict() holds; it shares memory with the state."""
        return self.tensor

    def gathered(self):
        """A copy of the whole, on every rank. Collective."""
        return self.tensor.clone()

    def piece_of(self, saved):
        """What this rank keeps of a saved tensor: whole, or a DTensor of any layout (then collective)."""
        return whole(saved)


class OwnedHere(WholeEverywhere):
    """This rank alone keeps it."""

    def __init__(self, tensor, world):
        super().__init__(tensor)
        self.world = world

    def gathered(self):
        return self.world.broadcast_from(self.world.rank, self.tensor.clone().contiguous()).wait()


class OwnedElsewhere:
    """Another rank keeps it. like: a parameter, for dtype and device."""

    here = False

    def __init__(self, shape, like, world, owner):
        self.shape, self.like, self.world, self.owner = tuple(shape), like, world, owner

    def gathered(self):
        empty = torch.empty(self.shape, dtype=state_dtype(self.like), device=self.like.device)
        return self.world.broadcast_from(self.owner, empty).wait()

    def piece_of(self, saved):
        whole(saved)  # its owner needs this rank's part


class InPieces:
    """Every rank keeps a piece, cut over a device mesh as a DTensor is."""

    here = True

    def __init__(self, tensor, shape, mesh, placements):
        self.tensor, self.shape, self.mesh, self.placements = tensor, tuple(shape), mesh, tuple(placements)

    def shown(self):
        stride = torch.empty(self.shape, device="meta").stride()
        shape = torch.Size(self.shape)
        tensor = self.tensor
        if tensor.storage_offset():
            # The same memory as a storage by itself: a DTensor takes over the offset in its bank, and then
            # cannot be copied or pickled
            with torch.cuda.device_of(tensor):  # the only one from which it may be taken
                tensor = torch.from_dlpack(tensor)
        return DTensor.from_local(
            tensor, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )

    def gathered(self):
        return self.shown().full_tensor().clone()

    def piece_of(self, saved):
        if isinstance(saved, DTensor):
            if (saved.device_mesh, saved.placements) == (self.mesh, self.placements):
                return saved.to_local()
        return distribute_tensor(whole(saved), self.mesh, self.placements, src_data_rank=None).to_local()


class RowsOverRanks(InPieces):
    """Every rank keeps the rows that `World.share` gives it."""

    def __init__(self, tensor, shape, world):
        self.tensor, self.shape, self.world, self.placements = tensor, tuple(shape), world, (Shard(0),)

    @functools.cached_property
    def mesh(self):  # made when one is needed: a run that is only planned has no process group
        return self.world.mesh(self.tensor.device)


def whole(saved):
    return saved.full_tensor() if isinstance(saved, DTensor) else saved


def is_of_this_rank(saved):
    """Whether this rank has the piece of a DTensor: what is read from a file says who has written it."""
    mesh = saved.device_mesh
    if not dist.is_initialized():
        return False
    here = (mesh.mesh == dist.get_rank()).nonzero().flatten()
    return here.tolist() == list(mesh.get_coordinate() or [])


def like_param(param, tensor):
    """The place of a tensor that is kept as its parameter is: in the same pieces, or whole on every rank."""
    if isinstance(param, DTensor) and is_cut(param):
        return InPieces(tensor, param.shape, param.device_mesh, param.placements)
    return WholeEverywhere(tensor)


# ------------------------------------------------------------------------------------------------------------
# The pieces of work. Each has collect(), compute(ok) and deliver(), where ok (parameters,) is 1 for every
# parameter that is to be updated, in the order of the groups, and
#   places      {parameter: {name: place}}, its state
#   collected   the parameters whose gradients collect() sends: with overlap_backward() it waits for these
#   in_flight_bytes(), batch_bytes()   for planning: what it holds from the first round to the last, and what
#               temporaries take while it computes
#
#                   state on a rank       collect         compute sends  buffers of a step
#   SmallParameters all of it, flat       all_reduce      nothing        gradients and parameters, flat
#   LargeParameter  of its rows           reduce_scatter  all_gather     its rows of the gradient, padding
#   Bank            of all matrices       nothing         nothing        U, X and P of a batch
#   SharedBank      of those it owns      reduce_scatter  all_gather     stacks of gradients and results, U, X
#
# Gradients are averaged by the collective itself, and nowhere else: its operation is AVG (`World`).


class SmallParameters:
    """Small parameters of one kind, worked on as one flat vector: one all_reduce, updated on every rank.

    entries: (parameter, group) pairs. world: the ranks to average over, one process for parameters in pieces.
    """

    def __init__(self, entries, kind, world, hyperparameters, free_grads):
        self.params = [param for param, _ in entries]
        self.kind, self.world, self.free_grads = kind, world, free_grads
        self.collected = self.params if world.averages else []
        pieces = [local(param) for param in self.params]
        self.sizes = [piece.numel() for piece in pieces]
        self.dtype = state_dtype(self.params[0])
        like = torch.empty((), dtype=self.dtype, device=pieces[0].device)
        self.steps = like.new_zeros(len(pieces), dtype=torch.float32)
        self.state = [like.new_zeros(sum(self.sizes)) for _ in kind.state]  # a flat vector for each name
        self.table = hyperparameters.table(kind.hyperparameters, [group for _, group in entries], like)
        numbers, counts = torch.arange(len(pieces)), torch.tensor(self.sizes)
        in_order = numbers.repeat_interleave(counts, output_size=sum(self.sizes))
        self.param_of_element = in_order.to(like.device)
        self.ok_index = hyperparameters.positions(self.params, like.device)
        self.places = {}
        parts = [vector.split(self.sizes) for vector in self.state]
        for i, param in enumerate(self.params):
            views = [part[i].view(pieces[i].shape) for part in parts]
            self.places[param] = {"step": WholeEverywhere(self.steps[i])}
            self.places[param] |= {
                name: like_param(param, view) for name, view in zip(kind.state, views, strict=True)
            }

    def in_flight_bytes(self):
        return 2 * len(self.param_of_element) * self.dtype.itemsize  # gradients and parameters as one vector

    def batch_bytes(self):
        return 0

    def flat_gradients(self):
        return torch.cat([gradient(param).flatten() for param in self.params])  # promotes different dtypes

    def collect(self):
        if self.world.averages:
            grads = self.flat_gradients()
            self.transfer = self.world.all_reduce(grads.to(self.world.sent_dtype(grads)))

    def compute(self, ok):
        grads = self.transfer.wait() if self.world.averages else self.flat_gradients()
        params = torch.cat([local(param).flatten() for param in self.params])
        ok_of_params = ok[self.ok_index]
        self.steps += ok_of_params
        rates = self.kind.rates(self.steps.to(self.dtype), **self.table.columns)  # {name: (parameters,)}
        of_elements = torch.stack([ok_of_params.to(self.dtype), *rates.values()])[:, self.param_of_element]
        ok_of_elements, *values = of_elements.unbind()  # (N,) each
        rates = dict(zip(rates, values, strict=True))
        run(self.kind.update, params, grads, *self.state, ok_of_elements, **rates)
        pieces = [local(param) for param in self.params]
        new = [part.view(piece.shape) for part, piece in zip(params.split(self.sizes), pieces, strict=True)]
        torch._foreach_copy_(pieces, new)
        if self.world.averages:
            del self.transfer
        if self.free_grads:
            drop_gradients(self.params)

    def deliver(self):
        """Every rank has computed it."""


class LargeParameter:
    """A parameter of an elementwise kind, by rows: reduce_scatter, update of this rank's rows, all_gather.

    A rank holds the state of its rows only. In one process, and for a parameter that is in pieces already,
    the rows are all that is here.
    """

    def __init__(self, param, group, kind, world, hyperparameters, free_grads):
        self.param, self.kind, self.world, self.free_grads = param, kind, world, free_grads
        self.collected = [param] if world.averages else []
        self.ok_index = hyperparameters.position[param]
        self.lo, self.hi = world.share(len(local(param)))
        rows = self.rows(local(param))
        zeros = functools.partial(torch.zeros, device=rows.device)
        self.step = zeros((), dtype=torch.float32)
        self.dtype = state_dtype(param)
        self.state = [zeros(rows.shape, dtype=self.dtype) for _ in kind.state]
        self.table = hyperparameters.table(kind.hyperparameters, [group], self.step.to(self.dtype))
        places = {"step": WholeEverywhere(self.step)}
        for name, tensor in zip(kind.state, self.state, strict=True):
            if world.size > 1:
                places[name] = RowsOverRanks(tensor, param.shape, world)
            else:
                places[name] = like_param(param, tensor)
        self.places = {param: places}

    def rows(self, tensor):
        return tensor[self.lo : self.hi]

    def in_flight_bytes(self):
        if self.world.size == 1:
            return 0
        length = len(local(self.param))
        row = local(self.param)[:1].nbytes
        each = -(-length // self.world.size)
        padded = 0 if each * self.world.size == length else each * self.world.size
        if not padded and self.world.comm_dtype not in (None, self.param.dtype):
            # A copy of the gradient is sent, which is gone when the rows of the parameter are
            return row * (each + length) * self.world.comm_dtype.itemsize // self.param.itemsize
        return row * (each + padded)

    def batch_bytes(self):
        return 0

    def collect(self):
        if self.world.averages:
            grad = gradient(self.param)
            grad = grad.to(self.world.sent_dtype(grad))
            self.transfer = self.world.reduce_scatter(self.world.padded(grad))

    def compute(self, ok):
        param = local(self.param)
        if self.world.averages:
            grad = self.transfer.wait()[: self.hi - self.lo]
        else:
            grad = self.rows(gradient(self.param))
        ok_of_param = ok[self.ok_index]
        self.step += ok_of_param
        rates = self.kind.rates(self.step.to(self.dtype), **self.table.entry(0))
        for rows, *others in cache_blocks(self.rows(param), grad, *self.state):
            run(self.kind.update, rows, *others, ok_of_param, **rates)
        if self.free_grads:
            drop_gradients([self.param])
        if self.world.size > 1:
            self.transfer = self.world.all_gather(self.world.padded(param))

    def deliver(self):
        if self.world.size > 1:
            param, new = local(self.param), self.transfer.wait()
            if new is not param:  # it was padded
                param.copy_(new[: len(param)])
            del self.transfer


@dataclass(eq=False)
class Matrix:
    """One matrix of a Muon parameter: all of it, (out, rest) of a convolution, or the index-th of (E, m,
    n).
    """

    param: torch.Tensor
    group: dict
    index: int
    transposed: bool  # against the others of its bank

    def of(self, tensor):
        """(m, n): the part of the parameter, or of a tensor like it, in the orientation of the bank."""
        tensor = local(tensor)
        matrix = tensor[self.index] if tensor.ndim == 3 else tensor.flatten(1)
        return matrix.mT if self.transposed else matrix


def matrix_shape(param):
    """(m, n) of each matrix of a Muon parameter."""
    if param.ndim == 3:
        return tuple(param.shape[1:])
    return len(param), param.shape[1:].numel()


def matrices_of(entries):
    """The matrices that this rank holds of these (parameter, group) pairs, in the orientation of the
    first.
    """
    shape = matrix_shape(entries[0][0])
    matrices = []
    for param, group in entries:
        for index in range(len(local(param)) if param.ndim == 3 else 1):
            matrices.append(Matrix(param, group, index, transposed=matrix_shape(param) != shape))
    return matrices


def batches(count, shape, device):
    """Runs of `count` matrices, each within BATCH_BYTES, as (lo, hi).

    Equal ones, of one shape to compile, unless these would be less than half as long as they may be.
    """
    most = most_at_once(shape, device)
    divisors = [size for size in range(1, min(count, most) + 1) if count % size == 0]
    size = max(divisors, default=1)
    if 2 * size < min(count, most):
        runs = -(-count // most)
        size = -(-count // runs)
    return [(lo, min(lo + size, count)) for lo in range(0, count, size)]


def most_at_once(shape, device):
    """How many matrices of this shape fit into BATCH_BYTES; at least one."""
    return max(1, BATCH_BYTES.get(device.type, BATCH_BYTES["cuda"]) // (4 * math.prod(shape)))


def as_batch(matrices):
    """(k, m, n) of k matrices: a copy, but of one matrix the view, and of a tensor itself."""
    if isinstance(matrices, torch.Tensor):
        return matrices
    if len(matrices) == 1:
        return matrices[0].unsqueeze(0)
    return torch.stack(matrices)


class Bank:
    """Same-shaped matrices of one process, worked on as one batch.

    compute: momentum, direction and update of all of them, a few at a time. There is nothing to collect or
    deliver. entries: (parameter, group) pairs; the first one decides the orientation. direction: a
    MuonDirection.
    """

    def __init__(self, entries, direction, world, hyperparameters, free_grads):
        self.params = [param for param, _ in entries]
        self.matrices = matrices_of(entries)
        self.direction, self.world, self.free_grads = direction, world, free_grads
        self.collected = []
        self.owned = self.choose_owned()  # the k matrices that this rank works on
        param, group = entries[0]
        self.shape = matrix_shape(local(param))  # (m, n)
        self.nesterov = group["nesterov"]
        self.cautious = group["weight_decay_form"] == "cautious"

        zeros = functools.partial(torch.zeros, dtype=state_dtype(param), device=param.device)
        k = len(self.owned)
        self.momentum = zeros(k, *self.shape)
        self.kept = {name: zeros(k, *shape) for name, shape in direction.state(*self.shape).items()}
        self.scale = update_scales(direction, self.owned, self.shape, self.momentum)
        self.batches = batches(k, direction.whole_shape(*self.shape), param.device)
        self.ok_index = hyperparameters.positions([matrix.param for matrix in self.owned], param.device)
        groups = [matrix.group for matrix in self.owned] or [group]  # a rank may own none
        self.table = hyperparameters.table(muon_hyperparameters, groups, self.momentum)
        self.places = {param: {} for param in self.params}
        for name, buffer in {"momentum_buffer": self.momentum, **self.kept}.items():
            for i, param in enumerate(self.params):
                self.places[param][name] = self.place(i, param, name, buffer)

    def choose_owned(self):
        return self.matrices

    def in_flight_bytes(self):
        return 0

    def batch_bytes(self):
        """Gradients or X, U, P and the products of Newton-Schulz: about four batches."""
        most = max((hi - lo for lo, hi in self.batches), default=0)
        return 4 * most * math.prod(self.shape) * self.momentum.itemsize

    def place(self, i, param, name, buffer):
        """Where a state tensor of the i-th parameter lives."""
        return WholeEverywhere(self.as_parameter(buffer, i, param, name))

    def as_parameter(self, buffer, i, param, name):
        """The state of a parameter: the i-th part of a buffer, in its orientation, or for (E, m, n) all of
        it.
        """
        if param.ndim == 3:
            return buffer
        mine = buffer[i].mT if self.owned[i].transposed else buffer[i]
        return mine.view(local(param).shape) if name == "momentum_buffer" else mine

    def collect(self):
        """The gradients are here."""

    def compute(self, ok):
        grads, params = self.gradients(), self.to_update()
        ok_of_owned = ok[self.ok_index].view(-1, 1, 1).to(self.momentum.dtype)
        for lo, hi in self.batches:
            hyper, ok_of_batch = self.table.batch(lo, hi), ok_of_owned[lo:hi]
            kept = {name: buffer[lo:hi] for name, buffer in self.kept.items()}
            U = update_momentum(self, as_batch(grads[lo:hi]), self.momentum[lo:hi], ok_of_batch, hyper)
            X, gain = self.direction(U, kept, ok_of_batch, hyper["square_weight"])
            P = as_batch(params[lo:hi])
            update_matrices(self, P, X, gain, ok_of_batch, hyper, self.scale[lo:hi])
            self.write_back(P, lo, hi)
        if self.free_grads:
            drop_gradients(self.params)

    def gradients(self):
        """Mean gradients of the owned matrices: (k, m, n), or k of (m, n)."""
        return [matrix.of(gradient(matrix.param)) for matrix in self.owned]

    def to_update(self):
        """The owned matrices, likewise."""
        return [matrix.of(matrix.param) for matrix in self.owned]

    def write_back(self, P, lo, hi):
        """P is a copy of the parameters, but of one matrix it is the parameter itself (`as_batch`)."""
        if hi - lo > 1:
            torch._foreach_copy_(self.to_update()[lo:hi], P.unbind())

    def deliver(self):
        """The parameters are updated."""


def update_momentum(bank, grads, momentum_buffer, ok, hyper):
    """`muon_momentum` with the options of a Bank or sharded.Chunk. hyper: see Table.batch."""
    rates = {"momentum": hyper["momentum"], "grad_weight": hyper["grad_weight"]}
    return run(muon_momentum, grads, momentum_buffer, ok, **rates, nesterov=bank.nesterov)


def update_matrices(bank, P, X, gain, ok, hyper, scale):
    """`muon_update`, likewise."""
    rates = {"lr": hyper["lr"], "weight_decay": hyper["weight_decay"]}
    run(muon_update, P, X, gain, ok, **rates, scale=scale, cautious=bank.cautious)


class SharedBank(Bank):
    """The same on many ranks, each of which owns some of the K matrices whole.

    collect: reduce_scatter of the stacked gradients. compute: the owned ones, updated where they are sent
    from. deliver: all_gather of the stacked result. Where K is less than half of the world, padding would
    more than double the bytes: each matrix is then reduced to its owner and broadcast from it. owners: the
    rank of each, ascending.
    """

    def __init__(self, entries, owners, direction, world, hyperparameters, free_grads):
        self.owners = owners
        self.first = sum(owner < world.rank for owner in owners)  # of the matrices that this rank owns
        self.one_by_one = 2 * len(owners) < world.size
        if self.one_by_one:
            self.slots, self.slot_count = list(range(len(owners))), len(owners)
        else:
            # Each rank has as many slots as the others and fills its first ones: of 4 matrices on 8 ranks,
            # one slot a rank, 4 of them empty
            each = -(-len(owners) // world.size)
            self.slots, self.slot_count = [], each * world.size
            for i, owner in enumerate(owners):
                self.slots.append(owner * each + i - owners.index(owner))
        super().__init__(entries, direction, world, hyperparameters, free_grads)
        self.collected = self.params if world.averages else []

    def in_flight_bytes(self):
        """The stack that is sent and the part that is received, of gradients or of results."""
        stack = self.slot_count * math.prod(self.shape) * self.momentum.itemsize
        return stack * (1 + 1 / self.world.size)

    def choose_owned(self):
        count = self.owners.count(self.world.rank)
        return self.matrices[self.first : self.first + count]

    def place(self, i, param, name, buffer):
        if param.ndim == 3:  # a bank by itself, whose matrices are cut over the ranks like rows
            return RowsOverRanks(buffer, (len(self.matrices), *buffer.shape[1:]), self.world)
        if self.owners[i] == self.world.rank:
            return OwnedHere(self.as_parameter(buffer, i - self.first, param, name), self.world)
        shape = tuple(buffer.shape[1:])
        if self.matrices[i].transposed:
            shape = shape[::-1]
        if name == "momentum_buffer":
            shape = param.shape
        return OwnedElsewhere(shape, param, self.world, self.owners[i])

    def stacked(self, tensors, slots, dtype):
        """(slots, m, n) with these matrices in their slots; the others are whatever was there."""
        stack = torch.empty(self.slot_count, *self.shape, dtype=dtype, device=self.momentum.device)
        copy_all([stack[slot] for slot in slots], tensors)
        return stack

    def collect(self):
        if not self.world.averages:
            return
        grads = [matrix.of(gradient(matrix.param)) for matrix in self.matrices]
        stack = self.stacked(grads, self.slots, self.world.sent_dtype(*grads))
        if self.one_by_one:
            self.transfers = [self.world.reduce_to(owner, stack[i]) for i, owner in enumerate(self.owners)]
        else:
            self.transfers = [self.world.reduce_scatter(stack)]

    def gradients(self):
        if not self.world.averages:
            return super().gradients()
        received = [transfer.wait() for transfer in self.transfers]
        self.transfers = []
        if self.one_by_one:
            return received[self.first : self.first + len(self.owned)]
        return received[0]

    def to_update(self):
        """(k, m, n): the owned matrices in their slots of what will be sent."""
        params = [matrix.of(matrix.param) for matrix in self.owned]
        slots = self.slots[self.first : self.first + len(params)]
        self.result = self.stacked(params, slots, self.matrices[0].param.dtype)
        if not slots:
            return self.result[:0]
        return self.result[slots[0] : slots[-1] + 1]

    def write_back(self, P, lo, hi):
        """P is the part of `result` that will be sent."""

    def compute(self, ok):
        super().compute(ok)
        if self.one_by_one:
            self.transfers = [
                self.world.broadcast_from(owner, self.result[i]) for i, owner in enumerate(self.owners)
            ]
        else:
            self.transfers = [self.world.all_gather(self.result)]

    def deliver(self):
        for transfer in self.transfers:
            transfer.wait()
        params = [matrix.of(matrix.param) for matrix in self.matrices]
        copy_all(params, [self.result[slot] for slot in self.slots])
        self.transfers = []
        del self.result


def copy_all(targets, sources):
    if targets:
        torch._foreach_copy_(targets, sources)


def drop_gradients(params):
    for param in params:
        param.grad = None


def run_length(count, world_size):
    """How many of `count` matrices work together, where a bank is cut into up to RUNS runs of layers.

    A multiple of the ranks: owners then have as many as without the cut, and no slot more is padded.
    """
    of_a_rank = -(-count // world_size)
    return -(-of_a_rank // RUNS) * world_size


def assign_owners(count, load):
    """The rank that works on each of `count` equal matrices, ascending: as evenly as whole matrices allow.

    load: the work each rank has already. What is left over goes to the ranks that have the least.
    """
    even, left_over = divmod(count, len(load))
    ranks = range(len(load))
    idlest = sorted(ranks, key=load.__getitem__)[:left_over]
    owners = []
    for rank in ranks:
        owners += [rank] * (even + (rank in idlest))
    return owners


# ------------------------------------------------------------------------------------------------------------
# What a bank asks of a direction. Tensor parallelism and fused matrices bring their own; so may a group, as a
# function in `direction` (docs/add_your_optimizer.md).


@dataclass(frozen=True)
class MuonDirection:
    """From momentum to the direction of the update, and what is kept for it. Equal ones share banks."""

    coefficients: object  # a name, or a tuple of triples
    ns_steps: object  # None for the length of the set
    row_equilibrate: bool
    renormalize: bool
    variance_reduction: bool
    device_type: str
    ns_dtype: object  # see `orthogonalize.newton_schulz_form`

    @classmethod
    def of(cls, group, device_type, ns_dtype):
        coefficients = group["coefficients"]
        if not isinstance(coefficients, str):
            coefficients = tuple(tuple(triple) for triple in coefficients)
        options = {
            "coefficients": coefficients,
            "ns_steps": group["ns_steps"],
            "row_equilibrate": group["row_equilibrate"],
            "renormalize": group["renormalize"],
            "variance_reduction": group["beta2"] is not None,
            "device_type": device_type,
            "ns_dtype": ns_dtype,
        }
        if group["direction"] is not None:
            return CustomDirection(**options, function=group["direction"])
        return cls(**options)

    @property
    def transposable(self):
        """Whether transposes can share a bank: direction and state of a transpose are the transposed ones."""
        return not self.row_equilibrate

    def state(self, m, n):
        """{name: shape} of what is kept for an (m, n) matrix beside its momentum."""
        if not self.variance_reduction:
            return {}
        return {"second_momentum_buffer": (m, 1) if m >= n else (1, n)}

    def whole_shape(self, m, n):
        """Of the matrices that the direction is computed of, where (m, n) are pieces of them."""
        return m, n

    def row_scales(self, rule, m, n):
        """Factors on the update of an (m, n) parameter: one for all of it, or one for each row."""
        return [update_scale(rule, m, n)]

    def flops(self, m, n):
        steps = len(triples(self.coefficients, self.ns_steps))
        gram, _ = newton_schulz_form(m, n, steps, self.device_type, self.ns_dtype)
        return newton_schulz_flops(m, n, steps, gram)

    def __call__(self, U, kept, ok, square_weight):
        """(X, gain), see `muon_direction`.

        U: (k, m, n). kept: {name: (k, *shape)}, updated in place. ok: (k, 1, 1), 0 for a matrix that is to be
        left alone, with what is kept for it. square_weight: (k, 1, 1), 1 - beta2.
        """
        second = kept.get("second_momentum_buffer")
        return run(muon_direction, U, second, square_weight * ok, **self.options())

    def options(self):
        """The keywords of `muon_direction`."""
        return {
            "coefficients": self.coefficients,
            "ns_steps": self.ns_steps,
            "ns_dtype": self.ns_dtype,
            "row_equilibrate": self.row_equilibrate,
            "renormalize": self.renormalize,
        }


@dataclass(frozen=True)
class CustomDirection(MuonDirection):
    """A function (U, kept, ok, square_weight) -> (X, gain) of a user's; its attribute `state` is as above."""

    function: callable
    transposable = False

    @property
    def name(self):
        return getattr(self.function, "__name__", self.function)

    def state(self, m, n):
        declared = self.function.state(m, n) if hasattr(self.function, "state") else {}
        if "momentum_buffer" in declared:
            raise ValueError(f"direction {self.name}: momentum_buffer is the name of the momentum itself")
        return declared

    def __call__(self, U, kept, ok, square_weight):
        answer = self.function(U, kept, ok, square_weight)
        is_pair = isinstance(answer, tuple) and len(answer) == 2
        if not is_pair or not all(isinstance(part, torch.Tensor) for part in answer):
            raise TypeError(f"direction {self.name} has to return two tensors, (X, gain)")
        if answer[0].shape != U.shape:
            shapes = f"{tuple(answer[0].shape)} in place of {tuple(U.shape)}"
            raise ValueError(f"direction {self.name} has to return X of the shape of U, not {shapes}")
        return answer


def update_scales(direction, matrices, shape, like):
    """(k, 1, 1), or (k, m, 1) where every row has its own: factors on the update, from the parameters'
    shapes.

    shape: (m, n) of the matrices in the orientation of their bank.
    """
    rows = []
    for matrix in matrices:
        m, n = shape[::-1] if matrix.transposed else shape
        rule = matrix.group["scale"]
        if callable(rule) and matrix.param.ndim > 3:
            rule = rule_of_convolutions(rule, matrix.param.shape)
        rows.append(direction.row_scales(rule, m, n))
    values = torch.tensor(rows, dtype=like.dtype, device=like.device)
    return values.view(len(matrices), -1, 1) if rows else values.view(0, 1, 1)


def rule_of_convolutions(rule, shape):
    """A rule of (m, n) that asks `rule`, which may look at the kernel's sides, for (m, in, height, width)."""

    def of_matrix(m, n):
        return rule(m, *shape[1:])

    return of_matrix


# ------------------------------------------------------------------------------------------------------------
# What ranks have to know of each other


class Agreement:
    """Whether a step is taken, and by which parameters: the same answer on all ranks, in one small
    all_reduce.

    Each rank brings (1 + parameters + 2,) float32, and of each the largest over ranks counts: 1 where a
    gradient is not finite, or the caller of step() knows something to be bad; 1 for each parameter that has a
    gradient; a fingerprint of the hyperparameters and of what was loaded, and its negative, which add up to 0
    where all ranks have the same.
    """

    def __init__(self, world, param_groups, hyperparameters, skipped_steps):
        # Not the optimizer, which holds this: a cycle would keep its process group alive until the
        # interpreter ends, when gloo's threads may abort it
        self.world, self.param_groups = world, param_groups
        self.loaded = []  # of every state that was loaded: the counts of steps that it had
        self.params, self.skipped_steps = hyperparameters.params, skipped_steps  # the list grows with groups
        like = torch.zeros((), dtype=torch.float32, device=skipped_steps.device)
        # Both reach the device with the hyperparameters
        self.has_gradient = hyperparameters.table(lambda p: {"has": has_gradient(p)}, self.params, like)
        fingerprints = fingerprints_of if world.size > 1 else no_fingerprints
        self.fingerprints = hyperparameters.table(fingerprints, [(param_groups, self.loaded)], like)
        self.on_its_way = None  # (event, 0-D on the host) of a GPU's answer about the fingerprints

    def ask(self, told):
        """Launch the all_reduce. told: False, or a 0-D tensor that is false, for something bad."""
        grads = [local(param.grad) for param in self.params if has_gradient(param)]
        finite = torch.ones_like(self.skipped_steps, dtype=torch.bool)
        if grads:
            dtype = functools.reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)
            finite = torch.stack(torch._foreach_norm(grads, dtype=dtype)).isfinite().all()
        if told is not True:
            finite = finite & told
        bad = 1 - finite.float().view(1)
        facts = [bad, *self.has_gradient.columns.values(), *self.fingerprints.columns.values()]
        return self.world.all_reduce(torch.cat(facts), dist.ReduceOp.MAX)

    def read(self, facts):
        """ok (parameters,): 1 for each parameter that is to be updated. The host does not wait for it.

        0 for all of them where something is not finite on any rank; 0 for one that has a gradient on none.
        """
        bad, has_gradient_somewhere, fingerprints = facts.split([1, len(facts) - 3, 2])
        self.skipped_steps += bad[0] > 0
        self.notice(fingerprints.sum())
        return (1 - bad) * has_gradient_somewhere

    def notice(self, difference):
        """ValueError where the fingerprints of the ranks differ. On a GPU the host does not wait for it: the
        error comes in one of the next steps.
        """
        if self.world.size == 1 or difference.is_meta:
            return
        if not difference.is_cuda:
            self.refuse(difference)
        elif self.on_its_way is None:
            self.on_its_way = send_to_host(difference)
        else:
            event, on_host = self.on_its_way
            if event.query():
                self.on_its_way = None
                self.refuse(on_host)

    def refuse(self, difference):
        if difference != 0:
            values = hyperparameters_of(self.param_groups)
            state = f"has loaded state of steps {self.loaded}" if self.loaded else "has loaded no state"
            raise ValueError(
                "ranks have different hyperparameters, or have loaded different state; "
                f"rank {self.world.rank} {state}, and has {values}"
            )

    def of_rank_0(self, numbers):
        """The integers that rank 0 brings, on every rank, each of which brings as many. Waits for them."""
        numbers = torch.tensor(numbers, device=self.skipped_steps.device)
        return self.world.broadcast_from(0, numbers).wait().tolist()

    def check_parameters(self, groups):
        """ValueError on every rank where they bring other parameters or options, or the same in another
        order.
        """
        if self.world.size == 1 or self.world.process_group is None:
            return
        mine = []
        for name, param, group in named_parameters(groups):
            kind, chosen = KINDS[group["kind"]], {}
            for key in sorted(kind.structure):
                if group[key] != kind.options.get(key):
                    chosen[key] = getattr(group[key], "__qualname__", group[key])  # functions: by name
            mine.append(
                f"{name} {tuple(param.shape)} {param.dtype}, kind {group['kind']} {chosen or ''}".strip()
            )
        fingerprint = fingerprint_of(mine)
        both = torch.tensor([fingerprint, -fingerprint], dtype=torch.float32)
        both = both.to(self.skipped_steps.device)
        if self.world.all_reduce(both, dist.ReduceOp.MAX).wait().sum() == 0:
            return
        of_ranks = [None] * self.world.size
        dist.all_gather_object(of_ranks, mine, group=self.world.process_group)
        for rank, theirs in enumerate(of_ranks):
            for i, (first, here) in enumerate(
                itertools.zip_longest(of_ranks[0], theirs, fillvalue="nothing")
            ):
                if first != here:
                    difference = f"number {i} is {first} on rank 0, {here} on rank {rank}"
                    raise ValueError(f"ranks have different parameters: {difference}")


def hyperparameters_of(groups):
    """What kernels read, by group. Of tensors the values: how they print depends on the device."""
    of_groups = []
    for group in groups:
        numbers = KINDS[group["kind"]].hyperparameters(group)
        of_groups.append({name: float(number) for name, number in numbers.items()})
    return of_groups


def fingerprints_of(groups_and_loaded):
    groups, loaded = groups_and_loaded
    fingerprint = fingerprint_of([hyperparameters_of(groups), loaded])
    return {"fingerprint": fingerprint, "minus_fingerprint": -fingerprint}


def no_fingerprints(groups_and_loaded):
    """One process has nobody to compare them with."""
    return {"fingerprint": 0, "minus_fingerprint": 0}


def fingerprint_of(values):
    """An integer that float32 holds exactly."""
    return zlib.crc32(repr(values).encode()) % 2**24


def named_parameters(groups):
    for group in groups:
        for name, param in zip(group["names"], group["params"], strict=True):
            yield name, param, group


class Plan:
    """What the pieces of work were made from.

    A record beside the optimizer, and no attributes of it: torch.compile loses what a traced step writes into
    an optimizer.
    """

    def __init__(self):
        self.groups = []  # what was read of each
        # How many of them, from the first, were planned at once. Owners depend on it: a group that comes in
        # later finds the load of those before
        self.together = None
        self.params = {}  # parameter -> its device and dtype
        self.has_state = False  # of steps that were taken or loaded, which another plan would lose

    def add(self, groups):
        if self.together is None:
            self.together = len(groups)
        self.groups += [self.read(group) for group in groups]
        for _, param, _ in named_parameters(groups):
            self.params[param] = param.device, param.dtype

    @staticmethod
    def read(group):
        """The group itself, whose values are read at every step, its parameters, and the options that decide
        how the work is done.
        """
        params = [id(param) for param in group["params"]]
        options = [group[key] for key in sorted(KINDS[group["kind"]].structure)]
        return id(group), group["kind"], params, options, group.get("beta2") is None

    def changed_group(self, groups):
        """The number of the first group that is not as it was planned, or None."""
        pairs = itertools.zip_longest([self.read(group) for group in groups], self.groups)
        return next((number for number, (now, planned) in enumerate(pairs) if now != planned), None)


def has_gradient(param):
    return param.requires_grad and param.grad is not None


def send_to_host(value):
    """(event, 0-D on the host), which has the value once the event has happened."""
    on_host = torch.empty((), device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    # Of its own device, where the copy is: it need not be the current one
    return torch.cuda.current_stream(value.device).record_event(), on_host


# ------------------------------------------------------------------------------------------------------------


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW in one process. The update rules are the kernels above.

    param_groups: dicts with `kind` ("muon" | "adamw"), `params` and every key that KINDS requires; for Muon
    any of param_groups.MUON_OPTIONS. `beta2=None` is Muon without variance reduction, `ns_steps=None` the
    coefficient set's own length. `names`, aligned with params, name the state, as do (name, parameter) pairs
    in params; without them names are group{i}.{j}. lr, momentum, betas, beta2, eps and weight_decay are read
    from the groups at every step; a change of anything else is a ValueError once there is state.
    `split` names the parts of a fused matrix (`param_groups.split_rows`): each is orthogonalized by itself,
    with its own second moment and the scale of its own shape; their second moments are saved one after the
    other, (S, 1). ValueError at construction for anything unknown, missing or impossible.

    ns_dtype: in which Newton-Schulz iterates. None: half precision on GPUs, float32 on CPUs; torch.bfloat16
    is about twice as fast on CPUs that multiply it natively, and several times slower on others. All other
    arithmetic is float32 (see `state_dtype`).

    compile: whether kernels are compiled: True, False, or "auto", on GPUs only; the environment variable
    NANOMUON_COMPILE decides where it is set. matmul_precision: during the step, highest | high | medium, see
    torch.set_float32_matmul_precision; None leaves it alone.

    A parameter without a gradient, or that does not require one any more, is left alone: parameter, state and
    step count. `p.grad` is not changed, but for a GradScaler's scale (`unscale`). If any gradient is not
    finite, or the sum of its squares overflows, the step is not applied: parameters and state stay as they
    were, and `skipped_steps`, a 0-D tensor, counts it.

    Memory of a step beyond parameters, gradients and state: one batch of a bank (BATCH_BYTES) and its
    temporaries, and the small parameters as one vector.
    """

    max_in_flight, chunk_size, free_grads = 3, None, False  # see DistMuonAdamW

    def __init__(self, param_groups, *, compile="auto", matmul_precision=None, ns_dtype=None, world=None):
        param_groups = list(param_groups)
        if not all(isinstance(group, dict) for group in param_groups):
            name = type(self).__name__
            raise ValueError(
                f"{name} takes param groups, which say what trains what: {name}.for_model(model, lr=...), or "
                "groups of nanomuon.param_groups.build_param_groups(model, ...)"
            )
        self.world = world or World()  # the ranks that share the work on replicated parameters
        if ns_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"ns_dtype is None, torch.float32 or torch.bfloat16, not {ns_dtype!r}")
        self.compile, self.matmul_precision, self.ns_dtype = compile, matmul_precision, ns_dtype
        self.launched = 0  # how many of the works, from the first, have collected in overlap_backward
        self.overlapped = False  # whether overlap_backward was entered since the last step
        self.in_backward = False  # whether it is going on
        self.sent = []  # (parameter, gradient, version of the gradient) of these
        super().__init__(param_groups, {})
        self.plan_all()
        # Schedulers look here for what they may cycle: OneCycleLR writes group["momentum"]
        self.defaults["momentum"] = 0.95

    # Not traced either (see Plan), as torch.optim's own methods: torch.compiler.disable imports the compiler
    @torch._disable_dynamo
    def plan_all(self):
        """Make the pieces of work of all groups, with state of zero."""
        self.planned = Plan()
        self.world.load = [0] * self.world.size
        self.works = []  # in the order of their collectives, which all ranks share
        self.follows_backward = False  # whether that is the order in which a backward completes them
        self.places = {}  # parameter -> {name of its state: place}
        self.state.clear()
        self.hyperparameters = Hyperparameters()
        device = next((param.device for _, param, _ in named_parameters(self.param_groups)), None)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.compiles = self.decide_compilation(self.skipped_steps.device)
        self.agreement = Agreement(self.world, self.param_groups, self.hyperparameters, self.skipped_steps)
        self.plan(self.param_groups)

    @classmethod
    def for_model(cls, model, lr=3e-4, weight_decay=0.01, *, muon_lr=None, **settings):
        """An optimizer of all parameters of a model, with defaults for a transformer of any width.

        Of those that require gradients, that is: what is unfrozen later comes in by `add_param_group`.

        Muon's updates are scaled to the rms of AdamW's (`match_rms_adamw`, Moonlight, arXiv 2502.16982), so
        that one rate serves both; muon_lr: another one for the matrices. Weight decay is AdamW's, decoupled.
        Which parameter is trained by what: `param_groups.routing_table(model)`. settings: further keywords of
        the constructor.
        """
        muon = dict(lr=lr if muon_lr is None else muon_lr, momentum=0.95, ns_steps=5, beta2=0.95)
        muon |= dict(weight_decay=weight_decay, weight_decay_form="decoupled", scale="match_rms_adamw")
        adamw = dict(lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
        return cls(build_param_groups(model, muon=muon, adamw=adamw), **settings)

    def decide_compilation(self, device):
        """Whether kernels are compiled where NANOMUON_COMPILE does not say."""
        if self.compile not in (True, False, "auto"):
            raise ValueError(f'compile is True, False or "auto", not {self.compile!r}')
        compiles = device.type == "cuda" if self.compile == "auto" else self.compile
        missing = missing_compiler(device.type) if compiles else None
        if missing is not None:
            warnings.warn(f"no {missing}: kernels run eagerly", stacklevel=3)
            return False
        return compiles

    def add_param_group(self, group):
        super().add_param_group(check_group(group, self.param_groups, KINDS))
        if hasattr(self, "skipped_steps"):  # not while the constructor adds the first ones: those share banks
            self.plan(self.param_groups[-1:])

    # ---- the step

    @torch.no_grad()
    def step(self, closure=None, *, finite=True):
        """One update from the gradients in `p.grad`. Returns the closure's loss, if there is one.

        finite: False, or a 0-D tensor that is false, on any rank skips the step on all, as a gradient that is
        not finite does: for a loss that is known to be bad. A tensor is not read here. RuntimeError while a
        CUDA graph is recorded.
        """
        refuse_capture()
        with torch.enable_grad():
            loss = closure() if closure else None
        self.follow_groups()
        finite = self.unscale(finite)
        if finite is not False:  # step(finite=False) is the way out of what check_sent refuses
            self.check_sent()
        self.check_groups()
        self.planned.has_state = True
        with self.arithmetic():
            self.hyperparameters.refresh()
            with record_function("optimizer.collect"):
                # The answer is waited for first, so it is asked for first. After overlap_backward ranks have
                # launched different numbers of collects: then the question has the same place in the order of
                # all ranks only at the end.
                if not self.overlapped:
                    answer = self.agreement.ask(finite)
                for work in self.works[self.launched :]:
                    work.collect()
                if self.overlapped:
                    answer = self.agreement.ask(finite)
            with record_function("optimizer.compute"):
                ok = self.agreement.read(answer.wait())
                for work in self.works:  # later collects and earlier deliveries are under way
                    work.compute(ok)
            with record_function("optimizer.deliver"):
                for work in self.works:
                    work.deliver()
        if self.overlapped:  # else they are as they were; PyTorch 2.11 cannot trace what writes them
            self.launched, self.overlapped, self.sent = 0, False, []
        return loss

    def unscale(self, finite):
        """Do what a torch.amp.GradScaler leaves to the step that it calls. Returns whether all is finite.

        It sets `found_inf`, and `grad_scale` where its unscale_ has not divided the gradients by it.
        """
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            grads = [local(param.grad) for param in self.hyperparameters.params if has_gradient(param)]
            if grads:
                torch._foreach_mul_(grads, 1 / whole(scale))
        if found_inf is not None:
            finite = (whole(found_inf) == 0) & finite
        return finite

    def check_groups(self):
        """ValueError for a value that no group can have: a schedule may have written into them."""
        for i, group in enumerate(self.param_groups):
            try:
                check_values(group)
            except ValueError as error:
                raise ValueError(f"param group {i}: {error}") from None

    @contextlib.contextmanager
    def arithmetic(self):
        """How a step computes, whatever has been set around it."""
        device = self.skipped_steps.device
        precision = matmul_precision(self.matmul_precision)
        with precision, kernels_compiled(self.compiles), without_autocast(device):
            yield

    @contextlib.contextmanager
    def overlap_backward(self):
        """Around the last micro-batch's backward: launches each collect as soon as its gradients are there.

        The first backward only shows in which order the pieces get theirs. From the second on they are
        launched in this order, that of rank 0, whatever order autograd takes; step() launches the rest, and
        must follow before any gradient changes again: RuntimeError for a second backward, or for clipping.
        Not for DistributedDataParallel, which changes gradients at the end of its backward: RuntimeError
        after the first one. Does nothing in one process, and beside DTensors whose mesh sends through the
        optimizer's own process group: process_group=dist.new_group() gives it another one, which it also
        needs where the model's DTensors are another optimizer's. A compiled graph has all of its gradients at
        its end: what overlaps is decided by how the model is cut into graphs (compilation.py).
        """
        if self.launched:
            raise RuntimeError(
                "overlap_backward: earlier collects are in flight; call step() first, or, on every rank, "
                "step(finite=False), which takes no step"
            )
        self.follow_groups()
        self.refuse_two_at_a_time()
        self.overlapped = self.in_backward = True
        HAVE_OVERLAPPED.add(self)
        missing = [set(work.collected) for work in self.works]
        work_of = {param: i for i, work in enumerate(self.works) for param in work.collected}
        completed = []  # the numbers of the works, in the order in which they got their last gradient
        arrived_as = {}  # parameter -> some elements of its gradient, in the first backward
        launch_early = not self.shares_group_with_pieces()

        @torch.no_grad()
        def arrived(param):
            number = work_of[param]
            if number < self.launched:
                raise RuntimeError(
                    "overlap_backward: a gradient has changed after it was sent. It goes around one "
                    "backward, the last of a step, in which no parameter is used twice under reentrant "
                    "checkpointing"
                )
            missing[number].discard(param)
            if not missing[number]:
                completed.append(number)
            if not self.follows_backward:
                arrived_as[param] = some_elements(param.grad)
                return
            while launch_early and self.launched < len(self.works) and not missing[self.launched]:
                self.works[self.launched].collect()
                self.launched += 1

        trained = [param for param in work_of if param.requires_grad]
        hooks = [param.register_post_accumulate_grad_hook(arrived) for param in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.in_backward = False
        for work in self.works[: self.launched]:
            self.sent += [(param, param.grad, param.grad._version) for param in work.collected]
        if not self.follows_backward and self.world.averages:
            self.check_arrived(arrived_as)
            self.follow_backward(completed)

    def shares_group_with_pieces(self):
        """Whether DTensors among the parameters send through this optimizer's process group. FSDP2 averages
        their gradients in the backward: where another parameter is unused on some rank, the collectives of
        the two would change places there, and hang.
        """
        if not self.world.averages:
            return False
        ours = self.world.process_group or dist.group.WORLD
        meshes = {p.device_mesh for _, p, _ in named_parameters(self.param_groups) if isinstance(p, DTensor)}
        return any(group.group_name == ours.group_name for mesh in meshes for group in mesh.get_all_groups())

    def refuse_two_at_a_time(self):
        """RuntimeError where another optimizer of this process group overlaps a backward now, or has collects
        in flight: where a parameter of one is unused on some rank, the collectives of the two would change
        places there, and their gradients with them.
        """
        for other in HAVE_OVERLAPPED - {self}:
            same_ranks = other.world.process_group is self.world.process_group
            if same_ranks and self.world.averages and (other.in_backward or other.launched):
                raise RuntimeError(
                    "overlap_backward: another optimizer has not stepped since its own one, and both send "
                    "through one process group: give each its own, process_group=dist.new_group()"
                )

    def check_arrived(self, arrived_as):
        """RuntimeError where gradients are other ones at the end of the backward than they were when they
        arrived. DistributedDataParallel averages them by then, in its gradient_as_bucket_view without a trace
        in their versions; what was sent would be the mean of some ranks' own ones and of some means.
        """
        changed = []  # 0-D, of each
        for param, elements in arrived_as.items():
            changed.append((some_elements(param.grad) != elements).any())
        if changed and torch.stack(changed).any().item():
            raise RuntimeError(
                "overlap_backward: gradients change after they have arrived. It goes around one backward, "
                "the last of a step, and not with DistributedDataParallel, which averages gradients itself: "
                "gradients_averaged=True"
            )

    def check_sent(self):
        """RuntimeError where gradients are not what overlap_backward has sent: the change would be lost."""
        for param, grad, version in self.sent:
            if param.grad is not grad or grad._version != version:
                raise RuntimeError(
                    "gradients have changed since overlap_backward has sent them: no further backward, "
                    "clipping or unscaling can go between it and step()"
                )

    def follow_backward(self, completed):
        """Put the works into the order in which rank 0 has completed them.

        Those that send no gradients come first, and have no number: a parameter in pieces may be small on one
        rank and large on another. Those that this backward did not complete come last.
        """
        send_nothing = [work for work in self.works if not work.collected]
        sending = [work for work in self.works if work.collected]  # the same on all ranks, in one order
        numbers = [sending.index(self.works[i]) for i in completed]
        order = dict.fromkeys([*numbers, *range(len(sending))])  # each once
        self.works = send_nothing + [sending[i] for i in self.agreement.of_rank_0(list(order))]
        self.follows_backward = True

    # ---- the plan: what is worked on together, and where

    @torch.no_grad()
    def plan(self, groups):
        """Cut the parameters of these groups into pieces of work and create their state."""
        self.agreement.check_parameters(groups)
        self.hyperparameters.add([param for _, param, _ in named_parameters(groups)])
        pieces, in_pieces = {}, []  # what has to be alike -> [(parameter, group)]
        for name, param, group in named_parameters(groups):
            if is_cut(param):
                if self.world.size == 1 and isinstance(param, DTensor):
                    raise ValueError(f"{name} is sharded over {param.device_mesh}: DistMuonAdamW trains it")
            else:
                self.start_equal(param)
            kind = KINDS[group["kind"]]
            if not isinstance(kind, ElementwiseKind | MatrixKind):
                raise ValueError(f"{name}: nothing in optim.py trains the kind {group['kind']!r}")
            is_matrix = isinstance(kind, MatrixKind)
            if is_matrix and is_cut(param):
                in_pieces.append((name, param, group))
            elif param.numel() or not is_matrix:  # matrices without elements have no polar factor
                pieces.setdefault(self.alike(name, param, group), []).append((param, group))
        works = self.pieces_of_work(self.with_banks_cut(pieces))
        if in_pieces:
            from nanomuon import sharded

            works = sharded.pieces_of_work(self, in_pieces) + works
        self.works += works
        self.follows_backward = False
        self.planned.add(groups)
        for work in works:
            for param, places in work.places.items():
                self.places[param] = places
                self.state[param].update({name: place.tensor for name, place in places.items() if place.here})

    def follow_groups(self):
        """Plan anew where the groups are not what was planned: accelerate takes a model with its optimizer,
        moves it to its device, and puts FSDP2's parameters into the groups. ValueError where there is state
        already, which a new plan would lose, and for what no plan can train.
        """
        for name, param, group in named_parameters(self.param_groups):
            if param.grad is not None and param.grad.is_sparse:
                raise ValueError(f"{name} has a sparse gradient: take nn.Embedding(..., sparse=False)")
            if group["kind"] == "muon":
                check_matrix(name, param)
            for key, place in self.places.get(param, {}).items():
                if place.here and self.state[param].get(key) is not place.tensor:
                    raise ValueError(
                        f"{key} of {name} was replaced or removed in optimizer.state: write into the tensor"
                    )
        change = self.change_of_groups()
        if change is not None:
            if self.planned.has_state:
                raise ValueError(change)
            self.plan_all()

    def change_of_groups(self):
        """Says what is not as it was planned, and what to do; None where nothing is."""
        for name, param, _ in named_parameters(self.param_groups):
            if self.planned.params.get(param) != (param.device, param.dtype):
                return (
                    f"{name} has been moved, converted or replaced since the optimizer has state of it: "
                    "prepare the model before its optimizer"
                )
        if torch.compiler.is_compiling():  # which cannot trace identities
            return None
        changed = self.planned.changed_group(self.param_groups)
        if changed is None:
            return None
        return (
            f"param group {changed} is another one than the state was made for: lr, momentum, betas, "
            "beta2, eps and weight_decay may be written into it; for other parameters and options make a new "
            'optimizer, and load this one\'s state with hyperparameters="keep"'
        )

    def start_equal(self, param):
        """Rank 0's values: a different seed per rank must not train different models."""
        if self.world.size > 1:
            mine = local(param)
            mine.copy_(self.world.broadcast_from(0, mine.contiguous()).wait())

    def alike(self, name, param, group):
        """A parameter works together with those of which this is equal."""
        kind, where = KINDS[group["kind"]], (state_dtype(param), param.device)
        if isinstance(kind, ElementwiseKind):
            if local(param).numel() <= SMALL:
                return "small", kind, is_cut(param), *where
            return "large", name
        shape = matrix_shape(param)
        direction = self.direction(group, shape[0], param.device)
        # The polar factor of a transpose is the transposed one, so both can be in one bank. Where it would be
        # worked one matrix at a time by one process, that only makes kernels read across the rows: 4.5 ms in
        # place of 1.5 for momentum and update of 512 x 2048 on two cores.
        shared = self.world.size > 1 or most_at_once(shape, param.device) > 1
        if direction.transposable and param.ndim != 3 and shared:
            shape = tuple(sorted(shape))
        form = group["nesterov"], group["weight_decay_form"]
        batch = name if param.ndim == 3 else ""  # one by itself
        return "bank", shape, batch, direction, *form, param.dtype, param.device

    def direction(self, group, m, device):
        """What a bank of parameters of m rows asks for its direction."""
        where = device.type, self.ns_dtype
        if group["split"] is not None:
            from nanomuon import fused

            return fused.FusedDirection.of(group, m, *where)
        return MuonDirection.of(group, *where)

    def with_banks_cut(self, pieces):
        """The same pieces, with the banks that ranks share cut into runs of consecutive layers."""
        if not self.world.averages:
            return pieces  # nothing is collected
        cut = {}
        for alike, entries in pieces.items():
            length = len(entries)
            if alike[0] == "bank":
                length = run_length(len(entries), self.world.size)
            for first in range(0, len(entries), length):
                cut[(*alike, first)] = entries[first : first + length]
        return cut

    def pieces_of_work(self, pieces):
        """The works, in reversed order of the model: its last gradients come first."""
        banks = {alike: entries for alike, entries in pieces.items() if alike[0] == "bank"}
        owners = self.owners_of_banks(banks)
        works = []
        for alike, entries in reversed(pieces.items()):
            param, group = entries[0]
            kind, world = KINDS[group["kind"]], self.world
            if is_cut(param):
                world = World()  # each rank updates its piece by itself
            shared = world, self.hyperparameters, self.free_grads
            if alike[0] == "small":
                works.append(SmallParameters(entries, kind, *shared))
            elif alike[0] == "large":
                works.append(LargeParameter(param, group, kind, *shared))
            else:
                direction = self.direction(group, matrix_shape(param)[0], param.device)
                if world.size == 1:
                    works.append(Bank(entries, direction, *shared))
                else:
                    works.append(SharedBank(entries, owners[alike], direction, *shared))
        return works

    def owners_of_banks(self, banks):
        """{bank: the owner of each of its matrices}. Banks with the most expensive matrices choose first."""
        flops = {}
        for alike, entries in banks.items():
            param, group = entries[0]
            shape = matrix_shape(param)
            flops[alike] = self.direction(group, shape[0], param.device).flops(*shape)
        owners = {}
        for alike in sorted(banks, key=lambda alike: -flops[alike]):
            params = [param for param, _ in banks[alike]]
            if params[0].ndim == 3:  # like rows, so that its state is cut as DTensor's Shard(0) is
                each = -(-len(params[0]) // self.world.size)
                owners[alike] = [i // each for i in range(len(params[0]))]
            else:
                owners[alike] = assign_owners(len(params), self.world.load)
            for owner in owners[alike]:
                self.world.load[owner] += flops[alike]
        return owners

    # ---- state

    def state_dict(self):
        """What this rank holds, in torch's layout and without communication.

        {"state": {number: {key: tensor}}, "param_groups": [...]}, where groups have the numbers of their
        parameters in `params`, and `names`. Tensors share memory with the optimizer's. Pieces are DTensors;
        what another rank owns is not in it: full_state_dict() has all.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        named = self.named_state_dict()
        numbers = {name: i for i, (name, _, _) in enumerate(named_parameters(self.param_groups))}
        for group in named["param_groups"]:
            group["params"] = [numbers[name] for name in group["names"]]
        state = {numbers[name]: entry for name, entry in named["state"].items()}
        state_dict = {"state": state, "param_groups": named["param_groups"]}
        return self.changed_by(self._optimizer_state_dict_post_hooks, state_dict)

    def changed_by(self, hooks, state_dict):
        """What the hooks of a torch optimizer make of a state dict: they change it, or return another."""
        for hook in hooks.values():
            returned = hook(self, state_dict)
            if returned is not None:
                state_dict = returned
        return state_dict

    def named_state_dict(self):
        """The same by name: {"state": {name: {key: tensor}}, ...}, and groups without `params`."""
        state = {}
        for name, param, _ in named_parameters(self.param_groups):
            entry = {key: place.shown() for key, place in self.places.get(param, {}).items() if place.here}
            if entry:
                state[name] = entry
        groups = []
        for group in self.param_groups:
            groups.append({key: of_its_own(value) for key, value in group.items() if key != "params"})
        return {"state": state, "param_groups": groups}

    def full_state_dict(self):
        """named_state_dict() with the whole of every tensor on every rank, as copies. Collective."""
        state = {}
        for name, param, _ in named_parameters(self.param_groups):
            if param in self.places:
                state[name] = {key: place.gathered() for key, place in self.places[param].items()}
        return {"state": state, "param_groups": self.named_state_dict()["param_groups"]}

    @torch.no_grad()
    def adamw_state_dict(self, adamw):
        """The state with which a torch.optim.AdamW over the same parameters goes on from here.

            adamw = torch.optim.AdamW(model.parameters(), lr=3e-4)
            adamw.load_state_dict(optimizer.adamw_state_dict(adamw))

        Moments and step counts of what is AdamW's here, as copies; what is Muon's has none, and starts anew.
        The hyperparameters are those of `adamw`. Collective. load_state_dict goes the other way. ValueError
        where `adamw` maximizes, or keeps the largest second moment (amsgrad).
        """
        for i, group in enumerate(adamw.param_groups):
            check_same_rule(group, f"param group {i} of the {type(adamw).__name__}")
        self.follow_groups()
        state = {}
        for _, param, group in named_parameters(self.param_groups):
            if group["kind"] == "adamw":
                state[param] = {}
                for key, place in self.places[param].items():
                    value = place.gathered()
                    if key == "step":
                        value = value.cpu()  # where torch keeps it
                    elif isinstance(param, DTensor):
                        where = param.device_mesh, param.placements
                        value = distribute_tensor(value, *where, src_data_rank=None)
                    state[param][key] = value
        state_dict = adamw.state_dict()
        params = itertools.chain.from_iterable(group["params"] for group in adamw.param_groups)
        state_dict["state"] = {i: state[param] for i, param in enumerate(params) if param in state}
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict, hyperparameters="restore"):
        """Restore full_state_dict(), of any world size or grouping, or a local one where it was saved.

        hyperparameters: "restore" takes lr and all others that are read at every step, what schedulers have
        written into the groups included, from where the parameters were when it was saved, as torch's
        optimizers do; "keep" leaves those of the groups. State keeps its dtype. The state of a torch
        optimizer with named parameters (torch.optim.AdamW(model.named_parameters())) loads as well: a
        parameter that is trained by another kind now starts with state of zero. ValueError, before anything
        is changed, for a name or key that is missing, a shape that differs, a piece that another rank has
        saved, parameters without names in other groups than the saved, one of our groups that would get two
        values, options of Muon that are not those of the saved groups, and options of torch's that AdamW has
        not here.
        """
        if hyperparameters not in ("restore", "keep"):
            raise ValueError(f'hyperparameters is "restore" or "keep", not {hyperparameters!r}')
        self.follow_groups()
        state_dict = self.changed_by(self._optimizer_load_state_dict_pre_hooks, state_dict.copy())
        saved = SavedState(state_dict, self.param_groups)
        values = [{}] * len(self.param_groups)
        if hyperparameters == "restore":
            values = [saved.hyperparameters(i, group) for i, group in enumerate(self.param_groups)]
        found = []  # (key, place, what was saved of it)
        for name, param, group in named_parameters(self.param_groups):
            places = self.places.get(param, {})
            entry = saved.entry(name, group["kind"], places)
            for key, place in places.items():
                if key not in entry:
                    if place.here:
                        raise ValueError(self.missing(key, name))
                    continue
                saved_tensor = entry[key]
                if not isinstance(saved_tensor, torch.Tensor):  # a count of steps, before torch 1.12
                    saved_tensor = torch.tensor(saved_tensor)
                shape = tuple(saved_tensor.shape)
                if shape != place.shape:
                    raise ValueError(f"{key} of {name} has shape {shape}, expected {place.shape}")
                if isinstance(saved_tensor, DTensor) and not is_of_this_rank(saved_tensor):
                    raise ValueError(
                        f"the loaded {key} of {name} is a piece that another rank has saved: save "
                        "optimizer.full_state_dict()"
                    )
                found.append((key, place, saved_tensor))
        pieces = [(key, place, place.piece_of(tensor)) for key, place, tensor in found]
        for _, place, piece in pieces:
            if place.here:
                place.tensor.copy_(piece)
        for group, restored in zip(self.param_groups, values, strict=True):
            group.update({key: of_its_own(value) for key, value in restored.items()})
        self.planned.has_state = True
        if self.world.size > 1:
            self.agreement.loaded.append(sorted({piece.item() for key, _, piece in pieces if key == "step"}))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def missing(self, key, name):
        if self.world.size == 1:
            return f"the loaded state has no {key} of {name}"
        return (
            f"the loaded state has no {key} of {name}, which this rank owns: save optimizer.full_state_dict()"
        )

    def __getstate__(self):
        """For copy.deepcopy and pickle: with groups and settings the constructor can make the rest."""
        state = {param: dict(entry) for param, entry in self.state.items()}
        skipped = self.skipped_steps
        return {
            "groups": self.param_groups,
            "planned_together": self.planned.together,
            "state": state,
            "skipped_steps": skipped,
            "settings": self.settings(),
        }

    def __setstate__(self, copied):
        """On many ranks all of them copy or unpickle together."""
        groups, written_later = [], []
        for group in copied["groups"]:
            kind = KINDS[group["kind"]]
            known = {"kind", "params", "names", "initial_lr", *kind.required, *kind.options}
            groups.append({key: value for key, value in group.items() if key in known})
            written_later.append({key: value for key, value in group.items() if key not in known})
        settings = dict(copied["settings"])
        if "process_group" in settings:
            settings["process_group"] = settings["process_group"].process_group
        # Groups that came later chose their owners later
        together = copied.get("planned_together", len(groups))
        self.__init__(groups[:together], **settings)
        for group in groups[together:]:
            self.add_param_group(group)
        for group, values in zip(self.param_groups, written_later, strict=True):
            group.update(values)
        self.skipped_steps.copy_(copied["skipped_steps"])
        self.planned.has_state = True
        for param, entry in copied["state"].items():
            for key, tensor in entry.items():
                self.state[param][key].copy_(tensor)

    def settings(self):
        """The keywords of the constructor, beside the groups."""
        return {
            "compile": self.compile,
            "matmul_precision": self.matmul_precision,
            "ns_dtype": self.ns_dtype,
        }


class SameGroup:
    """A process group in a copied optimizer: the same one. In a pickled one it is the default one."""

    def __init__(self, process_group=None):
        self.process_group = process_group

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return SameGroup, ()


class SavedState:
    """A state dict that is to be loaded: by name, or in torch's layout."""

    def __init__(self, state_dict, our_groups):
        self.groups = state_dict["param_groups"]
        self.is_ours = all("kind" in group for group in self.groups)
        if not self.is_ours:
            check_adamw(self.groups)
        state, names = state_dict["state"], []
        for i, group in enumerate(self.groups):
            if "names" in group or "param_names" in group:
                names.append(group.get("names", group.get("param_names")))
            else:
                names.append(self.by_position(i, group, our_groups))
        if state and not any(isinstance(key, str) for key in state):
            numbers = {}
            for group, of_group in zip(self.groups, names, strict=True):
                numbers |= dict(zip(group["params"], of_group, strict=True))
            state = {numbers[number]: entry for number, entry in state.items()}
        self.state = {clean_name(name): entry for name, entry in state.items()}
        self.group_of = {clean_name(name): i for i, of_group in enumerate(names) for name in of_group}
        self.check_default_names([group["names"] for group in our_groups], names)

    def by_position(self, i, group, our_groups):
        """Without names the i-th group has to be our i-th."""
        if i >= len(our_groups) or len(group["params"]) != len(our_groups[i]["params"]):
            raise ValueError(
                "the saved parameters have no names, and are in other groups than ours: save an optimizer of "
                "model.named_parameters()"
            )
        return our_groups[i]["names"]

    def check_default_names(self, ours, theirs):
        if ours == theirs:
            return
        for i, names in enumerate(ours):
            if names and names == default_names(i, len(names)):
                raise ValueError(
                    "parameters without names load only into the same groups: give every group names=[...]"
                )

    def entry(self, name, kind, places):
        """What was saved of a parameter; zeros of each place where it was trained by another kind."""
        entry = self.state.get(name, {})
        group = self.groups[self.group_of[name]] if name in self.group_of else {"kind": kind}
        switched = group.get("kind", "adamw") != kind
        never_stepped = not entry and not self.is_ours  # torch's have no state before the first gradient
        if never_stepped and kind == "adamw" and name not in self.group_of:
            raise ValueError(f"the loaded state is of other parameters: it has no {name}")
        if switched or never_stepped:
            return {key: torch.zeros(place.shape) for key, place in places.items()}
        if not self.is_ours:
            check_same_rule(group, f"the saved optimizer of {name}")
        return entry

    def hyperparameters(self, i, group):
        """What our i-th group restores of the groups that its parameters were in."""
        sources = {self.group_of[name] for name in group["names"] if name in self.group_of}
        found = {}  # key -> value
        for source in sorted(sources):
            for key, value in self.values(self.groups[source], group).items():
                if key in found and found[key] != value:
                    two = f"{found[key]!r} and {value!r}"
                    raise ValueError(
                        f'param group {i} would get {key}={two}: load with hyperparameters="keep"'
                    )
                found[key] = value
        structure = KINDS[group["kind"]].structure
        for key in found.keys() & {*structure, "beta2"}:
            if not same_structure(key, found[key], group[key]):
                raise ValueError(
                    f'param group {i} was saved with another {key}: load with hyperparameters="keep"'
                )
        return {key: value for key, value in found.items() if key not in structure}

    def values(self, saved, group):
        """The hyperparameters of a saved group; none where it trained by another kind."""
        if saved.get("kind", "adamw") != group["kind"]:
            return {}
        if not self.is_ours and saved.get("decoupled_weight_decay") is False and saved["weight_decay"]:
            raise ValueError(
                "weight decay of torch.optim.Adam is a part of its gradients, and here it is AdamW's: set it "
                'in our groups and load with hyperparameters="keep"'
            )
        known = {"initial_lr", *KINDS[group["kind"]].required}
        not_values = {"kind", "params", "names", "param_names"}
        return {
            key: value
            for key, value in saved.items()
            if key not in not_values and (self.is_ours or key in known)
        }


def of_its_own(value):
    """A copy of what could be changed in place: a learning rate that is a tensor, a list."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return list(value)
    return value


def check_adamw(groups):
    """ValueError for groups of a torch optimizer that keeps no moments as AdamW does, SGD or Muon for one:
    its state would be lost.
    """
    for i, group in enumerate(groups):
        if "betas" not in group or "eps" not in group:
            raise ValueError(
                f"group {i} of the loaded state has no betas or no eps: of torch's optimizers only the state "
                "of AdamW and Adam loads"
            )


def check_same_rule(group, where):
    """ValueError for a param group of a torch optimizer whose moments are not those of AdamW here."""
    for option in ("amsgrad", "maximize"):
        if group.get(option):
            raise ValueError(f"{where} has {option}=True, which AdamW has not here")


def same_structure(key, saved, ours):
    """Whether an option that decides how the work is done is the same. beta2: whether there is one."""
    if key == "beta2":
        return (saved is None) == (ours is None)
    if key == "coefficients" and not isinstance(saved, str) and not isinstance(ours, str):
        return [tuple(triple) for triple in saved] == [tuple(triple) for triple in ours]
    return saved == ours


# ------------------------------------------------------------------------------------------------------------


class DistMuonAdamW(MuonAdamW):
    """The same over the ranks of a process group, to which every rank brings the same groups.

    process_group: default the whole world; a world of one where torch.distributed is not initialized and
    torchrun did not start us. It holds the ranks of all device meshes. comm_dtype: of the reduction, and of
    both transfers of sharded matrices; default the gradient's own. free_grads: set `p.grad` to None as soon
    as it is used; otherwise it is not changed. gradients_averaged: they are means over the ranks already (DDP
    makes them), and are not sent again; ranks whose gradients differ would train different models.

    Gradients and state of replicated parameters are split (ZeRO-2). They start as rank 0 has them, and the
    update uses the mean of `p.grad` over ranks. Matrices of one shape are cut into banks of a multiple of W,
    and one of what is left: 12 on 8 ranks are banks of 8 and 4. With W ranks, parameters of R rows, banks of
    K matrices:

      parameters            collect                          state on a rank      deliver
      AdamW, up to SMALL    one all_reduce for all of them   all of it            nothing
      AdamW                 reduce_scatter                   ceil(R/W) rows       all_gather
      Muon                  reduce_scatter, whole matrices   ceil(K/W) matrices   all_gather
      Muon, 2K < W          reduce of each to its owner      of K ranks one each  broadcast from the owner

    A rank sends 2(W-1)/W times the parameter bytes a step, plus padding. Memory of a step beyond parameters,
    gradients and state: (1 + 1/W) times the padded bytes of what is in flight, which is everything (AdamW
    rows that divide by W are sent from `p.grad` and received in the parameter, so they count 1/W), one batch
    of a bank, its temporaries. After every step all ranks hold bitwise the same parameters; a world of one
    does what MuonAdamW does.

    Parameters that are in pieces themselves (DTensors of FSDP2 or tensor parallelism) are worked on where
    they live: `sharded.py`, which has max_in_flight and chunk_size as well.
    """

    def __init__(
        self,
        param_groups,
        process_group=None,
        comm_dtype=None,
        *,
        max_in_flight=3,
        chunk_size=None,
        free_grads=False,
        gradients_averaged=False,
        compile="auto",
        matmul_precision=None,
        ns_dtype=None,
    ):
        world = World(comm_dtype=comm_dtype)
        if dist.is_initialized():
            world = World.of(process_group or dist.group.WORLD, comm_dtype)
            world.gradients_averaged = gradients_averaged
            # torch.amp.GradScaler then calls step() also on a rank where it has found something infinite.
            # Otherwise that one would leave it out alone, and the others wait: see `unscale`
            self._step_supports_amp_scaling = world.averages
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "torchrun started several processes: call torch.distributed.init_process_group first"
            )
        if comm_dtype == torch.float16:
            raise ValueError("comm_dtype=torch.float16 has no number above 65,504: use torch.bfloat16")
        if max_in_flight < 1:
            raise ValueError(f"{max_in_flight=} must be at least 1")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"{chunk_size=} must be at least 1")
        self.max_in_flight, self.chunk_size, self.free_grads = max_in_flight, chunk_size, free_grads
        super().__init__(
            param_groups,
            compile=compile,
            matmul_precision=matmul_precision,
            ns_dtype=ns_dtype,
            world=world,
        )

    def settings(self):
        return {
            "process_group": SameGroup(self.world.process_group),
            "comm_dtype": self.world.comm_dtype,
            "max_in_flight": self.max_in_flight,
            "chunk_size": self.chunk_size,
            "free_grads": self.free_grads,
            "gradients_averaged": self.world.gradients_averaged,
            "compile": self.compile,
            "matmul_precision": self.matmul_precision,
            "ns_dtype": self.ns_dtype,
        }


# ------------------------------------------------------------------------------------------------------------


def refuse_capture():
    """RuntimeError where a CUDA graph records what is launched: as often as it is replayed, it would take the
    hyperparameters and the step counts' corrections of this one step, from host memory that is free by then.
    """
    if torch.compiler.is_compiling() or not torch.cuda.is_available():
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot record step(), which reads its hyperparameters from the host each time: "
            "record forward and backward, and call step() after the replay"
        )


@contextlib.contextmanager
def kernels_compiled(compiles):
    if torch.compiler.is_compiling():  # which cannot trace a ContextVar, and need not: see `kernels_compile`
        yield
        return
    token = OPTIMIZER_COMPILES.set(compiles)
    try:
        yield
    finally:
        OPTIMIZER_COMPILES.reset(token)


@contextlib.contextmanager
def matmul_precision(precision):
    """torch.set_float32_matmul_precision for the length of a step; None leaves it alone."""
    if precision is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def without_autocast(device):
    """Around a step that is taken inside of torch.autocast, which would make the products of Newton-Schulz in
    its own dtype.
    """
    if device.type == "meta":  # which has no autocast
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
