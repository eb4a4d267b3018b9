"""Checkpoints: exact, elastic, atomic, and never silently wrong."""

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nanomuon import checkpoint, hf_export
from nanomuon.gpt import GPTConfig
from nanomuon.optim import DistMuonAdamW
from nanomuon.runtime import InputError

FILE = "rank_0.safetensors"
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch.distributed.checkpoint", "nanomuon.optim"])


class Tiny(torch.nn.Module):
    """Every way of being split: sliced rows (two slices empty on 4 ranks), banks, one matrix, a vector."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"embedding": (131, 16), "short": (2, 600), "scalars": (6,), "lone": (5, 7)}
        shapes |= {f"matrix{i}": (16, 24) for i in range(5)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator)))


@pytest.fixture(scope="module", autouse=True)
def eager():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOMUON_COMPILE", "0")
        yield


def muon(model):
    params = dict(model.named_parameters())
    names = ["embedding", "short", "scalars"]
    adamw = dict(
        kind="adamw",
        params=[params[name] for name in names],
        names=names,
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
    )
    names = ["lone", *(f"matrix{i}" for i in range(5))]
    matrices = dict(
        kind="muon",
        params=[params[name] for name in names],
        names=names,
        lr=0.02,
        momentum=0.9,
        ns_steps=5,
        beta2=0.95,
        weight_decay=0.1,
    )
    return DistMuonAdamW([adamw, matrices])


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        optimizer.step()


def everything(model, optimizer):
    """{name: tensor} of parameters and the whole optimizer state."""
    if hasattr(optimizer, "full_state_dict"):
        state = optimizer.full_state_dict()["state"]
    else:
        state = optimizer.state_dict()["state"]
    tensors = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, slots in state.items():
        for key, value in slots.items():
            tensors[f"{name}/{key}"] = value.clone()
    return tensors


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]), key


def world(size, tmp_path, work, *args):
    """Run work(*args) on `size` gloo ranks and fail with the first rank's traceback."""
    rendezvous = tmp_path / f"rendezvous_{time.monotonic_ns()}"
    ranks = []
    for rank in range(size):
        ranks.append(processes.Process(target=_rank, args=(rank, size, rendezvous, work, args)))
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    errors = [file.read_text() for file in sorted(tmp_path.glob(rendezvous.name + ".*"))]
    assert not errors, errors[0]
    assert [process.exitcode for process in ranks] == [0] * size


def _rank(rank, size, rendezvous, work, args):
    os.environ["NANOMUON_COMPILE"] = "0"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
        work(*args)
        dist.destroy_process_group()
    except BaseException:
        Path(f"{rendezvous}.{rank}").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with two checkpoints, steps 1 and 2: (run folder, what the second one holds)."""
    run_dir = tmp_path_factory.mktemp("runs") / "original"
    model = Tiny()
    optimizer = muon(model)
    for step in (1, 2):
        train(model, optimizer, [step])
        checkpoint.save(run_dir, step, model, optimizer, {"step": step, "loader": {"epoch": 0, "row": step}})
    return run_dir, everything(model, optimizer)


@pytest.fixture
def run_dir(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "run")


@pytest.mark.parametrize("make", [muon, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path, make, device):
    model = Tiny().to(device)
    optimizer = make(model)
    train(model, optimizer, range(3))
    meta = {"step": 3, "loader": {"row": 96}, "settings": {"name": "über"}}
    checkpoint.save(tmp_path, 3, model, optimizer, meta)
    random_number = torch.rand(3, device=device)
    train(model, optimizer, range(3, 6))

    resumed = Tiny(seed=1).to(device)
    resumed_optimizer = make(resumed)
    torch.manual_seed(99)
    assert checkpoint.load(checkpoint.find(tmp_path), resumed, resumed_optimizer) == meta
    assert torch.equal(torch.rand(3, device=device), random_number)
    train(resumed, resumed_optimizer, range(3, 6))
    assert_same(everything(model, optimizer), everything(resumed, resumed_optimizer))


def test_plain_values_in_an_optimizer_come_back_with_their_type(tmp_path):
    class Counting(torch.optim.SGD):
        def step(self):
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1

    model = torch.nn.Linear(2, 2)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(4))
    checkpoint.save(tmp_path, 4, model, optimizer, {})
    resumed = Counting(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load(checkpoint.find(tmp_path), model, resumed)
    entry = resumed.state[model.weight]
    assert entry["count"] == 4 and type(entry["count"]) is int
    assert torch.equal(entry["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])


def test_what_no_checkpoint_can_hold_is_named_at_the_first_save(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["generator"] = torch.Generator()
    with pytest.raises(InputError, match="optimizer.0.generator cannot be saved .* it is a Generator"):
        checkpoint.save(tmp_path, 1, model, optimizer, {})


def test_tensors_that_share_storage_or_are_transposed(tmp_path):
    bank = torch.arange(48.0).reshape(2, 4, 6)
    model = torch.nn.Module()
    model.rows, model.columns = torch.nn.Parameter(bank[0]), torch.nn.Parameter(bank[1].T)
    model.tied, model.wide = model.rows, torch.nn.Parameter(torch.arange(6.0).expand(3, 6))
    optimizer = torch.optim.SGD(model.parameters())
    checkpoint.save(tmp_path, 1, model, optimizer, {})
    hf_export.write_weights(tmp_path, model)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bank.zero_()
    model.wide = torch.nn.Parameter(torch.zeros(3, 6))
    checkpoint.load(checkpoint.find(tmp_path), model, optimizer)
    assert_same(dict(model.state_dict()), expected)
    assert_same(load_file(tmp_path / "model.safetensors"), expected)


def test_any_world_size_loads_what_any_other_saved(saved, tmp_path):
    original, expected = saved
    previous, run_dir = original, None
    save_file(expected, tmp_path / "expected.safetensors")
    for size in (2, 4, 3, 1):
        run_dir = tmp_path / f"run_of_{size}"
        world(size, tmp_path, load_compare_save, previous, run_dir, tmp_path / "expected.safetensors")
        previous = run_dir


def load_compare_save(previous, run_dir, expected):
    model = Tiny(seed=1)
    optimizer = muon(model)
    step = checkpoint.load(checkpoint.find(previous), model, optimizer)["step"]
    assert step == 2
    assert_same(everything(model, optimizer), load_file(expected))
    checkpoint.save(run_dir, step, model, optimizer, {"step": step})


def test_sharded_parameters_load_into_whole_ones_and_back(saved, tmp_path):
    original, expected = saved
    save_file(expected, tmp_path / "expected.safetensors")
    world(4, tmp_path, slice_and_save, original, tmp_path / "sharded", tmp_path / "expected.safetensors")
    model = Tiny(seed=1)
    optimizer = muon(model)
    checkpoint.load(checkpoint.find(tmp_path / "sharded"), model, optimizer)
    assert_same(everything(model, optimizer), expected)
    weights = load_file(tmp_path / "sharded" / "model.safetensors")
    assert_same(weights, {name: expected[name] for name in weights})


class RowSlices:
    """A model and an optimizer state in row slices on all ranks, as under FSDP2; some ranks hold no row."""

    def __init__(self, expected):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model, self.state = torch.nn.Module(), {}
        for name, tensor in expected.items():
            sliced = torch.zeros_like(tensor)
            if tensor.dim() > 0:
                sliced = distribute_tensor(sliced, mesh, [Shard(0)])
            parameter, _, slot = name.partition("/")
            if slot:
                self.state.setdefault(parameter, {})[slot] = sliced
            else:
                self.model.register_parameter(name, torch.nn.Parameter(sliced))

    def state_dict(self):
        return {"state": self.state, "param_groups": []}

    def load_state_dict(self, state):
        self.state = state["state"]


def slice_and_save(original, run_dir, expected):
    slices = RowSlices(load_file(expected))
    checkpoint.load(checkpoint.find(original), slices.model, slices)
    checkpoint.save(run_dir, 2, slices.model, slices, {})
    hf_export.write_weights(run_dir, slices.model)


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
@pytest.mark.parametrize("harm", ["delete", "empty", "truncate", "append", "garbage"])
def test_damage_is_noticed_named_and_the_previous_checkpoint_used(run_dir, capsys, name, harm):
    file = run_dir / "checkpoints" / "step_2" / name
    data = file.read_bytes()
    if harm == "delete":
        file.unlink()
    else:
        garbage = b"\xff" * len(data)
        harmed = {"empty": b"", "truncate": data[:-2], "append": data + b"x", "garbage": garbage}
        file.write_bytes(harmed[harm])
    assert checkpoint.find(run_dir).name == "step_1"
    assert str(file) in capsys.readouterr().out
    with pytest.raises(InputError, match="step_2"):
        checkpoint.find(run_dir, "step_2")
    (run_dir / "checkpoints" / "step_1" / FILE).unlink()
    with pytest.raises(InputError, match="no undamaged checkpoint"):
        checkpoint.find(run_dir)


def test_damage_to_another_ranks_file_is_noticed_by_all(saved, tmp_path):
    original, expected = saved
    save_file(expected, tmp_path / "expected.safetensors")
    world(2, tmp_path, load_compare_save, original, tmp_path / "two", tmp_path / "expected.safetensors")
    second = tmp_path / "two" / "checkpoints" / "step_2" / "rank_1.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    world(2, tmp_path, refuse, tmp_path / "two")


def refuse(run_dir):
    with pytest.raises(InputError):
        checkpoint.find(run_dir)


def test_what_to_resume_from(run_dir, tmp_path):
    assert checkpoint.find(run_dir, "auto").name == "step_2"
    assert checkpoint.find(run_dir, "step_1").name == "step_1"
    assert checkpoint.find(run_dir, "never") is None
    assert checkpoint.find(tmp_path / "new", "auto") is None
    for wrong in ("step_3", "latest", "2"):
        with pytest.raises(InputError, match=f"{wrong}.*step_1, step_2"):
            checkpoint.find(run_dir, wrong)


def test_an_unfinished_checkpoint_is_no_checkpoint(run_dir):
    folder = run_dir / "checkpoints"
    shutil.copytree(folder / "step_2", folder / ".step_3")
    assert checkpoint.saved_steps(run_dir) == [1, 2] and checkpoint.find(run_dir).name == "step_2"
    checkpoint.remove(run_dir, 2, keep_last=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"]


def test_old_and_abandoned_checkpoints_are_removed(run_dir):
    model = Tiny()
    checkpoint.remove(run_dir, 1, keep_last=3)
    assert checkpoint.saved_steps(run_dir) == [1]  # step 2 of the future that was left
    for step in (9, 10, 11, 12):
        checkpoint.save(run_dir, step, model, muon(model), {}, keep_last=3)
    assert checkpoint.saved_steps(run_dir) == [10, 11, 12]
    checkpoint.remove(run_dir, -1, keep_last=3)
    assert checkpoint.saved_steps(run_dir) == []


def test_another_model_is_refused_by_name(run_dir):
    path = checkpoint.find(run_dir)
    other = Tiny()
    other.lone = torch.nn.Parameter(torch.zeros(7, 5))
    with pytest.raises(InputError, match="model.lone"):
        checkpoint.load(path, other, muon(Tiny()))
    del other.lone
    with pytest.raises(InputError, match="model.lone"):
        checkpoint.load(path, other, muon(Tiny()))


@contextlib.contextmanager
def little_space(size=20_000):
    """No file of this process can grow beyond `size` bytes: writing fails half way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_previous_checkpoint(run_dir):
    model, optimizer = Tiny(), muon(Tiny())
    hidden = run_dir / "checkpoints" / ".step_3"
    with little_space(), pytest.raises(InputError, match=f"File too large.*{FILE}"):
        checkpoint.save(run_dir, 3, model, optimizer, {})
    with little_space(150_000), pytest.raises(InputError, match="step_3 was not written: .*File too large"):
        checkpoint.save(run_dir, 3, model, optimizer, {"manifest": "too large" * 50_000})
    assert not hidden.exists()
    with little_space(), pytest.raises(OSError, match="File too large.*model.safetensors"):
        hf_export.write_weights(run_dir, model)
    assert not (run_dir / "model.safetensors").exists()
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_1", "step_2"]
    assert checkpoint.find(run_dir).name == "step_2"
    checkpoint.save(run_dir, 3, model, optimizer, {})  # room again
    assert checkpoint.find(run_dir).name == "step_3"


def test_one_rank_without_space_stops_the_save_on_all(tmp_path):
    world(2, tmp_path, save_without_space, tmp_path / "run")


def save_without_space(run_dir):
    model = Tiny()
    optimizer = muon(model)
    with little_space() if dist.get_rank() == 1 else contextlib.nullcontext():
        with pytest.raises(InputError, match="File too large.*rank_1"):
            checkpoint.save(run_dir, 1, model, optimizer, {})
    checkpoint.save(run_dir, 2, model, optimizer, {})
    assert checkpoint.find(run_dir).name == "step_2"


def killed_at_the_rename(run_dir, killed, pids, moment):
    """Save steps 1 and 2; that rank is killed before or after the first one makes the second appear."""
    rank, replace = dist.get_rank(), os.replace
    pids[rank] = os.getpid()
    model = Tiny()
    optimizer = muon(model)
    checkpoint.save(run_dir, 1, model, optimizer, {"step": 1})

    def replaced(source, target):
        if target.name != "step_2":  # the manifest
            return replace(source, target)
        if moment == "after":
            replace(source, target)
        os.kill(pids[killed], signal.SIGKILL)
        if moment == "before":
            replace(source, target)

    os.replace = replaced
    checkpoint.save(run_dir, 2, model, optimizer, {"step": 2})


@pytest.mark.parametrize(
    "killed, moment, steps", [(0, "before", [1]), (0, "after", [1, 2]), (1, "before", [1, 2])]
)
def test_a_rank_that_is_killed_at_the_rename_leaves_a_whole_checkpoint(tmp_path, killed, moment, steps):
    run_dir, pids = tmp_path / "run", processes.Array("i", 2)
    work = killed_at_the_rename, (run_dir, killed, pids, moment)
    ranks = [
        processes.Process(target=_rank, args=(rank, 2, tmp_path / "rendezvous", *work)) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] not in (None, 0)  # it does not wait for ever

    assert checkpoint.saved_steps(run_dir) == steps
    found = checkpoint.find(run_dir)
    assert found.name == f"step_{steps[-1]}"
    checkpoint.remove(run_dir, steps[-1], keep_last=2)
    assert sorted(path.name for path in found.parent.iterdir()) == [f"step_{step}" for step in steps]
    model = Tiny(seed=1)
    assert checkpoint.load(found, model, muon(model))["step"] == steps[-1]
    assert_same(dict(model.named_parameters()), dict(Tiny().named_parameters()))


def test_ranks_write_about_as_much_and_nothing_twice(tmp_path):
    world(2, tmp_path, save_and_weigh, tmp_path / "run")


def save_and_weigh(run_dir):
    model = Tiny()
    optimizer = muon(model)
    train(model, optimizer, [0])
    checkpoint.save(run_dir, 1, model, optimizer, {})
    pieces = [load_file(run_dir / "checkpoints" / "step_1" / f"rank_{rank}.safetensors") for rank in (0, 1)]
    written = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in pieces]
    largest = max(tensor.nbytes for tensors in pieces for tensor in tensors.values())
    assert abs(written[0] - written[1]) <= largest
    assert not {name for name in pieces[0].keys() & pieces[1].keys() if name.startswith("model.")}


def test_killed_at_any_moment_the_last_announced_checkpoint_is_there(tmp_path):
    run_dir, generator = tmp_path / "run", random.Random(0)
    for _ in range(3):
        before = max(checkpoint.saved_steps(run_dir), default=0)
        process = processes.Process(target=save_for_ever, args=(run_dir,))
        process.start()
        while max(checkpoint.saved_steps(run_dir), default=0) < before + 3:
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.1))
        announced = max(checkpoint.saved_steps(run_dir))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = checkpoint.find(run_dir)
        assert int(found.name[5:]) >= announced
        model = Tiny(seed=1)
        assert checkpoint.load(found, model, muon(model))["step"] == int(found.name[5:])
        assert model.scalars[0].item() == int(found.name[5:])


def save_for_ever(run_dir):
    os.environ["NANOMUON_COMPILE"] = "0"
    torch.set_num_threads(1)
    last = max(checkpoint.saved_steps(run_dir), default=0)
    model = Tiny()
    optimizer = muon(model)
    for step in itertools.count(last + 1):
        with torch.no_grad():
            model.scalars.fill_(step)
        checkpoint.save(run_dir, step, model, optimizer, {"step": step})


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_a_poisoned_checkpoint_runs_nothing(run_dir, tmp_path):
    marker = str(tmp_path / "exploded")
    path = run_dir / "checkpoints" / "step_2"
    with pytest.raises(FileNotFoundError):  # the bomb works
        pickle.loads(pickle.dumps(Bomb(marker + "/in a folder that is missing")))

    (path / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))  # torch's default reader unpickles this name
    (path / "__0_0.distcp").write_bytes(pickle.dumps(Bomb(marker)))
    model = Tiny()
    checkpoint.load(checkpoint.find(run_dir, "step_2"), model, muon(model))

    (path / "extra.safetensors").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(InputError):
        checkpoint.find(run_dir, "step_2")
    (path / "extra.safetensors").unlink()

    torch.save(Bomb(marker), path / FILE)  # with a manifest that vouches for it
    manifest = checkpoint.read_manifest(path)
    manifest.files = {FILE: (path / FILE).stat().st_size}
    (path / "manifest.json").write_text(json.dumps(asdict(manifest)))
    with pytest.raises(InputError, match="step_2/rank_0.safetensors is not a safetensors file"):
        checkpoint.find(run_dir, "step_2")

    hf_export.write_weights(tmp_path, model)
    torch.save(Bomb(marker), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="model.safetensors"):
        hf_export.check_same_shapes(tmp_path / "model.safetensors", GPTConfig.from_depth(2, 300, 32))
    assert not os.path.exists(marker)
