"""What people read of a race: tables, verdicts, the ranking and the picture, from results made up here."""

import math

import numpy as np
import pytest

from nanomuon import report
from nanomuon.runtime import InputError
from scripts.laboratory import race_report

LUCK = [0.0, 0.004, -0.003, 0.002, 0.005]  # of seeds, the same for all contenders
NOISE = [0.001, -0.0005, 0.0002, -0.001, 0.0004]


def make_runs(name, difference, seeds=5, step_ms=100.0, diverges=False, load=1.0):
    """Runs whose last loss is 1.5 + difference + what seed and contender add. Of a step 75 ms are not the
    optimizer's; load: how much longer everything takes, as other work on the machine makes it.
    """
    runs = []
    shift = sum(map(ord, name))
    for seed in range(seeds):
        score = 1.5 + difference + LUCK[seed] + NOISE[(seed + shift) % len(NOISE)]
        curve = [(step, score + 2 * math.exp(-step / 100), None) for step in range(0, 500, 50)]
        curve.append((500, score, score))
        if diverges:
            score = math.nan
            curve = [(step, part if step < 200 else math.nan, whole) for step, part, whole in curve]
        timing = dict(step_ms=load * step_ms, optimizer_ms=load * (step_ms - 75))
        runs.append(dict(contender=name, seed=seed, score=score, curve=curve, **timing))
    return runs


def make_results(**contenders):
    """{name: runs}; the keywords of make_runs, or the difference alone."""
    results = {}
    for name, keywords in contenders.items():
        if isinstance(keywords, float):
            keywords = dict(difference=keywords)
        results[name] = make_runs(name, **keywords)
    return results


def many(count, **keywords):
    """Results of `count` contenders with tuned hyperparameters in their names."""
    rng = np.random.default_rng(count)
    results = {"default": make_runs("default", 0.0)}
    for index in range(count - 1):
        name = f"contenders/idea_{index}.py:lr_scale=1.41,weight_decay=0.14,beta=0.95"
        step_ms = 100 * math.exp(rng.uniform(-0.2, 0.3))
        results[name] = make_runs(name, rng.uniform(-0.01, 0.03), step_ms=step_ms, **keywords)
    return results


def cells(text, name):
    """The cells of the line of a table that begins with a place, if any, and a name."""
    for line in text.splitlines():
        found = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if name in found[:2]:
            return found
    raise AssertionError(f"no line of {name} in\n{text}")


def test_the_estimate_at_equal_seconds_is_right_where_loss_falls_with_the_logarithm_of_steps():
    def loss_of_baseline(steps):
        return 3.0 - 0.2 * math.log(steps)

    runs = []
    for steps in (125, 250, 500):
        for seed, variant in ((1, "default:lr_scale=0.5"), (2, "default:lr_scale=2")):
            score = loss_of_baseline(steps) + (0.01 if seed == 2 else 0.0)
            runs.append(dict(contender=variant, seed=seed, steps=steps, score=score))
    slope = race_report.slope_of_length(runs)
    assert slope == pytest.approx(0.2)

    results = make_results(slow=dict(difference=-0.05, step_ms=150.0), default=0.0)
    loss_of_slow = loss_of_baseline(500) - 0.05
    at_equal_seconds = loss_of_slow - loss_of_baseline(500 * 1.5)  # the baseline has time for half more
    estimate = race_report.at_equal_seconds(-0.05, results["slow"], results["default"], slope)
    assert estimate == pytest.approx(at_equal_seconds) and estimate > 0
    busy = make_runs("slow", -0.05, step_ms=150.0, load=1.7)
    again = race_report.at_equal_seconds(-0.05, busy, results["default"], slope)
    assert again == pytest.approx(estimate)


def test_what_gives_no_slope():
    one = dict(contender="a", seed=1, steps=500, score=1.5)
    assert race_report.slope_of_length([one, one]) is None and race_report.slope_of_length([]) is None
    worse_when_longer = dict(one, steps=250, score=1.4)
    assert race_report.slope_of_length([one, worse_when_longer]) is None
    of_another = dict(one, contender="b", steps=250, score=1.6)
    assert race_report.slope_of_length([one, of_another]) is None
    diverged = dict(one, steps=250, score=math.inf)
    assert race_report.slope_of_length([one, diverged]) is None
    # of three lengths the longer two decide
    runs = [one, dict(one, steps=250, score=1.6), dict(one, steps=125, score=3.0)]
    assert race_report.slope_of_length(runs) == pytest.approx(0.1 / math.log(2))


def test_table_and_verdicts_with_contenders_that_lack_seeds_or_diverged():
    results = make_results(
        default=0.0,
        better=-0.02,
        stopped=dict(difference=0.05, seeds=2),
        wild=dict(difference=0.0, seeds=2, diverges=True),
        once=dict(difference=0.01, seeds=1),
    )
    text = race_report.table(results, "default", [1.6], 0.01, "nats", slope=0.2)
    assert cells(text, "stopped")[1] == "2" and "+0.05" in text
    assert cells(text, "wild")[1:3] == ["2", "diverged"]
    said = race_report.verdicts(results, "default").splitlines()
    starts = [
        "better: better by 0.0",
        "stopped: worse by 0.0",
        "wild: diverged with seed 0, 1",
        "once: one seed",
    ]
    for line, start in zip(said, starts, strict=False):
        assert line.startswith(start)
    results["default"][1]["score"] = math.inf
    with pytest.raises(InputError, match="baseline default diverged"):
        race_report.verdicts(results, "default")


def test_ranking():
    results = make_results(
        default=0.03,
        second=0.0005,
        best=dict(difference=0.0, step_ms=200.0),
        stopped=dict(difference=0.05, seeds=2),
        wild=dict(difference=0.0, diverges=True),
    )
    text = race_report.ranking(results, "nats", slope=0.1)
    rows = [cells(text, name) for name in ("best", "second", "default", "stopped", "wild")]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "-"]
    best, second, default, stopped, wild = rows
    assert best[-1] == "the best" and second[-1] == "not distinguishable from the best"
    assert default[-1] == "worse than the best" and stopped[-1] == "worse than the best"
    assert stopped[2] == "2" and wild[-1] == "diverged with seed 0, 1, 2, 3, 4"
    assert "Not distinguishable from the best, best: second." in text
    assert "chosen by its mean" in text and "fewer seeds are corrected" in text
    # the best takes twice as long for a step: in its time the others gain .1 ln 2
    difference, at_equal_seconds = float(default[4]), float(default[6])
    assert at_equal_seconds == pytest.approx(difference - 0.1 * math.log(2), abs=2e-4)
    # all as good: ties, and nobody is called worse
    text = race_report.ranking(make_results(a=0.0, b=0.0002, c=0.0001), "nats")
    assert "worse than" not in text and "fewer seeds" not in text
    # one seed says nothing, and all diverged is said
    text = race_report.ranking(
        make_results(a=dict(difference=0.0, seeds=1), b=dict(difference=1.0, seeds=1)), "n"
    )
    assert cells(text, "b")[-1] == "one seed: cannot tell"
    text = race_report.ranking(make_results(a=dict(difference=0.0, diverges=True)), "nats")
    assert text == "Ranking: all contenders diverged"


def test_names():
    names = [
        "contenders/soap_muon.py:lr_scale=1.41,weight_decay=0.14",
        "muon",
        "mine/muon.py",
        "default:beta=0.9",
    ]
    shown = race_report.shown_names(names)
    assert shown[names[0]] == "soap_muon (lr_scale=1.41, weight_decay=0.14)"
    assert shown["muon"] == "muon" and shown["mine/muon.py"] == "mine/muon.py"  # not two of the same name
    assert shown["default:beta=0.9"] == "default (beta=0.9)"
    short = race_report.short_names(names)
    assert short[names[0]] == "soap_muon (lr_scale=1.41, …)"
    variants = [f"a.py:lr_scale=1.41,weight_decay=0.14,c={c}" for c in (1, 2)]
    assert list(race_report.short_names(variants).values()) == list(
        race_report.shown_names(variants).values()
    )
    assert len(race_report.short_names(["x" * 80])["x" * 80]) <= 34
    long = [4000 * "x" + end for end in "ab"]
    short = race_report.short_names(long)
    assert short[long[0]][-1] == "a" and short[long[1]][-1] == "b" and len(short[long[0]]) <= 68


@pytest.fixture
def figures(monkeypatch):
    """The figures that would be saved."""
    saved = []
    monkeypatch.setattr(report, "save_figure", lambda figure, image: saved.append(figure))
    return saved


def draw_forest(results, figures, baseline="default", slope=None):
    race_report.plot_forest(results, baseline, "nats per character", None, slope)
    (axis,) = figures.pop().axes
    return axis


@pytest.mark.parametrize("count,slope", [(2, None), (35, 0.1)])
def test_nothing_in_the_picture_is_cut_off_or_covers_something_else(figures, count, slope):
    results = many(count)
    results["wild"] = make_runs("wild", 0.0, seeds=2, diverges=True)
    results["stopped"] = make_runs("stopped", 0.4, seeds=2)
    results["W" * 34] = make_runs("wide", 0.02)
    results[r"$\none$_of_mathematics"] = make_runs("dollars", 0.01)
    race_report.plot_race(results, "default", "nats per character", None, slope)
    (figure,) = figures
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    curves, forest = figure.axes
    texts = [*forest.texts, *forest.get_yticklabels(), forest.xaxis.label, *forest.get_legend().get_texts()]
    texts += [curves.xaxis.label, curves.yaxis.label, curves.title, curves._left_title]
    boxes = [text.get_window_extent(renderer) for text in texts if text.get_text().strip()]
    for index, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
        for other in boxes[:index]:
            assert not box.overlaps(other)
    for label in forest.get_yticklabels():
        assert label.get_window_extent(renderer).x0 > curves.bbox.x1
    legend = curves.get_legend().get_texts()
    assert len(legend) == min(count + 4, 7)  # the best five, the baseline, and how many others


def test_forest_plot_draws_each_contender_where_it_is(figures):
    results = make_results(
        default=0.0, better=-0.02, same=dict(difference=0.0, step_ms=150.0), worse=0.02, far=0.8
    )
    results["wild"] = make_runs("wild", 0.0, diverges=True)
    axis = draw_forest(results, figures, slope=0.01)
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels[0] == "better" and labels[-3:] == ["worse", "far", "wild"]
    compared = race_report.differences(results, "default")
    markers = {}  # {(name, marker): x}
    intervals = {}
    for line in axis.lines:
        x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        if len(y) == 0 or line.get_linestyle() == ":" or len(set(y)) > 1:
            continue  # of the legend, a connection, the baseline
        name = labels[int(y[0])]
        if len(x) == 1:
            markers[name, line.get_marker()] = x[0]
        else:
            intervals[name] = tuple(x)
    for name, marker in (("better", "o"), ("same", "o"), ("worse", "s")):
        assert markers[name, marker] == pytest.approx(compared[name].mean)
        assert intervals[name] == pytest.approx((compared[name].low, compared[name].high))
    seconds = compared["same"].mean + 0.01 * math.log(1.5)
    assert markers["same", "D"] == pytest.approx(seconds)
    _, high = axis.get_xlim()
    assert markers["far", ">"] == high < 0.5 and "wild" not in intervals
    words = "\n".join(text.get_text() for text in axis.texts)
    assert "diverged" in words and "+0.8" in words


def test_the_race_report_is_written_for_any_number_of_seeds(tmp_path):
    for seeds in (1, 2):
        results = make_results(default=dict(difference=0.0, seeds=seeds), b=dict(difference=0.1, seeds=seeds))
        race_report.write_report(tmp_path, results, ["one", "two"], "nats", "default")
        assert (tmp_path / "race.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "race.md").read_text()
    assert "one" in text and "two" in text and "race.png" in text
