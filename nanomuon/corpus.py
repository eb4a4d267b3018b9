"""Where documents come from: the Python standard library, local files, any dataset on the hub.

A corpus is an ordered list of files, and a file's suffix decides how it is read, so everybody who names the
same corpus reads the same documents in the same order. A text file is one document; so is each record of
.jsonl or .parquet, unless its text is null. Empty documents and copies of earlier ones are skipped (hub
corpora are assumed to be deduplicated). Files and records that cannot be read raise an error that names the
first of each file, unless the caller skips them; the standard library's files in other encodings are always
skipped.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import reprlib
import sysconfig
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nanomuon.runtime import InputError, base_dir, one_line, print0, read_json, write_json
from nanomuon.tokenizer import in_pieces

HUB_NAME = re.compile(r"hf:([^:@]+)(?::([^:@]+))?(?:@(.+))?")  # dataset, configuration, revision
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
TEXT_SUFFIXES = tuple(
    ".txt .text .md .markdown .rst .tex .org .adoc "
    ".py .pyi .pyx .c .h .cc .hh .cpp .hpp .cxx .hxx .cu .cuh .m .mm .rs .go .zig .nim .java .kt .scala "
    ".groovy .cs .fs .swift .dart .js .mjs .cjs .jsx .ts .tsx .vue .html .css .scss .sh .bash .zsh .pl .pm "
    ".rb .php .lua .r .jl .f .f90 .f95 .for .pas .hs .ml .mli .erl .ex .exs .clj .el .lisp .scm .rkt .sql "
    ".proto .cmake .s .asm".split()
)
READABLE = (*RECORD_SUFFIXES, *TEXT_SUFFIXES, ".json", ".json.gz", ".json.zst")  # on the hub
PACKAGES = {"site-packages", "dist-packages", "__pycache__"}  # folders to skip: installed or compiled code
PIECE = 4096  # characters, see with_both_parts()
ENOUGH = 8  # documents of a kind, see with_both_parts()
HASHED = 100 << 20  # bytes; in a larger corpus only both ends of each file are hashed, see revision_of()
EDGE = 1 << 16  # bytes
OFFLINE = ". Check the name and the network; the corpus python needs no network"
OLD_REVISION = 16  # characters of an older version's revision, made of times and paths: not comparable


@dataclass(frozen=True)
class Corpus:
    """A named, ordered set of documents. `revision` identifies its content."""

    name: str
    revision: str
    files: tuple  # Paths; for a corpus on the hub, names in the repository `repo`
    text_field: str = "text"
    repo: str | None = None
    skip_unreadable: bool = False
    max_characters: float = math.inf  # longer documents are cut, see with_both_parts()
    unreadable: dict = field(default_factory=dict, compare=False)  # {place: error}, filled while reading
    others: int = field(default=0, compare=False)  # files with other suffixes, which are skipped

    @property
    def slug(self) -> str:
        """The name of this corpus's folders: it changes with the content, the text field and the last part of
        the corpus's path, but not if its parent folder changes.
        """
        name = self.name if self.repo else Path(self.name).name
        return _file_name(name, self.revision, self.text_field)

    def documents(self):
        """Yield (text, whether it is for validation) for every document, in a fixed order.

        One document in 20 is for validation. Its own hash decides, so it never changes sides. InputError as
        in `texts`.
        """
        seen = set()
        for whole in self.texts():
            for text in in_pieces(whole, self.max_characters):
                digest = hashlib.sha256(text.encode()).digest()
                if digest in seen:
                    continue
                if not self.repo:
                    seen.add(digest)
                yield text, int.from_bytes(digest[:8], "big") % 20 == 0

    def texts(self):
        """Yield every text that is not empty.

        Without skip_unreadable, nothing is yielded after the first unreadable file or record: the rest is
        read only so that the InputError at the end counts all of them (on the hub, all in that file).
        """
        for file in self.files:
            if self.repo and self._is_refused():
                break
            path = self._download(file) if self.repo else file
            for place, text in read_texts(path, self.text_field):
                if self.name == "python" and isinstance(text, UnicodeDecodeError):
                    continue  # some files of the library are tests of other encodings
                if isinstance(text, Exception):
                    self.unreadable[place] = text
                elif text and not self._is_refused():
                    yield text
        if self._is_refused():
            repair = "repair them (text must be UTF-8)"
            if self.repo:
                repair = "delete a damaged file to fetch it again"
            raise InputError(
                f"corpus {self.name}: {self.describe_unreadable()}; {repair}, name the field that holds the "
                "text of a record (--text-field; of data_prep for commands without it), or leave them out "
                "(--skip-unreadable)"
            )

    def _is_refused(self):
        return self.unreadable and not self.skip_unreadable

    def describe_unreadable(self) -> str:
        """How many files and records could not be read so far, with the first of each file, at most five; ""
        if there are none.
        """
        first = {}
        for place, error in self.unreadable.items():
            first.setdefault(re.sub(" line [0-9]+$|^after ", "", place), f"{place}: {error}")
        shown = list(first.values())[:5]
        count = len(self.unreadable)
        which = "" if count == len(shown) else ", such as"
        return f"{count:,} files or records cannot be read{which}: {'; '.join(shown)}" if count else ""

    def differs(self, name: str, revision: str) -> bool:
        """Whether the texts differ from those that a run recorded under this name and revision."""
        if len(revision) == OLD_REVISION:
            print0(
                f"warning: of corpus {name} the run recorded only names and times: texts cannot be compared"
            )
            return False
        other_dataset = self.repo is not None and name != self.name
        return other_dataset or revision != self.revision

    def _download(self, file) -> Path:
        from huggingface_hub import hf_hub_download

        with one_line(f"fetching {file} of {self.repo} failed", OFFLINE):
            # This retries, resumes a partial file, and checks its size and, if the hub has one, its hash
            return Path(hf_hub_download(self.repo, file, repo_type="dataset", revision=self.revision))


def with_both_parts(corpus: Corpus) -> Corpus:
    """The corpus if it has ENOUGH documents for training and for validation, else the same corpus in pieces.

    A few books may all be for training, or only the smallest one for validation. Then their pieces of PIECE
    characters, cut at line ends, become the documents. Reads until it has seen ENOUGH of both, about 160
    documents. InputError if the pieces, too, are all for training or all for validation.
    """
    for candidate in (corpus, replace(corpus, max_characters=PIECE)):
        found = Counter()
        for _, is_validation in candidate.documents():
            found[is_validation] += 1
            if min(found[True], found[False]) >= ENOUGH:
                return candidate
    if found[True] and found[False]:  # few pieces, but of both kinds
        return candidate
    raise InputError(
        f"corpus {corpus.name} is too small: its {found.total()} different pieces of up to {PIECE:,} "
        "characters would all be for training, or all for validation (one in 20, by its hash); add text, "
        "200 kB or more"
    )


def check_corpus(name: str) -> None:
    """InputError if no corpus can have this name. Quick: it reads no file and does not query the hub."""
    if name.startswith("path:") and _place(name):
        if not os.path.exists(_place(name)):
            raise InputError(
                f"corpus {name}: no such file or folder: {os.path.abspath(_place(name))}; if the texts of "
                "a run have moved, give their new place with --corpus (CORPUS=... for speedrun.sh)"
            )
    elif name != "python" and not HUB_NAME.fullmatch(name):
        raise InputError(f"unknown corpus {name!r}: use python, path:FILE_OR_FOLDER, or hf:ORG/NAME[:CONFIG]")


def _place(name):
    return os.path.expanduser(name.removeprefix("path:"))


@dataclass(frozen=True)
class Remembered:
    """NAME.json: how a corpus's records are read; for a hub corpus also its revision and files."""

    text_field: str = "text"
    revision: str = ""
    files: list[str] = field(default_factory=list)


def open_corpus(name: str, text_field: str | None = None, skip_unreadable: bool = False) -> Corpus:
    """The corpus called `name`; InputError if there is none.

    python          the standard library of the running interpreter: about 30 MB, no download
    path:PLACE      a text file (prose, markup, source code), .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or a
                    folder of them (sorted)
    hf:ORG/NAME     the train split of a dataset on the hub; also hf:ORG/NAME:CONFIG@REVISION. The revision is
                    pinned when the corpus is first opened; later only missing files are fetched

    text_field: the record field that holds the text; by default the one that `remember` stored for this
    corpus, else "text". skip_unreadable: leave out files and records that cannot be read.
    """
    check_corpus(name)
    root, suffixes = Path(sysconfig.get_path("stdlib")), ".py"
    if name.startswith("path:"):
        root, suffixes = Path(_place(name)).resolve(), TEXT_SUFFIXES + RECORD_SUFFIXES
        name = f"path:{root}"
    memory = _memory(name)
    known = read_json(memory, Remembered, "delete it") if memory.exists() else Remembered()
    text_field = text_field or known.text_field
    if name.startswith("hf:"):
        if not known.files:
            known = _resolve(name, known.text_field)
            _write(memory, known)
        repo = HUB_NAME.fullmatch(name)[1]
        return Corpus(name, known.revision, tuple(known.files), text_field, repo, skip_unreadable)

    files, others, unreadable = _local_files(root, suffixes)
    if not files and not unreadable:
        raise InputError(
            f"corpus {name} has no file with text (.txt, .md, .py and so on, .jsonl, .jsonl.gz, .jsonl.zst, "
            ".parquet): rename .ndjson to .jsonl, other text to .txt, unpack .txt.gz, convert .csv to .jsonl"
        )
    revision = revision_of(root, files)
    return Corpus(
        name,
        revision,
        tuple(files),
        text_field,
        skip_unreadable=skip_unreadable,
        unreadable=unreadable,
        others=others,
    )


def remember(corpus: Corpus) -> None:
    """Make the corpus's text field the default of later commands that name it."""
    files = list(corpus.files) if corpus.repo else []
    _write(_memory(corpus.name), Remembered(corpus.text_field, corpus.revision, files))


def _memory(name) -> Path:
    return base_dir() / "corpus" / f"{_file_name(name)}.json"


def _write(memory: Path, content: Remembered) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    write_json(memory, asdict(content))


def _local_files(root, suffixes) -> tuple[list[Path], int, dict]:
    """The files to read under `root`, sorted; no hidden or installed ones, no pipes, and none that we write.
    Follows links, and visits each folder once. Also how many files have other suffixes, and {place: error} of
    those that cannot be reached.
    """
    seen, walk, errors = set(), [(root.parent, [], [root.name])], []
    if root.is_dir():
        seen.add(os.path.realpath(base_dir()))  # our own folder, which changes with every run
        walk = os.walk(root, followlinks=True, onerror=errors.append)
    files, others = [], 0
    for folder, subfolders, names in walk:
        place = os.path.realpath(folder)
        if place in seen:
            subfolders.clear()  # os.walk descends into what is left in this list
            continue
        seen.add(place)
        subfolders[:] = sorted(
            name for name in subfolders if not name.startswith(".") and name not in PACKAGES
        )
        for name in names:
            file = Path(folder, name)
            try:
                if name.startswith(".") or file.is_fifo():
                    continue
            except OSError as error:  # its folder may be listed but not opened
                errors.append(error)
                continue
            if name.lower().endswith(suffixes):
                files.append(file)
            else:
                others += 1
    return sorted(files), others, {error.filename: error for error in errors}


def revision_of(root: Path, files: list[Path]) -> str:
    """A digest of the files' names under `root`, sizes and bytes, but not of their times or places.

    Above HASHED bytes in total, only the first and last EDGE bytes of each file count, so a change between
    them that keeps the size is not noticed.
    """
    sizes = {}
    for path in files:
        with contextlib.suppress(OSError):  # read_texts() will report that it cannot be read
            sizes[path] = path.stat().st_size
    all_bytes = sum(sizes.values()) <= HASHED
    digest = hashlib.sha256()
    for path, size in sizes.items():
        digest.update(json.dumps([path.relative_to(root).as_posix(), size]).encode())
        with contextlib.suppress(OSError), path.open("rb") as file:
            digest.update(file.read() if all_bytes else file.read(EDGE))
            file.seek(max(file.tell(), size - EDGE))
            digest.update(file.read())
    return digest.hexdigest()[:32]


def _resolve(name, text_field) -> Remembered:
    """Query the hub for the revision and the files of a dataset."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    repo, config, revision = HUB_NAME.fullmatch(name).groups()
    with one_line(f"opening the train split of {name} failed", OFFLINE):
        # This fails at once without a network; the builder would keep trying for half a minute
        revision = HfApi().dataset_info(repo, revision=revision, timeout=10).sha
        builder = load_dataset_builder(repo, config, revision=revision)
        files = [file.split(f"@{revision}/", 1)[-1] for file in builder.config.data_files["train"]]
    if others := [file for file in files if not file.lower().endswith(READABLE)]:
        raise InputError(f"{name} has files other than parquet, JSON lines and text, such as {others[0]}")
    return Remembered(text_field, revision, files)


def _file_name(*identity: str) -> str:
    """A file name for these strings, in which the first one stays readable."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", identity[0])[-60:]
    return f"{readable}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]}"


def read_texts(path: Path, field: str):
    """Yield (place, text) for every document in a file. The text is None if it is null, an exception if it
    cannot be read.
    """
    place = str(path)
    try:
        if path.name.lower().endswith(TEXT_SUFFIXES):
            yield place, path.read_bytes().decode("utf-8-sig")  # without a byte order mark
            return
        for number, record in enumerate(_records(path, field), 1):
            place = f"{path} line {number}"
            try:
                yield place, _text_of(record, field)
            except (ValueError, RecursionError) as error:
                yield place, error
    # The last two from parquet
    except (OSError, ValueError, NotImplementedError, OverflowError) as error:
        yield place if place == str(path) else f"after {place}", error


def _records(path, field):
    """Yield the records of a file: dicts from parquet, lines of JSON."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            columns = [field] if field in file.schema_arrow.names else None  # all, for the error message
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                yield from batch.to_pylist()
    else:
        import pyarrow as pa

        compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
        stream = pa.input_stream(str(path), compression=compression)  # raises an error for a truncated one
        with io.BufferedReader(stream, 1 << 20) as lines:
            yield from lines


def _text_of(record, field):
    """The text of a record; None if it is null or the line is blank. ValueError if the field is not text."""
    if isinstance(record, bytes):
        record = json.loads(record) if record.strip() else {field: None}
    text = record.get(field, 0) if isinstance(record, dict) else 0
    if isinstance(text, str):
        return text.encode(errors="replace").decode()  # lone surrogates of JSON become question marks
    if text is not None:
        raise ValueError(f"no text in field {field!r} of {reprlib.repr(record)}")
