"""The size of a run, from its arguments; without a script, data or a device."""

import subprocess
import sys

import pytest
import torch

from nanomuon import planning
from nanomuon.files import write_json
from nanomuon.runtime import InputError, Runtime
from scripts import base_train

CPU, FOUR = (Runtime(torch.device("cpu"), torch.float32, 0, ranks) for ranks in (1, 4))


def plan(flags, runtime=CPU):
    return planning.plan_run(base_train.parse_arguments(flags.split(), {}), 256, runtime, {})


def test_micro_steps_and_tokens_follow_from_the_batch():
    flags = "--depth 2 --max-seq-len 32 --device-batch-size 2 --total-batch-size 1024 --num-iterations 7"
    assert (plan(flags).micro_steps, plan(flags).tokens) == (16, 7 * 1024)
    assert plan(flags, FOUR).micro_steps == 4
    halved = plan(flags + " --tensor-parallel 2", FOUR)  # two ranks see the same rows
    assert (halved.micro_steps, halved.data_parallel) == (8, 2)


def test_what_is_not_given_follows_from_the_depth():
    given = plan("--depth 2")
    assert given.config.seq_len == 256 and given.config.depth == 2
    counts = planning.meta_model(given.config).parameter_counts()
    asked = 10.5 * (counts["matrices"] + counts["lm_head"])
    assert given.batch % (given.rows * 256) == 0 and asked - given.batch < given.tokens <= asked


def test_a_compute_budget_decides_the_length():
    shape = "--depth 2 --max-seq-len 32 --device-batch-size 2"
    model = planning.meta_model(plan(shape).config)
    step = 1024 * model.estimate_flops()  # FLOPs
    seven = plan(f"{shape} --total-batch-size 1024 --target-flops {7 * step}")
    assert (seven.steps, seven.batch) == (7, 1024)
    assert plan(f"{shape} --total-batch-size 1024 --target-flops {7.999 * step}").steps == 7
    with pytest.raises(InputError, match="does not pay for one step: a step of 1024 tokens takes"):
        plan(f"{shape} --total-batch-size 1024 --target-flops {0.99 * step}")

    # The batch follows from the tokens of the budget as from those of a ratio
    counts = model.parameter_counts()
    tokens = 10.5 * (counts["matrices"] + counts["lm_head"])
    paid = plan(f"{shape} --target-flops {tokens * model.estimate_flops()}")
    assert (paid.batch, paid.steps) == (plan(shape).batch, plan(shape).steps)


def test_one_flag_decides_the_length(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path))
    for other in ("--num-iterations 3", "--target-param-data-ratio 10.5"):
        with pytest.raises(InputError, match="give one of them"):
            base_train.resolve_arguments(f"--target-flops 1e12 {other}".split())
    with pytest.raises(InputError, match="--target-flops must be above 0, not -1"):
        base_train.resolve_arguments(["--target-flops", "-1"])
    # A run that has one of them goes on with another
    run_dir = tmp_path / "runs" / "begun"
    run_dir.mkdir(parents=True)
    for before, now, steps, flops in [
        ({"num_iterations": 10}, "--target-flops 1e12", None, 1e12),
        ({"target_flops": 1e12}, "--num-iterations 3", 3, None),
        ({"target_flops": 1e12}, "--target-param-data-ratio 2", None, None),
        ({"target_flops": 1e12}, "--seed 0", None, 1e12),
    ]:
        write_json(run_dir / "settings.json", {"options": before})
        args, _, _ = base_train.resolve_arguments(f"--run begun {now}".split())
        assert (args.num_iterations, args.target_flops) == (steps, flops)


def test_rows_that_were_measured_are_taken():
    args = base_train.parse_arguments("--depth 2 --max-seq-len 32".split(), {})
    measured = {"device_batch_size": 4}
    assert planning.plan_run(args, 256, CPU, measured).rows == 4
    measured = {}
    assert planning.plan_run(args, 256, CPU, measured).rows == measured["device_batch_size"]


def test_a_batch_that_does_not_divide_is_named_with_its_neighbours():
    with pytest.raises(InputError, match="not a multiple of 64 .2 rows x 32 tokens x 1.*: 960 or 1024,"):
        plan("--depth 2 --max-seq-len 32 --device-batch-size 2 --total-batch-size 1000")


def test_times_are_said_as_people_do():
    assert [planning.duration(seconds) for seconds in (59.6, 200, 7500)] == ["1m00s", "3m20s", "2h05m"]


def test_a_run_is_planned_and_kept_without_any_script():
    code = (
        "import sys, nanomuon.launch, nanomuon.planning, nanomuon.run_folder, nanomuon.finished_run\n"
        "sys.exit(any(name.split('.')[0] == 'scripts' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
