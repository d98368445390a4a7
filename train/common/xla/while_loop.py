"""A while loop that runs on the device, as a part of a compiled step."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor, nn

from train.common.device import annotate
from train.common.xla import replay

_XLAC = torch_xla._XLAC

Signature = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and type of each tensor, by name


class WhileLoop:
    """Runs `while state["running"]: state = body(state, invariants)` as one program on the device.

    Called inside a compiled step it becomes a part of the step's graph. However many rounds a loop
    takes, the host traces its body once for each set of shapes, starts one program and reads
    nothing in between: the device decides when the loop ends. It also works on tensors that are
    sharded over the mesh. `body` must not draw random numbers: each round would draw the same.

    Args:
        body: takes two dicts of tensors, `state` and `invariants`, and returns the next state: the
            same names, shapes and types, "running" a bool scalar among them.
        model: its parameters and buffers are what else the body reads.
    Raises:
        ValueError: body changes the state's names, shapes or types.
    """

    def __init__(self, body: Callable[[dict, dict], dict], model: nn.Module):
        self.body = body
        self.model = model
        self._built: dict[tuple, _Loop] = {}

    def __call__(
        self, state: dict[str, Tensor], invariants: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns the state after the last round.

        Args:
            invariants: tensors that all rounds read and none changes.
        """
        weights = dict(self.model.named_parameters())
        weights.update(self.model.named_buffers())

        key = self._key(state, invariants)
        if key not in self._built:
            self._built[key] = self._build(state, invariants, weights)
        loop = self._built[key]

        # In the order in which `_build` gave them to the computation.
        operands = [*state.values(), *invariants.values()]
        operands += [gathered(weight) for weight in weights.values()]
        operands += loop.constants
        results = _XLAC._xla_user_computation("xla::while_loop", operands, loop.computation)
        return dict(zip(state, results, strict=True))

    def _key(self, state: dict[str, Tensor], invariants: dict[str, Tensor]) -> tuple:
        """Returns what the trace of the body depends on."""
        key = []
        for name, tensor in [*state.items(), *invariants.items()]:
            key.append((name, tensor.shape, tensor.dtype))
        return (*key, torch.is_autocast_enabled("xla"), self.model.training)

    def _build(
        self,
        state: dict[str, Tensor],
        invariants: dict[str, Tensor],
        weights: dict[str, Tensor],
    ) -> "_Loop":
        """Traces the body on placeholders and returns the loop."""
        state_in = placeholders(state)
        invariants_in = placeholders(invariants)
        weights_in = placeholders(weights)
        replacements = {id(weights[name]): weights_in[name] for name in weights}
        with torch.no_grad(), _replaced(self.model, replacements):
            # Copies of the dicts, which the body may change.
            state_out = self.body(dict(state_in), dict(invariants_in))
        _check_state(_signature(state_in), _signature(state_out))

        operands = [*state_in.values(), *invariants_in.values(), *weights_in.values()]
        lowered = lower([state_out[name] for name in state], operands)
        computation = _while(lowered, [*operands, *lowered.constants], list(state))
        return _Loop(computation, lowered.constants)


@dataclass(frozen=True)
class _Loop:
    """A loop that is built, for one set of shapes."""

    computation: Any  # of state, invariants, weights and constants, in this order
    constants: list[Tensor]  # numbers of the body, as operands


def _signature(tensors: dict[str, Tensor]) -> Signature:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _check_state(before: Signature, after: Signature) -> None:
    """Raises ValueError with the tensors whose name, shape or type the body has changed."""
    if before == after:
        return

    names = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            names.append(name)
    was = {name: before.get(name) for name in names}
    became = {name: after.get(name) for name in names}
    raise ValueError(f"the body of a loop must keep names, shapes and types: {was} became {became}")


def gathered(weight: Tensor) -> Tensor:
    """Returns a weight whole along "data": it is gathered once for a loop, not in every round.

    A weight that is not split over "data" is returned as it is.
    """
    placement = getattr(weight, "placement", None)
    is_split = placement is not None and "data" in placement.spec
    if not is_split or not weight.is_floating_point():
        return weight

    weight = weight.detach() * 1  # a new tensor: one that is annotated refuses another annotation
    spec = tuple(None if axis == "data" else axis for axis in placement.spec)
    annotate(weight, placement.spmd, spec)
    return weight


def placeholders(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a placeholder of the same shape and type for each tensor, to trace with.

    The tensors themselves would not do. The lowering takes uploaded data as operands, and a tensor
    that is still to be computed has none. And what the lowering has taken is not updated in place
    any more: the next step would be another graph.
    """
    made = {}
    for name, tensor in tensors.items():
        made[name] = xb.create_placeholder_tensor(tensor.shape, tensor.dtype)
    return made


@dataclass(frozen=True)
class Lowered:
    """A traced function as an XLA computation."""

    computation: Any
    arguments: list[int]  # of each of its parameters: an index into operands + constants
    constants: list[Tensor]  # Python numbers, of which torch_xla makes parameters


def lower(results: Sequence[Tensor], operands: Sequence[Tensor]) -> Lowered:
    """Returns the computation of `results`, which depend on `operands`."""
    context = _XLAC.lowering.LoweringContext("while_loop")
    context.build(list(results))
    tensor_of_parameter = context.device_parameter_id_tensor_mapping()

    index_of_handle = {}
    for index, handle in enumerate(_XLAC._get_tensors_handle(list(operands))):
        index_of_handle[handle] = index

    arguments = []
    constants = []
    for parameter in sorted(tensor_of_parameter):
        tensor = tensor_of_parameter[parameter]
        handle = _XLAC._get_tensors_handle([tensor])[0]
        if handle not in index_of_handle:
            index_of_handle[handle] = len(operands) + len(constants)
            constants.append(tensor)
            replay.loop_constants[handle] = tensor
        arguments.append(index_of_handle[handle])

    computation = xb.computation_from_module_proto("body", context.hlo())
    return Lowered(computation, arguments, constants)


def _while(body: Lowered, operands: list[Tensor], state: list[str]) -> Any:
    """Returns the loop as a computation of all operands.

    It carries all of them from round to round. The first ones are its state and its result; the
    others stay as they are.

    Args:
        state: names of the state's tensors, in their order among the operands.
    """
    builder = xb.create_builder("while_loop")
    parameters = []
    for index, shape in enumerate(xb.tensor_shape(tuple(operands))):
        parameters.append(xb.mkparam(builder, index, shape))
    initial = xb.Op.tuple(tuple(parameters))

    one_round = _round(initial.shape(), body, len(operands), len(state))
    condition = _condition(initial.shape(), state.index("running"))
    loop = xb.mkop(
        "While",
        (initial.op,),
        condition_computation=condition,
        body_computation=one_round,
    )

    results = [loop.get_tuple_element(index) for index in range(len(state))]
    return xb.Op.tuple(tuple(results)).build("while_loop")


def _condition(shape: Any, running: int) -> Any:
    """Returns the computation that says whether another round follows.

    Args:
        shape: of the tuple that the loop carries.
        running: index of "running" in it.
    """
    builder = xb.create_builder("condition")
    carried = xb.mkparam(builder, 0, shape)
    return carried.get_tuple_element(running).build("condition")


def _round(shape: Any, body: Lowered, carried_count: int, state_count: int) -> Any:
    """Returns the computation of one round, in which `body` replaces the first elements.

    Args:
        shape: of the tuple that the loop carries.
        carried_count: elements of the tuple; the first `state_count` are the state.
    """
    builder = xb.create_builder("round")
    carried = xb.mkparam(builder, 0, shape)
    elements = [carried.get_tuple_element(index) for index in range(carried_count)]

    result = xb.Op.call(body.computation, [elements[index] for index in body.arguments])
    updated = [result.get_tuple_element(index) for index in range(state_count)]
    unchanged = elements[state_count:]
    return xb.Op.tuple((*updated, *unchanged)).build("round")


@contextlib.contextmanager
def _replaced(model: nn.Module, replacements: dict[int, Tensor]) -> Iterator[None]:
    """Puts other tensors in place of a model's parameters and buffers while the context lasts.

    `torch.func.functional_call` would untie tied parameters.

    Args:
        replacements: by the id of a parameter or buffer, so that tied ones stay tied.
    """
    tables = []
    for module in model.modules():
        tables += [module._parameters, module._buffers]
    originals = [dict(table) for table in tables]

    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = replacements[id(tensor)]
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table.update(original)
