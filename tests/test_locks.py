"""Who may write to a folder, and what killed processes have left in it."""

import errno
import fcntl
import os
import socket

import pytest

from nanomuon import locks


def leave_behind(folder):
    """What write_whole() and Tokenizer.save() leave when they are killed."""
    folder.mkdir(exist_ok=True)
    (folder / ".settings.json.4711.tmp").write_text("{")
    (folder / ".tokenizer.tmp").mkdir()
    (folder / ".tokenizer.tmp" / "vocab.txt").write_text("")


def test_who_holds_a_folder_alone_removes_what_killed_processes_left(tmp_path):
    folder = tmp_path / "run"
    leave_behind(folder)
    (folder / "settings.json").write_text("{}")
    with locks.locked(folder):
        assert os.listdir(folder) == ["settings.json"]
        assert locks.holder(folder) == f"process {os.getpid()} on {socket.gethostname()}"
    leave_behind(folder)
    with locks.shared(folder):
        assert os.listdir(folder) == ["settings.json"]
        leave_behind(folder)  # it may be this one's, who is at work
        with locks.shared(folder):
            assert len(os.listdir(folder)) == 3
        assert locks.being_written(folder) is False  # a folder that is shared is held by nobody
    with locks.shared(folder):
        assert os.listdir(folder) == ["settings.json"]


@pytest.mark.parametrize("hold", [locks.locked, locks.shared])
def test_a_file_system_without_locks_is_said_to_be_one(tmp_path, monkeypatch, capsys, hold):
    def no_locks(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = tmp_path / "run"
    leave_behind(folder)
    with hold(folder):
        assert len(os.listdir(folder)) == 2  # nobody knows whose they are
    assert "has no locks (No locks available): nothing keeps a second" in capsys.readouterr().out
    assert not locks.being_written(folder)

    def no_permission(file, kind):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", no_permission)
    with pytest.raises(OSError, match="Permission denied"), hold(folder):
        pass
