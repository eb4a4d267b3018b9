"""A direction of one's own for matrices: a function trains the same
in every world and layout, and its state lives, is saved and moves as the second moment does.
"""

import pytest
import torch
from torch.distributed.tensor import Shard

from nanomuon.optim import DistMuonAdamW, MuonAdamW, muon_direction
from nanomuon.orthogonalize import orthogonalize
from tests import test_optim_dist, test_sharded
from tests.test_optim_dist import assert_close, assert_same_everywhere, build
from tests.worlds import run_world

# Squares, tall and wide ones, a single matrix, a batch, a convolution; AdamW beside them
MODEL = [("muon", shape) for shape in [(12, 12)] * 5 + [(16, 8), (8, 16), (16, 8), (10, 6)]]
MODEL += [("muon", shape) for shape in [(5, 8, 6), (6, 2, 3, 3)]]
MODEL += [("adamw", shape) for shape in [(1019, 3), (7,)]]
# FSDP2 cuts these by rows: not evenly, and one has fewer rows than there are ranks
CUT = [("muon", shape) for shape in [(12, 12)] * 4 + [(10, 6), (6, 10), (2, 9)]] + [("adamw", (1019, 3))]
ROWS = [Shard(0)]
TOLERANCE = 1e-9


def whitened(U, kept, ok, square_weight):
    """The momentum times the inverse root of a running mean of its Gram matrix: one side of Shampoo.

    U: (k, m, n). kept["gram"]: (k, m, m), updated in place.
    """
    gram = kept["gram"]
    gram.lerp_(U @ U.mT / U.size(2), square_weight * ok)
    values, vectors = torch.linalg.eigh(gram)  # (k, m), (k, m, m)
    roots = (values.clamp(min=0) + 1e-4).rsqrt().unsqueeze(1)  # (k, 1, m)
    X = (vectors * roots) @ vectors.mT @ U
    gain = torch.full_like(square_weight, 0.2)  # (k, 1, 1)
    return X, gain


def state_of_whitened(m, n):
    return {"gram": (m, m)}


whitened.state = state_of_whitened


def by_row(U, kept, ok, square_weight):
    """NorMuon (arXiv 2510.05491) with a second moment for every output row, of wide matrices too."""
    X = orthogonalize(U).to(square_weight.dtype)  # (k, m, n)
    second = kept["second_momentum_buffer"]  # (k, m, 1)
    second.lerp_(X.square().mean(dim=2, keepdim=True), square_weight * ok)
    scaled = X * second.clamp(min=1e-10).rsqrt()
    norm_before = torch.linalg.matrix_norm(X, keepdim=True)  # (k, 1, 1)
    norm_after = torch.linalg.matrix_norm(scaled, keepdim=True)
    return scaled, norm_before / norm_after.clamp(min=1e-10)


def state_of_by_row(m, n):
    return {"second_momentum_buffer": (m, 1)}


by_row.state = state_of_by_row


def like_the_default(U, kept, ok, square_weight):
    second = kept["second_momentum_buffer"]
    options = dict(coefficients="polar_express", ns_steps=5, row_equilibrate=False, renormalize=False)
    return muon_direction(U, second, square_weight * ok, **options)


def like_the_second_moment(m, n):
    return {"second_momentum_buffer": (m, 1) if m >= n else (1, n)}


like_the_default.state = like_the_second_moment


def sign(U, kept, ok, square_weight):
    assert not kept
    return U.sign(), torch.full_like(square_weight, 0.1)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """As in the worlds, which do not compile."""
    monkeypatch.setenv("NANOMUON_COMPILE", "0")


@pytest.mark.parametrize("direction", [whitened, sign])
@pytest.mark.parametrize("size", [2, 3])
def test_replicated_parameters_train_as_in_one_process(direction, size):
    options = [("direction", direction)]
    arguments = MODEL, 6, torch.float64, 5, None, options  # every fifth gradient is None on some rank
    results = run_world(size, test_optim_dist.many_processes, *arguments)
    assert_same_everywhere(results)
    expected = test_optim_dist.one_process(MODEL, size, 6, torch.float64, 5, direction=direction)
    assert_close(results[0], expected, TOLERANCE)


@pytest.mark.parametrize("direction", [whitened, sign, like_the_default])
@pytest.mark.parametrize("size", [2, 3])
def test_parameters_in_pieces_train_as_in_one_process(direction, size):
    options = [("direction", direction)]
    arguments = CUT, ("dp",), ROWS, 6, torch.float64, 5, options
    results = run_world(size, test_sharded.many_processes, *arguments)
    assert_same_everywhere(results)
    expected = test_sharded.one_process(CUT, 6, torch.float64, 5, direction=direction)
    assert_close(results[0], expected, TOLERANCE)


def test_tensor_parallel_ranks_gather_what_it_is_asked_for():
    arguments = CUT, ("tp",), ROWS, 6, torch.float64, 5, [("direction", whitened)]
    results = run_world(2, test_sharded.many_processes, *arguments)
    expected = test_sharded.one_process(CUT, 6, torch.float64, 5, direction=whitened)
    assert_close(results[0], expected, TOLERANCE)


@pytest.mark.parametrize("size", [1, 3])
def test_the_default_as_a_function_gives_what_the_default_gives(size):
    options = [("direction", like_the_default)]
    results = run_world(size, test_optim_dist.many_processes, MODEL, 6, torch.float64, 0, None, options)
    assert_close(results[0], test_optim_dist.one_process(MODEL, size, 6, torch.float64), TOLERANCE)


def test_the_second_moment_by_row_is_the_default_of_tall_matrices_and_not_of_wide_ones():
    tall = [("muon", (16, 8))] * 2
    ours, _ = test_optim_dist.one_process(tall, 1, 6, torch.float64, direction=by_row)
    default, _ = test_optim_dist.one_process(tall, 1, 6, torch.float64)
    for p, q in zip(ours, default, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=0)

    (param,), groups = build([("muon", (8, 16))], lr=0.1, weight_decay=0.0, scale="shape", direction=by_row)
    before, param.grad = param.detach().clone(), torch.randn(8, 16, dtype=torch.float64)
    MuonAdamW(groups).step()
    row_norms = (before - param.detach()).norm(dim=1)  # after one step every row is divided by its own norm
    torch.testing.assert_close(row_norms, row_norms.mean().expand(8), rtol=1e-9, atol=0)


def test_state_is_named_and_shaped_as_declared():
    _, groups = build(MODEL, direction=whitened)
    state = MuonAdamW(groups).full_state_dict()["state"]
    sides = [12, 12, 12, 12, 12, 16, 8, 16, 10]
    for i, m in enumerate(sides):
        assert state[f"p{i}"].keys() == {"momentum_buffer", "gram"}
        assert state[f"p{i}"]["gram"].shape == (m, m)
    assert state["p9"]["gram"].shape == (5, 8, 8)  # a batch has one for each of its matrices
    assert state["p10"]["gram"].shape == (6, 6)  # (out, rest) of a convolution


def test_a_skipped_step_changes_nothing():
    params, groups = build(MODEL, direction=whitened)
    optimizer = MuonAdamW(groups)
    for value in (float("nan"), 1.0, float("inf")):
        before = [p.detach().clone() for p in params], optimizer.full_state_dict()["state"]
        for param in params:
            param.grad = torch.ones_like(param)
        params[0].grad[0, 0] = value
        optimizer.step()
        if value != 1.0:
            assert_same_everywhere([before, (params, optimizer.full_state_dict()["state"])])
    assert optimizer.skipped_steps == 2


# ---- saved in one world, continued in another


def continued(group, in_pieces, weights, saved, start):
    """Three more steps on mean gradients in this world: what the next one needs."""
    mesh, placements = None, None
    if in_pieces:
        layout = ("dp",), ROWS, torch.float64, [("direction", whitened)]
        mesh, params, optimizer = test_sharded.sharded_model(group, CUT, *layout, seed=1)
        placements = ROWS
    else:
        params, groups = build(CUT, seed=1, direction=whitened)
        optimizer = DistMuonAdamW(groups, group) if group else MuonAdamW(groups)
    for param, weight in zip(params, weights, strict=True):
        param.data.copy_(test_sharded.cut(weight, mesh, ROWS) if in_pieces else weight)
    optimizer.load_state_dict(saved)
    test_sharded.train(optimizer, params, CUT, 3, torch.float64, start, mesh=mesh, placements=placements)
    return test_sharded.full(params), optimizer.full_state_dict()


def test_state_moves_between_worlds_and_layouts():
    params, groups = build(CUT, direction=whitened)
    optimizer = MuonAdamW(groups)
    weights, saved, start = [p.detach().clone() for p in params], optimizer.full_state_dict(), 0
    for size, in_pieces in [(2, False), (3, True), (3, False), (2, True)]:
        weights, saved = run_world(size, continued, in_pieces, weights, saved, start)[0]
        start += 3
        test_sharded.train(optimizer, params, CUT, 3, torch.float64, start=start - 3)
        expected = [p.detach() for p in params], optimizer.full_state_dict()["state"]
        assert_close((weights, saved["state"]), expected, TOLERANCE)
    weights, saved = continued(None, False, weights, saved, start)
    test_sharded.train(optimizer, params, CUT, 3, torch.float64, start=start)
    expected = [p.detach() for p in params], optimizer.full_state_dict()["state"]
    assert_close((weights, saved["state"]), expected, TOLERANCE)
