"""MuonAdamW in one process: its contract, state and compilation. The first three tests use no other file of
this folder and show what the optimizer is. test_optim_dist.py tests the update rules in every layout.
"""

import copy
import functools
import io
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import nanomuon.optim as optim
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from tests.layouts import Run, assert_close, assert_same_everywhere, polar, trained
from tests.reference import ADAMW, MUON, distance, equal, expected

pytestmark = pytest.mark.usefixtures("eager")


def train(optimizer, params, steps):
    for step in range(steps):
        for param in params:
            generator = torch.Generator().manual_seed(7919 * step + param.numel())
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def test_adamw_is_torchs():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in [(400, 50), (3, 4, 5), (7,), ()]]
    theirs = copy.deepcopy(ours)
    numbers = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    train(MuonAdamW([dict(kind="adamw", params=ours, **numbers)]), ours, 20)
    train(torch.optim.AdamW(theirs, **numbers), theirs, 20)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
def test_muon_is_the_rule_of_the_docs(shape):
    page = Path(__file__).parent.parent / "docs/optimizer.md"
    names = {}
    exec(re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1], names)  # muon_step

    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    numbers = dict(lr=0.02, momentum=0.95, beta2=0.95, weight_decay=0.1)
    optimizer = MuonAdamW([dict(kind="muon", params=[param], ns_steps=5, **numbers)])
    P, M, (m, n) = param.detach().clone(), torch.zeros_like(param), shape
    V = torch.zeros((m, 1) if m >= n else (1, n), dtype=torch.float64)
    for _ in range(20):
        param.grad = torch.randn_like(param)
        names["muon_step"](P, param.grad, M, V, **numbers)
        optimizer.step()
    torch.testing.assert_close(param.detach(), P, rtol=0, atol=1e-11)


SHAPES = [
    (24, 12),
    (24, 12),
    (12, 24),
    (600, 30),
    (5,),
]  # banks of two and one, a large and a small parameter


def gradient(number, step, rank):
    generator = torch.Generator().manual_seed(1000 * number + 10 * step + rank)
    return torch.randn(SHAPES[number], generator=generator, dtype=torch.float64)


def train_on_ranks(rank, ranks, store, file):
    """Four steps. A rank has gradients of its own; a single process has their means."""
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]
    matrices = dict(kind="muon", params=params[:3], lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95)
    others = dict(kind="adamw", params=params[3:], lr=0.01, betas=(0.8, 0.95), eps=1e-8)
    groups = [dict(matrices, weight_decay=0.1), dict(others, weight_decay=0.1)]
    optimizer = DistMuonAdamW(groups) if ranks > 1 else MuonAdamW(groups)
    for step in range(4):
        for number, param in enumerate(params):
            if ranks > 1:
                param.grad = gradient(number, step, rank)
            else:
                param.grad = (gradient(number, step, 0) + gradient(number, step, 1)) / 2
        optimizer.step()
    torch.save([param.detach() for param in params], f"{file}-{rank}")


def test_two_ranks_are_one_process_on_the_mean_gradient(tmp_path):
    train_on_ranks(0, 1, None, tmp_path / "alone")
    arguments = (2, tmp_path / "store", tmp_path / "of-two")
    torch.multiprocessing.start_processes(train_on_ranks, arguments, nprocs=2, start_method="forkserver")
    alone, first, second = (torch.load(tmp_path / name) for name in ("alone-0", "of-two-0", "of-two-1"))
    for p, q, r in zip(alone, first, second, strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-12)
        assert torch.equal(q, r), "all ranks have the same bits"


# ---- what the other tests share


def parameter(*shape):
    generator = torch.Generator().manual_seed(hash(shape) % 1000)
    return torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.1)


def muon(*params, **options):
    return {**MUON, "params": list(params), **options}


def adamw(*params, **options):
    return {**ADAMW, "params": list(params), **options}


def mixed():
    params = [parameter(*shape) for shape in [(24, 24), (24, 12), (12, 24), (3, 8, 8), (600, 30), (5,), ()]]
    return params, [muon(*params[:4], names=list("abcd")), adamw(*params[4:], names=list("efg"))]


# ---- the update rules


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
def test_plain_muon_is_torchs(shape):
    ours, theirs, start = (parameter(*shape) for _ in range(3))
    group = muon(ours, coefficients="simple", beta2=None, weight_decay_form="decoupled")
    train(MuonAdamW([group]), [ours], 20)
    train(torch.optim.Muon([theirs], lr=0.02, momentum=0.95, weight_decay=0.1), [theirs], 20)
    assert distance(ours - start, theirs - start) < 0.02  # theirs iterates in bf16


@pytest.mark.parametrize("form", ["cautious", "decoupled", "adamw", "small adamw"])
def test_a_parameter_that_is_left_alone_keeps_infinite_numbers(form):
    """In weight decay, -inf times a rate of 0 would be NaN."""
    shape = (600, 32) if form == "adamw" else (64, 32)
    mask, beside = parameter(*shape), parameter(*shape)
    with torch.no_grad():
        mask[0], mask[1], mask[2] = -math.inf, math.inf, -0.0
    before = mask.detach().clone()
    group = adamw(mask, beside) if "adamw" in form else muon(mask, beside, weight_decay_form=form)
    train(MuonAdamW([group]), [beside], 1)
    assert torch.equal(mask.view(torch.int32), before.view(torch.int32))  # the sign of zero too
    assert beside.isfinite().all()


def test_a_bank_in_many_batches_follows_the_formulas(monkeypatch):
    monkeypatch.setitem(optim.BATCH_BYTES, "cpu", 2 * 4 * 16 * 16)
    model = [("muon", (16, 16))] * 9
    assert_close(trained(None, "one-process", 5, model), expected(model, 5), 1e-11)


# ---- state


def test_loading_never_changes_the_dtype_of_state():
    saved = Run(None, "one-process").train(range(3)).optimizer.full_state_dict()  # float64
    other = Run(None, "one-process", dtype=torch.float32)
    other.optimizer.load_state_dict(saved)
    state = other.optimizer.full_state_dict()["state"]
    assert all(value.dtype == torch.float32 for entry in state.values() for value in entry.values())
    assert_close(([], state), ([], saved["state"]), 1e-6)


CHANGED = {
    "muon": dict(lr=0.1, momentum=0.5, beta2=0.5, weight_decay=0.3),
    "adamw": dict(lr=0.1, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.5),
}


def test_numbers_that_change_between_steps_are_followed():
    """A copy plans only after the change, and makes the same steps."""
    run = Run(None, "one-process").train(range(3))
    runs = run, copy.deepcopy(run)
    for each in runs:
        for group in each.optimizer.param_groups:
            group.update(CHANGED[group["kind"]])
    assert_same_everywhere([each.train(range(3, 6)).result() for each in runs])


def test_a_state_dict_of_before_the_first_step_starts_over():
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    saved = optimizer.state_dict()
    train(optimizer, params, 1)
    tensors = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
    assert all(tensor.any() for tensor in tensors)
    assert len(optimizer.load_state_dict(saved, strict=False)) == len(tensors)  # all are missing
    assert all(tensor.any() for tensor in tensors)
    with torch.device("meta"):  # as torch.set_default_device does
        optimizer.load_state_dict(saved)
    assert not any(tensor.any() for tensor in tensors)
    train(optimizer, params, 1)
    other = copy.deepcopy(optimizer)  # it has no plan yet
    other.load_state_dict(saved)
    assert not any(tensor.any() for entry in other.state.values() for tensor in entry.values())


def test_state_that_is_made_in_inference_mode_is_updated_outside():
    """A model is often evaluated and saved there."""
    params, groups = mixed()
    with torch.inference_mode():
        optimizer = MuonAdamW(groups)
        optimizer.load_state_dict(optimizer.full_state_dict())
    train(optimizer, params, 1)
    assert optimizer.state[params[0]]["momentum_buffer"].any()


def test_a_first_step_that_failed_can_be_taken_again():
    weight, bias = parameter(4, 3), torch.nn.Parameter(torch.zeros(4))
    weight.grad, bias.grad = torch.ones(4, 3), torch.ones(4)
    optimizer = MuonAdamW([adamw(bias, lr=0.1, weight_decay=0.0), muon(weight, scale=lambda m, n: 1 / 0)])
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    optimizer.param_groups[1]["scale"] = "shape"
    optimizer.step()
    torch.testing.assert_close(bias.detach(), torch.full((4,), -0.1))  # AdamW's first step, once


def test_state_may_lose_functions_and_tuples():
    """torch.load opens no code by default; PyTorch's utilities refuse functions in groups, and turn tuples
    into lists. Functions are compared by name, so those that each optimizer creates are the same options.
    """

    def optimizer(**options):
        options |= dict(scale=lambda m, n: 1.0, coefficients=[(2, -1.5, 0.5)] * 3)
        made = MuonAdamW([muon(parameter(8, 4), **options), adamw(parameter(3))])
        made.step()
        return made

    saving, other = optimizer(direction=functools.partial(polar)), optimizer(direction=polar)
    for saved in (saving.state_dict(), saving.full_state_dict(), saving.named_state_dict()):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file)  # weights_only
        loaded["param_groups"] = json.loads(json.dumps(loaded["param_groups"]))
        assert loaded["param_groups"][0]["direction"] == "tests.layouts.polar"
        other.load_state_dict(loaded)
        assert other.param_groups[0]["direction"] is polar
        other.step()
    with pytest.raises(ValueError, match="saved with .*'direction': 'tests.layouts.polar'}, not"):
        optimizer().load_state_dict(loaded)


def test_a_group_without_momentum_has_no_buffer_and_takes_the_state_of_momentum_0():
    def state_of(momentum):
        a = parameter(8, 4)
        optimizer = MuonAdamW([muon(a, momentum=momentum)])
        train(optimizer, [a], 2)
        return optimizer.full_state_dict(), a

    none, zero = state_of(None), state_of(0.0)
    assert torch.equal(none[1], zero[1]), "U is the gradient with either"
    assert none[0]["state"]["group0.0"].keys() == {"second_momentum_buffer"}
    optimizer = MuonAdamW([muon(parameter(8, 4), momentum=None)])
    optimizer.load_state_dict(none[0])
    assert optimizer.param_groups[0]["momentum"] is None
    for hyperparameters in ("restore", "keep"):
        with pytest.raises(ValueError, match="momentum"):
            MuonAdamW([muon(parameter(8, 4))]).load_state_dict(none[0], hyperparameters)
    with pytest.raises(ValueError, match="param group 0 was saved with .*'momentum': True}, not"):
        optimizer.load_state_dict(zero[0])
    grown = MuonAdamW([muon(parameter(8, 4))])
    grown.add_param_group(muon(parameter(8, 4), momentum=None))
    for each in (optimizer, grown):
        with pytest.raises(ValueError, match="doesn't support|must support momentum"):
            torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=9)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="param group 0 .* cycle_momentum=False"):
        optimizer.step()


def test_options_that_are_gone_load_at_their_old_default_only():
    a = parameter(8, 4)
    optimizer = MuonAdamW([muon(a)])
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(row_equilibrate=False, renormalize=False, lr=0.5)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5 and "renormalize" not in optimizer.param_groups[0]
    saved["param_groups"][0].update(renormalize=True)
    with pytest.raises(ValueError, match="param group 0 was saved with .*'renormalize': True}, not"):
        optimizer.load_state_dict(saved)


def test_what_a_load_lacks_is_named_with_its_cause_or_left_as_it_is():
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    train(optimizer, params, 2)
    whole = optimizer.full_state_dict()
    params[0].requires_grad_(False)
    a = whole["state"].pop("a")  # PyTorch's utilities leave frozen parameters out
    optimizer.load_state_dict(whole)
    assert optimizer.state[params[0]]["momentum_buffer"].any()
    params[0].requires_grad_(True)
    with pytest.raises(ValueError, match="no momentum_buffer of a: it was frozen or did not exist"):
        optimizer.load_state_dict(whole)
    whole["state"]["b"] = whole["state"]["e"]
    with pytest.raises(
        ValueError, match="of b: it was trained with other options or the other kind, and has step, exp_avg"
    ):
        optimizer.load_state_dict({**whole, "state": {**whole["state"], "a": a}})
    kept = optimizer.state[params[1]]["momentum_buffer"].clone()
    whole["state"]["c"] = {key: value + 1 for key, value in whole["state"]["c"].items()}
    missing = optimizer.load_state_dict(whole, strict=False)
    assert {name for name, _ in missing} == {"a", "b"} and ("a", "momentum_buffer") in missing
    assert torch.equal(optimizer.state[params[1]]["momentum_buffer"], kept)
    assert torch.equal(optimizer.state[params[2]]["momentum_buffer"], whole["state"]["c"]["momentum_buffer"])


def test_hyperparameters_are_restored_by_name_into_other_groups():
    a, b, c, d, *others = zip("abcdefg", mixed()[0], strict=True)
    own = torch.ones(2)  # a user's key
    groups = [muon(a, b, lr=0.3, own=own), muon(c, d, lr=0.4, own=own.clone()), adamw(*others)]
    saved = MuonAdamW(groups).full_state_dict()
    optimizer = MuonAdamW([adamw(*others), muon(d), muon(a, b), muon(c)])
    for how, rates in (("keep", [0.01, 0.02, 0.02, 0.02]), ("restore", [0.01, 0.4, 0.3, 0.4])):
        optimizer.load_state_dict(saved, how)
        assert [group["lr"] for group in optimizer.param_groups] == rates
    with pytest.raises(ValueError, match="hyperparameters must be"):
        optimizer.load_state_dict(saved, "ours")
    with pytest.warns(UserWarning, match="state of 4 parameters, such as a, is not loaded") as warned:
        MuonAdamW([adamw(*others)]).load_state_dict(saved)
    assert warned[0].filename == __file__  # the line of the caller
    for group, message in (
        (muon(a, nesterov=False), "was saved with .*, not .*'nesterov': False"),
        (muon(a, beta2=None), "was saved with .*, not .*'second moment': False"),
        (muon(a, c), "would get lr=0.3 and 0.4"),
    ):
        with pytest.raises(ValueError, match=f"group 0 {message}"):
            MuonAdamW([group]).load_state_dict(saved)
    saved["param_groups"][1]["lr"] = 0.3
    merged = MuonAdamW([muon(a, b, c, d), adamw(*others)])
    merged.load_state_dict(saved)
    assert torch.equal(merged.param_groups[0]["own"], own)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    train(optimizer, params, 1)
    before, other = optimizer.full_state_dict(), optimizer.full_state_dict()
    for entry in other["state"].values():
        for tensor in entry.values():
            tensor += 1
    other["state"]["f"]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"exp_avg of f has shape \(3, 3\), expected \(5,\)"):
        optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match="group 0 .* MuonAdamW did not save it"):
        optimizer.load_state_dict(torch.optim.AdamW(params).state_dict())
    assert_same_everywhere([(params, saved["state"]) for saved in (before, optimizer.full_state_dict())])


def test_without_names_a_regrouped_load_is_refused():
    a, b = parameter(8, 8), parameter(8, 8)
    saved = MuonAdamW([muon(a, b)]).named_state_dict()
    assert list(saved["state"]) == ["group0.0", "group0.1"]
    MuonAdamW([muon(a, b)]).load_state_dict(saved)
    with pytest.raises(ValueError, match="names"):
        MuonAdamW([muon(a), muon(b)]).load_state_dict(saved)


def test_state_loads_under_the_names_of_a_wrapped_model():
    """The names of DistributedDataParallel and torch.compile, given as `names` or with the parameters."""
    p, q = parameter(8, 8), parameter(5)
    named = MuonAdamW([dict(MUON, params=[("module.a", p)]), adamw(q, names=["_orig_mod.b"])])
    train(named, [p, q], 1)
    assert list(named.full_state_dict()["state"]) == ["a", "b"]
    for names in (["module.a"], ["_orig_mod.b"]), (["a"], ["b"]):
        other = MuonAdamW([muon(p, names=names[0], lr=0.5), adamw(q, names=names[1])])
        other.load_state_dict(named.state_dict())
        assert other.param_groups[0]["lr"] == 0.02
        assert torch.equal(other.state[p]["momentum_buffer"], named.state[p]["momentum_buffer"])


# ---- construction

BAD_MUON = [  # of a group of one matrix (48, 20)
    (dict(nestrov=True), r"\(muon\): unknown nestrov: did you mean nesterov"),
    (dict(betas=(0.9, 0.9)), r"\(muon\): unknown betas: an option of the other kind"),
    (dict(maximize=True, adjust_lr_fn="original"), ".* has no maximize, adjust_lr_fn: leave it out"),
    (dict(names=["a", "b"]), "2 names for 1 params"),
    (dict(coefficients="newton"), "unknown coefficients 'newton'"),
    (dict(coefficients=[(2.0, math.nan, 0.5)]), "coefficients must be finite"),
    (dict(ns_steps=0), ".*at least one step"),
    (dict(ns_steps=2.5), "ns_steps must be a whole number or None, but is 2.5"),
    (dict(scale="big"), "unknown scale 'big'"),
    (dict(weight_decay_form="coupled"), "weight_decay_form must be one of .*, not 'coupled'"),
    (dict(nesterov="no"), "nesterov must be one of .*, not 'no'"),
    (dict(tensor_parallel="both"), "tensor_parallel must be one of .*, not 'both'"),
    (dict(lr=torch.tensor(math.nan)), "lr must be finite and not negative, but is nan"),
    (dict(lr=torch.ones(2)), "lr must be a number, but is tensor"),
    (dict(weight_decay=math.inf), "weight_decay must be finite"),
    (dict(beta2=1.0), "beta2 must be at least 0 and below 1, but is 1.0"),
    (dict(direction="polar"), "direction='polar' is not a function"),
    (dict(direction=len, split=6), ".*split and direction cannot be combined"),
]
SPLITS = (True, 2.0, 0, 7, (10, 20), (-8, 56), (24.0, 24.0), ("qkv", (3, 2, 2)), ("qkv", ()))
BAD_MUON += [(dict(split=split), "split=") for split in SPLITS]
BAD_ADAMW = [  # of a group of one vector
    (dict(nesterov=True), r"\(adamw\): unknown nesterov: an option of the other kind"),
    (dict(maximize=False, amsgrad=True), ".* has no amsgrad: leave it out"),
    (dict(eps=-1), "eps must be finite and not negative, but is -1"),
    (dict(betas=(0.9, 1.0)), r"betas\[1\] must be at least 0 and below 1, but is 1.0"),
    (dict(betas=0.9), "betas must be two numbers, not 0.9"),
]


def direction_with_buffer(name):
    def direction(U, buffers, ok, hyper):
        buffers[name] = U  # would be lost with the step

    direction.buffers = lambda m, n: {name: (m, n)}
    return direction


MUST_RETURN = r"must return \(X, gain\): X of the shape of U, here \(1, 48, 20\), and a tensor of three dim"
WRONG = [
    lambda U, *_: (U[:, :, :1], U),
    lambda U, *_: (U, torch.ones(len(U))),
    lambda U, *_: (U, 0.05),
    lambda U, *_: U,
]


@pytest.mark.parametrize(
    "direction, message",
    [
        *[(returns, MUST_RETURN) for returns in WRONG],
        (direction_with_buffer("mean"), "does not support item assignment"),
        (direction_with_buffer("momentum_buffer"), "buffer cannot be called momentum_buffer"),
    ],
)
def test_a_direction_that_returns_or_keeps_something_else_is_refused(direction, message):
    """X of another shape would broadcast."""
    p = parameter(48, 20)
    p.grad = torch.ones_like(p)
    with pytest.raises((AttributeError, TypeError, ValueError), match=message):
        MuonAdamW([muon(p, direction=direction)]).step()


def test_impossible_groups_are_refused_at_construction():
    p, q = parameter(48, 20), parameter(8)
    cases = [([muon(p, **options)], f"group 0:? ?{message}") for options, message in BAD_MUON]
    cases += [([adamw(q, **options)], f"group 0:? ?{message}") for options, message in BAD_ADAMW]
    cases += [
        ([dict(muon(p), kind="sgd")], "group 0: unknown kind 'sgd'"),
        ([dict(kind="muon")], r"\(muon\): missing beta2, lr, momentum, ns_steps, params, weight_decay"),
        ([muon(p, p)], "group 0: group0.1 is already in group 0"),
        ([adamw(q), muon(p), adamw(p)], "group 2: group2.0 is already in group 1"),
        ([adamw(q, names=["w"]), muon(p, names=["w"])], "group 1: the name w is used twice"),
        ([muon(p, q, names=["w", "bias"])], r"group 0: bias has shape \(8,\)"),
        ([adamw(parameter(8).detach().to(torch.float8_e4m3fn))], "group 0: group0.0 is torch.float8_e4m3fn"),
        ([muon(parameter(2, 2, 2, 2, 2))], r"group 0: group0.0 has shape \(2, 2, 2, 2, 2\)"),
        ([muon(torch.nn.Linear(3, 3))], "group 0: group0.0 is a Linear, not a parameter"),
        ([dict(ADAMW, params={p, q})], "group 0: params is a set, whose order differs between processes"),
    ]
    for groups, message in cases:
        with pytest.raises(ValueError, match=message):
            MuonAdamW(groups)
    for settings in (dict(ns_dtype=torch.float16), dict(compile="yes"), dict(comm_dtype=torch.float16)):
        (key,) = settings
        optimizer = DistMuonAdamW if key == "comm_dtype" else MuonAdamW
        with pytest.raises(ValueError, match=f"{key} must be one of .*, not {settings[key]!r}"):
            optimizer([muon(p, initial_lr=0.1)], **settings)


def test_numbers_that_become_impossible_are_refused_before_they_change_anything():
    params, groups = mixed()
    optimizer = MuonAdamW(groups)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 0.0, total_iters=4)
    for _ in range(4):
        train(optimizer, params, 1)
        scheduler.step()
    assert -1e-16 < optimizer.param_groups[0]["lr"] < 0  # by rounding, which stops no step
    before = [param.detach().clone() for param in params]
    for group, key, value in zip(optimizer.param_groups, ("momentum", "lr"), (1.0, "1e-3"), strict=True):
        possible, group[key] = group[key], value
        with pytest.raises(ValueError, match=f"param group of {group['names'][0]}: {key}"):
            train(optimizer, params, 1)
        group[key] = possible
    assert equal(params, before)


def test_sparse_gradients_are_refused_in_one_line():
    embedding = torch.nn.Embedding(9, 4, sparse=True)
    optimizer = MuonAdamW([adamw(embedding.weight)])
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="gradient is sparse"):
        optimizer.step()


def test_counters_do_not_take_the_default_dtype():
    """In bfloat16 a count ends at 256: the bias correction of beta2 .999 would stay that of step 256."""
    params = [torch.nn.Parameter(torch.ones(size)) for size in ((4,), (1200, 16))]
    for param in params:
        param.grad = torch.ones_like(param)
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = MuonAdamW([adamw(*params, lr=1e-3, weight_decay=0.0)])
        for _ in range(600):
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for param in params:
        assert optimizer.state[param]["step"] == 600
        assert abs(param.mean().item() - 0.4) < 1e-3  # 1 - 600 lr


def test_no_parameters_and_no_groups():
    MuonAdamW([muon(), adamw()]).step()
    model = torch.nn.Linear(4, 4)
    for parameters in (model.parameters(), model.named_parameters()):
        with pytest.raises(ValueError, match=r"MuonAdamW.for_model\(model, lr=...\)"):
            MuonAdamW(parameters)


def test_for_model_trains_every_parameter_with_one_rate():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 7))
    optimizer = MuonAdamW.for_model(model, lr=1e-3, compile=False)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}
    before = copy.deepcopy(model)
    model(torch.arange(20)).square().mean().backward()
    optimizer.step()
    # The first step has the rms of the rate with AdamW, and 0.2 of it with Muon
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert 1e-5 < (p - q).square().mean().sqrt() < 1.1e-3
    faster = MuonAdamW.for_model(model, lr=1e-3, muon_lr=0.1)
    assert {group["kind"]: group["lr"] for group in faster.param_groups} == {"muon": 0.1, "adamw": 1e-3}


# ---- compilation


def test_as_a_library_a_cpu_runs_eagerly_unless_told_otherwise(monkeypatch, caplog):
    """Whatever setting the optimizer that stepped before had."""
    caplog.set_level("INFO", logger="nanomuon")
    monkeypatch.delenv("NANOMUON_COMPILE")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for n, compiles in ((44, True), (45, False), (46, "auto")):
        before, p = graphs(), parameter(48, n)
        train(MuonAdamW([muon(p)], compile=compiles), [p], 1)
        assert graphs() - before == (3 if compiles is True else 0)
    assert caplog.text.count("compiling muon_momentum: this step takes a while") == 1


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_steps_follow_the_formulas_and_a_new_rate_recompiles_nothing(monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "1")
    model = [("muon", shape) for shape in [(64, 64), (32, 64), (64, 64), (64, 32)]] + [("adamw", (60, 30))]
    run = Run(None, "one-process", model, torch.float32).train(range(3))
    compiled = graphs()
    assert compiled >= 5
    for group in run.optimizer.param_groups:
        group.update({"lr": 0.1, "momentum": 0.8} if group["kind"] == "muon" else {"lr": 0.3})
    run.train(range(3, 5))
    # Nor does a second optimizer of the same shapes
    assert_close(
        trained(None, "one-process", 4, model, torch.float32), expected(model, 4, dtype=torch.float32), 1e-4
    )
    assert graphs() == compiled


@pytest.mark.slow
def test_forty_shapes_compile(monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    before = graphs()
    model = [("muon", (32 + i, 32)) for i in range(12)] + [("adamw", (600 + i, 30)) for i in range(28)]
    result = trained(None, "one-process", 2, model, torch.float32, options=dict(ns_steps=1))
    # momentum, direction and update of each matrix, one kernel of each other; nothing twice, nothing eager
    assert graphs() - before == 12 * 3 + 28
    assert_close(result, expected(model, 2, dtype=torch.float32, ns_steps=1), 1e-4)
