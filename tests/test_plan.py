"""The size of a run, from its flags: model, batch, length, micro-batch, and whether it compiles."""

import os
from dataclasses import asdict

import pytest
import torch

from nanomuon import plan
from nanomuon.runtime import Runtime
from nanomuon.settings import Settings
from scripts import base_train
from tests.mistakes import refused

CPU, FOUR = (Runtime(torch.device("cpu"), torch.float32, 0, ranks) for ranks in (1, 4))
CUDA = Runtime(torch.device("cuda"), torch.bfloat16)
SHAPE = "--depth 2 --max-seq-len 32 --device-batch-size 2"


def parsed(flags):
    return base_train.make_parser().parse_args(flags.split())


def planned(flags, runtime=CPU):
    return plan.make_plan(parsed(f"--vocab-size 300 {flags}"), runtime)


def test_micro_steps_and_tokens_follow_from_the_batch():
    flags = f"{SHAPE} --total-batch-size 1024 --num-iterations 7"
    assert (planned(flags).micro_steps, planned(flags).tokens) == (16, 7 * 1024)
    assert planned(flags, FOUR).micro_steps == 4
    halved = planned(flags + " --tensor-parallel 2", FOUR)  # two ranks see the same rows
    assert (halved.micro_steps, halved.data_parallel) == (8, 2)
    with refused("not a multiple of 64 .--device-batch-size 2 x --max-seq-len 32 x 1 processes.: change one"):
        planned(f"{SHAPE} --total-batch-size 1000")


def test_a_resumed_run_keeps_its_rows_in_the_same_layout():
    """They could be too many for others, and its batch must not change."""
    flags = parsed("--vocab-size 300 --depth 2 --max-seq-len 32 --total-batch-size 512")
    two_rows = Settings({}, 2, 4, {}, {}, layout=asdict(plan.Layout(4)))
    sixteen_rows = Settings({}, 16, 4, {}, {}, layout=asdict(plan.Layout(4, tensor_parallel=4)))
    for settings, rows in ((None, 4), (two_rows, 2), (sixteen_rows, 4)):
        assert plan.make_plan(flags, FOUR, settings).rows == rows
    before_layouts_were_recorded = Settings({}, 2, 4, {}, {})
    assert plan.make_plan(flags, FOUR, before_layouts_were_recorded).rows == 2
    assert plan.make_plan(flags, CPU, before_layouts_were_recorded).rows == 16
    three = Runtime(torch.device("cpu"), torch.float32, 0, 3)
    with refused("3 processes.: use a number of processes that divides its 16 rows per step"):
        plan.make_plan(flags, three, two_rows)


@pytest.mark.parametrize(
    "name,tflops",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_the_peak_is_that_of_the_very_card(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert plan.peak_flops(torch.device("cuda")) == (tflops and 1e12 * tflops)


def test_the_length_follows_from_the_depth_or_from_a_compute_budget():
    given = planned("--depth 2")
    model = plan.meta_model(given.config)
    asked = 10.5 * model.multiplied_weights()
    assert given.config.seq_len == 512 and given.batch % (given.rows * 512) == 0
    assert asked - given.batch < given.tokens <= asked
    # The batch follows from the tokens of the budget as from those of a ratio
    paid = planned(f"--depth 2 --target-flops {asked * model.estimate_flops()}")
    assert (paid.batch, paid.steps) == (given.batch, given.steps)
    step = given.batch * model.estimate_flops()  # FLOPs
    assert planned(f"--depth 2 --target-flops {7.999 * step} --total-batch-size {given.batch}").steps == 7
    # The tokens do not depend on the rows that fit
    eight = Runtime(torch.device("cuda"), torch.bfloat16, 0, 8)
    assert len({planned(f"--depth 12 --device-batch-size {rows}", eight).tokens for rows in (1, 4, 16)}) == 1


def test_batch_grows_with_the_run_and_divides_evenly():
    assert plan.total_batch_size(1_200_000_000, 2**15) == 2**19  # the reference point
    assert plan.total_batch_size(12_000_000_000, 2**15) == 2**20  # 10^0.383 = 2.4, nearest power of two
    assert plan.total_batch_size(1_000, 4096) == 4096
    assert plan.total_batch_size(1_200_000_000, 3 * 2**15) % (3 * 2**15) == 0


def test_windows_are_for_flash_attention_unless_asked_for(installed, capsys):
    """The default is then SSSL, with windows of a quarter context. An explicit pattern always counts."""

    def check(device, flags, windows):
        config = plan.model_config(parsed(f"--depth 4 {flags}"), device)
        assert [config.window(layer) for layer in range(4)] == windows

    check("cuda", "", [None] * 4)
    check("cpu", "--window-pattern SL --max-seq-len 64", [16, None] * 2)
    installed("FA3")
    torch.nn.attention.activate_flash_attention_impl("FA3")
    check("cuda", "", [512, 512, 512, None])
    check("cuda", "--window-pattern L", [None] * 4)
    plan.print_plan(planned("--depth 2"), CPU)
    assert "\nattention  FlashAttention 3, window pattern SSSL\n" in capsys.readouterr().out


def test_a_model_that_needs_more_memory_than_there_is(monkeypatch, capsys):
    run = planned("--depth 2")
    plan.warn_if_too_large(run, CPU.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, run.memory))
    plan.warn_if_too_large(run, CUDA.device)
    assert not capsys.readouterr().out
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    plan.warn_if_too_large(run, CPU.device)
    assert capsys.readouterr().out.startswith("warning: a step takes about ")


@pytest.mark.parametrize("runtime, steps, said", [(CPU, 10**5, "minutes"), (FOUR, 10**12, "hours")])
def test_the_time_of_a_run_follows_from_that_of_a_product(monkeypatch, capsys, runtime, steps, said):
    """Ten products of 128 x 128 and 128 x 512 that take 1 ms."""
    monkeypatch.setattr(plan, "timed", lambda work, device: work() or 1.0)
    flags = "--depth 2 --max-seq-len 32 --device-batch-size 4 --total-batch-size 512"
    run = planned(f"{flags} --num-iterations {steps}", runtime)
    plan.print_time(run, runtime)
    speed = 10 * 2 * 128 * 128 * 512 / 1e-3 * runtime.world_size
    seconds = 1.4 * run.tokens * plan.meta_model(run.config).estimate_flops() / speed
    expected = seconds / {"minutes": 60, "hours": 3600}[said]
    assert expected > 10 and f"about {expected:,.0f} {said} for" in capsys.readouterr().out


@pytest.mark.parametrize(
    "runtime,memory,batch,rows",
    [
        (CUDA, 150, 64, 8),  # 16 rows take 160 bytes, and 85% of 150 are available
        (CUDA, 10**6, 24, 8),
        (CUDA, 5, 64, 1),  # the minimum
        (CPU, 0, 24, 8),
    ],
)
def test_rows_are_those_that_fit_into_the_gpu_and_divide_the_batch(monkeypatch, runtime, memory, batch, rows):
    monkeypatch.setattr(plan, "memory_by_kind", lambda config, layout, rows, _: {"weights": 10 * rows})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory / 2, memory))
    flags = f"--depth 2 --max-seq-len 32 --total-batch-size {32 * batch}"
    assert planned(flags, runtime).rows == rows


@pytest.mark.parametrize(
    "device, tokens, environment, compiles",
    [
        ("cuda", 1, "CXX=true", True),
        ("cuda", 1, "NANOMUON_COMPILE=0", False),
        ("cpu", 1_000_000, "CXX=true", True),
        ("cpu", 1_000_000, "PATH=/nowhere", False),
        ("cpu", 1, "NANOMUON_COMPILE=1", True),
        ("cpu", 999_999, "CXX=true", False),
    ],
)
def test_a_run_compiles_if_that_pays(monkeypatch, capsys, device, tokens, environment, compiles):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("NANOMUON_COMPILE", raising=False)
    monkeypatch.setenv(*environment.split("="))
    assert plan.choose_compilation(torch.device(device), tokens) is compiles
    lacks_compiler = "no C++ compiler g++: running eagerly" in capsys.readouterr().out
    assert lacks_compiler == (environment == "PATH=/nowhere")
