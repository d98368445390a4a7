"""Read no value inside the step

`.item()`, `float()`, `print` and `if` on a tensor need a number that the device has not computed
yet: they cut the graph in two and let the device wait for the host, so compute both branches and
choose with `torch.where`.

The eager step, compiled, stops in the line that reads: {WRONG}.
"""

import torch

from train.common import device

WEIGHT = torch.tensor([2.0, 0.5, -3.0, 0.1])
WRONG = "GraphError: limit reads a device value before its end (.item(), float(), print, `if` on a tensor)"
OURS = [("train/resnet50.py", "rank = torch.where(label_logit.isnan()[:, 0], logits.shape[1] + 5, rank)")]


def eager():
    def limit(weight):
        norm = weight.norm()
        if norm.item() > 1:
            weight = weight / norm
        return weight.sum()

    return limit(WEIGHT).item()


def xla(mesh):
    def limit(weight):
        norm = weight.norm()
        weight = torch.where(norm > 1, weight / norm, weight)
        return weight.sum()

    step = device.compiled(limit, mesh)
    return device.fetch([step(device.upload(WEIGHT, mesh))])[0]


def wrong(mesh):
    def limit(weight):
        norm = weight.norm()
        if norm.item() > 1:
            weight = weight / norm
        return weight.sum()

    step = device.compiled(limit, mesh)
    return device.fetch([step(device.upload(WEIGHT, mesh))])[0]
