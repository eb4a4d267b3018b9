"""CORE: the published rule against a plain loop, tasks whose answers are known, bundles of strangers, ranks,
runs.
"""

import http.server
import io
import json
import math
import random
import threading
import zipfile
from functools import partial

import pytest
import torch
import torch.distributed as dist

from nanomuon import core, parallel
from nanomuon.gpt import GPTConfig
from nanomuon.runtime import InputError, Runtime
from nanomuon.tokenizer import Tokenizer
from scripts import base_eval, base_train
from tests.test_gpt import build
from tests.training import arguments
from tests.worlds import run_world

BYTES = Tokenizer([bytes([value]) for value in range(256)])  # a token a byte
WORDS = ["red", "green", "blue", "dark blue", "light", "house", "a", "is", "of the", "12", "7"]


def write_bundle(folder, tasks):
    """tasks: {label: (kind, shots, delimiter or None, baseline in percent, records)}"""
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
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": listing}))
    (folder / "eval_meta_data.csv").write_text("\n".join(meta) + "\n")
    return folder


def phrase(rng, most):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def records_of(kind, count, seed=0, most=8):
    """Made-up items: equal choices, choices that others begin with, empty ones, short and long contexts."""
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


def plain_answers(model, tokenizer, kind, records, shots, delimiter, limit):
    """The published rule, a token at a time: (mean loss of each choice, whether the answer is right)."""
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
        shortest = min(map(len, prompts))
        if kind == "multiple_choice":
            same = 0
            while same < shortest and len({prompt[same] for prompt in prompts}) == 1:
                same += 1
            starts = [same] * len(prompts)
        elif kind == "schema":
            same = 0
            while same < shortest and len({prompt[-1 - same] for prompt in prompts}) == 1:
                same += 1
            starts = [len(prompt) - same for prompt in prompts]
        else:
            before = (shown + record["context"].strip() + delimiter).strip()
            before = [tokenizer.bos_id, *tokenizer.encode(before)]
            assert prompts[0][: len(before)] == before
            starts = [len(before)]
        means, likeliest = [], True
        for prompt, start in zip(prompts, starts, strict=True):
            cut = max(0, len(prompt) - model.config.seq_len)
            prompt, start = prompt[cut:], start - cut
            with torch.no_grad():
                logprobs = model(torch.tensor([prompt]))[0].double().log_softmax(-1)
            losses = []
            for position in range(start, len(prompt)):
                losses.append(-float(logprobs[position - 1, prompt[position]]))
                likeliest &= int(logprobs[position - 1].argmax()) == prompt[position]
            means.append(sum(losses) / len(losses) if losses else math.nan)
        if kind == "language_modeling":
            right = likeliest
        else:
            right = means.index(min(means)) == record["gold"]
        answers.append((means, right))
    return answers


@pytest.fixture(scope="module")
def merging():
    """A tokenizer whose tokens reach over the spaces between words."""
    rng = random.Random(1)
    return Tokenizer.train((phrase(rng, 40) for _ in range(50)), 290)


@pytest.mark.parametrize("kind", core.KINDS)
@pytest.mark.parametrize(
    "shots, delimiter, context, pattern, fields",
    [
        (0, " ", 128, "L", {}),
        (3, "\nAnswer: ", 128, "SL", {}),
        (3, "\nAnswer: ", 40, "S", {}),  # most prompts are cut
        (50, " ", 128, "L", {"experts": 4}),  # fewer items than shots
    ],
)
def test_the_published_rule(tmp_path, merging, kind, shots, delimiter, context, pattern, fields):
    records = records_of(kind, 14)
    bundle = write_bundle(tmp_path, {"made-up": (kind, shots, delimiter, 0, records)})
    model = build(vocab_size=290, seq_len=context, window_pattern=pattern, depth=2, **fields)
    (task,) = core.open_bundle(str(bundle))
    answers = core.answer_task(model, merging, task, most_items=12, most_tokens=600)
    expected = plain_answers(model, merging, kind, records, shots, delimiter, limit=12)
    assert len(answers) == 12
    for answer, (means, right) in zip(answers, expected, strict=True):
        assert answer.mean_losses == pytest.approx(means, abs=1e-5, nan_ok=True)
        assert answer.correct == right


def test_what_choices_share_is_read_once_and_only_what_is_scored_reaches_the_head(tmp_path, merging):
    records = records_of("multiple_choice", 12)
    bundle = write_bundle(tmp_path, {"made-up": ("multiple_choice", 5, " ", 0, records)})
    model = build(vocab_size=290, seq_len=256, depth=1)
    (task,) = core.open_bundle(str(bundle))
    sizes, heads = [], []
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].numel()))
    model.lm_head.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0].shape[0]))
    core.answer_task(model, merging, task, None, most_tokens=4096)
    items = core.kept_items(task, None)
    rows = {row for number in range(12) for row in core.ask(task, items, number, merging, 256)}
    assert sum(sizes) < 0.6 * sum(len(row.tokens) for row in rows)
    assert sum(row.shared == 0 for row in rows) == 2  # those of items whose choices are all equal
    assert sum(heads) == sum(len(row.tokens) - row.start for row in rows)
    batches = list(core.make_batches(rows, 600, 30))
    assert sum(len(batch) for batch in batches) == len(rows) > 2 * len(batches)
    for batch in batches:
        assert sum(len(row.tokens) - row.start for row in batch) <= 30
        assert len(batch) * (batch[-1].shared + max(len(row.tokens) - row.shared for row in batch)) <= 600


def even_model(vocab_size=257, **fields):
    """Thinks even tokens likelier than odd ones, b the likeliest, whatever came before, to the last bit."""
    model = build(vocab_size=vocab_size, randomize=False, depth=1, **{"seq_len": 64, **fields})
    model.wte.weight.data.fill_(1)
    head = model.lm_head.weight.data.zero_()
    head[::2, 0] = 3  # only one channel: a sum of one product does not depend on its order
    head[ord("b"), 0] = 4
    return model


KNOWN = {
    # Even letters are b d f h. The second of equals is not taken; "" has no token of its own and is not taken
    # but as the first choice
    "choose": (
        "multiple_choice",
        0,
        None,
        50,
        [
            {"query": "q", "choices": ["ace", "ddh"], "gold": 1},
            {"query": "q", "choices": ["ddh", "ace", "add"], "gold": 0},
            {"query": "q", "choices": ["ace", "hfd", "dfh"], "gold": 1},
            {"query": "q", "choices": ["ace", ""], "gold": 0},
            {"query": "q", "choices": ["", "ddh"], "gold": 0},
            {"query": "q", "choices": ["aa", "hh", "hh"], "gold": 2},  # wrong
            {"query": "q", "choices": ["hac", "d"], "gold": 0},  # wrong: the mean counts, not the sum
            {"query": "q", "choices": ["d", "dd"], "gold": 1},  # wrong: d wins as the first
        ],
    ),
    # What comes before makes no difference to this model: all are equal, and the first is taken
    "resolve": (
        "schema",
        0,
        None,
        25,
        [{"context_options": ["one", "three", "ab"], "continuation": "so", "gold": i % 2} for i in range(6)],
    ),
    "go on": (
        "language_modeling",
        1,
        ":",
        0,
        [
            {"context": "q", "continuation": continuation}
            for continuation in ["bbb", "b", "bdb", "dbb", "b b"]
        ],
    ),
}
KNOWN_ACCURACY = {"choose": 5 / 8, "resolve": 3 / 6, "go on": 2 / 5}


def known_results(folder, **keywords):
    tasks = core.open_bundle(str(folder))
    return core.evaluate(even_model(), BYTES, tasks, None, 512, **keywords)


def test_tasks_whose_answer_is_known(tmp_path, capsys):
    results = known_results(write_bundle(tmp_path, KNOWN))
    accuracies = {label: task["accuracy"] for label, task in results["tasks"].items()}
    assert accuracies == pytest.approx(KNOWN_ACCURACY)
    centered = [0.25, 1 / 3, 0.4]
    assert [task["centered"] for task in results["tasks"].values()] == pytest.approx(centered)
    assert [task["items"] for task in results["tasks"].values()] == [8, 6, 5]
    assert results["core"] is None and results["mean_centered"] == pytest.approx(sum(centered) / 3)
    assert "mean over 3 tasks (not CORE): 0.3278" in capsys.readouterr().out


def test_only_the_mean_over_all_tasks_is_called_core(tmp_path, capsys):
    tasks = dict.fromkeys(sorted(core.CORE_TASKS), KNOWN["choose"])
    results = known_results(write_bundle(tmp_path / "all", tasks))
    assert results["core"] == results["mean_centered"] == pytest.approx(0.25)
    assert "\nCORE: 0.2500" in capsys.readouterr().out
    del tasks["squad"], tasks["copa"]
    assert known_results(write_bundle(tmp_path / "part", tasks))["core"] is None
    assert "\nmean over 20 tasks (not CORE): 0.2500" in capsys.readouterr().out


# Damaged bundles


@pytest.mark.parametrize(
    "kind, line, complaint",
    [
        ("multiple_choice", "{", "Expecting property name"),
        ("multiple_choice", "[]", "not dict"),
        ("multiple_choice", '{"query": "a", "choices": [], "gold": 0}', "gold is 0"),
        ("multiple_choice", '{"query": "a", "choices": ["b", "c"], "gold": 2}', "gold is 2"),
        ("multiple_choice", '{"query": "a", "choices": ["b", "c"], "gold": -1}', "gold is -1"),
        ("multiple_choice", '{"query": "a", "choices": ["b", 7], "gold": 0}', r"choices\[1\] is '7'"),
        ("multiple_choice", '{"choices": ["b", "c"], "gold": 0}', "has no 'query'"),
        ("schema", '{"context_options": "ab", "continuation": "c", "gold": 0}', "context_options is 'ab'"),
        ("schema", '{"context_options": ["a"], "continuation": "", "gold": 0}', "continuation is empty"),
        ("schema", '{"context_options": ["a"], "continuation": "c"}', "has no 'gold'"),
        ("language_modeling", '{"context": "a", "continuation": " "}', "continuation is empty"),
        ("language_modeling", '{"context": "\\ud800", "continuation": "b"}', "surrogates not allowed"),
        ("language_modeling", "[" * 100_000, "recursion"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, kind, line, complaint):
    bundle = write_bundle(tmp_path, {"made-up": (kind, 0, None, 0, records_of(kind, 2))})
    file = bundle / "eval_data" / "some" / "made-up.jsonl"
    with open(file, "a") as lines:
        lines.write(f"\n{line}\n")  # a blank line counts and is none
    with pytest.raises(InputError, match=complaint) as error:
        core.open_bundle(str(bundle))
    assert str(error.value).startswith(f"{file} line 4")


@pytest.mark.parametrize(
    "change, complaint",
    [
        (("core.yaml", "icl_tasks", "tasks"), "core.yaml has no 'icl_tasks'"),
        (("core.yaml", "icl_tasks:", "icl_tasks: ["), "core.yaml: while parsing"),
        (("core.yaml", "schema", "essay"), "task resolve: icl_task_type is 'essay'"),
        (("core.yaml", "some/resolve.jsonl", "../../secret.jsonl"), "task resolve: dataset_uri .* leads out"),
        (("core.yaml", "some/resolve.jsonl", "/etc/passwd"), "task resolve: dataset_uri .* leads out"),
        (("core.yaml", "some/resolve.jsonl", "some/absent.jsonl"), "absent.jsonl: No such file"),
        (("core.yaml", "- 0", "- many"), r"num_fewshot\[0\] is 'many', not int"),
        (("core.yaml", "- 0", "- -1"), r"num_fewshot is \[-1\]"),
        (("eval_meta_data.csv", "resolve,", "solve,"), "task resolve: .* no random baseline"),
        (("eval_meta_data.csv", "25", "100"), "no random baseline"),
        (("eval_meta_data.csv", "Random baseline", "Baseline"), "meta_data.csv has no 'Random baseline'"),
        (("eval_meta_data.csv", "25", "a lot"), "meta_data.csv: could not convert"),
    ],
)
def test_a_damaged_bundle_is_refused(tmp_path, change, complaint):
    bundle = write_bundle(tmp_path, KNOWN)
    name, before, after = change
    text = (bundle / name).read_text()
    assert before in text
    (bundle / name).write_text(text.replace(before, after))
    with pytest.raises(InputError, match=complaint):
        core.open_bundle(str(bundle))
    (bundle / "core.yaml").write_text("icl_tasks: []")
    (bundle / "eval_meta_data.csv").write_text("")
    with pytest.raises(InputError, match="lists no task"):
        core.open_bundle(str(bundle))


def zipped(folder, extra=(), top="eval_bundle/"):
    """The bytes of a zip of a bundle, and of members (name, content, attributes) that it should not have."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, f"{top}{file.relative_to(folder)}")
        for name, data, attributes in extra:
            member = zipfile.ZipInfo(name)
            member.external_attr = attributes << 16
            archive.writestr(member, data)
    return content.getvalue()


@pytest.fixture
def own_base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


def kept(base):
    """Names under the base folder, but for locks."""
    return {file.name for file in base.rglob("*") if file.is_file() and not file.name.endswith(".lock")}


@pytest.mark.parametrize("top", ["", "eval_bundle/"])
def test_a_zip_is_unpacked_once(tmp_path, own_base, top):
    bundle = write_bundle(tmp_path / "bundle", KNOWN)
    archive = tmp_path / "b.zip"
    archive.write_bytes(zipped(bundle, [("run.sh", b"rm -r /", 0)], top))
    tasks = core.open_bundle(str(archive))
    assert [task.label for task in tasks] == list(KNOWN)
    assert all(task.file.is_relative_to(own_base / "core") for task in tasks)
    tasks[0].file.write_text('{"query": "q", "choices": ["a"], "gold": 0}\n')
    assert len(core.read_items(core.open_bundle(str(archive))[0])) == 1  # it was not unpacked again


LINK = 0o120777


@pytest.mark.parametrize(
    "member, complaint",
    [
        (("../out.jsonl", b"", 0), "leads out"),
        (("/out.jsonl", b"", 0), "leads out"),
        (("eval_bundle/a/../../../out.yaml", b"", 0), "leads out"),
        (("a\\..\\..\\out.csv", b"", 0), "leads out"),
        (("link.jsonl", b"/etc/passwd", LINK), "leads out"),
        (None, "holds no core.yaml"),
        ("half", "not a zip that can be read"),
        ("damaged", "not a zip that can be read"),
    ],
)
def test_a_zip_that_leads_elsewhere_or_is_damaged_leaves_nothing(tmp_path, own_base, member, complaint):
    bundle = write_bundle(tmp_path / "bundle", KNOWN)
    content = zipped(bundle, [member] if isinstance(member, tuple) else [])
    if member is None:
        (bundle / "core.yaml").unlink()
        content = zipped(bundle)
    elif member == "half":
        content = content[: len(content) // 2]
    elif member == "damaged":
        content = content[:60] + bytes(80) + content[140:]
    archive = tmp_path / "b.zip"
    archive.write_bytes(content)
    with pytest.raises(InputError, match=complaint):
        core.open_bundle(str(archive))
    assert kept(own_base) == set() and not list(tmp_path.rglob("out.*"))


@pytest.fixture
def server(tmp_path):
    """The address of a server of the files in tmp_path."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_address_is_fetched_once(tmp_path, own_base, server):
    (tmp_path / "b.zip").write_bytes(zipped(write_bundle(tmp_path / "bundle", KNOWN)))
    tasks = core.open_bundle(f"{server}/b.zip")
    (tmp_path / "b.zip").unlink()
    assert [task.label for task in tasks] == list(KNOWN) and core.open_bundle(f"{server}/b.zip") == tasks
    (tmp_path / "b.zip").write_text("<html>log in</html>")
    for address in (f"{server}/nothing", f"{server}/b.zip?", "http://[", "http://127.0.0.1:9/b.zip"):
        with pytest.raises(core.Unreachable) as error:
            core.open_bundle(address)
        assert address in str(error.value)
    assert len(list((own_base / "core").glob("[!.]*"))) == 1


# Ranks


def results_of_a_rank(group, folder, layout):
    """What every rank of a world of 4 gets: with the model whole, or cut by FSDP2 and tensor parallelism."""
    rank, ranks, mesh = dist.get_rank(), 4, None
    if layout == "in pieces":
        mesh = parallel.device_mesh("cpu", 2, 2)
        rank, ranks = rank // 2, 2
    return results_for_ranks(folder, rank, ranks, mesh)


def results_for_ranks(folder, rank=0, ranks=1, mesh=None):
    runtime = Runtime(torch.device("cpu"), torch.float32)
    config = GPTConfig(
        vocab_size=257, seq_len=96, depth=2, width=32, heads=4, kv_heads=2, window_pattern="SL"
    )
    model = parallel.build_model(config, runtime, 0, mesh, fsdp=mesh is not None)
    # Every weight does something, the same on any number of ranks
    for parameter in model.parameters():
        whole = torch.arange(parameter.numel(), dtype=torch.float32).sin().view(parameter.shape) / 8
        if hasattr(parameter, "device_mesh"):
            parameter.data.to_local().copy_(parallel.cut(whole, parameter).to_local())
        else:
            parameter.data.copy_(whole)
    tasks = core.open_bundle(folder)
    return without_seconds(core.evaluate(model, BYTES, tasks, None, 8000, rank, ranks))


def without_seconds(results):
    for task in results["tasks"].values():
        del task["seconds"]
    return results


def test_any_number_of_ranks_gives_the_same_numbers(tmp_path, capsys):
    """Of the second task some ranks have nothing, and still must lend their pieces of the model."""
    tasks = {
        "choose": ("multiple_choice", 0, None, 10, records_of("multiple_choice", 37, most=4)),
        "resolve": ("schema", 1, None, 10, records_of("schema", 2, most=4)),
    }
    bundle = str(write_bundle(tmp_path, tasks))
    expected = results_for_ranks(bundle)
    assert 0 < expected["tasks"]["choose"]["accuracy"] < 1
    for layout in ("whole", "in pieces"):
        for found in run_world(4, results_of_a_rank, bundle, layout):
            assert found == expected, layout


# Runs


def test_a_run_is_evaluated_on_the_way_and_at_its_end_and_again(base, environment, capsys):
    bundle = str(write_bundle(base / "bundle", KNOWN))
    options = ["--core-bundle", bundle, "--core-items", "4"]
    assert base_train.main(arguments(base, "core", 5, *options, "--core-every", "2")) == 0
    run = base / "runs" / "core"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "core" in row]
    assert [(row["step"], row["tokens"], row["core"]) for row in rows] == [
        (2, 512, None),
        (4, 1024, None),
        (5, 1280, None),
    ]
    results = json.loads((run / "core.json").read_text())
    assert results.keys() == {"core", "mean_centered", "tasks", "step", "most_items"}
    assert results["step"] == 5 and list(results["tasks"]) == list(KNOWN)
    assert [task["items"] for task in results["tasks"].values()] == [4, 4, 4]
    assert rows[-1]["mean_centered"] == results["mean_centered"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["core"] is None
    assert summary["core_mean_centered"] == pytest.approx(results["mean_centered"], abs=5e-5)
    report = (run / "report.md").read_text()
    assert "## CORE\n\nmean over 3 tasks" in report and "| choose | " in report

    capsys.readouterr()
    base_eval.main(["--run", "core", "--eval", "core,sample", *options])
    assert without_seconds(json.loads((run / "core.json").read_text())) == without_seconds(results)
    output = capsys.readouterr().out
    assert output.count("--- sample") == 3 and "val_bpb" not in output
    with pytest.raises(InputError, match="--eval bpb,arc: choose of bpb, core, sample"):
        base_eval.main(["--run", "core", "--eval", "bpb,arc"])


def test_a_run_remembers_where_its_bundle_is_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = "https://nowhere.example/bundle.zip"
    for given, remembered in (("bundle", f"{tmp_path}/bundle"), (address, address)):
        args = base_train.make_parser().parse_args(["--core-bundle", given])
        assert args.core_bundle == remembered


def test_a_run_goes_on_without_a_bundle_that_cannot_be_had(base, environment, capsys):
    address = "http://127.0.0.1:9/b.zip"
    assert base_train.main(arguments(base, "unreachable", 2, "--core-bundle", address)) == 0
    assert f"warning: no bundle for CORE from {address}: " in capsys.readouterr().err
    run = base / "runs" / "unreachable"
    assert json.loads((run / "summary.json").read_text())["core"] is None and not (run / "core.json").exists()


def test_a_bundle_that_is_not_one_ends_a_run_before_it_starts(base, environment):
    for place in (base / "nowhere", base / "texts"):
        with pytest.raises(InputError):
            base_train.main(arguments(base, "refused", 2, "--core-bundle", str(place)))
    assert not (base / "runs" / "refused").exists()
