"""Statistics of the laboratory, against published answers and against simulated races."""

import numpy as np
import pytest

from scripts.laboratory.significance import Difference, differences, verdict

# Races like ours: a seed moves all scores by 0.004, and each of 12 contenders by its own deviation
OWN = 0.003
EQUAL = np.zeros(12)
SPREAD = np.linspace(0, 0.05, 12)
ALIKE = np.full(12, OWN)
ONE_WILD = np.array([5 * OWN] + [OWN] * 11)


def simulate_race(rng, means, deviations, seeds):
    """{contender: its scores}, contenders named by their number."""
    noise = rng.normal(size=(len(means), seeds)) * deviations[:, None]
    table = means[:, None] + noise + rng.normal(1.5, 0.004, seeds)
    return dict(enumerate(table.tolist()))


def test_students_sleep_data():
    """Student 1908, Biometrika 6: hours of sleep gained with two drugs.

    R's t.test gives t = -4.0621, p = .002833.
    """
    one = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    two = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = differences({"one": one, "two": two}, "two")["one"]
    assert found.mean == pytest.approx(-1.58) and found.p == pytest.approx(0.002833, abs=1e-6)
    ends = (found.mean - found.half, found.mean + found.half)
    assert ends == pytest.approx((-2.4598858, -0.7001142), abs=1e-6)


def called_different(race):
    """The contenders that the verdicts of a race call better or worse than the first."""
    compared = differences(race, 0)
    return {name for name in compared if verdict(compared[name]).startswith(("better", "worse"))}


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


def test_deviations_of_other_contenders_count_for_a_pair():
    """Worked by hand: residuals of three contenders and three seeds about contender + seed."""
    scores = {"a": [1.0, 2.0, 3.0], "b": [1.1, 2.1, 3.4], "c": [0.9, 2.3, 2.8]}
    table = np.array(list(scores.values()))
    residual = table - table.mean(1)[:, None] - table.mean(0) + table.mean()
    pooled, own = 2 * (residual**2).sum() / 4, np.var([0.1, 0.1, 0.4], ddof=1)
    error = np.sqrt((4 / 3 * pooled + 2 * own) / (4 / 3 + 2) / 3)
    found = differences(scores, "a")["b"]
    # Student's t with 10/3 degrees of freedom lies between those with 3 and with 4: 3.182 and 2.776
    assert 2.776 < found.half / error < 3.182


def test_verdicts():
    assert verdict(Difference(-1.0, 0.0248, 0.001)) == "better by 1.0000 (95% CI 0.9752 to 1.0248)"
    assert verdict(Difference(1.0, 0.5, 0.049)).startswith("worse by 1.0000")
    assert verdict(Difference(-1.0, 0.5, 0.06)).startswith("not distinguishable (95% CI -1.5000 to -0.5000")
    one_seed = differences({"a": [1.0], "b": [2.0], "c": [1.0]}, "b")
    assert verdict(one_seed["a"]) == "one seed, difference -1.0000: cannot tell"
    same = differences({"a": [1.0, 1.5], "b": [1.0, 1.5], "c": [2.0, 2.5]}, "b")
    assert same["a"].p == 1 and verdict(same["a"]).startswith("not distinguishable")
    assert verdict(same["c"]) == "worse by 1.0000 (95% CI 1.0000 to 1.0000)"
    assert differences({"a": [1.0, 1.5]}, "a") == {}
