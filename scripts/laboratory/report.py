"""The results of a race in words and a picture.

Results are {contender: its runs}, see race.train; contenders may lack seeds, and are compared over those that
both have.
"""

import math
import statistics as means

import numpy as np

from nanomuon.runtime import InputError, write_text
from scripts.laboratory import statistics

DETECT = 0.01  # the table says how many seeds would show this difference


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


def median_ms(runs, key="step_ms"):
    return means.median(run[key] for run in runs)


def slope_of_length(runs):
    """d(loss) / d(ln steps), positive if longer training helps, from runs of several lengths; or None.

    runs: of one contender or variants of it, each with `steps`. Those of one variant at the two largest
    lengths are compared: near the full length, where the slope is used.
    """
    lengths = sorted({run["steps"] for run in runs})
    if len(lengths) < 2:
        return None
    shorter, longer = lengths[-2:]
    found = {}
    for run in runs:
        if math.isfinite(score(run)):
            found[run["contender"], run["steps"]] = run["score"]
    slopes = []
    for name in {run["contender"] for run in runs}:
        if (name, shorter) in found and (name, longer) in found:
            slopes.append((found[name, shorter] - found[name, longer]) / math.log(longer / shorter))
    if not slopes or means.fmean(slopes) <= 0:
        return None
    return means.fmean(slopes)


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
    """A row for each contender. Seconds are steps times the median step."""
    compared = differences(results, baseline)
    target = means.fmean(run["score"] for run in results[baseline])
    header = ["contender", "seeds", unit, "+-", "difference", "95% interval", "at equal seconds"]
    lines = [[*header, f"seeds for {DETECT:g}", f"steps to {target:.4f}", "step ms", "optimizer ms"]]
    for name, runs in results.items():
        cells = ["diverged", "", "", "", "", ""]
        if name == baseline:
            cells = [*mean_cells(runs), "baseline", "", "", ""]
        elif name in compared:
            estimate = ""
            if slope is not None:
                of_baseline = results[baseline]
                estimate = f"{at_equal_seconds(compared[name].mean, runs, of_baseline, slope):+.4f}"
            mean, interval, needed = difference_cells(compared[name], len(compared))
            cells = [*mean_cells(runs), mean, interval, estimate, needed]
        times = [f"{median_ms(runs):.0f}", f"{median_ms(runs, 'optimizer_ms'):.1f}"]
        lines.append([name, len(runs), *cells, steps_to(runs, target), *times])
    text = columns(lines)
    if slope is not None:
        text += (
            f"\n(at equal seconds: an estimate, difference + {slope:.4f} x ln(ratio of the steps' times), "
            "what the baseline would gain in the additional time)"
        )
    return text


def mean_cells(runs):
    mean, error = statistics.mean_and_error([run["score"] for run in runs])
    return [f"{mean:.4f}", "" if math.isnan(error) else f"{error:.4f}"]


def difference_cells(difference, comparisons):
    """Its mean, its interval, and the seeds that would show a difference of DETECT."""
    mean = f"{difference.mean:+.4f}"
    if math.isnan(difference.deviation):
        return [mean, "", ""]
    # several comparisons share the rate of false discoveries; the first found has to be below this
    needed = statistics.seeds_needed(difference.deviation, DETECT, alpha=0.05 / comparisons)
    return [mean, interval_text(difference), needed]


def interval_text(difference):
    return f"{difference.low:+.4f} to {difference.high:+.4f}"


def steps_to(runs, target):
    """Mean steps, and seconds, to a loss; "-" if a run does not reach it."""
    reached = [statistics.crossing(curve(run), target) for run in runs]
    if None in reached:
        return "-"
    steps = means.fmean(reached)
    return f"{steps:.0f} ({steps * median_ms(runs) / 1000:.0f} s)"


def verdicts(results, baseline):
    compared = judged(results, baseline)
    lines = []
    for name, runs in results.items():
        if name in compared:
            lines.append(f"{name}: {statistics.verdict(*compared[name])}")
        elif name != baseline:
            lines.append(f"{name}: {diverged(runs)}")
    if len(compared) > 1:
        lines.append(
            f"({len(compared)} comparisons with {baseline}: of those called different, 5% at most are "
            "expected not to be (Benjamini and Hochberg); each interval is its own)"
        )
    return "\n".join(lines)


def diverged(runs):
    seeds = ", ".join(str(run["seed"]) for run in runs if not math.isfinite(score(run)))
    return f"diverged with seed {seeds}"


def ranking(results, unit):
    """All contenders from the best on, each compared with the best, see statistics.ranking; as text."""
    ranks = statistics.ranking(scores_by_seed(results))
    if not ranks:
        return "Ranking: all contenders diverged"
    lines = [["", "contender", "seeds", unit, "from the best", "95% interval", "p", "verdict"]]
    for place, rank in enumerate(ranks, 1):
        difference, interval, p = "best", "", ""
        if rank.difference is not None:
            difference = f"{rank.difference.mean:+.4f}"
            if rank.difference.seeds > 1:
                interval, p = interval_text(rank.difference), f"{rank.p:.4f}"
        seeds = len(results[rank.name])
        lines.append(
            [place, rank.name, seeds, f"{rank.mean:.4f}", difference, interval, p, rank_verdict(rank)]
        )
    for name, runs in results.items():
        if name not in {rank.name for rank in ranks}:
            lines.append(["-", name, len(runs), "", "", "", "", diverged(runs)])
    return (
        "Ranking\n"
        + columns(lines)
        + "\np: of being as good as the best, corrected for its choice among all "
        "and for all comparisons (false discovery rate 5%).\nThe best was chosen by its mean and so was "
        "lucky as well: its lead is overstated a little, in the intervals too."
    )


def rank_verdict(rank, alpha=0.05):
    if rank.difference is None:
        return "the best"
    if rank.difference.seeds < 2:
        return "one seed: cannot tell"
    if rank.p < alpha:
        return "worse than the best"
    return "not distinguishable from the best"


def columns(lines):
    """Lines of cells as text, every column as wide as its widest cell."""
    lines = [list(map(str, line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)


def write_report(folder, results, parts, unit, baseline):
    """race.md, with these texts, and race.png."""
    plot_race(results, baseline, unit, folder / "race.png")
    blocks = [f"```\n{part}\n```" for part in parts]
    picture = "![Curves, and differences to the baseline](race.png)"
    write_text(folder / "race.md", "\n\n".join([f"# {folder.name}", *blocks, picture]) + "\n")


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
