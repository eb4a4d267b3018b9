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
import statistics
from pathlib import Path

import torch

from nanomuon.files import as_kind, parse_json, read_json, write_text, write_whole
from nanomuon.runtime import Runtime, cores, peak_memory_mb, print0, printable


class MetricsLog:
    """Appends rows to metrics.jsonl, one JSON object a line, each whole even if the process dies after it.

    path: the file. resume_step: None starts it empty; otherwise it keeps the steps up to this one, and the
    evaluations before it: those of this step are made again. wandb: None, or keywords of wandb.init (project,
    name, config, id); WANDB_MODE=offline needs no network. Only the first rank makes one.
    """

    def __init__(self, path: Path, resume_step: int | None = None, wandb: dict | None = None):
        kept = []
        for row in read_rows(path) if resume_step is not None else []:
            if row["step"] < resume_step or (row["step"] == resume_step and "train_loss" in row):
                kept.append(json.dumps(row) + "\n")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(kept))
        self.file = path.open("ab", buffering=0)
        self.wandb = None
        if wandb is not None:
            import wandb as library

            self.wandb = library.init(dir=path.parent, resume="allow", **wandb)

    def log(self, row: dict) -> None:
        """row: a dict with `step`, values numbers; not finite ones are written as null, as JSON has none."""
        finite = {key: None if _non_finite(value) else value for key, value in row.items()}
        self.file.write(json.dumps(finite).encode() + b"\n")
        if self.wandb is not None:
            self.wandb.log(row, step=row["step"])

    def close(self) -> None:
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl in order; a line that a kill has torn, or that is damaged, is left out."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            row = as_kind(parse_json(line), dict)
            if type(row.get("step")) is int and type(row.get("tokens")) is int:
                rows.append(row)
    return rows


def read_metrics(path: Path) -> tuple[list[dict], list[dict]]:
    """(training rows, evaluation rows) of a metrics.jsonl, in order."""
    rows = read_rows(Path(path))
    training = [row for row in rows if "train_loss" in row]
    evaluation = [row for row in rows if "val_bpb" in row]
    return training, evaluation


def summarize(rows: list[dict], val_bpb: float, steps: int, tokens: int, runtime: Runtime) -> dict:
    """The figures of a run. rows: its training rows of metrics.jsonl."""
    recent = [row["train_loss"] for row in rows[-20:] if row["train_loss"] is not None]
    return {
        "val_bpb": round(val_bpb, 4),
        "train_loss": round(statistics.fmean(recent), 4) if recent else None,
        "steps": steps,
        "tokens": tokens,
        "seconds": round(sum(row["step_ms"] for row in rows) / 1000, 1),
        "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in rows)),
        "optimizer_ms": round(statistics.median(row["optimizer_ms"] for row in rows), 1),
        "peak_memory_mb": peak_memory_mb(runtime.device),
        "dtype": runtime.dtype_name,
    }


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


def write_report(
    folder: Path, summary: dict, samples: list[str], core: tuple[str, dict] | None = None
) -> None:
    """Draw loss.png and write report.md, which shows it, from what lies in a run's folder.

    summary: its figures. samples: generated texts. core: None, or its line and its tasks, see core.evaluate.
    """
    plot_run(folder / "metrics.jsonl", folder / "loss.png")
    name = folder.resolve().name
    settings = read_json(folder / "settings.json")
    usage = (
        f"python -m scripts.sample --run {shlex.quote(name)}      # more text\n"
        f"python -m scripts.base_eval --run {shlex.quote(name)}   # evaluate again"
    )
    parts = [
        f"# {name}",
        f"Trained on {machine_description()}.",
        "## Results\n\n" + markdown_table(("", "value"), summary),
        "![Training loss, validation bits per byte, learning rate and throughput over tokens](loss.png)",
    ]
    if core is not None:
        line, tasks = core
        accuracies = {label: f"{task['accuracy']:.4f}" for label, task in tasks.items()}
        parts.append(f"## CORE\n\n{line}\n\n" + markdown_table(("task", "accuracy"), accuracies))
    parts += [
        "## Samples\n\n" + "\n\n".join(fenced(sample) for sample in samples),
        "## Use it\n\n" + fenced(usage),
        "`model.safetensors` and `config.json` are the model; opening them runs no code.",
        "## Settings\n\n" + markdown_table(("setting", "value"), settings["options"]),
        "## Trained on, and with\n\n"
        + markdown_table(("", ""), settings["trained_on"] | settings["trained_with"]),
    ]
    write_text(folder / "report.md", printable("\n\n".join(parts)) + "\n")


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


def markdown_table(header: tuple[str, str], values: dict) -> str:
    """{name: value} as a Markdown table, without what is None."""
    lines = []
    for name, value in (header, ("---", "---"), *values.items()):
        if value is not None:
            text = str(value).replace("|", "\\|")
            lines.append(f"| {name} | {text} |")
    return "\n".join(lines)


def fenced(text):
    """A fenced block that no backticks inside can end: the fence is longer than any run of them."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def print_summary(summary: dict) -> None:
    print0("---\n" + "\n".join(f"{key}: {value}" for key, value in summary.items()))
