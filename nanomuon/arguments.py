"""What scripts share of their command lines: the parser, and the flags that define a training step (corpus,
model, batch, layout), which base_train and train_bench have.
"""

import argparse
import math

import torch

from nanomuon.export import MODEL_OPTIONS, MODEL_SHAPE
from nanomuon.read_json import Whole
from nanomuon.runtime import InputError, check_at_least_1, flag_of

# What --comm-dtype means to the optimizer
COMM_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}

# What an --optimizer-file has in place of the recipe, its groups and its schedule
RECIPE_FLAGS = ("matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr", "weight_decay")
SCHEDULE_FLAGS = ("warmup_ratio", "warmdown_ratio")

# Each says how long a run is; one that is given anew replaces the others that a run remembers
LENGTH_FLAGS = ("num_iterations", "target_flops", "target_param_data_ratio")

# Seeds lie below it on either side of 0: torch takes 64 bits, and samples count on from the seed of the run
MAX_SEED = 1 << 63

SMALLEST_VOCABULARY = 257  # of a tokenizer: 256 bytes and <|bos|>
# Sizes that take memory or time before anything else shows that they cannot be meant, and their bounds
SIZES = {
    "vocab_size": MODEL_SHAPE["vocab_size"],
    "depth": MODEL_SHAPE["depth"],
    "max_seq_len": MODEL_SHAPE["seq_len"],
    "experts": MODEL_OPTIONS["experts"],
    "experts_per_token": MODEL_OPTIONS["experts_per_token"],
    "device_batch_size": Whole(1, 1 << 20),  # rows
    "total_batch_size": Whole(1, 1 << 28),  # tokens
    "num_iterations": Whole(1, 1 << 40),
}
# The same for what else says how long a run is: above 0 and at most this
LONGEST = {"target_param_data_ratio": 1e6, "target_flops": 1e30}


class ArgumentParser(argparse.ArgumentParser):
    """Of one command: its description is shown as it is written, and what is wrong is an InputError.

    argparse would print the usage before it says what is wrong: 60 lines of base_train's.
    """

    def __init__(self, prog: str, description: str, **settings):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=layout, **settings)

    def error(self, message: str):
        raise InputError(f"{message}; see {self.prog} --help")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        default="base",
        help="a finished run: its name under runs/, or the path of its folder, which has a slash (./NAME) "
        "(default: %(default)s)",
    )


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        metavar="last|step_N",
        help="the model as this checkpoint of the run has it, which may still be training (default: as it is "
        "at the end)",
    )


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--corpus", default="python", help="python, path:FILE_OR_FOLDER or hf:ORG/NAME (default: %(default)s)"
    )
    add("--vocab-size", type=int, help="tokens in the vocabulary (default: set by the corpus)")
    add(
        "--depth",
        type=int,
        default=4,
        help="number of layers; width, heads and batch follow (default: %(default)s)",
    )
    add("--max-seq-len", type=int, help="context in tokens (default: 2048 on a GPU, 256 on a CPU)")
    add(
        "--window-pattern",
        help="attention window by layer: L full, S the last quarter of the context (default: L on a CPU, on "
        "a GPU SSSL, or L where the windows save no time)",
    )
    add(
        "--experts",
        type=int,
        default=0,
        help="MLPs per layer among which a router picks, 0: one (%(default)s)",
    )
    add(
        "--experts-per-token",
        type=int,
        default=2,
        help="how many it picks, each 1/this as wide (%(default)s)",
    )
    add("--no-qk-norm", action="store_true", help="do not normalize queries and keys")
    add(
        "--device-batch-size",
        type=int,
        help="rows per device and micro-step (default: a power of two that fits into the memory of the GPU, "
        "16 on a CPU)",
    )
    add(
        "--total-batch-size",
        type=int,
        help="tokens per optimizer step (default: from the tokens that --target-flops or "
        "--target-param-data-ratio asks for, whatever --num-iterations makes of them)",
    )
    add("--num-iterations", type=int, help="optimizer steps (default: from --target-param-data-ratio)")
    add(
        "--target-flops",
        type=float,
        metavar="FLOPS",
        help="train for as many steps as this compute pays for, 1e18 say, in place of the two beside it: "
        "forward and backward of the model, 6 per weight and token and attention besides (PaLM's count)",
    )
    add(
        "--target-param-data-ratio",
        type=float,
        default=10.5,
        help="training tokens per parameter of the matrices and the head (default: %(default)s)",
    )
    add(
        "--optimizer-file",
        help="Python file with build_optimizer(model) or param_groups(model), used instead of the recipe "
        "(see nanomuon/recipe.py); it runs only where it is given, so a run goes on with it given again",
    )
    add(
        "--shard",
        default="none",
        choices=["none", "fsdp"],
        help="fsdp: parameters, gradients and optimizer state in pieces over the processes (FSDP2); "
        "none: whole parameters on each (default: %(default)s)",
    )
    add(
        "--tensor-parallel",
        type=int,
        default=1,
        help="processes that share every matrix and see the same rows; divides the key-value heads "
        "(default: %(default)s)",
    )
    add_dtype_argument(parser)
    add(
        "--fp8",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="training multiplies in float8 (torchao, tensorwise scales), evaluation as without it; for GPUs "
        "that have it (default: off; its gain has not been measured)",
    )
    add(
        "--comm-dtype",
        default="auto",
        choices=COMM_DTYPES,
        help="dtype in which gradients travel to be averaged; with --shard fsdp or --tensor-parallel only "
        "those of Muon's matrices, and their updates (auto: that of the gradients, float32)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of initial weights, data order and samples (default: %(default)s)",
    )
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="equal runs give equal bits on a GPU too, more slowly (default: off; CPUs do so anyway)",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile model and optimizer, or run eagerly, as NANOMUON_COMPILE=1 or 0 (default: on a GPU "
        "compile at once, on a CPU after some eager steps, where the run then ends sooner)",
    )


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float32"],
        help="of activations and matrix products; weights are float32. auto: bfloat16 where this device is "
        "faster in it, else float32 (default: %(default)s)",
    )


def unused_flags(args: argparse.Namespace, world_size: int) -> set[str]:
    """Names of base_train's arguments that nothing depends on where the others are as they are, or that say
    how this launch began and nothing about its run.
    """
    unused = {"run", "resume", "plan"}
    if args.optimizer_file:
        unused.update(RECIPE_FLAGS)
    if not args.experts:
        unused.add("experts_per_token")
    batch_is_given = args.total_batch_size is not None
    if args.target_flops is not None or (args.num_iterations is not None and batch_is_given):
        unused.add("target_param_data_ratio")
    if args.eval_every <= 0:
        unused.add("eval_tokens")
    if world_size == 1:
        unused.update(["comm_dtype", "shard", "tensor_parallel"])
    return unused


def check_step_arguments(args: argparse.Namespace) -> None:
    """InputError for the first of them that cannot be meant, and for any argument that is not finite."""
    check_finite(args)
    check_at_least_1(args, "tensor_parallel")
    check_not_negative(args, "seed", "experts")
    check_sizes(args)
    check_vocabulary(args.vocab_size)
    check_window_pattern(args.window_pattern)
    check_seed("--seed", args.seed)
    if args.optimizer_file == "":
        raise InputError("--optimizer-file '' names no file: leave the flag out for the recipe")
    check_length(args, "target_param_data_ratio", "target_flops")


def check_one_length(given: argparse.Namespace) -> None:
    """InputError where --target-flops is given beside another flag that says how long a run is.

    given: arguments that are None where the command line does not have them, also those with a default.
    """
    if given.target_flops is None:
        return
    for other in LENGTH_FLAGS:
        if other != "target_flops" and getattr(given, other) is not None:
            raise InputError(
                f"--target-flops decides how long the run is, and so does {flag_of(other)}: give one of them"
            )


def check_finite(args: argparse.Namespace) -> None:
    """InputError for the first number among the arguments that is infinite or none."""
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{flag_of(name)} must be a finite number, not {value}")


def check_sizes(args: argparse.Namespace) -> None:
    """InputError for the first of SIZES that is given and out of its bounds."""
    for name, bounds in SIZES.items():
        value = getattr(args, name, None)
        if value is None:
            continue
        if value < bounds.low:
            raise InputError(f"{flag_of(name)} must be at least {bounds.low}, not {value}")
        if value > bounds.high:
            raise InputError(f"{flag_of(name)} must be at most {bounds.high}, not {value}")


def check_vocabulary(vocab_size: int | None) -> None:
    """InputError where --vocab-size is given and too small for a tokenizer."""
    if vocab_size is not None and vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"--vocab-size must be at least {SMALLEST_VOCABULARY} (256 bytes and <|bos|>), not {vocab_size}"
        )


def check_length(args: argparse.Namespace, *names: str) -> None:
    """InputError for the first of these arguments, of LONGEST, that is given and is no length of a run."""
    for name in names:
        value = getattr(args, name)
        if value is None:
            continue
        if value <= 0:
            raise InputError(f"{flag_of(name)} must be above 0, not {value:g}")
        if value > LONGEST[name]:
            raise InputError(f"{flag_of(name)} must be at most {LONGEST[name]:g}, not {value:g}")


def check_window_pattern(pattern: str | None) -> None:
    """InputError where --window-pattern is given and is none."""
    if pattern is not None and (not pattern or set(pattern) - set("SL")):
        raise InputError(f"--window-pattern is a string of S and L such as SSSL, not {pattern!r}")


def check_seed(flag: str, seed: int) -> None:
    """InputError for a seed that torch's generators do not take."""
    if not -MAX_SEED < seed < MAX_SEED:
        raise InputError(f"{flag} must be smaller than 2**63, not {seed}")


def check_shares(args: argparse.Namespace, *names: str) -> None:
    """InputError for the first of these arguments that is not from 0 to 1."""
    for name in names:
        value = getattr(args, name)
        if not 0 <= value <= 1:
            raise InputError(f"{flag_of(name)} is a share of the run, from 0 to 1, not {value:g}")


def check_not_negative(args: argparse.Namespace, *names: str) -> None:
    """InputError for the first of these arguments that is below 0."""
    for name in names:
        value = getattr(args, name)
        if value < 0:
            raise InputError(f"{flag_of(name)} must not be negative, but is {value}")
