"""The embedding of many words, such as BERT's 30,522, and the output head that shares its weight.

The optimizer's state of the weight [words, width] is split along its width. Two other ways send or
compute more:

* Left to itself, XLA's partitioner all-reduces the head's gradient where the devices do not divide
  the words. It also gathers all rows that the devices look up on each device, which then adds up
  its columns: on 256 chips a quarter of a small model's step.
* With a state that is split along the words, the gradient of each look-up travels whole and in
  float32.

Here each device sums the gradient of its own examples, of look-ups and head together. Rows of zeros
are added so that the devices divide the words. Then the gradient is reduce-scattered by rows, and
an all-to-all splits it along its width.
"""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.common.sharding.groups import Axes, Entered, LinearMap, per_device

# Rows per device of a reduce-scatter are a multiple of this. Otherwise libtpu adds rows itself, and
# exchanges all once more.
ROW_MULTIPLE = 128


def reduce_scatter_gradient(
    embedding: nn.Embedding, head: nn.Linear | None, axes: dict[str, int], spmd: Any, spec: tuple
) -> None:
    """Makes an embedding, and a head with its weight, reduce-scatter their gradient over "data".

    Both share one reduce-scatter. The gradient of an embedding of few words is all-reduced instead.

    Args:
        head: None where no linear layer has the embedding's weight.
        axes: devices by axis.
        spmd: torch_xla's mesh with these axes.
        spec: how the gradient is split in the end, over `spmd`.
    """
    weight = _Weight(embedding, axes, spmd, spec)

    def look_up(input: Tensor) -> Tensor:  # `input`, since nn.Embedding's argument has this name
        return weight.look_up(input)

    embedding.forward = look_up
    if head is None:
        return

    def predict(x: Tensor) -> Tensor:
        return weight.predict(head, x)

    head.forward = predict


class _Weight:
    """The weight [words, width] of an embedding, and of its head, as each device has it."""

    def __init__(self, embedding: nn.Embedding, axes: dict[str, int], spmd: Any, spec: tuple):
        from train.common.xla import pin_sharding
        from train.common.xla.regions import Regions

        self._embedding = embedding
        self._axes = axes
        self._spmd = spmd
        self._spec = spec
        self._batch_axes = pin_sharding.BATCH  # the axes over which examples are split
        self._pin = pin_sharding.pin
        self._regions = Regions(axes)

        # Of the last look-up: the key of the weight's values, and a weak reference to the local
        # copy of the weight.
        self._last_key: tuple | None = None
        self._last_local: Callable[[], Tensor | None] | None = None

    def look_up(self, ids: Tensor) -> Tensor:
        """Returns the rows of ids [B, …], as [B, …, width]."""
        embedding = self._embedding
        if self._replicated(ids):  # such as positions, the same for all examples
            return type(embedding).forward(embedding, ids)

        spec = self._examples_spec(ids)
        local = self._local()

        # `local` as a default keeps it alive as long as the graph of this look-up.
        def sum_rows(gradient: Tensor, local: Tensor = local) -> Tensor:
            local_gradient = self._regions.enter(gradient, (*spec, None))
            local_ids = self._regions.enter(ids, spec)
            padding = -1 if embedding.padding_idx is None else embedding.padding_idx
            return torch.ops.aten.embedding_dense_backward(
                local_gradient, local_ids, embedding.num_embeddings, padding, False
            )

        # The rows are those of the weight itself. `local`, which may have autocast's type, only
        # gets the gradient.
        def find_rows(_: Tensor) -> Tensor:
            return F.embedding(ids, embedding.weight)

        return LinearMap.apply(local, find_rows, sum_rows)

    def predict(self, head: nn.Linear, x: Tensor) -> Tensor:
        """Returns the head's scores [B, …, words] of x [B, …, width]."""
        if self._replicated(x):
            return type(head).forward(head, x)

        # The class's forward pass with the local weight; the bias is added after the region.
        local_head = SimpleNamespace(weight=self._local(), bias=None)
        self._forget()  # the head ends a forward pass, and the next pass gets a copy of its own

        def product(x: Tensor) -> Tensor:
            return type(head).forward(local_head, x)

        spec = self._examples_spec(x)
        y = per_device(product, Axes(self._axes, self._regions), [spec], spec)(x)
        if head.bias is None:
            return y
        return y + head.bias.to(y.dtype)

    def _replicated(self, x: Tensor) -> bool:
        """Returns whether each device has all rows of x, since the devices do not divide them."""
        return x.shape[0] % self._regions.count(self._batch_axes) != 0

    def _examples_spec(self, x: Tensor) -> tuple:
        """Returns the spec of a tensor whose first dimension is split by examples."""
        return (self._batch_axes, *(None,) * (x.dim() - 1))

    def _local(self) -> Tensor:
        """Returns each device's copy of the weight, in the type that autocast computes in.

        While the graph of the last look-up is alive, this is the copy of that look-up, so that the
        gradients of look-ups and head become one.
        """
        weight = self._embedding.weight
        kind = weight.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)

        key = (id(weight), weight._version, dtype)
        local = self._last_local() if key == self._last_key else None
        if local is None:
            local = Entered.apply(weight.to(dtype), self._enter_whole, self._reduce)
        self._last_key = key
        self._last_local = weakref.ref(local)
        return local

    def _forget(self) -> None:
        """Makes the next look-up or head begin with a new copy of the weight."""
        self._last_key = None
        self._last_local = None

    def _enter_whole(self, weight: Tensor) -> Tensor:
        return self._regions.enter(weight, (None, None))

    def _reduce(self, local: Tensor) -> Tensor:
        """Returns the whole gradient, split as `spec` says.

        Args:
            local: each device's gradient [words, width], of its own examples.
        """
        regions = self._regions
        words = self._embedding.num_embeddings
        multiple = ROW_MULTIPLE * self._axes["data"]
        has_few_words = words < multiple
        if has_few_words:
            summed = regions.all_reduce(local, self._batch_axes)
            whole = regions.leave(summed, (None, None))
            return self._pin(whole, self._spmd, self._spec)

        padded = F.pad(local, (0, 0, 0, -words % multiple))
        rows = regions.reduce_scatter(padded, "data")
        rows = regions.all_reduce(rows, ("copies",))
        whole = regions.leave(rows, ("data", None))
        return self._pin(whole, self._spmd, self._spec)[:words]
