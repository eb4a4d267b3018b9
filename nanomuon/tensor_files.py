"""Safetensors files, on disk when the function returns: what checkpoints and exported models are made of."""

import os
import re

from safetensors import SafetensorError
from safetensors.torch import save_file


def write_tensors(tensors, file, metadata) -> None:
    """Write {name: tensor} as a safetensors file, readable by whoever may read its folder.

    metadata: {str: str}. Raises OSError, with its number, where the file cannot be written.
    """
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
