"""docs/leaderboard.md from the kept results of races, some of them damaged."""

import json
import math

import pytest

from nanomuon.runtime import InputError
from scripts.laboratory import kept_race
from scripts.laboratory.leaderboard import write_leaderboard

MODEL = dict(vocab_size=65, seq_len=16, depth=1, width=32, heads=2, kv_heads=2)
SETUP = dict(name="shakespeare", steps=400, unit="nats per character", rows=12, model=MODEL, dtype="float32")
LUCK = [0.0, 0.004, -0.003]
NOISE = [0.0004, -0.0003, 0.0002, 0.0001]
MACHINES = ["1 x processor, 2 GB", "2 x other, 4 GB"]


def kept_run(contender, seed, score, steps=400, stage="race", **more):
    name = "".join(letter if letter.isalnum() else "_" for letter in contender)
    file = f"{name}-seed{seed}.json"
    if stage == "sweep":
        file = f"sweep/{steps}/{file}"
    run = dict(file=file, stage=stage, steps=steps, contender=contender, seed=seed, score=score)
    run |= dict(curve=[[steps, score, score]], step_ms=100.0, optimizer_ms=20.0, initial=f"i{seed}", rows="r")
    return run | dict(machine=MACHINES[0], commit="0123456789abcdef" + 24 * "0", clean_tree=True) | more


def race_lines(name="final", **header):
    """A race of four contenders: one better, one stopped, one diverged; and tuning runs."""
    lines = [dict(race=name, baseline="default", commands=["python -m one", "python -m two"], setup=SETUP)]
    lines[0] |= header
    slow = dict(step_ms=240.0, optimizer_ms=120.0)  # on a machine busy with other work
    for seed, luck in enumerate(LUCK):
        noise = NOISE[seed]
        lines.append(kept_run("default:matrix_lr=0.03", seed, 1.5 + luck, clean_tree=False))
        lines.append(kept_run("contenders/soap_muon.py:lr=1,c=0.2", seed, 1.45 + luck + noise, **slow))
    for seed in (0, 1):
        lines.append(kept_run("muon", seed, 1.7 + LUCK[seed] + NOISE[seed + 1], machine=MACHINES[1]))
    lines.append(kept_run("adamw", 0, math.nan))
    for seed, (steps, score) in enumerate([(100, 1.9), (100, 1.8), (200, 1.6), (200, 1.7), (400, 1.5)]):
        variant = "default:matrix_lr=0.03" if score < 1.65 else f"default:matrix_lr={seed}"
        lines.append(kept_run(variant, 1000 + seed, score, steps=steps, stage="sweep"))
    return lines


def write_lines(folder, lines, name="final"):
    races = folder / "races"
    races.mkdir(exist_ok=True)
    (races / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_page(tmp_path):
    write_lines(tmp_path, race_lines("final", title="The final", order=2))
    write_lines(tmp_path, race_lines("first", order=1), "first")
    write_lines(tmp_path, race_lines("another"), "another")
    page = tmp_path / "leaderboard.md"
    write_leaderboard(tmp_path / "races", page)
    text = page.read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## first", "## The final", "## another"]
    for name in ("first", "final", "another"):
        assert (tmp_path / f"leaderboard_{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert f"(leaderboard_{name}.png)" in text
    assert "python -m one\npython -m two" in text

    section = text.split("## The final")[1].split("## another")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    header = [cell.strip() for cell in table[0].strip("|").split("|")]
    rows = []
    for line in table[2:]:
        rows.append(dict(zip(header, (cell.strip() for cell in line.strip("|").split("|")), strict=True)))
    names = [row["contender"] for row in rows]
    assert names == ["`soap_muon (lr=1, c=0.2)`", "`default (matrix_lr=0.03)`", "`muon`", "`adamw`"]
    soap, default, muon, adamw = rows
    assert soap["nats per character"].startswith("1.4504 ±") and soap["difference"] == "-0.0499"
    # soap's steps are 1.6 of the baseline's, which gains .1 from 200 to 400 steps
    assert soap["step ms"] == "240 (1.60)" and default["step ms"] == "100" and adamw["step ms"] == ""
    estimate = -0.0499 + 0.1 / math.log(2) * math.log(1.6)
    assert soap["at equal seconds"] == f"{estimate:+.4f}" and soap["verdict"] == "better"
    assert default["verdict"] == "baseline" and default["seeds"] == "3"
    assert default["tuning"] == "5 (2.5)" and soap["tuning"] == ""
    assert default["commit"] == "0123456789ab+" and soap["commit"] == "0123456789ab"
    assert muon["seeds"] == "2" and muon["verdict"] == "worse" and muon["machine"] == "B"
    assert adamw["verdict"] == "diverged with seed 0" and adamw["seeds"] == "1"
    assert f"Machine A: {MACHINES[0]}. Machine B: {MACHINES[1]}." in section
    assert "400 steps of 192 tokens" in section and "9 runs and 5 of tuning" in section


def test_tuning_counts_for_the_variant_of_a_file_that_it_tuned(tmp_path):
    lines = [dict(race="final", baseline="default", commands=["python -m one"], setup=SETUP)]
    for seed, luck in enumerate(LUCK):
        lines.append(kept_run("default", seed, 1.5 + luck))
        lines.append(kept_run("contenders/idea.py", seed, 1.45 + luck))
        lines.append(kept_run("contenders/idea.py:plain=True,lr_scale=2", seed, 1.55 + luck))
    for lr_scale in (1, 2, 3):
        name = f"contenders/idea.py:plain=True,lr_scale={lr_scale}"
        lines.append(kept_run(name, 1000, 1.6, steps=200, stage="sweep"))
    lines.append(kept_run("contenders/idea.py:lr_scale=2", 1000, 1.6, stage="sweep"))
    write_lines(tmp_path, lines)
    page = tmp_path / "leaderboard.md"
    write_leaderboard(tmp_path / "races", page)
    rows = [line.split("|") for line in page.read_text().splitlines() if line.startswith("| ")]
    column = [cell.strip() for cell in rows[0]].index("tuning")
    tuning = {row[2].strip(): row[column].strip() for row in rows[2:]}
    assert tuning == {
        "`default`": "",
        "`idea`": "1 (1.0)",
        "`idea (plain=True, lr_scale=2)`": "3 (1.5)",
    }


def test_a_kept_race_with_little_in_it(tmp_path):
    page = tmp_path / "leaderboard.md"
    write_leaderboard(tmp_path / "races", page)
    assert "No race has been kept yet" in page.read_text()
    write_lines(tmp_path, race_lines()[:1])
    write_leaderboard(tmp_path / "races", page)
    assert "No run has been finished yet" in page.read_text()
    header, *_ = race_lines()
    write_lines(tmp_path, [header, kept_run("default", 0, math.inf), kept_run("muon", 0, 1.5)])
    write_leaderboard(tmp_path / "races", page)
    assert "The baseline, default, diverged or has no run." in page.read_text()
    assert not (tmp_path / "leaderboard_final.png").exists()


def test_what_a_race_keeps_is_what_the_page_reads(tmp_path):
    folder = tmp_path / "base" / "final"
    (folder / "sweep" / "200").mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps(SETUP))
    for run in race_lines()[1:8]:
        (folder / run["file"]).write_text(json.dumps(run))
    tuned = kept_run("default", 1000, 1.7, steps=200, stage="sweep")
    (folder / tuned["file"]).write_text(json.dumps(tuned))
    kept_race.keep(folder, tmp_path / "races" / "final.jsonl", "default", "python -m scripts.optim_race")
    write_leaderboard(tmp_path / "races", tmp_path / "leaderboard.md")
    text = (tmp_path / "leaderboard.md").read_text()
    assert "7 runs and 1 of tuning" in text and "`soap_muon (lr=1, c=0.2)`" in text


def damage(lines, what):
    if what == "a line that is cut":
        return json.dumps(lines[1])[:40]
    if what == "no seed":
        del lines[1]["seed"]
    elif what == "text for a score":
        lines[1]["score"] = "1.5"
    elif what == "a wide model":
        lines[0]["setup"] = SETUP | {"model": MODEL | {"width": 1 << 30}}
    elif what == "a model that cannot be":
        lines[0]["setup"] = SETUP | {"model": MODEL | {"heads": 3}}
    elif what == "no unit":
        lines[0]["setup"] = {key: value for key, value in SETUP.items() if key != "unit"}
    elif what == "another race":
        lines[0]["race"] = "../other"
    elif what == "other steps":
        lines[1]["steps"] = 100
    elif what == "another start":
        lines[2]["initial"] = "elsewhere"
    elif what == "no time":
        lines[1]["step_ms"] = 0
    return None


@pytest.mark.parametrize(
    "what,message",
    [
        ("a line that is cut", "final.jsonl line 2: not JSON"),
        ("no seed", "final.jsonl line 2: .*has no seed"),
        ("text for a score", "final.jsonl line 2: score is '1.5', not a number"),
        ("a wide model", "final.jsonl line 1: setup.model.width is 1073741824"),
        ("a model that cannot be", "final.jsonl line 1: setup.model: width 32 must be"),
        ("no unit", "final.jsonl line 1: setup has no unit"),
        ("another race", "final.jsonl line 1: race is '../other'"),
        ("other steps", "final.jsonl, run .*: steps is 100, but the race has 400"),
        ("another start", "final.jsonl, run .*: initial or rows differ .* seed 0"),
        ("no time", "final.jsonl, run .*: step_ms is 0, not more than optimizer_ms"),
    ],
)
def test_a_damaged_file_is_one_clear_line_and_nothing_is_written(tmp_path, what, message):
    lines = race_lines()
    cut = damage(lines, what)
    write_lines(tmp_path, race_lines("before"), "before")
    write_lines(tmp_path, lines)
    if cut:
        file = tmp_path / "races" / "final.jsonl"
        kept = file.read_text().splitlines()
        kept[1] = cut
        file.write_text("\n".join(kept) + "\n")
    with pytest.raises(InputError, match=message) as error:
        write_leaderboard(tmp_path / "races", tmp_path / "leaderboard.md")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["races"]
