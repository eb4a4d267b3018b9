"""What this device has room and speed for: its dtype and the rows of a micro-step."""

import math
import os
import time
from dataclasses import replace

import torch

from nanomuon import footprint, parallel, schedule
from nanomuon.gpt import GPTConfig
from nanomuon.runtime import Runtime, compile_enabled, together

BF16_PAYS = 1.3  # times float32: below, what a step does beside its products takes the gain back
BF16_ROUNDS = 8


def recalled(settings: dict, shard: str, tensor_parallel: int, runtime: Runtime) -> dict:
    """What was measured here for this run before, to be filled in and kept with its settings; empty at first.

    A run that goes on with other kernels, or other micro-steps, rounds differently and is not the same to the
    bit. "Here" is the first rank's kind of device and PyTorch, in this layout.
    """
    device = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "cpu"
    here = {
        "device": device,
        "torch": torch.__version__,
        "processes": runtime.world_size,
        "shard": shard,
        "tensor_parallel": tensor_parallel,
    }
    measured = settings.get("measured", {})
    return together(lambda: measured if measured.get("here") == here else {"here": here})[0]


def choose_dtype(asked: str, runtime: Runtime, measured: dict) -> Runtime:
    """The runtime with the compute dtype that was asked for: "bfloat16", "float32" or "auto".

    "auto" is what the device multiplies best: on a CPU bf16 where a product is BF16_PAYS times as fast in it,
    which the first rank decides for all. measured: see recalled(); a CPU that was measured for this run
    before is not measured again.
    """
    name = asked
    if asked == "auto":
        name = runtime.dtype_name
        if runtime.device.type == "cpu":
            if "bf16_speedup" not in measured:
                measured["bf16_speedup"] = together(cpu_bf16_speedup)[0]
            name = "bfloat16" if measured["bf16_speedup"] >= BF16_PAYS else "float32"
    return replace(runtime, compute_dtype=getattr(torch, name))


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for products in bf16: without, they take 4 to 100 times as long as
    in float32 (measured with AVX512 and with AVX2).
    """
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # {name: whether}; older PyTorch has none
    return any(has for name, has in capabilities.items() if "bf16" in name)


def cpu_bf16_speedup() -> float:
    """How many times as fast this CPU makes a product of 1,024 in bf16 as in float32; 0 where it has no
    instructions for it.
    """
    if not cpu_has_bf16():
        return 0.0
    fastest = {}  # dtype -> seconds: what else runs on the machine can only make it slower
    for _ in range(BF16_ROUNDS):
        for dtype in (torch.float32, torch.bfloat16):
            matrix = torch.ones(1024, 1024, dtype=dtype)
            began = time.perf_counter()
            matrix @ matrix
            seconds = time.perf_counter() - began
            fastest[dtype] = min(seconds, fastest.get(dtype, math.inf))
    return round(fastest[torch.float32] / fastest[torch.bfloat16], 3)


def device_batch_size(
    config: GPTConfig, most: int, fsdp: bool, tensor_parallel: int, runtime: Runtime
) -> int:
    """Rows of a micro-step, a power of two that divides the `most` of a step on a device: what fits into
    memory; on a CPU 16 at most, where more gain nothing.

    On CUDA one row and two are tried, eagerly. Where the run compiles its model, which then takes about a
    third less, twice the rows that this gives are tried as they will run, as long as they fit: one
    compilation is then lost, the others training finds in its cache. Where parameters live in pieces the
    formula stands for it.
    """
    most = max(1, most)
    ranks, itemsize = runtime.world_size, runtime.compute_dtype.itemsize
    layout = footprint.Layout(ranks, fsdp, tensor_parallel)
    one = footprint.memory_by_kind(config, layout, 1, itemsize)
    two = footprint.memory_by_kind(config, layout, 2, itemsize)
    one_row, two_rows = sum(one.values()), sum(two.values())  # bytes
    if runtime.device.type == "cpu":
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
        return schedule.rows_that_fit(math.gcd(most, 16), one_row, two_rows, capacity)
    capacity = torch.cuda.mem_get_info(runtime.device)[0]
    probes = not fsdp and tensor_parallel == 1
    optimizer = one["state"] + one["buffers"]  # which a probe leaves out
    if probes:
        one_row = optimizer + probe_memory(config, 1, runtime)
        two_rows = optimizer + probe_memory(config, 2, runtime)
    rows = schedule.rows_that_fit(most, one_row, two_rows, capacity)
    if probes and compile_enabled():
        while most % (2 * rows) == 0:
            peak = optimizer + probe_memory(config, 2 * rows, runtime, compiled=True)
            if peak > schedule.FILLED * capacity:
                break
            rows *= 2
    return min(together(lambda: rows))


def probe_memory(config: GPTConfig, rows: int, runtime: Runtime, compiled: bool = False) -> float:
    """Bytes on the GPU at the height of forward and backward for so many rows, with weights and gradients.

    It is that of a second micro-step, in which the gradients of the first are there from the beginning.
    Infinite for what it has no room for.
    """
    gpt = forward = None
    peak = math.inf
    try:
        gpt = parallel.build_model(config, runtime, seed=0)
        forward = torch.compile(gpt, dynamic=False) if compiled else gpt
        tokens = torch.zeros(rows, config.seq_len, dtype=torch.int64, device=runtime.device)
        for _ in range(2):  # the second time counts, after the compiler and on top of the gradients
            torch.cuda.reset_peak_memory_stats(runtime.device)
            forward(tokens, tokens).backward()
        peak = torch.cuda.max_memory_allocated(runtime.device)
    except torch.OutOfMemoryError:
        pass
    del gpt, forward
    if compiled:
        torch.compiler.reset()  # graphs that the run may not use; what it uses is in the cache on disk
    torch.cuda.empty_cache()
    return peak
