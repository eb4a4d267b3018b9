"""MuonAdamW for one process and DistMuonAdamW for many: Muon for matrices, AdamW for everything else.

    muon = dict(kind="muon", params=[...], lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0)
    adamw = dict(kind="adamw", params=[...], lr=3e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    optimizer = DistMuonAdamW([muon, adamw])  # under torchrun; in one process MuonAdamW([muon, adamw])

The parameters are divided into work items. Each has a generator `update`, read from top to bottom:

    collect   send the gradients to the ranks that work on them
    compute   wait for them, do the mathematics, send the result
    deliver   wait for the other ranks' results, write them into the parameters

`step` takes all items through the three phases, so that the transfers of one run during the mathematics of
another. In one process every transfer passes its input straight through; the mathematics is the same code.

In order: the kernels; a group's numbers on the device; the ranks and their collectives; the direction of a
Muon update; the work items (SmallParameters, Rows, Bank); who owns which matrix; the optimizers.
`optim_state.py` saves and loads state. Two extensions import this file, and its planner imports them when
it meets their parameters: `optim_fsdp.py` (FSDP2, with `optim_tp.py`) and `optim_fused.py` (split
matrices). The group's option `direction` takes a rule of your own for matrices; docs/optimizer.md, the page
to read next to this file, adds Lion.
"""

import functools
import itertools
import logging
import math
import os
import types
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from nanomuon import optim_state
from nanomuon.optim_groups import MUON_OPTIONS, build_param_groups, check_group, option_name
from nanomuon.optim_state import (
    Place,
    elements,
    is_cut,
    like_param,
    local,
    named_parameters,
    rows_of,
    state_dtype,
)
from nanomuon.orthogonalize import (
    orthogonalize,
    update_scale,
)
from nanomuon.runtime import compile_enabled

SMALL = 16_384  # elements; AdamW parameters up to this size travel together and every rank updates them
BATCH_BYTES = {"cpu": 2**22, "cuda": 2**29}  # Muon works on this much of a bank at a time
COMPILE_FROM = 1024  # elements; compiling a kernel for fewer does not pay

# Since torch 2.13 the collectives on one tensor are called *_single, and the old names warn.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# ------------------------------------------------------------------------------------------------------------
# Kernels. `numbers` is a tensor on the device with the hyperparameters of a group, in the order of
# `numbers_of`, so a new value recompiles nothing. Options (nesterov, coefficients) are Python values: each
# choice is compiled once. `ok` is 1, or 0 if the parameter must not change: it has no gradient, or some
# gradient is not finite. The gradient then counts as 0 and every rate is multiplied by 0; torch.where keeps
# the parameter, since 0 times infinity is NaN. Arithmetic is in the dtype of the state, except Newton-Schulz.


def adamw_update(param, grad, exp_avg, exp_avg_sq, step, ok, numbers):
    """AdamW (arXiv 1711.05101) in place on tensors of one shape.

    step, including this one, and ok are 0-D or have one value per element.
    """
    lr, lr_times_decay, grad_weight, square_weight, eps = numbers.unbind()
    grad = torch.where(ok > 0, grad, 0).to(exp_avg.dtype)
    exp_avg.lerp_(grad, grad_weight * ok)
    exp_avg_sq.lerp_(grad.square(), square_weight * ok)
    bias1 = -torch.expm1(step * torch.log1p(-grad_weight))  # 1 - beta^t, without the digits that powers lose
    bias2 = -torch.expm1(step * torch.log1p(-square_weight))
    update = exp_avg * (lr / bias1 * ok) / (exp_avg_sq.sqrt() * bias2.rsqrt() + eps)
    new = param.to(exp_avg.dtype) * (1 - lr_times_decay * ok) - update
    param.copy_(torch.where(ok > 0, new.to(param.dtype), param))


def muon_momentum(grad, momentum_buffer, ok, numbers, *, nesterov):
    """Update the momentum in place and return the matrices to orthogonalize, U. ok: (k, 1, 1), the rest
    (k, m, n).

    M <- lerp(M, G, 1 - mu) is 1 - mu times the M <- mu M + G of other projects: the same direction at
    constant mu.
    """
    momentum, grad_weight = numbers[2:4]
    grad = torch.where(ok > 0, grad, 0).to(momentum_buffer.dtype)
    momentum_buffer.lerp_(grad, grad_weight * ok)
    if nesterov:
        return grad.lerp(momentum_buffer, momentum)
    return momentum_buffer.clone()


def muon_direction(
    U,
    second_momentum_buffer,
    second_weight,
    coefficients,
    ns_steps,
    row_equilibrate,
    renormalize,
    ns_dtype=None,
    pieces=None,
):
    """Polar factor and second moment of a batch of matrices: NorMuon (arXiv 2510.05491), but with one
    value per line along the longer side, as in nanochat.

    U: (k, m, n). second_momentum_buffer: (k, m, 1) if m >= n, else (k, 1, n), updated in place; None for
    plain Muon. second_weight: (k, 1, 1), the weight of this step in the second moment, (1 - beta2) * ok.
    Returns X (k, m, n) in the dtype of the iteration and its gain, in the dtype of the state and shaped like
    the second moment or (k, 1, 1): their product is the direction of the update. pieces: a
    optim_tp.Pieces if U and X are this rank's pieces of matrices; sums then include all ranks.
    """
    m, n = U.shape[1:] if pieces is None else pieces.shape
    short = min(m, n)

    def total(values, *dims):
        partial = values.sum(dim=dims, keepdim=True)
        return partial if pieces is None else pieces.sum(partial, *dims)

    if row_equilibrate:  # MuonEq, arXiv 2603.28254: rows of equal norm
        row_norm = total(U.square(), 2).sqrt()  # (k, m, 1)
        U = U * (total(row_norm, 1) / m / row_norm.clamp(min=1e-7))
    X = orthogonalize(U, coefficients, ns_steps, ns_dtype=ns_dtype, pieces=pieces)
    gain = torch.ones_like(second_weight)  # (k, 1, 1)
    if renormalize:  # Muon+, arXiv 2602.21545: the norm of an exact polar factor
        norm = total(X.to(gain.dtype).square(), 1, 2).sqrt()
        gain = math.sqrt(short) / norm.clamp(min=1e-7)
    if second_momentum_buffer is None:
        return X, gain
    # One value per row of a tall matrix, or per column of a wide one. ||X||^2 and ||X s||^2 are sums over
    # these values, so X is read once.
    mean_over = 2 if m >= n else 1
    v = total(X.to(gain.dtype).square(), mean_over) / short * gain.square()
    if pieces is not None and pieces.dim != mean_over:
        v = pieces.gathered(v)
    second_momentum_buffer.lerp_(v, second_weight)
    s = second_momentum_buffer.clamp(min=1e-10).rsqrt()
    norm_before = (v.sum(dim=(1, 2), keepdim=True) * short).sqrt()  # (k, 1, 1) Frobenius norms
    norm_after = ((v * s.square()).sum(dim=(1, 2), keepdim=True) * short).sqrt()
    gain = gain * s * norm_before / norm_after.clamp(min=1e-10)
    return X, gain if pieces is None else pieces.mine(gain)


def muon_update(param, X, gain, ok, numbers, scale, *, cautious):
    """Weight decay and update in place. param, X: (k, m, n); gain and scale, tensors, broadcast to them, gain
    and X in any dtype.

    The update's rate is lr * scale. Cautious decay, the default, has the same rate, decoupled decay lr alone.
    ok: (k, 1, 1).
    """
    lr, weight_decay = numbers[:2]
    P = param.to(ok.dtype)
    X = X.to(ok.dtype) * gain
    rate = lr * scale * ok
    if cautious:  # decay only what the update also shrinks
        decay = torch.where(X * P >= 0, P, 0) * (rate * weight_decay)
    else:
        decay = P * (lr * weight_decay * ok)
    new = P - X * rate - decay
    param.copy_(torch.where(ok > 0, new.to(param.dtype), param))


def call_kernel(compiles, kernel, *tensors, **options):
    """Call a kernel, compiled if `compiles` and the tensors are large enough to gain from it."""
    first = tensors[0]
    if compiles and first.numel() >= COMPILE_FROM:
        kernel = compiled(kernel, first.shape, first.dtype, *options.items())
    return kernel(*tensors, **options)


@functools.cache
def compiled(kernel, *key):
    """A copy of the kernel for every key: Dynamo compiles a code object at most eight times."""
    copy = types.FunctionType(
        kernel.__code__.replace(), kernel.__globals__, kernel.__name__, kernel.__defaults__
    )
    logging.getLogger("nanomuon").info("compiling %s: this step takes a while", kernel.__name__)
    return torch.compile(copy, dynamic=False, fullgraph=True)


# ------------------------------------------------------------------------------------------------------------
# A group's numbers on the device


def numbers_of(group):
    """A param group's numbers for the kernels, in Python's float64: float32 loses digits of 1 - beta.

    muon: lr, weight decay, momentum, 1 - momentum, 1 - beta2. adamw: lr, lr times weight decay, 1 - beta1,
    1 - beta2, eps.
    """
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    if group["kind"] == "muon":
        momentum, beta2 = group["momentum"], group["beta2"] or 0  # None: no second moment, nothing reads it
        return [lr, weight_decay, momentum, 1 - momentum, 1 - beta2]
    beta1, beta2 = group["betas"]
    return [lr, lr * weight_decay, 1 - beta1, 1 - beta2, group["eps"]]


def numbers_on_device(items, device, dtype):
    """The numbers of each work item's group: views of one vector, which is copied to the device once."""
    of_items = [numbers_of(item.group) for item in items]
    vector = torch.tensor([number for numbers in of_items for number in numbers], dtype=dtype)
    # The host does not wait for a copy of so few bytes, even from pageable memory
    vector = vector.to(device, non_blocking=True)
    views = vector.split([len(numbers) for numbers in of_items])
    return [view.to(item.dtype) for view, item in zip(views, items, strict=True)]


# ------------------------------------------------------------------------------------------------------------
# The ranks that share the work, and the collectives between them


@dataclass
class Transfer:
    """Collectives in flight; `wait()` returns their result. Until then it keeps what they read and write."""

    received: object  # a tensor, or a list of tensors
    handles: list = ()  # of torch.distributed, or Transfers; none in a single process
    sent: object = None

    def wait(self):
        """The result, once: the transfer then drops its tensors, which a generator would keep alive."""
        for handle in self.handles:
            handle.wait()
        received = self.received
        self.received, self.handles, self.sent = None, (), None
        return received


class World:
    """The ranks of a process group; without one, a single process, which sends nothing.

    Its collectives start at once and return a Transfer. reduce_scatter, all_reduce and reduce_to average over
    the ranks; all_reduce takes other operations, too. comm_dtype: the dtype of gradients in transfers, None
    for their own.
    """

    def __init__(self, process_group=None, comm_dtype=None):
        self.process_group, self.comm_dtype = process_group, comm_dtype
        self.size, self.rank = 1, 0
        if process_group is not None:
            self.size, self.rank = dist.get_world_size(process_group), dist.get_rank(process_group)
            if self.rank < 0:
                raise ValueError(f"rank {dist.get_rank()} is not in the process group of its optimizer")
        self.owned_cost = [0] * self.size  # of a rank's matrices, without those of 3-D parameters

    @classmethod
    def default(cls, comm_dtype=None):
        """All ranks, or this process if torch.distributed is not used."""
        return cls(dist.group.WORLD if dist.is_initialized() else None, comm_dtype)

    def __deepcopy__(self, memo):
        return World(self.process_group, self.comm_dtype)

    def __reduce__(self):
        """Unpickled, it is the default process group."""
        return (World, ()) if self.process_group is None else (World.default, (self.comm_dtype,))

    def share(self, rows, rank):
        """(lo, hi) of a rank's ceil(rows/W) rows, fewer or none on the last ranks, as in DTensor's Shard."""
        each = -(-rows // self.size)
        return min(rows, each * rank), min(rows, each * (rank + 1))

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
        """tensor: (R, ...). Receives the mean over ranks of ceil(R/W) rows, this rank's share and padding."""
        if self.size == 1:
            return Transfer(tensor)
        send = self.padded(self.as_sent(tensor))
        received = send.new_empty(len(send) // self.size, *send.shape[1:])
        return self.start(received, reduce_scatter_single, received, send, dist.ReduceOp.AVG, sent=send)

    def all_gather(self, whole):
        """whole: (W*c, ...) with this rank's c rows in their place. Receives the same tensor, filled."""
        mine = whole.chunk(self.size)[self.rank]
        return self.start(whole, all_gather_single, whole, mine, sent=mine)

    def all_reduce(self, tensor, operation=dist.ReduceOp.AVG):
        """Receives the same tensor, with the mean over ranks, or the result of another operation."""
        return self.start(tensor, dist.all_reduce, tensor, operation)

    def reduce_to(self, owner, tensor):
        """Receives the same tensor: at its owner the mean over ranks, elsewhere undefined."""
        return self.start(tensor, dist.reduce, tensor, op=dist.ReduceOp.AVG, group_dst=owner)

    def broadcast_from(self, owner, tensor):
        """Receives the same tensor, with the owner's values."""
        return self.start(tensor, dist.broadcast, tensor, group_src=owner)


def has_gradient(param):
    return param.requires_grad and param.grad is not None


def gradient_dtype(param):
    """The dtype of a parameter's gradient, the same on ranks that have none."""
    return getattr(param, "grad_dtype", None) or param.dtype  # grad_dtype: in newer PyTorch


def gradient(param):
    """This rank's part of p.grad; zeros if there is none, or only an old one of a frozen parameter."""
    if not has_gradient(param):
        return torch.zeros_like(local(param), dtype=gradient_dtype(param))
    grad = param.grad
    if isinstance(grad, DTensor) and grad.placements != param.placements:
        # Tensor parallelism may leave partial sums
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)


# ------------------------------------------------------------------------------------------------------------
# The direction of a Muon update


class Direction:
    """From momentum to the direction of the update, for the (m, n) matrices of a Muon group.

    state: {name: shape} of a matrix's state besides its momentum. scale: the factor on the update, or one per
    row, (m, 1). cost: of Newton-Schulz, to balance owners. shape: of the matrices in the computation, for the
    size of a batch. Fused and tensor-parallel matrices have their own, with the same attributes.

    The group's option `direction` replaces the mathematics: a function like `__call__`, which may have an
    attribute state(m, n) -> {name: shape}.
    """

    kernel = staticmethod(muon_direction)

    def __init__(self, group, m, n, ns_dtype, run_kernel):
        self.run_kernel, self.function, self.shape = run_kernel, group["direction"], (m, n)
        keys = "coefficients", "ns_steps", "row_equilibrate", "renormalize"
        self.options = {"ns_dtype": ns_dtype, **{key: group[key] for key in keys}}
        self.state = {}
        if hasattr(self.function, "state"):
            self.state = self.function.state(m, n)
        elif self.function is None and group["beta2"] is not None:
            # nanochat's name for the second moment
            self.state = {"second_momentum_buffer": (m, 1) if m >= n else (1, n)}
        self.scale = update_scale(group["scale"], m, n)
        self.cost = m * n * min(m, n)

    def __call__(self, U, kept, ok, square_weight, pieces=None):
        """(X, gain), whose product is the direction.

        U: (k, m, n), momentum by Nesterov's rule. kept: the state, {name: (k, *shape)}, updated in place. ok:
        (k, 1, 1), 0 for a matrix that must not change, nor its state. square_weight: (k, 1, 1), 1 - beta2. X:
        (k, m, n); gain: three dimensions, broadcasts to it. pieces: see `muon_direction`.
        """
        if self.function is not None:
            X, gain = self.function(U, types.MappingProxyType(kept), ok, square_weight)
            if X.shape != U.shape:  # it might broadcast
                raise ValueError(
                    f"{option_name(self.function)} must return (X, gain) with X of the shape of U, "
                    f"{tuple(U.shape)}, not {tuple(X.shape)}"
                )
            return X, gain
        second, weight = kept.get("second_momentum_buffer"), square_weight * ok
        if pieces is not None:  # it communicates, so it is not compiled
            return self.kernel(U, second, weight, pieces=pieces, **self.options)
        return self.run_kernel(self.kernel, U, second, weight, **self.options)


def direction_of(group, m, n, ns_dtype, run_kernel):
    """The direction of a group's (m, n) matrices."""
    if group["split"] is not None:
        from nanomuon.optim_fused import FusedDirection  # an extension: imported when it is needed

        return FusedDirection(group, m, n, ns_dtype, run_kernel)
    return Direction(group, m, n, ns_dtype, run_kernel)


# ------------------------------------------------------------------------------------------------------------
# The work items. Each has `params`, `group`, `dtype`, `places` {parameter: {name of its state: Place}}, and
#
#   update(numbers)   a generator that yields twice: after its collect, to be sent `ok` (1 or 0 for each of
#                     its params, on the device), and after its compute. Across a yield it holds only what is
#                     in flight. (A Pipeline of optim_fsdp.py needs `ok` before it can collect: it
#                     starts its first chunk in its compute and drives the rest in its deliver.) numbers: of
#                     its group, on the device.
#
# With W ranks, parameters of R rows, banks of K matrices:
#
#                     state on a rank       collect              compute sends   buffers of a step
#   SmallParameters   all of it             all_reduce           nothing         gradients, parameters, flat
#   Rows              of ceil(R/W) rows     reduce_scatter       all_gather      rows of the gradient, padding
#   Bank              of ceil(K/W) of them  reduce_scatter       all_gather      stacks: gradients and results
#   Bank, 2K < W      of one, on K ranks    reduce to the owner  broadcast       the same


class SmallParameters:
    """Small AdamW parameters of one group as one flat vector: one all_reduce, updated on every rank.

    world: the ranks to average over; a single process for cut parameters (DTensors).
    """

    def __init__(self, params, group, world, run_kernel):
        self.params, self.group, self.world, self.run_kernel = params, group, world, run_kernel
        pieces = [local(param) for param in params]
        self.sizes = [piece.numel() for piece in pieces]
        self.dtype, device = state_dtype(params[0]), pieces[0].device
        total = sum(self.sizes)
        self.steps = torch.zeros(len(pieces), device=device)
        self.exp_avg = torch.zeros(total, dtype=self.dtype, device=device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.param_of_element = torch.repeat_interleave(torch.tensor(self.sizes)).to(device)
        self.places = {}
        moments = self.exp_avg.split(self.sizes), self.exp_avg_sq.split(self.sizes)
        for param, piece, step, exp_avg, exp_avg_sq in zip(params, pieces, self.steps, *moments, strict=True):
            self.places[param] = {
                "step": Place(step),
                "exp_avg": like_param(param, exp_avg.view_as(piece)),
                "exp_avg_sq": like_param(param, exp_avg_sq.view_as(piece)),
            }

    def __str__(self):
        return f"{len(self.params)} small parameters"

    def update(self, numbers):
        grads = torch.cat([gradient(param).flatten() for param in self.params])  # in the widest dtype
        grads = self.world.all_reduce(self.world.as_sent(grads))
        ok = yield
        self.compute(grads.wait(), ok, numbers)
        yield

    def compute(self, grads, ok, numbers):
        pieces = [local(param) for param in self.params]
        params = torch.cat([piece.flatten() for piece in pieces])
        self.steps += ok
        of_elements = torch.stack([self.steps, ok])[:, self.param_of_element].to(self.dtype)
        step, ok = of_elements.unbind()
        self.run_kernel(adamw_update, params, grads, self.exp_avg, self.exp_avg_sq, step, ok, numbers)
        new = params.split(self.sizes)
        torch._foreach_copy_(pieces, [part.view_as(piece) for part, piece in zip(new, pieces, strict=True)])


class Rows:
    """A large AdamW parameter by rows: reduce_scatter, update of this rank's rows, all_gather.

    A rank keeps the state of its rows only; in one process, or for a cut parameter, they are all local rows.
    """

    def __init__(self, param, group, world, run_kernel):
        self.params, self.group, self.world, self.run_kernel = [param], group, world, run_kernel
        self.dtype = state_dtype(param)
        self.lo, self.hi = world.share(len(local(param)), world.rank)
        rows = local(param)[self.lo : self.hi]
        self.step = torch.zeros((), device=rows.device)
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

    def update(self, numbers):
        param = local(self.params[0])
        grad = self.world.reduce_scatter(gradient(self.params[0]))
        ok = yield
        self.step += ok[0]
        rows, step = param[self.lo : self.hi], self.step.to(self.dtype)
        moments = self.exp_avg, self.exp_avg_sq
        self.run_kernel(adamw_update, rows, grad.wait()[: len(rows)], *moments, step, ok[0], numbers)
        new = self.world.all_gather(self.world.padded(param))
        yield
        new = new.wait()
        if new is not param:  # it was padded
            param.copy_(new[: len(param)])


def matrix_shape(param):
    """(m, n) of each matrix of a Muon parameter: 3-D is a batch of matrices, 4-D is (out, rest)."""
    return tuple(param.shape[1:]) if param.ndim == 3 else (len(param), param.shape[1:].numel())


def matrices(tensors):
    """Views (m, n) of all matrices of Muon parameters, or of tensors like them. RuntimeError for a parameter
    that has become channels_last: it has no such view, and a copy would be updated instead.
    """
    views = []
    for tensor in tensors:
        views += tensor.unbind() if tensor.ndim == 3 else [tensor.view(matrix_shape(tensor))]
    return views


def as_batch(held):
    """(k, m, n) of a list of matrices: a view of one, a copy of several. A tensor is returned as it is."""
    if isinstance(held, torch.Tensor):
        return held
    return held[0].unsqueeze(0) if len(held) == 1 else torch.stack(held)


def batches(count, shape, device):
    """Slices of `count` matrices, each within BATCH_BYTES."""
    most = max(1, BATCH_BYTES.get(device.type, BATCH_BYTES["cuda"]) // (4 * math.prod(shape)))
    return [slice(lo, min(lo + most, count)) for lo in range(0, count, most)]


class Bank:
    """Matrices of one Muon group with one shape, dtype and dtype of gradients. Every rank works on those it
    owns, a batch at a time. A 3-D parameter is its own bank: the ranks share its matrices like rows.

    owners: the rank of each matrix, ascending. On many ranks gradients and results travel as one stack, in
    which all ranks have equally many slots and fill their first ones: 4 matrices on 8 ranks take 8 slots, 4
    of them empty. If that would more than double the bytes, each matrix is reduced to its owner and broadcast
    from it instead.
    """

    momentum_at_owner = True  # optim_fsdp.Chunk keeps it with the shards

    def __init__(self, params, group, direction, owners, world, run_kernel):
        self.params, self.group, self.world, self.run_kernel = params, group, world, run_kernel
        self.direction, self.owners = direction, owners
        self.cautious = group["weight_decay_form"] == "cautious"
        self.shape = matrix_shape(local(params[0]))  # (m, n)

        first, k = sum(owner < world.rank for owner in owners), owners.count(world.rank)
        self.owned = slice(first, first + k)
        self.one_by_one = 2 * len(owners) < world.size
        self.slots, self.slot_count = list(range(len(owners))), len(owners)
        if not self.one_by_one:
            each = -(-len(owners) // world.size)
            self.slots = [owner * each + i - owners.index(owner) for i, owner in enumerate(owners)]
            self.slot_count = each * world.size
        self.dtype = state_dtype(params[0])
        like_state = dict(dtype=self.dtype, device=params[0].device)
        self.scale = torch.as_tensor(direction.scale, **like_state)
        zeros = functools.partial(torch.zeros, **like_state)
        self.momentum = zeros(k if self.momentum_at_owner else len(owners), *self.shape)
        self.kept = {name: zeros(k, *shape) for name, shape in direction.state.items()}
        self.batches = batches(k, direction.shape, params[0].device)
        self.places = {}
        for i, param in enumerate(params):
            buffers = dict(momentum_buffer=self.momentum, **self.kept)
            self.places[param] = {name: self.place(i, name, buffer) for name, buffer in buffers.items()}

    def __str__(self):
        return f"bank of {len(self.owners)} {'x'.join(map(str, self.shape))}"

    def place(self, i, name, buffer):
        """Where a state tensor of the i-th parameter lives: with the owner of its matrix."""
        param, world = self.params[i], self.world
        if param.ndim == 3:  # the ranks share its matrices like rows
            return rows_of(param, buffer, world)
        shape = param.shape if name == "momentum_buffer" else buffer.shape[1:]
        mine = None
        if self.owners[i] == world.rank:
            mine = buffer[i - self.owned.start].view(shape)
        return Place(mine, shape, world=world, owner=self.owners[i], like=buffer)

    def update(self, numbers):
        grads = self.collect()
        ok = yield
        self.compute(grads.wait(), ok, numbers)
        results = self.send_results()
        yield
        stack = results.wait()
        if stack is not None:
            torch._foreach_copy_(self.matrices(), [stack[slot] for slot in self.slots])

    def matrices(self):
        """Views of all matrices of the parameters, or of this rank's part of them."""
        return matrices([local(param) for param in self.params])

    def stack(self, tensors, slots, dtype):
        """(slots, m, n) with these matrices in these slots; nobody reads the others."""
        stack = self.momentum.new_empty(self.slot_count, *self.shape, dtype=dtype)
        if tensors:
            torch._foreach_copy_([stack[slot] for slot in slots], tensors)
        return stack

    def collect(self):
        """Receives the mean gradients of the owned matrices: (k, m, n) and padding; in one process a list."""
        grads = matrices([gradient(param).contiguous() for param in self.params])
        if self.world.size == 1:
            return Transfer(grads)
        stack = self.stack(grads, self.slots, self.world.comm_dtype or grads[0].dtype)
        if not self.one_by_one:
            return self.world.reduce_scatter(stack)
        transfers = [self.world.reduce_to(owner, stack[i]) for i, owner in enumerate(self.owners)]
        return Transfer(stack[self.owned], transfers, stack)

    def compute(self, grads, ok, numbers):
        """Update the owned matrices."""
        params = self.matrices()[self.owned]
        # A 3-D parameter is alone in its bank: one number for all of its matrices
        ok = ok.expand(len(self.owners))[self.owned].view(-1, 1, 1).to(self.dtype)  # (k, 1, 1)
        square_weight = numbers[-1].expand_as(ok)
        for batch in self.batches:
            G, M, P = as_batch(grads[batch]), self.momentum[batch], as_batch(params[batch])
            kept = {name: buffer[batch] for name, buffer in self.kept.items()}
            U = self.run_kernel(muon_momentum, G, M, ok[batch], numbers, nesterov=self.group["nesterov"])
            X, gain = self.direction(U, kept, ok[batch], square_weight[batch])
            self.run_kernel(muon_update, P, X, gain, ok[batch], numbers, self.scale, cautious=self.cautious)
            if len(P) > 1:  # P is a copy
                torch._foreach_copy_(params[batch], P.unbind())

    def send_results(self):
        """Receives the stack of all matrices, updated; in one process nothing."""
        if self.world.size == 1:
            return Transfer(None)
        params = self.matrices()
        stack = self.stack(params[self.owned], self.slots[self.owned], params[0].dtype)
        if not self.one_by_one:
            return self.world.all_gather(stack)
        transfers = [self.world.broadcast_from(owner, stack[i]) for i, owner in enumerate(self.owners)]
        return Transfer(stack, transfers)


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


# ------------------------------------------------------------------------------------------------------------


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW in one process. The update rules are the kernels above.

    param_groups: dicts with `kind` ("muon" | "adamw"), `params`, for muon lr, momentum, ns_steps, beta2,
    weight_decay and any of optim_groups.MUON_OPTIONS, for adamw lr, betas, eps, weight_decay. `beta2=None` is
    Muon without a second moment, `ns_steps=None` the coefficient set's own length. `names`, aligned with
    params, or (name, parameter) pairs in params give the names that state is saved by, default group{i}.{j}.
    Rates, momenta, betas, eps and decays may change at any time; parameters, other options and whether there
    is a beta2 may not after the first step. ValueError at construction for what is unknown or missing, at the
    first step for parameters cut in unsupported ways.

    ns_dtype: the dtype of Newton-Schulz. None: half precision on GPUs, float32 on CPUs; torch.bfloat16 (on
    GPUs float16 in the Gram form) is about twice as fast on CPUs that multiply it natively, and several times
    slower on others. All other arithmetic is float32, or float64 for float64 parameters.

    compile: whether to compile the kernels: True, False, or "auto", on GPUs only. The environment variable
    NANOMUON_COMPILE overrides it. world: the ranks that share the work (DistMuonAdamW).

    Parameters without a gradient, or that no longer require one, are skipped: parameter, state and step count
    do not change. `p.grad` is never written. If the norm of a gradient is not finite on any rank, the step
    changes nothing, and `skipped_steps`, a 0-D tensor, counts it.

    Memory of a step beyond parameters, gradients and state: the temporaries of one batch of a bank
    (BATCH_BYTES) or of one large AdamW parameter, and vectors of the small parameters and their gradients.
    """

    def __init__(self, param_groups, *, compile="auto", ns_dtype=None, world=None):
        if ns_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"ns_dtype is None, torch.float32 or torch.bfloat16, not {ns_dtype!r}")
        self.compile, self.ns_dtype, self.world = compile, ns_dtype, world or World()
        self.reset_plan()
        self.skipped_steps = None
        super().__init__(param_groups, {})
        self.skipped_steps = torch.zeros((), dtype=torch.int64)
        self.check_and_broadcast(self.param_groups)
        # Schedulers check the defaults for what they may cycle: OneCycleLR writes group["momentum"]
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
            self.check_and_broadcast(self.param_groups[-1:])

    @torch.no_grad()
    def check_and_broadcast(self, groups):
        """Give replicated parameters rank 0's values. ValueError if ranks differ in names, shapes, dtypes or
        options.
        """
        world = self.world
        if world.process_group is None:
            return
        mine = [f"{name} {tuple(p.shape)} {p.dtype}, {options(g)}" for name, p, g in named_parameters(groups)]
        of_ranks = [None] * world.size
        dist.all_gather_object(of_ranks, mine, group=world.process_group)
        for rank, theirs in enumerate(of_ranks):
            pairs = itertools.zip_longest(of_ranks[0], theirs, fillvalue="nothing")
            for i, (first, here) in enumerate(pairs):
                if first != here:
                    difference = f"number {i} is {first} on rank 0, {here} on rank {rank}"
                    raise ValueError(f"ranks have different parameters: {difference}")
        for _, param, _ in named_parameters(groups):
            if not is_cut(param):
                held = local(param)
                held.copy_(world.broadcast_from(0, held.contiguous()).wait())

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
        # Autocast would compute Newton-Schulz's products in its own dtype; "meta" has no autocast
        with torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False):
            flags = self.reduce_flags(finite)
            numbers = numbers_on_device(self.work_items, device, self.dtype)
            running = [(item, item.update(now)) for item, now in zip(self.work_items, numbers, strict=True)]
            for item, update in running:  # start every collect
                with record_function(f"collect {item}"):
                    next(update)
            bad, *flags_of_items = flags.wait().split([1] + [len(item.params) for item in self.work_items])
            all_finite = bad == 0  # on the device: the host does not wait for it
            self.skipped_steps += ~all_finite[0]
            for (item, update), ok in zip(running, flags_of_items, strict=True):
                with record_function(f"compute {item}"):
                    update.send(ok * all_finite)
            for item, update in running:
                with record_function(f"deliver {item}"):
                    next(update, None)
        return loss

    def reduce_flags(self, finite):
        """One small all_reduce of (1 + parameters,) float32, by the maximum over ranks.

        [0]: 1 if the norm of a gradient is not finite, or the `finite` of step() is false. [1:]: 1 for each
        parameter with a gradient, in the order of the work items.
        """
        params = [param for item in self.work_items for param in item.params]
        device = self.skipped_steps.device
        flags = torch.tensor([float(has_gradient(p)) for p in params]).to(device, non_blocking=True)
        grads = [local(param.grad) for param in params if has_gradient(param)]
        bad = torch.zeros(1, device=device) + (finite == 0)
        if grads:
            bad += ~torch.stack(torch._foreach_norm(grads, dtype=self.dtype)).isfinite().all()
        return self.world.all_reduce(torch.cat([bad, flags]), dist.ReduceOp.MAX)

    # ---- the plan: work items, and where state lives

    def reset_plan(self):
        self.planned = []  # (id, options, ids of parameters) of each planned group
        self.dtype = torch.float32  # the widest of the work items
        self.work_items = []  # in the order of their collectives, which all ranks share
        self.places = {}  # parameter -> {name of its state: Place}
        self.worlds = {}  # process group of a device mesh -> World, see optim_fsdp.plan_group

    @torch.no_grad()
    def plan(self):
        """Divide the groups into work items, each group once, when it is first needed.

        Before that accelerate may move the model, and FSDP2 replace its parameters in the groups. Afterwards
        this only compares: ValueError if parameters, options or state are not those that were planned. The
        order of the items, in which all collectives start, follows from the groups: Muon, then AdamW.
        """
        now = [(id(group), options(group), list(map(id, group["params"]))) for group in self.param_groups]
        planned = len(self.planned)
        if now[:planned] != self.planned:
            raise ValueError(
                "param groups have other parameters or options than at the first step; only lr, momentum, "
                "betas, beta2, eps and weight_decay may change: build a new optimizer and load this one's "
                'state with hyperparameters="keep"'
            )
        for group, described in zip(self.param_groups[planned:], now[planned:], strict=True):
            self.plan_group(group)
            self.planned.append(described)
        for name, param, _ in named_parameters(self.param_groups):
            held = self.state.get(param, {})
            for key, place in self.places.get(param, {}).items():
                if held.get(key) is not place.value:
                    raise ValueError(
                        f"{key} of {name} was replaced or removed in optimizer.state: write into the tensor"
                    )

    def plan_group(self, group):
        """Work items for one group. Owners depend only on this group and those before it, so a copy, or a
        resumed run to which groups were added later, finds the same ones.
        """
        params = []
        for name, param in zip(group["names"], group["params"], strict=True):
            if self.world.size == 1 and is_cut(param):
                raise ValueError(f"{name} is a sharded DTensor: use DistMuonAdamW")
            if elements(param):  # without elements there is nothing to train
                params.append(param)
        if not params:
            return
        device = params[0].device
        self.skipped_steps = self.skipped_steps.to(device)
        compiles = device.type == "cuda" if self.compile == "auto" else self.compile
        run_kernel = functools.partial(call_kernel, compile_enabled(compiles))
        plan_kind = self.plan_muon if group["kind"] == "muon" else self.plan_adamw
        items = plan_kind(group, params, run_kernel)
        self.work_items += items
        # Muon first: it has the most to compute while the transfers of the others run
        self.work_items.sort(key=lambda item: item.group["kind"] != "muon")
        for item in items:
            self.dtype = torch.promote_types(self.dtype, item.dtype)
            for param, places in item.places.items():
                self.places[param] = places
                optim_state.take_over(self.state, param, places)

    def plan_adamw(self, group, params, run_kernel):
        items, small = [], {}
        alone = World()  # each rank updates its piece of a cut parameter by itself
        for param in params:
            world = alone if is_cut(param) else self.world
            if elements(param) > SMALL:
                items.append(Rows(param, group, world, run_kernel))
            else:
                small.setdefault((world, state_dtype(param)), []).append(param)
        for (world, _), together in small.items():
            items.append(SmallParameters(together, group, world, run_kernel))
        return items

    def plan_muon(self, group, params, run_kernel):
        banks, cut = {}, []
        for param in params:
            if is_cut(param):
                cut.append(param)
            else:
                alone = id(param) if param.ndim == 3 else None  # a batch of matrices is its own bank
                alike = matrix_shape(param), param.dtype, gradient_dtype(param), alone
                banks.setdefault(alike, []).append(param)
        items = []
        if cut:
            from nanomuon import optim_fsdp  # an extension: imported when it is needed

            items += optim_fsdp.plan_group(self, group, cut, run_kernel)
        # The largest matrices are assigned first
        for alike in sorted(banks, key=lambda alike: -math.prod(alike[0])):
            together = banks[alike]
            direction = direction_of(group, *alike[0], self.ns_dtype, run_kernel)
            count = len(matrices(map(local, together)))
            if together[0].ndim == 3:  # even blocks, so that its state is cut like DTensor's Shard(0)
                each = -(-count // self.world.size)
                owners = [i // each for i in range(count)]
            else:
                owners = assign_owners(count, direction.cost, self.world.owned_cost)
            items.append(Bank(together, group, direction, owners, self.world, run_kernel))
        return items

    # ---- state. torch's own state_dict() works: {"state": {number: {key: tensor}}, "param_groups": [...]},
    # the state of this rank, without communication; tensors share memory with the optimizer's, pieces are
    # DTensors, and state that another rank owns is missing.

    named_state_dict = optim_state.named_state_dict
    full_state_dict = optim_state.full_state_dict
    load_state_dict = optim_state.load_state_dict

    def __getstate__(self):
        """For copy.deepcopy and pickle: without the plan, which the copy makes when it needs it."""
        kept = ("defaults", "param_groups", "state", "compile", "ns_dtype", "world", "skipped_steps")
        return {key: self.__dict__[key] for key in kept}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.reset_plan()


class DistMuonAdamW(MuonAdamW):
    """MuonAdamW over the ranks of a process group. All ranks must have the same groups, which the constructor
    checks.

    process_group: default the whole world; without torch.distributed a world of one. It must contain the
    ranks of all device meshes; the constructor and `add_param_group` are collective. comm_dtype: float32 or
    bfloat16, of the reduction, and of both transfers of sharded matrices; default the gradient's own. Use
    MuonAdamW under DistributedDataParallel, which has averaged the gradients already.

    Work and state of replicated parameters are split as in ZeRO-2: mean gradients exist only at their owners.
    `p.grad` itself stays whole. These parameters start with rank 0's values (copies of sharded ones must be
    equal already), and the update uses the mean of `p.grad` over ranks, which the collectives of the work
    items compute.

    With W ranks, each sends 2(W-1)/W times the parameter bytes per step, plus padding. Memory of a step
    beyond parameters, gradients and state: all gradients are in flight at once, which takes (1 + 1/W) times
    their padded bytes; a stack of gradients is freed before that of the results is allocated. AdamW rows that
    divide by W take only 1/W unless comm_dtype casts them: they are sent from `p.grad` and received in the
    parameter. Then one batch of a bank, with its temporaries. After every step all ranks hold bitwise the
    same parameters; a world of one does what MuonAdamW does.

    Parameters that are DTensors cut over a device mesh (FSDP2, tensor parallelism) are updated as pieces, see
    `optim_fsdp.py`.
    """

    def __init__(self, param_groups, process_group=None, comm_dtype=None, *, compile="auto", ns_dtype=None):
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "torchrun started several processes: call torch.distributed.init_process_group first"
            )
        world = World.default(comm_dtype) if process_group is None else World(process_group, comm_dtype)
        super().__init__(param_groups, compile=compile, ns_dtype=ns_dtype, world=world)


# ------------------------------------------------------------------------------------------------------------


def options(group):
    """The options of a group that must not differ between ranks, or change after planning."""
    chosen = {"kind": group["kind"], "second moment": group.get("beta2") is not None}
    for key, default in {"ns_steps": 5, **MUON_OPTIONS}.items():
        if group.get(key, default) != default:
            chosen[key] = option_name(group[key])
    return chosen
