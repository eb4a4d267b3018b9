"""QK-clip (MuonClip, arXiv 2507.20534): scale down the weights of heads whose logits exceed a limit.

    watch_(model, tau)           # once: forward passes in training then record each head's largest logit
    optimizer.step()
    clip_(model, tau)            # every step: scale the rows of W_q and W_k of heads above tau, then reset

For models without QK norm, which would bound the logits by itself and undo the scaling.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental import implicit_replication

from .attention import visible_keys

QUERIES = 256  # queries whose logits exist at a time


def clip_qk_(wq: Tensor, wk: Tensor, S: Tensor, tau: float) -> None:
    """In place: rows of W_q and W_k times sqrt(eta), eta = min(1, tau / S) per head.

    wq (H*D, width), wk (Hkv*D, width): whole, or DTensors of any placement, whose shards each rank scales.
    S (H,): largest scaled logit of each query head, equal on all ranks; a value that is not finite scales
    nothing. With grouped queries (Hkv < H) a key head uses the largest S of its group.
    """
    head_dim = len(wq) // len(S)
    eta = tau / S.nan_to_num(tau, tau).clamp(tau)  # (H,)
    of_keys = eta.view(len(wk) // head_dim, -1).amin(1)  # (Hkv,)
    with implicit_replication():  # each shard of a DTensor uses its part of the factor, which all ranks have
        for weight, factor in ((wq, eta), (wk, of_keys)):
            weight.mul_(factor.sqrt().repeat_interleave(head_dim)[:, None])


def watch_(model: nn.Module, tau: float) -> None:
    """Make every attention layer (a module with a buffer `largest_logits`) record from now on, see
    `record_largest_`.
    """
    for layer in _layers(model):
        heads = layer.q.out_features // layer.head_dim
        layer.largest_logits = torch.full((heads,), tau, dtype=torch.float32, device=layer.q.weight.device)


@torch.no_grad()
def clip_(model: nn.Module, tau: float, tensor_parallel: int = 1, group=None) -> None:
    """After an optimizer step, call clip_qk_ on every layer with the largest logits since the last call, over
    all ranks and micro-batches. tensor_parallel: how many consecutive ranks share the heads of a layer.
    Collective: one MAX all_reduce of one number per head.
    """
    layers = _layers(model)
    largest = torch.stack([layer.largest_logits for layer in layers])  # (layers, H), this rank's heads first
    if dist.is_initialized():
        place = dist.get_rank(group) % tensor_parallel * largest.size(1) // tensor_parallel
        largest = largest.roll(place, 1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    for layer, S in zip(layers, largest, strict=True):
        clip_qk_(layer.q.weight, layer.k.weight, S, tau)
        layer.largest_logits.fill_(tau)


def _layers(model):
    return [module for module in model.modules() if "largest_logits" in module._buffers]


def record_largest_(largest: Tensor, q: Tensor, k: Tensor, window: int | None) -> None:
    """largest[:H] <- max(largest[:H], the largest q_i k_j / sqrt(D) over all j that i sees in `attention`).

    q (B, T, H, D); k (B, T, Hkv, D), both detached. Recomputes the logits, because PyTorch's attention
    kernels do not return them.
    """
    T, heads, D = q.shape[1:]
    largest, k = largest[:heads], k.repeat_interleave(heads // k.size(2), 2)
    hidden = ~visible_keys(torch.arange(T, device=q.device), T, window)
    for start in range(0, T, QUERIES):
        end = start + QUERIES
        logits = torch.einsum("bihd,bjhd->hbij", q[:, start:end], k[:, :end])
        found = logits.masked_fill(hidden[start:end, :end], -torch.inf).amax((1, 2, 3))  # (H,)
        largest.copy_(largest.maximum(found.float() * D**-0.5))
