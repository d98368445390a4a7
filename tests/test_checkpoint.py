"""train/common/checkpoint.py, files.py and the mean of checkpoints: exact, atomic, off the loop, on a disk and on memory://."""

import concurrent.futures
import errno
import io
import json
import os
import stat
import threading
import time
import uuid
from functools import partial
from pathlib import Path
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
from train.common.sharding.placement import Layers
from train.common.xla import backend as xla
from train.transformer import average_checkpoints


class Model(nn.Module):
    """A tied pair, buffers of three types, and a parameter that a `state_dict` hook would show in another shape."""

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
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"count": count, "phase": phase, "mean": torch.zeros_like(p)}


sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False)
adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.01, foreach=False)


def build(mesh, optimizer=adamw, words: int = 12):
    return on_mesh(mesh, Model(words), optimizer)


def train_step(model, optimizer, x, y):
    return update(F.cross_entropy(model(x), y), optimizer)


def run(mesh, step_fn, model, optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        device.set_lr(optimizer, 0.01 / step)
        generator = torch.Generator().manual_seed(step)
        batch = [torch.randint(0, 12, (8,), generator=generator).to(mesh.device) for _ in range(2)]
        losses.append(step_fn(model, optimizer, *batch))
    return device.fetch(losses)


def snapshot(model, optimizer) -> dict:
    """Everything that a checkpoint must bring back, on the host."""
    return checkpoint.to_host(checkpoint.named_state(model, optimizer))


def on_cpu(value: float):
    """A small model on the CPU, all of whose numbers are `value`: no device is needed to test files."""
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
    values = {float(v) for t in checkpoint.named_state(model, optimizer).values() for v in t.detach().unique()}
    assert len(values) == 1, "parts of two checkpoints were mixed"
    return values.pop()


def save_all(place: str, steps, keep: int = 10, **options) -> list[list[int]]:
    """Saves at these steps, each with its own number as value; returns what was complete after each."""
    complete = []
    with Checkpointer(place, keep, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, *on_cpu(step))
            checkpoints.wait()
            complete.append(checkpoints.complete_steps())
    return complete


def restored(place: str) -> tuple[int, float]:
    model, optimizer = on_cpu(-1.0)
    return Checkpointer(place).restore(model, optimizer, None), value_of(model, optimizer)


# ---- round trip ------------------------------------------------------------------------------------------------------
def test_everything_comes_back_bit_for_bit_and_nothing_is_compiled_again(mesh, place, monkeypatch):
    gate, write = threading.Event(), Checkpointer._write
    monkeypatch.setattr(Checkpointer, "_write", lambda *arguments: gate.wait(30) and write(*arguments))
    step_fn = device.compiled(train_step, mesh)
    model, made = build(mesh)
    run(mesh, step_fn, model, made, 1, 3)
    saved = snapshot(model, made)
    torch_xla.sync()
    reads, graphs = xla.host_reads(), xla.compilations()
    with Checkpointer(place) as checkpoints:
        checkpoints.save(3, model, made)
        torch_xla.sync()
        assert (xla.host_reads(), xla.compilations()) == (reads + 1, graphs), "saving is one transfer"
        expected = run(mesh, step_fn, model, made, 4, 6)  # donates the buffers that were saved
        gate.set()
    after = snapshot(model, made)
    assert not equal(saved, after)

    # Into the model that has gone on, and into another one of other weights.
    for other_model, other in ((model, made), build(mesh)):
        torch_xla.sync()
        assert Checkpointer(place).restore(other_model, other, mesh) == 3
        assert equal(snapshot(other_model, other), saved)
        assert other_model.head.weight is other_model.embedding.weight
        torch_xla.sync()
        graphs = xla.compilations()
        assert run(mesh, step_fn, other_model, other, 4, 6) == expected  # strict: the step is not compiled again
        assert xla.compilations() == graphs
        assert equal(snapshot(other_model, other), after)


# ---- which checkpoint ------------------------------------------------------------------------------------------------
def test_the_newest_is_restored_and_the_last_ones_are_kept(place):
    assert restored(place) == (0, -1.0), "there is nothing yet"
    save_all(place, [1, 2, 10, 9_999, 16_000_000], keep=3)
    assert Checkpointer(place).complete_steps() == [10, 9_999, 16_000_000]
    assert restored(place) == (16_000_000, 16_000_000)
    assert len(names(place)) == 3, "a deleted checkpoint leaves nothing behind"


def test_steps_that_do_not_divide_by_every_go_when_the_next_is_there(place):
    found = save_all(place, (7, 10, 13, 20, 27, 30, 33, 40), keep=2, every=10)
    assert found == [[7], [10], [10, 13], [10, 20], [10, 20, 27], [20, 30], [20, 30, 33], [30, 40]]
    assert restored(place) == (40, 40)


TEARS = {
    "no marker": ("COMPLETE", None),
    "a marker that is no JSON": ("COMPLETE", lambda content: b"\xff\x00 no JSON"),
    "a marker of nothing": ("COMPLETE", lambda content: b"{}"),
    "a marker of another kind": ("COMPLETE", lambda content: b"[1]"),
    "no state": ("state.safetensors", None),
    "a short state": ("state.safetensors", lambda content: content[:-10]),
    "a wrong state": ("state.safetensors", lambda content: flip(content, -5)),
    "no numbers": ("state.json", None),
    "other numbers": ("state.json", lambda content: content.replace(b"30", b"31")),
}


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_checkpoint_is_skipped_with_a_warning(place, tear, capsys):
    save_all(place, [20, 30])
    damage(place, 30, *TEARS[tear])
    assert restored(place) == (20, 20.0)
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and f"warning: skipping the torn checkpoint {place}/step_00000030" in warning
    damage(place, 20, *TEARS["a short state"])
    assert restored(place) == (0, -1.0)
    assert capsys.readouterr().err.count("warning: skipping the torn checkpoint") == 2


def test_a_torn_checkpoint_of_a_later_step_does_not_push_a_good_one_out(place, capsys):
    save_all(place, [10, 20])
    damage(place, 20, *TEARS["a wrong state"])
    save_all(place, [15], keep=2)
    assert restored(place) == (15, 15.0) and Checkpointer(place).complete_steps() == [10, 15, 20]
    save_all(place, [20], keep=1)  # and is replaced when the run comes to its step again
    capsys.readouterr()
    assert restored(place) == (20, 20.0) and capsys.readouterr().err == ""
    assert Checkpointer(place).complete_steps() == [20]


def test_what_a_killed_writer_left_goes_with_the_next_checkpoint_and_other_files_are_left_alone(place):
    save_all(place, [10])
    files.write_file(f"{place}/step_00000020/state.safetensors", b"half")
    for name in ("notes.txt", "step_old/COMPLETE"):
        files.write_file(f"{place}/{name}", b"mine")
    assert Checkpointer(place).complete_steps() == [10] and restored(place) == (10, 10.0)
    save_all(place, [30], keep=1)
    assert names(place) == {"step_00000030", "notes.txt", "step_old"} and restored(place) == (30, 30.0)
    assert files.read_file(f"{place}/notes.txt") == files.read_file(f"{place}/step_old/COMPLETE") == b"mine"


# ---- another model ---------------------------------------------------------------------------------------------------
OTHERS = {
    "model.embedding.weight is [12, 6], not [13, 6]; ": {"words": 13},
    "optimizer.embedding.weight.momentum_buffer is missing, not [12, 6]": {"optimizer": sgd},
}


@pytest.mark.parametrize("differing", OTHERS)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path, mesh, differing):
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(7, *build(mesh))
    other, made = build(mesh, **OTHERS[differing])
    before = snapshot(other, made)
    with pytest.raises(InputError) as raised:
        checkpoints.restore(other, made, mesh)
    message = str(raised.value)
    assert message.startswith(f"the checkpoint {tmp_path}/step_00000007 is of another model or optimizer: ")
    assert differing in message and " in all." in message
    assert message.endswith("another --name") and "\n" not in message
    assert equal(snapshot(other, made), before), "half of it was loaded"
    with pytest.raises(InputError, match=r"model\.bias is missing, not \[64\]; model\.embedding\.weight is .*missing"):
        checkpoints.restore(*on_cpu(0), None)


def test_numbers_of_the_optimizer_come_back_or_are_refused(tmp_path):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    saved, optimizer = Counting(model.parameters(), 17, "cold"), Counting(other.parameters())
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(5, model, saved)
    checkpoints.restore(other, optimizer, None)
    assert snapshot(other, optimizer)["optimizer.bias.count"] == snapshot(model, saved)["optimizer.bias.count"] == 17
    for state in optimizer.state.values():
        del state["count"]
    with pytest.raises(InputError, match=r"optimizer\.bias\.count is a number, not missing"):
        checkpoints.restore(other, optimizer, None)


# ---- writing off the loop --------------------------------------------------------------------------------------------
def test_save_returns_at_once_and_writes_the_moment_of_save_even_if_an_error_ends_the_run(place, monkeypatch):
    model, optimizer = on_cpu(1.0)
    gate, write = threading.Event(), files.write_synced
    monkeypatch.setattr(files, "write_synced", lambda *arguments: gate.wait(30) and write(*arguments))
    with pytest.raises(ZeroDivisionError), Checkpointer(place) as checkpoints:
        started = time.perf_counter()
        checkpoints.save(1, model, optimizer)
        checkpoints.raise_failure()
        assert time.perf_counter() - started < 5  # the writer stands at the gate
        assert checkpoints.complete_steps() == []
        fill(model, optimizer, 2.0)  # the training goes on
        threading.Timer(0.3, gate.set).start()
        raise ZeroDivisionError
    assert restored(place) == (1, 1.0)


# ---- a full disk, a kill ---------------------------------------------------------------------------------------------
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def fill_disk(monkeypatch, place: str, room: int, error: BaseException = FULL) -> None:
    """Lets so many bytes be written on the file system of a path or URL; the write of the next one fails."""
    fs = Checkpointer(place)._fs
    opened, left = fs.open, [room]

    def full(*arguments, **options):
        file = opened(*arguments, **options)
        write = file.write

        def some(content):
            write(content[: left[0]])
            left[0] -= len(content)
            if left[0] < 0:
                left[0] = 0
                raise error

        file.write = some
        return file

    monkeypatch.setattr(fs, "open", full)


NOTICES = {  # with the bytes that there is room for
    "raise_failure": (0, Checkpointer.raise_failure),
    "save": (50, lambda checkpoints: checkpoints.save(30, *on_cpu(30))),
    "wait": (1000, Checkpointer.wait),
    "exit": (33_000, lambda checkpoints: checkpoints.__exit__(None)),
}


@pytest.mark.parametrize("notice", NOTICES)
def test_a_full_disk_is_an_input_error_and_the_last_checkpoint_is_safe(place, monkeypatch, notice):
    room, noticed = NOTICES[notice]
    save_all(place, [10])
    checkpoints = Checkpointer(place)
    with monkeypatch.context() as patch:
        fill_disk(patch, place, room)
        checkpoints.save(20, *on_cpu(20))
        concurrent.futures.wait([checkpoints._last])
        with pytest.raises(InputError) as raised:
            noticed(checkpoints)
    message = str(raised.value)
    assert f"cannot write the checkpoint of step 20 to {place}: No space left on device" in message
    assert "the one of step 10 is complete and safe" in message and "\n" not in message
    checkpoints.raise_failure()  # once is enough
    assert checkpoints.complete_steps() == [10]
    assert restored(place) == (10, 10.0)
    save_all(place, [20])  # with room again, the same command goes on
    assert restored(place) == (20, 20.0)
    assert names(place) == {"step_00000010", "step_00000020"}


def test_failures_are_raised_whatever_they_are(tmp_path, monkeypatch):
    place = str(tmp_path)
    checkpoints, error = Checkpointer(place), OSError(errno.EIO, os.strerror(errno.EIO))

    def failure(kind: type, match: str) -> None:
        checkpoints.save(20, *on_cpu(20))
        with pytest.raises(kind, match=match):
            checkpoints.wait()

    with monkeypatch.context() as patch:
        fill_disk(patch, place, 10)
        failure(InputError, "there is no complete one yet")
    save_all(place, [10])
    with monkeypatch.context() as patch:  # not even the folder can be listed
        for name in ("open", "ls"):
            patch.setattr(checkpoints._fs, name, Mock(side_effect=error))
        failure(InputError, "cannot write the checkpoint of step 20.*Input/output error; which .* cannot be read")
    monkeypatch.setattr(checkpoint.safetensors.torch, "save", lambda *_: 1 / 0)  # a bug
    failure(ZeroDivisionError, "division by zero")


class HttpError(Exception):
    """As gcsfs and aiohttp have them: no OSError."""


@pytest.mark.parametrize("layers", [None, Layers(WHOLE, {}, None)], ids=["whole", "cut"])
def test_whatever_a_store_raises_is_a_sentence(monkeypatch, layers):
    place = f"memory://{uuid.uuid4().hex}/checkpoints"
    save_all(place, [10])
    checkpoints, failing = Checkpointer(place, layers=layers), Mock(side_effect=HttpError("503"))

    def refused(sentence: str, work) -> None:
        with pytest.raises(InputError, match=sentence):
            work()

    for name in ("makedirs", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(type(checkpoints._fs), name, failing)
            checkpoints.save(20, *on_cpu(20))
            refused("of step 20 to .*HttpError: 503; the one of step 10 is complete and safe", checkpoints.wait)
            refused("cannot write .*x: HttpError: 503", lambda: files.write_file(f"{place}/x", b""))
    for name in ("ls", "cat_file", *(["open"] if layers else [])):
        with monkeypatch.context() as patch:
            patch.setattr(type(checkpoints._fs), name, failing)
            refused("cannot read the checkpoints in .*HttpError: 503", lambda: checkpoints.restore(*on_cpu(0), None))
    with monkeypatch.context() as patch:  # a bug, not the store
        patch.setattr(type(checkpoints._fs), "makedirs", Mock(side_effect=TypeError("a bug")))
        checkpoints.save(30, *on_cpu(30))
        with pytest.raises(TypeError, match="a bug"):
            checkpoints.wait()
    monkeypatch.setattr(type(checkpoints._fs), "open", failing)
    refused("cannot read the weights file .*HttpError: 503", lambda: files.read_file(f"{place}/x"))


def test_a_checkpoint_of_a_cut_state_is_read_once_and_damage_is_found(monkeypatch, capsys):
    place = f"memory://{uuid.uuid4().hex}/checkpoints"
    save_all(place, [10, 20])
    checkpoints, read = Checkpointer(place, layers=Layers(WHOLE, {}, None)), []
    whole = files.read_file(path := f"{place}/step_00000020/state.safetensors")

    class Counted(io.BytesIO):
        def read(self, count=-1):
            read.append(super().read(count))
            return read[-1]

    with monkeypatch.context() as patch:
        patch.setattr(type(checkpoints._fs), "open", lambda *_, **__: Counted(whole))
        assert equal(checkpoints.read(20), Checkpointer(place).read(20)) and b"".join(read) == whole
    entry = whole.index(b"[0,")
    wrong = [whole[:entry] + offsets + whole[entry + len(offsets) :] for offsets in (b"[0.", b"[9e99", b"[-1,")]
    wrong += [whole[:-1], whole + b"x", b"\xff" * 8 + whole[8:], whole[:9] + b"}" + whole[10:], b"", whole[:40]]
    for content in wrong:
        files.write_file(path, content)
        assert checkpoints.read(20) is None and "do not match its checksum" in capsys.readouterr().err
    assert checkpoints.restore(*on_cpu(0), None) == 10


def test_a_kill_at_any_byte_of_a_checkpoint_leaves_the_one_before(place, monkeypatch, capsys):
    save_all(place, [10])
    size = Checkpointer(place)._fs.du(f"{place}/step_00000010")
    of_marker = range(size - 200, size - 10, 20)
    for step, room in enumerate([*range(0, size, size // 8), *of_marker], 11):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            fill_disk(patch, place, room, Killed())
            save_all(place, [step], keep=1)
        assert restored(place) == (10, 10.0), f"{room} of {size} bytes"


# ---- weights and other files -----------------------------------------------------------------------------------------
def test_weights_and_metadata_come_back_and_missing_ones_are_an_input_error(place, tmp_path):
    tensors = {"a": torch.randn(3, 4), "b.c": torch.arange(5), "d": torch.randn(4, 3).T.bfloat16()}
    tensors["e"] = torch.tensor(2.5)
    path, metadata = f"{place}/export/model.safetensors", {"classes": '["cat", "dög"]', "model": "resnet50"}
    save_weights(path, tensors, metadata)
    content = files.read_file(path)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"] == metadata and equal(load_weights(path), tensors)
    save_weights(path, {"a": tensors["a"]}, {})  # over the old one
    assert load_weights(path).keys() == {"a"}
    with pytest.raises(InputError, match=f"there is no weights file {place}/none"):
        load_weights(f"{place}/none")
    with pytest.raises(InputError, match=f"cannot read the weights file {tmp_path}: Is a directory"):
        load_weights(str(tmp_path))


def test_exports_are_plain_files_that_others_may_read_and_a_failed_one_leaves_the_old(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_weights(str(path), {"a": torch.ones(3)}, {})
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    fill_disk(monkeypatch, str(path), 10)
    with pytest.raises(InputError, match=r"cannot write .*model\.safetensors: No space left on device"):
        save_weights(str(path), {"a": torch.zeros(3)}, {})
    assert torch.equal(safetensors.torch.load_file(path)["a"], torch.ones(3))
    assert names(str(tmp_path)) == {"model.safetensors"}


class Exploit:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize("content", [None, b"", b"1234567", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0garbage!"])
def test_pickles_and_other_files_are_refused_and_not_executed(tmp_path, content):
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(3), "b": Exploit()}, path) if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match=rf"{path} is not a safetensors file .*pickles are not loaded: convert it"):
        load_weights(str(path))


def test_a_folder_of_a_url_is_copied(place):
    contents = {"model.pt": b"\x00weights", "dict.de.txt": "ä 1\n".encode()}
    for name, content in contents.items():
        files.write_file(f"{place}/export/{name}", content)
    folder = files.local_folder(f"{place}/export/")
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == contents
    assert ("memory" in place) == (Path(folder).resolve() != Path(f"{place}/export").resolve())
    for missing, sentence in (("memory://none", "no folder memory://none"), ("nope://x", "cannot read .*nope")):
        with pytest.raises(InputError, match=sentence):
            files.local_folder(missing)
    assert files.local_folder("file:///a/b") == "/a/b" and files.local_folder("~/a") == f"{Path.home()}/a"


def test_a_folder_is_written_in_chunks_and_a_full_temporary_disk_is_a_sentence(place, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 3)
    with monkeypatch.context() as patch:
        written = []
        patch.setattr(files, "write_file", lambda path, parts: written.append((path, list(parts))))
        files.write_folder(place, lambda local: Path(local, "a").write_bytes(b"12345678"))
    assert written == [(f"{place}/a", [b"123", b"456", b"78"])]
    files.write_folder(place, lambda local: [Path(local, "ab"[n]).write_bytes(b"1234" * n) for n in (0, 1)])
    assert files.read_file(f"{place}/a") == b"" and files.read_file(f"{place}/b") == b"1234"
    for error in (OSError(errno.ENOSPC, "No space left"), safetensors.SafetensorError("No space left")):
        with pytest.raises(InputError, match="which is made in a temporary folder: .*No space left; .*TMPDIR"):
            files.write_folder(place, Mock(side_effect=error))


# ---- the mean of the last checkpoints --------------------------------------------------------------------------------
STOPPED = (10, 20, 23, 30, 37, 40), 3, [20, 30, 40]  # by signals, on the way
NO_MULTIPLE = (10, 20, 23, 30, 33), 2, [30, 33]  # is the last


@pytest.mark.parametrize("saved, keep, averaged", [STOPPED, NO_MULTIPLE, ((10, 13), 5, [10, 13]), ((3,), 5, [3])])
def test_the_mean_of_the_last_regular_checkpoints_and_the_last_of_all(mesh, tmp_path, saved, keep, averaged):
    """Others are there, too: a kill between the write of a checkpoint and the removal of the one before leaves both."""
    models = {step: Model() for step in saved}
    with Checkpointer(str(tmp_path), keep=10) as checkpoints:
        for step, model in models.items():
            checkpoints.save(step, model, sgd(model.parameters()))
    model, _ = build(mesh)
    buffers = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
    assert average_checkpoints(Checkpointer(str(tmp_path), keep=keep, every=10), model, mesh) == averaged
    for name, parameter in model.named_parameters():
        mean = sum(models[step].get_parameter(name).detach().double() for step in averaged) / len(averaged)
        assert parameter.device.type == "xla" and torch.equal(parameter.detach().cpu(), mean.float()), name
        assert torch_xla._XLAC._get_xla_sharding_spec(parameter) == "{replicated}"
    assert all(torch.equal(buffer.cpu(), buffers[name]) for name, buffer in model.named_buffers())
    assert model.head.weight is model.embedding.weight


def test_a_damaged_checkpoint_among_those_to_average_is_named(mesh, tmp_path):
    place, (model, optimizer) = str(tmp_path), on_cpu(-1.0)
    save_all(place, (10, 20, 25), keep=3, every=10)
    damage(place, 20, *TEARS["a wrong state"])
    with pytest.raises(InputError, match="checkpoint of step 20 in .*, one of those to average, is damaged; remove it"):
        average_checkpoints(Checkpointer(place, keep=3, every=10), model, mesh)
    assert value_of(model, optimizer) == -1.0
