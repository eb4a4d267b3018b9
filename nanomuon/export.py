"""The trained model alone, to evaluate and share: runs/<name>/model.safetensors and config.json."""

import os
import shlex
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Replicate

from nanomuon.files import write_json, write_tensors
from nanomuon.read_json import Flag, Matching, Number, OrNull, Record, Text, Whole, check_regular, read_json
from nanomuon.runtime import InputError, patient_group, together

# Keywords of GPTConfig, in config.json and in a run's settings.json. The bounds are far above what anyone
# trains and below what would take all memory or minutes before the model is compared with its weights.
MODEL_SHAPE = {
    "vocab_size": Whole(1, 1 << 24),
    "seq_len": Whole(1, 1 << 20),
    "depth": Whole(1, 1024),
    "width": Whole(1, 1 << 17),
    "heads": Whole(1, 1 << 13),
    "kv_heads": Whole(1, 1 << 13),
}
MODEL_OPTIONS = {
    "window_pattern": Matching("[SL]{1,1024}", "a string of S and L"),
    "short_window": Number(2**-20, 1),
    "qk_norm": Flag(),
    "key_offset": Flag(),
    "value_embed_every": Whole(1, 1024),
    "experts": Whole(0, 1 << 13),
    "experts_per_token": Whole(0, 1 << 13),
}
ABOUT = {"step": Whole(), "val_bpb": OrNull(Number()), "corpus": Text(), "tokenizer": Text(64)}
CONFIG_FILE = Record({"config": Record({**MODEL_SHAPE, **MODEL_OPTIONS}, others=None), "meta": Record(ABOUT)})


def export_model(run_dir, model, config, meta) -> None:
    """Write model.safetensors and config.json. Called by all ranks.

    config: keywords that build the model, meta: what to know about it (step, val_bpb, tokenizer), both of
    JSON types.
    """
    run_dir = Path(run_dir)
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    weights = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, DTensor):
            tensor = whole_tensor(tensor)
        if is_first_rank:
            weights[name] = tensor.cpu()

    def write():
        if is_first_rank:
            _write_model(run_dir, weights, config, meta)

    with patient_group() as group:  # of a large model on a slow disk it takes many minutes
        together(write, group)


def _write_model(run_dir, weights, config, meta):
    """Write config.json while there is no model.safetensors: where that exists, the two belong together."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "model.safetensors").unlink(missing_ok=True)
    write_json(run_dir / "config.json", {"config": config, "meta": meta})
    hidden = run_dir / ".model.safetensors.tmp"  # a name that the next launch removes, see files.py
    try:
        write_tensors(weights, hidden, {"format": "pt"})
        os.replace(hidden, run_dir / "model.safetensors")
    finally:
        hidden.unlink(missing_ok=True)


def whole_tensor(tensor: DTensor) -> torch.Tensor:
    """All of a DTensor on every rank of its mesh. Collective.

    One mesh dimension after the other: those that cut the same dimension of the tensor need that order.
    """
    placements = list(tensor.placements)
    for i in range(len(placements)):
        placements[i] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def load_model_config(run_dir) -> tuple[dict, dict]:
    """(config, meta) that export_model wrote. Raises InputError where the run has no exported model."""
    run_dir = Path(run_dir)
    advice = f"train it: python -m scripts.base_train --run {shlex.quote(run_dir.name)}"
    if not os.path.lexists(run_dir / "model.safetensors"):
        raise InputError(f"{run_dir} holds no finished model (no model.safetensors); {advice}")
    content = read_json(run_dir / "config.json", CONFIG_FILE, advice=advice)
    return content["config"], content["meta"]


def load_model_weights(run_dir, model) -> None:
    """Load model.safetensors into a model of load_model_config's. Raises InputError where they do not fit."""
    file = Path(run_dir) / "model.safetensors"
    check_regular(file)
    try:
        model.load_state_dict(load_file(file))
    except Exception as error:
        # safetensors and load_state_dict raise several kinds, all for a file that does not fit
        raise InputError(f"{file} does not fit the model of config.json: {str(error)[:200]}") from error
