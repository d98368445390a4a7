"""train/common/embedding: every plan and optimizer against torch on the CPU, on four devices;
choice of plans; checks.

Other numbers of devices, and what is compiled: test_embedding_devices.py. The exchange:
test_embedding_exchange.py. Checkpoints: test_embedding_checkpoints.py.
"""

import dataclasses
import os
import re
from typing import Any

import numpy as np
import pytest
import torch
from embedding_helpers import (
    DIM,
    TABLES,
    as_vocabulary,
    assert_parity,
    in_lines,
    in_two_passes,
    make,
)

from errors import InputError
from train.common.embedding import (
    OPTIMIZERS,
    SGD,
    Adagrad,
    LazyAdam,
    ShardedEmbeddingBags,
    Table,
    check_ids,
    memory,
)
from train.common.embedding.optimizers import row_bytes
from train.common.embedding.rows import add_rows, rows_in_a_line, take_rows
from train.common.embedding.tables import REMOVED_PLANS

UNLIMITED = 1e15

# Parity


@dataclasses.dataclass(frozen=True)
class Training:
    """A training whose numbers are compared with torch's."""

    plan: str  # "mixed" has both plans
    optimizer: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of assert_parity
    in_lines: bool = False  # rows side by side in lines of 128, as on a TPU


ONE_HOT = [dataclasses.replace(table, lookups=1) for table in TABLES]
VOCABULARY = {"tables": [Table("words", 60, 5, "mean")], "ragged": False, "forward": as_vocabulary}
EVALUATED = {"forward": in_two_passes, "evaluates": True}
# A 2-D mesh without lines: OTHER_COMBINATIONS of test_embedding_devices.py.
TRAININGS = {
    "ragged bags": Training("mixed", "sgd"),
    "bags always full": Training("mixed", "adagrad", {"ragged": False}),
    "one id per bag": Training("mixed", "rowwise_adagrad", {"ragged": False, "tables": ONE_HOT}),
    "two passes and an evaluation": Training("mixed", "lazy_adam", EVALUATED),
    "any ids": Training("exchange", "sgd", {"ids": ("one", "eighth")}),
    "copies larger than a batch": Training("data", "lazy_adam"),
    "copies without a state": Training("data", "sgd", {"ids": ("one", "power law")}),
    "in lines": Training("mixed", "rowwise_adagrad", in_lines=True),
    "in lines, 2-D mesh": Training("mixed", "lazy_adam", {"model_devices": 2}, in_lines=True),
    "nn.Embedding, exchange": Training("exchange", "lazy_adam", VOCABULARY),
    "nn.Embedding, auto": Training("auto", "sgd", VOCABULARY),
}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_training_equals_torch_on_four_devices(mesh, training):
    own_mesh = in_lines(mesh) if training.in_lines else mesh
    embeddings = assert_parity(own_mesh, training.plan, training.optimizer, **training.options)

    if training.plan == "mixed":
        assert set(embeddings.plans) == {"exchange", "data"}
    rows_per_line = {array.weight.shape[1] // DIM for array in embeddings.arrays}
    assert rows_per_line == {128 // DIM if training.in_lines else 1}


def test_arrays_of_one_size_can_live_at_the_same_time(mesh):
    """The second is padded, and its state must be, too."""
    tables = [Table("only", 64, 4)]
    first = make(mesh, "exchange", "sgd", tables=tables)
    second = assert_parity(mesh, "exchange", "rowwise_adagrad", tables=tables)
    assert second.arrays[0].rows > first.arrays[0].rows


# Choice of plans


def automatic(rows, devices=4, dim=64, optimizer=None, device_bytes=UNLIMITED) -> tuple[str, ...]:
    """Returns the plans of one-hot tables that say "auto"."""
    tables = [Table(f"t{number}", size) for number, size in enumerate(rows)]
    return memory.choose_plans(tables, dim, devices, optimizer or SGD(), device_bytes)


def test_tables_up_to_a_mebibyte_are_copied():
    plans = automatic([10, 4096, 4097, 10_000_000])  # 4096 rows of 64: 1 MiB
    assert plans == ("data", "data", "exchange", "exchange")


def test_the_state_counts_in_the_choice_of_a_plan():
    assert automatic([2048, 4096], optimizer=Adagrad()) == ("data", "exchange")


def test_on_one_device_all_tables_are_copied():
    assert set(automatic([10, 10_000_000], devices=1)) == {"data"}
    exchanged = [Table("a", 10_000_000, plan="exchange")]
    assert memory.choose_plans(exchanged, 64, 1, SGD(), UNLIMITED) == ("data",)


def test_a_plan_that_a_table_says_is_taken():
    tables = [Table("small", 10, plan="exchange"), Table("large", 10_000_000, plan="data")]
    assert memory.choose_plans(tables, 64, 4, SGD(), UNLIMITED) == ("exchange", "data")


TOO_LARGE = [4_000_000, 1_000_000, 3_000_000, 50]
every_optimizer = pytest.mark.parametrize("optimizer", [rule() for rule in OPTIMIZERS.values()])


def refusal(optimizer) -> tuple[str, float]:
    """Returns the sentence about TOO_LARGE on four devices, and the bytes of each."""
    device_bytes = 0.3 * sum(TOO_LARGE) * row_bytes(64, optimizer) / 4 * 2
    with pytest.raises(InputError) as raised:
        automatic(TOO_LARGE, optimizer=optimizer, device_bytes=device_bytes)
    return str(raised.value), device_bytes


@every_optimizer
def test_tables_that_are_too_large_are_named(optimizer):
    message, device_bytes = refusal(optimizer)
    assert "\n" not in message
    assert "'t0': 4,000,000 rows" in message
    assert "of 4 device(s)" in message
    assert f"{row_bytes(64, optimizer):,} bytes" in message
    assert f"{device_bytes / 2**30:.3g} GiB" in message
    has_full_state = optimizer in (Adagrad(), LazyAdam())
    assert ("RowWiseAdagrad" in message) == has_full_state


@every_optimizer
def test_what_would_fit_fits_and_one_device_less_does_not(optimizer):
    message, device_bytes = refusal(optimizer)
    devices = int(re.search(r"(\d+) devices", message)[1])
    percent = int(re.search(r"(\d+) %", message)[1])
    smaller = [size * percent // 100 for size in TOO_LARGE]
    options = {"optimizer": optimizer, "device_bytes": device_bytes}

    automatic(TOO_LARGE, devices=devices, **options)
    automatic(smaller, **options)
    with pytest.raises(InputError):
        automatic(TOO_LARGE, devices=devices - 1, **options)


def test_copies_that_do_not_fit_are_to_be_shared_out():
    tables = [Table("a", 10_000_000, plan="data")]
    with pytest.raises(InputError, match="or plans that share tables out instead of copying them$"):
        memory.choose_plans(tables, 64, 4, SGD(), 1e9)


def test_the_memory_of_a_device_is_known_or_asked_for(mesh):
    known = memory.device_bytes_for_tables(dataclasses.replace(mesh, kind="TPU v5 lite"))
    assert known == memory.TABLE_SHARE * 15.75 * 2**30
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory.device_bytes_for_tables(mesh) == pytest.approx(memory.TABLE_SHARE * machine / 4)
    with pytest.raises(
        InputError, match="the memory of a 'TPU v99' is not known: give device_bytes"
    ):
        memory.device_bytes_for_tables(dataclasses.replace(mesh, kind="TPU v99"))


# Bad input

FEW = (Table("user", 10), Table("tags", 5, 3), Table("hour", 4))
OUTSIDE = [
    (2, 0, 10, "user", 10),
    (0, 1, 5, "tags", 5),
    (5, 3, 2**31 - 1, "tags", 5),
    (1, 4, -1, "hour", 4),
]
outside = pytest.mark.parametrize(("example", "column", "value", "table", "rows"), OUTSIDE)


def good_ids() -> np.ndarray:
    """Returns ids [6, 5] of FEW."""
    return np.tile(np.array([9, 4, 0, 4, 3], np.int32), (6, 1))


@outside
def test_an_id_outside_of_its_table_is_refused(example, column, value, table, rows):
    ids = good_ids()
    check_ids(ids, FEW)
    ids[example, column] = value

    bad_id = rf"id {value} of table '{table}' \(example {example} of the batch\)"
    message = f"{bad_id} is outside of its {rows} rows"
    with pytest.raises(InputError, match=message):
        check_ids(ids, FEW)
    with pytest.raises(InputError, match=message):
        check_ids(ids, FEW, np.ones((6, 5), np.float32))


@outside
def test_an_id_that_is_not_there_may_be_any_number(example, column, value, table, rows):
    ids = good_ids()
    ids[example, column] = value
    present = np.ones((6, 5), np.float32)
    present[example, column] = 0
    check_ids(ids, FEW, present)


@pytest.mark.parametrize("shape", [(6, 4), (6, 6), (30,), (2, 3, 5)])
def test_ids_of_another_width_are_refused(shape):
    with pytest.raises(InputError, match=r"it must be \[examples, 5\], the sum of lookups"):
        check_ids(np.zeros(shape, np.int32), FEW)


@dataclasses.dataclass(frozen=True)
class Impossible:
    """Tables that cannot be made."""

    tables: list[Table]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


TWO_OF_ONE_NAME = [Table("a", 5), Table("b", 5), Table("a", 6)]
# By the sentence that refuses them.
IMPOSSIBLE = {
    "there are no tables": Impossible([]),
    "table 'a' has 0 rows": Impossible([Table("a", 0)]),
    "table 'a' has 5 rows, 0 lookups": Impossible([Table("a", 5, 0)]),
    "table names must differ and have no slash: 'a'": Impossible(TWO_OF_ONE_NAME),
    "table names must differ and have no slash: 'a/b'": Impossible([Table("a/b", 5)]),
    "table 'a' has the plan 'rows'; it is one of auto, exchange, data": Impossible(
        [Table("a", 5, plan="rows")]
    ),
    "table 'a' has the pooling 'max'; it is sum or mean": Impossible(
        [Table("a", 5, pooling="max")]
    ),
    "model_devices is 3; it must divide the 4 devices": Impossible(
        [Table("a", 5)], {"model_devices": 3}
    ),
    "the tables need 0.00149 GiB on each of 4 device(s)": Impossible(
        [Table("a", 100_000)], {"device_bytes": 1e6}
    ),
    "tables of plan 'exchange' have 3,000,000,000 rows together": Impossible(
        [Table("a", 3 * 10**9)], {"device_bytes": UNLIMITED}
    ),
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_impossible_tables_are_refused(mesh, message):
    case = IMPOSSIBLE[message]
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        ShardedEmbeddingBags(
            case.tables,
            mesh=mesh,
            optimizer=SGD(),
            lr=0.1,
            seed=0,
            dim=DIM,
            **case.options,
        )


@pytest.mark.parametrize("plan", REMOVED_PLANS)
def test_a_plan_that_was_removed_is_refused(mesh, plan):
    remedy = "use one of auto, exchange, data; they also restore its checkpoints"
    expected = f"'{plan}', which was removed: {remedy}"
    with pytest.raises(InputError, match=expected):
        ShardedEmbeddingBags([Table("a", 5, plan=plan)], DIM, mesh, SGD(), 0.1, 0)


# Rows side by side in lines of 128, as on a TPU

widths = pytest.mark.parametrize("dim", [1, 24, 200])


@widths
def test_a_line_is_as_full_as_a_power_of_two_can_make_it(dim):
    rows = rows_in_a_line(dim, 128)
    assert rows == 1 or rows * dim <= max(128, dim) < 2 * rows * dim


@widths
def test_rows_are_taken_from_their_lines(mesh, dim):
    lines = torch.randn(40, rows_in_a_line(dim, 128) * dim)
    rows = torch.randint(0, lines.numel() // dim, (50,), dtype=torch.int32)

    taken = take_rows(lines.to(mesh.device), rows.to(mesh.device), dim)
    assert torch.equal(taken.cpu(), lines.reshape(-1, dim)[rows])


@widths
def test_rows_are_added_in_their_lines(mesh, dim):
    lines = torch.randn(40, rows_in_a_line(dim, 128) * dim)
    rows = torch.randint(0, lines.numel() // dim, (50,), dtype=torch.int32)
    delta = torch.randn(50, dim)

    added = add_rows(lines.to(mesh.device), rows.to(mesh.device), delta.to(mesh.device))
    expected = lines.reshape(-1, dim).index_add(0, rows, delta)
    torch.testing.assert_close(added.cpu().reshape(-1, dim), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("slices", "device_bytes", "group"),
    [
        (1, UNLIMITED, 4),
        (2, UNLIMITED, 2),
        (2, 6e5, 4),  # of 1.28 MB half does not fit, a quarter does
        (4, UNLIMITED, 4),
    ],
)
def test_each_of_two_slices_has_a_copy_of_tables_that_fit(mesh, slices, device_bytes, group):
    tables = [Table("a", 40_000, plan="exchange")]
    options = {"lr": 0.1, "seed": 0, "device_bytes": device_bytes}
    in_slices = dataclasses.replace(mesh, slices=slices)

    embeddings = ShardedEmbeddingBags(tables, 8, in_slices, SGD(), **options)
    assert embeddings.devices.group_size == group
    given = ShardedEmbeddingBags(tables, 8, in_slices, SGD(), model_devices=4, **options)
    assert given.devices.group_size == 4
