"""Sampling text from a trained model: samples that grow together, one token each a step, with a cache of keys
and values.
"""

import codecs
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from nanomuon.attention import WITHOUT_CUDNN, attention, masked
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import InputError
from nanomuon.tokenizer import Tokenizer

ROWS = 32  # samples of a batch: each takes the memory of a whole context of keys and values


class KVCache:
    """What a model keeps of the tokens that it has read: their keys and values, and what the next tokens need
    of the last ones (inputs of convolutions, halves of keys). It grows with every call of the model.

    lengths: the tokens that each row has read. capacity: the most that fit, None: the context.
    """

    def __init__(self, config: GPTConfig, rows: int, device: torch.device, capacity: int | None = None):
        self.lengths, self.device = [0] * rows, device
        self.context, self.capacity = config.seq_len, capacity or config.seq_len
        self.kept = {}  # by layer and kind: (B, capacity, Hkv, D)
        self.recent = {}  # by place in the model: (B, at least as many tokens as the place needs, ...)

    def positions(self, T: int) -> Tensor:
        """Where in the context the next T tokens are, (B, T)."""
        starts = torch.tensor(self.lengths, device=self.device)[:, None]  # (B, 1)
        self.queries = starts + torch.arange(T, device=self.device)  # (B, T)
        self.places = torch.arange(len(starts), device=self.device)[:, None], self.queries
        self.end = max(self.lengths) + T
        self.masks = {}  # by window
        return self.queries.clamp(max=self.context - 1)  # padding may lie beyond it

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, normalized: bool
    ) -> Tensor:
        """attention() of q to all keys and values of a layer, of which k and v are the newest."""
        for kind, new in (("keys", k), ("values", v)):
            if (layer, kind) not in self.kept:
                # Not empty(): a mask does not hide a NaN that happens to be in the memory
                self.kept[layer, kind] = new.new_zeros(new.size(0), self.capacity, *new.shape[2:])
            self.kept[layer, kind][self.places] = new
        if q.size(1) == self.end:  # nothing came before
            return attention(q, k, v, window, normalized)
        keys, values = self.kept[layer, "keys"], self.kept[layer, "values"]
        return masked(q, keys[:, : self.end], values[:, : self.end], self.mask(window))

    def mask(self, window: int | None) -> Tensor:
        """(B, 1, T, end), True if a query sees a key."""
        if window not in self.masks:
            distance = self.queries[:, :, None] - torch.arange(self.end, device=self.device)
            self.masks[window] = ((distance >= 0) & (distance < (window or self.end)))[:, None]
        return self.masks[window]

    def with_recent(self, place: str, x: Tensor, count: int) -> Tensor:
        """x (B, T, ...) with the `count` before it at this place of the model in front, zeros at first."""
        if place not in self.recent:
            self.recent[place] = x.new_zeros(x.size(0), count, *x.shape[2:])
        self.recent[place] = torch.cat((self.recent[place][:, -count:], x), dim=1)
        return self.recent[place]

    def advance(self, T: int) -> None:
        """T tokens have gone through all layers."""
        self.lengths = [length + T for length in self.lengths]

    def crop(self, lengths: list[int]) -> None:
        """Forget the padding at the end of rows that the model has read in one call."""
        ends = torch.tensor(lengths, device=self.device)[:, None]  # (B, 1)
        rows = torch.arange(len(lengths), device=self.device)[:, None]
        for place, inputs in self.recent.items():
            count = inputs.size(1) - self.end
            self.recent[place] = inputs[rows, ends + torch.arange(count, device=self.device)]
        self.lengths = lengths

    def select(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] was."""
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(rows, device=self.device)
        self.kept = {name: tensor[index] for name, tensor in self.kept.items()}
        self.recent = {place: inputs[index] for place, inputs in self.recent.items()}


def read(model: GPT, rows: Sequence[Sequence[int]], capacity: int | None = None) -> KVCache:
    """A cache whose rows have read these tokens. Equal rows are computed once."""
    number = {}  # of each distinct row
    for tokens in rows:
        number.setdefault(tuple(tokens), len(number))
    lengths = [len(tokens) for tokens in number]
    padded = torch.zeros(len(number), max(1, *lengths), dtype=torch.int64)
    for i, tokens in enumerate(number):
        padded[i, : len(tokens)] = torch.tensor(tokens)
    device = model.cos.device
    cache = KVCache(model.config, len(number), device, capacity)
    no_position = torch.empty(0, dtype=torch.int64, device=device)  # none goes through the head
    with sdpa_kernel(WITHOUT_CUDNN):
        model(padded.to(device), cache=cache, at=no_position)
    cache.crop(lengths)
    cache.select([number[tuple(tokens)] for tokens in rows])
    return cache


def draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generators: Sequence[torch.Generator],
) -> list[int]:
    """One token for each row of logits (B, V).

    Temperature 0 takes the likeliest. Otherwise one is drawn from the softmax of logits / temperature over
    the `top_k` likeliest tokens (all of them if None), and of these from the fewest whose probabilities sum
    to at least `top_p` (nucleus sampling, arXiv 1904.09751). Row b uses the random numbers of generators[b].
    InputError for logits that are not numbers.
    """
    kept = logits.size(-1) if top_k is None else min(top_k, logits.size(-1))
    values, tokens = logits.topk(kept)  # (B, K), the likeliest first
    if values[:, 0].isnan().any():
        raise InputError("the model's logits are not numbers: its weights are damaged, or training diverged")
    if temperature == 0:
        return tokens[:, 0].tolist()
    probabilities = torch.softmax(values / temperature, -1)
    if top_p < 1:
        of_likelier_tokens = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(of_likelier_tokens >= top_p, 0)
    # The largest p / e, with e exponentially distributed, falls on each token with probability p. This is how
    # torch.multinomial draws one number, too, but with one generator for all rows.
    noise = torch.empty_like(probabilities)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    chosen = (probabilities / noise).argmax(-1, keepdim=True)
    return tokens.gather(-1, chosen)[:, 0].tolist()


class Sample:
    """A prompt, as the beginning of a document, and what a model makes of it: `tokens`, and as text the
    `continuation` of the prompt.

    The continuation holds only what will not change: whole characters, and not the end that may be the
    beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str, seed: int, stop_strings: Sequence[str] = ()):
        """ValueError for a prompt that is no text, see `Tokenizer.encode`."""
        self.prompt, self.seed, self.tokenizer = prompt, seed, tokenizer
        self.tokens = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        self.continuation = ""
        self.ended = False
        self._stop_strings = stop_strings
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""  # characters that may still belong to a stop string

    def add(self, token: int) -> None:
        """Take one more token. The sample ends if this completes a stop string or begins another document."""
        self.tokens.append(token)
        if token == self.tokenizer.bos_id:
            self.end()
            return
        self._waiting += self._decoder.decode(self.tokenizer.vocab[token])
        stops = [self._waiting.find(stop) for stop in self._stop_strings if stop in self._waiting]
        if stops:
            self.continuation += self._waiting[: min(stops)]
            self.ended = True
            return
        longest_beginning = max((len(stop) - 1 for stop in self._stop_strings), default=0)
        certain = max(0, len(self._waiting) - longest_beginning)
        self.continuation += self._waiting[:certain]
        self._waiting = self._waiting[certain:]

    def end(self) -> None:
        """No token comes any more. Bytes that are no whole character become U+FFFD."""
        if not self.ended:
            self.continuation += self._waiting + self._decoder.decode(b"", final=True)
            self.ended = True


@torch.inference_mode()
def continue_samples(
    model: GPT,
    samples: Sequence[Sample],
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
) -> Iterator[None]:
    """Let the samples grow by up to `max_tokens` tokens each, in batches of ROWS, until all have ended.

    Yields after every step, so that what is there can be shown. How a token is chosen: see `draw`. What
    becomes of a sample depends on its prompt and its seed alone: up to rounding, it is what it would be by
    itself. When the context is full, the newer half of a sample is read again, so it can grow to any length.
    """
    context, device = model.config.seq_len, model.cos.device
    for start in range(0, len(samples), ROWS):
        growing = samples[start : start + ROWS]
        generators = [torch.Generator(device).manual_seed(sample.seed) for sample in growing]
        # It holds what the next token depends on but for the newest one, which the next call reads
        cache = read(model, [sample.tokens[-context:-1] for sample in growing])
        for _ in range(max_tokens):
            if context in cache.lengths:
                before = []
                for sample, length in zip(growing, cache.lengths, strict=True):
                    kept = max(1, context // 2) - 1 if length == context else length
                    before.append(sample.tokens[-1 - kept : -1])
                cache = read(model, before)
            newest = torch.tensor([sample.tokens[-1:] for sample in growing], device=device)  # (B, 1)
            with sdpa_kernel(WITHOUT_CUDNN):
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
    """Each prompt with its continuation. `how` goes to `continue_samples`.

    The i-th text is drawn with seed + i, so that equal prompts go on differently.
    """
    samples = [Sample(tokenizer, prompt, seed + i) for i, prompt in enumerate(prompts)]
    for _ in continue_samples(model, samples, max_tokens, **how):
        pass
    return [sample.prompt + sample.continuation for sample in samples]
