"""The command lines: python -m scripts.NAME."""

import importlib.util
import os
import signal
import sys


def _end(number, frame):
    os.write(2, b"interrupted\n")
    os._exit(130)


# PyTorch takes seconds to import, and Ctrl-C meanwhile would print a traceback. sys.argv[0] is "-m" while
# `python -m scripts.NAME` looks for its script, and never when something else imports one.
# nanomuon.command.run_command takes over from here. bash starts background jobs with SIGINT ignored, also the
# training of speedrun.sh
if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN):
    signal.signal(signal.SIGINT, _end)
if not importlib.util.find_spec("torch"):
    print(
        "error: this Python has no PyTorch: source .venv/bin/activate (speedrun.sh makes it, or: source "
        "scripts/setup.sh train)",
        file=sys.stderr,
    )
    sys.exit(2)
# Threads that sleep instead of spinning: 2% slower alone, a third faster next to a busy process (docs/log.md)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
