"""The model: a decoder-only transformer that knows nothing of optimizers, ranks or files.

Pre-norm residual blocks with rotary positions, normalized queries and keys, parameter-free RMSNorm, a ReLU^2
MLP, an untied head with capped logits, and no biases. Learned scalars add the embedding to every block's
input (modded-nanogpt). Three additions help it copy from earlier text: half of every key comes from the
previous token, so a query finds what followed its own token earlier in the text; a token's gated row of
lm_head is added to its attention values, so that what is found can be copied; and the input of every MLP goes
through a short causal convolution (Primer, arXiv 2109.08668; Canon layers, Allen-Zhu 2025). docs/recipe.md
has their gains.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Relative imports, because these files are also part of an exported model, see hf_export.py
from .attention import attention
from .head_loss import capped, mean_loss, mean_loss_without_gradient
from .qk_clip import record_largest_

GATE_INPUTS = 32  # the value gate reads this many residual channels
ROPE_BASE = 10_000.0  # of the angles' geometric series, arXiv 2104.09864
TAPS = 4  # tokens that the convolution of an MLP's input spans, including the current one


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model. `from_depth` derives it from a single dial; any field may also be set by hand."""

    vocab_size: int
    seq_len: int  # longest context in tokens
    depth: int  # number of blocks
    width: int  # residual channels, a multiple of heads
    heads: int
    kv_heads: int  # grouped-query attention: divides heads
    # Repeated over the layers: L sees everything, S the last quarter of a context; the last layer is L
    window_pattern: str = "L"
    qk_norm: bool = True

    @classmethod
    def from_depth(cls, depth: int, vocab_size: int, seq_len: int, **overrides) -> "GPTConfig":
        """Width 64 per layer. Heads of 128 channels if they divide a width of at least 256, else 64."""
        width = 64 * depth
        head_dim = 128 if width >= 256 and width % 128 == 0 else 64
        heads = width // head_dim
        shape = dict(width=width, heads=heads, kv_heads=heads)
        return cls(vocab_size, seq_len, depth, **(shape | overrides))

    def __post_init__(self):
        for field in ("vocab_size", "seq_len", "depth", "width", "heads", "kv_heads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"width {self.width} must be an even multiple of heads {self.heads}, "
                f"and heads a multiple of kv_heads {self.kv_heads}"
            )
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise ValueError(f"window_pattern consists of S and L, not {self.window_pattern!r}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def window(self, layer: int) -> int | None:
        """How many keys a query of a layer sees, including its own; None: the whole context."""
        if layer == self.depth - 1 or self.window_pattern[layer % len(self.window_pattern)] == "L":
            return None
        return max(1, self.seq_len // 4)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Linear(nn.Linear):
    """No bias; the float32 master weight is cast to the dtype of the activations.

    cut: the side of the product that tensor parallelism divides among ranks, "outputs" (rows of the weight)
    or "inputs" (its columns). A Linear with cut outputs feeds one with cut inputs.
    """

    def __init__(self, inputs: int, outputs: int, cut: str | None = None):
        super().__init__(inputs, outputs, bias=False)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (arXiv 2104.09864): rotate the channel pairs (i, i + D/2) of x (B, T, H, D) by tables (T, 1, D/2),
    or (B, T, 1, D/2) if each row has its own positions.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def with_recent(x: Tensor, count: int, cache, module: nn.Module) -> Tensor:
    """x (B, T, ...) preceded by the `count` tokens before it, or zeros. cache: has those of each module."""
    if cache is not None:
        return cache.with_recent(module, x, count)
    return F.pad(x, (0, 0) * (x.ndim - 2) + (count, 0))


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.window, self.qk_norm = layer, config.window(layer), config.qk_norm
        self.head_dim = config.head_dim
        self.q = Linear(config.width, config.heads * config.head_dim, cut="outputs")
        self.k = Linear(config.width, config.kv_heads * config.head_dim, cut="outputs")
        self.v = Linear(config.width, config.kv_heads * config.head_dim, cut="outputs")
        self.o = Linear(config.heads * config.head_dim, config.width, cut="inputs")
        self.value_gate = Linear(min(GATE_INPUTS, config.width), config.kv_heads, cut="outputs")
        # qk_clip.watch_ makes it a tensor
        self.register_buffer("largest_logits", None, persistent=False)

    def forward(self, x: Tensor, head_rows: Tensor, rope: tuple[Tensor, Tensor], cache) -> Tensor:
        """head_rows (B, T, Hkv * D): see `GPT.look_up`."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.q(x).view(heads), self.k(x).view(heads), self.v(x).view(heads)  # (B, T, H or Hkv, D)
        k = self.offset_half(k, cache)
        gate = 2 * torch.sigmoid(self.value_gate(x[..., :GATE_INPUTS]))  # (B, T, Hkv), 1 at the start
        v = v + gate[..., None] * head_rows.view(heads)
        q, k = rotate(q, *rope), rotate(k, *rope)
        if self.qk_norm:
            q, k = norm(q), norm(k)
        if self.largest_logits is not None and torch.is_grad_enabled():
            record_largest_(self.largest_logits, q.detach(), k.detach(), self.window)
        if cache is None:
            mixed = attention(q, k, v, self.window, self.qk_norm)
        else:
            mixed = cache.attend(self.layer, q, k, v, self.window, self.qk_norm)
        return self.o(mixed.flatten(2))

    def offset_half(self, k: Tensor, cache) -> Tensor:
        """k (B, T, Hkv, D) with half of its channels from the previous token, or 0 for the first one. This is
        the half that `rotate` turns slowest, so it compares what tokens are, not where they are.
        """
        pairs = k.unflatten(-1, (2, -1))  # (B, T, Hkv, 2, D/2), ever slower along the last dimension
        own, shown_to_next = pairs.tensor_split(2, dim=-1)
        before = with_recent(shown_to_next, 1, cache, self)[:, :-1]
        return torch.cat((own, before), dim=-1).flatten(-2)


class Convolution(nn.Module):
    """x_t + sum over j < TAPS of taps_j * x_(t-j), per channel. It starts as the identity."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.taps = nn.Parameter(torch.empty(TAPS * config.width))  # flat, so that Muon does not train it

    def forward(self, x: Tensor, cache) -> Tensor:
        padded = with_recent(x, TAPS - 1, cache, self)  # (B, TAPS - 1 + T, width)
        taps, T = self.taps.to(x.dtype).view(TAPS, -1), x.size(1)
        for j in range(TAPS):
            x = x + taps[j] * padded[:, TAPS - 1 - j :][:, :T]
        return x


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = Linear(config.width, 4 * config.width, cut="outputs")
        self.down = Linear(4 * config.width, config.width, cut="inputs")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = Attention(config, layer)
        self.conv = Convolution(config, layer)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, head_rows: Tensor, rope: tuple[Tensor, Tensor], cache) -> Tensor:
        x = x + self.attn(norm(x), head_rows, rope, cache)
        return x + self.mlp(self.conv(norm(x), cache))


class ValueChannels(nn.Module):
    """(B, T, width) -> the channels that are added to attention's values, (B, T, Hkv * D). A module, so that
    tensor parallelism can give each rank those of its own heads.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.count = config.kv_heads * config.head_dim

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : self.count]


class GPT(nn.Module):
    """Build it on the meta device, then call `to_empty(device=...)` and `init_weights(seed)`.

    Parameters are float32. `compute_dtype` is the dtype of activations and matrix products; logits are
    float32.
    """

    def __init__(self, config: GPTConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))
        self.x0_scalars = nn.Parameter(torch.empty(config.depth))
        self.lm_head = Linear(config.width, config.vocab_size)
        self.value_channels = ValueChannels(config)
        self.mean_loss = mean_loss  # parallel.compile_model may replace it with a compiled one
        for name in ("cos", "sin"):  # rotary tables
            table = torch.empty(config.seq_len, 1, config.head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.fill_rope()  # a model that loads a state dict needs no init_weights

    @torch.no_grad()
    def init_weights(self, seed: int = 0, fill: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Projections into the residual stream start at zero, so every block starts as the identity.

        fill(parameter, values) writes the values of the whole parameter into it.
        """
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.zero_()
        generator = torch.Generator(device=self.cos.device).manual_seed(seed)
        bound = (3 / self.config.width) ** 0.5  # uniform, with deviation 1/sqrt(width): it has no outliers

        def draw(param, distribution, *numbers):
            values = torch.empty(param.shape, dtype=param.dtype, device=param.device)
            fill(param, distribution(values, *numbers, generator=generator))

        draw(self.wte.weight, Tensor.normal_, 0, 1)
        for block in self.blocks:
            for inward in (block.attn.q, block.attn.k, block.attn.v, block.mlp.up):
                draw(inward.weight, Tensor.uniform_, -bound, bound)
        self.x0_scalars.fill_(0.1)
        draw(self.lm_head.weight, Tensor.normal_, 0, 0.001)
        self.fill_rope()

    def to_empty(self, **options) -> "GPT":
        """As in PyTorch, but a parameter that two modules share, such as a tied head, is still shared: its
        tensor is swapped, while PyTorch's default makes a new parameter for each module.
        """
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return super().to_empty(**options)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    def fill_rope(self) -> None:
        positions = torch.arange(self.config.seq_len, dtype=torch.float32, device=self.cos.device)
        pairs = torch.arange(self.cos.size(-1), dtype=torch.float32, device=self.cos.device)
        angles = positions[:, None, None] * ROPE_BASE ** (-pairs / len(pairs))  # (T, 1, D/2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache=None,
        at: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) int64 -> logits (B, T, V), float32 or better; with targets (B, T), the mean
        cross-entropy in nats.

        Targets of -1 are not scored. cache: remembers earlier tokens, see kv_cache.py. at (M,) int64: only
        these of the B * T positions go through the head, for logits (M, V). ValueError if T exceeds the
        context.
        """
        T = tokens.size(1)
        if T > self.config.seq_len:
            raise ValueError(f"{T} tokens are more than the context of {self.config.seq_len}")
        positions = slice(0, T) if cache is None else cache.positions(T)
        rope = self.cos[positions].to(self.compute_dtype), self.sin[positions].to(self.compute_dtype)
        embed, head_rows = self.look_up(tokens)
        x = x0 = norm(embed)
        for i, block in enumerate(self.blocks):
            x = block(x + self.x0_scalars[i] * x0, head_rows, rope, cache)
        if at is not None:
            x = x.flatten(0, 1)[at]
        hidden = norm(x)
        if targets is None:
            return capped(self.lm_head(hidden))
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if torch.is_grad_enabled():
            return self.mean_loss(hidden, self.lm_head.weight, targets)
        return mean_loss_without_gradient(hidden, self.lm_head, targets)

    def look_up(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) -> the embeddings (B, T, width), and the tokens' normalized rows of the head, cut to the
        channels of attention's values (B, T, Hkv * D).
        """
        head_rows = self.value_channels(norm(F.embedding(tokens, self.lm_head.weight)))
        return self.wte(tokens).to(self.compute_dtype), head_rows.to(self.compute_dtype)

    def multiplied_weights(self) -> int:
        """How many weights a token is multiplied by: those of all matrices except the token embedding."""
        matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
        return sum(p.numel() for p in [self.lm_head.weight, *matrices])

    def estimate_flops(self) -> int:
        """Training FLOPs per token: 6 per multiplied weight, 12 per head channel and key of a layer's window.

        This is PaLM's convention (arXiv 2204.02311, appendix B), which counts causal attention as if every
        key of the window were visible.
        """
        config = self.config
        keys = sum(config.window(i) or config.seq_len for i in range(config.depth))
        return 6 * self.multiplied_weights() + 12 * config.heads * config.head_dim * keys
