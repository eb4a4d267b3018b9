"""Sampling and bits per byte against direct computations."""

import io
import math
import sys

import pytest
import torch

from nanomuon import generate as generate_module
from nanomuon.evaluate import bits_per_byte
from nanomuon.generate import Batch, Sample, draw, generate, sample_texts
from nanomuon.kv_cache import KVCache
from nanomuon.runtime import InputError, printable
from nanomuon.tokenizer import Tokenizer
from scripts import sample
from tests.test_gpt import build

BYTES = Tokenizer([bytes([byte]) for byte in range(256)])  # a token is a byte, and 256 begins a document
# Prompts of different lengths, one of them twice, and one longer than the context of 16
PROMPTS = [[5], [7, 8, 9, 10, 11], [5], list(range(30, 42)), list(range(40, 90)), [3, 4]]


def by_itself(model, prompt, steps, seed=0, temperature=0.8, top_k=50, top_p=1.0):
    """The rule of sampling, written plainly: no cache, no batch, and PyTorch's own way to draw a number."""
    generator = torch.Generator().manual_seed(seed)
    context, sequence = model.config.seq_len, list(prompt)
    visible = min(len(sequence), context)
    for _ in range(steps):
        if visible > context:
            visible = context // 2
        logits = model(torch.tensor([sequence[-visible:]]))[0, -1]
        if temperature == 0:
            token = logits.argmax()
        else:
            values, tokens = logits.topk(min(top_k, logits.numel()))
            probabilities = torch.softmax(values / temperature, -1)
            for rank in range(len(values)):
                if top_p < 1 and probabilities[:rank].sum() >= top_p:
                    probabilities[rank:] = 0
                    break
            token = tokens[torch.multinomial(probabilities, 1, generator=generator)]
        sequence.append(int(token))
        visible += 1
    return sequence[len(prompt) :]


@pytest.mark.parametrize(
    "pattern, how",  # S sees 4 tokens
    [("L", {"temperature": 0}), ("SSL", {"temperature": 1.0, "top_k": 97}), ("SSL", {"top_p": 0.7})],
)
def test_a_batch_gives_what_each_prompt_gives_by_itself(pattern, how):
    model, seeds = build(window_pattern=pattern), range(10, 16)
    batch = Batch(model, PROMPTS, seeds, **how)
    for _ in range(27):  # past the context, which rows reach one by one
        batch.step()
    found = [sequence[-27:] for sequence in batch.sequences]
    for prompt, seed, continuation in zip(PROMPTS, seeds, found, strict=True):
        assert continuation == by_itself(model, prompt, 27, seed, **how)
    assert found[1] == list(generate(model, PROMPTS[1], 27, seed=11, **how))
    assert found[0] != found[2] or how.get("temperature") == 0  # equal prompts, other seeds


def test_logits_of_rows_of_different_lengths_are_those_without_a_cache():
    """And not those of what other rows, or rows before them, left in the memory."""
    for pattern, experts in (("L", 0), ("SSL", 0), ("SSL", 4)):
        model, lengths = build(window_pattern=pattern, experts=experts), [0, 3, 9, 1]
        tokens = torch.randint(97, (4, 16))
        cache = KVCache(model.config, 4, tokens.device, torch.float32)
        model((tokens[:, :12] + 1) % 97, cache=cache)  # of before
        for row, length in enumerate(lengths):
            alone = cache.row(row)
            if length:
                model(tokens[row : row + 1, :length], cache=alone)
        cache.set_lengths(lengths)
        for step in range(7):
            newest = torch.stack([tokens[row, length + step] for row, length in enumerate(lengths)])
            logits = model(newest[:, None], cache=cache)
            for row, length in enumerate(lengths):
                expected = model(tokens[row : row + 1, : length + step + 1])[0, -1]
                torch.testing.assert_close(logits[row, 0], expected, rtol=1e-4, atol=1e-5)


def test_prompts_are_read_once_and_what_ended_is_not_continued(monkeypatch):
    model, read = build(), []
    forward = model.forward

    def watched(tokens, **settings):
        read.append(tuple(tokens.shape))
        return forward(tokens, **settings)

    monkeypatch.setattr(model, "forward", watched)
    batch = Batch(model, [[5, 6, 7]] * 4 + [[8, 9]], range(5))
    assert read == [(1, 2), (1, 1)]  # what comes before the last token, which all rows read together
    batch.step()
    before = [list(sequence) for sequence in batch.sequences]
    batch.keep([1, 4])
    batch.step()
    assert read[2:] == [(5, 1), (2, 1)]
    assert [sequence[:-1] for sequence in batch.sequences] == [before[1], before[4]]
    assert [sequence[3:] for sequence in batch.sequences][0] == by_itself(model, [5, 6, 7], 2, seed=1)
    assert [sequence[2:] for sequence in batch.sequences][1] == by_itself(model, [8, 9], 2, seed=4)


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().repeat(400, 1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(400)]
    for top_p, kept in ((1e-6, {1}), (0.49, {1}), (0.6, {1, 3}), (0.79, {1, 3}), (0.9, {0, 1, 3})):
        assert set(draw(logits, 1.0, None, top_p, generators)) == kept
    assert set(draw(logits, 1.0, 2, 0.99, generators)) == {1, 3}  # of what top_k leaves
    assert draw(logits[:2], 1e-300, None, 1.0, generators[:2]) == [1, 1]  # as good as 0


def test_logits_that_are_not_numbers_are_told():
    model = build()
    model.lm_head.weight.data[3, 0] = math.nan
    for temperature in (0, 0.8):
        with pytest.raises(InputError, match="not numbers"):
            next(generate(model, [5], 1, temperature=temperature))


def test_greedy_sampling_follows_the_whole_context():
    model, tokens = build(), [5]
    for token in generate(model, [5], 15, temperature=0):
        assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)
    assert len(tokens) == 16


def test_text_longer_than_the_context_goes_on_from_its_newer_half():
    model = build()  # context 16
    tokens = [5, *generate(model, [5], 40, temperature=0)]
    assert len(tokens) == 41
    # position 17 is the first that does not fit: it is predicted from the last 8 tokens
    assert tokens[17] == int(model(torch.tensor([tokens[9:17]]))[0, -1].argmax())


def test_more_tokens_than_the_context_has_are_refused():
    model = build(seq_len=8)
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(ValueError, match="9 tokens are more than the context of 8"):
        model(tokens)
    cache = KVCache(model.config, 1, "cpu", torch.float32)
    model(tokens[:, :8], cache=cache)
    with pytest.raises(ValueError, match="1 tokens do not fit behind 8 in a context of 8"):
        model(tokens[:, :1], cache=cache)


def test_long_prompts_keep_their_end():
    model, prompt = build(), torch.randint(97, (30,)).tolist()
    assert list(generate(model, prompt, 1, temperature=0)) == [
        int(model(torch.tensor([prompt[-16:]]))[0, -1].argmax())
    ]


def test_sampling_repeats_with_its_seed_and_draws_from_the_model():
    model = build()
    assert list(generate(model, [5], 12, seed=3)) == list(generate(model, [5], 12, seed=3))
    draws = torch.tensor(Batch(model, [[5]] * 3000, range(3000), temperature=1.0, top_k=None).step())
    expected = torch.softmax(model(torch.tensor([[5]]))[0, -1], -1)
    frequency = torch.bincount(draws, minlength=97) / 3000
    assert (frequency - expected).abs().max() < 5 * (expected.max() / 3000).sqrt()
    likeliest = set(expected.topk(4).indices.tolist())
    assert set(Batch(model, [[5]] * 60, range(60), top_k=4).step()) <= likeliest


def test_sampling_ends_at_the_stop_token():
    model = build()
    whole = list(generate(model, [5], 12, temperature=0))
    assert list(generate(model, [5], 12, temperature=0, stop=whole[4])) == whole[: whole.index(whole[4])]


def test_no_token_waits_for_a_plan_of_cudnn(monkeypatch):
    """cuDNN's attention plans anew for each length. What is generated between two tokens leaves no trace."""
    attention, enabled = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*args, **keywords):
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model = build(depth=1)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for setting in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(setting)
            for _ in generate(model, [5, 6], 3):
                assert torch.backends.cuda.cudnn_sdp_enabled() == setting
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert enabled == [False] * 8  # the first of the two tokens is read by itself


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="bos_id"):
        next(generate(build(), [], 1))


def grow(text: bytes, stop_strings=()) -> list[str]:
    """The continuation after each byte of a text, until it ends."""
    growing, seen = Sample(BYTES, "", 0, stop_strings), []
    for byte in text:
        growing.add(byte)
        seen.append(growing.continuation)
        if growing.ended:
            return seen
    growing.end()
    return [*seen, growing.continuation]


def test_half_a_character_is_not_shown():
    assert grow("aé🙂b".encode()) == ["a", "a", "aé", "aé", "aé", "aé", "aé🙂", "aé🙂b", "aé🙂b"]
    for broken in (b"a\xc3", b"\xf0\x9fab", b"\xffa\xe2\x82"):  # the end is told by replacement characters
        assert grow(broken)[-1] == BYTES.decode(broken) and "\ufffd" in grow(broken)[-1]


def test_a_text_ends_before_its_stop_string_and_never_shows_a_part_of_it():
    assert grow(b"ab\n\ncd", ["\n\n"]) == ["a", "ab", "ab", "ab"]
    assert grow(b"a\nb", ["\n\n"]) == ["a", "a", "a\nb", "a\nb"]  # the line end waits for what follows
    assert grow(b"a\n", ["\n\n"])[-1] == "a\n"
    assert grow(b"xaab", ["aab"])[-1] == "x" and grow(b"xaaab", ["aab"])[-1] == "xa"
    assert grow("x–y".encode(), ["–"])[-1] == "x"
    # The one that is complete first counts, in whatever pieces the text comes
    whole = Tokenizer([*BYTES.vocab, b"abc", b"abcd"])
    for stops, left in ((["abcd", "bc"], "-a"), (["bc", "abc"], "-"), (["abcd"], "-")):
        assert grow(b"-abcd", stops)[-1] == left
        for pieces in ([256, ord("d")], [257]):
            growing = Sample(whole, "", 0, stops)
            for token in (ord("-"), *pieces):
                if not growing.ended:
                    growing.add(token)
            assert growing.continuation == left and growing.ended
    with pytest.raises(ValueError, match="empty stop string"):
        Sample(BYTES, "", 0, [""])


def test_texts_are_those_of_single_prompts_and_end_with_the_document(monkeypatch):
    letters = Tokenizer([bytes([letter]) for letter in b"abcdefghi"])  # 9 begins a document, and often
    model, lengths = build(vocab_size=10), set()
    prompts = ["", "abc", "", "d", "abcdefghiabcdefghi", "", "ii"]
    texts = sample_texts(model, letters, prompts, 30, seed=3)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        tokens = [9, *letters.encode(prompt)]
        continuation = by_itself(model, tokens, 30, seed=3 + i)
        if 9 in continuation:
            continuation = continuation[: continuation.index(9)]
        lengths.add(len(continuation))
        assert text == prompt + letters.decode(continuation)
    assert len(lengths) > 3
    monkeypatch.setattr(generate_module, "ROWS", 2)  # several batches
    assert sample_texts(model, letters, prompts, 30, seed=3) == texts


@pytest.fixture
def command(monkeypatch, capsys):
    """scripts.sample with a small model: (what it printed, what it printed to stderr)."""
    model = build(vocab_size=257)
    monkeypatch.setattr(sample, "load_run", lambda run, runtime, checkpoint_name: (model, BYTES, {}))

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        assert sample.main([*arguments, "--max-tokens", "30", "--dtype", "float32"]) is None  # exit code 0
        return capsys.readouterr()

    run.model = model
    return run


def test_samples_are_printed_in_order_and_harmlessly(command):
    printed = command("--prompt", "a\x1b[2J", "--prompt", "b", "--samples", "2", "--seed", "4")
    texts = sample_texts(command.model, BYTES, ["a\x1b[2J", "a\x1b[2J", "b", "b"], 30, seed=4)
    expected = ""
    for seed, text in enumerate(texts, start=4):
        expected += f"--- sample, seed {seed}\n{printable(text)}\n"
    assert printed.out == expected and "a\\x1b[2J" in printed.out
    assert "tokens per second" in printed.err


def test_samples_appear_while_they_grow(command, monkeypatch, capsys):
    seen = []
    step = Batch.step

    def watched(batch):
        seen.append(capsys.readouterr().out)
        return step(batch)

    monkeypatch.setattr(Batch, "step", watched)
    command("--prompt", "abc", "--temperature", "0.01")
    assert seen[0] == "" and seen[1].startswith("--- sample, seed 0\nabc")
    assert sum(text != "" for text in seen[2:]) > 3


def test_prompts_are_read_until_the_input_ends(command):
    printed = command("--interactive", "--seed", "7", stdin="abc\n\né\n".encode())
    texts = [
        sample_texts(command.model, BYTES, [p], 30, seed=7 + i)[0] for i, p in enumerate(("abc", "", "é"))
    ]
    for seed, text in enumerate(texts, start=7):
        assert f"> --- sample, seed {seed}\n{printable(text)}\n" in printed.out
    assert printed.out.endswith("> \n") and printed.err.count("tokens per second") == 3


def test_a_bad_line_is_told_and_the_next_one_is_read(command):
    printed = command("--interactive", stdin=b"ab\xff\nabc\n")
    assert "error: the prompt is not UTF-8 at character 3\n" in printed.err
    assert printed.out.count("--- sample") == 1 and "seed 0\nabc" in printed.out


def test_ctrl_c_ends_the_loop_as_the_end_of_the_input_does(command, monkeypatch):
    steps, step = [], Batch.step

    def interrupted(batch):
        steps.append(step(batch))
        if len(steps) == 5:
            raise KeyboardInterrupt
        return steps[-1]

    monkeypatch.setattr(Batch, "step", interrupted)
    printed = command("--interactive", stdin=b"abc\nabc\n")
    assert printed.out.endswith("\n") and printed.out.count("--- sample") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--top-p", "0"], "--top-p"),
        (["--top-p", "1.5"], "--top-p"),
        (["--top-p", "nan"], "--top-p"),
        (["--temperature", "-1"], "--temperature"),
        (["--top-k", "0"], "--top-k: must be from 1"),
        (["--seed", str(1 << 64)], "--seed: must be from 0"),
        (["--stop", ""], "--stop"),
        (["--prompt", "a\udcff"], "not UTF-8 at character 2"),
        (["--interactive", "--prompt", "a"], "leave --prompt out"),
    ],
)
def test_arguments_that_mean_nothing_are_told(command, arguments, message):
    with pytest.raises(InputError, match=message):
        command(*arguments)


def test_what_a_terminal_would_obey_is_shown_as_escapes():
    assert printable("a\tb\né🙂\u200d–") == "a\tb\né🙂\u200d–"
    for character in map(chr, [*range(9), *range(11, 32), *range(127, 160)]):
        assert printable(f"a{character}b") == f"a{character.encode('unicode_escape').decode()}b"
    for character in "\u202a\u202e\u2066\u2069\ud800\udfff":
        assert printable(character * 2) == f"\\u{ord(character):04x}" * 2
    assert printable("\x1b]0;x\x07") == r"\x1b]0;x\x07"


def test_bits_per_byte_is_total_bits_over_total_bytes():
    model = build()
    token_bytes = torch.randint(1, 9, (97,), dtype=torch.int32)
    token_bytes[0] = 0  # a special token: predicted in training, not text
    batches = [(torch.randint(97, (2, 16)), torch.randint(97, (2, 16))) for _ in range(3)]
    batches[2][1][1] = -1
    batches[0][1][0, :4] = 0
    nats = count = 0
    for inputs, targets in batches:
        logprobs = model(inputs).log_softmax(-1).detach()
        for row, position in torch.cartesian_prod(torch.arange(2), torch.arange(16)).tolist():
            target = int(targets[row, position])
            if target > 0:
                nats -= float(logprobs[row, position, target])
                count += int(token_bytes[target])
    assert bits_per_byte(model, batches, token_bytes) == pytest.approx(nats / math.log(2) / count, rel=1e-5)


def test_bits_per_byte_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no validation text"):
        bits_per_byte(build(), [], torch.ones(97, dtype=torch.int32))
