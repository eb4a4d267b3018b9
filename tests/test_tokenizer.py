"""The tokenizer: any text survives it. Its file is loaded again in test_shards.py."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanomuon.runtime import InputError
from nanomuon.tokenizer import BOS, PIECE, Tokenizer

TEXTS = [f"def function_{i}(x):\n    return x + {i} * 2024 if x else 'nichts für {i}'\n" for i in range(300)]
TOKENIZER = Tokenizer.train(TEXTS, 350)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example(f"a{BOS}{BOS}b<|endoftext|>")
@example("\0 👩‍👩‍👧‍👦 é̂ \r\n\t \u2028")
def test_any_text_survives_a_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.token_bytes[ids].sum() == len(text.encode())
    assert max(ids, default=0) < TOKENIZER.bos_id == TOKENIZER.vocab_size - 1 == 349


@pytest.mark.parametrize("unit", [" ", "\n", "a", "^", "\0", "ab 12\n", "😀"])
def test_long_runs_of_one_unit_survive(unit):
    text = unit * (1_000_000 // len(unit))
    ids = TOKENIZER.encode_to_numpy(text)
    assert TOKENIZER.token_bytes[ids].sum() == len(text.encode()) and TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode(text[:PIECE]) == TOKENIZER._bpe.encode_ordinary(text[:PIECE])
    Tokenizer.train([*TEXTS, text * 2], 300)


def test_bos_is_no_text():
    assert TOKENIZER.decode([TOKENIZER.bos_id, *TOKENIZER.encode("x")]) == BOS + "x"
    assert TOKENIZER.token_bytes.dtype == "int32" and TOKENIZER.token_bytes[TOKENIZER.bos_id] == 0


def test_training_compresses_and_repeats():
    again = Tokenizer.train(TEXTS, 350)
    assert again.vocab == TOKENIZER.vocab and again.hash == TOKENIZER.hash
    text = "".join(TEXTS)
    assert len(TOKENIZER.encode(text)) < len(text.encode()) / 2
    assert not any(token.isdigit() and len(token) > 2 for token in TOKENIZER.vocab)
    assert Tokenizer.train(TEXTS, 300).hash != TOKENIZER.hash
    with pytest.raises(InputError, match="too small for a vocabulary of 100000: use --vocab-size") as error:
        Tokenizer.train(TEXTS, 100_000)
    largest = int(re.search("--vocab-size ([0-9]+) or less", str(error.value))[1])
    assert Tokenizer.train(TEXTS, largest).vocab_size == largest
