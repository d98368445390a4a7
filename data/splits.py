"""Which split a name means: one list of names, and one matcher for files, folders and the splits of a data set.

A name is cut into words at all that is no letter, but for apostrophes. A word of NAMES decides, in any case; other
words mean nothing. So train-00000-of-00008.parquet, wiki.train.tokens, News.2018.valid.txt, val2017 and "train(1).txt"
say their split, and devotions.txt and testament_of_youth.txt say none. Words and separators are those of `datasets`
(its data_files.py), but for eval and evaluation, which it takes for test, for the case, and for trainset, "train(1)"
and the like, which say nothing to it.

A folder decides for all that is in it. What says two splits is refused.
"""

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from data.leftovers import is_leftover
from errors import InputError

NAMES = {
    "train": ("train", "training", "trainset", "trainingset"),
    "valid": ("val", "valid", "validation", "dev", "development", "eval", "evaluation", "valset", "validset",
              "validationset", "devset", "evalset"),
    "test": ("test", "testing", "testset"),
}  # fmt: skip
SEPARATORS = re.compile(r"(?:[^\w'’]|[\d_])+")
REPORTS = ("report.json", "prepared.json", "shards.json", "parts/plan.json")  # that make data writes
SHOWN = 5  # names in a sentence


def words(name: str) -> list[str]:
    """Returns the words of a name, in small letters."""
    name = unicodedata.normalize("NFC", name.lower())  # else an accent of its own would divide a word
    return [word for word in SEPARATORS.split(name) if word]


def split_of(name: str) -> str | None:
    """Returns the split that a name says: train, valid or test; None if it says none. Raises InputError for two."""
    said = {word: split for split, known in NAMES.items() for word in known if word in words(name)}
    if len(set(said.values())) > 1:
        raise InputError(f"the name {name} says more than one split: {' and '.join(said)}; rename it")
    return next(iter(said.values()), None)


def is_plain(name: str) -> bool:
    """Returns whether a name, or a part of it between dots, is a split's and nothing else: train2017, wiki.train.txt,
    valid-00000-of-00001.parquet; but not train_to_paris.txt."""
    known = [word for of_split in NAMES.values() for word in of_split]
    for part in name.split("."):
        rest = [word for word in words(part) if word != "of"]
        if len(rest) == 1 and rest[0] in known:
            return True
    return False


def split_of_path(path: PurePath) -> str | None:
    """Returns the split that a path below the data's folder says: its folders decide, and where they say none, the
    file's name. Raises InputError where two folders, or two words of the file's name, say different splits."""
    said = {}
    for folder in path.parts[:-1]:
        if split := split_of(folder):
            said[split] = folder
    if len(said) > 1:
        raise InputError(f"the folders of {path} say more than one split: {' and '.join(said.values())}; rename one")
    return next(iter(said), None) or split_of(path.name)


def says_split(path: PurePath) -> bool:
    """Returns whether a path below the data's folder says a split, or more than one."""
    return any(word in words(part) for part in path.parts for of_split in NAMES.values() for word in of_split)


def named(names: Iterable[str], split: str, where: str) -> str | None:
    """Returns the one of these names that means a split, or None. A name of the list ("val") comes before one that has
    it as a part ("val2017", "x.val"), and that before one with it among other words ("my_val_set"). Raises InputError
    where several are as good."""
    names = sorted(names)
    exact = [name for name in names if name.lower() in NAMES[split]]
    plain = [name for name in names if is_plain(name) and split_of(name) == split] if not exact else []
    found = exact or plain or [name for name in names if split_of(name) == split]
    if len(found) > 1:
        raise InputError(f"{where} has {shown(found)}, which all say the {split} split; keep one, or rename the others")
    return found[0] if found else None


@dataclass
class Files:
    """Files by what they are for."""

    train: list[Path] = field(default_factory=list)
    valid: list[Path] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)
    unread: list[Path] = field(default_factory=list)  # of names that say a split, and endings that are not read


def sort_files(paths: Sequence[Path], folder: Path) -> Files:
    """Sorts a folder's files into those to train on, to validate on, and the others.

    Those that say no split are to train on; unless there are some whose folder or name is plainly train's, as in
    train/ or train.txt: then nobody means these others, and they are left out, as `datasets` does. So is test.
    """
    said = {path: split_of_path(path.relative_to(folder)) for path in paths}
    plain = [path for path in paths if said[path] == "train" and any(map(is_plain, path.relative_to(folder).parts))]
    files = Files()
    for path, split in said.items():
        if split == "train" or (split is None and not plain):
            files.train.append(path)
        elif split == "valid":
            files.valid.append(path)
        else:
            files.left_out.append(path)
    return files


def made_by_make(folder: Path) -> bool:
    """Returns whether `make data` has made a folder: by what it writes there, not by the folder's name."""
    paths = [folder / name for name in REPORTS]
    return any(is_report(path.read_bytes()) for path in paths if path.is_file())


def is_report(content: bytes) -> bool:
    """Returns whether a file of this content is a plan or a report of `make data`."""
    try:
        content = json.loads(content)
    except ValueError:
        return False
    return isinstance(content, dict) and isinstance(content.get("flags"), dict) and "sources" in content


def below(folder: Path, *patterns: str) -> list[Path]:
    """Returns the files below a folder that fit a pattern (in small letters, for names in any case), sorted; without
    hidden ones, what systems leave in a folder, and what `make data` has made. Links to folders are followed.

    Raises InputError for a file that is a link to nowhere, a folder that cannot be read, and see `_leads_on`.
    """
    found, waiting = [], [folder]
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
                if _leads_on(path, folder) and not made_by_make(path):
                    waiting.append(path)
            elif any(fnmatchcase(path.name.lower(), pattern) for pattern in patterns):
                if path.is_symlink() and not path.exists():
                    raise InputError(f"{path} is a link to {os.readlink(path)}, which is not there; mend or remove it")
                if path.is_file():
                    found.append(path)
    return sorted(found)


def _leads_on(path: Path, folder: Path) -> bool:
    """Returns whether the files in a folder, or behind a link to one, are not read in another place: a link that stays
    in the data's own folder (`latest`), or leads to one that has it, adds none. Raises InputError where such a link
    says a split: which of both places counts, nobody knows."""
    if not path.is_symlink():
        return True
    to, top = path.resolve(), folder.resolve()
    if not (to.is_relative_to(top) or top.is_relative_to(to)):
        return True
    if split := split_of(path.name):
        what = f"{path} says the {split} split and is a link to {to}, whose files are read there, too"
        raise InputError(f"{what}; move the folder to the link's place")
    return False


# What a start says


def shown(names: Iterable[object]) -> str:
    """Returns the first names, and how many more there are."""
    names = [str(name) for name in names]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def read_from(train: str, evaluation: str, left_out: Iterable[object] = ()) -> dict[str, str]:
    """Returns what a report says of where the rows are from; `source` reads it."""
    return {"train": train, "evaluation": evaluation, "left_out": shown(left_out)}


def sentence(of: dict[str, str]) -> str:
    """Returns what `read_from` gives, in words."""
    left_out = f"; left out: {of['left_out']}" if of["left_out"] else ""
    return f"trained on {of['train']}, evaluated on {of['evaluation']}{left_out}"


def said(train, *evaluations) -> str:
    """Returns " (trained on …, evaluated on …; left out: …)" for the first line of a run.

    The data sets say it: `source`, what they are read from, and `left_out`, what lies beside it. A synthetic one
    has no source, and nothing is said.
    """
    if not getattr(train, "source", ""):
        return ""
    left_out = dict.fromkeys(name for one in (train, *evaluations) for name in one.left_out)
    return f" ({sentence(read_from(train.source, shown(dict.fromkeys(one.source for one in evaluations)), left_out))})"


def set_source(dataset, report: dict, evaluation: bool) -> None:
    """Sets `source` and `left_out` of a data set that `make data` has prepared, from its report."""
    split = "evaluation" if evaluation else "train"
    of = report.get("read_from", {})  # an older version did not say
    dataset.source = of.get(split) or f"its {split} rows"
    dataset.left_out = [of["left_out"]] if of.get("left_out") else []
