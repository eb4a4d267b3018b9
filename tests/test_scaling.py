"""The law of loss over parameters and tokens, against runs made from constants that are known."""

import itertools
import math

import numpy as np
import pytest

from nanomuon import scaling
from nanomuon.scaling import Law, Point, Size

# The constants of Hoffmann et al. (arXiv 2203.15556, equation 10)
HOFFMANN = Law(1.69, math.log(406.4), 0.34, math.log(410.7), 0.28)
# Of the kind that small models have, whose tokens and parameters are both few
SMALL = Law(0.7, math.log(40), 0.35, math.log(150), 0.4)
SIZES = [Size(depth, 50_000 * depth**2, 500_000 * depth**2) for depth in range(1, 13)]


def runs(law, depths, tokens, noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    points = []
    for depth, count in itertools.product(depths, tokens):
        size = SIZES[depth - 1]
        loss = law.loss(size.parameters, count) * math.exp(noise * generator.standard_normal())
        points.append(Point(size, count, loss))
    return points


GRID = ((2, 3, 4), (250_000, 500_000, 1_000_000, 2_000_000))


@pytest.mark.parametrize("law", [HOFFMANN, SMALL])
def test_constants_are_recovered_from_exact_losses(law):
    fit = scaling.fit(runs(law, *GRID), resamples=3)
    assert fit.noise < 1e-6
    for name in ("E", "log_A", "alpha", "log_B", "beta"):
        assert getattr(fit.law, name) == pytest.approx(getattr(law, name), rel=1e-3)
