"""Encoders that find the answer to a question in a text: the model with its head, its logits and
its losses.

    opened = span_model(checkpoint.config, checkpoint.source)
    logits = compute_logits(opened.model, batch)
    loss = compute_losses(logits, batch["start"], batch["end"]).mean()

The head scores each token as the first and as the last of the answer (Devlin et al. 2019, section
4.2). XLNet's is the same: transformers' XLNetForQuestionAnsweringSimple, not the head of Yang et
al. 2019, which searches for the last token by each first one.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, PreTrainedConfig, PreTrainedModel

from errors import InputError
from models import architectures, encoder_files, encoders
from models.encoder_files import Source

HEAD = "qa_outputs"  # transformers' name of it in all these models
# The ends of the names of transformers' classes that have it.
CLASSES = ("ForQuestionAnswering", "ForQuestionAnsweringSimple")


@dataclass(frozen=True)
class SpanModel:
    """A model that scores first and last tokens.

    Attributes:
        why_new: why its head is new; "": the checkpoint has one.
    """

    model: PreTrainedModel
    why_new: str = ""


def span_model(settings: PreTrainedConfig, source: Source | None) -> SpanModel:
    """Returns a model that finds answers; a checkpoint's own head is kept.

    Args:
        settings: of the checkpoint, or of a new model.
        source: of the checkpoint's weights; None: all weights are new.
    Raises:
        InputError: as `encoder_files.load`; transformers has no such model of this architecture, or
            one with another head.
    """
    kind = settings.model_type
    model_class = AutoModelForQuestionAnswering._model_mapping.get(type(settings), None)
    if model_class is None or not model_class.__name__.endswith(CLASSES):
        raise InputError(
            f"transformers has no {kind} that answers questions by first and last tokens; give "
            "another encoder, such as a BERT"
        )
    settings.num_labels = 2  # the first and the last token
    if source is None:
        model = AutoModelForQuestionAnswering.from_config(settings, dtype=torch.float32)
        why_new = ""
    else:
        loaded = encoder_files.load(AutoModelForQuestionAnswering, settings, source)
        model = loaded.model
        not_loaded = sorted(loaded.missing | loaded.other_shapes.keys())
        of_head = [name for name in not_loaded if name.startswith(f"{HEAD}.")]
        why_new = f"checkpoint {source.folder} has none that answers questions" if of_head else ""

    if not hasattr(model, HEAD):
        raise InputError(
            f"transformers' {model_class.__name__} has no layer {HEAD}, which scores the tokens; "
            "give another encoder, such as a BERT"
        )
    return SpanModel(model, why_new)


def compute_logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Returns the logits of first and last tokens [B, 2, T].

    Args:
        batch: "input_ids", "attention_mask" and "token_type_ids" [B, T].
    """
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if architectures.takes_types(model):
        inputs["token_type_ids"] = batch["token_type_ids"]
    encoder = encoders.by_config(model.config)
    if encoder is not None:
        inputs |= encoder.classifier_inputs
    outputs = model(**inputs)
    return torch.stack([outputs.start_logits, outputs.end_logits], dim=1)


def compute_losses(logits: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Returns each row's loss, float32 [B]: the mean of the cross-entropies of its first and its
    last token, among all T places.

    Args:
        logits: [B, 2, T].
        start, end: the places of the first and the last token, integers [B].
    """
    places = torch.stack([start, end], dim=1).long()
    losses = F.cross_entropy(logits.float().flatten(0, 1), places.flatten(), reduction="none")
    return losses.view(-1, 2).mean(1)
