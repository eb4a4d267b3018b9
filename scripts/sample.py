"""Let a finished run write, or one that is still training.

python -m scripts.sample --run base --prompt "def main():" --max-tokens 200
python -m scripts.sample --run base --samples 3 --temperature 0.6
python -m scripts.sample --run base --interactive
python -m scripts.sample --run base --checkpoint last
"""

import argparse
import contextlib
import sys
import time

from nanomuon.generate import Sample, continue_samples
from nanomuon.gpt import GPT
from nanomuon.hf_export import load_run
from nanomuon.runtime import InputError, printable, run_command, start
from nanomuon.tokenizer import Tokenizer
from scripts.arguments import (
    ArgumentParser,
    add_checkpoint_argument,
    add_dtype_argument,
    add_run_argument,
    count,
    number,
)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.sample", __doc__)
    add_run_argument(parser)
    add_checkpoint_argument(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        help="how the document begins (default: nothing); may be given several times",
    )
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="read prompts line by line; the end of the input (Ctrl-D) or Ctrl-C ends it",
    )
    parser.add_argument(
        "--samples", type=count, default=1, help="how many of each prompt (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=count, default=128, help="length of each (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=number(float, 0, 1e30),
        default=0.8,
        help="0: always the likeliest token (%(default)s)",
    )
    parser.add_argument(
        "--top-k", type=count, default=50, help="draw from this many tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--top-p",
        type=number(float, 1e-30, 1),
        default=1.0,
        help="and of these from the fewest that have this probability together (default: %(default)s, all)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a sample before this text; may be given several times",
    )
    parser.add_argument(
        "--seed",
        type=number(int, 0, 1 << 62),
        default=0,
        help="of the first sample, the next one has the next (%(default)s)",
    )
    add_dtype_argument(parser)
    args = parser.parse_args(argv)
    check(args)
    runtime = start(args.dtype)
    model, tokenizer, facts = load_run(args.run, runtime, args.checkpoint)
    if args.checkpoint is not None:
        print(f"run {args.run} after step {facts['step']}", file=sys.stderr)
    if args.interactive:
        converse(model, tokenizer, args)
    else:
        prompts = [""] if args.prompt is None else args.prompt
        write(model, tokenizer, prompts, args.seed, args)


def check(args: argparse.Namespace) -> None:
    """InputError for arguments that mean nothing."""
    if "" in args.stop:
        raise InputError("--stop '': an empty text would end every sample before it begins")
    if args.interactive and args.prompt is not None:
        raise InputError("--interactive reads the prompts itself: leave --prompt out")
    if args.prompt is not None:
        for prompt in args.prompt:
            check_prompt(prompt)


def check_prompt(prompt: str) -> None:
    """InputError where the prompt came from bytes that are no text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the prompt is not UTF-8 at character {error.start + 1}") from error


def converse(model: GPT, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Continue every line that is typed, until the input ends or Ctrl-C is pressed."""
    with contextlib.suppress(ImportError):  # Python may be built without it
        import readline  # noqa: F401 - input() then knows the arrow keys
    sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text: check_prompt tells of them
    print("each line begins a document, an empty one leaves that to the model; Ctrl-D ends", file=sys.stderr)
    seed = args.seed
    try:
        while True:
            prompt = input("> ")
            try:
                check_prompt(prompt)
            except InputError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
            write(model, tokenizer, [prompt], seed, args)
            seed += args.samples
    except (EOFError, KeyboardInterrupt):
        print()


def write(model: GPT, tokenizer: Tokenizer, prompts: list[str], seed: int, args: argparse.Namespace) -> None:
    """Print --samples continuations of each prompt while they are drawn, and then how fast that was."""
    samples = []
    for prompt in prompts:
        for _ in range(args.samples):
            samples.append(Sample(tokenizer, prompt, seed + len(samples), args.stop))
    screen = Screen(samples)
    began = time.perf_counter()
    for _ in continue_samples(
        model, tokenizer, samples, args.max_tokens, args.temperature, args.top_k, args.top_p
    ):
        screen.show()
    seconds = time.perf_counter() - began
    tokens = sum(sample.tokens for sample in samples)
    # Beside the texts, so that equal commands print equal texts
    print(
        f"--- {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens per second", file=sys.stderr
    )


class Screen:
    """Prints samples, which grow at the same time, one after another: a later one waits for its turn."""

    def __init__(self, samples: list[Sample]):
        self.waiting = list(samples)  # the first of them is being printed
        self.printed = None  # characters of its text that are; None before its headline

    def show(self) -> None:
        """Print what there is of the sample whose turn it is, and go on to the next where it has ended."""
        while self.waiting:
            sample = self.waiting[0]
            if self.printed is None:
                print(f"--- sample, seed {sample.seed}")
                self.printed = 0
            text = sample.text
            print(printable(text[self.printed :]), end="", flush=True)
            self.printed = len(text)
            if not sample.ended:
                return
            print(flush=True)
            self.waiting.pop(0)
            self.printed = None


if __name__ == "__main__":
    run_command(main)
