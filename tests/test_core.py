"""CORE: the published rule against a plain loop, tasks with known answers, damaged bundles, ranks, runs."""

import http.server
import json
import os
import random
import re
import shutil
import threading
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanomuon import core, parallel
from nanomuon.gpt import GPTConfig
from nanomuon.runtime import Runtime, read_json
from nanomuon.tokenizer import Tokenizer
from scripts import base_eval, base_train
from tests.mistakes import refused
from tests.test_gpt import build
from tests.texts import BYTES
from tests.training import rows, train
from tests.worlds import run_world

WORDS = ["red", "green", "blue", "dark blue", "light", "house", "a", "is", "of the", "12", "7"]


def write_bundle(folder, tasks):
    """tasks: {label: (kind, shots, delimiter or None, baseline in percent, records)}. Files of items
    begin with an empty line.
    """
    import yaml

    listing, meta = [], ["Eval Task,Task Type,Random baseline"]
    for label, (kind, shots, delimiter, baseline, records) in tasks.items():
        entry = {"label": label, "dataset_uri": f"some/{label}.jsonl", "num_fewshot": [shots]}
        entry["icl_task_type"] = kind
        if delimiter is not None:
            entry["continuation_delimiter"] = delimiter
        listing.append(entry)
        meta.append(f"{label},x,{baseline}")
        file = folder / "eval_data" / "some" / f"{label}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"\n{json.dumps(record)}" for record in records))
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": listing}))
    (folder / "eval_meta_data.csv").write_text("\n".join(meta) + "\n")
    return folder


def phrase(rng, most):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def records_of(kind, count, seed=0, most=8):
    """Made-up items: equal choices, prefixes of other choices, empty ones, short and long contexts."""
    rng, records = random.Random(seed), []
    for _ in range(count):
        options = [phrase(rng, 3) for _ in range(rng.choice([2, 4]))]
        gold = rng.randrange(len(options))
        if kind == "multiple_choice":
            options[rng.randrange(len(options))] = rng.choice(["", options[0], options[-1] + " house", "12"])
            records.append({"query": phrase(rng, most), "choices": options, "gold": gold})
        elif kind == "schema":
            start = phrase(rng, most)
            contexts = [f"{start} {option}" for option in options]
            records.append({"context_options": contexts, "continuation": phrase(rng, 3), "gold": gold})
        else:
            records.append({"context": f" {phrase(rng, most)} \n", "continuation": phrase(rng, 2)})
    return records


TASKS = {
    "choose": ("multiple_choice", 0, None, 25, records_of("multiple_choice", 6, most=4)),
    "resolve": ("schema", 1, None, 25, records_of("schema", 5, most=4)),
    "go on": ("language_modeling", 0, ":", 25, records_of("language_modeling", 4, most=4)),
}


@torch.no_grad()
def plain_answers(model, tokenizer, kind, records, shots, delimiter, limit):
    """The published rule, prompt by prompt: [(mean loss of each choice, whether the answer is right)]."""
    records = list(records)
    random.Random(1337).shuffle(records)
    records = records[:limit]

    def texts(record):
        if kind == "multiple_choice":
            return [record["query"] + delimiter + choice for choice in record["choices"]]
        if kind == "schema":
            return [text + delimiter + record["continuation"] for text in record["context_options"]]
        return [record["context"].strip() + delimiter + record["continuation"]]

    answers = []
    for i, record in enumerate(records):
        others = records[:i] + records[i + 1 :]
        shown = ""
        for other in random.Random(1234 + i).sample(others, min(shots, len(others))):
            shown += texts(other)[other.get("gold", 0)] + "\n\n"
        prompts = [[tokenizer.bos_id, *tokenizer.encode(shown + text)] for text in texts(record)]
        if kind == "multiple_choice":
            scored = [len(prompt) - len(os.path.commonprefix(prompts)) for prompt in prompts]
        elif kind == "schema":
            scored = [len(os.path.commonprefix([prompt[::-1] for prompt in prompts]))] * len(prompts)
        else:
            before = (shown + record["context"].strip() + delimiter).strip()
            scored = [len(prompts[0]) - 1 - len(tokenizer.encode(before))]
        means = []
        for prompt, count in zip(prompts, scored, strict=True):
            tokens = torch.tensor(prompt[-model.config.seq_len :])
            first = len(tokens) - count
            logits, targets = model(tokens[None])[0, first - 1 : -1].double(), tokens[first:]
            means.append(float(F.cross_entropy(logits, targets)))  # NaN without a scored token
        if kind == "language_modeling":
            right = torch.equal(logits.argmax(-1), targets)
        else:
            right = means.index(min(means)) == record["gold"]
        answers.append((means, right))
    return answers


@pytest.fixture(scope="module")
def merging():
    """A tokenizer whose tokens span the spaces between words."""
    rng = random.Random(1)
    return Tokenizer.train((phrase(rng, 40) for _ in range(50)), 290)


@pytest.mark.parametrize("kind", ("multiple_choice", "schema", "language_modeling"))
@pytest.mark.parametrize(
    "shots, delimiter, context, pattern",
    [
        (0, None, 128, "L"),
        (3, "\nAnswer: ", 128, "SL"),
        (3, "\nAnswer: ", 40, "S"),  # most prompts are cut
        (50, None, 128, "L"),  # fewer items than shots
    ],
)
def test_the_published_rule(tmp_path, merging, kind, shots, delimiter, context, pattern, monkeypatch):
    records = records_of(kind, 14)
    bundle = write_bundle(tmp_path, {"made-up": (kind, shots, delimiter, 20, records)})
    model = build(vocab_size=290, seq_len=context, window_pattern=pattern, depth=2)
    (task,) = core.open_bundle(str(bundle))
    sizes, found, is_correct = [], [], core.is_correct

    def noted(task, item, rows):
        answer = is_correct(task, item, rows)
        found.append((pytest.approx([row.mean_loss for row in rows], abs=1e-5, nan_ok=True), answer))
        return answer

    monkeypatch.setattr(core, "is_correct", noted)
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].numel()))
    answers = core.answer_task(model, merging, task, most_items=12, most_tokens=600)
    assert max(sizes) <= 600
    expected = plain_answers(model, merging, kind, records, shots, delimiter or " ", limit=12)
    assert expected == found and answers == [right for _, right in expected]


def test_a_batch_has_no_more_logits_at_once_than_a_training_step():
    rows = [core.Row([0] * count, start) for count in (2, 9, 10, 90) for start in (1, count - 1)] * 9
    batches = list(core.make_batches(rows, 160))
    for batch in batches:
        assert len(batch) == 1 or sum(len(row.tokens) - row.start for row in batch) <= 160 / 8
    assert max(map(len, batches)) > 9


def test_only_the_mean_over_all_tasks_is_called_core(tmp_path, capsys):
    bundle = write_bundle(tmp_path, dict.fromkeys(core.CORE_TASKS, TASKS["resolve"]))
    model, tasks = build(vocab_size=257), core.open_bundle(str(bundle))
    for given, name in ((tasks, "CORE"), (tasks[:2], "mean over 2 tasks (not CORE)")):
        results = core.evaluate(model, BYTES, given, None, 512)
        mean = (results["tasks"][given[0].label]["accuracy"] - 0.25) / 0.75
        assert results["mean_centered"] == pytest.approx(mean)
        assert results["core"] == (results["mean_centered"] if name == "CORE" else None)
        assert f"\n{name}: {mean:.4f}" in capsys.readouterr().out


# Damaged bundles


CHOOSE = "eval_data/some/choose.jsonl"


@pytest.mark.parametrize(
    "name, before, after, complaint",
    [
        (CHOOSE, "{", "", "choose.jsonl line 2: JSONDecodeError: "),
        (CHOOSE, "{", "[" * 100_000, "choose.jsonl line 2: .*recursion"),
        (CHOOSE, '"gold": ', '"gold": -', "choose.jsonl line [0-9]+: .*gold is -[1-3]"),
        (CHOOSE, '"gold": ', '"gold": 1.0, "not": ', "choose.jsonl line 2: .*gold is 1.0"),
        (CHOOSE, '"query": "', '"query": "\\ud800', "choose.jsonl line 2: .*surrogates"),
        (CHOOSE, "query", "question", "choose.jsonl line 2: KeyError: 'query'"),
        (CHOOSE, "gold", "answer", "choose.jsonl line 2: KeyError: 'gold'"),
        ("core.yaml", "icl_tasks", "tasks", "core.yaml: KeyError: 'icl_tasks'"),
        ("core.yaml", "icl_tasks:", "icl_tasks: [", "core.yaml: ParserError: while parsing"),
        ("core.yaml", "some/resolve.jsonl", "some/absent.jsonl", "absent.jsonl: .*No such file"),
        ("core.yaml", "fewshot:\n  - ", "fewshot:\n  - -", "num_fewshot of .* not a number of examples"),
        ("eval_meta_data.csv", "25", "a lot", "meta_data.csv: ValueError: could not convert"),
        ("eval_meta_data.csv", "25", "100", "the random baseline of .* is 100.0, not a percentage below 100"),
    ],
)
def test_what_is_wrong_in_a_bundle_is_named(tmp_path, name, before, after, complaint):
    file = write_bundle(tmp_path, TASKS) / name
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    with refused(complaint):
        core.open_bundle(str(tmp_path))


def test_a_bundle_in_the_home_of_an_unknown_user_is_refused():
    with refused("no bundle for CORE at ~no-such-user/x: give a folder"):
        core.open_bundle("~no-such-user/x")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a server for the files in tmp_path, which also contains the base folder."""
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("root, top", [("", "bundle"), ("bundle", ".")])
def test_a_zip_is_read_like_its_folder_and_fetched_once(tmp_path, server, root, top):
    expected = core.open_bundle(str(write_bundle(tmp_path / "bundle", TASKS)))
    archive = shutil.make_archive(f"{tmp_path}/b", "zip", tmp_path / root, top)
    with zipfile.ZipFile(archive, "a") as more:
        more.writestr("../out.jsonl", "")
    assert core.open_bundle(archive) == core.open_bundle(f"{server}/b.zip") == expected
    os.remove(archive)
    assert core.open_bundle(f"{server}/b.zip") == expected
    assert not [*tmp_path.rglob("out.*")]


def test_a_damaged_zip_leaves_nothing(tmp_path, server):
    archive = Path(shutil.make_archive(f"{tmp_path}/b", "zip", write_bundle(tmp_path / "bundle", TASKS)))
    content = archive.read_bytes()
    begin = content.index(b"core.yaml") + len("core.yaml")  # of its compressed bytes
    for damaged, complaint in (
        (content[:begin], "b.zip: BadZipFile: File is not a zip file"),
        (content[:begin] + bytes(80) + content[begin + 80 :], "core.yaml: error: Error -3 while decompr"),
    ):
        archive.write_bytes(damaged)
        with refused(complaint):
            core.open_bundle(str(archive))
        for address in (f"{server}/b.zip", f"{server}/nothing", "http://["):
            with pytest.raises(core.Unreachable, match=re.escape(address)):
                core.open_bundle(address)
    assert not [*(tmp_path / "base").rglob("*.zip")]


# Ranks


def results_of_a_rank(group, folder, layout):
    """The results on one of 4 ranks, with the model whole or cut by FSDP2 and tensor parallelism; or those of
    one process.
    """
    rank, ranks, mesh = (dist.get_rank(), 4, None) if group else (0, 1, None)
    if layout == "in pieces":
        mesh = parallel.device_mesh("cpu", 2, 2)
        rank, ranks = rank // 2, 2
    runtime = Runtime(torch.device("cpu"), torch.float32)
    config = GPTConfig(257, 96, depth=2, width=32, heads=4, kv_heads=2, window_pattern="SL")
    model = parallel.build_model(config, runtime, 0, mesh, fsdp=mesh is not None)
    # So that every weight has an effect, which is the same on any number of ranks
    for parameter in model.parameters():
        whole = torch.arange(parameter.numel(), dtype=torch.float32).sin().view(parameter.shape) / 8
        parallel.fill_shard(parameter.data, whole)
    tasks = core.open_bundle(folder)
    return core.evaluate(model, BYTES, tasks, None, 500, rank, ranks)


def test_any_number_of_ranks_finds_the_same_numbers(tmp_path, capsys):
    """Some ranks have no item of the second task, but the others need their shards of the model."""
    tasks = {
        "choose": ("multiple_choice", 0, None, 10, records_of("multiple_choice", 37, most=4)),
        "resolve": ("schema", 1, None, 10, records_of("schema", 2, most=4)),
    }
    bundle = str(write_bundle(tmp_path, tasks))
    expected = results_of_a_rank(None, bundle, "whole")
    assert 0 < expected["tasks"]["choose"]["accuracy"] < 1
    for layout in ("whole", "in pieces"):
        for found in run_world(4, results_of_a_rank, bundle, layout):
            assert found == expected, layout


# Runs


def test_a_run_is_evaluated_during_training_at_its_end_and_again(base, environment, capsys):
    bundle = str(write_bundle(base / "bundle", TASKS))
    options = ["--core-bundle", bundle, "--core-items", "4"]
    train(base, "core", 5, *options, "--core-every", "2")
    run = base / "runs" / "core"
    found = {row["step"]: row["mean_centered"] for row in rows(base, "core") if "core" in row}
    results = read_json(run / "core.json")
    assert list(found) == [2, 4, 5] and found[5] == results["mean_centered"] and results["step"] == 5
    assert "## CORE\n\nmean over 3 tasks" in (run / "report.md").read_text()

    capsys.readouterr()
    base_eval.main(["--run", "core", "--eval", "core", *options])
    assert read_json(run / "core.json") == results
    assert "val_bpb" not in capsys.readouterr().out

    shutil.rmtree(bundle)
    again = ["--run", "core", "--num-iterations", "6"]
    with refused("no bundle for CORE at .*bundle: give a folder"):
        base_train.main(again)
    assert base_train.main([*again, "--core-bundle", "none"]) == 0


def test_a_run_goes_on_without_a_bundle_that_cannot_be_fetched(base, environment, capsys):
    address = "http://127.0.0.1:9/b.zip"
    train(base, "unreachable", 2, "--core-bundle", address)
    assert f"warning: no bundle for CORE from {address}: " in capsys.readouterr().err
    assert not (base / "runs" / "unreachable" / "core.json").exists()


def test_a_place_without_a_bundle_ends_a_run_before_it_starts(base, environment, monkeypatch):
    monkeypatch.chdir(base)
    for place in ("nowhere", "texts"):  # as an absolute path, which every folder finds
        with refused(f"{base}/{place}"):
            train(base, "refused", 2, "--core-bundle", place)
    assert not (base / "runs" / "refused").exists()
