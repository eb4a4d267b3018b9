"""Token shards on disk: tokenized in parallel, read by memory map.

    shards/<corpus>-<vocab>/
        tokenizer/                     the tokenizer they were written with
        manifest.json                  corpus, tokenizer, documents and tokens of each shard
        val-00000.safetensors          the validation set: the first SHARD_BYTES of validation documents
        train-00000.safetensors ...    documents of the corpus in their order, SHARD_BYTES of UTF-8 text each

Which documents a shard holds depends on the corpus alone. A shard has two tensors: `tokens` (uint16, or
uint32 for a vocabulary over 65,536) and `starts` (int64), where each document begins; no <|bos|> is stored. A
shard is written whole, then the manifest counts it: one that it does not count does not exist. Validation
documents beyond the first shard are left out, not trained on.
"""

import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from nanomuon.corpus import Corpus, is_validation, with_both_parts
from nanomuon.runtime import (
    InputError,
    base_dir,
    being_written,
    cores,
    locked,
    print0,
    read_json,
    write_json,
    write_whole,
)
from nanomuon.tokenizer import Tokenizer

SHARD_BYTES = 16 << 20  # of text; about 4 million tokens
TRAINING_BYTES = 512 << 20  # of text, from which the tokenizer is trained
BATCH = 8  # documents, handed to one worker at a time
WINDOW = 8  # consecutive training shards whose documents are shuffled together; about 32 million tokens
PATIENCE = 30  # seconds to wait for somebody to start on shards that are missing
WRITE_AGAIN = "delete its folder and run scripts.data_prep"


@dataclass
class Entry:
    """A shard in the manifest."""

    documents: int
    tokens: int
    file: int  # of the corpus, in which reading goes on after this shard,
    done: int  # and how many documents of its kind in that file are in shards


@dataclass
class Manifest:
    """manifest.json."""

    corpus: str
    tokenizer: str  # its hash
    vocab_size: int
    val: list[Entry]
    train: list[Entry]
    complete: bool  # everything that was asked for is there
    max_tokens: int | None  # of training that were asked for; None: the whole corpus


def read_manifest(folder) -> Manifest | None:
    """manifest.json of a folder of shards; None if there is none."""
    file = Path(folder) / "manifest.json"
    return read_json(file, Manifest, WRITE_AGAIN) if file.exists() else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / "manifest.json", asdict(manifest))


def shard_name(kind: str, number: int) -> str:
    """kind: "train" or "val"."""
    return f"{kind}-{number:05d}.safetensors"


def write_shard(path: Path, documents: list[np.ndarray]) -> None:
    """Write documents (arrays of ids) as one shard, whole or not at all."""
    ends = np.cumsum([len(document) for document in documents])
    starts = np.append(0, ends[:-1])
    with write_whole(path) as file:
        file.write(save({"starts": starts, "tokens": np.concatenate(documents)}))


def read_shards(folder, manifest: Manifest, kind: str, window: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The documents of a window of shards, one after another.

    Returns (tokens (n,), uint16 or uint32, starts (documents,), int64). InputError names the file that is not
    what the manifest says.
    """
    entries = getattr(manifest, kind)[window * WINDOW : (window + 1) * WINDOW]
    all_tokens, all_starts, base = [], [], 0
    for number, entry in enumerate(entries, window * WINDOW):
        path = Path(folder) / shard_name(kind, number)
        try:
            with safe_open(path, "pt") as file:  # which maps it, where "numpy" would copy it
                tokens, starts = (file.get_tensor(name).numpy() for name in ("tokens", "starts"))
        except (SafetensorError, OSError) as error:
            raise InputError(f"shard {path} cannot be read ({error}): {WRITE_AGAIN}") from error
        if (len(starts), len(tokens)) != (entry.documents, entry.tokens):
            raise InputError(f"shard {path} is not the one of the manifest: {WRITE_AGAIN}")
        all_tokens.append(tokens)
        all_starts.append(starts + base)
        base += len(tokens)
    return np.concatenate(all_tokens), np.concatenate(all_starts)


def count_tokens(entries: list[Entry]) -> int:
    return sum(entry.tokens for entry in entries)


def default_vocab_size(corpus_name: str) -> int:
    """4,096 suits megabytes of text and small models; corpora worth a download train larger ones."""
    return 32768 if corpus_name.startswith("hf:") else 4096


def tokenizer_folder(corpus: Corpus, vocab_size: int) -> Path:
    """Where the tokenizer of a corpus lives."""
    return base_dir() / "tokenizer" / f"{corpus.slug}-{vocab_size}"


def shard_folder(corpus: Corpus, vocab_size: int, tokenizer: Tokenizer | None = None) -> Path:
    """Where the shards of a corpus lie; a tokenizer that is not the corpus's own has a folder of its own."""
    folder = base_dir() / "shards" / f"{corpus.slug}-{vocab_size}"
    if tokenizer is None:
        return folder
    manifest = read_manifest(folder)
    if manifest and manifest.tokenizer == tokenizer.hash:
        return folder
    return folder.with_name(f"{folder.name}-{tokenizer.hash[:8]}")


def prepare_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """The tokenizer of a corpus, trained on the first TRAINING_BYTES of its documents if need be."""
    folder = tokenizer_folder(corpus, vocab_size)
    if not (folder / "tokenizer.json").exists():
        print0(f"training a tokenizer of {vocab_size} tokens on {corpus.name}")
        Tokenizer.train(_training_text(corpus), vocab_size).save(folder)
    return Tokenizer.load(folder)


def _training_text(corpus):
    size = 0
    for _, text in corpus.documents():
        if not is_validation(text):
            yield text
        size += len(text.encode())
        if size >= TRAINING_BYTES:
            return


def prepare(
    corpus: Corpus,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    max_tokens: int | None = None,
) -> Path:
    """Make whatever is missing of tokenizer and shards of a corpus, and return the folder of the shards.

    Quick if nothing is missing. Carries on where an earlier call was stopped, at whatever moment. A second
    call at the same time waits for the first.

    tokenizer: use this one instead of the corpus's own. max_tokens: stop after the shard that brings this
    many training tokens, 0 for the validation set only (default: the whole corpus); a later call may ask for
    more.

    Before anything is computed, InputError if there would be no training or no validation document.
    """
    if tokenizer:
        vocab_size = tokenizer.vocab_size
    elif not vocab_size:
        vocab_size = default_vocab_size(corpus.name)
    folder = shard_folder(corpus, vocab_size, tokenizer)
    if not _is_there(folder, max_tokens):
        with locked(folder):
            if not _is_there(folder, max_tokens):  # another process may have written it while we waited
                corpus = with_both_parts(corpus)
                tokenizer = tokenizer or prepare_tokenizer(corpus, vocab_size)
                _write_missing(folder, corpus, tokenizer, max_tokens)
    return folder


def _is_there(folder, max_tokens):
    manifest = read_manifest(folder)
    if not manifest or not manifest.complete:
        return False
    if manifest.max_tokens is None:  # the whole corpus
        return True
    return max_tokens is not None and max_tokens <= manifest.max_tokens


def _write_missing(folder: Path, corpus: Corpus, tokenizer: Tokenizer, max_tokens: int | None) -> None:
    """Write the shards that are missing of a folder, which this process holds. See prepare()."""
    manifest = read_manifest(folder)
    if manifest is None:
        tokenizer.save(folder / "tokenizer")
        manifest = Manifest(corpus.name, tokenizer.hash, tokenizer.vocab_size, [], [], False, max_tokens)
    elif manifest.tokenizer != tokenizer.hash:
        raise InputError(f"{folder} was written with another tokenizer: {WRITE_AGAIN}")
    manifest.complete, manifest.max_tokens = False, max_tokens
    write_manifest(folder, manifest)

    most = math.inf if max_tokens is None else max_tokens
    pool = ThreadPoolExecutor(cores())  # tiktoken works outside the GIL
    try:
        # The validation set is one shard, and first: training waits for it
        for kind, entries, wanted in (("val", manifest.val, 1), ("train", manifest.train, most)):
            shards = _encoded_shards(corpus, kind, entries, tokenizer, pool)
            while count_tokens(entries) < wanted and (shard := next(shards, None)):
                encoded, file, done = shard
                documents = [document for batch in encoded for document in batch.result()]
                name = shard_name(kind, len(entries))
                write_shard(folder / name, documents)
                entries.append(Entry(len(documents), sum(map(len, documents)), file, done))
                write_manifest(folder, manifest)
                print(f"{name}: {entries[-1].tokens:,} tokens", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    if count_tokens(manifest.train) < most:
        manifest.max_tokens = None  # it is the whole corpus
    manifest.complete = True
    write_manifest(folder, manifest)


def _encoded_shards(corpus: Corpus, kind: str, entries: list[Entry], tokenizer: Tokenizer, pool):
    """Yield (futures of lists of encoded documents, file, done) of every shard of a kind that has no entry.

    file, done: as in Entry. The workers of the pool encode while more is read.
    """
    file, skipped = 0, sum(entry.documents for entry in entries)
    if corpus.repo and entries:
        file, skipped = entries[-1].file, entries[-1].done  # earlier files are not needed to tell duplicates
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32

    def encode(texts):
        return [tokenizer.encode_to_numpy(text).astype(dtype) for text in texts]

    texts, encoded, size = [], [], 0
    done = Counter()  # by file
    for file, text in corpus.documents(file):  # noqa: B020
        if is_validation(text) != (kind == "val"):
            continue
        done[file] += 1
        if skipped > 0:
            skipped -= 1
            continue
        texts.append(text)
        size += len(text.encode())
        is_full = size >= SHARD_BYTES
        if is_full or len(texts) == BATCH:
            encoded.append(pool.submit(encode, texts))
            texts = []
        if is_full:
            yield encoded, file, done[file]
            encoded, size = [], 0
    if size:
        yield [*encoded, pool.submit(encode, texts)], len(corpus.files), 0


def prepare_for_training(
    corpus: Corpus, vocab_size: int | None = None, max_tokens: int | None = None
) -> Path:
    """The folder of the shards as soon as training can start: prepare() for a corpus on this machine.

    A corpus on the hub is left to scripts.data_prep, which may stay at work during the training: this waits
    for the validation set and the first WINDOW training shards. InputError if no process works on what is
    missing; it tells how to make `max_tokens` training tokens.
    """
    if corpus.repo is None:
        return prepare(corpus, vocab_size)
    vocab_size = vocab_size or default_vocab_size(corpus.name)
    folder = shard_folder(corpus, vocab_size)
    wait_for_window(folder, 0, corpus.name, vocab_size, max_tokens)
    return folder


def window_is_there(manifest: Manifest | None, window: int) -> bool:
    """Whether the validation set and the shards of training window 0, 1, ... are complete."""
    if not manifest:
        return False
    if manifest.complete:
        return True
    return len(manifest.val) > 0 and len(manifest.train) >= (window + 1) * WINDOW


class NobodyWrites(InputError):
    """Shards are missing and no process is at work on them. All ranks miss them in the same micro-batch."""


def wait_for_window(
    folder: Path, window: int, corpus: str, vocab_size: int, max_tokens: int | None
) -> Manifest:
    """The manifest once window_is_there(); NobodyWrites, with what to do, if nobody works on the folder."""
    manifest = read_manifest(folder)
    if not window_is_there(manifest, window):
        first, last = window * WINDOW, (window + 1) * WINDOW - 1
        print0(f"waiting for training shards {first} to {last} of {folder}")
    idle = 0  # seconds: a process that was started together with us may need a moment to take the lock
    while not window_is_there(manifest, window):
        idle = 0 if being_written(folder) else idle + 1
        if idle > PATIENCE:
            most = f" --max-tokens {max_tokens}" if max_tokens else ""
            raise NobodyWrites(
                f"{folder} is incomplete and no process is writing it: run python -m scripts.data_prep "
                f"--corpus {corpus} --vocab-size {vocab_size}{most}"
            )
        time.sleep(1)
        manifest = read_manifest(folder)
    return manifest
