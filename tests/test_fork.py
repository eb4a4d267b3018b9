"""A fork that changes the model changes only gpt.py."""

import shutil

import pytest
import torch

from nanomuon import parallel
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.parallel import parallelize
from nanomuon.runtime import InputError
from scripts import sample
from tests.mistakes import refused
from tests.training import QUIET, ROOT, arguments, call, losses
from tests.worlds import run_world

pytest.importorskip("transformers")
SWIGLU = {
    """        self.up = Linear(config.width, 4 * config.width, cut="outputs")
""": """        self.gate = Linear(config.width, 4 * config.width, cut="outputs")
        self.up = Linear(config.width, 4 * config.width, cut="outputs")
""",
    "F.relu(self.up(x)).square()": "F.silu(self.gate(x)) * self.up(x)",
    "block.mlp.up)": "block.mlp.up, block.mlp.gate)",
}
USE_IT = """
import sys, torch, transformers
from scripts import base_train, export, sample
from nanomuon import report, trained
from nanomuon.runtime import Runtime
report.plot_run = lambda metrics, image: image.touch()  # as in all tests but test_report.py
folder, *flags = sys.argv[1:]
assert base_train.main([*flags, "--plan"]) == base_train.main(flags) == 0
assert base_train.main(["--run", "swiglu", "--num-iterations", "10"]) == 0
sample.main(["--run", "swiglu", "--max-tokens", "4"])
export.main(["--run", "swiglu", "--to", folder])
from pathlib import Path
model = trained.load_model(Path(folder), Runtime(torch.device("cpu"), torch.float32))
theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    tokens = torch.arange(32)[None]
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=1e-4)
"""


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A copy of the repo whose MLP is a SwiGLU."""
    folder = tmp_path_factory.mktemp("fork")
    for name in ("nanomuon", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "nanomuon" / "gpt.py"
    text = file.read_text()
    for old, new in SWIGLU.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)
    return folder


def in_fork(fork, *command):
    result = call(*command, folder=fork, PYTHONPATH=str(fork))
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.usefixtures("environment")
def test_a_model_with_another_mlp_is_planned_trained_resumed_sampled_and_exported(
    fork, base, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "swiglu"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    printed = in_fork(fork, "python", "-c", USE_IT, str(folder), *arguments(base, "swiglu", 6, *QUIET))
    parameters = sum(p.numel() for p in GPT(GPTConfig.from_depth(2, 300, 32)).parameters()) + 2 * 4 * 128**2
    assert f"{parameters / 1e6:.1f}M parameters" in printed and "warning" not in printed
    assert len(losses(base, "swiglu")) == 10

    with refused("blocks.0.mlp.gate.weight"):
        sample.main(["--run", "swiglu"])
    line = "warning: the model's code has changed since run swiglu used it: gpt.py\n"
    assert line in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_another_mlp_is_cut_by_tensor_parallelism(fork, base):
    torchrun = ["torchrun", "--standalone", "--nproc_per_node=2"]
    in_fork(fork, "python", "-m", "scripts.base_train", *arguments(base, "whole", 8, *QUIET))
    flags = arguments(base, "cut", 8, *QUIET, "--tensor-parallel", "2")
    in_fork(fork, *torchrun, "-m", "scripts.base_train", "--", *flags)
    assert losses(base, "cut") == pytest.approx(losses(base, "whole"), abs=1e-4)


CONFIG = GPTConfig(vocab_size=67, seq_len=8, depth=1, width=24, heads=4, kv_heads=4)


def forget_its_cut(model):
    model.blocks[0].mlp.up.cut = None


def add_vectors(model):
    block = model.blocks[0]
    block.norm = torch.nn.RMSNorm(24, device="meta")
    block.attn.norm = torch.nn.RMSNorm(6, device="meta")


def refusal(group, change):
    with torch.device("meta"):
        model = GPT(CONFIG)
    change(model)
    with pytest.raises(InputError) as error:
        parallelize(model, parallel.device_mesh("cpu", 1, 2), fsdp=False)
    return str(error.value)


@pytest.mark.parametrize(
    "change, said",
    [
        (forget_its_cut, "--tensor-parallel 2 cannot divide blocks.0.mlp.up.weight, (96, 24): "),
        (add_vectors, "--tensor-parallel 2 cannot train blocks.0.attn.norm.weight: "),
    ],
)
def test_a_parameter_that_tensor_parallelism_would_train_wrongly_is_refused(change, said):
    assert all(message.startswith(said) for message in run_world(2, refusal, change))
