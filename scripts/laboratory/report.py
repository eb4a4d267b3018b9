"""The results of a race in words and a picture.

Results are {contender: its runs}, see race.train. Contenders may lack seeds: two are compared over the seeds
that both have.
"""

import math
import statistics

import numpy as np

from nanomuon.runtime import InputError, write_text
from scripts.laboratory import significance

NOTE = """± is the standard error over seeds. Differences are taken seed by seed; their 95% intervals also use
the deviations of the other contenders, as a few seeds hardly show their own. "Better" and "worse" are
corrected for the number of comparisons (Benjamini and Hochberg): at most 5% of them are expected to be wrong,
and so a difference may be "not distinguishable" although its own interval leaves out zero. The lowest of many
means was lucky as well, so its lead is overstated a little. "Steps to" is where the mean curve reaches the
baseline's final loss; its seconds are of training steps alone."""


def score(run):
    """The score of a run, infinite if it diverged."""
    value = run["score"]
    return value if value is not None and math.isfinite(value) else math.inf


def scores_by_seed(results):
    """{contender: {seed: score}}."""
    scores = {}
    for name, runs in results.items():
        scores[name] = {run["seed"]: score(run) for run in runs}
    return scores


def curve(run):
    """(points, 2) of a run: step, and loss on a part of the validation set, corrected to that on all of it.

    The difference between the two is known at some steps and interpolated between them.
    """
    steps, part, whole = np.array(run["curve"], dtype=float).T
    known = ~np.isnan(whole)
    loss = part
    if known.any():
        loss = part + np.interp(steps, steps[known], (whole - part)[known])
    return np.stack([steps, loss], axis=1)


def mean_curve(runs):
    """(points, 2): (step, mean loss) of runs of one length."""
    return np.mean([curve(run) for run in runs], axis=0)


def judged(results, baseline):
    """{name: (Difference to the baseline, p adjusted for the number of comparisons)} of those that have not
    diverged.
    """
    if not all(math.isfinite(score(run)) for run in results[baseline]):
        raise InputError(
            f"the baseline {baseline} diverged: lower its rates, or correct its rule, or put another first"
        )
    compared = significance.differences(scores_by_seed(results), baseline)
    ps = significance.benjamini_hochberg([difference.p for difference in compared.values()])
    judgements = {}
    for (name, difference), p in zip(compared.items(), ps, strict=True):
        judgements[name] = difference, p
    return judgements


def table(results, baseline, unit):
    """A row for each contender as text, the lowest mean first, those that diverged last."""
    compared = judged(results, baseline)
    target = mean_curve(results[baseline])[-1, 1]
    header = ["contender", "seeds", unit, f"against {baseline}", f"steps to {target:.4f}"]
    lines = [[*header, "step ms", "optimizer ms"]]
    expected = significance.expected_means(scores_by_seed(results))
    for name in sorted(results, key=lambda name: expected.get(name, math.inf)):
        runs, cells = results[name], ["", diverged(results[name]), ""]
        if name in expected:
            verdict = significance.verdict(*compared[name]) if name in compared else ""
            cells = [mean_text(expected[name], runs), verdict, steps_to(runs, target)]
        times = [f"{statistics.median(run[key] for run in runs):.1f}" for key in ("step_ms", "optimizer_ms")]
        lines.append([name, len(runs), *cells, *times])
    return columns(lines)


def mean_text(mean, runs):
    """The mean over all seeds of the race, and the standard error over those that were run."""
    if len(runs) < 2:
        return f"{mean:.4f}"
    error = statistics.stdev(run["score"] for run in runs) / math.sqrt(len(runs))
    return f"{mean:.4f} ± {error:.4f}"


def steps_to(runs, target):
    """Steps and seconds until the mean curve reaches a loss; "-" if it does not."""
    steps = significance.crossing(mean_curve(runs).tolist(), target)
    if steps is None:
        return "-"
    return f"{steps:.0f} ({steps * statistics.median(run['step_ms'] for run in runs) / 1000:.0f} s)"


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


def write_report(folder, results, text, unit):
    """race.md, with this text, and race.png."""
    plot_race(results, unit, folder / "race.png")
    write_text(folder / "race.md", f"# {folder.name}\n\n{text}\n\n![Validation curves](race.png)\n")


def plot_race(results, unit, image):
    """Validation curves, the mean over seeds of each contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = max(4.5, 0.2 * len(results))
    with matplotlib.rc_context({"text.parse_math": False}):  # a name may have any characters, dollars too
        figure, axes = pyplot.subplots(figsize=(13, height), layout="constrained")
        for name, runs in results.items():
            points = mean_curve(runs)
            steps, losses = points[len(points) // 4 :].T  # without the steep beginning
            axes.plot(steps, losses, label=f"{name}  {losses[-1]:.4f}")
        axes.set(title="validation loss, mean over seeds", xlabel="step", ylabel=unit)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(image, dpi=120)
        pyplot.close(figure)
