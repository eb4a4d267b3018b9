"""The laboratory: contenders trained on one task, with the same seeds. scripts/optim_race.py drives it."""

import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import operator
import os
import re
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from nanomuon import provenance, report, sizing
from nanomuon.evaluate import bits_per_byte
from nanomuon.gpt import EARLIER_FIELDS
from nanomuon.read_json import (
    LARGE,
    Anything,
    Choice,
    Items,
    ListOf,
    MapOf,
    Number,
    OrNull,
    Record,
    Text,
    Whole,
    read_json,
)
from nanomuon.runtime import InputError, compile_enabled, start, write_json, write_text
from scripts.laboratory import compare
from scripts.laboratory.race_contenders import Contender, described
from scripts.laboratory.race_tasks import TASKS, as_text, digest, empty_model

LOSS = Number(finite=False)  # of a contender that diverged
POINT = Items(Whole(), LOSS, OrNull(LOSS))  # of a curve, see train()
RESULT = Record(
    {
        "contender": Text(),
        "seed": Whole(-(1 << 63), 1 << 64),
        "score": LOSS,
        "curve": ListOf(POINT),
        "step_ms": Number(0),
        "optimizer_ms": Number(0),
        "initial": Text(64),
        "rows": Text(64),
    }
)
CODE = {"model_code", "optimizer_code"}  # of a setup: what may change and leave all results as they were
TASK = Record({}, {"dtype": Choice("bfloat16", "float32"), "model": MapOf(Anything())})  # task.json, a setup


def train(setup, place, text, seed, file):
    """Train the contender `text` with one seed; the result goes to `file` as JSON, at once and whole.

    curve: [step, loss over a part of the validation set, over all of it or null]; score: the last of these;
    step_ms and optimizer_ms: medians; initial, rows: digests of the first parameters and of every row trained
    on.
    """
    run = Run(setup, place, Contender(text), seed)
    steps = setup["steps"]
    for step in range(steps):
        if step % setup["eval_every"] == 0:
            run.evaluate(step, whole=step > 0 and step % setup["whole_every"] == 0)
        if run.diverged:
            run.skip_step()
        else:
            run.train_step(step)
    run.evaluate(steps, whole=True)
    _, _, score = run.curve[-1]
    result = {
        "contender": text,
        "seed": seed,
        "score": score,
        "curve": run.curve,
        "step_ms": statistics.median(run.step_ms or [0]),
        "optimizer_ms": statistics.median(run.optimizer_ms or [0]),
        "initial": run.initial,
        "rows": run.rows.hexdigest()[:12],
        "groups": described(run.built),
        "compiled": compile_enabled(),
        "machine": report.machine_description(),
        **commit(),
    }
    as_json = json.dumps(result, indent=1, default=as_text)  # functions by name: no other process knows them
    write_text(file, as_json + "\n")
    return json.loads(as_json)


@functools.cache
def commit():
    """Of the code that this process has loaded, see provenance.commit."""
    return provenance.commit(Path(__file__).parents[2])


class Run:
    """A contender at work: its model, its optimizer, its data, and what has been measured so far."""

    def __init__(self, setup, place, contender, seed):
        self.setup = setup
        self.device = start().device
        torch.manual_seed(seed)
        model = empty_model(setup, self.device)
        model.init_weights(seed)
        self.optimizer, self.built, self.schedule = contender.prepare(model, setup)
        self.initial = digest(*(param.detach().cpu().numpy().tobytes() for param in model.parameters()))
        self.forward = torch.compile(model, dynamic=False) if compile_enabled() else model
        task = TASKS[setup["name"]]
        self.training, self.validation, self.token_bytes = task.open_data(setup, place, seed, self.device)
        self.part = self.validation[:: max(1, len(self.validation) // setup["eval_batches"])]
        self.accumulation = setup["rows"] // setup["micro_rows"]
        self.rows = hashlib.sha256()
        self.curve = []
        self.diverged = False
        self.step_ms = []
        self.optimizer_ms = []

    def train_step(self, step):
        began = self.now()
        for group, values in zip(self.optimizer.param_groups, self.built, strict=True):
            group.update(self.schedule(values, step, self.setup["steps"]))
        for _ in range(self.accumulation):
            inputs, targets = self.next_rows()
            (self.forward(inputs, targets) / self.accumulation).backward()
        before = self.now()
        self.optimizer.step()
        after = self.now()
        self.optimizer.zero_grad()
        self.step_ms.append(1000 * (after - began))
        self.optimizer_ms.append(1000 * (after - before))

    def next_rows(self):
        inputs, targets = next(self.training)
        self.rows.update(inputs.cpu().numpy())
        return inputs, targets

    def skip_step(self):
        """Of a run that has diverged: it counts the rows of the others and spends no time on them."""
        for _ in range(self.accumulation):
            self.next_rows()

    def evaluate(self, step, whole):
        """Add a point to the curve: the loss on a part of the validation set, and on the whole if asked.

        A run whose loss is none any more has diverged.
        """
        loss = math.nan if self.diverged else self.loss(self.part)
        self.diverged = not math.isfinite(loss)
        whole_loss = None
        if whole:
            whole_loss = loss if self.diverged else self.loss(self.validation)
        self.curve.append((step, loss, whole_loss))

    def loss(self, batches):
        """In the unit of the task, with the weights that the optimizer wants to be judged by."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        bits = bits_per_byte(self.forward, batches, self.token_bytes)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        return bits * math.log(2) if self.setup["unit"].startswith("nats") else bits

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def run_all(folder, setup, place, contenders, seeds, workers):
    """{name: its results, one a seed} of every contender; only what is not in `folder` yet is trained, by
    Workers.

    InputError where `folder` holds runs of another task, or where two contenders had not the same start and
    the same rows.
    """
    files = result_files(folder, setup, contenders, seeds)
    with what_is_kept_is_said(files):
        return train_missing(folder, setup, place, files, list(files), workers)


def run_rounds(folder, setup, place, contenders, baseline, seeds, workers):
    """The results of run_all, seed by seed: a contender that is hopeless by the seeds so far, of which there
    are at least two, is not trained with the others. The baseline is trained with all.
    """
    files = result_files(folder, setup, contenders, seeds)
    racing = [contender.name for contender in contenders]
    results = {}
    with what_is_kept_is_said(files):
        for count in range(min(2, len(seeds)), len(seeds) + 1):
            wanted = [(name, seed) for name in racing for seed in seeds[:count]]
            results |= train_missing(folder, setup, place, files, wanted, workers)
            if count == len(seeds):
                break
            scores = {}
            for name, runs in results.items():
                scores[name] = [run["score"] for run in runs]
            stopped = set(compare.hopeless(scores, len(seeds))) - {baseline}
            if stopped:
                print(f"stopped after {count} seeds, hopeless: {', '.join(sorted(stopped))}", flush=True)
            racing = [name for name in racing if name not in stopped]
    return results


def result_files(folder, setup, contenders, seeds):
    """{(name, seed): the file where that result is, or goes}."""
    files = {}
    for contender in contenders:
        slug = re.sub(r"[^\w=-]+", "_", contender.name).strip("_")[-100:]
        key = contender.key(setup)
        for seed in seeds:
            files[contender.name, seed] = folder / f"{slug}-{key}-seed{seed}.json"
    return files


@contextlib.contextmanager
def what_is_kept_is_said(files):
    """How many of these results are there: at the start, and where Ctrl-C or a signal ends it."""

    def there():
        return sum(file.exists() for file in files.values())

    if there():
        print(f"{there()} of {len(files)} runs are there already", flush=True)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        kept = f"{there()} of {len(files)} runs are kept, the same command goes on"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"interrupted: {kept}") from None
        print(f"stopped: {kept}", file=sys.stderr)
        raise


def train_missing(folder, setup, place, files, wanted, workers):
    """{name: its results} of the (name, seed) that are wanted, trained where there is none yet."""
    pending = [run for run in wanted if not files[run].exists()]
    pending.sort(key=operator.itemgetter(1))  # the first seed of all comes first
    if pending:
        workers.train(setup, place, files, pending)
    results = {}
    for name, seed in wanted:
        results.setdefault(name, []).append(read_result(files[name, seed]))
    check_same_start(folder, results)
    return results


def read_result(file):
    """What train() wrote there; InputError where it is something else."""
    return read_json(file, RESULT, LARGE, advice="remove it, and that run is trained again")


class Workers:
    """`jobs` processes that train, each with one thread or a GPU. They start with the first run and end with
    the block; what one has compiled, its next run of the same task uses.
    """

    def __init__(self, jobs):
        self.jobs = jobs
        self.pool = None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.pool is None:
            return
        if kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit)):
            for worker in multiprocessing.active_children():
                worker.kill()  # in the middle of a step: what is finished is in its file
        self.pool.shutdown(cancel_futures=True)

    def train(self, setup, place, files, pending):
        """Train the (name, seed) of `pending`, whose results go to files[name, seed], and say what each came
        to. InputError where one of the processes is killed.
        """
        done = sum(file.exists() for file in files.values())
        try:
            for future in as_completed(self.submit(setup, place, files, pending)):
                result = future.result()
                done += 1
                print(
                    f"[{done}/{len(files)}] {result['contender']} seed {result['seed']}: "
                    f"{result['score']:.4f}, {result['step_ms']:.0f} ms a step, "
                    f"optimizer {result['optimizer_ms']:.1f}",
                    flush=True,
                )
        except BrokenProcessPool as error:
            raise InputError(
                "a process of the race was killed, by the system if memory ran out; fewer --jobs need less. "
                "What is finished is kept, and the same command goes on from there"
            ) from error

    def submit(self, setup, place, files, pending):
        """The futures of `pending`. Processes start here, and inherit that Ctrl-C, which the terminal sends
        to all of them, is blocked. This one hears of it when all are submitted.
        """
        if self.pool is None:
            context = multiprocessing.get_context("spawn")
            counter = context.Value("i", 0)  # also starts multiprocessing's tracker, which would unblock
            self.pool = ProcessPoolExecutor(self.jobs, context, start_worker, (counter,))
        heard = []
        handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures = []
        try:
            for name, seed in pending:
                futures.append(self.pool.submit(train, setup, place, name, seed, files[name, seed]))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGINT, handler)
        if heard:
            raise KeyboardInterrupt
        return futures


def start_worker(counter):
    """One thread, or a GPU, for this process; it ends with the one that started it, however that ends."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    with counter.get_lock():
        index = counter.value
        counter.value += 1
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = str(index % torch.cuda.device_count())


def exit_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def choose_dtype(asked, folder):
    """Name of the compute dtype of a race: the one asked for; "auto" is that of the runs in `folder`, or what
    this device multiplies best.
    """
    file = folder / "task.json"
    if asked == "auto" and os.path.lexists(file):
        asked = read_json(file, TASK).get("dtype", asked)
    return sizing.choose_dtype(asked, start(), {}).dtype_name


def check_setup(folder, setup, accept_changes=False):
    """Write the setup of a new race; refuse runs with different data or another model in one that exists.

    accept_changes: where only code has changed, which may leave all results as they were, that is said.
    """
    file = folder / "task.json"
    if not os.path.lexists(file):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, setup)
    before = read_json(file, TASK)
    if "model" in before:
        before["model"] = {**EARLIER_FIELDS, **before["model"]}
    changed, model_flags = differences(before, setup)
    if not changed:
        return
    problem = f"race {folder.name} was run with {'; '.join(changed.values())}"
    if model_flags:
        raise InputError(f"{problem}: add {model_flags} for its model, or choose another --name")
    if not CODE.issuperset(changed):
        raise InputError(f"{problem}: choose another --name")
    if not accept_changes:
        raise InputError(
            f"{problem}: choose another --name, or say --accept-changes if it trains the same as before"
        )
    print(f"{problem}: its results are compared with new ones all the same", flush=True)


def differences(before, setup):
    """What differs between the setup of a race and another one, as {key: in words}, of the model the fields
    alone; and the flag that gives the other one's model those of the race, "" where they are its own.
    """
    changed = {}
    for key, value in setup.items():
        if key != "model" and before.get(key) != value:
            changed[key] = f"{key} {before.get(key)}, not {value}"
    fields = []
    before_model = before.get("model", {})
    for field, value in setup.get("model", {}).items():
        if before_model.get(field) != value:
            changed[field] = f"{field} {before_model.get(field)}, not {value}"
            fields.append(f"{field}={before_model.get(field)}")
    model_flags = "--model " + " ".join(fields) if fields else ""
    return changed, model_flags


def check_same_start(folder, results):
    """InputError where the contenders of a seed had not the same initial weights and the same rows."""
    start_of_seed = {}
    for runs in results.values():
        for run in runs:
            start = (run["initial"], run["rows"])
            if start_of_seed.setdefault(run["seed"], start) != start:
                raise InputError(
                    f"race {folder.name}: the contenders of seed {run['seed']} differ in initial weights or "
                    "rows: does one change them, or has the code changed? Choose another --name"
                )
