"""The Transformer for translation (Vaswani et al. 2017, arXiv:1706.03762) with fairseq's numbers and parameter names.

Equal to fairseq's `transformer` in logits, and its `state_dict` has fairseq's keys, so that weights move in both
directions (models/fairseq.py reads and writes its checkpoint files). Inside it takes the forms of models/layers.py:
the training step of the base model (256 sentence pairs of 64 tokens, 32,768 words) takes 241.5 million cycles as
torch's `nn.Transformer` (libtpu 0.0.51's estimate for one v5e chip, research/tpu_cycles.py), flax's example 157.6 and
the forms used here 91.1.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import (
    MASKED,
    NATIVE_DEVICES,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    compute_dtype,
    dropout,
    rows_together,
)
from models.partition import IN, OUT, VECTOR, Rules

PAD, EOS, UNK = 1, 2, 3  # fairseq's; 0 is <s>


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a Transformer; the defaults are fairseq's `transformer`, the paper's base model.

    Attributes:
        dim, ffn_dim, heads: width of the model, of the feed-forward layers, and number of attention heads.
        encoder_layers, decoder_layers: number of layers.
        dropout: of embeddings and of each sub-layer's output.
        attention_dropout, activation_dropout: of attention weights; after the feed-forward's ReLU.
        pre_norm: normalize a sub-layer's input (`--encoder-normalize-before`) and not its output plus residual.
        share_embeddings: "all": source, target and output weights are one matrix; "decoder": target and output;
            "none".
        max_positions: longest source and target, in tokens.
    """

    dim: int = 512
    ffn_dim: int = 2048
    heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    pre_norm: bool = False
    share_embeddings: str = "all"
    max_positions: int = 1024


# fairseq's architectures of the same names (fairseq/models/transformer/transformer_legacy.py); "transformer_small" and
# "transformer_tiny" are this repository's, for small data and for tests.
ARCHITECTURES = {
    "transformer_iwslt_de_en": Architecture(ffn_dim=1024, heads=4),
    "transformer_wmt_en_de": Architecture(),
    "transformer_vaswani_wmt_en_de_big": Architecture(dim=1024, ffn_dim=4096, heads=16, dropout=0.3),
    "transformer_wmt_en_de_big": Architecture(dim=1024, ffn_dim=4096, heads=16, dropout=0.3, attention_dropout=0.1),
    "transformer_wmt_en_de_big_t2t": Architecture(
        1024, 4096, 16, dropout=0.3, attention_dropout=0.1, activation_dropout=0.1, pre_norm=True
    ),
    "transformer_small": Architecture(256, 512, 4, 3, 3),
    "transformer_tiny": Architecture(64, 128, 4, 2, 2, dropout=0.0),
}


def sinusoids(count: int, dim: int) -> Tensor:
    """Returns position encodings [count, dim] as in tensor2tensor and fairseq: sines, then cosines; PAD's row is 0."""
    half = dim // 2
    frequency = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angle = torch.arange(count, dtype=torch.float32)[:, None] * frequency
    table = torch.cat([angle.sin(), angle.cos()], 1)
    table = F.pad(table, (0, dim % 2))
    table[PAD] = 0
    return table


class FeedForward(nn.Module):
    """The common part of encoder and decoder layers: residual connections, fc1, ReLU and fc2, under fairseq's names."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.arch = arch
        self.fc1, self.fc2 = Linear(arch.dim, arch.ffn_dim), Linear(arch.ffn_dim, arch.dim)
        self.final_layer_norm = LayerNorm(arch.dim)

    def residual(self, x: Tensor, norm: LayerNorm, sublayer) -> Tensor:
        """Returns x plus sublayer(x), with dropout, normalized before or after."""
        y = sublayer(norm(x) if self.arch.pre_norm else x)
        x = x + dropout(y, self.arch.dropout, self.training)
        return x if self.arch.pre_norm else norm(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Computes fc2(ReLU(fc1(x))) with its residual connection."""
        return self.residual(
            x,
            self.final_layer_norm,
            lambda y: self.fc2(dropout(F.relu(self.fc1(y)), self.arch.activation_dropout, self.training)),
        )


class EncoderLayer(FeedForward):
    """An encoder layer: self-attention and feed-forward."""

    def __init__(self, arch: Architecture):
        super().__init__(arch)
        self.self_attn = MultiHeadAttention(arch.dim, arch.heads, arch.attention_dropout)
        self.self_attn_layer_norm = LayerNorm(arch.dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.residual(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, mask))
        return self.feed_forward(x)


class DecoderLayer(EncoderLayer):
    """A decoder layer: self-attention, attention to the encoder's output, feed-forward."""

    def __init__(self, arch: Architecture):
        super().__init__(arch)
        self.encoder_attn = MultiHeadAttention(arch.dim, arch.heads, arch.attention_dropout)
        self.encoder_attn_layer_norm = LayerNorm(arch.dim)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        x = self.residual(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, mask))
        x = self.residual(x, self.encoder_attn_layer_norm, lambda y: self.encoder_attn(y, memory, memory_mask))
        return self.feed_forward(x)


class Stack(nn.Module):
    """Embeddings and layers of the encoder or the decoder."""

    def __init__(self, arch: Architecture, embed_tokens: nn.Embedding, layers: list[nn.Module]):
        super().__init__()
        self.arch, self.embed_tokens, self.layers = arch, embed_tokens, nn.ModuleList(layers)
        if arch.pre_norm:
            self.layer_norm = LayerNorm(arch.dim)
        # fairseq's positions start at PAD + 1.
        self.register_buffer("positions", sinusoids(arch.max_positions + PAD + 1, arch.dim), persistent=False)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeds tokens [B, T] at positions [B, T] (PAD for padding); returns [B, T, dim] in the type of autocast."""
        if tokens.shape[1] > self.arch.max_positions:
            raise ValueError(f"{tokens.shape[1]} tokens a sentence; the model has {self.arch.max_positions} positions")
        x = math.sqrt(self.arch.dim) * self.embed_tokens(tokens) + F.embedding(positions, self.positions)
        return dropout(x.to(compute_dtype(x)), self.arch.dropout, self.training)

    def normalized(self, x: Tensor) -> Tensor:
        """Applies the last norm of a model that normalizes before its sub-layers."""
        return self.layer_norm(x) if self.arch.pre_norm else x


def same_segment(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns whether a query [B, Tq] and a key [B, Tk] belong to the same sentence of a row, bool [B, Tq, Tk]."""
    return queries[:, :, None] == keys[:, None, :]


def side_by_side(source: Tensor, previous: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns short rows as packed rows of at most LANES tokens, with their segments; see `Transformer.forward`."""
    together = rows_together(source.shape[0], max(source.shape[1], previous.shape[1]), parts)
    if together == 1:
        return source, previous, None, None
    packed = [side.reshape(-1, together * side.shape[1]) for side in (source, previous)]
    places = (torch.arange(side.shape[1], device=side.device) * together // side.shape[1] + 1 for side in packed)
    return *packed, *(place * (side != PAD) for place, side in zip(places, packed, strict=True))


def score_mask(allowed: Tensor) -> Tensor:
    """Returns a float32 mask for `attention`, [B, 1, Tq or 1, Tk], of bool [B, Tq or 1, Tk]: 0 or MASKED."""
    return (~allowed)[:, None].float() * MASKED


class Transformer(nn.Module):
    """Encoder and decoder with tied or separate embeddings.

    Args:
        source_words, target_words: sizes of the dictionaries; equal where share_embeddings is "all".
    """

    def __init__(self, arch: Architecture, source_words: int, target_words: int):
        super().__init__()
        if arch.share_embeddings == "all" and source_words != target_words:
            raise ValueError(f"dictionaries of {source_words} and {target_words} words cannot share embeddings")
        self.arch = arch
        source = self._embedding(source_words, arch.dim)
        target = source if arch.share_embeddings == "all" else self._embedding(target_words, arch.dim)
        self.encoder = Stack(arch, source, [EncoderLayer(arch) for _ in range(arch.encoder_layers)])
        self.decoder = Stack(arch, target, [DecoderLayer(arch) for _ in range(arch.decoder_layers)])
        self.decoder.output_projection = Linear(arch.dim, target_words, bias=False)
        if arch.share_embeddings == "none":
            nn.init.normal_(self.decoder.output_projection.weight, std=arch.dim**-0.5)
        else:
            self.decoder.output_projection.weight = target.weight

    @staticmethod
    def _embedding(words: int, dim: int) -> nn.Embedding:
        embedding = nn.Embedding(words, dim, padding_idx=PAD)
        nn.init.normal_(embedding.weight, std=dim**-0.5)
        nn.init.zeros_(embedding.weight[PAD])
        return embedding

    def encode(self, source: Tensor, segment: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encodes source tokens [B, S], padded on either side; returns ([B, S, dim], mask of the keys for `attention`).

        Args:
            segment: [B, S], where several sentences share a row: 1, 2, … for their places, 0 for padding.
        """
        real = source != PAD
        if segment is None:
            allowed, positions = real[:, None, :], real.cumsum(1) * real + PAD
        else:
            allowed = same_segment(segment, segment)
            positions = allowed.tril().sum(-1) * real + PAD
        mask = score_mask(allowed)
        x = self.encoder.embed(source, positions)
        for layer in self.encoder.layers:
            x = layer(x, mask)
        return self.encoder.normalized(x), mask

    def decode(
        self,
        previous: Tensor,
        memory: Tensor,
        memory_mask: Tensor,
        segment: Tensor | None = None,
        source_segment: Tensor | None = None,
    ) -> Tensor:
        """Returns the decoder's last features [B, T, dim] for previous target tokens [B, T] and the results of
        `encode`."""
        real = previous != PAD
        if segment is None:
            allowed, positions = real[:, None, :].expand(-1, real.shape[1], -1), real.cumsum(1) * real + PAD
        else:
            allowed = same_segment(segment, segment)
            positions = allowed.tril().sum(-1) * real + PAD
            memory_mask = score_mask(same_segment(segment, source_segment))
        mask = score_mask(allowed.tril())
        x = self.decoder.embed(previous, positions)
        for layer in self.decoder.layers:
            x = layer(x, mask, memory, memory_mask)
        return self.decoder.normalized(x)

    def logits(self, features: Tensor) -> Tensor:
        """Returns scores of the target words [B, T, words] for decoder features [B, T, dim], in the same type."""
        return self.decoder.output_projection(features)

    def forward(
        self,
        source: Tensor,
        previous: Tensor,
        source_segment: Tensor | None = None,
        target_segment: Tensor | None = None,
        parts: int = 0,
    ) -> Tensor:
        """Returns logits [B, T, words] of the target's tokens.

        With `parts` short rows are computed as packed rows of up to 128 tokens, for TPUs: the base model's step with
        256 x 64 tokens takes 142.5 -> 103.5 million cycles. On a CPU it is slower.

        Args:
            source: [B, S] tokens, EOS at the end, PAD on either side.
            previous: [B, T], the target shifted right: EOS, then its tokens.
            source_segment, target_segment: [B, S] and [B, T], for packed rows: 1, 2, … for the places of the first,
                second, … sentence pair, 0 for padding. Attention stays within a pair and positions start again.
            parts: a multiple of the devices that share the rows; those of a part may be packed together. 0: none are.
        """
        shape = previous.shape
        if source_segment is None and parts:
            source, previous, source_segment, target_segment = side_by_side(source, previous, parts)
        memory, mask = self.encode(source, source_segment)
        return self.logits(self.decode(previous, memory, mask, target_segment, source_segment)).view(*shape, -1)


# How the name of a parameter ends, as a pattern -> the axis over which each of its dimensions is cut; see partition.py.
CUTS = {
    r"\w+_attn\.[qkv]_proj\.weight": OUT,
    r"\w+_attn\.[qkv]_proj\.bias": VECTOR,
    r"\w+_attn\.out_proj\.weight": IN,
    r"fc1\.weight": OUT,
    r"fc1\.bias": VECTOR,
    r"fc2\.weight": IN,
    r"embed_tokens\.weight": OUT,
}


def rules(model: Transformer) -> Rules:
    """Returns how the model may be cut over devices."""
    parameters = dict(CUTS)
    if model.arch.share_embeddings == "none":  # else it is an embedding's
        parameters[r"output_projection\.weight"] = OUT
    return Rules(parameters, ("encoder.layers", "decoder.layers"), model.arch.heads, r"self_attn$")


class SumsOverWords(torch.autograd.Function):
    """log(sum(exp(logits))) and sum(logits) over the words, float32 [B, T], of logits [B, T, words]; keeps the logits.

    A row's tokens are summed in up to eight parts, which become one operation that reads the logits in as many streams
    side by side: one stream leaves two thirds of the memory's bandwidth unused. The two products that take the gradient
    compute it again; with `written`, which divides it number by number, libtpu writes it to memory once instead.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, written: bool) -> tuple[Tensor, Tensor]:
        parts = max(1, math.gcd(logits.shape[1], 64) // 8)  # of whole rows of registers, 8 tokens
        largest = logits.amax(2).float()
        exponentials, sums = [], []
        for part, most in zip(logits.chunk(parts, 1), largest.chunk(parts, 1), strict=True):
            wide = part.float()
            exponentials.append((wide - most[..., None]).exp().sum(2))
            sums.append(wide.sum(2))
        total = torch.cat(exponentials, 1)
        ctx.save_for_backward(logits, largest, total)
        ctx.written = written
        return total.log() + largest, torch.cat(sums, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second one would be wrong, in silence
    def backward(ctx, to_normalizer: Tensor, to_sum: Tensor) -> tuple[Tensor, None]:
        logits, largest, total = ctx.saved_tensors
        scaled = (logits.float() - largest[..., None]).exp()
        if ctx.written:
            scaled = scaled / total[..., None] * to_normalizer[..., None]
        else:
            scaled = scaled * (to_normalizer / total)[..., None]
        return (scaled + to_sum[..., None]).to(logits.dtype), None


def label_smoothed(logits: Tensor, target: Tensor, smoothing: float, written: bool = False) -> dict[str, Tensor]:
    """Computes label-smoothed cross-entropy (Szegedy et al. 2015, arXiv:1512.00567, section 7) with fairseq's numbers.

    Returns sums over the real tokens of target [B, T]: "loss" and "nll" in nats, and "tokens", their number. Three sums
    per token over the logits [B, T, words] are enough, so that no log_softmax is kept for the backward pass: 177.8 ->
    164.9 million cycles of the base model's step on one v5e chip (libtpu 0.0.51's estimate). `written`: as of
    SumsOverWords. NATIVE_DEVICES take log_softmax, which is faster there.
    """
    words = logits.shape[2]
    labels = target.to(torch.int64)[..., None]
    if logits.device.type in NATIVE_DEVICES:
        log_probabilities = F.log_softmax(logits.float(), 2)
        nll = -log_probabilities.gather(2, labels)[..., 0]
        of_all = -log_probabilities.sum(2)
    else:
        normalizer, total = SumsOverWords.apply(logits, written)
        nll = normalizer - logits.gather(2, labels)[..., 0].float()
        of_all = words * normalizer - total
    real = (target != PAD).float()
    each = smoothing / (words - 1)
    loss = (1 - smoothing - each) * nll + each * of_all
    return {"loss": (loss * real).sum(), "nll": (nll * real).sum(), "tokens": real.sum()}
