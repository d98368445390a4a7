"""Embedding tables sharded over the devices of the mesh. An update takes time and memory only for
the rows that the step touches.

    rule = RowWiseAdagrad()
    embeddings = ShardedEmbeddingBags(tables, dim=128, mesh=mesh, optimizer=rule, lr=0.01, seed=0)
    pooled = embeddings(ids)            # [batch, tables, dim], a leaf of the autograd graph
    loss(model(pooled)).backward()
    embeddings.step()                   # inside the compiled step, beside optimizer.step()

The usual way (nn.EmbeddingBag, a sharding annotation, autograd) would not do: nn.EmbeddingBag runs
on the host, and the gradient of nn.Embedding is as large as the table, as is the optimizer's pass
over it. Here lookups are outside of autograd. `step` takes the ids of the forward pass and the
gradient of the pooled output, adds up the gradients of equal ids (sort, segment ids, index_add:
static shapes), and changes those rows only.

A plan says where the rows of a table lie. All tables of one plan lie in one array (plan.py). There
are two plans, each with a class of its arrays:

    exchange.py  rows spread over the devices: a device asks the owners of its ids for their rows
    copied.py    a copy on every device: each looks up its own ids, gradients are sent to all

`auto` chooses a plan for each table (memory.py). With `model_devices` the mesh is 2-D, data x
model: tables are shared by groups of that many devices, and every group has a copy.

Four rules keep XLA from copying a whole table in each step (torch_xla 2.9, CPU and TPU compilers):
1. Write back with `tensor.copy_(leave(part.index_add(...)))`, so that input and output share their
   memory (`TableArray._leave_tensors`).
2. Let no tensor of the per-device region live at the end of the step: it would become an output,
   and a copy.
3. After an index_add into a state, read the state from its result only (optimizers.py).
4. Give every weight and state a size in bytes of its own (`plan._rows_with_own_size` pads): XLA
   pairs inputs with outputs by size alone, and tensors of one size can be paired crosswise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from errors import InputError
from train.common import device
from train.common.embedding import exchange, pieces
from train.common.embedding.devices import OneDevice, TableDevices
from train.common.embedding.memory import (
    ARRAYS,
    choose_plans,
    device_bytes_for_tables,
    devices_of_a_copy,
)
from train.common.embedding.optimizers import Optimizer
from train.common.embedding.plan import TableArray
from train.common.embedding.tables import Table, check_tables
from train.common.mesh import Mesh


@dataclass
class ForwardPass:
    """What `step` needs of a forward pass.

    Attributes:
        kept_by_array: of each array's lookup, what it has returned beside its sums.
        divisor: of mean pooling, see `_divisor`.
        embedded: the output, whose gradient the backward pass sets.
    """

    kept_by_array: list[Any]
    divisor: Tensor | None
    embedded: Tensor


class ShardedEmbeddingBags(nn.Module):
    """Embedding tables of one width, sharded over the mesh, with their optimizer.

    Every table starts uniform in +-rows**-0.5 (facebookresearch/dlrm). Each number is a hash of
    (seed, table, row, column): every device computes its own part, and the numbers depend neither
    on the devices nor on the plan.

    With one table and one id per bag it is an nn.Embedding, such as the vocabulary of a language
    model: `embeddings(ids.reshape(-1, 1)).reshape(batch, length, dim)`.

    Args:
        tables: at least one; names are distinct.
        dim: columns of every table.
        optimizer: SGD, RowWiseAdagrad, Adagrad or LazyAdam.
        lr: learning rate; `device.set_lr(embeddings, lr)` changes it.
        model_devices: devices that share a copy of the tables; 0: all, but on two slices see
            `memory.devices_of_a_copy`.
        room: capacity factors of plan "exchange": of the slots for the ids of a pair of devices,
            and of the rows that a device updates in a step. 1 is enough for ids that are all
            distinct, see exchange.py.
        device_bytes: memory of one device for tables and their state; 0: known from the hardware.
    Attributes:
        plans: the name of each table's plan.
        arrays: one for each plan that has tables.
        slot_load: on the devices, of all steps and evaluations, see exchange.add_load.
        param_groups: [{"lr": tensor}], as torch's optimizers have it.
    Raises:
        InputError: a table is not possible, or they do not fit.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        dim: int,
        mesh: Mesh,
        optimizer: Optimizer,
        lr: float,
        seed: int,
        model_devices: int = 0,
        room: tuple[float, float] = (1.0, 1.0),
        device_bytes: float = 0,
    ):
        super().__init__()
        self.tables = tuple(tables)
        self.dim = dim
        self.mesh = mesh
        self.optimizer = optimizer
        self.room = room
        check_tables(self.tables)
        device_bytes = device_bytes or device_bytes_for_tables(mesh)
        group_size = model_devices
        if not group_size:
            group_size = devices_of_a_copy(self.tables, dim, mesh, optimizer, device_bytes)
        self.devices = _table_devices(mesh, group_size)
        self.plans = choose_plans(self.tables, dim, group_size, optimizer, device_bytes)
        self.param_groups = [{"lr": torch.tensor(lr, dtype=torch.float32).to(mesh.device)}]
        self.step_count = self.devices.replicated(torch.zeros(()))
        self._forward_passes: list[ForwardPass] = []  # since the last step

        self.arrays: list[TableArray] = []
        for name, array_class in ARRAYS.items():
            indices = [index for index, plan in enumerate(self.plans) if plan == name]
            if indices:
                array = array_class(indices, self.tables, dim, self.devices, optimizer, room)
                self.arrays.append(array)
        for array in self.arrays:
            array.allocate(seed)
        self.slot_load = self.devices.replicated(torch.zeros(3))

        # The arrays' pooled rows are put side by side, and then into the tables' order: for each
        # table, its place side by side. None where that is the tables' order already.
        side_by_side = []
        for array in self.arrays:
            side_by_side += array.table_indices
        self._order = None
        if side_by_side != sorted(side_by_side):
            self._order = self.devices.replicated(torch.tensor(np.argsort(side_by_side)))

        if self._has_means():
            is_mean = torch.tensor([float(table.pooling == "mean") for table in tables])
            lookups = torch.tensor([float(table.lookups) for table in tables])
            self._is_mean = self.devices.replicated(is_mean[None, :, None])
            self._lookups = self.devices.replicated(lookups[None, :, None])
        # Computes the initial values: they would be a part of the next program, that of a step.
        device.run_pending()

    def extra_repr(self) -> str:
        described = []
        for table, plan in zip(self.tables, self.plans, strict=True):
            described.append(f"{table.name}: {table.rows} {plan}")
        return ", ".join(described)

    def tables_by_plan(self) -> dict[str, int]:
        """Returns how many tables each plan has."""
        return {array.name: len(array.table_indices) for array in self.arrays}

    def on_device(self) -> dict[str, Tensor]:
        """Returns everything that it holds on the device, by name: tables, optimizer states and
        what finds the rows.

        xla/replay.py asks every module for it, since tables are neither parameters nor buffers.
        """
        held = dict(vars(self))
        for array in self.arrays:
            for name, value in vars(array).items():
                held[f"{array.name}.{name}"] = value
        for array in self.arrays:
            for index, state in enumerate(array.states):
                held[f"{array.name}.state{index}"] = state
        held["lr"] = self.param_groups[0]["lr"]
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    def forward(self, ids: Tensor, present: Tensor | None = None) -> Tensor:
        """Looks up and pools. Ids are not checked here (see `check_ids`).

        Args:
            ids: [batch, sum of lookups] int32, sharded by the first dimension; the tables' columns
                side by side.
            present: [batch, sum of lookups], 0 where a bag has no id; None: all bags are full.
        Returns:
            [batch, tables, dim] float32, a leaf: its gradient is what `step` uses.
        """
        with torch.no_grad():
            pooled, kept_by_array = self._look_up(ids, present)
            embedded = pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)
            if self._order is not None:
                embedded = embedded.index_select(1, self._order)
            divisor = self._divisor(present)
            if divisor is not None:
                embedded = embedded / divisor
            embedded = self.devices.shard(embedded, (self.devices.batch_axes, None, None))

        if not torch.is_grad_enabled():
            self._add_loads(kept_by_array)  # in training `step` adds them
            return embedded
        embedded = embedded.detach().requires_grad_()
        self._forward_passes.append(ForwardPass(kept_by_array, divisor, embedded))
        return embedded

    def _look_up(self, ids: Tensor, present: Tensor | None) -> tuple[list[Tensor], list[Any]]:
        """Returns the results of each array's lookup: sums [batch, its tables, dim], and what its
        update needs."""
        pooled = []
        kept_by_array = []
        for array in self.arrays:
            array_rows = array.own_columns(ids) + array.offsets
            if present is not None:
                is_present = array.own_columns(present) > 0
                array_rows = torch.where(is_present, array_rows, torch.full_like(array_rows, -1))
            of_array, kept = array.lookup(array_rows)
            pooled.append(of_array)
            kept_by_array.append(kept)
        return pooled, kept_by_array

    def _add_loads(self, kept_by_array: list[Any]) -> None:
        """Counts the ids that an evaluation drops: its results would be wrong, see `check`."""
        for array, kept in zip(self.arrays, kept_by_array, strict=True):
            loads = array.slot_loads(kept)
            if loads:
                exchange.add_load(self.slot_load, loads, self.devices)

    def _has_means(self) -> bool:
        return any(table.pooling == "mean" for table in self.tables)

    def _divisor(self, present: Tensor | None) -> Tensor | None:
        """Returns what pooled sums are divided by, [batch or 1, tables, 1].

        For mean pooling that is the number of ids in the bag, 1 for an empty one; for sums 1. None
        where no table has means.
        """
        if not self._has_means():
            return None
        counts = self._lookups
        if present is not None:
            lookups = [table.lookups for table in self.tables]
            bags = torch.split((present > 0).float(), lookups, dim=1)
            counts = torch.stack([bag.sum(1) for bag in bags], 1)[..., None]
            counts = counts.clamp(min=1)
        return torch.where(self._is_mean > 0, counts, torch.ones_like(counts))

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """Updates the rows that the forward passes since the last step have read.

        It takes the gradients of their outputs.

        Returns:
            With plan "exchange", for the metrics of the step and for `check`:

                dropped      ids that have found no slot, in all steps so far
                pair_load    of this step: slots that the fullest pair of devices needed / slots
                             that it has; above 1 ids were dropped
                update_load  of this step: rows to update on the fullest device / rows that it has
                             room for; above 1 some were dropped

            Otherwise nothing.
        Raises:
            RuntimeError: there was no forward pass, or one of their outputs has no gradient.
        """
        passes = self._forward_passes
        self._forward_passes = []
        if not passes or any(forward_pass.embedded.grad is None for forward_pass in passes):
            raise RuntimeError(
                "embeddings.step() needs a forward pass and a backward pass that reaches its output"
            )

        self.step_count += 1
        gradients = []
        for forward_pass in passes:
            gradient = self.devices.gradient_of_batch(forward_pass.embedded.grad)
            if forward_pass.divisor is not None:
                gradient = gradient / forward_pass.divisor
            gradients.append(gradient)

        lr = self.param_groups[0]["lr"]
        metrics = {}
        for index, array in enumerate(self.arrays):
            kept_by_pass = [forward_pass.kept_by_array[index] for forward_pass in passes]
            own_gradients = gradients
            if len(self.arrays) > 1:
                own_gradients = []
                for gradient in gradients:
                    own_gradients.append(gradient.index_select(1, array.positions))
            loads = array.update(kept_by_pass, own_gradients, lr, self.step_count)
            if loads:  # of one array at most, that of plan "exchange"
                metrics = exchange.add_load(self.slot_load, loads, self.devices)
        return metrics

    def check(self, dropped: Tensor | None = None) -> None:
        """Raises InputError where ids found no slot in the exchange, so that their rows were not
        trained.

        Checkpoints call it before anything is written. It reads from the device.

        Args:
            dropped: of a step's metrics: checks that step and those before it, which are computed
                already. None: checks all steps, and waits for the last one.
        """
        if not any(array.may_drop for array in self.arrays):
            return

        # The first number of `slot_load` is the count; `dropped` is the count alone.
        known = self.slot_load if dropped is None else dropped
        count = device.read([known])[0].reshape(-1)[0]
        if count > 0:
            load = device.read([self.slot_load])[0].tolist()
            exchange.check_load(load, self.room)

    def pieces(self) -> dict[str, Tensor]:
        """Copies this host's pieces of tables and optimizer state to its memory, see
        `pieces.copy_pieces`."""
        return pieces.copy_pieces(self)

    def load_pieces(self, shapes: dict[str, Sequence[int]], read: Callable[[str], Tensor]) -> None:
        """Fills the tables and their optimizer state, see `pieces.load_pieces`."""
        pieces.load_pieces(self, shapes, read)


def _table_devices(mesh: Mesh, group_size: int) -> TableDevices:
    """Returns the devices of a mesh, in groups that each share a copy of the tables.

    Raises:
        InputError: the groups do not make up all devices.
    """
    if group_size < 1 or mesh.num_devices % group_size:
        raise InputError(
            f"model_devices is {group_size}; "
            f"it must divide the {mesh.num_devices} devices, 0 takes all"
        )
    if not mesh.compiles:
        if mesh.process_count == 1:
            return OneDevice(mesh, group_size)
        from train.common.embedding.process_devices import ProcessDevices

        return ProcessDevices(mesh, group_size)
    from train.common.embedding.xla_devices import XlaDevices

    return XlaDevices(mesh, group_size)
