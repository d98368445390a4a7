"""fairseq's checkpoints of the Transformer, both ways: its settings, its weights, and its files."""

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
    """Returns the sizes and switches of a checkpoint's model.

    Args:
        settings, weights: of the checkpoint, as `read_checkpoint` returns them. What the settings
            leave out has fairseq's default.
        name: the checkpoint's path, for messages.

    Raises:
        InputError: the model is not this Transformer.
    """
    for switch, value in UNSUPPORTED.items():
        if settings.get(switch, value) != value:
            raise InputError(
                f"{name} has {switch} {settings[switch]}; models/transformer.py has {value} only"
            )

    dim = _of_both_stacks(settings, "embed_dim", 512, name, decoder_follows=True)
    ffn_dim = _of_both_stacks(settings, "ffn_embed_dim", 2048, name, decoder_follows=True)
    heads = _of_both_stacks(settings, "attention_heads", 8, name)
    pre_norm = _of_both_stacks(settings, "normalize_before", False, name)
    if pre_norm and "encoder.layer_norm.weight" not in weights:
        raise InputError(
            f"{name} normalises before its layers but not after the last (fairseq before 0.5)"
        )

    share_embeddings = "none"
    if settings.get("share_decoder_input_output_embed"):
        share_embeddings = "decoder"
    if settings.get("share_all_embeddings"):
        share_embeddings = "all"

    activation_dropout = settings.get("activation_dropout", 0.0)
    if not activation_dropout:
        activation_dropout = settings.get("relu_dropout", 0.0)  # its older name

    return Architecture(
        dim=dim,
        ffn_dim=ffn_dim,
        heads=heads,
        encoder_layers=settings.get("encoder_layers", 6),
        decoder_layers=settings.get("decoder_layers", 6),
        dropout=settings.get("dropout", 0.1),
        attention_dropout=settings.get("attention_dropout", 0.0),
        activation_dropout=activation_dropout,
        pre_norm=pre_norm,
        share_embeddings=share_embeddings,
        max_positions=min(
            settings.get("max_source_positions") or 1024,
            settings.get("max_target_positions") or 1024,
        ),
    )


def _of_both_stacks(
    settings: dict[str, Any], key: str, default: Any, name: str, decoder_follows: bool = False
) -> Any:
    """Returns a setting of the encoder; raises InputError where the decoder has another.

    Args:
        settings: of the checkpoint.
        key: the setting, without "encoder_" or "decoder_".
        default: of the encoder, and of the decoder unless it follows.
        name: the checkpoint's path, for messages.
        decoder_follows: the decoder's default is the encoder's value.
    """
    encoder = settings.get(f"encoder_{key}", default)
    decoder = settings.get(f"decoder_{key}", encoder if decoder_follows else default)
    if encoder != decoder:
        raise InputError(
            f"{name} has {key} {encoder} in its encoder and {decoder} in its decoder; expected one"
        )
    return encoder


def load_weights(model: Transformer, weights: dict[str, Tensor], name: str) -> None:
    """Loads a state_dict with fairseq's names into a model.

    Args:
        model: gets the weights.
        weights: of the checkpoint.
        name: the checkpoint's path, for messages.

    Raises:
        InputError: names or shapes differ; where the number of words differs, the dictionary is
            another one.
    """
    own = model.state_dict()
    for key in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        if key in weights and weights[key].shape[0] != own[key].shape[0]:
            raise InputError(
                f"{name} was trained with another dictionary: "
                f"{key} has {weights[key].shape[0]} words and the dictionary {own[key].shape[0]}"
            )

    wrong = sorted(own.keys() ^ weights.keys())
    for key in own.keys() & weights.keys():
        if own[key].shape != weights[key].shape:
            wrong.append(key)
    if wrong:
        raise InputError(
            f"{name} does not fit the model: {wrong[0]} and {len(wrong) - 1} more tensors differ"
        )
    model.load_state_dict(weights)


def write_checkpoint(
    model: Transformer, weights: dict[str, Tensor], updates: int, **settings: Any
) -> bytes:
    """Returns the content of a file that fairseq 0.12 and `read_checkpoint` load.

    In fairseq these are fairseq-generate and `load_model_ensemble_and_task`.

    Args:
        model: gives the settings of the architecture.
        weights: the model's state_dict on the host.
        updates: number of training steps, for information.
        settings: further settings; source_lang and target_lang are needed.
    """
    arch = model.arch
    args = argparse.Namespace(
        arch="transformer",
        task="translation",
        criterion="label_smoothed_cross_entropy",
        optimizer="adam",
        lr_scheduler="inverse_sqrt",
        lr=[5e-4],
        encoder_embed_dim=arch.dim,
        encoder_ffn_embed_dim=arch.ffn_dim,
        encoder_attention_heads=arch.heads,
        encoder_normalize_before=arch.pre_norm,
        decoder_embed_dim=arch.dim,
        decoder_ffn_embed_dim=arch.ffn_dim,
        decoder_attention_heads=arch.heads,
        decoder_normalize_before=arch.pre_norm,
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
    extra = {
        "encoder.version": torch.tensor([3.0]),
        "decoder.version": torch.tensor([3.0]),
        "encoder.embed_positions._float_tensor": torch.zeros(1),
        "decoder.embed_positions._float_tensor": torch.zeros(1),
    }
    history = {
        "criterion_name": "LabelSmoothedCrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {},
        "num_updates": updates,
    }
    state = {
        "args": args,
        "cfg": None,
        "model": weights | extra,
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
