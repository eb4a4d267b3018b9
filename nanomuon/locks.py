"""One process at a time writes to a folder: its lock is a file beside it.

The system frees the lock of a process that is killed.
"""

import fcntl
from contextlib import contextmanager
from pathlib import Path

from nanomuon.runtime import open_to_append


@contextmanager
def locked(folder: Path):
    """Hold the folder for this process, waiting while another one does."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open_to_append(lock_file(folder)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is preparing {folder.name}: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def being_written(folder: Path) -> bool:
    """Whether some process holds the folder."""
    try:
        with open(lock_file(folder)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")
