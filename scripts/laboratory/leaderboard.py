"""The page docs/leaderboard.md, made of the kept results of races, see kept_race.py."""

import math
from dataclasses import fields
from pathlib import Path

from nanomuon.export import MODEL_OPTIONS, MODEL_SHAPE
from nanomuon.gpt import EARLIER_FIELDS, GPTConfig
from nanomuon.read_json import FILE_NAME, Choice, Number, Record, Text, Whole, check
from nanomuon.report import fenced, markdown_table
from nanomuon.runtime import InputError, printable, write_text
from scripts.laboratory import compare, kept_race, race_report
from scripts.laboratory.race_tasks import empty_model

SETUP = Record(
    {
        "name": Text(64),
        "steps": Whole(1),
        "unit": Text(64),
        "rows": Whole(1),
        "model": Record(MODEL_SHAPE, MODEL_OPTIONS, others=None),
        "dtype": Choice("bfloat16", "float32"),
    },
    {"device": Text(64)},
)
HEADER = Record({"race": FILE_NAME, "setup": SETUP}, {"title": Text(200), "order": Number()})
INTRODUCTION = """# Leaderboard

Races of optimizers, each on one task: what every contender came to, and what can be said about it. Written by
`python -m scripts.optim_race --leaderboard` from the finished runs in `races/`.

- The **loss** is the mean over seeds with its standard error. Seeds move all contenders together, so that the
  **difference** to the baseline, taken seed by seed, is known better. Its 95% interval is its own; the
  **verdict** is corrected for the number of comparisons: of those called better or worse 5% at most are
  expected not to be (Benjamini and Hochberg).
- **At equal seconds** is an estimate: the difference, and what the baseline would gain in the additional time
  of a contender whose steps take longer. It holds for the machine of the race.
- **Step ms** has in brackets how many of the baseline's steps one takes, both measured against the forward
  and backward pass of the same run, so that other work on the machine falls out.
- Contenders with fewer seeds were stopped early, worse than another beyond doubt; their mean is corrected for
  the luck of their seeds.
- The first places were chosen by their means, and so were lucky as well: their leads are overstated a little.
- **Tuning** is the number of runs that chose a contender's hyperparameters, and what they come to in runs of
  full length; they had other seeds. A commit with + had changes that are not in it.
- The **commands** are those that were run. Where model or optimizer have changed since, the same command says
  what to add, so that the race goes on with the model that it has: `--model ...`, `--accept-changes`."""


def write_leaderboard(kept: Path, page: Path) -> None:
    """Write the page, and leaderboard_NAME.png beside it for each kept race, from all kept/*.jsonl.

    Races come by the `order` of their first lines, then by name. InputError, one line that names file, line
    or run, and key, for a file that is something else; nothing is written then.
    """
    races = [read_race(file) for file in sorted(Path(kept).glob("*.jsonl"))]
    races.sort(key=lambda race: (race.header.get("order", math.inf), race.name))
    parts = [INTRODUCTION]
    for race in races:
        picture = None
        if race.baseline is not None:
            picture = f"leaderboard_{race.name}.png"
            unit = race.setup["unit"]
            race_report.plot_forest(race.results, race.baseline, unit, page.parent / picture, race.slope)
        parts.append(section(race, picture))
    if not races:
        parts.append("No race has been kept yet.")
    write_text(page, printable("\n\n".join(parts)) + "\n")


class KeptRace:
    """A kept file, read. results: {contender: its race's runs}; tuning: runs that chose hyperparameters.

    baseline: the contender in `results` that others are compared with; None where it diverged or has no run.
    slope: of the baseline's loss over ln(steps), see race_report.slope_of_length, or None. counts: of the
    model's parameters, by role.
    """

    def __init__(self, header, runs, counts):
        self.header = header
        self.counts = counts
        self.name = header["race"]
        self.setup = header["setup"]
        self.results = {}
        self.tuning = []
        for run in runs:
            if run["stage"] == "race":
                self.results.setdefault(run["contender"], []).append(run)
            else:
                self.tuning.append(run)
        self.baseline = self.find_baseline()
        self.slope = None
        if self.baseline is not None:
            self.slope = race_report.slope_of_length(self.tuning_of(self.baseline))

    def find_baseline(self):
        """The first line names it as it was before tuning; in the race it may have other hyperparameters."""
        wanted = self.header["baseline"]
        candidates = [name for name in self.results if variant(name) == variant(wanted)]
        if wanted in self.results:
            candidates = [wanted]
        finite = compare.finite_only(race_report.scores_by_seed(self.results))
        for name in candidates:
            if name in finite:
                return name
        return None

    def tuning_of(self, contender):
        """Tuning runs of a contender: those of the same preset or file, with the same switches."""
        return [run for run in self.tuning if variant(run["contender"]) == variant(contender)]


def variant(contender):
    """(preset or file, its options that are not numbers): what tuning leaves as it is."""
    source, _, options = contender.partition(":")
    switches = [option for option in options.split(",") if option and not is_number(option.partition("=")[2])]
    return source, switches


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_race(file) -> KeptRace:
    header, runs = kept_race.read_kept(file)
    check(header, HEADER, f"{file} line 1")
    if header["race"] != file.stem:
        raise InputError(
            f"{file} line 1: race is {header['race']!r}, not {file.stem!r} as the file is called"
        )
    latest = {}  # of a run that was repeated the later one counts
    starts = {}  # {seed: (initial weights, rows)} of the race
    for name, run in runs.items():
        latest[run["stage"], run["contender"], run["steps"], run["seed"]] = run
        if run["stage"] != "race":
            continue
        where = f"{file}, run {name}"
        if run["steps"] != header["setup"]["steps"]:
            raise InputError(f"{where}: steps is {run['steps']}, but the race has {header['setup']['steps']}")
        if math.isfinite(run["score"]) and run["step_ms"] <= run["optimizer_ms"]:
            raise InputError(f"{where}: step_ms is {run['step_ms']:g}, not more than optimizer_ms")
        start = (run["initial"], run["rows"])
        if starts.setdefault(run["seed"], start) != start:
            raise InputError(
                f"{where}: initial or rows differ from another contender's with seed {run['seed']}: this is "
                "no comparison"
            )
    try:
        counts = empty_model(header["setup"], "meta").parameter_counts()
    except ValueError as error:
        raise InputError(f"{file} line 1: setup.model: {error}") from error
    return KeptRace(header, latest.values(), counts)


def section(race, picture):
    """The Markdown of one race."""
    title = " ".join(race.header.get("title", race.name).split())
    parts = [f"## {title}", described(race)]
    if race.results:
        parts.append(ranking_table(race))
        parts += notes(race)
    else:
        parts.append("No run has been finished yet.")
    if picture is not None:
        parts.append(f"![Differences to the baseline with 95% intervals]({picture})")
    parts.append(fenced("\n".join(race.header["commands"])))
    return "\n\n".join(parts)


def described(race):
    """Task, model and amount of a race in words."""
    setup = race.setup
    model = {**EARLIER_FIELDS, **setup["model"]}
    options = ""
    for field in fields(GPTConfig):
        if field.name in MODEL_OPTIONS and model.get(field.name, field.default) != field.default:
            options += f", {field.name} {model[field.name]}"
    embedding = race.counts["wte"]
    others = race.counts["total"] - embedding
    tokens = setup["rows"] * model["seq_len"]
    runs = [run for of_contender in race.results.values() for run in of_contender]
    hours = sum(run["steps"] * run["step_ms"] for run in runs + race.tuning) / 3.6e6
    seeds = max(map(len, race.results.values()), default=0)
    return (
        f"Task `{setup['name']}`: {setup['steps']:,} steps of {tokens:,} tokens, up to {seeds} seeds. Depth "
        f"{model['depth']}, width {model['width']}{options}, {others:,} parameters beside the token "
        f"embedding's {embedding:,}, {setup['dtype']}. {len(runs)} runs and {len(race.tuning)} of "
        f"tuning, {hours:.1f} hours of training."
    )


def ranking_table(race):
    """A row for each contender, the lowest mean first, those that diverged last."""
    names = race_report.shown_names(race.results)
    ranks = compare.ranking(race_report.scores_by_seed(race.results))
    judged = {}
    if race.baseline is not None:
        judged = race_report.judged(race.results, race.baseline)
    machines = machine_letters(race)
    header = ["", "contender", race.setup["unit"], "difference", "95% interval"]
    if race.slope is not None:
        header.append("at equal seconds")
    header += ["verdict", "seeds", "tuning", "step ms", "commit", "machine"]
    rows = []
    for place, rank in enumerate(ranks, 1):
        runs = race.results[rank.name]
        _, error = compare.mean_and_error([run["score"] for run in runs])
        loss = f"{rank.mean:.4f}" if math.isnan(error) else f"{rank.mean:.4f} ± {error:.4f}"
        cells = difference_cells(race, rank.name, judged)
        rows.append([place, f"`{names[rank.name]}`", loss, *cells, *origin_cells(race, rank.name, machines)])
    ranked = {rank.name for rank in ranks}
    for name in race.results:
        if name not in ranked:
            verdict = race_report.diverged(race.results[name])
            empty = [""] * (len(header) - 9)
            rows.append(["", f"`{names[name]}`", "", *empty, verdict, *origin_cells(race, name, machines)])
    return markdown_table(header, rows)


def difference_cells(race, name, judged):
    """To the baseline: difference, interval, at equal seconds where there is a slope, verdict."""
    equal_seconds = [] if race.slope is None else [""]
    if name == race.baseline:
        return ["", "", *equal_seconds, "baseline"]
    if name not in judged or judged[name][0].seeds == 0:
        return ["", "", *equal_seconds, ""]
    difference, p = judged[name]
    if race.slope is not None:
        runs, of_baseline = race.results[name], race.results[race.baseline]
        estimate = race_report.at_equal_seconds(difference.mean, runs, of_baseline, race.slope)
        equal_seconds = [f"{estimate:+.4f}"]
    interval, verdict = "", "one seed: cannot tell"
    if difference.seeds > 1:
        interval = race_report.interval(difference)
        verdict = race_report.verdict_word(difference, p)
    return [f"{difference.mean:+.4f}", interval, *equal_seconds, verdict]


def origin_cells(race, name, machines):
    """Seeds, tuning runs, time of a step, commits and machines of a contender's runs."""
    runs = race.results[name]
    tuning = race.tuning_of(name)
    spent = ""
    if tuning:
        full_length = sum(run["steps"] for run in tuning) / race.setup["steps"]
        spent = f"{len(tuning)} ({full_length:.1f})"
    commits = sorted({shown_commit(run) for run in runs})
    letters = sorted({machines[run.get("machine", "unknown")] for run in runs})
    return [len(runs), spent, step_cell(race, name), ", ".join(commits), ", ".join(letters)]


def step_cell(race, name):
    """Milliseconds of a step, and how many of the baseline's that is; of those that diverged nothing."""
    runs = race.results[name]
    if not all(math.isfinite(run["score"]) for run in runs):
        return ""
    step_ms = f"{race_report.median_ms(runs):.0f}"
    if race.baseline is None or name == race.baseline:
        return step_ms
    of_baseline = race_report.relative_step(race.results[race.baseline])
    return f"{step_ms} ({race_report.relative_step(runs) / of_baseline:.2f})"


def shown_commit(run):
    """Twelve digits, with a + where the tree had changes."""
    commit = run.get("commit") or "unknown"
    changed = "+" if run.get("clean_tree") is False else ""
    return commit[:12] + changed


def machine_letters(race):
    """{description of a machine: A, B, ...} in the order in which they appear."""
    letters = {}
    for runs in race.results.values():
        for run in runs:
            machine = run.get("machine", "unknown")
            letters.setdefault(machine, chr(ord("A") + len(letters)))
    return letters


def notes(race):
    """Paragraphs below a table: who ties with the best; how seconds were converted, and on which machines."""
    paragraphs = []
    ranks = compare.ranking(race_report.scores_by_seed(race.results))
    if ranks:
        paragraphs.append(race_report.tie_sentence(ranks, race_report.shown_names(race.results)))
    if race.baseline is None:
        paragraphs.append(f"The baseline, {race.header['baseline']}, diverged or has no run.")
    sentences = []
    if race.slope is not None:
        sentences.append(
            f"At equal seconds: {race.slope:.4f} is what the baseline gains per unit of ln(steps), by its "
            "tuning runs."
        )
    for machine, letter in machine_letters(race).items():
        sentences.append(f"Machine {letter}: {machine}.")
    return [*paragraphs, " ".join(sentences)]
