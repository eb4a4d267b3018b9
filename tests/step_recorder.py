"""What a step does to a GPU, written down on the way: operations, collectives, waits for the device.

Import it where CUDA tensors can be faked (fake_gpu.py).
"""

import collections
import contextlib
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that launch nothing on a GPU
VIEWS = ("view", "aten.t.", "transpose", "slice", "select", "expand", "squeeze", "alias", "detach", "split")
VIEWS += ("unbind", "permute", "chunk", "lift_fresh", "empty", "as_strided", "profiler", "prim.")
VIEWS += ("wait_tensor", "record_stream", "new_empty")
COPIES = ("aten.copy_.default", "aten._to_copy.default")
# A part of the operator's name in PyTorch: the collective
COLLECTIVES = {"reduce_scatter": "reduce_scatter", "allgather": "all_gather", "all_gather": "all_gather"}
COLLECTIVES |= {"alltoall": "all_to_all", "all_to_all": "all_to_all", "broadcast": "broadcast"}
COLLECTIVES |= {"allreduce": "all_reduce", "all_reduce": "all_reduce", "reduce": "reduce"}
SENT_AS = ("input_tensor", "input", "inputs", "tensors")  # the operators' names for what a rank sends
OURS = ("nanomuon", "scripts")  # the folders whose functions may be asked what they do
# What a function is told that reads a value of the device: that the ranks agree. All others read zeros
ANSWERS = {"optim.check_parameters": True}


@dataclass(frozen=True)
class Collective:
    asked_by: str  # the function of this repository, as "module.function"
    operation: str
    dtype: str
    device: str
    ranks: int
    sent: float  # bytes that a rank sends, by ring algorithms
    backwards: int  # compiled graphs whose backward was over when it was launched


@dataclass(frozen=True)
class Wait:
    """The host stops until the device has done all that it was given."""

    asked_by: str
    reason: str  # "read", "copy to the device", "copy to the host", "synchronize"


class CompiledCodeMode(TorchDispatchMode):
    """Operations inside of compiled graphs, of FSDP2 and of DTensors pass by as well."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls):
        return True  # else Dynamo would not compile


class StepRecorder(CompiledCodeMode):
    """While it is entered, every operation that reaches the dispatcher passes by; start() to finish() are
    written down.

    operations: {name: how many} on the device, views none, a `_foreach` one. compiled_calls: forwards,
    backwards and kernels that torch.compile has made one call, whatever is inside; backwards: those of them.
    from_host: copies to the device. graphs: what was compiled, from the first to the last start().

    A value that the host reads shows as a wait, and is answered: nothing computes here. What takes its shape
    from such a value raises.
    """

    def __init__(self):
        super().__init__()
        self.depth_in_graphs = 0
        self.graphs = 0
        self.start()
        self.finish()
        # A GPU gives a list in one copy, not number by number
        FakeTensor.tolist = lambda tensor: self.read_list(tensor)
        torch.cuda.synchronize = lambda device=None: self.wait("synchronize")
        torch.compile = functools.partial(torch.compile, backend=self.backend())

    def start(self):
        self.is_on = True
        self.operations = collections.Counter()
        self.compiled_calls = self.backwards = self.from_host = 0
        self.collectives, self.waits = [], []

    def finish(self):
        self.is_on = False

    # ---- compiled graphs

    def backend(self):
        """For torch.compile: Dynamo and AOTAutograd do their work, and the graph runs as it is."""
        return aot_autograd(
            fw_compiler=functools.partial(self.compiler, is_backward=False),
            bw_compiler=functools.partial(self.compiler, is_backward=True),
            keep_inference_input_mutations=True,
        )

    def compiler(self, graph, inputs, is_backward):
        self.graphs += 1

        def call(arguments):
            self.compiled_calls += 1
            self.depth_in_graphs += 1
            try:
                return graph(*arguments)
            finally:
                self.depth_in_graphs -= 1
                self.backwards += is_backward

        call._boxed_call = True
        return call

    @contextlib.contextmanager
    def outside_of_graphs(self):
        depth, self.depth_in_graphs = self.depth_in_graphs, 0
        try:
            yield
        finally:
            self.depth_in_graphs = depth

    # ---- operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self.read(args[0])
        if function.namespace == "nanomuon":
            return self.inside(function, args, kwargs)
        if str(function) == "auto_functionalized_v2" and args[0].namespace == "nanomuon":
            self.inside(args[0], (), arguments_of(kwargs))  # one that writes in place, in a compiled graph
        result = function(*args, **kwargs)
        if self.is_on:
            self.note(function, args, kwargs, result)
        return result

    def inside(self, function, args, kwargs):
        """A custom operator of nanomuon is one to the compiler, not to a GPU: what it does is recorded."""
        implementation = OPDEFS[function._schema.name]._init_fn
        try:
            with self, self.outside_of_graphs():
                return implementation(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            module = implementation.__module__.rpartition(".")[2]
            self.wait("read", f"{module}.{implementation.__name__}")
            return function(*args, **kwargs)

    def note(self, function, args, kwargs, result):
        name = str(function)
        if name.startswith(("c10d.", "_c10d_functional.")):
            if "wait_tensor" not in name:
                self.collectives.append(collective(name, function, args, kwargs, self.backwards))
            return
        tensors = tensors_in((*args, result))
        devices = {tensor.device.type for tensor in tensors}
        if name in COPIES and devices == {"cpu", "cuda"}:
            self.note_copy(name, args, kwargs, result)
            return
        if devices == {"cpu", "cuda"} and any(len(t.shape) for t in tensors if t.device.type == "cpu"):
            self.wait("copy to the device")  # of an index, say; a single number goes with the kernel
        if self.depth_in_graphs == 0 and devices != {"cpu"} and not is_view(name):
            self.operations[name] += 1

    def note_copy(self, name, args, kwargs, result):
        to_device = result.device.type == "cuda"
        self.from_host += to_device
        non_blocking = kwargs.get("non_blocking", False)
        if name == "aten.copy_.default" and len(args) > 2:
            non_blocking = args[2]
        if not non_blocking:
            self.wait("copy to the device" if to_device else "copy to the host")

    # ---- waits

    def wait(self, reason, function=None):
        if self.is_on:
            self.waits.append(Wait(function or asked_by(), reason))

    def read(self, tensor):
        if tensor.device.type == "cuda":
            self.wait("read")
        return ANSWERS.get(asked_by(), 0)

    def read_list(self, tensor):
        self.read(tensor)
        return [0.0] * len(tensor)


def tensors_in(values):
    """The tensors among these, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, list | tuple):
            found += tensors_in(value)
        elif isinstance(value, torch.Tensor):
            found.append(value)
    return found


def arguments_of(functionalized):
    """{argument: tensor} of the operator that auto_functionalized_v2 stands for, as Dynamo numbers them."""
    arguments = {name: value for name, value in functionalized.items() if not name.startswith("_")}
    for name, value in functionalized.items():
        if name.endswith("_base_index"):
            written = name.removeprefix("_").removesuffix("_base_index")
            arguments[written] = functionalized["_all_bases"][value]
    return arguments


@functools.cache
def is_view(name):
    return any(view in name for view in VIEWS)


def asked_by() -> str:
    """The innermost function of this repository that is running, as "module.function"."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.parent.name in OURS:
            return f"{file.stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "the trace"


def collective(name, function, args, kwargs, backwards) -> Collective:
    """What PyTorch's operator of this name sends."""
    given = dict(zip([argument.name for argument in function._schema.arguments], args, strict=False)) | kwargs
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    tensors = next(given[key] for key in SENT_AS if key in given)
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    operation = next(plain for part, plain in COLLECTIVES.items() if part in name)
    size, ranks = sum(tensor.nbytes for tensor in tensors), group.size()
    if operation == "all_reduce":
        sent = 2 * size * (ranks - 1) / ranks
    elif operation == "all_gather":
        sent = size * (ranks - 1)
    elif operation == "all_to_all":
        own_rows = given["input_split_sizes"][group.rank()]
        sent = size - own_rows * tensors[0][:1].nbytes
    else:
        sent = size * (ranks - 1) / ranks
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    devices = {tensor.device.type for tensor in tensors}
    places = "/".join(dtypes), "/".join(devices)
    return Collective(asked_by(), operation, *places, ranks, sent, backwards)
