"""GLUE's nine tasks (Wang et al. 2019, https://arxiv.org/abs/1804.07461): to read, to tokenize, to score; and synthetic
twins of them.

    examples = read("glue_data", "mrpc", "train")           # text and labels
    encoded = Encoded(examples, tokenizer, max_length=128)  # tokens, for parallel_loader with a plan
    score("mrpc", predictions, labels)                      # {"accuracy": …, "f1": …}

Data is one of
    a folder of GLUE's own files, DATA/MRPC/train.tsv and dev.tsv, or the task's own folder, DATA/train.tsv
    a folder of parquet or arrow files or of save_to_disk, with a folder a task or without: DATA/mrpc/train-….parquet
    the URL of one of these, such as gs://bucket/glue, see data/remote.py
    an id on the hub, such as nyu-mll/glue
    "synthetic"

Names of columns, labels and splits are those of nyu-mll/glue, and so are the numbers of the labels; files and folders
may have any name of data/splits.py for a split. The labels of GLUE's test splits are not public, so a task is evaluated
on validation.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from data import splits
from data.remote import local_copy
from errors import InputError

SCORES = (0.0, 5.0)  # the labels of STS-B, a regression
# QQP's official train.tsv has line breaks inside some questions (jiant, transformers and `datasets` leave such rows out
# as well), about one row in 20,000. More than one in a thousand is a damaged file.
QQP_BROKEN = 1e-3
XLNET_TYPE_PAD = 3  # 0 and 1 are the sentences, 2 is <cls>
CHUNK = 1000  # examples tokenized at once: Python's lists of ints take about ten times the memory of the arrays


@dataclass(frozen=True)
class Task:
    """One of GLUE's tasks.

    Attributes:
        name: as in --task and on the hub.
        folder: of GLUE's own files.
        columns: of the sentences, one or two.
        labels: the names of the classes in the order of their numbers; () is regression.
        metrics: the names of what `score` returns.
        evaluation: the splits to evaluate on.
        own_columns, own_label: names in the header of GLUE's own files.
    """

    name: str
    folder: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    evaluation: tuple[str, ...] = ("validation",)
    own_columns: tuple[str, ...] = ("sentence1", "sentence2")
    own_label: str = "label"


_PAIR, _ONE, _QUESTIONS = ("sentence1", "sentence2"), ("sentence",), ("question1", "question2")
_STRINGS, _QUESTION = ("#1 String", "#2 String"), ("question", "sentence")
_DUPLICATE, _ENTAILED = ("not_duplicate", "duplicate"), ("entailment", "not_entailment")
_MNLI = ("validation_matched", "validation_mismatched")
TASKS = {
    task.name: task
    for task in (
        Task("cola", "CoLA", _ONE, ("unacceptable", "acceptable"), ("mcc",), own_columns=_ONE),
        Task("sst2", "SST-2", _ONE, ("negative", "positive"), own_columns=_ONE),
        Task("mrpc", "MRPC", _PAIR, ("not_equivalent", "equivalent"), ("accuracy", "f1"), own_columns=_STRINGS,
             own_label="Quality"),
        Task("stsb", "STS-B", _PAIR, (), ("pearson", "spearman"), own_label="score"),
        Task("qqp", "QQP", _QUESTIONS, _DUPLICATE, ("accuracy", "f1"), own_columns=_QUESTIONS,
             own_label="is_duplicate"),
        Task("mnli", "MNLI", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), evaluation=_MNLI,
             own_label="gold_label"),
        Task("qnli", "QNLI", _QUESTION, _ENTAILED, own_columns=_QUESTION),
        Task("rte", "RTE", _PAIR, _ENTAILED),
        Task("wnli", "WNLI", _PAIR, ("not_entailment", "entailment")),
    )
}  # fmt: skip
_COLA = ["source", "label", "original_label", "sentence"]  # its file has no header


@dataclass(frozen=True)
class Examples:
    """Labelled sentences, or pairs of them.

    Attributes:
        first: sentences.
        second: as many, or None.
        labels: int64 [n] classes, float32 [n] scores in a regression.
        skipped: rows of the file that were broken and left out; only QQP may have any, see `read`.
        source, left_out: the files they were read from, and others of the same kind, see data/splits.py.
    """

    first: list[str]
    second: list[str] | None
    labels: np.ndarray
    skipped: int = 0
    source: str = ""
    left_out: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.first)


def find_task(name: str) -> Task:
    """Returns the task of this name, or raises InputError with the names that there are."""
    if name not in TASKS:
        raise InputError(f"task is {name!r}; expected one of {', '.join(TASKS)}")
    return TASKS[name]


def read(data: str | Path, task: str, split: str, seed: int = 0) -> Examples:
    """Reads the examples of a split, in the order of the file.

    Sentences are taken as they stand: nothing is stripped, and quotes mean nothing (GLUE's files have no quoting).
    QQP's broken rows are left out with a warning, as long as they are fewer than QQP_BROKEN of the file.

    Args:
        data: a folder, a URL, an id on the hub, or "synthetic"; see the top of this file.
        task: a key of TASKS.
        split: "train", or one of the task's evaluation splits.
        seed: of the synthetic examples.
    Raises:
        InputError: unknown task or split; no such data; a file that is not what GLUE has, with the line.
    """
    chosen = find_task(task)
    known = ("train", *chosen.evaluation)
    if split not in known:
        hidden = "; the labels of GLUE's test splits are not public" if split.startswith("test") else ""
        raise InputError(f"split is {split!r}; expected one of {', '.join(known)} for {task}{hidden}")
    if str(data) == "synthetic":
        return _synthetic(chosen, split, seed)
    others = {f"!{name.lower()}/*" for one in TASKS.values() if one != chosen for name in (one.name, one.folder)}
    folder = Path(local_copy(str(data), "*", *sorted(others))).expanduser()
    if folder.is_file():
        raise InputError(f"{data} is a file; expected the folder that it is in, or GLUE's folder")
    if not folder.is_dir():
        if str(data).count("/") != 1 or str(data).startswith((".", "/", "~")):
            raise InputError(f"there is no folder {data}; expected GLUE's folder, with {chosen.folder} in it")
        where = f"{data} is neither a folder nor a data set of the hub with {task} and its split {split}"
        rows = _loaded(where, "load_dataset", str(data), task, split=split)
        return replace(_of_rows(rows, f"{data}, split {split}", chosen), source=f"{data}'s split {split}")
    tables = _tables(folder, chosen, split)
    if tables is not None:
        rows, source, left_out = tables
        examples = _of_rows(rows, f"{data}, split {split}", chosen)
        return replace(examples, source=source, left_out=left_out)
    path, left_out = _tsv_file(folder, chosen, split)
    return replace(_of_tsv(path, chosen), source=f"{path.parent.name}/{path.name}", left_out=left_out)


def _choose(names: Sequence[str], task: Task, split: str, where: str) -> tuple[str | None, list[str]]:
    """Returns which of these names of files, folders or splits means a split of a task, or None, and those of them that
    mean no split of the task. Raises InputError where two are as good."""

    def one(split: str) -> str | None:
        kind, _, which = split.partition("_")  # MNLI has validation_matched and validation_mismatched
        fitting = [name for name in names if not which or which in splits.words(name)]
        return splits.named(fitting, "train" if kind == "train" else "valid", where)

    chosen = {name: one(name) for name in ("train", *task.evaluation)}
    return chosen[split], sorted(name for name in names if name not in chosen.values())


# GLUE's own files


def _tsv_file(folder: Path, task: Task, split: str) -> tuple[Path, list[str]]:
    """Returns the file of a split, and the names of the folder's files that are of no split."""
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and _plain(path.name) == _plain(task.folder)]
    name = f"{split.replace('validation', 'dev')}.tsv"
    for candidate in (*inner, folder):
        stems = [path.stem for path in candidate.glob("[!.]*.tsv") if path.is_file()]
        if stems:
            _refuse_another_tasks(candidate, task)
        stem, left_out = _choose(stems, task, split, str(candidate))
        if stem:
            return candidate / f"{stem}.tsv", [f"{one}.tsv" for one in left_out]
    first = (*inner, folder)[0]
    found = ", ".join(sorted(path.name for path in first.iterdir())[:10]) or "nothing"
    what = f"{first} has no {name} and no parquet files of the split {split}, found {found}"
    raise InputError(f"{what}; expected GLUE's {task.folder}/{name}")


def _refuse_another_tasks(folder: Path, task: Task) -> None:
    """Raises InputError for a folder with the name of another task: the columns of CoLA and SST-2 are the same."""
    tasks = {_plain(one.folder): one.name for one in TASKS.values()}
    other = tasks.get(_plain(folder.resolve().name), task.name)
    if other != task.name:
        raise InputError(f"{folder} is the folder of {other}, and the task is {task.name}; give one of both")


def _plain(name: str) -> str:
    """Returns the name of a folder without case and hyphens, which differ: SST-2, sst2."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _of_tsv(path: Path, task: Task) -> Examples:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # MRPC begins with a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}); convert it") from error
    # Only \n ends a line: the sentences have other signs that Python takes for line ends.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    header, first = (lines[0].split("\t") if lines else []), 1
    if task.name == "cola":
        header, first = _COLA, 0
    missing = [name for name in (*task.own_columns, task.own_label) if name not in header]
    if missing:
        if len(header) == 1 and header[0]:
            _need_tabs(header[0], [*task.own_columns, task.own_label], f"{path} line 1")
        what = f"{path} line 1 has the columns {', '.join(header) or 'nothing'}; expected {', '.join(missing)}"
        raise InputError(f"{what} among them, separated by tabs, as in GLUE's {task.folder}")
    places, label_place = [header.index(name) for name in task.own_columns], header.index(task.own_label)
    rows, broken, numbers = [], [], _label_numbers(task)
    for number, line in enumerate(lines[first:], start=first + 1):
        where, fields = f"{path} line {number}", line.split("\t")
        try:
            if number == 1 and len(fields) == 1:  # CoLA's, which has no header
                _need_tabs(line, header, where)
            if len(fields) != len(header):
                raise InputError(f"{where} has {_wrong_fields(fields, header, first)}")
            for place in places:
                if not fields[place].strip():
                    raise InputError(f"{where} has an empty {header[place]}; expected a sentence")
            label = _label(fields[label_place], task, numbers, where)
            rows.append((*(fields[place] for place in places), label))
        except InputError as error:
            if task.name != "qqp":
                raise
            broken.append(error)
    if broken:
        if len(broken) > QQP_BROKEN * len(lines):
            raise broken[0]
        warnings.warn(f"{path}: {len(broken)} broken rows are left out, the first: {broken[0]}", stacklevel=3)
    if not rows:
        raise InputError(f"{path} has no examples; expected GLUE's {task.folder}/{path.name}")
    *columns, labels = map(list, zip(*rows, strict=True))
    return _examples(columns, labels, task, len(broken))


def _need_tabs(line: str, columns: Sequence[str], where: str) -> None:
    """Raises InputError where a line without a tab has fields that something else separates."""
    for sign, name in ((",", "commas"), (";", "semicolons"), ("|", "vertical bars")):
        if line.count(sign) >= len(columns) - 1:
            what = f"{where} has no tab, but {name}: {line[:60]!r}"
            remedy = "write it as TSV: separated by tabs, and without quoting"
            raise InputError(f"{what}; expected {', '.join(columns)} separated by tabs; {remedy}")


def _wrong_fields(fields: list[str], header: list[str], header_lines: int) -> str:
    """Says what is wrong with a line of another number of fields."""
    what = f"{len(fields)} fields, separated by tabs; expected {len(header)}: {', '.join(header)}"
    if not header_lines:
        what += " (without a header line)"
    if any(field.startswith('"') and field.count('"') % 2 for field in fields):
        what += (
            ". A field begins with \" and does not end: GLUE's files have no quoting, so write the file without it "
            "(csv.QUOTE_NONE), and without tabs and line breaks in the sentences"
        )
    return what


def _label_numbers(task: Task) -> dict[str, int]:
    """Returns the number of each class by what stands for it in a file: its name in lower case, or its number."""
    return {text: number for number, name in enumerate(task.labels) for text in (name, str(number))}


def _label(text: str, task: Task, numbers: dict[str, int], where: str) -> float:
    if task.labels:
        plain = text.strip().lower()
        if plain in numbers:
            return numbers[plain]
        listed = ", ".join(f"{number} ({name})" for number, name in enumerate(task.labels))
        raise InputError(f"{where} has the label {text!r}; expected one of {listed}")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not SCORES[0] <= value <= SCORES[1]:
        raise InputError(f"{where} has the score {text!r}; expected a number from {SCORES[0]:g} to {SCORES[1]:g}")
    return value


def _examples(columns: list[list[str]], labels: Sequence[float], task: Task, skipped: int = 0) -> Examples:
    second = columns[1] if len(columns) > 1 else None
    return Examples(columns[0], second, np.array(labels, np.int64 if task.labels else np.float32), skipped)


# `datasets`


def _loaded(where: str, function: str, *arguments, **options) -> Any:
    """Calls a function of `datasets`, whose errors become one sentence that begins with `where`."""
    import datasets  # two seconds, and GLUE's own files do not need it

    try:
        return getattr(datasets, function)(*arguments, **options)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"{where}: {str(error).partition(chr(10))[0]}") from error


def _tables(folder: Path, task: Task, split: str) -> tuple["datasets.Dataset", str, list[str]] | None:  # noqa: F821
    """Returns the split in a folder of save_to_disk, or of parquet or arrow files, with what it is read from and what
    is left out; None if there is nothing of them.

    `datasets` itself would take validation_matched-….parquet and validation_mismatched-….parquet for one split.
    """
    for candidate in (folder / task.name, folder / task.folder, folder):
        if (candidate / "state.json").exists():
            raise InputError(f"{candidate} is a single split written by save_to_disk; expected a DatasetDict")
        saved = (candidate / "dataset_dict.json").exists()
        if saved:
            _refuse_another_tasks(candidate, task)
        parts, left_out = ([], []) if saved else _parts(candidate, task, split)
        if not saved and not parts:
            continue
        where = f"{candidate} cannot be read by datasets"
        if parts:
            files = {split: [str(part) for part in parts]}
            rows = _loaded(where, "load_dataset", parts[0].suffix[1:], data_files=files, split=split)
            return rows, splits.shown(part.relative_to(candidate) for part in parts), left_out
        found = _loaded(where, "load_from_disk", str(candidate))
        name, left_out = _choose(list(found), task, split, str(candidate))
        if not name:
            raise InputError(f"{candidate} has the splits {', '.join(found)}; expected {split} for {task.name}")
        return found[name], f"its split {name}", [f"its split {one}" for one in left_out]
    return None


def _parts(folder: Path, task: Task, split: str) -> tuple[list[Path], list[str]]:
    """Finds train.parquet, train-00000-of-00001.parquet, data/train-….parquet or train/….parquet; or .arrow. Returns
    them, and the names of those beside them that are of no split of the task."""
    for suffix in ("parquet", "arrow"):
        for pattern in (f"[!.]*.{suffix}", f"data/[!.]*.{suffix}", f"[!.]*/[!.]*.{suffix}"):
            named: dict[str, list[Path]] = {}
            for path in sorted(folder.glob(pattern)):
                name = path.parent.name if "*/" in pattern else _without_number(path)
                named.setdefault(name, []).append(path)
            if any(splits.says_split(Path(name)) for name in named):
                _refuse_another_tasks(folder, task)
            chosen, left_out = _choose(list(named), task, split, str(folder))
            if chosen:
                return named[chosen], [str(path.relative_to(folder)) for one in left_out for path in named[one]]
    return [], []


def _without_number(path: Path) -> str:
    """Returns a file's name without its suffix; of a shard also without its number."""
    return re.sub(r"-\d+(-of-\d+)?(-[0-9a-f]+)?$", "-of", path.stem)


def _of_rows(rows: "datasets.Dataset", where: str, task: Task) -> Examples:  # noqa: F821
    missing = [name for name in (*task.columns, "label") if name not in rows.column_names]
    if missing:
        expected = ", ".join(missing)
        raise InputError(f"{where} has the columns {', '.join(rows.column_names)}; expected {expected} for {task.name}")
    if len(rows) == 0:
        raise InputError(f"{where} has no examples")
    columns = [list(rows[name]) for name in task.columns]
    for name, column in zip(task.columns, columns, strict=True):
        for number, sentence in enumerate(column):
            # QQP has three questions that are empty, also on the hub.
            if not isinstance(sentence, str) or (task.name != "qqp" and not sentence.strip()):
                raise InputError(f"{where}, row {number} has {sentence!r} as its {name}; expected a sentence")
    numbers = _label_numbers(task)
    names = getattr(rows.features["label"], "names", None)
    if names is not None and task.labels:
        plain = [name.strip().lower() for name in names]
        if sorted(plain) != sorted(task.labels):
            listed = ", ".join(task.labels)
            raise InputError(f"{where} has the labels {', '.join(names)}; expected {listed} for {task.name}")
        numbers = {str(number): task.labels.index(name) for number, name in enumerate(plain)}
    labels = []
    for number, label in enumerate(rows["label"]):
        if label is None or label == -1:
            hidden = f"{where}, row {number} has the label {label}, which stands for a hidden one"
            raise InputError(f"{hidden}; expected a split with labels")
        labels.append(_label(str(label), task, numbers, f"{where}, row {number}"))
    return _examples(columns, labels, task)


# Synthetic twins

# Common words, so that any tokenizer takes them whole, those of pretrained models included.
_WORDS = (
    "the a an this that some small big old new red blue green black white long short and of in on with near under over "
    "from by at very quite then now here there today dog cat horse bird fish tree house car river"
)
_FILLERS = _WORDS.split()
_NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def _synthetic(task: Task, split: str, seed: int) -> Examples:
    """Makes a task of the same type that a small encoder learns from scratch in a few hundred steps.

    Sentences have 4 to 25 words, most of them fewer than 10. The second, third or fourth word is a number, one to ten;
    all other words are drawn independently.

        one sentence            the class says whether the number is above five
        two classes             whether the first sentence's number is the larger; they differ by 2 or more
        three classes (MNLI)    likewise entailment and contradiction; neutral: the hypothesis has no number
        regression              2.5 + 2.5 (first - second) / 9

    Swapping the sentences of a pair changes the answer and leaves the words what they are: a bag of words knows nothing
    (of MNLI, only what is neutral). The number comes early so that its position tells models without token types of
    which sentence it is; anywhere in a sentence, they take much longer to learn it.
    """
    size = 2048 if split == "train" else 512
    rng = np.random.default_rng((seed, ("train", *task.evaluation).index(split), sorted(TASKS).index(task.name)))
    classes = rng.permutation(np.arange(size) % max(len(task.labels), 1))  # equally frequent
    columns: list[list[str]] = [[] for _ in task.columns]
    labels = []
    for chosen in classes.tolist():
        # Places in _NUMBERS; no number is -1.
        if len(columns) == 1:
            values = [int(rng.integers(5)) + 5 * chosen]
            label = chosen
        elif not task.labels:
            values = rng.integers(len(_NUMBERS), size=2).tolist()
            label = 2.5 + 2.5 * (values[0] - values[1]) / (len(_NUMBERS) - 1)
        else:
            smaller = int(rng.integers(len(_NUMBERS) - 2))
            larger = int(rng.integers(smaller + 2, len(_NUMBERS)))
            name = task.labels[chosen]
            if name == "neutral":
                values = [int(rng.integers(len(_NUMBERS))), -1]
            else:
                first_larger = name in ("entailment", "equivalent", "duplicate")
                values = [larger, smaller] if first_larger else [smaller, larger]
            label = chosen
        labels.append(label)
        for column, value in zip(columns, values, strict=True):
            words = int(rng.integers(3, 9) if rng.random() < 0.6 else rng.integers(9, 25))
            sentence = [_FILLERS[place] for place in rng.integers(len(_FILLERS), size=words)]
            extra = _NUMBERS[value] if value >= 0 else _FILLERS[int(rng.integers(len(_FILLERS)))]
            sentence.insert(int(rng.integers(1, 4)), extra)
            # XLNet's vocabulary is learnt from what different words have in common: of "dog" and "dog,", that is "dog".
            commas = rng.random(words) < 0.05
            sentence[:-1] = [word + "," * comma for word, comma in zip(sentence[:-1], commas.tolist(), strict=True)]
            column.append(" ".join(sentence) + ".")
    return _examples(columns, labels, task)


# Tokens


class Encoded:
    """Tokenized examples, as a data set for `parallel_loader` with a plan of `lengths`.

    A pair that is too long is cut longest first, token by token (transformers' "longest_first", and run_glue's). All
    tokens lie in one flat array, 4 bytes a token, 5 with token types; the tokenizer is not kept.

    Args:
        examples: what `read` returns.
        tokenizer: one of transformers' fast tokenizers.
        max_length: most tokens of an example, special tokens included.
    Attributes:
        lengths: int32 [n], tokens of each example after cutting, special tokens included.
        truncated: examples that were cut.
        tokens: the sum of `lengths`.
        labels: float32 or int32 [n].
        source, left_out: those of the examples.
    Raises:
        InputError: the tokenizer is not a fast one, or has no padding token; max_length is too small for its special
            tokens and a token a sentence, or more than its model takes.
    """

    def __init__(self, examples: Examples, tokenizer, max_length: int):
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(f"{type(tokenizer).__name__} is not a fast tokenizer; expected one with a tokenizer.json")
        if tokenizer.pad_token_id is None:
            raise InputError("the tokenizer has no padding token; expected one of an encoder, or set its pad_token")
        least = tokenizer.num_special_tokens_to_add(pair=examples.second is not None)
        least += 1 if examples.second is None else 2
        if not least <= max_length <= tokenizer.model_max_length:
            raise InputError(
                f"max_length is {max_length}; expected {least} (special tokens, and a token a sentence) to "
                f"{tokenizer.model_max_length}, which is what the tokenizer's model takes"
            )
        self.source, self.left_out = examples.source, examples.left_out
        self._pad, self._left = tokenizer.pad_token_id, tokenizer.padding_side == "left"
        # transformers 5 forgets XLNet's: its tokenizer names no token types, and pads them with 0 (5.23.0).
        xlnet = type(tokenizer).__name__.startswith("XLNet")
        typed = xlnet or "token_type_ids" in tokenizer.model_input_names
        self._type_pad = XLNET_TYPE_PAD if xlnet else tokenizer.pad_token_type_id
        self.labels = examples.labels.astype(np.float32 if examples.labels.dtype.kind == "f" else np.int32)

        ids, types, lengths = [], [], []
        self.truncated = 0
        for start in range(0, len(examples), CHUNK):
            part = slice(start, start + CHUNK)
            second = None if examples.second is None else examples.second[part]
            cut = {"truncation": "longest_first", "max_length": max_length}
            unused = {"return_attention_mask": False, "return_token_type_ids": False}
            encodings = tokenizer(examples.first[part], second, **cut, **unused).encodings
            rows = [encoding.ids for encoding in encodings]
            sizes = np.fromiter(map(len, rows), np.int32, len(rows))
            lengths.append(sizes)
            ids.append(np.fromiter(chain.from_iterable(rows), np.int32, sizes.sum()))
            if typed:
                rows = (encoding.type_ids for encoding in encodings)
                types.append(np.fromiter(chain.from_iterable(rows), np.uint8, sizes.sum()))
            self.truncated += sum(bool(encoding.overflowing) for encoding in encodings)
        self.lengths = np.concatenate([*lengths, np.empty(0, np.int32)])
        self._starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self._ids = np.concatenate([*ids, np.empty(0, np.int32)])
        self._types = np.concatenate([*types, np.empty(0, np.uint8)]) if typed else None
        self.tokens = len(self._ids)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray, shape: tuple[int]) -> dict[str, np.ndarray]:
        """Returns these examples as arrays of a fixed length (L,).

        Args:
            indices: int [B]; -1 is no example: a row of padding, with label 0, of which one place is attended to. (A
                mean over no tokens is not finite, and times 0 it still is not.)
        Returns: "input_ids" int32 [B, L], padded on the tokenizer's padding side; "attention_mask" int32 [B, L], 1 for
        tokens; "token_type_ids" int32 [B, L], the tokenizer's own where it has any (XLNet: <cls> 2, padding 3), else 0;
        "labels" int32 [B], float32 [B] in a regression.
        Raises IndexError for an example that is not there, ValueError if one is longer than L.
        """
        indices = np.asarray(indices, np.int64)
        if indices.size and not -1 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"examples {indices.min()} to {indices.max()} of {len(self)}")
        (width,) = shape
        rows = np.flatnonzero(indices >= 0)
        chosen = indices[rows]
        sizes = self.lengths[chosen].astype(np.int64)
        if sizes.max(initial=0) > width:
            row = int(sizes.argmax())
            raise ValueError(f"example {chosen[row]} has {sizes[row]} tokens, and the shape has {width} places")
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # 0, 1, … in each example
        source = np.repeat(self._starts[chosen], sizes) + within
        to = np.repeat(rows * width + (width - sizes if self._left else 0), sizes) + within

        def spread(values: np.ndarray | int, fill: int) -> np.ndarray:
            array = np.full((len(indices), width), fill, np.int32)
            array.reshape(-1)[to] = values
            return array

        labels = np.zeros(len(indices), self.labels.dtype)
        labels[rows] = self.labels[chosen]
        types, type_pad = (0, 0) if self._types is None else (self._types[source], self._type_pad)
        attention = spread(1, 0)
        attention[indices < 0, -1 if self._left else 0] = 1
        return {
            "input_ids": spread(self._ids[source], self._pad),
            "attention_mask": attention,
            "token_type_ids": spread(types, type_pad),
            "labels": labels,
        }


# Metrics


def score(task: str, predictions: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """Computes GLUE's metrics of a task, each at most 1.

    Args:
        task: a key of TASKS.
        predictions: [n] class numbers, or scores in a regression.
        labels: [n] likewise.
    Returns: "mcc" (Matthews' correlation) for cola, "accuracy" and "f1" (of class 1) for mrpc and qqp, "pearson" and
    "spearman" for stsb, else "accuracy". Constant predictions have a correlation of 0.
    Raises ValueError if the numbers differ or there are none.
    """
    chosen = find_task(task)
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    if predictions.shape != labels.shape or labels.ndim != 1 or not labels.size:
        raise ValueError(
            f"predictions {list(predictions.shape)} and labels {list(labels.shape)}; expected as many, one or more"
        )
    return {name: _metric(name, predictions, labels) for name in chosen.metrics}


def _metric(name: str, predictions: np.ndarray, labels: np.ndarray) -> float:
    # Imported here: a second and 60 MB in each worker process, which never scores.
    if name in ("pearson", "spearman"):
        from scipy import stats

        if not (np.isfinite(predictions).all() and np.isfinite(labels).all()):
            raise ValueError("predictions or labels are not finite")
        # In float64: float32 predictions that hardly differ would have a variance of rounding errors.
        predictions, labels = predictions.astype(np.float64), labels.astype(np.float64)
        if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
            return 0.0
        function = stats.pearsonr if name == "pearson" else stats.spearmanr
        return float(function(predictions, labels)[0])
    from sklearn import metrics

    known = {"mcc": metrics.matthews_corrcoef, "accuracy": metrics.accuracy_score}
    known["f1"] = lambda *both: metrics.f1_score(*both, zero_division=0)
    return float(known[name](labels, predictions))
