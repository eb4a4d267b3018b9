"""A language model trained with nanomuon, for the transformers library.

This file is copied beside the weights, where `trust_remote_code=True` makes transformers run it. It needs
torch and transformers, nothing else, and is all there is to know about the computation.

Pre-norm residual blocks with rotary positions, parameter-free RMSNorm, a ReLU^2 MLP and capped logits,
without biases. Three things are less usual: learned scalars mix the residual and the embedding of the token
into the input of every block; some layers add an embedding of the token to their attention values, gated; and
the MLP sees the last few tokens, through a short causal convolution of its input.

Shapes: B rows, T tokens, width channels, H query heads, Hkv key heads, D channels a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

GATE_INPUTS = 32  # residual channels that the gate of a value embedding reads
TAPS = 4  # tokens that the input of an MLP is made of, its own included
LOGIT_CAP = 15.0
ROPE_BASE = 10_000.0
# How this version of transformers calls what a model hands on to the next call: until 5.23 or from 5.24 on
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class NanomuonConfig(PretrainedConfig):
    """The shape of the model; the defaults build one that is small enough to try things with."""

    model_type = "nanomuon"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "max_position_embeddings": "seq_len",
    }

    def __init__(
        self,
        vocab_size: int = 257,
        seq_len: int = 256,  # context in training; positions beyond it were never seen
        depth: int = 2,
        width: int = 64,  # residual channels
        heads: int = 2,
        kv_heads: int = 2,
        window_pattern: str = "L",  # tiled over the layers: L sees all, S the last part; the last is L
        short_window: float = 0.25,  # share of the context that S sees
        qk_norm: bool = True,
        key_offset: bool = True,  # half of every key's channels are those of the token before
        value_embed_every: int = 2,  # layers from one value embedding to the next; the last layer has one
        experts: int = 0,  # MLPs to choose from, 0: one for all tokens
        experts_per_token: int = 2,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **others,
    ):
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.depth, self.width, self.heads, self.kv_heads = depth, width, heads, kv_heads
        self.window_pattern, self.short_window = window_pattern, short_window
        self.qk_norm, self.key_offset = qk_norm, key_offset
        self.value_embed_every = value_embed_every
        self.experts, self.experts_per_token = experts, experts_per_token
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def window(self, layer: int) -> int | None:
        """Keys that a query of a layer sees, its own included; None: all before it."""
        short = self.window_pattern[layer % len(self.window_pattern)] == "S" and layer < self.depth - 1
        return max(1, int(self.seq_len * self.short_window)) if short else None

    def has_value_embed(self, layer: int) -> bool:
        return (self.depth - 1 - layer) % self.value_embed_every == 0


def with_past(x: Tensor, cache: DynamicCache | None, place: int, count: int) -> Tensor:
    """x (B, T, C) with the `count` tokens before it in front, (B, count + T, C): zeros before the first.

    place: a layer of the cache beyond those of the attention, which keeps x as its keys, so that what
    transformers does to a cache (beams, repeating, cropping) is done to it, too.
    """
    wanted = count + x.size(1)
    if cache is not None:
        x = x[:, None]
        x = cache.update(x, x[..., :0], place)[0][:, 0, -wanted:]
    return F.pad(x, (0, 0, wanted - x.size(1), 0))


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotary_tables(positions: Tensor, config: NanomuonConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (B, T, 1, D/2), of positions (B, T)."""
    half = config.head_dim // 2
    pairs = torch.arange(half, device=positions.device, dtype=torch.float32)
    angles = positions[..., None] * ROPE_BASE ** (-pairs / half)
    return angles.cos()[:, :, None].to(dtype), angles.sin()[:, :, None].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channel pairs (i, i + D/2) of x (B, T, heads, D) turned by their angles."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def visible_keys(
    queries: int, keys: int, window: int | None, is_text: Tensor | None, device: torch.device
) -> Tensor | None:
    """What the last tokens see of all: bool, (1 or B, 1, queries, keys); None where that is all before them.

    Padding, where is_text (B, keys) is False, is seen by itself only: a query that sees nothing would give
    NaN.
    """
    hides_nothing = is_text is None and (window is None or window >= keys)
    if hides_nothing and queries == keys:
        return None
    positions = torch.arange(keys, device=device)
    distance = positions[keys - queries :, None] - positions  # (queries, keys)
    visible = (distance >= 0) & (distance < (window or keys))
    if is_text is None:
        return visible[None, None]
    return (visible & (is_text[:, None] | (distance == 0)))[:, None]


class Attention(nn.Module):
    def __init__(self, config: NanomuonConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim, self.qk_norm = layer, config.head_dim, config.qk_norm
        self.key_offset = config.key_offset
        self.place = 2 * config.depth + layer  # in the cache, of the keys that the next token takes from
        width, kv_width = config.width, config.kv_heads * config.head_dim
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        if config.has_value_embed(layer):
            self.value_gate = nn.Linear(min(GATE_INPUTS, width), config.kv_heads, bias=False)

    def forward(self, x, value_embed, rope, visible, is_text, cache):
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.q(x).view(heads), self.k(x).view(heads), self.v(x).view(heads)
        if self.key_offset:
            k = self.offset_half(k, is_text, cache)
        if value_embed is not None:
            gate = 2 * torch.sigmoid(self.value_gate(x[..., : self.value_gate.in_features]))  # (B, T, Hkv)
            v = v + gate[..., None] * value_embed.view(heads)
        q, k = rotate(q, *rope), rotate(k, *rope)
        if self.qk_norm:
            q, k = norm(q), norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or Hkv, T, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=q.size(1) != k.size(1)
        )
        return self.o(out.transpose(1, 2).flatten(2))

    def offset_half(self, k: Tensor, is_text: Tensor | None, cache: DynamicCache | None) -> Tensor:
        """k (B, T, Hkv, D) with the slowly turning half of its channels from the token before, 0 at first."""
        own, shown_to_next = k.unflatten(-1, (2, -1)).tensor_split(2, dim=-1)  # (B, T, Hkv, 2, D/4) each
        shown = shown_to_next.flatten(2)
        if is_text is not None:
            shown = shown * is_text
        before = with_past(shown, cache, self.place, 1)[:, :-1].view_as(own)
        return torch.cat((own, before), dim=-1).flatten(-2)


class Convolution(nn.Module):
    """x_t + sum over j of taps_j * x_(t-j), channel by channel."""

    def __init__(self, config: NanomuonConfig, layer: int):
        super().__init__()
        self.place = config.depth + layer  # in the cache
        self.taps = nn.Parameter(torch.zeros(TAPS * config.width))

    def forward(self, x: Tensor, cache: DynamicCache | None) -> Tensor:
        padded = with_past(x, cache, self.place, TAPS - 1)  # (B, TAPS - 1 + T, width)
        for j, tap in enumerate(self.taps.view(TAPS, -1)):
            x = x + tap * padded[:, TAPS - 1 - j : padded.size(1) - j]
        return x


class MLP(nn.Module):
    def __init__(self, config: NanomuonConfig):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Experts(nn.Module):
    """The sum of the MLPs that have the highest scores for a token, each times 2 * sigmoid of its score."""

    def __init__(self, config: NanomuonConfig):
        super().__init__()
        width, experts = config.width, config.experts
        hidden = 4 * width // config.experts_per_token
        self.per_token = config.experts_per_token
        self.router = nn.Parameter(torch.zeros(experts, width))
        self.w1 = nn.Parameter(torch.zeros(experts, hidden, width))
        self.w2 = nn.Parameter(torch.zeros(experts, width, hidden))
        self.register_buffer("bias", torch.zeros(experts))  # of the choice, not of the score

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # (N, width)
        scores = torch.sigmoid(F.linear(tokens, self.router))  # (N, experts)
        chosen = (scores + self.bias).topk(self.per_token).indices  # (N, per_token)
        out = torch.zeros_like(tokens)
        for expert in range(len(self.router)):
            rows = (chosen == expert).any(1).nonzero().squeeze(1)
            hidden = F.relu(F.linear(tokens[rows], self.w1[expert])).square()
            gated = 2 * scores[rows, expert, None] * F.linear(hidden, self.w2[expert])
            out = out.index_add(0, rows, gated.to(out.dtype))
        return out.view_as(x)


class Block(GradientCheckpointingLayer):
    def __init__(self, config: NanomuonConfig, layer: int):
        super().__init__()
        self.attn = Attention(config, layer)
        self.conv = Convolution(config, layer)
        self.mlp = Experts(config) if config.experts else MLP(config)

    def forward(self, x, value_embed, rope, visible, is_text, cache):
        """is_text (B, T, 1) or None: what the tokens after it must not see is zero."""
        x = x + self.attn(norm(x), value_embed, rope, visible, is_text, cache)
        mixed = norm(x)
        if is_text is not None:
            mixed = mixed * is_text
        return x + self.mlp(self.conv(mixed, cache))


class NanomuonForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanomuonConfig
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["cache"]
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def __init__(self, config: NanomuonConfig):
        super().__init__(config)
        kv_width = config.kv_heads * config.head_dim
        self.wte = nn.Embedding(config.vocab_size, config.width)
        embeds = [str(layer) for layer in range(config.depth) if config.has_value_embed(layer)]
        self.value_embeds = nn.ModuleDict(
            {name: nn.Embedding(config.vocab_size, kv_width) for name in embeds}
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        self.resid_scalars = nn.Parameter(torch.ones(config.depth))
        self.x0_scalars = nn.Parameter(torch.zeros(config.depth))
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def set_input_embeddings(self, embeddings):
        self.wte = embeddings

    def resize_token_embeddings(self, *args, **keywords):
        raise NotImplementedError("the value embeddings would keep their size: the vocabulary is fixed")

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """generate() leaves the cache to forward(): its own has room for the layers of attention only."""
        return False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        cache: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **others,
    ) -> CausalLMOutputWithPast:
        """input_ids (B, T) -> logits (B, T, V) in float32, and with labels (B, T) the mean loss in nats.

        attention_mask (B, tokens in the cache + T): 0 where there is padding, at any place. labels are the
        input_ids, -100 where a token is not scored; the loss shifts them. logits_to_keep: only the last so
        many logits, 0: all. cache: past_key_values as transformers calls it from 5.24 on.
        """
        if cache is None:
            cache = past_key_values
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache:
            cache = DynamicCache()
        seen = cache.get_seq_length() if cache is not None else 0
        queries = input_ids.size(1)
        keys = seen + queries
        if position_ids is None:
            position_ids = torch.arange(seen, keys, device=input_ids.device)[None]
        is_text = None
        if attention_mask is not None and not attention_mask.all():
            is_text = attention_mask.bool()  # (B, keys)
        windows = [self.config.window(layer) for layer in range(self.config.depth)]
        visible = {}
        for window in set(windows):
            visible[window] = visible_keys(queries, keys, window, is_text, input_ids.device)
        if is_text is not None:
            is_text = is_text[:, seen:, None]  # of the tokens that are new

        x = x0 = norm(self.wte(input_ids))  # (B, T, width)
        rope = rotary_tables(position_ids, self.config, x.dtype)
        for layer, block in enumerate(self.blocks):
            x = self.resid_scalars[layer] * x + self.x0_scalars[layer] * x0
            value_embed = None
            if str(layer) in self.value_embeds:
                value_embed = self.value_embeds[str(layer)](input_ids)  # (B, T, Hkv * D)
            x = block(x, value_embed, rope, visible[windows[layer]], is_text, cache)
        logits = self.lm_head(norm(x)[:, -logits_to_keep:]).float()
        logits = LOGIT_CAP * torch.tanh(logits / LOGIT_CAP)

        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
