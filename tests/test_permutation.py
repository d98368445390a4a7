"""models/permutation.py against the authors' code, and what XLNet lets through: transformers' and ours."""

import numpy as np
import pytest
import torch
from transformers import XLNetConfig, XLNetLMHeadModel

from models import encoders
from models.permutation import is_target, perm_mask, target_mapping

# A row: two of padding, then visible (v), targets (t) and separators or <cls> (s), with their places in the order.
KINDS = "--vtvstvvttvss"
ORDER = [14, 14, -1, 5, -1, 7, 0, -1, -1, 13, 3, -1, 2, 11]
LENGTH = len(KINDS)
TARGETS = [place for place, kind in enumerate(KINDS) if kind == "t"]
POSITIONS = torch.tensor([[*TARGETS, LENGTH - 1, LENGTH - 1]], dtype=torch.int32)  # with two fillers
WEIGHTS = torch.tensor([[1.0] * len(TARGETS) + [0, 0]])
LABELS = torch.tensor([[kind == "t" for kind in KINDS]])


def random_rows(rows: int, length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Orders, targets and separators [rows, length] without padding."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice([0, 1, 2], (rows, length), p=[0.7, 0.2, 0.1])
    order = np.stack([rng.permutation(length) for _ in range(rows)])
    return np.where(kinds == 0, -1, order).astype(np.int32), kinds == 1, kinds == 2


def local_perm(order: np.ndarray, target: np.ndarray, functional: np.ndarray) -> np.ndarray:
    """XLNet's data_utils._local_perm in numpy, from where it has the permuted indices."""
    masked_or_func = target | functional
    rev_index = np.where(masked_or_func, order, -1)
    self_rev_index = np.where(target, rev_index, rev_index + 1)
    return ((self_rev_index[:, None] <= rev_index[None, :]) & masked_or_func).astype(np.float32)


def test_the_mask_is_the_authors():
    orders, targets, functional = random_rows(50, 24)
    found = perm_mask(torch.from_numpy(orders), torch.from_numpy(targets))
    assert found.dtype == torch.float32
    assert perm_mask(torch.from_numpy(orders), torch.from_numpy(targets), torch.bool).equal(found.bool())
    for order, target, special, mask in zip(orders, targets, functional, found, strict=True):
        assert np.array_equal(mask.numpy(), local_perm(order, target, special))


def test_nobody_sees_padding_and_padding_changes_nothing_else():
    orders, targets, _ = random_rows(5, 12, seed=2)
    padded = np.concatenate([np.full((5, 4), 16, np.int32), orders], axis=1)
    padded_targets = np.concatenate([np.zeros((5, 4), bool), targets], axis=1)
    found = perm_mask(torch.from_numpy(padded), torch.from_numpy(padded_targets))
    assert found[:, :, :4].eq(1).all()
    assert found[:, :4, 4:].eq(0).all()  # rows of padding see something: no softmax over nothing
    assert found[:, 4:, 4:].equal(perm_mask(torch.from_numpy(orders), torch.from_numpy(targets)))


def test_targets_and_their_mapping():
    positions = torch.tensor([[1, 3, 4], [0, 2, 4]], dtype=torch.int32)
    weights = torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    assert is_target(positions, weights, 5).tolist() == [[False, True, False, True, False], [True] + 4 * [False]]
    mapping = target_mapping(positions, 5)
    assert mapping.shape == (2, 3, 5) and mapping.dtype == torch.float32
    assert mapping.argmax(-1).equal(positions.long()) and mapping.sum(-1).eq(1).all()
    assert target_mapping(positions, 5, torch.bfloat16).dtype == torch.bfloat16
    assert is_target(POSITIONS, WEIGHTS, LENGTH).equal(LABELS)


@pytest.fixture(scope="module", params=["transformers", "ours"])
def model(request) -> XLNetLMHeadModel:
    torch.manual_seed(0)
    config = XLNetConfig(vocab_size=50, d_model=16, n_layer=3, n_head=2, d_inner=32, dropout=0.0)
    model = XLNetLMHeadModel(config).eval()
    return model if request.param == "transformers" else encoders.fast_layers(model)


def logits(model, ids: torch.Tensor, positions=POSITIONS, weights=WEIGHTS) -> torch.Tensor:
    """[P, vocabulary]; `attention_mask` is left out, so the mask alone hides padding."""
    order = torch.tensor([ORDER], dtype=torch.int32)
    mask = perm_mask(order, is_target(positions, weights, LENGTH))
    types = torch.tensor([[3, 3, *[0] * 4, *[1] * 7, 2]])
    with torch.no_grad():
        mapping = target_mapping(positions, LENGTH)
        return model(ids, perm_mask=mask, target_mapping=mapping, token_type_ids=types, use_mems=False).logits[0]


def test_a_prediction_depends_on_what_comes_before_it_only_and_on_no_filler(model):
    """Each token is changed in turn: the predictions that move are those of the targets that may see it."""
    ids = torch.arange(10, 10 + LENGTH).unsqueeze(0)
    before = logits(model, ids)
    without_fillers = logits(model, ids, POSITIONS[:, : len(TARGETS)], WEIGHTS[:, : len(TARGETS)])
    torch.testing.assert_close(before[: len(TARGETS)], without_fillers, rtol=0, atol=1e-6)
    for place, kind in enumerate(KINDS):
        changed = ids.clone()
        changed[0, place] = 45
        difference = (logits(model, changed) - before).abs().amax(-1)[: len(TARGETS)]
        # Nobody sees padding; a visible token moves all; others those of the targets that come after them.
        expected = [kind != "-" and ORDER[place] < ORDER[target] for target in TARGETS]
        assert (difference > 1e-6).tolist() == expected, (place, kind)
