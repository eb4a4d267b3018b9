"""The command lines: python -m scripts.NAME."""

import importlib.util
import os
import signal
import sys


def begin() -> None:
    """What a command does first, before PyTorch is imported, which takes seconds: Ctrl-C meanwhile is a line,
    not a traceback, and a Python without PyTorch is told so. nanomuon.command.run_command takes over.
    """
    # Also if it is ignored: bash starts background jobs so, such as the training of speedrun.sh
    signal.signal(signal.SIGINT, _end)
    if not importlib.util.find_spec("torch"):
        print(
            "error: this Python has no PyTorch: source .venv/bin/activate (speedrun.sh makes it, or: source "
            "scripts/setup.sh train)",
            file=sys.stderr,
        )
        sys.exit(2)
    # Threads that sleep instead of spinning: 2% slower alone, a third faster next to a busy process
    # (docs/log.md)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _end(number, frame):
    os.write(2, b"interrupted\n")
    os._exit(130)
