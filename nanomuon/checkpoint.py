"""Checkpoints that survive kills, full disks and a new world size; opening one runs no code.

    runs/<name>/checkpoints/step_500/
        shard-00001-model-00001-of-00001.safetensors   of the first rank; every rank writes one
        manifest.json              step, meta, plain values in state and groups, names of the other files

Tensors go through torch.distributed.checkpoint with its safetensors storage: each rank writes its share of
the tensors and reads those it needs, so W ranks can load what V ranks saved, row slices (DTensors) included.
Ranks share one file system. A checkpoint is written to a hidden folder, which is renamed after every rank has
finished, so what a killed process leaves behind is never taken for a checkpoint.
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
from torch.distributed.tensor import DTensor, Replicate

from nanomuon.optim import MuonAdamW
from nanomuon.runtime import InputError, on_first_rank, print0, read_json, together, write_json

PLAIN = (bool, int, float, str, type(None))  # types of the values in a manifest


@dataclass
class Manifest:
    """manifest.json."""

    step: int
    meta: dict[str, int]  # whatever else resuming needs
    optimizer_values: dict[str, dict]  # per parameter: the numbers and strings in its state
    group_values: list[dict]  # per param group: its numbers and strings
    files: list[str]


def saved_steps(run_dir) -> list[int]:
    """Steps of the run's finished checkpoints, ascending. Does not open them. InputError if their folder
    cannot be listed: it may be a link to a disk that is not mounted.
    """
    folder = Path(run_dir) / "checkpoints"
    if not os.path.lexists(folder):
        return []
    try:
        names = [path.name for path in folder.iterdir() if path.is_dir()]
    except OSError as error:
        raise InputError(f"{error}: repair this, or start over: --resume never") from error
    # Only the names that save() gives: not those of copies, such as step_007
    found = [re.fullmatch("step_(0|[1-9][0-9]*)", name) for name in names]
    return sorted(int(name[1]) for name in found if name)


# ------------------------------------------------------------------------------------------------------------
# Save


class NotWritten(InputError):
    """The disk is full or not writable."""


def save(run_dir, step: int, model, optimizer, meta: dict[str, int], keep_last: int = 2) -> None:
    """Write runs/<name>/checkpoints/step_<step>, and keep only the newest keep_last. Does nothing if it
    exists.

    Called by all ranks. meta: whatever else resuming needs (loader state, ...); the first rank's is saved.
    Raises NotWritten on every rank if the disk is full or not writable; earlier checkpoints stay intact.
    """
    final = Path(run_dir) / "checkpoints" / f"step_{step}"
    hidden = final.with_name(f".{final.name}")
    if any(together((final / "manifest.json").exists)):
        return
    state = _state_to_save(optimizer)
    tensors, values = _flat_state(model, state)

    def publish():
        """Write the manifest, then make the checkpoint visible. All other files are already on disk."""
        groups = []
        for group in state["param_groups"]:
            groups.append({key: value for key, value in group.items() if isinstance(value, PLAIN)})
        files = sorted(file.name for file in hidden.glob("*.safetensors"))
        manifest = Manifest(step, meta, values, groups, files)
        write_json(hidden / "manifest.json", asdict(manifest))
        os.replace(hidden, final)

    try:
        _without_warning()
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}  # for safetensors
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(hidden, save_distributed=True))
        on_first_rank(publish)
        remove(run_dir, step, keep_last)
    except (CheckpointException, OSError) as error:
        if isinstance(error, CheckpointException):  # torch's wrapper around the errors of some ranks
            error = next(failure for failure, _ in error.failures.values())
        if not isinstance(error, OSError):
            raise
        on_first_rank(lambda: shutil.rmtree(hidden, ignore_errors=True))
        raise NotWritten(
            f"checkpoint {final} was not written: {error}; earlier ones, if there are any, are intact: free "
            "some space, or remove what is in the way"
        ) from error


def refuse_unknown_state(optimizer) -> None:
    """InputError if save() could not store the state of a user's optimizer."""
    if not isinstance(optimizer, MuonAdamW):
        _state_to_save(optimizer)


def _state_to_save(optimizer):
    """{"state": {name or number: {slot: value}}, "param_groups": [...]}. InputError for state of a user's
    optimizer that would be lost, or come back as something else.
    """
    if isinstance(optimizer, MuonAdamW):
        return optimizer.named_state_dict()
    state, entry_in = optimizer.state_dict(), {}
    if state.keys() != {"state", "param_groups"}:
        raise InputError(
            f"the state_dict() of this optimizer has {', '.join(map(str, state))}; a checkpoint stores state "
            "and param_groups, as torch.optim.Optimizer has them"
        )
    for number, slots in state["state"].items():
        if not isinstance(number, int):
            raise InputError(
                f"the state of this optimizer has {number!r}, which is not a parameter, and a checkpoint "
                "stores the state of parameters: move it to a parameter's state, or, if it is a number or a "
                "string, to a param group"
            )
        for slot, value in slots.items():
            entry = f"optimizer.{number}.{slot}"
            if not isinstance(slot, str):
                raise InputError(f"{entry}: a checkpoint stores state by names that are strings")
            if isinstance(value, torch.Tensor):
                memory = (value.to_local() if isinstance(value, DTensor) else value).untyped_storage()
                if memory.nbytes() and entry_in.setdefault(memory.data_ptr(), entry) != entry:
                    raise InputError(
                        f"{entry} shares memory with {entry_in[memory.data_ptr()]}, and a checkpoint would "
                        "make two tensors of it: clone() it"
                    )
            elif not isinstance(value, PLAIN):
                kind = type(value).__name__
                raise InputError(f"{entry} is a {kind}, which a checkpoint cannot store: make it a tensor")
    return state


def remove(run_dir, last_step: int, keep_last: int) -> None:
    """Remove unfinished checkpoints; those after last_step, whose steps the run will do again; and of the
    others all but the newest keep_last. Called by all ranks.
    """
    folder = Path(run_dir) / "checkpoints"

    def work():
        steps = saved_steps(run_dir)
        current = [step for step in steps if step <= last_step]
        if later := steps[len(current) :]:
            print0(f"removing checkpoints of steps that this run repeats: {', '.join(map(str, later))}")
        for step in set(steps) - set(current[-keep_last:]):
            # Rename it first: a kill during the deletion may leave half of it
            os.replace(folder / f"step_{step}", folder / f".step_{step}.old")
        for hidden in folder.glob(".step_[0-9]*"):
            if hidden.is_symlink() or hidden.is_file():  # a link to a checkpoint that the user has moved
                hidden.unlink()
            else:
                shutil.rmtree(hidden)

    on_first_rank(work)


# ------------------------------------------------------------------------------------------------------------
# Find


def find(run_dir, resume: str = "auto") -> Path | None:
    """The checkpoint to resume from, None if there is none. Called by all ranks.

    resume: "auto" for the newest undamaged one (each damaged one prints a warning), "step_<n>" for that one,
    or "never". Raises InputError if the requested one is missing or damaged, or if all are damaged.
    """
    return None if resume == "never" else on_first_rank(lambda: _find(Path(run_dir), resume))


def _find(run_dir: Path, resume: str) -> Path | None:
    names = [f"step_{step}" for step in saved_steps(run_dir)]
    if resume != "auto":
        if resume not in names:
            have = ", ".join(names) or "none"
            raise InputError(f"{run_dir} has no checkpoint {resume}; it has: {have}")
        return _undamaged(run_dir / "checkpoints" / resume)
    damage = None
    for name in reversed(names):
        try:
            return _undamaged(run_dir / "checkpoints" / name)
        except OSError as error:  # it may be whole: if it were skipped, it would be removed
            raise InputError(
                f"{error}: make it readable, or choose another checkpoint: --resume step_N"
            ) from error
        except InputError as error:
            damage = error
            print0(f"warning: checkpoint {name} is damaged and not used: {error}")
    if damage is not None:
        raise InputError(
            f"there is no undamaged checkpoint: {damage}; to start over: base_train --resume never"
        )
    return None


def _check_file(file: Path):
    """InputError if there is no such file, OSError if it cannot be opened."""
    if not file.is_file():  # but, say, a pipe: opening it would wait forever
        raise InputError(f"{file} is missing, or not a file")
    file.open("rb").close()


def _undamaged(path: Path) -> Path:
    """The path; InputError if a file of this checkpoint is missing, truncated, or not safetensors."""
    _check_file(path / "manifest.json")
    for name in read_manifest(path).files:
        file = path / Path(name).name  # a stranger's name could lead elsewhere
        _check_file(file)
        try:
            with safe_open(file, "pt"):  # checks the file's size against its header
                pass
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file} is not a readable safetensors file: {error}") from error
    return path


def read_manifest(path) -> Manifest:
    """A checkpoint's manifest; InputError if it is damaged."""
    return read_json(Path(path) / "manifest.json", Manifest, "use another checkpoint")


# ------------------------------------------------------------------------------------------------------------
# Load


def load(path, model, optimizer) -> dict[str, int]:
    """Load a checkpoint that find() returned into model and optimizer, at any world size; return its meta.

    Called by all ranks. Fills the tensors of the model and of a MuonAdamW in place: both keep their dtypes,
    and the optimizer keeps its options and hyperparameters, which follow from the flags. Raises InputError if
    the tensors do not belong to this model and optimizer.
    """
    manifest = on_first_rank(lambda: _manifest_to_load(path))
    is_ours = isinstance(optimizer, MuonAdamW)
    state = optimizer.named_state_dict() if is_ours else _state_to_fill(path, optimizer, manifest)
    tensors, _ = _flat_state(model, state)
    _read(path, tensors)
    if not is_ours:  # MuonAdamW's own tensors are already filled
        _load_state(optimizer, state)
    return manifest.meta


def load_model(path, model) -> int:
    """Load only the model, whatever the optimizer was; return how many steps it was trained for."""
    manifest = on_first_rank(lambda: _manifest_to_load(path))
    tensors, _ = _flat_state(model, {"state": {}})
    _read(path, tensors)
    return manifest.step


def _manifest_to_load(path):
    """The manifest. InputError for files that it does not list, such as a Mac's ._NAME: torch reads all."""
    manifest = read_manifest(path)
    if others := {file.name for file in Path(path).glob("*.safetensors")} - set(manifest.files):
        raise InputError(
            f"{path} has {min(others)}, a file that does not belong to this checkpoint: remove it"
        )
    return manifest


def _read(path, tensors):
    """Fill these tensors, {name in the checkpoint: tensor}; InputError if one is missing or does not fit."""
    _without_warning()
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path))
    except CheckpointException as error:
        first = str(next(failure for failure, _ in error.failures.values())).rstrip(".")
        raise InputError(
            f"{path} cannot be loaded into this model and optimizer: {first}; use the code and flags that "
            "trained it"
        ) from error


def _numbered(optimizer):
    """{number: parameter} of any torch optimizer, with the numbers by which its state_dict() names them."""
    return dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))


def _state_to_fill(path, optimizer, manifest):
    """The saved state_dict() of an optimizer other than MuonAdamW, with zeros in place of its tensors."""
    state, slots_of = optimizer.state_dict(), {}
    params = {str(number): param for number, param in _numbered(optimizer).items()}
    for number, values in manifest.optimizer_values.items():
        if number not in params:
            raise InputError(f"{path} has state of parameter {number}, which this optimizer does not have")
        slots_of[number] = dict(values)
    for name, saved in HuggingFaceStorageReader(path).read_metadata().state_dict_metadata.items():
        found = re.fullmatch(r"optimizer\.(\d+)\.(.+)", name)
        if found and found[1] in slots_of:
            slots_of[found[1]][found[2]] = _zeros(saved, params[found[1]])
    state["state"] = {int(number): slots for number, slots in slots_of.items()}
    for group, values in zip(state["param_groups"], manifest.group_values, strict=False):
        group.update(values)  # counters and estimates of some optimizers (Schedule-Free, Prodigy)
    return state


def _zeros(saved, param):
    """Zeros for a saved tensor of this parameter's state. saved: its size and dtype."""
    dtype = saved.properties.dtype
    if saved.size == param.shape:  # sharded like the parameter
        return torch.zeros_like(param, dtype=dtype)
    if not saved.size:  # load_state_dict() moves a step count to the GPU, if the optimizer wants it there
        return torch.zeros((), dtype=dtype, device="cpu")
    zeros = torch.zeros(saved.size, dtype=dtype, device=param.device)
    if isinstance(param, DTensor):  # the optimizer computes on DTensors; this one is, say, a norm per row
        mesh = param.device_mesh
        return DTensor.from_local(zeros, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return zeros


def _load_state(optimizer, state):
    """Load a state_dict() into a torch optimizer, which casts tensors to the dtypes of its parameters, and
    takes a string for a list. Undo both: tensors keep their own dtypes, and strings remain what they are.
    """
    optimizer.load_state_dict(state)
    params = _numbered(optimizer)
    for number, slots in state["state"].items():
        held = optimizer.state[params[number]]
        for slot in held.keys() & slots.keys():
            value = slots[slot]
            if isinstance(value, str):
                held[slot] = value
            elif isinstance(value, torch.Tensor) and value.dtype != held[slot].dtype:
                held[slot] = value.to(held[slot].device)


def _flat_state(model, optimizer_state):
    """(tensors, values) of this rank.

    tensors: {name in the checkpoint: tensor} of model and optimizer; one with two names in the model appears
    under the first. values: the numbers and strings in the optimizer's state, {parameter: {name: value}}.
    """
    tensors, values, seen = {}, {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            tensors[f"model.{name}"] = tensor
            seen.add(id(tensor))
    for name, slots in optimizer_state["state"].items():
        values[str(name)] = {}
        for slot, value in slots.items():
            entry = f"optimizer.{name}.{slot}"
            if isinstance(value, torch.Tensor):
                tensors[entry] = value
            else:
                values[str(name)][slot] = value
    return tensors, values


def _without_warning():
    """Silence torch.distributed.checkpoint's warning about a single process, which is intended."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
