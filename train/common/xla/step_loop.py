"""Several train steps as one program: a loop on the device over batches that were uploaded one by one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch_xla
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from train.common.device import annotate
from train.common.mesh import Mesh
from train.common.xla import backend, replay
from train.common.xla.while_loop import WhileLoop, lowered, placeholders

_XLAC = torch_xla._XLAC


class StepLoop:
    """`step_fn(state, batch, *rest)` for one batch after the other; itself a step function, of several batches.

    Two traces make it: that of a step, and that of a round of the loop, which annotates all that enters the step and
    calls it. Without annotations, what a loop carries takes on the sharding of the per-device regions that read it
    (embedding/xla_devices.py), and XLA's partitioner aborts the process.
    """

    def __init__(self, step_fn: Callable, mesh: Mesh):
        self.__name__ = f"{step_fn.__name__}, several in a loop,"
        self._step_fn, self._mesh = step_fn, mesh

    def __call__(self, state: Any, batches: Sequence[dict[str, Tensor]], *rest: Any) -> Any:
        """Takes a step with each batch; returns what the last one returns."""
        held = {f"held {n}": tensor for n, tensor in enumerate(replay.Arguments((state, *rest)).tensors)}
        now = {name: tensor.detach().clone() for name, tensor in held.items()}
        shardings = {name: _XLAC._get_xla_op_sharding(tensor) for name, tensor in held.items()}
        inputs = placeholders(held | batches[0])
        try:
            results, leaves, structure = self._trace(state, batches[0], rest, held, inputs, shardings)
        finally:
            _copy(now, held)
        step, order, constants = lowered(list(results.values()), list(inputs.values()))
        fixed = {f"constant {n}": tensor for n, tensor in enumerate(constants)}  # a learning rate among them
        shardings |= {name: self._by_rows(tensor.dim()) for name, tensor in batches[0].items()}

        def one_round(carried: dict[str, Tensor], reads: dict[str, Tensor]) -> dict[str, Tensor]:
            given, following = carried | reads, carried["round"] + 1
            for name in batches[0]:
                given[name] = given[name].index_select(0, given["round"].reshape(1))[0]
            entering = [self._annotated(given[name], shardings.get(name)) for name in (*inputs, *fixed)]
            outputs = _XLAC._xla_user_computation("xla::step", [entering[place] for place in order], step)
            counts = {"running": following < len(batches), "round": following}
            return counts | dict(zip(results, outputs, strict=True))

        counts = {"running": torch.ones((), dtype=torch.bool), "round": torch.zeros((), dtype=torch.int32)}
        counts = {name: count.to(torch_xla.device()) for name, count in counts.items()}
        before = {name: now[name] if name in now else torch.zeros_like(result) for name, result in results.items()}
        reads = {name: now[name] for name in held if name not in results} | fixed
        for name in batches[0]:
            reads[name] = torch.stack([batch[name] for batch in batches])
            _XLAC._xla_mark_sharding(reads[name], self._by_rows(reads[name].dim(), None))
        after = WhileLoop(one_round, nn.Module())(counts | before, reads)
        _copy({name: self._annotated(after[name], shardings[name]) for name in results if name in held}, held)
        return pytree.tree_unflatten([after.get(f"result {n}", leaf) for n, leaf in enumerate(leaves)], structure)

    def _trace(
        self, state: Any, batch: Mapping[str, Tensor], rest: tuple, held: dict, inputs: dict, shardings: dict
    ) -> tuple[dict[str, Tensor], list[Any], pytree.TreeSpec]:
        """Calls the step with `inputs` in place of the tensors that it holds and of the batch; returns what it makes of
        those that it updates, by name, and the tensors that it returns; and all that it returns, flattened."""
        facts = replay.Arguments((state, *rest)).facts
        traced = {name: place.view(place.shape) for name, place in inputs.items()}  # a placeholder takes no annotation
        _copy(traced, held)
        graphs = {name: _XLAC._get_graph_hash([tensor]) for name, tensor in held.items()}
        leaves, structure = pytree.tree_flatten(self._step_fn(state, {name: traced[name] for name in batch}, *rest))
        if replay.Arguments((state, *rest)).facts != facts:
            raise replay.NotRepeatable("it leaves gradients, makes state, or changes a Python value (zero_grad)")
        results = {name: tensor for name, tensor in held.items() if _XLAC._get_graph_hash([tensor]) != graphs[name]}
        results |= {f"result {n}": leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        # As copies, since `held` gets its own values back.
        results = {
            name: self._annotated(value.detach().clone(), shardings.get(name)) for name, value in results.items()
        }
        if _XLAC._get_seed_info_id() in _XLAC._get_tensors_xla_device_data_node(list(results.values()))[0]:
            raise replay.NotRepeatable("it draws random numbers (dropout), which would be the same in every round")
        return results, leaves, structure

    def _annotated(self, tensor: Tensor, sharding: Any) -> Tensor:
        """Returns the tensor with this sharding; None: whole on every device."""
        tensor = tensor.view(tensor.shape)
        if sharding is None:
            annotate(tensor, self._mesh.spmd, (None,) * tensor.dim())
        else:
            _XLAC._xla_mark_sharding(tensor, sharding)
        return tensor

    def _by_rows(self, rank: int, *outer: None) -> Any:
        """Returns the sharding of a batch's tensor by its first dimension, or by that after the `outer` ones."""
        spec = (*outer, backend.ROWS[self._mesh.spmd.axis_names])
        return self._mesh.spmd.get_op_sharding(spec + (None,) * (rank - len(spec)))


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Gives tensors the values of the same names."""
    for name, value in values.items():
        if name in tensors:
            tensors[name].copy_(value)
