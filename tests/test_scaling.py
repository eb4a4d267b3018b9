"""A family of runs: its law, and training, interrupting and enlarging it with a made-up base_train."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from nanomuon import plan, runtime
from nanomuon.command import STOPPED
from nanomuon.gpt import GPTConfig
from nanomuon.hf_export import write_config
from nanomuon.runtime import InputError
from scripts import base_train, scaling

LAW = 0.8, 200.0, 0.5, 3000.0, 0.6
FLAGS = (
    "--max-seq-len 32 --total-batch-size 256 --vocab-size 300 --device-batch-size 4 --dtype float32".split()
)

pytestmark = pytest.mark.usefixtures("environment")


def law_loss(parameters, tokens):
    E, A, alpha, B, beta = LAW
    return E + A / parameters**alpha + B / tokens**beta


@pytest.mark.parametrize("larger", [1, 30, 1000])
def test_the_law_of_made_up_runs_is_found(larger):
    """Of families from 40,000 parameters to 900 million. The law is for millions of either."""
    sizes = {1: 40_000, 2: 160_000, 4: 900_000}
    runs = []
    for depth, parameters in sizes.items():
        for tokens in (250_000, 1_000_000, 4_000_000):
            N, D, config = larger * parameters, larger * tokens, GPTConfig.from_depth(depth, 300, 32)
            runs.append(scaling.Member(N, D, law_loss(N, D), config))
    found = scaling.fit(runs)
    E, A, alpha, B, beta = LAW
    expected = E, A / 1e6**alpha, alpha, B / 1e6**beta, beta
    assert np.exp(found) == pytest.approx(expected, rel=0.05)
    for run in runs:
        assert scaling.loss_of((run.N, run.D), *found) == pytest.approx(run.loss, rel=1e-4)
    assert scaling.fit(runs[:6]) is None, "six runs of two depths are too few"


def test_the_advised_depth_is_the_best_by_the_law():
    E, A, alpha, B, beta = LAW
    law = np.log([E, A / 1e6**alpha, alpha, B / 1e6**beta, beta])
    words = scaling.advice(law, GPTConfig.from_depth(3, 300, 32), 1e13).split()
    depth, tokens, loss = int(words[3]), float(words[5]), float(words[7])
    expected = {}
    for each in range(1, 7):  # up to twice the deepest
        model = plan.meta_model(GPTConfig.from_depth(each, 300, 32))
        parameters, flops = model.multiplied_weights(), model.estimate_flops()
        expected[0.8 + 200 / parameters**0.5 + 3000 / (1e13 / flops) ** 0.6] = each, 1e13 / flops
    assert loss == pytest.approx(min(expected), rel=1e-3)
    assert (depth, tokens) == (
        expected[min(expected)][0],
        pytest.approx(expected[min(expected)][1], rel=1e-2),
    )


@pytest.fixture
def family(base, tmp_path, monkeypatch):
    """family(*arguments) runs the script with a made-up base_train, which ends with the codes in `codes`,
    then with 0 and the loss of the law. It returns its exit code and the names of the runs that were started.
    """
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOMUON_DEVICE", "cpu")
    started = []

    def train(flags):
        args = base_train.make_parser().parse_args(flags)
        started.append(args.run)
        if family.codes:
            return family.codes.pop()
        made = plan.make_plan(args, runtime.start("float32"))
        folder = runtime.folder_of(args.run)
        folder.mkdir(parents=True, exist_ok=True)
        write_config(folder, made.config)
        loss = law_loss(plan.meta_model(made.config).multiplied_weights(), made.tokens)
        runtime.write_json(
            folder / "summary.json", {"val_bpb": loss, "steps": made.steps, "tokens": made.tokens}
        )
        return 0

    def family(*arguments):
        started.clear()
        code = scaling.main([*arguments, "--corpus", f"path:{base}/texts", "--", *FLAGS])
        return code, [*started]

    family.codes = []
    monkeypatch.setattr(base_train, "main", train)
    return family


def test_a_family_is_interrupted_enlarged_and_asked(family, capsys):
    family.codes = [STOPPED]
    assert family("--depths", "1,2,3", "--tokens", "250e3,500e3") == (STOPPED, ["family-d1-t250000"])
    _, started = family("--depths", "1,2,3", "--tokens", "250e3,500e3")
    assert len(started) == 6 and started[0] == "family-d1-t250000"
    assert "A law takes 7 runs" in capsys.readouterr().out
    family("--depths", "1,2,3", "--tokens", "250e3,500e3,1e6", "--target-flops", "1e13")
    out = capsys.readouterr().out
    assert "loss = " in out and "1e+13 FLOPs: depth " in out
    assert re.search(r"^  3 layers +[0-9,]+ weights +999,936 tokens \d\.\d{4}$", out, re.MULTILINE)
    assert family() == (None, []) and capsys.readouterr().out == out.replace(out.splitlines()[-1] + "\n", "")


@pytest.mark.parametrize("tokens", [256, 999_999, 1_000_192, 123_456_789_012])
def test_a_run_has_the_tokens_that_it_is_to_have(family, tokens):
    """As many whole steps as fit."""
    args = SimpleNamespace(name="family", corpus="python", flags=FLAGS)
    given = base_train.make_parser().parse_args(scaling.flags_of(args, 2, tokens))
    made = plan.make_plan(given, runtime.start("float32"))
    assert made.steps == tokens // 256 and made.config.depth == 2


def test_a_member_with_a_bad_flag_is_named_before_any_training(family):
    with pytest.raises(InputError, match="--depth: must be from 1 to 1,024, not 5000"):
        family("--depths", "1,5000", "--tokens", "250e3")
    (runtime.folder_of("family-d1-t256")).mkdir(parents=True)
    write_config(runtime.folder_of("family-d1-t256"), GPTConfig.from_depth(1, 300, 32))
    (runtime.folder_of("family-d1-t256") / "summary.json").write_text('{"steps": 1, "tokens": 256}')
    with pytest.raises(InputError, match="family-d1-t256/summary.json cannot be read: val_bpb: "):
        family()


@pytest.mark.usefixtures("environment")
def test_two_models_of_a_family_are_trained_in_one_process(base, capsys):
    assert (
        scaling.main(["--depths", "1,2", "--tokens", "512", "--corpus", f"path:{base}/texts", "--", *FLAGS])
        is None
    )
    out = capsys.readouterr().out
    assert out.count("\nval_bpb: ") == 2 and out.count(" 512 tokens ") == 2
