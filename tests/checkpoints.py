"""What tests of checkpoints share: a small model, a look into a folder, ways to damage a file. Processes that are
killed import this file, so it leaves torch_xla alone."""

from collections.abc import Callable

import fsspec
import torch
from torch import nn

from train.common import checkpoint
from train.common.checkpoint import Checkpointer


def names(place: str) -> set[str]:
    """Returns the names in a folder."""
    fs, root = fsspec.core.url_to_fs(place)
    return {name.rstrip("/").rpartition("/")[2] for name in fs.ls(root, detail=False)}


def damage(place: str, step: int, file: str, edit: Callable[[bytes], bytes] | None) -> None:
    """Rewrites a file of a step's checkpoint; removes it where `edit` is None."""
    fs, root = fsspec.core.url_to_fs(f"{place}/step_{step:08d}/{file}")
    if edit is None:
        fs.rm(root)
    else:
        content = fs.cat_file(root)
        assert edit(content) != content
        fs.pipe_file(root, edit(content))


def flip(content: bytes, at: int) -> bytes:
    """Changes one bit of the byte at a position."""
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


def on_cpu(value: float = 0.0):
    """A small model on the CPU, all of whose numbers are `value`: no device is needed to test files."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return fill(model, optimizer, value)


def fill(model, optimizer, value: float):
    with torch.no_grad():
        for tensor in checkpoint.named_state(model, optimizer).values():
            tensor.fill_(value)
    return model, optimizer


def save_without_end(place: str) -> None:
    model, optimizer = on_cpu()
    checkpoints = Checkpointer(place, keep=2)
    step = checkpoints.restore(model, optimizer, None)
    while True:
        step += 1
        checkpoints.save(step, *fill(model, optimizer, step))
