"""What a family of runs tells: tables, the law in words, advice, and the picture."""

import math
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanomuon import report
from nanomuon.planning import duration
from nanomuon.runtime import flag_of, write_json, write_text
from scripts.laboratory import scaling, scaling_runs
from scripts.laboratory.race_report import columns
from scripts.laboratory.scaling import Advice, Fit, Interval, Point, Size

AROUND = (0.1, 1, 10)  # of the compute of the largest run: where the frontier is printed
UNDETERMINED = 10  # times: a constant whose interval is wider than that is called not determined
POOR = 0.02  # of the loss: runs that lie further from the law than this are not described by it


@dataclass(frozen=True)
class Findings:
    """What is known of a family."""

    name: str
    shared: dict  # see scaling_runs.settings_of
    points: list[Point]  # its finished runs, in order of depth and tokens
    sizes: list[Size]  # the models it can be asked about, from depth 1 on
    fit: Fit | None  # None where there are too few runs for a law
    device_speed: float | None  # FLOP/s that its deepest runs made of a device

    @property
    def largest(self) -> float:
        """FLOPs of the largest run."""
        return max(point.flops for point in self.points)

    @property
    def deepest(self) -> int:
        return max(point.size.depth for point in self.points)

    def for_compute(self, flops: float) -> Advice | None:
        if self.fit is None:
            return scaling.measured_for_compute(self.points, flops)
        return scaling.for_compute(self.fit, self.sizes, flops)

    def for_loss(self, loss: float) -> Advice | None:
        if self.fit is None:
            return scaling.measured_for_loss(self.points, loss)
        return scaling.for_loss(self.fit, self.sizes, loss)


def find(folder: Path) -> Findings | None:
    """What the finished runs of the family in this folder tell; None where there is none."""
    results = scaling_runs.read_results(folder)
    if not results:
        return None
    points = scaling_runs.points(results)
    deepest = results[-1]
    fit = None
    if scaling.why_no_law(points) is None:
        fit = scaling.fit(points)
    return Findings(
        name=folder.name,
        shared=scaling_runs.read_family(folder) or {},
        points=points,
        sizes=scaling_runs.sizes_up_to(max(8, 2 * deepest["depth"]), deepest["model"]),
        fit=fit,
        device_speed=device_speed(results),
    )


def device_speed(results: list[dict]) -> float | None:
    """FLOP/s of a device in training, of the deepest runs, in the middle; None where none was measured."""
    deepest = max(result["depth"] for result in results)
    speeds = []
    for result in results:
        if result["depth"] == deepest and result["tokens_per_second"]:
            speeds.append(result["tokens_per_second"] * result["flops_per_token"] / result["processes"])
    return statistics.median(speeds) if speeds else None


def runs_table(findings: Findings) -> str:
    lines = [["depth", "parameters", "tokens", "tokens/parameter", "FLOPs", "bits per byte", "by the law"]]
    for point in findings.points:
        size = point.size
        by_law = ""
        if findings.fit is not None:
            by_law = f"{findings.fit.law.loss(size.parameters, point.tokens):.4f}"
        ratio = point.tokens / size.parameters
        lines.append(
            [
                size.depth,
                count(size.parameters),
                count(point.tokens),
                f"{ratio:.2g}",
                f"{point.flops:.2e}",
                f"{point.loss:.4f}",
                by_law,
            ]
        )
    return columns(lines)


def law_in_words(findings: Findings) -> str:
    """The constants with their intervals, and what they are worth; or why there is no law."""
    if findings.fit is None:
        return (
            f"No law is fitted: {scaling.why_no_law(findings.points)}. What is said below is read between "
            "the runs, without intervals."
        )
    fit = findings.fit
    lines = [["loss = E + A / N^alpha + B / D^beta", "", "95% interval", ""]]
    for name, found in constants(fit).items():
        note = ""
        if found.low <= 0 or found.high / found.low > UNDETERMINED:
            note = "(these runs do not determine it)"
        low = f"{found.low:.3g}" if found.low > 1e-4 else "0"
        lines.append([name, f"{found.value:.3g}", f"{low} to {found.high:.3g}", note])
    share = growth_of_parameters(fit)
    text = [
        columns(lines),
        "N: parameters of the matrices and the head, D: tokens. The runs lie "
        f"{100 * fit.noise:.1f}% of the loss from it (standard deviation).",
    ]
    if fit.noise > POOR:
        text.append("That is much: the law does not describe these runs well, and its advice may mislead.")
    text.append(
        f"With compute C the best number of parameters grows as C^{share.value:.2f} ({share.low:.2f} to "
        f"{share.high:.2f}), that of tokens as C^{1 - share.value:.2f}."
    )
    return "\n".join(text)


def constants(fit: Fit) -> dict[str, Interval]:
    """Of the law, by name."""
    found = {}
    for name in scaling.CONSTANTS:
        found[name] = scaling.interval(getattr(fit.law, name), getattr(fit.resampled, name))
    return found


def growth_of_parameters(fit: Fit) -> Interval:
    """See Law.parameters_exponent."""
    return scaling.interval(fit.law.parameters_exponent, fit.resampled.parameters_exponent)


def frontier_table(findings: Findings) -> str:
    """What is best around the compute of the largest run, by the law."""
    header = ["FLOPs (of the largest run)", "best depth", "tokens", "tokens/parameter", "bits per byte"]
    lines = [[*header, "95% interval"]]
    for times in AROUND:
        best = findings.for_compute(times * findings.largest)
        depth = f"{best.size.depth} ({best.depths[0]} to {best.depths[1]})"
        lines.append(
            [
                f"{best.flops.value:.2e} (x {times:g})",
                depth,
                count(best.tokens),
                f"{best.tokens / best.size.parameters:.2g}",
                f"{best.loss.value:.4f}",
                f"{best.loss.low:.4f} to {best.loss.high:.4f}",
            ]
        )
    return columns(lines)


def advice_for_compute(findings: Findings, flops: float) -> str:
    """In words: which depth and how many tokens for so much compute, and the command for it."""
    advice = findings.for_compute(flops)
    if advice is None:
        return (
            f"For {flops:.3g} FLOPs: no depth has runs on both sides of it, so nothing is known there; "
            "train smaller or larger ones."
        )
    return (
        f"For {flops:.3g} FLOPs: {model_in_words(advice)}, which comes to {advice.loss.value:.4f} bits per "
        f"byte{ends(advice.loss, '.4f')}.{in_time(findings, flops)}{warnings(findings, advice)}\n"
        f"{command(findings, advice)}"
    )


def advice_for_loss(findings: Findings, loss: float) -> str:
    """In words: which depth and how many tokens reach this loss with the least compute, and the command."""
    advice = findings.for_loss(loss)
    if advice is None and findings.fit is None:
        return f"For {loss:g} bits per byte: no run comes down to it, so nothing is known there."
    if advice is None:
        return (
            f"For {loss:g} bits per byte: by this law no depth up to {findings.sizes[-1].depth} ever comes "
            f"down to it (E is {findings.fit.law.E:.3g})."
        )
    return (
        f"For {loss:g} bits per byte: {model_in_words(advice)}, which takes {advice.flops.value:.3g} FLOPs"
        f"{ends(advice.flops, '.3g')}.{in_time(findings, advice.flops.value)}{warnings(findings, advice)}\n"
        f"{command(findings, advice)}"
    )


def model_in_words(advice: Advice) -> str:
    depth = f"depth {advice.size.depth}"
    if advice.depths is not None:
        depth += f" ({advice.depths[0]} to {advice.depths[1]})"
    ratio = advice.tokens / advice.size.parameters
    return (
        f"{depth}, {count(advice.size.parameters)} parameters, on {count(advice.tokens)} tokens "
        f"({ratio:.2g} per parameter)"
    )


def ends(interval: Interval, form: str) -> str:
    """Of an interval, where they are known: " (1.02 to 1.1)"."""
    if math.isnan(interval.low):
        return ""
    return f" ({interval.low:{form}} to {interval.high:{form}})"


def in_time(findings: Findings, flops: float) -> str:
    """How long a device takes that is as fast as those of the runs."""
    if findings.device_speed is None:
        return ""
    seconds = flops / findings.device_speed
    return f" One device takes {duration(seconds)} at the {findings.device_speed:.2e} FLOP/s of these runs."


def warnings(findings: Findings, advice: Advice) -> str:
    """Where advice goes beyond what was trained, or rests on a law that does not fit it."""
    poor = ""
    if findings.fit is not None and findings.fit.noise > POOR:
        poor = " The law does not describe these runs well."
    beyond = []
    times = advice.flops.value / findings.largest
    if times > 1.05:
        beyond.append(f"it is {times:.2g} times the compute of the largest run")
    if advice.size.depth > findings.deepest:
        beyond.append(f"no run is deeper than {findings.deepest}")
    if advice.size == findings.sizes[-1] and findings.fit is not None:
        beyond.append("deeper ones were not looked at")
    if not beyond:
        return poor
    return f" An extrapolation: {', and '.join(beyond)}.{poor}"


def command(findings: Findings, advice: Advice) -> str:
    """How to train that model for that long."""
    words = ["python", "-m", "scripts.base_train", "--depth", advice.size.depth]
    words += ["--target-flops", f"{advice.flops.value:.4g}"]
    given = {key: findings.shared.get(key) for key in scaling_runs.SETTINGS_OF_A_FAMILY}
    given |= findings.shared.get("options", {})
    for key, value in given.items():
        if value is True:
            words.append(flag_of(key))
        elif value is not None and value is not False:
            words += [flag_of(key), value]
    return "    " + shlex.join(map(str, words))


def count(number: float) -> str:
    """As people write it: 1.25M."""
    for divisor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= divisor:
            return f"{number / divisor:.3g}{letter}"
    return f"{number:.3g}"


def write_report(folder: Path, findings: Findings, advice: list[str]) -> str:
    """Write scaling.json, scaling.png and scaling.md; returns the text. advice: in words."""
    parts = [runs_table(findings), law_in_words(findings)]
    if findings.fit is not None:
        parts.append(frontier_table(findings))
    parts += advice
    write_json(folder / "scaling.json", as_json(findings))
    plot(findings, folder / "scaling.png")
    blocks = [f"```\n{part}\n```" for part in parts]
    text = "\n\n".join([f"# {findings.name}", *blocks, "![Loss over compute](scaling.png)"])
    write_text(folder / "scaling.md", text + "\n")
    return "\n\n".join(parts)


def as_json(findings: Findings) -> dict:
    """The law, for other programs; `law` is null where there is none. Ends that are infinite are null."""
    law = noise = None
    if findings.fit is not None:
        noise = findings.fit.noise
        law = {}
        for name, found in constants(findings.fit).items():
            values = [found.value, found.low, found.high]
            law[name] = [value if math.isfinite(value) else None for value in values]
    runs = []
    for point in findings.points:
        runs.append(
            {
                "depth": point.size.depth,
                "parameters": point.size.parameters,
                "tokens": point.tokens,
                "flops": point.flops,
                "val_bpb": point.loss,
            }
        )
    return {"law": law, "noise": noise, "runs": runs, **findings.shared}


def plot(findings: Findings, image: Path) -> None:
    """Draw loss over training FLOPs into a PNG: the runs, a curve of every depth, and the frontier of the law
    with its 95% band, up to ten times the compute of the largest run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=200, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    smallest = min(point.flops for point in findings.points)
    compute = np.geomspace(smallest / 1.5, AROUND[-1] * findings.largest, 120)
    if findings.fit is not None:
        plot_frontier(axis, findings, compute)
    curves = scaling.by_depth(findings.points)
    colours = colours_of(len(curves))
    for colour, (depth, curve) in zip(colours, curves.items(), strict=True):
        label = f"depth {depth}, {count(curve[0].size.parameters)} parameters"
        flops, losses = [point.flops for point in curve], [point.loss for point in curve]
        axis.plot(flops, losses, "o", color=colour, markersize=5, label=label, zorder=3)
        if findings.fit is not None:
            flops = np.geomspace(flops[0] / 1.5, 3 * flops[-1], 60)
            size = curve[0].size
            losses = findings.fit.law.loss(size.parameters, flops / size.flops_per_token)
        axis.plot(flops, losses, color=colour, linewidth=1.2)
    axis.set_xscale("log")
    axis.set(title="Validation loss over training compute", ylabel="bits per byte")
    axis.set_xlabel("training FLOPs", color="#5a5a5a", fontsize=9.5)
    axis.legend(frameon=False, fontsize=9)
    report.style_axis(axis)
    report.save_figure(figure, image)


def plot_frontier(axis, findings: Findings, compute: np.ndarray) -> None:
    best, low, high = [], [], []
    for flops in compute:
        best.append(scaling.losses_after(findings.fit.law, findings.sizes, flops).min())
        resampled = scaling.losses_after(findings.fit.resampled, findings.sizes, flops).min(axis=0)
        found = scaling.interval(best[-1], resampled)
        low.append(found.low)
        high.append(found.high)
    axis.fill_between(compute, low, high, color="#222222", alpha=0.12, linewidth=0)
    axis.plot(compute, best, "--", color="#222222", linewidth=1.4, label="best of all depths, 95% band")


def colours_of(number: int) -> list:
    """From light to dark, as many as there are depths."""
    from matplotlib import colormaps

    return [colormaps["viridis_r"](0.15 + 0.8 * index / max(1, number - 1)) for index in range(number)]
