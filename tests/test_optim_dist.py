"""The optimizers in every layout, in gloo worlds of 1 to 4 ranks, against the formulas in float64."""

import math
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nanomuon.optim as optim
from nanomuon.optim import DistMuonAdamW
from tests.layouts import (
    FUSED,
    LAYOUTS,
    MODEL,
    OPTIONS,
    SPLITS,
    Run,
    assert_close,
    assert_same_everywhere,
    full,
    local,
    run_layout,
    trained,
)
from tests.reference import ADAMW, MUON, WHOLE, build, distance, equal, expected
from tests.worlds import run_world

EXACT = 1e-11
# Layouts for tests of a single property
FEW = ["one-process", "replicated-3", "fsdp-3"]
EVERY_KIND = ["one-process", "replicated-2", "fsdp-3", "tp-rows", "fsdp-x-tp-columns"]


pytestmark = pytest.mark.usefixtures("eager")


# ---- the same trajectory


# Other tests cover these layouts: EVERY_KIND with all options, one rank bit for bit against one process
ELSEWHERE = "replicated-1 replicated-2 fsdp-1 fsdp-2 tp-rows fsdp-x-tp-columns".split()


def trained_on_each(group, layout, steps, cases):
    return [trained(group, layout, steps, model, options=options) for model, options in cases]


def check(layout, steps, cases, parts=WHOLE):
    """Every (model, options), trained in this layout, follows the formulas."""
    of_ranks = run_layout(layout, trained_on_each, steps, cases)
    for (model, options), *results in zip(cases, *of_ranks, strict=True):
        assert_same_everywhere(results)
        assert_close(results[0], expected(model, steps, parts, **options), EXACT)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in ELSEWHERE])
def test_six_steps_in_every_layout_follow_the_formulas(layout):
    check(layout, 6, [(MODEL, {})])


# (2, 9) leaves one of three ranks without rows
MATRICES = [("muon", shape) for shape in [(16, 16), (16, 16), (24, 12), (12, 24), (2, 9), (3, 20)]]
MATRICES += [("muon", (5, 12, 8))]


@pytest.mark.parametrize(
    "layout", ["one-process", "replicated-2", "fsdp-3", "tp-rows-uneven", "fsdp-x-tp-columns"]
)
def test_every_option_in_every_kind_of_layout_follows_the_formulas(layout):
    model, steps = (MODEL, 6) if layout == "one-process" else (MATRICES, 2)
    check(layout, steps, [(model, options) for options in OPTIONS.values()])


@pytest.mark.parametrize("layout", [*EVERY_KIND, "fsdp-columns"])
def test_the_parts_of_a_fused_matrix_are_matrices_of_their_own(layout):
    forms = [dict(), dict(weight_decay_form="decoupled", beta2=None), dict(scale="match_rms_adamw")]
    for split, parts in SPLITS.items():
        check(layout, 2, [(FUSED, dict(form, split=split)) for form in forms], parts)


@pytest.mark.parametrize("layout", ["tp-rows", "tp-columns", "fsdp-x-tp-rows", "fsdp-x-tp-columns"])
def test_the_three_modes_of_tensor_parallelism(layout):
    """Two of them compute the whole matrix's result, `blockwise` each block's."""
    ranks, by_columns = 4 if layout == "tp-columns" else 2, "columns" in layout
    for shape in [(24, 12), (12, 24), (24, 24)]:
        model = [("muon", shape)] * 2
        check(layout, 2, [(model, dict(tensor_parallel=mode)) for mode in ("duplicated", "distributed")])
        lines = torch.arange(shape[by_columns]).chunk(ranks)
        blocks = [(slice(None), part) for part in lines] if by_columns else lines
        check(layout, 2, [(model, dict(tensor_parallel="blockwise"))], blocks)


shapes = st.one_of(
    st.tuples(
        st.just("muon"), st.sampled_from([(6, 6), (6, 9), (9, 6), (4, 40), (3, 5, 6), (1, 8), (6, 2, 3, 3)])
    ),
    st.tuples(st.just("adamw"), st.sampled_from([(2, 600), (103, 11), (1025,), (5,), (), (0, 3), (7, 4)])),
)


@settings(max_examples=40, deadline=None)
@given(
    model=st.lists(shapes, min_size=1, max_size=12),
    layout=st.sampled_from(["one-process", "replicated-2", "replicated-4", "fsdp-3", "tp-columns"]),
)
def test_any_model_in_any_world(model, layout):
    check(layout, 2, [(model, {})])


# ---- in one process and in worlds of 1 and 3, for plain parameters and FSDP2's

SPECIAL = {
    "one row, one column": [("muon", (1, 8)), ("muon", (8, 1)), ("muon", (1, 1)), ("adamw", (1, 1))],
    "no elements": [("muon", (16, 8)), ("muon", (0, 8)), ("adamw", (0, 3)), ("adamw", (0,)), ("adamw", (4,))],
    "no AdamW": [("muon", (6, 6))],
    "no Muon": [("adamw", (600, 3)), ("adamw", (4,))],
}


@pytest.mark.parametrize("layout", FEW)
def test_models_that_are_edge_cases(layout):
    check(layout, 2, [(model, {}) for model in SPECIAL.values()])


MIXED = [
    (kind, shape)
    for kind, shape in (("muon", (8, 8)), ("adamw", (5,)), ("adamw", (1200, 2)))
    for _ in range(3)
]
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float64: 1e-4}


@pytest.mark.parametrize("layout", FEW)
def test_different_dtypes_in_one_model(layout):
    """State is float32, or float64 for float64 parameters. Gradients of bfloat16 parameters are float32."""
    results = run_layout(layout, trained, 5, MIXED, tuple(DTYPES))
    assert_same_everywhere(results)
    exact = expected(MIXED, 5, dtype=tuple(DTYPES))
    for i, (dtype, tolerance) in enumerate(3 * list(DTYPES.items())):
        assert results[0][0][i].dtype == dtype
        assert distance(results[0][0][i], exact[0][i]) < tolerance
        state = results[0][1][f"p{i}"]
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        assert {value.dtype for key, value in state.items() if key != "step"} == {kept}
        assert all(distance(value, exact[1][f"p{i}"][key]) < tolerance for key, value in state.items())


def tensors_of(run):
    """This rank's shards of parameters and state."""
    state = [value for entry in run.optimizer.state.values() for value in entry.values()]
    return [local(tensor.detach()) for tensor in (*run.params, *state)]


BAD = {  # step: (parameter, value) in gradients that come before it; the square of 1e25 is infinite
    0: [(0, math.nan), (13, -math.inf), (15, 1e25)],
    2: [(5, math.inf), (18, math.nan), (19, -math.inf)],
}


def skipped(group, layout):
    """Three steps; steps that must be skipped come before the first and the third."""
    run = Run(group, layout, dtype=torch.float32)
    run.optimizer.named_state_dict()  # makes the state
    is_last, skips = run.rank == run.size - 1, 0
    for step in range(3):
        before = [tensor.clone() for tensor in tensors_of(run)]
        for where, value in BAD.get(step, []):
            run.set_gradients(2)
            if is_last:
                local(run.params[where].grad).view(-1)[-1] = value
            run.optimizer.step()
            skips += 1
        for finite in (False, torch.tensor(False)) if step == 2 else ():  # a loss known to be bad
            run.set_gradients(2)
            run.optimizer.step(finite=finite if is_last else True)
            skips += 1
        assert equal(tensors_of(run), before)
        run.set_gradients(step)
        run.optimizer.step(finite=torch.tensor(True))
    before = [tensor.clone() for tensor in tensors_of(run)]
    run.optimizer.zero_grad()
    run.optimizer.step()  # not skipped, but no rank has a gradient
    assert equal(tensors_of(run), before)
    assert run.optimizer.skipped_steps == skips and run.optimizer.skipped_steps.ndim == 0
    return run.result()


@pytest.mark.parametrize("layout", [*FEW, "tp-rows-uneven", "fsdp-x-tp-rows"])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(layout):
    results = run_layout(layout, skipped)
    assert_same_everywhere([*results, run_layout(layout, trained, 3, MODEL, torch.float32)[0]])
    assert_close(results[0], expected(MODEL, 3, dtype=torch.float32), 1e-4)


@pytest.mark.parametrize("layout", ["replicated-1", "fsdp-1"])
def test_a_world_of_one_does_what_one_process_does_bit_for_bit(layout):
    """It casts nothing."""
    arguments = 5, [*MODEL, *SPECIAL["one row, one column"], *SPECIAL["no elements"]], torch.float32
    one_process = trained(None, "one-process", *arguments)
    found = run_layout(layout, trained, *arguments, dict(comm_dtype=torch.bfloat16))
    assert_same_everywhere([one_process, *found])
    assert found[0][1].keys() == one_process[1].keys()


@pytest.mark.parametrize("layout", ["replicated-3", "fsdp-3"])
def test_newton_schulz_in_bf16(layout):
    """Sums in another order change the last bit of some entries before they are rounded to bf16. So worlds
    differ, but less than bf16 differs from float32, because bf16 rounds every entry.
    """
    settings, options = dict(ns_dtype=torch.bfloat16), dict(weight_decay_form="decoupled")
    model = [(kind, shape) for kind, shape in MATRICES if shape[0] > 5]
    arguments = 20, model, torch.float32
    results = run_layout(layout, trained, *arguments, settings, options)
    assert_same_everywhere(results)
    in_bf16, state = trained(None, "one-process", *arguments, settings, options)
    in_float32, _ = trained(None, "one-process", *arguments, None, options)
    start, _ = build(model, torch.float32)
    assert all(value.dtype == torch.float32 for entry in state.values() for value in entry.values())
    for ours, p, p32, before in zip(results[0][0], in_bf16, in_float32, start, strict=True):
        way = (p - before.detach()).norm()
        rounding = (p - p32).norm() / way
        assert 1e-4 < rounding < 0.03
        assert (ours - p).norm() / way < 0.5 * rounding


def first_moments(group, comm_dtype, dtype, first, others):
    """Momentum after a step of a bank, large and small AdamW parameters, divided by the gradient's weight."""
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(8, 8), (9000, 3), (6,)]]
    groups = [dict(MUON, params=params[:1]), dict(ADAMW, params=params[1:])]
    optimizer = DistMuonAdamW(groups, group, comm_dtype)
    for p in params:
        p.grad = torch.full_like(p, first if dist.get_rank(group) == 0 else others)
    optimizer.step()
    state = optimizer.full_state_dict()["state"]
    muon, large, small = state["group0.0"], state["group1.0"], state["group1.1"]
    return muon["momentum_buffer"] / 0.05, large["exp_avg"] / 0.1, small["exp_avg"] / 0.1


@pytest.mark.parametrize(
    "comm_dtype, dtype, first, others, is_exact",
    [  # bf16 has eight bits: a sum of 1 and 2^-9, twice, is 1 in bf16
        (None, torch.bfloat16, 1.0, 2**-9, False),
        (torch.float32, torch.bfloat16, 1.0, 2**-9, True),
        (None, torch.float16, 60_000.0, 30_000.0, True),  # their sum is too large for float16
    ],
)
def test_the_mean_of_gradients_in_half_precision(comm_dtype, dtype, first, others, is_exact):
    mean = (first + 2 * others) / 3
    for moments in run_world(3, first_moments, comm_dtype, dtype, first, others):
        for moment in moments:
            assert (abs(moment / mean - 1).max() < 1e-4) == is_exact


# ---- construction


def named_group(names, shape=(8, 8), **options):
    """A Muon group with a rate that is a tensor. Printed, it would have four digits and its rank's device."""
    rate = torch.tensor(0.02, dtype=torch.float64)
    params = [torch.nn.Parameter(torch.ones(shape)) for _ in names]
    return MUON | dict(lr=rate, params=params, names=list(names)) | options


# Groups of rank 1, and parts of the error. The other ranks have named_group("a") and named_group("bc")
DIFFERENT = [
    (["a", "cb"], {}, ("parameter 1 or its options: b (8, 8)", "on rank 0, c (8, 8)")),
    (["ab", "c"], {}, ("parameter 1", "number 0 of its group", "on rank 0", "number 1 of its group")),
    (["a"], {}, ("parameter 1", "'kind': 'muon'", "on rank 0, nothing on rank 1")),
    (["a", "bc"], dict(shape=(3, 4)), ("b (8, 8)", "on rank 0, b (3, 4)")),
    (["a", "bc"], dict(nesterov=False), ("'nesterov': False",)),
    (["a", "bc"], dict(lr=0.02 + 1e-9), ("'lr': 0.02,", "'lr': 0.020000001")),
    (["a", "bc"], dict(nestrov=True), ("group 1 of b (muon): unknown nestrov: did you mean nesterov?",)),
]


def errors_of_different_groups(group):
    """The errors of the constructor, and how many groups there are after those of add_param_group."""
    errors, first = [], named_group("a")
    optimizer = DistMuonAdamW([first], group)
    for of_rank_1, options, _ in DIFFERENT:
        groups = [named_group("a"), named_group("bc")]
        if dist.get_rank(group) == 1:
            groups = [named_group(names) for names in of_rank_1[:-1]]
            groups.append(named_group(of_rank_1[-1], **options))
        with pytest.raises(ValueError) as error:
            DistMuonAdamW(groups, group)
        errors.append(str(error.value))
        with pytest.raises(ValueError):
            optimizer.add_param_group(groups[-1])
    optimizer.step()
    return errors, len(optimizer.param_groups)


def test_groups_that_differ_between_ranks_are_one_error_on_all_and_not_added():
    """A schedule that depends on each rank's own loss would fail here, too."""
    (errors, count), *others = run_world(3, errors_of_different_groups)
    assert count == 1 and all(each == (errors, count) for each in others)
    for error, (_, options, parts) in zip(errors, DIFFERENT, strict=True):
        assert all(part in error for part in parts) and "tensor" not in error
        assert "ranks differ in parameter" in error or "nestrov" in options


def in_a_group_of_others(group):
    """dist.new_group returns this to a rank outside the group; with AdamW alone it would train nothing."""
    with pytest.raises(ValueError, match="rank 0 is not in the process group of its optimizer"):
        DistMuonAdamW(build([("adamw", (600, 2))])[1], dist.GroupMember.NON_GROUP_MEMBER)


def test_a_rank_outside_its_process_group_is_an_error():
    run_world(1, in_a_group_of_others)


def test_no_process_group_is_a_world_of_one_except_under_torchrun(monkeypatch):
    DistMuonAdamW(build(MODEL[:3])[1]).step()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group"):
        DistMuonAdamW(build(MODEL[:3])[1])


# ---- state


OWNED = [(32, 32)] * 5 + [(16, 16)] * 3 + [(8, 8)] * 2


def held(group):
    """{name: elements of state} that this rank has."""
    matrices = [torch.nn.Parameter(torch.ones(shape)) for shape in (*OWNED, (5, 6, 4))]
    others = [torch.nn.Parameter(torch.ones(shape)) for shape in ((1030, 2), (2,))]
    optimizer = DistMuonAdamW([dict(MUON, params=matrices), dict(ADAMW, params=others)], group)
    state = optimizer.named_state_dict()["state"]
    return {name: sum(local(value).numel() for value in entry.values()) for name, entry in state.items()}


def test_owners_hold_whole_matrices_evenly_and_remainders_balance():
    results = run_world(4, held)
    counts = {shape: [0] * 4 for shape in OWNED}  # of each shape on each rank
    for i, shape in enumerate(OWNED):
        (owner,) = [rank for rank, mine in enumerate(results) if f"group0.{i}" in mine]
        assert results[owner][f"group0.{i}"] == math.prod(shape) + shape[0]  # momentum, row moments
        counts[shape][owner] += 1
    assert [sorted(each) for each in counts.values()] == [[1, 1, 1, 2], [0, 1, 1, 1], [0, 0, 1, 1]]
    busiest = counts[32, 32].index(2)
    assert counts[16, 16][busiest] == counts[8, 8][busiest] == 0
    assert [mine["group0.10"] for mine in results] == [count * (6 * 4 + 6) for count in (2, 2, 1, 0)]
    # Two moments of ceil(rows/W) rows and a count
    assert [mine["group1.0"] for mine in results] == [2 * rows * 2 + 1 for rows in (258, 258, 258, 256)]
    assert [mine["group1.1"] for mine in results] == [2 * 2 + 1] * 4


def half_way(group, layout, params, saved, start, options):
    """Two more steps in this layout from another one's saved state, every other time with reversed groups."""
    run = Run(group, layout, regroup=start % 4 == 0, **options)
    for p, q in zip(run.params, params, strict=True):
        p.data.copy_(run.cut(q))
    run.optimizer.load_state_dict(saved)
    run.optimizer.load_state_dict(run.optimizer.named_state_dict())  # a local state fits its own layout
    run.train(range(start, start + 2))
    whole = run.optimizer.full_state_dict()
    for name, entry in run.optimizer.named_state_dict()["state"].items():  # this rank's part of the whole
        for key, value in entry.items():
            assert isinstance(value, DTensor) or torch.equal(value, whole["state"][name][key])
    return full(run.params), whole


ROUTE = ["fsdp-3", "replicated-3", "replicated-2", "one-process", "fsdp-x-tp-rows", "experts-tp-rows"]
ROUTE += ["tp-rows-uneven", "fsdp-x-tp-columns", "experts-fsdp", "one-process"]


@pytest.mark.parametrize("options, route", [("default", ROUTE), ("direction", ROUTE[:5])])
def test_state_moves_between_layouts_and_worlds(options, route):
    options = OPTIONS[options]
    start = Run(None, "one-process", **options)
    params, saved = full(start.params), start.optimizer.full_state_dict()
    for i, layout in enumerate(route):
        results = run_layout(layout, half_way, params, saved, 2 * i, options)
        assert_same_everywhere([(params, saved["state"]) for params, saved in results])
        params, saved = results[0]
    assert_close((params, saved["state"]), expected(MODEL, 2 * len(route), **options), EXACT)


def loaded_without_a_parameter(group, layout):
    """Only the owner of a matrix misses its state."""
    saved = Run(group, layout).train(range(2)).optimizer.full_state_dict()
    del saved["state"]["p0"]
    other = Run(group, layout)
    with pytest.raises(ValueError, match="the loaded state has no momentum_buffer of p0"):
        other.optimizer.load_state_dict(saved)
    assert not any(tensor.any() for tensor in tensors_of(other)[len(MODEL) :])


def test_a_load_that_one_rank_refuses_changes_nothing_on_any():
    run_layout("replicated-3", loaded_without_a_parameter)


# ---- memory and bytes


class LiveBytes(TorchDispatchMode):
    """The peak number of bytes in live tensors that are created inside this context."""

    now = peak = 0

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


def without_temporaries(first, *tensors, **options):
    return first


def peak_of_a_step(group, layout, model):
    kernels = dict.fromkeys(("adamw_update", "muon_momentum", "muon_update"), without_temporaries)
    with mock.patch.multiple(optim, **kernels, normuon=lambda U, *tensors, **options: (U, U)):
        run = Run(group, layout, model, torch.float32)
        run.optimizer.named_state_dict()  # makes the state
        run.set_gradients(0)
        with LiveBytes() as live:
            run.optimizer.step()
    return live.peak


def test_memory_of_a_step_is_what_the_docstring_says():
    # In two banks, of 2 and 3 matrices
    model = [("muon", (128, 128))] * 5 + [("adamw", (3000, 100)), ("adamw", (1000, 100))]
    padded, even, odd = 6 * 128 * 128 * 4, 3000 * 100 * 4, 1002 * 100 * 4
    least = (1 + 1 / 3) * (padded + odd) + even / 3
    batch = 2 * 128 * 128 * 4
    for peak in run_layout("replicated-3", peak_of_a_step, model):
        assert least <= peak < least + batch + 4000  # flags and hyperparameters


class SentBytes(TorchDispatchMode):
    """Bytes this rank sends through collectives of process groups, by ring algorithms."""

    total = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, leaves = str(function), tree_leaves((args, kwargs))
        if name.startswith("c10d."):
            boxed = next(x for x in leaves if isinstance(x, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            size = max(tensor.nbytes for tensor in leaves if torch.is_tensor(tensor))
            if "alltoall_base" in name:
                sent = args[4]
                self.total += (sum(sent) - sent[group.rank()]) * args[1].itemsize
            else:
                twice = 2 if "allreduce" in name else 1
                self.total += twice * size * (group.size() - 1) / group.size()
        return function(*args, **(kwargs or {}))


def bytes_of_a_step(group, layout, model, settings):
    run = Run(group, layout, model, torch.float32, settings)
    run.set_gradients(0)
    with SentBytes() as sent:
        run.optimizer.step()
    return sent.total


@pytest.mark.parametrize("layout", ["replicated-2", "replicated-4", "fsdp-2", "fsdp-4", "experts"])
@pytest.mark.parametrize("comm_dtype", [None, torch.bfloat16])
def test_bytes_that_a_rank_sends_in_a_step(layout, comm_dtype):
    """2(W-1)/W times those of the parameters; gradients, and under FSDP2 U and the directions, in comm_dtype.
    With FSDP2 the owner also sends all others the second moments of its matrices, 16 float32 numbers each.
    """
    size = LAYOUTS[layout][0]
    share = (size - 1) / size
    model = [("muon", (16, 16))] * 12 + [("adamw", (1024, 4)), ("adamw", (12,))]  # banks of 4 and 8
    matrices, vectors = 12 * 16 * 16, 1024 * 4 + 12
    collected = 2 if comm_dtype else 4
    sent = share * (collected * (matrices + vectors + 12) + 4 * (matrices + 1024 * 4))
    if layout.startswith("fsdp"):
        sent = share * 2 * collected * matrices / size  # each rank holds this much of them
        sent += (size - 1) * 12 / size * 16 * 4
    elif layout == "experts":
        model, sent = [("muon", (6, 12, 8)), ("muon", (5, 8, 24))], 0
    facts = 2 * share * 4 * (1 + len(model))  # not finite; whether each parameter has a gradient
    found = run_layout(layout, bytes_of_a_step, model, dict(comm_dtype=comm_dtype))
    assert found == [pytest.approx(sent + facts)] * size
