"""Inputs on their way through the network: a piece of them is computed while the next one is
read."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from errors import InputError
from train.common import device
from train.common.mesh import Mesh

SKIP = "; or pass --skip-broken"  # advice on a broken input
# What turns logits [n, outputs] into n answers, see answer_formats.py.
ToAnswers = Callable[[np.ndarray], list[dict[str, Any]]]


@dataclass
class Piece:
    """Inputs whose outputs the device computes, or has computed.

    Attributes:
        inputs: what an answer names its input by.
        where: of each input, for messages; "" where its error names it.
        outputs: on the device, one tensor [rows, outputs] per batch.
        input_of_row: int64, for each row of all outputs the index of its input; -1 for a row of
            padding.
        errors: index of an input that has no output -> why.
        broken: on the device, like a column of all outputs: 1 for an input that could not be read;
            None: `errors` has them all.
        why_broken: returns why an input, of this index, could not be read.
        answers: waits for the device, and returns the answer of each input by its index, but of
            those with an error; None: `outputs` has a row for an input, of which `to_answers` makes
            its answer.
    """

    inputs: Sequence[Any]
    where: Sequence[str]
    outputs: list[Tensor]
    input_of_row: np.ndarray
    errors: dict[int, str] = field(default_factory=dict)
    broken: Tensor | None = None
    why_broken: Callable[[int], str] | None = None
    answers: Callable[[], dict[int, dict[str, Any]]] | None = None


class Predictor(Protocol):
    """A model and its inputs, as `open_model` of pictures.py, sentences.py, entities.py and
    clicks.py returns them. What that of submission.py returns has `write` in place of `pieces` and
    `to_answers`.

    Attributes:
        notes: sentences for the user, complete when all pieces have been taken.
    """

    notes: list[str]

    def pieces(self, mesh: Mesh) -> Iterator[Piece]: ...

    def to_answers(self, logits: np.ndarray) -> list[dict[str, Any]]: ...


def in_order(
    pieces: Iterable[Piece], to_answers: ToAnswers, skip_broken: bool, advice: str = SKIP
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
    started = None
    pieces = iter(pieces)
    while True:
        failure = None
        following = None
        try:
            following = next(pieces, None)  # starts it: the device computes while `started` is read
        except InputError as error:
            failure = error
        if started is not None:
            yield from answers_of(started, to_answers, skip_broken, advice)
        if failure is not None:
            raise failure
        if following is None:
            return
        started = following


def answers_of(
    piece: Piece, to_answers: ToAnswers, skip_broken: bool, advice: str
) -> Iterator[dict]:
    """Yields the answer of each input of a piece; waits for the device.

    Raises:
        InputError: see `in_order`.
    """
    answer_of = {}
    is_broken = set()
    if piece.answers is not None:
        answer_of = piece.answers()
    elif piece.outputs:
        logits, broken = _read(piece)
        filled = np.flatnonzero(piece.input_of_row >= 0)  # the others are padding
        inputs = piece.input_of_row[filled].tolist()
        made = to_answers(logits[filled])
        for index, row, answer in zip(inputs, filled, made, strict=True):
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


def batch_rows(wanted: int, available: int | None, multiple: int) -> int:
    """Returns the rows of a batch, a multiple of `multiple`.

    Args:
        wanted: rows of a full batch.
        available: inputs, where there may be fewer than a batch; None: more.
        multiple: of the devices.
    """
    rows = wanted if available is None else min(wanted, max(available, 1))
    return math.ceil(rows / multiple) * multiple
