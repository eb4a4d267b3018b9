"""What lets a training loop be interrupted and watched: signals that all ranks obey, a watchdog, gradients
that are not finite, loss spikes.
"""

import math
import signal
import statistics
import sys
import threading
import time
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nanomuon.runtime import print0


class Requests:
    """What signals ask of the loop. SIGTERM, SIGINT: save and stop after this step; SIGUSR1: save."""

    def __init__(self):
        self.stop = self.save = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number, frame):
        if number == signal.SIGUSR1:
            self.save = True
        else:
            self.stop = True
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one stops at once

    def agree(self, loss: Tensor, finite: Tensor | None = None) -> Tensor:
        """(3,): mean loss over ranks; how many ranks are asked to stop; to save. Not read here.

        What one rank is asked, all do. loss: 0-D. finite: 0-D bool, whether this rank's gradients are
        finite, None where nobody has looked. Where they are not on one rank, there is no loss to speak of:
        all get NaN.
        """
        save, self.save = self.save, False
        if finite is not None:
            loss = torch.where(finite, loss, math.nan)
        # Filled on the device: a copy from the host would wait for it
        stops, saves = loss.new_full((), self.stop), loss.new_full((), save)
        agreed = torch.stack([loss, stops, saves])
        if dist.is_initialized():
            dist.all_reduce(agreed)
            agreed[0] /= dist.get_world_size()
        return agreed

    def exit_at_once(self) -> None:
        """Call when everything is on disk: a signal then has nothing to wait for."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: sys.exit(0))
        if self.stop:
            sys.exit(0)


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


class Watchdog:
    """Says when a step takes 10 times the median of those before it, while it does: one that hangs shows as
    well.

    A context manager, whose thread ends with it.
    """

    def __init__(self):
        self.times = deque(maxlen=20)  # milliseconds of the last steps
        self.step, self.deadline = 0, math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._closed.set()
        self._thread.join()

    def _watch(self):
        while not self._closed.wait(0.2):
            if time.perf_counter() > self.deadline:
                self.deadline = math.inf
                print0(
                    f"warning: step {self.step} takes more than 10 times the median, {self.median():.0f} ms"
                )

    def begin(self, step: int) -> None:
        self.step = step
        if len(self.times) > 4:  # under a second it is the machine's jitter
            self.deadline = time.perf_counter() + max(1, self.median() / 100)

    def end(self, milliseconds: float) -> None:
        self.deadline = math.inf
        self.times.append(milliseconds)

    def median(self) -> float:
        """Milliseconds of a recent step."""
        return statistics.median(tuple(self.times))


def gradients_finite(model: nn.Module) -> Tensor:
    """Whether every gradient that this rank holds is finite: 0-D bool, not read here."""
    grads = []
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            grads.append(parameter.grad.to_local())
        elif parameter.grad is not None:
            grads.append(parameter.grad)
    return torch.nn.utils.get_total_norm(grads).isfinite()


def is_spike(loss: float, recent: deque) -> bool:
    """Whether a loss is 7 standard deviations above the mean of the recent ones (spike score of arXiv
    2501.00656).
    """
    if len(recent) < 20:
        return False
    mean = statistics.fmean(recent)
    return loss - mean > 7 * math.sqrt(statistics.fmean((value - mean) ** 2 for value in recent))


def warn_of_loss(step: int, loss: float, bad_steps: int, recent: deque) -> None:
    """Say what is wrong with the loss of a step, if something is, and add it to the recent ones.

    bad_steps: how many steps in a row had no update, this one included.
    """
    if bad_steps:
        print0(f"step {step}: loss {loss}; it or a gradient is not finite: no update ({bad_steps} in a row)")
    elif is_spike(loss, recent):
        mean = statistics.fmean(recent)
        print0(f"step {step}: the loss jumps to {loss:.4f} from a mean of {mean:.4f}")
    if math.isfinite(loss):
        recent.append(loss)
