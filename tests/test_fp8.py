"""Training in float8, emulated on a CPU by torchao: numbers rounded as on a GPU, multiplied in float32.

Without torchao all of it that needs torchao is skipped.
"""

import importlib.util
import sys
import types

import pytest
import torch

from nanomuon import fp8
from nanomuon.gpt import GPT, GPTConfig, Linear
from nanomuon.runtime import InputError, Runtime
from scripts import base_train, train_bench

has_torchao = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not has_torchao, reason="needs torchao (the extra fp8)")

# A format's largest relative error of rounding, its largest number, and half of the distance between its
# smallest ones, which is the error where that is larger
E4M3 = (2**-4, 448.0, 2**-10)
E5M2 = (2**-3, 57344.0, 2**-17)


def build():
    """A model whose weights all do something; gates of 2 x 32 among them."""
    with torch.device("meta"):
        model = GPT(GPTConfig.from_depth(2, 304, 64), torch.bfloat16)
    model.to_empty(device="cpu")
    model.init_weights(0)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def loss_and_gradients(model):
    torch.manual_seed(1)
    tokens, targets = torch.randint(304, (2, 2, 64))
    model.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def rounding(x, number_format):
    """Largest error of each entry of x in that format, with the largest entry at its largest number."""
    relative, largest, smallest = number_format
    return torch.maximum(relative * x.abs(), smallest / largest * x.abs().max())


def bound_of_product(a, a_format, b, b_format):
    """Largest error of a @ b whose factors are rounded, and that is written in bfloat16; all in float64."""
    a_error, b_error = rounding(a, a_format), rounding(b, b_format)
    exact = a @ b
    error = a_error @ b.abs() + a.abs() @ b_error + a_error @ b_error
    return error + 2**-8 * (exact.abs() + error), exact


@needs_torchao
def test_products_and_their_gradients_are_within_the_rounding_of_their_factors():
    torch.manual_seed(0)
    layer = Linear(48, 32)
    layer.training_product = fp8.training_product(emulate=True)
    x = torch.randn(2, 16, 48, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(2, 16, 32, dtype=torch.bfloat16)
    out = layer(x)
    out.backward(grad)
    weight = layer.weight.detach().double()
    inputs, grads = x.detach().flatten(0, 1).double(), grad.flatten(0, 1).double()
    for found, bound, exact in (
        (out.flatten(0, 1), *bound_of_product(inputs, E4M3, weight.T, E4M3)),
        (x.grad.flatten(0, 1), *bound_of_product(grads, E5M2, weight, E4M3)),
        (layer.weight.grad, *bound_of_product(grads.T, E5M2, inputs, E4M3)),
    ):
        error = (found.double() - exact).abs()
        assert (error <= bound).all()
        assert error.norm() > 2**-7 * exact.norm()  # more than bfloat16's: it was float8 that multiplied
    assert out.dtype == x.grad.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32


@needs_torchao
def test_a_model_trains_almost_as_in_bf16_and_is_the_same_otherwise(monkeypatch):
    make_product, multiplied = fp8.training_product, set()

    def watched(emulate):
        product = make_product(emulate)

        def multiply(x, weight):
            multiplied.add(weight.data_ptr())
            return product(x, weight)

        return multiply

    monkeypatch.setattr(fp8, "training_product", watched)
    model = build()
    loss, gradients = loss_and_gradients(model)
    tokens = torch.randint(304, (2, 64))
    with torch.no_grad():
        logits = model(tokens)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}

    assert fp8.train_in_fp8(model, emulate=True) == 2 * 6 + 1  # q, k, v, o, up and down of a block; the head
    found_loss, found = loss_and_gradients(model)
    assert len(multiplied) == 2 * 6 + 1 and model.lm_head.weight.data_ptr() in multiplied
    # Numbers rounded to e4m3 are off by at most 2^-3 / sqrt(12) = 1/28 in the root mean square, to e5m2 by
    # twice that. Errors of products that follow each other add up as squares: four of each block and the
    # head's, forward (two factors in e4m3) and backward (one in e5m2, one in e4m3), make up to
    # sqrt(9 * 2 + 9 * 5) / 28 = 0.28 of a gradient's norm, and less where the residual stream goes past them.
    # Of the loss, near log(304), the logits' error is a small part
    assert abs(found_loss - loss) < 0.01 * loss and found_loss != loss
    for each in (gradients, found):
        # Of a scalar it is one sum over all tokens and channels, whose terms may cancel: no norm to compare
        # with by itself
        each["scalars"] = torch.cat([each.pop("resid_scalars"), each.pop("x0_scalars")])
    for name, gradient in gradients.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert 2**-7 < error < 0.28, name

    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert model.state_dict().keys() == state.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name])
    with torch.no_grad():  # evaluation is that of bf16 to the bit
        assert torch.equal(model(tokens), logits)


@needs_torchao
def test_sides_that_are_no_multiple_of_16_stay_in_bf16():
    model = build()
    fp8.train_in_fp8(model, emulate=True)
    assert model.blocks[1].attn.value_gate.training_product is None
    head, plain = model.lm_head, Linear(128, 304)
    plain.weight = head.weight
    x = torch.randn(3, 5, 128, dtype=torch.bfloat16)  # a gradient of the weight would sum over 15 tokens
    assert torch.equal(head(x), plain(x))
    x = torch.randn(3, 16, 128, dtype=torch.bfloat16)
    assert not torch.equal(head(x), plain(x))
    odd = GPT(GPTConfig.from_depth(1, 97, 16))
    assert fp8.train_in_fp8(odd, emulate=True) == 6 and odd.lm_head.training_product is None


@pytest.mark.parametrize("script", [base_train, train_bench])
def test_a_device_without_float8_is_refused(environment, script):
    with pytest.raises(InputError, match="--fp8 needs a GPU of compute capability 8.9"):
        script.main(["--depth", "2", "--fp8"])


def test_what_is_missing_or_does_not_go_together_is_named(monkeypatch):
    runtime = Runtime(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(InputError, match="compute capability 8.9"):
        fp8.check(runtime, tensor_parallel=1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(InputError, match="--fp8 and --tensor-parallel do not go together"):
        fp8.check(runtime, tensor_parallel=2)
    package = types.ModuleType("torchao")
    package.float8 = types.ModuleType("torchao.float8")
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", package.float8)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.18.0")
    fp8.check(runtime, tensor_parallel=1)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.0")
    with pytest.raises(InputError, match="--fp8 needs a newer torchao than 0.9.0: pip install"):
        fp8.check(runtime, tensor_parallel=1)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(InputError, match="--fp8 needs torchao .*: pip install"):
        fp8.check(runtime, tensor_parallel=1)


def test_it_is_off_unless_asked_for():
    parser = base_train.make_parser()
    assert parser.parse_args([]).fp8 is False and parser.parse_args(["--fp8"]).fp8 is True
