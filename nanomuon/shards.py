"""Token shards on disk: tokenized in parallel, memory-mapped for reading.

    shards/<corpus>-<vocab>/
        tokenizer/                     the tokenizer they were written with
        manifest.json                  the corpus, and the numbers of documents and tokens in each shard
        val-00000.safetensors          the validation set: the first SHARD_BYTES of validation documents
        train-00000.safetensors ...    the training documents in order, SHARD_BYTES of UTF-8 text each

Which documents are in a shard depends only on the corpus. A shard has two tensors: `tokens` (uint16, or
uint32 for a vocabulary over 65,536) and `starts` (int64), where each document begins; no <|bos|> is stored. A
shard is written whole, then listed in the manifest. A shard that is not listed does not count. Validation
documents beyond the first shard are left out; they are not trained on.
"""

import itertools
import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from nanomuon.corpus import Corpus, open_corpus, with_both_parts
from nanomuon.runtime import (
    InputError,
    base_dir,
    cores,
    lock_file,
    locked,
    print0,
    read_json,
    remove_unfinished,
    write_json,
    write_whole,
)
from nanomuon.tokenizer import Tokenizer

SHARD_BYTES = 16 << 20  # of text; about 4 million tokens
TRAINING_BYTES = 512 << 20  # of text: the tokenizer is trained on the training documents in it
WINDOW = 8  # consecutive training shards whose documents are shuffled together; about 32 million tokens
PATIENCE = 30  # seconds to wait for a process to start writing missing shards
WRITE_AGAIN = "delete its folder and run scripts.data_prep"


@dataclass
class Entry:
    """A shard in the manifest."""

    documents: int
    tokens: int


@dataclass
class Manifest:
    """manifest.json."""

    corpus: str
    vocab_size: int
    val: list[Entry]
    train: list[Entry]
    complete_to: float | None  # requested training tokens, inf for all; None while some are missing
    unreadable: str = ""  # what was left out because it could not be read

    def has_window(self, window: int) -> bool:
        """Whether the validation set and this training window are complete."""
        return self.complete_to is not None or len(self.train) >= (window + 1) * WINDOW


def read_manifest(folder) -> Manifest | None:
    """The manifest of a folder of shards; None if there is none."""
    file = Path(folder) / "manifest.json"
    return read_json(file, Manifest, WRITE_AGAIN) if file.exists() else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / "manifest.json", asdict(manifest))


def shard_name(kind: str, number: int) -> str:
    """kind: "train" or "val"."""
    return f"{kind}-{number:05d}.safetensors"


def write_shard(path: Path, documents: list[np.ndarray]) -> None:
    """Write documents (arrays of ids) as one shard, whole or not at all."""
    lengths = [len(document) for document in documents]
    starts = np.cumsum([0, *lengths[:-1]])
    with write_whole(path) as file:
        file.write(save({"starts": starts, "tokens": np.concatenate(documents)}))


def read_shards(folder, manifest: Manifest, kind: str, window: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The concatenated documents of a window of shards.

    Returns (tokens (n,) uint16 or uint32, starts (documents,) int64). InputError names a file that cannot be
    read.
    """
    entries = getattr(manifest, kind)
    numbers = range(len(entries))[window * WINDOW : (window + 1) * WINDOW]
    if not numbers:
        raise InputError(f"{folder}/manifest.json lists no {kind} shards: {WRITE_AGAIN}")
    all_tokens, all_starts, base = [], [], 0
    for number in numbers:
        path = Path(folder) / shard_name(kind, number)
        try:
            with safe_open(path, "pt") as file:  # "pt" memory-maps it, "numpy" would copy it
                tokens, starts = (file.get_tensor(name).numpy() for name in ("tokens", "starts"))
            check_shard(tokens, starts, entries[number], manifest.vocab_size)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise InputError(f"shard {path} cannot be read ({error}): {WRITE_AGAIN}") from error
        all_tokens.append(tokens)
        all_starts.append(starts + base)
        base += len(tokens)
    return np.concatenate(all_tokens), np.concatenate(all_starts)


def check_shard(tokens: np.ndarray, starts: np.ndarray, entry: Entry, vocab_size: int) -> None:
    """ValueError for a shard that is not what write_shard() wrote for this entry, such as a stranger's."""
    if (tokens.shape, starts.shape) != ((entry.tokens,), (entry.documents,)):
        raise ValueError("the manifest has other numbers of tokens and documents")
    if tokens.dtype not in (np.uint16, np.uint32) or tokens.max() >= vocab_size - 1:
        raise ValueError(f"its tokens are not ids below {vocab_size - 1}")
    if starts.dtype != np.int64 or np.diff(starts, prepend=0, append=entry.tokens).min() < 0:
        raise ValueError("its documents do not begin one after the other")


def count_tokens(entries: list[Entry]) -> int:
    return sum(entry.tokens for entry in entries)


def default_vocab_size(corpus_name: str) -> int:
    """4,096 suits megabytes of text and small models; corpora worth downloading train larger models."""
    return 32768 if corpus_name.startswith("hf:") else 4096


def tokenizer_folder(corpus: Corpus, vocab_size: int) -> Path:
    """Where the tokenizer of a corpus lives."""
    return base_dir() / "tokenizer" / f"{corpus.slug}-{vocab_size}"


def shard_folder(corpus: Corpus, vocab_size: int) -> Path:
    """Where the shards of a corpus live, if they are encoded by its own tokenizer."""
    return base_dir() / "shards" / f"{corpus.slug}-{vocab_size}"


def prepare_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """The tokenizer of a corpus. If it is missing, it is trained on the training documents in the first
    TRAINING_BYTES.
    """
    folder = tokenizer_folder(corpus, vocab_size)
    if not (folder / "tokenizer.json").exists():
        print0(f"training a tokenizer of {vocab_size} tokens on {corpus.name}")
        Tokenizer.train(_training_text(corpus), vocab_size).save(folder)
    return Tokenizer.load(folder)


def _training_text(corpus):
    size = 0
    for text, is_validation in corpus.documents():
        if not is_validation:
            yield text
        size += len(text.encode())
        if size >= TRAINING_BYTES:
            return


def prepare_shards(
    corpus: Corpus,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    max_tokens: float = math.inf,
) -> Path:
    """Write whatever is missing of a corpus's tokenizer and shards, and return the folder of the shards.

    Quick if nothing is missing. Continues where an earlier call was interrupted, at any moment. A second call
    at the same time waits for the first.

    tokenizer: use this one instead of the corpus's own, in a separate folder. max_tokens: stop after the
    window of shards that reaches this many training tokens, 0 for the validation set only; a later call may
    request more.

    InputError, before anything is computed, if there would be no training or no validation document.
    """
    vocab_size = vocab_size or default_vocab_size(corpus.name)
    folder = shard_folder(corpus, vocab_size)
    if tokenizer:
        folder = folder.with_name(f"{corpus.slug}-{tokenizer.hash[:8]}")
    if not _is_there(folder, max_tokens):
        with locked(folder):
            if not _is_there(folder, max_tokens):  # another process may have written it while we waited
                _write_missing(folder, with_both_parts(corpus), vocab_size, tokenizer, max_tokens)
    return folder


def _is_there(folder, max_tokens):
    manifest = read_manifest(folder)
    return manifest and manifest.complete_to is not None and manifest.complete_to >= max_tokens


def _write_missing(folder, corpus, vocab_size, tokenizer, max_tokens):
    """Write the missing shards of a folder that this process has locked. See prepare_shards()."""
    remove_unfinished(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        tokenizer = tokenizer or prepare_tokenizer(corpus, vocab_size)
        tokenizer.save(folder / "tokenizer")
        manifest = Manifest(corpus.name, tokenizer.vocab_size, [], [], None)
    manifest.complete_to = None
    write_manifest(folder, manifest)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    with ThreadPoolExecutor(cores()) as pool:  # tiktoken releases the GIL
        # The validation set, one shard, comes first, since training waits for it. Training shards come in
        # whole windows, so that the rows of a window do not depend on max_tokens
        for kind, wanted, multiple in (("val", 1, 1), ("train", max_tokens, WINDOW)):
            entries = getattr(manifest, kind)
            shards = _encoded_shards(corpus, kind, folder, manifest, tokenizer, pool)
            while count_tokens(entries) < wanted or len(entries) % multiple:
                encoded = next(shards, None)
                if encoded is None:  # the corpus ends
                    break
                documents = [document.result() for document in encoded]
                name = shard_name(kind, len(entries))
                write_shard(folder / name, documents)
                entries.append(Entry(len(documents), sum(map(len, documents))))
                write_manifest(folder, manifest)
                print0(f"{name}: {entries[-1].tokens:,} tokens")
    if not corpus.repo and open_corpus(corpus.name).revision != corpus.revision:
        for made in (folder, tokenizer_folder(corpus, vocab_size)):
            shutil.rmtree(made, ignore_errors=True)
        raise InputError(f"the texts of corpus {corpus.name} changed while being read: run the command again")
    manifest.complete_to = max_tokens if count_tokens(manifest.train) >= max_tokens else math.inf
    manifest.unreadable = corpus.describe_unreadable()
    write_manifest(folder, manifest)


def _encoded_shards(corpus, kind, folder, manifest, tokenizer, pool):
    """Yield the documents of each shard of a kind that the folder lacks.

    Each document is a future of its tokens: the pool's workers encode while this keeps reading. InputError if
    the folder's last document is not the expected one, because a file that was unreadable then can now be
    read.
    """
    texts = (text for text, is_validation in corpus.documents() if is_validation == (kind == "val"))
    entries, last = getattr(manifest, kind), None
    for text in itertools.islice(texts, sum(entry.documents for entry in entries)):
        last = text
    if entries:
        tokens, starts = read_shards(folder, manifest, kind, (len(entries) - 1) // WINDOW)
        if last is None or not np.array_equal(tokens[starts[-1] :], tokenizer.encode_to_numpy(last)):
            raise InputError(f"{folder} was begun with other texts of corpus {corpus.name}: {WRITE_AGAIN}")
    encoded, size = [], 0
    for text in texts:
        encoded.append(pool.submit(tokenizer.encode_to_numpy, text))
        size += len(text.encode())
        if size >= SHARD_BYTES:
            yield encoded
            encoded, size = [], 0
    if encoded:
        yield encoded


def shards_for_training(corpus: Corpus, vocab_size: int | None = None) -> Path:
    """The folder of the shards, as soon as training can start. Those of a local corpus are prepared here.

    A corpus on the hub is left to scripts.data_prep, which may keep running during training: this waits for
    the validation set and the first WINDOW training shards, see wait_for_window().
    """
    vocab_size = vocab_size or default_vocab_size(corpus.name)
    folder = shard_folder(corpus, vocab_size)
    if corpus.repo is None:
        prepare_shards(corpus, vocab_size)
    manifest = wait_for_window(folder, 0)
    if Tokenizer.load(folder / "tokenizer").vocab_size != manifest.vocab_size:
        raise InputError(f"{folder}/tokenizer is not the one of these shards: {WRITE_AGAIN}")
    return folder


def being_written(folder: Path) -> bool:
    """Whether some process has locked the folder."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(lock_file(folder)).acquire(timeout=0):
            return False
    except Timeout:
        return True


def wait_for_window(folder: Path, window: int, stops_waiting=lambda: False) -> Manifest:
    """The manifest, once it has the window. InputError if nobody is writing it, or if stops_waiting()."""
    busy = 0  # the last second with a writer; one that starts together with us takes the lock a bit later
    for second in itertools.count():
        manifest = read_manifest(folder)
        if manifest and manifest.has_window(window):
            return manifest
        if second == 0:
            print0(f"waiting for training window {window} of {folder}")
        if stops_waiting():
            raise InputError(f"stopped waiting for {folder}")
        if being_written(folder):
            busy = second
        elif second - busy > PATIENCE:
            raise InputError(
                f"{folder} is incomplete and no process is writing it: run python -m scripts.data_prep -- "
                "FLAGS, with the flags of the run"
            )
        time.sleep(1)
