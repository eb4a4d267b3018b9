"""The step benchmark: its parts make up the step."""

import json
import subprocess
import sys

import pytest
import torch

from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import InputError, Runtime
from scripts import base_train, optim_bench, train_bench
from tests.training import arguments


def test_the_table_of_a_step(base, environment, tmp_path, capsys):
    """Parts and floor of a small run, and the file with the numbers."""
    file = tmp_path / "step.json"
    train_bench.main([*arguments(base, "bench", 5), "--rounds", "2", "--json", str(file)])
    result = json.loads(file.read_text())
    table = result["milliseconds"]
    parts = ("data", "forward", "backward", "optimizer")
    assert all(table[part]["low"] <= table[part]["median"] <= table[part]["high"] for part in parts)
    assert table["floor"]["median"] > 0 and table["floor"]["times_floor"] == 1
    assert table["whole step"]["median"] >= max(table[part]["median"] for part in parts)
    assert result["tokens"] == 256 and result["peak_memory_mb"] > 0
    assert result["tokens_per_second"] == pytest.approx(256 / (table["whole step"]["median"] / 1e3))
    out = capsys.readouterr().out
    assert "depth 2, 8 x 32 tokens" in out and "tokens/s" in out
    assert not (base / "runs" / "bench").exists()


def test_the_floor_scales_the_time_of_products_to_a_batch(monkeypatch):
    monkeypatch.setattr(optim_bench, "timed", lambda run, device: 10.0)  # milliseconds of ten products
    model = GPT(GPTConfig.from_depth(1, vocab_size=64, seq_len=16))
    flops = 2 * (4 * 16) * 64 * 256  # of the MLP's first product, for 4 rows
    expected = model.estimate_flops() * 256 / flops
    assert train_bench.floor_of(model, batch=256, rows=4)() == pytest.approx(expected)


def test_several_processes_are_refused(base, monkeypatch):
    two = Runtime(torch.device("cpu"), torch.float32, world_size=2)
    monkeypatch.setattr(train_bench, "start", lambda dtype: two)
    with pytest.raises(InputError, match="train_bench measures one process; start it without torchrun"):
        train_bench.main(arguments(base, "bench", 5))


def test_the_flags_of_a_run_are_taken():
    flags = vars(base_train.make_parser().parse_args([]))
    assert flags.keys() <= vars(train_bench.own_parser().parse_args([])).keys()
    args = train_bench.own_parser().parse_args("--depth 2 --save-every -1 --matrix-lr 0.01 --wandb".split())
    assert args.depth == 2
    with pytest.raises(InputError, match="unrecognized arguments: --dpeth 2; see .*train_bench --help"):
        train_bench.own_parser().parse_args(["--dpeth", "2"])


def test_freed_memory_is_used_again():
    script = """
import resource, torch
from nanomuon import runtime
runtime.keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):  # the heap grows a few times until one fits, aligned, into freed memory
    torch.ones(2**22)  # 4,096 pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    # in a process of its own: other tests leave threads behind whose page faults would count
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30 * 4096
