"""Move a model without untying its weights

`module.to(device)` keeps the Parameter objects on a GPU, but makes new ones on XLA: a weight that
two layers share becomes two that train apart.

After `model.to(mesh.device)` and one step the head and the embedding, one weight before, are up to
{WRONG} apart, in place of {RIGHT}; nothing reports it.
"""

import torch
from torch import nn

from train.common import device

IDS = torch.tensor([0, 1, 1, 1])
RIGHT = 0.0
WRONG = 0.2387
OURS = [("train/resnet50.py", "device.to_device(model, mesh)"), ("train/common/device.py", "def to_device(")]


class Language(nn.Module):
    """An embedding, and a head with the same weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def apart(self, ids):
        """Takes one step of SGD; returns how far the two are apart then."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.head(self.embed(ids)).square().mean().backward()
        optimizer.step()
        return (self.head.weight - self.embed.weight).detach().abs().max()


def eager():
    model = Language().to("cpu")  # or "cuda"
    return model.apart(IDS).item()


def xla(mesh):
    model = device.to_device(Language(), mesh)
    ids = device.upload(IDS, mesh)
    return device.fetch([model.apart(ids)])[0]


def wrong(mesh):
    model = Language().to(mesh.device)
    ids = device.upload(IDS, mesh)
    return device.fetch([model.apart(ids)])[0]
