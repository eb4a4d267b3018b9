"""A training run: start, resume, save, evaluate, finish. The loop that trains is in scripts/base_train.py."""

import argparse
import functools
import gc
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from nanomuon import checkpoint, core, hf_export, parallel, recipe, report, shards
from nanomuon.corpus import open_corpus
from nanomuon.dataloader import TrainLoader, validation_batches
from nanomuon.evaluate import bits_per_byte
from nanomuon.files import as_kind, write_json
from nanomuon.fp8 import train_in_fp8
from nanomuon.generate import sample_texts
from nanomuon.optim import MuonAdamW
from nanomuon.plan import (
    COMM_DTYPES,
    Plan,
    check_room,
    choose_compilation,
    meta_model,
    print_plan,
)
from nanomuon.qk_clip import watch_
from nanomuon.run_folder import (
    OF_THE_LAUNCH,
    Settings,
    folder_of,
    layout_of,
    refuse_differences,
    sha256_of,
    trained_with,
)
from nanomuon.runtime import InputError, Runtime, first_rank_first, print0
from nanomuon.tokenizer import Tokenizer

PROMPTS = {"python": ["import os\n", "def main():\n", "class Stack:\n", "    for i in range("]}
NO_PROMPTS = [""] * 3  # for other corpora


@dataclass
class Position:
    """In the data, see TrainLoader.state_dict."""

    epoch: int
    window: int
    row: int


@dataclass
class Meta:
    """What a checkpoint says beside its tensors."""

    step: int
    skipped_steps: int
    loader: Position
    groups: list[dict] = field(default_factory=list)  # see saved_groups


class Run:
    """The same on all ranks, but for the rows of the loader. All ranks call its methods together.

    forward: the model, compiled or as it is: (inputs, targets) -> mean loss. schedule: (group as it was
    built, step, steps) -> values of the group at this step. initial_groups: the param groups as they were
    built. mesh: over which parameters are in pieces, or None. log: of the first rank, None on others. step:
    steps done; skipped: those without an update among them, as a loss or gradient was not finite.
    """

    def __init__(self, args: argparse.Namespace, plan: Plan, runtime: Runtime, settings: Settings | None):
        """Start the run, or go on with it; settings: what it has recorded, None for a new one."""
        self.args, self.plan, self.runtime = args, plan, runtime
        self.folder = folder_of(args.run)
        self.core_tasks = open_core_tasks(args, runtime)
        self.trained_on = first_rank_first(lambda: self._open_data(settings), runtime)
        self.token_bytes = torch.from_numpy(self.tokenizer.token_bytes).to(runtime.device)
        compiles = settings.compile if settings and not args.no_compile else None
        if compiles is None or "NANOMUON_COMPILE" in os.environ:
            compiles = choose_compilation(args, plan, runtime)
        os.environ["NANOMUON_COMPILE"] = str(int(compiles))

        found = self._build()
        self._resume(found)
        resumed_step = self.step if found else None
        self.log = None
        if runtime.rank == 0:
            self._write_folder(compiles)
            wandb = None
            if args.wandb:
                wandb = dict(project="nanomuon", name=args.run, id=args.run, config=vars(args))
            self.log = report.MetricsLog(self.folder / "metrics.jsonl", resumed_step, wandb)
        checkpoint.remove(self.folder, self.step if found else -1, args.keep_last)
        print_plan(args, self.plan, runtime)
        manifest = shards.read_manifest(self.data)
        if manifest.complete:
            tokens = shards.count_tokens(manifest.train)
            print0(f"data       {tokens:,} tokens for training, seen {self.plan.tokens / tokens:.2f} times")
        self.forward = self.model
        if compiles:
            self.forward = parallel.compile_model(self.model, self.mesh)
            print0("compiling: the first step takes a while (--no-compile starts at once)")

    def _open_data(self, settings):
        """Open shards and tokenizer. Returns what the run is trained on; InputError if that has changed."""
        corpus, file = open_corpus(self.args.corpus), self.args.optimizer_file
        trained_on = {"corpus": self.args.corpus, "revision": corpus.revision, "shards": corpus.slug}
        self._refuse_other_data(settings, trained_on)  # before it is worked on
        self.data = shards.prepare_for_training(corpus, self.args.vocab_size, self.plan.tokens)
        self.tokenizer = shards.open_tokenizer(self.data)
        trained_on["tokenizer"] = self.tokenizer.hash
        self._refuse_other_data(settings, trained_on)
        return trained_on | {"optimizer_file": file, "optimizer_file_sha256": sha256_of(file)}

    def _refuse_other_data(self, settings, trained_on):
        differences = []
        for key, now in trained_on.items():
            if settings and settings.trained_on.get(key) != now:
                differences.append(f"{key} {settings.trained_on.get(key)}, not {now}")
        refuse_differences(self.args.run, differences)

    def _build(self) -> Path | None:
        """Model, optimizer, schedule. Returns the checkpoint to go on from, seen to fit before that."""
        args, plan, runtime = self.args, self.plan, self.runtime
        planned = meta_model(plan.config)
        check_room(planned, args, runtime)
        found = checkpoint.find(self.folder, args.resume)
        if found:
            checkpoint.check_model_fits(found, planned)
        if runtime.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(runtime.device)  # what the probe took does not count
        self.mesh = None
        if runtime.world_size > 1 and (args.shard == "fsdp" or args.tensor_parallel > 1):
            self.mesh = parallel.device_mesh(runtime.device.type, plan.data_parallel, args.tensor_parallel)
        self.model = parallel.build_model(plan.config, runtime, args.seed, self.mesh, args.shard == "fsdp")
        if args.fp8:
            print0(f"fp8: {train_in_fp8(self.model)} matrices multiply in float8 in training")
        if args.qk_clip:
            watch_(self.model, args.qk_clip)
        self.optimizer, self.schedule = build_optimizer(args, self.model, plan, runtime)
        self.initial_groups = [dict(group) for group in self.optimizer.param_groups]
        recipe.check_schedule(self.schedule, self.initial_groups, plan.steps)
        trained = {id(param) for group in self.initial_groups for param in group["params"]}
        not_trained = [name for name, param in self.model.named_parameters() if id(param) not in trained]
        if not_trained:
            print0(f"in no param group, so not trained: {', '.join(not_trained)}")
        return found

    def _resume(self, found):
        """Take up what a checkpoint holds, if there is one."""
        args, plan = self.args, self.plan
        self.step = self.skipped = 0
        position = None
        if found:
            try:
                meta = as_kind(checkpoint.load(found, self.model, self.optimizer), Meta, "meta")
            except ValueError as error:
                raise InputError(f"{found}/manifest.json: {error}") from error
            self.step, self.skipped, position = meta.step, meta.skipped_steps, asdict(meta.loader)
            if isinstance(self.optimizer, MuonAdamW):
                self.optimizer.skipped_steps.fill_(self.skipped)
            else:
                restore_groups(self.optimizer.param_groups, meta.groups)
            print0(f"resuming run {args.run} at step {self.step}")
            if plan.steps < self.step:
                print0(f"that is beyond --num-iterations {plan.steps}: nothing is left to train")
                self.plan = replace(plan, steps=self.step)
        elif args.resume == "auto" and (self.folder / "summary.json").exists():
            raise InputError(
                f"run {args.run} is complete and has no checkpoint to go on from: choose another --run"
            )
        self.loader = TrainLoader(
            self.data,
            plan.config.seq_len,
            plan.batch // plan.config.seq_len,
            plan.rows,
            self.data_rank,
            plan.data_parallel,
            args.seed,
            self.runtime.device,
            position,
        )

    def _write_folder(self, compiles):
        if self.args.resume == "never":
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        for over in ("summary.json", "stopped"):  # a run that goes on is neither complete nor stopped
            (self.folder / over).unlink(missing_ok=True)
        self.tokenizer.save(self.folder / "tokenizer")
        options = {name: value for name, value in vars(self.args).items() if name not in OF_THE_LAUNCH}
        config = self.plan.config
        options |= {
            "total_batch_size": self.plan.batch,
            "max_seq_len": config.seq_len,
            "vocab_size": config.vocab_size,
        }
        options |= {"window_pattern": config.window_pattern, "dtype": self.runtime.dtype_name}
        settings = Settings(
            options=options,
            compile=compiles,
            rows=self.plan.rows,
            layout=layout_of(self.args, self.runtime),
            trained_on=self.trained_on,
            trained_with=trained_with(),
        )
        write_json(self.folder / "settings.json", asdict(settings))
        hf_export.write_config(self.folder, config)

    @property
    def data_rank(self) -> int:
        """This rank's number among those that see different rows: tensor-parallel ranks see the same."""
        return self.runtime.rank // self.args.tensor_parallel

    def evaluate(self, max_tokens: int | None) -> float:
        """Bits per byte of that many validation tokens, None: of all; printed and logged."""
        batches = validation_batches(
            self.data,
            self.plan.config.seq_len,
            self.plan.rows,
            self.data_rank,
            self.plan.data_parallel,
            self.runtime.device,
            max_tokens,
        )
        as_in_training = self.forward is not self.model  # compiled whole: then with the graph that is there
        value = bits_per_byte(self.forward, batches, self.token_bytes, as_in_training)
        whole_set = max_tokens is None or max_tokens >= shards.validation_tokens(self.data)
        self._log({"val_bpb": value, "whole_set": whole_set})
        extent = " (whole set)" if whole_set else ""
        print0(f"step {self.step:5d}/{self.plan.steps} | validation {value:.4f} bits per byte{extent}")
        return value

    def evaluate_core(self, most_items: int | None) -> dict:
        """What core.evaluate gives, of that many items of each task, None: all; printed, logged and in
        core.json.
        """
        results = core.evaluate(
            self.model,
            self.tokenizer,
            self.core_tasks,
            most_items,
            self.plan.rows * self.plan.config.seq_len,
            self.data_rank,
            self.plan.data_parallel,
        )
        if self.log:
            write_json(self.folder / "core.json", {**results, "step": self.step, "most_items": most_items})
        self._log({key: results[key] for key in ("core", "mean_centered")})
        return results

    def _log(self, figures):
        if self.log:
            self.log.log({"step": self.step, "tokens": self.step * self.plan.batch, **figures})

    def save(self, position: dict | None = None, is_last: bool = True) -> None:
        """Write a checkpoint. InputError if there is no room for the last one; training goes on without
        another.

        position: of the loader, if the rows of a step that could not be taken are to come again.
        """
        meta = Meta(self.step, self.skipped, Position(**(position or self.loader.state_dict())))
        if not isinstance(self.optimizer, MuonAdamW):  # which counts its steps in its state
            meta.groups = saved_groups(self.optimizer.param_groups)
        model, optimizer, keep_last = self.model, self.optimizer, self.args.keep_last
        try:
            checkpoint.save(self.folder, self.step, model, optimizer, asdict(meta), keep_last)
        except InputError as error:
            if is_last:
                raise
            print0(f"warning: {error}")

    def give_up(self, bad_steps: int) -> int:
        """Say where to go on from after that many losses that are not finite. Returns the exit code."""
        # A checkpoint is good if the step after it was
        good = [saved for saved in checkpoint.saved_steps(self.folder) if saved < self.step - bad_steps]
        last_good = (
            f"--resume step_{good[-1]} goes on from the last good checkpoint"
            if good
            else "no checkpoint is good"
        )
        print0(
            f"error: {bad_steps} losses in a row are not finite, or their gradients; {last_good}; "
            "--resume never starts over, at lower learning rates",
            file=sys.stderr,
        )
        return 1

    def finish(self) -> int:
        """Evaluate on the whole validation set, export, report. Returns the exit code: 1 if the model has
        diverged.
        """
        val_bpb = self.evaluate(None)
        if not math.isfinite(val_bpb):
            print0(
                f"error: run {self.args.run} has diverged, its validation loss is not finite: --resume step_N"
                " goes on from an earlier checkpoint, --resume never starts over, at lower learning rates",
                file=sys.stderr,
            )
            return 1
        core_results = self.evaluate_core(self.args.core_items) if self.core_tasks else None
        facts = {"step": self.step, "val_bpb": round(val_bpb, 4), "tokens": self.plan.tokens}
        facts["corpus"] = self.args.corpus
        hf_export.export(self.folder, self.model, self.plan.config, self.tokenizer, facts)
        if self.log is None:
            return 0
        self.log.close()
        rows, _ = report.read_metrics(self.folder / "metrics.jsonl")
        summary = report.summarize(rows, val_bpb, self.plan.steps, self.plan.tokens, self.runtime)
        summary["parameters"] = meta_model(self.plan.config).parameter_counts()["total"]
        core_report = None
        if core_results is not None:
            core_report = core.as_line(core_results), core_results["tasks"]
            for key, name in (("core", "core"), ("mean_centered", "core_mean_centered")):
                value = core_results[key]
                summary[name] = value if value is None else round(value, 4)
        elif self.args.core_bundle or self.args.core_every > 0:
            summary["core"] = None  # its bundle could not be had
        if self.mesh is not None:  # samples take the whole model, for which the pieces make room
            self.model = self.forward = self.optimizer = self.initial_groups = None
            gc.collect()
        prompts = PROMPTS.get(self.args.corpus, NO_PROMPTS)
        samples = sample_run(self.model, self.tokenizer, self.args.run, prompts, self.args.seed, self.runtime)
        report.write_report(self.folder, summary, samples, core_report)
        write_json(self.folder / "summary.json", summary)  # last: it marks the run as complete
        report.print_summary(summary)
        print0(f"report: {self.folder}/report.md, {self.folder}/loss.png")
        return 0


def open_core_tasks(args: argparse.Namespace, runtime: Runtime) -> list[core.Task]:
    """The tasks of CORE; none if it is not asked for, or if its bundle cannot be had."""
    bundle = args.core_bundle
    if bundle is None and args.core_every > 0:
        bundle = core.PUBLIC_BUNDLE
    if bundle is None:
        return []
    try:
        return first_rank_first(lambda: core.open_bundle(bundle), runtime)
    except core.Unreachable as error:
        print0(f"warning: {error}; the run goes on without CORE", file=sys.stderr)
        return []


def sample_run(
    model: torch.nn.Module | None,
    tokenizer: Tokenizer,
    run: str,
    prompts: list[str],
    seed: int,
    runtime: Runtime,
) -> list[str]:
    """Texts of the trained model; none if this device cannot hold it whole.

    model: None if it was trained in pieces; the exported one is then loaded.
    """
    try:
        if model is None:
            model, _, _ = hf_export.load_run(run, runtime)
        return sample_texts(model, tokenizer, prompts, max_tokens=128, seed=seed)
    except torch.OutOfMemoryError:
        print0(
            "no samples: the whole model does not fit into this device (scripts.sample on one where it does)"
        )
        return []


def build_optimizer(args, model, plan, runtime) -> tuple[torch.optim.Optimizer, object]:
    """The optimizer, and the schedule that moves its groups: the recipe's, or what the user's file has."""
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
        print0(f"running {args.optimizer_file}, SHA-256 {sha256_of(args.optimizer_file)}")
        build, own_schedule = recipe.load_recipe(args.optimizer_file)
        schedule = own_schedule or schedule
    settings = {"ns_dtype": runtime.compute_dtype}
    if runtime.world_size > 1:
        settings["comm_dtype"] = COMM_DTYPES[args.comm_dtype]
    return recipe.make_optimizer(
        build, model, plan.batch, plan.steps, runtime.world_size, **settings
    ), schedule


def saved_groups(groups: list[dict]) -> list[dict]:
    """The numbers and texts of each param group: some optimizers count and estimate there (Schedule-Free,
    Prodigy).
    """
    saved = []
    for group in groups:
        values = {}
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, bool | int | float | str):
                values[key] = value
        saved.append(values)
    return saved


def restore_groups(groups: list[dict], saved: list[dict]) -> None:
    """Put what saved_groups gave back into the param groups of an optimizer that was built anew."""
    for group, values in zip(groups, saved, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


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
        """Of the device. The host must have waited for something later than this moment."""
        if self.event is None:
            return 1000 * (self.seconds - earlier.seconds)
        return earlier.event.elapsed_time(self.event)
