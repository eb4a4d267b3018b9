"""The size of a run before it starts: its model, batch, length and micro-batch, and the memory they take."""

import argparse
import math
import os
import shutil
from dataclasses import dataclass

import torch

from nanomuon import parallel
from nanomuon.attention import kernels_in_use
from nanomuon.footprint import Layout, memory_by_kind
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.recipe import REFERENCE_BATCH, REFERENCE_TOKENS
from nanomuon.runtime import InputError, Runtime, compile_enabled, print0

FILLED = 0.85  # share of a GPU's memory that a step may take
FEWEST_COMPILED = 1_000_000  # tokens: shorter runs on a CPU are not compiled

# Dense peak in TFLOP/s of bf16 products accumulated in float32, from NVIDIA's data sheets and white papers
# (half of a figure "with sparsity"), by words of a GPU's name: the last match counts
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
class Plan:
    config: GPTConfig
    rows: int  # of a micro-step on a device
    batch: int  # tokens per optimizer step, over all devices
    steps: int
    data_parallel: int  # how many processes see different rows
    parameters: int
    flops_per_token: int  # of the forward and the backward pass
    memory: int  # bytes that a device holds at the peak of a step

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes per optimizer step."""
        return self.batch // (self.rows * self.config.seq_len * self.data_parallel)

    @property
    def tokens(self) -> int:
        return self.batch * self.steps


def make_plan(args: argparse.Namespace, vocab_size: int, runtime: Runtime, rows: int | None = None) -> Plan:
    """The run that the arguments ask for; the rest follows from the depth and the device.

    rows: of a micro-step if the arguments do not set them, as chosen at the start of the run. InputError for
    a model that cannot be built and for a batch that the processes cannot divide.
    """
    config = model_config(args, vocab_size, runtime.device.type)
    model = meta_model(config)
    data_parallel = parallel.data_parallel_size(runtime.world_size, args.tensor_parallel, config)
    layout = Layout(runtime.world_size, args.shard == "fsdp", args.tensor_parallel)
    tokens = asked_tokens(args, model)
    row = config.seq_len * data_parallel  # tokens of one row on every device
    rows = args.device_batch_size or rows
    if rows is None:
        # The batch is a multiple of the rows: if they are a power of two, it can be one too
        most = args.total_batch_size or 2 ** int(math.log2(total_batch_size(tokens, row) / row)) * row
        rows = rows_that_fit(config, layout, max(1, most // row), runtime)
    batch = args.total_batch_size or total_batch_size(tokens, rows * row)
    if batch % (rows * row):
        raise InputError(
            f"--total-batch-size {batch} is not a multiple of {rows * row} ({rows} rows on every device): "
            "change it, --device-batch-size or the number of processes"
        )
    return Plan(
        config,
        rows,
        batch,
        args.num_iterations or max(1, tokens // batch),
        data_parallel,
        sum(p.numel() for p in model.parameters()),
        model.estimate_flops(),
        sum(memory_by_kind(config, layout, rows, runtime.compute_dtype.itemsize).values()),
    )


def model_config(args: argparse.Namespace, vocab_size: int, device: str) -> GPTConfig:
    """The model that the arguments ask for. InputError for one that cannot be built."""
    on_gpu, windows = device == "cuda", args.window_pattern
    if windows is None:  # PyTorch's own kernels gain no time by them (docs/log.md)
        windows = "SSSL" if torch.nn.attention.current_flash_attention_impl() else "L"
    try:
        return GPTConfig.from_depth(
            args.depth,
            vocab_size,
            args.max_seq_len or (2048 if on_gpu else 512),
            window_pattern=windows,
            qk_norm=not args.no_qk_norm,
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def meta_model(config: GPTConfig) -> GPT:
    """The model on the meta device, for counting."""
    with torch.device("meta"):
        return GPT(config)


def asked_tokens(args: argparse.Namespace, model: GPT) -> int:
    """The tokens that --target-flops pays for, else those that --target-param-data-ratio asks for.

    20 per parameter are compute-optimal for the models of Hoffmann et al. (arXiv 2203.15556); Muon-trained
    models of this family do best near 10 (nanochat, 2026).
    """
    if args.target_flops is not None:
        return round(args.target_flops / model.estimate_flops())
    return int((args.target_param_data_ratio or 10.5) * model.multiplied_weights())


def total_batch_size(tokens: int, micro_batch: int) -> int:
    """Tokens per optimizer step for a run of `tokens`; micro_batch: those of all devices in one micro-step.

    The critical batch grows as tokens^0.383 (arXiv 2505.13738). Rounded to the nearest power of two, then to
    the nearest multiple of a micro-batch.
    """
    ideal = REFERENCE_BATCH * (tokens / REFERENCE_TOKENS) ** 0.383
    batch = 2 ** round(math.log2(max(ideal, 1)))
    return max(1, round(batch / micro_batch)) * micro_batch


def rows_that_fit(config: GPTConfig, layout: Layout, most: int, runtime: Runtime) -> int:
    """Rows of a micro-step: a power of two that divides `most`, the rows of a device per step, and fits into
    a GPU's memory. On a CPU at most 16: more gain nothing.
    """
    rows = most & -most
    if runtime.device.type == "cpu":
        return min(rows, 16)
    _, capacity = torch.cuda.mem_get_info(runtime.device)
    return fewer_rows(config, layout, rows, runtime.compute_dtype.itemsize, FILLED * capacity)


def fewer_rows(config: GPTConfig, layout: Layout, rows: int, compute_bytes: int, available: float) -> int:
    """The rows halved until their memory is available, at least one. available: bytes of a device."""
    while rows > 1 and sum(memory_by_kind(config, layout, rows, compute_bytes).values()) > available:
        rows //= 2
    return rows


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its data sheet; None for a CPU and for a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    words = set(torch.cuda.get_device_name(device).upper().replace("-", " ").split())
    peak = None
    for model, tflops in BF16_TFLOPS.items():
        if words.issuperset(model.split()):
            peak = 1e12 * tflops
    return peak


def choose_compilation(args: argparse.Namespace, plan: Plan, runtime: Runtime) -> bool:
    """Whether a run compiles its model and its optimizer: on a GPU, and on a CPU if it is long; not with
    --no-compile, with NANOMUON_COMPILE=0, or on a CPU without a compiler.

    On a CPU compiling takes 8 s plus 8 s per layer, and makes the steps 1.2 times as fast (docs/log.md).
    """
    if args.no_compile or not compile_enabled():
        return False
    on_cpu = runtime.device.type == "cpu"
    if on_cpu and plan.tokens < FEWEST_COMPILED and "NANOMUON_COMPILE" not in os.environ:
        print0(f"running eagerly: compiling does not pay for fewer than {FEWEST_COMPILED:,} tokens")
        return False
    compiler = os.environ.get("CXX", "g++")
    if on_cpu and not shutil.which(compiler):
        print0(f"no C++ compiler {compiler}: running eagerly, which is slower")
        return False
    return True


def print_plan(plan: Plan, runtime: Runtime) -> None:
    """Print how large the run is, and about how much memory it takes."""
    config, flops = plan.config, plan.flops_per_token
    print0(
        f"model      depth {config.depth}, width {config.width}, {config.heads} heads, "
        f"context {config.seq_len}, vocabulary {config.vocab_size}, {plan.parameters / 1e6:.1f}M parameters\n"
        f"attention  {kernels_in_use()}, window pattern {config.window_pattern}\n"
        f"training   {plan.steps} steps x {plan.batch} tokens = {plan.tokens:,} tokens, "
        f"{flops / 1e6:.0f} MFLOP per token, {plan.tokens * flops:.3g} FLOPs in all\n"
        f"devices    {runtime.world_size} x {runtime.device.type}, {plan.rows} rows x {plan.micro_steps} "
        f"micro-steps per step\n"
        f"dtype      {runtime.dtype_name} (weights float32)\n"
        f"memory     about {plan.memory / 2**30:.1f} GiB per device, besides PyTorch itself"
    )
