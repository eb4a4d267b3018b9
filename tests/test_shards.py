"""Token shards: the same however often they are stopped, and never half of one."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from nanomuon import runtime, shards
from nanomuon.corpus import open_corpus
from nanomuon.runtime import InputError
from nanomuon.shards import Entry, Manifest, prepare, read_manifest, read_shards
from scripts import data_prep, tok_train
from tests.texts import TOKENIZER, by_shard, is_validation, random_texts, write_corpus

TEXTS = random_texts(3000)
TEXTS[50:50] = ["a document longer than a shard " * 3000, "a long line " * 10_000]


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(shards, "SHARD_BYTES", 40_000)


@pytest.fixture
def corpus(tmp_path):
    return open_corpus(write_corpus(tmp_path / "texts", ["", "twin", "twin", *TEXTS]))


def prepared(corpus, **options):
    return prepare(corpus, tokenizer=TOKENIZER, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_every_document_is_in_its_place_whatever_the_workers(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "cores", lambda: 1)
    folder = prepared(corpus)
    manifest = read_manifest(folder)
    expected = {True: [[]], False: [[]]}  # shards by the stated rule: full with the document that fills them
    for text in ["twin", *TEXTS]:
        found = expected[is_validation(text)]
        found[-1].append(text)
        if len("".join(found[-1]).encode()) >= 40_000:
            found.append([])
    assert by_shard(folder, "val") == expected[True][:1]
    monkeypatch.setattr(shards, "WINDOW", len(manifest.train))
    assert by_shard(folder, "train") == expected[False] and len(manifest.train) > 5
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(shards, "cores", lambda: 5)
    assert contents(prepared(corpus)) == contents(folder)


def test_own_tokenizer_and_quick_second_call(corpus, monkeypatch):
    shards.tokenizer_folder(corpus, 300).mkdir(parents=True)  # by a process that was killed
    folder = prepare(corpus, 300)
    trained = shards.Tokenizer.train([text for text in TEXTS if not is_validation(text)], 300)
    for place in (folder / "tokenizer", shards.tokenizer_folder(corpus, 300)):
        assert shards.Tokenizer.load(place).hash == trained.hash
    monkeypatch.setattr(shards, "_write_missing", None)
    assert prepare(corpus, 300) == prepare(corpus, 300, max_tokens=7) == folder


def test_no_space_left(corpus, tmp_path, monkeypatch):
    """A disk that is full at every fifth file: the next call carries on."""
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
        try:
            folder = prepared(corpus)
        except OSError as error:
            assert error.errno == errno.ENOSPC
    assert contents(folder) == whole and len(calls) > 50


CHILD = """
import sys, time
from nanomuon import shards
from nanomuon.corpus import open_corpus
from nanomuon.tokenizer import Tokenizer
shards.SHARD_BYTES = 40_000
write = shards.write_shard
def slowly(*arguments):
    time.sleep(0.05)
    return write(*arguments)
shards.write_shard = slowly
shards.prepare(open_corpus(sys.argv[1]), tokenizer=Tokenizer.load(sys.argv[2]))
"""


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_stopped_at_any_moment(corpus, tmp_path, monkeypatch, stop):
    whole = contents(prepared(corpus))
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    TOKENIZER.save(tmp_path / "t")
    command = [sys.executable, "-c", CHILD, corpus.name, str(tmp_path / "t")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(3):
        assert process.stdout.readline().endswith(" tokens\n")
    (folder,) = (tmp_path / "other/shards").glob("*[0-9a-f]")
    assert runtime.being_written(folder)
    process.send_signal(stop)
    process.communicate()
    assert process.returncode != 0 and not runtime.being_written(folder)
    manifest = read_manifest(folder)
    assert manifest.complete_to is None and manifest.train
    assert contents(prepared(corpus)) == whole


def test_who_has_waited_for_another_process_finds_what_it_wrote(corpus, tmp_path, monkeypatch, capsys):
    folder, done = prepared(corpus), []
    hidden = folder.rename(tmp_path / "hidden")
    second = threading.Thread(target=lambda: done.append(prepared(corpus)))
    with runtime.locked(folder):
        second.start()
        second.join(0.5)
        assert second.is_alive() and "waiting for it" in capsys.readouterr().out
        monkeypatch.setattr(shards, "_write_missing", None)
        hidden.rename(folder)
    second.join(30)
    assert done == [folder]


def test_damaged_shards_are_refused_by_name(corpus):
    folder = prepared(corpus)
    path = folder / "train-00001.safetensors"
    good = path.read_bytes()
    for bad in (good[:-2], b"PK" + good[2:], good + b"\0\0", good.replace(b"starts", b"farts!"), None):
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        with pytest.raises(InputError, match="train-00001.safetensors .*run scripts.data_prep"):
            read_shards(folder, read_manifest(folder), "train")
        path.touch()


def test_part_of_a_corpus_grows_into_the_whole(corpus, tmp_path, monkeypatch):
    """In whole windows, so that the rows of a window do not depend on how much was asked for."""
    monkeypatch.setattr(shards, "WINDOW", 3)
    whole = prepared(corpus)
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    folder = prepared(corpus, max_tokens=0)
    all_of_it, found = read_manifest(whole), read_manifest(folder)
    assert found == replace(all_of_it, train=[], complete_to=0)
    tokens = np.cumsum([entry.tokens for entry in all_of_it.train])
    for wanted, count in ((tokens[0] + 1, 3), (tokens[2], 3), (tokens[2] + 1, 6)):
        prepared(corpus, max_tokens=int(wanted))
        assert read_manifest(folder) == replace(
            all_of_it, train=all_of_it.train[:count], complete_to=int(wanted)
        )
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_write_missing", None)
        prepared(corpus, max_tokens=300)
    prepared(corpus)
    assert contents(folder) == contents(whole)


def test_training_waits_for_the_first_window(corpus, monkeypatch, capsys):
    monkeypatch.setattr(shards, "WINDOW", 2)
    monkeypatch.setattr(shards, "PATIENCE", 1)
    corpus = replace(corpus, name="hf:org/name", repo="org/name")
    monkeypatch.setattr(shards.Corpus, "_download", lambda corpus, file: file)
    advice = "no process is writing it: run python -m scripts.data_prep --corpus hf:org/name --vocab-size 300"
    with pytest.raises(InputError, match=advice):
        shards.prepare_for_training(corpus, 300)
    assert "waiting for training window 0 of " in capsys.readouterr().out
    write, gate = shards.write_shard, threading.Event()

    def gated(path, *rest):
        if path.name == "train-00002.safetensors":
            gate.wait(30)
        return write(path, *rest)

    monkeypatch.setattr(shards, "write_shard", gated)
    writer = threading.Thread(target=prepare, args=(corpus, 300))
    writer.start()
    manifest = read_manifest(shards.prepare_for_training(corpus, 300))
    assert manifest.complete_to is None and (len(manifest.val), len(manifest.train)) == (1, 2)
    gate.set()
    writer.join(30)
    assert read_manifest(shards.prepare_for_training(corpus, 300)).complete_to == float("inf")


def test_default_vocabularies():
    names = ("python", "path:texts", "hf:org/name")
    assert [shards.default_vocab_size(name) for name in names] == [4096, 4096, 32768]


@pytest.mark.parametrize("vocab_size, dtype", [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_large_vocabulary_takes_four_bytes(tmp_path, vocab_size, dtype):
    ids = np.array([vocab_size - 1, 1]).astype(shards.Tokenizer([b"x"] * (vocab_size - 1)).dtype)
    shards.write_shard(tmp_path / "val-00000.safetensors", [ids])
    tokens, starts = read_shards(tmp_path, Manifest("c", vocab_size, [Entry(1, 2)], [], None), "val")
    assert tokens.dtype == dtype and tokens.tolist() == [vocab_size - 1, 1] and starts.tolist() == [0]


def test_commands(corpus, capsys):
    arguments = ["--corpus", corpus.name, "--vocab-size", "300"]
    data_prep.main(arguments)
    tok_train.main(arguments)
    out = capsys.readouterr().out
    assert re.search(r"^\d\.\d{3} bytes per token, on [\d,]+ bytes of validation text$", out, re.MULTILINE)
    assert len(re.findall(r"^(train|val): [\d,]+ tokens of [\d,]+ documents in \d+ shards$", out, re.M)) == 2
