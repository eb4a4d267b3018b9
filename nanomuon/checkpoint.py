"""Checkpoints that survive kills, full disks and another world size, and hold nothing that runs when it is
opened.

    runs/<name>/checkpoints/step_500/
        rank_0.safetensors    what the first rank wrote, one such file a rank
        manifest.json         step, settings, versions; SHA-256 of every file, itself too

Tensors go through torch.distributed.checkpoint with its safetensors storage: each rank writes what it holds
(a replicated tensor is written once, by one of them) and reads what it needs, so W ranks load what V ranks
saved, row slices (DTensor) included. Ranks share one file system. A checkpoint is written to a hidden folder
and appears by one rename, after every rank has finished; whatever a kill leaves behind is never taken for
one.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.tensor import DTensor, Replicate

from .runtime import InputError, print0, together, write_json


class Checkpointer:
    """Writes the checkpoints of one run. Every method is called by all ranks.

    run_dir: runs/<name>. resumed_step: where this process starts from, None for a fresh start; checkpoints of
    later steps belong to a future that will not happen and are removed. keep_last: how many to keep.
    background: save() copies the state to host memory and returns, a thread writes it; what fails there is
    said at once.
    """

    def __init__(self, run_dir, resumed_step=None, keep_last=2, background=False):
        self.folder = Path(run_dir) / "checkpoints"
        self.last_step, self.keep_last = resumed_step, keep_last
        # Writing has its own gloo group: its messages never mix with training's, and no GPU waits for them.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.rank, self.world_size = _place()
        self.thread = ThreadPoolExecutor(1) if background else None
        self.pending = None
        together(self._clean, self.group)

    def save(self, step, model, optimizer, meta) -> None:
        """Write checkpoints/step_<step>; a step that was just saved is not written again.

        meta: what else resuming needs (settings, loader state), of JSON types; the first rank's is kept.
        Raises InputError on every rank where the disk is full or not writable; earlier checkpoints are then
        intact. A background save raises from wait(); the next save() goes on without it.
        """
        with contextlib.suppress(InputError):
            self.wait()
        if step == self.last_step:
            return
        tensors, values = _state(model, optimizer)
        tensors |= _random_state(self.rank)
        manifest = {
            "step": step,
            "world_size": self.world_size,
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "meta": meta,
            "optimizer_values": values,
        }
        if self.thread is None:
            self._write(step, tensors, manifest)
        else:
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            self.pending = self.thread.submit(self._write, step, tensors, manifest)

    def wait(self) -> None:
        """Return when the last background save is on disk."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _write(self, step, tensors, manifest):
        final, hidden = self.folder / f"step_{step}", self.folder / f".step_{step}"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message="torch.distributed is disabled"
                )  # one process: as meant
                mine = hidden / f"rank_{self.rank}.safetensors"
                dcp.save(
                    tensors,
                    storage_writer=_Writer(mine),
                    process_group=self.group,
                    no_dist=self.group is None,
                )
            files = together(lambda: _fingerprint(mine) if mine.exists() else {}, self.group)
            manifest["files"] = {name: value for part in files for name, value in part.items()}
            together(lambda: self.rank == 0 and _publish(hidden, final, manifest), self.group)
            self.last_step = step
            together(self._clean, self.group)
        except (CheckpointException, OSError) as failure:
            if isinstance(
                failure, CheckpointException
            ):  # torch's, on every rank, around what went wrong on some
                failure = next(error for error, _ in failure.failures.values())
            if self.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)
            if not isinstance(failure, OSError):
                raise RuntimeError(f"checkpoint {final} was not written") from failure
            error = (
                f"checkpoint {final} was not written: {failure}; earlier checkpoints are intact, make room"
            )
            if self.thread is not None:
                print0(f"warning: {error}")
            raise InputError(error) from failure

    def _clean(self):
        """Remove abandoned and unfinished checkpoints and those beyond the newest keep_last."""
        if self.rank > 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for hidden in self.folder.glob(".step_*"):
            shutil.rmtree(hidden)
        steps = saved_steps(self.folder.parent)
        current = [step for step in steps if self.last_step is not None and step <= self.last_step]
        for step in set(steps) - set(current[-self.keep_last :]):
            hidden = self.folder / f".step_{step}"
            os.replace(self.folder / f"step_{step}", hidden)  # first: a kill may leave half of it
            shutil.rmtree(hidden)


class _Writer(HuggingFaceStorageWriter):
    """torch's writer with its inner loop replaced: that one assembles a file in memory while it holds the
    interpreter's lock, which stopped a training thread for 2 s a GB; safetensors writing by itself stops it
    not at all (measured).
    """

    def __init__(self, file):
        super().__init__(file.parent, save_distributed=True)
        self.file = file

    def write_data(self, plan, planner):
        tensors, offsets = {}, {}
        for item in plan.items:
            assert (
                item.index.fqn not in tensors
            )  # a DTensor has one piece a rank, and the file one tensor a name
            tensors[item.index.fqn] = planner.resolve_data(item).detach().cpu()
            offsets[item.index.fqn] = {"saved_offsets": item.tensor_data.chunk.offsets}
        if tensors:
            _write_tensors(tensors, self.file, {"DCP_SHARDING_INFO": json.dumps(offsets)})
        done = torch.futures.Future()
        done.set_result([])
        return done


def saved_steps(run_dir) -> list[int]:
    """Steps of the run's finished checkpoints, ascending; their contents are not looked at."""
    folders = (Path(run_dir) / "checkpoints").glob("step_*")
    return sorted(int(folder.name[5:]) for folder in folders if re.fullmatch(r"step_\d+", folder.name))


def find(run_dir, resume="auto") -> Path | None:
    """The checkpoint to go on from, every file of it checked against its manifest. Called by all ranks.

    resume: "auto" for the newest undamaged one (damage is reported), "step_<n>" for that one, "never". None
    where there is nothing to resume. Raises InputError where what was asked for is missing or damaged, and
    where checkpoints exist but none is whole.
    """
    run_dir = Path(run_dir)
    steps = [] if resume == "never" else together(lambda: saved_steps(run_dir))[0]
    if resume not in ("auto", "never"):
        if resume not in [f"step_{step}" for step in steps]:
            have = ", ".join(f"step_{step}" for step in steps) or "none"
            raise InputError(
                f"no checkpoint {resume} in {run_dir.name} (it has: {have}); --resume auto takes the newest"
            )
        steps = [int(resume[5:])]
    for step in reversed(steps):
        path = run_dir / "checkpoints" / f"step_{step}"
        damage = [problem for problem in together(lambda path=path: _damage(path)) if problem]
        if not damage:
            return path
        print0(f"warning: checkpoint step_{step} is damaged and not used: {damage[0]}")
    if steps:
        raise InputError(f"no undamaged checkpoint: {damage[0]}; --resume never starts the run over")
    return None


def read_manifest(path) -> dict:
    """What is known about a checkpoint: step, world_size, versions, meta, files. InputError where it is
    damaged.
    """
    file = Path(path) / "manifest.json"
    try:
        text = file.read_bytes()
        manifest = json.loads(text)
        manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{file} is damaged or missing ({error}); take another checkpoint") from error
    if _seal(manifest).encode() != text:
        raise InputError(f"{file} is damaged (its checksum does not match); take another checkpoint")
    return manifest


def load(path, model, optimizer) -> dict:
    """Load a checkpoint that find() returned into model and optimizer, at any world size; return its meta.

    Called by all ranks. At the world size it was saved with, each rank's random state is restored too. Dtypes
    and hyperparameters stay those of model and optimizer. An optimizer that creates its state lazily
    (torch.optim's) gets it whole on every rank, for a DTensor in the same pieces. Raises InputError where the
    tensors are not those of this model and optimizer.
    """
    manifest = read_manifest(path)
    reader = HuggingFaceStorageReader(path)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except SafetensorError as error:
        raise InputError(f"{path} does not hold safetensors files: {error}") from error
    state = optimizer.state_dict()
    names = {str(name): name for group in state["param_groups"] for name in group.get("params", ())}
    if not any(together(lambda: bool(state["state"]))):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        params = dict(zip(names, params, strict=True))
        for key, entry in saved.items():
            if key.startswith("optimizer."):
                name, slot = key.removeprefix("optimizer.").rsplit(".", 1)
                tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
                if isinstance(param := params.get(name), DTensor) and param.shape == tensor.shape:
                    tensor = torch.empty_like(param, dtype=tensor.dtype)
                state["state"].setdefault(names.get(name, name), {})[slot] = tensor
    for name, values in manifest["optimizer_values"].items():
        state["state"].setdefault(names.get(name, name), {}).update(values)
    tensors, _ = _state(model, state)

    def compare():
        wrong = [key for key in saved if key.startswith("model.") and key[6:] not in model.state_dict()]
        wrong += [key for key in tensors if key not in saved or saved[key].size != tensors[key].size()]
        if wrong:
            raise InputError(f"{path} is of another model or optimizer: {wrong[0]} is missing or differs")

    together(compare)
    rank, world_size = _place()
    random_state = _random_state(rank) if manifest["world_size"] == world_size else {}
    random_state = {key: tensor for key, tensor in random_state.items() if key in saved}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors | random_state, storage_reader=reader, no_dist=not dist.is_initialized())
    optimizer.load_state_dict(state)
    for key, tensor in random_state.items():
        torch.cuda.set_rng_state(tensor) if key.endswith("cuda") else torch.set_rng_state(tensor)
    return manifest["meta"]


def export_model(run_dir, model, config, meta) -> None:
    """Write model.safetensors and config.json: the trained model alone, to evaluate and share. Called by all
    ranks.

    config: keywords that build the model, meta: what to know about it (step, val_bpb, tokenizer), both of
    JSON types.
    """
    weights = {}
    for name, tensor in model.state_dict().items():
        tensor = whole(tensor) if isinstance(tensor, DTensor) else tensor
        if _place()[0] == 0:
            weights[name] = tensor.cpu()

    def write():
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "model.safetensors").unlink(
            missing_ok=True
        )  # written last: where it exists, the two match
        write_json(run_dir / "config.json", {"config": config, "meta": meta})
        _write_tensors(weights, run_dir / "model.safetensors.tmp", {"format": "pt"})
        os.replace(run_dir / "model.safetensors.tmp", run_dir / "model.safetensors")

    run_dir = Path(run_dir)
    together(lambda: _place()[0] == 0 and write())


def whole(tensor: DTensor) -> torch.Tensor:
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
    try:
        if not (run_dir / "model.safetensors").exists():
            raise OSError("no model.safetensors")
        content = json.loads((run_dir / "config.json").read_text())
        return content["config"], content["meta"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{run_dir} holds no finished model ({error}); train it: python -m scripts.base_train --run {run_dir.name}"
        ) from error


def load_model_weights(run_dir, model) -> None:
    """Load model.safetensors into a model built from load_model_config. Raises InputError where they do not
    fit.
    """
    file = Path(run_dir) / "model.safetensors"
    try:
        model.load_state_dict(load_file(file))
    except (
        Exception
    ) as error:  # safetensors and load_state_dict raise several kinds, all for a file that does not fit
        raise InputError(f"{file} does not fit the model of config.json: {str(error)[:200]}") from error


def _state(model, optimizer):
    """Flat {name: tensor} of what this rank holds, and the optimizer's plain values {parameter: {name:
    value}}.
    """
    state = optimizer if isinstance(optimizer, dict) else optimizer.state_dict()
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    values = {}
    for name, slots in state["state"].items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{name}.{slot}"] = value
            else:
                values.setdefault(str(name), {})[slot] = value
    return tensors, values


def _random_state(rank):
    """torch's random state as tensors named by rank."""
    state = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def _damage(path):
    """What is wrong with a checkpoint, or None. Each rank reads its share of the files."""
    try:
        files = read_manifest(path)["files"]
    except InputError as error:
        return str(error)
    strangers = {file.name for file in path.glob("*.safetensors")} - files.keys()
    if strangers:  # the reader would open it
        return f"{path / min(strangers)} is not in the manifest"
    rank, world_size = _place()
    for name in sorted(files)[rank::world_size]:
        try:
            if _fingerprint(path / name)[name] != files[name]:
                return f"{path / name} is not what was written"
        except OSError as error:
            return f"{path / name}: {error.strerror}"
    return None


def _fingerprint(file):
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
        return {file.name: {"bytes": stream.tell(), "sha256": digest.hexdigest()}}


def _seal(manifest):
    """The manifest's text, which holds the checksum of the rest of it: the only text of its content."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1) + "\n"


def _publish(hidden, final, manifest):
    """Record the checksums, then make the checkpoint visible; each on disk before the next."""
    for name, entry in manifest["files"].items():
        if (hidden / name).stat().st_size != entry["bytes"]:
            raise OSError(f"{hidden / name} differs between ranks; they must share one file system")
    with open(hidden / "manifest.json", "w") as file:
        file.write(_seal(manifest))
        file.flush()
        os.fsync(file.fileno())
    _sync(hidden)
    os.replace(hidden, final)
    _sync(final.parent)


def _write_tensors(tensors, file, metadata):
    """A safetensors file on disk, readable by whoever may read its folder. OSError where it cannot be
    written.
    """
    storages, separate = set(), {}
    for (
        name,
        tensor,
    ) in tensors.items():  # the format has neither transposes nor two names for one storage (tied weights)
        tensor = tensor.contiguous()
        separate[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor
        storages.add(tensor.untyped_storage().data_ptr())
    try:
        save_file(separate, file, metadata=metadata)
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
        raise
    os.chmod(file, file.parent.stat().st_mode & 0o666)  # safetensors makes it private to the user
    _sync(file)


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _place():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
