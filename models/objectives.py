"""What encoders are pretrained for: plain PyTorch on the batches of data/pretraining.py.

masked words            BERT (Devlin et al. 2019, section 3.1), RoBERTa (Liu et al. 2019)
the next sentence       BERT, where the batch has "next_sentence"
a permutation's end     XLNet, with two streams of attention (Yang et al. 2019, section 2.3)
a teacher's words       DistilBERT (Sanh et al. 2019, section 3)
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from models import encoders, layers, permutation

# Weights of DistilBERT's three losses, and the temperature of the first: distillation/README.md of its authors.
SOFT, HARD, COSINE, TEMPERATURE = 5.0, 2.0, 1.0, 2.0


def forward(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits of the predicted places only, "logits" [B, P, words]; "hidden" [B, T, H], but of XLNet; "related" [B, 2]
    where the batch asks for it."""
    inputs, positions = {"input_ids": batch["input_ids"]}, batch["positions"]
    if model.config.model_type in ("bert", "xlnet"):  # RoBERTa and DistilBERT have no types of tokens
        inputs["token_type_ids"] = batch["token_type_ids"]
    if model.config.model_type == "xlnet":
        length = batch["order"].shape[1]
        targets = permutation.is_target(positions, batch["weights"], length)
        inputs["perm_mask"] = permutation.perm_mask(batch["order"], targets)
        inputs["target_mapping"] = permutation.target_mapping(positions, length)
        return {"logits": model.lm_loss(model.transformer(**inputs, use_mems=False).last_hidden_state)}
    outputs = model.base_model(**inputs, attention_mask=batch["attention_mask"])
    hidden = outputs.last_hidden_state
    result = {"logits": encoders.predict(model, layers.take(hidden, positions)), "hidden": hidden}
    if "next_sentence" in batch:
        result["related"] = model.cls.seq_relationship(outputs.pooler_output)
    return result


def losses(model: PreTrainedModel, teacher: PreTrainedModel | None, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is minimised, "loss", and its parts, in nats but for the last: "words", a mean over the predicted tokens;
    "related", over the rows; with a teacher "soft", over the predicted tokens (its authors': over all tokens, for which
    the head would have to run on all), and "cosine", 1 - cosine of the hidden states, over all tokens."""
    result, weights = forward(model, batch), batch["weights"]
    predicted = weights.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return (values * weights).sum() / predicted

    words = mean(layers.negative_log_likelihood(result["logits"], batch["labels"]))
    if teacher is not None:
        with torch.no_grad():
            taught = forward(teacher, batch)
        wanted = F.softmax(taught["logits"].float() / TEMPERATURE, -1)
        # Times T squared, so that the gradients' size does not depend on it (Hinton et al. 2015, section 2).
        soft = mean(layers.divergence(result["logits"] / TEMPERATURE, wanted)) * TEMPERATURE**2
        real = batch["attention_mask"].float()
        apart = 1 - F.cosine_similarity(result["hidden"].float(), taught["hidden"].float(), dim=-1)
        cosine = (apart * real).sum() / real.sum()
        return {"loss": SOFT * soft + HARD * words + COSINE * cosine, "words": words, "soft": soft, "cosine": cosine}
    if "related" in result:
        related = F.cross_entropy(result["related"].float(), batch["next_sentence"].long(), reduction="none").mean()
        return {"loss": words + related, "words": words, "related": related}
    return {"loss": words, "words": words}


def scores(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over a batch whose rows count if batch["mask"] [B] is 1: "loss" and "accuracy" over the "predicted" tokens,
    and "next_sentence_accuracy" over the "rows" where the batch asks for it."""
    result = forward(model, batch)
    weights, rows = batch["weights"] * batch["mask"][:, None], batch["mask"]
    nll = layers.negative_log_likelihood(result["logits"], batch["labels"])
    right = (result["logits"].argmax(-1) == batch["labels"]).float()
    sums = {"loss": (nll * weights).sum(), "accuracy": (right * weights).sum(), "predicted": weights.sum()}
    if "related" in result:
        right = (result["related"].argmax(-1) == batch["next_sentence"]).float()
        sums |= {"next_sentence_accuracy": (right * rows).sum(), "rows": rows.sum()}
    return sums
