"""What the readers of a user's CSV files share: the separators, and csv's errors as sentences."""

import csv
import io
from typing import Any

from errors import InputError

SEPARATORS = (",", ";", "\t")


def header(text: str, separator: str, where: str) -> list[str]:
    """Returns the fields of a CSV file's header.

    Args:
        text: its first line, or more, for names in quotes that have line breaks.
        where: the file, for messages.
    Raises:
        InputError: the line is no CSV, as where \\r alone ends the lines of the file.
    """
    try:
        lines = io.StringIO(text, newline="\n")
        return next(csv.reader(lines, delimiter=separator), [])
    except csv.Error as error:
        raise InputError(
            f"{where} has a header that cannot be read as CSV: {error}; "
            "end its lines with \\n or \\r\\n"
        ) from error


def next_row(reader: Any, where: str) -> list[str] | None:
    """Returns the fields of the next row of a strict csv.reader; None after the last.

    Args:
        where: the file and the line, for messages.
    Raises:
        InputError: quotes that are not CSV's: read on, they would join or cut rows.
    """
    try:
        return next(reader, None)
    except csv.Error as error:
        raise InputError(
            f"{where} cannot be read as CSV: {error}; a field that begins with a quote must "
            'end with one, and a quote in it is written twice: "say ""hello"""'
        ) from error
