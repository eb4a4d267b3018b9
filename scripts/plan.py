"""How much memory a run would take on many GPUs, by kind, and whether it fits.

    python -m scripts.plan --depth 24 --gpus 8
    python -m scripts.plan --depth 64 --gpus 512 --shard fsdp --tensor-parallel 8 --gpu-memory 141

It computes everything from shapes (nanomuon/plan.py), without a GPU, data or weights. `rows` is the
micro-batch: the largest power of two, up to 64, that fits, or 1.
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

from nanomuon import parallel
from nanomuon.command import ArgumentParser, layers, number, run_command
from nanomuon.gpt import GPTConfig
from nanomuon.plan import FILLED, Layout, fewer_rows, memory_by_kind, meta_model
from nanomuon.report import markdown_table

MEMORY = ("weights", "gradients", "state", "activations", "buffers")
CONTEXT, VOCABULARY = 2048, 32768  # base_train's defaults on GPUs
MOST_ROWS = 64


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.plan", __doc__)
    add = parser.add_argument
    add("--depth", type=layers, default=24, help="layers; width and heads follow (default: %(default)s)")
    gpus = number(int, 1, 1 << 16)
    add("--gpus", type=gpus, default=8, help="number of GPUs (default: %(default)s)")
    add("--shard", choices=["none", "fsdp"], help="only this layout (default: compare them)")
    add(
        "--tensor-parallel",
        type=gpus,
        default=1,
        help="GPUs that share a block's matrices (default: %(default)s)",
    )
    add("--gpu-memory", type=number(float, 1, 1e6), default=80, help="GiB per GPU (default: %(default)s)")
    args = parser.parse_args(argv)
    config = GPTConfig.from_depth(args.depth, VOCABULARY, CONTEXT)
    parallel.data_parallel_size(args.gpus, args.tensor_parallel, config)
    total = sum(p.numel() for p in meta_model(config).parameters())
    print(
        f"depth {args.depth}, width {config.width}, {config.heads} heads, context {CONTEXT}, vocabulary "
        f"{VOCABULARY}: {total / 1e6:,.1f}M parameters\n"
        f"{args.gpus} GPUs of {args.gpu_memory:g} GiB, bf16, tensor parallel {args.tensor_parallel}\n"
    )
    table = [["GiB per GPU", "rows", *MEMORY, "total", "fits"]]
    for shard in ("none", "fsdp"):
        if args.shard in (None, shard):
            layout = Layout(args.gpus, shard == "fsdp", args.tensor_parallel)
            table.append(describe(config, layout, args.gpu_memory * 2**30 * FILLED))
    print(markdown_table(table))


def describe(config: GPTConfig, layout: Layout, available: float) -> list[str]:
    """A row of the table. available: bytes."""
    rows = fewer_rows(config, layout, MOST_ROWS, 2, available)
    memory = memory_by_kind(config, layout, rows, 2)
    together = sum(memory.values())
    return [
        "FSDP2" if layout.fsdp else "replicated",
        rows,
        *(f"{memory[kind] / 2**30:.2f}" for kind in MEMORY),
        f"{together / 2**30:.1f}",
        "yes" if together <= available else "no",
    ]


if __name__ == "__main__":
    run_command(main)
