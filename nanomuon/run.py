"""A training run: start, resume, save, evaluate, finish.

scripts/base_train.py takes it through these phases:

    phase    where                       what happens
    flags    settings.parse_with_record  those that are not given take the values in settings.json
    ranks    runtime.start               device and process group; all ranks must have equal flags
    size     plan.make_plan              model, batch, steps, micro-batch
    lock     base_train.main             on rank 0: no other launch may use the run's folder
    data     Run._prepare_data           tokenizer and shards of the corpus (shards.py), unless they exist
    model    Run._build                  model (parallel.py), optimizer and schedule (recipe.py)
    restore  Run._restore                weights, optimizer and position of a checkpoint, if there is one
    rows     Run.__init__                a TrainLoader that begins at this position
    record   Run._write_folder           on rank 0: settings.json, config.json, tokenizer; with
                                         --resume never it first empties the folder
    log      Run.__init__                metrics.jsonl; removes later checkpoints; compiles the model
    loop     base_train.train            evaluate, step, log, save
    end      Run.finish                  the whole validation set, export, samples, report, summary.json
"""

import argparse
import contextlib
import functools
import math
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nanomuon import checkpoint, core, hf_export, parallel, recipe, report, shards
from nanomuon.corpus import ENOUGH, open_corpus
from nanomuon.dataloader import TrainLoader, validation_batches, validation_rows
from nanomuon.generate import sample_texts
from nanomuon.optim import MuonAdamW
from nanomuon.plan import Plan, choose_compilation, print_plan
from nanomuon.qk_clip import watch_
from nanomuon.runtime import (
    InputError,
    Runtime,
    first_rank_first,
    folder_of,
    on_first_rank,
    print0,
    read_json,
    remove_unfinished,
    write_json,
)
from nanomuon.settings import Settings, flag_of, recorded, refuse_changes, require_same_on_ranks, sha256_of
from nanomuon.tokenizer import Tokenizer
from nanomuon.trained import model_sources, warn_of_changed_sources

MOST_PASSES = 3  # over the text; after that the validation loss rises again (docs/data.md)
PROMPTS = {"python": ["import os\n", "def main():\n", "class Stack:\n", "    for i in range("]}


@dataclass
class Summary:
    """The fields of summary.json that are read. A run writes it last."""

    steps: int
    tokens: int
    val_bpb: float


class Run:
    """A training run, from its folder to its report. Every rank has one, and all ranks must call its methods.
    `metrics` is None except on the first rank.

    forward: the model, compiled or eager: (inputs, targets) -> mean loss. schedule: (initial group, step,
    steps) -> values of the group at this step. initial_groups: the param groups as they were built. mesh:
    that of cut parameters, or None. step: steps done; skipped: those without an update, because a loss or
    gradient was not finite.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        plan: Plan,
        runtime: Runtime,
        settings: Settings | None,
        wandb=None,
        stops_waiting=lambda: False,
    ):
        """Start or resume the run. settings: those that it has recorded, None for a new run. wandb: the first
        rank's run at Weights & Biases, if there is one. stops_waiting: whether the user has asked to stop,
        for the loader, which may wait for data.
        """
        self.args, self.plan, self.runtime = args, plan, runtime
        self.folder = folder_of(args.run)
        self.core_tasks = open_core_tasks(args)
        if settings:
            warn_of_changed_sources(args.run, settings.trained_with)
        self.trained_on = first_rank_first(lambda: self._prepare_data(settings))
        require_same_on_ranks(  # the last two may follow from a rank's GPU
            {
                "--corpus": self.trained_on["shards"],
                "--device-batch-size": plan.rows,
                "--dtype": runtime.dtype_name,
            }
        )
        self.token_bytes = torch.from_numpy(self.tokenizer.token_bytes).to(runtime.device)
        compiles = not args.no_compile and choose_compilation(runtime.device, plan.tokens)

        found = checkpoint.find(self.folder, args.resume)
        if not found and args.resume == "auto" and (self.folder / "summary.json").exists():
            raise InputError(
                f"run {args.run} is complete and has no checkpoint to resume from: choose another --run, or "
                "start over: --resume never"
            )
        self._build(compiles)
        position = self._restore(found)
        self.loader = TrainLoader(
            self.data,
            plan.config.seq_len,
            rows_per_step=plan.batch // plan.config.seq_len,
            device_batch_size=plan.rows,
            rank=self.data_rank,
            world_size=plan.data_parallel,
            seed=args.seed,
            device=runtime.device,
            state=position,
            stops_waiting=stops_waiting,
        )
        self.metrics = None
        if runtime.rank == 0:
            if found:  # to report a damaged line before the folder is touched
                report.read_rows(self.folder / "metrics.jsonl")
            wandb_id = wandb.id if wandb else settings and settings.wandb_id
            self._write_folder(wandb_id)
            resume_step = self.step if found else None
            goes_on = self.step < self.plan.steps
            self.metrics = report.MetricsLog(self.folder, resume_step, wandb, goes_on)
        # Remove those after the step that it resumes from, and what killed processes have left
        checkpoint.remove(self.folder, self.step, args.keep_last)
        self._announce(settings)
        self.forward = self.model
        if compiles:
            self.forward = parallel.compile_model(self.model, self.mesh)
            print0("compiling: the first step takes a minute or two (--no-compile starts at once)")

    def _prepare_data(self, settings):
        """Set data, validation, tokenizer, text_field. Returns `trained_on`; InputError if the tokenizer has
        changed.
        """
        args, file = self.args, self.args.optimizer_file
        corpus = open_corpus(args.corpus, args.text_field, args.skip_unreadable)
        self.text_field = corpus.text_field
        trained_on = {"corpus": args.corpus, "revision": corpus.revision, "shards": corpus.slug}
        self.data = shards.shards_for_training(corpus, self.plan.config.vocab_size)
        # In memory, so that a deleted file cannot end an evaluation
        self.validation = validation_rows(self.data, self.plan.config.seq_len)
        self.tokenizer = Tokenizer.load(self.data / "tokenizer")
        trained_on["tokenizer"] = self.tokenizer.hash
        if settings:
            refuse_changes(
                f"run {args.run} exists with", settings.trained_on, {"tokenizer": self.tokenizer.hash}
            )
        return trained_on | {"optimizer_file": file, "optimizer_file_sha256": sha256_of(file)}

    def _build(self, compiles):
        """Model, optimizer, schedule."""
        args, plan, runtime = self.args, self.plan, self.runtime
        self.mesh = None
        if runtime.world_size > 1 and (args.shard == "fsdp" or args.tensor_parallel > 1):
            self.mesh = parallel.device_mesh(runtime.device.type, plan.data_parallel, args.tensor_parallel)
        self.model = parallel.build_model(plan.config, runtime, args.seed, self.mesh, args.shard == "fsdp")
        if args.qk_clip:
            watch_(self.model, args.qk_clip)
        self.optimizer, self.schedule = build_optimizer(args, self.model, plan, runtime, compiles)
        recipe.switch_weights(self.optimizer, "train")
        if frozen := recipe.untrained(self.model, self.optimizer):
            names = ", ".join(frozen[:8])
            print0(f"warning: {len(frozen)} parameters are in no group and are not trained: {names}, ...")
        self.initial_groups = [dict(group) for group in self.optimizer.param_groups]
        if args.optimizer_file:  # check all steps now: an error at a late one would cost those before it
            for _ in recipe.values_at_every_step(self.schedule, self.initial_groups, plan.steps):
                pass
        self.group_lines = recipe.describe(self.initial_groups, self.schedule, plan.steps)
        if not args.optimizer_file:  # a file may scale by its own rules
            self.group_lines.append(recipe.describe_scales(plan.batch, plan.steps, plan.config.width))

    def _restore(self, found: Path | None) -> dict | None:
        """Load a checkpoint, if there is one. Returns the loader's position in it."""
        self.step = self.skipped = 0
        if found is None:
            return None
        meta = checkpoint.load(found, self.model, self.optimizer)
        if lacking := {"step", "skipped_steps", "epoch", "window", "row"} - meta.keys():
            raise InputError(
                f"{found}/manifest.json: meta has no {', '.join(lacking)}: use another checkpoint"
            )
        if not all(0 <= number < 1 << 63 for number in meta.values()):
            raise InputError(f"{found}/manifest.json: meta has impossible numbers: use another checkpoint")
        self.step, self.skipped = meta["step"], meta["skipped_steps"]
        if isinstance(self.optimizer, MuonAdamW):
            self.optimizer.skipped_steps.fill_(self.skipped)
        if self.step > self.plan.steps:  # its rates have not fallen: it would end as a half-trained model
            raise InputError(
                f"run {self.args.run} has done {self.step} steps, and this command wants {self.plan.steps}: "
                "give a larger --num-iterations or an earlier checkpoint (--resume step_N), or start over: "
                "--resume never"
            )
        print0(f"resuming run {self.args.run} at step {self.step} of {self.plan.steps}")
        return meta

    def _write_folder(self, wandb_id):
        folder = self.folder.resolve()  # it may be a link, which rmtree does not follow
        if self.args.resume == "never":
            if folder.exists():
                print0(f"starting over: deleting everything in the folder of run {folder.name}")
            # Checkpoints first: neither a kill nor a file that cannot be deleted may leave any without the
            # settings that they belong to
            if (folder / "checkpoints").is_dir() and not (folder / "checkpoints").is_symlink():
                shutil.rmtree(folder / "checkpoints")
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        for outdated in ("summary.json", "stopped"):  # a running run is neither complete nor stopped
            (self.folder / outdated).unlink(missing_ok=True)
        remove_unfinished(folder)
        self.tokenizer.save(self.folder / "tokenizer")
        config = self.plan.config
        chosen = {
            "total_batch_size": self.plan.batch,
            "max_seq_len": config.seq_len,
            "vocab_size": config.vocab_size,
            "window_pattern": config.window_pattern,
            "text_field": self.text_field,
            "dtype": self.runtime.dtype_name,
        }
        settings = Settings(
            options=recorded(self.args) | chosen,
            rows=self.plan.rows,
            world_size=self.runtime.world_size,
            layout=asdict(self.plan.layout),
            trained_on=self.trained_on,
            trained_with=trained_with(),
            groups=self.group_lines,
            steps=self.plan.steps,
            wandb_id=wandb_id,
        )
        write_json(self.folder / "settings.json", asdict(settings))
        hf_export.write_config(self.folder, config)

    def _announce(self, settings):
        """Print what is about to be trained, where, and on how much text."""
        before = settings and settings.steps
        if before and before != self.plan.steps:
            print0(f"length     {self.plan.steps} steps, {before} before: the rates follow the new length")
        elif settings and settings.groups and settings.groups != self.group_lines:
            print0("warning: the recipe has changed since the last launch, whose param groups were:")
            print0("\n".join(settings.groups))
        print_plan(self.plan, self.runtime)
        ranks, layout = self.runtime.world_size, asdict(self.plan.layout)
        if ranks > 1 and settings and settings.layout and settings.layout | {"ranks": ranks} != layout:
            print0(
                f"warning: the last launch divided the model otherwise, {settings.layout}; --shard and "
                "--tensor-parallel are not recorded, so give them again"
            )
        every = self.args.save_every
        when = f"every {every} steps" if every > 0 else "at the end"
        print0(f"run        {self.folder}, checkpoint {when}")
        print0("\n".join(self.group_lines))
        manifest = self.loader.manifest
        if manifest.complete_to is None:  # data_prep is still writing
            return
        text = shards.count_tokens(manifest.train)
        passes = self.plan.tokens / text
        extent = f"of which it reads {100 * passes:.2g}%"
        if passes > 1:
            extent = f"each read about {passes:.2g} times"
        print0(f"data       {text:,} tokens, {extent}")
        if manifest.unreadable:
            print0(f"left out   {manifest.unreadable}")
        documents = sum(entry.documents for entry in manifest.val)
        if documents < ENOUGH:
            print0(
                f"warning: only {documents} validation documents, {shards.count_tokens(manifest.val):,} "
                "tokens: their bits per byte say little; add text, or divide it into more documents"
            )
        if passes > MOST_PASSES:
            print0("warning: a text this small is memorized after two or three passes: train fewer steps")

    @property
    def data_rank(self) -> int:
        """This rank's number among those that see different rows. Tensor-parallel ranks see the same rows."""
        return self.runtime.rank // self.args.tensor_parallel

    def evaluate(self, max_tokens: int | None) -> float:
        """Bits per byte on that many validation tokens, None for all. Prints and logs it."""
        batches = validation_batches(
            self.validation,
            self.plan.rows,
            self.data_rank,
            self.plan.data_parallel,
            self.runtime.device,
            max_tokens,
        )
        as_in_training = self.forward is not self.model  # if the model is compiled as a whole, use that graph
        value = bits_per_byte(self.forward, batches, self.token_bytes, as_in_training)
        whole_set = max_tokens is None
        self.log({"val_bpb": value, "whole_set": whole_set})
        extent = " (whole set)" if whole_set else ""
        print0(f"step {self.step:5d}/{self.plan.steps} | validation {value:.4f} bits per byte{extent}")
        return value

    def evaluate_core(self, most_items: int | None) -> dict:
        """What core.evaluate returns for that many items per task, None for all. Prints and logs it, and
        writes core.json.
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
        if self.metrics:
            write_json(self.folder / "core.json", {**results, "step": self.step, "most_items": most_items})
        self.log({key: results[key] for key in ("core", "mean_centered")})
        return results

    def log(self, figures: dict) -> None:
        """Add a line to metrics.jsonl, on the first rank."""
        if self.metrics:
            self.metrics.log({"step": self.step, "tokens": self.step * self.plan.batch, **figures})

    def save(self, position: dict | None = None, must_succeed: bool = True) -> None:
        """Write a checkpoint. If the disk is full or not writable: InputError if it must succeed, else a
        warning, and training continues.

        position: the loader's, to repeat the rows of a step that could not be taken.
        """
        meta = {"step": self.step, "skipped_steps": self.skipped}
        meta |= position or self.loader.state_dict()
        try:
            checkpoint.save(self.folder, self.step, self.model, self.optimizer, meta, self.args.keep_last)
        except checkpoint.NotWritten as error:
            if must_succeed:
                raise
            print0(f"warning: {error}")

    def diverged(self, why: str, bad_steps: int = 0) -> int:
        """Print why the run has diverged, and the checkpoint to resume from. It is from before the last good
        step, whose update may have caused the bad ones. Returns the exit code.
        """
        earlier = [step for step in checkpoint.saved_steps(self.folder) if step < self.step - bad_steps]
        advice = ""
        if earlier:
            advice = f"if the hardware failed, --resume step_{earlier[-1]} goes on from there; otherwise "
        print0(
            f"error: {why}; {advice}start over with lower rates, or a corrected rule: --resume never",
            file=sys.stderr,
        )
        return 1

    def finish(self) -> int:
        """Evaluate on the whole validation set, export, and write the report. Returns the exit code: 1 if the
        model has diverged.
        """
        args = self.args
        recipe.switch_weights(self.optimizer, "eval")
        val_bpb = self.evaluate(None)
        if not math.isfinite(val_bpb):
            return self.diverged(f"run {args.run} has diverged: its validation loss is not finite")
        hf_export.export(self.folder, self.model, self.tokenizer)
        core_results = self.evaluate_core(args.core_items) if self.core_tasks else None
        with torch.compiler.set_stance("force_eager"):  # the shapes of samples were not compiled
            prompts = PROMPTS.get(args.corpus, [""] * 3)
            samples = sample_texts(self.model, self.tokenizer, prompts, max_tokens=64, seed=args.seed)
        # The other ranks wait: scripts.scaling reads summary.json next
        on_first_rank(lambda: self._write_results(val_bpb, core_results, samples))
        return 0

    def _write_results(self, val_bpb, core_results, samples):
        """Write the report and summary.json, and print them."""
        plan = self.plan
        rows, _ = report.read_metrics(self.folder / "metrics.jsonl")
        summary = report.summarize(rows, val_bpb, plan.steps, plan.tokens, self.runtime)
        summary["parameters"] = sum(p.numel() for p in self.model.parameters())
        if core_results:
            summary["core"] = core_results["core"]
            summary["core_mean_centered"] = core_results["mean_centered"]
        config = plan.config
        about = (
            f"Depth {config.depth}, context {config.seq_len}, vocabulary {config.vocab_size}, "
            f"{plan.batch} tokens per step, {self.runtime.dtype_name}; texts: {self.args.corpus}, "
            f"{shards.count_tokens(self.loader.manifest.train):,} training tokens"
        )
        report.write_report(self.folder, about, summary, samples, core_results)
        write_json(self.folder / "summary.json", summary)  # last: it marks the run as complete
        report.print_summary(summary)
        print0(f"report: {self.folder}/report.md, {self.folder}/loss.png")


def bits_per_byte(
    model: torch.nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    token_bytes: Tensor,
    as_in_training: bool = False,
) -> float:
    """Cross-entropy of the text in bits, divided by its UTF-8 bytes, which makes models with different
    vocabularies comparable.

    model(inputs, targets) returns the mean loss in nats over the targets that are not -1. batches yields
    (inputs, targets), each (B, T) int64; targets of -1 are not scored. token_bytes (V,): the number of bytes
    of each token; special tokens have none and are not scored. Every rank passes its share of the batches and
    gets the figure for all of them. Waits for the device once, at the end.

    as_in_training: run the forward pass with gradients, which a compiled model has already compiled. Without
    gradients it would compile another graph, which costs more than it saves (docs/log.md). It takes the
    memory of a training step's forward pass.
    """
    # Training's forward pass also records the largest logits; evaluation must not
    before = [buffer.clone() for buffer in model.buffers()] if as_in_training else []
    sums = torch.zeros(2, dtype=torch.float64, device=token_bytes.device)  # nats, bytes
    # Not inference_mode: training also uses what FSDP2 gathers here
    with torch.set_grad_enabled(as_in_training):
        for inputs, targets in batches:
            lengths = torch.where(targets < 0, 0, token_bytes[targets])  # (B, T) bytes
            scored = lengths > 0
            mean = model(inputs, torch.where(scored, targets, -1)).detach()  # NaN if nothing is scored
            count = scored.sum()
            sums[0] += torch.where(count > 0, mean.double() * count, 0)
            sums[1] += lengths.sum()
    if as_in_training:
        for buffer, values in zip(model.buffers(), before, strict=True):
            buffer.copy_(values)
    if dist.is_initialized():
        dist.all_reduce(sums)
    nats, size = sums.tolist()
    return nats / (math.log(2) * size)


def refuse_other_texts(args: argparse.Namespace, trained_on: dict) -> None:
    """InputError if the corpus has other texts than those that the run has recorded (trained_on)."""
    corpus = open_corpus(args.corpus, args.text_field, args.skip_unreadable)
    before = str(trained_on.get("corpus"))
    if corpus.differs(before, str(trained_on.get("revision"))):
        raise InputError(
            f"run {args.run} was trained on {before}, and {corpus.name} now has other texts: give the "
            "--corpus that has its texts, restore them, choose another --run, or start over: --resume never"
        )


def read_summary(file: Path) -> Summary:
    """A run's summary.json; InputError if it is damaged."""
    return read_json(file, Summary, "delete it, and the run writes it again")


def report_if_complete(folder: Path, steps: int) -> bool:
    """Whether a run of this many steps is complete. If so, prints its summary."""
    file = folder / "summary.json"
    done = -1
    if file.exists():
        done = read_summary(file).steps
    if done < steps:
        return False
    print0(
        f"run {folder.name} is complete with {done} steps: {folder}/report.md (to train longer: a larger "
        "--num-iterations; to evaluate it again: scripts.base_eval; to start over: --resume never)"
    )
    report.print_summary(read_json(file))
    return True


def open_core_tasks(args: argparse.Namespace) -> list[core.Task]:
    """The tasks of CORE; none if they are not requested, or if the bundle cannot be fetched."""
    if args.core_bundle is None:
        return []
    try:
        return first_rank_first(lambda: core.open_bundle(args.core_bundle))
    except core.Unreachable as error:
        print0(f"warning: {error}; the run goes on without CORE", file=sys.stderr)
        return []


def trained_with() -> dict:
    """Versions, hashes of the model's code, and the commit if this is a checkout."""
    known = {"python": platform.python_version(), "torch": torch.__version__, "model": model_sources()}
    checkout = Path(__file__).parents[1]
    if (checkout / ".git").exists():  # else git would search the folders above, and find another project
        command = ["git", "-C", checkout, "describe", "--always", "--dirty"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            known["commit"] = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    return known


def build_optimizer(args, model, plan, runtime, compiles) -> tuple[torch.optim.Optimizer, object]:
    """The optimizer, and the schedule of its groups: the recipe's, or those of the user's file."""
    build, schedule = recipe.param_groups, recipe.schedule
    if args.optimizer_file:
        print0(f"running {args.optimizer_file}, SHA-256 {sha256_of(args.optimizer_file)}")
        build, schedule, names = recipe.load_recipe(args.optimizer_file)
        if "model" in names:
            raise InputError(
                f"{args.optimizer_file} defines a model, which only races train; a run trains the one in "
                "nanomuon/gpt.py: change it there"
            )
    recipe.check_call(schedule, "group", "step", "steps")
    without_effect = {}  # hyperparameters of functions that the file replaces
    if build is recipe.param_groups:
        build = functools.partial(build, **{name: getattr(args, name) for name in recipe.RATES})
    else:
        without_effect |= recipe.RATES
    if schedule is recipe.schedule:
        schedule = functools.partial(schedule, **{name: getattr(args, name) for name in recipe.SCHEDULE})
    else:
        without_effect |= recipe.SCHEDULE
    if given := [
        flag_of(name) for name, each in without_effect.items() if getattr(args, name) != each.default
    ]:
        raise InputError(
            f"{', '.join(given)}: {args.optimizer_file} replaces what this sets, so leave the flag out and "
            "set it in the file (a run that has recorded the flag starts over with --resume never)"
        )
    keywords = {"ns_dtype": runtime.compute_dtype, "compile": compiles}
    if runtime.world_size > 1 and args.comm_dtype != "auto":
        keywords["comm_dtype"] = getattr(torch, args.comm_dtype)
    optimizer = recipe.make_optimizer(build, model, plan.batch, plan.steps, runtime.world_size, **keywords)
    return optimizer, schedule
