"""What Inductor and Triton make of code for a GPU, written down: kernels, matrix products, memory.

Import it where CUDA tensors can be faked (fake_gpu.py, with pretend_h100) and Triton is installed. Inductor
then compiles and executes its code for the time of the process, without launching a kernel.
"""

import collections
import weakref
from types import SimpleNamespace

import torch
import triton
from torch._inductor import async_compile, compile_fx, config
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import triton_helpers
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget

from tests.step_recorder import CompiledCodeMode

SM_90 = GPUTarget("cuda", 90, 32)  # capability 9.0, 32 threads in a warp
# Operations that launch nothing on a GPU
VIEWS = ("view", "aten.t.", "transpose", "slice", "select", "expand", "squeeze", "alias", "detach", "split")
VIEWS += ("unbind", "permute", "empty", "as_strided", "prim.", "set_")
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")


class KernelRecorder(CompiledCodeMode):
    """While it is entered, kernels and operations of compiled code are written down.

    launches: {kernel of Triton: how often}. products: matrix products, which are PyTorch's. others:
    {operation: how often} of those that are PyTorch's, too. peak: bytes, the most at a time of what was made
    while it was entered; what operations of PyTorch use inside does not count.
    """

    def __init__(self):
        super().__init__()
        self.live = 0
        self.start()
        compile_for_sm_90(self)

    def start(self):
        self.launches, self.others = collections.Counter(), collections.Counter()
        self.products = 0
        self.peak = self.live
        self.storages = weakref.WeakSet()  # those that have been seen

    def found(self) -> dict:
        return {
            "kernels": dict(self.launches),
            "products": self.products,
            "others": dict(self.others),
            "peak": self.peak,
        }

    def launch(self, name):
        self.launches[name] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.storages.update(storages_in((args, kwargs)))  # made by somebody else
        result = function(*args, **kwargs)
        for storage in storages_in(result):
            if storage not in self.storages:
                self.made(storage)
        name = str(function)
        if name.startswith(PRODUCTS):
            self.products += 1
        elif not any(view in name for view in VIEWS):
            self.others[name] += 1
        return result

    def made(self, storage):
        self.storages.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.freed, storage.nbytes())

    def freed(self, size):
        self.live -= size


def storages_in(values):
    """The memory of the CUDA tensors among these."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cuda"]


def compile_for_sm_90(recorder: KernelRecorder) -> None:
    """Put in place of Inductor's and Triton's functions what needs no GPU."""
    answer_triton()
    leave_out_what_computes()
    write_code_for_faked_tensors()

    def compile_kernel(self, name, source, device_str="cuda"):
        """Instead of AsyncCompile.triton, which also loads the kernel to a GPU."""
        kernel = async_compile._load_triton_kernel_from_source(name, source)
        try:
            kernel.precompile(warm_cache_only=True)
        except Exception as error:  # whatever Triton, LLVM and ptxas raise
            raise RuntimeError(f"{name} does not compile for sm_90: {error}") from error
        for result in kernel.compile_results:  # of each configuration among which a GPU would measure
            is_for_sm_90 = result.kernel.metadata.target == SM_90
            if not is_for_sm_90 or not result.kernel.asm["cubin"]:
                raise RuntimeError(f"{name} has no code for sm_90")
        return SimpleNamespace(run=lambda *args, **settings: recorder.launch(name))

    async_compile.AsyncCompile.triton = compile_kernel


def answer_triton() -> None:
    """Triton compiles for the device that its driver names, and its own drivers ask CUDA for it."""

    class Driver:
        def get_current_target(self):
            return SM_90

    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None  # it would look for a driver that finds a GPU


def leave_out_what_computes() -> None:
    """Inductor looks for what it can simplify by computing with tensors on the device, which are real ones
    there.
    """
    config.joint_graph_constant_folding = False
    # It would trace patterns to search for, those of attention and of products to be padded among them
    joint_graph.lazy_init = lambda device: None


def write_code_for_faked_tensors() -> None:
    """The code around the kernels gets faked tensors, which have no address and are not known to C++."""
    config.compile_threads = 1  # it would start processes for kernels, which are compiled in this one
    config.use_static_triton_launcher = False  # it keeps no more of a kernel than is needed to launch it
    # Copies of inputs whose addresses are not aligned
    compile_fx.get_input_idxs_to_check = lambda inputs, static: ()
    # Checks in C++ of shapes and addresses
    config.size_asserts = config.alignment_asserts = False
    guards = torch._C._dynamo.guards  # where generated code has these from
    guards._empty_strided_cuda = empty_strided
    guards._reinterpret_tensor = reinterpret


def empty_strided(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def reinterpret(tensor, size, stride, offset=0):
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
