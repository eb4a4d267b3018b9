"""Pretrain a GPT.

    python -m scripts.base_train --total-batch-size 4096 --num-iterations 300   # what a CPU trains in minutes
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth 24 --corpus hf:ORG/NAME
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth 48 --shard fsdp --tensor-parallel 2
    python -m scripts.base_train --corpus path:my_texts --run mine              # your own text
    python -m scripts.base_train --optimizer-file my_optim.py                   # your own: build_optimizer(model)

The -- keeps torchrun from taking --run for its own --run-path. What is not given follows from --depth and the
device. A run lives in runs/NAME under NANOMUON_BASE_DIR; the same command given again carries it on from its
last checkpoint.
"""

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nanomuon import (
    checkpoint,
    export,
    footprint,
    locks,
    parallel,
    recipe,
    report,
    schedule,
    shards,
    sizing,
    user_file,
)
from nanomuon.dataloader import TrainLoader, validation_batches
from nanomuon.evaluate import bits_per_byte
from nanomuon.generate import sample_texts
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.guards import Requests, Watchdog, is_spike
from nanomuon.moe import balance_
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.qk_clip import clip_, watch_
from nanomuon.runtime import (
    InputError,
    Runtime,
    base_dir,
    check_at_least_1,
    check_name,
    compile_enabled,
    peak_flops,
    peak_memory_mb,
    print0,
    run_command,
    start,
    together,
    write_json,
)
from nanomuon.tokenizer import Tokenizer

EAGER_STEPS = 3  # before it is decided whether to compile
MAX_BAD_STEPS = 10  # this many steps in a row with a loss or gradient that is not finite end the run
# arguments that a run does not remember
OF_THE_LAUNCH = ("run", "resume", "plan", "wandb", "shard", "tensor_parallel")
PROMPTS = {
    "python": ["import os\n", "def main():\n", "class Stack:\n", "    for i in range("]
}  # other corpora: none


def parse_arguments(argv: list[str] | None, remembered: dict) -> argparse.Namespace:
    """What is given, else what is remembered, else the default."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.base_train",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run", default="base", help="name of the run, a folder under runs/ (default: %(default)s)")
    add(
        "--corpus", default="python", help="python, path:FILE_OR_FOLDER or hf:ORG/NAME (default: %(default)s)"
    )
    add("--vocab-size", type=int, help="tokens in the vocabulary (default: set by the corpus)")
    add(
        "--depth",
        type=int,
        default=4,
        help="number of layers; width, heads and batch follow (default: %(default)s)",
    )
    add("--max-seq-len", type=int, help="context in tokens (default: 2048 on a GPU, 256 on a CPU)")
    add(
        "--window-pattern",
        default="L",
        help="attention window by layer: L full, S half the context, e.g. SSSL",
    )
    add(
        "--experts",
        type=int,
        default=0,
        help="MLPs per layer among which a router picks, 0: one (%(default)s)",
    )
    add(
        "--experts-per-token",
        type=int,
        default=2,
        help="how many it picks, each 1/this as wide (%(default)s)",
    )
    add("--no-qk-norm", action="store_true", help="do not normalize queries and keys")
    add(
        "--qk-clip",
        type=float,
        metavar="TAU",
        help="with --no-qk-norm: scale heads whose largest attention logit is "
        "above TAU back to it, say 100 (default: off)",
    )
    add(
        "--device-batch-size",
        type=int,
        help="rows per device and micro-step (default: a power of two that fits into "
        "the memory of the GPU, 16 on a CPU)",
    )
    add(
        "--total-batch-size",
        type=int,
        help="tokens per optimizer step (default: from the tokens that "
        "--target-param-data-ratio asks for, whatever --num-iterations makes of them)",
    )
    add("--num-iterations", type=int, help="optimizer steps (default: from --target-param-data-ratio)")
    add(
        "--target-param-data-ratio",
        type=float,
        default=10.5,
        help="training tokens per parameter of the matrices and the head (default: %(default)s)",
    )
    add(
        "--matrix-lr",
        type=float,
        help="Muon learning rate, from 4,096 tokens a step on (default: %(default)s)",
    )
    add("--embedding-lr", type=float, help="AdamW, token and value embeddings (default: %(default)s)")
    add("--unembedding-lr", type=float, help="AdamW, head (default: %(default)s)")
    add("--scalar-lr", type=float, help="AdamW, residual scalars (default: %(default)s)")
    add("--weight-decay", type=float, help="of Muon's matrices, falling to 0 (default: %(default)s)")
    add("--warmup-ratio", type=float, help="share of the run with rising rates (%(default)s)")
    add("--warmdown-ratio", type=float, help="share of the run with falling rates (%(default)s)")
    add(
        "--optimizer-file",
        help="Python file with build_optimizer(model) or param_groups(model), used instead "
        "of the recipe (see nanomuon/recipe.py)",
    )
    add(
        "--eval-every",
        type=int,
        default=100,
        help="steps between evaluations, -1: only at the end (%(default)s)",
    )
    add(
        "--eval-tokens",
        type=int,
        default=131072,
        help="validation tokens of an evaluation on the way; the last "
        "takes the whole set (default: %(default)s)",
    )
    add(
        "--save-every",
        type=int,
        default=100,
        help="steps between checkpoints, -1: only at the end (%(default)s)",
    )
    add("--save-minutes", type=float, default=-1, help="minutes between checkpoints, -1: off (%(default)s)")
    add("--keep-last", type=int, default=2, help="how many checkpoints to keep (default: %(default)s)")
    add(
        "--resume",
        default="auto",
        help="auto: the newest checkpoint of the run; step_N: that one; never: start over",
    )
    add(
        "--shard",
        default="none",
        choices=["none", "fsdp"],
        help="fsdp: parameters, gradients and optimizer state in "
        "pieces over the processes (FSDP2); none: whole parameters on each (default: %(default)s)",
    )
    add(
        "--tensor-parallel",
        type=int,
        default=1,
        help="processes that share every matrix and see the same rows; "
        "divides the key-value heads (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of initial weights, data order and samples (default: %(default)s)",
    )
    add("--wandb", action="store_true", help="log to Weights & Biases as well (WANDB_MODE=offline works)")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile model and optimizer, or run eagerly, as "
        "NANOMUON_COMPILE=1 or 0 (default: after some eager steps, where the run then ends sooner)",
    )
    add("--plan", action="store_true", help="print the size of the run, its memory and its time, and stop")
    parser.set_defaults(**recipe.param_groups.__kwdefaults__, **recipe.schedule.__kwdefaults__)
    return parser.parse_args(argv, argparse.Namespace(**remembered))


def check_arguments(args: argparse.Namespace) -> None:
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"--{name.replace('_', '-')} must be a finite number, not {value}")
    check_at_least_1(
        args,
        "depth",
        "device_batch_size",
        "max_seq_len",
        "num_iterations",
        "total_batch_size",
        "eval_tokens",
        "keep_last",
        "tensor_parallel",
    )
    for name in ("seed", "experts", *recipe.param_groups.__kwdefaults__, *recipe.schedule.__kwdefaults__):
        if getattr(args, name) < 0:
            raise InputError(f"--{name.replace('_', '-')} must not be negative, but is {getattr(args, name)}")
    if args.target_param_data_ratio <= 0:
        raise InputError(f"--target-param-data-ratio must be above 0, not {args.target_param_data_ratio}")
    if args.qk_clip is not None and not (args.no_qk_norm and args.qk_clip > 0):
        raise InputError(
            "--qk-clip is a positive number, for models with --no-qk-norm: the norm bounds logits itself"
        )
    check_name("--run", args.run)


def resolve_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, dict, list[str]]:
    """The arguments; the settings of the run if it exists, else {}; and in words what the arguments change in
    it: a run keeps what is not given anew.
    """
    args = parse_arguments(argv, {})
    if (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    ):  # torchrun has replaced a rank that died on the way
        args.resume = "auto"
    file = base_dir() / "runs" / args.run / "settings.json"
    if args.resume == "never" or not file.exists():
        check_arguments(args)
        return args, {}, []
    settings = json.loads(file.read_text())
    before = settings["options"]
    ratio_given = parse_arguments(argv, {"target_param_data_ratio": None}).target_param_data_ratio is not None
    now = parse_arguments(argv, {**before, "num_iterations": None} if ratio_given else before)
    now.resume = args.resume
    check_arguments(now)
    changed = {key: was for key, was in before.items() if getattr(now, key) != was}
    return (
        now,
        settings,
        [f"--{key.replace('_', '-')} {getattr(now, key)} (was {was})" for key, was in changed.items()],
    )


class Plan(NamedTuple):
    config: GPTConfig
    rows: int  # of a micro-step on a device
    batch: int  # tokens per optimizer step
    steps: int


def plan_run(args: argparse.Namespace, vocab_size: int, runtime: Runtime, measured: dict) -> Plan:
    """The run that the arguments ask for. measured: see sizing.recalled; takes the rows that fit into the
    device.
    """
    seq_len = args.max_seq_len or (2048 if runtime.device.type == "cuda" else 256)
    try:
        config = GPTConfig.from_depth(
            args.depth,
            vocab_size,
            seq_len,
            window_pattern=args.window_pattern,
            qk_norm=not args.no_qk_norm,
            experts=args.experts,
            experts_per_token=args.experts_per_token,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    data_parallel = parallel.data_parallel_size(runtime.world_size, args.tensor_parallel, config)
    counts = meta_model(config).parameter_counts()
    tokens = schedule.training_tokens(counts["matrices"] + counts["lm_head"], args.target_param_data_ratio)
    rows = args.device_batch_size
    if rows is None:
        if "device_batch_size" not in measured:
            row = seq_len * data_parallel  # tokens, one row on every device
            most = (args.total_batch_size or schedule.total_batch_size(tokens, row)) // row
            if not args.total_batch_size and most:
                most = 1 << most.bit_length() - 1  # the batch then follows the rows
            measured["device_batch_size"] = sizing.device_batch_size(
                config, most, args.shard == "fsdp", args.tensor_parallel, runtime
            )
        rows = measured["device_batch_size"]
    unit = rows * seq_len * data_parallel
    batch = args.total_batch_size or schedule.total_batch_size(tokens, unit)
    if batch % unit:
        sizes = " or ".join(map(str, schedule.nearest_batch_sizes(batch, unit)))
        raise InputError(
            f"--total-batch-size {batch} is not a multiple of {unit} ({rows} rows x {seq_len} tokens x {data_parallel} "
            f"data-parallel processes); the nearest that are: {sizes}, or change --device-batch-size; a run that "
            f"exists goes on with processes that divide its {batch // seq_len} rows a step"
        )
    return Plan(config, rows, batch, args.num_iterations or max(1, tokens // batch))


def meta_model(config: GPTConfig) -> GPT:
    """The model without memory behind it, for counting."""
    with torch.device("meta"):
        return GPT(config)


def print_plan(args, plan: Plan, runtime: Runtime) -> None:
    config, rows, batch, steps = plan
    model = meta_model(config)
    counts, flops = model.parameter_counts(), model.estimate_flops()
    ranks = runtime.world_size // args.tensor_parallel
    micro_steps = batch // (rows * config.seq_len * ranks)
    memory = footprint.memory(
        footprint.footprint(
            config,
            runtime.world_size,
            args.shard == "fsdp",
            args.tensor_parallel,
            rows,
            micro_steps,
            runtime.compute_dtype.itemsize,
        )
    )
    speed = peak_flops(runtime.device)
    seconds = speed and batch * steps * flops / (0.4 * speed * runtime.world_size)
    print0(f"""\
model      depth {config.depth}, width {config.width}, {config.heads} heads, context {config.seq_len}, vocabulary {config.vocab_size}
parameters {counts["total"] / 1e6:.1f}M: {", ".join(f"{role} {n / 1e6:.2f}M" for role, n in counts.items() if n and role != "total")}
training   {steps} steps x {batch} tokens = {batch * steps:,} tokens, {flops / 1e6:.0f} MFLOP each
devices    {runtime.world_size} x {runtime.device.type}, {rows} rows x {micro_steps} micro-steps a step
memory     about {memory / 2**30:.1f} GB per device
time       {f"about {duration(seconds)} at 40% of this device's peak" if seconds else "not known for this device"}""")  # noqa: E501


def first_rank_first(work, runtime: Runtime):
    """work() on the first rank, then on the others, which find what it wrote. It may take hours: a download
    does.
    """
    if runtime.world_size == 1:
        return work()
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))  # NCCL would give up after 10 minutes
    first = together(lambda: work() if runtime.rank == 0 else None, patient)[0]
    dist.destroy_process_group(patient)
    return first if runtime.rank == 0 else work()


def build_optimizer(args: argparse.Namespace, model: GPT, batch: int, runtime: Runtime):
    """The optimizer, and the schedule that moves its groups: the recipe, or what the user's file has."""
    options = {key: getattr(args, key) for key in recipe.schedule.__kwdefaults__}
    scheduled = functools.partial(recipe.schedule, **options)
    if args.optimizer_file:
        build, own_schedule = user_file.load_recipe(args.optimizer_file)
        return user_file.make_optimizer(build, model, batch, runtime.world_size), own_schedule or scheduled
    dials = {key: getattr(args, key) for key in recipe.param_groups.__kwdefaults__}
    build = functools.partial(recipe.param_groups, **dials)
    return user_file.make_optimizer(build, model, batch, runtime.world_size), scheduled


def prepare_gradients(model: GPT) -> Tensor:
    """For optimizers that leave it to us: the mean over all processes, where a missing gradient counts as
    zero.

    Those of DTensors are means already. Returns 0, or NaN where a gradient held here is not finite: added to
    the loss it makes the step be skipped.
    """
    if dist.is_initialized():
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return 0 * torch.nn.utils.get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in grads])


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


def check_run_folder(run_dir: Path, settings: dict) -> None:
    """Refuse to go on with a run that was started as another one."""
    if not (run_dir / "settings.json").exists():
        return
    before = json.loads((run_dir / "settings.json").read_text())
    changed = [
        f"{key} {before.get(key)!r}, not {now!r}" for key, now in settings.items() if before.get(key) != now
    ]
    if changed:
        raise InputError(
            f"run {run_dir.name} exists with {'; '.join(changed)}: choose another --run, or start over: --resume never"
        )


def check_writable(folder: Path) -> None:
    """Refuse a place that cannot be written to before any work is done; makes nothing."""
    while not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror}; set NANOMUON_BASE_DIR to another"
        ) from error


@contextlib.contextmanager
def held(run_dir: Path):
    """The run is this process's alone: two would write into each other's checkpoints. The system frees it if
    we die.
    """
    if locks.being_written(run_dir):
        raise InputError(
            f"run {run_dir.name} is being trained by another process: choose another --run, or stop that"
        )
    with locks.locked(run_dir):
        yield


def start_run_folder(run_dir: Path, description: dict, tokenizer: Tokenizer, afresh: bool) -> None:
    """Write what defines the run, once everything that could be wrong with it has been looked at."""
    if afresh:
        shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "summary.json").unlink(missing_ok=True)  # a run that goes on is not complete
    if not (run_dir / "settings.json").exists():
        tokenizer.save(run_dir / "tokenizer")  # with it, this folder is all that sampling and evaluation need
    write_json(run_dir / "settings.json", description)


def print_summary(summary: dict) -> None:
    print0("---\n" + "\n".join(f"{key}: {value}" for key, value in summary.items()))


class Run:
    """One run: what it is, where it stands, and everything that trains it. All ranks call its methods
    together.
    """

    def __init__(self, args, runtime: Runtime, plan: Plan, data: Path, measured: dict):
        """data: folder of the shards and their tokenizer. measured: see sizing.recalled."""
        self.args, self.runtime, self.data, self.measured = args, runtime, data, measured
        self.config, self.rows, self.batch, self.steps = plan
        self.dir = base_dir() / "runs" / args.run
        self.tokenizer = Tokenizer.load(data / "tokenizer")
        self.data_parallel = runtime.world_size // args.tensor_parallel
        self.data_rank = runtime.rank // args.tensor_parallel  # tensor-parallel ranks see the same rows
        self.accumulation = self.batch // (self.rows * self.config.seq_len * self.data_parallel)
        in_pieces = args.shard == "fsdp" or args.tensor_parallel > 1
        self.mesh = None
        if in_pieces and runtime.world_size > 1:
            self.mesh = parallel.device_mesh(runtime.device.type, self.data_parallel, args.tensor_parallel)
        # What defines the run must be what it was started with; the other options it remembers
        self.settings = {
            "corpus": args.corpus,
            "tokenizer": self.tokenizer.hash,
            **asdict(self.config),
            "total_batch_size": self.batch,
            "seed": args.seed,
            "optimizer_file": args.optimizer_file,
        }
        self.step = self.skipped = self.bad_steps = (
            0  # done; of these without an update; of these the last ones
        )

    def is_complete(self) -> bool:
        """Whether nothing is left to do; says so. InputError where the folder holds another run."""
        if self.args.resume != "never":
            check_run_folder(self.dir, self.settings)
        if self.args.resume != "auto" or not (self.dir / "summary.json").exists():
            return False
        summary = json.loads((self.dir / "summary.json").read_text())
        if summary["steps"] < self.steps:
            return False
        print0(f"run {self.args.run} is complete: {self.dir}/report.md (--resume never starts it over)")
        print_summary(summary)
        return True

    def start(self, changed: list[str]) -> None:
        """Model, optimizer, data and folder, all at the step where an earlier process left them."""
        args, runtime = self.args, self.runtime
        if runtime.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(runtime.device)  # what measurements took does not count
        self.gpt = parallel.build_model(self.config, runtime, args.seed, self.mesh, args.shard == "fsdp")
        if args.qk_clip:
            watch_(self.gpt, args.qk_clip)
        self.optimizer, self.schedule = build_optimizer(args, self.gpt, self.batch, runtime)
        self.initial = [dict(group) for group in self.optimizer.param_groups]
        user_file.check_schedule(self.schedule, self.initial, self.steps)
        trained = {id(param) for group in self.initial for param in group["params"]}
        if left := [name for name, param in self.gpt.named_parameters() if id(param) not in trained]:
            print0(f"in no param group, so not trained: {', '.join(left)}")
        self.guards_itself = isinstance(self.optimizer, MuonAdamW)

        loader_state = None
        if found := checkpoint.find(self.dir, args.resume):
            meta = checkpoint.load(found, self.gpt, self.optimizer)
            self.step, self.skipped, loader_state = meta["step"], meta["skipped_steps"], meta["loader"]
            print0("; ".join([f"resuming run {args.run} at step {self.step}", *changed]))
            if self.steps < self.step:
                print0(f"step {self.step} is beyond --num-iterations {self.steps}: nothing is left to train")
                self.steps = self.step
            if self.guards_itself:
                self.optimizer.skipped_steps.fill_(self.skipped)
        elif args.resume == "auto" and (self.dir / "summary.json").exists():
            raise InputError(
                f"run {args.run} is complete and has no checkpoint to go on from: choose another --run"
            )
        resumed = self.step if found else None
        self.loader = TrainLoader(
            self.data,
            self.config.seq_len,
            self.batch // self.config.seq_len,
            self.rows,
            self.data_rank,
            self.data_parallel,
            args.seed,
            runtime.device,
            loader_state,
        )
        if runtime.rank == 0:
            start_run_folder(self.dir, self.description(), self.tokenizer, afresh=args.resume == "never")
        self.checkpoints = checkpoint.Checkpointer(self.dir, resumed, args.keep_last, background=True)
        self.log = None
        if runtime.rank == 0:
            wandb = (
                dict(project="nanomuon", name=args.run, id=args.run, config=self.settings)
                if args.wandb
                else None
            )
            self.log = report.MetricsLog(self.dir / "metrics.jsonl", resumed, wandb)
        training, evaluations = report.read_metrics(self.dir / "metrics.jsonl") if found else ([], [])
        self.evaluations = {row["step"]: row for row in evaluations if row["step"] <= self.step}
        losses = [
            row["train_loss"]
            for row in training
            if row["step"] <= self.step and row["train_loss"] is not None
        ]
        self.recent = deque(losses, maxlen=128)
        self.token_bytes = torch.from_numpy(self.tokenizer.token_bytes).to(runtime.device)
        print_plan(args, Plan(self.config, self.rows, self.batch, self.steps), runtime)
        self.model = self.gpt
        if compile_enabled() and self.step < self.steps:
            print0("compiling: the first step takes a while (--no-compile starts at once)")
            self.compile()

    def compile(self) -> None:
        if self.mesh:
            for block in self.gpt.blocks:  # what FSDP2 does between blocks stays outside
                block.compile(dynamic=False)
        else:
            self.model = torch.compile(self.gpt, dynamic=False)

    def description(self) -> dict:
        """What settings.json holds: what defines the run, what it remembers of its arguments, and what was
        measured.
        """
        options = {key: value for key, value in vars(self.args).items() if key not in OF_THE_LAUNCH}
        options |= {"total_batch_size": self.batch, "max_seq_len": self.config.seq_len}
        return {**self.settings, "options": options, "measured": self.measured}

    def decide_compilation(self, eager_ms: float) -> None:
        """Compile from here on if the run then ends sooner. Written down: compiled and eager steps round
        differently, and a resumed run shall repeat this one.
        """
        seconds = max(together(lambda: eager_ms)) / 1000  # all ranks decide the same
        left = self.steps - self.step
        costs, saves = schedule.compilation(self.runtime.device.type, self.config.depth, left * seconds)
        self.args.compile = costs < saves
        print0(
            f"{'compiling' if self.args.compile else 'staying eager'}: to compile takes about {duration(costs)} and "
            f"saves about {duration(saves)} in {left} steps (--compile and --no-compile decide it)"
        )
        if self.runtime.rank == 0:
            write_json(self.dir / "settings.json", self.description())
        if self.args.compile:
            os.environ["NANOMUON_COMPILE"] = "1"
            self.compile()

    def train(self, watchdog: Watchdog) -> int | None:
        """The loop. Returns None where the run has all of its steps, else the exit code."""
        args, requests, shown, saved_at = self.args, Requests(), 0.0, time.monotonic()
        while self.step < self.steps:
            # Before the next step, not after the last: a signal need not wait for it, and a resumed run makes
            # up for it
            due = args.eval_every > 0 and self.step % args.eval_every == 0
            if self.step and due and self.step not in self.evaluations:
                self.evaluate(args.eval_tokens)
            watchdog.begin(self.step + 1)
            requests.save |= 0 <= args.save_minutes * 60 < time.monotonic() - saved_at
            row, stop, save_now = self.train_step(requests)
            watchdog.end(row["step_ms"])
            if args.compile is None and EAGER_STEPS <= self.step < self.steps:
                self.decide_compilation(min(watchdog.times))
            if self.log:
                self.log.log(row)
            now = time.perf_counter()
            if now - shown > 5 or self.step == self.steps:
                shown = now
                self.print_progress(row, watchdog.median())
            self.look_at_loss(row["train_loss"])
            if self.bad_steps == MAX_BAD_STEPS:
                return self.give_up()
            due = args.save_every > 0 and self.step % args.save_every == 0
            if due and not self.bad_steps or save_now or self.step == self.steps:  # the good ones must stay
                self.save()
                saved_at = time.monotonic()
            if stop:
                self.checkpoints.wait()
                print0(f"stopped at step {self.step} and saved; the same command carries on")
                return 0
        self.checkpoints.wait()
        requests.exit_at_once()
        return None

    def train_step(self, requests: Requests) -> tuple[dict, bool, bool]:
        """One update. Returns its line of metrics.jsonl and what the ranks were asked: (row, stop?,
        save?).
        """
        began = time.perf_counter()
        for group, start_values in zip(self.optimizer.param_groups, self.initial, strict=True):
            group.update(self.schedule(start_values, self.step, self.steps))
        multiplier = self.optimizer.param_groups[0]["lr"] / (self.initial[0]["lr"] or 1)
        loss = self.backward()
        if not self.guards_itself:
            loss += prepare_gradients(self.gpt)
        train_loss, stop, save_now = requests.agree(loss)
        before_update = time.perf_counter()
        bad = self.update(math.isfinite(train_loss))
        now = time.perf_counter()
        self.step += 1
        self.skipped, self.bad_steps = self.skipped + bad, self.bad_steps + 1 if bad else 0
        step_ms = 1000 * (now - began)
        row = {
            "step": self.step,
            "tokens": self.step * self.batch,
            "train_loss": train_loss,
            "lr_multiplier": multiplier,
            "step_ms": step_ms,
            "tokens_per_second": 1000 * self.batch / step_ms,
            "optimizer_ms": 1000 * (now - before_update),
            "skipped_steps": self.skipped,
        }
        if self.runtime.device.type == "cuda" and (peak := peak_flops(self.runtime.device)):
            per_device = row["tokens_per_second"] * self.gpt.estimate_flops() / self.runtime.world_size
            row["mfu"] = per_device / peak
        return row, stop, save_now

    def backward(self) -> Tensor:
        """The gradients of a step. Returns this rank's mean loss, 0-D and not read here."""
        loss = torch.zeros((), device=self.runtime.device)
        for micro_step in range(self.accumulation):
            inputs, targets = next(self.loader)
            # in the last backward each gradient is final as it appears: its reduction can start there
            last = (
                isinstance(self.optimizer, DistMuonAdamW)
                and not self.mesh
                and micro_step == self.accumulation - 1
            )
            with self.optimizer.overlap_backward() if last else contextlib.nullcontext():
                micro_loss = self.model(inputs, targets) / self.accumulation
                micro_loss.backward()
            loss += micro_loss.detach()
        if self.mesh and self.args.shard == "none":
            parallel.average_gradients(self.gpt, self.mesh)
        return loss

    def update(self, finite: bool) -> bool:
        """The optimizer's step, waited for, unless the loss or a gradient is not finite; returns whether one
        is not.
        """
        if self.guards_itself:  # skips on all ranks what is not finite on one, and counts it
            if not finite:
                self.gpt.lm_head.weight.grad.fill_(math.nan)
            self.optimizer.step()
            bad = int(self.optimizer.skipped_steps) > self.skipped  # waits for the device
        else:
            bad = not finite
            if finite:
                self.optimizer.step()
            if self.runtime.device.type == "cuda":
                torch.cuda.synchronize()
        balance_(self.gpt)
        if self.args.qk_clip:
            clip_(self.gpt, self.args.qk_clip)
        self.optimizer.zero_grad(set_to_none=True)
        return bad

    def print_progress(self, row: dict, median_ms: float) -> None:
        print0(
            f"step {self.step:5d}/{self.steps} | loss {row['train_loss']:.4f} | lr x{row['lr_multiplier']:.2f} | "
            f"{row['step_ms']:.0f} ms | {row['tokens_per_second']:,.0f} tokens/s | "
            f"{100 * self.step / self.steps:.0f}% | {duration((self.steps - self.step) * median_ms / 1000)} left"
        )

    def look_at_loss(self, loss: float) -> None:
        """Say what is wrong with the last step."""
        if self.bad_steps:
            print0(
                f"step {self.step}: loss {loss}; it or a gradient is not finite: no update "
                f"({self.bad_steps} in a row)"
            )
        elif is_spike(loss, self.recent):
            mean = statistics.fmean(self.recent)
            print0(f"step {self.step}: the loss jumps to {loss:.4f} from a mean of {mean:.4f}")
        if math.isfinite(loss):
            self.recent.append(loss)

    def give_up(self) -> int:
        self.checkpoints.wait()
        # a checkpoint is good if the step after it was
        good = [
            f"step_{saved}"
            for saved in checkpoint.saved_steps(self.dir)
            if saved < self.step - self.bad_steps
        ]
        print0(
            f"error: {self.bad_steps} losses in a row are not finite, or their gradients; last good checkpoint: "
            f"{(good or ['none'])[-1]}; go on from there with --resume and lower learning rates",
            file=sys.stderr,
        )
        return 1

    def evaluate(self, max_tokens: int | None) -> float:
        """Bits per byte of that many validation tokens, None: of all; logged."""
        batches = validation_batches(
            self.data,
            self.config.seq_len,
            self.rows,
            self.data_rank,
            self.data_parallel,
            self.runtime.device,
            max_tokens,
        )
        value = bits_per_byte(self.gpt, batches, self.token_bytes)
        if self.log:
            tokens = self.step * self.batch
            self.log.log(
                {"step": self.step, "tokens": tokens, "val_bpb": value, "whole_set": max_tokens is None}
            )
        extent = "" if max_tokens else " (whole set)"
        print0(f"step {self.step:5d}/{self.steps} | validation {value:.4f} bits per byte{extent}")
        return value

    def save(self) -> None:
        if self.log:
            self.log.flush()
        meta = {
            "step": self.step,
            "skipped_steps": self.skipped,
            "loader": self.loader.state_dict(),
            "settings": self.settings,
        }
        self.checkpoints.save(self.step, self.gpt, self.optimizer, meta)

    def finish(self) -> int | None:
        """Evaluate on the whole validation set (once, however often this is interrupted), export, report.

        Returns 1 where the model has diverged, else None.
        """
        began = time.perf_counter()
        last = self.evaluations.get(self.steps, {"whole_set": False})
        val_bpb = last["val_bpb"] if last["whole_set"] else self.evaluate(None)
        if val_bpb is None or not math.isfinite(val_bpb):  # None: from metrics.jsonl
            print0(
                f"error: run {self.args.run} has diverged, its validation loss is not finite: go on from an earlier "
                "checkpoint with --resume step_N, or start over with --resume never, at lower learning rates",
                file=sys.stderr,
            )
            return 1
        seconds = {"evaluation": time.perf_counter() - began}
        about = {
            "step": self.steps,
            "val_bpb": val_bpb,
            "corpus": self.args.corpus,
            "tokenizer": self.tokenizer.hash,
        }
        export.export_model(self.dir, self.gpt, asdict(self.config), about)
        if self.log:
            self.log.close()
            self.write_report(val_bpb, seconds)

    def samples(self) -> list[str]:
        """Text of the trained model; none where it is in pieces and this rank's device cannot hold it
        whole.
        """
        prompts = PROMPTS.get(self.args.corpus, [""] * 3)
        try:
            if not self.mesh:
                gpt = self.gpt
            else:
                del self.gpt, self.model, self.optimizer, self.initial, self.checkpoints  # to make room
                gc.collect()
                gpt = parallel.build_model(self.config, self.runtime, self.args.seed)
                export.load_model_weights(self.dir, gpt)
            return sample_texts(gpt, self.tokenizer, prompts, max_tokens=128, seed=self.args.seed)
        except torch.OutOfMemoryError:
            print0(
                "no samples: the whole model does not fit into this device (scripts.sample, where it does)"
            )
            return []

    def write_report(self, val_bpb: float, seconds: dict) -> None:
        """Samples, report.md, loss.png and summary.json; the summary is written last and marks the run as
        complete.
        """
        began, args = time.perf_counter(), self.args
        rows, _ = report.read_metrics(self.dir / "metrics.jsonl")
        summary = self.summary(rows, val_bpb)  # with the peak of training
        samples = self.samples()
        seconds = {"training": summary["seconds"], **seconds, "samples": time.perf_counter() - began}
        with open(self.dir / "stages.jsonl", "a") as stages:
            stages.writelines(
                json.dumps({"stage": stage, "seconds": spent}) + "\n" for stage, spent in seconds.items()
            )
        stages = {row["stage"]: row["seconds"] for row in map(json.loads, open(self.dir / "stages.jsonl"))}
        options = {**vars(args), "device_batch_size": self.rows, "attention": self.measured.get("attention")}
        options = {
            key: value for key, value in options.items() if key not in self.settings and value is not None
        }
        report.write_report(
            self.dir,
            {**self.settings, **options},
            summary,
            samples,
            report.machine_description(),
            list(stages.items()),
        )
        write_json(self.dir / "summary.json", summary)
        for sample in samples:
            print(f"--- sample\n{sample}")
        print_summary(summary)
        print(f"report: {self.dir}/report.md, {self.dir}/loss.png", flush=True)

    def summary(self, rows: list[dict], val_bpb: float) -> dict:
        recent = [row["train_loss"] for row in rows[-20:] if row["train_loss"] is not None]
        return {
            "val_bpb": round(val_bpb, 4),
            "train_loss": round(statistics.fmean(recent), 4) if recent else None,
            "steps": rows[-1]["step"],
            "tokens": rows[-1]["tokens"],
            "seconds": round(sum(row["step_ms"] for row in rows) / 1000, 1),
            "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in rows)),
            "optimizer_ms": round(statistics.median(row["optimizer_ms"] for row in rows), 1),
            "peak_memory_mb": peak_memory_mb(self.runtime.device),
            "parameters": meta_model(self.config).parameter_counts()["total"],
        }


def choose_compilation(args) -> None:
    """What the environment says, and else the arguments; None, to be decided on the way, starts eagerly."""
    if "NANOMUON_COMPILE" in os.environ:
        args.compile = compile_enabled()
    compiler = os.environ.get("CXX") or (
        "clang++" if sys.platform == "darwin" else "g++"
    )  # what Inductor calls
    if args.compile is not False and not shutil.which(compiler):
        print0(
            f"no C++ compiler {compiler}: running eagerly, which is slower (install it, or name another in CXX)"
        )
        args.compile = False
    os.environ["NANOMUON_COMPILE"] = "1" if args.compile else "0"


def main(argv: list[str] | None = None) -> int | None:
    resolved = resolve_arguments(argv)
    runtime = start()
    args, settings, changed = together(lambda: resolved)[0]  # one settings.json, read once
    choose_compilation(args)
    measured = sizing.recalled(settings, args.shard, args.tensor_parallel, runtime)
    # What is wrong with the arguments shows here, before the data is worked on
    plan = plan_run(args, args.vocab_size or shards.default_vocab_size(args.corpus), runtime, measured)
    if args.plan:
        print_plan(args, plan, runtime)
        return 0
    run_dir = base_dir() / "runs" / args.run
    check_writable(run_dir)
    with held(run_dir) if runtime.rank == 0 else contextlib.nullcontext():
        tokens = plan.batch * plan.steps
        data = first_rank_first(
            lambda: shards.prepare_for_training(args.corpus, args.vocab_size, tokens), runtime
        )
        plan = plan_run(args, Tokenizer.load(data / "tokenizer").vocab_size, runtime, measured)
        config = plan.config
        if settings and args.window_pattern == settings["options"]["window_pattern"]:
            config = replace(
                config, window_pattern=settings["window_pattern"]
            )  # without windows, where they cost time
        config = sizing.choose_attention(
            config,
            plan.rows,
            args.tensor_parallel,
            runtime,
            measured,
            not settings,
            args.compile is not False,
        )
        run = Run(args, runtime, plan._replace(config=config), data, measured)
        if run.is_complete():
            return 0
        run.start(changed)
        with Watchdog() as watchdog:
            code = run.train(watchdog)
        return (run.finish() if code is None else code) or 0


if __name__ == "__main__":
    run_command(main)
