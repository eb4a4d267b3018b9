"""The optimizer's benchmark: its floor counts the products and bytes of a step, and its table adds up."""

import json
import sys
import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanomuon import optim, recipe
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import MuonAdamW
from nanomuon.runtime import InputError
from scripts import optim_bench
from tests.mistakes import refused

PEER = "import torch\n\ndef build(model):\n    return torch.optim.SGD(model.parameters(), lr=0.1)\n"

pytestmark = pytest.mark.usefixtures("environment")


def flops(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_the_floor_has_the_products_of_a_step(monkeypatch):
    """Square matrices iterate in the plain form, others in the Gram form: this model has both, in batches of
    which the last one is smaller.
    """
    model = GPT(GPTConfig.from_depth(3, vocab_size=300, seq_len=32))
    monkeypatch.setitem(optim.BATCH_BYTES, "cpu", 2 * model.blocks[0].mlp.up.weight.nbytes)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer = MuonAdamW(recipe.param_groups(model, batch=4096, steps=300), compile=False)
    assert flops(optim_bench.products(optimizer, "cpu")) == flops(optimizer.step) > 0


def test_the_table_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(optim_bench, "copy_bandwidth", lambda device: 1.0)  # makes the bytes the floor
    peer, file, trace = tmp_path / "peer.py", tmp_path / "step.json", tmp_path / "trace.json"
    peer.write_text(PEER)
    flags = f"--depth 1 --rounds 3 --dtype float32 --peer {peer}:build --json {file} --profile {trace}"
    optim_bench.main(flags.split())
    result = json.loads(file.read_text())
    table = result["milliseconds"]
    assert {"floor", "MuonAdamW compiled", "MuonAdamW eager", f"{peer}:build"} <= table.keys()
    moved = {"muon": 20, "adamw": 28}  # bytes per parameter
    model = GPT(GPTConfig.from_depth(1, vocab_size=8192, seq_len=128))
    groups = recipe.param_groups(model, batch=4096, steps=300)
    expected = sum(moved[group["kind"]] * p.numel() for group in groups for p in group["params"])
    assert table["floor"]["median"] == pytest.approx(1e3 * expected, rel=1e-4)
    names = " ".join(str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"])
    for phase in ("agree", "collect", "compute", "send", "deliver"):
        assert f": {phase} " in names, "the trace shows the phases of a step"
    with refused("/proc/step.json"):  # where nobody can write
        optim_bench.main("--depth 1 --rounds 1 --dtype float32 --profile /proc/step.json".split())


def test_nanochats_optimizer_gets_every_parameter_and_matrices_by_shape(monkeypatch):
    """nanochat's optimizer is a stand-in that stacks them as nanochat's does."""
    peer = types.ModuleType("nanochat.optim")
    peer.MuonAdamW = lambda groups: groups
    monkeypatch.setitem(sys.modules, "nanochat", types.ModuleType("nanochat"))
    monkeypatch.setitem(sys.modules, "nanochat.optim", peer)
    model = GPT(GPTConfig.from_depth(2, vocab_size=300, seq_len=32))
    groups = optim_bench.load_peer("examples/nanochat_optimizer.py:build_optimizer")(model)
    assert {p for group in groups for p in group["params"]} == set(model.parameters())
    for group in groups:
        if group["kind"] == "muon":
            torch.stack(group["params"])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(optim_bench, "usable_gpus", lambda: 1)
    with pytest.raises(InputError, match="--world 2 needs that many GPUs, not 1"):
        optim_bench.main("--world 2".split())


@pytest.mark.slow  # starts two processes
def test_the_distributed_step(tmp_path):
    file = tmp_path / "step.json"
    optim_bench.main(f"--depth 1 --rounds 2 --world 2 --dtype float32 --json {file}".split())
    result = json.loads(file.read_text())
    assert result["world"] == 2 and result["milliseconds"] > 0
