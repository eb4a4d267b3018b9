"""Where documents come from: the Python standard library, local files, any dataset on the hub.

A corpus is an ordered list of files, and the suffix of a file says how it is read, so that everybody who
names the same corpus reads the same documents in the same order. A text file is one document; a record of
.jsonl or .parquet is one, unless its text is null. Empty documents and documents equal to an earlier one are
skipped (hub corpora come deduplicated). A file that cannot be read to its end is an error that names it.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import reprlib
import sysconfig
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nanomuon.runtime import InputError, base_dir, print0, read_json, write_json
from nanomuon.tokenizer import in_pieces

HUB_NAME = re.compile(r"hf:([^:@]+)(?::([^:@]+))?(?:@(.+))?")  # dataset, configuration, revision
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
PROSE = ".txt .text .md .markdown .rst .tex .org .adoc"
SOURCE_CODE = (
    ".py .pyi .pyx .c .h .cc .hh .cpp .hpp .cxx .hxx .cu .cuh .m .mm .rs .go .zig .nim .java .kt .scala "
    ".groovy .cs .fs .swift .dart .js .mjs .cjs .jsx .ts .tsx .vue .html .css .scss .sh .bash .zsh .pl .pm "
    ".rb .php .lua .r .jl .f .f90 .f95 .for .pas .hs .ml .mli .erl .ex .exs .clj .el .lisp .scm .rkt .sql "
    ".proto .cmake .s .asm"
)
TEXT_SUFFIXES = tuple(PROSE.split() + SOURCE_CODE.split())
PACKAGES = {"site-packages", "dist-packages", "__pycache__"}  # folders that are not read: installed, compiled
LEAVE_OUT = "repair it, or move it away"
PIECE = 4096  # characters, see with_both_parts()
NAME_FIELD = "python -m scripts.data_prep --text-field names another"


def is_validation(text: str) -> bool:
    """The split of every corpus: one document in 20, by its own hash, so that it never moves."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 20 == 0


@dataclass(frozen=True)
class Corpus:
    """A named, ordered set of documents. `revision` stands for its content."""

    name: str
    revision: str
    files: tuple  # of Path; of names inside the repository `repo` for a corpus on the hub
    text_field: str = "text"
    repo: str | None = None
    in_pieces: bool = False  # documents are cut, see with_both_parts()

    @property
    def slug(self) -> str:
        """What its folders are called: another one if the content or the way to read it changes."""
        return f"{_readable(self.name)}-{_digest([self.name, self.revision, self.text_field])[:8]}"

    def documents(self, first_file: int = 0):
        """Yield (number of its file, text) of every document, in their fixed order.

        InputError for a file that cannot be read. Lone surrogates become question marks.
        """
        seen = set()
        for number in range(first_file, len(self.files)):
            for record in self._records(number):
                record = record.encode(errors="replace").decode()
                for text in in_pieces(record, PIECE) if self.in_pieces else [record]:
                    if not self.repo:
                        digest = hashlib.sha256(text.encode()).digest()
                        if digest in seen:
                            continue
                        seen.add(digest)
                    yield number, text

    def _records(self, number):
        path = self._fetch(number) if self.repo else self.files[number]
        count = 0
        try:
            for text in read_texts(path, self.text_field):
                if text:
                    yield text
                count += 1
        except (OSError, ValueError) as error:
            if self.name == "python" and isinstance(error, UnicodeDecodeError):
                return  # some files of the library test that others can be read, too
            advice = "delete it, and it is fetched again" if self.repo else LEAVE_OUT
            where = f"{path}, document {count + 1}"
            raise InputError(f"bad file in corpus {self.name}: {where}: {error}; {advice}") from error

    def _fetch(self, number) -> Path:
        """A file of the hub, on this machine. The next one is fetched meanwhile."""
        path = self._download(number)
        if number + 1 < len(self.files):
            threading.Thread(target=self._download_ahead, args=(number + 1,), daemon=True).start()
        return path

    def _download_ahead(self, number):
        with contextlib.suppress(Exception):  # whoever asks for the file itself hears of it
            self._download(number)

    def _download(self, number):
        from huggingface_hub import hf_hub_download

        file, revision, cache = self.files[number], self.revision, _hub_cache()
        with _of_the_hub(f"fetching {file} of {self.repo}"):
            # Tries again by itself, resumes a partial file, checks size and, if the hub knows it, hash
            return Path(
                hf_hub_download(self.repo, file, repo_type="dataset", revision=revision, cache_dir=cache)
            )


def with_both_parts(corpus: Corpus) -> Corpus:
    """The corpus if it has documents for training and for validation, else the same in pieces.

    A few books would all be for training: their pieces of PIECE characters, cut at line ends, are documents
    then. Reads until it has seen both parts, some twenty documents. InputError if not even pieces make both.
    """
    if _has_both_parts(corpus):
        return corpus
    pieces = f"pieces of {PIECE:,} characters"
    corpus = replace(corpus, in_pieces=True)
    if not _has_both_parts(corpus):
        raise InputError(
            f"corpus {corpus.name} is too small: not even cut into {pieces} it has documents for training "
            "and for validation (one in 20, by its hash); add text"
        )
    print0(f"corpus {corpus.name} has few documents, all for one part: they are cut into {pieces}")
    return corpus


def _has_both_parts(corpus):
    found = set()
    for _, text in corpus.documents():
        found.add(is_validation(text))
        if len(found) == 2:
            return True
    return False


def check_corpus(name: str) -> None:
    """InputError if there cannot be a corpus of this name. Quick: nothing is read, and no hub is asked."""
    if name.startswith("path:"):
        if not os.path.exists(_place(name)):
            raise InputError(f"corpus {name}: no such file or folder")
    elif name != "python" and not HUB_NAME.fullmatch(name):
        raise InputError(f"unknown corpus {name!r}: use python, path:FILE_OR_FOLDER or hf:ORG/NAME[:CONFIG]")


def _place(name):
    return os.path.expanduser(name.removeprefix("path:"))


@dataclass(frozen=True)
class Remembered:
    """NAME.json: how the records of a corpus are read; of one on the hub also its revision and files."""

    text_field: str = "text"
    revision: str = ""
    files: list[str] = field(default_factory=list)


def open_corpus(name: str, text_field: str | None = None) -> Corpus:
    """The corpus called `name`; InputError if there is none.

    python          the standard library of the running interpreter: about 30 MB, no download
    path:PLACE      a text file (prose, markup, source code), .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or a
                    folder of them (sorted)
    hf:ORG/NAME     the train split of a dataset on the hub; hf:ORG/NAME:CONFIG@REVISION names more. The
                    revision is pinned when the corpus is first opened; later the hub is asked for missing
                    files only

    Records take their text from `text_field` (default "text"). It is remembered for later commands that name
    the same corpus.
    """
    check_corpus(name)
    if name.startswith("path:"):
        name = f"path:{Path(_place(name)).resolve()}"
    memory = base_dir() / "corpus" / f"{_readable(name)}-{_digest(name)[:8]}.json"
    known = read_json(memory, Remembered, "delete it") if memory.exists() else Remembered()
    now = replace(known, text_field=text_field or known.text_field)
    if name.startswith("hf:") and not now.files:
        now = _resolve(name, now.text_field)
    if now != known:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, asdict(now))
    if name.startswith("hf:"):
        return Corpus(name, now.revision, tuple(now.files), now.text_field, repo=HUB_NAME.fullmatch(name)[1])

    if name == "python":
        root, suffixes = Path(sysconfig.get_path("stdlib")), ".py"
    else:
        root, suffixes = Path(_place(name)), TEXT_SUFFIXES + RECORD_SUFFIXES
    files = _local_files(root, suffixes)
    if not files:
        raise InputError(
            f"corpus {name} has no file with text: .txt, .md, .py, .c and so on, .jsonl, .parquet"
        )
    # Names, sizes and times: hashing 100 GB at every start would not be worth the certainty
    listing = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; {LEAVE_OUT}") from error
        listing.append((path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return Corpus(name, _digest(listing)[:16], tuple(files), now.text_field)


def _local_files(root, suffixes) -> list[Path]:
    """The files of a place that are read, sorted: not hidden ones, nor what we write ourselves."""
    if root.is_file():
        return [root] if root.name.lower().endswith(suffixes) else []
    ours = base_dir().resolve()  # changes with every run
    files = []
    for folder, subfolders, names in os.walk(root):
        for name in list(subfolders):
            if name.startswith(".") or name in PACKAGES or Path(folder, name) == ours:
                subfolders.remove(name)  # os.walk goes into those that stay
        for name in names:
            if not name.startswith(".") and name.lower().endswith(suffixes):
                files.append(Path(folder, name))
    return sorted(files)


def _resolve(name, text_field) -> Remembered:
    """Ask the hub for the revision and the files of a dataset."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    repo, config, revision = HUB_NAME.fullmatch(name).groups()
    with _of_the_hub(f"opening {name}"):
        # Fails at once if there is no network; the builder alone would try for half a minute
        revision = HfApi().dataset_info(repo, revision=revision, timeout=10).sha
        builder = load_dataset_builder(repo, config, revision=revision, cache_dir=_hub_cache())
    files = builder.config.data_files or {}
    if "train" not in files:
        raise InputError(f"corpus {name} has no train split (it has: {', '.join(files) or 'no data files'})")
    files = [file.split(f"@{revision}/", 1)[-1] for file in files["train"]]
    return Remembered(text_field, revision, files)


def _hub_cache() -> str:
    return str(base_dir() / "corpus" / "hub")


@contextlib.contextmanager
def _of_the_hub(what: str):
    """Errors in here are one line. The clients of the hub raise their own kinds, httpx's and OSErrors."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{what} failed: {reason}. Check name and network; offline, CORPUS=python bash speedrun.sh works"
        ) from error


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _readable(name) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[-60:]


def read_texts(path: Path, field: str):
    """Yield the texts of a file, None for records whose text is null. OSError or ValueError if it is bad."""
    name = path.name.lower()
    if name.endswith(TEXT_SUFFIXES):
        yield path.read_bytes().decode("utf-8-sig")  # without a byte order mark
    elif name.endswith(".parquet"):
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            columns = [field] if field in file.schema_arrow.names else None  # all, for the message
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    yield _text_of(record, field)
    else:
        import pyarrow as pa

        # Decompresses by suffix, and tells of a stream that ends too early
        with io.BufferedReader(pa.input_stream(str(path), compression="detect"), 1 << 20) as file:
            for line in file:
                if line.strip():
                    yield _text_of(json.loads(line), field)


def _text_of(record, field):
    text = record.get(field, 0) if isinstance(record, dict) else 0
    if text is not None and not isinstance(text, str):
        raise ValueError(f"no text in field {field!r} of {reprlib.repr(record)}, {NAME_FIELD}")
    return text
