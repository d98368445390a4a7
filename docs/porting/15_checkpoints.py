"""Copy checkpoints to the host, on all hosts, at SIGTERM too

A tensor on XLA is a handle: copy all of them in one transfer, between two steps, then write (what
is replicated on one host, sharded tables on all). A preempted VM gets SIGTERM: `stop_requested`
lets all hosts leave after the same step.

`torch.save` of the model as it is writes tensors of XLA, and a machine without torch_xla cannot
load them: {WRONG}. safetensors does not even write them: {WRONG_SAFETENSORS}. Without a handler the
process ends in step 3, its exit code {WRONG_SIGNAL}, and saves nothing.
"""

import inspect
import io
import os
import signal
import subprocess
import sys

import safetensors.torch
import torch
from torch import nn

from train.common import checkpoint, device

X = torch.linspace(-1, 1, 32).view(8, 4)
WRONG = "NotImplementedError: Could not run 'aten::empty.memory_format' with arguments from the 'XLA' backend"
WRONG_SAFETENSORS = "RuntimeError: Attempted to access the data pointer on an invalid python storage."
WRONG_SIGNAL = -15
OURS = [
    ("train/common/checkpoint.py", "def to_host("),
    ("train/common/run.py", "device.stop_requested(self.mesh, stop_every)"),
]


def build():
    """Returns a model."""
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def train(model, x, step):
    """Updates once; this machine is preempted in step 3."""
    model(x).square().mean().backward()
    with torch.no_grad():
        model.weight -= 0.1 * model.weight.grad
    model.weight.grad = model.bias.grad = None
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)


def eager():
    model, file, stop = build(), io.BytesIO(), []
    before = signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    for step in range(1, 6):
        train(model, X, step)
        if stop:
            break
    torch.save(model.state_dict(), file)
    signal.signal(signal.SIGTERM, before)
    return torch.load(io.BytesIO(file.getvalue()))["weight"][0].tolist()


def xla(mesh):
    model, file = device.to_device(build(), mesh), io.BytesIO()
    x = device.upload(X, mesh)
    with device.stop_requested(mesh) as stop:
        for step in range(1, 6):
            train(model, x, step)
            device.run_pending()  # device.compiled does it
            if stop():
                break
    torch.save(checkpoint.to_host(model.state_dict()), file)
    return torch.load(io.BytesIO(file.getvalue()))["weight"][0].tolist()


def wrong(mesh):
    model, file = device.to_device(build(), mesh), io.BytesIO()
    torch.save(model.state_dict(), file)
    elsewhere = "import io, sys, torch; torch.load(io.BytesIO(sys.stdin.buffer.read()))"
    result = subprocess.run([sys.executable, "-c", elsewhere], input=file.getvalue(), capture_output=True)
    return next(line for line in result.stderr.decode().splitlines() if "Error: " in line)


def wrong_safetensors(mesh):
    model = device.to_device(build(), mesh)
    return len(safetensors.torch.save(model.state_dict()))


def wrong_signal(mesh):
    program = "import os, signal, sys, torch\nfrom torch import nn\nX = torch.linspace(-1, 1, 32).view(8, 4)\n"
    program += inspect.getsource(build) + inspect.getsource(train)
    program += "model = build()\nfor step in range(1, 6): train(model, X, step)\nprint('saved')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True)
    return result.returncode if not result.stdout else result.stdout.decode()
