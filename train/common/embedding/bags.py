"""Embedding tables sharded over the devices of the mesh, updated in time and memory of the rows that a step touches.

    embeddings = ShardedEmbeddingBags(tables, dim=128, mesh=mesh, optimizer=RowWiseAdagrad(), lr=0.01, seed=0)
    pooled = embeddings(ids)            # [batch, tables, dim], a leaf of the autograd graph
    loss(model(pooled)).backward()
    embeddings.step()                   # inside the compiled step, beside optimizer.step()

The plain way (nn.EmbeddingBag, a sharding annotation, autograd) is not used: nn.EmbeddingBag runs on the host, and the
gradient of nn.Embedding is as large as the table, as is the optimizer's pass over it. Here lookups are outside of
autograd. `step` takes the ids of the forward pass and the gradient of the pooled output, adds up the gradients of equal
ids (sort, segment ids, index_add: static shapes), and changes those rows only.

Tables of one plan lie in one array [rows, dim] (arrays.py, sharding.py; regions.py looks up and updates its rows):

    exchange  rows spread evenly        distinct ids and their rows exchanged all-to-all, see exchange.py
    row       rows cut in equal parts   ids all-gathered, masked local lookup, pooled rows reduce-scattered
    table     each table on one device  ids and pooled rows exchanged all-to-all; so lookups are distributed, too
    column    columns in equal parts    ids all-gathered, local lookup, pooled rows all-to-all
    data      a copy on every device    local lookup; the gradient is all-reduced, or all-gathered when it is sparse

`auto` chooses a plan for each table (see `place_tables`). With `model_devices` the mesh is 2-D, data x model: tables
are sharded over groups of that many devices, and every group has a copy.

Four rules keep XLA from copying a whole table in each step (torch_xla 2.9, CPU and TPU compilers):
1. Write back with `array.copy_(leave(local.index_add(...)))`, so that input and output share their memory.
2. Let no tensor of the per-device region live at the end of the step: it would become an output, and a copy.
3. After an index_add into a state, read the state from its result only.
4. Give every array a size in bytes of its own (`_distinct_rows` pads): XLA pairs inputs with outputs by size alone, and
   arrays of one size can be paired crosswise.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from train.common import device
from train.common.embedding import exchange, pieces, regions
from train.common.embedding.arrays import TableArray
from train.common.embedding.one_device import OneDevice
from train.common.embedding.tables import (
    PLANS,
    Optimizer,
    Table,
    check_tables,
    device_bytes_for_tables,
    place_tables,
)
from train.common.mesh import Mesh


class ShardedEmbeddingBags(nn.Module):
    """Embedding tables of one width, sharded over the mesh, with their optimizer.

    Every table starts uniform in +-rows**-0.5 (facebookresearch/dlrm). Each number is a hash of (seed, table, row,
    column): every device computes its own part, and the numbers depend neither on the devices nor on the plan.

    With one table and one id per bag it is an nn.Embedding, such as the vocabulary of a language model:
    `embeddings(ids.reshape(-1, 1)).reshape(batch, length, dim)`.

    Args:
        tables: at least one; names are distinct.
        dim: columns of every table.
        optimizer: SGD, RowWiseAdagrad, Adagrad or LazyAdam.
        lr: learning rate; `device.set_lr(embeddings, lr)` changes it.
        model_devices: devices that share a copy of the tables; 0: all.
        room: factors on the capacities of plan "exchange": the places for ids of a pair of devices, the rows that a
            device updates in a step. 1 is enough for ids that are all distinct, see exchange.py.
        device_bytes: memory of one device for tables and their state; 0: known from the hardware.
    Attributes:
        plan: the Placement: the plan that was chosen for each table.
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
        self.tables, self.dim, self.mesh, self.optimizer = tuple(tables), dim, mesh, optimizer
        parts = model_devices or mesh.num_devices
        check_tables(self.tables, dim, parts)
        self.sharding = _sharding(mesh, parts)
        device_bytes = device_bytes or device_bytes_for_tables(mesh)
        self.plan = place_tables(tables, dim, parts, optimizer, device_bytes, mesh.kind.startswith("TPU"))
        self.param_groups = [{"lr": torch.tensor(lr, dtype=torch.float32).to(mesh.device)}]
        self.step_count = self.sharding.replicated(torch.zeros(()))
        self._pending: list[tuple[list[Tensor | exchange.Route], Tensor | None, Tensor]] = []
        positions = {plan: [t for t, own in enumerate(self.plan.plans) if own == plan] for plan in PLANS}
        self.arrays = [
            TableArray(plan, own, self.tables, dim, self.plan.owners, self.sharding, optimizer, room)
            for plan, own in positions.items()
            if own
        ]
        for array in self.arrays:
            array.allocate(seed)
        self.room = room
        self.load = self.sharding.replicated(torch.zeros(3))  # of all steps, see exchange.add_load
        # Where each table's pooled rows are, after the arrays' have been put side by side.
        order = [t for array in self.arrays for t in array.tables]
        self._order = None if order == sorted(order) else self.sharding.replicated(torch.tensor(np.argsort(order)))
        if any(table.pooling == "mean" for table in tables):
            # 1 for sums, so that they are divided by 1.
            is_mean, lookups = [float(t.pooling == "mean") for t in tables], [float(t.lookups) for t in tables]
            self._is_mean = self.sharding.replicated(torch.tensor(is_mean)[None, :, None])
            self._lookups = self.sharding.replicated(torch.tensor(lookups)[None, :, None])
        device.run_pending()

    def extra_repr(self) -> str:
        return ", ".join(
            f"{table.name}: {table.rows} {plan}" for table, plan in zip(self.tables, self.plan.plans, strict=True)
        )

    def on_device(self) -> dict[str, Tensor]:
        """Returns everything that it holds on the device: tables, optimizer states and what finds the rows."""
        holders = {"": self} | {f"{array.plan}.": array for array in self.arrays}
        held = {prefix + name: value for prefix, holder in holders.items() for name, value in vars(holder).items()}
        held |= {f"{array.plan}.state{i}": state for array in self.arrays for i, state in enumerate(array.states)}
        held["lr"] = self.param_groups[0]["lr"]
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    def forward(self, ids: Tensor, present: Tensor | None = None) -> Tensor:
        """Looks up and pools. Ids are not checked here (see `check_ids`).

        Args:
            ids: [batch, sum of lookups] int32, sharded by the first dimension; the tables' columns side by side.
            present: [batch, sum of lookups], 0 where a bag has no id; None: all bags are full.
        Returns:
            [batch, tables, dim] float32, a leaf: its gradient is what `step` uses.
        """
        with torch.no_grad():
            looked_up, pooled = [], []
            for array in self.arrays:
                row = array.own_columns(ids) + array.offsets
                if present is not None:
                    row = torch.where(array.own_columns(present) > 0, row, torch.full_like(row, -1))
                exchanged = array.plan == "exchange"
                found, kept = exchange.lookup(array, row) if exchanged else (regions.lookup(array, row), row)
                pooled.append(found)
                looked_up.append(kept)
            embedded = pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)
            if self._order is not None:
                embedded = embedded.index_select(1, self._order)
            divisor = self._divisor(present)
            if divisor is not None:
                embedded = embedded / divisor
            embedded = self.sharding.shard(embedded, (self.sharding.batch_axes, None, None))
        if not torch.is_grad_enabled():
            for load in [kept.load for kept in looked_up if isinstance(kept, exchange.Route)]:
                exchange.add_load(self.load, [load], self.sharding)
            return embedded
        embedded = embedded.detach().requires_grad_()
        self._pending.append((looked_up, divisor, embedded))
        return embedded

    def _divisor(self, present: Tensor | None) -> Tensor | None:
        """Returns [batch or 1, tables, 1]: ids in the bag for mean pooling (1 for an empty one), 1 for sums."""
        if all(table.pooling == "sum" for table in self.tables):
            return None
        counts = self._lookups
        if present is not None:
            bags = torch.split((present > 0).float(), [table.lookups for table in self.tables], dim=1)
            counts = torch.stack([bag.sum(1) for bag in bags], 1)[..., None].clamp(min=1)
        return torch.where(self._is_mean > 0, counts, torch.ones_like(counts))

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """Updates the rows that the forward passes since the last step have read, with the gradients of their outputs.

        Returns:
            With plan "exchange", for the metrics of the step and for `check`: "dropped", the ids so far that found no
            place, and the shares of the places that the fullest pair of devices ("pair_load") and of the updates that
            the fullest device ("update_load") had in this step. Otherwise nothing.
        Raises:
            RuntimeError: there was no forward pass, or one of their outputs has no gradient.
        """
        pending, self._pending = self._pending, []
        if not pending or any(embedded.grad is None for _, _, embedded in pending):
            raise RuntimeError("embeddings.step() needs a forward pass and a backward pass that reaches its output")
        self.step_count += 1
        grads = [embedded.grad if divisor is None else embedded.grad / divisor for _, divisor, embedded in pending]
        metrics = {}
        for a, array in enumerate(self.arrays):
            looked_up = [kept[a] for kept, _, _ in pending]
            own_grads = grads if len(self.arrays) == 1 else [grad.index_select(1, array.positions) for grad in grads]
            options = own_grads, self.optimizer, self.param_groups[0]["lr"], self.step_count
            if array.plan == "exchange":
                metrics = exchange.add_load(self.load, exchange.update(array, looked_up, *options), self.sharding)
            else:
                regions.update(array, looked_up, *options)
        return metrics

    def check(self, dropped: Tensor | None = None) -> None:
        """Raises InputError where ids found no place in the exchange, so that their rows were not trained. Checkpoints
        call it before anything is written; it reads from the device.

        Args:
            dropped: of a step's metrics, if 0 is enough to know; None: the count so far.
        """
        if "exchange" in self.plan.plans:
            load = device.read([self.load if dropped is None else dropped])[0].reshape(-1)
            if load[0] > 0:
                exchange.check_load(device.read([self.load])[0].tolist(), self.room)

    def pieces(self) -> dict[str, Tensor]:
        """Copies this host's share of tables and optimizer state to its memory, see `pieces.copy_pieces`."""
        return pieces.copy_pieces(self)

    def load_pieces(self, shapes: dict[str, Sequence[int]], read: Callable[[str], Tensor]) -> None:
        """Fills the tables and their optimizer state, see `pieces.load_pieces`."""
        pieces.load_pieces(self, shapes, read)


def _sharding(mesh: Mesh, parts: int) -> OneDevice:
    if not mesh.compiles:
        return OneDevice(mesh, parts)
    from train.common.embedding.sharding import Sharding

    return Sharding(mesh, parts)
