"""What a step does on a GPU, from CUDA tensors that are faked (cuda_trace.py), in every form of training.

The traces of the quick tests are made in one process, which compiles once what they share. Bytes are compared
with what `scripts.plan` says, which counts the transfers of its own plan.
"""

import collections
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanomuon import footprint
from nanomuon.gpt import GPTConfig
from tests.cuda_trace import MICRO_STEPS, ROWS, SEQ_LEN, VOCABULARY, like_larger_models, sent_early

ROOT = Path(__file__).parent.parent
# FORM:WORLD:RANK[:DEPTH]
STEPS = [
    "replicated:8:0",
    "experts:8:0",
    "qk-clip:8:0",
    "fsdp:8:0",
    "tensor-parallel:8:0",
    "fsdp-tensor-parallel:8:0",
    "replicated:1024:1023",
]
OPTIMIZER = ["optimizer:1:0", "optimizer:8:0", "optimizer:1024:1023"]
SLOW = [
    "replicated:1024:0",
    "fsdp:1024:0",
    "fsdp:1024:1023",
    "replicated:64:31",
    "experts:64:31",
    "fsdp:64:31",
    "fsdp:1024:512",
    "tensor-parallel:64:33",
    "fsdp-tensor-parallel:64:1",
    "replicated:8:0:24",
    "fsdp:8:0:24",
    "fp8:8:0",
]
COMPUTE_BYTES = 2  # of bfloat16
LAYOUTS = {
    "fsdp": {"fsdp": True},
    "tensor-parallel": {"tensor_parallel": 2},
    "fsdp-tensor-parallel": {"fsdp": True, "tensor_parallel": 2},
}
# Operations outside of compiled graphs, and calls of these, in a step at depth 2
MOST = {
    "replicated": (130, 30),
    "experts": (320, 40),
    "qk-clip": (240, 30),
    "fsdp": (430, 40),
    "tensor-parallel": (670, 40),
    "fsdp-tensor-parallel": (610, 40),
}
# Where the host waits for the device in a step
WAITS = [("base_train.train", "read")]


def traced(cases):
    """{case: what cuda_trace.py found}."""
    command = [sys.executable, "-m", "tests.cuda_trace", "--json", *cases]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    if result.returncode == 3:
        pytest.skip(f"this PyTorch takes no faked CUDA tensors: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    return {found["case"]: found for found in map(json.loads, result.stdout.splitlines())}


@pytest.fixture(scope="module")
def traces():
    return traced(STEPS + OPTIMIZER)


@functools.cache
def traced_alone(case):
    """In a process of its own: torch keeps the groups of earlier imagined worlds."""
    return traced([case])[case]


def check_step(found):
    assert "error" not in found, found["error"]
    check_waits(found)
    check_places(found)
    check_bytes(found)


def check_waits(found):
    waits = [(wait["asked_by"], wait["reason"]) for wait in found["waits"]]
    assert waits == WAITS


def check_places(found):
    """Everything is sent from device to device, in the dtype that is meant."""
    dtypes = collections.defaultdict(set)
    for collective in found["collectives"]:
        assert collective["device"] == "cuda", collective
        dtypes[part(collective)].add(collective["dtype"])
    form = found["form"]
    # Gradients, parameters and shards in float32; what ranks multiply together in half precision
    assert "float32" in dtypes["optimizer"]
    half = dtypes["optimizer"] - {"float32"}
    assert half <= {"float16", "bfloat16"}  # a rank that owns one matrix needs one of them
    assert bool(half) == ("tensor-parallel" in form)
    # FSDP2 gathers blocks as they compute, embeddings and head in float32, and reduces in float32
    # Tensor parallelism sends activations in bfloat16, and the gradients of what is cut
    if form.startswith("fsdp") or form == "tensor-parallel":
        assert dtypes["model"] == {"bfloat16", "float32"}
    else:
        assert dtypes["model"] == set()
    assert dtypes["guards.agree"] == {"float32"}
    assert dtypes["moe.balance_"] == ({"int64"} if form == "experts" else set())
    assert dtypes["qk_clip.clip_"] == ({"float32"} if form == "qk-clip" else set())


def part(collective):
    """Who sends it: "optimizer", "model", or a function of the loop, of a few numbers."""
    module = collective["asked_by"].split(".")[0]
    if module == "optim":
        return "optimizer"
    if module in ("gpt", "base_train", "parallel"):  # forward, backward, the mean of gradients after it
        return "model"
    return collective["asked_by"]


def check_bytes(found):
    config = GPTConfig.from_depth(
        found["depth"], VOCABULARY, SEQ_LEN, experts=4 if found["form"] == "experts" else 0
    )
    config = like_larger_models(config)
    layout = footprint.Layout(found["world"], **LAYOUTS.get(found["form"], {}), ns_dtype=torch.bfloat16)
    plan = footprint.RankPlan(config, layout, found["rank"])
    plan.step()
    sent = collections.defaultdict(list)
    for collective in found["collectives"]:
        sent[part(collective)].append(collective["sent"])
    # What sends nothing does not count: a world of one does not communicate, a rank may own nothing
    traced = [size for size in sent["optimizer"] if size]
    planned = [size for size in plan.sent if size]
    assert sorted(traced) == pytest.approx(sorted(planned))
    if found["form"] != "optimizer":
        assert sum(sent["model"]) == pytest.approx(planned_of_the_model(config, layout))
        # and what it leaves out is next to nothing
        left_out = sum(map(sum, sent.values())) - sum(sent["model"]) - sum(sent["optimizer"])
        assert left_out < 1000


@functools.cache
def planned_of_the_model(config, layout):
    """Bytes that a rank sends in a step beside those of the optimizer, the same on all ranks."""
    whole = footprint.traffic(config, layout, ROWS, MICRO_STEPS, COMPUTE_BYTES)["communicated"]
    return whole - max(plan.step()[0] for plan in footprint.rank_plans(config, layout))


@pytest.mark.parametrize("case", STEPS)
def test_a_training_step(traces, case):
    found = traces[case]
    check_step(found)
    operations, compiled_calls = MOST[found["form"]]
    assert found["operations"] <= operations
    assert 0 < found["compiled_calls"] <= compiled_calls
    assert found["from_host"] <= 2  # hyperparameters; what is asked of all ranks


@pytest.mark.parametrize("case", OPTIMIZER)
def test_a_step_of_the_optimizer_at_depth_24_is_few_operations(traces, case):
    """Of 196 parameters: 144 matrices, 14 tables of 32,768 rows, and 38 small vectors."""
    found = traces[case]
    assert "error" not in found, found["error"]
    check_bytes(found)
    assert found["waits"] == []
    assert found["operations"] + found["compiled_calls"] <= 400
    assert found["from_host"] == 1
    # Where there are more than twice as many ranks as matrices, each matrix travels by itself
    expected = {1: 0, 8: 2 * 14 + 2 * (3 + 4) + 2, 1024: 2 * 14 + 2 * 144 + 2}
    assert len(found["collectives"]) == expected[found["world"]]


@pytest.mark.parametrize("case", ["replicated:8:0", "experts:8:0", "qk-clip:8:0"])
def test_gradients_leave_while_the_compiled_backward_goes_on(traces, case):
    assert sent_early(traces[case]) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_a_training_step_of_other_ranks_and_depths(case):
    if case.startswith("fp8"):
        pytest.importorskip("torchao")
    check_step(traced_alone(case))


@pytest.mark.slow
def test_most_gradients_leave_while_the_compiled_backward_goes_on_at_depth_24():
    found = traced_alone("replicated:8:0:24")
    assert sent_early(found) > 0.7  # the last graph has the token embedding and the first layers
    # The head's gradient, the first, leaves when that graph is done
    in_last_micro_step = found["backwards"] - found["backwards"] // MICRO_STEPS
    assert found["collectives"][0]["backwards"] == in_last_micro_step + 1
