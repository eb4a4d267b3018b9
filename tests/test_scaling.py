"""A family of runs: its law, and training, interrupting and enlarging it with a made-up base_train."""

import itertools
import re
import time

import numpy as np
import pytest

from nanomuon import report, runtime
from nanomuon.command import STOPPED
from nanomuon.gpt import GPTConfig
from nanomuon.plan import meta_model
from scripts import base_train, scaling
from tests.mistakes import refused
from tests.training import QUIET, train_on

LAW = 0.8, 200.0, 0.5, 3000.0, 0.6
FLAGS = (
    "--max-seq-len 32 --total-batch-size 256 --vocab-size 300 --device-batch-size 4 --dtype float32".split()
)

pytestmark = pytest.mark.usefixtures("environment")


@pytest.mark.parametrize("larger", [1, 30, 1000])
def test_the_law_of_made_up_runs_is_found(larger):
    """For families from 40,000 parameters to 900 million. The law counts both N and D in millions."""
    (E, A, alpha, B, beta), runs = LAW, []
    for N, D in itertools.product((40_000, 160_000, 900_000), (250_000, 1_000_000, 4_000_000)):
        N, D = larger * N, larger * D
        runs.append(scaling.Member(N, D, E + A / N**alpha + B / D**beta, config=None, corpus="python"))
    found = scaling.fit(runs)
    assert np.exp(found) == pytest.approx((E, A / 1e6**alpha, alpha, B / 1e6**beta, beta), rel=0.05)
    for run in runs:
        assert scaling.loss_of((run.N, run.D), *found) == pytest.approx(run.loss, rel=1e-4)
    assert scaling.fit(runs[:6]) is None, "six runs of two sizes are too few"


def test_advice_counts_the_windows_of_the_family():
    for windows in ("S", "L"):
        config = GPTConfig.from_depth(2, 300, 2048, window_pattern=windows)
        words = scaling.advice(np.log(LAW), config, 1e16).split()
        depth, tokens = int(words[3]), float(words[5])
        model = meta_model(GPTConfig.from_depth(depth, 300, 2048, window_pattern=windows))
        assert depth > 1 and tokens == pytest.approx(1e16 / model.estimate_flops(), rel=0.01)


def test_a_family_is_enlarged_asked_and_stopped(base, monkeypatch, capsys):
    """A relative path names the same corpus the second time."""
    monkeypatch.chdir(base)

    def family(*arguments):
        code = scaling.main([*arguments, "--corpus", "path:texts", "--", *FLAGS])
        return code, capsys.readouterr().out

    code, out = family("--depths", "1,2", "--tokens", "256,600")
    assert code is None and out.count("\nval_bpb: ") == 4 and "a law needs 7 runs" in out
    with refused("family has 4: train more"):
        family("--target-flops", "1e13")
    code, out = family("--depths", "1,2,3", "--tokens", "256,600,2048", "--target-flops", "1e13")
    assert code is None and out.count(" is complete with ") == 4, "nothing is trained twice"
    assert "loss = " in out and "1e+13 FLOPs: depth " in out
    assert scaling.main(["--target-flops", "1e25"]) is None
    assert capsys.readouterr().out.endswith("by the law. Larger depths were not compared.\n")
    assert re.search(r"^  3 layers +[0-9,]+ weights +512 tokens \d\.\d{4}$", out, re.MULTILINE)
    for other in ("family-dense-d2-t512", "family-d2-t512-copy"):
        runtime.folder_of(other).mkdir()
        (runtime.folder_of(other) / "summary.json").touch()  # reading it would be an error
    monkeypatch.setattr(base_train, "main", lambda flags: STOPPED)
    assert family("--depths", "4,5", "--tokens", "256")[0] == STOPPED
    monkeypatch.setattr(scaling, "usable_gpus", lambda: 1)
    other = f"--corpus path:{base}/texts, not python; --vocab-size 300, not 4096; --max-seq-len 32, not 2048"
    with refused(f"family family was trained with {other}: choose another --name"):
        scaling.main(["--depths", "4", "--tokens", "256"])
    (runtime.folder_of("family-d1-t256") / "summary.json").write_text('{"steps": 1, "tokens": 256}')
    with refused("family-d1-t256/summary.json cannot be read: val_bpb: "):
        family()


def family_with_slow_reports(flags):
    write_report = report.write_report
    report.write_report = lambda *args: (time.sleep(0.5), write_report(*args))
    family = ["--name", "slow", "--depths", "1", "--tokens", "512", "--corpus", flags[-1]]
    return scaling.main([*family, "--", *FLAGS, *QUIET])


def test_every_rank_waits_for_the_results_of_the_run_that_ends(base):
    printed = train_on(2, base, "slow", 1, f"path:{base}/texts", main=family_with_slow_reports)
    assert "slow has 1" in printed
    assert (base / "runs/slow-d1-t512/summary.json").exists()
