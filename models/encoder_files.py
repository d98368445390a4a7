"""Opens, loads and saves encoders in transformers' folders.

checkpoint = open_checkpoint("google-bert/bert-base-uncased", "bert")
model = load(AutoModelForMaskedLM, checkpoint.config, checkpoint.source).model
save(folder, model, weights, checkpoint.tokenizer)
"""

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import safetensors
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from errors import InputError
from models import architectures, encoders

# A model may have more tokens than its tokenizer, since sizes are rounded up for the hardware. The
# difference must be below one of these: mDeBERTa has 251,000 tokens, its tokenizer 250,102.
PADDED_VOCABULARY = 128  # tokens
PADDED_SHARE = 0.005  # of the model's tokens


@dataclass(frozen=True)
class Source:
    """Where the weights of a model come from.

    Attributes:
        folder: local folder or hub id.
        weights: by name, where they had to be converted; None: transformers reads the folder's.
    """

    folder: str
    weights: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, whose weights are not loaded yet."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    source: Source


@dataclass(frozen=True)
class Loaded:
    """A model with the weights of a checkpoint.

    Attributes:
        missing: names of the parameters that the checkpoint lacks; they are new.
        other_shapes: names of the parameters that have another shape in the checkpoint, and are new
            too -> their shape there.
    """

    model: PreTrainedModel
    missing: frozenset[str]
    other_shapes: dict[str, torch.Size]


def open_checkpoint(folder: str, model: str, compiled: bool = True) -> Checkpoint:
    """Opens a checkpoint: its configuration and its tokenizer, but not yet its weights.

    Args:
        folder: local folder or hub id.
        model: the encoder that it must be, a name of models/encoders; "auto": any, for which a copy
            of a script needs no record but that of the checkpoint.
        compiled: whether its steps are compiled programs, see `architectures.check`.

    Raises:
        InputError: it cannot be read, is another architecture or one that does not run here, or has
            another model's tokenizer.
    """
    encoder = None if model == "auto" else encoders.by_name(model)
    if encoder is None or encoder.read_folder is None:
        expected = encoder.architecture if encoder else ""
        checkpoint = _open_folder(folder, expected, model, compiled)
    else:
        config, weights, tokenizer = encoder.read_folder(folder)
        checkpoint = Checkpoint(config, tokenizer, Source(folder, weights))

    tokens = getattr(checkpoint.config.get_text_config(), "vocab_size", None)
    if tokens is not None:  # CANINE hashes characters, and has no vocabulary
        unused = tokens - len(checkpoint.tokenizer)
        if not 0 <= unused < max(PADDED_VOCABULARY, PADDED_SHARE * tokens):
            raise InputError(
                f"checkpoint {folder} has a model of {tokens} tokens "
                f"and a tokenizer of {len(checkpoint.tokenizer)}; they do not belong together"
            )
    return checkpoint


def _open_folder(folder: str, expected: str, model: str, compiled: bool) -> Checkpoint:
    """Opens a checkpoint of transformers, see `open_checkpoint`.

    Args:
        expected: the architecture that it must be, by transformers' name; "": any.
    """
    try:
        if folder.startswith(("/", ".")) and not os.path.isdir(folder):
            raise OSError("there is no such folder; give one, or a hub id")
        config = AutoConfig.from_pretrained(folder)
        if expected not in (config.model_type, ""):
            raise InputError(f"checkpoint {folder} is a {config.model_type}, not a {model}")
        architectures.check(folder, config, compiled)
        encoder = encoders.by_config(config)
        if encoder is not None and encoder.own_layers is not None:
            encoder.own_layers(config)  # raises InputError for what they cannot compute
        tokenizer = _open_tokenizer(folder)
    except InputError:  # which is a ValueError
        raise
    except (OSError, ValueError) as error:
        raise InputError(_unreadable(folder, error)) from error
    return Checkpoint(config, tokenizer, Source(folder))


def _open_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a checkpoint; raises OSError or ValueError if it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        raise
    except Exception as error:  # without its files it raises TypeError and other types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"its tokenizer is not there, or not whole ({reason})") from error


def _unreadable(folder: str, error: Exception) -> str:
    """Returns the message for a checkpoint that cannot be read: the first line of the error."""
    return f"checkpoint {folder} cannot be read: {str(error).splitlines()[0]}"


def load(auto_class: type, config: PreTrainedConfig, source: Source) -> Loaded:
    """Loads a checkpoint's weights into a float32 model of one of transformers' auto classes.

    The head is new where the checkpoint has none, or has one for another number of labels.

    Raises:
        InputError: the checkpoint cannot be read, or lacks weights of the encoder, which
            transformers would leave random, or has them in other shapes.
    """
    folder = source.folder
    options = {
        "config": config,
        "dtype": torch.float32,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    try:
        with _without_progress_bars():
            if source.weights is None:
                model, report = auto_class.from_pretrained(folder, **options)
            else:
                model_class = auto_class._model_mapping[type(config)]
                weights = source.weights
                model, report = model_class.from_pretrained(None, state_dict=weights, **options)
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise InputError(_unreadable(folder, error)) from error

    missing = list(report["missing_keys"])
    other_shapes = {name: shape for name, shape, *_ in report["mismatched_keys"]}

    # A pooler may be new: pretraining with masked tokens only does not train one.
    of_encoder = f"{model.base_model_prefix}."
    lacking = [name for name in missing if name.startswith(of_encoder) and "pooler" not in name]
    if lacking:
        raise InputError(
            f"checkpoint {folder} lacks {len(lacking)} weights of its encoder, such as {lacking[0]}"
        )
    misshapen = [name for name in other_shapes if name.startswith(of_encoder)]
    if misshapen:
        raise InputError(
            f"checkpoint {folder} has {misshapen[0]} in another shape than its configuration says"
        )
    return Loaded(model, frozenset(missing), other_shapes)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing the progress of seconds; a download from the hub, which has
    bars of its own, keeps them."""

    def hidden(bar: Callable, arguments: tuple, options: dict[str, Any]) -> Any:
        return bar(*arguments, **{**options, "disable": True})

    before = logging.set_tqdm_hook(hidden)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def save(
    folder: str,
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    write_folder: Callable | None = None,
) -> None:
    """Writes the folder that `from_pretrained` and `pipeline` of transformers load.

    Args:
        folder: local.
        weights: the model's state_dict on the host.
        write_folder: of the encoder's record; writes what fairseq loads into the subfolder fairseq.
    """
    settings = copy.deepcopy(model.config)
    settings._attn_implementation = None  # the name of ours means nothing to other programs
    with torch.device("meta"):  # allocates no second copy of the weights
        on_host = type(model)(settings)
    on_host.load_state_dict(weights, assign=True)
    on_host.tie_weights()
    with _without_progress_bars():
        on_host.save_pretrained(folder)

    tokenizer = copy.deepcopy(tokenizer)
    longest = architectures.positions(model)
    if longest < math.inf:  # otherwise the tokenizer keeps the length that it came with
        tokenizer.model_max_length = longest
    if tokenizer.is_fast:
        # Otherwise its file would have this run's --lengths, and cut the text of later users.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)

    if write_folder is not None:
        write_folder(f"{folder}/fairseq", model.config, weights, tokenizer)
