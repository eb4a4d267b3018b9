"""Causal attention with an optional sliding window, by the fastest kernel that this device and PyTorch have.

The backends differ in speed alone. Where use() has not named one for a shape, PyTorch's own dispatch does the
work.
"""

import functools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module

CHECKED = 2048  # tokens of a row at which measure() compares a backend with the definition
_chosen = {}  # key(q, k, window): backend
_block_masks = {}  # (T, window): BlockMask, made outside of what is compiled


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where query i sees keys j with i - window < j <= i (all j <= i if window is
    None).

    q (B, Tq, H, D); k, v (B, Tk, Hkv, D) with Hkv dividing H: query head h reads key head h * Hkv // H.
    Where Tq < Tk the queries are the last Tq positions, as when decoding with a cache. Returns (B, Tq, H, D).
    A window that hides nothing counts as full.
    """
    if window is not None and window >= k.size(1):
        window = None
    return _chosen.get(_key(q, k, window), sdpa)(q, k, v, window)


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


def varlen(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """FlashAttention, which skips what the window hides: every row is one sequence of a ragged batch. CUDA,
    16 bit.
    """
    from torch.nn.attention.varlen import varlen_attn  # not in every build

    B, T = q.shape[:2]
    ends = torch.arange(0, (B + 1) * T, T, device=q.device, dtype=torch.int32)
    past = -1 if window is None else window - 1  # keys before the query's own
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (B * T, heads, D)
    gqa = q.size(1) != k.size(1)
    return varlen_attn(q, k, v, ends, ends, T, T, window_size=(past, 0), enable_gqa=gqa).unflatten(0, (B, T))


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


def flash_implementations(device: torch.device) -> list[str | None]:
    """FlashAttention versions that PyTorch can switch to; None is its own. A package that is missing is left
    out.
    """
    found = [None]
    if device.type == "cuda" and hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        for name in torch.nn.attention.list_flash_attention_impls():
            try:
                torch.nn.attention.activate_flash_attention_impl(name)
                found.append(name)
            except Exception:  # whatever importing that package raises on this machine
                pass
        use_flash_implementation(None)
    return found


def use_flash_implementation(name: str | None) -> None:
    """Switch the flash kernels of this process, those of scaled_dot_product_attention included."""
    if name is not None:
        torch.nn.attention.activate_flash_attention_impl(name)
    elif getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)() is not None:
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
    out.

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
    for implementation in flash_implementations(device):
        use_flash_implementation(implementation)
        results[implementation] = {}
        for window in windows:
            row = results[implementation][window] = {}
            for backend in backends:
                if implementation is not None and backend is flex:
                    continue  # has no part in the switch
                try:
                    row[backend.__name__] = _checked_milliseconds(backend, q, k, v, grad, window, rounds)
                except Exception as reason:  # a kernel that a device lacks fails in a way of its own
                    row[backend.__name__] = f"{type(reason).__name__}: {reason}".splitlines()[0][:120]
    use_flash_implementation(None)
    return results


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
    """Largest error of output and gradients, each relative to its largest entry."""
    found = _with_gradients(backend, q, k, v, grad, window)
    expected = _with_gradients(plain_attention, q, k, v, grad, window)
    errors = []
    for ours, right in zip(found, expected, strict=True):
        right = right.float()
        errors.append(((ours.float() - right).abs().max() / right.abs().max()).item())
    return max(errors)


def _milliseconds(backend, q, k, v, grad, window):
    repeats = 1 if q.device.type == "cpu" else 10
    began = time.perf_counter()
    for _ in range(repeats):
        _with_gradients(backend, q, k, v, grad, window)
    if q.device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / repeats
