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
Tensors = dict[str, Tensor]  # by their names in the loop


@dataclass(frozen=True)
class _TracedStep:
    """One step, traced on placeholders.

    Attributes:
        results: the held tensors that the step updates, by their names in the loop; then the
            tensors that it returns, as "result 0", … by their indices in `leaves`.
        leaves: what the step returns, flattened.
        structure: of what the step returns.
    """

    results: Tensors
    leaves: list[Any]
    structure: pytree.TreeSpec


class StepLoop:
    """Calls `step_fn(state, batch, *rest)` for one batch after the other; itself a step function.

    Two traces make the loop. The first one is of a step, on placeholders. The second one is of a
    round: it annotates the inputs of the step, and calls the traced step as one operation. Without
    annotations, what a loop carries takes on the sharding of the per-device regions that read it
    (embedding/xla_devices.py), and XLA's partitioner aborts the process.

    The same tensors appear in several states, always as dicts with the same names:

        held         the tensors of `state` and `rest`: "held 0", …
        initial      copies of their values before the first step
        inputs       placeholders of the held tensors and of one batch, "batch <field>", on which
                     the step is traced
        results      what the traced step makes of the inputs
        carried      what a round hands to the next one: "running", "round", and each result.
                     WhileLoop calls it its state, which is not the `state` of the training
        invariants   what no round changes: the other held tensors, the step's Python numbers
                     ("constant 0", …), and the stacked batches
        final        what the last round leaves
    """

    def __init__(self, step_fn: Callable, mesh: Mesh):
        # For messages: "call 2 of train_step, several in a loop, cannot be repeated".
        self.__name__ = f"{step_fn.__name__}, several in a loop,"
        self._step_fn = step_fn
        self._mesh = mesh

    def __call__(self, state: Any, batches: Sequence[dict[str, Tensor]], *rest: Any) -> Any:
        """Takes a step with each batch; returns what the last one returns.

        Raises:
            NotRepeatable: the step does in each call what a loop would not repeat.
        """
        held = {}
        for index, tensor in enumerate(replay.Arguments((state, *rest)).tensors):
            held[f"held {index}"] = tensor
        initial = {name: tensor.detach().clone() for name, tensor in held.items()}
        first_batch = _named_fields(batches[0])

        # What has no entry, constants and what the step returns, is whole on every device.
        shardings = {name: _XLAC._get_xla_op_sharding(tensor) for name, tensor in held.items()}
        for name, tensor in first_batch.items():
            shardings[name] = self._batch_sharding(tensor.dim())

        inputs = placeholders(held | first_batch)
        try:
            traced = self._trace(state, list(batches[0]), rest, held, inputs, shardings)
        finally:
            _copy(initial, held)
        step = lower(list(traced.results.values()), list(inputs.values()))

        final = self._run(step, traced, initial, batches, list(inputs), shardings)
        self._update_held(held, final, shardings)
        return self._result(traced, final)

    def _trace(
        self,
        state: Any,
        fields: Sequence[str],
        rest: tuple,
        held: Tensors,
        inputs: Tensors,
        shardings: dict[str, Any],
    ) -> _TracedStep:
        """Calls the step on `inputs`, and returns what it makes of them.

        Overwrites the caller's `held` tensors in place: with placeholders, and then with what the
        step makes of these. The caller restores them, also after an error.

        Args:
            fields: names of a batch's tensors.
        """
        # The step may annotate its inputs, as embedding/xla_devices.py does. A placeholder takes no
        # annotation, a view of it does.
        views = {name: tensor.view(tensor.shape) for name, tensor in inputs.items()}
        guards = replay.Arguments((state, *rest)).guards
        _copy(views, held)
        graphs_before = {name: _XLAC._get_graph_hash([tensor]) for name, tensor in held.items()}

        batch = {field: views[f"batch {field}"] for field in fields}
        result = self._step_fn(state, batch, *rest)
        leaves, structure = pytree.tree_flatten(result)
        if replay.Arguments((state, *rest)).guards != guards:
            raise replay.NotRepeatable(
                "it leaves gradients, makes state, or changes a Python value (zero_grad)"
            )

        results = {}
        for name, tensor in held.items():
            # What computes a tensor is another graph once the step has changed the tensor.
            if _XLAC._get_graph_hash([tensor]) != graphs_before[name]:
                results[name] = tensor
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                results[f"result {index}"] = leaf
        for name, tensor in results.items():
            copy = tensor.detach().clone()  # since `held` gets its own values back
            results[name] = self._annotated(copy, shardings.get(name))
        _check_no_random_numbers(results)
        return _TracedStep(results, leaves, structure)

    def _run(
        self,
        step: Lowered,
        traced: _TracedStep,
        initial: Tensors,
        batches: Sequence[dict[str, Tensor]],
        input_names: list[str],
        shardings: dict[str, Any],
    ) -> Tensors:
        """Loops over the batches; returns what the last round leaves.

        Args:
            input_names: of the operands that `step` was lowered with, in their order.
        """
        batch_names = list(_named_fields(batches[0]))
        constants = {f"constant {i}": tensor for i, tensor in enumerate(step.constants)}
        operand_names = [*input_names, *constants]  # `step.arguments` are indices of these

        def one_round(carried: Tensors, invariants: Tensors) -> Tensors:
            values = carried | invariants
            next_round = carried["round"] + 1
            for name in batch_names:
                batch_index = carried["round"].reshape(1)
                values[name] = values[name].index_select(0, batch_index)[0]

            operands = []
            for name in operand_names:
                operands.append(self._annotated(values[name], shardings.get(name)))
            arguments = [operands[index] for index in step.arguments]
            outputs = _XLAC._xla_user_computation("xla::step", arguments, step.computation)

            next_carried = {"running": next_round < len(batches), "round": next_round}
            next_carried.update(zip(traced.results, outputs, strict=True))
            return next_carried

        running = torch.ones((), dtype=torch.bool)
        first_round = torch.zeros((), dtype=torch.int32)
        carried = {
            "running": running.to(torch_xla.device()),
            "round": first_round.to(torch_xla.device()),
        }
        for name, result in traced.results.items():
            # What a step returns has no value before the first round.
            carried[name] = initial[name] if name in initial else torch.zeros_like(result)

        invariants = {}
        for name, value in initial.items():
            if name not in traced.results:
                invariants[name] = value
        invariants |= constants

        # `batch_names` has the fields' order.
        for field, name in zip(batches[0], batch_names, strict=True):
            stacked = torch.stack([batch[field] for batch in batches])
            sharding = self._batch_sharding(stacked.dim(), stacked=True)
            _XLAC._xla_mark_sharding(stacked, sharding)
            invariants[name] = stacked
        no_model = nn.Module()  # the weights are among the held tensors
        return WhileLoop(one_round, no_model)(carried, invariants)

    def _update_held(self, held: Tensors, final: Tensors, shardings: dict[str, Any]) -> None:
        """Gives the held tensors that the loop has updated their new values."""
        updated = {}
        for name, tensor in final.items():
            if name in held:
                updated[name] = self._annotated(tensor, shardings[name])
        _copy(updated, held)

    def _result(self, traced: _TracedStep, final: Tensors) -> Any:
        """Returns what the last step returns: its tensors are those of the loop."""
        leaves = []
        for index, leaf in enumerate(traced.leaves):
            leaves.append(final.get(f"result {index}", leaf))
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


def _named_fields(batch: Mapping[str, Tensor]) -> Tensors:
    """Returns a batch with "batch " before the names of its fields.

    So a field named "round" is not taken for the loop's own number of the round.
    """
    return {f"batch {field}": tensor for field, tensor in batch.items()}


def _check_no_random_numbers(results: Mapping[str, Tensor]) -> None:
    """Raises NotRepeatable where one of the results depends on the device's random seed."""
    ids, _ = _XLAC._get_tensors_xla_device_data_node(list(results.values()))
    if _XLAC._get_seed_info_id() in ids:
        raise replay.NotRepeatable(
            "it draws random numbers (dropout), which would be the same in every round"
        )


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copies values into the tensors of the same names; values of other names are left out."""
    for name, value in values.items():
        if name in tensors:
            tensors[name].copy_(value)
