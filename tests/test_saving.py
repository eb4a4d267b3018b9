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


MESHES = {"hsdp": "copies dp", "tp": "tp", "fsdp x tp": "dp tp", "replicated": ""}


def model_and_optimizer(layout, seed):
    """Matrices that do not divide by three ranks, one with fewer rows than ranks, a head and biases."""
    torch.manual_seed(seed)
    layers = nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2), nn.Linear(2, 4)
    model = nn.Sequential(*layers).double()
    names = MESHES.get(layout, "dp")
    mesh = mesh_of(dist.group.WORLD, names) if names else None
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "dp" in names:
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh if layout == "hsdp" else mesh["dp"])
    rule = dict(direction=whitened) if "direction" in layout else {}
    skip = ["4", "5"] if layout == "tp" else ["5"]  # a whole matrix's state has one owner
    groups = build_param_groups(model, muon=MATRICES | rule, adamw=OTHERS, skip_keys=skip)
    return model, DistMuonAdamW(groups)


def save(way, model, optimizer, folder):
    model_state, state = get_model_state_dict(model, options=WHOLE), None
    if way == "full":
        state = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    elif way == "dcp":
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    elif way == "each rank's":
        torch.save(optimizer.state_dict(), folder / f"{dist.get_rank()}.pt")
    else:
        state = optimizer.full_state_dict()
    if dist.get_rank() == 0:
        torch.save((model_state, state), folder / "saved.pt")
    dist.barrier()


def load(way, model, optimizer, folder):
    rank = dist.get_rank()
    model_state, state = torch.load(folder / "saved.pt", weights_only=True)
    set_model_state_dict(model, model_state, options=StateDictOptions(full_state_dict=True))
    if way == "full":
        set_optimizer_state_dict(model, optimizer, state if rank == 0 else {}, options=FROM_RANK_0)
    elif way == "dcp":
        saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(saved, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    elif way == "each rank's":
        load_file_of(rank, optimizer, folder)
    else:
        optimizer.load_state_dict(state)


def load_file_of(rank, optimizer, folder):
    files = sorted(folder.glob("[0-9].pt"))  # a larger world has ranks without a file
    optimizer.load_state_dict(torch.load(files[min(rank, len(files) - 1)], weights_only=False))


def interrupted(layout, folder):
    """Save in every way, load into another model, and train both: they remain equal. Or saving is refused."""
    for way in WAYS:
        model, optimizer = model_and_optimizer(layout, 0)
        train(model, optimizer, range(3))
        if layout == "replicated" and way != "full_state_dict":
            with pytest.raises(ValueError, match=r"only one of .* full_state_dict\(\)"):
                save(way, model, optimizer, folder / way)
            continue
        save(way, model, optimizer, folder / way)
        other, other_optimizer = model_and_optimizer(layout, 1)
        if way == "each rank's":
            neighbour = (dist.get_rank() + 1) % dist.get_world_size()
            with pytest.raises(ValueError, match="another rank or world has saved"):
                load_file_of(neighbour, other_optimizer, folder / way)
        load(way, other, other_optimizer, folder / way)
        train(model, optimizer, range(3, 6))
        train(other, other_optimizer, range(3, 6))
        params = full(model.parameters())
        assert equal(params, full(other.parameters()))
    if dist.get_rank() == 0:
        torch.save(params, folder / "expected.pt")


def continued(layout, folder):
    """Load what another world has saved, and go on. A rank's own file is refused."""
    for way in WAYS:
        if not (folder / way / "saved.pt").exists():  # refused when it was saved
            continue
        model, optimizer = model_and_optimizer(layout, 2)
        if way == "each rank's":
            with pytest.raises(ValueError, match="another rank or world has saved: .*full_state_dict"):
                load(way, model, optimizer, folder / way)
            continue
        load(way, model, optimizer, folder / way)
        train(model, optimizer, range(3, 6))
        params = full(model.parameters())
        torch.testing.assert_close(params, torch.load(folder / "expected.pt"), rtol=1e-9, atol=1e-12)


WAYS = ["full", "dcp", "each rank's", "full_state_dict"]
# A layout, ranks that save, and the layout and ranks that go on
CASES = [("replicated", 2, "replicated", 3), ("fsdp with a direction", 2, "fsdp with a direction", 3)]
SLOW = [("fsdp", 4, "fsdp", 2), ("hsdp", 4, "fsdp", 3), ("fsdp x tp", 4, "fsdp", 2), ("tp", 2, "tp", 4)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize("layout, size, other_layout, other_size", CASES)
def test_it_resumes_or_is_refused_when_it_is_saved(layout, size, other_layout, other_size, tmp_path):
    for way in WAYS:
        (tmp_path / way).mkdir()
    assert run_fresh_world(size, tmp_path, interrupted, layout, tmp_path) == [0] * size
    assert run_fresh_world(other_size, tmp_path, continued, other_layout, tmp_path) == [0] * other_size
