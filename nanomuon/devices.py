"""The GPUs of this machine as their driver sees them, why PyTorch may not be able to use one, and how fast
each kind is.
"""

import os
import re
import shutil
import subprocess
import warnings

import torch

NVIDIA_SMI_SECONDS = 10  # for an answer of nvidia-smi, which hangs where the driver does
# The first driver that runs programs of a CUDA version ("minor version compatibility", CUDA release notes)
OLDEST_DRIVER = {12: 525, 13: 580}  # by major version of CUDA

# Dense peak in TFLOP/s of bf16 products that are added up in float32, from NVIDIA's data sheets and
# architecture white papers; half of the figure where those print one "with sparsity".
BF16_TFLOPS = {
    "GB300": 2500,
    "B300": 2250,
    "GB200": 2500,
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H200 NVL": 835,
    "H100": 989,  # SXM
    "H100 NVL": 835,
    "H100 PCIE": 756,
    "H800": 989,
    "H800 PCIE": 756,
    "H20": 148,
    "A100": 312,  # SXM
    "A100 PCIE": 312,
    "A800": 312,
    "A800 PCIE": 312,
    "A30": 165,
    "A10": 125,
    "A10G": 70,
    "A40": 149.7,
    "A2": 18,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "RTX PRO 6000 BLACKWELL WORKSTATION EDITION": 503.8,
    "RTX PRO 6000 BLACKWELL MAX-Q WORKSTATION EDITION": 438.9,
    "RTX PRO 6000 BLACKWELL SERVER EDITION": 500,
    "RTX 6000 ADA GENERATION": 364.2,
    "RTX A6000": 154.8,
    "RTX A5000": 111.1,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 4090": 165.2,
    "RTX 4080 SUPER": 104.4,
    "RTX 4080": 97.5,
    "RTX 3090 TI": 80,
    "RTX 3090": 71,
}
# What a name may say beside the model: the maker, the size and the kind of memory, the socket. HBM2e is not
# among them: it tells the first H100 PCIe from the SXM.
BESIDE_THE_MODEL = re.compile(r"NVIDIA|GEFORCE|\d+GB?|HBM3E?|SXM\d|AC")


def bf16_peak(name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of the GPU of that name, as nvidia-smi and PyTorch give it.

    None for one that is not in the table, and for what only shares a name with one that is: a part of a GPU
    (MIG), a laptop's.
    """
    # "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe": the same model. "MAX-Q" keeps its hyphen.
    words = re.sub(r"-(?=PCIE|SXM|\d)", " ", name.upper()).split()
    model = " ".join(word for word in words if not BESIDE_THE_MODEL.fullmatch(word))
    teraflops = BF16_TFLOPS.get(model)
    return None if teraflops is None else teraflops * 1e12


def gpus_are_hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES says that programs shall see no GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")


def ask_nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints; nothing where there is none, where it fails, or does not answer in time."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        process = subprocess.Popen(
            [program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return ""
    try:
        output, _ = process.communicate(timeout=NVIDIA_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: what hangs in the driver does not even end by that
        return ""
    return output if process.returncode == 0 else ""


def gpus_of_nvidia_smi() -> tuple[list[str], str]:
    """(name of each GPU, version of the driver): no names where nvidia-smi tells of no GPU."""
    names, driver = [], "of unknown version"
    for line in ask_nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader").splitlines():
        name, comma, version = line.rpartition(",")
        if comma:
            names.append(name.strip())
            driver = version.strip()
    return names, driver


def cuda_of_driver() -> str | None:
    """The newest CUDA version that the driver runs, as nvidia-smi has it in its heading, else None."""
    found = re.search(r"CUDA (?:\w+ )?Version\s*:\s*([\d.]+)", ask_nvidia_smi())
    return found.group(1) if found else None


def cuda_error(index: int) -> str | None:
    """Why this PyTorch cannot compute on the GPU of that number, in its own words; None where it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is raised
            torch.cuda.init()
            # A kernel, which a build for other GPUs has not, and its result, which waits for errors
            torch.ones(1, device=torch.device("cuda", index)).add(1).item()
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts that there is one
        return str(error).strip().split("\n")[0]
    return None


def why_unusable(reason: str) -> str:
    """One line for the user whose machine has a GPU that this PyTorch cannot use: what there is, and what to
    do. reason: PyTorch's own words.
    """
    names, driver = gpus_of_nvidia_smi()
    gpus = f"{len(names)} x {names[0]}" if names else "a GPU"
    built_for = torch.version.cuda
    runs = cuda_of_driver() if names else None
    # Within a major version of CUDA every driver runs every build
    newer_is_needed = built_for and (runs is None or major(runs) < major(built_for))
    can_run = f", which runs CUDA up to {runs}" if runs else ""
    build = f"is built for CUDA {built_for}" if built_for else "is built without CUDA"
    wanted = f"CUDA {runs} or older" if runs else "a CUDA version that this driver runs"
    if built_for and not newer_is_needed:
        wanted = "this kind of GPU"
    remedies = [f"NANOMUON_PYTHON=/path/to/python, one whose PyTorch (2.11 or newer) is built for {wanted}"]
    if newer_is_needed:
        oldest = OLDEST_DRIVER.get(major(built_for))
        newer = f"driver {oldest} or newer" if oldest else "a newer driver"
        remedies.append(f"{newer}, for CUDA {built_for}")
    remedies.append("NANOMUON_DEVICE=cpu, to compute on the CPU all the same")
    return (
        f"here is {gpus} (driver {driver}{can_run}), but PyTorch {torch.__version__} {build} and cannot "
        f"use it ({reason}); what helps: {'; or '.join(remedies)}"
    )


def major(version: str) -> int:
    """13 of "13.0"."""
    return int(version.split(".")[0])
