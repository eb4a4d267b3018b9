"""Sampling, and bits per byte (run.py), against direct computations."""

import io
import math
import sys

import pytest
import torch
import torch.nn.functional as F

from nanomuon import generate
from nanomuon.generate import Sample, draw, sample_texts
from nanomuon.run import bits_per_byte
from nanomuon.runtime import printable
from nanomuon.tokenizer import Tokenizer
from scripts import sample
from tests.mistakes import refused
from tests.test_gpt import build
from tests.texts import BYTES

LETTERS = Tokenizer([bytes([letter]) for letter in b"abcdefghi"])  # 9 begins a document, and often
# Prompts of different lengths, two of them twice, and one longer than the context of 16
PROMPTS = ["", "abc", "", "d", "abcdefghiabcdefghi", "abc", "ii", "abcdefghi"]


def by_itself(model, prompt, steps, seed=0, temperature=0.8, top_k=50):
    """The rule of sampling, written plainly: no cache, no batch, and PyTorch's own multinomial."""
    generator = torch.Generator().manual_seed(seed)
    sequence, visible = [], 0
    for token in [9, *LETTERS.encode(prompt)] + [None] * steps:
        if token is None:
            logits = model(torch.tensor([sequence[-visible:]]))[0, -1]
            values, tokens = logits.topk(min(top_k, logits.numel()))
            token = tokens[0]
            if temperature > 0:
                probabilities = torch.softmax(values / temperature, -1)
                token = tokens[torch.multinomial(probabilities, 1, generator=generator)]
            if token == 9:
                break
        sequence.append(int(token))
        visible = visible + 1 if visible < 16 else 8  # the newer half of a full context
    return LETTERS.decode(sequence[1:])


@pytest.mark.parametrize(
    "fields, how",  # S sees 4 tokens
    [
        ({}, {"temperature": 0}),
        ({"window_pattern": "SSL"}, {"temperature": 0}),
        ({"window_pattern": "SSL"}, {"temperature": 1.0, "top_k": 97}),
        ({}, {"top_k": 4}),
    ],
)
def test_a_batch_samples_what_each_prompt_samples_by_itself(fields, how, monkeypatch):
    """As without a cache, beyond the context, until the next document, in any batch."""
    model = build(vocab_size=10, **fields)
    expected = [by_itself(model, prompt, 27, 3 + i, **how) for i, prompt in enumerate(PROMPTS)]
    assert len({len(text) for text in expected}) > 3
    assert expected[1] != expected[5] or how["temperature"] == 0  # equal prompts, other seeds
    for rows in (32, 3):
        monkeypatch.setattr(generate, "ROWS", rows)
        assert sample_texts(model, LETTERS, PROMPTS, 27, seed=3, **how) == expected


def test_a_token_is_drawn_from_the_likeliest_that_top_k_and_top_p_leave():
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().repeat(400, 1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(400)]
    for top_k, top_p, kept in (
        (9, 1e-6, {1}),
        (9, 0.6, {1, 3}),
        (2, 0.99, {1, 3}),
    ):
        assert set(draw(logits, 1.0, top_k, top_p, generators)) == kept
    assert set(draw(logits, 1e-300, 9, 1.0, generators)) == {1}
    ties = torch.randint(4, (400, 100)).float()
    for top_k in (1, 50):
        assert draw(ties, 0.0, top_k, 1.0, generators) == ties.argmax(-1).tolist()
    draws = torch.tensor([draw(logits, 0.5, 9, 1.0, generators) for _ in range(10)])
    frequency = torch.bincount(draws.flatten(), minlength=4) / 4000
    assert (frequency - torch.softmax(logits[0] / 0.5, -1)).abs().max() < 0.03


WHOLE = Tokenizer([*BYTES.vocab, b"abc", b"abcd"])


@pytest.mark.parametrize(
    "tokens, stops, shown",
    [
        ("aé🙂b".encode(), [], ["a", "a", "aé", "aé", "aé", "aé", "aé🙂", "aé🙂b", "aé🙂b"]),
        (b"a\xc3", [], ["a", "a", "a\ufffd"]),
        (b"xaaab", ["aab"], ["", "", "x", "xa", "xa"]),
        ([ord("-"), 257], ["cd", "bc"], ["", "-a"]),  # two at once: before the first of them
        ([ord("-"), 258, ord("b")], ["cd"], ["", "-"]),  # the next document
    ],
)
def test_only_final_text_is_shown(tokens, stops, shown):
    growing, seen = Sample(WHOLE, "", 0, stops), []
    for token in tokens:
        if not growing.ended:
            growing.add(token)
            seen.append(growing.continuation)
    if not growing.ended:
        growing.end()
        seen.append(growing.continuation)
    assert seen == shown


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs scripts.sample with a small model; returns what it printed."""
    model = build(vocab_size=257)
    monkeypatch.setattr(sample, "load_run", lambda run, runtime, checkpoint_name: (model, BYTES, 0))

    def run(*arguments, stdin=b""):
        text = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
        monkeypatch.setattr(sys, "stdin", text)
        assert sample.main([*arguments, "--max-tokens", "30"]) is None  # exit code 0
        return capsys.readouterr()

    run.model = model
    return run


def test_samples_are_printed_in_order_and_harmlessly(command):
    printed = command("--prompt", "a\x1b[2J", "--prompt", "", "--samples", "2", "--seed", "4")
    texts = sample_texts(command.model, BYTES, ["a\x1b[2J", "a\x1b[2J", "", ""], 30, seed=4)
    expected = ""
    for seed, text in enumerate(texts, start=4):
        expected += f"--- sample, seed {seed}\n{printable(text)}\n"
    assert printed.out == expected and "a\\x1b[2J" in printed.out
    assert "--- 120 tokens in" in printed.err
    shorter = command("--stop", texts[3][-1], "--seed", "7")
    assert shorter.out == f"--- sample, seed 7\n{printable(texts[3].partition(texts[3][-1])[0])}\n"


def test_samples_appear_while_they_grow(command, monkeypatch, capsys):
    seen = []
    command.model.register_forward_pre_hook(lambda *_: seen.append(capsys.readouterr().out))
    command("--prompt", "abc", "--temperature", "0.01")
    assert seen[0] == "--- sample, seed 0\nabc" and sum(text != "" for text in seen[2:]) > 3


def test_prompts_are_read_until_the_input_ends_or_ctrl_c(command):
    printed = command("--interactive", "--seed", "7", stdin="abc\né\n".encode() + b"\xff\n")
    for seed, prompt in enumerate(("abc", "é", "\ufffd"), start=7):
        [text] = sample_texts(command.model, BYTES, [prompt], 30, seed=seed)
        assert f"> --- sample, seed {seed}\n{printable(text)}\n" in printed.out
    assert printed.out.endswith("> \n") and printed.err.count("tokens per second") == 3

    def interrupt(*_):
        raise KeyboardInterrupt

    command.model.register_forward_pre_hook(interrupt)
    assert command("--interactive", stdin=b"abc\nabc\n").out.count("--- sample") == 1
    with refused("standard input, which is closed"):
        command("--interactive", stdin=None)


def test_characters_that_a_terminal_would_obey_are_shown_as_escapes():
    assert printable("a\tb\né🙂\u200d–") == "a\tb\né🙂\u200d–"
    for character in map(chr, [*range(9), *range(11, 32), *range(127, 160)]):
        assert printable(f"a{character}b") == f"a{character.encode('unicode_escape').decode()}b"
    for character in "\u202a\u202e\u2066\u2069\ud800\udfff":
        assert printable(character * 2) == f"\\u{ord(character):04x}" * 2


def test_bits_per_byte_is_total_bits_over_total_bytes():
    model = build()
    token_bytes = torch.randint(1, 9, (97,), dtype=torch.int32)
    token_bytes[0] = 0  # a special token: predicted in training, not text
    inputs, targets = torch.randint(97, (2, 6, 16))
    targets[5] = -1
    scored = targets > 0
    nats = F.cross_entropy(model(inputs)[scored], targets[scored], reduction="sum")
    expected = nats / math.log(2) / token_bytes[targets[scored]].sum()
    batches = list(zip(inputs.chunk(3), targets.chunk(3), strict=True))
    assert bits_per_byte(model, batches, token_bytes) == pytest.approx(expected.item(), rel=1e-5)
