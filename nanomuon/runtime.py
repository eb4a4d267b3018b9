"""The device of this process, its place among the ranks, atomic file writes, and locks.

`nanomuon.optim` imports this file, so at the top it imports only PyTorch and the standard library.
"""

import contextlib
import ctypes
import functools
import glob
import json
import os
import pickle
import re
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

GPU_FILES = "/dev/nvidia[0-9]*"  # Linux's device files of NVIDIA GPUs
# C0 except tab and newline, DEL and C1; Unicode's bidirectional controls; surrogates, which have no encoding
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class InputError(Exception):
    """An error that the user can fix: one line says what is wrong and what to do. The exit code is 2."""


@dataclass(frozen=True)
class Runtime:
    """The device of this process, and its place among the ranks."""

    device: torch.device
    compute_dtype: torch.dtype  # of activations and matrix products; master weights are float32
    rank: int = 0
    world_size: int = 1

    @property
    def dtype_name(self) -> str:
        return str(self.compute_dtype).removeprefix("torch.")


@contextlib.contextmanager
def one_line(what: str, advice: str = ""):
    """Turn any error from a library or a user's file into an InputError that says what failed."""
    try:
        yield
    except InputError:  # it already says what failed
        raise
    except Exception as error:
        raise InputError(f"{what}: {type(error).__name__}: {error}{advice}") from error


def check_name(flag: str, name: str) -> None:
    """InputError for a name that leads out of its parent folder, is hidden or empty, or is not printable."""
    # With what is added to it, names of files have at most 255 bytes. "replace": a name that is not UTF-8 is
    # not printable, but cannot be encoded
    fits = name and len(name.encode(errors="replace")) <= 200
    if not fits or not name.isprintable() or set(name) & set("/\\") or name.startswith("."):
        raise InputError(
            f"{flag} {name!r} is not a folder name: use up to 200 bytes, no slash, no dot at the beginning"
        )


def base_dir() -> Path:
    """The folder for everything but the hub's downloads: $NANOMUON_BASE_DIR, else ~/.cache/nanomuon."""
    return Path(os.path.expanduser(os.environ.get("NANOMUON_BASE_DIR") or "~/.cache/nanomuon"))


# ------------------------------------------------------------------------------------------------------------
# The machine


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products. Without, these take 4 to 100 times as long as
    in float32 (measured with AVX512 and with AVX2).
    """
    capabilities = torch.cpu.get_capabilities()  # {name: whether it has it}
    return any(has for name, has in capabilities.items() if "bf16" in name)


def compile_enabled(default: bool = True) -> bool:
    """Whether to compile, as NANOMUON_COMPILE says, 0 or 1. default: the answer if it is not set."""
    wanted = os.environ.get("NANOMUON_COMPILE") or str(int(default))
    if wanted not in ("0", "1"):
        raise InputError(f"NANOMUON_COMPILE={wanted}: set it to 0 or 1, or unset it")
    return wanted == "1"


def keep_freed_memory() -> None:
    """Make glibc keep freed large blocks for reuse. Does nothing with another malloc.

    New blocks cost a page fault every 4 kB, 7% of a step's CPU time (docs/log.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped separately
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap does not shrink


def usable_gpus() -> int:
    """How many of this machine's GPUs to use; 0 means the CPU, as NANOMUON_DEVICE=cpu requests.

    InputError if there is a GPU that this PyTorch cannot use, so that nobody finds out after an hour that
    eight processes are training on a CPU.
    """
    wanted = os.environ.get("NANOMUON_DEVICE", "")
    if wanted not in ("", "cpu"):
        raise InputError(f"NANOMUON_DEVICE={wanted}: set it to cpu, or unset it to use a GPU if there is one")
    if wanted == "cpu":
        return 0
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if glob.glob(GPU_FILES) and not hidden:
        target = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        raise InputError(
            f"this machine has a GPU, but PyTorch {torch.__version__}, built for {target}, "
            "cannot use it: set NANOMUON_PYTHON to a Python whose PyTorch fits GPU and driver, or "
            "NANOMUON_DEVICE=cpu"
        )
    return 0


def print_hardware() -> None:
    """Print the number of GPUs and the presets' dtype, for speedrun.sh."""
    count = usable_gpus()
    print(count, "bfloat16" if count or cpu_has_bf16() else "float32")


def timed(work, device: str) -> float:
    """Milliseconds of work(), including what it queues on the device ("cuda" or "cpu")."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began)


def make_deterministic() -> None:
    """From now on equal operations on equal numbers give bitwise equal results, on GPUs too, at some cost in
    time.

    Call it before start(), because cuBLAS, NCCL and Inductor read their variables only once. It disables
    cuDNN's attention; the other kernels have a deterministic backward pass, which this requests.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # NVIDIA's cuBLAS manual, on reproducibility
    # Sums in the NVSwitch may differ from call to call (github.com/NVIDIA/nccl/issues/1497)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # Otherwise Inductor chooses the fastest of several kernels, which round differently
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)


def process_numbers() -> tuple[int, int]:
    """(number of processes, this process's number on its machine), as torchrun sets them. InputError for
    variables that contradict each other.
    """
    defaults = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    given = {name: os.environ[name] for name in defaults if name in os.environ}
    size, rank, local_rank = (defaults | given).values()
    are_numbers = all(map(str.isdecimal, (size, rank, local_rank)))
    are_paired = ("WORLD_SIZE" in given) == ("RANK" in given)
    if not (are_numbers and are_paired) or int(rank) >= int(size):
        raise InputError(f"the environment has {given}: unset these variables, or start with torchrun")
    return int(size), int(local_rank)


def start(dtype: str = "auto") -> Runtime:
    """Choose the device, and join the process group if torchrun started us.

    Several processes always form one group (NCCL on CUDA, gloo on CPU), so torchrun never trains independent
    models. dtype: that of activations and products, "bfloat16", "float32" or "auto", which is bfloat16 if the
    device has instructions for it. InputError if there is a GPU that cannot be used.
    """
    world_size, index = process_numbers()
    gpus = usable_gpus()
    if gpus:
        if index >= gpus:
            raise InputError(f"process {index} (from 0) has no GPU: this machine has {gpus}, so start fewer")
        if world_size > 1 and gpus > 1 and "LOCAL_RANK" not in os.environ:
            raise InputError("LOCAL_RANK, which chooses the GPU, is not set: start with torchrun, or set it")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        device, has_bf16 = torch.device("cpu"), cpu_has_bf16()
        keep_freed_memory()
    if dtype == "auto":
        dtype = "bfloat16" if has_bf16 else "float32"
    if world_size > 1 and not dist.is_initialized():  # scripts.scaling trains several runs in a row
        # device_id binds NCCL to our GPU now, so a wrong mapping fails here, not in the first collective
        dist.init_process_group(
            "nccl" if gpus else "gloo",
            device_id=device if gpus else None,
            timeout=timedelta(minutes=10),
        )
    return Runtime(device, getattr(torch, dtype), rank(), world_size)


# ------------------------------------------------------------------------------------------------------------
# Ranks


def printable(text: str) -> str:
    """The text made safe for a terminal: control characters except newline and tab, bidirectional controls
    and lone surrogates become escapes like \\x1b and \\u202e.
    """
    return _NOT_SHOWN.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def print0(text, **keywords) -> None:
    """print() on the first rank only, with the text passed through printable(). Once the terminal or the
    reader of a pipe is gone, it prints nothing more: a run must not end with them.
    """
    if rank() == 0:
        try:
            print(printable(str(text)), flush=True, **keywords)
        except OSError:
            discard(keywords.get("file", sys.stdout))


def discard(stream) -> None:
    """From now on, what is written to sys.stdout or sys.stderr is lost, and Python can flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def together(work, group=None) -> list:
    """Run work() on every rank; return all results, or raise the first error on all, so that none is left
    waiting. The error's attribute `origin` is its original traceback, as text. An error that cannot be sent
    to other ranks becomes a RuntimeError.
    """
    try:
        outcome = work(), None
    except Exception as error:
        error.origin = traceback.format_exc()
        outcome = None, error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # of a local class, or of one whose __init__ needs other arguments
            outcome = None, RuntimeError(f"{type(error).__name__}: {error}")
            outcome[1].origin = error.origin
    outcomes = [outcome]
    if dist.is_initialized():
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, outcome, group=group)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def rank() -> int:
    """This process's number in the process group; before there is one, the number that torchrun gave it."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def on_first_rank(work, group=None):
    """Run work() on the first rank. Every rank gets its result, or its error. See together()."""
    return together(lambda: work() if rank() == 0 else None, group)[0]


def first_rank_first(work):
    """Run work() on the first rank, then on the others, which find what it wrote. Returns this rank's result.

    It may take hours, like a download; the default group would give up after 10 minutes.
    """
    if not dist.is_initialized():
        return work()
    advice = "; set GLOO_SOCKET_IFNAME to the network interface between the nodes"
    with one_line("connecting the ranks over gloo failed", advice):
        group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    first = on_first_rank(work, group)
    dist.destroy_process_group(group)  # not after an error, which may have left other ranks in it
    return first if rank() == 0 else work()


def require_shared_base_dir() -> None:
    """InputError on every rank if one does not see the first rank's base folder."""

    def mark():  # with a new name: a node may have a copy of whatever is in the folder
        base_dir().mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=".shared-", dir=base_dir())

    marker = Path(on_first_rank(mark))
    seen = together((base_dir() / marker.name).exists)
    if rank() == 0:
        marker.rmdir()
    if not all(seen):
        raise InputError(
            f"rank {seen.index(False)} does not see {marker.parent} of rank 0: set NANOMUON_BASE_DIR to a "
            "folder that all nodes share"
        )


# ------------------------------------------------------------------------------------------------------------
# Atomic file writes, JSON with checked types, and locks on folders


@contextlib.contextmanager
def naming(path):
    """Add this file's name to an OSError raised inside: one from write(), such as a full disk, has none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # such as a socket's timeout: only its text says what happened
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def write_whole(path):
    """A binary file that appears at `path` only once it is complete and on disk.

    A symbolic link at `path` is replaced, not followed. If several processes write it, the last one wins.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            temporary.unlink(missing_ok=True)  # left by a killed process of this id, or a stranger's link
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Delete what killed processes have left of write_whole() for files of this name in the folder and below.
    Nobody else may be writing.
    """
    for left_over in folder.rglob(f".{name}.*.tmp"):
        left_over.unlink()


def write_text(path, text: str) -> None:
    """Write UTF-8. Lone surrogates, as from file names that are not UTF-8, become question marks."""
    with write_whole(path) as file:
        file.write(text.encode(errors="replace"))


def write_json(path, content) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_json(path, kind=dict, advice: str = ""):
    """The content of a JSON file as `kind`: dict, or a dataclass, whose field types it must match.

    A field without a default must exist; keys without a field are ignored. InputError names the file and the
    key that is missing or has another type, followed by `advice`, which says what the user can do.
    """
    try:
        return parse_json(Path(path).read_bytes(), kind)
    except (OSError, ValueError) as error:
        problem = f"{path} cannot be read: {error}"
        raise InputError(f"{problem}; {advice}" if advice else problem) from error


@functools.cache  # building one takes 300 times as long as using it
def reader_of(kind):
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def parse_json(text: bytes | str, kind):
    """JSON text as `kind`, see read_json(). ValueError names the first key that is wrong."""
    from pydantic import ValidationError

    try:
        return reader_of(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the content"
        raise ValueError(f"{key}: {first['msg']}") from error


@contextlib.contextmanager
def locked(folder: Path, wait: bool = True):
    """Lock a folder for this process; the operating system unlocks it if we are killed.

    While another process has the lock, this waits, or without `wait` raises an InputError that names that
    process.
    """
    from filelock import FileLock, Timeout

    file = lock_file(folder)
    try:
        lock = FileLock(file).acquire(timeout=0)
    except Timeout:
        holder = file.read_text() or "another process"  # it may not have written its name yet
        if not wait:
            raise InputError(
                f"{folder} is in use by {holder}: wait, stop it, or choose another name"
            ) from None
        print(f"{holder} is using {folder.name}: waiting for it", flush=True)
        lock = FileLock(file).acquire()
    with lock:
        with naming(file):
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield


def lock_file(folder: Path) -> Path:
    """The file that `locked()` locks."""
    return folder.with_name(f".{folder.name}.lock")


def folder_of(run: str) -> Path:
    """The folder of the run of this name, whether it exists or not."""
    return base_dir() / "runs" / run


def find_run(run: str) -> Path:
    """The folder that --run names: a path if it has a slash, else a name under runs/."""
    if "/" in run:
        return Path(os.path.expanduser(run)).resolve()  # Path.expanduser() raises if there is no such user
    check_name("--run", run)
    return folder_of(run)
