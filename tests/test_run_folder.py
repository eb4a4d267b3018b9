"""The folder of a run: what it remembers, and what it refuses."""

import json

import pytest
import torch

from nanomuon import planning, run_folder, sizing
from nanomuon.finished_run import record_stages
from nanomuon.locks import being_written
from nanomuon.runtime import InputError, Runtime
from scripts import base_train

DEFINED = {"corpus": "python", "depth": 2, "seed": 0}
RECORDED = {"trained_on": {"revision": "1"}, "trained_with": {"threads": 1}, "changes": []}


def write(run_dir, *flags):
    flags = "--depth 2 --max-seq-len 32 --total-batch-size 64 --device-batch-size 2".split() + list(flags)
    args = base_train.parse_arguments(flags, {})
    plan = planning.plan_run(args, 256, Runtime(torch.device("cpu"), torch.float32), {})
    run_dir.mkdir(exist_ok=True)
    run_folder.write_settings(run_dir, DEFINED, args, plan, {"device_batch_size": 2}, RECORDED)


def test_settings_hold_what_defines_the_run_and_what_it_remembers(tmp_path):
    assert run_folder.read_settings(tmp_path / "run") == {}
    write(tmp_path / "run", "--matrix-lr", "0.01", "--resume", "never", "--wandb")
    settings = run_folder.read_settings(tmp_path / "run")
    assert settings.items() >= DEFINED.items() and settings["measured"] == {"device_batch_size": 2}
    options = settings["options"]
    assert options["matrix_lr"] == 0.01 and options["total_batch_size"] == 64
    assert not {"run", "resume", "wandb", "shard"} & options.keys()  # of one launch


def test_the_speedrun_hears_of_the_dtype_that_a_run_has(tmp_path, monkeypatch, capsys):
    """Measured again it might be another, and the run another length."""
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    (tmp_path / "runs").mkdir()
    for speedup, dtype in ((2.0, "bfloat16"), (1.0, "float32")):
        monkeypatch.setattr(sizing, "cpu_bf16_speedup", lambda speedup=speedup: speedup)
        run_folder.print_cpu_dtype("new")
        assert capsys.readouterr().out == f"{dtype}\n"
    write(tmp_path / "runs" / "run", "--dtype", "bfloat16")
    run_folder.print_cpu_dtype("run")
    assert capsys.readouterr().out == "bfloat16\n"


def test_a_run_that_was_started_as_another_is_refused(tmp_path):
    run_folder.check_definition(tmp_path / "run", DEFINED)  # does not exist yet
    write(tmp_path / "run")
    run_folder.check_definition(tmp_path / "run", DEFINED)
    with pytest.raises(InputError, match="run run exists with depth 2, not 3; seed 0, not 1: choose another"):
        run_folder.check_definition(tmp_path / "run", {**DEFINED, "depth": 3, "seed": 1})


def test_only_the_first_rank_holds_the_folder(tmp_path):
    run_dir = tmp_path / "runs" / "mine"
    with run_folder.held(run_dir, rank=1):
        assert not being_written(run_dir)
    with run_folder.held(run_dir, rank=0):
        assert being_written(run_dir)
        with pytest.raises(InputError, match="run mine is being trained by another"):
            run_folder.held(run_dir, rank=0).__enter__()
    assert not being_written(run_dir)


def test_a_run_is_complete_up_to_the_steps_it_has(tmp_path, capsys):
    assert not run_folder.is_complete(tmp_path, 10)
    (tmp_path / "summary.json").write_text(json.dumps({"val_bpb": 1.5, "steps": 10}))
    assert run_folder.is_complete(tmp_path, 10) and not run_folder.is_complete(tmp_path, 11)
    assert "is complete" in (output := capsys.readouterr().out) and "val_bpb: 1.5" in output


def test_the_last_time_of_a_stage_counts(tmp_path):
    record_stages(tmp_path, {"tokenizer": 3.0, "training": 100.0})
    assert record_stages(tmp_path, {"training": 50.0}) == {"tokenizer": 3.0, "training": 50.0}
