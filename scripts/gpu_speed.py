"""Stages of scripts/gpu_check: how fast the optimizer and a training step are, and where their time goes."""

import json
import sys
from collections import Counter
from collections.abc import Callable

import torch

from nanomuon import parallel, recipe, runtime, sizing
from nanomuon.compilation import compile_model
from nanomuon.gpt import GPTConfig
from nanomuon.optim import MuonAdamW
from scripts.gpu_common import Lines, Place, data_flags, planned_bytes, run_to_end, seeded

# What is aimed at on a GPU
MFU = 0.40  # at depth 12, of the device's peak
TIMES_FLOOR = 1.3  # the optimizer's whole step


def optim_bench_12(place: Place, lines: Lines) -> None:
    """The optimizer at depth 12 beside its floor and torch.optim (on a CPU: depth 2)."""
    optimizer_speed(place.sized(12, 2), place, lines)


def optim_bench_24(place: Place, lines: Lines) -> None:
    """The same at depth 24."""
    _, memory = torch.cuda.mem_get_info()
    if memory < 40 * 2**30:
        lines.skip("optim_bench --depth 24", "needs a GPU with 40 GiB")
        return
    optimizer_speed(24, place, lines)


def optimizer_speed(depth: int, place: Place, lines: Lines) -> None:
    """scripts.optim_bench on its own; its table goes to the log, its JSON to the folder."""
    file = place.folder / f"optim_bench_{depth}.json"
    command = [sys.executable, "-m", "scripts.optim_bench", "--depth", str(depth), "--json", str(file)]
    command += ["--device", place.device.type, "--rounds", place.sized("7", "3")]
    [code], output = run_to_end(place, command)
    print(output)
    lines.check(f"optim_bench --depth {depth}", code == 0, f"exit code {code}")
    if code != 0:
        return
    result = json.loads(file.read_text())
    lines.figure("copy bandwidth", f"{result['copy_bandwidth'] / 1e9:.0f} GB/s")
    for part, table in result["milliseconds"].items():
        for name, row in table.items():
            if isinstance(row, dict):
                found = f"{row['median']:.2f} ms, {row['times_floor']:.2f} of the floor"
                lines.figure(f"{part}, {name}", found)
    times_floor = result["milliseconds"]["whole step"]["MuonAdamW compiled"]["times_floor"]
    if place.on_gpu:
        lines.at_most("the whole step over its floor", times_floor, TIMES_FLOOR)
    else:
        lines.skip("the whole step over its floor", "a target for GPUs")


def train_bench(place: Place, lines: Lines) -> None:
    """A training step at depth 12 beside its floor: tokens per second, MFU (on a CPU: depth 2)."""
    file = place.folder / "train_bench.json"
    command = [sys.executable, "-m", "scripts.train_bench", "--json", str(file)]
    if place.on_gpu:
        command += [*data_flags(place, 32768), "--depth", "12", "--total-batch-size", "262144"]
        command += ["--rounds", "5", "--compile"]
    else:
        command += [*data_flags(place, 1024), "--depth", "2", "--total-batch-size", "4096"]
        command += ["--rounds", "3", "--no-compile"]
    [code], output = run_to_end(place, command)
    print(output)
    lines.check("train_bench", code == 0, f"exit code {code}")
    if code != 0:
        return
    result = json.loads(file.read_text())
    for name, row in result["milliseconds"].items():
        if isinstance(row, dict):
            lines.figure(name, f"{row['median']:.1f} ms, {row['times_floor']:.2f} of the floor")
    lines.figure("compilation", f"{result['compile_seconds']:.0f} s")
    lines.figure("tokens per second", f"{result['tokens_per_second']:,.0f}")
    if "mfu" in result:
        found = result["mfu"]
        lines.check("MFU", found >= MFU, f"{100 * found:.1f}%", f"at least {100 * MFU:.0f}%")
    else:
        lines.skip("MFU", "the peak of this device is not known")


def profile(place: Place, lines: Lines) -> None:
    """A compiled step at depth 12: its kernels, where its time goes, its memory beside the plan."""
    here = runtime.start()
    config = GPTConfig.from_depth(12, vocab_size=32768, seq_len=2048)
    rows = sizing.device_batch_size(config, 16, False, 1, here)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    gpt = parallel.build_model(config, here, seed=0)
    optimizer = MuonAdamW(recipe.param_groups(gpt, rows * config.seq_len))
    forward = compile_model(gpt, None)
    tokens = torch.randint(32768, (rows, config.seq_len + 1), generator=seeded(0)).to(here.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def training_step():
        forward(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        training_step()
    torch.cuda.synchronize()
    found, planned = torch.cuda.max_memory_allocated(), planned_bytes(config, rows)
    limit = 1.1 * planned  # the plan is that of an eager model; a compiled one saves less
    words = f"{found / 2**30:.1f} GiB; the plan says {planned / 2**30:.1f}"
    lines.check(f"peak memory with {rows} rows", found <= limit, words, f"at most {limit / 2**30:.1f}")

    profile_one("training step", training_step, lines)
    forward(inputs, targets).backward()
    profile_one("optimizer step", optimizer.step, lines)


def profile_one(name: str, step: Callable[[], None], lines: Lines) -> None:
    """Launches and waits of one step as figures; its kernels by time go to the log."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as recorded:
        step()
        torch.cuda.synchronize()
    calls = Counter(event.name for event in recorded.events())
    launches = sum(count for call, count in calls.items() if "LaunchKernel" in call)
    waits = calls["cudaStreamSynchronize"] + calls["cudaEventSynchronize"]
    lines.figure(f"kernels launched, {name}", f"{launches}, and {waits} waits for the device")
    print(recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=25))
