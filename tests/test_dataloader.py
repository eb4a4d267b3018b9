"""The loader: one global order of rows, whoever reads it and from wherever."""

import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanomuon import dataloader, shards
from nanomuon.corpus import is_validation, open_corpus
from nanomuon.dataloader import TrainLoader, cut_documents, fill, pack_rows, validation_batches
from nanomuon.runtime import InputError
from nanomuon.shards import prepare, read_manifest
from tests.texts import TOKENIZER, random_texts, write_corpus

T, ROWS = 64, 24  # sequence length, rows per step
TEXTS = random_texts(700, longest=400)
TRAINING = [TOKENIZER.encode(text) for text in TEXTS if not is_validation(text)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards of TEXTS: five training shards, in windows of two."""
    tmp_path = tmp_path_factory.mktemp("loader")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
        patch.setattr(shards, "SHARD_BYTES", 40_000)
        yield prepare(open_corpus(write_corpus(tmp_path / "texts", TEXTS)), tokenizer=TOKENIZER)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(shards, "WINDOW", 2)
    monkeypatch.setattr(dataloader, "WINDOW", 2)


def rows_of(batch):
    """The rows (rows, T + 1) that inputs and targets were made of."""
    inputs, targets = batch
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    return torch.cat([inputs, targets[:, -1:]], dim=1)


def steps(folder, count, batch=ROWS, world_size=1, state=None):
    """The rows (ROWS, T + 1) of `count` global batches, put together from all micro-batches."""
    loaders = [
        TrainLoader(folder, T, ROWS, batch, rank, world_size, state=state) for rank in range(world_size)
    ]
    found = []
    for _ in range(count):
        micro_batches = [
            rows_of(next(loader)) for _ in range(ROWS // (batch * world_size)) for loader in loaders
        ]
        found.append(torch.cat(micro_batches))
    return torch.stack(found)


def epoch(folder, number, **options):
    """All rows of an epoch, lists of T + 1 tokens."""
    loader = TrainLoader(folder, T, 1, 1, state={"epoch": number, "window": 0, "row": 0}, **options)
    rows = []
    while True:
        row = rows_of(next(loader))[0].tolist()
        if loader.state_dict()["epoch"] > number:
            return rows
        rows.append(row)


def steps_of_an_epoch(folder):
    return len(epoch(folder, 0)) // ROWS


def test_same_global_batches_whatever_the_ranks_and_micro_batches(folder):
    count = steps_of_an_epoch(folder) + 3
    expected = steps(folder, count)
    assert len(read_manifest(folder).train) == 5
    assert len({step.tobytes() for step in expected.numpy()}) == count
    for world_size in (1, 2, 3, 4, 8):
        for batch in {1, ROWS // world_size // 2, ROWS // world_size} - {0}:
            assert torch.equal(steps(folder, count, batch, world_size), expected), (world_size, batch)


def test_resume_at_every_step_and_on_other_worlds(folder):
    count = steps_of_an_epoch(folder) + 2
    expected = steps(folder, count)
    loader = TrainLoader(folder, T, ROWS, 3, rank=1, world_size=4)
    for step in range(count):
        state = loader.state_dict()
        assert list(state) == ["epoch", "window", "row"] and all(
            type(value) is int for value in state.values()
        )
        world_size, batch = [(1, ROWS), (2, 4), (3, 8), (8, 1)][step % 4]
        left = min(2, count - step)
        assert torch.equal(steps(folder, left, batch, world_size, state), expected[step : step + left])
        half = rows_of(next(loader))
        assert torch.equal(half, expected[step, 3:6])
        # In the middle of a step
        middle = TrainLoader(folder, T, ROWS, 3, rank=0, world_size=4, state=loader.state_dict())
        assert torch.equal(rows_of(next(middle)), expected[step, 12:15])
        next(loader)
    assert state["epoch"] == 1


def test_epochs_hold_all_text_but_a_crop_in_new_orders(folder):
    first, second = epoch(folder, 0), epoch(folder, 1)
    loader = TrainLoader(folder, T, 1, 1)
    assert [rows_of(next(loader))[0].tolist() for _ in first + second] == first + second
    all_tokens = Counter(token for ids in TRAINING for token in ids)
    for rows in (first, second):
        tokens = Counter(token for row in rows for token in row if token != TOKENIZER.bos_id)
        assert tokens <= all_tokens and all_tokens.total() - tokens.total() < 3 * (T + 1)  # three windows
        assert all(row[0] == TOKENIZER.bos_id for row in rows)
    # rows come in another order, and documents meet in other rows
    assert sum(row == other for row, other in zip(first, second, strict=False)) < 0.05 * len(first)
    mixed = [row for row in first if row.count(TOKENIZER.bos_id) > 1]
    assert sum(row in second for row in mixed) < 0.3 * len(mixed)
    # consecutive rows are not consecutive in the corpus, nor sorted by how full they are of one document
    mixed_at_first = sum(row.count(TOKENIZER.bos_id) > 1 for row in first[:100])
    assert 0.2 < mixed_at_first / 100 / (len(mixed) / len(first)) < 5
    other = epoch(folder, 0, seed=1)
    assert other[0] != first[0] and len(other) == len(first)
    # most documents that fit a row are in one whole
    pieces = {piece for row in first for piece in TOKENIZER.decode(row).split("<|bos|>")}
    whole = [TOKENIZER.decode(ids) for ids in TRAINING if len(ids) < T]
    assert sum(text in pieces for text in whole) > 0.8 * len(whole)


@given(st.lists(st.integers(1, 150), min_size=1, max_size=100), st.integers(2, 50), st.booleans())
@example([48] * 200, 50, True)
@example([49], 50, True)
@settings(max_examples=200, deadline=None)
def test_packing_neither_loses_nor_repeats(lengths, capacity, cut):
    """Documents of distinct tokens come back as distinct tokens, in rows that are full if they may be cut."""
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    bos_id = len(tokens)
    starts = np.cumsum(lengths) - lengths
    expected = []
    for start, length in zip(starts.tolist(), lengths, strict=True):
        text = list(range(start, start + length))
        while text:
            expected.append((text[0], len(text[: capacity - 1])))
            text = text[capacity - 1 :]
    pieces = cut_documents(starts, len(tokens), capacity - 1)
    assert pieces == expected
    packed = pack_rows(pieces, capacity, cut)
    rows = fill(packed, tokens, capacity, bos_id)
    assert rows.shape == (len(packed), capacity) and rows.dtype == np.uint16
    seen = rows[rows != bos_id].tolist()
    segments = [segment for row in packed for segment in row]
    assert len(seen) == len(set(seen)) == sum(length for _, length in segments)
    for row, segments_of_row in zip(rows.tolist(), packed, strict=True):
        text = [[bos_id, *range(start, start + length)] for start, length in segments_of_row]
        used = sum(map(len, text))
        assert row == [*sum(text, []), *[bos_id] * (capacity - used)]
        assert used == capacity if cut else 0 < used
    left = len(tokens) - len(seen)
    assert left == 0 or (cut and left + 1 < capacity)  # what stays out would not fill a row
    assert cut or sorted(segments) == sorted(expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("seq_len", [16, 64, 500])
def test_validation_covers_every_token_once(folder, world_size, seq_len):
    texts = [TOKENIZER.encode(text) for text in TEXTS if is_validation(text)]
    expected = Counter(token for ids in texts for token in ids)
    found, rounds = Counter(), set()
    for rank in range(world_size):
        batches = list(validation_batches(folder, seq_len, 4, rank, world_size))
        rounds.add(len(batches))
        for inputs, targets in batches:
            assert inputs.shape == targets.shape == (4, seq_len) and (inputs[:, 0] == TOKENIZER.bos_id).all()
            scored = targets >= 0
            found.update(targets[scored].tolist())
            assert torch.equal(inputs[:, 1:][scored[:, :-1]], targets[:, :-1][scored[:, :-1]])
    assert found == expected and len(rounds) == 1


def test_part_of_the_validation_set(folder):
    def tokens(limit):
        batches = validation_batches(folder, T, 4, max_tokens=limit)
        return sum(int((targets >= 0).sum()) for _, targets in batches)

    assert [tokens(limit) for limit in (1, 100, 1000)] == [1, 100, 1000] and tokens(10**9) == tokens(None)


def test_data_that_is_not_there(folder, tmp_path):
    with pytest.raises(InputError, match="fewer than one step of 1 rows of 1048576"):
        TrainLoader(folder, 1 << 20, 1, 1)
    tokens = sum(map(len, TRAINING))
    TrainLoader(folder, tokens, 1, 1)
    with pytest.raises(InputError, match=f"{tokens} training tokens"):
        TrainLoader(folder, tokens + 1, 1, 1)
    shutil.copytree(folder, tmp_path / "copy")
    loader = TrainLoader(tmp_path / "copy", T, ROWS, ROWS)
    next(loader)
    (tmp_path / "copy/train-00004.safetensors").unlink()
    with pytest.raises(InputError, match="train-00004.safetensors"):
        for _ in range(1000):
            next(loader)


def test_rows_do_not_wait_for_the_rest_of_the_corpus(folder, tmp_path, monkeypatch):
    """Shards that appear while training give the same rows as shards that were there from the start."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    whole = read_manifest(folder)
    appeared = [2]

    def show(count):
        shards.write_manifest(copy, replace(whole, train=whole.train[:count], complete=count >= 5))

    def appear(seconds):
        appeared[0] += 1
        show(appeared[0])

    show(2)
    monkeypatch.setattr(shards, "time", SimpleNamespace(sleep=appear))
    count = steps_of_an_epoch(folder) + 2
    assert torch.equal(steps(copy, count), steps(folder, count)) and appeared[0] == 5

    monkeypatch.setattr(shards, "PATIENCE", 2)
    monkeypatch.setattr(shards, "time", SimpleNamespace(sleep=lambda seconds: None))
    show(2)
    loader, there = TrainLoader(copy, T, ROWS, ROWS), []
    with pytest.raises(InputError, match="no process is writing it: run python -m scripts.data_prep"):
        while True:
            there.append(rows_of(next(loader)))
    assert torch.equal(torch.stack(there), steps(folder, len(there)))
    show(5)  # the data is there after all
    assert len(epoch(copy, 0)) == len(epoch(folder, 0))
