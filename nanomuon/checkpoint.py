"""Checkpoints that survive kills, full disks and another world size, and hold nothing that runs when opened.

    runs/<name>/checkpoints/step_500/
        shard-00001-model-00001-of-00001.safetensors   what the first rank wrote, one such file a rank
        manifest.json                                  step, meta, the names of the other files

Tensors go through torch.distributed.checkpoint with its safetensors storage: each rank writes its share of
what it holds and reads what it needs, so W ranks load what V ranks saved, row slices (DTensor) included.
Ranks share one file system. A checkpoint is written to a hidden folder and appears by one rename, after every
rank has finished; whatever a kill leaves behind is never taken for one.
"""

import os
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from nanomuon.optim import MuonAdamW
from nanomuon.runtime import InputError, on_first_rank, print0, read_json, together, write_json

PLAIN = (bool, int, float, str, type(None))  # values that a manifest holds beside the tensors


@dataclass
class Contents:
    """manifest.json."""

    step: int
    meta: dict[str, int]  # what else resuming needs
    optimizer_values: dict[str, dict]  # by parameter that has state: the numbers and texts in it
    group_values: list[dict]  # by param group: its numbers and texts
    files: list[str]


def saved_steps(run_dir) -> list[int]:
    """Steps of the run's finished checkpoints, ascending; their contents are not looked at."""
    folders = (Path(run_dir) / "checkpoints").glob("step_*")
    return sorted(int(folder.name[5:]) for folder in folders if re.fullmatch(r"step_\d+", folder.name))


# ------------------------------------------------------------------------------------------------------------
# Save


def save(run_dir, step: int, model, optimizer, meta: dict[str, int], keep_last: int = 2) -> None:
    """Write runs/<name>/checkpoints/step_<step>, unless it is there; then keep the newest keep_last.

    Called by all ranks. meta: what else resuming needs (loader state, ...); the first rank's is kept. Raises
    InputError on every rank if the disk is full or not writable; earlier checkpoints are then intact.
    """
    final = Path(run_dir) / "checkpoints" / f"step_{step}"
    hidden = final.with_name(f".{final.name}")
    if any(together(final.exists)):
        return
    state = _local_state(optimizer)
    tensors, values = _flat_state(model, state)

    def publish():
        """Record the files, then make the checkpoint visible. Each file is on disk already."""
        groups = []
        for group in state["param_groups"]:
            groups.append({key: value for key, value in group.items() if isinstance(value, PLAIN)})
        files = sorted(file.name for file in hidden.glob("*.safetensors"))
        manifest = Contents(step, meta, values, groups, files)
        write_json(hidden / "manifest.json", asdict(manifest))
        os.replace(hidden, final)

    try:
        _without_warning()
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}  # as the format wants them
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(hidden, save_distributed=True))
        on_first_rank(publish)
        remove(run_dir, step, keep_last)
    except (CheckpointException, OSError) as error:
        if isinstance(error, CheckpointException):  # torch's, around what went wrong on some ranks
            error = next(failure for failure, _ in error.failures.values())
        if not isinstance(error, OSError):
            raise
        on_first_rank(lambda: shutil.rmtree(hidden, ignore_errors=True))
        raise InputError(
            f"checkpoint {final} was not written: {error}; earlier checkpoints are intact, make room"
        ) from error


def remove(run_dir, last_step: int, keep_last: int) -> None:
    """Remove unfinished checkpoints, those of later steps than last_step, which belong to a future that will
    not happen, and of the others all but the newest keep_last. Called by all ranks.
    """
    folder = Path(run_dir) / "checkpoints"

    def work():
        steps = saved_steps(run_dir)
        current = [step for step in steps if step <= last_step]
        for step in set(steps) - set(current[-keep_last:]):
            # First: a kill may leave half of it
            os.replace(folder / f"step_{step}", folder / f".step_{step}.old")
        for hidden in folder.glob(".step_*"):
            shutil.rmtree(hidden)

    on_first_rank(work)


# ------------------------------------------------------------------------------------------------------------
# Find


def find(run_dir, resume: str = "auto") -> Path | None:
    """The checkpoint to go on from. Called by all ranks.

    resume: "auto" for the newest whole one (a damaged one is skipped with a line), "step_<n>" for that one,
    "never". None if there is nothing to resume. Raises InputError if what was asked for is missing or
    damaged, and if checkpoints exist but none is whole.
    """
    return None if resume == "never" else on_first_rank(lambda: _find(Path(run_dir), resume))


def _find(run_dir: Path, resume: str) -> Path | None:
    names = [f"step_{step}" for step in saved_steps(run_dir)]
    if resume != "auto":
        if resume not in names:
            have = ", ".join(names) or "none"
            raise InputError(f"{run_dir} has no checkpoint {resume} (it has: {have})")
        return _whole(run_dir / "checkpoints" / resume)
    damage = None
    for name in reversed(names):
        try:
            return _whole(run_dir / "checkpoints" / name)
        except InputError as error:
            damage = error
            print0(f"warning: checkpoint {name} is damaged and not used: {error}")
    if damage is not None:
        raise InputError(f"no undamaged checkpoint: {damage}; --resume never starts the run over")
    return None


def _whole(path: Path) -> Path:
    """The path; InputError if a file of this checkpoint is missing, cut short, or not safetensors."""
    for name in read_manifest(path).files:
        tensor_shapes(path / name)
    return path


def tensor_shapes(file) -> dict[str, tuple]:
    """{name: shape} of a safetensors file, from its header alone; InputError if it is not such a file."""
    try:
        with safe_open(file, "pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} is not a safetensors file that can be read: {error}") from error


def read_manifest(path) -> Contents:
    """What is known about a checkpoint; InputError if it is damaged."""
    return read_json(Path(path) / "manifest.json", Contents, "take another checkpoint")


# ------------------------------------------------------------------------------------------------------------
# Load


def load(path, model, optimizer) -> dict[str, int]:
    """Load a checkpoint that find() returned into model and optimizer, at any world size; return its meta.

    Called by all ranks. Dtypes stay those of model and optimizer, and so do the hyperparameters of a
    MuonAdamW. Raises InputError if the tensors are not those of this model and optimizer.
    """
    manifest = read_manifest(path)
    if manifest.optimizer_values and not isinstance(optimizer, MuonAdamW):
        _make_state(optimizer, manifest.optimizer_values)
    state = _local_state(optimizer)
    tensors, _ = _flat_state(model, state)
    _read(path, tensors)
    for name, slots in state["state"].items():
        slots.update(manifest.optimizer_values.get(str(name), {}))
    if isinstance(optimizer, MuonAdamW):
        optimizer.load_state_dict(state, hyperparameters="keep")  # flags that are given anew win
    else:
        for group, values in zip(state["param_groups"], manifest.group_values, strict=False):
            group.update(values)  # some optimizers count and estimate there (Schedule-Free, Prodigy)
        optimizer.load_state_dict(state)
    return manifest.meta


def load_model(path, model) -> int:
    """The same for the model alone, whatever the optimizer was; return how many steps it was trained."""
    _read(path, _model_tensors(model))
    return read_manifest(path).step


def _read(path, tensors):
    """Fill these tensors, {name in the checkpoint: tensor}; InputError if one is missing or differs."""
    _without_warning()
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path))
    except CheckpointException as error:
        first = next(failure for failure, _ in error.failures.values())
        raise InputError(f"{path} is of another model or optimizer: {first}") from error


def _local_state(optimizer):
    """What this rank holds: by name, or as other optimizers number their parameters."""
    if isinstance(optimizer, MuonAdamW):
        return optimizer.named_state_dict()
    return optimizer.state_dict()


def _make_state(optimizer, names):
    """Have an optimizer of torch's make the state of these parameters, as it does in its first step: what it
    then holds, and what it did to the parameters, is about to be overwritten.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        param.grad = torch.zeros_like(param) if str(number) in names else None
    optimizer.step()
    optimizer.zero_grad()


def _model_tensors(model):
    """Those of a model by their names in a checkpoint; one that has two names has the first."""
    tensors, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            tensors[f"model.{name}"] = tensor
            seen.add(id(tensor))
    return tensors


def _flat_state(model, optimizer_state):
    """(tensors, values) of what this rank holds.

    tensors: {name: tensor} of model and optimizer; values: the numbers and texts in the optimizer's state,
    {parameter: {name: value}}. InputError for what is neither.
    """
    tensors, values = _model_tensors(model), {}
    for name, slots in optimizer_state["state"].items():
        values[str(name)] = {}
        for slot, value in slots.items():
            entry = f"optimizer.{name}.{slot}"
            if isinstance(value, torch.Tensor):
                tensors[entry] = value
            elif isinstance(value, PLAIN):
                values[str(name)][slot] = value
            else:
                raise InputError(f"{entry} is a {type(value).__name__}, which no checkpoint can hold")
    return tensors, values


def _without_warning():
    """torch.distributed.checkpoint warns if there is one process only, which is as meant here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
