"""Time the parts of a training step, and its floor: only the matrix products.

    python -m scripts.train_bench --depth 4 --total-batch-size 4096   # takes base_train's flags
    python -m scripts.train_bench --depth 12 --window-pattern SSSL --json step.json

base_train's flags for the launch, evaluations and checkpoints have no effect; those for the length can only
change the default batch.

Step and floor alternate in every round, so a busy machine slows both. It prints medians, the spread (half of
the rounds lie within it) and the median ratio to the floor of the same round. The floor is the time of the
batch's training FLOPs at the speed of the MLP's first product, measured in every round, plus that of
Newton-Schulz's products. The first step compiles; TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) makes it start from an
empty cache.
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

import itertools

import torch

from nanomuon import parallel, report, shards
from nanomuon.attention import kernels_in_use, use_flash_attention
from nanomuon.command import count, output_file, run_command
from nanomuon.corpus import check_corpus, open_corpus
from nanomuon.dataloader import TrainLoader
from nanomuon.plan import choose_compilation, make_plan, peak_flops, product_timer
from nanomuon.qk_clip import watch_
from nanomuon.run import build_optimizer
from nanomuon.runtime import (
    InputError,
    make_deterministic,
    start,
    timed,
    write_json,
)
from nanomuon.settings import make_parser
from scripts import base_train, optim_bench


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("python -m scripts.train_bench", __doc__)
    rounds = "rounds after a warm-up (default: %(default)s)"
    parser.add_argument("--rounds", type=count, default=7, help=rounds)
    parser.add_argument("--json", type=output_file, help="also write the numbers to this file")
    args = parser.parse_args(argv)
    check_corpus(args.corpus)
    if args.deterministic:
        make_deterministic()
    runtime = start(args.dtype)
    if runtime.world_size > 1 or args.shard != "none" or args.tensor_parallel > 1:
        raise InputError(
            "train_bench measures a single process: leave out torchrun, --shard and --tensor-parallel"
        )
    result = step_table(args, runtime)
    result["machine"] = dict(description=report.machine_description(), threads=torch.get_num_threads())
    if args.json is not None:
        write_json(args.json, result)


def step_table(args, runtime):
    """Print and return the milliseconds of the parts of base_train's step, and of the floor."""
    device = runtime.device
    corpus = open_corpus(args.corpus, args.text_field, args.skip_unreadable)
    data = shards.shards_for_training(corpus, args.vocab_size)
    use_flash_attention(device, runtime.compute_dtype)
    plan = make_plan(args, runtime)
    config = plan.config
    batch, rows = plan.batch, plan.batch // config.seq_len
    model = parallel.build_model(config, runtime, args.seed)
    compiles = not args.no_compile and choose_compilation(device)
    optimizer, schedule = build_optimizer(args, model, plan, runtime, compiles)
    initial_groups = [dict(group) for group in optimizer.param_groups]
    loader = TrainLoader(data, config.seq_len, rows, plan.rows, 0, 1, args.seed, device)
    speed = product_timer(config, plan.rows, runtime)
    newton_schulz = optim_bench.products(optimizer, device.type)
    if args.qk_clip:
        watch_(model, args.qk_clip)
    forward = parallel.compile_model(model, None) if compiles else model
    times = {name: [] for name in ("floor", "data", "forward", "backward", "optimizer", "whole step")}

    def one_step():
        """{part: milliseconds} of one step and its floor. backward includes whatever is in no other part."""
        spent = dict.fromkeys(times, 0.0)

        def timing(part, work):
            """A function that does the work, and adds the time it took to its part."""

            def call(*inputs):
                results = []
                spent[part] += timed(lambda: results.append(work(*inputs)), device.type)
                return results[0]

            return call

        base_train.set_hyperparameters(optimizer, schedule, initial_groups, 0, plan.steps)
        batches = map(timing("data", next), itertools.repeat(loader))
        timed_forward = timing("forward", forward)
        done = base_train.training_step(
            model, timed_forward, optimizer, batches, plan.micro_steps, None, args.qk_clip
        )
        spent["whole step"], spent["optimizer"] = done.milliseconds, done.optimizer_ms
        spent["backward"] = done.milliseconds - spent["data"] - spent["forward"] - done.optimizer_ms
        products = 1000 * batch * plan.flops_per_token / speed()
        spent["floor"] = products + timed(newton_schulz, device.type)
        return spent

    first = one_step()["whole step"]  # compiles
    one_step()  # warms up
    for _ in range(args.rounds):
        for name, milliseconds in one_step().items():
            times[name].append(milliseconds)

    print(f"depth {config.depth}, {rows} x {config.seq_len} tokens, first step {first:.0f} ms")
    print(f"attention: {kernels_in_use()}, window pattern {config.window_pattern}")
    table = optim_bench.report(times)
    seconds = table["whole step"]["median"] / 1e3
    result = dict(
        depth=config.depth,
        tokens=batch,
        milliseconds=table,
        compile_seconds=first / 1e3 - seconds,
        tokens_per_second=batch / seconds,
        peak_memory_mb=report.peak_memory_mb(device),
    )
    print(f"{runtime.dtype_name}: {batch / seconds:,.0f} tokens/s", end=", ")
    print(f"peak memory {result['peak_memory_mb']:,} MB")
    peak = peak_flops(device)
    if peak is not None:
        result["mfu"] = plan.flops_per_token * batch / seconds / peak
        print(f"MFU {100 * result['mfu']:.1f}%")
    return result


if __name__ == "__main__":
    run_command(main)
