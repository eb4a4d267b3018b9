"""The loader: one global order of rows, whoever reads it and from wherever."""

import hashlib
import threading
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
from nanomuon.dataloader import TrainLoader, pack_rows, validation_batches
from nanomuon.runtime import InputError
from nanomuon.shards import prepare, read_manifest
from tests.texts import TOKENIZER, random_texts, write_corpus

T, ROWS = 64, 24  # sequence length, rows per step
TEXTS = random_texts(700, longest=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards of TEXTS: five training shards, in windows of two."""
    tmp_path = tmp_path_factory.mktemp("loader")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
        patch.setattr(shards, "SHARD_BYTES", 40_000)
        yield prepare(write_corpus(tmp_path / "texts", TEXTS), tokenizer=TOKENIZER)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(shards, "WINDOW", 2)
    monkeypatch.setattr(dataloader, "WINDOW", 2)


def micro_batches(folder, count, batch=ROWS, rank=0, world_size=1, seed=0, state=None):
    loader = TrainLoader(folder, T, ROWS, batch, rank, world_size, seed, state=state)
    return [next(loader) for _ in range(count)]


def steps(folder, count, batch=ROWS, world_size=1, seed=0, states=None):
    """Hashes of the rows (ROWS, T + 1) of `count` global batches, put together from all micro-batches."""
    accumulation = ROWS // (batch * world_size)
    parts = [
        micro_batches(folder, count * accumulation, batch, rank, world_size, seed, states)
        for rank in range(world_size)
    ]
    hashes = []
    for step in range(count):
        rows = []
        for micro in range(step * accumulation, (step + 1) * accumulation):
            for part in parts:
                inputs, targets = part[micro]
                rows.append(torch.cat([inputs, targets[:, -1:]], dim=1))
        hashes.append(hashlib.sha256(torch.cat(rows).numpy().tobytes()).hexdigest())
    return hashes


def steps_per_epoch(folder):
    loader, count = TrainLoader(folder, T, ROWS, ROWS), 0
    while loader.epoch == 0:
        next(loader)
        count += 1
    return count


def test_same_global_batches_whatever_the_ranks_and_micro_batches(folder):
    count = steps_per_epoch(folder) + 3
    expected = steps(folder, count)
    assert len(set(expected)) == count and len(read_manifest(folder).train) == 5
    for world_size in (1, 2, 3, 4, 8):
        for batch in {1, ROWS // world_size // 2, ROWS // world_size} - {0}:
            assert steps(folder, count, batch, world_size) == expected, (world_size, batch)


def epochs(folder, count, **options):
    """All rows of the first epochs, each a list of (T + 1) token lists."""
    loader = TrainLoader(folder, T, 1, 1, **options)
    rows = [[] for _ in range(count + 1)]
    while loader.epoch < count:
        inputs, targets = next(loader)
        rows[loader.epoch].append(inputs[0].tolist() + targets[0, -1:].tolist())
    return rows[:count]


def test_epochs_hold_all_text_but_the_crop_in_new_orders(folder):
    training = [TOKENIZER.encode(text) for text in TEXTS if not is_validation(text)]
    windows = [TrainLoader(folder, T, 1, 1)._rows(0, window) for window in range(3)]
    first, second = epochs(folder, 2)
    for rows in (first, second):
        tokens = Counter(token for row in rows for token in row if token != TOKENIZER.bos_id)
        assert tokens <= Counter(token for ids in training for token in ids)
        assert tokens.total() == sum(map(len, training)) - sum(window.cropped for window in windows)
    # rows come in another order, and documents meet in other rows
    fewer = min(len(first), len(second))
    same = sum(row == other for row, other in zip(first[:fewer], second[:fewer], strict=True))
    assert same < 0.05 * len(first)
    mixed = [row for row in first if row.count(TOKENIZER.bos_id) > 1]
    assert sum(row in second for row in mixed) < 0.3 * len(mixed)
    # consecutive rows are not consecutive in the corpus, nor sorted by how full they are of one document
    mixed_at_first = sum(row.count(TOKENIZER.bos_id) > 1 for row in first[:100])
    assert 0.2 < mixed_at_first / 100 / (len(mixed) / len(first)) < 5
    (other,) = epochs(folder, 1, seed=1)
    assert other[0] != first[0] and len(other) == len(first)


def test_resume_at_every_step_and_on_other_worlds(folder):
    count = steps_per_epoch(folder) + 2
    expected = steps(folder, count)
    loader = TrainLoader(folder, T, ROWS, 3, rank=1, world_size=4)
    for step in range(count):
        state = loader.state_dict()
        assert all(type(value) is int for value in state.values()) and len(state) == 3
        world_size, batch = [(1, ROWS), (2, 4), (3, 8), (8, 1)][step % 4]
        left = min(2, count - step)
        assert steps(folder, left, batch, world_size, states=state) == expected[step : step + left]
        next(loader), next(loader)
    assert state["epoch"] == 1


def test_resume_in_the_middle_of_a_step(folder):
    loader = TrainLoader(folder, T, ROWS, 4)
    first = [next(loader) for _ in range(9)]
    assert len(first) == 9 and torch.equal(first[7][0], micro_batches(folder, 8, 4)[7][0])
    for _ in range(3):
        again = TrainLoader(folder, T, ROWS, 4, state=loader.state_dict())
        assert torch.equal(next(again)[0], next(loader)[0])


def test_rows_are_documents_and_nothing_is_lost(folder):
    """Over one epoch the pieces between <|bos|>s make up the documents, but for the counted crop."""
    count = steps_per_epoch(folder)
    loader = TrainLoader(folder, T, ROWS, ROWS)
    pieces = Counter()
    while loader.epoch == 0:
        inputs, targets = next(loader)
        assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.dtype == targets.dtype == torch.int64
        if loader.epoch:
            break
        assert (inputs[:, 0] == TOKENIZER.bos_id).all() and inputs.is_contiguous() and targets.is_contiguous()
        for row in torch.cat([inputs, targets[:, -1:]], dim=1).tolist():
            text = TOKENIZER.decode(row)
            pieces.update(piece for piece in text.split("<|bos|>") if piece)
    training = [TOKENIZER.encode(text) for text in TEXTS if not is_validation(text)]
    total = sum(map(len, training))
    seen = sum(len(TOKENIZER.encode(piece)) * n for piece, n in pieces.items())
    assert count * ROWS * T * 0.95 < seen <= total
    whole = [text for text in TEXTS if not is_validation(text) and len(TOKENIZER.encode(text)) < T]
    assert sum(text in pieces for text in whole) > 0.8 * len(whole)


@given(
    st.lists(st.integers(1, 40), max_size=300),
    st.integers(2, 50),
    st.booleans(),
)
@example([48] * 200, 50, True)
@settings(max_examples=200, deadline=None)
def test_packing_neither_loses_nor_repeats(lengths, capacity, cut):
    lengths = np.minimum(np.array(lengths, dtype=np.int64), capacity - 1)
    starts = np.cumsum(lengths) - lengths + 7
    row_ends, out_starts, out_lengths = pack_rows(starts, lengths, capacity, cut)
    counted = np.zeros(int(lengths.sum()), dtype=int)
    for start, length in zip(out_starts, out_lengths, strict=True):
        counted[start - 7 : start - 7 + length] += 1
    begin = 0
    for end in row_ends:
        used = int(sum(out_lengths[begin:end])) + end - begin
        assert used == capacity if cut else 0 < used <= capacity
        begin = end
    assert begin == len(out_starts) and (counted <= 1).all()
    left = int((counted == 0).sum())
    assert left < capacity if cut else left == 0
    if not cut:
        assert sorted(zip(out_starts, out_lengths, strict=True)) == sorted(zip(starts, lengths, strict=True))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(0, 3))
def test_every_token_once_but_the_counted_crop(tmp_path_factory, lengths, seed):
    """Through files: documents of distinct tokens come back as distinct tokens."""
    path = tmp_path_factory.mktemp("property")
    numbers = np.arange(sum(lengths), dtype=np.uint32)
    bos_id = 60 * 300
    documents = np.split(numbers, np.cumsum(lengths)[:-1])
    entries = []
    for i in range(0, len(documents), 20):
        part = documents[i : i + 20]
        shards.write_shard(path / str(i), part, "t")
        entries.append(shards.Entry(str(i), len(part), sum(map(len, part)), file=0, done=0))
    manifest = shards.Manifest(
        corpus="c",
        revision="r",
        piece_bytes=None,
        tokenizer="t",
        vocab_size=bos_id + 1,
        bos_id=bos_id,
        val=entries[:1],
        train=entries,
        complete=True,
        max_tokens=None,
    )
    shards.write_manifest(path, manifest)
    if sum(lengths) < 16:
        with pytest.raises(InputError, match="fewer than one step"):
            TrainLoader(path, 16, 1, 1)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "WINDOW", 2)
        loader = TrainLoader(path, 16, 1, 1, seed=seed)
        seen = []
        for window in range(-(-len(entries) // 2)):
            rows = loader._rows(0, window)
            for i in range(len(rows)):
                row = np.full(17, -1)
                rows.fill(i, row)
                assert row.min() >= 0 and row[0] == bos_id
                seen += row[row != bos_id].tolist()
            assert rows.text_tokens - rows.lengths.sum() == rows.cropped < 17
    assert len(seen) == len(set(seen)) and set(seen) <= set(numbers.tolist())
    assert len(numbers) - len(seen) < 17 * -(-len(entries) // 2)


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


def test_deleted_shard_is_named(folder, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    loader = TrainLoader(copy, T, ROWS, ROWS)
    next(loader)
    (copy / "train-00004.safetensors").unlink()
    with pytest.raises(InputError, match="train-00004.safetensors"):
        for _ in range(1000):
            next(loader)


def test_bad_requests(folder, tmp_path):
    with pytest.raises(ValueError, match="24 rows"):
        TrainLoader(folder, T, ROWS, 5)
    with pytest.raises(InputError, match="fewer than one step"):
        TrainLoader(folder, 1 << 20, 1, 1)
    with pytest.raises(InputError, match="data_prep"):
        TrainLoader(tmp_path, T, ROWS, ROWS)
    with pytest.raises(InputError, match="data_prep"):
        next(validation_batches(tmp_path, T, 4))


def test_rows_do_not_wait_for_the_rest_of_the_corpus(folder, tmp_path, monkeypatch):
    """Shards that appear while training give the same rows as shards that were there from the start."""
    import shutil

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
    count = steps_per_epoch(folder) + 2
    assert steps(copy, count) == steps(folder, count) and appeared[0] == 5
    monkeypatch.setattr(shards, "PATIENCE", 2)
    monkeypatch.setattr(shards, "time", SimpleNamespace(sleep=lambda seconds: None))
    show(2)
    with pytest.raises(InputError, match="no process is writing it: run python -m scripts.data_prep"):
        steps(copy, count)


def test_python_corpus_crop(tmp_path, monkeypatch):
    """At T = 2048 nearly nothing of the standard library is cropped (most of its documents exceed a row)."""
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(shards, "SHARD_BYTES", 16 << 20)
    folder = prepare(open_corpus("python"), tokenizer=TOKENIZER, max_tokens=1)
    loader = TrainLoader(folder, 2048, 8, 8)
    rows = loader._rows(0, 0)
    assert rows.cropped < 0.001 * rows.text_tokens


def test_the_thread_of_the_loader_is_on_the_gpu_of_its_rank(folder, monkeypatch):
    """CUDA would begin at GPU 0 in every new thread, and take memory there."""
    noted = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda index: noted.append((index, threading.current_thread().name))
    )
    next(TrainLoader(folder, T, ROWS, 8))
    assert noted == [(3, "loader_0")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_buffer_is_rewritten_while_its_copy_is_queued(folder):
    expected = micro_batches(folder, 200, 8)
    loader = TrainLoader(folder, T, ROWS, 8, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    found = []
    for _ in range(200):
        busy = busy @ busy.T / 4096  # keeps the stream behind, so that copies queue up
        found.append(next(loader))
    for (inputs, targets), (on_gpu, targets_on_gpu) in zip(expected, found, strict=True):
        assert torch.equal(inputs, on_gpu.cpu()) and torch.equal(targets, targets_on_gpu.cpu())
