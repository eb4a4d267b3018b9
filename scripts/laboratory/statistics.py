"""Does one contender beat another, and which of many is the best? Paired statistics over seeds.

Pure functions of numbers. A score is a loss: lower is better; one that is not finite is of a run that
diverged.

A seed moves the scores of all contenders, so that they are compared seed by seed. With 2 or 5 seeds the
deviation of one pair's differences is hardly known: Student's interval with 2 seeds is 12.7 standard errors
to each side. But a race of many has many residuals about the layout score = contender + seed, and deviations
are much alike. So the variance of a pair's differences counts with its own degrees of freedom, and the pooled
one beside it with up to PRIOR_DF, as in the moderated t test (Smyth 2004, doi:10.2202/1544-6115.1027; there
the weight is estimated, here it is fixed). Two contenders have nothing to pool: that is Student's paired
test.

Simulated: intervals meant to hold the true difference in 95% of races do so in 98% where all deviations are
equal; those of a contender with 5 times the deviation of the 11 others in 79% with 2 seeds, 84% with 3 and
88% with 5.
"""

import itertools
import math
import operator
import statistics
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

# Degrees of freedom for which the pooled variance counts. Simulated with 2 seeds of 12 contenders: where one
# that is as good as the best has 5 times the deviation of the others, 4% of what a ranking finds is false (7%
# with 4 degrees of freedom, 20% with the pooled variance alone); where all deviations are equal, it finds 74%
# of the differences, the pooled variance alone 86%, and a pair's own 1%.
PRIOR_DF = 3


@dataclass(frozen=True)
class Difference:
    """Paired differences of two contenders."""

    mean: float
    low: float  # ends of the mean's 95% interval
    high: float
    p: float  # two-sided, of no difference
    seeds: int  # that both have
    df: float  # degrees of freedom of the deviation


def paired_difference(
    scores: list[float],
    baseline: list[float],
    confidence: float = 0.95,
    pooled: float = math.nan,
    pooled_df: int = 0,
) -> Difference:
    """Paired t test of scores - baseline, entry by entry of the same seed.

    What seeds do to both falls out of the differences, so that fewer of them are needed. One pair decides
    nothing: p is 1. pooled: variance of a score in the layout of all contenders, with pooled_df degrees of
    freedom; without it this is Student's test.
    """
    differences = [a - b for a, b in zip(scores, baseline, strict=True)]
    n = len(differences)
    if n == 0:
        return Difference(math.nan, -math.inf, math.inf, 1.0, 0, 0)
    mean = statistics.fmean(differences)
    if n == 1:
        return Difference(mean, -math.inf, math.inf, 1.0, 1, 0)
    variance, df = moderated(statistics.variance(differences), n - 1, 2 * pooled, pooled_df)
    error = math.sqrt(variance / n)
    half = special.stdtrit(df, (1 + confidence) / 2) * error  # the t distribution's quantile
    if error == 0:  # all differences are the same
        p = 1.0 if mean == 0 else 0.0
    else:
        p = 2 * special.stdtr(df, -abs(mean) / error)  # the t distribution's lower tail
    return Difference(mean, float(mean - half), float(mean + half), float(p), n, df)


def moderated(own, own_df: int, pooled: float, pooled_df: int):
    """(variance, its degrees of freedom) of paired differences: their own, and the pooled one beside it.

    own may be an array. The pooled one counts for at most a third of the degrees of freedom it has, so that a
    few contenders with one wild among them do not speak for it, and both together for no more than it has.
    """
    prior = min(PRIOR_DF, pooled_df / 3)
    if pooled_df <= own_df:  # two contenders: the pooled variance is their own
        return own, own_df
    variance = (prior * pooled + own_df * own) / (prior + own_df)
    return variance, min(prior + own_df, pooled_df)


@dataclass(frozen=True)
class Layout:
    """Least-squares fit of score = contender + seed."""

    means: dict[str, float]  # {contender: its mean over all seeds; of those it lacks, what the fit expects}
    variance: float  # of a score about the fit, NaN where df is 0
    df: int  # residual degrees of freedom


def two_way(scores: dict[str, dict[int, float]]) -> Layout:
    """Fit the two-way layout to {contender: {seed: finite score}}; contenders may lack seeds."""
    seeds = sorted(set().union(*scores.values()))
    cells = []
    for row, of_contender in enumerate(scores.values()):
        cells += [(row, seeds.index(seed), score) for seed, score in of_contender.items()]
    if not cells:
        return Layout({}, math.nan, 0)
    rows, columns, values = map(np.array, zip(*cells, strict=True))
    design = np.hstack([np.eye(len(scores))[rows], np.eye(len(seeds))[columns]])
    center = values.mean()
    effects, _, rank, _ = np.linalg.lstsq(design, values - center, rcond=None)
    residual = values - center - design @ effects
    df = len(values) - int(rank)
    variance = float(residual @ residual / df) if df > 0 else math.nan
    means = center + effects[: len(scores)] + effects[len(scores) :].mean()
    return Layout(dict(zip(scores, means.tolist(), strict=True)), variance, df)


def finite_only(scores: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """The contenders with a run, and none that diverged: an infinite score says nothing about deviations."""
    kept = {}
    for name, of_contender in scores.items():
        if of_contender and all(map(math.isfinite, of_contender.values())):
            kept[name] = of_contender
    return kept


def differences(scores: dict[str, dict[int, float]], reference: str) -> dict[str, Difference]:
    """{contender: Difference to the reference over the seeds that both have}, the diverged left out.

    scores: {contender: {seed: score}}; the reference must not have diverged.
    """
    finite = finite_only(scores)
    layout = two_way(finite)
    found = {}
    for name, of_contender in finite.items():
        if name != reference:
            found[name] = _difference(of_contender, finite[reference], layout)
    return found


def _difference(of_contender, of_reference, layout):
    """Of two {seed: score}."""
    common = [seed for seed in of_contender if seed in of_reference]
    return paired_difference(
        [of_contender[seed] for seed in common],
        [of_reference[seed] for seed in common],
        pooled=layout.variance,
        pooled_df=layout.df,
    )


@dataclass(frozen=True)
class Rank:
    name: str
    mean: float  # over all seeds of the race, see Layout
    difference: Difference | None  # to the best; None for the best
    p: float  # of being as good as the best, adjusted for all contenders


def ranking(scores: dict[str, dict[int, float]]) -> list[Rank]:
    """Contenders from the best on, each compared with the best; those that diverged are left out. Last come
    those with fewer than two seeds in common with it, of which nothing can be said.

    Where those with p below alpha are called worse than the best, the expected share of false ones among them
    is at most alpha. False are those whose true mean is as good as that of any.

    The best is the one with the lowest mean, so it was lucky: of 12 equal contenders with 5 seeds Student's
    two-sided tests against it, corrected by Benjamini and Hochberg as if it had been chosen beforehand, find
    a "difference" in 12 races of 100. So each contender, the best included, is asked whether it is as good as
    all others. One that is falls so far behind any of k - 1 others with at most k - 1 times the one-sided
    probability of a single comparison (Bonferroni, whatever the dependence). These k values, 1 for the best,
    go into Benjamini and Hochberg's procedure. They depend on each other through the best and the pooled
    deviation: the better the best, the smaller are all. It is the positive dependence under which the
    procedure holds, proved for comparisons of many with one control (Benjamini and Yekutieli 2001,
    doi:10.1214/aos/1013699998) and simulated here for a control that is chosen.
    """
    finite = finite_only(scores)
    if not finite:
        return []
    layout = two_way(finite)
    several = [name for name, of_contender in finite.items() if len(of_contender) > 1]
    best = min(several or finite, key=layout.means.get)  # one seed makes nobody the best of the others
    compared = {best: None}
    ps = [1.0]
    for name, of_contender in finite.items():
        if name != best:
            difference = _difference(of_contender, finite[best], layout)
            compared[name] = difference
            one_sided = difference.p / 2 if difference.mean > 0 else 1.0
            ps.append(min(1.0, one_sided * (len(finite) - 1)))
    ranks = []
    for (name, difference), p in zip(compared.items(), benjamini_hochberg(ps), strict=True):
        ranks.append(Rank(name, layout.means[name], difference, p))
    decided = [rank for rank in ranks if rank.difference is None or rank.difference.seeds > 1]
    undecided = [rank for rank in ranks if rank not in decided]
    by_mean = operator.attrgetter("mean")
    return sorted(decided, key=by_mean) + sorted(undecided, key=by_mean)


def hopeless(scores: dict[str, list[float]], seeds: int, level: float = 0.01) -> list[str]:
    """Those whose further seeds can be saved: they diverged, or are worse than another beyond doubt.

    scores: {contender: its scores so far, all in the same order of seeds}. Looked at after every seed, from
    the second on. A contender with fewer scores than others has been stopped before, and still tells about
    the deviation. seeds: how many there are to be; after the last nothing is left to save.

    A contender is stopped when its mean lies further above another's than `limit` standard errors of their
    difference. The limit is that of the first look, where the deviation is known worst, for `level` over all
    comparisons of one contender; later looks keep it.

    Simulated with 12 contenders and 5 seeds, 8,000 races each: where all are equal, any is ever stopped in 2
    races of 1,000, and where the true means are spread evenly over 17 deviations, 39% of the runs are saved.
    A single best contender with 5 times the deviation of the others, which two seeds cannot tell from a tame
    one, is stopped in 5 of 1,000 (28% saved). Where all 12 are equal and one of them is that wild, one is
    stopped in 7 of 100; those that stay are as good.
    """
    finite = {name: list(of_one) for name, of_one in scores.items() if all(map(math.isfinite, of_one))}
    completed = max(map(len, scores.values()), default=0)
    if not finite or completed >= seeds:
        return []
    stopped = []
    for name, of_one in scores.items():
        if name not in finite and len(of_one) == completed:
            stopped.append(name)
    racing = [name for name, of_one in finite.items() if len(of_one) == completed]
    if completed < 2 or len(racing) < 2:
        return stopped

    _, df = moderated(0.0, 1, 0.0, len(finite) - 1)  # with two seeds
    limit = -special.stdtrit(df, level / (len(finite) - 1))
    layout = two_way({name: dict(enumerate(of_one)) for name, of_one in finite.items()})
    table = np.array([finite[name] for name in racing])  # (contenders, seeds)
    pairs = table[:, None] - table[None, :]  # (contenders, contenders, seeds)
    own = pairs.var(axis=2, ddof=1)
    variance, _ = moderated(own, completed - 1, 2 * layout.variance, layout.df)
    worse = pairs.mean(axis=2) > limit * np.sqrt(variance / completed)
    for name, beyond_doubt in zip(racing, worse.any(axis=1), strict=True):
        if beyond_doubt:
            stopped.append(name)
    return stopped


def benjamini_hochberg(ps: list[float]) -> list[float]:
    """p values adjusted for the false discovery rate: where those below alpha are called different, the
    expected share of false ones among them is at most alpha, for values that are independent or depend on
    each other positively (Benjamini and Yekutieli 2001).
    """
    return stats.false_discovery_control(ps).tolist() if ps else []


def verdict(difference: Difference, p: float, alpha: float = 0.05) -> str:
    """In words; lower scores are better. p: of this difference, adjusted where several are judged."""
    interval = f"(95% CI {difference.low:+.4f} to {difference.high:+.4f})"
    if difference.seeds == 0:
        return "no seed in common: cannot tell"
    if difference.seeds == 1:
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
