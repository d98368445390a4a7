"""Reads questions about texts, SQuAD's and a user's own alike, and makes a synthetic twin of them.

SQuAD is Rajpurkar et al. 2016 (arXiv:1606.05250; version 1.1, every question has an answer) and
2018 (arXiv:1806.03822; version 2.0, a third of its questions has none).

    opened = open_splits("/data/squad")                     # Splits: questions by split
    windows = Windows(opened.train, tokenizer, limits)      # tokens, for the loader

Data is one of
    a file in SQuAD's JSON format, also with .gz, or a folder of such files: train-v1.1.json and
        dev-v1.1.json
    a folder of parquet or arrow files, or of save_to_disk, with the hub's columns
    the URL of one of these, such as gs://bucket/squad, see data/remote.py
    an id on the hub, such as rajpurkar/squad or rajpurkar/squad_v2
    "synthetic"

data/splits.py knows which split a file's name means. Without a validation split the questions on a
tenth of the contexts are held out. Answers are scored by squad_answers.py.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data import sentences, splits
from data.remote import local_copy
from errors import InputError

VERSIONS = ("1.1", "2.0")
VERSION = re.compile(r"(?<![\d.])v?(1\.1|2\.0)(?!\.?\d)", re.IGNORECASE)  # in a file's name
HUB_1 = "rajpurkar/squad"
NAME_2 = re.compile(r"squad[-_]?v2(?!\d)", re.IGNORECASE)  # of a data set or folder
JSON_PATTERNS = ("*.json", "*.json.gz")
PATTERNS = (*JSON_PATTERNS, "*.parquet", "*.arrow")  # files of a folder
COLUMNS = ("id", "question", "context", "answers")  # on the hub
HELD_OUT = 10  # one in so many contexts is held out where there is no validation split
SAVED = "dataset_dict.json"  # in a folder that DatasetDict.save_to_disk has written
FORMAT = '{"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, …}]}]}]}'
# Questions tokenized at once: Python's lists take about ten times the memory of the arrays.
CHUNK = 500


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        name: its id in the data.
        text: the question.
        context: the text that has the answer, if there is one.
        answers: what its annotators answered, each a piece of the context; (): the context does
            not answer the question.
        starts: where each of them begins, in characters of the context.
    """

    name: str
    text: str
    context: str
    answers: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """The questions of a split.

    Attributes:
        rows: in the order of the data.
        source, left_out: what was read, and what beside it was not; see data/splits.py.
    """

    rows: Sequence[Question]
    source: str = ""
    left_out: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def unanswerable(self) -> int:
        """How many of them have no answer."""
        return sum(not row.answers for row in self.rows)


@dataclass(frozen=True)
class Splits:
    """The questions that are trained on (None: a finished run is evaluated), and those of the
    split that is evaluated, by its name."""

    train: Questions | None
    eval: dict[str, Questions]

    @property
    def has_unanswerable(self) -> bool:
        """Whether a question of any split has no answer, as in SQuAD 2.0."""
        opened = [*self.eval.values()]
        if self.train is not None:
            opened.append(self.train)
        return any(questions.unanswerable for questions in opened)


@dataclass(frozen=True)
class Found:
    """The splits of data, not read yet: what reads each of train, valid and test."""

    read: dict[str, Callable[[], Questions]]
    is_one: bool = False  # one file, which says no split


def open_splits(data: str, version: str = "", seed: int = 0) -> Splits:
    """Returns the questions to train on, and those to evaluate on.

    Args:
        data: see the top of this file.
        version: one of VERSIONS, of the files with its number in their names, or of the synthetic
            questions; "": there are no files of several versions.
        seed: of the synthetic questions.
    Raises:
        InputError: no such data; a file that cannot be read, or is not in SQuAD's format, with the
            question; an answer that is not where the data says.
    """
    if data == "synthetic":
        made = {split: _synthetic(split, version, seed) for split in ("train", "valid")}
        return Splits(made["train"], {"valid": made["valid"]})

    found = find(data, version)
    if "train" not in found.read:
        raise InputError(f"{data} has no questions to train on, only {', '.join(found.read)}")
    train = found.read["train"]()
    if "valid" in found.read:
        return Splits(train, {"valid": found.read["valid"]()})
    trained, held = _hold_out(train)
    return Splits(trained, {"valid": held})


def open_evaluation(
    data: str, version: str = "", split: str = "", seed: int = 0, is_own: bool = True
) -> Splits:
    """Returns the questions on which a finished run is evaluated.

    Args:
        data, version, seed: as of `open_splits`.
        split: train, valid or test; "": all questions of another file than the run's, else valid.
        is_own: the run was trained on this data.
    Raises:
        InputError: as `open_splits`; there is no such split.
    """
    if data == "synthetic":
        wanted = split or "valid"
        return Splits(None, {wanted: _synthetic(wanted, version, seed)})

    found = find(data, version)
    if found.is_one and not (split or is_own):
        return Splits(None, {"all": found.read["train"]()})
    wanted = split or "valid"
    holds_out = "train" in found.read and "valid" not in found.read
    if holds_out and wanted in ("train", "valid"):
        trained, held = _hold_out(found.read["train"]())
        return Splits(None, {wanted: trained if wanted == "train" else held})
    if wanted not in found.read and found.is_one:
        raise InputError(f"{data} is one file, without a {wanted} split; leave --split {split} out")
    if wanted not in found.read:
        raise InputError(
            f"{data} has no {wanted} split, only {', '.join(found.read)}; "
            f"give --split {next(iter(found.read))}"
        )
    return Splits(None, {wanted: found.read[wanted]()})


def _hold_out(questions: Questions) -> tuple[Questions, Questions]:
    """Returns the questions without those on a tenth of the contexts, and these.

    The SHA-256 of a context decides, so the order of the questions does not, and all questions on
    a context are on the same side.
    """
    digests = {}
    for row in questions.rows:
        content = row.context.encode("utf-8", "surrogatepass")
        digests[row.context] = hashlib.sha256(content).digest()
    if len(digests) < 2:
        raise InputError(
            f"{questions.source} has questions on one context only, so none can be held out for "
            "the evaluation; give a validation split too, a file dev.json beside train.json"
        )

    ordered = sorted(digests, key=digests.get)
    held = set(ordered[: max(len(ordered) // HELD_OUT, 1)])
    trained = [row for row in questions.rows if row.context not in held]
    evaluated = [row for row in questions.rows if row.context in held]
    return (
        replace(questions, rows=trained, source=f"{questions.source} without a tenth"),
        Questions(evaluated, f"that tenth, {len(evaluated):,} questions, by a hash of the context"),
    )


# ---- files, folders and data sets ----------------------------------------------------------------


def find(data: str, version: str = "") -> Found:
    """Finds the splits of data, and reads none; arguments and errors are those of `open_splits`."""
    path = Path(local_copy(data, *PATTERNS)).expanduser()
    if path.is_file():
        return Found({"train": partial(_read_files, [path], [])}, is_one=True)
    if not path.is_dir():
        return _find_hub(data)
    if (path / SAVED).exists():
        return _find_saved(path)

    tables = splits.below(path, "*.parquet", "*.arrow")
    if tables:
        read = partial(_read_tables, data)
        return Found(_by_split(splits.sort_files(tables, path), tables, path, read))
    files = splits.below(path, *JSON_PATTERNS)
    if not files:
        raise InputError(
            f"{data} has neither .json nor .parquet files; expected train-v1.1.json and "
            "dev-v1.1.json, or files of the hub's squad"
        )
    chosen = _of_version(files, version, data)
    found = splits.sort_files(chosen, path)
    found.left_out += [file for file in files if file not in chosen]
    return Found(_by_split(found, chosen, path, _read_files))


def _by_split(
    found: splits.Files, files: Sequence[Path], folder: Path, read: Callable
) -> dict[str, Callable[[], Questions]]:
    """Returns what reads the files of each split that is there."""
    left_out = [str(file.relative_to(folder)) for file in found.left_out]
    test = [file for file in files if splits.split_of_path(file.relative_to(folder)) == "test"]
    by_split = {"train": found.train, "valid": found.valid, "test": test}
    return {split: partial(read, paths, left_out) for split, paths in by_split.items() if paths}


def version_of(data: str) -> str:
    """Returns the version of SQuAD that the name of data says, or the names of its files; "" where
    they say none, or several."""
    name = data.rstrip("/").rpartition("/")[2]
    if data in ("", "synthetic"):
        return ""
    if data == HUB_1:
        return "1.1"
    if NAME_2.search(name):
        return "2.0"
    names = [name]
    path = Path(local_copy(data, *PATTERNS)).expanduser()
    if path.is_dir() and not (path / SAVED).exists():
        names += [file.name for file in splits.below(path, *JSON_PATTERNS)]
    versions = {match[1] for match in map(VERSION.search, names) if match}
    return versions.pop() if len(versions) == 1 else ""


def _of_version(files: Sequence[Path], version: str, data: str) -> list[Path]:
    """Returns the files of a version of SQuAD, by their names, and those that name none.

    Raises InputError where files name several versions and none is asked for.
    """
    named = {}
    for file in files:
        match = VERSION.search(file.name)
        if match:
            named[file] = match[1]
    versions = sorted(set(named.values()))
    if version and versions and version not in versions:
        raise InputError(f"--version is {version}; {data} has version {' and '.join(versions)}")
    if len(versions) > 1 and not version:
        raise InputError(
            f"{data} has files of the versions {' and '.join(versions)}, such as "
            f"{splits.shown(file.name for file in named)}; choose one by --version"
        )
    return [file for file in files if not version or named.get(file, version) == version]


def _read_files(paths: Sequence[Path], left_out: Sequence[str]) -> Questions:
    """Reads files in SQuAD's JSON format."""
    rows = []
    for path in paths:
        rows += read_file(path)
    return _checked(Questions(rows, splits.shown(path.name for path in paths), left_out))


def _checked(questions: Questions) -> Questions:
    """Returns the questions; raises InputError where there are none, or two have the same id."""
    if not questions.rows:
        raise InputError(f"{questions.source} has no questions")
    names = set()
    for row in questions.rows:
        if row.name in names:
            raise InputError(
                f"{questions.source} has two questions with the id {row.name}; give each its own"
            )
        names.add(row.name)
    return questions


def read_file(path: Path) -> list[Question]:
    """Reads a file in SQuAD's JSON format.

    Raises:
        InputError: the file is not JSON, or not in this format; as `questions_of`.
    """
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(content)
        parsed = json.loads(content)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read as JSON: {error}; expected one object, {FORMAT}"
        ) from error
    return questions_of(parsed, str(path))


def questions_of(content: Any, where: str, to_train: bool = True) -> list[Question]:
    """Returns the questions of a parsed file in SQuAD's JSON format.

    Args:
        where: the file, for messages.
        to_train: reads the answers, and checks all texts. `make predict` needs no answers, and
            checks each question by itself.
    Raises:
        InputError: it is not in this format; a text is none, or an answer is not at its place.
    """
    rows = []
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    name, text, context = qa["id"], qa["question"], paragraph["context"]
                    if not to_train:
                        rows.append(Question(str(name), text, context))
                        continue
                    answers, starts = _answers_of(qa, f"{where}, question {name}")
                    rows.append(_question(name, text, context, answers, starts, where))
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        last = f" after the question {rows[-1].name}" if rows else ""
        raise InputError(
            f"{where} is not in SQuAD's format{last}: {reason}; expected {FORMAT}"
        ) from error
    return rows


def _answers_of(qa: dict[str, Any], what: str) -> tuple[list, list]:
    """Returns the answers of a question in SQuAD's JSON format, and where they begin."""
    impossible = qa.get("is_impossible")
    if impossible not in (None, True, False):  # "false" is true to Python
        raise InputError(f"{what} has {impossible!r} as is_impossible; expected true or false")
    if impossible:  # 2.0 has plausible answers elsewhere
        return [], []
    answers = qa["answers"]
    if not isinstance(answers, list):
        raise InputError(
            f"{what} has {answers!r} as its answers; expected a list, which is empty where the "
            "context has none"
        )
    return [one["text"] for one in answers], [one["answer_start"] for one in answers]


def _question(
    name: Any, text: Any, context: Any, answers: Sequence, starts: Sequence, where: str
) -> Question:
    """Returns a question; raises InputError where a text is none, or an answer is not at its
    place."""
    what = f"{where}, question {name}"
    for kind, value in (("question", text), ("context", context)):
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{what} has {value!r} as its {kind}; expected a text")
        sentences.check_unicode(value, kind, what)
    if len(answers) != len(starts):
        raise InputError(f"{what} has {len(answers)} answers and {len(starts)} starts of them")
    for answer, start in zip(answers, starts, strict=True):
        if not isinstance(answer, str) or not answer.strip():
            raise InputError(f"{what} has the answer {answer!r}; expected a piece of its context")
        if type(start) is not int:  # True is one to isinstance
            raise InputError(f"{what} has the answer_start {start!r}; expected a whole number")
        there = context[start : start + len(answer)] if start >= 0 else ""
        if there != answer:
            raise InputError(
                f"{what} has the answer {answer!r} at {start}, where its context has {there!r}; "
                "answer_start counts characters from 0"
            )
    # Some questions of SQuAD begin with spaces, which are tokens to RoBERTa.
    return Question(str(name), text.lstrip(), context, tuple(answers), tuple(starts))


def _find_saved(folder: Path) -> Found:
    """Opens a folder of DatasetDict.save_to_disk."""
    saved = sentences.call_datasets(
        f"{folder} cannot be read by datasets", "load_from_disk", str(folder)
    )
    names = {split: splits.named(list(saved), split, str(folder)) for split in splits.NAMES}
    left_out = [f"its split {name}" for name in saved if name not in names.values()]
    read = {}
    for split, name in names.items():
        if name:
            read[split] = partial(_of_table, saved[name], f"its split {name}", left_out)
    if not read:
        raise InputError(f"{folder} has the splits {', '.join(saved)}; expected train, validation")
    return Found(read)


def _read_tables(data: str, paths: Sequence[Path], left_out: Sequence[str]) -> Questions:
    """Reads parquet or arrow files of the hub."""
    table = sentences.call_datasets(
        f"{data} cannot be read by datasets",
        "load_dataset",
        paths[0].suffix[1:],
        data_files={"train": [str(path) for path in paths]},
        split="train",
    )
    return _of_table(table, splits.shown(path.name for path in paths), left_out)


def _find_hub(data: str) -> Found:
    """Returns what reads the splits of a data set on the hub."""
    if data.count("/") != 1 or data.startswith((".", "/", "~")):
        raise InputError(
            f"there is no file or folder {data}; expected SQuAD's JSON files, or rajpurkar/squad"
        )

    def read(split: str) -> Questions:
        what = f"{data} is neither here nor a data set of the hub with the split {split}"
        table = sentences.call_datasets(what, "load_dataset", data, split=split)
        return _of_table(table, f"its split {split}")

    return Found({"train": partial(read, "train"), "valid": partial(read, "validation")})


def _of_table(
    table: "datasets.Dataset",  # noqa: F821
    source: str,
    left_out: Sequence[str] = (),
) -> Questions:
    """Returns the questions of a table with the hub's columns."""
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise InputError(
            f"{source} has the columns {', '.join(table.column_names)}; "
            f"expected {', '.join(missing)} as rajpurkar/squad has"
        )
    rows = []
    columns = [table[name] for name in COLUMNS]
    for name, text, context, answers in zip(*columns, strict=True):
        if not isinstance(answers, dict) or not {"text", "answer_start"} <= answers.keys():
            raise InputError(
                f"{source}, question {name} has {answers!r} as its answers; expected lists "
                '"text" and "answer_start", which are empty where the context has none'
            )
        texts = answers["text"]
        rows.append(_question(name, text, context, texts, answers["answer_start"], source))
    return _checked(Questions(rows, source, left_out))


# ---- windows -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """How questions and contexts are cut into rows of tokens.

    Attributes:
        max_length: tokens of a row: the question, a window of the context, special tokens.
        stride: tokens that neighbouring windows of a context share.
        max_question: tokens that a question is cut to.
    """

    max_length: int = 384
    stride: int = 128
    max_question: int = 64


class Windows:
    """Questions with windows of their contexts, as a data set for `parallel_loader`.

    A row is the question, then a window of the context; for a tokenizer that pads on the left
    (XLNet) the window is first. An answer that is not wholly in a window is at the <cls> token
    there, and so is that of a question without an answer (Devlin et al. 2019, section 4.3).

    Args:
        questions: of one split.
        tokenizer: one of transformers' fast tokenizers.
        limits: how rows are cut.
        keep_offsets: keeps where in the context each token is, which an evaluation needs.
    Attributes:
        limits: as given.
        question_of: int32 [n], the index of each window's question; windows of a question follow
            each other.
        starts, ends: int32 [n], first and last token of the first answer, counted in the row
            without padding.
        cut: how many questions were cut.
        source, left_out: those of the questions.
    Raises:
        InputError: the tokenizer is not a fast one or lacks a special token; the limits leave no
            room for the context.
    """

    def __init__(self, questions: Questions, tokenizer, limits: Limits, keep_offsets: bool = False):
        _check_tokenizer(tokenizer, limits)
        self.limits = limits
        self.source = questions.source
        self.left_out = questions.left_out
        self._pad = tokenizer.pad_token_id
        self._pads_left = tokenizer.padding_side == "left"
        # transformers 5 (5.23.0) forgets XLNet's token types, see sentences.Encoded.
        is_xlnet = type(tokenizer).__name__.startswith("XLNet")
        self._has_types = is_xlnet or "token_type_ids" in tokenizer.model_input_names
        self._type_pad = sentences.XLNET_TYPE_PAD if is_xlnet else tokenizer.pad_token_type_id
        self.cut = 0

        made = _Made()
        for first in range(0, len(questions), CHUNK):
            self._tokenize(questions.rows[first : first + CHUNK], first, tokenizer, made)
        self.question_of = np.array(made.question_of, np.int32)
        self.starts = np.array(made.starts, np.int32)
        self.ends = np.array(made.ends, np.int32)
        self._cls = np.array(made.cls, np.int32)
        lengths = np.array([len(ids) for ids in made.ids], np.int64)
        self._firsts = np.cumsum(lengths) - lengths
        self._lengths = lengths
        self._ids = np.concatenate(made.ids)
        self._types = np.concatenate(made.types)
        self._offsets = np.concatenate(made.offsets) if keep_offsets else None

    def _tokenize(self, rows: Sequence[Question], first: int, tokenizer, made: "_Made") -> None:
        """Appends the windows of some questions, the first of which has the index `first`."""
        texts = self._cut(rows, tokenizer)
        contexts = [row.context for row in rows]
        encoded = tokenizer(
            *((contexts, texts) if self._pads_left else (texts, contexts)),
            truncation="only_first" if self._pads_left else "only_second",
            max_length=self.limits.max_length,
            stride=self.limits.stride,
            return_overflowing_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        context_number = 0 if self._pads_left else 1
        numbers = encoded["overflow_to_sample_mapping"]
        for number, encoding in zip(numbers, encoded.encodings, strict=True):
            offsets = np.array(encoding.offsets, np.int32)
            sequences = np.array([-1 if s is None else s for s in encoding.sequence_ids])
            offsets[sequences != context_number] = -1  # only the context's count
            cls = encoding.ids.index(tokenizer.cls_token_id)
            start, end = _find_answer(rows[number], offsets, cls)
            made.question_of.append(first + number)
            made.starts.append(start)
            made.ends.append(end)
            made.cls.append(cls)
            made.ids.append(np.array(encoding.ids, np.int32))
            made.types.append(np.array(encoding.type_ids, np.uint8))
            made.offsets.append(offsets)

    def _cut(self, rows: Sequence[Question], tokenizer) -> list[str]:
        """Returns the questions, each cut behind its last token that counts."""
        most = self.limits.max_question
        whole = [row.text for row in rows]
        # It would warn of texts longer than the model takes, and they are cut here.
        encodings = tokenizer(whole, add_special_tokens=False, verbose=False).encodings
        texts = []
        for row, encoding in zip(rows, encodings, strict=True):
            text = row.text
            if len(encoding.ids) > most:
                text = text[: encoding.offsets[most - 1][1]]
                self.cut += 1
            texts.append(text)
        return texts

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def padding(self) -> float:
        """The share of token positions, 0 to 1, that hold no token."""
        return 1 - self._lengths.sum() / (len(self) * self.limits.max_length)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        """Returns a window as a row of L = max_length tokens.

        Returns:
            "input_ids" int32 [L], padded on the tokenizer's padding side
            "attention_mask" int32 [L], 1 for tokens
            "token_type_ids" int32 [L], the tokenizer's own where it has any, else 0
            "start", "end" int32, first and last token of the answer, or twice that of <cls>
        """
        tokens = slice(self._firsts[index], self._firsts[index] + self._lengths[index])
        shift = self._shift(index)
        types = self._types[tokens] if self._has_types else 0
        return {
            "input_ids": self._row(index, self._ids[tokens], fill=self._pad),
            "attention_mask": self._row(index, 1, fill=0),
            "token_type_ids": self._row(index, types, self._type_pad if self._has_types else 0),
            "start": self.starts[index] + shift,
            "end": self.ends[index] + shift,
        }

    def _shift(self, index: int) -> np.int32:
        """Returns the tokens of padding before a window."""
        padding = self.limits.max_length - self._lengths[index]
        return np.int32(padding if self._pads_left else 0)

    def _row(self, index: int, values: np.ndarray | int, fill: int) -> np.ndarray:
        """Returns the values of a window's tokens [n] or [n, k] as [max_length] or
        [max_length, k]."""
        shape = (self.limits.max_length, *np.shape(values)[1:])
        row = np.full(shape, fill, np.int32)
        first = self._shift(index)
        row[first : first + self._lengths[index]] = values
        return row

    def offsets(self, index: int) -> np.ndarray:
        """Returns where the tokens of a window's row are in the context, int32 [max_length, 2]:
        from and to which character; -1 for tokens that are not of the context."""
        tokens = slice(self._firsts[index], self._firsts[index] + self._lengths[index])
        return self._row(index, self._offsets[tokens], fill=-1)

    def cls(self, index: int) -> int:
        """Returns the place of the <cls> token in a window's row."""
        return int(self._cls[index] + self._shift(index))

    def places(self) -> np.ndarray:
        """Returns the "start" and "end" of all windows as `example` has them, int64 [n, 2]."""
        places = np.stack([self.starts, self.ends], axis=1).astype(np.int64)
        if self._pads_left:
            places += self.limits.max_length - self._lengths[:, None]
        return places

    def of_questions(self) -> list[range]:
        """Returns the indices of each question's windows."""
        bounds = np.flatnonzero(np.diff(self.question_of, prepend=-1, append=-1))
        return [range(first, last) for first, last in pairwise(bounds.tolist())]


@dataclass
class _Made:
    """What is made of windows, an entry each; see `Windows`."""

    ids: list[np.ndarray] = field(default_factory=list)
    types: list[np.ndarray] = field(default_factory=list)
    offsets: list[np.ndarray] = field(default_factory=list)
    question_of: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    cls: list[int] = field(default_factory=list)


def _find_answer(row: Question, offsets: np.ndarray, cls: int) -> tuple[int, int]:
    """Returns the first and the last token of a question's first answer; `cls` for both where the
    answer is not wholly in the window.

    Args:
        offsets: int32 [tokens, 2], -1 outside of the context.
    """
    if not row.answers:
        return cls, cls
    # No token has the blanks around an answer: with them it would begin at the token before.
    answer = row.answers[0]
    start = row.starts[0] + len(answer) - len(answer.lstrip())
    end = start + len(answer.strip())
    tokens = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(tokens) or offsets[tokens[0], 0] > start or offsets[tokens[-1], 1] < end:
        return cls, cls
    begins = tokens[offsets[tokens, 0] <= start]
    finishes = tokens[offsets[tokens, 1] >= end]
    return int(begins[-1]), int(finishes[0])


def _check_tokenizer(tokenizer, limits: Limits) -> None:
    """Raises InputError where a tokenizer cannot make windows within these limits."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"{type(tokenizer).__name__} is not a fast tokenizer; "
            "expected one with a tokenizer.json, which knows where its tokens are in the text"
        )
    for name in ("pad_token", "cls_token"):
        if getattr(tokenizer, name) is None:
            raise InputError(f"the tokenizer has no {name}; expected one of an encoder")

    special = tokenizer.num_special_tokens_to_add(pair=True)
    room = limits.max_length - special - limits.max_question
    if room <= limits.stride:
        raise InputError(
            f"--max-length is {limits.max_length}: with --max-question {limits.max_question} and "
            f"{special} special tokens it leaves {room} tokens for a context, and --stride "
            f"{limits.stride} must be less; give a longer --max-length, or smaller others"
        )
    if limits.max_length > tokenizer.model_max_length:
        raise InputError(
            f"--max-length is {limits.max_length}; the tokenizer's model takes "
            f"{tokenizer.model_max_length}"
        )


# ---- synthetic twin ------------------------------------------------------------------------------

# Common words, which every tokenizer takes whole, those of pretrained models included.
_WORDS = (
    "the a an this that some small big old new long short and of in on with near under over from "
    "by at very quite then now here there today"
)
_FILLERS = _WORDS.split()
# A marker -> the words that may follow it. Each marker has its own: a small encoder learns which
# word belongs to a marker much sooner than which word stands beside it.
_AFTER_MARKER = {
    "color": "red blue green black white brown",
    "number": "one two three four five six",
    "animal": "dog cat horse bird fish sheep",
    "place": "house river garden school road bridge",
    "time": "monday friday morning evening summer winter",
}
_ANSWERS = {marker: words.split() for marker, words in _AFTER_MARKER.items()}
_SIZES = {"train": 2048, "valid": 384, "test": 384}
_PIECES = 3  # markers in a context
_SHARE_LONG = 0.15  # of the contexts, which take two windows or more in a trial


def _synthetic(split: str, version: str, seed: int) -> Questions:
    """Makes questions that a small encoder learns from scratch in some hundred steps.

    A context is words drawn at random, among them three of five markers, each followed by its
    answer of one or two words: "… animal dog cat …". A question names a marker: "which animal is
    there?". In version 2.0, as without one, the marker of a third of the questions is not in the
    context.
    """
    rng = np.random.default_rng((seed, list(_SIZES).index(split)))
    rows = []
    for number in range(_SIZES[split]):
        markers = rng.permutation(list(_ANSWERS)).tolist()
        has_answer = version == "1.1" or rng.random() < 2 / 3
        asked = markers[int(rng.integers(_PIECES))] if has_answer else markers[-1]
        rows.append(_synthetic_question(f"{split}-{number}", markers[:_PIECES], asked, rng))
    return Questions(rows)


def _synthetic_question(
    name: str, markers: Sequence[str], asked: str, rng: np.random.Generator
) -> Question:
    """Draws a context with these markers, and asks for one of them, or for another."""
    most = 40 if rng.random() < _SHARE_LONG else 8
    words = []
    answers = []
    starts = []
    for marker in markers:
        words += rng.choice(_FILLERS, int(rng.integers(1, most // _PIECES + 1))).tolist()
        words.append(marker)
        answer = rng.choice(_ANSWERS[marker], int(rng.integers(1, 3)), replace=False).tolist()
        if marker == asked:
            answers.append(" ".join(answer))
            starts.append(len(" ".join(words)) + 1)
        words += answer
    words += rng.choice(_FILLERS, int(rng.integers(1, 4))).tolist()
    context = f"{' '.join(words)}."
    text = f"which {asked} is there?"
    return Question(name, text, context, tuple(answers), tuple(starts))
