"""Small runs that are abused at random until the time is over: bash tests/soak.sh --minutes 10 [--seed 1]

Runs of one process, of two, and of two under torchrun are killed, stopped, left without disk space and
damaged at random moments, a few times each, and resumed after each. Every one has to end like one of its
kind that nothing had happened to: the same rows, checkpoint, model, tokenizer and samples, bit for bit, and
nothing left behind. Prints what was tried, how often, and what was lost.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file

from nanomuon import checkpoint
from nanomuon.runtime import STOPPED
from tests.training import Ranks, children, launch, rows

STEPS = 24
TINY = (
    "--depth 2 --max-seq-len 32 --device-batch-size 2 --total-batch-size 128 --vocab-size 300 "
    "--eval-tokens 512 --dtype float32 --eval-every 10 --save-every 3 --keep-last 3"
).split()
IN_TURN = ("one", "torchrun", "two", "one", "one", "one")  # kinds of runs: torchrun's take the longest
PROCESSES = {"one": 1, "two": 2, "torchrun": 2}
HANG = 240  # seconds after which a launch counts as one that hangs

KILL = "SIGKILL"
KILL_WRITING = "SIGKILL while a checkpoint is written"
KILL_RANK = "SIGKILL to one rank of two"
FULL = "no room on the disk, until the launch ends"
FULL_FOR_A_WHILE = "no room on the disk for a while"
CHECKPOINT = "newest checkpoint: a file cut, changed or removed"
METRICS = "metrics.jsonl: a byte of a line"
SMALL_FILE = "another file of the run: cut"
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Torchrun:
    """The interface of Ranks for two ranks that torchrun has started, and starts again."""

    def __init__(self, base, run, steps):
        self.process = launch(base, run, steps, *TINY, processes=2, restarts=3)
        self.said = None

    def alive(self):
        return self.process.poll() is None

    def pids(self):
        return children(self.process.pid)

    def kill(self, number, rank=None):
        """SIGKILL goes to the ranks, or to one; torchrun hands on the other signals."""
        if rank is not None:
            pids = self.pids()[rank : rank + 1]
        elif number == signal.SIGKILL:
            pids = [self.process.pid, *self.pids()]
        else:
            pids = [self.process.pid]
        for pid in pids:
            send(pid, number)

    def join(self, timeout):
        try:
            self.said, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill(signal.SIGKILL)
            return [None]
        return [self.process.returncode]

    def output(self):
        return self.said or ""


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended meanwhile
        pass


class Abuse:
    """What has been tried, and what came of it. seed: of the moments and kinds of abuse."""

    def __init__(self, base, seed):
        self.base = base
        self.random = random.Random(seed)
        self.tried = Counter()
        self.launches = Counter()
        self.ended = Counter()  # what became of launches that were abused
        self.runs = Counter()
        self.lost = []  # in words
        self.seconds = {}  # of a launch that is left alone

    # A run

    def start(self, run, kind):
        self.launches[kind] += 1
        if kind == "torchrun":
            return Torchrun(self.base, run, STEPS)
        return Ranks(self.base, run, STEPS, processes=PROCESSES[kind], small=TINY)

    def finish(self, run, kind):
        """A launch that nothing happens to has to end well. Returns whether it did."""
        ranks = self.start(run, kind)
        codes = ranks.join(HANG)
        if set(codes) == {0} and (self.folder(run) / "summary.json").exists():
            return True
        self.lost.append(f"{run}: ended with {codes}:\n{ranks.output()}")
        return False

    def folder(self, run):
        return self.base / "runs" / run

    def prepare(self):
        """The runs that nothing happens to."""
        for kind in PROCESSES:
            began = time.monotonic()
            assert self.finish(f"whole-{kind}", kind), self.lost
            self.seconds[kind] = time.monotonic() - began

    def abuse_a_run(self):
        kind = IN_TURN[sum(self.runs.values()) % len(IN_TURN)]
        self.runs[kind] += 1
        run = f"{kind}-{sum(self.runs.values())}"
        happened, damaged_rows = [], []
        for _ in range(self.random.randint(2, 4)):
            ranks = self.start(run, kind)
            happened.append(self.molest(run, kind, ranks))
            if self.random.random() < 0.6:
                happened += self.damage(run, kind, damaged_rows)
        if self.finish(run, kind):
            for difference in differences(self.folder(run), self.folder(f"whole-{kind}"), damaged_rows):
                self.lost.append(f"{run}: {difference}, after {', '.join(filter(None, happened))}")
        shutil.rmtree(self.folder(run), ignore_errors=True)

    # What happens to a launch

    def molest(self, run, kind, ranks):
        """Do something to a launch at a random moment; return what, once it has ended."""
        what = self.random.choice((KILL, KILL_WRITING, KILL_RANK, FULL, FULL_FOR_A_WHILE, *STOPS))
        if what == KILL_RANK and kind == "one":
            what = KILL
        self.wait_for_a_moment(run, kind, ranks)
        checkpoints = self.folder(run) / "checkpoints"
        if what == KILL_WRITING:
            while ranks.alive() and not list(checkpoints.glob(".step_*")):
                pass
        if not ranks.alive():
            self.end(run, kind, ranks, what="nothing: it had ended")
            return None
        if what in (KILL, KILL_WRITING):
            ranks.kill(signal.SIGKILL)
        elif what == KILL_RANK:
            ranks.kill(signal.SIGKILL, rank=self.random.randrange(2))
        elif what in (FULL, FULL_FOR_A_WHILE):
            self.fill_disk(ranks, for_a_while=what == FULL_FOR_A_WHILE, seconds=self.seconds[kind] / 4)
        else:
            ranks.kill(what)
            what = what.name
        self.tried[what] += 1
        self.end(run, kind, ranks, what)
        return what

    def wait_for_a_moment(self, run, kind, ranks):
        """Of the start, of a step, or of the end, which is as long as either."""
        metrics = self.folder(run) / "metrics.jsonl"
        when = self.random.choice(("start", "step", "step", "end"))
        lines = 0
        delay = self.random.uniform(0, self.seconds[kind] / 3)
        if when == "step":
            lines = self.random.randint(1, STEPS)
            delay = self.random.uniform(0, self.seconds[kind] / STEPS)
        elif when == "end":
            lines = STEPS
        while ranks.alive() and lines > 0 and lines > count_lines(metrics):
            time.sleep(0.01)
        moment = time.monotonic() + delay
        while ranks.alive() and time.monotonic() < moment:
            time.sleep(0.01)

    def fill_disk(self, ranks, for_a_while, seconds):
        """No file can grow beyond some size, by the limit that the system has for one process. Logs still can
        where it is not small.
        """
        size = int(10 ** self.random.uniform(4, 5.5))
        pids = ranks.pids() if isinstance(ranks, Torchrun) else [process.pid for process in ranks.processes]
        before = {}
        for pid in pids:
            try:
                before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[pid][1]))
            except ProcessLookupError:
                pass
        if for_a_while:
            time.sleep(self.random.uniform(0, seconds))
            for pid, limits in before.items():
                try:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
                except ProcessLookupError:
                    pass

    def end(self, run, kind, ranks, what):
        """Wait for the end of a launch and look at how it ends."""
        codes = ranks.join(HANG)
        self.ended[", ".join(sorted({str(code) for code in codes}))] += 1
        output = ranks.output()
        if None in codes:
            self.lost.append(f"{run}: hangs after {what}:\n{output}")
        if kind == "one" and "Traceback" in output:
            self.lost.append(f"{run}: a traceback after {what}:\n{output}")
        is_complete = (self.folder(run) / "summary.json").exists()
        was_stopped = set(codes) <= {0, STOPPED} and not is_complete
        if was_stopped and not (self.folder(run) / "stopped").exists():
            self.lost.append(f"{run}: ended with {codes} after {what} without a note")

    # What happens to the folder of a run

    def damage(self, run, kind, damaged_rows):
        """Damage something of a run that nobody writes; return what, in a list."""
        what = self.random.choice((CHECKPOINT, CHECKPOINT, METRICS, SMALL_FILE))
        folder = self.folder(run)
        if (folder / "summary.json").exists():  # complete: no launch looks at its results again
            return []
        if what == CHECKPOINT:
            steps = checkpoint.saved_steps(folder)
            if len(steps) < 2:
                return []
            files = sorted((folder / "checkpoints" / f"step_{steps[-1]}").iterdir())
            self.damage_file(self.random.choice(files))
        elif what == METRICS:
            lines = (folder / "metrics.jsonl").read_bytes().split(b"\n") if folder.exists() else []
            if len(lines) < 3:
                return []
            number = self.random.randrange(len(lines) - 1)
            damaged_rows.append(lines[number])
            place = self.random.randrange(max(1, len(lines[number])))
            lines[number] = lines[number][:place] + b"\0" + lines[number][place + 1 :]
            (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
        else:
            files = [file for file in sorted(folder.glob("**/*")) if is_small_file(file)]
            if not files:
                return []
            file = self.random.choice(files)
            what = f"{file.name}: cut"
            self.cut_and_launch(run, kind, file, what)
        self.tried[what] += 1
        return [what]

    def damage_file(self, file):
        content = bytearray(file.read_bytes())
        how = self.random.choice(("cut", "changed", "removed"))
        if how == "removed":
            file.unlink()
        elif how == "cut":
            file.write_bytes(content[: self.random.randrange(max(1, len(content)))])
        elif content:
            place = self.random.randrange(len(content))
            content[place] ^= 1 << self.random.randrange(8)
            file.write_bytes(content)

    def cut_and_launch(self, run, kind, file, what):
        """The next launch may go on without the file, or refuse in one line, and goes on with it."""
        content = file.read_bytes()
        file.write_bytes(content[: self.random.randrange(max(1, len(content)))])
        ranks = self.start(run, kind)
        codes = ranks.join(HANG)
        if set(codes) == {0}:
            return
        if kind == "one" and (codes != [2] or "Traceback" in ranks.output()):
            self.lost.append(f"{run}: ended with {codes} after {what}:\n{ranks.output()}")
        file.write_bytes(content)


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def is_small_file(file: Path) -> bool:
    """Whether it is one that a run in progress has beside its checkpoints and metrics.jsonl."""
    return (
        file.is_file() and "checkpoints" not in file.parts and file.name not in ("metrics.jsonl", "stopped")
    )


def differences(ours: Path, theirs: Path, damaged_rows: list[bytes]) -> list[str]:
    """In words, in what a run differs from another that it should equal but for these lines."""
    found = []
    base = ours.parent.parent
    expected = rows(base, theirs.name)
    mine = rows(base, ours.name)
    missing = [row for row in expected if row not in mine]
    if [row for row in expected if row not in missing] != mine or len(missing) > len(damaged_rows):
        found.append(f"rows of metrics.jsonl ({len(mine)} of {len(expected)}, {len(damaged_rows)} damaged)")
    files = [Path("model.safetensors")]
    for file in sorted((theirs / "checkpoints" / f"step_{STEPS}").glob("*.safetensors")):
        files.append(file.relative_to(theirs))
    for file in files:
        if not (ours / file).exists() or not same_tensors(ours / file, theirs / file):
            found.append(str(file))
    for file in ("config.json", "tokenizer/vocab.txt", "tokenizer/tokenizer.json"):
        if not (ours / file).exists() or (ours / file).read_bytes() != (theirs / file).read_bytes():
            found.append(file)
    if samples(ours) != samples(theirs):
        found.append("samples")
    for pattern in (".*.tmp", "checkpoints/.*", "stopped"):
        for file in ours.glob(pattern):
            found.append(f"{file.name} left behind")
    return found


def same_tensors(ours, theirs):
    """But for torch's random state, which nothing draws from: it is another in every process that starts."""
    mine, other = load_file(ours), load_file(theirs)
    for tensors in (mine, other):
        for name in [name for name in tensors if name.startswith("random.")]:
            del tensors[name]
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def samples(folder):
    return (folder / "report.md").read_text().split("## Samples")[1].split("##")[0]


def abuse(base: Path, minutes: float, seed: int) -> bool:
    """Abuse runs for so long; print what was tried and lost. Returns whether something was."""
    os.environ["NANOMUON_BASE_DIR"] = str(base)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup: what we start would ignore it as well
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    subject = Abuse(base, seed)
    subject.prepare()
    began = time.monotonic()
    while time.monotonic() - began < 60 * minutes:
        subject.abuse_a_run()
    spent = (time.monotonic() - began) / 60
    print(f"{spent:.1f} minutes, seed {seed}: {sum(subject.runs.values())} runs {dict(subject.runs)},")
    print(f"{sum(subject.launches.values())} launches, of which the abused ended with {dict(subject.ended)}")
    print("\n| what happened | times |\n| --- | --- |")
    for what, times in subject.tried.most_common():
        print(f"| {what} | {times} |")
    print(f"| altogether | {sum(subject.tried.values())} |")
    print("\nlost: " + ("\n".join(subject.lost) or "nothing"), flush=True)
    return bool(subject.lost)
