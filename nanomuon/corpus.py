"""Where documents come from: the Python standard library, local files, any dataset on the hub.

A corpus is an ordered list of files, and a file's suffix decides how it is read, so everybody who names the
same corpus reads the same documents in the same order. A text file is one document; so is each record of
.jsonl or .parquet, unless its text is null. Empty documents and copies of earlier ones are skipped (hub
corpora come deduplicated). A file that cannot be read to its end is an error that names it.
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

from nanomuon.runtime import InputError, base_dir, read_json, write_json
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
PACKAGES = {"site-packages", "dist-packages", "__pycache__"}  # folders to skip: installed, compiled
PIECE = 4096  # characters, see with_both_parts()
ENOUGH = 8  # documents of a kind, see with_both_parts()


@dataclass(frozen=True)
class Corpus:
    """A named, ordered set of documents. `revision` identifies its content."""

    name: str
    revision: str
    files: tuple  # of Path; for a corpus on the hub, of names in the repository `repo`
    text_field: str = "text"
    repo: str | None = None
    max_characters: float = math.inf  # longer documents are cut, see with_both_parts()

    @property
    def slug(self) -> str:
        """The name of its folders, which changes with the content and the way to read it."""
        return _file_name(self.name, self.revision, self.text_field)

    def documents(self):
        """Yield (text, whether it is for validation) of every document, in a fixed order.

        One document in 20 is for validation, chosen by its own hash, so it always stays there. InputError for
        a file that cannot be read.
        """
        seen = set()
        for file in self.files:
            for record in self._records(file):
                for text in in_pieces(record, self.max_characters):
                    digest = hashlib.sha256(text.encode()).digest()
                    if digest in seen:
                        continue
                    if not self.repo:
                        seen.add(digest)
                    yield text, int.from_bytes(digest[:8], "big") % 20 == 0

    def _records(self, file):
        path = self._download(file) if self.repo else file
        count = 0
        try:
            for text in read_texts(path, self.text_field):
                if text:
                    yield text
                count += 1
        except (OSError, ValueError) as error:
            if self.name == "python" and isinstance(error, UnicodeDecodeError):
                return  # some files of the library test other encodings
            advice = "delete it, and it is fetched again" if self.repo else "repair it, or move it away"
            raise InputError(
                f"bad file in corpus {self.name}: {path}, document {count + 1}: {error}; {advice}"
            ) from error

    def _download(self, file) -> Path:
        from huggingface_hub import hf_hub_download

        with _hub_errors(f"fetching {file} of {self.repo}"):
            # Retries, resumes a partial file, checks its size and, if the hub knows it, its hash
            return Path(hf_hub_download(self.repo, file, repo_type="dataset", revision=self.revision))


def with_both_parts(corpus: Corpus) -> Corpus:
    """The corpus if it has ENOUGH documents for training and for validation, else the same in pieces.

    A few books may all be for training, or the smallest one alone for validation: then their pieces of PIECE
    characters, cut at line ends, become the documents. Reads until it has seen ENOUGH of both, about 160
    documents. InputError if pieces do not give both.
    """
    for candidate in (corpus, replace(corpus, max_characters=PIECE)):
        found = Counter()
        for _, is_validation in candidate.documents():
            found[is_validation] += 1
            if min(found[True], found[False]) >= ENOUGH:
                return candidate
    if found[True] and found[False]:  # of the pieces: few, but of both kinds
        return candidate
    raise InputError(
        f"corpus {corpus.name} is too small: in pieces of {PIECE:,} characters it has none for training or "
        "none for validation (one in 20, by its hash); add text"
    )


def check_corpus(name: str) -> None:
    """InputError if no corpus can have this name. Quick: reads no file and does not ask the hub."""
    if name.startswith("path:"):
        if not os.path.exists(_place(name)):
            raise InputError(f"corpus {name}: no such file or folder: {os.path.abspath(_place(name))}")
    elif name != "python" and not HUB_NAME.fullmatch(name):
        raise InputError(
            f"unknown corpus {name!r}: use python, path:{name} for files, or hf:ORG/NAME[:CONFIG]"
        )


def _place(name):
    return os.path.expanduser(name.removeprefix("path:"))


@dataclass(frozen=True)
class Remembered:
    """NAME.json: how a corpus's records are read; for one on the hub, its revision and files too."""

    text_field: str = "text"
    revision: str = ""
    files: list[str] = field(default_factory=list)


def open_corpus(name: str, text_field: str | None = None) -> Corpus:
    """The corpus called `name`; InputError if there is none.

    python          the standard library of the running interpreter: about 30 MB, no download
    path:PLACE      a text file (prose, markup, source code), .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or a
                    folder of them (sorted)
    hf:ORG/NAME     the train split of a dataset on the hub; also hf:ORG/NAME:CONFIG@REVISION. The revision is
                    pinned when the corpus is first opened; later the hub is asked for missing files only

    `text_field` (default "text") is the field of a record that holds its text. It is remembered for later
    commands that name the same corpus.
    """
    check_corpus(name)
    root, suffixes = Path(sysconfig.get_path("stdlib")), ".py"
    if name.startswith("path:"):
        root, suffixes = Path(_place(name)).resolve(), TEXT_SUFFIXES + RECORD_SUFFIXES
        name = f"path:{root}"
    memory = base_dir() / "corpus" / f"{_file_name(name)}.json"
    known = read_json(memory, Remembered, "delete it") if memory.exists() else Remembered()
    now = replace(known, text_field=text_field or known.text_field)
    if name.startswith("hf:") and not now.files:
        now = _resolve(name, now.text_field)
    if now != known:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, asdict(now))
    if name.startswith("hf:"):
        return Corpus(name, now.revision, tuple(now.files), now.text_field, repo=HUB_NAME.fullmatch(name)[1])

    files = _local_files(root, suffixes)
    if not files:
        raise InputError(
            f"corpus {name} has no file with text: .txt, .md, .py, .c and so on, .jsonl, .parquet"
        )
    # Names, sizes and times: hashing 100 GB at every start is not worth the certainty
    listing = []
    for path in files:
        status = path.stat()
        listing.append((path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return Corpus(name, _digest(listing)[:16], tuple(files), now.text_field)


def _local_files(root, suffixes) -> list[Path]:
    """The files to read under `root`, sorted; neither hidden ones nor those that we write ourselves."""
    ours = base_dir().resolve()  # changes with every run
    files = []
    for folder, subfolders, names in [(root.parent, [], [root.name])] if root.is_file() else os.walk(root):
        for name in list(subfolders):
            if name.startswith(".") or name in PACKAGES or Path(folder, name) == ours:
                subfolders.remove(name)  # os.walk descends into the rest
        for name in names:
            if not name.startswith(".") and name.lower().endswith(suffixes):
                files.append(Path(folder, name))
    return sorted(files)


def _resolve(name, text_field) -> Remembered:
    """Ask the hub for the revision and the files of a dataset."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    repo, config, revision = HUB_NAME.fullmatch(name).groups()
    with _hub_errors(f"opening the train split of {name}"):
        # Fails at once without a network; the builder alone would try for half a minute
        revision = HfApi().dataset_info(repo, revision=revision, timeout=10).sha
        builder = load_dataset_builder(repo, config, revision=revision)
        files = [file.split(f"@{revision}/", 1)[-1] for file in builder.config.data_files["train"]]
    return Remembered(text_field, revision, files)


@contextlib.contextmanager
def _hub_errors(what: str):
    """Turn any error into a one-line InputError: the hub's clients raise their own, httpx's and OSErrors."""
    try:
        yield
    except Exception as error:
        raise InputError(
            f"{what} failed: {type(error).__name__}: {error}. Check name and network; offline, "
            "CORPUS=python bash speedrun.sh works"
        ) from error


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _file_name(*identity: str) -> str:
    """A file name for these strings, in which the first stays readable."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", identity[0])[-60:]
    return f"{readable}-{_digest(identity)[:8]}"


def read_texts(path: Path, field: str):
    """Yield the texts of a file, None for records whose text is null. OSError or ValueError if it is bad."""
    name = path.name.lower()
    if name.endswith(TEXT_SUFFIXES):
        yield path.read_bytes().decode("utf-8-sig")  # without a byte order mark
    elif name.endswith(".parquet"):
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            columns = [field] if field in file.schema_arrow.names else None  # all, for the error message
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    yield _text_of(record, field)
    else:
        with _open_lines(path) as lines:
            for line in lines:
                if line.strip():
                    yield _text_of(json.loads(line), field)


def _open_lines(path):
    if path.suffix.lower() == ".jsonl":
        return path.open("rb")
    import pyarrow as pa

    # Decompresses by suffix, and raises an error for a truncated stream
    return io.BufferedReader(pa.input_stream(str(path), compression="detect"), 1 << 20)


def _text_of(record, field):
    text = record.get(field, 0) if isinstance(record, dict) else 0
    if isinstance(text, str):
        return text.encode(errors="replace").decode()  # lone surrogates of JSON become question marks
    if text is not None:  # null: no document
        raise ValueError(
            f"no text in field {field!r} of {reprlib.repr(record)}; "
            "choose another with python -m scripts.data_prep --text-field"
        )
