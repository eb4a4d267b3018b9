"""nanochat's model, optimizer, schedules and loop, fed by this repo's loader, tokenizer and validation set:
it reads the same tokens in the same order as a run of this repo, and is scored on the same bytes.

    git clone https://github.com/karpathy/nanochat && git -C nanochat checkout 92d63d4
    CORPUS=python RUN=ours bash speedrun.sh
    PYTHONPATH=. python examples/train_nanochat.py --run ours --nanochat nanochat --rates 0.6

It should also train on a GPU, and under torchrun on several; neither has been tried. If nanochat runs out of
memory, give a smaller --device-batch-size. Flags after -- go to nanochat: --save-every=500 makes a long run
save, and --resume-from-step=500 resumes it. The last lines are both results, in bits per byte on the whole
validation set. nanochat's files go to NANOCHAT_BASE_DIR (default: nanochat/ under NANOMUON_BASE_DIR).
"""

import argparse
import itertools
import os
import runpy
import sys
import types
from pathlib import Path

import torch

from nanomuon.corpus import open_corpus
from nanomuon.dataloader import TrainLoader, validation_batches, validation_rows
from nanomuon.runtime import base_dir, find_run, read_json
from nanomuon.settings import Settings
from nanomuon.shards import shards_for_training
from nanomuon.tokenizer import Tokenizer
from nanomuon.trained import read_config

# For runs of a few hundred steps, falling to zero from the first step on. nanochat multiplies them by
# sqrt(batch / 2^19), which is 0.09 at 4,096 tokens per step
RATES = {"matrix": 0.34, "embedding": 3.4, "unembedding": 0.09, "scalar": 1.0}

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
)
parser.add_argument("--run", required=True, help="a finished run, whose rows, batch and length are used")
parser.add_argument("--nanochat", type=Path, required=True, help="a checkout of nanochat")
parser.add_argument("--rates", type=float, help="factor on this file's RATES (default: nanochat's own rates)")
parser.add_argument("--device-batch-size", type=int, help="rows per micro-step (default: the run's)")
parser.add_argument("flags", nargs="*", help="after --: other flags of nanochat's base_train")
args = parser.parse_args()

folder = find_run(args.run)
if not (folder / "summary.json").exists():
    parser.error(f"{folder} has no summary.json: finish that run first")
settings, config = read_json(folder / "settings.json", Settings), read_config(folder)
summary = read_json(folder / "summary.json")
options = settings.options
corpus = open_corpus(options["corpus"], options["text_field"], options["skip_unreadable"])
shards = shards_for_training(corpus, options["vocab_size"])
tokenizer = Tokenizer.load(folder / "tokenizer")
batch, rows = options["total_batch_size"], args.device_batch_size or settings.rows
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
micro_batch = world_size * rows * config.seq_len
validation = validation_rows(shards, config.seq_len)
batches = sum(1 for _ in validation_batches(validation, rows, rank, world_size))


class OurTokenizer:
    def get_vocab_size(self):
        return tokenizer.vocab_size

    def get_bos_token_id(self):
        return tokenizer.vocab_size - 1


def training_batches(_, device_rows, context, split, device="cpu", resume_state_dict=None):
    loader = TrainLoader(
        shards,
        context,
        batch // context,
        device_rows,
        rank,
        world_size,
        options["seed"],
        device,
        resume_state_dict,
    )
    while True:
        # nanochat saves the position of the batch that it has fetched and not yet trained on
        position = loader.state_dict()
        inputs, targets = next(loader)
        yield inputs, targets, position | {"pq_idx": loader.window, "rg_idx": loader.row}


def whole_validation_set(_, device_rows, context, split, device="cpu", **unused):
    return itertools.cycle(validation_batches(validation, device_rows, rank, world_size, device))


# nanochat's own package `scripts`, not ours. It imports wandb and rustbpe, but uses neither
checkout = args.nanochat.resolve()
sys.path.insert(0, str(checkout))
sys.modules["scripts"] = types.ModuleType("scripts")
sys.modules["scripts"].__path__ = [str(checkout / "scripts")]
for name in ("wandb", "rustbpe"):
    sys.modules[name] = types.ModuleType(name)
os.environ.setdefault("NANOCHAT_DTYPE", options["dtype"])
os.environ.setdefault("NANOCHAT_BASE_DIR", str(base_dir() / "nanochat"))

import nanochat.dataloader  # noqa: E402
import nanochat.tokenizer  # noqa: E402

nanochat.tokenizer.get_tokenizer = OurTokenizer
nanochat.tokenizer.get_token_bytes = lambda device="cpu": torch.from_numpy(tokenizer.token_bytes).to(device)
nanochat.dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit = training_batches
nanochat.dataloader.tokenizing_distributed_data_loader_bos_bestfit = whole_validation_set

flags = {
    "depth": config.depth,
    "head-dim": config.head_dim,
    "window-pattern": config.window_pattern,
    "max-seq-len": config.seq_len,
    "device-batch-size": rows,
    "total-batch-size": batch,
    "num-iterations": summary["steps"],
    "eval-every": summary["steps"],
    "eval-tokens": batches * micro_batch,
    "core-metric-every": -1,
    "sample-every": -1,
}
if args.rates:
    flags |= {f"{role}-lr": args.rates * rate for role, rate in RATES.items()}
    flags |= {"warmdown-ratio": 1, "final-lr-frac": 0}
sys.argv = ["base_train", *(f"--{name}={value}" for name, value in flags.items()), *args.flags]
its_names = runpy.run_path(str(checkout / "scripts" / "base_train.py"), run_name="__main__")
if rank == 0:
    print(f"nanochat {its_names['val_bpb']:.4f} bits per byte, {its_names['num_params']:,} parameters")
    print(f"{args.run} {summary['val_bpb']:.4f} bits per byte, {summary['parameters']:,} parameters")
