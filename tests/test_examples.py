"""Every file of examples/ as its docstring says to start it: it learns, and its second command resumes.

Where one process resumes, the parameters at the end are those of the uninterrupted run, bit for bit.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
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
    start = {"python": ["-u"], "torchrun": ["-m", "torch.distributed.run"]}[program]
    arguments = [str(ROOT / each) if each.startswith("examples/") else each for each in arguments]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), NANOMUON_COMPILE="0", OMP_NUM_THREADS="1")
    result = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    # Gloo threads outlive destroy_process_group and abort now and then, after all is done (docs/log.md)
    aborted_at_exit = (
        program == "torchrun" and "terminate called without an active exception" in result.stderr
    )
    assert result.returncode == 0 or aborted_at_exit, result.stdout + result.stderr
    return [float(loss) for loss in LOSS.findall(result.stdout)]


def learns_and_resumes(example, folder):
    first, resumed = commands(example)
    losses = run(first, folder)
    assert losses[-1] < 0.3 * losses[0]
    losses_of_resumed = run(resumed, folder)
    assert losses_of_resumed == losses[-len(losses_of_resumed) :]
    assert 0 < len(losses_of_resumed) < len(losses)


def same_tensors(one, other):
    assert one and one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def same_saved(folder, one, other):
    same_tensors(torch.load(folder / one)["model"], torch.load(folder / other)["model"])


def same_safetensors(folder, one, other):
    same_tensors(load_file(folder / one), load_file(folder / other))


def test_plain_loop(tmp_path):
    learns_and_resumes("plain_loop", tmp_path)
    same_saved(tmp_path, "plain_loop/step_200.pt", "resumed/step_200.pt")


@pytest.mark.slow  # two launches of two processes
def test_ddp(tmp_path):
    learns_and_resumes("ddp", tmp_path)
    same_saved(tmp_path, "ddp/step_100.pt", "resumed/step_100.pt")


@pytest.mark.slow
def test_fsdp2_llama(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    learns_and_resumes("fsdp2_llama", tmp_path)


def test_hf_trainer(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    learns_and_resumes("hf_trainer", tmp_path)
    last = "checkpoint-40/model.safetensors"
    same_safetensors(tmp_path, f"hf_trainer/{last}", f"resumed/{last}")


def test_accelerate_loop(tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate")
    learns_and_resumes("accelerate_loop", tmp_path)
    last = "step_200/model.safetensors"
    same_safetensors(tmp_path, f"accelerate_loop/{last}", f"resumed/{last}")


def test_lightning_module(tmp_path):
    pytest.importorskip("lightning", reason="needs lightning")
    learns_and_resumes("lightning_module", tmp_path)
    one = torch.load(tmp_path / "lightning/epoch=1.ckpt")
    other = torch.load(tmp_path / "resumed/epoch=1.ckpt")
    same_tensors(one["state_dict"], other["state_dict"])


def test_each_is_read_in_two_minutes():
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) == 6
    for file in files:
        assert len(file.read_text().splitlines()) < 60, file.name
