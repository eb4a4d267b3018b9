"""Fixtures for all test files."""

import pytest
import torch

from tests.training import write_corpus

# Test tensors are small: a second thread costs more than it gains, most of all on a busy machine
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base folder for whole training runs, with a corpus in `texts`."""
    folder = tmp_path_factory.mktemp("base")
    write_corpus(folder / "texts")
    return folder


@pytest.fixture
def environment(base, monkeypatch):
    """Runs write to `base`, without compiling, on one thread per process."""
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(base))
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
