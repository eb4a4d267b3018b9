"""The search of a race: the same budget for all, and dials that a search should find."""

import math

import pytest

from nanomuon.runtime import InputError
from scripts.laboratory import race_report, race_tuning
from scripts.laboratory.race_contenders import Contender

FILE = """
from nanomuon.recipe import param_groups as recipe_groups
DIAL = {dial}
def param_groups(model, batch=None, *, matrix_lr=0.02, c=0.4):
    return recipe_groups(model, batch, matrix_lr=matrix_lr)
"""


@pytest.fixture
def file(tmp_path):
    def write(dial):
        path = tmp_path / "mine.py"
        path.write_text(FILE.format(dial=dial))
        return str(path)

    return write


class Bowl:
    """2 + off^2 - 0.1 ln(steps), where off is how far the given dials are from their best values."""

    def __init__(self, lowest):
        self.lowest = lowest
        self.asked = []  # (names, steps, seed)

    def train(self, trials, steps, seed):
        self.asked.append(([trial.name for trial in trials], steps, seed))
        scores = {}
        for trial in trials:
            values = trial.keywords() | trial.options
            values["matrix_lr"] *= trial.lr_scale
            off = sum(math.log(values[key] / value) ** 2 for key, value in self.lowest.items())
            scores[trial.name] = 2 + off - 0.1 * math.log(steps)
        return scores


def test_every_contender_gets_the_same_budget_and_seeds_that_no_race_uses():
    contenders = [Contender("default"), Contender("adamw"), Contender("muon:matrix_lr=0.01")]
    bowl = Bowl({"matrix_lr": 0.01})
    found = race_tuning.search(contenders, 8, 400, bowl.train)
    assert [(len(names), steps) for names, steps, _ in bowl.asked] == [(30, 100), (15, 200), (6, 400)]
    for names, _, _ in bowl.asked:
        assert len(set(names)) == len(names)
    seeds = [seed for _, _, seed in bowl.asked]
    assert len(set(seeds)) == 3 and min(seeds) >= race_tuning.FIRST_SEED
    for search in found:
        spent = sum(steps * len(scores) for steps, scores in search.rounds)
        assert 400 * 6 < spent <= 400 * 8
        assert search.contender.name in search.rounds[0][1]  # as it is, it is one of the first trials
        assert race_report.slope_of_length(search.runs()) == pytest.approx(0.1)


def test_the_search_finds_a_better_rate_than_a_wrong_one():
    wrong = Contender("default:matrix_lr=0.05")
    (found,) = race_tuning.search([wrong], 8, 400, Bowl({"matrix_lr": 0.02}).train)
    rate = found.best.options["matrix_lr"] * found.best.lr_scale
    assert abs(math.log(rate / 0.02)) < abs(math.log(0.05 / 0.02)) / 3


def test_what_is_right_already_stays():
    right = Contender("default")
    lowest = {key: right.keywords()[key] for key in ("matrix_lr", "weight_decay")}
    (found,) = race_tuning.search([right], 8, 400, Bowl(lowest).train)
    assert found.best.name == "default"


def test_a_trial_that_diverges_is_not_the_best():
    def train(trials, steps, seed):
        return {trial.name: math.inf if trial.name == "default" else 3.0 for trial in trials}

    (found,) = race_tuning.search([Contender("default")], 8, 400, train)
    assert found.best.name != "default"


def test_dials(file):
    """All rates, the decay where there is one, and the file's own or the rate of the matrices."""
    keys = [dial.key for dial in race_tuning.dials(Contender("default"))]
    assert keys == ["lr_scale", "weight_decay", "matrix_lr"]
    assert [dial.key for dial in race_tuning.dials(Contender("muon"))] == ["lr_scale", "matrix_lr"]
    rate, own = race_tuning.dials(Contender(file('("c", 0.1, 0.9)')))
    assert rate.key == "lr_scale" and rate.low < 1 < rate.high
    assert own == race_tuning.Dial("c", 0.1, 0.9)
    trials = race_tuning.trials(Contender(file('("c", 0.1, 0.9)')), 40)
    assert len({trial.name for trial in trials}) == 40
    values = sorted(trial.options["c"] for trial in trials[1:])
    assert 0.1 <= values[0] < 0.13 and 0.7 < values[-1] <= 0.9
    middle = sum(value < 0.3 for value in values)  # the square root of 0.1 * 0.9
    assert middle == pytest.approx(len(values) / 2, abs=2)


@pytest.mark.parametrize("dial", ['("c", 0.9, 0.1)', '("c", 0.1)', "0.1", '("c", "a", "b")'])
def test_what_is_no_dial(file, dial):
    with pytest.raises(InputError, match="DIAL has to be"):
        race_tuning.dials(Contender(file(dial)))


def test_a_dial_that_is_no_keyword(file):
    with pytest.raises(InputError, match="its DIAL d is not one of"):
        race_tuning.dials(Contender(file('("d", 0.1, 0.9)')))
