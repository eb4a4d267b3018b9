"""The README.md of an exported model, which model hubs show as its page."""

from pathlib import Path

from nanomuon.corpus import PRESETS
from nanomuon.gpt import GPTConfig
from nanomuon.plan import meta_model
from nanomuon.read_json import Number, OrNull, Record, Text, Whole

# What the card takes from summary.json
SUMMARY = Record({}, {"tokens": Whole(), "train_loss": OrNull(Number()), "dtype": Text(64)})

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

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this file is
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
prompt = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```

`trust_remote_code=True` runs `modeling_nanomuon.py`, which is in this folder: read it first, it is short. All
other files are JSON, text and safetensors, which run no code. Tested with transformers 5.23.

The tokenizer puts `<|bos|>` before a text, as before every document in training; `add_special_tokens=False`
leaves it out. Text that looks like `<|bos|>` is encoded as text.

## Figures

{figures}

Bits per byte are the cross-entropy of all validation text in bits, divided by its UTF-8 bytes: they do not
depend on the vocabulary.

## The model

{shape}

## Data

{data}

## Licence

`modeling_nanomuon.py` is MIT licensed, as nanomuon is. Under which terms the weights may be used is for the
one who trained them to say, here; the terms of the training text bear on it.
"""


def model_card(run_dir: Path, config: GPTConfig, about: dict, summary: dict, dtype: str) -> str:
    """about: the facts that export_model wrote. summary: what summary.json holds, or will; it may be empty.
    dtype: of the exported weights.
    """
    parameters = meta_model(config).parameter_counts()["total"]
    figures = {"steps": f"{about['step']:,}"}
    if about["val_bpb"] is not None:
        figures["bits per byte (validation)"] = f"{about['val_bpb']:.4f}"
    if "tokens" in summary:
        figures["training tokens"] = f"{summary['tokens']:,}"
    if summary.get("train_loss") is not None:
        figures["training loss (nats per token)"] = summary["train_loss"]
    if "dtype" in summary:
        figures["computed in"] = summary["dtype"]
    shape = {
        "layers": config.depth,
        "width": config.width,
        "attention heads": f"{config.heads}, {config.kv_heads} for keys and values",
        "context": f"{config.seq_len:,} tokens",
        "vocabulary": f"{config.vocab_size:,} tokens, byte-level BPE",
        "weights": dtype,
    }
    if config.experts:
        shape["experts"] = f"{config.experts}, of which a token visits {config.experts_per_token}"
    return CARD.format(
        name=run_dir.resolve().name,
        parameters=parameters,
        figures=table(figures),
        shape=table(shape),
        data=data_sentence(about["corpus"]),
    )


def data_sentence(corpus: str) -> str:
    kind, _, place = PRESETS.get(corpus, corpus).partition(":")
    if kind == "hf":
        return f"The data set `{place}` of the Hugging Face hub."
    if kind == "path":  # the rest of the path is of no use to others
        return f"Text of its maker's own: `{Path(place).name}`."
    return "The source code of Python's standard library, as on the machine that trained it."


def table(rows: dict) -> str:
    lines = ["| | |", "| --- | --- |"]
    for name, value in rows.items():
        lines.append(f"| {name} | {value} |")
    return "\n".join(lines)
