"""The model: its shapes, its loss (head_loss.py), and the same results compiled. test_hf_export.py compares
it with the model that transformers loads.
"""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nanomuon import head_loss
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.kv_cache import KVCache
from nanomuon.parallel import compile_model


def build(seed=0, randomize=True, **fields):
    config = GPTConfig(
        **{**dict(vocab_size=97, seq_len=16, depth=3, width=32, heads=4, kv_heads=2), **fields}
    )
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    if randomize:  # the initial model is an identity plus a head: give every weight something to do
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def batch(rows=2):
    return torch.randint(97, (2, rows, 16), generator=torch.Generator().manual_seed(1))


def test_the_initial_model_knows_nothing_and_is_reproducible():
    first, again = build(1, randomize=False), build(1, randomize=False)
    tokens, targets = batch(4)
    assert abs(first(tokens, targets) - torch.log(torch.tensor(97.0))) < 0.02
    for cache in (None, KVCache(first.config, 1, torch.device("cpu"))):
        with pytest.raises(ValueError, match="17 tokens are more than the context of 16"):
            first(torch.zeros(1, 17, dtype=torch.int64), cache=cache)
    assert torch.equal(first(tokens), again(tokens))
    for block in first.blocks:  # the identity
        assert not any(p.any() for p in (block.attn.o.weight, block.mlp.down.weight, block.conv.taps))


def test_a_state_dict_is_all_that_a_new_model_needs(monkeypatch):
    """Uninitialized rotary tables would make its logits slightly wrong."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(0.5))
    model, loaded = (GPT(GPTConfig.from_depth(2, 96, 16)) for _ in range(2))
    model.init_weights(0)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded.cos, model.cos) and torch.equal(loaded.sin, model.sin)


def test_estimated_flops_are_those_that_pytorch_counts():
    shape = dict(depth=4, width=64, heads=2, kv_heads=2, vocab_size=1000, seq_len=32)
    model, tokens = build(**shape), torch.randint(1000, (2, 32))
    # Attention as its two products and their four backwards: some PyTorchs do not count the fused one
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    assert 64 * model.estimate_flops() == counter.get_total_flops()
    # Three of the four layers see 8 tokens of 32, and one sees all
    saved = model.estimate_flops() - build(**shape, window_pattern="S").estimate_flops()
    assert saved == 3 * 6 * 2 * (32 - 8) * 64


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.bfloat16, 1e-2)])
def test_the_loss_by_chunks_is_the_capped_cross_entropy(dtype, tolerance, monkeypatch):
    """Against the formula of the papers, in float64, on the same hidden states and weight."""
    monkeypatch.setattr(head_loss, "MOST_CHUNKS", 3)
    monkeypatch.setattr(head_loss, "SMALLEST_CHUNK", 97)  # of 50 tokens: chunks of 17, 17 and 16
    torch.manual_seed(0)
    hidden = (3 * torch.randn(50, 32)).to(dtype).requires_grad_()
    head = torch.nn.Linear(32, 97, bias=False, dtype=torch.promote_types(dtype, torch.float32))
    torch.nn.init.normal_(head.weight)
    targets = torch.randint(97, (50,))
    targets[[3, 20, 21, 49]] = -1

    same = [x.detach().to(dtype).double().requires_grad_() for x in (hidden, head.weight)]
    expected = F.cross_entropy(15 * torch.tanh(same[0] @ same[1].T / 15), targets, ignore_index=-1)
    (expected / 3).backward()
    found = head_loss.mean_loss(hidden, head.weight, targets)
    (found / 3).backward()
    assert found.dtype == head.weight.dtype == head.weight.grad.dtype and hidden.grad.dtype == dtype
    evaluated = head_loss.mean_loss_without_gradient(hidden.to(head.weight.dtype), head, targets)
    for ours, theirs in (
        (found, expected),
        (evaluated, expected),
        (hidden.grad, same[0].grad),
        (head.weight.grad, same[1].grad),
    ):
        assert (ours.double() - theirs).norm() < tolerance * theirs.norm()


def test_blocks_of_equal_windows_are_compiled_once():
    """PyTorch compiles a function eight times and then runs it eagerly, without an error."""
    counter = CompileCounter()
    model = build(depth=10, window_pattern="SL")
    for block in model.blocks:
        block.compile(backend=counter, dynamic=False)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        model(*torch.randint(30, (2, 1, 16))).backward()
    assert counter.frame_count == 2


def test_compiled_loss_and_gradients_are_the_eager_ones_and_the_same_in_every_run(request):
    """Inductor would add up embedding gradients atomically, with two threads in another order each run."""
    torch.set_num_threads(2)
    request.addfinalizer(lambda: torch.set_num_threads(1))
    model = build(depth=1, vocab_size=7, seq_len=256)
    tokens, targets = torch.randint(7, (2, 2, 256))
    results = []
    for forward in (model, *[compile_model(model, None)] * 3):
        model.zero_grad()
        loss = forward(tokens, targets)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for eager, first, *others in zip(*results, strict=True):
        torch.testing.assert_close(first, eager, rtol=1e-3, atol=1e-5)
        assert all(torch.equal(other, first) for other in others)
