"""What a run takes on each device, from shapes alone: memory by kind, bytes communicated, Newton-Schulz
FLOPs.

Nothing here touches a device, so a run on thousands of them can be planned on a laptop.
"""

import functools
import math
from collections import Counter
from typing import NamedTuple

import torch

from nanomuon import recipe
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import SMALL
from nanomuon.orthogonalize import gram_pays, newton_schulz_flops, triples
from nanomuon.parallel import COLUMNS, ROWS
from nanomuon.sharded import BATCH_BYTES, CHUNK_BYTES

NUMBER = 4  # bytes of a weight, a gradient and a number of the optimizer's state: float32
IN_FLIGHT = 3  # chunks of the pipeline, the default of DistMuonAdamW


class Part(NamedTuple):
    """One parameter."""

    whole: tuple  # shape, (m, n) of each matrix where it is (E, m, n) of experts
    held: tuple  # shape on a tensor-parallel rank, experts included
    cut: int | None  # the dimension in which they differ
    muon: bool
    steps: int = 0  # of Newton-Schulz
    variance: bool = False  # a second moment
    place: str = "root"  # or "block" or "embedding": what FSDP2 gathers together
    experts: int = 0

    @property
    def second(self):
        """Numbers of the second moment of a matrix."""
        return max(self.whole) if self.variance else 0


@functools.cache
def _parameters(config):
    """[(name, shape, kind and options of a Part)] of a GPT under the recipe."""
    with torch.device("meta"):
        model = GPT(config)
    found = []
    for group in recipe.param_groups(model):
        kind = dict(muon=group["kind"] == "muon")
        if kind["muon"]:
            steps = len(triples(group.get("coefficients", "polar_express"), group["ns_steps"]))
            kind |= dict(steps=steps, variance=group["beta2"] is not None)
        found += [
            (name, tuple(p.shape), kind) for name, p in zip(group["names"], group["params"], strict=True)
        ]
    return found


@functools.cache
def parts(config: GPTConfig, tensor_parallel: int = 1) -> Counter:
    """{Part: how many parameters are like it} of a GPT under the recipe."""
    found = Counter()
    for name, shape, kind in _parameters(config):
        experts = shape[0] if len(shape) == 3 else 0
        held, module, cut = list(shape), name.split(".", 2)[-1].removesuffix(".weight"), None
        if tensor_parallel > 1 and (name.startswith("value_embeds") or module in COLUMNS + ROWS):
            cut = 0 if module in COLUMNS else 1
            held[cut] //= tensor_parallel
        place = {"blocks": "block", "wte": "embedding", "value_embeds": "embedding"}.get(
            name.split(".")[0], "root"
        )
        found[Part(shape[-2:], tuple(held), cut, **kind, place=place, experts=experts)] += 1
    return found


def footprint(
    config: GPTConfig,
    ranks: int,
    fsdp: bool,
    tensor_parallel: int,
    rows: int,
    micro_steps: int,
    compute_bytes: int,
) -> dict[str, int]:
    """What the device takes that has the most of it.

    ranks: devices in all, of which `tensor_parallel` at a time see the same rows. rows: sequences per device
    and micro-step. compute_bytes: of an activation, 2 in bf16. Returns bytes of `weights`, `gradients`,
    `state` (of the optimizer), `activations` (saved for the backward of a micro-step) and `buffers`
    (collectives, gathered weights and other temporaries: an estimate); `communicated`, the bytes that a
    device sends in a step by ring algorithms; `newton_schulz`, FLOPs of a step.
    """
    model, data, tokens = parts(config, tensor_parallel), ranks // tensor_parallel, rows * config.seq_len
    fsdp = fsdp and data > 1
    shards = data if fsdp else 1
    weights = NUMBER * sum(count * math.prod(_rows(part.held, shards)) for part, count in model.items())
    optimizer = _optimizer(model, ranks, data, tensor_parallel, fsdp, compute_bytes)
    buffers = optimizer["buffers"] + NUMBER * config.seq_len * config.head_dim  # and the rotary tables
    buffers += (
        2 * NUMBER * tokens * config.vocab_size
    )  # the gradient of the logits before and after their cap
    sent = optimizer["sent"]
    if fsdp:
        gathered = (
            NUMBER if config.experts else compute_bytes
        )  # parallel.parallelize: the router computes in float32
        numbers, largest = Counter(), 0  # padded to equal pieces
        for part, count in model.items():
            padded = data * math.prod(_rows(part.held, data))
            numbers[part.place] += count * padded
            largest = max(largest, padded if part.place == "embedding" else 0)
        block, rest = numbers.pop("block"), sum(numbers.values())
        # all_gather of a block before its forward and its backward, of what is around them once;
        # reduce_scatter of all
        sent += micro_steps * (2 * gathered * block + NUMBER * (block + 2 * rest)) * (data - 1) / data
        # weights and gradients: two blocks, two embeddings and the head
        buffers += 2 * (gathered + NUMBER) * block / config.depth + 2 * NUMBER * (
            2 * largest + numbers["root"]
        )
    if tensor_parallel > 1:
        # an all_reduce after the attention and one after the MLP, in the backward before them; experts are
        # not cut
        sums = 2 if config.experts else 4
        sent += (
            micro_steps
            * sums
            * config.depth
            * _all_reduce(tokens * config.width * compute_bytes, tensor_parallel)
        )
    if tensor_parallel > 1 and not fsdp:  # the mean of the gradients
        held = sum(count * math.prod(part.held) for part, count in model.items() if part.cut is not None)
        sent += _all_reduce(NUMBER * held, data)
    return {
        "weights": weights,
        "gradients": weights,
        "state": optimizer["state"],
        "activations": activations(config, tokens, tensor_parallel, compute_bytes),
        "buffers": round(buffers),
        "communicated": round(sent),
        "newton_schulz": round(optimizer["flops"]),
    }


def memory(footprint: dict[str, int]) -> int:
    """Bytes a device needs."""
    return sum(footprint[kind] for kind in ("weights", "gradients", "state", "activations", "buffers"))


def activations(config: GPTConfig, tokens: int, tensor_parallel: int, compute_bytes: int) -> int:
    """Bytes saved for the backward of `tokens` tokens, run eagerly; a compiled model saves less.

    Per layer and channel 6 times the residual: running, mixed, between attention and MLP, twice normalized,
    and after the convolution. Divided by tensor parallelism: queries and keys before and after their norm,
    values, value embeddings, what attention puts out, and 2 times the 4 widths of the MLP; experts are not
    divided and save what goes into and comes out of each that a token visits. After the blocks the residual
    twice, and the logits twice in float32. Below float32 also the weights of the products, in the lower
    precision.
    """
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    embeds = sum(map(config.has_value_embed, range(config.depth))) / config.depth
    cut = (1 + config.qk_norm) * (queries + keys) + (1 + embeds) * keys + queries
    mlp = 8 * config.width / tensor_parallel
    if config.experts:
        mlp = (8 + 2 * config.experts_per_token) * config.width
    channels = config.depth * (6 * config.width + cut / tensor_parallel + mlp) + 2 * config.width
    copies = config.vocab_size * config.width if compute_bytes < NUMBER else 0
    for part, count in parts(config, tensor_parallel).items():
        copies += count * math.prod(part.held) if part.muon and compute_bytes < NUMBER else 0
    return round(compute_bytes * (tokens * channels + copies) + 2 * NUMBER * tokens * config.vocab_size)


def _optimizer(model, ranks, data, tensor_parallel, fsdp, product_bytes):
    """State, bytes sent, FLOPs and buffers of DistMuonAdamW: the most that a rank has of each."""
    world = data if fsdp else ranks  # who shares the work on what tensor parallelism does not cut
    everyone = range(world)
    state, sent, flops, load = ([0.0] * world for _ in range(4))
    by_all, small, buffers, matrices = _all_reduce(4, ranks), 0, 0, 0  # 4: whether all gradients are finite
    for part, count in model.items():
        if part.muon:
            continue
        numbers = math.prod(part.held)
        slices = world if fsdp or part.cut is None and numbers >= SMALL else 1
        if not fsdp and slices > 1:  # reduce_scatter and all_gather
            padded = count * NUMBER * slices * math.prod(_rows(part.held, slices))
            by_all += _all_reduce(padded, slices)
            buffers += padded / slices + (padded if part.held[0] % slices else 0)
        elif not fsdp and part.cut is None:
            small += count * numbers
        for rank in everyone:
            mine = math.prod(_rows(part.held, slices, rank % slices))
            state[rank] += count * (2 * NUMBER * mine + 4)  # and the step
    by_all += _all_reduce(NUMBER * small, ranks)
    for bank, count in _banks(model, fsdp):
        matrix, whole_flops = NUMBER * math.prod(bank.held[-2:]), newton_schulz_flops(*bank.whole, bank.steps)
        owners = world if fsdp or bank.cut is None else 1
        even, left = divmod(count, owners)
        idlest = set(sorted(everyone, key=load.__getitem__)[:left])
        experts_of = [_rows(bank.held, owners, rank)[0] for rank in everyone]  # like Shard(0)
        tp_sent, tp_share = _tensor_parallel(bank, tensor_parallel, product_bytes)
        matrices = max(matrices, count * NUMBER * math.prod(bank.whole))
        if (
            not fsdp and owners > 1
        ):  # reduce_scatter and all_gather of a padded bank, or of each matrix by itself
            stacked = matrix * (count if 2 * count < owners else -(-count // owners) * owners)
            by_all += _all_reduce(stacked, owners)
            buffers += stacked * (1 + 1 / owners)
        for rank in everyone:
            owned = experts_of[rank] if bank.experts else even + (rank in idlest)
            if not (fsdp and bank.experts):
                load[rank] += owned * whole_flops
            flops[rank] += owned * whole_flops * tp_share
            sent[rank] += owned * tp_sent
            state[rank] += owned * NUMBER * bank.second
            if fsdp and not bank.experts:  # momentum shards to the owners, update shards back
                shard = NUMBER * math.prod(_rows(bank.held, world, rank))
                state[rank] += count * shard
                sent[rank] += (count - owned) * shard + owned * (matrix - shard)
            else:
                state[rank] += owned * matrix
    # a batch of Newton-Schulz with its products, and what the chunks of the pipeline send and receive
    buffers += (
        4 * min(matrices, BATCH_BYTES["cuda"]) + 2 * IN_FLIGHT * min(matrices, CHUNK_BYTES["cuda"]) * fsdp
    )
    return dict(state=round(max(state)), sent=max(sent) + by_all, flops=max(flops), buffers=buffers)


def _banks(model, fsdp):
    """(Part, how many matrices) in the order in which the optimizer finds owners for them."""
    banks, of_experts = Counter(), []
    for part, count in model.items():
        if part.experts:  # each parameter a bank by itself
            of_experts += [(part, part.experts)] * count
        elif part.muon:  # whole matrices and their transposes share a bank
            shape = tuple(sorted(part.whole))
            banks[part if fsdp or part.cut is not None else part._replace(whole=shape, held=shape)] += count
    return sorted(
        [*banks.items(), *of_experts], key=lambda item: -newton_schulz_flops(*item[0].whole, item[0].steps)
    )


def _tensor_parallel(part, ranks, product_bytes):
    """Bytes that each of `ranks` sends to orthogonalize a matrix that they share, and its part of the
    FLOPs.
    """
    if part.cut is None:
        return 0, 1
    m, n = part.whole
    if not (m >= n if part.cut == 0 else n >= m):  # duplicated
        return NUMBER * m * n * (ranks - 1) / ranks, 1
    gram, short, long = gram_pays(m, n, part.steps), min(m, n), max(m, n)
    products = min(part.steps, 2) if gram else part.steps
    sent = _all_reduce(NUMBER + products * short**2 * product_bytes, ranks)  # the norm and the Gram matrices
    if part.variance:  # a sum over the side that is cut, or the pieces of the side that has the values
        summed = part.cut == (1 if m >= n else 0)
        sent += _all_reduce(NUMBER * long, ranks) if summed else NUMBER * long * (ranks - 1) / ranks
    cut_flops = 4 * short**2 * long * (min(part.steps, 2) if gram else part.steps)
    return sent, 1 - (1 - 1 / ranks) * cut_flops / newton_schulz_flops(m, n, part.steps)


def _rows(shape, ranks, rank=0):
    """Shape of a rank's piece: ceil(rows/W) rows, the last ones short or empty."""
    each = -(-shape[0] // ranks)
    return max(0, min(each, shape[0] - rank * each)), *shape[1:]


def _all_reduce(size, ranks):
    """Bytes that each rank sends."""
    return 2 * size * (ranks - 1) / ranks
