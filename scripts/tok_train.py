"""Train the tokenizer of a corpus, unless it exists, and print how well it compresses.

python -m scripts.tok_train --corpus python --vocab-size 4096
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

from nanomuon.command import run_command
from nanomuon.corpus import open_corpus, with_both_parts
from nanomuon.runtime import print0
from nanomuon.settings import RunParser, add_data_flags
from nanomuon.shards import default_vocab_size, prepare_tokenizer, tokenizer_folder

SAMPLE_BYTES = 4 << 20  # of validation text


def main(argv=None):
    parser = RunParser("python -m scripts.tok_train", __doc__)
    add_data_flags(parser)
    args = parser.parse_args(argv)
    corpus = with_both_parts(open_corpus(args.corpus, args.text_field, args.skip_unreadable))
    vocab_size = args.vocab_size or default_vocab_size(corpus.name)
    tokenizer = prepare_tokenizer(corpus, vocab_size)
    size = tokens = 0
    for text, is_validation in corpus.documents():
        if is_validation:
            size += len(text.encode())
            tokens += len(tokenizer.encode_to_numpy(text))
        if size >= SAMPLE_BYTES:
            break
    print(f"{size / tokens:.3f} bytes per token, on {size:,} bytes of validation text")
    print0(f"tokenizer: {tokenizer_folder(corpus, vocab_size)} (hash {tokenizer.hash})")


if __name__ == "__main__":
    run_command(main)
