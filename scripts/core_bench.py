"""What scoring CORE in batches saves against one choice at a time, and whether both say the same.

python -m scripts.core_bench --core-bundle FOLDER --core-items 60

Seconds are those of the processor on a CPU, which other work on the machine hardly changes, and of the clock
on a GPU. A model that knows nothing will do: how long it takes does not depend on what it knows. Its weights
are random all over, so that every part of it has a say in the losses.
"""

import math
import time

import torch
import torch.nn.functional as F

from nanomuon import core, core_bundle
from nanomuon.arguments import ArgumentParser, check_sizes, check_window_pattern
from nanomuon.corpus import open_corpus
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.parallel import build_model
from nanomuon.runtime import InputError, check_at_least_1, run_command, start
from nanomuon.shards import prepare_tokenizer
from nanomuon.tokenizer import Tokenizer


@torch.no_grad()
def one_at_a_time(model: GPT, tokenizer: Tokenizer, task: core_bundle.Task, most_items: int | None):
    """Answers to the items of a task, with a forward pass for every choice."""
    items = core.kept_items(task, most_items)
    answers = []
    for number in range(len(items)):
        question = core.ask(task, items, number, tokenizer, model.config.seq_len)
        for row in question.rows:
            tokens = torch.from_numpy(row.tokens.astype("int64"))[None].to(model.cos.device)
            logits = model(tokens[:, :-1])[0, row.start - 1 :]  # (scored, V)
            targets = tokens[0, row.start :]
            row.mean_loss = float(F.cross_entropy(logits, targets, reduction="none").double().mean())
            row.all_likeliest = bool((logits.argmax(-1) == targets).all())
        answers.append(core.decide(question, task.kind))
    return answers


def difference(ours: list[core.Answer], plain: list[core.Answer]) -> float:
    """The largest one between two mean losses; NaN equals NaN."""
    largest = 0.0
    for answer, other in zip(ours, plain, strict=True):
        for a, b in zip(answer.mean_losses, other.mean_losses, strict=True):
            if not (math.isnan(a) and math.isnan(b)):
                largest = max(largest, abs(a - b))
    return largest


def chosen_tasks(tasks: list[core_bundle.Task], labels: list[str] | None) -> list[core_bundle.Task]:
    """Those of a bundle with these labels, all without any; InputError for a label that it has not."""
    if not labels:
        return tasks
    known = [task.label for task in tasks]
    for label in labels:
        if label not in known:
            raise InputError(f"--tasks {label}: the bundle has no such task; it has {', '.join(known)}")
    return [task for task in tasks if task.label in labels]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.core_bench", __doc__)
    parser.add_argument("--core-bundle", default=core_bundle.PUBLIC_BUNDLE, help="folder, zip or address")
    parser.add_argument("--core-items", type=int, help="of each task (default: all)")
    parser.add_argument("--depth", type=int, default=4, help="of the model (default: %(default)s)")
    parser.add_argument("--max-seq-len", type=int, default=2048, help="its context (default: %(default)s)")
    parser.add_argument("--window-pattern", default="L", help="its windows (default: %(default)s)")
    parser.add_argument("--most-tokens", type=int, default=32768, help="of a batch (default: %(default)s)")
    parser.add_argument("--tasks", nargs="*", help="labels (default: all)")
    args = parser.parse_args(argv)
    check_sizes(args)
    check_at_least_1(args, "core_items", "most_tokens")
    check_window_pattern(args.window_pattern)

    runtime = start()
    clock = time.perf_counter if runtime.device.type == "cuda" else time.process_time
    tasks = chosen_tasks(core_bundle.open_bundle(args.core_bundle), args.tasks)
    tokenizer = prepare_tokenizer(open_corpus("python"), 4096)
    config = GPTConfig.from_depth(
        args.depth, tokenizer.vocab_size, args.max_seq_len, window_pattern=args.window_pattern
    )
    model = build_model(config, runtime, seed=0)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)

    print(f"{'task':36} choices  tokens  alone s  batched s  ratio  same choice  loss differs by")
    totals = [0.0, 0.0]
    for task in tasks:
        items = core.kept_items(task, args.core_items)
        first_row = core.ask(task, items, 0, tokenizer, config.seq_len).rows[0]
        began = clock()
        plain = one_at_a_time(model, tokenizer, task, args.core_items)
        between = clock()
        ours = core.answer_task(model, tokenizer, task, args.core_items, args.most_tokens)
        ended = clock()
        alone, batched = between - began, ended - between
        totals[0] += alone
        totals[1] += batched
        same = sum(a.choice == b.choice and a.correct == b.correct for a, b in zip(ours, plain, strict=True))
        print(
            f"{task.label:36} {len(items[0].pairs):7}  {len(first_row.tokens):6}  {alone:7.1f}  "
            f"{batched:9.1f}  {alone / batched:5.2f}  {same:5} of {len(ours):3}  "
            f"{difference(ours, plain):.1e}",
            flush=True,
        )
    alone, batched = totals
    print(f"{'all':36} {'':7}  {'':6}  {alone:7.1f}  {batched:9.1f}  {alone / batched:5.2f}")


if __name__ == "__main__":
    run_command(main)
