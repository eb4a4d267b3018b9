"""A language model trained with nanomuon, for the transformers library.

This file is copied next to the weights, with the files that compute the model (gpt.py and what it imports).
`trust_remote_code=True` makes transformers run them. They need only torch and transformers.
"""

import dataclasses

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .gpt import GPT, GPTConfig
from .kv_cache import KVCache


class NanomuonConfig(PretrainedConfig):
    """The fields of GPTConfig, stored in config.json."""

    model_type = "nanomuon"
    attribute_map = {"num_hidden_layers": "depth", "max_position_embeddings": "seq_len"}


class Cache(KVCache):
    """A KVCache with the names that generate() uses. columns: tokens read, including padding."""

    is_compileable = False
    columns = 0

    def get_seq_length(self, layer=0):
        return self.columns

    def reorder_cache(self, rows):
        self.select(rows.tolist())


class NanomuonForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanomuonConfig
    base_model_prefix = "model"  # the names in model.safetensors lack it
    _no_split_modules = ["GPT"]  # it uses its parameters, such as the weight of lm_head, in several places
    _input_embed_layer = "wte"

    def __init__(self, config):
        super().__init__(config)
        fields = [field.name for field in dataclasses.fields(GPTConfig)]
        self.model = GPT(GPTConfig(**{name: getattr(config, name) for name in fields}))
        if not self.model.wte.weight.is_meta:  # from_config(); from_pretrained() loads weights later
            self.model.init_weights(0)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, GPT):
            module.fill_rope()  # the tables are not among the weights

    def get_output_embeddings(self):
        return self.model.lm_head

    def set_output_embeddings(self, head):
        self.model.lm_head = head

    @classmethod
    def _supports_default_dynamic_cache(cls):
        """False makes generate() leave the cache to forward()."""
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

        attention_mask (B, K): 0 for padding on the left or on the right, which only a first call may have.
        labels are the input_ids, or -100 for tokens that are not scored; the loss shifts them.
        logits_to_keep: return only this many of the last logits, 0 for all. cache: what
        past_key_values is called since transformers 5.24. ValueError for more tokens than the context has.
        """
        model, (B, T), device = self.model, input_ids.shape, input_ids.device
        model.compute_dtype = model.wte.weight.dtype
        if cache is None:
            cache = past_key_values
        if cache is None and use_cache:
            cache = Cache(model.config, B, device)
        if not isinstance(cache, Cache | None):
            raise ValueError(f"past_key_values cannot be a {type(cache).__name__}: the model makes its own")
        is_text = input_ids.new_ones(B, T) if attention_mask is None else attention_mask[:, -T:].long()
        positions = others.pop("position_ids", None)
        if positions is not None and ((positions.diff() - 1) * is_text[:, 1:] * is_text[:, :-1]).any():
            raise ValueError("position_ids must count up by one: give each text a row of its own")
        # The model reads rows from their first token on, so move padding to the end, where no text sees it
        order = is_text.argsort(dim=1, descending=True, stable=True)  # (B, T)
        rows = torch.arange(B, device=device)[:, None]
        at = (order.argsort(dim=1) + T * rows)[:, -logits_to_keep:]  # where the columns were moved
        if cache is not None:
            if cache.columns and not is_text.all():
                raise ValueError("only the first call with a cache may have padding: start without a cache")
            ends = [read + new for read, new in zip(cache.lengths, is_text.sum(1).tolist(), strict=True)]
            if max(ends) > model.config.seq_len:
                raise ValueError(f"{max(ends)} tokens are more than the context of {model.config.seq_len}")
        logits = model(input_ids[rows, order], cache=cache, at=at.flatten()).view(*at.shape, -1)
        if cache is not None:
            cache.columns += T
            if ends != cache.lengths:
                cache.crop(ends)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss, logits, cache)
