"""What a model remembers of the tokens it has read, so that it can go on from them."""

import copy

import torch
from torch import Tensor

from nanomuon.attention import attention, masked
from nanomuon.gpt import TAPS, GPTConfig


class KVCache:
    """Keys, values and last convolution inputs of the positions seen so far, for decoding one token at a
    time.

    Rows are of one length, or each of its own (set_lengths): then all of them go on by one token at a time.
    """

    def __init__(self, config: GPTConfig, batch_size: int, device: torch.device, dtype: torch.dtype):
        shape = (config.depth, 2, batch_size, config.seq_len, config.kv_heads, config.head_dim)
        # Zeros, not empty: a NaN that happens to lie in the memory would survive the mask of a shorter row
        self.tensor = torch.zeros(shape, device=device, dtype=dtype)
        self.recent = torch.zeros(
            config.depth, batch_size, TAPS - 1, config.width, device=device, dtype=dtype
        )
        self.length = 0  # of the longest row
        self.lengths = None  # (B,) int64, of each row, where they differ

    # What the model asks of a cache, of this one and of those in core.py

    def positions(self, T: int) -> slice | Tensor:
        """Where in the context the next T tokens are: (B, 1) where rows differ in length."""
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

    def with_recent(self, layer: int, x: Tensor) -> Tensor:
        """x (B, T, width) with the TAPS - 1 convolution inputs before it in front; keeps the last ones."""
        padded = torch.cat((self.recent[layer], x), dim=1)
        self.recent[layer] = padded[:, x.size(1) :]
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
        alone.recent = self.recent[:, index : index + 1].zero_()
        alone.length, alone.lengths = 0, None
        return alone

    def copy_row(self, source: int, target: int, length: int) -> None:
        """The target row begins with the first `length` positions of the source, which are all it has."""
        self.tensor[:, :, target, :length] = self.tensor[:, :, source, :length]
        self.recent[:, target] = self.recent[:, source]

    def keep_rows(self, rows: list[int]) -> None:
        """Forget all rows but these."""
        self.tensor, self.recent = self.tensor[:, :, rows], self.recent[:, rows]
