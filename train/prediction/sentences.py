"""Predicts sentences and pairs by an export of train/glue.py, or by another classifier of
transformers."""

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
from train.prediction import answer_formats
from train.prediction.pieces import Piece, batch_rows

VMEM_KIB = 0  # libtpu's own
BATCH = 32  # texts, without --batch-size
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
        precision: of that evaluation; "": it does not say.
    """

    text: tuple[str, ...] = ()
    max_length: int = 0
    precision: str = ""


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
    precision = content.get("precision", "")
    names_text = isinstance(text, list) and len(text) in (1, 2)
    if not names_text or not isinstance(max_length, int) or not isinstance(precision, str):
        raise InputError(
            f"{path} is damaged: expected one or two columns as text, a number as max_length, and "
            "a word as precision; copy the export again"
        )
    return Trained(tuple(text), max_length, precision)


def exported_precision(folder: str) -> str:
    """Returns the precision of the run's evaluation; "" where the export does not say it."""
    return read_trained(folder).precision


def open_model(folder: str, config: Any) -> "Sentences":
    """Opens an export on the host, and the file of --data.

    Raises:
        InputError: the export or the data cannot be read.
    """
    trained = read_trained(folder)
    model = Sentences(folder, config, _rows(config, trained))
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
    """A classifier of texts, and those to predict: a Predictor of pieces.py.

    Args:
        rows: what is to be predicted.
        names: the classes in the order that the outputs are to have; the head's rows are put into
            it by their names, see models/heads.py. (): a regression. None: the head stays as it is.
        stated: the classes in the order of the model's outputs, as the user says.
    Attributes:
        rows: as given.
        to_answers: what turns logits into answers.
        limit: tokens that a text is cut to.
        cut: how many texts were longer, so far.
    """

    def __init__(
        self,
        folder: str,
        config: Any,
        rows: Iterable[Row],
        names: Sequence[str] | None = None,
        stated: Sequence[str] = (),
    ):
        self.config = config
        self.rows = rows
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
        self.to_answers = answer_formats.of_objective(objective, own_names, config.top)
        self._most = _most_tokens(self._model, self.tokenizer)
        self.limit = config.max_length or read_trained(folder).max_length or self._most
        if self.limit > self._most:
            raise InputError(
                f"--max-length is {self.limit}; the model of {config.model_dir} takes at most "
                f"{self._most} tokens"
            )
        self._lengths = _lengths(config.lengths, self.limit)
        # Those of the device: `_prepare`.
        self._limits = None
        self._state = None
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
        self._prepare(mesh)
        # As in a training: the parts of a batch within which rows are joined divide it.
        multiple = math.lcm(script.PACKING_PARTS, mesh.num_devices)
        full_batch = batch_rows(self.config.batch_size or BATCH, None, multiple)
        chunk_sizes = _chunk_sizes(full_batch)
        for number, chunk in enumerate(text_rows.chunks(self.rows, chunk_sizes)):
            piece = _piece(chunk)
            usable = [index for index in range(len(chunk)) if index not in piece.errors]
            if usable:
                batch_size = full_batch
                if number == 0 and len(chunk) < full_batch:  # these are all: one smaller batch
                    batch_size = batch_rows(full_batch, len(usable), multiple)
                texts = [chunk[index].texts for index in usable]
                piece.outputs, order = self._compute(texts, batch_size, mesh)
                piece.input_of_row = np.where(order >= 0, np.array(usable)[order], -1)
            yield piece

    def _prepare(self, mesh: Mesh) -> None:
        """Makes state and step in the first call, with the model on the device."""
        if self._state is None:
            model = script.on_device(self._model, mesh).eval()
            self._limits = architectures.limits(model)
            self._state = script.State(model, optimizer=None)
            self._step = device.compiled(script.eval_step, mesh, max_graphs=len(self._lengths))

    def _compute(
        self, texts: list[tuple[str, ...]], batch_size: int, mesh: Mesh
    ) -> tuple[list[Tensor], np.ndarray]:
        """Starts the network on texts or pairs.

        Returns:
            outputs: on the device, one tensor [batch_size, outputs] per batch.
            order: for each row of all outputs the index of its text; -1 for a row of padding.
        """
        encoded = self._encode(texts)
        plan = self._plan(encoded, batch_size, mesh)
        outputs = []
        loader = loading.parallel_loader(encoded, plan, mesh, train=False, collate=self._collate)
        with loader:
            for batch in loader:
                outputs.append(self._step(self._state, batch, self.config, mesh))
        return outputs, script.evaluation_order(plan)

    def _collate(self, examples: dict[str, np.ndarray]) -> dict[str, Tensor]:
        """Returns a batch of texts as tensors, without labels."""
        tensors = script.collate(self._limits, examples)
        del tensors["labels"]
        return tensors

    def _encode(self, texts: list[tuple[str, ...]]) -> Encoded:
        """Returns the tokens of texts or pairs, and counts those that are cut."""
        first = [pair[0] for pair in texts]
        second = [pair[1] for pair in texts] if len(texts[0]) == 2 else None
        no_labels = np.zeros(len(texts), np.int64)
        encoded = Encoded(Examples(first, second, no_labels), self.tokenizer, self.limit)
        self.cut += encoded.truncated
        return encoded

    def _plan(self, encoded: Encoded, batch_size: int, mesh: Mesh) -> batching.Plan:
        """Returns batches of like length, as in an evaluation."""
        longest = int(encoded.lengths.max())
        lengths = range(1, longest + 1) if mesh.shapes_may_vary else self._lengths
        return batching.Shuffled(encoded.lengths, batch_size, lengths, grouped=True)


def _chunk_sizes(batch_size: int) -> Iterator[int]:
    """Yields the texts of each chunk: a batch, then twice as many each time, up to MOST_BATCHES
    batches; without end."""
    batches = 1
    while True:
        yield batch_size * batches
        batches = min(2 * batches, MOST_BATCHES)


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
    if found.head.is_assumed:
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


def _lengths(given: Sequence[int], limit: int) -> list[int]:
    """Returns the lengths of batches: those given, then twice as long up to the limit."""
    lengths = [length for length in given if length < limit]
    while lengths and 2 * lengths[-1] < limit:
        lengths.append(2 * lengths[-1])
    return [*lengths, limit]
