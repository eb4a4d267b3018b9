"""Make whatever is missing of corpus, tokenizer and token shards. Run it again after any interruption: it carries on.

python -m scripts.data_prep                                            # the Python standard library, no download
python -m scripts.data_prep --corpus path:my_texts --vocab-size 8192   # your own text
"""

import argparse

from nanomuon import shards
from nanomuon.corpus import open_corpus
from nanomuon.runtime import run_command


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", default="python", help="python or path:FILE_OR_FOLDER (default: %(default)s)")
    add("--vocab-size", type=int, help="tokens in the vocabulary (default: 4096, or 32768 for corpora on the hub)")
    add("--text-field", help="field of the records that holds the text (default: text)")
    add("--separator", help="cut .txt files into documents at this string")
    add("--workers", type=int, help="threads that tokenize (default: one per core)")
    args = parser.parse_args(argv)

    corpus = open_corpus(args.corpus, args.text_field, args.separator)
    folder = shards.prepare(corpus, args.vocab_size, args.workers)
    manifest = shards.read_manifest(folder)
    for kind in ("train", "val"):
        tokens, documents = (sum(shard[key] for shard in manifest[kind]) for key in ("tokens", "documents"))
        print(f"{kind}: {tokens:,} tokens of {documents:,} documents in {len(manifest[kind])} shards")
    print(f"counts: {manifest['counts']}")
    print(f"shards: {folder}")


if __name__ == "__main__":
    run_command(main)
