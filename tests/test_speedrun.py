"""speedrun.sh: what it starts on a node of GPUs (Python is a stand-in), and small runs on this machine."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from nanomuon.runtime import read_json
from nanomuon.shards import being_written
from tests.training import ROOT, call, losses, wait_until, write_corpus

ON_EIGHT_GPUS = f"""#!/bin/sh
case "$*" in
    *print_hardware*)
        echo 8 bfloat16
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


ON_A_CPU = f"""#!/bin/sh
case "$*" in
    *print_hardware*)
        echo 0 float32
        ;;
    *scripts.base_train*)
        echo "$@"
        ;;
    *)
        exec {sys.executable} "$@"
        ;;
esac
"""


def stand_in(folder, script):
    """The path of this script, for NANOMUON_PYTHON."""
    python = folder / "python"
    python.write_text(script)
    python.chmod(0o755)
    return str(python)


def speedrun(folder, *flags, sighup, redirection=""):
    """(exit code, stderr, {kind: command that it started}, the environment of the training). sighup: the
    handler of SIGHUP that it inherits. redirection: of its output.
    """
    signal.signal(signal.SIGHUP, sighup)
    variables = {"NANOMUON_PYTHON": stand_in(folder, ON_EIGHT_GPUS), "NANOMUON_BASE_DIR": str(folder)}
    result = call("bash", "-c", f'bash speedrun.sh "$@" {redirection}', "bash", *flags, **variables)
    commands = dict(line.split(": ", 1) for line in (folder / "started").read_text().splitlines())
    return result.returncode, result.stderr, commands, (folder / "environment").read_text()


def test_a_node_of_gpus_trains_under_torchrun_while_data_is_prepared(tmp_path, monkeypatch, handlers):
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SIGNALS_TO_HANDLE"):
        monkeypatch.delenv(name, raising=False)
    code, errors, commands, environment = speedrun(tmp_path, "--matrix-lr", "0.03", sighup=signal.SIG_DFL)
    training = commands["train"]
    assert "torch.distributed.run --standalone --local_addr=localhost --nproc_per_node=8" in training
    assert "--depth 24 --matrix-lr 0.03" in training and "--device-batch-size" not in training
    assert "--corpus hf:karpathy/climbmix-400b-shuffle" in training
    words = training.split("scripts.base_train -- ")[1]
    assert commands["data"] == f"-m scripts.data_prep -- {words}", "the same words"
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300\n" in environment  # seconds to write a checkpoint
    assert "PET_SIGNALS_TO_HANDLE" not in environment
    # the reason why the training ended without data
    assert code == 1 and errors.splitlines()[-1] == "data_prep failed: error: no room"


def test_under_nohup_torchrun_does_not_end_with_the_terminal(tmp_path, handlers):
    _, _, _, environment = speedrun(tmp_path, sighup=signal.SIG_IGN, redirection=">&-")
    assert "PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT\n" in environment


@pytest.mark.parametrize("version,code", [("2.10.1+cu126", 2), ("2.11.0+cu126", 0), ("3.0.0a0+git12", 0)])
def test_an_interpreter_with_any_pytorch_from_2_11_on_is_accepted(tmp_path, version, code):
    """Metadata as pip writes it stands in for a torch of this version."""
    about = tmp_path / f"torch-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    environment = {"NANOMUON_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    result = call("bash", "-c", "set -euo pipefail; source scripts/setup.sh train", **environment)
    assert result.returncode == code
    assert ("has no PyTorch 2.11 or newer: " in result.stderr) == (code == 2)


def on_this_machine(folder, *flags):
    """(command, keywords of Popen) of a small speedrun."""
    write_corpus(folder / "texts")
    small = "--max-seq-len 32 --device-batch-size 4 --total-batch-size 256 --eval-tokens 512 --save-every 20"
    variables = {"RUN": "mine", "DEPTH": "2", "VOCAB_SIZE": "300", "CORPUS": f"path:{folder}/texts"}
    variables |= {
        "NANOMUON_PYTHON": sys.executable,
        "NANOMUON_BASE_DIR": str(folder),
        "NANOMUON_DEVICE": "cpu",
    }
    environment = {**os.environ, **variables}
    keywords = dict(cwd=ROOT, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)
    return ["bash", "speedrun.sh", *small.split(), *flags], keywords


def test_every_variable_counts_and_other_flags_are_passed_on(tmp_path):
    command, keywords = on_this_machine(tmp_path, "--num-iterations", "2", "--seed=3")
    result = subprocess.run(command, **keywords)
    assert result.returncode == 0 and "more text" in result.stdout.lower(), result.stdout
    options = read_json(tmp_path / "runs" / "mine" / "settings.json")["options"]
    assert (options["depth"], options["vocab_size"], options["seed"]) == (2, 300, 3)
    assert options["corpus"] == f"path:{tmp_path}/texts" and options["num_iterations"] == 2
    # Without its flags, a run that exists keeps its length, and one that starts over gets the preset's
    keywords["env"]["NANOMUON_PYTHON"] = stand_in(tmp_path, ON_A_CPU)
    again = subprocess.run(["bash", "speedrun.sh", "--resume=never", "--plan"], **keywords).stdout
    assert "--total-batch-size 4096 " in again and "--num-iterations 300 --run mine --corpus" in again
    planned = subprocess.run(["bash", "speedrun.sh", "--plan"], **keywords).stdout
    assert f"{tmp_path}/runs/mine, trained on path:{tmp_path}/texts; it exists" in planned
    flags = f"--run mine --corpus path:{tmp_path}/texts --vocab-size 300 --depth 2 --plan\n"
    assert planned.endswith(f"-m scripts.base_train {flags}")
    assert "VOCAB_SIZE=1024" in subprocess.run([*command, "--help"], **keywords).stdout
    for flag in (["--depth", "3"], ["--run=other"]):
        refused = subprocess.run([*command, *flag], **keywords)
        variable = flag[0][2:].split("=")[0].upper()
        assert refused.returncode == 2 and f"{variable}=... bash speedrun.sh" in refused.stdout


# For NANOMUON_PYTHON: a training that waits for $SIGNALS signals and a moment more, and records what arrives
ON_A_TERMINAL = f"""#!/bin/sh
case "$*" in
    *print_hardware*)
        echo $GPUS float32
        ;;
    *scripts.base_train*)
        exec {sys.executable} -c '
import os, signal, sys, time
arrived = []
for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
    signal.signal(number, lambda number, frame: arrived.append(signal.Signals(number).name))
print("training", flush=True)
while len(arrived) < int(os.environ["SIGNALS"]):
    time.sleep(0.01)
time.sleep(0.3)
with open(os.environ["STOPPED"], "w") as file:
    file.write(" ".join(sorted(arrived)))
sys.exit(75)'
        ;;
    *scripts.data_prep*)
        ;;
    *)
        exec {sys.executable} "$@"
        ;;
esac
"""


def end(process, terminal):
    os.kill(process, signal.SIGTERM)


def press_ctrl_c(process, terminal):
    os.write(terminal, b"\x03")


def close(process, terminal):
    """The system then signals only the terminal's first process, which is bash."""
    os.close(terminal)


def close_for_all(process, terminal):
    """As some systems and ssh do."""
    os.killpg(process, signal.SIGHUP)


@pytest.mark.parametrize(
    "stop, gpus, arrives",
    [
        (end, 0, "SIGTERM"),
        (press_ctrl_c, 0, "SIGINT"),
        (close, 0, "SIGTERM"),
        (close_for_all, 0, "SIGHUP SIGTERM"),
        (close_for_all, 8, "SIGHUP"),  # torchrun would take a second signal for an order to end at once
    ],
)
def test_signals_reach_the_training_and_the_speedrun_waits_for_it_to_save(tmp_path, stop, gpus, arrives):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    stopped = tmp_path / "runs" / "mine" / "stopped"
    variables = {"NANOMUON_PYTHON": stand_in(tmp_path, ON_A_TERMINAL), "NANOMUON_BASE_DIR": str(tmp_path)}
    variables |= {"RUN": "mine", "CORPUS": "python", "GPUS": str(gpus), "STOPPED": str(stopped)}
    variables["SIGNALS"] = str(len(arrives.split()))
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would inherit that it is ignored
        os.chdir(ROOT)
        os.execvpe("bash", ["bash", "speedrun.sh"], os.environ | variables)
    output = b""
    while b"training\r\n" not in output:
        output += os.read(terminal, 4096)
    stop(process, terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 75
    assert stopped.read_text() == arrives


@pytest.mark.slow
def test_a_speedrun_that_is_stopped_finishes_and_then_skips_everything(tmp_path):
    command, keywords = on_this_machine(tmp_path, "--num-iterations", "60")
    process = subprocess.Popen(command, start_new_session=True, **keywords)
    wait_until(lambda: len(losses(tmp_path, "mine")) > 20, lambda: process.poll() is None, 300)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "stopped before its end" in output, output
    run = tmp_path / "runs" / "mine"
    assert (run / "stopped").exists() and not being_written(run)
    finished = subprocess.run(command, **keywords)
    assert finished.returncode == 0 and not (run / "stopped").exists(), finished.stdout
    assert len(losses(tmp_path, "mine")) == 60

    def written():
        files = tmp_path.glob("**/*")
        return {file: file.stat().st_mtime_ns for file in files if file.is_file() and file.suffix != ".lock"}

    before = written()
    del keywords["env"]["VOCAB_SIZE"]  # the run has recorded it
    again = subprocess.run(command, **keywords)
    assert again.returncode == 0 and "is complete" in again.stdout
    assert written() == before
