"""The loss of the head, a chunk of logits at a time: the logits of all tokens need not exist at once.

With a vocabulary of 65,536 the float32 logits of 32 rows of 2,048 tokens alone would take 17 GB. A training
step needs three things from them: the loss, the gradient of the hidden states and that of the weight. Each
chunk contributes to all three in the forward pass, then frees its logits. Nothing is computed twice. (The
idea is Liger Kernel's, arXiv 2410.10989.)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Logits pass through cap * tanh(x / cap): Gemma 2 (arXiv 2408.00118); 15 as in modded-nanogpt
LOGIT_CAP = 15.0
# Chunks with fewer logits (64 MB in float32) save too little memory. The speedrun on a CPU has a single
# chunk, whose kernels are compiled once
SMALLEST_CHUNK = 2**24
# A compiled model has kernels for every chunk, and each chunk adds its gradient of the weight to the sum, so
# more chunks take more time; and an eighth of the logits is already smaller than the blocks' activations
MOST_CHUNKS = 8


def chunk_rows(tokens: int, vocab_size: int) -> int:
    """How many of the `tokens` rows of logits exist at a time."""
    chunks = min(MOST_CHUNKS, -(-tokens * vocab_size // SMALLEST_CHUNK))
    return -(-tokens // chunks)


def capped(logits: Tensor) -> Tensor:
    """cap * tanh(x / cap) in float32 or better. Compiled for a CPU, the sigmoid takes half the time."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return LOGIT_CAP * (2 * torch.sigmoid(logits * (2 / LOGIT_CAP)) - 1)


def mean_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy in nats, float32 or better, of the capped logits hidden @ weight.T.

    hidden (N, width) in the compute dtype, weight (V, width) in its own, targets (N,) int64; -1 is not
    scored. The gradients are already computed when this returns.
    """
    return _MeanLoss.apply(hidden, weight, targets)


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets):
        product_weight = weight.to(hidden.dtype)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        scored = targets != -1
        shares = scored.to(dtype) / scored.sum()  # (N,), each token's share of the mean
        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        grad_weight = torch.zeros_like(weight)
        grad_hidden = []
        rows = chunk_rows(len(hidden), len(weight))
        for x, target, share in zip(hidden.split(rows), targets.split(rows), shares.split(rows), strict=True):
            part, grad = _loss_and_grad(F.linear(x, product_weight).to(dtype), target, share)
            grad = grad.to(x.dtype)
            loss = loss + part  # `+=`, compiled by PyTorch 2.11, would make every gradient zero
            grad_hidden.append(grad @ product_weight)
            grad_weight += grad.mT @ x
            del grad  # before the next chunk's logits
        ctx.save_for_backward(torch.cat(grad_hidden), grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # under create_graph=True; the saved tensors are constants
            raise RuntimeError("the mean loss has no second derivative")
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad * grad_hidden, grad * grad_weight, None


def _loss_and_grad(logits: Tensor, target: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over rows of share times cross-entropy, and its gradient with respect to the uncapped logits.

    logits (rows, V), uncapped, are overwritten; target (rows,), share (rows,).
    """
    target, share = target[:, None], share[:, None]
    # cap * (2 * half - 1) is the capped logit. Cross-entropy does not depend on the constant; without it the
    # largest exponential is e^30, and float32 can hold the sum of V of those
    half = logits.mul_(2 / LOGIT_CAP).sigmoid_()
    is_target = torch.arange(logits.size(1), device=logits.device) == target
    # A sum of zeros and one number, computed in one pass with `total`. Inductor would defer a gather to the
    # end, and keep the logits of all chunks until then
    half_of_target = torch.where(is_target, half, 0).sum(dim=1, keepdim=True)
    # Inductor would store the result of an exp that is read twice, and a CPU would take twice the time
    exponentials = (half * (2 * LOGIT_CAP / math.log(2))).exp2_()
    total = exponentials.sum(dim=1, keepdim=True)
    losses = total.log() - 2 * LOGIT_CAP * half_of_target
    # (softmax - one-hot target) times the slope of the cap
    grad = exponentials.mul_(share / total).sub_(torch.where(is_target, share, 0))
    slope = half.mul_(1 - half).mul_(4)
    return (share * losses).sum(), grad.mul_(slope)


def mean_loss_without_gradient(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """mean_loss for evaluation. head: maps hidden states (N, width) to uncapped logits (N, V)."""
    total = 0.0
    rows = chunk_rows(len(hidden), head.out_features)
    for x, target in zip(hidden.split(rows), targets.split(rows), strict=True):
        total = total + F.cross_entropy(capped(head(x)), target, ignore_index=-1, reduction="sum")
    return total / (targets != -1).sum()
