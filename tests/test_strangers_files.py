"""Runs, shards, tokenizers and races that somebody else made, or that were damaged: whatever is in them, a
reader gives what is sound or one line that names the file, soon, and changes nothing.
"""

import json
import random
import resource
import shutil
import time

import pytest
import torch

from nanomuon import checkpoint, finished_run, planning, race, report, run_folder, shards
from nanomuon.dataloader import TrainLoader, validation_batches
from nanomuon.finished_run import load_run
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import MuonAdamW
from nanomuon.read_json import check
from nanomuon.recipe import param_groups
from nanomuon.run import CHECKPOINT_META
from nanomuon.runtime import InputError, Runtime, explain
from scripts import base_train
from tests.mutations import damage
from tests.training import Ranks, write_corpus

CPU = Runtime(torch.device("cpu"), torch.float32)
RESULT = {
    "contender": "muon",
    "seed": 0,
    "score": 1.5,
    "curve": [[0, 2.0, None], [10, 1.6, 1.5]],
    "step_ms": 3.0,
    "optimizer_ms": 1.0,
    "initial": "0123456789ab",
    "rows": "ba9876543210",
    "groups": [],
    "compiled": False,
    "machine": "this one",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base folder with a real run of four steps, its shards, and a race."""
    base = tmp_path_factory.mktemp("made")
    write_corpus(base / "texts")
    assert Ranks(base, "tiny", 4, "--save-every", "2").join() == [0]
    folder = base / "races" / "small"
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps({"name": "small", "dtype": "float32", "steps": 10}))
    (folder / "muon-seed0.json").write_text(json.dumps(RESULT))
    return base


@pytest.fixture
def base(made, tmp_path, monkeypatch):
    """A copy of it to damage."""
    shutil.copytree(made, tmp_path / "base")
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    return tmp_path / "base"


def load_and_encode(base):
    model, tokenizer, _ = load_run("tiny", CPU)
    tokenizer.encode("some text \x00\xff")
    tokenizer.decode(range(tokenizer.vocab_size))


def resume(base):
    """What base_train does with a run before it trains."""
    folder = run_folder.folder_of("tiny")
    args, settings, _ = base_train.resolve_arguments(["--run", "tiny"])
    measured = {"bf16_speedup": 0.0} | settings.get("measured", {})
    runtime = base_train.sizing.choose_dtype(args.dtype, CPU, measured)
    plan = planning.plan_run(args, 300, runtime, measured)
    run_folder.check_no_links(folder)
    run_folder.is_complete(folder, plan.steps)


def read_figures(base):
    folder = run_folder.folder_of("tiny")
    plan = planning.Plan(GPTConfig.from_depth(2, 300, 32), rows=4, batch=256, steps=4, data_parallel=1)
    rows, _ = report.read_metrics(folder / "metrics.jsonl")
    finished_run.summarize(rows, 1.0, plan, CPU)


def load_checkpoint(base):
    found = checkpoint.find(run_folder.folder_of("tiny"))
    config = GPTConfig.from_depth(2, 300, 32)
    checkpoint.check_model_fits(found, planning.meta_model(config))
    model = GPT(config)
    optimizer = MuonAdamW(param_groups(model))
    meta = checkpoint.load(found, model, optimizer)
    check(meta, CHECKPOINT_META, found)


def read_shards(base):
    (folder,) = (base / "shards").glob("path-*")
    shards.open_tokenizer(folder)
    list(validation_batches(folder, 32, 4))
    next(TrainLoader(folder, 32, 8, 4))
    shards.verify(folder)


def read_race(base):
    folder = base / "races" / "small"
    race.choose_dtype("auto", folder)
    if (folder / "task.json").exists():  # else it would be written
        race.check_setup(folder, {"name": "small", "dtype": "float32", "steps": 10})
    race.read_result(folder / "muon-seed0.json")


READERS = {  # of the files that match
    "runs/tiny/config.json": load_and_encode,
    "runs/tiny/model.safetensors": load_and_encode,
    "runs/tiny/tokenizer/*": load_and_encode,
    "runs/tiny/settings.json": resume,
    "runs/tiny/summary.json": resume,
    "runs/tiny/*.jsonl": read_figures,
    "runs/tiny/checkpoints/step_4/*": load_checkpoint,
    "shards/*/*.*": read_shards,
    "shards/*/tokenizer/*": read_shards,
    "races/small/*": read_race,
}


def state(base):
    """{path: what would show that it was written to} of all that is in a folder."""
    found = {}
    for path in base.rglob("*"):
        status = path.lstat()
        found[path] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
    return found


def vouch_for(checkpoint_folder):
    """Make the manifest of a checkpoint agree with its files, as someone who means harm can."""
    file = checkpoint_folder / "manifest.json"
    if not file.is_file() or file.stat().st_size > 1 << 24:
        return
    try:
        manifest = json.loads(file.read_text())
        manifest.pop("sha256", None)
        manifest["files"] = {}
        for tensors in checkpoint_folder.glob("*.safetensors"):
            if tensors.is_file() and tensors.stat().st_size < 1 << 30:
                manifest["files"] |= checkpoint._fingerprint(tensors)
        file.write_text(checkpoint._seal(manifest))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return  # there is no manifest any more that could vouch for anything


def restore(made, base, file):
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    for path in {file, base / "runs/tiny/checkpoints/step_4/manifest.json"}:
        shutil.copy2(made / path.relative_to(base), path)


def abuse(made, base, cases, seed):
    """Damage one file after the other and read it. Returns how many of the cases were refused."""
    rng = random.Random(seed)
    targets = []
    for pattern, reader in READERS.items():
        targets += [(file, reader) for file in sorted(base.glob(pattern)) if file.is_file()]
    assert len(targets) >= 16
    refused = 0
    for case in range(cases):
        file, reader = targets[case % len(targets)]
        damage(file, rng)
        if reader is load_checkpoint and rng.random() < 0.5:
            vouch_for(file.parent)
        before = state(base)
        began = time.perf_counter()
        try:
            reader(base)
        except InputError as error:
            refused += 1
            code, line = explain(error)
            assert code == 2 and line.count("\n") == 1 and "\x1b" not in line, line
        except BaseException as error:
            raise AssertionError(f"case {case} of seed {seed}: {file.relative_to(base)}") from error
        assert time.perf_counter() - began < 5, f"case {case} of seed {seed}: {file.relative_to(base)}"
        assert state(base) == before, f"case {case} of seed {seed}: {file.relative_to(base)}"
        restore(made, base, file)
    return refused


def readers_refuse_or_read(made, base, monkeypatch, cases, seed):
    monkeypatch.setattr(shards, "PATIENCE", -1)  # nobody will write the shards that are missing
    for reader in set(READERS.values()):
        reader(base)  # undamaged
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = abuse(made, base, cases, seed)
    assert cases / 4 < refused < cases
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest < 300_000  # KB


def test_damage_is_refused_in_one_line_or_does_not_matter(made, base, monkeypatch):
    readers_refuse_or_read(made, base, monkeypatch, 200, seed=0)


@pytest.mark.slow
def test_a_thousand_damaged_files(made, base, monkeypatch):
    readers_refuse_or_read(made, base, monkeypatch, 1000, seed=1)
