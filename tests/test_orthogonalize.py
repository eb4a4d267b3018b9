"""orthogonalize against the SVD: the polar factor, and the scalar polynomial on the singular values."""

from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanomuon.orthogonalize import (
    COEFFICIENTS,
    newton_schulz_form,
    orthogonalize,
    triples,
)

# images of the singular values in [0.01, 1], in exact arithmetic
RANGES = {
    "simple": (0.68, 1.13),
    "quintic": (0.978, 1.032),
    "polar_express": (0.86, 1.14),
    "cans": (0.88, 1.12),
    "deepseekv4": (1.000, 1.001),
}
SHAPES = [(24, 24), (48, 24), (24, 48), (24, 100), (130, 24), (3, 24, 40), (2, 2, 30, 24), (1, 17), (17, 1)]


def matrix(shape, condition, seed=0):
    """A matrix with singular values from 1 down to 1/condition, in a geometric series, and its U, s, Vh."""
    g = torch.Generator().manual_seed(seed)
    U, _, Vh = torch.linalg.svd(torch.randn(shape, generator=g, dtype=torch.float64), full_matrices=False)
    s = torch.logspace(
        0, -torch.log10(torch.tensor(float(condition))).item(), min(shape[-2:]), dtype=torch.float64
    )
    return U @ torch.diag(s) @ Vh, U, s, Vh


def in_form(gram, *args):
    """orthogonalize(*args) in the Gram form or the plain one."""
    with mock.patch("nanomuon.orthogonalize.newton_schulz_form", lambda *_: (gram, torch.float32)):
        return orthogonalize(*args)


def image(s, steps):
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_follow_the_polynomial_and_the_vectors_stay(name, shape):
    for condition in (1, 1e2, 1e4, 1e6):
        G, U, s, Vh = matrix(shape, condition)
        norm = s.square().sum().sqrt()
        start = s / (1.02 * norm + 1e-6) if name == "polar_express" else s / norm
        expected = U @ torch.diag(image(start, COEFFICIENTS[name])) @ Vh
        # the steps amplify a small singular value, and its rounding with it
        tolerance = 1e-7 if name == "deepseekv4" else 1e-10
        for actual in (orthogonalize(G, name), in_form(False, G, name)):
            assert actual.dtype == torch.float64 and actual.shape == G.shape
            torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(513, 560), (560, 513), (513, 513)], ids=str)
def test_one_large_matrix(shape):
    """A CPU computes its Gram matrix in strips."""
    G, U, s, Vh = matrix(shape, 1e3)
    expected = U @ torch.diag(image(s / (1.02 * s.norm() + 1e-6), COEFFICIENTS["polar_express"])) @ Vh
    torch.testing.assert_close(in_form(False, G), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_the_published_range_of_each_set(name):
    low, high = RANGES[name]
    values = image(torch.linspace(0.01, 1, 100_001, dtype=torch.float64), COEFFICIENTS[name])
    assert low - 0.006 < values.min() and values.max() < high + 0.006
    assert values.min() < low + 0.02 and values.max() > high - 0.02


@pytest.mark.parametrize("name", [name for name in COEFFICIENTS if name != "deepseekv4"])
def test_gram_form_equals_plain(name):
    for shape in [(40, 200), (200, 40), (2, 40, 64), (40, 40)]:
        for condition, tolerance in ((1, 2e-5), (1e3, 3e-4)):
            G = matrix(shape, condition)[0].float()
            plain, gram = in_form(False, G, name), in_form(True, G, name)
            assert (plain - gram).norm() / plain.norm() < tolerance
    for steps in (1, 2, 3, 4):  # fewer steps, with and without the restart
        G = matrix((40, 200), 100)[0]
        torch.testing.assert_close(in_form(True, G, name, steps), in_form(False, G, name, steps))


def test_the_form_follows_the_shape_the_number_of_steps_the_device_and_the_dtype():
    gram, plain = (True, torch.float32), (False, torch.float32)
    assert newton_schulz_form(512, 2048, 5) == newton_schulz_form(2048, 512, 5) == gram
    assert newton_schulz_form(512, 512, 5) == newton_schulz_form(512, 768, 5) == plain
    assert newton_schulz_form(512, 2048, 10) == plain
    wide = (512, 2048, 5)
    assert newton_schulz_form(*wide, "cuda") == (True, torch.float16)
    assert newton_schulz_form(*wide, "cuda", torch.bfloat16) == (True, torch.float16)
    assert newton_schulz_form(*wide, "cuda", torch.float32) == gram
    assert newton_schulz_form(*wide, "cpu", torch.bfloat16) == (False, torch.bfloat16)
    assert newton_schulz_form(512, 512, 5, "cuda") == (False, torch.bfloat16)


@pytest.mark.parametrize(
    "shape, gram", [((32, 32), False), ((32, 128), True), ((32, 128), False), ((64, 32), True)]
)
def test_five_steps_compute_the_products_that_each_form_needs(shape, gram):
    with FlopCounterMode(display=False) as counter:
        in_form(gram, torch.randn(shape))
    r = max(shape) / 32
    assert counter.get_total_flops() == 32**3 * (8 * r + 28 if gram else 20 * r + 10)


def test_number_of_steps():
    assert triples("quintic", 7)[4:] == (COEFFICIENTS["quintic"][-1],) * 3
    assert triples([[2, -1.5, 0.5]], 2) == ((2.0, -1.5, 0.5),) * 2
    for wrong in ([], [(1, 2)]):
        with pytest.raises(ValueError):
            triples(wrong, None)


def test_dtypes_and_degenerate_matrices():
    G = matrix((24, 60), 10)[0]
    assert orthogonalize(G.float()).dtype == torch.float32
    assert orthogonalize(G.bfloat16()).dtype == torch.float32  # on a CPU
    for name in COEFFICIENTS:
        assert orthogonalize(torch.zeros(3, 8, 20), name).eq(0).all()
    for size in (1e-20, 1e-8, 1e15):  # the norm of tiny and huge matrices neither vanishes nor overflows
        assert orthogonalize(G.float() * size, "simple").isfinite().all()
    for shape in (0, 5), (5, 0), (0, 3, 5), (2, 0, 5):  # like the pieces of a rank without any
        assert orthogonalize(torch.zeros(shape)).shape == shape
    for no_matrix in (torch.zeros(5), torch.zeros(3, 4, dtype=torch.complex64)):
        with pytest.raises(ValueError, match="takes real matrices, not torch.* of shape"):
            orthogonalize(no_matrix)
    rank_one = torch.outer(torch.arange(1.0, 9), torch.arange(1.0, 6)).double()
    assert (orthogonalize(rank_one, "deepseekv4") - rank_one / rank_one.norm()).abs().max() < 2e-3
