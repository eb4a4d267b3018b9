"""GPUs that are seen and cannot be used, what each kind reaches, and compilers that are missing.

nvidia-smi, compilers and what PyTorch says of CUDA are stand-ins.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanomuon import compilation, devices, planning, runtime, sizing
from nanomuon.runtime import InputError
from scripts import base_train

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
        "2 x NVIDIA H100 80GB HBM3 (driver 550.54.15, which runs CUDA up to 12.4)",
        "PyTorch 2.13.0+cu130 is built for CUDA 13.0",
        "too old (found version 12040)",
        "NANOMUON_PYTHON=/path/to/python, one whose PyTorch (2.11 or newer) is built for CUDA 12.4 or older",
        "driver 580 or newer",
        "NANOMUON_DEVICE=cpu",
    ):
        assert part in line


def test_without_nvidia_smi_pytorch_is_believed(nvidia_smi, torch_for_cuda_13):
    nvidia_smi(FAILS)
    assert "a GPU (driver of unknown version), but PyTorch 2.13.0+cu130" in complaint()


def test_a_pytorch_without_cuda_does_not_train_on_the_cpu_of_a_gpu_machine(nvidia_smi, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    nvidia_smi(NVIDIA_SMI)
    line = complaint()
    assert "is built without CUDA" in line and "built for CUDA 12.4 or older" in line
    assert "or newer, for CUDA" not in line  # another driver would not help


def test_a_pytorch_without_kernels_for_this_gpu(nvidia_smi, torch_for_cuda_13, monkeypatch):
    def no_kernel():
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    nvidia_smi(NVIDIA_SMI.replace("12.4", "13.1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", no_kernel)
    line = complaint()
    assert "no kernel image" in line and "built for this kind of GPU" in line
    assert "or newer, for CUDA" not in line


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
    monkeypatch.setattr(devices, "NVIDIA_SMI_SECONDS", 0.5)
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
    assert errors.startswith("error: here is 2 x NVIDIA H100") and errors.count("\n") == 1


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
    "NVIDIA GH200 120GB": 989,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA GB300": 2500,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
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
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 438.9,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 500,
    "Tesla V100-SXM2-32GB": None,  # no bf16
    "Tesla T4": None,
    "AMD Instinct MI300X": None,
}


def test_every_card_has_its_own_peak(monkeypatch):
    found = {}
    for name in PEAKS:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        peak = runtime.peak_flops(torch.device("cuda"))
        found[name] = None if peak is None else pytest.approx(peak / 1e12)
    assert found == PEAKS


def test_an_unknown_card_has_no_mfu_and_the_plan_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 CNX")
    monkeypatch.setattr(sizing, "device_batch_size", lambda *_: 8)
    args = base_train.parse_arguments(["--depth", "2"], {})
    gpu = runtime.Runtime(torch.device("cuda"), torch.bfloat16)
    planning.print_plan(args, planning.plan_run(args, 300, gpu, {}), gpu)
    assert "nor MFU: nanomuon/devices.py has no peak for NVIDIA H100 CNX" in capsys.readouterr().out


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A path with nothing on it and a place for Python.h. Returns what puts a program on the path."""
    for name in ("CC", "CXX", "NANOMUON_COMPILE"):
        monkeypatch.setenv(name, "")  # so that it is unset again afterwards, too
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(runtime.sysconfig, "get_path", lambda *_: str(tmp_path))

    def make(name):
        program = tmp_path / "bin" / name
        program.touch(0o755)
        return program

    return make


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_triton_needs_a_c_compiler_and_the_headers_of_python(programs, tmp_path, monkeypatch, compiler):
    programs("g++")
    assert "C compiler clang (install it, or name another in CC)" in runtime.missing_compiler("cuda")
    programs(compiler)
    assert f"{tmp_path}/Python.h (install" in runtime.missing_compiler("cuda")
    assert runtime.missing_compiler("cpu") is None
    (tmp_path / "Python.h").touch()
    assert runtime.missing_compiler("cuda") is None
    monkeypatch.setenv("CC", "icx")
    assert "C compiler icx" in runtime.missing_compiler("cuda")


def test_without_a_compiler_a_run_on_a_cpu_stays_eager_and_says_so(programs, capsys):
    args = base_train.parse_arguments(["--compile"], {})
    compilation.choose_compilation(args, "cpu")
    assert args.compile is False and not runtime.compile_enabled()
    assert "no C++ compiler" in capsys.readouterr().out


def test_without_a_compiler_a_run_on_gpus_does_not_begin_unless_told_how(programs, monkeypatch):
    with pytest.raises(runtime.InputError, match="^no C compiler clang .*; --no-compile trains without"):
        compilation.choose_compilation(base_train.parse_arguments([], {}), "cuda")
    for flag, compiles in (("--compile", True), ("--no-compile", False)):
        monkeypatch.delenv("NANOMUON_COMPILE", raising=False)
        args = base_train.parse_arguments([flag], {})
        compilation.choose_compilation(args, "cuda")
        assert args.compile is compiles and runtime.compile_enabled() is compiles
