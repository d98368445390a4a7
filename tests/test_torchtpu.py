"""`--device tpu`: TorchTPU behind the eager backend, without a TPU and without TorchTPU.

It has never been run on a TPU. What is installed here is a stand-in, a package that is found as
TorchTPU's backend is, and fails as one can without a chip.
"""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ONE_CPU, update
from run_make import ROOT, make

from errors import InputError
from train.common import device, eager, start_processes, torchtpu

ENTRY_POINTS = "[torch.backends]\ntorch_tpu = torch_tpu:load\n"
METADATA = "Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n"
NO_CHIP = "TPU initialization failed:\\nNo jellyfish device found."
# What the stand-in's module is: it cannot be imported, it does not load, it finds no chip.
STANDS_IN = {
    "import": f'raise RuntimeError("{NO_CHIP}")',
    "load": f'def load():\n    raise RuntimeError("{NO_CHIP}")',
    "no chip": "def load():\n    pass",
}


def install_stand_in(folder, code: str) -> None:
    """Writes the stand-in for TorchTPU into a folder for sys.path."""
    (folder / "torch_tpu.py").write_text(code)
    information = folder / "torch_tpu-0.2.0.dist-info"
    information.mkdir()
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    (information / "METADATA").write_text(METADATA)


@pytest.fixture
def set_up(monkeypatch):
    """Sets the device up, and forgets it after the test."""
    monkeypatch.setattr(device, "_backend", None)
    monkeypatch.setattr(eager, "_torchtpu", None)
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")
    monkeypatch.delitem(sys.modules, "torch_tpu", raising=False)
    return lambda: device.setup(0, "float32", kind="tpu")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("import", "does not load here .RuntimeError: TPU .* failed: No jelly.* needs a TPU chip"),
        ("load", "does not load here .RuntimeError: TPU .* failed: No jelly.* needs a TPU chip"),
        ("no chip", "finds no TPU chip on this machine; use --device xla"),
    ],
)
def test_without_a_chip_tpu_is_a_sentence(kind, sentence, set_up, tmp_path, monkeypatch):
    install_stand_in(tmp_path, STANDS_IN[kind])
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(InputError, match=f"--device is tpu, but TorchTPU {sentence}"):
        set_up()


def test_without_torchtpu_tpu_says_how_to_install_it(set_up):
    with pytest.raises(InputError, match="TorchTPU is not installed here; make train DEVICE=tpu"):
        set_up()


def test_torchtpu_takes_one_chip(set_up, monkeypatch):
    for name, value in start_processes.variables(index=0, count=2, port=1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="WORLD_SIZE is 2, but --device tpu runs on one chip"):
        set_up()


def test_a_command_ends_with_the_sentence_of_a_missing_chip(tmp_path):
    """`import torch` loads the backends that it finds: with the stand-in it would end with its
    error."""
    install_stand_in(tmp_path, STANDS_IN["import"])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CPU_NUM_DEVICES": "1"}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    command = [sys.executable, "-m", "train.resnet50", "tiny", "--device", "tpu"]
    ended = subprocess.run(
        [*command, "--runs", tmp_path / "runs"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )

    assert ended.returncode == 2, ended.stderr
    assert "error: --device is tpu, but TorchTPU does not load here" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_shapes_are_fixed_on_torchtpu_alone():
    assert ONE_CPU.shapes_may_vary
    on_tpu = dataclasses.replace(ONE_CPU, device=SimpleNamespace(type="tpu"))
    assert not on_tpu.shapes_may_vary


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_fused_updates_by_a_rate_on_the_device_are_the_same(kind):
    """The rate is a tensor, as on TorchTPU, which would compile each float anew; another one takes
    its place."""
    updated = []
    for on_device in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 8))
        optimizer = kind([weight], lr=0.1, fused=True)
        (group,) = optimizer.param_groups
        if on_device:
            torchtpu.prepare_group(group, ONE_CPU)
        for rate in (0.5, 0.25):
            device.set_lr(optimizer, rate)
            assert isinstance(group["lr"], torch.Tensor) == on_device
            update(weight.square().sum(), optimizer)
        updated.append(weight.detach())

    assert torch.equal(*updated)


# ---- make ----------------------------------------------------------------------------------------
def test_make_installs_torchtpu_into_its_own_environment(tmp_path):
    said = make("-n", "train", "MODEL=bert", "DEVICE=tpu", f"VENV={tmp_path}/new").stdout
    assert "never been run" in said
    assert "grep -v '^torch' requirements-eager.txt" in said
    assert "-r requirements-newest.txt -r requirements-torch-tpu.txt" in said
    assert "requirements-torchrec.txt" not in said
    assert said.splitlines()[-1].endswith(
        'new/bin/python -m train.glue tiny --model bert    --device "$DEVICE" '
    )

    variables = make("-pn", "install", "DEVICE=tpu").stdout
    assert "\nVENV := .venv-tpu\n" in variables


def test_make_takes_tpu_for_a_device_of_this_machine():
    refused = make("train", "MODEL=bert", "DEVICE=tpu", "TPU=my-tpu")
    assert refused.returncode == 2
    assert "DEVICE=tpu runs on devices of this machine, not on TPU=my-tpu" in refused.stderr
