"""Bits per byte: a loss that does not depend on the vocabulary."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()  # not inference_mode: what FSDP2 gathers here, training uses too
def bits_per_byte(
    model: torch.nn.Module, batches: Iterable[tuple[Tensor, Tensor]], token_bytes: Tensor
) -> float:
    """Cross-entropy of the text in bits, divided by the UTF-8 bytes of the text.

    batches yields (inputs, targets), each (B, T) int64, targets of -1 unscored; token_bytes (V,) gives the
    bytes that each token stands for. Special tokens stand for none and are not scored. Every rank passes its
    share of the batches and gets the figure for all of them. Raises ValueError where no target has bytes.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=token_bytes.device)  # nats, bytes
    for inputs, targets in batches:
        loss = model(inputs, targets, reduction="none")  # (B * T,) nats
        scored = torch.where(targets < 0, 0, token_bytes[targets]).flatten()  # (B * T,) bytes
        sums[0] += loss[scored > 0].sum(dtype=torch.float64)
        sums[1] += scored.sum()
    if dist.is_initialized():
        dist.all_reduce(sums)
    nats, count = sums.tolist()
    if not count:
        raise ValueError("no validation text to score")
    return nats / (math.log(2) * count)
