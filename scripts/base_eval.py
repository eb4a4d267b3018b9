"""Evaluate a finished run: bits per byte on the whole validation set of its corpus, or CORE, or both.

python -m scripts.base_eval --run base
python -m scripts.base_eval --run base --checkpoint last                # a run that is still training
python -m scripts.base_eval --run /some/folder --corpus path:my_texts   # a run from elsewhere
python -m scripts.base_eval --run base --eval core,bpb --core-bundle FOLDER_OR_ZIP_OR_URL
torchrun --standalone --nproc_per_node=8 -m scripts.base_eval -- --run base --eval core
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

from dataclasses import replace
from pathlib import Path

import torch

from nanomuon import core, shards
from nanomuon.command import ArgumentParser, add_run_arguments, count, run_command
from nanomuon.corpus import open_corpus
from nanomuon.dataloader import validation_batches, validation_rows
from nanomuon.gpt import GPT
from nanomuon.run import bits_per_byte
from nanomuon.runtime import (
    InputError,
    Runtime,
    find_run,
    first_rank_first,
    print0,
    read_json,
    start,
    write_json,
)
from nanomuon.settings import Settings, corpus_name
from nanomuon.tokenizer import Tokenizer
from nanomuon.trained import load_run

EVALUATIONS = ("bpb", "core")
ROWS = 16  # per batch


def evaluate_bpb(runtime: Runtime, model: GPT, tokenizer: Tokenizer, corpus: str, run: Settings) -> None:
    """Print the bits per byte. corpus: its name. run: what the run has recorded."""
    folder = first_rank_first(lambda: validation_folder(corpus, tokenizer, run))
    rows = validation_rows(folder, model.config.seq_len)
    batches = validation_batches(rows, ROWS, runtime.rank, runtime.world_size, runtime.device)
    value = bits_per_byte(model, batches, torch.from_numpy(tokenizer.token_bytes).to(runtime.device))
    print0(f"val_bpb: {value:.4f}")


def validation_folder(name: str, tokenizer: Tokenizer, run: Settings) -> Path:
    """The folder of shards with a corpus's validation set, in the run's tokens. Written if it is missing.

    tokenizer: the run's. The run's own corpus, also at another place, is read as the run read it. InputError
    if local documents are missing.
    """
    has_its_name = name == run.trained_on.get("corpus")
    try:
        corpus = open_corpus(name)
    except InputError as error:
        raise InputError(f"{error}; to evaluate on another corpus: --corpus NAME") from error
    if has_its_name or corpus.revision == run.trained_on.get("revision"):
        text_field = run.options.get("text_field") or corpus.text_field
        skip_unreadable = run.options.get("skip_unreadable", False)
        corpus = replace(corpus, text_field=text_field, skip_unreadable=skip_unreadable)
    if has_its_name and corpus.differs(name, str(run.trained_on.get("revision"))):
        print0(f"corpus {name} has changed since the run was trained: the result may differ")
    return shards.prepare_shards(corpus, tokenizer=tokenizer, max_tokens=0)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.base_eval", __doc__)
    add_run_arguments(parser)
    parser.add_argument(
        "--corpus", type=corpus_name, help="use the validation set of this corpus (default: the run's)"
    )
    parser.add_argument(
        "--eval",
        default="bpb",
        help=f"any of {', '.join(EVALUATIONS)}, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--core-bundle",
        default=core.PUBLIC_BUNDLE,
        help="CORE tasks: a folder, a zip or its URL, fetched once (default: the public bundle, %(default)s)",
    )
    parser.add_argument("--core-items", type=count, help="items per CORE task (default: all)")
    args = parser.parse_args(argv)
    wanted = args.eval.split(",")
    if not set(wanted) <= set(EVALUATIONS):
        raise InputError(f"--eval {args.eval}: choose from {', '.join(EVALUATIONS)}, separated by commas")

    runtime = start()
    model, tokenizer, step = load_run(args.run, runtime, args.checkpoint)
    folder = find_run(args.run)
    settings = read_json(folder / "settings.json", Settings)
    corpus = args.corpus or str(settings.trained_on.get("corpus", ""))
    print0(f"run: {args.run}\ncorpus: {corpus}\nstep: {'unknown' if step is None else step}")
    tasks = []
    if "core" in wanted:  # first: there may be no such bundle
        tasks = first_rank_first(lambda: core.open_bundle(args.core_bundle))
    if "bpb" in wanted:
        evaluate_bpb(runtime, model, tokenizer, corpus, settings)
    if "core" in wanted:
        most_tokens = ROWS * model.config.seq_len
        results = core.evaluate(
            model, tokenizer, tasks, args.core_items, most_tokens, runtime.rank, runtime.world_size
        )
        if runtime.rank == 0:
            write_json(folder / "core.json", {**results, "step": step, "most_items": args.core_items})
            print0(f"results: {folder}/core.json")


if __name__ == "__main__":
    run_command(main)
