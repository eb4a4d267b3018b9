"""Prepare the tokenizer and token shards of a corpus. After an interruption, run the same command again.

    python -m scripts.data_prep                                            # the Python standard library
    python -m scripts.data_prep --corpus path:my_texts --vocab-size 8192   # your own text
    python -m scripts.data_prep --corpus hf:HuggingFaceFW/fineweb-edu:sample-10BT --max-tokens 2000000000
    python -m scripts.data_prep -- --run mine --depth 12 ...    # what base_train reads with these flags

The Python standard library needs no download. A corpus on the hub can be prepared during training, which
starts with the first shards and waits for the next ones (put nice -n 10 in front to give training priority).
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

import math
import sys
from dataclasses import replace

from nanomuon import shards
from nanomuon.attention import use_flash_attention
from nanomuon.command import number, run_command
from nanomuon.corpus import open_corpus, remember
from nanomuon.plan import make_plan
from nanomuon.runtime import print0, start, usable_gpus
from nanomuon.settings import RunParser, add_data_flags, make_parser
from scripts import base_train


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    for_training = argv[:1] == ["--"]
    args = of_training(argv[1:]) if for_training else own_parser().parse_args(argv)
    corpus = open_corpus(args.corpus, args.text_field, args.skip_unreadable)
    others = f", {corpus.others:,} others skipped" if corpus.others else ""
    print0(f"corpus {corpus.name}: {len(corpus.files):,} files with text{others}")
    folder = shards.prepare_shards(corpus, args.vocab_size, max_tokens=args.max_tokens)
    if args.text_field and not for_training:  # a run records its field itself
        remember(corpus)
    manifest = shards.read_manifest(folder)
    for kind, entries in (("train", manifest.train), ("val", manifest.val)):
        documents = sum(entry.documents for entry in entries)
        tokens = shards.count_tokens(entries)
        print0(f"{kind}: {tokens:,} tokens of {documents:,} documents in {len(entries)} shards")
    if manifest.unreadable:
        print0(f"left out: {manifest.unreadable}")
    print0(f"shards: {folder}")


def own_parser():
    parser = RunParser("python -m scripts.data_prep", __doc__)
    add_data_flags(parser)
    parser.add_argument(
        "--max-tokens",
        type=number(int, 0, 1 << 60),
        default=math.inf,
        help="stop after the eight shards that reach this many training tokens (default: the whole corpus)",
    )
    return parser


def of_training(flags):
    """The arguments for preparing what base_train reads with these flags: of a corpus on the hub, as many
    tokens as the run needs on all GPUs of this machine; of any other, everything.
    """
    args, settings = base_train.parse_flags(make_parser(), flags)
    runtime = start(args.dtype)
    use_flash_attention(runtime.device, runtime.compute_dtype)  # it decides windows, and so FLOPs and length
    ranks = args.tensor_parallel
    if args.total_batch_size is None:  # then the batch, and so the number of tokens, follows from the ranks
        ranks = max(usable_gpus(), ranks)
    plan = make_plan(args, replace(runtime, world_size=ranks), settings)
    args.vocab_size = plan.config.vocab_size
    args.max_tokens = plan.tokens if args.corpus.startswith("hf:") else math.inf
    return args


if __name__ == "__main__":
    run_command(main)
