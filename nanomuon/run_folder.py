"""The folder of a run, runs/NAME: its settings, who may write to it, and whether anything is left to do.

settings.json holds what defines the run (`definition`), under `options` the arguments that it remembers, and
under `measured` what was measured about the device (see sizing.recalled).
"""

import argparse
import contextlib
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from nanomuon.finished_run import print_summary
from nanomuon.gpt import EARLIER_SHORT_WINDOW
from nanomuon.locks import being_written, holder, locked, this_process
from nanomuon.planning import Plan
from nanomuon.runtime import InputError, Runtime, base_dir, print0, write_json
from nanomuon.sizing import choose_dtype
from nanomuon.tokenizer import Tokenizer

# arguments that concern one launch of a run, which does not remember them
OF_THE_LAUNCH = ("run", "resume", "plan", "wandb", "shard", "tensor_parallel")


def folder_of(run: str) -> Path:
    return base_dir() / "runs" / run


def read_settings(run_dir: Path) -> dict:
    """What settings.json holds, {} for a run that does not exist yet."""
    file = run_dir / "settings.json"
    if not file.exists():
        return {}
    settings = json.loads(file.read_text())
    settings.setdefault("short_window", EARLIER_SHORT_WINDOW)
    return settings


def print_cpu_dtype(run: str) -> None:
    """What speedrun.sh asks: the dtype that a run has, or would get here, on the CPU."""
    settings = read_settings(folder_of(run))
    asked = settings.get("options", {}).get("dtype", "auto")
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
    run_dir: Path, defined: dict, args: argparse.Namespace, plan: Plan, measured: dict
) -> None:
    """defined: what `definition` gives. measured: see sizing.recalled."""
    options = {key: value for key, value in vars(args).items() if key not in OF_THE_LAUNCH}
    options |= {"total_batch_size": plan.batch, "max_seq_len": plan.config.seq_len}
    write_json(run_dir / "settings.json", {**defined, "options": options, "measured": measured})


def check_definition(run_dir: Path, defined: dict) -> None:
    """InputError where the folder holds a run that was started as another one."""
    before = read_settings(run_dir)
    if not before:
        return
    changed = [
        f"{key} {before.get(key)!r}, not {now!r}" for key, now in defined.items() if before.get(key) != now
    ]
    if changed:
        raise InputError(
            f"run {run_dir.name} exists with {'; '.join(changed)}: choose another --run, "
            "or start over: --resume never"
        )


def check_writable(folder: Path) -> None:
    """Refuse a place that cannot be written to before any work is done; makes nothing."""
    while not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror}; set NANOMUON_BASE_DIR to another"
        ) from error


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


def check_held(run_dir: Path, rank: int) -> None:
    """InputError where another launch has taken the run from this one, whose first rank alone looks.

    It can only where the lock does not hold between machines: some network file systems have none, or keep it
    to each machine.
    """
    if rank == 0 and holder(run_dir) != this_process():
        raise InputError(
            f"run {run_dir.name} was taken over by {holder(run_dir)}: this launch ends and saves nothing more"
        )


def is_complete(run_dir: Path, steps: int) -> bool:
    """Whether nothing is left to do of a run of so many steps; says so."""
    file = run_dir / "summary.json"
    if not file.exists():
        return False
    summary = json.loads(file.read_text())
    if summary["steps"] < steps:
        return False
    print0(f"run {run_dir.name} is complete: {run_dir}/report.md (--resume never starts it over)")
    print_summary(summary)
    return True


def make_run_folder(run_dir: Path, tokenizer: Tokenizer, afresh: bool) -> None:
    """The folder of a run that starts or goes on, once everything that could be wrong with it has been
    looked at. afresh: what it holds is removed.
    """
    if afresh:
        shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "summary.json").unlink(missing_ok=True)  # a run that goes on is not complete
    if not (run_dir / "settings.json").exists():
        tokenizer.save(run_dir / "tokenizer")  # with it, this folder is all that sampling and evaluation need
