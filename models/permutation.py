"""The objective of XLNet: the last sixth of a permutation is predicted.

`forward` computes it with two streams of attention. Their masks are made on the device from
integers per token. Rows come from data/pretraining.py (`PermutedText`). The order of prediction is
uploaded, and not the mask, which has T x T numbers per row. Shapes are static, and nothing is read
back from the device.

Source: Yang et al. 2019, "XLNet: Generalized Autoregressive Pretraining for Language
Understanding", sections 2.2 and 2.3, https://arxiv.org/abs/1906.08237, and `_local_perm` in
data_utils.py of the authors' code.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import encoders


def forward(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns "logits" [B, P, vocabulary] of the positions to predict."""
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
    head = encoders.by_config(model.config).language_head
    return {"logits": head.token_logits(model, outputs.last_hidden_state)}


def is_target(positions: Tensor, weights: Tensor, length: int) -> Tensor:
    """Returns which tokens are predicted, bool [B, T].

    Args:
        positions: integers [B, P], the tokens' positions in the row.
        weights: [B, P], 0 for fillers, which are not predicted.
        length: T.
    """
    mapping = target_mapping(positions, length, weights.dtype)
    weight_of_token = (mapping * weights.unsqueeze(-1)).sum(1)
    return weight_of_token > 0


def perm_mask(order: Tensor, is_target: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns transformers' `perm_mask`, [B, T, T], 1 at [b, i, j] where i must not look at j.

    A token looks at those before it in the order of prediction. A target does not look at itself. A
    separator does: it has a rank in the order but is not predicted. Nothing looks at padding, not
    even padding itself. transformers' content stream adds that every token looks at itself.

    Args:
        order: integers [B, T], each token's rank in the order of prediction, from 0; -1 for tokens
            that all tokens see and that see only each other; T for padding.
        is_target: bool [B, T].
        dtype: of the result; transformers needs a float type.
    """
    key_rank = order.unsqueeze(1)  # [B, 1, T]
    first_hidden_rank = torch.where(is_target, order, order + 1).unsqueeze(2)  # [B, T, 1]
    later = (first_hidden_rank <= key_rank) & (key_rank >= 0)
    padding = key_rank >= order.shape[1]
    return (later | padding).to(dtype)


def target_mapping(positions: Tensor, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns transformers' `target_mapping`: one-hot rows [B, P, T] of the positions to predict.

    The query stream adds up queries that share a position, so a filler must not name the position
    of a target.

    Args:
        positions: integers [B, P].
        length: T.
    """
    all_positions = torch.arange(length, device=positions.device, dtype=positions.dtype)
    return (positions.unsqueeze(-1) == all_positions).to(dtype)
