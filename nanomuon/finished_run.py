"""A finished run: its model for others to load, its summary, its samples and its report.

The model can also be that of a checkpoint, while the run goes on.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from nanomuon import checkpoint, core, export, report, shards
from nanomuon.corpus import open_corpus
from nanomuon.export import MODEL_OPTIONS, MODEL_SHAPE
from nanomuon.files import tensor_shapes, write_json, write_text
from nanomuon.generate import sample_texts
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.parallel import build_model
from nanomuon.planning import Plan, meta_model
from nanomuon.read_json import Number, Record, Text, check, sound_lines
from nanomuon.run_folder import find_run, read_settings
from nanomuon.runtime import InputError, Runtime, base_dir, peak_memory_mb, print0
from nanomuon.tokenizer import Tokenizer, load_or_restore

PROMPTS = {"python": ["import os\n", "def main():\n", "class Stack:\n", "    for i in range("]}
NO_PROMPTS = [""] * 3  # for other corpora
# What settings.json says of the model that a checkpoint holds
TRAINED_MODEL = Record({**MODEL_SHAPE, "corpus": Text(), "tokenizer": Text(64)}, MODEL_OPTIONS)
STAGE = Record({"stage": Text(), "seconds": Number(low=0)})  # a line of stages.jsonl


def load_run(run: str, runtime: Runtime, checkpoint_name: str | None = None) -> tuple[GPT, Tokenizer, dict]:
    """(model, tokenizer, facts) of a finished run, by its name or by the path of its folder (see find_run).

    checkpoint_name: "last" or "step_<n>" for the model as that checkpoint has it, whether the run has ended
    or not; called by all ranks then. InputError where there is none, or where model and tokenizer do not
    belong together. A tokenizer that is missing is restored if another folder on this machine has it.
    """
    run_dir = find_run(run)
    if checkpoint_name is not None:
        return load_run_at_checkpoint(run_dir, checkpoint_name, runtime)
    if not (run_dir / "model.safetensors").exists() and checkpoint.saved_steps(run_dir):
        raise InputError(
            f"{run_dir} holds no finished model yet: --checkpoint last takes that of its last checkpoint"
        )
    config, tokenizer, about = describe_run(run_dir, runtime.rank)
    model = build_model(config, runtime, seed=0)
    export.load_model_weights(run_dir, model)
    return model, tokenizer, about


def load_run_at_checkpoint(run_dir: Path, name: str, runtime: Runtime) -> tuple[GPT, Tokenizer, dict]:
    """load_run with the model of a checkpoint: "last", or "step_<n>"."""
    there = [f"step_{step}" for step in checkpoint.saved_steps(run_dir)]
    if not there or name not in ("last", *there):
        raise InputError(f"{run_dir} has no checkpoint {name}; it has {', '.join(there) or 'none'}")
    found = checkpoint.find(run_dir, "auto" if name == "last" else name)
    settings, file = read_settings(run_dir), run_dir / "settings.json"
    check(settings, TRAINED_MODEL, str(file))
    tokenizer = load_or_restore(run_dir / "tokenizer", settings["tokenizer"], runtime.rank)
    shape = {field: settings[field] for field in (*MODEL_SHAPE, *MODEL_OPTIONS) if field in settings}
    config = possible_config(file, shape)
    checkpoint.check_model_fits(found, meta_model(config))  # before its memory is asked for
    model = build_model(config, runtime, seed=0)
    step = checkpoint.load_model(found, model)
    about = {"step": step, "val_bpb": None, "corpus": settings["corpus"], "tokenizer": tokenizer.hash}
    if isinstance(settings.get("trained_on"), dict):
        about["revision"] = settings["trained_on"].get("revision")
    return model, tokenizer, about


def describe_run(run_dir: Path, rank: int = 0) -> tuple[GPTConfig, Tokenizer, dict]:
    """(config, tokenizer, facts) of a finished run: load_run without its weights, with the same errors."""
    config, about = export.load_model_config(run_dir)
    tokenizer = load_or_restore(run_dir / "tokenizer", about["tokenizer"], rank)
    if tokenizer.hash != about["tokenizer"] or tokenizer.vocab_size != config["vocab_size"]:
        raise InputError(
            f"{run_dir}/tokenizer has {tokenizer.vocab_size} tokens and is not the one the model was trained "
            f"with ({config['vocab_size']} tokens); put that one back"
        )
    return model_config(run_dir, config), tokenizer, about


def validation_folder(corpus_name: str, tokenizer: Tokenizer, about: dict) -> Path:
    """Folder of shards with the validation set of a corpus in the tokens of a run; written where it is not.

    tokenizer, about: as load_run gives them. InputError where the documents are not on this machine and the
    shards are not either.
    """
    try:
        corpus = open_corpus(corpus_name)
    except InputError as error:
        wanted = about.get("revision") if corpus_name == about["corpus"] else None
        for manifest_file in sorted(base_dir().glob("shards/*/manifest.json")):
            folder = manifest_file.parent
            try:
                manifest = shards.read_manifest(folder)
            except InputError:  # of another corpus, as far as one can tell
                continue
            same = wanted is not None and manifest["revision"] == wanted
            if same and manifest["tokenizer"] == tokenizer.hash and manifest["val"]:
                print0(f"{error}; its validation set is in {folder}")
                return folder
        raise InputError(f"{error}; --corpus NAME evaluates on documents that are here") from error
    revision = about.get("revision")
    if corpus_name == about["corpus"] and revision not in (None, corpus.revision):
        print0(
            f"corpus {corpus_name} is not as it was when the run was trained (revision {corpus.revision}, "
            f"which was {revision}): the figure may be another one"
        )
    return shards.prepare(corpus, tokenizer=tokenizer, max_tokens=0)


def model_config(run_dir: Path, config: dict) -> GPTConfig:
    """What config.json says of the model, once the header of model.safetensors agrees.

    Before that nothing is built on its word: a few bytes could ask for more memory than there is. InputError
    where the two do not belong together.
    """
    file, weights = run_dir / "config.json", run_dir / "model.safetensors"
    shape = possible_config(file, config)
    there = tensor_shapes(weights)
    if shape.depth > len(there):  # even a model without memory takes its time to build
        raise InputError(f"{file}: config.depth is {shape.depth}, but {weights} has {len(there)} tensors")
    wanted = {name: tuple(tensor.shape) for name, tensor in meta_model(shape).state_dict().items()}
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise InputError(
                f"{weights} does not fit the model of config.json: {name} has shape {there.get(name)}, "
                f"but by the config {wanted.get(name)}"
            )
    return shape


def possible_config(file: Path, fields: dict) -> GPTConfig:
    """The GPTConfig of these fields, which `file` has; InputError where no model can have them together."""
    try:
        return GPTConfig(**fields)
    except ValueError as error:
        raise InputError(f"{file}: {error}") from error


def write_results(
    run_dir: Path,
    settings: dict,
    summary: dict,
    samples: list[str],
    seconds: dict[str, float],
    provenance: list[tuple],
    core_results: dict | None = None,
) -> None:
    """report.md, loss.png and summary.json, and what they say in short.

    The summary is written last and marks the run as complete. settings, provenance: what the report lists.
    seconds: see `record_stages`. core_results: see core.evaluate.
    """
    stages = record_stages(run_dir, seconds)
    machine = report.machine_description()
    core_table = None
    if core_results is not None:
        core_table = core.as_line(core_results), core_results["tasks"]
    report.write_report(
        run_dir, settings, summary, samples, machine, list(stages.items()), provenance, core_table
    )
    write_json(run_dir / "summary.json", summary)
    for sample in samples:
        print0(f"--- sample\n{sample}")
    report.print_summary(summary)
    print0(f"report: {run_dir}/report.md, {run_dir}/loss.png")


def summarize(rows: list[dict], val_bpb: float, plan: Plan, runtime: Runtime) -> dict:
    """The figures of a run. rows: its training rows of metrics.jsonl, of which damage may have left none."""
    recent = [row["train_loss"] for row in rows[-20:] if row["train_loss"] is not None]
    update_ms = [row["optimizer_ms"] for row in rows if "optimizer_ms" in row]
    speeds = [row["tokens_per_second"] for row in rows]
    return {
        "val_bpb": round(val_bpb, 4),
        "train_loss": round(statistics.fmean(recent), 4) if recent else None,
        "steps": plan.steps,
        "tokens": plan.tokens,
        "seconds": round(sum(row["step_ms"] for row in rows) / 1000, 1),
        "tokens_per_second": round(statistics.median(speeds)) if speeds else None,
        "optimizer_ms": round(statistics.median(update_ms), 1) if update_ms else None,
        "peak_memory_mb": peak_memory_mb(runtime.device),
        "dtype": runtime.dtype_name,
        "parameters": meta_model(plan.config).parameter_counts()["total"],
    }


def sample_run(
    model: GPT | None, tokenizer: Tokenizer, args: argparse.Namespace, runtime: Runtime
) -> list[str]:
    """Texts of the trained model; none where this device cannot hold it whole.

    model: None where it was trained in pieces; the exported one is then loaded.
    """
    try:
        if model is None:
            model, _, _ = load_run(args.run, runtime)
        prompts = PROMPTS.get(args.corpus, NO_PROMPTS)
        return sample_texts(model, tokenizer, prompts, max_tokens=128, seed=args.seed)
    except torch.OutOfMemoryError:
        print0("no samples: the whole model does not fit into this device (scripts.sample, where it does)")
        return []


def record_stages(run_dir: Path, seconds: dict[str, float]) -> dict[str, float]:
    """Append to stages.jsonl what the stages of a run took; return all that are there, the last of each.

    speedrun.sh writes those that come before training. Damaged lines are set aside.
    """
    file = run_dir / "stages.jsonl"
    rows = sound_lines(file, STAGE)
    rows += [{"stage": stage, "seconds": spent} for stage, spent in seconds.items()]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return {row["stage"]: row["seconds"] for row in rows}
