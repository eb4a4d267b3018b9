"""Causal attention with an optional sliding window.

Windows in bf16 on CUDA use PyTorch's varlen_attn, which skips hidden keys. Everything else uses PyTorch's
scaled_dot_product_attention, except short rows in bf16 on a CPU (`whole_scores`).
"""

import re
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

# Up to this many tokens, a CPU in bf16 computes all scores of a row, hidden ones too: at 256 tokens, a
# training step of depth 4 takes 12% less time than with PyTorch's fused kernel
WHOLE_SCORES = 512
# The backends for decoding. On Hopper PyTorch prefers cuDNN, which plans a kernel for every length (about
# 0.4 s each), and every new token is a new length
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# PyTorch's names for FlashAttention 3 and 4, in order of preference, by a GPU's major compute capability:
# Hopper and data-center Blackwell. On other GPUs version 4 activates, too, but its first call fails
FLASH_ATTENTION = {9: ("FA3", "FA4"), 10: ("FA4",)}


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, normalized: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where query i sees keys j with i - window < j <= i (all j <= i if window is
    None).

    q (B, T, H, D); k, v (B, T, Hkv, D) with Hkv dividing H: query head h reads key head h * Hkv // H. Returns
    (B, T, H, D). normalized: queries and keys have norm sqrt(D), so that scores are small and may be rounded
    to bf16.
    """
    T = q.size(1)
    if q.dtype == torch.bfloat16:
        if q.device.type == "cuda" and window is not None:
            return varlen(q, k, v, window)
        if q.device.type == "cpu" and normalized and T <= WHOLE_SCORES:
            return whole_scores(q, k, v, window)
    if window is None:
        return masked(q, k, v, None, is_causal=True)
    return masked(q, k, v, visible_keys(torch.arange(T, device=q.device), T, window))


def visible_keys(queries: Tensor, count: int, window: int | None) -> Tensor:
    """(..., T, count), True if a query sees a key. queries (..., T): their positions among `count` keys."""
    distance = queries[..., None] - torch.arange(count, device=queries.device)
    return (distance >= 0) & (distance < (window or count))


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """PyTorch's fused kernel in the layout of this file. mask: (Tq, Tk) or (B, 1, Tq, Tk), True if a query
    sees a key. Hidden keys cost as much as visible ones.
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
    """All scores at once, in the queries' dtype: T^2 numbers per head, saved for the backward pass."""
    B, T, H, D = q.shape
    k, v = (x.repeat_interleave(H // x.size(2), dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2).reshape(B * H, T, D) for x in (q, k, v))
    hidden = ~visible_keys(torch.arange(T, device=q.device), T, window)
    bias = q.new_zeros(T, T).masked_fill(hidden, -torch.inf)
    weights = softmax(torch.baddbmm(bias, q * D**-0.5, k.mT))
    return (weights @ v).view(B, H, T, D).transpose(1, 2)


# A namespace for this copy of the file: the process may also import an exported model's copy, and a second
# operator with the same name would disable the first
OPERATORS = re.sub(r"\W", "_", __name__)


@torch.library.custom_op(f"{OPERATORS}::softmax", mutates_args=())
def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension. A custom op, because the compiler's bf16 kernels for a CPU take three
    times as long.
    """
    return scores.softmax(-1)


@torch.library.custom_op(f"{OPERATORS}::softmax_backward", mutates_args=())
def softmax_backward(grad: Tensor, weights: Tensor) -> Tensor:
    return torch._softmax_backward_data(grad, weights, -1, weights.dtype)


softmax.register_fake(torch.empty_like)
softmax_backward.register_fake(lambda grad, weights: torch.empty_like(weights))
softmax.register_autograd(
    lambda ctx, grad: softmax_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def use_flash_attention(device: torch.device, dtype: torch.dtype) -> str | None:
    """Use FlashAttention 3 or 4 from now on, if one is installed that trains with windows on this GPU.
    Returns its name. Deterministic runs, and dtypes other than bf16, keep PyTorch's own kernels.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.are_deterministic_algorithms_enabled():
        return None
    major, _ = torch.cuda.get_device_capability(device)
    for name in FLASH_ATTENTION.get(major, ()):
        try:
            torch.nn.attention.activate_flash_attention_impl(name)
        except (ImportError, RuntimeError, ValueError):
            continue  # not installed, installed without its backward pass, or unknown to this PyTorch
        try:
            train_with_a_window(device)
            return name
        except Exception as error:  # whatever its compiler raises; on Hopper PyTorch 2.11 refuses version 4
            torch.nn.attention.restore_flash_attention_impl()
            warnings.warn(f"{name} is installed, but fails on this GPU: {error}", stacklevel=2)
    return None


def train_with_a_window(device: torch.device) -> None:
    """A forward and a backward pass on a GPU, which raise what its kernels raise."""
    x = torch.ones(1, 256, 1, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    attention(x, x, x, window=64).sum().backward()
    x.grad.sum().item()  # kernels also fail late


def kernels_in_use() -> str:
    """A readable name of the kernels that compute attention on a GPU."""
    name = torch.nn.attention.current_flash_attention_impl()
    return "PyTorch's own" if name is None else name.replace("FA", "FlashAttention ")


def varlen(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """attention() as a ragged batch, in which every row is one sequence."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo: 1 s, which only GPUs need

    B, T, H = q.shape[:3]
    ends = torch.arange(0, (B + 1) * T, T, device=q.device, dtype=torch.int32)
    if k.size(2) != H:  # PyTorch has its enable_gqa only since 2.12
        k, v = (x.repeat_interleave(H // x.size(2), dim=2) for x in (k, v))
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (B * T, heads, D)
    return varlen_attn(q, k, v, ends, ends, T, T, window_size=(window - 1, 0)).unflatten(0, (B, T))
