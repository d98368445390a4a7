"""The compiled step: one XLA graph per call, held to a contract, and the report of what steps have compiled."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch_xla
import torch_xla.debug.metrics as met
from torch import Tensor, nn

from train.common.device import GraphError
from train.common.xla import replay


def compilations() -> int:
    """Returns how many graphs this process has compiled."""
    return met.counter_value("UncachedCompile") or 0


class GraphReport:
    """What the steps of a process have compiled, as `summary` lists it."""

    def __init__(self):
        self.constant_reads = 0  # transfers to the host that look at a new program's constants
        self.reset()

    def reset(self) -> None:
        """Starts again; the counts of graphs and host reads, which are of the process, continue."""
        self.compile_seconds, self.traced, self.repeated = 0.0, 0, 0
        self.recompilations, self.fallbacks, self.not_repeatable = [], [], []

    def host_reads(self) -> int:
        """Returns how many transfers from the device to the host there were, without `constant_reads`."""
        data = met.metric_data("TransferFromDeviceTime")
        return (data[0] if data else 0) - self.constant_reads

    def summary(self) -> dict[str, Any]:
        """Returns `graphs` (all of the process), `compile_seconds` of the calls that compiled, `recompilations` (a
        sentence each), `fallbacks` (operations that ran on the host), `host_reads`, calls `traced` and `repeated`, and
        why a step is `not_repeatable` (a sentence each)."""
        return {
            "graphs": compilations(),
            "compile_seconds": self.compile_seconds,
            "recompilations": [*self.recompilations],
            "fallbacks": [*self.fallbacks],
            "host_reads": self.host_reads(),
            "traced": self.traced,
            "repeated": self.repeated,
            "not_repeatable": [*self.not_repeatable],
        }


class State(Enum):
    """What is known about the calls with one set of input shapes."""

    NEW = "not traced yet"
    TRACED = "traced once"
    CONFIRMED = "traced twice, to the same program: it starts without a trace"
    GAVE_UP = "traced in every call"


@dataclass
class _Calls:
    """The calls with one set of input shapes."""

    inputs: dict[str, Any]  # of the first
    state: State
    count: int = 0  # the present one included
    program: replay.Program | None = None


class CompiledStep:
    """A step that is one XLA graph per call, held to its contract.

    The first call with new input shapes traces and compiles; the second must trace the same program. From then on the
    program starts at once, without running `step_fn` (replay.py): as under `jax.jit`, what its Python does besides is
    not repeated. Every `check_every`-th call traces it again, and so does each call with other modules, optimizers or
    numbers among its arguments. A step that reads or changes other tensors is traced in every call, and a note says so.
    What breaks the contract stops a strict step, because each makes a TPU crawl unnoticed:

    * more than `max_graphs` different input shapes: stops before it compiles, and names the input and both shapes;
    * another graph although the shapes are known: names what can cause it;
    * a value read in the middle of the step (`.item()`, `if tensor:`), or an operation that falls back to the host.

    A step that is not strict warns instead. It may read values in its middle, so it is traced in every call.

    Args:
        step_fn: takes modules, optimizers, tensors, dicts of tensors and numbers; returns tensors or a dict of them.
            Gradients must not outlive it (`zero_grad(set_to_none=True)`): live tensors are outputs of the graph.
        max_graphs: how many different input shapes are expected: 1, or the number of length buckets.
    Raises:
        GraphError: a call breaks the contract.
    """

    def __init__(
        self, step_fn: Callable, strict: bool, report: GraphReport, max_graphs: int = 1, check_every: int = 1000
    ):
        self.name = getattr(step_fn, "__name__", "step")
        self._step_fn, self._strict, self._report = step_fn, strict, report
        self._max_graphs, self._check_every = max_graphs, check_every
        self._known: dict[tuple, _Calls] = {}
        self._first_state = State.NEW if strict else State.GAVE_UP
        self._strays = 0  # calls in a row before which something else was compiled

    def __call__(self, *args: Any) -> Any:
        self._sync_pending()
        inputs = dict(_describe(args))
        shapes = tuple((name, value) for name, value in inputs.items() if not isinstance(value, float))
        calls = self._known.get(shapes) or self._new_calls(inputs)
        arguments = None if calls.state is State.GAVE_UP else replay.Arguments(args)
        calls.count += 1
        confirmed = calls.state is State.CONFIRMED and calls.program.facts == arguments.facts
        if confirmed and (calls.count - 1) % self._check_every:
            self._report.repeated += 1
            return calls.program(arguments)
        self._report.traced += 1
        graphs, started = compilations(), time.perf_counter()
        result = self._run(args) if arguments is None else self._trace(args, arguments, calls)
        torch_xla.sync()
        if compilations() > graphs:
            self._report.compile_seconds += time.perf_counter() - started
            if shapes in self._known:
                self._compiled_again(calls.inputs, inputs)
        self._known[shapes] = calls
        return result

    def _sync_pending(self) -> None:
        """Runs pending operations, which must not become part of the step's graph."""
        graphs = compilations()
        torch_xla.sync()
        self._strays = self._strays + 1 if self._known and compilations() > graphs else 0
        if self._strays == 3:
            self._recompiled(
                f"operations outside of {self.name} were compiled before three calls in a row: move them into it, or "
                "give them inputs of a constant shape"
            )

    def _new_calls(self, inputs: dict[str, Any]) -> _Calls:
        if len(self._known) >= self._max_graphs:
            known = [calls.inputs for calls in self._known.values()]
            self._recompiled(f"{self.name} would be compiled again: {_difference(inputs, known)}")
        if not self._strict and not self._known:
            reason = "--no-strict lets it read values in its middle, which a repeated program would not do"
            print(f"note: {self.name} is traced in every call: {reason}", flush=True)
        return _Calls(inputs, self._first_state)

    def _recompiled(self, message: str) -> None:
        self._report.recompilations.append(message)
        if self._strict:
            raise GraphError(message + "; --no-strict makes this a warning")
        print(f"warning: {message}", flush=True)

    def _compiled_again(self, first: dict[str, Any], inputs: dict[str, Any]) -> None:
        changed = [f"{name} from {first[name]} to {value}" for name, value in inputs.items() if first[name] != value]
        if changed:
            cause = f"the Python number {', '.join(changed)} changed (give a tensor on the device)"
        else:
            cause = (
                "a Python value or branch inside it changed, or the step itself created state in its first call "
                "(device.init_optimizer_state creates the optimizer's beforehand) or left gradients alive (zero_grad), "
                "or an input was not uploaded by the loader"
            )
        self._recompiled(f"{self.name} was compiled again for known input shapes: {cause}")

    def _run(self, args: Sequence[Any], trace: replay.Trace | None = None) -> Any:
        """Runs the step's Python, which makes the graph."""
        fallbacks = fallback_counts()
        torch_xla._XLAC._set_allow_execution(not self._strict)
        try:
            with trace or contextlib.nullcontext():
                return self._step_fn(*args)
        except RuntimeError as error:
            if "Unexpected execution" not in str(error):
                raise
            raise GraphError(
                f"{self.name} reads a device value before its end (.item(), float(), print, `if` on a tensor), in the "
                "line of the step that the traceback above ends with; keep the value a tensor, or return it"
            ) from error
        finally:
            torch_xla._XLAC._set_allow_execution(True)
            self._check_fallbacks(fallbacks)

    def _check_fallbacks(self, before: dict[str, int]) -> None:
        names = sorted(name for name, count in fallback_counts().items() if count > before.get(name, 0))
        names = [name for name in names if self._strict or name not in self._report.fallbacks]
        if names:
            self._report.fallbacks.extend(names)
            message = f"{self.name} runs {', '.join(names)} on the host, since XLA has no lowering for it"
            if self._strict:
                raise GraphError(message + ": replace it, or use --no-strict")
            print(f"warning: {message}", flush=True)

    def _trace(self, args: Sequence[Any], arguments: replay.Arguments, calls: _Calls) -> Any:
        """Traces the step and runs its program: `calls` become traced, confirmed, or gave up."""
        trace = replay.Trace(arguments, calls.count)
        result = self._run(args, trace)
        try:
            program, known = trace.program(args, result), calls.program
            self._report.constant_reads += trace.host_reads
            same = known is not None and known.graph == program.graph
            if same and not known.same_as(program):
                raise replay.NotRepeatable("a number or tensor that it makes differs from call to call")
            calls.program, calls.state = program, State.CONFIRMED if same else State.TRACED
            trace.run(program)
            return result
        except replay.NotRepeatable as reason:
            if arguments.groups:  # its results are those of other learning rates
                raise GraphError(
                    f"{self.name} has a learning rate that is a Python number, and cannot be repeated: {reason}; "
                    "change that, or use --no-strict"
                ) from reason
            self._give_up(reason, calls)
            return result

    def _give_up(self, reason: replay.NotRepeatable, calls: _Calls) -> None:
        """Lets every call be traced from now on, whatever its shapes, and says why."""
        confirmed = calls.state is State.CONFIRMED
        calls.state = self._first_state = State.GAVE_UP
        self._known.clear()  # without a program of its own, a graph is compiled once more
        message = f"{self.name} is traced in every call: {reason}"
        self._report.not_repeatable.append(message)
        print(f"note: {message}", flush=True)
        if confirmed:
            self._recompiled(f"{message}; it was not in the {calls.count - 1} calls before")


def fallback_counts() -> dict[str, int]:
    """Returns how often each operation has run on the host, torchvision's too, without .item(), which is a read."""
    names = [name for name in met.executed_fallback_ops() if name != "aten::_local_scalar_dense"]
    return {name: met.counter_value(name) for name in names}


def _describe(args: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, what a graph depends on) for everything in the arguments of a step."""
    if isinstance(args, Tensor):
        yield path, (tuple(args.shape), str(args.dtype).removeprefix("torch."))
    elif isinstance(args, nn.Module):
        yield path, ("training" if args.training else "evaluation")
    elif isinstance(args, Mapping):
        for key, value in args.items():
            yield from _describe(value, f"{path}[{key!r}]")
    elif isinstance(args, tuple | list):
        names = [f".{name}" for name in getattr(args, "_fields", ())] or [f"[{place}]" for place in range(len(args))]
        for place, (name, value) in enumerate(zip(names, args, strict=True)):
            yield from _describe(value, path + name if path else f"argument {place}")
    elif isinstance(args, bool | int | float | str):
        yield path, args


def _difference(inputs: dict[str, Any], known: list[dict[str, Any]]) -> str:
    """Names the inputs that no known call had, and what the most similar call had in their place."""
    nearest = max(known, key=lambda other: sum(other.get(name) == value for name, value in inputs.items()))
    changes = [
        f"{name} is {value}, compiled for {nearest.get(name)}"
        for name, value in inputs.items()
        if nearest.get(name) != value
    ]
    return "; ".join(changes[:3]) or "an input is missing: " + ", ".join(sorted(set(nearest) - set(inputs)))
