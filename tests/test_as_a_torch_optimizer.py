"""What other people's training loops do with a torch optimizer, done with MuonAdamW and DistMuonAdamW."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.optim_groups import build_param_groups
from tests.layouts import full
from tests.reference import ADAMW, MATRICES, MUON, OTHERS
from tests.worlds import run_world

pytestmark = pytest.mark.usefixtures("eager")


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))


def groups_of(model):
    return build_param_groups(model, muon=MATRICES, adamw=OTHERS, skip_keys=["4"])


def loss_of(model, step, rank=0):
    batch = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(batch) - 1).square().mean()


def train(model, optimizer, steps, rank=0):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def trained(steps, ranks=1):
    """A model trained by one process, on the mean of what this many ranks see in each step."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(ranks)) / ranks).backward()
        optimizer.step()
    return model


def same(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(p is not q and bool((p == q).all()) for p, q in pairs)


# ---- one process


def test_closure_hooks_schedule_and_a_group_added_later():
    model, late = build(), nn.Linear(12, 12, bias=False)
    groups = groups_of(model)
    optimizer = MuonAdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert "initial_lr" not in groups[0], "the caller's dicts stay the caller's"
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(lambda rows: model(late(rows) if called[2:] else rows), 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad and called == ["before", "after"]
    assert same(model, trained(1))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.01
    before = late.weight.detach().clone()
    optimizer.add_param_group(dict(MUON, params=[late.weight], names=["late.weight"]))
    optimizer.step(closure)
    assert not torch.equal(late.weight, before)
    state = optimizer.full_state_dict()

    both = nn.ModuleList([build(1), nn.Linear(12, 12, bias=False)])
    other = MuonAdamW(groups_of(both[0]))
    other.add_param_group(dict(MUON, params=[both[1].weight], names=["late.weight"]))
    other.load_state_dict(optimizer.state_dict())
    found = other.full_state_dict()["state"]
    assert found.keys() == state["state"].keys() and "late.weight" in found
    for name, entry in state["state"].items():
        assert all(torch.equal(found[name][key], value) for key, value in entry.items())
    with pytest.raises(ValueError, match="is already in group 2"):
        optimizer.add_param_group(dict(ADAMW, params=[late.weight]))


def on_a_schedule(model, optimizer, scheduler, steps):
    """Train these steps; return their learning rates."""
    rates = []
    for step in steps:
        train(model, optimizer, [step])
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("how", ["state_dict", "full_state_dict", "deepcopy", "pickle"])
def test_a_resumed_run_is_the_uninterrupted_one(how, tmp_path):
    """Bit for bit, learning rates included."""

    def start(seed=0):
        model = build(seed)
        optimizer = MuonAdamW(groups_of(model))
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    uninterrupted, resumed = start(), start()
    rates = on_a_schedule(*uninterrupted, range(10))
    assert on_a_schedule(*resumed, range(5)) == rates[:5]
    if how == "deepcopy":
        resumed = copy.deepcopy(resumed)
    elif how == "pickle":
        resumed = pickle.loads(pickle.dumps(resumed))
    else:
        model, optimizer, scheduler = resumed
        state = model.state_dict(), getattr(optimizer, how)(), scheduler.state_dict()
        torch.save(state, tmp_path / "saved.pt")
        resumed = start(seed=1)
        for each, saved in zip(resumed, torch.load(tmp_path / "saved.pt"), strict=True):
            each.load_state_dict(saved)
    assert on_a_schedule(*resumed, range(5, 10)) == rates[5:]
    assert same(resumed[0], uninterrupted[0])


def test_one_cycle():
    """Learning rates only: torch cycles the momentum of all groups under one name, and ours have two."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    settings = dict(max_lr=[0.02, 0.01], total_steps=6, cycle_momentum=False)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, **settings)
    rates = on_a_schedule(model, optimizer, scheduler, range(5))
    assert max(rates) == pytest.approx(0.02, rel=0.1) and rates[-1] < 1e-3
    other = MuonAdamW(groups_of(build(1)))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["max_lr"] == 0.02
    # With its defaults it cycles Muon's momentum too
    torch.optim.lr_scheduler.OneCycleLR(other, max_lr=0.02, total_steps=6)
    assert other.param_groups[0]["momentum"] == 0.95


def test_a_step_inside_autocast():
    """Newton-Schulz keeps its own dtype: in bf16 its Gram form, taken for 12 x 20, is off by 6%."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    assert same(model, trained(4))


def test_a_learning_rate_that_is_a_tensor_is_not_shared_with_saved_state():
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    saved = optimizer.full_state_dict()
    other = MuonAdamW(groups_of(build()))
    other.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].mul_(0.5)
    assert saved["param_groups"][0]["lr"].item() == other.param_groups[0]["lr"].item() == pytest.approx(0.02)
    other.param_groups[0]["lr"].mul_(0.5)
    assert saved["param_groups"][0]["lr"].item() == pytest.approx(0.02)


def test_a_checkpoint_does_not_load_into_the_empty_state_of_before_the_first_step(tmp_path):
    """torch.distributed.checkpoint fills what is there, and is silent about the rest of the file."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "before")
    train(model, optimizer, range(2))
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "after")
    other = MuonAdamW(groups_of(build()))
    saved = {"optimizer": other.state_dict()}
    dcp.load(saved, checkpoint_id=tmp_path / "before")
    other.load_state_dict(saved["optimizer"])
    with pytest.raises(dcp.api.CheckpointException, match="Missing key .* optimizer.before_first_step"):
        dcp.load(saved, checkpoint_id=tmp_path / "after")


# ---- two processes


def under_fsdp1(group):
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(12, 20, bias=False)),
        process_group=group,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    with pytest.raises(ValueError) as error:
        DistMuonAdamW.for_model(model, process_group=group)
    return str(error.value)


def test_fsdp1_is_refused():
    """Its runs of a flat tensor have the same shape on all ranks, and would start as copies of rank 0's."""
    assert all("use fully_shard (FSDP2)" in error for error in run_world(2, under_fsdp1))


def of_an_fsdp2_model(group, seed):
    model = build(seed)
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model, DistMuonAdamW(groups_of(model), group)


def through_torchs_state_dicts(group, full):
    rank, options = dist.get_rank(group), StateDictOptions(full_state_dict=full)
    model, optimizer = of_an_fsdp2_model(group, 0)
    train(model, optimizer, range(3), rank)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    other, other_optimizer = of_an_fsdp2_model(group, 1)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    train(model, optimizer, range(3, 6), rank)
    train(other, other_optimizer, range(3, 6), rank)
    return same(model, other)


@pytest.mark.parametrize("full", [False, True])
def test_torchs_distributed_state_dicts_resume_fsdp2(full):
    assert all(run_world(2, through_torchs_state_dicts, full))


def saved_in_a_world(group):
    """The error of each usual way of saving replicated parameters, on this rank."""
    model = build()
    optimizer = DistMuonAdamW(groups_of(model), group)
    assert optimizer.state_dict()["state"] == {}, "before the first step, as accelerate asks for it"
    train(model, optimizer, [0], dist.get_rank(group))
    wrapped = DistributedDataParallel(model, process_group=group)
    errors = []
    for save in (
        optimizer.state_dict,
        lambda: get_state_dict(wrapped, optimizer),
        lambda: get_state_dict(wrapped, optimizer, options=StateDictOptions(full_state_dict=True)),
    ):
        with pytest.raises(ValueError) as error:
            save()
        errors.append(str(error.value))
    with pytest.raises(ValueError, match="only one of 2 ranks"):
        copy.deepcopy(optimizer).state_dict()  # it has state, but has not planned
    other = build()
    other_optimizer = DistMuonAdamW(groups_of(other), group)
    with pytest.raises(ValueError, match="only one of 2 ranks"):
        get_state_dict(other, other_optimizer)  # takes a step of zeros first
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(optimizer.full_state_dict())
    train(model, optimizer, range(1, 3), dist.get_rank(group))
    train(other, other_optimizer, range(1, 3), dist.get_rank(group))
    return errors, same(model, other)


def test_state_with_one_owner_is_refused_when_it_is_saved_locally():
    """On every rank alike: one that saves less than the others would lose it without a word."""
    for errors, goes_on in run_world(2, saved_in_a_world):
        assert goes_on
        for error in errors:
            assert "only one of 2 ranks has momentum_buffer of 0.weight" in error
            assert "full_state_dict()" in error and "named_state_dict()" in error and "MuonAdamW" in error


def frozen_later(group):
    """A layer is frozen after two steps: PyTorch's state dicts leave it out, and load."""
    model, optimizer = of_an_fsdp2_model(group, 0)
    train(model, optimizer, range(2))
    before = optimizer.full_state_dict()["state"]
    for param in model[0].parameters():
        param.requires_grad_(False)
    for options in (
        StateDictOptions(),
        StateDictOptions(strict=False),
        StateDictOptions(ignore_frozen_params=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
    ):
        state = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, optimizer, state, options=options)
    after = optimizer.full_state_dict()["state"]
    return all(torch.equal(after[name][key], value) for name in before for key, value in before[name].items())


def test_a_layer_that_is_frozen_later_does_not_keep_state_from_loading():
    assert all(run_world(2, frozen_later))


def copied(group, how):
    """Whether a copy of model and optimizer, with a group that was added later, goes on like the original.
    A pickled one is in the default process group.
    """
    rank, model = dist.get_rank(group), build()
    optimizer = DistMuonAdamW(groups_of(model), group)
    train(model, optimizer, range(2), rank)
    late = nn.Linear(4, 4, bias=False)
    before = late.weight.detach().clone()
    optimizer.add_param_group(dict(MUON, params=[late.weight], names=["5.weight"]))
    model.append(late)
    train(model, optimizer, range(2, 4), rank)
    assert (late.weight != before).any()
    if how == "deepcopy":
        other, other_optimizer = copy.deepcopy((model, optimizer))
    else:
        other, other_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, range(4, 6), rank)
    train(other, other_optimizer, range(4, 6), rank)
    return same(model, other), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("how, size", [("deepcopy", 2), ("pickle", 4)])
def test_a_copy_goes_on_on_all_ranks(how, size):
    are_same, of_ranks = zip(*run_world(size, copied, how), strict=True)
    assert all(are_same)
    for params in of_ranks[1:]:
        assert all(torch.equal(p, q) for p, q in zip(params, of_ranks[0], strict=True))


def loaded_from_rank_0(group, folder):
    """The error on each rank, or None, when all load what only rank 0 has saved."""
    model = nn.Sequential(nn.Embedding(20_000, 2), nn.Linear(2, 2, bias=False))
    groups = build_param_groups(model, muon=MATRICES, adamw=OTHERS)
    optimizer = DistMuonAdamW(groups, group)
    whole = optimizer.full_state_dict()
    if dist.get_rank(group) == 0:
        torch.save(whole, folder / "full.pt")
        torch.save(optimizer.named_state_dict(), folder / "local.pt")
    dist.barrier(group)
    optimizer.load_state_dict(torch.load(folder / "full.pt"))
    try:
        optimizer.load_state_dict(torch.load(folder / "local.pt"))
    except ValueError as error:
        return str(error)


def test_local_state_of_rank_0_is_refused_on_other_ranks(tmp_path):
    """Its rows of the embedding would pass for those of the other rank."""
    first, second = run_world(2, loaded_from_rank_0, tmp_path)
    assert first is None
    assert "another rank" in second and "save optimizer.full_state_dict()" in second


def as_accelerate_does(group):
    """Load an optimizer without state, fully_shard its model, put the new parameters into its groups."""
    model = build()
    optimizer = DistMuonAdamW(groups_of(model), group)
    optimizer.load_state_dict(optimizer.state_dict())
    names = {param: name for name, param in model.named_parameters()}
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=dist.DeviceMesh.from_group(group, "cpu"))
    sharded = dict(model.named_parameters())
    for param_group in optimizer.param_groups:
        param_group["params"] = [sharded[names[param]] for param in param_group["params"]]
    train(model, optimizer, range(3), dist.get_rank(group))
    return full(model.parameters())


def test_parameters_that_fsdp_replaces_in_the_groups_are_trained():
    model = trained(3, ranks=2)
    for params in run_world(2, as_accelerate_does):
        for ours, expected in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-6)


def test_a_model_that_changes_its_dtype_after_its_optimizer_was_built():
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    model.double()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype == torch.float64


CHANGES = {
    "another rule": lambda groups: groups[0].update(nesterov=False),
    "without variance reduction": lambda groups: groups[0].update(beta2=None),
    "another dict": lambda groups: groups.__setitem__(0, dict(groups[0], lr=0.5)),
    "one parameter fewer": lambda groups: [groups[0][key].pop() for key in ("params", "names")],
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_groups_are_followed_before_the_first_step_and_refused_after_it(change):
    model, expected = build(), build()
    optimizer, changed = MuonAdamW(groups_of(model)), groups_of(expected)
    CHANGES[change](optimizer.param_groups)
    CHANGES[change](changed)
    train(model, optimizer, [0])
    train(expected, MuonAdamW(changed), [0])
    assert same(model, expected) and not same(model, trained(1))

    late = build()
    optimizer = MuonAdamW(groups_of(late))
    train(late, optimizer, [0])
    CHANGES[change](optimizer.param_groups)
    with pytest.raises(ValueError, match="param group 0 has other parameters or options"):
        optimizer.step()
    assert same(late, trained(1))


def test_state_that_is_replaced_or_cleared_is_an_error():
    """Kernels work on tensors of whole banks, and these are views: another tensor would not be read."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    train(model, optimizer, [0])
    kept = optimizer.state[model[0].weight]["momentum_buffer"]
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.zeros_like(kept)
    with pytest.raises(ValueError, match="momentum_buffer of 0.weight was replaced or removed"):
        optimizer.step()
    optimizer.state[model[0].weight]["momentum_buffer"] = kept
    optimizer.step()
    optimizer.state.clear()
    with pytest.raises(ValueError, match="replaced or removed in optimizer.state"):
        optimizer.step()


def test_channels_last_trains_what_contiguous_convolutions_train():
    """State is in logical order: it loads from one into the other."""

    def start(channels_last, seed=0):
        torch.manual_seed(seed)
        convolutions = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False), nn.Conv2d(8, 5, 1)
        model = nn.Sequential(*convolutions, nn.Conv2d(5, 5, 3, groups=5)).double()
        optimizer = MuonAdamW(groups_of(model))
        if channels_last:  # after the optimizer was built
            model.to(memory_format=torch.channels_last)
        return model, optimizer

    def run(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(step)).double()
            model(images).square().mean().backward()
            optimizer.step()

    (plain, plain_optimizer), (last, last_optimizer) = start(False), start(True)
    run(plain, plain_optimizer, range(4))
    run(last, last_optimizer, range(2))
    resumed, resumed_optimizer = start(False, seed=1)
    resumed.load_state_dict(last.state_dict())
    resumed_optimizer.load_state_dict(last_optimizer.state_dict())
    run(last, last_optimizer, range(2, 4))
    run(resumed, resumed_optimizer, range(2, 4))
    for model in (last, resumed):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    assert not last[1].weight.is_contiguous()


def test_an_optimizer_is_freed_with_its_last_reference():
    """Without the garbage collector: gloo now and then aborts if a process group lives until the interpreter
    ends.
    """
    MuonAdamW(groups_of(build())).step()  # the first one is held by what torch._dynamo imports on the way
    gc.collect()
    gc.disable()
    try:
        optimizer = MuonAdamW(groups_of(build()))
        optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


def test_state_that_is_not_for_these_groups_is_refused():
    """State of another optimizer; and state without names of other groups, whose group0.1 is another one."""

    def optimizer(*sizes):
        groups = []
        for size in sizes:
            params = [nn.Parameter(torch.ones(3)) for _ in range(size)]
            groups.append(
                dict(kind="adamw", params=params, lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0)
            )
        return MuonAdamW(groups)

    ours = optimizer(1, 1)
    with pytest.raises(ValueError, match="no kind or names"):
        ours.load_state_dict(torch.optim.AdamW([torch.ones(3)]).state_dict())
    with pytest.raises(ValueError, match="without names load only into the same groups"):
        ours.load_state_dict(optimizer(2).full_state_dict())
