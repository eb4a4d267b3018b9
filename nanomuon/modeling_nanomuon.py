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


class NanomuonConfig(PretrainedConfig):
    """The shape of the model; the defaults build one that is small enough to try things with."""

    model_type = "nanomuon"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    def __init__(
        self,
        vocab_size: int = 257,
        hidden_size: int = 64,  # residual channels
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        num_key_value_heads: int = 2,
        max_position_embeddings: int = 256,  # context in training; positions beyond it were never seen
        attention_windows: list | None = None,  # by layer: keys that a query sees, None: all before it
        value_embed_layers: list | None = None,  # which layers have value embeddings
        value_gate_inputs: int = 32,  # residual channels that the gate of a value embedding reads
        qk_norm: bool = True,
        key_offset: bool = True,  # half of every key's channels are those of the token before
        convolution_taps: int = 4,  # tokens that the input of an MLP is made of, its own included
        num_experts: int = 0,  # MLPs to choose from, 0: one for all tokens
        num_experts_per_tok: int = 2,
        logit_cap: float = 15.0,
        rotary_base: float = 10_000.0,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **others,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.attention_windows = attention_windows or [None] * num_hidden_layers
        self.value_embed_layers = value_embed_layers or []
        self.value_gate_inputs = value_gate_inputs
        self.qk_norm = qk_norm
        self.key_offset = key_offset
        self.convolution_taps = convolution_taps
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.logit_cap = logit_cap
        self.rotary_base = rotary_base
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


# How this version of transformers calls what a model hands on to the next call: until 5.23 or from 5.24 on
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class NanomuonCache(DynamicCache):
    """Keys and values of the tokens so far, and what the next ones take over from the last of them."""

    is_croppable = False  # what those before the last ones left is gone

    def __init__(self):
        super().__init__()
        # By place in the model: inputs of a convolution (B, taps - 1, width), halves of keys (B, 1, Hkv, 2,
        # D/4)
        self.recent = {}

    def with_recent(self, place: str, x: Tensor, count: int) -> Tensor:
        """x (B, T, ...) with the `count` before it at this place in front, zeros at first."""
        before = self.recent.get(place, x.new_zeros(x.size(0), count, *x.shape[2:]))
        padded = torch.cat((before, x), dim=1)
        self.recent[place] = padded[:, -count:]
        return padded

    def crop(self, *args, **keywords):
        raise NotImplementedError("this cache cannot be shortened: assisted generation is not supported")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        for place, recent in self.recent.items():
            self.recent[place] = recent.index_select(0, beam_idx.to(recent.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        for place, recent in self.recent.items():
            self.recent[place] = recent.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        for place, recent in self.recent.items():
            self.recent[place] = recent[indices]

    def reset(self) -> None:
        super().reset()
        self.recent = {}


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotary_tables(positions: Tensor, config: NanomuonConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (B, T, 1, D/2), of positions (B, T)."""
    half = config.head_dim // 2
    pairs = torch.arange(half, device=positions.device, dtype=torch.float32)
    angles = positions[..., None] * config.rotary_base ** (-pairs / half)
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
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        if layer in config.value_embed_layers:
            inputs = min(config.value_gate_inputs, width)
            self.value_gate = nn.Linear(inputs, config.num_key_value_heads, bias=False)

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

    def offset_half(self, k: Tensor, is_text: Tensor | None, cache: NanomuonCache | None) -> Tensor:
        """k (B, T, Hkv, D) with the slowly turning half of its channels from the token before, 0 at first."""
        own, shown_to_next = k.unflatten(-1, (2, -1)).tensor_split(2, dim=-1)  # (B, T, Hkv, 2, D/4) each
        if is_text is not None:
            shown_to_next = shown_to_next * is_text[..., None, None]
        if cache is None:
            padded = F.pad(shown_to_next, (0, 0, 0, 0, 0, 0, 1, 0))
        else:
            padded = cache.with_recent(f"keys {self.layer}", shown_to_next, count=1)
        return torch.cat((own, padded[:, :-1]), dim=-1).flatten(-2)


class Convolution(nn.Module):
    """x_t + sum over j of taps_j * x_(t-j), channel by channel."""

    def __init__(self, config: NanomuonConfig, layer: int):
        super().__init__()
        self.layer, self.count = layer, config.convolution_taps
        self.taps = nn.Parameter(torch.zeros(self.count * config.hidden_size))

    def forward(self, x: Tensor, cache: NanomuonCache | None) -> Tensor:
        before = self.count - 1
        if cache is None:
            padded = F.pad(x, (0, 0, before, 0))  # (B, taps - 1 + T, width)
        else:
            padded = cache.with_recent(f"mlp {self.layer}", x, before)
        for j, tap in enumerate(self.taps.view(self.count, -1)):
            x = x + tap * padded[:, before - j : padded.size(1) - j]
        return x


class MLP(nn.Module):
    def __init__(self, config: NanomuonConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=False)
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Experts(nn.Module):
    """The sum of the MLPs that have the highest scores for a token, each times 2 * sigmoid of its score."""

    def __init__(self, config: NanomuonConfig):
        super().__init__()
        width, experts = config.hidden_size, config.num_experts
        hidden = 4 * width // config.num_experts_per_tok
        self.per_token = config.num_experts_per_tok
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
        self.mlp = Experts(config) if config.num_experts else MLP(config)

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
        width, layers = config.hidden_size, config.num_hidden_layers
        kv_width = config.num_key_value_heads * config.head_dim
        self.wte = nn.Embedding(config.vocab_size, width)
        self.value_embeds = nn.ModuleDict(
            {str(layer): nn.Embedding(config.vocab_size, kv_width) for layer in config.value_embed_layers}
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(layers))
        self.resid_scalars = nn.Parameter(torch.ones(layers))
        self.x0_scalars = nn.Parameter(torch.zeros(layers))
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def set_input_embeddings(self, embeddings):
        self.wte = embeddings

    def resize_token_embeddings(self, *args, **keywords):
        raise NotImplementedError("the value embeddings would keep their size: the vocabulary is fixed")

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """generate() leaves the cache to forward()."""
        return False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NanomuonCache | None = None,
        cache: NanomuonCache | None = None,
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
            cache = NanomuonCache()
        if cache is not None and not isinstance(cache, NanomuonCache):
            raise ValueError(f"the cache is a NanomuonCache, or None; not a {type(cache).__name__}")

        seen = cache.get_seq_length() if cache is not None else 0
        queries = input_ids.size(1)
        keys = seen + queries
        if position_ids is None:
            position_ids = torch.arange(seen, keys, device=input_ids.device)[None]
        is_text = None
        if attention_mask is not None and not attention_mask.all():
            is_text = attention_mask.bool()  # (B, keys)
        windows = self.config.attention_windows
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
            if layer in self.config.value_embed_layers:
                value_embed = self.value_embeds[str(layer)](input_ids)  # (B, T, Hkv * D)
            x = block(x, value_embed, rope, visible[windows[layer]], is_text, cache)
        logits = self.lm_head(norm(x)[:, -logits_to_keep:]).float()
        logits = self.config.logit_cap * torch.tanh(logits / self.config.logit_cap)

        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
