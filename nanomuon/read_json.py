"""One way to read the JSON files of runs, shards, tokenizers and races, which anyone may have written.

A file is read if it is a regular file of a size that makes sense, parsed, and compared with a description of
what it has to hold. Only then is anything done with it. What is wrong is one InputError that names file and
key:

    CONFIG = Record({"depth": Whole(1, 1024), "dtype": Choice("bfloat16", "float32")})
    read_json("config.json", CONFIG)    # config.json: depth is 0, not a whole number from 1 to 1024

A description is made of the classes below; each has check(value), which raises Mismatch.
"""

import json
import math
import os
import re
import reprlib
import stat
from dataclasses import dataclass, field
from pathlib import Path

from nanomuon.runtime import InputError, print0

SMALL = 1 << 20  # bytes: settings and the like have a few thousand
LARGE = 64 << 20  # bytes: the manifest of 100,000 shards has half of that
LOG = 1 << 30  # bytes: four million steps
NESTING = 16  # levels of lists and objects in a value that is not described further


class Mismatch(ValueError):
    """A value that is not what its description says. keys: the way to it, from the outside."""

    def __init__(self, problem: str):
        super().__init__(problem)
        self.problem = problem
        self.keys = []

    def __str__(self):
        where = ""
        for key in self.keys:
            where += f"[{key}]" if isinstance(key, int) else f".{key}"
        return f"{where.removeprefix('.') or 'the content'} {self.problem}"


def mismatch(value, expected: str) -> Mismatch:
    return Mismatch(f"is {reprlib.repr(value)}, not {expected}")


@dataclass(frozen=True)
class Anything:
    """Any JSON, but for lists in lists in lists, at which other code would give up."""

    def check(self, value) -> None:
        self._check(value, NESTING)

    def _check(self, value, levels):
        if levels == 0:
            raise Mismatch(f"has more than {NESTING} levels")
        inner = ()
        if isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, list):
            inner = value
        for item in inner:
            self._check(item, levels - 1)


@dataclass(frozen=True)
class Whole:
    """A whole number from `low` to `high`. True and False, which Python counts as numbers, are none."""

    low: int = 0
    high: int = 1 << 53

    def check(self, value) -> None:
        if type(value) is not int or not self.low <= value <= self.high:
            raise mismatch(value, f"a whole number from {self.low} to {self.high}")


@dataclass(frozen=True)
class Number:
    """A number from `low` to `high`; finite: neither infinite nor NaN, which Python's JSON knows."""

    low: float = -math.inf
    high: float = math.inf
    finite: bool = True

    def check(self, value) -> None:
        if type(value) not in (int, float):
            raise mismatch(value, "a number")
        if self.finite and not abs(value) < math.inf:
            raise mismatch(value, "a finite number")
        if value < self.low or value > self.high:
            raise mismatch(value, f"a number from {self.low:g} to {self.high:g}")


@dataclass(frozen=True)
class Flag:
    def check(self, value) -> None:
        if type(value) is not bool:
            raise mismatch(value, "true or false")


@dataclass(frozen=True)
class Text:
    """most: characters."""

    most: int = 4096

    def check(self, value) -> None:
        if not isinstance(value, str):
            raise mismatch(value, "text")
        if len(value) > self.most:
            raise mismatch(value, f"text of at most {self.most} characters")


@dataclass(frozen=True)
class Matching:
    """Text that matches a regular expression."""

    pattern: str
    expected: str  # in words

    def check(self, value) -> None:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value, re.ASCII):
            raise mismatch(value, self.expected)


# A bare name does not lead out of its folder
FILE_NAME = Matching(r"[\w-][\w.-]{0,200}", "the name of a file in this folder")


class Choice:
    def __init__(self, *values: str):
        self.values = values

    def check(self, value) -> None:
        if value not in self.values:
            raise mismatch(value, f"one of {', '.join(self.values)}")


@dataclass(frozen=True)
class Scalar:
    """Text, a number (finite or not), true, false or null."""

    def check(self, value) -> None:
        if isinstance(value, str):
            Text().check(value)
        elif isinstance(value, (dict, list)):
            raise mismatch(value, "text, a number, true, false or null")


@dataclass(frozen=True)
class OrNull:
    of: object

    def check(self, value) -> None:
        if value is not None:
            self.of.check(value)


@dataclass(frozen=True)
class ListOf:
    of: object

    def check(self, value) -> None:
        if not isinstance(value, list):
            raise mismatch(value, "a list")
        for index, item in enumerate(value):
            check_item(self.of, item, index)


@dataclass(frozen=True)
class MapOf:
    """An object with any keys, which `keys` describes, and values of one kind."""

    of: object
    keys: object = Text()

    def check(self, value) -> None:
        if not isinstance(value, dict):
            raise mismatch(value, "an object")
        for key, item in value.items():
            self.keys.check(key)
            check_item(self.of, item, key)


@dataclass(frozen=True)
class Record:
    """An object with these keys, {key: description}; `others` describes further ones, if any may be there."""

    required: dict
    optional: dict = field(default_factory=dict)
    others: object | None = Anything()

    def check(self, value) -> None:
        if not isinstance(value, dict):
            raise mismatch(value, "an object")
        for key in self.required:
            if key not in value:
                raise Mismatch(f"has no {key}")
        for key, item in value.items():
            described = self.required.get(key) or self.optional.get(key) or self.others
            if described is None:
                raise Mismatch(f"has {reprlib.repr(key)}, which is not known")
            check_item(described, item, key)


def check_item(description, value, key) -> None:
    """Check what a list or object has under this key; a Mismatch tells the way to it."""
    try:
        description.check(value)
    except Mismatch as error:
        error.keys.insert(0, key)
        raise


def check(value, description, source) -> None:
    """InputError where a value is not as described. source: where it was read, a file or the like."""
    try:
        description.check(value)
    except Mismatch as error:
        raise InputError(f"{source}: {error}") from error


def parse(data: bytes, description):
    """The value that JSON text holds; ValueError, in words, where it is none or not as described."""
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise ValueError("too many levels of lists and objects") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    description.check(value)
    return value


def read_json(file, description, most: int = SMALL, advice: str = ""):
    """The content of a JSON file of at most so many bytes; InputError where it is not as described.

    advice: what the user can do about that, appended to the message.
    """
    try:
        return parse(read_regular(file, most), description)
    except (ValueError, InputError) as error:
        problem = str(error) if isinstance(error, InputError) else f"{file}: {error}"
        raise InputError(f"{problem}; {advice}" if advice else problem) from error


def read_json_lines(file, description, most: int = LOG) -> tuple[list, list[tuple[int, bytes]]]:
    """(values, damaged lines with their numbers from 1) of a file with one JSON value a line.

    A last line without its end, which a kill leaves, is in neither unless it is whole. No file is an empty
    one. InputError where it cannot be read at all.
    """
    if not os.path.lexists(file):
        return [], []
    values, damaged = [], []
    *lines, torn = read_regular(file, most).split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            values.append(parse(line, description))
        except ValueError:
            damaged.append((number, line))
    try:
        values.append(parse(torn, description))
    except ValueError:
        pass
    return values, damaged


def sound_lines(file, description) -> list:
    """What read_json_lines can read, for someone who writes the file anew with it.

    Damaged lines are set aside in a file beside it, metrics.damaged.jsonl for metrics.jsonl, and it is said.
    """
    file = Path(file)
    values, damaged = read_json_lines(file, description)
    if damaged:
        aside = file.with_suffix(f".damaged{file.suffix}")
        with aside.open("ab") as stream:
            for _, line in damaged:
                stream.write(line + b"\n")
        first, _ = damaged[0]
        lines = "1 damaged line" if len(damaged) == 1 else f"{len(damaged)} damaged lines"
        print0(f"warning: {file}: {lines}, from line {first} on, set aside in {aside.name}")
    return values


def read_regular(file, most: int) -> bytes:
    """What a file holds; InputError where check_regular finds something, or it has more than `most` bytes."""
    size = check_regular(file)
    if size > most:
        raise InputError(f"{file} has {size} bytes, and should have at most {most}")
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from error


def check_regular(file) -> int:
    """The size of a regular file in bytes; InputError for a symbolic link, a device, a pipe or no file, and
    for one that may not be read.

    A link may lead anywhere, and reading a pipe may wait for ever.
    """
    try:
        status = os.lstat(file)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise InputError(f"{file}: {getattr(error, 'strerror', error)}") from error
    if stat.S_ISLNK(status.st_mode):
        raise InputError(f"{file} is a symbolic link: put the file itself there")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{file} is not a regular file")
    if not os.access(file, os.R_OK):
        raise InputError(f"{file} may not be read by this user")
    return status.st_size
