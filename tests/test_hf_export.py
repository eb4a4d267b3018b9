"""An exported run in the hands of transformers and tokenizers: the same numbers, the same token ids."""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanomuon import hf_export
from nanomuon.files import write_json
from nanomuon.generate import sample_texts
from nanomuon.runtime import InputError, Runtime
from nanomuon.tokenizer import BOS, Tokenizer
from scripts import export
from tests.test_gpt import build
from tests.texts import random_texts

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CPU = Runtime(torch.device("cpu"), torch.float32)
ROOT = Path(__file__).parent.parent
TOKENIZER = Tokenizer.train([*random_texts(200), "".join(f"{' ' * i}x\n" for i in range(40))], 320)
SHAPES = {
    "plain": dict(depth=3),
    "windows and groups": dict(depth=4, heads=4, kv_heads=2, window_pattern="SL"),
    "no norm of queries and keys": dict(qk_norm=False, width=64, heads=1, kv_heads=1),
    "experts": dict(experts=4, experts_per_token=2, window_pattern="S"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """By shape: (our model, the folder that was exported); the modules of folders are copied to a place of
    their own.
    """
    base = tmp_path_factory.mktemp("hf")
    built = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(base / "modules"))
        for name, shape in SHAPES.items():
            built[name] = write_run(base / "runs" / name, **shape), base / "runs" / name
        yield built


def write_run(run_dir, **shape):
    """A run folder as base_train leaves it; returns its model."""
    model = build(vocab_size=TOKENIZER.vocab_size, seq_len=32, **shape)
    for block in model.blocks:
        if model.config.experts:  # a bias that changes which experts are chosen
            block.mlp.bias.uniform_(-0.2, 0.2)
    run_dir.mkdir(parents=True)
    facts = {"step": 40, "val_bpb": 1.5, "corpus": "path:/home/someone/texts", "tokens": 123456}
    trained_on = {"corpus": facts["corpus"], "revision": "1", "tokenizer": TOKENIZER.hash}
    nothing = dict(options={}, compile=False, rows=1, world_size=1, trained_with={})
    write_json(run_dir / "settings.json", {**nothing, "trained_on": trained_on})
    write_json(run_dir / "summary.json", {"steps": 40, "val_bpb": 1.5, "tokens": 123456})
    hf_export.export(run_dir, model, TOKENIZER, facts)
    TOKENIZER.save(run_dir / "tokenizer")
    return model.eval()


def load(folder, **keywords):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **keywords)


def load_tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_logits_are_ours_whole_and_in_parts(exported, shape):
    ours, folder = exported[shape]
    theirs = load(folder)
    tokens = torch.randint(TOKENIZER.vocab_size, (2, 32))
    expected = ours(tokens)
    torch.testing.assert_close(theirs(tokens).logits, expected, rtol=0, atol=1e-5)
    parts, cache = [], None
    for first, end in ((0, 5), (5, 6), (6, 7), (7, 20), (20, 32)):
        out = theirs(tokens[:, first:end], cache=cache, use_cache=True)
        parts.append(out.logits)
        cache = out[-1]  # by whichever name
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-5)


TEXTS = ["def return import self", "x", "for in the value of"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_text_is_ours_with_and_without_a_cache_and_behind_padding(exported, shape, use_cache):
    """The short windows and the convolution would see the padding on the left, if they were not told."""
    ours, folder = exported[shape]
    model, tokenizer = load(folder), load_tokenizer(folder)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert not batch["attention_mask"][1, 0] and batch["attention_mask"][:, -1].all()
    found = model.generate(**batch, max_new_tokens=20, do_sample=False, use_cache=use_cache)
    expected = sample_texts(ours, TOKENIZER, TEXTS, 20, temperature=0)
    assert tokenizer.batch_decode(found, skip_special_tokens=True) == expected


def test_beams_keep_their_cache(exported):
    """Beams are reordered at every step, and with them what the convolutions have seen."""
    _, folder = exported["windows and groups"]
    model = load(folder)
    prompt = torch.tensor([[TOKENIZER.bos_id, 5, 9], [TOKENIZER.bos_id, 17, 8]])
    beams = [
        model.generate(prompt, max_new_tokens=20, num_beams=4, do_sample=False, use_cache=use_cache).tolist()
        for use_cache in (True, False)
    ]
    assert beams[0] == beams[1]


def strings():
    """500 of them: many scripts, emoji, control characters, what looks like special tokens, long runs."""
    rng = random.Random(0)
    alphabets = [
        "aeiou ÄÖÜßéñøĳǅſK'",
        "абвгдеё ",
        "αβγ ϐ",
        "你好世界，。、 ",
        "こんにちは カタカナｶﾅ",
        "안녕하세요 ",
        "مرحبا بالعالم ١٢٣",
        "שלום עולם",
        "नमस्ते दुनिया १२३",
        "ไทยภาษา ๑๒",
        "🙂👩‍👩‍👧‍👦🏳️‍🌈é̂ ",
        "½²③Ⅷ 12345",
        "\u00a0\u2028\u2029\u200b\u3000\x85\ufeff\t x",
        "'s't'LL'Ve'ſ' a",
        "".join(map(chr, range(32))) + "\x7f\x9b ",
        '<|bos|>[]{}()=_#"',
    ]
    found = [BOS, f"a{BOS}{BOS} b", "<|endoftext|>", "<s>[INST]", f" {BOS}\n", "", "\0"]
    for unit in (" ", "\n", "\r\n", "\t", "1", "9 ", "a", "^", "é", "😀", "  x", " \n"):
        found += [unit * count for count in (1, 2, 3, 7, 100, 3000)]
    while len(found) < 500:
        alphabet = rng.choice([*alphabets, "".join(alphabets)])
        found.append("".join(rng.choices(alphabet, k=rng.randint(1, 60))))
    return found


def test_token_ids_of_500_strings_are_ours(exported, tmp_path):
    _, folder = exported["plain"]
    bare = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(folder)
    loaded.save_pretrained(tmp_path)
    again = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert len(loaded) == TOKENIZER.vocab_size and loaded.bos_token_id == TOKENIZER.bos_id
    texts = strings()
    expected = [TOKENIZER.encode(text) for text in texts]
    found = bare.encode_batch(texts, add_special_tokens=False)
    assert [encoding.ids for encoding in found] == expected
    assert loaded(texts, add_special_tokens=False)["input_ids"] == expected
    assert again(texts)["input_ids"] == [[TOKENIZER.bos_id, *ids] for ids in expected]
    pair = again("a", "b")["input_ids"]
    assert pair == [TOKENIZER.bos_id, *TOKENIZER.encode("a"), TOKENIZER.bos_id, *TOKENIZER.encode("b")]
    assert loaded.batch_decode(expected) == texts
    assert loaded.decode([TOKENIZER.bos_id, *TOKENIZER.encode("x")], skip_special_tokens=True) == "x"
    rng = random.Random(1)
    for _ in range(50):  # bytes that are no text, too
        ids = rng.choices(range(TOKENIZER.vocab_size), k=20)
        assert loaded.decode(ids) == TOKENIZER.decode(ids)


def test_the_trainer_takes_a_step_that_is_saved_and_loaded(exported, tmp_path):
    ours, folder = exported["windows and groups"]
    model = load(folder)
    rows = torch.randint(TOKENIZER.vocab_size - 1, (4, 16))
    labels = rows.clone()
    labels[:, :3] = -100
    targets = torch.where(labels < 0, -1, labels)[:, 1:]
    expected = ours(rows[:, :-1], targets.contiguous())
    settings = transformers.TrainingArguments(
        output_dir=tmp_path / "trainer",
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [dict(input_ids=row, labels=label) for row, label in zip(rows, labels, strict=True)]
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=data)
    result = trainer.train()
    assert result.training_loss == pytest.approx(expected.item(), abs=1e-4)
    for name, weight in model.state_dict().items():
        assert not torch.equal(weight, ours.state_dict()[name]), f"{name} was not trained"
    trainer.save_model(tmp_path / "tuned")
    tuned = load(tmp_path / "tuned").eval()
    with torch.no_grad():
        assert torch.equal(tuned(rows).logits, model.eval()(rows).logits)


def test_an_export_in_bfloat16_is_the_same_model_rounded(exported, tmp_path, monkeypatch):
    _, folder = exported["experts"]
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(folder.parent.parent))
    export.main(["--run", "experts", "--to", str(tmp_path / "new"), "--dtype", "bfloat16"])
    whole, rounded = load(folder), load(tmp_path / "new")
    for (name, a), (_, b) in zip(whole.state_dict().items(), rounded.state_dict().items(), strict=True):
        assert b.dtype == torch.bfloat16 and torch.equal(a.bfloat16(), b), name
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {path.name for path in folder.iterdir()} - {"settings.json", "summary.json", "tokenizer"}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_loaded_here_is_what_was_trained(exported, shape, tmp_path):
    ours, folder = exported[shape]
    model, tokenizer, facts = hf_export.load_run(str(folder), CPU)
    assert model.config == ours.config and tokenizer.hash == TOKENIZER.hash
    assert facts["step"] == 40 and facts["val_bpb"] == 1.5 and facts["revision"] == "1"
    for name in ("config.json", "model.safetensors"):  # a model needs no more
        shutil.copy(folder / name, tmp_path / name)
    alone = hf_export.load_model(tmp_path, CPU).state_dict()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, alone[name]) and torch.equal(weight, model.state_dict()[name]), name


WITHOUT_EITHER = """
import sys
sys.modules["transformers"] = sys.modules["tokenizers"] = None  # importing one raises ImportError
from scripts import export
export.main(sys.argv[1:])
"""


@pytest.mark.slow  # seconds to import torch
def test_the_command_needs_neither_library(exported, tmp_path):
    _, folder = exported["plain"]
    base = folder.parent.parent
    command = [sys.executable, "-c", WITHOUT_EITHER, "--run", "plain", "--to", str(tmp_path / "new")]
    environment = {**os.environ, "NANOMUON_BASE_DIR": str(base)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    assert f"export: {tmp_path}/new (float32)" in result.stdout
    for file in (tmp_path / "new").iterdir():  # the card has the name of its folder
        assert file.read_bytes().replace(b"# new", b"# plain") == (folder / file.name).read_bytes()


def test_the_card_says_what_is_known_and_nothing_of_the_machine(exported):
    ours, folder = exported["experts"]
    card = (folder / "README.md").read_text()
    for words in ("# experts", "| 1.5 |", "123456", "`texts`", "| steps | 40 |", "float32", "MIT"):
        assert words in card
    assert "/home" not in card and "trust_remote_code=True" in card
    assert card.startswith("---\nlibrary_name: transformers\n")
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    assert f"of {parameters:,} parameters" in card


def test_what_cannot_be_exported_is_said_in_one_line(exported, tmp_path, monkeypatch):
    _, folder = exported["plain"]
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(folder.parent.parent))
    with pytest.raises(InputError, match="holds no finished model"):
        export.main(["--run", "nothing", "--to", str(tmp_path / "new")])
    with pytest.raises(InputError, match="has no checkpoint last; it has none"):
        export.main(["--run", "plain", "--to", str(tmp_path / "new"), "--checkpoint", "last"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(InputError, match="not an empty folder"):
        export.main(["--run", "plain", "--to", str(tmp_path / "full")])
    other = tmp_path / "other"
    write_run(other, depth=2)
    shutil.copy(folder / "config.json", other / "config.json")
    with pytest.raises(InputError, match="does not fit the model"):
        export.main(["--run", str(other), "--to", str(tmp_path / "new")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "other"]


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
def test_garbage_in_a_field_of_the_config_is_one_line(exported, tmp_path, key, value):
    _, folder = exported["experts"]
    shutil.copy(folder / "model.safetensors", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    write_json(tmp_path / "config.json", {**config, key: value})
    with pytest.raises(InputError) as caught:
        hf_export.load_model(tmp_path, CPU)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    if isinstance(value, int) and value > 1:  # what could cost memory is refused before it is built
        assert key in str(caught.value) or "does not fit" in str(caught.value)


TASK = """
task: two_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {items}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list:
  - metric: acc
"""


@pytest.mark.slow
@torch.no_grad()
def test_lm_eval_finds_the_likelihoods_that_the_model_here_gives(exported, tmp_path):
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed (extra peers)")
    ours, folder = exported["windows and groups"]
    rng = random.Random(0)
    items = []
    for _ in range(40):
        context = " ".join(rng.choices(["def", "return", "import", "self", "été"], k=3))
        choices = rng.sample(["value", "for in the", "12 345", "'text'"], k=2)
        items.append({"context": context, "choices": choices, "answer": rng.randrange(2)})
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "two_choices.yaml").write_text(TASK.format(items=tmp_path / "items.jsonl"))

    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "hf"),
        *("--model_args", f"pretrained={folder},trust_remote_code=True"),
        *("--tasks", "two_choices", "--include_path", str(tmp_path)),
        *("--device", "cpu", "--batch_size", "8", "--log_samples", "--output_path", str(tmp_path / "out")),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    environment = {**os.environ, **offline}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr

    [samples] = tmp_path.glob("out/**/samples_two_choices*.jsonl")
    right = 0
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        likelihoods = []
        for choice in sample["doc"]["choices"]:
            context = [TOKENIZER.bos_id, *TOKENIZER.encode(sample["doc"]["context"])]
            whole = [TOKENIZER.bos_id, *TOKENIZER.encode(f"{sample['doc']['context']} {choice}")]
            assert whole[: len(context)] == context
            logs = ours(torch.tensor([whole[:-1]])).log_softmax(-1)[0]
            positions = range(len(context) - 1, len(whole) - 1)
            likelihoods.append(sum(logs[i, whole[i + 1]].item() for i in positions))
        found = [float(likelihood) for [[likelihood, _]] in sample["resps"]]
        assert found == pytest.approx(likelihoods, abs=1e-3)
        right += likelihoods.index(max(likelihoods)) == sample["doc"]["answer"]
    [results] = tmp_path.glob("out/**/results*.json")
    accuracy = json.loads(results.read_text())["results"]["two_choices"]["acc,none"]
    assert accuracy == pytest.approx(right / 40) and 0 < right < 40
