"""Where documents come from: the Python standard library, local files, any dataset on the hub.

A corpus is an ordered list of files and a rule that turns each into documents, so that everybody who names
the same corpus reads the same documents in the same order. Repairs and skips follow stated rules and are
counted:

    empty        a document without a character is skipped
    null         a record whose text is null or absent is skipped
    duplicate    a document equal to an earlier one is skipped (not in hub corpora, which come deduplicated)
    not_utf8     `python` only: a file that is not UTF-8 is skipped; in `path:` corpora that is an error
    surrogates   lone surrogates and invalid bytes inside records are replaced by U+FFFD
    nul          NUL characters are text and stay; the documents that have some are counted
"""

import contextlib
import errno
import gzip
import hashlib
import io
import json
import platform
import re
import sysconfig
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from nanomuon.read_json import LARGE, ListOf, OrNull, Record, Text, read_json
from nanomuon.runtime import InputError, base_dir, write_json

# What is remembered of a corpus: how its records are read; of one on the hub also where and what it is
RECORD = Record(
    {"text_field": OrNull(Text()), "separator": OrNull(Text())},
    {"revision": Text(), "repo": OrNull(Text()), "files": ListOf(Text())},
)
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
HUB_SUFFIXES = SUFFIXES + (".json", ".json.gz", ".json.zst")  # JSON lines too, as a rule of the hub
PRESETS = {
    "climbmix": "hf:karpathy/climbmix-400b-shuffle",
    "fineweb-edu": "hf:HuggingFaceFW/fineweb-edu:sample-10BT",
}
# bytes: a lone .txt file would be one document, and one document has no training and validation part
BOOK_PIECE = 4096
NAME_FIELD = "name the right one with python -m scripts.data_prep --text-field, which is remembered"


def is_validation(text: str) -> bool:
    """The split of every corpus: one document in 20, by its own hash, so that it never moves."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 20 == 0


@dataclass(frozen=True)
class Corpus:
    """A named, ordered set of documents. `slug` names its folders, `revision` pins its content."""

    name: str
    revision: str
    slug: str
    files: tuple  # of Path; of names inside the repository `repo` for a corpus on the hub
    text_field: str = "text"
    separator: str | None = None
    repo: str | None = None

    @property
    def needs_download(self) -> bool:
        """Whether reading the corpus may have to fetch files from the hub."""
        return self.repo is not None

    def documents(self, counts: Counter):
        """Yield all documents, str, in their fixed order."""
        seen = set()
        for number in range(len(self.files)):
            yield from self.read(number, counts, seen)

    def read(self, number: int, counts: Counter, seen: set):
        """Yield the documents of one file.

        counts gathers what was kept, skipped and repaired; counts["documents"] and counts["bytes"] are the
        number and UTF-8 size of the documents yielded. seen: digests of the documents so far.
        """
        for text in self._records(number, counts):
            if text is None:
                counts["null"] += 1
                continue
            if not text:
                counts["empty"] += 1
                continue
            try:
                data = text.encode()
            except UnicodeEncodeError:
                counts["surrogates"] += 1
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                data = text.encode()
            if not self.needs_download:
                digest = hashlib.sha256(data).digest()
                if digest in seen:
                    counts["duplicate"] += 1
                    continue
                seen.add(digest)
            if "\0" in text:
                counts["nul"] += 1
            counts["documents"] += 1
            counts["bytes"] += len(data)
            yield text

    def _records(self, number, counts):
        path = self._fetch(number)
        if self.name == "python":
            return _python_file(path, counts)
        if path.name.endswith(".parquet"):
            return _parquet_file(path, self.text_field, counts)
        if path.name.endswith(".txt"):
            return _text_file(path, self.separator, book=len(self.files) == 1)
        return _json_lines(path, self.text_field)

    def _fetch(self, number) -> Path:
        """The file on this machine. The next one is fetched meanwhile."""
        if not self.needs_download:
            return self.files[number]
        path = self._download(number)
        if number + 1 < len(self.files):
            threading.Thread(target=self._download_ahead, args=(number + 1,), daemon=True).start()
        return path

    def _download_ahead(self, number):
        with contextlib.suppress(Exception):  # who asks for the file itself will hear of it
            self._download(number)

    def _download(self, number):
        from huggingface_hub import hf_hub_download

        def download():  # resumes a partial file, checks the size and, where the hub knows it, the hash
            return hf_hub_download(
                self.repo,
                self.files[number],
                repo_type="dataset",
                revision=self.revision,
                cache_dir=base_dir() / "corpus" / "hub",
            )

        return Path(_patiently(download, f"fetching {self.files[number]} of {self.repo}"))


def open_corpus(name: str, text_field: str | None = None, separator: str | None = None) -> Corpus:
    """The corpus called `name`; InputError where there is none.

    python          the standard library of the running interpreter: about 30 MB, no download
    path:PLACE      a .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, or a folder of them (sorted)
    hf:ORG/NAME     the train split of a dataset on the hub; hf:ORG/NAME:CONFIG@REVISION names more. The
                    revision is pinned when the corpus is first opened; later the hub is asked for missing
                    files only
    climbmix, fineweb-edu   short for the two web corpora that speedruns use

    Records take their text from `text_field` (default "text"). A .txt file is one document, or several split
    at `separator`; a corpus of a single .txt file without separator is cut at line ends every 4 KB. Both
    options are remembered for later commands that name the same corpus.
    """
    name = PRESETS.get(name, name)
    if name == "python":
        return _python_corpus()
    if name.startswith("path:"):
        return _path_corpus(name, text_field, separator)
    if name.startswith("hf:"):
        return _hub_corpus(name, text_field, separator)
    known = ", ".join(["python", "path:FILE_OR_FOLDER", "hf:ORG/NAME[:CONFIG]", *PRESETS])
    raise InputError(f"unknown corpus {name!r}: use one of {known}")


def _python_corpus() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__"}
    files = []
    for path in sorted(root.rglob("*.py")):
        if not outside & set(path.relative_to(root).parts):
            files.append(path)
    revision, digest = _fingerprint("python", root, files, text_field=None, separator=None)
    return Corpus("python", f"{platform.python_version()}-{revision}", f"python-{digest}", tuple(files))


def _path_corpus(name, text_field, separator) -> Corpus:
    root = Path(name.removeprefix("path:")).expanduser().resolve()
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = sorted(path for path in root.rglob("*") if _is_visible_file(path, root))
    else:
        raise InputError(f"corpus {name}: no such file or folder")
    files = [path for path in files if path.name.endswith(SUFFIXES)]
    if not files:
        raise InputError(f"corpus {name} has no file that ends in {', '.join(SUFFIXES)}: name such a place")
    name = f"path:{root}"
    record = _recall(name, text_field=text_field, separator=separator)
    text_field = record["text_field"] or "text"
    separator = record["separator"]
    revision, digest = _fingerprint(name, root, files, text_field, separator)
    slug = f"path-{_readable(root.name)}-{digest}"
    return Corpus(name, revision, slug, tuple(files), text_field, separator)


def _hub_corpus(name, text_field, separator) -> Corpus:
    record = _recall(name, text_field=text_field, separator=separator)
    if not record.get("repo"):  # a folder may have changed since
        record = _recall(name, **_resolve(name))
    revision = record["revision"]
    repo = record.get("repo")
    text_field = record["text_field"] or "text"
    separator = record["separator"]
    files = tuple(record["files"])
    if not repo:
        files = tuple(map(Path, files))
    digest = _digest([revision, text_field, separator])
    slug = f"{_readable(name.replace(':', '-'))}-{digest[:8]}"
    return Corpus(name, revision, slug, files, text_field, separator, repo)


def _fingerprint(name, root, files, text_field, separator):
    """(16, 8) hex digits that stand for the content of local files and for how they are read.

    Made of names, sizes and times: hashing 100 GB at every start would not be worth the certainty.
    """
    listing = []
    for path in files:
        status = path.stat()
        listing.append((path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    digest = _digest([name, listing, text_field, separator])
    return digest[:16], digest[:8]


def _is_visible_file(path, root) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.is_file() and not hidden


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _readable(name) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:60]


def _recall(name, **options) -> dict:
    """What is remembered of a corpus, with the options that are given; written back where they change it."""
    folder = base_dir() / "corpus" / f"{_readable(name.replace(':', '-'))}-{_digest(name)[:8]}"
    record = {"text_field": None, "separator": None}
    if (folder / "corpus.json").exists():
        record = read_json(folder / "corpus.json", RECORD, LARGE, advice=f"remove {folder}")
    given = {key: value for key, value in options.items() if value is not None}
    if any(record.get(key) != value for key, value in given.items()):
        record |= given
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "corpus.json", {"name": name, **record})
    return record


def _resolve(name) -> dict:
    """The revision and the files of a dataset. A folder stands for a dataset, as it does in `datasets`."""
    path, _, revision = name.removeprefix("hf:").partition("@")
    path, _, config = path.partition(":")
    on_hub = not Path(path).is_dir()

    def ask():
        from datasets import load_dataset_builder
        from huggingface_hub import HfApi

        if on_hub:
            # fails at once where there is no network; the builder alone would try for half a minute
            sha = HfApi().dataset_info(path, revision=revision or None, timeout=10).sha
        else:
            sha = None
        cache = str(base_dir() / "corpus" / "hub")
        builder = load_dataset_builder(path, config or None, revision=sha, cache_dir=cache)
        return sha or builder.hash, builder.config.data_files or {}

    revision, files = _patiently(ask, f"opening {name}", begun=False)
    if "train" not in files:
        raise InputError(f"corpus {name} has no train split (it has: {', '.join(files) or 'no data files'})")
    files = [file.split(f"@{revision}/", 1)[-1] for file in files["train"]]
    for file in files:
        if not file.endswith(HUB_SUFFIXES):
            raise InputError(f"corpus {name} holds {file}, which is none of {', '.join(HUB_SUFFIXES)}")
    return {"revision": revision, "repo": path if on_hub else None, "files": files}


def _patiently(call, what, begun=True):
    """call(), again after 1, 2, 4, 8 and 16 s where the trouble may pass.

    That is the hub's answer of 429 or 5xx and, once a transfer was `begun`, a lost connection. A machine
    without network thus fails at its first question.
    """
    waits = [1, 2, 4, 8, 16]
    while True:
        try:
            return call()
        except Exception as error:  # the clients of the hub raise their own kinds, httpx's and OSError's
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if not waits or not _may_pass(error, begun):
                raise InputError(
                    f"{what} failed: {reason}. Check name and network; "
                    "offline, CORPUS=python bash speedrun.sh works"
                ) from error
            wait = waits.pop(0)
            print(f"{what}: {reason}; again in {wait} s", flush=True)
            time.sleep(wait)


def _may_pass(error, begun) -> bool:
    """Whether trying again may help: the hub is busy, or a connection was lost that there had been."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status:
        return status == 429 or status >= 500
    return begun


def _python_file(path, counts):
    try:
        yield path.read_bytes().decode()
    except UnicodeDecodeError:
        counts["not_utf8"] += 1


def _text_file(path, separator, book):
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}): convert it, or take it out") from error
    if separator:
        yield from text.split(separator)
    elif book:
        lines = io.StringIO(text, newline="\n")
        while lines_of_piece := lines.readlines(BOOK_PIECE):
            yield "".join(lines_of_piece)
    else:
        yield text


def _json_lines(path, field):
    with _open_binary(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                try:
                    record = json.loads(line)
                except UnicodeDecodeError as error:
                    raise InputError(f"{where} is not UTF-8: convert it, or take it out") from error
                except ValueError as error:
                    raise InputError(f"{where} is not JSON ({error}): repair it") from error
                yield _field(record, field, where)
        except (EOFError, gzip.BadGzipFile) as error:
            raise InputError(f"{path} is damaged ({error}): fetch it again") from error


def _field(record, field, where):
    """The text of a record, None where it is null. No such field is an error: its name is likely wrong."""
    if not isinstance(record, dict) or field not in record:
        has = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise InputError(f"{where} has no field {field!r} (it has: {has}): {NAME_FIELD}")
    if record[field] is not None and not isinstance(record[field], str):
        raise InputError(f"{where}: field {field!r} is not text: {NAME_FIELD}")
    return record[field]


def _open_binary(path):
    if path.name.endswith(".gz"):
        return gzip.open(path)
    if path.name.endswith(".zst"):
        import zstandard

        decompressor = zstandard.ZstdDecompressor()
        return io.BufferedReader(decompressor.stream_reader(path.open("rb"), read_across_frames=True))
    return path.open("rb")


def _parquet_file(path, field, counts):
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise InputError(f"{path} is not a readable parquet file ({error}): fetch it again") from error
    with file:
        types = {column.name: column.type for column in file.schema_arrow}
        kind = types.get(field, pa.null())
        if not pa.types.is_string(kind) and not pa.types.is_large_string(kind):
            has = ", ".join(types)
            raise InputError(f"{path} has no text column {field!r} (it has: {has}): {NAME_FIELD}")
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            for value in batch.column(0).cast(pa.large_binary()):
                data = value.as_py()
                if data is None:
                    yield None
                    continue
                try:
                    yield data.decode()
                except UnicodeDecodeError:
                    counts["surrogates"] += 1
                    yield data.decode(errors="replace")
