"""The training script as people use it: whole runs on a small corpus, interrupted, repeated, on several
processes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanomuon import files, plan, run_folder, shards
from nanomuon.corpus import open_corpus
from nanomuon.gpt import GPT
from nanomuon.report import read_metrics
from nanomuon.run import Run
from nanomuon.runtime import InputError, run_command
from nanomuon.tokenizer import Tokenizer
from scripts import base_eval, base_train, sample
from tests.texts import TOKENIZER
from tests.training import Ranks, arguments, launch, losses, wait_until

pytestmark = pytest.mark.usefixtures("environment")

QUIET = ("--eval-every", "-1", "--save-every", "-1")

ADAMW_FILE = """
import torch
def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)
"""


def wait_for_step(base, run, step, process):
    """Return as soon as the run has logged that step."""
    wait_until(lambda: len(losses(base, run)) >= step, lambda: process.poll() is None)


@pytest.fixture(scope="module")
def whole_run(base):
    """40 steps without interruption, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOMUON_BASE_DIR", str(base))
        patch.setenv("NANOMUON_COMPILE", "0")
        assert base_train.main(arguments(base, "whole", 40, "--eval-every", "10", "--save-every", "15")) == 0
    return base / "runs" / "whole"


def test_a_finished_run_has_everything(whole_run, capsys):
    training, evaluation = read_metrics(whole_run / "metrics.jsonl")
    assert [row["step"] for row in training] == list(range(1, 41))
    assert [row["tokens"] for row in training] == list(range(256, 41 * 256, 256))
    assert set(training[0]) >= {"train_loss", "lr_multiplier", "step_ms", "tokens_per_second"}
    assert [row["step"] for row in evaluation] == [10, 20, 30, 40]
    assert training[0]["train_loss"] == pytest.approx(5.7, abs=0.05)  # ln 300: it starts knowing nothing
    assert evaluation[-1]["val_bpb"] < 0.8 * evaluation[0]["val_bpb"]
    summary = json.loads((whole_run / "summary.json").read_text())
    assert summary["val_bpb"] == round(evaluation[-1]["val_bpb"], 4) and summary["tokens"] == 40 * 256
    assert set(summary) >= {
        "train_loss",
        "steps",
        "seconds",
        "tokens_per_second",
        "optimizer_ms",
        "peak_memory_mb",
        "parameters",
    }
    for name in (
        "report.md",
        "loss.png",
        "model.safetensors",
        "config.json",
        "tokenizer",
        "checkpoints/step_40",
        "tokenizer.json",
        "modeling_nanomuon.py",
        "README.md",
    ):
        assert (whole_run / name).exists(), name
    text = (whole_run / "report.md").read_text()
    assert str(summary["val_bpb"]) in text
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    if head:  # tests also run where there is no git
        assert f"| commit | {head}" in text
    assert f"| torch | {torch.__version__.split('+')[0]}" in text and "| threads | " in text
    revision = json.loads((whole_run / "settings.json").read_text())["trained_on"]["revision"]
    assert revision == open_corpus(f"path:{whole_run.parents[1]}/texts").revision
    assert f"| revision | {revision} |" in text
    used = [line.split(" | ")[0] for line in text.split("## Settings")[1].split("##")[0].splitlines()]
    assert {"| matrix_lr", "| eval_tokens", "| depth"} <= set(used)
    assert not {"| plan", "| resume", "| run"} & set(used)
    assert not list(whole_run.rglob("*.tmp")) and not list(whole_run.rglob("*.pt")) + list(
        whole_run.rglob("*.pkl")
    )


def test_a_finished_run_is_left_alone(base, whole_run, capsys):
    before = (whole_run / "metrics.jsonl").read_bytes()
    assert base_train.main(arguments(base, "whole", 40)) == 0
    output = capsys.readouterr().out
    assert "is complete" in output and "val_bpb: " in output
    assert (whole_run / "metrics.jsonl").read_bytes() == before


def test_a_killed_run_resumed_equals_the_uninterrupted_one_bit_for_bit(base, whole_run):
    options = ("--eval-every", "10", "--save-every", "5")
    process = launch(base, "killed", 40, *options)
    wait_for_step(base, "killed", 13, process)
    process.kill()
    process.wait()
    output, _ = (resumed := launch(base, "killed", 40, *options)).communicate()
    assert resumed.returncode == 0, output
    assert "resuming run killed at step" in output
    assert losses(base, "killed") == losses(base, "whole")
    ours, theirs = (load_file(base / "runs" / run / "model.safetensors") for run in ("killed", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# cuBLAS, NCCL and Inductor read them when they start
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_NVLS_ENABLE": "0",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}


@pytest.fixture
def nondeterministic(monkeypatch):
    """PyTorch as it is by default; makes it so again when called, and after the test."""

    def reset():
        for name in (*DETERMINISTIC, "NANOMUON_COMPILE"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)

    reset()
    yield reset
    reset()


def test_a_deterministic_run_equals_itself_and_stays_one(base, nondeterministic, monkeypatch):
    """On a CPU every run equals itself. What is seen here: all operations have a deterministic form, and GPUs
    are asked for it.
    """
    start, at_the_start = base_train.start, []

    def start_with_what_is_set(dtype):
        at_the_start.append({name: os.environ.get(name) for name in DETERMINISTIC})
        return start(dtype)

    monkeypatch.setattr(base_train, "start", start_with_what_is_set)
    options = ("--experts", "2", "--window-pattern", "SL", "--eval-every", "-1", "--save-every", "-1")
    for run in ("deterministic", "the same"):
        nondeterministic()
        assert base_train.main(arguments(base, run, 4, *options, "--deterministic")) == 0
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert at_the_start.pop() == DETERMINISTIC
    assert losses(base, "deterministic") == losses(base, "the same")
    args, _ = run_folder.recall(base_train.make_parser(), arguments(base, "the same", 6))
    assert args.deterministic


def test_the_command_that_is_stopped_exits_with_75(base):
    process = launch(base, "signal", 5000, "--save-every", "-1", "--eval-every", "-1")
    wait_for_step(base, "signal", 3, process)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert f"stopped at step {len(losses(base, 'signal'))} and saved" in output


def test_two_processes_train_the_model_that_one_trains(base):
    """100 steps; the rest of the run agrees as well, but rounding grows there."""
    for run, processes in (("one", 1), ("two", 2)):
        ranks = Ranks(base, run, 100, "--eval-every", "-1", "--save-every", "-1", processes=processes)
        assert ranks.join() == [0] * processes, ranks.output()
    one, two = losses(base, "one"), losses(base, "two")
    assert len(one) == len(two) == 100
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-4
    assert one[-1] < one[0] - 1


def test_the_users_optimizer_sees_averaged_gradients(base):
    file = base / "adamw.py"
    file.write_text(ADAMW_FILE)
    for run, processes in (("adamw-1", 1), ("adamw-2", 2)):
        options = ("--optimizer-file", str(file), "--eval-every", "-1", "--save-every", "-1")
        ranks = Ranks(base, run, 20, *options, processes=processes)
        assert ranks.join() == [0] * processes, ranks.output()
    assert losses(base, "adamw-1") == pytest.approx(losses(base, "adamw-2"), abs=1e-4)
    assert losses(base, "adamw-1")[-1] < losses(base, "adamw-1")[0] - 0.5


def test_a_loss_that_is_not_finite_ends_the_run_with_a_message(base, capsys):
    file = base / "explode.py"
    file.write_text(ADAMW_FILE.replace("AdamW", "SGD").replace("3e-3", "1e30"))
    options = ("--optimizer-file", str(file), "--eval-every", "-1", "--save-every", "-1")
    assert base_train.main(arguments(base, "explode", 100, *options)) == 1
    captured = capsys.readouterr()
    assert "10 losses in a row are not finite" in captured.err and "no checkpoint is good" in captured.err
    assert len(losses(base, "explode")) < 20


def test_a_run_that_ends_diverged_exports_nothing(base, capsys):
    options = ("--matrix-lr", "1e30", "--eval-every", "-1", "--save-every", "-1")
    for _ in range(2):
        assert base_train.main(arguments(base, "diverged", 6, *options)) == 1
        assert "run diverged has diverged" in capsys.readouterr().err
    assert not (base / "runs" / "diverged" / "model.safetensors").exists()


def test_parameters_in_no_group_are_named(base, capsys):
    file = base / "some.py"
    file.write_text(
        "import torch\ndef build_optimizer(model): return torch.optim.SGD([model.wte.weight], lr=0.1)\n"
    )
    options = ("--optimizer-file", str(file), "--eval-every", "-1", "--save-every", "-1")
    assert base_train.main(arguments(base, "some", 2, *options)) == 0
    named = capsys.readouterr().out.split("not trained: ")[1].split("\n")[0].split(", ")
    assert "lm_head.weight" in named and "wte.weight" not in named


BAD_INPUT = {
    "unknown corpus": (["--corpus", "pyhton"], "unknown corpus 'pyhton'"),
    "no such folder": (["--corpus", "path:/no/such/folder"], "/no/such/folder"),
    "too small": (["--total-batch-size", "2560000"], "fewer than one step"),
    "does not divide": (["--total-batch-size", "1000"], "896 or 1024"),
    "depth 0": (["--depth", "0"], "--depth: must be from 1 to 1,024, not 0"),
    "rate that is none": (["--matrix-lr", "nan"], "--matrix-lr: must be from 0 to 1e+30, not nan"),
    "negative rate": (["--matrix-lr", "-1"], "--matrix-lr: must be from 0"),
    "negative seed": (["--seed", "-1"], "--seed: must be from 0"),
    "huge seed": (["--seed", str(1 << 64)], "--seed: must be from 0"),
    "no tokens": (["--target-param-data-ratio", "0"], "--target-param-data-ratio: must be from 1e-06"),
    "two lengths": (["--target-flops", "1e12"], "--target-flops: not allowed with argument --num-iterations"),
    "run name": (["--run", "../x"], "is not a folder name"),
    "run name of two lines": (["--run", "a\nb"], "'a\\nb' is not a folder name"),
    "other settings": (["--run", "whole", "--seed", "7"], "exists with --seed 0, not 7"),
    "window pattern": (["--window-pattern", "XL"], "--window-pattern: is a string of S and L"),
    "optimizer file": (["--optimizer-file", "nothing.py"], "no such Python file"),
    "no such step": (["--run", "fresh", "--resume", "step_7"], "step_7"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_in_one_line(base, whole_run, case):
    extra, message = BAD_INPUT[case]
    with pytest.raises(InputError) as caught:
        base_train.main(arguments(base, "bad", 3, *extra))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (base / "runs" / "bad" / "summary.json").exists()


def test_bad_input_exits_with_2_and_one_line(base):
    output, _ = (process := launch(base, "bad", 3, "--depth", "0")).communicate()
    assert process.returncode == 2
    assert output.startswith("error: argument --depth: must be from 1 to 1,024, not 0; see")
    assert output.count("\n") == 1


def test_what_is_wrong_on_the_first_rank_ends_all_of_them_with_2(base):
    ranks = Ranks(base, "bad-two", 3, "--corpus", "path:/no/such/folder", processes=2)
    assert ranks.join() == [2, 2]
    assert set(ranks.output().splitlines()) == {"error: corpus path:/no/such/folder: no such file or folder"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "/data/shard"),
        OSError(36, "File name too long", "/data/shard"),
        InputError("no\nsuch thing"),
    ],
)
def test_run_command_turns_what_the_user_can_fix_into_one_line(error, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as caught:
        run_command(main)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert "/data/shard" in message or "no such thing" in message
    assert "NANOMUON_BASE_DIR" not in message  # it would not help there


def test_run_command_says_what_helps_where_the_base_folder_has_no_room(base, capsys):
    def main():
        raise OSError(28, "No space left on device", f"{base}/runs/any/metrics.jsonl")

    with pytest.raises(SystemExit):
        run_command(main)
    expected = (
        f"error: No space left on device: {base}/runs/any/metrics.jsonl; NANOMUON_BASE_DIR=/folder/with/"
    )
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize("how", ["flushed", "left to the end"])
def test_a_pipe_whose_reader_has_ended_is_one_line_and_no_traceback(how, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as caught:
            run_command(lambda: print("a sample", flush=how == "flushed"))
    # Closing `output` writes what is left of it, as the end of the process does: to nowhere, without an error
    assert caught.value.code == 128 + signal.SIGPIPE
    assert capfd.readouterr().err == "ended: nobody reads the output any more\n"


def test_an_output_that_takes_nothing_is_not_blamed_on_the_base_folder(monkeypatch, capfd):
    with open("/dev/full", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as caught:
            run_command(lambda: print("a sample", flush=True))
    assert caught.value.code == 2
    assert capfd.readouterr().err == "error: No space left on device: the output\n"


def test_ctrl_c_while_pytorch_is_imported_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "scripts.sample"]
    root = Path(__file__).parent.parent
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"", b"interrupted\n") and process.returncode == 130


def test_ctrl_c_in_a_script_is_one_line(capfd):
    """Also after the imports, in which scripts/__init__.py has the signal."""

    def main():
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        with pytest.raises(SystemExit) as caught:
            run_command(main)
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught.value.code == 130 and capfd.readouterr().err == "interrupted\n"


def test_a_path_of_an_existing_run_is_told_as_the_flag_that_it_is(base):
    folder = base / "runs" / "named"
    folder.mkdir(parents=True)
    with pytest.raises(InputError, match=f"^--run '{folder}' is not a folder name"):
        base_train.main(["--run", str(folder)])


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
    summary = json.loads((run / "summary.json").read_text())
    assert summary["dtype"] == "bfloat16" and "bfloat16" in (run / "report.md").read_text()
    before, model = losses(base, "half-precision"), load_file(run / "model.safetensors")
    assert before[-1] < before[0] - 0.2
    in_float32 = losses(base, "whole-precision")
    assert before != in_float32 and before == pytest.approx(in_float32, abs=0.03)

    shutil.rmtree(run / "checkpoints" / "step_20")
    (run / "summary.json").unlink()
    assert base_train.main([*command[:at], *command[at + 2 :]]) == 0
    assert losses(base, "half-precision") == before
    again = load_file(run / "model.safetensors")
    assert all(torch.equal(again[name], model[name]) for name in model)


def test_evaluating_a_finished_run_gives_its_figure_again(whole_run, capsys):
    base_eval.main(["--run", "whole"])
    summary = json.loads((whole_run / "summary.json").read_text())
    assert f"val_bpb: {summary['val_bpb']:.4f}" in capsys.readouterr().out


def test_sampling_from_a_finished_run(whole_run, capsys):
    outputs = []
    for _ in range(2):
        sample.main("--run whole --prompt abc --max-tokens 40 --samples 2".split())
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and outputs[0].count("--- sample") == 2
    letters_of_the_corpus = set("abcdefghij .\n")
    assert set(outputs[0].split("seed 0\n")[1].split("---")[0]) <= letters_of_the_corpus


def test_a_checkpoint_is_evaluated_and_sampled_before_its_run_has_ended(whole_run, tmp_path, capsys):
    results = shutil.ignore_patterns("model.safetensors", "summary.json", "report.md")
    going_on = shutil.copytree(whole_run, tmp_path / "going_on", ignore=results)
    command = ["--run", str(going_on)]
    with pytest.raises(InputError, match="going_on holds no finished model .*: --checkpoint last takes"):
        sample.main(command)

    base_eval.main([*command, "--checkpoint", "last"])
    summary = json.loads((whole_run / "summary.json").read_text())
    output = capsys.readouterr().out
    assert "step: 40\n" in output and f"val_bpb: {summary['val_bpb']:.4f}" in output
    samples = []
    for run in (["--run", "whole"], [*command, "--checkpoint", "step_40"]):
        sample.main([*run, "--prompt", "abc", "--max-tokens", "20"])
        samples.append(capsys.readouterr().out)
    assert samples[0] == samples[1]
    base_eval.main([*command, "--checkpoint", "step_30"])
    output = capsys.readouterr().out
    assert "step: 30\n" in output and f"val_bpb: {summary['val_bpb']:.4f}" not in output

    with pytest.raises(InputError, match="has no checkpoint step_7; it has step_30, step_40"):
        sample.main([*command, "--checkpoint", "step_7"])
    config = json.loads((going_on / "config.json").read_text())
    for damaged, message in (
        ({**config, "depth": 3}, "is of another model"),
        ({**config, "heads": 3}, "width"),
    ):
        (going_on / "config.json").write_text(json.dumps(damaged))
        with pytest.raises(InputError, match=message):
            sample.main([*command, "--checkpoint", "last"])
    (going_on / "config.json").write_text(json.dumps(config))
    shutil.rmtree(going_on / "checkpoints")
    with pytest.raises(InputError, match="has no checkpoint last; it has none"):
        sample.main([*command, "--checkpoint", "last"])


def test_a_run_with_another_tokenizer_is_refused(base, whole_run, tmp_path):
    stranger = base / "runs" / "stranger"
    subprocess.run(["cp", "-r", whole_run, stranger], check=True)
    settings = json.loads((stranger / "settings.json").read_text())
    settings["trained_on"]["tokenizer"] = "of another run"
    (stranger / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="not the one the model was trained with"):
        sample.main(["--run", "stranger"])


def test_a_shared_run_is_evaluated_and_sampled_by_path(base, whole_run, tmp_path, monkeypatch, capsys):
    """On a machine that knows nothing of it, and whose tokenizer of the same corpus is another."""
    shared = tmp_path / "shared"
    shutil.copytree(whole_run, shared, ignore=shutil.ignore_patterns("checkpoints"))
    val_bpb = json.loads((whole_run / "summary.json").read_text())["val_bpb"]
    words = "--prompt abc --max-tokens 20".split()
    sample.main(["--run", "whole", *words])
    text = capsys.readouterr().out
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "elsewhere"))
    sample.main(["--run", str(shared), *words])
    assert capsys.readouterr().out == text

    corpus = open_corpus(f"path:{base}/texts")
    TOKENIZER.save(shards.tokenizer_folder(corpus, 300))
    shards.prepare(corpus, 300)
    base_eval.main(["--run", str(shared)])
    assert f"val_bpb: {val_bpb:.4f}\n" in capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    settings = json.loads((shared / "settings.json").read_text())
    settings["trained_on"]["corpus"] = "path:/no/such/texts"
    (shared / "settings.json").write_text(json.dumps(settings))
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "third"))
    with pytest.raises(InputError, match="no such file or folder; --corpus NAME evaluates"):
        base_eval.main(["--run", "./shared"])
    shutil.copytree(base / "texts", tmp_path / "same texts")
    base_eval.main(["--run", "./shared", "--corpus", "path:same texts"])
    assert f"val_bpb: {val_bpb:.4f}\n" in capsys.readouterr().out


def test_a_run_that_goes_on_gets_its_lost_tokenizer_back(base, whole_run, monkeypatch):
    bald = base / "runs" / "bald"
    shutil.copytree(whole_run, bald)
    shutil.rmtree(bald / "tokenizer")
    monkeypatch.setattr(Run, "finish", lambda run: 0)
    assert base_train.main(arguments(base, "bald", 41)) == 0
    assert Tokenizer.load(bald / "tokenizer").hash == Tokenizer.load(whole_run / "tokenizer").hash


def test_unfinished_runs_are_named(base):
    with pytest.raises(InputError, match="no finished model"):
        sample.main(["--run", "nobody"])


def test_plan_tells_the_size_and_trains_nothing(base, capsys):
    assert base_train.main(arguments(base, "planned", 7, "--plan")) == 0
    output = capsys.readouterr().out
    assert "7 steps x 256 tokens" in output and "depth 2, width 128" in output
    assert not (base / "runs" / "planned").exists()


def test_a_second_launch_of_a_run_is_refused(base):
    with (
        files.locked(base / "runs" / "held"),
        pytest.raises(InputError, match="run held is being trained by another"),
    ):
        base_train.main(arguments(base, "held", 3))
    assert not (base / "runs" / "held").exists()


@pytest.mark.parametrize("module", [base_train, base_eval, sample])
def test_help_teaches(module, capsys):
    with pytest.raises(SystemExit) as caught:
        module.main(["--help"])
    assert caught.value.code == 0 and "python -m scripts." in capsys.readouterr().out


def test_compiling_is_decided_by_what_it_saves_and_remembered(base, monkeypatch, capsys):
    """With a compiler that changes nothing and takes no time: what counts is when it is called."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)

    def compiles(run, steps, *flags):
        monkeypatch.delenv("NANOMUON_COMPILE", raising=False)
        compiled.clear()
        assert base_train.main(arguments(base, run, steps, *QUIET, *flags)) == 0
        return any(isinstance(each, GPT) for each in compiled)

    for pays in (False, True):
        monkeypatch.setattr(plan, "seconds_of", lambda *_, pays=pays: 200 if pays else 100)  # saves a sixth
        assert compiles(f"decided_{pays}", 4) is pays  # takes 24 s
        assert ("to compile takes" in capsys.readouterr().out) is not pays
        monkeypatch.setattr(plan, "seconds_of", lambda *_, pays=pays: 100 if pays else 200)  # not asked again
        assert compiles(f"decided_{pays}", 6) is pays
    assert compiles("decided_True", 8, "--no-compile") is False


class Compiled(torch.nn.Module):
    """In place of a compiled model: what would make it compile another graph is written down."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.calls = []

    def forward(self, *inputs, **options):
        shapes = [(x.shape, x.stride(), x.dtype) for x in inputs]
        self.calls.append((shapes, options, torch.is_grad_enabled()))
        return self.model(*inputs, **options)


def test_evaluation_runs_what_training_compiled(base, monkeypatch):
    """Also where an earlier launch has trained and only the last evaluation is left."""
    models = []

    def compile_nothing(function, **_):
        if not isinstance(function, GPT):
            return function
        models.append(Compiled(function))
        return models[-1]

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "compile", compile_nothing)
    for name in ("whole", "interrupted"):
        command = arguments(base, f"{name}_compiled", 3, "--eval-every", "2", "--save-every", "-1")
        if name == "interrupted":
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setenv("NANOMUON_COMPILE", "1")
                patch.setattr(Run, "finish", fail)
                base_train.main(command)
        monkeypatch.setenv("NANOMUON_COMPILE", "1")
        assert base_train.main(command) == 0
    last = []
    for name in ("whole", "interrupted"):
        last.append(read_metrics(base / "runs" / f"{name}_compiled" / "metrics.jsonl")[1][-1])
    assert last[0] == last[1] and last[0]["whole_set"]
    assert len(models) == 3
    training_calls = 2 * 3  # micro-steps of the three steps
    for model in models:
        assert all(call == models[0].calls[0] for call in model.calls)
        assert model.calls[0][2]  # with gradients, for which the graph was compiled
    assert len(models[0].calls) > training_calls + 2  # evaluations went through it too
    assert len(models[2].calls) > 0


def test_rows_of_a_micro_step_are_chosen_to_divide_the_batch(base, capsys):
    flags = f"--depth 2 --max-seq-len 32 --corpus path:{base}/texts --vocab-size 300 --plan".split()
    for rows, chosen in ((64, 16), (24, 8), (5, 1)):
        assert base_train.main([*flags, "--total-batch-size", str(32 * rows)]) == 0
        assert f"{chosen} rows x {rows // chosen} micro-steps" in capsys.readouterr().out


def test_wandb_works_offline(base, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert (
        base_train.main(arguments(base, "logged", 3, "--wandb", "--eval-every", "-1", "--save-every", "-1"))
        == 0
    )
    assert list((base / "runs" / "logged" / "wandb").glob("offline-run-*"))


def times_of_files(folder):
    """When each file was written, but for locks, which say who held them last."""
    files = [file for file in folder.glob("**/*") if file.is_file() and file.suffix != ".lock"]
    return {file: file.stat().st_mtime_ns for file in files}


@pytest.mark.slow
def test_speedrun_finishes_after_being_killed_and_then_skips_everything(base):
    """A small speedrun killed at several moments, then left to finish, then run again."""
    flags = "--max-seq-len 32 --device-batch-size 4 --total-batch-size 256 --eval-tokens 512 --save-every 20"
    command = ["bash", "speedrun.sh", "--num-iterations", "1000", *flags.split()]
    environment = {
        **os.environ,
        "CORPUS": f"path:{base}/texts",
        "NANOMUON_PYTHON": sys.executable,
        "RUN": "speedrun",
        "DEPTH": "2",
        "VOCAB_SIZE": "300",
        "NANOMUON_BASE_DIR": str(base / "speedrun"),
    }
    keywords = dict(env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for moment in (2.5, 5, 8):
        process = subprocess.Popen(command, start_new_session=True, **keywords)
        time.sleep(moment)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    run = base / "speedrun" / "runs" / "speedrun"
    process = subprocess.Popen(command, start_new_session=True, **keywords)
    rows_before = len(read_metrics(run / "metrics.jsonl")[0])
    wait_until(
        lambda: len(read_metrics(run / "metrics.jsonl")[0]) > rows_before,
        lambda: process.poll() is None,
        seconds=300,
    )
    process.terminate()  # bash alone: it hands that on
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "stopped before its end" in output, output
    assert (run / "stopped").exists() and not files.being_written(run)
    finished = subprocess.run(command, **keywords)
    assert finished.returncode == 0 and not (run / "stopped").exists(), finished.stdout
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")[0]] == list(range(1, 1001))
    written = times_of_files(base / "speedrun")
    again = subprocess.run(command, **keywords)
    assert again.returncode == 0 and "is complete" in again.stdout
    refused = subprocess.run([*command, "--seed", "1"], **keywords)
    assert refused.returncode == 2 and "exists with --seed 0, not 1" in refused.stdout
    for flag in (["--depth", "3"], ["--run=other"]):
        elsewhere = subprocess.run([*command, *flag], **keywords)
        variable = flag[0][2:].split("=")[0].upper()
        assert elsewhere.returncode == 2 and f"{variable}=... bash speedrun.sh" in elsewhere.stdout
    assert times_of_files(base / "speedrun") == written
