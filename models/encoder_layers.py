"""transformers' encoders with the layers that the TPU's compiler rewards: the same classes,
parameters and keys.

    model = fast_layers(BertForSequenceClassification.from_pretrained(checkpoint))

Nothing of transformers is patched. Attention is registered under its own name through transformers'
interface, and submodules are replaced by subclasses that hold the very same parameters, so that
`save_pretrained` and `state_dict` stay the same. models/layers.py says what each form is worth.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.activations import GELUActivation
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention
from transformers.utils import ModelOutput

from models import architectures, encoders, last_layer, layers

ATTENTION = "einsum"  # its name among transformers' attention implementations


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more,
) -> tuple[Tensor, None]:
    """Computes attention with the signature of transformers' AttentionInterface.

    Args:
        query: [B, H, T, D].
        key, value: the same, or with fewer heads, each of which serves several queries' (Ainslie et
            al. 2023).
        attention_mask: as `additive_mask` returns it.
        more: what else the model gives, see `architectures.refuse_more`.

    Returns:
        [B, T, H, D], and None for the weights, which are not kept.
    """
    architectures.refuse_more(module, more)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if key.shape[1] != query.shape[1]:
        share = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(share, 1)
        value = value.repeat_interleave(share, 1)

    query = query.transpose(1, 2) * scaling
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    return layers.attention(query, key, value, attention_mask, dropout), None


def additive_mask(
    batch_size: int,
    kv_length: int,
    attention_mask: Tensor | None,
    device: torch.device,
    mask_function,
    **more,
) -> Tensor:
    """Returns what is added to the scores, float32 [B, 1, 1, T]: 0 where attention_mask [B, T] is
    true, else MASKED; or [B, 1, T, T] where a token sees some of the others only, such as those of
    a window.

    transformers' own mask function reads the mask from the device in the middle of the step, to
    leave it out where all values are true.
    """
    if mask_function is not bidirectional_mask_function:
        seen = sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            attention_mask=attention_mask,
            device=device,
            mask_function=mask_function,
            **more | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
        return torch.where(seen, 0.0, layers.MASKED)
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    return torch.where(attention_mask, 0.0, layers.MASKED)[:, None, None, :]


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, additive_mask)

# x * Phi(x) is x * (1 + tanh(x * P(x^2))) / 2 for these coefficients of P within 3.4e-6 (a minimax
# fit): less than half of bfloat16's rounding wherever the result is above 1e-3 in magnitude.
GELU_TERMS = (7.97828e-1, 3.64688e-2, -1.24862e-4, -3.0581e-5, 1.11908e-6)


class FittedGELU(torch.autograd.Function):
    """GELU by the hardware's tanh, for bfloat16; keeps its input."""

    @staticmethod
    def distribution(x: Tensor) -> Tensor:
        """Returns the normal distribution's Phi(x), within 7e-6, for float32 x."""
        square = x.square()
        exponent = GELU_TERMS[-1]
        for term in GELU_TERMS[-2::-1]:
            exponent = exponent * square + term
        return 0.5 + 0.5 * torch.tanh(x * exponent)

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * FittedGELU.distribution(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        wide = ctx.saved_tensors[0].float()
        density = (2 * math.pi) ** -0.5 * torch.exp(-0.5 * wide.square())
        slope = FittedGELU.distribution(wide) + wide * density
        return (gradient.float() * slope).to(gradient.dtype)


class GELU(nn.Module):
    """x * Phi(x) (Hendrycks and Gimpel 2016); for bfloat16 on devices for which a program is
    compiled by `FittedGELU`.

    The compiler computes an activation again in each product that takes it, and erf is some 40
    operations. BERT-base on GLUE: 98.1 -> 86.3 million bundles of code (docs/compile.md), 123.9 ->
    122.8 million cycles.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type in layers.NATIVE_DEVICES or x.dtype != torch.bfloat16:
            return F.gelu(x)
        return FittedGELU.apply(x)


class FewRows(nn.Embedding):
    """An embedding of one or two rows, which a compiled program chooses by comparison: its gradient
    is two sums, where that of a lookup adds token after token. BERT-base on GLUE: 1.05 -> 0.73
    million bundles without an estimate."""

    def forward(self, ids: Tensor) -> Tensor:
        if ids.device.type in layers.NATIVE_DEVICES or len(self.weight) > 2:  # which may have grown
            return super().forward(ids)
        return torch.where((ids == 0)[..., None], self.weight[0], self.weight[-1])


# The encoders without a record that have BERT's layers, in `encoder`, and may have `ShortRows`.
# Others give their layers more than a mask: languages, rotated positions.
WITH_BERTS_LAYERS = ("camembert", "electra", "xlm-roberta")


class ShortRows:
    """The layers of an encoder, on packed rows of up to 128 tokens where those of the batch are
    short, for TPUs.

    BERT-base on GLUE, 256 rows of 64 tokens: 178.9 -> 115.7 million cycles. On a CPU it is slower.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        used_tokens: last_layer.Used | None = None,
        **options,
    ) -> ModelOutput:
        """Returns what the layers return for hidden_states [B, T, C] and a mask as `additive_mask`
        returns it.

        Args:
            used_tokens: see models/last_layer.py.
        """
        rows, tokens, width = hidden_states.shape
        together = layers.rows_together(rows, tokens, self.packing_parts)
        if together > 1:
            row = torch.arange(together, device=hidden_states.device).repeat_interleave(tokens)
            # Twice MASKED, so that a row without any key stays alone, too.
            others = torch.where(row == row[:, None], 0.0, 2 * layers.MASKED)
            attention_mask = attention_mask.reshape(-1, 1, 1, len(row)) + others
            hidden_states = hidden_states.reshape(-1, len(row), width)
            if used_tokens is not None:
                used_tokens = last_layer.of_packed(used_tokens, together, tokens)
        found = super().forward(hidden_states, attention_mask, used_tokens=used_tokens, **options)
        found.last_hidden_state = found.last_hidden_state.reshape(rows, -1, width)
        return found


class WideAttention(DisentangledSelfAttention):
    """DeBERTa's attention in float32.

    It fills masked scores with float32's lowest number, which is -inf in bfloat16: rows of padding,
    which see no key, would be NaN.
    """

    def forward(self, hidden_states: Tensor, *args, **options) -> tuple[Tensor, Tensor | None]:
        """Returns what transformers' own does, in the type of hidden_states [B, T, C]."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            mixed, weights = super().forward(hidden_states.float(), *args, **options)
        return mixed.to(hidden_states.dtype), weights


REPLACED = {
    nn.Dropout: layers.Dropout,
    nn.Linear: layers.Linear,
    nn.LayerNorm: layers.LayerNorm,
    GELUActivation: GELU,
    DisentangledSelfAttention: WideAttention,
}


def fast_layers(model: PreTrainedModel, packing_parts: int = 0) -> PreTrainedModel:
    """Replaces the layers of an encoder by those of models/layers.py, which share its parameters.

    Attention is replaced in encoders that go through transformers' AttentionInterface (BERT,
    RoBERTa, DistilBERT, ELECTRA, ModernBERT, …), and where a record has layers of its own (XLNet).
    Any other encoder keeps its attention, with a mask that needs no reading. With BERT's layers,
    the last one can be computed for some tokens only (models/last_layer.py).

    Args:
        packing_parts: a batch is divided into so many equal parts, and each packs its own rows,
            where the encoder has BERT's layers (`ShortRows`); a multiple of the devices that share
            the batch. 0: rows are not packed.

    Returns:
        The same model.
    """
    encoder = encoders.by_config(model.config)
    replaced = dict(REPLACED)
    own_layers = encoder is not None and encoder.own_layers is not None
    if own_layers:
        replaced |= encoder.own_layers(model.config)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            layer_class = _fast_class(child, replaced)
            if layer_class is not None:
                setattr(parent, name, _as_class(child, layer_class))

    if model._supports_attention_backend:
        model.set_attn_implementation(ATTENTION)
    elif not own_layers:
        architectures.use_own_attention(model)
    stack = _stack_of_berts_layers(model)
    if stack:
        last_layer.enable(model, stack)
        if packing_parts:
            _pack_short_rows(getattr(model.base_model, stack), packing_parts)
    return model


def _fast_class(module: nn.Module, replaced: dict[type, type]) -> type | None:
    """Returns the class that takes a module's place; None where it stays."""
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
        return None  # ours is over the last dimension
    if type(module) is nn.Embedding and len(module.weight) <= 2 and module.padding_idx is None:
        return FewRows
    return replaced.get(type(module))


def _as_class(module: nn.Module, layer_class: type[nn.Module]) -> nn.Module:
    """Returns a module of another class with the very same parameters and settings."""
    layer = nn.Module.__new__(layer_class)
    layer.__dict__ = dict(module.__dict__)
    return layer


def _stack_of_berts_layers(model: PreTrainedModel) -> str:
    """Returns the module of the base model that has BERT's layers; "" where they are others."""
    encoder = encoders.by_config(model.config)
    if encoder is not None:
        return encoder.berts_layers
    return "encoder" if model.config.model_type in WITH_BERTS_LAYERS else ""


def _pack_short_rows(stack: nn.Module, packing_parts: int) -> None:
    """Lets the layers of an encoder pack short rows."""
    if not isinstance(stack, ShortRows):
        stack.__class__ = type("ShortRows", (ShortRows, type(stack)), {})
    stack.packing_parts = packing_parts
