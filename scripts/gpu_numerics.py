"""Stages of scripts/gpu_check: the device's numbers against float64 on the CPU.

One after another: the device itself, every kernel of the optimizer (from the formulas), ten steps of the
whole optimizer, a model's loss and gradients, the attention backends.
"""

import math

import torch

from nanomuon import attention, fp8, parallel
from nanomuon.compilation import compile_model
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import (
    MuonAdamW,
    adamw_update,
    muon_direction,
    muon_momentum,
    muon_update,
    named_parameters,
)
from nanomuon.optim import run as run_kernel
from nanomuon.orthogonalize import COEFFICIENTS, newton_schulz_form
from nanomuon.param_groups import build_param_groups
from nanomuon.runtime import InputError, Runtime
from scripts.gpu_common import FLOAT64, Lines, Place, distance, largest, random, seeded, worst_of
from scripts.optim_bench import compilation

# How far a figure may be off, with where the number comes from
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


# ------------------------------------------------------------------------------------------------------------
# The device


def device(place: Place, lines: Lines) -> None:
    """The device computes, and compiles. Without it no other stage is tried."""
    devices = [place.device]
    if place.on_gpu:
        torch.cuda.init()  # says why it cannot, with the versions of driver and CUDA
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
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
    for where in devices:
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
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        lines.check("compiled kernel", False, said[:200])


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
            check_momentum(how, place, lines)
            check_muon_update(how, place, lines)
            checked = shapes
            if compiles and not place.on_gpu:
                checked = shapes[1:2]  # a CPU compiles slowly
            for shape in checked:
                name = f"polar factor {shape[1:]} in {precision_of_polar_factor(shape, place)}, {how}"
                check_direction(name, shape, torch.float32, POLAR[place.device.type], place, lines)
    check_fp8(place, lines)


def check_adamw(how: str, place: Place, lines: Lines) -> None:
    shape = (1000, 256)
    lr, eps, decay = 1e-3, 1e-6, 0.1
    beta1, beta2, t = 0.8, 0.95, 3
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
    ok, not_ok = torch.ones((), device=place.device), torch.zeros((), device=place.device)
    param, grad, exp_avg, exp_avg_sq = (x.to(place.device, copy=True) for x in (P, G, M, V))
    run_kernel(adamw_update, param, grad, exp_avg, exp_avg_sq, ok, **rates)
    lines.at_most(f"AdamW update, {how}", distance(param.cpu() - P, P64 - P), FLOAT32)
    worst = largest([distance(exp_avg, M64), distance(exp_avg_sq, V64)])
    lines.at_most(f"AdamW moments, {how}", worst, FLOAT32)

    before = [x.clone() for x in (param, exp_avg, exp_avg_sq)]
    grad.fill_(math.nan)
    run_kernel(adamw_update, param, grad, exp_avg, exp_avg_sq, not_ok, **rates)
    after = [param, exp_avg, exp_avg_sq]
    same = all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    lines.check(f"AdamW leaves everything alone where a gradient is NaN, {how}", same, str(same))


def per_matrix(value: float, place: Place) -> torch.Tensor:
    """(2, 1, 1): the same number for each of two matrices."""
    return torch.full((2, 1, 1), value, device=place.device)


def check_momentum(how: str, place: Place, lines: Lines) -> None:
    shape, mu = (2, 256, 96), 0.95
    G, M = random(*shape, seed=1), random(*shape, seed=2)
    M64 = mu * M.double() + (1 - mu) * G.double()
    U64 = (1 - mu) * G.double() + mu * M64  # Nesterov

    grad, buffer = G.to(place.device, copy=True), M.to(place.device, copy=True)
    U = run_kernel(
        muon_momentum,
        grad,
        buffer,
        per_matrix(1.0, place),  # ok
        momentum=per_matrix(mu, place),
        grad_weight=per_matrix(1 - mu, place),
        nesterov=True,
    )
    lines.at_most(f"momentum, {how}", largest([distance(U, U64), distance(buffer, M64)]), FLOAT32)


def check_muon_update(how: str, place: Place, lines: Lines) -> None:
    shape, lr, scale, decay = (2, 256, 96), 0.02, 1.5, 0.2
    P, X = random(*shape, scale=0.02), random(*shape, seed=3, scale=0.06)
    kept = P.double() * (X.double() * P.double() >= 0)  # cautious: decay only what the update shrinks, too
    P64 = P.double() - lr * scale * (X.double() + decay * kept)

    param, direction = P.to(place.device, copy=True), X.to(place.device, copy=True)
    run_kernel(
        muon_update,
        param,
        direction,
        per_matrix(1.0, place),  # gain
        per_matrix(1.0, place),  # ok
        lr=per_matrix(lr, place),
        scale=per_matrix(scale, place),
        weight_decay=per_matrix(decay, place),
        cautious=True,
    )
    lines.at_most(f"Muon update, {how}", distance(param.cpu() - P, P64 - P), FLOAT32)


def precision_of_polar_factor(shape: tuple[int, int, int], place: Place) -> str:
    """What the device iterates in, of float32 matrices."""
    if not place.on_gpu:
        return "float32"
    m, n = shape[1:]
    gram, _ = newton_schulz_form(m, n, steps=5, device_type="cuda")
    return "float16 Gram" if gram else "bf16"


def check_direction(
    name: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    tolerance: float,
    place: Place,
    lines: Lines,
) -> None:
    """Polar Express and variance reduction. dtype: of momentum and state; what is iterated in follows it."""
    beta2 = 0.95
    k, m, n = shape
    U = random(k, m, n)
    second_shape = (k, m, 1) if m >= n else (k, 1, n)
    V = (1 + random(*second_shape) ** 2) / max(m, n)
    polar, X64, V64 = reference_direction(U.double(), V.double(), beta2)

    second_moment = V.to(place.device, dtype, copy=True)
    square_weight = torch.full((k, 1, 1), 1 - beta2, device=place.device, dtype=dtype)
    X, gain = run_kernel(
        muon_direction,
        U.to(place.device, dtype),
        second_moment,
        square_weight,
        coefficients="polar_express",
        ns_steps=5,
        row_equilibrate=False,
        renormalize=False,
    )
    errors = [distance(X, polar), distance(X.to(dtype) * gain, X64), distance(second_moment, V64)]
    lines.at_most(name, largest(errors), tolerance)
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
    norm = torch.linalg.matrix_norm(X, keepdim=True)
    scaled_norm = torch.linalg.matrix_norm(scaled, keepdim=True)
    return X, scaled * norm / scaled_norm, V


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
    x8, weight8, grad8 = (tensor.to(place.device, torch.bfloat16) for tensor in (x, weight, grad))
    out = product(x8.requires_grad_(), weight8.requires_grad_())
    out.backward(grad8)

    x, weight, grad = x.double(), weight.double(), grad.double()
    lines.at_most("fp8 product", distance(out, x @ weight.mT), FP8)
    errors = [distance(x8.grad, grad @ weight), distance(weight8.grad, grad.mT @ x)]
    lines.at_most("fp8 product's gradients", largest(errors), FP8_GRADIENTS)


# ------------------------------------------------------------------------------------------------------------
# The optimizer against the CPU


def optimizer(place: Place, lines: Lines) -> None:
    """Ten steps of MuonAdamW on the device against float64 on the CPU, compiled and eager."""
    config = GPTConfig.from_depth(place.sized(4, 2), vocab_size=1024, seq_len=64)
    initial = {}
    with torch.device("meta"):
        named = list(GPT(config).named_parameters())
    for i, (name, param) in enumerate(named):
        initial[name] = random(*param.shape, seed=i, scale=0.02)
    reference = stepped_optimizer(config, initial, torch.device("cpu"), torch.float64)
    for compiles in place.sized((False, True), (False,)):  # a CPU compiles slowly, and `numerics` has it
        how = "compiled" if compiles else "eager"
        with compilation(compiles):
            ours = stepped_optimizer(config, initial, place.device, torch.float32)
            check_updates(ours, reference, initial, how, place, lines)
            check_skipped_step(ours, how, lines)
    moved = stepped_optimizer(config, initial, torch.device("cpu"), torch.float32, steps=0)
    moved.load_state_dict(ours.state_dict())
    devices = set()
    for state in moved.state.values():
        devices |= {tensor.device.type for tensor in state.values()}
    lines.check("its state loads on the CPU", devices == {"cpu"}, str(sorted(devices)))


def stepped_optimizer(
    config: GPTConfig,
    initial: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    steps: int = 10,
) -> MuonAdamW:
    """An optimizer that has made these steps with gradients that are the same everywhere."""
    with torch.device("meta"):
        gpt = GPT(config)
    gpt.to_empty(device=device).to(dtype)
    for name, param in gpt.named_parameters():
        param.data.copy_(initial[name])
    muon = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.1)
    adamw = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    ours = MuonAdamW(build_param_groups(gpt, muon=muon, adamw=adamw))
    for step in range(steps):
        for i, param in enumerate(gpt.parameters()):
            param.grad = random(*param.shape, seed=1000 * (step + 1) + i).to(device, dtype)
        ours.step()
    return ours


def weights_of(ours: MuonAdamW) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param, _ in named_parameters(ours.param_groups)}


def check_updates(
    ours: MuonAdamW,
    reference: MuonAdamW,
    initial: dict[str, torch.Tensor],
    how: str,
    place: Place,
    lines: Lines,
) -> None:
    """How far all steps together have moved each parameter. initial: what both began with, on the CPU."""
    found, expected = weights_of(ours), weights_of(reference)
    for kind, tolerance in (("muon", UPDATES[place.device.type]), ("adamw", 1e-3)):
        errors = {}
        for name, _, group in named_parameters(reference.param_groups):
            if group["kind"] == kind:
                before = initial[name]
                errors[name] = distance(found[name].cpu() - before, expected[name] - before)
        worst, error = worst_of(errors)
        lines.at_most(f"updates of {kind}, {how}, worst {worst}", error, tolerance)


def check_skipped_step(ours: MuonAdamW, how: str, lines: Lines) -> None:
    before = weights_of(ours)
    for param in ours.param_groups[0]["params"]:
        param.grad = torch.full_like(param, math.inf)
    ours.step()
    unchanged = all(torch.equal(weight, before[name]) for name, weight in weights_of(ours).items())
    skipped = int(ours.skipped_steps)
    lines.check(
        f"a step with infinite gradients changes nothing, {how}",
        unchanged and skipped == 1,
        f"unchanged: {unchanged}, skipped steps: {skipped}",
    )


# ------------------------------------------------------------------------------------------------------------
# The model against the CPU


def model(place: Place, lines: Lines) -> None:
    """Loss and gradients of a small GPT on the device against float64 on the CPU, compiled and eager."""
    depth = place.sized(2, 1)
    config = GPTConfig(vocab_size=512, seq_len=128, depth=depth, width=128, heads=2, kv_heads=1)
    tokens = torch.randint(512, (4, 129), generator=seeded(0))
    cpu = torch.device("cpu")
    expected_loss, expected = loss_and_gradients(config, tokens, cpu, torch.float64, compiles=False)
    compute_dtype = torch.float32
    if place.on_gpu and torch.cuda.is_bf16_supported(including_emulation=False):
        compute_dtype = torch.bfloat16
    tolerance_of_training = GRADIENTS[place.device.type]
    cases = [
        (torch.float64, False, 1e-8),
        (compute_dtype, False, tolerance_of_training),
        (compute_dtype, True, tolerance_of_training),
    ]
    for dtype, compiles, tolerance in cases:
        how = "compiled" if compiles else "eager"
        name = f"{str(dtype).removeprefix('torch.')}, {how}"
        loss, found = loss_and_gradients(config, tokens, place.device, dtype, compiles)
        lines.at_most(f"loss in {name}", abs(loss - expected_loss) / expected_loss, tolerance / 100)
        errors = {key: distance(found[key], expected[key]) for key in expected}
        worst, error = worst_of(errors)
        lines.at_most(f"gradients in {name}, worst {worst}", error, tolerance)


def loss_and_gradients(
    config: GPTConfig, tokens: torch.Tensor, device: torch.device, dtype: torch.dtype, compiles: bool
) -> tuple[float, dict[str, torch.Tensor]]:
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


# ------------------------------------------------------------------------------------------------------------
# Attention


def attention_backends(place: Place, lines: Lines) -> None:
    """Every attention backend against float64, with milliseconds forward and backward."""
    dtype = place.sized(torch.bfloat16, torch.float32)
    rows, T, H, D = place.sized((8, 2048, 6, 128), (1, 256, 2, 64))
    windows = [None, T // 2, T // 4]
    measured = attention.measure(rows, T, H, H, D, windows, place.device, dtype, with_flex=place.on_gpu)
    checked_T = min(T, 512)  # float64 on the CPU takes T^2 memory
    for implementation, by_window in measured.items():
        for window, by_backend in by_window.items():
            span, checked_window = "full", None
            if window is not None:
                span = f"window {window} of {T}"
                checked_window = window * checked_T // T
            for backend, milliseconds in by_backend.items():
                name = f"{backend}, {span}"
                if implementation is not None:
                    name = f"{backend} {implementation}, {span}"
                if isinstance(milliseconds, str):  # why there are none
                    wrong = milliseconds.startswith("wrong")
                    required = backend == "sdpa" and implementation is None
                    if wrong or required:
                        lines.check(name, False, milliseconds)
                    else:
                        lines.skip(name, milliseconds)
                    continue
                attention.use_flash_implementation(implementation)  # raises where it does not load
                error = attention_error(backend, checked_T, H, D, checked_window, place.device, dtype)
                attention.use_flash_implementation(None)
                limit = ATTENTION[dtype]
                found = f"off by {error:.2g}; {milliseconds:.2f} ms"
                lines.check(name, error <= limit, found, f"at most {limit:g}")


def attention_error(
    backend: str, T: int, H: int, D: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> float:
    """Largest error of output and gradients over their largest entries, against float64 on the CPU.

    Two query heads read one key head.
    """
    q, k, v = random(1, T, H, D), random(1, T, H // 2, D, seed=1), random(1, T, H // 2, D, seed=2)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    grad = random(1, T, H, D, seed=3).to(dtype)
    if backend == "flex":
        attention.make_block_mask(T, window, device)
    inputs = [x.to(device).requires_grad_() for x in (q, k, v)]
    out = getattr(attention, backend)(*inputs, window)
    found = [out, *torch.autograd.grad(out, inputs, grad.to(device))]

    exact_inputs = [x.double().requires_grad_() for x in (q, k, v)]
    exact_out = reference_attention(*exact_inputs, window)
    expected = [exact_out, *torch.autograd.grad(exact_out, exact_inputs, grad.double())]
    errors = []
    for ours, right in zip(found, expected, strict=True):
        errors.append(((ours.cpu().double() - right).abs().max() / right.abs().max()).item())
    return largest(errors)


def reference_attention(q, k, v, window):
    """Causal attention by its formula. q: (1, T, H, D); k, v: (1, T, H / 2, D), a head for two of q."""
    T, D = q.size(1), q.size(3)
    k, v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5
    i, j = torch.arange(T)[:, None], torch.arange(T)
    hidden = j > i
    if window is not None:
        hidden = hidden | (i - j >= window)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)
