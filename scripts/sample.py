"""Sample text from a finished run, or from one that is still training.

python -m scripts.sample --run base --prompt "def main():" --max-tokens 200
python -m scripts.sample --run base --samples 3 --temperature 0.6
python -m scripts.sample --run base --interactive
python -m scripts.sample --run base --checkpoint last
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

import argparse
import contextlib
import sys
import time

from nanomuon.command import ArgumentParser, add_run_arguments, amount, count, number, run_command, seed
from nanomuon.generate import Sample, continue_samples
from nanomuon.gpt import GPT
from nanomuon.runtime import InputError, printable, start
from nanomuon.tokenizer import Tokenizer
from nanomuon.trained import load_run


def text(argument: str) -> str:
    """The type of --prompt. ValueError for bytes that are not text."""
    argument.encode()
    return argument


def stop_text(argument: str) -> str:
    """The type of --stop: text, but not the empty string, which every text contains."""
    if not argument:
        raise argparse.ArgumentTypeError("must not be empty")
    return text(argument)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.sample", __doc__)
    add_run_arguments(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt",
        type=text,
        action="append",
        help="beginning of the document (default: empty); can be given several times",
    )
    prompts.add_argument(
        "--interactive",
        action="store_true",
        help="read prompts line by line, until the end of input (Ctrl-D) or Ctrl-C",
    )
    parser.add_argument("--samples", type=count, default=1, help="how many per prompt (default: %(default)s)")
    parser.add_argument(
        "--max-tokens",
        type=count,
        default=128,
        help="length of each sample; beyond its context the model sees only the newest tokens "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=amount,
        default=0.8,
        help="0: always the most likely token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k", type=count, default=50, help="draw from this many tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--top-p",
        type=number(float, 1e-30, 1),
        default=1.0,
        help="of these keep only the most likely with this total probability (default: %(default)s, all)",
    )
    parser.add_argument(
        "--stop",
        type=stop_text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end a sample before this text; can be given several times",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        help="seed of the first sample; each later one adds 1 (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    model, tokenizer, _ = load_run(args.run, start(), args.checkpoint)
    if args.interactive:
        converse(model, tokenizer, args)
    else:
        write(model, tokenizer, args.prompt or [""], args.seed, args)


def converse(model: GPT, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Continue every line that is typed, until the end of input or Ctrl-C."""
    with contextlib.suppress(ImportError):  # Python may have been built without it
        import readline  # noqa: F401 - input() then knows the arrow keys
    if sys.stdin is None:
        raise InputError("--interactive reads prompts from the standard input, which is closed")
    sys.stdin.reconfigure(errors="replace")
    print(
        "Type how a text begins. After an empty line, the model begins it. Ctrl-D ends.",
        file=sys.stderr,
    )
    first_seed = args.seed
    try:
        while True:
            write(model, tokenizer, [input("> ")], first_seed, args)
            first_seed += args.samples
    except (EOFError, KeyboardInterrupt):
        print()


def write(
    model: GPT, tokenizer: Tokenizer, prompts: list[str], first_seed: int, args: argparse.Namespace
) -> None:
    """Print --samples continuations of each prompt, one after the other, and then the speed.

    They grow as a batch: the first is printed while it grows, and the others grow along with it.
    """
    samples = []
    for prompt in prompts:
        for _ in range(args.samples):
            samples.append(Sample(tokenizer, prompt, first_seed + len(samples), args.stop))
    tokens_before = sum(len(sample.tokens) for sample in samples)
    began = time.perf_counter()
    steps = continue_samples(model, samples, args.max_tokens, args.temperature, args.top_k, args.top_p)
    for sample in samples:
        print(f"--- sample, seed {sample.seed}\n{printable(sample.prompt)}", end="", flush=True)
        printed = 0
        while not sample.ended:
            next(steps, None)
            print(printable(sample.continuation[printed:]), end="", flush=True)
            printed = len(sample.continuation)
        print(printable(sample.continuation[printed:]), flush=True)
    seconds = time.perf_counter() - began
    tokens = sum(len(sample.tokens) for sample in samples) - tokens_before
    # Not on stdout, so that equal commands print equal texts there
    print(
        f"--- {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens per second", file=sys.stderr
    )


if __name__ == "__main__":
    run_command(main)
