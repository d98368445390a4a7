"""Which split a name means: one list of names, and one matcher for files, folders and data sets.

A name is cut into words at everything that is not a letter or an apostrophe. A word of NAMES
decides, in any case; other words mean nothing. So train-00000-of-00008.parquet, wiki.train.tokens,
News.2018.valid.txt, val2017 and "train(1).txt" say their split, and devotions.txt and
testament_of_youth.txt say none. Words and separators are those of `datasets` (its data_files.py),
with four differences: it takes eval and evaluation for test; it minds the case; trainset,
"train(1)" and the like say nothing to it; and testa and testb, of CoNLL-2003, are no test to it.

A folder decides for all that is in it. A name that says two splits is refused.
"""

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from data.leftovers import is_leftover
from errors import InputError

NAMES = {
    "train": ("train", "training", "trainset", "trainingset"),
    "valid": (
        "val",
        "valid",
        "validation",
        "dev",
        "development",
        "eval",
        "evaluation",
        "valset",
        "validset",
        "validationset",
        "devset",
        "evalset",
        "testa",  # of CoNLL-2003
    ),
    "test": ("test", "testing", "testset", "testb"),
}
SEPARATORS = re.compile(r"(?:[^\w'’]|[\d_])+")
REPORTS = ("report.json", "prepared.json", "shards.json", "parts/plan.json")  # `make data` writes
SHOWN = 5  # names listed in a sentence


def _split_by_word() -> dict[str, str]:
    """Returns the split of each word of NAMES, in the order of NAMES."""
    found = {}
    for split, known in NAMES.items():
        for word in known:
            found[word] = split
    return found


SPLIT_BY_WORD = _split_by_word()


def words(name: str) -> list[str]:
    """Returns the words of a name, in lower case."""
    # Composed: a combining accent of its own is no letter, and would cut the word.
    name = unicodedata.normalize("NFC", name.lower())
    return [word for word in SEPARATORS.split(name) if word]


def split_of(name: str) -> str | None:
    """Returns the split that a name says: train, valid or test; None if it says none.

    Raises InputError for a name that says two splits.
    """
    own_words = set(words(name))
    said = {word: split for word, split in SPLIT_BY_WORD.items() if word in own_words}
    if len(set(said.values())) > 1:
        listed = " and ".join(said)
        raise InputError(f"the name {name} says more than one split: {listed}; rename it")
    return next(iter(said.values()), None)


def wanted(split: str, known: Sequence[str] = tuple(NAMES)) -> str:
    """Returns the split that a user asks for, one of `known`; "" where none is asked for.

    The words of NAMES mean the same here: dev is valid. Raises InputError for another one.
    """
    meant = SPLIT_BY_WORD.get(split.lower(), split)
    if meant and meant not in known:
        raise InputError(f"--split is {split}; expected {', '.join(known[:-1])} or {known[-1]}")
    return meant


def is_plain(name: str) -> bool:
    """Returns whether a name, or a part of it between dots, is a split's and nothing else.

    So are train2017, wiki.train.txt and valid-00000-of-00001.parquet, but not train_to_paris.txt.
    """
    for part in name.split("."):
        rest = [word for word in words(part) if word != "of"]
        if len(rest) == 1 and rest[0] in SPLIT_BY_WORD:
            return True
    return False


def split_of_path(path: PurePath) -> str | None:
    """Returns the split that a path relative to the data's folder says, or None.

    Its folders decide; where they say none, the file's name does. Raises InputError where two
    folders, or two words of the file's name, say different splits.
    """
    folder_of_split = {}
    for folder in path.parts[:-1]:
        split = split_of(folder)
        if split is not None:
            folder_of_split[split] = folder

    if len(folder_of_split) > 1:
        listed = " and ".join(folder_of_split.values())
        raise InputError(f"the folders of {path} say more than one split: {listed}; rename one")
    if folder_of_split:
        return next(iter(folder_of_split))
    return split_of(path.name)


def says_split(path: PurePath) -> bool:
    """Returns whether a path relative to the data's folder says a split, or more than one."""
    all_words = []
    for part in path.parts:
        all_words += words(part)
    return any(word in SPLIT_BY_WORD for word in all_words)


def named(names: Iterable[str], split: str, where: str) -> str | None:
    """Returns the one of these names that means a split, or None.

    A name of the list ("val") comes before one that is plainly the split's ("val2017", "x.val"),
    and that before one with its word among others ("my_val_set").

    Args:
        where: what has these names, for messages.
    Raises:
        InputError: several names say the split equally well.
    """
    names = sorted(names)
    found = [name for name in names if name.lower() in NAMES[split]]
    if not found:
        found = [name for name in names if is_plain(name) and split_of(name) == split]
    if not found:
        found = [name for name in names if split_of(name) == split]

    if len(found) > 1:
        raise InputError(
            f"{where} has {shown(found)}, which all say the {split} split; "
            "keep one, or rename the others"
        )
    return found[0] if found else None


@dataclass
class Files:
    """Files by what they are for; `unread`: the name says a split, and the ending is not known."""

    train: list[Path] = field(default_factory=list)
    valid: list[Path] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)
    unread: list[Path] = field(default_factory=list)


def sort_files(paths: Sequence[Path], folder: Path) -> Files:
    """Sorts a folder's files into those to train on, to validate on, and the others.

    Files that say no split are to train on, unless a folder or a name is plainly train's, as in
    train/ or train.txt: then nobody means these others, and they are left out, as `datasets` does.
    Files of the test split are left out.
    """
    said = {path: split_of_path(path.relative_to(folder)) for path in paths}
    has_plain_train = False
    for path, split in said.items():
        if split == "train" and any(map(is_plain, path.relative_to(folder).parts)):
            has_plain_train = True

    files = Files()
    for path, split in said.items():
        if split == "train" or (split is None and not has_plain_train):
            files.train.append(path)
        elif split == "valid":
            files.valid.append(path)
        else:
            files.left_out.append(path)
    return files


def made_by_make(folder: Path) -> bool:
    """Returns whether `make data` has made a folder: by its reports, not by the folder's name."""
    for name in REPORTS:
        path = folder / name
        if path.is_file() and is_report(path.read_bytes()):
            return True
    return False


def is_report(content: bytes) -> bool:
    """Returns whether a file of this content is a plan or a report of `make data`."""
    try:
        content = json.loads(content)
    except ValueError:
        return False
    return (
        isinstance(content, dict)
        and isinstance(content.get("flags"), dict)
        and "sources" in content
    )


def below(folder: Path, *patterns: str) -> list[Path]:
    """Returns the files in a folder and its subfolders that match a pattern, sorted.

    Hidden files, what systems leave in a folder, and what `make data` has made are passed over.
    Links to folders are followed.

    Args:
        patterns: in lower case; names match in any case.
    Raises:
        InputError: a file that is a link to nowhere; a folder that cannot be read; a link to a
            folder that `_adds_files` refuses.
    """
    found = []
    waiting = [folder]
    while waiting:
        parent = waiting.pop()
        try:
            inside = list(parent.iterdir())
        except OSError as error:
            raise InputError(f"folder {parent} cannot be read: {error.strerror}") from error

        for path in inside:
            if path.name.startswith(".") or is_leftover(path.name):
                continue
            if path.is_dir():
                if _adds_files(path, folder) and not made_by_make(path):
                    waiting.append(path)
                continue
            if not any(fnmatchcase(path.name.lower(), pattern) for pattern in patterns):
                continue
            if path.is_symlink() and not path.exists():
                raise InputError(
                    f"{path} is a link to {os.readlink(path)}, which is not there; "
                    "mend or remove it"
                )
            if path.is_file():
                found.append(path)
    return sorted(found)


def _adds_files(path: Path, folder: Path) -> bool:
    """Returns whether a subfolder, or a link to a folder, adds files that are not read elsewhere.

    A link that stays in the data's own folder (`latest`), or leads to one that contains it, adds
    none. Raises InputError where such a link says a split: nobody knows which of both counts.
    """
    if not path.is_symlink():
        return True
    target = path.resolve()
    top = folder.resolve()
    if not (target.is_relative_to(top) or top.is_relative_to(target)):
        return True

    split = split_of(path.name)
    if split is not None:
        raise InputError(
            f"{path} says the {split} split and is a link to {target}, "
            "whose files are read there, too; move the folder to the link's place"
        )
    return False


# What the first line of a run says


def shown(names: Iterable[object]) -> str:
    """Returns the first names, and how many more there are."""
    names = [str(name) for name in names]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def read_from(train: str, evaluation: str, left_out: Iterable[object] = ()) -> dict[str, str]:
    """Returns what a report says of where its rows are from; `set_source` reads it."""
    return {"train": train, "evaluation": evaluation, "left_out": shown(left_out)}


def sentence(of: dict[str, str]) -> str:
    """Returns what `read_from` gives, in words."""
    left_out = f"; left out: {of['left_out']}" if of["left_out"] else ""
    return f"trained on {of['train']}, evaluated on {of['evaluation']}{left_out}"


def said(train, *evaluations) -> str:
    """Returns " (trained on …, evaluated on …; left out: …)" for the first line of a run.

    Args:
        train, evaluations: data sets with `source`, what they are read from, and `left_out`, what
            lies beside it. For a synthetic one, which has no source, the text is empty.
    """
    if not getattr(train, "source", ""):
        return ""

    # As keys of dictionaries: each once, in the order of the data sets.
    sources = dict.fromkeys(dataset.source for dataset in evaluations)
    left_out = {}
    for dataset in (train, *evaluations):
        left_out.update(dict.fromkeys(dataset.left_out))
    return f" ({sentence(read_from(train.source, shown(sources), left_out))})"


def sources_of(train, *evaluations, of: str = "source") -> dict[str, str]:
    """Returns what a run records of the split of its data; {} for a synthetic one.

    Args:
        of: the attribute of the data sets; a data set without it has read its `source`.
    """
    if not getattr(train, "source", ""):
        return {}
    read = []
    for dataset in (train, *evaluations):
        read.append(getattr(dataset, of, "") or dataset.source)
    return {"train": read[0], "evaluation": ", ".join(dict.fromkeys(read[1:]))}


def set_source(dataset, report: dict, evaluation: bool) -> None:
    """Sets `source` and `left_out` of a data set that `make data` has prepared, by its report."""
    split = "evaluation" if evaluation else "train"
    of = report.get("read_from", {})  # reports of older versions have none
    dataset.source = of.get(split) or f"its {split} rows"
    dataset.left_out = [of["left_out"]] if of.get("left_out") else []


@dataclass(frozen=True)
class DatasetSplits:
    """What a data set of `datasets` has.

    Attributes:
        tables: by the data set's own names of its splits.
        names: of its splits, by "train", "valid" and "test".
        left_out: what no training reads, in words.
        is_one: it is a single table, so that no name says a split.
    """

    tables: Mapping[str, Any]
    names: dict[str, str]
    left_out: list[str]
    is_one: bool


def of_dataset(dataset: Any, where: str, to_train: bool) -> DatasetSplits:
    """Finds the splits of a DatasetDict or a Dataset of `datasets`.

    A single split is trained on, whatever its name.

    Args:
        where: names the data, for messages.
        to_train: refuses data without a split to train on.
    """
    is_one = not isinstance(dataset, Mapping)
    tables = {"train": dataset} if is_one else dataset
    names = {}
    for split in ("train", "valid", "test"):
        name = named(tables, split, where)
        if name is not None:
            names[split] = name
    if len(tables) == 1 and (to_train or not names):
        names = {"train": next(iter(tables))}
        is_one = True
    if not names or (to_train and "train" not in names):
        raise InputError(f"{where} has the splits {', '.join(tables)}; expected train among them")

    used = (names.get("train"), names.get("valid"))
    left_out = [f"its split {name}" for name in tables if name not in used]
    return DatasetSplits(tables, names, left_out, is_one)
