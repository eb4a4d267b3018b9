"""The table of tok_eval against counts by hand; no test here asks the network for anything."""

from dataclasses import asdict

import pytest
import tiktoken

from nanomuon.gpt import GPTConfig
from nanomuon.runtime import InputError, write_json
from nanomuon.tokenizer import PIECE
from scripts import tok_eval
from tests.texts import TOKENIZER, random_texts

BYTES = tiktoken.Encoding(
    "bytes", pat_str=".|\\n", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={}
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """tiktoken has GPT-2's tokenizer, which is one token a byte here, and cannot load another."""

    def get_encoding(name):
        if name == "gpt2":
            return BYTES
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)


def columns(output):
    return {line.split()[0]: line.split()[1:] for line in output.splitlines()}


def test_the_table_of_a_text(tmp_path, capsys):
    text = "def été(x): return 12345\n" * 9000
    assert len(text) > 3 * PIECE
    (tmp_path / "text.txt").write_text(text)
    TOKENIZER.save(tmp_path / "t")
    tok_eval.main(["--tokenizer", str(tmp_path / "t"), "--text", str(tmp_path / "text.txt")])
    output = capsys.readouterr().out
    size, tokens = len(text.encode()), len(TOKENIZER.encode(text))
    assert output.startswith(f"{size:,} bytes, ")
    found = columns(output)
    assert found["ours"] == ["300", f"{tokens:,}", f"{size / tokens:.3f}", "1.000"]
    assert found["GPT-2"] == ["256", f"{size:,}", "1.000", f"{size / tokens:.3f}"]
    assert "tiktoken cannot load cl100k_base here (ConnectionError)" in output


def test_a_run_is_measured_on_validation_text_of_its_corpus(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    texts = random_texts(200)
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i:03}.txt").write_text(text)
    run_dir = tmp_path / "runs" / "mine"
    TOKENIZER.save(run_dir / "tokenizer")
    config = asdict(GPTConfig.from_depth(1, TOKENIZER.vocab_size, seq_len=16))
    about = dict(step=1, val_bpb=2.0, corpus=f"path:{tmp_path}/texts", tokenizer=TOKENIZER.hash)
    write_json(run_dir / "config.json", {"config": config, "meta": about})
    (run_dir / "model.safetensors").touch()
    tok_eval.main(["--run", "mine"])
    validation = [text for text in texts if tok_eval.is_validation(text)]
    tokens = sum(len(TOKENIZER.encode(text)) for text in validation)
    size = sum(len(text.encode()) for text in validation)
    assert 0 < len(validation) < 50
    assert columns(capsys.readouterr().out)["ours"] == ["300", f"{tokens:,}", f"{size / tokens:.3f}", "1.000"]


def test_a_corpus_that_training_cuts_into_pieces_is_measured_on_pieces(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    book = "".join(f"line {i}\n" for i in range(30000))
    (tmp_path / "books").mkdir()
    for part, text in enumerate([book, "a book\n" + book]):  # several files: each is one document
        assert not tok_eval.is_validation(text)  # else there is a validation set without pieces
        (tmp_path / "books" / f"{part}.txt").write_text(text)
    texts = tok_eval.validation_texts(f"path:{tmp_path}/books")
    assert texts
    assert all(len(text.encode()) <= 4096 and text in "a book\n" + book for text in texts)


@pytest.mark.parametrize("content, words", [(None, "No such file"), (b"\xff", "utf-8"), (b"", "no text in")])
def test_a_text_that_is_none(tmp_path, content, words):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    TOKENIZER.save(tmp_path / "t")
    with pytest.raises(InputError, match=words):
        tok_eval.main(["--tokenizer", str(tmp_path / "t"), "--text", str(file)])
