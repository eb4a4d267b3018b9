"""MuonAdamW for one process and DistMuonAdamW for many: Muon for matrices, AdamW for everything else.

    groups = [dict(kind="muon", params=[...], lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0),
              dict(kind="adamw", params=[...], lr=3e-4, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)]
    optimizer = DistMuonAdamW(groups)  # under torchrun; in one process MuonAdamW(groups)

Every distributed step has the same shape for every piece of work: **collect** the mean gradient where it will be worked
on, **compute** the update there, **deliver** the result to where the parameter lives. While a collect or a delivery is
in flight the processor can do other work, so each piece is a generator with two yields:

    launch collect  -> yield ->  wait, compute, launch deliver  -> yield ->  wait, write back

How `step` advances the generators is the whole overlap policy: all collects are launched, then each piece in turn is
computed and its delivery launched, then all is written back. One process runs the same generators and waits for
nothing.

In order: the kernels (the mathematics), the pieces of work, the optimizer (plan, step, transports, state).
"""

import contextlib
import functools
import math
import os
import types
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from nanomuon.orthogonalize import newton_schulz_flops, orthogonalize, triples, update_scale
from nanomuon.param_groups import check_group, default_names
from nanomuon.runtime import compile_enabled

STATE = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer", "second_momentum_buffer"),
}
SMALL = 1024  # elements; AdamW parameters below this are all-reduced together, kernels below this are not compiled
BLOCK = 2**18  # elements; see `blocks`
BATCH_BYTES = {"cpu": 2**22, "cuda": 2**29}  # Muon computes on this much of a bank at a time: bounded temporaries

# ----------------------------------------------------------------------------------------------------------------------
# Kernels. Hyperparameters come ready to use in one tensor, so changing them recompiles nothing; they are prepared in
# float64, because 1 - 0.999 in float32 is wrong in the fifth digit. `ok` is 0-D, 0 where some gradient is not finite;
# it is multiplied into them, and every line is then a no-op. All arithmetic is in the dtype of the state.


def adamw_update(param, grad, exp_avg, exp_avg_sq, hyper, ok):
    """AdamW (arXiv 1711.05101) in place, on four tensors of one shape. hyper: (6,), see `adamw_hyper`."""
    weight1, weight2, step_size, decay, rescale, eps = hyper.unbind()
    grad = torch.where(ok > 0, grad, 0).to(exp_avg.dtype)
    exp_avg.lerp_(grad, weight1)
    exp_avg_sq.lerp_(grad.square(), weight2)
    update = exp_avg * step_size / (exp_avg_sq.sqrt() * rescale + eps)
    param.copy_(param.to(exp_avg.dtype) * (1 - decay) - update)


def adamw_hyper(group, step, ok):
    """(6,) 1-b1, 1-b2, lr/(1-b1^t), lr*wd, (1-b2^t)^-1/2, eps in float64. step: 0-D, t."""
    lr, beta1, beta2 = group["lr"], *group["betas"]
    bias = 1 - tensor([beta1, beta2], step) ** step.clamp(min=1)  # (2,)
    hyper = tensor([1 - beta1, 1 - beta2, lr, lr * group["weight_decay"]], step) * ok
    hyper[2] /= bias[0]
    return torch.cat([hyper, bias[1:].rsqrt(), tensor([group["eps"]], step)])


def muon_momentum(U, grad, momentum, hyper, ok, nesterov):
    """Momentum of one matrix in place, and what is to be orthogonalized into U. All (m, n); hyper: (5, 1, 1)."""
    grad = torch.where(ok > 0, grad, 0).to(momentum.dtype)
    momentum.lerp_(grad, hyper[0, 0, 0])
    U.copy_(grad.lerp(momentum, hyper[1, 0, 0]) if nesterov else momentum)


def muon_direction(U, second, hyper, coefficients, ns_steps, row_equilibrate, renormalize):
    """Polar factor and variance reduction (NorMuon, arXiv 2510.05491) of a batch of matrices.

    U: (k, m, n). second: (k, m, 1) if m >= n, else (k, 1, n), updated; None for plain Muon. hyper: (5, k, 1, 1).
    Returns X (k, m, n) in the dtype of the iteration and its gain, shaped like `second` or (k, 1, 1), in the dtype of
    the state: their product is the direction of the update.
    """
    if row_equilibrate:
        row_norm = torch.linalg.vector_norm(U, dim=2, keepdim=True)  # (k, m, 1)
        U = U * (row_norm.mean(dim=1, keepdim=True) / row_norm.clamp(min=1e-7))
    X = orthogonalize(U, coefficients, ns_steps)
    gain, short = torch.ones_like(hyper[2]), min(X.shape[1:])  # (k, 1, 1)
    if renormalize:
        norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True, dtype=gain.dtype)
        gain = math.sqrt(short) / norm.clamp(min=1e-7)
    if second is None:
        return X, gain
    # v has one value per element of the long side; ||X||^2 and ||X s||^2 are sums over it, so X is read once
    v = X.to(gain.dtype).square().mean(dim=2 if X.size(1) >= X.size(2) else 1, keepdim=True) * gain.square()
    second.lerp_(v, hyper[2])
    s = second.clamp(min=1e-10).rsqrt()
    before = (v.sum(dim=(1, 2), keepdim=True) * short).sqrt()  # (k, 1, 1) Frobenius norms
    after = ((v * s.square()).sum(dim=(1, 2), keepdim=True) * short).sqrt()
    return X, gain * s * before / after.clamp(min=1e-10)


def muon_update(param, X, gain, hyper, cautious):
    """Weight decay and update of one matrix, in place.

    param, X: (m, n). gain: (m, 1), (1, n) or (1, 1). hyper: (5, 1, 1).
    """
    step_size, decay = hyper[3, 0, 0], hyper[4, 0, 0]
    P, X = param.to(gain.dtype), X.to(gain.dtype) * gain
    # cautious: decay only what the update also shrinks
    param.copy_(P - X * step_size - (torch.where(X * P >= 0, P, 0) if cautious else P) * decay)


def muon_hyper(group, m, n):
    """1-mu, mu, 1-beta2, lr', weight decay per element, for a matrix whose parameter is (m, n); lr' = lr * scale.

    M <- lerp(M, G, 1-mu) is 1-mu times the M <- mu*M + G of other projects: the same direction at constant mu.
    """
    lr, mu, scaled = group["lr"], group["momentum"], group["lr"] * update_scale(group["scale"], m, n)
    decay = (scaled if group["weight_decay_form"] == "cautious" else lr) * group["weight_decay"]
    return [1 - mu, mu, 1 - (group["beta2"] or 0), scaled, decay]


@functools.cache
def compiled(kernel, *signature):
    """One compilation per signature. Dynamo allows a code object eight of them, so each gets its own copy."""
    copy = types.FunctionType(kernel.__code__.replace(), kernel.__globals__, kernel.__name__)
    return torch.compile(copy, dynamic=False, fullgraph=True)


def run(kernel, *tensors, **options):
    """Call a kernel: compiled, unless NANOMUON_COMPILE=0 or there is too little work for it to pay."""
    if tensors[0].numel() < SMALL or not compile_enabled():
        return kernel(*tensors, **options)
    signature = [t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    return compiled(kernel, *signature, *options.items())(*tensors, **options)


# ----------------------------------------------------------------------------------------------------------------------
# Pieces of work


@dataclass
class Rows:
    """Rows lo to hi of a parameter that is updated element by element: all of them, or this rank's slice."""

    param: torch.Tensor
    group: dict
    lo: int
    hi: int
    split: bool  # over ranks

    def of(self, tensor):
        return tensor[self.lo : self.hi] if self.split else tensor


@dataclass
class Matrix:
    """One matrix of a Muon parameter: a 2-D one, (out, rest) of a convolution, or the index-th of a 3-D one."""

    param: torch.Tensor
    group: dict
    index: int | None
    transposed: bool  # against the shape of its bank
    slot: int = 0  # row in the stacked bank
    owner: int = 0  # rank

    def of(self, tensor):
        tensor = tensor.flatten(1) if self.index is None else tensor[self.index]
        return tensor.mT if self.transposed else tensor  # (m, n)

    def hyper(self):
        m, n = self.of(self.param).shape
        return muon_hyper(self.group, *((n, m) if self.transposed else (m, n)))


@dataclass
class Bank:
    """Matrices of one shape or its transpose, with the same static options: one collective, one batch."""

    shape: tuple  # (m, n)
    options: dict  # of muon_direction
    nesterov: bool
    cautious: bool
    matrices: list = field(default_factory=list)
    slots: int = 0  # rows of the stacked bank: W*c, or K where every matrix travels alone
    owned: list = ()  # the k matrices of this rank, in consecutive slots
    alone: bool = False  # fills less than half of the world: stacking would more than double its bytes
    momentum: torch.Tensor = None  # (k, m, n)
    second: torch.Tensor = None  # (k, m, 1) or (k, 1, n)

    @property
    def flops(self):
        steps = triples(self.options["coefficients"], self.options["ns_steps"])
        return newton_schulz_flops(*self.shape, len(steps))

    def batches(self):
        """Equal runs of the owned matrices, each within BATCH_BYTES, as (lo, hi): one shape to compile."""
        k, most = len(self.owned), BATCH_BYTES[self.momentum.device.type] // (4 * math.prod(self.shape))
        size = next((size for size in range(min(k, most), 0, -1) if k % size == 0), 1)
        return [(lo, lo + size) for lo in range(0, k, size)]


@dataclass
class World:
    """The ranks that share the work. Transfers start here; what they return waits, and keeps their tensors alive."""

    group: dist.ProcessGroup = None
    size: int = 1
    rank: int = 0
    comm_dtype: torch.dtype = None

    def share(self, rows):
        """(lo, hi) of this rank's ceil(rows/W) rows, the last ones short or empty: DTensor's Shard(0)."""
        each = -(-rows // self.size)
        return min(rows, each * self.rank), min(rows, each * (self.rank + 1))

    def padded(self, tensor):
        """(W*c, ...) with `tensor` at the top, itself if it is as long; nobody reads the rest."""
        rows = -(-len(tensor) // self.size) * self.size
        rest = tensor.new_empty(rows - len(tensor), *tensor.shape[1:])
        return torch.cat([tensor, rest]) if len(rest) else tensor.contiguous()

    def reduce_scatter(self, send):
        """send: (W*c, ...). Waiting gives (c, ...), the mean over ranks of this rank's part, and lets go of `send`."""
        received = send.new_empty(len(send) // self.size, *send.shape[1:])
        work = reduce_scatter_single(received, send, dist.ReduceOp.AVG, group=self.group, async_op=True)

        def wait():
            nonlocal send
            work.wait()
            send = None
            return received

        return wait

    def all_gather(self, whole):
        """whole: (W*c, ...) with this rank's c rows in place. Waiting fills and gives all of it."""
        work = all_gather_single(whole, whole.chunk(self.size)[self.rank], group=self.group, async_op=True)
        return lambda: (work.wait(), whole)[1]


# Since torch 2.13 the collectives on one tensor are called *_single and the old names warn.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gradient(param):
    """p.grad, zero where there is none."""
    return torch.zeros_like(param) if param.grad is None else param.grad


def blocks(tensors):
    """The tensors cut into rows that stay in the cache, where kernels run eagerly and pass over them many times."""
    first = tensors[0]
    if compile_enabled() or first.numel() <= BLOCK or first.device.type != "cpu":
        return [tensors]
    rows = max(1, BLOCK * len(first) // first.numel())
    return zip(*(each.split(rows) for each in tensors), strict=True)


# ----------------------------------------------------------------------------------------------------------------------


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW in one process. The update rules are the kernels above.

    param_groups: dicts with `kind` ("muon" | "adamw"), `params` and every key of REQUIRED; for Muon any of
    MUON_OPTIONS. `beta2=None` is Muon without variance reduction, `ns_steps=None` the coefficient set's own length.
    `names`, aligned with params, name the state; without them names are group{i}.{j}. lr, momentum, betas, beta2, eps
    and weight_decay are read from the groups at every step. ValueError at construction for anything unknown, missing
    or impossible.

    A gradient of None counts as zero. `p.grad` is not changed. If any gradient is not finite the step is not applied:
    parameters and state stay as they were, and `skipped_steps`, a 0-D tensor, counts it.

    Memory of a step beyond parameters, gradients and state: one batch of a bank (BATCH_BYTES) and its temporaries.
    """

    def __init__(self, param_groups, world=None):
        self.world = world or World()
        self._units = []  # the pieces of work, in the order of their collectives: a Bank, or a list of Rows
        self._running = []  # generators of units whose collect is launched
        self._load = [0] * self.world.size  # Newton-Schulz FLOPs per rank
        self._home = {}  # parameter -> "rows" if ranks hold slices of its state, or the rank that holds all of it
        super().__init__(param_groups, {})
        device = next((p.device for group in self.param_groups for p in group["params"]), None)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._plan(self.param_groups)

    def add_param_group(self, group):
        super().add_param_group(check_group(group, self.param_groups))
        if hasattr(self, "skipped_steps"):  # not while the constructor adds the first ones: those share banks
            self._plan(self.param_groups[-1:])

    # ---- the plan: what is worked on together, and where

    @torch.no_grad()
    def _plan(self, groups):
        """Cut the parameters of these groups into pieces of work and create their state."""
        units, pairs = {}, [(param, group) for group in groups for param in group["params"]]
        for param, group in pairs:
            if self.world.size > 1:  # a different seed per rank must not train different models
                whole = param.contiguous()
                dist.broadcast(whole, group=self.world.group, group_src=0)
                param.copy_(whole)
            if group["kind"] != "muon":
                split = self.world.size > 1 and param.numel() >= SMALL
                piece = Rows(param, group, *(self.world.share(len(param)) if split else (0, 0)), split)
                units.setdefault(param if split else "small", []).append(piece)
                if split:
                    self._home[param] = "rows"
                self.state[param]["step"] = torch.zeros((), device=param.device)
                zeros = torch.zeros(piece.of(param).shape, dtype=state_dtype(param), device=param.device)
                self.state[param].update({key: zeros.clone() for key in STATE[group["kind"]]})
            elif param.numel():
                self._into_bank(units, param, group)
        banks = [unit for unit in units.values() if isinstance(unit, Bank)]
        for bank in sorted(banks, key=lambda bank: -bank.flops):
            self._place(bank)
        self._units += reversed(units.values())  # groups in the order of the model: its last gradients come first

    def _into_bank(self, units, param, group):
        """A bank may mix lr, momentum, beta2, weight decay and scale, but not what changes the computation."""
        keys = ("coefficients", "ns_steps", "row_equilibrate", "renormalize")
        options = {key: group[key] for key in keys}
        if not isinstance(options["coefficients"], str):
            options["coefficients"] = tuple(map(tuple, options["coefficients"]))
        batch = param.ndim == 3  # a bank by itself, cut over ranks like Shard(0)
        shape = tuple(param.shape[1:]) if batch else (len(param), param[0].numel())
        # Rows must stay rows for MuonEq; otherwise a matrix and a transposed one have transposed polar factors.
        either_way = shape if batch or group["row_equilibrate"] else tuple(sorted(shape))
        forms = group["nesterov"], group["weight_decay_form"] == "cautious"
        key = (either_way, batch and id(param), *options.values(), *forms, group["beta2"] is None)
        bank = units.setdefault((*key, param.dtype, param.device), Bank(shape, options, *forms))
        for index in range(len(param)) if batch else [None]:
            bank.matrices.append(Matrix(param, group, index, transposed=shape != bank.shape))

    def _place(self, bank):
        """Owners and slots of the matrices, then momentum and second moment of those owned here.

        Owners are as even as whole matrices allow; what is left over goes to the ranks with the least work so far.
        """
        ranks, K, first = range(self.world.size), len(bank.matrices), bank.matrices[0]
        each = -(-K // self.world.size)
        if first.index is None:
            even, left = divmod(K, self.world.size)
            idlest = sorted(ranks, key=lambda rank: self._load[rank])[:left]
            owners = [rank for rank in ranks for _ in range(even + (rank in idlest))]
        else:
            owners = [i // each for i in range(K)]
        bank.alone = 2 * K < self.world.size
        bank.slots = K if bank.alone else each * self.world.size
        for i, (matrix, owner) in enumerate(zip(bank.matrices, owners, strict=True)):
            matrix.owner, matrix.slot = owner, i if bank.alone else owner * each + i - owners.index(owner)
            self._load[owner] += bank.flops
            if self.world.size > 1:
                self._home[matrix.param] = owner if matrix.index is None else "rows"
        bank.owned = [matrix for matrix in bank.matrices if matrix.owner == self.world.rank]

        k, (m, n) = len(bank.owned), bank.shape
        zeros = functools.partial(torch.zeros, dtype=state_dtype(first.param), device=first.param.device)
        bank.momentum = zeros(k, m, n)
        if first.group["beta2"] is not None:
            bank.second = zeros(k, m, 1) if m >= n else zeros(k, 1, n)
        for key, buffer in zip(STATE["muon"], (bank.momentum, bank.second), strict=True):
            if buffer is not None and first.index is not None:
                self.state[first.param][key] = buffer
            elif buffer is not None:  # the state of a parameter is a view of its bank's, in the parameter's orientation
                for matrix, row in zip(bank.owned, buffer, strict=True):
                    row = row.mT if matrix.transposed else row
                    self.state[matrix.param][key] = row.view(matrix.param.shape) if buffer is bank.momentum else row

    # ---- the step

    @torch.no_grad()
    def step(self, closure=None):
        """One update from the gradients in `p.grad`. Returns the closure's loss, if there is one."""
        with torch.enable_grad():
            loss = closure() if closure else None
        if self.world.size == 1:  # one piece after the other: nothing to overlap, and the least memory
            self._ok = self._agree()
            for unit in self._units:
                for _ in self._advance(unit):
                    pass
        else:
            while len(self._running) < len(self._units):
                self._launch()
            running, self._running = self._running, []
            self._ok = self._agree()
            for piece in running:  # compute, launch delivery; later collects and earlier deliveries are under way
                next(piece)
            for piece in running:  # write back
                next(piece, None)
        self.skipped_steps += self._ok == 0
        return loss

    @contextlib.contextmanager
    def overlap_backward(self):
        """Around the last micro-batch's backward: launches each piece's collect as soon as its gradients are there.

        Always in the order of the pieces, which all ranks share, whatever order autograd takes; step() launches the
        rest, and must follow before any gradient changes again. Does nothing in one process.
        """
        if self._running:
            raise RuntimeError("overlap_backward: the collects of an earlier backward are in flight; call step() first")
        missing = [{piece.param for piece in getattr(unit, "matrices", unit)} for unit in self._units]
        home = {param: waiting for waiting in missing for param in waiting}

        @torch.no_grad()
        def arrived(param):
            home[param].discard(param)
            while len(self._running) < len(self._units) and not missing[len(self._running)]:
                self._launch()

        trained = [param for param in home if param.requires_grad and self.world.size > 1]
        hooks = [param.register_post_accumulate_grad_hook(arrived) for param in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _advance(self, unit):
        return self._muon(unit) if isinstance(unit, Bank) else self._elementwise(unit)

    def _launch(self):
        self._running.append(self._advance(self._units[len(self._running)]))
        next(self._running[-1])

    def _agree(self):
        """1 if every gradient on every rank is finite, else 0; a 0-D float64 tensor that is not read here."""
        # A sum is finite unless an element is not, or the sum overflows, as the squares in the update would before it.
        grads = [param.grad for _, param, _ in self._named() if param.grad is not None]
        finite = [grad.sum(dtype=state_dtype(grad)).isfinite() for grad in grads]
        finite.append(torch.ones_like(self.skipped_steps, dtype=torch.bool))
        bad = 1 - torch.stack(finite).all().float()
        if self.world.size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=self.world.group)
        return 1 - bad.double()

    def _elementwise(self, pieces):
        """pieces: the slice of one large parameter, or all parameters that every rank updates whole."""
        take = self._collect_rows(pieces)
        yield
        for piece in pieces:
            group, state = piece.group, self.state[piece.param]
            state["step"] += self._ok
            tensors = [piece.of(piece.param), take(piece), *(state[key] for key in STATE[group["kind"]])]
            if group["kind"] == "adamw":
                hyper = adamw_hyper(group, state["step"], self._ok).to(tensors[2].dtype)
                for block in blocks(tensors):
                    run(adamw_update, *block, hyper, self._ok)
        del take, tensors
        finish = self._deliver_rows(pieces)
        yield
        finish()

    def _collect_rows(self, pieces):
        """all_reduce of all small gradients together, or reduce_scatter of the rows of a large one."""
        if self.world.size == 1:
            return lambda piece: gradient(piece.param)
        if pieces[0].split:
            grad = gradient(pieces[0].param)
            grad = grad.to(self.world.comm_dtype or grad.dtype)
            wait = self.world.reduce_scatter(self.world.padded(grad))
            return lambda piece: wait()[: piece.hi - piece.lo]
        flat = torch.cat([gradient(piece.param).flatten() for piece in pieces])  # promotes different dtypes
        flat = flat.to(self.world.comm_dtype or flat.dtype)
        work = dist.all_reduce(flat, dist.ReduceOp.AVG, group=self.world.group, async_op=True)
        parts = flat.split([piece.param.numel() for piece in pieces])
        views = {piece.param: part.view_as(piece.param) for piece, part in zip(pieces, parts, strict=True)}
        return lambda piece: (work.wait(), views[piece.param])[1]

    def _deliver_rows(self, pieces):
        """all_gather of the rows of a large parameter."""
        if not pieces[0].split:
            return lambda: None
        param = pieces[0].param
        whole = self.world.padded(param)
        wait = self.world.all_gather(whole)
        return wait if whole is param else lambda: param.copy_(wait()[: len(param)])

    def _muon(self, bank):
        """Muon on the matrices of a bank that this rank owns, a batch at a time."""
        take = self._collect_bank(bank)
        yield
        grads = take()
        for lo, hi in bank.batches():
            owned = bank.owned[lo:hi]
            hyper = tensor([matrix.hyper() for matrix in owned], bank.momentum) * self._ok
            hyper = hyper.to(bank.momentum.dtype).T.contiguous()[..., None, None]  # (5, k, 1, 1)
            U = torch.empty_like(bank.momentum[lo:hi])  # (k, m, n)
            for i, grad in enumerate(grads(lo, hi)):
                run(muon_momentum, U[i], grad, bank.momentum[lo + i], hyper[:, i], self._ok, nesterov=bank.nesterov)
            second = None if bank.second is None else bank.second[lo:hi]
            X, gain = run(muon_direction, U, second, hyper, **bank.options)
            for i, matrix in enumerate(owned):
                run(muon_update, matrix.of(matrix.param), X[i], gain[i], hyper[:, i], cautious=bank.cautious)
        del take, grads
        finish = self._deliver_bank(bank)
        yield
        finish()

    def _collect_bank(self, bank):
        """reduce_scatter of the stacked bank by whole matrices, or reduce of each matrix to its owner."""
        if self.world.size == 1:
            return lambda: lambda lo, hi: [matrix.of(gradient(matrix.param)) for matrix in bank.owned[lo:hi]]
        send = self._stack(bank, bank.matrices, gradient, self.world.comm_dtype)  # (slots, m, n)
        if not bank.alone:
            wait = self.world.reduce_scatter(send)
            return lambda: lambda lo, hi: wait()[lo:hi]
        average = functools.partial(dist.reduce, op=dist.ReduceOp.AVG, group=self.world.group, async_op=True)
        works = [average(send[matrix.slot], group_dst=matrix.owner) for matrix in bank.matrices]

        def wait():
            for work in works:
                work.wait()
            return lambda lo, hi: [send[matrix.slot] for matrix in bank.owned[lo:hi]]

        return wait

    def _deliver_bank(self, bank):
        """all_gather of the stacked bank, or broadcast of each matrix from its owner."""
        if self.world.size == 1:
            return lambda: None
        whole = self._stack(bank, bank.owned, lambda param: param)  # (slots, m, n)
        if bank.alone:
            send = functools.partial(dist.broadcast, group=self.world.group, async_op=True)
            works = [send(whole[matrix.slot], group_src=matrix.owner).wait for matrix in bank.matrices]
        else:
            works = [self.world.all_gather(whole)]

        def finish():
            for wait in works:
                wait()
            for matrix in bank.matrices:
                if matrix.owner != self.world.rank:
                    matrix.of(matrix.param).copy_(whole[matrix.slot])

        return finish

    def _stack(self, bank, matrices, value, dtype=None):
        """(slots, m, n) with value(param) of these matrices in their slots; the others are whatever was there."""
        like = bank.matrices[0].param
        stacked = torch.empty(bank.slots, *bank.shape, dtype=dtype or like.dtype, device=like.device)
        for matrix in matrices:
            stacked[matrix.slot] = matrix.of(value(matrix.param))
        return stacked

    # ---- state, by name

    def _named(self):
        for group in self.param_groups:
            for name, param in zip(group["names"], group["params"], strict=True):
                yield name, param, group

    def state_dict(self):
        """What this rank holds, without communication: {"state": {name: {key: tensor}}, "param_groups": [...]}.

        Tensors share memory with the optimizer's. Row slices are DTensors; a matrix's state is with its owner only.
        """
        state = {}
        for name, param, _ in self._named():
            if entry := self.state.get(param):
                split = self._home.get(param) == "rows"
                state[name] = {k: self._as_dtensor(param, v) if split and v.ndim else v for k, v in entry.items()}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    def full_state_dict(self):
        """The same with the whole of every tensor on every rank, as copies. Collective."""
        state = {}
        for name, param, group in self._named():
            if shapes := state_shapes(param, group):
                state[name] = {key: self._whole(param, key, shape) for key, shape in shapes.items()}
        return {"state": state, "param_groups": self.state_dict()["param_groups"]}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Restore state, whole or local, from any world size, group order or grouping.

        Hyperparameters stay as constructed and state keeps its dtype. ValueError, before anything is changed, for a
        name or key that is missing, a shape that differs, or parameters without names in other groups than the saved.
        """
        ours, theirs = ([g["names"] for g in groups] for groups in (self.param_groups, state_dict["param_groups"]))
        if ours != theirs and any(names == default_names(i, len(names)) for i, names in enumerate(ours) if names):
            raise ValueError("parameters without names load only into the same groups: give every group names=[...]")
        copies = []
        for name, param, group in self._named():
            for key, mine in self.state.get(param, {}).items():
                saved, shape = state_dict["state"].get(name, {}).get(key), state_shapes(param, group)[key]
                if saved is None:
                    raise ValueError(f"the loaded state has no {key} of {name}")
                if tuple(saved.shape) != tuple(shape):
                    raise ValueError(f"{key} of {name} has shape {tuple(saved.shape)}, expected {tuple(shape)}")
                if isinstance(saved, DTensor):
                    local = saved.to_local()
                    saved = local if local.shape == mine.shape else saved.full_tensor()
                if saved.shape != mine.shape:
                    saved = saved[slice(*self.world.share(len(saved)))]
                copies.append((mine, saved))
        for mine, saved in copies:
            mine.copy_(saved)

    def _as_dtensor(self, param, rows):
        mesh = DeviceMesh.from_group(self.world.group, rows.device.type)
        whole = torch.empty(len(param), *rows.shape[1:], device="meta")
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    def _whole(self, param, key, shape):
        mine, home = self.state.get(param, {}).get(key), self._home.get(param)
        if home is None or key == "step":
            return mine.clone()
        if home == "rows":
            each = -(-len(param) // self.world.size)
            whole = mine.new_empty(each * self.world.size, *shape[1:])
            whole[each * self.world.rank :][: len(mine)] = mine
            return self.world.all_gather(whole)()[: len(param)]
        whole = torch.empty(shape, dtype=state_dtype(param), device=param.device)
        if home == self.world.rank:
            whole.copy_(mine)
        dist.broadcast(whole, group=self.world.group, group_src=home)
        return whole


class DistMuonAdamW(MuonAdamW):
    """The same over the ranks of a process group, with replicated parameters: gradients and state are split (ZeRO-2).

    process_group: default the whole world; a world of one where torch.distributed is not initialized and torchrun did
    not start us. Every rank constructs it with the same groups; parameters are broadcast from rank 0. The update uses
    the mean of `p.grad` over ranks; `p.grad` itself is not changed. comm_dtype: of the reduction, default the
    gradient's own.

    W ranks, parameters of R rows, banks of K same-shaped matrices:

      parameters                collect                             state on a rank         deliver
      AdamW, < 1024 elements    one all_reduce for all of them      all of it               nothing
      AdamW                     reduce_scatter                      ceil(R/W) rows          all_gather
      Muon                      reduce_scatter, whole matrices      ceil(K/W) matrices      all_gather
      Muon, 2K < W              reduce of each to its owner         of K ranks one each     broadcast from the owner

    A rank sends 2(W-1)/W times the parameter bytes a step, plus padding. Memory of a step beyond parameters, gradients
    and state: (1 + 1/W) times the padded bytes of what is in flight, which is everything (AdamW rows that divide by W
    are sent from `p.grad` and received in the parameter, so they count 1/W), one batch of a bank, its temporaries.
    After every step all ranks hold bitwise the same parameters; a world of one does what MuonAdamW does.
    """

    def __init__(self, param_groups, process_group=None, comm_dtype=None):
        world = World(comm_dtype=comm_dtype)
        if dist.is_initialized():
            group = process_group or dist.group.WORLD
            world = World(group, dist.get_world_size(group), dist.get_rank(group), comm_dtype)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("torchrun started several processes: call torch.distributed.init_process_group first")
        super().__init__(param_groups, world)


# ----------------------------------------------------------------------------------------------------------------------


def tensor(values, like):
    """A float64 tensor on the device of `like`; the copy to a GPU does not wait for it."""
    return torch.tensor(values, dtype=torch.float64).to(like.device, non_blocking=True)


def state_dtype(param):
    """float32 whatever the parameter, float64 for float64."""
    return torch.promote_types(param.dtype, torch.float32)


def state_shapes(param, group):
    """Name and shape of everything kept for a parameter, over all ranks."""
    shapes = {key: tuple(param.shape) for key in STATE[group["kind"]]}
    if group["kind"] != "muon":
        return {"step": (), **shapes}
    if param.numel() == 0:
        return {}
    *batch, m, n = param.shape if param.ndim < 4 else (len(param), param[0].numel())
    shapes["second_momentum_buffer"] = (*batch, m, 1) if m >= n else (*batch, 1, n)
    return {key: shape for key, shape in shapes.items() if key == "momentum_buffer" or group["beta2"] is not None}
