"""Token shards on disk: write in parallel, check, read by memory map.

    shards/<corpus>-<vocab>/
        tokenizer/              the tokenizer they were written with
        manifest.json           corpus, tokenizer, counts, and the list of shards in plan order
        val-00000.bin           the validation set: the first SHARD_BYTES of validation documents
        train-00000.bin ...     documents of the corpus in their order, SHARD_BYTES of UTF-8 text each

Which documents a shard holds depends on the corpus alone, never on the number of workers. A shard is

    8 bytes "nanomuon", uint32 length of the header, header (JSON), padding to a multiple of 64 bytes,
    documents + 1 int64 token offsets, then the tokens (uint16, or uint32 for a vocabulary over 65,536)

with no <|bos|> stored: the loader puts one in front of every document and every piece of one. Shards are
written to a temporary name and renamed, then the manifest names them: a shard the manifest does not name does
not exist.
"""

import fcntl
import hashlib
import json
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nanomuon.corpus import Corpus, is_validation, open_corpus
from nanomuon.runtime import InputError, base_dir, cores, write_json, write_whole
from nanomuon.tokenizer import Tokenizer

MAGIC, VERSION = b"nanomuon", 1
SHARD_BYTES = 16 << 20  # of text; about 4 million tokens
BATCH_BYTES = 1 << 20  # of text, handed to one worker at a time
TRAINING_BYTES = 512 << 20  # of text, from which the tokenizer is trained
WINDOW = 8  # consecutive training shards whose documents are shuffled together; about 32 million tokens
PATIENCE = 30  # seconds to wait for somebody to start on shards that are missing


class Shard:
    """One shard, memory-mapped: `offsets` (documents + 1,) int64 and `tokens` (offsets[-1],) uint16 or
    uint32.
    """

    def __init__(self, path, header: dict, offsets, tokens):
        self.path, self.header, self.offsets, self.tokens = path, header, offsets, tokens

    @classmethod
    def open(cls, path, tokenizer_hash: str | None = None) -> "Shard":
        """Map a shard and check all but its checksum; InputError names the file that is not what it should
        be.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                start = file.read(12)
                header = (
                    json.loads(file.read(int.from_bytes(start[8:], "little"))) if start[:8] == MAGIC else {}
                )
        except FileNotFoundError as error:
            raise InputError(f"shard {path} is gone: python -m scripts.data_prep writes it again") from error
        except ValueError:
            header = {}
        if header.get("version") != VERSION:
            raise InputError(
                f"{path} is not a version {VERSION} nanomuon shard: delete it and run scripts.data_prep"
            )
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
            raise InputError(
                f"shard {self.path} does not match its checksum: delete it and run scripts.data_prep"
            )


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
def locked(folder: Path):
    """Hold the folder for this process, waiting while another one does. The system frees it if we are
    killed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(_lock_file(folder), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is preparing {folder.name}: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def being_written(folder: Path) -> bool:
    """Whether some process holds the folder."""
    try:
        with open(_lock_file(folder)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _lock_file(folder):
    return folder.with_name(f".{folder.name}.lock")


def read_manifest(folder) -> dict | None:
    """manifest.json of a shard folder; None where there is none."""
    try:
        return json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(
            f"{folder}/manifest.json is damaged: delete the folder and run scripts.data_prep"
        ) from error


def default_vocab_size(corpus_name: str) -> int:
    """4,096 suits megabytes of text and small models; corpora worth a download train models that 32,768
    suits.
    """
    return 4096 if corpus_name == "python" or corpus_name.startswith("path:") else 32768


def tokenizer_folder(corpus: Corpus, vocab_size: int) -> Path:
    """Where the tokenizer of a corpus lives."""
    return base_dir() / "tokenizer" / f"{corpus.slug}-{vocab_size}"


def shard_folder(corpus: Corpus, vocab_size: int, tokenizer: Tokenizer | None = None) -> Path:
    """Where the shards of a corpus lie; a tokenizer that is not the corpus's own has a folder of its own."""
    folder = base_dir() / "shards" / f"{corpus.slug}-{vocab_size}"
    if tokenizer is None or (read_manifest(folder) or {}).get("tokenizer") == tokenizer.hash:
        return folder
    return folder.with_name(f"{folder.name}-{tokenizer.hash[:8]}")


def prepare_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """The tokenizer of a corpus; trained on the first TRAINING_BYTES of its training documents where there is
    none.
    """
    folder = tokenizer_folder(corpus, vocab_size)
    if not folder.exists():
        with locked(folder):
            if not folder.exists():
                print(f"training a tokenizer of {vocab_size} tokens on {corpus.name}", flush=True)
                started = time.time()
                Tokenizer.train(_training_text(corpus), vocab_size).save(folder)
                print(f"tokenizer trained in {time.time() - started:.1f} s: {folder}", flush=True)
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
    stop after the shard that brings this many training tokens, 0 for the validation set only; a later call
    may ask for more.
    """
    corpus = open_corpus(corpus) if isinstance(corpus, str) else corpus
    vocab_size = tokenizer.vocab_size if tokenizer else vocab_size or default_vocab_size(corpus.name)
    folder = shard_folder(corpus, vocab_size, tokenizer)
    if not _enough(folder, max_tokens):
        with locked(folder):
            if not _enough(folder, max_tokens):
                tokenizer = tokenizer or prepare_tokenizer(corpus, vocab_size)
                _write_shards(folder, corpus, tokenizer, workers or cores(), max_tokens)
    return folder


def prepare_for_training(
    corpus: Corpus | str, vocab_size: int | None = None, tokens: int | None = None
) -> Path:
    """The folder of the shards as soon as training can start: prepare() for a corpus on this machine.

    A corpus on the hub is left to scripts.data_prep, which may stay at work during the training: this waits
    for the validation set and the first WINDOW training shards. InputError where no process works on what is
    missing; it tells how to make `tokens` training tokens.
    """
    corpus = open_corpus(corpus) if isinstance(corpus, str) else corpus
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
    return bool(manifest) and (
        manifest["complete"] or len(manifest["val"]) > 0 and len(manifest["train"]) >= (window + 1) * WINDOW
    )


def wait_for_window(folder: Path, window: int, command: str) -> dict:
    """The manifest once window_is_there(); InputError, naming `command`, where no process is at work on the
    folder.
    """
    idle = 0
    while not window_is_there(manifest := read_manifest(folder), window):
        if not idle:
            print(
                f"waiting for training shards {window * WINDOW} to {(window + 1) * WINDOW - 1} of {folder}",
                flush=True,
            )
        # one that was started together with us may need a moment before it takes the lock
        idle = 1 if being_written(folder) else idle + 1
        if idle > PATIENCE:
            raise InputError(f"{folder} is incomplete and no process is writing it: run {command}")
        time.sleep(1)
    return manifest


def _enough(folder, max_tokens):
    manifest = read_manifest(folder)
    if not manifest or not manifest["complete"] or _lost(folder, manifest):
        return False
    limit = manifest["max_tokens"]
    return limit is None or max_tokens is not None and max_tokens <= limit


def _lost(folder, manifest):
    return [
        shard["name"]
        for kind in ("val", "train")
        for shard in manifest[kind]
        if not (folder / shard["name"]).exists()
    ]


def _write_shards(folder, corpus, tokenizer, workers, max_tokens):
    folder.mkdir(exist_ok=True)
    for unfinished in folder.glob(".*.tmp"):  # of a process that was killed
        unfinished.unlink()
    manifest = read_manifest(folder)
    if manifest is None:
        tokenizer.save(folder / "tokenizer")
        manifest = {
            "corpus": corpus.name,
            "revision": corpus.revision,
            "tokenizer": tokenizer.hash,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "val": [],
            "train": [],
        }
    if manifest["tokenizer"] != tokenizer.hash:
        raise InputError(f"{folder} was written with another tokenizer: delete it and run scripts.data_prep")
    manifest |= {"complete": False, "max_tokens": None, "asked": max_tokens}
    lost = _lost(folder, manifest)
    for kind in ("val", "train"):
        names = [shard["name"] for shard in manifest[kind]]
        keep = next((index for index, name in enumerate(names) if name in lost), len(names))
        manifest[kind] = manifest[kind][:keep]
    for shard in manifest["val"] + manifest["train"]:
        Shard.open(folder / shard["name"], tokenizer.hash)
    write_manifest(folder, manifest)

    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    arrays = {"train": [], "val": []}  # encoded documents of the shards being filled
    started = reported = time.time()
    encoded = file = 0

    def encode(texts):
        return [tokenizer.encode_to_numpy(text).astype(dtype) for text in texts]

    def collect(kind, size, end, future):
        nonlocal reported, encoded, file
        arrays[kind] += future.result()
        encoded += size
        if end is not None:
            name = f"{kind}-{len(manifest[kind]):05d}.bin"
            header = {
                "kind": kind,
                "corpus": corpus.name,
                "revision": corpus.revision,
                "tokenizer": tokenizer.hash,
            }
            header = write_shard(folder / name, arrays[kind], header)
            arrays[kind] = []
            shard = {key: header[key] for key in ("documents", "tokens", "sha256")}
            manifest[kind].append({"name": name, **shard, "end": end})
            write_manifest(folder, manifest)
            file = end["file"]
        if time.time() - reported > 2:
            reported = time.time()
            rate = encoded / 1e6 / (reported - started)
            print(
                f"tokenized {encoded / 1e6:.0f} MB at {rate:.1f} MB/s: {len(manifest['train'])} training shards, "
                f"{file} of {len(corpus.files)} files",
                flush=True,
            )

    def enough():
        return (
            max_tokens is not None
            and len(manifest["val"]) > 0
            and sum(shard["tokens"] for shard in manifest["train"]) >= max_tokens
        )

    pending = deque()
    counts = Counter()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for kind, texts, size, end in _batches(corpus, manifest, counts, train=max_tokens != 0):
                pending.append((kind, size, end, pool.submit(encode, texts)))
                while len(pending) > 2 * workers and not enough():
                    collect(*pending.popleft())
                if enough():
                    break
            while pending and not enough():
                collect(*pending.popleft())
        finally:
            pool.shutdown(cancel_futures=True)
    for kind in ("val",) if max_tokens == 0 else ("val", "train"):
        if not manifest[kind]:
            raise InputError(
                f"corpus {corpus.name} has {counts['documents']} documents and none for {kind} (one in 20 is for "
                "validation, by its hash): add documents, or cut them with python -m scripts.data_prep --separator"
            )
    if not enough():
        stored = sum(shard["documents"] for shard in manifest["val"] + manifest["train"])
        counts["validation_left_out"] = counts["documents"] - stored
    manifest |= {"complete": True, "max_tokens": max_tokens if enough() else None, "counts": dict(counts)}
    write_manifest(folder, manifest)


def _batches(corpus, manifest, counts, train):
    """Yield (kind, texts, bytes, end), work for one thread; `end` is the place in the corpus if the batch
    ends a shard.

    Shards already there are read past. Validation documents beyond the first shard are left out, not trained
    on.
    """
    done = {kind: len(manifest[kind]) for kind in ("train", "val")}
    index = {"train": 0, "val": 0}  # of the shard being filled
    start = {"file": 0, "documents": 0, "counts": {}}
    if corpus.needs_download and manifest["train"] and manifest["val"]:
        # straight on: no earlier document is needed, neither for validation nor to tell duplicates
        index = dict(done)
        start = manifest["train"][-1]["end"]
        counts.update(start["counts"])
    texts, sizes, filled = {"train": [], "val": []}, {"train": 0, "val": 0}, {"train": 0, "val": 0}

    def flush(kind, end):
        batch, size = texts[kind], sizes[kind]
        texts[kind], sizes[kind] = [], 0
        if end:
            filled[kind], index[kind] = 0, index[kind] + 1
        return kind, batch, size, end

    seen = set()
    for number in range(start["file"], len(corpus.files)):
        for document, text in enumerate(corpus.read(number, counts, seen)):
            if number == start["file"] and document < start["documents"]:
                counts.clear()  # they were counted before
                counts.update(start["counts"])
                continue
            kind = "val" if is_validation(text) else "train"
            if kind == "val" and index["val"] == 1 or kind == "train" and not train:
                continue
            size = len(text.encode())
            filled[kind] += size
            end = None
            if filled[kind] >= SHARD_BYTES:
                end = {"file": number, "documents": document + 1, "counts": dict(counts)}
            if index[kind] < done[kind]:
                if end:
                    flush(kind, end)
                continue
            texts[kind].append(text)
            sizes[kind] += size
            if end or sizes[kind] >= BATCH_BYTES:
                yield flush(kind, end)
    for kind in ("train", "val"):
        if filled[kind] and index[kind] >= done[kind]:
            yield flush(kind, {"file": len(corpus.files), "documents": 0, "counts": dict(counts)})


def verify(folder: Path) -> int:
    """Check every shard of a complete or growing folder, checksums included, and return how many there
    are.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"no shards in {folder}: run scripts.data_prep without --verify first")
    if Tokenizer.load(folder / "tokenizer").hash != manifest["tokenizer"]:
        raise InputError(
            f"{folder}/tokenizer is not the one of the shards: delete {folder} and run scripts.data_prep"
        )
    listed = manifest["val"] + manifest["train"]
    for entry in listed:
        shard = Shard.open(folder / entry["name"], manifest["tokenizer"])
        shard.verify()
        if shard.header["sha256"] != entry["sha256"]:
            raise InputError(
                f"shard {shard.path} is not the one in the manifest: delete it and run scripts.data_prep"
            )
    return len(listed)


def write_manifest(folder: Path, manifest: dict) -> None:
    write_json(folder / "manifest.json", manifest)


def _aligned(size):
    return -(-size // 64) * 64


def _checksum(offsets, tokens):
    digest = hashlib.sha256(offsets.data)
    digest.update(tokens.data)
    return digest.hexdigest()
