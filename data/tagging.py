"""Reads sentences whose words have tags: named entities.

    opened = open_splits("conll2003", Columns())          # Splits: the task and its sentences
    opened.train.words[0], opened.train.tags[0]           # ["Berlin", …], ["B-LOC", …]: IOB2

Data is one of
    a file of columns, as those of CoNLL-2003: a word a line, its fields separated by tabs, or else
        by blanks; empty lines between sentences; lines of -DOCSTART- begin a document, and are no
        words. The first line of a sentence may be a comment: it begins with # and has another
        number of fields than the lines of words
    a file of JSON lines (.jsonl, .ndjson, .json, also with .gz), parquet or arrow: a row a sentence
        with a list of words and a list of tags
    a folder of such files, or of save_to_disk; data/splits.py says which are trained on
        (eng.testa is for validation, eng.testb for the test)
    the URL of one of these, see data/remote.py
    an id on the Hugging Face hub
    "synthetic"

Tags are read by one rule whatever their scheme is, and are IOB2 from here on, see data/entities.py.
Without a validation split a tenth of the sentences is held out, see `targets.held_out`.
"""

import bisect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data import entities, own_text, sentences, splits, targets
from data.remote import local_copy
from errors import InputError

WORDS, TAGS = "tokens", "ner_tags"  # columns of rows, where none are named: the hub's conll2003
JSON_KINDS = ("jsonl", "ndjson", "json")
TABLE_KINDS = ("parquet", "arrow")
COLUMN_KINDS = ("txt", "conll", "conll03", "conll2003", "bio", "iob", "iob2", "bioes", "ner", "tsv")
EXPECTED = (
    "expected a word and its tag a line (.txt, .conll, .bio, … or eng.train), JSON lines (.jsonl), "
    "parquet or arrow"
)
DOCUMENT = "-DOCSTART-"
EMPTY = " \t\r"  # what a line between sentences may have


@dataclass(frozen=True)
class Columns:
    """Where data have words and tags.

    Attributes:
        words, tags: of rows, the names of the columns with a list each; "": WORDS and TAGS.
        tag_names: of tags that are numbers without names, their names in order.
        word_column, tag_column: of lines, the numbers of the fields, from 1; tag_column 0: the last
            one.
    """

    words: str = ""
    tags: str = ""
    tag_names: tuple[str, ...] = ()
    word_column: int = 1
    tag_column: int = 0


@dataclass(frozen=True)
class Task:
    """What the words are tagged with.

    Attributes:
        name: in the run's name and its first line.
        types: of the entities, sorted.
        columns: where the data have words and tags, as Columns: export/columns.json.
        found: what the first line of a run says of the types.
    """

    name: str
    types: tuple[str, ...]
    columns: dict[str, Any]
    found: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the model's outputs."""
        return entities.class_names(self.types)


@dataclass(frozen=True)
class Sentences:
    """The sentences of a split.

    Attributes:
        words: of each sentence, one or more.
        tags: of each word, in IOB2.
        notes: what the user should know of how they were read.
        source, left_out: the files that were read, and files of the same kind that were not; see
            data/splits.py.
    """

    words: list[list[str]]
    tags: list[list[str]]
    notes: tuple[str, ...] = ()
    source: str = ""
    left_out: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True)
class Splits:
    """A task with its sentences.

    Attributes:
        train: None where a finished run is evaluated.
        eval: the sentences of each split that is evaluated, by its name.
    """

    task: Task
    train: Sentences | None
    eval: dict[str, Sentences]


@dataclass
class Table:
    """The sentences of one file, or of one split of a data set, as they stand there.

    Attributes:
        name: in messages.
        words, tags: of each sentence.
        lines: of a file the line of each sentence's first word, counted from 1; else empty.
        word_a_line: the file has a line for each word.
        declared: the tags that a data set says there are, whether or not a word has them.
        without_words: how many sentences without any word were left out.
    """

    name: str
    words: list[list[str]] = field(default_factory=list)
    tags: list[list[str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    word_a_line: bool = False
    declared: tuple[str, ...] = ()
    without_words: int = 0

    def place(self, sentence: int, word: int) -> str:
        """Returns where a word stands, by the 0-based numbers of both."""
        if self.word_a_line:
            return f"{self.name} line {self.lines[sentence] + word}"
        if self.lines:
            return f"{self.name} line {self.lines[sentence]}, word {word + 1}"
        return f"{self.name}, row {sentence + 1}, word {word + 1}"


class Split:
    """The sentences of all tables of a split, with tags as they stand there.

    Attributes:
        source: what they are read from, for the first line of a run.
        types: of entities, those that words have and those that a data set declares.
        scheme: of the tags.
    """

    def __init__(self, tables: Sequence[Table], source: str):
        self.source = source
        self.words: list[list[str]] = []
        self._tables = tables
        self._starts = []  # the first sentence of each table
        self._entities = []
        self.scheme = entities.Scheme()
        self.types = set()
        for table in tables:
            self._starts.append(len(self.words))
            self._add(table)

    def _add(self, table: Table) -> None:
        """Adds the sentences of a table; raises InputError for what is no tag."""
        for tag in table.declared:
            try:
                _, kind = entities.split_tag(tag)
            except ValueError as error:
                raise InputError(
                    f"{table.name} declares the tags {splits.shown(table.declared)}; {error}: "
                    f"{entities.EXPECTED_TAG}"
                ) from error
            self.types |= {kind} - {""}
        for sentence, tags in enumerate(table.tags):
            _check_tags(table, sentence)
            found = entities.entities(tags)
            self.scheme.add(len(self.words), tags, found)
            self.types.update(entity.type for entity in found)
            self._entities.append(found)
            self.words.append(table.words[sentence])

    def place(self, sentence: int, word: int) -> str:
        """Returns where a word stands, by the 0-based numbers of both."""
        number = bisect.bisect_right(self._starts, sentence) - 1
        return self._tables[number].place(sentence - self._starts[number], word)

    def check_types(self, types: Sequence[str]) -> None:
        """Raises InputError where an entity has another type."""
        for sentence, found in enumerate(self._entities):
            for entity in found:
                if entity.type not in types:
                    raise InputError(
                        f"{self.place(sentence, entity.start)} has an entity of the type "
                        f"{entity.type}, and the training has none; it has {splits.shown(types)}: "
                        "add some there, or remove it here"
                    )

    def sentences(
        self,
        chosen: np.ndarray | None = None,
        source: str = "",
        left_out: Sequence[str] = (),
    ) -> Sentences:
        """Returns the sentences, with IOB2 tags.

        Args:
            chosen: bool [n], which; None: all.
            source: "": that of the split.
        """
        words = []
        tags = []
        for number, found in enumerate(self._entities):
            if chosen is None or chosen[number]:
                words.append(self.words[number])
                tags.append(entities.to_iob2(found, len(self.words[number])))
        return Sentences(words, tags, tuple(self._notes()), source or self.source, left_out)

    def _notes(self) -> list[str]:
        """Returns what was done to sentences, in words."""
        notes = []
        without_words = sum(table.without_words for table in self._tables)
        if without_words:
            notes.append(f"{self.source}: {without_words:,} sentences without words are left out")
        scheme = self.scheme
        if scheme.name != "IOB2":
            notes.append(f"{self.source}: its tags are {scheme.name} and are converted to IOB2")
        if scheme.irregular:
            place = self.place(*scheme.first)
            notes.append(
                f"{self.source}: {scheme.irregular:,} of {scheme.total:,} entities do not begin as "
                f"{scheme.name} has it (the first: {place}); they are read as by conlleval and "
                "seqeval"
            )
        return notes

    def held_out(self) -> np.ndarray:
        """Returns which sentences are held out of training, bool [n]; see `targets.held_out`."""
        types = sorted(self.types)
        present = np.zeros((len(self.words), len(types)), np.float32)
        for sentence, found in enumerate(self._entities):
            for entity in found:
                present[sentence, types.index(entity.type)] = 1
        keys = [" ".join(words) for words in self.words]
        return targets.held_out(keys, present, targets.Target("multilabel", tuple(types)))


def _check_tags(table: Table, sentence: int) -> None:
    """Raises InputError where a word of a sentence has no tag of an entity."""
    for word, tag in enumerate(table.tags[sentence]):
        try:
            entities.split_tag(tag)
        except ValueError:
            raise InputError(
                f"{table.place(sentence, word)} has the tag {tag!r}; {entities.EXPECTED_TAG}"
            ) from None


@dataclass(frozen=True)
class Found:
    """What data has.

    Attributes:
        read: reads a split, by its name: "train", "valid" or "test". Where no name says a split,
            all sentences are those of "train".
        left_out: the names of what no training reads.
        is_one: it is a single file or table, so that no name says a split.
    """

    read: dict[str, Callable[[], Split]]
    left_out: list[str] = field(default_factory=list)
    is_one: bool = False


def open_splits(data: str, columns: Columns, seed: int = 0) -> Splits:
    """Reads the sentences to train and to evaluate on, and finds out the types of their entities.

    Args:
        data: see the top of this file.
        seed: of synthetic sentences.
    Raises:
        InputError: no such data or column; a file that cannot be read, with the line; what is no
            tag; no entities; types that are in the evaluation alone.
    """
    if data == "synthetic":
        return _synthetic(("train", "validation"), seed)
    found = find(data, columns)
    train = found.read["train"]()
    types = tuple(sorted(train.types))
    if not types:
        raise InputError(f"{train.source} of {data} has no entities: all tags are O")

    if "valid" in found.read:
        trained = train.sentences(left_out=found.left_out)
        evaluated = _evaluated(found.read["valid"](), types)
    else:
        held = train.held_out()
        sources = _sources_held_out(train, held)
        trained = train.sentences(~held, sources[0], found.left_out)
        evaluated = train.sentences(held, sources[1])
    return Splits(_task(data, types, columns), trained, {"validation": evaluated})


def open_evaluation(
    data: str,
    columns: Columns,
    types: Sequence[str],
    split: str = "",
    is_own: bool = True,
    seed: int = 0,
) -> Splits:
    """Reads the sentences on which a finished run is evaluated.

    Args:
        types: those of the run.
        split: train, valid or test; "": all sentences of another file than the run's, else valid.
            Without a validation split, train and valid are what a training would have.
        is_own: the run was trained on this data.
    Returns:
        The sentences, by the name of their split: "all", "train", "valid" or "test".
    Raises:
        InputError: as `open_splits`; a type that the run does not have; no such split.
    """
    wanted = split or "valid"
    if data == "synthetic":
        return _synthetic((wanted,), seed)
    task = _task(data, types, columns)
    found = find(data, columns, to_train=False)
    if found.is_one and not (split or is_own):
        return Splits(task, None, {"all": _evaluated(found.read["train"](), types)})

    has_valid = "valid" in found.read
    holds_out = "train" in found.read and not has_valid and bool(split or is_own)
    if wanted in found.read and not (wanted == "train" and holds_out):
        return Splits(task, None, {wanted: _evaluated(found.read[wanted](), types)})
    if wanted == "test" or not holds_out:
        raise InputError(_no_split(data, found, wanted))

    rows = found.read["train"]()
    rows.check_types(types)
    held = rows.held_out()
    train_source, valid_source = _sources_held_out(rows, held)
    if wanted == "train":
        evaluated = rows.sentences(~held, train_source)
    else:
        evaluated = rows.sentences(held, valid_source)
    return Splits(task, None, {wanted: evaluated})


def _evaluated(split: Split, types: Sequence[str]) -> Sentences:
    """Returns all sentences of a split that is evaluated."""
    split.check_types(types)
    return split.sentences()


def _task(data: str, types: Sequence[str], columns: Columns) -> Task:
    """Returns what the words of a user's data are tagged with."""
    found = f"{len(types)} types of entities ({targets.listed(types)}), "
    return Task(own_text.name_of(data), tuple(types), asdict(columns), found)


def _sources_held_out(split: Split, held: np.ndarray) -> tuple[str, str]:
    """Returns what the first line of a run calls the sentences to train on, and those held out."""
    return (
        f"{split.source} without a tenth",
        f"that tenth, {held.sum():,} sentences, by a hash of the words",
    )


def _no_split(data: str, found: Found, split: str) -> str:
    """Returns the sentence on data without a split."""
    if found.is_one:
        return f"{data} is one file, without a {split} split; leave --split {split} out"
    listed = ", ".join(found.read)
    return f"{data} has no {split} split, only {listed}; give --split {next(iter(found.read))}"


# Files, folders and data sets


def find(data: str, columns: Columns, to_train: bool = True) -> Found:
    """Finds the splits of a user's data, and reads none; see `open_splits` for arguments and
    errors.

    Args:
        to_train: refuses data without sentences to train on.
    """
    path = Path(local_copy(data, "*")).expanduser()
    if path.is_file():
        return Found({"train": partial(_read_files, [path], path.parent, columns)}, is_one=True)
    if not path.is_dir():
        return _find_hub(data, columns, to_train)
    if (path / own_text.SAVED).exists() or (path / own_text.SAVED_SPLIT).exists():
        what = f"{path} cannot be read by datasets"
        dataset = sentences.call_datasets(what, "load_from_disk", str(path))
        return _of_dataset(dataset, data, columns, to_train)
    return _find_folder(path, columns, to_train)


def kind_of(name: str) -> str:
    """Returns the kind of a file by its name: "jsonl", "parquet", "arrow" or "columns"; "" where
    the name does not tell that it is one of these."""
    ending = name.lower().removesuffix(".gz").rpartition(".")[2]
    if ending in JSON_KINDS:
        return "jsonl"
    if ending in TABLE_KINDS:
        return ending
    # eng.testa; or a name without an ending, such as dev.
    if ending in COLUMN_KINDS or splits.split_of(ending) is not None:
        return "columns"
    return ""


def _find_folder(folder: Path, columns: Columns, to_train: bool) -> Found:
    """Finds the files of a folder and its subfolders."""
    paths = [path for path in splits.below(folder, "*") if kind_of(path.name)]
    if not paths:
        names = sorted(path.name for path in folder.iterdir())
        raise InputError(f"{folder} has {splits.shown(names) or 'nothing'}; {EXPECTED}")
    files = splits.sort_files(paths, folder)
    if to_train and not files.train:
        names = [path.relative_to(folder) for path in paths]
        raise InputError(f"{folder} has no file to train on, only {splits.shown(names)}")

    of_split = {"train": files.train, "valid": files.valid, "test": []}
    for path in files.left_out:
        if splits.split_of_path(path.relative_to(folder)) == "test":
            of_split["test"].append(path)
    read = {}
    for split, paths_of_split in of_split.items():
        if paths_of_split:
            read[split] = partial(_read_files, paths_of_split, folder, columns)
    left_out = [str(path.relative_to(folder)) for path in files.left_out]
    return Found(read, left_out)


def _read_files(paths: Sequence[Path], folder: Path, columns: Columns) -> Split:
    """Reads the files of a split; raises InputError where they are of several kinds."""
    first_of_kind = {}
    for path in paths:
        first_of_kind.setdefault(kind_of(path.name), path.relative_to(folder))
    if len(first_of_kind) > 1:
        listed = " and ".join(map(str, first_of_kind.values()))
        raise InputError(
            f"{folder} has {listed} for one split, which may be the same sentences twice; "
            "keep files of one kind"
        )
    source = splits.shown(path.relative_to(folder) for path in paths)
    return Split([_read_file(path, columns) for path in paths], source)


def _find_hub(data: str, columns: Columns, to_train: bool) -> Found:
    """Opens a data set on the hub, whose id is `data`."""
    if data.count("/") != 1 or data.startswith((".", "/", "~")):
        raise InputError(f"there is no file or folder {data}; {EXPECTED}")
    what = f"{data} is neither a file, a folder nor a data set of the hub"
    dataset = sentences.call_datasets(what, "load_dataset", data)
    return _of_dataset(dataset, data, columns, to_train)


def _of_dataset(
    dataset: "datasets.DatasetDict | datasets.Dataset",  # noqa: F821
    where: str,
    columns: Columns,
    to_train: bool,
) -> Found:
    """Finds the splits of a data set.

    A single split is trained on, whatever its name. `where` names the data, for messages.
    """
    found = splits.of_dataset(dataset, where, to_train)
    read = {}
    for split, name in found.names.items():
        read[split] = partial(_read_split, found.tables, name, where, columns)
    return Found(read, found.left_out, found.is_one)


def _read_split(
    dataset: "datasets.DatasetDict",  # noqa: F821
    name: str,
    where: str,
    columns: Columns,
) -> Split:
    """Reads a split of a data set."""
    table = _read_table(dataset[name], f"{where}, split {name}", columns)
    return Split([table], f"its split {name}")


def _read_file(path: Path, columns: Columns) -> Table:
    """Reads a file; its ending says what it is, and one that says nothing is a file of columns."""
    kind = kind_of(path.name)
    if kind in TABLE_KINDS:
        rows = sentences.call_datasets(
            f"{path} cannot be read by datasets",
            "load_dataset",
            kind,
            data_files={"train": [str(path)]},
            split="train",
        )
        return _read_table(rows, str(path), columns)

    text = own_text.read_text(path)
    if kind == "jsonl":
        table = _read_json(text, path, columns)
    else:
        table = _read_columns(text, path, columns)
    if not table.words:
        raise InputError(f"{path} has no sentences; {EXPECTED}")
    return table


# Columns


def _read_columns(text: str, path: Path, columns: Columns) -> Table:
    """Reads a file with a word a line."""
    for name in ("words", "tags", "tag_names"):
        if getattr(columns, name):
            raise InputError(
                f"--{name.replace('_', '-')} is for rows (JSON lines, parquet, a data set), and "
                f"{path} has a word a line: give the number of its column, --word-column or "
                "--tag-column"
            )
    reader = _ColumnReader(text, path, columns)
    for number, line in enumerate(text.split("\n"), start=1):
        reader.read(number, line)
    reader.end_sentence()
    return reader.table


def _separator_of(text: str) -> re.Pattern:
    """Returns what separates the fields of a file of columns: a tab, where the first line that is
    neither empty nor a comment has one; else blanks."""
    lines = filter(None, (line.strip(EMPTY) for line in text.split("\n")))
    first = next((line for line in lines if not line.startswith(("#", DOCUMENT))), "")
    return re.compile("\t" if "\t" in first or not first else " +")


class _ColumnReader:
    """Reads lines of words, one after the other.

    Attributes:
        table: what was read so far, without the sentence that has not ended.
    """

    def __init__(self, text: str, path: Path, columns: Columns):
        self.table = Table(str(path), word_a_line=True)
        self._path = path
        self._columns = columns
        self._separator = _separator_of(text)
        self._fields = 0  # of a line; 0: none was read
        self._words: list[str] = []
        self._tags: list[str] = []
        self._line = 0  # of the first of these words

    def read(self, number: int, line: str) -> None:
        """Reads a line; raises InputError where it is none of a word."""
        content = line.strip(EMPTY)
        if "\r" in content:  # all lines would be one
            raise InputError(f"{self._path} line {number} has \\r as ends of lines; make them \\n")
        if not content or content.startswith(DOCUMENT):
            self.end_sentence()
            return
        # Between tabs a field may be empty.
        whole = line.rstrip("\r") if self._separator.pattern == "\t" else content
        fields = self._separator.split(whole)
        if self._is_comment(fields):
            return
        where = f"{self._path} line {number}"
        self._check(fields, where)

        word = fields[self._columns.word_column - 1].strip(EMPTY)
        if not word:
            raise InputError(f"{where} has an empty word")
        tag = fields[self._columns.tag_column - 1].strip(EMPTY)
        if not self._words:
            self._line = number
        self._words.append(word)
        self._tags.append(tag)

    def _is_comment(self, fields: Sequence[str]) -> bool:
        """Returns whether a line is a comment: before the first word of a sentence, and of another
        number of fields than a word's. "# O" is the word #."""
        if self._words or not fields[0].startswith("#"):
            return False
        if self._fields:
            return len(fields) != self._fields
        # Of the first line of a file nothing is known but whether it has a tag.
        column = self._columns.tag_column
        return column > len(fields) or not entities.is_tag(fields[column - 1])

    def _check(self, fields: Sequence[str], where: str) -> None:
        """Raises InputError where a line has not the fields of the lines before it, or too few."""
        shown = f"{where} has {len(fields)} fields"
        if self._fields and len(fields) != self._fields:
            raise InputError(f"{shown}, and the lines before it {self._fields}; correct it")
        self._fields = len(fields)
        if self._fields < 2:
            raise InputError(
                f"{shown}, {fields[0][:60]!r}; expected a word and its tag, separated by a tab or "
                "blanks"
            )
        for name in ("word_column", "tag_column"):
            column = getattr(self._columns, name)
            if column > self._fields:
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{shown}, and {flag} is {column}; give one that is there")

    def end_sentence(self) -> None:
        """Ends the sentence, if there is one."""
        if self._words:
            self.table.words.append(self._words)
            self.table.tags.append(self._tags)
            self.table.lines.append(self._line)
            self._words = []
            self._tags = []


# Rows


def _check_no_fields(columns: Columns, where: str) -> None:
    """Raises InputError where columns of lines are named, and the data have rows."""
    for name in ("word_column", "tag_column"):
        if getattr(columns, name) != getattr(Columns, name):
            flag = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{flag} is for files with a word a line, and {where} has rows: "
                "name their columns by --words and --tags"
            )


def _read_json(text: str, path: Path, columns: Columns) -> Table:
    """Reads JSON lines."""
    _check_no_fields(columns, str(path))
    table = Table(str(path))
    for line, row in own_text.json_rows(text, path):
        where = f"{path} line {line}"
        _check_names(row, columns, where)
        words = checked_words(row[columns.words or WORDS], where)
        tags = _checked_tags(row[columns.tags or TAGS], len(words), columns, where)
        _add_row(table, words, tags, line)
    return table


def _read_table(rows: "datasets.Dataset", name: str, columns: Columns) -> Table:  # noqa: F821
    """Returns the rows of a table of `datasets`; numbers of tags go by the names that they have
    there."""
    _check_no_fields(columns, name)
    _check_names(rows.column_names, columns, name)
    tags_column = columns.tags or TAGS
    feature = rows.features[tags_column]
    declared = tuple(getattr(getattr(feature, "feature", None), "names", None) or ())
    if declared and columns.tag_names:
        raise InputError(
            f"--tag-names is {' '.join(columns.tag_names)}; the tags of {name} have names, "
            f"{','.join(declared)}: leave it out"
        )
    named = Columns(tag_names=declared or columns.tag_names)
    table = Table(name, declared=declared)
    pairs = zip(rows[columns.words or WORDS], rows[tags_column], strict=True)
    for number, (given, given_tags) in enumerate(pairs, start=1):
        where = f"{name}, row {number}"
        words = checked_words(given, where)
        tags = _checked_tags(given_tags, len(words), named, where)
        _add_row(table, words, tags)
    if not table.words:
        raise InputError(f"{name} has no sentences")
    return table


def _add_row(table: Table, words: list[str], tags: list[str], line: int = 0) -> None:
    """Adds a sentence to a table, if it has words."""
    if not words:
        table.without_words += 1
        return
    table.words.append(words)
    table.tags.append(tags)
    if line:
        table.lines.append(line)


def _check_names(names: Iterable[str], columns: Columns, where: str) -> None:
    """Raises InputError where a column that is needed is not among the names."""
    names = list(names)
    wanted = {"--words": columns.words or WORDS, "--tags": columns.tags or TAGS}
    for flag, column in wanted.items():
        if column not in names:
            raise InputError(
                f"{where} has the columns {', '.join(names)}, and no {column}; name it by {flag}"
            )


def checked_words(value: Any, where: str) -> list[str]:
    """Returns the words of a row; raises InputError where they are no list of texts."""
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        for word in value:
            sentences.check_unicode(word, "word", where)
        return value
    raise InputError(f"{where} has {str(value)[:60]!r} as its words; expected a list of texts")


def _checked_tags(value: Any, words: int, columns: Columns, where: str) -> list[str]:
    """Returns the names of the tags of a row; raises InputError where they are no list of names, or
    of numbers that have names, one for each word."""
    if not isinstance(value, list):
        raise InputError(f"{where} has {str(value)[:60]!r} as its tags; expected a list")
    if len(value) != words:
        raise InputError(f"{where} has {words} words and {len(value)} tags; expected as many")
    tags = [_name_of(tag, columns.tag_names, where) for tag in value]
    for tag in tags:
        sentences.check_unicode(tag, "tag", where)
    return tags


def _name_of(tag: Any, names: Sequence[str], where: str) -> str:
    """Returns the name of a tag."""
    if isinstance(tag, str) and not names:
        return tag
    if isinstance(tag, str):
        raise InputError(
            f"{where} has the tag {tag!r}, which is a name; --tag-names is for numbers: "
            "leave it out"
        )
    if not isinstance(tag, int) or isinstance(tag, bool):
        raise InputError(f"{where} has the tag {tag!r}; {entities.EXPECTED_TAG}")
    if not names:
        raise InputError(
            f"{where} has the tag {tag}, a number without a name; give the names of all numbers, "
            "from that of 0 on, by --tag-names, such as --tag-names O B-PER I-PER"
        )
    if not 0 <= tag < len(names):
        raise InputError(
            f"{where} has the tag {tag}; there are names of 0 to {len(names) - 1}: "
            f"{splits.shown(names)}"
        )
    return names[tag]


# A synthetic twin

_FILLERS = ("the", "a", "of", "and", "in", "on", "at", "with", "said", "saw", "met", "near", ",")
_FIRST_NAMES = ("anna", "ben", "clara", "david", "emma", "frank")
# What these are, the next or the last word says: "anna stone" is a person, "stone works" a company,
# and "stone" alone a place.
_NAMES = ("stone", "baker", "hill", "fisher", "marsh", "wood", "lake", "field")
_COMPANIES = ("works", "bank", "group")
_SYNTHETIC_TYPES = ("LOC", "ORG", "PER")
# Name of a split -> what its random numbers begin with.
_SYNTHETIC_SPLITS = {"train": 0, "validation": 1, "valid": 1, "test": 2}


def _synthetic(names: Sequence[str], seed: int) -> Splits:
    """Makes sentences of three types of entities; a small encoder learns them from scratch in some
    hundred steps.

    A name alone is a place; after a first name it is that of a person, and before one of _COMPANIES
    that of a company. So a word does not tell its tag. There are 3 to 6 words and entities, in any
    order, and entities of one type may stand side by side; then perhaps a full stop.
    """
    found = {}
    for name in names:
        size = 2048 if name == "train" else 256
        rng = np.random.default_rng((seed, _SYNTHETIC_SPLITS[name]))
        pairs = [_synthetic_sentence(rng) for _ in range(size)]
        words = [words for words, _ in pairs]
        tags = [tags for _, tags in pairs]
        found[name] = Sentences(words, tags)
    task = Task("entities", _SYNTHETIC_TYPES, asdict(Columns()))
    return Splits(task, found.pop("train", None), found)


def _synthetic_sentence(rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """Draws the words of a sentence, and their tags."""
    words = []
    tags = []
    for _ in range(int(rng.integers(3, 7))):
        kind = rng.choice(("O", "O", *_SYNTHETIC_TYPES))
        name = str(rng.choice(_NAMES))
        if kind == "O":
            chosen = [str(rng.choice(_FILLERS))]
        elif kind == "LOC":
            chosen = [name]
        elif kind == "ORG":
            chosen = [name, str(rng.choice(_COMPANIES))]
        else:
            chosen = [str(rng.choice(_FIRST_NAMES)), name]
        words += chosen
        whole = [] if kind == "O" else [entities.Entity(str(kind), 0, len(chosen))]
        tags += entities.to_iob2(whole, len(chosen))
    if rng.random() < 0.5:
        words.append(".")
        tags.append(entities.OUTSIDE)
    return words, tags
