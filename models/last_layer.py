"""The last layer of an encoder, computed for the tokens whose results are used.

A classifier reads the first token of a row, and pretraining the tokens that are predicted. The
other results of the last layer go nowhere, so neither their queries nor their products with the
feed-forward weights are needed; their keys and values are. XLNet's query stream in pretraining
(Yang et al. 2019, section 2.3) is computed so from the first layer on.

    outputs = model.base_model(**inputs, used_tokens=FIRST)       # last_hidden_state [B, 1, C]
    outputs = model.base_model(**inputs, used_tokens=positions)   # [B, P, C], for positions [B, P]

`encoder_layers.fast_layers` lets encoders of BERT's and DistilBERT's layers do this. The results
are those of the whole layer but for rounding. Only dropout draws other numbers, for a layer of
another shape.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from models import layers

# Which tokens are used: their positions [B, P]; or a number n for the first token of each of the n
# rows that a row is packed of, see ShortRows in models/encoder_layers.py.
Used = Tensor | int
FIRST = 1

# What the classes of classifiers that read the first token only end with.
OF_FIRST_TOKEN = "ForSequenceClassification"


def take(x: Tensor, used: Used) -> Tensor:
    """Returns the tokens [B, P, C] of x [B, T, C] that the last layer is computed for: the used
    ones; of each row whose first is used the first `FORMS.first_tokens`, which see the same."""
    if isinstance(used, int):
        rows = x.unflatten(1, (used, -1))
        return rows[:, :, : layers.FORMS.first_tokens].flatten(1, 2)
    return layers.take(x, used)


def drop_unused(x: Tensor, used: Used) -> Tensor:
    """Returns the used tokens [B, P, C] of those that `take` has returned."""
    if isinstance(used, int):
        rows = x.unflatten(1, (used, -1))
        return rows[:, :, 0]
    return x


def of_packed(used: Used, together: int, tokens: int) -> Used:
    """Returns what is used of rows that are packed, `together` rows of `tokens` each in one."""
    if isinstance(used, int):
        return used * together
    starts = torch.arange(together, device=used.device, dtype=used.dtype) * tokens
    positions = used.unflatten(0, (-1, together)) + starts[:, None]
    return positions.flatten(1)


class Stack:
    """The layers of an encoder; a mixin before transformers' class, such as BertEncoder."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        used_tokens: Used | None = None,
        **options,
    ) -> BaseModelOutputWithPast:
        """Returns the last layer's results [B, P, C] for hidden_states [B, T, C]; of all tokens
        where `used_tokens` is None.

        Args:
            attention_mask: as `encoder_layers.additive_mask` returns it, one for all heads.
            options: what transformers gives its layers, which is nothing that an encoder needs.
        """
        if used_tokens is None:
            return super().forward(hidden_states, attention_mask, **options)

        *lower, last = self.layer
        for layer in lower:
            hidden_states = layer(hidden_states, attention_mask)
        if attention_mask.shape[2] > 1:  # [B, 1, T, T]: each token sees others
            attention_mask = take(attention_mask[:, 0], used_tokens)[:, None]
        hidden_states = last(hidden_states, attention_mask, used_tokens=used_tokens)
        hidden_states = drop_unused(hidden_states, used_tokens)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states)


def _attend(
    attention: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor,
) -> Tensor:
    """Returns what queries [B, P, C] attend to, [B, P, C].

    Args:
        attention: BertSelfAttention, or its kin.
        keys, values: [B, T, C].
    """

    def to_heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, attention.attention_head_size))

    dropout = attention.dropout.p if attention.training else 0.0
    queries = to_heads(queries) * attention.scaling
    mixed = layers.attention(queries, to_heads(keys), to_heads(values), attention_mask, dropout)
    return mixed.flatten(2)


class BertAttention:
    """BERT's attention with its residual in the last layer; a mixin."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        used_tokens: Used | None = None,
        **options,
    ) -> tuple[Tensor, None]:
        """Returns [B, P, C] for hidden_states [B, T, C], and None for the weights, which are not
        kept."""
        if used_tokens is None:
            return super().forward(hidden_states, attention_mask, **options)

        mixed = self.self(hidden_states, attention_mask, used_tokens=used_tokens)
        return self.output(mixed, take(hidden_states, used_tokens)), None


class BertSelfAttention:
    """BERT's attention without its residual in the last layer; a mixin."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        used_tokens: Used | None = None,
        **options,
    ) -> Tensor | tuple[Tensor, None]:
        """Returns what the used tokens attend to, [B, P, C], for hidden_states [B, T, C]; without
        `used_tokens` what transformers' own returns."""
        if used_tokens is None:
            return super().forward(hidden_states, attention_mask=attention_mask, **options)

        queries = self.query(take(hidden_states, used_tokens))
        keys = self.key(hidden_states)
        values = self.value(hidden_states)
        return _attend(self, queries, keys, values, attention_mask)


class DistilBertBlock:
    """DistilBERT's last layer; a mixin."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        used_tokens: Used | None = None,
        **options,
    ) -> Tensor:
        """Returns [B, P, C] for hidden_states [B, T, C]."""
        if used_tokens is None:
            return super().forward(hidden_states, attention_mask, **options)

        mixed = self.attention(hidden_states, attention_mask, used_tokens=used_tokens)
        attended = self.sa_layer_norm(mixed + take(hidden_states, used_tokens))
        return self.output_layer_norm(self.ffn(attended) + attended)


class DistilBertSelfAttention:
    """The attention in it; a mixin."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        used_tokens: Used | None = None,
        **options,
    ) -> Tensor | tuple[Tensor, None]:
        """Returns what the used tokens attend to, as `BertSelfAttention` does."""
        if used_tokens is None:
            return super().forward(hidden_states, attention_mask=attention_mask, **options)

        queries = self.q_lin(take(hidden_states, used_tokens))
        keys = self.k_lin(hidden_states)
        values = self.v_lin(hidden_states)
        return self.out_lin(_attend(self, queries, keys, values, attention_mask))


def enable(model: PreTrainedModel, stack: str) -> None:
    """Lets an encoder compute its last layer for used tokens only.

    Args:
        model: with the layers of BERT or DistilBERT.
        stack: the module of the base model that has the layers as its `layer`, such as "encoder".
    """
    settings = model.config
    if getattr(settings, "is_decoder", False) or settings.chunk_size_feed_forward:
        return  # a decoder's mask hides tokens by their places; chunks may not divide P

    encoder = getattr(model.base_model, stack)
    last = encoder.layer[-1]
    _mix_in(Stack, encoder)
    if settings.model_type == "distilbert":
        _mix_in(DistilBertBlock, last)
        _mix_in(DistilBertSelfAttention, last.attention)
    else:
        _mix_in(BertAttention, last.attention)
        _mix_in(BertSelfAttention, last.attention.self)


def _mix_in(mixin: type, module: nn.Module) -> None:
    """Puts a mixin before the class of a module."""
    if not isinstance(module, mixin):
        module.__class__ = type(mixin.__name__, (mixin, type(module)), {})


def is_enabled(model: PreTrainedModel) -> bool:
    """Returns whether a model's forward pass is to be given `used_tokens`."""
    if not layers.FORMS.used_tokens:
        return False
    return any(isinstance(module, Stack) for module in model.base_model.children())


def of_classifier(model: PreTrainedModel) -> dict[str, Used]:
    """Returns the argument for a model of which the first token is used only, {} for others."""
    if type(model).__name__.endswith(OF_FIRST_TOKEN) and is_enabled(model):
        return {"used_tokens": FIRST}
    return {}
