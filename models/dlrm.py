"""DLRM (Naumov et al. 2019, arXiv:1906.00091) and its DCN-v2 variant (Wang et al. 2020,
arXiv:2008.13535), without the embedding tables, which are in train/common/embedding.

The numbers and the `state_dict` are those of torchrec's `DLRM` and `DLRM_DCN` without
`sparse_arch.`, so that weights move in both directions. The two MLPs and the cross net are
torchrec's own modules, which the TPU's compiler handles as well as anything written by hand. The
interaction of dense features and embeddings is written here.

Forward, backward and SGD of everything except the tables, in bfloat16 on one v5e chip, as libtpu
0.0.51's compiler estimates it (cycles, peak memory, traffic):

| shape, batch | all torchrec's | this model |
|---|---|---|
| MLPerf v2 (dcn), 8,192 | 17.32M cycles, 863 MiB, 5.65 GB | 13.17M cycles, 686 MiB, 5.42 GB |
| Terabyte (dot), 8,192 | 8.15M cycles, 435 MiB, 3.05 GB | 4.40M cycles, 411 MiB, 1.83 GB |
| Kaggle (dot), 16,384 | 6.73M cycles, 321 MiB, 2.90 GB | 4.53M cycles, 312 MiB, 2.29 GB |
| Kaggle (dot), 2,048 | 0.45M cycles, 53 MiB, 0.32 GB | 0.39M cycles, 51 MiB, 0.26 GB |

The compiler gives no estimate for the gather and the scatter of torchrec's dot interaction, which
are left out; this model has neither.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from errors import InputError
from models.products import einsum

# PyTorch runs operation by operation here, and an indexed read is the fastest.
NATIVE_GATHER_DEVICES = ("cpu", "cuda")


class PairwiseDots(torch.autograd.Function):
    """Dot products of all pairs s < t of tables, in the order of `torch.triu_indices`.

    The usual form reads the products at an index. That makes its backward pass a scatter with two
    products, one for each factor of x x^T. Here a matrix of halves picks the pairs. The gradient of
    x x^T is then symmetric, and one product is enough: 5.86 -> 5.46 million cycles for Terabyte.
    (In float32 a TPU rounds the picked numbers to bfloat16, as the layer that reads them would.)
    """

    @staticmethod
    def forward(ctx, x: Tensor, half: Tensor) -> Tensor:
        """Returns [B, T * (T - 1) / 2].

        Args:
            x: [T, B, D].
            half: [T * T, T * (T - 1) / 2] of x's type: 1/2 in the two rows (s, t) and (t, s) of
                each pair's column, else 0.
        """
        ctx.save_for_backward(x, half)
        products = einsum("sbd,tbd->bst", x, x)
        return products.flatten(1) @ half

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient of x for that of the result."""
        x, half = ctx.saved_tensors
        tables, batch, _ = x.shape
        symmetric = (gradient @ half.t()).view(batch, tables, tables)
        return 2 * einsum("bst,tbd->sbd", symmetric, x), None


class DotInteraction(nn.Module):
    """Maps [B, D] and [B, T, D] to [B, D + T + T * (T - 1) / 2].

    The result has the dense features, their product with each table, and that of each pair of
    tables. torchrec's `InteractionArch` concatenates dense and tables first, which is a copy in the
    forward and in the backward pass. Kept apart, and with the tables as [T, B, D]: 5.46 -> 4.40
    million cycles for Terabyte. NATIVE_GATHER_DEVICES take torchrec's.
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
    """Maps [B, D] and [B, T, D] to [B, (T + 1) * D] with torchrec's `LowRankCrossNet`.

    torchrec's `InteractionDCNArch` concatenates [B, 1, D] and [B, T, D] in float32 and then
    reshapes them to rows. Concatenated as rows, in the MLPs' type: 17.32 -> 13.17 million cycles
    for MLPerf v2.
    """

    def __init__(self, features: int, layers: int, rank: int):
        super().__init__()
        from torchrec.modules.crossnet import LowRankCrossNet

        self.crossnet = LowRankCrossNet(features, layers, rank)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        features = torch.cat((dense, embedded.flatten(1)), 1)
        return self.crossnet(features)


class DLRM(nn.Module):
    """Maps dense features [B, num_dense] and embeddings [B, num_tables, dim] to logits [B].

    The logits are float32, also under autocast.
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
        """Initializes the parameters as `reset_parameters` says.

        Args:
            num_dense: dense features of an example.
            num_tables: embeddings of an example.
            dim: width of an embedding.
            bottom: sizes of the layers over the dense features; the last one is `dim`.
            top: sizes of the layers over the interactions; the last one is 1.
            interaction: "dot" (Naumov et al. 2019, section 2.2) or "dcn" (the low-rank cross net of
                Wang et al. 2020).
            cross_layers, cross_rank: layers and rank of "dcn".

        Raises:
            ValueError: sizes that do not fit together.
        """
        super().__init__()
        if not bottom or bottom[-1] != dim:
            raise ValueError(
                f"bottom is {list(bottom)}; its last size must be that of the embeddings, dim={dim}"
            )
        if len(top) < 2 or top[-1] != 1:
            raise ValueError(
                f"top is {list(top)}; it must be at least two sizes, the last one 1: the logit"
            )
        _require_positive("num_dense", [num_dense])
        _require_positive("num_tables", [num_tables])
        _require_positive("bottom", bottom)
        _require_positive("top", top)
        _require_positive("cross_layers", [cross_layers])
        _require_positive("cross_rank", [cross_rank])

        # Not at the top of the file: this import takes some seconds.
        try:
            from torchrec.models.dlrm import DenseArch, OverArch
        except (ImportError, OSError) as error:  # OSError: its kernels are for another torch
            raise InputError(
                f"DLRM is made of torchrec's layers, and torchrec cannot be imported beside torch "
                f"{torch.__version__} ({error}); install requirements-torchrec.txt, which pairs "
                "with torch 2.9.0 (with 2.15 no release of it does)"
            ) from error

        self.num_tables = num_tables
        self.dim = dim
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
        if interaction == "dot":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the MLPs of "dot" with normal numbers.

        The variance of weights is 2 / (in + out), that of biases 1 / out, as in
        facebookresearch/dlrm (`create_mlp`) and MLPerf's first DLRM benchmark. "dcn" keeps
        torchrec's initial values, as MLPerf's recommendation_v2 does: those of `nn.Linear`, and
        Xavier normal in the cross net.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                weight_variance = 2 / (module.in_features + module.out_features)
                bias_variance = 1 / module.out_features
                nn.init.normal_(module.weight, std=math.sqrt(weight_variance))
                nn.init.normal_(module.bias, std=math.sqrt(bias_variance))

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        if embedded.shape[1:] != (self.num_tables, self.dim):
            raise ValueError(
                f"embedded is {list(embedded.shape)}; "
                f"it must be [batch, {self.num_tables}, {self.dim}]"
            )

        dense = self.dense_arch(dense)
        interactions = self.inter_arch(dense, embedded.to(dense.dtype))
        logits = self.over_arch(interactions).squeeze(-1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _require_positive(name: str, values: Sequence[int]) -> None:
    """Raises ValueError where one of the values is below 1."""
    if min(values) < 1:
        listed = ", ".join(map(str, values))
        raise ValueError(f"{name} is {listed}; it must be at least 1")
