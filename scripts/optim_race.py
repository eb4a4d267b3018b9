"""Race optimizers on a fixed task, over several seeds, and say in words which differences are real.

    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default adamw muon normuon
    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default default:matrix_lr=0.03 my.py
    python -m scripts.optim_race --text tinyshakespeare.txt --contenders adamw my.py --sweep 8
    python -m scripts.optim_race --task python --contenders adamw default --seeds 3 --leaderboard

A contender is a preset (adamw, muon, normuon, or default: the recipe of base_train) or a Python file with

    def param_groups(model, *, beta=0.9): ...    # groups for MuonAdamW
    def build_optimizer(model): ...              # or this: any torch optimizer
    def schedule(group, step, steps): ...        # if you like: {"lr": ..., ...} at a step from 0

schedule gets a group as it was built. NAME:key=value,key=value hands keywords to these functions; lr_scale=X
multiplies all learning rates. An optimizer that is judged by other weights than it trains (an average, say)
puts them in place in its eval() and back in its train().

All contenders get the same initial weights and the same rows for a seed, and are compared seed by seed. Every
finished run is kept in races/NAME under NANOMUON_BASE_DIR: an interrupted race goes on (Ctrl-C and SIGTERM
end it within two seconds), and one with more seeds or contenders trains only what is new. A contender whose
code or hyperparameters have changed is another contender; runs of another task, model or data are refused.
After two seeds or more a contender that is hopelessly behind stops, by a rule that wrongs one of the best in
a hundred races at most.

--sweep 8 gives each contender the time of eight runs to find its rates first, with other seeds: trials of a
quarter of the length, the best of them at half, the best of those at all of it. Searched are all rates
together, the decay and the dial that its file names (DIAL = ("c", 0.1, 0.8)), or else the matrices' rate.

--leaderboard keeps the finished runs in docs/races, small enough to be committed, goes on from those that are
there, and writes docs/leaderboard.md.

Tasks: shakespeare (characters of any --text, 0.8M parameters, 2,000 steps: minutes on a core), python (the
embedded corpus, depth 4, 300 steps), python-long (2,000 steps), speedrun (FineWeb, 12 layers of width 768,
GPUs only).
"""

import ast
import itertools
import math
import os
import shlex
import sys
from pathlib import Path

from nanomuon import locks
from nanomuon.arguments import (
    ArgumentParser,
    add_dtype_argument,
    check_not_negative,
    check_seed,
    check_sizes,
    check_vocabulary,
)
from nanomuon.runtime import (
    InputError,
    base_dir,
    check_at_least_1,
    check_name,
    check_output_folder,
    cores,
    exit_when_asked,
    run_command,
    usable_gpus,
)
from scripts.laboratory import kept_race, leaderboard, race, race_report, race_tuning
from scripts.laboratory.race_contenders import Contender
from scripts.laboratory.race_tasks import TASKS, empty_model, open_task


def main(argv=None):
    args = parse_arguments(argv)
    exit_when_asked()
    if args.contenders:
        run_race(args, sys.argv[1:] if argv is None else argv)
    if args.leaderboard:
        page = args.leaderboard / "leaderboard.md"
        leaderboard.write_leaderboard(args.leaderboard / "races", page)
        print(page)


def run_race(args, argv):
    place, setup = open_task(args.task, args.text, args.vocab_size, args.steps, dict(args.model))
    set_batch(setup, args.total_batch_size)
    folder = base_dir() / "races" / (args.name or args.task)
    kept_file = None
    if args.leaderboard:
        kept_file = args.leaderboard / "races" / f"{folder.name}.jsonl"
        if os.path.lexists(kept_file):
            kept_race.restore(kept_file, folder)
    setup["dtype"] = race.choose_dtype(args.dtype, folder)
    baseline = Contender(args.baseline or args.contenders[0])
    contenders = distinct([baseline, *map(Contender, args.contenders)])
    announce(args.task, setup, folder)
    with locks.shared(folder):
        race.check_setup(folder, setup, args.accept_changes)
        try:
            parts = compete(folder, setup, place, baseline, contenders, args)
        finally:
            if kept_file:
                kept_race.keep(folder, kept_file, baseline.name, shown_command(argv))
    print("\n\n".join(parts))
    print(f"\n{folder}/race.md, {folder}/race.png")


def compete(folder, setup, place, baseline, contenders, args):
    """Tune, if asked, and race; the parts of the report, which is written."""
    parts = []
    slope = None
    with race.Workers(args.jobs) as workers:
        if args.sweep:
            searches = tune(folder, setup, place, contenders, args.sweep, workers)
            contenders = [found.best for found in searches]
            baseline = searches[0].best
            slope = race_report.slope_of_length(searches[0].runs())
            parts.append(tuning_table(searches, args.sweep))
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        if args.all_seeds:
            results = race.run_all(folder, setup, place, contenders, seeds, workers)
        else:
            results = race.run_rounds(folder, setup, place, contenders, baseline.name, seeds, workers)
    targets = args.targets or TASKS[args.task].targets
    parts.append(race_report.table(results, baseline.name, targets, args.detect, setup["unit"], slope))
    parts.append(race_report.verdicts(results, baseline.name))
    if len(results) > 2:
        parts.append(race_report.ranking(results, setup["unit"], slope))
    race_report.write_report(folder, results, parts, setup["unit"], baseline.name, slope)
    return parts


def set_batch(setup, tokens):
    """Put a batch of so many tokens into the setup; None leaves the task's."""
    if tokens is None:
        return
    length = setup["model"]["seq_len"]
    if tokens % length:
        raise InputError(f"--total-batch-size {tokens} is not a multiple of the context, {length} tokens")
    setup["rows"] = tokens // length
    setup["micro_rows"] = math.gcd(setup["rows"], setup["micro_rows"])


def shown_command(argv):
    """The command for a reader elsewhere: of --text the name of the file."""
    shown = []
    for before, argument in itertools.pairwise(["", *argv]):
        shown.append(Path(argument).name if before == "--text" else argument)
    return "python -m scripts.optim_race " + shlex.join(shown)


def parse_arguments(argv):
    parser = ArgumentParser("python -m scripts.optim_race", __doc__)
    add = parser.add_argument
    add("--task", default="shakespeare", choices=TASKS, help="(default: %(default)s)")
    add("--text", help="the text of the shakespeare task")
    add("--contenders", nargs="+", default=[], metavar="NAME_OR_FILE[:key=value,...]")
    add("--baseline", help="the contender that the others are compared with (default: the first)")
    add("--seeds", type=int, default=5, help="runs of each contender (default: %(default)s)")
    add(
        "--first-seed",
        type=int,
        default=0,
        help="seeds are this one and those that follow (default: %(default)s)",
    )
    add(
        "--all-seeds",
        action="store_true",
        help="train every contender with every seed, the hopeless too",
    )
    add(
        "--sweep",
        type=int,
        metavar="RUNS",
        help="tune every contender first, with at most so many runs of full length each",
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
    add("--total-batch-size", type=int, help="tokens per optimizer step (default: the task's)")
    add("--name", help="folder of the race under races/ (default: the task)")
    add(
        "--leaderboard",
        nargs="?",
        type=Path,
        const=Path("docs"),
        metavar="FOLDER",
        help="keep the finished runs in FOLDER/races/NAME.jsonl, go on from those that are there, and write "
        "FOLDER/leaderboard.md of all such files; without --contenders that page alone (default: docs)",
    )
    add(
        "--accept-changes",
        action="store_true",
        help="go on with a race though the code of the model or the optimizer has changed since",
    )
    add_dtype_argument(parser)
    jobs = usable_gpus() or cores()
    add("--jobs", type=int, default=jobs, help="runs at a time (default: one a GPU or core, %(default)s)")
    args = parser.parse_args(argv)
    check_arguments(args)
    return args


def check_arguments(args):
    if not args.contenders and not args.leaderboard:
        raise InputError("--contenders says who races, for example: --contenders default adamw")
    check_at_least_1(args, "seeds", "steps", "jobs")
    check_sizes(args)
    check_vocabulary(args.vocab_size)
    check_not_negative(args, "first_seed")
    check_seed("--first-seed", args.first_seed)
    if args.leaderboard:
        check_output_folder("--leaderboard", args.leaderboard)
        if not args.contenders and not args.leaderboard.is_dir():
            raise InputError(f"--leaderboard {args.leaderboard}: no such folder, so no race is kept in it")
    if args.name is not None:
        check_name("--name", args.name)
    if args.sweep is not None and args.sweep < race_tuning.FEWEST_RUNS:
        raise InputError(
            f"--sweep takes the runs that tuning may cost, at least {race_tuning.FEWEST_RUNS}, "
            f"not {args.sweep}"
        )
    of_tuning = range(race_tuning.FIRST_SEED, race_tuning.FIRST_SEED + len(race_tuning.LENGTHS))
    if args.sweep and args.first_seed < of_tuning.stop and args.first_seed + args.seeds > of_tuning.start:
        raise InputError(
            f"seeds {of_tuning.start} to {of_tuning.stop - 1} are tuning's: choose another --first-seed"
        )
    if not 0 < args.detect < math.inf:
        raise InputError(f"--detect must be above 0 and finite, not {args.detect:g}")
    for target in args.targets or []:
        if not math.isfinite(target):
            raise InputError(f"--targets are losses, finite numbers, not {target:g}")


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


def tune(folder, setup, place, contenders, budget, workers):
    """A race_tuning.Search of every contender; the runs are under `folder`/sweep."""

    def train(trials, steps, seed):
        rung = folder / "sweep" / str(steps)
        rung_setup = setup | {"steps": steps}
        race.check_setup(rung, rung_setup, accept_changes=True)  # asked before, for the race itself
        print(f"tuning: {len(trials)} trials of {steps} steps", flush=True)
        results = race.run_all(rung, rung_setup, place, trials, [seed], workers)
        return {name: race_report.score(run) for name, (run,) in results.items()}

    return race_tuning.search(contenders, budget, setup["steps"], train)


def tuning_table(searches, budget):
    """The trials of every contender that were trained at full length, and how the search went."""
    lines = [["contender", "as it is, short", "best", "score", "tried"]]
    for found in searches:
        shortest, first_scores = found.rounds[0]
        _, last_scores = found.rounds[-1]
        tried = ", ".join(f"{len(scores)} of {steps} steps" for steps, scores in found.rounds)
        own = first_scores[found.contender.name]
        best = found.best.name.removeprefix(found.contender.source).removeprefix(":") or "as it is"
        score = f"{last_scores[found.best.name]:.4f}"
        lines.append([found.contender.name, f"{own:.4f} at {shortest}", best, score, tried])
    return (
        f"Tuning: at most {budget} runs of full length for each contender, with other seeds than the race\n"
        + race_report.columns(lines)
    )


if __name__ == "__main__":
    run_command(main)
