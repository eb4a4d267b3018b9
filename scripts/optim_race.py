"""Race optimizers on a fixed task, over several seeds, and test which differences are significant.

    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default adamw muon normuon
    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default default:matrix_lr=0.03 my.py
    python -m scripts.optim_race --text tinyshakespeare.txt --contenders adamw my.py --sweep 8
    python -m scripts.optim_race --task corpus --corpus path:my_texts --contenders default adamw --seeds 3
    python -m scripts.optim_race --task python --contenders adamw default --seeds 3 --leaderboard

A contender is a preset (adamw, muon, normuon, or default: the recipe of base_train) or a Python file with

    def param_groups(model, batch, steps, *, beta=0.9): ...   # groups for MuonAdamW
    def build_optimizer(model): ...                           # or this: any torch optimizer
    def schedule(group, step, steps): ...   # {"lr": ...}, step counts from 0; default: the recipe's

Both builders may take batch (tokens per step) and steps; the recipe's rates follow them, so hand them on to
recipe.param_groups. schedule gets a group as it was built. NAME:key=value,key=value hands keywords to these
functions; lr_scale=X multiplies all learning rates. An optimizer to be judged by other weights than those it
trains (such as an average) puts them in place in its eval() and restores its own in its train().

With one seed all contenders start from the same weights and see the same rows; each is compared with the
first, seed by seed. Every finished run is a line of races/NAME/results.jsonl under NANOMUON_BASE_DIR: an
interrupted race goes on, and one with more seeds or contenders trains only the new runs. A contender whose
file or hyperparameters have changed runs again; a race on another task, model or data needs another --name.
After two or more seeds a contender that is hopelessly behind stops, by a rule that rarely stops one of the
best (significance.hopeless).

--sweep 8 first gives each contender the time of eight runs to find its rates, on other seeds: trials of a
quarter of the length, the best of them at half, the best of those at full length. It searches all rates
together, the weight decay, and the dial that the file names (DIAL = ("c", 0.1, 0.8)) or else the rate of the
matrices.

--leaderboard keeps the runs in docs/races/NAME.jsonl instead, to be committed, and writes docs/leaderboard.md
from all such files; without --contenders it only writes the page.

Tasks: shakespeare (characters of any --text, 0.8M parameters, 2,000 steps: minutes on a core), corpus (any
--corpus, depth 4, 300 steps), python (the same on Python's standard library), speedrun (FineWeb, 12 layers of
width 768, GPUs only).
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

import ast
from pathlib import Path

from nanomuon.command import (
    ArgumentParser,
    add_dtype_argument,
    count,
    number,
    run_command,
    vocabulary,
)
from nanomuon.corpus import check_corpus
from nanomuon.runtime import InputError, base_dir, check_name, cores, locked, start, usable_gpus
from scripts.laboratory import leaderboard, race, report
from scripts.laboratory.contenders import Contender
from scripts.laboratory.tasks import TASKS, empty_model, open_task

FEWEST_SWEEP = 3  # runs: then one trial has the full length
DOCS = Path("docs")


def main(argv=None):
    args = parse_arguments(argv)
    if args.contenders:
        run_race(args)
    if args.leaderboard:
        leaderboard.write_leaderboard(DOCS / "races", DOCS / "leaderboard.md")
        print(DOCS / "leaderboard.md")


def run_race(args):
    contenders = {}
    for text in args.contenders:
        contender = Contender(text)
        contenders[contender.name] = contender
    contenders = list(contenders.values())
    place, setup = open_task(args)
    setup["dtype"] = start(args.dtype).dtype_name
    folder = base_dir() / "races" / args.name
    file = DOCS / "races" / f"{args.name}.jsonl" if args.leaderboard else folder / "results.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    model = empty_model(setup, "meta")
    embedding = model.wte.weight.numel()
    others = sum(p.numel() for p in model.parameters()) - embedding
    print(
        f"{args.task}: {setup['steps']} steps, {others:,} parameters and {embedding:,} in "
        f"the token embedding, {setup['dtype']}; results in {file}",
        flush=True,
    )
    text = ""
    with locked(folder):
        racing = race.Race(race.Results(file, setup, contenders[0].name), setup, place, args.jobs)
        if args.sweep:
            tuned = racing.sweep(contenders, args.sweep)
            lines = [["contender", "best trial"]]
            lines += [[old.name, new.name] for old, new in zip(contenders, tuned, strict=True)]
            text, contenders = report.columns(lines) + "\n\n", tuned
        results = racing.run(contenders, range(args.seeds))
    baseline = contenders[0].name
    text += f"{report.table(results, baseline, setup['unit'])}\n\n{report.NOTE}"
    report.write_report(folder, results, text, setup["unit"])
    print(f"\n{text}\n\n{folder}/race.md, {folder}/race.png")


def parse_arguments(argv):
    parser = ArgumentParser("python -m scripts.optim_race", __doc__)
    add = parser.add_argument
    add("--task", default="shakespeare", choices=TASKS, help="(default: %(default)s)")
    add("--text", help="the text of the shakespeare task")
    add("--corpus", default="python", help="of --task corpus, as in base_train (default: %(default)s)")
    add("--vocab-size", type=vocabulary, help="tokens in the vocabulary (default: set by the corpus)")
    add("--contenders", nargs="+", default=[], metavar="NAME_OR_FILE[:key=value,...]")
    add("--seeds", type=count, default=5, help="runs of each contender (default: %(default)s)")
    add(
        "--sweep",
        type=number(int, FEWEST_SWEEP, 1 << 20),
        metavar="RUNS",
        help="tune each first, in at most the time of this many full runs",
    )
    add("--steps", type=count, help="optimizer steps (default: the task's)")
    add("--model", nargs="+", default=[], type=assignment, metavar="KEY=VALUE", help="fields of GPTConfig")
    add("--name", help="name of the race (default: the task)")
    add("--leaderboard", action="store_true", help="keep the runs in docs/races, write docs/leaderboard.md")
    add_dtype_argument(parser)
    jobs = usable_gpus() or cores()
    add("--jobs", type=count, default=jobs, help="runs at a time (default: one per GPU or core, %(default)s)")
    args = parser.parse_args(argv)
    if not args.contenders and not args.leaderboard:
        raise InputError("give --contenders, for example: --contenders default adamw")
    if args.task == "corpus":
        check_corpus(args.corpus)
    elif args.corpus != "python":
        raise InputError(f"--corpus {args.corpus} is for --task corpus")
    args.name = args.name or args.task
    check_name("--name", args.name)
    return args


def assignment(text):
    key, _, value = text.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


if __name__ == "__main__":
    run_command(main)
