"""The tokenizer: any text survives it, and its files can be trusted."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanomuon.runtime import InputError
from nanomuon.tokenizer import BOS, PIECE, Tokenizer

TEXTS = [f"def function_{i}(x):\n    return x + {i} * 2024 if x else 'nichts für {i}'\n" for i in range(300)]
TOKENIZER = Tokenizer.train(TEXTS, 350)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.token_bytes[ids].sum() == len(text.encode())
    assert max(ids, default=0) < TOKENIZER.bos_id == TOKENIZER.vocab_size - 1 == 349


@pytest.mark.parametrize("text", [BOS, f"a{BOS}{BOS}b", "<|endoftext|>", "\0", "👩‍👩‍👧‍👦 é̂", "\r\n\t \u2028"])
def test_no_text_makes_special_tokens(text):
    assert TOKENIZER.bos_id not in TOKENIZER.encode(text) and TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("unit", [" ", "\n", "a", "^", "\0", "ab 12\n", "😀"])
def test_long_runs(unit):
    text = unit * 1_000_000
    ids = TOKENIZER.encode_to_numpy(text)
    assert TOKENIZER.token_bytes[ids].sum() == len(text.encode()) and TOKENIZER.decode(ids) == text


def test_pieces_end_after_lines():
    rng = random.Random(0)
    text = "".join("word " * rng.randrange(50) + "\n" for _ in range(3000))
    assert len(text) > 5 * PIECE
    # cut in pieces, it encodes as line by line, since no token spans a line end here
    lines = []
    for line in text.splitlines(keepends=True):
        lines += TOKENIZER.encode(line)
    assert abs(len(TOKENIZER.encode(text)) - len(lines)) <= len(text) // PIECE + 50
    assert TOKENIZER.encode(text[: PIECE // 2]) == TOKENIZER._bpe.encode_ordinary(text[: PIECE // 2])


def test_lone_surrogate_is_named():
    with pytest.raises(ValueError, match=r"\\ud800.*character 3"):
        TOKENIZER.encode("abc\ud800")


def test_bos():
    assert TOKENIZER.decode([TOKENIZER.bos_id, *TOKENIZER.encode("x")]) == BOS + "x"
    assert TOKENIZER.token_bytes.dtype == np.int32 and TOKENIZER.token_bytes[TOKENIZER.bos_id] == 0


def test_training_compresses_and_repeats():
    again = Tokenizer.train(TEXTS, 350)
    assert again.vocab == TOKENIZER.vocab and again.hash == TOKENIZER.hash
    text = "".join(TEXTS)
    assert len(TOKENIZER.encode(text)) < len(text.encode()) / 2
    assert not any(token.isdigit() and len(token) > 2 for token in TOKENIZER.vocab)
    assert Tokenizer.train(TEXTS, 300).hash != TOKENIZER.hash


@pytest.mark.parametrize("size", [0, 256, 100_000])
def test_impossible_vocabulary(size):
    with pytest.raises(InputError, match="vocabulary"):
        Tokenizer.train(TEXTS, size)


def test_files(tmp_path):
    TOKENIZER.save(tmp_path / "t")
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"vocab.txt", "tokenizer.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    loaded = Tokenizer.load(tmp_path / "t")
    assert loaded.hash == TOKENIZER.hash and loaded.encode(TEXTS[7]) == TOKENIZER.encode(TEXTS[7])
    TOKENIZER.save(tmp_path / "t")  # over itself
    settings = json.loads((tmp_path / "t/tokenizer.json").read_text())
    assert settings["special_tokens"] == {BOS: 349}


@pytest.mark.parametrize("damage", ["swap", "cut", "garbage", "json", "gone"])
def test_damaged_files_are_refused(tmp_path, damage):
    TOKENIZER.save(tmp_path / "t")
    vocab, settings = tmp_path / "t/vocab.txt", tmp_path / "t/tokenizer.json"
    lines = vocab.read_text().splitlines()
    if damage == "swap":
        lines[-1], lines[-2] = lines[-2], lines[-1]
    vocab.write_text("\n".join(lines[:-1] if damage == "cut" else lines) + "\n")
    if damage == "garbage":
        vocab.write_bytes(b"\xff\xfe")
    if damage == "json":
        settings.write_text("{")
    if damage == "gone":
        vocab.unlink()
    with pytest.raises(InputError, match=str(tmp_path)):
        Tokenizer.load(tmp_path / "t")
