"""What must hold on a GPU, against float64 on the CPU. NANOMUON_TEST_DEVICE=cpu runs what a CPU can.

bash tests/run.sh tests/test_gpu.py
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nanomuon import attention
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.optim_groups import build_param_groups
from tests.reference import MATRICES, OTHERS, distance, equal
from tests.training import QUIET, launch, losses, wait_until

pytestmark = pytest.mark.gpu
HALF = {"cpu": 1e-4, "cuda": 3e-2}  # tolerance: half precision on a GPU, float32 on a CPU


@pytest.fixture
def device():
    name = os.environ.get("NANOMUON_TEST_DEVICE", "cuda" if torch.cuda.is_available() else "")
    if not name:
        pytest.skip("no GPU found; NANOMUON_TEST_DEVICE=cpu runs these tests on the CPU")
    return torch.device(name)


@pytest.fixture
def gpu(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the optimizer


def small_model(device, dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Embedding(50, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 7)
    return nn.Sequential(*layers).to(device, dtype)


def optimizer_of(model, **settings):
    groups = build_param_groups(model, muon=MATRICES, adamw=OTHERS)
    return MuonAdamW(groups, **settings)


def train(model, optimizer, steps, bad_step=None):
    for step in range(steps):
        for i, param in enumerate(model.parameters()):
            param.grad = seeded(*param.shape, seed=100 * step + i).to(param)
        if step == bad_step:
            next(model.parameters()).grad[0, 0] = float("nan")
        optimizer.step()


@pytest.mark.parametrize("compile", [False, "auto"])
def test_ten_steps_are_those_of_the_cpu_and_a_nan_changes_nothing(device, compile):
    model, exact = small_model(device), small_model("cpu", torch.float64)
    start = [param.detach().cpu().double() for param in model.parameters()]
    train(exact, optimizer_of(exact), 10)
    optimizer = optimizer_of(model, compile=compile)
    train(model, optimizer, 10)
    for param, expected, before in zip(model.parameters(), exact.parameters(), start, strict=True):
        assert distance(param.detach().cpu() - before, expected.detach() - before) < HALF[device.type]
    kept = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, 1, bad_step=0)
    assert equal(model.parameters(), kept)
    assert optimizer.skipped_steps.item() == 1


# ---- the model


def gpt(device, dtype, **fields):
    with torch.device("meta"):
        model = GPT(GPTConfig.from_depth(2, 304, 64, **fields), dtype)
    model.to_empty(device=device)
    model.init_weights(0)
    return model


@pytest.mark.parametrize("flash", [False, True])
def test_loss_and_gradients_of_a_model_with_windows_are_those_of_the_cpu(device, flash, request):
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    if flash:
        attention.use_flash_attention(device, half)
        if torch.nn.attention.current_flash_attention_impl() is None:
            pytest.skip("needs a Hopper or Blackwell GPU with FlashAttention 3 or 4")
        request.addfinalizer(torch.nn.attention.restore_flash_attention_impl)
    tokens, targets = torch.randint(304, (2, 4, 64), generator=torch.Generator().manual_seed(1))
    model = gpt(device, half, window_pattern="SL")
    exact = gpt("cpu", torch.float32, window_pattern="SL")
    for name, param in model.named_parameters():
        param.data += 0.02 * seeded(*param.shape, seed=len(name)).to(
            param
        )  # the initial model attends to nothing
    exact.load_state_dict(model.state_dict())
    loss, expected = model(tokens.to(device), targets.to(device)), exact(tokens, targets)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    for param, other in zip(model.parameters(), exact.parameters(), strict=True):
        if other.grad is not None and other.grad.norm() > 1e-6:
            assert distance(param.grad.cpu(), other.grad) < 5e-2


# ---- whole runs


@pytest.fixture
def on_gpu(device, environment, monkeypatch):
    """Whether runs use GPUs, where they are compiled."""
    found = device.type == "cuda"
    monkeypatch.setenv("NANOMUON_DEVICE", "" if found else "cpu")
    monkeypatch.setenv("NANOMUON_COMPILE", "1" if found else "0")
    return found


def finish(*run, **options):
    """Train a run to its end; return what it has printed."""
    process = launch(*run, **options)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def test_a_run_learns_and_goes_on_after_a_kill(base, on_gpu):
    steps, flags = 24, ("--save-every", "4", "--deterministic")
    finish(base, "whole", steps, *flags)
    trained = losses(base, "whole")
    assert trained[-1] < trained[0] - 0.5
    killed = launch(base, "killed", steps, *flags)
    wait_until((base / "runs/killed/checkpoints/step_8").exists, lambda: killed.poll() is None)
    killed.kill()
    killed.wait()
    finish(base, "killed", steps, *flags)
    assert losses(base, "killed") == trained


# ---- one rank per GPU, up to two


def five_steps(model, kind):
    optimizer = kind(build_param_groups(model, muon=MATRICES, adamw=OTHERS))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.arange(50, device="cuda")).square().mean().backward()
        optimizer.step()


def on_ranks(rank, how, size, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    model = small_model("cuda")
    if how == "tp":
        mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    elif how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cuda", (size,), mesh_dim_names=("dp",)))
    five_steps(model, DistMuonAdamW)
    params = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    if rank == 0:
        torch.save([p.detach().cpu() for p in params], folder / "params")
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["replicated", "fsdp", "tp"])
def test_ranks_train_what_one_process_trains(gpu, how, tmp_path):
    size = min(2, torch.cuda.device_count())
    torch.multiprocessing.spawn(on_ranks, (how, size, tmp_path), nprocs=size)
    model = small_model(gpu)
    five_steps(model, MuonAdamW)
    trained = torch.load(tmp_path / "params")
    for param, expected in zip(trained, model.parameters(), strict=True):
        assert distance(param, expected.detach().cpu()) < 1e-2


@pytest.mark.parametrize("flags", ["", "--shard fsdp", "--tensor-parallel 2"])
def test_two_ranks_learn_stop_and_go_on(flags, base, on_gpu):
    """On GPUs with more blocks than torch.compile would compile separately."""
    if on_gpu and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if not (on_gpu or flags):
        pytest.skip("test_resume.py does this on a CPU")
    run, depth = "two" + flags.replace(" ", "-"), 10 if on_gpu else 2
    command = (base, run, 60, *QUIET, "--depth", str(depth), *flags.split())
    stopped = launch(*command, processes=2)
    wait_until(lambda: len(losses(base, run)) > 4, lambda: stopped.poll() is None, 300)
    stopped.terminate()
    assert "stopped at step" in stopped.communicate()[0]
    output = finish(*command, processes=2)
    assert "resuming run" in output and "recompile_limit" not in output, output
    trained = losses(base, run)
    assert len(trained) == 60 and trained[-1] < trained[0] - 0.5
