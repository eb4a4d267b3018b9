"""Safetensors files, on disk when they are written: what checkpoints and exported models are made of."""

import os
import re

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nanomuon.read_json import check_regular
from nanomuon.runtime import InputError


def write_tensors(tensors, file, metadata) -> None:
    """Write {name: tensor} as a safetensors file, readable by whoever may read its folder.

    metadata: {str: str}. Raises OSError, with its number, where the file cannot be written.
    """
    file.unlink(missing_ok=True)  # or a symbolic link there would be written through
    try:
        save_file(separate_tensors(tensors), file, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        errno = int(number[1])
        raise OSError(errno, os.strerror(errno), str(file)) from error
    os.chmod(file, file.parent.stat().st_mode & 0o666)  # safetensors makes it private to the user
    sync(file)


def tensor_shapes(file) -> dict[str, tuple]:
    """{name: shape} of a safetensors file, from its header alone; InputError where it is none."""
    check_regular(file)
    try:
        with safe_open(file, "pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is not a safetensors file: {error}") from error


def separate_tensors(tensors):
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


def sync(path) -> None:
    """Return when a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
