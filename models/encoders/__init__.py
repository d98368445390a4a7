"""The encoders, one record in one file each. A new one is a file here, and a line in MODULES.

    encoder = encoders.record("bert")
    settings = encoders.configuration("bert", "tiny", tokenizer, max_tokens=32)

record.py explains the fields of a record. What all encoders of transformers have in common is in
models/: encoder_layers.py, encoder_files.py, architectures.py, classification.py, objectives.py.
"""

import functools

from torch import nn
from transformers import PreTrainedConfig

from errors import InputError, optional_module
from models.encoders.record import Encoder, Size
from models.partition import Rules

# --model -> the module whose ENCODER is its record. The record of an architecture has the name that
# transformers gives it (model_type). A copy of a script has the file of its own encoder only, so a
# module is imported when it is used. copy_model.py and the Makefile read these lines as text.
MODULES = {
    "bert": "models.encoders.bert",
    "distilbert": "models.encoders.distilbert",
    "roberta": "models.encoders.roberta",
    "xlnet": "models.encoders.xlnet",
    "fairseq-roberta": "models.encoders.fairseq_roberta",
    "auto": "models.encoders.auto",
}
NAMES = tuple(MODULES)
PRETRAINED = tuple(name for name in NAMES if name != "auto")  # auto is for fine-tuning only

SIZES = {
    "tiny": Size(layers=2, width=64, heads=2),
    "mini": Size(layers=4, width=256, heads=4),
    "base": Size(layers=12, width=768, heads=12),
    "large": Size(layers=24, width=1024, heads=16),
    "1.3b": Size(layers=24, width=2048, heads=32),  # Shoeybi et al. 2019, table 4
}


@functools.cache
def record(name: str) -> Encoder:
    """Returns the record of a --model.

    Raises:
        InputError: its file is not there, as in a copy of a script for another model.
    """
    if name not in MODULES:
        raise ValueError(f"name is {name!r}; it must be {', '.join(NAMES)}")
    return optional_module(MODULES[name], f"--model {name}", f"MODEL={name}").ENCODER


def record_of(config: PreTrainedConfig) -> Encoder | None:
    """Returns the record of a configuration's architecture; None where it has none, as most that
    --model auto takes. Raises InputError as `record`."""
    if config.model_type not in MODULES:
        return None
    return record(config.model_type)


def configuration(name: str, size: str, tokenizer, max_tokens: int) -> PreTrainedConfig:
    """Returns the configuration of a new encoder, as the published models of its kind have it.

    Args:
        name: a key of MODULES.
        size: a key of SIZES.
        tokenizer: of transformers; gives the size of the vocabulary and the special tokens.
        max_tokens: the longest row; XLNet's positions are relative and have no end.
    """
    return record(name).configuration(SIZES[size], tokenizer, max_tokens)


def published(name: str) -> PreTrainedConfig:
    """Returns the configuration of the published model, as a copy that may be changed."""
    settings = record(name).published
    return type(settings).from_dict(settings.to_dict())


def rules(model: nn.Module) -> Rules:
    """Returns how an encoder may be cut over devices, with or without the head of a language model.

    Raises:
        InputError: it has no record.
    """
    encoder = record_of(model.config)
    if encoder is None:
        known = f"{', '.join(PRETRAINED)}, not {model.config.model_type}"
        raise InputError(
            f"--mesh, --shard-state and --remat know {known}: leave them out, or add a record for it to models/encoders"
        )

    parameters = dict(encoder.cuts.parameters)
    if hasattr(model, encoder.head.module):
        parameters |= encoder.head.cuts
    return Rules(
        parameters=parameters,
        layers=(encoder.cuts.layers,),
        heads=model.config.num_attention_heads,
        shared=encoder.cuts.shared,
        time_major=encoder.cuts.time_major,
    )
