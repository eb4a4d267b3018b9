"""The page docs/leaderboard.md, made from the finished runs in docs/races/*.jsonl."""

from nanomuon.runtime import write_text
from scripts.laboratory import report, significance
from scripts.laboratory.race import read_results

INTRODUCTION = (
    """# Leaderboard

Races of optimizers, each on one task, with the mean loss over seeds and its standard error. Written by
`python -m scripts.optim_race --leaderboard` from the finished runs in `races/`. Contenders with fewer seeds
were stopped early, worse than another beyond doubt; their mean is corrected for the luck of their seeds.
`default` is the recipe on the day of the race; files that are no longer in contenders/ are in the history.

"""
    + report.NOTE
)


def write_leaderboard(kept, page):
    """Write the page, and leaderboard_NAME.png next to it for each file NAME.jsonl of the folder `kept`."""
    parts = [INTRODUCTION]
    files = sorted(kept.glob("*.jsonl"))
    for file in files:
        header, runs = read_results(file)
        parts.append(section(file.stem, header, runs, page.parent / f"leaderboard_{file.stem}.png"))
    if not files:
        parts.append("No race has been kept yet.")
    write_text(page, "\n\n".join(parts) + "\n")


def section(name, header, runs, image):
    """The Markdown of one race; its picture goes to `image`."""
    setup, results, tuning = header["setup"], {}, 0
    latest = {}  # if a run was repeated, the later one counts
    for run in runs:
        latest[run.get("stage"), run["contender"], run["steps"], run["seed"]] = run
    for run in latest.values():
        if run.get("stage") == "sweep":
            tuning += 1
        else:
            results.setdefault(run["contender"], []).append(run)
    baseline = find_baseline(header, results)
    title = f"## {header.get('title', name)}"
    about = (
        f"Task `{setup['name']}`: {setup['steps']:,} steps of {setup['rows'] * setup['model']['seq_len']:,} "
        f"tokens in contexts of {setup['model']['seq_len']}, depth {setup['model']['depth']}, width "
        f"{setup['model']['width']}, {setup['dtype']}; {len(latest) - tuning} runs and {tuning} of tuning."
    )
    if baseline is None:
        return f"{title}\n\n{about}\n\nThe baseline diverged, or has no run."
    report.plot_race(results, setup["unit"], image)
    table = report.table(results, baseline, setup["unit"])
    return "\n\n".join([title, about, table, f"![Validation curves]({image.name})"])


def source(contender):
    return contender.partition(":")[0]


def find_baseline(header, results):
    """The contender that the first line of the file names, or its tuned form; None if it diverged."""
    wanted = header.get("baseline") or next(iter(results), None)
    finite = significance.finite_only(report.scores_by_seed(results))
    candidates = [name for name in finite if name == wanted]
    candidates += [name for name in finite if wanted and source(name) == source(wanted)]
    return candidates[0] if candidates else None
