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

import numpy as np

from nanomuon import compare, locks, race, report
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
    write_text,
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
        parts.append(table(results, baseline.name, targets, args.detect, setup["unit"]))
        parts.append(verdicts(results, baseline.name))
        print("\n\n".join(parts))
        write_report(folder, results, parts, setup["unit"])
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
            means[factor] = statistics.fmean(map(score, runs))
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
    text += columns(lines)
    if some_at_the_edge:
        text += "\nThe best lies at the edge for some: a wider sweep may find better."
    return Sweep(chosen, text)


def write_report(folder, results, parts, unit):
    """race.md and race.png."""
    curves = {}
    for name, runs in results.items():
        curves[name] = [curve(run) for run in runs]
    report.plot_race(curves, unit, folder / "race.png")
    blocks = [f"```\n{part}\n```" for part in parts]
    text = "\n\n".join([f"# {folder.name}", *blocks, "![curves](race.png)"])
    write_text(folder / "race.md", text + "\n")


def score(run):
    """Of a run; a diverged one counts as infinite."""
    return run["score"] if math.isfinite(run["score"]) else math.inf


def curve(run):
    """[(step, loss)] of a run: the loss over a part of the validation set, corrected to that over all of it.

    What the whole differs from the part is known now and then, and interpolated between.
    """
    steps, part, whole = np.array(run["curve"], dtype=float).T
    known = ~np.isnan(whole)
    loss = part
    if known.any():
        loss = part + np.interp(steps, steps[known], (whole - part)[known])
    return list(zip(steps.tolist(), loss.tolist(), strict=True))


def differences(results, baseline):
    """{name: compare.Difference} to the baseline of those whose runs have all stayed finite."""
    of_baseline = list(map(score, results[baseline]))
    if not all(map(math.isfinite, of_baseline)):
        raise InputError(
            f"the baseline {baseline} diverged: lower its learning rates or choose another --baseline"
        )
    compared = {}
    for name, runs in results.items():
        scores = list(map(score, runs))
        if name != baseline and all(map(math.isfinite, scores)):
            compared[name] = compare.paired_difference(scores, of_baseline)
    return compared


def table(results, baseline, targets, detect, unit):
    """Seconds are steps times the median step: neither evaluation nor compilation is in them."""
    compared = differences(results, baseline)
    header = ["contender", "seeds", unit, "+-", "difference", "95% interval", f"seeds for {detect:g}"]
    header += [f"steps to {target:g}" for target in targets]
    header += ["step ms", "optimizer ms"]
    lines = [header]
    for name, runs in results.items():
        if name == baseline:
            cells = mean_cells(runs) + ["baseline", "", ""]
        elif name in compared:
            cells = mean_cells(runs) + difference_cells(compared[name], detect, len(compared))
        else:
            cells = ["diverged", "", "", "", ""]
        step_ms = statistics.median(run["step_ms"] for run in runs)
        optimizer_ms = statistics.median(run["optimizer_ms"] for run in runs)
        reached = [steps_to(runs, target, step_ms) for target in targets]
        lines.append([name, len(runs), *cells, *reached, f"{step_ms:.0f}", f"{optimizer_ms:.1f}"])
    return columns(lines)


def mean_cells(runs):
    mean, error = compare.mean_and_error([run["score"] for run in runs])
    return [f"{mean:.4f}", "" if math.isnan(error) else f"{error:.4f}"]


def difference_cells(difference, detect, comparisons):
    """Its mean, its interval, and the seeds that would show a difference of `detect`."""
    mean = f"{difference.mean:+.4f}"
    if math.isnan(difference.deviation):
        return [mean, "", ""]
    # several comparisons share the rate of false alarms; Holm's correction asks at most this of each
    needed = compare.seeds_needed(difference.deviation, detect, alpha=0.05 / comparisons)
    return [mean, f"{difference.low:+.4f} to {difference.high:+.4f}", needed]


def steps_to(runs, target, step_ms):
    """Mean steps, and seconds, to a loss; "-" where a run does not reach it."""
    reached = [compare.crossing(curve(run), target) for run in runs]
    if None in reached:
        return "-"
    steps = statistics.fmean(reached)
    return f"{steps:.0f} ({steps * step_ms / 1000:.0f} s)"


def verdicts(results, baseline):
    compared = differences(results, baseline)
    ps = compare.holm([difference.p for difference in compared.values()])
    adjusted = dict(zip(compared, ps, strict=True))
    lines = []
    for name, runs in results.items():
        if name in compared:
            lines.append(f"{name}: {compare.verdict(compared[name], adjusted[name])}")
        elif name != baseline:
            seeds = ", ".join(str(run["seed"]) for run in runs if not math.isfinite(run["score"]))
            lines.append(f"{name}: diverged with seed {seeds}")
    if len(compared) > 1:
        lines.append(
            f"({len(compared)} comparisons with {baseline}: Holm's correction decides, "
            "each interval is its own)"
        )
    return "\n".join(lines)


def columns(lines):
    """Lines of cells as text, every column as wide as its widest cell."""
    lines = [list(map(str, line)) for line in lines]
    widths = []
    for column in zip(*lines, strict=True):
        widths.append(max(map(len, column)))
    rows = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)


if __name__ == "__main__":
    run_command(main)
