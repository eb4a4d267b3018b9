"""QK-clip against a direct computation of all logits, on whole and sharded matrices, and in training."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nanomuon import qk_clip
from nanomuon.optim import MuonAdamW
from nanomuon.param_groups import build_param_groups
from nanomuon.qk_clip import clip_, clip_qk_, record_largest_, watch_
from nanomuon.runtime import InputError
from scripts import base_train
from tests.test_gpt import build
from tests.training import arguments, losses
from tests.worlds import run_world

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 6, 3, 4, 10


def largest_by_hand(q, k, window=None):
    """(H,) from every pair of positions, one at a time."""
    largest = [-torch.inf] * q.size(2)
    for h in range(q.size(2)):
        for i in range(q.size(1)):
            for j in range(0 if window is None else max(0, i - window + 1), i + 1):
                logits = (q[:, i, h] * k[:, j, h * k.size(2) // q.size(2)]).sum(-1) / q.size(3) ** 0.5  # (B,)
                largest[h] = max(largest[h], logits.max().item())
    return torch.tensor(largest)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_recorded_maximum_is_that_of_all_logits(window, kv_heads, monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 40, 4, 8), torch.randn(2, 40, kv_heads, 8)
    q[0, 3], q[:, :, 1] = 9 * q[0, 3], 0.01 * q[:, :, 1]  # one loud position, one quiet head
    expected = largest_by_hand(q, k, window)
    monkeypatch.setitem(qk_clip.LOGITS_AT_ONCE, "cpu", 1)  # blocks of 16 queries: 16, 16 and 8
    for start in (-1e9, 0.5, 1e9):
        largest = torch.full((4,), start)
        record_largest_(largest, q, k, window)
        torch.testing.assert_close(largest, expected.clamp(min=start))


def test_nothing_is_computed_where_the_bound_excludes_it(monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 40, 4, 8), torch.randn(2, 40, 2, 8)
    q[:, :, 2] *= 5
    bound = (q.norm(dim=-1).amax((0, 1)) * k.norm(dim=-1).amax((0, 1)).repeat_interleave(2) / 8**0.5).tolist()
    tau, measured = sorted(bound)[2] + 0.1, []  # only head 2 may exceed it
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: measured.append(a.shape) or product(a, b))
    record_largest_(torch.full((4,), tau), q, k, None)
    assert [shape[1] for shape in measured] == [1]
    record_largest_(torch.full((4,), max(bound) + 0.1), q, k, None)
    assert len(measured) == 1


def matrices():
    torch.manual_seed(0)
    wq = torch.randn(HEADS * HEAD_DIM, WIDTH, dtype=torch.float64)
    wk = torch.randn(KV_HEADS * HEAD_DIM, WIDTH, dtype=torch.float64)
    wq[:HEAD_DIM] *= 0.1  # head 0 stays below tau, head 1 of the same group does not
    return wq, wk, torch.randn(2, 12, WIDTH, dtype=torch.float64)


def logits_by_head(wq, wk, x):
    return largest_by_hand((x @ wq.T).unflatten(2, (HEADS, -1)), (x @ wk.T).unflatten(2, (KV_HEADS, -1)))


@pytest.mark.parametrize("alpha", [0.5, 0.2, 1.0])
def test_clipping_brings_every_head_to_tau(alpha):
    wq, wk, x = matrices()
    before, q_before, k_before = logits_by_head(wq, wk, x), wq.clone(), wk.clone()
    tau = before.sort().values[2].item() + 0.01  # three heads below, three above
    clip_qk_(wq, wk, before, tau, alpha)
    after = logits_by_head(wq, wk, x)
    assert (after <= tau * (1 + 1e-6)).all()
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        loudest = max(before[2 * group : 2 * group + 2].tolist())
        q_factor, k_factor = min(1, tau / before[head]) ** alpha, min(1, tau / loudest) ** (1 - alpha)
        rows, k_rows = slice(4 * head, 4 * head + 4), slice(4 * group, 4 * group + 4)
        torch.testing.assert_close(wq[rows], q_before[rows] * q_factor, rtol=1e-6, atol=0)
        torch.testing.assert_close(wk[k_rows], k_before[k_rows] * k_factor, rtol=1e-6, atol=0)
        if before[head] > tau and before[head] == loudest:
            assert after[head] == pytest.approx(tau)
        if before[head] <= tau:
            assert torch.equal(wq[rows], q_before[rows])


def test_a_maximum_that_is_not_finite_scales_nothing():
    wq, wk, _ = matrices()
    before = wq.clone(), wk.clone()
    clip_qk_(wq, wk, torch.tensor([torch.inf, torch.nan, 1.0, 1.0, 1.0, 1.0]), 2.0)
    assert torch.equal(wq, before[0]) and torch.equal(wk, before[1])


@pytest.mark.parametrize("heads, kv_rows", [(5, 12), (6, 10), (6, 16)])
def test_sizes_that_do_not_divide_are_refused(heads, kv_rows):
    with pytest.raises(ValueError, match="24 rows"):
        clip_qk_(torch.ones(24, 2), torch.ones(kv_rows, 2), torch.ones(heads))


def shards(group, layout):
    """Clip matrices in pieces; their wholes afterwards."""
    wq, wk, x = matrices()
    S = logits_by_head(wq, wk, x)
    if layout == "rows over columns over rows":  # FSDP2 over tensor parallelism: strided shards
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
        pieces = []
        for w in (wq, wk):
            linear = torch.nn.Linear(WIDTH, len(w), bias=False, dtype=w.dtype)
            linear.weight.data = w
            fully_shard(parallelize_module(linear, mesh["tp"], ColwiseParallel()), mesh=mesh["dp"])
            pieces.append(linear.weight)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        pieces = [distribute_tensor(w, mesh, [Shard(0 if layout == "rows" else 1)]) for w in (wq, wk)]
    with torch.no_grad():
        placements = [piece.placements for piece in pieces]
        clip_qk_(*pieces, S, tau=5.0, alpha=0.3)
        assert [piece.placements for piece in pieces] == placements
        return [piece.full_tensor().numpy() for piece in pieces]


@pytest.mark.parametrize(
    "size, layout",
    [(2, "rows"), (3, "rows"), (4, "rows"), (2, "columns"), (4, "rows over columns over rows")],
)
def test_shards_are_clipped_as_the_whole(size, layout):
    wq, wk, x = matrices()
    clip_qk_(wq, wk, logits_by_head(wq, wk, x), tau=5.0, alpha=0.3)
    for whole_q, whole_k in run_world(size, shards, layout):
        assert torch.equal(torch.from_numpy(whole_q), wq) and torch.equal(torch.from_numpy(whole_k), wk)


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
    watch_(model, 3.0)
    model(inputs)
    clip_(model, 3.0)
    for block, weight in zip(model.blocks, before, strict=True):
        assert not torch.equal(block.attn.q.weight, weight)
    for parameters in run_world(2, clip_by_ranks):
        for ours, theirs in zip(model.parameters(), parameters, strict=True):
            assert torch.equal(ours, torch.from_numpy(theirs))
    with torch.no_grad():
        model(inputs)
    # only training forwards are recorded
    assert all((block.attn.largest_logits == 3).all() for block in model.blocks)


def clip_in_tensor_parallel(group):
    model = loud_model(depth=2)
    styles = dict.fromkeys("qkv", ColwiseParallel()) | {"o": RowwiseParallel()}
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    parallelize_module(model.blocks[0].attn, mesh, styles)  # which has no value embedding
    watch_(model, 3.0)
    model(batch(0)).sum().backward()
    clip_(model, 3.0, group=group)
    return [
        model.blocks[0].attn.q.weight.full_tensor().detach().numpy(),
        model.blocks[0].attn.k.weight.full_tensor().detach().numpy(),
        model.blocks[1].attn.q.weight.detach().numpy(),
    ]


def test_heads_spread_over_a_tensor_parallel_group_are_clipped_as_one_process_does():
    model = loud_model(depth=2)
    watch_(model, 3.0)
    model(batch(0))
    clip_(model, 3.0)
    expected = [model.blocks[0].attn.q.weight, model.blocks[0].attn.k.weight, model.blocks[1].attn.q.weight]
    before = loud_model(depth=2).blocks[0].attn.q.weight
    for head_before, head in zip(before.split(8), expected[0].split(8), strict=True):
        assert not torch.equal(head_before, head)
    for weights in run_world(2, clip_in_tensor_parallel):
        for ours, theirs in zip(expected, weights, strict=True):
            torch.testing.assert_close(torch.from_numpy(theirs), ours)


def test_watching_is_one_graph_and_absent_when_off():
    graphs = []

    def capture(graph, inputs):
        graphs.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph

    for watched in (False, True):
        torch._dynamo.reset()
        model = loud_model(depth=1)
        assert not any("logits" in name for name in model.state_dict())
        if watched:
            watch_(model, 3.0)
        torch.compile(model, backend=capture, fullgraph=True)(batch(0), batch(1)).backward()
        assert not any("logits" in name for name in model.state_dict())
    assert len(graphs) == 2 and "record_largest" not in graphs[0] and "record_largest" in graphs[1]
    compiled = model.blocks[0].attn.largest_logits.clone()
    model.blocks[0].attn.largest_logits.fill_(3.0)
    model(batch(0))
    assert torch.equal(compiled, model.blocks[0].attn.largest_logits) and (compiled > 3).any()


def train(clip, tau=40.0, steps=250):
    """Largest logit of every step of a run on one batch, with a high learning rate."""
    model, seen = build(qk_norm=False, randomize=False, depth=1), []
    groups = build_param_groups(
        model,
        muon=dict(lr=0.05, momentum=0.95, ns_steps=5, beta2=None, weight_decay=0.0),
        adamw=dict(lr=0.01, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.0),
        skip_keys=["value_gate"],
    )
    optimizer = MuonAdamW(groups)
    tokens = torch.randint(97, (8, 17), generator=torch.Generator().manual_seed(1))
    tokens[:, 9:] = tokens[:, :8]  # something for attention to find
    attn = model.blocks[0].attn
    for _ in range(steps):
        watch_(model, -1e9)  # to see them all
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        seen.append(attn.largest_logits.max().item())
        optimizer.step()
        optimizer.zero_grad()
        if clip:
            attn.largest_logits.clamp_(min=tau)
            clip_(model, tau)
    return seen


def test_logits_that_explode_stay_at_tau(monkeypatch):
    monkeypatch.setenv("NANOMUON_COMPILE", "0")
    without, tame = train(clip=False), train(clip=True)
    assert without[-1] > 4 * 40
    assert tame[-1] > 40 and max(tame) < 1.1 * 40


@pytest.mark.usefixtures("environment")
def test_base_train_clips_between_steps(base):
    options = (
        "--no-qk-norm",
        "--eval-every",
        "-1",
        "--save-every",
        "-1",
        "--matrix-lr",
        "0.1",
        "--seed",
        "1",
    )
    for run, more in (("free", ()), ("loose", ("--qk-clip", "1e9")), ("clipped", ("--qk-clip", "0.5"))):
        assert base_train.main(arguments(base, run, 10, *options, *more)) == 0
    assert (
        losses(base, "free") == losses(base, "loose")
        and losses(base, "free")[-1] != losses(base, "clipped")[-1]
    )
    norms = {}
    for run in ("free", "clipped"):
        weights = load_file(base / "runs" / run / "model.safetensors")
        norms[run] = weights["blocks.1.attn.q.weight"].norm()
        assert "blocks.1.attn.largest_logits" not in weights
    assert norms["clipped"] < 0.7 * norms["free"]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("options", [("--qk-clip", "100"), ("--no-qk-norm", "--qk-clip", "0")])
def test_clipping_where_it_means_nothing_is_refused(base, options):
    with pytest.raises(InputError, match="--qk-clip"):
        base_train.main(arguments(base, "refused", 1, *options))


if __name__ == "__main__":  # python -m tests.test_qk_clip: the two curves
    for clip in (False, True):
        seen = train(clip)
        print("tau 40" if clip else "off   ", *(f"{largest:6.1f}" for largest in (*seen[::25], seen[-1])))
