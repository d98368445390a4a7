"""The Transformer for translation (Vaswani et al. 2017, arXiv:1706.03762), with fairseq's numbers.

Its logits equal those of fairseq's `transformer`, and its `state_dict` has fairseq's keys, so that
weights move in both directions (models/fairseq.py reads and writes fairseq's checkpoint files).

Inside it takes the forms of models/layers.py. The training step of the base model (256 sentence
pairs of 64 tokens, 32,768 words) takes 241.5 million cycles as torch's `nn.Transformer`, 157.6 as
flax's example, and 91.3 in these forms (libtpu 0.0.51's estimates for one v5e chip,
research/tpu_cycles.py).
"""

import math
from collections.abc import Callable
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
    finish_gradient,
    rows_together,
)
from models.partition import IN, OUT, VECTOR, Rules

# Token ids of fairseq; 0 is <s>.
PAD = 1
EOS = 2
UNK = 3


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a Transformer.

    The defaults are those of fairseq's `transformer`, the paper's base model.

    Attributes:
        dim, ffn_dim: width of the model, and of the feed-forward layers.
        heads: attention heads of a layer.
        encoder_layers, decoder_layers: number of layers.
        dropout: of embeddings and of each sub-layer's output.
        attention_dropout: of attention weights.
        activation_dropout: after the feed-forward layers' ReLU.
        pre_norm: normalize a sub-layer's input (fairseq's `--encoder-normalize-before`), instead of
            its output plus residual.
        share_embeddings: which of the source, target and output weights are one matrix: "all";
            "decoder": target and output; or "none".
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


# fairseq's architectures of the same names (fairseq/models/transformer/transformer_legacy.py).
# "transformer_small" and "transformer_tiny" are this repository's, for small data and for tests.
ARCHITECTURES = {
    "transformer_iwslt_de_en": Architecture(ffn_dim=1024, heads=4),
    "transformer_wmt_en_de": Architecture(),
    "transformer_vaswani_wmt_en_de_big": Architecture(
        dim=1024,
        ffn_dim=4096,
        heads=16,
        dropout=0.3,
    ),
    "transformer_wmt_en_de_big": Architecture(
        dim=1024,
        ffn_dim=4096,
        heads=16,
        dropout=0.3,
        attention_dropout=0.1,
    ),
    "transformer_wmt_en_de_big_t2t": Architecture(
        dim=1024,
        ffn_dim=4096,
        heads=16,
        dropout=0.3,
        attention_dropout=0.1,
        activation_dropout=0.1,
        pre_norm=True,
    ),
    "transformer_small": Architecture(
        dim=256,
        ffn_dim=512,
        heads=4,
        encoder_layers=3,
        decoder_layers=3,
    ),
    "transformer_tiny": Architecture(
        dim=64,
        ffn_dim=128,
        heads=4,
        encoder_layers=2,
        decoder_layers=2,
        dropout=0.0,
    ),
}


def sinusoids(count: int, dim: int) -> Tensor:
    """Returns position encodings [count, dim] as in tensor2tensor and fairseq.

    The first half of the columns has the sines, the second the cosines. The row of PAD is 0.
    """
    half = dim // 2
    log_step = math.log(10000) / (half - 1)
    frequency = torch.exp(torch.arange(half, dtype=torch.float32) * -log_step)
    angle = torch.arange(count, dtype=torch.float32)[:, None] * frequency
    table = torch.cat([angle.sin(), angle.cos()], 1)
    table = F.pad(table, (0, dim % 2))
    table[PAD] = 0
    return table


class FeedForward(nn.Module):
    """What encoder and decoder layers have in common, under fairseq's names.

    These are the residual connections, and the feed-forward sub-layer: fc1, ReLU, fc2.
    """

    def __init__(self, arch: Architecture):
        super().__init__()
        self.arch = arch
        self.fc1 = Linear(arch.dim, arch.ffn_dim)
        self.fc2 = Linear(arch.ffn_dim, arch.dim)
        self.final_layer_norm = LayerNorm(arch.dim)

    def residual(self, x: Tensor, norm: LayerNorm, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns x plus sublayer(x), with dropout, normalized before or after."""
        if self.arch.pre_norm:
            y = sublayer(norm(x))
            return x + dropout(y, self.arch.dropout, self.training)

        y = sublayer(x)
        return norm(x + dropout(y, self.arch.dropout, self.training))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Computes the feed-forward sub-layer of x [B, T, dim] with its residual connection."""
        return self.residual(x, self.final_layer_norm, self._two_layers)

    def _two_layers(self, x: Tensor) -> Tensor:
        """Returns fc2(ReLU(fc1(x))), with dropout after the ReLU."""
        hidden = F.relu(self.fc1(x))
        hidden = dropout(hidden, self.arch.activation_dropout, self.training)
        return self.fc2(hidden)


class EncoderLayer(FeedForward):
    """An encoder layer: self-attention and feed-forward."""

    def __init__(self, arch: Architecture):
        super().__init__(arch)
        self.self_attn = MultiHeadAttention(arch.dim, arch.heads, arch.attention_dropout)
        self.self_attn_layer_norm = LayerNorm(arch.dim)

    def attend_to_itself(self, x: Tensor, mask: Tensor) -> Tensor:
        """Computes the self-attention of x [B, T, dim] with its residual connection."""
        return self.residual(
            x,
            self.self_attn_layer_norm,
            lambda y: self.self_attn(y, y, mask),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attend_to_itself(x, mask)
        return self.feed_forward(x)


class DecoderLayer(EncoderLayer):
    """A decoder layer: self-attention, attention to the encoder's output, feed-forward."""

    def __init__(self, arch: Architecture):
        super().__init__(arch)
        self.encoder_attn = MultiHeadAttention(arch.dim, arch.heads, arch.attention_dropout)
        self.encoder_attn_layer_norm = LayerNorm(arch.dim)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        x = self.attend_to_itself(x, mask)
        x = self.residual(
            x,
            self.encoder_attn_layer_norm,
            lambda y: self.encoder_attn(y, memory, memory_mask),
        )
        return self.feed_forward(x)


class Stack(nn.Module):
    """Embeddings and layers of the encoder or the decoder."""

    def __init__(self, arch: Architecture, embed_tokens: nn.Embedding, layers: list[nn.Module]):
        super().__init__()
        self.arch = arch
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        if arch.pre_norm:
            self.layer_norm = LayerNorm(arch.dim)
        # fairseq's positions start at PAD + 1.
        table = sinusoids(arch.max_positions + PAD + 1, arch.dim)
        self.register_buffer("positions", table, persistent=False)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeds tokens [B, T] at positions [B, T] (PAD for padding).

        Returns:
            [B, T, dim] in the type of autocast.
        """
        length = tokens.shape[1]
        most = self.arch.max_positions
        if length > most:
            raise ValueError(f"{length} tokens a sentence; the model has {most} positions")

        words = math.sqrt(self.arch.dim) * self.embed_tokens(tokens)
        x = words + F.embedding(positions, self.positions)
        return dropout(x.to(compute_dtype(x)), self.arch.dropout, self.training)

    def normalized(self, x: Tensor) -> Tensor:
        """Applies the last norm of a model that normalizes before its sub-layers."""
        if self.arch.pre_norm:
            return self.layer_norm(x)
        return x


def same_segment(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns whether each query and key belong to the same sentence of a row, bool [B, Tq, Tk].

    Args:
        queries: the sentence of each query, [B, Tq], see `Transformer.encode`.
        keys: the sentence of each key, [B, Tk].
    """
    return queries[:, :, None] == keys[:, None, :]


def side_by_side(tokens: Tensor, together: int) -> tuple[Tensor, Tensor]:
    """Returns every `together` consecutive rows as one row, and of which of them each token is.

    Args:
        tokens: [B, T].
        together: divides B.

    Returns:
        Tokens and segments, both [B / together, together * T]. Segments are 1, 2, … for the rows,
        and 0 for padding.
    """
    length = together * tokens.shape[1]
    packed = tokens.reshape(-1, length)
    row = torch.arange(length, device=packed.device) * together // length
    return packed, (row + 1) * (packed != PAD)


def score_mask(allowed: Tensor) -> Tensor:
    """Returns a mask for `attention`, float32 [B, 1, Tq or 1, Tk]: 0 where allowed, else MASKED.

    Args:
        allowed: bool [B, Tq or 1, Tk].
    """
    return (~allowed)[:, None].float() * MASKED


class Transformer(nn.Module):
    """Encoder and decoder with tied or separate embeddings."""

    def __init__(self, arch: Architecture, source_words: int, target_words: int):
        """Initializes the parameters as fairseq does.

        Args:
            arch: sizes and switches.
            source_words, target_words: sizes of the dictionaries; equal where share_embeddings is
                "all".
        """
        super().__init__()
        share_all = arch.share_embeddings == "all"
        if share_all and source_words != target_words:
            raise ValueError(
                f"dictionaries of {source_words} and {target_words} words cannot share embeddings"
            )

        self.arch = arch
        source = self._embedding(source_words, arch.dim)
        target = source if share_all else self._embedding(target_words, arch.dim)
        encoder_layers = [EncoderLayer(arch) for _ in range(arch.encoder_layers)]
        self.encoder = Stack(arch, source, encoder_layers)
        decoder_layers = [DecoderLayer(arch) for _ in range(arch.decoder_layers)]
        self.decoder = Stack(arch, target, decoder_layers)

        projection = Linear(arch.dim, target_words, bias=False)
        self.decoder.output_projection = projection
        if arch.share_embeddings == "none":
            nn.init.normal_(projection.weight, std=arch.dim**-0.5)
        else:
            projection.weight = target.weight

    @staticmethod
    def _embedding(words: int, dim: int) -> nn.Embedding:
        embedding = nn.Embedding(words, dim, padding_idx=PAD)
        nn.init.normal_(embedding.weight, std=dim**-0.5)
        nn.init.zeros_(embedding.weight[PAD])
        return embedding

    def encode(self, source: Tensor, segment: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encodes source tokens [B, S], padded on either side.

        Args:
            source: [B, S].
            segment: [B, S], where several sentences share a row: 1, 2, … for the first, second, …
                of them, 0 for padding.

        Returns:
            The encoder's last features [B, S, dim], and the mask of these keys for `attention`.
        """
        real = source != PAD
        if segment is None:
            allowed = real[:, None, :]
            count = real.cumsum(1)
        else:
            allowed = same_segment(segment, segment)
            count = allowed.tril().sum(-1)
        mask = score_mask(allowed)

        # A position counts the sentence's tokens up to this one.
        x = self.encoder.embed(source, count * real + PAD)
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
        """Returns the decoder's last features [B, T, dim].

        Args:
            previous: [B, T], the previous target token of each.
            memory, memory_mask: the results of `encode`.
            segment, source_segment: [B, T] and [B, S], where several sentence pairs share a row,
                see `encode`.
        """
        real = previous != PAD
        if segment is None:
            allowed = real[:, None, :].expand(-1, real.shape[1], -1)
            count = real.cumsum(1)
        else:
            allowed = same_segment(segment, segment)
            count = allowed.tril().sum(-1)
            memory_mask = score_mask(same_segment(segment, source_segment))
        mask = score_mask(allowed.tril())

        # A position counts the sentence's tokens up to this one.
        x = self.decoder.embed(previous, count * real + PAD)
        for layer in self.decoder.layers:
            memory = finish_gradient(memory)
            x = layer(x, mask, memory, memory_mask)
        return self.decoder.normalized(x)

    def logits(self, features: Tensor) -> Tensor:
        """Returns scores of the target words [B, T, words] for decoder features [B, T, dim].

        They have the type of the features.
        """
        return self.decoder.output_projection(features)

    def forward(
        self,
        source: Tensor,
        previous: Tensor,
        source_segment: Tensor | None = None,
        target_segment: Tensor | None = None,
        packing_parts: int = 0,
    ) -> Tensor:
        """Returns logits [B, T, words] of the target's tokens.

        With `packing_parts` short rows are computed as packed rows of up to 128 tokens, for TPUs:
        the base model's step with 256 x 64 tokens takes 142.5 -> 103.5 million cycles. On a CPU it
        is slower.

        Args:
            source: [B, S] tokens, EOS at the end, PAD on either side.
            previous: [B, T], the target shifted right: EOS, then its tokens.
            source_segment, target_segment: [B, S] and [B, T], for rows of several sentence pairs:
                1, 2, … for the first, second, … pair, 0 for padding. Attention stays within a pair,
                and each pair's positions start anew.
            packing_parts: the batch is divided into so many equal parts, and rows are packed within
                a part only; a multiple of the devices that share the rows. 0: none are packed.
        """
        shape = previous.shape
        if source_segment is None and packing_parts:
            longest = max(source.shape[1], previous.shape[1])
            together = rows_together(source.shape[0], longest, packing_parts)
            if together > 1:
                source, source_segment = side_by_side(source, together)
                previous, target_segment = side_by_side(previous, together)

        memory, memory_mask = self.encode(source, source_segment)
        features = self.decode(previous, memory, memory_mask, target_segment, source_segment)
        return self.logits(features).view(*shape, -1)


# How the name of a parameter ends, as a pattern -> the axis over which each of its dimensions is
# cut; see partition.py.
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
    if model.arch.share_embeddings == "none":
        # Otherwise the output's weight is an embedding's, which CUTS has.
        parameters[r"output_projection\.weight"] = OUT
    return Rules(
        parameters=parameters,
        layer_lists=("encoder.layers", "decoder.layers"),
        heads=model.arch.heads,
        shared=r"self_attn$",
    )


class SumsOverWords(torch.autograd.Function):
    """log(sum(exp(logits))) and sum(logits) over the words; keeps the logits for the backward pass.

    A row's tokens are summed in up to eight chunks. The compiler makes them one operation that
    reads the logits in as many streams side by side; a single stream leaves two thirds of the
    memory's bandwidth unused.

    Two products take the gradient, and each computes it again. With `written` it is divided number
    by number, and then libtpu writes it to memory once instead.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, written: bool) -> tuple[Tensor, Tensor]:
        """Returns both, float32 [B, T], for logits [B, T, words]."""
        # Chunks are whole rows of registers, which have 8 tokens.
        chunks = max(1, math.gcd(logits.shape[1], 64) // 8)
        largest = logits.amax(2).float()
        exponentials = []
        sums = []
        for chunk, most in zip(logits.chunk(chunks, 1), largest.chunk(chunks, 1), strict=True):
            wide = chunk.float()
            exponentials.append((wide - most[..., None]).exp().sum(2))
            sums.append(wide.sum(2))

        total = torch.cat(exponentials, 1)
        ctx.save_for_backward(logits, largest, total)
        ctx.written = written
        return total.log() + largest, torch.cat(sums, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable  # second derivatives would be wrong, without error
    def backward(ctx, normalizer_gradient: Tensor, sum_gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient of the logits, softmax * normalizer_gradient + sum_gradient."""
        logits, largest, total = ctx.saved_tensors
        exponentials = (logits.float() - largest[..., None]).exp()
        if ctx.written:
            scaled = exponentials / total[..., None] * normalizer_gradient[..., None]
        else:
            scaled = exponentials * (normalizer_gradient / total)[..., None]
        return (scaled + sum_gradient[..., None]).to(logits.dtype), None


def label_smoothed_loss(
    logits: Tensor, target: Tensor, smoothing: float, written: bool = False
) -> dict[str, Tensor]:
    """Computes label-smoothed cross-entropy with fairseq's numbers.

    Source: Szegedy et al. 2015, arXiv:1512.00567, section 7.

    Three sums per token over the logits are enough, so that no log_softmax is kept for the backward
    pass: 177.8 -> 164.9 million cycles of the base model's step on one v5e chip (libtpu 0.0.51's
    estimate). NATIVE_DEVICES take log_softmax, which is faster there.

    Args:
        logits: [B, T, words].
        target: labels [B, T]; PAD does not count.
        smoothing: the probability that is spread over all words.
        written: see `SumsOverWords`.

    Returns:
        Sums over the real tokens: "loss" and "nll" in nats, and "tokens", their number.
    """
    words = logits.shape[2]
    labels = target.to(torch.int64)[..., None]
    if logits.device.type in NATIVE_DEVICES:
        log_probabilities = F.log_softmax(logits.float(), 2)
        nll = -log_probabilities.gather(2, labels)[..., 0]
        nll_of_all_words = -log_probabilities.sum(2)
    else:
        normalizer, total = SumsOverWords.apply(logits, written)
        nll = normalizer - logits.gather(2, labels)[..., 0].float()
        nll_of_all_words = words * normalizer - total

    real = (target != PAD).float()
    share = smoothing / (words - 1)  # of the probability, for each word that is not the label
    loss = (1 - smoothing - share) * nll + share * nll_of_all_words
    return {
        "loss": (loss * real).sum(),
        "nll": (nll * real).sum(),
        "tokens": real.sum(),
    }
