"""The model without the causal convolution on the input of every MLP.

    x + MLP(norm(x))        instead of x + MLP(conv(norm(x))), four taps for each channel

Source: an ablation of `gpt.Convolution` (Primer, arXiv 2109.08668; Canon layers, Allen-Zhu 2025).
"""

import torch
from torch import nn

from nanomuon.gpt import GPT


class Unmixed(nn.Module):
    def forward(self, x, cache):
        return x


class NoConvolution(GPT):
    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__(config, compute_dtype)
        for block in self.blocks:
            block.conv = Unmixed()


model = NoConvolution
