"""Routing by name and shape, on our own model's naming, a Llama-style one, wrappers and experts."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import MuonAdamW
from nanomuon.param_groups import build_param_groups, clean_name, matches, routing_table

MUON = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0)
ADAMW = dict(lr=1e-3, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)


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


def kinds(model, **options):
    groups = build_param_groups(model, muon=MUON, adamw=ADAMW, **options)
    MuonAdamW(groups)  # what is built is what the optimizer takes
    return {name: group["kind"] for group in groups for name in group["names"]}


def test_our_own_model():
    model = GPT(GPTConfig.from_depth(2, vocab_size=64, seq_len=16))
    routed = kinds(model, skip_keys=("value_gate",))
    assert routed.keys() == {name for name, _ in model.named_parameters()}
    for name, kind in routed.items():
        matrix = name.startswith("blocks.") and not {"value_gate", "taps"} & set(name.split("."))
        assert kind == ("muon" if matrix else "adamw"), name


LLAMA = {
    "model.embed_tokens.weight": ((50, 8), "adamw"),
    "model.layers.0.self_attn.q_proj.weight": ((8, 8), "muon"),
    "model.layers.0.self_attn.o_proj.bias": ((8,), "adamw"),
    "model.layers.0.attention.output_proj.weight": ((8, 8), "muon"),
    "model.layers.0.mlp.gate_proj.weight": ((16, 8), "muon"),
    "model.layers.0.mhc_attn.weight": ((8, 8), "adamw"),
    "model.layers.0.input_layernorm.weight": ((8,), "adamw"),
    "model.layers.0.conv.weight": ((8, 1, 4), "muon"),
    "output.weight": ((50, 8), "adamw"),
    "lm_head.weight": ((50, 8), "adamw"),
}


def test_llama_style_names():
    model = tree({name: shape for name, (shape, _) in LLAMA.items()})
    assert kinds(model) == {name: kind for name, (_, kind) in LLAMA.items()}
    rows = [line.split(maxsplit=3) for line in routing_table(model).splitlines()[1:]]
    shown = {name: (tuple(map(int, shape.split("x"))), kind) for name, shape, kind, _ in rows}
    assert shown == LLAMA


def test_names_are_compared_by_whole_components():
    assert matches("a.output.weight", "output") and not matches("a.output_proj.weight", "output")
    assert matches("layers.0.experts.w1", "experts.w1") and not matches("experts.0.w1", "experts.w1")
    assert not matches("my_experts.w1", "experts.w1") and not matches("experts.w12", "experts.w1")


def test_wrapped_names_are_the_same_names():
    assert clean_name("a._orig_mod.b._checkpoint_wrapped_module.c") == "a.b.c"
    plain = nn.ModuleDict({"output": nn.Linear(4, 4), "mlp": nn.Sequential(nn.Linear(4, 4))})
    wrapped = torch.compile(
        nn.ModuleDict({"output": torch.compile(plain["output"]), "mlp": checkpoint_wrapper(plain["mlp"])})
    )
    assert any("_orig_mod" in name for name, _ in wrapped.named_parameters())
    assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.named_parameters())
    assert kinds(wrapped) == kinds(plain)
    assert matches("mlp._orig_mod.w1", "mlp.w1")
    assert routing_table(wrapped) == routing_table(plain)


def test_experts():
    shapes = {
        "moe.experts.w1": (4, 8, 16),
        "moe.experts.bias": (4, 8),
        "moe.router": (4, 8),
        "experts_like.w1": (8, 8),
    }
    routed = kinds(tree(shapes), expert_keys=("experts.w1", "experts.bias"))
    assert routed == {
        "moe.experts.w1": "muon",
        "moe.experts.bias": "adamw",  # a vector per expert
        "moe.router": "muon",
        "experts_like.w1": "muon",
    }


def test_roles_give_groups_of_their_own_and_the_rest_the_base():
    shapes = {
        "wte.weight": (9, 4),
        "lm_head.weight": (9, 4),
        "up.weight": (4, 4),
        "gate.weight": (4, 4),
        "n.s": (3,),
    }
    model = tree(shapes)
    groups = build_param_groups(
        model,
        muon=MUON,
        adamw=ADAMW,
        roles={"wte": dict(lr=0.3, betas=(0.9, 0.9)), "gate": dict(weight_decay=0.5)},
    )
    found = {tuple(group["names"]): (group["kind"], group["lr"], group["weight_decay"]) for group in groups}
    assert found == {
        ("wte.weight",): ("adamw", 0.3, 0.0),
        ("lm_head.weight", "n.s"): ("adamw", 1e-3, 0.0),
        ("up.weight",): ("muon", 0.02, 0.0),
        ("gate.weight",): ("muon", 0.02, 0.5),
    }
    assert groups[0]["betas"] == (0.9, 0.9) and ADAMW["betas"] == (0.8, 0.95)
    assert all(len(group["params"]) == len(group["names"]) for group in groups)


def test_frozen_parameters_are_left_out_and_a_predicate_decides_instead():
    model = tree({"wte.weight": (9, 4), "up.weight": (4, 4), "down.weight": (4, 4)})
    model.down.weight.requires_grad_(False)
    assert kinds(model) == {"wte.weight": "adamw", "up.weight": "muon"}
    assert kinds(model, is_muon=lambda name, p: name.startswith("wte")) == {
        "wte.weight": "muon",
        "up.weight": "adamw",
    }
    with pytest.raises(ValueError, match=r"s has shape \(3,\)"):
        kinds(tree({"s": (3,)}), is_muon=lambda name, p: True)


def test_the_table_says_why():
    model = tree({"wte.weight": (9, 4), "up.weight": (4, 4), "experts.w1": (2, 4, 4), "s": ()})
    assert routing_table(model, expert_keys=("experts",)) == "\n".join(
        [
            "parameter   shape   kind   why",
            "s           scalar  adamw  fewer than 2 dimensions",
            "wte.weight  9x4     adamw  name has wte",
            "up.weight   4x4     muon   matrix",
            "experts.w1  2x4x4   muon   matrices of experts",
        ]
    )
