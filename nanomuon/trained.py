"""Open a trained model from a run folder, your own or a stranger's, without running any code in it."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nanomuon import checkpoint
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.parallel import build_model
from nanomuon.plan import meta_model
from nanomuon.runtime import InputError, Runtime, base_dir, find_run, on_first_rank, print0, read_json
from nanomuon.settings import Settings
from nanomuon.tokenizer import Tokenizer

# Limits on a stranger's config.json: more layers take minutes to build, and longer rotary tables more memory
MOST_LAYERS, LARGEST = 1024, 1 << 24
MESSAGE = 400  # characters of an error that are shown; torch lists every tensor that does not fit


def with_relative_imports(file: Path) -> list[Path]:
    """A file of this package, and those that it imports by `from .name import ...`, directly or not."""
    found = [file]
    for each in found:  # the list grows
        for name in re.findall(r"^from \.(\w+) import", each.read_text(), re.MULTILINE):
            imported = file.with_name(f"{name}.py")
            if imported not in found:
                found.append(imported)
    return found


def model_sources() -> dict[str, str]:
    """{file: start of its SHA-256} of the code that computes the model."""
    files = with_relative_imports(Path(__file__).with_name("gpt.py"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


def warn_of_changed_sources(run: str, trained_with: dict) -> None:
    """Print which files of the model have changed since the run recorded them, if it recorded them."""
    before, now = trained_with.get("model"), model_sources()
    if not isinstance(before, dict) or before == now:
        return
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    print0(f"warning: the model's code has changed since run {run} used it: {', '.join(changed)}")


def read_config(folder: Path) -> GPTConfig:
    """The model's fields in config.json; InputError if they are missing, or impossible."""
    config = read_json(folder / "config.json", GPTConfig)
    if read_json(folder / "config.json").get("experts"):
        raise InputError(
            f"{folder}/config.json: this version has no models with experts: use the version that trained it"
        )
    numbers = [value for value in vars(config).values() if isinstance(value, int)]
    if config.depth > MOST_LAYERS or max(numbers) > LARGEST:
        raise InputError(
            f"{folder}/config.json: a model has at most {MOST_LAYERS} layers (depth), and no number above "
            f"{LARGEST}"
        )
    return config


def load_model(folder: Path, runtime: Runtime) -> GPT:
    """The model in a folder, from its config.json and model.safetensors. Runs no code. InputError if one of
    them is missing or damaged, or if they do not belong together.
    """
    config, file = read_config(folder), folder / "model.safetensors"
    try:
        # Names in a file that transformers has saved, whose model contains ours, begin with "model."
        weights = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
        # First without memory: a few bytes of a stranger's config could request more than there is
        meta_model(config).load_state_dict(weights, assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        message = str(error)[:MESSAGE]
        raise InputError(
            f"{file} is damaged, or does not fit the model of config.json in this version: {message} "
            "(--checkpoint last uses the newest checkpoint)"
        ) from error
    model = build_model(config, runtime, seed=0)
    model.load_state_dict(weights)
    return model


def load_run(run: str, runtime: Runtime, checkpoint_name: str | None = None) -> tuple[GPT, Tokenizer, int]:
    """(model, tokenizer, steps done) of a run, given its name or the path of its folder (see find_run).

    checkpoint_name: "last" or "step_<n>" for the model in that checkpoint, whether the run has ended or not;
    all ranks must then call this. A float32 run computes in float32, others in the runtime's dtype.
    InputError if there is no such model, or if model and tokenizer do not belong together.
    """
    folder = find_run(run)
    if not folder.exists():
        others = sorted(path.parent.name for path in base_dir().glob("runs/*/settings.json"))
        raise InputError(
            f"there is no run {folder}; {base_dir()}/runs has: {', '.join(others) or 'none'} (for a folder "
            "elsewhere give its path, such as ./NAME)"
        )
    if checkpoint_name is None and not (folder / "model.safetensors").exists():
        raise InputError(
            f"{folder} has no finished model (no model.safetensors); if its run has saved a checkpoint, "
            "--checkpoint last uses it"
        )
    settings = read_json(
        folder / "settings.json",
        Settings,
        "only a run has this file; an exported model loads in transformers",
    )
    warn_of_changed_sources(folder.name, settings.trained_with)
    if settings.options.get("dtype") == "float32":
        runtime = replace(runtime, compute_dtype=torch.float32)
    if checkpoint_name is None:
        model = load_model(folder, runtime)
        step, summary = None, folder / "summary.json"
        if summary.exists():
            step = read_json(summary).get("steps")
        else:
            print0(
                f"warning: run {folder.name} is not complete: this model may be older than its last "
                "checkpoint (--checkpoint last)"
            )
    else:
        model, step = build_model(read_config(folder), runtime, seed=0), None
        while step is None:
            found = checkpoint.find(folder, "auto" if checkpoint_name == "last" else checkpoint_name)
            if found is None:
                raise InputError(f"{folder} has no checkpoint {checkpoint_name}")
            try:
                step = checkpoint.load_model(found, model)
            except InputError:
                if on_first_rank(found.exists):  # else its run, which is in progress, has just deleted it
                    raise
    tokenizer = Tokenizer.load(folder / "tokenizer")
    wanted = settings.trained_on.get("tokenizer")
    if tokenizer.hash != wanted or tokenizer.vocab_size != model.config.vocab_size:
        raise InputError(
            f"{folder}/tokenizer is not the one that the model was trained with ({wanted}): put that one back"
        )
    return model, tokenizer, step
