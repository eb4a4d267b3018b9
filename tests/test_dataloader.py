"""The loader: one global order of rows, on any number of ranks and after any restart."""

import itertools
import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nanomuon import dataloader, shards
from nanomuon.corpus import open_corpus
from nanomuon.dataloader import TrainLoader, validation_batches, validation_rows
from nanomuon.runtime import InputError
from nanomuon.shards import prepare_shards, read_manifest
from tests.mistakes import refused
from tests.texts import TOKENIZER, is_validation, random_texts, write_corpus
from tests.worlds import run_world

T, ROWS = 64, 24  # sequence length, rows per step
TEXTS = random_texts(700, longest=400)
TRAINING = [TOKENIZER.encode(text) for text in TEXTS if not is_validation(text)]
VALIDATION = [TOKENIZER.encode(text) for text in TEXTS if is_validation(text)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards of TEXTS: five training shards, in windows of two."""
    tmp_path = tmp_path_factory.mktemp("loader")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
        patch.setattr(shards, "SHARD_BYTES", 40_000)
        folder = prepare_shards(open_corpus(write_corpus(tmp_path / "texts", TEXTS)), tokenizer=TOKENIZER)
    assert len(read_manifest(folder).train) == 5
    return folder


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(shards, "WINDOW", 2)
    monkeypatch.setattr(dataloader, "WINDOW", 2)


def rows_of(batch):
    """The rows (rows, T + 1) from which inputs and targets were made."""
    inputs, targets = batch
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    return torch.cat([inputs, targets[:, -1:]], dim=1)


def steps(folder, count, batch=ROWS, world=1, state=None):
    """The rows (count, ROWS, T + 1) of global batches, assembled from all micro-batches."""
    loaders = [TrainLoader(folder, T, ROWS, batch, rank, world, state=state) for rank in range(world)]
    micro_batches = count * ROWS // (batch * world)
    rows = [rows_of(next(loader)) for _ in range(micro_batches) for loader in loaders]
    return torch.cat(rows).view(count, ROWS, T + 1)


def epoch(folder, number, **options):
    """All rows of an epoch, lists of T + 1 tokens."""
    loader = TrainLoader(folder, T, 1, 1, state={"epoch": number, "window": 0, "row": 0}, **options)
    rows = []
    while True:
        row = rows_of(next(loader))[0].tolist()
        if loader.state_dict()["epoch"] > number:
            return rows
        rows.append(row)


@pytest.fixture
def expected(folder):
    """The global batches of an epoch and the beginning of the next, as one process sees them."""
    return steps(folder, len(epoch(folder, 0)) // ROWS + 3)


def test_the_order_of_rows_depends_neither_on_ranks_nor_on_micro_batches_nor_on_restarts(folder, expected):
    assert len({step.tobytes() for step in expected.numpy()}) == len(expected)
    loader = TrainLoader(folder, T, ROWS, 3, rank=1, world_size=4)
    worlds = itertools.cycle([(1, ROWS), (2, 4), (3, 8), (8, 1), (1, 1), (2, 12), (3, 4)])
    for step in range(len(expected) - 1):
        state = loader.state_dict()
        assert list(state) == ["epoch", "window", "row"] and {*map(type, state.values())} == {int}
        assert torch.equal(steps(folder, 2, *next(worlds), state), expected[step : step + 2])
        assert torch.equal(rows_of(next(loader)), expected[step, 3:6])
        next(loader)
    assert state["epoch"] == 1


def test_epochs_hold_all_text_except_a_crop_in_new_orders(folder):
    first, second = epoch(folder, 0), epoch(folder, 1)
    all_tokens = Counter(itertools.chain(*TRAINING))
    for rows in (first, second):
        tokens = Counter(token for token in itertools.chain(*rows) if token != TOKENIZER.bos_id)
        assert tokens <= all_tokens and all_tokens.total() - tokens.total() < 3 * (T + 1)  # three windows
        assert all(row[0] == TOKENIZER.bos_id and row[-2:] != 2 * [TOKENIZER.bos_id] for row in rows)  # full
    assert epoch(folder, 0, seed=1)[0] != first[0] != second[0]
    # rows are not sorted by how much of them one document fills
    mixed = [row.count(TOKENIZER.bos_id) > 1 for row in first]
    assert 0.2 < sum(mixed[:100]) / 100 / (sum(mixed) / len(mixed)) < 5
    # most documents that fit into a row are whole in one
    pieces = {piece for row in first for piece in TOKENIZER.decode(row).split("<|bos|>")}
    whole = [TOKENIZER.decode(ids) for ids in TRAINING if len(ids) < T]
    assert sum(text in pieces for text in whole) > 0.8 * len(whole)


def scored_rows(folder, seq_len, world, limit=None):
    """The scored tokens of each row of the validation set, row by row; checks the rows' form."""
    rounds, rows = [], []
    packed = validation_rows(folder, seq_len)
    for rank in range(world):
        batches = list(validation_batches(packed, 4, rank, world, max_tokens=limit))
        rounds.append(len(batches))
        for number, (inputs, targets) in enumerate(batches):
            assert inputs.shape == targets.shape == (4, seq_len) and (inputs[:, 0] == TOKENIZER.bos_id).all()
            scored = targets != TOKENIZER.bos_id
            assert torch.equal(inputs[:, 1:][scored[:, :-1]], targets[:, :-1][scored[:, :-1]])
            for row in range(4):
                rows.append(((number, rank, row), targets[row][scored[row]].tolist()))
    assert len(set(rounds)) == 1
    return [tokens for _, tokens in sorted(rows) if tokens]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("seq_len", [16, 64, 500])
def test_validation_covers_every_token_once(folder, world, seq_len):
    rows = scored_rows(folder, seq_len, world)
    assert Counter(itertools.chain(*rows)) == Counter(itertools.chain(*VALIDATION))
    assert scored_rows(folder, seq_len, world, limit=10**9) == rows


@pytest.mark.parametrize("world, limit", [(1, 640), (2, 1000), (3, 1)])
def test_a_part_of_validation_is_rows_from_all_over_the_set(folder, world, limit):
    """Every k-th row of the whole set, the same on any number of ranks, and as many as hold this number of
    tokens.
    """
    rows, part = scored_rows(folder, T, 1), scored_rows(folder, T, world, limit)
    assert len(part) == -(-limit // T) and part == scored_rows(folder, T, 1, limit)
    for number, row in enumerate(part):
        assert abs(rows.index(row) - len(rows) / len(part) * (number + 0.5)) <= 1


def test_a_corpus_smaller_than_a_step_is_refused(folder):
    tokens = sum(map(len, TRAINING))
    TrainLoader(folder, tokens // 2, 2, 1)
    with refused(f"{tokens} training tokens, fewer than one step of 3 rows of {tokens}"):
        TrainLoader(folder, tokens, 3, 1)


def test_rows_do_not_wait_for_the_rest_of_the_corpus(folder, expected, tmp_path, monkeypatch):
    """Shards that appear during training make the same rows as shards that existed from the start."""
    copy, whole = shutil.copytree(folder, tmp_path / "copy"), read_manifest(folder)

    def show(count, complete_to=None):
        shards.write_manifest(copy, replace(whole, train=whole.train[:count], complete_to=complete_to))

    moments = iter([(3,), (4,), (5,), (5, 1.0)])
    monkeypatch.setattr(shards, "time", SimpleNamespace(sleep=lambda seconds: show(*next(moments))))
    show(2)
    assert torch.equal(steps(copy, len(expected)), expected) and not list(moments)


def to_the_second_epoch(group, folder, of_last, batch):
    """(how many micro-batches a rank gets, its position in the second epoch or the error before it). The last
    rank reads another folder.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with mock.patch.object(shards, "WINDOW", 2), mock.patch.object(dataloader, "WINDOW", 2):
        loader = TrainLoader(of_last if rank == size - 1 else folder, T, size, batch, rank, size)
        for count in itertools.count():
            if loader.epoch > 0:
                return count, loader.state_dict()
            try:
                next(loader)
            except InputError as error:
                return count, str(error)


def test_all_ranks_go_by_the_first_ones_manifest(folder, tmp_path):
    """data_prep may write more between their reads."""
    first_part, whole = shutil.copytree(folder, tmp_path / "part"), read_manifest(folder)
    shards.write_manifest(first_part, replace(whole, train=whole.train[:2], complete_to=1.0))
    first, *others = run_world(4, to_the_second_epoch, first_part, folder, 50)
    assert first[1]["epoch"] == 1 and others == 3 * [first]


def test_a_shard_that_one_rank_cannot_read_ends_the_rows_of_all_at_once(folder, tmp_path):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    (damaged / "train-00003.safetensors").write_bytes(b"")
    first, *others = run_world(4, to_the_second_epoch, folder, damaged, 1)
    assert first[0] > 10 and f"shard {damaged}/train-00003.safetensors cannot be read" in first[1]
    assert others == 3 * [first]
