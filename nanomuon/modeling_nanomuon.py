"""A language model trained with nanomuon, for the transformers library.

This file is copied next to the weights; `trust_remote_code=True` makes transformers run it. It needs only
torch and transformers, and defines the whole computation.

Pre-norm residual blocks with rotary positions, parameter-free RMSNorm, a ReLU^2 MLP and capped logits,
without biases. Four things are less usual: learned scalars add the embedding of the token to the input of
every block; attention adds the token's row of the head, gated, to its values; half of each key comes from the
previous token; and the MLP sees the last few tokens, through a short causal convolution of its input.

Shapes: B rows, T new tokens, K keys (those of the cache and the new ones), width channels, H query heads, Hkv
key heads, D channels per head.
"""

import functools
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast

GATE_INPUTS = 32  # residual channels that the gate of the values reads
TAPS = 4  # tokens in the input of an MLP, its own included
LOGIT_CAP = 15.0
ROPE_BASE = 10_000.0


class NanomuonConfig(PretrainedConfig):
    """The shape of the model, stored in config.json.

    vocab_size, depth (layers), width, heads, kv_heads: sizes. seq_len: the context in training; positions
    beyond it were never seen. window_pattern: tiled over the layers, L sees all tokens and S the last quarter
    of a context; the last layer sees all. qk_norm: on or off.
    """

    model_type = "nanomuon"
    attribute_map = {"num_hidden_layers": "depth", "max_position_embeddings": "seq_len"}

    @property
    def head_dim(self):
        return self.width // self.heads


Linear = functools.partial(nn.Linear, bias=False)


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def rotate(x, rope):
    """Channel pairs (i, i + D/2) of x (B, heads, T, D), turned by rope (2, K, D/2): cos and sin of the angles
    of all positions; x has the last T.
    """
    cos, sin = rope[:, -x.size(2) :]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def offset_half(k):
    """k (B, Hkv, K, D) with the slowly turning half of its channels from the previous token, 0 at first."""
    own, offset = k.unflatten(-1, (2, -1)).tensor_split(2, -1)  # each (B, Hkv, K, 2, D/4), about
    return torch.cat((own, F.pad(offset, (0, 0, 0, 0, 1, -1))), -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        kv_width = config.kv_heads * config.head_dim
        self.q = Linear(config.width, config.width)
        self.k = Linear(config.width, kv_width)
        self.v = Linear(config.width, kv_width)
        self.o = Linear(config.width, config.width)
        self.value_gate = Linear(min(GATE_INPUTS, config.width), config.kv_heads)

    def forward(self, x, head_rows, rope, visible, cache):
        def by_head(y):  # (B, T, heads * D) -> (B, heads, T, D)
            return y.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        q, k, v = by_head(self.q(x)), by_head(self.k(x)), by_head(self.v(x))
        gate = 2 * torch.sigmoid(self.value_gate(x[..., :GATE_INPUTS]))  # (B, T, Hkv)
        v = v + gate.mT[..., None] * by_head(head_rows)
        k, v = cache.update(k, v, self.layer)  # (B, Hkv, K, D), keys not rotated
        q, k = rotate(q, rope), rotate(offset_half(k), rope)
        if self.config.qk_norm:
            q, k = norm(q), norm(k)
        out = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """x_t + sum over j of taps_j * x_(t-j), channel by channel."""

    def __init__(self, config, layer):
        super().__init__()
        self.place = config.depth + layer  # in the cache, after the attention layers
        self.taps = nn.Parameter(torch.zeros(TAPS * config.width))

    def forward(self, x, cache):
        seen, _ = cache.update(x, x[..., :0], self.place)  # (B, K, width), stored as keys
        padded = F.pad(seen.mT, (TAPS - 1, 0))  # (B, width, TAPS - 1 + K)
        taps = self.taps.view(TAPS, -1).flip(0).T[:, None]  # (width, 1, TAPS), the oldest token's first
        return x + F.conv1d(padded, taps, groups=len(taps)).mT[:, -x.size(1) :]


def mlp(width):
    layers = OrderedDict(up=Linear(width, 4 * width), relu2=ACT2FN["relu2"], down=Linear(4 * width, width))
    return nn.Sequential(layers)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn = Attention(config, layer)
        self.conv = Convolution(config, layer)
        self.mlp = mlp(config.width)

    def forward(self, x, head_rows, rope, visible, cache):
        x = x + self.attn(norm(x), head_rows, rope, visible, cache)
        return x + self.mlp(self.conv(norm(x), cache))


class NanomuonForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanomuonConfig
    _no_split_modules = ["Block"]
    _input_embed_layer = "wte"

    def __init__(self, config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        self.x0_scalars = nn.Parameter(torch.zeros(config.depth))
        self.lm_head = Linear(config.width, config.vocab_size)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        """Has generate() leave the cache to forward(): its own only has room for the attention layers."""
        return False

    def forward(
        self,
        input_ids,
        attention_mask=None,
        past_key_values=None,
        cache=None,
        labels=None,
        use_cache=False,
        logits_to_keep=0,
        **others,
    ):
        """input_ids (B, T) -> logits (B, T, V) in float32, and with labels (B, T) the mean loss in nats.

        attention_mask (B, K): 0 for padding on the left or on the right. labels are the input_ids, -100 for
        tokens that are not scored; the loss shifts them. logits_to_keep: return only this many last logits,
        0 for all. cache: past_key_values, as transformers 5.24 and later call it.
        """
        config = self.config
        if cache is None:
            cache = past_key_values
        if cache is None:
            cache = DynamicCache()
        T = input_ids.size(1)
        K = T + cache.get_seq_length()
        if attention_mask is None:
            attention_mask = input_ids.new_ones(1, K)
        is_text = attention_mask.bool()
        positions = torch.arange(K, device=input_ids.device)
        distance = positions[-T:, None] - positions  # (T, K)
        # Padding sees itself, because a query without any key would be NaN
        readable = (is_text[:, None, None] & (distance >= 0)) | (distance == 0)  # (B, 1, T, K)
        half = config.head_dim // 2
        angles = positions[:, None] * ROPE_BASE ** (-torch.arange(half, device=positions.device) / half)

        # With zero embeddings, padding passes only zeros to the text after it
        is_text = is_text[:, -T:, None]
        x = x0 = norm(self.wte(input_ids)) * is_text  # (B, T, width)
        # What tokens add to their values: their rows of the head
        head_rows = norm(F.embedding(input_ids, self.lm_head.weight)) * is_text
        head_rows = head_rows[..., : config.kv_heads * config.head_dim]
        rope = torch.stack((angles.cos(), angles.sin())).to(x.dtype)  # (2, K, D/2)
        visible = {"L": readable, "S": readable & (distance < max(1, config.seq_len // 4))}
        windows = (config.window_pattern * config.depth)[: config.depth - 1] + "L"
        for layer, (block, window) in enumerate(zip(self.blocks, windows, strict=True)):
            x = block(x + self.x0_scalars[layer] * x0, head_rows, rope, visible[window], cache)
        logits = self.lm_head(norm(x[:, -logits_to_keep:])).float()
        logits = LOGIT_CAP * torch.tanh(logits / LOGIT_CAP)

        loss = None if labels is None else self.loss_function(logits, labels, config.vocab_size, **others)
        return CausalLMOutputWithPast(loss, logits, cache if use_cache else None)
