"""Time optimizer steps on a model's real shapes, and their floor: only the products and memory traffic.

    python -m scripts.optim_bench --depth 8                        # ours, torch as shipped, the floor
    python -m scripts.optim_bench --depth 8 --dtype float32        # even if the CPU has bf16
    python -m scripts.optim_bench --depth 8 --world 2              # the distributed step
    python -m scripts.optim_bench --peer mine.py:build_optimizer   # a function: model -> optimizer or groups
    python -m scripts.optim_bench --profile step.json              # trace a compiled step for chrome://tracing

The contestants take turns in every round, so a busy machine slows all of them. It prints medians, the spread
(half of the rounds lie within it) and the median ratio to the floor of the same round. The floor is the time
of Newton-Schulz's products in the optimizer's own form and dtype (see orthogonalize), into existing buffers,
plus the time to move 20 bytes per float32 Muon parameter (gradient read; momentum and parameter read and
written) and 28 per AdamW parameter at the bandwidth of a large copy. torch.optim as shipped iterates in bf16
on every device; on a CPU without bf16 instructions, where a step would take minutes, that row is left out.
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

import os
import statistics
import tempfile

import torch
import torch.distributed as dist
from torch.profiler import profile

from nanomuon import recipe
from nanomuon.command import ArgumentParser, add_dtype_argument, count, layers, output_file, run_command
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import Bank, DistMuonAdamW, MuonAdamW
from nanomuon.orthogonalize import newton_schulz_form, triples
from nanomuon.runtime import (
    InputError,
    cores,
    cpu_has_bf16,
    keep_freed_memory,
    read_json,
    start,
    timed,
    usable_gpus,
    write_json,
)


def parse_arguments(argv):
    parser = ArgumentParser("python -m scripts.optim_bench", __doc__)
    add = parser.add_argument
    add("--depth", type=layers, default=8, help="model size, as in base_train (default: %(default)s)")
    add("--rounds", type=count, default=7, help="measured rounds, after a warm-up (default: %(default)s)")
    add("--world", type=count, default=1, help="number of processes; above 1, time the distributed step")
    add(
        "--peer",
        metavar="FILE:FUNCTION",
        help="a function that takes the model; returns an optimizer, or groups for ours",
    )
    add_dtype_argument(parser)
    add("--profile", type=output_file, metavar="FILE", help="write a trace of one step to this file")
    add("--json", type=output_file, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.world > 1 and (args.peer or args.profile):
        raise InputError("--peer and --profile run in a single process: leave out --world")
    if 0 < usable_gpus() < args.world:
        raise InputError(f"--world {args.world} needs that many GPUs, not {usable_gpus()}")
    return args


def main(argv=None):
    args = parse_arguments(argv)
    runtime = start(args.dtype)
    args.device = runtime.device.type
    result = distributed(args, runtime) if args.world > 1 else compare(args, runtime)
    result |= {"depth": args.depth, "dtype": runtime.dtype_name, "torch": torch.__version__}
    if args.json is not None:
        write_json(args.json, result)


def build_model(args, seed=0):
    """A model of this depth with random values, and a gradient for every parameter."""
    with torch.device("meta"):
        model = GPT(GPTConfig.from_depth(args.depth, vocab_size=8192, seq_len=128))
    model.to_empty(device=args.device)
    generator = torch.Generator(args.device).manual_seed(seed)
    for param in model.parameters():
        param.data.normal_(0, 0.02, generator=generator)
        param.grad = torch.randn(param.shape, device=args.device, generator=generator)
    return model


def copy_bandwidth(device):
    """Bytes read and written per second by a copy of 256 MB."""
    source, target = torch.ones(2**26, device=device), torch.ones(2**26, device=device)
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source), device) for _ in range(5)) * 1e3


def products(optimizer, device):
    """A function that computes only the matrix products of every Muon bank of our optimizer."""
    calls, banks = [], []
    if isinstance(optimizer, MuonAdamW):
        optimizer.plan()
        banks = [item for item in optimizer.work_items if isinstance(item, Bank)]
    for bank in banks:
        k, (short, long) = bank.batches()[0].stop, sorted(bank.shape)
        steps = len(triples(bank.group["coefficients"], bank.group["ns_steps"]))
        gram, dtype = newton_schulz_form(short, long, steps, device, optimizer.ns_dtype)
        X, Y = (torch.randn(k, short, long, device=device, dtype=dtype) / long for _ in range(2))
        A, B = (torch.randn(k, short, short, device=device, dtype=dtype) / short for _ in range(2))
        # The long side takes part in 4 products in Gram form (2 for R, 2 with Q), else in two per step
        sides, shorts = (4, 14) if gram else (2 * steps, steps)
        for batch in bank.batches():  # the last one may be smaller
            x, y, a, b = (each[: batch.stop - batch.start] for each in (X, Y, A, B))
            calls += [(x, x.mT, a), (a, x, y)] * (sides // 2) + [(a, a, b)] * shorts

    def run():
        for left, right, out in calls:
            torch.bmm(left, right, out=out)

    return run


def load_peer(peer):
    """The function of FILE:FUNCTION; InputError if there is none."""
    file, _, name = peer.rpartition(":")
    if not os.path.isfile(file):
        raise InputError(f"--peer {peer} must be FILE:FUNCTION")
    function = recipe.run_file(file).get(name)
    if not callable(function):
        raise InputError(f"--peer {peer}: {file} has no function {name}")
    return function


def compare(args, runtime):
    model = build_model(args)
    groups = recipe.param_groups(model, recipe.REFERENCE_BATCH, recipe.REFERENCE_STEPS)
    params = {"muon": [], "adamw": []}
    for group in groups:
        params[group["kind"]] += group["params"]
    traffic = sum(20 * p.numel() for p in params["muon"]) + sum(28 * p.numel() for p in params["adamw"])
    compiled = MuonAdamW(groups, ns_dtype=runtime.compute_dtype, compile=True)
    eager = MuonAdamW(groups, ns_dtype=runtime.compute_dtype, compile=False)
    torch_muon = torch.optim.Muon(params["muon"], lr=1e-3, weight_decay=0.1)
    torch_adamw = torch.optim.AdamW(params["adamw"], lr=1e-4, fused=True)

    def torch_step():
        torch_muon.step()
        torch_adamw.step()

    contestants = {
        "floor": products(eager, args.device),
        "MuonAdamW compiled": compiled.step,
        "MuonAdamW eager": eager.step,
    }
    if args.device != "cpu" or cpu_has_bf16():
        contestants["torch.optim, as shipped"] = torch_step
    if args.peer is not None:
        settings = {"ns_dtype": runtime.compute_dtype, "compile": True}
        peer = recipe.make_optimizer(load_peer(args.peer), model, recipe.REFERENCE_BATCH, 1, **settings)
        contestants[args.peer] = peer.step
    bandwidth = copy_bandwidth(args.device)
    first = timed(compiled.step, args.device)
    times = {name: [] for name in contestants}
    for round in range(-1, args.rounds):
        for name, run in contestants.items():
            ms = timed(run, args.device)
            if name == "floor":
                ms += 1e3 * traffic / bandwidth
            if round >= 0:
                times[name].append(ms)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"depth {args.depth}: {parameters / 1e6:.1f} M parameters, {runtime.dtype_name}", end=", ")
    print(f"first step, including compilation, {first:.0f} ms")
    result = {"parameters": parameters, "copy_bandwidth": bandwidth, "milliseconds": report(times)}
    if args.profile is not None:
        with profile(with_stack=True) as trace:  # Python's functions name the phases
            compiled.step()
        trace.export_chrome_trace(args.profile)
        read_json(args.profile)  # because the export reports no error, such as a full disk
    return result


def report(times):
    print(f"{'':26} {'median ms':>10} {'spread':>15} {'x floor':>8}")
    rows = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        ratio = statistics.median(v / f for v, f in zip(values, times["floor"], strict=True))
        rows[name] = {"median": median, "low": low, "high": high, "times_floor": ratio}
        print(f"{name:26} {median:10.1f} {low:7.1f}-{high:<7.1f} {ratio:8.2f}")
    return rows


def distributed(args, runtime):
    result = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (args, runtime, folder, result), nprocs=args.world)
    median = result.get()
    print(f"depth {args.depth}, {args.world} ranks, DistMuonAdamW: {median:.1f} ms per step (slowest rank)")
    return {"world": args.world, "milliseconds": median}


def rank_main(rank, args, runtime, folder, result):
    """Time the steps of a rank. The first one puts the median milliseconds of the slowest rank in result."""
    backend = "nccl" if args.device == "cuda" else "gloo"
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        keep_freed_memory()
    torch.set_num_threads(max(1, cores() // args.world))
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=args.world)
    groups = recipe.param_groups(build_model(args, seed=rank), recipe.REFERENCE_BATCH, recipe.REFERENCE_STEPS)
    optimizer = DistMuonAdamW(groups, ns_dtype=runtime.compute_dtype, compile=True)
    times = []
    for _ in range(1 + args.rounds):
        dist.barrier()
        times.append(timed(optimizer.step, args.device))
    slowest = torch.tensor(times[1:], device=args.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        result.put(statistics.median(slowest.tolist()))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads outlive their group, and sometimes abort a normal exit (docs/log.md)


if __name__ == "__main__":
    run_command(main)
