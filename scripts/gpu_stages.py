"""The stages of scripts/gpu_check. Each tries one thing on the device and says what it found, line by line.

    python -m scripts.gpu_stages numerics --device cuda   # one stage by itself, as gpu_check starts it

A stage is a function of a Place and its Lines, without a return value; its docstring's first line is what
`gpu_check --list` shows. It runs in a process of its own, so it may crash, hang or run out of memory. What is
smaller on a CPU than on a GPU is so because a CPU has three minutes for all stages.
"""

import argparse
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nanomuon import attention, footprint, fp8, parallel, recipe, runtime, schedule, sizing
from nanomuon.compilation import compile_model
from nanomuon.export import whole_tensor
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import (
    DistMuonAdamW,
    MuonAdamW,
    adamw_update,
    all_gather_single,
    muon_direction,
    muon_momentum,
    muon_update,
    named_parameters,
    reduce_scatter_single,
)
from nanomuon.optim import run as run_kernel
from nanomuon.orthogonalize import COEFFICIENTS, newton_schulz_form
from nanomuon.param_groups import build_param_groups
from nanomuon.runtime import InputError, Runtime
from scripts import base_train
from scripts.optim_bench import compilation

ROOT = Path(__file__).resolve().parents[1]

# How far a figure may be off, with where the number comes from
FLOAT64 = 1e-9  # sums in another order; a wrong formula is off by 1e-3 and more
# Elementwise kernels: a few roundings of 6e-8 of the parameter, and its update is 100 times less
FLOAT32 = 1e-5
# Five steps in float32; in bf16 or float16: measured 4e-3 to 9e-3 on CPUs
POLAR = {"cpu": 1e-4, "cuda": 3e-2}
# Updates of ten steps: in half precision the errors of ten polar factors, which partly average out
UPDATES = {"cpu": 1e-3, "cuda": 3e-2}
GRADIENTS = {"cpu": 1e-4, "cuda": 5e-2}  # of a two-layer model in float32, and in bf16
ATTENTION = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # largest error over the largest entry
# Products of Gaussian matrices: rounding changes an entry by 0.026 of itself on average in e4m3 (3 bits of
# mantissa) and by 0.052 in e5m2 (2 bits), and the changes of both factors add up like independent ones
FP8, FP8_GRADIENTS = 0.05, 0.08
# Of the loss in nats: in float32 and another order of sums, and in bf16 with its half-precision Muon
FIRST_TEN = {"cpu": 1e-4, "cuda": 1e-2}
LAST_TEN = {"cpu": 2e-2, "cuda": 5e-2}  # 100 steps on, rounding has become another run of the same quality

MFU = 0.40  # at depth 12, of the device's peak
TIMES_FLOOR = 1.3  # the optimizer's whole step

GRACE = 10  # seconds that ranks have to end when another has failed


@dataclass(frozen=True)
class Place:
    """Where a stage works."""

    device: torch.device
    ranks: int  # of the stages that use several: one for each GPU, two on a CPU
    folder: Path  # for what stages write and share, NANOMUON_BASE_DIR of what they start

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def sized(self, on_gpu, on_cpu):
        """The first on a GPU, the second on a CPU."""
        return on_gpu if self.on_gpu else on_cpu


class Lines:
    """What a stage finds. Every line is in the file as soon as it is known: what follows may crash."""

    def __init__(self, file: Path):
        self.file = file

    def add(self, name: str, result: str, found: str, allowed: str = "") -> None:
        """result: PASS, FAIL, skipped, or "" for a figure that is neither right nor wrong."""
        line = {"name": name, "result": result, "found": found, "allowed": allowed}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{result or 'figure':7} {name}: {found} {allowed}", flush=True)

    def check(self, name: str, passed: bool, found: str, allowed: str = "") -> None:
        self.add(name, "PASS" if passed else "FAIL", found, allowed)

    def at_most(self, name: str, value: float, limit: float) -> None:
        """PASS where value <= limit; not for NaN."""
        self.check(name, value <= limit, f"{value:.3g}", f"at most {limit:.3g}")

    def skip(self, name: str, reason: str) -> None:
        self.add(name, "skipped", reason)

    def figure(self, name: str, found: str) -> None:
        self.add(name, "", found)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected, in float64 on the CPU."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def largest(values) -> float:
    """The largest of some numbers; infinity where one is NaN, which max() may pass over."""
    return max(math.inf if math.isnan(value) else value for value in values)


def worst_of(errors: dict[str, float]) -> tuple[str, float]:
    """The name with the largest error, and that."""
    found = largest(errors.values())
    return next(name for name, error in errors.items() if error == found or math.isnan(error)), found


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers in float32, drawn on the CPU: the same on every machine."""
    return torch.randn(*shape, generator=seeded(seed)) * scale


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


# ------------------------------------------------------------------------------------------------------------
# The device


def device(place: Place, lines: Lines) -> None:
    """The device computes, and compiles. Without it no other stage is tried."""
    if place.on_gpu:
        torch.cuda.init()  # says why it cannot, with the versions of driver and CUDA
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            capability = f"{properties.major}.{properties.minor}"
            lines.figure(
                f"GPU {index}",
                f"{properties.name}, capability {capability}, {total / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} free, {properties.multi_processor_count} multiprocessors",
            )
    left, right = random(256, 256), random(256, 256, seed=1)
    for index in range(torch.cuda.device_count() if place.on_gpu else 1):
        where = torch.device("cuda", index) if place.on_gpu else place.device
        product = left.to(where) @ right.to(where)
        lines.at_most(f"matrix product on {where}", distance(product, left.double() @ right.double()), 1e-3)
    if place.on_gpu:
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        lines.figure("bf16", "multiplied natively" if bf16 else "not native: training is in float32")

    def wave(x):
        return torch.sin(x) * 2 + 1

    try:
        found = torch.compile(wave, dynamic=False)(left.to(place.device))
        lines.at_most("compiled kernel", distance(found, wave(left.double())), 1e-5)
    except Exception as error:  # no compiler, no Python.h, no Triton: every one has an error of its own
        lines.check("compiled kernel", False, first_line(error))


# ------------------------------------------------------------------------------------------------------------
# Kernels against float64, from the formulas


def numerics(place: Place, lines: Lines) -> None:
    """Every kernel of the optimizer against float64: AdamW, momentum, polar factor, update."""
    side = place.sized(768, 96)
    shapes = [(2, side, side), (2, side, 4 * side), (2, 4 * side, side)]
    for shape in shapes:
        check_direction(f"polar factor {shape[1:]} in float64", shape, torch.float64, FLOAT64, place, lines)
    for compiles in (False, True):
        how = "compiled" if compiles else "eager"
        with compilation(compiles):
            check_adamw(how, place, lines)
            check_momentum_and_update(how, place, lines)
            checked = shapes
            if compiles and not place.on_gpu:
                checked = shapes[1:2]  # a CPU compiles slowly
            for shape in checked:
                precision = "float32"
                if place.on_gpu:
                    gram, _ = newton_schulz_form(*shape[1:], steps=5, device_type="cuda")
                    precision = "float16 Gram" if gram else "bf16"
                name = f"polar factor {shape[1:]} in {precision}, {how}"
                check_direction(name, shape, torch.float32, POLAR[place.device.type], place, lines)
    check_fp8(place, lines)


def check_fp8(place: Place, lines: Lines) -> None:
    """The products of --fp8 and their gradients; on a CPU rounded as on a GPU, and multiplied in float32."""
    if place.on_gpu and torch.cuda.get_device_capability() < fp8.CAPABILITY:
        lines.skip("fp8", "needs a GPU of capability 8.9 or more")
        return
    try:
        product = fp8.training_product(emulate=not place.on_gpu)
    except InputError as error:
        lines.skip("fp8", str(error))
        return
    x, weight, grad = random(512, 256), random(384, 256, seed=1), random(512, 384, seed=2)
    on_device = []
    for tensor in (x, weight, grad):
        on_device.append(tensor.to(place.device, torch.bfloat16))
    x8, weight8, grad8 = on_device
    out = product(x8.requires_grad_(), weight8.requires_grad_())
    out.backward(grad8)
    x, weight, grad = x.double(), weight.double(), grad.double()
    lines.at_most("fp8 product", distance(out, x @ weight.mT), FP8)
    gradients = [distance(x8.grad, grad @ weight), distance(weight8.grad, grad.mT @ x)]
    lines.at_most("fp8 product's gradients", largest(gradients), FP8_GRADIENTS)


def check_adamw(how: str, place: Place, lines: Lines) -> None:
    shape, t, lr, beta1, beta2, eps, decay = (1000, 256), 3, 1e-3, 0.8, 0.95, 1e-6, 0.1
    P, G = random(*shape, scale=0.02), random(*shape, seed=1)
    M, V = random(*shape, seed=2, scale=0.1), random(*shape, seed=3).square()
    # Loshchilov and Hutter, arXiv 1711.05101
    M64 = beta1 * M.double() + (1 - beta1) * G.double()
    V64 = beta2 * V.double() + (1 - beta2) * G.double() ** 2
    P64 = P.double() * (1 - lr * decay)
    P64 = P64 - lr * (M64 / (1 - beta1**t)) / ((V64 / (1 - beta2**t)).sqrt() + eps)

    rates = dict(
        step_size=lr / (1 - beta1**t),
        rescale=(1 - beta2**t) ** -0.5,
        grad_weight=1 - beta1,
        square_weight=1 - beta2,
        decay=lr * decay,
        eps=eps,
    )
    rates = {name: torch.tensor(value, device=place.device) for name, value in rates.items()}
    param, grad, exp_avg, exp_avg_sq = (x.to(place.device, copy=True) for x in (P, G, M, V))
    run_kernel(adamw_update, param, grad, exp_avg, exp_avg_sq, torch.ones((), device=place.device), **rates)
    lines.at_most(f"AdamW update, {how}", distance(param.cpu() - P, P64 - P), FLOAT32)
    worst = largest([distance(exp_avg, M64), distance(exp_avg_sq, V64)])
    lines.at_most(f"AdamW moments, {how}", worst, FLOAT32)

    before = [x.clone() for x in (param, exp_avg, exp_avg_sq)]
    grad.fill_(math.nan)
    run_kernel(adamw_update, param, grad, exp_avg, exp_avg_sq, torch.zeros((), device=place.device), **rates)
    same = all(map(torch.equal, before, (param, exp_avg, exp_avg_sq)))
    lines.check(f"AdamW leaves everything alone where a gradient is NaN, {how}", same, str(same))


def check_momentum_and_update(how: str, place: Place, lines: Lines) -> None:
    shape, mu, lr, scale, decay = (2, 256, 96), 0.95, 0.02, 1.5, 0.2
    P, G, M = random(*shape, scale=0.02), random(*shape, seed=1), random(*shape, seed=2)
    M64 = mu * M.double() + (1 - mu) * G.double()
    U64 = (1 - mu) * G.double() + mu * M64  # Nesterov
    X = random(*shape, seed=3, scale=0.06)
    kept = P.double() * (X.double() * P.double() >= 0)  # cautious: decay only what the update shrinks, too
    P64 = P.double() - lr * scale * (X.double() + decay * kept)

    def number(value):
        return torch.full((2, 1, 1), value, device=place.device)

    param, grad, buffer, direction = (x.to(place.device, copy=True) for x in (P, G, M, X))
    weights = dict(momentum=number(mu), grad_weight=number(1 - mu), nesterov=True)
    U = run_kernel(muon_momentum, grad, buffer, number(1.0), **weights)
    lines.at_most(f"momentum, {how}", largest([distance(U, U64), distance(buffer, M64)]), FLOAT32)
    rates = dict(lr=number(lr), scale=number(scale), weight_decay=number(decay), cautious=True)
    run_kernel(muon_update, param, direction, number(1.0), number(1.0), **rates)
    lines.at_most(f"Muon update, {how}", distance(param.cpu() - P, P64 - P), FLOAT32)


def check_direction(name: str, shape, dtype, tolerance: float, place: Place, lines: Lines) -> None:
    """Polar Express and variance reduction. dtype: of momentum and state; what is iterated in follows it."""
    beta2 = 0.95
    k, m, n = shape
    U = random(*shape)
    V = (1 + random(k, m, 1) ** 2 if m >= n else 1 + random(k, 1, n) ** 2) / max(m, n)
    polar, X64, V64 = reference_direction(U.double(), V.double(), beta2)
    second = V.to(place.device, dtype, copy=True)
    weight = torch.full((k, 1, 1), 1 - beta2, device=place.device, dtype=dtype)
    options = dict(coefficients="polar_express", ns_steps=5, row_equilibrate=False, renormalize=False)
    X, gain = run_kernel(muon_direction, U.to(place.device, dtype), second, weight, **options)
    error = largest([distance(X, polar), distance(X.to(dtype) * gain, X64), distance(second, V64)])
    lines.at_most(name, error, tolerance)
    if dtype == torch.float64 and m != n:  # square ones have values near zero, which five steps do not raise
        values = torch.linalg.svdvals(X.cpu())
        low, high = values.min().item(), values.max().item()
        inside = 0.7 <= low and high <= 1.2
        lines.check(f"its singular values {shape[1:]}", inside, f"{low:.3f} to {high:.3f}", "0.7 to 1.2")


def reference_direction(U, V, beta2):
    """(polar factor, direction, second moment) in float64. arXiv 2505.16932 and 2510.05491."""
    m, n = U.shape[1:]
    X = U / (1.02 * torch.linalg.matrix_norm(U, keepdim=True) + 1e-6)
    for a, b, c in COEFFICIENTS["polar_express"]:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    squares = (X**2).mean(dim=2 if m >= n else 1, keepdim=True)
    V = beta2 * V + (1 - beta2) * squares
    scaled = X / V.sqrt()
    norm, scaled_norm = (torch.linalg.matrix_norm(x, keepdim=True) for x in (X, scaled))
    return X, scaled * norm / scaled_norm, V


# ------------------------------------------------------------------------------------------------------------
# The optimizer and the model against the CPU


def optimizer(place: Place, lines: Lines) -> None:
    """Ten steps of MuonAdamW on the device against float64 on the CPU, compiled and eager."""
    config = GPTConfig.from_depth(place.sized(4, 2), vocab_size=1024, seq_len=64)
    parameters = {name: random(*p.shape, seed=i, scale=0.02) for i, (name, p) in enumerate(meta(config))}
    expected = optimized(config, parameters, torch.device("cpu"), torch.float64)
    kinds = {name: group["kind"] for group in expected.param_groups for name in group["names"]}
    expected = weights_of(expected)
    for compiles in place.sized((False, True), (False,)):  # a CPU compiles slowly, and `numerics` has it
        how = "compiled" if compiles else "eager"
        with compilation(compiles):
            ours = optimized(config, parameters, place.device, torch.float32)
            found = weights_of(ours)
            for kind, tolerance in (("muon", UPDATES[place.device.type]), ("adamw", 1e-3)):
                errors = {}
                for name, before in parameters.items():
                    if kinds[name] == kind:
                        errors[name] = distance(found[name].cpu() - before, expected[name] - before)
                worst, error = worst_of(errors)
                lines.at_most(f"updates of {kind}, {how}, worst {worst}", error, tolerance)
            for param in ours.param_groups[0]["params"]:
                param.grad = torch.full_like(param, math.inf)
            ours.step()
            unchanged = all(torch.equal(w, found[name]) for name, w in weights_of(ours).items())
            skipped = int(ours.skipped_steps)
            lines.check(
                f"a step with infinite gradients changes nothing, {how}",
                unchanged and skipped == 1,
                f"unchanged: {unchanged}, skipped steps: {skipped}",
            )
    moved = optimized(config, parameters, torch.device("cpu"), torch.float32, steps=0)
    moved.load_state_dict(ours.state_dict())
    devices = {tensor.device.type for entry in moved.state.values() for tensor in entry.values()}
    lines.check("its state loads on the CPU", devices == {"cpu"}, str(sorted(devices)))


def meta(config: GPTConfig):
    """(name, parameter) of a model that holds no memory."""
    with torch.device("meta"):
        return list(GPT(config).named_parameters())


def optimized(config, parameters, device, dtype, steps=10) -> MuonAdamW:
    """An optimizer that has made these steps with gradients that are the same everywhere."""
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device).to(dtype)
    for name, param in model.named_parameters():
        param.data.copy_(parameters[name])
    muon = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.1)
    adamw = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    ours = MuonAdamW(build_param_groups(model, muon=muon, adamw=adamw))
    for step in range(steps):
        for i, param in enumerate(model.parameters()):
            param.grad = random(*param.shape, seed=1000 * (step + 1) + i).to(device, dtype)
        ours.step()
    return ours


def weights_of(ours: MuonAdamW) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param, _ in named_parameters(ours.param_groups)}


def model(place: Place, lines: Lines) -> None:
    """Loss and gradients of a small GPT on the device against float64 on the CPU, compiled and eager."""
    depth = place.sized(2, 1)
    config = GPTConfig(vocab_size=512, seq_len=128, depth=depth, width=128, heads=2, kv_heads=1)
    tokens = torch.randint(512, (4, 129), generator=seeded(0))
    cpu = torch.device("cpu")
    expected_loss, expected = loss_and_gradients(config, tokens, cpu, torch.float64, False)
    compute_dtype = torch.float32
    if place.on_gpu and torch.cuda.is_bf16_supported(including_emulation=False):
        compute_dtype = torch.bfloat16
    cases = [(torch.float64, False, 1e-8), (compute_dtype, False, GRADIENTS[place.device.type])]
    cases.append((compute_dtype, True, GRADIENTS[place.device.type]))
    for dtype, compiles, tolerance in cases:
        name = f"{str(dtype).removeprefix('torch.')}, {'compiled' if compiles else 'eager'}"
        loss, found = loss_and_gradients(config, tokens, place.device, dtype, compiles)
        lines.at_most(f"loss in {name}", abs(loss - expected_loss) / expected_loss, tolerance / 100)
        errors = {key: distance(found[key], expected[key]) for key in expected}
        worst, error = worst_of(errors)
        lines.at_most(f"gradients in {name}, worst {worst}", error, tolerance)


def loss_and_gradients(config, tokens, device, dtype, compiles):
    """(loss, {name: gradient}). dtype: of the activations; weights are float32 below float64."""
    # On the CPU first: devices draw other weights from the same seed, and round the rotary tables otherwise
    gpt = parallel.build_model(config, Runtime(torch.device("cpu"), dtype), seed=0)
    with torch.no_grad():
        for i, param in enumerate(gpt.parameters()):  # some start at zero, and their inputs without gradients
            param += random(*param.shape, seed=i, scale=0.02)
    gpt.to(device, torch.float64 if dtype == torch.float64 else None)
    forward = compile_model(gpt, None) if compiles else gpt
    inputs = tokens.to(device)
    loss = forward(inputs[:, :-1].contiguous(), inputs[:, 1:].contiguous())
    loss.backward()
    return loss.item(), {name: param.grad for name, param in gpt.named_parameters()}


def attention_backends(place: Place, lines: Lines) -> None:
    """Every attention backend against float64, with milliseconds forward and backward."""
    dtype = place.sized(torch.bfloat16, torch.float32)
    rows, T, H, D = place.sized((8, 2048, 6, 128), (1, 256, 2, 64))
    windows = [None, T // 2, T // 4]
    measured = attention.measure(rows, T, H, H, D, windows, place.device, dtype, place.on_gpu)
    T = min(T, 512)
    for implementation, by_window in measured.items():
        attention.use_flash_implementation(implementation)
        for window, by_backend in by_window.items():
            short = None if window is None else T // (2 * windows[1] // window)
            for backend, ms in by_backend.items():
                name = f"{backend}{f' {implementation}' if implementation else ''}, "
                name += f"window {window} of {2 * windows[1]}" if window else "full"
                if isinstance(ms, str):
                    wrong = ms.startswith("wrong")
                    required = backend == "sdpa" and implementation is None
                    if wrong or required:
                        lines.check(name, False, ms)
                    else:
                        lines.skip(name, ms)
                    continue
                error = attention_error(backend, T, H, D, short, place.device, dtype)
                limit = ATTENTION[dtype]
                lines.check(name, error <= limit, f"off by {error:.2g}; {ms:.2f} ms", f"at most {limit:g}")
    attention.use_flash_implementation(None)


def attention_error(backend: str, T, H, D, window, device, dtype) -> float:
    """Largest error of output and gradients over their largest entries, against float64 on the CPU.

    Two query heads read one key head.
    """
    heads = (H, H // 2, H // 2, H)
    q, k, v, grad = (random(1, T, h, D, seed=i).to(dtype) for i, h in enumerate(heads))
    function = getattr(attention, backend)
    if backend == "flex":
        attention.make_block_mask(T, window, device)
    inputs = [x.to(device).requires_grad_() for x in (q, k, v)]
    out = function(*inputs, window)
    found = [out, *torch.autograd.grad(out, inputs, grad.to(device))]

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    q64, k64, v64 = exact[0], exact[1].repeat_interleave(2, dim=2), exact[2].repeat_interleave(2, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q64, k64) / D**0.5
    i, j = torch.arange(T)[:, None], torch.arange(T)
    hidden = (j > i) | (i - j >= (window or T))
    out64 = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -math.inf).softmax(-1), v64)
    expected = [out64, *torch.autograd.grad(out64, exact, grad.double())]
    errors = []
    for ours, right in zip(found, expected, strict=True):
        errors.append(((ours.cpu().double() - right).abs().max() / right.abs().max()).item())
    return largest(errors)


# ------------------------------------------------------------------------------------------------------------
# Several devices


def replicated(place: Place, lines: Lines) -> None:
    """DistMuonAdamW on every device against one process: exactly, and in a run of base_train."""
    layout(place, lines, "replicated", tensor_parallel=1)


def fsdp(place: Place, lines: Lines) -> None:
    """The same in pieces: FSDP2."""
    layout(place, lines, "fsdp", tensor_parallel=1)


def tensor_parallel(place: Place, lines: Lines) -> None:
    """The same with matrices that two devices share."""
    layout(place, lines, "tensor_parallel", tensor_parallel=2)


def fsdp_and_tensor_parallel(place: Place, lines: Lines) -> None:
    """The same with both, on a mesh."""
    layout(place, lines, "fsdp_and_tensor_parallel", tensor_parallel=2)


LAYOUT_FLAGS = {
    "replicated": [],
    "fsdp": ["--shard", "fsdp"],
    "tensor_parallel": ["--tensor-parallel", "2"],
    "fsdp_and_tensor_parallel": ["--shard", "fsdp", "--tensor-parallel", "2"],
}


def layout(place: Place, lines: Lines, name: str, tensor_parallel: int) -> None:
    needed = {"replicated": 1, "fsdp_and_tensor_parallel": 4}.get(name, 2)
    if place.ranks < needed or place.ranks % tensor_parallel:
        kind = place.sized("GPUs", "processes")
        lines.skip(name, f"needs {needed} {kind} or a multiple of {tensor_parallel}, here are {place.ranks}")
        return
    if place.ranks > 1:
        one_process_run(place)  # before the ranks, which share its tokenizer
    command = [*own_command(place), "--rank-of", name, "--lines", str(lines.file)]
    codes, output = start(place, command, ranks=place.ranks)
    print(output)
    lines.check("every process ends well", set(codes) == {0}, f"exit codes {codes}")


def rank_of_layout(place: Place, lines: Lines, name: str) -> None:
    """What one rank does in a stage for several devices. The first one compares."""
    here = runtime.start()
    if not dist.is_initialized():  # a single process trains without one
        dist.init_process_group("nccl" if place.on_gpu else "gloo", rank=0, world_size=1)
    tensor_parallel = 2 if "tensor_parallel" in name else 1
    # Rows of embeddings and matrices do not divide by the ranks; heads do by tensor_parallel
    config = GPTConfig(vocab_size=67, seq_len=32, depth=3, width=18, heads=3, kv_heads=3)
    if tensor_parallel > 1:
        config = GPTConfig(vocab_size=67, seq_len=32, depth=3, width=16, heads=4, kv_heads=2)
    mesh, data_rank, data_ranks = None, here.rank, here.world_size
    if name != "replicated":
        data_ranks = here.world_size // tensor_parallel
        mesh = parallel.device_mesh(here.device.type, data_ranks, tensor_parallel)
        data_rank = mesh.get_local_rank("dp")
    check_collectives(here, lines)
    batches = []
    for step in range(5):
        batches.append(torch.randint(67, (4 * here.world_size, 33), generator=seeded(step)).to(here.device))
    mine = [batch.chunk(data_ranks)[data_rank] for batch in batches]
    found = trained_exactly(config, here.device, mine, DistMuonAdamW, mesh, "fsdp" in name)
    if here.rank == 0:
        alone = trained_exactly(config, here.device, batches, MuonAdamW)
        errors = {key: distance(found[key], alone[key]) for key in alone}
        worst, error = worst_of(errors)
        words = f"5 steps in float64, {here.world_size} processes against one, worst {worst}"
        lines.at_most(words, error, FLOAT64)
    if here.world_size == 1:
        return
    run = f"layout-{name}"
    flags = training_flags(place, run, data_ranks, steps=steps_of_layouts(place))
    with mock.patch.object(base_train, "start", lambda: here):  # whose process group is there already
        base_train.main([*flags, *LAYOUT_FLAGS[name]])
    if here.rank == 0:
        compare_losses(losses(place, run), losses(place, "one"), place, lines)


def steps_of_layouts(place: Place) -> int:
    return place.sized(100, 30)


def check_collectives(here: Runtime, lines: Lines) -> None:
    """The transfers that the optimizer uses, with results that are known beforehand."""
    ranks, mine = here.world_size, here.rank + 1
    ones = torch.ones(ranks, 1000, device=here.device)
    total = ranks * (ranks + 1) / 2
    mean, part, whole = ones * mine, ones[:1] * 0, ones * 0
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    reduce_scatter_single(part, ones * mine)
    all_gather_single(whole, ones[:1] * mine)
    expected_whole = torch.arange(1.0, ranks + 1, device=here.device)[:, None] * ones
    right = {
        "all_reduce": bool((mean == total / ranks).all()),
        "reduce_scatter": bool((part == total).all()),
        "all_gather": torch.equal(whole, expected_whole),
    }
    wrong = [name for name, is_right in right.items() if not is_right]
    answers = [None] * ranks
    dist.all_gather_object(answers, wrong)
    if here.rank == 0:
        words = f"wrong by rank: {answers}" if any(answers) else "right on every rank"
        lines.check(f"{dist.get_backend()}: {', '.join(right)}", not any(answers), words)


def trained_exactly(config, device, batches, optimizer_class, mesh=None, in_pieces=False) -> dict:
    """{name: whole weight} after steps in float64. batches: a step's rows (rows, 33) of this rank."""
    torch.set_default_dtype(torch.float64)
    gpt = parallel.build_model(config, Runtime(device, torch.float64), 0, mesh, in_pieces)
    torch.set_default_dtype(torch.float32)
    # The sign mask of cautious decay would turn a rounding into a difference
    muon = dict(lr=0.02, momentum=0.9, ns_steps=5, beta2=0.95, weight_decay=0.1)
    muon["weight_decay_form"] = "decoupled"
    adamw = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    ours = optimizer_class(build_param_groups(gpt, muon=muon, adamw=adamw))
    for batch in batches:
        gpt(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()).backward()
        if mesh is not None and not in_pieces:
            parallel.average_gradients(gpt, mesh)
        ours.step()
        ours.zero_grad()
    weights = {}
    for key, value in gpt.state_dict().items():
        weights[key] = whole_tensor(value) if isinstance(value, DTensor) else value.clone()
    return weights


# ------------------------------------------------------------------------------------------------------------
# Whole runs of base_train, in processes of their own


def own_command(place: Place) -> list[str]:
    """What starts this module again for the same place; the name of a stage is still missing."""
    command = [sys.executable, "-m", "scripts.gpu_stages", "--device", place.device.type]
    return [*command, "--ranks", str(place.ranks), "--folder", str(place.folder)]


def environment_of(place: Place, device_type: str, ranks: int = 1) -> dict[str, str]:
    """For a child: everything it writes goes to the place's folder."""
    environment = {**os.environ, "NANOMUON_BASE_DIR": str(place.folder), "PYTHONUNBUFFERED": "1"}
    if device_type == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "NANOMUON_DEVICE": "cpu"}
        environment["OMP_NUM_THREADS"] = str(max(1, runtime.cores() // ranks))
        environment["OMP_WAIT_POLICY"] = "passive"
    return environment


def start(place, command, ranks=1, device_type=None, kill_when=None) -> tuple[list[int], str]:
    """Run a command as so many ranks to its end; returns their exit codes and what they printed.

    Where one rank fails, the others are killed GRACE later. kill_when: as soon as this is true, all of them
    are, with SIGKILL. Nobody outlives this process's group, which gpu_check kills at its time limit.
    """
    device_type = device_type or place.device.type
    environment = environment_of(place, device_type, ranks)
    if ranks > 1 or "--rank-of" in command:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    with tempfile.TemporaryFile("w+") as output:
        for rank in range(ranks):
            if ranks > 1:
                mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                environment |= {name: str(value) for name, value in mine.items()}
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
        deadline = math.inf
        while any(process.poll() is None for process in processes):
            time.sleep(0.05)
            failed = any(process.poll() not in (None, 0) for process in processes)
            if failed and deadline == math.inf:
                deadline = time.monotonic() + GRACE
            if time.monotonic() > deadline or (kill_when is not None and kill_when()):
                for process in processes:
                    process.kill()
                for process in processes:
                    process.wait()
        output.seek(0)
        return [process.returncode for process in processes], output.read()


def write_texts(place: Place) -> Path:
    """A corpus that every machine has: modules of Python's standard library, 4 MB at most."""
    folder = place.folder / "texts"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=place.folder) as temporary:
        texts, size = Path(temporary, "texts"), 0
        texts.mkdir()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = file.read_text(errors="replace")
            size += len(text)
            if size > 4_000_000:
                break
            (texts / f"{file.stem}.txt").write_text(text)
        texts.rename(folder)
    return folder


def data_flags(place: Place, vocab_size: int) -> list[str]:
    return ["--corpus", f"path:{write_texts(place)}", "--vocab-size", str(vocab_size)]


def training_flags(
    place: Place, run: str, parts: int = 1, compiles: bool | None = None, steps: int = 100
) -> list[str]:
    """Some steps of a small model with full attention.

    parts: micro-steps or ranks that share the rows of a step, which divide by 2 and by the place's ranks.
    """
    depth, context = place.sized((4, 256), (2, 64))
    rows = math.lcm(16, place.ranks)
    if compiles is None:
        compiles = place.on_gpu
    flags = ["--run", run, *data_flags(place, 1024), "--depth", depth, "--max-seq-len", context]
    flags += ["--device-batch-size", rows // parts, "--total-batch-size", rows * context]
    flags += ["--window-pattern", "L", "--num-iterations", steps, "--resume", "never"]
    flags += ["--eval-every", -1, "--save-every", -1, "--dtype", place.sized("auto", "float32")]
    # The recipe raises its rates in so short a run, and rounding grows with them: here it trains at its own
    lr_scale, decay_scale = schedule.horizon_lr_scale(steps), schedule.horizon_decay_scale(steps)
    for name, value in recipe.param_groups.__kwdefaults__.items():
        scale = decay_scale if name == "weight_decay" else lr_scale
        flags += ["--" + name.replace("_", "-"), value / scale]
    flags.append("--compile" if compiles else "--no-compile")
    return [str(flag) for flag in flags]


def base_train_command(flags: list[str]) -> list[str]:
    return [sys.executable, "-m", "scripts.base_train", *flags]


def metrics(place: Place, run: str) -> list[dict]:
    """The whole lines of a run's metrics.jsonl that are of training steps."""
    file = place.folder / "runs" / run / "metrics.jsonl"
    rows = []
    if file.exists():
        for line in file.read_text().split("\n")[:-1]:
            rows.append(json.loads(line))
    return [row for row in rows if "train_loss" in row]


def losses(place: Place, run: str) -> list[float]:
    return [row["train_loss"] for row in metrics(place, run)]


def one_process_run(place: Place) -> tuple[int, str]:
    """The run `one`, which others are compared with: made by the first stage that needs it."""
    steps = steps_of_layouts(place)
    if len(losses(place, "one")) == steps:
        return 0, "was there"
    [code], output = start(place, base_train_command(training_flags(place, "one", steps=steps)))
    print(output)
    return code, output


def compare_losses(found: list[float], expected: list[float], place: Place, lines: Lines) -> None:
    """Two runs of a layout's steps: the first ten one by one, the last ten on average."""
    steps, device_type = steps_of_layouts(place), place.device.type
    if len(found) != steps or len(expected) != steps:
        lines.check(f"{steps} steps", False, f"{len(found)} steps, of one process {len(expected)}")
        return
    first_ten = largest(abs(a - b) for a, b in zip(found[:10], expected[:10], strict=True))
    lines.at_most("losses of the first ten steps against one process", first_ten, FIRST_TEN[device_type])
    last_ten = abs(sum(found[-10:]) - sum(expected[-10:])) / 10
    lines.at_most("mean loss of the last ten against one process", last_ten, LAST_TEN[device_type])


def training(place: Place, lines: Lines) -> None:
    """A hundred steps of base_train from a checkpoint of the CPU, ten of them against the CPU in float32.

    Devices draw other weights from the same seed, so the CPU makes the first five steps and saves.
    """
    # On the CPU in micro-steps of half the rows, so that a comparison of CPUs has something to compare
    flags = [*training_flags(place, "on-cpu", parts=2, compiles=False), "--dtype", "float32"]
    flags += ["--save-every", "5", "--keep-last", "100"]  # the first one is what the device goes on from
    on_cpu, run = place.folder / "runs" / "on-cpu", place.folder / "runs" / "from-cpu"
    shutil.rmtree(on_cpu, ignore_errors=True)
    shutil.rmtree(run, ignore_errors=True)

    def fifteen_steps_made():
        return len(losses(place, "on-cpu")) >= 15

    _, output = start(place, base_train_command(flags), device_type="cpu", kill_when=fifteen_steps_made)
    print(output)
    saved = on_cpu / "checkpoints" / "step_5"
    made = f"{len(losses(place, 'on-cpu'))} steps, step_5 saved: {saved.exists()}"
    lines.check("fifteen steps on the CPU", fifteen_steps_made() and saved.exists(), made)

    shutil.copytree(on_cpu, run)
    flags = training_flags(place, "from-cpu")
    [code], output = start(place, base_train_command([*flags, "--resume", "step_5"]))
    print(output)
    lines.check("base_train carries on to step 100", code == 0, f"exit code {code}")
    curve, expected = losses(place, "from-cpu"), losses(place, "on-cpu")
    if len(curve) < 15 or len(expected) < 15:
        return
    errors = [abs(a - b) for a, b in zip(curve[5:15], expected[5:15], strict=True)]
    limit = FIRST_TEN[place.device.type]
    lines.at_most("losses of steps 6 to 15 against the CPU, in nats", largest(errors), limit)
    finite = all(math.isfinite(loss) for loss in curve)
    skipped = metrics(place, "from-cpu")[-1]["skipped_steps"]
    lines.check("losses are finite, no step is skipped", finite and skipped == 0, f"{skipped} skipped")
    first, last = curve[0], sum(curve[-10:]) / 10
    learnt = len(curve) == 100 and first - last > 1.0
    lines.check("the model learns", learnt, f"{first:.3f} to {last:.3f} at step {len(curve)}", "1 nat less")
    summary = run / "summary.json"
    if summary.exists():
        found = json.loads(summary.read_text())
        for key in ("val_bpb", "tokens_per_second", "optimizer_ms", "peak_memory_mb"):
            lines.figure(key, str(found[key]))

    if not place.on_gpu or torch.cuda.get_device_capability() < (8, 9):
        lines.skip("fp8", "needs a GPU of capability 8.9 or more")
    else:
        [code], output = start(place, base_train_command([*training_flags(place, "fp8"), "--fp8"]))
        print(output)
        lines.check("fp8: a hundred steps", code == 0, f"exit code {code}")
        if len(losses(place, "fp8")) == 100:  # other initial weights, which matter less than this
            off = abs(sum(losses(place, "fp8")[-10:]) / 10 - last)
            lines.at_most("fp8: mean loss of the last ten against bf16", off, LAST_TEN["cuda"])


def resume(place: Place, lines: Lines) -> None:
    """A run that is killed by SIGKILL goes on from its checkpoint as if nothing had happened."""
    steps, every = 40, 5
    common = [*data_flags(place, 300), "--depth", "2", "--max-seq-len", "32", "--device-batch-size", "8"]
    common += ["--total-batch-size", "256", "--num-iterations", str(steps), "--no-compile", "--deterministic"]
    common += ["--eval-every", "-1", "--save-every", str(every), "--eval-tokens", "512"]
    whole = base_train_command(["--run", "whole", *common])
    killed = base_train_command(["--run", "killed", *common])
    saved = place.folder / "runs" / "killed" / "checkpoints" / "step_10"

    def far_enough():
        return saved.exists() and len(losses(place, "killed")) > 12

    codes, output = start(place, whole)
    lines.check("a run that nobody kills", codes == [0], f"exit code {codes[0]}")
    print(output)
    codes, output = start(place, killed, kill_when=far_enough)
    made = len(losses(place, "killed"))
    ended = codes == [-signal.SIGKILL] and made < steps
    lines.check("killed after a checkpoint", ended, f"exit code {codes[0]}, {made} steps made")
    print(output)
    codes, output = start(place, killed)
    print(output)
    resumed = [line for line in output.splitlines() if line.startswith("resuming run killed at step")]
    found = resumed[0] if resumed else "it started over"
    lines.check("the same command carries on", codes == [0] and bool(resumed), found)
    ours, theirs = losses(place, "killed"), losses(place, "whole")
    if len(ours) != len(theirs):
        lines.check("it makes every step once", False, f"{len(ours)} of {len(theirs)} steps")
        return
    difference = largest(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    lines.at_most("losses against the run that was not killed, bit for bit", difference, 0)


def out_of_memory(place: Place, lines: Lines) -> None:
    """A batch that no memory holds is answered by one line and exit code 2."""
    config = GPTConfig.from_depth(12, vocab_size=1024, seq_len=2048)
    rows = 1
    while plan_bytes(config, rows) < 3 * torch.cuda.mem_get_info()[1]:
        rows *= 2
    flags = [*data_flags(place, 1024), "--run", "large", "--depth", "12", "--max-seq-len", "2048"]
    flags += ["--device-batch-size", str(rows), "--total-batch-size", str(rows * 2048)]
    flags += ["--num-iterations", "1", "--no-compile"]
    [code], output = start(place, base_train_command(flags))
    print(output)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    one_line = code == 2 and len(errors) == 1 and "Traceback" not in output
    said = errors[0][:200] if errors else "no line that starts with error:"
    lines.check(f"{rows} rows of 2,048 tokens", one_line, f"exit code {code}, {said}", "2, one line")


# ------------------------------------------------------------------------------------------------------------
# Speed


def plan_bytes(config: GPTConfig, rows: int) -> int:
    """What nanomuon/footprint.py expects of one GPU in bf16."""
    return footprint.memory(footprint.memory_by_kind(config, footprint.Layout(1), rows, 2))


def optimizer_speed(place: Place, lines: Lines, depth: int) -> None:
    """scripts.optim_bench on its own; its table goes to the log, its JSON to the folder."""
    file = place.folder / f"optim_bench_{depth}.json"
    command = [sys.executable, "-m", "scripts.optim_bench", "--depth", str(depth), "--json", str(file)]
    command += ["--device", place.device.type, "--rounds", place.sized("7", "3")]
    [code], output = start(place, command)
    print(output)
    lines.check(f"optim_bench --depth {depth}", code == 0, f"exit code {code}")
    if code != 0:
        return
    result = json.loads(file.read_text())
    lines.figure("copy bandwidth", f"{result['copy_bandwidth'] / 1e9:.0f} GB/s")
    for part, table in result["milliseconds"].items():
        for name, row in table.items():
            if isinstance(row, dict):
                lines.figure(
                    f"{part}, {name}", f"{row['median']:.2f} ms, {row['times_floor']:.2f} of the floor"
                )
    found = result["milliseconds"]["whole step"]["MuonAdamW compiled"]["times_floor"]
    if place.on_gpu:
        lines.at_most("the whole step over its floor", found, TIMES_FLOOR)
    else:
        lines.skip("the whole step over its floor", "a target for GPUs")


def optim_bench_12(place: Place, lines: Lines) -> None:
    """The optimizer at depth 12 beside its floor and torch.optim (on a CPU: depth 2)."""
    optimizer_speed(place, lines, place.sized(12, 2))


def optim_bench_24(place: Place, lines: Lines) -> None:
    """The same at depth 24."""
    if torch.cuda.mem_get_info()[1] < 40 * 2**30:
        lines.skip("optim_bench --depth 24", "needs a GPU with 40 GiB")
        return
    optimizer_speed(place, lines, 24)


def train_bench(place: Place, lines: Lines) -> None:
    """A training step at depth 12 beside its floor: tokens per second, MFU (on a CPU: depth 2)."""
    file = place.folder / "train_bench.json"
    command = [sys.executable, "-m", "scripts.train_bench", "--json", str(file)]
    command += place.sized(
        [*data_flags(place, 32768), "--depth", "12", "--total-batch-size", "262144", "--rounds", "5"],
        [*data_flags(place, 1024), "--depth", "2", "--total-batch-size", "4096", "--rounds", "3"],
    )
    command.append(place.sized("--compile", "--no-compile"))
    [code], output = start(place, command)
    print(output)
    lines.check("train_bench", code == 0, f"exit code {code}")
    if code != 0:
        return
    result = json.loads(file.read_text())
    for name, row in result["milliseconds"].items():
        if isinstance(row, dict):
            lines.figure(name, f"{row['median']:.1f} ms, {row['times_floor']:.2f} of the floor")
    lines.figure("compilation", f"{result['compile_seconds']:.0f} s")
    lines.figure("tokens per second", f"{result['tokens_per_second']:,.0f}")
    if "mfu" in result:
        found = result["mfu"]
        lines.check("MFU", found >= MFU, f"{100 * found:.1f}%", f"at least {100 * MFU:.0f}%")
    else:
        lines.skip("MFU", "the peak of this device is not known")


def profile(place: Place, lines: Lines) -> None:
    """A compiled step at depth 12: its kernels, where its time goes, its memory beside the plan."""
    here = runtime.start()
    config = GPTConfig.from_depth(12, vocab_size=32768, seq_len=2048)
    rows = sizing.device_batch_size(config, 16, False, 1, here)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    gpt = parallel.build_model(config, here, seed=0)
    ours = MuonAdamW(recipe.param_groups(gpt, rows * config.seq_len))
    forward = compile_model(gpt, None)
    tokens = torch.randint(32768, (rows, config.seq_len + 1), generator=seeded(0)).to(here.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def one_step():
        forward(inputs, targets).backward()
        ours.step()
        ours.zero_grad(set_to_none=True)

    for _ in range(3):
        one_step()
    torch.cuda.synchronize()
    found, planned = torch.cuda.max_memory_allocated(), plan_bytes(config, rows)
    limit = 1.1 * planned  # the plan is that of an eager model; a compiled one saves less
    words = f"{found / 2**30:.1f} GiB; the plan says {planned / 2**30:.1f}"
    lines.check(f"peak memory with {rows} rows", found <= limit, words, f"at most {limit / 2**30:.1f}")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for name, work in (("training step", one_step), ("optimizer step", None)):
        if work is None:
            forward(inputs, targets).backward()
            work = ours.step
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as recorded:
            work()
            torch.cuda.synchronize()
        calls = Counter(event.name for event in recorded.events())
        launches = sum(count for call, count in calls.items() if "LaunchKernel" in call)
        waits = calls["cudaStreamSynchronize"] + calls["cudaEventSynchronize"]
        lines.figure(f"kernels launched, {name}", f"{launches}, and {waits} waits for the device")
        print(recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=25))


# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A stage, and the seconds after which it is killed."""

    function: Callable[[Place, Lines], None]
    seconds: int
    for_gpus: bool = False  # a CPU has nothing to tell

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def about(self) -> str:
        return self.function.__doc__.splitlines()[0]


# What tells most comes first: at the end there may be no time left
STAGES = [
    Stage(device, 60),
    Stage(numerics, 120),
    Stage(optimizer, 120),
    Stage(model, 120),
    Stage(attention_backends, 90),
    Stage(training, 120),
    Stage(replicated, 120),
    Stage(fsdp, 120),
    Stage(tensor_parallel, 120),
    Stage(fsdp_and_tensor_parallel, 120),
    Stage(resume, 90),
    Stage(out_of_memory, 60, for_gpus=True),
    Stage(optim_bench_12, 120),
    Stage(train_bench, 180),
    Stage(optim_bench_24, 150, for_gpus=True),
    Stage(profile, 120, for_gpus=True),
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stage", nargs="?", choices=[stage.name for stage in STAGES], help="which one")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    add("--ranks", type=int, default=1, help="processes of the stages for several devices")
    add("--folder", type=Path, required=True, help="what the stage writes")
    add("--lines", type=Path, required=True, help="file for what it finds, a line of JSON each")
    add("--rank-of", choices=LAYOUT_FLAGS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    place, lines = Place(torch.device(args.device), args.ranks, args.folder), Lines(args.lines)
    if args.rank_of:
        rank_of_layout(place, lines, args.rank_of)
        return
    if args.device == "cpu":
        runtime.keep_freed_memory()
    for stage in STAGES:
        if stage.name == args.stage:
            stage.function(place, lines)


if __name__ == "__main__":
    runtime.run_command(main)
