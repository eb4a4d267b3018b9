"""Training in float8, emulated on a CPU by torchao: numbers rounded as on a GPU, multiplied in float32.

Without torchao, tests that need it are skipped.
"""

import sys

import pytest
import torch

from nanomuon import parallel
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.runtime import InputError, Runtime
from tests.reference import distance


def build():
    """A model whose weights all do something."""
    model = GPT(GPTConfig.from_depth(2, 304, 64), torch.bfloat16)
    model.init_weights(0)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


# Numbers rounded to e4m3 are off by at most 2^-3 / sqrt(12) = 1/28 in the root mean square, to e5m2 by twice
# that; errors of the two factors of a product, and of successive products, add up as squares
E4M3, E5M2 = 1 / 28, 1 / 14


def test_a_model_trains_almost_as_in_bf16_and_is_the_same_otherwise():
    pytest.importorskip("torchao", reason="needs torchao (the extra fp8)")
    torch.manual_seed(1)
    tokens, targets = torch.randint(304, (2, 2, 64))
    model, ours = build(), build()
    parallel.train_in_fp8(ours, emulate=True)
    multiply = [module for module in ours.modules() if getattr(module, "training_product", None)]
    assert len(multiply) == 2 * 6  # q, k, v, o, up and down of a block, not the gates
    expected, found = model(tokens, targets), ours(tokens, targets)
    expected.backward()
    found.backward()
    assert 0 < distance(found, expected) < 0.01
    # Four successive products in each of two blocks, forward and backward
    most = (8 * 2 * E4M3**2 + 8 * (E5M2**2 + E4M3**2)) ** 0.5
    for parameter, other in zip(model.parameters(), ours.parameters(), strict=True):
        assert parameter.ndim == 1 or 0 < distance(other.grad, parameter.grad) < most
    assert ours.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():  # evaluation is that of bf16 to the bit
        assert torch.equal(ours(tokens), model(tokens))
    layer, plain = ours.blocks[0].attn.q, model.blocks[0].attn.q
    for count in (5, 16):  # a gradient of the weight would sum over 15 tokens, and over 48
        x = torch.randn(3, count, 128, dtype=torch.bfloat16)
        assert torch.equal(layer(x), plain(x)) == (count == 5)


@pytest.mark.parametrize(
    "capability, tensor_parallel, message",
    [
        ((8, 6), 1, "--fp8 needs a GPU of compute capability 8.9"),
        ((9, 0), 2, "--fp8 and --tensor-parallel cannot be combined"),
        ((9, 0), 1, "--fp8 needs torchao .*: pip install"),
    ],
)
def test_missing_or_conflicting_requirements_are_named(monkeypatch, capability, tensor_parallel, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(InputError, match=message):
        parallel.check_fp8(Runtime(torch.device("cuda"), torch.bfloat16), tensor_parallel)
