"""What a model remembers of the tokens it has read, so that it can go on from them.

A model asks four things of a cache: positions, attend, with_recent and advance. KVCache is for decoding one
token at a time; a PrefixCache and a ChoiceCache read what several continuations begin with only once.
"""

import copy

import torch
from torch import Tensor

from nanomuon.attention import attention, masked
from nanomuon.gpt import TAPS, GPTConfig


class KVCache:
    """Keys and values of the positions seen so far, and what the next ones take over from the last of them
    (inputs of convolutions, halves of keys), for decoding one token at a time.

    Rows are of one length, or each of its own (set_lengths): then all of them go on by one token at a time.
    """

    def __init__(self, config: GPTConfig, batch_size: int, device: torch.device, dtype: torch.dtype):
        shape = (config.depth, 2, batch_size, config.seq_len, config.kv_heads, config.head_dim)
        # Zeros, not empty: a NaN that happens to lie in the memory would survive the mask of a shorter row
        self.tensor = torch.zeros(shape, device=device, dtype=dtype)
        self.recent = {}  # by place: (B, count, ...), see with_recent
        for layer in range(config.depth):
            inputs = (batch_size, TAPS - 1, config.width)
            halves_of_keys = (batch_size, 1, config.kv_heads, 2, config.head_dim // 4)
            self.recent[f"mlp {layer}"] = torch.zeros(inputs, device=device, dtype=dtype)
            self.recent[f"keys {layer}"] = torch.zeros(halves_of_keys, device=device, dtype=dtype)
        self.length = 0  # of the longest row
        self.lengths = None  # (B,) int64, of each row, where they differ

    # What the model asks of every cache

    def positions(self, T: int) -> slice | Tensor:
        """Where in the context the next T tokens are: (B, 1) where rows differ in length. ValueError where
        they do not fit.
        """
        context = self.tensor.size(3)
        if self.length + T > context:
            raise ValueError(f"{T} tokens do not fit behind {self.length} in a context of {context}")
        if self.lengths is not None:
            return self.lengths[:, None]
        return slice(self.length, self.length + T)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, normalized: bool
    ) -> Tensor:
        """attention() of q to all keys and values of one layer, k and v being the last of them."""
        end = self.length + k.size(1)
        rows = torch.arange(len(k), device=k.device)
        for i, new in enumerate((k, v)):
            if self.lengths is None:
                self.tensor[layer, i, :, self.length : end] = new
            else:
                self.tensor[layer, i, rows, self.lengths] = new[:, 0]
        keys, values = self.tensor[layer, 0, :, :end], self.tensor[layer, 1, :, :end]  # (B, end, Hkv, D)
        if self.lengths is None:
            return attention(q, keys, values, window, normalized)
        distance = self.lengths[:, None] - torch.arange(end, device=k.device)  # (B, end)
        visible = (distance >= 0) & (distance < (window or end))
        return masked(q, keys, values, visible[:, None, None])

    def with_recent(self, place: str, x: Tensor, count: int) -> Tensor:
        """x (B, T, ...) with the `count` before it at this place of the model in front; keeps the last
        ones.
        """
        padded = torch.cat((self.recent[place], x), dim=1)
        self.recent[place].copy_(padded[:, -count:])
        return padded

    def advance(self, T: int) -> None:
        """T tokens have gone through all layers."""
        self.length += T
        if self.lengths is not None:
            self.lengths += T

    # Rows that come and go

    def set_lengths(self, lengths: list[int]) -> None:
        """From now on the first lengths[b] positions of row b count, and no others."""
        self.length, self.lengths = max(lengths), None
        if min(lengths) < self.length:
            self.lengths = torch.tensor(lengths, device=self.tensor.device)

    def row(self, index: int) -> "KVCache":
        """A cache of one row, empty, that lies in the memory of this row."""
        alone = copy.copy(self)
        alone.tensor = self.tensor[:, :, index : index + 1]
        alone.recent = {place: kept[index : index + 1].zero_() for place, kept in self.recent.items()}
        alone.length, alone.lengths = 0, None
        return alone

    def copy_row(self, source: int, target: int, length: int) -> None:
        """The target row begins with the first `length` positions of the source, which are all it has."""
        self.tensor[:, :, target, :length] = self.tensor[:, :, source, :length]
        for kept in self.recent.values():
            kept[target] = kept[source]

    def keep_rows(self, rows: list[int]) -> None:
        """Forget all rows but these."""
        self.tensor = self.tensor[:, :, rows]
        self.recent = {place: kept[rows] for place, kept in self.recent.items()}


class PrefixCache:
    """Keeps what a forward pass over N rows leaves for those that go on from them.

    lengths (N,): of the rows, which are padded on the right: no token sees what comes after it.
    """

    def __init__(self, lengths: Tensor):
        self.lengths = lengths
        self.keys, self.values = [], []  # by layer
        self.recent = {}  # by place

    def positions(self, T: int) -> slice:
        return slice(0, T)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, normalized: bool
    ) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        return attention(q, k, v, window, normalized)

    def with_recent(self, place: str, x: Tensor, count: int) -> Tensor:
        before = x.new_zeros(x.size(0), count, *x.shape[2:])
        padded = torch.cat((before, x), dim=1)  # (N, count + T, ...)
        rows = torch.arange(len(x), device=x.device)[:, None]
        last = self.lengths[:, None] + torch.arange(count, device=x.device)  # (N, count)
        self.recent[place] = padded[rows, last]
        return padded

    def advance(self, T: int) -> None:
        pass


class ChoiceCache:
    """Lets C choices of T tokens go on from each of N rows, as a batch of N * C rows of which those of one
    choice follow each other. Keys and values of the N rows are read where they are, once for all choices.
    """

    def __init__(self, prefix: PrefixCache, choices: int, T: int, seq_len: int):
        self.prefix, self.choices, self.last_position = prefix, choices, seq_len - 1
        lengths, device = prefix.lengths, prefix.lengths.device
        read = torch.arange(prefix.keys[0].size(1), device=device)  # (P,) positions of the keys of a row
        own = (lengths[:, None] + torch.arange(T, device=device)).repeat(1, choices)  # (N, C * T)
        choice = torch.arange(choices, device=device).repeat_interleave(T)  # (C * T,)
        N, queries = len(lengths), len(choice)
        keys = torch.cat((read.expand(N, -1), own), dim=1)  # (N, P + C * T)
        # Keys of the row, but for its padding, and those of the same choice
        in_row = (read < lengths[:, None])[:, None].expand(-1, queries, -1)  # (N, C * T, P)
        in_choice = (choice[:, None] == choice).expand(N, -1, -1)  # (N, C * T, C * T)
        self.query_positions = own
        self.distance = own[:, :, None] - keys[:, None]  # (N, C * T, P + C * T)
        self.readable = torch.cat((in_row, in_choice), dim=2) & (self.distance >= 0)
        self.masks = {None: self.readable[:, None]}  # by window, (N, 1, C * T, P + C * T)

    def positions(self, T: int) -> Tensor:
        """(N * C, T); those of padding stay in the context."""
        return self.query_positions.view(-1, T).clamp(max=self.last_position)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, normalized: bool
    ) -> Tensor:
        if window not in self.masks:
            self.masks[window] = (self.readable & (self.distance < window))[:, None]
        N, own_keys = self.query_positions.shape
        # The choices of a row side by side, (N, C * T, heads, D)
        q, k, v = (x.reshape(N, own_keys, *x.shape[2:]) for x in (q, k, v))
        k = torch.cat((self.prefix.keys[layer], k), dim=1)
        v = torch.cat((self.prefix.values[layer], v), dim=1)
        mixed = masked(q, k, v, self.masks[window])
        return mixed.reshape(N * self.choices, -1, *mixed.shape[2:])

    def with_recent(self, place: str, x: Tensor, count: int) -> Tensor:
        recent = self.prefix.recent[place].repeat_interleave(self.choices, dim=0)
        return torch.cat((recent, x), dim=1)

    def advance(self, T: int) -> None:
        pass
