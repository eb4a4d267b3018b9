"""Export of a run's model: transformers, tokenizers and this repo load the same folder.

Written without either library. `modeling_nanomuon.py`, which computes the model, is copied into the folder:
transformers runs that file under `trust_remote_code=True`. Nothing here runs it.
"""

from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from nanomuon import checkpoint
from nanomuon.checkpoint import tensor_shapes
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim_state import whole
from nanomuon.parallel import build_model
from nanomuon.plan import Settings, meta_model
from nanomuon.report import markdown_table
from nanomuon.runtime import (
    InputError,
    Runtime,
    find_run,
    on_first_rank,
    rank,
    read_json,
    write_json,
    write_text,
    write_whole,
)
from nanomuon.tokenizer import BOS, SPLIT_PATTERN, Tokenizer

MODEL_FILE = Path(__file__).with_name("modeling_nanomuon.py")
# The most in a stranger's config.json: more layers take minutes to build, longer rotary tables more memory
MOST_LAYERS, LONGEST_CONTEXT = 1024, 1 << 24

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

`trust_remote_code=True` runs `modeling_nanomuon.py`, which is in this folder: read it first, it is short. All
other files are JSON, text and safetensors, which run no code. Tested with transformers 5.24.

The tokenizer puts `<|bos|>` before a text, as before every document in training; `add_special_tokens=False`
leaves it out. Text that looks like `<|bos|>` is encoded as text.

## Figures

{figures}

Bits per byte are the cross-entropy of all validation text in bits, divided by its UTF-8 bytes, so
models with different vocabularies can be compared.

## Data

Trained on `{data}`. (`hf:` is a data set of the Hugging Face hub, `python` the code of Python's standard
library.)

## Licence

`modeling_nanomuon.py` is MIT licensed, as nanomuon is. Whoever trained the weights states here under which
terms they may be used; the terms of the training text bear on it.
"""


def write_config(folder: Path, config: GPTConfig, dtype: str = "float32") -> None:
    """Write config.json: the fields of GPTConfig, and where transformers finds the model's code.

    dtype: of the weights next to it.
    """
    content = {
        "architectures": ["NanomuonForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODEL_FILE.stem}.NanomuonConfig",
            "AutoModelForCausalLM": f"{MODEL_FILE.stem}.NanomuonForCausalLM",
        },
        "model_type": "nanomuon",
        "dtype": dtype,
        **asdict(config),
        **special_ids(config),
    }
    write_json(folder / "config.json", content)


def special_ids(config: GPTConfig) -> dict:
    """<|bos|> begins a document, and so ends the one before it; it also serves as padding."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), config.vocab_size - 1)


def read_config(folder: Path) -> GPTConfig:
    """The model's fields in config.json; InputError if they are missing, or no model can have them."""
    config = read_json(folder / "config.json", GPTConfig)
    if read_json(folder / "config.json").get("experts"):
        raise InputError(
            f"{folder}/config.json: this version has no models with experts: use the one that trained it"
        )
    if config.depth > MOST_LAYERS or config.seq_len > LONGEST_CONTEXT:
        raise InputError(
            f"{folder}/config.json: a model has at most {MOST_LAYERS} layers (depth) and a context of "
            f"{LONGEST_CONTEXT} tokens (seq_len)"
        )
    return config


def export(folder: Path, model: GPT, tokenizer: Tokenizer, facts: dict, dtype: str = "float32") -> None:
    """Write model.safetensors and the other files that transformers needs. Called by all ranks.

    facts: for the model card: step, and if known val_bpb, corpus, tokens. dtype: of the weights, which are
    float32 in training.
    """
    write_weights(folder, model, getattr(torch, dtype))
    if rank() > 0:
        return
    write_config(folder, model.config, dtype)
    write_json(folder / "generation_config.json", special_ids(model.config))
    write_json(folder / "tokenizer.json", tokenizer_json(tokenizer))
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.config))
    write_text(folder / MODEL_FILE.name, MODEL_FILE.read_text())
    write_text(folder / "README.md", model_card(folder.resolve().name, model, facts))


def write_weights(folder: Path, model: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Write model.safetensors, whole or not at all, in `dtype` or the model's. Called by all ranks."""
    weights = {}
    for name, tensor in model.state_dict().items():
        tensor = whole(tensor)
        if rank() == 0:
            # A copy: the format has neither transposes nor two names for one tensor
            tensor = tensor.to("cpu", dtype or tensor.dtype)
            weights[name] = tensor.clone(memory_format=torch.contiguous_format)

    def write():
        with write_whole(folder / "model.safetensors") as file:
            file.write(save(weights, {"format": "pt"}))

    on_first_rank(write)


def load_model(folder: Path, runtime: Runtime) -> GPT:
    """The model of a folder, from its config.json and model.safetensors: runs no code. InputError if one of
    them is missing or damaged, or if they do not belong together.
    """
    config, file = read_config(folder), folder / "model.safetensors"
    check_same_shapes(file, config)
    model = build_model(config, runtime, seed=0)
    model.load_state_dict(load_file(file))
    return model


def load_run(run: str, runtime: Runtime, checkpoint_name: str | None = None) -> tuple[GPT, Tokenizer, dict]:
    """(model, tokenizer, facts) of a run, by its name or by the path of its folder (see find_run).

    checkpoint_name: "last" or "step_<n>" for the model of that checkpoint, whether the run has ended or not;
    then called by all ranks. A float32 run computes in float32, others in the runtime's dtype. facts: step,
    corpus, revision, and for a finished run the figures of its summary. InputError if there is no such model,
    or if model and tokenizer do not belong together.
    """
    folder = find_run(run)
    if not folder.exists():
        others = sorted(path.parent.name for path in folder.parent.glob("*/settings.json"))
        raise InputError(
            f"there is no run {folder}; there are: {', '.join(others) or 'none (is NANOMUON_BASE_DIR set?)'}"
        )
    if checkpoint_name is None and not (folder / "model.safetensors").exists():
        raise InputError(
            f"{folder} holds no finished model (no model.safetensors); if its run has saved a checkpoint, "
            "--checkpoint last takes it"
        )
    settings = read_json(
        folder / "settings.json", Settings, "only a run has it (an exported model is for transformers)"
    )
    if settings.options.get("dtype") == "float32":
        runtime = replace(runtime, compute_dtype=torch.float32)
    facts = {key: settings.trained_on.get(key) for key in ("corpus", "revision")}
    if checkpoint_name is None:
        model = load_model(folder, runtime)
        summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else {}
        facts |= {**summary, "step": summary.get("steps")}
    else:
        found = checkpoint.find(folder, "auto" if checkpoint_name == "last" else checkpoint_name)
        if found is None:
            raise InputError(f"{folder} has no checkpoint {checkpoint_name}")
        model = build_model(read_config(folder), runtime, seed=0)
        facts["step"] = checkpoint.load_model(found, model)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    wanted = settings.trained_on.get("tokenizer")
    if tokenizer.hash != wanted or tokenizer.vocab_size != model.config.vocab_size:
        raise InputError(
            f"{folder}/tokenizer is not the one the model was trained with ({wanted}): put that one back"
        )
    return model, tokenizer, facts


def check_same_shapes(file: Path, config: GPTConfig) -> None:
    """InputError unless the header of model.safetensors lists exactly the tensors of config.json's model. No
    model is built before: a few bytes could ask for more memory than there is.
    """
    there = tensor_shapes(file)
    wanted = {name: tuple(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise InputError(
                f"{file} does not fit the model of config.json: {name} has shape {there.get(name)}, "
                f"by the config {wanted.get(name)}"
            )


def model_card(name: str, model: GPT, facts: dict) -> str:
    """README.md, which model hubs show as a model's page. facts: see export."""
    figures = {
        "steps": facts["step"],
        "bits per byte (validation)": facts.get("val_bpb"),
        "training tokens": facts.get("tokens"),
    }
    corpus = facts.get("corpus") or "python"
    if corpus.startswith("path:"):
        corpus = Path(corpus).name  # the rest is of no use to others
    return CARD.format(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        figures=markdown_table(("", ""), figures),
        data=corpus,
    )


def tokenizer_json(tokenizer: Tokenizer) -> dict:
    """tokenizer.json for the tokenizers library: the byte-level BPE of GPT-2 with our split pattern.

    No merge produces <|bos|>, so no text encodes to it, as in our tokenizer. It precedes every text unless
    add_special_tokens=False: in training it begins every row and every document.
    """
    characters = byte_characters()
    words = {token: "".join(characters[byte] for byte in token) for token in tokenizer.vocab}
    # tiktoken merges any two neighbours that together are a token, the lowest rank first: so every way to cut
    # a token into two others is a merge
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
            "ignore_merges": True,  # as in tiktoken, a piece of text that is a token needs no merges
            "vocab": {word: rank for rank, word in enumerate([*words.values(), BOS])},
            "merges": merges,
        },
    }


def byte_characters() -> list[str]:
    """The 256 printable characters by which GPT-2's byte-level BPE writes bytes: Latin-1's, except that those
    from U+0100 on, in order, replace spaces and unprintable ones.
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
