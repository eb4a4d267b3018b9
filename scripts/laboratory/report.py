"""The results of a race in words and a picture.

Results are {contender: its runs}, see race.train; contenders may lack seeds, and are compared over those that
both have.
"""

import math
import statistics as means

import numpy as np

from nanomuon.runtime import InputError, write_text
from scripts.laboratory import statistics

NOTE = """Differences are taken seed by seed. Each interval is its own; what is called better or worse is
corrected for the number of comparisons: 5% at most of them are expected not to be (Benjamini and Hochberg).
p of the best: of being as good as it, corrected for its choice among all; chosen by its mean it was lucky as
well, so its lead is overstated a little. At equal seconds is an estimate: what the baseline would gain in the
additional time of a contender with longer steps is added."""


def score(run):
    """Of a run; a diverged one counts as infinite."""
    value = run["score"]
    return value if value is not None and math.isfinite(value) else math.inf


def scores_by_seed(results):
    """{contender: {seed: score}}."""
    scores = {}
    for name, runs in results.items():
        scores[name] = {run["seed"]: score(run) for run in runs}
    return scores


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


def slope_of_length(runs):
    """d(loss) / d(ln steps), positive if longer training helps, from the best runs of the two largest
    lengths: near the full length, where the slope is used. None if that cannot be told.
    """
    best = {}
    for run in runs:
        best[run["steps"]] = min(score(run), best.get(run["steps"], math.inf))
    if len(best) < 2:
        return None
    shorter, longer = sorted(best)[-2:]
    slope = (best[shorter] - best[longer]) / math.log(longer / shorter)
    return slope if 0 < slope < math.inf else None


def relative_step(runs):
    """Time of a step in units of its forward and backward pass.

    All contenders of a race have these passes in common, so the ratio of two contenders' relative steps is
    that of their steps; other work on the machine, which is not the same for all runs, falls out.
    """
    return means.median(run["step_ms"] / (run["step_ms"] - run["optimizer_ms"]) for run in runs)


def at_equal_seconds(difference, runs, of_reference, slope):
    """Estimate of a difference at equal training seconds, from one at equal steps.

    In the time of a contender whose steps take longer the reference makes more steps, and gains by `slope`,
    the loss per unit of ln(steps), see slope_of_length. Neither evaluation nor compilation is counted.
    """
    return difference + slope * math.log(relative_step(runs) / relative_step(of_reference))


def differences(results, baseline):
    """{name: statistics.Difference} to the baseline of those whose runs have all stayed finite."""
    if not all(math.isfinite(score(run)) for run in results[baseline]):
        raise InputError(
            f"the baseline {baseline} diverged: lower its learning rates, or put another contender first"
        )
    return statistics.differences(scores_by_seed(results), baseline)


def judged(results, baseline):
    """{name: (Difference to the baseline, p adjusted for the number of comparisons)}."""
    compared = differences(results, baseline)
    ps = statistics.benjamini_hochberg([difference.p for difference in compared.values()])
    return dict(zip(compared, zip(compared.values(), ps, strict=True), strict=True))


def table(results, baseline, unit, slope=None):
    """A row for each contender as text, the lowest mean first, those that diverged last."""
    of_baseline = results[baseline]
    compared = judged(results, baseline)
    target = means.fmean(run["score"] for run in of_baseline)
    header = ["contender", "seeds", unit, f"against {baseline}", "at equal seconds", "p of the best"]
    lines = [[*header, f"steps to {target:.4f}", "step ms", "optimizer ms"]]
    ranks = {rank.name: rank for rank in statistics.ranking(scores_by_seed(results))}
    for name in [*ranks, *(name for name in results if name not in ranks)]:
        runs, cells = results[name], ["", diverged(results[name]), "", "", ""]
        if name in ranks:
            verdict, estimate = "", ""
            if name in compared:
                difference, p = compared[name]
                verdict = statistics.verdict(difference, p)
                if slope is not None:
                    estimate = f"{at_equal_seconds(difference.mean, runs, of_baseline, slope):+.4f}"
            best = ranks[name].difference is None
            p_best = "the best" if best else f"{ranks[name].p:.4f}"
            cells = [mean_text(ranks[name], runs), verdict, estimate, p_best, steps_to(runs, target)]
        times = [f"{means.median(run[key] for run in runs):.1f}" for key in ("step_ms", "optimizer_ms")]
        lines.append([name, len(runs), *cells, *times])
    return columns(lines)


def mean_text(rank, runs):
    """The mean over all seeds of the race, and the standard error over those that it ran."""
    if len(runs) < 2:
        return f"{rank.mean:.4f}"
    error = means.stdev(run["score"] for run in runs) / math.sqrt(len(runs))
    return f"{rank.mean:.4f} ± {error:.4f}"


def steps_to(runs, target):
    """Mean steps, and seconds, to a loss; "-" if a run does not reach it."""
    reached = [statistics.crossing(curve(run), target) for run in runs]
    if None in reached:
        return "-"
    steps = means.fmean(reached)
    return f"{steps:.0f} ({steps * means.median(run['step_ms'] for run in runs) / 1000:.0f} s)"


def diverged(runs):
    seeds = ", ".join(str(run["seed"]) for run in runs if not math.isfinite(score(run)))
    return f"diverged with seed {seeds}"


def columns(lines):
    """Lines of cells, the first a header, as a Markdown table whose columns are as wide as their cells."""
    lines = [list(map(str, line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    rows = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def write_report(folder, results, text, unit, baseline):
    """race.md, with this text, and race.png."""
    plot_race(results, baseline, unit, folder / "race.png")
    picture = "![Curves, and differences to the baseline](race.png)"
    write_text(folder / "race.md", f"# {folder.name}\n\n{text}\n\n{picture}\n")


def plot_race(results, baseline, unit, image):
    """Validation curves, and beside them the differences to the baseline with their 95% intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = max(4.5, 1 + 0.3 * len(results))
    with matplotlib.rc_context({"text.parse_math": False}):  # a name may have any characters, dollars too
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, height), layout="constrained")
        for name, runs in results.items():
            points = np.array([curve(run) for run in runs])  # (runs, points, 2)
            losses = points[:, :, 1].mean(axis=0)
            left.plot(points[0, :, 0], losses, label=f"{name}  {losses[-1]:.4f}")
        last = [curve(run)[len(run["curve"]) // 4][1] for runs in results.values() for run in runs]
        lowest = [score(run) for runs in results.values() for run in runs]
        if all(map(math.isfinite, last + lowest)):
            left.set_ylim(min(lowest) - 0.01, max(last) + 0.01)  # the first steps fall steeply
        left.set(title="validation loss, mean over seeds", xlabel="step", ylabel=unit)
        left.legend(fontsize=7)
        draw_forest(right, results, baseline, unit)
        figure.savefig(image, dpi=120)
        pyplot.close(figure)


def draw_forest(axis, results, baseline, unit):
    """A row for each contender that did not diverge: its difference to the baseline and the 95% interval."""
    compared = differences(results, baseline)
    ranks = statistics.ranking(scores_by_seed(results))
    names = [rank.name for rank in ranks]
    for row, name in enumerate(names):
        if name in compared:
            difference = compared[name]
            half = difference.high - difference.mean
            error = half if math.isfinite(half) else 0
            axis.errorbar([difference.mean], [row], xerr=[error], fmt="o", capsize=3, color="C0")
    axis.axvline(0, color="black", linewidth=1)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set(title=f"difference from {baseline}, 95% interval", xlabel=f"{unit} (left is better)")
