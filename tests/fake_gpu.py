"""A GPU that is not there: CUDA tensors without memory, on a PyTorch built for CPUs or for CUDA.

    load_stub()        # before torch is imported
    import torch
    pretend_cuda()

From then on tensors made under a FakeTensorMode may be on "cuda": shapes, dtypes and branches are those of a
GPU, memory and numbers are not there.
"""

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

UNAVAILABLE = 3  # exit code where this PyTorch cannot be made to take such tensors


def load_stub() -> None:
    """Compile fake_cuda.cpp and load it before PyTorch, which then finds its hooks, and import PyTorch.

    Ends the process with UNAVAILABLE and the reason where they do not fit.
    """
    torch_folder = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    libraries = torch_folder / "lib"
    source = Path(__file__).with_name("fake_cuda.cpp")
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder) / "fake_cuda.so"
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", str(source)]
        command += ["-o", str(stub), f"-L{libraries}", "-lc10", "-ltorch_cpu"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
            for library in ("libc10.so", "libtorch_cpu.so"):
                ctypes.CDLL(str(libraries / library), ctypes.RTLD_GLOBAL)
            hooks = ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL)
        except (OSError, subprocess.CalledProcessError) as error:
            unavailable(getattr(error, "stderr", None) or str(error))
    import torch  # noqa: F401  a build for CUDA registers its guard now

    hooks.register_guard()


def unavailable(reason: str) -> None:
    print(reason.strip().splitlines()[0], file=sys.stderr)
    sys.exit(UNAVAILABLE)


class Event:
    """What has been recorded has happened: there is nothing to wait for."""

    def __init__(self, *args, **settings):
        pass

    def record(self, stream=None):
        return self

    def query(self):
        return True

    def wait(self, stream=None):
        pass

    def elapsed_time(self, later):
        return 1.0  # milliseconds


class Stream:
    """An order of work that nobody does."""

    stream_id, device_index, device_type = 0, 0, 1  # asked by FSDP2

    def __init__(self, *args, **settings):
        pass

    def record_event(self, event=None):
        return event or Event()

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def pretend_cuda() -> None:
    """Put answers in place of what a step asks of torch.cuda. Functions of their own: Dynamo tells them apart
    by identity.
    """
    import torch
    from torch._subclasses import fake_tensor

    cuda, the_stream = torch.cuda, Stream()
    cuda._lazy_init = lambda: None
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.get_device_capability = lambda *device: (9, 0)
    cuda.get_device_name = lambda *device: "NVIDIA H100 80GB HBM3"
    cuda.Stream, cuda.Event, torch.Event = Stream, Event, Event
    cuda.current_stream = lambda *device: the_stream
    cuda.stream = lambda stream: stream
    fake_tensor.init_gpu_context = lambda device: None  # it makes a tensor there, a real one


def pretend_h100() -> None:
    """What Inductor asks beside that: an H100, and no other device to switch to.

    After pretend_cuda() and before torch._dynamo is imported, which keeps these functions.
    """
    import torch

    properties = SimpleNamespace(
        name=torch.cuda.get_device_name(),
        major=9,
        minor=0,
        multi_processor_count=132,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        gcnArchName="",  # asked for, and AMD's
    )
    random_state = torch.get_rng_state()
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_properties = lambda *device: properties
    # Dynamo keeps it while it traces
    cuda.get_rng_state = lambda *device: random_state
    cuda.set_rng_state = lambda *state: None
    # Generated code makes the device current, and asks for the stream on which a kernel is launched
    cuda._exchange_device = lambda device: 0
    cuda._maybe_exchange_device = lambda device: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0
