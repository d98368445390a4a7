"""Plan "data": every device has a copy of the tables, and gets the gradients of all devices.

    lookup   each device looks up its own examples
    update   tables with no more rows than the batch has ids: the gradient of the whole array,
             all-reduced
             larger ones: the ids and gradients of all examples, all-gathered

On every device, device row i is array row i here.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from train.common.embedding.owners import TableRun
from train.common.embedding.plan import HeldRows, SlotLoad, TableArray
from train.common.embedding.rows import by_row, gradient_of_ids, pool, sum_equal_rows


class Copied(TableArray):
    """Tables of which every device has a copy."""

    name = "data"  # what users write as a table's plan: as in data parallelism, copies
    spec = (None, None)

    @classmethod
    def rows_per_device(cls, rows: int, devices: int) -> float:
        return rows

    def _lay_out(self) -> tuple[list[int], int]:
        first_rows = np.cumsum([0, *self.sizes])
        return first_rows[:-1].tolist(), int(first_rows[-1])

    def _array_rows(self, tensor_rows: Tensor) -> Tensor:
        return tensor_rows

    def held_rows(self, index: int, part: int) -> HeldRows:
        run = TableRun(first=0)
        return HeldRows(run, first_device_row=self.start[index], count=self.sizes[index])

    def parts_to_fill(self, tensor: Tensor) -> list[int]:
        return [0]  # one for all devices

    def fill(self, tensor: Tensor, parts: list[Tensor]) -> None:
        tensor.copy_(parts[0])
        self.devices.annotate_replicated(tensor)

    def lookup(self, array_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Looks up and adds up the rows of each bag, see TableArray; `update` needs the array rows
        again."""
        batch_axes = self.devices.batch_axes
        weight = self.devices.enter(self.weight, self.spec)
        by_batch = (batch_axes, None)
        rows = self.devices.enter(self.devices.shard(array_rows, by_batch), by_batch)
        pooled = pool(weight, rows, self._is_row(rows), self.lookups, self.dim)
        shape = (array_rows.shape[0], len(self.table_indices), self.dim)
        return self.devices.leave(pooled, (batch_axes, None, None), shape), array_rows

    def update(
        self,
        kept_by_pass: Sequence[Tensor],
        grads: Sequence[Tensor],
        lr: Tensor,
        step: Tensor,
    ) -> list[SlotLoad]:
        ids = sum(self.devices.count_of_batch(rows.numel()) for rows in kept_by_pass)
        if self.used_rows <= ids:
            self._update_all(kept_by_pass, grads, lr, step)
        else:
            self._update_looked_up(kept_by_pass, grads, lr, step)
        return []

    def _update_all(
        self,
        kept_by_pass: Sequence[Tensor],
        grads: Sequence[Tensor],
        lr: Tensor,
        step: Tensor,
    ) -> None:
        """Updates every row, with gradients that are added up over the devices.

        For small tables that moves fewer bytes than sending the gradient of every example.
        """
        rows, g = self._gradient_rows(kept_by_pass, grads, self.devices.batch_axes)
        # One more column counts the ids of each row, to tell which rows are touched. One more row
        # takes the ids that are not there; it is cut off before the devices' sums are added up.
        g_and_count = torch.cat([g, torch.ones_like(g[:, :1])], 1)
        zeros = torch.zeros(self.device_rows + 1, self.dim + 1, device=g.device)
        own_sum = zeros.index_add(0, rows, g_and_count)[: self.used_rows]
        total = self.devices.all_reduce(own_sum)
        g = total[:, :-1]
        count = total[:, -1:]
        touched = (count > 0).float()

        tensors = self._enter_tensors()
        table_parts = []
        padding_parts = []
        for tensor in tensors:
            by_device_row = by_row(tensor, self.dim)
            table_parts.append(by_device_row[: self.used_rows])
            padding_parts.append(by_device_row[self.used_rows :])
        weight, *states = table_parts
        weight, states = self.optimizer.update(weight, states, None, g, touched, lr, step)
        written = []
        for tensor, updated, padding in zip(tensors, [weight, *states], padding_parts, strict=True):
            written.append(torch.cat([updated, padding]).reshape(tensor.shape))
        self._leave_tensors(written)

    def _update_looked_up(
        self,
        kept_by_pass: Sequence[Tensor],
        grads: Sequence[Tensor],
        lr: Tensor,
        step: Tensor,
    ) -> None:
        """Updates the rows that some device has looked up: every device gets the ids and gradients
        of all."""
        rows, g = self._gradient_rows(kept_by_pass, grads, batch_axes=None)
        if self.optimizer.states:  # without a state, equal rows can be added one after the other
            rows, g = sum_equal_rows(rows, g, self.device_rows)
        is_row = rows < self.device_rows
        touched = is_row[:, None].float()
        # Row 0 in place of those that are none: their g is 0, and a sum with 0 changes nothing.
        rows = torch.where(is_row, rows, torch.zeros_like(rows))
        self._update_rows(rows, g, touched, lr, step)

    def _gradient_rows(
        self,
        kept_by_pass: Sequence[Tensor],
        grads: Sequence[Tensor],
        batch_axes: str | tuple[str, ...] | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns, in a region, the ids' device rows [n] and gradients [n, dim]; for an id that is
        not there, `device_rows` and 0.

        Args:
            batch_axes: the axes over which a device's examples are cut out of the batch; None: it
                gets all examples.
        """
        all_rows = []
        all_gradients = []
        for array_rows, gradient in zip(kept_by_pass, grads, strict=True):
            spec = (batch_axes, None, None)
            gradient = self.devices.enter(self.devices.shard(gradient, spec), spec)
            rows = self.devices.enter(self.devices.shard(array_rows, spec[:2]), spec[:2])
            is_row = self._is_row(rows)
            gradient = gradient_of_ids(gradient, self.lookups)
            gradient = torch.where(is_row[..., None], gradient, torch.zeros_like(gradient))
            rows = torch.where(is_row, rows, torch.full_like(rows, self.device_rows))
            all_rows.append(rows.reshape(-1))
            all_gradients.append(gradient.reshape(-1, self.dim))
        return torch.cat(all_rows), torch.cat(all_gradients)

    def _is_row(self, rows: Tensor) -> Tensor:
        """Returns which of these are rows: False where a bag has no id, and for an id beyond the
        array, which `check_ids` would have refused."""
        return (rows >= 0) & (rows < self.device_rows)
