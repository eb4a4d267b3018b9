"""Tables of value embeddings in every other layer, including the last one, in addition to the head's rows.

    v_t = W_v x_t + gate(x_t) (norm(row of lm_head of token t) + E_layer[token t])

in layers with a table; the others have only the rows. Tables start at zero, and have the rate of the token
embedding.

Source: modded-nanogpt and nanochat for the tables (see value_tables.py); the rows are the default's.
"""

from contenders.value_tables import ValueTables
from nanomuon.gpt import GPT


class RowsAndTables(ValueTables):
    def init_weights(self, seed=0, *fill):
        GPT.init_weights(self, seed, *fill)

    def look_up(self, tokens):
        embed, head_rows = GPT.look_up(self, tokens)
        rows = [head_rows] * len(self.blocks)
        for layer, table in self.values["wte"].items():
            rows[int(layer)] = head_rows + table(tokens).to(self.compute_dtype)
        return embed, rows


model = RowsAndTables
