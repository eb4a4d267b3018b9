"""Checkpoints: exact, elastic, atomic, and never silently wrong."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from nanomuon import checkpoint
from nanomuon.optim import DistMuonAdamW
from nanomuon.optim_groups import build_param_groups
from tests.mistakes import refused
from tests.reference import MATRICES, OTHERS
from tests.test_optim import train
from tests.training import little_space
from tests.worlds import FORKS, run_fresh_world

FILE = "shard-00001-model-00001-of-00001.safetensors"
pytestmark = pytest.mark.usefixtures("environment")


class Tiny(torch.nn.Module):
    """Parameters split in every way: rows (two slices are empty on 4 ranks), banks, one matrix, a vector.
    Some are transposed, and one has two names.
    """

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"embedding": (16, 131), "short": (600, 2), "scalars": (6,), "lone": (5, 7)}
        shapes |= {f"matrix{i}": (16, 24) for i in range(5)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator)
            transposed = name in ("embedding", "short")
            self.register_parameter(name, torch.nn.Parameter(value.T if transposed else value))
        self.tied = self.scalars


def muon(model):
    rows = ["embedding", "short"]
    return DistMuonAdamW(build_param_groups(model, muon=MATRICES, adamw=OTHERS, skip_keys=rows))


def everything(model, optimizer):
    """{name: tensor} of parameters and the whole optimizer state."""
    tensors = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, slots in optimizer.full_state_dict()["state"].items():
        for key, value in slots.items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value).clone()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with two checkpoints, steps 1 and 2: (run folder, tensors of the second one)."""
    run_dir = tmp_path_factory.mktemp("runs") / "original"
    model = Tiny()
    optimizer = muon(model)
    for step in (1, 2):
        train(optimizer, model.parameters(), 1)
        checkpoint.save(run_dir, step, model, optimizer, {"step": step})
    return run_dir, everything(model, optimizer)


@pytest.fixture
def run_dir(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "run")


def test_any_world_size_loads_what_any_other_saved(saved, tmp_path):
    previous, expected = saved
    save_file(expected, tmp_path / "expected.safetensors")
    for size in (2, 4, 3, 1):
        run_dir = tmp_path / f"run_of_{size}"
        codes = run_fresh_world(
            size, tmp_path, load_compare_save, previous, run_dir, tmp_path / "expected.safetensors"
        )
        assert codes == [0] * size
        previous = run_dir
    files = [file.replace("1-m", f"{rank}-m") for rank, file in ((1, FILE), (2, FILE))]
    pieces = [load_file(tmp_path / "run_of_2/checkpoints/step_2" / file) for file in files]
    written = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in pieces]
    largest = max(tensor.nbytes for tensors in pieces for tensor in tensors.values())
    assert abs(written[0] - written[1]) <= largest  # ranks write about the same amount, and nothing twice
    assert not {name for name in pieces[0].keys() & pieces[1].keys() if name.startswith("model.")}


def load_compare_save(previous, run_dir, expected):
    model = Tiny(seed=1)
    optimizer = muon(model)
    step = checkpoint.load(checkpoint.find(previous), model, optimizer)["step"]
    assert step == 2
    torch.testing.assert_close(everything(model, optimizer), load_file(expected), rtol=0, atol=0)
    checkpoint.save(run_dir, step, model, optimizer, {"step": step})


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
@pytest.mark.parametrize("harm", ["delete", "pipe", "empty", "truncate", "garbage"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(run_dir, capsys, name, harm):
    """Opening one that is a pipe would wait forever."""
    file = run_dir / "checkpoints" / "step_2" / name
    data = file.read_bytes()
    file.unlink()
    if harm == "pipe":
        os.mkfifo(file)
    elif harm != "delete":
        file.write_bytes({"empty": b"", "truncate": data[:-2], "garbage": b"\xff" * len(data)}[harm])
    assert checkpoint.find(run_dir).name == "step_1"
    assert str(file) in capsys.readouterr().out
    (run_dir / "checkpoints" / "step_1" / FILE).unlink()
    with refused("no undamaged checkpoint"):
        checkpoint.find(run_dir)


def test_a_checkpoint_that_cannot_be_opened_is_not_skipped(run_dir, monkeypatch):
    """It may be whole, and a resumed run would remove it."""
    file, open_file = run_dir / "checkpoints" / "step_2" / FILE, Path.open

    def forbidden(path, *mode, **options):
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *mode, **options)

    monkeypatch.setattr(Path, "open", forbidden)
    with refused(f"Permission denied: '{file}': make it readable, or choose another"):
        checkpoint.find(run_dir)
    assert checkpoint.find(run_dir, "step_1").name == "step_1"


@pytest.mark.parametrize("is_link", [True, False])
def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(run_dir, is_link):
    """For example if their disk is not mounted."""
    folder = run_dir / "checkpoints"
    shutil.rmtree(folder)
    if is_link:
        folder.symlink_to("/nowhere")
    else:
        folder.touch()
    with refused(f"{folder}': repair this, or start over: --resume never"):
        checkpoint.find(run_dir)
    assert checkpoint.find(run_dir, "never") is None


def test_which_checkpoint_is_resumed_and_which_are_removed(run_dir):
    folder = run_dir / "checkpoints"
    shutil.copytree(folder / "step_2", folder / ".step_3")  # unfinished
    assert checkpoint.find(run_dir).name == "step_2"
    assert checkpoint.find(run_dir, "step_1").name == "step_1"
    assert checkpoint.find(run_dir, "never") is checkpoint.find(run_dir / "new") is None
    with refused("step_3.*step_1, step_2"):
        checkpoint.find(run_dir, "step_3")
    checkpoint.remove(run_dir, 1, keep_last=3)
    assert os.listdir(folder) == ["step_1"]  # step 2 is of an abandoned future
    model = Tiny()
    for step in (9, 10, 11, 12):
        checkpoint.save(run_dir, step, model, muon(model), {}, keep_last=3)
    assert checkpoint.saved_steps(run_dir) == [10, 11, 12]


def test_copies_and_files_with_other_names_are_no_checkpoints(run_dir, tmp_path):
    """A link to a checkpoint is one, and is removed without what it leads to."""
    folder, elsewhere = run_dir / "checkpoints", tmp_path / "elsewhere"
    (folder / "step_007").mkdir()
    (folder / "step_99").touch()
    (folder / ".step_5").touch()
    os.replace(folder / "step_2", elsewhere)
    (folder / "step_2").symlink_to(elsewhere)
    assert checkpoint.find(run_dir).name == "step_2"
    checkpoint.remove(run_dir, 1, keep_last=3)
    assert checkpoint.saved_steps(run_dir) == [1] and not (folder / "step_2").is_symlink()
    assert (folder / "step_007").exists() and (elsewhere / FILE).exists()


@pytest.mark.parametrize("name", ["lone", "more"])
def test_another_model_is_refused_by_name(run_dir, name):
    other = Tiny()
    setattr(other, name, torch.nn.Parameter(torch.zeros(7, 5)))
    with refused(f"cannot be loaded into this model and optimizer: .*model.{name}"):
        checkpoint.load_model(checkpoint.find(run_dir), other)


def test_a_file_that_no_checkpoint_has_written_is_named(run_dir):
    """The checkpoint is neither skipped nor removed."""
    newest = checkpoint.find(run_dir)
    (newest / f"._{FILE}").write_bytes(b"of a Mac")
    assert checkpoint.find(run_dir) == newest
    with refused(f"step_2 has ._{FILE}, a file that does not belong to this checkpoint: remove it"):
        checkpoint.load_model(newest, Tiny())


def save_without_space(run_dir):
    """There is no space for the last rank's tensors, then none for the first rank's manifest."""
    model = Tiny()
    optimizer = muon(model)
    checkpoint.save(run_dir, 1, model, optimizer, {})
    for size, meta in (
        (20_000 if dist.get_rank() == 1 else 10**9, {}),
        (150_000, dict.fromkeys(map(str, range(50_000)), 0)),
    ):
        with (
            little_space(size),
            refused("step_2 was not written: .*File too large.*remove what is in the way"),
        ):
            checkpoint.save(run_dir, 2, model, optimizer, meta)
        assert os.listdir(run_dir / "checkpoints") == ["step_1"]
        dist.barrier()
    checkpoint.save(run_dir, 2, model, optimizer, {})  # room again
    assert checkpoint.find(run_dir).name == "step_2"


def test_a_full_disk_of_one_rank_stops_the_save_on_all_and_leaves_the_previous_checkpoint(tmp_path):
    assert run_fresh_world(2, tmp_path, save_without_space, tmp_path / "run") == [0, 0]


def killed_at_the_rename(run_dir, killed, pids, moment):
    """Save steps 1 and 2; rank `killed` is killed before or after rank 0 makes step 2 visible."""
    pids[dist.get_rank()] = os.getpid()
    replace, model = os.replace, Tiny()
    optimizer = muon(model)

    def replaced(source, target):
        if target.name == "step_2" and moment == "before":
            os.kill(pids[killed], signal.SIGKILL)
        replace(source, target)
        if target.name == "step_2":
            os.kill(pids[killed], signal.SIGKILL)

    os.replace = replaced
    for step in (1, 2):
        checkpoint.save(run_dir, step, model, optimizer, {"step": step})


@pytest.mark.parametrize(
    "killed, moment, steps", [(0, "before", [1]), (0, "after", [1, 2]), (1, "before", [1, 2])]
)
def test_a_rank_that_is_killed_at_the_rename_leaves_a_whole_checkpoint(tmp_path, killed, moment, steps):
    run_dir, pids = tmp_path / "run", FORKS.Array("i", 2)
    codes = run_fresh_world(2, tmp_path, killed_at_the_rename, run_dir, killed, pids, moment)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] not in (None, 0, -signal.SIGKILL)  # it does not wait for ever
    assert checkpoint.saved_steps(run_dir) == steps
    checkpoint.remove(run_dir, steps[-1], keep_last=2)
    assert sorted(os.listdir(run_dir / "checkpoints")) == [f"step_{step}" for step in steps]
    assert checkpoint.find(run_dir).name == f"step_{steps[-1]}"
