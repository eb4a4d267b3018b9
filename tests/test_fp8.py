"""Training in float8, emulated on a CPU by torchao: numbers rounded as on a GPU, multiplied in float32.

Without torchao, tests that need it are skipped.
"""

import importlib.util
import sys
import types

import pytest
import torch

from nanomuon import fp8
from nanomuon.gpt import GPT, GPTConfig, Linear
from nanomuon.runtime import InputError, Runtime
from scripts import base_train

has_torchao = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not has_torchao, reason="needs torchao (the extra fp8)")


def build(vocab_size=304):
    """A model whose weights all do something; gates of 2 x 32 among them."""
    model = GPT(GPTConfig.from_depth(2, vocab_size, 64), torch.bfloat16)
    model.init_weights(0)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def off(found, exact):
    """Error of a tensor relative to its norm."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


# Numbers rounded to e4m3 are off by at most 2^-3 / sqrt(12) = 1/28 in the root mean square, to e5m2 by twice
# that; errors of the two factors of a product add up as squares
E4M3, E5M2, BF16 = 1 / 28, 1 / 14, 2**-8


@needs_torchao
def test_products_and_their_gradients_are_within_the_rounding_of_their_factors():
    torch.manual_seed(0)
    layer = Linear(48, 32)
    layer.training_product = fp8.training_product(emulate=True)
    x = torch.randn(2, 16, 48, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(2, 16, 32, dtype=torch.bfloat16)
    out = layer(x)
    out.backward(grad)
    weight, x64, grad64 = layer.weight.detach().double(), x.detach().double(), grad.double()
    assert 2 * BF16 < off(out, x64 @ weight.T) < (E4M3**2 + E4M3**2) ** 0.5
    for found, exact in (
        (x.grad, grad64 @ weight),
        (layer.weight.grad, grad64.flatten(0, 1).T @ x64.flatten(0, 1)),
    ):
        assert 2 * BF16 < off(found, exact) < (E5M2**2 + E4M3**2) ** 0.5
    assert out.dtype == x.grad.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32


@needs_torchao
def test_a_model_trains_almost_as_in_bf16_and_is_the_same_otherwise():
    torch.manual_seed(1)
    tokens, targets = torch.randint(304, (2, 2, 64))
    model, ours = build(), build()
    assert fp8.train_in_fp8(ours, emulate=True) == 2 * 6  # q, k, v, o, up and down of a block
    losses = [each(tokens, targets) for each in (model, ours)]
    for loss in losses:
        loss.backward()
    assert 0 < off(losses[1], losses[0]) < 0.01
    for (name, parameter), other in zip(model.named_parameters(), ours.parameters(), strict=True):
        if parameter.ndim > 1:  # four products after another in each of two blocks, forward and backward
            assert off(other.grad, parameter.grad) < (8 * 2 * E4M3**2 + 8 * (E5M2**2 + E4M3**2)) ** 0.5, name
    for (name, tensor), (other, same) in zip(
        model.state_dict().items(), ours.state_dict().items(), strict=True
    ):
        assert name == other and tensor.dtype == same.dtype and torch.equal(tensor, same)
    with torch.no_grad():  # evaluation is that of bf16 to the bit
        assert torch.equal(ours(tokens), model(tokens))


@needs_torchao
def test_what_does_not_fit_stays_in_bf16():
    model = build(vocab_size=97)
    fp8.train_in_fp8(model, emulate=True)
    assert model.lm_head.training_product is None
    assert model.blocks[1].attn.value_gate.training_product is None
    layer, plain = model.blocks[0].attn.q, Linear(128, 128)
    plain.weight = layer.weight
    for tokens in (5, 16):  # a gradient of the weight would sum over 15 tokens, and over 48
        x = torch.randn(3, tokens, 128, dtype=torch.bfloat16)
        assert torch.equal(layer(x), plain(x)) == (tokens == 5)


@pytest.mark.parametrize(
    "capability, tensor_parallel, installed, message",
    [
        ((8, 6), 1, True, "--fp8 needs a GPU of compute capability 8.9"),
        ((9, 0), 2, True, "--fp8 and --tensor-parallel do not go together"),
        ((9, 0), 1, False, "--fp8 needs torchao .*: pip install"),
        ((9, 0), 1, True, None),
    ],
)
def test_what_is_missing_or_does_not_go_together_is_named(
    monkeypatch, capability, tensor_parallel, installed, message
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name) if installed else None)
    runtime = Runtime(torch.device("cuda"), torch.bfloat16)
    if message is None:
        fp8.check(runtime, tensor_parallel)
    else:
        with pytest.raises(InputError, match=message):
            fp8.check(runtime, tensor_parallel)


def test_a_cpu_is_refused(environment):
    with pytest.raises(InputError, match="--fp8 needs a GPU"):
        base_train.main(["--depth", "2", "--fp8"])
