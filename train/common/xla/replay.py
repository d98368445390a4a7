"""Runs a compiled step again without tracing it, as `jax.jit` does.

torch_xla runs a step's Python in every call, only to find that it is the program which it has compiled already. For
BERT-base's pretraining step that takes longer than the step on a v5e does (README, "The host's time"). `Trace` looks at
one such call: which of the program's inputs are the arguments' tensors, which of these it replaces, and what it
returns. A `Program` then starts the compiled program at once on what these tensors are now.

What a step changes without an argument or a result of it showing so cannot be repeated; `Trace.program` raises
`NotRepeatable` with the reason, and `device.compiled` goes on tracing. It rests on what torch_xla's own bridge to
torch.compile uses (torch_xla/_dynamo/dynamo_bridge.py).
"""

import gc
import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

_XLAC = torch_xla._XLAC

# Handles of data that never changes, whenever a step reads it.
_fixed: set[int] = set()


def fix(tensors: list[Tensor]) -> None:
    """Says of tensors on the device, which live as long as the process, that nothing ever changes them."""
    _fixed.update(_XLAC._get_tensors_handle(tensors))


class NotRepeatable(Exception):
    """Why a step must be traced in every call."""

    can_undo = True


class ChangesOthers(NotRepeatable):
    """It may have changed what nobody can give back."""

    can_undo = False


class Arguments:
    """What a step is called with.

    Attributes:
        tensors: all of them, each once: of modules parameters, gradients, buffers and what `on_device()` gives
            (embedding.py), of optimizers the state.
        facts: everything else that its trace may depend on; two calls with equal facts are the same program.
        groups: the optimizers' parameter groups whose learning rate is a Python number.
        optimizers: the optimizers.
    """

    def __init__(self, args: Any):
        self.tensors: list[Tensor] = []
        self.facts: list[Any] = [torch.is_grad_enabled()]
        self.groups: list[dict] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._places: dict[int, int] = {}
        self._walk(args)

    def _add(self, tensor: Tensor) -> None:
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        self.facts.append((place, tensor.requires_grad, tensor.device))

    def _walk(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add(value)
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
        elif isinstance(value, bool | int | float | str):
            self.facts.append(value)
        else:
            self.facts.append(_Same(value))

    def _module(self, module: nn.Module) -> None:
        self.facts.append(_Same(module))
        for part in module.modules():
            self.facts.append(part.training)
            if hasattr(type(part), "on_device"):
                for tensor in part.on_device().values():
                    self._add(tensor)
        for parameter in module.parameters():
            self._add(parameter)
            self._walk(parameter.grad)
        for buffer in module.buffers():
            self._add(buffer)

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.facts.append(_Same(optimizer))
        self.optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for key, value in group.items():
                if key == "lr" and isinstance(value, float):
                    self.groups.append(group)
                elif key != "params":
                    self._state(value)
            for parameter in group["params"]:
                self._add(parameter)
                for key, value in optimizer.state.get(parameter, {}).items():
                    self.facts.append(key)
                    self._state(value)

    def _state(self, value: Any) -> None:
        """A count of steps may be on the host; a step that computes with it is found out by the second trace."""
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            self.facts.append(value.item())
        else:
            self._walk(value)


class _Same:
    """An object that only itself equals; it does not keep it alive."""

    def __init__(self, value: Any):
        try:
            self._value = weakref.ref(value)
        except TypeError:  # of None, say, there are no weak references
            self._value = value

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, _Same):
            return False
        if isinstance(self._value, weakref.ref) and isinstance(other._value, weakref.ref):
            return self._value() is other._value() is not None
        return self._value is other._value

    __hash__ = None


def _ids(tensors: list[Tensor]) -> list[int]:
    return [_XLAC._xla_get_tensor_id(tensor) for tensor in tensors]


def _put(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Gives tensors the data of others, without a copy: what torch_xla has below PyTorch's functionalization points to
    it from now on, and with it all views and detached copies."""
    if tensors:
        below = torch._from_functional_tensor
        torch._foreach_copy_([below(tensor) for tensor in tensors], [below(value) for value in values])


def _leaves(result: Any) -> list[Any]:
    if isinstance(result, Mapping):
        return [leaf for part in result.values() for leaf in _leaves(part)]
    if isinstance(result, tuple | list):
        return [leaf for part in result for leaf in _leaves(part)]
    return [result]


def _rebuilt(result: Any, leaves) -> Any:
    """The structure of a result with other leaves, an iterator."""
    if isinstance(result, Mapping):
        return {key: _rebuilt(part, leaves) for key, part in result.items()}
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(_rebuilt(part, leaves) for part in result))
    if isinstance(result, tuple | list):
        return type(result)(_rebuilt(part, leaves) for part in result)
    return next(leaves)


# What an input of a program is, besides a place among the arguments' tensors and a constant (a tensor).
@dataclass(frozen=True)
class _Seed:
    """The seed of random numbers."""


@dataclass(frozen=True)
class _Rate:
    """A learning rate, of Arguments.groups, with a sign; optimizers subtract."""

    group: int
    sign: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Leaf:
    """A leaf of a result: one of the program's outputs, one of the arguments' tensors, or a value."""

    output: int | None = None
    place: int | None = None
    value: Any = None


@dataclass
class Program:
    """A compiled step; see `Trace.program`."""

    graph: bytes  # torch_xla's name of it
    inputs: list[int | Tensor | _Seed | _Rate]
    updated: list[int]  # places of the tensors that its first outputs replace
    leaves: list[_Leaf]
    result: Any  # of the traced call, for its structure
    facts: list[Any]
    moving: frozenset[int]  # places of facts that the step itself changes, such as a count of steps
    constants: list[Tensor]  # the values of those of `inputs`, on the host

    def fits(self, arguments: Arguments) -> bool:
        """Whether a call with these arguments is this program."""
        if self.facts == arguments.facts:
            return True
        if len(self.facts) != len(arguments.facts):
            return False
        pairs = zip(self.facts, arguments.facts, strict=True)
        return all(ours == theirs or place in self.moving for place, (ours, theirs) in enumerate(pairs))

    def same_as(self, other: "Program") -> bool:
        """Whether two traces gave one program, with the same numbers in it."""
        return (
            self.graph == other.graph
            and [x for x in self.inputs if not isinstance(x, Tensor)]
            == [x for x in other.inputs if not isinstance(x, Tensor)]
            and len(self.constants) == len(other.constants)
            and all(torch.equal(a, b) for a, b in zip(self.constants, other.constants, strict=True))
        )

    def start(self, arguments: Arguments, traced: list[Tensor] | None = None) -> list[Tensor]:
        """Starts it and puts what it replaces in place: all of its outputs, not computed yet.

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
            elif isinstance(what, _Seed):
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
        seed = (1012031 + 7012063 * _XLAC._xla_get_rng_seed()) % 2**64
        xm.set_rng_state(seed)
        leaves = (
            outputs[leaf.output]
            if leaf.output is not None
            else arguments.tensors[leaf.place]
            if leaf.place is not None
            else leaf.value
            for leaf in self.leaves
        )
        return _rebuilt(self.result, leaves)


class Trace:
    """One call of a step, traced but not run: `with Trace(arguments, 0) as trace: result = step_fn(*args)`.

    A learning rate that is a Python number becomes an input of the program, since it changes from step to step: the
    step is traced with numbers that occur nowhere else, others for another `again`.
    """

    def __init__(self, arguments: Arguments, again: int):
        self.arguments, self.again = arguments, again

    def __enter__(self) -> "Trace":
        tensors, groups = self.arguments.tensors, self.arguments.groups
        on_device = [place for place, tensor in enumerate(tensors) if tensor.device.type == "xla"]
        # What `.to(device)` has left on the host is uploaded now, and so has a handle.
        _XLAC._xla_sync_multi([tensors[i] for i in on_device], devices=[], wait=False, sync_xla_data=True)
        self._handle = dict(zip(on_device, _XLAC._get_tensors_handle([tensors[i] for i in on_device]), strict=True))
        self._places: dict[int, list[int]] = {}
        for place, handle in self._handle.items():
            self._places.setdefault(handle, []).append(place)
        if groups:  # for `undo`
            data = _XLAC._get_tensors_xla_device_data_node([tensors[i] for i in on_device])[1]
            self._before = dict(zip(_XLAC._get_tensors_handle(data), data, strict=True))
        self._old_ids = _ids([tensors[i] for i in on_device])
        self._on_device = on_device
        self._newest = _XLAC._xla_get_tensor_id(torch.zeros((), device=torch_xla.device()))
        self._rates = [group["lr"] for group in groups]
        self._seed = _XLAC._xla_get_rng_seed()
        self._gradients = [tensor.grad if tensor.requires_grad else None for tensor in tensors]
        self._states = [{p: dict(state) for p, state in o.state.items()} for o in self.arguments.optimizers]
        self._probes = [0.6180339 + 0.0113 * (self.again % 7) + 0.1307 * number for number in range(len(groups))]
        for group, probe in zip(groups, self._probes, strict=True):
            group["lr"] = probe
        return self

    def __exit__(self, *_) -> None:
        for group, rate in zip(self.arguments.groups, self._rates, strict=True):
            group["lr"] = rate

    def undo(self) -> None:
        """Gives tensors, gradients and the optimizers' state back what they were before the trace."""
        tensors = self.arguments.tensors
        changed = self._changed()
        _put([tensors[place] for place in changed], [self._before[self._handle[place]] for place in changed])
        for place in changed:
            _XLAC._set_buffer_donation(tensors[place], False)
        xm.set_rng_state(self._seed)
        for tensor, gradient in zip(tensors, self._gradients, strict=True):
            if tensor.requires_grad:
                tensor.grad = gradient
        for optimizer, states in zip(self.arguments.optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(states)

    def _changed(self) -> list[int]:
        tensors = [self.arguments.tensors[place] for place in self._on_device]
        pending = _XLAC._check_tensor_need_materialization(tensors)  # some operations change a tensor in its place
        changes = zip(self._on_device, self._old_ids, _ids(tensors), pending, strict=True)
        return [place for place, old, new, computed in changes if computed or old != new]

    def program(self, args: Any, result: Any) -> Program:
        """The program of the trace, compiled (if it is not yet).

        Raises:
            NotRepeatable: with what to change, as the end of a sentence.
        """
        tensors = self.arguments.tensors
        if len(self._on_device) < len(tensors):
            shape = next(list(t.shape) for t in tensors if t.device.type != "xla")
            raise NotRepeatable(f"a tensor {shape} among its arguments is not on the device")
        after = Arguments(args)
        if len(after.facts) != len(self.arguments.facts) or len(after.tensors) != len(tensors):
            raise NotRepeatable("it leaves gradients or makes state (device.init_optimizer_state, zero_grad)")
        facts = zip(self.arguments.facts, after.facts, strict=True)
        moving = frozenset(place for place, (old, new) in enumerate(facts) if old != new)

        updated = self._changed()
        needed = _XLAC._check_tensor_need_materialization([tensors[place] for place in updated])
        if not all(needed):
            raise NotRepeatable("it assigns one of its arguments' tensors to another without computing anything")
        pending = [tensors[place] for place in updated]
        outputs = {number: place for place, number in enumerate(_ids(pending))}
        leaves: list[_Leaf] = []
        for leaf in _leaves(result):
            if not isinstance(leaf, Tensor) or leaf.device.type != "xla":
                leaves.append(_Leaf(value=leaf))
                continue
            if leaf.requires_grad:
                raise NotRepeatable("it returns a tensor with a gradient function (.detach() it)")
            number = _XLAC._xla_get_tensor_id(leaf)
            same = [place for place, tensor in enumerate(tensors) if tensor is leaf]
            if same:
                leaves.append(_Leaf(place=same[0]))
            else:
                if not _XLAC._check_tensor_need_materialization([leaf])[0]:  # a copy: now it is one, of its own memory
                    _XLAC._xla_optimization_barrier_([leaf])
                if number not in outputs:
                    outputs[number] = len(pending)
                    pending.append(leaf)
                leaves.append(_Leaf(output=outputs[number]))
        self._nothing_else_changed(len(outputs))

        numbers, values = _XLAC._get_tensors_xla_device_data_node(pending)
        inputs: list[int | Tensor | _Seed | _Rate] = []
        constants = []
        for number, value, handle in zip(numbers, values, _XLAC._get_tensors_handle(values), strict=True):
            places = self._places.get(handle, [])
            if len(places) > 1:
                raise NotRepeatable("two of its arguments are copies of one tensor")
            if places:
                inputs.append(places[0])
                _XLAC._set_buffer_donation(value, places[0] in updated)
            elif number == _XLAC._get_seed_info_id():
                inputs.append(_Seed())
            elif number == -1 or number > self._newest or handle in _fixed:  # a number, or a tensor made in the step
                constants.append(len(inputs))
                inputs.append(value)
            else:
                raise NotRepeatable(
                    f"it reads a tensor {list(value.shape)} that is not among its arguments: pass it, or its module"
                )
        on_host = _XLAC._xla_get_cpu_tensors([inputs[place] for place in constants]) if constants else []
        kept = []
        for place, value in zip(constants, on_host, strict=True):
            rate = self._rate(value)
            if rate is None:
                kept.append(value)
            else:
                inputs[place] = rate
        with alias_with_buffer_donor_config():
            graph = _XLAC._get_graph_hash(pending)
            _XLAC._xla_warm_up_cache(pending, [])
        structure = _rebuilt(result, itertools.repeat(None))
        self._pending, self._values = pending, values
        return Program(graph, inputs, updated, leaves, structure, self.arguments.facts, moving, kept)

    def run(self, program: Program) -> None:
        """Runs what was traced; the results of the traced call become its outputs."""
        outputs = program.start(self.arguments, self._values)
        _put(self._pending[len(program.updated) :], outputs[len(program.updated) :])

    def _rate(self, value: Tensor) -> _Rate | None:
        if value.dim() == 0 and value.is_floating_point():
            for group, probe in enumerate(self._probes):
                for sign in (1, -1):
                    if value == torch.tensor(sign * probe, dtype=value.dtype):
                        return _Rate(group, sign, value.dtype)
        return None

    def _nothing_else_changed(self, known: int) -> None:
        device = str(torch_xla.device())
        for collect in (False, True):  # an autograd graph in a reference cycle may be waiting for the collector
            if collect:
                gc.collect()
            others = sum(_XLAC._check_device_tensor_need_materialization(device)) - known
            if not others:
                return
        raise ChangesOthers(
            f"it changes or keeps {others} tensors that are neither among its arguments nor among its results"
        )
