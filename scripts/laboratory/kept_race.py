"""Finished runs of a race as one small file, docs/races/NAME.jsonl, that can be committed: a race of many
hours goes on from it on another day or machine.

Its first line tells of the race, each further line of one run: what train() gave without its param groups,
and "file", "stage" ("race" or "sweep") and "steps". leaderboard.py makes a page of such files.
"""

import os
from pathlib import Path

from nanomuon.read_json import (
    LOG,
    Choice,
    Flag,
    ListOf,
    Matching,
    OrNull,
    Record,
    Text,
    Whole,
    parse,
    read_json,
    read_regular,
)
from nanomuon.runtime import InputError, write_json, write_json_lines
from scripts.laboratory.race import RESULT, TASK, read_result

RUN_FILE = Matching(r"(sweep/[0-9]{1,12}/)?[\w-][\w=.-]{0,200}\.json", "the file of a run in a race's folder")
HEADER = Record({"race": Text(), "baseline": Text(), "commands": ListOf(Text()), "setup": TASK})
RUN = Record(
    RESULT.required | {"file": RUN_FILE, "stage": Choice("race", "sweep"), "steps": Whole(1)},
    {"machine": Text(), "commit": OrNull(Text(64)), "clean_tree": OrNull(Flag())},
)
DIGITS = 6  # of a loss


def keep(folder: Path, file: Path, baseline: str, command: str) -> None:
    """Write all finished runs of the race in `folder` to `file`, beside the runs that it has already."""
    setup = read_json(folder / "task.json", TASK)
    header, runs = {"commands": []}, {}
    if os.path.lexists(file):
        header, runs = read_kept(file)
    if command not in header["commands"]:
        header["commands"].append(command)
    header |= {"race": folder.name, "baseline": baseline, "setup": setup}
    for path in sorted([*folder.glob("*-seed*.json"), *folder.glob("sweep/[0-9]*/*-seed*.json")]):
        name = str(path.relative_to(folder))
        result = read_result(path)
        result.pop("groups", None)
        is_race = path.parent == folder
        steps = setup["steps"] if is_race else int(path.parent.name)
        curve = result["curve"] if is_race else result["curve"][-1:]
        result["curve"] = [[step, rounded(part), rounded(whole)] for step, part, whole in curve]
        result["score"] = rounded(result["score"])
        for key in ("step_ms", "optimizer_ms"):
            result[key] = round(result[key], 2)
        runs[name] = {"file": name, "stage": "race" if is_race else "sweep", "steps": steps, **result}
    lines = [header, *(runs[name] for name in sorted(runs))]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json_lines(file, lines)


def rounded(loss):
    return None if loss is None else round(loss, DIGITS)


def read_kept(file: Path) -> tuple[dict, dict]:
    """The first line, and {file of a run: the run}. InputError where a line is something else."""
    first, *rest = read_regular(file, LOG).splitlines() or [b""]
    header = parsed(first, HEADER, file, 1)
    runs = {}
    for number, line in enumerate(rest, 2):
        run = parsed(line, RUN, file, number)
        runs[run["file"]] = run
    return header, runs


def parsed(line: bytes, description, file, number: int):
    try:
        return parse(line, description)
    except ValueError as error:
        raise InputError(f"{file} line {number}: {error}") from error


def restore(file: Path, folder: Path) -> None:
    """Write the runs of `file` that the race's folder lacks into it."""
    header, runs = read_kept(file)
    folder.mkdir(parents=True, exist_ok=True)
    setups = {folder / "task.json": header["setup"]}
    new = 0
    for name, run in runs.items():
        path = folder / name
        setups[path.parent / "task.json"] = header["setup"] | {"steps": run["steps"]}
        if os.path.lexists(path):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, run)
        new += 1
    for path, setup in setups.items():
        if not os.path.lexists(path):
            write_json(path, setup)
    if new:
        print(f"{new} finished runs are taken from {file}", flush=True)
