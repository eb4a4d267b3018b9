"""DTensor parameters in DistMuonAdamW, in gloo worlds of 2 to 4 ranks, against MuonAdamW on the whole parameters."""

import os

import pytest
import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from nanomuon.optim import DistMuonAdamW, MuonAdamW
from tests.test_optim_dist import assert_close, assert_same_everywhere, build, mean_gradient
from tests.worlds import run_world


@pytest.fixture(autouse=True, scope="module")
def eager():
    """As in the worlds, which do not compile."""
    before = os.environ.get("NANOMUON_COMPILE")
    os.environ["NANOMUON_COMPILE"] = "0"
    yield
    os.environ.pop("NANOMUON_COMPILE") if before is None else os.environ.update(NANOMUON_COMPILE=before)


# matrices that divide, that do not, with fewer rows than ranks; a convolution, experts; AdamW of every size
MODEL = (
    [("muon", s) for s in [(16, 16)] * 5 + [(24, 12), (12, 24), (10, 20), (3, 20), (1, 8), (5, 4), (20, 3)]]
    + [("muon", s) for s in [(8, 3, 3, 3), (5, 12, 8), (2, 8, 10)]]
    + [("adamw", s) for s in [(1019, 3), (3, 7), (15,), (64, 32), (1,)]]
)
ROWS, COLUMNS = [Shard(0)], [Shard(1)]


def mesh_of(group, names):
    """All ranks of the group in a mesh of these dimensions; two dimensions are 2 x 2."""
    if len(names) == 1:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=names)
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)


def cut(tensor, mesh, placements):
    """A DTensor as cut by `placements`; vectors and what Muon has no transport for are cut by rows alone."""
    fits = tensor.ndim in (2,) or all(p.is_replicate() for p in placements)
    if not fits:
        first = 0 if tensor.ndim < 3 else mesh.ndim - 1
        placements = [Shard(0) if axis == first else Replicate() for axis in range(mesh.ndim)]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def train(optimizer, params, model, steps, dtype, start=0, holes=0, mesh=None, placements=None):
    for step in range(start, start + steps):
        for i, (param, (_, shape)) in enumerate(zip(params, model, strict=True)):
            grad = mean_gradient(i, shape, dtype, step, 1, 0)
            none = holes and (i + step) % holes == 0
            param.grad = None if none else cut(grad, mesh, placements) if isinstance(param, DTensor) else grad
        optimizer.step()


def one_process(model, steps, dtype, holes=0, **options):
    params, groups = build(model, dtype, **options)
    optimizer = MuonAdamW(groups)
    train(optimizer, params, model, steps, dtype, holes=holes)
    return [p.detach() for p in params], optimizer.full_state_dict()["state"]


def sharded_model(group, model, names, placements, dtype, options=(), settings=(), seed=0):
    mesh = mesh_of(group, names)
    params, groups = build(model, dtype, seed=seed, **dict(options))
    pieces = {p: torch.nn.Parameter(cut(p.detach(), mesh, placements)) for p in params}
    for each in groups:
        each["params"] = [pieces[p] for p in each["params"]]
    return mesh, list(pieces.values()), DistMuonAdamW(groups, group, **dict(settings))


def full(params):
    return [p.full_tensor().detach().clone() if isinstance(p, DTensor) else p.detach() for p in params]


def many_processes(group, model, names, placements, steps, dtype, holes=0, options=(), settings=()):
    mesh, params, optimizer = sharded_model(group, model, names, placements, dtype, options, settings)
    train(optimizer, params, model, steps, dtype, holes=holes, mesh=mesh, placements=placements)
    return full(params), optimizer.full_state_dict()["state"]


LAYOUTS = {
    "fsdp-2": (2, ("dp",), ROWS),
    "fsdp-3": (3, ("dp",), ROWS),
    "fsdp-4": (4, ("dp",), ROWS),
    "fsdp-columns": (3, ("dp",), COLUMNS),
    "tp-rows": (2, ("tp",), ROWS),
    "tp-rows-uneven": (3, ("tp",), ROWS),
    "tp-columns": (4, ("tp",), COLUMNS),
    "replicated": (2, ("dp",), [Replicate()]),
    "hsdp": (4, ("replicas", "dp"), [Replicate(), Shard(0)]),
    "fsdp-x-tp-rows": (4, ("dp", "tp"), [_StridedShard(0, split_factor=2), Shard(0)]),
    "fsdp-x-tp-columns": (4, ("dp", "tp"), [Shard(0), Shard(1)]),
}


@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 5e-4)], ids=["float64", "float32"])
def test_sharded_is_one_process(where, dtype, tolerance):
    size, names, placements = LAYOUTS[where]
    results = run_world(size, many_processes, MODEL, names, placements, 10, dtype, 5)
    assert_same_everywhere(results)
    assert_close(results[0], one_process(MODEL, 10, dtype, 5), tolerance)
