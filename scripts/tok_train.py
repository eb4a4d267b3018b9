"""Train the tokenizer of a corpus and say how well it compresses.

python -m scripts.tok_train --corpus python --vocab-size 4096
"""

from unittest import mock

import tiktoken

from nanomuon.corpus import is_validation, open_corpus, with_both_parts
from nanomuon.runtime import print0, run_command
from nanomuon.shards import default_vocab_size, prepare_tokenizer, tokenizer_folder
from scripts.arguments import ArgumentParser, vocabulary

SAMPLE_BYTES = 4 << 20  # of validation text


def main(argv=None):
    parser = ArgumentParser("python -m scripts.tok_train", __doc__)
    add = parser.add_argument
    add(
        "--corpus",
        default="python",
        help="python, path:FILE_OR_FOLDER or hf:ORG/NAME[:CONFIG] (default: %(default)s)",
    )
    add(
        "--vocab-size",
        type=vocabulary,
        help="tokens in the vocabulary (default: 4096, or 32768 for corpora on the hub)",
    )
    args = parser.parse_args(argv)

    corpus = with_both_parts(open_corpus(args.corpus))
    vocab_size = args.vocab_size or default_vocab_size(corpus.name)
    tokenizer = prepare_tokenizer(corpus, vocab_size)
    sample, size = [], 0
    for text in filter(is_validation, corpus.documents()):
        sample.append(text)
        size += len(text.encode())
        if size >= SAMPLE_BYTES:
            break
    ours = sum(len(tokenizer.encode_to_numpy(text)) for text in sample)
    compared = [f"{size / max(1, ours):.3f} bytes per token"]
    for name in ("gpt2", "cl100k_base"):
        if encoding := cached_encoding(name):
            compared.append(f"{name} {size / sum(map(len, encoding.encode_ordinary_batch(sample))):.3f}")
    print(f"{', '.join(compared)}, on {size:,} bytes of validation text")
    print0(f"tokenizer: {tokenizer_folder(corpus, vocab_size)} (hash {tokenizer.hash})")


def cached_encoding(name):
    """tiktoken's encoding if its files are in tiktoken's cache, else None."""
    with mock.patch("tiktoken.load.read_file", side_effect=FileNotFoundError):  # in place of a download
        try:
            return tiktoken.get_encoding(name)
        except FileNotFoundError:
            return None


if __name__ == "__main__":
    run_command(main)
