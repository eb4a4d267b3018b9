"""QK-clip (MuonClip, arXiv 2507.20534): attention logits that outgrow a limit are brought back through the
weights.

    watch_(model, tau)           # once: from now on training forwards record each head's largest logit
    optimizer.step()
    clip_(model, tau)            # every step: scale the rows of W_q and W_k of heads above tau, start anew

For models without QK norm, which bounds the logits by itself and would undo a scaling.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

LOGITS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}  # numbers of a block that is measured


@torch.no_grad()
def clip_qk_(wq: Tensor, wk: Tensor, S: Tensor, tau: float = 100.0, alpha: float = 0.5) -> None:
    """In place: eta = min(1, tau / S) per head; rows of W_q times eta^alpha, rows of W_k times eta^(1 -
    alpha).

    wq (H*D, width), wk (Hkv*D, width): whole, or DTensors of any placement, of which each rank scales what it
    holds. S (H,): largest scaled logit of each query head, equal on all ranks; one that is not finite scales
    nothing. With grouped queries (Hkv < H) a key head takes the largest S of its group. ValueError for sizes
    that do not divide.
    """
    head_dim, rest = divmod(len(wq), len(S))
    if rest or len(wk) % head_dim or len(wq) % len(wk):
        raise ValueError(f"W_q has {len(wq)} rows and W_k {len(wk)}, which {len(S)} heads do not divide")
    eta = torch.where(S.isfinite(), tau / S.clamp(min=tau), 1)  # (H,)
    groups = eta.view(len(wk) // head_dim, -1).amin(1)  # (Hkv,)
    for weight, scale in ((wq, eta**alpha), (wk, groups ** (1 - alpha))):
        scale = scale.repeat_interleave(head_dim)[:, None].to(weight.dtype)  # (rows, 1)
        if isinstance(weight, DTensor):  # which takes of a replicated factor what its shard needs
            mesh = weight.device_mesh
            scale = DTensor.from_local(scale, mesh, [Replicate()] * mesh.ndim, run_check=False)
        weight.mul_(scale)


def watch_(model: nn.Module, tau: float) -> None:
    """Let every attention layer (a module with a buffer `largest_logits`) record from now on; see
    `record_largest_`.
    """
    for layer in _layers(model):
        device = layer.q.weight.device
        heads = layer.q.weight.size(0) // layer.head_dim
        layer.largest_logits = torch.full((heads,), tau, device=device)[_computed(layer, heads)]  # (H,)


@torch.no_grad()
def clip_(model: nn.Module, tau: float, alpha: float = 0.5, group: dist.ProcessGroup | None = None) -> None:
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
        clip_qk_(layer.q.weight, layer.k.weight, S, tau, alpha)
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


@torch.library.custom_op("nanomuon::record_largest_", mutates_args=("largest",))
def record_largest_(largest: Tensor, q: Tensor, k: Tensor, window: int | None) -> None:
    """largest (H,) <- max(largest, the largest q_i k_j / sqrt(D) over all i, j that `attention` lets meet),
    exactly.

    q (B, T, H, D); k (B, T, Hkv, D). Logits are computed in blocks that are not kept. No logit is larger than
    max |q_i| max |k_j| / sqrt(D): on a CPU only heads where this bound exceeds `largest`, which starts at
    tau, are looked at. On a GPU that question would wait for the device in every layer and micro-step: there
    all heads are, which at depth 24 is about a tenth of a step (estimated from the bytes that move on an
    H100, not run on one). One op to the compiler, because which heads these are is known at run time only.
    """
    heads = torch.arange(q.size(2), device=q.device)
    key_heads = heads * k.size(2) // q.size(2)
    scale = q.size(3) ** -0.5
    if q.device.type == "cpu":
        longest_q = torch.linalg.vector_norm(q, dim=-1).amax((0, 1)).float()  # (H,)
        longest_k = torch.linalg.vector_norm(k, dim=-1).amax((0, 1)).float()  # (Hkv,)
        heads = heads[longest_q * longest_k[key_heads] * scale > largest]
        if not len(heads):
            return
    q = q[:, :, heads].transpose(1, 2)  # (B, h, T, D)
    k = k[:, :, key_heads[heads]].permute(0, 2, 3, 1)  # (B, h, D, T)
    positions = torch.arange(q.size(2), device=q.device)
    block = max(16, LOGITS_AT_ONCE[q.device.type] // (q.size(0) * len(heads) * len(positions)))
    for start in range(0, len(positions), block):
        rows = positions[start : start + block]
        first = 0 if window is None else max(0, start + 1 - window)
        columns = positions[first : start + len(rows)]
        distance = rows[:, None] - columns
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        logits = q[:, :, rows] @ k[..., columns]  # (B, h, rows, columns)
        found = logits.masked_fill_(hidden, -torch.inf).amax((0, 2, 3)).float() * scale
        largest[heads] = largest[heads].maximum(found)
