"""Run folders that somebody else made, or that were damaged: a reader gives what is sound or one line that
names the file, runs nothing of it, and changes nothing.
"""

import json
import os
import pickle
import resource
import shutil

import pytest

from nanomuon import checkpoint, report
from nanomuon.files import locked
from nanomuon.plan import recall
from nanomuon.run import is_complete
from nanomuon.runtime import InputError, explain, print0
from scripts import base_eval, base_train, export, sample
from tests.training import arguments, write_corpus


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base folder with a real run of four steps and its shards."""
    base = tmp_path_factory.mktemp("made")
    write_corpus(base / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOMUON_BASE_DIR", str(base))
        patch.setenv("NANOMUON_COMPILE", "0")
        assert base_train.main(arguments(base, "tiny", 4, "--save-every", "2")) == 0
    return base


@pytest.fixture
def base(made, tmp_path, monkeypatch):
    """A copy of it to damage."""
    shutil.copytree(made, tmp_path / "base", ignore=shutil.ignore_patterns("texts"))
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    return tmp_path / "base"


def run_of(base):
    return base / "runs" / "tiny"


def change(file, *keys, to):
    """Put another value into a file of JSON."""
    content = json.loads(file.read_text())
    inside = content
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = to
    file.write_text(json.dumps(content))


def refused(command, *words):
    """The command ends with exit code 2 and one line that has these words."""
    with pytest.raises(Exception) as caught:
        command()
    code, message = explain(caught.value)
    assert code == 2 and message.startswith("error: ") and message.count("\n") == 1, message
    for word in words:
        assert word in message


def contents(folder):
    """{file: bytes}, but for locks, which say who held them last."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"]
    return {file: file.read_bytes() for file in files}


def go_on(made):
    """Resume the run for two more steps."""
    return lambda: base_train.main(arguments(made, "tiny", 6, "--resume", "step_4"))


def write_text(made):
    return lambda: sample.main("--run tiny --max-tokens 2".split())


READERS = {  # file: who reads it
    "runs/tiny/settings.json": go_on,
    "runs/tiny/checkpoints/step_4/manifest.json": go_on,
    "runs/tiny/checkpoints/step_4/rank_0.safetensors": go_on,
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
CASES.remove(("runs/tiny/settings.json", "gone"))  # without settings there is no run


@pytest.mark.parametrize("place,damage", CASES)
def test_a_damaged_file_is_one_line_and_nothing_is_overwritten(made, base, place, damage):
    file = base / place
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(DAMAGE[damage](file.read_bytes()))
    before = contents(base)
    name_of_folder = "tokenizer" in place or damage == "gone"
    refused(READERS[place](made), str(file.parent if name_of_folder else file))
    assert contents(base) == before


GARBAGE = [
    ("vocab_size", 300.0),
    ("seq_len", 10**10),
    ("depth", 100_000),
    ("depth", True),
    ("width", 10**6),
    ("heads", 0),
    ("kv_heads", None),
    ("window_pattern", "SX"),
    ("qk_norm", 1),
    ("value_embed_every", 0),
    ("experts", -1),
    ("experts_per_token", []),
]


@pytest.mark.parametrize("key,value", GARBAGE)
def test_garbage_in_a_field_of_the_config_is_one_line(made, base, key, value):
    change(run_of(base) / "config.json", key, to=value)
    refused(write_text(made), str(run_of(base)))


@pytest.mark.parametrize("name", ["manifest.json", "train-00000.safetensors", "val-00000.safetensors"])
@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "gone"])
def test_damaged_shards_are_one_line(made, base, name, damage):
    (file,) = base.glob(f"shards/*/{name}")
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    refused(go_on(made), str(file))


def small_files():
    """No file can grow beyond 100 kB, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def a_file_for_a_folder():
    shutil.rmtree(os.environ["NANOMUON_BASE_DIR"] + "/runs")
    with open(os.environ["NANOMUON_BASE_DIR"] + "/runs", "w"):
        pass


@pytest.mark.parametrize(
    "happens,advice", [(small_files, "make room"), (a_file_for_a_folder, "NANOMUON_BASE_DIR=")]
)
def test_a_place_that_takes_nothing_is_one_line(made, base, happens, advice):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    happens()
    try:
        refused(lambda: base_train.main(arguments(made, "new", 2)), str(base), advice)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_damaged_summary_is_one_line(made, base):
    (run_of(base) / "summary.json").write_text('{"steps": "many"}')
    refused(
        lambda: base_train.main(arguments(made, "tiny", 4)),
        "summary.json cannot be read: steps is 'many', not int",
    )


@pytest.mark.parametrize(
    "option, value", [("depth", 10**5), ("max_seq_len", 10**10), ("seed", "x"), ("fp8", 3), ("corpus", [])]
)
def test_an_absurd_option_is_refused_with_its_flag(made, base, option, value):
    change(run_of(base) / "settings.json", "options", option, to=value)
    with pytest.raises(InputError) as caught:
        base_train.main(["--run", "tiny", "--num-iterations", "6"])
    assert option.replace("_", "-") in str(caught.value) or "corpus" in str(caught.value)


def test_a_run_remembers_no_flag_of_a_launch(base):
    """Else a run of somebody else's could log to the network, or choose its own folder."""
    options = {"wandb": True, "run": "../elsewhere", "resume": "never", "optimizer_file": "stranger.py"}
    for key, value in options.items():
        change(run_of(base) / "settings.json", "options", key, to=value)
    args, _ = recall(base_train.make_parser(), ["--run", "tiny"])
    assert (args.wandb, args.run, args.resume, args.optimizer_file) == (False, "tiny", "auto", None)


@pytest.mark.parametrize("name", ["../../../../../dev/zero", "/dev/zero", "..", "", "a/b", "a\0b"])
def test_manifests_name_files_of_their_folder(base, name):
    folder = run_of(base) / "checkpoints" / "step_4"
    change(folder / "manifest.json", "files", to={name: 0})
    refused(lambda: checkpoint.find(run_of(base), "step_4"), "by the manifest")


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


def test_nothing_of_a_strangers_folder_is_run(made, base, tmp_path):
    """A pickle in every file name of ours, Python files, and settings that name one."""
    ran = tmp_path / "ran"
    bomb, python = pickle.dumps(Bomb(ran)), f"import os; os.mkdir({str(ran)!r})\n"
    names = [file.relative_to(run_of(made)) for file in run_of(made).rglob("*") if file.is_file()]
    # torch's own reader of checkpoints unpickles the last two
    for name in [*names, "checkpoints/step_4/.metadata", "checkpoints/step_4/__0_0.distcp"]:
        shutil.rmtree(run_of(base))
        shutil.copytree(run_of(made), run_of(base))
        file = run_of(base) / name
        file.write_text(python) if file.suffix == ".py" else file.write_bytes(bomb)
        stranger = run_of(base) / "stranger.py"
        stranger.write_text(python)
        for command in (
            go_on(made),
            write_text(made),
            lambda: base_eval.main("--run tiny".split()),
            lambda: export.main(["--run", "tiny", "--to", str(tmp_path / "exported")]),
        ):
            try:
                command()
            except InputError as error:
                assert "\n" not in str(error)
            shutil.rmtree(tmp_path / "exported", ignore_errors=True)
        assert not ran.exists(), file
    shutil.rmtree(run_of(base))
    shutil.copytree(run_of(made), run_of(base))
    change(run_of(base) / "settings.json", "trained_on", "optimizer_file", to=str(stranger))
    change(run_of(base) / "settings.json", "trained_on", "optimizer_file_sha256", to="0" * 64)
    refused(lambda: base_train.main(["--run", "tiny", "--num-iterations", "8"]), "0" * 64, str(stranger))
    assert not ran.exists()


def test_nothing_is_written_through_a_link(made, base, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine\n")
    for name in ("metrics.jsonl", "summary.json", "report.md", "loss.png", "config.json", "stopped"):
        (run_of(base) / name).unlink(missing_ok=True)
        (run_of(base) / name).symlink_to(precious)
    (run_of(base) / "summary.json").unlink()
    assert base_train.main(arguments(made, "tiny", 6)) == 0
    assert precious.read_text() == "mine\n"
    (base / "runs" / ".tiny.lock").unlink()
    (base / "runs" / ".tiny.lock").symlink_to(precious)
    refused(lambda: locked(run_of(base)).__enter__(), "symbolic link", ".tiny.lock")
    assert precious.read_text() == "mine\n"


def test_control_characters_of_strangers_are_shown(base, capsys):
    said = "a\x1b[2Jb\x07c\x7fd\x9be\u202ef\rg"
    shown = "a\\x1b[2Jb\\x07c\\x7fd\\x9be\\u202ef\\rg"
    print0(said, "line\n\tend")
    assert capsys.readouterr().out == f"{shown} line\n\tend\n"
    assert "\x1b" not in explain(InputError(said))[1]
    change(run_of(base) / "summary.json", "note\x1b[31m", to=said)
    is_complete(run_of(base), 4)
    output = capsys.readouterr().out
    assert "\x1b" not in output and f"note\\x1b[31m: {shown}" in output
    report.write_report(run_of(base), {"note": said}, [said])
    written = (run_of(base) / "report.md").read_bytes()
    assert b"\x1b" not in written and shown.encode() in written


def test_a_checkpoint_whose_meta_is_garbage_is_one_line(made, base):
    file = run_of(base) / "checkpoints" / "step_4" / "manifest.json"
    change(file, "meta", "row", to="4")
    refused(go_on(made), f"{file} cannot be read: meta.row is '4', not int")
