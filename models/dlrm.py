"""DLRM (Naumov et al. 2019, arXiv:1906.00091) and its DCN-v2 variant (Wang et al. 2020, arXiv:2008.13535), without
the embedding tables, which are in train/common/embedding.

The numbers and the `state_dict` are those of torchrec's `DLRM` and `DLRM_DCN` without `sparse_arch.`, so that weights
move in both directions. The two MLPs and the cross net are torchrec's own modules, which the TPU's compiler handles as
well as anything written by hand; the interaction of dense features and embeddings is written here. Forward, backward
and SGD of everything except the tables, in bfloat16 on one v5e chip, as libtpu 0.0.51's compiler estimates it:

| shape, batch | all torchrec's | this model |
|---|---|---|
| MLPerf v2 (dcn), 8,192 | 17.32M cycles, 863 MiB, 5.65 GB | 13.17M cycles, 686 MiB, 5.42 GB |
| Terabyte (dot), 8,192 | 8.15M cycles, 435 MiB, 3.05 GB | 4.40M cycles, 411 MiB, 1.83 GB |
| Kaggle (dot), 16,384 | 6.73M cycles, 321 MiB, 2.90 GB | 4.53M cycles, 312 MiB, 2.29 GB |
| Kaggle (dot), 2,048 | 0.45M cycles, 53 MiB, 0.32 GB | 0.39M cycles, 51 MiB, 0.26 GB |

(cycles, peak memory, traffic). The compiler gives no estimate for the gather and the scatter of torchrec's dot
interaction, which are left out; this model has neither.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from models.products import einsum

NATIVE_GATHER_DEVICES = ("cpu", "cuda")  # PyTorch runs operation by operation here: an indexed read is the fastest


class PairwiseDots(torch.autograd.Function):
    """Dot products of all pairs s < t of x [T, B, D]: [B, T * (T - 1) / 2], in the order of `torch.triu_indices`.

    The usual form reads the products at an index, which makes its backward pass a scatter with two products, one for
    each factor of x x^T. Here a matrix of halves picks the pairs; the gradient of x x^T is then symmetric, and one
    product is enough: 5.86 -> 5.46 million cycles for Terabyte. (In float32 a TPU rounds the picked numbers to
    bfloat16, as the layer that reads them would.)

    Args:
        half: [T * T, T * (T - 1) / 2], 1/2 in the two places (s, t) and (t, s) of each pair, of x's type.
    """

    @staticmethod
    def forward(ctx, x: Tensor, half: Tensor) -> Tensor:
        ctx.save_for_backward(x, half)
        return einsum("sbd,tbd->bst", x, x).flatten(1) @ half

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        x, half = ctx.saved_tensors
        symmetric = (gradient @ half.t()).view(x.shape[1], x.shape[0], x.shape[0])
        return 2 * einsum("bst,tbd->sbd", symmetric, x), None


class DotInteraction(nn.Module):
    """Maps [B, D] and [B, T, D] to [B, D + T + T * (T - 1) / 2]: dense, dense with each table, each pair of tables.

    torchrec's `InteractionArch` concatenates dense and tables first, a copy in the forward and in the backward pass.
    Kept apart, and with the tables as [T, B, D]: 5.46 -> 4.40 million cycles for Terabyte. NATIVE_GATHER_DEVICES take
    torchrec's.
    """

    def __init__(self, num_tables: int):
        super().__init__()
        from torchrec.models.dlrm import InteractionArch

        self.native = InteractionArch(num_tables)
        first, second = torch.triu_indices(num_tables, num_tables, offset=1)
        pairs = torch.arange(len(first))
        half = torch.zeros(num_tables * num_tables, len(first))
        half[first * num_tables + second, pairs] = 0.5
        half[second * num_tables + first, pairs] = 0.5
        self.register_buffer("half_pairs", half, persistent=False)  # follows from num_tables

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        if embedded.device.type in NATIVE_GATHER_DEVICES:
            return self.native(dense, embedded)
        tables = embedded.transpose(0, 1)
        with_dense = (tables * dense).sum(-1).t()
        pairs = PairwiseDots.apply(tables, self.half_pairs.to(tables.dtype))
        return torch.cat((dense, with_dense, pairs), 1)


class CrossInteraction(nn.Module):
    """Maps [B, D] and [B, T, D] to [B, (T + 1) * D] with torchrec's `LowRankCrossNet` over all of them.

    torchrec's `InteractionDCNArch` concatenates [B, 1, D] and [B, T, D] in float32 and then reshapes them to rows.
    Concatenated as rows, in the MLPs' type: 17.32 -> 13.17 million cycles for MLPerf v2.
    """

    def __init__(self, features: int, layers: int, rank: int):
        super().__init__()
        from torchrec.modules.crossnet import LowRankCrossNet

        self.crossnet = LowRankCrossNet(features, layers, rank)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        return self.crossnet(torch.cat((dense, embedded.flatten(1)), 1))


class DLRM(nn.Module):
    """Maps dense features [B, num_dense] and embeddings [B, num_tables, dim] to logits [B], float32 under autocast.

    Args:
        bottom: sizes of the layers over the dense features; the last one is `dim`.
        top: sizes of the layers over the interactions; the last one is 1.
        interaction: "dot" (Naumov et al. 2019, section 2.2) or "dcn" (the low-rank cross net of Wang et al. 2020).
        cross_layers, cross_rank: layers and rank of "dcn".

    Raises:
        ValueError: sizes that do not fit together.
    """

    def __init__(
        self,
        num_dense: int,
        num_tables: int,
        dim: int,
        bottom: Sequence[int],
        top: Sequence[int],
        interaction: Literal["dot", "dcn"],
        cross_layers: int = 3,
        cross_rank: int = 512,
    ):
        super().__init__()
        if not bottom or bottom[-1] != dim:
            raise ValueError(f"bottom is {list(bottom)}; its last size must be that of the embeddings, dim={dim}")
        if len(top) < 2 or top[-1] != 1:
            raise ValueError(f"top is {list(top)}; it must be at least two sizes, the last one 1: the logit")
        sizes = {"num_dense": (num_dense,), "num_tables": (num_tables,), "bottom": bottom, "top": top}
        sizes |= {"cross_layers": (cross_layers,), "cross_rank": (cross_rank,)}
        for name, values in sizes.items():
            if min(values) < 1:
                raise ValueError(f"{name} is {', '.join(map(str, values))}; it must be at least 1")
        # Not at the top of the file: this import takes some seconds.
        from torchrec.models.dlrm import DenseArch, OverArch

        self.dense_arch = DenseArch(num_dense, list(bottom))
        if interaction == "dot":
            features = dim + num_tables + num_tables * (num_tables - 1) // 2
            self.inter_arch = DotInteraction(num_tables)
        elif interaction == "dcn":
            features = (num_tables + 1) * dim
            self.inter_arch = CrossInteraction(features, cross_layers, cross_rank)
        else:
            raise ValueError(f"interaction is {interaction!r}; it must be 'dot' or 'dcn'")
        self.over_arch = OverArch(features, list(top))
        self.num_tables, self.dim = num_tables, dim
        if interaction == "dot":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the MLPs as facebookresearch/dlrm (`create_mlp`) and MLPerf's first DLRM benchmark do: normal,
        weights with variance 2 / (in + out), biases with 1 / out. "dcn" keeps torchrec's initial values, as MLPerf's
        recommendation_v2 does: those of `nn.Linear`, and Xavier normal in the cross net."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=math.sqrt(2 / (module.in_features + module.out_features)))
                nn.init.normal_(module.bias, std=math.sqrt(1 / module.out_features))

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        if embedded.shape[1:] != (self.num_tables, self.dim):
            raise ValueError(f"embedded is {list(embedded.shape)}; it must be [batch, {self.num_tables}, {self.dim}]")
        dense = self.dense_arch(dense)
        logits = self.over_arch(self.inter_arch(dense, embedded.to(dense.dtype))).squeeze(-1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
