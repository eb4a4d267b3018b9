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


def training_row(step):
    return {
        "step": step,
        "tokens": 4096 * step,
        "train_loss": 9 * math.exp(-step / 10) + 2,
        "lr_multiplier": 1 - step / 100,
        "step_ms": 500.0,
        "tokens_per_second": 8192.0,
    }


def write_run(path, steps=100):
    log = report.MetricsLog(path)
    for step in range(1, steps + 1):
        log.log(training_row(step))
        if step % 25 == 0:
            log.log({"step": step, "tokens": 4096 * step, "val_bpb": 2 - step / 100})
    log.close()


def test_rows_come_back_in_order_and_by_kind(tmp_path):
    write_run(tmp_path / "metrics.jsonl", 50)
    training, evaluation = report.read_metrics(tmp_path / "metrics.jsonl")
    assert training == [training_row(step) for step in range(1, 51)]
    assert [(row["step"], row["val_bpb"]) for row in evaluation] == [(25, 1.75), (50, 1.5)]


def test_a_row_is_on_disk_when_log_returns(tmp_path):
    code = f"""if True:
        import os
        from pathlib import Path
        from nanomuon.report import MetricsLog
        log = MetricsLog(Path({str(tmp_path / "metrics.jsonl")!r}))
        for step in range(3):
            log.log({{"step": step}})
        os.kill(os.getpid(), 9)"""
    subprocess.run([sys.executable, "-c", code])
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 0}, {"step": 1}, {"step": 2}]


@pytest.mark.parametrize("torn", ["", '{"step": 6, "tra', "12", '{"tokens": 3}'])
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
    found = [(row["step"], row.get("train_loss"), row.get("val_bpb")) for row in rows_of(path)]
    assert found == [
        (1, 1, None),
        (1, None, 1),
        (2, 1, None),
        (2, None, 1),
        (3, 1, None),
        (3, None, 2),
        (4, 2, None),
    ]
    report.MetricsLog(path)
    assert path.read_text() == ""


def test_numbers_that_json_lacks_are_null(tmp_path):
    log = report.MetricsLog(tmp_path / "metrics.jsonl")
    log.log({"step": 1, "train_loss": math.nan, "grad_norm": math.inf, "note": "x", "lr_multiplier": 0.5})
    (row,) = rows_of(tmp_path / "metrics.jsonl")
    assert row == {"step": 1, "train_loss": None, "grad_norm": None, "note": "x", "lr_multiplier": 0.5}


def test_wandb_offline_needs_no_network(tmp_path, monkeypatch):
    for key, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "https_proxy": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(key, value)
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "wandb_home"))
    log = report.MetricsLog(
        tmp_path / "metrics.jsonl", wandb={"project": "test", "name": "r", "config": {"depth": 4}}
    )
    log.log({"step": 1, "train_loss": 2.0})
    log.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1, "train_loss": 2.0}]


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("steps", [0, 1, 100])
def test_the_picture_is_drawn_for_runs_of_any_length(tmp_path, steps):
    write_run(tmp_path / "metrics.jsonl", steps)
    report.plot_run(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert png_size(tmp_path / "loss.png") == (1800, 1120)


def test_the_name_of_a_run_is_no_formula(tmp_path):
    folder = tmp_path / "a$^$b"
    folder.mkdir()
    write_run(folder / "metrics.jsonl", 3)
    report.plot_run(folder / "metrics.jsonl", folder / "loss.png")
    assert png_size(folder / "loss.png") == (1800, 1120)


@pytest.mark.parametrize("on_the_way", [False, True])
def test_a_line_joins_evaluations_of_the_same_text_only(tmp_path, monkeypatch, on_the_way):
    """All of the set may be harder than its beginning: joined, the run would seem to diverge at its end."""
    log = report.MetricsLog(tmp_path / "metrics.jsonl")
    values = [1.5, 1.2, 1.1, 1.3]
    for step, value in enumerate(values, 1):
        whole_set = on_the_way or step == len(values)
        log.log({"step": step, "tokens": step, "val_bpb": value, "whole_set": whole_set})
    log.close()
    figures = []
    monkeypatch.setattr(report, "save_figure", lambda figure, image: figures.append(figure))
    report.plot_run(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    axis = figures[0].axes[1]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axis.lines if len(line.get_ydata())}
    if on_the_way:
        assert drawn == {"whole set": values}
    else:
        assert drawn == {"first part of the set": values[:-1], "whole set": values[-1:]}
        legend = [text.get_text() for text in axis.get_legend().get_texts()]
        assert legend == ["first part of the set", "whole set"]


def test_gaps_in_the_loss_are_no_obstacle(tmp_path):
    log = report.MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 200):
        log.log({**training_row(step), "train_loss": math.nan if step % 3 else 2.0})
    report.plot_run(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert png_size(tmp_path / "loss.png") == (1800, 1120)


def test_the_smoothed_curve_follows_a_line_and_averages_noise():
    line = [float(value) for value in range(300)]
    smooth = report._smooth(line)
    assert smooth[:290] == pytest.approx(line[:290])  # no lag
    noise = [2 + (-1) ** step for step in range(300)]
    assert max(abs(value - 2) for value in report._smooth(noise)[10:]) < 0.2
    assert report._smooth([math.nan, 1.0])[1] == 1.0


def test_the_report_says_what_happened(tmp_path):
    run_dir = tmp_path / "my-run"
    write_run(run_dir / "metrics.jsonl")
    samples = ["def f():\n    return 1", "```\nfenced\n````python"]
    settings = {"options": {"depth": 4, "window_pattern": "S|L", "vocab_size": None}}
    settings |= {"trained_on": {"revision": "r1"}, "trained_with": {"threads": 2}}
    (run_dir / "settings.json").write_text(json.dumps(settings))
    core = "mean over 1 task", {"easy": {"accuracy": 0.75}}
    report.write_report(run_dir, {"val_bpb": 1.234, "steps": 100}, samples, core)
    text = (run_dir / "report.md").read_text()
    for part in (
        "# my-run",
        report.machine_description(),
        "| val_bpb | 1.234 |",
        "](loss.png)",
        "| depth | 4 |",
        "S\\|L",
        "| revision | r1 |",
        "| threads | 2 |",
        "mean over 1 task",
        "| easy | 0.7500 |",
        "--run my-run",
    ):
        assert part in text
    assert "\n```\n" + samples[0] + "\n```\n" in text
    assert "\n`````\n" + samples[1] + "\n`````\n" in text  # longer than any fence inside
    assert "vocab_size" not in text and (run_dir / "loss.png").exists()


def test_the_machine_is_named():
    text = report.machine_description()
    assert (
        "torch 2." in text
        and "GB" in text
        and f"Python {sys.version.split()[0]}" in text
        and "\n" not in text
    )
