"""Where parameters, their gradients and their optimizer's state lie on the devices, and stay.

XLA's partitioner splits as it likes what is not annotated. When only the split parameters were
annotated, the split of a bias spread to LayerNorm and its activations (770 MB of all-gathers in
BERT-base's step). So everything is annotated: every parameter, its gradient before it is clipped,
its state after the update, and the input and result of every layer that has parameters, forward and
backward.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from errors import InputError
from train.common.device import annotate_placement
from train.common.mesh import Layout, Mesh
from train.common.sharding import gather
from train.common.sharding.groups import Spec
from train.common.sharding.head import ROW_MULTIPLE, reduce_scatter_gradient


class Rules(Protocol):
    """What models/partition.py says of a model.

    Attributes:
        parameters: the spec of each parameter, by a pattern that fits the end of its name, from the
            name's start or from a dot on.
        layer_lists: names of the lists of layers.
        heads: attention heads.
        shared: a pattern, found anywhere in the name of a module whose input is multiplied by
            several weights.
        time_major: a pattern of the beginning of a module's name where its tensors are [T, B, …],
            not [B, T, …].
    """

    parameters: Mapping[str, Spec]
    layer_lists: tuple[str, ...]
    heads: int
    shared: str
    time_major: str


NO_RULES = SimpleNamespace(parameters={}, layer_lists=(), heads=1, shared="", time_major="")


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on the devices."""

    spmd: Any  # torch_xla's mesh
    spec: Spec


@dataclass(frozen=True)
class ParameterSpecs:
    """How a parameter is split in three roles."""

    layer: Spec  # while its layer computes with it
    stored: Spec  # as it is kept from step to step
    state: Spec  # its gradient and its optimizer's state


@dataclass(frozen=True)
class LayerSharding:
    """How a model's layers are split over a mesh, and kept so.

    `Mesh.layers` is one where a Layout asks for something. device.py and checkpoint.py hand over to
    it.
    """

    layout: Layout
    axes: dict[str, int]  # devices by axis
    spmd: Any  # torch_xla's mesh, with these axes if something is split; None on plain PyTorch

    # For checkpoint.py: whole tensors to a host, into the bytes of a file, and out of a file.
    to_host = staticmethod(gather.to_host)
    pack = staticmethod(gather.pack)
    load = staticmethod(gather.load)

    @property
    def compiles(self) -> bool:
        """True on XLA, see `Mesh.compiles`."""
        return self.spmd is not None

    @property
    def spreads(self) -> bool:
        """True where a parameter or its state may be split."""
        if self.axes["model"] > 1:
            return True
        return self.axes["data"] > 1 and self.layout.shard_state != "none"

    def arrange(self, model: nn.Module, rules_of: Callable[[nn.Module], Rules] | None) -> None:
        """Chooses where a model's parameters lie, and makes its layers keep to it.

        Each parameter gets two attributes, which device.annotate_placement reads: `placement`, and
        `state_placement`, that of its gradient and its optimizer's state.

        Args:
            rules_of: returns a model's rules. None: it has none, so neither may "model" split it
                nor may --remat be given.
        Raises:
            InputError: a pattern matches no parameter, or a parameter matches two or has other
                dimensions than its rule; or the devices of "model" do not divide the attention
                heads; or there are no rules.
        """
        if rules_of is None and (self.layout.remat or self.axes["model"] > 1):
            given = "--remat" if self.layout.remat else f"--mesh {self.layout.mesh}"
            name = type(model).__name__
            raise InputError(f"{given} needs rules, which {name} does not have: leave it out")

        rules = rules_of(model) if rules_of else NO_RULES
        if self.spreads:
            specs = parameter_specs(model, self, rules)
            for parameter, roles in specs.items():
                parameter.placement = Placement(self.spmd, roles.stored)
                parameter.state_placement = Placement(self.spmd, roles.state)
            _pin_layers(model, self, specs, rules)
        if self.layout.remat:
            recompute(model, self, rules)

    def keep_placements(self, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        """Makes each update leave parameters and the optimizer's state where they were."""
        if not self.spreads:
            return

        def annotate_again(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            _annotate_state(optimizer, mesh)

        optimizer.register_step_post_hook(annotate_again)


def parameter_specs(
    model: nn.Module, layers: LayerSharding, rules: Rules
) -> dict[nn.Parameter, ParameterSpecs]:
    """Returns how each parameter is split; raises InputError, see `LayerSharding.arrange`."""
    model_devices = layers.axes["model"]
    heads = rules.heads
    if heads % model_devices:
        raise InputError(
            f"--mesh has model={model_devices} and the model {heads} heads: "
            f"give a divisor of {heads}"
        )

    embedded = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embedded.add(module.weight)

    specs = {}
    used_patterns = set()
    for name, parameter in model.named_parameters():
        patterns = _matching_patterns(name, rules)
        used_patterns.update(patterns)
        whole = (None,) * parameter.dim()
        rule = rules.parameters[patterns[0]] if patterns else whole
        if len(patterns) > 1 or len(rule) != parameter.dim():
            shape = list(parameter.shape)
            raise InputError(
                f"the rules for {name} {shape} are {patterns}, the first with the axes {rule}; "
                "expected one rule with an axis or None per dimension: see models/partition.py"
            )

        layer = rule if model_devices > 1 else whole
        state = _state_spec(parameter, layer, layers, parameter in embedded)
        stored = state if layers.layout.shard_state == "full" else layer
        specs[parameter] = ParameterSpecs(layer, stored, state)

    for pattern in rules.parameters:
        if pattern not in used_patterns:
            raise InputError(
                f"the rule {pattern} fits no parameter of {type(model).__name__}: "
                "see models/partition.py"
            )
    _check_state_is_split(model, layers, specs)
    return specs


def _matching_patterns(name: str, rules: Rules) -> list[str]:
    """Returns the rules' patterns that fit the end of a parameter's name."""
    return [pattern for pattern in rules.parameters if re.search(rf"(^|\.){pattern}$", name)]


def _check_state_is_split(
    model: nn.Module, layers: LayerSharding, specs: Mapping[nn.Parameter, ParameterSpecs]
) -> None:
    """Raises InputError where --shard-state would leave the state of every parameter whole."""
    devices = layers.axes["data"]
    shard_state = layers.layout.shard_state
    if not specs or shard_state == "none" or devices == 1:
        return

    if not any("data" in roles.state for roles in specs.values()):
        raise InputError(
            f"--shard-state {shard_state} would cut nothing: the {devices} devices of data divide "
            f"no matrix of more than two rows of {type(model).__name__}; "
            "give another --mesh, or leave it out"
        )


def _state_spec(parameter: Tensor, layer: Spec, layers: LayerSharding, is_embedding: bool) -> Spec:
    """Returns how a parameter's gradient and optimizer state are split, given its layer's spec.

    --shard-state splits them over "data", too (ZeRO: Rajbhandari et al. 2020), along one dimension,
    which the layer does not split, and which the devices divide:

        vectors, and one or two rows  none: they are not worth a collective each
        an embedding of many words    its width, see head.py
        three dimensions              the second, which the TPU lays out first: in XLNet's weights
                                      [C, heads, D] the heads
        others                        the first such dimension, since the TPU's compiler
                                      reduce-scatters only along the first
    """
    if layers.layout.shard_state == "none" or parameter.dim() < 2 or len(parameter) <= 2:
        return layer

    devices = layers.axes["data"]
    divisible = []  # dimensions
    for dimension, axis in enumerate(layer):
        if axis is None and parameter.shape[dimension] % devices == 0:
            divisible.append(dimension)
    if not divisible:
        return layer

    has_many_words = is_embedding and parameter.shape[0] > ROW_MULTIPLE * devices
    prefers_second = has_many_words or parameter.dim() == 3
    dimension = 1 if prefers_second and 1 in divisible else divisible[0]

    spec = list(layer)
    spec[dimension] = "data"
    return tuple(spec)


def _pin_layers(
    model: nn.Module,
    layers: LayerSharding,
    specs: Mapping[nn.Parameter, ParameterSpecs],
    rules: Rules,
) -> None:
    """Pins the sharding of gradients, and of inputs and results of every layer with a weight.

    A batch is split over "copies" and "data"; the last dimension of a product with a split weight
    is split as the weight is.
    """
    from train.common.xla import pin_sharding

    linear_of_weight = {}  # the output head where the weight is an embedding's, too
    for module in model.modules():
        if isinstance(module, nn.Linear):
            linear_of_weight[module.weight] = module

    reduce_scattered: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        # Before `_pin_activations`: hooks run in the order in which they are registered, and the
        # result that is pinned must be [T, B, …] again after `look_up_batch_first`.
        _pin_module(module, name, layers, rules)
        if _is_plain_embedding(module):
            weight = module.weight
            state = specs[weight].state
            is_split_by_width = state[1] == "data"
            if is_split_by_width:
                _pin_split_embedding(module, linear_of_weight.get(weight), layers, state)
                reduce_scattered.add(weight)
        _pin_activations(module, specs, _batch_split(name, layers, rules))

    for parameter in specs:
        if parameter.requires_grad:
            placement = parameter.state_placement
            is_summed_already = parameter in reduce_scattered
            pin_sharding.pin_gradient(parameter, placement.spmd, placement.spec, is_summed_already)


def _is_time_major(name: str, rules: Rules) -> bool:
    """Returns whether the tensors of a module with this name are [T, B, …], not [B, T, …]."""
    return bool(rules.time_major and re.match(rules.time_major, name))  # at the name's start


def _batch_split(name: str, layers: LayerSharding, rules: Rules) -> Any:
    """Returns the pin_sharding.BatchSplit of the tensors of a module with this name."""
    from train.common.xla import pin_sharding

    return pin_sharding.BatchSplit(
        layers.spmd,
        dimension=1 if _is_time_major(name, rules) else 0,
        devices=layers.axes["copies"] * layers.axes["data"],
    )


def _pin_module(module: nn.Module, name: str, layers: LayerSharding, rules: Rules) -> None:
    """Pins an input that several of a module's weights share, and the tensors that it constrains.

    Makes an embedding look up time-major ids as [B, T], where a device's own are consecutive.
    """
    from train.common.xla import pin_sharding

    if hasattr(module, "constrain"):  # models/two_streams.py calls it
        module.constrain = pin_sharding.constrain_on(layers.spmd)
    if rules.shared and re.search(rules.shared, name):
        # The gradients of its products are then summed before they are reduced over devices.
        pin_sharding.pin_input(module, _batch_split(name, layers, rules), None)
    if isinstance(module, nn.Embedding) and _is_time_major(name, rules):
        pin_sharding.look_up_batch_first(module)


def _is_plain_embedding(module: nn.Module) -> bool:
    """Returns whether a module looks up rows, and does nothing else."""
    if type(module).forward is not nn.Embedding.forward:
        return False
    return not (module.max_norm or module.scale_grad_by_freq)


def _pin_split_embedding(
    embedding: nn.Embedding, head: nn.Linear | None, layers: LayerSharding, state: Spec
) -> None:
    """Reduce-scatters the gradient of an embedding that is split along the width, in one sum with
    that of its tied head.

    Args:
        head: the linear layer with the same weight, if there is one.
        state: the spec of the gradient.
    """
    # A head whose words are split over "model" is left to the partitioner.
    words_are_split = state[0] is not None
    own_head = None if words_are_split else head
    reduce_scatter_gradient(embedding, own_head, layers.axes, layers.spmd, state)


def _pin_activations(
    module: nn.Module, specs: Mapping[nn.Parameter, ParameterSpecs], split: Any
) -> None:
    """Pins the result of a module with a weight, and its input where it is split by the weight."""
    from train.common.xla import pin_sharding

    weight = getattr(module, "weight", None)
    if weight not in specs:
        return

    output_axis = None
    input_axis = None
    if isinstance(module, nn.Linear):
        output_axis, input_axis = specs[weight].layer  # of a weight [outputs, inputs]
    if input_axis:  # any other input is the result of a layer, which is pinned
        pin_sharding.pin_input(module, split, input_axis)
    pin_sharding.pin_output(module, split, output_axis)


def recompute(model: nn.Module, layers: LayerSharding, rules: Rules) -> None:
    """Makes each layer keep its input only, and compute the rest again in the backward pass."""
    if layers.compiles:
        from train.common.xla.recompute import recomputing_forward
    else:
        recomputing_forward = _recomputing_forward

    for path in rules.layer_lists:
        for layer in model.get_submodule(path):
            layer.forward = recomputing_forward(layer)


def _recomputing_forward(layer: nn.Module) -> Callable:
    """Returns the forward pass of a layer on plain PyTorch that keeps its inputs only."""
    from torch.utils.checkpoint import checkpoint

    forward = layer.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return call


def _annotate_state(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Annotates an optimizer's parameters and their state again.

    Each has its `placement`: a parameter from `LayerSharding.arrange`, its state from
    `device.init_optimizer_state`.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for tensor in (parameter, *optimizer.state[parameter].values()):
                if torch.is_tensor(tensor):
                    annotate_placement(tensor, mesh)


def placement_table(model: nn.Module) -> list[str]:
    """Returns lines that say how parameters lie. The layers of a list share a line, as *."""
    parameters_of_line: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        name = re.sub(r"\.\d+\.", ".*.", name)
        parameters_of_line.setdefault(name, []).append(parameter)

    lines = []
    for name, parameters in parameters_of_line.items():
        first = parameters[0]
        shape = " x ".join(map(str, first.shape))
        stored = _spec_text(getattr(first, "placement", None))
        state = _spec_text(getattr(first, "state_placement", None))
        lines.append(f"{name:<70} {len(parameters):>3} x {shape:<14} {stored:<16} state {state}")
    return lines


def _spec_text(placement: Placement | None) -> str:
    """Returns a placement's spec such as "[data, -]", or "whole"."""
    if placement is None or not placement.spec:
        return "whole"
    return f"[{', '.join(axis or '-' for axis in placement.spec)}]"
