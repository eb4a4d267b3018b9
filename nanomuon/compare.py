"""Does one contender beat another? Paired statistics over seeds. Pure functions of lists of numbers."""

import itertools
import math
import statistics
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Difference:
    """Paired differences of two contenders."""

    mean: float
    low: float  # ends of the mean's 95% interval
    high: float
    deviation: float  # standard deviation of the differences
    p: float  # two-sided, of no difference


def mean_and_error(scores: list[float]) -> tuple[float, float]:
    """Mean and its standard error, which is NaN for one score."""
    mean = statistics.fmean(scores)
    if len(scores) < 2:
        return mean, math.nan
    return mean, statistics.stdev(scores) / math.sqrt(len(scores))


def paired_difference(scores: list[float], baseline: list[float], confidence: float = 0.95) -> Difference:
    """Student's paired t test of scores - baseline, entry by entry of the same seed.

    What seeds do to both falls out of the differences, so that fewer of them are needed. One pair decides
    nothing: p is 1.
    """
    differences = [a - b for a, b in zip(scores, baseline, strict=True)]
    n = len(differences)
    mean = statistics.fmean(differences)
    if n < 2:
        return Difference(mean, -math.inf, math.inf, math.nan, 1.0)
    deviation = statistics.stdev(differences)
    error = deviation / math.sqrt(n)
    half = stats.t.ppf((1 + confidence) / 2, n - 1) * error
    if error == 0:  # all differences are the same
        p = 1.0 if mean == 0 else 0.0
    else:
        p = 2 * stats.t.sf(abs(mean) / error, n - 1)
    return Difference(mean, mean - half, mean + half, deviation, float(p))


def holm(ps: list[float]) -> list[float]:
    """p values adjusted for having made all these comparisons (Holm 1979).

    Where those below alpha are called different, the chance that any of them is not is at most alpha.
    """
    adjusted = [0.0] * len(ps)
    largest = 0.0  # the adjusted values rise with the values
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted


def seeds_needed(deviation: float, difference: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """Seeds with which the paired test finds a true `difference` with probability `power`.

    Exact, by the noncentral t distribution.
    """

    def found(n):
        """Probability with n seeds."""
        limit = stats.t.ppf(1 - alpha / 2, n - 1)
        shift = abs(difference) / deviation * math.sqrt(n)
        return stats.nct.sf(limit, n - 1, shift) + stats.nct.cdf(-limit, n - 1, shift)

    if deviation == 0:
        return 2
    low, high = 1, 2  # too few, enough
    while found(high) < power:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if found(middle) >= power:
            high = middle
        else:
            low = middle
    return high


def verdict(difference: Difference, p: float, alpha: float = 0.05) -> str:
    """In words; lower scores are better. p: of this difference, adjusted where several are judged."""
    interval = f"(95% CI {difference.low:+.4f} to {difference.high:+.4f})"
    if math.isnan(difference.deviation):
        return f"one seed, difference {difference.mean:+.4f}: cannot tell"
    if p < alpha:
        word = "better" if difference.mean < 0 else "worse"
        return f"{word} by {abs(difference.mean):.4f} {interval}"
    return f"not distinguishable {interval}"


def crossing(curve: list[tuple[float, float]], target: float) -> float | None:
    """The step where a falling curve of (step, loss) first reaches the target; None where it does not.

    Interpolated between points.
    """
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (step_before, loss_before), (step, loss) in itertools.pairwise(curve):
        if loss <= target:
            return step_before + (step - step_before) * (loss_before - target) / (loss_before - loss)
    return None
