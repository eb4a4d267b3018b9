"""The laboratory: contenders trained on one task, with the same seeds. scripts/optim_race.py drives it."""

import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from nanomuon import checkpoint
from nanomuon import report as run_report
from nanomuon.attention import use_flash_attention
from nanomuon.parallel import compile_model
from nanomuon.plan import choose_compilation
from nanomuon.recipe import switch_weights
from nanomuon.run import bits_per_byte
from nanomuon.runtime import InputError, parse_json, read_json, start, write_json
from nanomuon.settings import refuse_changes
from scripts.base_train import set_hyperparameters, training_step
from scripts.laboratory.contenders import Contender
from scripts.laboratory.report import score
from scripts.laboratory.tasks import as_text, batch_of, digest, open_data

DIGITS = 6  # of a loss in the file
FIRST_TUNING_SEED = 1000  # seeds that select the rates must not judge them
LENGTHS = (0.25, 0.5, 1.0)  # of trials in a sweep, relative to the race; each gets a third of the budget
SAVE_EVERY_S = 120  # a long run is saved, and prints its progress, this often


def train(setup, place, text, version, seed, folder):
    """Train the contender `text` with one seed, and return its result in JSON types. version: its digest when
    the race began; InputError if it has changed. folder: where the unfinished run is saved and resumed from.

    curve: pairs [step, loss on a part of the validation set]; score: the final loss on all of it, None if the
    run diverged; step_ms and optimizer_ms: medians.
    """
    contender, steps, device = Contender(text), setup["steps"], start().device
    if contender.version() != version:
        raise InputError("its file or the model's has changed since the race began: start the race again")
    torch.manual_seed(seed)
    model = contender.initial_model(setup, device, seed)
    use_flash_attention(device, model.compute_dtype)
    optimizer, built = contender.prepare(model, setup)
    compiles = choose_compilation(device, steps * batch_of(setup))
    forward = compile_model(model, None) if compiles else model
    training, validation, token_bytes = open_data(setup, place, seed, device)
    part = validation[:: max(1, len(validation) // setup["eval_batches"])]
    first, curve = resume(folder, model, optimizer)
    for _ in range(first):
        next(training)  # rows that it has seen
    step_ms, optimizer_ms, saved_at = [], [], time.monotonic()

    def loss(batches):
        switch_weights(optimizer, "eval")  # swaps in the weights to evaluate
        value = bits_per_byte(forward, batches, token_bytes)
        switch_weights(optimizer, "train")
        if setup["unit"].startswith("nats"):
            value *= math.log(2)
        return round(value, DIGITS) if math.isfinite(value) else None

    for step in range(first, steps):
        if step % setup["eval_every"] == 0:
            is_due = time.monotonic() - saved_at > SAVE_EVERY_S
            if is_due:
                save(folder, step, model, optimizer, curve)
            curve.append((step, loss(part)))
            if is_due:
                print(f"{text} seed {seed}: step {step}/{steps}, {curve[-1][1]} {setup['unit']}", flush=True)
                saved_at = time.monotonic()
        torch.manual_seed(seed + step)  # so that an optimizer draws the same numbers after a resume
        set_hyperparameters(optimizer, contender.schedule, built, step, steps)
        done = training_step(model, forward, optimizer, training, 1)
        step_ms.append(done.milliseconds)
        optimizer_ms.append(done.optimizer_ms)
    curve.append((steps, loss(part)))
    return {
        "contender": text,
        "seed": seed,
        "steps": steps,
        "score": None if done.skipped else loss(validation),  # skipped: its losses are no longer finite
        "curve": curve,
        "step_ms": round(statistics.median(step_ms), 2),
        "optimizer_ms": round(statistics.median(optimizer_ms), 2),
        "sha256": contender.sha256,
        "machine": run_report.machine_description(),
    }


def save(folder, step, model, optimizer, curve):
    """Save an unfinished run, with its curve until now."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "curve.json", {"points": curve})
        checkpoint.save(folder, step, model, optimizer, {}, keep_last=1)
    except (InputError, OSError) as error:  # an optimizer's state that no checkpoint can hold; a full disk
        print(f"warning: not saved; an interruption loses the steps since the last save: {error}", flush=True)


def resume(folder, model, optimizer):
    """(steps done, curve until then) of an unfinished run, which it loads, or of a new one."""
    steps = checkpoint.saved_steps(folder)
    if not steps:
        return 0, []
    try:
        checkpoint.load(folder / "checkpoints" / f"step_{steps[-1]}", model, optimizer)
        points = read_json(folder / "curve.json")["points"]
    except InputError as error:
        raise InputError(f"{error}; remove {folder} to start this run again") from error
    # A kill between the two files of save() leaves a curve that is longer than the checkpoint's
    return steps[-1], [point for point in points if point[0] < steps[-1]]


@dataclass
class Header:
    """The first line of a race's file."""

    setup: dict


@dataclass
class Result:
    """The fields that are read from a finished run, see train()."""

    contender: str
    seed: int
    steps: int
    score: float | None
    curve: list[list[float | None]]
    step_ms: float
    optimizer_ms: float


def read_results(file):
    """(setup, runs) of a race's file. Its first line is the setup, every other line a run."""
    lines = file.read_bytes().rpartition(b"\n")[0]  # without half a line, as a full disk leaves it
    if not lines:
        raise InputError(f"{file} has no complete line: remove it")
    first, _, others = lines.partition(b"\n")
    try:
        header = parse_json(first, Header)
    except ValueError as error:
        raise InputError(
            f"{file} line 1, the setup of the race, cannot be read ({error}): restore it, or choose another "
            "--name"
        ) from error
    return header.setup, run_report.parse_lines(file, others, Result, first=2)


def identity(run):
    """(contender, digest of what it is, seed, steps): a race trains each once. Old runs have no digest."""
    return run["contender"], run.get("key"), run["seed"], run["steps"]


class Race:
    """Contenders on one task. file: where finished runs go, with unfinished ones beside it; setup, place: see
    tasks; jobs: runs at a time.
    """

    def __init__(self, file, setup, place, jobs):
        self.file, self.setup, self.place, self.jobs = file, setup, place, jobs
        self.runs = {}  # {identity: the newest such run}
        if not file.exists():
            self.append({"setup": setup})
            return
        before, runs = read_results(file)
        self.runs = {identity(run): run for run in runs}
        os.truncate(file, file.read_bytes().rindex(b"\n") + 1)
        refuse_changes(f"race {file} was run with", before, setup, "choose another --name")

    def append(self, line):
        with open(self.file, "a", encoding="utf-8") as output:
            output.write(json.dumps(line, default=as_text) + "\n")

    def sweep(self, contenders, budget):
        """The best trial of each contender, by successive halving (arXiv 1502.07943).

        Many trials run for a quarter of the race's length, the best of them again for half the length, and
        the best of those for the full length, each with a schedule of that length.
        """
        for contender in contenders:
            dials = [f"{key} {low:.3g} to {high:.3g}" for key, (low, high) in contender.dials().items()]
            print(f"tuning {contender.name}: {', '.join(dials)}", flush=True)
        alive = [contender.trials(int(budget / len(LENGTHS) / LENGTHS[0])) for contender in contenders]
        for rung, length in enumerate(LENGTHS):
            count = int(budget / len(LENGTHS) / length)
            alive = [trials[:count] for trials in alive]
            steps = math.ceil(length * self.setup["steps"])
            print(f"tuning: trials of {steps} steps, for each contender: {count}", flush=True)
            found = self.train(itertools.chain(*alive), [FIRST_TUNING_SEED + rung], steps)
            for trials in alive:
                trials.sort(key=lambda trial: score(found[trial.name][0]))  # stable: ties keep their order
        return [trials[0] for trials in alive]

    def train(self, contenders, seeds, steps):
        """{name: its runs, one per seed}. Trains those that are not in the file."""
        setup = self.setup | {"steps": steps}
        contenders = {contender.name: contender for contender in contenders}
        versions = {name: contender.version() for name, contender in contenders.items()}
        keys = {name: contender.key(setup) for name, contender in contenders.items()}
        pending = []
        for seed in seeds:
            for name, key in keys.items():
                if (name, key, seed, steps) not in self.runs:
                    pending.append((name, versions[name], seed, self.unfinished(name, key, seed, steps)))
        runs = len(keys) * len(seeds)
        if len(pending) < runs:
            print(f"{runs - len(pending)} of {runs} runs are already done", flush=True)
        began = time.monotonic()
        for number, run in enumerate(self.trained(setup, pending), 1):
            run = {"key": keys[run["contender"]], **run}
            self.runs[identity(run)] = run
            self.append(run)
            shutil.rmtree(self.unfinished(*identity(run)), ignore_errors=True)
            final = "diverged" if run["score"] is None else f"{run['score']:.4f}"
            each = (time.monotonic() - began) / max(number, self.jobs)
            print(
                f"[{number}/{len(pending)}] {run['contender']} seed {run['seed']}: {final}, "
                f"{run['step_ms']:.0f} ms per step, optimizer {run['optimizer_ms']:.1f}, "
                f"about {each * (len(pending) - number) / 60:.0f} min left of these {len(pending)}",
                flush=True,
            )
        found = {}
        for name, key in keys.items():
            found[name] = [self.runs[name, key, seed, steps] for seed in seeds]
        return found

    def unfinished(self, *run):
        """The folder in which this run, as identity() has it, saves itself until it is finished."""
        return self.file.parent / "unfinished" / digest(run)

    def trained(self, setup, pending):
        """Yield the results of these (name, version, seed, folder) as they finish.

        Each run has a process of its own, with one thread or GPU: what a contender's file changes in torch or
        in this library must not reach other runs.
        """
        context = multiprocessing.get_context("spawn")
        pending, running = list(pending), {}
        free = list(range(min(self.jobs, len(pending))))
        try:
            while pending or running:
                while pending and free:
                    name, version, seed, folder = pending.pop(0)
                    index = free.pop(0)
                    process = ProcessPoolExecutor(1, context, start_worker, (index,))
                    future = process.submit(train, setup, self.place, name, version, seed, folder)
                    running[future] = name, index, process
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name, index, process = running.pop(future)
                    process.shutdown()
                    free.append(index)
                    if error := future.exception():
                        if isinstance(error, InputError):
                            raise InputError(f"contender {name}: {error}") from error
                        print(f"contender {name} failed:", file=sys.stderr)
                    yield future.result()
        except BrokenProcessPool as error:
            raise InputError(
                "a process of the race was killed, perhaps because memory ran out: fewer --jobs need less. "
                "Finished runs are saved, and the same command continues the race"
            ) from error
        finally:  # told to stop, or a run has failed: finished runs are in the file
            for worker in multiprocessing.active_children():
                worker.kill()


def start_worker(index):
    """Give this process one thread, and a GPU if there is one. It ignores Ctrl-C and ends with its parent.
    index: its number among those that run at a time.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = str(index % torch.cuda.device_count())


def end_with_parent():
    """Exit with the parent. The workers of a killed parent would otherwise wait forever and hold memory."""
    multiprocessing.parent_process().join()
    os._exit(1)
