"""Runs, shards, tokenizers and races that somebody else made, or that were damaged: whatever is in them, a
reader gives what is sound or one line that names the file, soon, and changes nothing.
"""

import argparse
import json
import os
import shutil
import time

import pytest
import torch

from nanomuon import checkpoint, export, finished_run, planning, report, run_folder, shards, sizing
from nanomuon.files import write_json
from nanomuon.finished_run import load_run, model_config
from nanomuon.gpt import GPTConfig
from nanomuon.launch import check_room
from nanomuon.runtime import InputError, Runtime, explain, print0
from nanomuon.tokenizer import Tokenizer
from scripts import base_train
from tests.training import arguments, write_corpus

CPU = Runtime(torch.device("cpu"), torch.float32)
RESULT = {
    "contender": "muon",
    "seed": 0,
    "score": 1.5,
    "curve": [[0, 2.0, None], [10, 1.6, 1.5]],
    "step_ms": 3.0,
    "optimizer_ms": 1.0,
    "initial": "0123456789ab",
    "rows": "ba9876543210",
    "groups": [],
    "compiled": False,
    "machine": "this one",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base folder with a real run of four steps, its shards, and a race."""
    base = tmp_path_factory.mktemp("made")
    write_corpus(base / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOMUON_BASE_DIR", str(base))
        patch.setenv("NANOMUON_COMPILE", "0")
        assert base_train.main(arguments(base, "tiny", 4, "--save-every", "2")) == 0
    folder = base / "races" / "small"
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps({"name": "small", "dtype": "float32", "steps": 10}))
    (folder / "muon-seed0.json").write_text(json.dumps(RESULT))
    return base


@pytest.fixture
def base(made, tmp_path, monkeypatch):
    """A copy of it to damage."""
    shutil.copytree(made, tmp_path / "base", ignore=shutil.ignore_patterns("texts"))
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    return tmp_path / "base"


def resume(base):
    """What base_train does with a run before it trains."""
    folder = run_folder.folder_of("tiny")
    args, settings, _ = base_train.resolve_arguments(["--run", "tiny"])
    measured = dict(settings.get("measured", {}))
    runtime = sizing.choose_dtype(args.dtype, CPU, measured)
    plan = planning.plan_run(args, 300, runtime, measured)
    run_folder.check_no_links(folder)
    run_folder.is_complete(folder, plan.steps)


def vouch_for(checkpoint_folder):
    """Make the manifest of a checkpoint agree with its files, as someone who means harm can."""
    file = checkpoint_folder / "manifest.json"
    if not file.is_file() or file.stat().st_size > 1 << 24:
        return
    try:
        manifest = json.loads(file.read_text())
        manifest["files"] = {}
        for tensors in checkpoint_folder.glob("*.safetensors"):
            if tensors.is_file():
                manifest["files"][tensors.name] = tensors.stat().st_size
        file.write_text(json.dumps(manifest))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return  # there is no manifest any more that could vouch for anything


def run_of(base):
    return base / "runs" / "tiny"


def change(file, *keys, to):
    """Put another value into a file of JSON."""
    content = json.loads(file.read_text())
    inside = content
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = to
    file.write_text(json.dumps(content))


def refused(reader, *words):
    """The InputError of a reader, which comes soon and has these words."""
    began = time.perf_counter()
    with pytest.raises(InputError) as caught:
        reader()
    assert time.perf_counter() - began < 10  # it takes milliseconds; on a busy machine more
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize(
    "key, value",
    [
        ("seq_len", 10**10),
        ("width", 10**6),
        ("heads", 0),
        ("depth", 100_000),
        ("depth", True),
        ("vocab_size", 300.0),
        ("short_window", float("nan")),
        ("window_pattern", "SX"),
        ("qk_norm", 1),
        ("kv_heads", None),
    ],
)
def test_an_absurd_model_is_refused_by_file_and_key(base, key, value):
    config = run_of(base) / "config.json"
    change(config, "config", key, to=value)
    refused(lambda: load_run("tiny", CPU), str(config), f"config.{key} is ")
    settings = run_of(base) / "settings.json"
    change(settings, key, to=value)
    refused(lambda: resume(base), str(settings), f"{key} is ")


@pytest.mark.parametrize(
    "option, value", [("depth", 10**5), ("max_seq_len", 10**10), ("seed", "x"), ("fp8", 3)]
)
def test_an_absurd_option_is_refused_by_file_and_key(base, option, value):
    settings = run_of(base) / "settings.json"
    change(settings, "options", option, to=value)
    refused(lambda: resume(base), str(settings), f"options: {option} is ")


def test_a_model_is_built_only_where_its_weights_are(base, monkeypatch):
    config = json.loads((run_of(base) / "config.json").read_text())["config"]
    assert model_config(run_of(base), config) == GPTConfig(**config)
    monkeypatch.setattr(finished_run, "build_model", None)  # not called
    for key, value in (("width", 1 << 17), ("depth", 1000), ("vocab_size", 1 << 24), ("kv_heads", 1)):
        changed = {**config, key: value}
        refused(lambda changed=changed: model_config(run_of(base), changed), "model.safetensors")
    too_large = planning.meta_model(GPTConfig.from_depth(100, 300, 32, width=1 << 17, heads=1, kv_heads=1))
    args = argparse.Namespace(run="tiny", tensor_parallel=1, shard="none")
    refused(lambda: check_room(too_large, args, CPU), "run tiny", "GB")


def test_a_run_remembers_flags_that_exist_and_none_of_a_launch(base):
    """Else a run of somebody else's could log to the network, or choose its own folder."""
    options = {"wandb": True, "run": "../elsewhere", "resume": "never", "of_an_earlier_version": 1}
    for key, value in options.items():
        change(run_of(base) / "settings.json", "options", key, to=value)
    args, _, changed = base_train.resolve_arguments(["--run", "tiny"])
    assert (args.wandb, args.run, args.resume) == (False, "tiny", "auto") and not changed
    assert not hasattr(args, "of_an_earlier_version")


@pytest.mark.parametrize("name", ["../../../../../dev/zero", "/dev/zero", "..", "", "a/b", "a\0b"])
def test_manifests_name_files_of_their_folder(base, name):
    folder = run_of(base) / "checkpoints" / "step_4"
    change(folder / "manifest.json", "files", to={name: 0})
    refused(lambda: checkpoint.find(run_of(base), "step_4"), "by the manifest")

    (file,) = base.glob("shards/*/manifest.json")
    change(file, "train", 0, "name", to=name)
    refused(lambda: shards.read_manifest(file.parent), str(file), "train[0].name")


def test_a_tokenizer_that_would_end_the_process_is_refused(base):
    """tiktoken panics, which is no Exception, on bytes it does not know and on some patterns."""
    tokenizer = Tokenizer.load(run_of(base) / "tokenizer")
    for stranger in (
        Tokenizer(tokenizer.vocab[1:]),
        Tokenizer([*tokenizer.vocab, tokenizer.vocab[-1]]),
        Tokenizer(tokenizer.vocab, pattern="(?=(a+)+$)|."),
    ):
        stranger.save(base / "stranger")
        refused(lambda: Tokenizer.load(base / "stranger"), "damaged tokenizer", "stranger")


def test_nothing_is_written_through_a_link(made, base, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine\n")

    def link(path):
        path.unlink(missing_ok=True)
        path.symlink_to(precious)
        return path

    link(run_of(base) / "stages.jsonl")
    refused(lambda: finished_run.record_stages(run_of(base), {"training": 1.0}), "stages.jsonl", "link")
    link(run_of(base) / "metrics.jsonl")
    refused(lambda: report.MetricsLog(run_of(base) / "metrics.jsonl", 4), "metrics.jsonl", "link")
    refused(lambda: base_train.main(arguments(made, "tiny", 4)), "runs/tiny/", "link")
    link(run_of(base) / f".summary.json.{os.getpid()}.tmp")
    write_json(link(run_of(base) / "summary.json"), {"steps": 4})
    assert not (run_of(base) / "summary.json").is_symlink()
    link(run_of(base) / "model.safetensors.tmp")
    export.export_model(run_of(base), torch.nn.Linear(2, 2), {}, {})
    link(base / "runs" / ".tiny.lock")
    with pytest.raises(OSError) as caught:
        run_folder.held(run_of(base), rank=0).__enter__()
    code, message = explain(caught.value)
    assert code == 2 and "symbolic link" in message and ".tiny.lock" in message
    assert precious.read_text() == "mine\n"


def test_a_line_damaged_in_the_middle_costs_that_line(base, capsys):
    file = run_of(base) / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    half = b'{"step": 3, "train_loss": \x1b[2J'
    odd = b'{"step": 3, "tokens": true, "val_bpb": 1.0}'
    file.write_bytes(b"".join([*lines[:2], half + b"\n", odd + b"\n", lines[3], b'{"step": 4, "tok']))
    training, _ = report.read_metrics(file)
    assert [row["step"] for row in training] == [1, 2, 4]
    log = report.MetricsLog(file, resume_step=4)
    log.log({"step": 5})
    log.close()
    assert file.read_bytes() == b"".join([*lines[:2], lines[3], b'{"step": 5}\n'])
    assert (run_of(base) / "metrics.damaged.jsonl").read_bytes() == half + b"\n" + odd + b"\n"
    assert "2 damaged lines, from line 3 on, set aside in metrics.damaged.jsonl" in capsys.readouterr().out

    stages = run_of(base) / "stages.jsonl"
    stages.write_text('{"stage": "tokenizer", "seconds": 3.0}\nnonsense\n{"stage": "data", "seconds": 1}\n')
    assert finished_run.record_stages(run_of(base), {"training": 2}) == {
        "tokenizer": 3,
        "data": 1,
        "training": 2,
    }
    assert (run_of(base) / "stages.damaged.jsonl").read_text() == "nonsense\n"


def test_control_characters_of_strangers_are_shown(base, capsys, monkeypatch):
    said = "a\x1b[2Jb\x07c\x7fd\x9be\u202ef\rg"
    shown = "a\\x1b[2Jb\\x07c\\x7fd\\x9be\\u202ef\\x0dg"
    print0(said, "line\n\tend")
    assert capsys.readouterr().out == f"{shown} line\n\tend\n"
    assert explain(InputError(said))[1] == f"error: {shown.replace(chr(13), ' ')}\n".replace("\\x0d", " ")
    change(run_of(base) / "summary.json", "note\x1b[31m", to=said)
    run_folder.is_complete(run_of(base), 4)
    output = capsys.readouterr().out
    assert "\x1b" not in output and f"note\\x1b[31m: {shown}" in output
    monkeypatch.setattr(report, "plot_run", lambda metrics, image: None)
    report.write_report(run_of(base), {"corpus": said}, {}, [said], "a machine", [("training", 1.0)])
    written = (run_of(base) / "report.md").read_bytes()
    assert b"\x1b" not in written and shown.encode() in written
