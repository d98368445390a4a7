"""XLNet's two-stream attention with relative positions, in the forms of layers.py.

Yang et al. 2019, arXiv:1906.08237. `encoder_layers.fast_layers` replaces transformers' own by it;
the parameters and their names stay the same.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from transformers import XLNetConfig
from transformers.models.xlnet.modeling_xlnet import XLNetLayer, XLNetRelativeAttention

from errors import InputError
from models import layers
from models.products import NATIVE_DEVICES, einsum


def turned(
    q: Tensor, weight_halves: tuple[Tensor, Tensor], positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Turns queries, so that products with the keys' sinusoids are scores of relative positions.

    The key of a relative position i - j is a weight times the sines and cosines of i - j. By the
    addition theorems these are the sines and cosines of -j, turned by angles that depend on i. So
    the query is turned instead, and no score has to be shifted from relative positions to keys (the
    "factorized" attention of Funnel-Transformer, Dai et al. 2020, arXiv:2006.03236).

    The shift took much of XLNet-base's step: without it, and with a query stream of the targets
    only, the step takes 449.4 instead of 675.6 million cycles. In bfloat16 the error of the scores
    is 1.2 times that of the shift; in float32 it is 2e-5 of their spread at 512 tokens.

    Args:
        q: queries [Tq, B, N, D].
        weight_halves: of the weight, [H / 2, N, D] each: for the sines, and for the cosines.
        positions: of the queries, float32 [Tq, B or 1].

    Returns:
        Two tensors [Tq, B, N, H / 2], to be multiplied by the sines and by the cosines of -j. With
        one tensor of width H the step above takes 425.1 million cycles, but libtpu 0.0.51 aborts on
        it for v6e at effort fast.
    """
    width = 2 * weight_halves[0].shape[0]
    dimensions = torch.arange(0, width, 2, device=q.device, dtype=torch.float32)
    frequencies = 1 / 10_000 ** (dimensions / width)
    angles = (positions[..., None] * frequencies)[:, :, None]
    sines = torch.sin(angles)
    cosines = torch.cos(angles)

    wide = torch.promote_types(q.dtype, torch.float32)
    of_sines = einsum("ibnd,hnd->ibnh", q, weight_halves[0]).to(wide)
    of_cosines = einsum("ibnd,hnd->ibnh", q, weight_halves[1]).to(wide)
    # sin(i - j) = cos(i) sin(-j) + sin(i) cos(-j)
    # cos(i - j) = cos(i) cos(-j) - sin(i) sin(-j)
    for_sines = (of_sines * cosines - of_cosines * sines).to(q.dtype)
    for_cosines = (of_sines * sines + of_cosines * cosines).to(q.dtype)
    return for_sines, for_cosines


class RelativeAttention(XLNetRelativeAttention):
    """XLNet's two-stream attention: Yang et al. 2019, sections 2.3 and A.2.

    Activations are time-major as in transformers: h [T, B, H], masks [T, T, B, 1], r [2T, B, H].
    Two things differ:

    * The query stream has the queries of the P targets only. transformers spreads them over all T
      positions, and reads P of the results. A row of target_mapping has at most one 1.
    * Dropout of r drops sines and cosines of a key's position, as in Funnel-Transformer, and not
      those of a relative position.
    """

    def constrain(self, x: Tensor, *axes: str | None) -> Tensor:
        """Returns x as it is.

        train/common/sharding replaces this method by one that splits each dimension over an axis of
        the devices.
        """
        return x

    def _to_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Projects [T, B, H] to [T, B, N, D]."""
        x = x.to(layers.compute_dtype(x))
        return einsum("ibh,hnd->ibnd", x, weight.to(x.dtype))

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        sinusoids: Tensor,
        r_halves: tuple[Tensor, Tensor],
        positions: Tensor,
        other_segment: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Returns the mean of the values, weighted by attention, [Tq, B, N, D].

        Args:
            q: queries [Tq, B, N, D].
            keys, values: [T, B, N, D].
            sinusoids: the sines and then the cosines of -j for the key at position j, [T, B, H].
            r_halves: of the parameter r, in q's type: for the sines, and for the cosines.
            positions: of the queries, [Tq, B or 1].
            other_segment: 1 where the key is of another segment than the query, [B, 1, Tq, T];
                None: there are no segments.
            mask: 1 where the query must not look at the key, [B, 1, Tq, T]; None: it sees all.
        """
        dtype = q.dtype

        def biased(bias: Tensor) -> Tensor:
            return (q + bias.to(dtype)) * self.scale

        scores = einsum("ibnd,jbnd->bnij", biased(self.r_w_bias), keys)
        for_sines, for_cosines = turned(biased(self.r_r_bias), r_halves, positions)
        sines, cosines = sinusoids.to(dtype).chunk(2, -1)
        scores = scores + einsum("ibnh,jbh->bnij", for_sines, sines)
        scores = scores + einsum("ibnh,jbh->bnij", for_cosines, cosines)

        if other_segment is not None:
            # [B, N, Tq, 2]: the score of the same segment and of another.
            segments = einsum("ibnd,snd->bnis", biased(self.r_s_bias), self.seg_embed.to(dtype))
            same = segments[..., :1]
            difference = segments[..., 1:] - segments[..., :1]
            scores = scores + same + other_segment.to(dtype) * difference

        # Added to the scores: MASKED where the query must not look, else 0.
        if mask is None:
            additive_mask = torch.zeros((), device=q.device)
        else:
            additive_mask = mask.to(torch.float32) * layers.MASKED
        dropout = self.dropout.p if self.training else 0.0
        if q.device.type in NATIVE_DEVICES:
            scores = scores.to(additive_mask.dtype) + additive_mask
            weights = F.dropout(torch.softmax(scores, -1), dropout)
            return einsum("bnij,jbnd->ibnd", weights.to(dtype), values)
        mixed = layers.AttentionCore.apply(scores, values.transpose(0, 1), additive_mask, dropout)
        return mixed.transpose(0, 1)

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
        """Returns (h, g) after attention: the content stream [T, B, H], and the query stream.

        The query stream is [P, B, H]; None where there is none.
        """
        if mems is not None:
            raise NotImplementedError(
                "memories of earlier segments are not kept; leave use_mems off"
            )
        if output_attentions:
            raise NotImplementedError("attention weights are not kept; leave output_attentions off")

        # The gradients of three projections meet in `content`: they are reduced over the devices
        # once.
        content = self.constrain(h, None, "data", None)
        length = h.shape[0]
        keys = self._to_heads(content, self.k)
        values = self._to_heads(content, self.v)
        # Cast once, so that the gradients of both streams are summed before they are reduced over
        # the devices.
        q = self.q.to(keys.dtype)
        r_halves = self.r.to(keys.dtype).chunk(2)
        o = self.o.to(keys.dtype)
        # r, unlike the parameter self.r, has the sinusoids of relative positions from T to 1 - T:
        # here those of 0, -1, …
        sinusoids = r[length:]
        attend = functools.partial(
            self._attend, keys=keys, values=values, sinusoids=sinusoids, r_halves=r_halves
        )
        positions = torch.arange(length, device=h.device, dtype=torch.float32)[:, None]
        other_segment = _over_heads(seg_mat)
        mask_h = _over_heads(attn_mask_h)
        mask_g = _over_heads(attn_mask_g)

        queries = self._to_heads(content, q)
        mixed = attend(queries, positions=positions, other_segment=other_segment, mask=mask_h)
        output_h = self._output(h, mixed, o)
        if g is None:
            return output_h, None

        if target_mapping is not None:
            positions = (target_mapping * positions).sum(1)
            other_segment = _of_targets(other_segment, target_mapping)
            mask_g = _of_targets(mask_g, target_mapping)
        queries = self._to_heads(g, q)
        mixed = attend(queries, positions=positions, other_segment=other_segment, mask=mask_g)
        return output_h, self._output(g, mixed, o)


def _over_heads(pairs: Tensor | None) -> Tensor | None:
    """Returns transformers' [T, T, B, n] as [B, 1, T, T], to be broadcast over the heads.

    Of the n entries of a pair the last one counts: of a segment's two that says "another segment",
    and a mask has only one.
    """
    if pairs is None:
        return None
    return pairs[..., -1].permute(2, 0, 1)[:, None]


def _of_targets(pairs: Tensor | None, target_mapping: Tensor) -> Tensor | None:
    """Takes the rows of the targets: [B, 1, T, T] to [B, 1, P, T] by target_mapping [P, T, B]."""
    if pairs is None:
        return None
    return einsum("plb,bnlj->bnpj", target_mapping.to(pairs.dtype), pairs)


class Layer(XLNetLayer):
    """XLNet's layer, without memories.

    As in attention, the weights of its feed-forward network are cast once for both streams.
    """

    def forward(self, output_h, output_g, **inputs):
        """Returns (h, g), as `RelativeAttention` does."""
        h, g = self.rel_attn(output_h, output_g, **inputs)
        dtype = layers.compute_dtype(h)
        cast = {}
        for name, parameter in self.ff.named_parameters():
            if parameter.dim() == 2:
                cast[name] = parameter.to(dtype)
        if g is not None:
            g = functional_call(self.ff, cast, g)
        return functional_call(self.ff, cast, h), g


REPLACED = {XLNetRelativeAttention: RelativeAttention, XLNetLayer: Layer}


def own_layers(config: XLNetConfig) -> dict[type, type]:
    """Returns the classes that are replaced, and by which.

    Raises:
        InputError: the model's relative positions are others than `turned` computes.
    """
    expected = {"attn_type": "bi", "bi_data": False, "clamp_len": -1}
    for name, value in expected.items():
        found = getattr(config, name)
        if found != value:
            raise InputError(
                f"this XLNet has {name}={found!r}; expected {value!r}, as the published ones have"
            )
    return REPLACED
