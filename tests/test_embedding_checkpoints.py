"""Sharded tables in checkpoints (train/common/embedding/pieces.py, storage.py): any layout reads
any other's, resume is exact, damage is skipped, and hosts wait for each other."""

import copy
import gc
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
import torch_xla
from checkpoints import damage, flip
from embedding_helpers import (
    DIM,
    TABLES,
    dense,
    filled,
    in_lines,
    make,
    restore,
    save,
    step_of_both,
    train_both,
    whole,
)
from helpers import equal
from torch import Tensor

from errors import InputError
from train.common import device
from train.common.checkpoint import Checkpointer
from train.common.embedding import ShardedEmbeddingBags, Table, TableStorage, storage
from train.common.xla import backend as xla

# Any layout reads any other's


def test_a_checkpoint_has_each_table_and_state_once(mesh):
    found = whole(filled(mesh, "rowwise_adagrad").pieces())  # whose state has a number per row
    expected = set()
    for table in TABLES:
        expected |= {(table.name, "weight"), (table.name, "sum")}
    assert found.keys() == expected


def test_a_checkpoint_is_restored_under_every_layout(mesh, tmp_path):
    """A chain: what one layout restores, the next restores from it."""
    layouts = [  # plan, devices that share a copy, mesh
        ("exchange", 0, mesh),
        ("data", 0, mesh),
        ("mixed", 0, in_lines(mesh)),
        ("mixed", 2, mesh),
    ]
    saved = filled(mesh, "rowwise_adagrad")
    expected = whole(saved.pieces())
    before = f"{tmp_path}/first"
    save(before, saved, mesh, 7)

    for plan, model_devices, own_mesh in layouts:
        other = make(own_mesh, plan, "rowwise_adagrad", model_devices, seed=1)
        model, optimizer = dense(mesh, seed=1)
        assert not equal(whole(other.pieces()), expected)

        assert restore(before, other, mesh, (model, optimizer)) == 7
        assert other.step_count.item() == 1000
        assert equal(whole(other.pieces()), expected), (plan, model_devices)
        saved_model, _ = dense(mesh)
        assert torch.equal(model.weight.cpu(), saved_model.weight.cpu())

        before = f"{tmp_path}/{plan}-{model_devices}"
        save(before, other, mesh, 7)


def test_a_whole_table_is_read_for_an_export(mesh, tmp_path):
    saved = filled(mesh)
    expected = whole(saved.pieces())
    save(str(tmp_path), saved, mesh, 7)
    for table in TABLES:
        read = storage.read_table(f"{tmp_path}/step_00000007", table.name)
        assert torch.equal(read, expected[table.name, "weight"])


# Plans that were removed

# They ran on four devices: "row" cut the array of all tables into equal parts, "table" gave each
# table to one device, "column" cut the columns of weights and of states that have columns.
ROWS = {table.name: table.rows for table in TABLES}


def row_pieces(tensors: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """Cuts tables as plan row did: the rows of all of them, one after the other, in equal parts of
    whole tiles."""
    tiles_of_device = math.ceil(math.ceil(sum(ROWS.values()) / 4) / 8)
    rows_of_device = tiles_of_device * 8

    # Where each table starts in the array of all.
    starts = {}
    end_of_table = 0
    for name, rows in ROWS.items():
        starts[name] = end_of_table
        end_of_table += rows

    pieces = {}
    for (name, kind), tensor in tensors.items():
        start = starts[name]
        for device_number in range(4):
            first = max(device_number * rows_of_device, start)
            end = min((device_number + 1) * rows_of_device, start + ROWS[name])
            if first < end:
                pieces[f"{name}/{kind}/{first - start}/0"] = tensor[first - start : end - start]
    return pieces


def table_pieces(tensors: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """Leaves tables whole, as plan table did."""
    return {f"{name}/{kind}/0/0": tensor for (name, kind), tensor in tensors.items()}


def column_pieces(tensors: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """Cuts columns as plan column did."""
    width = DIM // 4
    pieces = {}
    for (name, kind), tensor in tensors.items():
        if tensor.dim() == 1:
            pieces[f"{name}/{kind}/0/0"] = tensor.contiguous()
            continue
        for number, columns in enumerate(torch.split(tensor, width, dim=1)):
            pieces[f"{name}/{kind}/0/{number * width}"] = columns.contiguous()
    return pieces


REMOVED = {"row": row_pieces, "table": table_pieces, "column": column_pieces}
# Of checkpoints that the last version with these plans wrote, with row-wise Adagrad: the pieces of
# two tables, and their shapes.
RECORDED = {
    "row": {
        "item/weight/0/0": [4419, 16],
        "item/weight/4419/0": [5456, 16],
        "item/weight/9875/0": [5456, 16],
        "item/weight/15331/0": [4669, 16],
        "item/sum/0/0": [4419],
        "item/sum/4419/0": [5456],
        "item/sum/9875/0": [5456],
        "item/sum/15331/0": [4669],
        "tags/weight/0/0": [37, 16],
        "tags/sum/0/0": [37],
    },
    "table": {
        "item/weight/0/0": [20000, 16],
        "item/sum/0/0": [20000],
        "tags/weight/0/0": [37, 16],
        "tags/sum/0/0": [37],
    },
    "column": {
        "item/weight/0/0": [20000, 4],
        "item/weight/0/4": [20000, 4],
        "item/weight/0/8": [20000, 4],
        "item/weight/0/12": [20000, 4],
        "item/sum/0/0": [20000],
        "tags/weight/0/0": [37, 4],
        "tags/weight/0/4": [37, 4],
        "tags/weight/0/8": [37, 4],
        "tags/weight/0/12": [37, 4],
        "tags/sum/0/0": [37],
    },
}
every_optimizer = pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "lazy_adam"])


@pytest.mark.parametrize("plan", RECORDED)
def test_pieces_of_removed_plans_are_as_recorded(mesh, plan):
    tensors = whole(filled(mesh, "rowwise_adagrad").pieces())
    found = {}
    for key, piece in REMOVED[plan](tensors).items():
        if key.startswith(("item/", "tags/")):
            found[key] = list(piece.shape)
    assert found == RECORDED[plan]


@every_optimizer
@pytest.mark.parametrize("plan", REMOVED)
def test_a_checkpoint_of_a_removed_plan_is_restored(mesh, tmp_path, plan, optimizer):
    saved = filled(mesh, optimizer)
    expected = whole(saved.pieces())
    removed = copy.copy(saved)
    removed.pieces = lambda: REMOVED[plan](expected) | {"step": saved.step_count.cpu()}
    save(str(tmp_path), removed, mesh, 7)

    for own_plan, model_devices in (("exchange", 0), ("data", 0), ("mixed", 2)):
        other = make(mesh, own_plan, optimizer, model_devices, seed=1)
        assert restore(str(tmp_path), other, mesh) == 7
        assert other.step_count.item() == 1000
        assert equal(whole(other.pieces()), expected), (own_plan, model_devices)
    for table in TABLES:
        read = storage.read_table(f"{tmp_path}/step_00000007", table.name)
        assert torch.equal(read, expected[table.name, "weight"])


# Resume


def test_training_resumes_bit_for_bit_and_compiles_nothing(mesh, tmp_path):
    def build(seed):
        """Returns embeddings, the rest of a model and its optimizer."""
        embeddings = make(mesh, "mixed", "rowwise_adagrad", 2, seed)
        return embeddings, *dense(mesh, seed)

    place = str(tmp_path)
    step = device.compiled(step_of_both, mesh)
    gc.collect()  # of arrays of earlier tests, which have taken sizes
    embeddings, model, optimizer = build(0)
    train_both(mesh, step, embeddings, model, optimizer, 0, 3)
    saved = whole(embeddings.pieces())
    with Checkpointer(place, tables=TableStorage(embeddings)) as checkpoints:
        checkpoints.save(3, model, optimizer)
        # While it is written.
        expected = train_both(mesh, step, embeddings, model, optimizer, 3, 6)
    after = whole(embeddings.pieces())
    assert not equal(saved, after)

    for is_fresh in (False, True):
        if is_fresh:
            # As a new process would have it: with the sizes of arrays that the first one had.
            del embeddings, model, optimizer, checkpoints
            gc.collect()
            embeddings, model, optimizer = build(1)
        assert restore(place, embeddings, mesh, (model, optimizer)) == 3
        assert equal(whole(embeddings.pieces()), saved)

        torch_xla.sync()
        graphs = xla.compilations()
        assert train_both(mesh, step, embeddings, model, optimizer, 3, 6) == expected
        assert xla.compilations() == graphs
        assert equal(whole(embeddings.pieces()), after)


@pytest.mark.parametrize("model_devices", [4, 2])
def test_no_host_holds_a_table_that_is_cut(mesh, model_devices):
    embeddings = make(mesh, "exchange", "lazy_adam", model_devices)
    rows_of_device = sum(ROWS.values()) / model_devices + 64  # with those that pad it
    bytes_of_device = 4 * DIM * rows_of_device
    for piece in embeddings.pieces().values():
        # Nor is it a view of more.
        assert piece.untyped_storage().nbytes() <= bytes_of_device


def test_other_programs_can_read_the_pieces(mesh, tmp_path):
    embeddings = filled(mesh)
    save(str(tmp_path), embeddings, mesh, 1)
    stored = safetensors.torch.load_file(tmp_path / "step_00000001" / "tables-00000.safetensors")
    assert equal(stored, embeddings.pieces())


# Damage

PIECES = "tables-00000.safetensors"
MARK = "tables-00000.json"


@dataclass(frozen=True)
class Tear:
    """A file of a checkpoint that is damaged, or missing."""

    file: str
    edit: Callable[[bytes], bytes] | None = None  # None: it is missing


def change_after(words: bytes, offset: int = 0) -> Callable[[bytes], bytes]:
    """Returns what changes one bit `offset` bytes after the start of these words."""
    return lambda content: flip(content, content.index(words) + offset)


TEARS = {
    "short": Tear(PIECES, lambda content: content[:-3]),
    "another number": Tear(PIECES, lambda content: flip(content, -500)),
    "another name": Tear(PIECES, change_after(b"user/weight")),
    "another key of a shape": Tear(PIECES, change_after(b'"shape"', 1)),
    "another shape": Tear(PIECES, change_after(b'"shape": [', 10)),
    "another length of the header": Tear(PIECES, lambda content: flip(content, 5)),
    "no pieces": Tear(PIECES),
    "no mark": Tear(MARK),
    "an empty mark": Tear(MARK, lambda content: b""),
    "a mark of another kind": Tear(MARK, lambda content: b"[1]"),
}
every_tear = pytest.mark.parametrize("tear", TEARS)


def tear_up(place: str, name: str) -> None:
    """Damages the checkpoint of step 20 in one of the TEARS."""
    damage(place, 20, TEARS[name].file, TEARS[name].edit)


@dataclass(frozen=True)
class TwoCheckpoints:
    """Checkpoints of steps 10 and 20, plans "mixed", and what to restore them into."""

    folder: Path
    first: dict[tuple[str, str], Tensor]  # what is in that of step 10
    embeddings: ShardedEmbeddingBags
    model_and_optimizer: tuple

    def copied_to(self, folder: Path) -> str:
        """Returns the path of a copy."""
        place = str(folder / "checkpoints")
        shutil.copytree(self.folder, place)
        return place


@pytest.fixture(scope="module")
def two(mesh, tmp_path_factory) -> TwoCheckpoints:
    folder = tmp_path_factory.mktemp("two")
    embeddings = filled(mesh, value=1.0)
    save(str(folder), embeddings, mesh, 10)
    save(str(folder), filled(mesh, value=2.0), mesh, 20)
    first = whole(embeddings.pieces())
    return TwoCheckpoints(folder, first, make(mesh, "exchange", "adagrad"), dense(mesh))


@every_tear
def test_damaged_tables_are_skipped_with_a_warning(mesh, tmp_path, two, tear, capsys):
    place = two.copied_to(tmp_path)
    tear_up(place, tear)

    assert restore(place, two.embeddings, mesh, two.model_and_optimizer) == 10

    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert f"warning: skipping the torn checkpoint {place}/step_00000020" in warning
    assert equal(whole(two.embeddings.pieces()), two.first)
    assert two.embeddings.step_count.item() == 1000


@every_tear
def test_damaged_tables_alone_are_refused(mesh, tmp_path, two, tear):
    """Half of their numbers may be in the tables."""
    place = two.copied_to(tmp_path)
    tear_up(place, tear)
    shutil.rmtree(f"{place}/step_00000010")
    with pytest.raises(InputError, match=f"no checkpoint in {place} has whole tables"):
        restore(place, two.embeddings, mesh, two.model_and_optimizer)


# Other tables


@dataclass(frozen=True)
class Change:
    """Other tables than those of a checkpoint, and what the refusal of it says."""

    message: str
    tables: tuple[Table, ...] = TABLES
    optimizer: str = "adagrad"
    dim: int = DIM


def with_users(rows: int) -> tuple[Table, ...]:
    """Returns TABLES with another number of rows in the first."""
    return (replace(TABLES[0], rows=rows), *TABLES[1:])


CHANGES = {
    "more": Change("place/", tables=(*TABLES, Table("place", 9))),
    "less rows": Change(r"user/weight/.*\[990, 16\]", tables=with_users(990)),
    "more rows": Change("'user' do not make up 1010", tables=with_users(1010)),
    "less state": Change("/sum", optimizer="sgd"),
    "other state": Change("/exp_avg", optimizer="lazy_adam"),
    "state of another shape": Change(r"/sum/.* no part of \[1000\]", optimizer="rowwise_adagrad"),
    "another width": Change(r"\[\d+, 16\], which is no part of \[1000, 8\]", dim=8),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_checkpoint_of_another_model_is_refused(mesh, two, change):
    other = make(mesh, "exchange", change.optimizer, tables=change.tables, dim=change.dim)
    with pytest.raises(InputError, match=change.message) as raised:
        restore(str(two.folder), other, mesh)

    sentence = str(raised.value)
    assert f"the checkpoint {two.folder}/step_00000020 is of another model" in sentence
    assert "\n" not in sentence


def test_a_model_without_tables_refuses_a_checkpoint_with_them(mesh, two):
    sentence = "step_00000020 .*it has embedding tables, this model has none"
    with pytest.raises(InputError, match=sentence):
        Checkpointer(str(two.folder)).restore(*dense(mesh), mesh)


def test_a_model_with_tables_refuses_a_checkpoint_without(mesh, tmp_path, two):
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(8, *dense(mesh))
    with pytest.raises(InputError, match="its tables or optimizer differ from these in day/sum"):
        restore(str(tmp_path), two.embeddings, mesh)


class HttpError(Exception):
    """As gcsfs has it: no OSError."""


@pytest.mark.parametrize("call", ["_read_piece", "size", "glob"])
def test_a_store_that_fails_says_so(mesh, tmp_path, two, monkeypatch, call):
    place = two.copied_to(tmp_path)
    if call == "glob":  # by which the marks of a torn one are found
        tear_up(place, "short")
    checkpoints = Checkpointer(place, tables=TableStorage(two.embeddings))
    owner = storage if call == "_read_piece" else type(checkpoints._fs)
    monkeypatch.setattr(owner, call, Mock(side_effect=HttpError("503")))

    sentence = r"^cannot read the checkpoints in .*/step_00000020: HttpError: 503; resume"
    with pytest.raises(InputError, match=sentence):
        checkpoints.restore(*two.model_and_optimizer, mesh)


# Several hosts


def on_host(host: int, place: str, embeddings) -> Checkpointer:
    """Makes the checkpoints of one of two hosts, which has its own place in the mesh and its share
    of the pieces."""
    twin = copy.copy(embeddings)
    twin.mesh = replace(embeddings.mesh, process_index=host, process_count=2)

    def share() -> dict[str, Tensor]:
        pieces = sorted(embeddings.pieces().items())
        return dict(pieces[host::2])

    twin.pieces = share
    return Checkpointer(place, main_process=host == 0, tables=TableStorage(twin))


def assert_the_main_process_waits(mesh, place, embeddings, monkeypatch) -> None:
    """Asserts that the next attempt, in which the second host writes nothing, does not take its
    earlier marks."""
    monkeypatch.setattr(storage, "HOSTS_SECONDS", 0)
    main = on_host(0, place, embeddings)
    assert main.restore(*dense(mesh), mesh) == 10
    main.save(20, *dense(mesh))

    waits_for = "host 1 and 0 more have not written their tables to"
    message = f"{waits_for} .*checkpoints/.*step_00000020 in 0 .*--runs gs://"
    with pytest.raises(InputError, match=message):
        main.wait()
    assert restore(place, make(mesh, "exchange", "adagrad"), mesh) == 10


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_marks_of_a_host_before_a_kill_do_not_count(mesh, place, monkeypatch):
    """The second host wrote its part, and the main process was killed."""
    embeddings = filled(mesh)
    save(place, embeddings, mesh, 10)
    second = on_host(1, place, embeddings)
    second.save(20, *dense(mesh))
    second.wait()
    assert_the_main_process_waits(mesh, place, embeddings, monkeypatch)
    assert on_host(0, place, embeddings).complete_steps() == [10]


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_marks_of_a_damaged_checkpoint_do_not_count(mesh, place, monkeypatch):
    """All was written, and a file of tables is damaged."""
    embeddings = filled(mesh)
    save(place, embeddings, mesh, 10)
    hosts = [on_host(host, place, embeddings) for host in (0, 1)]
    for host in hosts:
        host.save(20, *dense(mesh))
    for host in hosts:
        host.wait()
    tear_up(place, "another number")
    assert_the_main_process_waits(mesh, place, embeddings, monkeypatch)
