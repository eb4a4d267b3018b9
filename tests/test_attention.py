"""Attention against its definition in float64, and when it uses FlashAttention."""

import pytest
import torch

from nanomuon.attention import attention, kernels_in_use, use_flash_attention, whole_scores


def tensors(T=48, Hkv=2):
    torch.manual_seed(0)
    return torch.randn(2, T, 4, 16), torch.randn(2, T, Hkv, 16), torch.randn(2, T, Hkv, 16)


def all_scores(q, k, window=None):
    """(B, H, T, T) in float64: q k^T / sqrt(D), or -inf if the query does not see the key."""
    k = k.repeat_interleave(q.size(2) // k.size(2), dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / q.size(3) ** 0.5
    i, j = torch.arange(q.size(1))[:, None], torch.arange(q.size(1))
    return scores.masked_fill((j > i) | (j <= i - (window or 1000)), -torch.inf)


def definition(q, k, v, window=None):
    v = v.repeat_interleave(q.size(2) // v.size(2), dim=2)
    return torch.einsum("bhij,bjhd->bihd", all_scores(q, k, window).softmax(-1), v.double())


@pytest.mark.parametrize("window", [None, 1, 10, 47, 48, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_definition(window, kv_heads):
    q, k, v = tensors(Hkv=kv_heads)
    expected = definition(q, k, v, window).float()
    torch.testing.assert_close(attention(q, k, v, window), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole_scores(q, k, v, window), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size, how", [(1, dict(normalized=True)), (20, {})])
def test_in_bf16_only_small_scores_are_rounded(size, how):
    q, k, v = (x.bfloat16() for x in tensors())
    error = attention(size * q, k, v, **how).double() - definition(size * q, k, v)
    assert error.norm() < 5e-3 * v.double().norm()


@pytest.mark.parametrize(
    "capability, names, failing, chosen",
    [
        (8, "FA3 FA4", "", None),
        (9, "FA3 FA4", "", "FA3"),
        (9, "FA4", "", "FA4"),
        (9, "FA3 FA4", "FA3", "FA4"),
        (9, "FA3 FA4", "FA3 FA4", None),  # 4 fails on an H200 with PyTorch 2.11
        (10, "FA3 FA4", "", "FA4"),
        (10, "FA3", "", None),
        (12, "FA3 FA4", "", None),
    ],
)
# RuntimeError: from PyTorch, of a package without the kernels
@pytest.mark.parametrize("missing", [ModuleNotFoundError, RuntimeError])
def test_flash_attention_is_one_that_is_installed_and_trains_with_windows_on_this_gpu(
    monkeypatch, installed, recwarn, capability, names, failing, chosen, missing
):
    """A warning names one that fails."""

    def trial(device):
        if torch.nn.attention.current_flash_attention_impl() in failing.split():
            raise RuntimeError("windowed attention not supported")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 3))
    installed(*names.split(), missing=missing, trial=trial)
    assert use_flash_attention(torch.device("cuda"), torch.bfloat16) == chosen
    assert torch.nn.attention.current_flash_attention_impl() == chosen
    assert kernels_in_use() == (chosen or "PyTorch's own").replace("FA", "FlashAttention ")
    why = "is installed, but fails on this GPU: windowed attention not supported"
    assert [str(warning.message) for warning in recwarn] == [f"{name} {why}" for name in failing.split()]


def test_cpus_float32_and_deterministic_runs_keep_pytorchs_own_attention(monkeypatch, installed):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    installed("FA3", "FA4")
    use_flash_attention(torch.device("cpu"), torch.bfloat16)
    use_flash_attention(torch.device("cuda"), torch.float32)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    use_flash_attention(torch.device("cuda"), torch.bfloat16)
    assert torch.nn.attention.current_flash_attention_impl() is None
