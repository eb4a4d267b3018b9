"""Measure the data pipeline: tokenization, packing and loading, memory, and what a training step waits for.

    OMP_NUM_THREADS=1 python -m scripts.data_bench                           # the Python standard library
    python -m scripts.data_bench --corpus path:my_texts --max-seq-len 1024

Tokenization is compared in CPU seconds, which other work on the machine disturbs less than wall time.
"""

import contextlib
import functools
import math
import os
import shutil
import tempfile
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nanomuon import shards
from nanomuon.arguments import ArgumentParser, check_sizes, check_vocabulary
from nanomuon.corpus import open_corpus
from nanomuon.dataloader import TrainLoader
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import cores, run_command


@dataclass
class Timing:
    """The best of some calls."""

    cpu: float = math.inf  # seconds
    wall: float = math.inf

    def call(self, function):
        cpu, wall = time.process_time(), time.perf_counter()
        result = function()
        self.cpu = min(self.cpu, time.process_time() - cpu)
        self.wall = min(self.wall, time.perf_counter() - wall)
        return result


def tokenization(corpus, tokenizer, folder):
    """data_prep on one thread and on all cores, and tiktoken alone, on the same text: the best of three."""
    texts = list(corpus.documents(Counter()))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6

    def tiktoken_alone():
        return sum(len(tokenizer._bpe.encode_ordinary(text)) for text in texts)

    alone = Timing()
    of_workers = {workers: Timing() for workers in (1, cores())}
    for attempt in range(3):
        tokens = alone.call(tiktoken_alone)
        for workers, timing in of_workers.items():
            os.environ["NANOMUON_BASE_DIR"] = str(folder / f"{workers}-{attempt}")
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                timing.call(functools.partial(shards.prepare, corpus, None, workers, tokenizer))

    timings = {"tiktoken alone": alone}
    for workers, timing in of_workers.items():
        threads = "thread" if workers == 1 else "threads"
        timings[f"data_prep, {workers} {threads}"] = timing
    million_tokens = tokens / 1e6
    for name, timing in timings.items():
        print(
            f"{name:21} {million_tokens / timing.cpu:.2f} M tokens ({megabytes / timing.cpu:.1f} MB) "
            f"per CPU second, {100 * alone.cpu / timing.cpu:.0f}% of tiktoken alone; "
            f"{million_tokens / timing.wall:.2f} M per second"
        )


def repeated(folder, copies, place):
    """A folder of shards that names every training shard `copies` times, without taking space if it can."""
    place.mkdir()
    for path in folder.glob("*.bin"):
        try:
            os.link(path, place / path.name)
        except OSError:  # on another file system
            shutil.copyfile(path, place / path.name)
    manifest = shards.read_manifest(folder)
    shards.write_manifest(place, manifest | {"train": manifest["train"] * copies})
    return place


def loading(folder, seq_len):
    """Rows per second of one loader over a whole epoch, planning included, against copying the same bytes."""
    rows = np.zeros((1024, seq_len + 1), dtype=np.int64)
    copy = np.empty_like(rows)
    began = time.perf_counter()
    for _ in range(20):
        np.copyto(copy, rows)
    bandwidth = 20 * rows.nbytes / (time.perf_counter() - began)
    for world_size in (1, 8):
        began = time.process_time()
        loader = TrainLoader(folder, seq_len, 64, 8, world_size=world_size)
        count = 0
        while loader.epoch == 0:
            next(loader)
            count += 8
        rows_per_second = count / (time.process_time() - began)
        million_tokens = rows_per_second * seq_len / 1e6
        bytes_per_second = rows_per_second * 8 * (seq_len + 1)
        print(
            f"loader, world size {world_size}   {rows_per_second:,.0f} rows = {million_tokens:.0f} M tokens "
            f"per CPU second and rank, {100 * bytes_per_second / bandwidth:.0f}% of memory bandwidth, "
            f"{100 * loader.crop_fraction:.4f}% of the text cropped"
        )


def whole_documents(folder, seq_len):
    """Share of the documents that fit a row and yet were cut to fill one."""
    loader = TrainLoader(folder, seq_len, 1, 1)
    rows = loader._rows(0, 0)
    fitting = uncut = 0
    segments = set(zip(rows.sources.tolist(), rows.starts.tolist(), rows.lengths.tolist(), strict=True))
    for source, entry in enumerate(loader.manifest["train"][: shards.WINDOW]):
        offsets = shards.Shard.open(folder / entry["name"]).offsets
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            if end - start <= seq_len:
                fitting += 1
                if (source, start, end - start) in segments:
                    uncut += 1
    cut = 1 - uncut / fitting
    print(f"cut to fill a row     {100 * cut:6.2f}% of the {fitting:,} documents that fit one")


def waiting(folder, seq_len, vocab_size):
    """Share of a step (forward and backward of depth 4, no optimizer) spent in next(loader)."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig.from_depth(4, vocab_size, seq_len))
    model.to_empty(device="cpu")
    model.init_weights()
    loader = TrainLoader(folder, seq_len, 4, 4)
    waited = 0.0
    steps = 6
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        inputs, targets = next(loader)
        waited += time.perf_counter() - asked
        model(inputs, targets).backward()
    total = time.perf_counter() - began
    step_ms = 1000 * total / steps
    print(
        f"waiting for data      {100 * waited / total:6.3f}% of a step at depth 4 ({step_ms:.0f} ms a step)"
    )


def memory(folder, place, seq_len):
    """Peak of what a loader allocates while it reads an epoch, over shards named 1, 2 and 4 windows long."""
    peaks = []
    for windows in (1, 2, 4):
        copies = windows * shards.WINDOW // len(shards.read_manifest(folder)["train"])
        longer = repeated(folder, copies, place / f"memory{windows}")
        tracemalloc.start()
        loader = TrainLoader(longer, seq_len, 64, 64)
        while loader.epoch == 0:
            next(loader)
        _, peak = tracemalloc.get_traced_memory()
        peaks.append(f"{peak / 1e6:.1f}")
        tracemalloc.stop()
    print(f"loader memory         {', '.join(peaks)} MB for 1, 2, 4 windows of shards")


def main(argv=None):
    parser = ArgumentParser("python -m scripts.data_bench", __doc__)
    add = parser.add_argument
    add("--corpus", default="python", help="python or path:FILE_OR_FOLDER (default: %(default)s)")
    add("--max-seq-len", type=int, default=2048, help="tokens in a row (default: %(default)s)")
    add("--vocab-size", type=int, help="tokens in the vocabulary (default: 4096)")
    args = parser.parse_args(argv)
    check_sizes(args)
    check_vocabulary(args.vocab_size)

    corpus = open_corpus(args.corpus)
    folder = shards.prepare(corpus, args.vocab_size)
    tokenizer = shards.open_tokenizer(folder)
    with tempfile.TemporaryDirectory() as temporary:
        temporary = Path(temporary)
        shown = shards.read_manifest(folder)["train"]
        window = repeated(folder, max(1, shards.WINDOW // len(shown)), temporary / "window")
        loading(window, args.max_seq_len)
        whole_documents(folder, args.max_seq_len)
        waiting(folder, args.max_seq_len, tokenizer.vocab_size)
        if len(shown) <= shards.WINDOW:
            memory(folder, temporary, args.max_seq_len)
        tokenization(corpus, tokenizer, temporary)


if __name__ == "__main__":
    run_command(main)
