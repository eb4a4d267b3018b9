"""Token shards: the same whoever writes them and however often they are stopped, and never half of one."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanomuon import files, shards
from nanomuon.corpus import is_validation, open_corpus
from nanomuon.runtime import InputError
from nanomuon.shards import Entry, open_shard, prepare, read_manifest
from tests.texts import TOKENIZER, random_texts, write_corpus


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(shards, "SHARD_BYTES", 40_000)
    monkeypatch.setattr(shards, "BATCH_BYTES", 7_000)


def prepared(name, **options):
    return prepare(name, tokenizer=TOKENIZER, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def documents(folder, kind):
    found = []
    for entry in getattr(read_manifest(folder), kind):
        shard = open_shard(folder, entry, TOKENIZER.hash)
        pairs = zip(shard.offsets[:-1], shard.offsets[1:], strict=True)
        found += [TOKENIZER.decode(shard.tokens[start:end].tolist()) for start, end in pairs]
    return found


def test_every_document_is_in_its_place_whatever_the_workers(tmp_path, monkeypatch):
    texts = random_texts(3000)
    name = write_corpus(tmp_path / "texts", texts)
    folder = prepared(name, workers=1)
    manifest = read_manifest(folder)
    assert len(manifest.train) > 5 and len(manifest.val) == 1 and manifest.complete
    assert documents(folder, "train") == [text for text in texts if not is_validation(text)]
    validation = [text for text in texts if is_validation(text)]
    stored = documents(folder, "val")
    assert stored == validation[: len(stored)]
    # the texts of a shard make up SHARD_BYTES, and one document less would not
    sizes = [len("".join(texts).encode()) for texts in by_shard(folder)]
    assert all(40_000 <= size < 40_000 + 20_000 for size in sizes[:-1])
    first = contents(folder)
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    assert contents(prepared(name, workers=5)) == first


def by_shard(folder):
    for entry in read_manifest(folder).train:
        shard = open_shard(folder, entry, TOKENIZER.hash)
        pairs = zip(shard.offsets[:-1], shard.offsets[1:], strict=True)
        yield [TOKENIZER.decode(shard.tokens[start:end].tolist()) for start, end in pairs]


def test_unfit_documents(tmp_path):
    long = "a document longer than a shard " * 3000
    line = "fifty megabytes in a line " * 2_000_000
    texts = ["", "a", "\0", "\0\0nul", "lone \udfff", long, "", "b", "b", line, *random_texts(500)]
    name = write_corpus(tmp_path / "texts", texts, files=1)
    folder = prepared(name)
    expected = [text.replace("\udfff", "�") for text in dict.fromkeys(texts) if text]
    assert documents(folder, "train") == [text for text in expected if not is_validation(text)]


def test_own_tokenizer_and_quick_second_call(tmp_path, monkeypatch, capsys):
    name = write_corpus(tmp_path / "texts", random_texts(500))
    folder = prepare(name, 300)
    assert (folder / "tokenizer/vocab.txt").exists() and (tmp_path / "base/tokenizer" / folder.name).exists()
    monkeypatch.setattr(shards, "write_missing", None)
    assert prepare(name, 300) == folder
    assert prepare(name, tokenizer=shards.Tokenizer.load(folder / "tokenizer")) == folder


@pytest.mark.parametrize("period,file", [(4, "train-"), (5, "manifest")])
def test_no_space_left(tmp_path, monkeypatch, period, file):
    """A disk that is full each time after another shard, mostly when such a file is written."""
    name = write_corpus(tmp_path / "texts", ["", "twin", "twin", *random_texts(1500)])
    whole = contents(prepared(name))
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    fsync, calls, failed = os.fsync, [], []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) % period == 0:
            failed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    for _attempt in range(100):
        try:
            folder = prepared(name)
            break
        except OSError as error:
            assert error.errno == errno.ENOSPC
            (folder,) = (tmp_path / "other/shards").glob("*[0-9a-f]")
            manifest = read_manifest(folder)
            assert not manifest.complete and not list(folder.glob(".*"))
            for entry in manifest.val + manifest.train:
                open_shard(folder, entry, TOKENIZER.hash)
    assert contents(folder) == whole
    assert sum(file in name for name in failed) > 2


CHILD = """
import sys, time
from nanomuon import shards
from nanomuon.tokenizer import Tokenizer
shards.SHARD_BYTES, shards.BATCH_BYTES = 40_000, 7_000
write = shards.write_shard
def slowly(*arguments):
    time.sleep(0.05)
    print("shard", flush=True)
    return write(*arguments)
shards.write_shard = slowly
shards.prepare(sys.argv[1], tokenizer=Tokenizer.load(sys.argv[2]))
"""


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_stopped_at_any_moment(tmp_path, monkeypatch, stop):
    name = write_corpus(tmp_path / "texts", random_texts(3000))
    whole = contents(prepared(name))
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    TOKENIZER.save(tmp_path / "t")
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, name, str(tmp_path / "t")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(3):
        while "shard\n" != process.stdout.readline():
            pass
    (folder,) = (tmp_path / "other/shards").glob("*[0-9a-f]")
    assert files.being_written(folder)
    process.send_signal(stop)
    process.communicate()
    assert process.returncode != 0 and not files.being_written(folder)
    manifest = read_manifest(folder)
    assert not manifest.complete and manifest.train
    assert contents(prepared(name)) == whole


def test_two_at_once(tmp_path, capsys):
    name = write_corpus(tmp_path / "texts", random_texts(300))
    folder = shards.shard_folder(open_corpus(name), 300, TOKENIZER)
    done = []
    with files.locked(folder):
        second = threading.Thread(target=lambda: done.append(prepared(name)))
        second.start()
        second.join(0.5)
        assert second.is_alive() and not folder.exists()
    second.join(30)
    assert done == [folder] and read_manifest(folder).complete
    assert "waiting" in capsys.readouterr().out


def test_damaged_shards_are_refused_by_name(tmp_path):
    name = write_corpus(tmp_path / "texts", random_texts(1000))
    folder = prepared(name)
    first, second, *_ = read_manifest(folder).train
    path = folder / second.name
    good = path.read_bytes()
    offsets = good.index(b"}}") + 8  # somewhere in the first numbers
    flipped = good[:offsets] + b"\xff" * 99 + good[offsets + 99 :]
    for bad in (good[:-2], good[:20], b"", b"PK" + good[2:], good + b"\0\0", flipped):
        path.write_bytes(bad)
        with pytest.raises(InputError, match=second.name):
            open_shard(folder, second, TOKENIZER.hash)
    path.unlink()
    with pytest.raises(InputError, match=second.name):
        open_shard(folder, second, TOKENIZER.hash)
    with pytest.raises(InputError, match=f"{first.name} was written with another tokenizer"):
        open_shard(folder, first, "another")
    with pytest.raises(InputError, match=f"{first.name} has not the documents and tokens of the manifest"):
        open_shard(folder, replace(first, tokens=first.tokens + 1), TOKENIZER.hash)


@pytest.mark.parametrize("name", ["../../../../../dev/zero", "/dev/zero", "..", "a/b"])
def test_a_manifest_names_files_of_its_folder(tmp_path, name):
    folder = prepared(write_corpus(tmp_path / "texts", random_texts(500)))
    manifest = read_manifest(folder)
    manifest.train[0].name = name
    shards.write_manifest(folder, manifest)
    with pytest.raises(InputError, match="manifest.json names .*, which is not in its folder"):
        read_manifest(folder)


@pytest.mark.parametrize("lost", ["val-00000.safetensors", "train-00001.safetensors"])
def test_deleted_shard_is_written_again(tmp_path, lost):
    name = write_corpus(tmp_path / "texts", random_texts(1500))
    folder = prepared(name)
    whole = contents(folder)
    (folder / lost).unlink()
    assert contents(prepared(name)) == whole


def strip(manifest):
    """What the manifest says of the training shards, but for where each ends in the corpus."""
    return [(entry.name, entry.documents, entry.tokens) for entry in manifest.train]


@pytest.mark.parametrize("hub", [False, True])
def test_part_of_a_corpus_grows_into_the_whole(tmp_path, monkeypatch, hub):
    """Also from a corpus on the hub, where earlier files are not read again."""
    texts = random_texts(3000)
    local = open_corpus(write_corpus(tmp_path / "texts", texts, files=8))
    read = []

    def fetch(corpus, number):
        read.append(number)
        return corpus.files[number]

    corpus = local
    if hub:
        corpus = shards.Corpus(local.name, local.revision, local.slug, local.files, repo="org/name")
        monkeypatch.setattr(shards.Corpus, "_fetch", fetch)
    whole = read_manifest(prepared(corpus))
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    validation = read_manifest(prepared(corpus, max_tokens=0))
    assert validation.val == whole.val and not validation.train and validation.complete
    some = read_manifest(prepared(corpus, max_tokens=50_000))
    tokens = [entry.tokens for entry in some.train]
    assert sum(tokens[:-1]) < 50_000 <= sum(tokens) and strip(some) == strip(whole)[: len(tokens)]
    monkeypatch.setattr(shards, "write_missing", None)
    prepared(corpus, max_tokens=40_000)
    monkeypatch.undo()
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(shards, "SHARD_BYTES", 40_000)
    if hub:
        monkeypatch.setattr(shards.Corpus, "_fetch", fetch)
    read.clear()
    grown = read_manifest(prepared(corpus))
    assert strip(grown) == strip(whole) and grown.max_tokens is None
    if hub:
        assert read[0] > 0


def test_nothing_to_train_or_validate_on(tmp_path):
    texts = [text for text in random_texts(200) if not is_validation(text)]
    with pytest.raises(InputError, match="none for val"):
        prepared(write_corpus(tmp_path / "texts", texts))
    with pytest.raises(InputError, match="0 documents"):
        prepared(write_corpus(tmp_path / "empty", [""]))


def local_file(corpus, number):
    return corpus.files[number]


def test_training_waits_for_the_first_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "WINDOW", 2)
    monkeypatch.setattr(shards, "PATIENCE", 1)
    local = open_corpus(write_corpus(tmp_path / "texts", random_texts(4000)))
    corpus = shards.Corpus("hf:org/name", local.revision, local.slug, local.files, repo="org/name")
    monkeypatch.setattr(shards.Corpus, "_fetch", local_file)
    with pytest.raises(InputError, match="data_prep --corpus hf:org/name --vocab-size 300"):
        shards.prepare_for_training(corpus, 300)
    write, gate = shards.write_shard, threading.Event()

    def gated(path, *rest):
        if (path.parent / "val-00000.safetensors").exists():
            gate.wait(30)
        return write(path, *rest)

    monkeypatch.setattr(shards, "write_shard", gated)
    writer = threading.Thread(target=prepare, args=(corpus, 300))
    writer.start()
    folder = shards.prepare_for_training(corpus, 300)
    manifest = read_manifest(folder)
    assert not manifest.complete and manifest.val and len(manifest.train) >= 2
    gate.set()
    writer.join(30)
    assert read_manifest(folder).complete


def test_large_vocabulary_takes_four_bytes(tmp_path):
    shards.write_shard(tmp_path / "s", [np.array([70_000, 1], np.uint32)], "t")
    shard = open_shard(tmp_path, Entry("s", documents=1, tokens=2, file=1, done=0), "t")
    assert shard.tokens.dtype == np.uint32 and shard.tokens.tolist() == [70_000, 1]


def test_data_prep_command(tmp_path, capsys):
    from scripts import data_prep, tok_train

    name = write_corpus(tmp_path / "texts", random_texts(500))
    arguments = ["--corpus", name, "--vocab-size", "300"]
    data_prep.main(arguments)
    tok_train.main(arguments)
    out = capsys.readouterr().out
    assert "bytes per token" in out
    assert sum(int(count) for count in re.findall(r"of (\d+) documents", out)) == 500
    (manifest,) = (tmp_path / "base/shards").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["corpus"] == name
    began = time.monotonic()
    data_prep.main(arguments)
    assert time.monotonic() - began < 2


def test_a_clock_that_is_set_back_shows_in_no_time(tmp_path, monkeypatch, capsys):
    hours = iter(range(10_000, 0, -1))
    monkeypatch.setattr(time, "time", lambda: 3600.0 * next(hours))
    prepare(write_corpus(tmp_path / "texts", random_texts(200)), 300)
    assert re.search(r"tokenizer trained in \d+\.\d s", capsys.readouterr().out)
