"""What is measured about a device, by whom, and for how long it holds. The measurements themselves are
replaced.
"""

import argparse
import json
import math
import os
import shutil
import sys

import pytest
import torch

from nanomuon import planning, schedule, sizing
from nanomuon.compilation import choose_compilation
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import Runtime, let_segments_grow
from scripts import base_train
from tests.training import Ranks, losses

CUDA, CPU = (Runtime(torch.device(name), torch.bfloat16) for name in ("cuda", "cpu"))
MODEL = GPTConfig.from_depth(4, 256, 64)


def test_bf16_is_taken_on_a_cpu_that_is_faster_in_it_and_remembered(monkeypatch):
    speedups = iter([1.29, 1.31])
    monkeypatch.setattr(sizing, "cpu_bf16_speedup", lambda: next(speedups))
    cpu = Runtime(torch.device("cpu"), torch.float32)
    assert sizing.choose_dtype("auto", cpu, {}).compute_dtype == torch.float32
    measured = {}
    assert sizing.choose_dtype("auto", cpu, measured).compute_dtype == torch.bfloat16
    measured = json.loads(json.dumps(measured))  # as settings.json keeps it
    assert sizing.choose_dtype("auto", cpu, measured).compute_dtype == torch.bfloat16
    assert next(speedups, "none left") == "none left"
    for name in ("float32", "bfloat16"):  # what is asked for is not measured
        assert sizing.choose_dtype(name, cpu, {}).dtype_name == name
    assert sizing.choose_dtype("auto", CUDA, {}) == CUDA
    assert sizing.choose_dtype("float32", CUDA, {}).compute_dtype == torch.float32


def test_the_speedup_of_bf16_is_none_without_instructions_and_a_ratio_with_them(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, "avx512_bf16": False})
    assert sizing.cpu_bf16_speedup() == 0
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(sizing, "BF16_ROUNDS", 1)
    assert sizing.cpu_bf16_speedup() > 0  # without the instructions a hundredth


def test_windows_are_for_gpus_unless_asked_for():
    """SSSL with a quarter of the context; an explicit pattern counts on any device."""
    for runtime, flags, windows in (
        (CUDA, [], [512, 512, 512, None] * 2),
        (CPU, ["--max-seq-len", "2048"], [None] * 8),
        (CUDA, ["--window-pattern", "L"], [None] * 8),
        (CPU, ["--window-pattern", "SL", "--max-seq-len", "64"], [16, None] * 4),
    ):
        args = base_train.parse_arguments(["--depth", "8", *flags], {})
        config = planning.model_config(args, 256, runtime)
        assert [config.window(layer) for layer in range(8)] == windows


def test_what_was_measured_holds_for_the_same_device_and_layout():
    measured = sizing.recalled({}, "none", 1, CPU)
    measured["device_batch_size"] = 8
    settings = json.loads(json.dumps({"measured": measured}))
    assert sizing.recalled(settings, "none", 1, CPU) == measured
    for other in (
        ("fsdp", 1, CPU),
        ("none", 2, CPU),
        ("none", 1, Runtime(CPU.device, CPU.compute_dtype, 1, 2)),
    ):
        assert "device_batch_size" not in sizing.recalled(settings, *other)


def test_a_row_that_finds_no_room_is_tried_all_the_same(monkeypatch):
    for one_row in (100, math.inf):
        assert schedule.rows_that_fit(64, one_row, math.inf, 10**9) == 1

    def no_room(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sizing.parallel, "build_model", no_room)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    assert sizing.probe_memory(MODEL, 1, CUDA) == math.inf


@pytest.mark.parametrize(
    "capacity,eager,compiled,trials",
    [(150, 8, 16, [16, 32]), (120, 8, 8, [16]), (1000, 64, 64, [])],
)
def test_rows_are_those_that_fit_as_they_will_run(monkeypatch, capacity, eager, compiled, trials):
    """By a stand-in: a row takes 10 bytes eagerly, 7 compiled, and the optimizer nothing."""
    tried = []

    def peak(config, rows, runtime, compiled=False):
        if compiled:
            tried.append(rows)
        return 7 * rows if compiled else 10 * rows

    nothing = dict.fromkeys(("weights", "gradients", "state", "buffers", "activations", "logits"), 0)
    monkeypatch.setattr(sizing.footprint, "memory_by_kind", lambda *_: nothing)
    monkeypatch.setattr(sizing, "probe_memory", peak)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (capacity, capacity))
    for compiles, expected in (("0", eager), ("1", compiled)):
        monkeypatch.setenv("NANOMUON_COMPILE", compiles)
        assert sizing.device_batch_size(MODEL, 64, False, 1, CUDA) == expected
    assert tried == trials


def test_what_is_probed_is_the_model_that_runs(monkeypatch):
    """On a CPU, with stand-ins for the compiler and for what counts a GPU's memory. As in all micro-steps but
    the first, gradients are there when a forward pass begins.
    """
    compiled, forwards = [], []
    monkeypatch.setattr(torch, "compile", lambda model, **_: compiled.append(model) or model)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: forwards.clear())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: len(forwards))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    forward = GPT.forward

    def noted(model, tokens, targets):
        with_gradients = all(parameter.grad is not None for parameter in model.parameters())
        forwards.append((tokens.shape, with_gradients))
        return forward(model, tokens, targets)

    monkeypatch.setattr(GPT, "forward", noted)
    for compiles in (False, True):
        compiled.clear()
        assert sizing.probe_memory(MODEL, 3, CPU, compiles) == 1
        assert forwards == [((3, MODEL.seq_len), True)] and len(compiled) == compiles


def test_cuda_compiles_at_once_and_a_cpu_decides_later(monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "")  # so that it is put back
    for device_type, flag, environment, expected in (
        ("cuda", None, None, True),
        ("cpu", None, None, None),
        ("cuda", False, None, False),
        ("cuda", None, "0", False),
    ):
        monkeypatch.delenv("NANOMUON_COMPILE")
        if environment is not None:
            monkeypatch.setenv("NANOMUON_COMPILE", environment)
        args = argparse.Namespace(compile=flag, deterministic=False)
        choose_compilation(args, device_type)
        assert args.compile is expected
        assert os.environ["NANOMUON_COMPILE"] == ("1" if expected else "0")


def test_the_allocator_gets_segments_that_grow_unless_the_user_has_set_it(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys, "platform", "linux")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
    for theirs in (None, *names):
        for name in names:
            os.environ.pop(name, None)
        if theirs:
            monkeypatch.setenv(theirs, "max_split_size_mb:64")
        let_segments_grow()
        found = {name: os.environ[name] for name in names if name in os.environ}
        expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        assert found == ({theirs: "max_split_size_mb:64"} if theirs else expected)


FLAGS = "--depth 2 --max-seq-len 32 --vocab-size 300 --eval-every -1 --save-every 4 --eval-tokens 512".split()


@pytest.mark.usefixtures("environment")
def test_rows_chosen_for_one_process_do_not_bind_two(base, tmp_path):
    """16 rows a step: 16 on one process, 8 on each of two."""
    ours = tmp_path / "base"
    shutil.copytree(base / "texts", ours / "texts")
    for steps, processes in ((4, 1), (8, 2)):
        ranks = Ranks(
            ours, "grown", steps, "--total-batch-size", "512", *FLAGS, processes=processes, small=[]
        )
        assert ranks.join() == [0] * processes, ranks.output()
        assert f"{16 // processes} rows x 1 micro-steps" in ranks.output()
    assert len(losses(ours, "grown")) == 8


def test_processes_that_are_no_power_of_two_get_micro_steps_of_one(monkeypatch):
    monkeypatch.setattr(
        sizing, "device_batch_size", lambda config, rows, *_: schedule.rows_that_fit(rows, 1, 2, 10**9)
    )
    six = Runtime(torch.device("cuda"), torch.bfloat16, 0, 6)
    plan = planning.plan_run(base_train.parse_arguments(["--depth", "12"], {}), 32768, six, {})
    assert plan.rows == 32 and plan.batch == 6 * 32 * 2048  # 2^19 tokens asked for, 393,216 near enough
