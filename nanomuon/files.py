"""Files that are whole or not there, JSON of a known form, safetensors, folders that one process holds."""

import dataclasses
import json
import os
import socket
import types
import typing
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nanomuon.runtime import InputError, base_dir, check_name


@contextmanager
def write_whole(path):
    """A binary file that appears at `path` once it is complete and on disk, and never before.

    A symbolic link at `path` is replaced, not followed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a process that was killed, or a link of a stranger's
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # that of a write names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
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
        return as_kind(json.loads(Path(path).read_bytes()), kind)
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{path} cannot be read: {error}"
        raise InputError(f"{problem}; {advice}" if advice else problem) from error


def as_kind(value, kind, name: str = "the content"):
    """A JSON value as `kind`: a type, list[kind], dict[str, kind], kind | None or a dataclass.

    name: of the value, for the ValueError about one of another kind.
    """
    inner = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return None if value is None else as_kind(value, inner[0], name)
    outer = dict if dataclasses.is_dataclass(kind) else typing.get_origin(kind) or kind
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not outer:  # and not isinstance: True is no int here
        raise ValueError(f"{name} is {str(value)[:50]!r}, not {outer.__name__}")
    if dataclasses.is_dataclass(kind):
        fields = {field.name: field for field in dataclasses.fields(kind)}
        found = {key: as_kind(value[key], fields[key].type, key) for key in value.keys() & fields.keys()}
        try:
            return kind(**found)
        except TypeError as error:  # "missing 1 required positional argument: 'seed'"
            raise ValueError(f"{name}: {str(error).partition(' ')[2]}") from error
    if inner and outer is list:
        return [as_kind(item, inner[0], f"{name}[{index}]") for index, item in enumerate(value)]
    if inner and outer is dict:
        return {key: as_kind(item, inner[1], f"{name}.{key}") for key, item in value.items()}
    return value


def write_tensors(tensors, file: Path, metadata: dict[str, str]) -> None:
    """Write {name: tensor} as a safetensors file, readable by whoever may read its folder.

    Raises OSError if the file cannot be written.
    """
    file.unlink(missing_ok=True)  # or a symbolic link there would be written through
    separate, storages = {}, set()
    for name, tensor in tensors.items():  # the format has neither transposes nor two names for one storage
        tensor = tensor.contiguous()
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    try:
        save_file(separate, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    os.chmod(file, file.parent.stat().st_mode & 0o666)  # safetensors makes it private to the user
    sync(file)


def tensor_shapes(file) -> dict[str, tuple]:
    """{name: shape} of a safetensors file, from its header alone; InputError if it is not such a file."""
    try:
        with safe_open(file, "pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} is not a safetensors file that can be read: {error}") from error


def sync(path) -> None:
    """Return when a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextmanager
def locked(folder: Path, wait: bool = True):
    """Hold a folder for this process; the system frees it if we are killed.

    While another process holds it, this waits, or else raises InputError, which names that process.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_lock_file(folder))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = _lock_file(folder).read_text() or "another process"  # which is about to write who it is
        if not wait:
            raise InputError(f"{folder} is in use by {holder}: choose another, or stop that") from None
        print(f"{holder} is preparing {folder.name}: waiting for it", flush=True)
        lock.acquire()
    try:
        _lock_file(folder).write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        lock.release()


def being_written(folder: Path) -> bool:
    """Whether some process holds the folder."""
    if not folder.parent.is_dir():
        return False
    try:
        with FileLock(_lock_file(folder)).acquire(timeout=0):
            return False
    except Timeout:
        return True


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def folder_of(run: str) -> Path:
    """The folder of the run of this name, whether it exists or not."""
    return base_dir() / "runs" / run


def find_run(run: str) -> Path:
    """The folder that --run names: with a slash it is a path, without one a name under runs/.

    InputError if a path leads to no folder.
    """
    if "/" not in run:
        check_name("--run", run)
        return folder_of(run)
    folder = Path(run).expanduser().resolve()
    if not folder.is_dir():
        raise InputError(f"--run {run}: there is no such folder, so it holds no finished model")
    return folder
