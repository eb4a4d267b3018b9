"""Checkpoints that survive kills, full disks and another world size, and hold nothing that runs when opened.

    runs/<name>/checkpoints/step_500/
        rank_0.safetensors    what the first rank wrote, one such file a rank
        manifest.json         step, world size, meta, the size of every file

Tensors go through torch.distributed.checkpoint with its safetensors storage: each rank writes its share of
what it holds and reads what it needs, so W ranks load what V ranks saved, row slices (DTensor) included.
Ranks share one file system. A checkpoint is written to a hidden folder and appears by one rename, after every
rank has finished; whatever a kill leaves behind is never taken for one.
"""

import contextlib
import json
import os
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.tensor import DTensor

from nanomuon.files import read_json, sync, tensor_shapes, write_json, write_tensors
from nanomuon.optim import MuonAdamW
from nanomuon.runtime import InputError, print0, together


@dataclass
class Manifest:
    """manifest.json."""

    step: int
    world_size: int
    meta: dict  # what else resuming needs, of JSON types
    optimizer_values: dict[str, dict]  # by parameter: the numbers and texts of its state
    files: dict[str, int]  # bytes of each


def saved_steps(run_dir) -> list[int]:
    """Steps of the run's finished checkpoints, ascending; their contents are not looked at."""
    folders = (Path(run_dir) / "checkpoints").glob("step_*")
    return sorted(int(folder.name[5:]) for folder in folders if re.fullmatch(r"step_\d+", folder.name))


def save(run_dir, step: int, model, optimizer, meta: dict, keep_last: int = 2) -> None:
    """Write runs/<name>/checkpoints/step_<step>, unless it is there; then keep the newest keep_last.

    Called by all ranks. meta: what else resuming needs (loader state, ...), of JSON types; the first rank's
    is kept. Raises InputError on every rank if the disk is full or not writable; earlier checkpoints are then
    intact.
    """
    final = Path(run_dir) / "checkpoints" / f"step_{step}"
    if any(together(final.exists)):
        return
    hidden = final.with_name(f".{final.name}")
    rank, world_size = _place()
    tensors, values = _flat_state(model, _local_state(optimizer))
    try:
        with _without_warning():
            dcp.save(
                tensors | _random_state(rank),
                storage_writer=_Writer(hidden, rank),
                no_dist=not dist.is_initialized(),
            )
        manifest = Manifest(step, world_size, meta, values, files={})
        together(lambda: _publish(hidden, final, manifest) if rank == 0 else None)
        remove(run_dir, step, keep_last)
    except (CheckpointException, OSError) as error:
        if rank == 0:
            shutil.rmtree(hidden, ignore_errors=True)
        if isinstance(error, CheckpointException):  # torch's, around what went wrong on some ranks
            error = next(failure for failure, _ in error.failures.values())
        if not isinstance(error, OSError):
            raise RuntimeError(f"checkpoint {final} was not written") from error
        raise InputError(
            f"checkpoint {final} was not written: {error}; earlier checkpoints are intact, make room"
        ) from error


class _Writer(HuggingFaceStorageWriter):
    """torch's writer, but each rank writes one file, by safetensors itself, and waits for the disk."""

    def __init__(self, folder: Path, rank: int):
        super().__init__(folder, save_distributed=True)
        self.file = folder / f"rank_{rank}.safetensors"

    def write_data(self, plan, planner):
        tensors, offsets = {}, {}
        for item in plan.items:
            name = item.index.fqn
            assert name not in tensors  # a DTensor has one piece a rank, and the file one tensor a name
            tensors[name] = planner.resolve_data(item).detach().cpu()
            offsets[name] = {"saved_offsets": item.tensor_data.chunk.offsets}
        if tensors:
            write_tensors(tensors, self.file, {"DCP_SHARDING_INFO": json.dumps(offsets)})
        done = torch.futures.Future()
        done.set_result([])
        return done


def _publish(hidden: Path, final: Path, manifest: Manifest) -> None:
    """Record the sizes, then make the checkpoint visible; each on disk before the next."""
    manifest.files = _sizes(hidden)
    write_json(hidden / "manifest.json", asdict(manifest))
    sync(hidden)
    os.replace(hidden, final)
    sync(final.parent)


def remove(run_dir, last_step: int, keep_last: int) -> None:
    """Remove unfinished checkpoints, those of later steps than last_step, which belong to a future that will
    not happen, and of the others all but the newest keep_last. Called by all ranks.
    """

    def work():
        folder = Path(run_dir) / "checkpoints"
        for hidden in folder.glob(".step_*"):
            shutil.rmtree(hidden)
        steps = saved_steps(run_dir)
        current = [step for step in steps if step <= last_step]
        for step in set(steps) - set(current[-keep_last:]):
            hidden = folder / f".step_{step}"
            os.replace(folder / f"step_{step}", hidden)  # first: a kill may leave half of it
            shutil.rmtree(hidden)

    together(lambda: work() if _place()[0] == 0 else None)


def find(run_dir, resume: str = "auto") -> Path | None:
    """The checkpoint to go on from. Called by all ranks.

    resume: "auto" for the newest whole one (a damaged one is skipped with a line), "step_<n>" for that one,
    "never". None if there is nothing to resume. Raises InputError if what was asked for is missing or
    damaged, and if checkpoints exist but none is whole.
    """
    if resume == "never":
        return None
    return together(lambda: _find(Path(run_dir), resume))[0]


def _find(run_dir: Path, resume: str) -> Path | None:
    names = [f"step_{step}" for step in saved_steps(run_dir)]
    if resume == "auto":
        damage = None
        for name in reversed(names):
            try:
                _check_whole(run_dir / "checkpoints" / name)
                return run_dir / "checkpoints" / name
            except InputError as error:
                damage = error
                print0(f"warning: checkpoint {name} is damaged and not used: {error}")
        if damage is not None:
            raise InputError(f"no undamaged checkpoint: {damage}; --resume never starts the run over")
        return None
    if resume not in names:
        have = ", ".join(names) or "none"
        raise InputError(
            f"no checkpoint {resume} in {run_dir.name} (it has: {have}); --resume auto takes the newest"
        )
    _check_whole(run_dir / "checkpoints" / resume)
    return run_dir / "checkpoints" / resume


def _check_whole(path: Path) -> None:
    """InputError if a file of a checkpoint is missing, has another size, or cannot be read."""
    manifest = read_manifest(path)
    if path.name != f"step_{manifest.step}":
        raise InputError(f"{path}/manifest.json: step is {manifest.step}")
    there = _sizes(path)
    for name in sorted(manifest.files.keys() | there.keys()):
        wanted, size = manifest.files.get(name), there.get(name)
        if size != wanted:
            raise InputError(f"{path / name} has {size} bytes, and by the manifest {wanted}")
        tensor_shapes(path / name)


def _sizes(path: Path) -> dict[str, int]:
    """{name: bytes} of the files of tensors in a checkpoint."""
    return {file.name: file.stat().st_size for file in path.glob("*.safetensors")}


def read_manifest(path) -> Manifest:
    """What is known about a checkpoint; InputError if it is damaged."""
    return read_json(Path(path) / "manifest.json", Manifest, "take another checkpoint")


def load(path, model, optimizer) -> dict:
    """Load a checkpoint that find() returned into model and optimizer, at any world size; return its meta.

    Called by all ranks. At the world size it was saved with, each rank's random state is restored too. Dtypes
    and hyperparameters stay those of model and optimizer. An optimizer that creates its state lazily
    (torch.optim's) gets it whole on every rank, for a DTensor in the same pieces. Raises InputError if the
    tensors are not those of this model and optimizer.
    """
    manifest = read_manifest(path)
    saved = _saved_tensors(path)
    state = _local_state(optimizer)
    keys = _parameter_keys(state)
    if not any(together(lambda: bool(state["state"]))):
        _create_optimizer_state(path, state, keys, optimizer, saved)
    for name, slots in manifest.optimizer_values.items():
        if name not in keys:
            raise InputError(f"{path}/manifest.json: optimizer_values has {name}, which is not trained")
        state["state"].setdefault(keys[name], {}).update(slots)
    tensors, _ = _flat_state(model, state)
    together(lambda: _check_same_tensors(path, model, tensors, saved))
    random_state = {}
    if manifest.world_size == _place()[1]:
        mine = _random_state(_place()[0])
        random_state = {name: tensor for name, tensor in mine.items() if name in saved}
    _read(path, tensors | random_state)
    if isinstance(optimizer, MuonAdamW):
        optimizer.load_state_dict(state, hyperparameters="keep")  # flags that are given anew win
    else:
        optimizer.load_state_dict(state)
    for name, tensor in random_state.items():
        setter = torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state
        setter(tensor)
    return manifest.meta


def load_model(path, model) -> int:
    """The same for the model alone, whatever the optimizer was; return how many steps it was trained.

    The checkpoint is one that check_model_fits() has passed for a model of this shape.
    """
    _read(path, _model_tensors(model))
    return read_manifest(path).step


def check_model_fits(path, model) -> None:
    """InputError if a checkpoint that find() returned is of another model than this one, which may be on the
    meta device: reads headers, and allocates nothing.
    """
    _check_same_tensors(path, model, _model_tensors(model), _saved_tensors(path))


def _read(path, tensors):
    """Fill these tensors, {name in the checkpoint: tensor}."""
    try:
        with _without_warning():
            reader = HuggingFaceStorageReader(path)
            dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # around what went wrong on some ranks
        first = next(failure for failure, _ in error.failures.values())
        raise InputError(f"{path} cannot be loaded: {first}") from error


def _local_state(optimizer):
    """What this rank holds: by name, or as other optimizers number their parameters."""
    if isinstance(optimizer, MuonAdamW):
        return optimizer.named_state_dict()
    return optimizer.state_dict()


def _saved_tensors(path):
    """{name: shape and dtype} of the tensors in a checkpoint; InputError if its files cannot hold them."""
    try:
        return HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # torch's reader raises many kinds, all for headers that are not ours
        raise InputError(f"{path} does not hold safetensors files of a checkpoint: {error}") from error


def _parameter_keys(state):
    """{name of a parameter in checkpoints: its key in an optimizer's state dict}, in the order of the groups.

    The names are strings; torch.optim's optimizers call their parameters 0, 1, ...
    """
    return {str(key): key for group in state["param_groups"] for key in group.get("params", ())}


def _create_optimizer_state(path, state, keys, optimizer, saved):
    """Put an empty tensor into the state dict of an optimizer without state for every one that was saved."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    params = dict(zip(keys, params, strict=True))
    for entry, about in saved.items():
        if not entry.startswith("optimizer."):
            continue
        name, slot = entry.removeprefix("optimizer.").rsplit(".", 1)
        if name not in params:
            raise InputError(f"{path} is of another model or optimizer: {name} is not trained")
        param = params[name]
        if isinstance(param, DTensor) and param.shape == about.size:
            tensor = torch.empty_like(param, dtype=about.properties.dtype)
        else:
            tensor = torch.empty(about.size, dtype=about.properties.dtype)
        state["state"].setdefault(keys[name], {})[slot] = tensor


def _check_same_tensors(path, model, tensors, saved):
    """InputError if a tensor is missing on either side or has another shape."""
    ours = {f"model.{name}" for name in model.state_dict()}
    wrong = [name for name in saved if name.startswith("model.") and name not in ours]
    wrong += [name for name in tensors if name not in saved or saved[name].size != tensors[name].size()]
    if wrong:
        raise InputError(f"{path} is of another model or optimizer: {wrong[0]} is missing or differs")


def _model_tensors(model):
    """Those of a model by their names in a checkpoint."""
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def _flat_state(model, optimizer_state):
    """(tensors, values) of what this rank holds.

    tensors: {name: tensor} of model and optimizer; values: the numbers and texts in the optimizer's state,
    {parameter: {name: value}}. InputError for what is neither.
    """
    tensors, values = _model_tensors(model), {}
    for name, slots in optimizer_state["state"].items():
        for slot, value in slots.items():
            entry = f"optimizer.{name}.{slot}"
            if isinstance(value, torch.Tensor):
                tensors[entry] = value
            elif value is None or isinstance(value, bool | int | float | str):
                values.setdefault(str(name), {})[slot] = value
            else:
                raise InputError(
                    f"{entry} cannot be saved in a checkpoint: it is a {type(value).__name__}; keep tensors, "
                    "numbers or text in the state of a parameter"
                )
    return tensors, values


def _random_state(rank):
    """torch's random state as tensors named by rank."""
    state = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a run on the CPU leaves the GPUs of its machine alone
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


@contextlib.contextmanager
def _without_warning():
    """torch.distributed.checkpoint warns if there is one process only, which is as meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _place():
    """(rank, world size) of this process."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
