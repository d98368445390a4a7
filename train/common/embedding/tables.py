"""What an embedding table is, and what is checked of tables and ids before they are used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from errors import InputError

PLANS = ("auto", "exchange", "data")  # what Table.plan may be
REMOVED_PLANS = ("row", "table", "column")


@dataclass(frozen=True)
class Table:
    """One embedding table.

    Attributes:
        name: of its feature; in messages, checkpoints and exports.
        rows: number of embeddings; ids are 0 <= id < rows.
        lookups: ids that an example has at most (1: one-hot, more: multi-hot).
        pooling: how an example's embeddings become one vector; an empty bag gives zeros.
        plan: where its rows lie, see the top of bags.py.
    """

    name: str
    rows: int
    lookups: int = 1
    pooling: Literal["sum", "mean"] = "sum"
    plan: Literal["auto", "exchange", "data"] = "auto"


def check_tables(tables: Sequence[Table]) -> None:
    """Raises InputError where a table is not possible."""
    names = [table.name for table in tables]
    if not names:
        raise InputError("there are no tables")

    for table in tables:
        name = repr(table.name)
        plan = repr(table.plan)
        if table.rows < 1 or table.lookups < 1:
            raise InputError(
                f"table {name} has {table.rows} rows, {table.lookups} lookups; each is at least 1"
            )
        if names.count(table.name) > 1 or "/" in table.name:
            raise InputError(f"table names must differ and have no slash: {name}")
        if table.plan in REMOVED_PLANS:
            raise InputError(
                f"table {name} has the plan {plan}, which was removed: "
                f"use one of {', '.join(PLANS)}; they also restore its checkpoints"
            )
        if table.plan not in PLANS:
            raise InputError(f"table {name} has the plan {plan}; it is one of {', '.join(PLANS)}")
        if table.pooling not in ("sum", "mean"):
            raise InputError(f"table {name} has the pooling {table.pooling!r}; it is sum or mean")


def check_ids(ids: np.ndarray, tables: Sequence[Table], present: np.ndarray | None = None) -> None:
    """Refuses ids outside of their table, on the host: on the device they would read and train
    another row.

    Args:
        ids: [n, sum of lookups] integers.
        present: [n, sum of lookups], 0 where there is no id.
    Raises:
        InputError: an id is outside of its table; names table, id and example.
    """
    lookups = [table.lookups for table in tables]
    width = sum(lookups)
    if ids.ndim != 2 or ids.shape[1] != width:
        raise InputError(
            f"ids have the shape {list(ids.shape)}; "
            f"it must be [examples, {width}], the sum of lookups"
        )

    limits = np.repeat([table.rows for table in tables], lookups)
    wrong = (ids < 0) | (ids >= limits)
    if present is not None:
        wrong &= present > 0
    if not wrong.any():
        return

    example, column = np.argwhere(wrong)[0]
    table = tables[int(np.searchsorted(np.cumsum(lookups), column, side="right"))]
    raise InputError(
        f"id {ids[example, column]} of table {table.name!r} (example {example} of the batch) is "
        f"outside of its {table.rows} rows; ids are 0 to {table.rows - 1}: prepare the data for "
        "these tables, or make them larger"
    )
