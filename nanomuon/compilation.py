"""Whether a run compiles its model and its optimizer, and compiling the model.

The answer is in args.compile: True, False, or None where it is decided after a few eager steps, on CPUs. What
runs kernels asks the environment (runtime.compile_enabled), which follows it.
"""

import argparse
import os
from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from nanomuon import head_loss, schedule
from nanomuon.gpt import GPT
from nanomuon.planning import Plan, duration
from nanomuon.runtime import InputError, Runtime, compile_enabled, missing_compiler, print0, together


def choose_compilation(args: argparse.Namespace, device_type: str) -> None:
    """Set args.compile: what the environment says counts first, then the flag.

    Undecided compiles at once on CUDA, where it always pays, and starts eagerly on a CPU. There it stays
    eager with --deterministic: the step at which it would compile depends on how fast the machine is today.
    InputError where a GPU has no compiler: hours of GPUs are not to be spent on eager steps unasked.
    """
    if "NANOMUON_COMPILE" in os.environ:
        args.compile = compile_enabled()
    missing = missing_compiler(device_type)
    if missing is not None and device_type == "cuda" and args.compile is None:
        raise InputError(f"no {missing}; --no-compile trains without, which is slower, --compile tries it")
    if missing is not None and device_type != "cuda" and args.compile is not False:
        print0(f"no {missing}: running eagerly, which is slower")
        args.compile = False
    if args.compile is None and (device_type == "cuda" or args.deterministic):
        args.compile = device_type == "cuda"
    os.environ["NANOMUON_COMPILE"] = "1" if args.compile else "0"


def decide_compilation(
    args: argparse.Namespace, plan: Plan, step: int, eager_ms: float, runtime: Runtime
) -> None:
    """Set args.compile: whether the run ends sooner if it compiles after `step`. Called by all ranks.

    eager_ms: milliseconds of an eager step, of which the slowest rank's counts, so that all decide the same.
    """
    seconds = max(together(lambda: eager_ms)) / 1000
    left = plan.steps - step
    costs, saves = schedule.compilation(runtime.device.type, plan.config.depth, left * seconds)
    args.compile = costs < saves
    if args.compile:
        os.environ["NANOMUON_COMPILE"] = "1"
    print0(
        f"{'compiling' if args.compile else 'staying eager'}: to compile takes about {duration(costs)} and "
        f"saves about {duration(saves)} in {left} steps (--compile and --no-compile decide it)"
    )


def compile_model(model: GPT, mesh: DeviceMesh | None, backend: str | Callable = "inductor") -> Callable:
    """What computes the model's loss from now on. mesh: of the parameters, if they are in pieces."""
    if mesh is not None:
        for block in model.blocks:  # what FSDP2 does between blocks stays outside
            block.compile(dynamic=False, backend=backend)
        model.mean_loss = torch.compile(head_loss.mean_loss, dynamic=False, backend=backend)
        return model
    return torch.compile(model, dynamic=False, backend=backend)
