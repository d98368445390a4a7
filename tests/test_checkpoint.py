"""train/common/checkpoint.py: exact, atomic, off the loop, on a local disk and on fsspec's memory://."""

import errno
import json
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import torch_xla
from torch import nn

from errors import InputError
from train.common import checkpoint, device, files
from train.common.averaging import average
from train.common.checkpoint import Checkpointer
from train.common.files import load_weights, save_weights

ROOT = Path(checkpoint.__file__).parents[2]


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

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"count": 0, "phase": "warm", "mean": torch.zeros_like(p)}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01, foreach=False)


def build(mesh, optimizer=adamw, seed: int = 0, words: int = 12):
    torch.manual_seed(seed)
    model = device.to_device(Model(words), mesh)
    made = optimizer(model.parameters())
    device.init_optimizer_state(made, mesh)
    return model, made


def train_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def batch(mesh, step: int):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 12, (8,), generator=generator).to(mesh.device) for _ in range(2)]


def run(mesh, step_fn, model, optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        device.set_lr(optimizer, 0.01 / step)
        losses.append(step_fn(model, optimizer, *batch(mesh, step)))
    return device.fetch(losses)


def snapshot(model, optimizer) -> dict:
    """Everything that a checkpoint must bring back, on the host."""
    tensors, numbers = checkpoint.named_state(model, optimizer)
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()} | numbers


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        (torch.equal(value, other[name]) and value.dtype == other[name].dtype)
        if torch.is_tensor(value)
        else value == other[name]
        for name, value in one.items()
    )


def on_cpu(value: float = 0.0):
    """A small model on the CPU, all of whose numbers are `value`: no device is needed to test files."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return fill(model, optimizer, value)


def fill(model, optimizer, value: float):
    with torch.no_grad():
        for tensor in checkpoint.named_state(model, optimizer)[0].values():
            tensor.fill_(value)
    return model, optimizer


def value_of(model, optimizer) -> float:
    values = {float(v) for t in checkpoint.named_state(model, optimizer)[0].values() for v in t.detach().unique()}
    assert len(values) == 1, "parts of two checkpoints were mixed"
    return values.pop()


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path) -> str:
    """A path on each of the two file systems."""
    return str(tmp_path / "checkpoints") if request.param == "disk" else f"memory://{uuid.uuid4().hex}/checkpoints"


def opened(place: str):
    return fsspec.core.url_to_fs(place)


def save_all(place: str, steps, keep: int = 10) -> None:
    with Checkpointer(place, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, *on_cpu(step))


def restored(place: str) -> tuple[int, float]:
    model, optimizer = on_cpu(-1.0)
    return Checkpointer(place).restore(model, optimizer, None), value_of(model, optimizer)


# ---- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_everything_comes_back_bit_for_bit_and_nothing_is_compiled_again(mesh, place, optimizer):
    step_fn = device.compiled(train_step, mesh)
    model, made = build(mesh, optimizer)
    run(mesh, step_fn, model, made, 1, 3)
    saved = snapshot(model, made)
    with Checkpointer(place) as checkpoints:
        checkpoints.save(3, model, made)
    expected = run(mesh, step_fn, model, made, 4, 6)
    after = snapshot(model, made)
    assert not equal(saved, after)

    # Into the model that has gone on, and into another one of other weights.
    for other_model, other in ((model, made), build(mesh, optimizer, seed=1)):
        torch_xla.sync()
        assert Checkpointer(place).restore(other_model, other, mesh) == 3
        assert equal(snapshot(other_model, other), saved)
        assert other_model.head.weight is other_model.embedding.weight
        torch_xla.sync()
        graphs = device.compilations()
        assert run(mesh, step_fn, other_model, other, 4, 6) == expected  # strict: the step is not compiled again
        assert device.compilations() == graphs
        assert equal(snapshot(other_model, other), after)


def test_a_saved_state_has_every_tensor_by_name(mesh):
    tensors, numbers = checkpoint.named_state(*build(mesh, sgd))
    assert numbers == {}
    assert set(tensors) == {
        *(f"model.{name}" for name in ("embedding.weight", "norm.weight", "norm.bias", "head.bias", "small")),
        *(f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        *(
            f"optimizer.{name}.momentum_buffer"
            for name in ("embedding.weight", "norm.weight", "norm.bias", "head.bias")
        ),
    }


def test_numbers_of_the_optimizer_come_back(place):
    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters())
    for state in optimizer.state.values():
        state.update(count=17, phase="cold")
    with Checkpointer(place) as checkpoints:
        checkpoints.save(5, model, optimizer)
    other = nn.Linear(2, 2)
    fresh = Counting(other.parameters())
    assert Checkpointer(place).restore(other, fresh, None) == 5
    assert equal(snapshot(other, fresh), snapshot(model, optimizer))
    assert [state["count"] for state in fresh.state.values()] == [17, 17]


RESUME = """
import sys
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/tests"]
import test_checkpoint as t
from train.common import device
mesh = device.setup(0, "float32")
model, optimizer = t.build(mesh, seed=9)
start = t.Checkpointer(sys.argv[1]).restore(model, optimizer, mesh)
graphs = []
def step(*arguments):
    t.torch_xla.sync()
    before = device.compilations()
    result = compiled(*arguments)
    graphs.append(device.compilations() - before)
    return result
compiled = device.compiled(t.train_step, mesh)
losses = t.run(mesh, step, model, optimizer, start + 1, 6)
print(t.json.dumps({"start": start, "losses": losses, "graphs": graphs}))
"""


def test_a_fresh_process_goes_on_with_the_same_losses_and_one_graph(mesh, tmp_path):
    model, optimizer = build(mesh)
    step_fn = device.compiled(train_step, mesh)
    run(mesh, step_fn, model, optimizer, 1, 3)
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(3, model, optimizer)
    expected = run(mesh, step_fn, model, optimizer, 4, 6)
    result = subprocess.run(
        [sys.executable, "-c", RESUME, str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {"start": 3, "losses": expected, "graphs": [1, 0, 0]}


def test_saving_is_one_transfer_and_compiles_nothing(mesh, tmp_path):
    model, optimizer = build(mesh)
    torch_xla.sync()
    reads, graphs = device.host_reads(), device.compilations()
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(1, model, optimizer)
    assert device.host_reads() == reads + 1
    torch_xla.sync()
    assert device.compilations() == graphs


# ---- which checkpoint ------------------------------------------------------------------------------------------------


def test_nothing_to_restore_is_step_0(place):
    model, optimizer = on_cpu(3.0)
    assert Checkpointer(place).restore(model, optimizer, None) == 0
    assert value_of(model, optimizer) == 3.0


def test_the_newest_is_restored_and_the_last_ones_are_kept(place):
    save_all(place, [1, 2, 10, 9_999, 16_000_000], keep=3)
    assert Checkpointer(place).complete_steps() == [10, 9_999, 16_000_000]
    assert restored(place) == (16_000_000, 16_000_000)
    fs, root = opened(place)
    assert len(fs.ls(root)) == 3, "a deleted checkpoint leaves nothing behind"


def remove_marker(fs, folder):
    fs.rm(f"{folder}/COMPLETE")


def truncate(fs, folder):
    content = fs.cat_file(f"{folder}/state.safetensors")
    fs.pipe_file(f"{folder}/state.safetensors", content[:-10])


def flip(fs, folder):
    content = bytearray(fs.cat_file(f"{folder}/state.safetensors"))
    content[-5] ^= 1
    fs.pipe_file(f"{folder}/state.safetensors", bytes(content))


def flip_json(fs, folder):
    content = fs.cat_file(f"{folder}/state.json")
    fs.pipe_file(f"{folder}/state.json", content.replace(b"30", b"31"))


def empty_marker(fs, folder):
    fs.pipe_file(f"{folder}/COMPLETE", b"")


def garbage_marker(fs, folder):
    fs.pipe_file(f"{folder}/COMPLETE", b"\xff\x00 no JSON")


def marker_of_nothing(fs, folder):
    fs.pipe_file(f"{folder}/COMPLETE", b"{}")


def marker_of_another_kind(fs, folder):
    fs.pipe_file(f"{folder}/COMPLETE", b"[1]")


def remove_state(fs, folder):
    fs.rm(f"{folder}/state.safetensors")


def remove_json(fs, folder):
    fs.rm(f"{folder}/state.json")


TEARS = [remove_marker, truncate, flip, flip_json, empty_marker, garbage_marker, marker_of_nothing]
TEARS += [marker_of_another_kind, remove_state, remove_json]


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_checkpoint_is_skipped_with_a_warning(place, tear, capsys):
    save_all(place, [10, 20, 30])
    fs, root = opened(place)
    tear(fs, f"{root}/step_00000030")
    assert restored(place) == (20, 20.0)
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and f"warning: skipping the torn checkpoint {place}/step_00000030" in warning


def test_only_torn_checkpoints_are_step_0(place, capsys):
    save_all(place, [10, 20])
    fs, root = opened(place)
    for step, tear in ((10, truncate), (20, remove_marker)):
        tear(fs, f"{root}/step_000000{step}")
    assert restored(place) == (0, -1.0)
    assert capsys.readouterr().err.count("warning: skipping the torn checkpoint") == 2


def test_a_torn_checkpoint_of_a_later_step_does_not_push_a_good_one_out(place, capsys):
    save_all(place, [10, 20])
    fs, root = opened(place)
    flip(fs, f"{root}/step_00000020")
    save_all(place, [15], keep=1)
    assert restored(place) == (15, 15.0)
    save_all(place, [20], keep=1)  # and is replaced when the run comes to its step again
    capsys.readouterr()
    assert restored(place) == (20, 20.0) and capsys.readouterr().err == ""
    assert Checkpointer(place).complete_steps() == [20]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    save_all(str(tmp_path), [10])
    half = tmp_path / ".writing-step_00000020"
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    Checkpointer(str(tmp_path), main_process=False)
    assert half.exists(), "another host must not remove what the writing one is at"
    assert Checkpointer(str(tmp_path)).complete_steps() == [10]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


def test_other_files_are_left_alone(place):
    save_all(place, [10])
    fs, root = opened(place)
    fs.makedirs(f"{root}/step_old")
    fs.pipe_file(f"{root}/notes.txt", b"mine")
    fs.pipe_file(f"{root}/step_old/COMPLETE", b"mine")
    save_all(place, [20, 30], keep=1)
    assert restored(place) == (30, 30.0)
    assert fs.cat_file(f"{root}/notes.txt") == fs.cat_file(f"{root}/step_old/COMPLETE") == b"mine"


def test_only_the_main_process_writes(place):
    with Checkpointer(place, main_process=False) as checkpoints:
        checkpoints.save(10, *on_cpu(10))
    fs, root = opened(place)
    assert not fs.exists(root)
    save_all(place, [10])
    model, optimizer = on_cpu()
    assert Checkpointer(place, main_process=False).restore(model, optimizer, None) == 10


# ---- another model ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused(place, mesh):
    model, optimizer = build(mesh)
    with Checkpointer(place) as checkpoints:
        checkpoints.save(7, model, optimizer)
    checkpoints = Checkpointer(place)

    other, made = build(mesh, words=13)
    before = snapshot(other, made)
    with pytest.raises(InputError) as raised:
        checkpoints.restore(other, made, mesh)
    message = str(raised.value)
    assert message.startswith(f"the checkpoint {place}/step_00000007 is of another model or optimizer: ")
    assert "model.embedding.weight [12, 6] instead of [13, 6] and 5 more" in message and "\n" not in message
    assert equal(snapshot(other, made), before), "half of it was loaded"

    with pytest.raises(InputError, match=r"it lacks model\.bias and 3 more; it has besides model\.embedding\.weight"):
        checkpoints.restore(*on_cpu(), None)


@pytest.mark.parametrize("saved, wanted, name", [(sgd, adamw, "exp_avg"), (adamw, sgd, "momentum_buffer")])
def test_a_checkpoint_of_another_optimizer_is_refused(place, mesh, saved, wanted, name):
    with Checkpointer(place) as checkpoints:
        checkpoints.save(7, *build(mesh, saved))
    with pytest.raises(InputError, match=rf"is of another model or optimizer: .*optimizer\..*{name}"):
        Checkpointer(place).restore(*build(mesh, wanted), mesh)


def test_a_checkpoint_with_other_numbers_is_refused(place):
    model = nn.Linear(2, 2)
    with Checkpointer(place) as checkpoints:
        checkpoints.save(5, model, Counting(model.parameters()))
    optimizer = Counting(model.parameters())
    for state in optimizer.state.values():
        del state["count"]
    with pytest.raises(InputError, match=r"optimizer\.bias\.count"):
        Checkpointer(place).restore(model, optimizer, None)


# ---- writing off the loop --------------------------------------------------------------------------------------------


def test_save_returns_at_once_and_writes_the_moment_of_save(place, monkeypatch):
    model, optimizer = on_cpu(1.0)
    gate = threading.Event()
    write = files.write_synced

    def slow(*arguments):
        assert gate.wait(30)
        write(*arguments)

    monkeypatch.setattr(files, "write_synced", slow)
    checkpoints = Checkpointer(place)
    started = time.perf_counter()
    checkpoints.save(1, model, optimizer)
    checkpoints.raise_failure()
    assert time.perf_counter() - started < 5  # the writer stands at the gate
    assert checkpoints.complete_steps() == []
    fill(model, optimizer, 2.0)  # the training goes on
    gate.set()
    checkpoints.wait()
    assert restored(place) == (1, 1.0)


def test_the_state_on_the_device_is_that_of_the_moment_of_save(mesh, tmp_path, monkeypatch):
    gate = threading.Event()
    write = Checkpointer._write
    monkeypatch.setattr(Checkpointer, "_write", lambda *arguments: gate.wait(30) and write(*arguments))
    model, optimizer = build(mesh)
    step_fn = device.compiled(train_step, mesh)
    run(mesh, step_fn, model, optimizer, 1, 1)
    saved = snapshot(model, optimizer)
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(1, model, optimizer)
        run(mesh, step_fn, model, optimizer, 2, 4)  # donates the buffers that were saved
        gate.set()
    checkpoints.restore(model, optimizer, mesh)
    assert equal(snapshot(model, optimizer), saved)


def test_leaving_the_context_waits_for_the_writer(place, monkeypatch):
    write = Checkpointer._write
    monkeypatch.setattr(Checkpointer, "_write", lambda *arguments: (time.sleep(0.3), write(*arguments)))
    with Checkpointer(place) as checkpoints:
        checkpoints.save(1, *on_cpu(1))
    assert restored(place) == (1, 1.0)
    with pytest.raises(ZeroDivisionError), Checkpointer(place) as checkpoints:  # also when an error ends the run
        checkpoints.save(2, *on_cpu(2))
        raise ZeroDivisionError
    assert restored(place) == (2, 2.0)


# ---- a full disk -----------------------------------------------------------------------------------------------------


class FullDisk:
    """A file that takes `room` bytes, and then there is no space left."""

    def __init__(self, file, room: int):
        self.file, self.room = file, room

    def write(self, content):
        self.file.write(content[: self.room])
        if len(content) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def fill_disk(monkeypatch, checkpoints, room: int) -> None:
    opened = checkpoints._fs.open
    monkeypatch.setattr(checkpoints._fs, "open", lambda *a, **k: FullDisk(opened(*a, **k), room))


@pytest.mark.parametrize("room", [0, 50, 1000])
@pytest.mark.parametrize("notice", ["raise_failure", "save", "wait", "exit"])
def test_a_full_disk_is_an_input_error_and_the_last_checkpoint_is_safe(place, monkeypatch, room, notice):
    save_all(place, [10])
    checkpoints = Checkpointer(place)
    with monkeypatch.context() as patch:
        fill_disk(patch, checkpoints, room)
        checkpoints.save(20, *on_cpu(20))
        checkpoints._writer.join()
        with pytest.raises(InputError) as raised:
            if notice == "exit":
                with checkpoints:
                    pass
            elif notice == "save":
                checkpoints.save(30, *on_cpu(30))
            else:
                getattr(checkpoints, notice)()
    message = str(raised.value)
    assert f"cannot write the checkpoint of step 20 to {place}: No space left on device" in message
    assert "the one of step 10 is complete and safe" in message and "\n" not in message
    checkpoints.raise_failure()  # once is enough
    assert checkpoints.complete_steps() == [10]
    assert restored(place) == (10, 10.0)
    # With room again, the same command goes on.
    save_all(place, [20])
    assert restored(place) == (20, 20.0)
    fs, root = opened(place)
    assert sorted(Path(entry).name for entry in fs.ls(root, detail=False)) == ["step_00000010", "step_00000020"]


def test_a_full_disk_before_the_first_checkpoint_says_so(place, monkeypatch):
    checkpoints = Checkpointer(place)
    fill_disk(monkeypatch, checkpoints, 10)
    checkpoints.save(20, *on_cpu(20))
    with pytest.raises(InputError, match="there is no complete one yet"):
        checkpoints.wait()


def test_a_failure_is_raised_though_the_folder_cannot_even_be_listed(place, monkeypatch):
    save_all(place, [10])
    checkpoints = Checkpointer(place)

    def broken(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoints._fs, "open", broken)
    monkeypatch.setattr(checkpoints._fs, "ls", broken)
    checkpoints.save(20, *on_cpu(20))
    with pytest.raises(InputError, match="cannot write the checkpoint of step 20.*Input/output error"):
        checkpoints.wait()


def test_an_error_that_is_no_matter_of_the_disk_keeps_its_type(place, monkeypatch):
    def broken(*_, **__):
        raise ArithmeticError("a bug")

    monkeypatch.setattr(checkpoint.safetensors.torch, "save", broken)
    checkpoints = Checkpointer(place)
    checkpoints.save(20, *on_cpu(20))
    with pytest.raises(ArithmeticError, match="a bug"):
        checkpoints.wait()


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


def save_without_end(place: str) -> None:
    model, optimizer = on_cpu()
    checkpoints = Checkpointer(place, keep=2)
    step = checkpoints.restore(model, optimizer, None)
    while True:
        step += 1
        fill(model, optimizer, step)
        checkpoints.save(step, model, optimizer)


def test_kill_9_at_any_moment_leaves_a_checkpoint_to_restore(tmp_path, capsys):
    """Processes of the clean fork server, since each start of torch_xla takes seconds."""
    place, last, moments = str(tmp_path / "checkpoints"), 0, random.Random(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.common.loading", "train.common.checkpoint"])
    half_written = 0
    for kills in range(1, 50):
        if kills > 8 and half_written:
            break
        writer = context.Process(target=save_without_end, args=(place,))
        writer.start()
        deadline = time.monotonic() + 60
        while not any(int(path.parent.name[5:]) > last for path in Path(place).glob("step_*/COMPLETE")):
            assert time.monotonic() < deadline and writer.is_alive()
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.03))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        half_written += any(name.startswith(".writing-") for name in os.listdir(place))
        step, value = restored(place)
        assert step == value > last, "steps that were complete are lost"
        last = step
        # Nothing is ever torn but by an interrupted deletion, and each kill can leave one checkpoint too many.
        kept = Checkpointer(place).complete_steps()
        assert 1 <= len(kept) <= 2 + kills and kept[-1] == step
    assert half_written, "no kill came in the middle of a write: this test has shown nothing"


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_and_metadata_come_back(place):
    tensors = {
        "a": torch.randn(3, 4),
        "b.c": torch.arange(5),
        "d": torch.randn(4, 3).T.bfloat16(),
        "e": torch.tensor(2.5),
    }
    path, metadata = f"{place}/export/model.safetensors", {"classes": '["cat", "dög"]', "model": "resnet50"}
    save_weights(path, tensors, metadata)
    loaded, found = load_weights(path)
    assert found == metadata and equal(loaded, tensors)
    save_weights(path, {"a": tensors["a"]}, {})  # over the old one
    assert load_weights(path)[0].keys() == {"a"}


def test_exported_weights_are_plain_safetensors_that_others_may_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(str(path), {"a": torch.ones(3)}, {})
    assert torch.equal(safetensors.torch.load_file(path)["a"], torch.ones(3))
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_failed_export_leaves_the_old_file(tmp_path, monkeypatch):
    path = str(tmp_path / "model.safetensors")
    save_weights(path, {"a": torch.ones(3)}, {})
    fill_disk(monkeypatch, Checkpointer(path), 10)
    with pytest.raises(InputError, match=r"cannot write .*model\.safetensors: No space left on device"):
        save_weights(path, {"a": torch.zeros(3)}, {})
    assert torch.equal(load_weights(path)[0]["a"], torch.ones(3))


class Exploit:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def test_pickled_weights_are_refused_and_not_executed(tmp_path):
    path = str(tmp_path / "weights.pt")
    torch.save({"a": torch.ones(3), "b": Exploit()}, path)
    with pytest.raises(InputError, match=rf"{path} is not a safetensors file .*pickled weights are not loaded"):
        load_weights(path)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0garbage!"])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a safetensors file"):
        load_weights(str(path))


def test_missing_weights_are_an_input_error(place, tmp_path):
    with pytest.raises(InputError, match=f"there is no weights file {place}/none"):
        load_weights(f"{place}/none")
    with pytest.raises(InputError, match=f"cannot read the weights file {tmp_path}: Is a directory"):
        load_weights(str(tmp_path))


def test_nothing_here_unpickles():
    text = Path(checkpoint.__file__).read_text()
    assert "import pickle" not in text and "torch.load(" not in text.replace("safetensors.torch.load(", "")


# ---- steps that stay, and their mean ---------------------------------------------------------------------------------


def test_steps_that_do_not_divide_by_every_go_when_the_next_is_there(place):
    with Checkpointer(place, keep=2, every=10) as checkpoints:
        found = []
        for step in (7, 10, 13, 20, 27, 30, 33, 40):
            checkpoints.save(step, *on_cpu(step))
            checkpoints.wait()
            found.append(checkpoints.complete_steps())
    assert found == [[7], [10], [10, 13], [10, 20], [10, 20, 27], [20, 30], [20, 30, 33], [30, 40]]
    assert restored(place) == (40, 40)


def random_model(step: int):
    torch.manual_seed(step)
    model = Model()
    optimizer = sgd(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return model, optimizer


@pytest.mark.parametrize(
    ("saved", "keep", "averaged"),
    [
        ((10, 20, 30, 40), 3, [20, 30, 40]),
        ((10, 20, 23, 30, 37, 40), 3, [20, 30, 40]),  # stopped by signals on the way
        ((10, 20, 30, 33), 2, [30, 33]),  # the last is no multiple
        ((10, 13), 5, [10, 13]),
        ((3,), 5, [3]),
    ],
)
def test_the_mean_of_the_last_regular_checkpoints_and_the_last_of_all(mesh, place, saved, keep, averaged):
    with Checkpointer(place, keep=keep, every=10) as checkpoints:
        for step in saved:
            checkpoints.save(step, *random_model(step))
    model, _ = random_model(999)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert average(Checkpointer(place, keep=keep, every=10), model, mesh) == averaged
    models = [dict(random_model(step)[0].named_parameters()) for step in averaged]
    for name, parameter in model.named_parameters():
        mean = sum(each[name].detach().double() for each in models) / len(averaged)
        assert torch.equal(parameter, mean.float()), name
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert model.head.weight is model.embedding.weight


def test_a_mean_leaves_out_what_no_run_without_a_stop_would_have_saved(mesh, place):
    """A kill between the write of a checkpoint and the removal of the one before leaves both."""
    save_all(place, [10, 20, 23, 27, 30, 33])
    model, _ = on_cpu(-1.0)
    assert average(Checkpointer(place, keep=3, every=10), model, mesh) == [20, 30, 33]
    assert model.weight.unique().tolist() == [pytest.approx(83 / 3)]


def test_a_mean_on_the_device_keeps_ties_and_graphs(mesh, tmp_path):
    model, optimizer = build(mesh)
    step_fn = device.compiled(train_step, mesh)
    with Checkpointer(str(tmp_path), keep=2) as checkpoints:
        weights = []
        for step in (1, 2):
            run(mesh, step_fn, model, optimizer, step, step)
            checkpoints.save(step, model, optimizer)
            weights.append(model.embedding.weight.detach().cpu().clone())
        checkpoints.wait()
        assert average(checkpoints, model, mesh) == [1, 2]
    assert model.head.weight is model.embedding.weight and model.embedding.weight.device.type == "xla"
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(model.embedding.weight.detach().cpu(), ((weights[0].double() + weights[1]) / 2).float())
    for parameter in model.parameters():
        assert torch_xla._XLAC._get_xla_sharding_spec(parameter) == "{replicated}"
    run(mesh, step_fn, model, optimizer, 3, 4)  # strict: raises when it compiles again


@pytest.mark.parametrize("tear", [truncate, flip, remove_state])
def test_a_damaged_checkpoint_among_those_to_average_is_named(mesh, place, tear):
    with Checkpointer(place, keep=3, every=10) as checkpoints:
        for step in (10, 20, 25):
            checkpoints.save(step, *on_cpu(step))
    fs, root = opened(place)
    tear(fs, f"{root}/step_00000020")
    model, optimizer = on_cpu(-1.0)
    with pytest.raises(InputError, match="checkpoint of step 20 in .*, one of those to average, is damaged"):
        average(Checkpointer(place, keep=3, every=10), model, mesh)
    assert value_of(model, optimizer) == -1.0


# ---- other files -----------------------------------------------------------------------------------------------------


def test_files_come_back_and_a_folder_of_a_url_is_copied(place):
    for name, content in (("model.pt", b"\x00weights"), ("dict.de.txt", "ä 1\n".encode())):
        files.write_file(f"{place}/export/{name}", content)
        files.write_file(f"{place}/export/{name}", content + b"!")  # over the old one
        assert files.read_file(f"{place}/export/{name}") == content + b"!"
    folder = files.local_folder(f"{place}/export/")
    assert sorted(os.listdir(folder)) == ["dict.de.txt", "model.pt"]
    assert (Path(folder) / "model.pt").read_bytes() == b"\x00weights!"
    assert ("memory" in place) == (Path(folder).resolve() != Path(f"{place}/export").resolve())
    with pytest.raises(InputError, match=r"there is no weights file .*export/other.pt"):
        files.read_file(f"{place}/export/other.pt")
