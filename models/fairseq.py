"""fairseq's checkpoint files: read without running code from them, and written so that fairseq reads them.

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
from models.transformer import Architecture, Transformer

# Switches of fairseq that change the numbers, with the value that this Transformer has.
UNSUPPORTED = {
    "encoder_learned_pos": False,
    "decoder_learned_pos": False,
    "no_token_positional_embeddings": False,
    "layernorm_embedding": False,
    "no_scale_embedding": False,
    "no_cross_attention": False,
    "cross_self_attention": False,
    "adaptive_input": False,
    "adaptive_softmax_cutoff": None,
    "activation_fn": "relu",
    "quant_noise_pq": 0,
}
# In a state_dict of fairseq, but no weights.
NOT_WEIGHTS = re.compile(r"\.version$|\.embed_positions\.(_float_tensor|weights)$")


def read_checkpoint(content: bytes, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(settings of the model, its state_dict in float32 with the names of today's fairseq).

    Args:
        content: the file. name: its path, for messages.
    Raises:
        InputError: not a checkpoint of fairseq, or one that needs more than tensors and settings to be unpickled.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # what is no checkpoint makes torch's unpickler raise anything, a KeyError for text
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
    """Names of older versions to those of fairseq 0.12, as its `upgrade_state_dict_named` functions do; what is no
    weight is left out."""
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


def architecture(settings: dict[str, Any], weights: dict[str, Tensor], name: str) -> Architecture:
    """Sizes and switches from a checkpoint's settings; what they leave out has fairseq's default.

    Raises:
        InputError: the model is not this Transformer.
    """
    for switch, value in UNSUPPORTED.items():
        if settings.get(switch, value) != value:
            raise InputError(f"{name} has {switch} {settings[switch]}; models/transformer.py has {value} only")
    sizes = {}
    for field, key, default in (
        ("dim", "embed_dim", 512),
        ("ffn_dim", "ffn_embed_dim", 2048),
        ("heads", "attention_heads", 8),
        ("pre_norm", "normalize_before", False),
    ):
        # A decoder's width follows the encoder's.
        encoder = settings.get(f"encoder_{key}", default)
        decoder = settings.get(f"decoder_{key}", encoder if field in ("dim", "ffn_dim") else default)
        if encoder != decoder:
            raise InputError(f"{name} has {key} {encoder} in its encoder and {decoder} in its decoder; expected one")
        sizes[field] = encoder
    if sizes["pre_norm"] and "encoder.layer_norm.weight" not in weights:
        raise InputError(f"{name} normalises before its layers but not after the last (fairseq before 0.5)")
    share = "none"
    if settings.get("share_decoder_input_output_embed"):
        share = "decoder"
    if settings.get("share_all_embeddings"):
        share = "all"
    positions = min(settings.get(f"max_{side}_positions") or 1024 for side in ("source", "target"))
    return Architecture(
        **sizes,
        encoder_layers=settings.get("encoder_layers", 6),
        decoder_layers=settings.get("decoder_layers", 6),
        dropout=settings.get("dropout", 0.1),
        attention_dropout=settings.get("attention_dropout", 0.0),
        activation_dropout=settings.get("activation_dropout", 0.0) or settings.get("relu_dropout", 0.0),
        share_embeddings=share,
        max_positions=positions,
    )


def load_weights(model: Transformer, weights: dict[str, Tensor], name: str) -> None:
    """Loads a state_dict of fairseq's names into a model.

    Raises:
        InputError: names or shapes differ; where the words do, the dictionary is another one.
    """
    own = model.state_dict()
    for key in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        if key in weights and weights[key].shape[0] != own[key].shape[0]:
            words = f"{weights[key].shape[0]} words and the dictionary {own[key].shape[0]}"
            raise InputError(f"{name} was trained with another dictionary: {key} has {words}")
    wrong = sorted(own.keys() ^ weights.keys())
    wrong += [key for key in own.keys() & weights.keys() if own[key].shape != weights[key].shape]
    if wrong:
        raise InputError(f"{name} does not fit the model: {wrong[0]} and {len(wrong) - 1} more tensors differ")
    model.load_state_dict(weights)


def write_checkpoint(model: Transformer, weights: dict[str, Tensor], updates: int, **settings: Any) -> bytes:
    """A file that fairseq 0.12 loads (fairseq-generate, `load_model_ensemble_and_task`), and `read_checkpoint`.

    Args:
        weights: the model's state_dict on the host.
        updates: training steps, for information.
        settings: further settings; source_lang and target_lang are needed.
    """
    arch = model.arch
    both = {"embed_dim": arch.dim, "ffn_embed_dim": arch.ffn_dim, "attention_heads": arch.heads}
    both |= {"normalize_before": arch.pre_norm}
    args = argparse.Namespace(
        arch="transformer",
        task="translation",
        criterion="label_smoothed_cross_entropy",
        optimizer="adam",
        lr_scheduler="inverse_sqrt",
        lr=[5e-4],
        **{f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in both.items()},
        encoder_layers=arch.encoder_layers,
        decoder_layers=arch.decoder_layers,
        dropout=arch.dropout,
        attention_dropout=arch.attention_dropout,
        activation_dropout=arch.activation_dropout,
        share_all_embeddings=arch.share_embeddings == "all",
        share_decoder_input_output_embed=arch.share_embeddings in ("all", "decoder"),
        max_source_positions=arch.max_positions,
        max_target_positions=arch.max_positions,
        **settings,
    )
    # fairseq 0.12 wants these; 3 is the version whose pre-norm stacks end with a norm.
    extra = {f"{stack}.version": torch.tensor([3.0]) for stack in ("encoder", "decoder")}
    extra |= {f"{stack}.embed_positions._float_tensor": torch.zeros(1) for stack in ("encoder", "decoder")}
    history = {"criterion_name": "LabelSmoothedCrossEntropyCriterion", "optimizer_name": "FairseqAdam"}
    history |= {"lr_scheduler_state": {}, "num_updates": updates}
    state = {"args": args, "cfg": None, "model": weights | extra, "optimizer_history": [history], "task_state": {}}
    state["extra_state"] = {"train_iterator": {"epoch": 1}}
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
