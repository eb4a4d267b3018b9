"""The cache of a model that generates text."""

import torch
from torch import Tensor, nn

from .attention import attention, masked, visible_keys


class KVCache:
    """What a model remembers of the tokens it has read: all keys and values, and the last inputs that the
    next tokens need (for convolutions and key offsets). The first call of the model allocates keys and values
    for the whole context; each call fills in more.

    config: a GPTConfig. lengths: how many tokens each row has read.
    """

    def __init__(self, config, rows: int, device: torch.device):
        self.lengths, self.device = [0] * rows, device
        self.context = config.seq_len
        self.kept = {}  # by layer and kind: (B, context, Hkv, D)
        self.recent = {}  # by layer and type of module: (B, at least as many tokens as it needs, ...)

    def positions(self, T: int) -> Tensor:
        """Positions (B, T) in the context of the next T tokens, which are about to go through all layers."""
        starts = torch.tensor(self.lengths, device=self.device)[:, None]  # (B, 1)
        self.queries = starts + torch.arange(T, device=self.device)  # (B, T)
        self.places = torch.arange(len(starts), device=self.device)[:, None], self.queries
        self.lengths = [length + T for length in self.lengths]
        self.end = max(self.lengths)
        return self.queries

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, normalized: bool
    ) -> Tensor:
        """attention() of q over all keys and values of a layer. k and v: the newest ones."""
        for kind, new in (("keys", k), ("values", v)):
            if (layer, kind) not in self.kept:
                # Not empty(): a mask does not hide a NaN in unused memory
                self.kept[layer, kind] = new.new_zeros(new.size(0), self.context, *new.shape[2:])
            self.kept[layer, kind][self.places] = new
        if q.size(1) == self.end:  # nothing came before
            return attention(q, k, v, window, normalized)
        keys, values = self.kept[layer, "keys"], self.kept[layer, "values"]
        mask = visible_keys(self.queries, self.end, window)[:, None]  # (B, 1, T, end)
        return masked(q, keys[:, : self.end], values[:, : self.end], mask)

    def with_recent(self, module: nn.Module, x: Tensor, count: int) -> Tensor:
        """x (B, T, ...) preceded by the last `count` inputs of this module, zeros at first."""
        name = module.layer, type(module).__name__  # a module is another key in a copy of the cache
        if name not in self.recent:
            self.recent[name] = x.new_zeros(x.size(0), count, *x.shape[2:])
        self.recent[name] = torch.cat((self.recent[name][:, -count:], x), dim=1)
        return self.recent[name]

    def crop(self, lengths: list[int]) -> None:
        """Forget the padding at the end of rows after the first call. lengths: of the rows without it."""
        ends = torch.tensor(lengths, device=self.device)[:, None]  # (B, 1)
        rows = torch.arange(len(lengths), device=self.device)[:, None]
        for name, inputs in self.recent.items():
            count = inputs.size(1) - self.end
            self.recent[name] = inputs[rows, ends + torch.arange(count, device=self.device)]
        self.lengths = lengths

    def select(self, rows: list[int]) -> None:
        """Row i becomes the former row rows[i]."""
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(rows, device=self.device)
        self.kept = {name: tensor[index] for name, tensor in self.kept.items()}
        self.recent = {name: inputs[index] for name, inputs in self.recent.items()}
