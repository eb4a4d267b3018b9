"""The folder of a run, runs/NAME: what it records, who holds it, and how a launch is asked to stop.

settings.json records at the first start everything that defines the run; a later launch opens that.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from nanomuon import recipe, report
from nanomuon.files import being_written, holder, locked, read_json, write_text
from nanomuon.runtime import (
    STOPPED,
    InputError,
    Runtime,
    base_dir,
    check_name,
    on_signals,
    print0,
    why_not_writable,
)

# Flags that say how a launch begins, and nothing about its run. An optimizer file is one of them: its code
# runs only when a launch names it
OF_THE_LAUNCH = {
    "run",
    "resume",
    "plan",
    "wandb",
    "shard",
    "tensor_parallel",
    "device_batch_size",
    "optimizer_file",
}
LENGTHS = {"num_iterations", "target_flops", "target_param_data_ratio"}  # a new one replaces the recorded one
# What else may change while a run goes on
MAY_CHANGE = LENGTHS | {"eval_every", "eval_tokens", "save_every", "keep_last", "no_compile"}
MAY_CHANGE |= {"core_bundle", "core_every", "core_items"}
PACKAGES = ("torch", "triton", "numpy", "tiktoken", "rustbpe", "safetensors", "torchao", "flash-attn-4")


@dataclass
class Settings:
    """settings.json."""

    options: dict  # flags of base_train, with the values that were chosen for those that were not given
    compile: bool
    rows: int  # of a micro-step in this layout
    layout: str  # device and processes: another one chooses the rows anew
    trained_on: dict  # corpus, its revision, shards, tokenizer; SHA-256 of the optimizer file
    trained_with: dict  # commit, versions, threads


@dataclass
class Summary:
    """What summary.json has to say to mark a run as complete."""

    steps: int


def folder_of(run: str) -> Path:
    """The folder of the run of this name, whether it exists or not."""
    return base_dir() / "runs" / run


def find_run(run: str) -> Path:
    """The folder that --run names: with a slash it is a path, without one a name under runs/.

    InputError if there is no such folder, or if it may not be read.
    """
    if "/" in run or run in (".", "..", "~"):
        folder = Path(run).expanduser()
        if not folder.is_dir():
            raise InputError(f"--run {run}: there is no such folder, so it holds no finished model")
        folder = folder.resolve()
    else:
        check_name("--run", run)
        folder = folder_of(run)
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise InputError(f"{folder} may not be read by this user")
    return folder


def read_settings(folder: Path) -> Settings | None:
    """What a run has recorded; None for a run that does not exist yet. InputError names file and key."""
    file = folder / "settings.json"
    return read_json(file, Settings) if file.exists() else None


def layout_of(args: argparse.Namespace, runtime: Runtime) -> str:
    """Where a run computes, in words."""
    device = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "cpu"
    return f"{runtime.world_size} x {device}, --shard {args.shard}, --tensor-parallel {args.tensor_parallel}"


def recorded_rows(settings: Settings | None, args: argparse.Namespace, runtime: Runtime) -> int | None:
    """Rows of a micro-step that the run has had in this layout: other micro-steps round differently."""
    if settings is None or settings.layout != layout_of(args, runtime):
        return None
    return settings.rows


def recall(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> tuple[argparse.Namespace, Settings | None]:
    """(arguments, what the run has recorded if it exists): a flag that is not given has the recorded value.

    InputError lists what is given and differs from what defines the run.
    """
    argv = sys.argv[1:] if argv is None else argv
    given = parser.parse_args(argv)
    check_name("--run", given.run)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        given.resume = "auto"  # torchrun has replaced a rank that died on the way
    folder = folder_of(given.run)
    settings = None if given.resume == "never" else read_settings(folder)
    if settings is None:
        return given, None

    recorded = {name: value for name, value in settings.options.items() if name not in OF_THE_LAUNCH}
    if any(getattr(given, name) is not None for name in LENGTHS):
        recorded = {name: value for name, value in recorded.items() if name not in LENGTHS}
    try:
        before = parser.parse_args(as_flags(recorded))
    except InputError as error:
        raise InputError(f"{folder}/settings.json: options: {error}") from error
    args = parser.parse_args([*as_flags(recorded), *argv])
    args.resume = given.resume

    differences = []
    for name, value in vars(before).items():
        if name not in OF_THE_LAUNCH | MAY_CHANGE and getattr(args, name) != value:
            differences.append(f"--{name.replace('_', '-')} {value}, not {getattr(args, name)}")
    file, sha256 = (settings.trained_on.get(key) for key in ("optimizer_file", "optimizer_file_sha256"))
    if sha256 and not args.optimizer_file:
        raise InputError(
            f"run {args.run} trains with the optimizer file {file} of SHA-256 {sha256}, and code runs only "
            "when it is named: give --optimizer-file again"
        )
    if args.optimizer_file and sha256_of(args.optimizer_file) != sha256:
        was = f"optimizer file {file} of SHA-256 {sha256}" if sha256 else "no optimizer file"
        differences.append(f"{was}, not {args.optimizer_file} of SHA-256 {sha256_of(args.optimizer_file)}")
    refuse_differences(args.run, differences)
    return args, settings


def as_flags(options: dict) -> list[str]:
    """The command line that says these values."""
    flags = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags.append(f"{flag}={value}")
    return flags


def sha256_of(optimizer_file: str | None) -> str | None:
    return optimizer_file and hashlib.sha256(recipe.read_source(optimizer_file)).hexdigest()


def refuse_differences(run: str, differences: list[str]) -> None:
    if differences:
        raise InputError(
            f"run {run} exists with {'; '.join(differences)}: choose another --run, or start over: "
            "--resume never"
        )


@contextlib.contextmanager
def held(folder: Path, rank: int):
    """The run is this launch's alone: two would write into each other's checkpoints. The first rank holds it
    for all, and the system frees it if that dies.
    """
    if rank > 0:
        yield
        return
    reason = why_not_writable(folder)
    if reason is not None:
        raise InputError(f"{reason}; set NANOMUON_BASE_DIR to another")
    if being_written(folder):
        raise InputError(
            f"run {folder.name} is being trained by another process ({holder(folder)}): "
            "choose another --run, or stop that"
        )
    with locked(folder):
        yield


def is_complete(folder: Path, steps: int) -> bool:
    """Whether nothing is left to do of a run of so many steps; says so."""
    file = folder / "summary.json"
    if not file.exists() or read_json(file, Summary).steps < steps:
        return False
    print0(f"run {folder.name} is complete: {folder}/report.md (--resume never starts it over)")
    report.print_summary(read_json(file))
    return True


def trained_with() -> dict:
    """Commit, versions and threads that compute a run, as far as they are known."""
    known = {"python": platform.python_version(), "threads": torch.get_num_threads()}
    checkout = Path(__file__).parents[1]
    if (checkout / ".git").exists():  # git would look in the folders above, which may be another project
        command = [
            "git",
            "-C",
            str(checkout),
            "describe",
            "--always",
            "--abbrev=40",
            "--exclude=*",
            "--dirty",
        ]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            known["commit"] = subprocess.check_output(command, text=True, timeout=60).strip()
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[package] = importlib.metadata.version(package)
    return known


class StopSignals:
    """SIGTERM, SIGHUP and Ctrl-C ask to save and stop after this step; a second Ctrl-C ends at once.

    Before the first step and after the last there is nothing to save: then they end this process at once. The
    first rank notes a stop in the file `stopped` of the run's folder, None for a launch that trains nothing.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.asked = False
        self.at_once = "before its first step"  # None while there is something to save
        on_signals(self._receive, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def _receive(self, number, frame):
        self.asked = True
        if self.at_once:
            self._end()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _end(self):
        # Not by an exception, which could be lost in what it interrupts, or come to nothing while this rank
        # leaves a group whose others are waiting
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of a print()
            sys.stdout.flush()
        os._exit(self.stopped(self.at_once))

    def steps_begin(self) -> None:
        """Call before the first step: from now on there is something to save before a stop."""
        self.at_once = None

    def steps_end(self) -> None:
        """Call when everything is on disk: a signal then has nothing to wait for."""
        self.at_once = "before its last evaluation"
        if self.asked:
            self._end()

    def stopped(self, when: str) -> int:
        """Say and note that the run stops here. Returns its exit code: 75 in one process; 0 under torchrun,
        which starts ranks again that end with anything else.
        """
        message = f"stopped {when}; the same command carries on\n"
        if os.environ.get("RANK", "0") == "0":
            os.write(1, message.encode())  # print() fails in a signal handler that has interrupted another
            with contextlib.suppress(OSError):  # if the disk is full the exit code has to do
                if self.folder:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    write_text(self.folder / "stopped", message)
        alone = os.environ.get("WORLD_SIZE", "1") == "1" and not dist.is_torchelastic_launched()
        return STOPPED if alone else 0
