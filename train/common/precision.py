"""In which precision an export predicts or translates: that of its run, unless a flag says
another."""

import sys

from errors import InputError
from train.common.mesh import PRECISIONS

# Of exports that do not say it: those of older versions, and of other programs.
UNKNOWN = "bfloat16"


def choose(given: str, exported: str, export: str) -> str:
    """Returns the precision to compute in; a line on the standard error says so where it is not
    known.

    Args:
        given: as --precision says; "": it was not given.
        exported: of the run's own evaluation, as the export says; "": it does not say it.
        export: names the export, for messages.
    Raises:
        InputError: the export says one that is not known here.
    """
    if given:
        return given
    if not exported:
        print(
            f"{export} does not say in which precision its run evaluated: {UNKNOWN} is taken; "
            "--precision takes another",
            file=sys.stderr,
            flush=True,
        )
        return UNKNOWN
    if exported not in PRECISIONS:
        raise InputError(
            f"{export} is of a run in the precision {exported!r}, which is not known here; "
            f"give --precision, one of {', '.join(PRECISIONS)}"
        )
    return exported
