"""What stages of scripts/gpu_check share: Place and Lines, inputs and errors, commands that they start."""

import json
import math
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from nanomuon import footprint, recipe, runtime, schedule
from nanomuon.gpt import GPTConfig

ROOT = Path(__file__).resolve().parents[1]

GRACE = 10  # seconds that ranks have to end when another has failed

# How far a figure may be off, with where the number comes from
FLOAT64 = 1e-9  # sums in another order; a wrong formula is off by 1e-3 and more
# Of the loss in nats: in float32 and another order of sums, and in bf16 with its half-precision Muon
FIRST_TEN = {"cpu": 1e-4, "cuda": 1e-2}
LAST_TEN = {"cpu": 2e-2, "cuda": 5e-2}  # 100 steps on, rounding has become another run of the same quality


@dataclass(frozen=True)
class Place:
    """Where a stage works."""

    device: torch.device
    ranks: int  # of the stages that use several: one for each GPU, two on a CPU
    folder: Path  # for what stages write and share, NANOMUON_BASE_DIR of what they start

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def sized(self, on_gpu, on_cpu):
        """The first on a GPU, the second on a CPU."""
        return on_gpu if self.on_gpu else on_cpu


class Lines:
    """What a stage finds. Every line is in the file as soon as it is known: what follows may crash."""

    def __init__(self, file: Path):
        self.file = file

    def add(self, name: str, result: str, found: str, allowed: str = "") -> None:
        """result: PASS, FAIL, skipped, or "" for a figure that is neither right nor wrong."""
        line = {"name": name, "result": result, "found": found, "allowed": allowed}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{result or 'figure':7} {name}: {found} {allowed}", flush=True)

    def check(self, name: str, passed: bool, found: str, allowed: str = "") -> None:
        self.add(name, "PASS" if passed else "FAIL", found, allowed)

    def at_most(self, name: str, value: float, limit: float) -> None:
        """PASS where value <= limit; not for NaN."""
        self.check(name, value <= limit, f"{value:.3g}", f"at most {limit:.3g}")

    def skip(self, name: str, reason: str) -> None:
        self.add(name, "skipped", reason)

    def figure(self, name: str, found: str) -> None:
        self.add(name, "", found)


# ------------------------------------------------------------------------------------------------------------
# Inputs and errors


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers in float32, drawn on the CPU: the same on every machine."""
    return torch.randn(*shape, generator=seeded(seed)) * scale


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected, in float64 on the CPU."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def nan_as_infinity(error: float) -> float:
    """max() may pass over NaN, which is the worst of all errors."""
    return math.inf if math.isnan(error) else error


def largest(errors: Iterable[float]) -> float:
    """The largest of some errors; infinity where one is NaN."""
    return max(nan_as_infinity(error) for error in errors)


def worst_of(errors: dict[str, float]) -> tuple[str, float]:
    """The name with the largest error, and that; infinity where it is NaN."""
    worst = max(errors, key=lambda name: nan_as_infinity(errors[name]))
    return worst, nan_as_infinity(errors[worst])


def planned_bytes(config: GPTConfig, rows: int) -> int:
    """What nanomuon/footprint.py expects of one GPU in bf16."""
    by_kind = footprint.memory_by_kind(config, footprint.Layout(ranks=1), rows, compute_bytes=2)
    return footprint.memory(by_kind)


# ------------------------------------------------------------------------------------------------------------
# Commands in processes of their own


def environment_of_children(place: Place, device_type: str, ranks: int) -> dict[str, str]:
    """Everything they write goes to the place's folder."""
    environment = {**os.environ, "NANOMUON_BASE_DIR": str(place.folder), "PYTHONUNBUFFERED": "1"}
    if device_type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["NANOMUON_DEVICE"] = "cpu"
        environment["OMP_NUM_THREADS"] = str(max(1, runtime.cores() // ranks))
        environment["OMP_WAIT_POLICY"] = "passive"
    return environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_to_end(
    place: Place,
    command: list[str],
    ranks: int = 1,
    device_type: str | None = None,
    kill_when: Callable[[], bool] | None = None,
) -> tuple[list[int], str]:
    """Run a command as so many ranks to its end; returns their exit codes and what they printed.

    Where one rank fails, the others are killed GRACE later. device_type: where it is not the place's.
    kill_when: as soon as this is true, all of them are, with SIGKILL. Nobody outlives this process's group,
    which gpu_check kills at its time limit.
    """
    environment = environment_of_children(place, device_type or place.device.type, ranks)
    if ranks > 1 or "--rank-of" in command:  # the rank of a layout has a process group also when it is alone
        environment["MASTER_ADDR"] = "127.0.0.1"
        environment["MASTER_PORT"] = str(free_port())
    processes = []
    with tempfile.TemporaryFile("w+") as output:
        for rank in range(ranks):
            if ranks > 1:
                environment["RANK"] = environment["LOCAL_RANK"] = str(rank)
                environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(ranks)
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            processes.append(process)
        deadline = math.inf
        while any(process.poll() is None for process in processes):
            time.sleep(0.05)
            if any(process.poll() not in (None, 0) for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE)
            asked_to_kill = kill_when is not None and kill_when()
            if asked_to_kill or time.monotonic() > deadline:
                for process in processes:
                    process.kill()
                for process in processes:
                    process.wait()
        output.seek(0)
        return [process.returncode for process in processes], output.read()


# ------------------------------------------------------------------------------------------------------------
# Runs of base_train


def base_train_command(flags: list[str]) -> list[str]:
    return [sys.executable, "-m", "scripts.base_train", *flags]


def write_texts(place: Place) -> Path:
    """A corpus that every machine has: modules of Python's standard library, 4 MB at most."""
    folder = place.folder / "texts"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=place.folder) as temporary:
        texts = Path(temporary, "texts")
        texts.mkdir()
        size = 0
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = file.read_text(errors="replace")
            size += len(text)
            if size > 4_000_000:
                break
            (texts / f"{file.stem}.txt").write_text(text)
        texts.rename(folder)
    return folder


def data_flags(place: Place, vocab_size: int) -> list[str]:
    return ["--corpus", f"path:{write_texts(place)}", "--vocab-size", str(vocab_size)]


def training_flags(
    place: Place, run: str, parts: int = 1, compiles: bool | None = None, steps: int = 100
) -> list[str]:
    """Some steps of a small model with full attention.

    parts: micro-steps or ranks that share the rows of a step, which divide by 2 and by the place's ranks.
    compiles: by default on a GPU only.
    """
    depth, context = place.sized((4, 256), (2, 64))
    rows = math.lcm(16, place.ranks)
    if compiles is None:
        compiles = place.on_gpu
    flags = ["--run", run, *data_flags(place, 1024), "--depth", depth, "--max-seq-len", context]
    flags += ["--device-batch-size", rows // parts, "--total-batch-size", rows * context]
    flags += ["--window-pattern", "L", "--num-iterations", steps, "--resume", "never"]
    flags += ["--eval-every", -1, "--save-every", -1, "--dtype", place.sized("auto", "float32")]
    # The recipe raises its rates in so short a run, and rounding grows with them: here it trains at its own
    lr_scale, decay_scale = schedule.horizon_lr_scale(steps), schedule.horizon_decay_scale(steps)
    for name, value in recipe.param_groups.__kwdefaults__.items():
        scale = decay_scale if name == "weight_decay" else lr_scale
        flags += ["--" + name.replace("_", "-"), value / scale]
    flags.append("--compile" if compiles else "--no-compile")
    return [str(flag) for flag in flags]


def metrics(place: Place, run: str) -> list[dict]:
    """The whole lines of a run's metrics.jsonl that are of training steps."""
    file = place.folder / "runs" / run / "metrics.jsonl"
    if not file.exists():
        return []
    rows = []
    for line in file.read_text().split("\n")[:-1]:  # what follows the last line break is not whole yet
        row = json.loads(line)
        if "train_loss" in row:
            rows.append(row)
    return rows


def losses(place: Place, run: str) -> list[float]:
    return [row["train_loss"] for row in metrics(place, run)]


def mean_of_last_ten(curve: list[float]) -> float:
    return sum(curve[-10:]) / 10
