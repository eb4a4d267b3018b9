"""Whole training runs for the tests: a small corpus, and base_train in processes of its own."""

import atexit
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.worlds import FORKS

ROOT = Path(__file__).parent.parent  # of the checkout
SMALL = (
    "--depth 2 --max-seq-len 32 --device-batch-size 4 --total-batch-size 256 --vocab-size 300 "
    "--eval-tokens 512 --dtype float32"
).split()
QUIET = ("--eval-every", "-1", "--save-every", "-1")
TIMES = ("step_ms", "tokens_per_second", "optimizer_ms")  # these differ between two equal runs


def write_corpus(folder):
    """200 short documents with something to learn in them."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(50)]
    folder.mkdir(exist_ok=True)
    for i in range(200):
        (folder / f"{i:03}.txt").write_text(" ".join(rng.choices(words, k=80)) + ".\n")


def in_brief(set_attribute):
    """Runs draw no picture (test_report.py does) and write short samples, which halves a short run's time."""
    from nanomuon import report, run  # after conftest.py has set OMP_NUM_THREADS

    sample_texts, few = run.sample_texts, {"max_tokens": 8}
    set_attribute(report, "plot_run", lambda metrics, image: image.touch())
    set_attribute(run, "sample_texts", lambda *given, **named: sample_texts(*given, **named | few))


@contextlib.contextmanager
def little_space(size):
    """No file of this process can grow beyond `size` bytes: writing fails halfway, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def arguments(base, run, steps, *more, small=SMALL):
    return [*small, "--corpus", f"path:{base}/texts", "--run", run, "--num-iterations", str(steps), *more]


def train(base, run, steps, *more):
    """Train a run to its end in this process."""
    from scripts import base_train

    assert base_train.main(arguments(base, run, steps, *more)) == 0


def optimizer_file(folder, name, body):
    """The flags for an optimizer file whose build_optimizer(model) has this body."""
    file = folder / f"{name}.py"
    file.write_text(f"import torch\ndef build_optimizer(model):\n    {body.strip()}\n")
    return "--optimizer-file", str(file)


# For optimizer_file: trains the head, which is zero in evaluations
STILL = """
    class Still(torch.optim.SGD):
        kept = None
        def eval(self):
            self.kept = model.lm_head.weight.detach().clone()
            model.lm_head.weight.data.zero_()
        def train(self):
            if self.kept is not None:
                model.lm_head.weight.data.copy_(self.kept)
    return Still([model.lm_head.weight], lr=0.1)
"""


def call(*command, folder=ROOT, **variables):
    """The result of a command that runs to its end, with these additional environment variables. `python` is
    this one, `torchrun` its own.
    """
    starts = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    command = [*starts.get(command[0], command[:1]), *command[1:]]
    environment = os.environ | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def launch(base, run, steps, *more, processes=1):
    """The command a user types, in a process of its own."""
    module = ["-m", "scripts.base_train"]
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        module = [*torchrun, *module, "--"]
    command = [sys.executable, *module, *arguments(base, run, steps, *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class Ranks:
    """The same without torchrun, in forks of a process that has imported torch, which saves seconds.

    of_last: additional flags of the last rank; base_of_last: its base folder. main: what each calls with its
    flags, in place of base_train.main. output(): what all ranks have printed.
    """

    def __init__(
        self, base, run, steps, *more, processes=1, small=SMALL, of_last=(), base_of_last=None, main=None
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base, self.run, self.file = base, run, base / f"{run}.{time.monotonic_ns()}.out"
        self.processes = []
        for rank in range(processes):
            environment = {"NANOMUON_BASE_DIR": str(base), "NANOMUON_COMPILE": "0"}
            if processes > 1:
                environment |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(processes),
                }
            argv = arguments(base, run, steps, *more, small=small)
            if rank == processes - 1:
                argv += of_last
                environment["NANOMUON_BASE_DIR"] = str(base_of_last or base)
            process = FORKS.Process(
                target=_train, args=(environment, argv, str(self.file), main), daemon=True
            )
            process.start()
            atexit.register(process.kill)  # multiprocessing sends SIGTERM, and it would finish its step
            self.processes.append(process)

    def alive(self):
        return all(process.is_alive() for process in self.processes)

    def wait_for_steps(self, count):
        wait_until(lambda: len(losses(self.base, self.run)) >= count, self.alive)

    def wait_for(self, words):
        wait_until(lambda: words in self.output(), self.alive)

    def kill(self, number):
        for process in self.processes:
            os.kill(process.pid, number)

    def join(self, timeout=300):
        """Exit codes of the ranks; None for one that does not end."""
        for process in self.processes:
            process.join(timeout)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        return codes

    def output(self):
        return self.file.read_text() if self.file.exists() else ""


def train_on(processes, *run, **options):
    """Train a run of Ranks to its end; return what they have printed."""
    ranks = Ranks(*run, processes=processes, **options)
    assert ranks.join() == [0] * processes, ranks.output()
    return ranks.output()


def _train(environment, argv, output, main):
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which a run respects
    from nanomuon import command
    from scripts import base_train

    in_brief(setattr)
    command.PATIENCE = 0  # no torchrun ends the other ranks
    main = main or base_train.main
    command.run_command(lambda: main(argv))


def rows(base, run):
    """The whole lines of metrics.jsonl, without the times."""
    file = base / "runs" / run / "metrics.jsonl"
    if not file.exists():
        return []
    found = []
    for line in file.read_text().split("\n")[:-1]:
        row = json.loads(line)
        found.append({key: value for key, value in row.items() if key not in TIMES})
    return found


def losses(base, run):
    return [row["train_loss"] for row in rows(base, run) if "train_loss" in row]


def wait_until(condition, alive, seconds=180):
    """Return as soon as condition() holds, while alive() does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert alive(), "ended too early"
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.01)
