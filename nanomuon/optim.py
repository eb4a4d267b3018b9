"""MuonAdamW for one process and DistMuonAdamW for many: Muon for matrices, AdamW for the rest.

    groups = [dict(kind="muon", params=[...], lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0),
              dict(kind="adamw", params=[...], lr=3e-4, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)]
    optimizer = DistMuonAdamW(groups)                 # under torchrun; MuonAdamW(groups) in one process

Every distributed step has the same shape for every piece of work: **collect** the mean gradient where it will be worked
on, **compute** the update there, **deliver** the result to where the parameter lives. While a collect or a delivery is
in flight the processor can do other work, so each piece is a generator with two yields:

    launch collect  -> yield ->  wait, compute, launch deliver  -> yield ->  wait, write back

and `step` is how the generators are advanced: first all collects are launched, then each piece in turn is computed and
its delivery launched, then all is written back. One process runs the same generators with nothing to wait for.

The file in order: the kernels (the mathematics), the pieces of work, MuonAdamW, DistMuonAdamW.
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

from nanomuon.orthogonalize import gram_pays, orthogonalize, triples, update_scale
from nanomuon.runtime import compile_enabled

REQUIRED = {
    "adamw": {"lr", "betas", "eps", "weight_decay"},
    "muon": {"lr", "momentum", "ns_steps", "beta2", "weight_decay"},
}
MUON_OPTIONS = {
    "nesterov": True,  # False: the update direction is the momentum itself
    "coefficients": "polar_express",  # a name in orthogonalize.COEFFICIENTS, or a list of (a, b, c)
    "scale": "shape",  # see orthogonalize.update_scale
    "weight_decay_form": "cautious",  # or "decoupled"
    "row_equilibrate": False,  # MuonEq, arXiv 2603.28254
    "renormalize": False,  # Muon+, arXiv 2602.21545
}
SMALL = (
    1024  # elements; below this an AdamW parameter is all-reduced with its like, and a kernel is not worth compiling
)
BATCH_BYTES = {"cpu": 2**24, "cuda": 2**29}  # Muon works on this much of a bank at a time: bounded temporaries

# ----------------------------------------------------------------------------------------------------------------------
# Kernels. Hyperparameters arrive as a float64 tensor (1 - 0.999 in float32 is wrong in the fifth digit), so changing
# one recompiles nothing. `ok` is a 0-D float64 flag: 1, or 0 where some gradient is not finite, which makes every line
# a no-op.


def adamw_update(param, grad, exp_avg, exp_avg_sq, step, hyper, ok):
    """AdamW, arXiv 1711.05101, in place. All but step, hyper and ok of one shape.

    step: 0-D, this update included. hyper: (5,) lr, beta1, beta2, eps, weight_decay.
    """
    lr, beta1, beta2, eps, weight_decay = hyper.unbind()
    lr, step, dtype = lr * ok, step.double().clamp(min=1), exp_avg.dtype
    grad = torch.where(ok > 0, grad, 0).to(dtype)
    exp_avg.lerp_(grad, ((1 - beta1) * ok).to(dtype))
    exp_avg_sq.lerp_(grad.square(), ((1 - beta2) * ok).to(dtype))
    denominator = (exp_avg_sq / (1 - beta2**step).to(dtype)).sqrt() + eps.to(dtype)
    update = exp_avg / denominator * (lr / (1 - beta1**step)).to(dtype)
    param.copy_(param.to(dtype) * (1 - lr * weight_decay).to(dtype) - update)


def muon_direction(
    grad, momentum, second, hyper, ok, *, coefficients, ns_steps, nesterov, row_equilibrate, renormalize
):  # fmt: skip
    """Momentum, polar factor and variance reduction (NorMuon, arXiv 2510.05491) of a batch of matrices.

    grad: (k, m, n). momentum: (k, m, n), updated. second: (k, m, 1) if m >= n, else (k, 1, n), updated; None for plain
    Muon. hyper: (5, k, 1, 1) lr, momentum, beta2, weight_decay, scale. Returns X (k, m, n) in the dtype of the
    iteration and the gain of each of its rows or columns, shaped like `second` (or one of ones), to be multiplied in
    by `muon_update`.
    """
    dtype = momentum.dtype
    mu, beta2 = hyper[1], hyper[2]  # (k, 1, 1)
    grad = torch.where(ok > 0, grad, 0).to(dtype)
    momentum.lerp_(grad, ((1 - mu) * ok).to(dtype))
    U = grad.lerp(momentum, mu.to(dtype)) if nesterov else momentum
    if row_equilibrate:
        row_norm = torch.linalg.vector_norm(U, dim=2, keepdim=True)  # (k, m, 1)
        U = U * (row_norm.mean(dim=1, keepdim=True) / row_norm.clamp(min=1e-7))
    X = orthogonalize(U, coefficients, ns_steps)
    if renormalize:
        norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True, dtype=dtype)  # (k, 1, 1)
        X = X * (math.sqrt(min(X.shape[1:])) / norm.clamp(min=1e-7)).to(X.dtype)
    if second is None:
        return X, torch.ones_like(mu, dtype=dtype)
    # The sums of X^2 and (X s)^2 follow from its mean over one side, so X is read once.
    mean_square = X.to(dtype).square().mean(dim=2 if X.size(1) >= X.size(2) else 1, keepdim=True)
    second.lerp_(mean_square, ((1 - beta2) * ok).to(dtype))
    s = second.clamp(min=1e-10).rsqrt()
    side = min(X.shape[1:])
    before = (mean_square.sum(dim=(1, 2), keepdim=True) * side).sqrt()  # (k, 1, 1) ||X||_F
    after = ((mean_square * s.square()).sum(dim=(1, 2), keepdim=True) * side).sqrt()  # ||X s||_F
    return X, s * before / after.clamp(min=1e-10)


def muon_update(param, X, gain, hyper, ok, *, cautious):
    """One matrix: weight decay and the update, in place. param, X: (m, n); gain: broadcasts to it; hyper: (5, 1, 1)."""
    dtype = gain.dtype
    lr, weight_decay, scale = hyper[0, 0, 0] * ok, hyper[3, 0, 0], hyper[4, 0, 0]
    P, X = param.to(dtype), X.to(dtype) * gain
    if cautious:  # only where the decay and the update agree in sign (arXiv 2411.16085)
        decay = torch.where(X * P >= 0, P, 0) * (lr * scale * weight_decay).to(dtype)
    else:
        decay = P * (lr * weight_decay).to(dtype)
    param.copy_(P - X * (lr * scale).to(dtype) - decay)


@functools.cache
def _compiled(kernel, *signature):
    """One compilation per signature: Dynamo counts recompilations by code object, and 40 shapes would exceed its
    limit."""
    copy = types.FunctionType(kernel.__code__.replace(), kernel.__globals__, kernel.__name__)
    return torch.compile(copy, dynamic=False, fullgraph=True)


def run(kernel, *tensors, **options):
    """Call a kernel, compiled unless NANOMUON_COMPILE=0 or the work is too small to be worth it."""
    if tensors[0].numel() < SMALL or not compile_enabled():
        return kernel(*tensors, **options)
    signature = tuple(t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    return _compiled(kernel, *signature, *options.items())(*tensors, **options)


# ----------------------------------------------------------------------------------------------------------------------
# Pieces of work


@dataclass
class Rows:
    """An AdamW parameter, or this rank's slice of one: rows lo to hi."""

    param: torch.Tensor
    group: dict
    lo: int = 0
    hi: int = 1

    def of(self, tensor):
        return tensor[self.lo : self.hi] if tensor.ndim else tensor


@dataclass
class Matrix:
    """One matrix of a Muon parameter: all of a 2-D one, (out, rest) of a convolution, or the index-th of a 3-D one."""

    param: torch.Tensor
    group: dict
    index: int | None = None
    transposed: bool = False  # against the orientation of its bank
    owner: int = 0

    def of(self, tensor):
        tensor = tensor.flatten(1) if self.index is None else tensor[self.index]
        return tensor.mT if self.transposed else tensor  # (m, n)

    @property
    def scale(self):
        m, n = self.of(self.param).mT.shape if self.transposed else self.of(self.param).shape
        return update_scale(self.group["scale"], m, n)


@dataclass
class Bank:
    """Matrices of one shape, or its transpose, and the same computation: one collective, one batch."""

    shape: tuple  # (m, n)
    matrices: list
    options: dict  # static arguments of muon_direction
    cautious: bool
    owned: list = field(default_factory=list)
    momentum: torch.Tensor = None  # (k, m, n) of the k owned matrices
    second: torch.Tensor = None  # (k, m, 1) or (k, 1, n)

    @property
    def work(self):
        """Multiply-adds of one matrix's Newton-Schulz, which is what owners are balanced by."""
        short, long = sorted(self.shape)
        ratio, steps = long / short, len(triples(self.options["coefficients"], self.options["ns_steps"]))
        return short**3 * (8 * ratio + 28 if gram_pays(*self.shape, steps) else steps * (4 * ratio + 2)) / 2


# ----------------------------------------------------------------------------------------------------------------------


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW in one process. Update rules, options and defaults: see the kernels and MUON_OPTIONS.

    param_groups: a list of dicts with `kind` ("muon" | "adamw"), `params`, every key of REQUIRED and, for Muon, any of
    MUON_OPTIONS; `beta2=None` is Muon without variance reduction, `ns_steps=None` the set's own length. Optional
    `names` (aligned with params) name the state; without them names are group{i}.{j}. Hyperparameters are read from
    the groups at every step. ValueError for anything unknown, missing or impossible.

    A gradient of None counts as zero. Gradients are not changed. If any gradient is not finite the step is not applied:
    parameters and state stay as they were and `skipped_steps`, a 0-D tensor, counts it.
    """

    world_size, rank, process_group = 1, 0, None

    def __init__(self, param_groups):
        self._units = []
        self._planned = False
        super().__init__(param_groups, {})
        self._start()

    def _start(self):
        self._device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=self._device)
        self._load = [0.0] * self.world_size  # Muon work per rank
        self._running = []  # generators whose collect is launched
        self._plan(self.param_groups)
        self._planned = True

    def add_param_group(self, group):
        index = len(self.param_groups)
        group = _checked(group, index)
        taken = {id(p): i for i, other in enumerate(self.param_groups) for p in other["params"]}
        for name, param in zip(group["names"], group["params"], strict=True):
            if id(param) in taken:
                raise ValueError(f"param group {index}: {name} is already in group {taken[id(param)]}")
            taken[id(param)] = index
        known = {name for other in self.param_groups for name in other["names"]}
        if twice := known.intersection(group["names"]):
            raise ValueError(f"param group {index}: the name {min(twice)} is already in use")
        super().add_param_group(group)
        if self._planned:
            self._plan(self.param_groups[-1:])

    def _plan(self, groups):
        """Cut the parameters of these groups into pieces of work, largest Muon work last, and create their state."""
        small, banks = [], {}
        for group in groups:
            for param in group["params"]:
                if group["kind"] == "adamw":
                    rows = param.shape[0] if param.ndim else 1
                    if param.numel() < SMALL or self.world_size == 1:
                        piece = Rows(param, group, 0, rows)
                        small.append(piece)
                    else:
                        size = -(-rows // self.world_size)
                        piece = Rows(param, group, min(rows, size * self.rank), min(rows, size * (self.rank + 1)))
                        self._units.append([piece])
                    self._init_elementwise(piece)
                else:
                    self._add_to_bank(param, group, banks)
        if small:
            self._units.append(small)
        banks = sorted(banks.values(), key=lambda bank: -bank.work)
        for bank in banks:
            self._init_bank(bank)
        self._units += banks

    def _init_elementwise(self, piece):
        like = piece.of(piece.param.detach())
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.state[piece.param] = {
            "step": torch.zeros((), device=like.device),
            "exp_avg": torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format),
            "exp_avg_sq": torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format),
        }

    def _add_to_bank(self, param, group, banks):
        """A bank holds what shares shape and static options; lr, momentum, beta2, weight decay and scale may differ."""
        options = {
            key: group[key] for key in ("coefficients", "ns_steps", "nesterov", "row_equilibrate", "renormalize")
        }
        options["coefficients"] = _hashable(options["coefficients"])
        cautious, variance = group["weight_decay_form"] == "cautious", group["beta2"] is not None
        if param.numel() == 0:
            self.state[param] = {}
            return
        shape = tuple(param.shape[-2:]) if param.ndim == 3 else (param.shape[0], param[0].numel())
        # A 3-D parameter is a bank by itself, split over ranks like DTensor's Shard(0); rows keep their meaning in
        # MuonEq.
        alone = id(param) if param.ndim == 3 else None
        oriented = shape if options["row_equilibrate"] or alone else tuple(sorted(shape))
        key = (oriented, alone, *options.items(), cautious, variance, param.dtype, param.device)
        bank = banks.setdefault(key, Bank(shape, [], options, cautious))
        for index in range(len(param)) if param.ndim == 3 else (None,):
            bank.matrices.append(Matrix(param, group, index, transposed=shape != bank.shape))

    def _init_bank(self, bank):
        """Owners, then momentum and second moment of the matrices owned here; state entries are views of them."""
        each = -(-len(bank.matrices) // self.world_size)
        if bank.matrices[0].index is not None:
            owners = [i // each for i in range(len(bank.matrices))]
        else:  # as even as whole matrices allow, what is left over to the ranks with the least work so far
            even, left = divmod(len(bank.matrices), self.world_size)
            idlest = sorted(range(self.world_size), key=lambda rank: (self._load[rank], rank))[:left]
            owners = [rank for rank in range(self.world_size) for _ in range(even + (rank in idlest))]
        for matrix, owner in zip(bank.matrices, owners, strict=True):
            matrix.owner = owner
            self._load[owner] += bank.work
        bank.owned = [matrix for matrix in bank.matrices if matrix.owner == self.rank]
        first, k, (m, n) = bank.matrices[0], len(bank.owned), bank.shape
        create = functools.partial(
            torch.zeros, dtype=torch.promote_types(first.param.dtype, torch.float32), device=first.param.device
        )
        bank.momentum = create(k, m, n)
        if first.group["beta2"] is not None:
            bank.second = create(k, m, 1) if m >= n else create(k, 1, n)
        for key, buffer in (("momentum_buffer", bank.momentum), ("second_momentum_buffer", bank.second)):
            if buffer is not None and first.index is not None:
                self.state[first.param][key] = buffer  # (experts here, m, n)
            elif buffer is not None:
                for matrix, row in zip(bank.owned, buffer, strict=True):
                    row = row.mT if matrix.transposed else row
                    is_momentum = key == "momentum_buffer"
                    self.state[matrix.param][key] = row.view(matrix.param.shape) if is_momentum else row

    # ---- the step

    @torch.no_grad()
    def step(self, closure=None):
        """One update from the gradients in `p.grad`, which stay as they are. Returns the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.world_size == 1:  # nothing to wait for, so one piece after the other and little memory
            self._ok = self._agree()()
            for unit in self._units:
                for _ in self._advance(unit):
                    pass
        else:
            while len(self._running) < len(self._units):
                self._launch_next()
            agreed = self._agree()
            running, self._running = self._running, []
            self._ok = agreed()
            for piece in running:
                next(piece)  # compute, launch delivery
            for piece in running:
                next(piece, None)  # write back
        self.skipped_steps += (self._ok == 0).to(torch.int64)
        return loss

    @contextlib.contextmanager
    def overlap_backward(self):
        """Around the last micro-batch's backward: launches collects as gradients complete. Nothing to do in one
        process."""
        yield

    def _advance(self, unit):
        return self._muon(unit) if isinstance(unit, Bank) else self._elementwise(unit)

    def _launch_next(self):
        self._running.append(self._advance(self._units[len(self._running)]))
        next(self._running[-1])

    def _agree(self):
        """Start finding out whether every gradient is finite; returns a function that gives the 0-D flag `ok`."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        # A sum is finite unless an element is not (or the sum overflows, which the squares of the update would too).
        sums = [grad.sum(dtype=torch.promote_types(grad.dtype, torch.float32)).isfinite() for grad in grads]
        ok = torch.stack(sums).all() if sums else torch.ones((), device=self._device)
        bad, wait = self._any_rank(1 - ok.float())

        def result():
            wait()
            return 1 - bad.double()

        return result

    def _any_rank(self, bad):
        return bad, lambda: None

    def _elementwise(self, pieces):
        """AdamW on whole parameters or slices. pieces: one large parameter's slice, or all the small parameters."""
        take = self._collect_rows(pieces)
        yield
        for piece in pieces:
            state, group = self.state[piece.param], piece.group
            hyper = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
            state["step"] += self._ok
            run(
                adamw_update, piece.of(piece.param), take(piece), state["exp_avg"], state["exp_avg_sq"], state["step"],
                self._hyper(hyper, piece.param), self._ok,
            )  # fmt: skip
        finish = self._deliver_rows(pieces)
        yield
        finish()

    def _muon(self, bank):
        """Muon on the matrices of a bank that this rank owns, a batch at a time."""
        take = self._collect_bank(bank)
        yield
        for lo, hi in self._batches(bank):
            owned = bank.owned[lo:hi]
            hyper = self._hyper(
                [
                    [m.group["lr"], m.group["momentum"], m.group["beta2"] or 0, m.group["weight_decay"], m.scale]
                    for m in owned
                ],
                owned[0].param,
            ).T[..., None, None]  # (5, k, 1, 1)
            second = None if bank.second is None else bank.second[lo:hi]
            X, gain = run(muon_direction, take(lo, hi), bank.momentum[lo:hi], second, hyper, self._ok, **bank.options)
            for i, matrix in enumerate(owned):
                run(muon_update, matrix.of(matrix.param), X[i], gain[i], hyper[:, i], self._ok, cautious=bank.cautious)
        finish = self._deliver_bank(bank)
        yield
        finish()

    def _batches(self, bank):
        """Equal batches of the owned matrices (one shape to compile), each within BATCH_BYTES."""
        k, (m, n) = len(bank.owned), bank.shape
        most = max(1, BATCH_BYTES.get(bank.momentum.device.type, 2**24) // (4 * m * n))
        size = next((d for d in range(min(k, most), 0, -1) if k % d == 0), 1)
        return [(lo, lo + size) for lo in range(0, k, size)]

    def _hyper(self, values, param):
        return torch.tensor(values, dtype=torch.float64).to(param.device, non_blocking=True)

    # ---- no transport: the gradient is here and so is the parameter

    def _collect_rows(self, pieces):
        return lambda piece: _grad(piece.param)

    def _deliver_rows(self, pieces):
        return lambda: None

    def _collect_bank(self, bank):
        return lambda lo, hi: torch.stack([matrix.of(_grad(matrix.param)) for matrix in bank.owned[lo:hi]])

    def _deliver_bank(self, bank):
        return lambda: None

    # ---- state, by name

    def _named_params(self):
        for group in self.param_groups:
            yield from zip(group["names"], group["params"], strict=True)

    def _portable(self, param, value):
        """What this rank holds of a state tensor, as a DTensor if it is a slice."""
        return value

    def state_dict(self):
        """What this rank owns, without communication: {"state": {name: {key: tensor}}, "param_groups": [...]}.

        Tensors share memory with the optimizer's; a row slice is a DTensor, a matrix is in its owner's dictionary only.
        """
        state = {
            name: {key: self._portable(param, value) for key, value in self.state[param].items()}
            for name, param in self._named_params()
            if self.state.get(param)
        }
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    def full_state_dict(self):
        """The whole state on every rank, as copies. Collective."""
        saved = self.state_dict()
        saved["state"] = {
            name: {key: value.detach().clone() for key, value in entry.items()}
            for name, entry in saved["state"].items()
        }
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Restore state, whole or local, from any world size, group order or grouping; hyperparameters stay as
        constructed.

        State keeps its dtype. ValueError, before anything is changed, for a name or key that is missing, a shape that
        differs, or unnamed groups that are not the saved ones.
        """
        ours, theirs = (
            [group["names"] for group in groups] for groups in (self.param_groups, state_dict["param_groups"])
        )
        if any(group.get("_unnamed") for group in self.param_groups) and ours != theirs:
            raise ValueError("parameters without names load only into the same groups; give every group names=[...]")
        copies = []
        for name, param in self._named_params():
            for key, mine in self.state.get(param, {}).items():
                saved = state_dict["state"].get(name, {}).get(key)
                if saved is None:
                    raise ValueError(f"the loaded state has no {key} of {name}")
                mine_as_saved = self._portable(param, mine)
                if saved.shape != mine_as_saved.shape:
                    raise ValueError(f"{key} of {name} is {tuple(saved.shape)}, expected {tuple(mine_as_saved.shape)}")
                if isinstance(saved, DTensor):
                    same = isinstance(mine_as_saved, DTensor) and saved.to_local().shape == mine.shape
                    saved = saved.to_local() if same else saved.full_tensor()
                copies.append((mine, saved, param))
        for mine, saved, param in copies:
            mine.copy_(saved if saved.shape == mine.shape else self._own_part(param, saved))

    def _own_part(self, param, whole):
        return whole


class DistMuonAdamW(MuonAdamW):
    """The same over the ranks of a process group, parameters replicated (ZeRO-2: gradients and state are split).

    process_group: default the whole world; without one, and not under torchrun, a world of one. Every rank constructs
    it with the same groups; initial parameters are broadcast from rank 0. `p.grad` is this rank's gradient and is not
    changed; the update uses the mean over ranks. comm_dtype: dtype in which gradients are reduced, default the
    gradient's own.

      what                          collect                            state held              deliver
      AdamW, < 1024 elements        one all_reduce for all of them     whole, every rank       nothing
      AdamW                         reduce_scatter of rows             ceil(rows/W) rows       all_gather of rows
      Muon bank of K matrices       reduce_scatter, whole matrices     at most ceil(K/W)       all_gather
      the same, 2K < W              reduce of each to its owner        one or none             broadcast from the owner

    Communication per rank and step: 2(W-1)/W times the parameter bytes, plus padding. After every step all ranks hold
    bitwise the same parameters.
    """

    def __init__(self, param_groups, process_group=None, comm_dtype=None):
        if dist.is_initialized():
            self.process_group = process_group or dist.group.WORLD
            self.world_size = dist.get_world_size(self.process_group)
            self.rank = dist.get_rank(self.process_group)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("WORLD_SIZE > 1 but torch.distributed is not initialized: call init_process_group first")
        self.comm_dtype = comm_dtype
        self._mesh = None
        super().__init__(param_groups)

    def _start(self):
        if self.world_size > 1:
            with torch.no_grad():
                for _, param in self._named_params():
                    whole = param.detach().contiguous()
                    dist.broadcast(whole, group=self.process_group, group_src=0)
                    param.copy_(whole)
        super()._start()

    @contextlib.contextmanager
    def overlap_backward(self):
        """Around the last micro-batch's backward: launches each piece's collect once all its gradients are there.

        Always in the order of the pieces, which is the same on every rank whatever order autograd takes; what is left
        is launched by step(), which must follow before gradients change again.
        """
        if self.world_size == 1:
            yield
            return
        if self._running:
            raise RuntimeError("overlap_backward: collects of an earlier backward are in flight; call step() first")
        params = [
            {id(x.param) for x in (unit.matrices if isinstance(unit, Bank) else unit)} for unit in self._units
        ]  # still without a gradient, per piece
        home = {param: waiting for waiting in params for param in waiting}

        @torch.no_grad()
        def arrived(param):
            home[id(param)].discard(id(param))
            while len(self._running) < len(self._units) and not params[len(self._running)]:
                self._launch_next()

        hooks = [param.register_post_accumulate_grad_hook(arrived) for _, param in self._named_params()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # ---- transports: each launches, and returns a function that waits. The closures keep in-flight tensors alive.

    def _any_rank(self, bad):
        if self.world_size == 1:
            return super()._any_rank(bad)
        return bad, dist.all_reduce(bad, dist.ReduceOp.MAX, group=self.process_group, async_op=True).wait

    def _reduce_scatter(self, send):
        """send: (W*c, ...) -> (c, ...), the mean over ranks of this rank's part."""
        received = send.new_empty(len(send) // self.world_size, *send.shape[1:])
        work = _reduce_scatter(received, send, dist.ReduceOp.AVG, group=self.process_group, async_op=True)

        def wait(keep=send):
            work.wait()
            return received

        return wait

    def _all_gather(self, whole):
        """whole: (W*c, ...) with this rank's part in place; returns a function that waits and gives all of it."""
        part = whole.chunk(self.world_size)[self.rank]
        work = _all_gather(whole, part, group=self.process_group, async_op=True)

        def wait(keep=part):
            work.wait()
            return whole

        return wait

    def _collect_rows(self, pieces):
        if self.world_size == 1:
            return super()._collect_rows(pieces)
        first = pieces[0].param
        if first.numel() >= SMALL:
            rows = -(-len(first) // self.world_size) * self.world_size
            grad = _grad(first).to(self.comm_dtype or _grad(first).dtype)
            if rows == len(first):
                send = grad.contiguous()
            else:
                send = grad.new_empty(rows, *first.shape[1:])
                send[: len(first)] = grad
            wait = self._reduce_scatter(send)
            return lambda piece: wait()[: piece.hi - piece.lo]
        grads = [_grad(piece.param).flatten() for piece in pieces]
        flat = torch.cat(grads)  # promotes where dtypes differ
        flat = flat.to(self.comm_dtype or flat.dtype)
        work = dist.all_reduce(flat, dist.ReduceOp.AVG, group=self.process_group, async_op=True)
        parts = dict(zip(map(id, pieces), flat.split([grad.numel() for grad in grads]), strict=True))

        def take(piece):
            work.wait()
            return parts[id(piece)].view(piece.param.shape)

        return take

    def _deliver_rows(self, pieces):
        piece, param = pieces[0], pieces[0].param.detach()
        if self.world_size == 1 or param.numel() < SMALL:
            return super()._deliver_rows(pieces)
        rows = -(-len(param) // self.world_size) * self.world_size
        if rows == len(param) and param.is_contiguous():
            return self._all_gather(param)
        whole = param.new_empty(rows, *param.shape[1:])
        whole[piece.lo : piece.hi] = piece.of(param)
        wait = self._all_gather(whole)
        return lambda: param.copy_(wait()[: len(param)])

    def _slots(self, bank):
        """(c, slots): matrices per rank in the stacked bank, and each matrix's row in it."""
        c, seen = -(-len(bank.matrices) // self.world_size), [0] * self.world_size
        slots = []
        for matrix in bank.matrices:
            slots.append(matrix.owner * c + seen[matrix.owner])
            seen[matrix.owner] += 1
        return c, slots

    def _collect_bank(self, bank):
        if self.world_size == 1:
            return super()._collect_bank(bank)
        dtype = self.comm_dtype or bank.matrices[0].param.dtype
        empty = functools.partial(torch.empty, dtype=dtype, device=bank.momentum.device)
        if 2 * len(bank.matrices) < self.world_size:
            grads, works = [], []
            for matrix in bank.matrices:
                grads.append(empty(bank.shape).copy_(matrix.of(_grad(matrix.param))))
                works.append(
                    dist.reduce(
                        grads[-1], group_dst=matrix.owner, op=dist.ReduceOp.AVG, group=self.process_group, async_op=True
                    )
                )

            def take(lo, hi):
                own = [(g, w) for m, g, w in zip(bank.matrices, grads, works, strict=True) if m.owner == self.rank]
                for _, work in own[lo:hi]:
                    work.wait()
                return torch.stack([grad for grad, _ in own[lo:hi]])

            return take
        c, slots = self._slots(bank)
        send = empty(self.world_size * c, *bank.shape)  # padding is whatever was there: nobody computes on it
        for slot, matrix in zip(slots, bank.matrices, strict=True):
            send[slot].copy_(matrix.of(_grad(matrix.param)))
        wait = self._reduce_scatter(send)
        return lambda lo, hi: wait()[lo:hi]

    def _deliver_bank(self, bank):
        if self.world_size == 1:
            return super()._deliver_bank(bank)
        if 2 * len(bank.matrices) < self.world_size:
            sent = []
            for matrix in bank.matrices:
                whole = matrix.of(matrix.param.detach()).contiguous()
                sent.append(
                    (
                        matrix,
                        whole,
                        dist.broadcast(whole, group_src=matrix.owner, group=self.process_group, async_op=True),
                    )
                )

            def finish():
                for matrix, whole, work in sent:
                    work.wait()
                    matrix.of(matrix.param).copy_(whole)

            return finish
        c, slots = self._slots(bank)
        whole = torch.empty(
            self.world_size * c, *bank.shape, dtype=bank.matrices[0].param.dtype, device=bank.momentum.device
        )
        for slot, matrix in zip(slots, bank.matrices, strict=True):
            if matrix.owner == self.rank:
                whole[slot].copy_(matrix.of(matrix.param))
        wait = self._all_gather(whole)

        def finish():
            rows = wait()
            for slot, matrix in zip(slots, bank.matrices, strict=True):
                if matrix.owner != self.rank:
                    matrix.of(matrix.param).copy_(rows[slot])

        return finish

    # ---- state that lives in slices

    def _sliced(self, param):
        return self.world_size > 1 and (
            param.ndim == 3 if "momentum_buffer" in self.state[param] else param.numel() >= SMALL
        )

    def _portable(self, param, value):
        if not self._sliced(param) or value.ndim == 0:
            return value
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.process_group, value.device.type)
        shape = torch.Size((param.shape[0], *value.shape[1:]))
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return DTensor.from_local(value, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def _own_part(self, param, whole):
        size = -(-len(param) // self.world_size)
        return whole[size * self.rank : size * (self.rank + 1)]

    def full_state_dict(self):
        """The whole state on every rank, as copies. Collective."""
        saved = super().state_dict()
        if self.world_size == 1:
            return super().full_state_dict()
        state = {}
        owners = {id(m.param): m.owner for unit in self._units if isinstance(unit, Bank) for m in unit.matrices}
        for name, param in self._named_params():
            entry = saved["state"].get(name, {})
            if any(isinstance(value, DTensor) for value in entry.values()):
                entry = {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in entry.items()}
            elif id(param) in owners:
                box = [entry if self.rank == owners[id(param)] else None]
                dist.broadcast_object_list(box, group=self.process_group, group_src=owners[id(param)])
                entry = {key: value.to(param.device) for key, value in box[0].items()}
            else:
                entry = {key: value.clone() for key, value in entry.items()}
            state[name] = entry
        return {"state": state, "param_groups": saved["param_groups"]}


def _grad(param):
    """The gradient, zero where there is none."""
    return torch.zeros_like(param) if param.grad is None else param.grad


def _hashable(coefficients):
    return coefficients if isinstance(coefficients, str) else tuple(map(tuple, coefficients))


def _checked(group, index):
    """A copy of a user's group with defaults filled in and names; ValueError that names the group and the parameter."""
    where = f"param group {index}"
    group = dict(group)
    kind = group.get("kind")
    if kind not in REQUIRED:
        raise ValueError(f"{where}: unknown kind {kind!r}; known: {', '.join(REQUIRED)}")
    options = MUON_OPTIONS if kind == "muon" else {}
    given = set(group) - {"kind", "params", "names", "initial_lr"}
    if missing := REQUIRED[kind] - given:
        raise ValueError(f"{where} ({kind}): missing {', '.join(sorted(missing))}")
    if unknown := given - REQUIRED[kind] - set(options):
        raise ValueError(f"{where} ({kind}): unknown {', '.join(sorted(unknown))}")
    group = {**options, **group}
    group["params"] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    if "names" not in group:
        group["names"] = [f"group{index}.{i}" for i in range(len(group["params"]))]
        group["_unnamed"] = True
    if len(group["names"]) != len(group["params"]) or len(set(group["names"])) != len(group["names"]):
        raise ValueError(f"{where}: names must be distinct and as many as params")
    if kind == "muon":
        for name, param in zip(group["names"], group["params"], strict=True):
            if not 2 <= param.ndim <= 4:
                raise ValueError(f"{where}: {name} has shape {tuple(param.shape)}; Muon takes matrices (2-D to 4-D)")
        triples(group["coefficients"], group["ns_steps"])
        if group["params"]:
            update_scale(group["scale"], 1, 1)
        if group["weight_decay_form"] not in ("cautious", "decoupled"):
            raise ValueError(
                f"{where}: unknown weight_decay_form {group['weight_decay_form']!r}; cautious or decoupled"
            )
    return group


# Since torch 2.13 the collectives on one tensor are called *_single, and the old names warn.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
