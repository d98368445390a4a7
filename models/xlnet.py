"""XLNet's two-stream attention with relative positions (Yang et al. 2019, arXiv:1906.08237) in the forms of layers.py.

`encoders.fast_layers` puts it in the place of transformers' own; parameters and keys stay the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from models import layers
from models.products import NATIVE_DEVICES, einsum

QUERIES = 128  # per block whose scores are shifted at once


def position_scores(q: Tensor, r: Tensor) -> Tensor:
    """Multiplies queries with the keys of their distances to all places.

    A query's scores are shifted by its place: the first number of a block is dropped and the rows become one shorter,
    so that equal keys stand below each other (Dai et al. 2019, appendix B). For all queries at once that takes two
    copies of [Tq, Tq + T]; a block needs only the distances that occur in it: 39.2 -> 26.5 million cycles of XLNet's
    attention on 512 tokens.

    Args:
        q: queries [Tq, B, N, D].
        r: keys of the distances Tq, Tq - 1, …, 1 - T: [Tq + T, B, N, D].

    Returns:
        [B, N, Tq, T]: for query i and key j the product with the distance i - j.
    """
    queries, distances, parts = q.shape[0], r.shape[0], []
    for first in range(0, queries, QUERIES):
        last = min(first + QUERIES, queries)
        x = einsum("ibnd,jbnd->bnij", q[first:last], r[queries - last : distances - first])
        rows, columns = x.shape[2:]
        x = x.flatten(2)[..., rows:].reshape(*x.shape[:2], rows, columns - 1)
        parts.append(x[..., : distances - queries])
    return torch.cat(parts, 2)


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

    def rel_attn_core(
        self, q_head, k_head_h, v_head_h, k_head_r, seg_mat=None, attn_mask=None, output_attentions=False
    ):
        """Returns [Tq, B, N, D] of queries [Tq, B, N, D], keys and values [T, B, N, D] and the positions' keys
        [2T, B, N, D]."""
        if output_attentions:
            raise NotImplementedError("attention weights are not kept; leave output_attentions off")
        dtype = q_head.dtype

        def biased(bias: Tensor) -> Tensor:
            return (q_head + bias.to(dtype)) * self.scale

        scores = einsum("ibnd,jbnd->bnij", biased(self.r_w_bias), k_head_h)
        scores = scores + position_scores(biased(self.r_r_bias), k_head_r)
        if seg_mat is not None:
            # [B, N, Tq, 2]: the score of the same segment and of another; seg_mat[..., 1] says which of them counts.
            segments = einsum("ibnd,snd->bnis", biased(self.r_s_bias), self.seg_embed.to(dtype))
            other = seg_mat[..., 1].permute(2, 0, 1)[:, None].to(dtype)
            scores = scores + segments[..., :1] + other * (segments[..., 1:] - segments[..., :1])
        mask = torch.zeros((), device=q_head.device)
        if attn_mask is not None:
            mask = attn_mask.permute(2, 3, 0, 1).to(torch.float32) * layers.MASKED
        dropout = self.dropout.p if self.training else 0.0
        values = v_head_h.transpose(0, 1)
        if scores.device.type in NATIVE_DEVICES:
            weights = F.dropout(torch.softmax(scores.to(mask.dtype) + mask, -1), dropout)
            return einsum("bnij,jbnd->ibnd", weights.to(dtype), v_head_h)
        return layers.AttentionCore.apply(scores, values, mask, dropout).transpose(0, 1)

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
        content = self.constrain(h, None, "data", None)  # its gradient is that of three products, reduced once
        keys, values = self._to_heads(content, self.k), self._to_heads(content, self.v)
        context = {"k_head_r": self._to_heads(r, self.r), "seg_mat": seg_mat, "output_attentions": output_attentions}
        mixed = self.rel_attn_core(self._to_heads(content, self.q), keys, values, attn_mask=attn_mask_h, **context)
        output_h, output_g = self.post_attention(h, mixed), None
        if g is not None:
            queries = self._to_heads(g, self.q)
            if target_mapping is not None:
                mapping = target_mapping.to(queries.dtype)
                queries = einsum("mbnd,mlb->lbnd", queries, mapping)
            mixed = self.rel_attn_core(queries, keys, values, attn_mask=attn_mask_g, **context)
            if target_mapping is not None:
                mixed = einsum("lbnd,mlb->mbnd", mixed, mapping)
            output_g = self.post_attention(g, mixed)
        return output_h, output_g


REPLACED = {XLNetRelativeAttention: RelativeAttention}
