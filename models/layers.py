"""Layers in the forms that the TPU's compiler rewards, for the Transformer models; plain PyTorch on any device.

Every layer computes in the type of its input. Parameters stay float32 and are cast where they are used, so that a model
chooses its precision once, where embeddings or their norm enter (`compute_dtype`). The figures are libtpu 0.0.51's
estimates of whole training steps on one v5e chip.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.hashing import hash32
from models.products import NATIVE_DEVICES, einsum

LANES = 128  # numbers in a row of a TPU's registers
MASKED = -1e9  # added to scores that must not count; finite, so that a row without any key has no NaN


@dataclass
class Forms:
    """How the layers of this process are written, where two ways compute the same numbers."""

    clamp_weights: bool = True  # attention's weights, before their cast, where none are dropped


FORMS = Forms()


def use_forms(clamp_weights: bool) -> None:
    """Chooses the forms of `Forms` for all that this process computes, or traces, from now on.

    It is one choice per process, as the flags of its compiler are: the forms are part of no model or checkpoint.
    """
    FORMS.clamp_weights = clamp_weights


def rows_together(rows: int, tokens: int, parts: int) -> int:
    """Returns how many short rows go into one of LANES tokens, where each of `parts` packs its own; 1 without parts.

    What belongs to 64 keys leaves half of a TPU's registers empty, in memory, too.
    """
    most = LANES // tokens if parts and rows % parts == 0 else 1
    return max((n for n in range(1, most + 1) if rows // parts % n == 0), default=1)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the type of autocast on the tensor's device where it is on, else the tensor's type."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [..., I] by weight [O, I] and adds bias [O]; returns [..., O] of x's type.

    `F.linear` on three dimensions becomes a product of two, whose reshapes cost a copy each. `torch.einsum` becomes one
    dot_general without copies (21 of the 23 million cycles of copies of a BERT-base step).
    """
    if x.device.type in NATIVE_DEVICES:
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if x.dim() not in (2, 3):
        return linear(x.reshape(-1, x.shape[-1]), weight, bias).reshape(*x.shape[:-1], -1)
    y = einsum("bti,oi->bto" if x.dim() == 3 else "bi,oi->bo", x, weight.to(x.dtype))
    return y if bias is None else y + bias.to(x.dtype)


class Linear(nn.Linear):
    """`nn.Linear` in the form of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension that computes in float32 and returns `compute_dtype`.

    Under autocast the native norm returns float32, so that the residual stream is kept in float32 for the backward
    pass. For a result in bfloat16 the variance is E[x^2] - E[x]^2: one reading of x gives both moments, BERT-base on
    GLUE 136.7 -> 123.2 million cycles. It is as exact as the native norm where a row's mean is 20 of its standard
    deviations; at 100, where bfloat16 has few values left, its error is 3 % larger.
    """

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        if x.device.type in NATIVE_DEVICES:
            wide = x.dtype if self.weight is None else torch.promote_types(x.dtype, self.weight.dtype)
            weight, bias = (each if each is None else each.to(wide) for each in (self.weight, self.bias))
            return F.layer_norm(x.to(wide), self.normalized_shape, weight, bias, self.eps).to(dtype)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.mean(-1, keepdim=True)
        centred = wide - mean
        if dtype == wide.dtype:
            variance = centred.square().mean(-1, keepdim=True)
        else:
            variance = (wide.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)  # may round below 0
        y = centred * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.to(dtype)


DROPOUT_STEPS = 2048  # probabilities of dropping are multiples of 1 / DROPOUT_STEPS


def drop_share(probability: float) -> float:
    """Returns the probability that `kept` uses: the nearest multiple of 1 / DROPOUT_STEPS, 0 only for 0."""
    return max(1, round(probability * DROPOUT_STEPS)) / DROPOUT_STEPS if probability else 0.0


def kept(shape: torch.Size, probability: float, device: torch.device) -> Tensor:
    """Returns dropout's mask: bool of `shape`, true (kept) with probability 1 - drop_share(probability).

    `torch.rand` of that shape is written to memory and read back, and SPMD does not shard it: each device draws the
    numbers of all. Here only a seed is drawn. Each row gets two numbers r1, r2 in [512, 1024) from a hash of its place,
    each column c1, c2 in [1, 2), and the fraction of r1 c1 + r2 c2 is compared: a few operations inside the fusion that
    needs them. Two rows, or two columns, are as independent as with `torch.rand` (tests/test_layers.py). BERT-base
    pretraining, 32 x 512 tokens per chip: on one chip 213 -> 199 million cycles, on eight 11.6 -> 6.7 GiB per chip.
    """
    # One range per dimension: torch_xla writes a range into the program, number by number.
    rows = torch.zeros((), device=device, dtype=torch.int32)
    for size in shape[:-1]:
        rows = (rows * size)[..., None] + torch.arange(size, device=device, dtype=torch.int32)
    rows = rows[..., None]
    columns = torch.arange(shape[-1], device=device, dtype=torch.int32) - 2**31  # other numbers than the rows'
    salt = hash32((torch.rand((), device=device) * 2**24).to(torch.int32))
    total = torch.zeros((), device=device)
    for term in (0, 1):
        row = (hash32((2 * rows + term) ^ salt) & 0xFFFFFF).float() * 2**-15 + 512
        column = (hash32((2 * columns + term) ^ salt) & 0x7FFFFF).float() * 2**-23 + 1
        total = total + row * column
    # With a Python number torch_xla would compare in float64, on a TPU pairs of float32: four operations, not one.
    return total - total.floor() >= torch.full((), drop_share(probability), device=device)


class AttentionCore(torch.autograd.Function):
    """softmax(scores + mask), dropout, times v; keeps one tensor of scores for the backward pass.

    Usual attention keeps three: the softmax in float32, the dropout mask and the dropped weights. Here the sign of one
    tensor in v's type says whether dropout kept (+) or dropped (-) a weight. The row sums over the keys that the
    softmax's gradient needs come from the result (Dao et al. 2022, appendix B.2): BERT-base pretraining 187.7 -> 180.8
    million cycles. A weight that rounds to 0 in bfloat16 loses its sign; its share of the gradient rounds to 0, too.
    """

    @staticmethod
    def forward(ctx, scores: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
        """Returns [B, Tq, H, D] for scores [B, H, Tq, Tk], v [B, Tk, H, D] and a mask as in `attention`."""
        weights = torch.softmax(scores.to(torch.promote_types(v.dtype, torch.float32)) + mask, -1)
        if dropout:
            weights = torch.where(kept(weights.shape, dropout, v.device), weights, -weights)
        elif FORMS.clamp_weights:
            # It changes no number, since no weight is negative. But with a cast right after the softmax the compiler
            # writes float32 scores to memory.
            weights = weights.clamp(min=0)
        signed = weights.to(v.dtype)
        ctx.scale = 1 / (1 - drop_share(dropout))
        mixed = einsum("bhqk,bkhd->bqhd", signed.clamp(min=0) * ctx.scale, v)
        ctx.save_for_backward(v, signed, mixed)
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second one would be wrong, in silence
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        v, signed, mixed = ctx.saved_tensors
        wide = torch.promote_types(v.dtype, torch.float32)
        to_v = einsum("bhqk,bqhd->bkhd", signed.clamp(min=0) * ctx.scale, gradient)
        to_weights = einsum("bqhd,bkhd->bhqk", gradient, v).to(wide)
        to_weights = torch.where(signed > 0, to_weights * ctx.scale, torch.zeros((), dtype=wide, device=v.device))
        sums = (gradient.to(wide) * mixed.to(wide)).sum(-1).transpose(1, 2)[..., None]  # of weights * to_weights
        to_scores = (signed.abs().to(wide) * (to_weights - sums)).to(v.dtype)
        return to_scores, to_v, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
    """Computes scaled dot-product attention (Vaswani et al. 2017, section 3.2.1); returns [B, Tq, H, D].

    The scores of bfloat16 queries and keys are float32, in which the matrix unit adds up anyway; from 128 keys on they
    are not written to memory.

    Args:
        q: [B, Tq, H, D], already scaled.
        k, v: [B, Tk, H, D].
        mask: added to the scores, float32, broadcastable to [B, H, Tq, Tk]: 0 or MASKED.
        dropout: probability of dropping an attention weight.
    """
    if q.device.type in NATIVE_DEVICES:
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        mask = torch.atleast_2d(mask).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=1.0).transpose(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        scores = einsum("bqhd,bkhd->bhqk", q.to(wide), k.to(wide))
    return AttentionCore.apply(scores, v, mask, dropout)


class MultiHeadAttention(nn.Module):
    """Attention with fairseq's parameters: q_proj, k_proj, v_proj, out_proj, each [dim, dim] with a bias.

    The projections go directly to [B, T, H, D] and back: 164.9 -> 149.6 million cycles for the base Transformer.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0):
        super().__init__()
        if dim % heads:
            raise ValueError(f"a width of {dim} does not divide into {heads} heads")
        self.heads, self.dropout = heads, dropout
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))
        for projection, gain in ((self.k_proj, 2**-0.5), (self.v_proj, 2**-0.5), (self.q_proj, 2**-0.5)):
            nn.init.xavier_uniform_(projection.weight, gain)  # as one matrix [3 * dim, dim] would be
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def _to_heads(self, x: Tensor, projection: nn.Linear, scale: float = 1.0) -> Tensor:
        if x.device.type in NATIVE_DEVICES:
            y = linear(x, projection.weight, projection.bias)
            return (y if scale == 1 else y * scale).unflatten(-1, (self.heads, -1))
        weight = (projection.weight * scale).to(x.dtype).view(self.heads, -1, projection.in_features)
        bias = (projection.bias * scale).to(x.dtype).view(self.heads, -1)
        return einsum("bti,hdi->bthd", x, weight) + bias

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [B, T, H, D] of x [B, T, dim]."""
        return self._to_heads(x, self.k_proj), self._to_heads(x, self.v_proj)

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Returns [B, Tq, dim]: the queries of x [B, Tq, dim] attend to keys and values [B, Tk, H, D]."""
        queries = self._to_heads(x, self.q_proj, (x.shape[-1] // self.heads) ** -0.5)
        mixed = attention(queries, keys, values, mask, self.dropout if self.training else 0.0)
        if x.device.type in NATIVE_DEVICES:
            return linear(mixed.flatten(2), self.out_proj.weight, self.out_proj.bias)
        weight = self.out_proj.weight.to(x.dtype).view(-1, self.heads, mixed.shape[-1])
        return einsum("bthd,ohd->bto", mixed, weight) + self.out_proj.bias.to(x.dtype)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Returns [B, Tq, dim]: x [B, Tq, dim] attends to memory [B, Tk, dim]; mask as in `attention`."""
        return self.attend(x, *self.keys_and_values(memory), mask)


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Applies `F.dropout` with the mask of `kept`.

    x is multiplied by the mask: with `torch.where` of x the compiler gives the Transformer's attention another layout,
    which costs copies (147.2 -> 154.6 million cycles).
    """
    if not probability or not training or x.device.type in NATIVE_DEVICES:
        return F.dropout(x, probability, training) if probability else x
    scale = torch.full((), 1 / (1 - drop_share(probability)), device=x.device)
    return (x * torch.where(kept(x.shape, probability, x.device), scale, torch.zeros_like(scale))).to(x.dtype)


class Dropout(nn.Dropout):
    """`nn.Dropout` in the form of `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)


def take(x: Tensor, positions: Tensor) -> Tensor:
    """Returns x[b, positions[b, p]], [B, P, H], of x [B, T, H] and integer positions [B, P].

    It is a product with one-hot rows: `torch.gather` compares all T places with each number of the result, as do the
    sums of its backward pass (30 of 238 million cycles of BERT-base's step, 32 x 512 tokens, 79 predicted).
    """
    if x.device.type in NATIVE_DEVICES:
        return x.gather(1, positions.long()[..., None].expand(-1, -1, x.shape[2]))
    places = torch.arange(x.shape[1], device=x.device, dtype=positions.dtype)
    return einsum("bpt,bth->bph", (positions[..., None] == places).to(x.dtype), x)


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns -log softmax(logits)[label] in nats, float32 [B, T], of logits [B, T, words] and integer labels [B, T].

    It takes the sum and one gathered logit of each token, so that no log_softmax is kept for the backward pass.
    """
    own = logits.gather(2, labels.long()[..., None])[..., 0].float()
    return log_normalizer(logits) - own


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Returns KL(wanted || softmax(logits)) in nats, float32 [B, T]; both arguments are [B, T, words]."""
    own = (torch.xlogy(wanted, wanted) - wanted * logits.float()).sum(2)
    return log_normalizer(logits) + own


def log_normalizer(logits: Tensor) -> Tensor:
    """Returns log(sum(exp(logits))) over the words, float32 [B, T], of logits [B, T, words]."""
    wide = logits.float()
    largest = wide.amax(2, keepdim=True).detach()
    return (wide - largest).exp().sum(2).log() + largest[..., 0]
