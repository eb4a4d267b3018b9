"""transformers and tokenizers on an exported run: the same logits, the same token ids."""

import copy
import importlib.util
import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file

from nanomuon import hf_export, trained
from nanomuon.generate import sample_texts
from nanomuon.runtime import Runtime, read_json, write_json
from nanomuon.tokenizer import BOS, Tokenizer
from scripts import export
from tests.mistakes import refused
from tests.test_gpt import build
from tests.texts import random_texts
from tests.training import call

transformers = pytest.importorskip("transformers")

CPU = Runtime(torch.device("cpu"), torch.float32)
TOKENIZER = Tokenizer.train([*random_texts(200), "".join(f"{' ' * i}x\n" for i in range(40))], 320)
SHAPES = {
    "plain": dict(depth=3),
    "windows and groups": dict(depth=4, heads=4, kv_heads=2, window_pattern="SL"),
    "no norm of queries and keys": dict(qk_norm=False, width=64, heads=1, kv_heads=1),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """{shape: (our model, its exported folder)}. transformers copies their modules to a temporary folder."""
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
    run_dir.mkdir(parents=True)
    settings = dict(options={}, compile=False, rows=1, world_size=1, trained_with={})
    settings["trained_on"] = {"tokenizer": TOKENIZER.hash}
    write_json(run_dir / "settings.json", settings)
    hf_export.export(run_dir, model, TOKENIZER)
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
        theirs = copy.deepcopy(theirs)
        out = theirs(tokens[:, first:end], cache=copy.deepcopy(cache), use_cache=cache is None)
        parts.append(out.logits)
        cache = out[-1]  # by whichever name
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_new_model_is_initialized_and_another_cache_is_refused(exported):
    _, folder = exported["plain"]
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    expected = build(vocab_size=TOKENIZER.vocab_size, seq_len=32, **SHAPES["plain"])
    expected.init_weights(0)
    tokens = torch.randint(TOKENIZER.vocab_size, (2, 9))
    torch.testing.assert_close(model(tokens).logits, expected(tokens), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="cannot be a DynamicCache: the model makes its own"):
        model(tokens, past_key_values=transformers.DynamicCache())


@torch.no_grad()
def test_what_would_compute_something_else_is_refused(exported):
    _, folder = exported["plain"]
    model = load(folder)
    tokens, mask = torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    counted = mask.cumsum(1) - 1
    for usual in (counted, counted.relu(), counted.masked_fill(mask == 0, 1), torch.arange(6)[None]):
        expected = model(tokens, attention_mask=mask).logits
        assert torch.equal(model(tokens, attention_mask=mask, position_ids=usual).logits, expected)
    with pytest.raises(ValueError, match="position_ids must count up by one"):
        model(tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))  # two texts
    cache = model(tokens, use_cache=True)[-1]
    with pytest.raises(ValueError, match="only the first call with a cache may have padding"):
        model(tokens, attention_mask=mask, cache=cache)


def test_automatic_placement_leaves_the_model_on_one_device(exported):
    accelerate = pytest.importorskip("accelerate")
    model = load(exported["plain"][1])
    size = sum(parameter.nbytes for parameter in model.parameters())
    room = {0: size // 2, 1: 4 * size}
    places = accelerate.infer_auto_device_map(model, room, model._no_split_modules)
    assert set(places.values()) == {1}


def test_a_model_with_another_vocabulary_is_the_same_on_the_tokens_before(exported, tmp_path):
    model, size = load(exported["plain"][1]), TOKENIZER.vocab_size
    tokens = torch.randint(size, (2, 9))
    before = model(tokens).logits
    model.resize_token_embeddings(size + 5)
    model.save_pretrained(tmp_path)
    for each in (model, load(tmp_path)):
        logits = each(tokens).logits
        assert logits.shape == (2, 9, size + 5)
        torch.testing.assert_close(logits[..., :size], before)
        assert each(tokens + 5, labels=tokens + 5).loss.isfinite()


TEXTS = ["def return import self", "x", "for in the value of"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_text_is_ours_with_and_without_a_cache_and_behind_padding(exported, shape, use_cache):
    """Without the mask, short windows and the convolution would see the padding on the left."""
    ours, folder = exported[shape]
    model, tokenizer = load(folder), load_tokenizer(folder)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert not batch["attention_mask"][1, 0] and batch["attention_mask"][:, -1].all()
    found = model.generate(**batch, max_new_tokens=20, do_sample=False, use_cache=use_cache)
    expected = sample_texts(ours, TOKENIZER, TEXTS, 20, temperature=0)
    assert tokenizer.batch_decode(found, skip_special_tokens=True) == expected


def strings():
    """500 strings: many scripts, emoji, control characters, lookalikes of special tokens, long runs."""
    rng = random.Random(0)
    alphabets = [
        "aeiou ÄÖÜßéñøĳǅſK'",
        "абвгдеё αβγ ϐ",
        "你好世界，。、 こんにちは カタカナｶﾅ 안녕하세요 ",
        "مرحبا بالعالم ١٢٣ שלום עולם",
        "नमस्ते दुनिया १२३ ไทยภาษา ๑๒",
        "🙂👩‍👩‍👧‍👦🏳️‍🌈é̂ ½²③Ⅷ 12345",
        "\u00a0\u2028\u2029\u200b\u3000\x85\ufeff\t x",
        "'s't'LL'Ve'ſ' a",
        "".join(map(chr, range(32))) + "\x7f\x9b ",
        '<|bos|>[]{}()=_#"',
    ]
    alphabets.append("".join(alphabets))
    found = [BOS, f"a{BOS}{BOS} b", "<|endoftext|>", "<s>[INST]", "", "\0"]
    for unit in (" ", "\n", "\r\n", "\t", "1", "9 ", "a", "😀", " \n"):
        found += [unit * count for count in (1, 2, 3, 7, 100, 3000)]
    while len(found) < 500:
        found.append("".join(rng.choices(rng.choice(alphabets), k=rng.randint(1, 60))))
    return found


def test_token_ids_of_500_strings_are_ours(exported, tmp_path):
    _, folder = exported["plain"]
    loaded = load_tokenizer(folder)
    loaded.save_pretrained(tmp_path)
    again = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = strings()
    expected = [TOKENIZER.encode(text) for text in texts]
    assert loaded(texts, add_special_tokens=False)["input_ids"] == expected
    assert again(texts)["input_ids"] == [[TOKENIZER.bos_id, *ids] for ids in expected]
    assert loaded.batch_decode(expected) == texts
    every_token = range(TOKENIZER.vocab_size)  # bytes that are not text too
    assert len(loaded) == len(every_token) and loaded.decode(every_token) == TOKENIZER.decode(every_token)


def test_the_loss_trains_and_a_model_saved_again_loads_again(exported, tmp_path):
    ours, folder = exported["windows and groups"]
    model = load(folder)
    rows = torch.randint(TOKENIZER.vocab_size - 1, (4, 16))
    labels = rows.clone()
    labels[:, :3] = -100
    loss = model(rows, labels=labels).loss
    expected = ours(rows[:, :-1], torch.where(labels < 0, -1, labels)[:, 1:].contiguous())
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path, True)
    resumed = load(folder)
    resumed.load_state_dict(load_file(tmp_path / "model.safetensors"), False)  # as in Trainer
    with torch.no_grad():
        after = model.eval()(rows).logits
        assert torch.equal(resumed(rows).logits, after)
        assert not torch.equal(after, ours(rows)) and torch.equal(load(tmp_path)(rows).logits, after)
        torch.testing.assert_close(trained.load_model(tmp_path, CPU)(rows), after, rtol=0, atol=1e-5)


def test_an_export_in_bfloat16_is_the_same_model_rounded(exported, tmp_path, monkeypatch, capsys):
    ours, folder = exported["plain"]
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(folder.parent.parent))
    export.main(["--run", "plain", "--to", str(tmp_path / "new"), "--dtype", "bfloat16"])
    assert f"export: {tmp_path}/new (bfloat16)" in capsys.readouterr().out
    theirs = load(tmp_path / "new", dtype="auto")
    rounded = {name: weight.bfloat16() for name, weight in ours.state_dict().items()}
    torch.testing.assert_close(dict(theirs.model.state_dict()), rounded, rtol=0, atol=0)
    in_bf16 = trained.load_model(tmp_path / "new", Runtime(torch.device("cpu"), torch.bfloat16))
    tokens = torch.randint(TOKENIZER.vocab_size, (2, 32))
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, in_bf16(tokens))
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    assert f"of {parameters:,} parameters" in (folder / "README.md").read_text()


def test_an_export_that_cannot_be_made_is_one_line(exported, tmp_path, monkeypatch):
    _, folder = exported["plain"]
    monkeypatch.setenv("NANOMUON_BASE_DIR", str(folder.parent.parent))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    other = tmp_path / "other"
    write_run(other, depth=2)
    shutil.copy(folder / "config.json", other / "config.json")
    for arguments, complaint in (
        ([f"{tmp_path}/full", "--to", f"{tmp_path}/new"], "has no finished model"),
        (["plain", "--to", f"{tmp_path}/full"], "not an empty folder"),
        ([str(other), "--to", f"{tmp_path}/new"], "or does not fit the model of config.json in this version"),
    ):
        with refused(complaint):
            export.main(["--run", *arguments])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "other"]


TASK = """
task: two_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: items.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.mark.slow
@torch.no_grad()
def test_lm_eval_scores_a_run_folder_as_our_model_does(exported, tmp_path):
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed (extra peers)")
    ours, folder = exported["windows and groups"]
    rng, items, right = random.Random(0), [], 0
    for _ in range(40):
        context = " ".join(rng.choices(["def", "return", "import", "self", "été"], k=3))
        choices = rng.sample(["value", "for in the", "12 345", "'text'"], k=2)
        items.append({"context": context, "choices": choices, "answer": rng.randrange(2)})
        start, likelihoods = len(TOKENIZER.encode(context)), []
        for choice in choices:
            tokens = torch.tensor([[TOKENIZER.bos_id, *TOKENIZER.encode(f"{context} {choice}")]])
            logs = ours(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])
            likelihoods.append(logs[0, start:].sum())
        right += (likelihoods[1] > likelihoods[0]) == items[-1]["answer"]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "two_choices.yaml").write_text(TASK)

    command = ["python", "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--tasks", "two_choices"]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True", "--batch_size", "8"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    result = call(*command, folder=tmp_path, **offline)
    assert result.returncode == 0, result.stdout + result.stderr
    [results] = tmp_path.glob("out/**/results*.json")
    accuracy = read_json(results)["results"]["two_choices"]["acc,none"]
    assert accuracy == pytest.approx(float(right / 40)) and 0 < right < 40
