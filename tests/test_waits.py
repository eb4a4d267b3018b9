"""How often a training step and an evaluation ask for a number that the device has computed: on a GPU the
host then waits for all that was launched before. Counted in runs on the CPU, where the same lines ask.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanomuon import dataloader
from nanomuon.evaluate import bits_per_byte
from nanomuon.report import MetricsLog
from nanomuon.run import Run
from scripts import base_train
from tests.test_gpt import build
from tests.training import arguments

aten = torch.ops.aten
READS = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
)
INDEXING = (aten.index.Tensor, aten.index_put_.default)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in READS:
            self.waits += 1
        elif function in INDEXING:  # by a mask: how many it selects has to be known
            self.waits += any(index is not None and index.dtype == torch.bool for index in args[1])
        return function(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Those that no operation stands for on a CPU."""

    def __init__(self):
        super().__init__()
        self.waits = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.waits += function in (torch.Tensor.tolist, torch.Tensor.cpu)
        return function(*args, **(kwargs or {}))


class Waits:
    """How many there were between start() and stop()."""

    def start(self):
        self.modes = Operations(), Methods()
        for mode in self.modes:
            mode.__enter__()

    def stop(self) -> int:
        for mode in reversed(self.modes):
            mode.__exit__(None, None, None)
        return sum(mode.waits for mode in self.modes)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.item(),
        lambda x: bool(x > 0),
        lambda x: x.tolist(),
        lambda x: x.expand(3)[x.expand(3) > 0],
        lambda x: x.view(1).nonzero(),
    ],
)
def test_every_way_of_asking_counts_once(ask):
    x, waits = torch.ones(()), Waits()
    waits.start()
    ask(x + 1)
    assert waits.stop() == 1


SGD_FILE = """
import torch
def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)
"""


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    "name,options,expected",
    [
        ("ours", (), 1),
        ("experts_and_clip", "--experts 4 --no-qk-norm --qk-clip 100 --dtype bfloat16".split(), 1),
        ("sgd", ("--optimizer-file", "FILE"), 2),  # it must not be called where the loss is not finite
    ],
)
def test_a_step_and_an_evaluation_wait_once(base, monkeypatch, name, options, expected):
    file = base / "sgd_that_waits.py"
    file.write_text(SGD_FILE)
    options = [str(file) if option == "FILE" else option for option in options]
    waits, steps, evaluations = Waits(), [], []
    begin, end, evaluate = base_train.set_hyperparameters, MetricsLog.log, Run.evaluate

    def count_from_here(run):
        waits.start()
        return begin(run)

    def count_to_here(log, row):
        if "train_loss" in row:
            steps.append(waits.stop())
        end(log, row)

    def count_evaluation(run, max_tokens):
        waits.start()
        value = evaluate(run, max_tokens)
        evaluations.append(waits.stop())
        return value

    def read_file(*arguments):  # safetensors makes a tensor of it and reads its size from that, on the host
        with _disable_current_modes():
            return read(*arguments)

    read = dataloader.read_shards
    monkeypatch.setattr(dataloader, "read_shards", read_file)
    monkeypatch.setattr(base_train, "set_hyperparameters", count_from_here)
    monkeypatch.setattr(MetricsLog, "log", count_to_here)
    monkeypatch.setattr(Run, "evaluate", count_evaluation)
    monkeypatch.setattr(Run, "finish", lambda run: 0)  # samples ask for every token
    command = arguments(base, f"waits_{name}", 3, "--eval-every", "2", "--save-every", "-1", *options)
    assert base_train.main(command) == 0
    assert evaluations == [1]
    assert steps == [expected] * 3


def test_an_evaluation_by_the_training_forward_leaves_no_trace():
    model = build(experts=4)
    batches = [(torch.randint(97, (2, 16)), torch.randint(97, (2, 16))) for _ in range(3)]
    batches[1][1][:] = -1  # padding only
    token_bytes = torch.randint(1, 9, (97,))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    value = bits_per_byte(model, batches, token_bytes, as_in_training=True)
    assert value == pytest.approx(bits_per_byte(model, batches, token_bytes), rel=1e-6)
    assert any("load" in name for name in before)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
