"""A family of runs as people train it: interrupted, enlarged, refused, asked; mostly with a trainer that is
made up, which leaves in a run's folder what base_train does.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from nanomuon import planning
from nanomuon.runtime import STOPPED, InputError, write_json
from scripts import base_train, scaling
from scripts.laboratory import scaling_report, scaling_runs
from tests.test_scaling import SMALL
from tests.training import losses, wait_until

FLAGS = "--max-seq-len 32 --total-batch-size 256".split()
MODEL = "--vocab-size 300 --device-batch-size 4 --dtype float32".split()
plot = scaling_report.plot
GRID = ("--depths", "1,2,3", "--tokens", "250k,500k,1M")

TIMES = ("seconds", "tokens_per_second")

pytestmark = pytest.mark.usefixtures("environment")


class MadeUp:
    """In place of subprocess.Popen: a base_train that ends at once, with the loss of a law."""

    commands = []  # arguments of every one that was started
    codes = {}  # by the end of the run's name: how it ends, where that is not 0

    def __init__(self, command, stdout, **keywords):
        self.argv = command[command.index("scripts.base_train") + 1 :]
        self.commands.append(self.argv)
        self.stdout = stdout

    def wait(self):
        args = base_train.parse_arguments(self.argv, {})
        base_train.check_arguments(args)
        for name, code in self.codes.items():
            if args.run.endswith(name):
                self.stdout.write(b"step 1\nerror: no such luck\n")
                return code
        folder = scaling_runs.run_folder.folder_of(args.run)
        folder.mkdir(parents=True)
        config = planning.model_config(args, args.vocab_size, planning_runtime())
        tokens = args.num_iterations * args.total_batch_size
        loss = SMALL.loss(scaling_runs.size_of(config).parameters, tokens)
        write_json(
            folder / "settings.json", {"options": {}, **vars(config), "trained_with": {"commit": "c0"}}
        )
        summary = {"val_bpb": round(loss, 4), "steps": args.num_iterations, "tokens": tokens, "seconds": 2.0}
        write_json(folder / "summary.json", summary | {"tokens_per_second": 1000, "dtype": "float32"})
        row = {"step": args.num_iterations, "tokens": tokens, "val_bpb": loss, "whole_set": True}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return 0


def planning_runtime():
    import torch

    from nanomuon.runtime import Runtime

    return Runtime(torch.device("cpu"), torch.float32)


@pytest.fixture
def family(base, tmp_path, monkeypatch):
    """family(*arguments) runs the script in this process, with the made-up trainer."""
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(scaling_runs.subprocess, "Popen", MadeUp)
    monkeypatch.setattr(MadeUp, "commands", [])
    monkeypatch.setattr(MadeUp, "codes", {})
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # of this process they stay
    monkeypatch.setattr(scaling_report, "plot", lambda findings, image: None)  # it takes its time
    corpus = ["--corpus", f"path:{base}/texts"]

    def run(*arguments, options=MODEL):
        return scaling.main([*FLAGS, *corpus, *arguments, "--", *options])

    return run


def test_a_family_is_trained_enlarged_and_asked(family, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(scaling_report, "plot", plot)
        family(*GRID)
    folder = tmp_path / "scaling" / "family"
    assert [argv[argv.index("--run") + 1] for argv in MadeUp.commands][:3] == [
        "family-d1-t250000",
        "family-d1-t500000",
        "family-d2-t250000",
    ]
    first = base_train.parse_arguments(MadeUp.commands[0], {})
    assert (first.depth, first.num_iterations, first.total_batch_size) == (1, round(250_000 / 256), 256)
    assert (first.vocab_size, first.max_seq_len, first.dtype) == (300, 32, "float32")
    assert len(MadeUp.commands) == 9
    output = capsys.readouterr().out
    assert "[9/9] depth 3, 999,936 tokens, " in output

    # The law is that of the made-up losses, and the files say so
    found = json.loads((folder / "scaling.json").read_text())
    assert found["law"]["E"][0] == pytest.approx(SMALL.E, rel=0.01) and found["noise"] < 1e-3
    assert found["law"]["alpha"][0] == pytest.approx(SMALL.alpha, rel=0.01)
    assert len(found["runs"]) == 9 and (folder / "scaling.png").stat().st_size > 10_000
    assert "\n![Loss over compute](scaling.png)\n" in (folder / "scaling.md").read_text()

    # The same again trains nothing; one more depth and number of tokens train only what is new
    kept = {file: file.read_bytes() for file in folder.glob("d*-t*.json")}
    MadeUp.commands.clear()
    family(*GRID)
    assert MadeUp.commands == [] and "9 of 9 runs are there already" in capsys.readouterr().out
    family("--depths", "4,1", "--tokens", "250k,2M")
    assert sorted(argv[argv.index("--run") + 1] for argv in MadeUp.commands) == [
        "family-d1-t2000000",
        "family-d4-t2000000",
        "family-d4-t250000",
    ]
    assert all(file.read_bytes() == content for file, content in kept.items())

    # Questions are answered without training, and need neither the runs nor the settings
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    MadeUp.commands.clear()
    capsys.readouterr()
    scaling.main(["--target-flops", "1e13", "--target-loss", "1.6", "--gpu-hours", "2"])
    output = capsys.readouterr().out
    assert MadeUp.commands == [] and "For 1e+13 FLOPs: depth " in output
    assert "For 1.6 bits per byte: depth " in output and "An extrapolation: " in output
    results = scaling_runs.read_results(folder)
    deepest = [result["flops_per_token"] for result in results if result["depth"] == 4][0]
    assert f"2 hours of a device at {1000 * deepest:.3g} FLOP/s. For {7.2e6 * deepest:.3g} FLOPs:" in output
    assert "python -m scripts.base_train --depth " in output and "--vocab-size 300" in output


def test_a_run_that_fails_or_stops_ends_it_and_the_rest_is_kept(family, tmp_path, capsys):
    arguments = ["--depths", "1,2", "--tokens", "5k"]
    MadeUp.codes = {"-d2-t5000": 2}
    with pytest.raises(InputError, match="family-d2-t5000 ended with exit code 2: no such luck"):
        family(*arguments)
    MadeUp.codes = {"-d2-t5000": STOPPED}
    with pytest.raises(SystemExit) as ended:
        family(*arguments)
    assert ended.value.code == STOPPED
    assert "stopped: 1 of 2 runs are kept, the same command goes on" in capsys.readouterr().out
    MadeUp.codes = {}
    MadeUp.commands.clear()
    family(*arguments)
    assert len(MadeUp.commands) == 1 and "No law is fitted" in capsys.readouterr().out
    # What a damaged result says is not believed
    (tmp_path / "scaling/family/d1-t5000.json").write_text('{"depth": "one"}')
    with pytest.raises(InputError, match="d1-t5000.json: .*; remove it, and that run is trained again"):
        family(*arguments)


def test_a_family_of_other_settings_is_refused(family, base, tmp_path):
    arguments = ["--depths", "1", "--tokens", "5k"]
    MadeUp.codes = {"t5000": 2}
    with pytest.raises(InputError, match="no such luck"):
        family(*arguments, "--total-batch-size", "384")
    MadeUp.codes = {}
    family(*arguments)  # nothing was trained with 384
    with pytest.raises(InputError, match="was trained with --total-batch-size 256, not 512: choose another"):
        family(*arguments, "--total-batch-size", "512")
    with pytest.raises(InputError, match="was trained with --matrix-lr its default, not 0.5: choose another"):
        family(*arguments, options=[*MODEL, "--matrix-lr", "0.5"])
    family(*arguments, options=[*MODEL, "--save-every", "7"])  # which no loss depends on

    file = tmp_path / "scaling/family/family.json"
    write_json(file, json.loads(file.read_text()) | {"code": "another"})
    family(*arguments)  # as long as nothing is trained
    with pytest.raises(InputError, match="was trained with code another, not .*: --accept-changes"):
        family("--depths", "2", "--tokens", "5k")
    family("--depths", "2", "--tokens", "5k", "--accept-changes")
    family("--depths", "3", "--tokens", "5k")

    (tmp_path / "runs/new-d1-t5000").mkdir()
    with pytest.raises(InputError, match="new-d1-t5000 exists and is not of this family"):
        family(*arguments, "--name", "new")


BAD_INPUT = {
    "no tokens": (["--depths", "1"], "--depths and --tokens go together"),
    "name": (["--name", "../x"], "is not a folder name"),
    "nothing there": (["--name", "none"], "family none has no finished run yet"),
    "loss": (["--target-loss", "0"], "--target-loss must be above 0 and finite, not 0"),
    "compute": (["--target-flops", "nan"], "--target-flops must be above 0 and finite, not nan"),
    "batch": (["--total-batch-size", "0"], "--total-batch-size must be at least 1"),
    "decided here": (["--", "--depth", "3"], "--depth after -- is for this command to decide"),
    "length": (["--", "--target-flops", "1e9"], "--target-flops after -- is for this command to decide"),
    "rate": (["--", "--matrix-lr", "-1"], "--matrix-lr must not be negative"),
    "corpus": (["--depths", "1", "--tokens", "5k", "--corpus", "path:/nope"], "path:/nope: no such file"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_in_one_line(family, tmp_path, case):
    extra, message = BAD_INPUT[case]
    with pytest.raises(InputError) as caught:
        scaling.main(extra)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("numbers", ["", "1,,2", "x", "1.5", "0", "-3", "inf", "1e30", "2kk"])
def test_numbers_that_are_none(numbers):
    with pytest.raises(InputError, match="^argument --depths: "):
        scaling.parse_arguments([f"--depths={numbers}", "--tokens", "1k"])


def test_numbers_with_their_multiples():
    args, flags = scaling.parse_arguments("--depths 1,2 --tokens 250k,1.5M,2B,1e3 -- --seed 1".split())
    assert args.depths == [1, 2] and args.tokens == [250_000, 1_500_000, 2_000_000_000, 1000]
    assert flags == ["--seed", "1"]


def test_the_batch_follows_the_tokens_as_in_base_train():
    (member,) = scaling_runs.members([4], [1_200_000_000], None, 2048)
    assert (member.batch, member.steps) == (2**19, round(1.2e9 / 2**19))
    assert scaling_runs.members([1], [100], None, 256)[0].steps == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        scaling.main(["--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "loss = E + A / N^alpha + B / D^beta" in output and "--target-loss BPB" in output


def command(base, *arguments):
    return [sys.executable, "-m", "scripts.scaling", *FLAGS, "--corpus", f"path:{base}/texts", *arguments]


def outcomes(base, name):
    """What the runs of a family came to, without their times."""
    results = scaling_runs.read_results(base / "scaling" / name)
    return [{key: value for key, value in result.items() if key not in TIMES} for result in results]


@pytest.mark.slow
def test_killed_and_stopped_in_the_middle_it_goes_on_to_the_same(base):
    """By real processes: killed with its trainer, stopped by SIGTERM, and gone on, equals uninterrupted."""
    arguments = ["--depths", "1,2", "--tokens", "15k", "--", *MODEL, "--save-every", "5", "--no-compile"]
    whole = subprocess.run(command(base, "--name", "whole", *arguments), capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr

    def started():
        return subprocess.Popen(command(base, "--name", "cut", *arguments), start_new_session=True)

    def in_step(depth, step, process):
        """Wait until the run of that depth has made that step."""
        wait_until(
            lambda: len(losses(base, f"cut-d{depth}-t15000")) >= step, lambda: process.poll() is None, 120
        )

    process = started()
    in_step(1, 12, process)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and outcomes(base, "cut") == []

    process = started()
    in_step(2, 12, process)
    before = {file: file.read_bytes() for file in (base / "scaling/cut").glob("d1-*.json")}
    assert len(before) == 1
    process.terminate()  # it alone: its trainer hears of it through it
    assert process.wait(60) == STOPPED
    assert (base / "runs/cut-d2-t15000/stopped").exists() and len(outcomes(base, "cut")) == 1

    assert started().wait(120) == 0
    assert outcomes(base, "cut") == outcomes(base, "whole") and len(outcomes(base, "whole")) == 2
    assert all(file.read_bytes() == content for file, content in before.items())
    for depth in (1, 2):
        cut, uninterrupted = (losses(base, f"{name}-d{depth}-t15000") for name in ("cut", "whole"))
        assert cut == uninterrupted and len(cut) == round(15_000 / 256)
    assert "resuming run cut-d2-t15000 at step" in (base / "scaling/cut/d2-t15000.log").read_text()

    asked = subprocess.run(command(base, "--name", "cut", "--depths", "1"), capture_output=True, text=True)
    assert asked.returncode == 2 and asked.stderr.count("\n") == 1 and asked.stdout == ""


@pytest.mark.slow
def test_several_processes_train_each_run(base):
    arguments = ["--depths", "1", "--tokens", "3k", "--name", "two", "--nproc-per-node", "2"]
    done = subprocess.run(command(base, *arguments, "--", *MODEL[:2]), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = scaling_runs.read_results(base / "scaling/two")
    assert result["processes"] == 2 and result["steps"] == 12
