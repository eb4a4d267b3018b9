"""A run before it starts: what defines it, its model, batch and length, and what it will take.

settings.json records at the first start everything that defines the run; a later launch opens that.
"""

import argparse
import hashlib
import math
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from nanomuon import footprint, parallel
from nanomuon.files import folder_of, read_json
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.recipe import WEB_BATCH, WEB_TOKENS, read_source
from nanomuon.runtime import InputError, Runtime, check_name, compile_enabled, cores, print0, together

# What --comm-dtype means to the optimizer
COMM_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
FILLED = 0.85  # share of a device's memory that a step may take

# Dense peak in TFLOP/s of bf16 products that are added up in float32, from NVIDIA's data sheets and
# architecture white papers; half of the figure if those print one "with sparsity"
BF16_TFLOPS = {
    "GB300": 2500,
    "B300": 2250,
    "GB200": 2500,
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H200 NVL": 835,
    "H100": 989,  # SXM
    "H100 NVL": 835,
    "H100 PCIE": 756,
    "H800": 989,
    "H20": 148,
    "A100": 312,  # SXM
    "A100 PCIE": 312,
    "A800": 312,
    "A30": 165,
    "A10": 125,
    "A10G": 70,
    "A40": 149.7,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "RTX PRO 6000 BLACKWELL WORKSTATION EDITION": 503.8,
    "RTX PRO 6000 BLACKWELL SERVER EDITION": 500,
    "RTX 6000 ADA GENERATION": 364.2,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090 TI": 80,
    "RTX 3090": 71,
}
# What a name may say beside the model: the maker, the size and the kind of memory, the socket. HBM2e is not
# among them: it tells the first H100 PCIe from the SXM
BESIDE_THE_MODEL = re.compile(r"NVIDIA|GEFORCE|\d+GB?|HBM3E?|SXM\d|AC")


# Flags that say how a launch begins, and nothing about its run. An optimizer file is one of them: its code
# runs only when a launch names it
OF_THE_LAUNCH = {"run", "resume", "plan", "wandb", "optimizer_file"}
OF_THE_LAUNCH |= {"shard", "tensor_parallel", "device_batch_size"}
LENGTHS = {"num_iterations", "target_flops", "target_param_data_ratio"}  # a new one replaces the recorded one
# What else may change while a run goes on
MAY_CHANGE = LENGTHS | {"eval_every", "eval_tokens", "save_every", "keep_last", "no_compile"}
MAY_CHANGE |= {"core_bundle", "core_every", "core_items"}


@dataclass
class Settings:
    """settings.json."""

    options: dict  # flags of base_train, with the values that were chosen for those that were not given
    compile: bool
    rows: int  # of a micro-step, chosen anew in another world
    world_size: int
    trained_on: dict  # corpus, its revision, shards, tokenizer; SHA-256 of the optimizer file
    trained_with: dict  # commit, versions, threads


def read_settings(folder: Path) -> Settings | None:
    """What a run has recorded; None for a run that does not exist yet. InputError names file and key."""
    file = folder / "settings.json"
    return read_json(file, Settings) if file.exists() else None


def recall(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> tuple[argparse.Namespace, Settings | None]:
    """(arguments, what the run has recorded if it exists): a flag that is not given has the recorded value.

    InputError lists what is given and differs from what defines the run.
    """
    argv = sys.argv[1:] if argv is None else argv
    given = parser.parse_args(argv)
    check_name("--run", given.run)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        given.resume = "auto"  # torchrun has replaced a rank that died on the way
    folder = folder_of(given.run)
    settings = None if given.resume == "never" else read_settings(folder)
    if settings is None:
        return given, None

    forgotten = OF_THE_LAUNCH
    if any(getattr(given, name) is not None for name in LENGTHS):
        forgotten = OF_THE_LAUNCH | LENGTHS
    flags = as_flags({name: value for name, value in settings.options.items() if name not in forgotten})
    try:
        before = parser.parse_args(flags)
    except InputError as error:
        raise InputError(f"{folder}/settings.json: options: {error}") from error
    args = parser.parse_args([*flags, *argv])
    args.resume = given.resume

    differences = []
    for name, value in vars(before).items():
        if name not in OF_THE_LAUNCH | MAY_CHANGE and getattr(args, name) != value:
            differences.append(f"--{name.replace('_', '-')} {value}, not {getattr(args, name)}")
    file, sha256 = (settings.trained_on.get(key) for key in ("optimizer_file", "optimizer_file_sha256"))
    if sha256 and not args.optimizer_file:
        raise InputError(
            f"run {args.run} trains with the optimizer file {file} of SHA-256 {sha256}, and code runs only "
            "when it is named: give --optimizer-file again"
        )
    if args.optimizer_file and sha256_of(args.optimizer_file) != sha256:
        was = f"optimizer file {file} of SHA-256 {sha256}" if sha256 else "no optimizer file"
        differences.append(f"{was}, not {args.optimizer_file} of SHA-256 {sha256_of(args.optimizer_file)}")
    refuse_differences(args.run, differences)
    return args, settings


def as_flags(options: dict) -> list[str]:
    """The command line that says these values."""
    flags = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags.append(f"{flag}={value}")
    return flags


def sha256_of(optimizer_file: str | None) -> str | None:
    return optimizer_file and hashlib.sha256(read_source(optimizer_file)).hexdigest()


def refuse_differences(run: str, differences: list[str]) -> None:
    if differences:
        raise InputError(
            f"run {run} exists with {'; '.join(differences)}: choose another --run, or start over: "
            "--resume never"
        )


@dataclass(frozen=True)
class Plan:
    config: GPTConfig
    rows: int  # of a micro-step on a device
    batch: int  # tokens per optimizer step, over all devices
    steps: int
    data_parallel: int  # how many processes see different rows

    @property
    def micro_steps(self) -> int:
        """How many forward and backward passes make an optimizer step."""
        return self.batch // (self.rows * self.config.seq_len * self.data_parallel)

    @property
    def tokens(self) -> int:
        return self.batch * self.steps


def make_plan(args: argparse.Namespace, vocab_size: int, runtime: Runtime, rows: int | None = None) -> Plan:
    """The run that the arguments ask for; what they leave open follows from the depth and the device.

    rows: of a micro-step if the arguments do not say it, as they were chosen at the start of the run.
    InputError for a model that cannot be built and for a batch that the processes cannot divide.
    """
    config = model_config(args, vocab_size, runtime.device.type)
    data_parallel = parallel.data_parallel_size(runtime.world_size, args.tensor_parallel, config)
    tokens = asked_tokens(args, config)
    row = config.seq_len * data_parallel  # tokens, one row on every device
    rows = args.device_batch_size or rows
    if rows is None:
        # The batch will follow the rows: with a power of two of them it can be a power of two itself
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
    on_gpu = device == "cuda"
    try:
        return GPTConfig.from_depth(
            args.depth,
            vocab_size,
            args.max_seq_len or default_context(on_gpu),
            window_pattern=args.window_pattern or ("SSSL" if on_gpu else "L"),
            qk_norm=not args.no_qk_norm,
            experts=args.experts,
            experts_per_token=args.experts_per_token,
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def default_context(on_gpu: bool) -> int:
    """Tokens of a row if --max-seq-len does not say it."""
    return 2048 if on_gpu else 256


def meta_model(config: GPTConfig) -> GPT:
    """The model without memory behind it, for counting."""
    with torch.device("meta"):
        return GPT(config)


def asked_tokens(args: argparse.Namespace, config: GPTConfig) -> int:
    """Tokens that --target-flops pays for, or else that --target-param-data-ratio asks for.

    20 per parameter are compute-optimal for the models of Hoffmann et al. (arXiv 2203.15556); Muon-trained
    models of this family do best near 10 (nanochat, 2026).
    """
    model = meta_model(config)
    if args.target_flops is not None:
        return round(args.target_flops / model.estimate_flops())
    return int((args.target_param_data_ratio or 10.5) * model.multiplied_weights())


def total_batch_size(tokens: int, micro_batch: int) -> int:
    """Tokens per optimizer step for a run of `tokens`; micro_batch: what all devices take in one micro-step.

    The critical batch grows as tokens^0.383 (arXiv 2505.13738). Rounded to the nearest power of two, then to
    the nearest multiple of a micro-batch.
    """
    ideal = WEB_BATCH * (tokens / WEB_TOKENS) ** 0.383
    batch = 2 ** round(math.log2(max(ideal, 1)))
    return max(1, round(batch / micro_batch)) * micro_batch


# ------------------------------------------------------------------------------------------------------------
# Memory


def rows_that_fit(config: GPTConfig, most: int, args: argparse.Namespace, runtime: Runtime) -> int:
    """Rows of a micro-step: a power of two that divides the `most` of a step on a device and fits into it.

    On a CPU 16 at most: more gain nothing. A GPU is asked, which computes a micro-step, unless parameters are
    in pieces. InputError if the machine of a CPU cannot hold the least there is: it would suffer.
    """
    layout, itemsize = layout_of(args, runtime), runtime.compute_dtype.itemsize
    on_cpu = runtime.device.type == "cpu"

    def memory(rows):
        by_kind = footprint.memory_by_kind(config, layout, rows, itemsize)
        if on_cpu or args.shard == "fsdp" or args.tensor_parallel > 1:
            return sum(by_kind.values())
        return by_kind["state"] + by_kind["buffers"] + probe_memory(config, rows, runtime)

    rows = most & -most
    if on_cpu:
        rows = min(rows, 16)
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // runtime.world_size
        if memory(1) > capacity:
            raise InputError(
                f"--depth {args.depth}: the run takes {memory(1) / 2**30:.0f} GB for each process, and this "
                f"machine has {capacity / 2**30:.0f}: choose a smaller one"
            )
    else:
        capacity = torch.cuda.mem_get_info(runtime.device)[0]
    while rows > 1 and memory(rows) > FILLED * capacity:
        rows //= 2
    return min(together(lambda: rows))


def layout_of(args: argparse.Namespace, runtime: Runtime) -> footprint.Layout:
    """How the devices of a run share its parameters and the work of its optimizer."""
    return footprint.Layout(runtime.world_size, args.shard == "fsdp", args.tensor_parallel)


def probe_memory(config: GPTConfig, rows: int, runtime: Runtime) -> float:
    """Bytes on the GPU at the height of forward and backward for so many rows, with weights and gradients.

    Of a second micro-step, in which the gradients of the first are there from the beginning. Infinite if it
    has no room.
    """
    gpt = None
    peak = math.inf
    try:
        gpt = parallel.build_model(config, runtime, seed=0)
        tokens = torch.zeros(rows, config.seq_len, dtype=torch.int64, device=runtime.device)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(runtime.device)
            gpt(tokens, tokens).backward()
        peak = torch.cuda.max_memory_allocated(runtime.device)
    except torch.OutOfMemoryError:
        pass
    del gpt
    torch.cuda.empty_cache()
    return peak


# ------------------------------------------------------------------------------------------------------------
# Time


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its data sheet; None for a CPU and for a GPU that is not in the table.

    A part of a GPU (MIG) and a laptop's are not in it, whatever their names share with one that is.
    """
    if device.type != "cuda":
        return None
    # "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe": the same model
    words = re.sub(r"-(?=PCIE|SXM|\d)", " ", torch.cuda.get_device_name(device).upper()).split()
    model = " ".join(word for word in words if not BESIDE_THE_MODEL.fullmatch(word))
    return 1e12 * BF16_TFLOPS[model] if model in BF16_TFLOPS else None


def seconds_of(plan: Plan, runtime: Runtime) -> float | None:
    """About how long the steps of a run take; None for a GPU whose peak is not known.

    At 40% of a GPU's peak; at 80 GFLOP/s a CPU core in bf16, 40 in float32, measured eagerly at depth 4.
    """
    if runtime.device.type == "cpu":
        rate = cores() * (80e9 if runtime.compute_dtype == torch.bfloat16 else 40e9)
    else:
        rate = 0.4 * runtime.world_size * (peak_flops(runtime.device) or 0)
    return plan.tokens * meta_model(plan.config).estimate_flops() / rate if rate else None


def choose_compilation(args: argparse.Namespace, plan: Plan, runtime: Runtime) -> bool:
    """Whether the run compiles its model and its optimizer, decided once, at its first start.

    NANOMUON_COMPILE and --no-compile count first. Else a GPU compiles. On a CPU compiling takes 8 s, and 8 s
    a layer, and makes the steps 1.2 times as fast (docs/log.md): it has to pay over the whole length. Without
    a compiler a CPU runs eagerly. InputError on a GPU: hours of GPUs are not spent on eager steps unasked.
    """
    if args.no_compile or not compile_enabled():
        return False
    missing = missing_compiler(runtime.device.type)
    if runtime.device.type == "cuda":
        if missing is not None:
            raise InputError(f"no {missing}; --no-compile trains without, which is slower")
        return True
    if missing is not None:
        print0(f"no {missing}: running eagerly, which is slower")
        return False
    if "NANOMUON_COMPILE" in os.environ:
        return True
    costs, saves = 8 + 8 * plan.config.depth, seconds_of(plan, runtime) * (1 - 1 / 1.2)
    if costs >= saves:
        print0(f"running eagerly: to compile takes about {duration(costs)}, and saves {duration(saves)}")
    return costs < saves


def missing_compiler(device_type: str) -> str | None:
    """What torch.compile needs on this kind of device and does not find, and the remedy; None if it has all.

    On a CPU it writes C++. On CUDA Triton compiles a little C with every kernel, against Python's headers.
    """
    variable, kind, found = "CXX", "C++", ["clang++" if sys.platform == "darwin" else "g++"]
    if device_type == "cuda":
        variable, kind, found = "CC", "C", ["gcc", "clang"]  # what Triton looks for
    compilers = [os.environ[variable]] if variable in os.environ else found
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"{kind} compiler {' or '.join(compilers)} (install it, or name another in {variable})"
    # This scheme is where Triton looks, too: Debian's own points into /usr/local, where headers never are
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if device_type == "cuda" and not header.exists():
        return f"{header} (install the development package of this Python, python3-dev or the like)"
    return None


def print_plan(args: argparse.Namespace, plan: Plan, runtime: Runtime) -> None:
    """Say how large the run is, and about how much memory and time it takes."""
    config, model = plan.config, meta_model(plan.config)
    flops = model.estimate_flops()  # per token
    parameters = sum(p.numel() for p in model.parameters())
    itemsize = runtime.compute_dtype.itemsize
    memory = footprint.memory_by_kind(config, layout_of(args, runtime), plan.rows, itemsize)
    seconds = seconds_of(plan, runtime)
    time = (
        f"about {duration(seconds)}" if seconds else "not known, nor MFU: this GPU is not in nanomuon/plan.py"
    )
    print0(
        f"model      depth {config.depth}, width {config.width}, {config.heads} heads, "
        f"context {config.seq_len}, vocabulary {config.vocab_size}, {parameters / 1e6:.1f}M parameters\n"
        f"training   {plan.steps} steps x {plan.batch} tokens = {plan.tokens:,} tokens, "
        f"{flops / 1e6:.0f} MFLOP each, {plan.tokens * flops:.3g} FLOPs in all\n"
        f"devices    {runtime.world_size} x {runtime.device.type}, {plan.rows} rows x {plan.micro_steps} "
        f"micro-steps a step\n"
        f"dtype      {runtime.dtype_name} (weights float32)\n"
        f"memory     about {sum(memory.values()) / 2**30:.1f} GB per device\n"
        f"time       {time}"
    )


def duration(seconds: float) -> str:
    """As people say it: 2h05m, or 3m20s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
