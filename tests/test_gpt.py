"""The model: attention against an explicit softmax, counts against PyTorch's counter, cache against whole
context.
"""

import collections

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nanomuon import head_loss
from nanomuon.attention import attention
from nanomuon.generate import KVCache
from nanomuon.gpt import GPT, TAPS, Convolution, Embedding, GPTConfig, rotate


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


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("Tq, Tk", [(7, 7), (1, 7), (3, 7)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_masked_softmax(window, Tq, Tk, kv_heads):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, Tq, 4, 8), torch.randn(2, Tk, kv_heads, 8), torch.randn(2, Tk, kv_heads, 8)
    expected = torch.zeros(2, Tq, 4, 8)
    for h in range(4):
        kv = h * kv_heads // 4
        for i in range(Tq):
            position = Tk - Tq + i
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            weights = torch.softmax((q[:, i, None, h] * k[:, seen, kv]).sum(-1) / 8**0.5, -1)
            expected[:, i, h] = (weights[..., None] * v[:, seen, kv]).sum(1)
    torch.testing.assert_close(attention(q, k, v, window), expected, rtol=1e-4, atol=1e-5)


def test_rotation_makes_products_depend_on_distance_only():
    model = build()
    q, k = torch.randn(8).view(1, 1, 1, 8), torch.randn(8).view(1, 1, 1, 8)

    def product(i, j):
        turned = [rotate(x, model.cos[p : p + 1], model.sin[p : p + 1]) for x, p in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(9, 4), product(15, 10))
    assert not torch.isclose(product(9, 4), product(9, 5))


@pytest.mark.parametrize("pattern", ["L", "S"])
def test_future_tokens_do_not_matter(pattern):
    model = build(window_pattern=pattern)
    tokens = torch.randint(97, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 97
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(-1).any()


def test_short_window_hides_old_tokens():
    # Layer 0 sees 4 tokens, and in the key of the oldest the one before it; the last layer sees all
    model = build(window_pattern="S", depth=2)
    assert [model.config.window(i) for i in range(2)] == [4, None]
    model.blocks[1].attn.o.weight.data.zero_()  # leaves layer 0 to look
    for block in model.blocks:
        block.conv.taps.data.zero_()  # these see the last tokens by themselves
    tokens = torch.randint(97, (1, 16))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 97
    same = torch.isclose(model(tokens), model(changed)).all(-1)[0]
    assert not same[:5].any() and same[5:].all()


@pytest.mark.parametrize("pattern", ["L", "SL"])
def test_decoding_with_a_cache_equals_the_whole_context(pattern):
    model = build(window_pattern=pattern)
    tokens = torch.randint(97, (2, 16))
    cache = KVCache(model.config, 2, tokens.device)
    parts = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 7), (7, 12), (12, 16))]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [4, 2])  # of 8 channels and of 18, which no half of pairs divides
def test_the_slowly_turning_half_of_a_key_is_that_of_the_token_before(heads):
    model = build(width=32 if heads == 4 else 36, heads=heads, kv_heads=heads)
    D, half = model.config.head_dim, model.config.head_dim // 2
    k = torch.randn(2, 5, heads, D)
    found = model.blocks[0].attn.offset_half(k, cache=None)
    assert model.cos[1, 0].argmax() == half - 1  # the last pair turns least
    for channel in range(D):
        before = torch.zeros(2, heads)
        for t in range(5):
            own = k[:, t, :, channel]
            from_before = channel % half >= half / 2
            assert torch.equal(found[:, t, :, channel], before if from_before else own)
            before = own


def test_the_initial_model_knows_nothing_and_is_reproducible():
    first, again, other = build(1, randomize=False), build(1, randomize=False), build(2, randomize=False)
    tokens = torch.randint(97, (4, 16))
    loss = first(tokens, torch.randint(97, (4, 16)))
    assert abs(loss - torch.log(torch.tensor(97.0))) < 0.02
    assert torch.equal(first(tokens), again(tokens))
    assert not torch.equal(first(tokens), other(tokens))


def test_a_state_dict_is_all_that_a_new_model_needs(monkeypatch):
    """Its rotary tables were what had been in memory, and its logits a little wrong."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(0.5))
    config = GPTConfig.from_depth(2, 96, 16)
    model, loaded = GPT(config), GPT(config)
    model.init_weights(0)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded.cos, model.cos) and torch.equal(loaded.sin, model.sin)


def test_the_mean_loss_has_no_second_derivative_and_the_losses_of_tokens_have():
    model = build(depth=1, width=16, heads=1, kv_heads=1, vocab_size=32, seq_len=8)
    weight, tokens = model.lm_head.weight, torch.randint(32, (2, 8))
    with pytest.raises(RuntimeError, match='no second derivative: take the mean of model.*reduction="none"'):
        torch.autograd.grad(model(tokens, tokens), weight, create_graph=True)
    with sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(
            model(tokens, tokens, reduction="none").mean(), weight, create_graph=True
        )
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    assert second.norm() > 0


def test_counts_and_flops():
    model = build(depth=4, width=64, heads=2, kv_heads=2, vocab_size=1000, seq_len=32)
    counts = model.parameter_counts()
    assert counts["total"] == sum(p.numel() for p in model.parameters())
    assert counts["wte"] == counts["lm_head"] == 64_000
    assert counts["value_embeds"] == 2 * 64_000  # every second layer
    shallow, deep = GPTConfig.from_depth(7, 1000, 32), GPTConfig.from_depth(8, 1000, 32)
    assert [layer for layer in range(7) if shallow.has_value_embed(layer)] == list(range(7))
    assert [layer for layer in range(8) if deep.has_value_embed(layer)] == [1, 3, 5, 7]
    assert counts["matrices"] == 4 * 12 * 64**2 + 2 * 2 * 32 and counts["scalars"] == 8 + 4 * 4 * 64
    tokens = torch.randint(1000, (2, 32))
    # attention as its two products and their four backwards: the fused one is counted by some PyTorchs only
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    assert 64 * model.estimate_flops() == counter.get_total_flops()
    # three of the four layers see 8 tokens of 32, and one sees all
    windowed = build(depth=4, width=64, heads=2, kv_heads=2, vocab_size=1000, seq_len=32, window_pattern="S")
    saved = model.estimate_flops() - windowed.estimate_flops()
    assert saved == 3 * 6 * 2 * (32 - 8) * 64


def test_targets_of_minus_one_are_not_scored():
    model = build()
    tokens, targets = torch.randint(97, (2, 16)), torch.randint(97, (2, 16))
    losses = model(tokens, targets, reduction="none")
    targets[:, 5:] = -1
    masked = model(tokens, targets, reduction="none").view(2, 16)
    assert torch.equal(masked[:, :5], losses.view(2, 16)[:, :5]) and not masked[:, 5:].any()
    torch.testing.assert_close(model(tokens, targets), losses.view(2, 16)[:, :5].mean())


def test_from_depth_gives_a_valid_family():
    for depth in range(1, 65):
        config = GPTConfig.from_depth(depth, 4096, 256)
        assert config.width == 64 * depth and config.window(depth - 1) is None
        assert config.head_dim == (128 if depth >= 8 and depth % 2 == 0 else 64)


@pytest.mark.parametrize(
    "fields, name",
    [
        (dict(depth=0), "depth"),
        (dict(vocab_size=0), "vocab_size"),
        (dict(width=33), "width"),
        (dict(kv_heads=3), "kv_heads"),
        (dict(window_pattern="SX"), "window_pattern"),
        (dict(window_pattern=""), "window_pattern"),
        (dict(short_window=0.0), "short_window"),
        (dict(short_window=1.5), "short_window"),
    ],
)
def test_impossible_shapes_are_refused_by_name(fields, name):
    with pytest.raises(ValueError, match=name):
        build(**fields)


def test_compute_dtype_leaves_float32_weights_and_gradients():
    with torch.device("meta"):
        model = GPT(GPTConfig(97, 16, 2, 32, 2, 2), torch.bfloat16)
    model.to_empty(device="cpu")
    model.init_weights(0)
    tokens = torch.randint(97, (2, 16))
    assert model(tokens).dtype == torch.float32
    model(tokens, tokens).backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_compiled_model_gives_the_same_loss_and_gradients():
    model = build(depth=1)
    tokens, targets = torch.randint(97, (2, 16)), torch.randint(97, (2, 16))
    eager = model(tokens, targets)
    eager.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, dynamic=False)(tokens, targets)
    compiled.backward()
    torch.testing.assert_close(compiled, eager)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


def test_compiled_the_gradient_of_an_embedding_is_the_eager_one_to_the_bit(request):
    """Atomic additions of several threads have another order in every run."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.manual_seed(0)
    embed, tokens, factors = Embedding(7, 64), torch.randint(7, (16, 1024)), torch.randn(16, 1024, 64)
    compiled, gradients = torch.compile(embed, dynamic=False), []
    for look_up in (embed, *[compiled] * 8):
        (gradient,) = torch.autograd.grad((look_up(tokens) * factors).sum(), embed.weight)
        gradients.append(gradient)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_by_chunks_is_the_capped_cross_entropy(chunks, dtype, monkeypatch):
    """Against the formula as it is in the papers, in float64, on the same hidden states and weight."""
    monkeypatch.setattr(head_loss, "MOST_CHUNKS", chunks)
    monkeypatch.setattr(head_loss, "SMALLEST_CHUNK", 97)  # of 50 tokens: chunks of 17, 17 and 16
    torch.manual_seed(0)
    hidden = (3 * torch.randn(50, 32)).to(dtype).requires_grad_()
    weight = torch.randn(97, 32, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    targets = torch.randint(97, (50,))
    targets[[3, 20, 21, 49]] = -1

    same_hidden, same_weight = hidden.detach().double(), weight.detach().to(dtype).double()
    same_hidden.requires_grad_()
    same_weight.requires_grad_()
    logits = 15 * torch.tanh(same_hidden @ same_weight.T / 15)
    expected = F.cross_entropy(logits, targets, ignore_index=-1)
    (expected / 3).backward()

    found = head_loss.mean_loss(hidden, weight, targets)
    (found / 3).backward()
    relative = 1e-13 if dtype == torch.float64 else 1e-2
    assert found.dtype == weight.dtype == weight.grad.dtype and hidden.grad.dtype == dtype
    for mine, theirs in (
        (found.detach(), expected.detach()),
        (hidden.grad, same_hidden.grad),
        (weight.grad, same_weight.grad),
    ):
        assert (mine.double() - theirs).norm() < relative * theirs.norm()
    with torch.no_grad():
        losses = head_loss.token_losses(hidden, lambda x: F.linear(x, weight.to(x.dtype)), 97, targets)
    theirs = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    assert (losses.double() - theirs).norm() < relative * theirs.norm() and not losses[targets < 0].any()


def test_a_head_that_is_another_module_is_asked_for_its_logits():
    model = build()
    tokens, targets = torch.randint(97, (2, 16)), torch.randint(97, (2, 16))
    expected = model(tokens, targets)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    head = torch.nn.Linear(32, 97, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    loss = model(tokens, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_the_logits_of_all_tokens_never_exist_together(monkeypatch):
    monkeypatch.setattr(head_loss, "SMALLEST_CHUNK", 1000)
    model = build(vocab_size=1000)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if torch.is_tensor(out) and out.is_floating_point():
                largest = max(largest, out.numel())
            return out

    tokens = torch.randint(1000, (32, 16))
    with Sizes():
        model(tokens, tokens).backward()
        with torch.no_grad():
            model(tokens, tokens, reduction="none")
    assert largest == tokens.numel() * 4 * 32  # the hidden channels of the MLPs, where the logits had 1,000


def test_compiled_no_chunk_is_left_to_look_its_targets_up(monkeypatch):
    """Inductor puts that off until the last chunk is there, and keeps the logits of all of them."""
    monkeypatch.setattr(head_loss, "SMALLEST_CHUNK", 97 * 10)
    forward = []

    def keep(graph, inputs):
        forward.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward))
    compiled = torch.compile(head_loss.mean_loss, backend=backend, dynamic=False, fullgraph=True)
    hidden, weight = torch.randn(40, 8).requires_grad_(), torch.randn(97, 8).requires_grad_()
    targets = torch.randint(-1, 97, (40,))
    found, expected = compiled(hidden, weight, targets), head_loss.mean_loss(hidden, weight, targets)
    torch.testing.assert_close(found, expected)
    in_both = [torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected)]
    torch.testing.assert_close(*in_both)
    [graph] = forward
    made_of_logits = collections.Counter()  # operations with one number for each row of a chunk
    for node in graph.graph.nodes:
        shapes = [getattr(value.meta.get("val"), "shape", None) for value in [node, *node.all_input_nodes]]
        if shapes[0] == (10, 1) and (10, 97) in shapes[1:]:
            made_of_logits[node.target] += 1
    assert made_of_logits == {torch.ops.aten.sum.dim_IntList: 2 * 4}  # in each chunk: total, and target


@pytest.mark.parametrize("T", [1, 3, 4, 9])
def test_the_convolution_is_a_sum_over_the_last_tokens(T):
    conv = Convolution(5).double()
    torch.nn.init.normal_(conv.taps)
    x, upstream = torch.randn(2, T, 5, dtype=torch.float64).requires_grad_(), torch.randn(2, T, 5).double()
    taps = conv.taps.view(TAPS, 5)
    expected = []
    for t in range(T):
        expected.append(x[:, t] + sum(taps[j] * x[:, t - j] for j in range(min(TAPS, t + 1))))
    gradients = torch.autograd.grad(torch.stack(expected, 1), (x, conv.taps), upstream)
    found = conv(x, None)
    torch.testing.assert_close(found, torch.stack(expected, 1))
    torch.testing.assert_close(torch.autograd.grad(found, (x, conv.taps), upstream), gradients)
