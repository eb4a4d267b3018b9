"""The model without the gate of the head's rows: they are added to the values unscaled.

    v_t = W_v x_t + row_t        instead of W_v x_t + 2 sigmoid(W_g x_t[:32]) row_t, a gate for each head

The gates are 1 at the start.

Source: an ablation of `Attention.value_gate` (nanochat).
"""

import torch
from torch import nn

from nanomuon.gpt import GPT


class Open(nn.Module):
    """Gate logits of zero, which make the gates 1."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def forward(self, x):
        return x.new_zeros(*x.shape[:-1], self.heads)


class NoValueGate(GPT):
    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__(config, compute_dtype)
        for block in self.blocks:
            block.attn.value_gate = Open(config.kv_heads)


model = NoValueGate
