"""Sharded parameters (optim_fsdp.py, optim_tp.py): FSDP2's pipeline, compilation, refusals. test_parallel.py
and test_saving.py train what PyTorch's own engines shard.
"""

import functools
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

import nanomuon.optim_fsdp as optim_fsdp
from nanomuon import optim_tp
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from tests.layouts import (
    COLUMNS,
    COPY,
    FUSED,
    ROWS,
    SPLITS,
    Run,
    assert_close,
    full,
    mesh_of,
    run_layout,
    trained,
)
from tests.reference import MUON, equal, expected
from tests.worlds import run_world

pytestmark = pytest.mark.usefixtures("eager")


# ---- the pipeline

# Experts and twelve matrices, in one group
CHUNKED = [("adamw", (1,)), ("muon", (3, 48, 64)), ("adamw", (2,))]
CHUNKED += [("adamw", (1,)), ("muon", (48, 64)), ("muon", (48, 64))] * 6
EVENTS = []


def watched_direction(U, buffers, ok, hyper):
    EVENTS.append("compute")
    return U.sign(), torch.full_like(ok, 0.1)


def watched(group, layout, matrices_of_an_owner):
    """(transfers in flight at each compute of a step, the most at once, the parameters)"""
    transfer = dist.all_to_all_single

    def launch(*args, **options):
        EVENTS.append("launch")
        work = transfer(*args, **options)
        return mock.Mock(wait=lambda: (EVENTS.append("wait"), work.wait()))

    chunk_bytes = matrices_of_an_owner * 4 * 48 * 64
    with (
        mock.patch.dict(optim_fsdp.CHUNK_BYTES, cpu=chunk_bytes),
        mock.patch.object(dist, "all_to_all_single", launch),
    ):
        run = Run(group, layout, CHUNKED, torch.float32, direction=watched_direction)
        for step in range(4):
            EVENTS.clear()
            run.set_gradients(step)
            run.optimizer.step()
    flying, at_computes, most = 0, [], 0
    for event in EVENTS:
        flying += {"launch": 1, "wait": -1, "compute": 0}[event]
        most = max(most, flying)
        if event == "compute":
            at_computes.append(flying)
    return at_computes, most, full(run.params)


def test_communication_of_a_chunk_runs_under_the_compute_of_the_one_before():
    """The first chunk's runs while the experts compute; its directions return while the next one computes."""
    params_of_all = []
    for matrices_of_an_owner, expected_at_computes in (
        (1, [1, 1, 2, 2, 2, 2, 1]),
        (2, [1, 1, 2, 1]),
        (100, [1, 0]),
    ):
        for at_computes, most, params in run_layout("fsdp-2", watched, matrices_of_an_owner):
            assert at_computes == expected_at_computes
            assert most == min(3, len(at_computes) - 1)
            params_of_all.append(params)
    assert all(equal(params, params_of_all[0]) for params in params_of_all)


# ---- compilation, and what is refused


QKV = ("qkv", (4, 2, 2))


def compiled(group, layout, mode):
    options = dict(split=QKV, tensor_parallel=mode)
    with (
        mock.patch.dict(os.environ, NANOMUON_COMPILE="1"),
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")),
    ):
        return trained(group, layout, 2, FUSED[:1] * 4, torch.float32, None, options)


def test_compiled_steps_follow_the_formulas():
    exact = expected(FUSED[:1] * 4, 2, SPLITS[QKV], torch.float32, split=QKV)
    for layout, mode in (("fsdp-2", None), ("tp-rows", "duplicated")):
        for result in run_layout(layout, compiled, mode):
            assert_close(result, exact, 1e-4)


BOTH = "dp tp"
REFUSED = [  # shape, mesh, placements, options, what the error says
    ((8, 8), BOTH, [ROWS, ROWS], {}, "parallelize_module before fully_shard"),
    ((8, 8), "copies dp tp", [COPY, ROWS, ROWS], {}, "parallelize_module before fully_shard"),
    ((8, 8), "a b", [ROWS, COLUMNS], {}, r'must be called "tp" \(mesh_dim_names\)'),
    ((4, 8, 8), BOTH, [COLUMNS, COPY], {}, "does not support"),
    ((9, 8), BOTH, [COLUMNS, ROWS], dict(tensor_parallel="blockwise"), "use duplicated"),
    ((8, 8), BOTH, [COPY, ROWS], dict(tensor_parallel="blockwise", split=(4, 4)), "use duplicated"),
]


def refused(group):
    for shape, names, placements, options, said in REFUSED:
        param = nn.Parameter(distribute_tensor(torch.ones(shape), mesh_of(group, names), placements))
        groups = [dict(MUON, params=[param], names=["w"], **options)]
        with pytest.raises(ValueError, match=f"^w.*{said}"):
            DistMuonAdamW(groups, group).full_state_dict()
        with pytest.raises(ValueError, match="w is a sharded DTensor: use DistMuonAdamW"):
            MuonAdamW(groups).full_state_dict()


def test_layouts_without_a_transport_are_refused_by_name():
    run_world(4, refused)


@pytest.mark.parametrize(
    "shape, dim, options, mode",
    [  # dim: 1 rows are cut, 2 columns
        ((24, 12), 1, dict(), "distributed"),
        ((12, 24), 2, dict(), "distributed"),
        ((24, 24), 1, dict(), "distributed"),
        ((24, 24), 2, dict(), "distributed"),
        ((24, 12), 2, dict(), "duplicated"),
        ((12, 24), 1, dict(tensor_parallel="distributed"), "duplicated"),
        ((24, 12), 1, dict(tensor_parallel="duplicated"), "duplicated"),
        ((24, 12), 1, dict(split=2), "duplicated"),  # a rank's rows are not those of a part
        ((24, 12), 2, dict(split=2), "distributed"),  # two wide matrices
        ((24, 9), 2, dict(split=("qkv", (4, 2, 2))), "duplicated"),  # the queries have 12 rows
    ],
)
def test_ranks_orthogonalize_together_if_the_long_side_is_cut(shape, dim, options, mode):
    group = dict(split=None, direction=None, tensor_parallel=None) | options
    assert optim_tp.choose_mode(group, shape, dim, world=None) == mode
