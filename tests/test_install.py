"""What `pip install` puts on a machine: the library alone. The scripts are run from the checkout."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def installed_packages():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return settings["tool"]["setuptools"]["packages"]


def test_scripts_is_no_top_level_package():
    assert installed_packages() == ["nanomuon"]


def test_the_list_of_packages_has_all_modules_of_the_library():
    """Setuptools takes the folders that are listed and none inside them."""
    folders = {file.parent for file in (ROOT / "nanomuon").rglob("*.py")}
    assert folders == {ROOT / package for package in installed_packages()}


def test_the_optimizer_needs_torch_alone():
    others = ["datasets", "matplotlib", "pyarrow", "rustbpe", "safetensors", "scipy", "tiktoken", "wandb"]
    code = f"import nanomuon.optim, sys; print([name for name in {others} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
