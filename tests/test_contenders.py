"""Every file of contenders/ trains the same on any number of ranks, in pieces, and after a break; and the
mathematics of those that have some is checked against SVDs and closed forms.
"""

import ast
import functools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor

from nanomuon import recipe
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.race_contenders import Contender
from nanomuon.user_file import load_recipe, make_optimizer
from tests.test_optim_dist import assert_close, assert_same_everywhere
from tests.worlds import run_world

FOLDER = Path(__file__).parent.parent / "contenders"
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))
STEPS, BREAK = 4, 2
# What is slow by default happens within these few steps
OPTIONS = {"soap": {"every": 2}, "soap_muon": {"every": 2}, "ema_nesterov": {"gamma": 0.5}}
SCHEDULE_OPTIONS = {"tail_average": {"start": 0.2, "tau": 0.5}}
TOLERANCE = 1e-8


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """As in the worlds, which do not compile and have one thread."""
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(experts):
    """Square, tall and wide matrices, batches of them, and those that start at zero; in float64."""
    config = GPTConfig(
        vocab_size=24, seq_len=8, depth=2, width=8, heads=2, kv_heads=1, experts=experts, experts_per_token=1
    )
    with torch.device("meta"):
        model = GPT(config)
    model = model.to_empty(device="cpu").double()
    model.init_weights(0)
    return model


def cut_over(model, mesh):
    """Every parameter in pieces by rows, as FSDP2 has them."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            piece = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, torch.nn.Parameter(piece))


def local_gradient(number, shape, step, rank):
    generator = torch.Generator().manual_seed(10_000 * number + 100 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def mean_gradient(number, shape, step, ranks):
    return sum(local_gradient(number, shape, step, rank) for rank in range(ranks)) / ranks


class Training:
    """A contender at work on a tiny model, with gradients that are made up."""

    def __init__(self, file, experts, group=None, in_pieces=False):
        self.model = tiny_model(experts)
        self.mesh = None
        if in_pieces:
            self.mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
            cut_over(self.model, self.mesh)
        self.params = list(self.model.parameters())
        build, schedule = load_recipe(FOLDER / f"{file}.py")
        self.schedule = functools.partial(schedule or recipe.schedule, **SCHEDULE_OPTIONS.get(file, {}))
        world_size = dist.get_world_size(group) if group else 1
        with mock.patch.object(dist, "group", SimpleNamespace(WORLD=group)):  # what optim takes by default
            build = functools.partial(build, **OPTIONS.get(file, {}))
            self.optimizer = make_optimizer(build, self.model, 4096, world_size)
        self.built = [dict(each) for each in self.optimizer.param_groups]

    def run(self, steps, gradient):
        """gradient(number, shape, step): of a parameter, whole."""
        for step in steps:
            for each, built in zip(self.optimizer.param_groups, self.built, strict=True):
                each.update(self.schedule(built, step, STEPS))
            for number, param in enumerate(self.params):
                param.grad = gradient(number, param.shape, step)
                if self.mesh:
                    param.grad = distribute_tensor(param.grad, self.mesh, [Shard(0)], src_data_rank=None)
            self.optimizer.step()
        return self

    def result(self):
        weights = []
        for param in self.params:
            weights.append(param.full_tensor().detach() if isinstance(param, DTensor) else param.detach())
        return weights, self.optimizer.full_state_dict()["state"]


def on_ranks(group, file):
    """Replicated parameters, where every rank has gradients of its own; then those of experts, in pieces."""
    rank = dist.get_rank(group)
    replicated = Training(file, 0, group)
    replicated.run(range(STEPS), lambda number, shape, step: local_gradient(number, shape, step, rank))
    in_pieces = Training(file, 2, group, in_pieces=True)
    in_pieces.run(range(STEPS), lambda number, shape, step: mean_gradient(number, shape, step, 3))
    return replicated.result(), in_pieces.result()


def in_one_process(file, experts, steps):
    training = Training(file, experts)
    return training.run(steps, lambda number, shape, step: mean_gradient(number, shape, step, 3))


@pytest.mark.parametrize("file", FILES)
def test_ranks_pieces_and_breaks_make_no_difference(file):
    expected = in_one_process(file, 0, range(STEPS)).result()
    assert all(weights.isfinite().all() for weights in expected[0])
    before = list(tiny_model(0).parameters())
    moved = [not torch.equal(p, q) for p, q in zip(before, expected[0], strict=True)]
    assert all(moved)

    replicated, in_pieces = zip(*run_world(3, on_ranks, file), strict=True)
    assert_same_everywhere(replicated)
    assert_close(replicated[0], expected, TOLERANCE)
    assert_same_everywhere(in_pieces)
    assert_close(in_pieces[0], in_one_process(file, 2, range(STEPS)).result(), TOLERANCE)

    first = in_one_process(file, 0, range(BREAK))
    second = Training(file, 0)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.full_state_dict(), hyperparameters="keep")
    second.run(range(BREAK, STEPS), lambda number, shape, step: mean_gradient(number, shape, step, 3))
    assert_same_everywhere([expected, second.result()])


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_short_says_where_it_is_from_and_is_a_contender(file):
    text = (FOLDER / f"{file}.py").read_text()
    assert len(text.splitlines()) <= 80
    assert "Source:" in ast.get_docstring(ast.parse(text))
    contender = Contender(f"{FOLDER / file}.py:lr_scale=0.5")
    _, built, _ = contender.prepare(tiny_model(0), {"rows": 4, "steps": 10})
    _, unscaled, _ = Contender(f"{FOLDER / file}.py").prepare(tiny_model(0), {"rows": 4, "steps": 10})
    assert [group["lr"] for group in built] == [group["lr"] / 2 for group in unscaled]


def test_a_gradient_that_is_not_finite_leaves_state_and_weights_of_directions_as_they_were():
    for file in FILES:
        training = in_one_process(file, 0, range(2))
        if file in ("ema_nesterov", "tail_average"):
            continue  # means over steps: a step that is left out counts as one that went nowhere
        before = training.result()
        weights = [weight.clone() for weight in before[0]]
        training.params[0].grad.view(-1)[0] = torch.inf
        training.optimizer.step()
        after = training.result()
        for p, q in zip(weights, after[0], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
        assert_close(after, (weights, before[1]), 1e-12)
