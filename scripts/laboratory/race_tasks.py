"""The tasks that optimizers race on: what is trained, on which rows, and how it is scored.

A setup is a dict of all that two runs must share to be compared, of JSON types; a race keeps it as task.json.
What it was made from lies at a place: the file of a text, or a folder of shards.
"""

import ast
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch

from nanomuon import attention, gpt, moe, optim, orthogonalize, qk_clip, shards
from nanomuon.dataloader import TrainLoader, validation_batches
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import InputError, usable_gpus

EVAL_ROWS = 64  # windows of a validation batch of the shakespeare task


@dataclass(frozen=True)
class Task:
    """make_setup(text, vocab_size) gives the place of the data and the setup.

    open_data(setup, place, seed, device) gives the training batches, in an order that is a function of the
    seed, the validation batches, and the bytes of each token. targets: losses; a race tells how soon they are
    reached.
    """

    make_setup: Callable
    open_data: Callable
    targets: list


def shakespeare_setup(text, vocab_size=None):
    """Characters of a text: the first 90% to train on, the loss over all windows of the last 10% to score."""
    if not text:
        raise InputError("the task shakespeare needs --text FILE, a plain text such as tinyshakespeare.txt")
    try:
        characters = Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--text {text}: not UTF-8") from error
    except OSError as error:
        raise InputError(f"--text {text}: {error.strerror or 'not UTF-8'}") from error
    if len(characters) < 1000:
        raise InputError(f"--text {text} has {len(characters)} characters, too few to train on")
    setup = dict(
        data=digest(characters.encode()),
        model=dict(vocab_size=len(set(characters)), seq_len=64, depth=4, width=128, heads=4, kv_heads=4),
        rows=12,
        micro_rows=12,
        steps=2000,
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

    All have one shape, so that one is compiled. Each takes windows from all over the text: some batches then
    say more about all of them.
    """
    count, length = inputs.shape
    empty = -count % EVAL_ROWS
    inputs = torch.cat([inputs, inputs.new_zeros(empty, length)]).view(EVAL_ROWS, -1, length)
    targets = torch.cat([targets, targets.new_full((empty, length), -1)]).view(EVAL_ROWS, -1, length)
    return [(inputs[:, i].contiguous(), targets[:, i].contiguous()) for i in range(inputs.size(1))]


def python_setup(text=None, vocab_size=None, steps=300):
    """The corpus that needs no download, with base_train's loader and model of depth 4: bits per byte."""
    return corpus_setup(
        "python",
        vocab_size,
        dict(depth=4),
        seq_len=256,
        rows=16,
        micro_rows=16,
        steps=steps,
        eval_every=25,
        eval_batches=8,
        whole_every=steps,
        unit="bits per byte",
    )


python_long_setup = functools.partial(python_setup, steps=2000)


def speedrun_setup(text=None, vocab_size=None):
    """The setting of modded-nanogpt's track 3 (records/track_3_optimization): 12 layers, width 768, context
    1,024, 524,288 tokens a step of FineWeb, steps to 3.28 nats per token; its Muon baseline takes 3,800.

    Two things differ, so that its figures compare with each other and not with that track's: the tokenizer is
    our own of GPT-2's size, and the model is this repo's, with value embeddings and residual scalars.
    """
    if not usable_gpus():
        raise InputError(
            "the task speedrun trains on 2 billion tokens and needs a GPU; shakespeare and python do not"
        )
    return corpus_setup(
        "hf:HuggingFaceFW/fineweb",
        vocab_size or 50257,
        dict(depth=12, heads=6, kv_heads=6),
        seq_len=1024,
        rows=512,
        micro_rows=16,
        steps=3800,
        eval_every=125,
        eval_batches=64,
        whole_every=500,
        unit="nats per token",
    )


def corpus_setup(corpus, vocab_size, shape, seq_len, **rest):
    """Place and setup of a task on a corpus. shape: keywords of GPTConfig.from_depth, rest: what it adds."""
    folder = shards.prepare_for_training(corpus, vocab_size, rest["steps"] * rest["rows"] * seq_len)
    manifest = shards.read_manifest(folder)
    tokenizer = shards.open_tokenizer(folder)
    config = GPTConfig.from_depth(vocab_size=tokenizer.vocab_size, seq_len=seq_len, **shape)
    first = [manifest["val"][:1], manifest["train"][:1]]  # of a corpus on the hub more may still be written
    setup = dict(data=digest(tokenizer.hash, first), model=asdict(config), **rest)
    return str(folder), setup


def corpus_data(setup, folder, seed, device):
    length = setup["model"]["seq_len"]
    rows, micro_rows = setup["rows"], setup["micro_rows"]
    training = TrainLoader(folder, length, rows, micro_rows, seed=seed, device=device)
    validation = list(validation_batches(folder, length, micro_rows, device=device))
    token_bytes = torch.from_numpy(shards.open_tokenizer(folder).token_bytes).to(device)
    if setup["unit"] == "nats per token":
        token_bytes = (token_bytes > 0).float()  # every token but <|bos|> counts as one
    return training, validation, token_bytes


TASKS = {
    "shakespeare": Task(shakespeare_setup, shakespeare_data, targets=[1.775, 1.6]),
    "python": Task(python_setup, corpus_data, targets=[1.5, 1.4]),
    "python-long": Task(python_long_setup, corpus_data, targets=[1.0, 0.95]),
    "speedrun": Task(speedrun_setup, corpus_data, targets=[3.5, 3.28]),
}


def open_task(name, text, vocab_size, steps, model):
    """(place, setup) of a task; `steps` and fields of GPTConfig in `model` replace its own where given."""
    check_model_fields(model)
    place, setup = TASKS[name].make_setup(text, vocab_size)
    setup = {"name": name, **setup}
    if model.get("vocab_size", math.inf) < setup["model"]["vocab_size"]:
        raise InputError(
            f"--model vocab_size={model['vocab_size']}: the data has {setup['model']['vocab_size']} tokens"
        )
    try:
        setup["model"] = asdict(GPTConfig(**{**setup["model"], **model}))
    except (TypeError, ValueError) as error:
        raise InputError(f"--model: {error}") from error
    if steps:
        setup["steps"] = steps
    setup["device"] = "cuda" if usable_gpus() else "cpu"
    setup["model_code"] = digest(*[code_digest(module.__file__) for module in (gpt, attention, moe, qk_clip)])
    setup["optimizer_code"] = digest(*[code_digest(module.__file__) for module in (optim, orthogonalize)])
    return place, setup


def empty_model(setup, device):
    """The model of a setup, its parameters not yet set."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**setup["model"]), getattr(torch, setup["dtype"]))
    return model.to_empty(device=device)


def check_model_fields(model):
    """InputError where `model`, what --model gives, has what is no field of GPTConfig, or not of its type."""
    types = {field.name: field.type for field in fields(GPTConfig)}
    for name, value in model.items():
        if name not in types:
            raise InputError(f"--model {name}={value}: no such field; there are {', '.join(types)}")
        wanted = types[name]
        is_whole_for_float = wanted is float and type(value) is int
        if type(value) is not wanted and not is_whole_for_float:
            raise InputError(f"--model {name}={value}: {name} is of type {wanted.__name__}")


def digest(*parts):
    """Twelve hex digits of bytes and of values like those of JSON; a function counts by its name."""
    state = hashlib.sha256()
    for part in parts:
        if not isinstance(part, bytes):
            part = json.dumps(part, sort_keys=True, default=as_text).encode()
        state.update(part)
    return state.hexdigest()[:12]


def code_digest(file):
    """Digest of what a Python file does: its comments, docstrings and layout do not count."""
    tree = ast.parse(Path(file).read_bytes())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        node.body = [statement for statement in body if not is_text(statement)]
    return digest(ast.unparse(tree))


def is_text(statement):
    """Whether it is a docstring, or another string that nothing is done with."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def as_text(value):
    """For what JSON does not know: a function by its name, the rest as it prints."""
    return getattr(value, "__qualname__", None) or str(value)
