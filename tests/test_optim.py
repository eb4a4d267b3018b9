"""MuonAdamW in one process: the update rules, the contract of the class, compilation."""

import copy
import functools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanomuon.optim as optim
from nanomuon.optim import MuonAdamW
from tests.reference import ReferenceMuon, distance
from tests.worlds import SMALL

MUON = dict(kind="muon", lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.1)
ADAMW = dict(kind="adamw", lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    monkeypatch.setattr(optim, "SMALL", SMALL)


def parameter(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(hash(shape) % 1000 + seed)
    return torch.nn.Parameter((torch.randn(shape, generator=g, dtype=torch.float64) * 0.1).to(dtype))


def gradient(param, step, scale=1.0):
    g = torch.Generator().manual_seed(7919 * step + param.numel())
    return (torch.randn(param.shape, generator=g, dtype=torch.float64) * scale).to(param.dtype)


def muon(*params, **options):
    return {**MUON, "params": list(params), **options}


def adamw(*params, **options):
    return {**ADAMW, "params": list(params), **options}


def train(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        for param in params:
            param.grad = gradient(param, step)
        optimizer.step()


# ---- the update rules


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_adamw_is_torchs(dtype, rtol):
    ours = [parameter(*shape, dtype=dtype) for shape in [(40, 50), (7,), (), (3, 4, 5)]]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = MuonAdamW([adamw(*ours)])
    expected = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for step in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad, q.grad = gradient(p, step), gradient(p, step)
        optimizer.step()
        expected.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=rtol, atol=rtol * 1e-2)
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(
                    optimizer.state[p][key], expected.state[q][key], rtol=rtol, atol=1e-9
                )


FORMS = [
    dict(),
    dict(weight_decay_form="decoupled"),
    dict(beta2=None, weight_decay_form="decoupled"),
    dict(nesterov=False, weight_decay_form="decoupled"),
    dict(row_equilibrate=True, weight_decay_form="decoupled"),
    dict(renormalize=True, weight_decay_form="decoupled"),
    dict(renormalize=True, row_equilibrate=True, beta2=None),
    dict(scale="match_rms_adamw", weight_decay_form="decoupled"),
    dict(coefficients=[(2, -1.5, 0.5)] * 4, ns_steps=None, weight_decay_form="decoupled"),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: ",".join(map(str, form)) or "default")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_muon_is_the_formulas(form, dtype):
    params = [
        parameter(*shape, dtype=dtype)
        for shape in [(24, 24), (24, 24), (36, 20), (20, 36), (64, 16), (16, 64)]
    ]
    ours_only = ("coefficients", "ns_steps", "weight_decay_form")
    options = {key: value for key, value in form.items() if key not in ours_only}
    options["decay"] = form.get("weight_decay_form", "cautious")
    options["triples"] = form.get("coefficients")
    if form.get("scale"):
        options["scale"] = lambda m, n: 0.2 * math.sqrt(max(m, n))
    expected = [ReferenceMuon(p, lr=0.02, weight_decay=0.1, **options) for p in params]
    optimizer = MuonAdamW([muon(*params, **form)])
    for step in range(20):
        for p, reference in zip(params, expected, strict=True):
            p.grad = gradient(p, step)
            reference.step(p.grad)
        optimizer.step()
    tolerance = 1e-12 if dtype == torch.float64 else 3e-4 if options["decay"] == "cautious" else 1e-5
    for p, reference in zip(params, expected, strict=True):
        assert distance(p, reference.P) < tolerance
        assert distance(optimizer.state[p]["momentum_buffer"], reference.M) < 1e-5
        if reference.beta2 is not None:
            assert optimizer.state[p]["second_momentum_buffer"].shape == reference.V.shape


def test_plain_muon_is_torchs():
    ours = [parameter(64, 64), parameter(96, 32), parameter(32, 96)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    start = [p.detach().clone() for p in ours]
    form = dict(coefficients="simple", beta2=None, weight_decay_form="decoupled")
    optimizer = MuonAdamW([muon(*ours, **form)])
    expected = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.1, ns_steps=5)
    for step in range(10):
        for p, q in zip(ours, theirs, strict=True):
            p.grad, q.grad = gradient(p, step), gradient(p, step)
        optimizer.step()
        expected.step()
    for p, q, before in zip(ours, theirs, start, strict=True):
        assert distance(p - before, q - before) < 0.02  # theirs iterates in bf16


def test_3d_is_a_batch_of_matrices_and_4d_a_matrix_of_rows():
    form = dict(weight_decay_form="decoupled")
    experts, convolution = parameter(5, 12, 20), parameter(12, 3, 3, 3)
    whole = [*experts.detach().unbind(), convolution.detach().flatten(1)]
    separate = [torch.nn.Parameter(p.clone()) for p in whole]
    optimizer, expected = (
        MuonAdamW([muon(experts, convolution, **form)]),
        MuonAdamW([muon(*separate, **form)]),
    )
    for step in range(5):
        experts.grad, convolution.grad = gradient(experts, step), gradient(convolution, step)
        for p, grad in zip(separate, [*experts.grad, convolution.grad.flatten(1)], strict=True):
            p.grad = grad
        optimizer.step()
        expected.step()
    for p, q in zip([*experts, convolution.flatten(1)], separate, strict=True):
        assert distance(p, q) < 2e-5
    assert optimizer.state[convolution]["momentum_buffer"].shape == convolution.shape
    assert optimizer.state[experts]["second_momentum_buffer"].shape == (5, 1, 20)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 8), max_size=3),
)
def test_any_shapes_in_any_groups_are_the_formulas(shapes, cuts):
    params = [parameter(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
    cuts = [0, *sorted(cuts), len(params)]
    groups = [muon(*params[lo:hi]) for lo, hi in zip(cuts, cuts[1:], strict=False)]
    expected = [ReferenceMuon(p, lr=0.02, weight_decay=0.1) for p in params]
    optimizer = MuonAdamW(groups)
    for step in range(3):
        for p, reference in zip(params, expected, strict=True):
            p.grad = gradient(p, step)
            reference.step(p.grad)
        optimizer.step()
    for p, reference in zip(params, expected, strict=True):
        assert distance(p, reference.P) < 1e-9


# ---- what must hold


def mixed(dtype=torch.float32):
    params = [
        parameter(*s, dtype=dtype) for s in [(24, 24), (24, 12), (12, 24), (3, 8, 8), (50, 30), (5,), ()]
    ]
    return params, [muon(*params[:4], names=list("abcd")), adamw(*params[4:], names=list("efg"))]


def test_a_parameter_without_a_gradient_is_left_alone():
    """As torch's optimizers do: parameter, state and step count."""
    params, groups = mixed(torch.float64)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in params[4:]]
    expected = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    references = [ReferenceMuon(p, lr=0.02, weight_decay=0.1) for p in params[:3]]
    optimizer = MuonAdamW(groups)
    for step in range(7):
        for i, p in enumerate(params):
            p.grad = None if (i + step) % 3 == 0 else gradient(p, step)
            if i < 3 and p.grad is not None:
                references[i].step(p.grad)
        for p, q in zip(params[4:], theirs, strict=True):
            q.grad = p.grad
        before = [p.detach().clone() for p in params]
        optimizer.step()
        expected.step()
        for p, q in zip(params, before, strict=True):
            assert torch.equal(p, q) == (p.grad is None)
    for p, reference in zip(params[:3], references, strict=True):
        assert distance(p, reference.P) < 1e-9
    for p, q in zip(params[4:], theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
        assert optimizer.state[p]["step"] == expected.state[q]["step"]
    for p in params:
        p.grad = None
    optimizer.step()
    assert optimizer.skipped_steps == 0


def test_a_parameter_that_is_frozen_on_the_way_does_not_drift():
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    train(optimizer, params, 2)
    frozen = [params[0], params[3], params[5]]
    for p in frozen:
        p.requires_grad_(False)
    before = [p.detach().clone() for p in params]
    state = {id(p): {key: value.clone() for key, value in optimizer.state[p].items()} for p in params}
    train(optimizer, params, 3, start=2)  # gradients that are still there do not count
    for p, q in zip(params, before, strict=True):
        is_frozen = any(p is each for each in frozen)
        assert torch.equal(p, q) == is_frozen
        for key, value in state[id(p)].items():
            assert torch.equal(optimizer.state[p][key], value) == is_frozen, key


@pytest.mark.parametrize("form", ["cautious", "decoupled", "adamw", "small adamw"])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_left_alone_keeps_infinite_numbers(form, compiled, monkeypatch):
    """Of -inf times a rate of 0 weight decay made NaN."""
    if compiled:
        monkeypatch.setenv("NANOMUON_COMPILE", "1")
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        monkeypatch.setattr(optim, "compiled", functools.cache(optim.compiled.__wrapped__))
    shape = (30, 32) if form == "small adamw" else (64, 32)  # two small ones are enough to be compiled
    mask, beside = parameter(*shape), parameter(*shape)
    with torch.no_grad():
        mask[0], mask[1], mask[2] = -math.inf, math.inf, -0.0
    before = mask.detach().clone()
    if "adamw" in form:
        optimizer = MuonAdamW([adamw(mask, beside)])
    else:
        optimizer = MuonAdamW([muon(mask, beside, weight_decay_form=form)])
    beside.grad = gradient(beside, 0)
    optimizer.step()
    assert torch.equal(mask.view(torch.int32), before.view(torch.int32))  # the sign of zero too
    assert beside.isfinite().all()


def test_gradient_is_not_changed_by_step():
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    for p in params:
        p.grad = gradient(p, 0)
    optimizer.step()
    assert all(torch.equal(p.grad, gradient(p, 0)) for p in params)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 3, 4, 6])
def test_non_finite_gradient_skips_the_step(value, where):
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    train(optimizer, params, 2)
    before = optimizer.full_state_dict()["state"], [p.detach().clone() for p in params]
    for p in params:
        p.grad = gradient(p, 2)
    params[where].grad.view(-1)[-1] = value
    optimizer.step()
    assert optimizer.skipped_steps.item() == 1 and optimizer.skipped_steps.ndim == 0
    assert all(torch.equal(p, q) for p, q in zip(params, before[1], strict=True))
    after = optimizer.named_state_dict()["state"]
    assert all(
        torch.equal(after[name][key], value) for name in after for key, value in before[0][name].items()
    )
    train(optimizer, params, 1, start=2)
    uninterrupted, groups = mixed()
    train(MuonAdamW(groups), uninterrupted, 3)
    assert all(torch.equal(p, q) for p, q in zip(params, uninterrupted, strict=True))
    assert optimizer.skipped_steps.item() == 1


@pytest.mark.parametrize("small", [True, False])
def test_an_eps_of_zero_is_no_reason_to_change_what_is_left_alone(small):
    shape = (8, 4) if small else (600, 30)
    idle, trained = parameter(*shape), parameter(*shape, seed=1)
    before = idle.detach().clone(), trained.detach().clone()
    optimizer = MuonAdamW([adamw(idle, trained, eps=0.0, weight_decay=0.0)])
    trained.grad = torch.full_like(trained, math.nan)
    optimizer.step()  # skipped
    assert torch.equal(trained, before[1])
    trained.grad = gradient(trained, 0)
    optimizer.step()
    assert torch.equal(idle, before[0])
    moved = trained.detach() - before[1]  # by lr against the signs, as its first step does
    assert torch.allclose(moved, -ADAMW["lr"] * trained.grad.sign(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("told", [False, torch.tensor(False), torch.tensor(0.0) > 0])
def test_a_step_that_is_told_of_a_bad_loss_changes_nothing(told):
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    train(optimizer, params, 2)
    before = optimizer.full_state_dict()["state"], [p.detach().clone() for p in params]
    for p in params:
        p.grad = gradient(p, 2)
    optimizer.step(finite=told)
    assert optimizer.skipped_steps.item() == 1
    assert all(torch.equal(p, q) for p, q in zip(params, before[1], strict=True))
    after = optimizer.full_state_dict()["state"]
    for name, entry in before[0].items():
        assert all(torch.equal(after[name][key], value) for key, value in entry.items())
    optimizer.step(finite=torch.tensor(True))
    assert optimizer.skipped_steps.item() == 1
    assert not any(torch.equal(p, q) for p, q in zip(params, before[1], strict=True))


def test_a_gradient_whose_squares_overflow_is_not_finite():
    p, q = parameter(24, 24), parameter(50, 30)
    optimizer = MuonAdamW([muon(p), adamw(q)])
    p.grad, q.grad = gradient(p, 0), torch.full_like(q, 1e25)
    optimizer.step()
    assert optimizer.skipped_steps.item() == 1 and optimizer.state[q]["exp_avg_sq"].isfinite().all()


def test_different_dtypes_in_one_model_and_float32_state():
    params = [
        parameter(24, 24),
        parameter(24, 24, dtype=torch.bfloat16),
        parameter(50, 30, dtype=torch.bfloat16),
    ]
    optimizer = MuonAdamW([muon(*params[:2]), adamw(params[2])])
    train(optimizer, params, 3)
    assert [p.dtype for p in params] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert all(v.dtype == torch.float32 for state in optimizer.state.values() for v in state.values())
    reference = ReferenceMuon(parameter(24, 24, dtype=torch.bfloat16), lr=0.02, weight_decay=0.1)
    for step in range(3):
        reference.step(gradient(params[1], step))
    assert distance(params[1], reference.P) < 0.01


def test_empty_groups_and_empty_parameters():
    empty = torch.nn.Parameter(torch.empty(0, 5))
    p = parameter(8, 8)
    optimizer = MuonAdamW([muon(), muon(p, empty), adamw(), adamw(torch.nn.Parameter(torch.empty(0)))])
    train(optimizer, [p], 2)
    assert not torch.equal(p, parameter(8, 8))
    optimizer.load_state_dict(optimizer.full_state_dict())


def test_state_exists_before_the_first_step_under_its_names():
    params, groups = mixed()
    state = MuonAdamW(groups).named_state_dict()["state"]
    assert set(state["a"]) == {"momentum_buffer", "second_momentum_buffer"}
    assert set(state["e"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["b"]["momentum_buffer"].shape == (24, 12) and state["b"]["second_momentum_buffer"].shape == (
        24,
        1,
    )
    assert state["c"]["momentum_buffer"].shape == (12, 24) and state["c"]["second_momentum_buffer"].shape == (
        1,
        24,
    )


def test_state_loads_into_other_groups_and_keeps_its_dtype():
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    train(optimizer, params, 3)
    saved = optimizer.full_state_dict()
    saved["state"] = {
        name: {k: v.double() for k, v in entry.items()} for name, entry in saved["state"].items()
    }
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    a, b, c, d, e, f, g = again
    groups = [adamw(g, names=["g"]), muon(d, b, names=["d", "b"]), adamw(f, e, names=["f", "e"])]
    other = MuonAdamW([*groups, muon(c, a, names=["c", "a"])])
    other.load_state_dict(saved)
    assert all(v.dtype == torch.float32 for state in other.state.values() for v in state.values())
    train(optimizer, params, 3, start=3)
    train(other, again, 3, start=3)
    assert all(distance(p, q) < 3e-5 for p, q in zip(again, params, strict=True))


def test_hyperparameters_are_restored_unless_they_are_to_be_kept():
    params, groups = mixed()
    saved = MuonAdamW(groups).state_dict()
    assert saved["param_groups"][0]["lr"] == 0.02
    for hyperparameters, lr, betas in (("restore", 0.02, (0.9, 0.999)), ("keep", 0.5, (0.5, 0.5))):
        params, groups = mixed()
        groups[0]["lr"], groups[1]["betas"] = 0.5, (0.5, 0.5)
        optimizer = MuonAdamW(groups)
        optimizer.load_state_dict(saved, hyperparameters)
        assert optimizer.param_groups[0]["lr"] == lr and optimizer.param_groups[1]["betas"] == betas
    with pytest.raises(ValueError, match="hyperparameters is"):
        optimizer.load_state_dict(saved, hyperparameters="ours")


def test_hyperparameters_are_restored_by_name_into_other_groups():
    params, groups = mixed()
    a, b, c, d, e, f, g = params
    saved = MuonAdamW(
        [
            muon(a, b, names=["a", "b"], lr=0.3),
            muon(c, d, names=["c", "d"], lr=0.4),
            adamw(e, f, g, names=["e", "f", "g"]),
        ]
    ).full_state_dict()
    other = [
        adamw(e, f, g, names=["e", "f", "g"]),
        muon(d, names=["d"]),
        muon(a, b, names=["a", "b"]),
        muon(c, names=["c"]),
    ]
    optimizer = MuonAdamW(other)
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.4, 0.3, 0.4]
    with pytest.raises(ValueError, match="group 0 would get lr=0.3 and 0.4"):
        MuonAdamW(mixed()[1]).load_state_dict(saved)
    with pytest.raises(ValueError, match="group 2 was saved with nesterov=True"):
        MuonAdamW([*other[:2], dict(other[2], nesterov=False), other[3]]).load_state_dict(saved)


def resumable(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4, bias=False))
    matrices = [model[0].weight, model[2].weight]
    optimizer = MuonAdamW(
        [muon(*matrices, names=["0.weight", "2.weight"]), adamw(model[0].bias, names=["0.bias"])]
    )
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def train_on_a_schedule(model, optimizer, scheduler, first, last):
    rates = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(5, 8, generator=generator)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("how", ["state_dict", "full_state_dict", "deepcopy", "pickle"])
def test_a_resumed_run_is_the_uninterrupted_one(how, tmp_path):
    """Bit for bit, learning rates included."""
    uninterrupted = resumable()
    rates = train_on_a_schedule(*uninterrupted, 0, 10)
    model, optimizer, scheduler = resumable()
    assert train_on_a_schedule(model, optimizer, scheduler, 0, 5) == rates[:5]
    if how == "deepcopy":
        model, optimizer, scheduler = copy.deepcopy((model, optimizer, scheduler))
    elif how == "pickle":
        model, optimizer, scheduler = pickle.loads(pickle.dumps((model, optimizer, scheduler)))
    else:
        state = model.state_dict(), getattr(optimizer, how)(), scheduler.state_dict()
        torch.save(state, tmp_path / "saved.pt")
        saved = torch.load(tmp_path / "saved.pt")
        model, optimizer, scheduler = resumable(seed=1)
        for each, of_it in zip((model, optimizer, scheduler), saved, strict=True):
            each.load_state_dict(of_it)
    assert train_on_a_schedule(model, optimizer, scheduler, 5, 10) == rates[5:]
    for p, q in zip(model.parameters(), uninterrupted[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_dict_has_torchs_layout():
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    assert optimizer.state_dict()["state"] == {}, "before the first step, as with torch's"
    train(optimizer, params, 1)
    state = optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [group["names"] for group in state["param_groups"]] == [list("abcd"), list("efg")]
    assert set(state["state"]) == set(range(7))
    assert state["state"][4]["exp_avg"].shape == (50, 30)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    train(optimizer, params, 1)
    whole = optimizer.full_state_dict()
    for name, key, wrong, message in [
        ("f", "exp_avg", None, "no exp_avg of f"),
        ("g", "step", None, "no step of g"),
        (
            "a",
            "momentum_buffer",
            torch.zeros(3, 3),
            r"momentum_buffer of a has shape \(3, 3\), expected \(24, 24\)",
        ),
    ]:
        saved = {n: {k: v + 1 for k, v in entry.items()} for n, entry in whole["state"].items()}
        if wrong is None:
            del saved[name][key]
        else:
            saved[name][key] = wrong
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict({"state": saved, "param_groups": whole["param_groups"]})
        state = optimizer.named_state_dict()["state"]
        assert all(
            torch.equal(v, state[n][k]) for n, entry in whole["state"].items() for k, v in entry.items()
        )


def test_without_names_a_regrouped_load_is_refused():
    a, b = parameter(8, 8), parameter(8, 8, seed=1)
    saved = MuonAdamW([muon(a, b)]).named_state_dict()
    assert list(saved["state"]) == ["group0.0", "group0.1"]
    MuonAdamW([muon(a, b)]).load_state_dict(saved)
    with pytest.raises(ValueError, match="names"):
        MuonAdamW([muon(a), muon(b)]).load_state_dict(saved)


def test_state_loads_under_the_names_of_a_wrapped_model():
    """As DistributedDataParallel and torch.compile call them, given as `names` or with the parameters."""
    p, q = parameter(8, 8), parameter(5)
    named = MuonAdamW([dict(MUON, params=[("module.a", p)]), adamw(q, names=["_orig_mod.b"])])
    train(named, [p, q], 1)
    assert list(named.full_state_dict()["state"]) == ["a", "b"]
    for names in (["module.a"], ["_orig_mod.b"]), (["a"], ["b"]):
        other = MuonAdamW([muon(p, names=names[0], lr=0.5), adamw(q, names=names[1])])
        other.load_state_dict(named.state_dict())
        assert other.param_groups[0]["lr"] == 0.02
        assert torch.equal(other.state[p]["momentum_buffer"], named.state[p]["momentum_buffer"])


def test_bad_groups_are_refused_at_construction():
    p, q = parameter(8, 8), parameter(8)
    cases = [
        ([dict(muon(p), kind="sgd")], "group 0: unknown kind 'sgd'"),
        ([muon(p), {k: v for k, v in adamw(q).items() if k != "eps"}], r"group 1 \(adamw\): missing eps"),
        ([{k: v for k, v in muon(p).items() if k != "beta2"}], r"group 0 \(muon\): missing beta2"),
        ([muon(p, nestrov=True)], r"group 0 \(muon\): unknown nestrov"),
        ([adamw(p, momentum=0.9)], r"group 0 \(adamw\): unknown momentum"),
        ([adamw(q), muon(p, names=["w"]), adamw(p)], "group 2: group2.0 is already in group 1"),
        ([muon(p, p)], "group 0: group0.1 is already in group 0"),
        ([muon(p, q, names=["w", "bias"])], r"group 0: bias has shape \(8,\)"),
        ([muon(p, names=["w"]), adamw(q, names=["w"])], "group 1: the name w is used twice"),
        ([muon(p, names=["a", "b"])], "group 0: 2 names for 1 params"),
        ([MUON], r"group 0 \(muon\): missing params"),
        ([muon(torch.nn.Linear(3, 3))], "group 0: group0.0 is no parameter, but a Linear"),
        ([dict(ADAMW, params={p, q})], "group 0: params are a set, whose order is another in every process"),
        ([adamw(q.to(torch.complex64), names=["z"])], "group 0: z is complex, which no kind here trains"),
        ([muon(p, coefficients="newton")], "group 0: unknown coefficients 'newton'"),
        ([muon(p, ns_steps=0)], "group 0: .*at least one step"),
        ([muon(p, scale="big")], "group 0: unknown scale 'big'"),
        ([muon(p, weight_decay_form="coupled")], "group 0: unknown weight_decay_form 'coupled'"),
    ]
    for groups, message in cases:
        with pytest.raises(ValueError, match=message):
            MuonAdamW(groups)
    MuonAdamW([muon(p, initial_lr=0.1, names=["w"])])


@pytest.mark.parametrize(
    "group, message",
    [
        (lambda p: muon(p, lr=-0.01), "group 0: lr must be finite and not negative, but is -0.01"),
        (lambda p: muon(p, lr=math.nan), "group 0: lr must be finite and not negative, but is nan"),
        (
            lambda p: muon(p, lr=torch.tensor(-0.5)),
            "group 0: lr must be finite and not negative, but is -0.5",
        ),
        (lambda p: muon(p, lr="0.1"), "group 0: lr must be a number, but is '0.1'"),
        (lambda p: muon(p, momentum=1.5), "group 0: momentum must be at least 0 and below 1, but is 1.5"),
        (lambda p: muon(p, beta2=1.0), "group 0: beta2 must be at least 0 and below 1, but is 1.0"),
        (lambda p: muon(p, weight_decay=math.inf), "group 0: weight_decay must be finite"),
        (lambda p: muon(p, ns_steps=2.5), "group 0: ns_steps must be a whole number or None, but is 2.5"),
        (lambda p: muon(p, coefficients=[(2.0, math.nan, 0.5)]), "group 0: coefficients must be finite"),
        (lambda p: muon(p, split=True), "group 0: split=True: neither"),
        (lambda p: muon(p, split=2.0), "group 0: split=2.0: neither"),
        (lambda p: muon(p, direction="polar"), "group 0: direction='polar' is not a function"),
        (lambda p: adamw(p, eps=-1), "group 0: eps must be finite and not negative, but is -1"),
        (
            lambda p: adamw(p, betas=(0.9, 1.0)),
            r"group 0: betas\[1\] must be at least 0 and below 1, but is 1.0",
        ),
        (lambda p: adamw(p, betas=0.9), "group 0: betas are two numbers, not 0.9"),
    ],
)
def test_impossible_values_are_refused_at_construction(group, message):
    with pytest.raises(ValueError, match=message):
        MuonAdamW([group(parameter(8, 8))])


def test_an_optimizer_without_parameters():
    MuonAdamW([muon(), adamw()]).step()


def test_parameters_without_groups_are_told_what_to_do():
    model = torch.nn.Linear(4, 4)
    for parameters in (model.parameters(), model.named_parameters()):
        with pytest.raises(ValueError, match=r"MuonAdamW.for_model\(model, lr=...\)"):
            MuonAdamW(parameters)


def test_for_model_trains_every_parameter_with_one_rate():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 7))
    optimizer = MuonAdamW.for_model(model, lr=1e-3, compile=False)
    trained = {param for group in optimizer.param_groups for param in group["params"]}
    assert trained == set(model.parameters())
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.arange(20)).square().mean().backward()
    optimizer.step()
    # AdamW's first step has rms of the rate, Muon's 0.2
    for p, q in zip(model.parameters(), before, strict=True):
        rms = (p - q).square().mean().sqrt().item()
        assert 1e-5 < rms < 1.1e-3
    faster = MuonAdamW.for_model(model, lr=1e-3, muon_lr=0.1)
    assert {group["kind"]: group["lr"] for group in faster.param_groups} == {"muon": 0.1, "adamw": 1e-3}


def test_it_is_a_torch_optimizer():
    """Closures, schedulers that write group["lr"], add_param_group, zero_grad."""
    p, q, late = parameter(8, 8), parameter(5), parameter(8, 8, seed=3)
    groups = [muon(p), adamw(q)]
    optimizer = MuonAdamW(groups)
    # the caller's dicts stay the caller's
    assert "initial_lr" not in groups[0] and groups[0]["params"] == [p]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum() + q.square().sum() + late.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert torch.equal(late, parameter(8, 8, seed=3))
    optimizer.add_param_group(muon(late))
    optimizer.plan()
    assert optimizer.state[late]["momentum_buffer"].shape == (8, 8)
    assert optimizer.step(closure) < first
    assert not torch.equal(late, parameter(8, 8, seed=3))
    with pytest.raises(ValueError, match="group 3: group3.0 is already in group 2"):
        optimizer.add_param_group(adamw(late))


def test_a_big_bank_in_batches_is_the_same(monkeypatch):
    params, groups = [parameter(8, 16, seed=i) for i in range(6)], []
    for limit in (2**22, 4 * 8 * 16 * 2):
        monkeypatch.setitem(optim.BATCH_BYTES, "cpu", limit)
        mine = [torch.nn.Parameter(p.detach().clone()) for p in params]
        optimizer = MuonAdamW([muon(*mine)])
        groups.append(mine)
        optimizer.plan()
        (bank,) = optimizer.works
        assert len(bank.batches) == (1 if limit == 2**22 else 3)
        train(optimizer, mine, 3)
    assert all(distance(p, q) < 1e-6 for p, q in zip(*groups, strict=True))


# ---- compilation


def test_as_a_library_a_cpu_runs_eagerly_unless_told_otherwise(monkeypatch, caplog):
    caplog.set_level("INFO", logger="nanomuon")
    monkeypatch.delenv("NANOMUON_COMPILE")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    before = graphs()
    p = parameter(48, 44)
    for compiles in ("auto", False, True):
        optimizer = MuonAdamW([muon(p)], compile=compiles)
        train(optimizer, [p], 1)
        assert (graphs() > before) == (compiles is True)
        assert ("compiling muon_momentum: this step takes a while" in caplog.text) == (compiles is True)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_and_eager_agree_and_a_new_learning_rate_recompiles_nothing(monkeypatch):
    def model():
        params = [
            parameter(64, 64),
            parameter(64, 64, seed=1),
            parameter(32, 64),
            parameter(64, 32),
            parameter(60, 30),
        ]
        return params, MuonAdamW([muon(*params[:4], weight_decay_form="decoupled"), adamw(params[4])])

    eager_params, eager_optimizer = model()
    train(eager_optimizer, eager_params, 4)
    monkeypatch.setenv("NANOMUON_COMPILE", "1")
    params, optimizer = model()
    train(optimizer, params, 2)
    compiled = graphs()
    assert compiled >= 5
    for group, change in zip(optimizer.param_groups, (dict(lr=0.1, momentum=0.8), dict(lr=0.3)), strict=True):
        group.update(change)
    train(optimizer, params, 1)
    assert graphs() == compiled
    for group, change in zip(
        optimizer.param_groups, (dict(lr=0.02, momentum=0.95), dict(lr=1e-2)), strict=True
    ):
        group.update(change)
    params, optimizer = model()
    train(optimizer, params, 4)  # a second optimizer of the same shapes compiles nothing either
    assert graphs() == compiled
    assert all(distance(p, q) < 2e-5 for p, q in zip(params, eager_params, strict=True))
    state, expected = optimizer.full_state_dict()["state"], eager_optimizer.full_state_dict()["state"]
    assert all(distance(state[n][k], v) < 2e-5 for n, entry in expected.items() for k, v in entry.items())


@pytest.mark.slow
def test_forty_shapes_compile(monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    before = graphs()

    def model():
        params = [parameter(32 + i, 32) for i in range(40)]
        return params, MuonAdamW([muon(*params[:12], ns_steps=1), adamw(*params[12:])])

    params, optimizer = model()
    train(optimizer, params, 2)
    # momentum, direction and update of each matrix, one kernel of each other; nothing twice, nothing eager
    assert graphs() - before == 12 * 3 + 28
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    expected, optimizer = model()
    train(optimizer, expected, 2)
    assert all(distance(p, q) < 1e-4 for p, q in zip(params, expected, strict=True))
