"""The device and its dtype, GPUs that are seen and cannot be used, what each kind reaches, missing compilers.

nvidia-smi, compilers and what PyTorch says of CUDA are stand-ins.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanomuon import runtime
from nanomuon.runtime import InputError

ROOT = Path(__file__).parent.parent

NVIDIA_SMI = """#!/bin/sh
case "$*" in
    --query-gpu=*) echo "NVIDIA H100 80GB HBM3, 550.54.15"; echo "NVIDIA H100 80GB HBM3, 550.54.15" ;;
    *) echo "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4 |" ;;
esac
"""
FAILS = "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver.'\nexit 9\n"
HANGS = "#!/bin/sh\nexec sleep 60\n"

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-ins are for a machine without GPU"
)


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
def torch_for_cuda_13(monkeypatch):
    """As torch of PyPI is on a machine with two GPUs and a driver for CUDA 12.4."""

    def too_old():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12040).\nPlease update"
        )

    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", too_old)


def complaint():
    with pytest.raises(InputError) as caught:
        runtime.start()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_driver_that_is_too_old_is_named_with_what_helps(nvidia_smi, torch_for_cuda_13):
    nvidia_smi(NVIDIA_SMI)
    line = complaint()
    for part in (
        "here is a GPU (NVIDIA H100 80GB HBM3, 550.54.15; its driver runs CUDA up to 12.4)",
        "PyTorch 2.13.0+cu130, built for CUDA 13.0, cannot use it",
        "too old (found version 12040)",
        "set NANOMUON_PYTHON to a Python whose PyTorch fits card and driver",
        "install a newer driver",
        "NANOMUON_DEVICE=cpu",
    ):
        assert part in line


def test_without_nvidia_smi_pytorch_is_believed(nvidia_smi, torch_for_cuda_13):
    nvidia_smi(FAILS)
    assert "a GPU (unknown to nvidia-smi; its driver runs CUDA up to an unknown version)" in complaint()


def test_a_pytorch_without_cuda_does_not_train_on_the_cpu_of_a_gpu_machine(nvidia_smi, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    nvidia_smi(NVIDIA_SMI)
    assert "built for CUDA None" in complaint()


def test_a_pytorch_without_kernels_for_this_gpu(nvidia_smi, torch_for_cuda_13, monkeypatch):
    def no_kernel():
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    nvidia_smi(NVIDIA_SMI.replace("12.4", "13.1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", no_kernel)
    assert "no kernel image" in complaint()


def test_more_processes_than_gpus(nvidia_smi, torch_for_cuda_13, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert "process 2 of this machine has no GPU: there are 2" in complaint()


@pytest.mark.parametrize("name,value", [("NANOMUON_DEVICE", "cpu"), ("CUDA_VISIBLE_DEVICES", "")])
def test_who_asks_for_the_cpu_gets_it(nvidia_smi, torch_for_cuda_13, monkeypatch, name, value):
    nvidia_smi(NVIDIA_SMI)
    monkeypatch.setenv(name, value)
    assert runtime.start().device.type == "cpu"


def test_another_device_is_refused(monkeypatch):
    monkeypatch.setenv("NANOMUON_DEVICE", "gpu")
    assert "NANOMUON_DEVICE=gpu: it can be cpu" in complaint()


@pytest.mark.parametrize("text", [FAILS, HANGS, "no program\n"])
def test_an_nvidia_smi_that_tells_nothing(nvidia_smi, monkeypatch, text):
    monkeypatch.setattr(runtime, "NVIDIA_SMI_SECONDS", 0.5)
    nvidia_smi(text)
    began = time.monotonic()
    assert runtime.start().device.type == "cpu"
    assert time.monotonic() - began < 5


# In place of Python: says how the training would be started
WITHOUT_TRAINING = f"""#!/bin/sh
case "$*" in
    *scripts.base_train*) echo "$@" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def speedrun(folder):
    """(exit code, output, errors) of `bash speedrun.sh --plan`, which trains nothing."""
    python = folder / "python"
    python.write_text(WITHOUT_TRAINING)
    python.chmod(0o755)
    environment = {**os.environ, "NANOMUON_PYTHON": str(python), "NANOMUON_BASE_DIR": str(folder)}
    result = subprocess.run(
        ["bash", "speedrun.sh", "--plan"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return result.returncode, result.stdout, result.stderr


def test_the_speedrun_stops_at_a_gpu_that_it_cannot_use(nvidia_smi, tmp_path):
    nvidia_smi(NVIDIA_SMI)
    code, output, errors = speedrun(tmp_path)
    assert code == 2 and output == ""
    assert errors.startswith("error: here is a GPU (NVIDIA H100") and errors.count("\n") == 1


@pytest.mark.slow
def test_the_speedrun_takes_the_cpu_where_it_is_told_to(nvidia_smi, tmp_path, monkeypatch):
    nvidia_smi(NVIDIA_SMI)
    monkeypatch.setenv("NANOMUON_DEVICE", "cpu")
    code, output, _ = speedrun(tmp_path)
    assert code == 0 and "corpus python" in output
    assert "-m scripts.base_train --max-seq-len 256" in output  # the preset for a CPU, in one process


@pytest.mark.parametrize("version,code", [("2.10.1+cu126", 2), ("2.11.0+cu126", 0), ("3.0.0a0+git12", 0)])
def test_an_interpreter_with_any_pytorch_from_2_11_on(tmp_path, version, code):
    """A stand-in for its torch: what pip wrote about it."""
    about = tmp_path / f"torch-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    environment = {**os.environ, "NANOMUON_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    command = ["bash", "-c", "set -euo pipefail; source scripts/setup.sh train"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == code
    refusal = f"error: NANOMUON_PYTHON={sys.executable} has PyTorch {version}, and 2.11 or newer is needed\n"
    assert result.stderr == (refusal if code else "")


def test_bf16_is_the_dtype_of_a_device_that_has_instructions_for_it(monkeypatch):
    monkeypatch.setenv("NANOMUON_DEVICE", "cpu")
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda has=has: {"avx512_f": True, "avx512_bf16": has}
        )
        assert runtime.start().compute_dtype == dtype
        assert runtime.start("float32").compute_dtype == torch.float32
        assert runtime.start("bfloat16").compute_dtype == torch.bfloat16


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
        runtime.let_segments_grow()
        found = {name: os.environ[name] for name in names if name in os.environ}
        expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        assert found == ({theirs: "max_split_size_mb:64"} if theirs else expected)
