"""Packed batches in one global order, with exact resume.

The training rows of an epoch come window by window; a window is WINDOW consecutive shards. Within a window
the documents are shuffled and packed into rows of seq_len + 1 tokens without padding, and the rows are
shuffled. All of this depends only on the shards, the seed, the epoch and seq_len. Ranks and micro-batches
merely share out the rows: the position in the data is the (epoch, window, row) of the next row, the
same on every rank.
"""

import functools
import itertools
from pathlib import Path

import numpy as np
import torch

from nanomuon.runtime import InputError, together
from nanomuon.shards import WINDOW, count_tokens, read_manifest, read_shards, wait_for_window


def cut_documents(starts, end, seq_len):
    """Cut documents into pieces (start, tokens), none longer than a row.

    starts: where each document begins; the last one ends at `end`.
    """
    pieces = []
    for start, following in itertools.pairwise([*starts.tolist(), end]):
        for place in range(start, following, seq_len):
            pieces.append((place, min(seq_len, following - place)))
    return pieces


def pack_rows(pieces, capacity, cut):
    """Pack pieces of text into rows: best-fit decreasing, every piece preceded by one <|bos|>.

    pieces: (start, tokens of text), at most capacity - 1 tokens each. Returns the rows, each a list of
    segments (start, tokens); a segment fills tokens + 1 places.

    With `cut` every row is full: if no piece fits the rest of a row, the longest piece is cut in two, and its
    second part goes back, to get its own <|bos|>. Only the last pieces, less than a row, are left out.
    Without `cut` every piece is in some row, uncut, and rows may have room at the end.

    The lengths of the remaining pieces are stored as the bits of one integer: a mask and bit_length find the
    longest piece that fits.
    """
    buckets = [[] for _ in range(capacity)]  # buckets[n]: starts of the pieces of n tokens
    lengths = 0
    for start, length in pieces:
        buckets[length].append(start)
        lengths |= 1 << length
    rows = []
    while lengths:
        row, room = [], capacity
        while lengths and room:
            fits = lengths & ((1 << room) - 1)
            if not fits and not cut:
                break
            length = (fits or lengths).bit_length() - 1
            taken = min(length, room - 1)
            bucket = buckets[length]
            start = bucket.pop()
            if not bucket:
                lengths ^= 1 << length
            if taken < length:
                buckets[length - taken].append(start + taken)
                lengths |= 1 << (length - taken)
            row.append((start, taken))
            room -= taken + 1
        if room == 0 or not cut:
            rows.append(row)
    return rows


def fill_rows(rows, tokens, capacity, bos_id) -> np.ndarray:
    """The tokens (rows, capacity) of the rows from pack_rows, with <|bos|> in empty places."""
    filled = np.full((len(rows), capacity), bos_id, tokens.dtype)
    for segments, row in zip(rows, filled, strict=True):
        place = 1
        for start, length in segments:
            row[place : place + length] = tokens[start : start + length]
            place += length + 1
    return filled


def to_device(rows, device) -> tuple[torch.Tensor, torch.Tensor]:
    """NumPy rows (B, T + 1) as inputs and targets on the device, both (B, T) int64."""
    batch = torch.from_numpy(rows.astype(np.int64))
    if torch.device(device).type == "cuda":
        # Pinned memory returns to PyTorch's pool, which reuses it only after this copy has run
        batch = batch.pin_memory()
    batch = batch.to(device, non_blocking=True)
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


class TrainLoader:
    """Micro-batches of packed training rows. The batch of a step does not depend on the number of ranks.

    folder: the shards' folder. Each `next()` returns (inputs, targets), both (device_batch_size, seq_len)
    int64 on `device`. Step s trains on the rows from s * rows_per_step on, of one endless sequence of rows
    that depends only on (shards, seed, seq_len); rows_per_step counts the rows of all ranks and
    micro-batches. InputError if the corpus is smaller than one step, or if a shard is missing or cannot be
    read. It is raised by the constructor, or later on all ranks in the same micro-batch, so all ranks must
    call `next()` equally often.

    `state_dict()` is the position after the last micro-batch returned. Passed as `state`, it resumes there
    immediately, on any number of ranks. Packing a window takes 0.06 s at a length of 2048, 0.2 s at 256.
    stops_waiting: asked every second while shards are still being written; if it returns True, InputError.
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
        stops_waiting=lambda: False,
    ):
        self.folder = Path(folder)
        self.seq_len = seq_len
        self.seed = seed
        self.device = device
        self.stops_waiting = stops_waiting
        self.rows_per_micro_batch = world_size * device_batch_size  # of all ranks
        self.own_rows = slice(rank * device_batch_size, (rank + 1) * device_batch_size)
        state = state or {"epoch": 0, "window": 0, "row": 0}  # the next row
        self.epoch, self.window, self.row = state["epoch"], state["window"], state["row"]
        self._pack()  # now, to report a damaged shard before a run is touched
        text = count_tokens(self.manifest.train)
        if text < rows_per_step * seq_len:
            raise InputError(
                f"corpus {self.manifest.corpus} has {text} training tokens, "
                f"fewer than one step of {rows_per_step} rows of {seq_len}: "
                "use more text, a smaller --total-batch-size or a smaller --max-seq-len"
            )

    def state_dict(self) -> dict:
        """{epoch, window, row}: three ints, the same on every rank."""
        return {"epoch": self.epoch, "window": self.window, "row": self.row}

    def __next__(self):
        rows = [self._next_row() for _ in range(self.rows_per_micro_batch)]
        return to_device(np.stack(rows[self.own_rows]), self.device)

    def _next_row(self):
        while self.row >= len(self._rows):
            self._rows = None  # frees memory for the next window
            self.window, self.row = self.window + 1, 0
            together(self._pack)
        self.row += 1
        return self._rows[self.row - 1]

    def _pack(self):
        """Pack the rows of the window, waiting for it if necessary. After the last window an epoch begins."""
        # The first rank's, for all: the manifest may grow between their reads
        wait = functools.partial(wait_for_window, self.folder, self.window, self.stops_waiting)
        self.manifest = together(wait)[0]
        if self.window * WINDOW >= len(self.manifest.train):
            self.epoch, self.window = self.epoch + 1, 0
        # NumPy never changes the streams of RandomState; those of Generator may change in a new release
        seeds = np.random.SeedSequence([self.seed, self.epoch, self.window])
        rng = np.random.RandomState(np.random.MT19937(seeds))
        tokens, starts = read_shards(self.folder, self.manifest, "train", self.window)
        pieces = cut_documents(starts, len(tokens), self.seq_len)
        rng.shuffle(pieces)
        rows = pack_rows(pieces, self.seq_len + 1, cut=True)
        rng.shuffle(rows)
        self._rows = fill_rows(rows, tokens, self.seq_len + 1, self.manifest.vocab_size - 1)


def validation_rows(folder, seq_len) -> np.ndarray:
    """The validation set, (rows, seq_len + 1). Documents are packed whole; those longer than a row are cut
    into pieces. Each document or piece begins with <|bos|>, and rows are padded with it.
    """
    manifest = read_manifest(folder)
    tokens, starts = read_shards(folder, manifest, "val")
    pieces = cut_documents(starts, len(tokens), seq_len)
    rows = pack_rows(pieces, seq_len + 1, cut=False)
    return fill_rows(rows, tokens, seq_len + 1, manifest.vocab_size - 1)


def validation_batches(
    rows, device_batch_size, rank=0, world_size=1, device="cpu", max_tokens: int | None = None
):
    """Yield this rank's (inputs, targets) of `validation_rows`, both (device_batch_size, seq_len) int64.

    Over all ranks every token of the set is a target exactly once; every other target, including padding, is
    <|bos|>, which bits_per_byte does not score. max_tokens: use only as many rows as have this many tokens,
    evenly spread over the set, so that they represent it. Every rank yields the same number of batches, on
    `device`.
    """
    width = rows.shape[1]
    if max_tokens is not None:
        count = min(len(rows), -(-max_tokens // (width - 1)))
        rows = rows[[(2 * i + 1) * len(rows) // (2 * count) for i in range(count)]]
    missing = -len(rows) % (world_size * device_batch_size)
    rows = np.pad(rows, ((0, missing), (0, 0)), constant_values=rows[0, 0])  # rows begin with <|bos|>
    for batch in rows.reshape(-1, world_size, device_batch_size, width)[:, rank]:
        yield to_device(batch, device)
