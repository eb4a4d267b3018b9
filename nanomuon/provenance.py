"""What a run trains on and with: recorded in its settings.json, and compared when a launch goes on with it.

`trained_on` is what the run is a function of: its documents, and the text of an --optimizer-file. A launch
that would change it is refused. `trained_with` is the code, the packages and the threads that computed it:
another one may round differently, which is said.
"""

import argparse
import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from nanomuon.corpus import Corpus
from nanomuon.runtime import InputError, Runtime

# What computes a run, where it is installed
PACKAGES = ("torch", "triton", "numpy", "tiktoken", "rustbpe", "safetensors", "torchao", "flash-attn-4")
OPTIMIZER_COPY = "optimizer_file.py"  # in the run's folder: the text of its --optimizer-file, never run


def record(corpus: Corpus, args: argparse.Namespace, source: bytes | None, runtime: Runtime) -> dict:
    """{"trained_on", "trained_with"} of a launch, of JSON types.

    source: the text of the --optimizer-file, None without one. runtime: with the dtype that was chosen.
    """
    sha256 = None
    if source is not None:
        sha256 = hashlib.sha256(source).hexdigest()
    trained_on = {
        "corpus": args.corpus,
        "revision": corpus.revision,
        "corpus_folder": corpus.slug,  # another one where the documents are read or cut otherwise
        "optimizer_file": args.optimizer_file,
        "optimizer_file_sha256": sha256,
    }
    trained_with = {
        **commit(Path(__file__).parents[1]),
        "python": platform.python_version(),
        **versions(),
        "dtype": runtime.dtype_name,
        "threads": torch.get_num_threads(),
    }
    return {"trained_on": trained_on, "trained_with": trained_with}


def commit(checkout: Path) -> dict:
    """{"commit", "clean_tree"} of a git checkout: whether tracked files are as committed. None where there is
    no git, or nanomuon was installed as a package.
    """
    unknown = {"commit": None, "clean_tree": None}
    if not (checkout / ".git").exists():  # git would look in the folders above, which may be another project
        return unknown
    command = ["git", "--no-optional-locks", "-C", str(checkout)]
    command += ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return unknown
    return {"commit": answer.removesuffix("-dirty"), "clean_tree": not answer.endswith("-dirty")}


def versions() -> dict[str, str]:
    """{package: version} of those of PACKAGES that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def changes_of_data(settings: dict, now: dict) -> list[str]:
    """In words, what a launch would train on that its run has not trained on so far.

    settings: of the run, as settings.json has them. now: what `record` gives for the launch. Of a run that an
    earlier version started there is no record but the name of its optimizer file, which is compared then.
    Where this launch has no such file, it is for check_optimizer_file to say so.
    """
    new = now["trained_on"]
    file = new["optimizer_file"]
    before = settings.get("trained_on")
    if not isinstance(before, dict):
        named = settings.get("optimizer_file")
        if file is not None and file != named:
            return [f"optimizer file {file!r}, which was {named!r}"]
        return []
    changes = []
    if before.get("corpus_folder") != new["corpus_folder"]:
        changes.append(
            f"corpus {new['corpus']!r} of revision {new['revision']!r}, "
            f"which was {before.get('corpus')!r} of revision {before.get('revision')!r}"
        )
    sha256, sha256_before = new["optimizer_file_sha256"], before.get("optimizer_file_sha256")
    if file is not None and sha256 != sha256_before:
        was = "none"
        if sha256_before is not None:
            was = f"{before.get('optimizer_file')!r} of SHA-256 {_short(sha256_before)}"
        changes.append(f"optimizer file {file!r} of SHA-256 {_short(sha256)}, which was {was}")
    return changes


def changes_of_tools(settings: dict, now: dict) -> list[str]:
    """In words, with what a launch computes that its run has not been computed with so far."""
    before = settings.get("trained_with")
    if not isinstance(before, dict):
        return []
    new = now["trained_with"]
    changes = []
    for key in [*new, *(before.keys() - new.keys())]:
        if before.get(key) != new.get(key):
            changes.append(f"{key} {_short(new.get(key))}, which was {_short(before.get(key))}")
    return changes


def check_optimizer_file(settings: dict, args: argparse.Namespace, run_dir: Path) -> None:
    """InputError where a run trains with an optimizer file that this launch was not given.

    Whatever the folder of a run says, a file runs only where somebody names it now: the folder may be a
    stranger's.
    """
    recorded = settings.get("trained_on")
    if not isinstance(recorded, dict):
        recorded = {}
    named = settings.get("optimizer_file") or recorded.get("optimizer_file")
    if (named or recorded.get("optimizer_file_sha256")) and not args.optimizer_file:
        copy = run_dir / OPTIMIZER_COPY
        kept = f"; its text is {copy}, to read before it runs" if copy.is_file() else ""
        raise InputError(
            f"run {run_dir.name} trains with the optimizer file {named!r}, and code runs only where it is "
            f"named: give --optimizer-file again{kept}"
        )


def described(source: bytes) -> str:
    """The text of an optimizer file in a few words."""
    return f"{len(source.splitlines())} lines, SHA-256 {_short(hashlib.sha256(source).hexdigest())}"


def table(provenance: dict) -> list[tuple[str, object]]:
    """Rows for the report: what is known."""
    rows = []
    known = {**provenance["trained_on"], **provenance["trained_with"]}
    for key, value in known.items():
        if value is not None and key != "corpus_folder":
            rows.append((key, value))
    return rows


def _short(value) -> str:
    """A value as a message shows it: of a hash its beginning; what is no plain text in quotes and escaped."""
    text = str(value)
    if len(text) >= 40 and text.isalnum():
        return text[:12]
    return text if text.isprintable() else repr(text)
