"""The number of launches in a step of the optimizer, counted on meta tensors of a depth-24 model, may not
grow.
"""

import collections
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanomuon import optim, recipe
from nanomuon.gpt import GPT, GPTConfig

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

    def compiled_call(self, function, *key):
        """Replaces optim.compiled: counts a kernel as one call."""

        def call(*tensors, **options):
            self.compiled += 1
            self.inside += 1
            try:
                return function(*tensors, **options)
            finally:
                self.inside -= 1

        return call

    def start(self, world, received, *arguments, **options):
        """Replaces World.start."""
        self.collectives += world.size > 1
        return optim.Transfer(received)


@pytest.mark.parametrize("ranks, operations, compiled, collectives", [(1, 40, 22, 0), (8, 31, 13, 13)])
def test_a_step_at_depth_24_launches_no_more_than_it_did(
    ranks, operations, compiled, collectives, monkeypatch
):
    monkeypatch.delenv("NANOMUON_COMPILE", raising=False)
    launches = Launches()
    with torch.device("meta"):
        groups = recipe.param_groups(GPT(GPTConfig.from_depth(24, 32768, 2048)), batch=2**20, steps=5000)
    world = optim.World()
    object.__setattr__(world, "size", ranks)
    optimizer = optim.MuonAdamW(groups, compile=True, world=world)
    for _, param in optim.named_parameters(groups):
        param.grad = torch.empty_like(param)
    with (
        mock.patch.object(optim, "place_of_rows", lambda param, tensor, world: optim.Place(tensor)),
        mock.patch.object(optim, "compiled", launches.compiled_call),
        mock.patch.object(optim.World, "start", lambda *args, **kw: launches.start(*args, **kw)),
    ):
        optimizer.plan()
        with launches:
            optimizer.step()
    found = sum(launches.operations.values())

    assert found <= operations, launches.operations
    assert launches.compiled <= compiled
    assert launches.from_host <= 2, "the numbers of the groups, and which parameters have a gradient"
    assert launches.collectives <= collectives
