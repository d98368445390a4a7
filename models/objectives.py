"""The pretraining objectives of the encoders: plain PyTorch on the batches of data/pretraining.py.

An encoder's record names the module of its objective:

    masked_words.py    BERT (Devlin et al. 2019, section 3.1), RoBERTa (Liu et al. 2019); BERT may
                       predict the next sentence as well
    permutation.py     XLNet, with two streams of attention (Yang et al. 2019, section 2.3)
    distillation.py    DistilBERT, a teacher's predictions (Sanh et al. 2019, section 3)

Each has `forward(model, batch)`; one with a teacher also has `losses` and `open_teacher`.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from errors import InputError
from models import encoder_files, encoders, layers
from models.encoder_files import Source

# Where nothing is predicted, the sum is 0, too. A mean over processes may be a fraction.
LEAST_COUNT = 1e-3


@functools.cache
def of_encoder(name: str) -> ModuleType:
    """Returns the module of the objective of an encoder, a name of models/encoders."""
    return importlib.import_module(encoders.by_name(name).objective)


def language_model(
    settings: PreTrainedConfig, next_sentence: bool, source: Source | None
) -> PreTrainedModel:
    """Returns a model to pretrain, with its language-model head.

    Args:
        source: of a checkpoint's weights; None: all weights are new.

    Raises:
        InputError: the next sentence is to be predicted, but the BERT has one type of tokens: it
            cannot tell the two segments apart.
    """
    if next_sentence and settings.type_vocab_size < 2:
        raise InputError(
            "--next-sentence needs a BERT with 2 types of tokens; "
            "the checkpoint's type_vocab_size is 1"
        )

    auto_class = AutoModelForMaskedLM
    has_masked_class = type(settings) in AutoModelForMaskedLM._model_mapping  # XLNet has none
    if next_sentence or not has_masked_class:
        auto_class = AutoModelForPreTraining

    if source is None:
        return auto_class.from_config(settings, dtype=torch.float32)
    return encoder_files.load(auto_class, settings, source).model


def same_vocabulary(
    folder: str, own: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase, data: str
) -> None:
    """Raises InputError where a checkpoint's tokens are not those that the data was made with.

    Args:
        folder: the checkpoint, for messages.
        own: the checkpoint's tokenizer.
        tokenizer: the one that the data was made with.
        data: the data's name, for messages.
    """
    if own.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"{folder} has other tokens than the data in {data}: "
            "prepare the text with its tokenizer"
        )


def forward(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Computes what an objective's losses need from a batch.

    Returns:
        "logits" [B, P, vocabulary] of the predicted tokens only; "hidden" [B, T, H], of DistilBERT
        alone; "related" [B, 2], the logits of the next sentence, where the batch asks for them.
    """
    return _of_model(model).forward(model, batch)


def _of_model(model: PreTrainedModel) -> ModuleType:
    """Returns the module of a model's objective."""
    kind = model.config.model_type
    if kind not in encoders.NAMES:
        raise ValueError(
            f"the language-model head of a {kind} is not known; add a record to models/encoders"
        )
    return of_encoder(kind)


def counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns how many tokens of each row are predicted, and how many it has, float32 [B]."""
    predicted = batch["weights"].sum(1)
    tokens = batch["attention_mask"].sum(1).float()
    return {"predicted": predicted, "tokens": tokens}


def losses(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batch: dict[str, Tensor],
    micro_batches: int = 1,
    mean_count: Callable[[Tensor], Tensor] = lambda count: count,
) -> dict[str, Tensor]:
    """Returns "loss", which is minimised, and its terms, in nats except for "cosine".

    "words" is a mean over the predicted tokens; "related" over the rows. distillation.py says what
    is learned from a teacher.

    Args:
        micro_batches: above 1, the batch is one of so many of an update (gradient accumulation).
            They have equal numbers of rows but not of tokens. So the batch has also the `counts` of
            all of them together, and the mean of each loss over the micro-batches is the loss of
            all their rows in one batch.
        mean_count: returns the mean of a count over the processes that share the batch. The mean of
            the losses over the processes is then the loss of the whole batch.
    """
    result = forward(model, batch)
    predicted = _predicted(batch, micro_batches, mean_count)
    nll = layers.negative_log_likelihood(result["logits"], batch["labels"])
    words = (nll * batch["weights"]).sum() / predicted
    if teacher is not None:
        tokens = _tokens(batch, micro_batches, mean_count)
        return _of_model(model).losses(result, words, teacher, batch, predicted, tokens)

    if "related" in result:
        labels = batch["next_sentence"].long()
        related = F.cross_entropy(result["related"].float(), labels, reduction="none").mean()
        return {"loss": words + related, "words": words, "related": related}
    return {"loss": words, "words": words}


def _predicted(
    batch: dict[str, Tensor], micro_batches: int, mean_count: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the number of predicted tokens that a sum over them is divided by.

    Of several micro-batches, that is their mean number; see `losses`.
    """
    if micro_batches == 1:
        return mean_count(batch["weights"].sum()).clamp(min=LEAST_COUNT)
    return mean_count(batch["predicted"].sum()).clamp(min=LEAST_COUNT) / micro_batches


def _tokens(
    batch: dict[str, Tensor], micro_batches: int, mean_count: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the number of tokens that a sum over them is divided by, as `_predicted` does."""
    if micro_batches == 1:
        return mean_count(batch["attention_mask"].float().sum())
    return mean_count(batch["tokens"].sum()) / micro_batches


def scores(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns sums over the rows of a batch whose batch["mask"] [B] is 1.

    They are "loss" and "accuracy" over the "predicted" tokens, and "next_sentence_accuracy" over
    the "rows" where the batch asks for it.
    """
    result = forward(model, batch)
    rows = batch["mask"]
    weights = batch["weights"] * rows[:, None]
    nll = layers.negative_log_likelihood(result["logits"], batch["labels"])
    # Not a product with the weights: 0 times a loss that is not finite would be NaN.
    nll = torch.where(weights > 0, nll, torch.zeros_like(nll))
    is_right = (result["logits"].argmax(-1) == batch["labels"]).float()
    sums = {"loss": nll.sum(), "accuracy": (is_right * weights).sum(), "predicted": weights.sum()}

    if "related" in result:
        is_right = (result["related"].argmax(-1) == batch["next_sentence"]).float()
        sums["next_sentence_accuracy"] = (is_right * rows).sum()
        sums["rows"] = rows.sum()
    return sums
