"""Damage to the files of a folder, at random: what a disk, an editor or a stranger may do to them."""

import json
import os
import random

ABSURD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    10**10,
    10**6,
    100_000,
    2**63,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../dev/zero",
    "/dev/zero",
    "\x1b[2J\u202e",
    "\ud800",
    "NaN",
    "S" * 100_000,
    [],
    [None],
    {},
    {"x": {}},
    [[[[[[[[]]]]]]]],
]
WHOLE_FILES = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"0",
    b'"x"',
    b"\n",
    b"\0" * 4096,
    b"\xff\xfe",
    b"{" * 5000,
    b"[" * 10**6,
]


def places(value, path=()):
    """The path of every value inside JSON, from the outside."""
    found = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += places(item, (*path, index))
    return found


def change_value(text: str, rng: random.Random) -> str:
    """The JSON text with one value replaced by an absurd one, removed, or moved under another name."""
    content = json.loads(text)
    path = rng.choice(places(content))
    if not path:
        return json.dumps(rng.choice(ABSURD))
    inside = content
    for key in path[:-1]:
        inside = inside[key]
    kind = rng.choice(["replace", "replace", "replace", "remove", "rename"])
    if kind == "remove":
        del inside[path[-1]]
    elif kind == "rename" and isinstance(inside, dict):
        inside[str(rng.choice(ABSURD))[:50]] = inside.pop(path[-1])
    else:
        inside[path[-1]] = rng.choice(ABSURD)
    return json.dumps(content)


def damage_json(data: bytes, rng: random.Random) -> bytes:
    return change_value(data.decode(), rng).encode()


def damage_line(data: bytes, rng: random.Random) -> bytes:
    """One line of JSON lines with another value, or another line."""
    lines = data.decode().splitlines()
    index = rng.randrange(len(lines))
    if rng.random() < 0.7:
        lines[index] = change_value(lines[index], rng)
    else:
        lines[index] = rng.choice(WHOLE_FILES).decode(errors="replace")
    return "\n".join(lines).encode() + b"\n"


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, repeated, or all replaced."""
    kind = rng.choice(["flip", "flip", "cut", "repeat", "whole"])
    if kind == "whole" or not data:
        return rng.choice(WHOLE_FILES)
    first, last = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if kind == "cut":
        return data[:first] + data[last:]
    if kind == "repeat":
        return data[:last] + data[first:]
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 8])):
        # the beginning of binary files, where their header is, as often as the rest
        reach = rng.choice([16, 2000, len(data)])
        changed[rng.randrange(min(reach, len(data)))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def replace_by_something_else(file, rng: random.Random) -> None:
    """A link, a pipe, a folder, nothing, or a terabyte of zeros in the place of a file."""
    kind = rng.choice(["link", "device", "pipe", "folder", "nothing", "huge"])
    file.unlink()
    if kind == "link":
        file.symlink_to(os.path.abspath(__file__))
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "huge":
        with open(file, "wb") as stream:
            stream.truncate(1 << 40)


def damage(file, rng: random.Random) -> None:
    """Do one thing to a file; files of JSON mostly stay JSON, else nothing but the parser would be tried."""
    if rng.random() < 0.15:
        replace_by_something_else(file, rng)
        return
    data = file.read_bytes()
    if file.suffix == ".json" and rng.random() < 0.7:
        changed = damage_json(data, rng)
    elif file.suffix == ".jsonl" and rng.random() < 0.7:
        changed = damage_line(data, rng)
    else:
        changed = damage_bytes(data, rng)
    file.write_bytes(changed)
