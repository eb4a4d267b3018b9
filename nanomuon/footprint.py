"""The memory that a run takes on each device, by kind: a formula of the model's shapes.

Nothing here touches a device, so a run on thousands of them can be planned on a laptop.
"""

import functools
from collections import Counter
from dataclasses import dataclass

import torch

from nanomuon import head_loss, recipe
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import BATCH_BYTES, assign_owners
from nanomuon.parallel import cut_dim

FLOAT32 = 4  # bytes of a weight, of its gradient and of each number that the optimizer keeps


@dataclass(frozen=True)
class Layout:
    """How many devices there are, and what they share.

    ranks: devices in all, in sets of `tensor_parallel` that see the same rows. fsdp: parameters are cut
    across the sets (FSDP2).
    """

    ranks: int
    fsdp: bool = False
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Part:
    """What the first rank, which holds as much as any, has of a parameter."""

    kind: str  # of its param group: muon or adamw
    whole: torch.Size  # the parameter's shape
    held: torch.Size  # the part's


@functools.cache
def parts(config: GPTConfig, layout: Layout) -> list[Part]:
    """Of all parameters of a GPT, in the groups of the recipe."""
    with torch.device("meta"):
        model = GPT(config)
    found = []
    for group in recipe.param_groups(model):
        for name, param in zip(group["names"], group["params"], strict=True):
            held, cut = list(param.shape), cut_dim(model.get_submodule(name.rpartition(".")[0]))
            if cut is not None:
                held[cut] //= layout.tensor_parallel
            if layout.fsdp:
                held[0] = -(-held[0] * layout.tensor_parallel // layout.ranks)
            found.append(Part(group["kind"], param.shape, torch.Size(held)))
    return found


def memory_by_kind(config: GPTConfig, layout: Layout, rows: int, compute_bytes: int) -> dict[str, int]:
    """Bytes on the first device.

    rows: sequences per device and micro-step. compute_bytes: per activation, 2 in bf16. `weights`,
    `gradients`, `state` (of the optimizer), `activations` (saved for the backward pass of a micro-step) and
    `buffers`: what else the larger of two moments needs, the loss or the optimizer's step, in which there are
    no activations.
    """
    tokens = rows * config.seq_len
    weights = FLOAT32 * sum(part.held.numel() for part in parts(config, layout))
    saved = activations(config, layout, tokens, compute_bytes)
    # In its code for GPUs, Inductor makes the logits of all chunks, then one gradient after the other
    in_loss = compute_bytes * config.vocab_size * (tokens + head_loss.chunk_rows(tokens, config.vocab_size))
    # A step's temporaries are about four times a batch of matrices
    in_step = 4 * min(BATCH_BYTES["cuda"], weights)
    if layout.fsdp:  # gathers weights and gradients of two blocks, the embedding and the head
        of_all = 2 * weights * layout.ranks // layout.tensor_parallel
        in_loss += of_all * 2 // config.depth + 2 * FLOAT32 * 2 * config.vocab_size * config.width
    elif layout.ranks > 1:  # all gradients and results are in flight at once, see optim.py
        in_step += weights + weights // layout.ranks
    return {
        "weights": weights,
        "gradients": weights,
        "state": optimizer_state(config, layout),
        "activations": saved,
        "buffers": max(in_loss, in_step - saved),
    }


def optimizer_state(config: GPTConfig, layout: Layout) -> int:
    """Bytes of moments on the rank that has the most.

    A matrix has its momentum and one number per line of its long side, an AdamW parameter two moments. The
    ranks divide whole parameters: each matrix has an owner, and AdamW's rows go to all alike, but not its
    vectors. Moments of a part of a parameter are with it, but every rank has all lines.
    """
    numbers, banks = 0, Counter()
    for part in parts(config, layout):
        is_whole = part.held == part.whole
        if part.kind == "adamw":
            is_divided = is_whole and len(part.whole) > 1
            numbers += 2 * part.held.numel() / (layout.ranks if is_divided else 1)
        elif is_whole:
            banks[part.whole] += 1
        else:
            numbers += part.held.numel() + max(part.whole)
    owned, cost = [0] * layout.ranks, [0] * layout.ranks
    for shape in sorted(banks, key=torch.Size.numel, reverse=True):
        for owner in assign_owners(banks[shape], shape.numel() * min(shape), cost):
            owned[owner] += shape.numel() + max(shape)
    return round(FLOAT32 * (numbers + max(owned)))


def activations(config: GPTConfig, layout: Layout, tokens: int, compute_bytes: int) -> int:
    """Bytes saved for the backward pass of `tokens` tokens, run eagerly or compiled.

    In a block, five times the residual: before and after attention, normalized for each, and after the
    convolution. Divided by tensor parallelism: queries and keys before and after their norm, values, the
    output of attention, and the hidden channels of the MLP twice. Outside the blocks, the embedding, the rows
    of the head (in float32, and those channels that values take), the gradient of the last residual and that
    of the head's weight, which the forward pass computes (head_loss.py). Below float32 also the weights of
    the blocks' products, in the lower precision.
    """
    width, keys = config.width, config.kv_heads * config.head_dim
    cut = (1 + config.qk_norm) * (width + keys) + keys + 9 * width
    in_block = 5 * width + cut / layout.tensor_parallel
    numbers = tokens * (config.depth * in_block + 2 * width + keys)
    if compute_bytes < FLOAT32:
        numbers += sum(part.held.numel() for part in parts(config, layout) if part.kind == "muon")
    return round(compute_bytes * numbers + FLOAT32 * width * (tokens + config.vocab_size))
