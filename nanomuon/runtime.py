"""Device, dtype, process group, rank-0 printing and whole files: what every script needs.

Nothing of it happens on import.
"""

import ctypes
import errno
import json
import os
import resource
import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# What the system says where nothing can be written: no room, or no permission
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


class InputError(Exception):
    """What the user can fix: one line names the thing and says what to do; the exit code is 2."""


@dataclass(frozen=True)
class Runtime:
    """Where this process computes, and its place among the others."""

    device: torch.device
    compute_dtype: torch.dtype  # dtype of activations and matrix products; master weights are float32
    rank: int = 0
    world_size: int = 1


def check_name(flag: str, name: str) -> None:
    """InputError where a name would leave the folder that it names a folder in."""
    if not name or set(name) & set("/\\") or name.startswith("."):
        raise InputError(f"{flag} {name!r} is not a folder name; use letters, digits, '-' and '_'")


def check_at_least_1(args, *names: str) -> None:
    """InputError for the first of these arguments that is given and below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def base_dir() -> Path:
    """The folder under which everything is written: $NANOMUON_BASE_DIR, else ~/.cache/nanomuon."""
    return Path(os.environ.get("NANOMUON_BASE_DIR") or Path.home() / ".cache" / "nanomuon").expanduser()


@contextmanager
def write_whole(path):
    """A binary file that appears at `path` once it is complete and on disk, and never before."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path, text: str) -> None:
    with write_whole(path) as file:
        file.write(text.encode())


def write_json(path, content) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


# Dense bf16 peak in FLOP/s by a part of the device's name, from the vendors' data sheets
PEAK_FLOPS = {"B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s this device can reach in matrix products; None for a GPU that is not in the table.

    In bf16, from its data sheet, on CUDA; in float32, measured, on a CPU.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAK_FLOPS.items():
            if part in name:
                return peak
        return None
    matrix = torch.ones(1024, 1024)
    matrix @ matrix  # the first product starts the threads
    began = time.perf_counter()
    for _ in range(8):
        matrix @ matrix
    return 8 * 2 * 1024**3 / (time.perf_counter() - began)


def peak_memory_mb(device: torch.device) -> int:
    """The most memory this process has held: on its GPU, or altogether where it computes on CPUs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def let_segments_grow() -> None:
    """Let PyTorch's allocator on CUDA extend its segments: less memory is lost between blocks of many sizes.

    Called before CUDA starts. What the user has set for the allocator stays as it is.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    set_by_user = any(name in os.environ for name in names)
    if torch.version.cuda is not None and sys.platform == "linux" and not set_by_user:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def compile_enabled(otherwise: bool = True) -> bool:
    """What NANOMUON_COMPILE says: 0, and the same kernels run eagerly. otherwise: where it says nothing."""
    return os.environ.get("NANOMUON_COMPILE", str(int(otherwise))) != "0"


def missing_compiler() -> str | None:
    """The C++ compiler that torch.compile would call on a CPU, where there is no such program; else None."""
    default = "clang++" if sys.platform == "darwin" else "g++"  # what Inductor calls
    compiler = os.environ.get("CXX") or default
    return None if shutil.which(compiler) else compiler


def keep_freed_memory() -> None:
    """Let glibc keep the large blocks it frees; does nothing where malloc is another one.

    Fresh blocks cost a page fault every 4 kB, 7% of a step's CPU time (docs/log.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped by itself
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap does not shrink


def start() -> Runtime:
    """Pick the device and join the process group when torchrun started us.

    Several processes always form one group (NCCL on CUDA, gloo on CPU), so torchrun never trains independent
    models. bf16 is the compute dtype where the device multiplies it natively; CPUs stay in float32, which all
    of them do well.
    """
    let_segments_grow()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    else:
        device, dtype = torch.device("cpu"), torch.float32
        keep_freed_memory()
    if world_size > 1:
        store = None
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if restarts != "0":
            # torchrun's ranks meet in one store, where torch 2.13 finds the addresses of those of before
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            store = dist.PrefixStore(f"restart_{restarts}", store)
        # device_id binds NCCL to our GPU at once: a wrong mapping fails here, not in the first collective
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=world_size,
            device_id=device if on_gpu else None,
        )
    return Runtime(device, dtype, int(os.environ.get("RANK", "0")), world_size)


def print0(*values, **keywords) -> None:
    """print() on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(*values, **{"flush": True, **keywords})


def together(work, group=None) -> list:
    """Run work() on every rank; return all results, or raise the first error on all: none is left waiting."""
    result = error = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    outcomes = [(result, error)]
    if dist.is_initialized():
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (result, error), group=group)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def first_rank_first(work, runtime: Runtime):
    """work() on the first rank, then on the others, which find what it wrote. Returns each rank's result.

    It may take hours: a download does.
    """
    if runtime.world_size == 1:
        return work()
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))  # NCCL would give up after 10 minutes
    first = together(lambda: work() if runtime.rank == 0 else None, patient)[0]
    dist.destroy_process_group(patient)
    return first if runtime.rank == 0 else work()


def run_command(main) -> None:
    """Run a script's main() and exit: 0, or 2 with one line on stderr for what the user can fix.

    Other exceptions keep their traceback: they are bugs. Every rank that fails says so, and the process group
    is left.
    """
    try:
        code = main() or 0
    except InputError as error:
        code = _complain(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except torch.OutOfMemoryError as error:
        first = str(error).split(". ")[0]
        code = _complain(
            f"{first}; fewer rows (--device-batch-size), a smaller model or --shard fsdp need less"
        )
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        code = _complain(
            f"{error.strerror}: {error.filename or base_dir()}; NANOMUON_BASE_DIR=/folder/with/room helps"
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(code)


def _complain(message: str) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"error: {line}\n")  # in one piece: print() writes the end of the line by itself
    sys.stderr.flush()
    return 2
