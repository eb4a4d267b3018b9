"""A race as people run it: small ones that are interrupted, enlarged, tuned, refused, reported."""

import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
import torch

from nanomuon import gpt
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import read_json
from scripts import optim_race
from scripts.base_train import set_hyperparameters
from scripts.laboratory import contenders, race, report, tasks
from scripts.laboratory.contenders import Contender
from tests.mistakes import refused
from tests.training import QUIET, ROOT, STILL, optimizer_file, rows, train
from tests.worlds import FORKS

SMALL = "--model depth=1 width=32 heads=2 kv_heads=2 seq_len=16 --steps 4 --jobs 1 --dtype float32".split()
ADAMW, LION, MUON = (f"{ROOT}/contenders/{name}.py" for name in ("adamw", "lion", "muon"))


class Inline:
    """A pool that works in this process and records its calls."""

    submitted = []
    stop_after = math.inf

    def __init__(self, *_):
        pass

    def shutdown(self):
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
    """Words in random order: something to learn, and the same letters in both parts."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(20)]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(rng.choices(words, k=3000)))
    return file


@pytest.fixture
def lab(text, tmp_path, eager, monkeypatch):
    """lab(*contenders, flag=value) runs the script in this process and in tmp_path. Returns how many runs it
    trained; they are in Inline.submitted.
    """
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(race, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(Inline, "submitted", [])
    monkeypatch.setattr(Inline, "stop_after", math.inf)

    def run(*contenders, seeds=1, **flags):
        Inline.submitted.clear()
        others = [f"--{flag}={value}" for flag, value in flags.items()]
        racing = ["--contenders", *contenders, f"--seeds={seeds}"]
        optim_race.main([f"--text={text}", *SMALL, *racing, *others])
        return len(Inline.submitted)

    return run


@pytest.fixture
def own(tmp_path):
    """own(code, options): a contender whose file, own.py, has this code."""

    def write(code, options=""):
        (tmp_path / "own.py").write_text(code)
        return Contender(f"{tmp_path}/own.py{options}")

    return write


def lines_of(tmp_path, name="shakespeare"):
    return [json.loads(line) for line in (tmp_path / f"races/{name}/results.jsonl").read_text().splitlines()]


def test_a_race_is_interrupted_goes_on_and_grows(lab, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "races/shakespeare"
    monkeypatch.setattr(Inline, "stop_after", 3)
    with pytest.raises(KeyboardInterrupt):
        lab("default", LION, seeds=2)
    monkeypatch.setattr(Inline, "stop_after", math.inf)
    kept = len(lines_of(tmp_path)) - 1
    with open(folder / "results.jsonl", "a") as results:
        results.write('{"contender": "default", "se')  # as a full disk leaves it
    assert lab("default", LION, seeds=2) == 4 - kept
    assert lab("default", LION, seeds=2) == 0, "nothing is trained twice"
    assert lab("default", LION, f"{LION}:lr_scale=0.1", seeds=2) == 2
    out = capsys.readouterr().out
    assert "4 of 6 runs are already done" in out and f"| {LION} " in out
    header, *runs = lines_of(tmp_path)
    assert header["setup"]["steps"] == 4 and len(runs) == 6
    assert (folder / "race.png").stat().st_size > 5_000
    page = (folder / "race.md").read_text()
    assert f"| {LION} " in page and f"- {LION}: " in page and " tokens, float32\n" in page
    with refused("was run with steps 4, not 20: choose another --name"):
        lab("default", steps=20)


NOISY = """
import torch

class Noisy(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad += 0.01 * torch.randn_like(param)
        super().step()

def build_optimizer(model):
    return Noisy(model.parameters(), lr=0.1, momentum=0.9)
"""


@pytest.mark.parametrize("contender", ["default", "noisy.py"])
def test_a_run_that_is_cut_off_goes_on_from_its_checkpoint(contender, lab, tmp_path, monkeypatch):
    """It is evaluated at steps 25 and 30, and killed between the two."""
    (tmp_path / "noisy.py").write_text(NOISY)
    lab(contender, steps=30, name="whole")
    monkeypatch.setattr(race, "SAVE_EVERY_S", -1)
    step, taken = race.training_step, []

    def is_killed_after_its_28th(*arguments):
        if len(taken) == 28:
            raise KeyboardInterrupt
        taken.append(step(*arguments))
        return taken[-1]

    monkeypatch.setattr(race, "training_step", is_killed_after_its_28th)
    with pytest.raises(KeyboardInterrupt):
        lab(contender, steps=30)
    taken.clear()
    assert lab(contender, steps=30) == 1 and len(taken) == 30 - 25
    (_, whole), (_, cut_off) = lines_of(tmp_path, "whole"), lines_of(tmp_path)
    assert [step for step, _ in whole["curve"]] == [0, 25, 30]
    assert cut_off["curve"] == whole["curve"] and cut_off["score"] == whole["score"]
    assert not (tmp_path / "races/shakespeare/unfinished").exists()


def test_a_run_that_cannot_be_saved_races_all_the_same(lab, tmp_path, capsys, monkeypatch):
    """No checkpoint can hold its optimizer's state, or the disk is full."""

    def write(path, content):
        raise OSError(28, "No space left", str(path))

    monkeypatch.setattr(race, "SAVE_EVERY_S", -1)
    listed = NOISY.replace("super().step()", "super().step(); self.state[param]['seen'] = []")
    (tmp_path / "noisy.py").write_text(listed)
    said = "warning: not saved; an interruption loses the steps since the last save: "
    assert lab("noisy.py", steps=30) == 1
    assert f"{said}optimizer." in capsys.readouterr().out
    monkeypatch.setattr(race, "write_json", write)
    assert lab("default", steps=30) == 1
    assert f"{said}[Errno 28]" in capsys.readouterr().out


def killed(pipe):
    context = multiprocessing.get_context("fork")  # FORKS would start another fork server from here
    pool = ProcessPoolExecutor(1, context, race.start_worker, (0,))
    pool.submit(hold, pipe).result()
    os.kill(os.getpid(), signal.SIGKILL)


def hold(pipe):
    """The worker holds this end of the pipe until it exits."""
    globals()["held"] = pipe


def test_the_workers_of_a_killed_race_end():
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=killed, args=(theirs,))
    process.start()
    theirs.close()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL and ours.poll(300)
    with pytest.raises(EOFError):
        ours.recv()


OWN = """
import torch

def build_optimizer(model, *, lr=0.01):
    return torch.optim.SGD(model.parameters(), lr=lr)

def schedule(group, step, steps):
    return {"lr": group["lr"] * (1 - step / steps)}
"""


def test_a_file_is_a_contender_by_its_code_its_hyperparameters_and_the_model(lab, own, tmp_path, monkeypatch):
    own(OWN)
    assert lab("own.py", "own.py:lr=0.02") == 2
    _, first, second = lines_of(tmp_path)
    assert first["key"] != second["key"] and first["sha256"] == second["sha256"]
    assert first["score"] != second["score"]
    assert lab("own.py") == 0
    own(OWN.replace("0.01", "0.03"))
    assert lab("own.py") == 1
    monkeypatch.setattr(contenders, "model_sources", lambda: {"gpt.py": "another"})
    assert lab("own.py") == 1


TINY = dict(vocab_size=24, seq_len=16, depth=2, width=32, heads=2, kv_heads=2)
SETUP = {"model": TINY, "dtype": "float32", "rows": 2, "steps": 4}
FROM_WEIGHTS = """
import torch

made = []

def build_optimizer(model):
    made.append(object())
    groups = [{"params": list(model.parameters()), "own": made[-1]}]
    return torch.optim.SGD(groups, lr=model.wte.weight.std().item())

def schedule(group, step, steps):
    assert 0.9 < group["lr"] < 1.1
    return {}
"""


def test_a_key_depends_on_initial_weights_but_not_on_addresses(own):
    contender = own(FROM_WEIGHTS)
    assert contender.key(SETUP) == contender.key(SETUP)


SHARED_RATE = """
import torch

def build_optimizer(model):
    return torch.optim.SGD([{"params": [param]} for param in model.parameters()], lr=torch.tensor(0.5))

def schedule(group, step, steps):
    return RETURNED
"""


def test_lr_scale_multiplies_all_rates_once(own):
    """Those that a schedule computes from the groups, or by itself, or leaves out."""

    def rates(contender):
        optimizer, built = contender.prepare(contender.initial_model(SETUP, "cpu", 0), SETUP)
        for step in (0, 2):
            set_hyperparameters(optimizer, contender.schedule, built, step, 4)
        return [float(group["lr"]) for group in optimizer.param_groups]

    assert rates(Contender("default:lr_scale=2")) == [2 * rate for rate in rates(Contender("default"))]
    for returned, rate in ("{'lr': 0.25}", 0.5), ("{}", 1.0), ("{'lr': group['lr'] / 2}", 0.5):
        code = SHARED_RATE.replace("RETURNED", returned)
        assert set(rates(own(code, ":lr_scale=2"))) == {rate}


def test_a_file_that_changes_during_a_race_is_not_mixed_with_what_it_was(lab, own, tmp_path, monkeypatch):
    own(OWN)

    class Edits(Inline):
        def submit(self, *arguments):
            if len(self.submitted) == 1:
                own(OWN.replace("0.01", "0.03"))
            return super().submit(*arguments)

    monkeypatch.setattr(race, "ProcessPoolExecutor", Edits)
    with refused("its file or the model's has changed since the race began: start the race again"):
        lab("own.py", seeds=2)
    assert len(lines_of(tmp_path)) == 2, "the earlier run remains"
    assert lab("own.py", seeds=2) == 2, "the file is another contender now"


def test_what_a_file_changes_in_the_library_reaches_no_other_run(lab, tmp_path, monkeypatch):
    """With real processes, one run at a time, for which a pool would use a single process."""
    lab("default", name="alone")
    get_context = multiprocessing.get_context

    def preloaded(method):  # as clean as one that is spawned, without the seconds of its imports
        return FORKS if method == "spawn" else get_context(method)

    monkeypatch.setattr(race, "ProcessPoolExecutor", ProcessPoolExecutor)
    monkeypatch.setattr(race.multiprocessing, "get_context", preloaded)
    monkeypatch.setattr(gpt.MLP, "forward", gpt.MLP.forward)  # the file is run in this process too
    (tmp_path / "patch.py").write_text(
        "from nanomuon import gpt, recipe\n"
        "param_groups = recipe.param_groups\n"
        "gpt.MLP.forward = lambda self, x, *others: 0 * x\n"
    )
    lab("patch.py", "default", name="beside")
    (_, alone), (_, patched, beside) = lines_of(tmp_path, "alone"), lines_of(tmp_path, "beside")
    assert patched["contender"] != "default" and patched["score"] != alone["score"]
    assert beside["score"] == alone["score"]


def test_without_a_compiler_a_race_runs_eagerly(lab, own, capsys, monkeypatch):
    own(OWN)
    monkeypatch.setenv("NANOMUON_COMPILE", "1")
    monkeypatch.setenv("CXX", "/nowhere")
    lab("own.py")
    assert "no C++ compiler /nowhere: running eagerly, which is slower" in capsys.readouterr().out


def test_a_contender_that_diverges_is_reported(lab, own, capsys):
    own(OWN)
    lab(ADAMW, "own.py:lr=1e30", seeds=2)
    assert "diverged with seed 0, 1" in capsys.readouterr().out
    with refused("the baseline .* diverged"):
        lab("own.py:lr=1e30", ADAMW, seeds=2)


def test_evaluations_use_the_weights_that_eval_puts_in_place(lab, tmp_path, capsys):
    """The race also warns that most parameters are not trained."""
    optimizer_file(tmp_path, "own", STILL)
    lab("own.py")
    assert "warning: contender own.py does not train " in capsys.readouterr().out
    _, run = lines_of(tmp_path)
    letters = run["score"]
    assert all(part == pytest.approx(letters, rel=1e-4) for _, part in run["curve"]), "zeros never learn"


def test_a_sweep_finds_the_best_trial_of_each_contender(lab, tmp_path, capsys, monkeypatch):
    clock = itertools.count(step=60 / 3)  # a run takes a minute: it reads the clock twice, the race once
    monkeypatch.setattr(race.time, "monotonic", clock.__next__)
    trained = lab(f"{ADAMW}:lr_scale=0.01", MUON, sweep=4, seeds=2)
    assert trained == 2 * (5 + 2 + 1) + 4
    out = capsys.readouterr().out
    assert (
        f"tuning {MUON}: lr_scale 0.333 to 3, matrix_lr 0.01 to 0.04\n"
        "tuning: trials of 1 steps, for each contender: 5\n" in out
    )
    assert "about 9 min left of these 10\n" in out
    of_seed = {}
    for run in lines_of(tmp_path)[1:]:
        if ADAMW in run["contender"]:
            of_seed.setdefault(run["seed"], {})[run["contender"]] = run["score"]
    assert of_seed.keys() == {1000, 1001, 1002, 0, 1}, "tuned on no seed of the race"
    best = min(of_seed[1001], key=of_seed[1001].get)  # of the two that ran half the length
    assert len(of_seed[1001]) == 2 and [*of_seed[1002]] == [*of_seed[0]] == [best]


def test_dials_are_rates_decay_and_what_the_file_names(own):
    contender = own(OWN + 'DIAL = ("lr", 0.1, 0.9)\n')
    assert contender.dials() == {"lr_scale": (1 / 3, 3), "lr": (0.1, 0.9)}
    with refused("own.py: DIAL must be .keyword, low, high., .*keywords lr_scale, lr, not"):
        own(OWN + 'DIAL = ("nope", 0.1, 0.9)\n').dials()
    assert Contender(f"{ADAMW}:weight_decay=0.2").dials()["weight_decay"] == (0.05, 0.8)


def test_a_dial_between_integers_takes_integers(own):
    contender = own('def build_optimizer(model, ns_steps=5): ...\nDIAL = ("ns_steps", 3, 9)\n')
    tried = [trial.options.get("ns_steps", 5) for trial in contender.trials(9)]
    assert all(isinstance(steps, int) and 3 <= steps <= 9 for steps in tried) and len(set(tried)) > 3


def test_a_trial_keeps_strings_and_tuples(own):
    code = "def build_optimizer(model, *, mode='x', size='x', triples=(), lr=0.1): ..."
    options = ":mode=a b,size='1',triples=((2,-1.5,0.5),(2,1,0)),lr=0.1"
    trial = own(code, options).with_options({"lr": 0.2})
    triples = (2, -1.5, 0.5), (2, 1, 0)
    assert trial.options == {"mode": "a b", "size": "1", "triples": triples, "lr": 0.2}


@pytest.mark.parametrize(
    "code, said",
    [
        ("def schedule(group, step): ...", "own.schedule must take the arguments .group, step, steps., "),
        ("def schedule(group, step, steps, x): ...", "missing a required argument: 'x'"),
        ("def model(config): ...", "own.model must take the arguments .config, compute_dtype., "),
        ("import torch\nmodel = torch.nn.Linear(1, 1)", "model must be a class or function, not a finished"),
    ],
)
def test_a_function_with_other_parameters_is_refused(code, said, own):
    with refused(said):
        own(code)


def test_a_model_has_keywords(own):
    code = WIDE_MLP.replace("compute_dtype):", "compute_dtype, *, wider):").replace("32", "wider")
    model = own(code, ":wider=8").model(SETUP, "meta")
    assert model.blocks[0].mlp.up.weight.shape == (128 + 8, 32)


def model_of(fields):
    model = GPT(GPTConfig(**fields))
    model.init_weights(0)
    return model


ONE_FUNCTION = {
    "schedule.py": "def schedule(group, step, steps): return {'lr': group['lr'] / (1 + step)}",
    "groups.py": "from nanomuon import recipe\nparam_groups = recipe.param_groups",
    "model.py": "from nanomuon.gpt import GPT\nmodel = GPT",
}


def test_a_file_may_define_any_one_of_its_functions(lab, tmp_path):
    """The default supplies the rest, with the same loss if the file changes nothing."""
    for file, code in ONE_FUNCTION.items():
        (tmp_path / file).write_text(code)
    lab("default", *ONE_FUNCTION, *(f"{file}:matrix_lr=0.001" for file in ONE_FUNCTION))
    scores = {run["contender"]: run["score"] for run in lines_of(tmp_path)[1:]}
    for file in ONE_FUNCTION:
        assert (scores[file] == scores["default"]) == (file != "schedule.py")
        assert scores[f"{file}:matrix_lr=0.001"] != scores[file]


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


NEW_GATE = """
import torch
from torch import nn
from nanomuon.gpt import GPT, Linear

def model(config, compute_dtype):
    model = GPT(config, compute_dtype)
    for block in model.blocks:
        block.mlp.gate = Linear(config.width, config.width)  # which init_weights leaves at zero
        block.norm = nn.Parameter(model.x0_scalars.new_empty(3))
    model.register_buffer("scale", torch.ones(3))
    return model
"""


def test_models_race_in_pairs(lab, own, tmp_path, capsys, monkeypatch):
    """They see the same rows; parameters with a name and shape of the default start from its values."""
    seen, training_step = [], race.training_step

    def noted(model, forward, optimizer, training, micro_steps):
        batch = next(training)
        seen.append(batch[0])
        return training_step(model, forward, optimizer, iter([batch]), micro_steps)

    monkeypatch.setattr(race, "training_step", noted)
    contender = own(WIDE_MLP)
    lab("default", "own.py", "default:heads=4,kv_heads=4")
    out = capsys.readouterr().out
    header, *runs = lines_of(tmp_path)
    default = sum(param.numel() for param in model_of(header["setup"]["model"]).parameters())
    wider = default + 2 * 32 * (160 - 128) + 3
    assert f"default: {default:,} parameters\nown.py: {wider:,} parameters" in out
    of_default, *of_others = torch.stack(seen).chunk(3)
    assert len(of_default) == 4 and all(torch.equal(rows, of_default) for rows in of_others)
    assert len({run["score"] for run in runs}) == 3
    model = contender.initial_model(SETUP, "cpu", 0)
    default = dict(model_of(TINY).named_parameters())
    for name, param in model.named_parameters():
        if "mlp" not in name and "extra" not in name:
            assert torch.equal(param, default[name]), name
    own(NEW_GATE)
    lab("own.py", name="gate")
    line = "warning: own.py: blocks.0.norm, blocks.0.mlp.gate.weight, scale start at zero; "
    assert line in capsys.readouterr().out and line in (tmp_path / "races" / "gate" / "race.md").read_text()
    own("def model(config, compute_dtype): return 5")
    with refused("contender own.py: model.config, compute_dtype. must return a subclass of GPT"):
        lab("own.py")


@pytest.mark.parametrize(
    "contender, message",
    [
        ("nope", "contender nope is neither default nor a file"),
        ("default:foo=1", "contender default has no foo; it has lr_scale, matrix_lr.*, heads, kv_heads"),
        (
            "default:heads=x",
            "contender default:heads=x: heads='x': the content: Input should be a valid integer",
        ),
        ("default:seq_len=8", "contender default has no seq_len"),
        ("default:matrix_lr=-1", "contender default:matrix_lr=-1: matrix_lr must be from 0 to 1e.30"),
        ("default:warmup_ratio=3", "contender default:warmup_ratio=3: warmup_ratio must be from 0 to 1"),
        ("default:heads=3", "contender default:heads=3: width 32 must be an even multiple"),
    ],
)
def test_an_impossible_contender_is_named_before_anything_is_trained(contender, message, lab):
    with refused(message):
        lab("default", contender)
    assert not Inline.submitted


RULE = """
from nanomuon import recipe
def param_groups(model, **keywords):
    groups = recipe.param_groups(model, **keywords)
    for group in groups:
        if group["kind"] == "muon":
            group.update(direction=lambda U, buffers, ok, hyper: U.sign())
    return groups
"""


def test_an_error_that_a_step_meets_comes_before_the_first_run(lab, own):
    own(RULE)
    with pytest.raises(ValueError, match=r"lambda. must return \(X, gain\)"):
        lab("default", "own.py")
    assert not Inline.submitted


def test_the_last_tenth_of_a_text_is_scored(text):
    _, setup = tasks.shakespeare_setup(str(text), {})
    _, validation, _ = tasks.shakespeare_data(setup, str(text), 0, "cpu")
    scored = sum((targets >= 0).sum() for _, targets in validation)
    characters = len(text.read_text())
    held_out = characters - int(0.9 * characters)
    assert held_out - 64 - 1 <= scored <= held_out - 1
    with refused("too few for windows of 5000"):
        tasks.shakespeare_setup(str(text), {"seq_len": 5000})
    with refused("has changed since the race began"):
        tasks.shakespeare_data(setup | {"data": "of another text"}, str(text), 0, "cpu")


def test_a_race_on_a_corpus_trains_what_base_train_trains(base, environment, lab, monkeypatch):
    """The same model, rows, course and validation set: the same loss."""
    monkeypatch.setattr(tasks, "BATCH", 256)
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(base))
    train(base, "same", 8, *QUIET, "--device-batch-size=8")  # the rows of a step at once, as in a race
    config = read_json(base / "runs/same/config.json")
    flags = ["--task", "corpus", "--corpus", f"path:{base}/texts", "--vocab-size", "300"]
    flags += "--dtype float32 --steps 8 --seeds 1 --contenders default".split()
    optim_race.main([*flags, "--model", "depth=2", "seq_len=32"])
    header, run = lines_of(base, "corpus")
    assert header["setup"]["model"].items() <= config.items()
    assert header["setup"]["unit"] == "bits per byte" and header["setup"]["rows"] == 8
    assert run["score"] == pytest.approx(rows(base, "same")[-1]["val_bpb"], abs=1e-6)
    with refused("was run with model .*'heads': 2.*: choose another --name"):
        optim_race.main([*flags, "--model", "depth=2", "seq_len=32", "heads=4", "kv_heads=4"])


def example(page, name):
    """The Python file of this name on a page."""
    return re.search(rf"```python\n(# {name}\n.*?)```", (ROOT / page).read_text(), re.DOTALL)[1]


def test_the_files_on_the_pages_are_contenders(tmp_path):
    for page, name in (("README.md", "my_groups.py"), ("docs/racing.md", "my_model.py")):
        (tmp_path / name).write_text(example(page, name))
    groups, model = Contender(f"{tmp_path}/my_groups.py:beta2=0.8"), Contender(f"{tmp_path}/my_model.py")
    assert groups.dials() == model.dials() == Contender("default").dials()
    built, expected = (each.prepare(model_of(TINY), SETUP)[1] for each in (groups, Contender("default")))
    assert {group["beta2"] for group in built if group["kind"] == "muon"} == {0.8}
    assert [group["lr"] for group in built] == [group["lr"] for group in expected]  # told batch and steps
    built = model.initial_model(SETUP, "cpu", 0)
    assert type(built.blocks[0].mlp).__name__ == "SwiGLU" and len(model.describe(SETUP)) == 1  # no warning


def made_up(name, seed, score):
    curve = [[0, 3.0], [50, score and score + 0.5], [100, score]]
    times = {"step_ms": 10.0, "optimizer_ms": 2.0}
    return {"contender": name, "seed": seed, "score": score, "curve": curve, "steps": 100, **times}


def test_the_table_says_what_the_runs_say():
    results = {"a": [made_up("a", s, 1.5 + 0.01 * s) for s in range(3)]}
    results["b"] = [made_up("b", s, 1.4 + 0.01 * s + 0.0001 * s) for s in range(3)]
    results["c"] = [made_up("c", s, None if s else 1.3) for s in range(3)]
    results["d"] = results["a"]
    text = report.table(results, "a", "bits per byte")
    rows = {line.split()[1]: line for line in text.splitlines()[2:]}
    assert list(rows) == ["b", "a", "d", "c"], "the lowest mean first"
    assert "exactly the same scores: it changes nothing" in rows["d"]
    assert "1.4101 ± 0.0058" in rows["b"] and "better by 0.0999 (95% CI 0.0997 to 0.1001)" in rows["b"]
    assert "diverged with seed 1, 2" in rows["c"] and "| 10.0    | 2.0 " in rows["a"]


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "has no complete line: remove it"),
        ("{}\n", "line 1, the setup of the race, .*choose another --name"),
        ('\n{"setup": {}}\n', "line 1, the setup of the race, .*choose another --name"),
        ('{"setup": {}}\n[1]\n', "line 2 .*remove that line"),
        ('{"setup": {}}\n{"contender": "a", "seed": "1"}\n', "line 2 .*seed: .*remove"),
    ],
)
def test_a_damaged_file_of_a_race_is_one_line(tmp_path, content, said):
    file = tmp_path / "results.jsonl"
    file.write_text(content)
    with refused(f"{file} {said}"):
        race.read_results(file)


def cells(text):
    """{contender: its score and what is said about it} of the table in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return {line.split()[1]: [cell.strip() for cell in line.split("|")[2:5]] for line in lines}


def kept_race(name, steps):
    """The unit of a race in docs/races, and its runs by contender, without those for tuning."""
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
    assert cells(report.table(results, baseline, unit)) == cells(page)
