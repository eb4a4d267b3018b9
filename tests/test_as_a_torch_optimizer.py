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
from torch.nn.parallel import DistributedDataParallel

from nanomuon.optim import DistMuonAdamW, MuonAdamW, World
from nanomuon.optim_groups import build_param_groups
from tests.layouts import full
from tests.reference import MATRICES, MUON, OTHERS, equal
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


def frozen_or_unfrozen(group, when, options):
    """Save, freeze or unfreeze a layer, load into another model and go on; in one process or under FSDP2."""
    options, pairs = StateDictOptions(**options), []
    for seed, frozen in ((0, when == "earlier"), (1, when == "later")):
        model = build(seed)
        model[2].weight.requires_grad_(not frozen)
        if group:
            shard(model, group)
        optimizer = DistMuonAdamW(groups_of(model), group) if group else MuonAdamW(groups_of(model))
        pairs.append((model, optimizer))
    (model, optimizer), (other, other_optimizer) = pairs
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(other, other_optimizer, state, options=options)
    saved, loaded = (each.full_state_dict()["state"] for each in (optimizer, other_optimizer))
    both = saved.keys() & loaded.keys()
    assert len(both) == len(saved.keys() | loaded.keys()) - 1 == 5
    for name in both:
        assert all(torch.equal(loaded[name][key], value) for key, value in saved[name].items())
    train(other, other_optimizer, range(2))


@pytest.mark.parametrize(
    "when, options",
    [
        ("later", {}),
        ("later", {"flatten_optimizer_state_dict": True}),
        ("later", {"ignore_frozen_params": True}),
        ("later", {"strict": False}),
        ("earlier", {"strict": False}),  # else torch refuses a trained parameter without state
    ],
)
def test_parameters_are_frozen_or_unfrozen_between_two_runs(when, options):
    """torch's utilities find parameters by name in the groups in which they were saved."""
    frozen_or_unfrozen(None, when, options)
    run_world(2, frozen_or_unfrozen, when, options)


def of_a_part(layers, name="{}.weight".format):
    """Three matrices in a part of a model, and an optimizer of some of them; the others are frozen."""
    model = nn.Sequential(nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)]))
    for i in {0, 1, 2} - set(layers):
        model[0][i].weight.requires_grad_(False)
    params = [(name(i), model[0][i].weight) for i in layers]
    return model, MuonAdamW([dict(MUON, params=params)])


def save_and_load_a_part(before, after, options, *name):
    """torch's utilities save an optimizer of the layers `before`, and load into one of the layers `after`.
    Returns whether each layer that both train has its momentum.
    """
    model, optimizer = of_a_part(before, *name)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    other, other_optimizer = of_a_part(after, *name)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(other, other_optimizer, saved, options=options)
    have = []
    for i in set(before) & set(after):
        momentum = optimizer.state[model[0][i].weight]["momentum_buffer"]
        loaded = other_optimizer.state[other[0][i].weight]["momentum_buffer"]
        have.append(torch.equal(loaded, momentum))
    return have


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}])
def test_parameters_of_a_part_of_a_model_are_found_if_they_were_moved_frozen_or_unfrozen(options):
    """The optimizer has their names in the part, torch's utilities those in the whole model."""
    assert save_and_load_a_part([0, 1, 2], [2, 0, 1], StateDictOptions(**options)) == [True] * 3
    if not options:  # torch flattens the state for the others, and raises errors for other parameters
        assert save_and_load_a_part([0, 1, 2], [1, 2], StateDictOptions()) == [True] * 2
        assert save_and_load_a_part([0, 1], [1, 2], StateDictOptions(strict=False)) == [True]
    with pytest.raises(ValueError, match="cannot match the names in our groups to those in the model"):
        save_and_load_a_part([0, 1, 2], [2, 0, 1], StateDictOptions(), "my{}".format)


def test_state_that_torchs_utilities_did_not_save_is_missed_when_it_is_loaded():
    """They make state by a step before the first one, but not if there are gradients."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    loss_of(model, 0).backward()
    saved = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match="saved no state: .* call zero_grad"):
        set_optimizer_state_dict(model, optimizer, saved)


def counting(U, buffers, ok, hyper):
    buffers["count"].add_(ok)
    return U, torch.ones_like(ok)


counting.buffers = lambda m, n: {"count": (1, 1)}


@pytest.mark.parametrize("save", ["state_dict", "named_state_dict", "full_state_dict"])
def test_state_of_a_rule_is_not_loaded_into_another_rule(save):
    model = build()
    optimizer = MuonAdamW([dict(group, direction=counting) for group in groups_of(model)[:1]])
    train(model, optimizer, [0])
    other = MuonAdamW(groups_of(build())[:1])
    with pytest.warns(UserWarning, match="^count: not loaded, as state of another kind or direction$"):
        other.load_state_dict(getattr(optimizer, save)(), hyperparameters="keep", strict=False)
    state = other.full_state_dict()["state"]["0.weight"]
    assert "count" not in state
    momentum = optimizer.state[model[0].weight]["momentum_buffer"]
    assert torch.equal(state["momentum_buffer"], momentum)


def test_a_step_inside_autocast():
    """Newton-Schulz keeps its own dtype: in bf16 the Gram form, which is used for 12 x 20, is off by 6%."""
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    assert same(model, trained(4))


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
    """Its slices of a flat tensor have equal shapes on all ranks: rank 0's would overwrite the others."""
    assert all("use fully_shard (FSDP2)" in error for error in run_world(2, under_fsdp1))


def saved_in_a_world(group):
    """Each way to save locally is refused. test_saving.py has the other ways."""
    model = build()
    optimizer = DistMuonAdamW(groups_of(model), group)
    assert optimizer.state_dict()["state"] == {}, "before the first step, as accelerate asks for it"
    train(model, optimizer, [0], dist.get_rank(group))
    wrapped = DistributedDataParallel(model, process_group=group)
    other = build()
    other_optimizer = DistMuonAdamW(groups_of(other), group)
    for save in (
        lambda: get_state_dict(wrapped, optimizer),
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
    assert all(equal(params, of_ranks[0]) for params in of_ranks)


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
        for ours, expected in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-6)


def offloaded(group):
    model = build()
    shard(model, group)
    optimizer = DistMuonAdamW(groups_of(model), group)
    loss_of(model, 0).backward()
    for param in model.parameters():  # its shards on the CPU, although the mesh is one of GPUs
        param.device_mesh._device_type = "cuda"
    with pytest.raises(ValueError, match="0.weight is offloaded to the CPU: FSDP2's CPUOffloadPolicy is not"):
        optimizer.step()
    return True


def test_offloaded_shards_are_refused():
    """Their state would be a copy on the GPU, which the steps do not change."""
    assert all(run_world(2, offloaded))


def test_a_model_that_changes_its_dtype_after_its_optimizer_was_built():
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    train(model.double(), optimizer, [0])
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype == torch.float64


CHANGES = {
    "another rule": lambda groups: groups[0].update(nesterov=False),
    "another dict": lambda groups: groups.__setitem__(0, dict(groups[0], lr=0.5)),
    "one parameter fewer": lambda groups: [groups[0][key].pop() for key in ("params", "names")],
}


def test_a_parameter_that_is_appended_to_a_group_has_no_name():
    model = build()
    optimizer = MuonAdamW(groups_of(model))
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3, 4)))
    with pytest.raises(ValueError, match="2 names for 3 params: 0.weight, .*add_param_group"):
        train(model, optimizer, [0])


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


def of_convolutions(channels_last):
    """Weights and a momentum after four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 5, 3)).double()
    optimizer = MuonAdamW(groups_of(model))
    if channels_last:  # after the optimizer was built
        model.to(memory_format=torch.channels_last)
    assert model[1].weight.is_contiguous() != channels_last
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 12, 12).double()).square().mean().backward()
        optimizer.step()
    return [*model.parameters(), optimizer.full_state_dict()["state"]["1.weight"]["momentum_buffer"]]


def test_channels_last_trains_what_contiguous_convolutions_train():
    for ours, expected in zip(of_convolutions(True), of_convolutions(False), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


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
