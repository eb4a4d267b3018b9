"""MuonAdamW for one process and DistMuonAdamW for many: Muon for matrices, AdamW for everything else.

    groups = [dict(kind="muon", params=[...], lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95,
    weight_decay=0.0),
              dict(kind="adamw", params=[...], lr=3e-4, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)]
    optimizer = DistMuonAdamW(groups)  # under torchrun; in one process MuonAdamW(groups)

Every distributed step has the same shape for every piece of work: **collect** the mean gradient where it will
be worked on, **compute** the update there, **deliver** the result to where the parameter lives. While a
collect or a delivery is in flight the processor can do other work, so each piece is a generator with two
yields:

    launch collect  -> yield ->  wait, compute, launch deliver  -> yield ->  wait, write back

How `step` advances the generators is the whole overlap policy: all collects are launched, then each piece in
turn is computed and its delivery launched, then all is written back. One process runs the same generators and
waits for nothing.

In order: the kernels (the mathematics), the optimizer (plan, step, transports of replicated parameters,
state). The pieces of work, and the transports of parameters that are themselves in pieces, are in
`sharded.py`.
"""

import contextlib
import functools
import math
import os
import types
from collections import deque
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function

from nanomuon.orthogonalize import orthogonalize, total, update_scale
from nanomuon.param_groups import check_group, default_names, split_rows
from nanomuon.runtime import compile_enabled
from nanomuon.sharded import (
    Bank,
    Kept,
    Rows,
    World,
    cuts,
    gradient,
    layout,
    local,
    state_dtype,
    to_owners,
    to_shards,
)

STATE = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer", "second_momentum_buffer"),
}
SMALL = 1024  # elements; AdamW parameters below this are all-reduced together, kernels below this are not compiled
BLOCK = 2**18  # elements; see `blocks`

# ------------------------------------------------------------------------------------------------------------
# Kernels. Hyperparameters come ready to use in one tensor, so changing them recompiles nothing; they are
# prepared in float64, because 1 - 0.999 in float32 is wrong in the fifth digit. `ok` is 0-D, 0 where some
# gradient is not finite; it is multiplied into them, and every line is then a no-op. All arithmetic is in the
# dtype of the state.


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
    """Momentum in place, and what is to be orthogonalized into U. All (m, n), or (K, m, n); hyper: (5, [K,]
    1, 1).
    """
    grad = torch.where(ok > 0, grad, 0).to(momentum.dtype)
    momentum.lerp_(grad, hyper[0])
    U.copy_(grad.lerp(momentum, hyper[1]) if nesterov else momentum)


def muon_direction(
    U, second, weight, coefficients, ns_steps, row_equilibrate, renormalize, split=None, tp=None
):
    """Polar factor and variance reduction (NorMuon, arXiv 2510.05491) of a batch of matrices.

    U: (k, m, n). second: (k, m, 1) if m >= n, else (k, 1, n), updated; None for plain Muon. weight: (k, 1,
    1), 1-beta2. Returns X (k, m, n) in the dtype of the iteration and its gain, shaped like `second` or (k,
    1, 1), in the dtype of the state: their product is the direction of the update. split: see `muon_parts`.
    tp: see `orthogonalize`; second is whole on every rank.
    """
    if split is not None:
        return muon_parts(U, second, weight, split, tp, coefficients, ns_steps, row_equilibrate, renormalize)
    m, n = U.shape[1:] if tp is None else tp.shape
    if row_equilibrate:
        row_norm = total(U.square().sum(dim=2, keepdim=True), tp, 2).sqrt()  # (k, m, 1)
        U = U * (total(row_norm.sum(dim=1, keepdim=True), tp, 1) / m / row_norm.clamp(min=1e-7))
    X = orthogonalize(U, coefficients, ns_steps, tp=tp)
    gain, short = torch.ones_like(weight), min(m, n)  # (k, 1, 1)
    if renormalize:
        norm = total(X.to(gain.dtype).square().sum(dim=(1, 2), keepdim=True), tp, 1, 2).sqrt()
        gain = math.sqrt(short) / norm.clamp(min=1e-7)
    if second is None:
        return X, gain
    # v has one value per element of the long side; ||X||^2 and ||X s||^2 are sums over it, so X is read once
    side = 2 if m >= n else 1
    v = total(X.to(gain.dtype).square().sum(dim=side, keepdim=True), tp, side) / short * gain.square()
    if tp is not None:
        v = tp.gather(v) if tp.dim != side else v
    second.lerp_(v, weight)
    s = second.clamp(min=1e-10).rsqrt()
    before = (v.sum(dim=(1, 2), keepdim=True) * short).sqrt()  # (k, 1, 1) Frobenius norms
    after = ((v * s.square()).sum(dim=(1, 2), keepdim=True) * short).sqrt()
    gain = gain * s * before / after.clamp(min=1e-10)
    return X, gain if tp is None else tp.mine(gain)


def muon_parts(U, second, weight, split, tp, *options):
    """`muon_direction` of the parts of fused matrices, each a matrix of its own (split: see `split_rows`).

    second: (k, S, 1), the second moments of the parts one after the other. The gain is one.
    """
    heads, groups, rows = split
    k, n = len(U), U.size(2) if tp is None else tp.shape[1]
    parts = U.view(k * heads, groups, -1, U.size(2)).split(rows, dim=2)  # each (k*heads, groups, rows, n)
    seconds, X = [None] * len(rows), []
    if second is not None:
        seconds = second.view(k * heads, -1, 1).split([max(groups * each, n) for each in rows], dim=1)
    for part, v in zip(parts, seconds, strict=True):
        matrix = part.flatten(1, 2)
        v = v if v is None or matrix.size(1) >= n else v.mT
        part_tp = tp and replace(tp, shape=(matrix.size(1), n))
        direction, gain = muon_direction(matrix, v, weight.repeat_interleave(heads, 0), *options, tp=part_tp)
        X.append((direction * gain).view(part.shape))
    return torch.cat(X, dim=2).view(U.shape), torch.ones_like(weight)


def muon_update(param, X, gain, hyper, cautious):
    """Weight decay and update, in place.

    param, X: (m, n), or (K, m, n). gain: (m, 1), (1, n) or (1, 1). hyper: (5, [K,] 1 or m, 1).
    """
    step_size, decay = hyper[3], hyper[4]
    P, X = param.to(gain.dtype), X.to(gain.dtype) * gain
    # cautious: decay only what the update also shrinks
    param.copy_(P - X * step_size - (torch.where(X * P >= 0, P, 0) if cautious else P) * decay)


def muon_hyper(group, m, n):
    """1-mu, mu, 1-beta2, lr', weight decay per element, for a matrix whose parameter is (m, n); lr' = lr *
    scale.

    M <- lerp(M, G, 1-mu) is 1-mu times the M <- mu*M + G of other projects: the same direction at constant
    mu.
    """
    lr, mu, scaled = group["lr"], group["momentum"], group["lr"] * update_scale(group["scale"], m, n)
    decay = (scaled if group["weight_decay_form"] == "cautious" else lr) * group["weight_decay"]
    return [1 - mu, mu, 1 - (group["beta2"] or 0), scaled, decay]


@functools.cache
def compiled(kernel, *signature):
    """One compilation per signature. Dynamo allows a code object eight of them, so each gets its own copy."""
    copy = types.FunctionType(
        kernel.__code__.replace(), kernel.__globals__, kernel.__name__, kernel.__defaults__
    )
    return torch.compile(copy, dynamic=False, fullgraph=True)


def run(kernel, *tensors, **options):
    """Call a kernel: compiled, unless NANOMUON_COMPILE=0 or there is too little work for it to pay."""
    if tensors[0].numel() < SMALL or not compile_enabled():
        return kernel(*tensors, **options)
    signature = [t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    return compiled(kernel, *signature, *options.items())(*tensors, **options)


def blocks(tensors):
    """The tensors cut into rows that stay in the cache, where kernels run eagerly and pass over them many
    times.
    """
    first = tensors[0]
    if compile_enabled() or first.numel() <= BLOCK or first.device.type != "cpu":
        return [tensors]
    rows = max(1, BLOCK * len(first) // first.numel())
    return zip(*(each.split(rows) for each in tensors), strict=True)


# ------------------------------------------------------------------------------------------------------------


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW in one process. The update rules are the kernels above.

    param_groups: dicts with `kind` ("muon" | "adamw"), `params` and every key of REQUIRED; for Muon any of
    MUON_OPTIONS. `beta2=None` is Muon without variance reduction, `ns_steps=None` the coefficient set's own
    length. `names`, aligned with params, name the state; without them names are group{i}.{j}. lr, momentum,
    betas, beta2, eps and weight_decay are read from the groups at every step. `split` names the parts of a
    fused matrix (`param_groups.split_rows`): each is orthogonalized by itself, with its own second moment and
    the scale of its own shape; their second moments are saved one after the other, (S, 1). ValueError at
    construction for anything unknown, missing or impossible.

    A gradient of None counts as zero. `p.grad` is not changed. If any gradient is not finite the step is not
    applied: parameters and state stay as they were, and `skipped_steps`, a 0-D tensor, counts it.

    Memory of a step beyond parameters, gradients and state: one batch of a bank (BATCH_BYTES) and its
    temporaries.
    """

    max_in_flight, chunk_size, free_grads = 3, None, False  # see DistMuonAdamW

    def __init__(self, param_groups, world=None, *, matmul_precision=None):
        self.world = world or World()
        self.matmul_precision = matmul_precision
        self._units = []  # the pieces of work, in the order of their collectives: a Bank, or a list of Rows
        self._chunks = []  # banks of sharded matrices, which go through the pipeline
        self._running = []  # generators of units whose collect is launched
        self._worlds = {}  # process group -> World
        self._kept = {}  # parameter -> {name of its state: Kept}
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
        units = {}
        for name, param, group in self._named():
            if not any(group is each for each in groups):
                continue
            if self.world.size == 1 and cuts(param):
                raise ValueError(f"{name} is sharded over {param.device_mesh}: DistMuonAdamW trains it")
            if self.world.size > 1 and not cuts(
                param
            ):  # a different seed per rank must not train different models
                mine = local(param)
                whole = mine.contiguous()
                dist.broadcast(whole, group=self.world.group, group_src=0)
                mine.copy_(whole)
            if group["kind"] != "muon":
                self._into_rows(units, param, group)
            elif param.numel():
                try:
                    self._into_bank(units, param, group)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        banks = [unit for unit in units.values() if isinstance(unit, Bank)]
        chunks = [chunk for bank in banks if bank.layout.dim for chunk in bank.chunks(self.chunk_size)]
        for bank in sorted(
            [bank for bank in banks if not bank.layout.dim] + chunks, key=lambda bank: -bank.flops
        ):
            bank.place()
            for param, entries in bank.state():
                self._kept[param] = {
                    key: kept for key, (_, kept) in zip(STATE["muon"], entries, strict=False)
                }
                entries = [(key, mine) for key, (mine, _) in zip(STATE["muon"], entries, strict=False)]
                self.state[param].update({key: mine for key, mine in entries if mine is not None})
        # groups in the order of the model: its last gradients come first
        self._units += [
            unit for unit in reversed(units.values()) if isinstance(unit, list) or not unit.layout.dim
        ]
        self._chunks += chunks

    def _world_of(self, group):
        if group not in self._worlds:
            self._worlds[group] = World.of(group, self.world.comm_dtype)
        return self._worlds[group]

    def _into_rows(self, units, param, group):
        """Large replicated parameters are cut over ranks; of the others each rank updates all that it
        holds.
        """
        whole, shape = not cuts(param), tuple(param.shape)
        if whole and self.world.size > 1 and param.numel() >= SMALL:
            piece = Rows(param, group, self.world, *self.world.share(len(param)), split=True)
            kept = Kept(shape, self.world.mesh(param), (Shard(0),))
        else:
            piece = Rows(param, group, self.world if whole else World())
            kept = Kept(shape) if whole else Kept(shape, param.device_mesh, param.placements)
        units.setdefault(param if piece.split else ("small", whole), []).append(piece)
        self._kept[param] = {"step": Kept(()), **dict.fromkeys(STATE[group["kind"]], kept)}
        self.state[param]["step"] = torch.zeros((), device=param.device)
        zeros = torch.zeros(piece.of(param).shape, dtype=state_dtype(param), device=param.device)
        self.state[param].update({key: zeros.clone() for key in STATE[group["kind"]]})

    def _into_bank(self, units, param, group):
        """A bank may mix lr, momentum, beta2, weight decay and scale, but not what changes the
        computation.
        """
        keys = ("coefficients", "ns_steps", "row_equilibrate", "renormalize", "split")
        options = {key: group[key] for key in keys}
        if not isinstance(options["coefficients"], str):
            options["coefficients"] = tuple(map(tuple, options["coefficients"]))
        batch = param.ndim == 3  # a bank by itself, cut over ranks like Shard(0)
        if options["split"] is not None:
            options["split"] = split_rows(options["split"], param.size(1 if batch else 0))
        at = layout(param, group["tensor_parallel"], options["split"], self.world, self._world_of)
        where = (
            bool(cuts(param)),
            at.world.group,
            at.dim,
            at.tp and (at.tp.world.group, at.tp.dim, at.tp.mode),
        )
        # Rows must stay rows for MuonEq and parts; else a matrix and a transposed one have transposed polar
        # factors.
        fixed = batch or where[0] or group["row_equilibrate"] or options["split"]
        forms = group["nesterov"], group["weight_decay_form"] == "cautious", group["beta2"] is not None
        key = (
            at.shape if fixed else tuple(sorted(at.shape)),
            batch and id(param),
            *options.values(),
            *forms,
            *where,
        )
        bank = units.setdefault((*key, param.dtype, param.device), Bank(at, options, *forms, param, []))
        bank.add(param, group, transposed=at.shape != bank.shape)

    # ---- the step

    @torch.no_grad()
    def step(self, closure=None, *, finite=True):
        """One update from the gradients in `p.grad`. Returns the closure's loss, if there is one.

        finite: False, or a 0-D tensor that is false, on any rank skips the step on all, as a gradient that is
        not finite does: for a loss that is known to be bad. A tensor is not read here.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        if self.matmul_precision is not None:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(self.matmul_precision)
        try:
            self._update(finite)
        finally:
            if self.matmul_precision is not None:
                torch.set_float32_matmul_precision(before)
        self.skipped_steps += self._ok == 0
        return loss

    def _update(self, told):
        if self.world.size == 1:  # one piece after the other: nothing to overlap, and the least memory
            self._ok = self._agree(told)
            for unit in self._units:
                for _ in self._advance(unit):
                    pass
            return
        with record_function("optimizer.collect"):
            while len(self._running) < len(self._units):
                self._launch()
        running, self._running = self._running, []
        self._ok = self._agree(told)
        chunks, flying = deque(self._chunks), deque()
        self._round(chunks, flying)  # the collect of the first chunk runs under the other pieces
        with record_function("optimizer.compute"):
            for (
                piece
            ) in running:  # compute, launch delivery; later collects and earlier deliveries are under way
                next(piece)
        while flying:
            self._round(chunks, flying)
        with record_function("optimizer.deliver"):
            for piece in running:  # write back
                next(piece, None)

    def _round(self, chunks, flying):
        """Admit one chunk to the pipeline and advance the earlier ones: its collect runs under their
        compute.
        """
        if chunks and len(flying) == self.max_in_flight:
            for _ in flying.popleft():  # to its end
                pass
        earlier = list(flying)
        if chunks:
            flying.append(self._sharded(chunks.popleft()))
            next(flying[-1])
        for piece in reversed(earlier):  # the oldest last: its delivery runs under the others' compute
            if next(piece, "done"):
                flying.remove(piece)

    @contextlib.contextmanager
    def overlap_backward(self):
        """Around the last micro-batch's backward: launches each piece's collect as soon as its gradients are
        there.

        Always in the order of the pieces, which all ranks share, whatever order autograd takes; step()
        launches the rest, and must follow before any gradient changes again. Does nothing in one process.
        """
        if self._running:
            raise RuntimeError(
                "overlap_backward: the collects of an earlier backward are in flight; call step() first"
            )
        pieces = [getattr(unit, "matrices", unit) for unit in self._units]
        missing = [{piece.param for piece in unit if not cuts(piece.param)} for unit in pieces]
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

    def _agree(self, told):
        """1 if every gradient on every rank is finite, else 0; a 0-D float64 tensor that is not read here."""
        # A sum is finite unless an element is not, or the sum overflows, as the squares in the update would
        # before it.
        grads = [gradient(param) for _, param, _ in self._named() if param.grad is not None]
        finite = [grad.sum(dtype=state_dtype(grad)).isfinite() for grad in grads]
        finite.append(torch.zeros_like(self.skipped_steps, dtype=torch.bool) | told)
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
        self._free(pieces)
        finish = self._deliver_rows(pieces)
        yield
        finish()

    def _collect_rows(self, pieces):
        """all_reduce of all small gradients together, or reduce_scatter of the rows of a large one."""
        if pieces[0].world.size == 1:
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
        param = local(pieces[0].param)
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
            hyper = self._hyper(bank, owned)  # (5, k, 1, 1)
            U = torch.empty_like(bank.momentum[lo:hi])  # (k, m, n)
            for i, grad in enumerate(grads(lo, hi)):
                momentum = bank.momentum[lo + i]
                run(muon_momentum, U[i], grad, momentum, hyper[:, i, :1], self._ok, nesterov=bank.nesterov)
            X, gain = self._direction(bank, U, lo, hi, hyper[2, :, :1])
            hyper = hyper[:, :, bank.part_of_row]
            for i, matrix in enumerate(owned):
                run(muon_update, matrix.of(matrix.param), X[i], gain[i], hyper[:, i], cautious=bank.cautious)
        del take, grads
        self._free(bank.matrices)
        finish = self._deliver_bank(bank)
        yield
        finish()

    def _sharded(self, chunk):
        """Momentum of the shards, direction at the owners, decay and update of the shards; all of a chunk at
        once.
        """
        at, dtype, owners = chunk.layout, chunk.momentum.dtype, [matrix.owner for matrix in chunk.matrices]
        with record_function("muon.collect"):
            hyper = self._hyper(chunk, chunk.matrices)  # (5, K, 1, 1)
            grads = torch.stack(
                [matrix.of(gradient(matrix.param)) for matrix in chunk.matrices]
            )  # (K, rows, columns)
            U = torch.empty_like(grads, dtype=self.world.comm_dtype or grads.dtype)
            run(muon_momentum, U, grads, chunk.momentum, hyper[:, :, :1], self._ok, nesterov=chunk.nesterov)
            self._free(chunk.matrices)
            wait, comm_dtype = to_owners(at, U, owners), U.dtype
            del grads, U
        yield
        with record_function("muon.compute"):
            X = wait().to(dtype)  # (k, m, n)
            weight = hyper[2, [owner == at.world.rank for owner in owners], :1]
            for lo, hi in chunk.batches():
                torch.mul(*self._direction(chunk, X[lo:hi], lo, hi, weight[lo:hi]), out=X[lo:hi])
            wait = to_shards(at, X.to(comm_dtype), owners)
            del X
        yield
        with record_function("muon.deliver"):
            params = [matrix.of(matrix.param) for matrix in chunk.matrices]
            P = torch.stack(params)
            run(
                muon_update,
                P,
                wait(),
                hyper.new_ones(1, 1, 1),
                hyper[:, :, chunk.part_of_row],
                cautious=chunk.cautious,
            )
            torch._foreach_copy_(params, P.unbind())

    def _hyper(self, bank, matrices):
        """(5, k, 1, 1) hyperparameters of matrices of a bank; (5, k, parts, 1) if they are fused."""
        heads, groups, rows = bank.options["split"] or (1, 1, bank.shape[:1])
        shapes = [(groups * each, bank.shape[1]) for each in rows]
        values = [[muon_hyper(m.group, *(s[::-1] if m.transposed else s)) for s in shapes] for m in matrices]
        return (
            (tensor(values, self._ok) * self._ok)
            .to(bank.momentum.dtype)
            .permute(2, 0, 1)[..., None]
            .contiguous()
        )

    def _direction(self, bank, U, lo, hi, weight):
        """`muon_direction` of owned matrices lo to hi: (k, m, n) and its gain, or this rank's part of
        them.
        """
        tp, second = bank.layout.tp, None if bank.second is None else bank.second[lo:hi]
        if tp is None or tp.mode == "blockwise":
            return run(muon_direction, U, second, weight, **bank.options)
        if tp.mode == "distributed":  # communicates inside, so it is not compiled
            return muon_direction(U, second, weight, **bank.options, tp=tp)
        X, gain = run(muon_direction, tp.gather(U), second, weight, **bank.options)
        return tp.mine(X), tp.mine(gain)

    def _free(self, pieces):
        for piece in pieces if self.free_grads else ():
            piece.param.grad = None

    def _collect_bank(self, bank):
        """reduce_scatter of the stacked bank by whole matrices, or reduce of each matrix to its owner."""
        if bank.layout.world.size == 1:
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
        if bank.layout.world.size == 1:
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
        """(slots, m, n) with value(param) of these matrices in their slots; the others are whatever was
        there.
        """
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
        """What this rank holds, without communication: {"state": {name: {key: tensor}}, "param_groups":
        [...]}.

        Tensors share memory with the optimizer's. Pieces are DTensors; what a rank owns alone is with it
        only.
        """
        state = {}
        for name, param, _ in self._named():
            if entry := self.state.get(param):
                state[name] = {key: self._kept[param][key].as_dtensor(mine) for key, mine in entry.items()}
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def full_state_dict(self):
        """The same with the whole of every tensor on every rank, as copies. Collective."""
        state = {}
        for name, param, _ in self._named():
            if kept := self._kept.get(param):
                mine = self.state.get(param, {})
                state[name] = {key: each.whole(mine.get(key), param) for key, each in kept.items()}
        return {"state": state, "param_groups": self.state_dict()["param_groups"]}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Restore state, whole or local, from any world size, group order or grouping.

        Hyperparameters stay as constructed and state keeps its dtype. ValueError, before anything is changed,
        for a name or key that is missing, a shape that differs, or parameters without names in other groups
        than the saved.
        """
        ours, theirs = (
            [g["names"] for g in groups] for groups in (self.param_groups, state_dict["param_groups"])
        )
        if ours != theirs and any(
            names == default_names(i, len(names)) for i, names in enumerate(ours) if names
        ):
            raise ValueError(
                "parameters without names load only into the same groups: give every group names=[...]"
            )
        copies = []
        for name, param, _ in self._named():
            for key, kept in self._kept.get(param, {}).items():
                mine, saved = self.state.get(param, {}).get(key), state_dict["state"].get(name, {}).get(key)
                if mine is not None and saved is None:
                    raise ValueError(f"the loaded state has no {key} of {name}")
                if saved is not None and tuple(saved.shape) != kept.shape:
                    raise ValueError(f"{key} of {name} has shape {tuple(saved.shape)}, expected {kept.shape}")
                if mine is not None or isinstance(
                    saved, DTensor
                ):  # other ranks may need this rank's piece of it
                    copies.append((mine, kept.mine(saved)))
        for mine, saved in copies:
            if mine is not None:
                mine.copy_(saved)


# ------------------------------------------------------------------------------------------------------------


class DistMuonAdamW(MuonAdamW):
    """The same over the ranks of a process group: gradients and state of replicated parameters are split
    (ZeRO-2), parameters that are themselves in pieces (DTensor: FSDP2, tensor parallelism) are worked on
    where they live.

    process_group: default the whole world; a world of one where torch.distributed is not initialized and
    torchrun did not start us. It holds the ranks of all device meshes. Every rank constructs it with the same
    groups. comm_dtype: of the reduction, and of both transfers of sharded matrices; default the gradient's
    own. free_grads: set `p.grad` to None as soon as it is used; otherwise it is not changed.
    matmul_precision: None, or highest | high | medium (torch.set_float32_matmul_precision) during the step.

    **Replicated parameters.** They are broadcast from rank 0, and the update uses the mean of `p.grad` over
    ranks. W ranks, parameters of R rows, banks of K same-shaped matrices:

      parameters                collect                             state on a rank         deliver
      AdamW, < 1024 elements    one all_reduce for all of them      all of it               nothing
      AdamW                     reduce_scatter                      ceil(R/W) rows          all_gather
      Muon                      reduce_scatter, whole matrices      ceil(K/W) matrices      all_gather
      Muon, 2K < W              reduce of each to its owner         of K ranks one each     broadcast from the owner

    A rank sends 2(W-1)/W times the parameter bytes a step, plus padding. Memory of a step beyond parameters,
    gradients and state: (1 + 1/W) times the padded bytes of what is in flight, which is everything (AdamW
    rows that divide by W are sent from `p.grad` and received in the parameter, so they count 1/W), one batch
    of a bank, its temporaries. After every step all ranks hold bitwise the same parameters; a world of one
    does what MuonAdamW does.

    **Parameters in pieces.** A DTensor that is not cut anywhere counts as replicated. Otherwise its gradient
    is final over its mesh and nothing is averaged again. Momentum and AdamW's moments are cut like the
    parameter. The mesh dimension called "tp" is tensor parallelism, any other that cuts is data parallelism;
    W ranks of the latter:

      parameters                collect                             second moment           deliver
      AdamW                     nothing                             pieces                  nothing
      Muon, (E, m, n) by E      nothing                             pieces                  nothing
      Muon                      all_to_all of momentum shards       whole, at the owner     all_to_all of update shards

    The last row goes through a pipeline: one chunk of same-shaped matrices is admitted a round, so that its
    collect runs under the compute of the one before; the first one's runs under the AdamW groups and the
    experts. A rank sends 2(W-1)/W times the bytes of its shards. chunk_size: matrices in a chunk (default:
    about CHUNK_BYTES of them on each owner). max_in_flight: chunks that hold buffers at once, each what it
    sends and what it receives; 3 hide both transfers, 2 the collect, 1 nothing.

    tensor_parallel (of a Muon group) says how T ranks orthogonalize an (m, n) matrix cut by rows or columns;
    s and l are its short and its long side:

      mode          default where               sent by a rank                  computed by a rank       result
      distributed   the long side is cut, or    2(T-1)/T s^2 a step, twice      products with X: 1/T,    the whole
                    a square                    in all in Gram form             of s x s: all of them    matrix's
      duplicated    the short side is cut, or   (T-1)/T l s                     all of it                the whole
                    the rows of fused parts                                                              matrix's
      blockwise     never                       nothing                         its block: 1/T or less   each block's

    `distributed` falls back to `duplicated` where that is the default.
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
        matmul_precision=None,
    ):
        world = World(comm_dtype=comm_dtype)
        if dist.is_initialized():
            world = World.of(process_group or dist.group.WORLD, comm_dtype)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "torchrun started several processes: call torch.distributed.init_process_group first"
            )
        if max_in_flight < 1 or chunk_size is not None and chunk_size < 1:
            raise ValueError(f"{max_in_flight=} and {chunk_size=} must be at least 1")
        self.max_in_flight, self.chunk_size, self.free_grads = max_in_flight, chunk_size, free_grads
        super().__init__(param_groups, world, matmul_precision=matmul_precision)


# ------------------------------------------------------------------------------------------------------------


def tensor(values, like):
    """A float64 tensor on the device of `like`; the copy to a GPU does not wait for it."""
    return torch.tensor(values, dtype=torch.float64).to(like.device, non_blocking=True)
