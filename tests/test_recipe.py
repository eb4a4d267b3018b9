"""The recipe, and users' files that replace it."""

import copy
import functools
import math

import pytest
import torch

from nanomuon import recipe
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import read_json
from scripts import base_train
from tests.mistakes import refused
from tests.reference import MUON
from tests.training import rows, train


@functools.cache
def model():
    gpt = GPT(GPTConfig.from_depth(2, vocab_size=64, seq_len=16))
    gpt.init_weights(0)
    return gpt


def test_every_parameter_is_trained_and_only_matrices_by_muon():
    groups = recipe.make_optimizer(recipe.param_groups, model(), 4096, 3_000).param_groups
    kinds = {name: group["kind"] for group in groups for name in group["names"]}
    matrices = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")
    of_muon = {f"blocks.{i}.{matrix}.weight" for i in (0, 1) for matrix in matrices}
    for name, _ in model().named_parameters():
        assert kinds[name] == ("muon" if name in of_muon else "adamw")


def test_keywords_are_the_flags_and_reach_their_groups():
    """At width 128 the rates of AdamW are sqrt(6) times those at 768."""
    rates = dict(matrix_lr=0.125, embedding_lr=0.25, unembedding_lr=0.5, scalar_lr=2.0, weight_decay=0.75)
    groups = recipe.param_groups(model(), recipe.REFERENCE_BATCH, recipe.REFERENCE_STEPS, **rates)
    found = {group["names"][0]: (group["lr"], group["weight_decay"]) for group in groups}
    assert found["wte.weight"] == (pytest.approx(0.25 * 6**0.5), 0)
    assert found["lm_head.weight"] == (pytest.approx(0.5 * 6**0.5), 0)
    assert (0.125, 0.75) in found.values() and (2.0, 0) in found.values()
    args = base_train.make_parser().parse_args([])
    assert rates.keys() == recipe.RATES.keys()
    for name, each in (recipe.RATES | recipe.SCHEDULE).items():
        assert getattr(args, name) == each.default
        with refused("must be from 0 to"):
            base_train.make_parser().parse_args([f"--{name.replace('_', '-')}", f"{each.largest * 2}"])
    with pytest.raises(TypeError, match="the recipe has no matrix_rl; it has matrix_lr, "):
        recipe.param_groups(model(), 4096, 300, matrix_rl=1)


def test_embedding_and_head_move_at_their_rates_by_the_tiny_gradients_of_large_batches():
    """The median of the embedding's gradients is 1e-7 at 262,144 tokens, see docs/recipe.md."""
    gpt = copy.deepcopy(model())
    optimizer = recipe.make_optimizer(recipe.param_groups, gpt, 2**19, 2289)
    before = {}
    for param in gpt.parameters():
        before[param], param.grad = param.detach().clone(), torch.full_like(param, 1e-8)
    optimizer.step()
    for group in optimizer.param_groups:
        if group["names"][0] in ("wte.weight", "lm_head.weight"):
            (param,) = group["params"]
            assert ((before[param] - param) / group["lr"]).sub(1).abs().max() < 0.02


def test_a_whole_number_among_the_hyperparameters_stays_one(monkeypatch):
    """A resumed run passes the value that it has recorded."""
    monkeypatch.setitem(
        recipe.RATES, "ns_steps", recipe.Hyperparameter(5, "steps of Newton-Schulz", largest=9)
    )
    assert repr(base_train.make_parser().parse_args(["--ns-steps", "4"]).ns_steps) == "4"


def of_muon(batch, steps):
    """Rate and decay of the matrices."""
    groups = recipe.param_groups(model(), batch, steps)
    return next((group["lr"], group["weight_decay"]) for group in groups if group["kind"] == "muon")


def test_the_rule_of_batch_and_horizon_is_right_where_it_was_measured_and_published():
    """Rate and decay of nanochat at depths 12 and 24; of 2,000 steps of 768 tokens of the shakespeare task,
    for which 0.0087 to 0.02 and 0.46 to 0.5 were best; of 300 steps of 4,096, for which 0.04 was.
    """
    assert of_muon(2**19, 2289) == pytest.approx((0.02, 0.2), rel=1e-3)
    assert of_muon(2**20, 5400) == pytest.approx((0.028, 0.06), rel=0.02)
    rate, decay = of_muon(768, 2000)
    assert 0.0087 < rate < 0.02 and decay == pytest.approx(0.5, rel=0.05)
    rate, _ = of_muon(4096, 300)
    assert rate == pytest.approx(0.04, rel=0.05)
    assert of_muon(2**15, 2289) == of_muon(4096, 2289)
    for batch, steps in ((512, 100), (4096, 300), (2**15, 5_000), (2**21, 50_000)):
        rate, decay = of_muon(batch, steps)  # the total decay of a run is the same
        assert rate * decay * steps == pytest.approx(0.02 * 0.2 * 2**-19 * 1.2e9)


def test_rates_are_a_trapezoid_and_decay_falls_over_a_run():
    """Values that the schedule does not name stay as the group was built."""
    schedule = functools.partial(recipe.schedule, warmup_ratio=0.1, warmdown_ratio=0.5)
    rates = [schedule(dict(kind="adamw", lr=1.0), step, 100)["lr"] for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[4] == pytest.approx(0.5)  # (step + 1) / 10
    assert rates[9:51] == [1.0] * 42
    assert rates[75] == pytest.approx(0.5) and rates[99] == pytest.approx(1 / 50)
    muon = dict(kind="muon", lr=0.5, weight_decay=0.25, momentum=0.95)
    for step, rate, decay in ((15, 0.5, 0.2125), (30, 0.5, 0.175), (75, 0.25, 0.0625)):
        assert schedule(muon, step, 100) == pytest.approx(dict(lr=rate, weight_decay=decay))
    assert recipe.schedule(dict(kind="adamw", lr=1.0), 15, 20) == {"lr": 0.25}


def test_a_line_says_what_a_group_uses_and_another_what_has_scaled_it():
    """At 1,024 tokens, 150 steps and width 128: computed by hand from docs/recipe.md."""
    groups = recipe.param_groups(model(), 1024, 150, weight_decay=0.4)
    schedule = functools.partial(recipe.schedule, warmup_ratio=0.1)
    found = recipe.describe(groups, schedule, 150)
    lines = {line.split(" from ")[1].split(":")[0]: line for line in found}
    shorter = 2289 / 150
    length, fifteenth = shorter**0.32, 1 / 15  # of the rise, which has 15 steps
    assert lines["blocks.0.attn.q.weight"] == (
        "muon       393,216 parameters from blocks.0.attn.q.weight: "
        f"lr {0.02 * 0.5 * length * fifteenth:.4g}, momentum {1 - 0.05 * length:.4g}, "
        f"ns_steps 5, beta2 0.95, weight_decay {0.8 * shorter / length:.4g}"
    )
    assert f"lr {0.3 * length * 6**0.5 * fifteenth:.4g}, betas (" in lines["wte.weight"]
    assert len(lines) == len(groups)
    assert recipe.describe_scales(1024, 150, 128) == (
        f"scales     rates x{length:.3g} by length; of muon x0.5 by batch, of embedding and head "
        f"x2.45 by width; decay x{shorter / length:.3g} by length, x2 by batch"
    )


PARAM_GROUPS = """
def param_groups(model):
    adamw = dict(kind="adamw", lr=0.25, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    return [dict(adamw, params=list(model.parameters()))]
def schedule(group, step, steps):
    return {"lr": group["lr"] / (1 + step)}
"""


@pytest.mark.usefixtures("environment")
def test_base_train_follows_the_groups_and_the_schedule_of_a_file(base, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PARAM_GROUPS)
    of_file = ["--optimizer-file", str(file), "--eval-every=-1"]
    train(base, "file", 3, *of_file)
    multipliers = [row["lr_multiplier"] for row in rows(base, "file") if "train_loss" in row]
    assert multipliers == [1.0, 0.5, pytest.approx(1 / 3)]
    with refused(f"^--matrix-lr, --warmup-ratio: {file} replaces what this sets, so leave"):
        train(base, "other", 3, *of_file, "--matrix-lr=1", "--warmup-ratio=0.5")
    file.write_text(PARAM_GROUPS.partition("def schedule")[0])
    train(base, "rates of a file", 4, *of_file, "--warmup-ratio=0.5")
    assert rows(base, "rates of a file")[0]["lr_multiplier"] == 0.5
    file.write_text("def schedule(group, step, steps): return {'lr': group['lr'] / 2}")
    lines = []
    for rate in (0.02, 0.5):
        name = f"schedule of a file, {rate}"
        train(base, name, 1, *of_file, f"--matrix-lr={rate}")
        groups = read_json(base / "runs" / name / "settings.json")["groups"]
        lines.append(next(line for line in groups if line.startswith("muon")))
    rates = [float(line.partition(": lr ")[2].partition(",")[0]) for line in lines]
    assert rates[1] == pytest.approx(25 * rates[0], rel=1e-3)
    file.write_text("from nanomuon.gpt import GPT\nmodel = GPT")
    with refused(f"{file} defines a model, .* nanomuon/gpt.py: change it there"):
        train(base, "model", 3, *of_file)
    file.write_text("def schedule(group, step, steps): return {'lr': 1e-3 * (1 - step / 2)}")
    with refused("at step 3 of 4: lr must be finite and not negative"):
        train(base, "late", 4, *of_file)
    assert not (base / "runs/late/metrics.jsonl").exists(), "refused before the first step"
    file.write_text("def schedule(group, step): return {'lr': 1e-3}")
    with refused("mine.schedule must take the arguments .group, step, steps.,"):
        train(base, "late", 4, *of_file)


PLAIN = {"lr": 0.1}  # a group of any optimizer


@pytest.mark.parametrize(
    "group, values, said",
    [
        (MUON, None, "must return a dict.*, not None"),
        (
            MUON,
            {"betas": (0.9, 0.9)},
            "betas, which the group lacks; it has .*momentum.*: test group.'kind'.$",
        ),
        (MUON, {"params": []}, "returned params, which never change"),
        (MUON, {"ns_steps": 3}, "returned ns_steps, which never change: set them in param_groups"),
        (MUON, {"lr": math.nan}, "at step 3 of 9: lr must be finite and not negative, but is nan"),
        (MUON, {"momentum": 1}, "at step 3 of 9: momentum must be at least 0 and below 1, but is 1"),
        (PLAIN, {"lr": "0.1"}, "at step 3 of 9: lr must be a number"),
        (PLAIN, {"lr": -1}, "at step 3 of 9: lr must be finite and not negative"),
    ],
)
def test_a_schedule_returns_possible_values_for_its_group(group, values, said):
    with refused(said):
        recipe.values_at(lambda own, *at: values, dict(group, params=[]), 3, 9)


def test_a_value_that_a_schedule_returns_at_some_steps_is_otherwise_as_built():
    """A resumed run, whose groups are built anew, would differ from one that keeps it."""
    optimizer = recipe.make_optimizer(recipe.param_groups, model(), 4096, 3_000)
    built = [dict(group) for group in optimizer.param_groups]

    def schedule(group, step, steps):
        return {"lr": 0.5, "weight_decay": 0.25} if step < 4 else {"lr": 0.5}

    for step, decays in (3, [0.25] * len(built)), (4, [group["weight_decay"] for group in built]):
        base_train.set_hyperparameters(optimizer, schedule, built, step, 9)
        assert [group["weight_decay"] for group in optimizer.param_groups] == decays


def test_functions_that_a_file_imports_from_the_recipe_are_not_its_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from nanomuon.recipe import param_groups, schedule\ndef build_optimizer(model): ...")
    build, schedule, _ = recipe.load_recipe(file)
    assert build.__name__ == "build_optimizer" and schedule is recipe.schedule


CLOSURE = "import torch\ndef build_optimizer(model): return torch.optim.LBFGS(model.parameters())"


@pytest.mark.parametrize(
    "text,message",
    [
        (CLOSURE, "LBFGS.step must take the arguments .self., .*'closure'"),
        (
            "def build_optimizer(model, lr): ...",
            "file.build_optimizer must take the arguments .model., .*'lr'",
        ),
        ("schedule = 1", "must define a function: param_groups.model. or build_optimizer"),
        ("def param_groups(model): ...\ndef build_optimizer(model): ...", "defines both"),
        ("def param_groups(model): ...", "no optimizer was built"),
        ("def param_groups(model, steps): return steps and [dict(kind='adamw')]", "no optimizer was built"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(text, message, tmp_path):
    (tmp_path / "file.py").write_text(text)
    with refused(message):
        build, _, _ = recipe.load_recipe(tmp_path / "file.py")
        recipe.make_optimizer(build, model(), 4096, 3_000)


def test_an_optimizer_with_a_scheduler_of_torch_is_accepted():
    def build(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        return optimizer

    assert isinstance(recipe.make_optimizer(build, model(), 4096, 3_000), torch.optim.SGD)
