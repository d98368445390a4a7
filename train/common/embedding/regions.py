"""What a step does with one array of tables: the lookup, and the update of the rows that were looked up.

`rows` are those of the whole array, [batch, columns of its tables], -1 where a bag has no id.
"""

import torch
from torch import Tensor

from train.common.embedding.arrays import TableArray
from train.common.embedding.tables import Optimizer, take_rows


def lookup(array: TableArray, rows: Tensor) -> Tensor:
    """Looks up and adds up the rows of each bag; returns [batch, tables of the array, dim], sharded by the batch."""
    sharding, batch, tables, dim = array.sharding, rows.shape[0], len(array.tables), array.dim
    by_batch = (sharding.batch_axes, None, None)
    weight = sharding.enter(array.weight, array.spec)
    if array.plan == "table":
        spec = (sharding.axis, sharding.copies_axis, None)
        local, here = _local(array, sharding.enter(sharding.shard(_in_slots(array, rows), spec), spec))
        part = pool(weight, local[0], here[0], array.slots, array.local_dim)[None]
        shape = (array.parts, batch, len(array.slots), dim)
        part = sharding.leave(part, (*spec, None), shape)
        part = sharding.shard(part, (None, sharding.batch_axes, None, None))  # all-to-all
        return part.transpose(0, 1).reshape(batch, -1, dim).index_select(1, array.from_slots)
    spec = (sharding.batch_axes if array.plan == "data" else sharding.copies_axis, None)
    local, here = _local(array, sharding.enter(sharding.shard(rows, spec), spec))
    part = pool(weight, local, here, array.lookups, array.local_dim)
    if array.plan == "data":
        return sharding.leave(part, by_batch, (batch, tables, dim))
    if array.plan == "row":
        return sharding.leave(sharding.reduce_scatter(part), by_batch, (batch, tables, dim))
    part = sharding.leave(part, (sharding.copies_axis, None, sharding.axis), (batch, tables, dim))
    return sharding.shard(part, by_batch)  # all-to-all


def update(
    array: TableArray, looked_up: list[Tensor], grads: list[Tensor], optimizer: Optimizer, lr: Tensor, step: Tensor
) -> None:
    """Updates the rows of several forward passes at once.

    Args:
        looked_up: the rows of each pass.
        grads: the gradient of each pass's pooled rows, [batch, tables of the array, dim].
        step: 1-based number of this update.
    """
    sharding = array.sharding
    lookups = sum(rows.numel() for rows in looked_up)
    summed = array.plan == "data" and array.used_rows <= lookups
    parts = [_gradient_rows(array, r, g, summed) for r, g in zip(looked_up, grads, strict=True)]
    rows, g = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if summed:
        # The whole gradient of small tables, added up over the devices, is less than every example's.
        whole = torch.zeros(array.local_rows + 1, array.local_dim + 1, device=g.device)
        whole = whole.index_add(0, rows, torch.cat([g, torch.ones_like(g[:, :1])], 1))[: array.used_rows]
        whole = sharding.all_reduce(whole, [list(range(sharding.mesh.num_devices))])
        rows, g, touched = None, whole[:, :-1], (whole[:, -1:] > 0).float()
    else:
        if optimizer.states:  # without a state, equal rows can be added one after the other
            rows, g = sum_equal_rows(rows, g, array.local_rows)
        used = rows < array.local_rows
        touched = used[:, None].float()
        rows = torch.where(used, rows, torch.zeros_like(rows))  # g is 0 there, and a sum with 0 changes nothing
    write(array, rows, g, touched, optimizer, lr, step)


def write(
    array: TableArray,
    rows: Tensor | None,
    g: Tensor,
    touched: Tensor,
    optimizer: Optimizer,
    lr: Tensor,
    step: Tensor,
) -> None:
    """Updates distinct local rows [n] with their gradients [n, local dim]; touched [n, 1] is 0 where a place is empty.
    None: all rows that are in use."""
    sharding = array.sharding

    def mean_square(g: Tensor) -> Tensor:
        total = (g * g).sum(1)
        return (sharding.all_reduce(total, sharding.groups) if array.plan == "column" else total) / array.dim

    arrays, specs = [array.weight, *array.states], [array.spec, *array.state_specs]
    old = [sharding.enter(tensor, spec) for tensor, spec in zip(arrays, specs, strict=True)]
    if rows is None:
        shapes = [x.shape for x in old]
        old = [x.reshape(-1, array.local_dim) if x.dim() == 2 else x for x in old]
        old, padding = [x[: array.used_rows] for x in old], [x[array.used_rows :] for x in old]
    weight, states = optimizer.update(old[0], old[1:], rows, g, touched, lr, step, mean_square)
    new = [weight, *states]
    if rows is None:
        new = [torch.cat(parts).reshape(shape) for *parts, shape in zip(new, padding, shapes, strict=True)]
    for tensor, local, spec in zip(arrays, new, specs, strict=True):
        tensor.copy_(sharding.leave(local, spec, tensor.shape))


def _gradient_rows(array: TableArray, rows: Tensor, grad: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    """Returns one forward pass's (local rows [n], gradients [n, local dim]) on each device; a row that is not there is
    local_rows, its gradient 0. Every device gets the whole batch of all copies, except where `summed`."""
    sharding = array.sharding
    if array.plan == "table":
        spec = (sharding.axis, None, None)
        grad = grad.index_select(1, array.to_slots).reshape(grad.shape[0], array.parts, -1, array.dim)
        grad = sharding.by_device(grad.transpose(0, 1))
        grad = sharding.enter(sharding.shard(grad, (*spec, None)), (*spec, None))[0]
        local, here = _local(array, sharding.enter(sharding.shard(_in_slots(array, rows), spec), spec))
        local, here, widths = local[0], here[0], array.slots
    else:
        batch = sharding.batch_axes if summed else None
        spec = (batch, None, sharding.axis if array.plan == "column" else None)
        if array.plan == "column" and sharding.copies_axis:
            grad = sharding.shard(grad, (sharding.copies_axis, None, sharding.axis))  # all-to-all, then the all-gather
        grad = sharding.enter(sharding.shard(grad, spec), spec)
        local, here = _local(array, sharding.enter(sharding.shard(rows, (batch, None)), (batch, None)))
        widths = array.lookups
    grad = by_column(grad, widths)
    grad = torch.where(here[..., None], grad, torch.zeros_like(grad))
    local = torch.where(here, local, torch.full_like(local, array.local_rows))
    return local.reshape(-1), grad.reshape(-1, grad.shape[-1])


def by_column(grad: Tensor, widths: list[int]) -> Tensor:
    """Turns gradients of pooled rows [batch, len(widths), dim] into those of their ids [batch, sum of widths, dim]."""
    if max(widths) == 1:
        return grad
    return torch.cat([grad[:, k : k + 1].expand(-1, width, -1) for k, width in enumerate(widths)], 1)


def _in_slots(array: TableArray, rows: Tensor) -> Tensor:
    """Turns [batch, columns] into [devices, batch, places per device], -1 where a place is not used."""
    padded = torch.cat([rows, torch.full_like(rows[:, :1], -1)], 1)
    slots = padded.index_select(1, array.places).reshape(rows.shape[0], array.parts, -1).transpose(0, 1)
    return array.sharding.by_device(slots)


def _local(array: TableArray, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, inside a region, the rows within this device's part and whether they are there."""
    if array.plan in ("row", "table"):
        sharding = array.sharding
        rows = rows - sharding.enter(array.device_index, (sharding.axis,)) * array.local_rows
    return rows, (rows >= 0) & (rows < array.local_rows)


def pool(weight: Tensor, rows: Tensor, here: Tensor, widths: list[int], dim: int) -> Tensor:
    """Turns rows, here [batch, sum of widths] into sums over each table's columns [batch, len(widths), dim]."""
    safe = torch.where(here, rows, torch.zeros_like(rows))
    found = take_rows(weight, safe.reshape(-1), dim).reshape(*rows.shape, dim)
    found = torch.where(here[..., None], found, torch.zeros_like(found))
    if max(widths) == 1:
        return found
    return torch.stack([part.sum(1) for part in torch.split(found, widths, dim=1)], 1)


def sum_equal_rows(rows: Tensor, g: Tensor, unused: int) -> tuple[Tensor, Tensor]:
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
