"""How a run begins: what a launch of it finds, its data, its model, and where an earlier launch left it."""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from nanomuon import (
    checkpoint,
    core_bundle,
    parallel,
    provenance,
    recipe,
    report,
    run_folder,
    shards,
    user_file,
)
from nanomuon.arguments import COMM_DTYPES, SCHEDULE_FLAGS, unused_flags
from nanomuon.compilation import compile_model
from nanomuon.corpus import open_corpus
from nanomuon.dataloader import TrainLoader
from nanomuon.fp8 import train_in_fp8
from nanomuon.gpt import GPT
from nanomuon.optim import MuonAdamW
from nanomuon.planning import Plan, meta_model, print_plan
from nanomuon.qk_clip import watch_
from nanomuon.read_json import Anything, ListOf, MapOf, Record, Whole, check
from nanomuon.run import Run, data_rank
from nanomuon.runtime import InputError, Runtime, compile_enabled, first_rank_first, print0
from nanomuon.tokenizer import MissingTokenizer, Tokenizer, load_or_restore

# What a checkpoint of a run says beside its tensors
LOADER_STATE = Record({"epoch": Whole(), "window": Whole(), "row": Whole()}, others=None)
CHECKPOINT_META = Record(
    {"step": Whole(), "skipped_steps": Whole(), "loader": LOADER_STATE},
    {"groups": ListOf(MapOf(Anything()))},
)


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
    core_tasks: list[core_bundle.Task]  # empty where CORE is not evaluated
    defined: dict  # see run_folder.definition
    recorded: dict  # see provenance.record


def prepare_data(
    args: argparse.Namespace, settings: dict, source: bytes | None, tokens: int, runtime: Runtime
) -> tuple[Path, dict]:
    """(folder of the shards, what the run is trained on and with).

    settings: of a run that goes on, whose tokenizer the shards are written with, else {}. source: the text of
    the --optimizer-file. tokens: how many to train on. InputError where what the run trains on has changed.
    """
    folder = run_folder.folder_of(args.run)
    corpus = open_corpus(args.corpus)
    recorded = provenance.record(corpus, args, source, runtime)
    run_folder.check_data(folder, settings, recorded)
    tokenizer = None
    if settings:
        # Where it is lost the corpus's may still be the same: the definition of the run will tell
        with contextlib.suppress(MissingTokenizer):
            tokenizer = load_or_restore(folder / "tokenizer", settings.get("tokenizer"), runtime.rank)
    data = shards.prepare_for_training(corpus, args.vocab_size, tokens, tokenizer)
    # Put back where it is missing, as far as there is a copy
    load_or_restore(data / "tokenizer", shards.read_manifest(data)["tokenizer"], runtime.rank)
    return data, recorded


def open_core_tasks(args: argparse.Namespace, runtime: Runtime) -> list[core_bundle.Task]:
    """The tasks of CORE; none where it is not asked for, or where its bundle cannot be had."""
    bundle = args.core_bundle
    if bundle is None and args.core_every > 0:
        bundle = core_bundle.PUBLIC_BUNDLE
    if bundle is None:
        return []
    try:
        return first_rank_first(lambda: core_bundle.open_bundle(bundle), runtime)
    except core_bundle.Unreachable as error:
        print0(f"warning: {error}; the run goes on without CORE", file=sys.stderr)
        return []


def build_model(args: argparse.Namespace, plan: Plan, runtime: Runtime) -> tuple[GPT, DeviceMesh | None]:
    """(initialized model as this rank holds it, mesh over which its parameters are cut or None)."""
    mesh = None
    if runtime.world_size > 1 and (args.shard == "fsdp" or args.tensor_parallel > 1):
        mesh = parallel.device_mesh(runtime.device.type, plan.data_parallel, args.tensor_parallel)
    model = parallel.build_model(plan.config, runtime, args.seed, mesh, args.shard == "fsdp")
    if args.fp8:
        print0(f"fp8: {train_in_fp8(model)} matrices multiply in float8 in training")
    if args.qk_clip:
        watch_(model, args.qk_clip)
    return model, mesh


def build_optimizer(
    args: argparse.Namespace,
    model: GPT,
    plan: Plan,
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
    optimizer = user_file.make_optimizer(build, model, plan.batch, plan.steps, runtime.world_size, **settings)
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


@dataclass(frozen=True)
class Reached:
    """How far a run is, by its checkpoint; by default at its beginning."""

    step: int = 0
    skipped: int = 0  # steps without an update among them
    loader_state: dict | None = None


def load_checkpoint(found: Path, launch: Launch, model: GPT, optimizer: torch.optim.Optimizer) -> Reached:
    """Fill model and optimizer from this checkpoint, and say how far the run is."""
    meta = checkpoint.load(found, model, optimizer)
    check(meta, CHECKPOINT_META, f"{found}/manifest.json, meta")
    print0("; ".join([f"resuming run {launch.args.run} at step {meta['step']}", *launch.changed_arguments]))
    if isinstance(optimizer, MuonAdamW):
        optimizer.skipped_steps.fill_(meta["skipped_steps"])
    elif "groups" in meta:  # checkpoints of before have none
        write_into(optimizer.param_groups, meta["groups"])
    return Reached(meta["step"], meta["skipped_steps"], meta["loader"])


def open_log(launch: Launch, folder: Path, resumed_step: int | None) -> report.MetricsLog:
    """The metrics of the run, without rows of steps after the resumed one; for the first rank."""
    args, wandb = launch.args, None
    if args.wandb:
        wandb = dict(project="nanomuon", name=args.run, id=args.run, config=launch.defined)
    return report.MetricsLog(folder / "metrics.jsonl", resumed_step, wandb)


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
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runtime.device)  # what measurements took does not count

    # Before memory is asked for: the settings may be somebody else's
    planned_model = meta_model(plan.config)
    check_room(planned_model, args, runtime)
    found = checkpoint.find(folder, args.resume)
    if found:
        checkpoint.check_model_fits(found, planned_model)
    model, mesh = build_model(args, plan, runtime)
    optimizer, schedule = build_optimizer(args, model, plan, runtime, own_build, own_schedule)
    initial_groups = [dict(group) for group in optimizer.param_groups]
    user_file.check_schedule(schedule, initial_groups, plan.steps)
    say_what_is_not_trained(model, initial_groups)

    reached = Reached()
    if found:
        reached = load_checkpoint(found, launch, model, optimizer)
        if plan.steps < reached.step:
            print0(f"step {reached.step} is beyond --num-iterations {plan.steps}: nothing is left to train")
            plan = replace(plan, steps=reached.step)
    elif args.resume == "auto" and (folder / "summary.json").exists():
        raise InputError(
            f"run {args.run} is complete and has no checkpoint to go on from: choose another --run"
        )
    loader = TrainLoader(
        launch.data,
        plan.config.seq_len,
        plan.batch // plan.config.seq_len,
        plan.rows,
        data_rank(args, runtime),
        plan.data_parallel,
        args.seed,
        runtime.device,
        reached.loader_state,
    )

    resumed_step = reached.step if found else None
    if runtime.rank == 0:
        write_folder(launch, plan, folder, reached.step)
    checkpoint.remove(folder, reached.step if found else -1, args.keep_last)
    log = None
    if runtime.rank == 0:
        log = open_log(launch, folder, resumed_step)
    evaluations, core_steps = [], set()
    if found:
        _, evaluations = report.read_metrics(folder / "metrics.jsonl")
        core_steps = report.core_steps(folder / "metrics.jsonl")

    run = Run(
        args=args,
        runtime=runtime,
        plan=plan,
        folder=folder,
        data=launch.data,
        tokenizer=launch.tokenizer,
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
        log=log,
        evaluations={row["step"]: row for row in evaluations if row["step"] <= reached.step},
        core_tasks=launch.core_tasks,
        core_steps={evaluated for evaluated in core_steps if evaluated <= reached.step},
        step=reached.step,
        skipped=reached.skipped,
    )
    print_plan(args, plan, runtime)
    print_passes(launch.data, plan)
    if compile_enabled():
        # Also where only the last evaluation is left: it is to give what it had given without interruption
        run.forward = compile_model(model, mesh)
        if reached.step < plan.steps:
            print0("compiling: the first step takes a while (--no-compile starts at once)")
    return run


def print_passes(data: Path, plan: Plan) -> None:
    """Say how often the run sees its data, where all of them are there."""
    manifest = shards.read_manifest(data)
    if manifest["complete"]:
        tokens = sum(entry["tokens"] for entry in manifest["train"])
        print0(f"data       {tokens:,} tokens for training, seen {plan.tokens / tokens:.2f} times")


def write_into(groups: list[dict], of_groups: list[dict]) -> None:
    """Put what run.written_into gave back into the param groups of an optimizer that was built anew."""
    for group, written in zip(groups, of_groups, strict=True):
        for key, value in written.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def say_what_is_not_trained(model: GPT, groups: list[dict]) -> None:
    trained = set()
    for group in groups:
        trained.update(id(param) for param in group["params"])
    not_trained = [name for name, param in model.named_parameters() if id(param) not in trained]
    if not_trained:
        print0(f"in no param group, so not trained: {', '.join(not_trained)}")


def write_folder(launch: Launch, plan: Plan, folder: Path, step: int) -> None:
    """The run's folder as this launch begins or goes on with it after `step`; for the first rank."""
    before = {}
    if launch.args.resume != "never":
        before = run_folder.read_settings(folder)
    tools = provenance.changes_of_tools(before, launch.recorded)
    if tools and step > 0:
        print0(f"since the last launch of this run: {'; '.join(tools)}")
    run_folder.make_run_folder(folder, launch.tokenizer, afresh=launch.args.resume == "never")
    if launch.source is not None:
        run_folder.keep_optimizer_file(folder, launch.source)
    run_folder.write_settings(folder, launch.defined, launch.args, plan, launch.measured, launch.recorded)
