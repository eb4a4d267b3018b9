"""Impossible flags: every script answers with one line that names the flag, before any work."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from tests.mistakes import refused

SCRIPTS = sorted(
    path.stem
    for path in (Path(__file__).parent.parent / "scripts").glob("*.py")
    if "run_command(main)" in path.read_text()
)
TEXT = Path(__file__)  # any text


@pytest.fixture
def main(tmp_path, eager, monkeypatch):
    """main(script, flags) runs a script's main() as if there were no GPU, in a base folder of its own."""
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setenv("NANOMUON_DEVICE", "cpu")

    def call(script, flags):
        argv = shlex.split(flags.format(folder=tmp_path, text=TEXT))
        return importlib.import_module(f"scripts.{script}").main(argv)

    return call


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_the_docstring_and_an_unknown_flag_is_one_line(script, main, capsys):
    with pytest.raises(SystemExit) as ended:
        main(script, "--help")
    text = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: python -m scripts.{script}" in text
    assert importlib.import_module(f"scripts.{script}").__doc__.strip() in text
    with refused(f"; see python -m scripts.{script} --help$"):
        main(script, "--no-such-flag")


REFUSED = [  # script, flags, message
    ("base_train", "--dpeth=6", "unrecognized arguments: --dpeth=6 (did you mean --depth?); see"),
    ("base_train", "--depth x", "argument --depth: invalid int value: 'x'; see"),
    ("base_train", "--depth 1025", "argument --depth: must be from 1 to 1,024, not 1025; see"),
    ("base_train", "--vocab-size 256", "argument --vocab-size: must be from 257 to"),
    ("base_train", "--resume newest", "argument --resume: must be auto, never or a checkpoint"),
    ("base_train", "--plan --window-pattern SX", "window_pattern consists of S and L, not 'SX'"),
    ("base_train", "--matrix-lr nan", "argument --matrix-lr: must be from 0 to 1e+30, not nan"),
    (
        "base_train",
        "--num-iterations 3 --target-flops 1e12",
        "argument --target-flops: not allowed with argument",
    ),
    ("base_train", "--tensor-parallel 2", "--tensor-parallel 2 needs a multiple of 2 processes, not 1"),
    ("base_train", "--qk-clip 100", "--qk-clip needs --no-qk-norm"),
    ("base_train", "--optimizer-file no.py:lr=1", "argument --optimizer-file: no.py:lr=1 is not a file"),
    ("base_eval", "--run x --eval bpb,arc", "--eval bpb,arc: choose from bpb, core"),
    ("sample", "--run x --top-p nan", "argument --top-p: must be from 1e-30 to 1"),
    ("sample", "--run x --temperature -1", "argument --temperature: must be from 0"),
    ("sample", "--run x --prompt a\udcff", "argument --prompt: invalid text value"),
    ("sample", "--run x --stop ''", "argument --stop: must not be empty"),
    (
        "sample",
        "--run x --interactive --prompt a",
        "argument --prompt: not allowed with argument --interactive",
    ),
    ("base_train", "--run ../x", "--run '../x' is not a folder name"),
    ("base_train", "--run a\udcff", "--run 'a\\udcff' is not a folder name"),
    ("base_train", "--corpus path:a\udcff", "argument --corpus: 'path:a\\udcff' is not UTF-8: rename it"),
    ("base_train", f"--run {'x' * 201}", f"--run '{'x' * 201}' is not a folder name"),
    ("base_train", "--plan --corpus foo", "unknown corpus 'foo'"),
    ("base_train", "--plan --corpus path:/nope", "corpus path:/nope: no such file"),
    ("data_prep", "--max-tokens -1", "argument --max-tokens: must be from 0 to"),
    ("optim_bench", "--peer {text}:main --world 2", "--peer and --profile run in a single process"),
    ("optim_bench", "--profile x --world 2", "--peer and --profile run in a single process"),
    (
        "optim_bench",
        "--profile nowhere/x",
        "argument --profile: 'nowhere/x' is not a file, or nothing can be",
    ),
    ("train_bench", "--json .", "argument --json: '.' is not a file, or nothing can be"),
    ("train_bench", "--json ''", "argument --json: '' is not a file, or nothing can be"),
    ("train_bench", "--json /dev/null", "argument --json: '/dev/null' is not a file, or nothing can be"),
    ("optim_bench", "--peer mine.py", "--peer mine.py must be FILE:FUNCTION"),
    ("optim_race", "--contenders default --seeds 0", "argument --seeds: must be from 1 to"),
    (
        "optim_race",
        "--contenders default:matrix_lr=abc",
        "contender default:matrix_lr=abc: matrix_lr must be a num",
    ),
    ("optim_race", "--contenders default --corpus path:x", "--corpus path:x is only for --task corpus"),
    ("optim_race", "--contenders default --task python --text a", "--text a is only for --task shakespeare"),
    (
        "optim_race",
        "--contenders default --model depth=x",
        "--model: depth='x': the content: Input should be a valid integer",
    ),
    ("optim_race", "--contenders default --model depth", "--model: 'depth' is not key=value"),
    ("optim_race", "--contenders default --text {text} --model kv_heads=3", "--model: width 128 must be"),
    ("plan", "--gpus 99999999999", "argument --gpus: must be from 1 to 65,536, not 99999999999; see"),
    (
        "plan",
        "--gpus 8 --tensor-parallel 3",
        "--tensor-parallel 3 needs a multiple of 3 processes, not 8",
    ),
    ("plan", "--depth 12 --tensor-parallel 4", "--tensor-parallel 4 does not divide 6 key-value heads"),
    ("scaling", "--depths 1 --tokens 1e3 --corpus foo", "unknown corpus 'foo'"),
    ("scaling", "--depths 1.5 --tokens 1e3", "argument --depths: invalid list of whole numbers value: '1.5'"),
    ("scaling", "--depths 1 --tokens inf", "argument --tokens: invalid list of whole numbers value: 'inf'"),
    ("scaling", "--depths 1 --tokens -5", "argument --tokens: invalid list of whole numbers value: '-5'"),
    ("scaling", "--depths 1,5000 --tokens 250e3", "argument --depth: must be from 1 to 1,024, not 5000"),
    (
        "scaling",
        "--depths 1 --tokens 256 -- --depth 3",
        "flags after -- cannot set --run, --corpus or --depth",
    ),
    (
        "scaling",
        "--depths 1 --tokens 512 --total-batch-size 512",
        "unrecognized arguments: --total-batch-size; flags of base_train go after a --",
    ),
    ("scaling", "--depths 1", "--depths and --tokens go together"),
    ("train_bench", "--shard fsdp", "train_bench measures a single process: leave out torchrun, --shard"),
]


@pytest.mark.parametrize("script, flags, said", REFUSED)
def test_an_impossible_flag_is_named_before_any_work(script, flags, said, main, tmp_path, capsys):
    with refused("^" + re.escape(said)):
        main(script, flags)
    assert capsys.readouterr().out == "" and not (tmp_path / "base").exists()


def test_a_plan_prints_sizes_and_neither_reads_its_corpus_nor_asks_the_hub(main, tmp_path, capsys):
    (tmp_path / "texts").mkdir()  # empty: reading it would be an error
    flags = "--plan --depth 2 --vocab-size 300 --max-seq-len 32 --total-batch-size 256 --num-iterations 7"
    for corpus in ("hf:nobody/nothing", f"path:{tmp_path}/texts"):
        assert main("base_train", f"{flags} --corpus {corpus}") == 0
        output = capsys.readouterr().out
        for size in ("depth 2, width 128", "0.5M parameters", "7 steps x 256 tokens", " GiB per device"):
            assert size in output
    assert not (tmp_path / "base").exists()
