"""Device, dtype, process group, signals and errors: what every script needs, and nothing on import."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

BUG = 1  # exit code of an error that is no one's input
STOPPED = 75  # of a run that was asked to stop before its end: EX_TEMPFAIL of sysexits.h, try again
PATIENCE = 2  # seconds that a rank waits before it tells of an error which others probably tell of
# C0 but for tab and newline, DEL and C1; Unicode's bidirectional controls; surrogates, which no encoding has
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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
    """InputError for a name that would leave the folder that it names a folder in, or break a line."""
    if not name.isprintable() or not name or set(name) & set("/\\") or name.startswith("."):
        raise InputError(f"{flag} {name!r} is not a folder name; use letters, digits, '-' and '_'")


def base_dir() -> Path:
    """The folder under which everything is written: $NANOMUON_BASE_DIR, else ~/.cache/nanomuon."""
    return Path(os.environ.get("NANOMUON_BASE_DIR") or Path.home() / ".cache" / "nanomuon").expanduser()


# ------------------------------------------------------------------------------------------------------------
# The machine


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
    """The most memory this process has held: on its GPU, or altogether if it computes on CPUs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most >> 20 if sys.platform == "darwin" else most >> 10  # bytes there, else kilobytes


def let_segments_grow() -> None:
    """Let PyTorch's allocator on CUDA extend its segments: less memory is lost between blocks of many sizes.

    Called before CUDA starts. What the user has set for the allocator stays as it is.
    """
    set_by_user = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if torch.version.cuda is not None and sys.platform == "linux" and not set_by_user:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def compile_enabled(otherwise: bool = True) -> bool:
    """What NANOMUON_COMPILE says: 0, and the same kernels run eagerly. otherwise: if it says nothing."""
    return os.environ.get("NANOMUON_COMPILE", str(int(otherwise))) != "0"


def keep_freed_memory() -> None:
    """Let glibc keep the large blocks it frees; does nothing if malloc is another one.

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
    if wanted == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old: check_gpu says it
        if torch.cuda.is_available():
            return torch.cuda.device_count()
        seen_by_torch = torch.cuda.device_count()  # asks the driver, and not whether CUDA runs with it
    if seen_by_torch or driver_version():
        check_gpu(0)
    return 0


def check_gpu(index: int) -> None:
    """InputError if the GPU of that number does not compute, with driver, CUDA versions and what to do."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is raised
            # A kernel, which a build for other GPUs has not, and its result, which waits for errors
            torch.ones(1, device=torch.device("cuda", index)).add(1).item()
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts that there is one
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"here is a GPU ({driver_version() or 'unknown to nvidia-smi'}), but PyTorch "
            f"{torch.__version__}, built for CUDA {torch.version.cuda}, cannot use it ({reason}): set "
            "NANOMUON_PYTHON to a Python whose PyTorch fits card and driver, or install a newer driver, or "
            "compute on the CPU all the same: NANOMUON_DEVICE=cpu"
        ) from error


def driver_version() -> str:
    """The line of nvidia-smi with the versions of driver and CUDA; empty if it tells of no GPU."""
    try:
        output = subprocess.check_output(["nvidia-smi"], stderr=subprocess.DEVNULL, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next((" ".join(line.strip("| ").split()) for line in output.splitlines() if "CUDA" in line), "")


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
        dist.init_process_group(
            "nccl" if gpus else "gloo",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=world_size,
            device_id=device if gpus else None,
            timeout=timedelta(minutes=10),
        )
    # By itself a process is the first, whatever another launch has left in the environment
    rank = int(os.environ.get("RANK", "0")) if world_size > 1 else 0
    return Runtime(device, getattr(torch, dtype), rank, world_size)


# ------------------------------------------------------------------------------------------------------------
# Ranks


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


def rank() -> int:
    """This process's number in the process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def on_first_rank(work, group=None):
    """The result of work() on the first rank, or its error, on every rank. See together()."""
    return together(lambda: work() if rank() == 0 else None, group)[0]


@contextlib.contextmanager
def patient_group():
    """A group of all ranks, for `together` while one of them works and the others wait, for hours if need be:
    NCCL would give up after 10 minutes. None in one process. All ranks enter and leave it together.
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
        first = on_first_rank(work, group)
    return first if runtime.rank == 0 else work()


# ------------------------------------------------------------------------------------------------------------
# The end: errors and signals


def run_command(main) -> None:
    """Run a script's main() and exit: 0, or 2 with one line on stderr for what the user can fix.

    Other exceptions are bugs and show their traceback. In a world of several ranks an error ends its rank at
    once, so that torchrun ends the others, which may be waiting for this one in a collective: leaving the
    process group would wait for them.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # until here scripts/__init__.py had it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main() or 0
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code, message = explain(error)
        if isinstance(error, BrokenPipeError):  # else Python would write the rest once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        if not alone:
            let_others_speak(error, code)
        sys.stderr.write(message)  # in one piece: print() writes the end of the line by itself
        if not alone:
            leave(code)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code for an error that ends this process, and what to tell the user about it."""
    message = str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, f"{message or 'interrupted'}\n"
    if isinstance(error, torch.OutOfMemoryError):
        less = "fewer rows (--device-batch-size), a smaller model or --shard fsdp need less"
        message = f"{message.split('. ')[0]}; {less}"
    elif isinstance(error, OSError):  # what the system refuses: no room, no permission, no reader of a pipe
        if str(base_dir()) in message:
            message += "; NANOMUON_BASE_DIR=/folder/with/room helps"
    elif not isinstance(error, InputError):
        origin = getattr(error, "origin", None)  # see together()
        text = origin or "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return BUG, printable(text)
    return 2, f"error: {printable(' '.join(message.split()))}\n"


def let_others_speak(error: BaseException, code: int) -> None:
    """Wait a little with an error that another rank probably tells of, to be ended by torchrun meanwhile.

    Most errors come to all ranks: then the first of each node tells the user, and not eight of them. The end
    of another rank shows as a connection that is lost.
    """
    first_of_node = os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"
    lost_connection = isinstance(error, dist.DistError) or "by peer" in str(error)  # the words of gloo
    if lost_connection or not first_of_node:
        signal.signal(signal.SIGTERM, lambda number, frame: leave(code))  # by which torchrun ends us
        time.sleep(PATIENCE)


def leave(code: int) -> None:
    """End this process at once, without waiting for threads or for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def on_signals(handler, *numbers: signal.Signals) -> None:
    """Have handler(number, frame) called for these signals; SIGHUP stays ignored if it is: by nohup."""
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def exit_when_asked() -> None:
    """From here on SIGTERM raises SystemExit(STOPPED), and so does SIGHUP, except under nohup."""

    def stop(number, frame):
        raise SystemExit(STOPPED)

    on_signals(stop, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """SIGTERM, SIGHUP and Ctrl-C ask to save and stop after this step; a second Ctrl-C ends at once.

    Before the first step and after the last there is nothing to save: then they end this process at once. The
    first rank notes a stop in the file `stopped` of the run's folder, None for a launch that trains nothing.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.asked = False
        self.at_once = "before its first step"  # None while there is something to save
        on_signals(self._receive, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def _receive(self, number, frame):
        self.asked = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.at_once:
            # Not by an exception, which could be lost in what it interrupts, or come to nothing while this
            # rank leaves a group whose others are waiting
            os._exit(self.stopped(self.at_once))

    def steps_begin(self) -> None:
        """Call before the first step: from now on there is something to save before a stop."""
        self.at_once = None

    def steps_end(self) -> None:
        """Call when everything is on disk: a signal then has nothing to wait for."""
        self.at_once = "before its last evaluation"
        if self.asked:
            os._exit(self.stopped(self.at_once))

    def stopped(self, when: str) -> int:
        """Say and note that the run stops here. Returns its exit code: 75 in one process; 0 under torchrun,
        which takes anything else for a failure.
        """
        message = f"stopped {when}; the same command carries on\n"
        if os.environ.get("RANK", "0") == "0":
            os.write(1, message.encode())  # print() fails in a signal handler that has interrupted another
            with contextlib.suppress(OSError):  # if the disk is full the exit code has to do
                if self.folder:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    (self.folder / "stopped").unlink(missing_ok=True)  # a link would be written through
                    (self.folder / "stopped").write_text(message)
        alone = os.environ.get("WORLD_SIZE", "1") == "1" and not dist.is_torchelastic_launched()
        return STOPPED if alone else 0
