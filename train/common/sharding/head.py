"""The embedding of many words, such as BERT's 30,522, and the head that has its weight.

Its optimizer's state is cut along the width. XLA's partitioner would all-reduce the head's gradient, where devices do
not divide the words, and bring all rows that the devices look up to each of them, which adds up its part of the width:
on 256 chips a quarter of a small model's step. Cut along the words it would send each look-up's gradient, whole and in
float32. Here a device adds up the gradient of its own rows, of look-ups and head. With rows of zeros, so that the
devices divide them, it is reduce-scattered, and an all-to-all of the parts cuts it along its width.
"""

import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.common.sharding.groups import Axes, Entered, Linear, per_device

ROWS = 128  # of a device, a multiple: libtpu would add rows of its own, and exchange them again


def sum_by_rows(embedding: nn.Embedding, head: nn.Linear | None, axes: dict[str, int], spmd: Any, spec: tuple) -> None:
    """Lets an embedding [words, width], and a head with its weight, reduce-scatter their gradient over "data", once;
    a small one is all-reduced. `spec`: how the result is cut."""
    from train.common.xla.marks import BATCH, mark
    from train.common.xla.regions import Regions

    regions, words = Regions(axes), embedding.num_embeddings
    padding = -1 if embedding.padding_idx is None else embedding.padding_idx
    begun: dict[tuple, weakref.ref] = {}  # which weight, and as what, the last look-up took -> as each device has it

    def summed(own: Tensor) -> Tensor:
        """Returns the whole gradient; each device has that of its part of the batch."""
        if words < ROWS * axes["data"]:
            return mark(regions.leave(regions.all_reduce(own, BATCH), (None, None)), spmd, spec)
        padded = F.pad(own, (0, 0, 0, -words % (ROWS * axes["data"])))
        part = regions.all_reduce(regions.reduce_scatter(padded, "data"), ("copies",))
        return mark(regions.leave(part, ("data", None)), spmd, spec)[:words]

    def on_each_device() -> Tensor:
        """Returns the weight of the last look-up, so that their gradients are one, or of a pass that begins."""
        weight, kind = embedding.weight, embedding.weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        this = id(weight), weight._version, dtype
        own = begun[this]() if this in begun else None
        if own is None:
            own = Entered.apply(weight.to(dtype), lambda whole: regions.enter(whole, (None, None)), summed)
        begun.clear()
        begun[this] = weakref.ref(own)
        return own

    def look_up(input: Tensor) -> Tensor:
        if input.shape[0] % regions.count(BATCH):  # positions, the same for all rows
            return type(embedding).forward(embedding, input)
        rows, own = (BATCH, *[None] * (input.dim() - 1)), on_each_device()

        def added_up(gradient: Tensor, own: Tensor = own) -> Tensor:  # which lives as long as the graph
            parts = regions.enter(gradient, (*rows, None)), regions.enter(input, rows)
            return torch.ops.aten.embedding_dense_backward(*parts, words, padding, False)

        return Linear.apply(own, lambda _: F.embedding(input, embedding.weight), added_up)

    def predict(x: Tensor) -> Tensor:
        if x.shape[0] % regions.count(BATCH):
            return type(head).forward(head, x)
        product = SimpleNamespace(weight=on_each_device(), bias=None)
        begun.clear()
        cut = (BATCH, *[None] * (x.dim() - 1))
        y = per_device(lambda x: type(head).forward(product, x), Axes(axes, regions), [cut], cut)(x)
        return y if head.bias is None else y + head.bias.to(y.dtype)

    embedding.forward = look_up
    if head:
        head.forward = predict
