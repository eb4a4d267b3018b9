"""Statistics of the laboratory, against published answers and against simulated races."""

import math

import numpy as np
import pytest
from scipy import stats

from scripts.laboratory.significance import (
    benjamini_hochberg,
    crossing,
    differences,
    expected_means,
    hopeless,
    paired_difference,
    two_way,
    verdict,
)

RACES = 2000

# Races like ours: a seed moves all scores by 0.004, and each of 12 contenders by its own deviation
OWN = 0.003
EQUAL = np.zeros(12)
SPREAD = np.linspace(0, 0.05, 12)
ALIKE = np.full(12, OWN)
ONE_WILD = np.array([5 * OWN] + [OWN] * 11)


def simulate_race(rng, means, deviations, seeds):
    """Scores (contenders, seeds)."""
    noise = rng.normal(size=(len(means), seeds)) * deviations[:, None]
    return means[:, None] + noise + rng.normal(1.5, 0.004, seeds)


def by_seed(table):
    """{contender: {seed: score}}, contenders named by their row."""
    return {name: dict(enumerate(scores)) for name, scores in enumerate(table.tolist())}


def test_students_sleep_data():
    """Student 1908, Biometrika 6: hours of sleep gained with two drugs.

    R's t.test gives t = -4.0621, p = .002833.
    """
    one = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    two = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_difference(one, two)
    assert found.mean == pytest.approx(-1.58) and found.p == pytest.approx(0.002833, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((-2.4598858, -0.7001142), abs=1e-6)


@pytest.mark.parametrize("difference", [0.0, -0.02])
def test_the_interval_contains_the_true_difference_in_95_of_100_races(difference):
    """And equal contenders are called different in the other 5; both within three standard errors."""
    rng = np.random.default_rng(0)
    races = [simulate_race(rng, np.array([difference, 0]), ALIKE[:2], 5).tolist() for _ in range(RACES)]
    pairs = [paired_difference(*scores) for scores in races]
    assert abs(np.mean([pair.low <= difference <= pair.high for pair in pairs]) - 0.95) < 0.015
    if difference == 0:
        alarms = [verdict(pair, pair.p)[:3] != "not" for pair in pairs]
        assert abs(np.mean(alarms) - 0.05) < 0.015


def test_contenders_that_lack_seeds_or_diverged_are_compared_fairly():
    """Exact without noise: a contender that ran only the easy seed is not the best for it."""
    effects = {"a": 1.0, "b": 2.0, "c": 4.0}
    luck = {0: -0.5, 1: 0.0, 2: 0.8}
    scores = {}
    for name, effect in effects.items():
        scores[name] = {seed: effect + of_seed for seed, of_seed in luck.items()}
    del scores["c"][2], scores["b"][0]
    layout = two_way(scores)
    assert layout.means == pytest.approx({name: effect + 0.1 for name, effect in effects.items()})
    assert layout.df == 2 and layout.variance == pytest.approx(0, abs=1e-12)
    scores |= {"diverged": {0: 1.0, 1: math.inf}, "nan": {0: math.nan}, "none": {}}
    assert expected_means(scores) == layout.means
    compared = differences(scores, "c")
    assert compared.keys() == {"a", "b"} and compared["b"].seeds == 1 and compared["a"].seeds == 2
    assert compared["a"].mean == pytest.approx(-3) and compared["b"].mean == pytest.approx(-2)
    assert expected_means({"diverged": {0: math.inf}}) == {}


def test_two_contenders_are_compared_as_student_does():
    one, other = simulate_race(np.random.default_rng(5), EQUAL[:2], ALIKE[:2], 4).tolist()
    alone = paired_difference(other, one)
    assert differences(by_seed(np.array([one, other])), 0) == {1: alone} and alone.df == 3


def called_different(table):
    """The contenders, by their row, that the verdicts of a race call better or worse than the first."""
    compared = differences(by_seed(table), 0)
    ps = benjamini_hochberg([difference.p for difference in compared.values()])
    return {name for name, p in zip(compared, ps, strict=True) if p < 0.05}


@pytest.mark.parametrize("seeds", [2, 5])
@pytest.mark.parametrize("deviations", [ALIKE, ONE_WILD[::-1], ALIKE[:2]])
def test_many_equal_contenders_cause_no_more_false_alarms_than_one(deviations, seeds):
    """5 races of 100, and three standard errors."""
    rng = np.random.default_rng(11)
    races = [simulate_race(rng, EQUAL[: len(deviations)], deviations, seeds) for _ in range(400)]
    assert np.mean([bool(called_different(race)) for race in races]) < 0.05 + 0.033


@pytest.mark.parametrize(
    "means, seeds, share",
    [
        (SPREAD, 2, 0.85),  # 1.5 to 17 deviations behind the first
        (np.array([0, 0.01]), 5, 0.93),
    ],
)
def test_a_race_finds_real_differences(means, seeds, share):
    rng = np.random.default_rng(12)
    deviations = np.full(len(means), OWN)
    found = [len(called_different(simulate_race(rng, means, deviations, seeds))) for _ in range(400)]
    assert np.mean(found) > share * (len(means) - 1)


def stop_races(means, deviations, races):
    """(share of races of 5 seeds that stopped one as good as the best, share of runs saved)."""
    rng = np.random.default_rng(21)
    wrong, runs = 0, 0
    for _ in range(races):
        scores = {name: [] for name in range(len(means))}
        racing = set(scores)
        for of_seed in simulate_race(rng, means, deviations, 5).T.tolist():
            for name in racing:
                scores[name].append(of_seed[name])
            runs += len(racing)
            racing -= set(hopeless(scores, 5))
        wrong += not set(np.flatnonzero(means == means.min())) <= racing
    return wrong / races, 1 - runs / (races * len(means) * 5)


def test_early_stop_keeps_the_best_and_saves_runs():
    """At most 1 race of 100 may lose one that is as good as the best. Of 8,000 races: .002 if all are equal,
    none if the means are spread, .005 if the best is the wild one.
    """
    wrong, _ = stop_races(EQUAL, ALIKE, 600)
    assert wrong <= 0.01
    wrong, saved = stop_races(SPREAD, ALIKE, 300)
    assert wrong <= 0.01 and saved > 0.36
    wrong, saved = stop_races(SPREAD, ONE_WILD, 600)
    assert wrong <= 0.016 and saved > 0.25
    wrong, _ = stop_races(EQUAL, ONE_WILD, 300)
    assert wrong <= 0.1  # those it loses are no better than those it keeps


def test_the_diverged_are_stopped_early():
    """They stop at once, say nothing about deviations, and are named once."""
    scores = {"a": [1.5, 1.501], "b": [1.502, 1.5], "worse": [1.9, 1.901]}
    assert hopeless(scores, 5) == ["worse"]
    scores |= {"wild": [1.5, math.inf], "stopped before": [math.nan]}
    assert sorted(hopeless(scores, 5)) == ["wild", "worse"]
    assert hopeless({"a": [1.5], "b": [math.nan]}, 5) == ["b"], "after the first seed only these stop"
    assert hopeless({"a": [math.inf], "b": [math.nan]}, 5) == [], "there is nobody to go on"
    assert hopeless({"a": [1.5, 1.6]}, 5) == []
    assert hopeless({"a": [1.5, 1.501, 1.502], "b": [1.9, 1.9, 1.9]}, 5) == ["b"]
    assert hopeless(scores, 2) == [] and hopeless({}, 5) == []


@pytest.mark.parametrize("distance", [0.99, 1.01])
def test_early_stop_is_a_one_sided_test_at_one_percent_over_all_comparisons(distance):
    """Three contenders of two seeds; c is compared with a, whose differences from it vary least."""
    noise = {"a": [0.01, -0.01], "b": [0.0, 0.0], "c": [0.02, -0.02]}
    table = np.array(list(noise.values()))
    pooled = ((table - table.mean(0)) ** 2).sum() / 2  # rows have mean 0; 2 degrees of freedom
    prior, own = 2 / 3, np.var(table[2] - table[0], ddof=1)
    error = math.sqrt((prior * 2 * pooled + own) / (prior + 1) / 2)
    behind = distance * stats.t.isf(0.01 / 2, prior + 1) * error
    noise["c"] = [behind + noise for noise in noise["c"]]
    assert hopeless(noise, 5) == (["c"] if distance > 1 else [])


def test_verdicts():
    better = paired_difference([1.0, 1.01, 0.99], [2.0, 2.0, 2.0])
    worse = paired_difference([2.0, 2.1], [1.0, 1.1])
    assert verdict(better, better.p) == "better by 1.0000 (95% CI -1.0248 to -0.9752)"
    assert verdict(worse, worse.p).startswith("worse by 1.0000")
    assert verdict(better, 0.06).startswith("not distinguishable (95% CI")
    assert verdict(paired_difference([1.0], [2.0]), 0.0) == "one seed, difference -1.0000: cannot tell"
    assert verdict(paired_difference([], []), 1.0) == "no seed in common: cannot tell"
    same = paired_difference([1.0, 1.5], [1.0, 1.5])
    assert same.p == 1 and verdict(same, same.p).startswith("not distinguishable")


def test_crossing_lies_between_evaluations():
    curve = [(0, 4.0), (50, 3.0), (100, 2.0), (150, 2.5), (200, 1.0)]
    assert crossing(curve, 2.5) == 75 and crossing(curve, 2.0) == 100 and crossing(curve, 4.5) == 0
    assert crossing(curve, 0.5) is None
