"""The device and its dtype, ranks that wait for the first, whole files, JSON of a known form."""

import os
import re
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nanomuon import runtime
from nanomuon.shards import being_written
from tests.mistakes import refused
from tests.training import call
from tests.worlds import FORKS, run_world

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins for a machine without GPU")


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A GPU's device file exists, but PyTorch cannot use the GPU."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(runtime, "GPU_FILES", f"{tmp_path}/nvidia[0-9]*")
    for name in ("NANOMUON_DEVICE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@without_gpu
def test_a_gpu_that_torch_cannot_use_is_one_line_with_advice(gpu, tmp_path):
    target = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    versions = f"PyTorch {torch.__version__}, built for {target}"
    with refused(f"^this machine has a GPU, but {re.escape(versions)}, cannot use it"):
        runtime.start()
    # The speedrun says the same; its Python looks for the file elsewhere
    (tmp_path / "sitecustomize.py").write_text("import glob; glob.glob = lambda files: ['/dev/nvidia0']")
    environment = {"NANOMUON_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    result = call("bash", "speedrun.sh", "--plan", **environment)
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    for advice in (versions, "set NANOMUON_PYTHON to a Python whose PyTorch fits", "NANOMUON_DEVICE=cpu"):
        assert advice in result.stderr


@without_gpu
@pytest.mark.parametrize("name,value", [("NANOMUON_DEVICE", "cpu"), ("CUDA_VISIBLE_DEVICES", "")])
def test_the_cpu_is_used_if_it_is_asked_for(gpu, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert runtime.start().device.type == "cpu"
    monkeypatch.setenv("NANOMUON_DEVICE", "gpu")
    with refused("NANOMUON_DEVICE=gpu: set it to cpu"):
        runtime.start()


def test_whether_to_compile(monkeypatch):
    for value, default, expected in (("0", True, False), ("1", False, True), ("", False, False)):
        monkeypatch.setenv("NANOMUON_COMPILE", value)
        assert runtime.compile_enabled(default) == expected
    monkeypatch.setenv("NANOMUON_COMPILE", "no")
    with refused("NANOMUON_COMPILE=no: set it to 0 or 1"):
        runtime.compile_enabled()


@without_gpu
@pytest.mark.parametrize(
    "variables, gpus, said",
    [
        ("WORLD_SIZE=two RANK=0", 0, "the environment has .*: unset these variables, or start with torchrun"),
        ("WORLD_SIZE=0 RANK=0", 0, "the environment has .*: unset"),
        ("WORLD_SIZE=2", 0, "the environment has .*: unset"),
        ("RANK=1", 0, "the environment has .*: unset"),  # it would train without printing anything
        ("LOCAL_RANK=2", 2, r"process 2 \(from 0\) has no GPU: this machine has 2"),
        ("WORLD_SIZE=2 RANK=1", 2, "LOCAL_RANK, which chooses the GPU, is not set: start with torchrun, or"),
    ],
)
def test_variables_of_torchrun_that_do_not_fit_are_refused(monkeypatch, variables, gpus, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with refused(said):
        runtime.start()


def test_the_dtype_is_bf16_if_the_device_has_instructions_for_it(monkeypatch):
    monkeypatch.setenv("NANOMUON_DEVICE", "cpu")
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"avx512_bf16": has})
        assert runtime.start().compute_dtype == dtype
        assert runtime.start("float32").compute_dtype == torch.float32
        assert runtime.start("bfloat16").compute_dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------------
# Ranks


def patience(group):
    """(what this rank found, how long it waits for the first one)"""
    new_group, waits = dist.new_group, []

    def noted(timeout, **options):
        waits.append(timeout)
        return new_group(timeout=timeout, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noted)
        return runtime.first_rank_first(dist.get_rank), waits[0]


def test_ranks_wait_for_hours_while_only_the_first_one_works():
    """NCCL alone would end the run after 10 minutes."""
    for rank, (found, wait) in enumerate(run_world(4, patience)):
        assert found == rank and wait > timedelta(hours=10)


# ------------------------------------------------------------------------------------------------------------
# Files


class TwoReasons(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")  # unpickled with this text as its only argument: a TypeError


def fail_on_the_last_rank(group, is_local):
    class Local(Exception):
        pass

    def work():
        if dist.get_rank(group) == 1:
            raise Local("this and that") if is_local else TwoReasons("this", "that")

    with pytest.raises(RuntimeError) as caught:
        runtime.together(work, group)
    return str(caught.value), caught.value.origin


@pytest.mark.parametrize("is_local, name", [(False, "TwoReasons"), (True, "Local")])
def test_an_error_that_cannot_be_sent_arrives_as_its_text(is_local, name):
    for message, origin in run_world(2, fail_on_the_last_rank, is_local):
        assert message == f"{name}: this and that" and "in work\n" in origin


def hold(folder, held):
    with runtime.locked(folder):
        held.set()
        time.sleep(60)


def test_one_process_holds_a_folder_and_a_kill_frees_it(tmp_path, capsys):
    folder, held = tmp_path / "run", FORKS.Event()
    process = FORKS.Process(target=hold, args=(folder, held), daemon=True)
    process.start()
    assert held.wait(60) and being_written(folder)
    holder = f"process {process.pid} on {socket.gethostname()}"
    with refused(f"run is in use by {holder}"):
        runtime.locked(folder, wait=False).__enter__()
    threading.Timer(0.5, process.kill).start()
    with runtime.locked(folder):
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    assert capsys.readouterr().out == f"{holder} is using run: waiting for it\n"
    assert not being_written(folder)


def test_a_file_is_whole_or_not_there_and_no_link_is_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    for name in ("file", f".file.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(KeyboardInterrupt), runtime.write_whole(tmp_path / "file") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    runtime.write_text(tmp_path / "file", "all")
    assert (tmp_path / "file").read_text() == "all" and (tmp_path / "precious").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "precious"]


def test_an_error_that_has_no_file_keeps_its_reason(tmp_path):
    """test_report.py tests an error that has a file."""
    with pytest.raises(TimeoutError, match="^timed out$"), runtime.naming(tmp_path / "x"):
        raise TimeoutError("timed out")  # a socket's, without a number


def write_often(file):
    os.fsync = lambda file: None  # which would take most of the time
    for _ in range(300):
        runtime.write_json(file, [1])


def test_several_processes_write_one_file(tmp_path):
    writers = [FORKS.Process(target=write_often, args=(tmp_path / "file",)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert os.listdir(tmp_path) == ["file"] and runtime.read_json(tmp_path / "file", list) == [1]
