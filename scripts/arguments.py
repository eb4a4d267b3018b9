"""What the command lines share: the parser, the types of their flags, and the flags of a finished run."""

import argparse

from nanomuon.recipe import read_source
from nanomuon.runtime import InputError

SMALLEST_VOCABULARY = 257  # of a tokenizer: 256 bytes and <|bos|>


class ArgumentParser(argparse.ArgumentParser):
    """Of one command: its description is shown as it is written, and what is wrong is an InputError.

    argparse would print the usage before it says what is wrong: 60 lines of base_train's.
    """

    def __init__(self, prog: str, description: str, **settings):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog=prog, description=description, formatter_class=layout, allow_abbrev=False, **settings
        )

    def error(self, message: str):
        raise InputError(f"{message}; see {self.prog} --help")


def number(kind: type, low: float, high: float):
    """The type of a flag whose value is an int or a float from `low` to `high`; NaN is not among them."""

    bounds = f"from {low:,} to {high:,}" if kind is int else f"from {low:g} to {high:g}"

    def parse(text: str):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
        return value

    parse.__name__ = kind.__name__  # argparse's "invalid int value"
    return parse


count = number(int, 1, 1 << 40)
layers = number(int, 1, 1024)
vocabulary = number(int, SMALLEST_VOCABULARY, 1 << 24)
rate = number(float, 0, 1e30)
share = number(float, 0, 1)
seed = number(int, 0, 1 << 62)
processes = number(int, 1, 1 << 16)
size = number(float, 1e-30, 1e30)


def windows(text: str) -> str:
    if not text or set(text) - set("SL"):
        raise argparse.ArgumentTypeError(f"is a string of S and L such as SSSL, not {text!r}")
    return text


def python_file(text: str) -> str:
    read_source(text)
    return text


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        default="base",
        help="a finished run: its name under runs/, or the path of its folder, which has a slash (./NAME) "
        "(default: %(default)s)",
    )


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        metavar="last|step_N",
        help="the model as this checkpoint of the run has it, which may still be training (default: as it is "
        "at the end)",
    )


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float32"],
        help="of activations and matrix products; weights are float32. auto: bfloat16 if the device has "
        "instructions for it (default: %(default)s)",
    )
