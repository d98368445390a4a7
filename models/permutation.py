"""The objective of XLNet: the last sixth of a permutation is predicted, with two streams of attention.

    targets = is_target(positions, weights, length)
    model(input_ids, perm_mask=perm_mask(order, targets), target_mapping=target_mapping(positions, length), …)

The masks are made on the device from integers per token. Rows come from data/pretraining.py
(`PermutedText`). The order is uploaded and not the mask, which has T x T numbers per row. Yang et al.
2019, "XLNet: Generalized Autoregressive Pretraining for Language Understanding", sections 2.2 and 2.3,
https://arxiv.org/abs/1906.08237, and data_utils.py (`_local_perm`) of the authors' code. Static shapes,
and nothing is read back from the device.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import encoders


def forward(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns "logits" [B, P, words] of the predicted places."""
    encoder = encoders.record_of(model.config)
    positions = batch["positions"]
    length = batch["order"].shape[1]
    targets = is_target(positions, batch["weights"], length)
    outputs = model.base_model(
        input_ids=batch["input_ids"],
        token_type_ids=batch["token_type_ids"],
        perm_mask=perm_mask(batch["order"], targets),
        target_mapping=target_mapping(positions, length),
        use_mems=False,
    )
    return {"logits": encoder.head.words(model, outputs.last_hidden_state)}


def is_target(positions: Tensor, weights: Tensor, length: int) -> Tensor:
    """Returns which tokens are predicted, bool [B, T].

    Args:
        positions: integers [B, P], the tokens' places in the row.
        weights: [B, P], 0 for fillers, which are no predictions.
        length: T.
    """
    return (target_mapping(positions, length, weights.dtype) * weights.unsqueeze(-1)).sum(1) > 0


def perm_mask(order: Tensor, is_target: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns [B, T, T] of `dtype`, 1 at [b, i, j] where token i must not look at token j.

    A token looks at those before it in the order. A target does not see itself; a separator, which has a place in the
    order but is not predicted, does. No token sees padding, nor does padding. transformers' `perm_mask` is exactly
    this (of a float type), and its content stream adds that every token sees itself.

    Args:
        order: integers [B, T], each token's place in the order of prediction, from 0; -1 for tokens that all tokens
            see and that see each other only; T for padding.
        is_target: bool [B, T].
    """
    seen = order.unsqueeze(1)
    own = torch.where(is_target, order, order + 1).unsqueeze(2)
    return (((own <= seen) & (seen >= 0)) | (seen >= order.shape[1])).to(dtype)


def target_mapping(positions: Tensor, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns transformers' `target_mapping`: one-hot [B, P, T] of the positions [B, P] to predict, T = `length`.

    The query stream adds up queries that share a position: a filler must not name the position of a target.
    """
    places = torch.arange(length, device=positions.device, dtype=positions.dtype)
    return (positions.unsqueeze(-1) == places).to(dtype)
