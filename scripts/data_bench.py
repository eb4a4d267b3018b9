"""Measure the data pipeline: tokenization, packing and loading, memory, and what a training step waits for.

    OMP_NUM_THREADS=1 python -m scripts.data_bench                                 # the Python standard library
    python -m scripts.data_bench --corpus path:my_texts --max-seq-len 1024

Tokenization is compared in CPU seconds, which other work on the machine disturbs less than wall time.
"""

import argparse
import contextlib
import functools
import os
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from nanomuon import shards
from nanomuon.corpus import open_corpus
from nanomuon.dataloader import TrainLoader
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import cores, run_command
from nanomuon.tokenizer import Tokenizer


def tokenization(corpus, tokenizer, folder):
    """data_prep on one thread and on all cores against tiktoken alone on the same documents: the best of
    three each.
    """
    texts = list(corpus.documents(Counter()))
    size = sum(len(text.encode()) for text in texts)
    best = {}  # name: (CPU seconds, wall seconds)

    def timed(name, call):
        cpu, wall = time.process_time(), time.perf_counter()
        result = call()
        seconds = time.process_time() - cpu, time.perf_counter() - wall
        best[name] = tuple(map(min, best.get(name, seconds), seconds))
        return result

    for attempt in range(3):
        tokens = timed(
            "tiktoken alone", lambda: sum(len(tokenizer._bpe.encode_ordinary(text)) for text in texts)
        )
        for workers in (1, cores()):
            os.environ["NANOMUON_BASE_DIR"] = str(folder / f"{workers}-{attempt}")
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                prepare = functools.partial(shards.prepare, corpus, None, workers, tokenizer)
                timed(f"data_prep, {workers} thread{'s' * (workers > 1)}", prepare)
    for name, (cpu, wall) in best.items():
        print(
            f"{name:21} {tokens / cpu / 1e6:.2f} M tokens ({size / cpu / 1e6:.1f} MB) per CPU second, "
            f"{100 * best['tiktoken alone'][0] / cpu:.0f}% of tiktoken alone; {tokens / wall / 1e6:.2f} M per second"
        )


def repeated(folder, copies, place):
    """A folder of shards that names every training shard `copies` times, without taking space."""
    place.mkdir()
    for path in folder.glob("*.bin"):
        (place / path.name).symlink_to(path.resolve())
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
        cpu = time.process_time()
        loader, count = TrainLoader(folder, seq_len, 64, 8, world_size=world_size), 0
        while loader.epoch == 0:
            next(loader)
            count += 8
        cpu = time.process_time() - cpu
        print(
            f"loader, world size {world_size}   {count / cpu:,.0f} rows = {count * seq_len / cpu / 1e6:.0f} M tokens "
            f"per CPU second and rank, {100 * 8 * count * (seq_len + 1) / cpu / bandwidth:.0f}% of memory bandwidth, "
            f"{100 * loader.crop_fraction:.4f}% of the text cropped"
        )


def whole_documents(folder, seq_len):
    """Share of the documents that fit a row and yet were cut to fill one."""
    loader = TrainLoader(folder, seq_len, 1, 1)
    rows, fitting, whole = loader._rows(0, 0), 0, 0
    segments = set(zip(rows.sources.tolist(), rows.starts.tolist(), rows.lengths.tolist(), strict=True))
    for source, entry in enumerate(loader.manifest["train"][: shards.WINDOW]):
        offsets = shards.Shard.open(folder / entry["name"]).offsets
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            if end - start <= seq_len:
                fitting += 1
                whole += (source, start, end - start) in segments
    print(
        f"cut to fill a row     {100 * (1 - whole / fitting):6.2f}% of the {fitting:,} documents that fit one"
    )


def waiting(folder, seq_len, vocab_size):
    """Share of a step (forward and backward of depth 4, no optimizer) spent in next(loader)."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig.from_depth(4, vocab_size, seq_len))
    model.to_empty(device="cpu")
    model.init_weights()
    loader, waited = TrainLoader(folder, seq_len, 4, 4), 0.0
    began = time.perf_counter()
    for _ in range(6):
        asked = time.perf_counter()
        inputs, targets = next(loader)
        waited += time.perf_counter() - asked
        model(inputs, targets).backward()
    total = time.perf_counter() - began
    print(
        f"waiting for data      {100 * waited / total:6.3f}% of a step at depth 4 ({total / 6 * 1000:.0f} ms a step)"
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
        peaks.append(tracemalloc.get_traced_memory()[1] / 1e6)
        tracemalloc.stop()
    print(
        "loader memory         "
        + ", ".join(f"{peak:.1f}" for peak in peaks)
        + " MB for 1, 2, 4 windows of shards"
    )


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.data_bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--corpus", default="python", help="python or path:FILE_OR_FOLDER (default: %(default)s)"
    )
    parser.add_argument(
        "--max-seq-len", type=int, default=2048, help="tokens in a row (default: %(default)s)"
    )
    parser.add_argument("--vocab-size", type=int, help="tokens in the vocabulary (default: 4096)")
    args = parser.parse_args(argv)

    corpus = open_corpus(args.corpus)
    folder = shards.prepare(corpus, args.vocab_size)
    tokenizer = Tokenizer.load(folder / "tokenizer")
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
