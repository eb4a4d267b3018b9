"""The folder of a run, runs/NAME: its settings, who may write to it, and whether anything is left to do.

settings.json holds what defines the run (`definition`), under `options` the arguments that it remembers,
under `measured` what was measured about the device (see sizing.recalled), and what it trains on and with (see
provenance.py).
"""

import argparse
import contextlib
import os
import shutil
import stat
from dataclasses import asdict
from pathlib import Path

import torch

from nanomuon import provenance, report
from nanomuon.arguments import SIZES
from nanomuon.export import MODEL_OPTIONS, MODEL_SHAPE
from nanomuon.files import being_written, holder, locked, write_json, write_whole
from nanomuon.planning import Plan
from nanomuon.read_json import (
    Choice,
    Flag,
    MapOf,
    Number,
    OrNull,
    Record,
    Scalar,
    Text,
    Whole,
    check,
    read_json,
)
from nanomuon.runtime import InputError, Runtime, base_dir, check_name, print0, why_not_writable
from nanomuon.sizing import choose_dtype
from nanomuon.tokenizer import Tokenizer

# arguments that concern one launch of a run, which does not remember them. An optimizer file is one of them:
# its code runs only where it is named
OF_THE_LAUNCH = (
    "run",
    "resume",
    "plan",
    "wandb",
    "shard",
    "tensor_parallel",
    "optimizer_file",
)

MEASURED = Record({}, {"device_batch_size": SIZES["device_batch_size"], "bf16_speedup": Number(0)})
# What defines the run is compared with what it is to be now, so here only its types matter
SETTINGS = Record(
    {"options": MapOf(Scalar())},
    {
        **MODEL_SHAPE,
        **MODEL_OPTIONS,
        "corpus": Text(),
        "tokenizer": Text(64),
        "total_batch_size": SIZES["total_batch_size"],
        "seed": Whole(0, 1 << 64),
        "measured": MEASURED,
    },
)
SUMMARY = Record({"steps": Whole()}, others=Scalar())


def folder_of(run: str) -> Path:
    """The folder of the run of this name, whether it exists or not."""
    return base_dir() / "runs" / run


def find_run(run: str) -> Path:
    """The folder that --run names: with a slash it is a path, without one a name under runs/.

    InputError where there is no such folder, and where it may not be read.
    """
    if "/" in run or run in (".", "..", "~"):
        folder = Path(run).expanduser()
        if not folder.is_dir():
            raise InputError(f"--run {run}: there is no such folder, so it holds no finished model")
        folder = folder.resolve()
    else:
        check_name("--run", run)
        folder = folder_of(run)
        if not folder.is_dir() and Path(run).is_dir():
            raise InputError(f"{folder} holds no finished model; the folder here is --run ./{run}")
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise InputError(f"{folder} may not be read by this user")
    return folder


def read_settings(run_dir: Path) -> dict:
    """What settings.json holds, {} for a run that does not exist yet."""
    file = run_dir / "settings.json"
    if not os.path.lexists(file):
        return {}
    return read_json(file, SETTINGS)


def remembered_options(run_dir: Path, settings: dict, parser: argparse.ArgumentParser) -> dict:
    """What a run remembers of its arguments, each of a type that its flag can have; InputError else.

    Those of a launch are left out, and those that this version has no flag for.
    """
    actions = {action.dest: action for action in parser._actions if action.dest not in OF_THE_LAUNCH}
    options = {key: value for key, value in settings["options"].items() if key in actions}
    described = {}
    for key in options:
        described[key] = SIZES.get(key) or flag_values(actions[key])
        if actions[key].default is None:
            described[key] = OrNull(described[key])
    check(options, Record(described), f"{run_dir}/settings.json: options")
    return options


def flag_values(action: argparse.Action):
    """Describes the values that a flag can have, see read_json."""
    if action.choices:
        return Choice(*action.choices)
    if action.type is int:
        return Whole(-1, 1 << 64)  # whether it may be -1 is for check_arguments to say
    if action.type is float:
        return Number()
    if action.nargs == 0:  # --flag, --no-flag
        return Flag()
    return Text()


def check_no_links(run_dir: Path) -> None:
    """InputError where the folder of a run holds a symbolic link, a device or a pipe where files are written.

    What a run writes stays in its folder, though somebody else may have made it.
    """
    written_to = [run_dir, run_dir / "tokenizer", run_dir / "checkpoints", *run_dir.glob("checkpoints/*")]
    for folder in written_to:
        if not folder.is_dir():
            continue
        for entry in folder.iterdir():
            mode = entry.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise InputError(
                    f"{entry} is a symbolic link or the like: the folder of a run has none, remove it"
                )


def print_cpu_dtype(run: str) -> None:
    """What speedrun.sh asks: the dtype that a run has, or would get here, on the CPU."""
    settings = read_settings(folder_of(run))
    asked = settings.get("options", {}).get("dtype", "auto")
    check(asked, Choice("auto", "bfloat16", "float32"), f"{folder_of(run)}/settings.json: options.dtype")
    cpu = Runtime(torch.device("cpu"), torch.float32)
    print(choose_dtype(asked, cpu, settings.get("measured", {})).dtype_name)


def definition(args: argparse.Namespace, plan: Plan, tokenizer: Tokenizer) -> dict:
    """What makes a run what it is: it can go on only with the same."""
    return {
        "corpus": args.corpus,
        "tokenizer": tokenizer.hash,
        **asdict(plan.config),
        "total_batch_size": plan.batch,
        "seed": args.seed,
        "optimizer_file": args.optimizer_file,
    }


def write_settings(
    run_dir: Path, defined: dict, args: argparse.Namespace, plan: Plan, measured: dict, recorded: dict
) -> None:
    """defined: what `definition` gives. measured: see sizing.recalled. recorded: see provenance.record."""
    options = {key: value for key, value in vars(args).items() if key not in OF_THE_LAUNCH}
    options |= {"total_batch_size": plan.batch, "max_seq_len": plan.config.seq_len}
    settings = {**defined, "options": options, "measured": measured, **recorded}
    write_json(run_dir / "settings.json", settings)


def check_data(run_dir: Path, settings: dict, now: dict) -> None:
    """InputError if this launch trains on what the run has not so far.

    settings: of the run, {} for a new one. now: what provenance.record gives for this launch.
    """
    if not settings:
        return
    changes = provenance.changes_of_data(settings, now)
    if changes:
        copy = run_dir / provenance.OPTIMIZER_COPY
        kept = f" (the optimizer file that it has run is {copy})" if copy.is_file() else ""
        raise InputError(
            f"run {run_dir.name} would go on with {'; and with '.join(changes)}{kept}: "
            "--resume never starts over, another --run leaves this one as it is"
        )


def check_definition(run_dir: Path, defined: dict) -> None:
    """InputError where the folder holds a run that was started as another one. Whether its optimizer file is
    the same is for check_data.
    """
    before = read_settings(run_dir)
    if not before:
        return
    changed = []
    for key, now in defined.items():
        if key != "optimizer_file" and before.get(key) != now:
            changed.append(f"{key} {before.get(key)!r}, not {now!r}")
    if changed:
        raise InputError(
            f"run {run_dir.name} exists with {'; '.join(changed)}: choose another --run, "
            "or start over: --resume never"
        )


def check_writable(folder: Path) -> None:
    """Refuse a place that cannot be written to before any work is done; makes nothing."""
    reason = why_not_writable(folder)
    if reason is not None:
        raise InputError(f"{reason}; set NANOMUON_BASE_DIR to another")


@contextlib.contextmanager
def held(run_dir: Path, rank: int):
    """The run is this launch's alone: two would write into each other's checkpoints. The first rank holds it
    for all, and the system frees it if that dies.
    """
    if rank > 0:
        yield
        return
    if being_written(run_dir):
        raise InputError(
            f"run {run_dir.name} is being trained by another process ({holder(run_dir)}): "
            "choose another --run, or stop that"
        )
    with locked(run_dir):
        yield


def is_complete(run_dir: Path, steps: int) -> bool:
    """Whether nothing is left to do of a run of so many steps; says so."""
    file = run_dir / "summary.json"
    if not os.path.lexists(file):
        return False
    summary = read_json(file, SUMMARY)
    if summary["steps"] < steps:
        return False
    print0(f"run {run_dir.name} is complete: {run_dir}/report.md (--resume never starts it over)")
    report.print_summary(summary)
    return True


def make_run_folder(run_dir: Path, tokenizer: Tokenizer, afresh: bool) -> None:
    """The folder of a run that starts or goes on, once everything that could be wrong with it has been
    looked at. tokenizer: the run's. afresh: what the folder holds is removed.
    """
    if afresh:
        shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "summary.json").unlink(missing_ok=True)  # a run that goes on is not complete
    started = (run_dir / "settings.json").exists()
    if started and not (run_dir / "tokenizer").exists():
        print0(f"{run_dir}/tokenizer is missing: restored")
    if not started or not (run_dir / "tokenizer").exists():
        tokenizer.save(run_dir / "tokenizer")  # with it, this folder is all that sampling and evaluation need


def keep_optimizer_file(run_dir: Path, source: bytes) -> None:
    """Keep the text of the optimizer file in the run's folder."""
    copy = run_dir / provenance.OPTIMIZER_COPY
    with write_whole(copy) as file:
        file.write(source)
    print0(f"its text is kept as {copy}")
