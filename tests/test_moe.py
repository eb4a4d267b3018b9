"""Experts against a loop over tokens, their balance, and whole runs with them."""

import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file

from nanomuon.moe import BALANCE_SPEED, MoE, balance_
from scripts import base_train
from tests.reference import distance
from tests.test_gpt import build
from tests.training import arguments, losses
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


@pytest.mark.parametrize("experts, per_token", [(1, 1), (4, 1), (5, 3), (40, 2)])
def test_output_and_gradients_are_those_of_a_loop_over_tokens(experts, per_token):
    layer, x = mixture(experts, per_token), torch.randn(3, 10, 12, dtype=torch.float64, requires_grad=True)
    if experts > per_token:
        layer.bias[1] = -10  # nobody chooses it
    weights, inputs = torch.randn_like(x), [x, *layer.parameters()]
    output, expected = layer(x), token_by_token(layer, x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(output, expected)
    gradients = [torch.autograd.grad((each * weights).sum(), inputs) for each in (output, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():  # only training is counted
        layer(x)
    assert layer.load.sum() == 30 * per_token and (experts == per_token or layer.load[1] == 0)


def test_bf16_experts_are_the_same_compiled_in_one_graph_and_if_one_has_no_tokens():
    model, tokens = build(depth=1, experts=4, vocab_size=96), torch.randint(96, (2, 16))
    mlp, results = model.blocks[0].mlp, []
    mlp.bias[1] = -10  # nobody chooses it
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for run, dtype in ((model, torch.float32), (model, torch.bfloat16), (compiled, torch.bfloat16)):
        model.compute_dtype = dtype
        model.zero_grad()
        mlp.load.zero_()
        loss = run(tokens, tokens)
        loss.backward()
        results.append([loss.detach(), mlp.load.double(), *(p.grad for p in model.parameters())])
    for exact, eager, compiled in zip(*results, strict=True):
        assert distance(eager, exact) < 0.03
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-5)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    assert not any("load" in name for name in model.state_dict())
    assert mlp.load[1] == 0 and not mlp.w1.grad[1].any() and not mlp.w2.grad[1].any()


def biases_of_a_rank(group, rank_inputs):
    layer = mixture(dtype=torch.float32)
    for _ in range(3):
        for x in rank_inputs[dist.get_rank(group)]:
            layer(x)
        balance_(layer, group)
    return layer.bias.numpy()


def test_biases_depend_on_the_tokens_of_the_step_and_not_on_the_ranks_that_saw_them():
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


@pytest.mark.usefixtures("environment")
def test_a_run_with_experts_learns_and_resumes_bit_for_bit(base):
    flags = "--experts 4 --experts-per-token 2 --eval-every -1 --save-every 8".split()
    run = base / "runs" / "experts"
    assert base_train.main(arguments(base, "experts", 16, *flags)) == 0
    before, model = losses(base, "experts"), load_file(run / "model.safetensors")
    assert before[-1] < before[0] - 0.2 and model["blocks.0.mlp.bias"].abs().max() > 5 * BALANCE_SPEED
    shutil.rmtree(run / "checkpoints" / "step_16")
    (run / "summary.json").unlink()
    assert base_train.main(arguments(base, "experts", 16, *flags)) == 0
    again = load_file(run / "model.safetensors")
    assert losses(base, "experts") == before
    assert again.keys() == model.keys() and all(torch.equal(again[name], model[name]) for name in model)
