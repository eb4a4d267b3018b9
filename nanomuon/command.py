"""How a command starts and ends: flags, one-line errors, signals."""

import argparse
import contextlib
import difflib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from nanomuon.runtime import InputError, base_dir, discard, printable, rank, write_text

BUG = 1  # exit code of an error that the user did not cause
STOPPED = 75  # exit code of a run that was asked to stop early: EX_TEMPFAIL of sysexits.h, try again
INTERRUPTED = 130  # as shells report a process that Ctrl-C has ended
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE = 2  # seconds that a rank waits before it reports an error that others probably report too


# ------------------------------------------------------------------------------------------------------------
# Flags


class ArgumentParser(argparse.ArgumentParser):
    """Prints its description verbatim, and raises an InputError for a bad flag, which suggests a similar one.

    argparse would print the usage before the error: 30 lines for base_train.
    """

    def __init__(self, prog: str, description: str):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=layout, allow_abbrev=False)

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            similar = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.7)
            advice = f" (did you mean {similar[0]}?)" if similar else ""
            if not similar and any(action.dest == "flags" for action in self._actions):
                advice = "; flags of base_train go after a --"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        return parsed

    def error(self, message: str):
        raise InputError(f"{message}; see {self.prog} --help")


def number(kind: type, low: float, high: float):
    """The type of a flag whose value is an int or a float from `low` to `high`, not NaN."""

    def parse(text: str):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low:,} to {high:,}, not {text}")
        return value

    parse.__name__ = kind.__name__  # argparse's "invalid int value"
    return parse


def output_file(text: str) -> str:
    """The type of a flag that names a file to write. Checked at once, because it is written last. Not a
    device or a pipe: write_whole() would put a file in its place.
    """
    place = os.path.abspath(text)
    is_taken = os.path.exists(place) and not os.path.isfile(place)
    if is_taken or not os.access(os.path.dirname(place), os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file, or nothing can be written to its folder")
    return text


count = number(int, 1, 1 << 40)
layers = number(int, 1, 1024)
vocabulary = number(int, 257, 1 << 24)  # 256 bytes and <|bos|>
amount = number(float, 0, 1e30)
seed = number(int, 0, 1 << 62)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        default="base",
        help="a finished run: its name under runs/, or a path to its folder that contains a slash (./NAME) "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="last|step_N",
        help="use this checkpoint, even of a run that is still training; it has the weights in training, not "
        "those that an optimizer's eval() swaps in (default: the finished model)",
    )


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float32"],
        help="dtype of activations and matrix products; weights are float32. auto: bfloat16 if the device "
        "has instructions for it (default: %(default)s)",
    )


# ------------------------------------------------------------------------------------------------------------
# The end: errors and signals


def run_command(main) -> None:
    """Run a script's main() and exit with the code it returns, or with 2 and one line on stderr for an error
    that the user can fix.

    Other exceptions are bugs and show their traceback. With several ranks, an error exits its rank without
    destroying the process group, which would wait for the others: torchrun ends them, as they may be waiting
    for this one in a collective.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # until now scripts.begin() handled it
    try:
        code = main() or 0
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code, message = explain(error)
        if isinstance(error, BrokenPipeError):
            discard(sys.stdout)
        if "RANK" in os.environ:
            defer_to_other_ranks(error)
        sys.stderr.write(message)  # in one write: print() writes the newline separately
        if "RANK" in os.environ:
            os._exit(code)
    if dist.is_initialized():
        dist.destroy_process_group()
        os._exit(exit_code(code))  # gloo's threads outlive their group, and may abort a normal exit
    sys.exit(exit_code(code))


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the message to the user for an error that ends this process."""
    message = str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted\n"
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in message:
        less = "fewer rows (--device-batch-size), a smaller model or --shard fsdp need less"
        message = f"memory ran out: {message.split('. ')[0]}; {less} (base_train --plan estimates it)"
    elif isinstance(error, OSError) and str(base_dir()) in message:  # a full disk, no permission
        message += "; set NANOMUON_BASE_DIR to a folder with room that you can write to"
    elif not isinstance(error, InputError | OSError):
        origin = getattr(error, "origin", None)  # see together()
        text = origin or "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return BUG, printable(text)
    return 2, f"error: {printable(' '.join(message.split()))}\n"


def defer_to_other_ranks(error: BaseException) -> None:
    """Wait before reporting an error that another rank probably reports: torchrun may end this one first.

    Most errors occur on all ranks: only the first rank of each node reports them. If another rank has died,
    this one sees a lost connection.
    """
    lost_connection = isinstance(error, dist.DistError) or "by peer" in str(error)  # gloo's wording
    if lost_connection or os.environ.get("LOCAL_RANK", os.environ["RANK"]) != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's signal
        time.sleep(PATIENCE)


def exit_code(code: int) -> int:
    """0 instead of STOPPED for a rank: torchrun treats anything else as a failure."""
    return 0 if code == STOPPED and "RANK" in os.environ else code


class StopSignals:
    """SIGTERM, SIGHUP (not under nohup) and Ctrl-C ask the run to save and stop after this step; a Ctrl-C
    after one of them ends it at once.

    can_save: whether there is something to save. Until this launch has done a step, and after the run's last
    one, there is not, and a signal ends this process at once. The first rank records the stop in the file
    `stopped` in the run's folder. how: the words for such a stop, after "stopped". command: what resumes it.
    """

    def __init__(self, folder: Path):
        self.folder, self.command, self.how = folder, "the same command", "with nothing to save"
        self.asked = self.can_save = False
        self.before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self.before.items():
            if number != signal.SIGHUP or handler != signal.SIG_IGN:
                signal.signal(number, self._receive)
        arrived, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        threading.Thread(target=self._watch, args=(arrived,), daemon=True).start()

    def close(self):
        """Handle signals as before: the run has ended."""
        signal.set_wakeup_fd(-1)
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number, frame):
        self.asked = True
        if self.can_save:
            self._say("stopping after this step; another Ctrl-C ends it at once, without saving")

    def _watch(self, arrived):
        """End this process if a signal arrives while there is nothing to save, and at a later Ctrl-C.

        In a thread, because Python calls a handler only when the main thread has returned from PyTorch, and
        it does not return if it waits for a rank that has already ended.
        """
        is_first = True
        while True:
            (number,) = os.read(arrived, 1)
            if number not in STOP_SIGNALS:
                continue
            if not self.can_save:
                os._exit(exit_code(self.stopped(self.how)))
            if number == signal.SIGINT and not is_first:
                os._exit(INTERRUPTED)
            is_first = False

    def _say(self, message):
        if rank() == 0:
            try:  # print() fails in a handler that has interrupted a print()
                os.write(1, f"{message}\n".encode())
            except OSError:  # the terminal, whose end sent the signal
                discard(sys.stdout)

    def stopped(self, how: str) -> int:
        """Print and record that the run stops here. Returns STOPPED."""
        message = f"stopped {how}; {self.command} resumes it"
        self._say(message)
        with contextlib.suppress(OSError):  # if the disk is full, the exit code must do
            if rank() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_text(self.folder / "stopped", f"{message}\n")
        return STOPPED
