"""fairseq's checkpoint files, read without running code from them.

A checkpoint is a pickled dict; its "model" is a state_dict, and the settings are a `Namespace` in "args" (until fairseq
0.10) or in "cfg"["model"]. `torch.load(weights_only=True)` unpickles that with one class allowed, argparse.Namespace.
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


def read_checkpoint(content: bytes, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns (settings of the model, its state_dict in float32 with the names of today's fairseq).

    Args:
        content: the file.
        name: its path, for messages.

    Raises:
        InputError: not a checkpoint of fairseq, or one that needs more than tensors and settings to be unpickled.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler may raise anything here, a KeyError for text
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it holds a {foreign[1]}" if foreign else "it is damaged, or another kind of file"
        raise InputError(f"{name} is not a fairseq checkpoint of tensors and settings only: {reason}") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise InputError(f'{name} is not a fairseq checkpoint: it has no "model"')
    settings = state.get("args") or (state.get("cfg") or {}).get("model")
    if settings is None:
        raise InputError(f'{name} has no settings of its model: neither "args" nor "cfg"')
    settings = vars(settings) if isinstance(settings, argparse.Namespace) else dict(settings)
    return settings, upgrade_names({key: value.float() for key, value in state["model"].items()})


def upgrade_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights under fairseq 0.12's names, as its `upgrade_state_dict_named` functions give them to older
    files; entries that are no weights are left out."""
    upgraded: dict[str, Tensor] = {}
    norms = {
        "encoder": {"0": "self_attn_layer_norm", "1": "final_layer_norm"},
        "decoder": {"0": "self_attn_layer_norm", "1": "encoder_attn_layer_norm", "2": "final_layer_norm"},
    }
    for name, weight in weights.items():
        if NOT_WEIGHTS.search(name):
            continue
        if match := re.fullmatch(r"(encoder|decoder)\.(layers\.\d+)\.layer_norms\.(\d)\.(weight|bias)", name):
            stack, layer, number, kind = match.groups()
            upgraded[f"{stack}.{layer}.{norms[stack][number]}.{kind}"] = weight
        elif match := re.fullmatch(r"(.+)\.in_proj_(weight|bias)", name):
            for projection, part in zip("qkv", weight.chunk(3), strict=True):
                upgraded[f"{match[1]}.{projection}_proj.{match[2]}"] = part
        elif name == "decoder.embed_out":
            upgraded["decoder.output_projection.weight"] = weight
        else:
            upgraded[name] = weight
    if "decoder.embed_tokens.weight" in upgraded:
        upgraded.setdefault("decoder.output_projection.weight", upgraded["decoder.embed_tokens.weight"])
    return upgraded
