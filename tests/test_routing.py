"""Which parameters Muon trains in models of other libraries, and why; the tables of docs/routing.md.

`python -m tests.test_routing` prints the tables.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from nanomuon.optim import MuonAdamW
from nanomuon.param_groups import build_param_groups, clean_name, find_heads, routing_table

MUON = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0)
ADAMW = dict(lr=1e-3, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
PAGE = Path(__file__).parent.parent / "docs" / "routing.md"


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)


class ResNet(nn.Module):
    """The layers of torchvision's, with the depthwise convolutions of a ConvNeXt."""

    def __init__(self, classes=3):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 7, stride=2, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(ResidualBlock(8), ResidualBlock(8))
        self.fc = nn.Linear(8, classes)


class TorchTransformer(nn.Module):
    """torch's own Transformer with an embedding and a head under names that no list knows."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(64, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)
        self.head = nn.Linear(16, 64)


TEXT = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
SPECIAL_TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA = dict(TEXT, num_key_value_heads=1, head_dim=8, **SPECIAL_TOKENS)
QWEN_MOE = dict(num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=12)

# What a model is built from: the class and the configuration in `transformers`, and its arguments
TRANSFORMERS = {
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        dict(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **SPECIAL_TOKENS),
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "Qwen 3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", dict(LLAMA, num_local_experts=4)),
    "Qwen 2 MoE": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", dict(LLAMA, **QWEN_MOE)),
    "BERT, masked tokens": ("BertForMaskedLM", "BertConfig", TEXT),
    "BERT, classes": ("BertForSequenceClassification", "BertConfig", dict(TEXT, num_labels=3)),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        dict(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    ),
    "ViT": (
        "ViTForImageClassification",
        "ViTConfig",
        dict(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            num_labels=3,
        ),
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        dict(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, **SPECIAL_TOKENS),
    ),
}
OTHERS = {"torch.nn.Transformer": TorchTransformer, "ResNet": ResNet}

MODELS = [*TRANSFORMERS, *OTHERS]


def build(name):
    torch.manual_seed(0)
    if name in OTHERS:
        return OTHERS[name]()
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, config, arguments = TRANSFORMERS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**arguments))


def rows_of(model, **options):
    """[(name, shape, kind, why)] of the routing table."""
    lines = routing_table(model, **options).splitlines()[1:]
    return [tuple(re.split(r"\s{2,}", line)) for line in lines]


def roles_of(model):
    """{role: (kind, why)} of the parameters with 2 or more dimensions; all layers have the same."""
    roles = {}
    for name, shape, kind, why in rows_of(model):
        if "x" not in shape:
            assert kind == "adamw", name
            continue
        role = re.sub(r"\.\d+(?=\.)", ".*", name)
        assert roles.setdefault(role, (kind, why)) == (kind, why)
    return roles


def markdown(name):
    """The table of a model for docs/routing.md."""
    lines = [f"### {name}", "", "| parameter | kind | why |", "| --- | --- | --- |"]
    for role, (kind, why) in roles_of(build(name)).items():
        lines.append(f"| `{role}` | {kind} | {why} |")
    return "\n".join(lines)


def kinds(model, **options):
    groups = build_param_groups(model, muon=MUON, adamw=ADAMW, **options)
    MuonAdamW(groups)  # what is built is what the optimizer takes
    return {name: group["kind"] for group in groups for name in group["names"]}


@pytest.mark.parametrize("name", MODELS)
def test_every_role_has_its_kind_and_reason_on_the_page(name):
    assert markdown(name) in PAGE.read_text(), "python -m tests.test_routing prints the tables"


@pytest.mark.parametrize("name", MODELS)
def test_one_step_on_every_model(name, monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    model = build(name)
    groups = build_param_groups(model, muon=MUON, adamw=ADAMW)
    trained = [param for group in groups for param in group["params"]]
    assert len(trained) == len(set(trained)) and set(trained) == set(model.parameters())
    before = [param.detach().clone() for param in trained]
    for param in trained:
        param.grad = torch.randn_like(param)
    MuonAdamW(groups).step()
    for param, old in zip(trained, before, strict=True):
        assert param.isfinite().all() and not torch.equal(param, old)


class Named(nn.Module):
    """A module with these children, in this order."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def mlp(width, hidden):
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


def stack():
    return nn.ModuleList([mlp(16, 24), mlp(16, 24)])


def muon_names(model, **options):
    return [name for name, kind in kinds(model, **options).items() if kind == "muon"]


BLOCKS = ["blocks.0.0.weight", "blocks.0.2.weight", "blocks.1.0.weight", "blocks.1.2.weight"]


@pytest.mark.parametrize(
    "children",
    [
        lambda: dict(emb=nn.Embedding(64, 16), blocks=stack(), head=nn.Linear(16, 64)),
        lambda: dict(unembed=nn.Linear(16, 64), emb=nn.Embedding(64, 16), blocks=stack()),
        lambda: dict(blocks=stack(), classify=nn.Linear(16, 5), positions=nn.Embedding(9, 16)),
        lambda: dict(blocks=stack(), tokens=nn.Linear(16, 64), value=nn.Linear(16, 1)),
        lambda: dict(blocks=stack(), heads=nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])),
        lambda: dict(blocks=stack(), bag=nn.EmbeddingBag(64, 16)),
    ],
    ids=["last", "first, of the vocabulary", "before an embedding", "two", "a list", "none"],
)
def test_heads_are_found_wherever_they_are(children):
    assert muon_names(Named(**children())) == BLOCKS


def test_a_layer_is_hidden_if_its_width_is_taken_or_blocks_have_it():
    pooler = Named(emb=nn.Embedding(64, 16), pooler=nn.Linear(16, 16))
    assert muon_names(pooler) == ["pooler.weight"]
    projected = Named(proj=nn.Linear(16, 8), norm=nn.LayerNorm(8))
    assert muon_names(projected) == ["proj.weight"]
    gated = Named(blocks=nn.ModuleList(Named(up=nn.Linear(16, 16), gate=nn.Linear(16, 1)) for _ in range(2)))
    assert find_heads(gated) == [] and "blocks.1.gate.weight" in muon_names(gated)
    sequential = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    assert muon_names(sequential) == ["0.weight"]


def test_tied_parameters_appear_once_as_embeddings():
    head = nn.Linear(16, 64, bias=False)
    model = Named(head=head, blocks=stack(), emb=nn.Embedding(64, 16))
    model.emb.weight = head.weight
    assert muon_names(model) == BLOCKS
    rows = {name: why for name, _, _, why in rows_of(model)}
    assert rows["head.weight"] == "weight of an nn.Embedding" and "emb.weight" not in rows


def test_frozen_parameters_are_left_out_and_count_for_the_rule():
    model = Named(blocks=stack(), head=nn.Linear(16, 64))
    model.head.requires_grad_(False)
    assert muon_names(model) == BLOCKS and "head.weight" not in kinds(model)
    model.blocks[1].requires_grad_(False)
    assert muon_names(model) == BLOCKS[:2]


def test_skip_keys_and_the_predicate_still_decide():
    model = Named(emb=nn.Embedding(64, 16), blocks=stack(), head=nn.Linear(16, 64, bias=False))
    assert muon_names(model, skip_keys=["blocks.1"]) == BLOCKS[:2]
    assert ("emb.weight", "64x16", "adamw", "name has emb") in rows_of(model, skip_keys=["emb"])
    chosen = ["emb.weight", "head.weight"]
    assert muon_names(model, is_muon=lambda name, param: name in chosen) == chosen


def test_shapes_that_are_no_matrices():
    model = Named(
        audio=nn.Conv1d(16, 16, 3),
        video=nn.Conv3d(3, 16, 2),
        gray=nn.Conv2d(1, 16, 3),
        depthwise=nn.Conv2d(16, 16, 3, groups=16),
        grouped=nn.Conv2d(16, 16, 3, groups=4),
    )
    model.positions = nn.Parameter(torch.zeros(1, 9, 16))
    model.experts = nn.Parameter(torch.zeros(4, 8, 16))
    model.experts_bias = nn.Parameter(torch.zeros(4, 8))
    model.scale_of_heads = nn.Parameter(torch.ones(4, 1, 1))
    model.magnitudes = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    directions = "magnitudes.parametrizations.weight.original1"
    assert muon_names(model) == ["experts", "gray.weight", "grouped.weight", directions]
    assert muon_names(model, expert_keys=["positions"])[0] == "positions"  # one expert
    reasons = {name: why for name, _, _, why in rows_of(model)}
    assert reasons["experts"] == "batch of matrices" and reasons["experts_bias"] == "a bias"
    assert reasons["grouped.weight"] == "matrix of 16x36" and "5" not in reasons["video.weight"]


def test_names_are_those_of_the_model_inside_of_wrappers():
    model = Named(emb=nn.Embedding(64, 16), blocks=stack(), head=nn.Linear(16, 64))
    assert clean_name("module._orig_mod.module.a.module") == "a.module" and clean_name("module") == "module"
    for wrapped in (nn.DataParallel(model), torch.compile(nn.DataParallel(model)), nn.DataParallel(model)):
        assert kinds(wrapped) == kinds(model) and routing_table(wrapped) == routing_table(model)
        assert muon_names(wrapped, is_muon=lambda name, param: name in BLOCKS) == BLOCKS


if __name__ == "__main__":
    print("\n\n".join(markdown(name) for name in MODELS))
