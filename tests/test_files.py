"""Who may write to a folder, what killed processes have left in it, and JSON of a known form."""

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest

from nanomuon import files
from nanomuon.runtime import InputError

HOLD = """
import sys, time
from pathlib import Path
from nanomuon import files
with files.locked(Path(sys.argv[1])):
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
    with files.locked(folder):
        assert os.listdir(folder) == ["settings.json"]
        assert files.being_written(folder)
        assert files.holder(folder) == f"process {os.getpid()} on {socket.gethostname()}"
    assert not files.being_written(folder)


def test_a_second_process_waits_for_the_first_and_a_kill_frees_the_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    assert files.being_written(folder)
    killer = threading.Timer(0.5, process.send_signal, [signal.SIGKILL])
    killer.start()
    with files.locked(folder):
        assert process.wait() == -signal.SIGKILL
    waited = f"process {process.pid} on {socket.gethostname()} is preparing run: waiting for it\n"
    assert capsys.readouterr().out == waited


@dataclass
class Part:
    name: str
    tokens: int
    seconds: float = 0.0


@dataclass
class Manifest:
    parts: list[Part]
    counts: dict[str, int]
    limit: int | None = None


def test_json_is_read_as_a_dataclass(tmp_path):
    file = tmp_path / "manifest.json"
    parts = [{"name": "a", "tokens": 3, "seconds": 1, "later": []}]
    files.write_json(file, {"parts": parts, "counts": {"x": 1}, "unknown": None})
    read = files.read_json(file, Manifest)
    assert read == Manifest([Part("a", 3, 1.0)], {"x": 1})
    assert type(read.parts[0].seconds) is float


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\xff", "not JSON"),
        ("[]", "the content is [], not Manifest"),
        ('{"counts": {}}', "the content has no parts"),
        ('{"parts": {}, "counts": {}}', "parts is {}, not list"),
        ('{"parts": [1], "counts": {}}', "parts[0] is 1, not Part"),
        ('{"parts": [{"name": "a"}], "counts": {}}', "parts[0] has no tokens"),
        ('{"parts": [{"name": "a", "tokens": true}], "counts": {}}', "tokens is True, not int"),
        ('{"parts": [], "counts": {"x": "1"}}', "counts.x is '1', not int"),
        ('{"parts": [], "counts": {}, "limit": 1.5}', "limit is 1.5, not int"),
    ],
)
def test_json_of_another_form_is_one_line_with_file_and_key(tmp_path, content, problem):
    file = tmp_path / "manifest.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError) as caught:
        files.read_json(file, Manifest, "write it again")
    message = str(caught.value)
    assert str(file) in message and problem in message and message.endswith("; write it again")
    assert "\n" not in message


def test_a_json_file_that_is_gone_is_one_line(tmp_path):
    with pytest.raises(InputError, match="gone.json: No such file"):
        files.read_json(tmp_path / "gone.json", Manifest)
