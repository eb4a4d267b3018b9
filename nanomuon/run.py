"""A training run: what is trained, with what, and how far it is; its beginning, its evaluations, its end.

The loop that trains it is in scripts/base_train.py.
"""

import argparse
import functools
import gc
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nanomuon import (
    checkpoint,
    core,
    export,
    hf_export,
    parallel,
    provenance,
    recipe,
    report,
    run_folder,
    shards,
    user_file,
)
from nanomuon.arguments import COMM_DTYPES, SCHEDULE_FLAGS, unused_flags
from nanomuon.compilation import compile_model, decide_compilation
from nanomuon.core_bundle import Task
from nanomuon.dataloader import TrainLoader, validation_batches
from nanomuon.evaluate import bits_per_byte
from nanomuon.finished_run import sample_run, summarize, write_results
from nanomuon.fp8 import train_in_fp8
from nanomuon.gpt import GPT
from nanomuon.optim import MuonAdamW
from nanomuon.planning import Plan, meta_model, print_plan
from nanomuon.qk_clip import watch_
from nanomuon.read_json import Record, Whole, check, read_json
from nanomuon.runtime import InputError, Runtime, compile_enabled, print0, together, write_json
from nanomuon.tokenizer import Tokenizer

# What a checkpoint of a run says beside its tensors
LOADER_STATE = Record({"epoch": Whole(), "window": Whole(), "row": Whole()}, others=None)
CHECKPOINT_META = Record({"step": Whole(), "skipped_steps": Whole(), "loader": LOADER_STATE})


@dataclass(frozen=True)
class Launch:
    """What a launch of a run is asked for and has found, before it builds the model; equal on all ranks."""

    args: argparse.Namespace
    changed_arguments: list[str]  # in words, those that are others than in the launch before
    runtime: Runtime
    plan: Plan
    measured: dict  # see sizing.recalled
    source: bytes | None  # the text of the --optimizer-file
    data: Path  # shards and their tokenizer
    tokenizer: Tokenizer  # that of the shards
    core_tasks: list[Task]  # empty where CORE is not evaluated
    defined: dict  # see run_folder.definition
    recorded: dict  # see provenance.record
    accepted_changes: list[str]  # in words, what the run trains on now that it has not so far


@dataclass
class Run:
    """The same on all ranks, but for the rows of the loader. All ranks call its methods together."""

    args: argparse.Namespace
    runtime: Runtime
    plan: Plan
    folder: Path  # runs/NAME
    data: Path  # shards and their tokenizer
    token_bytes: Tensor  # (V,) int32, bytes of text that each token stands for
    defined: dict  # see run_folder.definition
    measured: dict  # see sizing.recalled
    recorded: dict  # see provenance.record
    unused: set[str]  # arguments that nothing of this run depends on
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
    core_tasks: list[Task]  # empty where CORE is not evaluated
    core_steps: set[int]  # at which earlier launches evaluated it
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
        whole_set = max_tokens is None or max_tokens >= shards.validation_tokens(self.data)
        if self.log:
            tokens = self.step * self.plan.batch
            self.log.log({"step": self.step, "tokens": tokens, "val_bpb": value, "whole_set": whole_set})
        extent = " (whole set)" if whole_set else ""
        print0(f"step {self.step:5d}/{self.plan.steps} | validation {value:.4f} bits per byte{extent}")
        return value

    def evaluate_core(self, most_items: int | None) -> dict:
        """What core.evaluate gives, of that many items of each task, None: all; printed, logged and in
        core.json.
        """
        results = core.evaluate(
            self.model,
            Tokenizer.load(self.folder / "tokenizer"),
            self.core_tasks,
            most_items,
            self.plan.rows * self.plan.config.seq_len,
            data_rank(self.args, self.runtime),
            self.plan.data_parallel,
            in_pieces=self.mesh is not None,
        )
        if self.log:
            write_json(self.folder / "core.json", results)
            row = {"step": self.step, "tokens": self.step * self.plan.batch, "core": results["core"]}
            row |= {"mean_centered": results["mean_centered"], "core_tasks": len(results["tasks"])}
            self.log.log(row)
        return results

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
            run_folder.write_settings(
                self.folder, self.defined, self.args, self.plan, self.measured, self.recorded
            )
        if self.args.compile:
            self.forward = compile_model(self.model, self.mesh)


def data_rank(args: argparse.Namespace, runtime: Runtime) -> int:
    """This rank's number among those that see different rows: tensor-parallel ranks see the same."""
    return runtime.rank // args.tensor_parallel


def build_optimizer(
    args: argparse.Namespace,
    model: GPT,
    batch: int,
    runtime: Runtime,
    own_build: Callable | None = None,
    own_schedule: Callable | None = None,
) -> tuple[torch.optim.Optimizer, Callable]:
    """The optimizer, and the schedule that moves its groups: the recipe, or what the user's file has.

    own_build, own_schedule: what user_file.load_recipe gives of that file.
    """
    build = own_build or functools.partial(
        recipe.param_groups,
        matrix_lr=args.matrix_lr,
        embedding_lr=args.embedding_lr,
        unembedding_lr=args.unembedding_lr,
        scalar_lr=args.scalar_lr,
        weight_decay=args.weight_decay,
    )
    schedule = own_schedule or functools.partial(
        recipe.schedule, warmup_ratio=args.warmup_ratio, warmdown_ratio=args.warmdown_ratio
    )
    settings = {"ns_dtype": runtime.compute_dtype}
    if runtime.world_size > 1:
        settings["comm_dtype"] = COMM_DTYPES[args.comm_dtype]
    optimizer = user_file.make_optimizer(build, model, batch, runtime.world_size, **settings)
    return optimizer, schedule


def check_room(model: GPT, args: argparse.Namespace, runtime: Runtime) -> None:
    """InputError where a model, here on the meta device, cannot be held: not even its weights by a CPU."""
    if runtime.device.type != "cpu":
        return  # PyTorch says it itself, before the machine suffers
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    weights = 4 * model.parameter_counts()["total"]  # bytes, in float32
    held = weights / args.tensor_parallel
    if args.shard == "fsdp":
        held = weights / runtime.world_size
    if held > room:
        raise InputError(
            f"the weights of run {args.run} take {held / 2**30:.0f} GB, and this machine has "
            f"{room / 2**30:.0f}: choose a smaller --depth (what is not given is from its settings.json)"
        )


def start_run(launch: Launch) -> Run:
    """The run, where an earlier launch left it or at its beginning; its folder is made here."""
    args, runtime, plan = launch.args, launch.runtime, launch.plan
    folder = run_folder.folder_of(args.run)
    own_build = own_schedule = None
    unused = unused_flags(args, runtime.world_size)
    if launch.source is not None:
        print0(f"running {args.optimizer_file}: {provenance.described(launch.source)}")
        own_build, own_schedule = user_file.load_recipe(args.optimizer_file, launch.source)
        if own_schedule:
            unused.update(SCHEDULE_FLAGS)
    seq_len = plan.config.seq_len
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runtime.device)  # what measurements took does not count

    # Before memory is asked for: the settings may be somebody else's
    planned_model = meta_model(plan.config)
    check_room(planned_model, args, runtime)
    found = checkpoint.find(folder, args.resume)
    if found:
        checkpoint.check_model_fits(found, planned_model)
    mesh = None
    if runtime.world_size > 1 and (args.shard == "fsdp" or args.tensor_parallel > 1):
        mesh = parallel.device_mesh(runtime.device.type, plan.data_parallel, args.tensor_parallel)
    model = parallel.build_model(plan.config, runtime, args.seed, mesh, args.shard == "fsdp")
    if args.fp8:
        print0(f"fp8: {train_in_fp8(model)} matrices multiply in float8 in training")
    if args.qk_clip:
        watch_(model, args.qk_clip)
    optimizer, schedule = build_optimizer(args, model, plan.batch, runtime, own_build, own_schedule)
    initial_groups = [dict(group) for group in optimizer.param_groups]
    user_file.check_schedule(schedule, initial_groups, plan.steps)
    trained = {id(param) for group in initial_groups for param in group["params"]}
    not_trained = [name for name, param in model.named_parameters() if id(param) not in trained]
    if not_trained:
        print0(f"in no param group, so not trained: {', '.join(not_trained)}")

    step, skipped = 0, 0
    resumed_step, loader_state = None, None
    if found:
        meta = checkpoint.load(found, model, optimizer)
        check(meta, CHECKPOINT_META, f"{found}/manifest.json, meta")
        step = resumed_step = meta["step"]
        skipped, loader_state = meta["skipped_steps"], meta["loader"]
        changes = [*launch.changed_arguments, *launch.accepted_changes]
        print0("; ".join([f"resuming run {args.run} at step {step}", *changes]))
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
        launch.data,
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
        before = {}
        if args.resume != "never":
            before = run_folder.read_settings(folder)
        note_changes(launch.recorded, before, launch.accepted_changes, step)
        run_folder.make_run_folder(folder, launch.tokenizer, afresh=args.resume == "never")
        if launch.source is not None:
            run_folder.keep_optimizer_file(folder, launch.source, step)
        run_folder.write_settings(folder, launch.defined, args, plan, launch.measured, launch.recorded)
    checkpoints = checkpoint.Checkpointer(folder, resumed_step, args.keep_last, background=True)
    metrics = folder / "metrics.jsonl"
    log = None
    if runtime.rank == 0:
        wandb = None
        if args.wandb:
            wandb = dict(project="nanomuon", name=args.run, id=args.run, config=launch.defined)
        log = report.MetricsLog(metrics, resumed_step, wandb)
    training, evaluations, core_steps = [], [], set()
    if found:
        training, evaluations = report.read_metrics(metrics)
        core_steps = report.core_steps(metrics)
    losses = [row["train_loss"] for row in training if row["step"] <= step]

    run = Run(
        args=args,
        runtime=runtime,
        plan=plan,
        folder=folder,
        data=launch.data,
        token_bytes=torch.from_numpy(launch.tokenizer.token_bytes).to(runtime.device),
        defined=launch.defined,
        measured=launch.measured,
        recorded=launch.recorded,
        unused=unused,
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
        core_tasks=launch.core_tasks,
        core_steps={evaluated for evaluated in core_steps if evaluated <= step},
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


def note_changes(recorded: dict, before: dict, accepted: list[str], step: int) -> None:
    """Say with what else a run is computed from now on than before, and note in its record all that changes.

    recorded: of this launch, see provenance.record. before: settings of the run so far, {} for a new one.
    accepted: in words, what it trains on now that it has not so far. step: how far it is.
    """
    tools = provenance.changes_of_tools(before, recorded)
    if tools and step > 0:
        print0(f"since the last launch of this run: {'; '.join(tools)}")
    recorded["changes"] = list(provenance.earlier_changes(before))
    if step > 0:  # before, nothing has been trained that this launch does not train again
        recorded["changes"] += [f"after step {step}: {change}" for change in [*accepted, *tools]]


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
    if last is not None and last.get("whole_set"):
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
    seconds = {"evaluation": evaluated - began}
    core_results = final_core(run)
    if core_results is not None:
        seconds["CORE"] = time.perf_counter() - evaluated
    about = {
        "step": run.plan.steps,
        "val_bpb": val_bpb,
        "corpus": run.args.corpus,
        "revision": run.recorded["trained_on"]["revision"],
        "tokenizer": run.defined["tokenizer"],
    }
    export.export_model(run.folder, run.model, asdict(run.plan.config), about)
    if run.log:
        run.log.close()
        write_report(run, val_bpb, core_results, seconds)
    return 0


def final_core(run: Run) -> dict | None:
    """CORE of the trained model, once, however often this is interrupted; None where it is not evaluated."""
    if not run.core_tasks:
        return None
    file = run.folder / "core.json"
    if run.plan.steps in run.core_steps and file.exists():
        return read_json(file, core.RESULTS)
    return run.evaluate_core(run.args.core_items)


def write_report(
    run: Run, val_bpb: float, core_results: dict | None, evaluation_seconds: dict[str, float]
) -> None:
    """Summary, samples and report of a run whose model is exported; for the first rank.

    core_results: see core.evaluate. evaluation_seconds: by stage.
    """
    began = time.perf_counter()
    rows, _ = report.read_metrics(run.folder / "metrics.jsonl")
    summary = summarize(rows, val_bpb, run.plan, run.runtime)  # before samples raise the peak of memory
    if core_results is not None:
        for key, name in (("core", "core"), ("mean_centered", "core_mean_centered")):
            value = core_results[key]
            summary[name] = value if value is None else round(value, 4)
    elif run.args.core_bundle is not None or run.args.core_every > 0:
        summary["core"] = None  # its bundle could not be had
    if run.mesh is not None:  # samples take the whole model, for which the pieces make room
        run.model = run.forward = run.optimizer = run.initial_groups = run.checkpoints = None
        gc.collect()
    samples = sample_run(run.model, run.args, run.runtime)
    seconds = {
        "training": summary["seconds"],
        **evaluation_seconds,
        "samples": time.perf_counter() - began,
    }
    options = {
        **vars(run.args),
        "device_batch_size": run.plan.rows,
        "attention": run.measured.get("attention"),
        "dtype": summary["dtype"],
        **run.defined,
    }
    settings = {}
    for key in [*run.defined, *options]:
        if options[key] is not None and key not in run.unused:
            settings[key] = options[key]
    hf_export.export_at_the_end(run.folder, summary)
    trained = provenance.table(run.recorded)
    write_results(run.folder, settings, summary, samples, seconds, trained, core_results)
