"""The objective of BERT and RoBERTa: masked tokens are predicted from all others.

Devlin et al. 2019, arXiv:1810.04805, section 3.1; BERT may predict as well whether one half of a
row follows the other. Rows come from data/pretraining.py (`MaskedText`).
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import encoders, last_layer, layers


def forward(
    model: PreTrainedModel, batch: dict[str, Tensor], all_hidden: bool = False
) -> dict[str, Tensor]:
    """Computes what `objectives.forward` returns.

    The head is applied to the P predicted tokens only. transformers' own forward pass applies it to
    all T tokens of a row: 50 of 264 million cycles of BERT-base's step with 79 predicted tokens of
    512, on one v5e chip (libtpu 0.0.51's estimate). For the same reason the last layer is computed
    for them only, where the encoder can (models/last_layer.py).
    """
    encoder = encoders.by_config(model.config)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if encoder.token_types:
        inputs["token_type_ids"] = batch["token_type_ids"]
    head = encoder.language_head
    positions = batch["positions"]
    if all_hidden or not last_layer.is_enabled(model):
        outputs = model.base_model(**inputs)
        hidden = outputs.last_hidden_state
        predicted = layers.take(hidden, positions)
        result = {"logits": head.token_logits(model, predicted), "hidden": hidden}
    else:
        # The pooled output, which predicts the next sentence, is that of the first of them.
        first = torch.zeros_like(positions[:, :1])
        used = torch.cat([first, positions], 1) if "next_sentence" in batch else positions
        outputs = model.base_model(**inputs, used_tokens=used)
        predicted = outputs.last_hidden_state[:, -positions.shape[1] :]
        result = {"logits": head.token_logits(model, predicted)}

    if "next_sentence" in batch:
        result["related"] = head.next_sentence_logits(model, outputs.pooler_output)
    return result
