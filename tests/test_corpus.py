"""Corpora: which documents, in which order, and errors for files that cannot be read."""

import gzip
import json
import os
import random
import re
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nanomuon import corpus, shards
from nanomuon.corpus import open_corpus
from scripts import data_prep
from tests.mistakes import refused
from tests.texts import TOKENIZER, documents, is_validation, random_texts, write_corpus


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))


def read(name, **options):
    return [text for text, _ in open_corpus(name, **options).documents()]


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def test_python_corpus_is_the_standard_library():
    root, expected = Path(sysconfig.get_path("stdlib")), {}
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        text = content.decode("utf-8", errors="ignore").removeprefix("\ufeff")
        is_utf8 = text.encode() in content
        if text and is_utf8 and not {"site-packages", "dist-packages", "__pycache__"} & {*path.parts}:
            expected[text] = True  # once
    assert read("python") == [*expected]


COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}  # by the end of a file's name


def parquet(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, row_group_size=100)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".JSONL.GZ", ".jsonl.zst", ".parquet"])
def test_all_formats_hold_the_same_documents(tmp_path, suffix):
    texts = ["one", "zwei\nZeilen\r\n", "三", None, "", "one", "x" * 100_000, "nul\0inside \U0001f600"]
    texts += [f"many {i}" for i in range(200)]
    expected = [text for text in dict.fromkeys(texts) if text]
    if suffix == ".parquet":
        content = parquet(text=texts, id=range(len(texts)))
    else:
        compress = COMPRESS[suffix[6:].lower()]
        content = compress(lines({"id": 1, "text": text} for text in [*texts, "lone \ud800"]) + b"\n")
        expected.append("lone ?")
    (tmp_path / f"data{suffix}").write_bytes(content)
    assert read(f"path:{tmp_path}/data{suffix}") == read(f"path:{tmp_path}") == expected


def test_which_files_of_a_folder_are_read_and_in_which_order(tmp_path):
    """Folders behind links are read once; a reader of a pipe would wait forever."""
    texts = {"a.TXT": "capital\r\n", "b.md": "<|end|>", "c.py": "\ufeffcode", "inside/d.rst": "below"}
    others = "a.png LICENSE .hidden.txt .git/config.txt site-packages/module.py base/runs/r/report.md".split()
    for name, text in [
        *texts.items(),
        *dict.fromkeys(others, "not read").items(),
        ("../other/o.txt", "linked"),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    for link in ("link", "same"):
        (tmp_path / link).symlink_to(tmp_path / "../other")
    assert read(f"path:{tmp_path}") == [*(text.removeprefix("\ufeff") for text in texts.values()), "linked"]
    assert open_corpus(f"path:{tmp_path}").others == 2, "a.png and LICENSE are reported as skipped"
    (tmp_path / "base" / "own.txt").write_text("in our own folder, but named")
    assert read(f"path:{tmp_path}/base/own.txt") == ["in our own folder, but named"]


def test_a_text_field_is_remembered_once_data_prep_has_succeeded(tmp_path, capsys):
    name = write_corpus(tmp_path / "texts", [])
    records = [{"text": f"text {i}", "body": f"body {i} " * 9} for i in range(300)]
    (tmp_path / "texts" / "0.jsonl").write_bytes(lines(records))

    def prep(*flags):
        data_prep.main(["--corpus", name, "--vocab-size", "270", *flags])
        return read(name)[0]

    slug = open_corpus(name).slug
    with refused("300 files or records .* no text in field 'typo'"):
        prep("--text-field", "typo")
    assert prep() == "text 0" and open_corpus(name).slug == slug
    assert prep("--text-field", "body") == "body 0 " * 9 and open_corpus(name).slug != slug
    assert prep() == "body 0 " * 9


@pytest.mark.parametrize("hashed", [1 << 20, 10])
def test_the_revision_is_of_the_texts_not_of_times_and_places(tmp_path, monkeypatch, hashed):
    monkeypatch.setattr(corpus, "HASHED", hashed)
    monkeypatch.setattr(corpus, "EDGE", 4)
    first = tmp_path / "first" / "texts"
    first.mkdir(parents=True)
    (first / "a.txt").write_text("0123456789ab")
    slug, revisions = open_corpus(f"path:{first}").slug, set()
    moved = shutil.move(first, tmp_path / "second" / "texts")
    os.utime(moved / "a.txt", (1, 1))
    assert open_corpus(f"path:{moved}").slug == slug
    for text in ("0123456789ab", "0123_56789ab", "0_23456789ab", "0123456789_b", "0123456789abc"):
        (moved / "a.txt").write_text(text)
        revisions.add(open_corpus(f"path:{moved}").revision)
    (moved / "a.txt").rename(moved / "c.txt")
    revisions.add(open_corpus(f"path:{moved}").revision)
    assert len(revisions) == 6 - (hashed == 10)  # the middle of large files is not read


GOOD = lines({"text": random.Random(i).randbytes(100).hex()} for i in range(1000))
BROKEN = {  # file: (content, what else the message names)
    "latin1.txt": ("déjà".encode("latin1"), "utf-8"),
    "torn.jsonl": (GOOD[:-5], " line 1000: "),
    "deep.jsonl": (b'{"text": ' + b"[" * 100_000 + b"\n", " line 1: maximum recursion depth"),
    "torn.jsonl.gz": (gzip.compress(GOOD)[:-50], ""),
    "torn.jsonl.zst": (zstandard.compress(GOOD)[:-50], ""),
    "no_text.parquet": (parquet(body=["a"]), "'text' of {'body': 'a'}"),
    "torn.parquet": (parquet(text=["a"])[:-20], ""),
    "far.parquet": (parquet(day=pa.array([2**60], pa.date64())), ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_named_or_left_out(tmp_path, name):
    content, named = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.txt").write_text("good")
    with refused(f": 1 files .*: .*{name}.*{named}.*; repair .*--skip-unreadable"):
        read(f"path:{tmp_path}")
    assert read(f"path:{tmp_path}", skip_unreadable=True)[-1] == "good"


def test_a_folder_that_cannot_be_listed_is_named_or_left_out(tmp_path, monkeypatch):
    """The error is simulated, because root can list every folder."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "z.txt").write_text("good")
    scandir = os.scandir

    def refuse(folder):
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    (tmp_path / "a.txt").symlink_to("a" * 300)  # like the files of a folder that can be listed but not opened
    assert "a.txt: [Errno 36] File name too long" in open_corpus(f"path:{tmp_path}").describe_unreadable()
    (tmp_path / "a.txt").unlink()
    for name in (f"path:{tmp_path}", f"path:{tmp_path}/closed"):
        with refused(": 1 files .*closed: .*Permission denied.*; repair"):
            read(name)
    assert read(f"path:{tmp_path}", skip_unreadable=True) == ["good"]


def test_all_that_cannot_be_read_is_counted_at_once_and_recorded(tmp_path):
    name = write_corpus(tmp_path / "texts", random_texts(200))
    os.symlink("nowhere", os.fsencode(tmp_path) + b"/texts/bad\xff.txt")
    records = [{"text": "a good one"}, {"body": 1}, 7, {"text": "another"}, {"text": None}]
    (tmp_path / "texts/bad.jsonl").write_bytes(lines(records))
    said = r"3 files or records cannot be read, such as: .*bad.jsonl line 2: no text in field 'text' of "
    said += r"{'body': 1}; [^;]*/bad[^;]*.txt: .*No such file"  # one of each file
    with refused(said + ".*; repair them .*, name the field .*--text-field.*, or leave them out"):
        shards.prepare_shards(open_corpus(name), tokenizer=TOKENIZER)
    folder = shards.prepare_shards(open_corpus(name, skip_unreadable=True), tokenizer=TOKENIZER)
    assert {"a good one", "another"} < {*documents(folder, "train"), *documents(folder, "val")}
    assert re.match(said, shards.read_manifest(folder).unreadable)


def book(number):
    """A text with two-byte characters, and long and short lines."""
    rng = random.Random(number)
    return "".join(f"{number} {i} " + "été " * rng.randrange(50) + "\n" for i in range(4000))


def pieces_by_line(text):
    """The documented rule for text whose lines fit: as many whole lines as fit into 4,096 characters."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if len(pieces[-1] + line) > 4096:
            pieces.append("")
        pieces[-1] += line
    return pieces


@pytest.mark.parametrize("training, validation", [(3, 0), (0, 3), (1, 0), (3, 1)])
def test_a_few_long_documents_are_cut_into_pieces(tmp_path, training, validation):
    """Otherwise one short book might be the whole validation set."""
    texts = [*map(book, range(60))]
    books = [text for text in texts if not is_validation(text)][:training]
    books += [text for text in texts if is_validation(text)][:validation]
    for number, text in enumerate(books):
        (tmp_path / f"{number}.txt").write_text(text)
    folder = shards.prepare_shards(open_corpus(f"path:{tmp_path}"), tokenizer=TOKENIZER)
    pieces = [piece for text in books for piece in pieces_by_line(text)]
    for kind in ("train", "val"):
        assert documents(folder, kind) == [text for text in pieces if is_validation(text) == (kind == "val")]


@pytest.mark.parametrize(
    "texts,pieces", [(["one short text", "another"], 2), ([None, ""], 0), (["all alike"] * 60, 1)]
)
def test_a_corpus_that_cannot_be_split_is_refused_before_any_work(tmp_path, monkeypatch, texts, pieces):
    monkeypatch.setattr(shards.Tokenizer, "train", None)
    with refused(
        f"^corpus path:.*/small is too small: its {pieces} different pieces of up to 4,096 .*add text"
    ):
        shards.prepare_shards(open_corpus(write_corpus(tmp_path / "small", texts)))


def test_unknown_corpora_and_files_of_other_kinds_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text")
    advice = "rename .ndjson to .jsonl, other text to .txt, unpack .txt.gz, convert .csv to .jsonl"
    for place in ("/dev/zero", tmp_path, tmp_path / "a.csv"):
        with refused(f"corpus path:{place} has no file with text .*: {advice}"):
            open_corpus(f"path:{place}")
    for name in ("path:", f"path:/{'long' * 1000}", "pyhton", "", "hf:", "hf::config", "hf:@main"):
        with refused("corpus"):
            open_corpus(name)


FILES = [f"train-{i:05d}.parquet" for i in range(3)]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The list of requests to a stand-in for the hub, which has a dataset of FILES."""

    def info(api, path, revision, timeout):
        asked.append((path, revision))
        return SimpleNamespace(sha="abc123")

    def builder(path, config, revision):
        split = {"config": "train", "csv": "train", None: "test"}[config]
        names = ["notes.csv"] if config == "csv" else FILES
        files = [f"hf://datasets/{path}@{revision}/{file}" for file in names]
        return SimpleNamespace(config=SimpleNamespace(data_files={split: files}))

    def download(repo, file, repo_type, revision):
        asked.append((repo, file, revision))
        return str(tmp_path / file)

    asked = []
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    monkeypatch.setattr("datasets.load_dataset_builder", builder)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return asked


def test_a_hub_corpus_is_pinned_and_fetched_as_it_is_read(hub, tmp_path):
    """The revision is pinned with one query to the hub; files are fetched when they are read."""
    for file in FILES:
        (tmp_path / file).write_bytes(parquet(text=[file, "everywhere"]))
    corpus = open_corpus("hf:org/set:config@v1")
    found = corpus.documents()
    assert next(found)[0] == FILES[0]
    assert hub == [("org/set", "v1"), ("org/set", FILES[0], "abc123")]
    assert [text for text, _ in found] == ["everywhere", FILES[1], "everywhere", FILES[2], "everywhere"]
    assert open_corpus("hf:org/set:config@v1") == corpus and len(hub) == 1 + 3
    (tmp_path / FILES[1]).write_bytes(b"damaged")
    with refused(f": 1 files.*{FILES[1]}: .*; delete a damaged file to fetch it"):
        list(corpus.documents())


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_on_the_hub_is_read_line_by_line(tmp_path, suffix):
    file = tmp_path / f"train.json{suffix}"
    file.write_bytes(COMPRESS[suffix](lines([{"text": "one"}, {"text": "two"}])))
    assert file.name.endswith(corpus.READABLE)
    assert [text for _, text in corpus.read_texts(file, "text")] == ["one", "two"]


def test_a_hub_out_of_reach_is_one_line(hub, monkeypatch):
    def fail(*_, **__):
        raise OSError("Name or service not known")

    with refused("opening the train split of hf:org/set failed: KeyError: 'train'"):
        open_corpus("hf:org/set")
    with refused("has files other than parquet, .*, such as notes.csv"):
        open_corpus("hf:org/set:csv")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with refused(f"fetching {FILES[0]} of org/set failed: OSError: Name or service"):
        read("hf:org/set:config")
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    with refused("service not known. Check.*the corpus python needs no network"):
        open_corpus("hf:org/other")
