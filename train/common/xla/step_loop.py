"""Several train steps as one program: a loop on the device over batches uploaded one by one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from train.common.device import annotate
from train.common.mesh import Mesh
from train.common.xla import backend, replay
from train.common.xla.while_loop import Lowered, WhileLoop, lower, placeholders

_XLAC = torch_xla._XLAC


@dataclass(frozen=True)
class _TracedStep:
    """What one step makes of placeholders.

    `results` has the held tensors that the step updates, by their names in the loop, and then the
    tensors that it returns, as "result 0", … by their places in `leaves`.
    """

    results: dict[str, Tensor]
    leaves: list[Any]  # of what the step returns, flattened
    structure: pytree.TreeSpec


class StepLoop:
    """Calls `step_fn(state, batch, *rest)` for one batch after the other; itself a step function.

    Two traces make the loop: that of a step, and that of a round, which annotates all that enters
    the step and calls it. Without annotations, what a loop carries takes on the sharding of the
    per-device regions that read it (embedding/xla_devices.py), and XLA's partitioner aborts the
    process.

    Names in the loop: "held 0", … for the tensors of `state` and `rest`, the fields of a batch,
    "result 0", … for what a step returns, "constant 0", … for its Python numbers.
    """

    def __init__(self, step_fn: Callable, mesh: Mesh):
        self.__name__ = f"{step_fn.__name__}, several in a loop,"
        self._step_fn = step_fn
        self._mesh = mesh

    def __call__(self, state: Any, batches: Sequence[dict[str, Tensor]], *rest: Any) -> Any:
        """Takes a step with each batch; returns what the last one returns.

        Raises:
            NotRepeatable: the step does in each call what a loop would not repeat.
        """
        held = {}
        for number, tensor in enumerate(replay.Arguments((state, *rest)).tensors):
            held[f"held {number}"] = tensor
        current = {name: tensor.detach().clone() for name, tensor in held.items()}
        shardings = {name: _XLAC._get_xla_op_sharding(tensor) for name, tensor in held.items()}

        inputs = placeholders(held | batches[0])
        try:
            traced = self._trace(state, batches[0], rest, held, inputs, shardings)
        finally:
            _copy(current, held)
        step = lower(list(traced.results.values()), list(inputs.values()))
        for name, tensor in batches[0].items():
            shardings[name] = self._batch_sharding(tensor.dim())

        after = self._run(step, traced, current, batches, list(inputs), shardings)
        self._update_held(held, after, shardings)
        return self._result(traced, after)

    def _trace(
        self,
        state: Any,
        batch: Mapping[str, Tensor],
        rest: tuple,
        held: dict[str, Tensor],
        inputs: dict[str, Tensor],
        shardings: dict[str, Any],
    ) -> _TracedStep:
        """Calls the step with `inputs` in place of the held tensors and of the batch."""
        guards = replay.Arguments((state, *rest)).guards
        # A placeholder takes no annotation, a view of it does.
        traced = {name: tensor.view(tensor.shape) for name, tensor in inputs.items()}
        _copy(traced, held)
        graphs = {name: _XLAC._get_graph_hash([tensor]) for name, tensor in held.items()}

        traced_batch = {name: traced[name] for name in batch}
        result = self._step_fn(state, traced_batch, *rest)
        leaves, structure = pytree.tree_flatten(result)
        if replay.Arguments((state, *rest)).guards != guards:
            raise replay.NotRepeatable(
                "it leaves gradients, makes state, or changes a Python value (zero_grad)"
            )

        results = {}
        for name, tensor in held.items():
            if _XLAC._get_graph_hash([tensor]) != graphs[name]:
                results[name] = tensor
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                results[f"result {number}"] = leaf
        for name, tensor in results.items():
            copy = tensor.detach().clone()  # since `held` gets its own values back
            results[name] = self._annotated(copy, shardings.get(name))
        _check_no_random_numbers(results)
        return _TracedStep(results, leaves, structure)

    def _run(
        self,
        step: Lowered,
        traced: _TracedStep,
        current: dict[str, Tensor],
        batches: Sequence[dict[str, Tensor]],
        inputs: list[str],
        shardings: dict[str, Any],
    ) -> dict[str, Tensor]:
        """Loops over the batches; returns the state of the loop after the last one.

        Args:
            current: values of the held tensors before the first step.
            inputs: names of the operands that `step` was lowered with.
        """
        fields = list(batches[0])
        constants = {f"constant {n}": tensor for n, tensor in enumerate(step.constants)}
        entering_names = [*inputs, *constants]

        def one_round(carried: dict[str, Tensor], reads: dict[str, Tensor]) -> dict[str, Tensor]:
            values = carried | reads
            next_round = carried["round"] + 1
            for name in fields:
                row = values["round"].reshape(1)
                values[name] = values[name].index_select(0, row)[0]

            entering = []
            for name in entering_names:
                entering.append(self._annotated(values[name], shardings.get(name)))
            arguments = [entering[index] for index in step.arguments]
            outputs = _XLAC._xla_user_computation("xla::step", arguments, step.computation)

            following = {"running": next_round < len(batches), "round": next_round}
            return following | dict(zip(traced.results, outputs, strict=True))

        running = torch.ones((), dtype=torch.bool)
        first_round = torch.zeros((), dtype=torch.int32)
        carried = {
            "running": running.to(torch_xla.device()),
            "round": first_round.to(torch_xla.device()),
        }
        for name, result in traced.results.items():
            carried[name] = current[name] if name in current else torch.zeros_like(result)

        reads = {name: value for name, value in current.items() if name not in traced.results}
        reads |= constants
        for name in fields:
            reads[name] = torch.stack([batch[name] for batch in batches])
            sharding = self._batch_sharding(reads[name].dim(), stacked=True)
            _XLAC._xla_mark_sharding(reads[name], sharding)
        return WhileLoop(one_round, nn.Module())(carried, reads)

    def _update_held(
        self, held: dict[str, Tensor], after: dict[str, Tensor], shardings: dict[str, Any]
    ) -> None:
        """Gives the held tensors that the loop has updated their new values."""
        updated = {}
        for name, tensor in after.items():
            if name in held:
                updated[name] = self._annotated(tensor, shardings[name])
        _copy(updated, held)

    def _result(self, traced: _TracedStep, after: dict[str, Tensor]) -> Any:
        """Returns what the last step returns: its tensors are those of the loop."""
        leaves = []
        for number, leaf in enumerate(traced.leaves):
            leaves.append(after.get(f"result {number}", leaf))
        return pytree.tree_unflatten(leaves, traced.structure)

    def _annotated(self, tensor: Tensor, sharding: Any) -> Tensor:
        """Returns a view of the tensor with this sharding; None: whole on every device."""
        tensor = tensor.view(tensor.shape)
        if sharding is None:
            annotate(tensor, self._mesh.spmd, (None,) * tensor.dim())
        else:
            _XLAC._xla_mark_sharding(tensor, sharding)
        return tensor

    def _batch_sharding(self, rank: int, stacked: bool = False) -> Any:
        """Returns the sharding of a batch's tensor by its rows: the first dimension.

        Args:
            stacked: the rows are the second dimension, after that of the batches of a call.
        """
        row_axes = backend.ROW_AXES[self._mesh.spmd.axis_names]
        spec = (None, row_axes) if stacked else (row_axes,)
        whole = (None,) * (rank - len(spec))
        return self._mesh.spmd.get_op_sharding(spec + whole)


def _check_no_random_numbers(results: Mapping[str, Tensor]) -> None:
    """Raises NotRepeatable where one of the results depends on the device's random seed."""
    ids, _ = _XLAC._get_tensors_xla_device_data_node(list(results.values()))
    if _XLAC._get_seed_info_id() in ids:
        raise replay.NotRepeatable(
            "it draws random numbers (dropout), which would be the same in every round"
        )


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Gives tensors the values of the same names, where there are any."""
    for name, value in values.items():
        if name in tensors:
            tensors[name].copy_(value)
