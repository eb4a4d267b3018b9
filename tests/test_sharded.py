"""DTensor parameters in DistMuonAdamW, in gloo worlds of 2 to 4 ranks, against MuonAdamW on the whole
parameters.
"""

import functools
import math
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import nanomuon.optim as optim
import nanomuon.sharded as sharded
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.param_groups import build_param_groups
from tests.reference import distance
from tests.test_optim_dist import (
    ADAMW,
    MUON,
    assert_close,
    assert_same_everywhere,
    build,
    mean_gradient,
)
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
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 5e-4)], ids=["float64", "float32"]
)
def test_sharded_is_one_process(where, dtype, tolerance):
    size, names, placements = LAYOUTS[where]
    results = run_world(size, many_processes, MODEL, names, placements, 10, dtype, 5)
    assert_same_everywhere(results)
    assert_close(results[0], one_process(MODEL, 10, dtype, 5), tolerance)


# ---- PyTorch's engines


class Net(nn.Module):
    """Embedding, norm with a weight, an MLP that tensor parallelism cuts by columns and rows, and a head of 3
    rows.
    """

    def __init__(self, dtype):
        super().__init__()
        self.wte, self.norm = nn.Embedding(11, 12), nn.RMSNorm(12)
        self.up, self.down = nn.Linear(12, 32, bias=False), nn.Linear(32, 12, bias=False)
        self.square, self.narrow = nn.Linear(12, 12, bias=False), nn.Linear(12, 3, bias=False)
        generator = torch.Generator().manual_seed(0)
        for param in self.to(dtype).parameters():
            param.data.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, tokens):
        x = self.norm(self.wte(tokens))
        x = x + self.down(torch.tanh(self.up(x)))
        return self.narrow(torch.tanh(self.square(x)))


def net_batch(step, rank, shards, dtype):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (12,), generator=generator)
    targets = torch.randn(12, 3, generator=generator, dtype=torch.float64).to(dtype)
    return tokens[rank::shards], targets[rank::shards]


def train_net(net, optimizer, shards, rank, dtype):
    """Ten steps on 12 rows, of which this data-parallel rank has every shards-th."""
    for step in range(10):
        tokens, targets = net_batch(step, rank, shards, dtype)
        (net(tokens) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def net_groups(net, **options):
    return build_param_groups(
        net,
        muon={**{k: v for k, v in MUON.items() if k != "kind"}, **options},
        adamw={k: v for k, v in ADAMW.items() if k != "kind"},
    )


def engines(group, how, dtype, mode):
    net, mesh, rank, size = Net(dtype), None, dist.get_rank(group), dist.get_world_size(group)
    dp, tp = (2, 2) if how == "both" else (size, 1) if how == "fsdp" else (1, size)
    mesh = mesh_of(group, {"both": ("dp", "tp"), "fsdp": ("dp",), "tp": ("tp",)}[how])
    if tp > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
    if dp > 1:
        for module in (net.up, net.down, net):
            fully_shard(module, mesh=mesh["dp"])
    optimizer = DistMuonAdamW(net_groups(net, tensor_parallel=mode), group)
    train_net(net, optimizer, dp, rank // tp, dtype)
    return full(net.parameters())


@pytest.mark.parametrize(
    "size, how, mode",
    [
        (2, "fsdp", None),
        (3, "fsdp", None),
        (4, "fsdp", None),
        (2, "tp", "duplicated"),
        (2, "tp", "distributed"),
        (4, "tp", None),
        (4, "both", "duplicated"),
        (4, "both", "distributed"),
    ],
)
def test_fully_shard_and_parallelize_module_train_what_one_process_trains(size, how, mode):
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 5e-4)):
        net = Net(dtype)
        start = full(net.parameters())
        start = [p.clone() for p in start]
        train_net(net, MuonAdamW(net_groups(net)), 1, 0, dtype)
        results = run_world(size, engines, how, dtype, mode)
        for params in results:
            for p, q, before in zip(params, net.parameters(), start, strict=True):
                assert distance(p, q) < tolerance < distance(p, before)


# ---- the pipeline


class Watched:
    """Records when transfers are launched and waited for, directions computed, and of which chunk."""

    def __init__(self, optimizer):
        self.optimizer, (self.pipeline,) = optimizer, optimizer.works[:1]
        for index, chunk in enumerate(self.pipeline.chunks):
            for stage in ("collect", "compute", "deliver"):
                setattr(chunk, stage, functools.partial(self.stage, index, stage, getattr(chunk, stage)))

    def stage(self, index, name, run, *arguments):
        self.now, self.flying = index, self.flying + (name == "collect")
        self.most = max(self.most, self.flying)
        result = run(*arguments)
        self.flying -= name == "deliver"
        return result

    def step(self):
        self.events, self.flying, self.most = [], 0, 0
        transfer, direction, adamw = dist.all_to_all_single, optim.muon_direction, optim.adamw_update

        def launch(*args, **options):
            work, chunk = transfer(*args, **options), self.now
            self.events.append(("launch", chunk))
            return SimpleNamespace(wait=lambda: (self.events.append(("wait", chunk)), work.wait()))

        def compute(*args, **options):
            self.events.append(("compute", self.now))
            return direction(*args, **options)

        def elementwise(*args, **options):
            self.events.append(("adamw", None))
            return adamw(*args, **options)

        with (
            mock.patch.object(dist, "all_to_all_single", launch),
            mock.patch.object(optim.Direction, "kernel", staticmethod(compute)),
            mock.patch.object(optim, "adamw_update", elementwise),
        ):
            self.optimizer.step()


CHUNKED = [("adamw", (20, 3)), ("muon", (48, 64)), ("muon", (48, 64))] * 6  # the matrices in one group


def watched(group, chunk_bytes):
    with mock.patch.dict(sharded.CHUNK_BYTES, cpu=chunk_bytes):
        mesh, params, optimizer = sharded_model(group, CHUNKED, ("dp",), ROWS, torch.float32)
        optimizer.plan()
    watched = Watched(optimizer)
    train(watched, params, CHUNKED, 3, torch.float32, mesh=mesh, placements=ROWS)
    return watched.events, watched.most, full(params)


def test_communication_of_a_chunk_runs_under_the_compute_of_the_one_before():
    trained = []
    for matrices_of_an_owner, chunks in ((1, 6), (2, 3), (100, 1)):
        for events, most, params in run_world(2, watched, matrices_of_an_owner * 4 * 48 * 64):
            trained.append(params)
            assert max(chunk for _, chunk in events if chunk is not None) + 1 == chunks
            assert most == min(3, chunks)
            at = {}
            for i, event in enumerate(events):
                at.setdefault(event, []).append(i)
            assert at["launch", 0][0] < at["adamw", None][0] < at["wait", 0][0], "the first is launched early"
            for i in range(chunks - 1):
                assert at["launch", i + 1][0] < at["compute", i][-1] < at["wait", i + 1][0]
                # the delivery of a chunk is waited for after the next one is computed
                assert at["launch", i][1] < at["compute", i + 1][0] < at["wait", i][1]
    assert all(torch.equal(p, q) for params in trained for p, q in zip(params, trained[0], strict=True))


# ---- fused matrices

SPLITS = [
    # (split, rows of each part), of 48 rows
    (("qkv", (4, 2, 2)), [[r for r in range(48) if r % 8 in part] for part in (range(4), (4, 5), (6, 7))]),
    ((30, 10, 8), [range(30), range(30, 40), range(40, 48)]),
    (6, [range(8 * head, 8 * head + 8) for head in range(6)]),
]
FUSED = [("muon", (48, 20)), ("muon", (48, 64)), ("muon", (48, 20)), ("adamw", (5,))]


def parts_apart(split, rows, steps, **options):
    """The fused parameters after training the parts as parameters of their own."""
    params, groups = build(FUSED, torch.float64, **options)
    for group in groups:
        if group["kind"] == "muon":
            fused = group["params"]
            group["names"] = [f"{name}.{i}" for name in group["names"] for i in range(len(rows))]
            group["params"] = [nn.Parameter(p[list(part)].detach().clone()) for p in fused for part in rows]
            group["fused"] = fused
    apart = {
        p: group["params"][i * len(rows) :][: len(rows)]
        for group in groups
        if group["kind"] == "muon"
        for i, p in enumerate(group.pop("fused"))
    }
    optimizer = MuonAdamW(groups)
    for step in range(steps):
        for i, (param, (_, shape)) in enumerate(zip(params, FUSED, strict=True)):
            param.grad = mean_gradient(i, shape, torch.float64, step, 1, 0)
            for piece, part in zip(apart.get(param, ()), rows, strict=False):
                piece.grad = param.grad[list(part)]
        optimizer.step()
    for param, pieces in apart.items():
        for piece, part in zip(pieces, rows, strict=True):
            param.data[list(part)] = piece.detach()
    return [p.detach() for p in params]


@pytest.mark.parametrize("split, rows", SPLITS, ids=["qkv", "blocks", "heads"])
@pytest.mark.parametrize(
    "form", [dict(), dict(weight_decay_form="decoupled", beta2=None), dict(scale="match_rms_adamw")]
)
def test_the_parts_of_a_fused_matrix_are_parameters_of_their_own(split, rows, form):
    expected = parts_apart(split, rows, 5, **form)
    one = one_process(FUSED, 5, torch.float64, split=split, **form)
    assert all(distance(p, q) < 1e-12 for p, q in zip(one[0], expected, strict=True))
    for where in ("replicated", "fsdp-3", "tp-rows", "tp-columns", "fsdp-x-tp-rows", "fsdp-x-tp-columns"):
        size, names, placements = LAYOUTS[where]
        results = run_world(
            size, many_processes, FUSED, names, placements, 5, torch.float64, 0, dict(form, split=split)
        )
        assert_same_everywhere(results)
        assert_close(results[0], one, 1e-10)


# ---- tensor parallelism and experts


def blocks_apart(shape, dim, size, steps):
    whole = build([("muon", shape)])[0][0].detach()
    pieces = [nn.Parameter(piece.clone()) for piece in whole.chunk(size, dim)]
    optimizer = MuonAdamW([dict(MUON, lr=0.03, params=pieces)])
    for step in range(steps):
        for piece, grad in zip(
            pieces, mean_gradient(0, shape, torch.float64, step, 1, 0).chunk(size, dim), strict=True
        ):
            piece.grad = grad.clone()
        optimizer.step()
    return torch.cat([p.detach() for p in pieces], dim)


@pytest.mark.parametrize(
    "where, dim, size",
    [("tp-rows", 0, 2), ("tp-columns", 1, 4), ("fsdp-x-tp-rows", 0, 2), ("fsdp-x-tp-columns", 1, 2)],
)
def test_blockwise_orthogonalizes_each_block_alone(where, dim, size):
    for shape in ((24, 12), (12, 24), (16, 16)):
        world, names, placements = LAYOUTS[where]
        model, blockwise = [("muon", shape)], dict(tensor_parallel="blockwise")
        results = run_world(world, many_processes, model, names, placements, 5, torch.float64, 0, blockwise)
        assert_same_everywhere(results)
        assert distance(results[0][0][0], blocks_apart(shape, dim, size, 5)) < 1e-10
        assert distance(results[0][0][0], one_process(model, 5, torch.float64)[0][0]) > 1e-3


@pytest.mark.parametrize(
    "form", [dict(row_equilibrate=True), dict(renormalize=True, beta2=None), dict(ns_steps=7)]
)
def test_options_under_tensor_parallelism(form):
    model = [("muon", s) for s in [(16, 16), (24, 12), (12, 24), (3, 20), (5, 8)]]
    expected = one_process(model, 5, torch.float64, **form)
    for where in ("tp-rows-uneven", "tp-columns", "fsdp-x-tp-columns"):
        size, names, placements = LAYOUTS[where]
        results = run_world(size, many_processes, model, names, placements, 5, torch.float64, 0, form)
        assert_same_everywhere(results)
        assert_close(results[0], expected, 1e-10)


def experts(group, names, placements):
    """Five experts, over 4 ranks: two, two, one and none; and their tensor-parallel matrices."""
    model = [("muon", (5, 12, 8)), ("muon", (5, 8, 24)), ("muon", (12, 12))]
    mesh, params, optimizer = sharded_model(
        group, model, names, [Shard(0)] + [Replicate()] * (len(names) - 1), torch.float64
    )
    pieces = []
    for whole in full(params[:2]):
        pieces.append(nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)))
    groups = [
        dict(g, params=[dict(zip(params[:2], pieces, strict=True)).get(p, p) for p in g["params"]])
        for g in optimizer.param_groups
    ]
    params[:2], optimizer = pieces, DistMuonAdamW(groups, group)
    for step in range(5):
        for i, param in enumerate(params):
            grad = mean_gradient(i, tuple(param.shape), torch.float64, step, 1, 0)
            param.grad = distribute_tensor(grad, mesh, param.placements, src_data_rank=None)
        with mock.patch.object(
            dist, "all_to_all_single", mock.Mock(side_effect=dist.all_to_all_single)
        ) as moved:
            optimizer.step()
        assert moved.call_count == 2  # the 2-D matrix alone
    state = optimizer.full_state_dict()
    optimizer.load_state_dict(state)
    for name, entry in optimizer.full_state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][name][key]) for key, value in entry.items())
    return full(params), state["state"]


@pytest.mark.parametrize(
    "names, placements",
    [
        (("ep",), [Shard(0)]),
        (("ep", "tp"), [Shard(0), Shard(1)]),
        (("ep", "tp"), [Shard(0), Shard(2)]),
        (("dp", "ep"), [_StridedShard(0, split_factor=2), Shard(0)]),  # experts by "ep", each part by FSDP2
    ],
)
def test_sharded_experts_are_replicated_experts_and_send_nothing(names, placements):
    results = run_world(4, experts, names, placements)
    assert_same_everywhere(results)
    model = [("muon", (5, 12, 8)), ("muon", (5, 8, 24)), ("muon", (12, 12))]
    assert_close(results[0], one_process(model, 5, torch.float64), 1e-10)


# ---- what must hold


def with_a_bad_gradient(group, names, placements, value):
    mesh, params, optimizer = sharded_model(group, MODEL, names, placements, torch.float32)
    train(optimizer, params, MODEL, 2, torch.float32, mesh=mesh, placements=placements)
    before = full(params), optimizer.full_state_dict()["state"]
    for i in (0, 12, 15):  # a matrix, a convolution, an AdamW parameter
        for param, (_, shape) in zip(params, MODEL, strict=True):
            param.grad = cut(torch.ones(shape), mesh, placements)
        if params[i].grad.to_local().numel() and dist.get_rank(group) == dist.get_world_size(group) - 1:
            params[i].grad.to_local().view(-1)[-1] = value
        optimizer.step()
    assert optimizer.skipped_steps == 3
    after = full(params), optimizer.full_state_dict()["state"]
    assert all(torch.equal(p, q) for p, q in zip(before[0], after[0], strict=True))
    assert all(torch.equal(v, after[1][n][k]) for n, entry in before[1].items() for k, v in entry.items())


@pytest.mark.parametrize("where", ["fsdp-2", "tp-rows", "fsdp-x-tp-rows"])
def test_a_non_finite_gradient_on_one_rank_changes_nothing_anywhere(where):
    size, names, placements = LAYOUTS[where]
    run_world(size, with_a_bad_gradient, names, placements, math.nan)
    run_world(size, with_a_bad_gradient, names, placements, math.inf)


def half_way(group, where, state, params, settings=()):
    """Three more steps from a whole state in this layout; returns what three more would need."""
    _, names, placements = where
    mesh, mine, optimizer = sharded_model(
        group, MODEL, names, placements, torch.float64, settings=settings, seed=3
    )
    for p, q in zip(mine, params, strict=True):
        p.data.copy_(cut(q, mesh, placements))
    optimizer.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())  # a local state fits its own layout
    train(optimizer, mine, MODEL, 3, torch.float64, start=state["step"], mesh=mesh, placements=placements)
    return full(mine), {**optimizer.full_state_dict(), "step": state["step"] + 3}


def test_state_moves_between_layouts():
    params, groups = build(MODEL)
    optimizer = MuonAdamW(groups)
    state, result = {**optimizer.full_state_dict(), "step": 0}, [p.detach() for p in params]
    route = [
        "fsdp-3",
        "replicated",
        "fsdp-x-tp-rows",
        "tp-rows-uneven",
        "fsdp-x-tp-columns",
        "fsdp-columns",
        "hsdp",
    ]
    for where in route:
        size = LAYOUTS[where][0]
        result, state = run_world(size, half_way, LAYOUTS[where], state, result)[0]
    train(optimizer, params, MODEL, 3 * len(route), torch.float64)
    expected = [p.detach() for p in params], optimizer.full_state_dict()["state"]
    assert_close((result, state["state"]), expected, 1e-9)


def without_elements(group):
    model = [("muon", (16, 8)), ("muon", (0, 8))]
    mesh, params, optimizer = sharded_model(group, model, ("dp",), ROWS, torch.float64)
    train(optimizer, params, model, 3, torch.float64, mesh=mesh, placements=ROWS)
    return full(params), optimizer.full_state_dict()["state"]


def test_a_matrix_without_elements_is_left_alone():
    model = [("muon", (16, 8)), ("muon", (0, 8))]
    assert_close(run_world(2, without_elements)[0], one_process(model, 3, torch.float64), 1e-10)


def on_disk(group, folder, where, save):
    _, names, placements = where
    mesh, params, optimizer = sharded_model(group, MODEL, names, placements, torch.float64, seed=7)
    if save:
        train(optimizer, params, MODEL, 2, torch.float64, mesh=mesh, placements=placements)
    state = optimizer.named_state_dict()
    flat = {f"{name}/{key}": value for name, entry in state["state"].items() for key, value in entry.items()}
    if save:
        dcp.save(flat, checkpoint_id=folder, process_group=group)
    else:
        dcp.load(flat, checkpoint_id=folder, process_group=group)
        optimizer.load_state_dict(state)
    return optimizer.full_state_dict()["state"]


def test_a_local_state_goes_through_torchs_checkpoints(tmp_path):
    for source in ("fsdp-x-tp-rows", "fsdp-3", "tp-columns"):
        saved = run_world(LAYOUTS[source][0], on_disk, tmp_path / source, LAYOUTS[source], True)[0]
        for target in ("fsdp-x-tp-columns", "fsdp-2", "replicated"):
            loaded = run_world(LAYOUTS[target][0], on_disk, tmp_path / source, LAYOUTS[target], False)[0]
            assert all(torch.equal(v, loaded[n][k]) for n, entry in saved.items() for k, v in entry.items())


def in_bf16(group):
    settings = dict(comm_dtype=torch.bfloat16)
    model = [("muon", (24, 12))] * 3 + [("adamw", (64, 32))]
    mesh, params, optimizer = sharded_model(group, model, ("dp",), ROWS, torch.float32, settings=settings)
    sent, transfer = [], dist.all_to_all_single

    def recorded(out, send, *args, **options):
        sent.append(send.dtype)
        return transfer(out, send, *args, **options)

    with mock.patch.object(dist, "all_to_all_single", recorded):
        train(optimizer, params, model, 3, torch.float32, mesh=mesh, placements=ROWS)
    assert set(sent) == {torch.bfloat16}
    return full(params)


def test_shards_travel_in_comm_dtype():
    model = [("muon", (24, 12))] * 3 + [("adamw", (64, 32))]
    expected = one_process(model, 3, torch.float32)[0]
    for params in run_world(2, in_bf16):
        assert all(distance(p, q) < 0.02 for p, q in zip(params, expected, strict=True))


def partial_sums(group):
    """Gradients that tensor parallelism left as partial sums, or whole on every rank."""
    mesh, size = mesh_of(group, ("tp",)), dist.get_world_size(group)
    _, params, optimizer = sharded_model(group, FUSED, ("tp",), ROWS, torch.float64)
    for step in range(3):
        for i, (param, (_, shape)) in enumerate(zip(params, FUSED, strict=True)):
            grad = mean_gradient(i, shape, torch.float64, step, 1, 0)
            whole = DTensor.from_local(grad, mesh, [Replicate()])
            param.grad = DTensor.from_local(grad / size, mesh, [Partial()]) if i % 2 else whole
        optimizer.step()
    return full(params)


def test_gradients_that_are_placed_otherwise():
    expected = one_process(FUSED, 3, torch.float64)[0]
    for params in run_world(3, partial_sums):
        assert all(distance(p, q) < 1e-10 for p, q in zip(params, expected, strict=True))


def beside_plain_ones(group, own_group):
    """FSDP2 and plain parameters in one model; the plain ones' gradients are each rank's own, and averaged
    here. own_group: whether the optimizer has another process group than FSDP2.
    """
    net, rank, size = Net(torch.float64), dist.get_rank(group), dist.get_world_size(group)
    fully_shard(net.up, mesh=mesh_of(group, ("dp",)))
    fully_shard(net.square, mesh=mesh_of(group, ("dp",)))
    if own_group:
        group = dist.new_group()  # of all ranks that the tests have
    optimizer = DistMuonAdamW(net_groups(net), group)
    for step in range(10):
        tokens, targets = net_batch(step, rank, size, torch.float64)
        (net(tokens) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(optimizer.works[0], sharded.Pipeline), "its first transfer runs during the others"
    return full(net.parameters())


@pytest.mark.parametrize("size, own_group", [(4, True), (3, False)])
def test_sharded_and_plain_parameters_in_one_model(size, own_group):
    net = Net(torch.float64)
    train_net(net, MuonAdamW(net_groups(net)), 1, 0, torch.float64)
    for params in run_world(size, beside_plain_ones, own_group):
        assert all(distance(p, q) < 1e-9 for p, q in zip(params, net.parameters(), strict=True))


def unused_on_rank_1(group):
    """FSDP2 around a matrix, and beside it one that rank 1 does not use in every second step."""
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    first, plain, last = (nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(3))
    for layer in (first, last):
        fully_shard(layer, mesh=mesh_of(group, ("dp",)))
    model = nn.Sequential(first, plain, last)
    params = list(model.parameters())
    optimizer = DistMuonAdamW([dict(MUON, params=params, names=["first", "plain", "last"])], group)
    for step in range(6):
        x = first(torch.ones(2, 8, dtype=torch.float64))
        if rank == 0 or step % 2 == 0:
            x = plain(x)
        last(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return full(params)


def test_a_plain_parameter_that_one_rank_does_not_use_beside_fsdp2():
    """Its transfers changed places with those of FSDP2 on the same process group, and both ranks hung."""
    first, second = run_world(2, unused_on_rank_1)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def of_three_dtypes(group):
    """Matrices of three dtypes in one group, in pieces, and what one process makes of them."""
    trained = []
    for mesh in (None, mesh_of(group, ("dp",))):
        params = []
        for i, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16)):
            whole = mean_gradient(i, (12, 8), torch.float64, 99, 1, 0).to(dtype)
            params.append(torch.nn.Parameter(cut(whole, mesh, ROWS) if mesh else whole))
        optimizer = DistMuonAdamW([dict(MUON, params=params)], group) if mesh else None
        optimizer = optimizer or MuonAdamW([dict(MUON, params=params)])
        for step in range(3):
            for i, param in enumerate(params):
                grad = mean_gradient(i, (12, 8), torch.float64, step, 1, 0).to(param.dtype)
                param.grad = cut(grad, mesh, ROWS) if mesh else grad
            optimizer.step()
        trained.append(full(params))
    return trained


def test_matrices_in_pieces_of_different_dtypes():
    for one_process, pieces in run_world(3, of_three_dtypes):
        for p, q, tolerance in zip(pieces, one_process, (1e-5, 1e-9, 1e-2), strict=True):
            assert p.dtype == q.dtype and distance(p, q) < tolerance


def compiled(group, placements, mode):
    os.environ["NANOMUON_COMPILE"] = "1"
    try:
        with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
            model = [("muon", (48, 32))] * 2 + [("adamw", (64, 40))]
            names, options = (
                (("tp",) if mode else ("dp",)),
                dict(split=("qkv", (8, 4, 4)), tensor_parallel=mode),
            )
            return many_processes(group, model, names, placements, 2, torch.float32, 0, options)
    finally:
        os.environ["NANOMUON_COMPILE"] = "0"


def test_compiled():
    expected = one_process(
        [("muon", (48, 32))] * 2 + [("adamw", (64, 40))], 2, torch.float32, split=("qkv", (8, 4, 4))
    )
    for placements, mode in ((ROWS, None), (COLUMNS, "duplicated")):
        for result in run_world(2, compiled, placements, mode):
            assert_close(result, expected, 5e-4)


def refused(group):
    def construct(shape, names, placements, single=False, **options):
        mesh = mesh_of(group, names)
        param = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, placements))
        with pytest.raises(ValueError) as error:
            groups = [dict(MUON, params=[param], names=["w"], **options)]
            optimizer = MuonAdamW(groups) if single else DistMuonAdamW(groups, group)
            optimizer.plan()
        return str(error.value)

    both = ("dp", "tp")
    return [
        construct((8, 8), both, [Shard(0), Shard(0)]),
        construct((8, 8), ("a", "b"), [Shard(0), Shard(1)]),
        construct((4, 8, 8), ("dp", "tp"), [Shard(1), Replicate()]),
        construct((9, 8), both, [Shard(1), Shard(0)], tensor_parallel="blockwise"),
        construct((8, 8), both, [Replicate(), Shard(0)], tensor_parallel="blockwise", split=(4, 4)),
        construct((8, 8), both, [Shard(0), Replicate()], single=True),
    ]


def test_what_has_no_transport_is_refused_by_name():
    for errors in run_world(4, refused):
        assert all(error.startswith("w") for error in errors)
        assert "parallelize_module before fully_shard" in errors[0]
        assert all("no transport" in error for error in errors[1:3])
        assert 'has to be called "tp" (mesh_dim_names)' in errors[1]
        assert all("use duplicated" in error for error in errors[3:5])
        assert "DistMuonAdamW" in errors[5]


@pytest.mark.parametrize("split", [0, 7, (10, 20), ("qkv", (3, 2, 2)), ("qkv", ()), (), "qk"])
def test_a_split_that_does_not_divide_is_refused(split):
    with pytest.raises(ValueError, match="split"):
        MuonAdamW([dict(MUON, params=[nn.Parameter(torch.ones(48, 20))], split=split)])


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="tensor_parallel"):
        MuonAdamW([dict(MUON, params=[nn.Parameter(torch.ones(48, 20))], tensor_parallel="both")])
