"""How well a tokenizer compresses text, beside those of GPT-2 and GPT-4.

python -m scripts.tok_eval --run base                                   # on validation text of its corpus
python -m scripts.tok_eval --tokenizer FOLDER --text my_text.txt

Bytes per token are UTF-8 bytes of the text over tokens. tiktoken downloads the other two once; where it
cannot, a line says so.
"""

from collections import Counter
from pathlib import Path

import tiktoken

from nanomuon.arguments import ArgumentParser
from nanomuon.corpus import is_validation, open_corpus, with_both_parts
from nanomuon.export import load_model_config
from nanomuon.run_folder import find_run
from nanomuon.runtime import InputError, run_command
from nanomuon.tokenizer import Tokenizer, in_pieces, load_or_restore

OTHERS = {"GPT-2": "gpt2", "cl100k (GPT-4)": "cl100k_base"}
SAMPLE_BYTES = 4 << 20  # of validation text


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.tok_eval", __doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", help="the tokenizer of a finished run, by name or path")
    which.add_argument("--tokenizer", metavar="FOLDER", help="a folder with vocab.txt and tokenizer.json")
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="UTF-8 text (default: 4 MB of validation text of the run's corpus, of `python` for --tokenizer)",
    )
    args = parser.parse_args(argv)

    if args.run is not None:
        folder = find_run(args.run)
        _, about = load_model_config(folder)
        corpus = about["corpus"]
        tokenizer = load_or_restore(folder / "tokenizer", about["tokenizer"])
    else:
        corpus = "python"
        tokenizer = Tokenizer.load(args.tokenizer)
    if args.text is not None:
        texts, source = [read_text(args.text)], args.text
    else:
        texts, source = validation_texts(corpus), f"validation text of {corpus}"
    size = sum(len(text.encode()) for text in texts)
    if size == 0:
        raise InputError(f"no text in {source}")

    print(f"{size:,} bytes, {source}")
    print(f"{'':16}{'vocabulary':>12}{'tokens':>12}{'bytes per token':>17}{'tokens / ours':>15}")
    ours = sum(len(tokenizer.encode_to_numpy(text)) for text in texts)
    print_row("ours", tokenizer.vocab_size, ours, ours, size)
    for name, encoding_name in OTHERS.items():
        try:
            encoding = tiktoken.get_encoding(encoding_name)
        except Exception as error:  # tiktoken passes on what its download raises
            print(f"{name:16} tiktoken cannot load {encoding_name} here ({type(error).__name__})")
            continue
        tokens = 0
        for text in texts:
            for piece in in_pieces(text):
                tokens += len(encoding.encode_ordinary(piece))
        print_row(name, encoding.n_vocab, tokens, ours, size)


def print_row(name: str, vocab_size: int, tokens: int, ours: int, size: int) -> None:
    print(f"{name:16}{vocab_size:12,}{tokens:12,}{size / tokens:17.3f}{tokens / ours:15.3f}")


def read_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {file} cannot be read: {error}") from error


def validation_texts(corpus: str) -> list[str]:
    """Documents of the validation set, of SAMPLE_BYTES in all or a little more."""
    texts = []
    size = 0
    for text in with_both_parts(open_corpus(corpus)).documents(Counter()):
        if is_validation(text):
            texts.append(text)
            size += len(text.encode())
            if size >= SAMPLE_BYTES:
                break
    return texts


if __name__ == "__main__":
    run_command(main)
