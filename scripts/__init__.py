"""The command lines: python -m scripts.NAME."""

import importlib.util
import os
import signal
import sys


def begin() -> None:
    """What a command does before it imports PyTorch, which takes seconds: it makes Ctrl-C print a line, not a
    traceback, and reports a Python without PyTorch. Then nanomuon.command.run_command takes over.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: else the next file that is opened would take its place
            setattr(sys, name, open(os.devnull, "w"))
        getattr(sys, name).reconfigure(errors="backslashreplace")  # the terminal may lack a character
    # Even if SIGINT is ignored, as in bash's background jobs, such as the training of speedrun.sh
    signal.signal(signal.SIGINT, _end)
    if not importlib.util.find_spec("torch"):
        print(
            "error: this Python has no PyTorch: source .venv/bin/activate (speedrun.sh creates it, or: "
            "source scripts/setup.sh train)",
            file=sys.stderr,
        )
        sys.exit(2)
    # Waiting threads sleep instead of spinning: 2% slower alone, a third faster next to a busy process
    # (docs/log.md)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _end(number, frame):
    os.write(2, b"interrupted\n")
    os._exit(130)
