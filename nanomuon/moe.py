"""A mixture-of-experts MLP: every token goes through k of E small MLPs, picked by a learned router.

Routing: sigmoid scores, the k largest win, no token is dropped. The output is the sum of the chosen experts,
each times 2 * sigmoid, which is 1 for a logit of 0: k experts of hidden width 4/k * width cost a token as
much as the dense MLP, and with an untrained router the chosen experts together are such an MLP. Sigmoid
scores are those of DeepSeek-V3 (arXiv 2412.19437); they are not normalized over the chosen experts, because a
single one would then always have weight 1 and its router no gradient.

Balance: without an auxiliary loss (arXiv 2408.15664). A bias is added to the scores only to choose experts;
after every optimizer step `balance_` raises it for experts with fewer tokens than the mean, and lowers it for
those with more.
"""

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
        self.register_buffer("bias", torch.empty(experts))  # for the choice; part of checkpoints
        # (token, expert) pairs since the last balance_
        self.register_buffer("load", torch.empty(experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (N, width)
        logits = F.linear(tokens.to(self.router.dtype), self.router)  # (N, E) in the master dtype
        scores = torch.sigmoid(logits)
        chosen = (scores.detach() + self.bias).topk(self.per_token).indices  # (N, k)
        gates = 2 * scores.gather(1, chosen).to(x.dtype)
        experts = torch.arange(len(self.bias), device=x.device)
        load = (chosen[..., None] == experts).sum((0, 1))  # (E,) pairs per expert
        if torch.is_grad_enabled():  # training
            self.load += load
        # Sort the pairs by expert, stably, so that equal runs add in equal order. Rows move by permutations
        # only, whose gradients add nothing up and so are deterministic on any device
        order = chosen.flatten().argsort(stable=True)  # (N * k,)
        pairs = tokens[:, None].expand(-1, self.per_token, -1).flatten(0, 1)[order]  # (N * k, width)
        hidden = F.relu(grouped_mm(pairs, self.w1, load)).square()
        out = grouped_mm(hidden, self.w2, load)[order.argsort()].unflatten(0, chosen.shape)
        return (gates[..., None] * out).sum(1).view_as(x)


def grouped_mm(x: Tensor, w: Tensor, load: Tensor) -> Tensor:
    """x (M, n), whose rows belong to E matrices in turn, load (E,) rows to each; w (E, m, n) -> x_e w_e^T,
    (M, m).

    PyTorch's kernel takes bf16. The code for other dtypes cannot be compiled, see parallel.compile_model.
    """
    if x.dtype != torch.bfloat16:
        parts = zip(x.split(load.tolist()), w.to(x.dtype), strict=True)
        return torch.cat([rows @ matrix.T for rows, matrix in parts])
    # The kernel may not write the gradient of a matrix without rows (pytorch 172439): `where` discards it
    w = torch.where((load > 0)[:, None, None], w, 0).to(x.dtype)
    return F.grouped_mm(x, w.mT, offs=load.cumsum(0).int())


@torch.no_grad()
def balance_(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """After an optimizer step: move the biases of all experts against their load over all ranks and
    micro-batches.

    Loads are integers and only the sign of their distance from the mean counts, so the biases are the same on
    all ranks and for any world size. Collective.
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
