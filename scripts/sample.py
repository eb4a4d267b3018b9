"""Let a finished run write.

python -m scripts.sample --run base --prompt "def main():" --max-tokens 200
python -m scripts.sample --run base --samples 3 --temperature 0.6
"""

import argparse

from nanomuon import sizing
from nanomuon.arguments import add_dtype_argument, add_run_argument
from nanomuon.finished_run import load_run
from nanomuon.generate import sample_texts
from nanomuon.runtime import InputError, check_at_least_1, run_command, start


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser)
    parser.add_argument("--prompt", default="", help="how the document begins (default: nothing)")
    parser.add_argument("--samples", type=int, default=1, help="how many (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="length of each (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the likeliest token (%(default)s)"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, help="draw from this many tokens (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first sample (default: %(default)s)")
    add_dtype_argument(parser)
    args = parser.parse_args(argv)
    check_at_least_1(args, "samples", "max_tokens", "top_k")
    try:
        args.prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError("--prompt is not UTF-8: type it in a terminal that is") from error
    if not args.temperature >= 0:
        raise InputError(f"--temperature must not be below 0, but is {args.temperature}")
    model, tokenizer, _ = load_run(args.run, sizing.choose_dtype(args.dtype, start(), {}))
    texts = sample_texts(
        model,
        tokenizer,
        [args.prompt] * args.samples,
        args.max_tokens,
        args.seed,
        temperature=args.temperature,
        top_k=args.top_k,
    )
    for seed, text in enumerate(texts, start=args.seed):
        print(f"--- sample, seed {seed}\n{text}", flush=True)


if __name__ == "__main__":
    run_command(main)
