"""What `pip install` puts on a machine: the library alone. The scripts are run from the checkout."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanomuon
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.param_groups import build_param_groups

ROOT = Path(__file__).parent.parent


def settings():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def installed_packages():
    return settings()["tool"]["setuptools"]["packages"]


def test_scripts_is_no_top_level_package():
    assert installed_packages() == ["nanomuon"]


def test_the_list_of_packages_has_all_modules_of_the_library():
    """Setuptools takes the folders that are listed and none inside them."""
    folders = {file.parent for file in (ROOT / "nanomuon").rglob("*.py")}
    assert folders == {ROOT / package for package in installed_packages()}


def names(requirements):
    return {re.match(r"[\w-]+", requirement).group() for requirement in requirements}


def test_the_library_pulls_two_packages_and_the_extras_bring_the_rest():
    project = settings()["project"]
    extras = {extra: names(packages) for extra, packages in project["optional-dependencies"].items()}
    assert names(project["dependencies"]) == {"torch", "numpy"}
    assert extras.keys() == {"train", "dev", "peers", "fp8", "flash"}
    assert {"pytest", "transformers", "tokenizers", "accelerate"} < extras["dev"]
    assert "nanomuon[train]" in project["optional-dependencies"]["dev"]
    assert extras["peers"] == {"lm-eval", "torchao"}
    assert extras["fp8"] == {"torchao"} and extras["flash"] == {"flash-attn-4"}


def python(code, *, executable=sys.executable, cwd=ROOT):
    """What the code prints in a process of its own."""
    result = subprocess.run([executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_optimizer_needs_torch_alone():
    others = ["datasets", "matplotlib", "pyarrow", "rustbpe", "safetensors", "scipy", "tiktoken", "wandb"]
    code = f"import nanomuon.optim, sys; print([name for name in {others} if name in sys.modules])"
    assert python(code) == "[]"


def test_the_package_has_three_names_which_are_loaded_when_asked_for():
    assert nanomuon.MuonAdamW is MuonAdamW and nanomuon.DistMuonAdamW is DistMuonAdamW
    assert nanomuon.build_param_groups is build_param_groups
    assert set(nanomuon.__all__) == {"MuonAdamW", "DistMuonAdamW", "build_param_groups"} < set(dir(nanomuon))
    with pytest.raises(AttributeError, match="module 'nanomuon' has no attribute 'Muon'"):
        nanomuon.Muon  # noqa: B018
    loaded = "print('nanomuon.optim' in sys.modules, 'nanomuon.param_groups' in sys.modules)"
    assert python(f"import nanomuon.gpt, sys; {loaded}") == "False False"
    assert python(f"from nanomuon import build_param_groups; import sys; {loaded}") == "False True"
    assert python(f"from nanomuon import *; import sys; {loaded}") == "True True"


STAND_IN = """#!/usr/bin/env bash
# In place of python3 and of the environment's python: writes down what would be installed
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo venv >>calls ;;
    "-m pip install"*) echo "${@: -1}" >>calls; [ ! -e broken ] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with scripts/setup.sh where nothing is installed, and stand-ins for Python."""
    monkeypatch.delenv("NANOMUON_PYTHON", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(STAND_IN)
    (tmp_path / "bin" / "python3").chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def set_up(checkout, extra):
    """(exit code, what was called): `venv` and the last words of `pip install`."""
    (checkout / "calls").write_text("")
    command = f"set -euo pipefail; source scripts/setup.sh {extra}; [ $PYTHON = .venv/bin/python ]"
    result = subprocess.run(["bash", "-c", command, "bash", "dev"], cwd=checkout, capture_output=True)
    return result.returncode, (checkout / "calls").read_text().split()


TORCH = "torch==2.13.0"


def test_the_environment_of_the_speedrun_and_then_that_of_the_tests(checkout):
    assert set_up(checkout, "train") == (0, ["venv", TORCH, ".[train]"])
    assert set_up(checkout, "train") == (0, [])
    assert set_up(checkout, "dev") == (0, [TORCH, ".[dev]"])
    assert set_up(checkout, "dev") == (0, [])
    assert set_up(checkout, "train") == (0, [])  # dev has all of it
    with open(checkout / "pyproject.toml", "a") as file:
        file.write("# more\n")
    assert set_up(checkout, "train") == (0, [TORCH, ".[train]"])
    assert set_up(checkout, "dev") == (0, [TORCH, ".[dev]"])


def test_an_environment_that_is_half_made_is_mended(checkout):
    (checkout / "broken").touch()
    assert set_up(checkout, "train") == (2, ["venv", TORCH])
    assert set_up(checkout, "train") == (2, [TORCH])
    (checkout / "broken").unlink()
    assert set_up(checkout, "train") == (0, [TORCH, ".[train]"])
    (checkout / "broken").touch()
    assert set_up(checkout, "dev") == (2, [TORCH])
    (checkout / "broken").unlink()
    assert set_up(checkout, "train") == (0, [TORCH, ".[train]"])  # what broke may be one of its packages
    (checkout / ".venv" / "bin" / "python").unlink()
    assert set_up(checkout, "dev") == (0, ["venv", TORCH, ".[dev]"])


@pytest.mark.parametrize("script,extra", [("speedrun.sh", "train"), ("tests/run.sh", "dev")])
def test_who_asks_for_which_environment(script, extra):
    lines = (ROOT / script).read_text().splitlines()
    assert [line for line in lines if line.startswith("source")] == [f"source scripts/setup.sh {extra}"]


SMOKE = """
import torch
from nanomuon import MuonAdamW, build_param_groups
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
muon = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0)
adamw = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
optimizer = MuonAdamW(build_param_groups(model, muon=muon, adamw=adamw))
before = [param.detach().clone() for param in model.parameters()]
model(torch.ones(4, 8)).square().mean().backward()
optimizer.step()
for param, old in zip(model.parameters(), before):
    assert param.isfinite().all() and not torch.equal(param, old)
print([group["kind"] for group in optimizer.param_groups])
"""


def with_requirements(*packages):
    """The distributions of these packages and of all that they require here."""
    found, waiting = {}, list(packages)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # required on other machines
            continue
        requirements = found[name].requires or []
        for requirement in requirements:
            if "extra ==" not in requirement:
                waiting.append(re.match(r"[\w.-]+", requirement).group())
    return list(found.values())


@pytest.mark.slow
def test_the_wheel_in_an_environment_that_has_torch_and_numpy_alone(tmp_path, monkeypatch):
    for needed in ("pip", "setuptools"):
        if not importlib.util.find_spec(needed):
            pytest.skip(f"{needed} is not installed, which builds wheels")
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    source = tmp_path / "source"  # a build leaves files beside its sources
    source.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for folder in ("nanomuon", "scripts"):
        shutil.copytree(ROOT / folder, source / folder)

    def run(*command):
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", ".", "./source")
    [wheel] = tmp_path.glob("nanomuon-*.whl")
    run(sys.executable, "-m", "venv", "env")
    [site_packages] = tmp_path.glob("env/lib/python*/site-packages")
    for distribution in with_requirements("torch", "numpy"):
        for top in {file.parts[0] for file in distribution.files}:
            link = site_packages / top
            if top not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(distribution.locate_file(top))
    # Without an index pip refuses what is not there: nothing but torch and numpy is asked for
    run("env/bin/python", "-m", "pip", "install", "--no-index", wheel.name)
    assert python(SMOKE, executable=tmp_path / "env/bin/python", cwd=tmp_path) == "['muon', 'adamw']"
    where = python(
        "import importlib.util, nanomuon; print(nanomuon.__file__, importlib.util.find_spec('scripts'))",
        executable=tmp_path / "env/bin/python",
        cwd=tmp_path,
    )
    assert where == f"{site_packages}/nanomuon/__init__.py None"
