"""The benchmark against other Muons: its model, its table, and peers that are a user's file."""

import pytest

from nanomuon import sizing
from nanomuon.runtime import InputError
from scripts import peers_bench

ADOPTING = """
import torch


def adopt(model):
    first = torch.optim.SGD([model["lm_head"].weight], lr=1e-3)

    second = torch.optim.Adam([model["model"]["embed_tokens"].weight], lr=1e-3)
    return [first, second]


def missing(model):
    from no_such_package import Muon

    return [Muon(model.parameters())]
"""


def test_the_model_has_the_parameters_of_a_llama():
    """By the names of transformers' LlamaForCausalLM."""
    model = peers_bench.llama(width=32, mlp_width=48, layers=1)
    block = "model.layers.0"
    expected = {
        "model.embed_tokens.weight": (peers_bench.VOCABULARY, 32),
        f"{block}.self_attn.q_proj.weight": (32, 32),
        f"{block}.self_attn.k_proj.weight": (32, 32),
        f"{block}.self_attn.v_proj.weight": (32, 32),
        f"{block}.self_attn.o_proj.weight": (32, 32),
        f"{block}.mlp.gate_proj.weight": (48, 32),
        f"{block}.mlp.up_proj.weight": (48, 32),
        f"{block}.mlp.down_proj.weight": (32, 48),
        f"{block}.input_layernorm.weight": (32,),
        f"{block}.post_attention_layernorm.weight": (32,),
        "model.norm.weight": (32,),
        "lm_head.weight": (peers_bench.VOCABULARY, 32),
    }
    assert {name: tuple(param.shape) for name, param in model.named_parameters()} == expected


def test_what_iterates_in_bf16_is_left_out_where_the_cpu_has_no_instructions_for_it(monkeypatch, capsys):
    """A step would take minutes."""
    monkeypatch.setitem(peers_bench.SIZES, "tiny", {"width": 32, "mlp_width": 48, "layers": 1})
    monkeypatch.setattr(sizing, "cpu_has_bf16", lambda: False)
    kept = {name: peers_bench.CONTESTANTS[name] for name in ("nanomuon", "torch.optim.Muon + AdamW")}
    peers_bench.compare("tiny", kept, 1)
    table = capsys.readouterr().out
    assert "| torch.optim.Muon + AdamW | not measured: it iterates in bf16" in table
    assert "| nanomuon | not measured" not in table


def test_the_table(tmp_path, monkeypatch, capsys):
    """A row for each contestant, with bytes and lines that are known, or why a peer is missing."""
    monkeypatch.setitem(peers_bench.SIZES, "tiny", {"width": 32, "mlp_width": 48, "layers": 1})
    monkeypatch.delenv("NANOMUON_COMPILE", raising=False)
    monkeypatch.setattr(sizing, "cpu_has_bf16", lambda: True)
    for name in ("nanomuon, compile=True", "nanomuon, both"):  # they take half a minute
        monkeypatch.delitem(peers_bench.CONTESTANTS, name)
    file = tmp_path / "adopting.py"
    file.write_text(ADOPTING)
    peers = ["--peer", f"two={file}:adopt", "--peer", f"absent={file}:missing"]
    peers_bench.main(["--sizes", "tiny", "--rounds", "2", *peers])
    table = {}
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        table[cells[0]] = cells[1:]
    for name in ("nanomuon", "torch.optim.Muon + AdamW", "torch.optim.AdamW alone", "two"):
        assert len(table[name]) == 7
    embedding, matrices, norms = peers_bench.VOCABULARY * 32, 4 * 32 * 32 + 3 * 32 * 48, 3 * 32
    parameters = 2 * embedding + matrices + norms
    state_bytes = {
        "torch.optim.Muon + AdamW": 4 * matrices + 8 * (2 * embedding + norms),
        "torch.optim.AdamW alone": 8 * parameters,
        "two": 8 * embedding,
    }
    for name, expected in state_bytes.items():
        assert float(table[name][5]) == pytest.approx(expected / parameters, abs=0.01)
    assert (table["nanomuon"][2], table["nanomuon"][6]) == ("1.00", "2")
    assert table["two"][6] == "2"
    assert table["absent"] == ["not measured: ModuleNotFoundError: No module named 'no_such_package'"]


def test_a_peer_that_is_not_there_is_refused(tmp_path):
    file = tmp_path / "adopting.py"
    file.write_text(ADOPTING)
    for peer, message in [("adopting.py:adopt", "NAME=FILE.py:FUNCTION"), (f"x={file}:other", "no function")]:
        with pytest.raises(InputError, match=message):
            peers_bench.main(["--peer", peer])
