"""Which row of a checkpoint's head is which class: the names decide, not the order and not the number of the rows.

A checkpoint whose names are those of the data, in any order, case or Unicode form, keeps its head, with the rows in the
order of the data. Where the names are others, the head is new. LABEL_0, LABEL_1 … name nothing: then the user says the
order of the checkpoint's classes (--labels), or trains on one that is taken, and is told which.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from errors import InputError

PLACEHOLDER = re.compile(r"(label|class|id)?[ _-]*\d+", re.IGNORECASE)  # transformers' LABEL_0, and plain numbers
NEW = "the head is new: "
SHOWN = 6  # names in a message


@dataclass(frozen=True)
class Order:
    """What becomes of a checkpoint's head.

    Attributes:
        rows: for each class of the data the row of the checkpoint's head; None: the head is new.
        said: a line that says so where it is not plain; "" where there is nothing to say.
        untrained: why the head cannot be evaluated before it is trained; "" where it can.
    """

    rows: list[int] | None = None
    said: str = ""
    untrained: str = ""

    @property
    def moved(self) -> bool:
        """Whether the rows have to change their places."""
        return self.rows is not None and self.rows != list(range(len(self.rows)))


def plain(name: str) -> str:
    """Returns what counts of a name: neither case nor Unicode form, nor whether words are parted by - or _."""
    words = re.split(r"[\s_-]+", unicodedata.normalize("NFC", str(name)).strip())
    return unicodedata.normalize("NFC", " ".join(words).casefold())


def match(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """Returns for each of our names its place among theirs; None where they are not the same names."""
    for form in (str, plain):  # two names may differ in case alone
        places = {form(name): place for place, name in enumerate(theirs)}
        wanted = [form(name) for name in ours]
        if len(places) == len(theirs) == len(wanted) and set(wanted) == places.keys():
            return [places[name] for name in wanted]
    return None


def unnamed(names: Sequence[str]) -> bool:
    """Says whether all names are placeholders, such as LABEL_0."""
    return all(PLACEHOLDER.fullmatch(str(name)) for name in names)


def listed(names: Sequence[str]) -> str:
    """Returns the first names, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more


def given(text: str, classes: Sequence[str], flag: str = "--labels") -> list[str]:
    """Returns the names of a flag, separated by commas. Raises InputError where they are not the classes."""
    names = [name.strip() for name in text.split(",")]
    if match(names, classes) is None:
        expected = f"expected {','.join(map(str, classes[:SHOWN]))}{',…' if len(classes) > SHOWN else ''}"
        raise InputError(f"{flag} is {text}; {expected} in the order of the checkpoint's classes")
    return names


def order(where: str, theirs: Sequence[str] | None, classes: Sequence[str], stated: Sequence[str] = ()) -> Order:
    """Decides which row is which class in a head of as many rows as there are classes.

    Args:
        where: the checkpoint, for messages.
        theirs: the names that it has for its rows; None where it has none.
        classes: the names of the data's.
        stated: the names of the rows, as the user gives them, see `given`.
    """
    named = theirs is not None and not unnamed(theirs)
    rows = match(theirs, classes) if theirs is not None else None
    if stated:
        chosen, said = match(stated, classes), ""
        if named and rows != chosen:
            said = f"--labels {','.join(stated)} counts; {where} itself names its classes {listed(theirs)}"
        return Order(chosen, said)

    flag = f"--labels {','.join(map(str, classes[:SHOWN]))}{',…' if len(classes) > SHOWN else ''}"
    if rows is not None:
        found = Order(rows)
        if found.moved:
            both = f"{where} has its classes in the order {listed(theirs)}, the data {listed(classes)}"
            found = Order(rows, f"{both}: the rows of its head are put into the order of the data")
        return found
    if not named:
        says = f"{where} does not name the {len(classes)} classes of its head"
        taken = f"they are taken to be in the order {listed(classes)}; {flag}, in another order, states that one"
        untrained = f"{says}, so none of its answers can be told right from wrong without training (--lr 0)"
        return Order(list(range(len(classes))), f"{says}: {taken}", f"{untrained}; state their order, such as {flag}")
    differ = f"a head for the classes {listed(theirs)}, the data has {listed(classes)}"
    remedy = f"if they mean the same, state the order of its own by {flag}"
    new = other(where, differ, remedy)
    return Order(None, f"{new.said}; {remedy}", new.untrained)


def other(where: str, what: str, remedy: str = "train it") -> Order:
    """Returns that the head is new, since the checkpoint has `what` in its place."""
    has = f"{where} has {what}"
    return Order(None, f"{NEW}{has}", f"{has}, which says nothing without training (--lr 0); {remedy}")
