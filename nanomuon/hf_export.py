"""Export of a run's model to a folder that transformers and tokenizers can load.

It is written without either library. The files that compute the model, gpt.py and what it imports, are copied
into the folder with `modeling_nanomuon.py`, a wrapper that transformers runs under `trust_remote_code=True`.
Nothing here runs it.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save

from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim_state import whole
from nanomuon.runtime import on_first_rank, rank, write_json, write_text, write_whole
from nanomuon.tokenizer import BOS, SPLIT_PATTERN, Tokenizer
from nanomuon.trained import with_relative_imports

MODEL_FILE = Path(__file__).with_name("modeling_nanomuon.py")

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- nanomuon
---

# {name}

A language model of {parameters:,} parameters, trained from scratch with nanomuon (Muon for its matrices,
AdamW for the rest). It continues text; it was not taught to follow instructions or to be truthful.

## Load it

`pip install torch transformers`, then:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this file is
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
prompt = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```

`trust_remote_code=True` runs the Python files in this folder: read them first, they are short. All other
files are JSON, text and safetensors, which run no code. Tested with transformers 5.24.

The tokenizer puts `<|bos|>` before a text, as before every document in training; `add_special_tokens=False`
leaves it out. Text that looks like `<|bos|>` is encoded as ordinary text.

## License

The Python files are under the MIT license, like nanomuon. Whoever trained the weights should state here what
they were trained on and the terms of their use, which depend on those of the training text.
"""


def write_config(folder: Path, config: GPTConfig, dtype: str = "float32") -> None:
    """Write config.json: the fields of GPTConfig, and where transformers finds the model's code.

    dtype: the dtype of the weights next to it.
    """
    content = {
        "architectures": ["NanomuonForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODEL_FILE.stem}.NanomuonConfig",
            "AutoModelForCausalLM": f"{MODEL_FILE.stem}.NanomuonForCausalLM",
        },
        "model_type": "nanomuon",
        "dtype": dtype,
        "tie_word_embeddings": False,  # the default of transformers 4 would tie lm_head to wte
        **asdict(config),
        **special_ids(config),
    }
    write_json(folder / "config.json", content)


def special_ids(config: GPTConfig) -> dict:
    """<|bos|> begins a document, and so ends the one before it; it also serves as padding."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), config.vocab_size - 1)


def export(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str = "float32") -> None:
    """Write model.safetensors and the other files that transformers needs. Called by all ranks.

    dtype: the dtype of the exported weights; in training they are float32.
    """
    write_weights(folder, model, getattr(torch, dtype))
    if rank() > 0:
        return
    write_config(folder, model.config, dtype)
    write_json(folder / "generation_config.json", special_ids(model.config))
    write_json(folder / "tokenizer.json", tokenizer_json(tokenizer))
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.config))
    for file in with_relative_imports(MODEL_FILE):
        write_text(folder / file.name, file.read_text())
    parameters = sum(p.numel() for p in model.parameters())
    # Model hubs show it as the model's page
    write_text(folder / "README.md", CARD.format(name=folder.resolve().name, parameters=parameters))


def write_weights(folder: Path, model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Write model.safetensors in `dtype`, whole or not at all. Called by all ranks."""
    weights = {}
    for name, tensor in model.state_dict().items():
        tensor = whole(tensor)
        if rank() == 0:
            # A copy, because the format supports neither transposes nor two names for one tensor
            tensor = tensor.to("cpu", dtype)
            weights[name] = tensor.clone(memory_format=torch.contiguous_format)

    def write():
        with write_whole(folder / "model.safetensors") as file:
            file.write(save(weights, {"format": "pt"}))

    on_first_rank(write)


def tokenizer_json(tokenizer: Tokenizer) -> dict:
    """tokenizer.json for the tokenizers library: GPT-2's byte-level BPE with our split pattern.

    No merge produces <|bos|>, so no text encodes to it, as in our tokenizer. It precedes every text unless
    add_special_tokens=False, because in training it begins every row and every document.
    """
    characters, words = byte_characters(), {}
    for token in tokenizer.vocab:
        words[token] = "".join(characters[byte] for byte in token)
    # tiktoken merges any two neighbors whose concatenation is a token, the lowest rank first. So every way to
    # split a token into two others is a merge
    merges = []
    for token in words:
        for cut in range(1, len(token)):
            left, right = words.get(token[:cut]), words.get(token[cut:])
            if left and right:
                merges.append([left, right])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    pattern = {"Regex": SPLIT_PATTERN}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    bos, text = {"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second_text = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [bos, text, bos, second_text],
            "special_tokens": {BOS: {"id": BOS, "ids": [tokenizer.bos_id], "tokens": [BOS]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # as in tiktoken, a piece of text that is itself a token needs no merges
            "vocab": {word: rank for rank, word in enumerate([*words.values(), BOS])},
            "merges": merges,
        },
    }


def byte_characters() -> list[str]:
    """The 256 printable characters that stand for bytes in GPT-2's byte-level BPE: those of Latin-1, except
    that characters from U+0100 on, in order, replace spaces and unprintable ones.
    """
    characters = []
    stand_ins = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + stand_ins))
            stand_ins += 1
    return characters


def tokenizer_config(config: GPTConfig) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": BOS,
        "pad_token": BOS,
        "split_special_tokens": True,  # text that looks like a special token is text
        "padding_side": "left",  # for generation
        "model_max_length": config.seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
    }
