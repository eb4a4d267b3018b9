"""Every usual way to save an optimizer, in every layout: the optimizer resumes, bit for bit in the same world
and up to rounding in another, or saving raises an error. Nothing is lost silently.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nanomuon.optim import DistMuonAdamW
from nanomuon.optim_groups import build_param_groups
from tests.layouts import full, mesh_of, whitened
from tests.reference import MATRICES, OTHERS, equal
from tests.test_as_a_torch_optimizer import train
from tests.worlds import run_fresh_world

pytestmark = [pytest.mark.usefixtures("eager")]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


MESHES = {
    "fsdp": ("dp",),
    "fsdp with a direction": ("dp",),
    "hsdp": ("copies", "dp"),
    "tp": ("tp",),
    "fsdp x tp": ("dp", "tp"),
}


def model_and_optimizer(layout, group, seed):
    """Matrices that do not divide by three ranks, one with fewer rows than ranks, a head and biases."""
    torch.manual_seed(seed)
    layers = nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2), nn.Linear(2, 4)
    model = nn.Sequential(*layers).double()
    names = MESHES.get(layout, ())
    mesh = mesh_of(group, names) if names else None
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "dp" in names:
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh if layout == "hsdp" else mesh["dp"])
    rule = dict(direction=whitened) if "direction" in layout else {}
    skip = ["4", "5"] if layout == "tp" else ["5"]  # a whole matrix's state has one owner
    groups = build_param_groups(model, muon=MATRICES | rule, adamw=OTHERS, skip_keys=skip)
    return model, DistMuonAdamW(groups, group)


def save(way, model, optimizer, group, folder):
    rank = dist.get_rank(group)
    model_state = get_model_state_dict(model, options=WHOLE)
    if way == "full":
        state = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    elif way == "dcp":
        state = None
        dcp.save(
            {"optimizer": get_optimizer_state_dict(model, optimizer)},
            checkpoint_id=folder,
            process_group=group,
        )
    elif way == "each rank's":
        torch.save(optimizer.state_dict(), folder / f"{rank}.pt")
        state = None
    else:
        state = optimizer.full_state_dict()
    if rank == 0:
        torch.save((model_state, state), folder / "saved.pt")
    dist.barrier(group)


def load(way, model, optimizer, group, folder):
    rank = dist.get_rank(group)
    model_state, state = torch.load(folder / "saved.pt", weights_only=True)
    set_model_state_dict(model, model_state, options=StateDictOptions(full_state_dict=True))
    if way == "full":
        set_optimizer_state_dict(model, optimizer, state if rank == 0 else {}, options=FROM_RANK_0)
    elif way == "dcp":
        saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(saved, checkpoint_id=folder, process_group=group)
        set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    elif way == "each rank's":
        files = sorted(folder.glob("[0-9].pt"))  # a larger world has ranks without a file
        optimizer.load_state_dict(torch.load(files[min(rank, len(files) - 1)], weights_only=False))
    else:
        optimizer.load_state_dict(state)


def interrupted(group, layout, folder):
    """{way to save: (its error, whether the loaded optimizer continues like the original, parameters)}"""
    found = {}
    for way in WAYS:
        model, optimizer = model_and_optimizer(layout, group, 0)
        train(model, optimizer, range(3))
        (folder / way).mkdir(exist_ok=True)
        try:
            save(way, model, optimizer, group, folder / way)
        except ValueError as error:
            found[way] = str(error), None, None
            continue
        other, other_optimizer = model_and_optimizer(layout, group, 1)
        if way == "each rank's":
            neighbour = (dist.get_rank(group) + 1) % dist.get_world_size(group)
            file = folder / way / f"{neighbour}.pt"
            with pytest.raises(ValueError, match="another rank or world has saved"):
                other_optimizer.load_state_dict(torch.load(file, weights_only=False))
        load(way, other, other_optimizer, group, folder / way)
        train(model, optimizer, range(3, 6))
        train(other, other_optimizer, range(3, 6))
        ours, theirs = full(model.parameters()), full(other.parameters())
        found[way] = None, equal(ours, theirs), ours
    return found


def continued(group, layout, folder):
    """{way to save: the parameters at the end in another world; for a rank's own file the error}"""
    found = {}
    for way in WAYS:
        if not (folder / way / "saved.pt").exists():  # refused when it was saved
            continue
        model, optimizer = model_and_optimizer(layout, group, 2)
        try:
            load(way, model, optimizer, group, folder / way)
        except ValueError as error:
            found[way] = str(error)
            continue
        train(model, optimizer, range(3, 6))
        found[way] = full(model.parameters())
    return found


def run_and_read(size, function, folder, *args):
    """The results of function(group, *args) on the ranks of a fresh world."""
    assert run_fresh_world(size, folder, write_result, function, folder, args) == [0] * size
    return [torch.load(folder / f"{function.__name__}-{rank}") for rank in range(size)]


def write_result(function, folder, args):
    result = function(dist.group.WORLD, *args)
    torch.save(result, folder / f"{function.__name__}-{dist.get_rank()}")
    dist.barrier()


WAYS = ["full", "dcp", "each rank's", "full_state_dict"]
# A layout, ranks that save, and the layout and ranks that go on
CASES = [("replicated", 2, "replicated", 3), ("fsdp with a direction", 2, "fsdp with a direction", 3)]
SLOW = [("fsdp", 4, "fsdp", 2), ("hsdp", 4, "fsdp", 3), ("fsdp x tp", 4, "fsdp", 2), ("tp", 2, "tp", 4)]
SLOW += [("replicated", 3, "replicated", 4), ("fsdp", 2, "fsdp", 3), ("fsdp", 3, "fsdp", 4)]
SLOW += [("fsdp with a direction", 3, "fsdp with a direction", 2)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize("layout, size, other_layout, other_size", CASES)
def test_it_resumes_or_is_refused_when_it_is_saved(layout, size, other_layout, other_size, tmp_path):
    first, *others = run_and_read(size, interrupted, tmp_path, layout, tmp_path)
    after = run_and_read(other_size, continued, tmp_path, other_layout, tmp_path)
    for way, (error, same, params) in first.items():
        if layout == "replicated" and way != "full_state_dict":
            for found in (first, *others):
                assert "only one of" in found[way][0] and "full_state_dict()" in found[way][0]
            continue
        assert error is None and same and all(found[way][1] for found in others)
        for found in after:
            if way == "each rank's":
                assert "another rank or world has saved: save optimizer.full_state_dict()" in found[way]
                continue
            for p, q in zip(found[way], params, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
