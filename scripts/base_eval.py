"""Bits per byte of a finished run on the whole validation set of a corpus.

    python -m scripts.base_eval --run base
    torchrun --standalone --nproc_per_node=8 -m scripts.base_eval --run base
    python -m scripts.base_eval --run base --corpus path:other_texts      # how well it predicts other text
"""

import argparse

import torch
import torch.distributed as dist

from nanomuon import shards
from nanomuon.dataloader import validation_batches
from nanomuon.evaluate import bits_per_byte
from nanomuon.runtime import print0, run_command, start
from scripts.sample import load_run


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.base_eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="base", help="name of a finished run (default: %(default)s)")
    parser.add_argument("--corpus", help="evaluate on this corpus (default: the one it was trained on)")
    parser.add_argument("--device-batch-size", type=int, default=16, help="rows at a time (default: %(default)s)")
    args = parser.parse_args(argv)
    runtime = start()
    model, tokenizer, about = load_run(args.run, runtime)
    if runtime.rank == 0:
        folder = shards.prepare(args.corpus or about["corpus"], tokenizer=tokenizer)
    if runtime.world_size > 1:
        dist.barrier()
        folder = shards.prepare(args.corpus or about["corpus"], tokenizer=tokenizer) if runtime.rank else folder
    batches = validation_batches(
        folder, model.config.seq_len, args.device_batch_size, runtime.rank, runtime.world_size, runtime.device
    )
    value = bits_per_byte(model, batches, torch.from_numpy(tokenizer.token_bytes).to(runtime.device))
    print0(f"run: {args.run}\ncorpus: {args.corpus or about['corpus']}\nstep: {about['step']}\nval_bpb: {value:.4f}")


if __name__ == "__main__":
    run_command(main)
