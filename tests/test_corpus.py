"""Corpora: which documents, in which order, and what is said about the ones that are not fit."""

import gzip
import hashlib
import json
import random
import sysconfig
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nanomuon.corpus import is_validation, open_corpus
from nanomuon.runtime import InputError


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))


def read(name, **options):
    counts = Counter()
    return list(open_corpus(name, **options).documents(counts)), counts


def test_split_is_the_stated_rule():
    texts = [f"document {i} é" for i in range(2000)]
    expected = [int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) % 20 == 0 for text in texts]
    assert [is_validation(text) for text in texts] == expected
    assert 60 < sum(expected) < 140


def test_python_corpus_is_the_standard_library():
    root = Path(sysconfig.get_path("stdlib"))
    documents, counts = read("python")
    assert (root / "argparse.py").read_text(encoding="utf-8") in documents
    assert documents == list(dict.fromkeys(documents))
    assert counts["documents"] == len(documents)
    assert counts["bytes"] == sum(len(text.encode()) for text in documents) > 5e6
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
    assert read(f"path:{path}")[0] == read(f"path:{tmp_path}")[0] == texts


def test_text_files(tmp_path):
    rng = random.Random(0)
    book = "".join("word " * rng.randrange(30) + "\r\n" for _ in range(1000))
    (tmp_path / "book.txt").write_bytes(book.encode())
    pieces, _ = read(f"path:{tmp_path}/book.txt")
    assert "".join(dict.fromkeys(pieces)) == "".join(pieces) == book
    assert len(pieces) == pytest.approx(len(book) / 4096, abs=2)
    assert all(piece.endswith("\n") for piece in pieces)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/a.txt").write_text("first<|end|>second<|end|>")
    (tmp_path / "notes.pdf").write_text("not a document")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/a.txt").write_text("nor is this")
    assert read(f"path:{tmp_path}")[0] == ["first<|end|>second<|end|>", book]
    documents, counts = read(f"path:{tmp_path}", separator="<|end|>")
    assert documents == ["first", "second", book] and counts["empty"] == 1
    assert read(f"path:{tmp_path}")[0] == documents  # the separator is remembered


def test_unfit_documents_are_repaired_or_skipped_and_counted(tmp_path):
    records = ["", "a", "nul\0inside", "lone \ud800 surrogate", None, "twice", "twice", "pair \U0001f600"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in records))
    table = pa.table({"text": pa.array([None, b"twice", b"bad \xff utf8", None, b"fine"], pa.binary())})
    schema = pa.schema([("text", pa.string())])
    validity, offsets, data = table["text"].chunk(0).buffers()
    column = pa.StringArray.from_buffers(5, offsets, data, validity)
    pq.write_table(pa.Table.from_arrays([column], schema=schema), tmp_path / "b.parquet")
    documents, counts = read(f"path:{tmp_path}")
    repaired = ["lone � surrogate", "bad � utf8"]
    assert documents == ["a", "nul\0inside", repaired[0], "twice", "pair \U0001f600", repaired[1], "fine"]
    wanted = {"empty": 1, "null": 3, "duplicate": 2, "surrogates": 2, "nul": 1, "documents": 7}
    assert {key: counts[key] for key in wanted} == wanted


def test_text_field_is_remembered_and_changes_the_corpus(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "b", "text": "t"}\n')
    name = f"path:{tmp_path}"
    before = open_corpus(name)
    assert read(name)[0] == ["t"]
    assert read(name, text_field="body")[0] == ["b"] == read(name)[0]
    assert open_corpus(name).slug != before.slug
    time.sleep(0.01)
    (tmp_path / "a.jsonl").write_text('{"body": "c", "text": "t"}\n')
    assert open_corpus(name).revision not in (before.revision, open_corpus("python").revision)
    assert read(name)[0] == ["c"]


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
    return kind


@pytest.mark.parametrize(
    "kind",
    [
        "latin1.txt",
        "no_text.parquet",
        "numbers.parquet",
        "torn.parquet",
        "torn.jsonl",
        "no_text.jsonl",
        "latin1.jsonl",
        "torn.jsonl.gz",
        "torn.jsonl.zst",
    ],
)
def test_unreadable_file_is_named(tmp_path, kind):
    named = broken(tmp_path, kind)
    with pytest.raises(InputError) as error:
        read(f"path:{tmp_path}")
    assert kind in str(error.value) and named in str(error.value)


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
    assert read(f"hf:{tmp_path}/dataset")[0] == expected


class Answer(Exception):
    """An error of the hub with an HTTP status."""

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.response = type("Response", (), {"status_code": status})


def test_hub(tmp_path, monkeypatch):
    """Against a stand-in for the network: revision pinned, transfers tried again, the hub asked once."""
    import datasets
    import huggingface_hub

    expected = fake_dataset(tmp_path / "dataset")
    files = sorted(path.relative_to(tmp_path / "dataset").as_posix() for path in tmp_path.rglob("*.parquet"))
    trouble = [Answer(503), Answer(429)]
    asked, fetched, waits = [], [], []

    def dataset_info(self, path, revision, timeout):
        asked.append((path, revision))
        if trouble:
            raise trouble.pop()
        return type("Info", (), {"sha": "abc123"})

    def builder(path, config, revision, cache_dir):
        names = [f"hf://datasets/{path}@{revision}/{file}" for file in files]
        return type("Builder", (), {"config": type("Config", (), {"data_files": {"train": names}})})

    def download(repo, file, repo_type, revision, cache_dir):
        fetched.append((repo, file, revision))
        if len(fetched) == 1:
            raise ConnectionResetError("connection lost")
        return str(tmp_path / "dataset" / file)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("nanomuon.corpus.time", SimpleNamespace(sleep=waits.append))
    documents, counts = read("hf:org/set:config@v1")
    assert documents == expected and counts["documents"] == 15
    assert asked == [("org/set", "v1")] * 3 and waits == [1, 2, 1]
    assert {revision for _, _, revision in fetched} == {"abc123"}
    assert {file for _, file, _ in fetched} == set(files)
    corpus = open_corpus("hf:org/set:config@v1")
    assert (corpus.revision, corpus.needs_download) == ("abc123", True) and len(asked) == 3


def test_hub_out_of_reach_fails_at_once(monkeypatch):
    import huggingface_hub

    def dataset_info(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    began = time.monotonic()
    with pytest.raises(InputError, match="Name or service not known.*CORPUS=python bash speedrun.sh"):
        open_corpus("fineweb-edu")
    assert time.monotonic() - began < 5
