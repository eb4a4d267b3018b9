"""A race as people run it: small ones that are interrupted, enlarged, tuned, refused, reported."""

import functools
import itertools
import json
import math
import random
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import InputError
from scripts import base_train, optim_race
from scripts.laboratory import race, report, tasks
from scripts.laboratory.contenders import Contender, dial_value
from tests.training import STILL, optimizer_file

SMALL = "--model depth=1 width=32 heads=2 kv_heads=2 seq_len=16 --steps 12 --jobs 1 --dtype float32".split()
ROOT = Path(__file__).parent.parent
ADAMW, MUON = (f"{ROOT}/contenders/{name}.py" for name in ("adamw", "muon"))


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
        lab("--contenders", "default", ADAMW, "--seeds", "2")
    monkeypatch.setattr(Inline, "stop_after", math.inf)
    kept = len(lines_of(tmp_path)) - 1
    assert lab("--contenders", "default", ADAMW, "--seeds", "2") == 4 - kept
    assert lab("--contenders", "default", ADAMW, "--seeds", "2") == 0, "nothing is trained twice"
    assert lab("--contenders", "default", ADAMW, f"{ADAMW}:matrix_lr=0.001", "--seeds", "2") == 2
    out = capsys.readouterr().out
    assert "4 of 6 runs are done already" in out and f"| {ADAMW} " in out
    header, *runs = lines_of(tmp_path)
    assert header["setup"]["steps"] == 12 and len(runs) == 6
    starts = {(run["seed"], run["initial"], run["rows"]) for run in runs}
    assert len(starts) == 2, "the same weights and rows for all contenders of a seed"
    folder = tmp_path / "races/shakespeare"
    assert (folder / "race.png").stat().st_size > 5_000
    assert f"| {ADAMW} " in (folder / "race.md").read_text()
    with pytest.raises(InputError, match="was run with steps 12, not 20: choose another --name"):
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
    lab("--contenders", ADAMW, f"{file}:lr=1e30", "--seeds", "2")
    assert "diverged with seed 0, 1" in capsys.readouterr().out
    with pytest.raises(InputError, match="the baseline .* diverged"):
        lab("--contenders", f"{file}:lr=1e30", ADAMW, "--seeds", "2")


def test_evaluations_use_the_weights_that_eval_puts_in_place(lab, tmp_path, capsys):
    """And the race says that most parameters are not trained."""
    _, file = optimizer_file(tmp_path, "own", STILL)
    lab("--contenders", file, "--seeds", "1")
    assert f"warning: contender {file} does not train " in capsys.readouterr().out
    _, run = lines_of(tmp_path)
    letters = run["score"]
    assert all(part == pytest.approx(letters, rel=1e-4) for _, part in run["curve"]), "zeros never learn"


def test_a_sweep_finds_the_best_trial_of_each_contender(lab, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(race.time, "monotonic", itertools.count(step=60).__next__)  # a minute per run
    trained = lab("--contenders", f"{ADAMW}:lr_scale=0.01", MUON, "--sweep", "4", "--seeds", "2")
    assert trained == 2 * (5 + 2 + 1) + 4
    out = capsys.readouterr().out
    assert f"tuning {MUON}: lr_scale, matrix_lr\ntuning: 5 trials each, of 3 steps\n" in out
    assert "about 9 min left of these 10\n" in out
    runs = lines_of(tmp_path)[1:]
    tuning = [run for run in runs if run["seed"] not in (0, 1)]
    assert {run["seed"] for run in tuning} == {1000, 1001, 1002}, "no seed of the race"
    halves = {
        run["contender"]: run["score"] for run in tuning if run["steps"] == 6 and ADAMW in run["contender"]
    }
    (best,) = [run["contender"] for run in tuning if run["steps"] == 12 and ADAMW in run["contender"]]
    assert len(halves) == 2 and best == min(halves, key=halves.get)
    assert best in {run["contender"] for run in runs if run["seed"] == 0}


def test_dials_are_rates_decay_and_what_the_file_names(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN + 'DIAL = ("lr", 0.1, 0.9)\n')
    assert Contender(str(file)).dials() == {"lr_scale": (1 / 3, 3), "lr": (0.1, 0.9)}
    for wrong in ('("lr", 0.9, 0.1)', '("nope", 0.1, 0.9)', "0.5"):
        file.write_text(OWN + f"DIAL = {wrong}\n")
        with pytest.raises(
            InputError, match=f"{file}: DIAL has to be .keyword, low, high., .*keywords lr, not"
        ):
            Contender(str(file)).dials()
    assert Contender(f"{ADAMW}:weight_decay=0.2").dials()["weight_decay"] == (0.05, 0.8)
    assert dial_value(0.01, 1, 0.5) == 0.1 and dial_value(0, 1, 0.5) == 0.5
    first, second, *_ = trials = Contender(MUON).trials(4)
    assert [trial.name for trial in trials] == [trial.name for trial in Contender(MUON).trials(4)]
    assert first.name == MUON and second.options.keys() == {"lr_scale", "matrix_lr"}


PASSES_ON = """
from nanomuon import recipe

def param_groups(model, *, beta2=0.9, **keywords):
    groups = recipe.param_groups(model, **keywords)
    for group in groups:
        if group["kind"] == "muon":
            group["beta2"] = beta2
    return groups

def schedule(group, step, steps, **keywords):
    return recipe.schedule(group, step, steps, **keywords)
"""


def test_a_file_that_passes_keywords_on_has_those_of_the_baseline(tmp_path):
    """Its groups follow batch and steps as the recipe's do, and a sweep turns the same dials."""
    file = tmp_path / "own.py"
    file.write_text(PASSES_ON)
    own, baseline = Contender(f"{file}:beta2=0.95,warmup_ratio=0.5"), Contender("default:warmup_ratio=0.5")
    assert own.keywords == {"beta2": 0.9, **baseline.keywords} and own.dials() == baseline.dials()
    setup = {"rows": 4, "steps": 10, "model": TINY}
    built = [each.prepare(model_of(TINY), setup)[1] for each in (own, baseline)]
    for mine, theirs in zip(*built, strict=True):
        assert all(mine[key] == theirs[key] for key in theirs if key != "params")
        assert own.schedule(mine, 1, 10) == baseline.schedule(theirs, 1, 10)


TINY = dict(vocab_size=24, seq_len=16, depth=2, width=32, heads=2, kv_heads=2)


def model_of(fields):
    model = GPT(GPTConfig(**fields))
    model.init_weights(0)
    return model


@pytest.mark.parametrize(
    "code",
    [
        "def schedule(group, step, steps): return {'lr': group['lr'] / (1 + step)}",
        "from nanomuon import recipe\nparam_groups = recipe.param_groups",
        "from nanomuon.gpt import GPT\nmodel = GPT",
    ],
)
def test_a_file_may_define_any_one_of_its_functions(code, lab, tmp_path):
    """The default has the rest, to the same loss if the file changes nothing."""
    file = tmp_path / "own.py"
    file.write_text(code)
    lab("--contenders", "default", str(file), f"{file}:matrix_lr=0.001", "--seeds", "1")
    _, default, own, slower = lines_of(tmp_path)
    assert (own["score"] == default["score"]) == ("schedule" not in code)
    assert slower["score"] != own["score"]


WIDE_MLP = """
from torch import nn
from nanomuon.gpt import GPT, Linear

class WideMLP(GPT):
    def __init__(self, config, compute_dtype):
        super().__init__(config, compute_dtype)
        assert self.wte.weight.is_meta
        for block in self.blocks:
            block.mlp.up, block.mlp.down = Linear(config.width, 128 + 32), Linear(128 + 32, config.width)
            block.extra = nn.Parameter(self.x0_scalars.new_empty(3))

model = WideMLP
"""


def test_models_race_in_pairs(lab, tmp_path, capsys):
    """They see the same rows, and start from the default's values where names and shapes are its own."""
    file = tmp_path / "own.py"
    file.write_text(WIDE_MLP)
    fields = "default:heads=4,kv_heads=4"
    lab("--contenders", "default", str(file), fields, "--seeds", "1")
    out = capsys.readouterr().out
    header, *runs = lines_of(tmp_path)
    default = sum(param.numel() for param in model_of(header["setup"]["model"]).parameters())
    own = default + 2 * 32 * (160 - 128) + 3
    assert f"default: {default:,} parameters\n{file}: {own:,} parameters" in out
    assert len({run["rows"] for run in runs}) == len({run["initial"] for run in runs}) == 1
    assert len({run["score"] for run in runs}) == 3
    setup = {"model": TINY, "dtype": "float32"}
    default = dict(model_of(TINY).named_parameters())
    for contender, changed in ((str(file), ("mlp", "extra")), (fields, ("value_gate",))):
        model, _ = Contender(contender).initial_model(setup, "cpu", 0)
        assert (model.config.heads, model.config.depth) == (4 if contender == fields else 2, 2)
        for name, param in model.named_parameters():
            if not any(each in name for each in changed):
                assert torch.equal(param, default[name]), name
    file.write_text("def model(config, compute_dtype): return 5")
    with pytest.raises(InputError, match=f"contender {file}: model.config, compute_dtype. must return a GPT"):
        lab("--contenders", str(file), "--seeds", "1")


def test_the_older_contenders_stay_as_they_are():
    """Old races are compared with new ones."""
    rest = dict(embedding_lr=0.1, unembedding_lr=0.01, scalar_lr=0.02, warmup_ratio=0.0, warmdown_ratio=1.0)
    assert Contender(ADAMW).keywords == dict(rest, matrix_lr=0.004, weight_decay=0.1)
    assert Contender(MUON).keywords == dict(rest, matrix_lr=0.02, beta2=None, weight_decay=0.0)
    groups = Contender(MUON).build(model_of(TINY))
    fixed = {
        "adamw": dict(betas=(0.8, 0.95), eps=1e-8, weight_decay=0.0),
        "muon": dict(momentum=0.95, ns_steps=5, coefficients="simple", weight_decay_form="decoupled"),
    }
    assert {group["kind"] for group in groups} == fixed.keys()
    assert all(fixed[group["kind"]].items() <= group.items() for group in groups)
    course = [Contender(ADAMW).schedule({"lr": 2.0}, step, 4)["lr"] for step in range(4)]
    assert course == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert Contender(f"{MUON}:warmup_ratio=0.5").schedule({"lr": 2.0}, 0, 4)["lr"] < 2


@pytest.mark.parametrize(
    "contender, message",
    [
        ("nope", "contender nope is neither default nor a file"),
        ("default:foo=1", "contender default has no foo; it has lr_scale, matrix_lr.*, heads, kv_heads"),
        ("default:lr_scale=x", "lr_scale must be a number, not 'x'"),
        ("default:foo", "'foo' is not key=value"),
        ("default:heads=x", "contender default:heads=x: heads must be int, not 'x'"),
        ("default:seq_len=8", "contender default has no seq_len"),
        (f"{ROOT}/contenders/aurora.py:batch=5", "has no batch; it has lr_scale, .*iterations"),
    ],
)
def test_an_impossible_contender_is_named(contender, message):
    with pytest.raises(InputError, match=message):
        Contender(contender)


def test_an_impossible_value_names_its_contender_before_anything_is_trained(lab):
    with pytest.raises(InputError, match="contender default:matrix_lr=-1: no optimizer was built: .*lr"):
        lab("--contenders", "default", "default:matrix_lr=-1", "--seeds", "1")
    with pytest.raises(InputError, match="contender default:heads=3: width 32 must be an even multiple"):
        lab("--contenders", "default", "default:heads=3", "--seeds", "1")
    assert not Inline.submitted


def test_a_function_that_is_made_anew_has_the_same_digest():
    """Otherwise a race would train its finished runs again."""

    def made_anew():
        def direction():
            pass

        return {"direction": direction, "scale": functools.partial(direction)}

    assert tasks.digest(made_anew()) == tasks.digest(made_anew())


def test_rows_are_a_function_of_the_seed_and_windows_cover_the_rest(text):
    _, setup = tasks.shakespeare_setup(str(text), {})
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
    place, setup = tasks.shakespeare_setup(file, {"seq_len": length})
    with pytest.raises(InputError, match=f"too few for windows of {length}"):
        tasks.shakespeare_data(setup, place, 0, "cpu")


def test_the_shakespeare_task_stays_as_it_is(text):
    """Its digits are those of the races in docs/leaderboard.md."""
    _, setup = tasks.shakespeare_setup(str(text), {})
    kept = dict(seq_len=64, depth=4, width=128, heads=4, kv_heads=4, window_pattern="L", qk_norm=True)
    assert {key: value for key, value in setup["model"].items() if key != "vocab_size"} == kept
    assert (setup["rows"], setup["steps"], setup["unit"]) == (12, 2000, "nats per character")


def test_a_race_on_a_corpus_trains_what_base_train_trains(base, environment, lab, monkeypatch):
    """The same model, rows, course and validation set: the same loss."""
    monkeypatch.setattr(tasks, "BATCH", 256)
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(base))
    flags = ["--corpus", f"path:{base}/texts", "--vocab-size", "300", "--dtype", "float32"]
    small = ["--total-batch-size", "256", "--depth", "2", "--max-seq-len", "32", "--num-iterations", "8"]
    base_train.main([*flags, *small, "--run", "same", "--eval-every=-1", "--save-every=-1"])
    *_, final = (base / "runs/same/metrics.jsonl").read_text().splitlines()
    config = json.loads((base / "runs/same/config.json").read_text())
    flags += ["--task", "corpus", "--steps", "8", "--seeds", "1", "--contenders", "default"]
    optim_race.main([*flags, "--model", "depth=2", "seq_len=32"])
    header, run = lines_of(base, "corpus")
    assert header["setup"]["model"].items() <= config.items()
    assert header["setup"]["unit"] == "bits per byte" and header["setup"]["rows"] == 8
    assert run["score"] == pytest.approx(json.loads(final)["val_bpb"], abs=1e-6)
    with pytest.raises(InputError, match="was run with model .*'heads': 2.*: choose another --name"):
        optim_race.main([*flags, "--model", "depth=2", "seq_len=32", "heads=4", "kv_heads=4"])


@pytest.mark.parametrize("content, said", [("", "is empty"), ('{"setup": {}}\n[1]', "line 2 ")])
def test_a_damaged_file_of_a_race_is_one_line(tmp_path, content, said):
    file = tmp_path / "results.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=f"{file} {said}.*remove it"):
        race.read_results(file)


def kept_race(name, steps):
    """The text and unit of a race in docs/races, and its runs by contender without those of tuning."""
    setup, runs = race.read_results(ROOT / f"docs/races/{name}.jsonl")
    results = {}
    for run in runs:
        if run["steps"] == steps and run["stage"] == "race":
            results.setdefault(run["contender"], {})[run["seed"]] = run  # the later one counts
    return setup["unit"], {contender: list(seeds.values()) for contender, seeds in results.items()}


@pytest.mark.parametrize(
    "name, steps, baseline",
    [
        ("finals", 2000, "default"),
        ("finals-python", 300, "default"),
        ("screening", 500, "default:lr_scale=0.76,weight_decay=0.141,matrix_lr=0.0238"),
    ],
)
def test_the_kept_races_say_what_their_page_says(name, steps, baseline):
    unit, results = kept_race(name, steps)
    page = (ROOT / "docs/leaderboard.md").read_text().split(f"## {name}\n")[1].split("\n## ")[0]
    on_page = {}
    for line in page.splitlines():
        if line.startswith("|"):
            on_page[line.split()[1]] = [cell.strip() for cell in line.split("|")[2:5]]
    lines = report.table(results, baseline, unit).splitlines()[2:]
    assert len(lines) == len(on_page) - 2 == len(results)
    for line in lines:
        assert [cell.strip() for cell in line.split("|")[2:5]] == on_page[line.split()[1]]


def example(page, name):
    """The Python file of this name on a page."""
    return re.search(rf"```python\n(# {name}\n.*?)```", (ROOT / page).read_text(), re.DOTALL)[1]


def test_the_files_on_the_pages_are_contenders(tmp_path):
    for page, name in (("README.md", "my_groups.py"), ("docs/racing.md", "my_model.py")):
        (tmp_path / name).write_text(example(page, name))
    groups, model = Contender(f"{tmp_path}/my_groups.py:beta2=0.8"), Contender(f"{tmp_path}/my_model.py")
    assert groups.dials() == model.dials() == Contender("default").dials()
    setup = {"model": TINY, "dtype": "float32", "rows": 4, "steps": 10}
    _, built = groups.prepare(model_of(TINY), setup)
    assert {group["beta2"] for group in built if group["kind"] == "muon"} == {0.8}
    gelu, _ = model.initial_model(setup, "cpu", 0)
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    gelu.blocks[0].mlp.down.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    up, down = (layer.weight for layer in (gelu.blocks[0].mlp.up, gelu.blocks[0].mlp.down))
    torch.testing.assert_close(gelu.blocks[0].mlp(x), torch.nn.functional.gelu(x @ up.T) @ down.T)


def made_up(name, seed, score):
    curve = [[0, 3.0], [50, score and score + 0.5], [100, score]]
    times = {"step_ms": 10.0, "optimizer_ms": 2.0}
    return {"contender": name, "seed": seed, "score": score, "curve": curve, "steps": 100, **times}


def test_the_table_says_what_the_runs_say():
    results = {"a": [made_up("a", s, 1.5 + 0.01 * s) for s in range(3)]}
    results["b"] = [made_up("b", s, 1.4 + 0.01 * s + 0.0001 * s) for s in range(3)]
    results["c"] = [made_up("c", s, None if s else 1.3) for s in range(3)]
    text = report.table(results, "a", "bits per byte")
    rows = {line.split()[1]: line for line in text.splitlines()[2:]}
    assert list(rows) == ["b", "a", "c"], "the lowest mean first"
    assert "1.4101 ± 0.0058" in rows["b"] and "better by 0.0999 (95% CI -0.1001 to -0.0997)" in rows["b"]
    assert "diverged with seed 1, 2" in rows["c"] and "| 10.0    | 2.0 " in rows["a"]


def test_the_picture_has_a_curve_for_each_contender_and_its_difference(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    close, figures = pyplot.close, []
    monkeypatch.setattr(pyplot, "close", figures.append)
    results = {
        "a": [made_up("a", 0, 1.5), made_up("a", 1, 1.7)],
        "b": [made_up("b", 0, 1.4), made_up("b", 1, 1.7)],
    }
    report.plot_race(results, "a", "bits per byte", tmp_path / "race.png")
    curves, forest = figures[0].axes
    drawn = {line.get_label(): line.get_xydata().round(6).tolist() for line in curves.lines}
    assert drawn == {
        "a": [[0, 3.0], [50, 2.1], [100, 1.6]],
        "b": [[0, 3.0], [50, 2.05], [100, 1.55]],
    }
    assert curves.get_ylabel() == "bits per byte" and curves.get_xlabel() == "step" and curves.get_legend()
    assert [label.get_text() for label in forest.get_yticklabels()] == ["b"]
    ((left, right),) = [bar.get_segments()[0][:, 0].tolist() for bar in forest.collections]
    # -0.05 and 12.7 standard errors of 0.05
    assert (left, right) == pytest.approx((-0.05 - 12.7062 * 0.05, -0.05 + 12.7062 * 0.05), abs=1e-4)
    close(figures[0])
