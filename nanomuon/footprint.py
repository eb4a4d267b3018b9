"""The memory that a run takes on each device, by kind, from shapes alone.

The optimizer's comes from its own plan, which is made on the meta device for the first of many ranks, without
a process group. Nothing here touches a device, so a run on thousands of them can be planned on a laptop.
"""

import functools
import math
from dataclasses import dataclass

import torch

from nanomuon import head_loss, recipe
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import BATCH_BYTES, MuonAdamW, World
from nanomuon.optim_fsdp import Cut, Pipeline
from nanomuon.optim_state import named_parameters
from nanomuon.parallel import COLUMNS, ROWS

FLOAT32 = 4  # bytes of a weight, and of a gradient


@dataclass(frozen=True)
class Layout:
    """How many devices there are, and what they share.

    ranks: devices in all, in sets of `tensor_parallel` that see the same rows. fsdp: parameters are cut
    across the sets (FSDP2).
    """

    ranks: int
    fsdp: bool = False
    tensor_parallel: int = 1

    @property
    def data_parallel(self) -> int:
        return self.ranks // self.tensor_parallel

    @property
    def cuts_rows(self) -> bool:
        return self.fsdp and self.data_parallel > 1


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model: its name, its shape and the index of its param group."""

    name: str
    shape: tuple
    group: int

    @property
    def module(self) -> str:
        """Its name within a block, or the model: "attn.q"."""
        return self.name.split(".", 2)[-1].removesuffix(".weight")

    @property
    def place(self) -> str:
        """The parameters that FSDP2 gathers it with."""
        return {"blocks": "block", "wte": "embedding"}.get(self.name.split(".")[0], "root")

    def cut_dim(self, layout: Layout) -> int | None:
        """The dimension that tensor parallelism cuts."""
        if layout.tensor_parallel == 1:
            return None
        if self.module in COLUMNS:
            return 0
        if self.module in ROWS:
            return 1
        return None

    def held(self, layout: Layout) -> tuple:
        """The shape on a tensor-parallel rank, before FSDP2 cuts it."""
        shape, cut = list(self.shape), self.cut_dim(layout)
        if cut is not None:
            shape[cut] //= layout.tensor_parallel
        return tuple(shape)


@functools.cache
def parameters(config: GPTConfig) -> tuple[list[Parameter], list[dict]]:
    """The parameters of a GPT, and the groups of the recipe that train them."""
    with torch.device("meta"):
        groups = recipe.param_groups(GPT(config))
    found = []
    for i, group in enumerate(groups):
        for name, param in zip(group["names"], group.pop("params"), strict=True):
            found.append(Parameter(name, tuple(param.shape), i))
    return found, groups


# ------------------------------------------------------------------------------------------------------------
# The optimizer's plan


class PlannedWorld(World):
    """The first rank of a world that is only planned, without a process group."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.owned_cost = size, [0] * size


class RankPlan:
    """The optimizer of the first rank, which holds as much as any, on the meta device."""

    def __init__(self, config: GPTConfig, layout: Layout):
        found, groups = parameters(config)
        self.data_parallel = PlannedWorld(layout.data_parallel)
        self.tensor_parallel = PlannedWorld(layout.tensor_parallel)
        groups = [dict(group, params=[], names=[]) for group in groups]
        for parameter in found:
            groups[parameter.group]["params"].append(self.parameter(parameter, layout))
            groups[parameter.group]["names"].append(parameter.name)
        self.optimizer = MuonAdamW(groups, world=PlannedWorld(layout.ranks))
        self.optimizer.plan()

    def parameter(self, parameter: Parameter, layout: Layout) -> torch.nn.Parameter:
        """This rank's part of it, with its cuts (see optim_fsdp.cuts)."""
        shape, cuts = parameter.held(layout), []
        if layout.cuts_rows:
            _, rows = self.data_parallel.share(shape[0], 0)
            shape = (rows, *shape[1:])
            cuts.append(Cut(self.data_parallel, 0, is_tensor_parallel=False))
        if parameter.cut_dim(layout) is not None:
            cuts.append(Cut(self.tensor_parallel, parameter.cut_dim(layout), is_tensor_parallel=True))
        planned = torch.nn.Parameter(torch.empty(shape, device="meta"))
        planned.planned_cuts, planned.planned_shape = cuts, parameter.shape
        return planned

    def weights(self) -> int:
        return sum(param.nbytes for _, param, _ in named_parameters(self.optimizer.param_groups))

    def state(self) -> int:
        total = 0
        for entry in self.optimizer.state.values():
            total += sum(tensor.nbytes for tensor in entry.values())
        return total

    def buffers(self) -> int:
        """The optimizer's transfers in flight, and temporaries of a bank, about four times a batch."""
        in_flight = 0
        for item in self.optimizer.work_items:
            if isinstance(item, Pipeline):
                in_flight += 6 * max(chunk.momentum.nbytes for chunk in item.chunks)
        ranks = self.optimizer.world.size
        if ranks > 1 and not in_flight:
            in_flight = self.weights() * (1 + 1 / ranks)  # see DistMuonAdamW
        return round(in_flight) + 4 * min(BATCH_BYTES["cuda"], self.weights())


# ------------------------------------------------------------------------------------------------------------
# The whole run


@functools.cache
def optimizer_memory(config: GPTConfig, layout: Layout) -> dict[str, int]:
    """Bytes: weights, state and the optimizer's buffers."""
    plan = RankPlan(config, layout)
    return {"weights": plan.weights(), "state": plan.state(), "buffers": plan.buffers()}


def memory_by_kind(config: GPTConfig, layout: Layout, rows: int, compute_bytes: int) -> dict[str, int]:
    """Bytes on the first device, which holds as much as any.

    rows: sequences per device and micro-step. compute_bytes: per activation, 2 in bf16. `weights`,
    `gradients`, `state` (of the optimizer), `activations` (saved for the backward pass of a micro-step) and
    `buffers` (collectives, gathered weights and other temporaries: an estimate).
    """
    optimizer, tokens = optimizer_memory(config, layout), rows * config.seq_len
    buffers = optimizer["buffers"] + FLOAT32 * config.seq_len * config.head_dim  # and the rotary tables
    # Three numbers and a boolean per logit of a chunk; and a second gradient of the head's weight, multiplied
    # by the loss's
    chunk = head_loss.chunk_rows(tokens, config.vocab_size) * config.vocab_size
    buffers += (3 * FLOAT32 + 1) * chunk + FLOAT32 * config.vocab_size * config.width
    if layout.cuts_rows:
        gathered = gathered_numbers(config, layout)
        # Weights and gradients of two blocks, the embedding and the root's parameters
        buffers += 2 * (compute_bytes + FLOAT32) * gathered["block"] / config.depth
        buffers += 2 * FLOAT32 * (gathered["embedding"] + gathered["root"])
    return {
        "weights": optimizer["weights"],
        "gradients": optimizer["weights"],
        "state": optimizer["state"],
        "activations": activations(config, tokens, layout.tensor_parallel, compute_bytes),
        "buffers": round(buffers),
    }


def gathered_numbers(config: GPTConfig, layout: Layout) -> dict[str, int]:
    """How many numbers FSDP2 gathers per place, padded to equal pieces."""
    numbers = {"block": 0, "embedding": 0, "root": 0}
    for parameter in parameters(config)[0]:
        rows, *rest = parameter.held(layout) or (1,)
        padded_rows = -(-rows // layout.data_parallel) * layout.data_parallel
        numbers[parameter.place] += padded_rows * math.prod(rest)
    return numbers


def activations(config: GPTConfig, tokens: int, tensor_parallel: int, compute_bytes: int) -> int:
    """Bytes saved for the backward pass of `tokens` tokens, run eagerly; a compiled model saves less.

    Per layer and channel, 5 times the residual: before and after attention, twice normalized, and after the
    convolution. Divided by tensor parallelism: queries and keys before and after their norm,
    values, the output of attention, and 2 times the 4 widths of the MLP. Outside the blocks, the rows of the
    head that values take, the last residual and the gradient of its norm, and the gradient of the head's
    weight, which the forward pass computes (head_loss.py). Below float32 also the weights of the blocks'
    products, in the lower
    precision.
    """
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    cut = (1 + config.qk_norm) * (queries + keys) + keys + queries
    mlp = 8 * config.width / tensor_parallel
    channels = config.depth * (5 * config.width + cut / tensor_parallel + mlp) + 3 * config.width
    copies = 0
    if compute_bytes < FLOAT32:
        found, groups = parameters(config)
        matrices = [parameter for parameter in found if groups[parameter.group]["kind"] == "muon"]
        layout = Layout(tensor_parallel, tensor_parallel=tensor_parallel)
        copies += sum(math.prod(parameter.held(layout)) for parameter in matrices)
    return round(compute_bytes * (tokens * channels + copies) + FLOAT32 * config.vocab_size * config.width)
