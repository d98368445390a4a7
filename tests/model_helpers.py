"""Helpers of the models' tests: fairseq's golden files, fairseq itself, random models, and a
comparison of tensors by name."""

import argparse
import copy
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models import encoder_layers, fairseq
from models.transformer import Transformer

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests/fairseq_reference/golden"
PYTHON = ROOT / ".venv-fairseq/bin/python"
# Words of source and target that each golden checkpoint knows.
WORDS = {"initial.pt": (64, 64), "trained.pt": (64, 64), "prenorm.pt": (24, 40)}

# Files that fairseq wrote


def golden(name: str) -> tuple[dict, dict[str, Tensor]]:
    """Returns the settings and the weights of a checkpoint that fairseq wrote."""
    return fairseq.read_checkpoint((GOLDEN / name).read_bytes(), name)


def checkpoint(name: str, folder: Path = GOLDEN) -> dict:
    """Reads a checkpoint of fairseq, unpickled with no class allowed but argparse.Namespace."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(folder / name, map_location="cpu", weights_only=True)


def joined(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights with the projections q, k and v as one in_proj, as older versions of fairseq
    had them."""
    old: dict[str, Tensor] = {}
    for name, value in weights.items():
        if ".q_proj." in name:
            projections = []
            for letter in "qkv":
                projections.append(weights[name.replace("q_proj", f"{letter}_proj")])
            old[name.replace("q_proj.", "in_proj_")] = torch.cat(projections)
        elif ".k_proj." not in name and ".v_proj." not in name:
            old[name] = value
    return old


def arrays(name: str = "arrays.npz", folder: Path = GOLDEN) -> dict[str, np.ndarray]:
    """Reads arrays that fairseq computed."""
    with np.load(folder / name, allow_pickle=False) as file:
        return dict(file)


def transformer_of(
    settings: dict, weights: dict[str, Tensor], words: tuple[int, int], name: str
) -> Transformer:
    """Returns the model of a checkpoint, as the scripts create it.

    Args:
        words: how many the source and the target have.
        name: of the checkpoint, for messages.
    """
    architecture = fairseq.architecture(settings, weights, name)
    model = Transformer(architecture, *words)
    fairseq.load_weights(model, weights, name)
    return model.eval()


def golden_transformer(name: str) -> Transformer:
    """Returns the model of a golden checkpoint."""
    settings, weights = golden(name)
    return transformer_of(settings, weights, WORDS[name], name)


# fairseq itself


def live(test):
    """Marks a test that runs fairseq itself: slow, and only where it is installed."""
    reason = "no .venv-fairseq here: `make fairseq` installs it"
    where_installed = pytest.mark.skipif(not PYTHON.exists(), reason=reason)
    return where_installed(pytest.mark.slow(test))


def with_fairseq(*command: str | Path) -> str:
    """Runs a program of fairseq's environment, or Python code after "-c"; returns its output.

    Its loader unpickles anything.
    """
    environment = os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "OMP_NUM_THREADS": "1"}
    if command[0] == "-c":
        command = (PYTHON, "-W", "ignore", *command)
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


# Models


def randomized(model: nn.Module) -> nn.Module:
    """Gives the model weights that make it look at everything that it can, biases included, and no
    dropout; returns it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.add_(1)
    return model.eval()


def fast(model: PreTrainedModel | None, packing_parts: int = 0) -> PreTrainedModel | None:
    """Returns a copy of a model of transformers with our layers; None where there is no model."""
    if model is None:
        return None
    return encoder_layers.fast_layers(copy.deepcopy(model), packing_parts)


def assert_all_close(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    rtol: float,
    share: float,
    atol: float,
) -> None:
    """Asserts that tensors of the same names differ by at most `atol`, `share` of the tensor's
    largest number, and `rtol` of the number itself, together."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        largest = value.abs().max().item()
        torch.testing.assert_close(
            found[name].cpu(),
            value,
            rtol=rtol,
            atol=share * largest + atol,
            msg=lambda message, name=name: f"{name}: {message}",
        )
