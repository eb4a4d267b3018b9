"""The law of loss over parameters and tokens, against runs made from constants that are known."""

import itertools
import math

import numpy as np
import pytest

from scripts.laboratory import scaling
from scripts.laboratory.scaling import Law, Point, Size

# The constants of Hoffmann et al. (arXiv 2203.15556, equation 10)
HOFFMANN = Law(1.69, math.log(406.4), 0.34, math.log(410.7), 0.28)
# Like those of models of a million parameters
SMALL = Law(0.7, math.log(40), 0.35, math.log(150), 0.4)
SIZES = [Size(depth, 50_000 * depth**2, 500_000 * depth**2) for depth in range(1, 13)]
DEPTHS = (2, 3, 4)
TOKENS = (250_000, 500_000, 1_000_000, 2_000_000)


def runs(law, depths=DEPTHS, tokens=TOKENS, noise=0.0, seed=0):
    """Every depth with every number of tokens, with losses of the law times e^(noise x N(0, 1))."""
    generator = np.random.default_rng(seed)
    points = []
    for depth, count in itertools.product(depths, tokens):
        size = SIZES[depth - 1]
        loss = law.loss(size.parameters, count) * math.exp(noise * generator.standard_normal())
        points.append(Point(size, count, loss))
    return points


def test_the_law_and_its_inverse():
    # Gopher and Chinchilla by hand: 1.69 + 0.052 + 0.251, 1.69 + 0.083 + 0.163
    assert HOFFMANN.loss(280e9, 300e9) == pytest.approx(1.993, abs=1e-3)
    assert HOFFMANN.loss(70e9, 1.4e12) == pytest.approx(1.936, abs=1e-3)
    assert (HOFFMANN.A, HOFFMANN.B) == (pytest.approx(406.4), pytest.approx(410.7))
    assert HOFFMANN.parameters_exponent == pytest.approx(0.28 / 0.62)
    assert HOFFMANN.tokens_to(HOFFMANN.loss(70e9, 1.4e12), 70e9) == pytest.approx(1.4e12)
    assert HOFFMANN.tokens_to(1.69, 70e9) == math.inf


@pytest.mark.parametrize("law", [HOFFMANN, SMALL])
def test_constants_are_recovered_from_exact_losses(law):
    fit = scaling.fit(runs(law), resamples=3)
    assert fit.noise < 1e-6
    for name in ("E", "log_A", "alpha", "log_B", "beta"):
        assert getattr(fit.law, name) == pytest.approx(getattr(law, name), rel=1e-3)


def test_a_fit_is_the_same_every_time_and_in_any_order():
    points = runs(SMALL, noise=0.003)
    first, again = scaling.fit(points, resamples=5), scaling.fit(points, resamples=5)
    assert first.law == again.law and np.array_equal(first.resampled.E, again.resampled.E)
    turned = scaling.fit(points[::-1], resamples=5)
    assert turned.law.E == pytest.approx(first.law.E, rel=1e-4)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Simulated: 15 families of 12 runs with 0.3% noise. A noise that is taken for half fails this."""
    flops = 10 * max(point.flops for point in runs(SMALL))
    held, widths = [], []
    for seed in range(15):
        fit = scaling.fit(runs(SMALL, noise=0.003, seed=seed), resamples=60, seed=seed)
        for name in ("E", "alpha", "beta", "parameters_exponent"):
            found = scaling.interval(getattr(fit.law, name), getattr(fit.resampled, name))
            held.append(found.low <= getattr(SMALL, name) <= found.high)
        advice = scaling.for_compute(fit, SIZES, flops)
        truth = SMALL.loss(advice.size.parameters, advice.tokens)
        held.append(advice.loss.low <= truth <= advice.loss.high)
        widths.append((advice.loss.high - advice.loss.low) / truth)
    assert 0.87 <= np.mean(held) <= 0.99
    assert np.median(widths) < 0.1  # ten times beyond the largest run


@pytest.mark.slow
@pytest.mark.parametrize("depths,tokens,noise", [(DEPTHS, TOKENS[:3], 0.001), ((1, 2, 3, 4), TOKENS, 0.005)])
def test_coverage_at_length(depths, tokens, noise):
    held = {"E": [], "alpha": [], "beta": [], "compute to a loss": [], "best depth": []}
    points = runs(SMALL, depths, tokens)
    flops = 3 * max(point.flops for point in points)
    losses = scaling.losses_after(SMALL, SIZES, flops)
    best = SIZES[losses.argmin()]
    for seed in range(20):
        fit = scaling.fit(runs(SMALL, depths, tokens, noise, seed), resamples=80, seed=seed)
        for name in ("E", "alpha", "beta"):
            found = scaling.interval(getattr(fit.law, name), getattr(fit.resampled, name))
            held[name].append(found.low <= getattr(SMALL, name) <= found.high)
        deepest, shallowest = scaling.for_compute(fit, SIZES, flops).depths[::-1]
        held["best depth"].append(shallowest <= best.depth <= deepest)
        advice = scaling.for_loss(fit, SIZES, losses.min())
        if advice is not None:
            tokens_needed = SMALL.tokens_to(losses.min(), advice.size.parameters)
            truth = tokens_needed * advice.size.flops_per_token
            held["compute to a loss"].append(advice.flops.low <= truth <= advice.flops.high)
    assert all(np.mean(of_one) >= 0.7 for of_one in held.values()), held
    assert np.mean([np.mean(of_one) for of_one in held.values()]) >= 0.85


def test_advice_for_compute_is_what_a_search_finds():
    fit = scaling.fit(runs(SMALL), resamples=5)
    for flops in (1e12, 3e13, 1e15):
        best = None
        for size in SIZES:
            tokens = np.geomspace(1e3, 1e10, 20_000)
            paid = tokens[tokens * size.flops_per_token <= flops]
            loss = SMALL.loss(size.parameters, paid).min()
            if best is None or loss < best[1]:
                best = size, loss
        advice = scaling.for_compute(fit, SIZES, flops)
        assert advice.size == best[0] and advice.loss.value == pytest.approx(best[1], rel=1e-3)
        assert advice.tokens * advice.size.flops_per_token == pytest.approx(flops)
        assert advice.flops.value == flops and math.isnan(advice.flops.low)


def test_advice_for_a_loss_is_what_a_search_finds():
    fit = scaling.fit(runs(SMALL), resamples=5)
    for loss in (2.0, 1.4, 1.1):
        best = None
        for size in SIZES:
            tokens = np.geomspace(1e3, 1e12, 20_000)
            there = tokens[SMALL.loss(size.parameters, tokens) <= loss]
            if len(there) and (best is None or there[0] * size.flops_per_token < best[1]):
                best = size, there[0] * size.flops_per_token
        advice = scaling.for_loss(fit, SIZES, loss)
        assert advice.size == best[0] and advice.flops.value == pytest.approx(best[1], rel=0.01)
        assert fit.law.loss(advice.size.parameters, advice.tokens) == pytest.approx(loss)
    assert scaling.for_loss(fit, SIZES, 0.7) is None  # the E of these runs


def test_the_larger_the_compute_the_deeper_the_model():
    fit = scaling.fit(runs(SMALL), resamples=5)
    depths = [scaling.for_compute(fit, SIZES, 10.0**power).size.depth for power in range(10, 17)]
    assert depths == sorted(depths) and depths[0] == 1 and depths[-1] > 4


@pytest.mark.parametrize(
    "depths,tokens,problem",
    [
        ((1, 2), TOKENS, "here are 8, of 2 and 4"),
        ((1, 2, 3, 4), TOKENS[:2], "here are 8, of 4 and 2"),
        ((1, 2), TOKENS[:2], "here are 4, of 2 and 2"),
        ((1, 2, 3), TOKENS[:3], None),
    ],
)
def test_too_few_runs_for_a_law_are_told_so(depths, tokens, problem):
    points = runs(SMALL, depths, tokens)
    if problem is None:
        assert scaling.why_no_law(points) is None
    else:
        assert problem in scaling.why_no_law(points)
        with pytest.raises(ValueError, match=problem):
            scaling.fit(points)
    assert scaling.why_no_law(runs(SMALL, (1, 2, 3), TOKENS[:3])[:6])  # six of nine


def test_runs_that_determine_nothing_do_so_without_an_error():
    """Losses that are the same for all, that rise, and that are noise: wide intervals, and no crash."""
    for change in (
        lambda point: 1.0,
        lambda point: 1 + point.tokens / 1e7,
        lambda point: 1 + hash(point) % 7,
    ):
        points = [Point(point.size, point.tokens, change(point)) for point in runs(SMALL)]
        fit = scaling.fit(points, resamples=20)
        advice = scaling.for_compute(fit, SIZES, 1e14)
        assert math.isfinite(advice.loss.value) and advice.depths[0] <= advice.depths[1]


def test_between_runs_without_a_law():
    small, large = SIZES[0], SIZES[3]
    points = [Point(small, 1_000, 2.0), Point(small, 4_000, 1.5), Point(large, 1_000, 1.8)]
    points.append(Point(large, 4_000, 1.2))
    # Half way between two runs, in logarithms
    half = 2_000 * small.flops_per_token
    advice = scaling.measured_for_compute(points, half)
    assert advice.size == small and advice.loss.value == pytest.approx(math.sqrt(2.0 * 1.5))
    assert advice.tokens == pytest.approx(2_000) and math.isnan(advice.loss.low) and advice.depths is None
    assert scaling.measured_for_compute(points, 5_000 * small.flops_per_token) is None
    # Both come to 1.7, and the small one with less compute; only the large one to 1.3
    assert scaling.measured_for_loss(points, 1.7).size == small
    back = scaling.measured_for_loss(points, math.sqrt(2.0 * 1.5))
    assert back.flops.value == pytest.approx(half)
    assert scaling.measured_for_loss(points, 1.3).size == large
    assert scaling.measured_for_loss(points, 1.1) is None
