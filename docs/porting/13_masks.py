"""Choose by masks, not by boolean indices; no foreach

`x[x > 0]` has as many elements as there are positive values, which only the device knows; a mask
keeps the shape. XLA has no `foreach` kernels: pass `foreach=False` to optimizers; `clip_grad_norm_`
chooses so itself (torch 2.9).

The eager function, compiled: {WRONG}. `clip_grad_norm_(…, foreach=True)`: {WRONG_CLIP}.
"""

import torch
from torch import nn

from train.common import device

X = torch.tensor([1.0, -2.0, 3.0, 4.0])
WRONG = "GraphError: positive runs aten::nonzero on the host, since XLA has no lowering for it: replace it"
WRONG_CLIP = "RuntimeError: foreach=True is not supported with XLA"
OURS = [
    ("train/resnet50.py", "loss = torch.where(is_counted > 0, loss, torch.zeros_like(loss))"),
    ("train/glue.py", "clip_grad_norm_(state.model.parameters(), config.clip)"),
]


def eager():
    def positive(x):
        (x * x).sum().backward()
        nn.utils.clip_grad_norm_(x, 1.0)
        return x[x > 0].mean(), x.grad.sum()

    results = positive(X.clone().requires_grad_())
    return [result.item() for result in results]


def xla(mesh):
    def positive(x):
        (x * x).sum().backward()
        nn.utils.clip_grad_norm_(x, 1.0)
        mask = (x > 0).float()
        return (x * mask).sum() / mask.sum(), x.grad.sum()

    results = positive(device.upload(X, mesh).requires_grad_())
    return device.fetch([result.detach() for result in results])


def wrong(mesh):
    def positive(x):
        return x[x > 0].mean()

    step = device.compiled(positive, mesh)
    return device.fetch([step(device.upload(X, mesh))])[0]


def wrong_clip(mesh):
    x = device.upload(X, mesh).requires_grad_()
    (x * x).sum().backward()
    return nn.utils.clip_grad_norm_(x, 1.0, foreach=True)
