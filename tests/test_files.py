"""Who may write to a folder, and JSON of a known form."""

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest

from nanomuon import runtime
from nanomuon.runtime import InputError

HOLD = """
import sys, time
from pathlib import Path
from nanomuon import runtime
with runtime.locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_process_holds_a_folder_and_a_kill_frees_it(tmp_path, capsys):
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    assert runtime.being_written(folder)
    holder = f"process {process.pid} on {socket.gethostname()}"
    with pytest.raises(InputError, match=f"run is in use by {holder}"):
        runtime.locked(folder, wait=False).__enter__()
    killer = threading.Timer(0.5, process.send_signal, [signal.SIGKILL])
    killer.start()
    with runtime.locked(folder):
        assert process.wait() == -signal.SIGKILL
    assert capsys.readouterr().out == f"{holder} is preparing run: waiting for it\n"
    assert not runtime.being_written(folder)


def test_a_file_is_whole_or_not_there_and_no_link_is_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    for name in ("file", ".file.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(KeyboardInterrupt), runtime.write_whole(tmp_path / "file") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    runtime.write_text(tmp_path / "file", "all")
    assert (tmp_path / "file").read_text() == "all" and (tmp_path / "precious").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "precious"]


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
    parts = [{"name": "a", "tokens": 3, "seconds": 1, "later": []}]
    runtime.write_json(tmp_path / "x.json", {"parts": parts, "counts": {"x": 1}, "unknown": None})
    read = runtime.read_json(tmp_path / "x.json", Manifest)
    assert read == Manifest([Part("a", 3, 1.0)], {"x": 1})
    assert type(read.parts[0].seconds) is float


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("", "Invalid JSON"),
        ("[" * 100_000, "recursion"),
        ("\xff", "Invalid JSON"),
        ("[]", "the content: Input should be an object"),
        ('{"counts": {}}', "parts: Field required"),
        ('{"parts": {}, "counts": {}}', "parts: Input should be a valid array"),
        ('{"parts": [{"name": "a", "tokens": true}], "counts": {}}', "parts.0.tokens: Input should be a"),
        ('{"parts": [], "counts": {"x": "1"}}', "counts.x: Input should be a valid integer"),
        ('{"parts": [], "counts": {}, "limit": 1.5}', "limit: Input should be a valid integer"),
    ],
)
def test_json_of_another_form_is_one_line_with_file_and_key(tmp_path, content, problem):
    file = tmp_path / "manifest.json"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError) as caught:
        runtime.read_json(file, Manifest, "write it again")
    message = str(caught.value)
    assert str(file) in message and problem in message and message.endswith("; write it again")
    assert "\n" not in message


def test_a_run_is_named_or_is_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "runs" / "mine"
    mine.mkdir(parents=True)
    for run in ("mine", str(mine), "runs/mine", "./runs/mine/"):
        assert runtime.find_run(run) == mine
    assert (
        runtime.find_run("nobody") == tmp_path / "runs" / "nobody"
    )  # what it lacks is for the reader to say
    for run, message in (
        ("/no/such", "--run /no/such: there is no such"),
        (".hidden", "is not a folder name"),
    ):
        with pytest.raises(InputError, match=message):
            runtime.find_run(run)
