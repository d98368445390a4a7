"""The head and the embedding of a language model whose words the devices do not divide, such as BERT's 30,522.

The head's weight is the embedding's, and its optimizer's state is cut along its width: XLA's partitioner would make an
all-reduce of its gradient and keep a slice. Here rows of zeros are added to the gradient, so that the devices divide
them; it is reduce-scattered by rows, and an all-to-all of the parts cuts it along its width.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.common.sharding.groups import Axes, Linear, per_device

ROWS = 128  # of a device, a multiple: libtpu would add rows of its own, and exchange them again


def sum_by_rows(head: nn.Linear, axes: dict[str, int], spmd: Any, spec: tuple) -> None:
    """Lets a head reduce-scatter the gradient of its weight [words, width] over "data", before that of the embedding is
    added to it. `spec`: how the result is cut."""
    from train.common.xla.marks import mark
    from train.common.xla.regions import Regions

    regions, words, batch = Regions(axes), len(head.weight), ("copies", "data")

    def summed(own: Tensor) -> Tensor:
        """Returns the whole gradient; each device has that of its part of the batch."""
        padded = F.pad(own, (0, 0, 0, -words % (ROWS * axes["data"])))
        part = regions.all_reduce(regions.reduce_scatter(padded, "data"), ("copies",))
        rows = regions.leave(part, ("data", None))
        return mark(rows, spmd, spec)[:words]

    def forward(x: Tensor) -> Tensor:
        weight = Linear.apply(head.weight.to(x.dtype), lambda weight: regions.enter(weight, (None, None)), summed)
        product, cut = SimpleNamespace(weight=weight, bias=None), (batch, *[None] * (x.dim() - 1))
        y = per_device(lambda x: type(head).forward(product, x), Axes(axes, regions), [cut], cut)(x)
        return y if head.bias is None else y + head.bias.to(y.dtype)

    head.forward = forward


def sum_by_copies(embedding: nn.Embedding, axes: dict[str, int]) -> None:
    """Lets a device add up the gradient of its part of an embedding's width, for the rows of its copy of the state; the
    copies' sums are all-reduced. On 256 chips the partitioner would all-reduce the whole gradient over all of them."""
    from train.common.xla.regions import Regions

    regions, words = Regions(axes), embedding.num_embeddings
    padding = -1 if embedding.padding_idx is None else embedding.padding_idx

    def forward(ids: Tensor) -> Tensor:
        if ids.shape[0] % axes["copies"]:  # positions, the same for all rows
            return type(embedding).forward(embedding, ids)

        def summed(gradient: Tensor) -> Tensor:
            rows = ("copies", *[None] * (ids.dim() - 1))
            parts = regions.enter(gradient, (*rows, "data")), regions.enter(ids, rows)
            own = torch.ops.aten.embedding_dense_backward(*parts, words, padding, False)
            return regions.leave(regions.all_reduce(own, ("copies",)), (None, "data"))

        return Linear.apply(embedding.weight, lambda weight: F.embedding(ids, weight), summed)

    embedding.forward = forward
