"""The folder of a run: what it remembers, and what it refuses."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch

from nanomuon import run_folder
from nanomuon.files import being_written, tensor_shapes, write_tensors
from nanomuon.run_folder import find_run
from nanomuon.runtime import InputError
from scripts import base_train


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


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 3, "seed": 7, "no_qk_norm": True, "window_pattern": "SSSL", "matrix_lr": 0.125},
        {
            "depth": 4,
            "deterministic": False,
            "target_flops": 1e15,
            "corpus": "path:a b=c",
            "vocab_size": None,
        },
    ],
)
def test_recorded_options_are_the_flags_that_say_them(options):
    parser = base_train.make_parser()
    parsed = vars(parser.parse_args(run_folder.as_flags(options)))
    assert parsed == vars(parser.parse_args([])) | options


def test_a_run_records_what_computes_it():
    known = run_folder.trained_with()
    assert known["torch"] == torch.__version__.split("+")[0] or known["torch"] == torch.__version__
    assert known["threads"] == torch.get_num_threads() and "numpy" in known
