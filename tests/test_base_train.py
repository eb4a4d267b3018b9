"""The training script as people use it: whole runs on a small corpus, alone and on several processes."""

import os
import re
import shutil

import pytest
import torch
import wandb
from safetensors.torch import load_file

from nanomuon import checkpoint, runtime, shards
from nanomuon.corpus import open_corpus, remember
from nanomuon.gpt import GPT
from nanomuon.report import read_metrics
from nanomuon.run import trained_with
from nanomuon.runtime import read_json
from scripts import base_eval, base_train, sample
from tests.mistakes import refused
from tests.texts import TOKENIZER, random_texts
from tests.texts import write_corpus as write_texts
from tests.training import (
    QUIET,
    STILL,
    Ranks,
    arguments,
    call,
    losses,
    optimizer_file,
    train,
    train_on,
)

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def whole_run(base):
    """40 steps without interruption."""
    train_on(1, base, "whole", 40, "--eval-every", "10", "--save-every", "30")
    return base / "runs" / "whole"


def test_a_finished_run_has_everything(whole_run):
    training, evaluation = read_metrics(whole_run / "metrics.jsonl")
    assert [(row["step"], row["tokens"]) for row in training] == [(i, 256 * i) for i in range(1, 41)]
    assert training[0].keys() >= {"train_loss", "lr_multiplier", "step_ms", "tokens_per_second"}
    assert [row["step"] for row in evaluation] == [10, 20, 30, 40]
    assert evaluation[-1]["val_bpb"] < 0.8 * evaluation[0]["val_bpb"]
    summary = read_json(whole_run / "summary.json")
    assert summary["val_bpb"] == round(evaluation[-1]["val_bpb"], 4) and summary["tokens"] == 40 * 256
    figures = "train_loss steps seconds tokens_per_second optimizer_ms peak_memory_mb parameters"
    names = "report.md loss.png model.safetensors config.json tokenizer.json README.md"
    names += " modeling_nanomuon.py gpt.py attention.py head_loss.py qk_clip.py kv_cache.py"
    assert summary.keys() >= {*figures.split()} and {*names.split()} <= {*os.listdir(whole_run)}
    settings = read_json(whole_run / "settings.json")
    head = call("git", "describe", "--always", "--dirty").stdout.strip()  # "" outside a checkout
    assert settings["trained_with"].get("commit", "") == head
    assert settings["trained_with"]["torch"] == torch.__version__
    (output,) = whole_run.parents[1].glob("whole.*.out")
    assert "\n".join(settings["groups"]) in output.read_text()
    assert "validation documents" not in output.read_text()


def test_a_checkout_that_git_cannot_read_prints_nothing(tmp_path, monkeypatch, capfd):
    (tmp_path / ".git").write_text("gitdir: nowhere")
    monkeypatch.setattr("nanomuon.run.__file__", str(tmp_path / "nanomuon" / "run.py"))
    assert "commit" not in trained_with() and capfd.readouterr().err == ""


def test_deterministic_takes_effect_before_the_start(base, monkeypatch):
    """On a CPU equal runs are bit-identical anyway. This checks that all operations have a deterministic
    form, and that the variables request it from GPUs. cuBLAS, NCCL and Inductor read their variables when
    they start.
    """
    asked = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_NVLS_ENABLE": "0",
        "TORCHINDUCTOR_DETERMINISTIC": "1",
    }
    for name in asked:
        monkeypatch.setenv(name, "")  # so that it is gone after the test
        monkeypatch.delenv(name)
    start, found = base_train.start, {}
    monkeypatch.setattr(base_train, "start", lambda dtype: found.update(os.environ) or start(dtype))
    try:
        train(base, "deterministic", 4, *QUIET, "--window-pattern", "SL", "--deterministic")
        assert torch.are_deterministic_algorithms_enabled() and asked.items() <= found.items()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)


ROW_NORMS = """
    class RowNorms(torch.optim.AdamW):
        def step(self):
            matrices = [param for param in self.param_groups[0]["params"] if param.ndim == 2]
            for param in matrices:
                if "norms" in self.state[param]:
                    param.grad.div_(1 + self.state[param]["norms"])
            super().step()
            for param in matrices:
                self.state[param]["norms"] = param.grad.square().mean(dim=1, keepdim=True).sqrt()
    return RowNorms(model.parameters(), lr=3e-3)
"""


def test_a_users_optimizer_sees_averaged_gradients_and_resumes_sharded(base):
    """Under FSDP2 parameters are DTensors; the state of this optimizer has another shape."""
    file = optimizer_file(base, "adamw", ROW_NORMS)
    for run, processes, steps in (("adamw", 1, 12), ("moved", 2, 4), ("moved", 2, 8), ("moved", 1, 12)):
        options = (*file, "--eval-every", "-1", "--warmdown-ratio", "0", "--shard", "fsdp")
        train_on(processes, base, run, steps, *options)
    assert losses(base, "moved") == pytest.approx(losses(base, "adamw"), abs=1e-4)
    assert losses(base, "adamw")[-1] < losses(base, "adamw")[0] - 0.5


def test_ranks_that_do_not_share_a_base_folder_are_refused(base, whole_run, tmp_path):
    """Even if a rank has a copy of the run."""
    copy = shutil.copytree(base, tmp_path / "base")
    ranks = Ranks(base, "whole", 50, *QUIET, processes=2, base_of_last=copy)
    assert ranks.join(60) == [2, 2]
    line = (
        f"error: rank 1 does not see {base} of rank 0: set NANOMUON_BASE_DIR to a folder that all nodes share"
    )
    assert re.findall("error: .*", ranks.output()) == [line] * 2
    assert len(losses(base, "whole")) == 40 and not list(base.glob(".shared-*"))


def test_a_rank_with_other_flags_or_files_is_refused(base, tmp_path):
    """The same files at another place are fine."""
    rule = "return torch.optim.SGD(model.parameters(), lr=0.1)"
    mine, same = optimizer_file(base, "sgd", rule), optimizer_file(tmp_path, "same", rule)
    texts = shutil.copytree(base / "texts", tmp_path / "same" / "texts")
    other = optimizer_file(tmp_path, "sgd", rule.replace("0.1", "0.2"))
    flags = "--seed 1 --num-iterations 3 --tensor-parallel 2 --dtype bfloat16 --corpus python".split()
    different = "--corpus python, not texts; --num-iterations 3, not 2; --optimizer-file [0-9a-f]{64}, not "
    different += "[0-9a-f]{64}; --dtype bfloat16, not float32; --seed 1, not 0; --tensor-parallel 2, not 1"
    write_texts(tmp_path / "other" / "texts", random_texts(300))
    for of_last, said in (
        ((*flags, *other), different),
        (("--corpus", f"path:{tmp_path}/other/texts"), "--corpus texts-.*, not texts-.*"),
    ):
        ranks = Ranks(base, "stale", 2, *mine, *QUIET, processes=2, of_last=of_last)
        assert ranks.join(60) == [2, 2]
        line = f"error: rank 1 was started with {said}: give all ranks the flags and files of rank 0\n"
        assert len(re.findall(line, ranks.output())) == 2, ranks.output()
        assert not (base / "runs" / "stale").exists()
    train_on(2, base, "stale", 2, *mine, *QUIET, of_last=(*same, "--corpus", f"path:{texts}"))


def test_a_run_is_judged_by_the_weights_that_eval_puts_in_place(base, capsys):
    """It also warns that no group has the other parameters."""
    file = optimizer_file(base, "still", STILL)
    train(base, "still", 4, *file, "--eval-every", "2")
    assert " parameters are in no group and are not trained: " in capsys.readouterr().out
    assert not load_file(base / "runs" / "still" / "model.safetensors")["lm_head.weight"].any()
    assert losses(base, "still")[-1] < losses(base, "still")[1]
    sharded = "--shard", "fsdp", "--save-every", "-1"
    train_on(2, base, "still-sharded", 4, *file, "--eval-every", "2", *sharded)
    assert losses(base, "still-sharded") == pytest.approx(losses(base, "still"), abs=1e-4)


LATE = """
    class Late(torch.optim.SGD):
        calls = 0
        def step(self):
            self.calls += 1
            if self.calls == 6:  # explodes just before a checkpoint
                self.param_groups[0]["lr"] = float("inf")
            super().step()
    return Late(model.parameters(), lr=1e-3)
"""


@pytest.mark.parametrize(
    "flags, message, saved",
    [
        (["--save-every=3"], "if the hardware failed, --resume step_3 goes on from there; otherwise", [3, 6]),
        (["--num-iterations=6"], "loss is not finite; start over with lower rates, .*: --resume never", [6]),
    ],
)
def test_a_run_that_is_not_finite_names_the_checkpoint_to_go_on_from(base, capsys, flags, message, saved):
    """The checkpoint is the last one before the bad steps. The run exports nothing."""
    run = base / "runs" / f"late-{len(saved)}"
    file = optimizer_file(base, "late", LATE)
    assert base_train.main(arguments(base, run.name, 100, *file, *QUIET, *flags)) == 1
    assert re.search(message, capsys.readouterr().err) and len(losses(base, run.name)) < 20
    assert not (run / "model.safetensors").exists() and checkpoint.saved_steps(run) == saved


def test_a_run_in_bf16_learns_and_resumes_bit_for_bit(base):
    """The command that resumes it leaves out --dtype."""
    for dtype in ("float32", "bfloat16"):
        train(base, dtype, 8, "--depth", "1", "--dtype", dtype, "--eval-every", "-1", "--save-every", "6")
    before, in_float32 = losses(base, "bfloat16"), losses(base, "float32")
    assert before != in_float32 and before == pytest.approx(in_float32, abs=0.03)
    assert before[-1] < before[0] - 0.2
    assert base_train.main("--run bfloat16 --resume step_6".split()) == 0
    assert losses(base, "bfloat16") == before


def test_a_run_is_evaluated_and_sampled_by_name_by_path_and_before_its_end(
    base, whole_run, tmp_path, monkeypatch, capsys
):
    """By its path even on a machine that lacks the run and has another tokenizer for its corpus."""
    shared = shutil.copytree(whole_run, tmp_path / "shared")
    val_bpb = f"val_bpb: {read_json(shared / 'summary.json')['val_bpb']:.4f}\n"

    def said(script, run, *flags):
        flags += ("--max-tokens=20",) if script is sample else ()
        script.main(["--run", str(run), *flags])
        return capsys.readouterr().out

    text = said(sample, "whole")
    assert set(text.split("seed 0\n")[-1]) <= set("abcdefghij .\n")  # letters of the corpus
    assert val_bpb in said(base_eval, "whole")
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "elsewhere"))
    TOKENIZER.save(shards.tokenizer_folder(open_corpus(f"path:{base}/texts"), 300))
    assert said(sample, shared) == text and val_bpb in said(base_eval, shared)

    (shared / "summary.json").unlink()  # as in a run that goes on
    of_older = said(sample, shared)
    assert "warning: run shared is not complete" in of_older and of_older.endswith(text)
    for result in ("model.safetensors", "report.md"):
        (shared / result).unlink()
    assert said(sample, shared, "--checkpoint", "step_40") == text
    find, found = checkpoint.find, iter([shared / "checkpoints/step_9"])
    # A run that goes on may delete a checkpoint before it is read
    monkeypatch.setattr(checkpoint, "find", lambda *given: next(found, None) or find(*given))
    assert val_bpb in said(base_eval, shared, "--checkpoint", "last")
    at_30 = said(base_eval, shared, "--checkpoint", "step_30")
    assert "step: 30\n" in at_30 and val_bpb not in at_30


def test_wandb_works_offline_and_each_folder_is_a_run_of_its_own(base, monkeypatch):
    """Whatever the run's name. A resumed run continues under its id; one that starts over gets a new one."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    found, init, name = [], wandb.init, "what?:lr=0.02"

    def noted(**keywords):
        found.append(init(**keywords))
        return found[-1]

    monkeypatch.setattr(wandb, "init", noted)
    for steps, flags in ((3, ()), (4, ()), (2, ("--resume", "never"))):
        train(base, name, steps, "--wandb", *QUIET, *flags)
    first, resumed, new = [run.id for run in found]
    assert first == resumed != new and name not in first
    assert list((base / "wandb").glob("offline-run-*"))


def test_wandb_that_cannot_work_is_one_line_first_thing(base, monkeypatch, tmp_path):
    wandb.teardown()  # it reads its variables once
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    with refused("^--wandb: .*run wandb login, set WANDB_MODE="):
        train(base, "logged", 3, "--wandb")
    left = [file for file in (tmp_path / "base").rglob("*") if file.is_file() and "wandb" not in file.parts]
    assert {file.name for file in left} <= {".logged.lock"}


def test_a_run_that_is_in_use_is_not_logged_twice(base, monkeypatch):
    """The second launch would also end the run at Weights & Biases."""
    monkeypatch.setattr(base_train, "start_wandb", lambda *_: pytest.fail("logged"))
    with runtime.locked(base / "runs" / "busy"), refused("busy is in use by process"):
        train(base, "busy", 3, "--wandb", *QUIET)


def test_a_run_reads_and_is_evaluated_by_its_own_field_wherever_its_texts_are(base, tmp_path, capsys):
    """Even if data_prep has been given another field since. Damaged files are still left out."""
    texts = tmp_path / "texts"
    corpus = write_texts(texts, random_texts(300))
    (texts / "bad.txt").write_bytes(b"\xff")
    train(base, "field", 2, "--skip-unreadable", *QUIET, "--corpus", corpus, "--text-field", "text")
    figure = re.search("\nval_bpb: .*", capsys.readouterr().out)[0]
    remember(open_corpus(corpus, "title"))  # as data_prep does
    moved = f"path:{texts.rename(tmp_path / 'elsewhere')}"
    base_eval.main(["--run", "field", "--corpus", moved])
    assert figure in capsys.readouterr().out
    assert base_train.main(["--run", "field", "--corpus", moved, "--num-iterations", "4"]) == 0


def test_a_run_warns_of_few_validation_documents(base, tmp_path, capsys):
    train(base, "few", 2, *QUIET, "--corpus", write_texts(tmp_path / "few", random_texts(60)))
    assert re.search("warning: only [1-7] validation documents", capsys.readouterr().out)


def test_a_run_is_compiled_and_evaluated_by_the_same_graph(base, monkeypatch, capsys):
    """The compiler is a stand-in that changes nothing and records its calls."""
    graphs = set()

    def compile_nothing(function, **_):
        def noted(*inputs):
            graphs.add((*((x.shape, x.stride(), x.dtype) for x in inputs), torch.is_grad_enabled()))
            return function(*inputs)

        if not isinstance(function, GPT):
            return function
        noted.buffers = function.buffers
        return noted

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setenv("NANOMUON_COMPILE", "1")
    for steps, flags, compiled in ((4, (), 1), (6, ("--no-compile",), 0)):
        graphs.clear()
        train(base, "compiled", steps, "--eval-every", "2", *flags)
        assert len(graphs) == compiled == capsys.readouterr().out.count("compiling: the first step")
