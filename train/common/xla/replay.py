"""Starts a compiled step again without tracing it, as `jax.jit` does.

torch_xla runs a step's Python in every call, only to find that it has compiled this program already: for BERT-base that
takes longer than the step on a v5e does (docs/compile.md). `Trace` looks at one such call: which of the program's
inputs are the arguments' tensors, which of these it replaces, and what it returns. A `Program` then starts it at once
on what these tensors are now. It rests on what torch_xla's own bridge to torch.compile uses (_dynamo/dynamo_bridge.py).
"""

import gc
import time
import weakref
from collections import namedtuple
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

fixed: dict[int, Tensor] = {}  # what nothing ever changes, by its handle; kept, or another tensor could get the handle


class NotRepeatable(Exception):
    """Why a step cannot be started again without a trace, and what to change, as the end of a sentence."""


class Arguments:
    """What a step is called with; two calls with equal `inputs` and `facts` are the same program."""

    def __init__(self, args: Sequence[Any]):
        # Each once: also a module's parameters, gradients, buffers and `on_device()`, and an optimizer's state.
        self.tensors: list[Tensor] = []
        self.inputs: dict[str, Any] = {}  # what a user has given, by name: shapes and types, modes, numbers
        self.facts: list[Any] = [torch.is_grad_enabled()]  # what else the trace may depend on
        self.groups: list[dict] = []  # the optimizers' groups whose learning rate is a Python number
        self._places: dict[int, int] = {}
        for place, value in enumerate(args):
            self._walk(value, f"argument {place}")

    def _walk(self, value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            self.inputs[name] = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
            self._add(value)
        elif isinstance(value, nn.Module):
            self.inputs[name] = "training" if value.training else "evaluation"
            self._module(value)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                self.facts.append(key)
                self._walk(part, f"{name}[{key!r}]")
        elif isinstance(value, tuple | list):
            fields = [f".{field}" for field in getattr(value, "_fields", ())]
            for field, part in zip(fields or [f"[{place}]" for place in range(len(value))], value, strict=True):
                self._walk(part, name + field)
        elif isinstance(value, bool | int | float | str):
            self.inputs[name] = value
        else:
            self.facts.append(value)

    def _add(self, tensor: Tensor | None) -> None:
        if tensor is None:
            self.facts.append(None)
            return
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        self.facts.append((place, tensor.requires_grad, tensor.device))

    def _module(self, module: nn.Module) -> None:
        self.facts.append(weakref.ref(module))  # a compiled step keeps nothing alive
        for part in module.modules():
            self.facts.append(part.training)
            if hasattr(type(part), "on_device"):
                for tensor in part.on_device().values():
                    self._add(tensor)
        for parameter in module.parameters():
            self._add(parameter)
            self._add(parameter.grad)
        for buffer in module.buffers():
            self._add(buffer)

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.facts.append(weakref.ref(optimizer))
        for group in optimizer.param_groups:
            if isinstance(group["lr"], float):
                self.groups.append(group)
            for parameter in group["params"]:
                self._add(parameter)
            for state in (group, *(optimizer.state.get(parameter, {}) for parameter in group["params"])):
                self._state(state)

    def _state(self, state: dict[str, Any]) -> None:
        """Adds an optimizer's values without its counts of steps on the host: the second trace finds a step that
        computes with them."""
        for key, value in state.items():
            if isinstance(value, Tensor) and (key != "step" or value.device.type == "xla"):
                self._add(value)
            elif key not in ("params", "step") and not (key == "lr" and isinstance(value, float)):
                self.facts.append((key, value))


def _ids(tensors: list[Tensor]) -> list[int]:
    return [_XLAC._xla_get_tensor_id(tensor) for tensor in tensors]


_Rate = namedtuple("_Rate", "group sign dtype")  # a learning rate of Arguments.groups; optimizers subtract: sign -1


@dataclass
class Program:
    """A compiled step; see `Trace.start`."""

    graph: bytes  # torch_xla's name of it
    inputs: list[int | _Rate | Tensor | None]  # a place among the arguments, a rate, a constant; None: the seed
    constants: list[Tensor]  # the values of the tensors in `inputs`, on the host
    updated: list[int]  # places of the tensors that its first outputs replace
    leaves: list[tuple[str, Any]]  # of its result: ("output", number), ("argument", place) or ("value", value)
    structure: pytree.TreeSpec  # of its result
    facts: list[Any]

    def same_as(self, other: "Program") -> bool:
        """Returns whether two traces of one graph gave one program, with the same numbers in it."""
        ours, theirs = ([x for x in each.inputs if not isinstance(x, Tensor)] for each in (self, other))
        pairs = zip(self.constants, other.constants, strict=False)
        return ours == theirs and all(torch.isclose(*pair, rtol=0, atol=0, equal_nan=True).all() for pair in pairs)

    def start(self, arguments: Arguments, traced: list[Tensor] | None = None) -> Any:
        """Starts the program and puts what it replaces in place; returns the step's result, not computed yet. `traced`
        are the values of `inputs` right after a trace, when the arguments' tensors are those to be computed."""
        device = str(torch_xla.device())
        inputs = []
        for place, what in enumerate(self.inputs):
            if isinstance(what, _Rate):
                rate = what.sign * arguments.groups[what.group]["lr"]
                what = torch.tensor(rate, dtype=what.dtype).to(device)
            elif traced is not None:
                what = traced[place]
            elif what is None:
                what = _XLAC._get_base_seed_as_tensor(device)
            elif isinstance(what, int):
                what = arguments.tensors[what]
            inputs.append(what)
        for watcher in hooks.watchers:
            watcher.started(self.graph)
        outputs = _XLAC._run_cached_graph(self.graph, inputs)
        # Below PyTorch's functionalization, torch_xla's tensors point to the outputs from now on, without a copy, and
        # with them all views and detached copies.
        replaced = zip((arguments.tensors[place] for place in self.updated), outputs, strict=False)
        below = [[torch._from_functional_tensor(tensor) for tensor in pair] for pair in replaced]
        if below:
            torch._foreach_copy_(*zip(*below, strict=True))
        tensors = {"output": outputs, "argument": arguments.tensors}
        leaves = [tensors[kind][value] if kind in tensors else value for kind, value in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)

    def __call__(self, arguments: Arguments) -> Any:
        result = self.start(arguments)
        # What torch_xla.sync() does after a step, which would wait for this one to be started.
        xm.set_rng_state((1012031 + 7012063 * _XLAC._xla_get_rng_seed()) % 2**64)
        return result


class Trace:
    """One call of a step, traced but not run, and then started: `Trace(args, …).start(step)`.

    A learning rate that is a Python number becomes an input of the program, since it changes from step to step: the
    step is traced with numbers that occur nowhere else, others for another `again`. (A rate that equals another number
    of the step would share its input, which makes another graph.)
    """

    host_reads = 0  # of the process: transfers of the values of programs' constants

    def __init__(self, args: Sequence[Any], arguments: Arguments, again: int):
        self.args, self.arguments = args, arguments
        for tensor in arguments.tensors:
            if tensor.device.type != "xla":
                raise NotRepeatable(f"a tensor {list(tensor.shape)} among its arguments is not on the device")
        # What `.to(device)` has left on the host is uploaded now, and so has a handle.
        _XLAC._xla_sync_multi(arguments.tensors, devices=[], wait=False, sync_xla_data=True)
        self._handles, self._old_ids = _XLAC._get_tensors_handle(arguments.tensors), _ids(arguments.tensors)
        self._newest = _XLAC._xla_get_tensor_id(torch.zeros((), device=torch_xla.device()))
        self._probes = [0.6180339 + 0.0113 * (again % 7) + 0.1307 * number for number in range(len(arguments.groups))]

    def start(self, step: Callable[[Sequence[Any]], Any]) -> tuple[Program, Any]:
        """Calls `step` with the arguments and the probes as learning rates, compiles its program (if it is not yet) and
        starts it; returns the program and the step's result, or raises NotRepeatable."""
        rates, set_seed = [group["lr"] for group in self.arguments.groups], _XLAC._xla_set_rng_seed
        try:
            for group, probe in zip(self.arguments.groups, self._probes, strict=True):
                group["lr"] = probe
            _XLAC._xla_set_rng_seed = _refuse_seed
            # Nobody else may hold the results: what they are views of must be free when they are taken one by one.
            results, structure = pytree.tree_flatten(step(self.args))
        finally:
            for group, rate in zip(self.arguments.groups, rates, strict=True):
                group["lr"] = rate
            _XLAC._xla_set_rng_seed = set_seed
        tensors = self.arguments.tensors
        if Arguments(self.args).facts != self.arguments.facts:
            made = "it leaves gradients, makes state, or changes a Python value among its arguments"
            raise NotRepeatable(f"{made} (device.init_optimizer_state, zero_grad)")
        # Some operations change a tensor in its place, others give it another id.
        computed = zip(_XLAC._check_tensor_need_materialization(tensors), _ids(tensors), self._old_ids, strict=True)
        updated = [place for place, (pending, new, old) in enumerate(computed) if pending or new != old]
        pending = [tensors[place] for place in updated]
        if not all(_XLAC._check_tensor_need_materialization(pending)):
            raise NotRepeatable("it assigns one of its arguments' tensors to another without computing anything")
        leaves = self._leaves(results, pending)
        numbers, values = _XLAC._get_tensors_xla_device_data_node(pending)
        inputs = self._inputs(numbers, values, updated)
        constants = self._constants(inputs)
        with alias_with_buffer_donor_config():
            graph = _XLAC._get_graph_hash(pending)
            for watcher in hooks.watchers:
                watcher.traced(graph, lambda: _XLAC._get_xla_tensors_hlo_proto(pending))
            _XLAC._xla_warm_up_cache(pending, [])
        program = Program(graph, inputs, constants, updated, leaves, structure, self.arguments.facts)
        return program, program.start(self.arguments, values)

    def _leaves(self, results: list[Any], pending: list[Tensor]) -> list[tuple[str, Any]]:
        """Returns what each leaf of the result is; moves those to be computed to `pending`, the outputs."""
        arguments = {id(tensor): place for place, tensor in enumerate(self.arguments.tensors)}
        outputs = {number: place for place, number in enumerate(_ids(pending))}
        leaves: list[tuple[str, Any]] = []
        while results:
            leaf = results.pop(0)
            if not isinstance(leaf, Tensor) or leaf.device.type != "xla":
                leaves.append(("value", leaf))
                continue
            if leaf.requires_grad:
                raise NotRepeatable("it returns a tensor with a gradient function (.detach() it)")
            if id(leaf) in arguments:
                leaves.append(("argument", arguments[id(leaf)]))
                continue
            torch._sync(leaf)
            leaf = torch._from_functional_tensor(leaf)  # without what it is a view of
            number = _XLAC._xla_get_tensor_id(leaf)
            if not _XLAC._check_tensor_need_materialization([leaf])[0]:  # a copy: now it is one, of its own memory
                _XLAC._xla_optimization_barrier_([leaf])
            if number not in outputs:
                outputs[number] = len(pending)
                pending.append(leaf)
            leaves.append(("output", outputs[number]))
        for pause in (0, 0.01, 0.1, 1, 0):
            others = sum(_XLAC._check_device_tensor_need_materialization(str(torch_xla.device()))) - len(outputs)
            if not others:
                break
            gc.collect()  # an autograd graph in a reference cycle may be waiting for the collector
            time.sleep(pause)  # and autograd's thread lets go of the last gradients a moment after backward()
        if others:
            unknown = "tensors that are neither among its arguments nor among its results"
            raise NotRepeatable(f"it changes or keeps {others} {unknown}")
        return leaves

    def _inputs(self, numbers: list[int], values: list[Tensor], updated: list[int]) -> list[Any]:
        """Returns what each input of the program is: a place, None for the seed, or the tensor of a constant."""
        inputs: list[Any] = []
        for number, value, handle in zip(numbers, values, _XLAC._get_tensors_handle(values), strict=True):
            known = [place for place, other in enumerate(self._handles) if other == handle]
            if len(known) > 1:
                raise NotRepeatable("two of its arguments are copies of one tensor")
            if known:
                inputs.append(known[0])
                _XLAC._set_buffer_donation(value, known[0] in updated)
            elif number == _XLAC._get_seed_info_id():
                inputs.append(None)
            elif number == -1 or number > self._newest or handle in fixed:  # a number, or a tensor made in the step
                inputs.append(value)
            else:
                unknown = f"a tensor {list(value.shape)} that is not among its arguments"
                raise NotRepeatable(f"it reads {unknown}: pass it, or its module")
        return inputs

    def _constants(self, inputs: list[Any]) -> list[Tensor]:
        """Returns the values of the constants among `inputs`, and puts learning rates in place of the probes."""
        places = [place for place, what in enumerate(inputs) if isinstance(what, Tensor)]
        if not places:
            return []
        Trace.host_reads += 1
        constants = _XLAC._xla_get_cpu_tensors([inputs[place] for place in places])
        for place, value in zip(places, constants, strict=True):
            inputs[place] = self._rate(value) or inputs[place]
        return [value for place, value in zip(places, constants, strict=True) if isinstance(inputs[place], Tensor)]

    def _rate(self, value: Tensor) -> _Rate | None:
        if value.dim() == 0 and value.is_floating_point():
            for group, probe in enumerate(self._probes):
                for sign in (1, -1):
                    if value == torch.tensor(sign * probe, dtype=value.dtype):
                        return _Rate(group, sign, value.dtype)
        return None


def _refuse_seed(*_: Any) -> None:
    setting = (
        "it sets the random state, as torch_xla.utils.checkpoint does, so a repeated program would draw the numbers"
    )
    raise NotRepeatable(f"{setting} of the traced call (recompute in a Function that keeps dropout's masks or seeds)")
