"""One process at a time writes to a folder: its lock is a file beside it, which says who that is.

The system frees the lock of a process that is killed. Who gets a folder for himself removes what killed
processes have left in it. Their temporary files have their process id in the name, but ids are given out
again, and say nothing on another machine that shares the folder: the lock says that nobody writes them any
more.
"""

import errno
import fcntl
import os
import shutil
import socket
from contextlib import contextmanager
from pathlib import Path

from nanomuon.runtime import not_through_links

# What the system says where a file system has no locks, as some have none that are mounted over a network
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def locked(folder: Path):
    """Hold the folder for this process, waiting while another one does."""
    with open_lock(folder) as file:
        try:
            if not take(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                print(f"{holder(folder)} is preparing {folder.name}: waiting for it", flush=True)
                take(file, fcntl.LOCK_EX)
            remove_leftovers(folder)
        except OSError as error:
            go_on_without_lock(folder, error)
        file.truncate(0)
        file.write(this_process() + "\n")
        file.flush()
        yield


@contextmanager
def shared(folder: Path):
    """Write to the folder beside other processes that share it, each its own files."""
    with open_lock(folder) as file:
        try:
            if take(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                remove_leftovers(folder)
            take(file, fcntl.LOCK_SH)
        except OSError as error:
            go_on_without_lock(folder, error)
        yield


def being_written(folder: Path) -> bool:
    """Whether some process holds the folder."""
    try:
        with open(lock_file(folder), opener=not_through_links) as file:
            return not take(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOENT, *NO_LOCKS):
            return False
        raise


def holder(folder: Path) -> str | None:
    """Who took the folder last: this_process() there; None where somebody has removed the lock."""
    try:
        with open(lock_file(folder), opener=not_through_links) as file:
            return file.read(200).strip() or "another process"
    except FileNotFoundError:
        return None


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders of killed processes; for who holds the folder alone."""
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def open_lock(folder: Path):
    folder.parent.mkdir(parents=True, exist_ok=True)
    # NFS wants the file open for reading for a lock that is shared, and for writing for one that is not
    return open(lock_file(folder), "a+", opener=not_through_links)


def take(file, kind: int) -> bool:
    """Whether this process has the lock now; not, where another one has it and `kind` says not to wait."""
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    return True


def go_on_without_lock(folder: Path, error: OSError) -> None:
    """Say what that means; raises the error where it is another one."""
    if error.errno not in NO_LOCKS:
        raise error
    print(
        f"warning: the file system of {folder.parent} has no locks ({error.strerror}): "
        f"nothing keeps a second process from writing to {folder.name} at the same time",
        flush=True,
    )
