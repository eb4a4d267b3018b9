"""Time optimizer steps on a model's real shapes, beside the floor: the same products alone, plus the bytes.

    python -m scripts.optim_bench --depth 8                        # one process, all contestants
    python -m scripts.optim_bench --depth 8 --dtype float32        # where the CPU would take bf16
    python -m scripts.optim_bench --depth 8 --world 2              # the distributed step and its bytes
    python -m scripts.optim_bench --peer my_optim:MyOptimizer --json bench.json  # my_optim.py of this folder

The contestants run in turn, round after round, so that a busy machine slows all of them; medians, the spread
(half of the rounds lie within it) and the median of the ratio to the floor in the same round are printed.
Floor: the products of Newton-Schulz in the form and dtype that the optimizer takes (see orthogonalize), into
buffers that exist, plus 20 bytes per float32 Muon parameter (gradient read; momentum and parameter read and
written) and 28 per AdamW parameter at the bandwidth of a large copy. torch.optim as shipped iterates in bf16
on every device; a CPU without instructions for it, which would take minutes a step, leaves that row out.
"""

import contextlib
import importlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanomuon import sizing
from nanomuon.arguments import COMM_DTYPES, ArgumentParser, add_dtype_argument, check_sizes
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import Bank, DistMuonAdamW, MuonAdamW
from nanomuon.orthogonalize import newton_schulz_form
from nanomuon.param_groups import build_param_groups
from nanomuon.runtime import (
    InputError,
    Runtime,
    check_at_least_1,
    check_output_file,
    cores,
    keep_freed_memory,
    run_command,
    usable_gpus,
)

NS_STEPS = 5


def main(argv=None):
    parser = ArgumentParser("python -m scripts.optim_bench", __doc__)
    add = parser.add_argument
    add("--depth", type=int, default=8, help="model size, as in base_train (default: %(default)s)")
    add("--vocab-size", type=int, default=8192, help="rows of the embeddings (default: %(default)s)")
    add(
        "--rounds", type=int, default=7, help="measured rounds after one that warms up (default: %(default)s)"
    )
    add("--world", type=int, default=1, help="processes: the distributed step instead of the comparison")
    add(
        "--comm-dtype",
        default="auto",
        choices=COMM_DTYPES,
        help="with --world: dtype in which gradients travel, as in base_train (default: %(default)s)",
    )
    add(
        "--peer",
        metavar="MODULE:CLASS",
        help="another optimizer that takes the same param groups; my_optim:MyOptimizer is the class of this "
        "name in my_optim.py in the current folder, or in an installed package my_optim",
    )
    add("--device", choices=["cuda", "cpu"], help="default: cuda where there is a GPU")
    add_dtype_argument(parser)
    add("--json", help="also write the numbers to this file")
    args = parser.parse_args(argv)
    check_sizes(args)
    check_at_least_1(args, "rounds", "world")
    args.device = choose_device(args.device, args.world)
    if args.json is not None:
        check_output_file("--json", args.json)
    peer = None
    if args.peer is not None:
        if args.world > 1:
            raise InputError("--peer is compared in one process: leave out --world")
        peer = load_peer(args.peer)
    native = torch.bfloat16 if args.device == "cuda" else torch.float32
    if args.device == "cpu":
        keep_freed_memory()  # as in a training run
    runtime = sizing.choose_dtype(args.dtype, Runtime(torch.device(args.device), native), {})
    result = distributed(args, runtime) if args.world > 1 else compare(args, runtime, peer)
    result["dtype"] = runtime.dtype_name
    result["machine"] = dict(
        device=torch.cuda.get_device_name() if args.device == "cuda" else f"{cores()} CPU cores",
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result, indent=1))


def choose_device(asked, processes):
    """cuda or cpu, as asked for, None: whether or not; InputError where there are too few GPUs for it."""
    if asked == "cpu":
        return "cpu"
    gpus = usable_gpus()
    if asked is None and not gpus:
        return "cpu"
    if gpus < processes:
        raise InputError(f"--device cuda: {gpus} GPUs for {processes} processes; --device cpu needs none")
    return "cuda"


def load_peer(peer):
    """The class of MODULE:CLASS; InputError where there is none."""
    module_name, _, class_name = peer.partition(":")
    if not module_name or not class_name:
        raise InputError(f"--peer {peer}: it is MODULE:CLASS, such as my_optim:MyOptimizer")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"--peer {peer}: {error}, neither in the current folder, {os.getcwd()}, nor installed"
        ) from error
    except Exception as error:  # of a stranger's code
        raise InputError(f"--peer {peer}: {type(error).__name__} on importing it: {error}") from error
    found = getattr(module, class_name, None)
    if not callable(found):
        raise InputError(f"--peer {peer}: the module has no class {class_name}")
    return found


def step_of_peer(name, peer, groups):
    """step() of a peer's optimizer for these groups; InputError where it cannot be built."""
    own_groups = [dict(group) for group in groups]  # torch's optimizers add their defaults to them
    try:
        return peer(own_groups).step
    except Exception as error:  # of a stranger's code
        message = f"--peer {name}: {type(error).__name__} on building it of param groups: {error}"
        raise InputError(message) from error


def model_groups(args, seed=0):
    """Param groups of a real model with random values, and a gradient for every parameter."""
    with torch.device("meta"):
        model = GPT(GPTConfig.from_depth(args.depth, vocab_size=args.vocab_size, seq_len=128))
    model.to_empty(device=args.device)
    generator = torch.Generator(args.device).manual_seed(seed)
    for param in model.parameters():
        param.data.normal_(0, 0.02, generator=generator)
        param.grad = torch.randn(param.shape, device=args.device, generator=generator)
    return build_param_groups(
        model,
        muon=dict(lr=1e-3, momentum=0.95, ns_steps=NS_STEPS, beta2=0.95, weight_decay=0.1),
        adamw=dict(lr=1e-4, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0),
        skip_keys=["value_gate"],
    )


def timed(run, device):
    """Milliseconds of one call, the queue of the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def copy_bandwidth(device):
    """Bytes read and written per second by a copy of 256 MB."""
    source, target = (torch.ones(2**26, device=device) for _ in range(2))
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source), device) for _ in range(5)) * 1e3


def muon_banks(optimizer):
    """The banks of one of ours; of another optimizer we know no products."""
    return [work for work in getattr(optimizer, "works", []) if isinstance(work, Bank)]


def products(optimizer, device):
    """A function that makes the products of every Muon bank and nothing else."""
    calls = []
    for bank in muon_banks(optimizer):
        k, (short, long) = bank.batches[0][1], sorted(bank.shape)
        gram, dtype = newton_schulz_form(short, long, NS_STEPS, device, optimizer.ns_dtype)
        X, Y = (torch.randn(k, short, long, device=device, dtype=dtype) / long for _ in range(2))
        A, B = (torch.randn(k, short, short, device=device, dtype=dtype) / short for _ in range(2))
        # The long side is touched 4 times in Gram form (2 products to R, 2 from Q), twice a step in the plain
        # one
        sides, shorts = (4, 14) if gram else (2 * NS_STEPS, NS_STEPS)
        for _ in bank.batches:
            calls += [(X, X.mT, A), (A, X, Y)] * (sides // 2) + [(A, A, B)] * shorts

    def run():
        for left, right, out in calls:
            torch.bmm(left, right, out=out)

    return run


@contextlib.contextmanager
def compilation(on):
    with mock.patch.dict(os.environ, NANOMUON_COMPILE="1" if on else "0"):
        yield


class TorchMuonAdamW:
    """torch.optim.Muon and fused torch.optim.AdamW. Muon takes 2-D parameters and iterates in bf16;
    float32=True makes that cast the identity.
    """

    def __init__(self, groups, float32):
        muon = [p for g in groups if g["kind"] == "muon" for p in g["params"]]
        adamw = [p for g in groups if g["kind"] == "adamw" for p in g["params"]]
        self.parts = [torch.optim.Muon(muon, lr=1e-3, weight_decay=0.1)] if muon else []
        self.parts += [torch.optim.AdamW(adamw, lr=1e-4, fused=True)] if adamw else []
        self.float32 = float32

    def step(self):
        cast = (
            mock.patch.object(torch.Tensor, "bfloat16", lambda t: t)
            if self.float32
            else contextlib.nullcontext()
        )
        with cast:
            for part in self.parts:
                part.step()


def compare(args, runtime, peer):
    groups = model_groups(args)
    bandwidth = copy_bandwidth(args.device)
    tables = {}
    for part, chosen in (
        ("Muon", [g for g in groups if g["kind"] == "muon"]),
        ("AdamW", [g for g in groups if g["kind"] == "adamw"]),
        ("whole step", groups),
    ):
        ours = MuonAdamW(chosen, ns_dtype=runtime.compute_dtype)
        multiply = products(ours, args.device)
        traffic = sum((20 if g["kind"] == "muon" else 28) * p.numel() for g in chosen for p in g["params"])
        torchs, torchs32 = TorchMuonAdamW(chosen, False), TorchMuonAdamW(chosen, True)

        def step(compiled, optimizer=ours):
            with compilation(compiled):
                optimizer.step()

        contestants = {
            "floor": multiply,
            "MuonAdamW compiled": lambda step=step: step(True),
            "MuonAdamW eager": lambda step=step: step(False),
            "torch.optim, float32": torchs32.step,
        }
        if args.device != "cpu" or sizing.cpu_has_bf16():
            contestants["torch.optim, as shipped"] = torchs.step
        if runtime.compute_dtype != torch.float32:
            float32 = MuonAdamW(chosen, ns_dtype=torch.float32)
            contestants["float32's floor"] = products(float32, args.device)
        if peer is not None:
            contestants[args.peer] = step_of_peer(args.peer, peer, chosen)
        first = timed(contestants["MuonAdamW compiled"], args.device)
        times = {name: [] for name in contestants}
        for round in range(-1, args.rounds):
            for name, run in contestants.items():
                ms = timed(run, args.device)
                if name.endswith("floor"):
                    ms += 1e3 * traffic / bandwidth
                if round >= 0:
                    times[name].append(ms)
        tables[part] = report(part, times, first)
    flops = sum(len(bank.matrices) * bank.direction.flops(*bank.shape) for bank in muon_banks(ours))
    parameters = sum(p.numel() for g in groups for p in g["params"])
    print(f"\ndepth {args.depth}: {parameters / 1e6:.1f} M parameters, {runtime.dtype_name}", end=", ")
    print(f"Newton-Schulz {flops / 1e9:.1f} GFLOP a step")
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s, {args.rounds} rounds")
    return dict(
        depth=args.depth, parameters=parameters, flops=flops, copy_bandwidth=bandwidth, milliseconds=tables
    )


def report(part, times, first):
    print(f"\n{part:24} {'median ms':>10} {'spread':>15} {'x floor':>8}")
    rows = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        ratio = statistics.median(v / f for v, f in zip(values, times["floor"], strict=True))
        rows[name] = dict(median=median, low=low, high=high, times_floor=ratio)
        print(f"{name:24} {median:10.1f} {low:7.1f}-{high:<7.1f} {ratio:8.2f}")
    print(f"{'first step, compiling':24} {first:10.1f}")
    return dict(rows, first_step=first)


class SentBytes(TorchDispatchMode):
    """Bytes one rank sends through collectives by the usual ring algorithms: (W-1)/W of the whole, twice for
    all_reduce."""

    total = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith("c10d."):
            whole = max((t.nbytes for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)), default=0)
            world = dist.get_world_size()
            self.total += whole * (world - 1) / world * (2 if "allreduce" in name else 1)
        return function(*args, **(kwargs or {}))


def distributed(args, runtime):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (args, runtime, folder), nprocs=args.world)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(args.world)]
    times = [rank["times"] for rank in ranks]
    slowest = [max(of_a_round) for of_a_round in zip(*times, strict=True)]
    median, sent, parameters = statistics.median(slowest), ranks[0]["bytes"], ranks[0]["parameters"]
    print(f"\n{args.world} ranks, depth {args.depth}, DistMuonAdamW compiled", end=": ")
    print(f"{median:.1f} ms a step (slowest rank)")
    share = sent / parameters / 4
    print(f"bytes sent per rank and step: {sent / 1e6:.1f} MB, {share:.3f} times the parameters' bytes")
    return dict(
        depth=args.depth, world=args.world, milliseconds=median, bytes_per_rank=sent, parameters=parameters
    )


def rank_main(rank, args, runtime, folder):
    backend = "nccl" if args.device == "cuda" else "gloo"
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        keep_freed_memory()
    torch.set_num_threads(max(1, cores() // args.world))
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=args.world)
    groups = model_groups(args, seed=rank)
    comm_dtype = COMM_DTYPES[args.comm_dtype]
    optimizer = DistMuonAdamW(groups, comm_dtype=comm_dtype, ns_dtype=runtime.compute_dtype)
    with compilation(False), SentBytes() as sent:
        optimizer.step()
    times = []
    for round in range(-1, args.rounds):
        dist.barrier()
        ms = timed(optimizer.step, args.device)
        if round >= 0:
            times.append(ms)
    parameters = sum(p.numel() for g in groups for p in g["params"])
    Path(folder, f"{rank}.json").write_text(
        json.dumps(dict(times=times, bytes=sent.total, parameters=parameters))
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
