"""Which row of a checkpoint's head is which class.

The names decide, and not the order or the number of the rows:

* A checkpoint with the names of the data, in any order, case or Unicode form, keeps its head. Its
  rows are put into the order of the data.
* Where the names differ, the head is new.
* LABEL_0, LABEL_1 … name nothing. Either the user states the order of the checkpoint's classes
  (--labels), or an order is assumed and the user is told which.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from errors import InputError

# transformers' LABEL_0, and plain numbers.
PLACEHOLDER = re.compile(r"(label|class|id)?[ _-]*\d+", re.IGNORECASE)
NEW = "the head is new: "
SHOWN = 6  # names in a message


@dataclass(frozen=True)
class Order:
    """What becomes of a checkpoint's head.

    Attributes:
        rows: for each class of the data the row of the checkpoint's head; None: the head is new.
        said: a line for the user; "" where there is nothing to say.
        untrained: why the head cannot be evaluated before it is trained; "" where it can.
    """

    rows: list[int] | None = None
    said: str = ""
    untrained: str = ""

    @property
    def moved(self) -> bool:
        """Whether the order of the rows changes."""
        if self.rows is None:
            return False
        return self.rows != list(range(len(self.rows)))


def plain(name: str) -> str:
    """Returns what counts in a name when names are compared.

    Case, Unicode form, and whether words are separated by " ", "-" or "_" do not count.
    """
    words = re.split(r"[\s_-]+", unicodedata.normalize("NFC", str(name)).strip())
    return unicodedata.normalize("NFC", " ".join(words).casefold())


def match(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """Returns for each of our names its index among theirs; None where the names are not the same.

    Names are compared as they are first, since two of them may differ in case alone.
    """
    for form in (str, plain):
        index_of = {form(name): index for index, name in enumerate(theirs)}
        wanted = [form(name) for name in ours]
        all_distinct = len(index_of) == len(theirs)
        same_number = len(wanted) == len(theirs)
        if all_distinct and same_number and set(wanted) == index_of.keys():
            return [index_of[name] for name in wanted]
    return None


def unnamed(names: Sequence[str]) -> bool:
    """Returns whether all names are placeholders, such as LABEL_0."""
    return all(PLACEHOLDER.fullmatch(str(name)) for name in names)


def listed(names: Sequence[str]) -> str:
    """Returns the first names for a message, and how many more there are."""
    first = ", ".join(map(str, names[:SHOWN]))
    if len(names) > SHOWN:
        return f"{first} and {len(names) - SHOWN} more"
    return first


def _value_of_flag(names: Sequence[str]) -> str:
    """Returns the first names as a flag takes them, separated by commas, and "…" for others."""
    first = ",".join(map(str, names[:SHOWN]))
    if len(names) > SHOWN:
        return f"{first},…"
    return first


def given(text: str, classes: Sequence[str], flag: str = "--labels") -> list[str]:
    """Returns the names in the value of a flag, which commas separate.

    Raises:
        InputError: they are not the names of the classes.
    """
    names = [name.strip() for name in text.split(",")]
    if match(names, classes) is None:
        expected = f"{_value_of_flag(classes)} in the order of the checkpoint's classes"
        raise InputError(f"{flag} is {text}; expected {expected}")
    return names


def order(
    where: str, theirs: Sequence[str] | None, classes: Sequence[str], stated: Sequence[str] = ()
) -> Order:
    """Decides which row is which class in a head that has as many rows as there are classes.

    Args:
        where: the checkpoint, for messages.
        theirs: the checkpoint's names of its rows; None where it has none.
        classes: the data's names of its classes.
        stated: the names of the rows as the user states them, see `given`; () where not stated.
    """
    if stated:
        return _stated(where, theirs, classes, stated)

    rows = None
    if theirs is not None:
        rows = match(theirs, classes)
    if rows is not None:
        return _same_names(where, theirs, classes, rows)

    if theirs is None or unnamed(theirs):
        return _assumed(where, classes)
    return _other_names(where, theirs, classes)


def _stated(
    where: str, theirs: Sequence[str] | None, classes: Sequence[str], stated: Sequence[str]
) -> Order:
    """Returns the order that the user states, and says so where the checkpoint has another."""
    rows = match(stated, classes)
    said = ""
    named = theirs is not None and not unnamed(theirs)
    if named and match(theirs, classes) != rows:
        flag = f"--labels {','.join(stated)}"
        said = f"{flag} counts; {where} itself names its classes {listed(theirs)}"
    return Order(rows, said)


def _same_names(
    where: str, theirs: Sequence[str], classes: Sequence[str], rows: list[int]
) -> Order:
    """Returns the order for a checkpoint with the names of the data."""
    found = Order(rows)
    if not found.moved:
        return found

    both = f"{where} has its classes in the order {listed(theirs)}, the data {listed(classes)}"
    return Order(rows, f"{both}: the rows of its head are put into the order of the data")


def _assumed(where: str, classes: Sequence[str]) -> Order:
    """Returns the data's order for a head without names, which is not evaluated untrained."""
    flag = f"--labels {_value_of_flag(classes)}"
    unknown = f"{where} does not name the {len(classes)} classes of its head"
    assumed = f"they are taken to be in the order {listed(classes)}"
    said = f"{unknown}: {assumed}; {flag}, in another order, states that one"

    useless = "none of its answers can be told right from wrong without training (--lr 0)"
    untrained = f"{unknown}, so {useless}; state their order, such as {flag}"
    return Order(list(range(len(classes))), said, untrained)


def _other_names(where: str, theirs: Sequence[str], classes: Sequence[str]) -> Order:
    """Returns a new head, since the classes of the checkpoint have other names."""
    differ = f"a head for the classes {listed(theirs)}, the data has {listed(classes)}"
    flag = f"--labels {_value_of_flag(classes)}"
    remedy = f"if they mean the same, state the order of its own by {flag}"
    new = other(where, differ, remedy)
    return Order(None, f"{new.said}; {remedy}", new.untrained)


def other(where: str, what: str, remedy: str = "train it") -> Order:
    """Returns a new head, since the checkpoint has `what` in its place."""
    has = f"{where} has {what}"
    untrained = f"{has}, which says nothing without training (--lr 0); {remedy}"
    return Order(None, f"{NEW}{has}", untrained)
