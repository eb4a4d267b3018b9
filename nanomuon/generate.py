"""Sampling text from a trained model, one token at a time with a key-value cache."""

from collections.abc import Iterator

import torch

from nanomuon.attention import without_cudnn
from nanomuon.gpt import GPT, KVCache


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: list[int],
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield up to `max_tokens` token ids that continue `prompt`, ending before the token `stop`.

    Temperature 0 takes the likeliest token; otherwise one of the `top_k` likeliest (all of them if None) is
    drawn. When the context is full, its newer half is kept and read again, so that text of any length can be
    sampled. Raises ValueError for an empty prompt (start with the tokenizer's bos_id).
    """
    if not prompt:
        raise ValueError("the prompt holds no token; start it with the tokenizer's bos_id")
    device, context = model.lm_head.weight.device, model.config.seq_len
    generator = torch.Generator(device=device).manual_seed(seed)
    history, unread, cache = list(prompt), prompt[-context:], None
    for _ in range(max_tokens):
        if cache is None or cache.length + len(unread) > context:
            if cache is not None:
                unread = history[-max(1, context // 2) :]
            cache = KVCache(model.config, 1, device, model.compute_dtype)
        with without_cudnn():
            logits = model(torch.tensor([unread], device=device), cache=cache)[0, -1]  # (V,)
        token = _draw(logits, temperature, top_k, generator)
        if token == stop:
            return
        yield token
        history.append(token)
        unread = [token]


def sample_texts(
    model: GPT, tokenizer, prompts: list[str], max_tokens: int, seed: int = 0, **how
) -> list[str]:
    """Each prompt, as the beginning of a document, with its continuation; `how` goes to `generate`.

    The i-th text is drawn with seed + i, so that equal prompts go on differently.
    """
    texts = []
    for i, prompt in enumerate(prompts):
        tokens = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        tokens += generate(model, tokens, max_tokens, seed=seed + i, stop=tokenizer.bos_id, **how)
        texts.append(tokenizer.decode(tokens[1:]))
    return texts


def _draw(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    values, tokens = logits.topk(min(top_k or logits.numel(), logits.numel()))
    return int(tokens[torch.multinomial(torch.softmax(values / temperature, -1), 1, generator=generator)])
