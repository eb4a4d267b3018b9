"""What a step dispatches on a GPU, from CUDA tensors that are faked (cuda_trace.py): few operations, few
collectives.

At depth 24 there are 196 parameters: 144 matrices, 14 tables of 32,768 rows, and 38 small vectors.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def trace(world, rank):
    return json_of("tests.cuda_trace", "--world", str(world), "--rank", str(rank))


def json_of(*command):
    command = [sys.executable, "-m", *command]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if result.returncode == 3:
        pytest.skip(f"this PyTorch takes no faked CUDA tensors: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "world, rank, collectives",
    # Two for each table and each of the two banks, which are cut into 3 and 4, one for all small vectors, one
    # for finiteness. With more than twice as many ranks as matrices, each matrix travels by itself.
    [(1, 0, 0), (8, 0, 2 * 14 + 2 * (3 + 4) + 2), (1024, 1023, 2 * 14 + 2 * 144 + 2)],
)
def test_a_step_at_depth_24_is_few_operations(world, rank, collectives):
    counts = trace(world, rank)
    assert counts["collectives"] == collectives
    assert counts["operations"] <= 400
    assert counts["from_host"] <= 2


@pytest.mark.slow
def test_most_gradients_are_sent_while_the_compiled_backward_goes_on():
    found = json_of("tests.overlap_trace", "--world", "8", "--depth", "24")
    assert found["collectives"] == 2 * 14 + 2 * (3 + 4) + 2
    early = [(done, launched) for done, launched in found["launches"] if done < 0.9]
    assert early[0][0] < 0.1, "the head's gradient, the first, waits for no other"
    assert early[-1][1] > 0.69  # the last graph has the token embedding and the first layers
    assert found["launches"][-1][1] == 1
