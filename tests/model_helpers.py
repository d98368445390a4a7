"""Helpers of the models' tests: fairseq's golden files, fairseq itself, random models, batches on XLA's devices."""

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
WORDS = {"initial.pt": (64, 64), "trained.pt": (64, 64), "prenorm.pt": (24, 40)}  # of source and target


def live(test):
    """Marks a test that runs fairseq itself: slow, and only where it is installed."""
    missing = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-fairseq here: `make fairseq` installs it")
    return missing(pytest.mark.slow(test))


def golden(name: str) -> tuple[dict, dict[str, Tensor]]:
    """Settings and weights of a checkpoint that fairseq wrote."""
    return fairseq.read_checkpoint((GOLDEN / name).read_bytes(), name)


def checkpoint(name: str, folder: Path = GOLDEN) -> dict:
    """A checkpoint of fairseq, unpickled with no class allowed but argparse.Namespace."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(folder / name, map_location="cpu", weights_only=True)


def joined(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The projections q, k and v as one in_proj, as older versions of fairseq had them."""
    old: dict[str, Tensor] = {}
    for name, value in weights.items():
        if ".q_proj." in name:
            parts = [weights[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            old[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            old[name] = value
    return old


def arrays(name: str = "arrays.npz", folder: Path = GOLDEN) -> dict[str, np.ndarray]:
    with np.load(folder / name, allow_pickle=False) as file:
        return dict(file)


def transformer_of(settings: dict, weights: dict[str, Tensor], words: tuple[int, int], name: str) -> Transformer:
    """The model of a checkpoint, the way the scripts create it."""
    model = Transformer(fairseq.architecture(settings, weights, name), *words)
    fairseq.load_weights(model, weights, name)
    return model.eval()


def golden_transformer(name: str) -> Transformer:
    return transformer_of(*golden(name), WORDS[name], name)


def with_fairseq(*command: str | Path) -> str:
    """Output of a program of fairseq's environment, or of Python code after "-c"; its loader unpickles anything."""
    environment = os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "OMP_NUM_THREADS": "1"}
    program = [PYTHON, "-W", "ignore"] if command[0] == "-c" else []
    result = subprocess.run([*program, *command], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def randomized(model: nn.Module) -> nn.Module:
    """The model with weights that make it look at everything that it can, biases included; without dropout."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.add_(1)
    return model.eval()


def fast(model: PreTrainedModel | None, parts: int = 0) -> PreTrainedModel | None:
    """A copy of a model of transformers with our layers."""
    return encoder_layers.fast_layers(copy.deepcopy(model), parts) if model is not None else None


def assert_all_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, share: float, atol: float):
    """Compares tensors by name, within rtol, `share` of a tensor's largest number, and atol."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        within = share * value.abs().max().item() + atol
        torch.testing.assert_close(found[name].cpu(), value, rtol=rtol, atol=within, msg=lambda m, n=name: f"{n}: {m}")
