"""Byte-level BPE: rustbpe trains it, tiktoken runs it, a JSON file stores it."""

import hashlib
import re
import threading
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken

from nanomuon.runtime import InputError, read_json, write_json

BOS = "<|bos|>"
# GPT-4's split pattern, but with digits in groups of at most 2, not 3: small vocabularies waste less on them
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
# Longer texts are encoded in pieces: the regex engine gives up on a run of a million spaces, and BPE takes
# 40 s on one word of 50 MB
PIECE = 1 << 16  # characters
LONG_SPACE = re.compile(rf"(?<!\s)\s{{{PIECE}}}")  # without (?<!\s) its time would be quadratic


@dataclass
class Content:
    """tokenizer.json."""

    vocab: list[str]  # in the order of the ranks; each character is a byte, as in Latin-1


class Tokenizer:
    """Text to token ids and back: BPE ranks 0..vocab_size-2, then `bos_id`, which no text encodes to."""

    def __init__(self, vocab: list[bytes]):
        self.vocab = vocab
        self.bos_id = len(vocab)
        self.vocab_size = len(vocab) + 1
        self.dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self._local = threading.local()

    @property
    def _bpe(self) -> tiktoken.Encoding:
        # One per thread: the regex engine is fast in the thread that first used it, and 20% slower in others
        # (measured with tiktoken 0.14)
        if not hasattr(self._local, "bpe"):
            self._local.bpe = tiktoken.Encoding(
                "nanomuon",
                pat_str=SPLIT_PATTERN,
                mergeable_ranks={token: rank for rank, token in enumerate(self.vocab)},
                special_tokens={BOS: self.bos_id},
            )
        return self._local.bpe

    @classmethod
    def train(cls, texts, vocab_size: int) -> "Tokenizer":
        """Train on an iterable of str. vocab_size counts the 256 bytes, the merges and <|bos|>."""
        import rustbpe

        trainer = rustbpe.Tokenizer()
        pieces = (piece for text in texts for piece in _trainable(text))
        trainer.train_from_iterator(pieces, vocab_size - 1, pattern=SPLIT_PATTERN)
        vocab = [bytes(token) for token, _ in trainer.get_mergeable_ranks()]  # in the order of the ranks
        if len(vocab) < vocab_size - 1:
            raise InputError(
                f"the text is too small for a vocabulary of {vocab_size}: "
                f"use --vocab-size {len(vocab) + 1} or less"
            )
        return cls(vocab)

    def save(self, folder) -> None:
        """Write folder/tokenizer.json, whole or not at all."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        content = Content([token.decode("latin-1") for token in self.vocab])
        write_json(Path(folder) / "tokenizer.json", asdict(content))

    @classmethod
    def load(cls, folder) -> "Tokenizer":
        """Read what save() wrote. InputError if it is missing or cannot be read."""
        file = Path(folder) / "tokenizer.json"
        advice = (
            "the folders of its corpus in tokenizer/ and shards/ have copies: put one here, or delete those "
            "folders, and they are created again"
        )
        content = read_json(file, Content, advice)
        vocab = [token.encode("latin-1", errors="replace") for token in content.vocab]
        if len(set(vocab)) < len(vocab) or not {bytes([byte]) for byte in range(256)} <= set(vocab):
            raise InputError(f"{file}: its tokens are not distinct, or do not include all 256 bytes")
        return cls(vocab)

    @cached_property
    def hash(self) -> str:
        """16 hex digits that identify this tokenizer in the names of shard folders and in settings.json."""
        return hashlib.sha256(repr((SPLIT_PATTERN, self.vocab)).encode()).hexdigest()[:16]

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int32: UTF-8 bytes of each token, for bits per byte; 0 for <|bos|>."""
        return np.array([*map(len, self.vocab), 0], dtype=np.int32)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Ids (n,) of a text in `dtype`, without <|bos|>. Releases the GIL, so threads encode in parallel.

        Text that looks like a special token is encoded as ordinary text. ValueError for lone surrogates.
        """
        pieces = [self._bpe.encode_to_numpy(piece, disallowed_special=()) for piece in in_pieces(text, PIECE)]
        return np.concatenate(pieces).astype(self.dtype)

    def encode(self, text: str) -> list[int]:
        """encode_to_numpy() as a list."""
        return self.encode_to_numpy(text).tolist()

    def decode(self, ids) -> str:
        """The text of token ids; <|bos|> shows as itself, incomplete UTF-8 as U+FFFD."""
        return self._bpe.decode(ids)


def _trainable(text):
    """The text in pieces only if it must be: cutting changes which tokens are learned."""
    return in_pieces(text, PIECE) if LONG_SPACE.search(text) else (text,)


def in_pieces(text: str, size: float):
    """Yield the text in pieces of at most `size` characters, each cut at its last line end if it has one."""
    start = 0
    while len(text) - start > size:
        line_end = text.rfind("\n", start, start + size)
        end = start + size if line_end == -1 else line_end + 1
        yield text[start:end]
        start = end
    yield text[start:]
