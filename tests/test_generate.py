"""Sampling and bits per byte against direct computations."""

import math

import pytest
import torch

from nanomuon.evaluate import bits_per_byte
from nanomuon.generate import generate
from tests.test_gpt import build


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


def test_long_prompts_keep_their_end():
    model, prompt = build(), torch.randint(97, (30,)).tolist()
    assert list(generate(model, prompt, 1, temperature=0)) == [
        int(model(torch.tensor([prompt[-16:]]))[0, -1].argmax())
    ]


def test_sampling_repeats_with_its_seed_and_draws_from_the_model():
    model = build()
    assert list(generate(model, [5], 12, seed=3)) == list(generate(model, [5], 12, seed=3))
    draws = torch.tensor(
        [next(generate(model, [5], 1, temperature=1.0, top_k=None, seed=s)) for s in range(3000)]
    )
    expected = torch.softmax(model(torch.tensor([[5]]))[0, -1], -1)
    frequency = torch.bincount(draws, minlength=97) / 3000
    assert (frequency - expected).abs().max() < 5 * (expected.max() / 3000).sqrt()
    likeliest = set(expected.topk(4).indices.tolist())
    assert {next(generate(model, [5], 1, top_k=4, seed=s)) for s in range(60)} <= likeliest


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
