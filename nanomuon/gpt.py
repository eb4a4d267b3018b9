"""The model: a decoder-only transformer that knows nothing of optimizers, ranks or files.

Pre-norm residual blocks with rotary positions, normalized queries and keys, parameter-free RMSNorm, a ReLU^2
MLP, an untied head with capped logits and no biases. Three additions come from the speedrun literature
(modded-nanogpt): learned scalars mix the running residual and the embedding into every block's input, layers
add a gated embedding of the token to their attention values, and half of every key is that of the token
before, so that a query finds what followed its own token earlier in the text. A fourth lets every MLP
see the tokens just before its own: a short causal convolution of its input (Primer, arXiv 2109.08668; Canon
layers, Allen-Zhu 2025). The last two cost next to nothing and were the largest gains of all that was tried
(docs/recipe.md).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanomuon import head_loss
from nanomuon.attention import attention
from nanomuon.moe import MoE
from nanomuon.qk_clip import record_largest_

GATE_INPUTS = 32  # the value gate reads this many residual channels
ROPE_BASE = 10_000.0  # of the angles' geometric series, arXiv 2104.09864
TAPS = 4  # tokens that the convolution of an MLP's input spans, its own included


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model. `from_depth` gives the family that one dial spans; any field may also be set by
    hand.
    """

    vocab_size: int
    seq_len: int  # longest context in tokens
    depth: int  # number of blocks
    width: int  # residual channels, a multiple of heads
    heads: int
    kv_heads: int  # grouped-query attention: divides heads
    # Tiled over the layers: L sees everything, S the last part of the context; the last layer is L
    window_pattern: str = "L"
    short_window: float = 0.25  # share of the context that S sees
    qk_norm: bool = True
    key_offset: bool = True  # whether half of every key's channels are those of the token before
    value_embed_every: int = 2  # layers from one value embedding to the next; the last layer has one
    experts: int = 0  # MLPs to choose from, 0: one for all tokens
    experts_per_token: int = 2

    @classmethod
    def from_depth(cls, depth: int, vocab_size: int, seq_len: int, **overrides) -> "GPTConfig":
        """Width 64 per layer. Heads of 128 channels from width 512 on where they fill it; of 64 else, at odd
        depths and below width 512, where 128 would leave too few. Value embeddings in all layers below depth
        8, where a few million parameters are worth their 1% of loss, and in every second one from there on.
        """
        width = 64 * depth
        head_dim = 128 if width >= 512 and width % 128 == 0 else 64
        heads = max(1, width // head_dim)
        fields = dict(
            vocab_size=vocab_size,
            seq_len=seq_len,
            depth=depth,
            width=width,
            heads=heads,
            kv_heads=heads,
            value_embed_every=1 if depth < 8 else 2,
        )
        fields.update(overrides)
        return cls(**fields)

    def __post_init__(self):
        for field in ("vocab_size", "seq_len", "depth", "width", "heads", "kv_heads", "value_embed_every"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"width {self.width} must be an even multiple of heads {self.heads}, "
                f"and heads a multiple of kv_heads {self.kv_heads}"
            )
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise ValueError(f"window_pattern is a string of S and L, not {self.window_pattern!r}")
        if not 0 < self.short_window <= 1:
            raise ValueError(f"short_window is a share of the context, not {self.short_window}")
        if self.experts:
            chosen, hidden = self.experts_per_token, 4 * self.width
            if not 1 <= chosen <= self.experts or hidden % chosen:
                raise ValueError(
                    f"experts_per_token {chosen} must be between 1 and experts {self.experts}, "
                    f"and divide the {hidden} hidden channels of an MLP"
                )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def short_window_tokens(self) -> int:
        """Keys that a query of a layer with a short window sees, its own included."""
        return max(1, int(self.seq_len * self.short_window))

    def window(self, layer: int) -> int | None:
        """Attention window of a layer in tokens, None where it sees the whole context."""
        short = self.window_pattern[layer % len(self.window_pattern)] == "S" and layer < self.depth - 1
        return self.short_window_tokens if short else None

    def has_value_embed(self, layer: int) -> bool:
        return (self.depth - 1 - layer) % self.value_embed_every == 0


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """No bias; the float32 master weight is cast to the dtype of the activations.

    training_product: what multiplies in its place where gradients are wanted, as (x, weight); see fp8.py.
    """

    training_product = None

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training_product is not None and torch.is_grad_enabled():
            return self.training_product(x, self.weight)
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """Compiled code on a CPU leaves the gradient to PyTorch's own kernel (`look_up`)."""

    def __init__(self, rows: int, channels: int):
        super().__init__(rows, channels)

    def forward(self, tokens: Tensor) -> Tensor:
        compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        is_plain = type(self.weight) is nn.Parameter  # and no DTensor
        if compiled and self.weight.device.type == "cpu" and is_plain:
            return look_up(self.weight, tokens)
        return super().forward(tokens)


@torch.library.custom_op("nanomuon::look_up", mutates_args=())
def look_up(weight: Tensor, tokens: Tensor) -> Tensor:
    """Rows of weight (V, width) for tokens (...).

    An op of its own, since the compiler adds up the gradient by atomic additions, number by number, in an
    order that the threads decide: 3.5 ms in place of 0.3 for 4,096 tokens of 256 channels on two cores.
    """
    return F.embedding(tokens, weight)


@torch.library.custom_op("nanomuon::look_up_backward", mutates_args=())
def look_up_backward(grad: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """Gradient of the weight (rows, width) from that of what was looked up."""
    no_padding, by_frequency = -1, False
    return torch.ops.aten.embedding_dense_backward(grad, tokens, rows, no_padding, by_frequency)


def _save_tokens(ctx, inputs, output):
    weight, tokens = inputs
    ctx.save_for_backward(tokens)
    ctx.rows = len(weight)


def _looked_up_backward(ctx, grad):
    (tokens,) = ctx.saved_tensors
    return look_up_backward(grad, tokens, ctx.rows), None


@look_up.register_fake
def _looked_up_shape(weight, tokens):
    return weight.new_empty(*tokens.shape, weight.size(1))


@look_up_backward.register_fake
def _looked_up_backward_shape(grad, tokens, rows):
    return grad.new_empty(rows, grad.size(-1))


look_up.register_autograd(_looked_up_backward, setup_context=_save_tokens)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (arXiv 2104.09864): channel pairs (i, i + D/2) of x (B, T, H, D) turned by the tables of (T, 1,
    D/2), or of (B, T, 1, D/2) where each row has its own positions.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.window, self.qk_norm = layer, config.window(layer), config.qk_norm
        self.head_dim, self.key_offset = config.head_dim, config.key_offset
        self.q = Linear(config.width, config.heads * config.head_dim)
        self.k = Linear(config.width, config.kv_heads * config.head_dim)
        self.v = Linear(config.width, config.kv_heads * config.head_dim)
        self.o = Linear(config.heads * config.head_dim, config.width)
        if config.has_value_embed(layer):
            self.value_gate = Linear(min(GATE_INPUTS, config.width), config.kv_heads)
        # A tensor where qk_clip.watch_ asks for it
        self.register_buffer("largest_logits", None, persistent=False)

    def forward(self, x: Tensor, value_embed: Tensor | None, rope: tuple[Tensor, Tensor], cache):
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.q(x).view(heads), self.k(x).view(heads), self.v(x).view(heads)  # (B, T, H or Hkv, D)
        if self.key_offset:
            k = self.offset_half(k, cache)
        if value_embed is not None:
            gate_inputs = x[..., : self.value_gate.in_features]
            gate = 2 * torch.sigmoid(self.value_gate(gate_inputs))  # (B, T, Hkv), 1 at start
            v = v + gate[..., None] * value_embed.view(heads)
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
        """k (B, T, Hkv, D) with half of its channels from the token before, 0 at the first one: those that
        `rotate` turns slowest, which compare what tokens are wherever they are.
        """
        pairs = k.unflatten(-1, (2, -1))  # (B, T, Hkv, 2, D/2), slower and slower
        own, shown_to_next = pairs.tensor_split(2, dim=-1)
        if cache is None:
            padded = F.pad(shown_to_next, (0, 0, 0, 0, 0, 0, 1, 0))
        else:
            padded = cache.with_recent(f"keys {self.layer}", shown_to_next, count=1)
        return torch.cat((own, padded[:, :-1]), dim=-1).flatten(-2)


class Convolution(nn.Module):
    """x_t + sum over j < TAPS of taps_j * x_(t-j), channel by channel: the identity at the start."""

    def __init__(self, width: int):
        super().__init__()
        self.taps = nn.Parameter(torch.empty(TAPS * width))  # flat: not a matrix for Muon to orthogonalize

    def forward(self, x: Tensor, padded: Tensor | None) -> Tensor:
        """x (B, T, width); padded (B, TAPS - 1 + T, width), x with the inputs before it in front, or None
        where nothing comes before it.
        """
        if padded is None:
            return _Convolve.apply(x, self.taps)
        T = x.size(1)
        taps = self.taps.to(x.dtype).view(TAPS, -1)
        for j in range(TAPS):
            x = x + taps[j] * padded[:, TAPS - 1 - j :][:, :T]
        return x


class _Convolve(torch.autograd.Function):
    """The same where nothing comes before x. It needs no padded copy of x, neither to compute nor for the
    backward.
    """

    @staticmethod
    def forward(ctx, x, taps):
        ctx.save_for_backward(x, taps)
        T, taps = x.size(1), taps.to(x.dtype).view(TAPS, -1)
        y = torch.addcmul(x, x, taps[0])
        for j in range(1, min(TAPS, T)):
            y[:, j:].addcmul_(x[:, : T - j], taps[j])
        return y

    @staticmethod
    def backward(ctx, grad):
        x, flat_taps = ctx.saved_tensors
        T, taps = x.size(1), flat_taps.to(x.dtype).view(TAPS, -1)
        grad_x = torch.addcmul(grad, grad, taps[0])
        grad_taps = torch.zeros_like(flat_taps).view(TAPS, -1)
        for j in range(min(TAPS, T)):
            if j > 0:
                grad_x[:, : T - j].addcmul_(grad[:, j:], taps[j])
            grad_taps[j] = (grad[:, j:] * x[:, : T - j]).sum((0, 1), dtype=grad_taps.dtype)
        return grad_x, grad_taps.flatten()


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = Linear(config.width, 4 * config.width)
        self.down = Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.attn = Attention(config, layer)
        self.conv = Convolution(config.width)
        if config.experts:
            self.mlp = MoE(config.width, config.experts, config.experts_per_token)
        else:
            self.mlp = MLP(config)

    def forward(self, x: Tensor, value_embed: Tensor | None, rope: tuple[Tensor, Tensor], cache):
        x = x + self.attn(norm(x), value_embed, rope, cache)
        inputs = norm(x)
        padded = None if cache is None else cache.with_recent(f"mlp {self.layer}", inputs, count=TAPS - 1)
        return x + self.mlp(self.conv(inputs, padded))


class GPT(nn.Module):
    """Build on the meta device, then `to_empty(device=...)` and `init_weights(seed)`.

    Parameters are float32 whatever `compute_dtype`, the dtype of activations and matrix products; logits are
    float32.
    """

    def __init__(self, config: GPTConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.wte = Embedding(config.vocab_size, config.width)
        self.value_embeds = nn.ModuleDict()  # by layer
        for layer in range(config.depth):
            if config.has_value_embed(layer):
                embed = Embedding(config.vocab_size, config.kv_heads * config.head_dim)
                self.value_embeds[str(layer)] = embed
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))
        self.resid_scalars = nn.Parameter(torch.empty(config.depth))
        self.x0_scalars = nn.Parameter(torch.empty(config.depth))
        self.lm_head = Linear(config.width, config.vocab_size)
        self.mean_loss = head_loss.mean_loss  # compilation.py may put a compiled one here
        for name in ("cos", "sin"):  # rotary tables
            self.register_buffer(name, torch.empty(config.seq_len, 1, config.head_dim // 2), persistent=False)
        self._fill_rope()  # for who loads a state dict, in which they are not, in place of init_weights

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Projections into the residual stream start at zero, so every block starts as the identity."""
        generator = torch.Generator(device=self.cos.device).manual_seed(seed)
        bound = (3 / self.config.width) ** 0.5  # of a uniform with deviation 1/sqrt(width): no outliers
        self.wte.weight.normal_(0, 1, generator=generator)
        for embed in self.value_embeds.values():
            embed.weight.uniform_(-bound, bound, generator=generator)
        for block in self.blocks:
            attn, mlp = block.attn, block.mlp
            inward = [attn.q.weight, attn.k.weight, attn.v.weight]
            outward = [attn.o.weight, block.conv.taps]
            if self.config.experts:
                inward += [mlp.router, mlp.w1]
                outward += [mlp.w2, mlp.bias, mlp.load]
            else:
                inward += [mlp.up.weight]
                outward += [mlp.down.weight]
            for weight in inward:
                weight.uniform_(-bound, bound, generator=generator)
            for weight in outward:
                weight.zero_()
            if hasattr(attn, "value_gate"):
                attn.value_gate.weight.zero_()
        self.resid_scalars.fill_(1.0)
        self.x0_scalars.fill_(0.1)
        self.lm_head.weight.normal_(0, 0.001, generator=generator)
        self._fill_rope()

    def _fill_rope(self) -> None:
        positions = torch.arange(self.cos.size(0), device=self.cos.device)
        pairs = torch.arange(self.cos.size(-1), device=self.cos.device, dtype=torch.float32)
        angles = torch.outer(positions, ROPE_BASE ** (-pairs / pairs.numel()))  # (T, D/2)
        self.cos.copy_(angles.cos()[:, None])
        self.sin.copy_(angles.sin()[:, None])

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        cache=None,
        at: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) int64 -> logits (B, T, V), float32 or better; with targets (B, T) the cross-entropy
        in nats.

        Targets of -1 are not predicted. reduction="none" gives one loss per token, (B * T,). cache: what
        remembers earlier tokens, a KVCache (generate.py) or what has its methods. at (M,) int64: only these
        of the B * T positions go through the head, for logits (M, V). ValueError for more tokens than the
        context has.
        """
        T = tokens.size(1)
        if cache is None and T > self.config.seq_len:
            raise ValueError(f"{T} tokens are more than the context of {self.config.seq_len}")
        positions = slice(0, T) if cache is None else cache.positions(T)
        rope = self.cos[positions].to(self.compute_dtype), self.sin[positions].to(self.compute_dtype)
        x = x0 = norm(self.wte(tokens).to(self.compute_dtype))  # (B, T, width)
        for i, block in enumerate(self.blocks):
            x = self.resid_scalars[i] * x + self.x0_scalars[i] * x0
            value_embed = None
            if self.config.has_value_embed(i):
                value_embed = self.value_embeds[str(i)](tokens).to(self.compute_dtype)  # (B, T, Hkv * D)
            x = block(x, value_embed, rope, cache)
        if cache is not None:
            cache.advance(T)
        if at is not None:
            x = x.flatten(0, 1)[at]
        hidden = norm(x)
        if targets is None:
            return head_loss.capped(self.lm_head(hidden))
        return self._loss(hidden.flatten(0, 1), targets.flatten(), reduction)

    def _loss(self, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """hidden (N, width), targets (N,)."""
        plain = type(self.lm_head) is Linear and self.lm_head.training_product is None
        if reduction == "mean" and torch.is_grad_enabled() and plain:
            return self.mean_loss(hidden, self.lm_head.weight, targets)
        # Evaluation, or a head that multiplies in its own way (fp8.py)
        losses = head_loss.token_losses(hidden, self.lm_head, self.config.vocab_size, targets)
        if reduction == "none":
            return losses
        return losses.sum() / (targets != -1).sum()

    def parameter_counts(self) -> dict[str, int]:
        """Number of parameters by role, and their total. matrices holds the experts that one token visits,
        idle_experts as many numbers as it passes by.
        """
        counts = dict.fromkeys(("wte", "value_embeds", "lm_head", "matrices", "idle_experts", "scalars"), 0)
        for name, p in self.named_parameters():
            role = name.split(".")[0]
            if role not in counts:
                role = "matrices" if p.ndim > 1 else "scalars"
            idle = 0
            if p.ndim == 3:  # (E, m, n), which may be a DTensor: p[0] would communicate
                idle = (self.config.experts - self.config.experts_per_token) * p.shape[1:].numel()
            counts[role] += p.numel() - idle
            counts["idle_experts"] += idle
        return {**counts, "total": sum(counts.values())}

    def estimate_flops(self) -> int:
        """Training FLOPs per token: 6 per weight of a matrix product, 12 per head channel and visible key.

        The convention of PaLM (arXiv 2204.02311, appendix B), with a causal mask counted as if every key were
        visible.
        """
        counts, config = self.parameter_counts(), self.config
        keys = sum(config.window(i) or config.seq_len for i in range(config.depth))
        return 6 * (counts["matrices"] + counts["lm_head"]) + 12 * config.heads * config.head_dim * keys
