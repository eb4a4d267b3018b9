"""What a run leaves for people: metrics.jsonl (and wandb) while it runs, loss.png and report.md at its
end.
"""

import contextlib
import itertools
import json
import math
import os
import platform
import re
import shlex
from pathlib import Path

import torch

from nanomuon.files import write_text, write_whole
from nanomuon.read_json import Flag, Number, OrNull, Record, Scalar, Whole, read_json_lines, sound_lines
from nanomuon.runtime import cores, print0, printable

FIGURE = OrNull(Number(-1e30, 1e30))  # null where it was not finite; sums of such numbers are
TIME = Number(0, 1e30)
TRAINING_ROW = Record(
    {
        "step": Whole(),
        "tokens": Whole(),
        "train_loss": FIGURE,
        "lr_multiplier": FIGURE,
        "step_ms": TIME,
        "tokens_per_second": TIME,
    },
    {"optimizer_ms": TIME},
    others=Scalar(),
)
EVALUATION_ROW = Record(
    {"step": Whole(), "tokens": Whole(), "val_bpb": FIGURE}, {"whole_set": Flag()}, others=Scalar()
)


class MetricsRow:
    """Describes a line of metrics.jsonl, see read_json."""

    def check(self, value) -> None:
        Record({"step": Whole()}, others=Scalar()).check(value)
        if "train_loss" in value:
            TRAINING_ROW.check(value)
        if "val_bpb" in value:
            EVALUATION_ROW.check(value)


class MetricsLog:
    """Appends rows to metrics.jsonl, one JSON object a line, each line whole even if the process dies after
    it. Rows for which the disk has no room wait for the next call.

    path: the file. resume_step: None starts it empty; otherwise rows of later steps and a torn last line are
    dropped, and damaged lines set aside in metrics.damaged.jsonl. wandb: None, or keywords of wandb.init
    (project, name, config, id); WANDB_MODE=offline needs no network. Only the first rank makes one.
    """

    def __init__(self, path, resume_step=None, wandb=None):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if resume_step is not None:
            kept = [row for row in sound_lines(path, MetricsRow()) if row["step"] <= resume_step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.file = path.open("ab", buffering=0)
        self.waiting = b""  # lines for which the disk had no room
        self.wandb = None
        if wandb is not None:
            import wandb as library

            self.wandb = library.init(dir=path.parent, resume="allow", **wandb)

    def log(self, row) -> None:
        """row: a dict with `step`, values numbers or text; non-finite numbers are written as null, as JSON
        has none.
        """
        finite = {key: None if _non_finite(value) else value for key, value in row.items()}
        self.waiting += json.dumps(finite).encode() + b"\n"
        with contextlib.suppress(OSError):
            self.flush()
        if self.wandb is not None:
            self.wandb.log(row, step=row["step"])

    def flush(self) -> None:
        """Write what waits. OSError where there is no room; a checkpoint must not get ahead of its rows."""
        while self.waiting:
            self.waiting = self.waiting[self.file.write(self.waiting) :]

    def close(self) -> None:
        self.flush()
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()


def read_metrics(path) -> tuple[list[dict], list[dict]]:
    """(training rows, evaluation rows) of a metrics.jsonl, in order; damaged lines are left out."""
    rows, _ = read_json_lines(path, MetricsRow())
    training = [row for row in rows if "train_loss" in row]
    evaluation = [row for row in rows if "val_bpb" in row]
    return training, evaluation


def core_steps(path) -> set[int]:
    """The steps after which a metrics.jsonl has figures of CORE."""
    rows, _ = read_json_lines(path, MetricsRow())
    return {row["step"] for row in rows if "core" in row}


def plot_run(metrics, image) -> None:
    """Draw a run's metrics.jsonl as four panels over tokens into a PNG, made to be read at a README's
    width.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no global backend, no display
    from matplotlib.figure import Figure

    training, evaluation = read_metrics(metrics)
    largest = max([row["tokens"] for row in training + evaluation], default=1)
    divisor, unit = _unit(largest)

    def curve(rows, key):
        values = [math.nan if row.get(key) is None else row[key] for row in rows]
        return [row["tokens"] / divisor for row in rows], values

    figure = Figure(figsize=(9, 5.6), dpi=200, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True, height_ratios=[1.6, 1])
    (loss, bpb), (rate, speed) = axes
    blue, orange, purple, grey = "#1f5fa8", "#c8511b", "#6b2c91", "#5a5a5a"

    tokens, values = curve(training, "train_loss")
    loss.plot(tokens, values, color=blue, alpha=0.25, linewidth=0.8, label="each step")
    loss.plot(tokens, _smooth(values), color=blue, linewidth=1.6, label="smoothed")
    loss.set(title="Training loss", ylabel="nats per token")
    loss.legend(frameon=False, labelcolor=grey, fontsize=9)
    finite = sorted(value for value in values if not math.isnan(value))
    if finite:  # the first steps fall steeply: give the rest of the curve the room
        top = finite[min(len(finite) - 1, int(0.97 * len(finite)))]
        loss.set_ylim(finite[0] - 0.05 * (top - finite[0]), top + 0.08 * (top - finite[0]) + 1e-3)

    # A line joins figures of the same text only: the beginning of the set may be easier than all of it
    on_part = [row for row in evaluation if not row.get("whole_set")]
    on_whole = [row for row in evaluation if row.get("whole_set")]
    tokens, values = curve(on_part, "val_bpb")
    bpb.plot(
        tokens, values, color=orange, linewidth=1.6, marker="o", markersize=3.5, label="first part of the set"
    )
    tokens, values = curve(on_whole, "val_bpb")
    width = 1.6 if len(values) > 1 else 0  # the legend shows no line either where there is one point
    bpb.plot(tokens, values, color=purple, linewidth=width, marker="D", markersize=4.5, label="whole set")
    bpb.set(title="Validation", ylabel="bits per byte")
    if on_part and on_whole:
        bpb.legend(frameon=False, labelcolor=grey, fontsize=9)
    tokens, values = curve(evaluation, "val_bpb")
    if values:
        bpb.annotate(
            f"{values[-1]:.3f}",
            (tokens[-1], values[-1]),
            (0, 9),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=purple if on_whole else orange,
            fontweight="bold",
        )

    tokens, values = curve(training, "lr_multiplier")
    rate.plot(tokens, values, color=grey, linewidth=1.4)
    rate.set(title="Learning rate", ylabel="multiplier", ylim=(0, None))

    tokens, values = curve(training, "tokens_per_second")
    scale, speed_unit = _unit(max([value for value in values if not math.isnan(value)], default=1))
    speed.plot(tokens, [value / scale for value in values], color=grey, linewidth=1.0)
    speed.set(title="Throughput", ylabel=f"{speed_unit}tokens/s", ylim=(0, None))

    for axis in axes.flat:
        style_axis(axis)
    for axis in axes[1]:
        axis.set_xlabel(f"{unit}tokens trained on", color=grey, fontsize=9.5)
    final = f"   validation {evaluation[-1]['val_bpb']:.4f} bits per byte" if evaluation else ""
    figure.suptitle(
        Path(metrics).resolve().parent.name + final,
        fontsize=12.5,
        fontweight="bold",
        color="#222222",
        parse_math=False,  # a name may have dollar signs
    )

    save_figure(figure, image)


def write_report(run_dir, settings, summary, samples, machine, stages, provenance=(), core=None) -> None:
    """Draw loss.png and write report.md, which shows it, from a run's metrics.jsonl and what its script
    knows.

    settings, summary: dicts printed as tables. samples: generated texts. machine: machine_description().
    stages: (name, seconds) pairs in order. provenance: (name, value) pairs, see provenance.table.
    core: None, or the line and the tasks that core.evaluate gives.
    """
    run_dir = Path(run_dir)
    plot_run(run_dir / "metrics.jsonl", run_dir / "loss.png")
    name = run_dir.resolve().name
    usage = (
        f"python -m scripts.sample --run {shlex.quote(name)}      # more text\n"
        f"python -m scripts.base_eval --run {shlex.quote(name)}   # evaluate again"
    )
    times = [(stage, f"{seconds:.1f}") for stage, seconds in stages]
    times.append(("total", f"{sum(seconds for _, seconds in stages):.1f}"))
    results = {}
    for key, value in summary.items():
        results[key] = "not measured" if value is None else value  # CORE, where its bundle was not to be had
    core_parts = []
    if core is not None:
        line, tasks = core
        rows = []
        for label, task in tasks.items():
            figures = (f"{task['accuracy']:.4f}", f"{task['centered']:.4f}", task["items"], task["seconds"])
            rows.append((label, *figures))
        header = ("task", "accuracy", "centered", "items", "seconds")
        core_parts = ["## CORE\n\n" + line, markdown_table(header, rows)]
    parts = [
        f"# {name}",
        f"Trained on {machine}.",
        "## Results\n\n" + markdown_table(("", "value"), results.items()),
        "![Training loss, validation bits per byte, learning rate and throughput over tokens](loss.png)",
        *core_parts,
        "## Samples\n\n" + "\n\n".join(fenced(sample) for sample in samples),
        "## Use it\n\n" + fenced(usage),
        "`model.safetensors` and `config.json` are the model; opening them runs no code.",
        "## Time\n\n" + markdown_table(("stage", "seconds"), times),
        "## Settings\n\n" + markdown_table(("setting", "value"), settings.items()),
    ]
    if provenance:
        parts.append("## Trained on, and with\n\n" + markdown_table(("", ""), provenance))
    write_text(run_dir / "report.md", printable("\n\n".join(parts)) + "\n")


def machine_description() -> str:
    """One line: processor, memory, GPUs, versions: "2 x AMD EPYC, 24 GB, no GPU, torch 2.13.0, Python
    3.11.7".
    """
    processor = platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    graphics = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    return (
        f"{cores()} x {processor}, {memory:.0f} GB, {graphics}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def style_axis(axis):
    grey = "#5a5a5a"
    axis.set_title(axis.get_title(), loc="left", fontsize=10.5, fontweight="bold", color="#222222")
    axis.title.set_text("")
    axis.grid(color="#e6e6e6", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#b0b0b0")
    axis.tick_params(colors=grey, labelsize=9)
    axis.yaxis.label.set(color=grey, fontsize=9.5)
    axis.margins(x=0.02)


def save_figure(figure, image):
    with write_whole(image) as file:
        figure.savefig(file, format="png")


def _non_finite(value):
    return isinstance(value, float) and not math.isfinite(value)


def _smooth(values):
    """Mean over a window of about a thirtieth of the run, centred so that it does not lag."""
    half = len(values) // 60
    finite = [0.0 if math.isnan(value) else value for value in values]
    sums = [0.0, *itertools.accumulate(finite)]  # of the first ones, so that a window costs a difference
    counts = [0, *itertools.accumulate(not math.isnan(value) for value in values)]
    smoothed = []
    for index in range(len(values)):
        reach = min(half, index)
        first, last = index - reach, min(index + reach + 1, len(values))
        count = counts[last] - counts[first]
        smoothed.append((sums[last] - sums[first]) / count if count else math.nan)
    return smoothed


def _unit(largest):
    """(divisor, word) that bring numbers up to `largest` into a readable range."""
    for divisor, word in ((1e9, "billion "), (1e6, "million "), (1e3, "thousand ")):
        if largest >= divisor:
            return divisor, word
    return 1, ""


def markdown_table(header, rows):
    """Rows of cells as a Markdown table."""
    lines = []
    for row in (header, ("---",) * len(header), *rows):
        cells = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fenced(text):
    """A fenced block that no backticks inside can end: the fence is longer than any run of them."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def print_summary(summary: dict) -> None:
    print0("---\n" + "\n".join(f"{key}: {value}" for key, value in summary.items()))
