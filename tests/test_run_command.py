"""How a launch of several ranks ends when one of them fails: soon, with one message, with its exit code."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nanomuon import hf_export, runtime
from nanomuon.runtime import BUG, Runtime
from tests.worlds import run_world

ROOT = Path(__file__).parent.parent

FAILURES = {  # kind: (exit code of the rank that fails, what the user sees, once)
    "input": (2, "error: no such thing: bring one\n"),
    "memory": (2, "error: CUDA out of memory; fewer rows (--device-batch-size), a smaller model or"),
    "bug": (BUG, "AssertionError: this cannot be\n"),
}


@pytest.mark.parametrize(
    "kind,place",
    [
        ("input", "alone"),
        pytest.param("memory", "alone", marks=pytest.mark.slow),
        pytest.param("bug", "alone", marks=pytest.mark.slow),
        pytest.param("input", "together", marks=pytest.mark.slow),
        pytest.param("bug", "together", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_ends_the_launch(kind, place):
    code, message = FAILURES[kind]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "tests.failing_rank", kind, place]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    ended = time.time()
    said, report = result.stderr.split("tests.failing_rank FAILED")
    assert result.returncode == 1
    assert said.count(message) == 1
    assert "by peer" not in said  # the other rank loses its connection, which is nothing to tell of
    # The traceback shows where it happened, also where the error came to all ranks
    assert ("in work_of\n    raise ERRORS[kind]\n" in said) == (kind == "bug")
    # torchrun tells of every rank: (rank, exit code)
    codes = dict(re.findall(r"rank      : (\d) .*\n  exitcode  : (-?\d+) ", report))
    assert codes["1"] == str(code)
    if place == "alone":  # the other one loses its connection, unless torchrun's signal comes first
        assert codes["0"] in (str(BUG), str(-signal.SIGTERM))
    else:
        assert codes["0"] == str(code)
    assert ended - float(result.stdout.split()[-1]) < 15


def patience(group, folder):
    """How long ranks wait for the first one: at the work of first_rank_first and of the exported model."""
    timeouts = []
    together = runtime.together

    def noted(work, group=None):
        backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
        timeouts.append(backend.options._timeout)
        return together(work, group)

    with pytest.MonkeyPatch.context() as patch:
        for module in (runtime, hf_export):
            patch.setattr(module, "together", noted)
        here = Runtime(torch.device("cuda"), torch.bfloat16, dist.get_rank(), dist.get_world_size())
        assert runtime.first_rank_first(lambda: "found", here) == "found"
        hf_export.write_weights(folder, torch.nn.Linear(1, 1))
    return timeouts


def test_ranks_wait_for_hours_where_only_the_first_one_works(tmp_path):
    """NCCL alone would end the run after 10 minutes."""
    for timeouts in run_world(4, patience, tmp_path):
        assert len(timeouts) == 2 and min(timeouts) > timedelta(hours=10)
