"""Token shards on disk: write in parallel, check, read by memory map.

    shards/<corpus>-<vocab>/
        tokenizer/              the tokenizer they were written with
        manifest.json           corpus, how it is read, tokenizer, counts, list of shards in plan order
        val-00000.bin           the validation set: the first SHARD_BYTES of validation documents
        train-00000.bin ...     documents of the corpus in their order, SHARD_BYTES of UTF-8 text each

Which documents a shard holds depends on the corpus alone, never on the number of workers. A shard is

    8 bytes "nanomuon", uint32 length of the header, header (JSON), padding to a multiple of 64 bytes,
    documents + 1 int64 token offsets, then the tokens (uint16, or uint32 for a vocabulary over 65,536)

with no <|bos|> stored: the loader puts one in front of every document and every piece of one. Shards are
written to a temporary name and renamed, then the manifest names them: a shard the manifest does not name does
not exist.
"""

import hashlib
import itertools
import json
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from nanomuon.corpus import (
    PIECE_BYTES,
    Corpus,
    is_validation,
    open_corpus,
    with_both_parts,
)
from nanomuon.files import being_written, locked, write_json, write_whole
from nanomuon.read_json import (
    FILE_NAME,
    LARGE,
    SMALL,
    Choice,
    Flag,
    ListOf,
    MapOf,
    OrNull,
    Record,
    Text,
    Whole,
    check_regular,
    parse,
    read_json,
)
from nanomuon.runtime import InputError, base_dir, cores, print0
from nanomuon.tokenizer import Tokenizer

MAGIC = b"nanomuon"
VERSION = 1
SHARD_BYTES = 16 << 20  # of text; about 4 million tokens
BATCH_BYTES = 1 << 20  # of text, handed to one worker at a time
TRAINING_BYTES = 512 << 20  # of text, from which the tokenizer is trained
WINDOW = 8  # consecutive training shards whose documents are shuffled together; about 32 million tokens
PATIENCE = 30  # seconds to wait for somebody to start on shards that are missing
# The loss of a token varies by about 2.5 nats: the mean of so many is known to 0.025, one percent of it
SMALL_VALIDATION = 10_000  # tokens

HEADER = Record(
    {
        "version": Whole(),
        "dtype": Choice("uint16", "uint32"),
        "documents": Whole(),
        "tokens": Whole(),
        "sha256": Text(64),
        "tokenizer": Text(64),
    }
)
COUNTS = MapOf(Whole())
END = Record({"file": Whole(), "documents": Whole(), "counts": COUNTS})
ENTRY = Record({"name": FILE_NAME, "documents": Whole(), "tokens": Whole(), "sha256": Text(64)}, {"end": END})
MANIFEST = Record(
    {
        "corpus": Text(),
        "revision": Text(),
        "tokenizer": Text(64),
        "vocab_size": Whole(257, 1 << 24),
        "bos_id": Whole(256, 1 << 24),
        "val": ListOf(ENTRY),
        "train": ListOf(ENTRY),
        "complete": Flag(),
        "max_tokens": OrNull(Whole()),
    },
    {
        "asked": OrNull(Whole()),
        "counts": COUNTS,
        "piece_bytes": OrNull(Whole()),
    },
)


class Shard:
    """One shard, memory-mapped.

    offsets: (documents + 1,) int64; tokens: (offsets[-1],) uint16 or uint32.
    """

    def __init__(self, path, header: dict, offsets, tokens):
        self.path = path
        self.header = header
        self.offsets = offsets
        self.tokens = tokens

    @classmethod
    def open(cls, path, tokenizer_hash: str | None = None) -> "Shard":
        """Map a shard and check all but its checksum; InputError names the file that is not as it should be.

        tokenizer_hash: of the tokenizer that it has to be written with, if any.
        """
        path = Path(path)
        if not path.exists():
            raise InputError(f"shard {path} is gone: python -m scripts.data_prep writes it again")
        has = check_regular(path)
        try:
            header, begin = _read_header(path)
        except ValueError as error:
            raise InputError(
                f"{path} is not a version {VERSION} nanomuon shard ({error}): "
                "delete it and run scripts.data_prep"
            ) from error
        if tokenizer_hash is not None and header["tokenizer"] != tokenizer_hash:
            raise InputError(
                f"shard {path} was written with tokenizer {header['tokenizer']}, not {tokenizer_hash}: "
                "delete its folder and run scripts.data_prep"
            )
        dtype = np.dtype(header["dtype"])
        middle = begin + 8 * (header["documents"] + 1)
        size = middle + dtype.itemsize * header["tokens"]
        if has != size:
            raise InputError(f"shard {path} has {has} bytes, not {size}: delete it and run scripts.data_prep")
        data = np.memmap(path, mode="r")
        offsets = data[begin:middle].view(np.int64)
        if offsets[0] != 0 or offsets[-1] != header["tokens"] or np.any(np.diff(offsets) < 0):
            raise InputError(f"shard {path}: its offsets are damaged: delete it and run scripts.data_prep")
        return cls(path, header, offsets, data[middle:].view(dtype))


def _read_header(path):
    """(header, where the offsets begin) of a shard; ValueError for what is none of this version."""
    with path.open("rb") as file:
        start = file.read(12)
        if start[:8] != MAGIC:
            raise ValueError("not a shard")
        length = int.from_bytes(start[8:], "little")
        if length > SMALL:
            raise ValueError(f"a header of {length} bytes")
        header = parse(file.read(length), HEADER)
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']}")
    return header, _aligned(12 + length)


def write_shard(path, documents: list[np.ndarray], header: dict) -> dict:
    """Write documents (arrays of ids) as one shard, whole or not at all. Returns the completed header."""
    tokens = np.concatenate(documents)
    lengths = [len(document) for document in documents]
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    header = {
        "version": VERSION,
        **header,
        "dtype": tokens.dtype.name,
        "documents": len(documents),
        "tokens": len(tokens),
        "sha256": _checksum(offsets, tokens),
    }
    text = json.dumps(header).encode()
    start = MAGIC + len(text).to_bytes(4, "little") + text
    with write_whole(Path(path)) as file:
        file.write(start.ljust(_aligned(len(start)), b"\0"))
        file.write(offsets.data)
        file.write(tokens.data)
    return header


def _aligned(size):
    """The next multiple of 64."""
    return -(-size // 64) * 64


def _checksum(offsets, tokens):
    digest = hashlib.sha256(offsets.data)
    digest.update(tokens.data)
    return digest.hexdigest()


def open_shards(folder, manifest: dict, entries: list[dict]) -> list[Shard]:
    """The shards of these entries of a manifest; InputError for one that is not what the manifest says."""
    opened = []
    for entry in entries:
        shard = Shard.open(Path(folder) / entry["name"], manifest["tokenizer"])
        for key in ("documents", "tokens"):
            if shard.header[key] != entry[key]:
                raise InputError(
                    f"shard {shard.path} has {shard.header[key]} {key}, but {entry[key]} in the manifest: "
                    "delete it and run scripts.data_prep"
                )
        opened.append(shard)
    return opened


def open_tokenizer(folder) -> Tokenizer:
    """The tokenizer of a folder of shards; InputError where it is not the one that wrote them."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"no shards in {folder}: run scripts.data_prep first")
    tokenizer = Tokenizer.load(Path(folder) / "tokenizer")
    if tokenizer.hash != manifest["tokenizer"]:
        raise InputError(
            f"{folder}/tokenizer is not the one of the shards: delete {folder} and run scripts.data_prep"
        )
    return tokenizer


def read_manifest(folder) -> dict | None:
    """manifest.json of a shard folder; None where there is none."""
    file = Path(folder) / "manifest.json"
    if not file.exists():
        return None
    advice = "delete the folder and run scripts.data_prep"
    manifest = read_json(file, MANIFEST, LARGE, advice)
    if manifest["bos_id"] != manifest["vocab_size"] - 1:
        raise InputError(f"{file}: bos_id is {manifest['bos_id']}, not vocab_size - 1; {advice}")
    return manifest


def write_manifest(folder: Path, manifest: dict) -> None:
    write_json(folder / "manifest.json", manifest)


def validation_tokens(folder: Path) -> int:
    """Tokens of the validation set of a shard folder."""
    return sum(entry["tokens"] for entry in read_manifest(folder)["val"])


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
    if manifest and manifest["tokenizer"] == tokenizer.hash:
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
    counts = Counter()
    for text in corpus.documents(counts):
        if not is_validation(text):
            yield text
        if counts["bytes"] >= TRAINING_BYTES:
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
                ShardWriter(folder, corpus, tokenizer, workers or cores(), max_tokens).run()
    return folder


def as_it_is_read(corpus: Corpus, manifest: dict | None) -> Corpus:
    """The corpus as its shards were begun, or where they were not, in pieces as need be.

    manifest: of its folder, None where there is none yet.
    """
    if manifest and manifest["val"] and manifest["train"]:  # it has both parts, read as is written there
        piece_bytes = PIECE_BYTES if manifest.get("piece_bytes") else None
        return replace(corpus, piece_bytes=piece_bytes)
    return with_both_parts(corpus)


def prepare_for_training(
    corpus: Corpus | str,
    vocab_size: int | None = None,
    tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """The folder of the shards as soon as training can start: prepare() for a corpus on this machine.

    A corpus on the hub is left to scripts.data_prep, which may stay at work during the training: this waits
    for the validation set and the first WINDOW training shards. InputError where no process works on what is
    missing; it tells how to make `tokens` training tokens.

    tokenizer: of a run that goes on. Where that of the corpus is another one by now, because its documents
    have changed, the shards are written with this one.
    """
    if isinstance(corpus, str):
        corpus = open_corpus(corpus)
    if tokenizer is not None:
        vocab_size = vocab_size or tokenizer.vocab_size
        its_own = tokenizer_folder(corpus, vocab_size)
        is_there = its_own.exists()
        if tokenizer.vocab_size != vocab_size:  # another vocabulary was asked for: the run will be refused
            tokenizer = None
        elif is_there and Tokenizer.load(its_own).hash == tokenizer.hash:
            tokenizer = None
        elif not is_there and corpus.needs_download:  # scripts.data_prep may be about to make it
            tokenizer = None
    if tokenizer is not None:
        return prepare(corpus, tokenizer=tokenizer, max_tokens=tokens if corpus.needs_download else None)
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


def window_is_there(manifest: dict | None, window: int) -> bool:
    """Whether the validation set and the shards of training window 0, 1, ... are complete."""
    if not manifest:
        return False
    if manifest["complete"]:
        return True
    return len(manifest["val"]) > 0 and len(manifest["train"]) >= (window + 1) * WINDOW


class NobodyWrites(InputError):
    """Shards are missing and no process is at work on them. All ranks miss them in the same micro-batch."""


def wait_for_window(folder: Path, window: int, command: str) -> dict:
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
    if not manifest or not manifest["complete"]:
        return False
    if not all(_exists(folder, entry) for entry in manifest["val"] + manifest["train"]):
        return False
    if manifest["max_tokens"] is None:  # the whole corpus
        return True
    return max_tokens is not None and max_tokens <= manifest["max_tokens"]


def _exists(folder, entry):
    return (folder / entry["name"]).exists()


@dataclass(frozen=True)
class Batch:
    """Texts of one shard, for one thread to encode."""

    kind: str  # "train" or "val"
    texts: list
    size: int  # UTF-8 bytes of the texts
    ends_shard: bool
    place: dict  # in the corpus, after the texts: file, documents of it that are done, counts so far


@dataclass
class Filling:
    """The shard of a kind that is being filled, and the batch that is being gathered for it."""

    kind: str
    written: int  # shards of the kind that are there already; their documents are read past
    index: int = 0  # of the shard
    size: int = 0  # UTF-8 bytes in the shard so far
    texts: list = field(default_factory=list)  # of the batch
    texts_size: int = 0

    @property
    def is_there(self) -> bool:
        return self.index < self.written

    @property
    def is_full(self) -> bool:
        return self.size >= SHARD_BYTES

    def add(self, text):
        size = len(text.encode())
        self.size += size
        if not self.is_there:
            self.texts.append(text)
            self.texts_size += size

    def take_batch(self, place, ends_shard) -> Batch:
        batch = Batch(self.kind, self.texts, self.texts_size, ends_shard, place)
        self.texts = []
        self.texts_size = 0
        if ends_shard:
            self.start_next()
        return batch

    def start_next(self):
        self.index += 1
        self.size = 0


class ShardWriter:
    """Writes what is missing of a folder of shards, which this process holds. See prepare()."""

    def __init__(self, folder, corpus, tokenizer, workers, max_tokens):
        self.folder = folder
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.workers = workers
        self.max_tokens = max_tokens
        self.with_training = max_tokens != 0
        self.dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        self.manifest = self.open_manifest()
        self.counts = Counter()  # what the corpus says of the documents read
        self.encoded = {"train": [], "val": []}  # documents of the shards being filled
        self.encoded_bytes = 0  # of text
        self.files_done = 0
        self.started = self.reported = time.monotonic()

    def run(self):
        pending = deque()  # (batch, future) in plan order
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                for batch in self.batches():
                    pending.append((batch, pool.submit(self.encode, batch.texts)))
                    while len(pending) > 2 * self.workers and not self.is_enough():
                        self.collect(*pending.popleft())
                    if self.is_enough():
                        break
                while pending and not self.is_enough():
                    self.collect(*pending.popleft())
            finally:
                pool.shutdown(cancel_futures=True)
        self.finish()

    def open_manifest(self):
        """The manifest to go on with: it names shards that are there, in order and without a gap."""
        self.folder.mkdir(exist_ok=True)
        manifest = read_manifest(self.folder)
        if manifest is None:
            self.tokenizer.save(self.folder / "tokenizer")
            manifest = {
                "corpus": self.corpus.name,
                "revision": self.corpus.revision,
                "tokenizer": self.tokenizer.hash,
                "vocab_size": self.tokenizer.vocab_size,
                "bos_id": self.tokenizer.bos_id,
                "val": [],
                "train": [],
            }
        if manifest["tokenizer"] != self.tokenizer.hash:
            raise InputError(
                f"{self.folder} was written with another tokenizer: delete it and run scripts.data_prep"
            )
        if not self.goes_on(manifest):
            manifest |= {"val": [], "train": []}
        manifest |= {
            "piece_bytes": self.corpus.piece_bytes,
        }
        manifest |= {"complete": False, "max_tokens": None, "asked": self.max_tokens}
        for kind in ("val", "train"):
            manifest[kind] = list(itertools.takewhile(self.exists, manifest[kind]))
        open_shards(self.folder, manifest, manifest["val"] + manifest["train"])
        write_manifest(self.folder, manifest)
        return manifest

    def goes_on(self, manifest):
        """Whether the shards of a manifest are the first ones of the corpus as it is read now."""
        return manifest.get("piece_bytes") == self.corpus.piece_bytes

    def exists(self, entry):
        return _exists(self.folder, entry)

    def batches(self):
        """Yield the documents that are in no shard yet, as Batches in plan order.

        Shards already there are read past. Validation documents beyond the first shard are left out, not
        trained on.
        """
        val = Filling("val", written=len(self.manifest["val"]))
        train = Filling("train", written=len(self.manifest["train"]))
        start = {"file": 0, "documents": 0, "counts": {}}
        if self.corpus.needs_download and val.written and train.written:
            # straight on: no earlier document is needed, neither for validation nor to tell duplicates
            val.index = val.written
            train.index = train.written
            start = self.manifest["train"][-1]["end"]
            self.counts.update(start["counts"])
        seen = set()
        for number in range(start["file"], len(self.corpus.files)):
            for document, text in enumerate(self.corpus.read(number, self.counts, seen)):
                if number == start["file"] and document < start["documents"]:
                    self.counts.clear()  # they were counted before
                    self.counts.update(start["counts"])
                    continue
                if is_validation(text):
                    filling = val
                    wanted = val.index == 0
                else:
                    filling = train
                    wanted = self.with_training
                if not wanted:
                    continue
                filling.add(text)
                if filling.is_there:
                    if filling.is_full:
                        filling.start_next()
                elif filling.is_full or filling.texts_size >= BATCH_BYTES:
                    yield filling.take_batch(self.place(number, document + 1), ends_shard=filling.is_full)
        for filling in (train, val):
            if filling.size and not filling.is_there:
                yield filling.take_batch(self.place(len(self.corpus.files), 0), ends_shard=True)

    def place(self, file, documents):
        """Where reading goes on after so many documents of a file."""
        return {"file": file, "documents": documents, "counts": dict(self.counts)}

    def encode(self, texts):
        return [self.tokenizer.encode_to_numpy(text).astype(self.dtype) for text in texts]

    def collect(self, batch, future):
        """Add an encoded batch to its shard, and write the shard that it ends."""
        self.encoded[batch.kind] += future.result()
        self.encoded_bytes += batch.size
        if batch.ends_shard:
            self.write(batch.kind, batch.place)
        if time.monotonic() - self.reported > 2:
            self.report()

    def write(self, kind, place):
        """Write the shard that is filled, then name it in the manifest."""
        header = {
            "kind": kind,
            "corpus": self.corpus.name,
            "revision": self.corpus.revision,
            "tokenizer": self.tokenizer.hash,
        }
        name = f"{kind}-{len(self.manifest[kind]):05d}.bin"
        header = write_shard(self.folder / name, self.encoded[kind], header)
        self.encoded[kind] = []
        entry = {
            "name": name,
            "documents": header["documents"],
            "tokens": header["tokens"],
            "sha256": header["sha256"],
            "end": place,
        }
        self.manifest[kind].append(entry)
        write_manifest(self.folder, self.manifest)
        self.files_done = place["file"]

    def report(self):
        self.reported = time.monotonic()
        megabytes = self.encoded_bytes / 1e6
        rate = megabytes / (self.reported - self.started)
        shards = len(self.manifest["train"])
        files = len(self.corpus.files)
        print(
            f"tokenized {megabytes:.0f} MB at {rate:.1f} MB/s: {shards} training shards, "
            f"{self.files_done} of {files} files",
            flush=True,
        )

    def is_enough(self):
        """Whether there are as many training tokens as were asked for; never where the whole corpus is."""
        if self.max_tokens is None or not self.manifest["val"]:
            return False
        return sum(entry["tokens"] for entry in self.manifest["train"]) >= self.max_tokens

    def finish(self):
        if self.is_enough():
            self.manifest["max_tokens"] = self.max_tokens
        else:
            entries = self.manifest["val"] + self.manifest["train"]
            stored = sum(entry["documents"] for entry in entries)
            self.counts["validation_left_out"] = self.counts["documents"] - stored
        self.say_if_validation_is_small()
        self.manifest |= {"complete": True, "counts": dict(self.counts)}
        write_manifest(self.folder, self.manifest)

    def say_if_validation_is_small(self):
        documents = sum(entry["documents"] for entry in self.manifest["val"])
        tokens = sum(entry["tokens"] for entry in self.manifest["val"])
        if tokens < SMALL_VALIDATION:
            noun = "document" if documents == 1 else "documents"
            print0(
                f"the validation set is small, {documents} {noun} of {tokens:,} tokens: val_bpb on it says "
                f"little; from {SMALL_VALIDATION:,} tokens on it is known to a percent"
            )
