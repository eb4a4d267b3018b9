"""Sampling text from a trained model: a batch of samples grows by one token per step, with a cache of keys
and values.
"""

import codecs
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from nanomuon.attention import WITHOUT_CUDNN
from nanomuon.gpt import GPT
from nanomuon.kv_cache import KVCache
from nanomuon.runtime import InputError
from nanomuon.tokenizer import Tokenizer

ROWS = 32  # samples per batch: each takes the memory for a whole context of keys and values


def padded(rows: Sequence[list[int]]) -> Tensor:
    """Rows of tokens as one tensor (B, T), T at least 1, padded with zeros at the end."""
    return pad_sequence([torch.tensor(tokens or [0]) for tokens in rows], batch_first=True)


def read(model: GPT, rows: Sequence[list[int]]) -> KVCache:
    """A cache whose rows have read these tokens."""
    cache = KVCache(model.config, len(rows), model.cos.device)
    no_position = torch.empty(0, dtype=torch.int64, device=cache.device)  # no logits needed
    model(padded(rows).to(cache.device), cache=cache, at=no_position)
    cache.crop([len(tokens) for tokens in rows])
    return cache


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generators: Sequence[torch.Generator]
) -> list[int]:
    """One token for each row of logits (B, V).

    Temperature 0 takes the most likely token. Otherwise one is drawn from the softmax of logits / temperature
    over the `top_k` most likely tokens, and of these from the fewest whose probabilities sum to at least
    `top_p` (nucleus sampling, arXiv 1904.09751). Row b uses the random numbers of generators[b]. InputError
    if the largest logit is not finite.
    """
    values, tokens = logits.topk(min(top_k, logits.size(-1)))  # (B, K), most likely first
    largest = values[:, :1]  # NaN if any logit is
    if not largest.isfinite().all():
        raise InputError("this model has diverged: its logits are not finite. Use an earlier --checkpoint")
    if temperature < 1e-30:  # dividing by it could give 0 / 0
        return logits.argmax(-1).tolist()  # of equal ones the first: topk() would take any
    probabilities = torch.softmax((values - largest) / temperature, -1)
    if top_p < 1:
        of_likelier_tokens = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(of_likelier_tokens >= top_p, 0)
    rows = zip(probabilities, generators, strict=True)
    chosen = torch.stack([row.multinomial(1, generator=generator) for row, generator in rows])  # (B, 1)
    return tokens.gather(-1, chosen)[:, 0].tolist()


class Sample:
    """A prompt, as the beginning of a document, and its `continuation` by a model. `tokens` has both.

    The continuation holds only final text: whole characters, and no ending that may begin a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str, seed: int, stop_strings: Sequence[str] = ()):
        """ValueError for a prompt with lone surrogates, see `Tokenizer.encode_to_numpy`."""
        self.prompt, self.seed, self.tokenizer = prompt, seed, tokenizer
        self.tokens = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        self.continuation = ""
        self.ended = False
        self._stop_strings = stop_strings
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = ""

    def add(self, token: int) -> None:
        """Add a token. The sample ends if this completes a stop string or begins another document."""
        self.tokens.append(token)
        if token == self.tokenizer.bos_id:
            self.end()
            return
        self._decoded += self._decoder.decode(self.tokenizer.vocab[token])
        certain, waits = len(self._decoded), 0
        for stop in self._stop_strings:
            if stop in self._decoded:
                certain, self.ended = min(certain, self._decoded.index(stop)), True
            waits = max(waits, len(stop) - 1)  # characters that may begin it
        self.continuation = self._decoded[: certain if self.ended else max(0, certain - waits)]

    def end(self) -> None:
        """End the sample. Bytes that are not a whole character become U+FFFD."""
        if not self.ended:
            self.continuation = self._decoded + self._decoder.decode(b"", final=True)
            self.ended = True


def tokens_before(count: int, context: int) -> int:
    """How many earlier tokens the newest of `count` sees: all of them until the context is full; then only
    those in its newer half, until it is full again.
    """
    half = max(1, context // 2)
    if count <= context:
        return count - 1
    return half - 1 + (count - context - 1) % (context - half + 1)


@torch.no_grad()
def continue_samples(
    model: GPT,
    samples: Sequence[Sample],
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
) -> Iterator[None]:
    """Grow the samples by up to `max_tokens` tokens each, in batches of ROWS, until all have ended.

    Yields after every step, so that the text so far can be shown. `draw` chooses the tokens. Up to rounding,
    a sample depends only on its prompt and its seed, not on other samples. It can grow to any length, see
    `tokens_before`.
    """
    device = model.cos.device
    # Under inference_mode a DTensor dispatches whole linear layers, 20 times as slow as plain products
    cut = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    for start in range(0, len(samples), ROWS):
        growing, cache = samples[start : start + ROWS], None
        generators = [torch.Generator(device).manual_seed(sample.seed) for sample in growing]
        for _ in range(max_tokens):
            lengths = [tokens_before(len(sample.tokens), model.config.seq_len) for sample in growing]
            newest = torch.tensor([sample.tokens[-1:] for sample in growing], device=device)  # (B, 1)
            with sdpa_kernel(WITHOUT_CUDNN), torch.inference_mode(not cut):
                if cache is None or cache.lengths != lengths:
                    rows = zip(growing, lengths, strict=True)
                    cache = read(model, [sample.tokens[-1 - length : -1] for sample, length in rows])
                logits = model(newest, cache=cache)[:, -1]  # (B, V)
            tokens = draw(logits, temperature, top_k, top_p, generators)
            for sample, token in zip(growing, tokens, strict=True):
                sample.add(token)
            yield
            rows = [row for row, sample in enumerate(growing) if not sample.ended]
            if not rows:
                break
            if len(rows) < len(growing):
                growing, generators = [growing[row] for row in rows], [generators[row] for row in rows]
                cache.select(rows)
        for sample in growing:
            sample.end()


def sample_texts(
    model: GPT, tokenizer: Tokenizer, prompts: Sequence[str], max_tokens: int, seed: int = 0, **how
) -> list[str]:
    """Each prompt with its continuation. `how`: keywords of `continue_samples`.

    The i-th text is drawn with seed + i, so that equal prompts get different continuations. Of a model in
    pieces, all ranks must call this with the same arguments.
    """
    samples = [Sample(tokenizer, prompt, seed + i) for i, prompt in enumerate(prompts)]
    for _ in continue_samples(model, samples, max_tokens, **how):
        pass
    return [sample.prompt + sample.continuation for sample in samples]
