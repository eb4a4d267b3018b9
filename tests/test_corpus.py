"""Corpora: which documents, in which order, and what is said about files that cannot be read."""

import gzip
import hashlib
import json
import random
import sysconfig
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nanomuon import shards
from nanomuon.corpus import is_validation, open_corpus
from nanomuon.runtime import InputError
from tests.texts import TOKENIZER, documents, random_texts, write_corpus


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))


def read(name, **options):
    return [text for _, text in open_corpus(name, **options).documents()]


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def test_split_is_the_stated_rule():
    texts = [f"document {i} é" for i in range(2000)]
    expected = [int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) % 20 == 0 for text in texts]
    assert [is_validation(text) for text in texts] == expected
    assert 60 < sum(expected) < 140


def test_python_corpus_is_the_standard_library():
    root = Path(sysconfig.get_path("stdlib"))
    expected = []
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "__pycache__"} & set(path.relative_to(root).parts):
            text = path.read_bytes().decode("utf-8", errors="ignore").removeprefix("\ufeff")
            if text.encode() in path.read_bytes():  # it is UTF-8
                expected.append(text)
    assert read("python") == [text for text in dict.fromkeys(expected) if text]
    assert len(expected) > 500


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_formats_give_the_same_documents(tmp_path, suffix):
    texts = ["one", "zwei\nZeilen\r\n", "三", None, "", "one", "x" * 100_000, "nul\0inside \U0001f600"]
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": texts, "id": range(8)}), path, row_group_size=2)
    else:
        compress = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}[suffix]
        path.write_bytes(compress(lines({"id": 1, "text": text} for text in texts)))
    expected = [text for text in dict.fromkeys(texts) if text]
    assert read(f"path:{path}") == read(f"path:{tmp_path}") == expected


def test_which_files_of_a_folder_are_read_and_in_which_order(tmp_path):
    place = tmp_path / "place"
    texts = {"a.TXT": "capital\r\n", "b.md": "<|end|>", "c.py": "\ufeffcode", "inside/d.rst": "below"}
    others = ["a.png", "LICENSE", ".hidden.txt", ".git/config.txt", "site-packages/module.py"]
    for name, text in [*texts.items(), *dict.fromkeys(others, "not read").items()]:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(text.encode())
    (place / "elsewhere").symlink_to(place)
    expected = [text.removeprefix("\ufeff") for text in texts.values()]
    assert read(f"path:{place}") == expected
    (place / "broken.txt").symlink_to("/nowhere/at all")
    with pytest.raises(InputError, match="broken.txt: No such file.*move it away"):
        open_corpus(f"path:{place}")


def test_what_we_write_into_a_corpus_is_not_read(tmp_path):
    """Else it would be another one after every run."""
    (tmp_path / "a.txt").write_text("text")
    before = open_corpus(f"path:{tmp_path}")
    (tmp_path / "base/runs/r").mkdir(parents=True)
    (tmp_path / "base/runs/r/report.md").write_text("a report")
    assert open_corpus(f"path:{tmp_path}") == before


def test_lone_surrogates_are_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "lone \ud800 surrogate"}]))
    assert read(f"path:{tmp_path}") == ["lone ? surrogate"]


def test_text_field_is_remembered_and_content_or_field_change_the_corpus(tmp_path):
    name = f"path:{tmp_path}"
    (tmp_path / "a.jsonl").write_bytes(lines([{"body": "b", "text": "t"}]))
    corpora = [open_corpus(name)]
    assert read(name) == ["t"]
    assert read(name, text_field="body") == ["b"] == read(name)
    corpora.append(open_corpus(name))
    (tmp_path / "a.jsonl").write_bytes(lines([{"body": "another", "text": "t"}]))
    corpora.append(open_corpus(name))
    assert read(name) == ["another"]
    assert len({corpus.slug for corpus in corpora}) == 3 and corpora[1].revision != corpora[2].revision


GOOD = lines({"text": f"line {i}"} for i in range(1000))


def parquet(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def scratched(data, start, end):
    return data[:start] + b"\xff" * (end - start) + data[end:]


# {file: (content, what the message names besides)}
BROKEN = {
    "latin1.txt": ("déjà".encode("latin1"), "utf-8"),
    "latin1.jsonl": (b'{"text": "d\xe9j\xe0"}\n', "utf-8"),
    "torn.jsonl": (GOOD[:-5], "document 1000"),
    "no_text.jsonl": (
        lines([{"text": "a"}, {"body": "a"}]),
        "document 2.*'text' of {'body': 'a'}.*--text-field",
    ),
    "no_record.jsonl": (b"[1]\n", r"'text' of \[1\]"),
    "number.jsonl": (b'{"text": 1}\n', "'text' of {'text': 1}"),
    "torn.jsonl.gz": (gzip.compress(GOOD)[:-50], ""),
    "scratched.jsonl.gz": (scratched(gzip.compress(GOOD), 20, 40), ""),
    "torn.jsonl.zst": (zstandard.compress(random.Random(0).randbytes(100_000).hex().encode())[:-50], ""),
    "junk.jsonl.zst": (b"hello " * 100, ""),
    "no_text.parquet": (parquet(body=["a"]), "'text' of {'body': 'a'}.*--text-field"),
    "number.parquet": (parquet(text=[1]), "'text' of {'text': 1}"),
    "torn.parquet": (parquet(text=["a" * 1000])[:-20], ""),
    "scratched.parquet": (scratched(parquet(text=[f"text {i}" for i in range(5000)]), 100, 2000), ""),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_bad_file_is_named_and_nothing_of_it_is_kept(tmp_path, kind):
    content, named = BROKEN[kind]
    name = write_corpus(tmp_path / "texts", random_texts(500))
    (tmp_path / "texts" / kind).write_bytes(content)
    with pytest.raises(InputError, match=f"bad file in corpus .*{kind}.*{named}.*repair it, or move it away"):
        shards.prepare(open_corpus(name), tokenizer=TOKENIZER)
    (tmp_path / "texts" / kind).unlink()
    folder = shards.prepare(open_corpus(name), tokenizer=TOKENIZER)
    assert documents(folder, "train") == [text for text in random_texts(500) if not is_validation(text)]


def book(number, count=4000):
    """A text with characters of two bytes, long and short lines."""
    rng = random.Random(number)
    return "".join(f"{number} {i} " + "été " * rng.randrange(50) + "\n" for i in range(count))


def pieces_by_line(text):
    """The stated rule for text whose lines fit: as many whole lines as 4,096 characters hold."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if len(pieces[-1] + line) > 4096:
            pieces.append("")
        pieces[-1] += line
    return pieces


@pytest.mark.parametrize("count, validation", [(3, False), (3, True), (1, False)])
def test_a_few_long_documents_are_cut_into_pieces(tmp_path, capsys, count, validation):
    """If there would be no validation document, or no training document."""
    books = [text for text in map(book, range(60)) if is_validation(text) == validation][:count]
    for number, text in enumerate(books):
        (tmp_path / f"{number}.txt").write_text(text)
    folder = shards.prepare(open_corpus(f"path:{tmp_path}"), tokenizer=TOKENIZER)
    pieces = [piece for text in books for piece in pieces_by_line(text)]
    assert documents(folder, "train") == [piece for piece in pieces if not is_validation(piece)]
    assert documents(folder, "val") == [piece for piece in pieces if is_validation(piece)]
    assert "they are cut into pieces of 4,096 characters" in capsys.readouterr().out


@pytest.mark.parametrize("texts", [["one short text", "another"], [None, ""]])
def test_what_cannot_be_split_is_refused_before_anything_is_computed(tmp_path, monkeypatch, texts):
    monkeypatch.setattr(shards.Tokenizer, "train", lambda *_: pytest.fail("a tokenizer is trained"))
    name = write_corpus(tmp_path / "small", texts)
    with pytest.raises(InputError, match="is too small: not even cut into pieces .*add text"):
        shards.prepare(open_corpus(name), 300)
    assert not list((tmp_path / "base/shards").glob("*/*"))


def test_unknown_and_empty_corpora(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no text")
    names = [
        "pyhton",
        "",
        "hf:",
        "hf::config",
        "hf:@main",
        "path:",
        "path:/dev/zero",
        f"path:/{'long' * 1000}",
    ]
    for name in [*names, f"path:{tmp_path}/nothing", f"path:{tmp_path}", f"path:{tmp_path}/a.png"]:
        with pytest.raises(InputError, match="corpus"):
            open_corpus(name)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the network; what was asked for and fetched, and the texts of its dataset."""
    import datasets
    import huggingface_hub

    class Hub:
        asked, fetched, files, texts = [], [], [], []

        def dataset_info(self, path, revision, timeout):
            Hub.asked.append((path, revision))
            return type("Info", (), {"sha": "abc123"})

        def builder(path, config, revision, cache_dir):
            names = [f"hf://datasets/{path}@{revision}/{file}" for file in Hub.files]
            return type("Builder", (), {"config": type("Config", (), {"data_files": {"train": names}})})

        def download(repo, file, repo_type, revision, cache_dir):
            Hub.fetched.append((repo, file, revision))
            return str(tmp_path / file)

    for i in range(3):
        Hub.files.append(f"train-{i:05d}.parquet")
        Hub.texts += [f"text {i} {j}" for j in range(5)]
        pq.write_table(pa.table({"text": Hub.texts[-5:]}), tmp_path / Hub.files[-1])
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", Hub.dataset_info)
    monkeypatch.setattr(datasets, "load_dataset_builder", Hub.builder)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Hub.download)
    return Hub


def test_hub(hub, tmp_path):
    """The revision is pinned and the hub asked once; files are fetched when they are read, and one ahead."""
    corpus = open_corpus("hf:org/set:config@v1")
    assert corpus.revision == "abc123" and not hub.fetched
    found = corpus.documents()
    assert next(found) == (0, hub.texts[0])
    for thread in threading.enumerate():
        if thread.name.startswith("Thread-") and thread.daemon:
            thread.join(10)
    assert hub.fetched == [("org/set", file, "abc123") for file in hub.files[:2]]
    assert [text for _, text in found] == hub.texts[1:]
    assert open_corpus("hf:org/set:config@v1") == corpus and hub.asked == [("org/set", "v1")]
    assert [text for _, text in corpus.documents(2)] == hub.texts[10:]
    (tmp_path / hub.files[1]).write_bytes(b"damaged")
    with pytest.raises(InputError, match=f"{hub.files[1]}.*delete it, and it is fetched again"):
        list(corpus.documents())


def test_hub_out_of_reach(hub, monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("Name or service not known\nand more")

    open_corpus("hf:org/set")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(
        InputError, match=f"fetching {hub.files[0]} of org/set failed: Name or service not known"
    ):
        read("hf:org/set")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    with pytest.raises(InputError, match="not known. Check.*CORPUS=python bash speedrun.sh"):
        open_corpus("hf:org/other")
