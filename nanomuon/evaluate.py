"""Bits per byte: a loss by which models with different vocabularies can be compared."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def bits_per_byte(
    model: torch.nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    token_bytes: Tensor,
    as_in_training: bool = False,
) -> float:
    """Cross-entropy of the text in bits, divided by the UTF-8 bytes of the text.

    model(inputs, targets) returns the mean loss in nats over the targets that are not -1. batches yields
    (inputs, targets), each (B, T) int64, targets of -1 unscored; token_bytes (V,) is the number of bytes of
    each token. Special tokens have none and are not scored. Every rank passes its share of the batches and
    gets the figure for all of them. Waits for the device once, at the end.

    as_in_training: run the forward pass with gradients. A compiled model has compiled it already; without
    gradients it would compile another graph, which costs more than it saves (docs/log.md). It takes the
    memory of a training step's forward pass.
    """
    # Training's forward pass also records the largest logits; evaluation must not
    before = [buffer.clone() for buffer in model.buffers()] if as_in_training else []
    sums = torch.zeros(2, dtype=torch.float64, device=token_bytes.device)  # nats, bytes
    # Not inference_mode: training also uses what FSDP2 gathers here
    with torch.set_grad_enabled(as_in_training):
        for inputs, targets in batches:
            lengths = torch.where(targets < 0, 0, token_bytes[targets])  # (B, T) bytes
            scored = lengths > 0
            mean = model(inputs, torch.where(scored, targets, -1)).detach()  # NaN if nothing is scored
            count = scored.sum()
            sums[0] += torch.where(count > 0, mean.double() * count, 0)
            sums[1] += lengths.sum()
    if as_in_training:
        for buffer, values in zip(model.buffers(), before, strict=True):
            buffer.copy_(values)
    if dist.is_initialized():
        dist.all_reduce(sums)
    nats, size = sums.tolist()
    return nats / (math.log(2) * size)
