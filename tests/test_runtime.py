"""The device and its dtype, GPUs that are seen and cannot be used, and how a command ends.

nvidia-smi and what PyTorch says of CUDA are stand-ins.
"""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nanomuon import hf_export, runtime
from nanomuon.command import BUG, run_command
from nanomuon.runtime import InputError, Runtime
from tests.worlds import run_world

ROOT = Path(__file__).parent.parent
NVIDIA_SMI = """#!/bin/sh
echo "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4 |"
"""
FAILS = "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver.'\nexit 9\n"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins for a machine without GPU")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Writes a stand-in, found first on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("NANOMUON_DEVICE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def write(text):
        (tmp_path / "nvidia-smi").write_text(text)
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


@pytest.fixture
def two_gpus(monkeypatch):
    """PyTorch for CUDA 13 on a machine with two GPUs that it cannot use, for the reason that is given."""

    def say(reason, is_available=False):
        def fail():
            raise RuntimeError(reason)

        monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
        monkeypatch.setattr(torch.cuda, "_lazy_init", fail)

    return say


def complaint():
    with pytest.raises(InputError) as caught:
        runtime.start()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@without_gpu
@pytest.mark.parametrize(
    "smi,reason,is_available",
    [
        (NVIDIA_SMI, "The NVIDIA driver is too old (found version 12040).\nPlease update", False),
        (NVIDIA_SMI, "CUDA error: no kernel image is available for execution on the device", True),
        (FAILS, "CUDA unknown error", False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_named_with_what_helps(
    nvidia_smi, two_gpus, smi, reason, is_available
):
    nvidia_smi(smi)
    two_gpus(reason, is_available)
    versions = "NVIDIA-SMI 550.54.15 Driver Version: 550.54.15 CUDA Version: 12.4"
    card = versions if smi is NVIDIA_SMI else "unknown to nvidia-smi"
    line, cause = complaint(), reason.split("\n")[0]
    assert line.startswith(
        f"here is a GPU ({card}), but PyTorch 2.13.0+cu130, built for CUDA 13.0, cannot use"
    )
    for part in (cause, "set NANOMUON_PYTHON to a Python whose", "newer driver", "NANOMUON_DEVICE=cpu"):
        assert part in line


@without_gpu
def test_a_pytorch_without_cuda_does_not_train_on_the_cpu_of_a_gpu_machine(nvidia_smi, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    nvidia_smi(NVIDIA_SMI)
    assert "built for CUDA None" in complaint()
    environment = {**os.environ, "NANOMUON_PYTHON": sys.executable}
    command = ["bash", "speedrun.sh", "--plan"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: here is a GPU (NVIDIA") and result.stderr.count("\n") == 1


@without_gpu
def test_more_processes_than_gpus(nvidia_smi, two_gpus, monkeypatch):
    two_gpus("", is_available=True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert "process 2 of this machine has no GPU: there are 2" in complaint()


@without_gpu
@pytest.mark.parametrize("name,value", [("NANOMUON_DEVICE", "cpu"), ("CUDA_VISIBLE_DEVICES", "")])
def test_who_asks_for_the_cpu_gets_it(nvidia_smi, two_gpus, monkeypatch, name, value):
    two_gpus("")
    monkeypatch.setenv(name, value)
    assert runtime.start().device.type == "cpu"
    monkeypatch.setenv("NANOMUON_DEVICE", "gpu")
    assert "NANOMUON_DEVICE=gpu: it can be cpu" in complaint()


@without_gpu
@pytest.mark.parametrize("text", [FAILS, "no program\n"])
def test_an_nvidia_smi_that_tells_nothing(nvidia_smi, text):
    nvidia_smi(text)
    assert runtime.start().device.type == "cpu"


def test_bf16_is_the_dtype_of_a_device_that_has_instructions_for_it(monkeypatch):
    monkeypatch.setenv("NANOMUON_DEVICE", "cpu")
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"avx512_bf16": has})
        assert runtime.start().compute_dtype == dtype
        assert runtime.start("float32").compute_dtype == torch.float32
        assert runtime.start("bfloat16").compute_dtype == torch.bfloat16


@pytest.mark.parametrize("theirs", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_gets_segments_that_grow_unless_the_user_has_set_it(monkeypatch, theirs):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    if theirs:
        monkeypatch.setenv(theirs, "max_split_size_mb:64")
    runtime.let_segments_grow()
    expected = {theirs: "max_split_size_mb:64"} if theirs else {names[0]: "expandable_segments:True"}
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


# ------------------------------------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize(
    "error,code,said",
    [
        (InputError("no\nsuch thing"), 2, "error: no such thing\n"),
        (OSError(28, "No space left", "/data/x"), 2, "error: [Errno 28] No space left: '/data/x'\n"),
        (OSError(28, "No space left", "BASE/x"), 2, "; NANOMUON_BASE_DIR=/folder/with/room helps\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 2, "error: CUDA out of memory; fewer rows"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ValueError("ours"), BUG, "Traceback (most recent call last):\n"),
    ],
)
def test_what_the_user_can_fix_is_one_line_and_a_bug_a_traceback(error, code, said, capsys, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", "BASE")

    def main():
        raise error

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        run_command(main)
    signal.signal(signal.SIGINT, before)
    message = capsys.readouterr().err
    assert caught.value.code == code and said in message
    assert (message.count("\n") == 1) == (code != BUG)


@pytest.mark.parametrize("how", ["flushed", "left to the end"])
def test_a_pipe_whose_reader_has_ended_is_one_line_and_no_traceback(how, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as caught:
            run_command(lambda: print("a sample", flush=how == "flushed"))
    # Closing `output` writes what is left of it, as the end of the process does: to nowhere, without an error
    assert caught.value.code == 2 and capfd.readouterr().err == "error: [Errno 32] Broken pipe\n"


def test_ctrl_c_while_pytorch_is_imported_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command, pipes = [sys.executable, "-m", "scripts.sample"], dict(stdout=-1, stderr=-1)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    assert process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"", b"interrupted\n") and process.returncode == 130


FAILURES = {  # kind: (exit code of the rank that fails, what the user sees, once)
    "input": (2, "error: no such thing: bring one\n"),
    "bug": (BUG, "AssertionError: this cannot be\n"),
}


@pytest.mark.parametrize(
    "kind,place",
    [
        ("input", "alone"),
        pytest.param("bug", "alone", marks=pytest.mark.slow),
        pytest.param("input", "together", marks=pytest.mark.slow),
        pytest.param("bug", "together", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_ends_the_launch_with_one_message(kind, place):
    code, message = FAILURES[kind]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "tests.failing_rank", kind, place]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    ended = time.time()
    said, report = result.stderr.split("tests.failing_rank FAILED")
    assert result.returncode == 1 and said.count(message) == 1
    assert "by peer" not in said  # the other rank loses its connection, which is nothing to tell of
    # The traceback shows where it happened, also if the error came to all ranks
    assert ("in work_of\n    raise ERRORS[kind]\n" in said) == (kind == "bug")
    codes = dict(re.findall(r"rank      : (\d) .*\n  exitcode  : (-?\d+) ", report))
    assert codes["1"] == str(code)
    if place == "alone":  # the other one loses its connection, unless torchrun's signal comes first
        assert codes["0"] in (str(BUG), str(-signal.SIGTERM))
    else:
        assert codes["0"] == str(code)
    assert ended - float(result.stdout.split()[-1]) < 15


def patience(group, folder):
    """How long ranks wait for the first one: at the work of first_rank_first and of the exported model."""
    timeouts, together = [], runtime.together

    def noted(work, group=None):
        backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
        timeouts.append(backend.options._timeout)
        return together(work, group)

    with pytest.MonkeyPatch.context() as patch:
        for module in (runtime, hf_export):
            patch.setattr(module, "together", noted)
        here = Runtime(torch.device("cuda"), torch.bfloat16, dist.get_rank(), dist.get_world_size())
        assert runtime.first_rank_first(lambda: "found", here) == "found"
        hf_export.write_weights(folder, torch.nn.Linear(1, 1))
    return timeouts


def test_ranks_wait_for_hours_while_only_the_first_one_works(tmp_path):
    """NCCL alone would end the run after 10 minutes."""
    for timeouts in run_world(4, patience, tmp_path):
        assert len(timeouts) == 2 and min(timeouts) > timedelta(hours=10)
