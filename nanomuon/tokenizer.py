"""Byte-level BPE: rustbpe trains it, tiktoken runs it, two text files store it.

A tokenizer folder holds `vocab.txt`, one `base64(token bytes) rank` a line in the order of the ranks
(tiktoken's own format), and `tokenizer.json` with the split pattern and the special token. Nothing is
pickled.
"""

import base64
import hashlib
import json
import operator
import os
import shutil
import threading
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken

from nanomuon.files import read_json
from nanomuon.runtime import InputError

BOS = "<|bos|>"
# GPT-4's split pattern with digits in groups of at most 2, not 3: small vocabularies waste less on numbers
SPLIT_PATTERN = "|".join(
    [
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"\p{N}{1,2}",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Longer texts are encoded in pieces of at most this many characters, cut after a line end where there is one.
# The regex engine gives up on a run of a million spaces, and BPE takes 40 s on one word of 50 MB.
PIECE = 1 << 16


class Tokenizer:
    """Text to token ids and back: the BPE ranks 0..vocab_size-2, then `bos_id`, which no text encodes to."""

    def __init__(self, vocab: list[bytes], pattern: str = SPLIT_PATTERN):
        self.vocab = vocab
        self.pattern = pattern
        self.bos_id = len(vocab)
        self.vocab_size = len(vocab) + 1
        self._local = threading.local()

    @property
    def _bpe(self) -> tiktoken.Encoding:
        # One for each thread: the regex engine is fast for the thread that used it first, and others would
        # take 20% longer (measured with tiktoken 0.14)
        if not hasattr(self._local, "bpe"):
            self._local.bpe = tiktoken.Encoding(
                "nanomuon",
                pat_str=self.pattern,
                mergeable_ranks={token: rank for rank, token in enumerate(self.vocab)},
                special_tokens={BOS: self.bos_id},
            )
        return self._local.bpe

    @classmethod
    def train(cls, texts, vocab_size: int) -> "Tokenizer":
        """Train on an iterable of str. vocab_size counts the 256 bytes, the merges and <|bos|>."""
        import rustbpe

        if vocab_size < 257:
            raise InputError(f"vocabulary of {vocab_size}: use at least 257 (256 bytes and {BOS})")
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(texts), vocab_size - 1, pattern=SPLIT_PATTERN)
        ranks = sorted(trainer.get_mergeable_ranks(), key=operator.itemgetter(1))
        vocab = [bytes(token) for token, _ in ranks]
        if len(vocab) < vocab_size - 1:
            raise InputError(
                f"the text is too small for a vocabulary of {vocab_size}: "
                f"use --vocab-size {len(vocab) + 1} or less"
            )
        return cls(vocab)

    def save(self, folder) -> None:
        """Write the folder whole or not at all; an existing one is replaced."""
        folder = Path(folder)
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            (temporary / "vocab.txt").write_text(self._vocab_text(), encoding="ascii")
            settings = json.dumps(self._settings(), indent=2) + "\n"
            (temporary / "tokenizer.json").write_text(settings, encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def load(cls, folder) -> "Tokenizer":
        """Read a folder written by save(). A missing, damaged or foreign one raises InputError."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").exists():
            raise InputError(f"no tokenizer in {folder}: python -m scripts.tok_train makes one")
        settings = read_json(folder / "tokenizer.json", dict, "delete the folder and train again")
        try:
            lines = (folder / "vocab.txt").read_text("ascii").splitlines()
            vocab = [base64.b64decode(line.split()[0]) for line in lines]
            tokenizer = cls(vocab, settings.get("pattern"))
            tokenizer._check()
        except (OSError, ValueError, IndexError) as error:
            raise InputError(
                f"damaged tokenizer in {folder} ({error!r}): delete the folder and train again"
            ) from error
        if settings != tokenizer._settings():
            raise InputError(
                f"the files of tokenizer {folder} do not belong together: delete the folder, train again"
            )
        return tokenizer

    def _check(self):
        """ValueError where tiktoken would give up on some text with what no `except Exception` catches.

        It does on unknown bytes, and on some patterns; others take for ever.
        """
        if self.pattern != SPLIT_PATTERN:
            raise ValueError("its split pattern is not the one of this version")
        tokens = set(self.vocab)
        if len(tokens) < len(self.vocab) or b"" in tokens:
            raise ValueError("a token is there twice, or empty")
        if not all(bytes([byte]) in tokens for byte in range(256)):
            raise ValueError("it does not have all 256 bytes")

    def _vocab_text(self) -> str:
        lines = []
        for rank, token in enumerate(self.vocab):
            lines.append(f"{base64.b64encode(token).decode()} {rank}\n")
        return "".join(lines)

    def _settings(self) -> dict:
        return {
            "type": "bpe",
            "vocab_size": self.vocab_size,
            "pattern": self.pattern,
            "special_tokens": {BOS: self.bos_id},
            "vocab_sha256": hashlib.sha256(self._vocab_text().encode()).hexdigest(),
        }

    @cached_property
    def hash(self) -> str:
        """16 hex digits that name this tokenizer in shards and checkpoints."""
        return hashlib.sha256(json.dumps(self._settings(), sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int32: UTF-8 bytes each token stands for, to count bits per byte; 0 for <|bos|>."""
        lengths = [len(token) for token in self.vocab]
        return np.array([*lengths, 0], dtype=np.int32)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """(n,) uint32 ids of a text, without <|bos|>. Releases the GIL, so threads encode in parallel.

        What looks like a special token is encoded as ordinary text. ValueError for lone surrogates, which are
        no text.
        """
        try:
            pieces = [self._bpe.encode_to_numpy(piece, disallowed_special=()) for piece in in_pieces(text)]
        except UnicodeEncodeError as error:
            raise ValueError(
                f"cannot encode the lone surrogate {text[error.start]!a} at character {error.start}: "
                "repair the text with .encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
            ) from error
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def encode(self, text: str) -> list[int]:
        """encode_to_numpy() as a list."""
        return self.encode_to_numpy(text).tolist()

    def decode(self, ids) -> str:
        """The text of token ids; <|bos|> shows as itself, incomplete UTF-8 as U+FFFD."""
        return self._bpe.decode(ids)


def in_pieces(text: str):
    """Yield the text in pieces of at most PIECE characters, each up to the last line end in its reach."""
    start = 0
    while len(text) - start > PIECE:
        line_end = text.rfind("\n", start, start + PIECE)
        end = start + PIECE if line_end == -1 else line_end + 1
        yield text[start:end]
        start = end
    yield text[start:]
