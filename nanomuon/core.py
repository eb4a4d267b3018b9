"""CORE: the mean of the centered accuracies on 22 tasks (DCLM, arXiv 2406.11794), by the rules behind the
published figures (nanochat's, after DCLM's):

- Items: all, shuffled by Random(1337), then cut to a number if one is given.
- Examples before item i: sampled by Random(1234 + i) from the other items that are left.
- Scored tokens. Multiple choice: those after the common prefix of all choices. Schema: the common suffix of
  all choices. Language modeling: those of the continuation.
- Correct: the choice with the lowest mean loss, the first one in a tie; in language modeling, a continuation
  whose every token is the most likely one. A choice without a token of its own (a prefix of all others) has
  no mean loss: as in the published code, it wins if it is the first choice, and never otherwise.

Where the published code fails, this code does not: if there are fewer other items than examples, all are
shown; a continuation that does not fit into the context is scored from its second remaining token on; if a
continuation changes the tokens before it, the changed tokens are scored too.

The tasks are a folder, a zip of one, or the URL of such a zip, laid out like DCLM's public bundle:

    core.yaml                 icl_tasks, each with label, dataset_uri, num_fewshot, icl_task_type and
                              continuation_delimiter (default: a space)
    eval_meta_data.csv        "Eval Task" and "Random baseline", in percent
    eval_data/<dataset_uri>   one JSON item per line:
                              multiple_choice    {"query", "choices", "gold"}
                              schema             {"context_options", "continuation", "gold"}
                              language_modeling  {"context", "continuation"}
"""

import csv
import hashlib
import http.client
import json
import os
import random
import shutil
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
import torch.nn.functional as F
import yaml
from torch.nn.attention import sdpa_kernel

from nanomuon.attention import WITHOUT_CUDNN
from nanomuon.generate import padded
from nanomuon.gpt import GPT
from nanomuon.head_loss import MOST_CHUNKS
from nanomuon.runtime import (
    InputError,
    base_dir,
    locked,
    one_line,
    print0,
    remove_unfinished,
    together,
    write_whole,
)
from nanomuon.tokenizer import Tokenizer

# The bundle behind the published figures, at nanochat's URL
PUBLIC_BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
CORE_TASKS = frozenset(
    """
    hellaswag_zeroshot jeopardy bigbench_qa_wikidata arc_easy arc_challenge copa commonsense_qa piqa
    openbook_qa lambada_openai hellaswag winograd winogrande bigbench_dyck_languages agi_eval_lsat_ar
    bigbench_cs_algorithms bigbench_operators bigbench_repeat_copy_logic squad coqa boolq
    bigbench_language_identification
    """.split()
)


class Unreachable(InputError):
    """A URL returned no bundle. A training run continues without it."""


@dataclass
class Item:
    """A question: pairs (context, continuation), and `gold`, the index of the correct one. Multiple
    choice has one context, a schema has one continuation, and language modeling has one pair.
    """

    pairs: list[tuple[str, str]]
    gold: int


@dataclass
class Task:
    label: str
    kind: str  # multiple_choice, schema or language_modeling
    shots: int  # how many examples are shown before an item
    delimiter: str  # between a context and its continuation
    baseline: float  # accuracy of random guessing, 0 to 1
    items: list[Item]  # in the order of the file


@dataclass(eq=False)
class Row:
    """A prompt with one continuation, in tokens."""

    tokens: list[int]  # at most seq_len
    start: int  # the first scored token, at least 1; all tokens from there on are scored
    mean_loss: float = float("nan")  # in nats
    all_likeliest: bool = False  # whether every scored token is the model's most likely one


# ---- evaluation


def evaluate(
    model: GPT,
    tokenizer: Tokenizer,
    tasks: list[Task],
    most_items: int | None,
    most_tokens: int,
    rank: int = 0,
    ranks: int = 1,
) -> dict:
    """{"core", "mean_centered", "tasks": {label: {"accuracy", "centered", "items"}}}. "core" is
    None unless the tasks are those of CORE. Prints a table, row by row.

    most_items: at most this many per task, None for all. most_tokens: at most this many per batch. Each of
    the `ranks` ranks scores different items; every rank gets all results. Collective.
    """
    print0(f"{'task':36} accuracy  centered  items")
    results = {}
    for task in tasks:
        answers = answer_task(model, tokenizer, task, most_items, most_tokens, rank, ranks)
        accuracy = sum(answers) / len(answers)
        centered = (accuracy - task.baseline) / (1 - task.baseline)
        results[task.label] = {"accuracy": accuracy, "centered": centered, "items": len(answers)}
        print0(f"{task.label:36} {accuracy:8.4f}  {centered:8.4f}  {len(answers):5}")
    mean = sum(figures["centered"] for figures in results.values()) / len(results)
    found = {"core": mean if results.keys() == CORE_TASKS else None, "mean_centered": mean, "tasks": results}
    print0(as_line(found))
    return found


def as_line(results: dict) -> str:
    """One line: the mean, called CORE only if it is."""
    name = "CORE" if results["core"] is not None else f"mean over {len(results['tasks'])} tasks (not CORE)"
    return f"{name}: {results['mean_centered']:.4f}"


def answer_task(
    model: GPT,
    tokenizer: Tokenizer,
    task: Task,
    most_items: int | None,
    most_tokens: int,
    rank: int = 0,
    ranks: int = 1,
) -> list[bool]:
    """Whether the model answers (at most `most_items` of) a task's items correctly, in shuffled order. See
    evaluate().
    """
    items = list(task.items)
    random.Random(1337).shuffle(items)
    items = items[:most_items]
    choices = {}  # {item number: the row of each choice}
    for number in range(rank, len(items), ranks):
        choices[number] = ask(task, items, number, tokenizer, model.config.seq_len)
    rows = dict.fromkeys(row for item_rows in choices.values() for row in item_rows)
    batches = list(make_batches(rows, most_tokens))
    most_batches = max(together(lambda: len(batches)))

    def answer_mine() -> dict[int, bool]:
        for batch in batches:
            score(model, batch)
        for _ in range(most_batches - len(batches)):  # other ranks may need this rank's shards of the model
            model(torch.zeros(1, 1, dtype=torch.int64, device=model.cos.device))
        return {number: is_correct(task, items[number], rows) for number, rows in choices.items()}

    # Shapes change from batch to batch: a model compiled for training would be recompiled for each one
    eager = torch.compiler.set_stance("force_eager")
    # Not inference_mode: training also uses what FSDP2 gathers here
    with torch.no_grad(), sdpa_kernel(WITHOUT_CUDNN), eager:
        answers = {}
        for part in together(answer_mine):
            answers |= part
    return [answers[number] for number in range(len(items))]


def ask(task: Task, items: list[Item], number: int, tokenizer: Tokenizer, seq_len: int) -> list[Row]:
    """The row of each choice of an item, preceded by the examples. Equal choices share a row, so that
    rounding cannot decide between them.
    """
    item = items[number]
    others = items[:number] + items[number + 1 :]
    shown = ""
    for example in random.Random(1234 + number).sample(others, min(task.shots, len(others))):
        context, continuation = example.pairs[example.gold]
        shown += f"{context}{task.delimiter}{continuation}\n\n"
    prompts = []
    for context, continuation in item.pairs:
        text = f"{shown}{context}{task.delimiter}{continuation}"
        prompts.append([tokenizer.bos_id, *tokenizer.encode(text)])

    common = len(os.path.commonprefix(prompts))
    if task.kind == "multiple_choice":
        starts = [common] * len(prompts)
    elif task.kind == "schema":
        common_end = len(os.path.commonprefix([prompt[::-1] for prompt in prompts]))
        starts = [len(prompt) - common_end for prompt in prompts]
    else:
        # A delimiter's final space becomes part of the next token
        before = f"{shown}{item.pairs[0][0]}{task.delimiter}".strip()
        starts = [len(os.path.commonprefix([[tokenizer.bos_id, *tokenizer.encode(before)], prompts[0]]))]

    rows = {}
    for prompt, start in zip(prompts, starts, strict=True):
        cut = max(0, len(prompt) - seq_len)  # prompts that are too long lose their beginning
        rows.setdefault(tuple(prompt), Row(prompt[cut:], max(1, start - cut)))
    return [rows[tuple(prompt)] for prompt in prompts]


def make_batches(rows: Iterable[Row], most_tokens: int) -> Iterator[list[Row]]:
    """Batches of rows of similar length, up to `most_tokens` including padding. The logits of all scored
    tokens exist at once: a batch of several rows has no more of them than a training step.
    """
    batch, scored = [], 0
    for row in sorted(rows, key=lambda row: len(row.tokens)):
        count = len(row.tokens) - row.start
        scored += count
        if batch and max((len(batch) + 1) * len(row.tokens), MOST_CHUNKS * scored) > most_tokens:
            yield batch
            batch, scored = [], count
        batch.append(row)
    if batch:
        yield batch


def score(model: GPT, rows: list[Row]) -> None:
    """Fill in the results of a batch of rows."""
    # The last token of a row is only a target
    inputs = padded([row.tokens[:-1] for row in rows]).to(model.cos.device)  # (B, T)
    at, targets, counts = [], [], []
    for i, row in enumerate(rows):
        scored = row.tokens[row.start :]
        first = i * inputs.size(1) + row.start - 1
        at += range(first, first + len(scored))
        targets += scored
        counts.append(len(scored))
    at, targets = torch.tensor([at, targets], dtype=torch.int64, device=inputs.device)  # (M,) each
    logits = model(inputs, at=at)  # (M, V)
    # float64 adds float32 losses without rounding, so equal losses in a different order have an equal mean
    losses = F.cross_entropy(logits, targets, reduction="none").double().cpu().split(counts)
    hits = (logits.argmax(-1) == targets).cpu().split(counts)
    for row, row_losses, row_hits in zip(rows, losses, hits, strict=True):
        row.mean_loss = row_losses.mean().item()
        row.all_likeliest = row_hits.all().item()


def is_correct(task: Task, item: Item, rows: list[Row]) -> bool:
    """Whether the model answers an item correctly. rows: of its choices, with their results."""
    if task.kind == "language_modeling":
        return rows[0].all_likeliest
    losses = [row.mean_loss for row in rows]
    # min() returns a NaN if it comes first, and ignores it otherwise: the published rule
    return losses.index(min(losses)) == item.gold


# ---- the bundle


def open_bundle(place: str) -> list[Task]:
    """The tasks of a bundle, in its order.

    place: a folder, a zip, or the http(s) URL of a zip, which is fetched once and stored under the base
    folder. InputError if it is not a bundle, Unreachable if a URL returns none.
    """
    if place.startswith(("http://", "https://")):
        archive = base_dir() / "core" / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.zip"
        with locked(archive):
            if not archive.exists():
                remove_unfinished(archive.parent, archive.name)
                fetch(place, archive)
        return read_zip(archive)
    path = Path(os.path.expanduser(place))  # Path.expanduser() raises if there is no such user
    if not path.exists():
        raise InputError(f"no bundle for CORE at {place}: give a folder, a zip or the URL of a zip")
    return read_tasks(path) if path.is_dir() else read_zip(path)


def fetch(address: str, archive: Path) -> None:
    """Download a zip, which appears at `archive` once all of it has been read and checked."""
    print(f"fetching {address}", flush=True)
    try:
        # A server may stay silent for up to 10 seconds
        with urllib.request.urlopen(address, timeout=10) as answer, write_whole(archive) as copy:
            shutil.copyfileobj(answer, copy)
            copy.flush()
            read_zip(Path(copy.name))
    except (OSError, ValueError, http.client.HTTPException, InputError) as error:
        raise Unreachable(f"no bundle for CORE from {address}: {error}") from error


def read_zip(archive: Path) -> list[Task]:
    """The tasks in a zip, which is never unpacked."""
    with one_line(archive), zipfile.ZipFile(archive) as zipped:
        for name in zipped.namelist():
            if PurePosixPath(name).name == "core.yaml":
                return read_tasks(zipfile.Path(zipped, name).parent)
        raise ValueError("the zip has no core.yaml")


def read_tasks(folder) -> list[Task]:
    """The tasks that core.yaml lists, with their items. folder: a Path, or a zipfile.Path."""
    meta, listing, tasks = folder / "eval_meta_data.csv", folder / "core.yaml", []
    with (
        one_line(f"{folder} is not a CORE bundle: {meta.name}"),
        meta.open(encoding="utf-8-sig", newline="") as file,
    ):
        baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
    with one_line(listing):
        for entry in yaml.safe_load(listing.read_bytes())["icl_tasks"]:
            tasks.append(read_task(folder, entry, baselines))
        if not tasks:
            raise ValueError("it lists no tasks")
    return tasks


def read_task(folder, entry: dict, baselines: dict[str, float]) -> Task:
    label, kind = entry["label"], entry["icl_task_type"]
    file, items = folder / "eval_data" / entry["dataset_uri"], []
    with one_line(file), file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                with one_line(f"{file} line {number}"):
                    items.append(parse_item(json.loads(line), kind))
        if not items:
            raise ValueError("it has no items")
    shots, baseline = entry["num_fewshot"][0], baselines[label]
    if not isinstance(shots, int) or shots < 0:
        raise ValueError(f"num_fewshot of {label} is {shots!r}, not a number of examples")
    if not 0 <= baseline < 1:
        raise ValueError(f"the random baseline of {label} is {100 * baseline}, not a percentage below 100")
    return Task(label, kind, shots, entry.get("continuation_delimiter", " "), baseline, items)


def parse_item(item: dict, kind: str) -> Item:
    pairs = []
    if kind == "multiple_choice":
        for choice in item["choices"]:
            pairs.append((item["query"], choice))
    elif kind == "schema":
        for context in item["context_options"]:
            pairs.append((context, item["continuation"]))
    elif kind == "language_modeling":
        pairs.append((item["context"].strip(), item["continuation"]))  # strip(): the published rule
    else:
        raise ValueError(f"unknown icl_task_type {kind!r}")
    gold = 0 if kind == "language_modeling" else item["gold"]
    if not isinstance(gold, int) or not 0 <= gold < len(pairs):
        raise ValueError(f"gold is {gold!r}, not the index of one of {len(pairs)} choices")
    "".join(map("".join, pairs)).encode()  # ValueError for lone surrogates, which no tokenizer takes
    return Item(pairs, gold)
