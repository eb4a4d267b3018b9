"""A run before it starts: its settings, model, batch and length, and the memory it will take.

settings.json records everything that defines the run; a later launch reads it, and writes it again with the
values that may change.
"""

import argparse
import hashlib
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from nanomuon import footprint, parallel
from nanomuon.attention import kernels_in_use
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.recipe import REFERENCE_BATCH, REFERENCE_TOKENS
from nanomuon.runtime import InputError, Runtime, check_name, compile_enabled, folder_of, print0, read_json

# The optimizer's comm_dtype
COMM_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
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

# Flags of a launch, not of its run. An optimizer file is one of them: its code runs only if a launch names it
OF_THE_LAUNCH = {"run", "resume", "plan", "wandb", "optimizer_file"}
OF_THE_LAUNCH |= {"shard", "tensor_parallel", "device_batch_size"}
LENGTHS = {"num_iterations", "target_flops", "target_param_data_ratio"}  # a new one replaces the recorded one
# Flags of a run that may change when it resumes. A corpus may have moved: its texts are compared instead
MAY_CHANGE = LENGTHS | {"eval_every", "eval_tokens", "save_every", "keep_last", "no_compile"}
MAY_CHANGE |= {"corpus", "skip_unreadable"}
MAY_CHANGE |= {"core_bundle", "core_every", "core_items"}
GONE = {"experts": 0, "experts_per_token": 2}  # flags that older runs have recorded, and their defaults


@dataclass
class Settings:
    """settings.json."""

    options: dict  # flags of base_train, with the values chosen for those that were not given
    rows: int  # of a micro-step, chosen again in another world
    world_size: int
    trained_on: dict  # corpus, its revision, shards, tokenizer; SHA-256 of the optimizer file
    trained_with: dict  # versions, commit, hashes of the model's code
    wandb_id: str | None = None  # of the run at Weights & Biases


def recall(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> tuple[argparse.Namespace, Settings | None]:
    """(arguments, the run's recorded settings if it exists): a flag that is not given has its recorded value.

    InputError lists the given values that differ from those that define the run.
    """
    given = parser.parse_args(argv)
    check_name("--run", given.run)
    hash_now = sha256_of(given.optimizer_file)
    file = folder_of(given.run) / "settings.json"
    if given.resume == "never" or not file.exists():
        return given, None

    settings = read_json(file, Settings)
    options = {name: value for name, value in settings.options.items() if name not in OF_THE_LAUNCH}
    for name, default in GONE.items():
        if options.pop(name, default) != default:
            raise InputError(
                f"{file}: this version has no {flag_of(name)}, which run {given.run} was started with: go on "
                "with the version that made it, or start over: --resume never"
            )
    flags = as_flags(options)
    try:
        before = parser.parse_args(flags)
    except InputError as error:
        raise InputError(f"{file}: options: {error}") from error
    recorded = vars(before) | {"resume": given.resume}
    if any(getattr(given, name) is not None for name in LENGTHS):
        recorded |= dict.fromkeys(LENGTHS)
    args = parser.parse_args(argv, argparse.Namespace(**recorded))

    own, sha256 = (settings.trained_on.get(key) for key in ("optimizer_file", "optimizer_file_sha256"))
    its_hash = f"--optimizer-file {own} of SHA-256"  # a recorded path is never opened
    refuse_changes(args.run, defining(before) | {its_hash: sha256}, defining(args) | {its_hash: hash_now})
    return args, settings


def defining(args: argparse.Namespace) -> dict:
    """{flag as it is written: value} of the flags that define a run."""
    values = {}
    for name, value in vars(args).items():
        if name not in OF_THE_LAUNCH | MAY_CHANGE:
            values[flag_of(name)] = value
    return values


def refuse_changes(run: str, before: dict, now: dict) -> None:
    """InputError that lists the values of a run that have changed."""
    changes = [f"{key} {before.get(key)}, not {now[key]}" for key in now if before.get(key) != now[key]]
    if changes:
        raise InputError(
            f"run {run} exists with {'; '.join(changes)}: give the same again, choose another --run, or "
            "start over: --resume never"
        )


def as_flags(options: dict) -> list[str]:
    """The command line with these values."""
    flags = []
    for name, value in options.items():
        if value is True:
            flags.append(flag_of(name))
        elif value is not None and value is not False:
            flags.append(f"{flag_of(name)}={value}")
    return flags


def flag_of(name: str) -> str:
    """An argument as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def sha256_of(optimizer_file: str | None) -> str | None:
    return optimizer_file and hashlib.sha256(Path(optimizer_file).read_bytes()).hexdigest()


@dataclass(frozen=True)
class Plan:
    config: GPTConfig
    rows: int  # of a micro-step on a device
    batch: int  # tokens per optimizer step, over all devices
    steps: int
    data_parallel: int  # how many processes see different rows

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
    data_parallel = parallel.data_parallel_size(runtime.world_size, args.tensor_parallel, config)
    tokens = asked_tokens(args, config)
    row = config.seq_len * data_parallel  # tokens of one row on every device
    rows = args.device_batch_size or rows
    if rows is None:
        # The batch is a multiple of the rows: if they are a power of two, it can be one too
        most = args.total_batch_size or 2 ** int(math.log2(total_batch_size(tokens, row) / row)) * row
        rows = rows_that_fit(config, max(1, most // row), args, runtime)
    batch = args.total_batch_size or total_batch_size(tokens, rows * row)
    if batch % (rows * row):
        raise InputError(
            f"--total-batch-size {batch} is not a multiple of {rows * row} ({rows} rows on every device): "
            "change it, --device-batch-size or the number of processes"
        )
    steps = args.num_iterations or max(1, tokens // batch)
    return Plan(config, rows, batch, steps, data_parallel)


def model_config(args: argparse.Namespace, vocab_size: int, device: str) -> GPTConfig:
    """The model that the arguments ask for. InputError for one that cannot be built."""
    on_gpu, windows = device == "cuda", args.window_pattern
    if windows is None:  # PyTorch's own kernels gain no time by them (docs/log.md)
        windows = "SSSL" if torch.nn.attention.current_flash_attention_impl() else "L"
    try:
        return GPTConfig.from_depth(
            args.depth,
            vocab_size,
            args.max_seq_len or default_context(on_gpu),
            window_pattern=windows,
            qk_norm=not args.no_qk_norm,
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def default_context(on_gpu: bool) -> int:
    """Tokens per row without --max-seq-len."""
    return 2048 if on_gpu else 512


def meta_model(config: GPTConfig) -> GPT:
    """The model on the meta device, for counting."""
    with torch.device("meta"):
        return GPT(config)


def asked_tokens(args: argparse.Namespace, config: GPTConfig) -> int:
    """The tokens that --target-flops pays for, else those that --target-param-data-ratio asks for.

    20 per parameter are compute-optimal for the models of Hoffmann et al. (arXiv 2203.15556); Muon-trained
    models of this family do best near 10 (nanochat, 2026).
    """
    model = meta_model(config)
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


def rows_that_fit(config: GPTConfig, most: int, args: argparse.Namespace, runtime: Runtime) -> int:
    """Rows of a micro-step: a power of two that divides `most`, the rows of a device per step, and fits into
    a GPU's memory. On a CPU at most 16: more gain nothing.
    """
    rows = most & -most
    if runtime.device.type == "cpu":
        return min(rows, 16)
    capacity = torch.cuda.mem_get_info(runtime.device)[1]
    while rows > 1 and memory_of(config, rows, args, runtime) > FILLED * capacity:
        rows //= 2
    return rows


def memory_of(config: GPTConfig, rows: int, args: argparse.Namespace, runtime: Runtime) -> float:
    """Bytes that a device holds at the peak of a step."""
    layout = footprint.Layout(runtime.world_size, args.shard == "fsdp", args.tensor_parallel)
    itemsize = runtime.compute_dtype.itemsize
    return sum(footprint.memory_by_kind(config, layout, rows, itemsize).values())


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


def print_plan(args: argparse.Namespace, plan: Plan, runtime: Runtime) -> None:
    """Print how large the run is, and about how much memory it takes."""
    config, model = plan.config, meta_model(plan.config)
    flops = model.estimate_flops()  # per token
    parameters = sum(p.numel() for p in model.parameters())
    memory = memory_of(config, plan.rows, args, runtime)
    print0(
        f"model      depth {config.depth}, width {config.width}, {config.heads} heads, "
        f"context {config.seq_len}, vocabulary {config.vocab_size}, {parameters / 1e6:.1f}M parameters\n"
        f"attention  {kernels_in_use()}, window pattern {config.window_pattern}\n"
        f"training   {plan.steps} steps x {plan.batch} tokens = {plan.tokens:,} tokens, "
        f"{flops / 1e6:.0f} MFLOP per token, {plan.tokens * flops:.3g} FLOPs in all\n"
        f"devices    {runtime.world_size} x {runtime.device.type}, {plan.rows} rows x {plan.micro_steps} "
        f"micro-steps per step\n"
        f"dtype      {runtime.dtype_name} (weights float32)\n"
        f"memory     about {memory / 2**30:.1f} GiB per device, besides PyTorch itself"
    )
