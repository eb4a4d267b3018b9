"""A family of runs: its law, and training, interrupting and enlarging it with a made-up base_train."""

import signal

import pytest

from nanomuon import plan
from nanomuon.command import STOPPED
from nanomuon.gpt import GPTConfig
from nanomuon.hf_export import write_config
from nanomuon.runtime import InputError, write_json
from scripts import base_train, scaling

LAW = 0.8, 200.0, 0.5, 3000.0, 0.6
FLAGS = (
    "--max-seq-len 32 --total-batch-size 256 --vocab-size 300 --device-batch-size 4 --dtype float32".split()
)

pytestmark = pytest.mark.usefixtures("environment")


def member(depth, parameters, tokens):
    config = GPTConfig.from_depth(depth, 300, 32)
    loss = scaling.law_loss(LAW, parameters, tokens)
    return scaling.Member(config, tokens, parameters, 6.0 * parameters, loss)


def test_the_law_of_made_up_runs_is_found():
    sizes = {1: 40_000, 2: 160_000, 4: 900_000}
    runs = [member(d, n, t) for d, n in sizes.items() for t in (250_000, 1_000_000, 4_000_000)]
    found = scaling.fit(runs)
    assert found == pytest.approx(LAW, rel=0.05)
    for run in runs:
        assert scaling.law_loss(found, run.parameters, run.tokens) == pytest.approx(run.loss, rel=1e-4)
    assert scaling.fit(runs[:6]) is None, "six runs of two depths are too few"


def test_the_advised_depth_is_the_best_by_the_law():
    words = scaling.advice(LAW, GPTConfig.from_depth(3, 300, 32), 1e13).split()
    depth, tokens, loss = int(words[3]), float(words[5]), float(words[7])
    expected = {}
    for each in range(1, 7):  # up to twice the deepest
        parameters, flops = scaling.size_of(GPTConfig.from_depth(each, 300, 32))
        expected[0.8 + 200 / parameters**0.5 + 3000 / (1e13 / flops) ** 0.6] = each, 1e13 / flops
    assert loss == pytest.approx(min(expected), rel=1e-3)
    assert (depth, tokens) == (
        expected[min(expected)][0],
        pytest.approx(expected[min(expected)][1], rel=1e-2),
    )


class MadeUp:
    """Instead of subprocess.Popen: a base_train that ends at once, with the loss of the law."""

    started = []
    code = 0

    def __init__(self, command, stdout, **keywords):
        self.argv = command[command.index("scripts.base_train") + 1 :]
        self.stdout = stdout

    def wait(self):
        args = base_train.make_parser().parse_args(self.argv)
        self.started.append(args.run)
        if self.code:
            self.stdout.write(b"step 1\nerror: no such luck\n")
            return self.code
        folder = scaling.folder_of(args.run)
        folder.mkdir(parents=True)

        config = plan.model_config(args, args.vocab_size, "cpu")
        parameters, _ = scaling.size_of(config)
        tokens = args.num_iterations * args.total_batch_size
        write_config(folder, config)
        loss = scaling.law_loss(LAW, parameters, tokens)
        write_json(folder / "summary.json", {"val_bpb": loss, "steps": args.num_iterations, "tokens": tokens})
        return 0


@pytest.fixture
def family(base, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOMUON_DEVICE", "cpu")
    monkeypatch.setattr(scaling.subprocess, "Popen", MadeUp)
    monkeypatch.setattr(scaling, "exit_when_asked", lambda: None)
    monkeypatch.setattr(MadeUp, "started", [])
    monkeypatch.setattr(MadeUp, "code", 0)

    def run(*arguments):
        return scaling.main([*arguments, "--corpus", f"path:{base}/texts", "--", *FLAGS])

    return run


def test_a_family_is_interrupted_enlarged_and_asked(family, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(MadeUp, "code", STOPPED)
    with pytest.raises(SystemExit):
        family("--depths", "1,2,3", "--tokens", "250e3,500e3")
    monkeypatch.setattr(MadeUp, "code", 0)
    family("--depths", "1,2,3", "--tokens", "250e3,500e3")
    assert len(MadeUp.started) == 7 and MadeUp.started[0] == MadeUp.started[1] == "family-d1-t250000"
    assert "A law takes 7 runs" in capsys.readouterr().out
    family("--depths", "1,2,3", "--tokens", "250e3,500e3,1e6", "--target-flops", "1e13")
    out = capsys.readouterr().out
    assert len(MadeUp.started) == 10 and "family-d1-t250000 is finished, skipped" in out
    assert "loss = " in out and "1e+13 FLOPs: depth " in out
    assert "| 3     |" in (tmp_path / "scaling/family/scaling.md").read_text()


def test_a_run_that_fails_is_named_with_its_error(family, monkeypatch):
    monkeypatch.setattr(MadeUp, "code", 2)
    with pytest.raises(InputError, match="^run family-d1-t250000: no such luck"):
        family("--depths", "1", "--tokens", "250e3")
    with pytest.raises(InputError, match="has no finished run yet"):
        scaling.main([])
    with pytest.raises(InputError, match="nowhere"):
        scaling.main(["--depths", "1", "--tokens", "250e3", "--corpus", "path:/nowhere"])


def test_the_run_in_training_saves_before_an_interrupted_family_ends(family, monkeypatch):
    class Interrupted(MadeUp):
        signals = []

        def wait(self):
            if not self.signals:
                raise KeyboardInterrupt
            self.signals.append("waited")

        def send_signal(self, number):
            self.signals.append(number)

    monkeypatch.setattr(scaling.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        family("--depths", "1", "--tokens", "250e3")
    assert Interrupted.signals == [signal.SIGTERM, "waited"]
