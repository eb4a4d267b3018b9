"""The results of a race in words and pictures. Results are {contender: its runs}, see race.train."""

import math
import statistics

import numpy as np

from nanomuon import compare, report
from nanomuon.runtime import InputError, write_text


def write_report(folder, results, parts, unit):
    """race.md and race.png."""
    curves = {}
    for name, runs in results.items():
        curves[name] = [curve(run) for run in runs]
    plot_race(curves, unit, folder / "race.png")
    blocks = [f"```\n{part}\n```" for part in parts]
    text = "\n\n".join([f"# {folder.name}", *blocks, "![curves](race.png)"])
    write_text(folder / "race.md", text + "\n")


def score(run):
    """Of a run; a diverged one counts as infinite."""
    return run["score"] if math.isfinite(run["score"]) else math.inf


def curve(run):
    """[(step, loss)] of a run: the loss over a part of the validation set, corrected to that over all of it.

    What the whole differs from the part is known now and then, and interpolated between.
    """
    steps, part, whole = np.array(run["curve"], dtype=float).T
    known = ~np.isnan(whole)
    loss = part
    if known.any():
        loss = part + np.interp(steps, steps[known], (whole - part)[known])
    return list(zip(steps.tolist(), loss.tolist(), strict=True))


def differences(results, baseline):
    """{name: compare.Difference} to the baseline of those whose runs have all stayed finite."""
    of_baseline = list(map(score, results[baseline]))
    if not all(map(math.isfinite, of_baseline)):
        raise InputError(
            f"the baseline {baseline} diverged: lower its learning rates or choose another --baseline"
        )
    compared = {}
    for name, runs in results.items():
        scores = list(map(score, runs))
        if name != baseline and all(map(math.isfinite, scores)):
            compared[name] = compare.paired_difference(scores, of_baseline)
    return compared


def table(results, baseline, targets, detect, unit):
    """Seconds are steps times the median step: neither evaluation nor compilation is in them."""
    compared = differences(results, baseline)
    header = ["contender", "seeds", unit, "+-", "difference", "95% interval", f"seeds for {detect:g}"]
    header += [f"steps to {target:g}" for target in targets]
    header += ["step ms", "optimizer ms"]
    lines = [header]
    for name, runs in results.items():
        if name == baseline:
            cells = mean_cells(runs) + ["baseline", "", ""]
        elif name in compared:
            cells = mean_cells(runs) + difference_cells(compared[name], detect, len(compared))
        else:
            cells = ["diverged", "", "", "", ""]
        step_ms = statistics.median(run["step_ms"] for run in runs)
        optimizer_ms = statistics.median(run["optimizer_ms"] for run in runs)
        reached = [steps_to(runs, target, step_ms) for target in targets]
        lines.append([name, len(runs), *cells, *reached, f"{step_ms:.0f}", f"{optimizer_ms:.1f}"])
    return columns(lines)


def mean_cells(runs):
    mean, error = compare.mean_and_error([run["score"] for run in runs])
    return [f"{mean:.4f}", "" if math.isnan(error) else f"{error:.4f}"]


def difference_cells(difference, detect, comparisons):
    """Its mean, its interval, and the seeds that would show a difference of `detect`."""
    mean = f"{difference.mean:+.4f}"
    if math.isnan(difference.deviation):
        return [mean, "", ""]
    # several comparisons share the rate of false alarms; Holm's correction asks at most this of each
    needed = compare.seeds_needed(difference.deviation, detect, alpha=0.05 / comparisons)
    return [mean, f"{difference.low:+.4f} to {difference.high:+.4f}", needed]


def steps_to(runs, target, step_ms):
    """Mean steps, and seconds, to a loss; "-" where a run does not reach it."""
    reached = [compare.crossing(curve(run), target) for run in runs]
    if None in reached:
        return "-"
    steps = statistics.fmean(reached)
    return f"{steps:.0f} ({steps * step_ms / 1000:.0f} s)"


def verdicts(results, baseline):
    compared = differences(results, baseline)
    ps = compare.holm([difference.p for difference in compared.values()])
    adjusted = dict(zip(compared, ps, strict=True))
    lines = []
    for name, runs in results.items():
        if name in compared:
            lines.append(f"{name}: {compare.verdict(compared[name], adjusted[name])}")
        elif name != baseline:
            seeds = ", ".join(str(run["seed"]) for run in runs if not math.isfinite(run["score"]))
            lines.append(f"{name}: diverged with seed {seeds}")
    if len(compared) > 1:
        lines.append(
            f"({len(compared)} comparisons with {baseline}: Holm's correction decides, "
            "each interval is its own)"
        )
    return "\n".join(lines)


def columns(lines):
    """Lines of cells as text, every column as wide as its widest cell."""
    lines = [list(map(str, line)) for line in lines]
    widths = []
    for column in zip(*lines, strict=True):
        widths.append(max(map(len, column)))
    rows = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)


def plot_race(curves, unit, image) -> None:
    """Draw validation curves, one line a contender, into a PNG.

    curves: {name: runs}, each run a list of (step, loss) at the same steps. Line: mean over runs; band: its
    standard error.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=200, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    top, bottom = -math.inf, math.inf
    for name, runs in curves.items():
        points = np.array(runs)  # (runs, steps, 2)
        steps, losses = points[0, :, 0], points[:, :, 1]
        means = losses.mean(axis=0)
        errors = np.zeros_like(means)
        if len(runs) > 1:
            errors = losses.std(axis=0, ddof=1) / len(runs) ** 0.5
        (line,) = axis.plot(steps, means, linewidth=1.6, label=f"{name}  {means[-1]:.4f}")
        axis.fill_between(
            steps, means - errors, means + errors, color=line.get_color(), alpha=0.25, linewidth=0
        )
        later = means[(steps >= steps[-1] / 8) & np.isfinite(means)]
        top, bottom = max([top, *later]), min([bottom, *later])
    if math.isfinite(top):  # the first steps fall steeply: give the rest of the curves the room
        margin = 0.05 * (top - bottom) + 1e-3
        axis.set_ylim(bottom - margin, top + margin)
    axis.set(title="Validation loss, mean and standard error over seeds", xlabel="step", ylabel=unit)
    axis.legend(frameon=False, fontsize=9)
    report.style_axis(axis)
    report.save_figure(figure, image)
