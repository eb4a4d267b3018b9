"""`pip install` installs only the library. The scripts run from the checkout."""

import os
import re
import shutil

import pytest

import nanomuon
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.optim_groups import build_param_groups
from tests.training import ROOT, call


def settings():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements):
    return {re.match(r"[\w-]+", requirement).group() for requirement in requirements}


def test_setup_pins_everything_by_name_and_version_alone():
    """No address, hash, path or build; torch requires the packages for its CUDA itself."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    pinned = {line.partition("==")[0] for line in lines}
    for line in lines:
        assert re.fullmatch(r'[\w-]+==[\w.]+( ; python_version >= "3.1\d")?', line), line
    project = settings()["project"]
    extras = project["optional-dependencies"]
    needed = names(project["dependencies"] + extras["train"] + extras["dev"]) - {"nanomuon"}
    assert needed <= pinned
    assert not [name for name in pinned if name.startswith(("nvidia", "cuda"))]


def python(code):
    """What the code prints in a process of its own."""
    result = call("python", "-c", code)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_optimizer_needs_torch_alone():
    others = ["datasets", "matplotlib", "pyarrow", "rustbpe", "safetensors", "scipy", "tiktoken", "wandb"]
    code = f"import nanomuon.optim, sys; print([name for name in {others} if name in sys.modules])"
    assert python(code) == "[]"


def test_the_package_has_three_names():
    assert nanomuon.MuonAdamW is MuonAdamW and nanomuon.DistMuonAdamW is DistMuonAdamW
    assert nanomuon.build_param_groups is build_param_groups
    assert set(nanomuon.__all__) == {"MuonAdamW", "DistMuonAdamW", "build_param_groups"}


STAND_IN = """#!/usr/bin/env bash
# Instead of python3 and of the environment's python: notes what would be installed
case "$*" in
    "-c print(open("*) cat .venv/installed ;;
    "-m venv --clear .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo venv >>calls ;;
    "-m pip install"*" -c constraints.txt "*) echo "${@: -1}" >>calls; [ ! -e broken ] ;;
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
    for file in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def set_up(checkout, extra):
    """(exit code, what was called): `venv` and the last words of `pip install`."""
    (checkout / "calls").write_text("")
    command = f"set -euo pipefail; source scripts/setup.sh {extra}; [ $PYTHON = .venv/bin/python ]"
    result = call("bash", "-c", command, "bash", "dev", folder=checkout)
    return result.returncode, (checkout / "calls").read_text().split()


def test_the_environment_is_created_once_and_completed_if_it_is_half_made(checkout):
    assert set_up(checkout, "train") == (0, ["venv", ".[train]"])
    assert set_up(checkout, "train") == (0, [])
    assert set_up(checkout, "dev") == (0, [".[dev]"])
    assert set_up(checkout, "train") == (0, [])  # dev includes it
    for file in ("pyproject.toml", "constraints.txt"):
        with open(checkout / file, "a") as lines:
            lines.write("# more\n")
        assert set_up(checkout, "train") == (0, [".[train]"])
    (checkout / "broken").touch()
    assert set_up(checkout, "dev") == (2, [".[dev]"])
    (checkout / "broken").unlink()
    assert set_up(checkout, "train") == (0, [".[train]"])  # the failure may have broken one of its packages
    (checkout / ".venv" / "bin" / "python").unlink()
    assert set_up(checkout, "train") == (0, ["venv", ".[train]"])  # its Python is gone
