"""Answers questions about texts by an export of train/squad.py, or by another model of transformers
that finds answers by their first and last tokens."""

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import fsspec
import numpy as np
from torch import Tensor

from data import squad, squad_answers, text_rows
from errors import InputError
from models import architectures, encoder_files
from models import question_answering as spans
from train import squad as script
from train.common import device, loading
from train.common.mesh import Mesh
from train.prediction.pieces import Piece, batch_rows

VMEM_KIB = 0  # libtpu's own
BATCH = 32  # windows, without --batch-size
# Questions are read, tokenized and answered in chunks: of one batch first, so that the first
# answers come early, and then of twice as many up to this.
MOST_BATCHES = 32
COLUMNS = ("question", "context")  # of a table, without --text
MAY_BE_SQUAD = re.compile(r"\.json(\.gz)?$", re.IGNORECASE)
EXPECTED = (
    "expected SQuAD's JSON format, or a file whose name ends with "
    f"{text_rows.TABLES} and that has the columns question and context"
)


@dataclass(frozen=True)
class Row:
    """A question to answer.

    Attributes:
        question: its `name` says which it is of the rows.
        input: what its answer names it by.
        where: the file and the line, for messages.
        error: why it cannot be answered; "": it can.
    """

    question: squad.Question
    input: dict[str, str]
    where: str
    error: str = ""


@dataclass(frozen=True)
class Trained:
    """What an export says of its evaluation, see train/squad.py.

    Attributes:
        windows: how questions and contexts were cut; None: it does not say, as exports of other
            programs.
        search: how answers were searched for.
        may_be_none: some questions had no answer.
        precision: "": it does not say.
    """

    windows: squad.Limits | None = None
    search: squad_answers.SearchLimits = field(default_factory=squad_answers.SearchLimits)
    may_be_none: bool = False
    precision: str = ""


def read_trained(folder: str) -> Trained:
    """Returns what an export says of its evaluation; raises InputError where that is damaged."""
    path = os.path.join(folder, script.ANSWERS)
    if not os.path.exists(path):
        return Trained()
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        return Trained(
            windows=squad.Limits(
                max_length=int(content["max_length"]),
                stride=int(content["stride"]),
                max_question=int(content["max_question"]),
            ),
            search=squad_answers.SearchLimits(
                n_best=int(content["n_best"]),
                max_answer=int(content["max_answer"]),
                null_threshold=float(content["null_threshold"]),
            ),
            may_be_none=bool(content["may_be_none"]),
            precision=str(content["precision"]),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged: {error!r}; copy the export again") from error


def exported_precision(folder: str) -> str:
    """Returns the precision of the run's evaluation; "" where the export does not say it."""
    return read_trained(folder).precision


def open_model(folder: str, config: Any) -> "Answers":
    """Opens an export on the host, and the questions of --data.

    Raises:
        InputError: the export or the data cannot be read.
    """
    return Answers(folder, config, _rows(config))


def _rows(config: Any) -> Iterator[Row]:
    """Opens the questions of --data; raises InputError where they cannot be opened."""
    data = config.data or text_rows.STANDARD_INPUT
    if len(config.text) not in (0, 2):
        raise InputError(
            f"--text is {' '.join(config.text)}; give two columns, of the question and of its "
            "context"
        )
    if MAY_BE_SQUAD.search(data) and not config.text:
        content = _parsed(data)
        if isinstance(content, dict) and "data" in content:
            return _of_squad(squad.questions_of(content, data, to_train=False), data)
    if not text_rows.is_table(data):
        shown = "the standard input" if data == text_rows.STANDARD_INPUT else data
        raise InputError(f"{shown} has no columns, and a question needs its context; {EXPECTED}")
    columns = config.text or COLUMNS
    return _of_table(text_rows.rows(data, columns))


def _parsed(data: str) -> Any:
    """Returns the content of a JSON file; None where it is more than one object, as JSON lines are.

    Raises InputError where there is no such file.
    """
    try:
        with fsspec.open(data, "rb", compression="infer") as file:
            return json.loads(file.read())
    except FileNotFoundError:
        raise InputError(f"there is no file {data}; {EXPECTED}") from None
    except ValueError:
        return None
    except Exception as error:  # every store has exceptions of its own
        raise InputError(f"{data} cannot be read: {error}") from error


def _of_squad(questions: Sequence[squad.Question], data: str) -> Iterator[Row]:
    """Yields the questions of a file in SQuAD's format."""
    for question in questions:
        where = f"{data}, question {question.name}"
        row = text_rows.text_row([question.text, question.context], COLUMNS, where)
        named = {"id": question.name, "question": row.texts[0]}
        if not row.error:
            question = replace(question, text=question.text.lstrip())
        yield Row(question, named, where, row.error)


def _of_table(rows: Iterable[text_rows.Row]) -> Iterator[Row]:
    """Yields the questions of a table with two columns."""
    for row in rows:
        named = dict(zip(COLUMNS, row.texts, strict=False))
        question = squad.Question(row.where, "", "")
        if not row.error:
            text, context = row.texts
            question = squad.Question(row.where, text.lstrip(), context)
        yield Row(question, named, row.where, row.error)


class Answers:
    """A model that answers questions, and those to answer: a Predictor of pieces.py.

    Attributes:
        rows: as given.
        limits: how questions and contexts are cut.
        search: how answers are searched for.
        may_be_none: a question may have no answer: the model was trained on such questions, or
            --null-threshold is given.
        cut: how many questions were longer than `limits` allows, so far.
    """

    def __init__(self, folder: str, config: Any, rows: Iterable[Row]):
        self.config = config
        self.rows = rows
        self.cut = 0
        compiled = config.device == "xla"
        checkpoint = encoder_files.open_checkpoint(folder, "auto", compiled=compiled)
        found = spans.span_model(checkpoint.config, checkpoint.source)
        if found.why_new:
            raise InputError(f"{found.why_new}; give an export of train/squad.py that is whole")
        self._tokenizer = checkpoint.tokenizer
        self._model = found.model

        trained = read_trained(folder)
        self.limits = _limits(trained, config, self._model, self._tokenizer)
        self.search = trained.search
        self.may_be_none = trained.may_be_none
        if config.null_threshold is not None:
            self.may_be_none = True
            self.search = squad_answers.SearchLimits(
                trained.search.n_best, trained.search.max_answer, config.null_threshold
            )
        # Those of the pieces whose outputs have not been read yet, in their order.
        self._waiting: deque[tuple[squad.Questions, squad.Windows]] = deque()
        # Those of the device: `_prepare`.
        self._ids = None
        self._state = None
        self._step = None

    @property
    def notes(self) -> list[str]:
        """Sentences for the user."""
        if not self.cut:
            return []
        return [f"{self.cut:,} questions were cut to {self.limits.max_question} tokens"]

    def pieces(self, mesh: Mesh) -> Iterator[Piece]:
        """Yields the questions in chunks, whose outputs the device computes: the logits of each
        window, [rows, 2, T]."""
        self._prepare(mesh)
        full_batch = batch_rows(self.config.batch_size or BATCH, None, mesh.num_devices)
        for number, chunk in enumerate(text_rows.chunks(self.rows, _chunk_sizes(full_batch))):
            piece = _piece(chunk)
            usable = [index for index in range(len(chunk)) if index not in piece.errors]
            if usable:
                questions = squad.Questions([chunk[index].question for index in usable])
                windows = squad.Windows(questions, self._tokenizer, self.limits, keep_offsets=True)
                self.cut += windows.cut
                batch_size = full_batch
                if number == 0 and len(chunk) < full_batch:  # these are all: one smaller batch
                    batch_size = batch_rows(full_batch, len(windows), mesh.num_devices)
                piece.outputs = self._compute(windows, batch_size, mesh)
                piece.input_of_row = np.full(len(piece.outputs) * batch_size, -1)
                piece.input_of_row[: len(windows)] = np.array(usable)[windows.question_of]
                self._waiting.append((questions, windows))
            yield piece

    def to_answers(self, logits: np.ndarray) -> list[dict[str, Any]]:
        """Returns, for each window of the piece that is read next, the answer to its question.

        Args:
            logits: float32 [windows, 2, T].
        """
        questions, windows = self._waiting.popleft()
        found = squad_answers.search_all(questions, windows, logits, self.search, self.may_be_none)
        made = [_answer(one, self.config.top, self.may_be_none) for one in found]
        return [made[index] for index in windows.question_of]

    def _prepare(self, mesh: Mesh) -> None:
        """Makes state and step in the first call, with the model on the device."""
        if self._state is None:
            model = script.on_device(self._model, mesh).eval()
            self._ids = architectures.limits(model)
            self._state = script.State(model, optimizer=None)
            self._step = device.compiled(script.eval_step, mesh)

    def _compute(self, windows: squad.Windows, batch_size: int, mesh: Mesh) -> list[Tensor]:
        """Starts the network on windows; returns its outputs, [batch_size, 2, T] per batch."""
        loader = loading.parallel_loader(
            windows, batch_size, mesh, train=False, collate=self._collate
        )
        outputs = []
        with loader:
            for batch in loader:
                outputs.append(self._step(self._state, batch, self.config, mesh))
        return outputs

    def _collate(self, examples: Any) -> dict[str, Tensor]:
        """Returns a batch of windows as tensors, without answers."""
        tensors = script.collate(self._ids, examples)
        del tensors["start"], tensors["end"]
        return tensors


def _limits(trained: Trained, config: Any, model: Any, tokenizer: Any) -> squad.Limits:
    """Returns how questions and contexts are cut: as in the evaluation of the run, or, of another
    program's export, as SQuAD's usually are, within what the model takes."""
    most = min(architectures.positions(model), tokenizer.model_max_length)
    usual = squad.Limits()
    length = min(usual.max_length, most)
    if trained.windows is not None:
        usual = trained.windows
        length = usual.max_length
    length = config.max_length or length
    if length > most:
        raise InputError(
            f"--max-length is {length}; the model of {config.model_dir} takes at most {most} tokens"
        )
    if length < usual.max_length:  # a shorter row has shorter parts
        stride = min(usual.stride, length // 4)
        return squad.Limits(int(length), int(stride), int(min(usual.max_question, length // 4)))
    return squad.Limits(int(length), usual.stride, usual.max_question)


def _chunk_sizes(batch_size: int) -> Iterator[int]:
    """Yields the questions of each chunk: a batch, then twice as many each time, up to MOST_BATCHES
    batches; without end."""
    batches = 1
    while True:
        yield batch_size * batches
        batches = min(2 * batches, MOST_BATCHES)


def _piece(chunk: list[Row]) -> Piece:
    """Returns a piece of these rows, without outputs."""
    inputs = [row.input for row in chunk]
    where = [row.where for row in chunk]
    errors = {index: row.error for index, row in enumerate(chunk) if row.error}
    return Piece(inputs, where, [], np.empty(0, np.int64), errors)


def _answer(found: squad_answers.Found, top: int, may_be_none: bool) -> dict[str, Any]:
    """Returns what is written for a question."""
    answer = _written(found.answer)
    if may_be_none:
        answer["null_difference"] = found.null_difference
    answer["n_best"] = []
    places = set()  # neighbouring windows find the same answer
    for candidate in found.candidates:
        place = (candidate.start, candidate.end)
        if place not in places and len(places) < top:
            places.add(place)
            answer["n_best"].append(_written(candidate))
    return answer


def _written(candidate: squad_answers.Candidate) -> dict[str, Any]:
    """Returns a candidate as JSON has it."""
    return {
        "answer": candidate.text,
        "probability": candidate.probability,
        "score": candidate.score,
        "start": candidate.start,
        "end": candidate.end,
    }
