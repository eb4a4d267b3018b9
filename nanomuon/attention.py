"""Causal attention with an optional sliding window, on PyTorch's own kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where query i sees keys j with i - window < j <= i (all j <= i if window is None).

    q (B, Tq, H, D); k, v (B, Tk, Hkv, D) with Hkv dividing H: query head h reads key head h * Hkv // H.
    Where Tq < Tk the queries are the last Tq positions, as when decoding with a cache. Returns (B, Tq, H, D).
    Full causal attention takes the fused kernel of the device; a window that hides nothing counts as full.
    """
    Tq, Tk = q.size(1), k.size(1)
    full = window is None or window >= Tk
    mask = None
    if not full or 1 < Tq < Tk:
        distance = torch.arange(Tk - Tq, Tk, device=q.device)[:, None] - torch.arange(Tk, device=q.device)  # (Tq, Tk)
        mask = (distance >= 0) if full else (distance >= 0) & (distance < window)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and Tq == Tk,
        enable_gqa=q.size(2) != k.size(2),
    )
    return out.transpose(1, 2)
