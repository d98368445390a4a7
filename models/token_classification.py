"""Encoders that classify the tokens of a text: the model with its head, its logits and its losses.

    found = tagger(checkpoint.config, ("O", "B-PER", "I-PER"), checkpoint.source)
    logits = classification.compute_logits(found.model, batch)               # [B, T, labels]
    losses = compute_losses(logits, batch["labels"])

Names decide which row of a checkpoint's head is which class, see heads.py.
"""

import copy
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedConfig

from models import classification
from models.encoder_files import Source

HEAD = classification.HeadKind(
    AutoModelForTokenClassification,
    other_tasks=("ForSequenceClassification", "ForMultipleChoice", "ForEntityClassification"),
)


def tagger(
    settings: PreTrainedConfig,
    labels: Sequence[str],
    source: Source | None,
    stated: Sequence[str] = (),
) -> classification.Classifier:
    """Returns a model that classifies tokens by these labels; arguments and errors as of
    `classification.classifier`."""
    of_checkpoint = copy.deepcopy(settings)  # keeps its own labels
    settings.num_labels = len(labels)
    settings.problem_type = None  # of a classifier of sequences
    settings.id2label = dict(enumerate(labels))
    settings.label2id = {name: number for number, name in enumerate(labels)}
    return classification.with_head(HEAD, settings, of_checkpoint, source, labels, stated)


def compute_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns each token's cross-entropy, float32 [B, T]; 0 where a token has no label.

    Args:
        logits: [B, T, labels].
        labels: numbers of classes [B, T]; below 0: no label.
    """
    classes = logits.shape[2]
    flat = F.cross_entropy(
        logits.float().reshape(-1, classes),
        labels.clamp(min=0).long().reshape(-1),
        reduction="none",
    )
    return flat.reshape(labels.shape) * (labels >= 0)
