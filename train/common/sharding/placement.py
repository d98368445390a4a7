"""Where the parameters of a model, their gradients and their optimizer's state lie on the devices, and what keeps them
there.

XLA's partitioner cuts what is not annotated as it likes: where only the split parameters were, the split of a bias went
on into LayerNorm and its activations (770 MB of all-gathers in BERT-base's step). So everything is annotated: every
parameter, its gradient before it is clipped, its state after the update, and the input and result of every layer that
has parameters, forward and backward.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from errors import InputError
from train.common.device import replicate
from train.common.mesh import Layout, Mesh
from train.common.sharding import gather
from train.common.sharding.head import ROWS, sum_by_rows


class Rules(Protocol):
    """What models/partition.py says of a model."""

    parameters: Mapping[str, tuple]  # how a parameter's name ends, as a pattern -> the axis of each dimension, or None
    layers: tuple[str, ...]  # names of the lists of layers
    heads: int  # of attention
    shared: str  # pattern of the names of modules in which several products take the input
    time_major: str  # pattern of the names of modules whose tensors are [T, B, …], not [B, T, …]


NO_RULES = SimpleNamespace(parameters={}, layers=(), heads=1, shared="", time_major="")


class Cut(NamedTuple):
    """The axis that cuts each dimension of a parameter, or None."""

    layer: tuple  # where it is used
    rest: tuple  # where it is kept from step to step
    state: tuple  # of its gradient and its optimizer's state


@dataclass(frozen=True)
class Layers:
    """How models lie on a mesh; device.py calls it where the mesh has it."""

    layout: Layout
    axes: dict[str, int]  # devices by axis
    spmd: Any  # torch_xla's mesh, with these axes where something is cut; None on a device of plain PyTorch

    read, pack, load = map(staticmethod, (gather.read, gather.pack, gather.load))  # what checkpoint.py needs

    @property
    def compiles(self) -> bool:
        """True on XLA, see `Mesh.compiles`."""
        return self.spmd is not None

    @property
    def spreads(self) -> bool:
        """True where a parameter or its state may be cut."""
        return self.axes["model"] > 1 or (self.axes["data"] > 1 and self.layout.shard_state != "none")

    def arrange(self, model: nn.Module, rules_of: Callable[[nn.Module], Rules] | None) -> None:
        """Says where the parameters of a model belong, and lets its layers keep to it. Without rules only the
        optimizer's state and the parameters can be cut, over "data".

        Raises:
            InputError: a pattern matches no parameter, or a parameter matches two or has other dimensions than its
                rule; or the devices of "model" do not divide the heads; or there are no rules.
        """
        if rules_of is None and (self.layout.remat or self.axes["model"] > 1):
            given = "--remat" if self.layout.remat else f"--mesh {self.layout.mesh}"
            raise InputError(f"{given} needs rules, which {type(model).__name__} does not have: leave it out")
        rules = rules_of(model) if rules_of else NO_RULES
        if self.spreads:
            cuts = cuts_of(model, self, rules)
            for parameter, cut in cuts.items():
                parameter.placement, parameter.state_placement = (self.spmd, cut.rest), (self.spmd, cut.state)
            _mark_layers(model, self, cuts, rules)
        if self.layout.remat:
            recompute(model, self, rules)

    def keep(self, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        """Keeps parameters and the optimizer's state where they are after every update."""
        if self.spreads:
            optimizer.register_step_post_hook(lambda optimizer, *_: _pin(optimizer, mesh))


def cuts_of(model: nn.Module, layers: Layers, rules: Rules) -> dict[nn.Parameter, Cut]:
    """Returns how each parameter is cut; raises InputError, see `Layers.arrange`."""
    parts, found = layers.axes["model"], dict.fromkeys(rules.parameters, 0)
    if rules.heads % parts:
        raise InputError(f"--mesh has model={parts} and the model {rules.heads} heads: give a divisor of {rules.heads}")
    cuts, embedded = {}, {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        matching = [pattern for pattern in rules.parameters if re.search(rf"(^|\.){pattern}$", name)]
        found |= dict.fromkeys(matching, 1)
        axes = rules.parameters[matching[0]] if matching else (None,) * parameter.dim()
        if len(matching) > 1 or len(axes) != parameter.dim():
            raise InputError(f"the rules for {name} {list(parameter.shape)} are {matching}, {axes}: one must fit")
        axes = axes if parts > 1 else (None,) * parameter.dim()
        state = _state_axes(parameter, axes, layers, parameter in embedded)
        cuts[parameter] = Cut(axes, state if layers.layout.shard_state == "full" else axes, state)
    if unused := [pattern for pattern, used in found.items() if not used]:
        raise InputError(f"the rule {unused[0]} fits no parameter of {type(model).__name__}: see models/partition.py")
    devices, state = layers.axes["data"], layers.layout.shard_state
    if cuts and state != "none" and devices > 1 and not any("data" in cut.state for cut in cuts.values()):
        uncut = f"the {devices} devices of data divide no matrix of more than two rows of {type(model).__name__}"
        raise InputError(f"--shard-state {state} would cut nothing: {uncut}; give another --mesh, or leave it out")
    return cuts


def _state_axes(parameter: nn.Parameter, axes: tuple, layers: Layers, embedded: bool) -> tuple:
    """Returns the axes that cut a parameter's optimizer state: of a matrix also "data", on the first dimension that
    the devices divide (Rajbhandari et al. 2020, ZeRO): the TPU's compiler reduce-scatters only along the first. Of many
    words it is the width, see head.py. Vectors and one or two rows are not worth a collective each."""
    if layers.layout.shard_state == "none" or parameter.dim() < 2 or len(parameter) <= 2:
        return axes
    size = layers.axes["data"]
    free = [i for i, axis in enumerate(axes) if axis is None and parameter.shape[i] % size == 0]
    if embedded and len(free) > 1 and parameter.shape[0] > ROWS * size:
        free.remove(0)
    if parameter.dim() == 3 and 1 in free:  # XLNet's [C, heads, D], whose heads are first as the TPU lays it out
        free = [1]
    return tuple("data" if i == min(free) else axis for i, axis in enumerate(axes)) if free else axes


def _mark_layers(model: nn.Module, layers: Layers, cuts: Mapping[nn.Parameter, Cut], rules: Rules) -> None:
    """Annotates the gradients of parameters, and inputs and results of every layer that has a weight: the batch is cut
    over data; of a product with a cut weight the last dimension is cut as the weight's."""
    from train.common.xla import marks

    by_rows: set[nn.Parameter] = set()
    heads = {module.weight: module for module in model.modules() if isinstance(module, nn.Linear)}
    for name, module in model.named_modules():
        batch = 1 if rules.time_major and re.match(rules.time_major, name) else 0
        cut = layers.spmd, batch, layers.axes["copies"] * layers.axes["data"]
        if hasattr(module, "constrain"):
            module.constrain = marks.constrain(layers.spmd)
        if rules.shared and re.search(rules.shared, name):
            marks.mark_input(module, *cut, None)  # so that the products' gradients are summed up, then reduced
        if isinstance(module, nn.Embedding) and batch == 1:
            marks.look_up_by_rows(module)
        plain = type(module).forward is nn.Embedding.forward and not (module.max_norm or module.scale_grad_by_freq)
        if plain and (state := cuts[module.weight].state)[1] == "data":
            head = heads.get(module.weight) if state[0] is None else None  # words over "model" are the partitioner's
            sum_by_rows(module, head, layers.axes, layers.spmd, state)
            by_rows.add(module.weight)
        weight = getattr(module, "weight", None)
        if weight in cuts:
            columns, rows = cuts[weight].layer if isinstance(module, nn.Linear) else (None, None)
            if rows:  # other inputs are results of layers, too
                marks.mark_input(module, *cut, rows)
            marks.mark_result(module, *cut, columns)
    for parameter in cuts:
        if parameter.requires_grad:
            marks.mark_gradient(parameter, *parameter.state_placement, parameter in by_rows)


def recompute(model: nn.Module, layers: Layers, rules: Rules) -> None:
    """Lets each layer keep its input only, and compute the rest again in the backward pass."""
    if layers.compiles:
        from train.common.xla.recompute import again
    else:
        from torch.utils.checkpoint import checkpoint

        def again(layer: nn.Module) -> Any:
            forward = layer.forward
            return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for path in rules.layers:
        for layer in model.get_submodule(path):
            layer.forward = again(layer)


def _pin(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for tensor in (parameter, *optimizer.state[parameter].values()):
                if torch.is_tensor(tensor):
                    replicate(tensor, mesh)


def table(model: nn.Module) -> list[str]:
    """Returns how the parameters lie, a line for those that lie alike, with numbers in their names as *."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(parameter)
    lines = []
    for name, (parameter, *rest) in found.items():
        both = (getattr(parameter, attribute, (None, None))[1] for attribute in ("placement", "state_placement"))
        axes, state = (f"[{', '.join(axis or '-' for axis in each)}]" if each else "whole" for each in both)
        shape = " x ".join(map(str, parameter.shape))
        lines.append(f"{name:<70} {len(rest) + 1:>3} x {shape:<14} {axes:<16} state {state}")
    return lines
