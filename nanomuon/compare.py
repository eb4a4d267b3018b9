"""Does one contender beat another? Paired statistics over seeds. Pure functions of lists of numbers."""

import math
import statistics
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences, the ends of its 95% interval, their standard deviation, the two-sided p of
    zero.
    """

    mean: float
    low: float
    high: float
    deviation: float
    p: float


def mean_and_error(scores: list[float]) -> tuple[float, float]:
    """Mean and its standard error, which is NaN for one score."""
    error = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
    return statistics.fmean(scores), error


def paired_difference(scores: list[float], baseline: list[float], confidence: float = 0.95) -> Difference:
    """Student's paired t test of scores - baseline, entry by entry of the same seed. One pair decides
    nothing: p is 1.

    What seeds do to both falls out of the differences, so that fewer of them are needed.
    """
    differences = [a - b for a, b in zip(scores, baseline, strict=True)]
    n, mean = len(differences), statistics.fmean(differences)
    if n < 2:
        return Difference(mean, -math.inf, math.inf, math.nan, 1.0)
    deviation = statistics.stdev(differences)
    error = deviation / math.sqrt(n)
    half = stats.t.ppf((1 + confidence) / 2, n - 1) * error
    p = 2 * stats.t.sf(abs(mean) / error, n - 1) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, deviation, float(p))


def holm(ps: list[float]) -> list[float]:
    """p values adjusted for having made all these comparisons (Holm 1979): below alpha, the chance that any
    of those called different is not is at most alpha.
    """
    adjusted, floor = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        floor = adjusted[index] = max(floor, min(1.0, (len(ps) - rank) * ps[index]))
    return adjusted


def seeds_needed(deviation: float, difference: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """Seeds with which the paired test finds a true `difference` with probability `power`; exact (noncentral
    t).
    """

    def found(n):
        limit, shift = stats.t.ppf(1 - alpha / 2, n - 1), abs(difference) / deviation * math.sqrt(n)
        return stats.nct.sf(limit, n - 1, shift) + stats.nct.cdf(-limit, n - 1, shift)

    if deviation == 0:
        return 2
    low, high = 1, 2  # too few, enough
    while found(high) < power:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) >= power else (middle, high)
    return high


def verdict(difference: Difference, p: float, alpha: float = 0.05) -> str:
    """In words; lower scores are better. p: of this difference, adjusted where several are judged."""
    interval = f"(95% CI {difference.low:+.4f} to {difference.high:+.4f})"
    if math.isnan(difference.deviation):
        return f"one seed, difference {difference.mean:+.4f}: cannot tell"
    if p < alpha:
        return f"{'better' if difference.mean < 0 else 'worse'} by {abs(difference.mean):.4f} {interval}"
    return f"not distinguishable {interval}"


def crossing(curve: list[tuple[float, float]], target: float) -> float | None:
    """Where a falling curve of (step, loss) first reaches the target, interpolated between points; None:
    nowhere.
    """
    before = None
    for step, loss in curve:
        if loss <= target:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None
