"""The test of a copy: its script's trial learns, and at a learning rate of 0 it does not."""

import json
from pathlib import Path
from string import Template
from typing import Any

from copied import convergence

TEMPLATE = Path(__file__).with_name("test_script.template")
COLUMNS = 100  # of a line

# By the device for which a copy is; "": for all.
DEVICES = {
    "": '"xla"  # a TPU, or XLA on the CPU; or cpu, cuda, tpu',
    "xla": '"xla"  # a TPU, or XLA on the CPU',
    "cpu": '"cpu"',
    "tpu": '"tpu"  # TorchTPU, which has never been run',
    "cuda": '"cuda" if torch.cuda.is_available() else "cpu"  # the same code',
}
IMPORT_TORCH = "import torch\n"
SKIP_ON_GPU = """
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU adds up in another order each time")"""


def source(script: str, model: str, device: str) -> str:
    """Returns the file tests/test_<script>.py of a copy.

    Args:
        model: of an encoder, --model; "": the script has no such flag.
        device: for which the copy is, "": for all.
    """
    expected = convergence.of_model(script, model)
    changes = dict(expected.learns)
    if model:
        changes = {"model": model} | changes
    changed = [f"{name}={literal(value)}" for name, value in changes.items()]
    still = [f"{name}={literal(value)}" for name, value in expected.still.items()]

    on_gpu = device == "cuda"
    fields = {
        "script": script,
        "import_torch": IMPORT_TORCH if on_gpu else "",
        "device": DEVICES[device],
        "skip_on_gpu": SKIP_ON_GPU if on_gpu else "",
        "trial": call("TRIAL", f"{script}.TINY", ["device=DEVICE", *changed]),
        "untrained_trial": call("UNTRAINED_TRIAL", "TRIAL", ["lr=0.0", *still]),
        "learned": ranges(expected.learned),
        "untrained": ranges(expected.untrained),
        "chance": expected.chance,
    }
    return Template(TEMPLATE.read_text()).substitute(fields)


def literal(value: Any) -> str:
    """Returns a value as Python's source has it, text in double quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def call(name: str, original: str, changes: list[str]) -> str:
    """Returns the statement that assigns `replace(original, changes)` to a name, in one line where
    it fits into one."""
    line = f"{name} = replace({', '.join([original, *changes])})"
    if len(line) <= COLUMNS:
        return line
    lines = [f"{name} = replace("]
    lines += [f"    {argument}," for argument in (original, *changes)]
    return "\n".join([*lines, ")"])


def ranges(values: convergence.Ranges) -> str:
    """Returns a dict of ranges as Python writes it, with double quotes."""
    items = [f'"{name}": {bounds!r}' for name, bounds in values.items()]
    return "{" + ", ".join(items) + "}"
