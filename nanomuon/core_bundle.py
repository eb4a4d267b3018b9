"""The tasks of CORE as files: a folder, a zip of one, or the address of such a zip.

    core.yaml                 icl_tasks: for each its label, dataset_uri, num_fewshot, icl_task_type and
                              continuation_delimiter (a space if not given)
    eval_meta_data.csv        "Eval Task" and "Random baseline", in percent
    eval_data/<dataset_uri>   an item a line, as JSON:
                              multiple_choice    {"query", "choices", "gold"}
                              schema             {"context_options", "continuation", "gold"}
                              language_modeling  {"context", "continuation"}

It is the layout of the public bundle, which comes from DCLM (arXiv 2406.11794). A zip is somebody else's
work: it is unpacked name by name, only what the layout has, and kept once all of it has been read.
"""

import csv
import hashlib
import http.client
import io
import json
import os
import shutil
import stat
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nanomuon.files import locked
from nanomuon.runtime import InputError, base_dir

# The bundle that published figures come from, as nanochat names it
PUBLIC_BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
KINDS = ("multiple_choice", "schema", "language_modeling")
SUFFIXES = (".yaml", ".csv", ".jsonl")  # of the files that are unpacked
ADDRESS = ("http://", "https://")  # how one begins
LARGEST_DOWNLOAD = 2 << 30  # bytes; the public bundle has about 162 MB
LARGEST_BUNDLE = 8 << 30  # bytes, unpacked
MOST_FILES = 10_000
PATIENCE = 10  # seconds that a server may be silent


class Unreachable(InputError):
    """A bundle that an address does not give: a training run goes on without it."""


@dataclass(frozen=True)
class Item:
    """A question: contexts with their continuations, of which number `gold` is right. A multiple choice has
    one context, a schema one continuation, and language modelling one of both.
    """

    pairs: list[tuple[str, str]]
    gold: int


@dataclass(frozen=True)
class Task:
    label: str
    kind: str  # one of KINDS
    file: Path
    shots: int  # examples shown before an item
    delimiter: str  # between a context and its continuation
    baseline: float  # accuracy of guessing, 0 to 1

    def read_items(self) -> list[Item]:
        """In the order of the file. InputError that names the line which is not one."""
        items = []
        with _opened(self.file) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    items.append(_item(line, self.kind, f"{self.file} line {number}"))
        if not items:
            raise InputError(f"{self.file} holds no item")
        return items


def from_anywhere(place: str) -> str:
    """The place as every folder names it, for a run that remembers it: of a folder or zip the whole path."""
    if place.startswith(ADDRESS):
        return place
    return os.path.abspath(os.path.expanduser(place))


def open_bundle(place: str) -> list[Task]:
    """The tasks of a bundle, in its order, once every line has been read.

    place: a folder, a zip, or the http(s) address of a zip, which is fetched once and kept under the base
    folder. InputError for what is not a bundle, Unreachable where an address gives none.
    """
    if place.startswith(ADDRESS):
        folder = _fetched(place)
    else:
        folder = Path(place).expanduser()
        if folder.is_file():
            folder = _unzipped(folder)
        elif not folder.is_dir():
            raise InputError(f"--core-bundle {place}: no such folder, zip or http(s) address")
    return _read_whole(folder)


def read_tasks(folder: Path) -> list[Task]:
    """The tasks that core.yaml lists; their items are not read yet."""
    import yaml

    listing = folder / "core.yaml"
    with _opened(listing) as file:
        try:
            content = yaml.safe_load(file)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise InputError(f"{listing} is not YAML ({error}): fetch the bundle again") from error
    entries = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{listing} has no list icl_tasks: it is not a bundle for CORE")
    baselines = _read_baselines(folder / "eval_meta_data.csv")
    tasks = []
    for number, entry in enumerate(entries, 1):
        task = _task(entry, baselines, folder, f"{listing}, task {number}")
        if any(other.label == task.label for other in tasks):
            raise InputError(f"{listing} lists {task.label} twice: a result has one name")
        tasks.append(task)
    return tasks


def _read_whole(folder: Path) -> list[Task]:
    tasks = read_tasks(folder)
    for task in tasks:
        task.read_items()
    return tasks


def _fetched(address: str) -> Path:
    """The folder that the zip at this address was unpacked into."""
    folder = base_dir() / "core" / hashlib.sha256(address.encode()).hexdigest()[:16]
    archive = folder.with_name(f".{folder.name}.zip")
    with locked(folder):
        if not folder.exists():
            print(f"fetching {address}", flush=True)
            try:
                _download(address, archive)
                _unpack(archive, folder)
            except InputError as error:
                raise Unreachable(f"no bundle for CORE from {address}: {error}") from error
            finally:
                archive.unlink(missing_ok=True)
    return folder


def _unzipped(archive: Path) -> Path:
    """The folder that this zip was unpacked into."""
    digest = hashlib.sha256()
    with archive.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    folder = base_dir() / "core" / digest.hexdigest()[:16]
    with locked(folder):
        if not folder.exists():
            _unpack(archive, folder)
    return folder


def _download(address: str, file: Path) -> None:
    """InputError where the server does not give the whole of it."""
    received = 0
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer, file.open("wb") as out:
            announced = answer.length  # bytes, None where the server does not say
            while piece := answer.read(1 << 20):
                received += len(piece)
                if received > LARGEST_DOWNLOAD:
                    raise InputError(f"it is larger than {LARGEST_DOWNLOAD >> 30} GB")
                out.write(piece)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise InputError(str(error) or type(error).__name__) from error
    except ValueError as error:  # an address that is none: "http://[", a port that is no number
        raise InputError(str(error)) from error
    if announced is not None and received != announced:
        raise InputError(f"it ended after {received} of {announced} bytes")


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack, read all of it, and only then make it appear as `folder`."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as zipped:
            members = _members(zipped)
            for name, member in members.items():
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with zipped.open(member) as content, target.open("wb") as out:
                    shutil.copyfileobj(content, out)  # at most as much as the member's size says
        tops = [PurePosixPath(name).parent for name in members if PurePosixPath(name).name == "core.yaml"]
        if not tops:
            raise InputError("the zip holds no core.yaml")
        top = temporary / min(tops, key=lambda path: len(path.parts))
        _read_whole(top)
        os.replace(top, folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise InputError(f"{archive.name.lstrip('.')} is not a readable zip ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _members(zipped: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """What is to be unpacked, by name; InputError for names that lead elsewhere and for sizes beyond
    reason.
    """
    members = {}
    for member in zipped.infolist():
        name = PurePosixPath(member.filename)
        if member.is_dir() or name.suffix not in SUFFIXES or name.name.startswith("."):
            continue
        if not _stays_inside(member.filename) or stat.S_ISLNK(member.external_attr >> 16):
            raise InputError(f"the zip holds {member.filename!a}, which leads out of its folder")
        if member.flag_bits & 1:
            raise InputError(f"the zip holds {member.filename!a}, which is encrypted")
        members[member.filename] = member
    size = sum(member.file_size for member in members.values())
    if size > LARGEST_BUNDLE or len(members) > MOST_FILES:
        raise InputError(f"the zip holds {len(members)} files of {size >> 20} MB together, too much for CORE")
    return members


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return name.isprintable() and "\\" not in name and not path.is_absolute() and ".." not in path.parts


def _read_baselines(file: Path) -> dict[str, float]:
    """Accuracy of guessing, 0 to 1, by task."""
    baselines = {}
    with _opened(file) as content:
        try:
            for row in csv.DictReader(io.TextIOWrapper(content, encoding="utf-8-sig", newline="")):
                baselines[row["Eval Task"]] = float(row["Random baseline"]) / 100
        except (KeyError, ValueError, TypeError, csv.Error) as error:
            raise InputError(
                f"{file} does not give an 'Eval Task' and a 'Random baseline' in percent in every row "
                f"({error!r}): fetch the bundle again"
            ) from error
    return baselines


def _task(entry, baselines: dict[str, float], folder: Path, where: str) -> Task:
    """A task as core.yaml has it; InputError for one that cannot be meant."""
    if not isinstance(entry, dict):
        raise InputError(f"{where} is not a task: it needs a label, a dataset_uri and more")
    label, kind, source = entry.get("label"), entry.get("icl_task_type"), entry.get("dataset_uri")
    if not isinstance(label, str) or not label.isprintable() or not label:
        raise InputError(f"{where}: label must be a name, not {label!a}")
    if kind not in KINDS:
        raise InputError(f"{where}, {label}: icl_task_type is one of {', '.join(KINDS)}, not {kind!a}")
    if not isinstance(source, str) or not _stays_inside(source):
        raise InputError(f"{where}, {label}: dataset_uri must be a file under eval_data, not {source!a}")
    shots = entry.get("num_fewshot")
    if isinstance(shots, list) and shots:
        shots = shots[0]  # a list in DCLM, where a task may run several times
    if not isinstance(shots, int) or shots < 0:
        raise InputError(f"{where}, {label}: num_fewshot must be a number of examples, not {shots!a}")
    delimiter = entry.get("continuation_delimiter", " ")
    if not isinstance(delimiter, str):
        raise InputError(f"{where}, {label}: continuation_delimiter must be text, not {delimiter!a}")
    baseline = baselines.get(label)
    if baseline is None or not 0 <= baseline < 1:
        raise InputError(f"{where}, {label}: eval_meta_data.csv gives no random baseline from 0 to below 100")
    return Task(label, kind, folder / "eval_data" / source, shots, delimiter, baseline)


def _item(line: bytes, kind: str, where: str) -> Item:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({error}): repair it") from error
    if not isinstance(record, dict):
        raise InputError(f"{where} is not an item: it must be a JSON object")
    if kind == "multiple_choice":
        context = _text(record.get("query"), "query", where)
        pairs = [(context, choice) for choice in _texts(record, "choices", where)]
    else:
        continuation = _text(record.get("continuation"), "continuation", where)
        if not continuation.strip():
            raise InputError(f"{where}: continuation is empty, nothing can be predicted")
        if kind == "schema":
            pairs = [(context, continuation) for context in _texts(record, "context_options", where)]
        else:
            context = _text(record.get("context"), "context", where).strip()  # part of the published rule
            return Item([(context, continuation)], gold=0)
    gold = record.get("gold")
    if not isinstance(gold, int) or not 0 <= gold < len(pairs):
        raise InputError(f"{where}: gold must be the number of one of {len(pairs)} choices, not {gold!a}")
    return Item(pairs, gold)


def _texts(record: dict, key: str, where: str) -> list[str]:
    values = record.get(key)
    if not isinstance(values, list) or not values:
        raise InputError(f"{where}: {key} must be a list of texts that is not empty")
    return [_text(value, key, where) for value in values]


def _text(value, key: str, where: str) -> str:
    if isinstance(value, int | float):  # a choice that is a number
        value = str(value)
    if not isinstance(value, str):
        raise InputError(f"{where}: {key} is missing or not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: {key} has a lone surrogate, which is no text") from error
    return value


def _opened(file: Path):
    """The file in binary; InputError where there is none."""
    try:
        return file.open("rb")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(f"{file} is missing from the bundle") from error
