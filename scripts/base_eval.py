"""What a finished run is worth: bits per byte on the whole validation set of its corpus, CORE, samples.

python -m scripts.base_eval --run base
python -m scripts.base_eval --run base --eval core,bpb,sample --core-bundle FOLDER_OR_ZIP_OR_URL
torchrun --standalone --nproc_per_node=8 -m scripts.base_eval -- --run base --eval core
"""

import argparse

import torch

from nanomuon import core, core_bundle, shards, sizing
from nanomuon.arguments import add_dtype_argument
from nanomuon.dataloader import validation_batches
from nanomuon.evaluate import bits_per_byte
from nanomuon.finished_run import NO_PROMPTS, PROMPTS, load_run
from nanomuon.generate import sample_texts
from nanomuon.gpt import GPT
from nanomuon.runtime import (
    InputError,
    Runtime,
    base_dir,
    check_at_least_1,
    first_rank_first,
    print0,
    run_command,
    start,
    write_json,
)
from nanomuon.tokenizer import Tokenizer

EVALUATIONS = ("bpb", "core", "sample")


def evaluate_bpb(
    args: argparse.Namespace, runtime: Runtime, model: GPT, tokenizer: Tokenizer, corpus: str
) -> None:
    vocab_size = tokenizer.vocab_size
    folder = first_rank_first(lambda: shards.prepare(corpus, vocab_size, max_tokens=0), runtime)
    if Tokenizer.load(folder / "tokenizer").hash != tokenizer.hash:
        raise InputError(f"{folder} was made with another tokenizer than run {args.run}: delete that folder")
    batches = validation_batches(
        folder, model.config.seq_len, args.device_batch_size, runtime.rank, runtime.world_size, runtime.device
    )
    value = bits_per_byte(model, batches, torch.from_numpy(tokenizer.token_bytes).to(runtime.device))
    print0(f"val_bpb: {value:.4f}")


def evaluate_core(args: argparse.Namespace, runtime: Runtime, model: GPT, tokenizer: Tokenizer) -> None:
    tasks = first_rank_first(lambda: core_bundle.open_bundle(args.core_bundle), runtime)
    results = core.evaluate(
        model,
        tokenizer,
        tasks,
        args.core_items,
        args.device_batch_size * model.config.seq_len,
        runtime.rank,
        runtime.world_size,
    )
    if runtime.rank == 0:
        file = base_dir() / "runs" / args.run / "core.json"
        write_json(file, results)
        print(f"results: {file}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.base_eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", default="base", help="name of a finished run (default: %(default)s)")
    parser.add_argument(
        "--eval",
        default="bpb",
        help=f"what to do, of {', '.join(EVALUATIONS)}, with commas between (default: %(default)s)",
    )
    parser.add_argument(
        "--core-bundle",
        default=core_bundle.PUBLIC_BUNDLE,
        help="tasks of CORE: a folder, a zip or its address, fetched once (default: the public bundle, "
        "%(default)s)",
    )
    parser.add_argument("--core-items", type=int, help="items of each task of CORE (default: all)")
    parser.add_argument(
        "--device-batch-size", type=int, default=16, help="rows at a time (default: %(default)s)"
    )
    add_dtype_argument(parser)
    args = parser.parse_args(argv)
    check_at_least_1(args, "device_batch_size", "core_items")
    wanted = [name.strip() for name in args.eval.split(",")]
    for name in wanted:
        if name not in EVALUATIONS:
            raise InputError(f"--eval {args.eval}: {name!r} is not one of {', '.join(EVALUATIONS)}")

    runtime = sizing.choose_dtype(args.dtype, start(), {})
    model, tokenizer, about = load_run(args.run, runtime)
    corpus = about["corpus"]
    print0(f"run: {args.run}\ncorpus: {corpus}\nstep: {about['step']}\ndtype: {runtime.dtype_name}")
    if "bpb" in wanted:
        evaluate_bpb(args, runtime, model, tokenizer, corpus)
    if "core" in wanted:
        evaluate_core(args, runtime, model, tokenizer)
    if "sample" in wanted and runtime.rank == 0:
        for text in sample_texts(model, tokenizer, PROMPTS.get(corpus, NO_PROMPTS), max_tokens=128):
            print(f"--- sample\n{text}", flush=True)


if __name__ == "__main__":
    run_command(main)
