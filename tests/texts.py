"""Small corpora for the tests of shards and loader."""

import hashlib
import json
import random

from nanomuon.shards import read_manifest, read_shards
from nanomuon.tokenizer import Tokenizer

WORDS = "def return import self value for in the of and 12 345 été 数据 \n\n    == () [x] 'text' # note"
WORDS = WORDS.split(" ")


def random_texts(count, seed=0, longest=600):
    """Distinct texts of 1 to `longest` words, most of them short."""
    rng = random.Random(seed)
    lengths = (int(longest ** rng.random()) for _ in range(count))
    return [f"{i} " + " ".join(rng.choices(WORDS, k=length)) for i, length in enumerate(lengths)]


def is_validation(text):
    """The documented rule: one document in twenty, by its own hash."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) % 20 == 0


def write_corpus(folder, texts, files=3):
    """A folder of .jsonl files; returns the name of the corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        part = texts[i * len(texts) // files : (i + 1) * len(texts) // files]
        (folder / f"{i}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return f"path:{folder}"


TOKENIZER = Tokenizer.train(random_texts(200), 300)
BYTES = Tokenizer([bytes([byte]) for byte in range(256)])  # a token is a byte, and 256 begins a document


def documents(folder, kind, window=0):
    """The texts of a window of the shards of a kind that TOKENIZER wrote."""
    tokens, starts = read_shards(folder, read_manifest(folder), kind, window)
    ends = [*starts[1:], len(tokens)]
    pairs = zip(starts, ends, strict=True)
    return [TOKENIZER.decode(tokens[start:end].tolist()) for start, end in pairs]
