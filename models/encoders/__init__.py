"""The encoders, one record in one file each. A new one is a file here, and a line in optional.py.

    encoder = encoders.by_name("bert")
    settings = encoders.new_configuration("bert", "tiny", tokenizer, max_tokens=32)

record.py explains the fields of a record. What all encoders of transformers have in common is in
models/: encoder_layers.py, encoder_files.py, architectures.py, classification.py, objectives.py.
"""

import functools

from torch import nn
from transformers import PreTrainedConfig

import optional
from errors import InputError
from models.encoders.record import Encoder, Size
from models.partition import Rules

NAMES = tuple(optional.ENCODERS)
PRETRAINED = optional.PRETRAINED

SIZES = {
    "tiny": Size(layers=2, width=64, heads=2),
    "mini": Size(layers=4, width=256, heads=4),
    "base": Size(layers=12, width=768, heads=12),
    "large": Size(layers=24, width=1024, heads=16),
    "1.3b": Size(layers=24, width=2048, heads=32),  # Shoeybi et al. 2019, table 4
}


@functools.cache
def by_name(name: str) -> Encoder:
    """Returns the record of a --model.

    Raises:
        ValueError: the name is none of NAMES.
        InputError: its file is not there, as in a copy of a script for another model.
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}; it must be {', '.join(NAMES)}")
    return optional.load(name).ENCODER


def by_config(config: PreTrainedConfig) -> Encoder | None:
    """Returns the record of a configuration's architecture.

    None where there is none, as for most architectures that --model auto accepts.

    Raises:
        InputError: as `by_name`.
    """
    if config.model_type not in NAMES:
        return None
    return by_name(config.model_type)


def new_configuration(name: str, size: str, tokenizer, max_tokens: int) -> PreTrainedConfig:
    """Returns the configuration of a new encoder, as the published models of its kind have it.

    Args:
        name: one of NAMES.
        size: a key of SIZES.
        tokenizer: of transformers; gives the size of the vocabulary and the special tokens.
        max_tokens: the longest row; XLNet's positions are relative and have no end.
    """
    return by_name(name).new_configuration(SIZES[size], tokenizer, max_tokens)


def published(name: str) -> PreTrainedConfig:
    """Returns the configuration of the published model, as a copy that may be changed."""
    settings = by_name(name).published
    return type(settings).from_dict(settings.to_dict())


def rules(model: nn.Module) -> Rules:
    """Returns how an encoder may be split over devices, with or without its language-model head.

    Raises:
        InputError: it has no record.
    """
    encoder = by_config(model.config)
    if encoder is None:
        raise InputError(
            "--mesh, --shard-state and --remat know "
            f"{', '.join(PRETRAINED)}, not {model.config.model_type}: "
            "leave them out, or add a record for it to models/encoders"
        )

    partition = encoder.partition
    parameters = dict(partition.parameters)
    if hasattr(model, encoder.language_head.module):
        parameters |= encoder.language_head.parameters
    return Rules(
        parameters=parameters,
        layer_lists=(partition.layer_list,),
        heads=model.config.num_attention_heads,
        shared=partition.shared,
        time_major=partition.time_major,
    )
