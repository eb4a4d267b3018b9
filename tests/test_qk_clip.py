"""QK-clip against a direct computation of all logits, on whole and sharded matrices, and in training."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nanomuon import qk_clip
from nanomuon.qk_clip import clip_, clip_qk_, record_largest_, watch_
from nanomuon.runtime import InputError
from scripts import base_train
from tests.test_gpt import build
from tests.training import arguments, losses
from tests.worlds import run_world

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 6, 3, 4, 10


def all_logits(q, k, window=None):
    """(H, B * T * T), -inf for keys that a query does not see."""
    k = k.repeat_interleave(q.size(2) // k.size(2), dim=2)
    logits = torch.einsum("bihd,bjhd->hbij", q, k) / q.size(3) ** 0.5
    i, j = torch.arange(q.size(1))[:, None], torch.arange(q.size(1))
    return logits.masked_fill((j > i) | (j <= i - (window or 1000)), -torch.inf).flatten(1)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_recorded_maximum_is_that_of_all_logits(window, kv_heads, monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 40, 4, 8), torch.randn(2, 40, kv_heads, 8)
    q[0, 3], q[:, :, 1] = 9 * q[0, 3], 0.01 * q[:, :, 1]  # one loud position, one quiet head
    expected = all_logits(q, k, window).amax(1)
    monkeypatch.setattr(qk_clip, "QUERIES", 16)  # blocks of 16, 16 and 8
    for start in (-1e9, 0.5, 1e9):
        largest = torch.full((4,), start)
        record_largest_(largest, q, k, window)
        torch.testing.assert_close(largest, expected.clamp(min=start))


def matrices():
    torch.manual_seed(0)
    wq = torch.randn(HEADS * HEAD_DIM, WIDTH, dtype=torch.float64)
    wk = torch.randn(KV_HEADS * HEAD_DIM, WIDTH, dtype=torch.float64)
    wq[:HEAD_DIM] *= 0.1  # head 0 stays below tau, head 1 of the same group does not
    return wq, wk, torch.randn(2, 12, WIDTH, dtype=torch.float64)


def logits_by_head(wq, wk, x):
    return all_logits((x @ wq.T).unflatten(2, (HEADS, -1)), (x @ wk.T).unflatten(2, (KV_HEADS, -1))).amax(1)


@pytest.mark.parametrize("alpha", [0.5, 0.2, 1.0])
def test_clipping_brings_every_head_to_tau(alpha):
    wq, wk, x = matrices()
    before, expected_q, expected_k = logits_by_head(wq, wk, x), wq.clone(), wk.clone()
    tau = before.sort().values[2].item() + 0.01  # three heads below, three above
    clip_qk_(wq, wk, before, tau, alpha)
    after = logits_by_head(wq, wk, x)
    assert (after <= tau * (1 + 1e-6)).all()
    for head in range(HEADS):
        group = head // 2
        loudest = max(before[2 * group : 2 * group + 2].tolist())
        expected_q[4 * head : 4 * head + 4] *= min(1, tau / before[head]) ** alpha
        if head % 2 == 0:
            expected_k[4 * group : 4 * group + 4] *= min(1, tau / loudest) ** (1 - alpha)
        if before[head] > tau and before[head] == loudest:
            assert after[head] == pytest.approx(tau)
    torch.testing.assert_close((wq, wk), (expected_q, expected_k), rtol=1e-6, atol=0)


def test_a_maximum_that_is_not_finite_scales_nothing():
    wq, wk, _ = matrices()
    before = wq.clone(), wk.clone()
    clip_qk_(wq, wk, torch.tensor([torch.inf, torch.nan, 1.0, 1.0, 1.0, 1.0]), 2.0)
    assert torch.equal(wq, before[0]) and torch.equal(wk, before[1])


def loud_model(**fields):
    model = build(qk_norm=False, **fields)
    for block in model.blocks:
        block.attn.q.weight.data *= 4
    return model


def batch(seed):
    return torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(seed))


def clip_by_ranks(group):
    model = loud_model()
    watch_(model, 3.0)
    for micro_batch in range(2):
        model(batch(2 * dist.get_rank(group) + micro_batch))
    clip_(model, 3.0, group=group)
    return [p.detach().numpy() for p in model.parameters()]


def test_the_maximum_is_over_ranks_and_micro_batches():
    model, inputs = loud_model(), torch.cat([batch(seed) for seed in range(4)])
    before = [block.attn.q.weight.clone() for block in model.blocks]
    assert not any("logits" in name for name in model.state_dict())
    watch_(model, 3.0)
    model(inputs)
    clip_(model, 3.0)
    for block, weight in zip(model.blocks, before, strict=True):
        assert not torch.equal(block.attn.q.weight, weight)
    for parameters in run_world(2, clip_by_ranks):
        for ours, theirs in zip(model.parameters(), parameters, strict=True):
            assert torch.equal(ours, torch.from_numpy(theirs))
    with torch.no_grad():  # only training forwards are recorded
        model(inputs)
    assert all((block.attn.largest_logits == 3).all() for block in model.blocks)


def test_compiled_the_same_is_recorded_in_one_graph():
    model, found = loud_model(depth=1), []
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        watch_(model, 3.0)
        forward(batch(0), batch(1)).backward()
        found.append(model.blocks[0].attn.largest_logits)
    assert (found[0] > 3).any() and not any("logits" in name for name in model.state_dict())
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("environment")
def test_base_train_clips_between_steps(base):
    flags = "--no-qk-norm --eval-every -1 --save-every -1 --matrix-lr 0.1 --seed 1".split()
    norms = {}
    for run, more in (("free", ()), ("loose", ("--qk-clip", "1e9")), ("clipped", ("--qk-clip", "0.5"))):
        assert base_train.main(arguments(base, run, 10, *flags, *more)) == 0
        norms[run] = load_file(base / f"runs/{run}/model.safetensors")["blocks.1.attn.q.weight"].norm()
    assert losses(base, "free") == losses(base, "loose")
    assert losses(base, "free")[-1] != losses(base, "clipped")[-1]
    assert norms["clipped"] < 0.7 * norms["free"]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("options", [("--qk-clip", "100"), ("--no-qk-norm", "--qk-clip", "0")])
def test_clipping_where_it_means_nothing_is_refused(base, options):
    with pytest.raises(InputError, match="--qk-clip"):
        base_train.main(arguments(base, "refused", 1, *options))
