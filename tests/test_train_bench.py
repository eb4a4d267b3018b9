"""The step benchmark: its parts make up the step."""

import json
import resource
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from nanomuon.runtime import keep_freed_memory, read_json
from scripts import train_bench
from tests.texts import random_texts
from tests.training import arguments
from tests.worlds import FORKS


def test_the_table_of_a_step(base, environment, tmp_path, capsys):
    """Parts and floor of a small run, and the file with the numbers."""
    file = tmp_path / "step.json"
    records = "".join(json.dumps({"body": text}) + "\n" for text in random_texts(200))
    (tmp_path / "texts.jsonl").write_text(records)
    corpus = ["--corpus", f"path:{tmp_path}/texts.jsonl", "--text-field", "body"]
    train_bench.main([*arguments(base, "bench", 5), *corpus, "--rounds", "2", "--json", str(file)])
    result = read_json(file)
    table = result["milliseconds"]
    whole = table["whole step"]["median"]
    assert all(0 < table[part]["median"] <= whole for part in ("data", "forward", "backward", "optimizer"))
    assert table["floor"]["median"] > 0 and table["floor"]["times_floor"] == 1
    assert result["tokens_per_second"] == pytest.approx(256 / (whole / 1e3))
    assert "tokens/s" in capsys.readouterr().out
    assert not (base / "runs" / "bench").exists()


def page_faults():
    keep_freed_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):  # the heap grows a few times until one fits, aligned, into freed memory
        torch.ones(2**24)  # 16,384 pages; glibc keeps freed blocks of up to 32 MiB by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_is_used_again():
    # in a process of its own: other tests leave threads behind whose page faults would count
    with ProcessPoolExecutor(1, FORKS) as process:
        assert process.submit(page_faults).result() < 10 * 16_384
