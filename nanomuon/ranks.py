"""Work that the ranks of a run do one after the other."""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from nanomuon.runtime import Runtime, together


def first_rank_first(work: Callable, runtime: Runtime):
    """work() on the first rank, then on the others, which find what it wrote. Returns each rank's result.

    It may take hours: a download does.
    """
    if runtime.world_size == 1:
        return work()
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))  # NCCL would give up after 10 minutes
    first = together(lambda: work() if runtime.rank == 0 else None, patient)[0]
    dist.destroy_process_group(patient)
    return first if runtime.rank == 0 else work()
