"""Packed batches in one global order, prefetch, exact resume.

The training rows of an epoch come window by window, a window being WINDOW consecutive shards. Within a window
the documents are shuffled and packed into rows of seq_len + 1 tokens without padding, and the rows are
shuffled. All of that depends on the shards, the seed, the epoch and seq_len only. Ranks and micro-batches
merely deal the rows out: the position in the data is (epoch, window, row) of the next row, the same on every
rank.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from nanomuon.runtime import InputError
from nanomuon.shards import WINDOW, Shard, command, read_manifest, wait_for_window, window_is_there

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
    left = int(lengths.sum()) + len(lengths)
    row_ends, out_starts, out_lengths = [], [], []
    while left >= capacity if cut else left:
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


class _Rows:
    """Rows packed from the documents of some shards: `len()` of them, `fill(i, row)` writes one."""

    def __init__(self, shards, bos_id, seq_len, rng=None, max_tokens=None):
        self.bos_id = bos_id
        self.tokens = [shard.tokens for shard in shards]
        bases = np.cumsum([0] + [len(tokens) for tokens in self.tokens])
        begins = np.concatenate(
            [shard.offsets[:-1] + base for shard, base in zip(shards, bases, strict=False)]
        )
        ends = np.concatenate([shard.offsets[1:] + base for shard, base in zip(shards, bases, strict=False)])
        if max_tokens is not None:
            begins, ends = begins[begins < max_tokens], np.minimum(ends, max_tokens)[begins < max_tokens]
        # documents longer than a row become pieces of seq_len tokens and one of what is left
        pieces = -(-(ends - begins) // seq_len)  # of each document
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(begins, pieces) + seq_len * within
        lengths = np.minimum(np.repeat(ends, pieces) - starts, seq_len)
        self.text_tokens = int(lengths.sum())
        order = np.arange(len(starts)) if rng is None else rng.permutation(len(starts))
        self.row_ends, starts, self.lengths = pack_rows(
            starts[order], lengths[order], seq_len + 1, cut=rng is not None
        )
        self.cropped = self.text_tokens - int(self.lengths.sum())
        self.sources = np.searchsorted(bases, starts, side="right") - 1
        self.starts = starts - bases[self.sources]
        self.order = np.arange(len(self.row_ends)) if rng is None else rng.permutation(len(self.row_ends))

    def __len__(self):
        return len(self.row_ends)

    def fill(self, index, row) -> None:
        """Write row `index` into the places of row (seq_len + 1,) that it takes."""
        index = self.order[index]
        place = 0
        for segment in range(self.row_ends[index - 1] if index else 0, self.row_ends[index]):
            start, length = self.starts[segment], self.lengths[segment]
            row[place] = self.bos_id
            row[place + 1 : place + 1 + length] = self.tokens[self.sources[segment]][start : start + length]
            place += length + 1


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
                f"{rows_per_step} rows a step do not divide by {device_batch_size} rows on each of {world_size} ranks"
            )
        self.folder, self.seq_len, self.seed, self.device = Path(folder), seq_len, seed, torch.device(device)
        self.batch, self.rank, self.world_size = device_batch_size, rank, world_size
        self.manifest = _manifest(folder)
        text = sum(shard["tokens"] for shard in self.manifest["train"])
        if self.manifest["complete"] and text < rows_per_step * seq_len:
            raise InputError(
                f"corpus {self.manifest['corpus']} has {text} training tokens, fewer than one step of {rows_per_step} "
                f"rows of {seq_len}: use more text, a smaller --total-batch-size or a smaller --max-seq-len"
            )
        self._state = state or {"epoch": 0, "window": 0, "row": 0}
        self._counted = self._cropped = 0
        self._batches = self._generate(**self._state)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead = deque(self._thread.submit(next, self._batches) for _ in range(AHEAD))

    def __iter__(self):
        return self

    def __next__(self):
        rows = None
        while rows is None:
            rows, state = self._ahead.popleft().result()
            self._ahead.append(self._thread.submit(next, self._batches))
            if rows is None:
                made_by = command(
                    self.manifest["corpus"], self.manifest["vocab_size"], self.manifest.get("asked")
                )
                self.manifest = wait_for_window(self.folder, state["window"], made_by)
        self._state = state
        # pinned memory goes back to PyTorch's pool, which hands it out again only after this copy has run
        rows = rows.to(self.device, non_blocking=True)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def state_dict(self) -> dict:
        """{epoch, window, row}: three ints, the same on every rank."""
        return dict(self._state)

    @property
    def epoch(self) -> int:
        """Epoch of the next row, from 0."""
        return self._state["epoch"]

    @property
    def crop_fraction(self) -> float:
        """Share of the text tokens of the windows packed so far that are in no row."""
        return self._cropped / max(1, self._counted)

    def _generate(self, epoch, window, row):
        """Yield (rows of this rank, state after them), or (None, state) where shards of state["window"] are
        to come.
        """
        rows = None
        while True:
            batch = torch.empty(
                (self.batch, self.seq_len + 1), dtype=torch.int64, pin_memory=self.device.type == "cuda"
            )
            for index in range(self.world_size * self.batch):
                while rows is None or row >= len(rows):
                    if rows is not None:
                        row, window = 0, window + 1
                    while not window_is_there(self.manifest, window):
                        yield None, {"window": window}
                    if window * WINDOW >= len(self.manifest["train"]):
                        epoch, window = epoch + 1, 0
                    rows = self._rows(epoch, window)
                if index // self.batch == self.rank:
                    rows.fill(row, batch[index % self.batch].numpy())
                row += 1
            yield batch, {"epoch": epoch, "window": window, "row": row}

    def _rows(self, epoch, window):
        # NumPy keeps the streams of RandomState for good, those of Generator may change with a release
        rng = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self.seed, epoch, window])))
        rows = _Rows(
            _open(self.folder, self.manifest, "train", window), self.manifest["bos_id"], self.seq_len, rng
        )
        self._counted += rows.text_tokens
        self._cropped += rows.cropped
        return rows


def validation_batches(
    folder, seq_len, device_batch_size, rank=0, world_size=1, device="cpu", max_tokens: int | None = None
):
    """Yield this rank's (inputs, targets) of the validation set, each (device_batch_size, seq_len) int64 on
    `device`.

    Over all ranks every token of the set is a target exactly once; every other target (<|bos|> and padding)
    is -1. Documents are packed whole; those longer than a row are cut into pieces that begin with <|bos|>.
    max_tokens takes that many tokens from the beginning of the set. Every rank yields the same number of
    batches.
    """
    manifest = _manifest(folder)
    rows = _Rows(_open(Path(folder), manifest, "val"), manifest["bos_id"], seq_len, max_tokens=max_tokens)
    per_round = world_size * device_batch_size
    for first in range(rank * device_batch_size, -(-len(rows) // per_round) * per_round, per_round):
        batch = np.full((device_batch_size, seq_len + 1), manifest["bos_id"], dtype=np.int64)
        for place, index in enumerate(range(first, min(first + device_batch_size, len(rows)))):
            rows.fill(index, batch[place])
        targets = np.where(batch == manifest["bos_id"], -1, batch)[:, 1:]
        yield torch.tensor(batch[:, :-1], device=device), torch.tensor(targets, device=device)


def _manifest(folder):
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"no shards in {folder}: python -m scripts.data_prep makes them")
    return manifest


def _open(folder, manifest, kind, window=0):
    names = [shard["name"] for shard in manifest[kind][window * WINDOW : (window + 1) * WINDOW]]
    return [Shard.open(folder / name, manifest["tokenizer"]) for name in names]
