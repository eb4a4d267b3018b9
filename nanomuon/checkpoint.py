"""Checkpoints that survive kills, full disks and another world size, and hold nothing that runs when opened.

    runs/<name>/checkpoints/step_500/
        rank_0.safetensors    what the first rank wrote, one such file a rank
        manifest.json         step, settings, versions; SHA-256 of every file, itself too

Tensors go through torch.distributed.checkpoint with its safetensors storage: each rank writes what it holds
(of what several hold, its share) and reads what it needs, so W ranks load what V ranks saved, row slices
(DTensor) included. Ranks share one file system. A checkpoint is written to a hidden folder
and appears by one rename, after every rank has finished; whatever a kill leaves behind is never taken for
one.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from nanomuon.optim import MuonAdamW
from nanomuon.read_json import (
    FILE_NAME,
    Anything,
    MapOf,
    Record,
    Text,
    Whole,
    check_regular,
    parse,
    read_regular,
)
from nanomuon.runtime import InputError, print0, together, worker_thread
from nanomuon.tensor_files import sync, write_tensors

MANIFEST = Record(
    {
        "step": Whole(),
        "world_size": Whole(1),
        "meta": Anything(),
        "optimizer_values": MapOf(MapOf(Anything())),
        "files": MapOf(Record({"bytes": Whole(), "sha256": Text(64)}), keys=FILE_NAME),
        "sha256": Text(64),
    }
)
MANIFEST_BYTES = 64 << 20  # of the largest that is read; values of the optimizer may be many
TENSOR = "tensor"  # {TENSOR: name} stands for a tensor inside of a list or dict of an optimizer's state


class Checkpointer:
    """Writes the checkpoints of one run. Every method is called by all ranks.

    run_dir: runs/<name>. resumed_step: where this process starts from, None for a fresh start; checkpoints of
    later steps belong to a future that will not happen and are removed. keep_last: how many to keep.
    background: save() copies what this rank writes to host memory and returns, a thread writes it; what fails
    there is said at once. From a GPU the copies go into pinned memory, which is kept for the next save, and
    save() does not wait for them.
    """

    def __init__(self, run_dir, resumed_step=None, keep_last=2, background=False):
        self.folder = Path(run_dir) / "checkpoints"
        self.last_step = resumed_step
        self.keep_last = keep_last
        self.background = background
        # Writing has its own gloo group: its messages never mix with training's, and no GPU waits for them.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.rank, self.world_size = _place()
        self.thread = worker_thread("checkpoints")
        self.pending = []  # the background save that was not waited for, if any
        self.held = None  # pieces of tensors that this rank held at the last save, see _pieces
        self.writer = {}  # piece: the rank that writes it
        self.pinned = {}  # name: where the piece of a GPU's tensor is copied to
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
        tensors, values = _flat_state(model, _local_state(optimizer))
        tensors = self._to_write(tensors | _random_state(self.rank))
        manifest = {
            "step": step,
            "world_size": self.world_size,
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "meta": meta,
            "optimizer_values": values,
        }
        data = {name: _local(tensor) for name, tensor in tensors.items()}
        if self.background:
            data = {name: self._copy(name, tensor) for name, tensor in data.items()}
            copied = None
            if self.pinned:
                copied = torch.cuda.Event()
                copied.record()
            self.pending.append(self.thread.submit(self._write, step, tensors, data, manifest, copied))
        else:
            self._write(step, tensors, data, manifest)

    def wait(self) -> None:
        """Return when the last background save is on disk."""
        while self.pending:
            self.pending.pop().result()

    def _to_write(self, tensors):
        """Those of the tensors that this rank writes: of what several ranks hold, each writes its share."""
        held = _pieces(tensors)
        # Who writes what is worked out again where some rank holds something else than at the last save
        if any(together(lambda: held != self.held, self.group)):
            self.held = held
            self.writer = assign_writers(together(lambda: held, self.group))
        mine = {name for name, offset in held if self.writer[name, offset] == self.rank}
        return {name: tensor.detach() for name, tensor in tensors.items() if name in mine}

    def _copy(self, name, tensor):
        """A copy in host memory; one from a GPU is complete when the device gets there."""
        if not tensor.is_cuda:
            return tensor.clone()
        buffer = self.pinned.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self.pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return buffer.copy_(tensor, non_blocking=True)

    def _write(self, step, tensors, data, manifest, copied=None):
        """tensors: which tensors, and which piece of each, this rank writes; data: the pieces, by name.

        copied: event of a GPU after which they are there.
        """
        if copied is not None:
            copied.synchronize()
        final = self.folder / f"step_{step}"
        hidden = self.folder / f".step_{step}"
        try:
            self._write_files(hidden, tensors, data, manifest)
            together(lambda: self._publish(hidden, final, manifest), self.group)
            self.last_step = step
            together(self._clean, self.group)
        except (CheckpointException, OSError) as error:
            if self.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)
            self._fail(final, error)

    def _write_files(self, hidden, tensors, data, manifest):
        """Each rank's file, and the fingerprints of all of them into the manifest."""
        mine = hidden / f"rank_{self.rank}.safetensors"
        with _without_warning():
            dcp.save(
                tensors,
                storage_writer=_Writer(mine, data),
                process_group=self.group,
                no_dist=self.group is None,
            )

        def fingerprint():  # a rank that holds nothing of its own writes no file
            return _fingerprint(mine) if mine.exists() else {}

        manifest["files"] = {}
        for files in together(fingerprint, self.group):
            manifest["files"] |= files

    def _publish(self, hidden, final, manifest):
        """Record the checksums, then make the checkpoint visible; each on disk before the next."""
        if self.rank > 0:
            return
        for name, entry in manifest["files"].items():
            if (hidden / name).stat().st_size != entry["bytes"]:
                raise OSError(f"{hidden / name} differs between ranks; they must share one file system")
        with open(hidden / "manifest.json", "w") as file:
            file.write(_seal(manifest))
            file.flush()
            os.fsync(file.fileno())
        sync(hidden)
        os.replace(hidden, final)
        sync(final.parent)

    def _fail(self, final, error):
        """Raise what the user can fix as InputError, the rest as it is a bug."""
        if isinstance(error, CheckpointException):
            # torch raises it on every rank, around what went wrong on some
            error = next(failure for failure, _ in error.failures.values())
        if not isinstance(error, OSError):
            raise RuntimeError(f"checkpoint {final} was not written") from error
        message = f"checkpoint {final} was not written: {error}; earlier checkpoints are intact, make room"
        if self.background:
            print0(f"warning: {message}")
        raise InputError(message) from error

    def _clean(self):
        """Remove abandoned and unfinished checkpoints and those beyond the newest keep_last."""
        if self.rank > 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for hidden in self.folder.glob(".step_*"):
            shutil.rmtree(hidden)
        steps = saved_steps(self.folder.parent)
        current = []
        if self.last_step is not None:
            current = [step for step in steps if step <= self.last_step]
        for step in set(steps) - set(current[-self.keep_last :]):
            hidden = self.folder / f".step_{step}"
            os.replace(self.folder / f"step_{step}", hidden)  # first: a kill may leave half of it
            shutil.rmtree(hidden)


def assign_writers(held: list[dict]) -> dict:
    """{piece: rank that writes it}, so that ranks write about as many bytes each.

    held: of each rank, {piece: bytes} of what it holds. A pure function: all ranks come to the same.
    """
    holders, sizes = {}, {}
    for rank, pieces in enumerate(held):
        for piece, size in pieces.items():
            holders.setdefault(piece, []).append(rank)
            sizes[piece] = size
    load = [0] * len(held)  # bytes that each rank writes
    writer = {}
    # What one rank alone holds comes first; the large before the small, which then even it out
    for piece in sorted(holders, key=lambda piece: (len(holders[piece]) > 1, -sizes[piece])):
        rank = min(holders[piece], key=lambda rank: load[rank])
        writer[piece] = rank
        load[rank] += sizes[piece]
    return writer


def _pieces(tensors):
    """{(name, offset of the piece in the tensor): bytes} of what this rank holds of each tensor."""
    pieces = {}
    for item in create_default_local_save_plan(tensors, is_coordinator=False).items:
        name = item.index.fqn
        pieces[name, tuple(item.index.offset)] = _local(tensors[name]).nbytes
    return pieces


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Writer(HuggingFaceStorageWriter):
    """torch's writer with its inner loop replaced: writes `data`, the pieces of tensors by name, to `file`.

    That one assembles a file in memory while it holds the interpreter's lock, which stopped a training thread
    for 2 s a GB; safetensors writing by itself stops it not at all (measured).
    """

    def __init__(self, file, data):
        super().__init__(file.parent, save_distributed=True)
        self.file = file
        self.data = data

    def write_data(self, plan, planner):
        tensors, offsets = {}, {}
        for item in plan.items:
            name = item.index.fqn
            assert name not in tensors  # a DTensor has one piece a rank, and the file one tensor a name
            tensors[name] = self.data[name].cpu()
            offsets[name] = {"saved_offsets": item.tensor_data.chunk.offsets}
        if tensors:
            write_tensors(tensors, self.file, {"DCP_SHARDING_INFO": json.dumps(offsets)})
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
    steps = _steps_to_try(run_dir, resume)
    if not steps:
        return None
    for step in reversed(steps):
        path = run_dir / "checkpoints" / f"step_{step}"
        try:
            together(functools.partial(_check_files, path))
        except InputError as error:
            damage = error
            print0(f"warning: checkpoint step_{step} is damaged and not used: {damage}")
        else:
            return path
    raise InputError(f"no undamaged checkpoint: {damage}; --resume never starts the run over")


def _steps_to_try(run_dir, resume):
    """Ascending, as the first rank sees them; the newest undamaged one is wanted."""
    if resume == "never":
        return []
    steps = together(lambda: saved_steps(run_dir))[0]
    if resume == "auto":
        return steps
    names = [f"step_{step}" for step in steps]
    if resume not in names:
        have = ", ".join(names) or "none"
        raise InputError(
            f"no checkpoint {resume} in {run_dir.name} (it has: {have}); --resume auto takes the newest"
        )
    return [int(resume.removeprefix("step_"))]


def read_manifest(path) -> dict:
    """What is known about a checkpoint: step, world_size, versions, meta, files. InputError where damaged."""
    file = Path(path) / "manifest.json"
    text = read_regular(file, MANIFEST_BYTES)
    try:
        manifest = parse(text, MANIFEST)
    except ValueError as error:
        raise InputError(f"{file}: {error}; take another checkpoint") from error
    manifest.pop("sha256")
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
    saved = _saved_tensors(path, reader)
    state = _local_state(optimizer)
    keys = _parameter_keys(state)
    if not any(together(lambda: bool(state["state"]))):
        _create_optimizer_state(state, keys, optimizer, saved)
    strangers = manifest["optimizer_values"].keys() - keys.keys()
    if strangers:
        raise InputError(f"{path}/manifest.json: optimizer_values has {min(strangers)}, which is not trained")
    for name, slots in manifest["optimizer_values"].items():
        for slot, value in slots.items():
            _slots(state, keys, name)[slot] = _with_tensors(path, value, saved)
    tensors, _ = _flat_state(model, state)
    together(lambda: _check_same_tensors(path, model, tensors, saved))
    random_state = _random_state_to_restore(manifest, saved)
    _read(path, reader, tensors | random_state)
    if isinstance(optimizer, MuonAdamW):
        optimizer.load_state_dict(state, hyperparameters="keep")  # flags that are given anew win
    else:
        optimizer.load_state_dict(state)
    try:
        _restore_random_state(random_state)
    except RuntimeError as error:
        raise InputError(f"{path} cannot be loaded: {error}") from error
    return manifest["meta"]


def load_model(path, model) -> int:
    """The same for the model alone, whatever the optimizer was; return how many steps it was trained.

    The checkpoint is one that check_model_fits() has passed for a model of this shape.
    """
    _read(path, HuggingFaceStorageReader(path), _model_tensors(model))
    return read_manifest(path)["step"]


def _read(path, reader, tensors):
    """Fill these tensors, {name in the checkpoint: tensor}."""
    try:
        with _without_warning():
            dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # around what went wrong on some ranks
        first = next(failure for failure, _ in error.failures.values())
        raise InputError(f"{path} cannot be loaded: {first}") from error


def check_model_fits(path, model) -> None:
    """InputError where a checkpoint that find() returned is of another model than this one, which may be on
    the meta device: reads headers, and allocates nothing.
    """
    saved = _saved_tensors(path, HuggingFaceStorageReader(path))
    _check_same_tensors(path, model, _model_tensors(model), saved)


def _local_state(optimizer):
    """What this rank holds: by name, or as other optimizers number their parameters."""
    if isinstance(optimizer, MuonAdamW):
        return optimizer.named_state_dict()
    return optimizer.state_dict()


def _saved_tensors(path, reader):
    """{name: shape and dtype} of the tensors in a checkpoint; InputError where its files cannot hold them."""
    try:
        saved = reader.read_metadata().state_dict_metadata
    except SafetensorError as error:
        raise InputError(f"{path} does not hold safetensors files: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        # torch's reader on what it keeps in the header: where in a tensor each piece belongs
        raise InputError(f"{path} holds safetensors files of something else ({error!r})") from error
    if any(extent < 0 for about in saved.values() for extent in about.size):
        raise InputError(f"{path} speaks of tensors of negative size")
    promised = sum(about.size.numel() * about.properties.dtype.itemsize for about in saved.values())
    there = sum(check_regular(file) for file in Path(path).glob("*.safetensors"))
    if promised > there:
        raise InputError(f"{path} speaks of tensors of {promised} bytes, and has {there} bytes of them")
    return saved


def _parameter_keys(state):
    """{name of a parameter in checkpoints: its key in an optimizer's state dict}, in the order of the groups.

    The names are strings; torch.optim's optimizers call their parameters 0, 1, ...
    """
    return {str(key): key for group in state["param_groups"] for key in group.get("params", ())}


def _slots(state, keys, name):
    """What an optimizer's state dict has for the parameter that checkpoints call `name`."""
    return state["state"].setdefault(keys.get(name, name), {})


def _create_optimizer_state(state, keys, optimizer, saved):
    """Put an empty tensor into the state dict of an optimizer without state for every one that was saved."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    params = dict(zip(keys, params, strict=True))
    for entry, about in saved.items():
        if not entry.startswith("optimizer.") or "/" in entry:  # inside of a list: with the values
            continue
        name, slot = entry.removeprefix("optimizer.").rsplit(".", 1)
        param = params.get(name)
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        if isinstance(param, DTensor) and param.shape == tensor.shape:
            tensor = torch.empty_like(param, dtype=tensor.dtype)
        _slots(state, keys, name)[slot] = tensor


def _check_same_tensors(path, model, tensors, saved):
    """InputError where a tensor is missing on either side or has another shape."""
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

    tensors: {name: tensor} of model and optimizer; values: what else the optimizer's state has, {parameter:
    {name: value}}, see _without_tensors.
    """
    tensors, values = _model_tensors(model), {}
    for name, slots in optimizer_state["state"].items():
        for slot, value in slots.items():
            entry = f"optimizer.{name}.{slot}"
            if isinstance(value, torch.Tensor):
                tensors[entry] = value
            else:
                values.setdefault(str(name), {})[slot] = _without_tensors(value, entry, tensors)
    return tensors, values


def _without_tensors(value, name, tensors):
    """The same of JSON types: each tensor in its lists and dicts is put into `tensors`, and {TENSOR: its name
    there} in its place. InputError for what is neither.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _without_tensors(item, f"{name}/{key}", tensors) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"{name} cannot be saved in a checkpoint: it is a {type(value).__name__}, and not of tensors, "
        "numbers, text, lists, and dicts with text as keys"
    )


def _with_tensors(path, value, saved):
    """What _without_tensors was given, with tensors to load into."""
    if isinstance(value, list):
        return [_with_tensors(path, item, saved) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        if value[TENSOR] not in saved:
            raise InputError(f"{path}/manifest.json: there is no tensor {value[TENSOR]!r}")
        about = saved[value[TENSOR]]
        return torch.empty(about.size, dtype=about.properties.dtype)
    return {key: _with_tensors(path, item, saved) for key, item in value.items()}


def _random_state(rank):
    """torch's random state as tensors named by rank."""
    state = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a run on the CPU leaves the GPUs of its machine alone
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def _random_state_to_restore(manifest, saved):
    """Tensors to load this rank's random state into; none where another number of ranks saved it."""
    rank, world_size = _place()
    if manifest["world_size"] != world_size:
        return {}
    return {name: tensor for name, tensor in _random_state(rank).items() if name in saved}


def _restore_random_state(state):
    for name, tensor in state.items():
        if name.endswith("cuda"):
            torch.cuda.set_rng_state(tensor)
        else:
            torch.set_rng_state(tensor)


def _check_files(path):
    """InputError where a checkpoint is not what was written. Each rank reads its share of the files."""
    manifest = read_manifest(path)
    files = manifest["files"]
    if path.name != f"step_{manifest['step']}":
        raise InputError(f"{path}/manifest.json: step is {manifest['step']}")
    strangers = {file.name for file in path.glob("*.safetensors")} - files.keys()
    if strangers:  # the reader would open it
        raise InputError(f"{path / min(strangers)} is not in the manifest")
    for name, entry in files.items():
        size = check_regular(path / name)
        if size != entry["bytes"]:
            raise InputError(f"{path / name} is not what was written: it has {size} bytes")
    rank, world_size = _place()
    for name in sorted(files)[rank::world_size]:
        try:
            found = _fingerprint(path / name)[name]
        except OSError as error:
            raise InputError(f"{path / name}: {error.strerror}") from error
        if found != files[name]:
            raise InputError(f"{path / name} is not what was written")


def _fingerprint(file):
    """{name: size and checksum} of a file, its entry in the manifest."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
        return {file.name: {"bytes": stream.tell(), "sha256": digest.hexdigest()}}


def _seal(manifest):
    """The manifest's text, which holds the checksum of the rest of it: the only text of its content."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1) + "\n"


@contextlib.contextmanager
def _without_warning():
    """torch.distributed.checkpoint warns where there is one process only, which is as meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _place():
    """(rank, world size) of this process."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
