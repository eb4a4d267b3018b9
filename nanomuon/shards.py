"""Token shards on disk: write in parallel, check, read by memory map.

    shards/<corpus>-<vocab>/
        tokenizer/              the tokenizer they were written with
        manifest.json           corpus, tokenizer, counts, and the list of shards in plan order
        val-00000.bin           the validation set: the first SHARD_BYTES of validation documents
        train-00000.bin ...     documents of the corpus in their order, SHARD_BYTES of UTF-8 text each

Which documents a shard holds depends on the corpus alone, never on the number of workers. A shard is

    8 bytes "nanomuon", uint32 length of the header, header (JSON), padding to a multiple of 64 bytes,
    documents + 1 int64 token offsets, then the tokens (uint16, or uint32 for a vocabulary over 65,536)

with no <|bos|> stored: the loader puts one in front of every document and every piece of one. Shards are written to a
temporary name and renamed, then the manifest names them: a shard the manifest does not name does not exist.
"""

import fcntl
import hashlib
import json
import os
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nanomuon.corpus import Corpus, is_validation, open_corpus
from nanomuon.runtime import InputError, base_dir
from nanomuon.tokenizer import Tokenizer

MAGIC, VERSION = b"nanomuon", 1
SHARD_BYTES = 16 << 20  # of text; about 4 million tokens
BATCH_BYTES = 1 << 20  # of text, handed to one worker at a time
TRAINING_BYTES = 512 << 20  # of text, from which the tokenizer is trained


class Shard:
    """One shard, memory-mapped: `offsets` (documents + 1,) int64 and `tokens` (offsets[-1],) uint16 or uint32."""

    def __init__(self, path, header: dict, offsets, tokens):
        self.path, self.header, self.offsets, self.tokens = path, header, offsets, tokens

    @classmethod
    def open(cls, path, tokenizer_hash: str | None = None) -> "Shard":
        """Map a shard and check all but its checksum; InputError names the file that is not what it should be."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                start = file.read(12)
                header = json.loads(file.read(int.from_bytes(start[8:], "little"))) if start[:8] == MAGIC else {}
        except FileNotFoundError as error:
            raise InputError(f"shard {path} is gone: python -m scripts.data_prep writes it again") from error
        except ValueError:
            header = {}
        if header.get("version") != VERSION:
            raise InputError(f"{path} is not a version {VERSION} nanomuon shard: delete it and run scripts.data_prep")
        if tokenizer_hash not in (None, header["tokenizer"]):
            raise InputError(
                f"shard {path} was written with tokenizer {header['tokenizer']}, not {tokenizer_hash}: "
                "delete its folder and run scripts.data_prep"
            )
        dtype = np.dtype(header["dtype"])
        begin = _aligned(12 + int.from_bytes(start[8:], "little"))
        size = begin + 8 * (header["documents"] + 1) + dtype.itemsize * header["tokens"]
        if path.stat().st_size != size:
            has = path.stat().st_size
            raise InputError(f"shard {path} has {has} bytes, not {size}: delete it and run scripts.data_prep")
        data = np.memmap(path, mode="r")
        middle = begin + 8 * (header["documents"] + 1)
        return cls(path, header, data[begin:middle].view(np.int64), data[middle:].view(dtype))

    def verify(self) -> None:
        """Compare the payload with the checksum in the header; InputError where they differ."""
        if _checksum(self.offsets, self.tokens) != self.header["sha256"]:
            raise InputError(f"shard {self.path} does not match its checksum: delete it and run scripts.data_prep")


def write_shard(path, documents: list[np.ndarray], header: dict) -> dict:
    """Write documents (arrays of ids) as one shard, whole or not at all. Returns the completed header."""
    path = Path(path)
    tokens = np.concatenate(documents)
    offsets = np.cumsum([0] + [len(document) for document in documents], dtype=np.int64)
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
    with write_whole(path) as file:
        file.write(start.ljust(_aligned(len(start)), b"\0"))
        file.write(offsets.data)
        file.write(tokens.data)
    return header


@contextmanager
def write_whole(path):
    """A binary file that appears at `path` once it is complete and on disk, and never before."""
    temporary = Path(path).with_name(f".{Path(path).name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path):
    """Hold the folder for this process, waiting while another one does. The system frees it if we are killed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is preparing {folder.name}: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_manifest(folder) -> dict | None:
    """manifest.json of a shard folder; None where there is none."""
    try:
        return json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(f"{folder}/manifest.json is damaged: delete the folder and run scripts.data_prep") from error


def default_vocab_size(corpus_name: str) -> int:
    """4,096 suits megabytes of text and small models; corpora worth a download train models that 32,768 suits."""
    return 4096 if corpus_name == "python" or corpus_name.startswith("path:") else 32768


def tokenizer_folder(corpus: Corpus, vocab_size: int) -> Path:
    """Where the tokenizer of a corpus lives."""
    return base_dir() / "tokenizer" / f"{corpus.slug}-{vocab_size}"


def shard_folder(corpus: Corpus, vocab_size: int) -> Path:
    """Where the shards of a corpus lie."""
    return base_dir() / "shards" / f"{corpus.slug}-{vocab_size}"


def prepare_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """The tokenizer of a corpus; trained on the first TRAINING_BYTES of its training documents where there is none."""
    folder = tokenizer_folder(corpus, vocab_size)
    if not folder.exists():
        with locked(folder):
            if not folder.exists():
                started = time.time()
                Tokenizer.train(_training_text(corpus), vocab_size).save(folder)
                seconds = time.time() - started
                print(f"tokenizer of {vocab_size} tokens trained in {seconds:.1f} s: {folder}", flush=True)
    return Tokenizer.load(folder)


def _training_text(corpus):
    counts = Counter()
    for text in corpus.documents(counts):
        if not is_validation(text):
            yield text
        if counts["bytes"] >= TRAINING_BYTES:
            return


def prepare(corpus: Corpus | str, vocab_size: int | None = None, workers: int | None = None) -> Path:
    """Make whatever is missing of tokenizer and shards of a corpus, and return the folder of the shards.

    Quick where nothing is missing. Carries on where an earlier call was stopped, at whatever moment. A second call at
    the same time waits for the first. `workers` threads tokenize (default: one per core): tiktoken works outside the
    GIL, so threads scale like processes and need no copies of the text.
    """
    corpus = open_corpus(corpus) if isinstance(corpus, str) else corpus
    vocab_size = vocab_size or default_vocab_size(corpus.name)
    folder = shard_folder(corpus, vocab_size)
    if not (read_manifest(folder) or {}).get("complete"):
        tokenizer = prepare_tokenizer(corpus, vocab_size)
        with locked(folder):
            folder.mkdir(exist_ok=True)
            tokenizer.save(folder / "tokenizer")
            manifest = read_manifest(folder) or {
                "corpus": corpus.name,
                "revision": corpus.revision,
                "tokenizer": tokenizer.hash,
                "vocab_size": vocab_size,
                "bos_id": tokenizer.bos_id,
                "complete": False,
                "counts": {},
                "val": [],
                "train": [],
            }
            if manifest["tokenizer"] != tokenizer.hash:
                raise InputError(f"{folder} was written with another tokenizer: delete it and run scripts.data_prep")
            if not manifest["complete"]:
                _write_shards(folder, manifest, corpus, tokenizer, workers or len(os.sched_getaffinity(0)))
    return folder


def _write_shards(folder, manifest, corpus, tokenizer, workers):
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    arrays = {"train": [], "val": []}  # encoded documents of the shards being filled
    started = reported = time.time()
    encoded = 0

    def encode(texts):
        return [tokenizer.encode_to_numpy(text).astype(dtype) for text in texts]

    def collect(kind, size, shard, future):
        nonlocal reported, encoded
        arrays[kind] += future.result()
        encoded += size
        if shard is not None:
            header = {"kind": kind, "corpus": corpus.name, "revision": corpus.revision, "tokenizer": tokenizer.hash}
            name = f"{kind}-{len(manifest[kind]):05d}.bin"
            header = write_shard(folder / name, arrays[kind], header)
            arrays[kind] = []
            manifest[kind].append({"name": name} | {key: header[key] for key in ("documents", "tokens", "sha256")})
            manifest["counts"] = shard
            write_manifest(folder, manifest)
        if time.time() - reported > 2 or shard is not None:
            reported = time.time()
            print(
                f"tokenized {encoded / 1e6:.0f} MB at {encoded / 1e6 / (reported - started):.1f} MB/s, "
                f"{len(manifest['train'])} training shards",
                flush=True,
            )

    pending = deque()
    counts = Counter()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for kind, texts, size, shard in _batches(corpus, counts, len(manifest["train"]), len(manifest["val"])):
                pending.append((kind, size, shard, pool.submit(encode, texts)))
                if len(pending) > 2 * workers:
                    collect(*pending.popleft())
            while pending:
                collect(*pending.popleft())
        finally:
            pool.shutdown(cancel_futures=True)
    for kind in ("train", "val"):
        if not manifest[kind]:
            raise InputError(
                f"corpus {corpus.name} has {counts['documents']} documents and none for {kind} (one in 20 is for "
                "validation, by its hash): add documents, or cut them with --separator"
            )
    manifest |= {"complete": True, "counts": dict(counts)}
    write_manifest(folder, manifest)


def _batches(corpus, counts, train_done, val_done):
    """Yield (kind, texts, bytes, shard): work for one thread; `shard` holds the counts where the batch ends a shard.

    Shards already there are read past. Validation documents beyond the first shard are left out, not trained on.
    """
    texts, sizes = {"train": [], "val": []}, {"train": 0, "val": 0}  # of the batch
    filled, index = {"train": 0, "val": 0}, {"train": 0, "val": 0}  # bytes in the current shard, its number
    done = {"train": train_done, "val": val_done}

    def flush(kind, ends):
        batch, size = texts[kind], sizes[kind]
        texts[kind], sizes[kind] = [], 0
        if ends:
            filled[kind], index[kind] = 0, index[kind] + 1
        return kind, batch, size, dict(counts) if ends else None

    for text in corpus.documents(counts):
        kind = "val" if is_validation(text) else "train"
        if kind == "val" and index[kind] == 1:
            continue
        size = len(text.encode())
        filled[kind] += size
        ends = filled[kind] >= SHARD_BYTES
        if index[kind] < done[kind]:
            if ends:
                flush(kind, ends)
            continue
        texts[kind].append(text)
        sizes[kind] += size
        if ends or sizes[kind] >= BATCH_BYTES:
            yield flush(kind, ends)
    for kind in ("train", "val"):
        if filled[kind] and index[kind] >= done[kind]:
            yield flush(kind, True)


def write_manifest(folder: Path, manifest: dict) -> None:
    """Replace manifest.json in one step."""
    with write_whole(folder / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1).encode())


def _aligned(size):
    return -(-size // 64) * 64


def _checksum(offsets, tokens):
    digest = hashlib.sha256(offsets.data)
    digest.update(tokens.data)
    return digest.hexdigest()
