"""The folder of a run: what it remembers, and what it refuses."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from nanomuon import planning, provenance, run_folder, sizing
from nanomuon.corpus import Corpus
from nanomuon.files import being_written, tensor_shapes, write_tensors
from nanomuon.finished_run import record_stages
from nanomuon.run_folder import find_run
from nanomuon.runtime import InputError, Runtime
from scripts import base_train

DEFINED = {"corpus": "python", "depth": 2, "seed": 0}
RECORDED = {"trained_on": {"revision": "1"}, "trained_with": {"threads": 1}}


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


def test_a_run_is_named_or_is_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "runs" / "mine"
    assert (
        find_run("mine") == find_run(str(mine)) == find_run("runs/mine") == find_run("./runs/mine/") == mine
    )
    assert find_run("nobody") == tmp_path / "runs" / "nobody"  # what it lacks is for the reader to say
    for run, message in (
        ("/no/such", "--run /no/such: there is no such folder"),
        ("runs", "the folder here is --run ./runs"),
        ("", "is not a folder name"),
        (".hidden", "is not a folder name"),
    ):
        with pytest.raises(InputError, match=message):
            find_run(run)


def said_to_another_user(work):
    """The InputError of work() in a process without the rights of root, and without the owner's."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "no InputError"
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)  # nobody
                os.setuid(65534)
            work()
        except InputError as error:
            said = str(error)
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as answer:
        return answer.read()


def test_what_may_not_be_read_is_said(monkeypatch):
    """Not that it is no model, or damaged. In a folder of its own: others may not enter those of pytest."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        folder.chmod(0o755)
        file = folder / "model.safetensors"
        write_tensors({"weight": torch.ones(1)}, file, {})
        assert said_to_another_user(lambda: tensor_shapes(file)) == "no InputError"
        file.chmod(0)
        assert said_to_another_user(lambda: tensor_shapes(file)) == f"{file}: Permission denied"
        folder.chmod(0)
        for run in (temporary, "mine"):
            monkeypatch.setattr(run_folder, "folder_of", lambda run: folder)
            expected = f"{folder} may not be read by this user"
            assert said_to_another_user(lambda run=run: find_run(run)) == expected
        folder.chmod(0o755)


def test_the_commit_of_a_checkout_and_whether_it_is_clean(tmp_path):
    assert provenance.commit(tmp_path) == {"commit": None, "clean_tree": None}

    def git(*command):
        identity = ["-c", "user.name=x", "-c", "user.email=x@y"]
        ran = subprocess.run(["git", "-C", tmp_path, *identity, *command], capture_output=True, check=True)
        return ran.stdout.decode().strip()

    git("init")
    assert provenance.commit(tmp_path) == {"commit": None, "clean_tree": None}  # nothing is committed
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "-m", "first")
    git("tag", "-a", "v1", "-m", "a name that is no hash")
    head = git("rev-parse", "HEAD")
    (tmp_path / "not_tracked").write_text("1")
    assert provenance.commit(tmp_path) == {"commit": head, "clean_tree": True}
    (tmp_path / "code.py").write_text("2")
    assert provenance.commit(tmp_path) == {"commit": head, "clean_tree": False}
    (tmp_path / "installed").mkdir()  # a package inside another project's folder
    assert provenance.commit(tmp_path / "installed") == {"commit": None, "clean_tree": None}


@pytest.mark.parametrize("damaged", [3, "text", [], {"corpus_folder": 7}, None])
def test_a_record_of_other_types_is_no_traceback(damaged):
    args = base_train.parse_arguments([], {})
    runtime = Runtime(torch.device("cpu"), torch.float32)
    now = provenance.record(Corpus("python", "1", "python-1", ()), args, None, runtime)
    settings = {"trained_on": damaged, "trained_with": damaged}
    for message in provenance.changes_of_data(settings, now) + provenance.changes_of_tools(settings, now):
        assert "which was" in message
    assert provenance.changes_of_data(now, now) == provenance.changes_of_tools(now, now) == []


def test_the_last_time_of_a_stage_counts(tmp_path):
    record_stages(tmp_path, {"tokenizer": 3.0, "training": 100.0})
    assert record_stages(tmp_path, {"training": 50.0}) == {"tokenizer": 3.0, "training": 50.0}
