"""The size of a run before it starts: its model, its batch, its number of steps, and what they will take."""

import argparse
from dataclasses import dataclass

import torch

from nanomuon import footprint, parallel, schedule, sizing
from nanomuon.arguments import COMM_DTYPES
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import InputError, Runtime, peak_flops, print0


@dataclass(frozen=True)
class Plan:
    config: GPTConfig
    rows: int  # of a micro-step on a device
    batch: int  # tokens per optimizer step, over all devices
    steps: int
    data_parallel: int  # how many processes see different rows

    @property
    def micro_steps(self) -> int:
        """How many forward and backward passes make an optimizer step."""
        return self.batch // (self.rows * self.config.seq_len * self.data_parallel)

    @property
    def tokens(self) -> int:
        return self.batch * self.steps


def plan_run(args: argparse.Namespace, vocab_size: int, runtime: Runtime, measured: dict) -> Plan:
    """The run that the arguments ask for; what they leave open follows from the depth and the device.

    measured: what sizing.recalled gives. The rows that are found to fit into the device are added to it.
    InputError for a model that cannot be built and for a batch that the processes cannot divide.
    """
    config = model_config(args, vocab_size, runtime)
    data_parallel = parallel.data_parallel_size(runtime.world_size, args.tensor_parallel, config)
    tokens = asked_tokens(args, config)

    if args.device_batch_size is not None:
        rows = args.device_batch_size
    else:
        if "device_batch_size" not in measured:
            measured["device_batch_size"] = choose_rows(args, config, tokens, data_parallel, runtime)
        rows = measured["device_batch_size"]

    micro_batch = rows * config.seq_len * data_parallel  # tokens of a micro-step on all devices
    batch = args.total_batch_size or schedule.total_batch_size(tokens, micro_batch)
    check_batch(batch, rows, config.seq_len, data_parallel)
    return Plan(config, rows, batch, number_of_steps(args, config, batch), data_parallel)


def check_batch(batch: int, rows: int, seq_len: int, data_parallel: int) -> None:
    """InputError where a batch of so many tokens does not divide into micro-steps of so many rows on each of
    the data-parallel processes.
    """
    micro_batch = rows * seq_len * data_parallel
    if batch % micro_batch == 0:
        return
    nearest = " or ".join(str(size) for size in schedule.nearest_batch_sizes(batch, micro_batch))
    raise InputError(
        f"--total-batch-size {batch} is not a multiple of {micro_batch} ({rows} rows x {seq_len} "
        f"tokens x {data_parallel} data-parallel processes); the nearest that are: {nearest}, or change "
        "--device-batch-size; a run that exists goes on with processes that divide its "
        f"{batch // seq_len} rows a step"
    )


def asked_tokens(args: argparse.Namespace, config: GPTConfig) -> int:
    """Tokens that --target-flops pays for, or else that --target-param-data-ratio asks for."""
    model = meta_model(config)
    if args.target_flops is not None:
        return round(args.target_flops / model.estimate_flops())
    counts = model.parameter_counts()
    return schedule.training_tokens(counts["matrices"] + counts["lm_head"], args.target_param_data_ratio)


def number_of_steps(args: argparse.Namespace, config: GPTConfig, batch: int) -> int:
    """Optimizer steps of the run, of `batch` tokens each; InputError where --target-flops pays for none."""
    if args.num_iterations is not None:
        return args.num_iterations
    steps = asked_tokens(args, config) // batch
    if args.target_flops is not None and steps < 1:
        step_flops = batch * meta_model(config).estimate_flops()
        raise InputError(
            f"--target-flops {args.target_flops:g} does not pay for one step: a step of {batch} tokens takes "
            f"{step_flops:.3g}; a smaller --depth or --total-batch-size takes less"
        )
    return max(1, steps)


def model_config(args: argparse.Namespace, vocab_size: int, runtime: Runtime) -> GPTConfig:
    """The model that the arguments ask for. InputError for one that cannot be built."""
    on_gpu = runtime.device.type == "cuda"
    window_pattern = args.window_pattern
    if window_pattern is None:
        window_pattern = "SSSL" if on_gpu else "L"  # on a CPU windows save no time
    try:
        return GPTConfig.from_depth(
            args.depth,
            vocab_size,
            args.max_seq_len or default_context(on_gpu),
            window_pattern=window_pattern,
            qk_norm=not args.no_qk_norm,
            experts=args.experts,
            experts_per_token=args.experts_per_token,
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def default_context(on_gpu: bool) -> int:
    """Tokens of a row where --max-seq-len is not given."""
    return 2048 if on_gpu else 256


def choose_rows(
    args: argparse.Namespace, config: GPTConfig, tokens: int, data_parallel: int, runtime: Runtime
) -> int:
    """Rows of a micro-step on a device that its memory has room for, in a run of `tokens`."""
    row = config.seq_len * data_parallel  # tokens, one row on every device
    if args.total_batch_size:
        most = args.total_batch_size // row
    else:
        # The batch will follow the rows: with a power of two of them it can be a power of two itself
        most = schedule.total_batch_size(tokens, row) // row
        most = 1 << (most.bit_length() - 1)
    return sizing.device_batch_size(config, most, args.shard == "fsdp", args.tensor_parallel, runtime)


def meta_model(config: GPTConfig) -> GPT:
    """The model without memory behind it, for counting."""
    with torch.device("meta"):
        return GPT(config)


def print_plan(args: argparse.Namespace, plan: Plan, runtime: Runtime) -> None:
    """Say how large the run is, and about how much memory and time it takes."""
    config = plan.config
    model = meta_model(config)
    flops = model.estimate_flops()  # per token
    counts = model.parameter_counts()
    total = counts.pop("total")
    by_role = [f"{role} {count / 1e6:.2f}M" for role, count in counts.items() if count]

    devices, kind = runtime.world_size, runtime.device.type
    comm_dtype = COMM_DTYPES[args.comm_dtype]
    ns_dtype = runtime.compute_dtype if kind == "cuda" else None
    layout = footprint.Layout(devices, args.shard == "fsdp", args.tensor_parallel, comm_dtype, ns_dtype)
    memory = footprint.memory_by_kind(config, layout, plan.rows, runtime.compute_dtype.itemsize)
    peak = peak_flops(runtime.device, runtime.compute_dtype)
    if peak is None:
        name = torch.cuda.get_device_name(runtime.device)
        time = f"not known, nor MFU: nanomuon/devices.py has no peak for {name}"
    else:
        seconds = plan.tokens * flops / (0.4 * peak * devices)
        time = f"about {duration(seconds)} at 40% of this device's peak"

    print0(
        f"model      depth {config.depth}, width {config.width}, {config.heads} heads, "
        f"context {config.seq_len}, vocabulary {config.vocab_size}\n"
        f"parameters {total / 1e6:.1f}M: {', '.join(by_role)}\n"
        f"training   {plan.steps} steps x {plan.batch} tokens = {plan.tokens:,} tokens, "
        f"{flops / 1e6:.0f} MFLOP each, {plan.tokens * flops:.3g} FLOPs in all\n"
        f"devices    {devices} x {kind}, {plan.rows} rows x {plan.micro_steps} micro-steps a step\n"
        f"dtype      {runtime.dtype_name} (weights float32)\n"
        f"memory     about {sum(memory.values()) / 2**30:.1f} GB per device\n"
        f"time       {time}"
    )


def duration(seconds: float) -> str:
    """As people say it: 2h05m, or 3m20s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
