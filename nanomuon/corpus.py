"""Where documents come from: the Python standard library, local files, any dataset on the hub.

A corpus is an ordered list of files and a rule that turns each into documents, so that everybody who names the same
corpus reads the same documents in the same order. Repairs and skips follow stated rules and are counted:

    empty        a document without a character is skipped
    null         a record whose text is null or absent is skipped
    duplicate    a document equal to an earlier one is skipped (not in hub corpora, which come deduplicated)
    not_utf8     `python` only: a file that is not UTF-8 is skipped; in `path:` corpora that is an error
    surrogates   lone surrogates and invalid bytes inside records are replaced by U+FFFD
    nul          NUL characters are text and stay; the documents that have some are counted
"""

import gzip
import hashlib
import io
import json
import platform
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from nanomuon.runtime import InputError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
# bytes: a lone .txt file would be one document, and one document has no training and validation part
BOOK_PIECE = 4096


def is_validation(text: str) -> bool:
    """The split of every corpus: one document in 20, by its own hash, so that it never moves."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 20 == 0


@dataclass(frozen=True)
class Corpus:
    """A named, ordered set of documents. `slug` names its folders, `revision` pins its content."""

    name: str
    revision: str
    slug: str
    files: tuple  # of Path
    text_field: str = "text"
    separator: str | None = None
    needs_download: bool = False

    def documents(self, counts: Counter):
        """Yield str documents in their fixed order; `counts` gathers what was skipped and repaired.

        counts["documents"] and counts["bytes"] are the number and UTF-8 size of those yielded so far.
        """
        seen = set()
        for path in self.files:
            for text in self._records(path, counts):
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
                counts["nul"] += "\0" in text
                counts["documents"] += 1
                counts["bytes"] += len(data)
                yield text

    def _records(self, path, counts):
        if self.name == "python":
            return _python_file(path, counts)
        if path.name.endswith(".parquet"):
            return _parquet_file(path, self.text_field, counts)
        if path.name.endswith(".txt"):
            return _text_file(path, self.separator, book=len(self.files) == 1)
        return _json_lines(path, self.text_field)


def open_corpus(name: str, text_field: str | None = None, separator: str | None = None) -> Corpus:
    """The corpus called `name`; InputError where there is none.

    python          the standard library of the running interpreter: about 30 MB, no download
    path:PLACE      a .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, or a folder of them (sorted by path).
                    Records take `text_field` (default "text"). A .txt file is one document, or several split at
                    `separator`; a corpus of a single .txt file without separator is cut at line ends every 4 KB.
    """
    if name == "python":
        root = Path(sysconfig.get_path("stdlib"))
        outside = {"site-packages", "dist-packages", "__pycache__"}
        files = sorted(path for path in root.rglob("*.py") if not outside & set(path.relative_to(root).parts))
        return _local(name, root, files, f"{platform.python_version()}-", None, None)
    if name.startswith("path:"):
        root = Path(name.removeprefix("path:")).expanduser().resolve()
        if root.is_file():
            files = [root]
        elif root.is_dir():
            files = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
        else:
            raise InputError(f"corpus {name}: no such file or folder")
        files = [path for path in files if path.name.endswith(SUFFIXES)]
        if not files:
            raise InputError(f"corpus {name} has no file that ends in {', '.join(SUFFIXES)}: name such a place")
        return _local(name, root, files, "", text_field or "text", separator)
    raise InputError(f"unknown corpus {name!r}: use python, path:FILE_OR_FOLDER or hf:ORG/NAME[:CONFIG]")


def _local(name, root, files, version, text_field, separator) -> Corpus:
    # Names, sizes and times stand for the content: hashing 100 GB at every start would not be worth the certainty
    listing = [(path.relative_to(root).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(json.dumps([name, listing, text_field, separator]).encode()).hexdigest()
    readable = "python" if name == "python" else "path-" + re.sub(r"[^A-Za-z0-9._-]+", "-", root.name)[:40]
    return Corpus(name, version + digest[:16], f"{readable}-{digest[:8]}", tuple(files), text_field, separator)


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
                try:
                    record = json.loads(line)
                except UnicodeDecodeError as error:
                    raise InputError(f"{path} line {number} is not UTF-8: convert it, or take it out") from error
                except ValueError as error:
                    raise InputError(f"{path} line {number} is not JSON ({error}): repair it") from error
                yield _field(record, field, f"{path} line {number}")
        except (EOFError, gzip.BadGzipFile) as error:
            raise InputError(f"{path} is damaged ({error}): fetch it again") from error


def _field(record, field, where):
    """The text of a record, None where it is null. No such field is an error: its name is likely wrong."""
    if not isinstance(record, dict) or field not in record:
        has = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise InputError(f"{where} has no field {field!r} (it has: {has}): name the right one with --text-field")
    if record[field] is not None and not isinstance(record[field], str):
        raise InputError(f"{where}: field {field!r} is not text: name another with --text-field")
    return record[field]


def _open_binary(path):
    if path.name.endswith(".gz"):
        return gzip.open(path)
    if path.name.endswith(".zst"):
        import zstandard

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True))
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
        if field not in types or not (pa.types.is_string(types[field]) or pa.types.is_large_string(types[field])):
            has = ", ".join(types)
            raise InputError(f"{path} has no text column {field!r} (it has: {has}): name one with --text-field")
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            for value in batch.column(0).cast(pa.large_binary()):
                data = value.as_py()
                try:
                    yield None if data is None else data.decode()
                except UnicodeDecodeError:
                    counts["surrogates"] += 1
                    yield data.decode(errors="replace")
