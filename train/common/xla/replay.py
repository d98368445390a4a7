"""Starts a compiled step again without tracing it, as `jax.jit` does.

torch_xla runs a step's Python in every call, only to find that it has compiled this program
already. For BERT-base that takes longer than the step on a v5e does (docs/compile.md).

`Trace` looks at one such call: which of the program's inputs are the arguments' tensors, which of
these the program replaces, and what the step returns. A `Program` then starts it at once on what
these tensors are now. Both rest on what torch_xla's own bridge to torch.compile uses
(_dynamo/dynamo_bridge.py).
"""

import gc
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from train.common import hooks

_XLAC = torch_xla._XLAC

# Constants of loops (while_loop.py) by handle, kept alive so that their handles are not reused.
loop_constants: dict[int, Tensor] = {}


class NotRepeatable(Exception):
    """Says why a step must be traced in each call, and what to change; the end of a sentence."""


class Arguments:
    """What a step is called with. Two calls with equal `inputs` and `facts` run the same program.

    Attributes:
        tensors: each tensor once: arguments, modules' parameters, gradients and buffers, what
            `on_device()` of a module returns, and optimizers' state.
        inputs: what a user has given, by name: shapes and types, modes, numbers.
        facts: what else the trace may depend on.
        rate_groups: the optimizers' groups whose learning rate is a Python number.
    """

    def __init__(self, args: Sequence[Any]):
        self.tensors: list[Tensor] = []
        self.inputs: dict[str, Any] = {}
        self.facts: list[Any] = [torch.is_grad_enabled()]
        self.rate_groups: list[dict] = []
        self._index_of_id: dict[int, int] = {}

        for number, value in enumerate(args):
            self._add(value, f"argument {number}")

    def _add(self, value: Any, name: str) -> None:
        """Adds one argument, or a part of one."""
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            self.inputs[name] = (tuple(value.shape), dtype)
            self._add_tensor(value)
        elif isinstance(value, nn.Module):
            self.inputs[name] = "training" if value.training else "evaluation"
            self._add_module(value)
        elif isinstance(value, torch.optim.Optimizer):
            self._add_optimizer(value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.facts.append(key)
                self._add(item, f"{name}[{key!r}]")
        elif isinstance(value, tuple | list):
            self._add_sequence(value, name)
        elif isinstance(value, bool | int | float | str):
            self.inputs[name] = value
        else:
            self.facts.append(value)

    def _add_sequence(self, values: tuple | list, name: str) -> None:
        """Adds the items of a list or a tuple, those of a named tuple by their names."""
        fields = getattr(values, "_fields", None)
        for number, item in enumerate(values):
            suffix = f".{fields[number]}" if fields else f"[{number}]"
            self._add(item, name + suffix)

    def _add_tensor(self, tensor: Tensor | None) -> None:
        if tensor is None:
            self.facts.append(None)
            return

        index = self._index_of_id.get(id(tensor))
        if index is None:
            index = len(self.tensors)
            self._index_of_id[id(tensor)] = index
            self.tensors.append(tensor)
        self.facts.append((index, tensor.requires_grad, tensor.device))

    def _add_module(self, module: nn.Module) -> None:
        self.facts.append(weakref.ref(module))  # a compiled step keeps no module alive

        for submodule in module.modules():
            self.facts.append(submodule.training)
            if hasattr(type(submodule), "on_device"):
                for tensor in submodule.on_device().values():
                    self._add_tensor(tensor)

        for parameter in module.parameters():
            self._add_tensor(parameter)
            self._add_tensor(parameter.grad)
        for buffer in module.buffers():
            self._add_tensor(buffer)

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.facts.append(weakref.ref(optimizer))

        for group in optimizer.param_groups:
            if isinstance(group["lr"], float):
                self.rate_groups.append(group)
            for parameter in group["params"]:
                self._add_tensor(parameter)
            self._add_optimizer_values(group)
            for parameter in group["params"]:
                self._add_optimizer_values(optimizer.state.get(parameter, {}))

    def _add_optimizer_values(self, values: dict[str, Any]) -> None:
        """Adds the values of a group or of a parameter's state, but for three.

        Parameters are added before; a learning rate that is a Python number becomes an input of the
        program. Counts of steps on the host change in every call: a step that computes with one is
        found out by its second trace.
        """
        for key, value in values.items():
            if isinstance(value, Tensor) and (key != "step" or value.device.type == "xla"):
                self._add_tensor(value)
                continue

            left_out = key in ("params", "step") or (key == "lr" and isinstance(value, float))
            if not left_out:
                self.facts.append((key, value))


# What an input of a program is: Argument, LearningRate, Constant or Seed.


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor of the call's arguments."""

    index: int  # in Arguments.tensors


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A learning rate that is a Python number on the host."""

    group: int  # in Arguments.rate_groups
    sign: int  # -1 where the optimizer subtracts: the program then takes the negative rate
    dtype: torch.dtype

    def upload(self, arguments: Arguments, device: str) -> Tensor:
        """Returns the rate of this call as a tensor on the device."""
        rate = self.sign * arguments.rate_groups[self.group]["lr"]
        return torch.tensor(rate, dtype=self.dtype).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A number, or a tensor that the step makes, and that is the same in every call."""

    value: Tensor  # on the device


@dataclass(frozen=True, slots=True)
class Seed:
    """The seed of the device's random numbers."""


# What a leaf of a step's result is: Output, Argument or Value.


@dataclass(frozen=True, slots=True)
class Output:
    """An output of the program."""

    index: int


@dataclass(frozen=True, slots=True)
class Value:
    """Something that is not a tensor on the device: the trace's own value, in every call."""

    value: Any


@dataclass
class Program:
    """A compiled step; see `Trace.start`."""

    graph: bytes  # torch_xla's hash of it
    inputs: list[Argument | LearningRate | Constant | Seed]
    constants: list[Tensor]  # the values of the Constants among `inputs`, on the host
    updated: list[int]  # indices of the arguments' tensors that the first outputs replace
    leaves: list[Output | Argument | Value]  # of the step's result, flattened
    structure: pytree.TreeSpec  # of the step's result
    facts: list[Any]  # Arguments.facts of the traced call

    def same_as(self, other: "Program") -> bool:
        """Returns whether two traces of one graph have the same inputs, with the same numbers."""
        ours = [source for source in self.inputs if not isinstance(source, Constant)]
        theirs = [source for source in other.inputs if not isinstance(source, Constant)]
        if ours != theirs:
            return False

        for our_constant, their_constant in zip(self.constants, other.constants, strict=False):
            equal = torch.isclose(our_constant, their_constant, rtol=0, atol=0, equal_nan=True)
            if not equal.all():
                return False
        return True

    def start(self, arguments: Arguments, traced: list[Tensor] | None = None) -> Any:
        """Starts the program and replaces the tensors that it updates.

        Args:
            traced: the tensors of `inputs` as of a trace that has just ended. After a trace the
                arguments' tensors stand for what is still to be computed, so they are no inputs.
        Returns:
            The step's result, whose tensors the device may not have computed yet.
        """
        inputs = self._input_tensors(arguments, traced)
        for watcher in hooks.watchers:
            watcher.started(self.graph)
        outputs = _XLAC._run_cached_graph(self.graph, inputs)
        self._replace_updated(arguments, outputs)
        return self._result(arguments, outputs)

    def _input_tensors(self, arguments: Arguments, traced: list[Tensor] | None) -> list[Tensor]:
        """Returns the tensor of each input for this call."""
        device = str(torch_xla.device())
        tensors = []
        for number, source in enumerate(self.inputs):
            if isinstance(source, LearningRate):
                tensor = source.upload(arguments, device)
            elif traced is not None:
                tensor = traced[number]
            elif isinstance(source, Argument):
                tensor = arguments.tensors[source.index]
            elif isinstance(source, Constant):
                tensor = source.value
            else:
                tensor = _XLAC._get_base_seed_as_tensor(device)
            tensors.append(tensor)
        return tensors

    def _replace_updated(self, arguments: Arguments, outputs: list[Tensor]) -> None:
        """Makes the updated arguments' tensors point to the first outputs, without a copy.

        This happens below PyTorch's functionalization, so that all views and detached copies of
        them see the update, too.
        """
        targets = []
        sources = []
        for index, output in zip(self.updated, outputs, strict=False):  # results come after these
            targets.append(torch._from_functional_tensor(arguments.tensors[index]))
            sources.append(torch._from_functional_tensor(output))
        if targets:
            torch._foreach_copy_(targets, sources)

    def _result(self, arguments: Arguments, outputs: list[Tensor]) -> Any:
        """Returns what the step returns."""
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, Output):
                leaves.append(outputs[leaf.index])
            elif isinstance(leaf, Argument):
                leaves.append(arguments.tensors[leaf.index])
            else:
                leaves.append(leaf.value)
        return pytree.tree_unflatten(leaves, self.structure)

    def __call__(self, arguments: Arguments) -> Any:
        """Starts the program and advances the random seed; returns the step's result."""
        result = self.start(arguments)

        # torch_xla.sync() does this after a step, but would wait until this one is started.
        xm.set_rng_state((1012031 + 7012063 * _XLAC._xla_get_rng_seed()) % 2**64)
        return result


class Trace:
    """One call of a step, traced but not run, and then started: `Trace(args, …).start(step)`.

    A learning rate that is a Python number becomes an input of the program, since it changes from
    step to step. The step is therefore traced with probes: rates that occur nowhere else, and
    differ with `call_number`. (A rate that equals another number of the step would share its input,
    which makes another graph.)
    """

    host_reads = 0  # of the process: transfers of the values of programs' constants

    def __init__(self, args: Sequence[Any], arguments: Arguments, call_number: int):
        self.args = args
        self.arguments = arguments
        for tensor in arguments.tensors:
            if tensor.device.type != "xla":
                shape = list(tensor.shape)
                raise NotRepeatable(f"a tensor {shape} among its arguments is not on the device")

        # `.to(device)` may have left tensors on the host. Uploaded, each of them has a handle.
        _XLAC._xla_sync_multi(arguments.tensors, devices=[], wait=False, sync_xla_data=True)
        self._indices_of_handle: dict[int, list[int]] = {}
        for index, handle in enumerate(_XLAC._get_tensors_handle(arguments.tensors)):
            self._indices_of_handle.setdefault(handle, []).append(index)

        self._old_ids = _tensor_ids(arguments.tensors)
        newest = torch.zeros((), device=torch_xla.device())
        self._newest_id = _XLAC._xla_get_tensor_id(newest)  # the step's own tensors get higher ones

        self._probes = []
        for number in range(len(arguments.rate_groups)):
            self._probes.append(0.6180339 + 0.0113 * (call_number % 7) + 0.1307 * number)

    def start(self, step: Callable[[Sequence[Any]], Any]) -> tuple[Program, Any]:
        """Calls `step(args)`, compiles its program if that is new, and starts it.

        Returns:
            The program and the step's result.
        Raises:
            NotRepeatable: the program could not be started again without a trace.
        """
        results, structure = self._call(step)
        self._check_facts()

        updated = self._updated()
        pending = [self.arguments.tensors[index] for index in updated]
        if not all(_XLAC._check_tensor_need_materialization(pending)):
            raise NotRepeatable(
                "it assigns one of its arguments' tensors to another without computing anything"
            )
        leaves = self._take_leaves(results, pending)

        ids, values = _XLAC._get_tensors_xla_device_data_node(pending)
        inputs = self._inputs(ids, values, updated)
        constants = self._read_constants(inputs)
        with alias_with_buffer_donor_config():
            graph = _XLAC._get_graph_hash(pending)
            for watcher in hooks.watchers:
                watcher.traced(graph, lambda: _XLAC._get_xla_tensors_hlo_proto(pending))
            _XLAC._xla_warm_up_cache(pending, [])

        facts = self.arguments.facts
        program = Program(graph, inputs, constants, updated, leaves, structure, facts)
        return program, program.start(self.arguments, values)

    def _call(self, step: Callable[[Sequence[Any]], Any]) -> tuple[list[Any], pytree.TreeSpec]:
        """Calls the step with probes as learning rates; returns its flattened result.

        A step that sets the random seed meanwhile raises NotRepeatable.
        """
        rates = [group["lr"] for group in self.arguments.rate_groups]
        set_seed = _XLAC._xla_set_rng_seed
        try:
            self._set_rates(self._probes)
            _XLAC._xla_set_rng_seed = _refuse_seed
            # Nothing else may hold the results: `_take_leaves` frees what they are views of.
            return pytree.tree_flatten(step(self.args))
        finally:
            self._set_rates(rates)
            _XLAC._xla_set_rng_seed = set_seed

    def _set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.arguments.rate_groups, rates, strict=True):
            group["lr"] = rate

    def _check_facts(self) -> None:
        """Raises NotRepeatable where the step has changed what its next trace depends on."""
        if Arguments(self.args).facts != self.arguments.facts:
            made = "it leaves gradients, makes state, or changes a Python value among its arguments"
            raise NotRepeatable(f"{made} (device.init_optimizer_state, zero_grad)")

    def _updated(self) -> list[int]:
        """Returns the indices of the arguments' tensors that the step updates.

        Some operations change a tensor in place, others give it another id.
        """
        tensors = self.arguments.tensors
        pending = _XLAC._check_tensor_need_materialization(tensors)
        new_ids = _tensor_ids(tensors)

        updated = []
        for index, (is_pending, old_id) in enumerate(zip(pending, self._old_ids, strict=True)):
            if is_pending or new_ids[index] != old_id:
                updated.append(index)
        return updated

    def _take_leaves(
        self, results: list[Any], pending: list[Tensor]
    ) -> list[Output | Argument | Value]:
        """Returns what each leaf of the result is; empties `results`.

        Tensors that are still to be computed are appended to `pending`, the program's outputs.
        Raises NotRepeatable where the step leaves other tensors to be computed.
        """
        argument_of_id = {id(tensor): i for i, tensor in enumerate(self.arguments.tensors)}
        output_of_id = {number: index for index, number in enumerate(_tensor_ids(pending))}

        leaves: list[Output | Argument | Value] = []
        while results:
            leaf = results.pop(0)
            if not isinstance(leaf, Tensor) or leaf.device.type != "xla":
                leaves.append(Value(leaf))
                continue
            if leaf.requires_grad:
                raise NotRepeatable("it returns a tensor with a gradient function (.detach() it)")
            if id(leaf) in argument_of_id:
                leaves.append(Argument(argument_of_id[id(leaf)]))
                continue

            torch._sync(leaf)
            leaf = torch._from_functional_tensor(leaf)  # without what it is a view of
            tensor_id = _XLAC._xla_get_tensor_id(leaf)
            if not _XLAC._check_tensor_need_materialization([leaf])[0]:
                # It shares the memory of another tensor; the barrier makes it a copy of its own.
                _XLAC._xla_optimization_barrier_([leaf])
            if tensor_id not in output_of_id:
                output_of_id[tensor_id] = len(pending)
                pending.append(leaf)
            leaves.append(Output(output_of_id[tensor_id]))

        _check_others(outputs=len(output_of_id))
        return leaves

    def _inputs(
        self, ids: list[int], values: list[Tensor], updated: list[int]
    ) -> list[Argument | Constant | Seed]:
        """Returns what each input of the program is, and lets it reuse the memory of updated ones.

        Raises:
            NotRepeatable: an input is neither an argument nor made by the step, or it is two
                arguments.
        """
        inputs: list[Argument | Constant | Seed] = []
        handles = _XLAC._get_tensors_handle(values)
        for tensor_id, value, handle in zip(ids, values, handles, strict=True):
            indices = self._indices_of_handle.get(handle, [])
            if len(indices) > 1:
                raise NotRepeatable("two of its arguments are copies of one tensor")

            is_number = tensor_id == -1
            made_in_step = tensor_id > self._newest_id
            if indices:
                index = indices[0]
                inputs.append(Argument(index))
                _XLAC._set_buffer_donation(value, index in updated)
            elif tensor_id == _XLAC._get_seed_info_id():
                inputs.append(Seed())
            elif is_number or made_in_step or handle in loop_constants:
                inputs.append(Constant(value))
            else:
                unknown = f"a tensor {list(value.shape)} that is not among its arguments"
                raise NotRepeatable(f"it reads {unknown}: pass it, or its module")
        return inputs

    def _read_constants(self, inputs: list[Any]) -> list[Tensor]:
        """Returns the values of the constants among `inputs`, on the host.

        Those that are probes are no constants: they become a LearningRate in `inputs`.
        """
        numbers = [i for i, source in enumerate(inputs) if isinstance(source, Constant)]
        if not numbers:
            return []

        Trace.host_reads += 1
        values = _XLAC._xla_get_cpu_tensors([inputs[number].value for number in numbers])
        constants = []
        for number, value in zip(numbers, values, strict=True):
            rate = self._learning_rate(value)
            if rate is None:
                constants.append(value)
            else:
                inputs[number] = rate
        return constants

    def _learning_rate(self, value: Tensor) -> LearningRate | None:
        """Returns the learning rate that a value of the program is the probe of; None: of none."""
        if value.dim() > 0 or not value.is_floating_point():
            return None

        for group, probe in enumerate(self._probes):
            for sign in (1, -1):
                if value == torch.tensor(sign * probe, dtype=value.dtype):
                    return LearningRate(group, sign, value.dtype)
        return None


def _tensor_ids(tensors: list[Tensor]) -> list[int]:
    """Returns torch_xla's ids of tensors."""
    return [_XLAC._xla_get_tensor_id(tensor) for tensor in tensors]


def _check_others(outputs: int) -> None:
    """Raises NotRepeatable where more than `outputs` tensors are still to be computed."""
    device = str(torch_xla.device())
    for pause in (0, 0.01, 0.1, 1, 0):  # seconds
        pending = sum(_XLAC._check_device_tensor_need_materialization(device))
        others = pending - outputs
        if not others:
            return
        gc.collect()  # an autograd graph in a reference cycle may wait for the collector
        time.sleep(pause)  # autograd's thread lets go of the last gradients just after backward()

    unknown = "tensors that are neither among its arguments nor among its results"
    raise NotRepeatable(f"it changes or keeps {others} {unknown}")


def _refuse_seed(*_: Any) -> None:
    """Stands in for the setting of the random seed in a trace, and raises NotRepeatable."""
    raise NotRepeatable(
        "it sets the random state, as torch_xla.utils.checkpoint does, so a repeated program would "
        "draw the numbers of the traced call (recompute in a Function that keeps dropout's masks "
        "or seeds)"
    )
