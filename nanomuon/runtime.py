"""Device, dtype, process group, signals and errors: what every script needs, and nothing on import."""

import ctypes
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# What the system says where nothing can be written: no room (also by ulimit -f), or no permission
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_WRITABLE = (*NO_ROOM, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)

BUG = 1  # exit code of an error that is no one's input
STOPPED = 75  # of a run that was asked to stop before its end: EX_TEMPFAIL of sysexits.h, try again
NO_READER = 128 + signal.SIGPIPE  # of a script in a pipe whose reader has ended, as other programs have it
# C0 but for tab and newline, DEL and C1; Unicode's bidirectional controls; surrogates, which no encoding has
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

PATIENCE = 2  # seconds that a rank waits before it tells of an error which others probably tell of
NVIDIA_SMI_SECONDS = 10  # for an answer of nvidia-smi, which hangs if the driver does


class InputError(Exception):
    """What the user can fix: one line names the thing and says what to do; the exit code is 2."""


@dataclass(frozen=True)
class Runtime:
    """Where this process computes, and its place among the others."""

    device: torch.device
    compute_dtype: torch.dtype  # dtype of activations and matrix products; master weights are float32
    rank: int = 0
    world_size: int = 1

    @property
    def dtype_name(self) -> str:
        return str(self.compute_dtype).removeprefix("torch.")


def check_name(flag: str, name: str) -> None:
    """InputError where a name would leave the folder that it names a folder in, or break the lines that show
    it.
    """
    if not name.isprintable() or not name or set(name) & set("/\\") or name.startswith("."):
        raise InputError(f"{flag} {name!r} is not a folder name; use letters, digits, '-' and '_'")


def check_output(flag: str, place) -> None:
    """InputError if nothing can be made at the place that a flag names; asked before the work for it."""
    reason = why_not_writable(Path(place).parent)
    if reason is not None:
        raise InputError(f"{flag} {place}: {reason}; choose another place")


def why_not_writable(folder: Path) -> str | None:
    """Why no file can be made in a folder, or in the nearest above it that exists; None if one can."""
    while not folder.exists():
        folder = folder.parent
    try:
        # Permissions alone do not tell: nobody can make a file in /proc, nor in a file
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot write to {folder}: {error.strerror}"
    return None


def base_dir() -> Path:
    """The folder under which everything is written: $NANOMUON_BASE_DIR, else ~/.cache/nanomuon."""
    return Path(os.environ.get("NANOMUON_BASE_DIR") or Path.home() / ".cache" / "nanomuon").expanduser()


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for products in bf16: without, they take 4 to 100 times as long as in
    float32 (measured with AVX512 and with AVX2).
    """
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # {name: whether}; older PyTorch has none
    return any(has for name, has in capabilities.items() if "bf16" in name)


def peak_memory_mb(device: torch.device) -> int:
    """The most memory this process has held: on its GPU, or altogether where it computes on CPUs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most >> 20 if sys.platform == "darwin" else most >> 10  # bytes there, else kilobytes


def let_segments_grow() -> None:
    """Let PyTorch's allocator on CUDA extend its segments: less memory is lost between blocks of many sizes.

    Called before CUDA starts. What the user has set for the allocator stays as it is.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    set_by_user = any(name in os.environ for name in names)
    if torch.version.cuda is not None and sys.platform == "linux" and not set_by_user:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def worker_thread(name: str) -> ThreadPoolExecutor:
    """One thread for work beside the caller's, on the GPU that the caller uses, if it does.

    CUDA has a current device for each thread, which is GPU 0 at first. There the first call that reaches
    CUDA, be it a wait for an event, makes a context of 0.5 GB: all ranks of a node would, on the first GPU.
    """
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(1, name)
    return ThreadPoolExecutor(
        1, name, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
    )


def compile_enabled(otherwise: bool = True) -> bool:
    """What NANOMUON_COMPILE says: 0, and the same kernels run eagerly. otherwise: where it says nothing."""
    return os.environ.get("NANOMUON_COMPILE", str(int(otherwise))) != "0"


def keep_freed_memory() -> None:
    """Let glibc keep the large blocks it frees; does nothing where malloc is another one.

    Fresh blocks cost a page fault every 4 kB, 7% of a step's CPU time (docs/log.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped by itself
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap does not shrink


def usable_gpus() -> int:
    """How many GPUs of this machine can be computed on; with none, or NANOMUON_DEVICE=cpu, the CPU computes.

    InputError if there is a GPU, but this PyTorch cannot use it: nobody wants to find out after an hour that
    eight processes train on a CPU. A GPU is one that PyTorch or nvidia-smi knows of.
    """
    wanted = os.environ.get("NANOMUON_DEVICE", "")
    if wanted not in ("", "cpu"):
        raise InputError(f"NANOMUON_DEVICE={wanted}: it can be cpu, or not be set: a GPU if there is one")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if wanted == "cpu" or hidden:
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old: check_gpu says it
        if torch.cuda.is_available():
            return torch.cuda.device_count()
        seen_by_torch = torch.cuda.device_count()  # asks the driver, and not whether CUDA runs with it
    if seen_by_torch or ask_nvidia_smi("--query-gpu=name", "--format=csv,noheader"):
        check_gpu(0)
    return 0


def check_gpu(index: int) -> None:
    """InputError if the GPU of that number does not compute, with driver, CUDA versions and what to do."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is raised
            torch.cuda.init()
            # A kernel, which a build for other GPUs has not, and its result, which waits for errors
            torch.ones(1, device=torch.device("cuda", index)).add(1).item()
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts that there is one
        reason = str(error).strip().split("\n")[0]
        card = ask_nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader").split("\n")[0]
        runs = re.search(r"CUDA (?:\w+ )?Version\s*:\s*([\d.]+)", ask_nvidia_smi())
        raise InputError(
            f"here is a GPU ({card or 'unknown to nvidia-smi'}; its driver runs CUDA up to "
            f"{runs.group(1) if runs else 'an unknown version'}), but PyTorch {torch.__version__}, built for "
            f"CUDA {torch.version.cuda}, cannot use it ({reason}): set NANOMUON_PYTHON to a Python whose "
            "PyTorch fits card and driver, or install a newer driver, or compute on the CPU all the same: "
            "NANOMUON_DEVICE=cpu"
        ) from error


def ask_nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints; nothing if there is none, if it fails, or does not answer in time."""
    try:
        process = subprocess.Popen(
            ["nvidia-smi", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return ""
    try:
        output, _ = process.communicate(timeout=NVIDIA_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: what hangs in the driver does not even end by that
        return ""
    return output if process.returncode == 0 else ""


def print_hardware() -> None:
    """What speedrun.sh asks, so that it never disagrees with the scripts that it starts: how many GPUs, and
    the dtype in which they, or the CPU, compute.
    """
    count = usable_gpus()
    if count:
        check_gpu(0)
    print(count, "bfloat16" if count or cpu_has_bf16() else "float32")


def make_deterministic() -> None:
    """From now on equal operations on equal numbers give equal bits, on GPUs too, at some cost in time.

    Called before start(), because cuBLAS, NCCL and Inductor read their variables once. Of the kernels for
    attention cuDNN's is left out: the others know a deterministic backward, which this asks for.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # NVIDIA's cuBLAS manual, on reproducibility
    # Sums that the NVSwitch makes may differ from call to call (github.com/NVIDIA/nccl/issues/1497)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # Else some of its kernels are the fastest of several that round differently
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)


def start(dtype: str = "auto") -> Runtime:
    """Pick the device and join the process group if torchrun started us.

    Several processes always form one group (NCCL on CUDA, gloo on CPU), so torchrun never trains independent
    models. dtype: of activations and products, "bfloat16", "float32" or "auto", which is bfloat16 if the
    device has instructions for it. InputError if there is a GPU that cannot be used.
    """
    let_segments_grow()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    gpus = usable_gpus()
    if gpus:
        index = int(os.environ.get("LOCAL_RANK", "0"))
        if index >= gpus:
            raise InputError(f"process {index} of this machine has no GPU: there are {gpus}, counted from 0")
        check_gpu(index)
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        device, has_bf16 = torch.device("cpu"), cpu_has_bf16()
        keep_freed_memory()
    if dtype == "auto":
        dtype = "bfloat16" if has_bf16 else "float32"
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
            timeout=timedelta(minutes=10),
        )
    # By itself a process is the first, whatever another launch has left in the environment
    rank = int(os.environ.get("RANK", "0")) if world_size > 1 else 0
    return Runtime(device, getattr(torch, dtype), rank, world_size)


def printable(text: str) -> str:
    """Text as a terminal may show it: control characters other than newline and tab, and what changes the
    direction of writing, appear as escapes like \\x1b and \\u202e; so do lone surrogates.
    """
    return _NOT_SHOWN.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def print0(*values, **keywords) -> None:
    """print() on rank 0 only, of what is printable()."""
    if os.environ.get("RANK", "0") == "0":
        print(*(printable(str(value)) for value in values), **{"flush": True, **keywords})


def together(work, group=None) -> list:
    """Run work() on every rank; return all results, or raise the first error on all: none is left waiting.

    An error keeps the traceback of where it happened, as text in its attribute `origin`.
    """
    result = error = None
    try:
        result = work()
    except Exception as caught:
        error = caught
        error.origin = traceback.format_exc()
    outcomes = [(result, error)]
    if dist.is_initialized():
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (result, error), group=group)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


@contextmanager
def patient_group():
    """A group of all ranks, for `together` where one of them works while the others wait, for hours if need
    be: NCCL would give up after 10 minutes. None in one process. All ranks enter and leave it together.
    """
    if not dist.is_initialized():
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    yield group
    dist.destroy_process_group(group)  # not after an error, which may have left other ranks in it


def first_rank_first(work, runtime: Runtime):
    """work() on the first rank, then on the others, which find what it wrote. Returns each rank's result.

    It may take hours: a download does.
    """
    if runtime.world_size == 1:
        return work()
    with patient_group() as group:
        first = together(lambda: work() if runtime.rank == 0 else None, group)[0]
    return first if runtime.rank == 0 else work()


def run_command(main) -> None:
    """Run a script's main() and exit: 0, or 2 with one line on stderr for what the user can fix.

    Other exceptions keep their traceback: they are bugs. In a world of several ranks an error ends its rank
    at once, so that torchrun ends the others, which may be waiting for this one in a collective: leaving the
    process group would wait for them. What was being written in the background stays unfinished, as when the
    process is killed.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # until here scripts/__init__.py had it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main() or 0
        sys.stdout.flush()
    except SystemExit as exit:
        code = exit.code
    except (Exception, KeyboardInterrupt) as error:
        code, message = explain(error)
        if isinstance(error, OSError) and error.filename is None:
            # Of the output: else Python would try to write the rest once more when it ends, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        if alone and code == BUG:
            raise
        if not alone:
            let_others_speak(error, code)
        sys.stderr.write(message)  # in one piece: print() writes the end of the line by itself
        if not alone:
            leave(code)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


def exit_when_asked() -> None:
    """From here on SIGTERM raises SystemExit(STOPPED), and so does SIGHUP, except under nohup."""

    def stop(number, frame):
        raise SystemExit(STOPPED)

    on_signals(stop, signal.SIGTERM, signal.SIGHUP)


def on_signals(handler, *numbers: signal.Signals) -> None:
    """Have handler(number, frame) called for these signals; SIGHUP stays ignored where it is: by nohup."""
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code for an error that ends this process, and what to tell the user about it."""
    if isinstance(error, InputError):
        return 2, _line(str(error))
    if isinstance(error, KeyboardInterrupt):
        return 130, f"{str(error) or 'interrupted'}\n"
    if isinstance(error, BrokenPipeError):
        return NO_READER, "ended: nobody reads the output any more\n"
    if isinstance(error, torch.OutOfMemoryError):
        first = str(error).split(". ")[0]
        return 2, _line(
            f"{first}; fewer rows (--device-batch-size), a smaller model or --shard fsdp need less"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return 2, _line(f"{error.strerror}: {error.filename}")
    if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
        place = error.filename or "the output"
        advice = "; NANOMUON_BASE_DIR=/folder/with/room helps" if str(base_dir()) in str(place) else ""
        return 2, _line(f"{error.strerror}: {place}{advice}")
    origin = getattr(error, "origin", None)  # see together()
    text = origin or "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return BUG, printable(text)


def _line(message: str) -> str:
    return f"error: {printable(' '.join(message.split()))}\n"


def code_of_a_stop() -> int:
    """The exit code of a run that was asked to stop before its end: 75 in one process. 0 where there are
    several, or one that torchrun has started, which starts ranks again that end with anything else.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1" and not dist.is_torchelastic_launched()
    return STOPPED if alone else 0


def let_others_speak(error: BaseException, code: int) -> None:
    """Wait a little with an error that another rank probably tells of, to be ended by torchrun meanwhile.

    Most errors come to all ranks: then the first of each node tells the user, and not eight of them. The end
    of another rank shows as a connection that is lost.
    """
    first_of_node = os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"
    lost_connection = isinstance(error, dist.DistError) or "by peer" in str(error)  # the words of gloo
    if first_of_node and not lost_connection:
        return
    signal.signal(signal.SIGTERM, lambda number, frame: leave(code))  # by which torchrun ends us
    time.sleep(PATIENCE)


def leave(code: int) -> None:
    """End this process at once, without waiting for threads or for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
