"""Statistics of the laboratory, against published answers and against simulated races."""

import math

import numpy as np
import pytest

from nanomuon.compare import crossing, holm, mean_and_error, paired_difference, seeds_needed, verdict

RACES = 2000


def simulate(seeds, difference, deviation, spread=0.1, rng_seed=0):
    """RACES pairs of (scores, baseline): a seed moves both by `spread`; their difference has `deviation`."""
    rng = np.random.default_rng(rng_seed)
    luck = rng.normal(1.6, spread, (RACES, seeds))
    noise = rng.normal(0, deviation / math.sqrt(2), (2, RACES, seeds))
    return zip((luck + difference + noise[0]).tolist(), (luck + noise[1]).tolist(), strict=True)


def test_students_sleep_data():
    """Student 1908, Biometrika 6: hours of sleep gained with two drugs.

    R's t.test gives t = -4.0621, p = .002833.
    """
    one = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    two = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_difference(one, two)
    assert found.mean == pytest.approx(-1.58) and found.p == pytest.approx(0.002833, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((-2.4598858, -0.7001142), abs=1e-6)
    assert mean_and_error(one) == pytest.approx((0.75, 1.789010 / math.sqrt(10)), abs=1e-5)


def test_equal_contenders_are_called_different_in_5_races_of_100():
    pairs = [paired_difference(*scores) for scores in simulate(5, 0.0, 0.01)]
    alarms = sum(verdict(pair, pair.p)[:3] != "not" for pair in pairs) / RACES
    assert abs(alarms - 0.05) < 0.015  # three standard errors


def test_the_interval_holds_the_true_difference_in_95_races_of_100():
    pairs = [paired_difference(*scores) for scores in simulate(4, -0.02, 0.01)]
    assert abs(sum(pair.low <= -0.02 <= pair.high for pair in pairs) / RACES - 0.95) < 0.015


@pytest.mark.parametrize("deviation", [0.002, 0.008, 0.02])
def test_that_many_seeds_find_the_difference_at_the_stated_power(deviation):
    seeds = seeds_needed(deviation, 0.01, power=0.8)

    def found(n):
        pairs = (paired_difference(*scores) for scores in simulate(n, 0.01, deviation))
        return sum(pair.p < 0.05 and pair.mean > 0 for pair in pairs) / RACES

    assert found(seeds) > 0.8 - 0.03
    assert seeds == 2 or found(seeds - 1) < 0.8 + 0.03


def test_pairing_takes_the_luck_of_the_seed_out():
    """Seeds move the scores 100 times as much as the difference; shuffled, nothing is found."""
    scores, baseline = next(simulate(8, -0.02, 0.002, spread=2.0))
    paired = paired_difference(scores, baseline)
    assert verdict(paired, paired.p).startswith("better by")
    assert paired_difference(scores[1:] + scores[:1], baseline).p > 0.05


def test_holm():
    """The adjusted values of R's p.adjust(c(.01, .04, .03, .005), "holm")."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_many_equal_contenders_give_no_more_false_alarms_than_one():
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(RACES // 2):
        baseline, *others = rng.normal(1.6, 0.01, (5, 5)).tolist()
        alarms += min(holm([paired_difference(scores, baseline).p for scores in others])) < 0.05
    assert alarms / (RACES // 2) < 0.05 + 0.02


def test_verdicts():
    better = paired_difference([1.0, 1.01, 0.99], [2.0, 2.0, 2.0])
    worse = paired_difference([2.0, 2.1], [1.0, 1.1])
    assert verdict(better, better.p) == "better by 1.0000 (95% CI -1.0248 to -0.9752)"
    assert verdict(worse, worse.p).startswith("worse by 1.0000")
    assert verdict(better, 0.06).startswith("not distinguishable (95% CI")
    assert verdict(paired_difference([1.0], [2.0]), 0.0) == "one seed, difference -1.0000: cannot tell"
    same = paired_difference([1.0, 1.5], [1.0, 1.5])
    assert same.p == 1 and verdict(same, same.p).startswith("not distinguishable")


def test_crossing_lies_between_evaluations():
    curve = [(0, 4.0), (50, 3.0), (100, 2.0), (150, 2.5), (200, 1.0)]
    assert crossing(curve, 2.5) == 75 and crossing(curve, 2.0) == 100 and crossing(curve, 4.5) == 0
    assert crossing(curve, 0.5) is None
