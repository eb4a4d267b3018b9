"""Time the parts of a training step, beside the floor: its matrix products alone.

    python -m scripts.train_bench --depth 4 --total-batch-size 4096   # the flags of base_train, and a few
    python -m scripts.train_bench --depth 12 --window-pattern SSSL --json step.json

Step and floor run in turn, round after round, so that a busy machine slows both; medians, the spread (half of
the rounds lie within it) and the median of the ratio to the floor in the same round are printed. Floor: the
products of every Linear, forward and backward, those of attention with as many keys as a query sees on
average, and those of Newton-Schulz, with the step's shapes and dtypes, into buffers that exist. With --fp8
the floor, and the peak that MFU is a share of, stay those of a step without it. The time to compile is that
of the first step; TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) starts from an empty cache.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanomuon import fp8, parallel, recipe, report, shards, sizing, user_file
from nanomuon.arguments import ArgumentParser, add_step_arguments
from nanomuon.compilation import choose_compilation, compile_model
from nanomuon.corpus import check_corpus
from nanomuon.dataloader import TrainLoader
from nanomuon.planning import plan_run
from nanomuon.runtime import (
    InputError,
    check_at_least_1,
    check_output_file,
    compile_enabled,
    make_deterministic,
    peak_flops,
    peak_memory_mb,
    run_command,
    start,
)
from nanomuon.tokenizer import Tokenizer
from scripts import base_train, optim_bench


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(
        "python -m scripts.train_bench",
        __doc__,
        allow_abbrev=False,
        epilog="The other flags of base_train are taken too; they change nothing here.",
    )
    add = parser.add_argument
    add("--rounds", type=int, default=7, help="rounds after one to warm up (default: %(default)s)")
    add("--json", help="also write the numbers to this file")
    add_step_arguments(parser)
    args, others = parser.parse_known_args(argv)
    base_train_parser = base_train.make_parser()
    base_train_parser.prog = parser.prog
    of_base_train = base_train_parser.parse_args(others)  # ends here where it knows them neither
    return argparse.Namespace(**{**vars(of_base_train), **vars(args)})


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    check_at_least_1(args, "rounds")
    base_train.check_arguments(args)
    if args.json is not None:
        check_output_file("--json", args.json)
    check_corpus(args.corpus)
    if args.deterministic:
        make_deterministic()
    runtime = sizing.choose_dtype(args.dtype, start(), {})
    if args.compile is None and runtime.device.type == "cpu":
        args.compile = True  # no run to end sooner
    choose_compilation(args, runtime.device.type)
    if runtime.world_size > 1:
        raise InputError("train_bench measures one process; start it without torchrun")
    if args.fp8:
        fp8.check(runtime, args.tensor_parallel)
    result = step_table(args, args.rounds, runtime)
    result["machine"] = dict(description=report.machine_description(), threads=torch.get_num_threads())
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result, indent=1))


class Products(TorchDispatchMode):
    """Collects operands like those of every matrix product that runs: `calls` holds (function, operands,
    out).
    """

    def __init__(self):
        super().__init__()
        self.calls, self.buffers = [], {}

    def buffer(self, role, like):
        """One tensor for all operands of a role with these shapes, strides and dtypes."""
        key = role, like.shape, like.stride(), like.dtype
        if key not in self.buffers:
            self.buffers[key] = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            ).normal_()
        return self.buffers[key]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            left, right = args
            operands = (self.buffer("left", left), self.buffer("right", right))
            self.calls.append((function.overloadpacket, operands, dict(out=self.buffer("out", out))))
        elif "grouped" in str(function):  # products by expert (moe.py), whose sizes are data
            self.calls.append((function, args, {}))
        return out

    @torch.no_grad()
    def run(self):
        for multiply, operands, out in self.calls:
            multiply(*operands, **out)


def attention_products(config, rows, like):
    """Calls as of Products: 2 forward and 4 backward for every layer, all heads of `rows` rows at once."""
    calls, T, D = [], config.seq_len, config.head_dim
    for layer in range(config.depth):
        window = config.window(layer) or T
        keys = max(1, sum(min(i + 1, window) for i in range(T)) // T)
        queries = like.new_ones(rows * config.heads, T, D)  # q, dq or out
        seen = like.new_ones(rows * config.heads, keys, D)  # k, v, dk or dv
        scores = like.new_ones(rows * config.heads, T, keys)
        onto_scores = (queries, seen.mT, scores)
        onto_queries = (scores, seen, torch.empty_like(queries))
        onto_keys = (scores.mT, queries, torch.empty_like(seen))
        for left, right, out in (onto_scores, onto_queries, onto_keys) * 2:
            calls.append((torch.bmm, (left, right), dict(out=out)))
    return calls


def model_products(model, tokens):
    """The Products of a forward and backward pass of a model, not compiled, on tokens (B, T)."""
    products = Products()
    with products:
        model(tokens, tokens).backward()
    model.zero_grad(set_to_none=True)
    products.calls += attention_products(model.config, len(tokens), model.cos.to(model.compute_dtype))
    return products


def step_table(args, rounds, runtime):
    """Print and return milliseconds of the parts of base_train's step and of the floor."""
    device = runtime.device
    build = recipe.param_groups
    if args.optimizer_file:
        build, _ = user_file.load_recipe(args.optimizer_file)
    data = shards.prepare_for_training(args.corpus, args.vocab_size, tokens=10**8)  # more than it reads
    measured = {}
    plan = plan_run(args, Tokenizer.load(data / "tokenizer").vocab_size, runtime, measured)
    config = sizing.choose_attention(plan.config, plan.rows, 1, runtime, measured, True, args.compile)
    batch, rows = plan.batch, plan.batch // config.seq_len
    model = parallel.build_model(config, runtime, args.seed)
    optimizer = user_file.make_optimizer(build, model, batch, plan.steps, ns_dtype=runtime.compute_dtype)
    loader = TrainLoader(data, config.seq_len, rows, plan.rows, 0, 1, args.seed, device)
    products = model_products(model, next(loader)[0])
    if args.fp8:
        fp8.train_in_fp8(model)
    newton_schulz = optim_bench.products(optimizer, device.type)
    forward = compile_model(model, None) if compile_enabled() else model
    parts = ("floor", "data", "forward", "backward", "optimizer", "logging")
    times = {name: [] for name in (*parts, "whole step")}

    def update():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def one_step(log):
        """{part: milliseconds} of one step, whose floor is made in between."""
        spent = dict.fromkeys(parts, 0.0)

        def timed(part, work, *inputs):
            def run():
                results.append(work(*inputs))

            results = []
            spent[part] += optim_bench.timed(run, device.type)
            return results[0]

        for _ in range(plan.micro_steps):
            tokens, targets = timed("data", next, loader)
            loss = timed("forward", lambda t, y: forward(t, y) / plan.micro_steps, tokens, targets)
            timed("backward", loss.backward)
            timed("floor", products.run)
        timed("optimizer", update)
        timed("logging", lambda: log.log({"step": 1, "tokens": batch, "train_loss": loss.item()}))
        timed("floor", newton_schulz)
        spent["whole step"] = sum(spent.values()) - spent["floor"]
        return spent

    with tempfile.TemporaryDirectory() as folder:
        log = report.MetricsLog(Path(folder, "metrics.jsonl"), None, None)
        first = one_step(log)["whole step"]  # compiles
        one_step(log)  # warms up
        for _ in range(rounds):
            for name, milliseconds in one_step(log).items():
                times[name].append(milliseconds)
        log.close()

    print(f"depth {config.depth}, {rows} x {config.seq_len} tokens, first step {first:.0f} ms")
    table = optim_bench.report(times)
    seconds = table["whole step"]["median"] / 1e3
    result = dict(
        depth=config.depth,
        tokens=batch,
        milliseconds=table,
        compile_seconds=first / 1e3 - seconds,
        tokens_per_second=batch / seconds,
        peak_memory_mb=peak_memory_mb(device),
    )
    print(f"{runtime.dtype_name}: {batch / seconds:,.0f} tokens/s", end=", ")
    print(f"peak memory {result['peak_memory_mb']:,} MB")
    if device.type == "cuda":
        peak = peak_flops(device)
        if peak is None:
            print(f"MFU not known: nanomuon/devices.py has no peak for {torch.cuda.get_device_name(device)}")
        else:
            result["mfu"] = model.estimate_flops() * batch / seconds / peak
            print(f"MFU {100 * result['mfu']:.1f}%")
    return result


if __name__ == "__main__":
    run_command(main)
