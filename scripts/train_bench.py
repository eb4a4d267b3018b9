"""Time the parts of a training step, beside the floor: its matrix products alone.

    python -m scripts.train_bench --depth 4 --total-batch-size 4096      # the flags of base_train, and those below
    python -m scripts.train_bench --depth 12 --window-pattern SSSL --json step.json
    python -m scripts.train_bench --depth 4 --attention                  # the attention backends of this device

Step and floor run in turn, round after round, so that a busy machine slows both; medians, the spread (half of
the rounds lie within it) and the median of the ratio to the floor in the same round are printed. Floor: the
products of every Linear, forward and backward, those of attention with as many keys as a query sees on
average, and those of Newton-Schulz, with the step's shapes and dtypes, into buffers that exist. The time to
compile is that of the first step; TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) starts from an empty cache.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanomuon import attention, parallel, report, shards, sizing
from nanomuon.dataloader import TrainLoader
from nanomuon.runtime import (
    InputError,
    check_at_least_1,
    compile_enabled,
    peak_flops,
    peak_memory_mb,
    run_command,
    start,
)
from nanomuon.tokenizer import Tokenizer
from scripts import base_train, optim_bench


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_bench",
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-h", "--help", action="store_true", help="show these flags, then those of base_train"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds after one to warm up (default: %(default)s)"
    )
    parser.add_argument("--attention", action="store_true", help="compare the attention backends instead")
    parser.add_argument("--json", help="also write the numbers to this file")
    own, rest = parser.parse_known_args(argv)
    if own.help:
        parser.print_help()
        rest = ["--help"]
    check_at_least_1(own, "rounds")
    args = base_train.parse_arguments(rest, {})
    base_train.check_arguments(args)
    args.compile = args.compile is not False  # no run to end sooner
    base_train.choose_compilation(args)
    runtime = start()
    if runtime.world_size > 1:
        raise InputError("train_bench measures one process; start it without torchrun")
    result = (attention_table if own.attention else step_table)(args, own.rounds, runtime)
    result["machine"] = dict(description=report.machine_description(), threads=torch.get_num_threads())
    if own.json:
        Path(own.json).write_text(json.dumps(result, indent=1))


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
            left, right, into = map(self.buffer, range(3), (*args, out))
            self.calls.append((function.overloadpacket, (left, right), dict(out=into)))
        elif function.namespace == "nanomuon":  # products by expert (moe.py), whose sizes are data
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
        queries, seen = (
            like.new_ones(rows * config.heads, n, D) for n in (T, keys)
        )  # q, dq or out; k, v, dk or dv
        scores = like.new_ones(rows * config.heads, T, keys)
        onto_scores, onto_queries = (queries, seen.mT, scores), (scores, seen, torch.empty_like(queries))
        onto_keys = scores.mT, queries, torch.empty_like(seen)
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
    data = shards.prepare_for_training(args.corpus, args.vocab_size, tokens=10**8)  # more than it reads
    plan = base_train.plan_run(args, Tokenizer.load(data / "tokenizer").vocab_size, runtime, measured := {})
    config = sizing.choose_attention(plan.config, plan.rows, 1, runtime, measured, True, args.compile)
    batch, rows = plan.batch, plan.batch // config.seq_len
    model = parallel.build_model(config, runtime, args.seed)
    optimizer, _ = base_train.build_optimizer(args, model, batch, runtime)
    loader = TrainLoader(data, config.seq_len, rows, plan.rows, 0, 1, args.seed, runtime.device)
    products = model_products(model, next(loader)[0])
    newton_schulz = optim_bench.products(optimizer, runtime.device.type)
    compiled = torch.compile(model, dynamic=False) if compile_enabled() else model
    micro_steps = rows // plan.rows
    times = {
        name: [] for name in ("floor", "data", "forward", "backward", "optimizer", "logging", "whole step")
    }

    with tempfile.TemporaryDirectory() as folder:
        log = report.MetricsLog(Path(folder, "metrics.jsonl"), None, None)
        for round in range(-2, rounds):
            spent = dict.fromkeys(times, 0.0)

            def timed(name, work, spent=spent):
                def run():
                    nonlocal result
                    result = work()

                result = None
                spent[name] += optim_bench.timed(run, runtime.device.type)
                return result

            for _ in range(micro_steps):
                tokens, targets = timed("data", lambda: next(loader))
                loss = timed("forward", lambda t=tokens, y=targets: compiled(t, y) / micro_steps)
                timed("backward", loss.backward)
                timed("floor", products.run)
            timed("optimizer", lambda: (optimizer.step(), optimizer.zero_grad(set_to_none=True)))
            timed(
                "logging", lambda loss=loss: log.log({"step": 1, "tokens": batch, "train_loss": loss.item()})
            )
            timed("floor", newton_schulz)
            spent["whole step"] = sum(spent.values()) - spent["floor"]
            if round == -2:
                first = spent["whole step"]
            elif round >= 0:
                for name, value in spent.items():
                    times[name].append(value)
        log.close()

    title = f"depth {config.depth}, {rows} x {config.seq_len} tokens"
    rows = optim_bench.report(title, times, first)
    seconds = rows["whole step"]["median"] / 1e3
    result = dict(
        depth=config.depth,
        tokens=batch,
        milliseconds=rows,
        compile_seconds=first / 1e3 - seconds,
        tokens_per_second=batch / seconds,
        peak_memory_mb=peak_memory_mb(runtime.device),
    )
    print(f"{batch / seconds:,.0f} tokens/s, peak memory {result['peak_memory_mb']:,} MB")
    if runtime.device.type == "cuda" and (peak := peak_flops(runtime.device)):
        result["mfu"] = model.estimate_flops() * batch / seconds / peak
        print(f"MFU {100 * result['mfu']:.1f}%")
    return result


def attention_table(args, rounds, runtime):
    """Print and return milliseconds of every attention backend at the model's shape, forward and backward."""
    plan = base_train.plan_run(args, args.vocab_size or shards.default_vocab_size(args.corpus), runtime, {})
    config = plan.config
    shape = plan.rows, config.seq_len, config.heads, config.kv_heads, config.head_dim
    windows = [None, max(1, config.seq_len // 2)]
    results = attention.measure(*shape, windows, runtime.device, runtime.compute_dtype, args.compile, rounds)
    print("{} rows x {} tokens, {} heads, {} for keys, of {} channels".format(*shape))
    table = {}
    for implementation, rows in results.items():
        for window, row in rows.items():
            for backend, ms in row.items():
                name = " ".join(
                    filter(None, (backend, implementation, f"window {window}" if window else "full"))
                )
                table[name] = ms
                print(f"{name:24} {ms}" if isinstance(ms, str) else f"{name:24} {ms:8.2f} ms")
    return dict(attention=table)


if __name__ == "__main__":
    run_command(main)
