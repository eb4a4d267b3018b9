"""How large a model, on how many tokens? Train a family of small ones, fit what compute buys, and say.

    python -m scripts.scaling --depths 1,2,3 --tokens 250k,500k,1M --total-batch-size 4096        # on a CPU
    python -m scripts.scaling --depths 4,6,8,10 --tokens 100M,200M,400M,800M --corpus hf:ORG/NAME     # GPUs
    python -m scripts.scaling --depths 1,2,3 --tokens 250k,500k -- --matrix-lr 0.03
    python -m scripts.scaling --target-flops 1e18        # the best model for so much compute
    python -m scripts.scaling --target-loss 0.95         # the least compute to so many bits per byte
    python -m scripts.scaling --gpu-hours 64             # the same question in hours of one device

Every depth is trained with every number of tokens, one run after the other, by base_train and its recipe: to
the end of its learning-rate schedule each, as a run cut short is no shorter run. To the final losses, on the
whole validation set, the law of Hoffmann et al. (arXiv 2203.15556) is fitted:

    loss = E + A / N^alpha + B / D^beta       N parameters of matrices and head, D tokens

with 95% intervals, which takes seven runs at least, of three depths and three numbers of tokens. With fewer,
answers are read between the runs. Compute is counted in training FLOPs as PaLM does (6 per weight and token,
and attention). The answer names a depth and a number of tokens, and how far it is from what was trained.

A family lives in scaling/NAME under NANOMUON_BASE_DIR: scaling.md, scaling.png, scaling.json, and of every
run a small JSON and its output; the runs themselves are runs/NAME-d2-t500000. The same command goes on where
it was interrupted (Ctrl-C, SIGTERM and SIGHUP save first). More depths or tokens train only what is new, and
without them the questions are answered from the runs that are there. So a family need not be a whole grid:
the smaller a model, the more tokens are worth their compute. What follows -- goes to base_train. A family of
other settings is refused. On several GPUs each run takes all of them, by torchrun.
"""

import argparse
import math
import os
import re
import sys

from nanomuon import locks, parallel, planning, run_folder
from nanomuon.arguments import LENGTH_FLAGS, SIZES, ArgumentParser, check_sizes
from nanomuon.corpus import check_corpus
from nanomuon.runtime import (
    InputError,
    check_at_least_1,
    check_name,
    exit_when_asked,
    flag_of,
    run_command,
    usable_gpus,
)
from scripts import base_train
from scripts.laboratory import scaling_report, scaling_runs

# Arguments of base_train that this script decides
DECIDED = ("run", "depth", "resume", "plan", *LENGTH_FLAGS, *scaling_runs.SETTINGS_OF_A_FAMILY)
MULTIPLES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}


def main(argv: list[str] | None = None) -> None:
    args, flags = parse_arguments(argv)
    options = options_of_base_train(flags)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("start it without torchrun, which it starts itself for each run: --nproc-per-node")
    if args.depths:
        gpus = usable_gpus()
        processes = args.nproc_per_node or max(1, gpus)
        args.max_seq_len = args.max_seq_len or planning.default_context(gpus > 0)
        data_parallel = parallel.data_parallel_size(processes, options.get("tensor_parallel", 1))
        if args.total_batch_size is not None:
            rows = options.get("device_batch_size", 1)
            planning.check_batch(args.total_batch_size, rows, args.max_seq_len, data_parallel)
    folder = scaling_runs.folder_of(args.name)
    run_folder.check_writable(folder)
    exit_when_asked()  # the run in training saves first, see scaling_runs.train
    with locks.locked(folder):
        if args.depths:
            shared = scaling_runs.settings_of(args, options)
            scaling_runs.check_settings(folder, shared)
            row_tokens = args.max_seq_len * processes
            planned = scaling_runs.members(args.depths, args.tokens, args.total_batch_size, row_tokens)
            scaling_runs.train_missing(folder, shared, planned, flags, processes, args.accept_changes)
        findings = scaling_report.find(folder)
        if findings is None:
            raise InputError(
                f"family {args.name} has no finished run yet: give --depths 1,2,3 and --tokens 250k,500k,1M"
            )
        print("\n" + scaling_report.write_report(folder, findings, answers(args, findings)))
    print(f"\n{folder}/scaling.md, {folder}/scaling.png")


def answers(args: argparse.Namespace, findings: scaling_report.Findings) -> list[str]:
    """To the questions of the command line, in words."""
    said = []
    if args.target_flops is not None:
        said.append(scaling_report.advice_for_compute(findings, args.target_flops))
    if args.gpu_hours is not None:
        speed = args.flops_per_second or findings.device_speed
        if speed is None:
            raise InputError("the speed of these runs was not measured: give --flops-per-second")
        flops = args.gpu_hours * 3600 * speed
        hours = f"{args.gpu_hours:g} hours of a device at {speed:.3g} FLOP/s"
        said.append(f"{hours}. {scaling_report.advice_for_compute(findings, flops)}")
    if args.target_loss is not None:
        said.append(scaling_report.advice_for_loss(findings, args.target_loss))
    return said


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and what follows --."""
    argv = sys.argv[1:] if argv is None else argv
    flags = []
    if "--" in argv:
        here = argv.index("--")
        argv, flags = argv[:here], argv[here + 1 :]
    args = make_parser().parse_args(argv)
    check_arguments(args)
    return args, flags


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        "python -m scripts.scaling",
        __doc__,
        usage="%(prog)s [--depths D,D --tokens T,T] [flags below] [-- flags of base_train]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--depths", type=whole_numbers, help="of the models to train, e.g. 1,2,3; width follows")
    add(
        "--tokens",
        type=whole_numbers,
        help="to train each on, e.g. 250k,500k,1M (thousand, million; B: billion)",
    )
    add("--name", default="family", help="of the family, a folder under scaling/ (default: %(default)s)")
    add("--corpus", default="python", help="as in base_train (default: %(default)s)")
    add("--max-seq-len", type=int, help="context in tokens (default: 2048 on a GPU, 256 on a CPU)")
    add(
        "--total-batch-size",
        type=int,
        help="tokens per optimizer step of all runs (default: base_train's rule for the tokens of each; on a "
        "CPU 4096 suits runs of minutes)",
    )
    add(
        "--nproc-per-node",
        type=int,
        help="processes that train a run, under torchrun where there are several (default: one per GPU)",
    )
    add("--target-loss", type=float, metavar="BPB", help="which depth and tokens reach it soonest?")
    add("--target-flops", type=float, metavar="FLOPS", help="which depth and tokens make the best of them?")
    add("--gpu-hours", type=float, metavar="HOURS", help="the same for the FLOPs of a device in this time")
    add(
        "--flops-per-second",
        type=float,
        help="of one device, for --gpu-hours (default: as measured in the deepest runs)",
    )
    add(
        "--accept-changes",
        action="store_true",
        help="go on with a family whose corpus or code is another one by now",
    )
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """InputError for the first argument that cannot be meant."""
    check_name("--name", args.name)
    if bool(args.depths) != bool(args.tokens):
        raise InputError("--depths and --tokens go together: each depth is trained on each number of tokens")
    check_at_least_1(args, "nproc_per_node")
    check_sizes(args)
    if args.depths:
        check_corpus(args.corpus)
        if max(args.depths) > SIZES["depth"].high:  # its runs would come last
            raise InputError(f"--depths must be at most {SIZES['depth'].high}, not {max(args.depths)}")
    for name in ("target_loss", "target_flops", "gpu_hours", "flops_per_second"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag_of(name)} must be above 0 and finite, not {value:g}")


def options_of_base_train(flags: list[str]) -> dict:
    """What the flags after -- set; InputError for those that this script decides, and for bad values."""
    given = base_train.parse_arguments(flags, dict.fromkeys(DECIDED))
    for name in DECIDED:
        if getattr(given, name) is not None:
            raise InputError(f"{flag_of(name)} after -- is for this command to decide")
    args = base_train.parse_arguments(flags, {})
    base_train.check_arguments(args)
    parser = base_train.make_parser()
    return {name: value for name, value in vars(args).items() if value != parser.get_default(name)}


def whole_numbers(text: str) -> list[int]:
    """250k,500k,1M as [250_000, 500_000, 1_000_000]."""
    numbers = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmb]?)", part.strip().lower())
        try:
            number = float(found[1]) * MULTIPLES[found[2]]
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{part!r} is not a number such as 3 or 250k") from error
        if not 1 <= number < 1e18 or number != round(number):
            raise argparse.ArgumentTypeError(f"{part!r} is not a whole number from 1 on")
        numbers.append(round(number))
    return numbers


if __name__ == "__main__":
    run_command(main)
