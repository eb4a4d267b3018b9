"""How often a training step and an evaluation read a number that the device has computed: on a GPU the host
then waits for everything launched before. The same lines read it on a CPU, and are counted there.
"""

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanomuon import dataloader
from nanomuon.qk_clip import watch_
from nanomuon.report import MetricsLog
from nanomuon.run import Run, bits_per_byte
from scripts import base_train
from tests.test_gpt import build
from tests.training import arguments

aten = torch.ops.aten
READS = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select)
INDEXING = (aten.index, aten.index_put_)


@contextlib.contextmanager
def recorded():
    """A list to which every wait is added."""
    events = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            by_mask = function.overloadpacket in INDEXING and any(  # the host must know the result's size
                index is not None and index.dtype == torch.bool for index in args[1]
            )
            if by_mask or function.overloadpacket in READS:
                events.append("wait")
            return function(*args, **(kwargs or {}))

    class Methods(TorchFunctionMode):
        """Methods that run no operation on a CPU."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function in (torch.Tensor.tolist, torch.Tensor.cpu):
                events.append("wait")
            return function(*args, **(kwargs or {}))

    with Operations(), Methods():
        yield events


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("options", ["", "--no-qk-norm --qk-clip 100 --dtype bfloat16"])
def test_a_step_and_an_evaluation_wait_once(base, monkeypatch, options):
    read = dataloader.read_shards

    def read_file(*arguments):  # safetensors reads a size from a tensor, on the host
        with _disable_current_modes():
            return read(*arguments)

    def note(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: events.append(name) or original(*arguments))

    monkeypatch.setattr(dataloader, "read_shards", read_file)
    monkeypatch.setattr(Run, "finish", lambda run: 0)  # sampling reads every token
    note(base_train, "set_hyperparameters")  # a step begins
    note(Run, "evaluate")
    note(MetricsLog, "log")
    name = f"waits{len(options)}"
    command = arguments(base, name, 3, "--eval-every", "2", "--save-every", "-1", *options.split())
    with recorded() as events:
        assert base_train.main(command) == 0
    step = ["set_hyperparameters", "wait", "log"]
    evaluation = ["evaluate", "wait", "log"]
    begin = events.index("set_hyperparameters")
    assert events[begin:][:12] == [*step, *step, *evaluation, *step]


def test_an_evaluation_by_the_training_forward_leaves_no_trace():
    model = build(qk_norm=False)
    watch_(model, 0.1)
    batches = list(torch.randint(97, (3, 2, 2, 16)))  # inputs and targets of each
    token_bytes = torch.randint(1, 9, (97,))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    value = bits_per_byte(model, batches, token_bytes, as_in_training=True)
    assert value == pytest.approx(bits_per_byte(model, batches, token_bytes), rel=1e-6)
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)  # the largest logits too
