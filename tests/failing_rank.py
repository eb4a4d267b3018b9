"""Two ranks under torchrun; the second fails. Started by test_command.py.

    torchrun --standalone --nproc_per_node=2 -m tests.failing_rank KIND PLACE

KIND of error: input or bug. PLACE: alone (the other rank waits in a collective) or together.
"""

import sys
import time

import torch
import torch.distributed as dist

from nanomuon.command import run_command
from nanomuon.runtime import InputError, start, together

ERRORS = {
    "input": InputError("no such thing: bring one"),
    "bug": AssertionError("this cannot be"),
}


def work_of(rank, kind):
    if rank == 1:
        print("failing at", time.time(), flush=True)
        raise ERRORS[kind]


def main():
    kind, place = sys.argv[1:]
    rank = start().rank
    if place == "together":
        together(lambda: work_of(rank, kind))
    if rank == 1:
        time.sleep(0.5)  # the other rank is waiting by now
    work_of(rank, kind)
    dist.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    run_command(main)
