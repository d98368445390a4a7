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

# Names that name nothing: transformers' LABEL_0, class_0, id0 and plain numbers.
PLACEHOLDER = re.compile(r"(label|class|id)?[ _-]*\d+", re.IGNORECASE)
SHOWN = 6  # names in a message


@dataclass(frozen=True)
class HeadDecision:
    """What becomes of a checkpoint's head: its rows are kept, in some order, or the head is new.

    HeadDecision() is for a model without a checkpoint's head: there was nothing to decide.

    Attributes:
        rows: for each class of the data the row of the checkpoint's head; None: no row is kept.
        note: what the user should know of rows that are kept; "" where there is nothing to say.
        why_new: why the head is new though a checkpoint was read; "" where its head is kept.
        refusal_at_lr_0: the error of a run with --lr 0, which would evaluate this head as it is; ""
            where such a run is allowed.
    """

    rows: list[int] | None = None
    note: str = ""
    why_new: str = ""
    refusal_at_lr_0: str = ""

    @property
    def is_new(self) -> bool:
        """Whether a checkpoint was read and the head is nevertheless new."""
        return self.why_new != ""

    @property
    def is_assumed(self) -> bool:
        """Whether the rows are kept in an order that nobody has stated: the checkpoint does not
        name its classes."""
        return self.refusal_at_lr_0 != "" and not self.is_new

    @property
    def message(self) -> str:
        """A line for the user; "" where there is nothing to say."""
        if self.is_new:
            return f"the head is new: {self.why_new}"
        return self.note

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
    folded = " ".join(words).casefold()
    return unicodedata.normalize("NFC", folded)  # again: casefold may return another form


def match(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """Returns for each of our names its index among theirs; None where the names are not the same.

    Names are compared as they are first, since two of them may differ in case alone.
    """
    for form_of in (str, plain):
        index_of = {form_of(name): index for index, name in enumerate(theirs)}
        wanted = [form_of(name) for name in ours]

        # A permutation: the same names, as many, and none of them twice.
        all_distinct = len(index_of) == len(theirs)
        same_number = len(wanted) == len(theirs)
        if all_distinct and same_number and set(wanted) == index_of.keys():
            return [index_of[form] for form in wanted]
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


def parse_labels(text: str, classes: Sequence[str], flag: str = "--labels") -> list[str]:
    """Returns the names in the value of a flag, which commas separate.

    Raises:
        InputError: they are not the names of the classes.
    """
    names = [name.strip() for name in text.split(",")]
    if match(names, classes) is None:
        raise InputError(
            f"{flag} is {text}; "
            f"expected {_value_of_flag(classes)} in the order of the checkpoint's classes"
        )
    return names


def decide(
    where: str, theirs: Sequence[str] | None, classes: Sequence[str], stated: Sequence[str] = ()
) -> HeadDecision:
    """Decides which row is which class in a head that has as many rows as there are classes.

    Args:
        where: the checkpoint, for messages.
        theirs: the checkpoint's names of its rows; None where it has none.
        classes: the data's names of its classes.
        stated: the names of the rows as the user states them, see `parse_labels`; () where not
            stated.
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
) -> HeadDecision:
    """Keeps the rows in the order that the user states; notes where the checkpoint has another."""
    rows = match(stated, classes)
    note = ""
    named = theirs is not None and not unnamed(theirs)
    if named and match(theirs, classes) != rows:
        note = (
            f"--labels {','.join(stated)} counts; {where} itself names its classes {listed(theirs)}"
        )
    return HeadDecision(rows, note)


def _same_names(
    where: str, theirs: Sequence[str], classes: Sequence[str], rows: list[int]
) -> HeadDecision:
    """Keeps the rows of a checkpoint with the names of the data, in the data's order."""
    decision = HeadDecision(rows)
    if not decision.moved:
        return decision

    return HeadDecision(
        rows,
        f"{where} has its classes in the order {listed(theirs)}, the data {listed(classes)}: "
        "the rows of its head are put into the order of the data",
    )


def _assumed(where: str, classes: Sequence[str]) -> HeadDecision:
    """Keeps the rows of a head without names in the data's order; refuses it at --lr 0."""
    rows = list(range(len(classes)))
    flag = f"--labels {_value_of_flag(classes)}"
    unknown = f"{where} does not name the {len(classes)} classes of its head"
    note = (
        f"{unknown}: they are taken to be in the order {listed(classes)}; "
        f"if it is another one, state it as {flag}"
    )
    refusal = (
        f"{unknown}, so its predictions mean nothing without training (--lr 0); "
        f"state their order, such as {flag}"
    )
    return HeadDecision(rows, note, refusal_at_lr_0=refusal)


def _other_names(where: str, theirs: Sequence[str], classes: Sequence[str]) -> HeadDecision:
    """Returns a new head, since the classes of the checkpoint have other names."""
    has = f"{where} has a head for the classes {listed(theirs)}, the data has {listed(classes)}"
    remedy = (
        "if they mean the same, "
        f"give the order of its classes with --labels {_value_of_flag(classes)}"
    )
    return HeadDecision(why_new=f"{has}; {remedy}", refusal_at_lr_0=_refusal(has, remedy))


def new_head(where: str, what: str) -> HeadDecision:
    """Returns a new head, since the checkpoint has `what` in its place."""
    has = f"{where} has {what}"
    return HeadDecision(why_new=has, refusal_at_lr_0=_refusal(has, "train it"))


def _refusal(has: str, remedy: str) -> str:
    """Returns the error of a run that would evaluate a new head without training it."""
    return f"{has}, which says nothing without training (--lr 0); {remedy}"
