"""Causal attention with an optional sliding window, by the fastest kernel that this device and PyTorch have.

The backends differ in speed alone. Where use() has not named one for a shape, PyTorch's own dispatch does the
work.
"""

import contextlib
import functools
import inspect
import statistics
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention import varlen as varlen_module

CHECKED = 2048  # tokens of a row at which measure() compares a backend with the definition
NOT_SUPPORTED = "not supported here: "  # begins what measure() says of a kernel that a device lacks
# Words in the errors by which PyTorch and FlashAttention refuse a device, a dtype or a shape
REFUSALS = ("support", "no available kernel", "requires", "compute capability")
# PyTorch 2.11 has no such argument: keys and values are repeated there
_VARLEN_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_module.varlen_attn).parameters
# Tokens up to which a CPU in bf16 makes all scores of a row, the hidden ones too, by products of whole
# matrices: at 256 twice as fast as its fused kernel (docs/log.md)
WHOLE_SCORES = 512
_chosen = {}  # key(q, k, window): backend
_block_masks = {}  # (T, window): BlockMask, made outside of what is compiled


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    normalized: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where query i sees keys j with i - window < j <= i (all j <= i if window is
    None).

    q (B, Tq, H, D); k, v (B, Tk, Hkv, D) with Hkv dividing H: query head h reads key head h * Hkv // H.
    Where Tq < Tk the queries are the last Tq positions, as when decoding with a cache. Returns (B, Tq, H, D).
    A window that hides nothing counts as full. normalized: queries and keys have norm sqrt(D), so that scores
    are small and may be rounded to bf16. positions (B,): where given, Tq is 1 and the query of row b is at
    position positions[b] of its keys, of which those further on are not its own.
    """
    if positions is not None:
        return one_query_a_row(q, k, v, window, positions)
    if window is not None and window >= k.size(1):
        window = None
    otherwise = sdpa
    in_bf16_on_cpu = q.device.type == "cpu" and q.dtype == torch.bfloat16
    if in_bf16_on_cpu and normalized and q.size(1) == k.size(1) <= WHOLE_SCORES:
        otherwise = whole_scores
    return _chosen.get(_key(q, k, window), otherwise)(q, k, v, window)


def _key(q, k, window):
    return q.device.type, q.dtype, q.shape[1:], k.shape[1:], window


def sdpa(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The fused kernel of the device for full attention; a window is a mask, for which all products are
    made.
    """
    Tq, Tk = q.size(1), k.size(1)
    mask = None
    if window is not None or 1 < Tq < Tk:
        keys = torch.arange(Tk, device=q.device)
        distance = keys[Tk - Tq :, None] - keys  # (Tq, Tk)
        mask = (distance >= 0) & (distance < (window or Tk))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and Tq == Tk,
        enable_gqa=q.size(2) != k.size(2),
    )
    return out.transpose(1, 2)


def one_query_a_row(q: Tensor, k: Tensor, v: Tensor, window: int | None, positions: Tensor) -> Tensor:
    """Decoding rows of different lengths: q (B, 1, H, D), positions (B,)."""
    Tk = k.size(1)
    distance = positions[:, None] - torch.arange(Tk, device=k.device)  # (B, Tk)
    visible = (distance >= 0) & (distance < (window or Tk))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible[:, None, None],  # (B, 1, 1, Tk)
        enable_gqa=q.size(2) != k.size(2),
    )
    return out.transpose(1, 2)


def whole_scores(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """All scores at once, in the dtype of the queries: T^2 numbers for every head, which are kept for the
    backward.
    """
    group = q.size(2) // k.size(2)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    B, T, H, D = q.shape
    q, k, v = (x.transpose(1, 2).reshape(B * H, T, D) for x in (q, k, v))
    out, _ = attend(q * D**-0.5, k, v, window or T)
    return out.view(B, H, T, D).transpose(1, 2)


@torch.library.custom_op("nanomuon::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """(weights v, weights) of softmax weights (N, T, T) from scores q k^T; q, k, v (N, T, D).

    One op to the compiler, whose own kernels for a softmax over bf16 take three times as long.
    """
    keys = torch.arange(q.size(1), device=q.device)
    distance = keys[:, None] - keys  # (T, T)
    hidden = (distance < 0) | (distance >= window)
    bias = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    weights = torch.baddbmm(bias, q, k.mT).softmax(-1)
    return weights @ v, weights


@torch.library.custom_op("nanomuon::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v (N, T, D) from that of the first output of `attend`."""
    grad_scores = torch._softmax_backward_data(grad @ v.mT, weights, -1, weights.dtype)
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad


def _save_attended(ctx, inputs, output):
    q, k, v, _ = inputs
    _, weights = output
    ctx.save_for_backward(q, k, v, weights)
    ctx.mark_non_differentiable(weights)


def _attended_backward(ctx, grad, _):
    return *attend_backward(grad.contiguous(), *ctx.saved_tensors), None


def _attended_shapes(q, k, v, window):
    return torch.empty_like(v), q.new_empty(len(q), q.size(1), q.size(1))


def _attended_backward_shapes(grad, q, k, v, weights):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


attend.register_fake(_attended_shapes)
attend.register_autograd(_attended_backward, setup_context=_save_attended)
attend_backward.register_fake(_attended_backward_shapes)


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """PyTorch's dispatch leaves out cuDNN's attention, for decoding.

    PyTorch prefers it on Hopper, and it plans a kernel for every length (about 0.4 s each): decoding has a
    new length with every token.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def varlen(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """FlashAttention, which skips what the window hides: every row is one sequence of a ragged batch. CUDA,
    16 bit.
    """
    B, T, H = q.shape[:3]
    ends = torch.arange(0, (B + 1) * T, T, device=q.device, dtype=torch.int32)
    past = -1 if window is None else window - 1  # keys before the query's own
    groups = {}
    if k.size(2) != H:
        if _VARLEN_TAKES_GROUPS:
            groups = {"enable_gqa": True}
        else:
            k, v = (x.repeat_interleave(H // x.size(2), dim=2) for x in (k, v))
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (B * T, heads, D)
    out = varlen_module.varlen_attn(q, k, v, ends, ends, T, T, window_size=(past, 0), **groups)
    return out.unflatten(0, (B, T))


def flex(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """FlexAttention (arXiv 2412.05496): a compiled kernel that skips the blocks which the window hides."""
    run = flex_module.flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    out = run(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=_block_masks[q.size(1), window],
        enable_gqa=q.size(2) != k.size(2),
    )
    return out.transpose(1, 2)


@functools.cache
def _compiled_flex():
    return torch.compile(flex_module.flex_attention, dynamic=False)


def make_block_mask(T: int, window: int | None, device: torch.device) -> None:
    """What flex() looks up."""

    def visible(batch, head, i, j):
        return (j <= i) & (i - j < (window or T))

    _block_masks[T, window] = flex_module.create_block_mask(visible, None, None, T, T, device=device)


def flash_packages(device: torch.device) -> dict[str, str | None]:
    """Installed FlashAttention versions, by PyTorch's name for them (FA3, FA4): None where PyTorch can switch
    to it, else the error of its package.
    """
    found = {}
    if device.type == "cuda":
        for name in torch.nn.attention.list_flash_attention_impls():
            try:
                torch.nn.attention.activate_flash_attention_impl(name)
                found[name] = None
            except Exception as error:  # whatever importing that package raises on this machine
                # Only the package itself may be missing; what it needs, once it is installed, may not
                absent = error.name if isinstance(error, ModuleNotFoundError) else None
                if absent is None or not absent.startswith("flash_attn"):
                    found[name] = "failed: " + _in_one_line(error)
        use_flash_implementation(None)
    return found


def flash_implementations(device: torch.device) -> list[str | None]:
    """FlashAttention versions that PyTorch can switch to; None is its own."""
    return [None, *(name for name, error in flash_packages(device).items() if error is None)]


def use_flash_implementation(name: str | None) -> None:
    """Switch the flash kernels of this process, those of scaled_dot_product_attention included."""
    if name is not None:
        torch.nn.attention.activate_flash_attention_impl(name)
    elif torch.nn.attention.current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()


def measure(
    B: int,
    T: int,
    H: int,
    Hkv: int,
    D: int,
    windows: list[int | None],
    device: torch.device,
    dtype: torch.dtype,
    with_flex: bool,
    rounds: int = 5,
) -> dict[str | None, dict[int | None, dict[str, float | str]]]:
    """By flash implementation, window and backend: milliseconds forward and backward, or why the backend is
    out: NOT_SUPPORTED and the reason, or what nobody should expect: an error, or by how much it is off.

    A backend is out where it fails or where output or gradients are not those of a plain masked softmax. That
    takes T^2 memory, so longer rows are checked at CHECKED tokens, with a window of the same share.
    """
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(B, T, heads, D, device=device, generator=generator).to(dtype)
        for heads in (H, Hkv, Hkv, H)
    )
    q *= 8  # so sharp that a single key too few or too many shows
    backends = [sdpa]
    if device.type == "cuda":
        backends.append(varlen)
        if with_flex:
            backends.append(flex)
    results = {}
    packages = {None: None, **flash_packages(device)}
    for implementation, failure in packages.items():
        if failure is not None:
            results[implementation] = {window: {varlen.__name__: failure} for window in windows}
            continue
        use_flash_implementation(implementation)
        results[implementation] = {}
        for window in windows:
            row = results[implementation][window] = {}
            for backend in backends:
                if implementation is not None and backend is flex:
                    continue  # has no part in the switch
                try:
                    row[backend.__name__] = _checked_milliseconds(backend, q, k, v, grad, window, rounds)
                except Exception as error:  # a kernel that a device lacks fails in a way of its own
                    row[backend.__name__] = _why_not(error)
    use_flash_implementation(None)
    return results


def _in_one_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _why_not(error):
    """One line about the error of a kernel, which says whether the kernel is known not to run here."""
    refuses = any(word in str(error).lower() for word in REFUSALS)
    refused = refuses and isinstance(error, RuntimeError | ValueError | AssertionError)
    if refused or isinstance(error, NotImplementedError | torch.OutOfMemoryError):
        return NOT_SUPPORTED + _in_one_line(error)
    return "failed: " + _in_one_line(error)


def unexpected(measured: dict) -> list[str]:
    """What measure() says of kernels that should run and do not, or that compute something else, in one line
    each.
    """
    lines = []
    for implementation, rows in measured.items():
        for window, row in rows.items():
            for backend, found in row.items():
                if isinstance(found, str) and not found.startswith(NOT_SUPPORTED):
                    lines.append(f"{described(implementation, window, backend)}: {found}")
    return lines


def described(implementation: str | None, window: int | None, backend: str) -> str:
    """How a backend is called in what is printed."""
    name = backend if implementation is None else f"{backend} {implementation}"
    return f"{name} full" if window is None else f"{name} window {window}"


def _checked_milliseconds(backend, q, k, v, grad, window, rounds):
    """Milliseconds forward and backward, the median of some rounds; or text, by how much a backend is off."""
    T = q.size(1)
    length = min(T, CHECKED)
    checked_window = None if window is None else max(1, window * length // T)
    if backend is flex:
        make_block_mask(T, window, q.device)
        make_block_mask(length, checked_window, q.device)
    inputs = [x[:1, :length] for x in (q, k, v, grad)]
    error = _error(backend, *inputs, checked_window)
    tolerance = 1e-4 if q.dtype == torch.float32 else 3e-2
    if not error < tolerance:
        return f"wrong: off by {error:.2g}"
    _milliseconds(backend, q, k, v, grad, window)  # warms up
    return statistics.median(_milliseconds(backend, q, k, v, grad, window) for _ in range(rounds))


def fastest(measured: dict) -> tuple[str | None, dict[int | None, tuple[float, str]]]:
    """Of what measure() gives: the flash implementation that is best over all windows, and by window
    (milliseconds, backend). Empty where no implementation has a backend for every window.
    """
    fastest_sum, fastest_implementation, fastest_backends = float("inf"), None, {}
    for implementation, rows in measured.items():
        backends = {}
        for window, row in rows.items():
            usable = [(ms, name) for name, ms in row.items() if not isinstance(ms, str)]
            if usable:
                backends[window] = min(usable)
        milliseconds = sum(ms for ms, _ in backends.values())
        if len(backends) == len(rows) and milliseconds < fastest_sum:
            fastest_sum, fastest_implementation = milliseconds, implementation
            fastest_backends = backends
    return fastest_implementation, fastest_backends


def use(
    T: int,
    H: int,
    Hkv: int,
    D: int,
    implementation: str | None,
    backends: dict[int | None, str],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """From now on compute attention of this shape, whatever the batch, by the backend named for its window.

    Call it before the model is compiled.
    """
    use_flash_implementation(implementation)
    for window, name in backends.items():
        _chosen[device.type, dtype, torch.Size((T, H, D)), torch.Size((T, Hkv, D)), window] = globals()[name]
        if name == "flex":
            make_block_mask(T, window, device)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The definition in float32, against which the backends are checked: takes T^2 memory for every head."""
    T, group = q.size(1), q.size(2) // k.size(2)
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) / q.size(-1) ** 0.5
    distance = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or T)), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.float()).to(q.dtype)


def _with_gradients(backend, q, k, v, grad, window):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = backend(*inputs, window)
    return out, *torch.autograd.grad(out, inputs, grad)


def _error(backend, q, k, v, grad, window):
    """Largest error of output and gradients, each relative to its largest entry; NaN where one of them is."""
    found = _with_gradients(backend, q, k, v, grad, window)
    expected = _with_gradients(plain_attention, q, k, v, grad, window)
    errors = []
    for ours, right in zip(found, expected, strict=True):
        right = right.float()
        errors.append((ours.float() - right).abs().max() / right.abs().max())
    return torch.stack(errors).max().item()  # Python's max would pass over a NaN


def _milliseconds(backend, q, k, v, grad, window):
    repeats = 1 if q.device.type == "cpu" else 10
    began = time.perf_counter()
    for _ in range(repeats):
        _with_gradients(backend, q, k, v, grad, window)
    if q.device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / repeats
