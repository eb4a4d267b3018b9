"""Runs that survive: killed, stopped, moved to other world sizes, out of disk, out of finite numbers."""

import json
import math
import os
import random
import resource
import signal
import time
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file

from nanomuon import checkpoint, dataloader, files, shards
from nanomuon.corpus import open_corpus
from nanomuon.gpt import GPT
from nanomuon.optim import MuonAdamW
from nanomuon.parallel import gradients_finite
from nanomuon.run import Run
from nanomuon.run_folder import StopSignals
from nanomuon.runtime import STOPPED, InputError
from scripts import base_train
from tests.training import Ranks, arguments, children, launch, losses, rows, wait_until, write_corpus

pytestmark = pytest.mark.usefixtures("environment")

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # each of which asks a run to stop
QUIET = ("--eval-every", "-1", "--save-every", "-1")
OPTIONS = ("--eval-every", "25", "--save-every", "4")


@pytest.fixture(scope="module")
def whole(base):
    """100 steps without interruption."""
    ranks = Ranks(base, "whole", 100, *OPTIONS)
    assert ranks.join() == [0], ranks.output()
    return base / "runs" / "whole"


def final_state(run_dir):
    """Model, optimizer state and random state after the last step."""
    return load_file(checkpoint.find(run_dir) / "rank_0.safetensors")


def samples(run_dir):
    return (run_dir / "report.md").read_text().split("## Samples")[1].split("##")[0]


def assert_same_run(ours, theirs):
    """Bit for bit: every row in order, parameters and state, the model and what it writes."""
    assert rows(ours.parent.parent, ours.name) == rows(theirs.parent.parent, theirs.name)
    for read in (final_state, lambda run: load_file(run / "model.safetensors")):
        mine, other = read(ours), read(theirs)
        assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
    assert samples(ours) == samples(theirs)


def test_killed_at_random_moments_a_run_ends_as_if_nothing_had_happened(base, whole):
    """And as if its newest checkpoint had not been damaged."""
    generator, run_dir = random.Random(0), base / "runs" / "killed"
    for _ in range(3):
        saved = max(checkpoint.saved_steps(run_dir), default=0)
        ranks, far = Ranks(base, "killed", 100, *OPTIONS), saved + generator.randint(8, 28)
        wait_until(lambda far=far: len(losses(base, "killed")) >= far, ranks.alive)
        time.sleep(generator.uniform(0, 0.03))
        ranks.kill(signal.SIGKILL)
        assert ranks.join() == [-signal.SIGKILL]
        assert max(checkpoint.saved_steps(run_dir)) > saved
    # There are three if the last kill came before the oldest was removed
    *_, previous, newest = checkpoint.saved_steps(run_dir)
    file = run_dir / "checkpoints" / f"step_{newest}" / "rank_0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    ranks = Ranks(base, "killed", 100, *OPTIONS)
    assert ranks.join() == [0]
    assert f"{file} has" in ranks.output()
    assert f"resuming run killed at step {previous}\n" in ranks.output()
    assert_same_run(run_dir, whole)


def test_one_process_becomes_two(base, whole):
    ranks = Ranks(base, "grown", 100, *OPTIONS)
    wait_until(lambda: 48 in checkpoint.saved_steps(base / "runs" / "grown"), ranks.alive)
    ranks.kill(signal.SIGKILL)
    ranks.join()
    ranks = Ranks(base, "grown", 100, *OPTIONS, processes=2)
    assert ranks.join() == [0, 0], ranks.output()
    ours, theirs = rows(base, "grown"), rows(base, "whole")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        key = "train_loss" if "train_loss" in mine else "val_bpb"
        assert mine[key] == pytest.approx(other[key], abs=1e-4)


def test_torchrun_replaces_a_dead_rank_and_hands_on_sigterm(base, whole):
    process = launch(
        base, "torchrun", 100, "--eval-every", "25", "--save-every", "5", processes=2, restarts=1
    )
    alive = lambda: process.poll() is None  # noqa: E731
    wait_until(lambda: len(losses(base, "torchrun")) > 11, alive)
    first = children(process.pid)
    os.kill(first[1], signal.SIGKILL)
    wait_until(lambda: len(children(process.pid)) == 2 and not set(first) & set(children(process.pid)), alive)
    far = len(losses(base, "torchrun"))  # on a busy machine anything; the new ranks have to go beyond it
    wait_until(lambda: len(losses(base, "torchrun")) > max(30, far + 2), alive)
    workers = children(process.pid)
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert "resuming run torchrun at step" in output
    trained = losses(base, "torchrun")
    assert len(trained) < 100 and f"stopped at step {len(trained)} and saved" in output, output
    assert checkpoint.saved_steps(base / "runs" / "torchrun")[-1] == len(trained)
    note = base / "runs" / "torchrun" / "stopped"
    assert note.read_text() == f"stopped at step {len(trained)} and saved; the same command carries on\n"
    assert not any(os.path.exists(f"/proc/{worker}") for worker in workers)
    expected = losses(base, "whole")[: len(trained)]
    assert max(abs(a - b) for a, b in zip(trained, expected, strict=True)) < 1e-4


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_and_leaves_a_note(base, number):
    run = f"signal-{number.name}"
    ranks = Ranks(base, run, 5000, *QUIET)
    wait_until(lambda: len(losses(base, run)) > 2, ranks.alive)
    ranks.kill(number)
    assert ranks.join() == [STOPPED], ranks.output()
    step = len(losses(base, run))
    assert checkpoint.saved_steps(base / "runs" / run) == [step]
    line = f"stopped at step {step} and saved; the same command carries on\n"
    note = base / "runs" / run / "stopped"
    assert note.read_text() == line and ranks.output().endswith(line)
    if number == signal.SIGHUP:
        assert base_train.main(arguments(base, run, step + 1, *QUIET)) == 0
        assert not note.exists() and len(losses(base, run)) == step + 1


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_during_the_start_ends_it_with_a_line(base, processes):
    """While it waits for its data, which another process is preparing."""
    run = f"starting-{processes}"
    size = 256 + 10 * processes
    with files.locked(shards.shard_folder(open_corpus(f"path:{base}/texts"), size)):
        ranks = Ranks(base, run, 5, "--vocab-size", str(size), *QUIET, processes=processes)
        wait_until(lambda: "waiting for it" in ranks.output(), ranks.alive)
        ranks.kill(signal.SIGTERM)
        codes = ranks.join(20)
    assert codes == ([STOPPED] if processes == 1 else [0, 0]), ranks.output()
    line = "stopped before its first step; the same command carries on\n"
    assert ranks.output().count(line) == 1 and ranks.output().endswith(line)
    assert (base / "runs" / run / "stopped").read_text() == line


def stopped_before_it_holds(run_dir):
    """The exit code of a process that gets SIGTERM when its handlers are in place, and no more."""
    child = os.fork()
    if child == 0:
        StopSignals(run_dir)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_signal_before_anything_is_looked_at_leaves_a_note(tmp_path):
    """But none of a launch that only plans."""
    run_dir = tmp_path / "runs" / "early"
    assert stopped_before_it_holds(None) == STOPPED and not run_dir.exists()
    assert stopped_before_it_holds(run_dir) == STOPPED
    assert (run_dir / "stopped").read_text().startswith("stopped before its first step; the same command")


def test_what_nohup_ignores_stays_ignored():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for ignored in (True, False):
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            StopSignals(None)
            assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) is ignored
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_second_sigint_stops_at_once(base):
    file = base / "sleeper.py"
    file.write_text("""
import time
import torch
class Sleeper(torch.optim.SGD):
    def step(self):
        time.sleep(60)
def build_optimizer(model):
    return Sleeper(model.parameters(), lr=0.1)
""")
    ranks = Ranks(base, "sleeper", 5, "--optimizer-file", str(file), *QUIET)
    wait_until(lambda: "micro-steps a step" in ranks.output(), ranks.alive)
    time.sleep(1)
    ranks.kill(signal.SIGINT)
    time.sleep(0.2)
    assert ranks.alive()
    ranks.kill(signal.SIGINT)
    assert ranks.join(5) == [-signal.SIGINT]


POISON = """
import torch
import torch.distributed as dist
from nanomuon.optim import DistMuonAdamW
from nanomuon.param_groups import build_param_groups
def build_optimizer(model):
    calls = 0
    def poison(gradient):
        nonlocal calls
        calls += 1
        bad = dist.get_rank() == 1 and calls in (5, 7)  # a micro-step each
        return gradient * float("nan") if bad else gradient
    model.lm_head.weight.register_hook(poison)
    BUILD
"""
MUON = """return DistMuonAdamW(build_param_groups(
        model, muon=dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0),
        adamw=dict(lr=1e-3, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)))"""
ADAMW = "return torch.optim.AdamW(model.parameters(), lr=1e-3)"


@pytest.mark.parametrize("name,build", [("muon", MUON), ("adamw", ADAMW)])
def test_nan_on_one_rank_skips_the_step_on_all(base, name, build):
    file = base / f"poison-{name}.py"
    file.write_text(POISON.replace("BUILD", build))
    run, asked = f"poison-{name}", ("--save-every", "1", "--keep-last", "20")
    ranks = Ranks(base, run, 12, "--optimizer-file", str(file), *QUIET, *asked, processes=2)
    assert ranks.join() == [0, 0], ranks.output()
    trained = rows(base, run)[:-1]
    assert [row["skipped_steps"] for row in trained] == [0] * 4 + [1] * 2 + [2] * 6
    assert ranks.output().count("not finite: no update (1 in a row)") == 2
    states = {}
    for path in (base / "runs" / run / "checkpoints").glob("step_*"):
        tensors = {}
        for part in path.glob("*.safetensors"):
            tensors |= load_file(part)
        states[int(path.name[5:])] = {
            key: value for key, value in tensors.items() if not key.startswith("random")
        }
    assert len(states) > 3
    for before, after, same in ((4, 5, True), (5, 6, False), (6, 7, True)):
        if {before, after} <= states.keys():
            equal = [torch.equal(states[before][key], states[after][key]) for key in states[before]]
            assert all(equal) == same, (before, after)
    assert all(value.isfinite().all() for value in states[12].values())


def test_the_optimizer_is_told_of_a_loss_that_is_not_finite_and_skips(base, monkeypatch):
    """The gradients of that step are finite: by itself the optimizer sees nothing wrong."""
    forward, step = GPT.forward, MuonAdamW.step
    told, moved = [], []

    def nan_in_the_third_step(model, *inputs, **options):
        loss = forward(model, *inputs, **options)
        return loss + math.nan if len(told) == 2 else loss

    def listen(optimizer, closure=None, *, finite=True):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        assert all(param.grad.isfinite().all() for param in params)
        before = [param.detach().clone() for param in params]
        step(optimizer, closure, finite=finite)
        told.append(finite)
        moved.append(not all(map(torch.equal, before, params)))

    monkeypatch.setattr(GPT, "forward", nan_in_the_third_step)
    monkeypatch.setattr(MuonAdamW, "step", listen)
    assert base_train.main(arguments(base, "told", 5, *QUIET)) == 0
    assert told == moved == [True, True, False, True, True]
    trained = rows(base, "told")[:-1]
    assert [row["skipped_steps"] for row in trained] == [0, 0, 1, 1, 1] and trained[2]["train_loss"] is None


EXPLODES = """
import torch
class Late(torch.optim.SGD):
    calls = 0
    def step(self):
        self.calls += 1
        if self.calls == 6:  # explodes just before a checkpoint
            self.param_groups[0]["lr"] = 1e30
        super().step()
def build_optimizer(model):
    return Late(model.parameters(), lr=1e-3)
"""


def test_too_many_bad_steps_name_the_last_checkpoint_that_trained_on(base, capsys):
    file = base / "late.py"
    file.write_text(EXPLODES)
    options = ("--optimizer-file", str(file), "--eval-every", "-1", "--save-every", "3")
    assert base_train.main(arguments(base, "late", 100, *options)) == 1
    message = "10 losses in a row are not finite, or their gradients; --resume step_3 goes on from the last"
    assert message in capsys.readouterr().err
    assert len(losses(base, "late")) == 16 and checkpoint.saved_steps(base / "runs" / "late") == [3, 6]


def test_what_an_optimizer_keeps_in_its_param_groups_goes_on(base):
    """Schedule-Free and Prodigy count and estimate there; a value that is given anew counts all the same."""
    file = base / "counting.py"
    file.write_text("""
import torch
class Counting(torch.optim.SGD):
    def step(self):
        group = self.param_groups[0]
        group["k"] += 1
        group["estimate"].mul_(0.9)
        group["weight_decay"] = group["k"] * 1e-3
        group["lr"] = 0.1 / group["k"] + group["estimate"].item() * group["given"]
        super().step()
def build_optimizer(model):
    groups = [dict(params=list(model.parameters()), k=0, estimate=torch.ones(()), given=1.0)]
    return Counting(groups, lr=0.1)
def schedule(group, step, steps):
    return {}
""")
    options = ("--optimizer-file", str(file), "--eval-every", "-1")
    assert base_train.main(arguments(base, "counting", 6, *options)) == 0
    assert base_train.main(arguments(base, "counting_twice", 3, *options)) == 0
    assert base_train.main(arguments(base, "counting_twice", 6, *options)) == 0
    assert losses(base, "counting") == losses(base, "counting_twice")


def test_a_rate_that_is_a_tensor_and_no_rate_at_all(base):
    for run, rate, expected in (
        ("tensor_rate", "lr=torch.tensor(1e-3)", 1.0),
        ("no_rate", "rate=1e-3", None),
    ):
        file = base / f"{run}.py"
        file.write_text(f"""
import torch
class Plain(torch.optim.Optimizer):
    def step(self):
        for param in self.param_groups[0]["params"]:
            param.data.sub_(1e-3 * param.grad)
def build_optimizer(model):
    return Plain(model.parameters(), dict({rate}))
def schedule(group, step, steps):
    return {{}}
""")
        assert base_train.main(arguments(base, run, 2, "--optimizer-file", str(file), *QUIET)) == 0
        assert [row["lr_multiplier"] for row in rows(base, run) if "train_loss" in row] == [expected] * 2


def test_a_lock_that_somebody_removed_ends_no_run(base):
    file = base / "removes.py"
    file.write_text("""
import os
from pathlib import Path
import torch
class Removes(torch.optim.SGD):
    def step(self):
        super().step()
        Path(os.environ["NANOMUON_BASE_DIR"], "runs", ".removes.lock").unlink(missing_ok=True)
def build_optimizer(model):
    return Removes(model.parameters(), lr=1e-3)
""")
    assert (
        base_train.main(arguments(base, "removes", 4, "--optimizer-file", str(file), "--save-every", "2"))
        == 0
    )
    assert checkpoint.saved_steps(base / "runs" / "removes") == [2, 4]


def test_gradients_that_are_not_finite_are_seen_where_there_are_any():
    model = torch.nn.Linear(3, 2)
    model.weight.grad = torch.ones(2, 3)  # the bias has none
    assert gradients_finite(model)
    model.weight.grad[1, 1] = math.inf
    assert not gradients_finite(model)


def without_space(work, *args):
    """No file of this process can grow beyond 100 kB meanwhile: a checkpoint fails half way, as on a full
    disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        return work(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_training_goes_on_where_a_save_finds_no_room(base, whole, monkeypatch, capsys):
    write = checkpoint.write_tensors

    def write_or_not(tensors, file, metadata):
        if file.parent.name in full:
            return without_space(write, tensors, file, metadata)
        return write(tensors, file, metadata)

    monkeypatch.setattr(checkpoint, "write_tensors", write_or_not)
    run_dir = base / "runs" / "full"
    full = {".step_16", ".step_20"}
    with pytest.raises(
        InputError, match="step_20 was not written: .*File too large.*earlier checkpoints are intact"
    ):
        base_train.main(arguments(base, "full", 20, *OPTIONS))
    assert (
        "warning: checkpoint" in (output := capsys.readouterr().out) and "step_16 was not written" in output
    )
    assert len(losses(base, "full")) == 20 and not (run_dir / "summary.json").exists()
    assert checkpoint.saved_steps(run_dir) == [8, 12] and checkpoint.find(run_dir).name == "step_12"
    full = {".step_16"}  # a periodic one fails, a later one has room
    assert base_train.main(arguments(base, "full", 20, *OPTIONS)) == 0
    assert (
        "resuming run full at step 12" in (output := capsys.readouterr().out) and "step_16 was not" in output
    )
    assert checkpoint.saved_steps(run_dir) == [12, 20]
    assert [row["step"] for row in rows(base, "full")] == [*range(1, 21), 20]


def test_where_the_shards_end_what_was_trained_is_saved(base, monkeypatch, capsys):
    """Half through a step, as after the death of data_prep; the run goes on where that step begins."""
    few_steps = ["--total-batch-size", "8192", "--device-batch-size", "64", *QUIET]
    assert base_train.main(arguments(base, "all-shards", 8, *few_steps)) == 0
    with monkeypatch.context() as patched:
        for module in (shards, dataloader):
            patched.setattr(module, "window_is_there", lambda manifest, window: window == 0)
        patched.setattr(shards, "PATIENCE", -1)
        with pytest.raises(InputError, match="no process is writing it: run python -m scripts.data_prep"):
            base_train.main(arguments(base, "few-shards", 8, *few_steps))
    saved = checkpoint.saved_steps(base / "runs" / "few-shards")
    assert len(saved) == 1 and 0 < saved[0] < 8
    assert f"stopped at step {saved[0]} and saved" in capsys.readouterr().out
    assert base_train.main(["--run", "few-shards"]) == 0
    assert losses(base, "few-shards") == losses(base, "all-shards")
    assert_same_run(base / "runs" / "few-shards", base / "runs" / "all-shards")


def test_a_place_that_cannot_be_written_to_is_refused_at_the_start(base, tmp_path, monkeypatch):
    (tmp_path / "runs").write_text("a file where a folder should be")
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    with pytest.raises(InputError, match=f"cannot write to {tmp_path}/runs"):
        base_train.main(arguments(base, "any", 20))
    assert os.listdir(tmp_path) == ["runs"]


def test_a_run_keeps_its_options_and_takes_another_length(base, capsys):
    run = ["--run", "options"]
    assert base_train.main(arguments(base, "options", 10, "--matrix-lr", "0.01", *QUIET)) == 0
    assert base_train.main(run) == 0  # all as it was
    assert "run options is complete" in capsys.readouterr().out
    assert base_train.main([*run, "--num-iterations", "6"]) == 0
    assert "run options is complete" in capsys.readouterr().out

    assert base_train.main([*run, "--num-iterations", "20", "--keep-last", "3"]) == 0
    assert "resuming run options at step 10\n" in capsys.readouterr().out
    assert [row["step"] for row in rows(base, "options")] == [*range(1, 21), 20]
    assert rows(base, "options")[10]["lr_multiplier"] == 0.5  # step 11 of 20, not the end of 10
    recorded = json.loads((base / "runs" / "options" / "settings.json").read_text())["options"]
    assert recorded["matrix_lr"] == 0.01 and recorded["num_iterations"] == 20

    assert base_train.main([*run, "--resume", "step_10"]) == 0  # back in time, though complete
    output = capsys.readouterr().out
    assert "resuming run options at step 10\n" in output and "is complete" not in output
    assert [row["step"] for row in rows(base, "options")] == [*range(1, 21), 20]
    assert base_train.main([*run, "--target-param-data-ratio", "0.006"]) == 0  # fewer steps than it has
    assert "run options is complete" in capsys.readouterr().out


def test_what_defines_a_run_cannot_change(base, tmp_path):
    run = ["--run", "defined", "--num-iterations", "4"]
    assert base_train.main(arguments(base, "defined", 2, *QUIET)) == 0
    before = (base / "runs" / "defined" / "settings.json").read_bytes()
    changes = "--seed 1 --embedding-lr 0.2 --dtype bfloat16 --total-batch-size 512 --experts 2".split()
    differences = "--experts 0, not 2; --total-batch-size 256, not 512; --dtype float32, not bfloat16; "
    differences += "--seed 0, not 1; --embedding-lr 0.3, not 0.2"
    with pytest.raises(InputError) as caught:
        base_train.main([*run, *changes])
    for difference in differences.split("; "):
        assert difference in str(caught.value)
    assert "--resume never" in str(caught.value) and "\n" not in str(caught.value)
    assert (base / "runs" / "defined" / "settings.json").read_bytes() == before
    assert base_train.main([*arguments(base, "defined", 1, *QUIET), "--seed", "1", "--resume", "never"]) == 0
    assert json.loads((base / "runs" / "defined" / "settings.json").read_text())["options"]["seed"] == 1


OPTIMIZER_FILE = """
from pathlib import Path
with open(Path(__file__).with_suffix(".ran"), "a") as ran:
    ran.write("x")
import torch
def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)
def schedule(group, step, steps):
    return {"lr": group["lr"]}
"""


def test_an_optimizer_file_runs_only_when_it_is_named(base, tmp_path, monkeypatch, capsys):
    """Whatever settings.json says: the folder may come from somebody else."""
    file, run_dir = tmp_path / "mine.py", base / "runs" / "filed"
    file.write_text(OPTIMIZER_FILE.replace("RATE", "0.1"))
    sha256_of_file = sha256(file.read_bytes()).hexdigest()
    named = ("--optimizer-file", str(file))
    ran = file.with_suffix(".ran")
    assert base_train.main(arguments(base, "filed", 2, *named, *QUIET)) == 0
    assert f"running {file}, SHA-256 {sha256_of_file}\n" in capsys.readouterr().out
    assert ran.read_text() == "x" and sha256_of_file in (run_dir / "report.md").read_text()

    settings = json.loads((run_dir / "settings.json").read_text())
    assert settings["trained_on"]["optimizer_file_sha256"] == sha256_of_file
    assert "optimizer_file" not in settings["options"]
    monkeypatch.chdir(tmp_path)
    trained_on = settings["trained_on"]
    for says in (trained_on, {**trained_on, "optimizer_file": None, "optimizer_file_sha256": None}):
        hostile = {**settings, "trained_on": says}
        hostile["options"] |= {"optimizer_file": "mine.py"}
        (run_dir / "settings.json").write_text(json.dumps(hostile))
        message = "is of another model or optimizer"  # nothing says that there is a file: the recipe begins
        if says["optimizer_file"]:
            message = f"{sha256_of_file}, and code runs only when it is named: give --optimizer-file again"
        with pytest.raises(InputError, match=message):
            base_train.main(arguments(base, "filed", 4, *QUIET))
    assert ran.read_text() == "x"
    (run_dir / "settings.json").write_text(json.dumps(settings))

    file.write_text(OPTIMIZER_FILE.replace("RATE", "0.2"))
    with pytest.raises(InputError, match=f"mine.py of SHA-256 {sha256_of_file}, not .*: --resume never"):
        base_train.main(arguments(base, "filed", 4, *named, *QUIET))
    assert ran.read_text() == "x"
    moved = tmp_path / "moved.py"  # the text counts, not its name
    moved.write_text(OPTIMIZER_FILE.replace("RATE", "0.1"))
    assert base_train.main(arguments(base, "filed", 4, "--optimizer-file", str(moved), *QUIET)) == 0


def test_a_changed_corpus_is_refused(base, tmp_path, monkeypatch):
    write_corpus(tmp_path / "texts")
    corpus = ("--corpus", f"path:{tmp_path}/texts", *QUIET)
    run_dir = base / "runs" / "grown-corpus"
    monkeypatch.setattr(Run, "finish", lambda run: 0)
    assert base_train.main(arguments(base, "grown-corpus", 2, *corpus)) == 0
    before = (run_dir / "settings.json").read_bytes()
    for number in range(16):  # their words make another tokenizer, too
        (tmp_path / "texts" / f"more{number}.txt").write_text(f"lorem ipsum {number} " * 200)
    with pytest.raises(InputError, match="exists with revision .*, not .*: --resume never"):
        base_train.main(arguments(base, "grown-corpus", 4, *corpus))
    assert (run_dir / "settings.json").read_bytes() == before and len(losses(base, "grown-corpus")) == 2


@pytest.mark.slow
def test_gradients_that_travel_in_bf16_train_the_same_but_for_their_rounding(base):
    runs = {"in-float32": (), "in-bf16": ("--comm-dtype", "bfloat16")}
    for run, options in runs.items():
        ranks = Ranks(base, run, 12, *QUIET, *options, processes=2)
        assert ranks.join() == [0, 0], ranks.output()
    exact, rounded = losses(base, "in-float32"), losses(base, "in-bf16")
    assert rounded[0] == exact[0] and rounded[1:] != exact[1:]
    # A mean of two gradients is off by up to 2^-8 of them: each is rounded by 2^-9, and their sum once more.
    # What the updates gain is off by no larger a part, since the errors of elements add up to nothing
    gained = exact[0] - exact[-1]
    assert gained > 0.5
    assert all(abs(a - b) < 2**-8 * gained for a, b in zip(rounded, exact, strict=True))

    ranks = Ranks(base, "in-bf16", 14, *QUIET, processes=2)  # remembered
    assert ranks.join() == [0, 0], ranks.output()
    assert "--comm-dtype" not in ranks.output() and len(losses(base, "in-bf16")) == 14
    settings = json.loads((base / "runs" / "in-bf16" / "settings.json").read_text())
    assert settings["options"]["comm_dtype"] == "bfloat16"
