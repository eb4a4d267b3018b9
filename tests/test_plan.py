"""The size of a run, from its flags: model, batch, length, micro-batch, and whether it compiles."""

import math

import pytest
import torch

from nanomuon import plan
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import InputError, Runtime
from scripts import base_train
from tests.training import Ranks, arguments, losses

CPU, FOUR = (Runtime(torch.device("cpu"), torch.float32, 0, ranks) for ranks in (1, 4))
CUDA = Runtime(torch.device("cuda"), torch.bfloat16)
SHAPE = "--depth 2 --max-seq-len 32 --device-batch-size 2"


def parsed(flags):
    return base_train.make_parser().parse_args(flags.split())


def planned(flags, runtime=CPU, rows=None):
    return plan.make_plan(parsed(flags), 300, runtime, rows)


def test_micro_steps_and_tokens_follow_from_the_batch():
    flags = f"{SHAPE} --total-batch-size 1024 --num-iterations 7"
    assert (planned(flags).micro_steps, planned(flags).tokens) == (16, 7 * 1024)
    assert planned(flags, FOUR).micro_steps == 4
    halved = planned(flags + " --tensor-parallel 2", FOUR)  # two ranks see the same rows
    assert (halved.micro_steps, halved.data_parallel) == (8, 2)


def test_what_is_not_given_follows_from_the_depth():
    given = planned("--depth 2")
    assert given.config.seq_len == 256 and given.config.depth == 2
    asked = 10.5 * plan.meta_model(given.config).multiplied_weights()
    assert given.batch % (given.rows * 256) == 0 and asked - given.batch < given.tokens <= asked


def test_a_compute_budget_decides_the_length():
    step = 1024 * plan.meta_model(planned(SHAPE).config).estimate_flops()  # FLOPs
    for steps in (7, 7.999):
        budget = f"{SHAPE} --total-batch-size 1024 --target-flops {steps * step}"
        assert (planned(budget).steps, planned(budget).batch) == (7, 1024)
    # The batch follows from the tokens of the budget as from those of a ratio
    model = plan.meta_model(planned(SHAPE).config)
    tokens = 10.5 * model.multiplied_weights()
    paid = planned(f"{SHAPE} --target-flops {tokens * model.estimate_flops()}")
    assert (paid.batch, paid.steps) == (planned(SHAPE).batch, planned(SHAPE).steps)


def test_batch_grows_with_the_run_and_divides_evenly():
    assert plan.total_batch_size(1_200_000_000, 2**15) == 2**19  # the reference point
    assert plan.total_batch_size(12_000_000_000, 2**15) == 2**20  # 10^0.383 = 2.4, nearest power of two
    assert plan.total_batch_size(1_000, 4096) == 4096
    assert plan.total_batch_size(1_200_000_000, 3 * 2**15) % (3 * 2**15) == 0


def test_a_batch_that_does_not_divide_and_a_model_that_does_not_fit():
    with pytest.raises(InputError, match="not a multiple of 64 .2 rows on every device"):
        planned(f"{SHAPE} --total-batch-size 1000")
    with pytest.raises(InputError, match="--depth 200: the run takes [0-9]{3,} GB .* and this machine has"):
        planned("--depth 200 --num-iterations 1")


def test_windows_are_for_gpus_unless_asked_for():
    """SSSL with a quarter of the context; an explicit pattern counts on any device."""
    for device, flags, windows in (
        ("cuda", "", [512, 512, 512, None] * 2),
        ("cpu", "--max-seq-len 2048", [None] * 8),
        ("cuda", "--window-pattern L", [None] * 8),
        ("cpu", "--window-pattern SL --max-seq-len 64", [16, None] * 4),
    ):
        config = plan.model_config(parsed(f"--depth 8 {flags}"), 256, device)
        assert [config.window(layer) for layer in range(8)] == windows


def rows_by(row_bytes, capacity, monkeypatch, flags="--total-batch-size 2048"):
    """Rows of a micro-step on a GPU of which a row takes so many bytes, of 64 in a step."""
    nothing = dict.fromkeys(("weights", "gradients", "state", "buffers", "activations", "logits"), 0)
    monkeypatch.setattr(plan.footprint, "memory_by_kind", lambda *_: nothing)
    monkeypatch.setattr(plan, "probe_memory", lambda config, rows, runtime: row_bytes * rows)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (capacity, capacity))
    return planned(f"--depth 2 --max-seq-len 32 {flags}", CUDA).rows


def test_rows_are_those_that_fit_into_the_gpu_and_divide_the_batch(monkeypatch):
    assert rows_by(10, 150, monkeypatch) == 8  # 16 rows take 160 bytes, and 85% of 150 are there
    assert rows_by(10, 10**6, monkeypatch) == 64
    assert rows_by(10, 10**6, monkeypatch, "--total-batch-size 768") == 8  # of 24
    for row_bytes in (10**9, math.inf):  # one row is the least there is
        assert rows_by(row_bytes, 100, monkeypatch) == 1


@pytest.mark.parametrize("depth", [12, 20])
def test_the_tokens_of_a_run_do_not_follow_from_the_rows_that_fit(monkeypatch, depth):
    eight = Runtime(torch.device("cuda"), torch.bfloat16, 0, 8)
    assert len({planned(f"--depth {depth}", eight, rows).tokens for rows in (1, 4, 16)}) == 1


def test_what_is_probed_is_a_micro_step_with_gradients(monkeypatch):
    """With stand-ins for what counts a GPU's memory. As in all micro-steps but the first, gradients are there
    when a forward pass begins.
    """
    forwards = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: forwards.clear())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: len(forwards))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    forward, config = GPT.forward, GPTConfig.from_depth(4, 256, 64)

    def noted(model, tokens, targets):
        with_gradients = all(parameter.grad is not None for parameter in model.parameters())
        forwards.append((tokens.shape, with_gradients))
        return forward(model, tokens, targets)

    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GPT, "forward", noted)
    assert plan.probe_memory(config, 3, CPU) == 1 and forwards == [((3, 64), True)]
    monkeypatch.setattr(GPT, "forward", no_room)
    assert plan.probe_memory(config, 3, CPU) == math.inf


@pytest.mark.parametrize(
    "device,flags,environment,seconds,compiles",
    [
        ("cuda", "", None, 1, True),
        ("cpu", "", None, 200, True),  # compiling takes 24 s, and saves a sixth
        ("cpu", "", None, 100, False),
        ("cuda", "--no-compile", None, 1, False),
        ("cpu", "--no-compile", None, 10**6, False),
        ("cuda", "", "0", 1, False),
        ("cpu", "", "1", 1, True),
    ],
)
def test_a_run_compiles_if_that_pays(monkeypatch, device, flags, environment, seconds, compiles):
    monkeypatch.delenv("NANOMUON_COMPILE", raising=False)
    if environment is not None:
        monkeypatch.setenv("NANOMUON_COMPILE", environment)
    monkeypatch.setattr(plan, "missing_compiler", lambda device: None)
    monkeypatch.setattr(plan, "seconds_of", lambda *_: seconds)
    runtime = Runtime(torch.device(device), torch.float32)
    args = parsed(f"{SHAPE} {flags}")
    assert plan.choose_compilation(args, planned(SHAPE), runtime) is compiles


def test_without_a_compiler_a_cpu_stays_eager_and_a_gpu_does_not_begin(
    programs, tmp_path, monkeypatch, capsys
):
    """Triton needs a C compiler and the headers of Python."""
    eager = plan.choose_compilation(parsed(""), planned(SHAPE), CPU)
    assert eager is False and "no C++ compiler g++ (install it" in capsys.readouterr().out

    def refused(missing):
        with pytest.raises(InputError, match=f"^no {missing} .*; --no-compile trains without"):
            plan.choose_compilation(parsed(""), planned(SHAPE), CUDA)

    programs("g++")
    refused("C compiler gcc or clang")
    programs("clang")
    refused(f"{tmp_path}/Python.h")
    (tmp_path / "Python.h").touch()
    assert plan.choose_compilation(parsed(""), planned(SHAPE), CUDA) is True
    monkeypatch.setenv("CC", "icx")
    refused("C compiler icx")


# By name, as nvidia-smi and PyTorch give it: dense TFLOP/s in bf16. None: not known, or other than its model
PEAKS = {
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 80GB HBM2e": None,  # an early H100 PCIe
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H20": 148,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA GB300": 2500,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "A100-SXM4-40GB": 312,  # by drivers of 2020
    "NVIDIA A100X": None,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA A30": 165,
    "NVIDIA A40": 149.7,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 3090 Ti": 80,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 5090 D": None,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "Quadro RTX 6000": None,  # Turing: no bf16
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": None,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 500,
    "Tesla V100-SXM2-32GB": None,  # no bf16
    "Tesla T4": None,
    "AMD Instinct MI300X": None,
}


def test_every_card_has_its_own_peak(monkeypatch):
    found = {}
    for name in PEAKS:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        peak = plan.peak_flops(torch.device("cuda"))
        found[name] = None if peak is None else pytest.approx(peak / 1e12)
    assert found == PEAKS


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A path with nothing on it and a place for Python.h. Returns what puts a program on the path."""
    for name in ("CC", "CXX", "NANOMUON_COMPILE"):
        monkeypatch.setenv(name, "")  # so that it is unset again afterwards, too
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(plan.sysconfig, "get_path", lambda *_: str(tmp_path))

    def make(name):
        program = tmp_path / "bin" / name
        program.touch(0o755)
        return program

    return make


def test_an_unknown_card_has_no_mfu_and_the_plan_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 CNX")
    plan.print_plan(parsed(SHAPE), planned(SHAPE), CUDA)
    assert "not known, nor MFU: this GPU is not in" in capsys.readouterr().out


@pytest.mark.usefixtures("environment")
def test_rows_chosen_for_one_process_do_not_bind_two(base):
    """16 rows a step: 16 on one process, 8 on each of two."""
    flags = "--depth 2 --max-seq-len 32 --vocab-size 300 --eval-every -1 --save-every 4 --eval-tokens 512"
    small = [*flags.split(), "--total-batch-size", "512"]
    for steps, processes in ((4, 1), (8, 2)):
        ranks = Ranks(base, "dealt", steps, processes=processes, small=small)
        assert ranks.join() == [0] * processes, ranks.output()
        assert f"{16 // processes} rows x 1 micro-steps" in ranks.output()
    assert len(losses(base, "dealt")) == 8


@pytest.mark.usefixtures("environment")
def test_a_plan_prints_sizes_and_trains_nothing(base, capsys):
    assert base_train.main(arguments(base, "planned", 7, "--plan")) == 0
    output = capsys.readouterr().out
    assert "7 steps x 256 tokens" in output and "depth 2, width 128" in output and "0.5M parameters" in output
    for rows, chosen in ((64, 16), (24, 8), (5, 1)):
        flags = f"--depth 2 --max-seq-len 32 --vocab-size 300 --plan --total-batch-size {32 * rows}".split()
        assert base_train.main(flags) == 0
        assert f"{chosen} rows x {rows // chosen} micro-steps" in capsys.readouterr().out
    assert not (base / "runs" / "planned").exists()
    assert [plan.duration(seconds) for seconds in (59.6, 200, 7500)] == ["1m00s", "3m20s", "2h05m"]
