"""Files that are whole or not there, JSON of a known form, safetensors, folders that one process holds."""

import dataclasses
import json
import os
import re
import reprlib
import shutil
import socket
import types
import typing
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nanomuon.runtime import InputError


@contextmanager
def write_whole(path):
    """A binary file that appears at `path` once it is complete and on disk, and never before.

    A symbolic link at `path` is replaced, not followed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a process that had our number, or a link of a stranger's
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path, text: str) -> None:
    with write_whole(path) as file:
        file.write(text.encode())


def write_json(path, content) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path, kind=dict, advice: str = ""):
    """The content of a JSON file as `kind`: dict, or a dataclass whose fields the file has, of their types.

    A field without a default has to be there; keys without a field are passed over. InputError names the file
    and the key that is missing or of another type, followed by `advice`, what the user can do about it.
    """
    try:
        return as_kind(parse_json(Path(path).read_bytes()), kind)
    except OSError as error:
        problem = f"{path}: {error.strerror}"
    except ValueError as error:
        problem = f"{path}: {error}"
    raise InputError(f"{problem}; {advice}" if advice else problem)


def parse_json(data: bytes):
    """The value that JSON text holds; ValueError if it is not JSON in UTF-8."""
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error


def as_kind(value, kind, name: str = ""):
    """A JSON value as `kind`: a type, list[kind], dict[str, kind], kind | None or a dataclass.

    name: of the value, for the message of the ValueError about one of another kind; none for the whole.
    """
    inner = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return None if value is None else as_kind(value, inner[0], name)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _as_dataclass(value, kind, name)
    if typing.get_origin(kind) is list and isinstance(value, list):
        return [as_kind(item, inner[0], f"{name}[{index}]") for index, item in enumerate(value)]
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        return {key: as_kind(item, inner[1], f"{name}.{key}".lstrip(".")) for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # and not isinstance: True is no int here
        raise ValueError(
            f"{name or 'the content'} is {reprlib.repr(value)}, not {getattr(kind, '__name__', kind)}"
        )
    return value


def _as_dataclass(value, kind, name):
    fields = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            fields[field.name] = as_kind(value[field.name], field.type, f"{name}.{field.name}".lstrip("."))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name or 'the content'} has no {field.name}")
    return kind(**fields)


def write_tensors(tensors, file: Path, metadata: dict[str, str]) -> None:
    """Write {name: tensor} as a safetensors file, readable by whoever may read its folder.

    Raises OSError, with its number, if the file cannot be written.
    """
    file.unlink(missing_ok=True)  # or a symbolic link there would be written through
    try:
        save_file(_separate(tensors), file, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        errno = int(number[1])
        raise OSError(errno, os.strerror(errno), str(file)) from error
    os.chmod(file, file.parent.stat().st_mode & 0o666)  # safetensors makes it private to the user
    sync(file)


def _separate(tensors):
    """The same tensors, contiguous and each with a storage of its own.

    The format has neither transposes nor two names for one storage (tied weights).
    """
    separate = {}
    storages = set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages:
            tensor = tensor.clone()
        storages.add(storage)
        separate[name] = tensor
    return separate


def tensor_shapes(file) -> dict[str, tuple]:
    """{name: shape} of a safetensors file, from its header alone; InputError if it is not such a file."""
    try:
        with open(file, "rb"):  # safetensors says "no such file" of one that may not be read
            pass
        with safe_open(file, "pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise InputError(f"{file} is not a safetensors file: {error}") from error


def sync(path) -> None:
    """Return when a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextmanager
def locked(folder: Path):
    """Hold a folder for this process, waiting while another one does; the system frees it if we are killed.

    Temporary files that killed processes have left in the folder are removed: nobody writes them any more.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{holder(folder)} is preparing {folder.name}: waiting for it", flush=True)
        lock.acquire()
    try:
        _lock_file(folder).write_text(f"process {os.getpid()} on {socket.gethostname()}")
        for leftover in folder.glob(".*.tmp"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        yield
    finally:
        lock.release()


def being_written(folder: Path) -> bool:
    """Whether some process holds the folder."""
    if not folder.parent.is_dir():
        return False
    try:
        with _lock(folder).acquire(timeout=0):
            return False
    except Timeout:
        return True


def holder(folder: Path) -> str:
    """The process that took the folder last, in words."""
    return _lock_file(folder).read_text() or "another process"  # which is about to write who it is


def _lock(folder: Path) -> FileLock:
    return FileLock(_lock_file(folder))


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")
