"""A mixture-of-experts MLP: every token goes through k of E small MLPs, picked by a router that learns.

Routing: sigmoid scores, the k largest win, no token is dropped. The output is the sum of the chosen experts,
each times 2 * sigmoid, which is 1 for a score of nothing: with k experts of 4/k of the usual width, a token
costs what it costs in the dense MLP, and a router that knows nothing makes the chosen experts together such
an MLP. Sigmoid scores are those of DeepSeek-V3 (arXiv 2412.19437); they are not normalised over the chosen,
because one chosen expert would then always count 1 and its router get no gradient.

Balance: without an auxiliary loss (arXiv 2408.15664). A bias joins the scores in the choice of experts only;
after every optimizer step `balance_` raises it where an expert got fewer tokens than the mean, and lowers the
others'.
"""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

BALANCE_SPEED = 1e-3  # change of the bias per step, arXiv 2408.15664


class MoE(nn.Module):
    """(..., width) -> (..., width). w1 (E, hidden, width), w2 (E, width, hidden): E matrices each, as in
    Linear.
    """

    def __init__(self, width: int, experts: int, per_token: int):
        super().__init__()
        hidden = 4 * width // per_token
        self.per_token = per_token
        self.router = nn.Parameter(torch.empty(experts, width))
        self.w1 = nn.Parameter(torch.empty(experts, hidden, width))
        self.w2 = nn.Parameter(torch.empty(experts, width, hidden))
        self.register_buffer("bias", torch.empty(experts))  # of the choice; part of checkpoints
        # (token, expert) pairs since the last balance_
        self.register_buffer("load", torch.empty(experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (N, width)
        logits = F.linear(tokens.to(self.router.dtype), self.router)  # (N, E) in the master dtype
        scores = torch.sigmoid(logits)
        chosen = (scores.detach() + self.bias).topk(self.per_token).indices  # (N, k)
        gates = 2 * scores.gather(1, chosen).to(x.dtype)
        load = F.one_hot(chosen, len(self.bias)).sum((0, 1))  # (E,) pairs of each expert
        if torch.is_grad_enabled():  # training
            self.load += load
        # Pairs in the order of their experts; stable, so that equal runs add in equal order
        order, ends = chosen.flatten().argsort(stable=True), load.cumsum(0)
        # Rows move by permutations only, whose gradients add nothing up and so come in one order on any
        # device
        pairs = tokens[:, None].expand(-1, self.per_token, -1).flatten(0, 1)[order]  # (N * k, width)
        hidden = F.relu(grouped_mm(pairs, self.w1.to(x.dtype), ends)).square()
        out = grouped_mm(hidden, self.w2.to(x.dtype), ends)[order.argsort()].unflatten(0, chosen.shape)
        return (gates[..., None] * out).sum(1).view_as(x)


@torch.no_grad()
def balance_(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """After an optimizer step: move the biases of all experts against their load over all ranks and
    micro-batches.

    Loads are integers and only the sign of their distance from the mean counts, so that the biases are the
    same on all ranks and for any world size. Collective.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        return
    load = torch.stack([layer.load for layer in layers])  # (layers, E)
    if dist.is_initialized():
        dist.all_reduce(load, group=group)
    experts = load.size(1)
    for layer, total in zip(layers, load, strict=True):
        layer.bias += BALANCE_SPEED * (total.sum() - experts * total).sign()
        layer.load.zero_()


@torch.library.custom_op("nanomuon::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x (M, n) in E groups of rows, group e ending before row ends[e]; w (E, m, n) -> (M, m), x_e w_e^T for
    each group.

    One kernel on CUDA in bf16, otherwise a product per expert. One op to the compiler, since the sizes of the
    groups are known at run time only.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, w.mT, offs=ends.int())
    out = x.new_empty(len(x), w.size(1))
    for rows, weight in zip(_groups(ends), w, strict=True):
        torch.mm(x[rows], weight.T, out=out[rows])
    return out


@torch.library.custom_op("nanomuon::grouped_outer", mutates_args=())
def grouped_outer(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """y (M, m), x (M, n) in E groups of rows -> (E, m, n), y_e^T x_e: the gradient of w. Groups may be
    empty.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        out = F.grouped_mm(y.T, x, offs=ends.int())
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return out.masked_fill_(empty[:, None, None], 0)  # the kernel may not write these: pytorch 172439
    out = x.new_empty(len(ends), y.size(1), x.size(1))
    for i, rows in enumerate(_groups(ends)):
        torch.mm(y[rows].T, x[rows], out=out[i])
    return out


def _groups(ends):
    """The rows of each group, as slices."""
    return [slice(start, end) for start, end in itertools.pairwise([0, *ends.tolist()])]


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    x, w, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return grouped_mm(grad, w.mT, ends), grouped_outer(grad, x, ends), None


grouped_mm.register_fake(lambda x, w, ends: x.new_empty(len(x), w.size(1)))
grouped_outer.register_fake(lambda y, x, ends: x.new_empty(len(ends), y.size(1), x.size(1)))
grouped_mm.register_autograd(_backward, setup_context=_save)
