"""Experts against a loop over tokens, their balance, and whole runs with them."""

import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nanomuon import recipe
from nanomuon.generate import KVCache
from nanomuon.moe import BALANCE_SPEED, MoE, balance_
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.report import read_metrics
from scripts import base_eval, base_train, sample
from tests.test_gpt import build
from tests.training import Ranks, arguments, losses
from tests.worlds import run_world


def mixture(experts=4, per_token=2, width=12, dtype=torch.float64):
    torch.manual_seed(0)
    layer = MoE(width, experts, per_token).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.bias.zero_()
    layer.load.zero_()
    return layer


def token_by_token(layer, x):
    """The definition, for x (N, width)."""
    rows = []
    for token in x:
        scores = torch.sigmoid(layer.router @ token)
        ranking = sorted(range(len(scores)), key=(scores + layer.bias).tolist().__getitem__, reverse=True)
        row = torch.zeros_like(token)
        for e in ranking[: layer.per_token]:
            row = row + 2 * scores[e] * (layer.w2[e] @ F.relu(layer.w1[e] @ token) ** 2)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("experts, per_token", [(1, 1), (4, 1), (4, 2), (5, 3), (3, 3), (40, 2)])
@pytest.mark.parametrize("unused", [False, True])
def test_output_and_gradients_are_those_of_a_loop_over_tokens(experts, per_token, unused):
    layer, x = mixture(experts, per_token), torch.randn(3, 10, 12, dtype=torch.float64, requires_grad=True)
    if unused and experts > per_token:
        layer.bias[1] = -10
    weights = torch.randn_like(x)
    inputs = [x, *layer.parameters()]
    output = layer(x)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    expected = token_by_token(layer, x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert layer.load.sum() == 30 * per_token
    if unused and experts > per_token:
        assert layer.load[1] == 0 and not gradients[2][1].any() and not gradients[3][1].any()


def test_experts_that_count_equally_are_one_dense_mlp():
    layer, x = mixture(experts=2, per_token=2), torch.randn(5, 12, dtype=torch.float64)
    layer.router.data.zero_()
    dense = F.relu(x @ layer.w1.flatten(0, 1).T).square() @ torch.cat(list(layer.w2), 1).T
    torch.testing.assert_close(layer(x), dense)
    assert layer.w1.numel() + layer.w2.numel() == 8 * 12**2  # of the usual size


def test_the_bias_decides_who_is_chosen_and_nothing_else():
    layer, x = mixture(experts=3, per_token=3), torch.randn(5, 12, dtype=torch.float64)
    before = layer(x)
    layer.bias.copy_(torch.tensor([0.5, -0.3, 2.0]))
    torch.testing.assert_close(layer(x), before)


@pytest.mark.parametrize("pattern", ["L", "SL"])
def test_decoding_with_a_cache_equals_the_whole_context(pattern):
    model = build(window_pattern=pattern, experts=4)
    tokens = torch.randint(97, (2, 16))
    cache = KVCache(model.config, 2, tokens.device)
    with torch.inference_mode():
        parts = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 12), (12, 16))]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-5)
    assert not any(block.mlp.load.any() for block in model.blocks)  # only training is counted


def test_counts_are_those_of_the_dense_model_and_the_router():
    dense = build(depth=4, width=64, heads=2, kv_heads=2)
    for per_token in (1, 2, 4):
        model = build(depth=4, width=64, heads=2, kv_heads=2, experts=8, experts_per_token=per_token)
        ours, theirs, router = model.parameter_counts(), dense.parameter_counts(), 4 * 8 * 64
        assert ours["matrices"] == theirs["matrices"] + router
        assert ours["idle_experts"] == 4 * (8 - per_token) * (8 * 64**2 // per_token)
        assert ours["total"] == sum(p.numel() for p in model.parameters())
        assert model.estimate_flops() == dense.estimate_flops() + 6 * router


@pytest.mark.parametrize(
    "fields",
    [
        dict(experts=2, experts_per_token=3),
        dict(experts=4, experts_per_token=0),
        dict(experts=8, experts_per_token=7),
    ],
)
def test_impossible_experts_are_refused_by_name(fields):
    with pytest.raises(ValueError, match="experts_per_token"):
        build(**fields)


def test_one_graph_with_experts_and_nothing_of_them_without():
    graphs = []

    def capture(graph, inputs):
        graphs.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph

    tokens = torch.randint(97, (2, 16))
    for experts in (0, 4):
        torch._dynamo.reset()
        model = build(depth=1, experts=experts)
        torch.compile(model, backend=capture, fullgraph=True)(tokens, tokens)
        about = [name for name in model.state_dict() if "router" in name or "bias" in name or "load" in name]
        assert bool(about) == bool(experts) == ("grouped_mm" in graphs[-1]) == ("sort" in graphs[-1]), about
    assert len(graphs) == 2


def test_compiled_experts_give_the_same_loss_gradients_and_load():
    model, tokens = build(depth=1, experts=4), torch.randint(97, (2, 16))
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        model.blocks[0].mlp.load.zero_()
        loss = run(tokens, tokens)
        loss.backward()
        results.append(
            [loss.detach(), model.blocks[0].mlp.load.clone(), *(p.grad for p in model.parameters())]
        )
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-5)


def excess(load):
    """How far the fullest expert is above the mean, relative to it: MaxVio of arXiv 2408.15664."""
    return float(load.max() / load.double().mean() - 1)


def test_load_gets_even_over_training():
    torch.manual_seed(0)
    layer, offset = mixture(experts=8, dtype=torch.float32), torch.randn(12)
    optimizer, seen = torch.optim.SGD(layer.parameters(), lr=1e-3), []
    for _ in range(600):
        x = torch.randn(64, 12) + 0.5 * offset  # what the tokens share makes some experts dear to all of them
        (layer(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(excess(layer.load))
        balance_(layer)
    assert sum(seen[:20]) / 20 > 1 and sum(seen[-20:]) / 20 < 0.4
    assert not layer.load.any()


def biases_of_a_rank(group, rank_inputs):
    layer = mixture(dtype=torch.float32)
    for _ in range(3):
        for x in rank_inputs[dist.get_rank(group)]:
            layer(x)
        balance_(layer, group)
    return layer.bias.numpy()


def test_biases_depend_on_the_tokens_of_the_step_and_not_on_who_saw_them():
    x = torch.randn(6, 20, 12)
    expected = mixture(dtype=torch.float32)
    for _ in range(3):
        load = torch.zeros(4)
        for token in x.flatten(0, 1):
            scores = torch.sigmoid(expected.router @ token) + expected.bias
            load[scores.topk(2).indices] += 1
        expected.bias += BALANCE_SPEED * (load.mean() - load).sign()
    for ranks in (1, 2, 3):
        for bias in run_world(ranks, biases_of_a_rank, list(x.chunk(ranks))):
            assert torch.equal(torch.from_numpy(bias), expected.bias)


def train_in_pieces(group):
    """Three steps on 8 rows with FSDP2 over the group, or in one process."""
    model = build(depth=2, experts=3).double()
    model.compute_dtype = torch.float64
    groups, ranks, rank = recipe.param_groups(model), 1, 0
    if group is not None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        groups = recipe.param_groups(model)
        assert model.blocks[0].mlp.w1.placements[0].dim == 0  # whole experts
    optimizer = MuonAdamW(groups) if group is None else DistMuonAdamW(groups, group)
    tokens = torch.randint(97, (3, 8, 17), generator=torch.Generator().manual_seed(0))
    for rows in tokens:
        mine = rows.chunk(ranks)[rank]
        model(mine[:, :-1], mine[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        balance_(model, group)
    wholes = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [t.detach().numpy() for t in (*wholes, *model.buffers())]


@pytest.mark.parametrize("ranks", [2, 4])  # which hold 2 and 1 of 3 experts, and 1, 1, 1 and none
def test_experts_in_pieces_train_as_in_one_process(ranks, monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    expected = train_in_pieces(None)
    for parameters in run_world(ranks, train_in_pieces):
        for ours, theirs in zip(parameters, expected, strict=True):
            assert abs(ours - theirs).max() < 1e-9 * max(1, abs(theirs).max())


EXPERTS = ("--experts", "4", "--experts-per-token", "2", "--eval-every", "-1", "--save-every", "8")


@pytest.fixture(scope="module")
def whole_run(base):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOMUON_BASE_DIR", str(base))
        patch.setenv("NANOMUON_COMPILE", "0")
        assert base_train.main(arguments(base, "whole", 16, *EXPERTS)) == 0
    return base / "runs" / "whole"


@pytest.mark.usefixtures("environment")
def test_a_run_with_experts_learns_and_is_read_back(whole_run, capsys):
    rows, evaluation = read_metrics(whole_run / "metrics.jsonl")
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] - 0.2
    base_eval.main(["--run", "whole"])
    assert f"val_bpb: {evaluation[-1]['val_bpb']:.4f}" in capsys.readouterr().out
    sample.main(["--run", "whole", "--max-tokens", "20"])
    assert "--- sample" in capsys.readouterr().out


@pytest.mark.usefixtures("environment")
def test_a_run_with_experts_resumes_bit_for_bit(base, whole_run):
    for last in (whole_run / "checkpoints" / "step_16", whole_run / "summary.json"):
        shutil.rmtree(last) if last.is_dir() else last.unlink()
    before, model = losses(base, "whole"), load_file(whole_run / "model.safetensors")
    assert model["blocks.0.mlp.bias"].abs().max() > 5 * BALANCE_SPEED
    assert base_train.main(arguments(base, "whole", 16, *EXPERTS)) == 0
    assert losses(base, "whole") == before
    again = load_file(whole_run / "model.safetensors")
    assert again.keys() == model.keys() and all(torch.equal(again[name], model[name]) for name in model)


@pytest.mark.usefixtures("environment")
def test_two_processes_train_the_experts_that_one_trains(base, whole_run):
    ranks = Ranks(base, "two", 16, *EXPERTS, processes=2)
    assert ranks.join() == [0, 0], ranks.output()
    assert losses(base, "two") == pytest.approx(losses(base, "whole"), abs=1e-3)
    ours, theirs = (load_file(base / "runs" / run / "model.safetensors") for run in ("two", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name.endswith(".bias"))
