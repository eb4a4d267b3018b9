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
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from nanomuon.orthogonalize import newton_schulz_flops, orthogonalize, triples, update_scale
from nanomuon.param_groups import check_group, default_names
from nanomuon.runtime import compile_enabled

STATE = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer", "second_momentum_buffer")}
SMALL = 1024  # elements; AdamW parameters below this are all-reduced together, kernels below this are not compiled
BATCH_BYTES = {"cpu": 2**24, "cuda": 2**29}  # Muon computes on this much of a bank at a time: bounded temporaries

# ----------------------------------------------------------------------------------------------------------------------
# Kernels. Hyperparameters come in one float64 tensor: changing them recompiles nothing, and 1 - 0.999 in float32 would
# be wrong in the fifth digit. `ok` is a 0-D float64 flag, 0 where some gradient is not finite: every line is then a
# no-op. The momentum of other projects, M <- mu*M + G, is 1/(1-mu) times the one here: the same direction at constant
# mu.


def adamw_update(param, grad, exp_avg, exp_avg_sq, step, hyper, ok):
    """AdamW (arXiv 1711.05101) in place, on four tensors of one shape.

    step: 0-D, counting this one. hyper: (5,) lr, beta1, beta2, eps, weight_decay. All arithmetic in the state's dtype.
    """
    lr, beta1, beta2, eps, weight_decay = hyper.unbind()
    lr, step, dtype = lr * ok, step.double().clamp(min=1), exp_avg.dtype
    grad = torch.where(ok > 0, grad, 0).to(dtype)
    exp_avg.lerp_(grad, ((1 - beta1) * ok).to(dtype))
    exp_avg_sq.lerp_(grad.square(), ((1 - beta2) * ok).to(dtype))
    denominator = (exp_avg_sq / (1 - beta2**step).to(dtype)).sqrt() + eps.to(dtype)
    update = exp_avg / denominator * (lr / (1 - beta1**step)).to(dtype)
    param.copy_(param.to(dtype) * (1 - lr * weight_decay).to(dtype) - update)


def muon_direction(grad, momentum, second, hyper, ok, coefficients, ns_steps, nesterov, row_equilibrate, renormalize):
    """Momentum, polar factor and variance reduction (NorMuon, arXiv 2510.05491) of a batch of matrices.

    grad, momentum: (k, m, n). second: (k, m, 1) if m >= n, else (k, 1, n); None for plain Muon. hyper: (5, k, 1, 1) lr,
    momentum, beta2, weight_decay, scale. Updates momentum and second. Returns X (k, m, n) in the dtype of the iteration
    and its gain, shaped like `second` or (k, 1, 1), in the state's dtype; their product is the direction of the update.
    """
    dtype, mu, beta2 = momentum.dtype, hyper[1], hyper[2]  # (k, 1, 1)
    grad = torch.where(ok > 0, grad, 0).to(dtype)
    momentum.lerp_(grad, ((1 - mu) * ok).to(dtype))
    U = grad.lerp(momentum, mu.to(dtype)) if nesterov else momentum
    if row_equilibrate:
        row_norm = torch.linalg.vector_norm(U, dim=2, keepdim=True)  # (k, m, 1)
        U = U * (row_norm.mean(dim=1, keepdim=True) / row_norm.clamp(min=1e-7))
    X = orthogonalize(U, coefficients, ns_steps)
    gain = torch.ones_like(mu, dtype=dtype)  # (k, 1, 1)
    short = min(X.shape[1:])
    if renormalize:
        gain = math.sqrt(short) / torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True, dtype=dtype).clamp(min=1e-7)
    if second is None:
        return X, gain
    # v has one value per element of the long side; ||X||^2 and ||X s||^2 are sums over it, so X is read once
    v = X.to(dtype).square().mean(dim=2 if X.size(1) >= X.size(2) else 1, keepdim=True) * gain.square()
    second.lerp_(v, ((1 - beta2) * ok).to(dtype))
    s = second.clamp(min=1e-10).rsqrt()
    before = (v.sum(dim=(1, 2), keepdim=True) * short).sqrt()  # (k, 1, 1) Frobenius norms
    after = ((v * s.square()).sum(dim=(1, 2), keepdim=True) * short).sqrt()
    return X, gain * s * before / after.clamp(min=1e-10)


def muon_update(param, X, gain, hyper, ok, *, cautious):
    """Weight decay and update of one matrix in place. param, X: (m, n). gain: (m, 1), (1, n) or (1, 1). hyper: (5, 1,
    1)."""
    dtype, lr, weight_decay, scale = gain.dtype, hyper[0, 0, 0] * ok, hyper[3, 0, 0], hyper[4, 0, 0]
    P, X = param.to(dtype), X.to(dtype) * gain
    if cautious:  # decay only what the update also shrinks
        decay = torch.where(X * P >= 0, P, 0) * (lr * scale * weight_decay).to(dtype)
    else:
        decay = P * (lr * weight_decay).to(dtype)
    param.copy_(P - X * (lr * scale).to(dtype) - decay)


@functools.cache
def compiled(kernel, *signature):
    """One compilation per signature. Dynamo counts them per code object, up to 8, so each gets its own copy of the
    code."""
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
        m, n = reversed(self.of(self.param).shape) if self.transposed else self.of(self.param).shape
        group = self.group
        scale = update_scale(group["scale"], m, n)
        return [group["lr"], group["momentum"], group["beta2"] or 0, group["weight_decay"], scale]


@dataclass
class Bank:
    """Matrices of one shape or its transpose, with the same static options: one collective, one batch."""

    shape: tuple  # (m, n)
    options: dict  # of muon_direction
    matrices: list
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
    """The ranks that share the work. Transfers are launched here; what is returned waits, and keeps its tensors
    alive."""

    group: dist.ProcessGroup = None
    size: int = 1
    rank: int = 0
    comm_dtype: torch.dtype = None

    def share(self, rows):
        """(lo, hi) of this rank's ceil(rows/W) rows, the last ones short or empty: DTensor's Shard(0)."""
        each = -(-rows // self.size)
        return min(rows, each * self.rank), min(rows, each * (self.rank + 1))

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


def padded(tensor, rows):
    """(rows, ...) with `tensor` at the top, itself if that is all; the padding is whatever was there, nobody reads
    it."""
    if len(tensor) == rows:
        return tensor.contiguous()
    whole = tensor.new_empty(rows, *tensor.shape[1:])
    whole[: len(tensor)] = tensor
    return whole


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
        units, small, banks = [], [], {}
        pairs = [(param, group) for group in groups for param in group["params"]]
        for param, group in pairs:
            if self.world.size > 1:  # a different seed per rank must not train different models
                whole = param.contiguous()
                dist.broadcast(whole, group=self.world.group, group_src=0)
                param.copy_(whole)
            if group["kind"] != "muon":
                split = self.world.size > 1 and param.numel() >= SMALL
                piece = Rows(param, group, *(self.world.share(len(param)) if split else (0, 0)), split)
                units.append([piece]) if split else small.append(piece)
                if split:
                    self._home[param] = "rows"
                self.state[param]["step"] = torch.zeros((), device=param.device)
                for key in STATE[group["kind"]]:
                    shape, dtype = piece.of(param).shape, state_dtype(param)
                    self.state[param][key] = torch.zeros(shape, dtype=dtype, device=param.device)
            elif param.numel():
                self._into_bank(banks, param, group)
        banks = sorted(banks.values(), key=lambda bank: -bank.flops)
        for bank in banks:
            self._place(bank)
        self._units += units + ([small] if small else []) + banks

    def _into_bank(self, banks, param, group):
        """lr, momentum, beta2, weight decay and scale may differ inside a bank; what changes the computation may
        not."""
        keys = ("coefficients", "ns_steps", "nesterov", "row_equilibrate", "renormalize")
        options = {key: group[key] for key in keys}
        if not isinstance(options["coefficients"], str):
            options["coefficients"] = tuple(map(tuple, options["coefficients"]))
        batch = param.ndim == 3  # a bank by itself, cut over ranks like Shard(0)
        shape = tuple(param.shape[1:]) if batch else (len(param), param[0].numel())
        # Rows must stay rows for MuonEq; otherwise a matrix and a transposed one have transposed polar factors.
        either_way = shape if batch or group["row_equilibrate"] else tuple(sorted(shape))
        static = (*options.values(), group["weight_decay_form"], group["beta2"] is None, param.dtype, param.device)
        bank = banks.setdefault((either_way, batch and id(param), *static), Bank(shape, options, []))
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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

        hooks = []
        if self.world.size > 1:
            hooks = [param.register_post_accumulate_grad_hook(arrived) for param in home if param.requires_grad]
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
        finite = [
            param.grad.sum(dtype=state_dtype(param)).isfinite()
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        device = self.skipped_steps.device
        bad = 1 - (torch.stack(finite).all() if finite else torch.ones((), device=device)).float()
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
            param, grad, moments = piece.of(piece.param), take(piece), [state[key] for key in STATE[group["kind"]]]
            if group["kind"] == "adamw":
                hyper = tensor([group["lr"], *group["betas"], group["eps"], group["weight_decay"]], param)
                run(adamw_update, param, grad, *moments, state["step"], hyper, self._ok)
        del take, grad
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
            wait = self.world.reduce_scatter(padded(grad, self._padded_rows(grad)))
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
        whole = padded(param, self._padded_rows(param))
        wait = self.world.all_gather(whole)
        return wait if whole is param else lambda: param.copy_(wait()[: len(param)])

    def _padded_rows(self, tensor):
        return -(-len(tensor) // self.world.size) * self.world.size

    def _muon(self, bank):
        """Muon on the matrices of a bank that this rank owns, a batch at a time."""
        take = self._collect_bank(bank)
        yield
        grads = take()
        for lo, hi in bank.batches():
            owned = bank.owned[lo:hi]
            hyper = tensor([matrix.hyper() for matrix in owned], bank.momentum).T[..., None, None]  # (5, k, 1, 1)
            state = bank.momentum[lo:hi], bank.second if bank.second is None else bank.second[lo:hi]
            X, gain = run(muon_direction, grads(lo, hi), *state, hyper, self._ok, **bank.options)
            for i, matrix in enumerate(owned):
                cautious = matrix.group["weight_decay_form"] == "cautious"
                run(muon_update, matrix.of(matrix.param), X[i], gain[i], hyper[:, i], self._ok, cautious=cautious)
        del take, grads
        finish = self._deliver_bank(bank)
        yield
        finish()

    def _collect_bank(self, bank):
        """reduce_scatter of the stacked bank by whole matrices, or reduce of each matrix to its owner."""
        if self.world.size == 1:
            return lambda: lambda lo, hi: torch.stack([x.of(gradient(x.param)) for x in bank.owned[lo:hi]])
        send = self._stack(bank, bank.matrices, gradient, self.world.comm_dtype)  # (slots, m, n)
        if not bank.alone:
            wait = self.world.reduce_scatter(send)
            return lambda: lambda lo, hi: wait()[lo:hi]
        average = functools.partial(dist.reduce, op=dist.ReduceOp.AVG, group=self.world.group, async_op=True)
        works = [average(send[matrix.slot], group_dst=matrix.owner) for matrix in bank.matrices]

        def wait():
            for work in works:
                work.wait()
            return lambda lo, hi: torch.stack([send[matrix.slot] for matrix in bank.owned[lo:hi]])

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
            shapes = state_shapes(param, group) if param.numel() or group["kind"] != "muon" else {}
            if shapes:
                state[name] = {key: self._whole(param, key, shape) for key, shape in shapes.items()}
        return {"state": state, "param_groups": self.state_dict()["param_groups"]}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Restore state, whole or local, from any world size, group order or grouping. Hyperparameters stay as they
        are.

        State keeps its dtype. ValueError, before anything is changed, for a name or key that is missing, a shape that
        differs, or parameters without names whose groups are not the saved ones.
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
        return DTensor.from_local(
            rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

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
    and state: (1 + 1/W) times the padded bytes of what is in flight, which is everything; AdamW rows that divide by W
    are sent from `p.grad` and received in the parameter, so they count 1/W.
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
    *batch, m, n = param.shape if param.ndim < 4 else (len(param), param[0].numel())
    shapes["second_momentum_buffer"] = (*batch, m, 1) if m >= n else (*batch, 1, n)
    return {key: shape for key, shape in shapes.items() if key == "momentum_buffer" or group["beta2"] is not None}
