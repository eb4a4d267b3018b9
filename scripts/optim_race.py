"""Race optimizers on a fixed task, over several seeds, and say in words which differences are real.

    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default adamw muon normuon python -m
    scripts.optim_race --text tinyshakespeare.txt --contenders default default:matrix_lr=0.03 my_idea.py
    python -m scripts.optim_race --text tinyshakespeare.txt --contenders adamw my_idea.py --sweep 0.5,1,2
    python -m scripts.optim_race --task python --contenders adamw default --seeds 3

A contender is a preset (adamw, muon, normuon, or default: the recipe of base_train) or a Python file with

    def param_groups(model, *, beta=0.9): ...    # groups for MuonAdamW; or build_optimizer(model): any torch optimizer
    def schedule(group, step, steps): ...        # if you like: {"lr": ..., ...} of a group, as built, at a step from 0

NAME:key=value,key=value hands keywords to these two; lr_scale=X multiplies all learning rates. An optimizer
that is judged by other weights than it trains (an average, say) puts them in place in its eval() and back in
its train().

All contenders get the same initial weights and the same rows for a seed, and are compared seed by seed. Every
finished run is kept in races/NAME under NANOMUON_BASE_DIR: an interrupted race goes on, and one with more
seeds or contenders trains only what is new. A contender whose code or hyperparameters have changed is another
contender; runs of another task, model or data are refused. With a sweep each contender is trained at every
multiple of its learning rates, with seeds of its own, and races at the best one.

Tasks: shakespeare (characters of --text, 0.8M parameters, 2,000 steps: minutes on a core), python (the
embedded corpus, depth 4, 300 steps), speedrun (FineWeb, 12 layers of width 768, GPUs only).
"""

import argparse
import ast
import math
import statistics

import numpy as np
import torch

from nanomuon import compare, race, report
from nanomuon.runtime import (
    InputError,
    base_dir,
    check_at_least_1,
    check_name,
    cores,
    run_command,
    write_text,
)

SWEEP_SEED = 1000  # the seeds of a sweep begin here: those of the race must not have chosen what they judge


def main(argv=None):
    args = parse_arguments(argv)
    place, task = race.open_task(args.task, args.text, args.vocab_size, args.steps, dict(args.model))
    folder = base_dir() / "races" / (args.name or args.task)
    baseline = race.Contender(args.baseline or args.contenders[0])
    contenders = list({c.name: c for c in [baseline, *map(race.Contender, args.contenders)]}.values())
    counts = race.empty_model(task, "meta").parameter_counts()
    print(
        f"{args.task}: {task['steps']} steps, {counts['total'] - counts['wte']:,} parameters beside the token "
        f"embedding's {counts['wte']:,}; results in {folder}",
        flush=True,
    )
    parts = []
    if args.sweep:
        contenders, chosen, text = sweep(folder, task, place, contenders, args)
        baseline = chosen[baseline.name]
        parts.append(text)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    results = race.run_all(folder, task, place, contenders, seeds, args.jobs)
    parts += [
        table(results, baseline.name, args.targets or race.TASKS[args.task][2], args.detect, task["unit"]),
        verdicts(results, baseline.name, args.detect),
    ]
    print("\n\n".join(parts))
    curves = {name: [curve(run) for run in runs] for name, runs in results.items()}
    report.plot_race(curves, task["unit"], folder / "race.png")
    text = "\n\n".join([f"# {folder.name}", *(f"```\n{part}\n```" for part in parts), "![curves](race.png)"])
    write_text(folder / "race.md", text + "\n")
    print(f"\n{folder}/race.md, {folder}/race.png")


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.optim_race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--task", default="shakespeare", choices=race.TASKS, help="(default: %(default)s)")
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
    jobs = torch.cuda.device_count() or cores()
    add("--jobs", type=int, default=jobs, help="runs at a time (default: one a GPU or core, %(default)s)")
    args = parser.parse_args(argv)
    check_at_least_1(args, "seeds", "sweep_seeds", "steps", "jobs")
    if args.name is not None:
        check_name("--name", args.name)
    if any(not 0 < factor < math.inf for factor in args.sweep):
        raise InputError("--sweep takes multiples above 0")
    if (
        args.sweep
        and args.first_seed < SWEEP_SEED + args.sweep_seeds
        and args.first_seed + args.seeds > SWEEP_SEED
    ):
        raise InputError(f"seeds from {SWEEP_SEED} on are the sweep's: choose another --first-seed")
    if args.detect <= 0:
        raise InputError(f"--detect must be above 0, not {args.detect:g}")
    return args


def numbers(text):
    return [float(part) for part in text.split(",")]


def assignment(text):
    key, _, value = text.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def sweep(folder, task, place, contenders, args):
    """Each contender at its best multiple, {name: itself at its best}, and the table that says why."""
    every = {c.name: {factor: c.scaled(factor) for factor in args.sweep} for c in contenders}
    seeds = range(SWEEP_SEED, SWEEP_SEED + args.sweep_seeds)
    flat = [scaled for variants in every.values() for scaled in variants.values()]
    results = race.run_all(folder, task, place, flat, seeds, args.jobs)
    lines, chosen = [["learning rates x", *(f"{factor:g}" for factor in args.sweep), "best"]], {}
    for name, variants in every.items():
        means = {
            factor: statistics.fmean(score(run) for run in results[c.name]) for factor, c in variants.items()
        }
        best = min(means, key=means.get)
        at_the_edge = len(means) > 1 and best in (min(means), max(means))
        lines.append(
            [name, *(f"{mean:.4f}" for mean in means.values()), f"{best:g}{' (edge)' * at_the_edge}"]
        )
        chosen[name] = variants[best]
    text = (
        f"Learning rates: mean of {len(seeds)} seeds, the best of {len(args.sweep)} races with other seeds\n"
    )
    text += columns(lines)
    if any("edge" in line[-1] for line in lines):
        text += "\nThe best lies at the edge for some: a wider sweep may find better."
    return list(chosen.values()), chosen, text


def score(run):
    """Of a run; a diverged one counts as infinite."""
    return run["score"] if math.isfinite(run["score"]) else math.inf


def curve(run):
    """[(step, loss)]: what a part of the validation set gave, plus what the whole differs from it, known now
    and then and interpolated.
    """
    steps, part, whole = np.array(run["curve"], dtype=float).T
    known = ~np.isnan(whole)
    loss = part + np.interp(steps, steps[known], (whole - part)[known]) if known.any() else part
    return list(zip(steps.tolist(), loss.tolist(), strict=True))


def differences(results, baseline):
    """{name: compare.Difference} to the baseline of those whose runs have all stayed finite."""
    scores = {name: [score(run) for run in runs] for name, runs in results.items()}
    if not all(map(math.isfinite, scores[baseline])):
        raise InputError(
            f"the baseline {baseline} diverged: lower its learning rates or choose another --baseline"
        )
    return {
        name: compare.paired_difference(values, scores[baseline])
        for name, values in scores.items()
        if name != baseline and all(map(math.isfinite, values))
    }


def table(results, baseline, targets, detect, unit):
    """Seconds are steps times the median step: neither evaluation nor compilation is in them."""
    compared = differences(results, baseline)
    lines = [
        [
            "contender",
            "seeds",
            unit,
            "+-",
            "difference",
            "95% interval",
            f"seeds for {detect:g}",
            *(f"steps to {target:g}" for target in targets),
            "step ms",
            "optimizer ms",
        ]
    ]
    for name, runs in results.items():
        line = [name, len(runs), "diverged", ""]
        if name == baseline or name in compared:
            mean, error = compare.mean_and_error([run["score"] for run in runs])
            line[2:] = f"{mean:.4f}", "" if math.isnan(error) else f"{error:.4f}"
        line += ["baseline" if name == baseline else "", "", ""]
        if name in compared:
            d = compared[name]
            line[-3] = f"{d.mean:+.4f}"
            if not math.isnan(d.deviation):
                # several comparisons share the rate of false alarms; Holm's correction asks at most this of
                # each
                needed = compare.seeds_needed(d.deviation, detect, alpha=0.05 / len(compared))
                line[-2:] = f"{d.low:+.4f} to {d.high:+.4f}", needed
        step_ms = statistics.median(run["step_ms"] for run in runs)
        for target in targets:
            reached = [compare.crossing(curve(run), target) for run in runs]
            steps = None if None in reached else statistics.fmean(reached)
            line.append("-" if steps is None else f"{steps:.0f} ({steps * step_ms / 1000:.0f} s)")
        lines.append(
            [*line, f"{step_ms:.0f}", f"{statistics.median(run['optimizer_ms'] for run in runs):.1f}"]
        )
    return columns(lines)


def verdicts(results, baseline, detect):
    compared = differences(results, baseline)
    adjusted = dict(zip(compared, compare.holm([d.p for d in compared.values()]), strict=True))
    lines = []
    for name, runs in results.items():
        if name in compared:
            lines.append(f"{name}: {compare.verdict(compared[name], adjusted[name])}")
        elif name != baseline:
            bad = [run["seed"] for run in runs if not math.isfinite(run["score"])]
            lines.append(f"{name}: diverged with seed {', '.join(map(str, bad))}")
    if len(compared) > 1:
        lines.append(
            f"({len(compared)} comparisons with {baseline}: Holm's correction decides, each interval is its "
            "own)"
        )
    return "\n".join(lines)


def columns(lines):
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    run_command(main)
