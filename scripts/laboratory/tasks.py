"""The tasks that optimizers race on: what is trained, on which rows, and how it is scored.

A setup is a dict of JSON types with everything that two comparable runs must share. A place is where its data
lies: the file of a text, or a folder of shards.
"""

import hashlib
import itertools
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from nanomuon import shards
from nanomuon.corpus import open_corpus
from nanomuon.dataloader import TrainLoader, validation_batches
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim_groups import option_name
from nanomuon.runtime import InputError, usable_gpus
from nanomuon.tokenizer import Tokenizer

EVAL_ROWS = 64  # windows of a validation batch of the shakespeare task


def shakespeare_setup(text, steps):
    """Characters of a text: trains on the first 90%, scores the loss on the last 10%."""
    if not text:
        raise InputError("the task shakespeare needs --text FILE, a plain text such as tinyshakespeare.txt")
    try:
        characters = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {text}: {error}") from error
    if len(characters) < 1000:
        raise InputError(f"--text {text} has {len(characters)} characters, too few to train on")
    setup = dict(
        data=digest(characters.encode()),
        model=dict(vocab_size=len(set(characters)), seq_len=64, depth=4, width=128, heads=4, kv_heads=4),
        rows=12,
        micro_rows=12,
        steps=steps or 2000,
        eval_every=50,
        eval_batches=4,
        whole_every=200,
        unit="nats per character",
    )
    return text, setup


def shakespeare_data(setup, text, seed, device):
    characters = Path(text).read_text(encoding="utf-8")
    ids = {character: index for index, character in enumerate(sorted(set(characters)))}
    tokens = torch.tensor([ids[character] for character in characters])
    length = setup["model"]["seq_len"]
    cut = int(0.9 * len(tokens))
    count = (len(tokens) - cut - 1) // length  # validation windows, side by side
    if count < 1 or cut <= length:
        raise InputError(f"{text} has {len(tokens)} characters, too few for windows of {length}")

    windows = tokens[:cut].unfold(0, length + 1, 1)
    training = random_windows(windows, setup["rows"], seed, device)
    inputs = tokens[cut : cut + count * length].view(count, length).to(device)
    targets = tokens[cut + 1 : cut + 1 + count * length].view(count, length).to(device)
    validation = validation_windows(inputs, targets)
    return training, validation, torch.ones(len(ids), device=device)


def random_windows(windows, rows, seed, device):
    """Yield (inputs, targets) of `rows` windows for ever; those of a step depend on seed and step alone."""
    for step in itertools.count():
        chosen = np.random.default_rng([seed, step]).integers(len(windows), size=rows)
        batch = windows[torch.from_numpy(chosen)].to(device)
        yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def validation_windows(inputs, targets):
    """Batches (EVAL_ROWS, length) of (count, length) windows, filled up with rows that are not scored.

    All have the same shape, so the model is compiled once. Each batch takes windows from all over the text,
    so a few batches represent all.
    """
    count, length = inputs.shape
    empty = -count % EVAL_ROWS
    inputs = torch.cat([inputs, inputs.new_zeros(empty, length)]).view(EVAL_ROWS, -1, length)
    targets = torch.cat([targets, targets.new_full((empty, length), -1)]).view(EVAL_ROWS, -1, length)
    return [(inputs[:, i].contiguous(), targets[:, i].contiguous()) for i in range(inputs.size(1))]


def corpus_setup(corpus, vocab_size, steps):
    """Any corpus, with base_train's loader: bits per byte. The shape is that of the races that are kept."""
    return setup_on_shards(
        corpus,
        vocab_size,
        dict(depth=4, heads=4, kv_heads=4),
        seq_len=256,
        rows=16,
        micro_rows=16,
        steps=steps or 300,
        eval_every=25,
        eval_batches=8,
        whole_every=steps or 300,
        unit="bits per byte",
    )


def speedrun_setup(vocab_size, steps):
    """The setting of modded-nanogpt's track 3 (records/track_3_optimization): 12 layers, width 768, context
    1,024, 524,288 tokens a step of FineWeb, steps to 3.28 nats per token; its Muon baseline takes 3,800.

    Two things differ, so its figures are comparable with each other, not with that track's: the tokenizer is
    our own, of GPT-2's size, and the model is this repo's.
    """
    if not usable_gpus():
        raise InputError(
            "the task speedrun trains on 2 billion tokens and needs a GPU; shakespeare and python do not"
        )
    return setup_on_shards(
        "hf:HuggingFaceFW/fineweb",
        vocab_size or 50257,
        dict(depth=12, heads=6, kv_heads=6),
        seq_len=1024,
        rows=512,
        micro_rows=16,
        steps=steps or 3800,
        eval_every=125,
        eval_batches=64,
        whole_every=500,
        unit="nats per token",
    )


def setup_on_shards(corpus, vocab_size, shape, seq_len, **rest):
    """(place, setup) of a task on a corpus. shape: keywords of GPTConfig.from_depth; rest: of the setup."""
    folder = shards.prepare_for_training(open_corpus(corpus), vocab_size)
    manifest = shards.read_manifest(folder)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    config = GPTConfig.from_depth(vocab_size=tokenizer.vocab_size, seq_len=seq_len, **shape)
    # Only the first entries: a corpus on the hub may still be growing
    first = [asdict(entry) for entry in manifest.val[:1] + manifest.train[:1]]
    setup = dict(data=digest(tokenizer.hash, first), model=asdict(config), **rest)
    return str(folder), setup


def corpus_data(setup, folder, seed, device):
    length = setup["model"]["seq_len"]
    rows, micro_rows = setup["rows"], setup["micro_rows"]
    training = TrainLoader(folder, length, rows, micro_rows, seed=seed, device=device)
    validation = list(validation_batches(folder, length, micro_rows, device=device))
    token_bytes = torch.from_numpy(Tokenizer.load(Path(folder) / "tokenizer").token_bytes).to(device)
    if setup["unit"] == "nats per token":
        token_bytes = (token_bytes > 0).float()  # every token but <|bos|> counts as one
    return training, validation, token_bytes


TASKS = ("shakespeare", "python", "corpus", "speedrun")


def open_task(args):
    """(place, setup) of --task, with --text, --corpus, --vocab-size, --steps and the fields of --model."""
    if args.task == "shakespeare":
        place, setup = shakespeare_setup(args.text, args.steps)
    elif args.task == "speedrun":
        place, setup = speedrun_setup(args.vocab_size, args.steps)
    else:
        place, setup = corpus_setup(args.corpus, args.vocab_size, args.steps)
    of_data = setup["model"]["vocab_size"]
    try:
        setup["model"] = asdict(GPTConfig(**{**setup["model"], **dict(args.model)}))
    except (TypeError, ValueError) as error:
        fields = ", ".join(GPTConfig.__dataclass_fields__)
        raise InputError(f"--model: {error}; its fields: {fields}") from error
    if setup["model"]["vocab_size"] < of_data:
        raise InputError(f"--model vocab_size={setup['model']['vocab_size']}: the data has {of_data} tokens")
    return place, {"name": args.task, **setup, "device": "cuda" if usable_gpus() else "cpu"}


def open_data(setup, place, seed, device):
    """(training batches, validation batches, bytes of each token); the seed decides the order of training."""
    if setup["name"] == "shakespeare":
        return shakespeare_data(setup, place, seed, device)
    return corpus_data(setup, place, seed, device)


def empty_model(setup, device):
    """The model of a setup, with parameters not yet set."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**setup["model"]), getattr(torch, setup["dtype"]))
    return model.to_empty(device=device)


def digest(*parts):
    """Twelve hex digits of bytes and JSON-like values; functions count by their name."""
    state = hashlib.sha256()
    for part in parts:
        if not isinstance(part, bytes):
            part = json.dumps(part, sort_keys=True, default=as_text).encode()
        state.update(part)
    return state.hexdigest()[:12]


def as_text(value):
    """The JSON form of other types: a function by its name, anything else as printed."""
    return str(option_name(value))
