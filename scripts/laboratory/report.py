"""The results of a race as text and as a picture.

Results are {contender: its runs}, one per seed, see race.train.
"""

import math
from statistics import mean, median

import numpy as np
from scipy import stats

from nanomuon.report import markdown_table
from nanomuon.runtime import InputError
from scripts.laboratory import significance

NOTE = """± is the standard error over seeds. Differences are taken seed by seed. Their 95% intervals also use
the deviations of the other contenders, because a few seeds estimate a contender's own poorly. "Better" and
"worse" are corrected for the number of comparisons (Benjamini and Hochberg): at most 5% of these verdicts are
expected to be wrong, so a difference may be "not distinguishable" although its own interval excludes zero.
The lowest of many means owes part of its lead to luck."""


def score(run):
    """The score of a run, infinite if it diverged."""
    value = run["score"]
    return value if value is not None and math.isfinite(value) else math.inf


def judged(results, baseline):
    """{name: its significance.Difference to the baseline} of the contenders that have not diverged."""
    scores = {}
    for name, runs in results.items():
        scores[name] = [score(run) for run in runs]
    scores = {name: each for name, each in scores.items() if all(map(math.isfinite, each))}
    if baseline not in scores:
        raise InputError(
            f"the baseline {baseline} diverged: lower its rates, correct its rule, or put another one first"
        )
    return significance.differences(scores, baseline)


def table(results, baseline, unit):
    """A text table with a row for each contender, the lowest mean first, diverged ones last."""
    compared = judged(results, baseline)
    lines = [["contender", "seeds", unit, f"against {baseline}", "step ms", "optimizer ms"]]
    for name, runs in sorted(results.items(), key=lambda item: mean(map(score, item[1]))):
        verdict = ""
        if name in compared:
            verdict = significance.verdict(compared[name])
            if list(map(score, runs)) == list(map(score, results[baseline])):
                verdict = "exactly the same scores: it changes nothing"
        elif name != baseline:
            seeds = [str(run["seed"]) for run in runs if score(run) == math.inf]
            verdict = f"diverged with seed {', '.join(seeds)}"
        line = [name, len(runs), mean_text([score(run) for run in runs]), verdict]
        for key in ("step_ms", "optimizer_ms"):
            line.append(f"{median(run[key] for run in runs):.1f}")
        lines.append(line)
    return markdown_table(lines)


def mean_text(scores):
    """The mean and its standard error."""
    if len(scores) < 2 or math.inf in scores:
        return f"{mean(scores):.4f}"
    return f"{mean(scores):.4f} ± {stats.sem(scores):.4f}"


def plot_race(results, baseline, unit, image):
    """Plot each contender's mean validation curve over seeds, and the differences with their intervals."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    size = 18, max(4.5, 0.2 * len(results))
    with rc_context({"text.parse_math": False}):  # a name may contain dollar signs
        figure = Figure(figsize=size, layout="constrained")
        curves, forest = figure.subplots(1, 2)
        for name, runs in results.items():
            points = np.mean([np.array(run["curve"], dtype=float) for run in runs], axis=0)
            curves.plot(*points[len(points) // 4 :].T, label=name)  # without the steep start
        curves.set(title="loss on a part of the validation set, mean over seeds", xlabel="step", ylabel=unit)
        curves.legend(fontsize=7)
        for name, difference in reversed(judged(results, baseline).items()):
            half = difference.half if math.isfinite(difference.half) else 0
            forest.errorbar(difference.mean, name, xerr=half, fmt="o", color="black", capsize=3)
        forest.axvline(0, color="gray")
        forest.set(title=f"difference from {baseline}, 95% interval", xlabel=unit)
        figure.savefig(image, dpi=120)
