"""Attention against the definition. test_gpt.py checks what the model calls."""

import inspect
import itertools

import pytest
import torch
import torch.nn.attention.varlen as varlen_module

from nanomuon import attention as module
from nanomuon.attention import WHOLE_SCORES, attention, sdpa, use_flash_attention, whole_scores

CPU = torch.device("cpu")


def tensors(B=2, T=48, H=4, Hkv=2, D=16):
    torch.manual_seed(0)
    return [torch.randn(B, T, heads, D) for heads in (H, Hkv, Hkv)]


def definition(q, k, v, window=None):
    """One query and one head at a time."""
    out = torch.empty_like(q)
    for i in range(q.size(1)):
        seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
        for h in range(q.size(2)):
            kv = h * k.size(2) // q.size(2)
            weights = torch.softmax((k[:, seen, kv] @ q[:, i, h, :, None])[..., 0] / q.size(3) ** 0.5, -1)
            out[:, i, h] = (weights[..., None] * v[:, seen, kv]).sum(1)
    return out


@pytest.mark.parametrize("window", [None, 1, 10])
@pytest.mark.parametrize("backend", [sdpa, whole_scores])
def test_backends_of_the_cpu_are_the_definition(backend, window):
    q, k, v = tensors()
    torch.testing.assert_close(backend(q, k, v, window), definition(q, k, v, window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_gradients_of_whole_scores_are_those_of_the_definition(window):
    inputs = [x.double().requires_grad_() for x in tensors(B=1, T=12, D=4)]
    assert torch.autograd.gradcheck(lambda q, k, v: whole_scores(q, k, v, window), inputs)
    q, k, v = (x.detach()[:, :, :2].flatten(0, 1).contiguous().requires_grad_() for x in inputs)
    torch.library.opcheck(module.attend, (q, k, v, window or 12))


def test_a_cpu_in_bf16_takes_whole_scores_where_they_are_small_and_few(monkeypatch):
    asked = []
    for backend in (sdpa, whole_scores):
        monkeypatch.setattr(
            module, backend.__name__, lambda q, k, v, window, name=backend.__name__: asked.append(name)
        )
    short, long = ([x.bfloat16() for x in tensors(B=1, T=T)] for T in (WHOLE_SCORES, WHOLE_SCORES + 1))
    attention(*short, normalized=True)
    attention(*long, normalized=True)
    attention(*short)  # large scores would lose digits
    attention(*[x.float() for x in short], normalized=True)
    attention(short[0][:, -1:], *short[1:], normalized=True)  # decoding
    assert asked == ["whole_scores", "sdpa", "sdpa", "sdpa", "sdpa"]


def test_varlen_asks_for_the_rows_and_keys_that_count(monkeypatch):
    """The kernel needs a GPU: in its place stands its documented meaning, (left, right) keys around the
    query's own.
    """
    arguments = inspect.signature(varlen_module.varlen_attn)

    def varlen_attn(*args, **keywords):
        bound = arguments.bind(*args, **keywords)
        q, k, v, ends, ends_k, longest, longest_k = bound.args
        assert torch.equal(ends, ends_k) and longest == longest_k and ends.dtype == torch.int32
        left, right = bound.kwargs["window_size"]
        assert q.shape == k.shape and right == 0
        bounds = ends.tolist()
        assert max(b - a for a, b in itertools.pairwise(bounds)) == longest
        rows = [
            definition(q[None, a:b], k[None, a:b], v[None, a:b], left + 1)
            for a, b in itertools.pairwise(bounds)
        ]
        return torch.cat(rows, dim=1)[0]

    monkeypatch.setattr(varlen_module, "varlen_attn", varlen_attn)
    q, k, v = tensors()
    torch.testing.assert_close(module.varlen(q, k, v, 10), definition(q, k, v, 10))


@pytest.mark.parametrize("installed", [True, False])
def test_flash_attention_is_the_one_of_the_gpu_if_it_is_installed(monkeypatch, installed):
    def activate(name):
        if not installed:
            raise ModuleNotFoundError("No module named 'flash_attn'")
        active.append(name)

    active = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    for capability, name in ((9, 0), "FA3"), ((10, 0), "FA4"), ((8, 0), None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert use_flash_attention(torch.device("cuda")) == (name if installed else None)
    assert use_flash_attention(CPU) is None and active == (["FA3", "FA4"] if installed else [])
