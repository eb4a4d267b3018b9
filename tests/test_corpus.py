"""Corpora: which documents, in which order, and what is said about the ones that are not fit."""

import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nanomuon import shards
from nanomuon.corpus import is_validation, open_corpus, with_both_parts
from nanomuon.documents import cut
from nanomuon.runtime import InputError
from scripts import sample
from tests.texts import TOKENIZER, random_texts, write_corpus


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))


def read(name, **options):
    return list(open_corpus(name, **options).documents())


def test_split_is_the_stated_rule():
    texts = [f"document {i} é" for i in range(2000)]
    expected = [int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) % 20 == 0 for text in texts]
    assert [is_validation(text) for text in texts] == expected
    assert 60 < sum(expected) < 140


def test_python_corpus_is_the_standard_library():
    root = Path(sysconfig.get_path("stdlib"))
    documents = read("python")
    assert (root / "argparse.py").read_text(encoding="utf-8") in documents
    assert documents == list(dict.fromkeys(documents))
    assert sum(len(text.encode()) for text in documents) > 5e6
    assert not any("site-packages" in str(path) for path in open_corpus("python").files)
    order = [path.relative_to(root) for path in open_corpus("python").files]
    assert order == sorted(order)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_formats_give_the_same_documents(tmp_path, suffix):
    texts = ["one", "zwei\nZeilen\r\n", "三", "x" * 100_000]
    path = tmp_path / f"data{suffix}"
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": texts, "id": range(4)}), path, row_group_size=2)
    elif suffix == ".jsonl":
        path.write_bytes(lines)
    else:
        path.write_bytes(gzip.compress(lines) if suffix.endswith("gz") else zstandard.compress(lines))
    assert read(f"path:{path}") == read(f"path:{tmp_path}") == texts


def test_text_files(tmp_path):
    rng = random.Random(0)
    book = "".join("word " * rng.randrange(30) + "\r\n" for _ in range(1000))
    (tmp_path / "book.txt").write_bytes(book.encode())
    pieces = read(f"path:{tmp_path}/book.txt")
    assert "".join(dict.fromkeys(pieces)) == "".join(pieces) == book
    assert len(pieces) == pytest.approx(len(book) / 4096, abs=2)
    assert all(piece.endswith("\n") for piece in pieces)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/a.txt").write_text("\ufefffirst<|end|>second<|end|>")  # with a byte order mark
    (tmp_path / "notes.pdf").write_text("not a document")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/a.txt").write_text("nor is this")
    assert read(f"path:{tmp_path}") == ["first<|end|>second<|end|>", book]


def test_unfit_documents_are_repaired_or_skipped(tmp_path):
    records = ["", "a", "nul\0inside", "lone \ud800 surrogate", None, "twice", "twice", "pair \U0001f600"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in records))
    table = pa.table({"text": pa.array([None, b"twice", b"bad \xff utf8", None, b"fine"], pa.binary())})
    schema = pa.schema([("text", pa.string())])
    validity, offsets, data = table["text"].chunk(0).buffers()
    column = pa.StringArray.from_buffers(5, offsets, data, validity)
    pq.write_table(pa.Table.from_arrays([column], schema=schema), tmp_path / "b.parquet")
    documents = read(f"path:{tmp_path}")
    repaired = ["lone � surrogate", "bad � utf8"]
    assert documents == ["a", "nul\0inside", repaired[0], "twice", "pair \U0001f600", repaired[1], "fine"]


def test_text_field_is_remembered_and_changes_the_corpus(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "b", "text": "t"}\n')
    name = f"path:{tmp_path}"
    before = open_corpus(name)
    assert read(name) == ["t"]
    assert read(name, text_field="body") == ["b"] == read(name)
    assert open_corpus(name).slug != before.slug
    time.sleep(0.01)
    (tmp_path / "a.jsonl").write_text('{"body": "c", "text": "t"}\n')
    assert open_corpus(name).revision not in (before.revision, open_corpus("python").revision)
    assert read(name) == ["c"]


def broken(path, kind):
    """Write a file that cannot be read and return what the message must name."""
    good = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(1000)).encode()
    if kind == "latin1.txt":
        (path / kind).write_bytes("déjà".encode("latin1"))
    elif kind == "no_text.parquet":
        pq.write_table(pa.table({"body": ["a"]}), path / kind)
        return "body"
    elif kind == "numbers.parquet":
        pq.write_table(pa.table({"text": [1]}), path / kind)
        return "it has: text; text is of type int64"
    elif kind == "torn.parquet":
        pq.write_table(pa.table({"text": ["a" * 1000]}), path / kind)
        (path / kind).write_bytes((path / kind).read_bytes()[:-20])
    elif kind == "torn.jsonl":
        (path / kind).write_bytes(good[:-5])
        return "line 1000"
    elif kind == "no_text.jsonl":
        (path / kind).write_text('{"body": "a"}\n')
        return "--text-field"
    elif kind == "latin1.jsonl":
        (path / kind).write_bytes(b'{"text": "d\xe9j\xe0"}\n')
    elif kind == "torn.jsonl.gz":
        (path / kind).write_bytes(gzip.compress(good)[:-50])
    elif kind == "torn.jsonl.zst":
        text = random.Random(0).randbytes(200_000).hex()
        (path / kind).write_bytes(zstandard.compress(text.encode())[:-50])
    elif kind == "ends_early.jsonl.zst":  # whole lines of text, and then nothing where more should come
        compressor = zstandard.ZstdCompressor().compressobj()
        written = compressor.compress(good) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        (path / kind).write_bytes(written)
        return "Truncated"
    elif kind == "junk.jsonl.zst":
        (path / kind).write_bytes(b"hello " * 100)
    elif kind == "scratched.jsonl.gz":
        data = bytearray(gzip.compress(good))
        data[20:40] = b"\xff" * 20
        (path / kind).write_bytes(data)
    elif kind in ("empty.jsonl.gz", "empty.jsonl.zst"):
        (path / kind).write_bytes(b"")
        return "empty"
    elif kind == "deep.jsonl":
        (path / kind).write_text("[" * 100_000 + "\n")
        return "levels"
    elif kind == "scratched.parquet":
        pq.write_table(pa.table({"text": [f"text {i}" for i in range(5000)]}), path / kind)
        data = bytearray((path / kind).read_bytes())
        data[100:2000] = bytes(1900)
        (path / kind).write_bytes(data)
    return kind


BROKEN = [
    "latin1.txt",
    "no_text.parquet",
    "numbers.parquet",
    "torn.parquet",
    "scratched.parquet",
    "torn.jsonl",
    "no_text.jsonl",
    "latin1.jsonl",
    "deep.jsonl",
    "torn.jsonl.gz",
    "scratched.jsonl.gz",
    "empty.jsonl.gz",
    "torn.jsonl.zst",
    "ends_early.jsonl.zst",
    "junk.jsonl.zst",
    "empty.jsonl.zst",
]


@pytest.mark.parametrize("kind", BROKEN)
def test_unreadable_file_is_named(tmp_path, kind):
    named = broken(tmp_path, kind)
    with pytest.raises(InputError) as error:
        read(f"path:{tmp_path}")
    assert kind in str(error.value) and named in str(error.value)


def documents(folder, kind):
    """The texts of the shards of a kind."""
    found = []
    for entry in getattr(shards.read_manifest(folder), kind):
        shard = shards.open_shard(folder, entry, TOKENIZER.hash)
        for start, end in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
            found.append(TOKENIZER.decode(shard.tokens[start:end].tolist()))
    return found


@pytest.mark.parametrize("kind", BROKEN)
def test_a_bad_file_is_named_and_nothing_of_it_is_kept(tmp_path, kind):
    name = write_corpus(tmp_path / "texts", random_texts(500))
    broken(tmp_path / "texts", kind)
    with pytest.raises(InputError, match=f"bad file in corpus .*{kind}.*; repair it, or move it out"):
        shards.prepare(name, tokenizer=TOKENIZER)
    (tmp_path / "texts" / kind).unlink()
    folder = shards.prepare(name, tokenizer=TOKENIZER)
    assert documents(folder, "train") == [text for text in random_texts(500) if not is_validation(text)]


def pieces_by_line(text):
    """The stated rule for text whose lines fit: as many whole lines as 4,096 bytes hold."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if len((pieces[-1] + line).encode()) > 4096:
            pieces.append("")
        pieces[-1] += line
    return pieces


def book(number, lines):
    """A text with characters of two bytes, long and short lines."""
    rng = random.Random(number)
    return "".join(f"{number} {i} " + "été " * rng.randrange(50) + "\n" for i in range(lines))


def books_of_one_part(validation, count=3):
    chosen = []
    for number in range(1000):
        if is_validation(book(number, 300)) == validation:
            chosen.append(book(number, 300))
        if len(chosen) == count:
            return chosen


@pytest.mark.parametrize("validation", [False, True])
def test_a_few_long_documents_are_cut_into_pieces(tmp_path, capsys, validation):
    """Where there would be no validation document, and where there would be no training document."""
    books = books_of_one_part(validation)
    for number, text in enumerate(books):
        (tmp_path / f"{number}.txt").write_text(text)
    folder = shards.prepare(f"path:{tmp_path}", tokenizer=TOKENIZER)
    pieces = [piece for text in books for piece in pieces_by_line(text)]
    assert documents(folder, "train") == [piece for piece in pieces if not is_validation(piece)]
    assert documents(folder, "val") == [piece for piece in pieces if is_validation(piece)]
    assert shards.read_manifest(folder).piece_bytes == 4096
    missing = "training" if validation else "validation"
    said = f"3 documents and none for {missing}: all are cut into pieces of 4,096 bytes"
    assert said in capsys.readouterr().out


def test_one_document_without_line_ends_is_cut_between_characters(tmp_path):
    text = "".join(random.Random(1).choices("aé数😀", k=200_000))
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": text}) + "\n")
    corpus = with_both_parts(open_corpus(f"path:{tmp_path}"))
    pieces = list(corpus.documents())
    assert "".join(pieces) == text and {is_validation(piece) for piece in pieces} == {False, True}
    sizes = [len(piece.encode()) for piece in pieces]
    assert max(sizes) <= 4096 and min(sizes[:-1]) > 4096 - 4


def test_cut_keeps_every_character():
    for text in ("", "a", "\n" * 10, "é" * 20, "a\nbb\n\nccc", "x" * 9 + "\n" + "y" * 7):
        for size in (4, 5, 8):
            pieces = list(cut(text, size))
            assert "".join(pieces) == text and all(len(piece.encode()) <= size for piece in pieces)


def test_other_corpora_stay_as_they_were(tmp_path):
    """Revision, documents and manifest of what was read before, by the rules of then."""
    texts = [book(number, 100) for number in range(60)]  # longer than a piece
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"b/{number:02}.txt").write_text(text)
    (folder / "a.jsonl").write_text('{"text": "short"}\n')
    name = f"path:{folder}"
    listing = []
    for path in sorted(folder.rglob("*.*")):
        status = path.stat()
        listing.append([path.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns])
    revision = hashlib.sha256(json.dumps([name, listing, "text"]).encode()).hexdigest()
    assert open_corpus(name).revision == revision[:16]
    assert open_corpus(name).slug == f"path-texts-{revision[:8]}"
    made = shards.prepare(name, tokenizer=TOKENIZER)
    assert documents(made, "train") == [text for text in ["short", *texts] if not is_validation(text)]
    assert shards.read_manifest(made).piece_bytes is None
    (tmp_path / "lone").mkdir()
    text = book(0, 4000)
    (tmp_path / "lone/book.txt").write_text(text)
    expected, size = [""], 0  # a lone text file: lines until they have more than 4,096 characters
    for line in text.splitlines(keepends=True):
        if size > 4096:
            expected.append("")
            size = 0
        expected[-1] += line
        size += len(line)
    corpus = with_both_parts(open_corpus(f"path:{tmp_path}/lone"))
    assert list(corpus.documents()) == expected


def test_what_cannot_be_split_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    def train(*_):
        raise AssertionError("a tokenizer is trained")

    monkeypatch.setattr(shards.Tokenizer, "train", train)
    (tmp_path / "small").mkdir()
    (tmp_path / "small/a.txt").write_text("one short text")
    (tmp_path / "small/b.txt").write_text("another")
    with pytest.raises(InputError, match="2 documents and none for validation.*it has 2, and none.*add text"):
        shards.prepare(f"path:{tmp_path}/small", 300)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/a.md").write_text("")
    (tmp_path / "empty/b.jsonl").write_text('{"text": null}\n{"text": ""}\n')
    with pytest.raises(InputError, match=r"0 documents: no text in 2 files$"):
        shards.prepare(f"path:{tmp_path}/empty", 300)
    assert not list((tmp_path / "base/shards").glob("path-*"))


def test_a_small_validation_set_is_said_to_be_small(tmp_path, capsys):
    texts = [text for text in random_texts(200) if not is_validation(text)]
    texts.append(next(f"note {i}" for i in range(1000) if is_validation(f"note {i}")))
    shards.prepare(write_corpus(tmp_path / "small", texts), tokenizer=TOKENIZER)
    assert "the validation set is small, 1 document of " in capsys.readouterr().out
    (tmp_path / "large").mkdir()
    for number in range(60):
        (tmp_path / f"large/{number}.txt").write_text(book(number, 150))
    shards.prepare(f"path:{tmp_path}/large", tokenizer=TOKENIZER)
    assert "is small" not in capsys.readouterr().out


def test_hidden_files_links_to_folders_and_other_suffixes_are_not_read(tmp_path, monkeypatch):
    place = tmp_path / "place"
    (place / "inside").mkdir(parents=True)
    (place / ".git").mkdir()
    texts = ["capital", "markdown", "code", "below"]
    for name, text in zip(["a.TXT", "b.md", "c.py", "inside/d.rst"], texts, strict=True):
        (place / name).write_text(text)
    for other in ("a.png", "LICENSE", ".hidden.txt", ".git/config.txt"):
        (place / other).write_text("not read")
    (place / "elsewhere").symlink_to(place)
    corpus = open_corpus(f"path:{place}")
    assert list(corpus.documents()) == texts

    (place / "broken.txt").symlink_to("/nowhere/at all")
    with pytest.raises(InputError, match="broken.txt: No such file.*move it out"):
        open_corpus(f"path:{place}")
    (place / "broken.txt").unlink()
    scandir = os.scandir

    def refuse(folder):
        if str(folder).endswith("inside"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match="inside: Permission denied; make it readable"):
        open_corpus(f"path:{place}")


def test_what_we_write_into_a_corpus_is_not_read(tmp_path):
    """Else it would be another one after every run."""
    (tmp_path / "a.txt").write_text("text")
    before = open_corpus(f"path:{tmp_path}")
    (tmp_path / "base/runs/r").mkdir(parents=True)
    (tmp_path / "base/runs/r/report.md").write_text("a report")
    after = open_corpus(f"path:{tmp_path}")
    assert after.files == before.files and after.revision == before.revision


def test_nested_text_field(tmp_path):
    rows = [{"a": {"b": "one", "n": 1}}, {"a": None}, {"a": {"b": None, "n": 2}}, {"a": {"b": "two", "n": 3}}]
    (tmp_path / "j").mkdir()
    (tmp_path / "p").mkdir()
    (tmp_path / "j/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p/a.parquet")
    for place, wrong in (("j", "no field 'c' of 'a.c'.*has: b, n"), ("p", "'a.c'.*has: a.b, a.n")):
        with pytest.raises(InputError, match=wrong):
            read(f"path:{tmp_path}/{place}", text_field="a.c")
        assert read(f"path:{tmp_path}/{place}", text_field="a.b") == ["one", "two"]
        with pytest.raises(InputError, match="a.n"):
            read(f"path:{tmp_path}/{place}", text_field="a.n")
    for row in rows:
        row["a.b"] = "whole name"
    (tmp_path / "j/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p/a.parquet")
    for place in ("j", "p"):
        assert read(f"path:{tmp_path}/{place}", text_field="a.b") == ["whole name"]


def test_a_prompt_that_is_not_utf8():
    with pytest.raises(InputError, match="the prompt is not UTF-8"):
        sample.main(["--prompt", "d\udce9j\udce0"])


# In place of Python: data_prep writes down how nice it is, and training waits for that
BESIDE_TRAINING = f"""#!/bin/sh
case "$*" in
    *print_hardware*) echo 0 float32 ;;
    *scripts.data_prep*) nice >$NANOMUON_BASE_DIR/nice ;;
    *--plan*) echo "training  10 steps of 100 = 1,000 tokens" ;;
    *scripts.base_train*)
        while [ ! -s $NANOMUON_BASE_DIR/nice ]; do sleep 0.02; done
        mkdir -p $NANOMUON_BASE_DIR/runs/r ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def test_data_prep_beside_training_leaves_it_the_cores(tmp_path):
    python = tmp_path / "python"
    python.write_text(BESIDE_TRAINING)
    python.chmod(0o755)
    environment = {
        **os.environ,
        "NANOMUON_PYTHON": str(python),
        "NANOMUON_BASE_DIR": str(tmp_path),
        "CORPUS": "hf:org/name",
        "RUN": "r",
    }
    command = ["bash", "speedrun.sh", "--dtype", "float32"]
    root = Path(__file__).parent.parent
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert int((tmp_path / "nice").read_text()) == min(19, os.nice(0) + 10)


def test_unknown_and_empty_corpora(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no text")
    places = (
        "path:",
        f"path:{tmp_path}/nothing",
        f"path:{tmp_path}",
        f"path:{tmp_path}/a.png",
        "path:/dev/zero",
    )
    names = ("pyhton", "", "hf:", "hf::config", "hf:@main", "path:d\udce9j\udce0", f"path:/{'long' * 1000}")
    for name in places + names:
        with pytest.raises(InputError, match="corpus"):
            open_corpus(name)


def fake_dataset(folder, files=3):
    (folder / "data").mkdir(parents=True)
    for i in range(files):
        table = pa.table({"text": [f"text {i} {j}" for j in range(5)]})
        pq.write_table(table, folder / f"data/train-{i:05d}-of-{files:05d}.parquet")
    return [f"text {i} {j}" for i in range(files) for j in range(5)]


def test_dataset_folder(tmp_path):
    expected = fake_dataset(tmp_path / "dataset")
    assert read(f"hf:{tmp_path}/dataset") == expected


class Answer(Exception):
    """An error of the hub with an HTTP status."""

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.response = type("Response", (), {"status_code": status})


def test_hub(tmp_path, monkeypatch):
    """Against a stand-in for the network: the revision is pinned, and the hub asked once."""
    import datasets
    import huggingface_hub

    expected = fake_dataset(tmp_path / "dataset")
    files = sorted(path.relative_to(tmp_path / "dataset").as_posix() for path in tmp_path.rglob("*.parquet"))
    asked, fetched = [], []

    def dataset_info(self, path, revision, timeout):
        asked.append((path, revision))
        return type("Info", (), {"sha": "abc123"})

    def builder(path, config, revision, cache_dir):
        names = [f"hf://datasets/{path}@{revision}/{file}" for file in files]
        return type("Builder", (), {"config": type("Config", (), {"data_files": {"train": names}})})

    def download(repo, file, repo_type, revision, cache_dir):
        fetched.append((repo, file, revision))
        return str(tmp_path / "dataset" / file)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert read("hf:org/set:config@v1") == expected and len(expected) == 15
    assert asked == [("org/set", "v1")]
    assert {revision for _, _, revision in fetched} == {"abc123"}
    assert {file for _, file, _ in fetched} == set(files)
    corpus = open_corpus("hf:org/set:config@v1")
    assert (corpus.revision, corpus.needs_download) == ("abc123", True) and len(asked) == 1


def test_hub_out_of_reach_fails_at_once(monkeypatch):
    import huggingface_hub

    def dataset_info(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    began = time.monotonic()
    with pytest.raises(InputError, match="Name or service not known.*CORPUS=python bash speedrun.sh"):
        open_corpus("fineweb-edu")
    assert time.monotonic() - began < 5
