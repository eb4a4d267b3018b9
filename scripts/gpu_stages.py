"""The stages of scripts/gpu_check. Each tries one thing on the device and says what it found, line by line.

    python -m scripts.gpu_stages numerics --device cuda --folder work --lines work/lines.jsonl

runs one stage by itself, as gpu_check starts it.

A stage is a function of a Place and its Lines (gpu_common.py), without a return value; its docstring's first
line is what `gpu_check --list` shows. It runs in a process of its own, so it may crash, hang or run out of
memory. What is smaller on a CPU than on a GPU is so because a CPU has three minutes for all stages.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nanomuon import runtime
from nanomuon.arguments import ArgumentParser
from scripts import gpu_layouts, gpu_numerics, gpu_speed, gpu_training
from scripts.gpu_common import Lines, Place


@dataclass(frozen=True)
class Stage:
    """A stage, and the seconds after which it is killed."""

    function: Callable[[Place, Lines], None]
    seconds: int
    for_gpus: bool = False  # a CPU has nothing to tell

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def about(self) -> str:
        return self.function.__doc__.splitlines()[0]


# What tells most comes first: at the end there may be no time left
STAGES = [
    Stage(gpu_numerics.device, 60),
    Stage(gpu_numerics.numerics, 120),
    Stage(gpu_numerics.optimizer, 120),
    Stage(gpu_numerics.model, 120),
    Stage(gpu_numerics.attention_backends, 90),
    Stage(gpu_training.training, 120),
    Stage(gpu_layouts.replicated, 120),
    Stage(gpu_layouts.fsdp, 120),
    Stage(gpu_layouts.tensor_parallel, 120),
    Stage(gpu_layouts.fsdp_and_tensor_parallel, 120),
    Stage(gpu_training.resume, 90),
    Stage(gpu_training.out_of_memory, 60, for_gpus=True),
    Stage(gpu_speed.optim_bench_12, 120),
    Stage(gpu_speed.train_bench, 180),
    Stage(gpu_speed.optim_bench_24, 150, for_gpus=True),
    Stage(gpu_speed.profile, 120, for_gpus=True),
]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.gpu_stages", __doc__)
    add = parser.add_argument
    add("stage", nargs="?", choices=[stage.name for stage in STAGES], help="which one")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    add("--ranks", type=int, default=1, help="processes of the stages for several devices")
    add("--folder", type=Path, required=True, help="what the stage writes")
    add("--lines", type=Path, required=True, help="file for what it finds, a line of JSON each")
    add("--rank-of", choices=gpu_layouts.LAYOUTS, help=argparse.SUPPRESS)  # which gpu_layouts.py starts
    args = parser.parse_args(argv)
    if args.stage is None and args.rank_of is None:
        parser.error("name a stage: python -m scripts.gpu_check --list")
    args.folder.mkdir(parents=True, exist_ok=True)
    place, lines = Place(torch.device(args.device), args.ranks, args.folder), Lines(args.lines)
    if args.rank_of:
        gpu_layouts.rank_of_layout(args.rank_of, place, lines)
        return
    if args.device == "cpu":
        runtime.keep_freed_memory()
    for stage in STAGES:
        if stage.name == args.stage:
            stage.function(place, lines)


if __name__ == "__main__":
    runtime.run_command(main)
