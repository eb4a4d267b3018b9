"""Bits per byte of a finished run on the whole validation set of its corpus, or of another one.

python -m scripts.base_eval --run base
python -m scripts.base_eval --run /some/folder --corpus path:my_texts   # a run from elsewhere
torchrun --standalone --nproc_per_node=8 -m scripts.base_eval -- --run base
"""

import argparse

import torch

from nanomuon import sizing
from nanomuon.arguments import add_dtype_argument, add_run_argument
from nanomuon.dataloader import validation_batches
from nanomuon.evaluate import bits_per_byte
from nanomuon.finished_run import load_run, validation_folder
from nanomuon.runtime import check_at_least_1, first_rank_first, print0, run_command, start


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.base_eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser)
    parser.add_argument("--corpus", help="whose validation set to evaluate on (default: that of the run)")
    parser.add_argument(
        "--device-batch-size", type=int, default=16, help="rows at a time (default: %(default)s)"
    )
    add_dtype_argument(parser)
    args = parser.parse_args(argv)
    check_at_least_1(args, "device_batch_size")
    runtime = sizing.choose_dtype(args.dtype, start(), {})
    model, tokenizer, about = load_run(args.run, runtime)
    corpus = args.corpus or about["corpus"]
    folder = first_rank_first(lambda: validation_folder(corpus, tokenizer, about), runtime)
    batches = validation_batches(
        folder, model.config.seq_len, args.device_batch_size, runtime.rank, runtime.world_size, runtime.device
    )
    value = bits_per_byte(model, batches, torch.from_numpy(tokenizer.token_bytes).to(runtime.device))
    print0(f"run: {args.run}\ncorpus: {corpus}\nstep: {about['step']}\ndtype: {runtime.dtype_name}")
    print0(f"val_bpb: {value:.4f}")


if __name__ == "__main__":
    run_command(main)
