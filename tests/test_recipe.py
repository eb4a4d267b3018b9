"""The recipe and the files that may stand in its place."""

import functools
import itertools

import pytest

from nanomuon import recipe, report
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import MuonAdamW
from nanomuon.runtime import InputError
from scripts import base_train
from tests.training import arguments


@functools.cache
def model():
    gpt = GPT(GPTConfig.from_depth(2, vocab_size=64, seq_len=16))
    gpt.init_weights(0)
    return gpt


def test_every_parameter_is_trained_and_only_matrices_by_muon():
    optimizer = recipe.make_optimizer(recipe.param_groups, model(), 4096, 3_000)
    assert isinstance(optimizer, MuonAdamW)
    trained = [name for group in optimizer.param_groups for name in group["names"]]
    assert sorted(trained) == sorted(name for name, _ in model().named_parameters())
    muon = {name for group in optimizer.param_groups if group["kind"] == "muon" for name in group["names"]}
    matrices = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")
    assert muon == {f"blocks.{i}.{matrix}.weight" for i in (0, 1) for matrix in matrices}


def test_keywords_reach_their_groups():
    groups = recipe.param_groups(model(), matrix_lr=0.125, weight_decay=0.5)
    muon = [group for group in groups if group["kind"] == "muon"]
    assert muon and all(group["lr"] == 0.125 and group["weight_decay"] == 0.5 for group in muon)


def of_muon(batch, steps):
    """Rate and decay of the matrices."""
    groups = recipe.make_optimizer(recipe.param_groups, model(), batch, steps).param_groups
    muon = next(group for group in groups if group["kind"] == "muon")
    return muon["lr"], muon["weight_decay"]


def test_the_rule_of_batch_and_horizon_is_right_where_it_was_measured_and_published():
    """Rate and decay: nanochat at depth 12 and 24; 2,000 steps of the shakespeare task, of 768 tokens, where
    0.0087 to 0.02 and 0.46 to 0.5 were best; 300 steps of 4,096, where 0.04 was.
    """
    assert of_muon(2**19, 2289) == pytest.approx((0.02, 0.2), rel=1e-3)
    assert of_muon(2**20, 5400) == pytest.approx((0.028, 0.06), rel=0.02)
    rate, decay = of_muon(768, 2000)
    assert 0.0087 < rate < 0.02 and decay == pytest.approx(0.5, rel=0.05)
    rate, _ = of_muon(4096, 300)
    assert rate == pytest.approx(0.04, rel=0.05)
    assert of_muon(2**15, 2289) == of_muon(4096, 2289)


def test_what_a_run_decays_by_in_all_does_not_depend_on_its_length_or_batch():
    for batch, steps in ((512, 100), (4096, 300), (2**15, 5_000), (2**21, 50_000)):
        rate, decay = of_muon(batch, steps)
        assert rate * decay * steps == pytest.approx(0.02 * 0.2 * 2**-19 * 1.2e9)


def test_short_runs_raise_the_rates_of_all_groups_alike():
    long, short = recipe.param_groups(model(), 4096, 2289), recipe.param_groups(model(), 4096, 300)
    for one, other in zip(long, short, strict=True):
        assert other["lr"] / one["lr"] == pytest.approx((2289 / 300) ** 0.32, rel=1e-3)
    for one, other in zip(long, recipe.param_groups(model(), 4096, 100_000), strict=True):
        assert other["lr"] == pytest.approx(one["lr"], rel=1e-3)


def test_the_flags_of_base_train_have_the_defaults_of_the_recipe():
    args = base_train.make_parser().parse_args([])
    for defaults in (recipe.param_groups.__kwdefaults__, recipe.schedule.__kwdefaults__):
        assert defaults and all(getattr(args, name) == value for name, value in defaults.items())


def test_learning_rate_is_a_trapezoid():
    values = [recipe.lr_multiplier(step, 100, warmup=0.1, cooldown=0.4) for step in range(100)]
    assert values[0] == pytest.approx(0.1) and values[4] == pytest.approx(0.5)  # (step + 1) / 10
    assert values[9:60] == [1.0] * 51
    assert values[80] == pytest.approx(0.5)
    assert values[99] == pytest.approx(1 / 40)
    assert all(later < earlier for earlier, later in itertools.pairwise(values[60:]))


@pytest.mark.parametrize("steps", [1, 2, 10, 1000])
@pytest.mark.parametrize("warmup,cooldown", [(0.05, 0.5), (0.8, 1.0), (0.0, 0.0)])
def test_no_step_has_a_rate_of_zero(steps, warmup, cooldown):
    rates = [recipe.lr_multiplier(step, steps, warmup, cooldown) for step in range(steps)]
    assert min(rates) > 0 and max(rates) <= 1 and (cooldown > 0 or set(rates) == {1.0})


def test_momentum_rises_over_300_steps_or_a_third_of_a_short_run():
    assert recipe.muon_momentum(0, 10_000) == 0.85
    assert recipe.muon_momentum(150, 10_000) == pytest.approx(0.9)
    assert recipe.muon_momentum(300, 10_000) == recipe.muon_momentum(9_999, 10_000) == pytest.approx(0.95)
    assert recipe.muon_momentum(30, 90) == pytest.approx(0.95)


def test_rate_and_decay_fall_and_leave_the_group_as_it_was():
    group = dict(kind="muon", lr=0.5, weight_decay=0.25)
    rates, decays = [], []
    for step in (0, 49, 75, 99):
        values = recipe.schedule(group, step, 100, warmup_ratio=0.0, warmdown_ratio=0.5)
        rates.append(values["lr"])
        decays.append(values["weight_decay"])
    assert rates[:2] == [0.5, 0.5] and 0.5 > rates[2] > rates[3] > 0 and group["lr"] == 0.5
    assert decays == pytest.approx([0.25, 0.25 * 0.51, 0.25 * 0.25, 0.25 * 0.01])


PARAM_GROUPS = """
def param_groups(model):
    adamw = dict(kind="adamw", lr=0.25, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    return [dict(adamw, params=list(model.parameters()))]
def schedule(group, step, steps):
    return {"lr": group["lr"] / (1 + step)}
"""


def test_base_train_follows_the_groups_and_the_schedule_of_a_file(base, environment, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PARAM_GROUPS)
    build, schedule = recipe.load_recipe(file)
    assert build(model())[0]["lr"] == 0.25 and schedule({"lr": 1.0}, 3, 4) == {"lr": 0.25}
    base_train.main(arguments(base, "file", 3, "--optimizer-file", str(file), "--eval-every", "-1"))
    rows = report.read_metrics(base / "runs" / "file" / "metrics.jsonl")[0]
    assert [row["lr_multiplier"] for row in rows] == [1.0, 0.5, pytest.approx(1 / 3)]


@pytest.mark.parametrize(
    "imports", ["nanomuon.recipe import param_groups, schedule", "nanomuon import param_groups"]
)
def test_what_a_file_imports_from_here_is_not_its_own(tmp_path, imports):
    file = tmp_path / "mine.py"
    file.write_text(f"from {imports}\ndef build_optimizer(model): ...")
    build, own_schedule = recipe.load_recipe(file)
    assert build.__name__ == "build_optimizer" and own_schedule is None


@pytest.mark.parametrize(
    "text,message",
    [
        (None, "no such Python file"),
        ("x = 1", "has to define either param_groups.model. or build_optimizer"),
        ("def param_groups(model): ...\ndef build_optimizer(model): ...", "has to define either"),
    ],
)
def test_a_file_that_is_no_recipe(text, message, tmp_path):
    if text:
        (tmp_path / "file.py").write_text(text)
    with pytest.raises(InputError, match=message):
        recipe.load_recipe(tmp_path / "file.py")


@pytest.mark.parametrize("built", [None, [], [1], [dict(kind="adamw", params=[], lr=1)]])
def test_neither_groups_nor_an_optimizer(built):
    with pytest.raises(InputError, match="no optimizer was built"):
        recipe.make_optimizer(lambda model: built, model(), 4096, 3_000)


@pytest.mark.parametrize("values", [None, {"learning_rate": 1.0}])
def test_a_schedule_gives_what_the_groups_have(values):
    groups = recipe.make_optimizer(recipe.param_groups, model(), 4096, 3_000).param_groups
    recipe.check_schedule(recipe.schedule, groups, 10)
    with pytest.raises(InputError, match="what the group has .*lr"):
        recipe.check_schedule(lambda group, step, steps: values, groups, 10)
