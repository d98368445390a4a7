"""XLNet's two-stream attention with relative positions (Yang et al. 2019, arXiv:1906.08237) in the
forms of layers.py.

`encoder_layers.fast_layers` puts it in the place of transformers' own; parameters and keys stay the
same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from transformers import XLNetConfig
from transformers.models.xlnet.modeling_xlnet import XLNetLayer, XLNetRelativeAttention

from errors import InputError
from models import layers
from models.products import NATIVE_DEVICES, einsum


def turned(q: Tensor, halves: tuple[Tensor, Tensor], places: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries that give the scores of distances when multiplied with the sinusoids of the
    keys' places.

    The key of a distance i - j is a weight times its sines and cosines, and by the addition theorems these are those of
    -j, turned by angles that depend on i. So it is the query that is turned, and nothing has to be shifted from
    distances to keys (the "factorized" attention of Funnel-Transformer, Dai et al. 2020, arXiv:2006.03236). The shift
    took much of XLNet-base's step: with it, and with the query stream of all places, 675.6 -> 449.4 million cycles. In
    bfloat16 the scores' error is 1.2 times that of the shift, in float32 2e-5 of their spread at 512 tokens.

    Args:
        q: queries [Tq, B, N, D].
        halves: of the weight, [H / 2, N, D] each: for the sines, and for the cosines.
        places: of the queries, float32 [Tq, B or 1].

    Returns:
        Two [Tq, B, N, H / 2], to be multiplied with the sines and with the cosines of -j. One of
            width H takes
        425.1 million cycles of that step, but libtpu 0.0.51 aborts on it for v6e at effort fast.
    """
    width = 2 * halves[0].shape[0]
    frequencies = 1 / 10_000 ** (
        torch.arange(0, width, 2, device=q.device, dtype=torch.float32) / width
    )
    angles = (places[..., None] * frequencies)[:, :, None]
    sines, cosines, wide = (
        torch.sin(angles),
        torch.cos(angles),
        torch.promote_types(q.dtype, torch.float32),
    )
    first, second = (einsum("ibnd,hnd->ibnh", q, half).to(wide) for half in halves)
    return (first * cosines - second * sines).to(q.dtype), (first * sines + second * cosines).to(
        q.dtype
    )


class RelativeAttention(XLNetRelativeAttention):
    """XLNet's two-stream attention with relative positions (Yang et al. 2019, sections 2.3 and
    A.2).

    Activations are time-major as in transformers: h [T, B, H], masks [T, T, B, 1], r [2T, B, H].
    Two things differ:

    * The query stream has the queries of the P targets only. transformers spreads them over all T places, and reads P
      of the results. A row of target_mapping has at most one 1.
    * Dropout of r drops sines and cosines of a key's place, and not those of a distance, as in Funnel-Transformer.
    """

    def constrain(self, x: Tensor, *axes: str | None) -> Tensor:
        """Returns x; train/common/sharding puts in its place what cuts each dimension over an axis of the devices."""
        return x

    def _to_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.to(layers.compute_dtype(x))
        return einsum("ibh,hnd->ibnd", x, weight.to(x.dtype))

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        sinusoids: Tensor,
        r: tuple[Tensor, Tensor],
        places: Tensor,
        other: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Returns [Tq, B, N, D].

        Args:
            q: queries [Tq, B, N, D].
            keys, values: [T, B, N, D].
            sinusoids: of the keys' places, negative, [T, B, H].
            r: the halves of the parameter, in q's type.
            places: the queries', [Tq, B or 1].
            other: 1 where the key is of another segment than the query, [B, 1, Tq, T]; None: there
                are no segments.
            mask: 1 where the query must not look at the key, [B, 1, Tq, T]; None: it sees all.
        """
        dtype = q.dtype

        def biased(bias: Tensor) -> Tensor:
            return (q + bias.to(dtype)) * self.scale

        scores = einsum("ibnd,jbnd->bnij", biased(self.r_w_bias), keys)
        queries = turned(biased(self.r_r_bias), r, places)
        for part, numbers in zip(queries, sinusoids.to(dtype).chunk(2, -1), strict=True):
            scores = scores + einsum("ibnh,jbh->bnij", part, numbers)
        if other is not None:
            # [B, N, Tq, 2]: the score of the same segment and of another.
            segments = einsum("ibnd,snd->bnis", biased(self.r_s_bias), self.seg_embed.to(dtype))
            scores = (
                scores
                + segments[..., :1]
                + other.to(dtype) * (segments[..., 1:] - segments[..., :1])
            )
        hidden = (
            torch.zeros((), device=q.device)
            if mask is None
            else mask.to(torch.float32) * layers.MASKED
        )
        dropout = self.dropout.p if self.training else 0.0
        if q.device.type in NATIVE_DEVICES:
            weights = F.dropout(torch.softmax(scores.to(hidden.dtype) + hidden, -1), dropout)
            return einsum("bnij,jbnd->ibnd", weights.to(dtype), values)
        return layers.AttentionCore.apply(
            scores, values.transpose(0, 1), hidden, dropout
        ).transpose(0, 1)

    def _output(self, x: Tensor, mixed: Tensor, o: Tensor) -> Tensor:
        """Projects back to [T, B, H], adds the residual and normalizes."""
        mixed = self.dropout(einsum("ibnd,hnd->ibh", mixed, o))
        return self.layer_norm(mixed + x.to(mixed.dtype))

    def forward(
        self,
        h,
        g,
        attn_mask_h,
        attn_mask_g,
        r,
        seg_mat,
        mems=None,
        target_mapping=None,
        output_attentions=False,
    ):
        """Returns (h, g) after attention: the content stream and, where there is one, the query stream [P, B, H]."""
        if mems is not None:
            raise NotImplementedError(
                "memories of earlier segments are not kept; leave use_mems off"
            )
        if output_attentions:
            raise NotImplementedError("attention weights are not kept; leave output_attentions off")
        content = self.constrain(
            h, None, "data", None
        )  # its gradient is that of three products, reduced once
        length = h.shape[0]
        # Of the sinusoids of distances from T to 1 - T those of 0, -1, …
        keys, values = self._to_heads(content, self.k), self._to_heads(content, self.v)
        # Cast once: the gradients of both streams are added up before they are reduced over the
        # devices.
        q, of_places, o = (weight.to(keys.dtype) for weight in (self.q, self.r, self.o))
        context = keys, values, r[length:], of_places.chunk(2)
        places = torch.arange(length, device=h.device, dtype=torch.float32)[:, None]
        pairs = (
            x if x is None else x[..., -1].permute(2, 0, 1)[:, None]
            for x in (seg_mat, attn_mask_h, attn_mask_g)
        )
        other, mask_h, mask_g = pairs
        output_h = self._output(
            h, self._attend(self._to_heads(content, q), *context, places, other, mask_h), o
        )
        if g is None:
            return output_h, None
        if target_mapping is not None:

            def of_targets(pairs: Tensor | None) -> Tensor | None:
                """[B, 1, T, T] -> [B, 1, P, T]."""
                return (
                    pairs
                    if pairs is None
                    else einsum("plb,bnlj->bnpj", target_mapping.to(pairs.dtype), pairs)
                )

            places = (target_mapping * places).sum(1)
            other, mask_g = of_targets(other), of_targets(mask_g)
        return output_h, self._output(
            g, self._attend(self._to_heads(g, q), *context, places, other, mask_g), o
        )


class Layer(XLNetLayer):
    """XLNet's layer, without memories; its feed-forward network casts its weights once for both streams, as above."""

    def forward(self, output_h, output_g, **inputs):
        """Returns (h, g), as `RelativeAttention` does."""
        h, g = self.rel_attn(output_h, output_g, **inputs)
        dtype = layers.compute_dtype(h)
        cast = {
            name: each.to(dtype) for name, each in self.ff.named_parameters() if each.dim() == 2
        }
        g = g if g is None else functional_call(self.ff, cast, g)
        return functional_call(self.ff, cast, h), g


REPLACED = {XLNetRelativeAttention: RelativeAttention, XLNetLayer: Layer}


def own_layers(config: XLNetConfig) -> dict[type, type]:
    """Returns REPLACED; raises InputError for distances whose scores `turned` does not give."""
    expected = {"attn_type": "bi", "bi_data": False, "clamp_len": -1}
    for name, value in expected.items():
        found = getattr(config, name)
        if found != value:
            raise InputError(
                f"this XLNet has {name}={found!r}; expected {value!r}, as the published ones have"
            )
    return REPLACED
