"""One process at a time writes to a folder. Its lock is a file beside it, which says whose it is.

The system frees the lock of a process that is killed. Who gets the folder removes the temporary files that
killed processes have left in it: the lock says that nobody writes them any more.
"""

import os
import shutil
import socket
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def locked(folder: Path):
    """Hold the folder for this process, waiting while another one does."""
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
