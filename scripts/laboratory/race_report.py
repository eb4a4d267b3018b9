"""The results of a race in words and pictures. Results are {contender: its runs}, see race.train; contenders
may lack seeds, and are compared over those that both have.
"""

import collections
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanomuon import report
from nanomuon.runtime import InputError, printable, write_text
from scripts.laboratory import compare

BLUE, VERMILION = "#0072B2", "#D55E00"  # of the colours of Okabe and Ito, which the colour-blind tell apart
DARK, DIM, GREY, PALE = "#222222", "#5a5a5a", "#8c8c8c", "#c4c4c4"
COLOURS = [BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00"]  # curves of the best, beside the baseline's
DASHES = ["-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1))]  # and in grey


def write_report(folder, results, parts, unit, baseline, slope=None):
    """race.md and race.png. parts: texts for race.md; slope: see at_equal_seconds."""
    plot_race(results, baseline, unit, folder / "race.png", slope)
    blocks = [f"```\n{part}\n```" for part in parts]
    picture = "![Curves, and differences to the baseline](race.png)"
    text = "\n\n".join([f"# {folder.name}", *blocks, picture])
    write_text(folder / "race.md", text + "\n")


def score(run):
    """Of a run; a diverged one counts as infinite."""
    return run["score"] if math.isfinite(run["score"]) else math.inf


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
    return statistics.median(run[key] for run in runs)


def slope_of_length(runs):
    """d(loss) / d(ln steps), positive where longer training helps, from runs of several lengths; or None.

    runs: of one contender or variants of it, each with `steps`. Those of one variant at the two largest
    lengths are compared: near the full length, where the slope is used.
    """
    lengths = sorted({run["steps"] for run in runs})
    if len(lengths) < 2:
        return None
    shorter, longer = lengths[-2:]
    scores = collections.defaultdict(list)  # of (variant, length)
    for run in runs:
        if math.isfinite(run["score"]):
            scores[run["contender"], run["steps"]].append(run["score"])
    slopes = []
    for variant in {run["contender"] for run in runs}:
        short, long = scores[variant, shorter], scores[variant, longer]
        if short and long:
            gained = statistics.fmean(short) - statistics.fmean(long)
            slopes.append(gained / math.log(longer / shorter))
    if not slopes:
        return None
    slope = statistics.fmean(slopes)
    return slope if slope > 0 else None


def relative_step(runs):
    """Time of a step in units of its forward and backward pass.

    All contenders of a race have these passes in common, so that the ratio of two contenders' relative steps
    is that of their steps; other work on the machine, which is not the same for all runs, falls out.
    """
    return statistics.median(run["step_ms"] / (run["step_ms"] - run["optimizer_ms"]) for run in runs)


def at_equal_seconds(difference, runs, of_reference, slope):
    """Estimate of a difference at equal training seconds, from one at equal steps.

    In the time of a contender whose steps take longer the reference makes more steps, and gains by `slope`,
    the loss per unit of ln(steps), see slope_of_length. Neither evaluation nor compilation is counted.
    """
    return difference + slope * math.log(relative_step(runs) / relative_step(of_reference))


def differences(results, baseline):
    """{name: compare.Difference} to the baseline of those whose runs have all stayed finite."""
    if not all(math.isfinite(score(run)) for run in results[baseline]):
        raise InputError(
            f"the baseline {baseline} diverged: lower its learning rates or choose another --baseline"
        )
    return compare.differences(scores_by_seed(results), baseline)


def judged(results, baseline):
    """{name: (Difference to the baseline, p adjusted for the number of comparisons)}."""
    compared = differences(results, baseline)
    ps = compare.benjamini_hochberg([difference.p for difference in compared.values()])
    return dict(zip(compared, zip(compared.values(), ps, strict=True), strict=True))


def table(results, baseline, targets, detect, unit, slope=None):
    """Seconds are steps times the median step: neither evaluation nor compilation is in them."""
    compared = differences(results, baseline)
    header = ["contender", "seeds", unit, "+-", "difference", "95% interval"]
    if slope is not None:
        header.append("at equal seconds")
    header.append(f"seeds for {detect:g}")
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
        if slope is not None:
            estimate = ""
            if name in compared:
                difference = compared[name].mean
                estimate = f"{at_equal_seconds(difference, runs, results[baseline], slope):+.4f}"
            cells.insert(-1, estimate)
        step_ms = median_ms(runs)
        reached = [steps_to(runs, target, step_ms) for target in targets]
        optimizer_ms = f"{median_ms(runs, 'optimizer_ms'):.1f}"
        lines.append([name, len(runs), *cells, *reached, f"{step_ms:.0f}", optimizer_ms])
    text = columns(lines)
    if slope is not None:
        text += f"\n{slope_note(slope)}"
    return text


def slope_note(slope):
    return (
        f"(at equal seconds: an estimate, difference + {slope:.4f} x ln(ratio of the steps' times), what the "
        "baseline would gain in the additional time; steps are timed against the forward and backward pass "
        "of their own run)"
    )


def mean_cells(runs):
    mean, error = compare.mean_and_error([run["score"] for run in runs])
    return [f"{mean:.4f}", "" if math.isnan(error) else f"{error:.4f}"]


def difference_cells(difference, detect, comparisons):
    """Its mean, its interval, and the seeds that would show a difference of `detect`."""
    mean = f"{difference.mean:+.4f}"
    if math.isnan(difference.deviation):
        return [mean, "", ""]
    # several comparisons share the rate of false discoveries; the first found has to be below this
    needed = compare.seeds_needed(difference.deviation, detect, alpha=0.05 / comparisons)
    return [mean, interval(difference), needed]


def interval(difference):
    return f"{difference.low:+.4f} to {difference.high:+.4f}"


def steps_to(runs, target, step_ms):
    """Mean steps, and seconds, to a loss; "-" where a run does not reach it."""
    reached = [compare.crossing(curve(run), target) for run in runs]
    if None in reached:
        return "-"
    steps = statistics.fmean(reached)
    return f"{steps:.0f} ({steps * step_ms / 1000:.0f} s)"


def verdicts(results, baseline):
    compared = judged(results, baseline)
    lines = []
    for name, runs in results.items():
        if name in compared:
            lines.append(f"{name}: {compare.verdict(*compared[name])}")
        elif name != baseline:
            lines.append(f"{name}: {diverged(runs)}")
    if len(compared) > 1:
        lines.append(
            f"({len(compared)} comparisons with {baseline}: of those called different, 5% at most are "
            "expected not to be (Benjamini and Hochberg); each interval is its own)"
        )
    return "\n".join(lines)


def diverged(runs):
    seeds = ", ".join(str(run["seed"]) for run in runs if not math.isfinite(run["score"]))
    return f"diverged with seed {seeds}"


def ranking(results, unit, slope=None):
    """All contenders from the best on, each compared with the best, see compare.ranking; as text."""
    ranks = compare.ranking(scores_by_seed(results))
    if not ranks:
        return "Ranking: all contenders diverged"
    names = shown_names(results)
    best = ranks[0].name
    header = ["", "contender", "seeds", unit, "from the best", "95% interval"]
    if slope is not None:
        header.append("at equal seconds")
    header += ["p", "verdict"]
    lines = [header]
    for place, rank in enumerate(ranks, 1):
        runs = results[rank.name]
        cells = [place, names[rank.name], len(runs), f"{rank.mean:.4f}", *rank_cells(rank)]
        if slope is not None:
            estimate = ""
            if rank.difference is not None and rank.difference.seeds:
                shifted = at_equal_seconds(rank.difference.mean, runs, results[best], slope)
                estimate = f"{shifted:+.4f}"
            cells.append(estimate)
        lines.append([*cells, rank_p(rank), rank_verdict(rank)])
    for name, runs in results.items():
        if name not in {rank.name for rank in ranks}:
            empty = [""] * (len(header) - 4)
            lines.append(["-", names[name], len(runs), *empty, diverged(runs)])
    text = "Ranking\n" + columns(lines)
    return text + "\n" + "\n".join(ranking_notes(results, ranks, names, slope))


def rank_cells(rank):
    """Difference to the best and its interval."""
    if rank.difference is None:
        return ["best", ""]
    if rank.difference.seeds == 0:
        return ["", ""]
    mean = f"{rank.difference.mean:+.4f}"
    if rank.difference.seeds == 1:
        return [mean, ""]
    return [mean, interval(rank.difference)]


TIE = "not distinguishable from the best"


def rank_p(rank):
    if rank.difference is None or rank.difference.seeds < 2:
        return ""
    return f"{rank.p:.4f}" if rank.p >= 0.0001 else "<0.0001"


def rank_verdict(rank, alpha=0.05):
    if rank.difference is None:
        return "the best"
    if rank.difference.seeds == 0:
        return "no seed in common with the best: cannot tell"
    if rank.difference.seeds == 1:
        return "one seed: cannot tell"
    if rank.p < alpha:
        return "worse than the best"
    return TIE


def tie_sentence(ranks, names):
    best = names[ranks[0].name]
    ties = [names[rank.name] for rank in ranks if rank_verdict(rank) == TIE]
    if ties:
        return f"Not distinguishable from the best, {best}: {', '.join(ties)}."
    if len(ranks) == 1:
        return f"{best} has nobody to be compared with."
    return f"Worse than the best, {best}, are all others of which it can be told."


def ranking_notes(results, ranks, names, slope):
    """Lines below a ranking: who ties with the best, and how its figures are meant."""
    notes = [tie_sentence(ranks, names)]
    notes.append(
        "p: of being as good as the best, corrected for its choice among all and for all comparisons (false "
        "discovery rate 5%)."
    )
    notes.append(
        "The best was chosen by its mean and so was lucky as well: its lead is overstated a little, in the "
        "intervals too."
    )
    if len(set(map(len, results.values()))) > 1:
        notes.append("Means of contenders with fewer seeds are corrected for the luck of these seeds.")
    if slope is not None:
        notes.append(slope_note(slope))
    return notes


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


def shown_names(names):
    """{name: how people read it}: contenders/soap_muon.py:lr=1 is soap_muon (lr=1), where only one is."""
    shown = {}
    for name in names:
        source, _, options = name.partition(":")
        if source.endswith(".py"):
            source = Path(source).stem
        if options:
            source += f" ({options.replace(',', ', ')})"
        shown[name] = " ".join(printable(source).split())
    return distinct_or(shown, {name: name for name in names})


def short_names(names, most=34):
    """{name: as in shown_names, with at most so many characters}, for pictures: options are left out, or the
    middle where two would look the same, up to twice as many characters.
    """
    shown = shown_names(names)
    short = {name: shortened(text, most) for name, text in shown.items()}
    longer = {}
    for name, text in shown.items():
        if len(text) > 2 * most:
            text = text[:most] + "…" + text[1 - most :]
        longer[name] = text
    return distinct_or(short, longer)


def shortened(text, most):
    """soap_muon (lr_scale=1, weight_decay=0.1) is soap_muon (lr_scale=1, …), as many options as fit."""
    if len(text) <= most:
        return text
    kept, *options = text.split(", ")
    for option in options:
        if len(f"{kept}, {option}, …)") > most:
            break
        kept += f", {option}"
    if options and len(f"{kept}, …)") <= most:
        return f"{kept}, …)"
    return text[: most - 1].rstrip(" ,(") + "…"


def distinct_or(texts, longer):
    """{name: its text}, and its longer one where another name has the same text."""
    times = collections.Counter(texts.values())
    return {name: text if times[text] == 1 else longer[name] for name, text in texts.items()}


@dataclass(frozen=True)
class ForestRow:
    """difference: to the baseline; None for itself and those that diverged."""

    label: str
    verdict: str  # better, worse, not distinguishable, baseline or diverged
    seeds: int
    difference: compare.Difference | None = None
    equal_seconds: float | None = None  # the difference at equal seconds, an estimate


def forest_rows(results, baseline, slope=None):
    """ForestRows, the lowest mean first, those that diverged last."""
    labels = short_names(results)
    compared = judged(results, baseline)
    ordered = [rank.name for rank in compare.ranking(scores_by_seed(results))]
    rows = []
    for name in ordered + [name for name in results if name not in ordered]:
        runs = results[name]
        if name == baseline:
            rows.append(ForestRow(labels[name], "baseline", len(runs)))
            continue
        if name not in compared:
            rows.append(ForestRow(labels[name], "diverged", len(runs)))
            continue
        difference, p = compared[name]
        equal_seconds = None
        if slope is not None and difference.seeds > 0:
            equal_seconds = at_equal_seconds(difference.mean, runs, results[baseline], slope)
        verdict = verdict_word(difference, p)
        rows.append(ForestRow(labels[name], verdict, len(runs), difference, equal_seconds))
    return rows


PLAIN = {"text.parse_math": False}  # of matplotlib: a name may have any characters, dollars too

# Inches. The places of a picture are computed here: matplotlib's layouts make columns of text and few or many
# rows collide
HEAD, FOOT = 0.55, 0.95  # above and below the rows: title and column heads; axis and legend
PLOT, NUMBERS = 4.4, 2.75  # widths of two parts of a forest plot; the third, its labels, is measured
LABEL_SIZE = 8.5  # points
CURVES_LEFT, CURVES, GAP = 0.75, 5.6, 0.25  # widths, left of a forest plot


def verdict_word(difference, p, alpha=0.05):
    """p: of the difference, adjusted."""
    if p < alpha:
        return "better" if difference.mean < 0 else "worse"
    return "not distinguishable"


def plot_race(results, baseline, unit, image, slope=None) -> None:
    """Draw validation curves and, beside them, how contenders differ from the baseline, into a PNG.

    slope: see at_equal_seconds; without it nothing is said about equal seconds.
    """
    import matplotlib

    rows = forest_rows(results, baseline, slope)
    curves_height = min(6.5, max(4.4, rows_height(rows)))
    height = max(HEAD + rows_height(rows) + FOOT, HEAD + curves_height + 0.6)
    with matplotlib.rc_context(PLAIN):
        forest_left = CURVES_LEFT + CURVES + GAP + labels_width(rows)
        figure = empty_figure(forest_left + PLOT + NUMBERS, height)
        draw_curves(add_axes(figure, CURVES_LEFT, HEAD, CURVES, curves_height), results, baseline, unit)
        axis = add_axes(figure, forest_left, HEAD, PLOT, rows_height(rows))
        draw_forest(axis, rows, short_names(results)[baseline], unit)
        report.save_figure(figure, image)


def plot_forest(results, baseline, unit, image, slope=None) -> None:
    """Draw the differences to the baseline alone into a PNG, see plot_race."""
    import matplotlib

    rows = forest_rows(results, baseline, slope)
    with matplotlib.rc_context(PLAIN):
        left = labels_width(rows)
        figure = empty_figure(left + PLOT + NUMBERS, HEAD + rows_height(rows) + FOOT)
        axis = add_axes(figure, left, HEAD, PLOT, rows_height(rows))
        draw_forest(axis, rows, short_names(results)[baseline], unit)
        report.save_figure(figure, image)


def empty_figure(width, height):
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no global backend, no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def add_axes(figure, left, top, width, height):
    """All in inches, from the upper left corner."""
    of_width, of_height = figure.get_size_inches()
    bottom = of_height - top - height
    return figure.add_axes([left / of_width, bottom / of_height, width / of_width, height / of_height])


def labels_width(rows):
    """Inches that the names at the left of a forest plot take."""
    from matplotlib.textpath import TextPath

    widths = [TextPath((0, 0), row.label, size=LABEL_SIZE).get_extents().width / 72 for row in rows]
    return 0.3 + max(widths)


def rows_height(rows):
    """Of all rows of a forest plot: a few stand further apart than many."""
    return len(rows) * min(0.42, max(0.28, 4.4 / len(rows)))


def draw_curves(axis, results, baseline, unit):
    """One line a contender: mean and standard error over its seeds. Of many only the best have colours."""
    labels = short_names(results)
    ordered = [rank.name for rank in compare.ranking(scores_by_seed(results))]
    ordered += [name for name in results if name not in ordered]
    others = [name for name in ordered if name != baseline][: len(COLOURS)]
    styles = {baseline: dict(color=DARK, linewidth=2.0, linestyle="-", zorder=3)}
    for index, name in enumerate(others):
        styles[name] = dict(color=COLOURS[index], linewidth=1.6, linestyle=DASHES[index], zorder=4)
    top, bottom = -math.inf, math.inf
    for name in ordered:
        points = np.array([curve(run) for run in results[name]])  # (runs, points, 2)
        steps, losses = points[0, :, 0], points[:, :, 1]
        means = losses.mean(axis=0)
        if name not in styles:
            axis.plot(steps, means, color=PALE, linewidth=0.8, zorder=1)
            continue
        errors = np.zeros_like(means)
        if len(losses) > 1:
            errors = losses.std(axis=0, ddof=1) / len(losses) ** 0.5
        axis.plot(steps, means, label=f"{labels[name]}  {means[-1]:.4f}", **styles[name])
        axis.fill_between(
            steps, means - errors, means + errors, color=styles[name]["color"], alpha=0.2, linewidth=0
        )
        shown = means[steps >= steps[-1] / 4]  # the first steps fall steeply: the rest gets the room
        if len(shown) < 3:
            shown = means
        shown = shown[np.isfinite(shown)]
        if len(shown):
            top, bottom = max(top, shown.max()), min(bottom, shown.min())
    if math.isfinite(top):
        margin = 0.05 * (top - bottom) + 1e-3
        axis.set_ylim(bottom - margin, top + margin)
    if len(ordered) > len(styles):
        axis.plot([], [], color=PALE, linewidth=0.8, label=f"{len(ordered) - len(styles)} others")
    axis.set(title="Validation loss, mean and standard error over seeds", xlabel="step", ylabel=unit)
    axis.legend(frameon=False, fontsize=8.5, loc="upper right")
    report.style_axis(axis)
    axis.xaxis.label.set(color=DIM, fontsize=9.5)


MARKERS = {  # shape and filling differ too, for grey and for the colour-blind
    "better": dict(marker="o", color=BLUE, markerfacecolor=BLUE),
    "not distinguishable": dict(marker="o", color=GREY, markerfacecolor="white"),
    "worse": dict(marker="s", color=VERMILION, markerfacecolor=VERMILION),
}
EQUAL_SECONDS = dict(marker="D", markersize=4, color=DARK, markerfacecolor="white", markeredgewidth=0.8)


def draw_forest(axis, rows, baseline, unit):
    """Rows from the top: difference to the baseline with its 95% interval, the numbers at the right."""
    low, high = forest_limits(rows)
    axis.set(xlim=(low, high), ylim=(len(rows) - 0.5, -0.5))
    axis.set_xlabel(f"{unit} (further left is better)", color=DIM, fontsize=9)
    axis.set_yticks(range(len(rows)), [row.label for row in rows])
    report.style_axis(axis)
    axis.tick_params(axis="y", length=0, labelsize=LABEL_SIZE, labelcolor=DARK)
    axis.grid(axis="y", visible=False)
    axis.spines["left"].set_visible(False)
    axis.axvline(0, color=DARK, linewidth=1.0, zorder=1)
    for place, row in enumerate(rows):
        if place % 2:
            axis.axhspan(place - 0.5, place + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
        draw_forest_row(axis, place, row, low, high)
    above = 0.14 / rows_height(rows)
    write_beside(axis, -0.5 - above * len(rows), "difference", "95% interval", "seeds", weight="bold")
    axis.text(
        -(labels_width(rows) - 0.15) / PLOT,
        1 + above,
        f"Difference from {baseline}, with 95% interval",
        transform=axis.transAxes,
        va="center",
        fontsize=10.5,
        color=DARK,
        weight="bold",
    )
    draw_forest_legend(axis, rows)


def draw_forest_row(axis, place, row, low, high):
    if row.verdict == "baseline":
        axis.plot([0], [place], marker="|", markersize=13, markeredgewidth=3, color=DARK)
        write_beside(axis, place, "baseline", "", row.seeds)
        return
    difference = row.difference
    if difference is None or difference.seeds == 0:
        write_beside(axis, place, "diverged" if difference is None else "no common seed", "", row.seeds)
        return
    style = MARKERS[row.verdict]
    if row.equal_seconds is not None:
        ends = np.clip([difference.mean, row.equal_seconds], low, high)
        axis.plot(ends, [place, place], color=GREY, linewidth=0.8, linestyle=":", zorder=2)
        if low <= row.equal_seconds <= high:
            axis.plot([row.equal_seconds], [place], zorder=5, **EQUAL_SECONDS)
    interval_text = ""
    if difference.seeds > 1:
        ends = np.clip([difference.low, difference.high], low, high)
        axis.plot(ends, [place, place], color=style["color"], linewidth=2.2, solid_capstyle="butt", zorder=3)
        interval_text = f"{signed(difference.low)} to {signed(difference.high)}"
    if low <= difference.mean <= high:
        axis.plot([difference.mean], [place], markersize=6.5, zorder=4, **style)
    else:  # off the scale, its numbers beside it
        edge, arrow = (low, "<") if difference.mean < low else (high, ">")
        axis.plot([edge], [place], marker=arrow, markersize=7, color=style["color"], clip_on=False, zorder=4)
    write_beside(axis, place, signed(difference.mean), interval_text, row.seeds)


def write_beside(axis, place, difference, interval_text, seeds, **style):
    """Write a row's numbers to the right of the axis."""
    axis.text(
        1 + 0.12 / PLOT,
        place,
        f"{difference:<11} {interval_text:<18} {seeds:>5}",
        transform=axis.get_yaxis_transform(),
        va="center",
        fontsize=7.8,
        family="monospace",
        color=DARK,
        **style,
    )


def draw_forest_legend(axis, rows):
    verdicts_shown = {row.verdict for row in rows}
    for verdict, style in MARKERS.items():
        if verdict in verdicts_shown:
            axis.plot([], [], linewidth=2.2, markersize=6.5, label=verdict, **style)
    if any(row.equal_seconds is not None for row in rows):
        label = "at equal seconds, estimated"
        axis.plot([], [], linestyle="", label=label, **EQUAL_SECONDS)
    if axis.get_legend_handles_labels()[0]:
        below = 0.5 / rows_height(rows)
        axis.legend(
            frameon=False,
            fontsize=8.5,
            ncols=4,
            loc="upper left",
            bbox_to_anchor=(-0.02, -below),
            borderaxespad=0,
            handlelength=1.8,
            columnspacing=1.6,
        )


def signed(value):
    return f"{value:+.4f}".replace("-", "−")


def forest_limits(rows):
    """Of the axis: all intervals, but for rows that are far off the others, which are shown at its edge."""
    compared = [row for row in rows if row.difference is not None and row.difference.seeds > 0]
    if not compared:
        return -1e-3, 1e-3
    extents = []
    for row in compared:
        half = 0.0 if row.difference.seeds == 1 else row.difference.high - row.difference.mean
        extents.append(abs(row.difference.mean) + half)
    reach = 6 * statistics.median(extents) + 1e-4
    ends = [0.0]
    for row in compared:
        if abs(row.difference.mean) > reach:
            continue
        ends.append(row.difference.mean)
        if row.difference.seeds > 1:
            ends += [row.difference.low, row.difference.high]
        if row.equal_seconds is not None:
            ends.append(row.equal_seconds)
    low, high = max(min(ends), -reach), min(max(ends), reach)
    margin = 0.06 * (high - low) + 1e-6
    return low - margin, high + margin
