"""A race as people run it: small ones that are interrupted, enlarged, tuned, refused, reported."""

import functools
import itertools
import json
import math
import random
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import InputError
from scripts import optim_race
from scripts.laboratory import leaderboard, race, report, tasks
from scripts.laboratory.contenders import Contender, dial_value
from tests.training import STILL, optimizer_file

SMALL = "--model depth=1 width=32 heads=2 kv_heads=2 seq_len=16 --steps 50 --jobs 1 --dtype float32".split()
ROOT = Path(__file__).parent.parent
KEPT = ROOT / "docs/races"


class Inline:
    """A pool that works in this process and records its calls."""

    submitted = []
    stop_after = math.inf

    def __init__(self, *_):
        pass

    def shutdown(self, cancel_futures):
        pass

    def submit(self, function, *arguments):
        future = Future()
        if len(self.submitted) >= self.stop_after:
            future.set_exception(KeyboardInterrupt())
            return future
        self.submitted.append(arguments)
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
def lab(text, tmp_path, eager, monkeypatch):
    """lab(*arguments) runs the script in this process; the runs that it trained are in Inline.submitted."""
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(race, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(race, "as_completed", list)
    monkeypatch.setattr(Inline, "submitted", [])
    monkeypatch.setattr(Inline, "stop_after", math.inf)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def run(*arguments):
        Inline.submitted.clear()
        optim_race.main(["--text", str(text), *SMALL, *arguments])
        return len(Inline.submitted)

    return run


def lines_of(tmp_path, name="shakespeare"):
    return [json.loads(line) for line in (tmp_path / f"races/{name}/results.jsonl").read_text().splitlines()]


def test_a_race_is_interrupted_goes_on_and_grows(lab, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Inline, "stop_after", 3)
    with pytest.raises(KeyboardInterrupt):
        lab("--contenders", "default", "adamw", "--seeds", "2")
    monkeypatch.setattr(Inline, "stop_after", math.inf)
    kept = len(lines_of(tmp_path)) - 1
    assert lab("--contenders", "default", "adamw", "--seeds", "2") == 4 - kept
    assert lab("--contenders", "default", "adamw", "--seeds", "2") == 0, "nothing is trained twice"
    assert lab("--contenders", "default", "adamw", "adamw:matrix_lr=0.001", "--seeds", "2") == 2
    out = capsys.readouterr().out
    assert "4 of 6 runs are done already" in out and "| adamw " in out
    header, *runs = lines_of(tmp_path)
    assert header["setup"]["steps"] == 50 and len(runs) == 6
    starts = {(run["seed"], run["initial"], run["rows"]) for run in runs}
    assert len(starts) == 2, "the same weights and rows for all contenders of a seed"
    folder = tmp_path / "races/shakespeare"
    assert (folder / "race.png").stat().st_size > 5_000 and "| adamw " in (folder / "race.md").read_text()
    with pytest.raises(InputError, match="was run with steps 50, not 20: choose another --name"):
        lab("--contenders", "default", "--steps", "20")


KILLED = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
from scripts.laboratory.race import start_worker

context = multiprocessing.get_context("spawn")
pool = ProcessPoolExecutor(1, context, start_worker, (context.Value("i", 0),))
pool.submit(os.getpid).result()
os.kill(os.getpid(), 9)
"""


def test_the_workers_of_a_killed_race_end():
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, timeout=60)
    assert killed.returncode == -9  # and returned, so no worker holds its pipes


OWN = """
import torch

def build_optimizer(model, *, lr=0.01):
    return torch.optim.SGD(model.parameters(), lr=lr)

def schedule(group, step, steps):
    return {"lr": group["lr"] * (1 - step / steps)}
"""


def test_a_file_is_a_contender_by_its_code_and_its_hyperparameters(lab, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert lab("--contenders", str(file), f"{file}:lr=0.02", "--seeds", "1") == 2
    _, first, second = lines_of(tmp_path)
    assert first["key"] != second["key"] and first["sha256"] == second["sha256"]
    assert first["score"] != second["score"]
    assert lab("--contenders", str(file), "--seeds", "1") == 0
    file.write_text(OWN.replace("0.01", "0.03"))
    assert lab("--contenders", str(file), "--seeds", "1") == 1


def test_a_contender_that_diverges_is_reported(lab, tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    lab("--contenders", "adamw", f"{file}:lr=1e30", "--seeds", "2")
    assert "diverged with seed 0, 1" in capsys.readouterr().out
    with pytest.raises(InputError, match="the baseline .* diverged"):
        lab("--contenders", f"{file}:lr=1e30", "adamw", "--seeds", "2")


def test_evaluations_use_the_weights_that_eval_puts_in_place(lab, tmp_path, capsys):
    """And the race says that most parameters are not trained."""
    _, file = optimizer_file(tmp_path, "own", STILL)
    lab("--contenders", file, "--seeds", "1")
    assert f"warning: contender {file} does not train " in capsys.readouterr().out
    _, run = lines_of(tmp_path)
    letters = run["score"]
    assert all(part == pytest.approx(letters, rel=1e-4) for _, part, _ in run["curve"]), "zeros never learn"


def test_a_sweep_finds_the_best_trial_of_each_contender(lab, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(race.time, "monotonic", itertools.count(step=60).__next__)  # a minute per run
    trained = lab("--contenders", "adamw:lr_scale=0.01", "muon", "--sweep", "4", "--seeds", "2")
    assert trained == 2 * (5 + 2 + 1) + 4
    out = capsys.readouterr().out
    assert "tuning muon: lr_scale, matrix_lr\ntuning: 10 trials of 13 steps\n" in out and "best trial" in out
    assert "about 9 min left of these 10\n" in out
    runs = lines_of(tmp_path)[1:]
    tuning = [run for run in runs if run["stage"] == "sweep"]
    assert {run["seed"] for run in tuning} == {1000, 1001, 1002}, "no seed of the race"
    (best,) = [run for run in tuning if run["steps"] == 50 and "adamw" in run["contender"]]
    assert best["contender"] in {run["contender"] for run in runs if run["stage"] == "race"}


def test_dials_are_rates_decay_and_what_the_file_names(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN + 'DIAL = ("lr", 0.1, 0.9)\n')
    assert Contender(str(file)).dials() == {"lr_scale": (1 / 3, 3), "lr": (0.1, 0.9)}
    assert Contender("adamw:weight_decay=0.2").dials()["weight_decay"] == (0.05, 0.8)
    assert dial_value(0.01, 1, 0.5) == 0.1 and dial_value(0, 1, 0.5) == 0.5
    first, second, *_ = trials = Contender("muon").trials(4)
    assert [trial.name for trial in trials] == [trial.name for trial in Contender("muon").trials(4)]
    assert first.name == "muon" and second.options.keys() == {"lr_scale", "matrix_lr"}


def test_presets_stay_as_they_are():
    """Old races are compared with new ones."""
    rest = dict(embedding_lr=0.1, unembedding_lr=0.01, scalar_lr=0.02, warmup_ratio=0.0, warmdown_ratio=1.0)
    muon = dict(rest, matrix_lr=0.02, beta2=None, weight_decay=0.0)
    assert Contender("adamw").keywords == dict(rest, matrix_lr=0.004, weight_decay=0.1)
    assert Contender("muon").keywords == muon
    assert Contender("normuon").keywords == dict(muon, beta2=0.95)
    groups = Contender("muon").build(GPT(GPTConfig.from_depth(1, vocab_size=300, seq_len=32)))
    fixed = {
        "adamw": dict(betas=(0.8, 0.95), eps=1e-8, weight_decay=0.0),
        "muon": dict(momentum=0.95, ns_steps=5, coefficients="simple", weight_decay_form="decoupled"),
    }
    assert {group["kind"] for group in groups} == fixed.keys()
    assert all(fixed[group["kind"]].items() <= group.items() for group in groups)
    course = [Contender("adamw").schedule({"lr": 2.0}, step, 4)["lr"] for step in range(4)]
    assert course == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert Contender("muon:warmup_ratio=0.5").schedule({"lr": 2.0}, 0, 4)["lr"] < 2


@pytest.mark.parametrize(
    "contender, message",
    [
        ("nope", "contender nope is neither a file nor one of adamw, muon, normuon, default"),
        ("adamw:foo=1", "contender adamw has no foo; it has lr_scale, matrix_lr"),
        ("adamw:lr_scale=-1", "lr_scale must be a number, not negative"),
        ("adamw:foo", "'foo' is not key=value"),
        (f"{ROOT}/contenders/aurora.py:batch=5", "has no batch; it has lr_scale, matrix_lr"),
    ],
)
def test_an_impossible_contender_is_named(contender, message):
    with pytest.raises(InputError, match=message):
        Contender(contender)


def test_an_impossible_value_names_its_contender_before_anything_is_trained(lab):
    with pytest.raises(InputError, match="contender muon:matrix_lr=-1: no optimizer was built: .*lr"):
        lab("--contenders", "default", "muon:matrix_lr=-1", "--seeds", "1")
    assert not Inline.submitted


def test_a_function_that_is_made_anew_has_the_same_digest():
    """Otherwise a race would train its finished runs again."""

    def made_anew():
        def direction():
            pass

        return {"direction": direction, "scale": functools.partial(direction)}

    assert tasks.digest(made_anew()) == tasks.digest(made_anew())


def test_rows_are_a_function_of_the_seed_and_windows_cover_the_rest(text):
    _, setup = tasks.shakespeare_setup(str(text), 10)
    setup["name"] = "shakespeare"
    batches = [tasks.open_data(setup, str(text), seed, torch.device("cpu")) for seed in (0, 0, 1)]
    first, same, other = [next(training)[0] for training, _, _ in batches]
    assert torch.equal(first, same) and not torch.equal(first, other)
    scored = sum((targets >= 0).sum() for _, targets in batches[0][1])
    characters = len(text.read_text())
    held_out = characters - int(0.9 * characters)
    assert held_out - 64 - 1 <= scored <= held_out - 1


@pytest.mark.parametrize("length", [100, 950])  # no window of the last 100 characters; none of the first 900
def test_a_text_shorter_than_its_windows_is_refused(length, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("0123456789" * 100)
    place, setup = tasks.shakespeare_setup(file, 10)
    setup["model"]["seq_len"] = length
    with pytest.raises(InputError, match=f"too few for windows of {length}"):
        tasks.shakespeare_data(setup, place, 0, "cpu")


def test_tasks_stay_as_they_are(text, base, environment):
    """New races are compared with those that are kept."""
    of_text = tasks.shakespeare_setup(str(text), None)[1]
    of_corpus = tasks.corpus_setup(f"path:{base}/texts", 300, None)[1]
    for name, setup in (("finals", of_text), ("finals-python", of_corpus)):
        header, _ = race.read_results(KEPT / f"{name}.jsonl")
        model, kept = setup.pop("model"), header["setup"].pop("model")
        different = {key for key in model.keys() & kept.keys() if model[key] != kept[key]}
        assert different == {"vocab_size"}
        assert setup | {"data": header["setup"]["data"]} == {key: header["setup"][key] for key in setup}


def test_a_race_takes_any_corpus(base, environment, lab, tmp_path, monkeypatch):
    corpus = f"path:{base}/texts"
    flags = ["--task", "corpus", "--corpus", corpus, "--vocab-size", "300", "--steps", "4", "--seeds", "1"]
    monkeypatch.setattr(Inline, "submitted", [])
    optim_race.main([*SMALL, *flags, "--contenders", "default"])
    header, run = lines_of(tmp_path, "corpus")
    assert header["setup"]["unit"] == "bits per byte" and 0 < run["score"] < 20


def test_the_hopeless_stop_and_the_leaderboard_says_what_was_found(lab, tmp_path, capsys):
    arguments = ["--contenders", "adamw", "default", "adamw:lr_scale=0.0001", "--seeds", "4", "--leaderboard"]
    lab(*arguments)
    assert "stopped after" in capsys.readouterr().out
    page = (tmp_path / "docs/leaderboard.md").read_text()
    assert "## shakespeare" in page and "| adamw:lr_scale=0.0001 | 2 " in page and "worse by" in page
    assert (tmp_path / "docs/leaderboard_shakespeare.png").exists()
    file = tmp_path / "docs/races/shakespeare.jsonl"
    assert race.read_results(file)[0]["baseline"] == "adamw"  # whichever run finishes first
    file.write_text(file.read_text() + '{"contender": "ad')
    with pytest.raises(InputError, match="shakespeare.jsonl line .* cannot be read, remove it"):
        lab(*arguments)


@pytest.mark.parametrize(
    "content, said", [("", "is empty"), ("{}", "line 1 "), ('{"setup": {}}\n[1]', "line 2 ")]
)
def test_a_damaged_file_of_a_race_is_one_line(tmp_path, content, said):
    file = tmp_path / "results.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=f"{file} {said}.*remove it"):
        race.read_results(file)


def test_the_kept_races_are_readable(tmp_path):
    leaderboard.write_leaderboard(KEPT, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    files = list(KEPT.glob("*.jsonl"))
    assert all((tmp_path / f"leaderboard_{file.stem}.png").exists() for file in files)
    assert page.count("\n## ") == page.count("| against default") == len(files) > 0
    assert page == (KEPT.parent / "leaderboard.md").read_text()


def made_up(name, seed, score):
    curve = [[0, 3.0, None], [50, score and score + 0.5, None], [100, score, score]]
    times = {"step_ms": 10.0, "optimizer_ms": 2.0}
    return {"contender": name, "seed": seed, "score": score, "curve": curve, "steps": 100, **times}


def test_the_table_says_what_the_runs_say():
    results = {"a": [made_up("a", s, 1.5 + 0.01 * s) for s in range(3)]}
    results["b"] = [made_up("b", s, 1.4 + 0.01 * s + 0.0001 * s) for s in range(3)]
    results["c"] = [made_up("c", 0, None)]
    text = report.table(results, "a", "bits per byte")
    rows = {line.split()[1]: line for line in text.splitlines()[2:]}
    assert list(rows) == ["b", "a", "c"], "the lowest mean first"
    assert "1.4101" in rows["b"] and "better by 0.0999 (95% CI" in rows["b"]
    assert "| 90 (1 s) " in rows["b"], "1.91 at step 50, 1.41 at step 100: 1.51 at step 90"
    assert "| 100 (1 s) " in rows["a"] and "diverged with seed 0" in rows["c"]


def test_the_picture_has_a_labelled_curve_for_each_contender(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    close, figures = pyplot.close, []
    monkeypatch.setattr(pyplot, "close", figures.append)
    results = {"a": [made_up("a", 0, 1.5), made_up("a", 1, 1.7)], "b": [made_up("b", 0, 1.4)]}
    report.plot_race(results, "bits per byte", tmp_path / "race.png")
    axes = figures[0].axes[0]
    drawn = {line.get_label(): line.get_xydata().round(6).tolist() for line in axes.lines}
    assert drawn == {
        "a  1.6000": [[0, 3.0], [50, 2.1], [100, 1.6]],
        "b  1.4000": [[0, 3.0], [50, 1.9], [100, 1.4]],
    }
    assert axes.get_ylabel() == "bits per byte" and axes.get_xlabel() == "step" and axes.get_legend()
    close(figures[0])
