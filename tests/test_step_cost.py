"""What a step of the optimizer launches, counted on meta tensors of a depth-24 model: it may not grow."""

import collections
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanomuon import footprint, optim
from nanomuon.gpt import GPTConfig

# Operations that launch nothing on a GPU
VIEWS = ("view", "aten.t.", "transpose", "slice", "select", "expand", "squeeze", "alias", "detach", "split")
VIEWS += ("unbind", "permute", "empty", "chunk", "lift_fresh", "scalar_tensor", "prim.", "profiler")


class Launches(TorchDispatchMode):
    """Counts operations outside of compiled kernels, and copies from the host to the device."""

    def __init__(self):
        super().__init__()
        self.operations = collections.Counter()
        self.from_host = self.compiled = self.collectives = self.inside = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.inside:
            return result
        given = [tensor for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)]
        on_meta = [tensor for tensor in tree_leaves(result) if torch.is_tensor(tensor) and tensor.is_meta]
        if on_meta and given and all(tensor.device.type == "cpu" for tensor in given):
            self.from_host += 1
        elif on_meta and not any(view in str(function) for view in VIEWS):
            self.operations[str(function)] += 1
        return result

    def call_kernel(self, compiles, kernel, *tensors, **options):
        """Instead of optim.call_kernel: large tensors go to a compiled kernel, which is one call."""
        is_compiled = tensors[0].numel() >= optim.COMPILE_FROM
        self.compiled += is_compiled
        self.inside += is_compiled
        try:
            return kernel(*tensors, **options)
        finally:
            self.inside -= is_compiled

    def start(self, world, received, *arguments, **options):
        """Instead of World.start."""
        self.collectives += world.size > 1
        return optim.Transfer(received)


@pytest.mark.parametrize("ranks, collectives", [(1, 0), (8, 44)])
def test_a_step_at_depth_24_launches_no_more_than_it_did(ranks, collectives):
    launches = Launches()
    with mock.patch.object(optim, "call_kernel", launches.call_kernel):
        optimizer = footprint.RankPlan(
            GPTConfig.from_depth(24, 32768, 2048), footprint.Layout(ranks)
        ).optimizer
    for _, param, _ in optim.named_parameters(optimizer.param_groups):
        param.grad = torch.empty_like(param)
    with launches, mock.patch.object(optim.World, "start", lambda *args, **kw: launches.start(*args, **kw)):
        optimizer.step()
    assert sum(launches.operations.values()) <= 250, launches.operations
    assert launches.compiled <= 40
    assert launches.from_host <= 2, "the numbers of the groups, and which parameters have a gradient"
    assert launches.collectives <= collectives
