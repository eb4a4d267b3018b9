"""Which parameters Muon trains, and why: our own model, those of other libraries, names, modules, shapes."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nanomuon.optim import MuonAdamW
from nanomuon.optim_groups import build_param_groups, clean_name, matches, route, routing_table
from tests.reference import MATRICES, OTHERS


class Named(nn.Module):
    """A module with these children, in this order."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


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


TEXT = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
SPECIAL_TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA = dict(TEXT, num_key_value_heads=1, head_dim=8, **SPECIAL_TOKENS)
QWEN_MOE = dict(LLAMA, num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=12)
GPT2 = dict(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **SPECIAL_TOKENS)
T5 = dict(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
MAMBA = dict(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, **SPECIAL_TOKENS)
VIT = {key: value for key, value in TEXT.items() if key != "vocab_size"}
VIT |= dict(image_size=8, patch_size=4, num_labels=3)
# Their classes in `transformers`, the arguments of their configurations, and the parameters with 2 or more
# dimensions that AdamW trains
WHOLE_MODELS = {
    "GPT-2": ("GPT2LMHeadModel", GPT2, "transformer.wte transformer.wpe"),
    "Llama": ("LlamaForCausalLM", LLAMA, "model.embed_tokens lm_head"),
    "Gemma 3": ("Gemma3ForCausalLM", LLAMA, "model.embed_tokens"),
    "Qwen 2 MoE": ("Qwen2MoeForCausalLM", QWEN_MOE, "model.embed_tokens lm_head"),
    "BERT": (
        "BertForSequenceClassification",
        dict(TEXT, num_labels=3),
        "bert.embeddings.word_embeddings bert.embeddings.position_embeddings "
        "bert.embeddings.token_type_embeddings classifier",
    ),
    "T5": (
        "T5ForConditionalGeneration",
        T5,
        "shared encoder.block.0.layer.0.SelfAttention.relative_attention_bias "
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    ),
    "ViT": (
        "ViTForImageClassification",
        VIT,
        "vit.embeddings.cls_token vit.embeddings.position_embeddings classifier",
    ),
    "Mamba": (
        "MambaForCausalLM",
        MAMBA,
        "backbone.embeddings backbone.layers.0.mixer.A_log backbone.layers.0.mixer.conv1d "
        "backbone.layers.1.mixer.A_log backbone.layers.1.mixer.conv1d",
    ),
}


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_models_of_other_libraries_are_divided_and_trained(name, eager):
    """AdamW trains embeddings, heads and non-matrices, Muon the rest; one step trains all of them."""
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    class_name, config, of_adamw = WHOLE_MODELS[name]
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**config))
    params = dict(model.named_parameters())
    groups = build_param_groups(model, muon=MATRICES, adamw=OTHERS)
    found = [name for group in groups if group["kind"] == "adamw" for name in group["names"]]
    found = {name.removesuffix(".weight") for name in found if params[name].ndim >= 2}
    assert found == set(of_adamw.split())
    before = {name: param.detach().clone() for name, param in params.items()}
    for param in params.values():
        param.grad = torch.randn_like(param)
    MuonAdamW(groups).step()
    for name, param in params.items():
        assert param.isfinite().all() and not torch.equal(param, before[name]), name


def test_torchs_own_transformer_is_divided():
    """Its embedding and head have names that no list knows; queries, keys and values are bare parameters."""
    transformer = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)
    model = Named(emb=nn.Embedding(64, 16), transformer=transformer, head=nn.Linear(16, 64))
    matrices = {name for name, param in model.named_parameters() if param.ndim == 2}
    assert {*muon_names(model)} == matrices - {"emb.weight", "head.weight"}


# ---- names


def test_names_that_are_never_muons():
    """Names of embeddings and heads outside torch's own modules, and of parameters that are not matrices."""
    never = "model.embed_tokens.weight tok_embeddings.weight wte value_embeds.0 lm_head.weight output.weight"
    never += " layers.0.mhc_attn.weight layers.0.mhc_ffn.weight layers.0.lambda_proj.weight"
    for name in (*never.split(), "a.output_proj.weight"):
        kind, _ = route(name, torch.ones(50, 8), {}, (), ())
        assert kind == ("adamw" if name in never else "muon"), name


def test_names_are_compared_by_whole_components_without_those_of_wrappers():
    assert matches("a.output.weight", "output") and not matches("a.output_proj.weight", "output")
    assert matches("layers.0.experts.w1", "experts.w1") and not matches("experts.0.w1", "experts.w1")
    assert not matches("my_experts.w1", "experts.w1") and not matches("experts.w12", "experts.w1")
    assert matches("mlp._orig_mod.w1", "mlp.w1")
    assert clean_name("module._orig_mod.module.a._checkpoint_wrapped_module.module") == "a.module"
    assert clean_name("module") == "module"

    def model():
        return Named(emb=nn.Embedding(64, 16), hidden=nn.Linear(16, 16), output=nn.Linear(16, 64))

    wrapped = model()
    wrapped.hidden = checkpoint_wrapper(torch.compile(wrapped.hidden))
    wrapped = torch.compile(nn.DataParallel(wrapped))
    assert kinds(wrapped) == kinds(model()) and routing_table(wrapped) == routing_table(model())
    assert muon_names(wrapped, is_muon=lambda name, param: name == "hidden.weight") == ["hidden.weight"]


def test_the_caller_decides():
    """Roles, skip keys, a predicate; frozen parameters are left out."""
    model = Named(
        wte=nn.Linear(4, 9, bias=False),
        lm_head=nn.Linear(4, 9, bias=False),
        up=nn.Linear(4, 4, bias=False),
        gate=nn.Linear(4, 4, bias=False),
        norm=nn.RMSNorm(4),
    )
    roles = {"wte": dict(lr=0.3, betas=(0.9, 0.9)), "gate": dict(weight_decay=0.5)}
    groups = build_param_groups(model, muon=MATRICES, adamw=OTHERS, roles=roles)
    found = {tuple(group["names"]): (group["kind"], group["lr"], group["weight_decay"]) for group in groups}
    assert found == {
        ("wte.weight",): ("adamw", 0.3, 0.1),
        ("lm_head.weight", "norm.weight"): ("adamw", 1e-2, 0.1),
        ("up.weight",): ("muon", 0.02, 0.1),
        ("gate.weight",): ("muon", 0.02, 0.5),
    }
    assert groups[0]["betas"] == (0.9, 0.9) and OTHERS["betas"] == (0.9, 0.999)
    assert muon_names(model, skip_keys=["up"]) == ["gate.weight"]
    assert rows_of(model, skip_keys=["up"])["up.weight"] == ("4x4", "adamw", "name has up")
    assert muon_names(model, is_muon=lambda name, param: name.startswith("wte")) == ["wte.weight"]
    with pytest.raises(ValueError, match=r"norm.weight has shape \(4,\)"):
        kinds(model, is_muon=lambda name, param: True)
    model.up.weight.requires_grad_(False)
    assert "up.weight" not in kinds(model) and muon_names(model) == ["gate.weight"]


# ---- modules


EMBEDDING, SQUARE, NARROWING = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 8)


@pytest.mark.parametrize(
    "children",
    [
        dict(emb=EMBEDDING, hidden=SQUARE, head=nn.Linear(16, 64)),
        dict(unembed=nn.Linear(16, 64), emb=EMBEDDING, hidden=SQUARE),
        dict(hidden=SQUARE, classify=nn.Linear(16, 5)),
        dict(hidden=SQUARE, classify=nn.Linear(16, 5).requires_grad_(False)),
        dict(hidden=SQUARE, bag=nn.EmbeddingBag(64, 16)),
        dict(emb=EMBEDDING, hidden=SQUARE),  # the last layer, but another module takes its outputs
        dict(hidden=NARROWING, norm=nn.LayerNorm(8)),
        # A norm over several dimensions multiplies elementwise
        dict(hidden=NARROWING, norm=nn.LayerNorm([4, 8]), rms=nn.RMSNorm([2, 4, 8])),
    ],
)
def test_heads_are_found_wherever_they_are(children):
    assert muon_names(Named(**children)) == ["hidden.weight"]


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
        lora_a=nn.Linear(16, 1, bias=False),
        lora_b=nn.Linear(1, 16, bias=False),
        # peft's IA3 stores vectors as (1, n) and (n, 1): Muon moves them 80 times as far as AdamW
        ia3=nn.ParameterDict({"l": torch.ones(16, 1), "out": torch.ones(1, 16), "scale": torch.ones(1, 1)}),
    )
    model.positions = nn.Parameter(torch.zeros(1, 9, 16))
    model.experts = nn.Parameter(torch.zeros(4, 8, 16))
    model.experts_bias = nn.Parameter(torch.zeros(4, 8))
    model.scale_of_heads = nn.Parameter(torch.ones(4, 1, 1))
    model.temperature = nn.Parameter(torch.ones(()))
    model.magnitudes = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    directions = "magnitudes.parametrizations.weight.original1"
    of_layers = ["gray.weight", "grouped.weight", "lora_a.weight", "lora_b.weight", directions]
    assert muon_names(model) == ["experts", *of_layers]
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
