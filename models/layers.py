"""Layers in the forms that the TPU's compiler rewards, for the Transformer models.

They are plain PyTorch and run on any device. Every layer computes in the type of its input. Its
parameters stay float32 and are cast where they are used, so that a model chooses its precision
once, where embeddings or their norm enter (`compute_dtype`).

The figures in cycles are libtpu 0.0.51's estimates of whole training steps on one v5e chip.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.hashing import hash32
from models.products import NATIVE_DEVICES, einsum

LANES = 128  # numbers in a row of a TPU's vector register
SUBLANES = 8  # rows of such a register
MASKED = -1e9  # added to masked scores; finite, so that a query without any key gives no NaN


@dataclass
class Forms:
    """How this process writes its layers, where two forms compute the same numbers."""

    clamp_weights: bool = True  # clamps attention's weights before their cast, without dropout
    used_tokens: bool = True  # computes the last layer for used tokens only: last_layer.py
    # Where a row's first token alone is used, computes so many of its first ones.
    first_tokens: int = 1
    # Marks tensors, in place, as what the compiler computes before it begins what reads them; None:
    # nothing is marked. See `finish_gradient`.
    barrier: Callable[[list[Tensor]], None] | None = None


FORMS = Forms()


def use_forms(
    clamp_weights: bool,
    used_tokens: bool = True,
    first_tokens: int = 1,
    barrier: Callable[[list[Tensor]], None] | None = None,
) -> None:
    """Sets the forms of `Forms` for all that this process computes or traces from now on.

    There is one choice per process, as with compiler flags: the forms are part of no model and of
    no checkpoint.
    """
    FORMS.clamp_weights = clamp_weights
    FORMS.used_tokens = used_tokens
    FORMS.first_tokens = first_tokens
    FORMS.barrier = barrier


def rows_together(rows: int, tokens: int, packing_parts: int) -> int:
    """Returns how many short rows are packed into one row of at most LANES tokens.

    A row of 64 keys leaves half of a TPU's registers empty, and the same share of its memory.

    Args:
        rows: of the batch.
        tokens: of each row.
        packing_parts: the batch is divided into so many equal parts, and each packs only its own
            rows. Nothing is packed if it is 0 or does not divide `rows`.
    """
    if not packing_parts or rows % packing_parts:
        return 1

    rows_per_part = rows // packing_parts
    for together in range(LANES // tokens, 1, -1):
        if rows_per_part % together == 0:
            return together
    return 1


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Returns autocast's type if it is on for the tensor's device, else the tensor's own type."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [..., I] by weight [O, I] and adds bias [O]; returns [..., O] of x's type.

    `F.linear` reshapes three dimensions to two and back, and each reshape costs a copy.
    `torch.einsum` becomes one dot_general without copies, which saves 21 of the 23 million cycles
    that a BERT-base step spends on copies.
    """
    weight = weight.to(x.dtype)
    if bias is not None:
        bias = bias.to(x.dtype)
    if x.device.type in NATIVE_DEVICES:
        return F.linear(x, weight, bias)

    if x.dim() == 2:
        y = einsum("bi,oi->bo", x, weight)
    elif x.dim() == 3:
        y = einsum("bti,oi->bto", x, weight)
    else:
        rows = x.reshape(-1, x.shape[-1])
        return linear(rows, weight, bias).reshape(*x.shape[:-1], -1)

    if bias is None:
        return y
    return y + bias


class FinishedGradient(torch.autograd.Function):
    """The identity, whose gradient passes a barrier: see `Forms.barrier`."""

    @staticmethod
    def forward(ctx, x: Tensor, barrier: Callable[[list[Tensor]], None]) -> Tensor:
        ctx.barrier = barrier
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        # A copy, since the barrier works in place, and others may read the same gradient.
        finished = gradient.clone()
        ctx.barrier([finished])
        return finished, None


def finish_gradient(x: Tensor) -> Tensor:
    """Returns x, whose gradient the compiler adds up before it begins what reads it.

    It is for a tensor that many layers read, once before each of them: its gradient is then added
    up layer by layer, and rounded to its type in between, as PyTorch does. Otherwise libtpu 0.0.21
    makes one operation of the products of several layers and of the backward pass of the norm
    before them, in windows of single rows, since it does not fit into vector memory: 119.4 of the
    212.5 million cycles of the Transformer base's step.
    """
    if FORMS.barrier is None:
        return x
    return FinishedGradient.apply(x, FORMS.barrier)


class Linear(nn.Linear):
    """`nn.Linear` in the form of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension, computed in float32 and returned in `compute_dtype`.

    Under autocast PyTorch's own norm returns float32, so that the residual stream is kept in
    float32 for the backward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type in NATIVE_DEVICES:
            return self._native(x)

        dtype = compute_dtype(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.mean(-1, keepdim=True)
        centred = wide - mean
        if dtype == wide.dtype:
            variance = centred.square().mean(-1, keepdim=True)
        else:
            variance = self._variance_in_one_reading(wide, mean)

        y = centred * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.to(dtype)

    def _native(self, x: Tensor) -> Tensor:
        """Calls PyTorch's kernel in the wider type of x and the parameters."""
        wide = x.dtype
        if self.weight is not None:
            wide = torch.promote_types(x.dtype, self.weight.dtype)
        weight = None if self.weight is None else self.weight.to(wide)
        bias = None if self.bias is None else self.bias.to(wide)

        y = F.layer_norm(x.to(wide), self.normalized_shape, weight, bias, self.eps)
        return y.to(compute_dtype(x))

    @staticmethod
    def _variance_in_one_reading(x: Tensor, mean: Tensor) -> Tensor:
        """Returns E[x^2] - E[x]^2 of each row, for a result that is rounded to bfloat16.

        Both moments come from one reading of x: BERT-base on GLUE 136.7 -> 123.2 million cycles. It
        is as exact as PyTorch's norm where a row's mean is 20 times its standard deviation. At 100
        times, where bfloat16 has few values left, its error is 3 % larger.
        """
        variance = x.square().mean(-1, keepdim=True) - mean.square()
        return variance.clamp(min=0)  # rounding may take it below 0


DROPOUT_STEPS = 2048  # probabilities of dropping are multiples of 1 / DROPOUT_STEPS


def drop_share(probability: float) -> float:
    """Returns the probability that `kept` drops with, 0 only for 0.

    It is the multiple of 1 / DROPOUT_STEPS that is nearest to `probability`.
    """
    if not probability:
        return 0.0
    steps = max(1, round(probability * DROPOUT_STEPS))
    return steps / DROPOUT_STEPS


def kept(shape: torch.Size, probability: float, device: torch.device) -> Tensor:
    """Draws dropout's mask: bool of `shape`, True with probability 1 - drop_share(probability).

    `torch.rand` of that shape is written to memory and read back, and SPMD does not shard it: each
    device draws the numbers of all devices. Here only a seed is drawn. Each row gets two numbers r1
    and r2 in [512, 1024) from a hash of its index and the seed, each column c1 and c2 in [1, 2).
    The fraction of r1 * c1 + r2 * c2 is compared with the probability: a few operations inside the
    fusion that needs the mask.

    Two rows, or two columns, are as independent as with `torch.rand` (tests/test_layers.py).
    BERT-base pretraining, 32 x 512 tokens per chip: 213 -> 199 million cycles on one chip, and
    11.6 -> 6.7 GiB per chip on eight.
    """
    # A row's index over all leading dimensions. It is made of one range per dimension, since
    # torch_xla writes a range into the program number by number.
    row = torch.zeros((), device=device, dtype=torch.int32)
    for size in shape[:-1]:
        index = torch.arange(size, device=device, dtype=torch.int32)
        row = (row * size)[..., None] + index
    row = row[..., None]

    column = torch.arange(shape[-1], device=device, dtype=torch.int32)
    column = column - 2**31  # so that no column has the number of a row

    seed = (torch.rand((), device=device) * 2**24).to(torch.int32)
    salt = hash32(seed)
    total = torch.zeros((), device=device)
    for term in (0, 1):
        row_bits = hash32((2 * row + term) ^ salt) & 0xFFFFFF
        column_bits = hash32((2 * column + term) ^ salt) & 0x7FFFFF
        row_factor = row_bits.float() * 2**-15 + 512
        column_factor = column_bits.float() * 2**-23 + 1
        total = total + row_factor * column_factor
    fraction = total - total.floor()

    # The limit is a tensor: torch_xla compares with a Python number in float64, which is a pair of
    # float32 on a TPU and takes four operations instead of one.
    limit = torch.full((), drop_share(probability), device=device)
    return fraction >= limit


class AttentionCore(torch.autograd.Function):
    """softmax(scores + mask), dropout, times v; keeps one tensor of scores for the backward pass.

    Usual attention keeps three: the softmax in float32, the dropout mask and the dropped weights.
    Here one tensor in v's type has the weights, and its sign says whether dropout kept (+) or
    dropped (-) each of them. A weight that rounds to 0 in bfloat16 loses its sign; its share of the
    gradient rounds to 0, too.

    The softmax's gradient needs sums over the keys. They come from the result (Dao et al. 2022,
    appendix B.2): BERT-base pretraining 187.7 -> 180.8 million cycles.
    """

    @staticmethod
    def forward(ctx, scores: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
        """Returns [B, Tq, H, D].

        Args:
            scores: [B, H, Tq, Tk].
            v: [B, Tk, H, D].
            mask: as in `attention`.
            dropout: probability of dropping a weight.
        """
        wide = torch.promote_types(v.dtype, torch.float32)
        weights = torch.softmax(scores.to(wide) + mask, -1)
        if dropout:
            keep = kept(weights.shape, dropout, v.device)
            weights = torch.where(keep, weights, -weights)
        elif FORMS.clamp_weights:
            # No weight is negative, so no number changes. But with a cast right after the softmax
            # the compiler writes the float32 scores to memory.
            weights = weights.clamp(min=0)
        signed_weights = weights.to(v.dtype)

        ctx.scale = 1 / (1 - drop_share(dropout))
        kept_weights = signed_weights.clamp(min=0) * ctx.scale
        mixed = einsum("bhqk,bkhd->bqhd", kept_weights, v)
        ctx.save_for_backward(v, signed_weights, mixed)
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable  # second derivatives would be wrong, without error
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Returns the gradients of scores and v for that of the result, [B, Tq, H, D]."""
        v, signed_weights, mixed = ctx.saved_tensors
        wide = torch.promote_types(v.dtype, torch.float32)

        kept_weights = signed_weights.clamp(min=0) * ctx.scale
        v_gradient = einsum("bhqk,bqhd->bkhd", kept_weights, gradient)

        weights_gradient = einsum("bqhd,bkhd->bhqk", gradient, v).to(wide)
        zero = torch.zeros((), dtype=wide, device=v.device)
        weights_gradient = torch.where(signed_weights > 0, weights_gradient * ctx.scale, zero)

        # The sum over the keys of weights * weights_gradient, as a sum over D.
        sums = (gradient.to(wide) * mixed.to(wide)).sum(-1)  # [B, Tq, H]
        sums = sums.transpose(1, 2)[..., None]  # [B, H, Tq, 1]
        weights = signed_weights.abs().to(wide)
        scores_gradient = weights * (weights_gradient - sums)
        return scores_gradient.to(v.dtype), v_gradient, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
    """Computes scaled dot-product attention (Vaswani et al. 2017, section 3.2.1).

    The scores are float32 even for bfloat16 queries and keys: the matrix unit accumulates in
    float32 anyway, and from 128 keys on the scores are not written to memory.

    Args:
        q: [B, Tq, H, D], already scaled.
        k, v: [B, Tk, H, D].
        mask: added to the scores, float32, broadcastable to [B, H, Tq, Tk]: 0 or MASKED.
        dropout: probability of dropping an attention weight.

    Returns:
        [B, Tq, H, D].
    """
    if q.device.type in NATIVE_DEVICES:
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        mask = torch.atleast_2d(mask).to(q.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=1.0)
        return mixed.transpose(1, 2)

    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        scores = einsum("bqhd,bkhd->bhqk", q.to(wide), k.to(wide))
    return AttentionCore.apply(scores, v, mask, dropout)


class MultiHeadAttention(nn.Module):
    """Attention with fairseq's parameters: q_proj, k_proj, v_proj, out_proj.

    Each is [dim, dim] with a bias. The projections go directly to [B, T, H, D] and back: 164.9 ->
    149.6 million cycles for the base Transformer.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0):
        super().__init__()
        if dim % heads:
            raise ValueError(f"a width of {dim} does not divide into {heads} heads")
        self.heads = heads
        self.dropout = dropout
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.q_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

        for projection in (self.k_proj, self.v_proj, self.q_proj):
            # The gain makes each as one matrix [3 * dim, dim] would be.
            nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def _to_heads(self, x: Tensor, projection: nn.Linear, scale: float = 1.0) -> Tensor:
        """Returns the projection of x [B, T, dim], times `scale`, as [B, T, H, D]."""
        if x.device.type in NATIVE_DEVICES:
            y = linear(x, projection.weight, projection.bias)
            if scale != 1:
                y = y * scale
            return y.unflatten(-1, (self.heads, -1))

        weight = (projection.weight * scale).to(x.dtype)
        weight = weight.view(self.heads, -1, projection.in_features)
        bias = (projection.bias * scale).to(x.dtype).view(self.heads, -1)
        return einsum("bti,hdi->bthd", x, weight) + bias

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [B, T, H, D] of x [B, T, dim]."""
        return self._to_heads(x, self.k_proj), self._to_heads(x, self.v_proj)

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Returns [B, Tq, dim]: the queries of x attend to keys and values.

        Args:
            x: [B, Tq, dim].
            keys, values: [B, Tk, H, D].
            mask: as in `attention`.
        """
        head_dim = x.shape[-1] // self.heads
        queries = self._to_heads(x, self.q_proj, head_dim**-0.5)
        dropout = self.dropout if self.training else 0.0
        mixed = attention(queries, keys, values, mask, dropout)
        if x.device.type in NATIVE_DEVICES:
            return linear(mixed.flatten(2), self.out_proj.weight, self.out_proj.bias)

        weight = self.out_proj.weight.to(x.dtype).view(-1, self.heads, mixed.shape[-1])
        return einsum("bthd,ohd->bto", mixed, weight) + self.out_proj.bias.to(x.dtype)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Returns [B, Tq, dim]: x [B, Tq, dim] attends to memory [B, Tk, dim].

        The mask is as in `attention`.
        """
        keys, values = self.keys_and_values(memory)
        return self.attend(x, keys, values, mask)


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Applies `F.dropout` with the mask of `kept`.

    x is multiplied by the mask. With `torch.where` of x the compiler gives the Transformer's
    attention another layout, which costs copies (147.2 -> 154.6 million cycles).
    """
    if not probability:
        return x
    if not training or x.device.type in NATIVE_DEVICES:
        return F.dropout(x, probability, training)

    scale = torch.full((), 1 / (1 - drop_share(probability)), device=x.device)
    keep = kept(x.shape, probability, x.device)
    factor = torch.where(keep, scale, torch.zeros_like(scale))
    return (x * factor).to(x.dtype)


class Dropout(nn.Dropout):
    """`nn.Dropout` in the form of `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)


def take(x: Tensor, positions: Tensor) -> Tensor:
    """Returns x[b, positions[b, p]], [B, P, H], for x [B, T, H] and integer positions [B, P].

    It is a product with one-hot rows. `torch.gather` compares all T positions with each number of
    the result, and so do the sums of its backward pass: 30 of the 238 million cycles of BERT-base's
    step (32 x 512 tokens, 79 predicted).
    """
    if x.device.type in NATIVE_DEVICES:
        index = positions.long()[..., None].expand(-1, -1, x.shape[2])
        return x.gather(1, index)

    all_positions = torch.arange(x.shape[1], device=x.device, dtype=positions.dtype)
    one_hot = (positions[..., None] == all_positions).to(x.dtype)
    return einsum("bpt,bth->bph", one_hot, x)


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns -log softmax(logits)[label] in nats, float32 [B, T].

    It needs one sum and one gathered logit per token, so that no log_softmax is kept for the
    backward pass.

    Args:
        logits: [B, T, words].
        labels: integers [B, T].
    """
    label_logits = logits.gather(2, labels.long()[..., None])[..., 0].float()
    return log_normalizer(logits) - label_logits


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Returns KL(wanted || softmax(logits)) in nats, float32 [B, T]; both are [B, T, words]."""
    terms = torch.xlogy(wanted, wanted) - wanted * logits.float()
    return log_normalizer(logits) + terms.sum(2)


def log_normalizer(logits: Tensor) -> Tensor:
    """Returns log(sum(exp(logits))) over the words, float32 [B, T], for logits [B, T, words]."""
    wide = logits.float()
    largest = wide.amax(2, keepdim=True).detach()
    return (wide - largest).exp().sum(2).log() + largest[..., 0]
