"""The model without the x0 scalars: only the first block sees the embedding directly.

    x = block(x)        instead of block(x + lambda_layer x0), x0 the normalized embedding

Source: an ablation of `GPT.x0_scalars` (modded-nanogpt).
"""

import torch

from nanomuon.gpt import GPT


class NoX0Scalars(GPT):
    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__(config, compute_dtype)
        del self.x0_scalars
        self.register_buffer("x0_scalars", torch.empty(config.depth))  # zeros that are not trained

    def init_weights(self, seed=0, fill=torch.Tensor.copy_):
        super().init_weights(seed, fill)
        self.x0_scalars.zero_()


model = NoX0Scalars
