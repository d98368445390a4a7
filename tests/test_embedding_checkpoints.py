"""Sharded tables in checkpoints (train/common/embedding/pieces.py, storage.py): any layout reads
any other's, resume is exact, damage is skipped, and hosts wait for each other."""

import copy
import dataclasses
import gc
import math
import shutil
from collections.abc import Mapping
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
from train.common.embedding import Table, TableStorage, storage
from train.common.xla import backend as xla


# ---- any layout reads any other's ----------------------------------------------------------------
def test_a_checkpoint_has_each_table_and_state_once(mesh):
    found = whole(filled(mesh, "rowwise_adagrad").pieces())  # whose state has a number per row
    assert found.keys() == {(table.name, kind) for table in TABLES for kind in ("weight", "sum")}


def test_a_checkpoint_is_restored_under_every_layout(mesh, tmp_path):
    """A chain: what one layout restores, the next restores from it."""
    layouts = [
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
        rest = dense(mesh, seed=1)
        assert not equal(whole(other.pieces()), expected)
        assert restore(before, other, mesh, rest) == 7 and other.step_count.item() == 1000
        assert equal(whole(other.pieces()), expected), (plan, model_devices)
        assert torch.equal(rest[0].weight.cpu(), dense(mesh)[0].weight.cpu())
        before = f"{tmp_path}/{plan}-{model_devices}"
        save(before, other, mesh, 7)


def test_a_whole_table_is_read_for_an_export(mesh, tmp_path):
    saved = filled(mesh)
    expected = whole(saved.pieces())
    save(str(tmp_path), saved, mesh, 7)
    for table in TABLES:
        read = storage.read_table(f"{tmp_path}/step_00000007", table.name)
        assert torch.equal(read, expected[table.name, "weight"])


# ---- plans that were removed ---------------------------------------------------------------------
# They ran on four devices: "row" cut the array of all tables into equal parts, "table" gave each
# table to one device, "column" cut the columns of weights and of states that have columns.
SIZES = {table.name: table.rows for table in TABLES}


def row_pieces(tensors: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """Cuts tables as plan row did: the rows of all of them, one after the other, in equal parts of
    whole tiles."""
    rows_of_device = math.ceil(math.ceil(sum(SIZES.values()) / 4) / 8) * 8
    pieces = {}
    for (name, kind), tensor in tensors.items():
        start = sum(list(SIZES.values())[: list(SIZES).index(name)])
        for device_number in range(4):
            first = max(device_number * rows_of_device, start)
            end = min((device_number + 1) * rows_of_device, start + SIZES[name])
            if first < end:
                pieces[f"{name}/{kind}/{first - start}/0"] = tensor[first - start : end - start]
    return pieces


def table_pieces(tensors: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    return {f"{name}/{kind}/0/0": tensor for (name, kind), tensor in tensors.items()}


def column_pieces(tensors: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    pieces = {}
    for (name, kind), tensor in tensors.items():
        parts = torch.split(tensor, DIM // 4, dim=1) if tensor.dim() == 2 else [tensor]
        for number, part in enumerate(parts):
            pieces[f"{name}/{kind}/0/{number * DIM // 4}"] = part.contiguous()
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
        assert restore(str(tmp_path), other, mesh) == 7 and other.step_count.item() == 1000
        assert equal(whole(other.pieces()), expected), (own_plan, model_devices)
    for table in TABLES:
        read = storage.read_table(f"{tmp_path}/step_00000007", table.name)
        assert torch.equal(read, expected[table.name, "weight"])


# ---- resume --------------------------------------------------------------------------------------


def test_training_resumes_bit_for_bit_and_compiles_nothing(mesh, tmp_path):
    def build(seed):
        return make(mesh, "mixed", "rowwise_adagrad", 2, seed), *dense(mesh, seed)

    place = str(tmp_path)
    step = device.compiled(step_of_both, mesh)
    gc.collect()  # of arrays of earlier tests, which have taken sizes
    run = build(0)
    train_both(mesh, step, *run, 0, 3)
    saved = whole(run[0].pieces())
    with Checkpointer(place, tables=TableStorage(run[0])) as checkpoints:
        checkpoints.save(3, *run[1:])
        expected = train_both(mesh, step, *run, 3, 6)  # while it is written
    after = whole(run[0].pieces())
    assert not equal(saved, after)
    for fresh in (False, True):
        if fresh:  # as a new process would have it: with the sizes of arrays that the first one had
            del run, checkpoints
            gc.collect()
            run = build(1)
        assert restore(place, run[0], mesh, run[1:]) == 3
        assert equal(whole(run[0].pieces()), saved)
        torch_xla.sync()
        graphs = xla.compilations()
        assert train_both(mesh, step, *run, 3, 6) == expected
        assert xla.compilations() == graphs
        assert equal(whole(run[0].pieces()), after)


@pytest.mark.parametrize("parts", [4, 2])
def test_no_host_holds_a_table_that_is_cut(mesh, parts):
    embeddings = make(mesh, "exchange", "lazy_adam", parts)
    part = 4 * DIM * (sum(SIZES.values()) / parts + 64)  # of one device, with rows that pad it
    pieces = embeddings.pieces()
    assert all(piece.untyped_storage().nbytes() <= part for piece in pieces.values())  # nor a view of more


def test_other_programs_can_read_the_pieces(mesh, tmp_path):
    embeddings = filled(mesh)
    save(str(tmp_path), embeddings, mesh, 1)
    stored = safetensors.torch.load_file(tmp_path / "step_00000001" / "tables-00000.safetensors")
    assert equal(stored, embeddings.pieces())


# ---- damage --------------------------------------------------------------------------------------
PIECES = "tables-00000.safetensors"
MARK = "tables-00000.json"
TEARS = {
    "short": (PIECES, lambda content: content[:-3]),
    "another number": (PIECES, lambda content: flip(content, -500)),
    "another name": (PIECES, lambda content: flip(content, content.index(b"user/weight"))),
    "another key of a shape": (
        PIECES,
        lambda content: flip(content, content.index(b'"shape"') + 1),
    ),
    "another shape": (PIECES, lambda content: flip(content, content.index(b'"shape": [') + 10)),
    "another length of the header": (PIECES, lambda content: flip(content, 5)),
    "no pieces": (PIECES, None),
    "no mark": (MARK, None),
    "an empty mark": (MARK, lambda content: b""),
    "a mark of another kind": (MARK, lambda content: b"[1]"),
}
every_tear = pytest.mark.parametrize("tear", TEARS)


@pytest.fixture(scope="module")
def two_checkpoints(mesh, tmp_path_factory):
    """Of steps 10 and 20, plans "mixed": (their folder, what is in the first, what to restore them
    into)."""
    folder = tmp_path_factory.mktemp("two")
    embeddings = filled(mesh, value=1.0)
    save(str(folder), embeddings, mesh, 10)
    save(str(folder), filled(mesh, value=2.0), mesh, 20)
    return folder, whole(embeddings.pieces()), (make(mesh, "exchange", "adagrad"), *dense(mesh))


@every_tear
def test_damaged_tables_are_skipped_with_a_warning(mesh, tmp_path, two_checkpoints, tear, capsys):
    folder, expected, (embeddings, *rest) = two_checkpoints
    place = str(tmp_path / "checkpoints")
    shutil.copytree(folder, place)
    damage(place, 20, *TEARS[tear])
    assert restore(place, embeddings, mesh, rest) == 10
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and f"warning: skipping the torn checkpoint {place}/step_00000020" in warning
    assert equal(whole(embeddings.pieces()), expected) and embeddings.step_count.item() == 1000


@every_tear
def test_damaged_tables_alone_are_refused(mesh, tmp_path, two_checkpoints, tear):
    """Half of their numbers may be in the tables."""
    folder, _, (embeddings, *rest) = two_checkpoints
    place = str(tmp_path / "checkpoints")
    shutil.copytree(folder, place)
    damage(place, 20, *TEARS[tear])
    shutil.rmtree(f"{place}/step_00000010")
    with pytest.raises(InputError, match=f"no checkpoint in {place} has whole tables"):
        restore(place, embeddings, mesh, rest)


# ---- other tables --------------------------------------------------------------------------------
OTHER_TABLES = {
    "more": ((*TABLES, Table("place", 9)), "adagrad", "place/"),
    "less rows": (
        (dataclasses.replace(TABLES[0], rows=990), *TABLES[1:]),
        "adagrad",
        r"user/weight/.*\[990, 16\]",
    ),
    "more rows": (
        (dataclasses.replace(TABLES[0], rows=1010), *TABLES[1:]),
        "adagrad",
        "'user' do not make up 1010",
    ),
    "less state": (TABLES, "sgd", "/sum"),
    "other state": (TABLES, "lazy_adam", "/exp_avg"),
    "state of another shape": (TABLES, "rowwise_adagrad", r"/sum/.* no part of \[1000\]"),
    "another width": (TABLES, "adagrad", r"\[\d+, 16\], which is no part of \[1000, 8\]"),
}


@pytest.mark.parametrize("change", OTHER_TABLES)
def test_a_checkpoint_of_another_model_is_refused(mesh, two_checkpoints, change):
    folder, *_ = two_checkpoints
    tables, optimizer, message = OTHER_TABLES[change]
    other = make(mesh, "exchange", optimizer, tables=tables, dim=8 if change == "another width" else DIM)
    with pytest.raises(InputError, match=message) as raised:
        restore(str(folder), other, mesh)
    said = str(raised.value)
    assert f"the checkpoint {folder}/step_00000020 is of another model" in said and "\n" not in said


def test_a_model_without_tables_refuses_a_checkpoint_with_them(mesh, two_checkpoints):
    folder, *_ = two_checkpoints
    with pytest.raises(InputError, match="step_00000020 .*it has embedding tables, this model has none"):
        Checkpointer(str(folder)).restore(*dense(mesh), mesh)


def test_a_model_with_tables_refuses_a_checkpoint_without(mesh, tmp_path, two_checkpoints):
    _, _, (embeddings, *_) = two_checkpoints
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(8, *dense(mesh))
    with pytest.raises(InputError, match="its tables or optimizer differ from these in day/sum"):
        restore(str(tmp_path), embeddings, mesh)


@pytest.mark.parametrize("call", ["_read_piece", "size", "glob"])
def test_a_store_that_fails_says_so(mesh, tmp_path, two_checkpoints, monkeypatch, call):
    folder, _, (embeddings, *rest) = two_checkpoints
    place = str(tmp_path / "checkpoints")
    shutil.copytree(folder, place)
    if call == "glob":  # by which the marks of a torn one are found
        damage(place, 20, *TEARS["short"])
    checkpoints = Checkpointer(place, tables=TableStorage(embeddings))
    http_error = type("HttpError", (Exception,), {})  # as gcsfs has it: no OSError
    owner = storage if call == "_read_piece" else type(checkpoints._fs)
    monkeypatch.setattr(owner, call, Mock(side_effect=http_error("503")))
    with pytest.raises(
        InputError,
        match=r"^cannot read the checkpoints in .*/step_00000020: HttpError: 503; resume",
    ):
        checkpoints.restore(*rest, mesh)


# ---- several hosts -------------------------------------------------------------------------------


def on_host(host: int, place: str, embeddings) -> Checkpointer:
    """Makes the checkpoints of one of two hosts, which has its own place in the mesh and its share
    of the pieces."""
    twin = copy.copy(embeddings)
    twin.mesh = dataclasses.replace(embeddings.mesh, process_index=host, process_count=2)

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
    message = "host 1 and 0 more have not written their tables to .*checkpoints/.*step_00000020 in 0 .*--runs gs://"
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
    damage(place, 20, *TEARS["another number"])
    assert_the_main_process_waits(mesh, place, embeddings, monkeypatch)
