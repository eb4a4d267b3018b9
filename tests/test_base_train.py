"""The training script as people use it: whole runs on a small corpus, alone and on several processes."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from nanomuon import plan, shards
from nanomuon.corpus import open_corpus
from nanomuon.gpt import GPT
from nanomuon.plan import recall
from nanomuon.report import read_metrics
from nanomuon.runtime import InputError
from scripts import base_eval, base_train, sample
from tests.texts import TOKENIZER
from tests.training import Ranks, arguments, losses

pytestmark = pytest.mark.usefixtures("environment")

QUIET = ("--eval-every", "-1", "--save-every", "-1")


def optimizer_file(folder, name, builds):
    file = folder / f"{name}.py"
    file.write_text(f"import torch\ndef build_optimizer(model):\n    return torch.optim.{builds}\n")
    return "--optimizer-file", str(file)


@pytest.fixture(scope="module")
def whole_run(base):
    """40 steps without interruption, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOMUON_BASE_DIR", str(base))
        patch.setenv("NANOMUON_COMPILE", "0")
        assert base_train.main(arguments(base, "whole", 40, "--eval-every", "10", "--save-every", "15")) == 0
    return base / "runs" / "whole"


def test_a_finished_run_has_everything(whole_run):
    training, evaluation = read_metrics(whole_run / "metrics.jsonl")
    assert [(row["step"], row["tokens"]) for row in training] == [(i, 256 * i) for i in range(1, 41)]
    assert set(training[0]) >= {"train_loss", "lr_multiplier", "step_ms", "tokens_per_second"}
    assert [row["step"] for row in evaluation] == [10, 20, 30, 40]
    assert training[0]["train_loss"] == pytest.approx(5.7, abs=0.05)  # ln 300: it starts knowing nothing
    assert evaluation[-1]["val_bpb"] < 0.8 * evaluation[0]["val_bpb"]
    summary = json.loads((whole_run / "summary.json").read_text())
    assert summary["val_bpb"] == round(evaluation[-1]["val_bpb"], 4) and summary["tokens"] == 40 * 256
    figures = "train_loss steps seconds tokens_per_second optimizer_ms peak_memory_mb parameters"
    assert set(summary) >= set(figures.split())
    names = "report.md loss.png model.safetensors config.json settings.json tokenizer checkpoints/step_40"
    names += " tokenizer.json modeling_nanomuon.py README.md"
    assert [name for name in names.split() if not (whole_run / name).exists()] == []
    text = (whole_run / "report.md").read_text()
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    revision = open_corpus(f"path:{whole_run.parents[1]}/texts").revision
    said = [str(summary["val_bpb"]), f"| torch | {torch.__version__.split('+')[0]}", "| threads | ", head]
    for part in (*said, f"| revision | {revision} |", "| matrix_lr | 0.02 |", "| depth | 2 |"):
        assert part in text
    assert "| resume |" not in text and "| run |" not in text
    assert not [file for ending in ("tmp", "pt", "pkl") for file in whole_run.rglob(f"*.{ending}")]


def test_a_finished_run_is_left_alone(base, whole_run, capsys):
    before = (whole_run / "metrics.jsonl").read_bytes()
    assert base_train.main(arguments(base, "whole", 40)) == 0
    output = capsys.readouterr().out
    assert "is complete" in output and "val_bpb: " in output
    assert (whole_run / "metrics.jsonl").read_bytes() == before
    (shutil.rmtree(whole_run / "checkpoints"), (whole_run / "checkpoints").mkdir())
    with pytest.raises(InputError, match="is complete and has no checkpoint to go on from"):
        base_train.main(arguments(base, "whole", 50))
    assert (whole_run / "metrics.jsonl").read_bytes() == before


# cuBLAS, NCCL and Inductor read them when they start
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_NVLS_ENABLE": "0",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}


def test_a_deterministic_run_asks_for_it_before_it_starts_and_stays_one(base, monkeypatch):
    """On a CPU every run equals itself. This sees that all operations have a deterministic form, and that
    GPUs are asked for it.
    """
    for name in DETERMINISTIC:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    start, at_the_start = base_train.start, []

    def start_with_what_is_set(dtype):
        at_the_start.append({name: os.environ.get(name) for name in DETERMINISTIC})
        return start(dtype)

    monkeypatch.setattr(base_train, "start", start_with_what_is_set)
    options = ("--experts", "2", "--window-pattern", "SL", "--deterministic")
    try:
        assert base_train.main(arguments(base, "deterministic", 4, *QUIET, *options)) == 0
        assert torch.are_deterministic_algorithms_enabled() and at_the_start == [DETERMINISTIC]
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
    args, _ = recall(base_train.make_parser(), arguments(base, "deterministic", 6))
    assert args.deterministic


def test_two_processes_train_the_model_that_one_trains(base):
    """Also with gradients that travel in bf16, but for their rounding, which grows with the steps."""
    rounded = ("--comm-dtype", "bfloat16")
    for run, processes, flags in (("one", 1, ()), ("two", 2, ()), ("rounded", 2, rounded)):
        ranks = Ranks(base, run, 60, *QUIET, *flags, processes=processes)
        assert ranks.join() == [0] * processes, ranks.output()
    one, two, in_bf16 = (losses(base, run) for run in ("one", "two", "rounded"))
    assert two == pytest.approx(one, abs=1e-4) and one[-1] < one[0] - 1
    # A mean of two gradients is off by up to 2^-8 of them: each is rounded by 2^-9, and their sum once more.
    # What the updates gain is off by no larger a part, since the errors of elements add up to nothing
    assert in_bf16[0] == two[0] and in_bf16[1:] != two[1:]
    assert in_bf16[:12] == pytest.approx(two[:12], abs=2**-8 * (two[0] - two[11]))


def test_the_users_optimizer_sees_averaged_gradients_and_resumes_in_pieces(base):
    file = optimizer_file(base, "adamw", "AdamW(model.parameters(), lr=3e-3)")
    for run, processes, steps in (("adamw", 1, 20), ("moved", 2, 10), ("moved", 2, 15), ("moved", 1, 20)):
        pieces = ("--shard", "fsdp") if processes > 1 and steps < 15 else ()
        options = (*file, "--eval-every", "-1", "--warmdown-ratio", "0", *pieces)
        ranks = Ranks(base, run, steps, *options, processes=processes)
        assert ranks.join() == [0] * processes, ranks.output()
    assert losses(base, "moved") == pytest.approx(losses(base, "adamw"), abs=1e-4)
    assert losses(base, "adamw")[-1] < losses(base, "adamw")[0] - 0.5


def test_a_run_that_is_not_finite_ends_with_a_message_and_exports_nothing(base, capsys):
    explode = optimizer_file(base, "explode", "SGD(model.parameters(), lr=1e30)")
    for run, steps, options, why in (
        (
            "explode",
            100,
            explode,
            "error: 10 losses in a row are not finite, or their gradients; no checkpoint is",
        ),
        ("diverged", 6, ("--matrix-lr", "1e30"), "run diverged has diverged, its validation loss is not"),
    ):
        assert base_train.main(arguments(base, run, steps, *options, *QUIET)) == 1
        assert why in capsys.readouterr().err and len(losses(base, run)) < 20
        assert not (base / "runs" / run / "model.safetensors").exists()


def test_parameters_in_no_group_are_named(base, capsys):
    file = optimizer_file(base, "some", "SGD([model.wte.weight], lr=0.1)")
    assert base_train.main(arguments(base, "some", 2, *file, *QUIET)) == 0
    named = capsys.readouterr().out.split("not trained: ")[1].split("\n")[0].split(", ")
    assert "lm_head.weight" in named and "wte.weight" not in named


def test_what_is_wrong_on_the_first_rank_ends_all_of_them_with_2(base):
    ranks = Ranks(base, "bad-two", 3, "--corpus", "path:/no/such/folder", processes=2)
    assert ranks.join() == [2, 2]
    assert set(ranks.output().splitlines()) == {"error: corpus path:/no/such/folder: no such file or folder"}


def test_a_run_in_bf16_learns_and_resumes_bit_for_bit(base):
    """Its last steps done again from a checkpoint, by the command that leaves the dtype to the run. Few of
    them: CPUs without instructions for bf16 are slow.
    """
    options = ("--eval-every", "-1", "--save-every", "15")
    assert base_train.main(arguments(base, "whole-precision", 20, *options)) == 0
    command = arguments(base, "half-precision", 20, *options)
    at = command.index("--dtype")
    assert base_train.main([*command[:at], "--dtype", "bfloat16", *command[at + 2 :]]) == 0
    run = base / "runs" / "half-precision"
    assert json.loads((run / "summary.json").read_text())["dtype"] == "bfloat16"
    before, model = losses(base, "half-precision"), load_file(run / "model.safetensors")
    in_float32 = losses(base, "whole-precision")
    assert before[-1] < before[0] - 0.2
    assert before != in_float32 and before == pytest.approx(in_float32, abs=0.03)

    shutil.rmtree(run / "checkpoints" / "step_20")
    (run / "summary.json").unlink()
    assert base_train.main([*command[:at], *command[at + 2 :]]) == 0
    assert losses(base, "half-precision") == before
    again = load_file(run / "model.safetensors")
    assert all(torch.equal(again[name], model[name]) for name in model)


def test_a_run_is_evaluated_and_sampled_by_name_by_path_and_before_its_end(
    base, tmp_path, monkeypatch, capsys
):
    """By path also on a machine that knows nothing of it, and whose tokenizer of its corpus is another."""
    assert base_train.main(arguments(base, "used", 40, "--eval-every", "-1", "--save-every", "30")) == 0
    shared = shutil.copytree(base / "runs" / "used", tmp_path / "shared")
    val_bpb = f"val_bpb: {json.loads((shared / 'summary.json').read_text())['val_bpb']:.4f}\n"
    capsys.readouterr()

    def said(script, *flags):
        script.main(list(flags))
        return capsys.readouterr().out

    words = ("--prompt", "abc", "--max-tokens", "20")
    text = said(sample, "--run", "used", *words)
    assert set(text.split("seed 0\n")[-1]) <= set("abcdefghij .\n")  # letters of the corpus
    assert val_bpb in said(base_eval, "--run", "used")
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "elsewhere"))
    TOKENIZER.save(shards.tokenizer_folder(open_corpus(f"path:{base}/texts"), 300))
    assert said(sample, "--run", str(shared), *words) == text
    assert val_bpb in said(base_eval, "--run", str(shared))

    for result in ("model.safetensors", "summary.json", "report.md"):
        (shared / result).unlink()
    with pytest.raises(InputError, match="shared holds no finished model .* --checkpoint last takes"):
        said(sample, "--run", str(shared))
    assert said(sample, "--run", str(shared), "--checkpoint", "step_40", *words) == text
    assert val_bpb in said(base_eval, "--run", str(shared), "--checkpoint", "last")
    at_30 = said(base_eval, "--run", str(shared), "--checkpoint", "step_30")
    assert "step: 30\n" in at_30 and val_bpb not in at_30
    with pytest.raises(InputError, match="has no checkpoint step_7 .it has: step_30, step_40"):
        said(sample, "--run", str(shared), "--checkpoint", "step_7")
    with pytest.raises(InputError, match="no finished model"):
        said(sample, "--run", "nobody")


class Compiled(torch.nn.Module):
    """In place of a compiled model: takes note of what would make it compile another graph."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.graphs = set()

    def forward(self, *inputs):
        shapes = tuple((x.shape, x.stride(), x.dtype) for x in inputs)
        self.graphs.add((shapes, torch.is_grad_enabled()))
        return self.model(*inputs)


def test_compiling_is_decided_by_what_it_saves_and_remembered_and_evaluation_uses_it(
    base, monkeypatch, capsys
):
    """With a compiler that changes nothing and takes no time: what counts is when it is called."""
    compiled = []

    def compile_nothing(function, **_):
        if not isinstance(function, GPT):
            return function
        compiled.append(Compiled(function))
        return compiled[-1]

    monkeypatch.setattr(torch, "compile", compile_nothing)

    def compiles(run, steps, seconds, *flags):
        monkeypatch.setattr(plan, "seconds_of", lambda *_: seconds)
        monkeypatch.delenv("NANOMUON_COMPILE", raising=False)
        compiled.clear()
        assert base_train.main(arguments(base, run, steps, "--eval-every", "2", *flags)) == 0
        assert all(len(model.graphs) == 1 for model in compiled)
        return len(compiled) == 1

    assert not compiles("eager", 4, 100)  # takes 24 s, and saves a sixth
    assert "to compile takes" in capsys.readouterr().out
    assert compiles("compiled", 4, 200)
    assert not compiles("eager", 6, 200) and compiles("compiled", 6, 100)  # not asked again
    assert not compiles("compiled", 8, 200, "--no-compile")


def test_wandb_works_offline(base, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert base_train.main(arguments(base, "logged", 3, "--wandb", *QUIET)) == 0
    assert list((base / "runs" / "logged" / "wandb").glob("offline-run-*"))
