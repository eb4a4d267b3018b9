"""Token shards on disk: write in parallel, read by memory map.

    shards/<corpus>-<vocab>/
        tokenizer/                     the tokenizer they were written with
        manifest.json                  corpus, how it is read, tokenizer, list of shards in their order
        val-00000.safetensors          the validation set: the first SHARD_BYTES of validation documents
        train-00000.safetensors ...    documents of the corpus in their order, SHARD_BYTES of UTF-8 text each

Which documents a shard holds depends on the corpus alone, never on the number of workers. A shard has the
tensors `tokens` (uint16, or uint32 for a vocabulary over 65,536) and `offsets` (documents + 1, int64), where
each document begins; no <|bos|> is stored: the loader puts one in front of every document and every piece of
one. A shard is written whole, then the manifest names it: a shard that it does not name does not exist.
"""

import itertools
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from nanomuon.corpus import PIECE_BYTES, Corpus, is_validation, open_corpus, with_both_parts
from nanomuon.files import being_written, locked, read_json, write_json, write_whole
from nanomuon.runtime import InputError, base_dir, cores, print0
from nanomuon.tokenizer import Tokenizer

SHARD_BYTES = 16 << 20  # of text; about 4 million tokens
BATCH_BYTES = 1 << 20  # of text, handed to one worker at a time
TRAINING_BYTES = 512 << 20  # of text, from which the tokenizer is trained
WINDOW = 8  # consecutive training shards whose documents are shuffled together; about 32 million tokens
PATIENCE = 30  # seconds to wait for somebody to start on shards that are missing
# The loss of a token varies by about 2.5 nats: the mean of so many is known to 0.025, one percent of it
SMALL_VALIDATION = 10_000  # tokens
WRITE_AGAIN = "delete its folder and run scripts.data_prep"


@dataclass
class Entry:
    """A shard in the manifest."""

    name: str
    documents: int
    tokens: int
    file: int  # of the corpus, at which reading goes on after this shard,
    done: int  # and how many documents of that file are done


@dataclass
class Manifest:
    """manifest.json."""

    corpus: str
    revision: str
    piece_bytes: int | None  # into which documents were cut, see corpus.with_both_parts
    tokenizer: str  # its hash
    vocab_size: int
    bos_id: int
    val: list[Entry]
    train: list[Entry]
    complete: bool  # everything that was asked for is there
    max_tokens: int | None  # of training that were asked for; None: the whole corpus


@dataclass
class Shard:
    """One shard, memory-mapped. offsets: (documents + 1,) int64; tokens: (offsets[-1],) uint16 or uint32."""

    path: Path
    offsets: np.ndarray
    tokens: np.ndarray


def open_shard(folder, entry: Entry, tokenizer_hash: str) -> Shard:
    """Map the shard of an entry of a manifest; InputError names the file that is not what the entry says."""
    path = Path(folder) / entry.name
    try:
        with safe_open(path, "numpy") as file:  # compares header and size
            written_with = (file.metadata() or {}).get("tokenizer")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        data = np.memmap(path, mode="r", offset=8 + length)
        arrays = []
        for name, dtypes in (
            ("offsets", {"I64": np.int64}),
            ("tokens", {"U16": np.uint16, "U32": np.uint32}),
        ):
            begin, end = header[name]["data_offsets"]
            arrays.append(data[begin:end].view(dtypes[header[name]["dtype"]]))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise InputError(f"shard {path} cannot be read ({error}): {WRITE_AGAIN}") from error
    offsets, tokens = arrays
    if written_with != tokenizer_hash:
        raise InputError(f"shard {path} was written with another tokenizer, {written_with}: {WRITE_AGAIN}")
    if (len(offsets) - 1, len(tokens)) != (entry.documents, entry.tokens):
        raise InputError(f"shard {path} has not the documents and tokens of the manifest: {WRITE_AGAIN}")
    if offsets[0] != 0 or offsets[-1] != len(tokens) or np.any(np.diff(offsets) < 0):
        raise InputError(f"shard {path}: its offsets are damaged: {WRITE_AGAIN}")
    return Shard(path, offsets, tokens)


def write_shard(path: Path, documents: list[np.ndarray], tokenizer_hash: str) -> None:
    """Write documents (arrays of ids) as one shard, whole or not at all."""
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    data = save({"offsets": offsets, "tokens": np.concatenate(documents)}, {"tokenizer": tokenizer_hash})
    with write_whole(path) as file:
        file.write(data)


def open_tokenizer(folder) -> Tokenizer:
    """The tokenizer of a folder of shards; InputError if it is not the one that wrote them."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"no shards in {folder}: run scripts.data_prep first")
    tokenizer = Tokenizer.load(Path(folder) / "tokenizer")
    if tokenizer.hash != manifest.tokenizer:
        raise InputError(f"{folder}/tokenizer is not the one of the shards: {WRITE_AGAIN}")
    return tokenizer


def read_manifest(folder) -> Manifest | None:
    """manifest.json of a shard folder; None if there is none."""
    file = Path(folder) / "manifest.json"
    if not file.exists():
        return None
    manifest = read_json(file, Manifest, WRITE_AGAIN)
    for entry in manifest.val + manifest.train:
        if entry.name.startswith(".") or Path(entry.name).name != entry.name:
            raise InputError(f"{file} names {entry.name!r}, which is not in its folder: {WRITE_AGAIN}")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / "manifest.json", asdict(manifest))


def count_tokens(entries: list[Entry]) -> int:
    return sum(entry.tokens for entry in entries)


def validation_tokens(folder: Path) -> int:
    """Tokens of the validation set of a shard folder."""
    return count_tokens(read_manifest(folder).val)


def default_vocab_size(corpus_name: str) -> int:
    """4,096 suits megabytes of text and small models; corpora worth a download train larger ones."""
    if corpus_name == "python" or corpus_name.startswith("path:"):
        return 4096
    return 32768


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
    """The tokenizer of a corpus, trained on the first TRAINING_BYTES of its training documents if need be."""
    folder = tokenizer_folder(corpus, vocab_size)
    if not folder.exists():
        with locked(folder):
            if not folder.exists():  # another process may have trained it while we waited
                print0(f"training a tokenizer of {vocab_size} tokens on {corpus.name}")
                started = time.monotonic()
                Tokenizer.train(_training_text(corpus), vocab_size).save(folder)
                print0(f"tokenizer trained in {time.monotonic() - started:.1f} s: {folder}")
    return Tokenizer.load(folder)


def _training_text(corpus):
    size = 0
    for text in corpus.documents():
        if not is_validation(text):
            yield text
        size += len(text.encode())
        if size >= TRAINING_BYTES:
            return


def prepare(
    corpus: Corpus | str,
    vocab_size: int | None = None,
    workers: int | None = None,
    tokenizer: Tokenizer | None = None,
    max_tokens: int | None = None,
) -> Path:
    """Make whatever is missing of tokenizer and shards of a corpus, and return the folder of the shards.

    Quick where nothing is missing. Carries on where an earlier call was stopped, at whatever moment. A second
    call at the same time waits for the first. A shard that was deleted is written again, and those after it.

    workers: threads that tokenize (default: one per core). tiktoken works outside the GIL, so they scale like
    processes and need no copies of the text. tokenizer: use this one instead of the corpus's own. max_tokens:
    stop after the shard that brings this many training tokens, 0 for the validation set only (default: the
    whole corpus); a later call may ask for more.

    Before anything is computed, InputError where there would be no training or no validation document.
    """
    if isinstance(corpus, str):
        corpus = open_corpus(corpus)
    if tokenizer:
        vocab_size = tokenizer.vocab_size
    elif not vocab_size:
        vocab_size = default_vocab_size(corpus.name)
    folder = shard_folder(corpus, vocab_size, tokenizer)
    if not _has_enough(folder, max_tokens):
        with locked(folder):
            if not _has_enough(folder, max_tokens):  # another process may have written it while we waited
                corpus = as_it_is_read(corpus, read_manifest(folder))
                tokenizer = tokenizer or prepare_tokenizer(corpus, vocab_size)
                write_missing(folder, corpus, tokenizer, workers or cores(), max_tokens)
    return folder


def as_it_is_read(corpus: Corpus, manifest: Manifest | None) -> Corpus:
    """The corpus as its shards were begun, or where they were not, in pieces as need be.

    manifest: of its folder, None where there is none yet.
    """
    if manifest and manifest.val and manifest.train:  # it has both parts, read as is written there
        return replace(corpus, piece_bytes=PIECE_BYTES if manifest.piece_bytes else None)
    return with_both_parts(corpus)


def prepare_for_training(
    corpus: Corpus | str, vocab_size: int | None = None, tokens: int | None = None
) -> Path:
    """The folder of the shards as soon as training can start: prepare() for a corpus on this machine.

    A corpus on the hub is left to scripts.data_prep, which may stay at work during the training: this waits
    for the validation set and the first WINDOW training shards. InputError if no process works on what is
    missing; it tells how to make `tokens` training tokens.
    """
    if isinstance(corpus, str):
        corpus = open_corpus(corpus)
    if not corpus.needs_download:
        return prepare(corpus, vocab_size)
    vocab_size = vocab_size or default_vocab_size(corpus.name)
    folder = shard_folder(corpus, vocab_size)
    wait_for_window(folder, 0, command(corpus.name, vocab_size, tokens))
    return folder


def command(corpus: str, vocab_size: int, max_tokens: int | None) -> str:
    """What to type for the shards of a corpus; without max_tokens they are all of it."""
    most = f" --max-tokens {max_tokens}" if max_tokens else ""
    return f"python -m scripts.data_prep --corpus {corpus} --vocab-size {vocab_size}{most}"


def window_is_there(manifest: Manifest | None, window: int) -> bool:
    """Whether the validation set and the shards of training window 0, 1, ... are complete."""
    if not manifest:
        return False
    if manifest.complete:
        return True
    return len(manifest.val) > 0 and len(manifest.train) >= (window + 1) * WINDOW


class NobodyWrites(InputError):
    """Shards are missing and no process is at work on them. All ranks miss them in the same micro-batch."""


def wait_for_window(folder: Path, window: int, command: str) -> Manifest:
    """The manifest once window_is_there(); NobodyWrites, with `command`, where nobody works on the folder."""
    manifest = read_manifest(folder)
    if not window_is_there(manifest, window):
        first, last = window * WINDOW, (window + 1) * WINDOW - 1
        print0(f"waiting for training shards {first} to {last} of {folder}")
    idle = 0  # seconds: a process that was started together with us may need a moment to take the lock
    while not window_is_there(manifest, window):
        idle = 0 if being_written(folder) else idle + 1
        if idle > PATIENCE:
            raise NobodyWrites(f"{folder} is incomplete and no process is writing it: run {command}")
        time.sleep(1)
        manifest = read_manifest(folder)
    return manifest


def _has_enough(folder, max_tokens):
    """Whether a folder holds the shards that max_tokens asks for."""
    manifest = read_manifest(folder)
    if not manifest or not manifest.complete:
        return False
    if not all(_exists(folder, entry) for entry in manifest.val + manifest.train):
        return False
    if manifest.max_tokens is None:  # the whole corpus
        return True
    return max_tokens is not None and max_tokens <= manifest.max_tokens


def _exists(folder, entry):
    return (folder / entry.name).exists()


def write_missing(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, workers: int, max_tokens: int | None
) -> None:
    """Write the shards that are missing of a folder, which this process holds. See prepare()."""
    manifest = begin_manifest(folder, corpus, tokenizer, max_tokens)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32

    def encode(texts):
        return [tokenizer.encode_to_numpy(text).astype(dtype) for text in texts]

    started, reported, encoded_bytes = time.monotonic(), time.monotonic(), 0
    encoded = {"train": [], "val": []}  # what is being encoded for the shard of each kind
    with ThreadPoolExecutor(workers) as pool:
        try:
            for kind, texts, end in batches(corpus, manifest, with_training=max_tokens != 0):
                if is_enough(manifest):
                    break
                encoded[kind].append(pool.submit(encode, texts))
                encoded_bytes += sum(len(text.encode()) for text in texts)
                if time.monotonic() - reported > 2:
                    reported = time.monotonic()
                    print(
                        f"tokenized {encoded_bytes / 1e6:.0f} MB at "
                        f"{encoded_bytes / 1e6 / (reported - started):.1f} MB/s: "
                        f"{len(manifest.train)} training shards of {len(corpus.files)} files",
                        flush=True,
                    )
                if end is None:
                    continue
                documents = [document for future in encoded[kind] for document in future.result()]
                encoded[kind] = []
                entries = getattr(manifest, kind)
                name = f"{kind}-{len(entries):05d}.safetensors"
                write_shard(folder / name, documents, tokenizer.hash)
                entries.append(Entry(name, len(documents), sum(map(len, documents)), *end))
                write_manifest(folder, manifest)
        finally:
            pool.shutdown(cancel_futures=True)
    if not is_enough(manifest):
        manifest.max_tokens = None  # it is the whole corpus
    manifest.complete = True
    write_manifest(folder, manifest)
    if count_tokens(manifest.val) < SMALL_VALIDATION:
        documents = sum(entry.documents for entry in manifest.val)
        print0(
            f"the validation set is small, {documents} document{'s' * (documents != 1)} of "
            f"{count_tokens(manifest.val):,} tokens: val_bpb on it says little; from {SMALL_VALIDATION:,} "
            "tokens on it is known to a percent"
        )


def begin_manifest(folder: Path, corpus: Corpus, tokenizer: Tokenizer, max_tokens: int | None) -> Manifest:
    """The manifest to go on with: it names shards that are there, in order and without a gap."""
    folder.mkdir(exist_ok=True)
    before = read_manifest(folder)
    if before is None:
        tokenizer.save(folder / "tokenizer")
    elif before.tokenizer != tokenizer.hash:
        raise InputError(f"{folder} was written with another tokenizer: {WRITE_AGAIN}")
    manifest = Manifest(
        corpus=corpus.name,
        revision=corpus.revision,
        piece_bytes=corpus.piece_bytes,
        tokenizer=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        val=[],
        train=[],
        complete=False,
        max_tokens=max_tokens,
    )
    if before is not None:
        for kind in ("val", "train"):
            there = itertools.takewhile(lambda entry: _exists(folder, entry), getattr(before, kind))
            getattr(manifest, kind).extend(there)
    for entry in manifest.val + manifest.train:
        open_shard(folder, entry, manifest.tokenizer)
    write_manifest(folder, manifest)
    return manifest


def batches(corpus: Corpus, manifest: Manifest, with_training: bool):
    """Yield (kind, texts, end) of the documents that are in no shard yet, in their order.

    kind: "train" or "val". end: None, or after the last texts of a shard where in the corpus reading goes on,
    (file, documents of it that are done). Validation documents beyond the first shard are left out, not
    trained on.
    """
    # How many documents to read past: those of the shards that are there
    past = {kind: sum(entry.documents for entry in getattr(manifest, kind)) for kind in ("train", "val")}
    first_file = first_document = 0
    if corpus.needs_download and manifest.val and manifest.train:
        # Straight on: no earlier document is needed, neither for validation nor to tell duplicates
        past = {"train": 0, "val": 0}
        first_file, first_document = manifest.train[-1].file, manifest.train[-1].done
    is_wanted = {"train": with_training, "val": not manifest.val}
    texts = {"train": [], "val": []}
    batch_bytes, shard_bytes = Counter(), Counter()  # of text, by kind
    seen = set()
    for number in range(first_file, len(corpus.files)):
        for document, text in enumerate(corpus.read(number, seen), start=1):
            if number == first_file and document <= first_document:
                continue
            kind = "val" if is_validation(text) else "train"
            if past[kind] > 0:
                past[kind] -= 1
                continue
            if not is_wanted[kind]:
                continue
            size = len(text.encode())
            texts[kind].append(text)
            batch_bytes[kind] += size
            shard_bytes[kind] += size
            is_full = shard_bytes[kind] >= SHARD_BYTES
            if is_full or batch_bytes[kind] >= BATCH_BYTES:
                yield kind, texts[kind], (number, document) if is_full else None
                texts[kind] = []
                batch_bytes[kind] = 0
            if is_full:
                shard_bytes[kind] = 0
                is_wanted["val"] &= kind == "train"
    for kind in ("train", "val"):
        if shard_bytes[kind]:
            yield kind, texts[kind], (len(corpus.files), 0)


def is_enough(manifest: Manifest) -> bool:
    """Whether there are as many training tokens as were asked for; never if the whole corpus is."""
    if manifest.max_tokens is None or not manifest.val:
        return False
    return count_tokens(manifest.train) >= manifest.max_tokens
