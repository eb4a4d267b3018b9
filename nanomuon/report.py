"""A run's metrics.jsonl (and wandb) while it runs, and its loss.png and report.md at the end."""

import json
import math
import platform
import re
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import torch

from nanomuon.core import as_line
from nanomuon.runtime import (
    InputError,
    Runtime,
    base_dir,
    cores,
    naming,
    one_line,
    parse_json,
    print0,
    printable,
    write_text,
    write_whole,
)


def parse_lines(path, lines: bytes, kind, first: int = 1) -> list[dict]:
    """JSON objects, one per line, with the keys of the dataclass `kind` and possibly others. InputError names
    a line that does not have them, counted from `first`.
    """
    rows = []
    for number, line in enumerate(lines.splitlines(), first):
        try:
            parse_json(line, kind)
        except ValueError as error:
            raise InputError(f"{path} line {number} cannot be read ({error}): remove that line") from error
        rows.append(json.loads(line))
    return rows


@dataclass
class Row:
    """The fields that are read from a line of metrics.jsonl."""

    step: int
    tokens: int
    train_loss: float | None = None
    val_bpb: float | None = None
    step_ms: float | None = None
    tokens_per_second: float | None = None
    optimizer_ms: float | None = None


def start_wandb(name: str, run_id: str | None, config: dict):
    """A new run at Weights & Biases, or the one with this id again. InputError if that fails."""
    with one_line("--wandb", "; run wandb login, set WANDB_MODE=offline, or leave out --wandb"):
        import wandb

        base_dir().mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project="nanomuon",
            name=name,
            id=run_id,
            config=config,
            dir=base_dir(),
            resume="allow",
            settings=wandb.Settings(init_timeout=20),
        )


class MetricsLog:
    """Appends rows to metrics.jsonl, one JSON object per line. A logged row survives if the process dies.

    folder: the run's. resume_step: None empties the file; otherwise it keeps the rows of

        training steps            up to resume_step
        evaluations               before it: a resumed run begins by repeating those that are due at this step
        ... on the whole set      up to it, if goes_on: it was the last step then, and now it is not

    goes_on: whether there are steps after resume_step. wandb: what start_wandb returns, or None.
    """

    def __init__(self, folder: Path, resume_step: int | None = None, wandb=None, goes_on=False):
        path, kept = folder / "metrics.jsonl", []
        if resume_step is not None:
            for row in read_rows(path):
                is_repeated = "train_loss" not in row
                if goes_on and row.get("whole_set"):
                    is_repeated = False
                last = resume_step - 1 if is_repeated else resume_step
                if row["step"] <= last:
                    kept.append(json.dumps(row) + "\n")
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(kept))
        self.file, self.wandb = path.open("ab"), wandb

    def log(self, row: dict) -> None:
        """row: a dict of numbers with `step`. JSON has no non-finite numbers, so they are written as null."""
        finite = {}
        for key, value in row.items():
            finite[key] = value if value is None or math.isfinite(value) else None
        with naming(self.file.name):
            self.file.write(json.dumps(finite).encode() + b"\n")
            self.file.flush()
        if self.wandb is not None:
            self.wandb.log(row, step=row["step"])

    def close(self, code: int = 0) -> None:
        """code: the run's exit code, which wandb shows as success or failure."""
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=code)


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl in order, without an incomplete last one, as a kill may leave it.
    InputError names any other line that is not a row.
    """
    lines = path.read_bytes() if path.exists() else b""
    return parse_lines(path, lines.rpartition(b"\n")[0], Row)


def read_metrics(path: Path) -> tuple[list[dict], list[dict]]:
    """(training rows, evaluation rows) of a metrics.jsonl, in order."""
    rows = read_rows(Path(path))
    return [row for row in rows if "train_loss" in row], [row for row in rows if "val_bpb" in row]


def summarize(rows: list[dict], val_bpb: float, steps: int, tokens: int, runtime: Runtime) -> dict:
    """The figures of a run; None for one that metrics.jsonl does not have. rows: its training rows there."""

    def figure(statistic, key, digits=None, of=rows):
        values = [row[key] for row in of if row.get(key) is not None]
        return round(statistic(values), digits) if values else None

    return {
        "val_bpb": round(val_bpb, 4),
        "train_loss": figure(statistics.fmean, "train_loss", 4, rows[-20:]),
        "steps": steps,
        "tokens": tokens,
        "seconds": figure(lambda milliseconds: sum(milliseconds) / 1000, "step_ms", 1),
        "tokens_per_second": figure(statistics.median, "tokens_per_second"),
        "optimizer_ms": figure(statistics.median, "optimizer_ms", 1),
        "peak_memory_mb": peak_memory_mb(runtime.device),
    }


def plot_run(metrics, image) -> None:
    """Plot the losses in a metrics.jsonl over tokens as a PNG that is legible at a README's width."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    training, evaluation = read_metrics(metrics)
    # The loss falls steeply at first: leave room for the rest of the curve
    training = training[len(training) // 30 :]
    figure = Figure(figsize=(9, 3.6), dpi=200, layout="constrained")
    loss, bpb = figure.subplots(1, 2)
    loss.plot([row["tokens"] for row in training], [row["train_loss"] for row in training], linewidth=0.8)
    loss.set(title="Training loss", ylabel="nats per token")
    bpb.plot([row["tokens"] for row in evaluation], [row["val_bpb"] for row in evaluation], marker="o")
    bpb.set(title="Validation", ylabel="bits per byte")
    for axis in (loss, bpb):
        axis.set_xlabel("tokens trained on")
        axis.locator_params(axis="x", nbins=5)
        axis.grid(alpha=0.3)
    # A name may contain dollar signs
    figure.suptitle(Path(metrics).resolve().parent.name, parse_math=False)
    with write_whole(image) as file:
        figure.savefig(file, format="png")


def write_report(
    folder: Path, about: str, summary: dict, samples: list[str], core: dict | None = None
) -> None:
    """Draw loss.png from the metrics.jsonl in a run's folder, and write report.md, which shows it.

    about: a line about the model and its texts. summary: the run's figures. samples: generated texts. core:
    what core.evaluate returns, or None.
    """
    plot_run(folder / "metrics.jsonl", folder / "loss.png")
    name = folder.resolve().name
    figures = [(key, value) for key, value in summary.items() if value is not None]
    parts = [
        f"# {name}",
        f"{about}. Machine: {machine_description()}.",
        "## Results\n\n" + markdown_table([("", "value"), *figures]),
        "`val_bpb`: bits per byte on the whole validation set. `train_loss`: nats per token, the mean of the "
        "last 20 steps. `seconds`: of all training steps, without evaluations.",
        "![Training loss and validation bits per byte over tokens](loss.png)",
    ]
    if core is not None:
        accuracies = [(label, f"{task['accuracy']:.4f}") for label, task in core["tasks"].items()]
        table = markdown_table([("task", "accuracy"), *accuracies])
        parts.append(f"## CORE\n\n{as_line(core)}\n\n{table}")
    parts += [
        "## Samples",
        *(f"Sample {number}:\n\n" + indent(sample, "    ") for number, sample in enumerate(samples, 1)),
        "## Use it",
        f"    python -m scripts.sample --seed 4 --run {shlex.quote(name)}",
        "`model.safetensors` and `config.json` are the model; opening them runs no code.",
        "`settings.json` records the run's settings, which data it read, and the versions.",
    ]
    write_text(folder / "report.md", printable("\n\n".join(parts)) + "\n")


def peak_memory_mb(device: torch.device) -> int:
    """The peak memory of this process in MiB: on its GPU, or in total if it computes on CPUs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most >> 20 if sys.platform == "darwin" else most >> 10  # bytes there, else kilobytes


def machine_description() -> str:
    """Processor, GPUs and versions in a line, like "2 x AMD EPYC, no GPU, torch 2.13.0, Python 3.11.7"."""
    cpu_info = Path("/proc/cpuinfo")
    named = re.search("model name.*: (.*)", cpu_info.read_text()) if cpu_info.exists() else None
    processor = named[1] if named else platform.machine()
    count = torch.cuda.device_count()
    graphics = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU"
    return (
        f"{cores()} x {processor}, {graphics}, torch {torch.__version__}, Python {platform.python_version()}"
    )


def markdown_table(lines: list) -> str:
    """Lines of cells, the first one a header, as a Markdown table with aligned columns."""
    rows = []
    for line in lines:
        rows.append([str(cell).replace("|", "\\|") for cell in line])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    text = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def print_summary(summary: dict) -> None:
    print0("---\n" + "\n".join(f"{key}: {value}" for key, value in summary.items()))
