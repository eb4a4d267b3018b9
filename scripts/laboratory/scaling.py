"""What compute buys: the loss as a function of parameters and tokens, fitted to finished runs, and what
follows from it: how large a model and how many tokens for an amount of compute, or for a loss.

Pure functions of numbers; scaling_runs.py trains the runs, scaling_report.py says what came out.

    loss(N, D) = E + A / N^alpha + B / D^beta

is the law of Hoffmann et al. (arXiv 2203.15556, approach 3). N: parameters of the matrices and the head, as
in --target-param-data-ratio; D: tokens trained on. Compute is D times the model's FLOPs per token
(GPT.estimate_flops, PaLM's convention) and not 6 N D: attention counts as well, which matters where models
are small and contexts long.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from scripts.laboratory import compare

CONSTANTS = ("E", "A", "alpha", "B", "beta")
# Fewer runs than this, or of fewer depths or token counts, do not determine five constants and leave
# something to tell their noise by
FEWEST_RUNS = len(CONSTANTS) + 2
FEWEST_KINDS = 3
EXPONENTS = (0.1, 0.2, 0.4, 0.8, 1.6)  # of alpha and beta, from each pair of which a fit begins
STEEPEST = 100  # an exponent that is larger is none of a loss
RESAMPLES = 500
LOW, HIGH = 2.5, 97.5  # percentiles of a 95% interval


@dataclass(frozen=True)
class Size:
    """A model of the family."""

    depth: int
    parameters: int  # of the matrices and the head
    flops_per_token: int  # of training


@dataclass(frozen=True)
class Point:
    """A finished run."""

    size: Size
    tokens: int
    loss: float

    @property
    def flops(self) -> float:
        return self.size.flops_per_token * self.tokens


@dataclass(frozen=True)
class Law:
    """loss = E + A / N^alpha + B / D^beta; each constant a number, or an array with one of every resample.

    A and B by their logarithms: a steep law of a resample has larger ones than there are numbers.
    """

    E: float | np.ndarray  # what no model and no amount of data takes away
    log_A: float | np.ndarray
    alpha: float | np.ndarray
    log_B: float | np.ndarray
    beta: float | np.ndarray

    @property
    def A(self):
        return exp(self.log_A)

    @property
    def B(self):
        return exp(self.log_B)

    def model_term(self, parameters):
        return exp(self.log_A - self.alpha * np.log(parameters))

    def data_term(self, tokens):
        return exp(self.log_B - self.beta * np.log(tokens))

    def loss(self, parameters, tokens):
        return self.E + self.model_term(parameters) + self.data_term(tokens)

    def tokens_to(self, loss, parameters):
        """Tokens after which a model of that many parameters has that loss; infinite where it never has."""
        left = loss - self.E - self.model_term(parameters)  # for the term of the data
        reachable = left > 0
        log_tokens = (self.log_B - np.log(np.where(reachable, left, 1.0))) / self.beta
        return np.where(reachable, exp(log_tokens), math.inf)

    @property
    def parameters_exponent(self):
        """By this power of compute the best number of parameters grows, and tokens by the rest of 1 (Hoffmann
        et al., equation 4, where a token takes 6 FLOPs per parameter).
        """
        return self.beta / (self.alpha + self.beta)


@dataclass(frozen=True)
class Fit:
    """law: that fits best. noise: standard deviation of the runs' losses around it, relative to the loss.

    resampled: the laws that fit as many made-up runs, drawn around this law with noise like that of the runs:
    how far they differ is how little the runs determine it.
    """

    law: Law
    noise: float
    resampled: Law  # arrays (RESAMPLES,)


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% interval. The ends are NaN where none is known, and may be infinite."""

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Advice:
    """Which model to train on how many tokens, what that costs and what it brings.

    Of flops and loss, the one that was given has no interval. depths: 95% of the laws that fit as well call a
    depth from this to that the best; None without a law.
    """

    size: Size
    tokens: float
    flops: Interval
    loss: Interval
    depths: tuple[int, int] | None = None


def why_no_law(points: list[Point]) -> str | None:
    """In words, what is missing to fit a law to these runs; None where nothing is."""
    depths = len({point.size.depth for point in points})
    tokens = len({point.tokens for point in points})
    if len(points) >= FEWEST_RUNS and min(depths, tokens) >= FEWEST_KINDS:
        return None
    return (
        f"a law of {len(CONSTANTS)} constants takes {FEWEST_RUNS} runs at least, of {FEWEST_KINDS} depths "
        f"and {FEWEST_KINDS} numbers of tokens; here are {len(points)}, of {depths} and {tokens}"
    )


def fit(points: list[Point], resamples: int = RESAMPLES, seed: int = 0) -> Fit:
    """The law that fits these runs by least squares of the logarithm of the loss, and how well they determine
    it: a parametric bootstrap.

    Hoffmann et al. minimize a Huber loss of the same differences, against outliers among 400 runs; a dozen
    has none to spare. In simulations with 9 to 16 runs and noise of 0.1 to 1.5%, 83 to 100% of the 95%
    intervals hold the true value (docs/log.md). ValueError where there are too few runs: see why_no_law.
    """
    problem = why_no_law(points)
    if problem is not None:
        raise ValueError(problem)
    parameters = np.array([point.size.parameters for point in points], dtype=float)
    tokens = np.array([point.tokens for point in points], dtype=float)
    losses = np.log([point.loss for point in points])
    # Around the middle of the runs, so that the constants of one term hardly depend on its exponent
    middle = np.log(parameters).mean(), np.log(tokens).mean()
    n, d = np.log(parameters) - middle[0], np.log(tokens) - middle[1]

    best = least_squares(n, d, losses, first_guess(n, d, np.exp(losses)))
    freedom = len(points) - len(CONSTANTS)
    fitted = log_loss(best, n, d)
    noise = math.sqrt(np.sum((losses - fitted) ** 2) / freedom)

    # Made-up runs around the law. How large the noise is, few runs do not tell exactly: it is drawn too, by
    # which intervals get as wide as Student's
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        deviation = noise * math.sqrt(freedom / generator.chisquare(freedom))
        made_up = fitted + deviation * generator.standard_normal(len(points))
        drawn.append(least_squares(n, d, made_up, best))
    return Fit(as_law(best, *middle), noise, as_law(np.array(drawn).T, *middle))


def log_terms(constants: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """(3, runs): logarithms of the three terms of the law. n, d: those of parameters and tokens, from their
    middle on.

    constants: logarithms of the terms at n = d = 0 and of the two exponents, so that all five are positive.
    """
    irreducible, of_parameters, of_tokens, log_alpha, log_beta = constants
    model_term = of_parameters - exponent(log_alpha) * n
    data_term = of_tokens - exponent(log_beta) * d
    return np.stack([np.full_like(n, irreducible), model_term, data_term])


def exp(logarithm):
    """np.exp without a warning where that is infinite."""
    with np.errstate(over="ignore"):
        return np.exp(logarithm)


def exponent(logarithm):
    """Held below STEEPEST: where a search steps too far, it shall still find a number there."""
    return np.exp(np.minimum(logarithm, math.log(STEEPEST)))


def log_loss(constants: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """(runs,) logarithms of the law's losses."""
    return np.logaddexp.reduce(log_terms(constants, n, d))


def derivatives(constants: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """(runs, 5) of log_loss by the constants."""
    shares = np.exp(log_terms(constants, n, d) - log_loss(constants, n, d))  # of the loss, of each term
    irreducible, of_parameters, of_tokens = shares
    by_log_alpha = -of_parameters * exponent(constants[3]) * n
    by_log_beta = -of_tokens * exponent(constants[4]) * d
    return np.stack([irreducible, of_parameters, of_tokens, by_log_alpha, by_log_beta], axis=1)


def least_squares(n: np.ndarray, d: np.ndarray, losses: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The constants (see terms) whose log_loss comes closest to these logarithms of losses, (5,)."""
    found = optimize.least_squares(
        lambda constants: log_loss(constants, n, d) - losses,
        start,
        lambda constants: derivatives(constants, n, d),
        method="lm",
        max_nfev=400,
    )
    return found.x


def first_guess(n: np.ndarray, d: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Constants to begin with. For fixed exponents the law is linear in the rest: pairs of them are tried."""
    best, least = None, math.inf
    for alpha in EXPONENTS:
        for beta in EXPONENTS:
            columns = np.stack([np.ones_like(n), np.exp(-alpha * n), np.exp(-beta * d)], axis=1)
            relative = columns / losses[:, None]
            factors, error = optimize.nnls(relative, np.ones_like(losses))
            if error < least:
                least = error
                best = np.array([*np.log(np.maximum(factors, 1e-6)), math.log(alpha), math.log(beta)])
    return best


def as_law(constants: np.ndarray, middle_n: float, middle_d: float) -> Law:
    """The law in its usual constants. constants: (5,) or (5, resamples), see terms."""
    irreducible, of_parameters, of_tokens, log_alpha, log_beta = constants
    alpha, beta = exponent(log_alpha), exponent(log_beta)
    return Law(
        E=exp(irreducible),
        log_A=of_parameters + alpha * middle_n,
        alpha=alpha,
        log_B=of_tokens + beta * middle_d,
        beta=beta,
    )


def interval(value: float, resampled: np.ndarray) -> Interval:
    """Of a number that follows from a law: from the law itself, and from those of the resamples."""
    low, high = np.percentile(resampled, [LOW, HIGH], method="nearest")  # of infinite ones, too
    return Interval(float(value), float(low), float(high))


def losses_after(law: Law, sizes: list[Size], flops: float) -> np.ndarray:
    """(sizes,) or (sizes, resamples): the loss of each model that is trained with so much compute."""
    return np.array([law.loss(size.parameters, flops / size.flops_per_token) for size in sizes])


def flops_to(law: Law, sizes: list[Size], loss: float) -> np.ndarray:
    """(sizes,) or (sizes, resamples): the compute that brings each model to that loss, infinite for never."""
    return np.array([size.flops_per_token * law.tokens_to(loss, size.parameters) for size in sizes])


def for_compute(fit: Fit, sizes: list[Size], flops: float) -> Advice:
    """Which of these models has the least loss after so much compute."""
    losses = losses_after(fit.law, sizes, flops)
    resampled = losses_after(fit.resampled, sizes, flops)
    best = int(np.argmin(losses))
    return Advice(
        sizes[best],
        flops / sizes[best].flops_per_token,
        Interval(flops),
        interval(losses[best], resampled[best]),
        best_depths(sizes, resampled),
    )


def for_loss(fit: Fit, sizes: list[Size], loss: float) -> Advice | None:
    """Which of these models has that loss after the least compute; None where none of them ever has it."""
    flops = flops_to(fit.law, sizes, loss)
    resampled = flops_to(fit.resampled, sizes, loss)
    best = int(np.argmin(flops))
    if math.isinf(flops[best]):
        return None
    return Advice(
        sizes[best],
        float(flops[best] / sizes[best].flops_per_token),
        interval(flops[best], resampled[best]),
        Interval(loss),
        best_depths(sizes, resampled),
    )


def best_depths(sizes: list[Size], resampled: np.ndarray) -> tuple[int, int]:
    """From which depth to which 95% of the resamples have their best. resampled: (sizes, resamples), less is
    better.
    """
    depths = np.array([size.depth for size in sizes])[resampled.argmin(axis=0)]
    low, high = np.percentile(depths, [LOW, HIGH], method="nearest")
    return int(low), int(high)


def by_depth(points: list[Point]) -> dict[int, list[Point]]:
    """{depth: its runs}, both in order of size."""
    curves = {}
    for point in sorted(points, key=lambda point: (point.size.depth, point.tokens)):
        curves.setdefault(point.size.depth, []).append(point)
    return curves


def measured_for_compute(points: list[Point], flops: float) -> Advice | None:
    """Like for_compute without a law: between two runs of a depth the loss is interpolated, beyond them
    nothing is known. None where no depth has runs on both sides.
    """
    best = None
    for curve in by_depth(points).values():
        computes = [point.flops for point in curve]
        if not computes[0] <= flops <= computes[-1]:
            continue
        losses = [math.log(point.loss) for point in curve]
        loss = math.exp(np.interp(math.log(flops), np.log(computes), losses))
        if best is None or loss < best.loss.value:
            size = curve[0].size
            best = Advice(size, flops / size.flops_per_token, Interval(flops), Interval(loss))
    return best


def measured_for_loss(points: list[Point], loss: float) -> Advice | None:
    """Like for_loss without a law; see measured_for_compute."""
    best = None
    for curve in by_depth(points).values():
        on_the_way = [(math.log(point.flops), math.log(point.loss)) for point in curve]
        reached = compare.crossing(on_the_way, math.log(loss))
        if reached is None:
            continue
        flops = math.exp(reached)
        if best is None or flops < best.flops.value:
            size = curve[0].size
            best = Advice(size, flops / size.flops_per_token, Interval(flops), Interval(loss))
    return best
