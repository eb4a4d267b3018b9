"""Every file in examples/, started as its docstring says, learns, and its second command resumes.

If a checkpoint is one file, the parameters at the end are those of the uninterrupted run, bit for bit.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nanomuon import MuonAdamW
from nanomuon.dataloader import TrainLoader, validation_batches, validation_rows
from nanomuon.tokenizer import Tokenizer
from tests.test_as_a_torch_optimizer import build, groups_of, loss_of
from tests.training import QUIET, ROOT, call, train, train_on
from tests.worlds import FORKS

EXAMPLES = ROOT / "examples"
LOSS = re.compile(r"\bloss'?:? '?([0-9.]+)")  # `loss 0.1`, and the Trainer's {'loss': '0.1'}


def commands(example):
    """The two commands of an example's docstring, as a shell would split them."""
    docstring = (EXAMPLES / f"{example}.py").read_text().split('"""')[1].replace("\\\n", "")
    lines = [line.strip() for line in docstring.splitlines() if line.startswith("    PYTHONPATH=. ")]
    assert len(lines) == 2
    return [shlex.split(line) for line in lines]


def run(command, folder):
    """Run one of them in `folder` and return the losses that it printed."""
    path, program, *arguments = command
    assert path == "PYTHONPATH=."
    arguments = [str(ROOT / each) if each.startswith("examples/") else each for each in arguments]
    if program == "python":  # in a fork of a process that has imported torch
        with ProcessPoolExecutor(1, FORKS) as fork:
            printed = fork.submit(run_file, folder, arguments, dict(os.environ)).result()
        return [float(loss) for loss in LOSS.findall(printed)]
    result = call(program, *arguments, folder=folder, PYTHONPATH=str(ROOT), NANOMUON_COMPILE="0")
    # Gloo threads outlive destroy_process_group, and sometimes abort after the work is done (docs/log.md)
    aborted_at_exit = "terminate called without an active exception" in result.stderr
    assert result.returncode == 0 or aborted_at_exit, result.stdout + result.stderr
    return [float(loss) for loss in LOSS.findall(result.stdout)]


def run_file(folder, arguments, environment):
    """What `python FILE ARGUMENTS` prints in this folder."""
    os.chdir(folder)
    os.environ.update(environment, NANOMUON_COMPILE="0")
    sys.argv = arguments
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(arguments[0], run_name="__main__")
    return output.getvalue()


def weights(file):
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file)["model"]


@pytest.mark.parametrize(
    "example, last, needed",
    [
        ("plain_loop", "step_200.pt", []),
        pytest.param("torchrun_loop", "step_100.pt", [], marks=pytest.mark.slow),
        pytest.param("fsdp2_llama", None, ["transformers"], marks=pytest.mark.slow),
        pytest.param(
            "hf_trainer",
            "checkpoint-40/model.safetensors",
            ["transformers", "accelerate"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_example_learns_and_resumes(example, last, needed, tmp_path):
    for package in needed:
        pytest.importorskip(package, reason=f"needs {package}")
    first, resumed = commands(example)
    losses = run(first, tmp_path)
    assert losses[-1] < 0.3 * losses[0]
    losses_of_resumed = run(resumed, tmp_path)
    assert losses_of_resumed == losses[-len(losses_of_resumed) :]
    assert 0 < len(losses_of_resumed) < len(losses)
    if last:
        uninterrupted = weights(tmp_path / example / last)
        torch.testing.assert_close(weights(tmp_path / "resumed" / last), uninterrupted, rtol=0, atol=0)


UNDER_ACCELERATE = """
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from nanomuon import DistMuonAdamW, MuonAdamW
from nanomuon.optim_state import whole
from tests.test_as_a_torch_optimizer import build, groups_of, loss_of

def under_fsdp2(state_dict_type):
    # On CPUs accelerate falls back to DistributedDataParallel
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=state_dict_type, auto_wrap_policy="size_based_wrap",
        min_num_params=50, cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator

def prepared(seed):
    model = build(seed)
    optimizer = (DistMuonAdamW if accelerator.is_fsdp2 else MuonAdamW)(groups_of(model))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6 * accelerator.num_processes)
    return accelerator.prepare(model, optimizer, schedule)

def train(model, optimizer, schedule, steps):
    for step in steps:
        accelerator.backward(loss_of(model, step, accelerator.process_index))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 2:
            accelerator.save_state("saved")

accelerator = Accelerator(cpu=True) if how == "DDP" else under_fsdp2(how)
uninterrupted = prepared(seed=0)
train(*uninterrupted, range(6))
accelerator.free_memory()
resumed = prepared(seed=1)
accelerator.load_state("saved")
train(*resumed, range(3, 6))
for name, (model, _, _) in ("uninterrupted", uninterrupted), ("resumed", resumed):
    tensors = accelerator.unwrap_model(model).state_dict()
    tensors = {key: whole(tensor) for key, tensor in tensors.items()}
    torch.save(tensors, f"{name}_{accelerator.process_index}.pt")
accelerator.end_training()
"""


def under_accelerate(flags):
    os.chdir(os.environ["NANOMUON_BASE_DIR"])
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    exec(UNDER_ACCELERATE, {"how": flags[-1]})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["DDP", "FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_accelerate_on_two_ranks(how, tmp_path, eager):
    """accelerate averages gradients, and saves only rank 0's optimizer state, or FSDP2's in two ways. A
    resumed run is the uninterrupted one bit for bit, on both ranks, and trains the same as one process on the
    rows of both.
    """
    pytest.importorskip("accelerate", reason="needs accelerate")
    train_on(2, tmp_path, "loop", 6, how, main=under_accelerate)
    expected = torch.load(tmp_path / "uninterrupted_0.pt")
    for name in ("uninterrupted_1", "resumed_0", "resumed_1"):
        torch.testing.assert_close(torch.load(tmp_path / f"{name}.pt"), expected, rtol=0, atol=0)

    model = build()
    optimizer = MuonAdamW(groups_of(model))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=1e-4, atol=1e-6)


def test_the_loop_in_the_readme_learns(eager):
    """Its code is unchanged; this test supplies the reader's model and loss."""
    section = (ROOT / "README.md").read_text().split("## In your own training")[1].split("\n## ")[0]
    (loop,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    inputs = torch.randn(32, 8)
    losses = []

    def loss_of(outputs, targets):
        losses.append(nn.functional.mse_loss(outputs, targets))
        return losses[-1]

    names = {"model": model, "loss_of": loss_of, "batches": [(inputs, inputs[:, :4])] * 200}
    exec(loop, names)
    assert losses[-1] < 0.3 * losses[0]


NANOCHAT = """
import argparse
import torch
from nanochat import dataloader, tokenizer

parser = argparse.ArgumentParser()
for name in "device-batch-size max-seq-len total-batch-size num-iterations eval-tokens".split():
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--matrix-lr", type=float)
args, _ = parser.parse_known_args()
shape = args.device_batch_size, args.max_seq_len
open_training = dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit
batches = open_training(None, *shape, split="train")
steps = args.num_iterations * args.total_batch_size // (shape[0] * shape[1])
fetched = [next(batches) for _ in range(steps)]
resumed = open_training(None, *shape, split="train", resume_state_dict=fetched[-1][2])
trained = [torch.stack(batch[:2]) for batch in (*fetched, next(resumed))]
batches = dataloader.tokenizing_distributed_data_loader_bos_bestfit(None, *shape, split="val")
judged = [torch.stack(next(batches)) for _ in range(args.eval_tokens // (shape[0] * shape[1]))]
torch.save([args.matrix_lr, trained, judged, tokenizer.get_token_bytes()], "read.pt")
val_bpb, num_params = 1.5, 7
"""


@pytest.mark.parametrize("flags, rows", [([], 4), (["--device-batch-size", "2"], 2)])
def test_nanochat_reads_the_rows_of_the_run_beside_it(base, environment, tmp_path, flags, rows):
    """A stand-in for its checkout records what it is given."""
    for name, code in (
        ("nanochat/dataloader", ""),
        ("nanochat/tokenizer", ""),
        ("scripts/base_train", NANOCHAT),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(code)
    train(base, "ours", 3, *QUIET)
    command = "PYTHONPATH=. python examples/train_nanochat.py --run ours --nanochat . --rates 0.5".split()
    run([*command, *flags], tmp_path)
    matrix_lr, trained, judged, token_bytes = torch.load(tmp_path / "read.pt")
    assert matrix_lr == 0.17
    (shards,) = (base / "shards").glob("texts-*")
    *trained, resumed = trained
    loader = TrainLoader(shards, seq_len=32, rows_per_step=8, device_batch_size=rows)
    assert len(trained) == 3 * 8 // rows
    for batch in trained:
        assert torch.equal(batch, torch.stack(next(loader)))
    assert torch.equal(resumed, trained[-1])  # saved before this batch, nanochat resumes with it
    expected = [torch.stack(batch) for batch in validation_batches(validation_rows(shards, 32), rows)]
    torch.testing.assert_close(judged, expected, rtol=0, atol=0)
    assert token_bytes.tolist() == Tokenizer.load(shards / "tokenizer").token_bytes.tolist()
