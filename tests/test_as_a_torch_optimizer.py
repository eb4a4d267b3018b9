"""What training loops that are not ours do with a torch optimizer, done with MuonAdamW and DistMuonAdamW."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nanomuon.optim import DistMuonAdamW, MuonAdamW, local
from nanomuon.param_groups import build_param_groups
from tests.worlds import run_world

MUON = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.1)
ADAMW = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
ROWS = 4  # of a batch


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "0")


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))


def groups_of(model):
    return build_param_groups(model, muon=MUON, adamw=ADAMW, skip_keys=["4"])


def batch(step, rank=0):
    """(ROWS, 12)"""
    return torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, step, rank=0):
    return (model(batch(step, rank)) - 1).square().mean()


def train(model, optimizer, steps, rank=0):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def trained(steps):
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    train(model, optimizer, range(steps))
    return model


def trained_on_two_batches(steps):
    """By one process, on the mean of what two ranks see in each step."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    for step in range(steps):
        optimizer.zero_grad()
        ((loss_of(model, step, 0) + loss_of(model, step, 1)) / 2).backward()
        optimizer.step()
    return model


def assert_same(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# ---- one process


def test_one_cycle():
    """Of the learning rates: torch cycles the momentum of all groups by one name, and ours have two."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    settings = dict(max_lr=[0.02, 0.01], total_steps=6, cycle_momentum=False)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, **settings)
    rates = []
    for step in range(5):
        train(model, optimizer, [step])
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert max(rates) == pytest.approx(0.02, rel=0.1) and rates[-1] < 1e-3
    other = MuonAdamW(groups_of(build(1)))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["max_lr"] == 0.02
    # With its defaults it cycles Muon's momentum too
    torch.optim.lr_scheduler.OneCycleLR(other, max_lr=0.02, total_steps=6)
    assert other.param_groups[0]["momentum"] == 0.95


def test_a_step_inside_of_autocast():
    """Newton-Schulz keeps its own dtype: in bf16 its Gram form, taken for 12 x 20, is off by 6%."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    assert_same(model, trained(4))


def test_hooks_and_a_closure():
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert called == ["before", "after"]
    assert_same(model, trained(1))


def test_a_group_that_comes_later_has_a_rate_and_is_saved():
    model, late = build(), nn.Linear(4, 4, bias=False)
    optimizer = MuonAdamW(groups_of(model))
    train(model, optimizer, range(2))
    optimizer.add_param_group(dict(MUON, kind="muon", params=[late.weight], names=["late.weight"]))
    for step in range(2, 4):
        optimizer.zero_grad()
        late(model(batch(step))).square().mean().backward()
        optimizer.step()
    both = nn.ModuleList([build(1), nn.Linear(4, 4, bias=False)])
    other = MuonAdamW(groups_of(both[0]))
    other.add_param_group(dict(MUON, kind="muon", params=[both[1].weight], names=["late.weight"]))
    other.load_state_dict(optimizer.state_dict())
    found, expected = other.full_state_dict(), optimizer.full_state_dict()
    assert found["state"].keys() == expected["state"].keys()
    assert torch.equal(
        found["state"]["late.weight"]["momentum_buffer"], expected["state"]["late.weight"]["momentum_buffer"]
    )


def test_a_learning_rate_that_is_a_tensor_is_not_shared_with_what_was_saved():
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


# ---- two processes


def under_ddp(group, micro_batches):
    """Parameters after four steps; all but the last micro-batch of a step send nothing (no_sync)."""
    rank, model = dist.get_rank(group), build()
    optimizer = MuonAdamW(groups_of(model))  # DDP has averaged the gradients
    ddp = DistributedDataParallel(model, process_group=group)
    for step in range(4):
        optimizer.zero_grad()
        with ddp.no_sync():
            for micro in range(micro_batches - 1):
                (loss_of(ddp, 100 * micro + step, rank) / micro_batches).backward()
        (loss_of(ddp, 100 * (micro_batches - 1) + step, rank) / micro_batches).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ddp_and_no_sync(micro_batches):
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            for micro in range(micro_batches):
                (loss_of(model, 100 * micro + step, rank) / (2 * micro_batches)).backward()
        optimizer.step()
    first, second = run_world(2, under_ddp, micro_batches)
    for p, q, expected in zip(first, second, model.parameters(), strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, expected, rtol=1e-3, atol=1e-4)


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
    """Its runs of a flat tensor are equal in shape on all ranks, and would start as rank 0 has its own."""
    assert all("take fully_shard (FSDP2)" in error for error in run_world(2, under_fsdp1))


def wrapped(kind, group, seed):
    """A model, by itself or under DDP or FSDP2, and its optimizer."""
    model = build(seed)
    if kind == "plain":
        return model, DistMuonAdamW(groups_of(model), group)
    if kind == "ddp":
        optimizer = DistMuonAdamW(groups_of(model), group)
        return DistributedDataParallel(model, process_group=group), optimizer
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model, DistMuonAdamW(groups_of(model), group)


def through_torchs_state_dicts(group, kind, full):
    rank = dist.get_rank(group)
    # Under DDP other ranks own some of the state, which torch takes for missing
    options = StateDictOptions(full_state_dict=full, strict=kind == "fsdp")
    model, optimizer = wrapped(kind, group, 0)
    train(model, optimizer, range(3), rank)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    other, other_optimizer = wrapped(kind, group, 1)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    train(model, optimizer, range(3, 6), rank)
    train(other, other_optimizer, range(3, 6), rank)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return [bool((p == q).all()) for p, q in pairs]


@pytest.mark.parametrize("kind, full", [("ddp", False), ("ddp", True), ("fsdp", False), ("fsdp", True)])
def test_torchs_distributed_state_dicts_resume(kind, full):
    for same in run_world(2, through_torchs_state_dicts, kind, full):
        assert all(same)


def copied(group, how):
    """Whether a copy of model and optimizer goes on as they do; a pickled one in the default group."""
    rank = dist.get_rank(group)
    model = build()
    optimizer = DistMuonAdamW(groups_of(model), group)
    train(model, optimizer, range(2), rank)
    if how == "deepcopy":
        other, other_optimizer = copy.deepcopy((model, optimizer))
    else:
        other, other_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, range(2, 4), rank)
    train(other, other_optimizer, range(2, 4), rank)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) and p is not q for p, q in pairs)


@pytest.mark.parametrize("how, size", [("deepcopy", 2), ("pickle", 4)])
def test_a_copy_goes_on_on_all_ranks(how, size):
    assert all(run_world(size, copied, how))


def loaded_from_rank_0(group, folder, layers):
    """What each rank hears when all of them load what rank 0 has saved alone."""
    model = nn.Sequential(nn.Embedding(20_000, 2), *[nn.Linear(2, 2, bias=False) for _ in range(layers)])
    groups = build_param_groups(model, muon=MUON, adamw=ADAMW, skip_keys=[])
    optimizer = DistMuonAdamW(groups, group)
    torch.save(optimizer.full_state_dict(), folder / f"full_{dist.get_rank(group)}.pt")
    if dist.get_rank(group) == 0:
        torch.save(optimizer.state_dict(), folder / "local.pt")
    dist.barrier(group)
    optimizer.load_state_dict(torch.load(folder / "full_0.pt"))
    try:
        optimizer.load_state_dict(torch.load(folder / "local.pt"))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("layers", [0, 2])
def test_what_rank_0_has_saved_alone_is_refused_elsewhere(tmp_path, layers):
    """Its rows of the embedding would go for those of the other rank, also where that one owns no matrix."""
    first, second = run_world(2, loaded_from_rank_0, tmp_path, layers)
    assert first is None
    assert "another rank" in second and "save optimizer.full_state_dict()" in second


def clipped(group):
    """The norm that clip_grad_norm_ gives for DTensor gradients, and of those that it leaves."""
    rank = dist.get_rank(group)
    model, optimizer = wrapped("fsdp", group, 0)
    loss_of(model, 0, rank).backward()
    before = nn.utils.clip_grad_norm_(model.parameters(), 1e-3).full_tensor()
    after = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    finite = all(bool(p.full_tensor().isfinite().all()) for p in model.parameters())
    return before.item(), after.item(), finite


def test_clip_grad_norm_over_dtensors():
    model = build()
    ((loss_of(model, 0, 0) + loss_of(model, 0, 1)) / 2).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for before, after, finite in run_world(2, clipped):
        assert before == pytest.approx(norm, rel=1e-4)
        assert after == pytest.approx(1e-3, rel=1e-2)
        assert finite


def late_group(group, kind):
    rank = dist.get_rank(group)
    model, optimizer = wrapped(kind, group, 0)
    train(model, optimizer, range(2), rank)
    late = nn.Linear(4, 4, bias=False)
    if kind == "fsdp":
        fully_shard(late, mesh=dist.DeviceMesh.from_group(group, "cpu"))
    optimizer.add_param_group(dict(MUON, kind="muon", params=[late.weight], names=["late.weight"]))
    before = local(late.weight).detach().clone()
    optimizer.zero_grad()
    late(model(batch(2, rank))).square().mean().backward()
    optimizer.step()
    return bool((local(late.weight) != before).any()), "late.weight" in optimizer.full_state_dict()["state"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_group_that_comes_later_on_two_ranks(kind):
    for changed, saved in run_world(2, late_group, kind):
        assert changed and saved


def prepared_after(group, model):
    """What accelerate does: fully_shard a model that has its optimizer, and put the new parameters into the
    groups.
    """
    optimizer = DistMuonAdamW(groups_of(model), group)
    names = {param: name for name, param in model.named_parameters()}
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=dist.DeviceMesh.from_group(group, "cpu"))
    sharded = dict(model.named_parameters())
    for param_group in optimizer.param_groups:
        param_group["params"] = [sharded[names[param]] for param in param_group["params"]]
    return optimizer


def trained_after_it_was_prepared(group):
    rank = dist.get_rank(group)
    model = build()
    optimizer = prepared_after(group, model)
    train(model, optimizer, range(3), rank)
    return [param.full_tensor().detach() for param in model.parameters()]


def test_parameters_that_fsdp_replaces_in_the_groups_are_trained():
    model = trained_on_two_batches(3)
    for params in run_world(2, trained_after_it_was_prepared):
        for ours, expected in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-6)


def test_a_model_that_is_converted_after_its_optimizer_was_built():
    before, after = build(), build()
    early = MuonAdamW(groups_of(before))
    before.double()
    after.double()
    late = MuonAdamW(groups_of(after))
    for model, step in ((before, early.step), (after, late.step)):
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            step()
    assert early.state[before[0].weight]["momentum_buffer"].dtype == torch.float64
    assert all(torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True))


def other_rule(optimizer):
    optimizer.param_groups[0]["nesterov"] = False


def without_variance_reduction(optimizer):
    optimizer.param_groups[0]["beta2"] = None


def another_dict(optimizer):
    optimizer.param_groups[0] = dict(optimizer.param_groups[0], lr=0.5)


def without_its_last_parameter(optimizer):
    for key in ("params", "names"):
        optimizer.param_groups[0][key].pop()


@pytest.mark.parametrize(
    "change", [other_rule, without_variance_reduction, another_dict, without_its_last_parameter]
)
def test_groups_that_change_are_followed_until_there_is_state_and_refused_then(change):
    """Each of these was ignored: the step was that of the groups as they had been."""
    model, expected = build(), build()
    optimizer, from_the_start = MuonAdamW(groups_of(model)), MuonAdamW(groups_of(expected))
    change(optimizer)
    change(from_the_start)
    from_the_start = MuonAdamW(from_the_start.param_groups)
    train(model, optimizer, [0])
    train(expected, from_the_start, [0])
    assert_same(model, expected)
    assert any((p != q).any() for p, q in zip(model.parameters(), trained(1).parameters(), strict=True))

    late = build()
    optimizer = MuonAdamW(groups_of(late))
    train(late, optimizer, [0])
    change(optimizer)
    optimizer.add_param_group(dict(MUON, kind="muon", params=[("late", nn.Parameter(torch.ones(4, 4)))]))
    with pytest.raises(ValueError, match="param groups have other parameters or options"):
        optimizer.step()
    assert_same(late, trained(1))


def test_state_that_is_replaced_or_cleared_is_told():
    """Kernels write into tensors of whole banks, of which these are views: another one would not be read."""
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


def test_channels_last_after_the_optimizer_was_built_is_told():
    """Its convolutions stayed as they were, in silence: what was updated were copies."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False))
    optimizer = MuonAdamW(groups_of(model))
    model.to(memory_format=torch.channels_last)
    model(torch.ones(1, 3, 8, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        optimizer.step()


def test_an_optimizer_goes_with_its_last_reference():
    """Without the garbage collector: a process group that lives until the interpreter ends is aborted by gloo
    now and then.
    """
    MuonAdamW(groups_of(build())).step()  # the first one is held by what torch._dynamo imports on the way
    gc.collect()
    gc.disable()
    try:
        optimizer = MuonAdamW(groups_of(build()))
        optimizer.step()
        parts = [weakref.ref(part) for part in (optimizer, optimizer.world, optimizer.works[0])]
        del optimizer
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()
