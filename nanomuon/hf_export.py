"""A finished run in the layout of Hugging Face: a folder that transformers and tokenizers load.

Written without either of them. How the model computes is in `modeling_nanomuon.py`, which is copied into the
folder: transformers runs that file where it is given `trust_remote_code=True`. Nothing here runs it.
"""

import os
import shlex
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nanomuon.files import write_json, write_tensors, write_text
from nanomuon.finished_run import describe_run
from nanomuon.gpt import GATE_INPUTS, ROPE_BASE, TAPS, GPTConfig
from nanomuon.head_loss import LOGIT_CAP
from nanomuon.model_card import model_card
from nanomuon.plan import meta_model
from nanomuon.runtime import InputError, print0
from nanomuon.tokenizer import BOS, Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHARD_BYTES = 5 * 10**9  # of one file of weights
MODEL_FILE = Path(__file__).with_name("modeling_nanomuon.py")


def export_at_the_end(run_dir: Path, summary: dict) -> None:
    """Write runs/NAME/hf/, in the dtype that the run computed in, where one file has room for the weights.

    The run is complete without it: what goes wrong is told in one line. summary: what summary.json will hold.
    """
    folder = run_dir / "hf"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        export_run(run_dir, folder, summary["dtype"], summary, most_bytes=SHARD_BYTES)
        print0(f"export: {folder}")
    except Exception as error:  # whatever it is, the run is worth more
        command = f"python -m scripts.export --run {shlex.quote(run_dir.name)} --to FOLDER"
        print0(f"{folder} was not written ({' '.join(str(error).split())}); {command} writes it")


def export_run(run_dir: Path, folder: Path, dtype: str, summary: dict, most_bytes: int | None = None) -> None:
    """Write the run in run_dir, whose model is exported, to `folder`, whole or not at all.

    dtype: of the weights: float32, as they were trained, or bfloat16. summary: what summary.json holds or
    will, for the model card; it may be empty. InputError where there is no exported model, where the folder
    has something in it, and where the weights would take more than most_bytes.
    """
    folder = folder.resolve()  # so that "." has a name
    config, tokenizer, about = describe_run(run_dir)
    shapes = {name: tensor.shape for name, tensor in meta_model(config).state_dict().items()}
    size = sum(shape.numel() for shape in shapes.values()) * DTYPES[dtype].itemsize
    if most_bytes is not None and size > most_bytes:
        raise InputError(f"it would take {size / 1e9:.1f} GB")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder: choose another, or delete it")

    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write_weights(run_dir / "model.safetensors", shapes, DTYPES[dtype], temporary)
        write_json(temporary / "config.json", model_config(config, tokenizer, dtype))
        write_json(temporary / "generation_config.json", special_ids(tokenizer))
        write_json(temporary / "tokenizer.json", tokenizer_json(tokenizer))
        write_json(temporary / "tokenizer_config.json", tokenizer_config(config))
        shutil.copyfile(MODEL_FILE, temporary / MODEL_FILE.name)
        write_text(temporary / "README.md", model_card(run_dir, config, about, summary, dtype))
        os.replace(temporary, folder)  # an empty folder gives way
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def special_ids(tokenizer: Tokenizer) -> dict:
    """One token begins a document, and so ends the one before it; padding has no meaning of its own."""
    return {name: tokenizer.bos_id for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def model_config(config: GPTConfig, tokenizer: Tokenizer, dtype: str) -> dict:
    """config.json: keywords of NanomuonConfig in modeling_nanomuon.py, and where transformers finds it."""
    layers = range(config.depth)
    module = MODEL_FILE.stem
    return {
        "architectures": ["NanomuonForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.NanomuonConfig",
            "AutoModelForCausalLM": f"{module}.NanomuonForCausalLM",
        },
        "model_type": "nanomuon",
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.seq_len,
        "attention_windows": [config.window(layer) for layer in layers],
        "value_embed_layers": [layer for layer in layers if config.has_value_embed(layer)],
        "value_gate_inputs": GATE_INPUTS,
        "qk_norm": config.qk_norm,
        "key_offset": config.key_offset,
        "convolution_taps": TAPS,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "logit_cap": LOGIT_CAP,
        "rotary_base": ROPE_BASE,
        "tie_word_embeddings": False,
        **special_ids(tokenizer),
    }


def split_into_shards(sizes: dict[str, int]) -> list[list[str]]:
    """Names of tensors by file, in order: as many a file as SHARD_BYTES has room for, at least one.

    sizes: bytes of each tensor.
    """
    shards = [[]]
    room = SHARD_BYTES
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def write_weights(source: Path, shapes: dict[str, torch.Size], dtype: torch.dtype, folder: Path) -> None:
    """The tensors of the file `source`, in `dtype`, under the names they have there; those of one new file
    are in memory at a time.

    One file, or several and an index that says which has what. InputError where the tensors are not those of
    the shapes.
    """
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    shards = split_into_shards(sizes)
    file_of = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file_of |= dict.fromkeys(names, file)
        try:
            with safe_open(source, framework="pt") as tensors:
                weights = {name: tensors.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise InputError(f"{source} does not fit the model of config.json: {error}") from error
        for name, tensor in weights.items():
            if tensor.shape != shapes[name]:
                raise InputError(f"{source} does not fit the model of config.json: {name} is {tensor.shape}")
            weights[name] = tensor.to(dtype)
        write_tensors(weights, folder / file, {"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        write_json(folder / "model.safetensors.index.json", index)


def tokenizer_json(tokenizer: Tokenizer) -> dict:
    """What the tokenizers library reads: the byte-level BPE of GPT-2 with our split pattern.

    <|bos|> is a word of the vocabulary that nothing merges into, so that no text encodes to it, as here. It
    is put before every text unless add_special_tokens=False is asked for: in training it begins every row and
    every document.
    """
    characters = byte_characters()
    words = []
    for token in tokenizer.vocab:
        words.append("".join(characters[byte] for byte in token))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {
        "type": "Split",
        "pattern": {"Regex": tokenizer.pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [tokenizer.bos_id], "tokens": [BOS]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # as in tiktoken, a piece of text that is a token needs no merges
            "vocab": {word: rank for rank, word in enumerate([*words, BOS])},
            "merges": [[words[left], words[right]] for left, right in merges(tokenizer.vocab)],
        },
    }


def byte_characters() -> list[str]:
    """The 256 printable characters by which GPT-2's byte-level BPE writes bytes: Latin-1 where it is
    printable and no space, then those from U+0100 on, in order.
    """
    characters = []
    stand_ins = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + stand_ins))
            stand_ins += 1
    return characters


def merges(vocab: list[bytes]) -> list[tuple[int, int]]:
    """Pairs of ranks in the order in which BPE merges them.

    tiktoken merges any two neighbours that together are a token, that of the lowest rank first: so every way
    to cut a token into two others is a merge.
    """
    rank_of = {token: rank for rank, token in enumerate(vocab)}
    pairs = []
    for token in vocab:
        for cut in range(1, len(token)):
            left, right = rank_of.get(token[:cut]), rank_of.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((left, right))
    return pairs


def tokenizer_config(config: GPTConfig) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": BOS,
        "pad_token": BOS,
        "split_special_tokens": True,  # what looks like a special token is text
        "padding_side": "left",  # for generation
        "model_max_length": config.seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
