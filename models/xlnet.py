"""XLNet's two-stream attention with relative positions (Yang et al. 2019, arXiv:1906.08237) in the forms of layers.py.

`encoders.fast_layers` puts it in the place of transformers' own; parameters and keys stay the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from models import layers
from models.products import NATIVE_DEVICES, einsum

def turned(q: Tensor, weight: Tensor, places: Tensor) -> Tensor:
    """Returns queries as numbers for sinusoids of keys, [Tq, B, N, H].

    Args:
        q: queries [Tq, B, N, D].
        weight: what makes keys of the sinusoids of distances, [H, N, D].
        places: of the queries, float32 [Tq, B or 1].
    """
    width = weight.shape[0]
    frequencies = 10_000 ** -(torch.arange(0, width, 2, device=q.device, dtype=torch.float32) / width)
    angles = (places[..., None] * frequencies)[:, :, None]
    sines, cosines = torch.sin(angles), torch.cos(angles)
    first, second = einsum("ibnd,hnd->ibnh", q, weight).to(torch.promote_types(q.dtype, torch.float32)).chunk(2, -1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], -1).to(q.dtype)


class RelativeAttention(XLNetRelativeAttention):
    """XLNet's two-stream attention with relative positions (Yang et al. 2019, sections 2.3 and A.2).

    Activations are time-major as in transformers: h [T, B, H], masks [T, T, B, 1], r [2T, B, H].
    """

    def constrain(self, x: Tensor, *axes: str | None) -> Tensor:
        """Returns x; train/common/sharding puts in its place what cuts each dimension over an axis of the devices."""
        return x

    def _to_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.to(layers.compute_dtype(x))
        return einsum("ibh,hnd->ibnd", x, weight.to(x.dtype))

    def rel_attn_core(self, q, k, v, r, places, other=None, mask=None):
        """Returns [Tq, B, N, D].

        Args:
            q: queries [Tq, B, N, D].
            k, v: keys and values [T, B, N, D].
            r: sinusoids of the keys' negative places [T, B, H].
            places: the queries', [Tq, B or 1].
            other: 1 where the key is of another segment than the query, [B, 1, Tq, T]; None: without segments.
            mask: 1 where a query must not look at a key, [B, 1, Tq, T]; None: it may look at all.
        """
        dtype = q.dtype

        def biased(bias: Tensor) -> Tensor:
            return (q + bias.to(dtype)) * self.scale

        scores = einsum("ibnd,jbnd->bnij", biased(self.r_w_bias), k)
        sinusoids = turned(biased(self.r_r_bias), self.r.to(dtype), places)
        scores = scores + einsum("ibnh,jbh->bnij", sinusoids, r.to(dtype))
        if other is not None:
            # [B, N, Tq, 2]: the score of the same segment and of another.
            segments = einsum("ibnd,snd->bnis", biased(self.r_s_bias), self.seg_embed.to(dtype))
            scores = scores + segments[..., :1] + other.to(dtype) * (segments[..., 1:] - segments[..., :1])
        mask = torch.zeros((), device=q.device) if mask is None else mask.to(torch.float32) * layers.MASKED
        dropout = self.dropout.p if self.training else 0.0
        if scores.device.type in NATIVE_DEVICES:
            weights = F.dropout(torch.softmax(scores.to(mask.dtype) + mask, -1), dropout)
            return einsum("bnij,jbnd->ibnd", weights.to(dtype), v)
        return layers.AttentionCore.apply(scores, v.transpose(0, 1), mask, dropout).transpose(0, 1)

    def post_attention(self, h, attn_vec, residual=True):
        """Projects back to [T, B, H], adds the residual and normalizes."""
        mixed = self.dropout(einsum("ibnd,hnd->ibh", attn_vec, self.o.to(attn_vec.dtype)))
        return self.layer_norm(mixed + h.to(mixed.dtype) if residual else mixed)

    def forward(
        self, h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems=None, target_mapping=None, output_attentions=False
    ):
        """Returns (h, g) after attention: the content stream and, where there is one, the query stream [P, B, H]."""
        if mems is not None:
            raise NotImplementedError("memories of earlier segments are not kept; leave use_mems off")
        if output_attentions:
            raise NotImplementedError("attention weights are not kept; leave output_attentions off")
        length = h.shape[0]
        if r.shape[0] != 2 * length:
            raise NotImplementedError('attention in one direction is not computed; the configuration says attn_type="bi"')
        content = self.constrain(h, None, "data", None)  # its gradient is that of three products, reduced once
        context = self._to_heads(content, self.k), self._to_heads(content, self.v), r[length:]
        places = torch.arange(length, device=h.device, dtype=torch.float32)[:, None]
        # seg_mat[..., 1]: of another segment.
        pairs = [each if each is None else each[..., -1] for each in (seg_mat, attn_mask_h, attn_mask_g)]
        other, mask_h, mask_g = (each if each is None else each.permute(2, 0, 1)[:, None] for each in pairs)
        output_h = self.post_attention(
            h, self.rel_attn_core(self._to_heads(content, self.q), *context, places, other, mask_h)
        )
        if g is None:
            return output_h, None
        if target_mapping is not None:

            def of_targets(each: Tensor | None) -> Tensor | None:
                """[B, 1, P, T], the rows of the targets, of [B, 1, T, T]."""
                return each if each is None else einsum("plb,bnlj->bnpj", target_mapping.to(each.dtype), each)

            other, mask_g = of_targets(other), of_targets(mask_g)
            places = (target_mapping * places).sum(1)
        output_g = self.post_attention(
            g, self.rel_attn_core(self._to_heads(g, self.q), *context, places, other, mask_g)
        )
        return output_h, output_g


REPLACED = {XLNetRelativeAttention: RelativeAttention}
