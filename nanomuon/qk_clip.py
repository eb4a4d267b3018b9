"""QK-clip (MuonClip, arXiv 2507.20534): scale down the weights of heads whose logits exceed a limit.

    watch_(model, tau)           # once: from now on training forwards record each head's largest logit
    optimizer.step()
    clip_(model, tau)            # every step: scale the rows of W_q and W_k of heads above tau, then reset

For models without QK norm, which bounds the logits by itself and would undo a scaling.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .attention import visible_keys

QUERIES = 256  # queries whose logits exist at a time


@torch.no_grad()
def clip_qk_(wq: Tensor, wk: Tensor, S: Tensor, tau: float = 100.0, alpha: float = 0.5) -> None:
    """In place: eta = min(1, tau / S) per head; rows of W_q times eta^alpha, rows of W_k times eta^(1 -
    alpha).

    wq (H*D, width), wk (Hkv*D, width): whole, or DTensors of any placement, whose pieces each rank scales.
    S (H,): largest scaled logit of each query head, equal on all ranks; one that is not finite scales
    nothing. With grouped queries (Hkv < H) a key head takes the largest S of its group.
    """
    head_dim = len(wq) // len(S)
    eta = torch.where(S.isfinite(), tau / S.clamp(min=tau), 1)  # (H,)
    groups = eta.view(len(wk) // head_dim, -1).amin(1)  # (Hkv,)
    for weight, scale in ((wq, eta**alpha), (wk, groups ** (1 - alpha))):
        scale = scale.repeat_interleave(head_dim)[:, None]  # (rows, 1)
        if isinstance(weight, DTensor):  # its shard takes its part of a replicated factor
            mesh = weight.device_mesh
            scale = DTensor.from_local(scale, mesh, [Replicate()] * mesh.ndim, run_check=False)
        weight.mul_(scale)


def watch_(model: nn.Module, tau: float) -> None:
    """Let every attention layer (a module with a buffer `largest_logits`) record from now on, see
    `record_largest_`.
    """
    for layer in _layers(model):
        device = layer.q.weight.device
        heads = layer.q.weight.size(0) // layer.head_dim
        layer.largest_logits = torch.full((heads,), tau, device=device)[_computed(layer, heads)]  # (H,)


@torch.no_grad()
def clip_(model: nn.Module, tau: float, group: dist.ProcessGroup | None = None) -> None:
    """After an optimizer step: clip_qk_ on every layer, by the largest logits since the last call, over all
    ranks and micro-batches. Collective: one MAX all_reduce of one number per head.
    """
    layers = _layers(model)
    heads = layers[0].q.weight.size(0) // layers[0].head_dim
    largest = layers[0].largest_logits.new_full((len(layers), heads), tau)
    for found, layer in zip(largest, layers, strict=True):
        found[_computed(layer, heads)] = layer.largest_logits
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    for layer, S in zip(layers, largest, strict=True):
        clip_qk_(layer.q.weight, layer.k.weight, S, tau)
        layer.largest_logits.fill_(tau)


def _computed(layer, heads):
    """Which query heads this rank computes: all, or its share in tensor parallelism."""
    weight = layer.q.weight
    if not isinstance(weight, DTensor) or "tp" not in weight.device_mesh.mesh_dim_names:
        return slice(None)
    each = heads // weight.device_mesh["tp"].size()
    first = each * weight.device_mesh["tp"].get_local_rank()
    return slice(first, first + each)


def _layers(model):
    return [module for module in model.modules() if "largest_logits" in module._buffers]


def record_largest_(largest: Tensor, q: Tensor, k: Tensor, window: int | None) -> None:
    """largest (H,) <- max(largest, the largest q_i k_j / sqrt(D) over all j that i sees in `attention`).

    q (B, T, H, D); k (B, T, Hkv, D), neither with a gradient. Computes the logits again, because PyTorch's
    kernels for attention do not return them.
    """
    T, scale = q.size(1), q.size(3) ** -0.5
    q = q.transpose(1, 2)  # (B, H, T, D)
    k = k.repeat_interleave(q.size(1) // k.size(2), dim=2).permute(0, 2, 3, 1)  # (B, H, D, T)
    hidden = ~visible_keys(T, T, window, q.device)
    for start in range(0, T, QUERIES):
        end = min(T, start + QUERIES)
        logits = q[:, :, start:end] @ k[..., :end]
        found = logits.masked_fill(hidden[start:end, :end], -torch.inf).amax((0, 2, 3))  # (H,)
        largest.copy_(largest.maximum(found.float() * scale))
