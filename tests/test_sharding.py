"""Layers that are spread over the devices give the numbers of those that are not, whatever is cut and recomputed, and
their checkpoints do not know how they were cut. Pretraining stands for all: the scripts share train/common/sharding.
Fine-tuning, ResNet-50 and the Transformer show that they come through their own heads, steps and evaluations."""

import ctypes
import functools
import gc
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as xs
from helpers import environment, equal, exported, flags, losses, records, summary
from torch import nn
from transformers import ElectraConfig, ElectraForMaskedLM

from errors import InputError
from models import encoder_layers, encoders, objectives, partition
from models.encoders.record import Size
from models.transformer import ARCHITECTURES, Architecture
from train import glue, pretrain, resnet50, transformer
from train.common import accumulate, checkpoint, device, loading, sharding
from train.common.mesh import Layout
from train.common.sharding import gather, placement
from train.common.watch import _flops
from train.common.xla import backend, pin_sharding
from train.common.xla.recompute import recomputing_forward

TWO, FULL = Layout("data=2,model=2"), Layout(shard_state="full")
ALL = Layout("data=2,model=2", "full", remat=True)
COPIES = Layout("copies=2,data=2", "full")
OF_1_3B = replace(FULL, remat=True)  # RoBERTa of size 1.3b in docs/large_models.md
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # sums over devices are of other parts, and Adam divides by small numbers
STEPS = 4  # two traced, two repeated
SIZE = Size(layers=1, width=32, heads=4)
CPU = device.Mesh(torch.device("cpu"), None, 1, 0, 1, "CPU", "float32", True)
# The command line of train.pretrain, with that size.
SMALL = f"""
from models import encoders
from models.encoders.record import Size
encoders.SIZES["tiny"] = {SIZE}
from train import pretrain
from train.common import cli
cli.run(pretrain.main, pretrain.PRESETS)
"""


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(encoders.SIZES, "tiny", SIZE)
        patch.setitem(encoders.SIZES, "mini", replace(SIZE, layers=2))  # DistilBERT has half the layers
        dropped = {"attention_dropout": 0.1, "activation_dropout": 0.1}
        patch.setitem(ARCHITECTURES, "transformer_tiny", Architecture(32, 128, 4, 1, 1, **dropped))
        yield


def opened(mesh, layout: Layout, script=pretrain, **changes):
    """Returns a config, its mesh, data and state, as the script's `main` makes them; DistilBERT's teacher is new."""
    config = script.validate(replace(script.TINY, layout=layout, **changes))
    torch.manual_seed(0)  # the weights are new
    student = getattr(config, "model", "") == "distilbert"
    data = script.open_data(replace(config, model="bert") if student else config)
    if student:
        settings = encoders.configuration("distilbert", config.size, data.train.text.tokenizer, data.train.text.length)
        teacher = data.model.eval().requires_grad_(False)
        data = data._replace(model=objectives.language_model(settings, False, None), teacher=teacher)
    arranged = sharding.arranged(mesh, layout)
    state = script.build(config, data, arranged)
    state.model.train()
    return config, arranged, data, state


def taken(mesh, layout: Layout, script=pretrain, **changes):
    """Takes STEPS updates; returns the losses, all that they changed, on the host, and the state."""
    config, mesh, data, state = opened(mesh, layout, script, **changes)
    step, found, every = accumulate.SeededStep(script.train_step, mesh), [], config.update_every
    if every > 1:
        step = accumulate.AccumulatedStep(script.forward, script.update, state, ("loss", "words"), mesh)
    span = {"seed": 0, "start": 0, "stop": STEPS, "split": every, "update_every": every, "workers": 0}
    if every > 1:
        span["count"] = objectives.counts
    config = replace(config, seed=0)
    with loading.parallel_loader(data.train, config.batch_size, mesh, train=True, **span) as loader:
        for batch in loader:
            device.set_lr(state.optimizer, 3e-3)
            found.append(step(state, batch, config, mesh)["loss"])
    return device.fetch(found), checkpoint.to_host(checkpoint.named_state(state.model, state.optimizer)), state


@pytest.fixture(scope="module")
def whole(mesh):
    """whole(**changes): the same steps with everything whole on every device, each taken once."""
    return functools.cache(lambda **changes: taken(mesh, Layout(), **changes)[:2])


def without_rounding(state: dict) -> dict:
    """Leaves out what is rounding alone: no loss depends on the keys' bias, and fairseq's Adam divides by 1e-8."""
    return {name: value for name, value in state.items() if not name.endswith("k_proj.bias")}


def on_each_device(tensor: torch.Tensor) -> list[int]:
    """Returns the shape of the part that the first device has."""
    return list(torch_xla._XLAC._get_local_shards([tensor])[0][0][0].shape)


PARTS = {"optimizer": "lamb", "update_every": 2, "next_sentence": True}
IMAGES = {"script": resnet50, "batch_size": 32, "norm_groups": 4}


def slow(*values: object):
    """Returns a case that takes a quarter of a minute of a core and more, and has a sibling that takes less."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("layout", "changes", "weight", "moment"),
    [  # the parts of the [128, 32] of a feed-forward layer's first product, and of its moments
        (TWO, {}, [64, 32], [64, 32]),
        (FULL, PARTS, [32, 32], [32, 32]),
        (COPIES, {"model": "roberta"}, [64, 32], [64, 32]),
        (ALL, PARTS, [64, 16], [64, 16]),
        slow(replace(ALL, shard_state="optimizer"), {"model": "xlnet"}, [64, 32], [64, 16]),
        slow(Layout("data=1,model=4"), {"model": "distilbert", "size": "mini"}, [32, 32], [32, 32]),
        # of a convolution
        slow(Layout(shard_state="optimizer"), IMAGES, [128, 128, 3, 3], [32, 128, 3, 3]),
    ],
    ids=["model", "full", "copies", "all", "xlnet", "distilbert", "resnet50"],
)
def test_cut_and_recomputed_layers_give_the_same_numbers(layout, changes, weight, moment, mesh, whole, monkeypatch):
    monkeypatch.setattr(pin_sharding, "two_steps", lambda n: (-(-n // 2), min(n, 2)))  # as of a square slice
    (found, after, state), (expected, expected_after) = taken(mesh, layout, **changes), whole(**changes)
    assert found == pytest.approx(expected, rel=2e-6)
    torch.testing.assert_close(after, expected_after, **CLOSE)
    assert max(found) - min(found) > 0.01
    names = "0.ff.layer_1.weight", "0.ffn.lin1.weight", "0.intermediate.dense.weight", "layer4.0.conv2.weight"
    (parameter,) = (value for key, value in state.model.named_parameters() if key.endswith(names))
    assert on_each_device(parameter.data) == weight
    kept = state.optimizer.state[parameter]
    assert on_each_device(kept["momentum_buffer" if len(weight) == 4 else "exp_avg"]) == moment
    if parameter.grad is not None:  # the sums of an update in parts
        assert on_each_device(parameter.grad) == moment
    report = device.graph_report()
    assert report["recompilations"] == [] and report["repeated"] >= STEPS - 2


def test_the_state_of_weights_with_heads_is_cut_by_heads_where_the_devices_divide_them(mesh):
    layers = sharding.arranged(mesh, FULL).layers
    assert [placement._state_spec(torch.empty(8, n, 2), [None] * 3, layers, 0).index("data") for n in (4, 6)] == [1, 0]
    words = [placement._state_spec(torch.empty(n, 8), [None] * 2, layers, True) for n in (512, 1024)]
    assert words == [("data", None), (None, "data")]


def test_gradients_over_all_of_a_square_slice_are_cut_in_two_steps(mesh, monkeypatch):
    monkeypatch.setattr(pin_sharding, "two_steps", lambda devices: (2, 2))
    layer = device.to_device(nn.Linear(4, 8), sharding.arranged(mesh, FULL))
    found = torch.autograd.grad(layer(torch.ones(8, 4).to(mesh.device)).square().sum(), layer.weight)
    cuts = re.findall(r"devices=(\[[^\]]*\])", torch_xla._XLAC._get_xla_tensors_hlo(found))
    assert cuts[-2:] == ["[2,1,2]", "[4,1]"]


@pytest.mark.parametrize(("words", "summed"), [(515, []), (7, ["7"])])
@pytest.mark.parametrize("layout", [FULL, COPIES], ids=["full", "copies"])
def test_words_that_the_devices_do_not_divide_reduce_scatter_their_gradient_once(layout, words, summed, mesh):
    model = nn.Sequential(nn.Embedding(words, 8, padding_idx=1), nn.Linear(8, words))
    model[1].weight = model[0].weight
    ids = torch.arange(24).reshape(4, 6) * 3 % words

    def gradients(ids: torch.Tensor) -> tuple:
        mixed = model[1]((model[0](ids) + model[0](ids.flip(1))) / 2) @ torch.eye(words).to(ids.device)
        return torch.autograd.grad(mixed.square().sum(), [*model.parameters()])

    expected = gradients(ids)
    device.to_device(model, sharding.arranged(mesh, layout))
    ids = ids.to(mesh.device)
    found = gradients(ids)
    program = torch_xla._XLAC._get_xla_tensors_hlo(found)
    assert program.count(" reduce-scatter(") == (words > 7) and program.count(" scatter(") == 2
    # Between two copies half of the gradient travels, whose words are filled up to 384 a device; or a small one, whole.
    travels = summed or ["384"] * (layout == COPIES)
    assert re.findall(r"= f32\[(\d+),8\]\S* all-reduce\(", program) == travels
    assert f"= f32[6,{words}]{{1,0}} dot(" in program, "the head is not of a device's part"
    flops = _flops.count(torch_xla._XLAC._get_xla_tensors_hlo_proto(found), mesh.num_devices)
    # of a token: the head's products, in a per-device region; and those behind it
    assert flops == 2 * ids.numel() * (3 * 8 * words + 2 * words**2)
    torch.testing.assert_close([each.cpu() for each in found], [*expected], rtol=1e-5, atol=1e-5)
    with torch.autocast("xla", torch.bfloat16):
        program = torch_xla._XLAC._get_xla_tensors_hlo(gradients(ids))
    assert f"= f32[{words},8]{{1,0}} scatter(" in program and (
        words == 7 or "= bf16[" in program.split(" reduce-scatter(")[0][-50:]
    )
    # A step without the head keeps nothing for it; and it does not take the weights of before an update.
    step = device.compiled(lambda model, ids: F.linear(model[0](ids), model[1].weight).detach(), mesh)
    for _ in range(3):
        step(model, ids)
    hidden = model[0](input=ids)
    with torch.no_grad():
        model[0].weight.mul_(2)
    predicted = model[1](hidden)
    assert torch_xla._XLAC._get_xla_sharding_spec(predicted) == "{devices=[4,1,1]0,1,2,3}"
    torch.testing.assert_close(predicted.cpu(), (hidden @ model[0].weight.T + model[1].bias).cpu())


def test_recomputation_changes_no_bit(mesh, whole):
    found, after, _ = taken(mesh, Layout(remat=True), **PARTS)
    expected = whole(**PARTS)
    assert found == expected[0] and equal(after, expected[1])


def test_recomputation_on_plain_pytorch_changes_no_bit_either():
    config = pretrain.validate(pretrain.TINY)
    data, found = pretrain.open_data(config), []
    model = encoder_layers.fast_layers(data.model)
    batch = loading.as_tensors([data.train.example(row, np.random.default_rng(row)) for row in range(8)])
    for remat in (False, True):
        if remat:
            sharding.arranged(CPU, Layout(remat=True)).layers.arrange(model, encoders.rules)
        torch.manual_seed(1)
        loss = objectives.losses(model, None, batch)["loss"]
        found.append((loss, torch.autograd.grad(loss, [*model.parameters()])))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert found[0][0] > 4


def test_recomputation_refuses_another_dropout(mesh):
    """Its mask would be another one in the second pass."""
    layer = nn.Dropout()
    with pytest.raises(RuntimeError, match="draws other numbers"):
        recomputing_forward(layer)(torch.ones(4, requires_grad=True).to(mesh.device))


@pytest.fixture(scope="module")
def cut(mesh, tmp_path_factory):
    """The folder, metrics and config of a run with everything cut: of the tiny twin of RoBERTa's size 1.3b."""
    folder = tmp_path_factory.mktemp("cut")
    config = replace(pretrain.TINY, layout=ALL, steps=6, warmup_steps=2, log_every=1, eval_every=3, keep=3)
    config = replace(config, model="roberta", runs=str(folder), name="run")
    return folder / "run", pretrain.main(config), config


def begun_again(cut, tmp_path, layout: Layout):
    """Returns the config of the run as it was at the checkpoint before its last, with another layout."""
    shutil.copytree(cut[0], tmp_path / "run")
    shutil.rmtree(max((tmp_path / "run/checkpoints").iterdir()))
    os.remove(tmp_path / "run/summary.json")
    return replace(cut[2], layout=layout, runs=str(tmp_path))


def test_a_resumed_run_gives_the_numbers_of_one_that_was_not_stopped(cut, tmp_path, capsys):
    assert pretrain.main(begun_again(cut, tmp_path, ALL)) == cut[1]
    assert "resuming after step 3" in capsys.readouterr().out
    assert records(tmp_path / "run") == records(cut[0]) and equal(exported(tmp_path / "run"), exported(cut[0]))


@pytest.mark.parametrize(("devices", "layout"), [slow(8, OF_1_3B), (2, Layout("data = 1, model= 2"))])
def test_a_checkpoint_and_an_export_do_not_know_the_layout(devices, layout, cut, tmp_path):
    config = begun_again(cut, tmp_path, layout)
    command = [sys.executable, "-c", SMALL, "tiny", *flags(config, pretrain.TINY)]
    result = subprocess.run(command, env=environment(devices), capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and "resuming after step 3" in result.stdout, result.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(cut[0]), rel=2e-6)
    assert records(tmp_path / "run")[-1]["eval/loss"] == pytest.approx(cut[1]["loss"], rel=2e-6)
    torch.testing.assert_close(exported(tmp_path / "run"), exported(cut[0]), **CLOSE)


@pytest.mark.slow
def test_recomputation_in_bfloat16_changes_no_bit_where_every_rounding_is_done(tmp_path):
    """XLA leaves out roundings inside of its fusions, and the two programs have other ones."""
    config = replace(pretrain.TINY, precision="bfloat16", steps=6, warmup_steps=2, log_every=1, runs=str(tmp_path))
    variables = environment(1, XLA_FLAGS="--xla_allow_excess_precision=false")
    for name, remat in (("kept", False), ("again", True)):
        given = flags(replace(config, name=name, layout=Layout(remat=remat)), pretrain.TINY)
        command = [sys.executable, "-c", SMALL, "tiny", *given]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr
        assert summary(tmp_path / name)["report"]["repeated"] >= 4
    assert losses(tmp_path / "again") == losses(tmp_path / "kept") and len(losses(tmp_path / "kept")) == 6
    assert equal(exported(tmp_path / "again"), exported(tmp_path / "kept"))


FINE_TUNED = {"model": "fairseq-roberta", "lengths": (16,), "batch_size": 512, "epochs": 1, "save_every": 2}
TRANSLATED = {"dropout": 0.1, "lengths": (16,), "batch_tokens": 512, "pack": True, "share_embeddings": "none"}
TRANSLATED |= {"updates": 4, "warmup_updates": 2, "eval_every": 4, "save_every": 2}


@pytest.mark.parametrize(
    ("script", "changes", "name", "layouts"),
    [
        (glue, FINE_TUNED, "roberta.encoder.layer.0.intermediate.dense.weight", (Layout(), ALL)),
        slow(transformer, TRANSLATED, "decoder.layers.0.fc1.weight", (ALL, Layout())),
    ],
    ids=["glue", "transformer"],
)
def test_a_run_goes_on_under_another_layout(script, changes, name, layouts, tmp_path, monkeypatch, capsys):
    """It is evaluated, averaged and exported there, too."""
    states, build = [], script.build
    monkeypatch.setattr(script, "build", lambda *given: states.append(build(*given)) or states[-1])
    config = replace(script.TINY, **changes, update_every=2, log_every=1, keep=2, name="run")
    config = replace(config, layout=layouts[0], runs=str(tmp_path / "first"))
    first = tmp_path / "first/run", script.main(config), config
    found = script.main(begun_again(first, tmp_path, layouts[1]))
    assert "resuming after step 2" in capsys.readouterr().out
    cut = states[layouts.index(ALL)]
    parameter = cut.model.get_parameter(name)
    moment = cut.optimizer.state[parameter]["exp_avg"]
    assert on_each_device(parameter.data) == on_each_device(parameter.grad) == on_each_device(moment) == [64, 16]
    assert found == pytest.approx(first[1], rel=2e-6)
    assert losses(tmp_path / "run") == pytest.approx(losses(first[0]), rel=2e-6) and len(losses(first[0])) == 4
    torch.testing.assert_close(*(without_rounding(exported(path)) for path in (tmp_path / "run", first[0])), **CLOSE)


@pytest.mark.parametrize(
    ("script", "flags", "pattern"),
    [
        (pretrain, "--mesh data=3", "--mesh data=3 is for 3 devices.*there are 4.*: leave it out for data=4$"),
        (pretrain, "--mesh model=3", "--mesh model=3 is for 3 devices.*there are 4.*data=2,model=2"),
        (pretrain, "--mesh data=2,rows=2", "'rows=2'.*copies, data and model"),
        (pretrain, "--mesh model=2,model=2", "'model=2'.*each once"),
        (pretrain, "--mesh data=2,model=٢", "model=٢.*at least 1"),
        (pretrain, "--mesh data", "--mesh data has data=;.*at least 1"),
        (pretrain, "--mesh model=4", "model=4.*2 heads.*divisor of 2"),
        # Without a table a model has its state cut only.
        (resnet50, "--remat", "--remat needs rules, which ResNet does not have: leave it out"),
        (resnet50, "--mesh data=2,model=2", "--mesh data=2,model=2 needs rules.*leave it out"),
    ],
)
def test_values_that_are_refused(refused, script, flags, pattern, monkeypatch):
    monkeypatch.setitem(encoders.SIZES, "tiny", Size(layers=2, width=64, heads=2))
    refused(script, f"tiny {flags}", pattern)


def test_one_device_of_plain_pytorch_has_nothing_to_cut():
    for layout, flag in ((TWO, "--mesh is data=2,model=2"), (FULL, "--shard-state is full")):
        with pytest.raises(InputError, match=f"{flag}, but --device cpu runs on one device.*--device xla"):
            sharding.arranged(CPU, layout)


def test_cut_tensors_are_made_whole_by_a_program_for_each_shape_one_at_a_time(mesh, monkeypatch):
    """torch_xla would compile one for each tensor that is read, each time."""
    spmd = sharding.arranged(mesh, TWO).layers.spmd
    numbers = [torch.randn(8, 6), torch.randn(8, 6), torch.arange(8), torch.randn(3)]
    tensors = [each.to(mesh.device) for each in numbers]
    for tensor, axes in zip(tensors, (("data", "model"), ("data", "model"), ("model",), (None,)), strict=True):
        device.annotate(tensor, spmd, axes)
    torch_xla.sync()
    graphs, waits, wait = backend.compilations(), [], pin_sharding.xm.wait_device_ops
    monkeypatch.setattr(pin_sharding.xm, "wait_device_ops", lambda: waits.append(wait()))
    for _ in range(2):
        assert all(map(torch.equal, gather.to_host(tensors, True), numbers))
    assert gather.to_host(tensors, False) == [] and backend.compilations() == graphs + 2
    assert len(waits) == 3 * 3  # tensors that are cut
    assert [on_each_device(tensor) for tensor in tensors] == [[4, 3], [4, 3], [4], [3]]
    assert gather.on_every_device(elsewhere := torch.ones(2, device="meta")) is elsewhere  # a GPU's, with --remat


KINDS = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.float64, torch.uint8, torch.float16, torch.int32]


def test_a_file_in_parts_is_the_librarys_and_comes_back_tensor_by_tensor(tmp_path):
    tensors = {f'ü"{number}': torch.randn(3, number).T.to(kind) for number, kind in enumerate(KINDS)}
    tensors |= {"none": torch.tensor(2.5), "a": torch.arange(3)}
    content = b"".join(map(bytes, gather.pack(tensors)))
    assert content == safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    for name in ("x" * length for length in range(8)):  # the header is padded to a multiple of eight bytes
        one = {name: torch.ones(1)}
        assert b"".join(map(bytes, gather.pack(one))) == safetensors.torch.save(one)
    (tmp_path / "file").write_bytes(content)
    place, mark = (fsspec.filesystem("file"), str(tmp_path / "file")), checkpoint._checksum([content])
    assert equal(gather.load(*place, mark), tensors)
    (tmp_path / "file").write_bytes(content[:-1] + b"!")
    with pytest.raises(ValueError, match=f"file has {len(content)} bytes that do not match"):
        gather.load(*place, mark)


def test_no_host_holds_a_state_twice(mesh, tmp_path):
    """By the most memory that this process has in the meantime; without layers a save takes two states more."""
    model, size = nn.ModuleList([nn.Linear(512, 512) for _ in range(64)]), 64 * 2**20
    optimizer = torch.optim.SGD(model.parameters())

    def memory(line: str) -> int:
        return int(re.search(rf"{line}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    def growth(work) -> float:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or a part of the growth would be in pages that earlier tests have given free
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        work()
        return (memory("VmHWM") - before) / size

    layers, state = sharding.arranged(mesh, FULL).layers, []
    with checkpoint.Checkpointer(str(tmp_path), layers=layers) as checkpoints:
        saving = growth(lambda: (checkpoints.save(1, model, optimizer), checkpoints.wait()))
        checkpoints._writer.submit(int).result()  # its thread has let go of what it wrote
        reading = growth(lambda: state.append(checkpoints.read(1)))
        loading = growth(lambda: checkpoint.load_state(*state, model, optimizer, mesh))
    assert 0.9 < saving < 1.5 and 0.9 < reading < 1.5 and loading < 0.2, (saving, reading, loading)


def test_the_tpus_compiler_has_its_flags_and_a_cut_states_reduce_scatters_before_it_is_loaded(mesh, monkeypatch):
    given = "--a=b --xla_tpu_enable_reduce_scatter_legalizer=false --noxla_tpu_input_conv_multi_users"
    flags = " ".join([backend.STACK, *backend.FUSIONS.split()[1:], "--xla_tpu_scoped_vmem_limit_kib=7"])
    seen = []
    monkeypatch.setattr(backend.xr, "device_type", lambda: seen.append(os.environ["LIBTPU_INIT_ARGS"]))
    for layout in (TWO, FULL):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
        device.setup(0, layout=layout, vmem_kib=7)
    ours = f"--xla_tpu_enable_windowed_einsum_for_reduce_scatter=false {flags}"
    assert seen == [f"{given} {flags}", f"{given} {ours}"]


def test_on_a_pod_batches_come_cut_over_all_devices(mesh):
    """Each host uploads its own rows, for which torch_xla takes a mesh with one axis only."""
    pod = sharding.arranged(replace(mesh, process_count=2), Layout("data = 2, model= 2"))
    assert pod.spmd is mesh.spmd and pod.layers.spmd.mesh_shape == (1, 2, 2)


def test_a_state_is_cut_over_32_devices_at_most_unless_the_mesh_says_otherwise(mesh, monkeypatch):
    for devices, layout, sizes in (
        (32, FULL, (1, 32, 1)),
        (256, FULL, (8, 32, 1)),
        (48, replace(FULL, shard_state="optimizer"), (3, 16, 1)),
        (256, Layout(remat=True), (1, 256, 1)),
        (64, replace(FULL, mesh="data=64"), (1, 64, 1)),
        (64, replace(FULL, mesh="copies=4,data=8,model=2"), (4, 8, 2)),
    ):
        monkeypatch.setattr(backend.xr, "global_runtime_device_count", lambda devices=devices: devices)
        spmd = xs.Mesh(np.arange(devices), (devices,), ("data",))
        layers = sharding.arranged(replace(mesh, num_devices=devices, spmd=spmd), layout).layers
        assert tuple(layers.axes.values()) == sizes


@pytest.mark.parametrize("given", ["copies=4", "model=4"])
def test_a_state_that_would_not_be_cut_is_refused(given, mesh):
    with pytest.raises(InputError, match=f"--shard-state full cuts .* over data, of which --mesh {given} has one"):
        sharding.arranged(mesh, replace(FULL, mesh=given))
    with pytest.raises(InputError, match="--shard-state full would cut nothing.*4 devices .* no matrix .* of Linear"):
        sharding.arranged(mesh, FULL).layers.arrange(nn.Linear(5, 6), None)


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        (r"attention\.query\.weight", "fits no parameter of BertForMaskedLM.*partition.py"),
        (r"dense\.weight", "the rules for .*dense.weight"),
        (r"predictions\.transform\.dense\.bias", r"\[32\].*one must fit"),
    ],
)
def test_a_rule_that_does_not_fit_is_an_error(rule, pattern, mesh):
    data = pretrain.open_data(pretrain.validate(pretrain.TINY))
    known = encoders.rules(data.model)
    wrong = replace(known, parameters=known.parameters | {rule: partition.OUT})
    with pytest.raises(InputError, match=pattern):
        device.to_device(data.model, sharding.arranged(mesh, TWO), lambda _: wrong)


def test_the_table_of_a_model_says_where_its_parameters_lie_and_one_without_is_refused(mesh):
    with pytest.raises(InputError, match="bert, distilbert, roberta, xlnet, .*not electra.*models/encoders"):
        encoders.rules(ElectraForMaskedLM(ElectraConfig(num_hidden_layers=0, vocab_size=8)))
    *_, state = opened(mesh, replace(TWO, shard_state="optimizer"), model="roberta")
    line = next(line for line in sharding.placement_table(state.model) if "*.intermediate.dense.weight" in line)
    assert line.startswith("roberta.encoder.layer.*.intermediate.dense.weight ")
    assert " 1 x 128 x 32 " in line and "[model, -]" in line and line.endswith("state [model, data]")
