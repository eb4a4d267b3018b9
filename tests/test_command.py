"""How a command ends: one line for a user's mistake, on any number of ranks; signals."""

import functools
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import scripts
from nanomuon.command import BUG, StopSignals, run_command
from nanomuon.runtime import InputError
from scripts import plan
from tests.training import ROOT, call


@pytest.mark.parametrize(
    "error,code,said",
    [
        (InputError("no\nsuch \x1bthing"), 2, "error: no such \\x1bthing\n"),
        (OSError(28, "No space left", "/data/x"), 2, "error: [Errno 28] No space left: '/data/x'\n"),
        (
            OSError(28, "No space left", "BASE/x"),
            2,
            "; set NANOMUON_BASE_DIR to a folder with room that you can write to\n",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            2,
            "error: memory ran out: CUDA out of memory; fewer rows",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ValueError("ours"), BUG, "Traceback (most recent call last):\n"),
    ],
)
def test_a_users_mistake_is_one_line_and_a_bug_a_traceback(error, code, said, capsys, monkeypatch, handlers):
    monkeypatch.setenv("NANOMUON_BASE_DIR", "BASE")

    def main():
        raise error

    with pytest.raises(SystemExit) as caught:
        run_command(main)
    message = capsys.readouterr().err
    assert caught.value.code == code and said in message
    assert (message.count("\n") == 1) == (code != BUG)


@pytest.mark.parametrize("flush", [True, False])
def test_a_closed_pipe_is_one_line_and_no_traceback(flush, monkeypatch, capfd, handlers):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as caught:
            run_command(lambda: print("a sample", flush=flush))
    # Closing `output` writes its rest, as the end of the process does: to nowhere, without an error
    assert caught.value.code == 2 and capfd.readouterr().err == "error: [Errno 32] Broken pipe\n"


@pytest.mark.parametrize("depth, code", [("1", 0), ("one", 2)])
def test_a_command_may_have_no_standard_output_or_errors(depth, code, monkeypatch, handlers):
    """Python sets them to None if they are closed when it starts."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    scripts.begin()
    with pytest.raises(SystemExit) as caught:
        run_command(lambda: plan.main(["--depth", depth]))
    assert caught.value.code == code


def test_a_character_that_the_terminal_lacks_is_escaped():
    code = "import scripts; scripts.begin(); print('é')"
    assert call("python", "-c", code, PYTHONIOENCODING="ascii").stdout == "\\xe9\n"


def test_python_without_pytorch_is_told_what_to_do():
    result = call("python", "-S", "-m", "scripts.sample")
    assert result.returncode == 2 and result.stderr.startswith("error: this Python has no PyTorch")


@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN])  # bash: ignored in the background
def test_ctrl_c_while_pytorch_is_imported_is_one_line(tmp_path, inherited):
    # Short sleeps: a signal that comes just before a sleep begins is handled after it
    code = "import time; print('importing', flush=True); [time.sleep(0.01) for _ in range(6000)]"
    (tmp_path / "torch.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command, pipes = [sys.executable, "-m", "scripts.sample"], dict(stdout=-1, stderr=-1)
    heed = functools.partial(signal.signal, signal.SIGINT, inherited)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=heed, **pipes)
    assert process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"", b"interrupted\n") and process.returncode == 130


@pytest.mark.parametrize(
    "kind,place",
    [
        ("input", "alone"),
        pytest.param("bug", "alone", marks=pytest.mark.slow),
        pytest.param("input", "together", marks=pytest.mark.slow),
        pytest.param("bug", "together", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_ends_the_launch_with_one_message(kind, place):
    code, message = {
        "input": (2, "error: no such thing: bring one\n"),
        "bug": (BUG, "AssertionError: this cannot be\n"),
    }[kind]
    result = call("torchrun", "--standalone", "--nproc_per_node=2", "-m", "tests.failing_rank", kind, place)
    ended = time.time()
    said, report = result.stderr.split("tests.failing_rank FAILED")
    assert result.returncode == 1 and said.count(message) == 1
    assert "by peer" not in said  # the other rank's lost connection is not reported
    # The traceback shows where it happened, even if the error came to all ranks
    assert ("in work_of\n    raise ERRORS[kind]\n" in said) == (kind == "bug")
    # If both fail, torchrun may end rank 1 before it has heard of the signal that lets it leave
    failed = "1" if place == "alone" else "[01]"
    assert re.search(rf"rank      : {failed} .*\n  exitcode  : {code} ", report)
    assert ended - float(result.stdout.split()[-1]) < 15


def test_once_a_run_has_ended_signals_have_their_usual_effect(tmp_path, handlers):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    StopSignals(tmp_path).close()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    time.sleep(0.1)  # the thread that ends the process
    assert not (tmp_path / "stopped").exists() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sighup_stays_ignored_under_nohup(tmp_path, handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopSignals(tmp_path)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
