"""That compiled code has kernels for a GPU, few of them, and memory that is bounded (cuda_compile.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_compile import ROWS, SEQ_LEN, VOCABULARY

ROOT = Path(__file__).parent.parent
PIECES = {
    "AdamW",
    "momentum 768 x 768",
    "direction 768 x 768, plain",
    "update 768 x 768",
    "momentum 3072 x 768",
    "direction 3072 x 768, Gram",
    "update 3072 x 768",
    "loss, forward",
    "loss, backward",
    "model of 2, varlen, forward",
    "model of 2, varlen, backward",
}
COMPUTE_BYTES = 2  # of bfloat16


@pytest.fixture(scope="module")
def compiled():
    """{piece: what cuda_compile.py found}."""
    command = [sys.executable, "-m", "tests.cuda_compile", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    if result.returncode == 3:
        pytest.skip(f"nothing compiles for a GPU here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    return {found["piece"]: found for found in map(json.loads, result.stdout.splitlines())}


@pytest.mark.slow
def test_every_piece_compiles_for_sm_90(compiled):
    assert compiled.keys() == PIECES
    for name, found in compiled.items():
        assert found["kernels"], name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "momentum", "update"])
def test_what_is_elementwise_in_the_optimizer_is_one_kernel(compiled, name):
    pieces = [found for piece, found in compiled.items() if piece.startswith(name)]
    assert pieces
    for found in pieces:
        launches = sum(found["kernels"].values())
        assert (launches, found["products"], found["others"]) == (1, 0, {})


@pytest.mark.slow
def test_a_direction_is_its_products_and_a_few_kernels(compiled):
    """Plain: five steps of three products. Gram: R and X twice, around the restart, and 14 on R."""
    plain, gram = compiled["direction 768 x 768, plain"], compiled["direction 3072 x 768, Gram"]
    assert (plain["products"], gram["products"]) == (5 * 3, 2 * 2 + 14)
    assert sum(plain["kernels"].values()) <= 5
    assert sum(gram["kernels"].values()) <= 7


@pytest.mark.slow
def test_the_loss_has_no_logits_of_all_tokens(compiled):
    logits = ROWS * SEQ_LEN * VOCABULARY * COMPUTE_BYTES
    assert compiled["loss, forward"]["peak"] < logits / 2
