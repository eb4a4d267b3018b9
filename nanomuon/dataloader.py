"""Packed batches in one global order, prefetch, exact resume.

The training rows of an epoch come window by window, a window being WINDOW consecutive shards. Within a window
the documents are shuffled and packed into rows of seq_len + 1 tokens without padding, and the rows are
shuffled. All of that depends on the shards, the seed, the epoch and seq_len only. Ranks and micro-batches
merely deal the rows out: the position in the data is (epoch, window, row) of the next row, the same on every
rank.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nanomuon.runtime import InputError, worker_thread
from nanomuon.shards import (
    WINDOW,
    WRITE_AGAIN,
    command,
    count_tokens,
    open_shard,
    read_manifest,
    wait_for_window,
    window_is_there,
)

AHEAD = 2  # micro-batches that wait, packed, for the training loop


def pack_rows(starts, lengths, capacity, cut=True):
    """Pack pieces of text into rows: best-fit decreasing, every piece preceded by one <|bos|>.

    starts, lengths: where each piece begins and how many tokens of text it has, at most capacity - 1. Returns
    (row_ends, starts, lengths) of the segments in the order of the rows; row_ends[i] is the number of
    segments in rows 0..i. A segment with n tokens of text takes n + 1 places.

    With `cut` every row is full: where no piece fits the rest of a row, the longest piece is cut in two and
    its second part goes back, to begin with a <|bos|> of its own. Only the last pieces, fewer than a row,
    stay out. Without `cut` every piece is in some row, whole, and rows have room at the end.

    The free lengths are the bits of one integer, so finding the longest piece that fits is a mask and a
    bit_length.
    """
    buckets = [[] for _ in range(capacity)]  # buckets[n]: starts of the pieces of n tokens
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        buckets[length].append(start)
    free = sum(1 << length for length, bucket in enumerate(buckets) if bucket)
    fitting = [(1 << room) - 1 for room in range(capacity + 1)]  # mask of the pieces that fit `room` places
    left = int(lengths.sum()) + len(lengths)  # places that the pieces not yet in rows take
    enough_for_a_row = capacity if cut else 1
    row_ends, out_starts, out_lengths = [], [], []
    while left >= enough_for_a_row:
        room = capacity
        while room:
            fits = free & fitting[room]
            if fits:
                length = taken = fits.bit_length() - 1
            elif cut:
                length, taken = free.bit_length() - 1, room - 1
            else:
                break
            bucket = buckets[length]
            start = bucket.pop()
            if not bucket:
                free ^= 1 << length
            if taken < length:
                buckets[length - taken].append(start + taken)
                free |= 1 << (length - taken)
                left += 1
            out_starts.append(start)
            out_lengths.append(taken)
            left -= taken + 1
            room -= taken + 1
        row_ends.append(len(out_starts))
    return np.array(row_ends), np.array(out_starts), np.array(out_lengths)


def _pieces(begins, ends, seq_len):
    """(starts, lengths) of what fits a row, of the documents between `begins` and `ends`.

    Longer documents become pieces of seq_len tokens and one of what is left.
    """
    count = -(-(ends - begins) // seq_len)  # of each document
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)  # within its document
    starts = np.repeat(begins, count) + seq_len * number
    lengths = np.minimum(np.repeat(ends, count) - starts, seq_len)
    return starts, lengths


class _Rows:
    """Rows packed from the documents of some shards: `len()` of them, `fill(i, row)` writes one."""

    def __init__(self, shards, bos_id):
        self.bos_id = bos_id
        self.tokens = [shard.tokens for shard in shards]
        sizes = [len(tokens) for tokens in self.tokens]
        self.bases = np.cumsum([0, *sizes])  # where each shard begins, and the end of the last

    @classmethod
    def for_training(cls, shards, bos_id, seq_len, rng):
        """Full rows in random order, of documents in random order."""
        rows = cls(shards, bos_id)
        begins, ends = rows._documents(shards)
        starts, lengths = _pieces(begins, ends, seq_len)
        order = rng.permutation(len(starts))
        rows._pack(starts[order], lengths[order], seq_len, cut=True)
        rows.order = rng.permutation(len(rows.row_ends))
        return rows

    @classmethod
    def for_validation(cls, shards, bos_id, seq_len, max_tokens=None):
        """Rows that hold every document, or max_tokens from the beginning, once."""
        rows = cls(shards, bos_id)
        begins, ends = rows._documents(shards)
        if max_tokens is not None:
            kept = begins < max_tokens
            begins, ends = begins[kept], np.minimum(ends[kept], max_tokens)
        starts, lengths = _pieces(begins, ends, seq_len)
        rows._pack(starts, lengths, seq_len, cut=False)
        rows.order = np.arange(len(rows.row_ends))
        return rows

    def _documents(self, shards):
        """(begins, ends) of all documents, as if the tokens of the shards were one array."""
        begins, ends = [], []
        for shard, base in zip(shards, self.bases[:-1], strict=True):
            begins.append(shard.offsets[:-1] + base)
            ends.append(shard.offsets[1:] + base)
        return np.concatenate(begins), np.concatenate(ends)

    def _pack(self, starts, lengths, seq_len, cut):
        self.text_tokens = int(lengths.sum())
        self.row_ends, starts, self.lengths = pack_rows(starts, lengths, seq_len + 1, cut)
        self.cropped = self.text_tokens - int(self.lengths.sum())
        self.sources = np.searchsorted(self.bases, starts, side="right") - 1  # the shard of each segment
        self.starts = starts - self.bases[self.sources]

    def __len__(self):
        return len(self.row_ends)

    def fill(self, index, row) -> None:
        """Write row `index` into the places of row (seq_len + 1,) that it takes."""
        index = self.order[index]
        first = self.row_ends[index - 1] if index > 0 else 0
        place = 0
        for segment in range(first, self.row_ends[index]):
            start, length = self.starts[segment], self.lengths[segment]
            tokens = self.tokens[self.sources[segment]]
            row[place] = self.bos_id
            row[place + 1 : place + 1 + length] = tokens[start : start + length]
            place += length + 1


@dataclass(frozen=True)
class _MicroBatch:
    """rows: (device_batch_size, seq_len + 1) of this rank; state: the position after them, over all ranks."""

    rows: torch.Tensor
    state: dict


@dataclass(frozen=True)
class _MissingWindow:
    """The shards of this window are still to come."""

    window: int


class TrainLoader:
    """Micro-batches of packed training rows; the batch of a step is the same however many ranks share it.

    folder: of the shards. Each `next()` gives (inputs, targets), both (device_batch_size, seq_len) int64 on
    `device`. Step s trains on rows s * rows_per_step ... of one endless sequence of rows that depends on
    (shards, seed, seq_len) alone; rows_per_step counts rows over all ranks and micro-batches. ValueError
    where the ranks' micro-batches do not divide it, InputError where the corpus is smaller than one step.

    `state_dict()` is the position after the last micro-batch returned. Passed as `state` it resumes there at
    once, on any number of ranks. A thread packs and fills AHEAD micro-batches in advance.
    """

    def __init__(
        self,
        folder,
        seq_len,
        rows_per_step,
        device_batch_size,
        rank=0,
        world_size=1,
        seed=0,
        device="cpu",
        state=None,
    ):
        if rows_per_step % (world_size * device_batch_size):
            raise ValueError(
                f"{rows_per_step} rows a step do not divide by {device_batch_size} rows "
                f"on each of {world_size} ranks"
            )
        self.folder = Path(folder)
        self.seq_len = seq_len
        self.seed = seed
        self.device = torch.device(device)
        self.batch = device_batch_size
        self.rank = rank
        self.world_size = world_size
        self.manifest = _manifest(folder)
        text = count_tokens(self.manifest.train)
        if self.manifest.complete and text < rows_per_step * seq_len:
            raise InputError(
                f"corpus {self.manifest.corpus} has {text} training tokens, "
                f"fewer than one step of {rows_per_step} rows of {seq_len}: "
                "use more text, a smaller --total-batch-size or a smaller --max-seq-len"
            )
        self._state = state or {"epoch": 0, "window": 0, "row": 0}
        self._batches = self._generate(**self._state)
        self._thread = worker_thread("loader")
        self._ahead = deque()
        for _ in range(AHEAD):
            self._submit()

    def _submit(self):
        self._ahead.append(self._thread.submit(next, self._batches))

    def __iter__(self):
        return self

    def __next__(self):
        made = self._next_made()
        while isinstance(made, _MissingWindow):
            manifest = self.manifest
            made_by = command(manifest.corpus, manifest.vocab_size, manifest.max_tokens)
            self.manifest = wait_for_window(self.folder, made.window, made_by)
            made = self._next_made()
        self._state = made.state
        # pinned memory goes back to PyTorch's pool, which hands it out again only after this copy has run
        rows = made.rows.to(self.device, non_blocking=True)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _next_made(self):
        made = self._ahead.popleft().result()
        self._submit()
        return made

    def state_dict(self) -> dict:
        """{epoch, window, row}: three ints, the same on every rank."""
        return dict(self._state)

    @property
    def epoch(self) -> int:
        """Epoch of the next row, from 0."""
        return self._state["epoch"]

    def _generate(self, epoch, window, row):
        """Yield a _MicroBatch, or a _MissingWindow as long as its shards are to come."""
        shape = (self.batch, self.seq_len + 1)
        on_gpu = self.device.type == "cuda"
        rows = None  # of the window, once it is packed
        while True:
            batch = torch.empty(shape, dtype=torch.int64, pin_memory=on_gpu)
            for index in range(self.world_size * self.batch):
                while rows is None or row >= len(rows):
                    if rows is not None:
                        row = 0
                        window += 1
                    while not window_is_there(self.manifest, window):
                        yield _MissingWindow(window)
                    if window * WINDOW >= len(self.manifest.train):
                        epoch += 1
                        window = 0
                    rows = self._rows(epoch, window)
                if index // self.batch == self.rank:
                    rows.fill(row, batch[index % self.batch].numpy())
                row += 1
            yield _MicroBatch(batch, {"epoch": epoch, "window": window, "row": row})

    def _rows(self, epoch, window):
        # NumPy keeps the streams of RandomState for good, those of Generator may change with a release
        rng = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self.seed, epoch, window])))
        shards = _open(self.folder, self.manifest, "train", window)
        rows = _Rows.for_training(shards, self.manifest.bos_id, self.seq_len, rng)
        return rows


def validation_batches(
    folder,
    seq_len,
    device_batch_size,
    rank=0,
    world_size=1,
    device="cpu",
    max_tokens: int | None = None,
):
    """Yield this rank's (inputs, targets) of the validation set, both (device_batch_size, seq_len) int64.

    Over all ranks every token of the set is a target exactly once; every other target (<|bos|> and padding)
    is -1. Documents are packed whole; those longer than a row are cut into pieces that begin with <|bos|>.
    max_tokens takes that many tokens from the beginning of the set. Every rank yields the same number of
    batches, on `device`.
    """
    manifest = _manifest(folder)
    bos_id = manifest.bos_id
    rows = _Rows.for_validation(_open(Path(folder), manifest, "val"), bos_id, seq_len, max_tokens)
    device = torch.device(device)
    shape = (device_batch_size, seq_len + 1)
    per_round = world_size * device_batch_size
    rounds = -(-len(rows) // per_round)
    for number in range(rounds):
        first = number * per_round + rank * device_batch_size
        batch = torch.full(shape, bos_id, dtype=torch.int64, pin_memory=device.type == "cuda")
        for place, index in enumerate(range(first, min(first + device_batch_size, len(rows)))):
            rows.fill(index, batch[place].numpy())
        batch = batch.to(device, non_blocking=True)
        following = batch[:, 1:]
        yield batch[:, :-1].contiguous(), torch.where(following == bos_id, -1, following)


def _manifest(folder):
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"no shards in {folder}: python -m scripts.data_prep makes them")
    return manifest


def _open(folder, manifest, kind, window=0):
    entries = getattr(manifest, kind)[window * WINDOW : (window + 1) * WINDOW]
    if not entries:
        raise InputError(f"{folder}/manifest.json: {kind} names no shard: {WRITE_AGAIN}")
    opened = []
    for entry in entries:
        shard = open_shard(folder, entry, manifest.tokenizer)
        if len(shard.tokens) and shard.tokens.max() >= manifest.bos_id:  # all of it is read soon anyway
            raise InputError(f"shard {shard.path} has tokens that its tokenizer has not: {WRITE_AGAIN}")
        opened.append(shard)
    return opened
