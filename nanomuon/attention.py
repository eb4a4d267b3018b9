"""Causal attention with an optional sliding window.

On CUDA a window is PyTorch's varlen_attn, which skips what the window hides; everything else is PyTorch's
scaled_dot_product_attention, but for short rows in bf16 on a CPU (`whole_scores`).
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens up to which a CPU in bf16 makes all scores of a row, the hidden ones too, by products of whole
# matrices: at 256 twice as fast as its fused kernel (docs/log.md)
WHOLE_SCORES = 512
# FlashAttention by the major version of the GPU that it is for (Hopper, Blackwell), as PyTorch calls it
FLASH = {9: "FA3", 10: "FA4"}


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, normalized: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where query i sees keys j with i - window < j <= i (all j <= i if window is
    None).

    q (B, Tq, H, D); k, v (B, Tk, Hkv, D) with Hkv dividing H: query head h reads key head h * Hkv // H.
    Where Tq < Tk the queries are the last Tq positions, as when decoding with a cache. Returns (B, Tq, H, D).
    A window that hides nothing counts as full. normalized: queries and keys have norm sqrt(D), so that scores
    are small and may be rounded to bf16.
    """
    if window is not None and window >= k.size(1):
        window = None
    if q.dtype == torch.bfloat16 and q.size(1) == k.size(1):
        if q.device.type == "cuda" and window is not None:
            return varlen(q, k, v, window)
        if q.device.type == "cpu" and normalized and q.size(1) <= WHOLE_SCORES:
            return whole_scores(q, k, v, window)
    return sdpa(q, k, v, window)


def use_flash_attention(device: torch.device) -> str | None:
    """Take FlashAttention 3 or 4 for this process, if there is one for this GPU and its package is installed;
    returns its name. What runs deterministically stays with PyTorch's own.
    """
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return None
    name = FLASH.get(torch.cuda.get_device_capability(device)[0])
    if name not in torch.nn.attention.list_flash_attention_impls():
        return None
    try:
        torch.nn.attention.activate_flash_attention_impl(name)
    except ImportError:
        return None
    return name


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
    return masked(q, k, v, mask, is_causal=mask is None and Tq == Tk)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """PyTorch's attention in the layout of this file: mask (Tq, Tk) or (B, 1, Tq, Tk), True where a query
    sees a key.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
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


def varlen(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Every row is one sequence of a ragged batch."""
    from torch.nn.attention.varlen import varlen_attn  # loads torch._dynamo, a second that only GPUs need

    B, T, H = q.shape[:3]
    ends = torch.arange(0, (B + 1) * T, T, device=q.device, dtype=torch.int32)
    if k.size(2) != H:  # its enable_gqa came with PyTorch 2.12
        k, v = (x.repeat_interleave(H // x.size(2), dim=2) for x in (k, v))
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (B * T, heads, D)
    return varlen_attn(q, k, v, ends, ends, T, T, window_size=(window - 1, 0)).unflatten(0, (B, T))
