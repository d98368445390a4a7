"""Layers that are spread over the devices give the numbers of those that are not.

Whatever is cut and recomputed; and their checkpoints do not know how they were cut. Pretraining
stands for all: the scripts share train/common/sharding. Fine-tuning, ResNet-50 and the Transformer
show that they come through their own heads, steps and evaluations.
"""

import ctypes
import functools
import gc
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as xs
from helpers import ONE_CPU, environment, equal, exported, flags, losses, records, summary
from torch import Tensor, nn
from transformers import ElectraConfig, ElectraForMaskedLM

from errors import InputError
from models import encoder_layers, encoders, objectives, partition
from models.encoders.record import Size
from models.transformer import ARCHITECTURES, Architecture
from train import glue, pretrain, resnet50, transformer
from train.common import accumulate, checkpoint, device, loading, sharding
from train.common.mesh import WHOLE, Layout
from train.common.sharding import gather, placement
from train.common.watch import _flops
from train.common.xla import backend, pin_sharding
from train.common.xla.recompute import recomputing_forward

TWO = Layout("data=2,model=2")
FULL = Layout(shard_state="full")
ALL = Layout("data=2,model=2", "full", remat=True)
COPIES = Layout("copies=2,data=2", "full")
OF_1_3B = replace(FULL, remat=True)  # RoBERTa of size 1.3b in docs/large_models.md
# Sums over devices are of other parts, and Adam divides by small numbers.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
STEPS = 4  # two traced, two repeated
SIZE = Size(layers=1, width=32, heads=4)
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
    """Makes the models of all tests smaller."""
    architecture = Architecture(
        dim=32,
        ffn_dim=128,
        heads=4,
        encoder_layers=1,
        decoder_layers=1,
        attention_dropout=0.1,
        activation_dropout=0.1,
    )
    two_layers = replace(SIZE, layers=2)  # DistilBERT has half of them
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(encoders.SIZES, "tiny", SIZE)
        patch.setitem(encoders.SIZES, "mini", two_layers)
        patch.setitem(ARCHITECTURES, "transformer_tiny", architecture)
        yield


def slow(*values: object, id: str | None = None):
    """Returns a case that takes a quarter of a minute of a core and more.

    It has a sibling that takes less.
    """
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def on_each_device(tensor: Tensor) -> list[int]:
    """Returns the shape of the part that the first device has."""
    return list(torch_xla._XLAC._get_local_shards([tensor])[0][0][0].shape)


# The numbers of a few steps


@dataclass
class OpenRun:
    """What the `main` of a script makes before its first step."""

    config: Any
    mesh: device.Mesh
    data: Any
    state: Any


def open_run(mesh, layout: Layout, script=pretrain, **changes) -> OpenRun:
    """Opens a tiny run; DistilBERT's teacher is new."""
    config = script.validate(replace(script.TINY, layout=layout, **changes))
    torch.manual_seed(0)  # the weights are new
    if getattr(config, "model", "") == "distilbert":
        data = with_new_teacher(config)
    else:
        data = script.open_data(config)
    arranged = sharding.arranged(mesh, layout)
    state = script.build(config, data, arranged)
    state.model.train()
    return OpenRun(config, arranged, data, state)


def with_new_teacher(config: pretrain.Config) -> pretrain.Data:
    """Opens the data of DistilBERT, whose teacher is a new BERT."""
    data = pretrain.open_data(replace(config, model="bert"))
    text = data.train.text
    settings = encoders.new_configuration("distilbert", config.size, text.tokenizer, text.length)
    teacher = data.model.eval().requires_grad_(False)
    student = objectives.language_model(settings, False, None)
    return data._replace(model=student, teacher=teacher)


@dataclass
class Updates:
    """What STEPS updates gave."""

    losses: list[float]
    changed: dict[str, Tensor]  # all that they changed, on the host
    state: Any


def take_updates(mesh, layout: Layout, script=pretrain, **changes) -> Updates:
    """Takes STEPS updates of a tiny run."""
    run = open_run(mesh, layout, script, **changes)
    update_every = run.config.update_every
    if update_every > 1:
        step = accumulate.AccumulatedStep(
            script.forward, script.update, run.state, ("loss", "words"), run.mesh
        )
    else:
        step = accumulate.SeededStep(script.train_step, run.mesh)

    config = replace(run.config, seed=0)
    found = []
    with loading.parallel_loader(
        run.data.train,
        config.batch_size,
        run.mesh,
        train=True,
        seed=0,
        start=0,
        stop=STEPS,
        micro_batches=update_every,
        update_every=update_every,
        counts_per_row=objectives.counts if update_every > 1 else None,
        workers=0,
    ) as loader:
        for batch in loader:
            device.set_lr(run.state.optimizer, 3e-3)
            found.append(step(run.state, batch, config, run.mesh)["loss"])

    named = checkpoint.named_state(run.state.model, run.state.optimizer)
    return Updates(device.fetch(found), checkpoint.to_host(named), run.state)


@pytest.fixture(scope="module")
def whole(mesh):
    """whole(**changes): the same steps with everything whole on every device, each taken once."""

    @functools.cache
    def whole(**changes) -> Updates:
        found = take_updates(mesh, WHOLE, **changes)
        return replace(found, state=None)  # not kept

    return whole


ACCUMULATED = {"optimizer": "lamb", "update_every": 2, "next_sentence": True}
IMAGES = {"script": resnet50, "batch_size": 32, "norm_groups": 4}
# Of a feed-forward layer's first product, [128, 32]; of a convolution.
MATRICES = (
    "0.ff.layer_1.weight",
    "0.ffn.lin1.weight",
    "0.intermediate.dense.weight",
    "layer4.0.conv2.weight",
)


def steps_of_a_square_slice(devices: int) -> tuple[int, int]:
    return math.ceil(devices / 2), min(devices, 2)


@pytest.mark.parametrize(
    ("layout", "changes", "weight", "moment"),  # the shapes of one of MATRICES on a device
    [
        slow(TWO, {}, [64, 32], [64, 32], id="model"),
        slow(FULL, ACCUMULATED, [32, 32], [32, 32], id="full"),
        slow(COPIES, {"model": "roberta"}, [64, 32], [64, 32], id="copies"),
        pytest.param(ALL, ACCUMULATED, [64, 16], [64, 16], id="all"),  # the most of them at once
        slow(
            replace(ALL, shard_state="optimizer"),
            {"model": "xlnet"},
            [64, 32],
            [64, 16],
            id="xlnet",
        ),
        slow(
            Layout("data=1,model=4"),
            {"model": "distilbert", "size": "mini"},
            [32, 32],
            [32, 32],
            id="distilbert",
        ),
        slow(
            Layout(shard_state="optimizer"),
            IMAGES,
            [128, 128, 3, 3],
            [32, 128, 3, 3],
            id="resnet50",
        ),
    ],
)
def test_cut_and_recomputed_layers_give_the_same_numbers(
    layout, changes, weight, moment, mesh, whole, monkeypatch
):
    monkeypatch.setattr(pin_sharding, "two_steps", steps_of_a_square_slice)
    found = take_updates(mesh, layout, **changes)
    expected = whole(**changes)

    assert found.losses == pytest.approx(expected.losses, rel=2e-6)
    torch.testing.assert_close(found.changed, expected.changed, **CLOSE)
    assert max(found.losses) - min(found.losses) > 0.01

    named = found.state.model.named_parameters()
    (parameter,) = [value for name, value in named if name.endswith(MATRICES)]
    assert on_each_device(parameter.data) == weight
    is_convolution = len(weight) == 4  # which SGD trains
    name = "momentum_buffer" if is_convolution else "exp_avg"
    assert on_each_device(found.state.optimizer.state[parameter][name]) == moment
    if parameter.grad is not None:  # the sums of gradient accumulation
        assert on_each_device(parameter.grad) == moment

    report = device.graph_report()
    assert report["recompilations"] == []
    assert report["repeated"] >= STEPS - 2


# How a state is cut


def test_a_state_is_cut_by_heads_where_devices_divide_them(mesh):
    layers = sharding.arranged(mesh, FULL).layers

    def cut_dimension(heads: int) -> int:
        spec = placement._state_spec(torch.empty(8, heads, 2), [None] * 3, layers, False)
        return spec.index("data")

    assert cut_dimension(4) == 1
    assert cut_dimension(6) == 0


@pytest.mark.parametrize(("words", "expected"), [(512, ("data", None)), (1024, (None, "data"))])
def test_a_state_of_many_words_is_cut_along_its_width(words, expected, mesh):
    layers = sharding.arranged(mesh, FULL).layers
    spec = placement._state_spec(torch.empty(words, 8), [None] * 2, layers, True)
    assert spec == expected


def test_gradients_over_a_square_slice_are_cut_in_two_steps(mesh, monkeypatch):
    monkeypatch.setattr(pin_sharding, "two_steps", lambda devices: (2, 2))
    layer = device.to_device(nn.Linear(4, 8), sharding.arranged(mesh, FULL))
    result = layer(torch.ones(8, 4).to(mesh.device))
    found = torch.autograd.grad(result.square().sum(), layer.weight)

    program = torch_xla._XLAC._get_xla_tensors_hlo(found)

    cuts = re.findall(r"devices=(\[[^\]]*\])", program)
    assert cuts[-2:] == ["[2,1,2]", "[4,1]"]


@pytest.mark.parametrize(
    ("devices", "layout", "sizes"),  # of the axes copies, data and model
    [
        (32, FULL, (1, 32, 1)),
        (256, FULL, (8, 32, 1)),
        (48, replace(FULL, shard_state="optimizer"), (3, 16, 1)),
        (256, Layout(remat=True), (1, 256, 1)),
        (64, replace(FULL, mesh="data=64"), (1, 64, 1)),
        (64, replace(FULL, mesh="copies=4,data=8,model=2"), (4, 8, 2)),
    ],
)
def test_a_state_is_cut_over_32_devices_at_most(devices, layout, sizes, mesh, monkeypatch):
    """Unless the mesh says otherwise."""
    monkeypatch.setattr(backend.xr, "global_runtime_device_count", lambda: devices)
    spmd = xs.Mesh(np.arange(devices), (devices,), ("data",))
    pod = replace(mesh, num_devices=devices, spmd=spmd)
    layers = sharding.arranged(pod, layout).layers
    assert tuple(layers.axes.values()) == sizes


def of_slices(mesh, devices: int, slices: int, monkeypatch):
    """Returns a mesh of so many devices in so many slices, which need not be there."""
    monkeypatch.setattr(backend.xr, "global_runtime_device_count", lambda: devices)
    spmd = xs.Mesh(np.arange(devices), (devices,), ("data",))
    return replace(mesh, num_devices=devices, spmd=spmd, slices=slices)


@pytest.mark.parametrize(
    ("devices", "slices", "layout", "sizes"),  # of the axes copies, data and model
    [
        (16, 2, FULL, (2, 8, 1)),
        (12, 3, replace(FULL, shard_state="optimizer"), (3, 4, 1)),
        (256, 2, FULL, (8, 32, 1)),
        (96, 2, FULL, (6, 16, 1)),  # 32 divides all devices, and no slice
        (16, 2, Layout(remat=True), (1, 16, 1)),
        (16, 2, replace(FULL, mesh="copies=4,data=2,model=2"), (4, 2, 2)),
    ],
)
def test_each_slice_has_a_copy_of_a_state(
    devices, slices, layout, sizes, mesh, monkeypatch, capsys
):
    pod = of_slices(mesh, devices, slices, monkeypatch)
    layers = sharding.arranged(pod, layout).layers
    assert tuple(layers.axes.values()) == sizes
    assert capsys.readouterr().err == ""


def test_a_state_that_is_gathered_between_slices_is_warned_of(mesh, monkeypatch, capsys):
    pod = of_slices(mesh, 16, 2, monkeypatch)
    for layout in (replace(FULL, mesh="data=16"), replace(FULL, mesh="data=8,model=2")):
        sharding.arranged(pod, layout)
        said = capsys.readouterr().err
        assert re.search(f"--mesh {layout.mesh} .* 16 devices, and a slice has 8: .*copies", said)

    sharding.arranged(pod, Layout("data=8,model=2"))  # without a state nothing is gathered
    sharding.arranged(replace(pod, process_index=1), replace(FULL, mesh="data=16"))
    assert capsys.readouterr().err == ""


def test_a_layer_that_two_slices_would_share_is_refused(mesh, monkeypatch):
    pod = of_slices(mesh, 12, 3, monkeypatch)
    with pytest.raises(InputError, match="model=6, and a slice has 4 .* that divides 4"):
        sharding.arranged(pod, Layout("data=2,model=6"))


def test_slices_of_one_device_cut_no_state(mesh):
    with pytest.raises(InputError, match="cuts a state over data, of which each slice has one"):
        sharding.arranged(replace(mesh, slices=4), FULL)


@pytest.mark.slow  # the case "copies" above has the same axes
def test_two_slices_give_the_numbers_of_one(mesh, whole):
    found = take_updates(replace(mesh, slices=2), FULL)

    assert found.losses == pytest.approx(whole().losses, rel=2e-6)
    torch.testing.assert_close(found.changed, whole().changed, **CLOSE)
    named = found.state.model.named_parameters()
    (parameter,) = [value for name, value in named if name.endswith(MATRICES)]
    assert on_each_device(parameter.data) == [64, 32]  # cut in two, and not in four


# The head of a model whose words the devices do not divide


class TiedWords:
    """An embedding and a head of the same weights, 24 tokens, and gradients through both."""

    def __init__(self, words: int):
        self.words = words
        self.model = nn.Sequential(nn.Embedding(words, 8, padding_idx=1), nn.Linear(8, words))
        self.model[1].weight = self.model[0].weight
        self.ids = torch.arange(24).reshape(4, 6) * 3 % words

    def gradients(self, ids: Tensor) -> tuple[Tensor, ...]:
        embedding, head = self.model
        predicted = head((embedding(ids) + embedding(ids.flip(1))) / 2)
        mixed = predicted @ torch.eye(self.words).to(ids.device)
        return torch.autograd.grad(mixed.square().sum(), [*self.model.parameters()])

    def to_devices(self, mesh, layout: Layout) -> Tensor:
        """Moves the model there; returns the tokens."""
        device.to_device(self.model, sharding.arranged(mesh, layout))
        return self.ids.to(mesh.device)


both_layouts = pytest.mark.parametrize("layout", [FULL, COPIES], ids=["full", "copies"])


@pytest.mark.parametrize("words", [515, 7])
@both_layouts
def test_undivided_words_reduce_scatter_their_gradient_once(layout, words, mesh):
    tied = TiedWords(words)
    expected = tied.gradients(tied.ids)
    ids = tied.to_devices(mesh, layout)

    found = tied.gradients(ids)

    program = torch_xla._XLAC._get_xla_tensors_hlo(found)
    assert program.count(" reduce-scatter(") == (words > 7)
    assert program.count(" scatter(") == 2
    if words == 7:
        travels = ["7"]  # a small one, whole
    elif layout == COPIES:
        # Half of the gradient, whose words are filled up to 384 a device.
        travels = ["384"]
    else:
        travels = []
    assert re.findall(r"= f32\[(\d+),8\]\S* all-reduce\(", program) == travels
    head = f"= f32[6,{words}]{{1,0}} dot("
    assert head in program, "the head is not of a device's part"

    proto = torch_xla._XLAC._get_xla_tensors_hlo_proto(found)
    # The head's products, in a per-device region; and those behind it.
    of_a_token = 2 * (3 * 8 * words + 2 * words**2)
    assert _flops.count(proto, mesh.num_devices) == ids.numel() * of_a_token
    on_host = tuple(each.cpu() for each in found)
    torch.testing.assert_close(on_host, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("words", [515, 7])
@both_layouts
def test_undivided_words_travel_in_bfloat16_under_autocast(layout, words, mesh):
    tied = TiedWords(words)
    ids = tied.to_devices(mesh, layout)
    with torch.autocast("xla", torch.bfloat16):
        program = torch_xla._XLAC._get_xla_tensors_hlo(tied.gradients(ids))

    assert f"= f32[{words},8]{{1,0}} scatter(" in program
    if words > 7:
        before, _, _ = program.partition(" reduce-scatter(")
        assert "= bf16[" in before[-50:]


@pytest.mark.parametrize("words", [515, 7])
@both_layouts
def test_a_step_without_the_head_keeps_nothing_for_it(layout, words, mesh):
    """And the head does not take the weights of before an update."""
    tied = TiedWords(words)
    ids = tied.to_devices(mesh, layout)
    embedding, head = tied.model

    def headless(model, ids):
        return F.linear(model[0](ids), model[1].weight).detach()

    step = device.compiled(headless, mesh)
    for _ in range(3):
        step(tied.model, ids)

    hidden = embedding(input=ids)
    with torch.no_grad():
        embedding.weight.mul_(2)
    predicted = head(hidden)
    spec = torch_xla._XLAC._get_xla_sharding_spec(predicted)
    assert spec == "{devices=[4,1,1]0,1,2,3}"
    expected = (hidden @ embedding.weight.T + head.bias).cpu()
    torch.testing.assert_close(predicted.cpu(), expected)


# Recomputation


def test_recomputation_changes_no_bit(mesh, whole):
    found = take_updates(mesh, Layout(remat=True), **ACCUMULATED)
    expected = whole(**ACCUMULATED)
    assert found.losses == expected.losses
    assert equal(found.changed, expected.changed)


def test_recomputation_on_plain_pytorch_changes_no_bit_either():
    config = pretrain.validate(pretrain.TINY)
    data = pretrain.open_data(config)
    model = encoder_layers.fast_layers(data.model)
    examples = [data.train.example(row, np.random.default_rng(row)) for row in range(8)]
    batch = loading.as_tensors(examples)

    def loss_and_gradients() -> tuple[Tensor, tuple[Tensor, ...]]:
        torch.manual_seed(1)
        loss = objectives.losses(model, None, batch)["loss"]
        return loss, torch.autograd.grad(loss, [*model.parameters()])

    kept = loss_and_gradients()
    sharding.arranged(ONE_CPU, Layout(remat=True)).layers.arrange(model, encoders.rules)
    recomputed = loss_and_gradients()

    torch.testing.assert_close(recomputed, kept, rtol=0, atol=0)
    assert kept[0] > 4


def test_recomputation_refuses_another_dropout(mesh):
    """Its mask would be another one in the second pass."""
    forward = recomputing_forward(nn.Dropout())
    with pytest.raises(RuntimeError, match="draws other numbers"):
        forward(torch.ones(4, requires_grad=True).to(mesh.device))


def pretrain_small(config: pretrain.Config, variables: dict[str, str]) -> str:
    """Trains in a process of its own; returns its output."""
    command = [sys.executable, "-c", SMALL, "tiny", *flags(config, pretrain.TINY)]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_recomputation_in_bfloat16_changes_no_bit(tmp_path):
    """Where every rounding is done.

    XLA leaves out roundings inside of its fusions, and the two programs have other ones.
    """
    config = replace(
        pretrain.TINY,
        precision="bfloat16",
        steps=6,
        warmup_steps=2,
        log_every=1,
        runs=str(tmp_path),
    )
    variables = environment(1, XLA_FLAGS="--xla_allow_excess_precision=false")
    kept = tmp_path / "kept"
    again = tmp_path / "again"
    pretrain_small(replace(config, name="kept"), variables)
    pretrain_small(replace(config, name="again", layout=Layout(remat=True)), variables)

    for folder in (kept, again):
        assert summary(folder)["report"]["repeated"] >= 4
    assert losses(again) == losses(kept)
    assert len(losses(kept)) == 6
    assert equal(exported(again), exported(kept))


# Runs


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    folder: Path
    metrics: dict[str, float]
    config: Any


@pytest.fixture(scope="module")
def cut(mesh, tmp_path_factory) -> Finished:
    """A run with everything cut: of the tiny twin of RoBERTa's size 1.3b."""
    folder = tmp_path_factory.mktemp("cut")
    config = replace(
        pretrain.TINY,
        model="roberta",
        layout=ALL,
        steps=6,
        warmup_steps=2,
        log_every=1,
        eval_every=3,
        keep=3,
        runs=str(folder),
        name="run",
    )
    return Finished(folder / "run", pretrain.main(config), config)


def begun_again(run: Finished, tmp_path, layout: Layout):
    """Copies a run as it was at the checkpoint before its last.

    Returns:
        its config with another layout.
    """
    shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(max((tmp_path / "run/checkpoints").iterdir()))
    os.remove(tmp_path / "run/summary.json")
    return replace(run.config, layout=layout, runs=str(tmp_path))


@pytest.mark.slow  # test_a_run_resumes_under_another_layout has a quick case
def test_a_resumed_run_gives_the_numbers_of_one_not_stopped(cut, tmp_path, capsys):
    assert pretrain.main(begun_again(cut, tmp_path, ALL)) == cut.metrics
    assert "resuming after step 3" in capsys.readouterr().out
    assert records(tmp_path / "run") == records(cut.folder)
    assert equal(exported(tmp_path / "run"), exported(cut.folder))


@pytest.mark.parametrize(
    ("devices", "layout"), [slow(8, OF_1_3B), slow(2, Layout("data = 1, model= 2"))]
)
def test_a_checkpoint_and_an_export_do_not_know_the_layout(devices, layout, cut, tmp_path):
    config = begun_again(cut, tmp_path, layout)
    output = pretrain_small(config, environment(devices))
    assert "resuming after step 3" in output

    resumed = tmp_path / "run"
    assert losses(resumed) == pytest.approx(losses(cut.folder), rel=2e-6)
    last = records(resumed)[-1]["eval/loss"]
    assert last == pytest.approx(cut.metrics["loss"], rel=2e-6)
    torch.testing.assert_close(exported(resumed), exported(cut.folder), **CLOSE)


def without_rounding(state: dict) -> dict:
    """Leaves out what is rounding alone.

    No loss depends on the keys' bias, and fairseq's Adam divides by 1e-8.
    """
    return {name: value for name, value in state.items() if not name.endswith("k_proj.bias")}


FINE_TUNED = {
    "model": "fairseq-roberta",
    "lengths": (16,),
    "batch_size": 512,
    "epochs": 1,
    "save_every": 2,
}
TRANSLATED = {
    "dropout": 0.1,
    "lengths": (16,),
    "batch_tokens": 512,
    "pack": True,
    "share_embeddings": "none",
    "updates": 4,
    "warmup_updates": 2,
    "eval_every": 4,
    "save_every": 2,
}


@pytest.mark.parametrize(
    ("script", "changes", "name", "layouts"),
    [
        pytest.param(
            glue,
            FINE_TUNED,
            "roberta.encoder.layer.0.intermediate.dense.weight",
            (WHOLE, ALL),
            id="glue",
        ),
        slow(
            transformer,
            TRANSLATED,
            "decoder.layers.0.fc1.weight",
            (ALL, WHOLE),
            id="transformer",
        ),
    ],
)
def test_a_run_resumes_under_another_layout(
    script, changes, name, layouts, tmp_path, monkeypatch, capsys
):
    """It is evaluated, averaged and exported there, too."""
    states = []
    build = script.build

    def recorded_build(*arguments):
        states.append(build(*arguments))
        return states[-1]

    monkeypatch.setattr(script, "build", recorded_build)
    first_layout, second_layout = layouts
    config = replace(
        script.TINY,
        **changes,
        update_every=2,
        log_every=1,
        keep=2,
        layout=first_layout,
        runs=str(tmp_path / "first"),
        name="run",
    )
    first = Finished(tmp_path / "first/run", script.main(config), config)
    metrics = script.main(begun_again(first, tmp_path, second_layout))
    assert "resuming after step 2" in capsys.readouterr().out

    cut = states[layouts.index(ALL)]
    parameter = cut.model.get_parameter(name)
    moment = cut.optimizer.state[parameter]["exp_avg"]
    for tensor in (parameter.data, parameter.grad, moment):
        assert on_each_device(tensor) == [64, 16]

    resumed = tmp_path / "run"
    assert metrics == pytest.approx(first.metrics, rel=2e-6)
    assert losses(resumed) == pytest.approx(losses(first.folder), rel=2e-6)
    assert len(losses(first.folder)) == 4
    found = without_rounding(exported(resumed))
    expected = without_rounding(exported(first.folder))
    torch.testing.assert_close(found, expected, **CLOSE)


# What is refused


@pytest.mark.parametrize(
    ("script", "flags", "pattern"),
    [
        (
            pretrain,
            "--mesh data=3",
            "--mesh data=3 is for 3 devices.*there are 4.*: leave it out for data=4$",
        ),
        (
            pretrain,
            "--mesh model=3",
            "--mesh model=3 is for 3 devices.*there are 4.*data=2,model=2",
        ),
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


@pytest.mark.parametrize(
    ("layout", "flag"),
    [(TWO, "--mesh is data=2,model=2"), (FULL, "--shard-state is full")],
    ids=["mesh", "state"],
)
def test_one_device_of_plain_pytorch_has_nothing_to_cut(layout, flag):
    message = f"{flag}, but with --device cpu each process has the whole model.*--device xla"
    with pytest.raises(InputError, match=message):
        sharding.arranged(ONE_CPU, layout)


def test_one_process_shares_out_no_state():
    layers = sharding.arranged(ONE_CPU, Layout(shard_state="optimizer")).layers
    assert type(layers) is sharding.LayerSharding  # not what several processes have
    assert not layers.spreads


@pytest.mark.parametrize("given", ["copies=4", "model=4"])
def test_a_mesh_on_which_a_state_would_not_be_cut_is_refused(given, mesh):
    message = f"--shard-state full cuts .* over data, of which --mesh {given} has one"
    with pytest.raises(InputError, match=message):
        sharding.arranged(mesh, replace(FULL, mesh=given))


def test_a_model_whose_state_would_not_be_cut_is_refused(mesh):
    layers = sharding.arranged(mesh, FULL).layers
    message = "--shard-state full would cut nothing.*4 devices .* no matrix .* of Linear"
    with pytest.raises(InputError, match=message):
        layers.arrange(nn.Linear(5, 6), None)


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        (r"attention\.query\.weight", "fits no parameter of BertForMaskedLM.*partition.py"),
        (r"dense\.weight", "the rules for .*dense.weight"),
        (r"predictions\.transform\.dense\.bias", r"\[32\].*expected one rule"),
    ],
)
def test_a_rule_that_does_not_fit_is_an_error(rule, pattern, mesh):
    data = pretrain.open_data(pretrain.validate(pretrain.TINY))
    known = encoders.rules(data.model)
    parameters = known.parameters | {rule: partition.OUT}
    wrong = replace(known, parameters=parameters)
    arranged = sharding.arranged(mesh, TWO)
    with pytest.raises(InputError, match=pattern):
        device.to_device(data.model, arranged, lambda _: wrong)


def test_a_model_without_a_table_is_refused():
    model = ElectraForMaskedLM(ElectraConfig(num_hidden_layers=0, vocab_size=8))
    message = "bert, distilbert, roberta, xlnet, .*not electra.*models/encoders"
    with pytest.raises(InputError, match=message):
        encoders.rules(model)


def test_the_table_of_a_model_says_where_its_parameters_lie(mesh):
    run = open_run(mesh, replace(TWO, shard_state="optimizer"), model="roberta")
    table = sharding.placement_table(run.state.model)
    line = next(line for line in table if "*.intermediate.dense.weight" in line)
    assert line.startswith("roberta.encoder.layer.*.intermediate.dense.weight ")
    assert " 1 x 128 x 32 " in line
    assert "[model, -]" in line
    assert line.endswith("state [model, data]")


# Reading and writing what is cut


def test_cut_tensors_are_made_whole_one_at_a_time(mesh, monkeypatch):
    """By a program for each shape.

    torch_xla would compile one for each tensor that is read, each time.
    """
    spmd = sharding.arranged(mesh, TWO).layers.spmd
    numbers = [torch.randn(8, 6), torch.randn(8, 6), torch.arange(8), torch.randn(3)]
    specs = [("data", "model"), ("data", "model"), ("model",), (None,)]
    tensors = [each.to(mesh.device) for each in numbers]
    for tensor, spec in zip(tensors, specs, strict=True):
        device.annotate(tensor, spmd, spec)
    torch_xla.sync()
    waits = []
    wait = pin_sharding.xm.wait_device_ops

    def recorded_wait() -> None:
        wait()
        waits.append(None)

    monkeypatch.setattr(pin_sharding.xm, "wait_device_ops", recorded_wait)

    graphs = backend.compilations()
    for _ in range(2):
        found = gather.to_host(tensors, True)
        assert all(map(torch.equal, found, numbers))
    assert gather.to_host(tensors, False) == []

    assert backend.compilations() == graphs + 2
    assert len(waits) == 3 * 3  # tensors that are cut
    shapes = [on_each_device(tensor) for tensor in tensors]
    assert shapes == [[4, 3], [4, 3], [4], [3]]


def test_a_tensor_elsewhere_is_on_every_device_already():
    """A GPU's, with --remat."""
    elsewhere = torch.ones(2, device="meta")
    assert gather.on_every_device(elsewhere) is elsewhere


KINDS = [
    torch.float32,
    torch.int64,
    torch.bfloat16,
    torch.bool,
    torch.float64,
    torch.uint8,
    torch.float16,
    torch.int32,
]


def packed(tensors: dict[str, Tensor]) -> bytes:
    return b"".join(map(bytes, gather.pack(tensors)))


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Tensors of all types, some of which are not contiguous."""
    made = {}
    for number, kind in enumerate(KINDS):
        made[f'ü"{number}'] = torch.randn(3, number).T.to(kind)
    made["none"] = torch.tensor(2.5)
    made["a"] = torch.arange(3)
    return made


def test_a_file_in_parts_is_the_librarys(tensors):
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert packed(tensors) == safetensors.torch.save(contiguous)


def test_the_header_of_a_file_is_padded_as_the_librarys():
    """To a multiple of eight bytes."""
    for length in range(8):
        one = {"x" * length: torch.ones(1)}
        assert packed(one) == safetensors.torch.save(one)


def test_a_file_in_parts_comes_back_tensor_by_tensor(tensors, tmp_path):
    content = packed(tensors)
    path = tmp_path / "file"
    path.write_bytes(content)
    files = fsspec.filesystem("file")
    assert equal(gather.load(files, str(path), checkpoint._checksum([content])), tensors)


def test_a_file_with_other_bytes_is_refused(tensors, tmp_path):
    content = packed(tensors)
    path = tmp_path / "file"
    path.write_bytes(content[:-1] + b"!")
    files = fsspec.filesystem("file")
    message = f"file has {len(content)} bytes that do not match"
    with pytest.raises(ValueError, match=message):
        gather.load(files, str(path), checkpoint._checksum([content]))


def memory(line: str) -> int:
    """Returns bytes of this process: VmRSS now, VmHWM at most."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{line}:\s+(\d+)", status)[1]) * 1024


def growth(work: Callable[[], None]) -> int:
    """Returns the bytes by which the most memory exceeds that of before."""
    gc.collect()
    # Or a part of the growth would be in pages that earlier tests have given free.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def test_no_host_holds_a_state_twice(mesh, tmp_path):
    """By the most memory that this process has in the meantime.

    Without layers a save takes two states more.
    """
    model = nn.ModuleList([nn.Linear(512, 512) for _ in range(64)])
    size = 64 * 2**20
    optimizer = torch.optim.SGD(model.parameters())
    layers = sharding.arranged(mesh, FULL).layers
    state = []

    with checkpoint.Checkpointer(str(tmp_path), layers=layers) as checkpoints:

        def save() -> None:
            checkpoints.save(1, model, optimizer)
            checkpoints.wait()

        def read() -> None:
            state.append(checkpoints.read(1))

        def load() -> None:
            checkpoint.load_state(*state, model, optimizer, mesh)

        saving = growth(save) / size
        checkpoints._writer.submit(int).result()  # its thread has let go of what it wrote
        reading = growth(read) / size
        loading = growth(load) / size

    assert 0.9 < saving < 1.5
    assert 0.9 < reading < 1.5
    assert loading < 0.2


# Set-up


def test_libtpu_is_asked_for_its_flags_before_it_is_loaded(mesh, monkeypatch):
    """And where a state is cut, for reduce-scatters."""
    given = (
        "--a=b --xla_tpu_enable_reduce_scatter_legalizer=false --noxla_tpu_input_conv_multi_users"
    )
    fusions = backend.FUSIONS.split()[1:]
    ours = " ".join([backend.STACK, *fusions, "--xla_tpu_scoped_vmem_limit_kib=7"])
    seen = []

    def device_type() -> None:
        seen.append(os.environ["LIBTPU_INIT_ARGS"])

    monkeypatch.setattr(backend.xr, "device_type", device_type)
    for layout in (TWO, FULL):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
        device.setup(0, layout=layout, vmem_kib=7)

    reduce_scatters = "--xla_tpu_enable_windowed_einsum_for_reduce_scatter=false"
    assert seen == [f"{given} {ours}", f"{given} {reduce_scatters} {ours}"]


def test_on_a_pod_batches_come_cut_over_all_devices(mesh):
    """Each host uploads its own rows, for which torch_xla takes a mesh with one axis only."""
    two_hosts = replace(mesh, process_count=2)
    pod = sharding.arranged(two_hosts, Layout("data = 2, model= 2"))
    assert pod.spmd is mesh.spmd
    assert pod.layers.spmd.mesh_shape == (1, 2, 2)
