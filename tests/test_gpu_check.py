"""The GPU check: what its runner makes of stages that fail, crash and hang, and that its lines can fail."""

import json
import os
import sys
import time

import pytest
import torch

from nanomuon import attention, orthogonalize
from nanomuon.runtime import InputError
from scripts import gpu_check, gpu_common, gpu_layouts, gpu_numerics, gpu_stages
from scripts.gpu_common import Lines, Place

# What a stand-in for a stage does; it finds its file of lines where gpu_check puts it
STAND_IN = """
import json, os, subprocess, sys, time
behaviour, made, lines = sys.argv[1], sys.argv[2], sys.argv[sys.argv.index("--lines") + 1]
open(made, "a").write(behaviour + "\\n")
def say(result):
    with open(lines, "a") as file:
        file.write(json.dumps({"name": "a line", "result": result, "found": "1 | 2", "allowed": ""}) + "\\n")
if behaviour != "silent":
    say("skipped" if behaviour == "skips" else "PASS")
if behaviour == "fails":
    say("FAIL")
if behaviour == "crashes":
    sys.exit("the kernel is gone")
if behaviour == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(made, "a").write(f"child {child.pid}\\n")
    time.sleep(60)
"""


def command(behaviour, made):
    return [sys.executable, "-c", STAND_IN, behaviour, str(made)]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "behaviour,result,said",
    [
        ("passes", "PASS", None),
        ("skips", "skipped", None),
        ("fails", "FAIL", "1 | 2"),
        ("silent", "FAIL", "it said nothing"),
        ("crashes", "FAIL", "exit code 1: the kernel is gone; see logs/crashes.txt"),
        ("hangs", "FAIL", "killed after 1 s; see logs/hangs.txt"),
    ],
)
def test_a_stage_passes_only_where_it_ends_well_and_something_passed(behaviour, result, said, tmp_path):
    made = tmp_path / "made"
    found = gpu_check.run_stage(
        behaviour, command(behaviour, made), 1 if said and "killed" in said else 30, tmp_path
    )
    assert found["result"] == result and found["seconds"] < 20
    failed = [line["found"] for line in found["lines"] if line["result"] == "FAIL"]
    assert failed == ([said] if said else [])
    if behaviour in ("crashes", "hangs"):  # what was found before counts
        assert found["lines"][0]["result"] == "PASS"
    if behaviour == "hangs":
        child = int(made.read_text().split("child ")[1])
        deadline = time.monotonic() + 10
        while is_running(child):
            assert time.monotonic() < deadline, "a process of the stage outlives it"
            time.sleep(0.01)


@pytest.fixture
def checks(tmp_path, monkeypatch):
    """(run, made): gpu_check with stand-ins for its stages, and what those have done."""
    made = tmp_path / "made"
    behaviours = ["passes", "crashes", "hangs", "skips"]

    def stage_command(stage, device, ranks, work):
        return command(stage.name, made)

    stages = []
    for behaviour in behaviours:

        def stand_in(place, lines):
            """Stands in for a stage."""

        stand_in.__name__ = behaviour
        stages.append(gpu_stages.Stage(stand_in, 1 if behaviour == "hangs" else 30))
    monkeypatch.setattr(gpu_check, "SLOWER", 1)
    monkeypatch.setattr(gpu_check, "stage_command", stage_command)
    monkeypatch.setattr(gpu_stages, "STAGES", stages)
    monkeypatch.setattr(gpu_check, "versions", lambda device: {"torch": "1"})

    def run(*arguments):
        return gpu_check.main(["--device", "cpu", "--out", str(tmp_path / "out"), *arguments])

    def done():
        lines = made.read_text().splitlines() if made.exists() else []
        made.unlink(missing_ok=True)
        return [line for line in lines if line in behaviours]

    return run, done


def test_one_failure_hides_no_other_stage(checks, tmp_path, capsys):
    run, done = checks
    assert run() == 1
    assert done() == ["passes", "crashes", "hangs", "skips"]
    content = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    results = {name: stage["result"] for name, stage in content["stages"].items()}
    assert results == {"passes": "PASS", "crashes": "FAIL", "hangs": "FAIL", "skips": "skipped"}
    assert content["verdict"] == "FAIL" and content["checked"]["torch"] == "1"
    text = (tmp_path / "out" / "gpu_check.md").read_text()
    assert "# gpu_check: FAIL" in text and "| crashes | ends well | exit code 1: the kernel is gone" in text
    assert "1 \\| 2" in text
    assert "FAIL ends in time: killed after 1 s" in capsys.readouterr().out


def test_what_is_done_is_not_done_again(checks, tmp_path, monkeypatch):
    run, done = checks
    assert run("--only", "skips,passes") == 0 and done() == ["passes", "skips"]
    assert run("--only", "passes,crashes") == 1 and done() == ["crashes"]
    assert run("--only", "passes") == 1 and done() == []  # something failed before
    assert run("--only", "passes", "--again") == 1 and done() == ["passes"]
    content = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert content["stages"].keys() == {"passes", "skips", "crashes"}
    monkeypatch.setattr(gpu_check, "versions", lambda device: {"torch": "2"})
    assert run("--only", "passes") == 0 and done() == ["passes"]
    (tmp_path / "out" / "gpu_check.json").write_text("{")
    assert run("--only", "passes") == 0 and done() == ["passes"]


def test_a_stage_without_time_is_missing_not_failed(checks, tmp_path, capsys):
    run, done = checks
    assert run("--only", "passes") == 0
    assert run("--minutes", "0.01", "--only", "passes,hangs") == 1
    assert "not done yet: hangs; the same command goes on" in capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert list(content["stages"]) == ["passes"] and content["verdict"] == "PASS"


def test_the_first_rank_alone_works_and_its_children_know_nothing_of_torchrun(checks, tmp_path, monkeypatch):
    run, done = checks
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert run() == 0 and done() == [] and not (tmp_path / "out").exists()
    assert not gpu_check.stage_environment().keys() & {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"}
    assert gpu_check.count_ranks("cpu") == 2
    monkeypatch.setenv("RANK", "0")
    assert run("--only", "passes") == 0 and done() == ["passes"]


def test_a_device_that_does_not_compute_ends_the_check(checks, monkeypatch, capsys):
    run, done = checks
    stage = gpu_stages.STAGES[1]
    stage.function.__name__ = "device"
    monkeypatch.setattr(
        gpu_check, "stage_command", lambda stage, device, ranks, work: command("crashes", work.parent / "m")
    )
    monkeypatch.setattr(gpu_stages, "STAGES", [stage, gpu_stages.STAGES[0]])
    assert run() == 1
    assert "nothing else is tried" in capsys.readouterr().out


def test_arguments_that_cannot_be_meant(checks):
    run, _ = checks
    with pytest.raises(InputError, match="--only nonsense: there is no such stage; there are passes, "):
        run("--only", "nonsense")
    with pytest.raises(InputError, match="--minutes must be above 0"):
        run("--minutes", "0")


def test_the_stages_are_listed(capsys):
    assert gpu_check.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(gpu_stages.STAGES) and lines[0].startswith("device ")
    assert set(gpu_check.EXTRA_LAYOUTS) < {stage.name for stage in gpu_stages.STAGES}


# ------------------------------------------------------------------------------------------------------------
# Every line can fail: with what it looks at broken it does, and only then


def scaled(kernel, argument):
    """A kernel that gets one of its positional tensors 3% too large."""

    def broken(*tensors, **keywords):
        tensors = [1.03 * tensor if i == argument else tensor for i, tensor in enumerate(tensors)]
        return kernel(*tensors, **keywords)

    return broken


def failed(check, tmp_path, *arguments):
    """Names of the lines that FAIL."""
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    check(*arguments, Place(torch.device("cpu"), 1, tmp_path), Lines(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines
    return [line["name"] for line in lines if line["result"] == "FAIL"]


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "0")


@pytest.mark.parametrize(
    "check,arguments,kernel,argument,line",
    [
        (gpu_numerics.check_adamw, ["eager"], "adamw_update", 1, "AdamW moments, eager"),
        (gpu_numerics.check_momentum, ["eager"], "muon_momentum", 0, "momentum, eager"),
        (gpu_numerics.check_muon_update, ["eager"], "muon_update", 1, "Muon update, eager"),
        (
            gpu_numerics.check_direction,
            ["polar", (2, 48, 96), torch.float32, 3e-2],
            "muon_direction",
            2,
            "polar",
        ),
    ],
)
def test_a_kernel_that_is_off_by_3_percent_fails(
    check, arguments, kernel, argument, line, tmp_path, monkeypatch, eager
):
    assert failed(check, tmp_path, *arguments) == []
    broken = getattr(gpu_numerics, kernel)
    if kernel == "muon_direction":  # its tolerance for half precision: a coefficient that is off
        table = {"polar_express": ((8.4, -22.48, 15.88), *orthogonalize.COEFFICIENTS["polar_express"][1:])}
        monkeypatch.setattr(gpu_numerics, "COEFFICIENTS", table)
    else:
        monkeypatch.setattr(gpu_numerics, kernel, scaled(broken, argument))
    assert line in failed(check, tmp_path, *arguments)


def test_an_update_that_a_nan_reaches_fails(tmp_path, monkeypatch, eager):
    kernel = gpu_numerics.adamw_update

    def broken(param, grad, exp_avg, exp_avg_sq, ok, **rates):
        kernel(param, grad, exp_avg, exp_avg_sq, torch.ones_like(ok), **rates)

    monkeypatch.setattr(gpu_numerics, "adamw_update", broken)
    found = failed(gpu_numerics.check_adamw, tmp_path, "eager")
    assert found == ["AdamW leaves everything alone where a gradient is NaN, eager"]


def test_a_window_that_is_off_by_one_key_fails(monkeypatch):
    shape = (64, 2, 16)
    cpu = torch.device("cpu")
    for window in (None, 16):
        assert gpu_numerics.attention_error("sdpa", *shape, window, cpu, torch.float32) < 1e-5
    monkeypatch.setattr(attention, "late", lambda q, k, v, w: attention.sdpa(q, k, v, w + 1), raising=False)
    assert gpu_numerics.attention_error("late", *shape, 16, cpu, torch.float32) > 0.1
    half = gpu_numerics.attention_error("sdpa", *shape, 16, cpu, torch.bfloat16)
    assert half < gpu_numerics.ATTENTION[torch.bfloat16]


def test_a_flash_package_that_does_not_load_hides_no_other_backend(tmp_path, monkeypatch):
    failure = {"varlen": "failed: ImportError: libcudart"}
    measured = {None: {None: {"sdpa": 1.0}}, "FA9": {None: failure, 128: failure}}
    monkeypatch.setattr(attention, "measure", lambda *arguments, **keywords: measured)
    file = tmp_path / "lines.jsonl"
    gpu_numerics.attention_backends(Place(torch.device("cpu"), 1, tmp_path), Lines(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["name"], line["result"]) for line in lines] == [
        ("sdpa, full", "PASS"),
        ("varlen FA9, full", "skipped"),
        ("varlen FA9, window 128 of 256", "skipped"),
    ]


def test_losses_that_part_fail(tmp_path):
    curve = [7 - 0.03 * i for i in range(100)]

    def check(found, place, lines):
        gpu_layouts.compare_losses(found, curve, Place(torch.device("cuda"), 1, tmp_path), lines)

    assert failed(check, tmp_path, curve) == []
    assert failed(check, tmp_path, [*curve[:9], curve[9] + 0.02, *curve[10:]]) == [
        "losses of the first ten steps against one process"
    ]
    assert failed(check, tmp_path, [*curve[:90], *(x + 0.1 for x in curve[90:])]) == [
        "mean loss of the last ten against one process"
    ]
    assert failed(check, tmp_path, [*curve[:5], float("nan"), *curve[6:]]) != []
    assert failed(check, tmp_path, curve[:99]) == ["100 steps"]


def test_ranks_of_which_one_fails_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_common, "GRACE", 0.1)
    script = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(7); time.sleep(60)"
    place = Place(torch.device("cpu"), 2, tmp_path)
    began = time.monotonic()
    codes, _ = gpu_common.run_to_end(place, [sys.executable, "-c", script], ranks=2)
    assert codes == [-9, 7] and time.monotonic() - began < 20


@pytest.mark.slow
def test_the_whole_check_on_this_cpu(tmp_path):
    out = tmp_path / "out"
    code = gpu_check.main(["--device", "cpu", "--out", str(out), "--minutes", "30"])
    content = json.loads((out / "gpu_check.json").read_text())
    results = {name: stage["result"] for name, stage in content["stages"].items()}
    assert code == 0, (out / "gpu_check.md").read_text()
    assert results.keys() == {stage.name for stage in gpu_stages.STAGES}
    only_on_gpus = ("fsdp_and_tensor_parallel", "out_of_memory", "optim_bench_24", "profile")
    for name, result in results.items():
        assert result == ("skipped" if name in only_on_gpus else "PASS"), name
    assert sorted(os.listdir(out)) == ["gpu_check.json", "gpu_check.md", "logs"]
