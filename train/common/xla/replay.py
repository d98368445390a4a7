"""Starts a compiled step again without tracing it, as `jax.jit` does.

torch_xla runs a step's Python in every call, only to find that it has compiled this program already. For BERT-base's
pretraining step that takes longer than the step on a v5e does (docs/compile.md). `Trace` looks at one such
call: which of the program's inputs are the arguments' tensors, which of these it replaces, and what it returns. A
`Program` then starts the compiled program at once on what these tensors are now. It rests on what torch_xla's own
bridge to torch.compile uses (torch_xla/_dynamo/dynamo_bridge.py).
"""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

_XLAC = torch_xla._XLAC

_fixed: set[int] = set()  # handles of data that never changes


def fix(tensors: list[Tensor]) -> None:
    """Declares that nothing ever changes these tensors on the device, which live as long as the process."""
    _fixed.update(_XLAC._get_tensors_handle(tensors))


class NotRepeatable(Exception):
    """Why a step must be traced in every call."""


class _Identity:
    """Compares an object by identity, without keeping it alive."""

    def __init__(self, value: Any):
        try:
            self._value = weakref.ref(value)
        except TypeError:  # a type without weak references
            self._value = lambda: value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Identity) and self._value() is other._value() is not None


class _Anything:
    """Equals every fact: in place of one that the step itself changes, such as a count of steps."""

    def __eq__(self, other: Any) -> bool:
        return True


class Arguments:
    """What a step is called with; two calls with equal `facts` are the same program."""

    def __init__(self, args: Any):
        # Each once: also a module's parameters, gradients, buffers and `on_device()`, and an optimizer's state.
        self.tensors: list[Tensor] = []
        self.facts: list[Any] = [torch.is_grad_enabled()]  # all else that the trace may depend on
        self.groups: list[dict] = []  # the optimizers' groups whose learning rate is a Python number
        self._places: dict[int, int] = {}
        self._walk(args)

    def _walk(self, value: Any) -> None:
        if isinstance(value, Tensor):
            place = self._places.setdefault(id(value), len(self.tensors))
            if place == len(self.tensors):
                self.tensors.append(value)
            self.facts.append((place, value.requires_grad, value.device))
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                self.facts.append(key)
                self._walk(part)
        elif isinstance(value, tuple | list):
            self.facts.append(len(value))
            for part in value:
                self._walk(part)
        elif value is None or isinstance(value, bool | int | float | str):
            self.facts.append(value)
        else:
            self.facts.append(_Identity(value))

    def _module(self, module: nn.Module) -> None:
        self.facts.append(_Identity(module))
        for part in module.modules():
            self.facts.append(part.training)
            if hasattr(type(part), "on_device"):
                for tensor in part.on_device().values():
                    self._walk(tensor)
        for parameter in module.parameters():
            self._walk(parameter)
            self._walk(parameter.grad)
        for buffer in module.buffers():
            self._walk(buffer)

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.facts.append(_Identity(optimizer))
        for group in optimizer.param_groups:
            for key, value in group.items():
                if key == "lr" and isinstance(value, float):
                    self.groups.append(group)
                elif key != "params":
                    self._state(value)
            for parameter in group["params"]:
                self._walk(parameter)
                for key, value in optimizer.state.get(parameter, {}).items():
                    self.facts.append(key)
                    self._state(value)

    def _state(self, value: Any) -> None:
        """A count of steps may be on the host; the second trace finds a step that computes with it."""
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            value = value.item()
        self._walk(value)


def _ids(tensors: list[Tensor]) -> list[int]:
    return [_XLAC._xla_get_tensor_id(tensor) for tensor in tensors]


def _put(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Gives tensors the data of others, without a copy: below PyTorch's functionalization, torch_xla's tensors point to
    it from now on, and with them all views and detached copies."""
    if tensors:
        below = torch._from_functional_tensor
        torch._foreach_copy_([below(tensor) for tensor in tensors], [below(value) for value in values])


_SEED = "the seed of random numbers"


@dataclass(frozen=True)
class _Rate:
    """A learning rate, of Arguments.groups, with a sign: optimizers subtract."""

    group: int
    sign: int
    dtype: torch.dtype


@dataclass
class Program:
    """A compiled step; see `Trace.program`."""

    graph: bytes  # torch_xla's name of it
    inputs: list[int | Tensor | _Rate | str]  # a place among the arguments' tensors, a constant, a rate, or _SEED
    constants: list[Tensor]  # the values of the tensors in `inputs`, on the host
    updated: list[int]  # places of the tensors that its first outputs replace
    leaves: list[tuple[str, Any]]  # of its result: ("output", number), ("argument", place) or ("value", value)
    structure: pytree.TreeSpec  # of its result
    facts: list[Any]

    def same_as(self, other: "Program") -> bool:
        """Returns whether two traces of one graph gave one program, with the same numbers in it."""
        ours, theirs = ([x for x in each.inputs if not isinstance(x, Tensor)] for each in (self, other))
        return ours == theirs and all(map(torch.equal, self.constants, other.constants))

    def start(self, arguments: Arguments, traced: list[Tensor] | None = None) -> list[Tensor]:
        """Starts the program and puts what it replaces in place; returns all of its outputs, not computed yet.

        Args:
            traced: the values of `inputs`, right after a trace, when the arguments' tensors are those to be computed.
        """
        device = str(torch_xla.device())
        inputs = []
        for place, what in enumerate(self.inputs):
            if isinstance(what, _Rate):
                rate = what.sign * arguments.groups[what.group]["lr"]
                what = torch.tensor(rate, dtype=what.dtype).to(device)
            elif traced is not None:
                what = traced[place]
            elif what is _SEED:
                what = _XLAC._get_base_seed_as_tensor(device)
            elif isinstance(what, int):
                what = arguments.tensors[what]
            inputs.append(what)
        outputs = _XLAC._run_cached_graph(self.graph, inputs)
        _put([arguments.tensors[place] for place in self.updated], outputs[: len(self.updated)])
        return outputs

    def __call__(self, arguments: Arguments) -> Any:
        outputs = self.start(arguments)
        # What torch_xla.sync() does after a step, which would wait for this one to be started.
        xm.set_rng_state((1012031 + 7012063 * _XLAC._xla_get_rng_seed()) % 2**64)
        tensors = {"output": outputs, "argument": arguments.tensors}
        leaves = [tensors[kind][value] if kind in tensors else value for kind, value in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)


class Trace:
    """One call of a step, traced but not run: `with Trace(arguments, 0) as trace: result = step_fn(*args)`.

    A learning rate that is a Python number becomes an input of the program, since it changes from step to step: the
    step is traced with numbers that occur nowhere else, others for another `again`. (A rate that equals another number
    of the step would share its input, which makes another graph.)
    """

    def __init__(self, arguments: Arguments, again: int):
        self.arguments, self.again = arguments, again
        self.host_reads = 0  # transfers of the values of the program's constants

    def __enter__(self) -> "Trace":
        tensors, groups = self.arguments.tensors, self.arguments.groups
        self._on_device = [place for place, tensor in enumerate(tensors) if tensor.device.type == "xla"]
        on_device = [tensors[place] for place in self._on_device]
        # What `.to(device)` has left on the host is uploaded now, and so has a handle.
        _XLAC._xla_sync_multi(on_device, devices=[], wait=False, sync_xla_data=True)
        self._handle = dict(zip(self._on_device, _XLAC._get_tensors_handle(on_device), strict=True))
        self._old_ids = _ids(on_device)
        self._newest = _XLAC._xla_get_tensor_id(torch.zeros((), device=torch_xla.device()))
        self._rates = [group["lr"] for group in groups]
        self._probes = [0.6180339 + 0.0113 * (self.again % 7) + 0.1307 * number for number in range(len(groups))]
        for group, probe in zip(groups, self._probes, strict=True):
            group["lr"] = probe
        return self

    def __exit__(self, *_) -> None:
        for group, rate in zip(self.arguments.groups, self._rates, strict=True):
            group["lr"] = rate

    def program(self, args: Any, result: Any) -> Program:
        """Returns the program of the trace, compiled (if it is not yet).

        Raises:
            NotRepeatable: with what to change, as the end of a sentence.
        """
        facts, updated = self._facts(Arguments(args)), self._changed()
        pending = [self.arguments.tensors[place] for place in updated]
        if not all(_XLAC._check_tensor_need_materialization(pending)):
            raise NotRepeatable("it assigns one of its arguments' tensors to another without computing anything")
        results, structure = pytree.tree_flatten(result)
        leaves = self._leaves(results, pending)
        numbers, self._values = _XLAC._get_tensors_xla_device_data_node(pending)
        inputs = self._inputs(numbers, self._values, updated)
        constants = self._constants(inputs)
        with alias_with_buffer_donor_config():
            graph = _XLAC._get_graph_hash(pending)
            _XLAC._xla_warm_up_cache(pending, [])
        self._pending = pending
        return Program(graph, inputs, constants, updated, leaves, structure, facts)

    def run(self, program: Program) -> None:
        """Runs what was traced; the results of the traced call become its outputs."""
        outputs = program.start(self.arguments, self._values)
        _put(self._pending[len(program.updated) :], outputs[len(program.updated) :])

    def _facts(self, after: Arguments) -> list[Any]:
        """Returns the arguments' facts without those that the step itself changes."""
        before, tensors = self.arguments.facts, self.arguments.tensors
        shapes = [list(tensor.shape) for tensor in tensors if tensor.device.type != "xla"]
        if shapes:
            raise NotRepeatable(f"a tensor {shapes[0]} among its arguments is not on the device")
        if len(after.facts) != len(before) or len(after.tensors) != len(tensors):
            raise NotRepeatable("it leaves gradients or makes state (device.init_optimizer_state, zero_grad)")
        return [old if old == new else _Anything() for old, new in zip(before, after.facts, strict=True)]

    def _changed(self) -> list[int]:
        """Returns the places of the arguments' tensors that the step has changed."""
        tensors = [self.arguments.tensors[place] for place in self._on_device]
        pending = _XLAC._check_tensor_need_materialization(tensors)  # some operations change a tensor in its place
        changes = zip(self._on_device, self._old_ids, _ids(tensors), pending, strict=True)
        return [place for place, old, new, computed in changes if computed or old != new]

    def _leaves(self, results: list[Any], pending: list[Tensor]) -> list[tuple[str, Any]]:
        """Returns what each leaf of the result is; adds those to be computed to `pending`, the outputs."""
        arguments = {id(tensor): place for place, tensor in enumerate(self.arguments.tensors)}
        outputs = {number: place for place, number in enumerate(_ids(pending))}
        leaves: list[tuple[str, Any]] = []
        for leaf in results:
            if not isinstance(leaf, Tensor) or leaf.device.type != "xla":
                leaves.append(("value", leaf))
                continue
            if leaf.requires_grad:
                raise NotRepeatable("it returns a tensor with a gradient function (.detach() it)")
            if id(leaf) in arguments:
                leaves.append(("argument", arguments[id(leaf)]))
                continue
            number = _XLAC._xla_get_tensor_id(leaf)
            if not _XLAC._check_tensor_need_materialization([leaf])[0]:  # a copy: now it is one, of its own memory
                _XLAC._xla_optimization_barrier_([leaf])
            if number not in outputs:
                outputs[number] = len(pending)
                pending.append(leaf)
            leaves.append(("output", outputs[number]))
        self._nothing_else_changed(len(outputs))
        return leaves

    def _nothing_else_changed(self, known: int) -> None:
        device = str(torch_xla.device())
        others = sum(_XLAC._check_device_tensor_need_materialization(device)) - known
        if others:
            gc.collect()  # an autograd graph in a reference cycle may be waiting for the collector
            others = sum(_XLAC._check_device_tensor_need_materialization(device)) - known
        if others:
            others = f"{others} tensors that are neither among its arguments nor among its results"
            raise NotRepeatable(f"it changes or keeps {others}")

    def _inputs(self, numbers: list[int], values: list[Tensor], updated: list[int]) -> list[Any]:
        """Returns what each input of the program is: a place, the seed, or the tensor of a constant."""
        places: dict[int, list[int]] = {}
        for place, handle in self._handle.items():
            places.setdefault(handle, []).append(place)
        inputs: list[Any] = []
        for number, value, handle in zip(numbers, values, _XLAC._get_tensors_handle(values), strict=True):
            known = places.get(handle, [])
            if len(known) > 1:
                raise NotRepeatable("two of its arguments are copies of one tensor")
            if known:
                inputs.append(known[0])
                _XLAC._set_buffer_donation(value, known[0] in updated)
            elif number == _XLAC._get_seed_info_id():
                inputs.append(_SEED)
            elif number == -1 or number > self._newest or handle in _fixed:  # a number, or a tensor made in the step
                inputs.append(value)
            else:
                shape = list(value.shape)
                raise NotRepeatable(
                    f"it reads a tensor {shape} that is not among its arguments: pass it, or its module"
                )
        return inputs

    def _constants(self, inputs: list[Any]) -> list[Tensor]:
        """Returns the values of the constants among `inputs`, and puts learning rates in place of the probes."""
        places = [place for place, what in enumerate(inputs) if isinstance(what, Tensor)]
        if not places:
            return []
        constants = []
        self.host_reads += 1
        for place, value in zip(places, _XLAC._xla_get_cpu_tensors([inputs[place] for place in places]), strict=True):
            rate = self._rate(value)
            if rate is None:
                constants.append(value)
            else:
                inputs[place] = rate
        return constants

    def _rate(self, value: Tensor) -> _Rate | None:
        if value.dim() == 0 and value.is_floating_point():
            for group, probe in enumerate(self._probes):
                for sign in (1, -1):
                    if value == torch.tensor(sign * probe, dtype=value.dtype):
                        return _Rate(group, sign, value.dtype)
        return None
