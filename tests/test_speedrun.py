"""What speedrun.sh starts on a node of GPUs, by a stand-in for Python: nothing is trained."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from torch.distributed.launcher.api import LaunchConfig

ROOT = Path(__file__).parents[1]
ON_EIGHT_GPUS = f"""#!/bin/sh
case "$*" in
    *print_hardware*)
        echo 8 bfloat16
        ;;
    *scripts.base_train*--plan)
        echo "plan: $@" >>"$NANOMUON_BASE_DIR/started"
        echo "training   10 steps x 100 tokens = 1,000 tokens, 1 MFLOP each, 1e9 FLOPs in all"
        ;;
    *scripts.base_train*)
        echo "train: $@" >>"$NANOMUON_BASE_DIR/started"
        env >"$NANOMUON_BASE_DIR/environment"
        until [ -e "$NANOMUON_BASE_DIR/data_prep_pid" ]; do sleep 0.1; done
        while kill -0 "$(cat "$NANOMUON_BASE_DIR/data_prep_pid")" 2>/dev/null; do sleep 0.1; done
        exit 1
        ;;
    *scripts.data_prep*)
        echo $$ >"$NANOMUON_BASE_DIR/pid" && mv "$NANOMUON_BASE_DIR/pid" "$NANOMUON_BASE_DIR/data_prep_pid"
        echo "data: $@" >>"$NANOMUON_BASE_DIR/started"
        echo "error: no room"
        exit 2
        ;;
    *)
        exec {sys.executable} "$@"
        ;;
esac
"""


def speedrun(folder, *flags, hang_up=signal.SIG_DFL):
    """(exit code, what it has said on stderr, its commands by kind, the environment of the training).

    hang_up: what it does at SIGHUP to begin with.
    """
    python = folder / "python"
    python.write_text(ON_EIGHT_GPUS)
    python.chmod(0o755)
    environment = {**os.environ, "NANOMUON_PYTHON": str(python), "NANOMUON_BASE_DIR": str(folder)}
    result = subprocess.run(
        ["bash", "speedrun.sh", *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hang_up),
    )
    commands = dict(line.split(": ", 1) for line in (folder / "started").read_text().splitlines())
    lines = (folder / "environment").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    return result.returncode, result.stderr, commands, variables


def test_a_node_of_gpus(tmp_path, monkeypatch):
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SIGNALS_TO_HANDLE"):
        monkeypatch.delenv(name, raising=False)
    code, errors, commands, environment = speedrun(tmp_path, "--matrix-lr", "0.03")
    training, plan = commands["train"], commands["plan"]
    assert "torch.distributed.run --standalone --local_addr=localhost --nproc_per_node=8" in training
    assert "--depth 24 --matrix-lr 0.03" in training and "--device-batch-size" not in training
    # The GPUs are not asked how many rows fit them before the data is on its way
    assert plan == training.replace(" -- ", " -- --device-batch-size 1 ") + " --plan"
    assert commands["data"].endswith(
        "scripts.data_prep --corpus hf:karpathy/climbmix-400b-shuffle --max-tokens 1000"
    )
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= 300  # seconds to write a checkpoint
    assert "PET_SIGNALS_TO_HANDLE" not in environment
    # What the training has waited for in vain
    assert code == 1 and errors.splitlines()[-1] == "data_prep has failed: error: no room"


def test_under_nohup_torchrun_does_not_end_with_the_terminal(tmp_path):
    _, _, _, environment = speedrun(tmp_path, hang_up=signal.SIG_IGN)
    assert environment["PET_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGINT,SIGQUIT"


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="an earlier torchrun may not know them")
def test_torchrun_reads_what_the_speedrun_sets(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    command = [
        "--standalone",
        "--local_addr=localhost",
        "--nproc_per_node=2",
        "-m",
        "scripts.base_train",
        "--",
    ]
    config, _, _ = torch.distributed.run.config_from_args(torch.distributed.run.parse_args(command))
    assert isinstance(config, LaunchConfig)
    assert (config.shutdown_timeout, config.local_addr) == (300, "localhost")
    assert config.signals_to_handle == "SIGTERM,SIGINT,SIGQUIT"
