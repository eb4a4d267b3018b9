"""Race optimizers on a fixed task, over several seeds, and say in words which differences are real.

    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default adamw muon normuon
    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default default:matrix_lr=0.03 my.py
    python -m scripts.optim_race --text tinyshakespeare.txt --contenders adamw my.py --sweep 0.5,1,2
    python -m scripts.optim_race --task python --contenders adamw default --seeds 3

A contender is a preset (adamw, muon, normuon, or default: the recipe of base_train) or a Python file with

    def param_groups(model, *, beta=0.9): ...    # groups for MuonAdamW
    def build_optimizer(model): ...              # or this: any torch optimizer
    def schedule(group, step, steps): ...        # if you like: {"lr": ..., ...} at a step from 0

schedule gets a group as it was built. NAME:key=value,key=value hands keywords to these functions; lr_scale=X
multiplies all learning rates. An optimizer that is judged by other weights than it trains (an average, say)
puts them in place in its eval() and back in its train().

All contenders get the same initial weights and the same rows for a seed, and are compared seed by seed. Every
finished run is kept in races/NAME under NANOMUON_BASE_DIR: an interrupted race goes on (Ctrl-C ends it within
two seconds), and one with more seeds or contenders trains only what is new. A contender whose code or
hyperparameters have changed is another contender; runs of another task, model or data are refused. With a
sweep each contender is trained at every multiple of its learning rates, with seeds of its own, and races at
the best one.

Tasks: shakespeare (characters of --text, 0.8M parameters, 2,000 steps: minutes on a core), python (the
embedded corpus, depth 4, 300 steps), speedrun (FineWeb, 12 layers of width 768, GPUs only).
"""

import argparse
import ast
import math
import statistics
from dataclasses import dataclass

from nanomuon import locks, race, race_report
from nanomuon.arguments import add_dtype_argument
from nanomuon.race_contenders import Contender
from nanomuon.race_tasks import TASKS, empty_model, open_task
from nanomuon.runtime import (
    InputError,
    base_dir,
    check_at_least_1,
    check_name,
    cores,
    run_command,
    usable_gpus,
)

SWEEP_SEED = 1000  # the seeds of a sweep begin here: those of the race must not have chosen what they judge


def main(argv=None):
    args = parse_arguments(argv)
    place, setup = open_task(args.task, args.text, args.vocab_size, args.steps, dict(args.model))
    folder = base_dir() / "races" / (args.name or args.task)
    setup["dtype"] = race.choose_dtype(args.dtype, folder)
    baseline = Contender(args.baseline or args.contenders[0])
    contenders = distinct([baseline, *map(Contender, args.contenders)])
    announce(args.task, setup, folder)
    with locks.shared(folder):
        parts = []
        if args.sweep:
            best = sweep(folder, setup, place, contenders, args)
            contenders = list(best.chosen.values())
            baseline = best.chosen[baseline.name]
            parts.append(best.text)
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        results = race.run_all(folder, setup, place, contenders, seeds, args.jobs)
        targets = args.targets or TASKS[args.task].targets
        parts.append(race_report.table(results, baseline.name, targets, args.detect, setup["unit"]))
        parts.append(race_report.verdicts(results, baseline.name))
        if len(results) > 2:
            parts.append(race_report.ranking(results, setup["unit"]))
        print("\n\n".join(parts))
        race_report.write_report(folder, results, parts, setup["unit"], baseline.name)
    print(f"\n{folder}/race.md, {folder}/race.png")


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.optim_race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--task", default="shakespeare", choices=TASKS, help="(default: %(default)s)")
    add("--text", help="the text of the shakespeare task")
    add("--contenders", nargs="+", required=True, metavar="NAME_OR_FILE[:key=value,...]")
    add("--baseline", help="the contender that the others are compared with (default: the first)")
    add("--seeds", type=int, default=5, help="runs of each contender (default: %(default)s)")
    add(
        "--first-seed",
        type=int,
        default=0,
        help="seeds are this one and those that follow (default: %(default)s)",
    )
    add(
        "--sweep",
        type=numbers,
        default=[],
        help="multiples of the learning rates to choose from, e.g. 0.5,1,2",
    )
    add(
        "--sweep-seeds",
        type=int,
        default=2,
        help="runs of each contender at each multiple (default: %(default)s)",
    )
    add(
        "--targets",
        type=numbers,
        help="losses: how soon is each reached, e.g. 1.775,1.6 (default: the task's)",
    )
    add(
        "--detect",
        type=float,
        default=0.01,
        help="how many seeds would show this difference? (default: %(default)s)",
    )
    add("--steps", type=int, help="optimizer steps (default: the task's)")
    add(
        "--model",
        nargs="+",
        default=[],
        type=assignment,
        metavar="KEY=VALUE",
        help="other fields of GPTConfig",
    )
    add(
        "--vocab-size",
        type=int,
        help="tokens in the vocabulary of the tasks with a tokenizer (default: the task's)",
    )
    add("--name", help="folder of the race under races/ (default: the task)")
    add_dtype_argument(parser)
    jobs = usable_gpus() or cores()
    add("--jobs", type=int, default=jobs, help="runs at a time (default: one a GPU or core, %(default)s)")
    args = parser.parse_args(argv)
    check_arguments(args)
    return args


def check_arguments(args):
    check_at_least_1(args, "seeds", "sweep_seeds", "steps", "jobs")
    if args.name is not None:
        check_name("--name", args.name)
    if any(not 0 < factor < math.inf for factor in args.sweep):
        raise InputError("--sweep takes multiples above 0")
    starts_before_the_end = args.first_seed < SWEEP_SEED + args.sweep_seeds
    ends_after_the_start = args.first_seed + args.seeds > SWEEP_SEED
    if args.sweep and starts_before_the_end and ends_after_the_start:
        raise InputError(f"seeds from {SWEEP_SEED} on are the sweep's: choose another --first-seed")
    if args.detect <= 0:
        raise InputError(f"--detect must be above 0, not {args.detect:g}")


def numbers(text):
    return [float(part) for part in text.split(",")]


def assignment(text):
    key, _, value = text.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def distinct(contenders):
    """One contender of each name."""
    return list({contender.name: contender for contender in contenders}.values())


def announce(task, setup, folder):
    counts = empty_model(setup, "meta").parameter_counts()
    embedding = counts["wte"]
    print(
        f"{task}: {setup['steps']} steps, {counts['total'] - embedding:,} parameters beside the token "
        f"embedding's {embedding:,}, {setup['dtype']}; results in {folder}",
        flush=True,
    )


@dataclass(frozen=True)
class Sweep:
    """chosen: {name of a contender: its variant at the best multiple}; text: the table that says why."""

    chosen: dict
    text: str


def sweep(folder, setup, place, contenders, args):
    """Race every contender at every multiple of its learning rates; a Sweep tells where each is best."""
    variants = {}  # {(name, multiple): contender}
    for contender in contenders:
        for factor in args.sweep:
            variants[contender.name, factor] = contender.scaled(factor)
    seeds = range(SWEEP_SEED, SWEEP_SEED + args.sweep_seeds)
    results = race.run_all(folder, setup, place, list(variants.values()), seeds, args.jobs)

    chosen = {}
    lines = [["learning rates x", *(f"{factor:g}" for factor in args.sweep), "best"]]
    some_at_the_edge = False
    for contender in contenders:
        means = {}  # {multiple: mean score}
        for factor in args.sweep:
            runs = results[variants[contender.name, factor].name]
            means[factor] = statistics.fmean(map(race_report.score, runs))
        best = min(means, key=means.get)
        chosen[contender.name] = variants[contender.name, best]
        best_text = f"{best:g}"
        if len(means) > 1 and best in (min(means), max(means)):
            best_text += " (edge)"
            some_at_the_edge = True
        lines.append([contender.name, *(f"{mean:.4f}" for mean in means.values()), best_text])
    text = (
        f"Learning rates: mean of {len(seeds)} seeds, the best of {len(args.sweep)} races with other seeds\n"
    )
    text += race_report.columns(lines)
    if some_at_the_edge:
        text += "\nThe best lies at the edge for some: a wider sweep may find better."
    return Sweep(chosen, text)


if __name__ == "__main__":
    run_command(main)
