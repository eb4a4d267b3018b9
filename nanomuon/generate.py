"""Sampling text from a trained model: sequences that grow together, one token each a step, with a key-value
cache.

`generate` continues one list of tokens and `Batch` several; `sample_texts` and `continue_samples` do it to
texts.
"""

import codecs
from collections.abc import Iterator, Sequence

import torch

from nanomuon.attention import without_cudnn
from nanomuon.gpt import GPT
from nanomuon.kv_cache import KVCache
from nanomuon.runtime import InputError
from nanomuon.tokenizer import Tokenizer

ROWS = 32  # sequences of a batch: each takes the memory of a whole context of keys and values
COLDEST = 1e-9  # temperatures below would overflow


class Batch:
    """Sequences of tokens that one model continues together, each by itself.

    What becomes of a sequence depends on its prompt and its seed alone: up to the rounding of products over
    more or fewer rows, it is what it would be in a batch of one. Equal prompts are read once.

    When the context is full, the newer half of a sequence is kept and read again, so that it can grow to any
    length.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperature: float = 0.8,
        top_k: int | None = 50,
        top_p: float = 1.0,
    ):
        """prompts: token ids, at least one each (ValueError; a document begins with the tokenizer's bos_id).
        seeds: as many, of the random numbers of each sequence. How a token is chosen: see `draw`.
        """
        if not all(prompts):
            raise ValueError("the prompt holds no token; start it with the tokenizer's bos_id")
        self.model = model
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.device = model.lm_head.weight.device
        self.sequences = [list(prompt) for prompt in prompts]
        self.generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]
        self.cache = KVCache(model.config, len(prompts), self.device, model.compute_dtype)
        # Tokens of each sequence that the cache holds: all of its context but the newest, which step() reads
        self.lengths = [0] * len(prompts)
        first_rows = {}
        for row, prompt in enumerate(prompts):
            first = first_rows.get(tuple(prompt))
            if first is None:
                first_rows[tuple(prompt)] = row
                self._read(row, self.sequences[row][-model.config.seq_len : -1])
            else:
                self.lengths[row] = self.lengths[first]
                self.cache.copy_row(first, row, self.lengths[row])

    @torch.inference_mode()
    def step(self) -> list[int]:
        """Continue every sequence by one token; return these."""
        context = self.model.config.seq_len
        for row, sequence in enumerate(self.sequences):
            if self.lengths[row] == context:
                newer_half = sequence[-max(1, context // 2) :]
                self._read(row, newer_half[:-1])
        self.cache.set_lengths(self.lengths)
        newest = torch.tensor([[sequence[-1]] for sequence in self.sequences], device=self.device)  # (B, 1)
        with without_cudnn():
            logits = self.model(newest, cache=self.cache)[:, -1]  # (B, V)
        tokens = draw(logits, self.temperature, self.top_k, self.top_p, self.generators)
        for row, token in enumerate(tokens):
            self.lengths[row] += 1
            self.sequences[row].append(token)
        return tokens

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Only the sequences of these rows go on; they are the rows of the batch from now on."""
        self.sequences = [self.sequences[row] for row in rows]
        self.generators = [self.generators[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self.cache.keep_rows(rows)

    def _read(self, row: int, tokens: list[int]) -> None:
        """Fill the cache of a row with these tokens in the place of what it holds."""
        alone = self.cache.row(row)
        self.lengths[row] = len(tokens)
        if tokens:
            with without_cudnn():
                read = torch.tensor([tokens], device=self.device)
                self.model(read, cache=alone, at=read.new_empty(0))  # no position goes through the head


def draw(
    logits: torch.Tensor,
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
    if temperature == 0:
        values, tokens = logits.max(-1, keepdim=True)  # (B, 1)
    else:
        kept = logits.size(-1) if top_k is None else min(top_k, logits.size(-1))
        values, tokens = logits.topk(kept)  # (B, K), the likeliest first
    if values[:, 0].isnan().any():
        raise InputError("the model's logits are not numbers: its weights are damaged, or training diverged")
    if temperature == 0:
        return tokens[:, 0].tolist()
    probabilities = torch.softmax(values / max(temperature, COLDEST), -1)
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


def generate(
    model: GPT,
    prompt: list[int],
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    stop: int | None = None,
    top_p: float = 1.0,
) -> Iterator[int]:
    """Yield up to `max_tokens` token ids that continue `prompt`, ending before the token `stop`.

    The other arguments and errors are those of `Batch`.
    """
    batch = Batch(model, [prompt], [seed], temperature, top_k, top_p)
    for _ in range(max_tokens):
        [token] = batch.step()
        if token == stop:
            return
        yield token


class Sample:
    """A prompt, as the beginning of a document, and what a model makes of it.

    `continuation` holds only what will not change: whole characters (those of several bytes may come in
    several tokens), and not the end that may become a stop string. A text ends before the stop string that is
    complete first, however its characters are spread over tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str, seed: int, stop_strings: Sequence[str] = ()):
        """ValueError for a prompt that is no text, see `Tokenizer.encode`, and for an empty stop string."""
        if not all(stop_strings):
            raise ValueError("an empty stop string would end a text before it begins")
        self.prompt, self.seed = prompt, seed
        self.prompt_tokens = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        self.continuation = ""
        self.tokens = 0  # drawn for it
        self.ended = False
        self._vocab, self._stop_strings = tokenizer.vocab, stop_strings
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""  # the beginning of a stop string, or not

    @property
    def text(self) -> str:
        return self.prompt + self.continuation

    def add(self, token: int) -> None:
        """Take one more token that was drawn; the sample may end by it."""
        self.tokens += 1
        self._waiting += self._decoder.decode(self._vocab[token])
        stop = _first_stop(self._waiting, self._stop_strings)
        if stop is None:
            certain = len(self._waiting) - _length_of_begun_stop(self._waiting, self._stop_strings)
            self.continuation += self._waiting[:certain]
            self._waiting = self._waiting[certain:]
        else:
            self.continuation += self._waiting[:stop]
            self.ended = True

    def end(self) -> None:
        """No token comes any more. Bytes that are no whole character become U+FFFD."""
        if not self.ended:
            self.continuation += self._waiting + self._decoder.decode(b"", final=True)
            self.ended = True


def _first_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first in the text; None if there is none."""
    found = []
    for stop_string in stop_strings:
        start = text.find(stop_string)
        if start >= 0:
            found.append((start + len(stop_string), start))
    return min(found)[1] if found else None


def _length_of_begun_stop(text: str, stop_strings: Sequence[str]) -> int:
    """Characters at the end of the text with which a stop string may have begun."""
    longest = 0
    for stop_string in stop_strings:
        for length in range(longest + 1, len(stop_string)):
            if text.endswith(stop_string[:length]):
                longest = length
    return longest


def continue_samples(
    model: GPT,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
) -> Iterator[None]:
    """Let the samples grow by up to `max_tokens` tokens each, in batches of ROWS, until all have ended.

    Yields after every step, so that what is there can be shown. A sample ends, too, where the model begins
    another document. The other arguments are those of `Batch`.
    """
    for start in range(0, len(samples), ROWS):
        growing = list(samples[start : start + ROWS])
        prompts = [sample.prompt_tokens for sample in growing]
        seeds = [sample.seed for sample in growing]
        batch = Batch(model, prompts, seeds, temperature, top_k, top_p)
        for _ in range(max_tokens):
            for sample, token in zip(growing, batch.step(), strict=True):
                if token == tokenizer.bos_id:
                    sample.end()
                else:
                    sample.add(token)
            yield
            rows = [row for row, sample in enumerate(growing) if not sample.ended]
            if not rows:
                break
            if len(rows) < len(growing):
                batch.keep(rows)
                growing = [growing[row] for row in rows]
        for sample in growing:
            sample.end()
        yield


def sample_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int,
    seed: int = 0,
    stop_strings: Sequence[str] = (),
    **how,
) -> list[str]:
    """Each prompt, as the beginning of a document, with its continuation; `how` goes to `continue_samples`.

    The i-th text is drawn with seed + i, so that equal prompts go on differently.
    """
    samples = []
    for i, prompt in enumerate(prompts):
        samples.append(Sample(tokenizer, prompt, seed + i, stop_strings))
    for _ in continue_samples(model, tokenizer, samples, max_tokens, **how):
        pass
    return [sample.text for sample in samples]
