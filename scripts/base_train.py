"""Pretrain a GPT.

    python -m scripts.base_train --total-batch-size 4096 --num-iterations 300   # minutes on a CPU
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth 24 --corpus hf:ORG/NAME
    torchrun ... -m scripts.base_train -- --depth 48 --shard fsdp --tensor-parallel 2   # larger than a GPU
    python -m scripts.base_train --corpus path:my_texts --run mine --vocab-size 1024 \\
        --total-batch-size 4096 --num-iterations 300                           # your own text
    python -m scripts.base_train --optimizer-file my_optim.py          # your own: build_optimizer(model)

The -- keeps torchrun from taking --run as its own --run-path. Flags that you leave out follow from --depth
and the device. A run is the folder runs/NAME under NANOMUON_BASE_DIR; the same command resumes it from its
last checkpoint. SIGTERM, SIGHUP and Ctrl-C save and stop it after the current step, with exit code 75 (ranks
exit with 0: torchrun takes any other code for a failure); the file runs/NAME/stopped remains until the run
goes on.
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

import argparse
import contextlib
import os
import re
import statistics
import time
from collections import deque

import torch
import torch.distributed as dist

from nanomuon import fp8, parallel, recipe, shards
from nanomuon.attention import use_flash_attention
from nanomuon.command import (
    ArgumentParser,
    StopSignals,
    add_dtype_argument,
    add_text_arguments,
    amount,
    count,
    layers,
    number,
    run_command,
    seed,
    share,
    vocabulary,
)
from nanomuon.corpus import check_corpus
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.plan import COMM_DTYPES, Plan, Settings, flag_of, make_plan, peak_flops, print_plan, recall
from nanomuon.qk_clip import clip_
from nanomuon.report import start_wandb
from nanomuon.run import Run, is_complete
from nanomuon.runtime import InputError, Runtime, folder_of, locked, make_deterministic, print0, start

CORE_ITEMS = 500  # of each CORE task, in evaluations during training
MAX_BAD_STEPS = 10  # this many steps in a row with a loss or gradient that is not finite end the run


def train(run: Run, signals: StopSignals) -> int | None:
    """The training loop. Returns None once the run has all of its steps, else the exit code."""
    args, plan, device = run.args, run.plan, run.runtime.device
    model, optimizer = run.model, run.optimizer
    is_ours = isinstance(optimizer, MuonAdamW)  # skips bad steps by itself
    flops_per_token = model.estimate_flops()
    peak = peak_flops(device)
    bad_steps = 0  # in a row, up to now
    # Milliseconds of the last steps, without the first, which compiles
    shown_at, times, first = 0.0, deque(maxlen=20), run.step + 1

    signals.in_steps = True
    while run.step < plan.steps:
        # Here, not after the last step: a signal need not wait for an evaluation, and a resumed run catches
        # up on one
        evaluate_what_is_due(run)
        began = time.perf_counter()
        torch.manual_seed(args.seed + run.step)  # an optimizer draws the same numbers after a resume

        lr_multiplier = set_hyperparameters(run)
        loss = accumulate_gradients(run)
        if run.mesh is not None and args.shard == "none":
            parallel.average_tensor_parallel_gradients(model, run.mesh)
        if not isinstance(optimizer, DistMuonAdamW):
            parallel.average_whole_gradients(model)
        if not is_ours:
            loss = torch.where(parallel.gradients_finite(model), loss, float("nan"))

        # A signal to one rank, and a loss that is not finite on one, count for all. (2,): the mean loss, and
        # how many ranks are to stop. Filled on the device: a copy from the host would wait for it
        agreed = torch.stack([loss, loss.new_full((), signals.asked)])
        if dist.is_initialized():
            dist.all_reduce(agreed)
        agreed[0] /= run.runtime.world_size
        finite = agreed[0].isfinite()
        update_began = Moment(device)
        if is_ours:
            optimizer.step(finite=finite)
            skipped = optimizer.skipped_steps
        else:
            # The host decides whether such an optimizer may step: one more wait for the device
            if finite:
                optimizer.step()
            skipped = run.skipped + finite.logical_not()
        if args.qk_clip:
            clip_(model, args.qk_clip, args.tensor_parallel)
        optimizer.zero_grad(set_to_none=True)
        update_ended = Moment(device)

        # The step's one wait for the device: everything that the host needs, in one copy
        told = torch.cat([agreed.double(), skipped.double().view(1)])
        train_loss, stops, skipped_steps = told.tolist()
        step_ms = 1000 * (time.perf_counter() - began)
        run.step += 1
        if skipped_steps > run.skipped:
            run.skipped += 1
            bad_steps += 1
        else:
            bad_steps = 0
        row = {
            "step": run.step,
            "tokens": run.step * plan.batch,
            "train_loss": train_loss,
            "lr_multiplier": lr_multiplier,
            "step_ms": step_ms,
            "tokens_per_second": 1000 * plan.batch / step_ms,
            "optimizer_ms": update_ended.milliseconds_since(update_began),
            "skipped_steps": run.skipped,
        }
        if peak is not None:
            row["mfu"] = row["tokens_per_second"] * flops_per_token / run.runtime.world_size / peak

        if run.step > first:
            times.append(step_ms)
        if run.log:
            run.log.log(row)
        if time.perf_counter() - shown_at > 5 or run.step == plan.steps:
            shown_at = time.perf_counter()
            print_progress(row, plan.steps, times)
        if bad_steps:
            what = f"loss {train_loss}: the loss or a gradient is not finite, no update"
            print0(f"step {run.step}: {what} ({bad_steps} in a row)")
        if bad_steps == MAX_BAD_STEPS:
            return run.give_up(f"{bad_steps} steps in a row had non-finite losses or gradients", bad_steps)
        # Only a few checkpoints are kept: those of bad steps must not replace the good ones
        due = is_due(args.save_every, run.step) and bad_steps == 0
        is_last = bool(stops) or run.step == plan.steps
        if due or is_last:
            run.save(is_last=is_last)
        if stops:
            return signals.stopped(f"at step {run.step} and saved")
    signals.in_steps = False
    return signals.stopped("before its last evaluation") if signals.asked else None


def evaluate_what_is_due(run: Run) -> None:
    """Run the evaluations that are due after this many steps."""
    args = run.args
    loss_is_due = is_due(args.eval_every, run.step)
    core_is_due = run.core_tasks and is_due(args.core_every, run.step)
    if not (loss_is_due or core_is_due):
        return
    recipe.switch(run.optimizer, "eval")
    if loss_is_due:
        run.evaluate(args.eval_tokens)
    if core_is_due:
        run.evaluate_core(args.core_items or CORE_ITEMS)
    recipe.switch(run.optimizer, "train")


def set_hyperparameters(run: Run) -> float | None:
    """Set each param group to its values at this step. Returns the multiplier of the first group's rate, or
    None if a user's optimizer has no rate.
    """
    groups = run.optimizer.param_groups
    for group, initial in zip(groups, run.initial_groups, strict=True):
        group.update(recipe.values_at(run.schedule, initial, run.step, run.plan.steps))
    if "lr" not in run.initial_groups[0]:
        return None
    return float(groups[0]["lr"] / (run.initial_groups[0]["lr"] or 1))


def accumulate_gradients(run: Run) -> torch.Tensor:
    """Forward and backward of every micro-step. Returns the mean loss over this rank's rows, 0-D, which the
    host does not read here.
    """
    plan = run.plan
    loss = torch.zeros((), device=run.runtime.device)
    position = run.loader.state_dict()  # of the first of these rows
    for _ in range(plan.micro_steps):
        try:
            inputs, targets = next(run.loader)  # (rows, seq_len) each
        except shards.NobodyWrites:  # scripts.data_prep has failed; all ranks come here together
            run.save(position)
            print0(f"stopped at step {run.step} and saved; the same command carries on once there is data")
            raise
        micro_loss = run.forward(inputs, targets) / plan.micro_steps
        micro_loss.backward()
        loss += micro_loss.detach()
    return loss


def is_due(every: int, step: int) -> bool:
    """Whether something done every `every` steps (-1: never) is due after this one."""
    return every > 0 and step > 0 and step % every == 0


def understand(argv: list[str] | None) -> tuple[argparse.Namespace, Settings | None]:
    """The arguments, and the settings that the run has recorded if it exists. InputError for flags that do
    not fit each other, before ranks meet and data is prepared.
    """
    args, settings = recall(make_parser(), argv)
    check_corpus(args.corpus)
    if args.qk_clip and not args.no_qk_norm:
        raise InputError("--qk-clip is for models with --no-qk-norm: the norm bounds attention logits itself")
    file = args.optimizer_file
    for name, default in recipe.param_groups.__kwdefaults__.items():
        if file and getattr(args, name) != default:
            raise InputError(f"{flag_of(name)} is for the recipe, not for {file}: set it there")
    return args, settings


def size_of_run(args: argparse.Namespace, settings: Settings | None, runtime: Runtime) -> Plan:
    """The plan of the run that the arguments ask for on these processes."""
    if args.fp8:
        fp8.check(runtime, args.tensor_parallel)
    vocab_size = args.vocab_size or shards.default_vocab_size(args.corpus)
    rows = None  # other micro-steps round differently: in the same world a run keeps its first choice
    if settings and settings.world_size == runtime.world_size:
        rows = settings.rows
    return make_plan(args, vocab_size, runtime, rows)


def main(argv: list[str] | None = None) -> int:
    args, settings = understand(argv)
    folder = folder_of(args.run)
    if args.deterministic:
        make_deterministic()
    runtime = start(args.dtype)
    use_flash_attention(runtime.device, runtime.compute_dtype)  # first: the default windows depend on it
    plan = size_of_run(args, settings, runtime)
    if args.plan:
        print_plan(args, plan, runtime)
        return 0
    signals = StopSignals(folder)
    if args.resume == "auto" and is_complete(folder, plan.steps):
        return 0
    wandb = None
    if args.wandb and runtime.rank == 0:
        wandb = start_wandb(args.run, settings and settings.wandb_id, vars(args))
    # One launch at a time: two would write into each other's checkpoints. The first rank holds the lock
    with locked(folder, wait=False) if runtime.rank == 0 else contextlib.nullcontext():
        run = Run(args, plan, runtime, settings, wandb)
        code = train(run, signals)
        return run.finish() if code is None else code


class Moment:
    """A point in the device's work, for timing: the clock on a CPU; on a GPU, which runs behind the host, an
    event.
    """

    def __init__(self, device: torch.device):
        self.seconds, self.event = time.perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def milliseconds_since(self, earlier: "Moment") -> float:
        """Milliseconds on the device. The host must have waited for something later than this moment."""
        if self.event is None:
            return 1000 * (self.seconds - earlier.seconds)
        return earlier.event.elapsed_time(self.event)


def print_progress(row: dict, steps: int, times: deque) -> None:
    """times: milliseconds of the last steps, from which the rest is estimated."""
    step, left = row["step"], ""
    if times:
        left = f" | {duration((steps - step) * statistics.median(times) / 1000)} left"
    rate = "no lr" if row["lr_multiplier"] is None else f"lr x{row['lr_multiplier']:.2f}"
    print0(
        f"step {step:5d}/{steps} | loss {row['train_loss']:.4f} | {rate} | "
        f"{row['step_ms']:.0f} ms | {row['tokens_per_second']:,.0f} tokens/s | "
        f"{100 * step / steps:.0f}%{left}"
    )


def duration(seconds: float) -> str:
    """As people say it: 2h05m, or 3m20s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


def python_file(text: str) -> str:
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text} is not a file (FILE:key=value is for scripts.optim_race)")
    return os.path.abspath(text)


def bundle_place(text: str) -> str:
    """An address unchanged; a folder or zip as its absolute path, so the run finds it from any folder."""
    if text.startswith(("http://", "https://")):
        return text
    return os.path.abspath(os.path.expanduser(text))


def checkpoint_name(text: str) -> str:
    if not re.fullmatch("auto|never|step_[0-9]+", text):
        raise argparse.ArgumentTypeError(f"must be auto, never or a checkpoint (step_N), not {text!r}")
    return text


def make_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m scripts.base_train", __doc__)
    add = parser.add_argument
    add("--run", default="base", help="name of the run, a folder under runs/ (default: %(default)s)")
    add(
        "--corpus", default="python", help="python, path:FILE_OR_FOLDER or hf:ORG/NAME (default: %(default)s)"
    )
    add("--vocab-size", type=vocabulary, help="tokens in the vocabulary (default: set by the corpus)")
    add_text_arguments(parser)
    add(
        "--depth",
        type=layers,
        default=4,
        help="number of layers; width, heads and batch follow (default: %(default)s)",
    )
    add(
        "--max-seq-len",
        type=number(int, 1, 1 << 20),
        help="context in tokens (default: 2048 on a GPU, 512 on a CPU)",
    )
    add(
        "--window-pattern",
        help="attention window by layer: L full, S the last quarter of the context (default: SSSL with "
        "FlashAttention 3 or 4, else L: without it windows save no time)",
    )
    add("--no-qk-norm", action="store_true", help="do not normalize queries and keys")
    add(
        "--device-batch-size",
        type=number(int, 1, 1 << 20),
        help="rows per device and micro-step (default: a power of two that fits into GPU memory, at most 16 "
        "on a CPU)",
    )
    add(
        "--total-batch-size",
        type=number(int, 1, 1 << 28),
        help="tokens per optimizer step (default: by the length of the run)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--num-iterations", type=count, help="length of the run in optimizer steps")
    length.add_argument(
        "--target-flops",
        type=amount,
        metavar="FLOPS",
        help="as many steps as this compute pays for, such as 1e18, counted as in PaLM: forward and backward "
        "at 6 per weight and token, plus attention",
    )
    length.add_argument(
        "--target-param-data-ratio",
        type=number(float, 1e-6, 1e6),
        help="training tokens per parameter of the matrices and the head (default: 10.5)",
    )
    add(
        "--optimizer-file",
        type=python_file,
        help="Python file with build_optimizer(model) or param_groups(model), used instead of the recipe "
        "(see nanomuon/recipe.py); give it again to resume, for it runs only if the command names it",
    )
    add(
        "--shard",
        default="none",
        choices=["none", "fsdp"],
        help="fsdp: shard parameters, gradients and optimizer state over the processes (FSDP2); "
        "none: whole parameters on each (default: %(default)s)",
    )
    add(
        "--tensor-parallel",
        type=count,
        default=1,
        help="processes that share every matrix and see the same rows; must divide the key-value heads "
        "(default: %(default)s)",
    )
    add_dtype_argument(parser)
    add(
        "--fp8",
        action="store_true",
        help="train, but do not evaluate, with products in float8 (torchao, tensorwise scales), on GPUs that "
        "have it; its gain has not been measured",
    )
    add(
        "--comm-dtype",
        default="auto",
        choices=COMM_DTYPES,
        help="dtype in which gradients are sent for averaging; with --shard fsdp that of Muon's momenta and "
        "updates instead (auto: the gradients' own, float32)",
    )
    add(
        "--seed",
        type=seed,
        default=0,
        help="seed of initial weights, data order and samples (default: %(default)s)",
    )
    add(
        "--deterministic",
        action="store_true",
        help="make equal runs bit-identical on GPUs too, more slowly",
    )
    add(
        "--no-compile",
        action="store_true",
        help="run eagerly, like NANOMUON_COMPILE=0 (default: compile on a GPU, and on a CPU if the run is "
        "long enough)",
    )
    add(
        "--qk-clip",
        type=amount,
        metavar="TAU",
        help="with --no-qk-norm: scale heads whose largest attention logit exceeds TAU, such as 100, back to "
        "it (default: off)",
    )
    add(
        "--matrix-lr",
        type=amount,
        default=0.02,
        help="Muon learning rate at 4,096 tokens per step and 2,289 steps; it follows batch and length of "
        "the run, the other rates only its length (docs/recipe.md) (default: %(default)s)",
    )
    add(
        "--embedding-lr",
        type=amount,
        default=0.3,
        help="AdamW, embeddings (default: %(default)s)",
    )
    add("--unembedding-lr", type=amount, default=0.004, help="AdamW, head (default: %(default)s)")
    add("--scalar-lr", type=amount, default=0.01, help="AdamW, scalars and gates (default: %(default)s)")
    add(
        "--weight-decay",
        type=amount,
        default=0.2,
        help="decay of Muon's matrices, falling to 0 (default: %(default)s)",
    )
    add("--warmup-ratio", type=share, default=0.0, help="share of the run with rising rates (%(default)s)")
    add("--warmdown-ratio", type=share, default=1.0, help="share of the run with falling rates (%(default)s)")
    add(
        "--eval-every",
        type=int,
        default=100,
        help="steps between evaluations, -1: only at the end (%(default)s)",
    )
    add(
        "--eval-tokens",
        type=count,
        default=131072,
        help="validation tokens per evaluation during training, from all over the set; the last one takes "
        "the whole set (default: %(default)s)",
    )
    add(
        "--core-bundle",
        type=bundle_place,
        help="CORE tasks: a folder, a zip or its address, fetched once; evaluated at the end of the run "
        "(default: none)",
    )
    add(
        "--core-every",
        type=int,
        default=-1,
        help="steps between evaluations of CORE, -1: only at the end, if a bundle is given (%(default)s)",
    )
    add(
        "--core-items",
        type=count,
        help=f"items per CORE task (default: {CORE_ITEMS} during training; the last evaluation takes all)",
    )
    add(
        "--save-every",
        type=int,
        default=100,
        help="steps between checkpoints, -1: only at the end (%(default)s)",
    )
    add("--keep-last", type=count, default=2, help="how many checkpoints to keep (default: %(default)s)")
    add(
        "--resume",
        type=checkpoint_name,
        default="auto",
        help="auto: the newest checkpoint; step_N: that one, and later ones are deleted; never: start over",
    )
    add("--wandb", action="store_true", help="log to Weights & Biases as well (WANDB_MODE=offline works)")
    add("--plan", action="store_true", help="print the size of the run and its memory, and stop")
    return parser


if __name__ == "__main__":
    run_command(main)
