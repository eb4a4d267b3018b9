"""A finished run: its model for others to load, its summary, its samples and its report."""

import argparse
import json
import statistics
from pathlib import Path

import torch

from nanomuon import core, export, report
from nanomuon.generate import sample_texts
from nanomuon.gpt import EARLIER_SHORT_WINDOW, GPT, GPTConfig
from nanomuon.parallel import build_model
from nanomuon.planning import Plan, meta_model
from nanomuon.runtime import InputError, Runtime, base_dir, peak_memory_mb, print0, write_json
from nanomuon.tokenizer import Tokenizer

PROMPTS = {"python": ["import os\n", "def main():\n", "class Stack:\n", "    for i in range("]}
NO_PROMPTS = [""] * 3  # for other corpora


def load_run(run: str, runtime: Runtime) -> tuple[GPT, Tokenizer, dict]:
    """(model, tokenizer, facts) of a finished run by name.

    InputError where there is none, or where model and tokenizer do not belong together.
    """
    run_dir = base_dir() / "runs" / run
    config, about = export.load_model_config(run_dir)
    tokenizer = Tokenizer.load(run_dir / "tokenizer")
    if tokenizer.hash != about["tokenizer"] or tokenizer.vocab_size != config["vocab_size"]:
        raise InputError(
            f"{run_dir}/tokenizer has {tokenizer.vocab_size} tokens and is not the one the model was trained "
            f"with ({config['vocab_size']} tokens); put that one back"
        )
    config.setdefault("short_window", EARLIER_SHORT_WINDOW)
    model = build_model(GPTConfig(**config), runtime, seed=0)
    export.load_model_weights(run_dir, model)
    return model, tokenizer, about


def write_results(
    run_dir: Path,
    settings: dict,
    summary: dict,
    samples: list[str],
    seconds: dict[str, float],
    core_results: dict | None = None,
) -> None:
    """report.md, loss.png and summary.json, and what they say in short.

    The summary is written last and marks the run as complete. settings: what the report lists. seconds: see
    `record_stages`. core_results: see core.evaluate.
    """
    stages = record_stages(run_dir, seconds)
    machine = report.machine_description()
    core_table = None
    if core_results is not None:
        core_table = core.as_line(core_results), core_results["tasks"]
    report.write_report(run_dir, settings, summary, samples, machine, list(stages.items()), core_table)
    write_json(run_dir / "summary.json", summary)
    for sample in samples:
        print(f"--- sample\n{sample}")
    print_summary(summary)
    print(f"report: {run_dir}/report.md, {run_dir}/loss.png", flush=True)


def summarize(rows: list[dict], val_bpb: float, plan: Plan, runtime: Runtime) -> dict:
    """The figures of a run. rows: its training rows of metrics.jsonl."""
    recent = [row["train_loss"] for row in rows[-20:] if row["train_loss"] is not None]
    return {
        "val_bpb": round(val_bpb, 4),
        "train_loss": round(statistics.fmean(recent), 4) if recent else None,
        "steps": rows[-1]["step"],
        "tokens": rows[-1]["tokens"],
        "seconds": round(sum(row["step_ms"] for row in rows) / 1000, 1),
        "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in rows)),
        "optimizer_ms": round(statistics.median(row["optimizer_ms"] for row in rows), 1),
        "peak_memory_mb": peak_memory_mb(runtime.device),
        "dtype": runtime.dtype_name,
        "parameters": meta_model(plan.config).parameter_counts()["total"],
    }


def print_summary(summary: dict) -> None:
    print0("---\n" + "\n".join(f"{key}: {value}" for key, value in summary.items()))


def sample_run(model: GPT | None, args: argparse.Namespace, runtime: Runtime) -> list[str]:
    """Texts of the trained model; none where this device cannot hold it whole.

    model: None where it was trained in pieces; the exported one is then loaded.
    """
    try:
        if model is None:
            model, _, _ = load_run(args.run, runtime)
        tokenizer = Tokenizer.load(base_dir() / "runs" / args.run / "tokenizer")
        prompts = PROMPTS.get(args.corpus, NO_PROMPTS)
        return sample_texts(model, tokenizer, prompts, max_tokens=128, seed=args.seed)
    except torch.OutOfMemoryError:
        print0("no samples: the whole model does not fit into this device (scripts.sample, where it does)")
        return []


def record_stages(run_dir: Path, seconds: dict[str, float]) -> dict[str, float]:
    """Append to stages.jsonl what the stages of a run took; return all that are there, the last of each.

    speedrun.sh writes those that come before training.
    """
    file = run_dir / "stages.jsonl"
    with open(file, "a") as stages:
        for stage, spent in seconds.items():
            stages.write(json.dumps({"stage": stage, "seconds": spent}) + "\n")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["stage"]: row["seconds"] for row in rows}
