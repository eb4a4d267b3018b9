"""The laboratory as people use it: a small race that is killed, resumed, enlarged and refused."""

import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

from nanomuon import recipe
from nanomuon.runtime import STOPPED, InputError
from scripts import optim_race
from scripts.laboratory import race, race_tasks
from scripts.laboratory.race_contenders import Contender
from tests.training import wait_until

SMALL = (
    "--model depth=1 width=32 heads=2 kv_heads=2 seq_len=16 --steps 50 --targets 3.0 --jobs 1 --dtype float32"
).split()


class Inline:
    """A pool that works in this process, and counts."""

    submitted = []

    def __init__(self, *_):
        self.submitted.clear()

    def shutdown(self, cancel_futures):
        pass

    def submit(self, function, *arguments):
        self.submitted.append(arguments)
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words in random order: something to learn, the same letters in both parts."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(20)]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(rng.choices(words, k=3000)))
    return file


@pytest.fixture
def lab(text, tmp_path, monkeypatch):
    """race(*arguments) runs the script in this process."""
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    monkeypatch.setattr(race, "ProcessPoolExecutor", Inline)
    return lambda *more: optim_race.main(["--text", str(text), *SMALL, *map(str, more)])


def results(folder):
    runs = [json.loads(file.read_text()) for file in (folder / "races" / "shakespeare").glob("*-seed*.json")]
    return {(run["contender"], run["seed"]): run for run in runs}


def test_a_race_killed_and_resumed(lab, text, tmp_path, capsys):
    arguments = ["--contenders", "default", "adamw", "--seeds", "2"]
    command = [sys.executable, "-m", "scripts.optim_race", "--text", str(text), *SMALL, *arguments]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    folder = tmp_path / "races" / "shakespeare"
    wait_until(lambda: list(folder.glob("*-seed*.json")), lambda: process.poll() is None, seconds=240)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), lambda: True)
    kept = {file: file.stat().st_mtime_ns for file in folder.glob("*-seed*.json")}
    assert 1 <= len(kept) < 4

    lab(*arguments)
    assert all(file.stat().st_mtime_ns == when for file, when in kept.items())
    runs = results(tmp_path)
    assert set(runs) == {(name, seed) for name in ("default", "adamw") for seed in (0, 1)}
    for seed in (0, 1):  # one start and the same rows for all contenders, others with another seed
        a, b, other = runs["default", seed], runs["adamw", seed], runs["default", 1 - seed]
        assert a["initial"] == b["initial"] != other["initial"] and a["rows"] == b["rows"] != other["rows"]
    output = capsys.readouterr().out
    assert f"{len(kept)} of 4 runs are there already" in output
    assert "adamw: " in output and (folder / "race.png").stat().st_size > 10_000
    assert "adamw: " in (folder / "race.md").read_text() and not list(folder.glob("*.tmp"))

    # the same again trains nothing; one more contender and seed train only what is new
    Inline.submitted.clear()
    lab(*arguments)
    assert not Inline.submitted
    lab("--contenders", "default", "adamw", "adamw:matrix_lr=0.01", "--seeds", "2")
    assert [(run[2], run[3]) for run in Inline.submitted] == [
        ("adamw:matrix_lr=0.01", 0),
        ("adamw:matrix_lr=0.01", 1),
    ]
    lab(*arguments[:-1], "3")
    assert [(run[2], run[3]) for run in Inline.submitted] == [("default", 2), ("adamw", 2)]

    # a run in a process of its own and one in this process are the same run
    first = runs[min(runs)]
    again = race.train(*open_small(text), first["contender"], first["seed"], tmp_path / "again.json")
    assert again["score"] == first["score"] and [list(at) for at in again["curve"]] == first["curve"]

    # what would not be a comparison
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    with pytest.raises(InputError, match="data .*choose another --name"):
        optim_race.main(["--text", str(other), *SMALL, *arguments])
    with pytest.raises(InputError, match="steps 50, not 49"):
        lab(*arguments, "--steps", 49)
    with pytest.raises(InputError, match="model .*choose another --name"):
        lab(*arguments, "--model", "depth=1", "width=64", "heads=2", "kv_heads=2", "seq_len=16")


def at_work(process):
    """Whether it runs: it may have ended and nobody has asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment, number", [("finished", signal.SIGINT), ("starting", signal.SIGINT), ("finished", signal.SIGTERM)]
)
def test_a_race_that_is_interrupted_says_so_in_a_line_and_keeps_what_is_finished(
    text, tmp_path, moment, number
):
    """When the first run is finished; and when the workers are starting, which takes them seconds."""
    arguments = ["--contenders", "adamw", "--seeds", "60", "--steps", "20", "--jobs", "2"]
    command = [sys.executable, "-m", "scripts.optim_race", "--text", str(text), *SMALL, *arguments]
    environment = {"OMP_NUM_THREADS": "1", "NANOMUON_COMPILE": "0", "NANOMUON_BASE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )
    folder = tmp_path / "races" / "shakespeare"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def workers():
        found = []
        for child in children.read_text().split():
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(child)
        return found

    def finished():
        return list(folder.glob("*-seed*.json"))

    def reached():
        return finished() if moment == "finished" else len(workers()) == 2

    wait_until(reached, lambda: process.poll() is None, seconds=240)
    started = workers()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does, to all of its processes
    else:
        process.send_signal(number)
    wait_until(lambda: not any(map(at_work, started)), lambda: True, seconds=2)
    _, said = process.communicate(timeout=60)
    kept = len(finished())
    how, code = ("interrupted", 130) if number == signal.SIGINT else ("stopped", STOPPED)
    assert said == f"{how}: {kept} of 60 runs are kept, the same command goes on\n"
    assert process.returncode == code and (kept > 0 or moment == "starting")


def test_ctrl_c_while_runs_are_handed_out_is_heard_once_all_are():
    class Pool:
        submitted = 0

        def submit(self, *arguments):
            self.submitted += 1
            os.kill(os.getpid(), signal.SIGINT)

    workers = race.Workers(1)
    pool = workers.pool = Pool()
    pending = [("adamw", seed) for seed in range(3)]
    files = {run: Path("result.json") for run in pending}
    with pytest.raises(KeyboardInterrupt):
        workers.submit({}, "place", files, pending)
    assert pool.submitted == 3


def open_small(text, **model):
    """Setup and place of a small race, in the order of race.train."""
    model = dict(depth=1, width=32, heads=2, kv_heads=2, seq_len=16) | model
    place, setup = race_tasks.open_task("shakespeare", str(text), None, 50, model)
    setup["dtype"] = "float32"
    return setup, place


def test_a_contender_that_changes_the_model_is_refused(lab, tmp_path):
    file = tmp_path / "cheat.py"
    file.write_text("""
import torch
def build_optimizer(model):
    torch.nn.init.zeros_(model.wte.weight)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
""")
    with pytest.raises(InputError, match="differ in initial weights or rows"):
        lab("--contenders", "adamw", file, "--seeds", 1, "--steps", 2)


def test_a_diverging_contender_is_said_to_diverge(lab, tmp_path, capsys):
    file = tmp_path / "wild.py"
    file.write_text("""
import torch
def build_optimizer(model, *, lr=float("inf")):
    return torch.optim.SGD(model.parameters(), lr=lr)
""")
    lab("--contenders", "adamw", file, f"{file}:lr=0", "--seeds", 2, "--steps", 5)
    output = capsys.readouterr().out
    assert f"{file}: diverged with seed 0, 1" in output
    assert f"{file}:lr=0: worse by" in output or f"{file}:lr=0: not distinguishable" in output
    with pytest.raises(InputError, match="baseline .* diverged"):
        lab("--contenders", "adamw", file, "--baseline", file, "--seeds", 2, "--steps", 5)


def test_evaluations_use_the_weights_that_eval_puts_in_place(text, tmp_path, monkeypatch):
    """Here a head of zeros, and the trained one comes back: only evaluations see it."""
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    file = tmp_path / "swapping.py"
    file.write_text("""
import torch
class Swapping(torch.optim.SGD):
    def eval(self):
        self.kept = self.head.detach().clone()
        self.head.data.zero_()
    def train(self):
        self.head.data.copy_(self.kept)
    def step(self):
        assert self.head.abs().sum() > 0
        super().step()
def build_optimizer(model):
    optimizer = Swapping(model.parameters(), lr=0.5)
    optimizer.head = model.lm_head.weight
    return optimizer
""")
    setup, place = open_small(text)
    run = race.train(setup | {"steps": 4}, place, str(file), 0, tmp_path / "run.json")
    assert run["score"] == pytest.approx(math.log(len(set(text.read_text()))), abs=1e-5)


def test_a_function_in_a_group_is_its_name_in_the_result(text, tmp_path, monkeypatch):
    """And goes back to the process that asked, which does not know the function."""
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    file = tmp_path / "signs.py"
    file.write_text("""
from nanomuon import recipe
def param_groups(model, batch=None):
    def signs(U, kept, ok, square_weight):
        return U.sign(), square_weight * 0 + 0.01
    groups = recipe.param_groups(model, batch)
    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=signs)
    return groups
""")
    setup, place = open_small(text)
    run = race.train(setup | {"steps": 2}, place, str(file), 0, tmp_path / "run.json")
    assert pickle.loads(pickle.dumps(run)) == run == race.read_result(tmp_path / "run.json")


def test_the_users_schedule_is_followed(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    file = tmp_path / "printing.py"
    file.write_text("""
import torch
class Printing(torch.optim.SGD):
    def step(self):
        print("rate", self.param_groups[0]["lr"])
def build_optimizer(model, *, lr=0.5):
    return Printing(model.parameters(), lr=lr)
def schedule(group, step, steps, *, floor=0.0):
    return {"lr": group["lr"] * max(floor, 1 - step / steps)}
""")
    setup, place = open_small(text)
    race.train(setup | {"steps": 4}, place, f"{file}:lr=0.25,floor=0.5,lr_scale=2", 0, tmp_path / "run.json")
    assert capsys.readouterr().out.split() == "rate 0.5 rate 0.375 rate 0.25 rate 0.25".split()


def test_a_contender_is_its_code_and_its_hyperparameters(text, tmp_path):
    setup, _ = open_small(text)
    key = Contender("default").key(setup)
    lr = recipe.param_groups.__kwdefaults__["matrix_lr"]
    assert Contender(f"default:matrix_lr={lr}").key(setup) == key
    assert Contender(f"default:matrix_lr={lr},lr_scale=1").key(setup) == key
    names = ["default:lr_scale=2", "default:warmdown_ratio=0.123", "muon", "normuon", "adamw"]
    keys = [Contender(name).key(setup) for name in names]
    file = tmp_path / "mine.py"
    for body in ("0", "1"):
        file.write_text(f"from nanomuon.recipe import param_groups\nunused = {body}\n")
        keys.append(Contender(str(file)).key(setup))
    assert len({key, *keys}) == 8
    turned = Contender("adamw:matrix_lr=0.01").with_options({"lr_scale": 2, "matrix_lr": 0.02})
    assert turned.name == "adamw:matrix_lr=0.02,lr_scale=2"


@pytest.mark.parametrize(
    "contender,message",
    [
        ("nobody", "neither a file nor one of adamw, muon, normuon, default"),
        ("adamw:momentum=0.9", "adamw has no momentum; it has lr_scale, matrix_lr"),
        ("adamw:0.9", "'0.9' is not key=value"),
    ],
)
def test_what_is_no_contender(contender, message):
    with pytest.raises(InputError, match=message):
        Contender(contender)


def test_training_rows_and_validation_windows(tmp_path):
    """Training never sees the last tenth; there each character but the first is scored once, in windows."""
    file = tmp_path / "parts.txt"
    train, held = "abcdefgh" * 900, "".join(chr(0x4E00 + i) for i in range(800))
    file.write_text(train + held)
    setup, place = open_small(file)
    batches, validation, _ = race_tasks.shakespeare_data(setup, place, 3, "cpu")
    characters = sorted(set(train + held))
    for inputs, targets in (next(batches) for _ in range(20)):
        assert inputs.shape == (12, 16) and torch.equal(inputs[:, 1:], targets[:, :-1])
        assert {characters[i] for i in targets.unique()} <= set("abcdefgh")
    inputs, targets = (torch.cat(part) for part in zip(*validation, strict=True))
    scored = [
        (characters[i], characters[j])
        for i, j in zip(inputs[targets >= 0], targets[targets >= 0], strict=True)
    ]
    count = 16 * (799 // 16)
    assert sorted(scored) == list(zip(held[:count], held[1 : 1 + count], strict=True))
    assert len(validation) == 1 and inputs.shape == (64, 16)


def test_a_tuned_race_is_kept_in_a_small_file_and_goes_on_from_it(lab, tmp_path, capsys):
    docs = tmp_path / "docs"
    arguments = ["--contenders", "default", "adamw", "--sweep", 3, "--steps", 12, "--seeds", 2]
    arguments += ["--leaderboard", docs]
    lab(*arguments)
    output = capsys.readouterr().out
    assert "Tuning: at most 3 runs of full length" in output and "4 of 3 steps, 2 of 6 steps" in output
    header, *runs = map(json.loads, (docs / "races" / "shakespeare.jsonl").read_text().splitlines())
    text_file = str(Path(*header["commands"][0].split()[4:5]))
    assert header["setup"]["steps"] == 12 and text_file == "text.txt"  # not where it lies here
    lengths = [run["steps"] for run in runs if run["stage"] == "sweep"]
    assert (lengths.count(3), lengths.count(6), lengths.count(12)) == (8, 4, 2)
    raced = [run for run in runs if run["stage"] == "race"]
    assert {run["seed"] for run in raced} == {0, 1} and len(raced) == 4
    tuned = {run["contender"].partition(":")[0]: run["contender"] for run in raced}
    best = {}
    for run in runs:
        if run["stage"] == "sweep" and run["steps"] == 12:
            best[run["contender"].partition(":")[0]] = run["contender"]
    assert tuned == best
    assert (docs / "leaderboard.md").exists()

    # on another machine, which has the file alone: nothing is trained again
    race_folder = tmp_path / "races"
    before = results(tmp_path)
    race_folder.rename(tmp_path / "elsewhere")
    Inline.submitted.clear()
    kept_file = (docs / "races" / "shakespeare.jsonl").read_bytes()
    lab(*arguments)
    assert not Inline.submitted and "18 finished runs are taken from" in capsys.readouterr().out
    assert (docs / "races" / "shakespeare.jsonl").read_bytes() == kept_file
    after = results(tmp_path)
    assert after.keys() == before.keys()
    for run, result in after.items():
        assert result["score"] == pytest.approx(before[run]["score"], abs=1e-6)

    # a damaged line is one error that names it
    (docs / "races" / "shakespeare.jsonl").write_bytes(kept_file + b'{"file": "../outside.json"}\n')
    with pytest.raises(InputError, match="shakespeare.jsonl line 20: "):
        lab(*arguments)


def test_code_that_changed_is_said_and_may_be_accepted(lab, tmp_path, monkeypatch, capsys):
    arguments = ["--contenders", "adamw", "--seeds", 1, "--steps", 2]
    lab(*arguments)
    task = tmp_path / "races" / "shakespeare" / "task.json"
    task.write_text(json.dumps(json.loads(task.read_text()) | {"optimizer_code": "0123456789ab"}))
    with pytest.raises(InputError, match="optimizer_code 0123456789ab, not .*--accept-changes"):
        lab(*arguments)
    Inline.submitted.clear()
    lab(*arguments, "--accept-changes")
    assert not Inline.submitted and "all the same" in capsys.readouterr().out
    task.write_text(json.dumps(json.loads(task.read_text()) | {"rows": 1}))
    with pytest.raises(InputError, match="choose another --name$"):
        lab(*arguments, "--accept-changes")


def test_a_race_from_before_keys_had_an_offset_goes_on_without_it(lab, tmp_path):
    arguments = ["--contenders", "adamw", "--seeds", 1, "--steps", 2]
    lab(*arguments, "--model", "key_offset=False")
    task = tmp_path / "races" / "shakespeare" / "task.json"
    setup = json.loads(task.read_text())
    assert setup["model"].pop("key_offset") is False
    task.write_text(json.dumps(setup))
    Inline.submitted.clear()
    lab(*arguments, "--model", "key_offset=False")
    assert not Inline.submitted
    message = "key_offset False, not True: add --model .* key_offset=False for its model, or choose another"
    with pytest.raises(InputError, match=message):
        lab(*arguments)


def test_a_process_that_the_system_kills_is_one_line(lab, monkeypatch):
    class Killed(Inline):
        def submit(self, function, *arguments):
            future = Future()
            future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr(race, "ProcessPoolExecutor", Killed)
    with pytest.raises(InputError, match="was killed, .* fewer --jobs .* goes on from there"):
        lab("--contenders", "adamw", "--seeds", 1, "--steps", 2)


def test_comments_and_layout_are_not_code(tmp_path):
    file = tmp_path / "code.py"
    digests = []
    for text in (
        'def f(x):\n    """Docs."""\n    return x + 1\n',
        "def f( x ):  # other\n    return (x\n        + 1)\n",
        "def f(x):\n    return x + 2\n",
    ):
        file.write_text(text)
        digests.append(race_tasks.code_digest(file))
    assert digests[0] == digests[1] != digests[2]


def test_the_hopeless_stop(lab, tmp_path, capsys):
    """A rate of zero learns nothing; the baseline races with all seeds whatever it is."""
    arguments = ["--contenders", "default:lr_scale=0", "default", "default:lr_scale=0.9", "adamw:lr_scale=0"]
    lab(*arguments, "--seeds", 4, "--steps", 30)
    seeds = {}
    for name, seed in results(tmp_path):
        seeds.setdefault(name, set()).add(seed)
    raced = len(seeds["adamw:lr_scale=0"])
    assert 2 <= raced < 4 and len(seeds["default:lr_scale=0"]) == 4
    assert len(seeds["default"]) == len(seeds["default:lr_scale=0.9"]) == 4
    assert f"stopped after {raced} seeds, hopeless: adamw:lr_scale=0" in capsys.readouterr().out
    lab(*arguments, "--seeds", 4, "--steps", 30, "--all-seeds")
    assert ("adamw:lr_scale=0", 3) in results(tmp_path)


def test_a_run_that_has_diverged_trains_no_further(text, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    file = tmp_path / "wild.py"
    file.write_text("""
import torch
class Wild(torch.optim.SGD):
    steps = 0
    def step(self):
        self.steps += 1
        assert self.steps <= 50
        super().step()
def build_optimizer(model):
    return Wild(model.parameters(), lr=float("inf"))
""")
    setup, place = open_small(text)
    run = race.train(setup | {"steps": 120}, place, str(file), 0, tmp_path / "run.json")
    tame = race.train(setup | {"steps": 120}, place, "default:lr_scale=0", 0, tmp_path / "tame.json")
    assert not math.isfinite(run["score"]) and run["rows"] == tame["rows"]
    assert [point[0] for point in run["curve"]] == [0, 50, 100, 120]


def test_a_corpus_is_raced_on_with_the_loader_of_base_train(base, environment, tmp_path):
    """In micro-steps or in one, the same step; an untrained model needs ln(vocabulary) nats for a token."""
    options = dict(micro_rows=4, steps=2, eval_every=1, eval_batches=2, whole_every=1, unit="bits per byte")
    place, setup = race_tasks.corpus_setup(
        f"path:{base}/texts", 300, dict(depth=1), seq_len=32, rows=8, **options
    )
    setup |= {"name": "python", "dtype": "float32"}
    halves = race.train(setup, place, "default", 0, tmp_path / "halves.json")
    whole = race.train(setup | {"micro_rows": 8}, place, "default", 0, tmp_path / "whole.json")
    assert halves["score"] == pytest.approx(whole["score"], abs=1e-4)
    assert halves["initial"] == whole["initial"]
    assert [point[2] is None for point in halves["curve"]] == [True, False, False]
    setup |= {"unit": "nats per token", "steps": 1}
    tokens = race.train(setup, place, "default:lr_scale=0", 0, tmp_path / "tokens.json")
    assert tokens["score"] == pytest.approx(math.log(setup["model"]["vocab_size"]), abs=0.01)
    assert halves["score"] < halves["curve"][0][1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the task runs on this machine")
def test_the_speedrun_refuses_a_cpu():
    with pytest.raises(InputError, match="needs a GPU"):
        optim_race.main(["--task", "speedrun", "--contenders", "default"])
