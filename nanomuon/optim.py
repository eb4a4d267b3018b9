"""MuonAdamW for one process and DistMuonAdamW for many: Muon for matrices, AdamW for everything else.

    muon = dict(kind="muon", params=[...], lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0)
    adamw = dict(kind="adamw", params=[...], lr=3e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    optimizer = DistMuonAdamW([muon, adamw])  # under torchrun; in one process MuonAdamW([muon, adamw])

The parameters are divided into work items. `MuonAdamW.step` takes all of them through the same phases:

    collect   send the gradients to the ranks that work on them
    compute   the mathematics, where the gradients have arrived
    send      send the results
    deliver   write the other ranks' results into the parameters

Every rank has all replicated parameters and its own gradients of them. The collectives of `collect` average
those over the W ranks; nothing else does. So the mean gradient of a matrix exists only at its owner, which
alone has its state (ZeRO-2). In each phase the items go in the order of this table:

    work item        parameters                  collect                send         state on a rank
    Bank             K matrices of one shape     reduce_scatter         all_gather   ceil(K/W) matrices'
      if 2K < W      the same                    reduce to each owner   broadcast    one's, on K ranks
    Rows             a large one of AdamW        reduce_scatter         all_gather   ceil(R/W) rows'
    SmallParameters  AdamW's up to SMALL         all_reduce             nothing      all
    Pipeline         matrices sharded by FSDP2   all_to_all             all_to_all   see optim_fsdp.py

A bank sends one stack of all its gradients, padded to a multiple of W, and receives its 1/W of it; later one
stack of all updated matrices. Rows of a parameter that divides by W are sent from `p.grad` and received in
the parameter; others are padded. Small parameters travel as one flat vector. All gradients are in flight at
once, which takes (1 + 1/W) times their padded bytes; a stack of gradients is freed before that of the results
is made. A step sends 2(W-1)/W times the bytes of the parameters from each rank. Besides, it takes the
temporaries of one batch of a bank (BATCH_BYTES) or of one large AdamW parameter. In one process every
transfer hands its input through, and the mathematics is the same code.

In order: the kernels; a group's numbers; the ranks and their collectives; the rule that makes the direction
of a Muon update; the work items; who owns which matrix; the optimizers. `optim_groups.py` checks the groups,
`optim_state.py` saves and loads state. Two extensions import this file, and its planner imports them when it
meets their parameters: `optim_fsdp.py` (FSDP2, with tensor parallelism in `optim_tp.py`) and `optim_fused.py`
(split matrices). A group's option `direction` takes a rule of your own: docs/optimizer.md, the page to read
next to this file, adds Lion.
"""

import contextvars
import functools
import logging
import math
import os
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from nanomuon import optim_state
from nanomuon.optim_groups import (
    build_param_groups,
    check_group,
    check_values,
    compare_ranks,
    named_parameters,
    option_name,
    structure,
)
from nanomuon.optim_state import Place, is_cut, like_param, local, rows_of, state_dtype
from nanomuon.orthogonalize import orthogonalize, update_scale
from nanomuon.runtime import compile_enabled

SMALL = 16_384  # elements; AdamW parameters up to this size travel together and every rank updates them
BATCH_BYTES = {"cpu": 2**22, "cuda": 2**29}  # Muon works on this much of a bank at a time
COMPILE_FROM = 1024  # elements; compiling a kernel for fewer does not pay

# Since torch 2.13 the collectives on one tensor are called *_single, and the old names warn.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# ------------------------------------------------------------------------------------------------------------
# Kernels. `ok` is 1, or 0 if the parameter must not change: it has no gradient, or some gradient is not
# finite. The gradient then counts as 0 and every rate is multiplied by 0; torch.where keeps the parameter,
# since 0 times infinity is NaN. `hyper` has a group's numbers as 0-D tensors, so a new value recompiles
# nothing. Options (nesterov, cautious) are Python values: each choice is compiled once. Arithmetic is in the
# dtype of the state, except Newton-Schulz.

compiling = contextvars.ContextVar("compiling", default=False)  # whether the optimizer that steps compiles


def kernel(function):
    """Decorator: in a step of an optimizer that compiles, call a compiled copy, if the first tensor is large
    enough to gain from it.
    """

    @functools.wraps(function)
    def call(*tensors, **options):
        first = tensors[0]
        if torch.compiler.is_compiling() or not compiling.get() or first.numel() < COMPILE_FROM:
            return function(*tensors, **options)
        return compiled(function, first.shape, first.dtype, *options.items())(*tensors, **options)

    return call


@functools.cache
def compiled(function, *key):
    """A copy of the function for every key: Dynamo compiles a code object at most eight times."""
    code, name = function.__code__.replace(), function.__name__
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    logging.getLogger("nanomuon").info("compiling %s: this step takes a while", name)
    return torch.compile(copy, dynamic=False, fullgraph=True)


@kernel
def adamw_update(
    param,  # (32768, 768), of any shape; updated in place
    grad,  # (32768, 768)
    exp_avg,  # (32768, 768), updated in place
    exp_avg_sq,  # (32768, 768), updated in place
    step,  # (), this one included; or one per element, (32768, 768)
    ok,  # like step
    hyper,  # AdamWNumbers
):
    """AdamW (arXiv 1711.05101)."""
    grad = torch.where(ok > 0, grad, 0).to(exp_avg.dtype)
    exp_avg.lerp_(grad, hyper.one_minus_beta1 * ok)
    exp_avg_sq.lerp_(grad.square(), hyper.one_minus_beta2 * ok)
    bias1 = -torch.expm1(step * torch.log1p(-hyper.one_minus_beta1))  # 1 - beta^t; a power would lose digits
    bias2 = -torch.expm1(step * torch.log1p(-hyper.one_minus_beta2))
    update = exp_avg * (hyper.lr / bias1 * ok) / (exp_avg_sq.sqrt() * bias2.rsqrt() + hyper.eps)
    new = param.to(exp_avg.dtype) * (1 - hyper.lr_times_decay * ok) - update
    param.copy_(torch.where(ok > 0, new.to(param.dtype), param))


@kernel
def muon_momentum(
    grad,  # (12, 768, 3072): a batch of matrices
    momentum_buffer,  # (12, 768, 3072), updated in place; None: no momentum
    ok,  # (12, 1, 1)
    hyper,  # MuonNumbers
    *,
    nesterov,
):
    """The matrices to orthogonalize, U (12, 768, 3072), by Nesterov's rule.

    M <- lerp(M, G, 1 - mu) is 1 - mu times the M <- mu M + G of other projects: the same direction at
    constant mu.
    """
    grad = torch.where(ok > 0, grad, 0).to(ok.dtype)
    if momentum_buffer is None:
        return grad
    momentum_buffer.lerp_(grad, hyper.one_minus_momentum * ok)
    if nesterov:
        return grad.lerp(momentum_buffer, hyper.momentum)
    return momentum_buffer.clone()


@kernel
def normuon(
    U,  # (12, 768, 3072)
    buffers,  # {"second_momentum_buffer": (12, 1, 3072)}, or {} for plain Muon
    ok,  # (12, 1, 1)
    hyper,  # MuonNumbers
    *,
    coefficients,
    ns_steps,
    ns_dtype,
):
    """The direction of the update: polar factor and second moment (NorMuon, arXiv 2510.05491).

    Returns X (12, 768, 3072), in the dtype of the iteration, and its gain, (12, 1, 3072) or (12, 1, 1): their
    product is the direction.
    """
    X = orthogonalize(U, coefficients, ns_steps, ns_dtype=ns_dtype)
    if not buffers:
        return X, torch.ones_like(ok)
    return X, second_moment_gain(X, buffers["second_momentum_buffer"], ok, hyper)


def second_moment_gain(X, second_momentum_buffer, ok, hyper):
    """NorMuon's scaling and its correction of the norm, as one factor. Updates the second moment in place.

    One value per line along the longer side, as in nanochat: per row of a tall matrix, (k, m, 1), or per
    column of a wide one, (k, 1, n).
    """
    m, n = X.shape[1:]
    short, mean_over = min(m, n), 2 if m >= n else 1
    # ||X||^2 and ||X s||^2 are sums over these values, so X is read once
    v = X.to(ok.dtype).square().sum(dim=mean_over, keepdim=True) / short
    second_momentum_buffer.lerp_(v, hyper.one_minus_beta2 * ok)
    s = second_momentum_buffer.clamp(min=1e-10).rsqrt()
    norm_before = (v.sum(dim=(1, 2), keepdim=True) * short).sqrt()  # (k, 1, 1) Frobenius norms
    norm_after = ((v * s.square()).sum(dim=(1, 2), keepdim=True) * short).sqrt()
    return s * norm_before / norm_after.clamp(min=1e-10)


@kernel
def muon_update(
    param,  # (12, 768, 3072), updated in place
    X,  # (12, 768, 3072), in any dtype
    gain,  # broadcasts to X, in any dtype
    scale,  # (), or (768, 1) for a fused matrix
    ok,  # (12, 1, 1)
    hyper,  # MuonNumbers
    *,
    cautious,
):
    """Weight decay and update. The update's rate is lr * scale. Cautious decay, the default, has the same
    rate, decoupled decay lr alone.
    """
    P = param.to(ok.dtype)
    X = X.to(ok.dtype) * gain
    rate = hyper.lr * scale * ok
    if cautious:  # decay only what the update also shrinks
        decay = torch.where(X * P >= 0, P, 0) * (rate * hyper.weight_decay)
    else:
        decay = P * (hyper.lr * hyper.weight_decay * ok)
    new = P - X * rate - decay
    param.copy_(torch.where(ok > 0, new.to(param.dtype), param))


# ------------------------------------------------------------------------------------------------------------
# A group's numbers for the kernels


class MuonNumbers(NamedTuple):
    lr: object  # each a float, on the device a 0-D tensor
    weight_decay: object
    momentum: object
    one_minus_momentum: object
    one_minus_beta2: object


class AdamWNumbers(NamedTuple):
    lr: object
    lr_times_decay: object
    one_minus_beta1: object
    one_minus_beta2: object
    eps: object


def numbers_of(group):
    """A param group's numbers, in Python's float64: float32 would lose digits of 1 - beta. ValueError for
    impossible ones, which a schedule may have written.
    """
    try:
        check_values(group)
    except (TypeError, ValueError) as error:
        raise ValueError(f"param group of {group['names'][0]}: {error}") from None
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    if group["kind"] == "muon":
        momentum, beta2 = group["momentum"] or 0, group["beta2"] or 0  # nothing reads them if they are None
        return MuonNumbers(lr, weight_decay, momentum, 1 - momentum, 1 - beta2)
    beta1, beta2 = group["betas"]
    return AdamWNumbers(lr, lr * weight_decay, 1 - beta1, 1 - beta2, group["eps"])


# ------------------------------------------------------------------------------------------------------------
# The ranks that share the work, and the collectives between them


@dataclass
class Transfer:
    """A collective in flight, with the tensors that it reads and writes. `wait()` returns what it brings."""

    received: object  # a tensor, or a list of tensors
    handles: list = ()  # of torch.distributed, or Transfers; none in a single process
    sent: object = None

    def wait(self):
        for handle in self.handles:
            handle.wait()
        return self.received


@dataclass(frozen=True)
class World:
    """The ranks of a process group; without one, a single process, which sends nothing.

    Its collectives start at once and return a Transfer. reduce_scatter, all_reduce and reduce_to average over
    the ranks; all_reduce takes other operations, too. comm_dtype: the dtype of gradients in transfers, None
    for their own.
    """

    process_group: object = None
    comm_dtype: torch.dtype | None = None
    size: int = 1
    rank: int = 0

    @classmethod
    def of(cls, process_group, comm_dtype=None):
        size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        if rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group of its optimizer")
        return cls(process_group, comm_dtype, size, rank)

    @classmethod
    def default(cls, comm_dtype=None):
        """All ranks, or this process if torch.distributed is not used."""
        return cls.of(dist.group.WORLD, comm_dtype) if dist.is_initialized() else cls(None, comm_dtype)

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        """Unpickled, it is the default process group."""
        return (World, ()) if self.process_group is None else (World.default, (self.comm_dtype,))

    def span(self, length, rank):
        """(lo, hi) of a rank's ceil(length/W), less or nothing on the last ranks, as in DTensor's Shard."""
        each = -(-length // self.size)
        return min(length, each * rank), min(length, each * (rank + 1))

    def as_sent(self, tensor):
        """The tensor in the dtype in which gradients travel."""
        return tensor if self.size == 1 else tensor.to(self.comm_dtype or tensor.dtype)

    def padded(self, tensor):
        """Contiguous, (W*c, ...), with `tensor` at the top; nobody reads the padding."""
        missing = -len(tensor) % self.size
        if not missing:
            return tensor.contiguous()
        return torch.cat([tensor, tensor.new_empty(missing, *tensor.shape[1:])])

    def start(self, received, collective, *arguments, sent=None, **options):
        """Launch a collective of torch.distributed, unless this is a world of one; return its Transfer."""
        if self.size == 1:
            return Transfer(received)
        handle = collective(*arguments, group=self.process_group, async_op=True, **options)
        return Transfer(received, [handle], sent)

    def reduce_scatter(self, tensor):
        """tensor: (R, ...). Receives the mean over ranks of this rank's ceil(R/W) rows, and padding."""
        if self.size == 1:
            return Transfer(tensor)
        send = self.padded(self.as_sent(tensor))
        received = send.new_empty(len(send) // self.size, *send.shape[1:])
        return self.start(received, reduce_scatter_single, received, send, dist.ReduceOp.AVG, sent=send)

    def all_gather(self, tensor):
        """tensor: (W*c, ...) with this rank's c rows in their place. Receives the same tensor, filled."""
        rows = tensor.chunk(self.size)[self.rank]
        return self.start(tensor, all_gather_single, tensor, rows, sent=rows)

    def all_reduce(self, tensor, operation=dist.ReduceOp.AVG):
        """Receives the same tensor, with the mean over ranks, or the result of another operation."""
        return self.start(tensor, dist.all_reduce, tensor, operation)

    def all_to_all(self, tensor, send_sizes, receive_sizes):
        """tensor: flat, send_sizes[r] elements for rank r. Receives receive_sizes[r] from each r, flat."""
        received, collective = tensor.new_empty(sum(receive_sizes)), dist.all_to_all_single
        return self.start(received, collective, received, tensor, receive_sizes, send_sizes, sent=tensor)

    def reduce_to(self, owner, tensor):
        """Receives the same tensor: at its owner the mean over ranks, elsewhere undefined."""
        return self.start(tensor, dist.reduce, tensor, op=dist.ReduceOp.AVG, group_dst=owner)

    def broadcast_from(self, owner, tensor):
        """Receives the same tensor, with the owner's values."""
        return self.start(tensor, dist.broadcast, tensor, group_src=owner)


# ------------------------------------------------------------------------------------------------------------
# Parameters and gradients as the work items see them


def has_gradient(param):
    return param.requires_grad and param.grad is not None


def gradient_dtype(param):
    """The dtype of a parameter's gradient, the same on ranks that have none."""
    return getattr(param, "grad_dtype", None) or param.dtype  # grad_dtype: in newer PyTorch


def gradient(param):
    """This rank's shard of p.grad; zeros if there is none, or only an old one of a frozen parameter."""
    if not has_gradient(param):
        return torch.zeros_like(local(param), dtype=gradient_dtype(param))
    grad = param.grad
    if isinstance(grad, DTensor) and grad.placements != param.placements:
        # Tensor parallelism may leave partial sums
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)


def matrix_shape(param):
    """(m, n) of each matrix of a Muon parameter: 3-D is a batch of matrices, 4-D is (out, rest)."""
    return tuple(param.shape[1:]) if param.ndim == 3 else (len(param), param.shape[1:].numel())


def unbound(tensors):
    """Muon parameters, batches of matrices one by one."""
    single = []
    for tensor in tensors:
        single += tensor.unbind() if tensor.ndim == 3 else [tensor]
    return single


def as_matrices(tensors):
    """(m, n) of each of these tensors: views, of a convolution in channels_last a copy."""
    return [tensor.reshape(matrix_shape(tensor)) for tensor in tensors]


def write(matrices, tensors):
    """Copy matrices into tensors of as many elements."""
    views = [matrix.view(tensor.shape) for matrix, tensor in zip(matrices, tensors, strict=True)]
    torch._foreach_copy_(tensors, views)


def as_batch(matrices):
    """(k, m, n) of a list of matrices: a view of one, a copy of several. A tensor is returned as it is."""
    if isinstance(matrices, torch.Tensor):
        return matrices
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)


def batches(count, shape, device):
    """Slices of `count` matrices, each within BATCH_BYTES."""
    most = max(1, BATCH_BYTES.get(device.type, BATCH_BYTES["cuda"]) // (4 * math.prod(shape)))
    return [slice(lo, min(lo + most, count)) for lo in range(0, count, most)]


# ------------------------------------------------------------------------------------------------------------
# The rule that makes the direction of a Muon update


@dataclass(frozen=True)
class Rule:
    """How the (m, n) matrices of a Muon group get the direction of their update.

    function(U, buffers, ok, hyper) -> (X, gain), whose product is the direction. U: (k, m, n), momentum by
    Nesterov's rule. buffers: {name: (k, *shape)}, its state, updated in place. ok: (k, 1, 1), 0 for a matrix
    that must not change, nor its state. hyper: MuonNumbers. X: (k, m, n); gain: three dimensions, broadcasts
    to it.
    """

    function: Callable
    shape: tuple  # (m, n)
    buffers: dict  # {name: shape of one matrix's state}
    scale: object  # the factor on the update, or one per row, (m, 1)
    cost: int  # of Newton-Schulz, to balance owners


def rule_of(group, m, n, ns_dtype):
    """The Rule of a group's (m, n) matrices."""
    if group["split"] is not None:
        from nanomuon import optim_fused  # an extension: imported when it is needed

        return optim_fused.rule_of(group, m, n, ns_dtype)
    scale, cost = update_scale(group["scale"], m, n), m * n * min(m, n)
    if group["direction"] is not None:
        function = functools.partial(call_direction, group["direction"])
        buffers = getattr(group["direction"], "buffers", lambda m, n: {})(m, n)
        if "momentum_buffer" in buffers:
            raise ValueError("a direction's own buffer cannot be called momentum_buffer")
        return Rule(function, (m, n), buffers, scale, cost)
    options = {key: group[key] for key in ("coefficients", "ns_steps")}
    buffers = {}
    if group["beta2"] is not None:  # nanochat's name for the second moment
        buffers["second_momentum_buffer"] = (m, 1) if m >= n else (1, n)
    return Rule(functools.partial(normuon, **options, ns_dtype=ns_dtype), (m, n), buffers, scale, cost)


def call_direction(direction, U, buffers, ok, hyper):
    """A user's function, which cannot put other tensors in place of its buffers: they would be lost."""
    X, gain = direction(U, types.MappingProxyType(buffers), ok, hyper)
    if X.shape != U.shape:  # it might broadcast
        raise ValueError(
            f"{option_name(direction)} must return (X, gain) with X of the shape of U, {tuple(U.shape)}, "
            f"not {tuple(X.shape)}"
        )
    return X, gain


# ------------------------------------------------------------------------------------------------------------
# The work items. Each has `params`, `group`, `dtype` of its state, `places` {parameter: {name: Place of its
# state}}, and the four phases. ok: 1 or 0 for each of its params, on the device; hyper: numbers of its group.
# Between phases an item keeps nothing but state: `step` holds what is in flight.

TURNS = ("Bank", "Rows", "SmallParameters", "Pipeline")  # most to compute first; a pipeline computes last


class Rows:
    """A large AdamW parameter by rows: every rank updates those of its span, and keeps only their state.

    world: the ranks that share the rows; a single process for a cut parameter (DTensor), whose rows are all
    local.
    """

    def __init__(self, param, group, world):
        self.params, self.group, self.world, self.dtype = [param], group, world, state_dtype(param)
        self.span = slice(*world.span(len(local(param)), world.rank))
        rows = local(param)[self.span]
        self.step = torch.zeros((), dtype=torch.float32, device=rows.device)
        self.exp_avg = torch.zeros(rows.shape, dtype=self.dtype, device=rows.device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.places = {
            param: {
                "step": Place(self.step),
                "exp_avg": rows_of(param, self.exp_avg, world),
                "exp_avg_sq": rows_of(param, self.exp_avg_sq, world),
            }
        }

    def __str__(self):
        return f"rows of {tuple(self.params[0].shape)}"

    def collect(self, ok, hyper):
        return self.world.reduce_scatter(gradient(self.params[0]))

    def compute(self, grad, ok, hyper):
        """grad: this rank's rows, and padding."""
        self.step += ok[0]
        rows, step = local(self.params[0])[self.span], self.step.to(self.dtype)
        adamw_update(rows, grad[: len(rows)], self.exp_avg, self.exp_avg_sq, step, ok[0], hyper)

    def send(self):
        return self.world.all_gather(self.world.padded(local(self.params[0])))

    def deliver(self, rows):
        """rows: all of the parameter's, and padding."""
        param = local(self.params[0])
        if rows is not param:  # it was padded
            param.copy_(rows[: len(param)])


class SmallParameters:
    """Small AdamW parameters of one group as one flat vector, updated on every rank.

    world: the ranks to average over; a single process for cut parameters (DTensors).
    """

    def __init__(self, params, group, world):
        self.params, self.group, self.world, self.dtype = params, group, world, state_dtype(params[0])
        shards = [local(param) for param in params]
        self.sizes, device = [shard.numel() for shard in shards], shards[0].device
        self.steps = torch.zeros(len(shards), dtype=torch.float32, device=device)
        self.exp_avg = torch.zeros(sum(self.sizes), dtype=self.dtype, device=device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.param_of_element = torch.repeat_interleave(torch.tensor(self.sizes)).to(device)
        self.places = {}
        moments = self.exp_avg.split(self.sizes), self.exp_avg_sq.split(self.sizes)
        for param, shard, step, exp_avg, exp_avg_sq in zip(params, shards, self.steps, *moments, strict=True):
            self.places[param] = {
                "step": Place(step),
                "exp_avg": like_param(param, exp_avg.view_as(shard)),
                "exp_avg_sq": like_param(param, exp_avg_sq.view_as(shard)),
            }

    def __str__(self):
        return f"{len(self.params)} small parameters"

    def collect(self, ok, hyper):
        grads = torch.cat([gradient(param).flatten() for param in self.params])  # in the widest dtype
        return self.world.all_reduce(self.world.as_sent(grads))

    def compute(self, grads, ok, hyper):
        shards = [local(param) for param in self.params]
        params = torch.cat([shard.flatten() for shard in shards])
        self.steps += ok
        of_elements = torch.stack([self.steps, ok])[:, self.param_of_element].to(self.dtype)
        step, ok = of_elements.unbind()
        adamw_update(params, grads, self.exp_avg, self.exp_avg_sq, step, ok, hyper)
        new = params.split(self.sizes)
        torch._foreach_copy_(shards, [part.view_as(shard) for part, shard in zip(new, shards, strict=True)])

    def send(self):
        return Transfer(None)

    def deliver(self, nothing):
        pass


class Exchange:
    """How the matrices of a bank travel to their owners and back, and where their state lives.

    owners: the rank of each matrix, ascending. All travel as one stack, in which all ranks have equally many
    slots and fill their first ones: 4 matrices on 8 ranks take 8 slots, 4 of them empty; nobody reads those.
    If that would more than double the bytes, each matrix is reduced to its owner and broadcast from it
    instead.
    """

    def __init__(self, params, owners, world):
        self.params, self.owners, self.world = params, owners, world
        self.owned = owned_by(world.rank, owners)
        self.one_by_one = 2 * len(owners) < world.size
        self.slots, self.slot_count = list(range(len(owners))), len(owners)
        if not self.one_by_one:
            each = -(-len(owners) // world.size)
            self.slots = [owner * each + i - owners.index(owner) for i, owner in enumerate(owners)]
            self.slot_count = each * world.size

    def stack(self, matrices, slots, like, dtype):
        """(slots, m, n) with these matrices in these slots. like: any matrix of the bank."""
        stack = like.new_empty(self.slot_count, *like.shape, dtype=dtype)
        if matrices:
            torch._foreach_copy_([stack[slot] for slot in slots], matrices)
        return stack

    def to_owners(self, grads):
        """grads: of all matrices. Receives the mean over ranks of this rank's: (k, m, n) and padding; in one
        process the same list.
        """
        if self.world.size == 1:
            return Transfer(grads)
        stack = self.stack(grads, self.slots, grads[0], self.world.comm_dtype or grads[0].dtype)
        if not self.one_by_one:
            return self.world.reduce_scatter(stack)
        transfers = [self.world.reduce_to(owner, stack[i]) for i, owner in enumerate(self.owners)]
        return Transfer(stack[self.owned], transfers, stack)

    def from_owners(self, matrices):
        """matrices: all of the bank, of which this rank's are new. Receives all new ones, in one process
        none: a list.
        """
        if self.world.size == 1:
            return Transfer([])
        stack = self.stack(matrices[self.owned], self.slots[self.owned], matrices[0], matrices[0].dtype)
        if self.one_by_one:
            transfers = [self.world.broadcast_from(owner, stack[i]) for i, owner in enumerate(self.owners)]
        else:
            transfers = [self.world.all_gather(stack)]
        return Transfer([stack[slot] for slot in self.slots], transfers)

    def place(self, i, name, buffer):
        """The Place of a state tensor of the i-th parameter. buffer: those of the owned matrices, stacked."""
        param, world = self.params[i], self.world
        if param.ndim == 3:  # the ranks share its matrices like rows
            return rows_of(param, buffer, world)
        shape = param.shape if name == "momentum_buffer" else buffer.shape[1:]
        tensor = None
        if self.owners[i] == world.rank:
            tensor = buffer[i - self.owned.start].view(shape)
        return Place(tensor, shape, world=world, owner=self.owners[i], like=buffer)


class MuonItem:
    """Same-shaped matrices of one Muon group with one dtype, and one of gradients: parameters, state, and the
    rule. `exchange` says how they travel and where the state lives. A 3-D parameter is an item of its own.

    count: the matrices whose state this rank has.
    """

    def __init__(self, params, group, rule, exchange, count):
        self.params, self.group, self.rule, self.exchange = params, group, rule, exchange
        self.shape = matrix_shape(local(params[0]))  # (m, n)
        self.dtype, self.device = state_dtype(params[0]), params[0].device
        zeros = functools.partial(torch.zeros, dtype=self.dtype, device=self.device)
        self.scale = torch.as_tensor(rule.scale, dtype=self.dtype, device=self.device)
        shapes = {} if group["momentum"] is None else {"momentum_buffer": self.shape}
        self.buffers = {name: zeros(count, *shape) for name, shape in {**shapes, **rule.buffers}.items()}
        self.places = {}
        for i, param in enumerate(params):
            places = {name: exchange.place(i, name, buffer) for name, buffer in self.buffers.items()}
            self.places[param] = places

    def __str__(self):
        return f"bank of {len(self.params)} {'x'.join(map(str, self.shape))}"

    def tensors(self):
        """The parameters, or this rank's shards of them; batches of matrices one by one."""
        return unbound([local(param) for param in self.params])

    def gradients(self):
        return as_matrices(unbound([gradient(param).contiguous() for param in self.params]))


class Bank(MuonItem):
    """Matrices that every rank has whole. It works on those it owns, a batch at a time."""

    def __init__(self, params, group, rule, exchange):
        owned = exchange.owned.stop - exchange.owned.start
        super().__init__(params, group, rule, exchange, owned)
        self.batches = batches(owned, rule.shape, self.device)

    def collect(self, ok, hyper):
        return self.exchange.to_owners(self.gradients())

    def compute(self, grads, ok, hyper):
        """grads: mean gradients of the owned matrices."""
        owned = self.exchange.owned
        tensors = self.tensors()[owned]
        params = as_matrices(tensors)
        # A 3-D parameter is alone in its bank: one number for all of its matrices
        ok = ok.expand(len(self.exchange.owners))[owned].view(-1, 1, 1).to(self.dtype)  # (k, 1, 1)
        nesterov, cautious = self.group["nesterov"], self.group["weight_decay_form"] == "cautious"
        for batch in self.batches:
            G, P, of_batch = as_batch(grads[batch]), as_batch(params[batch]), ok[batch]
            buffers = {name: buffer[batch] for name, buffer in self.buffers.items()}
            momentum_buffer = buffers.pop("momentum_buffer", None)
            U = muon_momentum(G, momentum_buffer, of_batch, hyper, nesterov=nesterov)
            X, gain = self.rule.function(U, buffers, of_batch, hyper)
            muon_update(P, X, gain, self.scale, of_batch, hyper, cautious=cautious)
            if len(P) > 1 or not tensors[batch.start].is_contiguous():  # P is a copy
                write(P.unbind(), tensors[batch])

    def send(self):
        return self.exchange.from_owners(as_matrices(self.tensors()))

    def deliver(self, matrices):
        if matrices:
            write(matrices, self.tensors())


# ------------------------------------------------------------------------------------------------------------
# Who owns what


def assign_owners(count, cost, owned_cost):
    """The rank that works on each of `count` equal matrices, ascending: as evenly as whole matrices allow.

    cost: of one matrix. owned_cost: of the matrices that each rank owns already; updated. The ranks with the
    least get the remainder. Depends on these alone, so all ranks find the same owners.
    """
    even, left_over = divmod(count, len(owned_cost))
    ranks = list(range(len(owned_cost)))
    idlest = sorted(ranks, key=owned_cost.__getitem__)[:left_over]
    owners = sorted(ranks * even + idlest)
    for owner in owners:
        owned_cost[owner] += cost
    return owners


def owned_by(rank, owners):
    """The slice of the matrices that a rank owns. owners: the rank of each, ascending."""
    first = sum(owner < rank for owner in owners)
    return slice(first, first + owners.count(rank))


# ------------------------------------------------------------------------------------------------------------


class MuonAdamW(optim_state.SavedByName, torch.optim.Optimizer):
    """Muon and AdamW in one process. The update rules are the kernels above.

    param_groups: dicts with `kind` ("muon" | "adamw"), `params`, for muon lr, momentum, ns_steps, beta2,
    weight_decay and any of optim_groups.MUON_OPTIONS, for adamw lr, betas, eps, weight_decay. `beta2=None` is
    Muon without a second moment, `momentum=None` Muon on the gradients themselves, for rules that keep
    momentum of their own, `ns_steps=None` the coefficient set's own length. `names`, aligned with params, or
    (name, parameter) pairs in params give the names that state is saved by, default group{i}.{j}. Rates,
    momenta, betas, eps and decays may change at any time; parameters, other options and whether there is a
    momentum or a beta2 may not after the first step. ValueError at construction for what is unknown or
    missing, at the first step for parameters cut in unsupported ways.

    ns_dtype: the dtype of Newton-Schulz. None: half precision on GPUs, float32 on CPUs; torch.bfloat16 (on
    GPUs float16 in the Gram form) is about twice as fast on CPUs that multiply it natively, and several times
    slower on others. All other arithmetic is float32, or float64 for float64 parameters.

    compile: whether to compile the kernels: True, False, or "auto", on GPUs only. The environment variable
    NANOMUON_COMPILE overrides it. world: the ranks that share the work (DistMuonAdamW).

    Parameters without a gradient, or that no longer require one, are skipped: parameter, state and step count
    do not change. `p.grad` is never written. If the norm of a gradient is not finite on any rank, the step
    changes nothing, and `skipped_steps`, a 0-D tensor, counts it.
    """

    def __init__(self, param_groups, *, compile="auto", ns_dtype=None, world=None):
        if ns_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"ns_dtype is None, torch.float32 or torch.bfloat16, not {ns_dtype!r}")
        self.compile, self.ns_dtype, self.world = compile, ns_dtype, world or World()
        self.reset_plan()
        self.skipped_steps = None
        super().__init__(param_groups, {})
        self.skipped_steps = torch.zeros((), dtype=torch.int64)
        self.equalize_ranks(self.param_groups)
        # Schedulers check the defaults for what they may cycle: OneCycleLR writes group["momentum"]
        if all(group.get("momentum", 0) is not None for group in self.param_groups):
            self.defaults["momentum"] = 0.95

    @classmethod
    def for_model(cls, model, lr=3e-4, weight_decay=0.01, *, muon_lr=None, **settings):
        """An optimizer of all parameters that require gradients, with defaults for transformers of any width.

        Parameters that are unfrozen later go to `add_param_group`.

        Muon's updates are scaled to the rms of AdamW's (`match_rms_adamw`, Moonlight, arXiv 2502.16982), so
        that one rate serves both; muon_lr: another one for the matrices. Weight decay is AdamW's, decoupled.
        `optim_groups.routing_table(model)` shows how each parameter is trained. settings: further keywords of
        the constructor.
        """
        muon = dict(
            lr=lr if muon_lr is None else muon_lr,
            momentum=0.95,
            ns_steps=5,
            beta2=0.95,
            weight_decay=weight_decay,
            weight_decay_form="decoupled",
            scale="match_rms_adamw",
        )
        adamw = dict(lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
        return cls(build_param_groups(model, muon=muon, adamw=adamw), **settings)

    def add_param_group(self, group):
        super().add_param_group(check_group(group, self.param_groups))
        if self.skipped_steps is not None:  # not while the constructor adds the first ones
            self.equalize_ranks(self.param_groups[-1:])

    @torch.no_grad()
    def equalize_ranks(self, groups):
        """ValueError if these groups differ between ranks. Replicated parameters get rank 0's values."""
        if self.world.process_group is None:
            return
        compare_ranks(groups, self.world.process_group)
        for _, param, _ in named_parameters(groups):
            if not is_cut(param):
                values = local(param)
                values.copy_(self.world.broadcast_from(0, values.contiguous()).wait())

    # ---- the step

    @torch.no_grad()
    def step(self, closure=None, *, finite=True):
        """One update from the gradients in `p.grad`. Returns the closure's loss, if there is one.

        finite: whether the loss is finite, a bool or a 0-D tensor, for which the host does not wait. False on
        any rank skips the step on all, as a gradient that is not finite does.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        self.plan()
        device = self.skipped_steps.device
        compiles = device.type == "cuda" if self.compile == "auto" else self.compile
        compiling.set(compile_enabled(compiles))
        # Autocast would compute Newton-Schulz's products in its own dtype; "meta" has no autocast
        with torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False):
            ok, hyper, in_flight = self.agree(finite), self.hyperparameters(), {}
            # All gradients are under way before any is waited for
            for item in self.work_items:
                with record_function(f"collect {item}"):
                    in_flight[item] = item.collect(ok[item], hyper[item])
            # Results travel while the next items compute. Transfers of tensor parallelism and of FSDP2's
            # pipeline, all but its first, run inside `compute`.
            for item in self.work_items:
                with record_function(f"compute {item}"):
                    item.compute(in_flight.pop(item).wait(), ok[item], hyper[item])
                    in_flight[item] = item.send()
            for item in self.work_items:
                with record_function(f"deliver {item}"):
                    item.deliver(in_flight.pop(item).wait())
        return loss

    def agree(self, finite):
        """{item: 1 for each of its params that this step changes, else 0}, the same on all ranks.

        That is, if any rank has a gradient of it, and no rank has a gradient that is not finite, or a false
        `finite`. One small all_reduce, by the maximum; the answer stays on the device, and the host does not
        wait for it.
        """
        params = [param for item in self.work_items for param in item.params]
        device = self.skipped_steps.device
        flags = torch.tensor([has_gradient(param) for param in params], dtype=torch.float32)
        flags = flags.to(device, non_blocking=True)
        grads = [local(param.grad) for param in params if has_gradient(param)]
        if any(grad.layout != torch.strided for grad in grads):
            raise ValueError("a gradient is sparse: make it dense, for example nn.Embedding(sparse=False)")
        bad = torch.zeros(1, dtype=torch.float32, device=device) + (finite == 0)
        if grads:
            bad += ~torch.stack(torch._foreach_norm(grads, dtype=self.dtype)).isfinite().all()
        flags = self.world.all_reduce(torch.cat([bad, flags]), dist.ReduceOp.MAX).wait()
        all_finite = flags[0] == 0
        self.skipped_steps += ~all_finite
        ok = flags[1:] * all_finite
        of_items = ok.split([len(item.params) for item in self.work_items])
        return dict(zip(self.work_items, of_items, strict=True))

    def hyperparameters(self):
        """{item: its group's numbers}, 0-D tensors: views of one vector that is copied to the device once."""
        of_items = [numbers_of(item.group) for item in self.work_items]
        vector = torch.tensor([number for numbers in of_items for number in numbers], dtype=self.dtype)
        # The host does not wait for a copy of so few bytes, even from pageable memory
        vector = vector.to(self.skipped_steps.device, non_blocking=True)
        views = vector.split([len(numbers) for numbers in of_items])
        named = {}
        for item, numbers, view in zip(self.work_items, of_items, views, strict=True):
            named[item] = type(numbers)(*view.to(item.dtype).unbind())
        return named

    # ---- the plan: work items, and where state lives

    def reset_plan(self):
        self.planned = []  # (id, structure, ids of parameters) of each planned group
        self.dtype = torch.float32  # the widest of the work items
        self.work_items = []  # in the order of their collectives, which all ranks share
        self.places = {}  # parameter -> {name of its state: Place}
        self.owned_cost = {}  # World -> what each of its ranks owns, see assign_owners

    @torch.no_grad()
    def plan(self):
        """Divide the groups into work items, each group once, when it is first needed.

        Before that accelerate may move the model, and FSDP2 replace its parameters in the groups. Afterwards
        this only compares: ValueError if parameters, options or state are not those that were planned.
        """
        now = [(id(group), structure(group), list(map(id, group["params"]))) for group in self.param_groups]
        planned = len(self.planned)
        for i, described in enumerate(self.planned):
            if now[i : i + 1] != [described]:
                raise ValueError(
                    f"param group {i} has other parameters or options than at the first step. Only lr, "
                    "momentum, betas, beta2, eps and weight_decay may change, and a momentum of None may not "
                    "(schedulers: cycle_momentum=False). For anything else build a new optimizer and load "
                    'this one\'s state with hyperparameters="keep"'
                )
        for group, described in zip(self.param_groups[planned:], now[planned:], strict=True):
            self.plan_group(group)
            self.planned.append(described)
        optim_state.check_places(self)

    def plan_group(self, group):
        """Work items for one group. Owners depend only on this group and those before it, so a copy, or a
        resumed run to which groups were added later, finds the same ones.
        """
        params = []
        for name, param in zip(group["names"], group["params"], strict=True):
            if self.world.size == 1 and is_cut(param):
                raise ValueError(f"{name} is a sharded DTensor: use DistMuonAdamW")
            if param.numel():  # without elements there is nothing to train
                params.append(param)
        if not params:
            return
        self.skipped_steps = self.skipped_steps.to(params[0].device)
        items = self.plan_muon(group, params) if group["kind"] == "muon" else self.plan_adamw(group, params)
        self.work_items = sorted(self.work_items + items, key=lambda item: TURNS.index(type(item).__name__))
        for item in items:
            self.dtype = torch.promote_types(self.dtype, item.dtype)
            for param, places in item.places.items():
                self.places[param] = places
                optim_state.take_over(self.state, param, places)

    def plan_adamw(self, group, params):
        items, small = [], {}
        for param in params:
            world = World() if is_cut(param) else self.world  # each rank updates its shard by itself
            if param.numel() > SMALL:
                items.append(Rows(param, group, world))
            else:
                small.setdefault((world, state_dtype(param)), []).append(param)
        for (world, _), params_of_one in small.items():
            items.append(SmallParameters(params_of_one, group, world))
        return items

    def plan_muon(self, group, params):
        """A bank for each shape and dtype; the largest matrices are assigned first."""
        banks, cut = {}, []
        for param in params:
            if is_cut(param):
                cut.append(param)
            else:
                own = id(param) if param.ndim == 3 else None  # a batch of matrices is its own bank
                key = matrix_shape(param), param.dtype, gradient_dtype(param), own
                banks.setdefault(key, []).append(param)
        items = []
        if cut:
            from nanomuon import optim_fsdp  # an extension: imported when it is needed

            items += optim_fsdp.plan_group(self, group, cut)
        for key in sorted(banks, key=lambda key: -math.prod(key[0])):
            rule = rule_of(group, *key[0], self.ns_dtype)
            owners = self.owners(banks[key], rule.cost)
            items.append(Bank(banks[key], group, rule, Exchange(banks[key], owners, self.world)))
        return items

    def owners(self, params, cost):
        """The owners of a bank's matrices."""
        size = self.world.size
        if params[0].ndim == 3:  # even blocks, so that its state is cut like DTensor's Shard(0)
            count = len(params[0])
            return [i // -(-count // size) for i in range(count)]
        return assign_owners(len(params), cost, self.owned_cost.setdefault(self.world, [0] * size))


class DistMuonAdamW(MuonAdamW):
    """MuonAdamW over the ranks of a process group, as the table at the top of this file says. All ranks must
    have the same groups, which the constructor checks.

    process_group: default the whole world; without torch.distributed a world of one, which does what
    MuonAdamW does. It must contain the ranks of all device meshes. The constructor and `add_param_group` are
    collective. comm_dtype: float32 or bfloat16, of the reduction, and of both transfers of sharded matrices;
    default the gradient's own. Use MuonAdamW under DistributedDataParallel, which has averaged the gradients
    already.

    Replicated parameters start with rank 0's values (copies of sharded ones must be equal already), and after
    every step all ranks hold bitwise the same ones. The update uses the mean of `p.grad` over ranks; `p.grad`
    itself stays as it is. Parameters that are DTensors cut over a device mesh (FSDP2, tensor parallelism) are
    updated as shards, see `optim_fsdp.py`.
    """

    def __init__(self, param_groups, process_group=None, comm_dtype=None, *, compile="auto", ns_dtype=None):
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "torchrun started several processes: call torch.distributed.init_process_group first"
            )
        world = World.default(comm_dtype) if process_group is None else World.of(process_group, comm_dtype)
        super().__init__(param_groups, compile=compile, ns_dtype=ns_dtype, world=world)
