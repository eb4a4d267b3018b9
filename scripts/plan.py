"""What a run would take on many GPUs: memory by kind, communication, Newton-Schulz work, and what fits.

    python -m scripts.plan --depth 24 --gpus 8
    python -m scripts.plan --depth 64 --gpus 512 --shard fsdp --tensor-parallel 8 --gpu-memory 141

Everything is computed from shapes (nanomuon/footprint.py), here and now: no GPU, no data, no weights.
`communicated` is what a GPU sends in an optimizer step, `Newton-Schulz` what it multiplies for Muon; the GPU
that has most of it counts.
"""

import math
from dataclasses import replace

import torch

from nanomuon import footprint, parallel, schedule
from nanomuon.arguments import COMM_DTYPES, ArgumentParser, check_finite, check_length, check_sizes
from nanomuon.footprint import Layout
from nanomuon.gpt import GPTConfig
from nanomuon.planning import check_batch
from nanomuon.runtime import InputError, flag_of, run_command

MEMORY = ("weights", "gradients", "state", "activations", "buffers")
HEADROOM = 0.9  # of the memory; the rest is for the allocator, the libraries and what is not foreseen
DEEPEST = 256
MOST_ROWS = 64
MOST_GPUS = 1 << 16  # every one of them is looked at
GPUS = [2**i for i in range(13)]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.plan", __doc__)
    add = parser.add_argument
    add(
        "--depth",
        type=int,
        default=24,
        help="layers; width, heads and batch follow as in base_train (%(default)s)",
    )
    add("--gpus", type=int, default=8, help="how many (default: %(default)s)")
    add(
        "--shard",
        choices=["none", "fsdp"],
        help="only this layout, with --tensor-parallel (default: compare them)",
    )
    add(
        "--tensor-parallel",
        type=int,
        help="GPUs that share every matrix (default: the most up to 8 that divide "
        "--gpus and the key-value heads; with --shard: 1)",
    )
    add(
        "--comm-dtype",
        default="auto",
        choices=COMM_DTYPES,
        help="dtype in which gradients travel, as in base_train (default: %(default)s)",
    )
    add("--gpu-memory", type=float, default=80, help="GiB of a GPU (default: %(default)s)")
    add(
        "--device-batch-size",
        type=int,
        help="rows per GPU and micro-step (default: the largest power of two that fits)",
    )
    add(
        "--total-batch-size", type=int, help="tokens per optimizer step (default: from the length of the run)"
    )
    add(
        "--experts",
        type=int,
        default=0,
        help="MLPs per layer among which a router picks, 0: one (%(default)s)",
    )
    add("--experts-per-token", type=int, default=2, help="how many it picks (default: %(default)s)")
    add("--max-seq-len", type=int, default=2048, help="context in tokens (default: %(default)s)")
    add("--vocab-size", type=int, default=32768, help="tokens in the vocabulary (default: %(default)s)")
    add(
        "--target-param-data-ratio",
        type=float,
        default=10.5,
        help="training tokens per parameter of the matrices and the head (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    check_finite(args)
    check_sizes(args)
    check_length(args, "target_param_data_ratio")
    for name, value in vars(args).items():
        if isinstance(value, int | float) and value <= 0 and (name, value) != ("experts", 0):
            raise InputError(f"{flag_of(name)} must be above 0, not {value}")
    if args.gpus > MOST_GPUS:
        raise InputError(f"--gpus must be at most {MOST_GPUS}, not {args.gpus}")
    config = model(args, args.depth)
    tensor_parallel = args.tensor_parallel or (1 if args.shard else most_tensor_parallel(args.gpus, config))
    parallel.data_parallel_size(args.gpus, tensor_parallel, config)
    comm_dtype = COMM_DTYPES[args.comm_dtype]
    if args.shard:
        layouts = [Layout(args.gpus, args.shard == "fsdp", tensor_parallel, comm_dtype, torch.bfloat16)]
    else:
        layouts = []
        for n in sorted({1, tensor_parallel}):
            layouts += [Layout(args.gpus, fsdp, n, comm_dtype, torch.bfloat16) for fsdp in (False, True)]
    if args.total_batch_size is not None:
        for layout in layouts:
            check_batch(
                args.total_batch_size, args.device_batch_size or 1, config.seq_len, layout.data_parallel
            )
    parameters = count_parameters(config)
    print(
        f"depth {args.depth}, width {config.width}, {config.heads} heads, context {config.seq_len}, "
        f"vocabulary {config.vocab_size}: {parameters / 1e6:,.1f}M parameters"
    )
    print(f"{args.gpus} GPUs of {args.gpu_memory:g} GiB, bf16\n")
    print_layouts(args, config, layouts)
    print_what_fits(args, layouts)


def model(args, depth: int) -> GPTConfig:
    try:
        return GPTConfig.from_depth(
            depth,
            args.vocab_size,
            args.max_seq_len,
            experts=args.experts,
            experts_per_token=args.experts_per_token,
        )
    except ValueError as error:
        raise InputError(f"--depth {depth}: {error}") from error


def most_tensor_parallel(gpus: int, config: GPTConfig) -> int:
    return max(n for n in (1, 2, 4, 8) if gpus % n == 0 and config.kv_heads % n == 0)


def count_parameters(config: GPTConfig) -> int:
    found, _ = footprint.parameters(config)
    return sum(math.prod(parameter.shape) for parameter in found)


def label(layout: Layout) -> str:
    shard = "fsdp" if layout.fsdp else "replicated (ZeRO-2)"
    return f"{shard} x tp {layout.tensor_parallel}" if layout.tensor_parallel > 1 else shard


def micro_steps(args, config: GPTConfig, layout: Layout, rows: int) -> int:
    """As many as the batch needs."""
    found, groups = footprint.parameters(config)
    visited = config.experts_per_token / (config.experts or 1)
    scaling = config.vocab_size * config.width  # what the length of the run follows: matrices and head
    for parameter in found:
        if groups[parameter.group]["kind"] == "muon":
            is_expert = len(parameter.shape) == 3
            scaling += math.prod(parameter.shape) * (visited if is_expert else 1)
    unit = rows * config.seq_len * layout.data_parallel
    tokens = schedule.training_tokens(scaling, args.target_param_data_ratio)
    batch = args.total_batch_size or schedule.total_batch_size(tokens, unit)
    return max(1, math.ceil(batch / unit))


def fits(args, by_kind: dict) -> bool:
    return footprint.memory(by_kind) <= HEADROOM * args.gpu_memory * 2**30


def print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip())


def most_rows(args, config: GPTConfig, layout: Layout) -> int:
    """The largest power of two up to MOST_ROWS that divides the rows of a step on a GPU, where a batch is
    given.
    """
    rows = MOST_ROWS
    while args.total_batch_size and args.total_batch_size % (rows * config.seq_len * layout.data_parallel):
        rows //= 2
    return rows


def print_layouts(args, config: GPTConfig, layouts: list[Layout]) -> None:
    table = [["GiB on a GPU", "rows", *MEMORY, "together", "fits", "communicated GB", "Newton-Schulz TFLOP"]]
    for layout in layouts:
        rows = args.device_batch_size or most_rows(args, config, layout)
        memory = footprint.memory_by_kind(config, layout, rows, 2)
        while not (fits(args, memory) or args.device_batch_size or rows == 1):
            rows //= 2
            memory = footprint.memory_by_kind(config, layout, rows, 2)
        steps = micro_steps(args, config, layout, rows)
        traffic = footprint.traffic(config, layout, rows, steps, 2)
        gib = [f"{memory[kind] / 2**30:.2f}" for kind in MEMORY]
        together, answer = footprint.memory(memory) / 2**30, "yes" if fits(args, memory) else "no"
        sent, products = traffic["communicated"] / 1e9, traffic["newton_schulz"] / 1e12
        row = [label(layout), str(rows), *gib, f"{together:.1f}", answer, f"{sent:.2f}", f"{products:.2f}"]
        table.append(row)
    print_table(table)


def print_what_fits(args, layouts: list[Layout]) -> None:
    print(f"\nThe deepest model, of even depths up to {DEEPEST}, that fits with one row on a GPU", end=", ")
    print("and its parameters")
    columns = [deepest_by_gpus(args, layout) for layout in layouts]
    table = [["GPUs", *map(label, layouts)]]
    table += [[str(gpus), *row] for gpus, row in zip(GPUS, zip(*columns, strict=True), strict=True)]
    print_table(table)


def deepest_by_gpus(args, layout: Layout) -> list[str]:
    """A cell for each number of GPUs: the deepest model that fits, as `depth (parameters)`."""
    depths = range(2, DEEPEST + 1, 2)
    depths = [depth for depth in depths if model(args, depth).kv_heads % layout.tensor_parallel == 0]
    cells, found = [], 0
    for gpus in GPUS:
        if gpus % layout.tensor_parallel:
            cells.append("-")
            continue
        of_gpus = replace(layout, ranks=gpus)

        def fits_at(index, layout=of_gpus):
            by_kind = footprint.memory_by_kind(model(args, depths[index]), layout, 1, 2, roughly=True)
            return fits(args, by_kind)

        found = last_true(fits_at, len(depths), near=found)  # about where it is with half as many GPUs
        if found < 0:
            cells.append("-")
        else:
            parameters = count_parameters(model(args, depths[found]))
            cells.append(f"{depths[found]} ({parameters / 1e9:.1f}B)")
    return cells


def last_true(holds, count: int, near: int) -> int:
    """The last index below `count` at which `holds` is true, -1 if there is none; it is true up to there.

    From `near` by steps of 1, 2, 4, ... past it, then by halves.
    """
    true, false, step = -1, count, 1
    near = max(near, 0)
    if holds(near):
        true = near
        while true + step < count and holds(true + step):
            true, step = true + step, 2 * step
        false = min(count, true + step)
    else:
        false = near
        while false - step >= 0 and not holds(false - step):
            false, step = false - step, 2 * step
        true = max(-1, false - step)
    while false - true > 1:
        middle = (true + false) // 2
        if holds(middle):
            true = middle
        else:
            false = middle
    return true


if __name__ == "__main__":
    run_command(main)
