"""The size of a run before it starts: its model, batch, length and micro-batch, and the memory they take.

Memory is a formula of the model's shapes, so a laptop can plan a run on thousands of GPUs.
"""

import argparse
import functools
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from nanomuon import head_loss, parallel, recipe
from nanomuon.attention import kernels_in_use
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import BATCH_BYTES, assign_owners
from nanomuon.runtime import InputError, Runtime, compile_enabled, print0, timed
from nanomuon.settings import Settings
from nanomuon.shards import default_vocab_size

FLOAT32 = 4  # bytes of a weight, of its gradient and of each number in the optimizer's state
FILLED = 0.85  # share of a GPU's memory that a step may take
FEWEST_COMPILED = 1_000_000  # tokens: shorter runs on a CPU are not compiled
# The time of a step, relative to that of its FLOPs at the speed of a product: measured 1.1 to 1.5
# (docs/benchmarks.md)
STEP_TIME = 1.4

# Dense peak TFLOP/s of bf16 products accumulated in float32, from NVIDIA's data sheets and white papers (half
# of a figure "with sparsity"), by words in a GPU's name; the last match counts
BF16_TFLOPS = {
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H200 NVL": 835,
    "H100": 989,  # SXM
    "H100 NVL": 835,
    "H100 PCIE": 756,
    "A100": 312,
    "L40S": 362,
    "A10": 125,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71,
}


@dataclass(frozen=True)
class Layout:
    """How many devices there are, and what they share.

    ranks: the number of devices, in sets of `tensor_parallel` that see the same rows. fsdp: whether
    parameters are sharded across the sets (FSDP2).
    """

    ranks: int
    fsdp: bool = False
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Plan:
    config: GPTConfig
    rows: int  # per micro-step and device
    batch: int  # tokens per optimizer step, over all devices
    steps: int
    layout: Layout
    parameters: int
    flops_per_token: int  # in the forward and the backward pass
    memory: int  # bytes on a device at the peak of a step

    @property
    def data_parallel(self) -> int:
        """How many processes see different rows."""
        return self.layout.ranks // self.layout.tensor_parallel

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes per optimizer step."""
        return self.batch // (self.rows * self.config.seq_len * self.data_parallel)

    @property
    def tokens(self) -> int:
        return self.batch * self.steps


def make_plan(args: argparse.Namespace, runtime: Runtime, settings: Settings | None = None) -> Plan:
    """The run that the arguments request on these processes; the rest follows from the depth and the device.

    For example, at depth 4 with a vocabulary of 4,096, matrices and head have 4.2M weights: 10.5 tokens for
    each are 44M tokens. Such a run takes 131,072 tokens a step, so 336 steps; on one CPU, each has 16
    micro-steps of 16 rows of 512 tokens.

    settings: what the run has recorded, if it exists. InputError for a model that cannot be built or trained
    here, and for a batch that cannot be divided among the processes.
    """
    config = model_config(args, runtime.device.type)
    model = meta_model(config)
    data_parallel = parallel.data_parallel_size(runtime.world_size, args.tensor_parallel, config)
    layout = Layout(runtime.world_size, args.shard == "fsdp", args.tensor_parallel)
    tokens = requested_tokens(args, model)
    one_row_each = config.seq_len * data_parallel  # tokens, if every device has one row
    rows = args.device_batch_size
    # Other micro-steps round differently, so in the same world and layout a run keeps its first choice
    same_world = settings and settings.world_size == runtime.world_size
    if rows is None and same_world and settings.layout in (None, asdict(layout)):
        rows = settings.rows
    if rows is None:
        if args.total_batch_size:
            device_rows = max(1, args.total_batch_size // one_row_each)  # per step
        else:  # a power of two, so that the batch can be one too
            device_rows = 2 ** int(math.log2(total_batch_size(tokens, one_row_each) // one_row_each))
        rows = rows_that_fit(config, layout, device_rows, runtime)
    micro_batch = rows * one_row_each
    batch = args.total_batch_size or total_batch_size(tokens, micro_batch)
    if batch % micro_batch:
        advice = "change one of them"
        if settings and not args.device_batch_size:  # batch and context define the run
            advice = f"use a number of processes that divides its {batch // config.seq_len} rows per step"
        raise InputError(
            f"--total-batch-size {batch} is not a multiple of {micro_batch} (--device-batch-size {rows} x "
            f"--max-seq-len {config.seq_len} x {data_parallel} processes): {advice}"
        )
    return Plan(
        config,
        rows,
        batch,
        args.num_iterations or max(1, tokens // batch),
        layout,
        sum(p.numel() for p in model.parameters()),
        model.estimate_flops(),
        sum(memory_by_kind(config, layout, rows, runtime.compute_dtype.itemsize).values()),
    )


def model_config(args: argparse.Namespace, device: str) -> GPTConfig:
    """The model that the arguments request. InputError for one that cannot be built."""
    on_gpu, windows = device == "cuda", args.window_pattern
    if windows is None:  # windows do not make PyTorch's own kernels faster (docs/log.md)
        windows = "SSSL" if torch.nn.attention.current_flash_attention_impl() else "L"
    # Flags that are called like a field, such as --depth, and those that are not
    config = {name: value for name, value in vars(args).items() if name in GPTConfig.__dataclass_fields__}
    config |= {"vocab_size": args.vocab_size or default_vocab_size(args.corpus)}
    config |= {"seq_len": args.max_seq_len or (2048 if on_gpu else 512)}
    config |= {"window_pattern": windows, "qk_norm": not args.no_qk_norm}
    try:
        return GPTConfig.from_depth(**config)
    except ValueError as error:
        raise InputError(str(error)) from error


def meta_model(config: GPTConfig) -> GPT:
    """The model on the meta device, for counting."""
    with torch.device("meta"):
        return GPT(config)


def requested_tokens(args: argparse.Namespace, model: GPT) -> int:
    """The number of tokens that --target-flops allows, else that --target-param-data-ratio requests.

    20 per parameter are compute-optimal for the models of Hoffmann et al. (arXiv 2203.15556); Muon-trained
    models of this family do best near 10 (nanochat, 2026).
    """
    if args.target_flops is not None:
        return round(args.target_flops / model.estimate_flops())
    return int((args.target_param_data_ratio or 10.5) * model.multiplied_weights())


def total_batch_size(tokens: int, micro_batch: int) -> int:
    """Tokens per optimizer step for a run of `tokens`. micro_batch: tokens per micro-step on all devices.

    The critical batch size grows as tokens^0.383 (arXiv 2505.13738). It is rounded to the nearest power of
    two, then to the nearest multiple of a micro-batch.
    """
    ideal = recipe.REFERENCE_BATCH * (tokens / recipe.REFERENCE_TOKENS) ** 0.383
    batch = 2 ** round(math.log2(max(ideal, 1)))
    return max(1, round(batch / micro_batch)) * micro_batch


def rows_that_fit(config: GPTConfig, layout: Layout, most: int, runtime: Runtime) -> int:
    """Rows of a micro-step: a power of two that divides `most`, a device's rows per step, and fits into a
    GPU's memory. On a CPU it is at most 16, since more gain nothing.
    """
    rows = most & -most
    if runtime.device.type == "cpu":
        return min(rows, 16)
    available = FILLED * memory_of(runtime.device)
    return fewer_rows(config, layout, rows, runtime.compute_dtype.itemsize, available)


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU's memory, or of this machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fewer_rows(config: GPTConfig, layout: Layout, rows: int, compute_bytes: int, available: float) -> int:
    """The rows, halved until they fit into `available` bytes of a device, but at least one."""
    while rows > 1 and sum(memory_by_kind(config, layout, rows, compute_bytes).values()) > available:
        rows //= 2
    return rows


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a GPU per its data sheet; None for a CPU, a part of a GPU (MIG), and a GPU that is
    not in the table, such as the laptop version of one that is.
    """
    if device.type != "cuda":
        return None
    words = set(torch.cuda.get_device_name(device).upper().replace("-", " ").split())
    peak = None
    for model, tflops in BF16_TFLOPS.items():
        if words.issuperset(model.split()) and words.isdisjoint(("MIG", "LAPTOP", "TI", "D")):
            peak = 1e12 * tflops
    return peak


def choose_compilation(device: torch.device, tokens: float = math.inf) -> bool:
    """Whether to compile the model and the optimizer for training on this many tokens: on a GPU, and on a CPU
    if they are many and there is a C++ compiler. NANOMUON_COMPILE=0 and =1 decide instead of their number.

    On a CPU, compiling takes 8 s plus 8 s per layer, and makes steps 1.2 times as fast (docs/log.md).
    """
    if not compile_enabled(default=device.type != "cpu" or tokens >= FEWEST_COMPILED):
        return False
    compiler = os.environ.get("CXX", "g++")
    if device.type != "cpu" or shutil.which(compiler):
        return True
    print0(f"no C++ compiler {compiler}: running eagerly, which is slower")
    return False


def print_plan(plan: Plan, runtime: Runtime) -> None:
    """Print how large the run is, and roughly how much memory it takes."""
    config, flops = plan.config, plan.flops_per_token
    shared = ", FSDP2" if plan.layout.fsdp else ""
    if plan.layout.tensor_parallel > 1:
        shared += f", tensor parallel {plan.layout.tensor_parallel}"
    print0(
        f"model      depth {config.depth}, width {config.width}, {config.heads} heads, "
        f"context {config.seq_len}, vocabulary {config.vocab_size}, {plan.parameters / 1e6:.1f}M parameters\n"
        f"attention  {kernels_in_use()}, window pattern {config.window_pattern}\n"
        f"training   {plan.steps} steps x {plan.batch} tokens = {plan.tokens:,} tokens, "
        f"{flops / 1e6:.0f} MFLOP per token, {plan.tokens * flops:.3g} FLOPs in total\n"
        f"devices    {runtime.world_size} x {runtime.device.type}{shared}, "
        f"{plan.rows} rows x {plan.micro_steps} micro-steps per step\n"
        f"dtype      {runtime.dtype_name} (weights float32)\n"
        f"memory     about {plan.memory / 2**30:.2f} GiB per device, without PyTorch itself"
    )


def warn_if_too_large(plan: Plan, device: torch.device) -> None:
    """Print a warning if a step needs more memory than the GPU, or the machine, has."""
    capacity = memory_of(device)
    if plan.memory > capacity:
        print0(
            f"warning: a step takes about {plan.memory / 2**30:.0f} GiB on each device, and this one has "
            f"{capacity / 2**30:.0f}: a smaller --depth needs less, and so does --shard fsdp on several"
        )


def print_time(plan: Plan, runtime: Runtime) -> None:
    """Print roughly how long the steps will take, by the speed of a product, which this measures."""
    rows = min(plan.rows, 4)  # enough for the speed of many; another process may be using the GPU's memory
    speed = product_timer(plan.config, rows, runtime)()
    flops = plan.tokens * plan.flops_per_token / runtime.world_size
    minutes = STEP_TIME * flops / speed / 60
    estimate = f"{minutes:,.0f} minutes" if minutes < 100 else f"{minutes / 60:,.0f} hours"
    print0(f"time       about {estimate} for the steps, by the speed of matrix products here and now")


def product_timer(config: GPTConfig, rows: int, runtime: Runtime) -> Callable[[], float]:
    """A function that measures the FLOP/s of the first product of an MLP, for a micro-batch of these rows."""
    options = {"dtype": runtime.compute_dtype, "device": runtime.device}
    tokens = torch.randn(rows * config.seq_len, config.width, **options)
    weight = torch.randn(config.width, 4 * config.width, **options)
    out = tokens @ weight

    def ten_products():
        for _ in range(10):
            torch.mm(tokens, weight, out=out)

    flops = 10 * 2 * out.numel() * config.width
    return lambda: 1000 * flops / timed(ten_products, runtime.device.type)


# ------------------------------------------------------------------------------------------------------------
# Memory, by kind


@dataclass(frozen=True)
class Part:
    """The first rank's part of a parameter; no rank has a larger one."""

    kind: str  # of its param group: muon or adamw
    whole: torch.Size  # the parameter's shape
    held: torch.Size  # the part's shape


@functools.cache
def parts(config: GPTConfig, layout: Layout) -> list[Part]:
    """The parts of all parameters of a GPT, in the recipe's groups."""
    model, found = meta_model(config), []
    for group in recipe.param_groups(model, recipe.REFERENCE_BATCH, recipe.REFERENCE_STEPS):
        for name, param in zip(group["names"], group["params"], strict=True):
            held, cut = list(param.shape), parallel.cut_dim(model.get_submodule(name.rpartition(".")[0]))
            if cut is not None:
                held[cut] //= layout.tensor_parallel
            if layout.fsdp:
                held[0] = -(-held[0] * layout.tensor_parallel // layout.ranks)
            found.append(Part(group["kind"], param.shape, torch.Size(held)))
    return found


def memory_by_kind(config: GPTConfig, layout: Layout, rows: int, compute_bytes: int) -> dict[str, int]:
    """Bytes on the first device: `weights`, `gradients`, `state` (of the optimizer), `activations` (saved for
    the backward pass of a micro-step) and `buffers` (what else the loss or the optimizer's step needs,
    whichever peaks higher; during the latter there are no activations).

    rows: sequences per device and micro-step. compute_bytes: per activation, 2 in bf16.
    """
    tokens = rows * config.seq_len
    weights = FLOAT32 * sum(part.held.numel() for part in parts(config, layout))
    saved = activations(config, layout, tokens, compute_bytes)
    # On GPUs, Inductor's code computes the logits of all chunks, then one gradient after the other
    in_loss = compute_bytes * config.vocab_size * (tokens + head_loss.chunk_rows(tokens, config.vocab_size))
    # The temporaries of a step take about four times a batch of matrices
    in_step = 4 * min(BATCH_BYTES["cuda"], weights)
    if layout.fsdp:  # it gathers weights and gradients of two blocks, the embedding and the head
        of_all = 2 * weights * layout.ranks // layout.tensor_parallel
        in_loss += of_all * 2 // config.depth + 2 * FLOAT32 * 2 * config.vocab_size * config.width
    elif layout.ranks > 1:  # all gradients, and this rank's 1/W of them: docs/optimizer.md, Memory
        in_step += weights + weights // layout.ranks
    return {
        "weights": weights,
        "gradients": weights,
        "state": optimizer_state(config, layout),
        "activations": saved,
        "buffers": max(in_loss, in_step - saved),  # the sum is the higher peak's: saved + in_loss, or in_step
    }


def optimizer_state(config: GPTConfig, layout: Layout) -> int:
    """Bytes of moments on the rank that has the most.

    A matrix has its momentum and one number per index of its long side, an AdamW parameter two moments. The
    state of whole parameters is divided: each matrix has an owner, and AdamW's rows are split evenly, but not
    its vectors. State of a sharded parameter is sharded like it, but every rank has the whole second moment.
    """
    numbers, banks = 0, Counter()
    for part in parts(config, layout):
        is_whole = part.held == part.whole
        if part.kind == "adamw":
            is_divided = is_whole and len(part.whole) > 1  # not a vector
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

    In a block, five times the residual: before attention and before the MLP, normalized for each, and after
    the convolution. Divided by tensor parallelism: queries and keys before and after their norm, values, the
    output of attention, and the hidden channels of the MLP twice. Outside the blocks: the embedding, the
    tokens' rows of the head (in float32, and the channels added to values), the gradient of the last residual
    and that of the head's weight, which the forward pass computes (head_loss.py). Below float32 also the
    blocks' weights in the lower precision.
    """
    width, keys = config.width, config.kv_heads * config.head_dim
    cut = (1 + config.qk_norm) * (width + keys) + keys + 9 * width
    in_block = 5 * width + cut / layout.tensor_parallel
    numbers = tokens * (config.depth * in_block + 2 * width + keys)
    if compute_bytes < FLOAT32:
        numbers += sum(part.held.numel() for part in parts(config, layout) if part.kind == "muon")
    return round(compute_bytes * numbers + FLOAT32 * width * (tokens + config.vocab_size))
