"""Let sharding reduce the gradients

The batch is cut over the chips and the loss is its mean, so XLA itself adds the gradients up over
all chips; there is one replica (`xr.world_size()` is {WRONG_WORLD} on the four devices), so
`xm.optimizer_step` has nothing to reduce.

A loss divided by the rows of one chip, for `xm.optimizer_step` to average over four, gives a
gradient of {WRONG} in place of {RIGHT}: nothing averages.
"""

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn

from train.common import device

X = torch.linspace(-1, 1, 32).view(8, 4)
RIGHT = -0.311795
WRONG = -1.24718
WRONG_WORLD = 1
OURS = [
    ("train/resnet50.py", "loss = losses.mean()"),
    ("train/common/xla/backend.py", "return xs.ShardingSpec(spmd, (axis,)"),
]


def build():
    """Returns a model."""
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def eager():
    model = build()
    for x in X.chunk(4):  # DDP: one in each of 4 processes,
        loss = model(x).square().mean()
        (loss / 4).backward()  # and a mean over all of them
    return model.weight.grad[0, 0].item()


def xla(mesh):
    model = device.to_device(build(), mesh)
    x = device.upload(X, mesh)  # two rows on each of 4 devices
    loss = model(x).square().mean()  # over all eight
    loss.backward()
    return device.fetch([model.weight.grad[0, 0]])[0]


def wrong(mesh):
    model = device.to_device(build(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = device.upload(X, mesh)
    loss = model(x).square().sum() / (len(X) // mesh.num_devices)
    loss.backward()
    xm.optimizer_step(optimizer)
    return device.fetch([model.weight.grad[0, 0]])[0]


def wrong_world(mesh):
    return xr.world_size()
