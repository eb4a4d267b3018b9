"""The settings of a training run: its flags, and what settings.json records of them.

A later launch reads settings.json and rewrites it.
"""

import argparse
import functools
import hashlib
import os
import re
import sys
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from nanomuon import recipe
from nanomuon.command import (
    ArgumentParser,
    add_dtype_argument,
    amount,
    count,
    layers,
    number,
    seed,
    vocabulary,
)
from nanomuon.runtime import InputError, check_name, folder_of, read_json, together

# A flag's scope: it defines the run; it may change when the run resumes; it sets the length, which may change
# too (a new one replaces the recorded one); or it concerns only this launch, and is not recorded
DEFINES, MAY_CHANGE, LENGTH, NOT_RECORDED = "defines", "may change", "length", "not recorded"
AGAIN = "give the same values again, choose another --run, or start over: --resume never"
# Flags of older runs, and their defaults
REMOVED_FLAGS = {"experts": 0, "experts_per_token": 2, "fp8": False}


@dataclass
class Settings:
    """settings.json."""

    options: dict  # flags of base_train, with the values chosen for those that were not given
    rows: int  # per micro-step, chosen anew if the world size or the layout changes
    world_size: int
    trained_on: dict  # corpus, its revision, shards, tokenizer; path and SHA-256 of the optimizer file
    trained_with: dict  # versions, commit, hashes of the model's code
    groups: list = field(default_factory=list)  # see recipe.describe
    steps: int | None = None  # planned; older versions did not record them
    wandb_id: str | None = None  # id of the run at Weights & Biases
    layout: dict | None = None  # see plan.Layout; older versions did not record it

    def __post_init__(self):
        if self.rows < 1:
            raise ValueError(f"rows must be positive, not {self.rows}")


class RunParser(ArgumentParser):
    """Flags of a run, in sections. scopes: {argument: DEFINES, ...}; --dtype, which scripts share, has none
    and counts as DEFINES.
    """

    def __init__(self, prog: str, description: str):
        super().__init__(prog, description)
        self.scopes = {}

    def section(self, title: str, one_of: bool = False) -> None:
        """Begin a section. one_of: its flags exclude each other."""
        self.place = self.add_argument_group(title)
        if one_of:
            self.place = self.place.add_mutually_exclusive_group()

    def add(self, scope: str, flag: str, kind, default, meaning: str, **settings) -> None:
        """kind: bool for a flag without a value, else the function that parses its value."""
        if kind is bool:
            if default:
                raise ValueError(
                    f"{flag} takes no value, so it is False if it is not given: declare its opposite"
                )
            settings["action"] = "store_true"
        else:
            settings |= {"type": kind, "default": default}
            meaning += "" if default is None else " (default: %(default)s)"
        self.scopes[self.place.add_argument(flag, help=meaning, **settings).dest] = scope

    def without(self, values: dict, *scopes: str) -> dict:
        """The arguments that do not have these scopes."""
        return {name: value for name, value in values.items() if self.scopes.get(name) not in scopes}


def make_parser(prog: str = "python -m scripts.base_train", description: str = "") -> RunParser:
    """Every flag of a run, with its scope."""
    parser = RunParser(prog, description)
    defines = functools.partial(parser.add, DEFINES)
    may_change = functools.partial(parser.add, MAY_CHANGE)
    length = functools.partial(parser.add, LENGTH)
    not_recorded = functools.partial(parser.add, NOT_RECORDED)
    rows = number(int, 1, 1 << 20)

    parser.section("launch")
    not_recorded("--run", str, "base", "name of the run, a folder under runs/")
    resume = (
        "auto: the newest checkpoint; step_N: that one (deletes later ones); never: delete run and start over"
    )
    not_recorded("--resume", checkpoint_name, "auto", resume)
    not_recorded("--plan", bool, False, "print the run's size, memory and time, and exit")
    not_recorded("--wandb", bool, False, "also log to Weights & Biases (WANDB_MODE=offline works)")

    add_data_flags(parser)

    parser.section("model")
    defines("--depth", layers, 4, "number of layers; width, heads and batch follow")
    defines("--max-seq-len", rows, None, "context in tokens (default: 2048 on a GPU, 512 on a CPU)")
    windows = (
        "L: full, S: last quarter of the context; the last layer has L (default: SSSL if FlashAttention runs "
        "here, else L)"
    )
    defines("--window-pattern", str, None, windows)
    defines("--no-qk-norm", bool, False, "do not normalize queries and keys")

    parser.section("batch")
    batch = number(int, 1, 1 << 28)
    defines(
        "--total-batch-size",
        batch,
        None,
        "tokens per step (default: follows from --target-flops or --target-param-data-ratio, not from "
        "--num-iterations; on a CPU 4096 is enough)",
    )
    not_recorded(
        "--device-batch-size",
        rows,
        None,
        "rows per micro-step (default: as many as fit; on a CPU at most 16)",
    )

    parser.section("length", one_of=True)
    length("--num-iterations", count, None, "optimizer steps")
    length("--target-flops", amount, None, "train for this many FLOPs in total, such as 1e18")
    ratio = "training tokens per parameter of the matrices and the head (default: 10.5)"
    length("--target-param-data-ratio", number(float, 1e-6, 1e6), None, ratio)

    parser.section("optimizer (rates and decay follow batch, length and width: docs/recipe.md)")
    for name, each in (recipe.RATES | recipe.SCHEDULE).items():
        defines(flag_of(name), number(type(each.default), 0, each.largest), each.default, each.meaning)
    defines("--qk-clip", amount, None, "with --no-qk-norm: limit on a head's attention logits, such as 100")
    # Its code runs only if a launch names it
    file = "file with build_optimizer(model), param_groups(model) or schedule; give it again to resume"
    not_recorded("--optimizer-file", python_file, None, file)

    parser.section("computation")
    add_dtype_argument(parser.place)
    defines("--seed", seed, 0, "seed of initial weights, data order and samples")
    defines("--deterministic", bool, False, "make equal runs bit-identical on GPUs too, but slower")
    may_change("--no-compile", bool, False, "run eagerly (default: compile; on a CPU only long runs)")

    parser.section("several processes")
    not_recorded(
        "--shard", str, "none", "fsdp: shard parameters, gradients and state", choices=["none", "fsdp"]
    )
    share = "processes that share the matrices of each block; must divide the numbers of heads and processes"
    not_recorded("--tensor-parallel", count, 1, share)
    sent = (
        "dtype in which the optimizer sends gradients, and with --shard fsdp the matrices to orthogonalize "
        "and their directions; auto is float32"
    )
    defines("--comm-dtype", str, "auto", sent, choices=["auto", "float32", "bfloat16"])

    parser.section("evaluation and checkpoints")
    may_change("--eval-every", int, 100, "steps between evaluations, -1: only at the end")
    may_change("--eval-tokens", count, 131072, "validation tokens, spread over the set; at the end all")
    may_change("--core-bundle", bundle_place, None, "CORE tasks: a folder, a zip, its URL (default: none)")
    may_change("--core-every", int, -1, "steps between evaluations of CORE, -1: only at the end")
    may_change("--core-items", count, None, "items per CORE task (default: 500; at the end all)")
    may_change("--save-every", int, 100, "steps between checkpoints, -1: only at the end")
    may_change("--keep-last", count, 2, "how many checkpoints to keep")
    return parser


def add_data_flags(parser: RunParser) -> None:
    defines, may_change = (functools.partial(parser.add, scope) for scope in (DEFINES, MAY_CHANGE))
    parser.section("data")
    # The place may change, because the texts are compared
    may_change("--corpus", corpus_name, "python", "python, path:FILE_OR_FOLDER or hf:ORG/NAME[:CONFIG]")
    defines("--vocab-size", vocabulary, None, "tokens (default: 4096, or 32768 for corpora on the hub)")
    field = "record field with the text (default: the last one given to data_prep for this corpus, or text)"
    defines("--text-field", str, None, field)
    may_change("--skip-unreadable", bool, False, "leave out what cannot be read (default: an error)")


def python_file(text: str) -> str:
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text} is not a file (FILE:key=value is only for optim_race)")
    return os.path.abspath(text)


def bundle_place(text: str) -> str | None:
    """A URL unchanged; a folder or zip as its absolute path, so that the run finds it from any folder; None
    for "none", with which a run gives up the bundle that it has recorded.
    """
    if text.startswith(("http://", "https://")):
        return text
    return None if text == "none" else absolute(text)


def corpus_name(text: str) -> str:
    """The name of a corpus, with an absolute path if it names local files."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # settings.json could not record it
        raise argparse.ArgumentTypeError(
            f"{text!r} is not UTF-8: rename it, or set LC_ALL=C.UTF-8"
        ) from error
    place = text.removeprefix("path:")
    return f"path:{absolute(place)}" if text.startswith("path:") and place else text


def absolute(place: str) -> str:
    return os.path.abspath(os.path.expanduser(place))


def checkpoint_name(text: str) -> str:
    if not re.fullmatch("auto|never|step_[0-9]+", text):
        raise argparse.ArgumentTypeError(f"must be auto, never or a checkpoint (step_N), not {text!r}")
    return text


def flag_of(name: str) -> str:
    """An argument's flag on the command line."""
    return f"--{name.replace('_', '-')}"


# ------------------------------------------------------------------------------------------------------------
# What is recorded


def parse_with_record(
    parser: RunParser, words: list[str] | None
) -> tuple[argparse.Namespace, Settings | None]:
    """(arguments, the run's recorded settings if it exists). A flag that is not given gets its recorded
    value, else its default: the recorded options are parsed as words in front of those of the command line.

    InputError lists given values that differ from the recorded ones, for flags that define the run.
    """
    words = sys.argv[1:] if words is None else words
    args = parser.parse_args(words)
    check_name("--run", args.run)
    file = folder_of(args.run) / "settings.json"
    # Checkpoints without settings.json are of no use: read_json() will say so
    exists = file.exists() or any(file.parent.glob("checkpoints/step_*"))
    if args.resume == "never" or not exists:
        return args, None

    settings = read_json(file, Settings, "restore it, or start over: --resume never")
    options = parser.without(settings.options, NOT_RECORDED)
    if any(getattr(args, name) is not None for name, scope in parser.scopes.items() if scope == LENGTH):
        options = parser.without(options, LENGTH)
    earlier_words = as_words(file, options, vars(args))
    try:
        before = parser.parse_args(earlier_words)
    except InputError as error:
        raise InputError(f"{file}: options: {error}") from error
    args = parser.parse_args([*earlier_words, *words])
    own, sha256 = (settings.trained_on.get(key) for key in ("optimizer_file", "optimizer_file_sha256"))
    # A recorded path is never opened
    its_hash = f"--optimizer-file {own} of SHA-256" if own else "--optimizer-file"
    refuse_changes(
        f"run {args.run} exists with",
        defining(parser, before) | {its_hash: sha256 or "none"},
        defining(parser, args) | {its_hash: sha256_of(args.optimizer_file) or "none"},
    )
    return args, settings


def recorded(args: argparse.Namespace) -> dict:
    """The options of settings.json."""
    return make_parser().without(vars(args), NOT_RECORDED)


def defining(parser: RunParser, args: argparse.Namespace) -> dict:
    """{"--flag": value} of the flags that define a run."""
    values = parser.without(vars(args), NOT_RECORDED, MAY_CHANGE, LENGTH)
    return {flag_of(name): value for name, value in values.items()}


def as_words(file: Path, options: dict, known: Container[str]) -> list[str]:
    """The options of a settings.json as words of a command line.

    known: the names of all flags. A name in a stranger's file could be another flag, such as
    "resume=never".
    """
    words = []
    for name, value in options.items():
        if REMOVED_FLAGS.get(name) == value:
            continue
        if name not in known:
            raise InputError(
                f"{file}: options: {name} is not a flag of this version: use the version that started the "
                f"run, remove this option if {value} changes nothing, or start over: --resume never"
            )
        if value is True:
            words.append(flag_of(name))
        elif value is not None and value is not False:
            words.append(f"{flag_of(name)}={value}")
    return words


def refuse_changes(what: str, before: dict, now: dict, advice: str = AGAIN) -> None:
    """InputError "<what> <the values that have changed>: <advice>", if any have."""
    changes = [f"{key} {before.get(key)}, not {now[key]}" for key in now if before.get(key) != now[key]]
    if changes:
        raise InputError(f"{what} {'; '.join(changes)}: {advice}")


def require_same_on_ranks(values: dict) -> None:
    """InputError on every rank, with the differences, if a rank's values differ from the first one's."""
    first, *others = together(lambda: values)
    advice = "give all ranks the flags and files of rank 0"
    for rank, other in enumerate(others, 1):
        refuse_changes(f"rank {rank} was started with", other, first, advice)


def require_same_flags(args: argparse.Namespace) -> None:
    """InputError on every rank if one was started with other flags than the first one."""
    # A file may be elsewhere on another node: its name counts, and the text of an optimizer file. A Run
    # compares the texts of the corpus, once it has opened it
    flags = {flag_of(name): os.path.basename(str(value)) for name, value in vars(args).items()}
    require_same_on_ranks(flags | {"--optimizer-file": sha256_of(args.optimizer_file)})


def sha256_of(optimizer_file: str | None) -> str | None:
    return optimizer_file and hashlib.sha256(Path(optimizer_file).read_bytes()).hexdigest()
