"""CORE, by which the field compares base models: the mean of the centred accuracies of 22 tasks (DCLM, arXiv
2406.11794), by the rule of published figures (nanochat's, after DCLM's), which decides

- which items: all, shuffled by Random(1337), cut to a number where one is given;
- which examples come before item i: Random(1234 + i) samples them from the other kept items;
- which tokens are scored. Multiple choice: those after the tokens that all choices begin with. Schema: those
  at the end that all contexts are followed by. Language modelling: those of the continuation;
- what is right: the choice of the lowest mean loss, the first of equals; in language modelling a continuation
  of which every token is the likeliest one. A choice without a token of its own (one that all others begin
  with) has no mean loss: as in the published code it wins as the first choice, and never as another.

Where the published code stops, this one goes on: fewer other items than examples are all shown; a
continuation that does not fit into the context is scored from the second token on of what is left; where the
tokens before a continuation change with it, those that changed are scored too.

What the choices of an item share is computed once, which gives the same numbers: a forward pass over what
they begin with, whose keys and values a second pass over the choices reads.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from nanomuon.attention import without_cudnn
from nanomuon.core_bundle import Item, Task
from nanomuon.gpt import GPT
from nanomuon.kv_cache import ChoiceCache, PrefixCache
from nanomuon.runtime import print0, together
from nanomuon.tokenizer import Tokenizer

# The tasks of CORE; the mean over any others has another name
CORE_TASKS = frozenset(
    """
    hellaswag_zeroshot jeopardy bigbench_qa_wikidata arc_easy arc_challenge copa commonsense_qa piqa
    openbook_qa lambada_openai hellaswag winograd winogrande bigbench_dyck_languages agi_eval_lsat_ar
    bigbench_cs_algorithms bigbench_operators bigbench_repeat_copy_logic squad coqa boolq
    bigbench_language_identification
    """.split()
)
# Items go to ranks by as many at a time, and are batched among themselves: any number of ranks makes the same
# batches, and so the same losses to the last bit
BLOCK = 32
# Of a batch on a CPU: four times as many take up to half as long again on some tasks (docs/evaluation.md)
CPU_TOKENS = 4096
MOST_LOGITS = 2**28  # that exist at a time, 1 GB in float32


@dataclass
class Row:
    """A prompt with one continuation, in tokens."""

    tokens: np.ndarray  # (n,) uint32, n at most the context
    start: int  # the first token that is scored, at least 1; the last of the row is the last that is
    cut: int  # tokens that were left out at the beginning
    mean_loss: float = float("nan")  # in nats
    all_likeliest: bool = False  # every scored token is the one that the model thinks likeliest


@dataclass(frozen=True)
class Group:
    """Rows of an item that begin with the same `shared` tokens, which are computed once."""

    rows: list[Row]
    shared: int


@dataclass(frozen=True)
class Question:
    """An item in tokens: its rows, and the row of each choice. Equal choices have one row, so that no
    rounding decides between them.
    """

    rows: list[Row]
    row_of_choice: list[int]
    gold: int


@dataclass(frozen=True)
class Answer:
    """mean_losses: of each choice. choice: the one taken, None in language modelling."""

    mean_losses: list[float]
    choice: int | None
    correct: bool


def evaluate(
    model: GPT,
    tokenizer: Tokenizer,
    tasks: list[Task],
    most_items: int | None,
    most_tokens: int,
    rank: int = 0,
    ranks: int = 1,
    in_pieces: bool = False,
) -> dict:
    """{"core", "mean_centered", "tasks": {label: {"accuracy", "centered", "items", "seconds"}}}, of which
    "core" is None where the tasks are not those of CORE. Printed as a table, row by row as it comes.

    most_items: of each task, None: all. most_tokens: of a batch. rank: this one's number among `ranks` that
    score different items; every rank gets all results. in_pieces: a forward pass of the model needs all
    ranks. Collective.
    """
    print0(f"{'task':36} accuracy  centered  items  seconds")
    results = {}
    for task in tasks:
        began = time.perf_counter()
        answers = answer_task(model, tokenizer, task, most_items, most_tokens, rank, ranks, in_pieces)
        accuracy = sum(answer.correct for answer in answers) / len(answers)
        result = {
            "accuracy": accuracy,
            "centered": (accuracy - task.baseline) / (1 - task.baseline),
            "items": len(answers),
            "seconds": round(time.perf_counter() - began, 2),
        }
        results[task.label] = result
        print0(
            f"{task.label:36} {accuracy:8.4f}  {result['centered']:8.4f}  {len(answers):5}  "
            f"{result['seconds']:7.1f}"
        )
    mean = sum(result["centered"] for result in results.values()) / len(results)
    found = {"core": mean if results.keys() == CORE_TASKS else None, "mean_centered": mean, "tasks": results}
    print0(as_line(found))
    return found


def as_line(results: dict) -> str:
    """One line: the mean, and what it may be called."""
    return f"{title(results)}: {results['mean_centered']:.4f}"


def title(results: dict) -> str:
    """What the mean of these results may be called: CORE is that of all its tasks and no others."""
    labels = results["tasks"].keys()
    if labels == CORE_TASKS:
        return "CORE"
    if labels < CORE_TASKS:
        return f"CORE over {len(labels)} of {len(CORE_TASKS)} tasks"
    return f"mean over {len(labels)} tasks, {len(labels & CORE_TASKS)} of the {len(CORE_TASKS)} of CORE"


def answer_task(
    model: GPT,
    tokenizer: Tokenizer,
    task: Task,
    most_items: int | None,
    most_tokens: int,
    rank: int = 0,
    ranks: int = 1,
    in_pieces: bool = False,
) -> list[Answer]:
    """The answer to each kept item of a task, in their shuffled order. For the arguments see evaluate()."""
    items = kept_items(task, most_items)
    if model.cos.device.type == "cpu":
        most_tokens = min(most_tokens, CPU_TOKENS)
    questions, batches = {}, []
    for first in range(rank * BLOCK, len(items), ranks * BLOCK):
        block = {}
        for number in range(first, min(first + BLOCK, len(items))):
            block[number] = ask(task, items, number, tokenizer, model.config.seq_len)
        questions |= block
        batches += make_batches(list(block.values()), most_tokens, MOST_LOGITS // model.config.vocab_size)
    calls = sum(forward_passes(batch) for batch in batches)
    most_calls = max(together(lambda: calls)) if in_pieces else calls

    def answer_mine():
        for batch in batches:
            score(model, batch, tokenizer.bos_id)
        for _ in range(most_calls - calls):  # other ranks need this one's pieces
            model(torch.full((1, 1), tokenizer.bos_id, device=model.cos.device))
        return {number: decide(question, task.kind) for number, question in questions.items()}

    # Shapes change from batch to batch: what was compiled for training would be compiled for each of them
    eager = torch.compiler.set_stance("force_eager")
    # No gradients, but never inference_mode: what FSDP2 gathers here, training uses too
    with torch.no_grad(), without_cudnn(), eager:
        answers = {}
        for part in together(answer_mine):
            answers |= part
    return [answers[number] for number in range(len(items))]


def kept_items(task: Task, most_items: int | None) -> list[Item]:
    items = task.read_items()
    random.Random(1337).shuffle(items)
    return items[:most_items]


def examples(task: Task, items: list[Item], number: int) -> list[Item]:
    """What is shown before an item: others, with their answers."""
    others = len(items) - 1
    # A sample of the positions in the list of the others, without making that list
    positions = random.Random(1234 + number).sample(range(others), min(task.shots, others))
    shown = []
    for position in positions:
        if position >= number:  # in the list of all, the item itself stands before it
            position += 1
        shown.append(items[position])
    return shown


def ask(task: Task, items: list[Item], number: int, tokenizer: Tokenizer, seq_len: int) -> Question:
    """An item with its examples in tokens."""
    shown = ""
    for example in examples(task, items, number):
        context, continuation = example.pairs[example.gold]
        shown += f"{context}{task.delimiter}{continuation}\n\n"
    item = items[number]
    sequences = []
    for context, continuation in item.pairs:
        sequences.append(encode(tokenizer, f"{shown}{context}{task.delimiter}{continuation}"))

    if task.kind == "multiple_choice":
        starts = [common_prefix(sequences)] * len(sequences)
    elif task.kind == "schema":
        suffix = common_prefix([sequence[::-1] for sequence in sequences])
        starts = [len(sequence) - suffix for sequence in sequences]
    else:
        context, _ = item.pairs[0]
        # The space at the end of a delimiter becomes part of the next token
        before = encode(tokenizer, f"{shown}{context}{task.delimiter}".strip())
        starts = [common_prefix([before, sequences[0]])]

    rows, row_of_choice, known = [], [], {}
    for sequence, start in zip(sequences, starts, strict=True):
        key = sequence.tobytes()
        if key not in known:
            known[key] = len(rows)
            cut = max(0, len(sequence) - seq_len)  # too long prompts keep their end
            rows.append(Row(sequence[cut:], max(1, start - cut), cut))
        row_of_choice.append(known[key])
    return Question(rows, row_of_choice, item.gold)


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """(n,) uint32, beginning with the BOS token."""
    return np.append(np.uint32(tokenizer.bos_id), tokenizer.encode_to_numpy(text))


def common_prefix(sequences: list[np.ndarray]) -> int:
    """How many tokens all of these begin with."""
    length = min(len(sequence) for sequence in sequences)
    for sequence in sequences[1:]:
        different = np.flatnonzero(sequence[:length] != sequences[0][:length])
        if len(different):
            length = int(different[0])
    return length


def decide(question: Question, kind: str) -> Answer:
    losses = [question.rows[row].mean_loss for row in question.row_of_choice]
    if kind == "language_modeling":
        return Answer(losses, None, question.rows[0].all_likeliest)
    # min() passes over a NaN that is not the first, and takes one that is: the published rule
    choice = losses.index(min(losses))
    return Answer(losses, choice, choice == question.gold)


def groups_of(question: Question) -> Iterator[Group]:
    """The rows of a question by what they can share."""
    by_cut = {}
    for row in question.rows:  # rows that were cut differently begin with different tokens
        by_cut.setdefault(row.cut, []).append(row)
    for rows in by_cut.values():
        # The position before the first scored token predicts it, so that it belongs to what is not shared
        shared = min(common_prefix([row.tokens for row in rows]), min(row.start for row in rows) - 1)
        longest = max(len(row.tokens) for row in rows)
        if len(rows) > 1 and 2 * shared >= longest:
            yield Group(rows, shared)
        else:  # two passes would cost more than they save
            for row in rows:
                yield Group([row], 0)


def make_batches(questions: list[Question], most_tokens: int, most_scored: int) -> list[list[Group]]:
    """Groups of similar length together: at most so many tokens in a forward pass, their padding included,
    and so many that are scored, but for a group that has more by itself.
    """
    groups = []
    for question in questions:
        groups += groups_of(question)
    groups.sort(key=by_sharing_and_length)
    batches = []
    for group in groups:
        if batches:
            larger = [*batches[-1], group]
            alike = (batches[-1][0].shared > 0) == (group.shared > 0)
            scored = sum(len(row.tokens) - row.start for member in larger for row in member.rows)
            if alike and padded_tokens(larger) <= most_tokens and scored <= most_scored:
                batches[-1].append(group)
                continue
        batches.append([group])
    return batches


def by_sharing_and_length(group: Group) -> tuple[bool, int]:
    """Groups that share nothing come first; in each half the shorter ones."""
    return group.shared > 0, len(group.rows[0].tokens)


def padded_tokens(batch: list[Group]) -> int:
    """Of the larger one of a batch's two forward passes."""
    rows = len(batch) * max(len(group.rows) for group in batch)
    own = max(len(row.tokens) - group.shared for group in batch for row in group.rows)
    return max(len(batch) * max(group.shared for group in batch), rows * own)


def forward_passes(batch: list[Group]) -> int:
    return 2 if batch[0].shared else 1


def score(model: GPT, batch: list[Group], bos_id: int) -> None:
    """Fill in what the model makes of the rows of a batch, in which either all groups share tokens or none
    does.
    """
    device = model.cos.device
    choices = max(len(group.rows) for group in batch)
    # The last token of a row is predicted and predicts nothing
    T = max(1, max(len(row.tokens) - 1 - group.shared for group in batch for row in group.rows))
    inputs = np.full((len(batch) * choices, T), bos_id, dtype=np.int64)  # padded on the right
    rows, at, targets, row_of_target = [], [], [], []
    for i, group in enumerate(batch):
        for j, row in enumerate(group.rows):
            place = i * choices + j
            own = row.tokens[group.shared : -1]
            inputs[place, : len(own)] = own
            scored = row.tokens[row.start :]
            first = place * T + row.start - 1 - group.shared
            at.append(np.arange(first, first + len(scored)))
            targets.append(scored.astype(np.int64))
            row_of_target.append(np.full(len(scored), len(rows)))
            rows.append(row)
    # (M,) each
    at, targets, row_of_target = (
        torch.from_numpy(np.concatenate(parts)).to(device) for parts in (at, targets, row_of_target)
    )

    cache = None
    if batch[0].shared:
        cache = ChoiceCache(read_shared(model, batch, bos_id), choices, T, model.config.seq_len)
    logits = model(torch.from_numpy(inputs).to(device), cache=cache, at=at)  # (M, V)
    # float64 adds float32 losses without rounding: equal losses in another order have an equal mean
    losses = F.cross_entropy(logits, targets, reduction="none").double()
    misses = (logits.argmax(-1) != targets).double()
    sums = torch.zeros(len(rows), 3, dtype=torch.float64, device=device)  # loss, misses, tokens
    sums.index_add_(0, row_of_target, torch.stack((losses, misses, torch.ones_like(losses)), dim=1))
    for row, (loss, missed, count) in zip(rows, sums.tolist(), strict=True):
        row.mean_loss = loss / count if count else float("nan")
        row.all_likeliest = missed == 0


def read_shared(model: GPT, batch: list[Group], bos_id: int) -> PrefixCache:
    """Compute what the rows of each group begin with."""
    device = model.cos.device
    lengths = [group.shared for group in batch]
    inputs = np.full((len(batch), max(lengths)), bos_id, dtype=np.int64)
    for i, group in enumerate(batch):
        inputs[i, : group.shared] = group.rows[0].tokens[: group.shared]
    cache = PrefixCache(torch.tensor(lengths, device=device))
    nowhere = torch.zeros(0, dtype=torch.int64, device=device)
    model(torch.from_numpy(inputs).to(device), cache=cache, at=nowhere)
    return cache
