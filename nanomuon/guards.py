"""What lets a training loop be interrupted: signals that all ranks obey, gradients that are not finite."""

import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nanomuon.files import being_written, write_text
from nanomuon.runtime import InputError, code_of_a_stop, on_signals


class Requests:
    """What signals ask of a run. SIGTERM, SIGHUP, SIGINT: save and stop after this step.

    Before the first step and after the last there is nothing to save: then they end this process at once.
    run_dir: the folder of the run, in which the first rank notes a stop; None where it is not run.
    """

    def __init__(self, run_dir: Path | None = None):
        self.stop = False
        self.run_dir = run_dir
        self.holds_it = False  # see hold()
        self.at_once = "before its first step"  # when it is that a signal ends the process at once, else None
        on_signals(self._receive, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def _receive(self, number, frame):
        if self.at_once is not None:
            self._end()
        else:
            self.stop = True
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one stops at once

    def hold(self) -> None:
        """The folder is this process's, the first rank's: what an earlier launch has noted there is over."""
        self.holds_it = True
        self._note.unlink(missing_ok=True)

    @property
    def _note(self) -> Path:
        return self.run_dir / "stopped"

    def agree(self, loss: Tensor, finite: Tensor | None = None) -> Tensor:
        """(2,): mean loss over ranks; how many ranks are asked to stop. Not read here.

        What one rank is asked, all do. loss: 0-D. finite: 0-D bool, whether this rank's gradients are
        finite, None where nobody has looked. Where they are not on one rank, there is no loss to speak of:
        all get NaN.
        """
        if finite is not None:
            loss = torch.where(finite, loss, math.nan)
        # Filled on the device: a copy from the host would wait for it
        agreed = torch.stack([loss, loss.new_full((), self.stop)])
        if dist.is_initialized():
            dist.all_reduce(agreed)
            agreed[0] /= dist.get_world_size()
        return agreed

    def steps_begin(self) -> None:
        """Call before the first step: from now on there is something to save before a stop."""
        self.at_once = None

    def steps_end(self) -> None:
        """Call when everything is on disk: a signal then has nothing to wait for."""
        self.at_once = "before its last evaluation"
        if self.stop:
            self._end()

    def stopped(self, when: str) -> int:
        """Say that the run stops here, on the first rank, and in the file `stopped` of its folder; returns
        the exit code for it.
        """
        message = f"stopped {when}; the same command carries on\n"
        if os.environ.get("RANK", "0") == "0":
            os.write(1, message.encode())  # print() fails in a signal handler that has interrupted another
        with contextlib.suppress(OSError, InputError):  # where the disk is full the exit code has to do
            if self._may_note():
                self.run_dir.mkdir(parents=True, exist_ok=True)
                write_text(self._note, message)
        return code_of_a_stop()

    def _may_note(self) -> bool:
        """Before it holds the folder the first rank may as well, unless another launch is at work there."""
        if self.run_dir is None or os.environ.get("RANK", "0") != "0":
            return False
        return self.holds_it or not being_written(self.run_dir)

    def _end(self) -> None:
        """End this process now. Not by an exception, which could be lost in what it interrupts, or come to
        nothing while this rank leaves a group whose others are waiting.
        """
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of a print()
            sys.stdout.flush()
        os._exit(self.stopped(self.at_once))


class Moment:
    """A point in the device's work, for timing: the clock on a CPU; on a GPU, which runs behind the host, an
    event.
    """

    def __init__(self, device: torch.device):
        self.seconds, self.event = time.perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def milliseconds_since(self, earlier: "Moment") -> float:
        """Of the device. The host must have waited for something later than this moment."""
        if self.event is None:
            return 1000 * (self.seconds - earlier.seconds)
        return earlier.event.elapsed_time(self.event)


def gradients_finite(model: nn.Module) -> Tensor:
    """Whether every gradient that this rank holds is finite: 0-D bool, not read here."""
    grads = []
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            grads.append(parameter.grad.to_local())
        elif parameter.grad is not None:
            grads.append(parameter.grad)
    return torch.nn.utils.get_total_norm(grads).isfinite()
