"""Race optimizers and models on a fixed task, over several seeds, and test which differences are significant.

    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default contenders/adamw.py my.py
    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default default:matrix_lr=0.03
    python -m scripts.optim_race --task python --contenders default default:heads=4,kv_heads=4 --seeds 3
    python -m scripts.optim_race --task corpus --corpus path:my_texts --contenders default my.py --sweep 8

A contender is `default` (the recipe and the model of base_train) or a Python file with one or more of

    def param_groups(model, **keywords): ...     # groups for MuonAdamW, or instead:
    def build_optimizer(model, *, lr=0.1): ...   # any torch optimizer
    def schedule(group, step, steps): ...        # {"lr": ...}, step counts from 0; group: as it was built
    def model(config, compute_dtype): ...        # an uninitialized GPT; a subclass with this name also works

It takes whatever it does not define from the default. A builder with parameters `batch` (tokens per step)
and `steps` gets their values; the recipe's rates depend on them, so pass them on to recipe.param_groups.
`**keywords` passes on both, and all keywords of the recipe. CONTENDER:key=value,key=value sets keywords of
its functions and fields of its GPTConfig; lr_scale=X multiplies all its learning rates. --model sets fields
for all. If an optimizer is evaluated with other weights than it trains (such as an average), its eval() swaps
them in, and its train() swaps the trained weights back in.

With the same seed all contenders see the same rows and start from the same weights: the race calls
init_weights(seed) on each model, and parameters whose name and shape occur in the default model get its
values. Each is compared with the first, seed by seed. Every finished run is a line in
races/NAME/results.jsonl under NANOMUON_BASE_DIR, and unfinished ones are saved about every two minutes: an
interrupted race continues, and one with more seeds or contenders trains only the new runs. A contender
whose file or hyperparameters have changed runs again; a race with another task, length, model, dtype, device
or data needs another --name.

--sweep 8 first gives each contender at most the steps of eight runs to tune its rates, on other seeds: trials
of a quarter of the length, the best of them at half, the best of those at full length. It searches a common
factor on all rates, the weight decay, and the dial that the file names (DIAL = ("c", 0.1, 0.8)) or else the
rate of the matrices.

Tasks: shakespeare (characters of any --text, 0.8M parameters, 2,000 steps: minutes on one core), corpus (any
--corpus, base_train's model at depth 4, 300 steps of 4,096 tokens), python (the same on Python's standard
library).
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

import shutil

from nanomuon.attention import use_flash_attention
from nanomuon.command import (
    ArgumentParser,
    add_dtype_argument,
    count,
    number,
    run_command,
    vocabulary,
)
from nanomuon.report import machine_description
from nanomuon.runtime import InputError, base_dir, check_name, cores, locked, start, usable_gpus, write_text
from scripts.laboratory import report
from scripts.laboratory.contenders import Contender, parse_options
from scripts.laboratory.race import Race
from scripts.laboratory.tasks import TASKS, batch_of, check_fields, open_task

FEWEST_SWEEP = 3  # runs: with fewer, no trial of full length would be left


def main(argv=None):
    args = parse_arguments(argv)
    contenders = [Contender(text) for text in dict.fromkeys(args.contenders)]
    runtime = start(args.dtype)
    use_flash_attention(runtime.device, runtime.compute_dtype)  # first: it decides the default windows
    place, setup = open_task(args)
    setup["dtype"] = runtime.dtype_name
    folder = base_dir() / "races" / args.name
    folder.mkdir(parents=True, exist_ok=True)
    data, batch = args.text or args.corpus, batch_of(setup)
    about = [f"{args.task} ({data}): {setup['steps']} steps of {batch:,} tokens, {setup['dtype']}"]
    for contender in contenders:
        about += contender.describe(setup)
    print("\n".join([*about, f"results in {folder}"]), flush=True)
    with locked(folder):
        race = Race(folder / "results.jsonl", setup, place, args.jobs)
        if args.sweep:
            contenders = race.sweep(contenders, args.sweep)
            about.append(f"tuned first, each in at most the steps of {args.sweep} runs")
        results = race.train(contenders, range(args.seeds), setup["steps"])
        shutil.rmtree(folder / "unfinished", ignore_errors=True)  # of contenders that have changed since
    baseline = contenders[0].name
    text = f"{report.table(results, baseline, setup['unit'])}\n\n{report.NOTE}"
    about.append(f"last run by {machine_description()}")
    facts = "\n".join(f"- {fact}" for fact in about)
    report.plot_race(results, baseline, setup["unit"], folder / "race.png")
    page = f"# {args.name}\n\n{facts}\n\n{text}\n\n![Curves, differences](race.png)\n"
    write_text(folder / "race.md", page)
    print(f"\n{text}\n\n{folder}/race.md, {folder}/race.png")


def parse_arguments(argv):
    parser = ArgumentParser("python -m scripts.optim_race", __doc__)
    add = parser.add_argument
    add("--task", default="shakespeare", choices=TASKS, help="(default: %(default)s)")
    add("--text", help="text file for the shakespeare task")
    add("--corpus", default="python", help="for --task corpus, as in base_train (default: %(default)s)")
    add("--vocab-size", type=vocabulary, help="tokens in the vocabulary (default: set by the corpus)")
    add("--contenders", nargs="+", required=True, metavar="NAME_OR_FILE[:key=value,...]")
    add("--seeds", type=count, default=5, help="runs of each contender (default: %(default)s)")
    add(
        "--sweep",
        type=number(int, FEWEST_SWEEP, 1 << 20),
        metavar="RUNS",
        help=f"first tune each contender, in at most the steps of RUNS ({FEWEST_SWEEP} or more) full runs",
    )
    add("--steps", type=count, help="optimizer steps (default: the task's)")
    add("--model", nargs="+", default=[], metavar="KEY=VALUE", help="fields of GPTConfig, for all contenders")
    add("--name", help="name of the race (default: the task)")
    add_dtype_argument(parser)
    jobs = usable_gpus() or cores()
    add("--jobs", type=count, default=jobs, help="runs at a time (default: one per GPU or core, %(default)s)")
    args = parser.parse_args(argv)
    if args.task != "corpus" and args.corpus != "python":
        raise InputError(f"--corpus {args.corpus} is only for --task corpus")
    if args.text and args.task != "shakespeare":
        raise InputError(f"--text {args.text} is only for --task shakespeare")
    args.model = parse_options("--model", ",".join(args.model))
    check_fields("--model", args.model)
    args.name = args.name or args.task
    check_name("--name", args.name)
    return args


if __name__ == "__main__":
    run_command(main)
