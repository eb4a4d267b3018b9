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
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from nanomuon.optim import DistMuonAdamW, MuonAdamW, World
from nanomuon.optim_groups import build_param_groups
from tests.layouts import full, local, whitened
from tests.reference import ADAMW, MATRICES, MUON, OTHERS, equal
from tests.worlds import run_world

pytestmark = pytest.mark.usefixtures("eager")


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))


def shard(model, group):
    """fully_shard the model over the ranks of the group."""
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=dist.DeviceMesh.from_group(group, "cpu"))


def groups_of(model):
    return build_param_groups(model, muon=MATRICES, adamw=OTHERS, skip_keys=["4"])


def loss_of(model, step, rank=0):
    batch = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(batch.to(next(model.parameters()).dtype)) - 1).square().mean()


def train(model, optimizer, steps, rank=0):
    """By default all ranks see the same rows."""
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
    shared = set(model.parameters()) & set(other.parameters())
    return not shared and equal(model.parameters(), other.parameters())


# ---- one process


def test_closure_and_hooks():
    model = build()
    groups = groups_of(model)
    optimizer = MuonAdamW(groups)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert "initial_lr" not in groups[0], "the caller's dicts stay the caller's"
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, saved: saved["param_groups"][0].update(mine=7))
    assert optimizer.state_dict()["param_groups"][0]["mine"] == 7
    assert "mine" not in optimizer.param_groups[0]
    handle = optimizer.register_state_dict_post_hook(lambda _, saved: {"wrapped": saved})
    assert optimizer.state_dict()["wrapped"]["param_groups"][0]["mine"] == 7
    handle.remove()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad and called == ["before", "after"]
    assert same(model, trained(1))


def on_a_schedule(model, optimizer, scheduler, steps):
    """Train these steps; return the groups at each step, without their parameters."""
    numbers = []
    for step in steps:
        numbers.append([dict(group, params=None) for group in optimizer.param_groups])
        train(model, optimizer, [step])
        scheduler.step()
    return numbers


HOW = ["state_dict", "full_state_dict", "before its scheduler", "deepcopy", "pickle"]


@pytest.mark.parametrize("how", HOW)
def test_a_resumed_run_is_the_uninterrupted_one(how, tmp_path):
    """Bit for bit, with everything the scheduler wrote: OneCycleLR adds a momentum to AdamW's groups, too."""

    def start(seed=0):
        model = build(seed)
        optimizer = MuonAdamW(groups_of(model))
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    uninterrupted, resumed = start(), start()
    numbers = on_a_schedule(*uninterrupted, range(10))
    assert on_a_schedule(*resumed, range(5)) == numbers[:5]
    if how == "deepcopy":
        resumed = copy.deepcopy(resumed)
    elif how == "pickle":
        resumed = pickle.loads(pickle.dumps(resumed))
    else:
        model, optimizer, scheduler = resumed
        save = optimizer.full_state_dict if how == "full_state_dict" else optimizer.state_dict
        torch.save((model.state_dict(), save(), scheduler.state_dict()), tmp_path / "saved.pt")
        resumed = start(seed=1)
        if how == "before its scheduler":  # which goes on from the rates in the groups
            other = build(seed=1)
            resumed = other, MuonAdamW(groups_of(other)), scheduler
            scheduler.optimizer = resumed[1]
        for each, saved in zip(resumed, torch.load(tmp_path / "saved.pt"), strict=True):
            each.load_state_dict(saved)
    assert on_a_schedule(*resumed, range(5, 10)) == numbers[5:]
    assert same(resumed[0], uninterrupted[0])


def test_what_a_user_keeps_in_a_group_is_loaded_as_it_was_saved():
    own = {"schedule": loss_of, "layers": [1, 2], "mask": torch.arange(3), "module": nn.Linear}
    own |= dict(lr_mult=0.5, use_muon=True, base_momentum=0.8)  # although they resemble names of options
    optimizer, other = (MuonAdamW([dict(group, **own) for group in groups_of(build())]) for _ in range(2))
    for group in other.param_groups:
        group.update(dict.fromkeys(own))
    other.load_state_dict(optimizer.state_dict())
    for group in other.param_groups:
        assert group["mask"].tolist() == [0, 1, 2] and group["layers"] == [1, 2]
        assert group["schedule"] is loss_of and group["module"] is nn.Linear and group["lr_mult"] == 0.5


def test_what_a_user_keeps_in_the_state_is_refused_when_it_is_saved():
    """A step hook may keep an average of each parameter there, which no other world could load."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    train(model, optimizer, [0])
    optimizer.state[model[0].weight]["average"] = torch.randn(20, 12)
    train(model, optimizer, [1])
    for save in (optimizer.state_dict, optimizer.full_state_dict, optimizer.named_state_dict):
        with pytest.raises(ValueError, match="optimizer.state has average of 0.weight, .*keep it elsewhere"):
            save()


def of_layers(group, layers, prefix):
    """A model with a part of layers 0, 1 and 2, and an optimizer of some of them; the others are frozen."""
    model = nn.Sequential(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]))
    for layer in {*"012"} - {*layers}:
        model[0].get_submodule(layer).requires_grad_(False)
    if group:
        fully_shard(model, mesh=dist.DeviceMesh.from_group(group, "cpu"))
    weights, biases = dict(MUON, params=[]), dict(ADAMW, params=[])
    for layer in layers:
        module = model[0].get_submodule(layer)
        weights["params"].append((f"{prefix}{layer}.weight", module.weight))
        biases["params"].append((f"{prefix}{layer}.bias", module.bias))
    return model, DistMuonAdamW([weights, biases], group) if group else MuonAdamW([weights, biases])


def save_and_load(group, prefix, before, after, options):
    """torch's utilities save an optimizer of the layers `before`, and load into one of the layers `after`,
    which goes on. In one process, or under FSDP2.
    """
    options = StateDictOptions(**options)
    model, optimizer = of_layers(group, before, prefix)
    other, other_optimizer = of_layers(group, after, prefix)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(other, other_optimizer, saved, options=options)
    theirs = dict(other.named_parameters())
    for name, param in model.named_parameters():
        if name[2] in {*before} & {*after}:
            for key, value in optimizer.state[param].items():
                loaded = other_optimizer.state[theirs[name]][key]
                assert torch.equal(local(loaded), local(value))
    other(torch.randn(4, 8)).sum().backward()
    other_optimizer.step()


FLAT, WHOLE, LENIENT = dict(flatten_optimizer_state_dict=True), dict(full_state_dict=True), dict(strict=False)


@pytest.mark.parametrize(
    "prefix, before, after, options",
    [  # the names in the whole model
        ("0.", "012", "02", {}),
        ("0.", "012", "02", FLAT),
        ("0.", "012", "02", dict(ignore_frozen_params=True)),
        ("0.", "012", "02", LENIENT),
        ("0.", "02", "012", LENIENT),  # else torch refuses a trained parameter without state
        # The names in the part, which torch's utilities do not know
        ("", "012", "201", {}),
        ("", "012", "201", FLAT),
        ("", "012", "201", WHOLE),
        ("", "012", "12", {}),
        ("", "01", "12", LENIENT),
    ],
)
def test_torchs_utilities_find_parameters_that_were_moved_frozen_or_unfrozen(prefix, before, after, options):
    """By their names in the groups in which they were saved."""
    save_and_load(None, prefix, before, after, options)
    run_world(2, save_and_load, prefix, before, after, options)


@pytest.mark.parametrize("options", [{}, FLAT, WHOLE])
def test_names_of_the_users_own_cannot_be_found_if_parameters_were_moved(options):
    with pytest.raises(ValueError, match="cannot match the names in our groups to those in the model"):
        save_and_load(None, "my", "012", "201", options)


def test_state_that_torchs_utilities_did_not_save_is_missed_when_it_is_loaded():
    """They make state by a step before the first one, but not if there are gradients."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    loss_of(model, 0).backward()
    saved = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match="saved no state: .* call zero_grad"):
        set_optimizer_state_dict(model, optimizer, saved)


def test_state_of_a_rule_is_not_loaded_into_another_rule():
    def optimizer(**options):
        weight = nn.Parameter(torch.ones(4, 4))
        weight.grad = torch.ones(4, 4)
        return MuonAdamW([dict(MUON, params=[weight], **options)])

    saving, other = optimizer(direction=whitened), optimizer()
    saving.step()
    saved = saving.full_state_dict()
    with pytest.warns(UserWarning, match="^count, gram: not loaded, as state of another kind or direction$"):
        other.load_state_dict(saved, hyperparameters="keep", strict=False)
    state = other.full_state_dict()["state"]["group0.0"]
    assert state.keys() == {"momentum_buffer", "second_momentum_buffer"}
    assert torch.equal(state["momentum_buffer"], saved["state"]["group0.0"]["momentum_buffer"])


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
    layers, on_cpu = nn.Sequential(nn.Linear(12, 20, bias=False)), torch.device("cpu")
    model = FullyShardedDataParallel(layers, group, use_orig_params=True, device_id=on_cpu)
    with pytest.raises(ValueError, match=r"use fully_shard \(FSDP2\)"):
        DistMuonAdamW.for_model(model, process_group=group)


def test_fsdp1_is_refused():
    """Its slices of a flat tensor have equal shapes on all ranks: rank 0's would overwrite the others."""
    run_world(2, under_fsdp1)


def saved_in_a_world(group):
    """Each way to save locally is refused. test_saving.py has the other ways."""
    model = build()
    optimizer = DistMuonAdamW(groups_of(model), group)
    assert optimizer.state_dict()["state"] == {}, "before the first step, as accelerate asks for it"
    train(model, optimizer, [0], dist.get_rank(group))
    other = build()
    other_optimizer = DistMuonAdamW(groups_of(other), group)
    for save in (
        copy.deepcopy(optimizer).state_dict,  # it has state, but has not planned
        lambda: get_state_dict(other, other_optimizer),  # takes a step of zeros first
    ):
        with pytest.raises(ValueError, match="only one of 2 ranks has momentum_buffer of .*MuonAdamW"):
            save()


def test_state_with_one_owner_is_refused_when_it_is_saved_locally():
    """Refused on every rank: a rank that saved less than the others would lose state silently."""
    run_world(2, saved_in_a_world)


def scaled(group):
    """A model trained with a GradScaler, for three steps and one in which a gradient overflows on rank 1."""
    model, rank = build(), dist.get_rank(group)
    optimizer, scaler = DistMuonAdamW(groups_of(model), group), torch.amp.GradScaler("cpu")
    for step in (0, 7, 1, 2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        if step == 7 and rank == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.skipped_steps == 1 and same(model, trained(3, 2))
    assert scaler.get_scale() == (2.0**15 if rank == 1 else 2.0**16)
    scaler.scale(loss_of(model, step, rank)).backward()
    with pytest.raises(ValueError, match=r"still scaled: call scaler.unscale_\(optimizer\)"):
        scaler.step(optimizer)


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_of_all():
    run_world(2, scaled)


def copied(group, how):
    """A copy of model and optimizer, with a group that was added later, goes on like the original. A pickled
    one is in the default process group.
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
    assert same(model, other)
    return full(model.parameters())


@pytest.mark.parametrize("how, size", [("deepcopy", 2), ("pickle", 4)])
def test_a_copy_goes_on_on_all_ranks(how, size):
    first, *others = run_world(size, copied, how)
    assert all(equal(params, first) for params in others)


def unpickled(group, pickled):
    world = pickle.loads(pickled).world
    assert pickle.loads(pickle.dumps(World(group))).size == 4  # also without DistMuonAdamW
    return world.size, world.comm_dtype


def test_an_optimizer_that_was_pickled_in_one_process_belongs_to_all_ranks():
    distributed = DistMuonAdamW(groups_of(build()), comm_dtype=torch.bfloat16)
    for optimizer, world in ((distributed, (4, torch.bfloat16)), (MuonAdamW(groups_of(build())), (1, None))):
        assert run_world(4, unpickled, pickle.dumps(optimizer)) == [world] * 4


def as_accelerate_does(group):
    """Load an optimizer without state, fully_shard its model, put the new parameters into its groups."""
    model = build()
    optimizer = DistMuonAdamW(groups_of(model), group)
    optimizer.load_state_dict(optimizer.state_dict())
    names = {param: name for name, param in model.named_parameters()}
    shard(model, group)
    sharded = dict(model.named_parameters())
    for param_group in optimizer.param_groups:
        param_group["params"] = [sharded[names[param]] for param in param_group["params"]]
    train(model, optimizer, range(3), dist.get_rank(group))
    return full(model.parameters())


def test_parameters_that_fsdp_replaces_in_the_groups_are_trained():
    model = trained(3, ranks=2)
    for params in run_world(2, as_accelerate_does):
        torch.testing.assert_close(params, [*model.parameters()], rtol=1e-4, atol=1e-6)


def offloaded(group):
    model = build()
    shard(model, group)
    optimizer = DistMuonAdamW(groups_of(model), group)
    loss_of(model, 0).backward()
    for param in model.parameters():  # its shards on the CPU, although the mesh is one of GPUs
        param.device_mesh._device_type = "cuda"
    with pytest.raises(ValueError, match="0.weight is offloaded to the CPU: FSDP2's CPUOffloadPolicy is not"):
        optimizer.step()


def test_offloaded_shards_are_refused():
    """Their state would be a copy on the GPU, which the steps do not change."""
    run_world(2, offloaded)


CHANGES = {
    "another rule": lambda model, groups: groups[0].update(nesterov=False),
    "another dict": lambda model, groups: groups.__setitem__(0, dict(groups[0], lr=0.5)),
    "one parameter fewer": lambda model, groups: [groups[0][key].pop() for key in ("params", "names")],
    "another dtype": lambda model, groups: model.double(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_before_the_first_step_are_followed(change):
    model, expected = build(), build()
    optimizer, changed = MuonAdamW(groups_of(model)), groups_of(expected)
    change(model, optimizer.param_groups)
    change(expected, changed)
    train(model, optimizer, [0])
    train(expected, MuonAdamW(changed), [0])
    assert same(model, expected)


def with_more_rows(model, groups):
    """As with a larger vocabulary: the state would belong to other rows."""
    model[0].weight.data = torch.ones(24, 12)


@pytest.mark.parametrize("change", [*CHANGES.values(), with_more_rows], ids=[*CHANGES, "more rows"])
def test_changes_after_the_first_step_are_refused(change):
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    train(model, optimizer, [0])
    optimizer.zero_grad()
    change(model, optimizer.param_groups)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="param group 0 has other parameters or options"):
        optimizer.step()
    assert equal(model.parameters(), before)


def test_state_that_is_replaced_or_cleared_is_an_error():
    """Kernels read the state of whole banks, of which optimizer.state has views: they would not see a new
    tensor.
    """
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    train(model, optimizer, [0])
    kept = optimizer.state[model[0].weight]["momentum_buffer"]
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.zeros_like(kept)
    # Lightning moves the state to the CPU at the end of its fit(), and may save it after that
    assert not optimizer.state_dict()["state"][0]["momentum_buffer"].any()
    with pytest.raises(ValueError, match="momentum_buffer of 0.weight was replaced or removed"):
        optimizer.step()
    optimizer.state[model[0].weight]["momentum_buffer"] = kept
    optimizer.step()
    optimizer.state.clear()
    with pytest.raises(ValueError, match="replaced or removed in optimizer.state"):
        optimizer.step()


def test_an_optimizer_is_freed_with_its_last_reference():
    """Without the garbage collector: gloo sometimes aborts if a process group lives until the interpreter
    exits.
    """
    MuonAdamW(groups_of(build())).step()  # torch._dynamo's imports hold the first one
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


def test_a_parameter_that_is_appended_to_a_group_has_no_name():
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3, 4)))
    with pytest.raises(ValueError, match="2 names for 3 params: 0.weight, .*add_param_group"):
        train(model, optimizer, [0])
