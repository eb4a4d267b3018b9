"""The memory that nanomuon.plan computes, against the bytes of real runs."""

import pytest
import torch

from nanomuon import parallel, plan, recipe
from nanomuon.gpt import GPTConfig
from nanomuon.optim import DistMuonAdamW
from nanomuon.optim_state import local
from nanomuon.parallel import build_model
from nanomuon.plan import Layout
from nanomuon.runtime import Runtime
from scripts import plan as plan_script
from tests.worlds import run_world

UNEVEN = GPTConfig(vocab_size=67, seq_len=16, depth=3, width=36, heads=2, kv_heads=2)
GROUPED = GPTConfig(vocab_size=130, seq_len=16, depth=4, width=64, heads=8, kv_heads=4)
CASES = [(UNEVEN, Layout(ranks)) for ranks in (1, 2, 3)]
for fsdp in (False, True):
    CASES += [(GROUPED, Layout(4, fsdp, 4))]
    for config in (UNEVEN, GROUPED):
        CASES += [(config, Layout(4, fsdp, tensor_parallel)) for tensor_parallel in (1, 2)]
ROWS = 3


def nbytes(tensors):
    return sum(local(t).nbytes for t in tensors)


def model_of(config, layout, dtype=torch.float32, device="cpu"):
    mesh = None
    if layout.fsdp or layout.tensor_parallel > 1:
        mesh = parallel.device_mesh("cpu", layout.ranks // layout.tensor_parallel, layout.tensor_parallel)
    runtime = Runtime(torch.device(device), dtype, 0, layout.ranks)
    return build_model(config, runtime, 0, mesh, layout.fsdp)


def held(group, config, layout):
    """Bytes of a rank's weights, gradients and state after a step."""
    model = model_of(config, layout)
    optimizer = DistMuonAdamW(recipe.param_groups(model, batch=4096, steps=300), group)
    tokens = torch.zeros(ROWS, config.seq_len, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
    return {
        "weights": nbytes(model.parameters()),
        "gradients": nbytes(p.grad for p in model.parameters() if p.grad is not None),
        "state": nbytes(t for entry in optimizer.state.values() for t in entry.values()),
    }


@pytest.mark.parametrize("config, layout", CASES, ids=str)
def test_bytes_of_the_rank_that_holds_the_most_are_planned_within_a_twentieth(config, layout):
    found = run_world(layout.ranks, held, config, layout)
    planned = plan.memory_by_kind(config, layout, ROWS, 4)
    for kind in ("weights", "gradients", "state"):
        assert planned[kind] == pytest.approx(max(each[kind] for each in found), rel=0.05), kind


def test_planned_buffers_of_ranks_hold_the_transfers_of_a_step():
    """(1 + 1/W) times the gradients, as docs/optimizer.md says, if there are few activations."""
    config = GPTConfig.from_depth(24, 4096, 16)
    one, two = (plan.memory_by_kind(config, Layout(ranks), 1, 2) for ranks in (1, 2))
    assert two["buffers"] - one["buffers"] == 1.5 * one["gradients"]


def test_the_peak_of_an_h200_is_planned():
    """docs/benchmarks.md: 110.0 GiB, of which 2.4 are what train_bench itself holds for its floor."""
    config = GPTConfig.from_depth(12, 32768, 2048, window_pattern="SSSL")
    planned = plan.memory_by_kind(config, Layout(1), 128, 2)
    assert sum(planned.values()) / 2**30 == pytest.approx(110.0 - 2.4, rel=0.03)


def saved_bytes(group, config, layout, dtype):
    """Bytes that a forward pass saves, without the parameters, each storage counted once."""
    device = "cuda" if dtype == torch.bfloat16 else "cpu"
    model = model_of(config, layout, dtype, device)
    own = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    tokens = torch.zeros(ROWS, config.seq_len, dtype=torch.int64, device=device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [dict(), dict(kv_heads=1), dict(qk_norm=False), dict(vocab_size=4000)], ids=str
)
def test_planned_activations_are_those_that_a_forward_saves(shape, dtype):
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("CPUs compute in float32")
    config = GPTConfig.from_depth(**{**dict(depth=4, vocab_size=500, seq_len=128), **shape})
    expected = plan.activations(config, Layout(1), ROWS * 128, dtype.itemsize)
    assert saved_bytes(None, config, Layout(1), dtype) == pytest.approx(expected, rel=0.1)


def test_planned_activations_of_a_tensor_parallel_rank():
    config, layout = GPTConfig.from_depth(4, 500, 128, heads=4, kv_heads=4), Layout(4, False, 4)
    expected = plan.activations(config, layout, ROWS * 128, 4)
    assert run_world(4, saved_bytes, config, layout, torch.float32) == [pytest.approx(expected, rel=0.1)] * 4


def plan_rows(capsys, flags):
    """{layout: {column: cell}} of the table that scripts.plan prints."""
    plan_script.main(flags.split())
    header, _, *rows = [
        line.strip("| ").split("|") for line in capsys.readouterr().out.splitlines() if "|" in line
    ]
    columns = [name.strip() for name in header]
    return {row[0].strip(): dict(zip(columns, map(str.strip, row), strict=True)) for row in rows}


def test_plan_compares_layouts(capsys):
    rows = plan_rows(capsys, "--depth 12 --gpus 16")
    replicated, fsdp = rows["replicated"], rows["FSDP2"]
    assert float(fsdp["weights"]) == pytest.approx(float(replicated["weights"]) / 16, abs=0.006)
    assert replicated["fits"] == "yes"
    small = plan_rows(capsys, "--depth 12 --gpus 16 --shard fsdp --gpu-memory 4")
    assert list(small) == ["FSDP2"] and int(small["FSDP2"]["rows"]) < int(fsdp["rows"])
    assert plan_rows(capsys, "--depth 64 --gpus 1 --shard none --gpu-memory 8")["replicated"]["fits"] == "no"
