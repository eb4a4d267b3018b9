"""Pretrain a GPT.

    python -m scripts.base_train --total-batch-size 4096 --num-iterations 300   # minutes on a CPU
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth 24 --corpus hf:ORG/NAME
    torchrun ... -m scripts.base_train -- --depth 48 --shard fsdp --tensor-parallel 2   # larger than a GPU
    python -m scripts.base_train --corpus path:my_texts --run mine --vocab-size 1024 \\
        --total-batch-size 4096 --num-iterations 300                           # your own text
    python -m scripts.base_train --optimizer-file my_optim.py   # your own optimizer: build_optimizer(model)

Without the --, torchrun takes --run for an abbreviation of a flag of its own, and fails. Width and heads
follow from --depth, and so do batch and length unless you set them: depth 4 trains on 44M tokens, which takes
hours on a CPU. The corpus does not: larger models need more text than the default. A run is the
folder runs/NAME under NANOMUON_BASE_DIR; the same command resumes it from its last checkpoint. After its
first step, SIGTERM, SIGHUP and Ctrl-C make it finish the current step, save and end, with exit code 75 (ranks
exit with 0, because torchrun takes any other code for a failure); the file runs/NAME/stopped remains until
the run resumes.
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

import argparse
import contextlib
import statistics
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from nanomuon import checkpoint, parallel, recipe
from nanomuon.attention import use_flash_attention
from nanomuon.command import StopSignals, run_command
from nanomuon.corpus import check_corpus
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.plan import make_plan, peak_flops, print_plan, print_time, warn_if_too_large
from nanomuon.qk_clip import clip_
from nanomuon.report import start_wandb
from nanomuon.run import Run, refuse_other_texts, report_if_complete
from nanomuon.runtime import (
    InputError,
    folder_of,
    locked,
    make_deterministic,
    on_first_rank,
    print0,
    require_shared_base_dir,
    start,
    together,
)
from nanomuon.settings import RunParser, Settings, make_parser, parse_with_record, require_same_flags

CORE_ITEMS = 500  # per CORE task, in evaluations during training
MAX_BAD_STEPS = 10  # the run ends after this many steps in a row with a loss or gradient that is not finite


def main(argv: list[str] | None = None) -> int:
    args, settings = parse_flags(make_parser(description=__doc__), argv)
    folder = folder_of(args.run)
    if args.deterministic:
        make_deterministic()
    runtime = start(args.dtype)
    if runtime.world_size > 1:
        # First: a rank that does not see the run's folder has other flags for that reason
        require_shared_base_dir()
        require_same_flags(args)
    # Before the plan, whose default windows depend on it. The first rank chooses, all activate its choice
    flash_attention = on_first_rank(lambda: use_flash_attention(runtime.device, runtime.compute_dtype))
    if flash_attention is not None:
        torch.nn.attention.activate_flash_attention_impl(flash_attention)
    plan = make_plan(args, runtime, settings)
    warn_if_too_large(plan, runtime.device)  # before the model is built
    if args.plan:
        print_plan(plan, runtime)
        print_time(plan, runtime)
        if args.optimizer_file:
            print0(f"optimizer  {args.optimizer_file}, which --plan does not run")
        if settings:
            done = max(checkpoint.saved_steps(folder), default=0)
            print0(f"run        {folder} exists, its newest checkpoint is of step {done}")
        return 0
    signals = StopSignals(folder)
    if args.resume == "auto" and report_if_complete(folder, plan.steps):
        return 0
    # One launch at a time: two would overwrite each other's checkpoints. The first rank holds the lock
    with locked(folder, wait=False) if runtime.rank == 0 else contextlib.nullcontext():
        if runtime.rank == 0:
            _, settings_now = parse_with_record(make_parser(), argv)  # it may have changed before the lock
            if settings_now != settings:
                raise InputError(
                    f"another launch changed run {args.run} in the meantime: give the command again"
                )
        wandb = None
        if args.wandb and runtime.rank == 0:
            wandb = start_wandb(args.run, settings and settings.wandb_id, vars(args))
        run = Run(args, plan, runtime, settings, wandb, lambda: signals.asked)
        if args.resume != "auto":  # it has taken effect; given again, it would undo the steps that follow
            signals.command += " without --resume"
        code = train(run, signals)
        if code is None:
            code = run.finish()
        signals.close()
        if runtime.rank == 0:
            run.metrics.close(code)
        return code


def parse_flags(parser: RunParser, argv: list[str] | None) -> tuple[argparse.Namespace, Settings | None]:
    """The arguments, and the settings that the run has recorded, if it exists. InputError for flags that
    conflict or differ from the recorded ones, and for other texts, before the process group starts and data
    is prepared.
    """
    args, settings = parse_with_record(parser, argv)
    check_corpus(args.corpus)
    if settings:
        refuse_other_texts(args, settings.trained_on)
    if args.qk_clip and not args.no_qk_norm:
        raise InputError("--qk-clip needs --no-qk-norm, since the norm already bounds attention logits")
    return args, settings


def train(run: Run, signals: StopSignals) -> int | None:
    """The training loop. Returns None once the run has done all of its steps, else the exit code."""
    args, plan, progress = run.args, run.plan, Progress(run.plan.steps)
    peak = peak_flops(run.runtime.device)
    first_step, bad_steps = run.step, 0  # bad: in a row, so far
    while run.step < plan.steps:
        # Before a step, not after one: a signal during a step need not wait for the evaluation that is due
        # after it. The resumed run evaluates first
        evaluate_what_is_due(run)
        torch.manual_seed(args.seed + run.step)  # so that an optimizer draws the same numbers after a resume
        lr_multiplier = set_hyperparameters(
            run.optimizer, run.schedule, run.initial_groups, run.step, plan.steps
        )
        position = run.loader.state_dict()  # of the first row of this step
        try:
            done = training_step(
                run.model,
                run.forward,
                run.optimizer,
                run.loader,
                plan.micro_steps,
                run.mesh,
                args.qk_clip,
                signals,
            )
        except InputError:  # on all ranks: there is no data, or a signal came while the loader waited for it
            run.save(position)
            if any(together(lambda: signals.asked)):
                return signals.stopped(f"at step {run.step} and saved")
            print0(f"stopped at step {run.step} and saved; {signals.command} resumes it once there is data")
            raise

        if run.step == first_step:  # it is better to fail now than at the first save
            checkpoint.refuse_unknown_state(run.optimizer)
        # Only now: during the first step there is nothing new to save, and Ctrl-C should also stop compiling
        signals.can_save = True
        run.step += 1
        run.skipped += done.skipped
        bad_steps = bad_steps + 1 if done.skipped else 0
        tokens_per_second = 1000 * plan.batch / done.milliseconds
        row = {
            "train_loss": done.loss,
            "lr_multiplier": lr_multiplier,
            "step_ms": done.milliseconds,
            "tokens_per_second": tokens_per_second,
            "optimizer_ms": done.optimizer_ms,
            "skipped_steps": run.skipped,
        }
        if peak is not None:
            row["mfu"] = tokens_per_second * plan.flops_per_token / run.runtime.world_size / peak
        run.log(row)
        progress.show(run.step, row)
        if bad_steps:
            what = f"loss {done.loss}: no update, because the loss or a gradient is not finite"
            print0(f"step {run.step}: {what} ({bad_steps} in a row)")
        if bad_steps == MAX_BAD_STEPS:
            return run.diverged(f"{bad_steps} steps in a row had non-finite losses or gradients", bad_steps)

        # Not after a bad step, unless it is the last: it would replace a good one, since few are kept
        due = is_due(args.save_every, run.step) and bad_steps == 0
        is_last = done.stops or run.step == plan.steps
        if due or is_last:
            run.save(must_succeed=is_last)
        if done.stops:
            return signals.stopped(f"at step {run.step} and saved")
    signals.how = "in its last evaluation"  # first: the other thread reads it as soon as nothing can be saved
    signals.can_save = False
    if any(together(lambda: signals.asked)):  # a rank got a signal during the last save
        return signals.stopped("before its last evaluation")
    return None


def evaluate_what_is_due(run: Run) -> None:
    """Run the evaluations that are due at this step."""
    args = run.args
    loss_is_due = is_due(args.eval_every, run.step)
    core_is_due = run.core_tasks and is_due(args.core_every, run.step)
    if not (loss_is_due or core_is_due):
        return
    recipe.switch_weights(run.optimizer, "eval")
    if loss_is_due:
        run.evaluate(args.eval_tokens)
    if core_is_due:
        run.evaluate_core(args.core_items or CORE_ITEMS)
    if isinstance(run.model, FSDPModule):
        # FSDP2 still has whole parameters, and the optimizer's train() may change the shards
        run.model.reshard()
    recipe.switch_weights(run.optimizer, "train")


def is_due(every: int, step: int) -> bool:
    """Whether it is time, after `step` steps, for what happens every `every` steps; -1: never."""
    return every > 0 and step > 0 and step % every == 0


# ------------------------------------------------------------------------------------------------------------
# One step, which races and scripts.train_bench use too


def set_hyperparameters(
    optimizer, schedule, initial_groups: list[dict], step: int, steps: int
) -> float | None:
    """Set each param group to its values at `step` of `steps`. initial_groups: the groups as they were built.
    Returns the multiplier of the first group's rate, or None if a user's optimizer has no rate.
    """
    groups = optimizer.param_groups
    for group, initial in zip(groups, initial_groups, strict=True):
        group.update(recipe.values_at(schedule, initial, step, steps))
    if "lr" not in initial_groups[0]:
        return None
    return float(groups[0]["lr"] / (initial_groups[0]["lr"] or 1))


@dataclass
class Step:
    """The result of a training step. stops: a rank was asked to stop; skipped: there was no update."""

    loss: float
    stops: bool
    skipped: bool
    milliseconds: float
    optimizer_ms: float


def training_step(
    model, forward, optimizer, batches, micro_steps, mesh=None, qk_clip=None, signals=None
) -> Step:
    """Accumulate the gradients of the next micro-batches, agree with the other ranks, update the parameters.

    forward: the model, compiled or eager: (inputs, targets) -> mean loss. batches: iterator of (inputs,
    targets), (rows, seq_len) each. mesh: ("dp", "tp"), if parameters are cut. qk_clip: the limit on attention
    logits. signals: may request a stop. All ranks must call this.
    """
    began, is_ours = time.perf_counter(), isinstance(optimizer, MuonAdamW)  # ours skips bad steps itself
    loss = torch.zeros((), device=next(model.parameters()).device)  # the host does not read it yet
    for _ in range(micro_steps):
        inputs, targets = next(batches)
        micro_loss = forward(inputs, targets) / micro_steps
        micro_loss.backward()
        loss += micro_loss.detach()
    if mesh is not None and not isinstance(model, FSDPModule):
        parallel.average_tensor_parallel_gradients(model, mesh)
    if not isinstance(optimizer, DistMuonAdamW):
        parallel.average_whole_gradients(model)
    if not is_ours:
        loss = torch.where(parallel.gradients_finite(model), loss, float("nan"))

    # A signal to one rank, or a loss that is not finite on one, counts for all. (2,): the mean loss, and how
    # many ranks should stop. Filled on the device: a tensor copied from the host would wait for the device
    agreed = torch.stack([loss, loss.new_full((), signals is not None and signals.asked)])
    if dist.is_initialized():
        dist.all_reduce(agreed)
        agreed[0] /= dist.get_world_size()
    finite = agreed[0].isfinite()
    update_began = Moment(loss.device)
    if is_ours:
        skipped_before = optimizer.skipped_steps.clone()
        optimizer.step(finite=finite)
        skipped = optimizer.skipped_steps - skipped_before
    else:
        # The host decides whether a user's optimizer may step, which takes one more wait for the device
        if finite:
            optimizer.step()
        skipped = finite.logical_not()
    if qk_clip:
        clip_(model, qk_clip, mesh["tp"].size() if mesh else 1)
    optimizer.zero_grad(set_to_none=True)
    update_ended = Moment(loss.device)

    # With our optimizer the step's only wait for the device: everything that the host needs, in one copy
    mean_loss, stops, skipped = torch.cat([agreed.double(), skipped.double().view(1)]).tolist()
    milliseconds = 1000 * (time.perf_counter() - began)
    return Step(
        mean_loss, stops > 0, skipped > 0, milliseconds, update_ended.milliseconds_since(update_began)
    )


class Moment:
    """A point in the device's work, for timing: on a CPU the time; on a GPU, which runs behind the host, an
    event.
    """

    def __init__(self, device: torch.device):
        self.seconds, self.event = time.perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def milliseconds_since(self, earlier: "Moment") -> float:
        """Milliseconds on the device. The host must already have waited for something after this moment."""
        if self.event is None:
            return 1000 * (self.seconds - earlier.seconds)
        return earlier.event.elapsed_time(self.event)


class Progress:
    """Prints a line every few seconds and at the end."""

    def __init__(self, steps: int):
        self.steps, self.shown_at = steps, 0.0
        self.times = deque(maxlen=20)  # milliseconds of the last steps
        self.is_first = True  # the first step compiles

    def show(self, step: int, row: dict) -> None:
        if not self.is_first:
            self.times.append(row["step_ms"])
        self.is_first = False
        if time.perf_counter() - self.shown_at < 5 and step < self.steps:
            return
        self.shown_at, left = time.perf_counter(), ""
        if self.times:
            seconds = (self.steps - step) * statistics.median(self.times) / 1000
            left = f" | {timedelta(seconds=round(min(seconds, 1e10)))} left"  # 300 years
        rate = "no lr" if row["lr_multiplier"] is None else f"lr x{row['lr_multiplier']:.2f}"
        print0(
            f"step {step:5d}/{self.steps} | loss {row['train_loss']:.4f} | {rate} | "
            f"{row['step_ms']:.0f} ms | {row['tokens_per_second']:,.0f} tokens/s | "
            f"{100 * step / self.steps:.0f}%{left}"
        )


if __name__ == "__main__":
    run_command(main)
