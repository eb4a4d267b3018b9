"""One optimizer step on CUDA tensors that are faked: what it dispatches, as JSON. No GPU, no memory, seconds.

    python -m tests.cuda_trace --world 8 --rank 0 --depth 24

Shapes, dtypes and branches are those of a GPU; anything that would wait for a value of the device raises.
Counted are operations that reach the dispatcher (a compiled kernel and a `_foreach` are one each, views
none), copies from the host, and collectives. Exit code 3, and the reason, where this PyTorch cannot be made
to take such tensors.
"""

import argparse
import collections
import contextlib
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

VIEWS = ("view", "aten.t.", "transpose", "slice", "select", "expand", "squeeze", "alias", "detach", "split")
VIEWS += ("unbind", "permute", "chunk", "lift_fresh", "empty", "as_strided", "profiler", "prim.")
UNAVAILABLE = 3


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=1, help="ranks, all but one of them imagined")
    parser.add_argument("--rank", type=int, default=0, help="which of them this is")
    parser.add_argument("--depth", type=int, default=24, help="of the model")
    args = parser.parse_args()
    os.environ["NANOMUON_COMPILE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        load_stub(Path(folder))
    print(json.dumps(trace(args.world, args.rank, args.depth)))


def load_stub(folder):
    """Compile fake_cuda.cpp and load it before PyTorch, which then finds its hooks."""
    torch_folder = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    libraries, stub = torch_folder / "lib", folder / "fake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.cpp")
    command = [
        "g++",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-I{torch_folder}/include",
        str(source),
        "-o",
        str(stub),
    ]
    try:
        subprocess.run(
            [*command, f"-L{libraries}", "-lc10", "-ltorch_cpu"], check=True, capture_output=True, text=True
        )
        for library in (libraries / "libc10.so", libraries / "libtorch_cpu.so", stub):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        print(reason.strip().splitlines()[0], file=sys.stderr)
        sys.exit(UNAVAILABLE)


def pretend_cuda(torch):
    """What Python asks of torch.cuda on the way. Functions of their own: Dynamo tells them apart by
    identity.
    """
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_capability = lambda *device: (9, 0)


def trace(world, rank, depth):
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

    pretend_cuda(torch)
    if world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    from nanomuon import optim, recipe
    from nanomuon.gpt import GPT, GPTConfig
    from nanomuon.user_file import make_optimizer

    make_mesh = optim.World.mesh

    def real_mesh(*args):  # of ranks, not of numbers on a device
        with unset_fake_temporarily():
            return make_mesh(*args)

    optim.World.mesh = real_mesh
    # Imagined ranks have nothing to compare; and there is no stream to record an event on
    optim.Agreement.check_parameters = lambda agreement, groups: None
    optim.Agreement.notice = lambda agreement, difference: None
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor):
        return FakeTensor(mode, tensor.detach(), torch.device("cuda", 0))

    with torch.device("meta"):
        model = GPT(GPTConfig.from_depth(depth, 32768, 2048), torch.bfloat16)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = torch.nn.Parameter(fake(param))
    with mode:
        optimizer = make_optimizer(recipe.param_groups, model, 2**19, world)
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        with counting(torch, optim) as counts:
            optimizer.step()
    counts["world"], counts["rank"], counts["depth"] = world, rank, depth
    return counts


@contextlib.contextmanager
def counting(torch, optim):
    """Count into the dict that this gives, with compiled kernels standing for themselves."""
    from torch.utils._python_dispatch import TorchDispatchMode

    operations, totals = collections.Counter(), {"compiled": 0, "from_host": 0, "collectives": 0}
    inside = []  # a compiled kernel

    def run(kernel, *tensors, **arguments):
        totals["compiled"] += tensors[0].numel() >= optim.COMPILE_FROM
        inside.append(tensors[0].numel() >= optim.COMPILE_FROM)
        try:
            return kernel(*tensors, **arguments)
        finally:
            inside.pop()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name, result = str(function), function(*args, **(kwargs or {}))
            if not any(inside):
                self.count(name, args, result)
            return result

        def count(self, name, args, result):
            tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
            devices = {tensor.device.type for tensor in tensors}
            if name.startswith("c10d."):
                totals["collectives"] += 1
            elif devices == {"cpu", "cuda"} and "copy" in name:
                totals["from_host"] += 1
            elif devices != {"cpu"} and not any(view in name for view in VIEWS):
                operations[name] += 1

    original, optim.run = optim.run, run
    try:
        counts = {}
        with Count():
            yield counts
    finally:
        optim.run = original
    counts.update(totals, operations=sum(operations.values()) + totals["compiled"])
    counts["most_common"] = dict(operations.most_common(12))


if __name__ == "__main__":
    main()
