"""The search that gives every contender of a race the same budget of runs to find its own rates with.

Successive halving (arXiv 1502.07943): many trials a quarter of the race long, the best of them again at half
the length, and the best of those over all of it, each length with a third of the budget. A short run is a
whole one: its schedule ends with it. A trial is the contender with other values of its dials.
"""

import math
from dataclasses import dataclass

from scipy.stats import qmc

from nanomuon.runtime import InputError
from nanomuon.user_file import load_dial

FIRST_SEED = 1000  # the seeds of a search begin here: those of the race must not have chosen what they judge
LENGTHS = (0.25, 0.5, 1.0)  # of the race, one after the other
FEWEST_RUNS = 3  # of a budget: one over the whole length


@dataclass(frozen=True)
class Dial:
    """A keyword of a contender, and the range to search: evenly, in the logarithm where that can be."""

    key: str
    low: float
    high: float

    def at(self, position: float) -> float:
        """The value at a position from 0 to 1, to three digits."""
        if self.low > 0:
            value = math.exp(math.log(self.low) + position * math.log(self.high / self.low))
        else:
            value = self.low + position * (self.high - self.low)
        return float(f"{value:.3g}")


def dials(contender) -> list[Dial]:
    """What is searched: all rates together, the weight decay, and one more.

    That is the dial that the contender's file names, as in DIAL = ("c", 0.1, 0.8), or else the rate of the
    matrices beside the others. A keyword that is zero, or that there is not, is not searched.
    """
    known = contender.keywords()
    own = None if contender.is_preset else load_dial(contender.source)
    if own is not None and own[0] not in known:
        raise InputError(f"contender {contender.source}: its DIAL {own[0]} is not one of {', '.join(known)}")
    widths = {"lr_scale": 3, "weight_decay": 4}
    if own is None:
        widths["matrix_lr"] = 2
    values = {"lr_scale": 1} | known | contender.options
    found = []
    for key, width in widths.items():
        value = values.get(key)
        if isinstance(value, int | float) and value > 0:
            found.append(Dial(key, value / width, value * width))
    if own is not None:
        found.append(Dial(*own))
    return found


def trials(contender, count: int) -> list:
    """The contender as it is, and count - 1 with dials at the points of a Sobol sequence, alike for all."""
    searched = dials(contender)
    sequence = qmc.Sobol(len(searched), scramble=False)
    sequence.fast_forward(2)  # the corner of the lowest values, and the middle, which is near the first trial
    chosen = [contender]
    for point in sequence.random(count - 1):
        options = {}
        for dial, position in zip(searched, point, strict=True):
            options[dial.key] = dial.at(position)
        chosen.append(contender.with_options(options))
    return chosen


def rungs(budget: int, steps: int) -> list[tuple[int, int]]:
    """[(steps of a trial, trials)] for a budget in runs over all `steps`."""
    plan = []
    for length in LENGTHS:
        plan.append((max(1, round(length * steps)), max(1, int(budget / len(LENGTHS) / length))))
    return plan


@dataclass(frozen=True)
class Search:
    """What the search of one contender came to: {trial: score} at each length, from the shortest on."""

    contender: object
    rounds: list  # (steps, {trial's name: score})
    best: object  # the trial with the lowest score at full length

    def runs(self) -> list[dict]:
        """All trials as runs with contender, steps and score."""
        every = []
        for steps, scores in self.rounds:
            for name, score in scores.items():
                every.append({"contender": name, "steps": steps, "score": score})
        return every


def search(contenders: list, budget: int, steps: int, train) -> list[Search]:
    """A Search of each contender. train(trials, steps, seed) gives {trial's name: score}, infinite where a
    run has diverged; it is asked once for all contenders at each length.
    """
    plan = rungs(budget, steps)
    alive = {}  # {contender's name: its trials that are left}
    rounds = {}
    for contender in contenders:
        alive[contender.name] = trials(contender, plan[0][1])
        rounds[contender.name] = []
    for rung, (length, count) in enumerate(plan):
        wanted = []
        for contender in contenders:
            alive[contender.name] = alive[contender.name][:count]
            wanted += alive[contender.name]
        scores = train(wanted, length, FIRST_SEED + rung)
        for contender in contenders:
            left = alive[contender.name]
            left.sort(key=lambda trial: scores[trial.name])  # stable: of equals the first stays first
            rounds[contender.name].append((length, {trial.name: scores[trial.name] for trial in left}))
    found = []
    for contender in contenders:
        found.append(Search(contender, rounds[contender.name], alive[contender.name][0]))
    return found
