"""Where the parameters of a model, their gradients and their optimizer's state lie on the devices, and what keeps them
there.

XLA's partitioner cuts what is not annotated as it likes: where only the split parameters were, the split of a bias went
on into LayerNorm and its activations (770 MB of all-gathers in BERT-base's step). So everything is annotated: every
parameter, its gradient before it is clipped, its state after the update, and the input and result of every layer that
has parameters, forward and backward.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from errors import InputError
from train.common import device
from train.common.sharding.layout import LayerMesh


class Rules(Protocol):
    """What models/partition.py says of a model."""

    parameters: Mapping[str, tuple]  # how a parameter's name ends, as a pattern -> the axis of each dimension, or None
    layers: tuple[str, ...]  # names of the lists of layers
    heads: int  # of attention
    shared: str  # pattern of the names of modules in which several products take the input
    time_major: str  # pattern of the names of modules whose tensors are [T, B, …], not [B, T, …]


def to_device(model: nn.Module, mesh: device.Mesh, rules_of: Callable[[nn.Module], Rules]) -> nn.Module:
    """Moves a model to the mesh as `device.to_device` does, its parameters cut as its rules and the mesh say.

    Raises:
        InputError: a pattern matches no parameter, or a parameter matches two or has other dimensions than its rule; or
            the devices of "model" do not divide the heads.
    """
    if not isinstance(mesh, LayerMesh):
        return device.to_device(model, mesh)
    rules = rules_of(model)
    cuts = cuts_of(model, mesh, rules) if mesh.spreads else {}

    def place(tensor: Tensor, mesh: device.Mesh) -> None:
        if tensor in cuts:
            tensor.placement, tensor.state_placement = ((mesh.layers, axes) for axes in cuts[tensor][1:])
        device.replicate(tensor, mesh)

    device.to_device(model, mesh, place)
    if cuts:
        _mark_layers(model, mesh, cuts, rules)
    if mesh.layout.remat:
        recompute(model, mesh, rules)
    return model


class Cut(NamedTuple):
    """The axis that cuts each dimension of a parameter, or None."""

    layer: tuple  # where it is used
    rest: tuple  # where it is kept from step to step
    state: tuple  # of its gradient and its optimizer's state


def cuts_of(model: nn.Module, mesh: LayerMesh, rules: Rules) -> dict[nn.Parameter, Cut]:
    """Returns how each parameter is cut; raises InputError, see `to_device`."""
    parts, found = mesh.axes["model"], dict.fromkeys(rules.parameters, 0)
    if rules.heads % parts:
        raise InputError(f"--mesh has model={parts} and the model {rules.heads} heads: give a divisor of {rules.heads}")
    cuts = {}
    for name, parameter in model.named_parameters():
        matching = [pattern for pattern in rules.parameters if re.search(rf"(^|\.){pattern}$", name)]
        found |= dict.fromkeys(matching, 1)
        axes = rules.parameters[matching[0]] if matching else (None,) * parameter.dim()
        if len(matching) > 1 or len(axes) != parameter.dim():
            raise InputError(f"the rules for {name} {list(parameter.shape)} are {matching}, {axes}: one must fit")
        axes = axes if parts > 1 else (None,) * parameter.dim()
        state = _state_axes(parameter, axes, mesh)
        cuts[parameter] = Cut(axes, state if mesh.layout.shard_state == "full" else axes, state)
    if unused := [pattern for pattern, used in found.items() if not used]:
        raise InputError(f"the rule {unused[0]} fits no parameter of {type(model).__name__}: see models/partition.py")
    return cuts


def _state_axes(parameter: nn.Parameter, axes: tuple, mesh: LayerMesh) -> tuple:
    """Returns the axes that cut a parameter's optimizer state: of a matrix also "data", on the longest dimension that
    the devices divide (Rajbhandari et al. 2020, ZeRO). Vectors are not worth a collective each."""
    if mesh.layout.shard_state == "none" or parameter.dim() < 2:
        return axes
    free = [i for i, axis in enumerate(axes) if axis is None and parameter.shape[i] % mesh.axes["data"] == 0]
    longest = max(free, key=lambda i: parameter.shape[i], default=None)
    return tuple("data" if i == longest else axis for i, axis in enumerate(axes))


def _mark_layers(model: nn.Module, mesh: LayerMesh, cuts: Mapping[nn.Parameter, Cut], rules: Rules) -> None:
    """Annotates the gradients of parameters, and inputs and results of every layer that has a weight: the batch is cut
    over data; of a product with a cut weight the last dimension is cut as the weight's."""
    from train.common.xla import marks

    for parameter in cuts:
        if parameter.requires_grad:
            marks.mark_gradient(parameter, *parameter.state_placement)
    for name, module in model.named_modules():
        batch = 1 if rules.time_major and re.match(rules.time_major, name) else 0
        cut = mesh.layers, batch, mesh.axes["data"]
        if hasattr(module, "constrain"):
            module.constrain = marks.constrain(mesh.layers)
        if rules.shared and re.search(rules.shared, name):
            marks.mark_input(module, *cut, None)  # so that the products' gradients are summed up, then reduced
        if isinstance(module, nn.Embedding) and batch == 1:
            marks.look_up_by_rows(module)
        weight = getattr(module, "weight", None)
        if weight in cuts:
            columns, rows = cuts[weight].layer if isinstance(module, nn.Linear) else (None, None)
            if rows:  # other inputs are results of layers, too
                marks.mark_input(module, *cut, rows)
            marks.mark_result(module, *cut, columns)


def recompute(model: nn.Module, mesh: LayerMesh, rules: Rules) -> None:
    """Lets each layer keep its input only, and compute the rest again in the backward pass."""
    if mesh.spmd is None:
        from torch.utils.checkpoint import checkpoint

        def again(layer: nn.Module) -> Any:
            forward = layer.forward
            return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
    else:
        from train.common.xla.recompute import again

    for path in rules.layers:
        for layer in model.get_submodule(path):
            layer.forward = again(layer)


def init_optimizer_state(optimizer: torch.optim.Optimizer, mesh: device.Mesh) -> None:
    """Creates the optimizer's state as `device.init_optimizer_state` does, cut as its parameters' `state_placement`
    says, and keeps it and the parameters there after every update."""
    device.init_optimizer_state(optimizer, mesh)
    if isinstance(mesh, LayerMesh) and mesh.spreads:
        optimizer.register_step_post_hook(lambda optimizer, *_: _pin(optimizer, mesh))


def _pin(optimizer: torch.optim.Optimizer, mesh: LayerMesh) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for tensor in (parameter, *optimizer.state[parameter].values()):
                if torch.is_tensor(tensor):
                    device.replicate(tensor, mesh)


def rows(batch: dict[str, Tensor], mesh: device.Mesh) -> dict[str, Tensor]:
    """Returns a batch as the layers take it: its rows cut over "data" only, and whole along "model"."""
    if not isinstance(mesh, LayerMesh) or mesh.axes["model"] == 1:
        return batch
    from train.common.xla import marks

    return {
        name: marks.mark(value, mesh.layers, ("data",) + (None,) * (value.dim() - 1)) for name, value in batch.items()
    }


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
