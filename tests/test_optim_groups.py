"""Which parameters Muon trains, and why: our own model, those of other libraries, names, modules, shapes."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nanomuon.optim import MuonAdamW
from nanomuon.optim_groups import build_param_groups, clean_name, matches, routing_table
from tests.reference import MATRICES, OTHERS


class Named(nn.Module):
    """A module with these children, in this order."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def tree(shapes):
    """A module with parameters of these dotted names and shapes."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))
    return root


def stack():
    return nn.ModuleList([nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(2)])


BLOCKS = ["blocks.0.0.weight", "blocks.0.2.weight", "blocks.1.0.weight", "blocks.1.2.weight"]


def kinds(model, **options):
    groups = build_param_groups(model, muon=MATRICES, adamw=OTHERS, **options)
    MuonAdamW(groups)  # the optimizer takes them
    return {name: group["kind"] for group in groups for name in group["names"]}


def muon_names(model, **options):
    return [name for name, kind in kinds(model, **options).items() if kind == "muon"]


def rows_of(model, **options):
    """{name: (shape, kind, why)} of the routing table."""
    rows = [re.split(r"\s{2,}", line) for line in routing_table(model, **options).splitlines()[1:]]
    return {name: tuple(row) for name, *row in rows}


# ---- whole models


def torch_transformer():
    """torch's own Transformer with an embedding and a head under names that no list knows."""
    transformer = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)
    return Named(emb=nn.Embedding(64, 16), transformer=transformer, head=nn.Linear(16, 64))


def resnet():
    """The layers of torchvision's ResNet, with the depthwise convolution of a ConvNeXt."""
    block = Named(
        conv1=nn.Conv2d(8, 8, 3, bias=False),
        bn1=nn.BatchNorm2d(8),
        depthwise=nn.Conv2d(8, 8, 3, groups=8, bias=False),
    )
    return Named(conv1=nn.Conv2d(1, 8, 7, bias=False), layer1=nn.Sequential(block), fc=nn.Linear(8, 3))


TEXT = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
SPECIAL_TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA = dict(TEXT, num_key_value_heads=1, head_dim=8, **SPECIAL_TOKENS)
QWEN_MOE = dict(LLAMA, num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=12)
GPT2 = dict(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **SPECIAL_TOKENS)
T5 = dict(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
MAMBA = dict(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, **SPECIAL_TOKENS)
VIT = {key: value for key, value in TEXT.items() if key != "vocab_size"}
VIT |= dict(image_size=8, patch_size=4, num_labels=3)
# How to build a model: a function, or its class in `transformers` and the arguments of its configuration; and
# the parameters with 2 or more dimensions that AdamW trains
WHOLE_MODELS = {
    "GPT-2": (("GPT2LMHeadModel", GPT2), "transformer.wte transformer.wpe"),
    "Llama": (("LlamaForCausalLM", LLAMA), "model.embed_tokens lm_head"),
    "Gemma 3": (("Gemma3ForCausalLM", LLAMA), "model.embed_tokens"),
    "Qwen 2 MoE": (("Qwen2MoeForCausalLM", QWEN_MOE), "model.embed_tokens lm_head"),
    "BERT": (
        ("BertForSequenceClassification", dict(TEXT, num_labels=3)),
        "bert.embeddings.word_embeddings bert.embeddings.position_embeddings "
        "bert.embeddings.token_type_embeddings classifier",
    ),
    "T5": (
        ("T5ForConditionalGeneration", T5),
        "shared encoder.block.0.layer.0.SelfAttention.relative_attention_bias "
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    ),
    "ViT": (
        ("ViTForImageClassification", VIT),
        "vit.embeddings.cls_token vit.embeddings.position_embeddings classifier",
    ),
    "Mamba": (
        ("MambaForCausalLM", MAMBA),
        "backbone.embeddings backbone.layers.0.mixer.A_log backbone.layers.0.mixer.conv1d "
        "backbone.layers.1.mixer.A_log backbone.layers.1.mixer.conv1d",
    ),
    "torch.nn.Transformer": (torch_transformer, "emb head"),
    "ResNet": (resnet, "layer1.0.depthwise fc"),
}


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_models_of_other_libraries_are_divided_and_trained(name, eager):
    """AdamW trains embeddings, heads and non-matrices, Muon the rest; one step trains all of them."""
    torch.manual_seed(0)
    how, of_adamw = WHOLE_MODELS[name]
    if callable(how):
        model = how()
    else:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        kind = getattr(transformers, how[0])
        model = kind(kind.config_class(**how[1]))
    groups = build_param_groups(model, muon=MATRICES, adamw=OTHERS)
    optimizer = MuonAdamW(groups)
    found, before = set(), {}
    for group in groups:
        for param_name, param in zip(group["names"], group["params"], strict=True):
            before[param] = param.detach().clone()
            if group["kind"] == "adamw" and param.ndim >= 2:
                found.add(param_name.removesuffix(".weight"))
    assert found == set(of_adamw.split())
    assert before.keys() == set(model.parameters())
    for param in before:
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert not any(torch.equal(param, old) for param, old in before.items())
    assert all(param.isfinite().all() for param in before)


def test_bare_vectors_are_no_matrices_but_linear_layers_are():
    """peft's IA3 stores vectors as (1, n) and (n, 1): Muon moves them 80 times as far as AdamW."""
    model = Named(
        base=nn.Linear(8, 8, bias=False),
        lora_a=nn.Linear(8, 1, bias=False),
        lora_b=nn.Linear(1, 8, bias=False),
        ia3=nn.ParameterDict({"l": torch.ones(8, 1), "out": torch.ones(1, 8)}),
        score=nn.Linear(8, 3, bias=False),
    )
    model.scale = nn.Parameter(torch.ones(1, 1))
    assert muon_names(model, skip_keys=("score",)) == ["base.weight", "lora_a.weight", "lora_b.weight"]


# ---- names


def test_names_that_are_never_muons():
    """Names of embeddings and heads outside torch's own modules, and of parameters that are not matrices."""
    embeddings = "model.embed_tokens.weight tok_embeddings.weight wte value_embeds.0".split()
    heads = "lm_head.weight output.weight".split()
    others = [f"layers.0.{name}.weight" for name in ("mhc_attn", "mhc_ffn", "lambda_proj")]
    assert not muon_names(tree(dict.fromkeys([*embeddings, *heads, *others], (50, 8))))
    assert muon_names(tree({"a.output_proj.weight": (8, 8), "a.conv.weight": (8, 1, 4)})) == [
        "a.output_proj.weight",
        "a.conv.weight",
    ]


def test_names_are_compared_by_whole_components_without_those_of_wrappers():
    assert matches("a.output.weight", "output") and not matches("a.output_proj.weight", "output")
    assert matches("layers.0.experts.w1", "experts.w1") and not matches("experts.0.w1", "experts.w1")
    assert not matches("my_experts.w1", "experts.w1") and not matches("experts.w12", "experts.w1")
    assert matches("mlp._orig_mod.w1", "mlp.w1")
    assert clean_name("module._orig_mod.module.a._checkpoint_wrapped_module.module") == "a.module"
    assert clean_name("module") == "module"

    def model():
        return Named(emb=nn.Embedding(64, 16), blocks=stack(), output=nn.Linear(16, 64))

    wrapped = model()
    wrapped.blocks[0] = checkpoint_wrapper(torch.compile(wrapped.blocks[0]))
    wrapped = torch.compile(nn.DataParallel(wrapped))
    assert kinds(wrapped) == kinds(model()) and routing_table(wrapped) == routing_table(model())
    assert muon_names(wrapped, is_muon=lambda name, param: name in BLOCKS) == BLOCKS


def test_the_caller_decides():
    """Roles, skip keys, a predicate; frozen parameters are left out."""
    shapes = {"wte.weight": (9, 4), "lm_head.weight": (9, 4), "up.weight": (4, 4), "gate.weight": (4, 4)}
    model = tree({**shapes, "n.s": (3,)})
    roles = {"wte": dict(lr=0.3, betas=(0.9, 0.9)), "gate": dict(weight_decay=0.5)}
    groups = build_param_groups(model, muon=MATRICES, adamw=OTHERS, roles=roles)
    found = {tuple(group["names"]): (group["kind"], group["lr"], group["weight_decay"]) for group in groups}
    assert found == {
        ("wte.weight",): ("adamw", 0.3, 0.1),
        ("lm_head.weight", "n.s"): ("adamw", 1e-2, 0.1),
        ("up.weight",): ("muon", 0.02, 0.1),
        ("gate.weight",): ("muon", 0.02, 0.5),
    }
    assert groups[0]["betas"] == (0.9, 0.9) and OTHERS["betas"] == (0.9, 0.999)
    assert muon_names(model, skip_keys=["up"]) == ["gate.weight"]
    assert rows_of(model, skip_keys=["up"])["up.weight"] == ("4x4", "adamw", "name has up")
    assert muon_names(model, is_muon=lambda name, param: name.startswith("wte")) == ["wte.weight"]
    with pytest.raises(ValueError, match=r"n.s has shape \(3,\)"):
        kinds(model, is_muon=lambda name, param: True)
    model.up.weight.requires_grad_(False)
    assert "up.weight" not in kinds(model) and muon_names(model) == ["gate.weight"]


# ---- modules


@pytest.mark.parametrize(
    "model, of_muon",
    [
        (Named(emb=nn.Embedding(64, 16), blocks=stack(), head=nn.Linear(16, 64)), BLOCKS),
        (Named(unembed=nn.Linear(16, 64), emb=nn.Embedding(64, 16), blocks=stack()), BLOCKS),
        (Named(blocks=stack(), classify=nn.Linear(16, 5)), BLOCKS),
        (Named(blocks=stack(), classify=nn.Linear(16, 5).requires_grad_(False)), BLOCKS),
        (Named(blocks=stack(), bag=nn.EmbeddingBag(64, 16)), BLOCKS),
        (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), ["0.weight"]),
        # Another module takes the outputs of the last layer
        (Named(emb=nn.Embedding(64, 16), pooler=nn.Linear(16, 16)), ["pooler.weight"]),
        (Named(proj=nn.Linear(16, 8), norm=nn.LayerNorm(8)), ["proj.weight"]),
        # A norm over several dimensions multiplies elementwise
        (Named(proj=nn.Linear(16, 8), norm=nn.LayerNorm([4, 8]), rms=nn.RMSNorm([2, 4, 8])), ["proj.weight"]),
    ],
)
def test_heads_are_found_wherever_they_are(model, of_muon):
    assert muon_names(model) == of_muon


def test_a_model_may_have_no_matrices():
    fixed = nn.Linear(8, 4)
    weight = fixed.weight.detach()
    del fixed.weight
    fixed.register_buffer("weight", weight)
    assert muon_names(fixed) == []


def test_shapes_and_the_table_that_says_why():
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
    model.temperature = nn.Parameter(torch.ones(()))
    model.magnitudes = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    directions = "magnitudes.parametrizations.weight.original1"
    assert muon_names(model) == ["experts", "gray.weight", "grouped.weight", directions]
    # The leading dimension of a parameter that an expert key names counts matrices, or vectors
    of_experts = muon_names(model, expert_keys=["positions", "experts_bias"])
    assert of_experts[:2] == ["positions", "experts"] and "experts_bias" not in of_experts
    rows = rows_of(model)
    assert rows["experts"] == ("4x8x16", "muon", "batch of matrices")
    assert rows["experts_bias"] == ("4x8", "adamw", "a bias")
    assert rows["grouped.weight"] == ("16x4x3x3", "muon", "matrix of 16x36")
    assert rows["temperature"] == ("scalar", "adamw", "fewer than 2 dimensions")
    assert rows["depthwise.weight"][2] == "depthwise convolution: each channel by itself"
    assert routing_table(model).splitlines()[0].split() == ["parameter", "shape", "kind", "why"]
