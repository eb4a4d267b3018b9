"""What a run leaves for people: rows that survive kills, a picture, a report that says what happened."""

import json
import math
import struct
import subprocess
import sys

import pytest

from nanomuon import report


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_run(path, steps, loss=lambda step: 9 * math.exp(-step / 10) + 2):
    log = report.MetricsLog(path)
    for step in range(1, steps + 1):
        log.log({"step": step, "tokens": 4096 * step, "train_loss": loss(step)})
        if step % 25 == 0:
            log.log(
                {"step": step, "tokens": 4096 * step, "val_bpb": 2 - step / 100, "whole_set": step == 100}
            )
    log.close()


def test_a_row_is_on_disk_when_log_returns(tmp_path):
    code = f"""if True:
        import os
        from pathlib import Path
        from nanomuon.report import MetricsLog
        log = MetricsLog(Path({str(tmp_path / "metrics.jsonl")!r}))
        for step in range(3):
            log.log({{"step": step, "train_loss": float("nan")}})
        os.kill(os.getpid(), 9)"""
    subprocess.run([sys.executable, "-c", code])
    # JSON has no NaN
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": step, "train_loss": None} for step in range(3)]


@pytest.mark.parametrize("torn", ["", '{"step": 6, "tra'])
def test_resuming_leaves_each_step_once(tmp_path, torn):
    path = tmp_path / "runs" / "metrics.jsonl"
    log = report.MetricsLog(path)
    for step in range(1, 6):
        log.log({"step": step, "tokens": 0, "train_loss": 1})
        log.log({"step": step, "tokens": 0, "val_bpb": 1})
    log.close()
    with open(path, "a") as file:
        file.write(torn)
    log = report.MetricsLog(path, resume_step=3)  # whose evaluation is made again
    log.log({"step": 3, "tokens": 0, "val_bpb": 2})
    log.log({"step": 4, "tokens": 0, "train_loss": 2})
    training, evaluation = report.read_metrics(path)
    assert [(row["step"], row["train_loss"]) for row in training] == [(1, 1), (2, 1), (3, 1), (4, 2)]
    assert [(row["step"], row["val_bpb"]) for row in evaluation] == [(1, 1), (2, 1), (3, 2)]
    report.MetricsLog(path)
    assert path.read_text() == ""


@pytest.mark.parametrize("steps", [0, 1, 100])
@pytest.mark.parametrize("loss", [2.0, math.nan])
def test_the_picture_is_drawn_for_runs_of_any_length(tmp_path, steps, loss):
    folder = tmp_path / "a$^$b"  # no formula
    write_run(folder / "metrics.jsonl", steps, lambda step: loss)
    report.plot_run(folder / "metrics.jsonl", folder / "loss.png")
    data = (folder / "loss.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (1800, 720)


def test_a_line_joins_evaluations_of_the_same_text_only(tmp_path, monkeypatch):
    """All of the set may be harder than its beginning: joined, the run would seem to diverge at its end."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    write_run(tmp_path / "metrics.jsonl", 100)
    report.plot_run(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    drawn = {line.get_label(): list(line.get_ydata()) for line in figures[0].axes[1].lines}
    assert drawn == {"first part of the set": [1.75, 1.5, 1.25], "whole set": [1.0]}


def test_the_report_says_what_happened(tmp_path):
    run_dir = tmp_path / "my-run"
    write_run(run_dir / "metrics.jsonl", 100)
    samples = ["def f():\n    return 1", "```\nfenced\n````python"]
    settings = {"options": {"depth": 4, "window_pattern": "S|L", "vocab_size": None}}
    settings |= {"trained_on": {"revision": "r1"}, "trained_with": {"threads": 2}}
    (run_dir / "settings.json").write_text(json.dumps(settings))
    core = "mean over 1 task", {"easy": {"accuracy": 0.75}}
    report.write_report(run_dir, {"val_bpb": 1.234, "steps": 100}, samples, core)
    text = (run_dir / "report.md").read_text()
    machine = report.machine_description()
    assert "torch 2." in machine and "GB" in machine and "\n" not in machine
    parts = f"# my-run;{machine};| val_bpb | 1.234 |;](loss.png);| depth | 4 |;S\\|L;| revision | r1 |"
    parts += ";| threads | 2 |;mean over 1 task;| easy | 0.7500 |;--run my-run"
    assert [part for part in parts.split(";") if part not in text] == []
    assert "\n```\n" + samples[0] + "\n```\n" in text
    assert "\n`````\n" + samples[1] + "\n`````\n" in text  # longer than any fence inside
    assert "vocab_size" not in text and (run_dir / "loss.png").exists()
