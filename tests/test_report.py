"""The results of a run: rows that survive kills, a picture, a report that says what happened."""

import pytest
import torch

from nanomuon import report
from nanomuon.runtime import Runtime
from tests.mistakes import refused
from tests.training import little_space

RUNTIME = Runtime(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("line", ["{}", "[1]", "null", '{"step": "3", "tokens": 9}', "torn", "[" * 100_000])
def test_a_line_that_is_not_a_row_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line}\n")
    with refused(f"{path} line 1 cannot be read .*: remove that line"):
        report.MetricsLog(tmp_path, resume_step=50)
    assert path.read_text() == f"{line}\n"


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    log = report.MetricsLog(tmp_path)
    with little_space(9), pytest.raises(OSError, match="File too large: '.*/metrics.jsonl'"):
        log.log({"step": 1000})


def test_the_report_says_what_happened(tmp_path):
    run_dir = tmp_path / "my-run-a$^$b"  # not to be drawn as a formula
    log = report.MetricsLog(run_dir)
    for step in range(1, 101):
        log.log({"step": step, "tokens": step, "train_loss": float("nan") if step < 50 else 2.0})
        if step % 25 == 0:
            log.log({"step": step, "tokens": step, "val_bpb": 2 - step / 100, "whole_set": step == 100})
    log.close()
    core = {"core": 0.5, "mean_centered": 0.5, "tasks": {"easy": {"accuracy": 0.75}}}
    texts = ["def f():\n    return 1", "```\nfenced"]
    report.write_report(run_dir, "Depth 4", {"val_bpb": 1.234}, texts, core)
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    text, machine = (run_dir / "report.md").read_text(), report.machine_description()
    assert "torch 2." in machine and "\n" not in machine
    parts = f"# my-run-a$^$b;{machine};| val_bpb | 1.234 |;](loss.png);CORE: 0.5000;| easy | 0.7500 "
    parts += ";--run 'my-run-a$^$b'\n;\n\n    def f():\n        return 1\n\n"
    parts += ";\n\n    ```\n    fenced\n"
    assert [part for part in parts.split(";") if part not in text] == []


def test_the_summary_is_of_the_last_20_losses_and_of_typical_steps():
    first = {"train_loss": 9.0, "step_ms": 1000, "tokens_per_second": 10, "optimizer_ms": 0}
    typical = {"step_ms": 100, "tokens_per_second": 90, "optimizer_ms": 1.26}
    rows = [first, first, *({**typical, "train_loss": loss} for loss in (*range(1, 20), None))]
    summary = report.summarize(rows, 1.23456, 22, 5632, RUNTIME)
    assert 10 < summary.pop("peak_memory_mb") < 100_000
    assert summary == {
        "val_bpb": 1.2346,
        "train_loss": 10,
        "steps": 22,
        "tokens": 5632,
        "seconds": 4.0,
        "tokens_per_second": 90,
        "optimizer_ms": 1.3,
    }


def test_a_run_whose_metrics_were_deleted_has_a_report_without_them(tmp_path):
    report.MetricsLog(tmp_path).close()
    rows, _ = report.read_metrics(tmp_path / "metrics.jsonl")
    summary = report.summarize(rows, 1.2, 22, 5632, RUNTIME)
    report.write_report(tmp_path, "Depth 4", summary, [])
    text = (tmp_path / "report.md").read_text()
    assert "| val_bpb        | 1.2 " in text and "| seconds" not in text
