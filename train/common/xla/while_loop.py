"""A while loop that runs on the device, as a part of a compiled step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor, nn

from train.common.device import annotate
from train.common.xla import replay


class WhileLoop:
    """`while state["running"]: state = body(state, reads)` as one program on the device, which decides when it ends.

    Called inside a compiled step it becomes a part of the step's graph: however many rounds a loop takes, the host
    traces its body once for each set of shapes, starts one program and reads nothing in between. It also works on
    tensors that are sharded over the mesh. `body` must not draw random numbers.

    Args:
        body: takes two dicts of tensors, returns the next state: the same names, shapes and types, "running" a bool
            scalar among them.
        model: what else the body reads, its parameters and buffers.
    Raises:
        ValueError: body changes the state's names, shapes or types.
    """

    def __init__(self, body: Callable[[dict, dict], dict], model: nn.Module):
        self.body, self.model = body, model
        self._built: dict[tuple, tuple[Any, list[Tensor]]] = {}

    def __call__(self, state: dict[str, Tensor], reads: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in [*state.items(), *reads.items()])
        # The trace depends on the type of autocast and on the mode of the model.
        key += (torch.is_autocast_enabled("xla"), self.model.training)
        if key not in self._built:
            self._built[key] = self._build(state, reads, weights)
        computation, constants = self._built[key]
        operands = [*state.values(), *reads.values(), *map(gathered, weights.values()), *constants]
        results = torch_xla._XLAC._xla_user_computation("xla::while_loop", operands, computation)
        return dict(zip(state, results, strict=True))

    def _build(self, state: dict[str, Tensor], reads: dict[str, Tensor], weights: dict[str, Tensor]) -> tuple:
        """Returns the loop as a computation of all operands, and the numbers in the body that became operands."""
        state_in, reads_in, weights_in = (placeholders(tensors) for tensors in (state, reads, weights))
        operands = [*state_in.values(), *reads_in.values(), *weights_in.values()]
        with torch.no_grad(), _replaced(self.model, {id(weights[name]): weights_in[name] for name in weights}):
            state_out = self.body(dict(state_in), dict(reads_in))
        before, after = ({k: (tuple(v.shape), v.dtype) for k, v in each.items()} for each in (state_in, state_out))
        if before != after:
            changed = sorted(k for k in before | after if before.get(k) != after.get(k))
            before, after = ({k: each.get(k) for k in changed} for each in (before, after))
            raise ValueError(f"the body of a loop must keep names, shapes and types: {before} became {after}")
        body, arguments, constants = lowered([state_out[name] for name in state], operands)
        return _loop(body, arguments, [*operands, *constants], list(state)), constants


def gathered(weight: Tensor) -> Tensor:
    """Returns a weight whole that is cut over "data": it is gathered once for a loop, instead of in every round."""
    spmd, spec = getattr(weight, "placement", (None, ()))
    if "data" in spec and weight.is_floating_point():
        weight = weight.detach() * 1  # what has an annotation refuses another
        annotate(weight, spmd, tuple(axis if axis != "data" else None for axis in spec))
    return weight


def placeholders(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns placeholders for tensors. The lowering takes as operands what has been uploaded, not what is still to be
    computed; and what it takes is no longer updated in place by the next step, which would be another graph."""
    return {name: xb.create_placeholder_tensor(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def lowered(results: list[Tensor], operands: list[Tensor]) -> tuple[Any, list[int], list[Tensor]]:
    """Returns the computation of `results`, the position of each of its arguments in [*operands, *constants], and the
    constants: torch_xla makes operands of Python numbers."""
    place = {handle: index for index, handle in enumerate(torch_xla._XLAC._get_tensors_handle(operands))}
    context = torch_xla._XLAC.lowering.LoweringContext("while_loop")
    context.build(results)
    parameters = context.device_parameter_id_tensor_mapping()
    arguments, constants = [], []
    for number in sorted(parameters):
        handle = torch_xla._XLAC._get_tensors_handle([parameters[number]])[0]
        if handle not in place:
            place[handle] = len(operands) + len(constants)
            constants.append(parameters[number])
        arguments.append(place[handle])
    if constants:
        replay.fixed.update(zip(torch_xla._XLAC._get_tensors_handle(constants), constants, strict=True))
    return xb.computation_from_module_proto("body", context.hlo()), arguments, constants


def _loop(body: Any, arguments: list[int], operands: list[Tensor], names: list[str]) -> Any:
    """Returns the loop as a computation: it carries all operands, of which the first, `names`, are its state."""
    builder = xb.create_builder("while_loop")
    shapes = xb.tensor_shape(tuple(operands))
    initial = xb.Op.tuple(tuple(xb.mkparam(builder, i, shape) for i, shape in enumerate(shapes)))
    condition_builder, body_builder = xb.create_builder("condition"), xb.create_builder("round")
    running = xb.mkparam(condition_builder, 0, initial.shape()).get_tuple_element(names.index("running"))
    carried = xb.mkparam(body_builder, 0, initial.shape())
    elements = [carried.get_tuple_element(i) for i in range(len(operands))]
    result = xb.Op.call(body, [elements[argument] for argument in arguments])
    updated = [result.get_tuple_element(i) for i in range(len(names))]
    next_round = xb.Op.tuple(tuple(updated + elements[len(names) :])).build("round")
    loop = xb.mkop(
        "While", (initial.op,), condition_computation=running.build("condition"), body_computation=next_round
    )
    return xb.Op.tuple(tuple(loop.get_tuple_element(i) for i in range(len(names)))).build("while_loop")


@contextlib.contextmanager
def _replaced(model: nn.Module, others: dict[int, Tensor]) -> Iterator[None]:
    """Puts other tensors, by the id of the model's own, in place of its parameters and buffers.
    (`torch.func.functional_call` would untie tied parameters.)"""
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    kept = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: others[id(own)] for name, own in table.items() if own is not None})
        yield
    finally:
        for table, own in zip(tables, kept, strict=True):
            table.update(own)
