"""The optimizer's state shared out among processes of plain PyTorch: --shard-state optimizer.

Each parameter has an owner, the one process that has its state in the optimizer. All processes have
its gradient, averaged and clipped. The owner updates the parameter and sends it to the others
(ZeRO-1: Rajbhandari et al. 2020). Whole parameters are shared out, so that an optimizer finds what
it finds without processes: LAMB's norms of a parameter are right, and no bit of an update differs.

In the other processes the state of a parameter is on torch's device "meta". Such a tensor has a
shape and a type, but no memory, and copying into it does nothing. So the state has the same names
everywhere, a checkpoint is loaded as without shares, and reading what another process has is an
error, not a zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from train.common import device, processes
from train.common.mesh import Mesh
from train.common.sharding.placement import LayerSharding


@dataclass(frozen=True)
class StateShares(LayerSharding):
    """`Mesh.layers` of several processes that share out the optimizer's state."""

    @property
    def spreads(self) -> bool:
        """False: no tensor is split."""
        return False

    def keep_placements(self, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        """Shares out an optimizer's state, and makes each update one of all processes.

        Until here each process has the whole state. That is no more than gradients and their
        buckets take in a backward pass.

        Raises:
            RuntimeError: the optimizer clips gradients, of which a process shows it its own.
        """
        if optimizer.defaults.get("max_grad_norm"):  # timm's Lamb, by default
            kind = type(optimizer).__name__
            raise RuntimeError(
                f"{kind} clips gradients by the norm of all, and with --shard-state optimizer it "
                "sees a share of them: give it max_grad_norm=None, and clip before its step"
            )
        parameters = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        owners = choose_owners(parameters, mesh.process_count)

        of_others = []
        for parameter, owner in zip(parameters, owners, strict=True):
            if owner != mesh.process_index:
                of_others.append(parameter)
                _drop_memory(optimizer.state[parameter])
        gradients: dict[nn.Parameter, Tensor | None] = {}

        def hide_gradients(*_: Any) -> None:
            # An optimizer leaves alone what has no gradient.
            for parameter in of_others:
                gradients[parameter] = parameter.grad  # to which micro-batches add
                parameter.grad = None

        def show_gradients_and_send(*_: Any) -> None:
            for parameter in of_others:
                parameter.grad = gradients.pop(parameter)
            processes.send_from_owners(parameters, owners)

        optimizer.register_step_pre_hook(hide_gradients)
        optimizer.register_step_post_hook(show_gradients_and_send)

    @staticmethod
    def to_host(tensors: Sequence[Tensor], is_needed: bool) -> list[Tensor]:
        """Copies tensors to the host, also those that only another process has.

        Every process must call this with the same tensors. They are sent one at a time, since no
        host is to hold them twice.

        Args:
            is_needed: whether this process needs the copies; else it gets [].
        """
        is_here = torch.tensor([[not tensor.is_meta for tensor in tensors]])
        of_all = processes.gather_rows(is_here.int())  # [processes, tensors]
        owners = of_all.argmax(0).tolist()  # the first process that has a tensor
        is_everywhere = of_all.all(0).tolist()

        copies = []
        for tensor, owner, has_it in zip(tensors, owners, is_everywhere, strict=True):
            if has_it and not is_needed:
                continue
            if tensor.is_meta:
                copy = torch.empty_like(tensor, device="cpu")
            else:
                (copy,) = device.read([tensor])
            if not has_it:
                processes.send_from_owners([copy], [owner])
            if is_needed:
                copies.append(copy)
        return copies


def choose_owners(parameters: Sequence[nn.Parameter], count: int) -> list[int]:
    """Returns the number of the process that owns each parameter.

    The largest parameter goes to the process that has least so far, and so on to the smallest.
    """
    sizes = [0] * count
    owners = [0] * len(parameters)
    from_largest = sorted(range(len(parameters)), key=lambda i: -parameters[i].nbytes)
    for number in from_largest:
        owner = sizes.index(min(sizes))
        owners[number] = owner
        sizes[owner] += parameters[number].nbytes
    return owners


def _drop_memory(state: dict[str, Any]) -> None:
    """Leaves the shapes and the types of a parameter's state."""
    for name, value in state.items():
        if torch.is_tensor(value):
            state[name] = value.to("meta")
