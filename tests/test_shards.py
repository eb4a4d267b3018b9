"""Token shards: the same however often they are stopped, and never half of one."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanomuon import runtime, shards
from nanomuon.corpus import Corpus, is_validation, open_corpus
from nanomuon.runtime import InputError
from nanomuon.shards import Entry, Manifest, prepare, read_manifest, read_shards
from scripts import data_prep, tok_train
from tests.texts import TOKENIZER, by_shard, random_texts, write_corpus

TEXTS = random_texts(3000)
TEXTS[50:50] = ["a document longer than a shard " * 3000, "a long line " * 10_000]


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(shards, "SHARD_BYTES", 40_000)


def corpus_of(tmp_path, texts=TEXTS, files=3):
    return open_corpus(write_corpus(tmp_path / "texts", texts, files))


def prepared(corpus, **options):
    return prepare(corpus, tokenizer=TOKENIZER, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def test_every_document_is_in_its_place_whatever_the_workers(tmp_path, monkeypatch):
    corpus = corpus_of(tmp_path)
    monkeypatch.setattr(shards, "cores", lambda: 1)
    folder = prepared(corpus)
    manifest = read_manifest(folder)
    assert len(manifest.train) > 5 and manifest.complete
    expected = {True: [[]], False: [[]]}  # shards by the stated rule: full with the document that fills them
    for text in TEXTS:
        found = expected[is_validation(text)]
        found[-1].append(text)
        if len("".join(found[-1]).encode()) >= 40_000:
            found.append([])
    assert by_shard(folder, "val") == expected[True][:1]
    monkeypatch.setattr(shards, "WINDOW", len(manifest.train))
    assert by_shard(folder, "train") == expected[False]
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(shards, "cores", lambda: 5)
    assert contents(prepared(corpus)) == contents(folder)


def test_own_tokenizer_and_quick_second_call(tmp_path, monkeypatch):
    corpus = corpus_of(tmp_path)
    shards.tokenizer_folder(corpus, 300).mkdir(parents=True)  # by a process that was killed
    folder = prepare(corpus, 300)
    own = shards.Tokenizer.load(folder / "tokenizer")
    assert own.hash == shards.Tokenizer.load(shards.tokenizer_folder(corpus, 300)).hash
    assert own.hash == shards.Tokenizer.train([text for text in TEXTS if not is_validation(text)], 300).hash
    monkeypatch.setattr(shards, "_write_missing", None)
    assert (
        prepare(corpus, 300) == prepare(corpus, tokenizer=own) == prepare(corpus, 300, max_tokens=7) == folder
    )


def test_no_space_left(tmp_path, monkeypatch):
    """A disk that is full at every fifth file: the next call carries on."""
    corpus = corpus_of(tmp_path, ["", "twin", "twin", *TEXTS])
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
def test_stopped_at_any_moment(tmp_path, monkeypatch, stop):
    corpus = corpus_of(tmp_path)
    whole = contents(prepared(corpus))
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    TOKENIZER.save(tmp_path / "t")
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, corpus.name, str(tmp_path / "t")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(3):
        assert process.stdout.readline().endswith(" tokens\n")
    (folder,) = (tmp_path / "other/shards").glob("*[0-9a-f]")
    assert runtime.being_written(folder)
    process.send_signal(stop)
    process.communicate()
    assert process.returncode != 0 and not runtime.being_written(folder)
    manifest = read_manifest(folder)
    assert not manifest.complete and manifest.train
    assert contents(prepared(corpus)) == whole


def test_two_at_once(tmp_path, capsys):
    corpus = corpus_of(tmp_path)
    folder = shards.shard_folder(corpus, 300, TOKENIZER)
    done = []
    with runtime.locked(folder):
        second = threading.Thread(target=lambda: done.append(prepared(corpus)))
        second.start()
        second.join(0.5)
        assert second.is_alive() and not folder.exists()
    second.join(30)
    assert done == [folder] and read_manifest(folder).complete
    assert "waiting" in capsys.readouterr().out


def test_damaged_shards_are_refused_by_name(tmp_path):
    folder = prepared(corpus_of(tmp_path))
    manifest = read_manifest(folder)
    path = folder / "train-00001.safetensors"
    good = path.read_bytes()
    no_start = good.replace(b"starts", b"farts!")
    for bad in (good[:-2], good[:20], b"", b"PK" + good[2:], good + b"\0\0", no_start, None):
        path.unlink(missing_ok=True)
        if bad is not None:
            path.write_bytes(bad)
        with pytest.raises(InputError, match="train-00001.safetensors .*run scripts.data_prep"):
            read_shards(folder, manifest, "train")
    path.write_bytes(good)
    tokens, starts = read_shards(folder, manifest, "train")
    assert len(starts) == sum(entry.documents for entry in manifest.train[: shards.WINDOW])
    first = manifest.train[0]
    for other in (replace(first, tokens=first.tokens + 1), replace(first, documents=first.documents - 1)):
        with pytest.raises(InputError, match="train-00000.safetensors is not the one of the manifest"):
            read_shards(folder, replace(manifest, train=[other]), "train")
    with pytest.raises(InputError, match="written with another tokenizer"):
        shards._write_missing(folder, corpus_of(tmp_path), shards.Tokenizer.train(TEXTS, 301), None)


def entries(folder, kind="train"):
    return getattr(read_manifest(folder), kind)


@pytest.mark.parametrize("hub", [False, True])
def test_part_of_a_corpus_grows_into_the_whole(tmp_path, monkeypatch, hub):
    """Also from a corpus on the hub, where earlier files are not read again."""
    corpus, read = corpus_of(tmp_path, files=8), []
    if hub:
        corpus = replace(corpus, repo="org/name")

    def fetch(corpus, number):
        read.append(number)
        return corpus.files[number]

    monkeypatch.setattr(Corpus, "_fetch", fetch)
    whole = prepared(corpus)
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    folder = prepared(corpus, max_tokens=0)
    assert entries(folder, "val") == entries(whole, "val") and not entries(folder)
    prepared(corpus, max_tokens=300_000)
    tokens = [entry.tokens for entry in entries(folder)]
    assert sum(tokens[:-1]) < 300_000 <= sum(tokens) and entries(folder) == entries(whole)[: len(tokens)]
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_write_missing", None)
        prepared(corpus, max_tokens=200_000)
    read.clear()
    prepared(corpus)
    assert contents(folder) == contents(whole)
    # The first file is read to look for both parts
    assert not hub or (read[0] == 0 < read[1] and read[1:] == list(range(read[1], 8)))


def test_training_waits_for_the_first_shards(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shards, "WINDOW", 2)
    monkeypatch.setattr(shards, "PATIENCE", 1)
    monkeypatch.setattr(Corpus, "_fetch", lambda corpus, number: corpus.files[number])
    corpus = replace(corpus_of(tmp_path), name="hf:org/name", repo="org/name")
    advice = "no process is writing it: run python -m scripts.data_prep --corpus hf:org/name --vocab-size 300"
    for most, flag in ((None, "$"), (77, " --max-tokens 77$")):
        with pytest.raises(InputError, match=advice + flag):
            shards.prepare_for_training(corpus, 300, most)
    assert "waiting for training shards 0 to 1 of " in capsys.readouterr().out
    write, gate = shards.write_shard, threading.Event()

    def gated(path, *rest):
        if path.name == "train-00002.safetensors":
            gate.wait(30)
        return write(path, *rest)

    monkeypatch.setattr(shards, "write_shard", gated)
    writer = threading.Thread(target=prepare, args=(corpus, 300))
    writer.start()
    folder = shards.prepare_for_training(corpus, 300)
    assert (
        not read_manifest(folder).complete and len(entries(folder, "val")) == 1 and len(entries(folder)) == 2
    )
    gate.set()
    writer.join(30)
    assert read_manifest(folder).complete


def test_default_vocabularies():
    names = ("python", "path:texts", "hf:org/name")
    assert [shards.default_vocab_size(name) for name in names] == [4096, 4096, 32768]


def test_large_vocabulary_takes_four_bytes(tmp_path):
    shards.write_shard(tmp_path / "val-00000.safetensors", [np.array([70_000, 1], np.uint32)])
    manifest = Manifest("c", "t", 80_000, [Entry(1, 2, 0, 0)], [], True, None)
    tokens, starts = read_shards(tmp_path, manifest, "val")
    assert tokens.dtype == np.uint32 and tokens.tolist() == [70_000, 1] and starts.tolist() == [0]


def test_commands(tmp_path, capsys):
    name = write_corpus(tmp_path / "texts", TEXTS[:500])
    arguments = ["--corpus", name, "--vocab-size", "300"]
    data_prep.main(arguments)
    tok_train.main(arguments)
    out = capsys.readouterr().out
    assert re.search(r"^\d\.\d{3} bytes per token, on [\d,]+ bytes of validation text$", out, re.MULTILINE)
    assert sum(int(count) for count in re.findall(r"of (\d+) documents", out)) == 500
    (manifest,) = (tmp_path / "base/shards").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["corpus"] == name
