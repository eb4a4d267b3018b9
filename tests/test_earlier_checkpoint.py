"""A checkpoint written before the optimizer's pieces of work were built as they are now goes on as it would
have.

tests/data/earlier_checkpoint was written at commit 1897eef by two ranks, after three steps of the training
below; `after_6_steps` holds the parameters that the same two ranks had three steps later.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nanomuon import checkpoint
from nanomuon.optim import DistMuonAdamW
from tests.reference import distance
from tests.worlds import run_world

FOLDER = Path(__file__).parent / "data" / "earlier_checkpoint"
# matrices with a transpose among them, experts, a convolution, a fused matrix; a table that was cut by rows
SHAPES = {
    "a": (16, 16),
    "b": (24, 12),
    "c": (12, 24),
    "experts": (3, 8, 6),
    "conv": (8, 3, 2, 2),
    "fused": (12, 8),
    "table": (260, 5),
    "small": (7, 4),
    "scalar": (),
}
MUON = dict(kind="muon", lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.1)
ADAMW = dict(kind="adamw", lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def group(self, hyperparameters, *names):
        return dict(hyperparameters, params=[getattr(self, name) for name in names], names=list(names))

    def groups(self):
        return [
            self.group(MUON, "a", "b", "c", "experts", "conv"),
            self.group(dict(MUON, split=(8, 4)), "fused"),
            self.group(ADAMW, "table", "small", "scalar"),
        ]


def set_gradients(net, step):
    for i, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(1000 * step + i)
        getattr(net, name).grad = torch.randn(shape, generator=generator)


def three_more_steps(group, run_dir):
    net = Net()
    optimizer = DistMuonAdamW(net.groups(), group)
    meta = checkpoint.load(run_dir / "checkpoints" / "step_3", net, optimizer)
    assert meta == {"step": 3}
    assert optimizer.state[net.scalar]["step"] == 3
    for step in range(3, 6):
        set_gradients(net, step)
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "0")


def test_it_is_found_undamaged():
    assert checkpoint.find(FOLDER).name == "step_3"


@pytest.mark.parametrize("size", [1, 4])
def test_it_goes_on_with_the_parameters_it_would_have_had(size):
    expected = load_file(FOLDER / "after_6_steps.safetensors")
    if size == 1:
        results = [three_more_steps(None, FOLDER)]
    else:
        results = run_world(size, three_more_steps, FOLDER)
    for params in results:
        for name, value in expected.items():
            assert distance(params[name], value) < 1e-5, name
