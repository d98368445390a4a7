"""fairseq's checkpoint files, read without running code from them.

A checkpoint is a pickled dict. Its "model" is a state_dict. The settings are a `Namespace` in
"args" (until fairseq 0.10) or in "cfg"["model"]. `torch.load(weights_only=True)` unpickles that
with one class allowed, argparse.Namespace.
"""

import argparse
import io
import re
from typing import Any

import torch
from torch import Tensor

from errors import InputError

# Entries of fairseq's state_dicts that are no weights.
NOT_WEIGHTS = re.compile(r"\.version$|\.embed_positions\.(_float_tensor|weights)$")

# Names of older files: the numbered norms of a layer, and the three projections as one matrix.
NUMBERED_NORM = re.compile(r"(encoder|decoder)\.(layers\.\d+)\.layer_norms\.(\d)\.(weight|bias)")
JOINT_PROJECTION = re.compile(r"(.+)\.in_proj_(weight|bias)")
NORMS = {
    "encoder": {
        "0": "self_attn_layer_norm",
        "1": "final_layer_norm",
    },
    "decoder": {
        "0": "self_attn_layer_norm",
        "1": "encoder_attn_layer_norm",
        "2": "final_layer_norm",
    },
}


def read_checkpoint(content: bytes, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns a model's settings, and its state_dict in float32 with today's names of fairseq.

    Args:
        content: the file.
        name: its path, for messages.

    Raises:
        InputError: not a checkpoint of fairseq, or one that needs more than tensors and settings to
            be unpickled.
    """
    state = _unpickled(content, name)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise InputError(f'{name} is not a fairseq checkpoint: it has no "model"')

    settings = state.get("args") or (state.get("cfg") or {}).get("model")
    if settings is None:
        raise InputError(f'{name} has no settings of its model: neither "args" nor "cfg"')
    if isinstance(settings, argparse.Namespace):
        settings = vars(settings)

    weights = {key: value.float() for key, value in state["model"].items()}
    return dict(settings), upgrade_names(weights)


def _unpickled(content: bytes, name: str) -> Any:
    """Unpickles a file of tensors and settings; raises InputError where it holds anything else."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler may raise anything here, a KeyError for text
        reason = "it is damaged, or another kind of file"
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            reason = f"it holds a {foreign[1]}"
        raise InputError(
            f"{name} is not a fairseq checkpoint of tensors and settings only: {reason}"
        ) from error


def upgrade_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights under fairseq 0.12's names.

    Its `upgrade_state_dict_named` functions give these names to older files. Entries that are no
    weights are left out.
    """
    upgraded: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if NOT_WEIGHTS.search(name):
            continue

        norm = NUMBERED_NORM.fullmatch(name)
        projections = JOINT_PROJECTION.fullmatch(name)
        if norm:
            stack, layer, number, kind = norm.groups()
            upgraded[f"{stack}.{layer}.{NORMS[stack][number]}.{kind}"] = weight
        elif projections:
            module, kind = projections.groups()
            for projection, part in zip("qkv", weight.chunk(3), strict=True):
                upgraded[f"{module}.{projection}_proj.{kind}"] = part
        elif name == "decoder.embed_out":
            upgraded["decoder.output_projection.weight"] = weight
        else:
            upgraded[name] = weight

    output = "decoder.output_projection.weight"
    embedding = "decoder.embed_tokens.weight"
    if embedding in upgraded and output not in upgraded:
        upgraded[output] = upgraded[embedding]
    return upgraded
