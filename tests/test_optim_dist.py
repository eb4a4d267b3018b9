"""DistMuonAdamW in gloo worlds of 1 to 4 ranks against MuonAdamW on the mean gradient."""

import math
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nanomuon.optim as optim
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.optim_state import local
from tests.reference import distance
from tests.worlds import run_world

MUON = dict(kind="muon", lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.1)
ADAMW = dict(kind="adamw", lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


@pytest.fixture(autouse=True, scope="module")
def eager():
    """As in the worlds, whose processes have one thread and no compilation."""
    before, threads = os.environ.get("NANOMUON_COMPILE"), torch.get_num_threads()
    os.environ["NANOMUON_COMPILE"] = "0"
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    os.environ.pop("NANOMUON_COMPILE") if before is None else os.environ.update(NANOMUON_COMPILE=before)


# (kind, shape): K not dividing, K < W, one matrix, transposes, a batch, a convolution; odd rows, few rows,
# tiny ones
MIXED = (
    [("muon", s) for s in [(16, 16)] * 5 + [(24, 12), (12, 24), (24, 12), (20, 10)]]
    + [("muon", s) for s in [(5, 12, 8), (2, 8, 8), (8, 3, 3, 3)]]
    + [("adamw", s) for s in [(1019, 17), (3, 700), (1500,), (64, 32), (7,), (), (10, 10)]]
)


def build(model, dtype=torch.float64, seed=0, **options):
    """Parameters and groups of a model given as (kind, shape) pairs; every third one in a second group of its
    kind.
    """
    g = torch.Generator().manual_seed(seed)
    params, groups = [], {}
    for i, (kind, shape) in enumerate(model):
        param = torch.nn.Parameter((torch.randn(shape, generator=g, dtype=torch.float64) * 0.1).to(dtype))
        params.append(param)
        base = {**MUON, "lr": 0.02 + 0.01 * (i % 3 == 0), **options} if kind == "muon" else ADAMW
        group = groups.setdefault((kind, i % 3 == 0), dict(base, params=[], names=[]))
        group["params"].append(param)
        group["names"].append(f"p{i}")
    return params, list(groups.values())


def local_gradient(i, shape, dtype, step, rank, holes):
    """What rank `rank` got for parameter i; None where `holes` says so."""
    if holes and (i + step + rank) % holes == 0:
        return None
    g = torch.Generator().manual_seed(100_000 * i + 100 * step + rank)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def mean_gradient(i, shape, dtype, step, size, holes):
    """None on some ranks counts as zero there; None on all of them is none."""
    grads = [local_gradient(i, shape, torch.float64, step, rank, holes) for rank in range(size)]
    grads = [grad for grad in grads if grad is not None]
    return (sum(grads) / size).to(dtype) if grads else None


def one_process(model, size, steps, dtype, holes=0, start=0, ns_dtype=None, **options):
    params, groups = build(model, dtype, **options)
    optimizer = MuonAdamW(groups, ns_dtype=ns_dtype)
    for step in range(start, start + steps):
        for i, (_, shape) in enumerate(model):
            params[i].grad = mean_gradient(i, shape, dtype, step, size, holes)
        optimizer.step()
    return [p.detach() for p in params], optimizer.full_state_dict()["state"]


def set_local_gradients(group, params, model, dtype, step, holes):
    for i, (_, shape) in enumerate(model):
        params[i].grad = local_gradient(i, shape, dtype, step, dist.get_rank(group), holes)


def many_processes(group, model, steps, dtype, holes=0, comm_dtype=None, options=(), ns_dtype=None):
    # a different seed per rank: only the broadcast from rank 0 makes them one model
    params, groups = build(model, dtype, seed=dist.get_rank(group), **dict(options))
    optimizer = DistMuonAdamW(groups, group, comm_dtype, ns_dtype=ns_dtype)
    for step in range(steps):
        set_local_gradients(group, params, model, dtype, step, holes)
        before = [None if p.grad is None else p.grad.clone() for p in params]
        optimizer.step()
        for p, grad in zip(params, before, strict=True):
            assert p.grad is None and grad is None or torch.equal(p.grad, grad), "step() changed p.grad"
    return [p.detach() for p in params], optimizer.full_state_dict()["state"]


def assert_same_everywhere(results):
    for params, state in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(params, results[0][0], strict=True))
        assert all(
            torch.equal(v, state[n][k]) for n, entry in results[0][1].items() for k, v in entry.items()
        )


def assert_close(result, expected, tolerance):
    for i, (p, q) in enumerate(zip(result[0], expected[0], strict=True)):
        assert distance(p, q) < tolerance, f"p{i}"
    assert result[1].keys() == expected[1].keys()
    for name, entry in expected[1].items():
        assert result[1][name].keys() == entry.keys()
        for key, value in entry.items():
            assert result[1][name][key].dtype == value.dtype
            assert distance(result[1][name][key], value) < max(tolerance, 1e-9), (name, key)


# ---- the same trajectory


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "dtype, decay, tolerance",
    [
        (torch.float64, "cautious", 1e-10),
        (torch.float32, "decoupled", 2e-5),
        (torch.float32, "cautious", 3e-4),
    ],
    ids=["float64", "float32-decoupled", "float32-cautious"],
)
def test_n_ranks_are_one_process_on_the_mean_gradient(size, dtype, decay, tolerance):
    results = run_world(size, many_processes, MIXED, 20, dtype, 5, None, [("weight_decay_form", decay)])
    assert_same_everywhere(results)
    assert_close(results[0], one_process(MIXED, size, 20, dtype, 5, weight_decay_form=decay), tolerance)


@pytest.mark.parametrize("size", [2, 3])
def test_n_ranks_are_one_process_with_newton_schulz_in_bf16(size):
    """Sums in another order change the last bit of some entries before they are rounded to bf16; so worlds
    part, but by less than rounding every entry parts bf16 from float32.
    """
    matrices = [entry for entry in MIXED if entry[0] == "muon"]
    decay = ("weight_decay_form", "decoupled")
    results = run_world(size, many_processes, matrices, 20, torch.float32, 0, None, [decay], torch.bfloat16)
    assert_same_everywhere(results)
    start, _ = build(matrices, torch.float32)
    in_bf16, state = one_process(matrices, size, 20, torch.float32, 0, 0, torch.bfloat16, **dict([decay]))
    in_float32, _ = one_process(matrices, size, 20, torch.float32, 0, **dict([decay]))
    assert all(value.dtype == torch.float32 for entry in state.values() for value in entry.values())
    for ours, p, p32, before in zip(results[0][0], in_bf16, in_float32, start, strict=True):
        way = (p - before.detach()).norm()
        rounding = (p - p32).norm() / way
        assert 1e-4 < rounding < 0.03
        assert (ours - p).norm() / way < 0.5 * rounding


def test_world_of_one_is_bitwise_muonadamw():
    ((params, state),) = run_world(1, many_processes, MIXED, 5, torch.float32, 3)
    expected = one_process(MIXED, 1, 5, torch.float32, 3)
    assert all(torch.equal(p, q) for p, q in zip(params, expected[0], strict=True))
    assert all(torch.equal(v, state[n][k]) for n, entry in expected[1].items() for k, v in entry.items())


def test_no_process_group_is_a_world_of_one_but_not_under_torchrun(monkeypatch):
    params, groups = build(MIXED[:3])
    DistMuonAdamW(groups).step()
    with pytest.raises(ValueError, match="comm_dtype=torch.float16"):
        DistMuonAdamW(build(MIXED[:3])[1], comm_dtype=torch.float16)
    with pytest.raises(ValueError, match="ns_dtype is None, torch.float32 or torch.bfloat16"):
        DistMuonAdamW(build(MIXED[:3])[1], ns_dtype=torch.float16)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group"):
        DistMuonAdamW(build(MIXED[:3])[1])


def test_an_odd_vocabulary():
    model = [("adamw", (50257, 17)), ("muon", (17, 17))]
    results = run_world(3, many_processes, model, 3, torch.float32)
    assert_same_everywhere(results)
    assert_close(results[0], one_process(model, 3, 3, torch.float32), 2e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_bf16_parameters(size):
    model = [("muon", (16, 16))] * 3 + [("adamw", (1019, 3)), ("adamw", (9,))]
    results = run_world(size, many_processes, model, 5, torch.bfloat16)
    assert_same_everywhere(results)
    assert_close(results[0], one_process(model, size, 5, torch.bfloat16), 0.03)
    assert all(v.dtype == torch.float32 for entry in results[0][1].values() for v in entry.values())


def mixed_dtypes(group):
    params = [
        torch.nn.Parameter(torch.ones(shape, dtype=d)) for shape in [(8, 8), (5,), (600, 2)] for d in DTYPES
    ]
    groups = [dict(MUON, params=params[:3]), dict(ADAMW, params=params[3:])]
    optimizer = DistMuonAdamW(groups, group)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = local_gradient(i // 3, p.shape, p.dtype, step, dist.get_rank(group), 0)
        optimizer.step()
    return [p.detach() for p in params]


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def test_different_dtypes_in_one_model():
    first, second = run_world(2, mixed_dtypes)
    assert all(torch.equal(p, q) and p.dtype == q.dtype for p, q in zip(first, second, strict=True))
    for i in range(0, 9, 3):
        assert distance(first[i + 1], first[i]) < 0.05 and distance(first[i + 2], first[i]) < 1e-3


def test_float32_reduction_of_bf16_gradients():
    """The mean of 1 and 2^-9 (twice) is beyond bf16's eight bits when summed in bf16, not in float32."""
    for comm_dtype, expected in ((None, False), (torch.float32, True)):
        results = run_world(3, first_moment, comm_dtype)
        exact = (1 + 2 * 2**-9) / 3
        for moments in results:
            for moment in moments:
                assert (abs(moment / exact - 1).max() < 1e-4) == expected


def first_moment(group, comm_dtype):
    """Momentum after one step of a Muon bank, a sliced and a small AdamW parameter, over the weight of the
    gradient.
    """
    shapes = [(8, 8), (512, 3), (6,)]
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    optimizer = DistMuonAdamW(
        [dict(MUON, params=params[:1]), dict(ADAMW, params=params[1:])], group, comm_dtype
    )
    for p in params:
        p.grad = torch.full_like(p, 1.0 if dist.get_rank(group) == 0 else 2**-9)
    optimizer.step()
    state = optimizer.full_state_dict()["state"]
    return [
        state["group0.0"]["momentum_buffer"] / 0.05,
        *(state[f"group1.{i}"]["exp_avg"] / 0.1 for i in (0, 1)),
    ]


shapes = st.one_of(
    st.tuples(
        st.just("muon"), st.sampled_from([(6, 6), (6, 9), (9, 6), (4, 40), (3, 5, 6), (1, 8), (6, 2, 3, 3)])
    ),
    st.tuples(st.just("adamw"), st.sampled_from([(2, 600), (103, 11), (1025,), (5,), (), (0, 3), (7, 4)])),
)


@settings(max_examples=25, deadline=None)
@given(
    model=st.lists(shapes, min_size=1, max_size=12), size=st.integers(2, 4), holes=st.sampled_from([0, 2, 3])
)
def test_any_model_in_any_world(model, size, holes):
    results = run_world(size, many_processes, model, 2, torch.float64, holes)
    assert_same_everywhere(results)
    assert_close(results[0], one_process(model, size, 2, torch.float64, holes), 1e-10)


# ---- what must hold


def with_a_bad_gradient(group, value, where):
    params, groups = build(MIXED, torch.float32)
    optimizer = DistMuonAdamW(groups, group)
    for step in range(4):
        set_local_gradients(group, params, MIXED, torch.float32, step if step < 2 else step - 1, 0)
        if step == 2:
            before = [p.detach().clone() for p in params], optimizer.full_state_dict()["state"]
            if dist.get_rank(group) == 1:
                params[where].grad.view(-1)[0] = value
        optimizer.step()
        if step == 2:
            state = optimizer.full_state_dict()["state"]
            assert all(torch.equal(p, q) for p, q in zip(params, before[0], strict=True))
            assert all(
                torch.equal(v, state[n][k]) for n, entry in before[1].items() for k, v in entry.items()
            )
    assert optimizer.skipped_steps.item() == 1
    return [p.detach() for p in params]


@pytest.mark.parametrize("value, where", [(math.nan, 0), (math.inf, 9), (-math.inf, 12), (math.nan, 17)])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(value, where):
    results = run_world(3, with_a_bad_gradient, value, where)
    expected = run_world(3, many_processes, MIXED, 3, torch.float32)[0][0]
    assert all(torch.equal(p, q) for result in results for p, q in zip(result, expected, strict=True))


def frozen_on_one_rank(group, gradient_is_left):
    """Parameters after a step for which rank 1 has frozen all of its own."""
    params, groups = build(MIXED)
    optimizer = DistMuonAdamW(groups, group)
    set_local_gradients(group, params, MIXED, torch.float64, 0, 0)
    if dist.get_rank(group) == 1:
        for param in params:
            param.requires_grad_(False)
            if not gradient_is_left:
                param.grad = None
    optimizer.step()
    return [p.detach() for p in params]


def test_gradients_from_before_a_freeze_count_as_zero_on_that_rank():
    """As in one process, where a frozen parameter is left alone."""
    with_them = run_world(2, frozen_on_one_rank, True)
    without = run_world(2, frozen_on_one_rank, False)
    for params, expected in zip(with_them, without, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))


def told_by_one_rank(group, as_tensor):
    params, groups = build(MIXED, torch.float32)
    optimizer = DistMuonAdamW(groups, group)
    before = [p.detach().clone() for p in params]
    set_local_gradients(group, params, MIXED, torch.float32, 0, 0)
    good = dist.get_rank(group) != 1
    optimizer.step(finite=torch.tensor(good) if as_tensor else good)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    return optimizer.skipped_steps.item()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_loss_that_one_rank_knows_to_be_bad_skips_the_step_on_all(as_tensor):
    assert run_world(3, told_by_one_rank, as_tensor) == [1, 1, 1]


def refused(group, change):
    """The error of a constructor whose groups `change` has spoilt on rank 1."""
    params, groups = build(MIXED)
    if dist.get_rank(group) == 1:
        change(groups)
    with pytest.raises(ValueError) as error:
        DistMuonAdamW(groups, group)
    return str(error.value)


def another_order(groups):
    groups[0]["params"][1:3] = groups[0]["params"][2:0:-1]
    groups[0]["names"][1:3] = groups[0]["names"][2:0:-1]


def another_shape(groups):
    groups[1]["params"][0] = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.float64))


def another_option(groups):
    groups[1]["nesterov"] = False


def one_group_less(groups):
    del groups[-1]


@pytest.mark.parametrize(
    "change, parts",
    [
        (another_order, ("number 1 is p3 (16, 16) torch.float64, {'kind': 'muon'", "on rank 0, p6 (12, 24)")),
        (another_shape, ("number 4 is p1 (16, 16) torch.float64, {'kind': 'muon'", "on rank 0, p1 (3, 4)")),
        (another_option, ("'kind': 'muon'", "on rank 0, p1 (16, 16)", "'nesterov': False")),
        (one_group_less, ("torch.float64, {'kind': 'adamw'}", "on rank 0, nothing on rank 1")),
    ],
)
def test_ranks_with_different_parameters_hear_of_it_at_construction(change, parts):
    for error in run_world(3, refused, change):
        assert all(part in error for part in ("ranks have different parameters", *parts)), error


def in_a_group_of_others(group):
    """What dist.new_group gives a rank that is not in it; with AdamW alone such a rank trained nothing."""
    params, groups = build([("adamw", (600, 2))])
    with pytest.raises(ValueError) as error:
        DistMuonAdamW(groups, dist.GroupMember.NON_GROUP_MEMBER)
    return str(error.value)


def test_a_rank_outside_of_its_process_group_is_told():
    assert run_world(1, in_a_group_of_others) == ["rank 0 is not in the process group of its optimizer"]


def gradients_of_another_dtype(group):
    """A bfloat16 parameter with float32 gradients, which rank 1 has not; AdamW, and a bank."""
    params = [torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = DistMuonAdamW(
        [dict(ADAMW, params=params[:1], names=["a"]), dict(MUON, params=params[1:], names=["m"])], group
    )
    for param in params:
        param.grad_dtype = torch.float32
        if dist.get_rank(group) == 0:
            param.grad = torch.full((8, 8), 2.0)
    optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no grad_dtype")
def test_a_rank_without_a_gradient_sends_zeros_of_its_dtype():
    first, second = run_world(2, gradients_of_another_dtype)
    assert all(torch.equal(p, q) and (p < 1).all() for p, q in zip(first, second, strict=True))


def plan(group, model):
    params, groups = build(model, torch.float32)
    optimizer = DistMuonAdamW(groups, group)
    optimizer.plan()
    banks = [work for work in optimizer.works if isinstance(work, optim.Bank)]
    kept = sum(local(v).numel() for entry in optimizer.state.values() for v in entry.values())
    owners = [bank.owners for bank in banks]
    alone = [bank.one_by_one for bank in banks]
    return owners, alone, optimizer.world.load, kept


def test_owners_hold_whole_matrices_evenly_and_leftovers_balance():
    shapes = [(32, 32)] * 5 + [(16, 16)] * 3 + [(8, 8)] * 2
    model = [entry for shape in shapes for entry in (("adamw", (1,)), ("muon", shape), ("adamw", (2,)))]
    model += [("adamw", (1030, 2))]  # all matrices in one group
    results = run_world(4, plan, model)
    owners, alone, load, _ = results[0]
    assert all(result[:3] == (owners, alone, load) for result in results)
    big, middle, small = owners  # the most expensive first
    assert [sorted(map(o.count, range(4))) for o in owners] == [[1, 1, 1, 2], [0, 1, 1, 1], [0, 0, 1, 1]]
    busiest = max(range(4), key=big.count)
    assert busiest not in middle + small, "the rank with two big matrices gets none of the others"
    assert alone == [False, False, False]
    # state is split: momentum and row moments of every matrix once, two moments of 1030 rows, a step count
    # per rank
    muon_state = 5 * (32 * 32 + 32) + 3 * (16 * 16 + 16) + 2 * (8 * 8 + 8)
    small = 10 * (2 * 1 + 1) + 10 * (2 * 2 + 1)  # two moments and a count, on every rank
    adamw_state = 2 * 1030 * 2 + 4 + 4 * small
    assert sum(result[3] for result in results) == muon_state + adamw_state
    assert run_world(4, plan, [("muon", (8, 8))])[0][1] == [True]  # K=1 < W/2: reduced to its owner


def saved_in_a_world(group, model, steps):
    params, groups = build(model)
    optimizer = DistMuonAdamW(groups, group)
    for step in range(steps):
        for i, (_, shape) in enumerate(model):
            params[i].grad = mean_gradient(i, shape, torch.float64, step, 1, 0)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())  # a local state fits its own world
    local, whole = optimizer.named_state_dict()["state"], optimizer.full_state_dict()
    for name, entry in local.items():  # what this rank owns of the whole
        for key, value in entry.items():
            if not isinstance(value, DTensor):
                assert torch.equal(value, whole["state"][name][key])
    return [p.detach() for p in params], whole, sorted(local)


def continued_in_a_world(group, model, params, saved, start, steps):
    mine, groups = build(model, seed=5)
    for p, q in zip(mine, params, strict=True):
        p.data.copy_(q)
    for each in groups:  # another order inside the groups, and of the groups
        each["params"].reverse()
        each["names"].reverse()
    optimizer = DistMuonAdamW(groups[::-1], group)
    optimizer.load_state_dict(saved)
    for step in range(start, start + steps):
        for i, (_, shape) in enumerate(model):
            mine[i].grad = mean_gradient(i, shape, torch.float64, step, 1, 0)
        optimizer.step()
    return [p.detach() for p in mine]


def test_state_saved_in_a_world_of_2_continues_in_3_and_1():
    saved = run_world(2, saved_in_a_world, MIXED, 3)
    (params, state, names), (_, other, other_names) = saved
    assert all(
        torch.equal(v, other["state"][n][k]) for n, entry in state["state"].items() for k, v in entry.items()
    )
    assert set(names) | set(other_names) == set(state["state"]) and set(names) != set(other_names)
    expected = one_process(MIXED, 1, 6, torch.float64)[0]
    for size in (3, 1):
        for result in run_world(size, continued_in_a_world, MIXED, params, state, 3, 3):
            assert all(distance(p, q) < 1e-10 for p, q in zip(result, expected, strict=True))


def local_shapes(group):
    _, groups = build([("adamw", (1030, 2)), ("muon", (5, 6, 4)), ("muon", (8, 8))])
    optimizer = DistMuonAdamW(groups, group)
    state = optimizer.named_state_dict()["state"]
    moments, batch = state["p0"]["exp_avg"], state["p1"]["momentum_buffer"]
    shapes = [tuple(t.shape) for t in (moments, moments.to_local(), batch, batch.to_local())]
    return (*shapes, "p2" in state)


def test_local_state_is_dtensors_of_row_slices_and_whole_matrices():
    results = run_world(4, local_shapes)
    assert [r[:2] for r in results] == [((1030, 2), (rows, 2)) for rows in (258, 258, 258, 256)]
    assert [r[2:4] for r in results] == [((5, 6, 4), (rows, 6, 4)) for rows in (2, 2, 1, 0)]
    assert sum(r[4] for r in results) == 1


# ---- memory and bytes


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if torch.is_tensor(t) and t.untyped_storage()._cdata not in given:
                storage = t.untyped_storage()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.freed, storage.nbytes())
        return result

    def freed(self, size):
        self.now -= size


def peak_of_a_step(group, model):
    params, groups = build(model, torch.float32)
    optimizer = DistMuonAdamW(groups, group)
    for i, (_, shape) in enumerate(model):
        params[i].grad = local_gradient(i, shape, torch.float32, 0, dist.get_rank(group), 0)
    kernels = optim.run
    optim.run = lambda compiles, kernel, *tensors, **options: (tensors[0], tensors[0])  # no temporaries
    optimizer.plan()  # makes the state
    try:
        with LiveBytes() as live:
            optimizer.step()
    finally:
        optim.run = kernels
    return live.peak


def test_memory_of_a_step_is_what_the_docstring_says():
    size = 3
    model = [("muon", (128, 128))] * 5 + [("adamw", (3000, 100)), ("adamw", (1000, 100))]
    padded, even, odd = 6 * 128 * 128 * 4, 3000 * 100 * 4, 1002 * 100 * 4
    expected = (1 + 1 / size) * (padded + odd) + even / size
    batch = 2 * 128 * 128 * 4
    for peak in run_world(size, peak_of_a_step, model):
        assert expected <= peak < expected + batch + 4000  # flags and hyperparameters


def counted_bytes(group, model):
    """Bytes this rank sends in a step by the usual ring algorithms, from what the collectives are given."""
    size, sent = dist.get_world_size(group), 0
    params, groups = build(model, torch.float32)
    optimizer = DistMuonAdamW(groups, group)
    originals = optim.reduce_scatter_single, optim.all_gather_single, dist.all_reduce

    def counting(function, share):
        def call(*args, **kwargs):
            nonlocal sent
            whole = max((t for t in args if torch.is_tensor(t)), key=torch.Tensor.numel)
            sent += share * (size - 1) / size * whole.nbytes
            return function(*args, **kwargs)

        return call

    optim.reduce_scatter_single, optim.all_gather_single = (
        counting(originals[0], 1),
        counting(originals[1], 1),
    )
    dist.all_reduce = counting(originals[2], 2)
    try:
        set_local_gradients(group, params, model, torch.float32, 0, 0)
        optimizer.step()
    finally:
        optim.reduce_scatter_single, optim.all_gather_single, dist.all_reduce = originals
    return sent


def test_bytes_communicated():
    model = [("muon", (16, 16))] * 12 + [("adamw", (1024, 4)), ("adamw", (12,))]  # banks of 4 and 8
    parameters = sum(4 * math.prod(shape) for _, shape in model)
    for size in (2, 4):
        # What ranks tell each other: not finite, whether each parameter has a gradient
        facts = 2 * (size - 1) / size * 4 * (1 + len(model))
        assert run_world(size, counted_bytes, model) == [2 * (size - 1) / size * parameters + facts] * size
