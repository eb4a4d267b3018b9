"""Who may write to a folder, and what killed processes have left in it."""

import os
import signal
import socket
import subprocess
import sys
import threading

from nanomuon import locks

HOLD = """
import sys, time
from pathlib import Path
from nanomuon import locks
with locks.locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_who_holds_a_folder_removes_what_killed_processes_left(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".settings.json.4711.tmp").write_text("{")
    (folder / ".tokenizer.tmp").mkdir()
    (folder / ".tokenizer.tmp" / "vocab.txt").write_text("")
    (folder / "settings.json").write_text("{}")
    with locks.locked(folder):
        assert os.listdir(folder) == ["settings.json"]
        assert locks.being_written(folder)
        assert locks.holder(folder) == f"process {os.getpid()} on {socket.gethostname()}"
    assert not locks.being_written(folder)


def test_a_second_process_waits_for_the_first_and_a_kill_frees_the_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    assert locks.being_written(folder)
    killer = threading.Timer(0.5, process.send_signal, [signal.SIGKILL])
    killer.start()
    with locks.locked(folder):
        assert process.wait() == -signal.SIGKILL
    waited = f"process {process.pid} on {socket.gethostname()} is preparing run: waiting for it\n"
    assert capsys.readouterr().out == waited
