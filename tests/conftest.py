"""Fixtures for all test files."""

import functools
import os
import signal

import pytest

from tests.training import in_brief, write_corpus

# gloo's threads poll while another thread holds a connection's lock, for milliseconds if the kernel has
# preempted that thread to wake up a process. Batch processes do not preempt each other: an all_reduce of 4
# processes on 2 cores takes 2 ms instead of 6
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Test tensors are small: a second thread costs more than it gains, most of all on a busy machine
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base folder for whole training runs, with a corpus in `texts`."""
    folder = tmp_path_factory.mktemp("base")
    write_corpus(folder / "texts")
    return folder


@pytest.fixture
def eager(monkeypatch):
    """Nothing is compiled, as in the worlds."""
    monkeypatch.setenv("NANOMUON_COMPILE", "0")


@pytest.fixture
def environment(base, eager, monkeypatch):
    """Runs write to `base`, with short reports (`in_brief`), uncompiled, on one thread per process."""
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(base))
    in_brief(monkeypatch.setattr)


@pytest.fixture
def handlers():
    """Restores the handlers of signals."""
    numbers = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Activated:
    """A stand-in for what PyTorch stores while a FlashAttention is active."""

    def remove(self):
        pass


@pytest.fixture
def installed(monkeypatch):
    """installed("FA4"): the FlashAttentions that can be activated, in PyTorch's own registry. Others raise
    what PyTorch's own functions raise. trial: replaces `train_with_a_window`.
    """
    import torch  # after OMP_NUM_THREADS is set
    from torch.nn.attention import _registry

    def pretend(*names, missing=ModuleNotFoundError, trial=id):
        def register(name):
            if name not in names:
                raise missing(f"no {name}")
            return Activated()

        monkeypatch.setattr("nanomuon.attention.train_with_a_window", trial)
        for name in ("FA3", "FA4"):
            monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, functools.partial(register, name))

    yield pretend
    if torch.nn.attention.current_flash_attention_impl():
        torch.nn.attention.restore_flash_attention_impl()
