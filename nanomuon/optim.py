"""MuonAdamW for one process and DistMuonAdamW for many: Muon for matrices, AdamW for everything else.

    muon = dict(kind="muon", params=[...], lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0)
    adamw = dict(kind="adamw", params=[...], lr=3e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    optimizer = DistMuonAdamW([muon, adamw])  # under torchrun; in one process MuonAdamW([muon, adamw])

A parameter that is not sharded, called whole or replicated, is on every rank, with a gradient from that
rank's own rows of the batch. Each whole matrix has an owner: the only rank that receives its mean gradient,
has its state and updates it (ZeRO-2, although the local `p.grad` stays whole). Large AdamW parameters are
divided by rows in the same way; small ones are updated by every rank. Parameters that are updated together
are a work item. `MuonAdamW.step` takes all work items through these phases:

    agree     one small all_reduce: which parameters have a gradient on some rank? Are all norms finite?
    collect   send the gradients to the ranks that need them
    compute   update state and parameters from the gradients that have arrived
    send      send the updated parameters
    deliver   copy what the other ranks have updated into the parameters

The kinds of work items, with W ranks:

    work item         parameters                  collect          send         state on one rank
    Bank              K matrices of one group     reduce_scatter   all_gather   for at most ceil(K/W) matrices
                      with one shape, dtype and
                      gradient dtype, or one 3-D
                      parameter
                      ... if 2K < W               reduce           broadcast    for one matrix, on K ranks
    BankOfShards      experts, or tensor-parallel shards: see optim_fsdp.py
    Rows              one large AdamW parameter   reduce_scatter   all_gather   for ceil(R/W) of its R rows
    SmallParameters   small AdamW parameters      all_reduce       nothing      for all of them
    Pipeline          matrices under FSDP2, whose gradients are averages already: `collect` updates the
                      momentum of the first chunk of matrices and sends U, which is to be orthogonalized;
                      see optim_fsdp.py

The collectives of `collect` average the gradients of whole parameters over the ranks, by `ReduceOp.AVG` in
the methods of `World`; nothing else in this file does. Of a bank's K matrices, a rank owns K // W consecutive
ones, or one more. The E matrices of a 3-D parameter are divided into blocks of ceil(E/W), so the last ranks
may own fewer or none. Each phase visits the items in one order: by kind, as in this table; within a kind by
group; the banks of a group from the largest m * n to the smallest, its pipelines by their most expensive
matrix, its other items by their first parameter. For banks and rows, each rank sends (W-1)/W times the bytes
of the gradients per step and as much of the parameters, plus padding. A single process sends nothing and runs
the same math.

This file contains, in order: the kernels; the hyperparameters; the ranks and their collectives; parameters
and gradients; the rule for the direction of a Muon update; the work items; the owners; the optimizers.
`optim_groups.py` checks the param groups, and `optim_state.py` saves and loads state. `plan_muon` and
`rule_of` import extensions only for the parameters that need them: `optim_fsdp.py` for sharded matrices
(FSDP2 and, with `optim_tp.py`, tensor parallelism) and `optim_fused.py` for matrices with `split`.
docs/optimizer.md is the companion page to this file; it has the update of one matrix in plain PyTorch, draws
a step on four ranks, lists the memory that a step takes, and shows how to add your own rule.
"""

import contextvars
import functools
import logging
import math
import os
import types
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nanomuon import optim_state
from nanomuon.optim_groups import (
    build_param_groups,
    check_choice,
    check_group,
    check_values,
    compare_ranks,
    fixed_options,
    named_parameters,
    option_name,
)
from nanomuon.optim_state import Place, is_sharded, local, place_like, place_of_rows, state_dtype
from nanomuon.orthogonalize import orthogonalize, update_scale
from nanomuon.runtime import compile_enabled, together

SMALL = 16_384  # elements; AdamW parameters up to this size share a collective, and every rank updates them
BATCH_BYTES = {"cpu": 2**22, "cuda": 2**29}  # of float32 matrices that Muon processes at a time
COMPILE_FROM = 1024  # elements; compiling a kernel for fewer does not pay off

# Since torch 2.13 the single-tensor collectives are called *_single, and the old names warn.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# ------------------------------------------------------------------------------------------------------------
# Kernels. The shapes next to the arguments are examples, such as a bank of 12 matrices of 768 x 3072. `ok` is
# 1, or 0 if the parameter must not change because it has no gradient, or because some gradient or loss is not
# finite. The gradient then counts as 0, and every rate is multiplied by 0. That is not enough, since 0 times
# infinity is NaN, so torch.where keeps the old parameter. `hyper` has a group's hyperparameters as 0-D
# tensors, so a new value triggers no recompilation; options (nesterov, cautious) are Python values, and each
# combination of options, shape and dtype is compiled once. All arithmetic except Newton-Schulz is in the
# dtype of the state, which Muon's kernels read from `ok.dtype`, as there may be no momentum buffer.

compile_kernels = contextvars.ContextVar("compile_kernels", default=False)  # each step sets it


def kernel(function):
    """Decorator: calls a compiled copy if the optimizer that is stepping compiles its kernels, and the first
    tensor is large enough to benefit.
    """

    @functools.wraps(function)
    def call(*tensors, **options):
        first = tensors[0]
        inside_a_kernel = torch.compiler.is_compiling()
        if inside_a_kernel or not compile_kernels.get() or first.numel() < COMPILE_FROM:
            return function(*tensors, **options)
        return compiled(function, first.shape, first.dtype, *options.items())(*tensors, **options)

    return call


@functools.cache
def compiled(function, *key):
    """A copy of the function for each key, because Dynamo compiles a code object at most eight times."""
    code = function.__code__.replace()
    name = function.__name__
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    logging.getLogger("nanomuon").info("compiling %s: this step takes a while", name)
    return torch.compile(copy, dynamic=False, fullgraph=True)


@kernel
def adamw_update(
    param,  # (32768, 768), updated in place
    grad,  # (32768, 768)
    exp_avg,  # (32768, 768), updated in place
    exp_avg_sq,  # (32768, 768), updated in place
    step,  # (), counting this step; or one per element, like param
    ok,  # like step
    hyper,  # AdamWHyper
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
    hyper,  # MuonHyper
    *,
    nesterov,
):
    """Update the momentum, and return the matrices to orthogonalize, U (12, 768, 3072).

    M <- lerp(M, G, 1 - mu) is (1 - mu) times the M <- mu M + G of other projects, so at constant mu the
    direction is the same.
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
    hyper,  # MuonHyper
    *,
    coefficients,
    ns_steps,
    ns_dtype,
):
    """The direction of the update: polar factor and second moment (NorMuon, arXiv 2510.05491).

    Returns X (12, 768, 3072), in the dtype of the iteration, and its gain, (12, 1, 3072) or (12, 1, 1). Their
    product is the direction.
    """
    X = orthogonalize(U, coefficients, ns_steps, ns_dtype=ns_dtype)
    if not buffers:
        return X, torch.ones_like(ok)
    m, n = X.shape[1:]
    mean_over = 2 if m >= n else 1  # one value per row of a tall matrix, or per column of a wide one
    v = X.to(ok.dtype).square().mean(dim=mean_over, keepdim=True)
    return X, second_moment_gain(v, min(m, n), buffers["second_momentum_buffer"], ok, hyper)


def second_moment_gain(
    v,  # (12, 1, 3072), mean squares of X, one per index of its long side
    short,  # 768, the short side
    second_momentum_buffer,  # (12, 1, 3072), updated in place
    ok,  # (12, 1, 1)
    hyper,  # MuonHyper
):
    """NorMuon's scaling of X and its norm correction, combined into one factor (12, 1, 3072)."""
    second_momentum_buffer.lerp_(v, hyper.one_minus_beta2 * ok)
    s = second_momentum_buffer.clamp(min=1e-10).rsqrt()
    # ||X||^2 and ||X s||^2 are sums over the mean squares, so X is read only once
    norm_before = (v.sum(dim=(1, 2), keepdim=True) * short).sqrt()  # (12, 1, 1) Frobenius norms
    norm_after = ((v * s.square()).sum(dim=(1, 2), keepdim=True) * short).sqrt()
    return s * norm_before / norm_after.clamp(min=1e-10)


@kernel
def muon_update(
    param,  # (12, 768, 3072), updated in place
    X,  # (12, 768, 3072), in any dtype
    gain,  # broadcasts to X, in any dtype
    scale,  # (), or (768, 1) for a fused matrix
    ok,  # (12, 1, 1)
    hyper,  # MuonHyper
    *,
    cautious,
):
    """Apply the update, and decay the old values by lr * scale * weight_decay where update and parameter have
    the same sign (cautious, the default), or by lr * weight_decay everywhere (decoupled).
    """
    P = param.to(ok.dtype)
    X = X.to(ok.dtype) * gain
    rate = hyper.lr * scale * ok
    if cautious:  # decay only the entries that the update also shrinks
        decay = torch.where(X * P >= 0, P, 0) * (rate * hyper.weight_decay)
    else:
        decay = P * (hyper.lr * hyper.weight_decay * ok)
    new = P - X * rate - decay
    param.copy_(torch.where(ok > 0, new.to(param.dtype), param))


# ------------------------------------------------------------------------------------------------------------
# Hyperparameters as the kernels take them: Python floats from `hyper_of`, which `MuonAdamW.hyperparameters`
# turns into 0-D tensors on the device

MuonHyper = namedtuple("MuonHyper", "lr weight_decay momentum one_minus_momentum one_minus_beta2")
AdamWHyper = namedtuple("AdamWHyper", "lr lr_times_decay one_minus_beta1 one_minus_beta2 eps")


def hyper_of(group):
    """The MuonHyper or AdamWHyper of a param group. 1 - beta is computed here, because float32 would lose
    digits. ValueError for invalid values, which a schedule may have written.
    """
    try:
        check_values(group)
    except (TypeError, ValueError) as error:
        raise ValueError(f"param group of {group['names'][0]}: {error}") from None
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    if group["kind"] == "muon":
        # None becomes 0. The kernels do not read it then; a direction of your own may
        momentum, beta2 = group["momentum"] or 0, group["beta2"] or 0
        return MuonHyper(lr, weight_decay, momentum, 1 - momentum, 1 - beta2)
    beta1, beta2 = group["betas"]
    return AdamWHyper(lr, lr * weight_decay, 1 - beta1, 1 - beta2, group["eps"])


# ------------------------------------------------------------------------------------------------------------
# The ranks that share the work, and the collectives between them


@dataclass
class Transfer:
    """A collective in flight. `wait()` returns `received`. Until it has, keep the Transfer, and with it
    `sent`; `step` and `Pipeline` drop it right after, which frees `sent`. With NCCL, it is the GPU's stream
    that waits: the host goes on.
    """

    received: object  # a tensor, or a list of tensors
    handles: list = ()  # from torch.distributed, or Transfers; none in a single process
    sent: object = None

    def wait(self):
        for handle in self.handles:
            handle.wait()
        return self.received


@dataclass(frozen=True)
class World:
    """The ranks of a process group, or without one a single process, which sends nothing.

    Its methods are the collectives of torch.distributed. They start at once and return a Transfer, whose
    `wait()` returns what their docstrings describe after "Receives". reduce_scatter, all_reduce and reduce
    average over the ranks; all_reduce also takes other operations. comm_dtype: the dtype of sent gradients,
    under FSDP2 also of U and the directions; None for their own (see `wire_dtype`).
    """

    process_group: object = None
    comm_dtype: torch.dtype | None = None

    def __post_init__(self):
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group of its optimizer")

    @functools.cached_property
    def size(self):
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)

    @functools.cached_property
    def rank(self):
        return 0 if self.process_group is None else dist.get_rank(self.process_group)

    @classmethod
    def default(cls, comm_dtype=None):
        """All ranks, or a single process if torch.distributed is not initialized."""
        return cls(dist.group.WORLD if dist.is_initialized() else None, comm_dtype)

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        """Any process group unpickles as the default one."""
        if self.process_group is None:
            return World, (None, self.comm_dtype)
        return World.default, (self.comm_dtype,)

    def raise_together(self, work):
        """The result of work(). If it raises on some rank, all ranks raise the first error."""
        if self.process_group is None:
            return work()
        results = []
        together(lambda: results.append(work()), self.process_group)  # what it returns would go to all ranks
        return results[0]

    def span(self, length, rank):
        """(lo, hi): a rank's range, ceil(length/W) of `length` rows or columns. The last ranks may have fewer
        or none, as in DTensor's Shard.
        """
        each = -(-length // self.size)
        return min(length, each * rank), min(length, each * (rank + 1))

    def wire_dtype(self, dtype):
        """The dtype in which gradients of this dtype are averaged: comm_dtype, or else their own; but float32
        for float16, whose sum may overflow before gloo divides it. A world of one casts nothing.
        """
        if self.size == 1:
            return dtype
        return self.comm_dtype or (torch.float32 if dtype == torch.float16 else dtype)

    def start(self, received, collective, *arguments, sent=None, **options):
        """Launch a collective of torch.distributed, unless this is a world of one; return its Transfer."""
        if self.size == 1:
            return Transfer(received)
        handle = collective(*arguments, group=self.process_group, async_op=True, **options)
        return Transfer(received, [handle], sent)

    def reduce_scatter(self, tensor):
        """tensor: (R, ...), which is padded to a multiple of W rows. Receives the mean of this rank's 1/W."""
        if self.size == 1:
            return Transfer(tensor)
        send = pad_rows(tensor.to(self.wire_dtype(tensor.dtype)), self.size)
        received = send.new_empty(len(send) // self.size, *send.shape[1:])
        return self.start(received, reduce_scatter_single, received, send, dist.ReduceOp.AVG, sent=send)

    def all_gather(self, tensor):
        """tensor: (W*c, ...) with this rank's c rows filled in. Receives the same tensor, with all rows."""
        rows = tensor.chunk(self.size)[self.rank]
        return self.start(tensor, all_gather_single, tensor, rows, sent=rows)

    def all_reduce(self, tensor, operation=dist.ReduceOp.AVG):
        """Receives the same tensor, averaged or reduced by another operation."""
        return self.start(tensor, dist.all_reduce, tensor, operation)

    def all_to_all(self, tensor, send_sizes, receive_sizes):
        """tensor: flat, send_sizes[r] elements for rank r. Receives receive_sizes[r] from each r, flat."""
        received = tensor.new_empty(sum(receive_sizes))
        arguments = received, tensor, receive_sizes, send_sizes
        return self.start(received, dist.all_to_all_single, *arguments, sent=tensor)

    def reduce(self, tensor, owner):
        """Receives the same tensor: averaged on its owner, undefined elsewhere."""
        return self.start(tensor, dist.reduce, tensor, op=dist.ReduceOp.AVG, group_dst=owner)

    def broadcast(self, tensor, owner):
        """Receives the same tensor, with the owner's values."""
        return self.start(tensor, dist.broadcast, tensor, group_src=owner)


def pad_rows(tensor, multiple):
    """`tensor`, contiguous, with rows appended up to a multiple of this number. The padding is never read."""
    missing = -len(tensor) % multiple
    if not missing:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_empty(missing, *tensor.shape[1:])])


# ------------------------------------------------------------------------------------------------------------
# Parameters and gradients, as the work items see them


def has_gradient(param):
    return param.requires_grad and param.grad is not None


def gradient_dtype(param):
    """The dtype of a parameter's gradient, even on a rank that has none."""
    return getattr(param, "grad_dtype", None) or param.dtype  # grad_dtype: in newer PyTorch


def gradient(param):
    """This rank's shard of p.grad, contiguous; zeros if there is no gradient, or only a stale one of a frozen
    parameter.
    """
    if not has_gradient(param):
        return torch.zeros_like(local(param), dtype=gradient_dtype(param))
    grad = param.grad
    if isinstance(grad, DTensor) and grad.placements != param.placements:
        # Tensor parallelism may leave partial sums
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad).contiguous()


def matrix_shape(param):
    """(m, n) of each matrix of a Muon parameter: 3-D is a batch of matrices, 4-D is (out, rest)."""
    return tuple(param.shape[1:]) if param.ndim == 3 else (len(param), param.shape[1:].numel())


def bank_key(param):
    """What the parameters of a bank have in common. A 3-D parameter has its own bank."""
    return matrix_shape(param), param.dtype, gradient_dtype(param), id(param) if param.ndim == 3 else None


def as_matrices(tensors):
    """Each tensor viewed as a matrix, or copied: a channels_last convolution has no such view."""
    return [tensor.flatten(1) for tensor in tensors]


def as_batch(matrices):
    """(k, m, n): a view of one matrix, or a copy of several. A tensor is returned as is."""
    if isinstance(matrices, torch.Tensor):
        return matrices
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)


def write(values, tensors):
    """Copy each value into its tensor, which may have another shape, but as many elements."""
    views = [value.view(tensor.shape) for value, tensor in zip(values, tensors, strict=True)]
    torch._foreach_copy_(tensors, views)


# ------------------------------------------------------------------------------------------------------------
# The rule for the direction of a Muon update


@dataclass(frozen=True)
class Rule:
    """How a Muon group computes the direction of the update of its (m, n) matrices.

    function(U, buffers, ok, hyper, **options) -> (X, gain), whose product is the direction. U: (k, m, n),
    what `muon_momentum` returns. buffers: {name: (k, *shape)}, the rule's state, updated in place. ok: (k, 1,
    1), 0 if a matrix and its state must not change. hyper: MuonHyper. X: (k, m, n). gain: 3-D, broadcasts to
    X.
    """

    function: Callable
    options: dict
    whole_shape: tuple  # (m, n) of whole matrices; under tensor parallelism U and X are shards of them
    buffers: dict  # {name: shape of one matrix's state}
    scale: object  # the factor on the update, or one per row, (m, 1)
    cost: int  # of Newton-Schulz on one matrix, to balance the owners

    def __call__(self, U, buffers, ok, hyper):
        return self.function(U, buffers, ok, hyper, **self.options)


def rule_of(group, m, n, ns_dtype):
    """The Rule of a group's (m, n) matrices."""
    if group["split"] is not None:
        from nanomuon import optim_fused  # an extension, imported only if needed

        return optim_fused.fused_rule(group, m, n, ns_dtype)
    scale, cost = update_scale(group["scale"], m, n), m * n * min(m, n)
    direction = group["direction"]
    if direction is not None:
        declares = direction
        if isinstance(direction, functools.partial) and not hasattr(direction, "buffers"):
            declares = direction.func
        buffers = declares.buffers(m, n) if hasattr(declares, "buffers") else {}
        if "momentum_buffer" in buffers:
            raise ValueError("a direction's own buffer cannot be called momentum_buffer")
        return Rule(call_direction, {"direction": direction}, (m, n), buffers, scale, cost)
    options = dict(coefficients=group["coefficients"], ns_steps=group["ns_steps"], ns_dtype=ns_dtype)
    buffers = {}
    if group["beta2"] is not None:
        buffers["second_momentum_buffer"] = (m, 1) if m >= n else (1, n)  # nanochat's name
    return Rule(normuon, options, (m, n), buffers, scale, cost)


def call_direction(U, buffers, ok, hyper, *, direction):
    """Call a user's direction. The dict of buffers is read-only: a tensor put into it would be lost."""
    match direction(U, types.MappingProxyType(buffers), ok, hyper):
        case (torch.Tensor(shape=U.shape) as X, torch.Tensor(ndim=3) as gain):
            return X, gain
    # Other shapes might broadcast in an unintended way
    raise ValueError(
        f"{option_name(direction)} must return (X, gain): X of the shape of U, here {tuple(U.shape)}, and a "
        "tensor of three dimensions that broadcasts to it"
    )


# ------------------------------------------------------------------------------------------------------------
# The work items

# Banks first, because they compute longest. The Pipeline last, so that its first transfer is in flight while
# the others compute. Pipeline and BankOfShards also communicate inside their `compute`
ITEM_ORDER = ("Bank", "BankOfShards", "Rows", "SmallParameters", "Pipeline")


class WorkItem:
    """Parameters of one group that are updated together. An item has `params`, `group`, `places` {parameter:
    {name of its state: Place}}, the `dtype` of its state, and these phases:

      collect(ok, hyper)             start sending the gradients (a Pipeline: U); returns a Transfer
      compute(received, ok, hyper)   update the state, and the parameters that this rank works on
      send()                         start sending these parameters; returns a Transfer
      deliver(received)              write the parameters that other ranks worked on

    ok: 1 or 0 for each of its params, on the device. hyper: its group's. Between phases an item holds only
    state; `MuonAdamW.step` holds the Transfers.
    """

    def send(self):
        return Transfer(None)

    def deliver(self, received):
        pass


class Rows(WorkItem):
    """A large AdamW parameter. Each rank updates the rows of its span, and has state for only those.

    world: the ranks that share the rows; a single process for a sharded DTensor, whose local rows each rank
    updates by itself.
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
                "exp_avg": place_of_rows(param, self.exp_avg, world),
                "exp_avg_sq": place_of_rows(param, self.exp_avg_sq, world),
            }
        }

    def collect(self, ok, hyper):
        return self.world.reduce_scatter(gradient(self.params[0]))

    def compute(self, grad, ok, hyper):
        """grad: this rank's rows of it, plus padding."""
        self.step += ok[0]
        rows, step = local(self.params[0])[self.span], self.step.to(self.dtype)
        adamw_update(rows, grad[: len(rows)], self.exp_avg, self.exp_avg_sq, step, ok[0], hyper)

    def send(self):
        return self.world.all_gather(pad_rows(local(self.params[0]), self.world.size))

    def deliver(self, rows):
        """rows: all rows of the parameter, plus padding."""
        param = local(self.params[0])
        if rows is not param:  # all_gather filled the parameter itself, unless `send` padded or copied it
            param.copy_(rows[: len(param)])


class SmallParameters(WorkItem):
    """Small AdamW parameters of one group as one flat vector. Every rank updates all of them; of sharded ones
    its own shards.

    world: the ranks to average over; a single process for sharded DTensors, whose gradients are final.
    """

    def __init__(self, params, group, world):
        self.params, self.group, self.world, self.dtype = params, group, world, state_dtype(params[0])
        shards, device = [local(param) for param in params], params[0].device
        self.sizes = [shard.numel() for shard in shards]
        self.steps = torch.zeros(len(shards), dtype=torch.float32, device=device)
        self.exp_avg = torch.zeros(sum(self.sizes), dtype=self.dtype, device=device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        sizes = torch.tensor(self.sizes, device="cpu")
        self.param_of_element = torch.repeat_interleave(sizes).to(device)
        exp_avgs, exp_avg_sqs = self.exp_avg.split(self.sizes), self.exp_avg_sq.split(self.sizes)
        self.places = {}
        for i, (param, shard) in enumerate(zip(params, shards, strict=True)):
            self.places[param] = {
                "step": Place(self.steps[i]),
                "exp_avg": place_like(param, exp_avgs[i].view_as(shard)),
                "exp_avg_sq": place_like(param, exp_avg_sqs[i].view_as(shard)),
            }

    def collect(self, ok, hyper):
        grads = torch.cat([gradient(param).flatten() for param in self.params])  # in the widest dtype
        return self.world.all_reduce(grads.to(self.world.wire_dtype(grads.dtype)))

    def compute(self, grads, ok, hyper):
        self.steps += ok
        step_of_element = self.steps[self.param_of_element].to(self.dtype)
        ok_of_element = ok[self.param_of_element].to(self.dtype)
        shards = [local(param) for param in self.params]
        params = torch.cat([shard.flatten() for shard in shards])
        adamw_update(params, grads, self.exp_avg, self.exp_avg_sq, step_of_element, ok_of_element, hyper)
        write(params.split(self.sizes), shards)


class Matrices:
    """Matrices of one Muon group with the same shape, dtype and gradient dtype: their parameters, state and
    rule; or those of one 3-D parameter. The subclasses `Bank` and `Chunk` (optim_fsdp.py) communicate them,
    and define `place(i, name, buffer)`, the Place of a state tensor of the i-th parameter.

    owners: the owner of each matrix, ascending. count: the number of matrices whose state this rank has.
    """

    def __init__(self, params, group, rule, owners, world, count):
        self.params, self.group, self.rule, self.owners, self.world = params, group, rule, owners, world
        first = sum(owner < world.rank for owner in owners)
        self.owned = slice(first, first + owners.count(world.rank))  # this rank's matrices
        self.shape = matrix_shape(local(params[0]))  # (m, n) of what this rank has: maybe a shard's
        self.dtype, self.device = state_dtype(params[0]), params[0].device
        self.cautious = group["weight_decay_form"] == "cautious"
        self.scale = torch.as_tensor(rule.scale, dtype=self.dtype, device=self.device)
        shapes = {} if group["momentum"] is None else {"momentum_buffer": self.shape}
        self.buffers = {}
        for name, shape in {**shapes, **rule.buffers}.items():
            self.buffers[name] = torch.zeros(count, *shape, dtype=self.dtype, device=self.device)
        self.places = {}
        for i, param in enumerate(params):
            self.places[param] = {name: self.place(i, name, each) for name, each in self.buffers.items()}

    def each_matrix(self, of):
        """`each_matrix(local)` or `each_matrix(gradient)`: one per matrix, so a 3-D parameter has several."""
        tensors = []
        for param in self.params:
            tensor = of(param)
            tensors += tensor.unbind() if tensor.ndim == 3 else [tensor]
        return tensors

    def batches(self):
        """Slices of the owned matrices, each of at most BATCH_BYTES or of one matrix."""
        count = self.owned.stop - self.owned.start
        batch_bytes = BATCH_BYTES.get(self.device.type, BATCH_BYTES["cuda"])
        most = max(1, batch_bytes // (4 * math.prod(self.rule.whole_shape)))
        return [slice(lo, min(lo + most, count)) for lo in range(0, count, most)]


class Bank(Matrices, WorkItem):
    """Matrices whose owners receive the mean gradients of whole matrices.

    All matrices are sent as one stack, in which each rank has ceil(K/W) slots; its matrices fill the first
    ones, and the others are never read. If that would more than double the bytes, as with 3 matrices on 8
    ranks, each matrix is instead reduced to its owner and broadcast from it.
    """

    def __init__(self, params, group, rule, owners, world):
        super().__init__(params, group, rule, owners, world, owners.count(world.rank))
        self.one_by_one = 2 * len(owners) < world.size  # reduce and broadcast, without padding
        self.slots = list(range(len(owners)))
        self.slot_count = len(owners)
        if not self.one_by_one:
            each = -(-len(owners) // world.size)
            # The owner's first slot, plus the matrix's position among the owner's matrices
            self.slots = [owner * each + i - owners.index(owner) for i, owner in enumerate(owners)]
            self.slot_count = each * world.size

    def place(self, i, name, buffer):
        """The Place of a state tensor of the i-th parameter. buffer: this state of all owned matrices."""
        param, world = self.params[i], self.world
        if param.ndim == 3:  # its matrices are divided among the ranks like rows
            return place_of_rows(param, buffer, world)
        shape = param.shape if name == "momentum_buffer" else buffer.shape[1:]
        tensor = None
        if self.owners[i] == world.rank:
            tensor = buffer[i - self.owned.start].view(shape)
        return Place(tensor, shape, world=world, owner=self.owners[i], like=buffer)

    def stack(self, matrices, slots, dtype):
        """(slot_count, m, n) with these matrices in these slots."""
        stack = torch.empty(self.slot_count, *self.shape, dtype=dtype, device=self.device)
        if matrices:
            torch._foreach_copy_([stack[slot] for slot in slots], matrices)
        return stack

    def collect(self, ok, hyper):
        """A Transfer of the mean gradients of the owned matrices: (k, m, n) plus padding, or a list in a
        single process.
        """
        grads = as_matrices(self.each_matrix(gradient))
        if self.world.size == 1:
            return Transfer(grads)
        stack = self.stack(grads, self.slots, self.world.wire_dtype(grads[0].dtype))
        if not self.one_by_one:
            return self.world.reduce_scatter(stack)
        transfers = [self.world.reduce(stack[i], owner) for i, owner in enumerate(self.owners)]
        return Transfer(stack[self.owned], transfers, stack)

    def compute(self, grads, ok, hyper):
        """Update the owned matrices, one batch at a time."""
        tensors = self.each_matrix(local)[self.owned]
        params = as_matrices(tensors)
        # One number per parameter: that of a 3-D parameter is repeated for its matrices
        ok = ok.expand(len(self.owners))[self.owned].view(-1, 1, 1).to(self.dtype)  # (k, 1, 1)
        for batch in self.batches():
            G, P, ok_batch = as_batch(grads[batch]), as_batch(params[batch]), ok[batch]
            buffers = {name: buffer[batch] for name, buffer in self.buffers.items()}
            momentum_buffer = buffers.pop("momentum_buffer", None)
            U = muon_momentum(G, momentum_buffer, ok_batch, hyper, nesterov=self.group["nesterov"])
            X, gain = self.rule(U, buffers, ok_batch, hyper)
            muon_update(P, X, gain, self.scale, ok_batch, hyper, cautious=self.cautious)
            # If P is a copy: as_batch copies several matrices, as_matrices one that is not contiguous
            if len(P) > 1 or not tensors[batch.start].is_contiguous():
                write(P.unbind(), tensors[batch])

    def send(self):
        """A Transfer of all updated matrices: a list, empty in a single process."""
        if self.world.size == 1:
            return Transfer([])
        params = as_matrices(self.each_matrix(local))
        stack = self.stack(params[self.owned], self.slots[self.owned], params[0].dtype)
        if self.one_by_one:
            transfers = [self.world.broadcast(stack[i], owner) for i, owner in enumerate(self.owners)]
        else:
            transfers = [self.world.all_gather(stack)]
        return Transfer([stack[slot] for slot in self.slots], transfers)

    def deliver(self, matrices):
        if matrices:
            write(matrices, self.each_matrix(local))


# ------------------------------------------------------------------------------------------------------------
# Who owns what


def assign_owners(count, cost, owned_cost):
    """The owner of each of `count` equal matrices, ascending: as evenly divided as whole matrices allow.

    cost: of one matrix. owned_cost: what each rank already owns, updated in place. The ranks with the least
    get the remainder. The result depends only on these arguments, so all ranks find the same owners.
    """
    even, left_over = divmod(count, len(owned_cost))
    ranks = list(range(len(owned_cost)))
    idlest = sorted(ranks, key=owned_cost.__getitem__)[:left_over]
    owners = sorted(ranks * even + idlest)  # a rank's matrices are consecutive; the idlest have one more
    for owner in owners:
        owned_cost[owner] += cost
    return owners


# ------------------------------------------------------------------------------------------------------------


class MuonAdamW(optim_state.SavedByName, torch.optim.Optimizer):
    """Muon and AdamW without communication: in one process, or on ranks whose gradients are already the same
    (DistributedDataParallel).

    param_groups: dicts with `kind` ("muon" | "adamw") and `params`; for muon also lr, momentum, ns_steps,
    beta2, weight_decay and any of optim_groups.MUON_OPTIONS; for adamw lr, betas, eps, weight_decay.
    `beta2=None`: no second moment. `momentum=None`: U is the gradient, for rules with their own momentum.
    `ns_steps=None`: as many as the coefficient set has. Saved state is keyed by `names`, a list parallel to
    params, or by the names in params, if these are (name, parameter) pairs; default group{i}.{j}. Other keys
    are yours to use. ValueError at construction for misspelled or missing keys, and at the first step for
    unsupported sharding.

    Rates, momenta, betas, eps and decays may change at any time, if they change identically on all ranks.
    Once the optimizer has planned (at the first step, or when state is loaded or requested by name),
    parameters, ns_steps and the options in MUON_OPTIONS may not change, nor may a momentum or beta2 become
    None or stop being None.

    ns_dtype: the dtype of Newton-Schulz. None: on GPUs bfloat16, or float16 in the Gram form; on CPUs
    float32. torch.bfloat16: as None on GPUs, bfloat16 on CPUs: about twice as fast as float32 if the CPU has
    instructions for bfloat16, several times slower otherwise. All other arithmetic is float32, or float64 for
    float64 parameters.

    compile: whether to compile the kernels: True, False, or "auto" (on GPUs only). The environment variable
    NANOMUON_COMPILE overrides it. world: the ranks that share the work (DistMuonAdamW).

    A parameter that has no gradient on any rank, or no longer requires one, is skipped: parameter, state and
    step count do not change. `p.grad` is never modified. If the norm of a gradient is not finite on some
    rank, the step changes nothing on any rank, and `skipped_steps`, a 0-D tensor, counts it.
    """

    @torch.inference_mode(False)  # as in plan()
    def __init__(self, param_groups, *, compile="auto", ns_dtype=None, world=None):
        check_choice("ns_dtype", ns_dtype, (None, torch.float32, torch.bfloat16))
        check_choice("compile", compile, (True, False, "auto"))
        self.compile, self.ns_dtype, self.world = compile, ns_dtype, world or World()
        self.reset_plan()
        self.skipped_steps = None  # tells add_param_group that the constructor is calling it
        self.world.raise_together(lambda: super(MuonAdamW, self).__init__(param_groups, {}))
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self.check_and_broadcast(self.param_groups)
        # OneCycleLR and CyclicLR cycle group["momentum"] if the defaults have one; without, they raise errors
        if all(group.get("momentum", 0) is not None for group in self.param_groups):
            self.defaults["momentum"] = 0.95

    @classmethod
    def for_model(cls, model, lr=3e-4, weight_decay=0.01, *, muon_lr=None, **settings):
        """An optimizer for all parameters that require gradients, with defaults for transformers of any
        width. If you unfreeze parameters later, pass them to `add_param_group`.

        Muon's updates are scaled to the rms of AdamW's (`match_rms_adamw`, Moonlight, arXiv 2502.16982), so
        that one rate serves both; muon_lr sets another rate for the matrices. Weight decay is decoupled, as
        in AdamW. `optim_groups.routing_table(model)` shows how each parameter is trained. settings: other
        keywords of the constructor.
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
        if self.skipped_steps is None:  # the constructor, which checks all groups together
            return super().add_param_group(check_group(group, self.param_groups))
        group = self.world.raise_together(lambda: check_group(group, self.param_groups))
        self.check_and_broadcast([group])
        super().add_param_group(group)
        if group.get("momentum", 0) is None:
            self.defaults.pop("momentum", None)  # see the constructor

    @torch.no_grad()
    def check_and_broadcast(self, groups):
        """ValueError if these groups differ between ranks. Replicated parameters get rank 0's values."""
        if self.world.process_group is None:
            return
        compare_ranks(groups, self.world.process_group)
        for _, param in named_parameters(groups):
            if not is_sharded(param):
                values = local(param)
                values.copy_(self.world.broadcast(values.contiguous(), 0).wait())

    # ---- the step

    @torch.no_grad()
    def step(self, closure=None, *, finite=True):
        """One update from the gradients in `p.grad`. Returns the closure's loss, if there is one.

        finite: whether the loss is finite, a bool or a 0-D tensor, which the host does not wait for. False on
        some rank skips the step on all ranks, as a gradient that is not finite does. MuonAdamW under
        DistributedDataParallel does not ask the other ranks: reduce `finite` over them first.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        if getattr(self, "grad_scale", None) is not None:  # GradScaler sets it
            raise ValueError("the gradients are still scaled: call scaler.unscale_(optimizer) first")
        self.plan()
        device = self.skipped_steps.device
        compiles = device.type == "cuda" if self.compile == "auto" else self.compile
        compile_kernels.set(compile_enabled(compiles))
        # Autocast would compute Newton-Schulz's products in its own dtype; "meta" has no autocast
        with torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False):
            ok = self.agree(finite)
            hyper = self.hyperparameters()
            in_flight = {}
            # Start sending all gradients before waiting for any
            for item in self.work_items:
                in_flight[item] = item.collect(ok[item], hyper[item])
            # Results are in flight while the next items compute
            for item in self.work_items:
                item.compute(in_flight.pop(item).wait(), ok[item], hyper[item])
                in_flight[item] = item.send()
            for item in self.work_items:
                item.deliver(in_flight.pop(item).wait())
        return loss

    def agree(self, finite):
        """{item: one number for each of its params, on the device}, the same on all ranks: 1 if this step
        changes the parameter, else 0.

        A step changes a parameter that has a gradient on some rank, but only if every gradient and every loss
        (`finite`) on every rank is finite. This comes before `collect` because FSDP2's pipeline updates
        momentum before it sends. With a GPU, the host does not wait for the answer.
        """
        params = [param for item in self.work_items for param in item.params]
        device = self.skipped_steps.device
        has_grad = torch.tensor([has_gradient(param) for param in params], dtype=torch.float32, device="cpu")
        has_grad = has_grad.to(device, non_blocking=True)
        grads = [local(param.grad) for param in params if has_gradient(param)]
        if any(grad.layout != torch.strided for grad in grads):
            raise ValueError("a gradient is sparse: make it dense, for example nn.Embedding(sparse=False)")
        bad = torch.zeros(1, dtype=torch.float32, device=device) + (finite == 0)  # `not finite` would wait
        if grads:
            bad += ~torch.stack(torch._foreach_norm(grads, dtype=self.dtype)).isfinite().all()
        # Whether something is bad on some rank, and which parameters have a gradient on some rank
        agreed = self.world.all_reduce(torch.cat([bad, has_grad]), dist.ReduceOp.MAX).wait()
        all_finite = agreed[0] == 0
        self.skipped_steps += ~all_finite
        ok = (agreed[1:] * all_finite).split([len(item.params) for item in self.work_items])
        return dict(zip(self.work_items, ok, strict=True))

    def hyperparameters(self):
        """{item: MuonHyper or AdamWHyper of its group}: views of one vector, copied to the device once."""
        hypers = [hyper_of(item.group) for item in self.work_items]
        values = [value for hyper in hypers for value in hyper]
        vector = torch.tensor(values, dtype=self.dtype, device="cpu")  # not on the default device
        # The host does not wait for such a small copy, even from pageable memory
        vector = vector.to(self.skipped_steps.device, non_blocking=True)
        parts = vector.split([len(hyper) for hyper in hypers])
        on_device = {}
        for item, hyper, part in zip(self.work_items, hypers, parts, strict=True):
            on_device[item] = type(hyper)(*part.to(item.dtype).unbind())
        return on_device

    # ---- the plan: work items, and where state lives

    def reset_plan(self):
        self.planned = []  # (id, fixed options, ids, shapes and dtypes of parameters) of each planned group
        self.dtype = torch.float32  # the widest dtype of the work items
        self.work_items = []  # in the order of their collectives, the same on all ranks
        self.places = {}  # parameter -> {name of its state: Place}
        self.owned_cost = {}  # World (all ranks, or FSDP2's) -> the cost of what each of its ranks owns

    @torch.inference_mode(False)  # state that is created in inference mode could not be updated
    @torch.no_grad()
    def plan(self, reads_state=True):
        """Divide the groups into work items, each group once, when the plan is first needed.

        Until then accelerate may move the model, and FSDP2 may replace parameters in the groups. Afterwards
        this only compares: ValueError if parameters or options differ from those that were planned, or if
        tensors in optimizer.state were replaced and the caller reads them.
        """
        now = []
        for group in self.param_groups:
            params = [(id(param), param.shape, param.dtype) for param in group["params"]]
            now.append((id(group), fixed_options(group), params))
        planned = len(self.planned)
        for i, described in enumerate(self.planned):
            if i >= len(now) or now[i] != described:
                raise ValueError(
                    f"param group {i} has other parameters or options than at the first step or when state "
                    "was loaded. Only lr, momentum, betas, beta2, eps and weight_decay may change, but "
                    "momentum and beta2 may not become None or stop being None (schedulers: "
                    "cycle_momentum=False). Otherwise build a new optimizer and load this one's state with "
                    'hyperparameters="keep"'
                )
        for group, described in zip(self.param_groups[planned:], now[planned:], strict=True):
            self.plan_group(group)
            self.planned.append(described)
        if reads_state:
            optim_state.check_places(self)

    def plan_group(self, group):
        """Plan the work items of one group. Owners depend only on this group and earlier ones, so a copy, or
        a resumed run that adds groups later, finds the same owners.
        """
        params = []
        for name, param in named_parameters([group]):
            if self.world.size == 1 and is_sharded(param):
                raise ValueError(f"{name} is a sharded DTensor: use DistMuonAdamW")
            if is_sharded(param) and local(param).device.type != param.device_mesh.device_type:
                raise ValueError(f"{name} is offloaded to the CPU: FSDP2's CPUOffloadPolicy is not supported")
            if param.numel():  # an empty parameter has nothing to train
                params.append(param)
        if not params:
            return
        self.skipped_steps = self.skipped_steps.to(params[0].device)
        items = self.plan_muon(group, params) if group["kind"] == "muon" else self.plan_adamw(group, params)
        self.work_items += items
        self.work_items.sort(key=lambda item: ITEM_ORDER.index(type(item).__name__))
        for item in items:
            self.dtype = torch.promote_types(self.dtype, item.dtype)
            for param, places in item.places.items():
                self.places[param] = places
                optim_state.take_over(self.state, param, places)

    def plan_adamw(self, group, params):
        items, small = [], {}
        for param in params:
            world = World() if is_sharded(param) else self.world  # each rank updates its own shard
            if param.numel() > SMALL:
                items.append(Rows(param, group, world))
            else:
                small.setdefault((world, state_dtype(param)), []).append(param)
        for (world, _), params_together in small.items():
            items.append(SmallParameters(params_together, group, world))
        return items

    def plan_muon(self, group, params):
        """A bank for each shape and dtype; owners are assigned to the largest matrices first."""
        banks, sharded = {}, []
        for param in params:
            if is_sharded(param):
                sharded.append(param)
            else:
                banks.setdefault(bank_key(param), []).append(param)
        items = []
        if sharded:
            from nanomuon import optim_fsdp  # an extension, imported only if needed

            items += optim_fsdp.plan_sharded(self, group, sharded)
        largest_first = sorted(banks.values(), key=lambda bank: -math.prod(matrix_shape(bank[0])))
        for bank in largest_first:
            rule = rule_of(group, *matrix_shape(bank[0]), self.ns_dtype)
            if bank[0].ndim == 3:  # it and its state are divided into blocks, like DTensor's Shard(0)
                count = len(bank[0])
                each = -(-count // self.world.size)
                owners = [i // each for i in range(count)]
            else:
                owned_cost = self.owned_cost.setdefault(self.world, [0] * self.world.size)
                owners = assign_owners(len(bank), rule.cost, owned_cost)
            items.append(Bank(bank, group, rule, owners, self.world))
        return items


class DistMuonAdamW(MuonAdamW):
    """MuonAdamW over the ranks of a process group, as described at the top of this file. All ranks must have
    the same groups, which the constructor checks.

    process_group: defaults to all ranks; without torch.distributed it is a world of one, which does what
    MuonAdamW does. The group must contain the ranks of all device meshes. The constructor and
    `add_param_group` are collective. comm_dtype: float32 or bfloat16, the dtype in which gradients are
    reduced and, under FSDP2, U and the directions are sent; by default the gradient's.
    Under DistributedDataParallel, which averages the gradients, use MuonAdamW.

    Replicated parameters start with rank 0's values (replicas of a sharded parameter, as in HSDP, must
    already be equal), and after every step they are bitwise the same on all ranks, as long as all ranks give
    a group the same hyperparameters. The update uses the mean of `p.grad` over ranks; `p.grad` itself does
    not change. Frozen parameters and buffers are in no group, so making them equal is up to you. DTensors
    sharded over a device mesh (FSDP2, tensor parallelism) are updated as shards, see optim_fsdp.py.
    """

    def __init__(self, param_groups, process_group=None, comm_dtype=None, *, compile="auto", ns_dtype=None):
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "torchrun started several processes: call torch.distributed.init_process_group first"
            )
        check_choice("comm_dtype", comm_dtype, (None, torch.float32, torch.bfloat16))
        world = World(process_group, comm_dtype) if process_group else World.default(comm_dtype)
        super().__init__(param_groups, compile=compile, ns_dtype=ns_dtype, world=world)

    @property
    def _step_supports_amp_scaling(self):
        """GradScaler asks for this. If true, it always calls `step`, in which all ranks skip together;
        otherwise it would skip the step of one rank alone.
        """
        return self.world.size > 1

    def __setstate__(self, state):
        super().__setstate__(state)
        if self.world.process_group is None:  # pickled in a single process, perhaps unpickled under torchrun
            self.world = World.default(self.world.comm_dtype)
