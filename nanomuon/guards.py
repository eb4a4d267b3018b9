"""What lets a training loop be interrupted and watched: signals that all ranks obey, a watchdog, loss
spikes.
"""

import math
import signal
import statistics
import sys
import threading
import time
from collections import deque

import torch.distributed as dist
from torch import Tensor

from .runtime import print0


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

    def agree(self, loss: Tensor) -> tuple[float, bool, bool]:
        """(mean loss over ranks, stop?, save?): what one rank was asked, all do. Waits for the device."""
        save, self.save = self.save, False
        values = loss.new_tensor([0, self.stop, save])
        values[0] = loss
        if dist.is_initialized():
            dist.all_reduce(values)
            values[0] /= dist.get_world_size()
        loss, stop, save = values.tolist()
        return loss, stop > 0, stop + save > 0

    def exit_at_once(self) -> None:
        """Call when everything is on disk: a signal then has nothing to wait for."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))
        if self.stop:
            sys.exit(0)


class Watchdog:
    """Says when a step takes 10 times the median of those before it, while it does: one that hangs shows as
    well.

    A context manager, whose thread ends with it.
    """

    def __init__(self):
        self.times, self.step, self.deadline = deque(maxlen=20), 0, math.inf
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


def is_spike(loss: float, recent: deque) -> bool:
    """Whether a loss is 7 standard deviations above the mean of the recent ones (spike score of arXiv
    2501.00656).
    """
    if len(recent) < 20:
        return False
    mean = statistics.fmean(recent)
    return loss - mean > 7 * math.sqrt(statistics.fmean((value - mean) ** 2 for value in recent))
