"""A training run: what is trained, with what, and how far it is; its evaluations, its end.

It begins in launch.py; the loop that trains it is in scripts/base_train.py.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nanomuon import checkpoint, core, export, hf_export, provenance, report, run_folder, shards
from nanomuon.compilation import compile_model, decide_compilation
from nanomuon.core_bundle import Task
from nanomuon.dataloader import TrainLoader, validation_batches
from nanomuon.evaluate import bits_per_byte
from nanomuon.files import write_json
from nanomuon.finished_run import sample_run, summarize, write_results
from nanomuon.gpt import GPT
from nanomuon.optim import MuonAdamW
from nanomuon.planning import Plan
from nanomuon.read_json import read_json
from nanomuon.runtime import InputError, Runtime, print0
from nanomuon.tokenizer import Tokenizer


@dataclass
class Run:
    """The same on all ranks, but for the rows of the loader. All ranks call its methods together."""

    args: argparse.Namespace
    runtime: Runtime
    plan: Plan
    folder: Path  # runs/NAME
    data: Path  # shards and their tokenizer
    tokenizer: Tokenizer  # that of the shards
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
    log: report.MetricsLog | None  # on the first rank
    evaluations: dict[int, dict]  # by step: rows of metrics.jsonl that earlier launches wrote
    core_tasks: list[Task]  # empty where CORE is not evaluated
    core_steps: set[int]  # at which earlier launches evaluated it
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
            self.tokenizer,
            self.core_tasks,
            most_items,
            self.plan.rows * self.plan.config.seq_len,
            data_rank(self.args, self.runtime),
            self.plan.data_parallel,
            in_pieces=self.mesh is not None,
        )
        if self.log:
            write_json(self.folder / "core.json", {**results, "step": self.step, "most_items": most_items})
            row = {"step": self.step, "tokens": self.step * self.plan.batch, "core": results["core"]}
            row |= {"mean_centered": results["mean_centered"], "core_tasks": len(results["tasks"])}
            self.log.log(row)
        return results

    def save(self, position: dict | None = None, is_last: bool = True) -> None:
        """Write a checkpoint. InputError if there is no room for the last one; training goes on without
        another.

        position: of the loader, if the rows of a step that could not be taken are to come again.
        """
        if self.log:
            self.log.flush()  # a checkpoint must not get ahead of its rows
        meta = {
            "step": self.step,
            "skipped_steps": self.skipped,
            "loader": position or self.loader.state_dict(),
            "settings": self.defined,
        }
        if not isinstance(self.optimizer, MuonAdamW):  # which counts its steps in its state
            meta["groups"] = written_into(self.optimizer.param_groups, self.initial_groups)
        try:
            checkpoint.save(self.folder, self.step, self.model, self.optimizer, meta, self.args.keep_last)
        except InputError as error:
            if is_last:
                raise
            print0(f"warning: {error}")

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


def written_into(groups: list[dict], initial_groups: list[dict]) -> list[dict]:
    """Of each param group what the optimizer has written into it since it was built, of JSON types: some keep
    counts and estimates there (Schedule-Free, Prodigy).
    """
    of_groups = []
    for group, initial in zip(groups, initial_groups, strict=True):
        written = {}
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                written[key] = value.item()
            elif isinstance(value, bool | int | float | str) and value != initial.get(key):
                written[key] = value
        of_groups.append(written)
    return of_groups


def data_rank(args: argparse.Namespace, runtime: Runtime) -> int:
    """This rank's number among those that see different rows: tensor-parallel ranks see the same."""
    return runtime.rank // args.tensor_parallel


def give_up(run: Run, bad_steps: int) -> int:
    """Say where to go on from after so many losses or gradients in a row that are not finite: exit code 1."""
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
        results = read_json(file, core.RESULTS)
        # Not of another step, from before a --resume, and not of the few items of an evaluation on the way
        if (results.get("step"), results.get("most_items", 0)) == (run.step, run.args.core_items):
            return results
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
        run.model = run.forward = run.optimizer = run.initial_groups = None
        gc.collect()
    samples = sample_run(run.model, run.tokenizer, run.args, run.runtime)
    seconds = {
        "training": summary["seconds"],
        **evaluation_seconds,
        "samples": time.perf_counter() - began,
    }
    options = {
        **vars(run.args),
        "device_batch_size": run.plan.rows,
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
