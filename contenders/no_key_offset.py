"""The model without the key offset: a key comes only from its own token.

    k_t = W_k x_t        instead of half of its channels from W_k x_(t-1)

Source: an ablation of `Attention.offset_half` (modded-nanogpt, "partial key offset").
"""

import torch

from nanomuon.gpt import GPT, Attention


class OwnKeys(Attention):
    def offset_half(self, k, cache):
        return k


class NoKeyOffset(GPT):
    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__(config, compute_dtype)
        for layer, block in enumerate(self.blocks):
            block.attn = OwnKeys(config, layer)


model = NoKeyOffset
