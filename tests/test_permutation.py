"""models/permutation.py against the authors' code; tests/test_objectives.py has XLNet's losses with these masks."""

import numpy as np
import torch
import torch.nn.functional as F

from models.permutation import is_target, perm_mask, target_mapping


def local_perm(order: np.ndarray, target: np.ndarray, functional: np.ndarray) -> np.ndarray:
    """XLNet's data_utils._local_perm in numpy, from where it has the permuted indices."""
    masked_or_func = target | functional
    rev_index = np.where(masked_or_func, order, -1)
    self_rev_index = np.where(target, rev_index, rev_index + 1)
    return ((self_rev_index[:, None] <= rev_index[None, :]) & masked_or_func).astype(np.float32)


def test_a_permutations_mask_is_that_of_xlnets_authors_and_nobody_sees_padding():
    rng, length = np.random.default_rng(0), 24
    kinds = rng.choice([0, 1, 2], (50, length), p=[0.7, 0.2, 0.1])  # visible; targets; separators
    placed = np.stack([rng.permutation(length) for _ in kinds])
    order, targets = torch.from_numpy(np.where(kinds == 0, -1, placed)), torch.from_numpy(kinds == 1)
    found = perm_mask(order, targets)
    assert found.dtype == torch.float32 and perm_mask(order, targets, torch.bool).equal(found.bool())
    for mask, places, kind in zip(found, placed, kinds, strict=True):
        assert np.array_equal(mask, local_perm(places, kind == 1, kind == 2))
    order, targets = F.pad(order, (4, 0), value=length + 4), F.pad(targets, (4, 0))
    padded = perm_mask(order, targets)
    assert padded[:, :, :4].eq(1).all() and padded[:, 4:, 4:].equal(found)
    assert padded[:, :4, 4:].eq(0).all()  # rows of padding see something: no softmax over nothing


def test_targets_of_a_permutation_and_their_mapping():
    positions, weights = torch.tensor([[1, 3, 4], [0, 2, 4]], dtype=torch.int32), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    targets = is_target(positions, weights, 5)
    assert targets.tolist() == [[False, True, False, True, False], [True] + 4 * [False]]
    mapping = target_mapping(positions, 5)
    assert mapping.dtype == torch.float32 and mapping.equal(F.one_hot(positions.long(), 5).float())
    assert target_mapping(positions, 5, torch.bfloat16).dtype == torch.bfloat16
