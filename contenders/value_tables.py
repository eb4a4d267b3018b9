"""Tables of value embeddings in every other layer, including the last one, instead of the head's rows.

    v_t = W_v x_t + gate(x_t) E_layer[token t]        in layers with a table, W_v x_t in the others

Tables start uniform with deviation 1/sqrt(width), like W_v, and have the rate of the token embedding.

Source: modded-nanogpt (value embeddings) and nanochat (alternating layers, gates of 32 channels).
"""

import torch
from torch import nn

from nanomuon.gpt import GPT, Attention


class OwnRows(Attention):
    """Attention that gets the rows of its own layer."""

    def forward(self, x, rows, rope, cache):
        return super().forward(x, rows[self.layer], rope, cache)


class ValueTables(GPT):
    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__(config, compute_dtype)
        self.channels = config.kv_heads * config.head_dim
        tables = nn.ModuleDict()
        for layer, block in enumerate(self.blocks):
            block.attn = OwnRows(config, layer)
            if (config.depth - 1 - layer) % 2 == 0:
                tables[str(layer)] = nn.Embedding(config.vocab_size, self.channels)
        self.values = nn.ModuleDict({"wte": tables})  # the recipe finds the rate by this name

    def init_weights(self, seed=0, fill=torch.Tensor.copy_):
        super().init_weights(seed, fill)
        generator = torch.Generator(device=self.cos.device).manual_seed(seed + 1)
        bound = (3 / self.config.width) ** 0.5
        for table in self.values["wte"].values():
            values = torch.empty_like(table.weight).uniform_(-bound, bound, generator=generator)
            fill(table.weight.detach(), values)

    def look_up(self, tokens):
        embed = self.wte(tokens).to(self.compute_dtype)
        rows = [embed.new_zeros(*tokens.shape, self.channels)] * len(self.blocks)
        for layer, table in self.values["wte"].items():
            rows[int(layer)] = table(tokens).to(self.compute_dtype)
        return embed, rows


model = ValueTables
