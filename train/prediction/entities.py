"""Finds entities in sentences by an export of train/tagging.py, or by another tagger of
transformers."""

import json
import math
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import AutoModelForTokenClassification

from data import batching, entities, tagging, text_rows, vocabulary, windows
from data.text_rows import Row
from errors import InputError
from models import architectures, encoder_files
from train import tagging as script
from train.common import device, loading
from train.common.mesh import Mesh
from train.prediction.pieces import Piece, batch_rows

VMEM_KIB = 0  # libtpu's own
BATCH = 32  # sentences, without --batch-size
# Sentences are read, tokenized and predicted in chunks: of one batch first, so that the first
# answers come early, and then of twice as many up to this.
MOST_BATCHES = 32
LONGEST = 1 << 16  # tokens, where neither the model nor its tokenizer has an end
# Ends of the names of files that have a word a line, and not a sentence.
WORD_A_LINE = re.compile(r"\.(conll\w*|bio|iob2?|bioes|ner|train|test[ab]?|dev)(\.gz)?$", re.I)


@dataclass(frozen=True)
class Trained:
    """What an export says of its training.

    Attributes:
        words: the column of the lists of words; "": it does not say, or had none.
        max_length: tokens of the longest window; 0: it does not say.
        precision: of the run's evaluation; "": it does not say.
    """

    words: str = ""
    max_length: int = 0
    precision: str = ""


def read_trained(folder: str) -> Trained:
    """Returns what an export says of its training; raises InputError where that is damaged."""
    path = os.path.join(folder, script.COLUMNS)
    if not os.path.exists(path):
        return Trained()
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        found = Trained(str(content.get("words", "")), content["max_length"], content["precision"])
        if not isinstance(found.max_length, int) or not isinstance(found.precision, str):
            raise ValueError("max_length is no number, or precision no word")
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise InputError(f"{path} is damaged: {error}; copy the export again") from error
    return found


def exported_precision(folder: str) -> str:
    """Returns the precision of the run's evaluation; "" where the export does not say it."""
    return read_trained(folder).precision


def open_model(folder: str, config: Any) -> "Entities":
    """Opens an export on the host, and the file of --data.

    Raises:
        InputError: the export or the data cannot be read.
    """
    trained = read_trained(folder)
    return Entities(folder, config, trained, _rows(config, trained))


def _rows(config: Any, trained: Trained) -> Iterator[Row]:
    """Opens the sentences of --data."""
    data = config.data or text_rows.STANDARD_INPUT
    if len(config.text) > 1:
        raise InputError(f"--text is {' '.join(config.text)}; give one column")
    if text_rows.is_table(data):
        columns = config.text or (trained.words or tagging.WORDS,)
        return text_rows.rows(data, columns, make_row)
    if config.text:
        raise InputError(
            f"--text is {config.text[0]}, and {data} has no columns; expected a file whose name "
            f"ends with {text_rows.TABLES}"
        )
    if WORD_A_LINE.search(data):
        raise InputError(
            f"{data} has a word a line, by its name; expected a sentence a line, or JSON lines "
            "with lists of words. Its metrics: make train … --evaluate runs/<name>"
        )
    return text_rows.lines(data)


def make_row(values: Sequence[Any], columns: Sequence[str], where: str) -> Row:
    """Returns the row of a text, or of a list of words, whose text they are with blanks between
    them."""
    (value,) = values
    if not isinstance(value, list):
        return text_rows.text_row(values, columns, where)
    if not value or not all(isinstance(word, str) for word in value):
        return Row((str(value),), where, f"its {columns[0]} is no list of words")
    row = text_rows.text_row([" ".join(value)], columns, where)
    return Row(row.texts, where, row.error, tuple(value))


# The characters that are words by themselves, as for BERT.
WORD = re.compile(rf"[{vocabulary.IDEOGRAPHS}]|[^\s{vocabulary.IDEOGRAPHS}]+")


def split_words(text: str) -> list[tuple[int, int]]:
    """Returns the first character of each word of a text, and the one after its last.

    Words are what blanks separate; punctuation at their ends is a word by itself, as in corpora of
    entities: "(Berlin)," has four words, "Coca-Cola" one.
    """
    found = []
    for match in WORD.finditer(text):
        start, end = match.span()
        while start < end and _is_punctuation(text[start]):
            found.append((start, start + 1))
            start += 1
        after = []
        while start < end and _is_punctuation(text[end - 1]):
            after.append((end - 1, end))
            end -= 1
        if start < end:
            found.append((start, end))
        found += reversed(after)
    return found


def _is_punctuation(letter: str) -> bool:
    """Returns whether a character is punctuation or a symbol."""
    return unicodedata.category(letter)[0] in "PS"


def places_of(words: Sequence[str]) -> list[tuple[int, int]]:
    """Returns where words stand in their text, which has a blank between two of them; as
    `split_words`."""
    found = []
    start = 0
    for word in words:
        found.append((start, start + len(word)))
        start += len(word) + 1
    return found


@dataclass(frozen=True)
class Sentence:
    """A text, and where its words stand in it."""

    text: str
    places: list[tuple[int, int]]
    words: list[str]


def _sentence(row: Row) -> Sentence:
    """Returns the words of a row."""
    (text,) = row.texts
    if row.words:
        return Sentence(text, places_of(row.words), list(row.words))
    places = split_words(text)
    return Sentence(text, places, [text[start:end] for start, end in places])


class Entities:
    """A tagger, and the sentences in which it finds entities: a Predictor of pieces.py.

    A sentence that is longer than a window goes on in another one, as in training.

    Attributes:
        notes: sentences for the user.
        tags: the names of the model's classes, as tags.
    """

    to_answers = None  # its pieces make their answers

    def __init__(self, folder: str, config: Any, trained: Trained, rows: Iterator[Row]):
        self.config = config
        self.rows = rows
        self.notes: list[str] = []
        compiled = config.device == "xla"
        checkpoint = encoder_files.open_checkpoint(folder, "auto", compiled=compiled)
        self.tokenizer = checkpoint.tokenizer
        windows.separate_words(self.tokenizer)
        loaded = encoder_files.load(
            AutoModelForTokenClassification, checkpoint.config, checkpoint.source
        )
        lacking = sorted(loaded.missing | loaded.other_shapes.keys())
        if lacking:
            raise InputError(
                f"{config.model_dir} lacks {len(lacking)} weights of its tagger, such as "
                f"{lacking[0]}; give an export that is whole"
            )
        self._model = loaded.model
        names = self._model.config.id2label
        self.tags = [as_tag(str(names[number])) for number in range(len(names))]
        most = min(architectures.positions(self._model), self.tokenizer.model_max_length, LONGEST)
        self.limit = config.max_length or trained.max_length or int(most)
        if self.limit > most:
            raise InputError(
                f"--max-length is {self.limit}; the model of {config.model_dir} takes at most "
                f"{most} tokens"
            )
        self._lengths = _lengths(config.lengths, self.limit)
        # Those of the device: `_prepare`.
        self._limits = None
        self._state = None
        self._step = None

    def pieces(self, mesh: Mesh) -> Iterator[Piece]:
        """Yields the rows in chunks, whose outputs the device computes."""
        self._prepare(mesh)
        # As in a training: the parts of a batch within which rows are joined divide it.
        multiple = math.lcm(script.PACKING_PARTS, mesh.num_devices)
        full_batch = batch_rows(self.config.batch_size or BATCH, None, multiple)
        chunk_sizes = _chunk_sizes(full_batch)
        for chunk in text_rows.chunks(self.rows, chunk_sizes):
            piece = Piece([], [row.where for row in chunk], [], np.empty(0, np.int64))
            usable = {}
            for index, row in enumerate(chunk):
                piece.inputs.append(row.texts[0] if row.texts else "")
                if row.error:
                    piece.errors[index] = row.error
                else:
                    usable[index] = _sentence(row)
            if usable:
                self._start(piece, usable, full_batch, mesh)
            yield piece

    def _prepare(self, mesh: Mesh) -> None:
        """Makes state and step in the first call, with the model on the device."""
        if self._state is None:
            model = script.on_device(self._model, mesh).eval()
            self._limits = architectures.limits(model)
            self._state = script.State(model, optimizer=None)
            self._step = device.compiled(script.eval_step, mesh, max_graphs=len(self._lengths))

    def _start(
        self, piece: Piece, sentences: dict[int, Sentence], batch_size: int, mesh: Mesh
    ) -> None:
        """Starts the network on the sentences of a piece, by their indices, and sets what reads
        their answers."""
        words = [sentence.words for sentence in sentences.values()]
        untagged = [[entities.OUTSIDE] * len(one) for one in words]
        encoded = windows.Encoded(tagging.Sentences(words, untagged), self.tokenizer, self.limit)
        longest = int(encoded.lengths.max())
        lengths = range(1, longest + 1) if mesh.shapes_may_vary else self._lengths
        plan = batching.Shuffled(encoded.lengths, batch_size, lengths, grouped=True)
        outputs = []
        loader = loading.parallel_loader(encoded, plan, mesh, train=False, collate=self._collate)
        with loader:
            for batch in loader:
                outputs.append(self._step(self._state, batch, self.config, mesh))
        order = script.evaluation_order(plan)

        def answers() -> dict[int, dict[str, Any]]:
            """Reads the outputs; returns the answer of each sentence by its index."""
            classes = _of_sentences(encoded, order, [one["classes"] for one in outputs])
            shares = _of_sentences(encoded, order, [one["probabilities"] for one in outputs])
            found = {}
            for number, (index, sentence) in enumerate(sentences.items()):
                if np.isfinite(shares[number]).all():
                    found[index] = self._answer(sentence, classes[number], shares[number])
                else:
                    piece.errors[index] = "the network's output for it is not finite"
            return found

        piece.answers = answers

    def _collate(self, examples: dict[str, np.ndarray]) -> dict[str, Tensor]:
        """Returns a batch of windows as tensors."""
        return script.collate(self._limits, examples)

    def _answer(
        self, sentence: Sentence, classes: np.ndarray, shares: np.ndarray
    ) -> dict[str, list[dict[str, Any]]]:
        """Returns the entities of a sentence, from the class of each word and its probability; an
        entity's is the mean of its words', as in transformers' pipeline."""
        found = []
        tags = [self.tags[number] for number in classes.tolist()]
        for entity in entities.entities(tags):
            start = sentence.places[entity.start][0]
            end = sentence.places[entity.end - 1][1]
            probability = shares[entity.start : entity.end].astype(np.float64).mean()
            found.append(
                {
                    "type": entity.type,
                    "text": sentence.text[start:end],
                    "start": start,
                    "end": end,
                    "probability": float(probability),
                }
            )
        return {"entities": found}


def as_tag(name: str) -> str:
    """Returns the tag that a class means: its name, or where that has no prefix its type with I-,
    as in transformers' pipeline."""
    return name if entities.is_tag(name) else f"I-{name}"


def _of_sentences(
    encoded: windows.Encoded, order: np.ndarray, outputs: Sequence[Tensor]
) -> list[np.ndarray]:
    """Returns for each sentence what its words have in outputs [B, T] of batches on the device, see
    `script.evaluation_order`."""
    rows = []
    for batch in device.read(outputs):
        rows += list(batch.numpy())
    of_windows = [np.empty(0)] * len(encoded)
    for index, row in zip(order.tolist(), rows, strict=True):
        if index >= 0:
            of_windows[index] = encoded.of_words(index, row)
    return encoded.of_sentences(of_windows)


def _lengths(given: Sequence[int], limit: int) -> list[int]:
    """Returns the lengths of batches: those given, then twice as long up to the limit."""
    lengths = [length for length in given if length < limit]
    while lengths and 2 * lengths[-1] < limit:
        lengths.append(2 * lengths[-1])
    return [*lengths, limit]


def _chunk_sizes(batch_size: int) -> Iterator[int]:
    """Yields the sentences of each chunk: a batch, then twice as many each time, up to MOST_BATCHES
    batches; without end."""
    batches = 1
    while True:
        yield batch_size * batches
        batches = min(2 * batches, MOST_BATCHES)
