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
from nanomuon.generate import generate
from nanomuon.runtime import InputError, Runtime
from nanomuon.tokenizer import BOS, Tokenizer
from scripts import export
from tests.test_gpt import build
from tests.texts import random_texts

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

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
    nothing = dict(options={}, compile=False, rows=1, layout="", trained_with={})
    write_json(run_dir / "settings.json", {**nothing, "trained_on": trained_on})
    write_json(run_dir / "summary.json", {"steps": 40, "val_bpb": 1.5, "tokens": 123456})
    hf_export.export(run_dir, model, model.config, TOKENIZER, facts)
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


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_generation_is_ours_with_and_without_cache(exported, shape):
    ours, folder = exported[shape]
    theirs = load(folder)
    prompt = [TOKENIZER.bos_id, *TOKENIZER.encode("def x")]
    expected = prompt + list(generate(ours, prompt, 20, temperature=0, stop=TOKENIZER.bos_id))
    for use_cache in (True, False):
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, use_cache=use_cache)
        assert out[0].tolist()[: len(expected)] == expected
        assert out[0].tolist()[len(expected) :] in ([], [TOKENIZER.bos_id])


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(exported, shape):
    """The short windows and the convolution would see it, if they were not told."""
    _, folder = exported[shape]
    model, tokenizer = load(folder), load_tokenizer(folder)
    texts = ["def return import self", "x", "for in the value of"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert not batch["attention_mask"][1, 0] and batch["attention_mask"][:, -1].all()
    whole = model(**batch).logits
    together = model.generate(**batch, max_new_tokens=12, do_sample=False)
    for row, text in enumerate(texts):
        alone = tokenizer(text, return_tensors="pt")
        length = alone["input_ids"].size(1)
        torch.testing.assert_close(whole[row, -length:], model(**alone).logits[0], rtol=0, atol=1e-5)
        expected = model.generate(**alone, max_new_tokens=12, do_sample=False)[0, length:].tolist()
        assert together[row, batch["input_ids"].size(1) :].tolist()[: len(expected)] == expected


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
    """2,000 of them: code, many scripts, emoji, what looks like special tokens, long runs."""
    rng = random.Random(0)
    code = Path(hf_export.__file__).read_text().splitlines(keepends=True)
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
        '<|bos|>[]{}()=_#"',
    ]
    found = [BOS, f"a{BOS}{BOS} b", "<|endoftext|>", "<s>[INST]", f" {BOS}\n", "", "\0"]
    for unit in (" ", "\n", "\r\n", "\t", "1", "9 ", "a", "^", "é", "😀", "  x", " \n"):
        found += [unit * count for count in (1, 2, 3, 7, 100, 3000)]
    while len(found) < 2000:
        kind = rng.randrange(3)
        if kind == 0:
            start = rng.randrange(len(code))
            text = "".join(code[start : start + rng.randint(1, 8)])
        elif kind == 1:
            text = "".join(rng.choices(rng.choice(alphabets), k=rng.randint(1, 60)))
        else:
            text = "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 60)))
        found.append(text)
    return found


def test_token_ids_of_2000_strings_are_ours(exported, tmp_path):
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
    assert loaded.batch_decode(expected) == texts
    assert loaded.decode([TOKENIZER.bos_id, *TOKENIZER.encode("x")], skip_special_tokens=True) == "x"


def test_bytes_that_are_no_text_decode_as_here(exported):
    loaded = load_tokenizer(exported["plain"][1])
    rng = random.Random(1)
    for _ in range(50):
        ids = rng.choices(range(TOKENIZER.vocab_size), k=20)
        assert loaded.decode(ids) == TOKENIZER.decode(ids)


@pytest.mark.filterwarnings("ignore:.*activation_checkpointing.*:FutureWarning")  # the new name of late 5.x
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_trainer_takes_a_step_that_is_saved_and_loaded(exported, tmp_path, checkpointing):
    ours, folder = exported["windows and groups"]
    model = load(folder)
    if checkpointing:
        model.gradient_checkpointing_enable()
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
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=data)
    result = trainer.train()
    assert result.training_loss == pytest.approx(expected.item(), abs=1e-4)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), f"{name} was not trained"

    trainer.save_model(tmp_path / "tuned")
    tuned = load(tmp_path / "tuned").eval()
    with torch.no_grad():
        assert torch.equal(tuned(rows).logits, model.eval()(rows).logits)


def test_a_pipeline_continues_text(exported):
    ours, folder = exported["plain"]
    pipeline = transformers.pipeline("text-generation", str(folder), trust_remote_code=True, device="cpu")
    [answer] = pipeline("def x", max_new_tokens=6, do_sample=False)
    prompt = [TOKENIZER.bos_id, *TOKENIZER.encode("def x")]
    expected = generate(ours, prompt, 6, temperature=0, stop=TOKENIZER.bos_id)
    assert answer["generated_text"] == "def x" + TOKENIZER.decode(list(expected))


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
def test_what_is_loaded_here_is_what_was_trained(exported, shape):
    ours, folder = exported[shape]
    model, tokenizer, facts = hf_export.load_run(str(folder), Runtime(torch.device("cpu"), torch.float32))
    assert model.config == ours.config and tokenizer.hash == TOKENIZER.hash and facts["step"] == 40
    for (name, a), (_, b) in zip(ours.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


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
    for file in (tmp_path / "new").iterdir():
        assert file.read_bytes() == (folder / file.name).read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_the_card_says_what_is_known_and_nothing_of_the_machine(exported):
    _, folder = exported["experts"]
    card = (folder / "README.md").read_text()
    for words in ("# experts", "1.5", "123456", "`texts`", "4, of which a token visits 2", "MIT"):
        assert words in card
    assert "/home" not in card and "trust_remote_code=True" in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_what_cannot_be_exported_is_said_in_one_line(exported, tmp_path, monkeypatch):
    _, folder = exported["plain"]
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(folder.parent.parent))
    with pytest.raises(InputError, match="holds no finished model"):
        export.main(["--run", "nothing", "--to", str(tmp_path / "new")])
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
    shutil.copytree(folder, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    write_json(tmp_path / "run" / "config.json", {**config, key: value})
    with pytest.raises(InputError) as caught:
        hf_export.load_run(str(tmp_path / "run"), Runtime(torch.device("cpu"), torch.float32))
    assert str(tmp_path / "run") in str(caught.value) and "\n" not in str(caught.value)


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
