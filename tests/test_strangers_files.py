"""Run folders of strangers, and damaged ones: a command reads sound content or prints one line that names the
file; it runs nothing and changes nothing.
"""

import contextlib
import os
import pickle
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nanomuon import shards
from nanomuon.runtime import InputError, read_json, write_json
from nanomuon.settings import parse_with_record
from scripts import base_eval, base_train, export, sample
from tests.mistakes import refused
from tests.training import QUIET, little_space, train, train_on


@pytest.fixture(scope="module")
def made(base):
    """A base folder with a real run of four steps and its shards."""
    train_on(1, base, "tiny", 4, *QUIET)
    return base


@pytest.fixture
def run_dir(made, tmp_path, monkeypatch, environment):
    """A copy of the run folder to damage."""
    shutil.copytree(made, tmp_path / "base", ignore=shutil.ignore_patterns("texts"))
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base" / "runs" / "tiny"


def change(file, key, to, within="options"):
    """Change a value in a JSON file."""
    content = read_json(file)
    (content[within] if within else content)[key] = to
    write_json(file, content)


def contents(folder):
    """{file: bytes}, except locks, which say who held them last."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"]
    return {file: file.read_bytes() for file in files}


def go_on():
    """Resume the run for two more steps."""
    assert base_train.main("--run tiny --num-iterations 6 --resume step_4".split()) == 0


def write_text():
    sample.main("--run tiny --max-tokens 2".split())


READERS = {  # file: who reads it
    "runs/tiny/settings.json": go_on,
    "runs/tiny/checkpoints/step_4/manifest.json": go_on,
    "runs/tiny/checkpoints/step_4/shard-00001-model-00001-of-00001.safetensors": go_on,
    "shards/*/manifest.json": go_on,
    "shards/*/train-00000.safetensors": go_on,
    "shards/*/val-00000.safetensors": go_on,
    "runs/tiny/tokenizer/tokenizer.json": write_text,
    "runs/tiny/config.json": write_text,
    "runs/tiny/model.safetensors": write_text,
}
DAMAGE = {
    "gone": None,
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "garbage": lambda data: b"\xff\x00garbage" * 20,
    "another type": lambda data: b"[]",
    "a key less": lambda data: data.replace(b'"depth"', b'"x"').replace(b'"', b'"x', 1),
}
CASES = [(place, damage) for place in READERS for damage in DAMAGE]
CASES.remove(("shards/*/manifest.json", "gone"))  # shards that are not listed are written again


@pytest.mark.parametrize("place,damage", CASES)
def test_a_damaged_file_is_one_line_and_nothing_is_overwritten(run_dir, place, damage):
    base = run_dir.parents[1]
    (file,) = base.glob(place)
    data = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(DAMAGE[damage](data))
    before = contents(base)
    name_of_folder = "tokenizer" in place or damage == "gone"
    advice = "run scripts.data_prep" if "shards" in place else ""
    with refused(f"{file.parent if name_of_folder else file}.*{advice}"):
        READERS[place]()
    if "val" not in place:  # it is read at the end
        assert contents(base) == before


def test_a_place_that_cannot_be_written_is_one_line(made, run_dir):
    """The disk is full, or a file is in the place of a folder."""
    runs = run_dir.parent
    with little_space(100_000), refused(f"{runs}.*free some space"):
        train(made, "new", 2)
    shutil.rmtree(runs)
    runs.touch()
    with refused(f"{runs}.*set NANOMUON_BASE_DIR to a folder"):
        train(made, "new", 2)


SETTINGS, POSITION = "settings.json", "checkpoints/step_4/manifest.json"


@pytest.mark.parametrize(
    "file, within, key, value, said",
    [
        (SETTINGS, "options", "depth", 10**5, "settings.json: options: argument --depth: must be"),
        (SETTINGS, "options", "seed", "x", "--seed"),
        (SETTINGS, "options", "corpus", [], "corpus"),
        # Names that would be flags with values of their own
        (SETTINGS, "options", "resume=never", True, "resume=never is not a flag"),
        (SETTINGS, "options", "optimizer_file=a.py", True, "optimizer_file=a.py is not a flag"),
        (SETTINGS, "options", "help", True, "help is not a flag"),
        (SETTINGS, None, "rows", 0, "rows must be positive"),
        (SETTINGS, "trained_on", "revision", None, "now has other texts: "),
        (SETTINGS, None, "wandb_id", 7, "settings.json cannot be read: wandb_id: "),
        ("summary.json", None, "steps", "many", "summary.json cannot be read: steps: Input should be"),
        (POSITION, None, "meta", {"step": 4}, "manifest.json: meta has no "),
        (POSITION, "meta", "window", -1, "meta has impossible numbers"),
        ("config.json", None, "vocab_size", 300.0, "tiny"),
        ("config.json", None, "seq_len", 10**10, "tiny"),
        ("config.json", None, "depth", 10**5, "tiny"),
        ("config.json", None, "width", 10**6, "tiny"),
        ("config.json", None, "width", 10**30, "tiny"),
        ("config.json", None, "heads", 0, "tiny"),
    ],
)
def test_an_absurd_value_is_refused_by_name(run_dir, file, within, key, value, said):
    change(run_dir / file, key, value, within)
    with refused(said):
        if file == "config.json":
            write_text()
        base_train.main("--run tiny --num-iterations 6".split())


@pytest.mark.parametrize(
    "name, values, dtype",
    [
        ("tokens", range(7), "uint16"),
        ("tokens", range(6), "float64"),
        ("tokens", range(254, 260), "uint16"),
        ("tokens", [[0, 0]] * 3, "uint16"),
        ("starts", [0, 7], "int64"),
        ("starts", [3, 0], "int64"),
        ("starts", [0, 3], "float64"),
        ("starts", [0, 2, 3], "int64"),
    ],
)
def test_a_shard_with_other_contents_than_the_manifest_lists_is_one_line(tmp_path, name, values, dtype):
    manifest = shards.Manifest("x", 258, [], [shards.Entry(documents=2, tokens=6)], None)
    file = tmp_path / "train-00000.safetensors"
    sound = {"starts": np.array([0, 3]), "tokens": np.arange(6, dtype=np.uint16)}
    save_file(sound, file)
    tokens, starts = shards.read_shards(tmp_path, manifest, "train")
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5] and starts.tolist() == [0, 3]
    save_file(sound | {name: np.array(values, dtype)}, file)
    with refused(str(file)):
        shards.read_shards(tmp_path, manifest, "train")
    with refused("lists no val shards"):
        shards.read_shards(tmp_path, manifest, "val")


@pytest.mark.parametrize("spoil", [lambda vocab: vocab[1:], lambda vocab: vocab[:-1] + ["a"]])
def test_a_tokenizer_without_every_byte_or_with_a_token_twice_is_one_line(run_dir, spoil):
    file = run_dir / "tokenizer" / "tokenizer.json"
    change(file, "vocab", spoil(read_json(file)["vocab"]), within=None)
    with refused(f"{file}.*not distinct, or do not include all 256 bytes"):
        write_text()


def test_samples_of_a_model_that_has_diverged_are_one_line(run_dir):
    file = run_dir / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] *= np.float32("nan")
    save_file(weights, file)
    with refused("has diverged"):
        write_text()


def test_a_run_remembers_no_flag_of_a_launch(run_dir):
    """Otherwise somebody else's run could log to the network, or choose its own folder."""
    options = {"wandb": True, "run": "../elsewhere", "resume": "never", "optimizer_file": "stranger.py"}
    for key, value in options.items():
        change(run_dir / "settings.json", key, value)
    args, _ = parse_with_record(base_train.make_parser(), ["--run", "tiny"])
    assert (args.wandb, args.run, args.resume, args.optimizer_file) == (False, "tiny", "auto", None)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_nothing_of_a_strangers_folder_is_run(made, run_dir, tmp_path):
    """A pickle under every file name of ours, Python files, and settings that name one."""
    ran, original, to = tmp_path / "ran", made / "runs" / "tiny", str(tmp_path / "exported")
    bomb, python = pickle.dumps(Bomb(ran)), f"import os; os.mkdir({str(ran)!r})\n"
    files = [file for file in original.rglob("*") if file.is_file() and file.suffix != ".py"]
    names = {str(file.relative_to(original)) for file in files}
    read = {name.removeprefix("runs/tiny/") for name in READERS} & names | {"summary.json", "metrics.jsonl"}
    # What nobody reads; torch's own reader of checkpoints unpickles the first two
    others = ["checkpoints/step_4/.metadata", "checkpoints/step_4/__0_0.distcp", *names - read]
    commands = [
        write_text,
        lambda: base_eval.main("--run tiny".split()),
        lambda: export.main(["--run", "tiny", "--to", to]),
        go_on,  # last: it writes model.safetensors
    ]
    for bombs in (others, ["stranger.py"], *([name] for name in read)):
        shutil.rmtree(run_dir)
        shutil.copytree(original, run_dir)
        for name in bombs:
            (run_dir / name).write_bytes(bomb)
        for file in [*run_dir.glob("*.py"), run_dir / "stranger.py"]:
            file.write_text(python)
        if bombs == ["stranger.py"]:
            change(run_dir / "settings.json", "optimizer_file", str(run_dir / "stranger.py"), "trained_on")
        for command in commands:
            with contextlib.suppress(*([] if bombs == others else [InputError])):
                command()
            shutil.rmtree(to, ignore_errors=True)
        assert not ran.exists(), bombs
