"""A training run: what is trained, with what, and how far it is; its beginning, its evaluations, its end.

The loop that trains it is in scripts/base_train.py.
"""

import argparse
import functools
import gc
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nanomuon import checkpoint, export, parallel, recipe, report, run_folder, user_file
from nanomuon.arguments import COMM_DTYPES
from nanomuon.compilation import compile_model, decide_compilation
from nanomuon.dataloader import TrainLoader, validation_batches
from nanomuon.evaluate import bits_per_byte
from nanomuon.finished_run import sample_run, summarize, write_results
from nanomuon.fp8 import train_in_fp8
from nanomuon.gpt import GPT
from nanomuon.optim import MuonAdamW
from nanomuon.planning import Plan, print_plan
from nanomuon.qk_clip import watch_
from nanomuon.runtime import InputError, Runtime, compile_enabled, print0, together
from nanomuon.tokenizer import Tokenizer


@dataclass
class Run:
    """The same on all ranks, but for the rows of the loader. All ranks call its methods together."""

    args: argparse.Namespace
    runtime: Runtime
    plan: Plan
    folder: Path  # runs/NAME
    data: Path  # shards and their tokenizer
    token_bytes: Tensor  # (V,) int64, bytes of text that each token stands for
    defined: dict  # see run_folder.definition
    measured: dict  # see sizing.recalled
    mesh: DeviceMesh | None  # where parameters are in pieces
    model: GPT
    forward: Callable  # the model, compiled or as it is: (inputs, targets) -> mean loss
    optimizer: torch.optim.Optimizer
    schedule: Callable  # (group as it was built, step, steps) -> values of the group at this step
    initial_groups: list[dict]  # param groups as they were built
    loader: TrainLoader
    checkpoints: checkpoint.Checkpointer
    log: report.MetricsLog | None  # on the first rank
    evaluations: dict[int, dict]  # by step: rows of metrics.jsonl that earlier launches wrote
    recent_losses: deque  # finite ones
    step: int  # steps done
    skipped: int  # steps without an update, because a loss or gradient was not finite

    def evaluate(self, max_tokens: int | None) -> float:
        """Bits per byte of that many validation tokens, None: of all; printed and logged."""
        batches = validation_batches(
            self.data,
            self.plan.config.seq_len,
            self.plan.rows,
            data_rank(self.args, self.runtime),
            self.plan.data_parallel,
            self.runtime.device,
            max_tokens,
        )
        as_in_training = self.forward is not self.model  # compiled whole: then with the graph that is there
        value = bits_per_byte(self.forward, batches, self.token_bytes, as_in_training)
        if self.log:
            tokens = self.step * self.plan.batch
            whole_set = max_tokens is None
            self.log.log({"step": self.step, "tokens": tokens, "val_bpb": value, "whole_set": whole_set})
        extent = "" if max_tokens else " (whole set)"
        print0(f"step {self.step:5d}/{self.plan.steps} | validation {value:.4f} bits per byte{extent}")
        return value

    def save(self) -> None:
        """Write a checkpoint, in the background. InputError where another launch has taken the run."""
        together(lambda: run_folder.check_held(self.folder, self.runtime.rank))
        if self.log:
            self.log.flush()  # a checkpoint must not get ahead of its rows
        meta = {
            "step": self.step,
            "skipped_steps": self.skipped,
            "loader": self.loader.state_dict(),
            "settings": self.defined,
        }
        self.checkpoints.save(self.step, self.model, self.optimizer, meta)

    def decide_compilation(self, eager_ms: float) -> None:
        """Compile from here on if the run then ends sooner; eager_ms: milliseconds of an eager step.

        Written down, because compiled and eager steps round differently, and a resumed run shall repeat this
        one.
        """
        decide_compilation(self.args, self.plan, self.step, eager_ms, self.runtime)
        if self.runtime.rank == 0:
            run_folder.write_settings(self.folder, self.defined, self.args, self.plan, self.measured)
        if self.args.compile:
            self.forward = compile_model(self.model, self.mesh)


def data_rank(args: argparse.Namespace, runtime: Runtime) -> int:
    """This rank's number among those that see different rows: tensor-parallel ranks see the same."""
    return runtime.rank // args.tensor_parallel


def build_optimizer(
    args: argparse.Namespace, model: GPT, batch: int, runtime: Runtime
) -> tuple[torch.optim.Optimizer, Callable]:
    """The optimizer, and the schedule that moves its groups: the recipe, or what the user's file has."""
    build = functools.partial(
        recipe.param_groups,
        matrix_lr=args.matrix_lr,
        embedding_lr=args.embedding_lr,
        unembedding_lr=args.unembedding_lr,
        scalar_lr=args.scalar_lr,
        weight_decay=args.weight_decay,
    )
    schedule = functools.partial(
        recipe.schedule, warmup_ratio=args.warmup_ratio, warmdown_ratio=args.warmdown_ratio
    )
    if args.optimizer_file:
        build, own_schedule = user_file.load_recipe(args.optimizer_file)
        schedule = own_schedule or schedule
    settings = {"ns_dtype": runtime.compute_dtype}
    if runtime.world_size > 1:
        settings["comm_dtype"] = COMM_DTYPES[args.comm_dtype]
    optimizer = user_file.make_optimizer(build, model, batch, runtime.world_size, **settings)
    return optimizer, schedule


def start_run(
    args: argparse.Namespace,
    runtime: Runtime,
    plan: Plan,
    data: Path,
    defined: dict,
    measured: dict,
    changed: list[str],
) -> Run:
    """The run, where an earlier launch left it or at its beginning; its folder is made here.

    data: folder of the shards and their tokenizer. defined: see run_folder.definition. measured: see
    sizing.recalled. changed: in words, what this launch does otherwise than the one before.
    """
    folder = run_folder.folder_of(args.run)
    tokenizer = Tokenizer.load(data / "tokenizer")
    seq_len = plan.config.seq_len
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runtime.device)  # what measurements took does not count

    mesh = None
    if runtime.world_size > 1 and (args.shard == "fsdp" or args.tensor_parallel > 1):
        mesh = parallel.device_mesh(runtime.device.type, plan.data_parallel, args.tensor_parallel)
    model = parallel.build_model(plan.config, runtime, args.seed, mesh, args.shard == "fsdp")
    if args.fp8:
        print0(f"fp8: {train_in_fp8(model)} matrices multiply in float8 in training")
    if args.qk_clip:
        watch_(model, args.qk_clip)
    optimizer, schedule = build_optimizer(args, model, plan.batch, runtime)
    initial_groups = [dict(group) for group in optimizer.param_groups]
    user_file.check_schedule(schedule, initial_groups, plan.steps)
    trained = {id(param) for group in initial_groups for param in group["params"]}
    not_trained = [name for name, param in model.named_parameters() if id(param) not in trained]
    if not_trained:
        print0(f"in no param group, so not trained: {', '.join(not_trained)}")

    step, skipped = 0, 0
    resumed_step, loader_state = None, None
    found = checkpoint.find(folder, args.resume)
    if found:
        meta = checkpoint.load(found, model, optimizer)
        step = resumed_step = meta["step"]
        skipped, loader_state = meta["skipped_steps"], meta["loader"]
        print0("; ".join([f"resuming run {args.run} at step {step}", *changed]))
        if plan.steps < step:
            print0(f"step {step} is beyond --num-iterations {plan.steps}: nothing is left to train")
            plan = replace(plan, steps=step)
        if isinstance(optimizer, MuonAdamW):
            optimizer.skipped_steps.fill_(skipped)
    elif args.resume == "auto" and (folder / "summary.json").exists():
        raise InputError(
            f"run {args.run} is complete and has no checkpoint to go on from: choose another --run"
        )
    loader = TrainLoader(
        data,
        seq_len,
        plan.batch // seq_len,
        plan.rows,
        data_rank(args, runtime),
        plan.data_parallel,
        args.seed,
        runtime.device,
        loader_state,
    )

    if runtime.rank == 0:
        run_folder.make_run_folder(folder, tokenizer, afresh=args.resume == "never")
        run_folder.write_settings(folder, defined, args, plan, measured)
    checkpoints = checkpoint.Checkpointer(folder, resumed_step, args.keep_last, background=True)
    metrics = folder / "metrics.jsonl"
    log = None
    if runtime.rank == 0:
        wandb = None
        if args.wandb:
            wandb = dict(project="nanomuon", name=args.run, id=args.run, config=defined)
        log = report.MetricsLog(metrics, resumed_step, wandb)
    training, evaluations = [], []
    if found:
        training, evaluations = report.read_metrics(metrics)
    losses = [row["train_loss"] for row in training if row["step"] <= step]

    run = Run(
        args=args,
        runtime=runtime,
        plan=plan,
        folder=folder,
        data=data,
        token_bytes=torch.from_numpy(tokenizer.token_bytes).to(runtime.device),
        defined=defined,
        measured=measured,
        mesh=mesh,
        model=model,
        forward=model,
        optimizer=optimizer,
        schedule=schedule,
        initial_groups=initial_groups,
        loader=loader,
        checkpoints=checkpoints,
        log=log,
        evaluations={row["step"]: row for row in evaluations if row["step"] <= step},
        recent_losses=deque([loss for loss in losses if loss is not None], maxlen=128),
        step=step,
        skipped=skipped,
    )
    print_plan(args, plan, runtime)
    if compile_enabled():
        # Also where only the last evaluation is left: it is to give what it had given without interruption
        run.forward = compile_model(model, mesh)
        if step < plan.steps:
            print0("compiling: the first step takes a while (--no-compile starts at once)")
    return run


def give_up(run: Run, bad_steps: int) -> int:
    """Say where to go on from after so many losses or gradients in a row that are not finite: exit code 1."""
    run.checkpoints.wait()
    # A checkpoint is good if the step after it was
    good = [saved for saved in checkpoint.saved_steps(run.folder) if saved < run.step - bad_steps]
    last_good = f"step_{good[-1]}" if good else "none"
    print0(
        f"error: {bad_steps} losses in a row are not finite, or their gradients; last good checkpoint: "
        f"{last_good}; go on from there with --resume and lower learning rates",
        file=sys.stderr,
    )
    return 1


def finish(run: Run) -> int:
    """Evaluate on the whole validation set (once, however often this is interrupted), export, report.

    Returns the exit code: 1 where the model has diverged.
    """
    began = time.perf_counter()
    last = run.evaluations.get(run.plan.steps)
    if last is not None and last["whole_set"]:
        val_bpb = last["val_bpb"]  # None where it was not finite, as JSON has no such numbers
    else:
        val_bpb = run.evaluate(None)
    if val_bpb is None or not math.isfinite(val_bpb):
        print0(
            f"error: run {run.args.run} has diverged, its validation loss is not finite: go on from an "
            "earlier checkpoint with --resume step_N, or start over with --resume never, at lower learning "
            "rates",
            file=sys.stderr,
        )
        return 1
    evaluated = time.perf_counter()
    about = {
        "step": run.plan.steps,
        "val_bpb": val_bpb,
        "corpus": run.args.corpus,
        "tokenizer": run.defined["tokenizer"],
    }
    export.export_model(run.folder, run.model, asdict(run.plan.config), about)
    if run.log:
        run.log.close()
        write_report(run, val_bpb, evaluated - began)
    return 0


def write_report(run: Run, val_bpb: float, evaluation_seconds: float) -> None:
    """Summary, samples and report of a run whose model is exported; for the first rank."""
    began = time.perf_counter()
    rows, _ = report.read_metrics(run.folder / "metrics.jsonl")
    summary = summarize(rows, val_bpb, run.plan, run.runtime)  # before samples raise the peak of memory
    if run.mesh is not None:  # samples take the whole model, for which the pieces make room
        run.model = run.forward = run.optimizer = run.initial_groups = run.checkpoints = None
        gc.collect()
    samples = sample_run(run.model, run.args, run.runtime)
    seconds = {
        "training": summary["seconds"],
        "evaluation": evaluation_seconds,
        "samples": time.perf_counter() - began,
    }
    settings = dict(run.defined)
    options = {
        **vars(run.args),
        "device_batch_size": run.plan.rows,
        "attention": run.measured.get("attention"),
        "dtype": summary["dtype"],
    }
    for key, value in options.items():
        if key not in settings and value is not None:
            settings[key] = value
    write_results(run.folder, settings, summary, samples, seconds)
