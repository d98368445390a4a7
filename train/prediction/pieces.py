"""Inputs on their way through the network: a piece of them is computed while the next one is
read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from errors import InputError
from train.common import device

SKIP = "; or pass --skip-broken"  # advice on a broken input
# What turns logits [n, outputs] into n answers, see answers.py.
Answers = Callable[[np.ndarray], list[dict[str, Any]]]


@dataclass
class Piece:
    """Inputs whose outputs the device computes, or has computed.

    Attributes:
        inputs: what an answer names its input by.
        where: of each input, for messages; "" where its error names it.
        outputs: on the device, one tensor [rows, outputs] per batch.
        rows: int64, for each row of all outputs the index of its input; -1 for a row of padding.
        errors: index of an input that has no output -> why.
        broken: on the device, like a column of all outputs: 1 for an input that could not be read;
            None: `errors` has them all.
        why_broken: returns why an input, of this index, could not be read.
    """

    inputs: Sequence[Any]
    where: Sequence[str]
    outputs: list[Tensor]
    rows: np.ndarray
    errors: dict[int, str] = field(default_factory=dict)
    broken: Tensor | None = None
    why_broken: Callable[[int], str] | None = None


def in_order(
    pieces: Iterable[Piece], answers: Answers, skip_broken: bool, advice: str = SKIP
) -> Iterator[dict]:
    """Yields the answer of each input, in the order of the inputs.

    A piece is read from the device when the next one has been started. Where reading inputs fails,
    the answers of those before come first.

    Args:
        skip_broken: an input without an output gets {"input": …, "error": …}.
        advice: after the sentence on a broken input; "" where none may be passed over.
    Raises:
        InputError: an input is broken, and `skip_broken` is false.
    """
    waiting = None
    pieces = iter(pieces)
    while True:
        failure = None
        piece = None
        try:
            piece = next(pieces, None)
        except InputError as error:
            failure = error
        if waiting is not None:
            yield from answers_of(waiting, answers, skip_broken, advice)
        if failure is not None:
            raise failure
        if piece is None:
            return
        waiting = piece


def answers_of(piece: Piece, answers: Answers, skip_broken: bool, advice: str) -> Iterator[dict]:
    """Yields the answer of each input of a piece; waits for the device.

    Raises:
        InputError: see `in_order`.
    """
    answer_of = {}
    is_broken = set()
    if piece.outputs:
        logits, broken = _read(piece)
        rows = np.flatnonzero(piece.rows >= 0)
        made = answers(logits[rows])
        for index, row, answer in zip(piece.rows[rows].tolist(), rows, made, strict=True):
            if broken[row]:
                is_broken.add(index)
            elif np.isfinite(logits[row]).all():
                answer_of[index] = answer
            elif index not in piece.errors:
                piece.errors[index] = "the network's output for it is not finite"

    for index, name in enumerate(piece.inputs):
        error = piece.errors.get(index)
        if index in is_broken:
            error = piece.why_broken(index)
        if error is None:
            yield {"input": name} | answer_of[index]
        elif skip_broken:
            yield {"input": name, "error": error}
        else:
            where = f"{piece.where[index]}: " if piece.where[index] else ""
            raise InputError(f"{where}{error}{advice}")


def _read(piece: Piece) -> tuple[np.ndarray, np.ndarray]:
    """Returns the outputs [rows, outputs] of a piece, and which rows are of inputs that could not
    be read, bool [rows]; waits for the device."""
    if piece.broken is None:
        logits = torch.cat(device.read(piece.outputs)).float().numpy()
        return logits, np.zeros(len(logits), bool)

    *outputs, broken = device.read([*piece.outputs, piece.broken])
    return torch.cat(outputs).float().numpy(), broken.numpy() > 0


def batch_rows(wanted: int, available: int | None, devices: int) -> int:
    """Returns the rows of a batch, a multiple of the devices.

    Args:
        wanted: rows of a full batch.
        available: inputs, where there may be fewer than a batch; None: more.
    """
    rows = wanted if available is None else min(wanted, max(available, 1))
    return -(-rows // devices) * devices
