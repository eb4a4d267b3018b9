"""Bits per byte of a finished run on the whole validation set of its corpus.

python -m scripts.base_eval --run base
torchrun --standalone --nproc_per_node=8 -m scripts.base_eval -- --run base
"""

import argparse

import torch

from nanomuon import shards, sizing
from nanomuon.arguments import add_dtype_argument
from nanomuon.dataloader import validation_batches
from nanomuon.evaluate import bits_per_byte
from nanomuon.finished_run import load_run
from nanomuon.runtime import InputError, check_at_least_1, first_rank_first, print0, run_command, start
from nanomuon.tokenizer import Tokenizer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.base_eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", default="base", help="name of a finished run (default: %(default)s)")
    parser.add_argument(
        "--device-batch-size", type=int, default=16, help="rows at a time (default: %(default)s)"
    )
    add_dtype_argument(parser)
    args = parser.parse_args(argv)
    check_at_least_1(args, "device_batch_size")
    runtime = sizing.choose_dtype(args.dtype, start(), {})
    model, tokenizer, about = load_run(args.run, runtime)
    corpus, vocab_size = about["corpus"], tokenizer.vocab_size
    folder = first_rank_first(lambda: shards.prepare(corpus, vocab_size, max_tokens=0), runtime)
    if Tokenizer.load(folder / "tokenizer").hash != tokenizer.hash:
        raise InputError(f"{folder} was made with another tokenizer than run {args.run}: delete that folder")
    batches = validation_batches(
        folder, model.config.seq_len, args.device_batch_size, runtime.rank, runtime.world_size, runtime.device
    )
    value = bits_per_byte(model, batches, torch.from_numpy(tokenizer.token_bytes).to(runtime.device))
    print0(f"run: {args.run}\ncorpus: {corpus}\nstep: {about['step']}\ndtype: {runtime.dtype_name}")
    print0(f"val_bpb: {value:.4f}")


if __name__ == "__main__":
    run_command(main)
