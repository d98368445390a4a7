"""Pretraining objectives of the encoders: plain PyTorch on the batches of data/pretraining.py.

masked words            BERT (Devlin et al. 2019, section 3.1), RoBERTa (Liu et al. 2019)
the next sentence       BERT, where the batch has "next_sentence"
a permutation's end     XLNet, with two streams of attention (Yang et al. 2019, section 2.3)
a teacher's words       DistilBERT (Sanh et al. 2019, section 3)
"""

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

import optional
from errors import InputError
from models import encoders, layers

# Weights of DistilBERT's three losses, and the temperature of the first: distillation/README.md of its authors.
SOFT, HARD, COSINE, TEMPERATURE = 5.0, 2.0, 1.0, 2.0


def language_model(
    settings: PreTrainedConfig, next_sentence: bool, source: tuple[str, dict[str, Tensor] | None] | None
) -> PreTrainedModel:
    """Returns a model to pretrain: a new one, unless `source` gives the (folder, weights) of `encoders.load`.

    Raises:
        InputError: the next sentence is to be predicted by a BERT that does not tell the two apart.
    """
    if next_sentence and settings.type_vocab_size < 2:
        raise InputError("--next-sentence needs a BERT with 2 types of tokens; the checkpoint's type_vocab_size is 1")
    pretraining = next_sentence or settings.model_type == "xlnet"
    auto_class = AutoModelForPreTraining if pretraining else AutoModelForMaskedLM
    if source is None:
        return auto_class.from_config(settings, dtype=torch.float32)
    folder, weights = source
    return encoders.load(auto_class, settings, weights, folder)


def same_vocabulary(folder: str, own: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase, data: str) -> None:
    """Raises InputError where the tokens of a checkpoint are not those that the data was made with."""
    if own.get_vocab() != tokenizer.get_vocab():
        raise InputError(f"{folder} has other tokens than the data in {data}: prepare the text with its tokenizer")


def predict(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Applies the language-model head of a BERT, RoBERTa or DistilBERT to some places only, [B, P, H]; returns logits
    [B, P, words].

    transformers' own forward pass applies the head to all T places: 50 of 264 million cycles of BERT-base's step with
    79 predicted places of 512, on one v5e chip (libtpu 0.0.51's estimate).
    """
    if model.config.model_type == "bert":
        return model.cls.predictions(hidden)
    if model.config.model_type == "roberta":
        return model.lm_head(hidden)
    if model.config.model_type == "distilbert":
        transformed = model.vocab_layer_norm(model.activation(model.vocab_transform(hidden)))
        return model.vocab_projector(transformed)
    raise ValueError(f"the language-model head of a {model.config.model_type} is not known; add it here")


def forward(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns "logits" [B, P, words] of the predicted places only; "hidden" [B, T, H], except for XLNet; and "related"
    [B, 2] where the batch asks for the next sentence."""
    inputs, positions = {"input_ids": batch["input_ids"]}, batch["positions"]
    if model.config.model_type in ("bert", "xlnet"):  # RoBERTa and DistilBERT have no types of tokens
        inputs["token_type_ids"] = batch["token_type_ids"]
    if model.config.model_type == "xlnet":
        permutation = optional.load("xlnet pretraining")
        length = batch["order"].shape[1]
        targets = permutation.is_target(positions, batch["weights"], length)
        inputs["perm_mask"] = permutation.perm_mask(batch["order"], targets)
        inputs["target_mapping"] = permutation.target_mapping(positions, length)
        return {"logits": model.lm_loss(model.transformer(**inputs, use_mems=False).last_hidden_state)}
    outputs = model.base_model(**inputs, attention_mask=batch["attention_mask"])
    hidden = outputs.last_hidden_state
    result = {"logits": predict(model, layers.take(hidden, positions)), "hidden": hidden}
    if "next_sentence" in batch:
        result["related"] = model.cls.seq_relationship(outputs.pooler_output)
    return result


def counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns for each row of a batch how many of its tokens are predicted, and how many it has: float32 [B]."""
    return {"predicted": batch["weights"].sum(1), "tokens": batch["attention_mask"].sum(1).float()}


def losses(
    model: PreTrainedModel, teacher: PreTrainedModel | None, batch: dict[str, Tensor], parts: int = 1
) -> dict[str, Tensor]:
    """Returns "loss", which is minimised, and its parts, in nats except for the last.

    "words" is a mean over the predicted tokens; "related" over the rows. With a teacher, "soft" is a mean over the
    predicted tokens (in its authors' code over all tokens, which would need the head on all of them), and "cosine" is
    1 - cosine of the hidden states over all tokens.

    Args:
        parts: above 1, the batch is one of so many that an update is made of. They have as many rows, but not as many
            tokens: the batch has the `counts` of them all together, so that the mean of each loss over the parts is
            that of all their rows in one batch.
    """
    result, weights = forward(model, batch), batch["weights"]
    predicted = weights if parts == 1 else batch["predicted"]
    predicted = predicted.sum().clamp(min=1)
    if parts > 1:
        predicted = predicted / parts

    def mean(values: Tensor) -> Tensor:
        return (values * weights).sum() / predicted

    words = mean(layers.negative_log_likelihood(result["logits"], batch["labels"]))
    if teacher is not None:
        with torch.no_grad():
            taught = forward(teacher, batch)
        wanted = F.softmax(taught["logits"].float() / TEMPERATURE, -1)
        # Times T squared, so that the size of the gradients does not depend on T (Hinton et al. 2015, section 2).
        soft = mean(layers.divergence(result["logits"] / TEMPERATURE, wanted)) * TEMPERATURE**2
        real = batch["attention_mask"].float()
        apart = 1 - F.cosine_similarity(result["hidden"].float(), taught["hidden"].float(), dim=-1)
        tokens = real.sum() if parts == 1 else batch["tokens"].sum() / parts
        cosine = (apart * real).sum() / tokens
        return {"loss": SOFT * soft + HARD * words + COSINE * cosine, "words": words, "soft": soft, "cosine": cosine}
    if "related" in result:
        related = F.cross_entropy(result["related"].float(), batch["next_sentence"].long(), reduction="none").mean()
        return {"loss": words + related, "words": words, "related": related}
    return {"loss": words, "words": words}


def scores(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns sums over the rows of a batch whose batch["mask"] [B] is 1: "loss" and "accuracy" over the "predicted"
    tokens, and "next_sentence_accuracy" over the "rows" where the batch asks for it."""
    result = forward(model, batch)
    weights, rows = batch["weights"] * batch["mask"][:, None], batch["mask"]
    nll = layers.negative_log_likelihood(result["logits"], batch["labels"])
    nll = torch.where(weights > 0, nll, torch.zeros_like(nll))  # 0 times what is not finite would be NaN
    right = (result["logits"].argmax(-1) == batch["labels"]).float()
    sums = {"loss": nll.sum(), "accuracy": (right * weights).sum(), "predicted": weights.sum()}
    if "related" in result:
        right = (result["related"].argmax(-1) == batch["next_sentence"]).float()
        sums |= {"next_sentence_accuracy": (right * rows).sum(), "rows": rows.sum()}
    return sums
