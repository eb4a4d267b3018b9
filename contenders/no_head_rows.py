"""The model without the head's rows in the values of attention.

    v_t = W_v x_t        instead of W_v x_t + gate(x_t) norm(row of lm_head of token t)

The gates have nothing to scale, and do not train.

Source: an ablation of `GPT.look_up`; the rows replaced tables of value embeddings (modded-nanogpt).
"""

from nanomuon.gpt import GPT


class NoHeadRows(GPT):
    def look_up(self, tokens):
        embed = self.wte(tokens).to(self.compute_dtype)
        channels = self.config.kv_heads * self.config.head_dim
        return embed, embed.new_zeros(*tokens.shape, channels)


model = NoHeadRows
