"""fairseq's checkpoints of the Transformer, both ways: its settings and weights, and files that fairseq reads."""

import argparse
import io
from typing import Any

import torch
from torch import Tensor

from errors import InputError
from models.fairseq_files import read_checkpoint
from models.transformer import Architecture, Transformer

__all__ = ["architecture", "load_weights", "read_checkpoint", "write_checkpoint"]

# fairseq's switches that change the numbers, with the value that this Transformer has.
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


def architecture(settings: dict[str, Any], weights: dict[str, Tensor], name: str) -> Architecture:
    """Returns the sizes and switches in a checkpoint's settings; what they leave out has fairseq's default.

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
    """Loads a state_dict with fairseq's names into a model.

    Raises:
        InputError: names or shapes differ; where the number of words differs, the dictionary is another one.
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
    """Returns the content of a file that fairseq 0.12 (fairseq-generate, `load_model_ensemble_and_task`) and
    `read_checkpoint` load.

    Args:
        weights: the model's state_dict on the host.
        updates: number of training steps, for information.
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
