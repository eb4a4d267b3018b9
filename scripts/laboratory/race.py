"""The laboratory: contenders trained on one task, with the same seeds. scripts/optim_race.py drives it."""

import hashlib
import json
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from nanomuon import report as run_report
from nanomuon.evaluate import bits_per_byte
from nanomuon.parallel import compile_model
from nanomuon.recipe import switch, values_at
from nanomuon.runtime import InputError, compile_enabled, start
from scripts.laboratory import significance
from scripts.laboratory.contenders import Contender
from scripts.laboratory.report import score
from scripts.laboratory.tasks import as_text, digest, empty_model, open_data

DIGITS = 6  # of a loss in the file
FIRST_TUNING_SEED = 1000  # seeds that chose the rates must not judge them
LENGTHS = (0.25, 0.5, 1.0)  # of trials in a sweep, relative to the race; each gets a third of the budget


def train(setup, place, text, seed):
    """Train the contender `text` with one seed and return its result, of JSON types.

    curve: [step, loss on a part of the validation set, loss on all of it or null]; score: the last of these;
    step_ms and optimizer_ms: medians; initial, rows: digests of the initial parameters and of every row
    trained on; sha256: of the contender's file.
    """
    run = Run(setup, place, Contender(text), seed)
    steps = setup["steps"]
    for step in range(steps):
        if step % setup["eval_every"] == 0:
            run.evaluate(step, whole=step > 0 and step % setup["whole_every"] == 0)
        run.train_step(step)
    run.evaluate(steps, whole=True)
    _, _, final = run.curve[-1]
    return {
        "contender": text,
        "seed": seed,
        "steps": steps,
        "score": final,
        "curve": run.curve,
        "step_ms": round(statistics.median(run.step_ms), 2),
        "optimizer_ms": round(statistics.median(run.optimizer_ms), 2),
        "initial": run.initial,
        "rows": run.rows.hexdigest()[:12],
        "sha256": Contender(text).sha256(),
        "machine": run_report.machine_description(),
    }


class Run:
    """A contender at work: its model, optimizer and data, and its measurements so far."""

    def __init__(self, setup, place, contender, seed):
        self.setup = setup
        self.device = start().device
        torch.manual_seed(seed)
        model = empty_model(setup, self.device)
        model.init_weights(seed)
        self.optimizer, self.built, self.schedule = contender.prepare(model, setup)
        self.initial = digest(*(param.detach().cpu().numpy().tobytes() for param in model.parameters()))
        self.forward = compile_model(model, None) if compile_enabled() else model
        self.training, self.validation, self.token_bytes = open_data(setup, place, seed, self.device)
        self.part = self.validation[:: max(1, len(self.validation) // setup["eval_batches"])]
        self.accumulation = setup["rows"] // setup["micro_rows"]
        self.rows = hashlib.sha256()
        self.curve, self.step_ms, self.optimizer_ms = [], [], []
        self.diverged = False

    def train_step(self, step):
        """One step. After divergence it only reads the rows, for the digest that all runs of a seed share."""
        batches = []
        for _ in range(self.accumulation):
            inputs, targets = next(self.training)
            self.rows.update(inputs.cpu().numpy())
            batches.append((inputs, targets))
        if self.diverged:
            return
        began = self.now()
        for group, values in zip(self.optimizer.param_groups, self.built, strict=True):
            group.update(values_at(self.schedule, values, step, self.setup["steps"]))
        for inputs, targets in batches:
            (self.forward(inputs, targets) / self.accumulation).backward()
        before = self.now()
        self.optimizer.step()
        after = self.now()
        self.optimizer.zero_grad()
        self.step_ms.append(1000 * (after - began))
        self.optimizer_ms.append(1000 * (after - before))

    def evaluate(self, step, whole):
        """Add a point to the curve: the loss on a part of the validation set, and if asked on all of it."""
        loss = None if self.diverged else self.loss(self.part)
        self.diverged = loss is None
        whole_loss = self.loss(self.validation) if whole and not self.diverged else None
        self.curve.append((step, loss, whole_loss))

    def loss(self, batches):
        """The loss with the weights that the optimizer wants to be judged by; None if it is not finite."""
        switch(self.optimizer, "eval")
        value = bits_per_byte(self.forward, batches, self.token_bytes)
        switch(self.optimizer, "train")
        if self.setup["unit"].startswith("nats"):
            value *= math.log(2)
        return round(value, DIGITS) if math.isfinite(value) else None

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass
class Header:
    """The first line of a race's file."""

    setup: dict


@dataclass
class Result:
    """A finished run, as it is read: see train()."""

    contender: str
    seed: int
    steps: int
    score: float | None
    curve: list[tuple[int, float | None, float | None]]
    step_ms: float
    optimizer_ms: float


class Results:
    """The finished runs of a race, in a file whose first line is its setup and every other line a run."""

    def __init__(self, file, setup, baseline):
        self.file = file
        name = file.parent.name if file.name == "results.jsonl" else file.stem
        header = {"race": name, "baseline": baseline, "setup": setup}
        self.header, self.runs = header, []
        if file.exists():
            self.header, self.runs = read_results(file)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.append(header)
        before = self.header["setup"]
        changed = [
            f"{key} {before.get(key)}, not {value}"
            for key, value in setup.items()
            if before.get(key) != value
        ]
        if changed:
            raise InputError(f"race {file} was run with {'; '.join(changed)}: choose another --name")

    def append(self, line):
        with open(self.file, "a", encoding="utf-8") as output:
            output.write(json.dumps(line, default=as_text) + "\n")

    def find(self, contender, key, seed, steps):
        """The newest such run, or None."""
        wanted = {"contender": contender, "key": key, "seed": seed, "steps": steps}
        for run in reversed(self.runs):
            if all(run.get(name) == value for name, value in wanted.items()):
                return run
        return None

    def add(self, run):
        self.runs.append(run)
        self.append(run)


def read_results(file):
    """(first line, runs) of a race's file."""
    lines = file.read_bytes()
    if not lines:
        raise InputError(f"{file} is empty: remove it")
    header, *runs = run_report.parse_lines(file, lines, Header | Result)
    return header, runs


class Race:
    """Contenders on one task. setup, place: see tasks; jobs: runs at a time."""

    def __init__(self, results, setup, place, jobs):
        self.results, self.setup, self.place, self.jobs = results, setup, place, jobs

    def run(self, contenders, seeds):
        """{name: its runs}, seed by seed. From two seeds on, contenders that are hopeless so far get no more
        seeds; the first, the baseline, gets all.
        """
        racing, found = list(contenders), {}
        for count in range(min(2, len(seeds)), len(seeds) + 1):
            found |= self.train(racing, seeds[:count], self.setup["steps"], "race")
            scores = {name: [score(run) for run in runs] for name, runs in found.items()}
            stopped = set(significance.hopeless(scores, len(seeds))) - {contenders[0].name}
            if stopped:
                print(f"stopped after {count} seeds, hopeless: {', '.join(sorted(stopped))}", flush=True)
            racing = [contender for contender in racing if contender.name not in stopped]
        return found

    def sweep(self, contenders, budget):
        """The best trial of each contender, by successive halving (arXiv 1502.07943).

        Many trials of a quarter of the race's length, the best of them again at half the length, and the best
        of those at full length. Each has a schedule of its own length.
        """
        counts = [int(budget / len(LENGTHS) / length) for length in LENGTHS]
        for contender in contenders:
            print(f"tuning {contender.name}: {', '.join(contender.dials())}", flush=True)
        alive = {contender.name: contender.trials(counts[0]) for contender in contenders}
        for rung, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
            steps = math.ceil(length * self.setup["steps"])
            wanted = []
            for name in alive:
                alive[name] = alive[name][:count]
                wanted += alive[name]
            print(f"tuning: {len(wanted)} trials of {steps} steps", flush=True)
            found = self.train(wanted, [FIRST_TUNING_SEED + rung], steps, "sweep")
            for trials in alive.values():
                trials.sort(key=lambda trial: score(found[trial.name][0]))  # stable: the first stays first
        return [trials[0] for trials in alive.values()]

    def train(self, contenders, seeds, steps, stage):
        """{name: its runs, one per seed}; trains those that the file lacks."""
        setup = self.setup | {"steps": steps}
        keys = {contender.name: contender.key(setup) for contender in contenders}
        pending = []
        for seed in seeds:
            for name, key in keys.items():
                if self.results.find(name, key, seed, steps) is None:
                    pending.append((name, seed))
        done = len(keys) * len(seeds) - len(pending)
        if done:
            print(f"{done} of {len(keys) * len(seeds)} runs are done already", flush=True)
        if pending:
            first = "; each compiles first" if compile_enabled() else ""
            print(f"{len(pending)} runs, {self.jobs} at a time{first}", flush=True)
        began = time.monotonic()
        for number, run in enumerate(self.trained(setup, pending), 1):
            self.results.add({"stage": stage, "key": keys[run["contender"]], **run})
            final = "diverged" if run["score"] is None else f"{run['score']:.4f}"
            each = (time.monotonic() - began) / max(number, self.jobs)
            print(
                f"[{done + number}/{len(keys) * len(seeds)}] {run['contender']} seed {run['seed']}: {final}, "
                f"{run['step_ms']:.0f} ms per step, optimizer {run['optimizer_ms']:.1f}, "
                f"about {each * (len(pending) - number) / 60:.0f} min left of these {len(pending)}",
                flush=True,
            )
        found = {}
        for name, key in keys.items():
            found[name] = [self.results.find(name, key, seed, steps) for seed in seeds]
        check_same_start(found)
        return found

    def trained(self, setup, pending):
        """Yield the results of these (name, seed) as they come, from processes of one thread or GPU each."""
        if not pending:
            return
        context = multiprocessing.get_context("spawn")
        counter = context.Value("i", 0)
        pool = ProcessPoolExecutor(self.jobs, context, start_worker, (counter,))
        try:
            futures = {pool.submit(train, setup, self.place, name, seed): name for name, seed in pending}
            for future in as_completed(futures):
                if error := future.exception():
                    if isinstance(error, InputError):  # is shown without notes
                        raise InputError(f"contender {futures[future]}: {error}") from error
                    error.add_note(f"contender {futures[future]}")
                yield future.result()
        except BrokenProcessPool as error:
            raise InputError(
                "a process of the race was killed, perhaps because memory ran out; fewer --jobs need less. "
                "Finished runs are kept, and the same command goes on from there"
            ) from error
        except BaseException:  # asked to stop: finished runs are in the file
            for worker in multiprocessing.active_children():
                worker.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def start_worker(counter):
    """Give this process one thread, and a GPU if there is one. Its parent handles Ctrl-C; it ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    with counter.get_lock():
        index = counter.value
        counter.value += 1
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = str(index % torch.cuda.device_count())


def end_with_parent():
    """A killed parent leaves its workers waiting for the next run, with their memory."""
    multiprocessing.parent_process().join()
    os._exit(1)


def check_same_start(results):
    """Raise InputError unless all runs of a seed have the same initial weights and the same rows."""
    start_of_seed = {}
    for runs in results.values():
        for run in runs:
            start_of_run = (run["initial"], run["rows"])
            if start_of_seed.setdefault(run["seed"], start_of_run) != start_of_run:
                raise InputError(
                    f"the contenders of seed {run['seed']} differ in initial weights or rows: does one "
                    "change them, or has the code changed? Choose another --name"
                )
