"""Starts a compiled step again without tracing it, as `jax.jit` does.

torch_xla runs a step's Python in every call, only to find that it has compiled this program
already. For BERT-base that takes longer than the step on a v5e does (docs/compile.md).

`Trace` looks at one such call: which of the program's inputs are the arguments' tensors, which of
these the program replaces, and what the step returns. A `Program` then starts it at once on what
these tensors are now. Both rest on what torch_xla's own bridge to torch.compile uses
(_dynamo/dynamo_bridge.py).

backend.CompiledStep traces the first two calls with the same shapes and numbers. Only where both
traces give the same program (`Program.same_as`) do later calls start it without a trace.

    Arguments   the tensors that a call is given, and all else that its trace may depend on
    Source      where one input of a program comes from in each call
    Leaf        where one leaf of a step's result comes from in each call
    Program     a compiled step: graph, sources, leaves
    Trace       makes the Program of one call
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

# The random seed after a step is SEED_INCREMENT + SEED_FACTOR * seed, modulo 2**64, as
# LazyGraphExecutor::MarkStep of PyTorch computes it.
SEED_INCREMENT = 1012031
SEED_FACTOR = 7012063

# Probes, the learning rates that a step is traced with. They occur nowhere else in a step, and
# differ between its groups and between its traces.
FIRST_PROBE = 0.6180339
PROBE_PER_TRACE = 0.0113
TRACES_WITH_OWN_PROBES = 7  # then the probes repeat
PROBE_PER_GROUP = 0.1307

NO_TENSOR_ID = -1  # torch_xla's id of a Python number, which it uploads without a tensor

# Constants of loops (while_loop.py) by handle, kept alive so that their handles are not reused.
loop_constants: dict[int, Tensor] = {}


class NotRepeatable(Exception):
    """Says why a step must be traced in each call, and what to change.

    Its message completes the sentence "call 2 of train_step cannot be repeated: …": "it reads a
    tensor [8, 6] that is not among its arguments: pass it, or its module".
    """


class Arguments:
    """What a step is called with. Calls with equal `signature` and `guards` run the same program.

    Attributes:
        tensors: each tensor once: arguments, modules' parameters, gradients and buffers, what
            `on_device()` of a ShardedEmbeddingBags returns, and optimizers' state.
        signature: what a user has given, by name: shapes and types, modes, numbers.
        guards: what else the trace may depend on.
        rate_groups: the optimizers' groups whose learning rate is a Python number.
    """

    def __init__(self, args: Sequence[Any]):
        self.tensors: list[Tensor] = []
        self.signature: dict[str, Any] = {}
        self.guards: list[Any] = [torch.is_grad_enabled()]
        self.rate_groups: list[dict] = []
        self._index_of_id: dict[int, int] = {}

        for index, value in enumerate(args):
            self._add(value, f"argument {index}")

    def _add(self, value: Any, name: str) -> None:
        """Adds one argument, or an item of one."""
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            self.signature[name] = (tuple(value.shape), dtype)
            self._add_tensor(value)
        elif isinstance(value, nn.Module):
            self.signature[name] = "training" if value.training else "evaluation"
            self._add_module(value)
        elif isinstance(value, torch.optim.Optimizer):
            self._add_optimizer(value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.guards.append(key)
                self._add(item, f"{name}[{key!r}]")
        elif isinstance(value, tuple | list):
            self._add_sequence(value, name)
        elif isinstance(value, bool | int | float | str):
            self.signature[name] = value
        else:
            self.guards.append(value)

    def _add_sequence(self, values: tuple | list, name: str) -> None:
        """Adds the items of a list or a tuple, those of a named tuple by their names."""
        fields = getattr(values, "_fields", None)
        for index, item in enumerate(values):
            suffix = f".{fields[index]}" if fields else f"[{index}]"
            self._add(item, name + suffix)

    def _add_tensor(self, tensor: Tensor | None) -> None:
        if tensor is None:
            self.guards.append(None)
            return

        index = self._index_of_id.get(id(tensor))
        if index is None:
            index = len(self.tensors)
            self._index_of_id[id(tensor)] = index
            self.tensors.append(tensor)
        self.guards.append((index, tensor.requires_grad, tensor.device))

    def _add_module(self, module: nn.Module) -> None:
        self.guards.append(weakref.ref(module))  # a compiled step keeps no module alive

        for submodule in module.modules():
            self.guards.append(submodule.training)
            # ShardedEmbeddingBags has this method, since its tables are not parameters. The type is
            # asked: a module without it takes ten times as long to answer, in nn.Module's own
            # __getattr__.
            if hasattr(type(submodule), "on_device"):
                for tensor in submodule.on_device().values():
                    self._add_tensor(tensor)

        for parameter in module.parameters():
            self._add_tensor(parameter)
            self._add_tensor(parameter.grad)
        for buffer in module.buffers():
            self._add_tensor(buffer)

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.guards.append(weakref.ref(optimizer))

        for group in optimizer.param_groups:
            if isinstance(group["lr"], float):
                self.rate_groups.append(group)
            for parameter in group["params"]:
                self._add_tensor(parameter)
            self._add_optimizer_values(group)
            for parameter in group["params"]:
                self._add_optimizer_values(optimizer.state.get(parameter, {}))

    def _add_optimizer_values(self, values: dict[str, Any]) -> None:
        """Adds the values of a group or of a parameter's state, except three.

        * Parameters are added before.
        * A learning rate that is a Python number becomes an input of the program.
        * A count of steps on the host changes in every call. A step that computes with it has
          another constant in the trace of its second call, and `Program.same_as` refuses it.
        """
        for key, value in values.items():
            is_tensor = isinstance(value, Tensor)
            is_host_count = key == "step" and not (is_tensor and value.device.type == "xla")
            is_host_rate = key == "lr" and isinstance(value, float)
            if key == "params" or is_host_count or is_host_rate:
                continue

            if is_tensor:
                self._add_tensor(value)
            else:
                self.guards.append((key, value))


# ---- where a program's inputs come from ----------------------------------------------------------


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


Source = Argument | LearningRate | Constant | Seed  # of an input

# ---- where the leaves of a step's result come from -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Output:
    """An output of the program."""

    index: int


@dataclass(frozen=True, slots=True)
class Value:
    """Something that is not a tensor on the device: the trace's own value, in every call."""

    value: Any


Leaf = Output | Argument | Value


@dataclass
class Program:
    """A compiled step; see `Trace.start`."""

    graph: bytes  # torch_xla's hash of it
    sources: list[Source]  # of its inputs
    constants: list[Tensor]  # the values of the Constants among `sources`, on the host
    updated: list[int]  # indices of the arguments' tensors that the first outputs replace
    leaves: list[Leaf]  # of the step's result, flattened
    structure: pytree.TreeSpec  # of the step's result
    guards: list[Any]  # Arguments.guards of the traced call

    def same_as(self, other: "Program") -> bool:
        """Returns whether two traces of one graph have the same sources, with the same numbers.

        backend.CompiledStep compares graphs and guards before.
        """
        ours = [source for source in self.sources if not isinstance(source, Constant)]
        theirs = [source for source in other.sources if not isinstance(source, Constant)]
        if ours != theirs:
            return False

        # Equal graphs have equally many inputs, and so equally many constants.
        for our_constant, their_constant in zip(self.constants, other.constants, strict=True):
            # By value: NaN equals NaN, and -0.0 equals 0.0.
            equal = torch.isclose(our_constant, their_constant, rtol=0, atol=0, equal_nan=True)
            if not equal.all():
                return False
        return True

    def start(self, arguments: Arguments, traced_inputs: list[Tensor] | None = None) -> Any:
        """Starts the program and replaces the tensors that it updates.

        Args:
            traced_inputs: the inputs as a trace that has just ended found them. After a trace the
                arguments' tensors stand for what is still to be computed, so they are no inputs.
        Returns:
            The step's result, whose tensors the device may not have computed yet.
        """
        inputs = self._input_tensors(arguments, traced_inputs)
        for watcher in hooks.watchers:
            watcher.started(self.graph)
        outputs = _XLAC._run_cached_graph(self.graph, inputs)
        self._replace_updated(arguments, outputs)
        return self._result(arguments, outputs)

    def _input_tensors(
        self, arguments: Arguments, traced_inputs: list[Tensor] | None
    ) -> list[Tensor]:
        """Returns the tensor of each input for this call."""
        device = str(torch_xla.device())
        tensors = []
        for index, source in enumerate(self.sources):
            # After a trace, too: among the traced inputs is its probe, and not the rate.
            if isinstance(source, LearningRate):
                tensor = source.upload(arguments, device)
            elif traced_inputs is not None:
                tensor = traced_inputs[index]
            elif isinstance(source, Argument):
                tensor = arguments.tensors[source.index]
            elif isinstance(source, Constant):
                tensor = source.value
            else:
                tensor = _XLAC._get_base_seed_as_tensor(device)
            tensors.append(tensor)
        return tensors

    def _replace_updated(self, arguments: Arguments, outputs: list[Tensor]) -> None:
        """Makes the updated arguments' tensors point to the data of the first outputs.

        This happens below PyTorch's functionalization, so that all views and detached copies of
        them see the update, too.
        """
        old_tensors = []
        new_tensors = []
        for index, output in zip(self.updated, outputs, strict=False):  # results come after these
            old_tensors.append(torch._from_functional_tensor(arguments.tensors[index]))
            new_tensors.append(torch._from_functional_tensor(output))
        if old_tensors:
            # No bytes are copied: on one device torch_xla's copy_ only hands the data over.
            torch._foreach_copy_(old_tensors, new_tensors)

    def _result(self, arguments: Arguments, outputs: list[Tensor]) -> Any:
        """Returns what the step returns."""
        values = []
        for leaf in self.leaves:
            if isinstance(leaf, Output):
                values.append(outputs[leaf.index])
            elif isinstance(leaf, Argument):
                values.append(arguments.tensors[leaf.index])
            else:
                values.append(leaf.value)
        return pytree.tree_unflatten(values, self.structure)

    def __call__(self, arguments: Arguments) -> Any:
        """Starts the program and advances the random seed; returns the step's result."""
        result = self.start(arguments)

        # After a trace torch_xla.sync() advances it. Here that would wait until the program is
        # started.
        seed = _XLAC._xla_get_rng_seed()
        xm.set_rng_state((SEED_INCREMENT + SEED_FACTOR * seed) % 2**64)
        return result


class Trace:
    """One call of a step, traced but not run, and then started: `Trace(args, …).start(step)`.

    A learning rate that is a Python number becomes an input of the program, since it changes from
    step to step. To find that input, the step is traced with a probe in place of each rate, a
    number that occurs nowhere else. Without probes, a rate that happens to equal another number of
    the step would share that number's input.

    Two traces have different probes. So a constant that the step computes from a rate in Python,
    such as 1 - lr * weight_decay, differs between them, and `Program.same_as` refuses the step: a
    repeated program would compute with the probe's.
    """

    constant_reads = 0  # of the process: transfers of the values of programs' constants

    def __init__(self, args: Sequence[Any], arguments: Arguments, call_number: int):
        self.args = args
        self.arguments = arguments
        for tensor in arguments.tensors:
            if tensor.device.type != "xla":
                shape = list(tensor.shape)
                raise NotRepeatable(f"a tensor {shape} among its arguments is not on the device")

        # `.to(device)` delays the upload, and only an uploaded tensor has a handle.
        _XLAC._xla_sync_multi(arguments.tensors, devices=[], wait=False, sync_xla_data=True)
        self._indices_of_handle: dict[int, list[int]] = {}
        for index, handle in enumerate(_XLAC._get_tensors_handle(arguments.tensors)):
            self._indices_of_handle.setdefault(handle, []).append(index)

        self._old_ids = _tensor_ids(arguments.tensors)
        newest = torch.zeros((), device=torch_xla.device())
        self._newest_id = _XLAC._xla_get_tensor_id(newest)  # the step's own tensors get higher ones

        trace_number = call_number % TRACES_WITH_OWN_PROBES
        first_probe = FIRST_PROBE + PROBE_PER_TRACE * trace_number
        self._probes = []
        for group in range(len(arguments.rate_groups)):
            self._probes.append(first_probe + PROBE_PER_GROUP * group)

    def start(self, step: Callable[[Sequence[Any]], Any]) -> tuple[Program, Any]:
        """Calls `step(args)`, compiles its program if that is new, and starts it.

        Returns:
            The program and the step's result.
        Raises:
            NotRepeatable: the program could not be started again without a trace.
        """
        results, structure = self._call(step)
        self._check_guards()

        updated = self._updated()
        updated_tensors = [self.arguments.tensors[index] for index in updated]
        if not all(_XLAC._check_tensor_need_materialization(updated_tensors)):
            raise NotRepeatable(
                "it assigns one of its arguments' tensors to another without computing anything"
            )
        leaves, outputs = self._take_leaves(results, updated_tensors)

        input_ids, inputs = _XLAC._get_tensors_xla_device_data_node(outputs)
        sources = self._find_sources(input_ids, inputs)
        # Before the graph's hash is taken, of which it is a part.
        self._donate_updated(sources, inputs, updated)
        sources, constants = self._read_constants(sources)
        with alias_with_buffer_donor_config():
            graph = _XLAC._get_graph_hash(outputs)
            for watcher in hooks.watchers:
                watcher.traced(graph, lambda: _XLAC._get_xla_tensors_hlo_proto(outputs))
            # Compiles the program and keeps it by its hash, unless torch_xla has it already.
            _XLAC._xla_warm_up_cache(outputs, [])

        guards = self.arguments.guards
        program = Program(graph, sources, constants, updated, leaves, structure, guards)
        return program, program.start(self.arguments, inputs)

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

    def _check_guards(self) -> None:
        """Raises NotRepeatable where the step has changed what its next trace depends on."""
        if Arguments(self.args).guards != self.arguments.guards:
            raise NotRepeatable(
                "it leaves gradients, makes state, or changes a Python value among its arguments "
                "(device.init_optimizer_state, zero_grad)"
            )

    def _updated(self) -> list[int]:
        """Returns the indices of the arguments' tensors that the step updates.

        A tensor that is changed in place is pending: still to be computed. One that gets the data
        of another (`tensor.data = other`) has a new id, and may have nothing to compute.
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
        self, results: list[Any], updated_tensors: list[Tensor]
    ) -> tuple[list[Leaf], list[Tensor]]:
        """Returns what each leaf of the result is, and the program's outputs; empties `results`.

        Outputs are the updated tensors, and then those of the result that are still to be computed.
        Raises NotRepeatable where the step leaves other tensors to be computed.
        """
        outputs = list(updated_tensors)
        argument_of_id = {id(tensor): i for i, tensor in enumerate(self.arguments.tensors)}
        output_of_id = {tensor_id: i for i, tensor_id in enumerate(_tensor_ids(outputs))}

        leaves: list[Leaf] = []
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

            # A view keeps its base alive, and the base would be one more output. So `leaf` is
            # assigned anew: no variable holds the view any more.
            torch._sync(leaf)
            leaf = torch._from_functional_tensor(leaf)
            tensor_id = _XLAC._xla_get_tensor_id(leaf)
            if not _XLAC._check_tensor_need_materialization([leaf])[0]:
                # It shares the memory of another tensor; the barrier makes it a copy of its own,
                # in place, so that its id stays.
                _XLAC._xla_optimization_barrier_([leaf])
            if tensor_id not in output_of_id:
                output_of_id[tensor_id] = len(outputs)
                outputs.append(leaf)
            leaves.append(Output(output_of_id[tensor_id]))

        # Ids are counted: to torch_xla a tensor and its detached copy are one, with one id.
        _check_nothing_else_pending(expected=len(output_of_id))
        return leaves, outputs

    def _find_sources(self, ids: list[int], inputs: list[Tensor]) -> list[Source]:
        """Returns the source of each input of the program, given their ids.

        A learning rate is still a Constant, its probe.

        Raises:
            NotRepeatable: an input is neither an argument nor made by the step, or it is two
                arguments.
        """
        sources = []
        handles = _XLAC._get_tensors_handle(inputs)
        for tensor_id, tensor, handle in zip(ids, inputs, handles, strict=True):
            sources.append(self._source(tensor_id, tensor, handle))
        return sources

    def _source(self, tensor_id: int, tensor: Tensor, handle: int) -> Argument | Constant | Seed:
        """Returns the source of one input; see `_find_sources`."""
        indices = self._indices_of_handle.get(handle, [])
        if len(indices) > 1:
            raise NotRepeatable("two of its arguments are copies of one tensor")
        if indices:
            return Argument(indices[0])
        if tensor_id == _XLAC._get_seed_info_id():
            return Seed()

        is_number = tensor_id == NO_TENSOR_ID
        is_made_in_step = tensor_id > self._newest_id
        if is_number or is_made_in_step or handle in loop_constants:
            return Constant(tensor)
        raise NotRepeatable(
            f"it reads a tensor {list(tensor.shape)} that is not among its arguments: "
            "pass it, or its module"
        )

    def _donate_updated(
        self, sources: list[Source], inputs: list[Tensor], updated: list[int]
    ) -> None:
        """Lets the program reuse the memory of the arguments that it updates, of no others."""
        for source, tensor in zip(sources, inputs, strict=True):
            if isinstance(source, Argument):
                _XLAC._set_buffer_donation(tensor, source.index in updated)

    def _read_constants(self, sources: list[Source]) -> tuple[list[Source], list[Tensor]]:
        """Returns the sources with a LearningRate in place of each constant that is a probe, and
        the values of the constants that stay, on the host."""
        on_device = [source.value for source in sources if isinstance(source, Constant)]
        if not on_device:
            return sources, []

        Trace.constant_reads += 1
        on_host = iter(_XLAC._xla_get_cpu_tensors(on_device))
        found = []
        constants = []
        for source in sources:
            if isinstance(source, Constant):
                value = next(on_host)
                rate = self._learning_rate(value)
                if rate is None:
                    constants.append(value)
                else:
                    source = rate
            found.append(source)
        return found, constants

    def _learning_rate(self, value: Tensor) -> LearningRate | None:
        """Returns the learning rate whose probe this value is; None where it is no probe."""
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


def _check_nothing_else_pending(expected: int) -> None:
    """Raises NotRepeatable where more tensors than `expected` are still to be computed."""
    device = str(torch_xla.device())
    # Seconds to wait after each check; no check follows the last one.
    for pause in (0, 0.01, 0.1, 1, 0):
        pending = sum(_XLAC._check_device_tensor_need_materialization(device))
        others = pending - expected
        if not others:
            return
        gc.collect()  # an autograd graph in a reference cycle may wait for the collector
        time.sleep(pause)  # autograd's thread lets go of the last gradients just after backward()

    raise NotRepeatable(
        f"it changes or keeps {others} tensors that are neither among its arguments "
        "nor among its results"
    )


def _refuse_seed(*_: Any) -> None:
    """Stands in for the setting of the random seed in a trace, and raises NotRepeatable."""
    raise NotRepeatable(
        "it sets the random state, as torch_xla.utils.checkpoint does, so a repeated program would "
        "draw the numbers of the traced call (recompute in a Function that keeps dropout's masks "
        "or seeds)"
    )
