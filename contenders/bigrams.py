"""A table of embeddings for pairs of adjacent tokens, found by a hash and added to the token's own embedding.

    x_t = wte[token t] + E[hash(token t-1, token t) mod rows]        rows = 5 x the vocabulary

The table starts at zero and has the rate of the token embedding.

Source: modded-nanogpt (bigram hash embedding); over-tokenized transformers (arXiv 2501.16975).
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanomuon.gpt import GPT

ROWS = 5  # for each token of the vocabulary


class Bigrams(GPT):
    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__(config, compute_dtype)
        table = nn.Embedding(ROWS * config.vocab_size, config.width)
        self.bigrams = nn.ModuleDict({"wte": table})  # the recipe finds the rate by this name

    def look_up(self, tokens):
        embed, head_rows = super().look_up(tokens)
        table = self.bigrams["wte"]
        before = F.pad(tokens, (1, 0))[:, :-1]
        pairs = (tokens * 36313 + before * 27191) % table.num_embeddings
        return embed + table(pairs).to(self.compute_dtype), head_rows


model = Bigrams
