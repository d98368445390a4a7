"""train/common/checkpoint.py, files.py and the mean of checkpoints: exact, atomic, off the loop, on
a disk and on memory://."""

import concurrent.futures
import errno
import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
import torch_xla
from checkpoints import damage, flip, names
from helpers import equal, on_mesh, update
from torch import nn

from errors import InputError
from train.common import checkpoint, device, files
from train.common.checkpoint import Checkpointer
from train.common.files import load_weights, save_weights
from train.common.mesh import WHOLE
from train.common.sharding.placement import LayerSharding
from train.common.xla import backend as xla
from train.transformer import average_checkpoints


class Model(nn.Module):
    """A tied pair, buffers of three types, and a parameter that a `state_dict` hook would show in
    another shape."""

    def __init__(self, words: int = 12):
        super().__init__()
        self.embedding = nn.Embedding(words, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, words)
        self.head.weight = self.embedding.weight
        self.register_buffer("small", torch.randn(5).bfloat16())

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


class Counting(torch.optim.Optimizer):
    """Keeps a number and a string in its state, and a tensor."""

    def __init__(self, parameters, count: int = 0, phase: str = "warm"):
        super().__init__(parameters, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "count": count,
                "phase": phase,
                "mean": torch.zeros_like(parameter),
            }


sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False)
adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.01, foreach=False)


def build(mesh, optimizer=adamw, words: int = 12):
    return on_mesh(mesh, Model(words), optimizer)


def train_step(model, optimizer, x, y):
    return update(F.cross_entropy(model(x), y), optimizer)


def run(mesh, step_fn, model, optimizer, first: int, last: int) -> list[float]:
    """Trains from step `first` to step `last`; returns their losses."""
    losses = []
    for step in range(first, last + 1):
        device.set_lr(optimizer, 0.01 / step)
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(0, 12, (8,), generator=generator).to(mesh.device)
        y = torch.randint(0, 12, (8,), generator=generator).to(mesh.device)
        losses.append(step_fn(model, optimizer, x, y))
    return device.fetch(losses)


def snapshot(model, optimizer) -> dict:
    """Returns everything that a checkpoint must bring back, on the host."""
    return checkpoint.to_host(checkpoint.named_state(model, optimizer))


def on_cpu(value: float):
    """Returns a small model on the CPU and its optimizer, all of whose numbers are `value`: no
    device is needed to test files."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return fill(model, optimizer, value)


def fill(model, optimizer, value: float):
    with torch.no_grad():
        for tensor in checkpoint.named_state(model, optimizer).values():
            tensor.fill_(value)
    return model, optimizer


def value_of(model, optimizer) -> float:
    """Returns the value that all numbers of a model and its optimizer have."""
    values = set()
    for tensor in checkpoint.named_state(model, optimizer).values():
        values.update(tensor.detach().unique().tolist())
    assert len(values) == 1, "parts of two checkpoints were mixed"
    return values.pop()


def save_all(place: str, steps, keep: int = 10, **options) -> list[list[int]]:
    """Saves at these steps, each with its own number as value; returns what was complete after
    each."""
    complete = []
    with Checkpointer(place, keep, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, *on_cpu(step))
            checkpoints.wait()
            complete.append(checkpoints.complete_steps())
    return complete


def restored(place: str) -> tuple[int, float]:
    """Returns the step that is restored, 0 without one, and the value that the model then has."""
    model, optimizer = on_cpu(-1.0)
    step = Checkpointer(place).restore(model, optimizer, None)
    return step, value_of(model, optimizer)


def in_memory() -> str:
    return f"memory://{uuid.uuid4().hex}/checkpoints"


def hold(monkeypatch, owner: Any, name: str) -> threading.Event:
    """Makes a function wait until the event that is returned is set."""
    gate = threading.Event()
    function = getattr(owner, name)

    def held(*arguments):
        if gate.wait(30):
            return function(*arguments)

    monkeypatch.setattr(owner, name, held)
    return gate


# Round trip


def test_a_checkpoint_restores_bit_for_bit_and_compiles_nothing(mesh, place, monkeypatch):
    gate = hold(monkeypatch, Checkpointer, "_write")
    step_fn = device.compiled(train_step, mesh)
    model, made = build(mesh)
    run(mesh, step_fn, model, made, 1, 3)
    saved = snapshot(model, made)

    torch_xla.sync()
    reads = xla.host_reads()
    graphs = xla.compilations()
    with Checkpointer(place) as checkpoints:
        checkpoints.save(3, model, made)
        torch_xla.sync()
        assert xla.host_reads() == reads + 1, "saving is one transfer"
        assert xla.compilations() == graphs
        # Donates the buffers that were saved.
        expected = run(mesh, step_fn, model, made, 4, 6)
        gate.set()
    after = snapshot(model, made)
    assert not equal(saved, after)

    # Into the model that has trained on, and into another one of other weights.
    for other_model, other in ((model, made), build(mesh)):
        torch_xla.sync()
        assert Checkpointer(place).restore(other_model, other, mesh) == 3
        assert equal(snapshot(other_model, other), saved)
        assert other_model.head.weight is other_model.embedding.weight

        torch_xla.sync()
        graphs = xla.compilations()
        # Strict: the step is not compiled again.
        assert run(mesh, step_fn, other_model, other, 4, 6) == expected
        assert xla.compilations() == graphs
        assert equal(snapshot(other_model, other), after)


# Which checkpoint


def test_the_newest_is_restored_and_the_last_ones_are_kept(place):
    assert restored(place) == (0, -1.0), "there is nothing yet"

    save_all(place, [1, 2, 10, 9_999, 16_000_000], keep=3)

    assert Checkpointer(place).complete_steps() == [10, 9_999, 16_000_000]
    assert restored(place) == (16_000_000, 16_000_000)
    assert len(names(place)) == 3, "a deleted checkpoint leaves nothing behind"


def test_off_schedule_checkpoints_are_deleted_at_the_next_save(place):
    found = save_all(place, (7, 10, 13, 20, 27, 30, 33, 40), keep=2, every=10)
    assert found == [
        [7],
        [10],
        [10, 13],
        [10, 20],
        [10, 20, 27],
        [20, 30],
        [20, 30, 33],
        [30, 40],
    ]
    assert restored(place) == (40, 40)


@dataclass(frozen=True)
class Tear:
    """A file of a checkpoint that is damaged, or missing."""

    file: str
    edit: Callable[[bytes], bytes] | None = None  # None: it is missing


TEARS = {
    "no marker": Tear("COMPLETE"),
    "a marker that is no JSON": Tear("COMPLETE", lambda content: b"\xff\x00 no JSON"),
    "a marker of nothing": Tear("COMPLETE", lambda content: b"{}"),
    "a marker of another kind": Tear("COMPLETE", lambda content: b"[1]"),
    "no state": Tear("state.safetensors"),
    "a short state": Tear("state.safetensors", lambda content: content[:-10]),
    "a wrong state": Tear("state.safetensors", lambda content: flip(content, -5)),
    "no numbers": Tear("state.json"),
    "other numbers": Tear("state.json", lambda content: content.replace(b"30", b"31")),
}


def tear_up(place: str, step: int, name: str) -> None:
    """Damages a checkpoint in one of the TEARS."""
    damage(place, step, TEARS[name].file, TEARS[name].edit)


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_checkpoint_is_skipped_with_a_warning(place, tear, capsys):
    save_all(place, [20, 30])

    tear_up(place, 30, tear)
    assert restored(place) == (20, 20.0)
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert f"warning: skipping the torn checkpoint {place}/step_00000030" in warning

    tear_up(place, 20, "a short state")
    assert restored(place) == (0, -1.0)
    assert capsys.readouterr().err.count("warning: skipping the torn checkpoint") == 2


def test_a_torn_later_checkpoint_does_not_push_a_good_one_out(place, capsys):
    save_all(place, [10, 20])
    tear_up(place, 20, "a wrong state")
    save_all(place, [15], keep=2)
    assert restored(place) == (15, 15.0)
    assert Checkpointer(place).complete_steps() == [10, 15, 20]

    save_all(place, [20], keep=1)  # and is replaced when the run comes to its step again
    capsys.readouterr()
    assert restored(place) == (20, 20.0)
    assert capsys.readouterr().err == ""
    assert Checkpointer(place).complete_steps() == [20]


def test_a_killed_writers_files_are_deleted_and_no_others(place):
    save_all(place, [10])
    files.write_file(f"{place}/step_00000020/state.safetensors", b"half")
    for name in ("notes.txt", "step_old/COMPLETE"):
        files.write_file(f"{place}/{name}", b"mine")
    assert Checkpointer(place).complete_steps() == [10]
    assert restored(place) == (10, 10.0)

    save_all(place, [30], keep=1)

    assert names(place) == {"step_00000030", "notes.txt", "step_old"}
    assert restored(place) == (30, 30.0)
    assert files.read_file(f"{place}/notes.txt") == b"mine"
    assert files.read_file(f"{place}/step_old/COMPLETE") == b"mine"


# Another model

OTHERS = {
    "model.embedding.weight is [12, 6], not [13, 6]; ": {"words": 13},
    "optimizer.embedding.weight.momentum_buffer is missing, not [12, 6]": {"optimizer": sgd},
}


@pytest.mark.parametrize("differing", OTHERS)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, mesh, differing):
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(7, *build(mesh))
    other, made = build(mesh, **OTHERS[differing])
    before = snapshot(other, made)

    with pytest.raises(InputError) as raised:
        checkpoints.restore(other, made, mesh)

    message = str(raised.value)
    which = f"the checkpoint {tmp_path}/step_00000007 is of another model or optimizer: "
    assert message.startswith(which)
    assert differing in message
    assert " in all." in message
    assert message.endswith("another --name")
    assert "\n" not in message
    assert equal(snapshot(other, made), before), "half of it was loaded"

    missing = r"model\.bias is missing, not \[64\]; model\.embedding\.weight is .*missing"
    with pytest.raises(InputError, match=missing):
        checkpoints.restore(*on_cpu(0), None)


def test_numbers_of_the_optimizer_come_back_or_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    saved = Counting(model.parameters(), 17, "cold")
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(5, model, saved)

    other = nn.Linear(2, 2)
    optimizer = Counting(other.parameters())
    checkpoints.restore(other, optimizer, None)
    assert snapshot(model, saved)["optimizer.bias.count"] == 17
    assert snapshot(other, optimizer)["optimizer.bias.count"] == 17

    for state in optimizer.state.values():
        del state["count"]
    with pytest.raises(InputError, match=r"optimizer\.bias\.count is a number, not missing"):
        checkpoints.restore(other, optimizer, None)


# Writing off the loop


def test_save_returns_at_once_and_writes_the_state_of_its_call(place, monkeypatch):
    """Even if an error ends the run."""
    model, optimizer = on_cpu(1.0)
    gate = hold(monkeypatch, files, "write_synced")
    with pytest.raises(ZeroDivisionError), Checkpointer(place) as checkpoints:
        started = time.perf_counter()
        checkpoints.save(1, model, optimizer)
        checkpoints.raise_failure()
        assert time.perf_counter() - started < 5  # the writer stands at the gate
        assert checkpoints.complete_steps() == []

        fill(model, optimizer, 2.0)  # the training continues
        threading.Timer(0.3, gate.set).start()
        raise ZeroDivisionError
    assert restored(place) == (1, 1.0)


# A full disk, a kill

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def fill_disk(monkeypatch, place: str, room: int, error: BaseException = FULL) -> None:
    """Lets so many bytes be written on the file system of a path or URL; the write of the next one
    fails."""
    fs = Checkpointer(place)._fs
    fs_open = fs.open
    left = room

    def open_limited(*arguments, **options):
        file = fs_open(*arguments, **options)
        file_write = file.write

        def write(content):
            nonlocal left
            file_write(content[:left])
            left -= len(content)
            if left < 0:
                left = 0
                raise error

        file.write = write
        return file

    monkeypatch.setattr(fs, "open", open_limited)


@dataclass(frozen=True)
class Notice:
    """A call that notices that a disk is full, and the bytes that there is room for."""

    room: int
    call: Callable[[Checkpointer], Any]


NOTICES = {
    "raise_failure": Notice(0, Checkpointer.raise_failure),
    "save": Notice(50, lambda checkpoints: checkpoints.save(30, *on_cpu(30))),
    "wait": Notice(1000, Checkpointer.wait),
    "exit": Notice(33_000, lambda checkpoints: checkpoints.__exit__(None)),
}


@pytest.mark.parametrize("notice", NOTICES.values(), ids=NOTICES)
def test_a_full_disk_is_an_input_error_and_loses_no_checkpoint(place, monkeypatch, notice):
    save_all(place, [10])
    checkpoints = Checkpointer(place)
    with monkeypatch.context() as patch:
        fill_disk(patch, place, notice.room)
        checkpoints.save(20, *on_cpu(20))
        concurrent.futures.wait([checkpoints._last])
        with pytest.raises(InputError) as raised:
            notice.call(checkpoints)

    message = str(raised.value)
    assert f"cannot write the checkpoint of step 20 to {place}: No space left on device" in message
    assert "the one of step 10 is complete and safe" in message
    assert "\n" not in message
    checkpoints.raise_failure()  # once is enough
    assert checkpoints.complete_steps() == [10]
    assert restored(place) == (10, 10.0)

    save_all(place, [20])  # with room again, the same command resumes
    assert restored(place) == (20, 20.0)
    assert names(place) == {"step_00000010", "step_00000020"}


def assert_save_fails(checkpoints: Checkpointer, error: type, match: str) -> None:
    checkpoints.save(20, *on_cpu(20))
    with pytest.raises(error, match=match):
        checkpoints.wait()


def test_a_full_disk_before_the_first_checkpoint_says_so(tmp_path, monkeypatch):
    fill_disk(monkeypatch, str(tmp_path), 10)
    checkpoints = Checkpointer(str(tmp_path))
    assert_save_fails(checkpoints, InputError, "there is no complete one yet")


def test_a_disk_that_cannot_even_be_listed_is_an_input_error(tmp_path, monkeypatch):
    checkpoints = Checkpointer(str(tmp_path))
    save_all(str(tmp_path), [10])
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    for name in ("open", "ls"):
        monkeypatch.setattr(checkpoints._fs, name, Mock(side_effect=error))

    match = "cannot write the checkpoint of step 20.*Input/output error; which .* cannot be read"
    assert_save_fails(checkpoints, InputError, match)


def test_a_bug_in_the_writer_is_raised_as_it_is(tmp_path, monkeypatch):
    save_all(str(tmp_path), [10])
    monkeypatch.setattr(checkpoint.safetensors.torch, "save", lambda *_: 1 / 0)
    checkpoints = Checkpointer(str(tmp_path))
    assert_save_fails(checkpoints, ZeroDivisionError, "division by zero")


# A store that fails


class HttpError(Exception):
    """As gcsfs and aiohttp have them: no OSError."""


FAILING = Mock(side_effect=HttpError("503"))
CUT = LayerSharding(WHOLE, {}, None)
whole_or_cut = pytest.mark.parametrize("layers", [None, CUT], ids=["whole", "cut"])


@pytest.mark.parametrize("name", ["makedirs", "open"])
@whole_or_cut
def test_whatever_a_store_raises_at_a_write_is_a_sentence(monkeypatch, layers, name):
    place = in_memory()
    save_all(place, [10])
    checkpoints = Checkpointer(place, layers=layers)
    monkeypatch.setattr(type(checkpoints._fs), name, FAILING)

    checkpoints.save(20, *on_cpu(20))
    sentence = "of step 20 to .*HttpError: 503; the one of step 10 is complete and safe"
    with pytest.raises(InputError, match=sentence):
        checkpoints.wait()
    with pytest.raises(InputError, match="cannot write .*x: HttpError: 503"):
        files.write_file(f"{place}/x", b"")


@pytest.mark.parametrize(
    "layers, name",
    [(None, "ls"), (None, "cat_file"), (CUT, "ls"), (CUT, "cat_file"), (CUT, "open")],
    ids=["whole-ls", "whole-cat_file", "cut-ls", "cut-cat_file", "cut-open"],
)
def test_whatever_a_store_raises_at_a_read_is_a_sentence(monkeypatch, layers, name):
    place = in_memory()
    save_all(place, [10])
    checkpoints = Checkpointer(place, layers=layers)
    monkeypatch.setattr(type(checkpoints._fs), name, FAILING)
    with pytest.raises(InputError, match="cannot read the checkpoints in .*HttpError: 503"):
        checkpoints.restore(*on_cpu(0), None)


@whole_or_cut
def test_a_bug_below_a_store_is_raised_as_it_is(monkeypatch, layers):
    place = in_memory()
    save_all(place, [10])
    checkpoints = Checkpointer(place, layers=layers)
    bug = Mock(side_effect=TypeError("a bug"))
    monkeypatch.setattr(type(checkpoints._fs), "makedirs", bug)
    checkpoints.save(30, *on_cpu(30))
    with pytest.raises(TypeError, match="a bug"):
        checkpoints.wait()


def test_whatever_a_store_raises_at_a_weights_file_is_a_sentence(monkeypatch):
    place = in_memory()
    monkeypatch.setattr(type(Checkpointer(place)._fs), "open", FAILING)
    with pytest.raises(InputError, match="cannot read the weights file .*HttpError: 503"):
        files.read_file(f"{place}/x")


# The state of a model whose layers are cut over devices


def test_a_checkpoint_of_a_cut_state_is_read_once(monkeypatch):
    place = in_memory()
    save_all(place, [20])
    expected = Checkpointer(place).read(20)
    whole = files.read_file(f"{place}/step_00000020/state.safetensors")
    read = []

    class Counted(io.BytesIO):
        def read(self, count=-1):
            content = super().read(count)
            read.append(content)
            return content

    checkpoints = Checkpointer(place, layers=CUT)
    monkeypatch.setattr(type(checkpoints._fs), "open", lambda *_, **__: Counted(whole))
    assert equal(checkpoints.read(20), expected)
    assert b"".join(read) == whole


def test_damage_of_a_checkpoint_of_a_cut_state_is_found(capsys):
    place = in_memory()
    save_all(place, [10, 20])
    checkpoints = Checkpointer(place, layers=CUT)
    path = f"{place}/step_00000020/state.safetensors"
    whole = files.read_file(path)
    offsets = whole.index(b"[0,")  # of a tensor, in the header

    def with_offsets(changed: bytes) -> bytes:
        return whole[:offsets] + changed + whole[offsets + len(changed) :]

    wrong = {
        "a fraction in place of offsets": with_offsets(b"[0."),
        "infinity in place of offsets": with_offsets(b"[9e99"),
        "a negative offset": with_offsets(b"[-1,"),
        "too short": whole[:-1],
        "too long": whole + b"x",
        "a header that is too long": b"\xff" * 8 + whole[8:],
        "a header that is no JSON": whole[:9] + b"}" + whole[10:],
        "nothing": b"",
        "a part of the header": whole[:40],
    }
    for name, content in wrong.items():
        files.write_file(path, content)
        assert checkpoints.read(20) is None, name
        assert "do not match its checksum" in capsys.readouterr().err, name
    assert checkpoints.restore(*on_cpu(0), None) == 10


def test_a_kill_at_any_byte_leaves_the_checkpoint_before(place, monkeypatch, capsys):
    save_all(place, [10])
    size = Checkpointer(place)._fs.du(f"{place}/step_00000010")
    of_marker = range(size - 200, size - 10, 20)
    for step, room in enumerate([*range(0, size, size // 8), *of_marker], 11):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            fill_disk(patch, place, room, Killed())
            save_all(place, [step], keep=1)
        assert restored(place) == (10, 10.0), f"{room} of {size} bytes"


# Weights


def test_weights_and_their_metadata_come_back(place):
    path = f"{place}/export/model.safetensors"
    tensors = {
        "a": torch.randn(3, 4),
        "b.c": torch.arange(5),
        "d": torch.randn(4, 3).T.bfloat16(),
        "e": torch.tensor(2.5),
    }
    metadata = {"classes": '["cat", "dög"]', "model": "resnet50"}
    save_weights(path, tensors, metadata)

    content = files.read_file(path)
    header_size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_size])
    assert header["__metadata__"] == metadata
    assert equal(load_weights(path), tensors)

    save_weights(path, {"a": tensors["a"]}, {})  # over the old one
    assert load_weights(path).keys() == {"a"}


def test_weights_that_are_missing_are_an_input_error(place):
    with pytest.raises(InputError, match=f"there is no weights file {place}/none"):
        load_weights(f"{place}/none")


def test_a_folder_in_place_of_weights_is_an_input_error(tmp_path):
    sentence = f"cannot read the weights file {tmp_path}: Is a directory"
    with pytest.raises(InputError, match=sentence):
        load_weights(str(tmp_path))


def test_exports_are_plain_files_that_others_may_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(str(path), {"a": torch.ones(3)}, {})

    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_an_export_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_weights(str(path), {"a": torch.ones(3)}, {})

    fill_disk(monkeypatch, str(path), 10)
    full = r"cannot write .*model\.safetensors: No space left on device"
    with pytest.raises(InputError, match=full):
        save_weights(str(path), {"a": torch.zeros(3)}, {})

    assert torch.equal(safetensors.torch.load_file(path)["a"], torch.ones(3))
    assert names(str(tmp_path)) == {"model.safetensors"}


class Exploit:
    """Fails the test where it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def pickled_exploit() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.ones(3), "b": Exploit()}, file)
    return file.getvalue()


NO_WEIGHTS = {
    "a pickle": pickled_exploit(),
    "nothing": b"",
    "a part of a size": b"1234567",
    "a size that is too large": b"\xff" * 64,
    "a header that is no JSON": b"\x08\0\0\0\0\0\0\0garbage!",
}


@pytest.mark.parametrize("content", NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_pickles_and_other_files_are_refused_and_not_executed(tmp_path, content):
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    sentence = rf"{path} is not a safetensors file .*pickles are not loaded: convert it"
    with pytest.raises(InputError, match=sentence):
        load_weights(str(path))


# Folders


def test_a_folder_of_a_url_is_copied(place):
    contents = {"model.pt": b"\x00weights", "dict.de.txt": "ä 1\n".encode()}
    for name, content in contents.items():
        files.write_file(f"{place}/export/{name}", content)

    folder = Path(files.local_folder(f"{place}/export/"))

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
    is_copy = folder.resolve() != Path(f"{place}/export").resolve()
    assert is_copy == ("memory" in place)


@pytest.mark.parametrize(
    "url, sentence",
    [
        ("memory://none", "no folder memory://none"),
        ("nope://x", "cannot read .*nope"),
    ],
)
def test_a_url_without_a_folder_is_a_sentence(url, sentence):
    with pytest.raises(InputError, match=sentence):
        files.local_folder(url)


# A script that copies a folder of a URL, or writes one, says where to, and ends in some way.
COPIES = """
import ctypes
import dataclasses
import os
import signal
import sys

from errors import InputError
from train.common import cli, files, interrupt

interrupt.LINGER = 0.2
library = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)


@dataclasses.dataclass(frozen=True)
class Config:
    end: str = ""
    writes: bool = False


def main(config):
    if config.writes:
        files.write_folder("memory://run/export", lambda folder: end(config, folder))
        return
    files.write_file("memory://run/export/config.json", b"{}")
    end(config, files.local_folder("memory://run/export"))


def end(config, folder):
    with open(f"{folder}/config.json", "w") as file:
        file.write("{}")
    print(folder, flush=True)
    if config.end == "refused":
        raise InputError("the sentence")
    if config.end == "crashes":
        raise ZeroDivisionError
    library.pthread_mutex_lock(mutex)
    if config.end == "waits":
        sys.stdin.read()
    if config.end == "is in a call":
        library.pthread_mutex_lock(mutex)


cli.run(main, {"tiny": ("a trial", Config())})
"""


@pytest.mark.parametrize(
    ("end", "number", "code"),
    [
        ("returns --writes", None, 0),
        ("waits --writes", signal.SIGTERM, -signal.SIGTERM),
        ("crashes", None, 1),
        ("waits", signal.SIGINT, 130),
        ("is in a call", signal.SIGTERM, -signal.SIGTERM),
        # Of the same kinds; each imports torch.
        pytest.param("is in a call --writes", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("returns", None, 0, marks=pytest.mark.slow),
        pytest.param("refused", None, 2, marks=pytest.mark.slow),
        pytest.param("waits", signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("is in a call", signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_temporary_folder_is_removed_at_the_end(end, number, code, tmp_path):
    end, *writes = end.split(" --")
    flags = [f"--{flag}" for flag in writes]
    process = subprocess.Popen(
        [sys.executable, "-c", COPIES, "tiny", "--end", end, *flags],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == tmp_path
        if number is not None:
            assert (folder / "config.json").exists()
            time.sleep(0.2)  # mostly, the call has begun then
            process.send_signal(number)
        assert process.wait(timeout=60) == code
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_paths_of_local_folders_are_taken_as_they_are():
    assert files.local_folder("file:///a/b") == "/a/b"
    assert files.local_folder("~/a") == f"{Path.home()}/a"


def test_a_folder_is_written_in_chunks(place, monkeypatch):
    written = []

    def write_file(path, chunks):
        written.append((path, list(chunks)))

    monkeypatch.setattr(files, "CHUNK_BYTES", 3)
    monkeypatch.setattr(files, "write_file", write_file)
    files.write_folder(place, lambda local: Path(local, "a").write_bytes(b"12345678"))
    assert written == [(f"{place}/a", [b"123", b"456", b"78"])]


def test_all_files_of_a_folder_are_written(place, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 3)

    def write(local):
        Path(local, "a").write_bytes(b"")
        Path(local, "b").write_bytes(b"1234")

    files.write_folder(place, write)
    assert files.read_file(f"{place}/a") == b""
    assert files.read_file(f"{place}/b") == b"1234"


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left"), safetensors.SafetensorError("No space left")],
)
def test_a_full_temporary_disk_is_a_sentence(place, error):
    sentence = "which is made in a temporary folder: .*No space left; .*TMPDIR"
    with pytest.raises(InputError, match=sentence):
        files.write_folder(place, Mock(side_effect=error))


# The mean of the last checkpoints


@dataclass(frozen=True)
class Averaging:
    """Checkpoints of a run that saves at multiples of 10, and those that are averaged."""

    saved: tuple[int, ...]  # steps
    keep: int
    averaged: list[int]


AVERAGINGS = {
    "stopped by signals on the way": Averaging((10, 20, 23, 30, 37, 40), 3, [20, 30, 40]),
    "the last is no multiple": Averaging((10, 20, 23, 30, 33), 2, [30, 33]),
    "fewer than are kept": Averaging((10, 13), 5, [10, 13]),
    "one": Averaging((3,), 5, [3]),
}


@pytest.mark.parametrize("case", AVERAGINGS.values(), ids=AVERAGINGS)
def test_the_last_regular_checkpoints_and_the_last_are_averaged(mesh, tmp_path, case):
    """Others are there, too: a kill between the write of a checkpoint and the removal of the one
    before leaves both."""
    models = {step: Model() for step in case.saved}
    with Checkpointer(str(tmp_path), keep=10) as checkpoints:
        for step, saved_model in models.items():
            checkpoints.save(step, saved_model, sgd(saved_model.parameters()))
    model, _ = build(mesh)
    buffers = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}

    checkpoints = Checkpointer(str(tmp_path), keep=case.keep, every=10)
    assert average_checkpoints(checkpoints, model, mesh) == case.averaged

    for name, parameter in model.named_parameters():
        weights = [models[step].get_parameter(name).detach().double() for step in case.averaged]
        mean = sum(weights) / len(weights)
        assert parameter.device.type == "xla"
        assert torch.equal(parameter.detach().cpu(), mean.float()), name
        assert torch_xla._XLAC._get_xla_sharding_spec(parameter) == "{replicated}"
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer.cpu(), buffers[name])
    assert model.head.weight is model.embedding.weight


def test_a_damaged_checkpoint_among_those_to_average_is_named(mesh, tmp_path):
    place = str(tmp_path)
    model, optimizer = on_cpu(-1.0)
    save_all(place, (10, 20, 25), keep=3, every=10)
    tear_up(place, 20, "a wrong state")

    sentence = "checkpoint of step 20 in .*, one of those to average, is damaged; remove it"
    with pytest.raises(InputError, match=sentence):
        average_checkpoints(Checkpointer(place, keep=3, every=10), model, mesh)
    assert value_of(model, optimizer) == -1.0
