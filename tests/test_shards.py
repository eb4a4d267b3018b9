"""Token shards: the same however often writing is interrupted, and always whole."""

import contextlib
import errno
import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from nanomuon import corpus as corpus_module
from nanomuon import runtime, shards
from nanomuon.corpus import open_corpus
from nanomuon.run import Run
from nanomuon.shards import prepare_shards, read_manifest, read_shards
from nanomuon.tokenizer import Tokenizer
from scripts import base_train, data_prep, tok_train
from tests.mistakes import refused
from tests.texts import TOKENIZER, documents, is_validation, random_texts, write_corpus

TEXTS = random_texts(3000)
TEXTS[50:50] = ["a document longer than a shard " * 3000, "a long line " * 10_000]


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(
        shards, "SHARD_BYTES", 40_067
    )  # a byte more than the first documents of the third shard


@pytest.fixture
def corpus(tmp_path):
    return open_corpus(write_corpus(tmp_path / "texts", ["", "twin", "twin", *TEXTS]))


def prepared(corpus, **options):
    return prepare_shards(corpus, tokenizer=TOKENIZER, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_every_document_is_in_its_place(corpus, monkeypatch):
    folder = prepared(corpus)
    manifest = read_manifest(folder)
    expected = {True: [[]], False: [[]]}  # shards by the stated rule: full with the document that fills them
    for text in ["twin", *TEXTS]:
        found = expected[is_validation(text)]
        found[-1].append(text)
        if len("".join(found[-1]).encode()) >= 40_067:
            found.append([])
    assert documents(folder, "val") == expected[True][0]
    monkeypatch.setattr(shards, "WINDOW", 2)
    for window, first in enumerate(range(0, len(manifest.train), 2)):
        assert documents(folder, "train", window) == sum(expected[False][first : first + 2], [])
    assert [entry.documents for entry in manifest.train] == [*map(len, expected[False])]
    assert len(manifest.train) > 5


def test_a_corpus_gets_its_own_tokenizer_and_a_second_call_does_nothing(corpus, monkeypatch, capsys):
    shards.tokenizer_folder(corpus, 300).mkdir(parents=True)  # by a process that was killed
    folder = prepare_shards(corpus, 300)
    assert f"training a tokenizer of 300 tokens on {corpus.name}\n" in capsys.readouterr().out
    trained = Tokenizer.train([text for text in TEXTS if not is_validation(text)], 300)
    for place in (folder / "tokenizer", shards.tokenizer_folder(corpus, 300)):
        assert Tokenizer.load(place).hash == trained.hash
    monkeypatch.setattr(shards, "_write_missing", None)
    assert prepare_shards(corpus, 300) == prepare_shards(corpus, 300, max_tokens=7) == folder


def test_a_full_disk_loses_nothing(corpus, tmp_path, monkeypatch):
    """The disk is full at every fifth file, and the next call continues."""
    whole = contents(prepared(corpus))
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) % 5 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    folder = None
    while folder is None:
        with contextlib.suppress(OSError):
            folder = prepared(corpus)
    assert contents(folder) == whole and len(calls) > 50


def test_texts_that_change_while_they_are_read_leave_nothing(corpus, tmp_path):
    (tmp_path / "texts" / "new.txt").write_text("a text that the revision does not count")
    with refused("changed while being read: run the command again"):
        prepare_shards(corpus, 300)
    assert not [*tmp_path.glob("base/*/*/*")]


def test_shards_are_not_continued_with_a_text_that_could_not_be_read_when_they_were_begun(
    corpus, tmp_path, monkeypatch
):
    """Documents would otherwise be missing, and others be there twice."""
    (tmp_path / "texts" / "!.txt").write_text(next(text for text in TEXTS if not is_validation(text)) + "!")
    corpus, read_texts = open_corpus(corpus.name, skip_unreadable=True), corpus_module.read_texts

    def without_text_files(path, field):
        if path.suffix == ".txt":
            return [(str(path), OSError(errno.EIO, "I/O error"))]
        return read_texts(path, field)

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "read_texts", without_text_files)
        folder = prepared(corpus, max_tokens=1)
    before = contents(folder)
    with refused("was begun with other texts of corpus path:.*: delete its folder and run"):
        prepared(corpus)
    assert contents(folder).keys() == before.keys()


def test_part_of_a_corpus_grows_into_the_whole(corpus, tmp_path, monkeypatch):
    """It grows in whole windows, so that the rows of a window do not depend on --max-tokens."""
    monkeypatch.setattr(shards, "WINDOW", 3)
    whole = prepared(corpus)
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    folder = prepared(corpus, max_tokens=0)
    all_of_it, found = read_manifest(whole), read_manifest(folder)
    assert found == replace(all_of_it, train=[], complete_to=0)
    tokens = np.cumsum([entry.tokens for entry in all_of_it.train]).tolist()
    left_over = [folder / ".train-00000.safetensors.1.tmp", folder / "tokenizer" / ".tokenizer.json.1.tmp"]
    for file in left_over:  # by a process that was killed
        file.touch()
    for wanted, count in ((tokens[0] + 1, 3), (tokens[2], 3), (tokens[2] + 1, 6)):
        prepared(corpus, max_tokens=wanted)
        assert read_manifest(folder) == replace(all_of_it, train=all_of_it.train[:count], complete_to=wanted)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_write_missing", None)
        prepared(corpus, max_tokens=300)
    prepared(corpus)
    assert contents(folder) == contents(whole) and not any(file.exists() for file in left_over)


def test_training_waits_for_the_first_window(corpus, monkeypatch, capsys):
    """As long as a process is writing it."""
    monkeypatch.setattr(shards, "WINDOW", 2)
    monkeypatch.setattr(shards, "PATIENCE", 1)
    folder = prepare_shards(corpus, 300)
    corpus, whole = replace(corpus, repo="org/name"), read_manifest(folder)
    monkeypatch.setattr(shards, "shard_folder", lambda *_: folder)

    def show(count):
        shards.write_manifest(folder, replace(whole, train=whole.train[:count], complete_to=None))

    show(1)
    counts = iter([1, 1, 1, 2])  # after each second
    monkeypatch.setattr(shards, "time", SimpleNamespace(sleep=lambda seconds: show(next(counts))))
    with runtime.locked(folder):
        assert shards.shards_for_training(corpus, 300) == folder and len(read_manifest(folder).train) == 2
    assert capsys.readouterr().out.count(f"waiting for training window 0 of {folder}\n") == 1


def test_a_large_vocabulary_takes_four_bytes_per_token(corpus):
    large = Tokenizer(
        [*TOKENIZER.vocab, *(b"\xff%d" % i for i in range((1 << 16) - TOKENIZER.vocab_size + 1))]
    )
    folders = [prepare_shards(corpus, tokenizer=tokenizer, max_tokens=0) for tokenizer in (TOKENIZER, large)]
    small, wide = (read_shards(folder, read_manifest(folder), "val")[0] for folder in folders)
    assert (small.dtype, wide.dtype) == ("uint16", "uint32") and np.array_equal(small, wide)


def test_shards_with_another_tokenizer_are_not_trained_on(corpus):
    folder = prepare_shards(corpus, 300)
    Tokenizer(Tokenizer.load(folder / "tokenizer").vocab[:-1]).save(folder / "tokenizer")
    with refused(f"{folder}/tokenizer is not the one of these shards: delete its folder"):
        shards.shards_for_training(corpus, 300)


def test_data_prep_makes_what_a_training_with_the_same_flags_reads(corpus, tmp_path, monkeypatch):
    """It also follows the record of the run; of a hub corpus it makes only as much as the run takes."""
    prepare_shards, calls = shards.prepare_shards, []

    def noted(corpus, vocab_size, max_tokens):
        calls.append((corpus.skip_unreadable, vocab_size, max_tokens))
        return prepare_shards(corpus, 301)

    monkeypatch.setattr(Run, "finish", lambda run: 0)
    shape = "--depth 1 --max-seq-len 16 --total-batch-size 48 --device-batch-size 1 --dtype float32".split()
    flags = [*shape, "--run", "mine", "--corpus", corpus.name, "--vocab-size", "301", "--skip-unreadable"]
    assert base_train.main([*flags, "--num-iterations", "2", "--no-compile"]) == 0
    monkeypatch.setattr(shards, "prepare_shards", noted)
    data_prep.main(["--", "--run", "mine", "--num-iterations", "7"])
    monkeypatch.setattr(data_prep, "open_corpus", lambda *_: corpus)
    monkeypatch.setattr(data_prep, "usable_gpus", lambda: 8)  # but 3 rows a step are for one process
    data_prep.main(["--", *shape, "--corpus", "hf:org/name", "--num-iterations", "5"])
    assert calls == [(True, 301, math.inf), (False, 32768, 240)]


def test_data_prep_and_tok_train_print_their_figures(corpus, capsys):
    arguments = ["--corpus", corpus.name, "--vocab-size", "300"]
    data_prep.main(arguments)
    tok_train.main(arguments)
    out = capsys.readouterr().out
    assert re.search(r"^\d\.\d{3} bytes per token, on [\d,]+ bytes of validation text$", out, re.MULTILINE)
    assert len(re.findall(r"^(train|val): [\d,]+ tokens of [\d,]+ documents in \d+ shards$", out, re.M)) == 2
    assert f"corpus {corpus.name}: {len(corpus.files):,} files with text\n" in out
