"""Predicts sentences and pairs by an export of train/glue.py, or by another classifier of
transformers."""

import itertools
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from data import batching, text_rows
from data.sentences import Encoded, Examples
from data.text_rows import Row
from errors import InputError
from models import architectures, classification, encoder_files
from train import glue as script
from train.common import device, loading
from train.common.mesh import Mesh
from train.prediction import answers
from train.prediction.pieces import Piece, batch_rows

VMEM_KIB = 0  # libtpu's own
BATCH = 32  # texts, without --batch-size
ROWS_MULTIPLE = 8  # of a batch, so that batches are the same on 1, 2, 4 and 8 devices
# Texts are read, tokenized and predicted in chunks: of one batch first, so that the first answers
# come early, and then of twice as many up to this.
MOST_BATCHES = 32
LONGEST = 1 << 16  # tokens, where neither the model nor its tokenizer has an end
HEAD = "ForSequenceClassification"
TABLE_EXPECTED = f"expected a file whose name ends with {text_rows.TABLES}"


@dataclass(frozen=True)
class Trained:
    """What an export says of the examples that it was trained on.

    Attributes:
        text: the columns of an example, one or two; (): it does not say, as exports of older
            versions and of other programs.
        max_length: tokens to which the run's evaluation cut an example; 0: it does not say.
    """

    text: tuple[str, ...] = ()
    max_length: int = 0


def read_trained(folder: str) -> Trained:
    """Returns what an export says of its examples; raises InputError where that is damaged."""
    path = os.path.join(folder, script.COLUMNS)
    if not os.path.exists(path):
        return Trained()
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}; copy the export again") from error

    if not isinstance(content, dict):
        content = {}
    text = content.get("text")
    max_length = content.get("max_length", 0)
    names_text = isinstance(text, list) and len(text) in (1, 2)
    if not names_text or not isinstance(max_length, int):
        raise InputError(
            f"{path} is damaged: expected one or two columns as text, and a number as max_length; "
            "copy the export again"
        )
    return Trained(tuple(text), max_length)


def opened(folder: str, config: Any) -> "Sentences":
    """Opens an export on the host, and the file of --data.

    Raises:
        InputError: the export or the data cannot be read.
    """
    trained = read_trained(folder)
    rows = _rows(config, trained)
    model = Sentences(folder, config)
    model.rows = rows
    if not trained.text and not config.text:
        print(
            f"{config.model_dir} has no {script.COLUMNS}, so it does not say whether it was "
            "trained on pairs: each line is taken for a single text; give pairs as two columns, "
            "by --text",
            file=sys.stderr,
            flush=True,
        )
    return model


def _rows(config: Any, trained: Trained) -> Iterator[Row]:
    """Opens the texts of --data.

    Raises:
        InputError: they cannot be opened; or the model takes pairs and they are none, or the other
            way round.
    """
    data = config.data or text_rows.STANDARD_INPUT
    if config.text:
        _check_stated(config.text, data, trained)
    columns = config.text or trained.text
    if text_rows.is_table(data):
        return text_rows.rows(data, columns)

    if len(columns) == 2:
        raise InputError(
            f"the model takes {described(columns)}, and {data} has a text a line; "
            f"{TABLE_EXPECTED}, with these columns or two that --text names"
        )
    return text_rows.lines(data)


def _check_stated(columns: Sequence[str], data: str, trained: Trained) -> None:
    """Raises InputError where --text does not fit the data or the model."""
    if len(columns) > 2:
        raise InputError(f"--text is {' '.join(columns)}; give one column, or two of pairs")
    if trained.text and len(columns) != len(trained.text):
        raise InputError(
            f"--text names {described(columns)}, and the model takes {described(trained.text)}: "
            f"name {len(trained.text)}, as --text {shlex.join(trained.text)}"
        )
    if not text_rows.is_table(data):
        raise InputError(
            f"--text is {' '.join(columns)}, and {data} has no columns; {TABLE_EXPECTED}"
        )


def described(columns: Sequence[str]) -> str:
    """Returns in words what an example of these columns is."""
    if len(columns) == 2:
        return f"pairs ({columns[0]} and {columns[1]})"
    return f"single texts ({columns[0]})"


class Sentences:
    """A classifier of texts.

    Args:
        names: of the classes, in the order in which its outputs are to be, by names, see
            models/heads.py; (): one number. None: as it is, with its own names.
        stated: the classes in the order of the model's outputs, as the user says.
    Attributes:
        rows: what is to be predicted.
        answers: what turns logits into answers.
        limit: tokens that a text is cut to.
        cut: how many texts were longer, so far.
    """

    def __init__(
        self,
        folder: str,
        config: Any,
        names: Sequence[str] | None = None,
        stated: Sequence[str] = (),
    ):
        self.config = config
        self.rows: Iterable[Row] = ()
        self.cut = 0
        compiled = config.device == "xla"
        checkpoint = encoder_files.open_checkpoint(folder, "auto", compiled=compiled)
        self.tokenizer = checkpoint.tokenizer
        _check_head(checkpoint.config, config.model_dir)
        if names is None:
            self._model = _loaded(checkpoint, config.model_dir)
        else:
            self._model = _reordered(checkpoint, config.model_dir, names, stated)

        settings = self._model.config
        objective = _objective(settings)
        own_names = [str(settings.id2label[index]) for index in range(settings.num_labels)]
        self.answers = answers.of_objective(objective, own_names, config.top)
        self._most = _most_tokens(self._model, self.tokenizer)
        self.limit = config.max_length or read_trained(folder).max_length or self._most
        if self.limit > self._most:
            raise InputError(
                f"--max-length is {self.limit}; the model of {config.model_dir} takes at most "
                f"{self._most} tokens"
            )
        self._sizes = _sizes(config.lengths, self.limit)
        self._step = None

    @property
    def notes(self) -> list[str]:
        """Sentences for the user."""
        if not self.cut:
            return []
        if self.limit == self._most:
            return [f"{self.cut:,} texts were cut to the {self.limit} tokens that the model takes"]
        if self.config.max_length:
            return [f"{self.cut:,} texts were cut to {self.limit} tokens, as --max-length says"]
        return [
            f"{self.cut:,} texts were cut to {self.limit} tokens, as in the evaluation of the run; "
            f"--max-length takes up to {self._most}"
        ]

    def pieces(self, mesh: Mesh) -> Iterator[Piece]:
        """Yields the rows in chunks, whose outputs the device computes."""
        state = script.State(self._on_device(mesh), optimizer=None)
        limits = architectures.limits(state.model)
        multiple = math.lcm(ROWS_MULTIPLE, mesh.num_devices)
        batch = batch_rows(self.config.batch_size or BATCH, None, multiple)

        def collate(examples: dict[str, np.ndarray]) -> dict[str, Tensor]:
            tensors = script.collate(limits, examples)
            del tensors["labels"]  # there are none
            return tensors

        batches_of_chunks = itertools.chain(_doubling(MOST_BATCHES), itertools.repeat(MOST_BATCHES))
        sizes = (batch * batches for batches in batches_of_chunks)
        for number, chunk in enumerate(text_rows.chunks(self.rows, sizes)):
            piece = _piece(chunk)
            usable = [index for index in range(len(chunk)) if index not in piece.errors]
            if usable:
                is_all = number == 0 and len(chunk) < batch
                rows = batch_rows(batch, len(usable), multiple) if is_all else batch
                encoded = self._encode([chunk[index].texts for index in usable])
                plan = self._plan(encoded, rows, mesh)
                loader = loading.parallel_loader(encoded, plan, mesh, train=False, collate=collate)
                with loader:
                    for tensors in loader:
                        piece.outputs.append(self._step(state, tensors, self.config, mesh))
                order = script.evaluation_order(plan)
                piece.rows = np.where(order >= 0, np.array(usable)[order], -1)
            yield piece

    def _on_device(self, mesh: Mesh) -> PreTrainedModel:
        """Returns the model on the device, to which it is moved in the first call."""
        if self._step is None:
            self._model = script.on_device(self._model, mesh).eval()
            self._step = device.compiled(script.eval_step, mesh, max_graphs=len(self._sizes))
        return self._model

    def _encode(self, texts: list[tuple[str, ...]]) -> Encoded:
        """Returns the tokens of texts or pairs, and counts those that are cut."""
        first = [pair[0] for pair in texts]
        second = [pair[1] for pair in texts] if len(texts[0]) == 2 else None
        no_labels = np.zeros(len(texts), np.int64)
        encoded = Encoded(Examples(first, second, no_labels), self.tokenizer, self.limit)
        self.cut += encoded.truncated
        return encoded

    def _plan(self, encoded: Encoded, rows: int, mesh: Mesh) -> batching.Plan:
        """Returns batches of like length, as in an evaluation."""
        longest = int(encoded.lengths.max())
        sizes = range(1, longest + 1) if mesh.shapes_may_vary else self._sizes
        return batching.Shuffled(encoded.lengths, rows, sizes, grouped=True)


def _doubling(end: int) -> Iterator[int]:
    """Yields 1, 2, 4, … below `end`."""
    number = 1
    while number < end:
        yield number
        number *= 2


def _piece(chunk: list[Row]) -> Piece:
    """Returns a piece of these rows, without outputs."""
    inputs = []
    errors = {}
    for index, row in enumerate(chunk):
        inputs.append(row.texts[0] if len(row.texts) == 1 else list(row.texts))
        if row.error:
            errors[index] = row.error
    where = [row.where for row in chunk]
    return Piece(inputs, where, [], np.empty(0, np.int64), errors)


def _check_head(settings: PreTrainedConfig, folder: str) -> None:
    """Raises InputError where a model is no classifier of texts, by the name of its class."""
    for name in settings.architectures or ():
        if name.endswith(HEAD):
            return
    names = ", ".join(settings.architectures or ()) or "a model of no known class"
    raise InputError(
        f"{folder} has {names}; expected one {HEAD}: fine-tune it, "
        f'make train MODEL=auto DATA=… ARGS="--checkpoint {folder}"'
    )


def _loaded(checkpoint: encoder_files.Checkpoint, folder: str) -> PreTrainedModel:
    """Returns a classifier as it is; raises InputError where its head is not whole."""
    loaded = encoder_files.load(
        AutoModelForSequenceClassification, checkpoint.config, checkpoint.source
    )
    lacking = sorted(loaded.missing | loaded.other_shapes.keys())
    if lacking:
        raise InputError(
            f"{folder} lacks {len(lacking)} weights of its classifier, such as {lacking[0]}; "
            "give an export that is whole"
        )
    return loaded.model


def _reordered(
    checkpoint: encoder_files.Checkpoint, folder: str, names: Sequence[str], stated: Sequence[str]
) -> PreTrainedModel:
    """Returns a classifier whose outputs have these names in this order.

    Raises:
        InputError: its own names are others, or it has none and their order is not stated.
    """
    found = classification.classifier(checkpoint.config, names, checkpoint.source, stated)
    if found.head.is_new:
        raise InputError(found.head.why_new)
    if found.head.refusal_at_lr_0:
        raise InputError(
            f"{folder} does not name the classes of its head; give their order, "
            f"such as --labels {','.join(names)}"
        )
    return found.model


def _objective(settings: PreTrainedConfig) -> str:
    """Returns what a classifier tells; as transformers decides it where it is not written."""
    problem = settings.problem_type
    if problem == "multi_label_classification":
        return "multilabel"
    if problem == "regression" or (problem is None and settings.num_labels == 1):
        return "regression"
    return "classes"


def _most_tokens(model: PreTrainedModel, tokenizer: Any) -> int:
    """Returns the tokens of the longest text that a model takes."""
    return int(min(architectures.positions(model), tokenizer.model_max_length, LONGEST))


def _sizes(lengths: Sequence[int], limit: int) -> list[int]:
    """Returns the lengths of batches: those given, then twice as long up to the limit."""
    sizes = [length for length in lengths if length < limit]
    while sizes and 2 * sizes[-1] < limit:
        sizes.append(2 * sizes[-1])
    return [*sizes, limit]
