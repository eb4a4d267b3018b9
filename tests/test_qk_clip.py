"""QK-clip against a direct computation of all logits, on one process and two, compiled, and in training."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nanomuon import qk_clip
from nanomuon.qk_clip import clip_, clip_qk_, record_largest_, watch_
from tests.reference import equal
from tests.test_attention import all_scores
from tests.test_gpt import build
from tests.training import QUIET, train
from tests.worlds import run_world


def largest_logits(q, k, window=None):
    """(H,), for q (B, T, H, D) and k (B, T, Hkv, D)."""
    return all_scores(q, k, window).amax((0, 2, 3))


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_recorded_maximum_is_that_of_all_logits(window, kv_heads, monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 40, 4, 8), torch.randn(2, 40, kv_heads, 8)
    q[0, 3], q[:, :, 1] = 9 * q[0, 3], 0.01 * q[:, :, 1]  # one loud position, one quiet head
    monkeypatch.setattr(qk_clip, "QUERIES", 16)  # blocks of 16, 16 and 8
    for start in (-1e9, 0.5):
        largest = torch.full((4,), start)
        record_largest_(largest, q, k, window)
        expected = largest_logits(q, k, window).clamp(min=start).float()
        torch.testing.assert_close(largest, expected)


def test_clipping_brings_every_head_to_tau():
    torch.manual_seed(0)
    wq = torch.randn(6 * 4, 10, dtype=torch.float64)  # six heads of four channels, two to a key head
    wk, x = torch.randn(3 * 4, 10, dtype=torch.float64), torch.randn(2, 12, 10, dtype=torch.float64)
    wq[:4] *= 0.1  # head 0 stays below tau, head 1 of the same group does not

    def found():
        return largest_logits((x @ wq.T).unflatten(2, (6, -1)), (x @ wk.T).unflatten(2, (3, -1)))

    before, expected_q, expected_k = found(), wq.clone(), wk.clone()
    tau = before.sort().values[2].item() + 0.01  # three heads below, three above
    clip_qk_(wq, wk, torch.full((6,), torch.nan), tau)  # a maximum that is not finite scales nothing
    clip_qk_(wq, wk, before, tau)
    assert (found() <= tau * (1 + 1e-6)).all()
    eta = (tau / before).clamp(max=1)
    expected_q *= eta.repeat_interleave(4)[:, None] ** 0.5
    expected_k *= eta.view(3, 2).amin(1).repeat_interleave(4)[:, None] ** 0.5
    torch.testing.assert_close((wq, wk), (expected_q, expected_k), rtol=1e-6, atol=0)


def loud_model():
    model = build(qk_norm=False)
    for block in model.blocks:
        block.attn.q.weight.data *= 4
    watch_(model, 3.0)
    return model


def batch(seed):
    return torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(seed))


def clip_by_ranks(group):
    model = loud_model()
    for micro_batch in range(2):
        model(batch(2 * dist.get_rank(group) + micro_batch))
    clip_(model, 3.0, group=group)
    return [p.detach() for p in model.parameters()]


def test_the_maximum_is_over_ranks_and_micro_batches():
    model, before = loud_model(), loud_model()
    inputs = torch.cat([batch(seed) for seed in range(4)])
    model(inputs)
    assert not any("logits" in name for name in model.state_dict())
    clip_(model, 3.0)
    for block, old in zip(model.blocks, before.blocks, strict=True):
        assert not torch.equal(block.attn.q.weight, old.attn.q.weight)
    for parameters in run_world(2, clip_by_ranks):
        assert equal(model.parameters(), parameters)
    with torch.no_grad():  # only training forwards are recorded
        model(inputs)
    assert all((block.attn.largest_logits == 3).all() for block in model.blocks)


@pytest.mark.usefixtures("environment")
def test_a_run_clips(base):
    norms = {}
    for tau in ("1e9", "0.5"):
        train(base, tau, 4, *QUIET, "--no-qk-norm", "--matrix-lr", "0.1", "--qk-clip", tau)
        norms[tau] = load_file(base / "runs" / tau / "model.safetensors")["blocks.1.attn.q.weight"].norm()
    assert norms["0.5"] < 0.7 * norms["1e9"]
