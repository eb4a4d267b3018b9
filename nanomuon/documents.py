"""Documents as files hold them: text, JSON lines and parquet, compressed or not."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from nanomuon.runtime import InputError

RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
PROSE = ".txt .text .md .markdown .rst .tex .org .adoc"
SOURCE_CODE = (
    ".py .pyi .pyx .c .h .cc .hh .cpp .hpp .cxx .hxx .cu .cuh .m .mm .rs .go .zig .nim .java .kt .scala "
    ".groovy .cs .fs .swift .dart .js .mjs .cjs .jsx .ts .tsx .vue .html .css .scss .sh .bash .zsh .pl .pm "
    ".rb .php .lua .r .jl .f .f90 .f95 .for .pas .hs .ml .mli .erl .ex .exs .clj .el .lisp .scm .rkt .sql "
    ".proto .cmake .s .asm"
)
TEXT_SUFFIXES = tuple(PROSE.split() + SOURCE_CODE.split())
SUFFIXES = TEXT_SUFFIXES + RECORD_SUFFIXES  # in capital letters, too
BOOK_PIECE = 4096  # characters: a lone text file would be one document, which has no second part
NAME_FIELD = "name the right one with python -m scripts.data_prep --text-field, which is remembered"


class BadFileError(InputError):
    """A file that cannot be read; the message names it and says why, and not what to do about it."""


class NotUTF8Error(BadFileError):
    """A text file that is not UTF-8."""


def read_records(path: Path, text_field: str, is_book: bool = False) -> Iterator[str | None]:
    """Yield the texts of a file, None for a record whose text is null.

    text_field: of the records of .jsonl and .parquet; a.b is field b of the record in field a. is_book: a
    text file comes in pieces, cut at line ends. Invalid bytes in .parquet become U+FFFD.

    BadFileError where the file cannot be read to its end, NotUTF8Error for a text file that is not UTF-8.
    """
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from _parquet_file(path, text_field)
        elif name.endswith(TEXT_SUFFIXES):
            yield from _text_file(path, is_book)
        else:
            yield from _json_lines(path, text_field)
    except (OSError, EOFError, zlib.error) as error:  # of the disk, or of damaged compression
        reason = getattr(error, "strerror", None) or error
        raise BadFileError(f"{path} cannot be read ({reason})") from error


def cut(text: str, size: int):
    """Yield a text in pieces of at most `size` bytes of UTF-8, which end at line ends.

    A line that is longer is cut inside, and no character is cut in two.
    """
    data = text.encode()
    start = 0
    while len(data) - start > size:
        end = data.rfind(b"\n", start, start + size) + 1
        if end == 0:  # no line end
            end = start + size
            while data[end] & 0b1100_0000 == 0b1000_0000:  # inside of a character
                end -= 1
        yield data[start:end].decode()
        start = end
    yield data[start:].decode()


def _text_file(path, is_book):
    try:
        text = path.read_bytes().decode().removeprefix("\ufeff")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        raise NotUTF8Error(f"{path} is not UTF-8 (byte {error.start})") from error
    if is_book:
        lines = io.StringIO(text, newline="\n")
        while lines_of_piece := lines.readlines(BOOK_PIECE):
            yield "".join(lines_of_piece)
    else:
        yield text


def _json_lines(path, field):
    with _open_binary(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                raise BadFileError(f"{where} is not UTF-8") from error
            except RecursionError as error:
                raise BadFileError(f"{where} has too many levels of lists and objects") from error
            except ValueError as error:
                raise BadFileError(f"{where} is not JSON ({error})") from error
            yield _field(record, field, where)


def _field(record, field, where):
    """The text of a record, None where it or what holds it is null. A field of the whole name comes first.

    No such field is an error: its name is likely wrong.
    """
    if isinstance(record, dict) and field in record:
        value = record[field]
    else:
        value = record
        for name in field.split("."):
            if not isinstance(value, dict) or name not in value:
                has = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
                missing = repr(field) if name == field else f"{name!r} of {field!r}"
                raise BadFileError(f"{where} has no field {missing} (it has: {has}): {NAME_FIELD}")
            value = value[name]
            if value is None:
                break
    if value is not None and not isinstance(value, str):
        raise BadFileError(f"{where}: field {field!r} is not text: {NAME_FIELD}")
    return value


def _open_binary(path):
    name = path.name.lower()
    if name.endswith((".gz", ".zst")) and path.stat().st_size == 0:
        raise EOFError("it is empty")  # the readers below would find nothing wrong
    if name.endswith(".gz"):
        return gzip.open(path)
    if name.endswith(".zst"):
        import pyarrow as pa

        # It tells of a stream that ends too early, which the reader of the package zstandard does not
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), buffer_size=1 << 20)
    return path.open("rb")


def _parquet_file(path, field):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            column, inside = _parquet_column(path, file.schema_arrow, field)
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                texts = batch.column(column)
                if inside:
                    texts = pc.struct_field(texts, inside)  # null where the struct is
                for value in texts.cast(pa.large_binary()):
                    data = value.as_py()
                    yield None if data is None else data.decode(errors="replace")
    except pa.ArrowException as error:
        raise BadFileError(f"{path} is not a readable parquet file ({error})") from error


def _parquet_column(path, schema, field):
    """(column, fields inside of it) that a.b names: a column of that whole name, else one of structs."""
    import pyarrow as pa

    if field in schema.names:
        column, inside = field, []
    else:
        column, *inside = field.split(".")
    kind = schema.field(column).type if column in schema.names else pa.null()
    for name in inside:
        is_there = pa.types.is_struct(kind) and kind.get_field_index(name) >= 0
        kind = kind.field(name).type if is_there else pa.null()
    if not pa.types.is_string(kind) and not pa.types.is_large_string(kind):
        has = ", ".join(_leaves(schema))
        if not pa.types.is_null(kind):
            has += f"; {field} is of type {kind}"
        raise BadFileError(f"{path} has no text column {field!r} (it has: {has}): {NAME_FIELD}")
    return column, inside


def _leaves(fields, prefix=""):
    """Yield the names of columns, a.b for those inside of structs."""
    import pyarrow as pa

    for column in fields:
        if pa.types.is_struct(column.type):
            yield from _leaves(column.type, f"{prefix}{column.name}.")
        else:
            yield prefix + column.name
