"""The tasks on which optimizers race: what is trained, on which rows, and how it is scored.

A setup is a dict of JSON types with everything that two comparable runs must share. A place is where the data
is: a text file, or a folder of shards.
"""

import hashlib
import itertools
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view

from nanomuon import shards
from nanomuon.corpus import open_corpus
from nanomuon.dataloader import TrainLoader, to_device, validation_batches, validation_rows
from nanomuon.gpt import GPTConfig
from nanomuon.optim_groups import option_name
from nanomuon.plan import model_config
from nanomuon.runtime import InputError, one_line, parse_json, usable_gpus
from nanomuon.tokenizer import Tokenizer
from scripts import base_train

TASKS = ("shakespeare", "python", "corpus")
EVAL_ROWS = 64  # windows per validation batch in the shakespeare task
BATCH = 4096  # tokens per step on a corpus
# {field of the model: its type}; the data decides the vocabulary
FIELDS = {name: field.type for name, field in GPTConfig.__dataclass_fields__.items() if name != "vocab_size"}


def batch_of(setup):
    """Tokens per step."""
    return setup["rows"] * setup["model"]["seq_len"]


def open_task(args):
    """(place, setup) for --task, --text, --corpus, --vocab-size, --steps and the fields of --model."""
    if args.task == "shakespeare":
        place, setup = shakespeare_setup(args.text, args.model)
    else:
        place, setup = corpus_setup(args.corpus, args.vocab_size, args.model)
    steps = args.steps or setup["steps"]
    setup |= {"steps": steps, "eval_every": max(25, steps // 40)}
    return place, {"name": args.task, **setup, "device": "cuda" if usable_gpus() else "cpu"}


def open_data(setup, place, seed, device):
    """(training batches, validation batches, bytes of each token); the seed decides the order of training."""
    if setup["name"] == "shakespeare":
        return shakespeare_data(setup, place, seed, device)
    return corpus_data(setup, place, seed, device)


def check_fields(source, fields):
    """InputError for an unknown field of the model, or a wrong type. source: what the error names."""
    for name, value in fields.items():
        if name not in FIELDS:
            raise InputError(f"{source}: {name} is not one of {', '.join(FIELDS)}")
        try:
            parse_json(json.dumps(value), FIELDS[name])
        except ValueError as error:
            raise InputError(f"{source}: {name}={value!r}: {error}") from error


def changed_config(source, model, fields):
    """The model's GPTConfig with these fields replaced."""
    try:
        return GPTConfig(**{**model, **fields})
    except ValueError as error:
        raise InputError(f"{source}: {error}") from error


# ---- characters of a text


def shakespeare_setup(text, fields):
    """Characters of a text: trains on the first 90%, scores the loss on the last 10%."""
    if not text:
        raise InputError("the task shakespeare needs --text FILE, a plain text such as tinyshakespeare.txt")
    with one_line(f"--text {text}"):
        characters = Path(text).read_text(encoding="utf-8")
    length = fields.get("seq_len", 64)
    if len(characters) // 10 <= length:
        raise InputError(f"--text {text} has {len(characters)} characters, too few for windows of {length}")
    model = dict(vocab_size=len(set(characters)), seq_len=length, depth=4, width=128, heads=4, kv_heads=4)
    setup = dict(
        data=digest(characters.encode()),
        model=asdict(changed_config("--model", model, fields)),
        rows=12,
        steps=2000,
        eval_batches=4,
        unit="nats per character",
    )
    return text, setup


def shakespeare_data(setup, text, seed, device):
    characters = Path(text).read_text(encoding="utf-8")
    if digest(characters.encode()) != setup["data"]:
        raise InputError(f"{text} has changed since the race began: start the race again")
    letters, tokens = np.unique(list(characters), return_inverse=True)
    length, cut = setup["model"]["seq_len"], int(0.9 * len(tokens))
    training = sliding_window_view(tokens[:cut], length + 1)
    validation = sliding_window_view(tokens[cut:], length + 1)[::length]  # no token is a target twice
    batches = random_batches(training, setup["rows"], seed, device)
    return batches, padded_batches(validation, device), torch.ones(len(letters), device=device)


def random_batches(windows, rows, seed, device):
    """Yield (inputs, targets) of `rows` windows forever. A step's windows depend only on seed and step."""
    for step in itertools.count():
        chosen = np.random.default_rng([seed, step]).integers(len(windows), size=rows)
        yield to_device(windows[chosen], device)


def padded_batches(windows, device):
    """(inputs, targets) of all windows, EVAL_ROWS at a time, the last ones padded with rows that are not
    scored.

    All have the same shape, so the model is compiled once. Each batch takes windows from all over the text,
    so a few batches represent the whole.
    """
    batches = []
    count = -(-len(windows) // EVAL_ROWS)
    for first in range(count):
        inputs, targets = to_device(windows[first::count], device)
        missing = 0, 0, 0, EVAL_ROWS - len(inputs)
        batches.append((F.pad(inputs, missing), F.pad(targets, missing, value=-1)))
    return batches


# ---- any corpus


def corpus_setup(corpus, vocab_size, fields):
    """base_train's model and loader, with steps of 4,096 tokens, scored in bits per byte."""
    folder = shards.shards_for_training(open_corpus(corpus), vocab_size)
    manifest = shards.read_manifest(folder)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    args = base_train.make_parser().parse_args([])
    args.depth = fields.get("depth", args.depth)  # the width follows
    args.vocab_size = tokenizer.vocab_size
    model = model_config(args, "cuda" if usable_gpus() else "cpu")
    config = changed_config("--model", asdict(model), fields)
    # Only the first entries, because a corpus on the hub may still be growing
    first = [asdict(entry) for entry in manifest.val[:1] + manifest.train[:1]]
    setup = dict(
        data=digest(tokenizer.hash, first),
        model=asdict(config),
        rows=max(1, BATCH // config.seq_len),
        steps=300,
        eval_batches=8,
        unit="bits per byte",
    )
    return str(folder), setup


def corpus_data(setup, folder, seed, device):
    length, rows = setup["model"]["seq_len"], setup["rows"]
    training = TrainLoader(folder, length, rows, rows, seed=seed, device=device)
    validation = list(validation_batches(validation_rows(folder, length), rows, device=device))
    token_bytes = torch.from_numpy(Tokenizer.load(Path(folder) / "tokenizer").token_bytes).to(device)
    return training, validation, token_bytes


def digest(*parts):
    """Twelve hex digits that identify bytes and JSON-like values; functions count by name."""
    state = hashlib.sha256()
    for part in parts:
        if not isinstance(part, bytes):
            part = json.dumps(part, sort_keys=True, default=as_text).encode()
        state.update(part)
    return state.hexdigest()[:12]


def as_text(value):
    """The JSON form of other types: a function's name, the type of what prints its address, anything else as
    it is printed.
    """
    if type(value).__repr__ is object.__repr__:
        value = type(value)
    return str(option_name(value))
