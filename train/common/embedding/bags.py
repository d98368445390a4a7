"""Embedding tables sharded over the devices of the mesh, updated in time and memory of the rows that a step touches.

    embeddings = ShardedEmbeddingBags(tables, dim=128, mesh=mesh, optimizer=RowWiseAdagrad(), lr=0.01, seed=0)
    pooled = embeddings(ids)            # [batch, tables, dim], a leaf of the autograd graph
    loss(model(pooled)).backward()
    embeddings.step()                   # inside the compiled step, beside optimizer.step()

The plain way (nn.EmbeddingBag, a sharding annotation, autograd) is not used: nn.EmbeddingBag runs on the host, and the
gradient of nn.Embedding is as large as the table, as is the optimizer's pass over it. Here lookups are outside of
autograd; `step` takes the ids of the forward pass and the gradient of the pooled output, adds up the gradients of equal
ids (sort, segment ids, index_add: static shapes), and changes those rows alone.

Tables of one plan lie in one array [rows, dim]:

    row     rows cut in equal parts      ids all-gathered, masked local lookup, pooled rows reduce-scattered
    table   each table on one device     ids and pooled rows exchanged all-to-all; lookups are shared out, too
    column  columns cut in equal parts   ids all-gathered, local lookup, pooled rows all-to-all
    data    a copy on every device       local lookup; the gradient is all-reduced, or all-gathered when it is sparse

`auto` chooses a plan for each table (see `plan_tables`). With `model_devices` the mesh is 2-D, data x model: tables are
sharded over groups of that many devices, and every group has a copy.

Four rules keep XLA from copying a whole table in each step (torch_xla 2.9, CPU and TPU compilers):
1. write back with `array.copy_(leave(local.index_add(...)))`, so that input and output share their memory;
2. let no tensor of the per-device region live at the end of the step: it would become an output, and a copy;
3. after an index_add into a state, read the state from its result only;
4. give every array a size in bytes of its own (`_distinct_rows` pads): XLA pairs inputs with outputs by size alone, and
   arrays of one size can be paired crosswise.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor, nn

from errors import InputError
from train.common.device import Mesh, annotate
from train.common.embedding.hashing import hash32, shift_right
from train.common.embedding.tables import (
    LANES,
    PLANS,
    Optimizer,
    Table,
    device_bytes_for_tables,
    plan_tables,
    rows_in_a_line,
    take_rows,
)

# ---- arrays of tables ------------------------------------------------------------------------------------------------

MANUAL = torch_xla._XLAC.OpSharding([], [], [], xs.ShardingType.MANUAL)
_sizes: dict[int, int] = {}  # bytes a device -> how many live arrays have that size: at most one


def _distinct_rows(rows: int, bytes_a_row: int, owner: object, pack: int = 1) -> int:
    """The next multiple of 8 lines (a TPU's tile) of `pack` rows that makes an array of a size in bytes that no live
    one has."""
    rows = -(-rows // (8 * pack)) * 8 * pack
    while _sizes.get(rows * bytes_a_row):
        rows += 8 * pack
    _sizes[rows * bytes_a_row] = 1
    weakref.finalize(owner, _sizes.pop, rows * bytes_a_row, None)
    return rows


class _Array:
    """The tables of one plan: one array [rows, dim] on the device, its optimizer states, and the way to its rows.

    Attributes:
        tables: their positions among all tables; in the order in which this array pools them.
        start: first row of each table in the array.
        local_rows: rows that one device holds.
        pack: how many of them lie side by side in a line of the array, see tables.py.
    """

    def __init__(self, plan: str, positions: list[int], module: "ShardedEmbeddingBags", owners: Sequence[int]):
        self.plan, self.tables = plan, positions
        self.axis, self.parts, self.dim = module.axis, module.parts, module.dim
        every = module.tables
        sizes = [every[t].rows for t in positions]
        self.lookups = [every[t].lookups for t in positions]
        firsts = np.cumsum([0] + [table.lookups for table in every])
        self.columns = [c for t in positions for c in range(firsts[t], firsts[t + 1])]  # of the ids that come in
        by_row, by_column = plan in ("row", "table"), plan == "column"
        self.spec = (self.axis if by_row else None, self.axis if by_column else None)
        self.local_dim = self.dim // self.parts if by_column else self.dim
        self.pack = rows_in_a_line(self.local_dim, module.lanes)
        self.width = self.pack * self.local_dim * (self.parts if by_column else 1)

        if plan == "table":
            own = [[k for k, t in enumerate(positions) if owners[t] == d] for d in range(self.parts)]
            own = [sorted(tables, key=lambda k: -self.lookups[k]) for tables in own]
            rows = max(sum(sizes[k] for k in tables) for tables in own)
        else:
            rows = -(-sum(sizes) // self.parts) if plan == "row" else sum(sizes)
        self.used_rows = rows  # of local_rows, on the fullest device
        self.local_rows = _distinct_rows(rows, 4 * self.local_dim, self, self.pack)
        self.rows = self.local_rows * (self.parts if by_row else 1)
        if self.rows >= 2**31:
            raise InputError(f"tables of plan {plan!r} have {self.rows:,} rows together; ids have 32 bits")
        if plan == "table":
            self.start = [0] * len(positions)
            for d, tables in enumerate(own):
                for k, before in zip(tables, np.cumsum([0] + [sizes[k] for k in tables]), strict=False):
                    self.start[k] = d * self.local_rows + int(before)
            self._make_slots(own)
        else:
            self.start = [int(x) for x in np.cumsum([0, *sizes[:-1]])]

        self.state_kinds = list(module.optimizer.states.values())
        self.state_specs = [self.spec if kind == "full" else (self.spec[0],) for kind in self.state_kinds]
        self.state_rows = [
            (self.parts if by_row else 1)
            * (
                _distinct_rows(self.local_rows, 4 * self.local_dim, self, self.pack)
                if kind == "full"
                else _distinct_rows(self.local_rows, 4, self)
            )
            for kind in self.state_kinds
        ]

    def _make_slots(self, own: list[list[int]]) -> None:
        """One program runs on all devices, so each has the same number of places for ids: slot k of every device is as
        wide as the widest of their k-th tables (which are sorted by width)."""
        slots = max(len(tables) for tables in own)
        self.slots = [max(self.lookups[tables[k]] for tables in own if k < len(tables)) for k in range(slots)]
        first = np.cumsum([0, *self.lookups])
        padding = int(first[-1])  # the column after the last
        places = []
        for tables in own:
            for k, width in enumerate(self.slots):
                columns = list(range(first[tables[k]], first[tables[k] + 1])) if k < len(tables) else []
                places += columns + [padding] * (width - len(columns))
        self.places = torch.tensor(places)
        order = {k: d * slots + slot for d, tables in enumerate(own) for slot, k in enumerate(tables)}
        self.from_slots = torch.tensor([order[k] for k in range(len(self.tables))])
        slot_tables = [(tables[k] if k < len(tables) else 0) for tables in own for k in range(slots)]
        self.to_slots = torch.tensor(slot_tables)


class ShardedEmbeddingBags(nn.Module):
    """Embedding tables of one width, sharded over the mesh, with their optimizer.

    Every table starts uniform in +-rows**-0.5 (facebookresearch/dlrm), each number by a hash of (seed, table, row,
    column): every device makes its own part, and the numbers depend neither on the devices nor on the plan.

    With one table and one id a bag it is an nn.Embedding, such as the vocabulary of a language model:
    `embeddings(ids.reshape(-1, 1)).reshape(batch, length, dim)`.

    Args:
        tables: at least one; names are distinct.
        dim: columns of every table.
        optimizer: SGD, RowWiseAdagrad, Adagrad or LazyAdam.
        lr: learning rate; `device.set_lr(embeddings, lr)` changes it.
        model_devices: devices that share a copy of the tables; 0: all.
        device_bytes: memory of one device for tables and their state; 0: known from the hardware.
    Attributes:
        plan: what was chosen for each table.
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
        device_bytes: float = 0,
    ):
        super().__init__()
        self.tables, self.dim, self.mesh, self.optimizer = tuple(tables), dim, mesh, optimizer
        devices = mesh.num_devices
        self.parts = model_devices or devices
        self.lanes = LANES if mesh.kind.startswith("TPU") else 1
        self._check()
        self.axis = "model"
        ids = np.arange(devices)
        if self.parts == devices:
            self.spmd, self.batch_axes, self.copies_axis = xs.Mesh(ids, (devices,), ("model",)), "model", None
        else:
            # The same devices in the same order: a batch that the loader has sharded over "data" is one over both.
            self.spmd = xs.Mesh(ids, (devices // self.parts, self.parts), ("data", "model"))
            self.batch_axes, self.copies_axis = ("data", "model"), "data"
        self.groups = ids.reshape(-1, self.parts).tolist()
        self.plan = plan_tables(tables, dim, self.parts, optimizer, device_bytes or device_bytes_for_tables(mesh))
        self.param_groups = [{"lr": torch.tensor(lr, dtype=torch.float32).to(mesh.device)}]
        self.step_count = self._replicated(torch.zeros(()))
        self._shardings: dict[tuple, Any] = {}  # partition spec -> what torch_xla makes of it
        self._pending: list[tuple[list[Tensor], Tensor | None, Tensor]] = []

        self.arrays = [
            _Array(plan, [t for t, other in enumerate(self.plan.plans) if other == plan], self, self.plan.owners)
            for plan in PLANS
            if plan in self.plan.plans
        ]
        for array in self.arrays:
            offsets = np.repeat(array.start, array.lookups).astype(np.int32)
            array.offsets = self._replicated(torch.from_numpy(offsets))
            array.positions = self._replicated(torch.tensor(array.tables))
            array.device_index = torch.arange(self.parts, dtype=torch.int32).to(mesh.device)
            annotate(array.device_index, self.spmd, (self.axis,))
            for name in ("places", "from_slots", "to_slots") if array.plan == "table" else ():
                setattr(array, name, self._replicated(getattr(array, name)))
            array.weight = self._initial(array, seed)
            array.states = []
            for kind, rows, spec in zip(array.state_kinds, array.state_rows, array.state_specs, strict=True):
                shape = (rows // array.pack, array.width) if kind == "full" else (rows,)
                state = torch.zeros(shape, device=mesh.device)
                annotate(state, self.spmd, spec)
                array.states.append(state)
        # Where each table's pooled rows are, after the arrays' have been put side by side.
        order = [t for array in self.arrays for t in array.tables]
        self._order = None if order == sorted(order) else self._replicated(torch.tensor(np.argsort(order)))
        if any(table.pooling == "mean" for table in tables):
            # 1 for sums, so that they are divided by 1.
            self._is_mean = self._replicated(torch.tensor([float(t.pooling == "mean") for t in tables])[None, :, None])
            self._lookups = self._replicated(torch.tensor([float(t.lookups) for t in tables])[None, :, None])
        torch_xla.sync()

    def _check(self) -> None:
        names = [table.name for table in self.tables]
        if not names:
            raise InputError("there are no tables")
        for table in self.tables:
            if table.rows < 1 or table.lookups < 1:
                raise InputError(
                    f"table {table.name!r} has {table.rows} rows, {table.lookups} lookups; each is at least 1"
                )
            if names.count(table.name) > 1 or "/" in table.name:
                raise InputError(f"the name {table.name!r} of a table is not its own, or has a slash")
            if table.plan not in ("auto", *PLANS):
                raise InputError(f"table {table.name!r} has the plan {table.plan!r}; it is auto or {', '.join(PLANS)}")
            if table.pooling not in ("sum", "mean"):
                raise InputError(f"table {table.name!r} has the pooling {table.pooling!r}; it is sum or mean")
            if table.plan == "column" and self.dim % self.parts:
                raise InputError(f"table {table.name!r}: {self.dim} columns do not divide by {self.parts} devices")
        if self.parts < 1 or self.mesh.num_devices % self.parts:
            raise InputError(f"model_devices is {self.parts}; it must divide the {self.mesh.num_devices} devices")

    def extra_repr(self) -> str:
        return ", ".join(
            f"{table.name}: {table.rows} {plan}" for table, plan in zip(self.tables, self.plan.plans, strict=True)
        )

    # ---- initial weights ----

    def _annotate(self, tensor: Tensor) -> None:
        annotate(tensor, self.mesh.spmd, (None,) * tensor.dim())

    def _replicated(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.mesh.device)
        self._annotate(tensor)
        return tensor

    def _initial(self, array: _Array, seed: int) -> Tensor:
        row = torch.arange(array.rows, dtype=torch.int32, device=self.mesh.device)
        own_row, bound, salt = torch.zeros_like(row), torch.zeros_like(row, dtype=torch.float32), torch.zeros_like(row)
        for start, t in zip(array.start, array.tables, strict=True):
            inside = (row >= start) & (row < start + self.tables[t].rows)
            own_row = torch.where(inside, row - start, own_row)
            bound = torch.where(inside, self.tables[t].rows ** -0.5, bound)
            salt = torch.where(
                inside, int(np.random.SeedSequence((seed, t)).generate_state(1)[0].astype(np.int32)), salt
            )
        # Each line has `pack` rows; a device's part of its columns has all of them.
        column = torch.arange(array.width, dtype=torch.int32, device=self.mesh.device)
        part = torch.div(column, array.pack * array.local_dim, rounding_mode="trunc")
        column = part * array.local_dim + column % array.local_dim

        def by_line(x: Tensor) -> Tensor:
            """[rows] -> [lines, width] (or [rows, 1])."""
            if array.pack == 1:
                return x[:, None]
            x = x.reshape(-1, 1, array.pack, 1).expand(-1, array.width // array.pack // array.local_dim, -1, 1)
            return x.expand(-1, -1, -1, array.local_dim).reshape(-1, array.width)

        bits = hash32(by_line(hash32(own_row ^ salt)) + (column * 0x01000193)[None])
        # 24 bits, the mantissa of float32: -1, ..., 1 - 2**-23, times the bound.
        weight = (shift_right(bits, 8).float() * 2.0**-23 - 1) * by_line(bound)
        annotate(weight, self.spmd, array.spec)
        return weight

    def on_device(self) -> dict[str, Tensor]:
        """Everything that it holds on the device: tables, optimizer states and what finds the rows."""
        holders = {"": self} | {f"{array.plan}.": array for array in self.arrays}
        held = {prefix + name: value for prefix, holder in holders.items() for name, value in vars(holder).items()}
        held |= {f"{array.plan}.state{i}": state for array in self.arrays for i, state in enumerate(array.states)}
        held["lr"] = self.param_groups[0]["lr"]
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    # ---- per-device regions: the only collectives that are right in there (xm.all_reduce silently is not) ----

    def _sharding(self, spec: tuple) -> Any:
        if spec not in self._shardings:
            self._shardings[spec] = self.spmd.get_op_sharding(spec)
        return self._shardings[spec]

    def _mark(self, tensor: Tensor, spec: tuple) -> None:
        """What xs.mark_sharding does, without its search for two packages, which is a third of a step's tracing."""
        torch_xla._XLAC._xla_mark_sharding(tensor, self._sharding(spec))

    def _enter(self, tensor: Tensor, spec: tuple) -> Tensor:
        """The part of a sharded tensor that each device has, as a tensor of a per-device program."""
        self._mark(tensor, spec)
        return torch_xla._XLAC._spmd_full_to_shard_shape(tensor)

    def _leave(self, tensor: Tensor, spec: tuple, shape: Sequence[int]) -> Tensor:
        """The tensor of `shape` that the devices' parts make up."""
        torch_xla._XLAC._mark_manual_sharding(tensor, MANUAL)
        return torch_xla._XLAC._spmd_shard_to_full_shape(tensor, self._sharding(spec), tuple(shape), tensor.dtype)

    def _shard(self, tensor: Tensor, spec: tuple) -> Tensor:
        """The same values under another sharding, outside of a region: all-gather, all-to-all or a local slice."""
        tensor = tensor * 1 if tensor.is_floating_point() else tensor + 0
        self._mark(tensor, spec)
        return tensor

    def _all_reduce(self, tensor: Tensor, groups: list[list[int]]) -> Tensor:
        return torch_xla._XLAC._xla_spmd_all_reduce(xm.REDUCE_SUM, tensor, 1.0, groups)

    def _reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Over the model axis, along dimension 0."""
        return torch_xla._XLAC._xla_spmd_reduce_scatter(xm.REDUCE_SUM, tensor, 1.0, 0, self.parts, self.groups)

    def _local(self, array: _Array, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inside a region: (rows of the whole array -> rows of this device's part, whether they are there)."""
        if array.plan in ("row", "table"):
            rows = rows - self._enter(array.device_index, (self.axis,)) * array.local_rows
        return rows, (rows >= 0) & (rows < array.local_rows)

    # ---- lookup ----

    def forward(self, ids: Tensor, present: Tensor | None = None) -> Tensor:
        """Looks up and pools. Ids are not checked here (see `check_ids`).

        Args:
            ids: [batch, sum of lookups] int32, sharded by the first dimension; the tables' columns side by side.
            present: [batch, sum of lookups], 0 where a bag has no id; None: all bags are full.
        Returns:
            [batch, tables, dim] float32, a leaf: its gradient is what `step` uses.
        """
        with torch.no_grad():
            rows, pooled = [], []
            for array in self.arrays:
                row = self._columns(array, ids) + array.offsets
                if present is not None:
                    row = torch.where(self._columns(array, present) > 0, row, torch.full_like(row, -1))
                rows.append(row)
                pooled.append(self._lookup(array, row))
            embedded = pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)
            if self._order is not None:
                embedded = embedded.index_select(1, self._order)
            divisor = self._divisor(present)
            if divisor is not None:
                embedded = embedded / divisor
            embedded = self._shard(embedded, (self.batch_axes, None, None))
        if not torch.is_grad_enabled():
            return embedded
        embedded = embedded.detach().requires_grad_()
        self._pending.append((rows, divisor, embedded))
        return embedded

    def _divisor(self, present: Tensor | None) -> Tensor | None:
        """[batch or 1, tables, 1]: ids in the bag for mean pooling (1 for an empty one), 1 for sums."""
        if all(table.pooling == "sum" for table in self.tables):
            return None
        counts = self._lookups
        if present is not None:
            bags = torch.split((present > 0).float(), [table.lookups for table in self.tables], dim=1)
            counts = torch.stack([bag.sum(1) for bag in bags], 1)[..., None].clamp(min=1)
        return torch.where(self._is_mean > 0, counts, torch.ones_like(counts))

    def _columns(self, array: _Array, values: Tensor) -> Tensor:
        """The columns of one array's tables, out of all tables'."""
        columns = array.columns
        if len(columns) == values.shape[1]:
            return values
        starts = [0] + [i for i in range(1, len(columns)) if columns[i] != columns[i - 1] + 1] + [len(columns)]
        runs = [(columns[a], columns[b - 1] + 1) for a, b in itertools.pairwise(starts)]
        return torch.cat([values[:, first:end] for first, end in runs], 1)

    def _lookup(self, array: _Array, rows: Tensor) -> Tensor:
        """rows [batch, columns] of the whole array (-1: none) -> pooled [batch, tables of the array, dim]."""
        batch, tables, dim = rows.shape[0], len(array.tables), self.dim
        by_batch = (self.batch_axes, None, None)
        weight = self._enter(array.weight, array.spec)
        if array.plan == "table":
            spec = (self.axis, self.copies_axis, None)
            local, here = self._local(array, self._enter(self._shard(self._in_slots(array, rows), spec), spec))
            part = _pool(weight, local[0], here[0], array.slots, array.local_dim)[None]
            shape = (self.parts, batch, len(array.slots), dim)
            part = self._leave(part, (*spec, None), shape)
            part = self._shard(part, (None, self.batch_axes, None, None))  # all-to-all
            return part.transpose(0, 1).reshape(batch, -1, dim).index_select(1, array.from_slots)
        spec = (self.batch_axes if array.plan == "data" else self.copies_axis, None)
        local, here = self._local(array, self._enter(self._shard(rows, spec), spec))
        part = _pool(weight, local, here, array.lookups, array.local_dim)
        if array.plan == "data":
            return self._leave(part, by_batch, (batch, tables, dim))
        if array.plan == "row":
            return self._leave(self._reduce_scatter(part), by_batch, (batch, tables, dim))
        part = self._leave(part, (self.copies_axis, None, self.axis), (batch, tables, dim))
        return self._shard(part, by_batch)  # all-to-all

    def _in_slots(self, array: _Array, rows: Tensor) -> Tensor:
        """[batch, columns] -> [devices, batch, places of a device], -1 where a place is not used."""
        padded = torch.cat([rows, torch.full_like(rows[:, :1], -1)], 1)
        slots = padded.index_select(1, array.places).reshape(rows.shape[0], self.parts, -1).transpose(0, 1)
        return self._by_device(slots)

    def _by_device(self, tensor: Tensor) -> Tensor:
        """[devices, batch, ...] sharded by the batch -> by the devices (all-to-all), and by the copies' batches."""
        rest = (None,) * (tensor.dim() - 2)
        tensor = self._shard(tensor, (None, self.batch_axes, *rest))
        return self._shard(tensor, (self.axis, self.copies_axis, *rest))

    # ---- update ----

    @torch.no_grad()
    def step(self) -> None:
        """Updates the rows that the forward passes since the last step have read, with the gradients of their outputs.

        Raises:
            RuntimeError: there was no forward pass, or one of their outputs has no gradient.
        """
        pending, self._pending = self._pending, []
        if not pending or any(embedded.grad is None for _, _, embedded in pending):
            raise RuntimeError("embeddings.step() needs a forward pass and a backward pass that reaches its output")
        self.step_count += 1
        grads = [embedded.grad if divisor is None else embedded.grad / divisor for _, divisor, embedded in pending]
        for a, array in enumerate(self.arrays):
            looked_up = [rows[a] for rows, _, _ in pending]
            own_grads = grads if len(self.arrays) == 1 else [grad.index_select(1, array.positions) for grad in grads]
            self._update(array, looked_up, own_grads)

    def _update(self, array: _Array, looked_up: list[Tensor], grads: list[Tensor]) -> None:
        lookups = sum(rows.numel() for rows in looked_up)
        summed = array.plan == "data" and array.used_rows <= lookups
        parts = [self._gradient_rows(array, r, g, summed) for r, g in zip(looked_up, grads, strict=True)]
        rows, g = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        if summed:
            # The whole gradient of small tables, added up over the devices, is less than every example's.
            whole = torch.zeros(array.local_rows + 1, array.local_dim + 1, device=g.device)
            whole = whole.index_add(0, rows, torch.cat([g, torch.ones_like(g[:, :1])], 1))[: array.used_rows]
            whole = self._all_reduce(whole, [list(range(self.mesh.num_devices))])
            rows, g, touched = None, whole[:, :-1], (whole[:, -1:] > 0).float()
        else:
            if self.optimizer.states:  # without a state, equal rows can be added one after the other
                rows, g = _sum_equal_rows(rows, g, array.local_rows)
            used = rows < array.local_rows
            touched = used[:, None].float()
            rows = torch.where(used, rows, torch.zeros_like(rows))  # g is 0 there, and a sum with 0 changes nothing

        def mean_square(g: Tensor) -> Tensor:
            total = (g * g).sum(1)
            return (self._all_reduce(total, self.groups) if array.plan == "column" else total) / self.dim

        arrays, specs = [array.weight, *array.states], [array.spec, *array.state_specs]
        old = [self._enter(tensor, spec) for tensor, spec in zip(arrays, specs, strict=True)]
        if summed:
            shapes = [x.shape for x in old]
            old = [x.reshape(-1, array.local_dim) if x.dim() == 2 else x for x in old]
            old, padding = [x[: array.used_rows] for x in old], [x[array.used_rows :] for x in old]
        lr = self.param_groups[0]["lr"]
        weight, states = self.optimizer.update(old[0], old[1:], rows, g, touched, lr, self.step_count, mean_square)
        new = [weight, *states]
        if summed:
            new = [torch.cat(parts).reshape(shape) for *parts, shape in zip(new, padding, shapes, strict=True)]
        for tensor, local, spec in zip(arrays, new, specs, strict=True):
            tensor.copy_(self._leave(local, spec, tensor.shape))

    def _gradient_rows(self, array: _Array, rows: Tensor, grad: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
        """One forward pass's (local rows [n], gradients [n, local dim]) on each device; a row that is not there is
        local_rows, its gradient 0. Every device gets the whole batch of all copies, except where `summed`."""
        if array.plan == "table":
            spec = (self.axis, None, None)
            grad = grad.index_select(1, array.to_slots).reshape(grad.shape[0], self.parts, -1, self.dim)
            grad = self._by_device(grad.transpose(0, 1))
            grad = self._enter(self._shard(grad, (*spec, None)), (*spec, None))[0]
            local, here = self._local(array, self._enter(self._shard(self._in_slots(array, rows), spec), spec))
            local, here, widths = local[0], here[0], array.slots
        else:
            batch = self.batch_axes if summed else None
            spec = (batch, None, self.axis if array.plan == "column" else None)
            if array.plan == "column" and self.copies_axis:
                grad = self._shard(grad, (self.copies_axis, None, self.axis))  # all-to-all, then the all-gather
            grad = self._enter(self._shard(grad, spec), spec)
            local, here = self._local(array, self._enter(self._shard(rows, (batch, None)), (batch, None)))
            widths = array.lookups
        if max(widths) > 1:
            pieces = [grad[:, k : k + 1].expand(-1, width, -1) for k, width in enumerate(widths)]
            grad = torch.cat(pieces, 1)
        grad = torch.where(here[..., None], grad, torch.zeros_like(grad))
        local = torch.where(here, local, torch.full_like(local, array.local_rows))
        return local.reshape(-1), grad.reshape(-1, grad.shape[-1])

    # ---- checkpoints: tables leave and enter the devices in parts, whatever the plan ----

    def _stored(self) -> Iterator[tuple[_Array, str, Tensor]]:
        """(array, "weight" or the name of a state, tensor) of everything that a checkpoint holds."""
        xm.wait_device_ops()
        for array in self.arrays:
            for name, tensor in zip(["weight", *self.optimizer.states], [array.weight, *array.states], strict=True):
                yield array, name, tensor

    def pieces(self) -> dict[str, Tensor]:
        """Copies this host's share of tables and optimizer state to its memory; no table is put together anywhere.

        Returns:
            "<table>/<weight or state>/<first row>/<first column>" -> [rows, columns], or [rows] for a number a row.
            The pieces of all hosts cover each table once; a row is that of the table, not of its place on the devices.
        """
        pieces = {}
        for array, name, tensor in self._stored():
            shards = torch_xla._XLAC._get_local_shards([tensor])[0]
            places = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])[0]
            for (data, _), (replica, indices) in zip(shards, places, strict=True):
                if replica != 0:
                    continue
                first, last, column = _bounds(array, indices, tensor)
                if tensor.dim() == 2:
                    data = data.reshape(-1, array.local_dim)
                for start, t in zip(array.start, array.tables, strict=True):
                    a, b = max(first, start), min(last, start + self.tables[t].rows)
                    if a < b:
                        key = f"{self.tables[t].name}/{name}/{a - start}/{column}"
                        pieces[key] = data[a - first : b - first]
        if self.mesh.main_process:
            pieces[STEP] = self.step_count.cpu()
        return pieces

    def load_pieces(self, shapes: dict[str, Sequence[int]], read: Callable[[str], Tensor]) -> None:
        """Fills the tables and their optimizer state from pieces that any plan on any devices has made.

        Args:
            shapes: of every piece of all hosts, by name.
            read: gives a piece; called once for each that this host needs.
        Raises:
            InputError: the pieces are not those of these tables and this optimizer.
        """
        expected = {f"{table.name}/{name}" for table in self.tables for name in ("weight", *self.optimizer.states)}
        found: dict[str, list[tuple[int, int, str]]] = {}
        for key in shapes:
            if key != STEP:
                kind, row, column = key.rsplit("/", 2)
                found.setdefault(kind, []).append((int(row), int(column), key))
        if expected != found.keys() or STEP not in shapes:
            differing = sorted(expected ^ found.keys())
            raise InputError(f"its tables or optimizer differ from these in {', '.join(differing[:3]) or STEP}")
        devices = [device for _, device in torch_xla._XLAC._get_local_shards([self.arrays[0].device_index])[0]]
        for array, name, tensor in self._stored():
            places = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])[0]
            bounds = [_bounds(array, indices, tensor) for _, indices in places]
            copied = places[0][1] is Ellipsis
            if copied:
                bounds = bounds[:1]
            local_shape = torch.Size([tensor.shape[0] // (self.parts if array.spec[0] else 1)])
            if tensor.dim() == 2:
                local_shape += (array.pack * array.local_dim,)
            rows_shape = (-1, array.local_dim) if tensor.dim() == 2 else (-1,)
            shards = [torch.zeros(local_shape).reshape(rows_shape) for _ in bounds]
            for start, t in zip(array.start, array.tables, strict=True):
                pieces = found[f"{self.tables[t].name}/{name}"]
                self._fill(shards, bounds, start, self.tables[t], pieces, shapes, read)
            shards = [shard.reshape(local_shape) for shard in shards]
            if copied:
                tensor.copy_(shards[0])
                self._annotate(tensor)
            else:
                torch_xla._XLAC._load_local_shards(tensor, shards, devices)
        self.step_count.copy_(read(STEP))
        self._annotate(self.step_count)

    def _fill(self, shards, bounds, start: int, table: Table, pieces, shapes, read) -> None:
        """Copies the pieces of one table, which starts at row `start` of its array, into the devices' parts."""
        filled = 0
        for row, column, key in pieces:
            rows, columns = (*shapes[key], 1)[:2]
            if row + rows > table.rows or column + columns > self.dim or len(shapes[key]) != shards[0].dim():
                size = [table.rows, self.dim][: shards[0].dim()]
                raise InputError(f"its {key} has the shape {list(shapes[key])}, which is no part of {size}")
            piece = None
            for shard, (first, last, first_column) in zip(shards, bounds, strict=True):
                a, b = max(first, start + row), min(last, start + row + rows)
                shard_columns = 1 if shard.dim() == 1 else shard.shape[1]
                c, d = max(first_column, column), min(first_column + shard_columns, column + columns)
                if a < b and c < d:
                    piece = read(key) if piece is None else piece
                    source, target = piece[a - start - row : b - start - row], shard[a - first : b - first]
                    if shard.dim() == 2:
                        source = source[:, c - column : d - column]
                        target = target[:, c - first_column : d - first_column]
                    target.copy_(source)
                    filled += target.numel()
        spans = [max(0, min(last, start + table.rows) - max(first, start)) for first, last, _ in bounds]
        if filled != sum(spans) * shards[0][:1].numel():
            raise InputError(f"its pieces of table {table.name!r} do not make up {table.rows} rows")


STEP = "step"  # the piece that counts the updates


def _bounds(array: _Array, indices: Any, tensor: Tensor) -> tuple[int, int, int]:
    """(first row, end of rows, first column) of a device's part, in rows of the array's weight: a state has more of
    them on each device."""
    if indices is Ellipsis:
        return 0, array.local_rows, 0
    first, last, column = indices[0].start, indices[0].stop, 0
    if tensor.dim() == 2:
        column = indices[1].start // array.pack
    if array.spec[0]:
        return first // (last - first) * array.local_rows, (first // (last - first) + 1) * array.local_rows, column
    return 0, array.local_rows, column


def _pool(weight: Tensor, rows: Tensor, here: Tensor, widths: list[int], dim: int) -> Tensor:
    """rows, here [batch, sum of widths] -> sums over each table's columns [batch, len(widths), dim]."""
    safe = torch.where(here, rows, torch.zeros_like(rows))
    found = take_rows(weight, safe.reshape(-1), dim).reshape(*rows.shape, dim)
    found = torch.where(here[..., None], found, torch.zeros_like(found))
    if max(widths) == 1:
        return found
    return torch.stack([part.sum(1) for part in torch.split(found, widths, dim=1)], 1)


def _sum_equal_rows(rows: Tensor, g: Tensor, unused: int) -> tuple[Tensor, Tensor]:
    """Adds up the gradients of equal rows, in static shapes: (distinct rows [n], `unused` in the places left over;
    sums [n, dim], 0 there).

    The distinct rows come out of a second sort: scattering numbers one by one is quadratic in n with the TPU's compiler
    (57 of the 58 million cycles of a step that looks up 53,000 ids; libtpu 0.0.51's estimate).
    """
    ordered, permutation = torch.sort(rows)
    first = torch.cat([torch.ones_like(ordered[:1], dtype=torch.bool), ordered[1:] != ordered[:-1]])
    segment = torch.cumsum(first.int(), 0) - 1
    sums = torch.zeros_like(g).index_add_(0, segment, g[permutation])
    last = torch.full_like(ordered, 2**31 - 1)
    distinct = torch.sort(torch.where(first, ordered, last))[0]
    return torch.where(distinct == last, torch.full_like(distinct, unused), distinct), sums
