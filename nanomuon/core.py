"""CORE, by which the field compares base models: the mean of the centred accuracies of 22 tasks (DCLM, arXiv
2406.11794), by the rule of published figures (nanochat's, after DCLM's), which decides

- which items: all, shuffled by Random(1337), cut to a number if one is given;
- which examples come before item i: Random(1234 + i) samples them from the other kept items;
- which tokens are scored. Multiple choice: those after the tokens that all choices begin with. Schema: those
  at the end that all contexts are followed by. Language modelling: those of the continuation;
- what is right: the choice of the lowest mean loss, the first of equals; in language modelling a continuation
  of which every token is the likeliest one. A choice without a token of its own (one that all others begin
  with) has no mean loss: as in the published code it wins as the first choice, and never as another.

Where the published code stops, this one goes on: fewer other items than examples are all shown; a
continuation that does not fit into the context is scored from the second token on of what is left; if the
tokens before a continuation change with it, those that changed are scored too.

The tasks are a folder, a zip of one, or the address of such a zip, laid out as the public bundle of DCLM:

    core.yaml                 icl_tasks: for each its label, dataset_uri, num_fewshot, icl_task_type and
                              continuation_delimiter (a space if not given)
    eval_meta_data.csv        "Eval Task" and "Random baseline", in percent
    eval_data/<dataset_uri>   an item a line, as JSON:
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
import stat
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import torch
import torch.nn.functional as F
import yaml
from torch.nn.attention import sdpa_kernel

from nanomuon.attention import WITHOUT_CUDNN
from nanomuon.generate import padded, read
from nanomuon.gpt import GPT
from nanomuon.runtime import InputError, base_dir, locked, parse_json, print0, together, write_whole
from nanomuon.tokenizer import Tokenizer

# The bundle that published figures come from, as nanochat names it
PUBLIC_BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
# What zipfile raises for a damaged zip; RuntimeError for an encrypted one, and for JSON that is too deep
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
CORE_TASKS = frozenset(
    """
    hellaswag_zeroshot jeopardy bigbench_qa_wikidata arc_easy arc_challenge copa commonsense_qa piqa
    openbook_qa lambada_openai hellaswag winograd winogrande bigbench_dyck_languages agi_eval_lsat_ar
    bigbench_cs_algorithms bigbench_operators bigbench_repeat_copy_logic squad coqa boolq
    bigbench_language_identification
    """.split()
)
MOST_LOGITS = 2**28  # of a batch, 1 GB in float32


class Unreachable(InputError):
    """A bundle that an address does not give: a training run goes on without it."""


@dataclass
class Item:
    """A question: contexts with their continuations, of which number `gold` is right. A multiple choice has
    one context, a schema one continuation, and language modelling one of both.
    """

    pairs: list[tuple[str, str]]
    gold: int


@dataclass
class Entry:
    """A task in core.yaml."""

    label: str
    icl_task_type: Literal["multiple_choice", "schema", "language_modeling"]
    dataset_uri: str  # under eval_data
    num_fewshot: list[int]  # examples shown before an item: the first is the number
    continuation_delimiter: str = " "  # between a context and its continuation


@dataclass(kw_only=True)
class Task(Entry):
    items: list[Item]  # in the order of their file
    baseline: float  # accuracy of guessing, 0 to 1


@dataclass(eq=False)
class Row:
    """A prompt with one continuation, in tokens."""

    tokens: list[int]  # at most the context
    start: int  # the first token that is scored, at least 1; the last of the row is the last that is
    shared: int = 0  # tokens that the rows of its item begin with, to be computed once
    mean_loss: float = float("nan")  # in nats
    all_likeliest: bool = False  # every scored token is the one that the model thinks likeliest


@dataclass
class Answer:
    mean_losses: list[float]  # of each choice
    correct: bool


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
    None unless the tasks are those of CORE. Prints a table, row by row as it comes.

    most_items: of each task, None: all. most_tokens: of a batch. rank: this one's number among `ranks` that
    score different items; every rank gets all results. Collective.
    """
    print0(f"{'task':36} accuracy  centered  items")
    results = {}
    for task in tasks:
        answers = answer_task(model, tokenizer, task, most_items, most_tokens, rank, ranks)
        accuracy = sum(answer.correct for answer in answers) / len(answers)
        centered = (accuracy - task.baseline) / (1 - task.baseline)
        results[task.label] = {"accuracy": accuracy, "centered": centered, "items": len(answers)}
        print0(f"{task.label:36} {accuracy:8.4f}  {centered:8.4f}  {len(answers):5}")
    mean = sum(figures["centered"] for figures in results.values()) / len(results)
    found = {"core": mean if results.keys() == CORE_TASKS else None, "mean_centered": mean, "tasks": results}
    print0(as_line(found))
    return found


def as_line(results: dict) -> str:
    """One line: the mean, and what it may be called."""
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
) -> list[Answer]:
    """The answer to each kept item of a task, in their shuffled order. For the arguments see evaluate()."""
    items = list(task.items)
    random.Random(1337).shuffle(items)
    items = items[:most_items]
    choices = {}  # of each item: a row each, equal ones have the same
    for number in range(rank, len(items), ranks):
        choices[number] = ask(task, items, number, tokenizer, model.config.seq_len)
    rows = dict.fromkeys(row for item_rows in choices.values() for row in item_rows)
    batches = list(make_batches(rows, most_tokens, MOST_LOGITS // model.config.vocab_size))
    calls = sum(2 if batch[-1].shared else 1 for batch in batches)
    most_calls = max(together(lambda: calls))

    def answer_mine() -> dict[int, Answer]:
        for batch in batches:
            score(model, batch)
        for _ in range(most_calls - calls):  # other ranks may need this one's pieces of the model
            model(torch.zeros(1, 1, dtype=torch.int64, device=model.cos.device))
        return {number: decide(task, items[number], rows) for number, rows in choices.items()}

    # Shapes change from batch to batch: what was compiled for training would be compiled for each of them
    eager = torch.compiler.set_stance("force_eager")
    # No gradients, but never inference_mode: what FSDP2 gathers here, training uses too
    with torch.no_grad(), sdpa_kernel(WITHOUT_CUDNN), eager:
        answers = {}
        for part in together(answer_mine):
            answers |= part
    return [answers[number] for number in range(len(items))]


def ask(task: Task, items: list[Item], number: int, tokenizer: Tokenizer, seq_len: int) -> list[Row]:
    """The row of each choice of an item, with the examples before it. Equal choices have one row, so that no
    rounding decides between them.
    """
    item = items[number]
    others = items[:number] + items[number + 1 :]
    shown = ""
    for example in random.Random(1234 + number).sample(others, min(task.num_fewshot[0], len(others))):
        context, continuation = example.pairs[example.gold]
        shown += f"{context}{task.continuation_delimiter}{continuation}\n\n"
    prompts = []
    for context, continuation in item.pairs:
        text = f"{shown}{context}{task.continuation_delimiter}{continuation}"
        prompts.append([tokenizer.bos_id, *tokenizer.encode(text)])

    common = len(os.path.commonprefix(prompts))
    if task.icl_task_type == "multiple_choice":
        starts = [common] * len(prompts)
    elif task.icl_task_type == "schema":
        common_end = len(os.path.commonprefix([prompt[::-1] for prompt in prompts]))
        starts = [len(prompt) - common_end for prompt in prompts]
    else:
        # The space at the end of a delimiter becomes part of the next token
        before = f"{shown}{item.pairs[0][0]}{task.continuation_delimiter}".strip()
        starts = [len(os.path.commonprefix([[tokenizer.bos_id, *tokenizer.encode(before)], prompts[0]]))]

    rows, by_cut = {}, {}
    for prompt, start in zip(prompts, starts, strict=True):
        if tuple(prompt) not in rows:
            cut = max(0, len(prompt) - seq_len)  # too long prompts keep their end
            row = rows[tuple(prompt)] = Row(prompt[cut:], max(1, start - cut))
            by_cut.setdefault(cut, []).append(row)
    for alike in by_cut.values():  # rows that were cut differently begin with different tokens
        share(alike)
    return [rows[tuple(prompt)] for prompt in prompts]


def share(rows: list[Row]) -> None:
    """Let rows read what all of them begin with only once, if it is most of them."""
    common = len(os.path.commonprefix([row.tokens for row in rows]))
    # The position before the first scored token predicts it, so it is not among those that are shared
    shared = min(common, min(row.start for row in rows) - 1)
    if len(rows) > 1 and 2 * shared >= max(len(row.tokens) for row in rows):
        for row in rows:
            row.shared = shared


def make_batches(rows: Iterable[Row], most_tokens: int, most_scored: int) -> Iterator[list[Row]]:
    """Rows of similar length together: at most so many tokens with their padding, and so many scored ones."""
    batch = []
    for row in sorted(rows, key=lambda row: (row.shared, len(row.tokens))):
        larger = [*batch, row]
        longest = row.shared + max(len(other.tokens) - other.shared for other in larger)
        scored = sum(len(other.tokens) - other.start for other in larger)
        fits = len(larger) * longest <= most_tokens and scored <= most_scored
        if batch and not (fits and bool(batch[0].shared) == bool(row.shared)):
            yield batch
            larger = [row]
        batch = larger
    if batch:
        yield batch


def score(model: GPT, rows: list[Row]) -> None:
    """Fill in what the model makes of the rows of a batch. What rows share is read first, once."""
    device = model.cos.device
    # The last token of a row is predicted and predicts nothing
    inputs = padded([row.tokens[row.shared : -1] for row in rows]).to(device)  # (B, T)
    at, targets, counts = [], [], []
    for i, row in enumerate(rows):
        scored = row.tokens[row.start :]
        first = i * inputs.size(1) + row.start - 1 - row.shared
        at += range(first, first + len(scored))
        targets += scored
        counts.append(len(scored))
    at, targets = torch.tensor([at, targets], dtype=torch.int64, device=device)  # (M,) each

    cache = None
    if rows[-1].shared:  # the most of all
        cache = read(model, [row.tokens[: row.shared] for row in rows], rows[-1].shared + inputs.size(1))
    logits = model(inputs, cache=cache, at=at)  # (M, V)
    # float64 adds float32 losses without rounding: equal losses in another order have an equal mean
    losses = F.cross_entropy(logits, targets, reduction="none").double().cpu().split(counts)
    hits = (logits.argmax(-1) == targets).cpu().split(counts)
    for row, row_losses, row_hits in zip(rows, losses, hits, strict=True):
        row.mean_loss = row_losses.mean().item()
        row.all_likeliest = row_hits.all().item()


def decide(task: Task, item: Item, rows: list[Row]) -> Answer:
    losses = [row.mean_loss for row in rows]
    if task.icl_task_type == "language_modeling":
        return Answer(losses, rows[0].all_likeliest)
    # min() passes over a NaN that is not the first, and takes one that is: the published rule
    return Answer(losses, losses.index(min(losses)) == item.gold)


# ---- the bundle


def open_bundle(place: str) -> list[Task]:
    """The tasks of a bundle, in its order.

    place: a folder, a zip, or the http(s) address of a zip, which is fetched once and kept under the base
    folder. InputError for what is not a bundle, Unreachable if an address gives none.
    """
    if place.startswith(("http://", "https://")):
        archive = base_dir() / "core" / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.zip"
        with locked(archive):
            if not archive.exists():
                fetch(place, archive)
        return read_zip(archive)
    path = Path(place).expanduser()
    return read_tasks(path) if path.is_dir() else read_zip(path)


def fetch(address: str, archive: Path) -> None:
    """Let the zip of an address appear, once every line of it has been read."""
    print(f"fetching {address}", flush=True)
    try:
        # A server may be silent for 10 seconds
        with urllib.request.urlopen(address, timeout=10) as answer, write_whole(archive) as copy:
            shutil.copyfileobj(answer, copy)
            copy.flush()
            read_zip(Path(copy.name))
    except (OSError, ValueError, http.client.HTTPException, InputError) as error:
        raise Unreachable(f"no bundle for CORE from {address}: {error}") from error


def read_zip(archive: Path) -> list[Task]:
    """The tasks of a zip, which is never unpacked."""
    listing = None
    with told_of(archive), zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            path = PurePosixPath(member.filename.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts or stat.S_ISLNK(member.external_attr >> 16):
                raise ValueError(f"the zip holds {member.filename!a}, which leads out of it")
            if path.name == "core.yaml":
                listing = zipfile.Path(zipped, member.filename)
        if listing is None:
            raise ValueError("the zip holds no core.yaml")
        return read_tasks(listing.parent)


@dataclass
class Listing:
    """core.yaml."""

    icl_tasks: list[Entry]


@dataclass
class MultipleChoice:
    query: str
    choices: list[str]
    gold: int


@dataclass
class Schema:
    context_options: list[str]
    continuation: str
    gold: int


@dataclass
class LanguageModeling:
    context: str
    continuation: str
    gold: int = 0


@contextmanager
def told_of(place) -> Iterator[None]:
    """Errors in the content of a bundle are an InputError that names the file, and the line in it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{place}: {error.strerror or 'no such file'}") from error
    except KeyError as error:
        raise InputError(f"{place} has no {error}") from error
    except (ValueError, TypeError, csv.Error, yaml.YAMLError, *DAMAGE) as error:
        raise InputError(f"{place}: {error}") from error


def read_tasks(folder) -> list[Task]:
    """The tasks that core.yaml lists, with their items. folder: a Path, or a zipfile.Path."""
    meta, listing = folder / "eval_meta_data.csv", folder / "core.yaml"
    with told_of(meta), meta.open(encoding="utf-8-sig", newline="") as file:
        baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
    with told_of(listing):
        entries = parse_json(json.dumps(yaml.safe_load(listing.read_bytes())), Listing).icl_tasks
        if not entries:
            raise ValueError("it lists no task")
    return [read_task(folder, entry, baselines) for entry in entries]


def read_task(folder, entry: Entry, baselines: dict[str, float]) -> Task:
    baseline = baselines.get(entry.label, -1)
    with told_of(f"{folder / 'core.yaml'}, task {entry.label}"):
        path = PurePosixPath(entry.dataset_uri)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"dataset_uri {entry.dataset_uri!r} leads out of the bundle")
        if not entry.num_fewshot or entry.num_fewshot[0] < 0:
            raise ValueError(f"num_fewshot is {entry.num_fewshot}, not a list with a number of examples")
        if not 0 <= baseline < 1:
            raise ValueError("eval_meta_data.csv gives no random baseline from 0 to below 100")
    file, items = folder / "eval_data" / entry.dataset_uri, []
    with told_of(file), file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                with told_of(f"{file} line {number}"):
                    items.append(parse_item(line, entry.icl_task_type))
        if not items:
            raise ValueError("it holds no item")
    return Task(**vars(entry), items=items, baseline=baseline)


def parse_item(line: bytes, kind: str) -> Item:
    if kind == "multiple_choice":
        item, pairs = parse_json(line, MultipleChoice), []
        for choice in item.choices:
            pairs.append((item.query, choice))
    elif kind == "schema":
        item, pairs = parse_json(line, Schema), []
        for context in item.context_options:
            pairs.append((context, item.continuation))
    else:
        item = parse_json(line, LanguageModeling)
        pairs = [(item.context.strip(), item.continuation)]  # strip(): the published rule
    gold = item.gold
    if not 0 <= gold < len(pairs):
        raise ValueError(f"gold is {gold}, not the number of one of {len(pairs)} choices")
    if kind != "multiple_choice" and not pairs[0][1].strip():
        raise ValueError("continuation is empty: nothing can be predicted")
    return Item(pairs, gold)
