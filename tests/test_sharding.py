"""Layers that are spread over the devices give the numbers of those that are not, whatever is cut and recomputed, and
their checkpoints do not know how they were cut. Pretraining stands for all: the scripts share train/common/sharding."""

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch_xla
from helpers import environment, equal, exported, flags, losses, records
from torch import nn
from transformers import ElectraConfig, ElectraForMaskedLM

from errors import InputError
from models import encoders, objectives, partition
from train import pretrain
from train.common import accumulate, checkpoint, device, loading, sharding
from train.common.sharding import Layout, placement
from train.common.xla.recompute import again

TWO, FULL = Layout("data=2,model=2"), Layout(shard_state="full")
ALL = Layout("data=2,model=2", "full", remat=True)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # sums over devices are of other parts, and Adam divides by small numbers
STEPS = 4  # two traced, two repeated
SIZE = (1, 32, 4)  # layers, width, heads
CPU = device.Mesh(torch.device("cpu"), None, 1, 0, 1, "CPU", "float32", True)
# The command line of train.pretrain, with that size.
SMALL = f"""
from models import encoders
encoders.SIZES["tiny"] = {SIZE}
from train import pretrain
from train.common import cli
cli.run(pretrain.main, pretrain.PRESETS)
"""


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(encoders.SIZES, "tiny", SIZE)
        patch.setitem(encoders.SIZES, "mini", (2, *SIZE[1:]))  # DistilBERT has half the layers
        yield


def opened(mesh, layout: Layout, **changes):
    """Returns a config, its mesh, data and state, as `pretrain.main` makes them; DistilBERT's teacher is new."""
    config = pretrain.validate(replace(pretrain.TINY, layout=layout, **changes))
    torch.manual_seed(0)  # the weights are new
    student = config.model == "distilbert"
    data = pretrain.open_data(replace(config, model="bert") if student else config)
    if student:
        settings = encoders.configuration("distilbert", config.size, data.train.text.tokenizer, data.train.text.length)
        teacher = data.model.eval().requires_grad_(False)
        data = data._replace(model=objectives.language_model(settings, False, None), teacher=teacher)
    arranged = sharding.arranged(mesh, layout)
    state = pretrain.build(config, data, arranged)
    state.model.train()
    return config, arranged, data, state


def taken(mesh, layout: Layout, **changes):
    """Takes STEPS updates; returns the losses, all that they changed, on the host, and the state."""
    config, mesh, data, state = opened(mesh, layout, **changes)
    step, every, found = device.compiled(pretrain.train_step, mesh), config.update_every, []
    if every > 1:
        step = accumulate.AccumulatedStep(pretrain.forward, pretrain.update, state, ("loss", "words"), mesh)
    span = {"seed": 0, "start": 0, "stop": STEPS, "parts": every, "workers": 0}
    with loading.parallel_loader(data.train, config.batch_size, mesh, train=True, **span) as loader:
        for number, batch in enumerate(loader, 1):
            device.seed_step(0, number)
            device.set_lr(state.optimizer, 3e-3)
            if (metrics := step(state, batch, config, mesh)) is not None:
                found.append(metrics["loss"])
    return device.fetch(found), checkpoint.to_host(checkpoint.named_state(state.model, state.optimizer)), state


@pytest.fixture(scope="module")
def whole(mesh):
    """whole(**changes): the same steps with everything whole on every device, each taken once."""
    return functools.cache(lambda **changes: taken(mesh, Layout(), **changes)[:2])


def on_each_device(tensor: torch.Tensor) -> list[int]:
    """Returns the shape of the part that the first device has."""
    return list(torch_xla._XLAC._get_local_shards([tensor])[0][0][0].shape)


PARTS = {"optimizer": "lamb", "update_every": 2, "next_sentence": True}
COARSE = {"model": "roberta", "precision": "bfloat16"}


@pytest.mark.parametrize(
    ("layout", "changes", "weight", "moment"),
    [  # the parts of the [128, 32] of a feed-forward layer's first product, and of its moments
        (TWO, {}, [64, 32], [64, 32]),
        (FULL, PARTS, [32, 32], [32, 32]),
        (ALL, PARTS, [64, 16], [64, 16]),
        (replace(ALL, shard_state="optimizer"), {"model": "xlnet"}, [64, 32], [64, 16]),
        (replace(TWO, shard_state="optimizer"), {"model": "distilbert", "size": "mini"}, [64, 32], [64, 16]),
        (Layout("data=1,model=4", remat=True), COARSE, [32, 32], [32, 32]),
    ],
    ids=["model", "full", "all", "xlnet", "distilbert", "roberta"],
)
def test_cut_and_recomputed_layers_give_the_same_numbers(layout, changes, weight, moment, mesh, whole):
    found, after, state = taken(mesh, layout, **changes)
    expected = whole(**changes)
    coarse = changes is COARSE
    assert found == pytest.approx(expected[0], rel=1e-3 if coarse else 2e-6)
    if not coarse:
        torch.testing.assert_close(after, expected[1], **CLOSE)
    assert max(found) - min(found) > 0.1
    names = ("layer.0.ff.layer_1.weight", "layer.0.ffn.lin1.weight", "layer.0.intermediate.dense.weight")
    (parameter,) = (value for key, value in state.model.named_parameters() if key.endswith(names))
    assert on_each_device(parameter.data) == weight
    assert on_each_device(state.optimizer.state[parameter]["exp_avg"]) == moment
    if parameter.grad is not None:  # the sums of an update in parts
        assert on_each_device(parameter.grad) == moment
    report = device.graph_report()
    assert report["recompilations"] == [] and report["repeated"] >= STEPS - 2


def test_recomputation_changes_no_bit(mesh, whole):
    found, after, _ = taken(mesh, Layout(remat=True))
    expected = whole()
    assert found == expected[0] and equal(after, expected[1])


def test_recomputation_on_plain_pytorch_changes_no_bit_either():
    config = pretrain.validate(pretrain.TINY)
    data, found = pretrain.open_data(config), []
    model = encoders.fast_layers(data.model)
    batch = loading.stack([data.train.example(row, np.random.default_rng(row)) for row in range(8)])
    for remat in (False, True):
        if remat:
            placement.recompute(model, sharding.arranged(CPU, Layout(remat=True)), partition.rules(model))
        torch.manual_seed(1)
        loss = objectives.losses(model, None, batch)["loss"]
        found.append((loss, torch.autograd.grad(loss, [*model.parameters()])))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert found[0][0] > 4


def test_recomputation_refuses_another_dropout(mesh):
    """Its mask would be another one in the second pass."""
    layer = nn.Dropout()
    with pytest.raises(RuntimeError, match="draws other numbers"):
        again(layer)(torch.ones(4, requires_grad=True).to(mesh.device))


# ---- the script ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def cut(mesh, tmp_path_factory):
    """The folder, metrics and config of a run with everything cut."""
    folder = tmp_path_factory.mktemp("cut")
    config = replace(pretrain.TINY, layout=ALL, steps=6, warmup_steps=2, log_every=1, eval_every=3, keep=3)
    config = replace(config, runs=str(folder), name="run")
    return folder / "run", pretrain.main(config), config


def begun_again(cut, tmp_path, layout: Layout):
    """Returns the config of the run as it was at step 3, with another layout."""
    shutil.copytree(cut[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000006")
    os.remove(tmp_path / "run/summary.json")
    return replace(cut[2], layout=layout, runs=str(tmp_path))


def test_a_resumed_run_gives_the_numbers_of_one_that_was_not_stopped(cut, tmp_path, capsys):
    assert pretrain.main(begun_again(cut, tmp_path, ALL)) == cut[1]
    assert "resuming after step 3" in capsys.readouterr().out
    assert records(tmp_path / "run") == records(cut[0]) and equal(exported(tmp_path / "run"), exported(cut[0]))


@pytest.mark.parametrize(
    ("devices", "layout"), [(8, Layout("data=2,model=4", "optimizer")), (2, Layout("data=1,model=2")), (1, Layout())]
)
def test_a_checkpoint_and_an_export_do_not_know_the_layout(devices, layout, cut, tmp_path):
    config = begun_again(cut, tmp_path, layout)
    command = [sys.executable, "-c", SMALL, "tiny", *flags(config, pretrain.TINY)]
    result = subprocess.run(command, env=environment(devices), capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and "resuming after step 3" in result.stdout, result.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(cut[0]), rel=2e-6)
    assert records(tmp_path / "run")[-1]["eval/loss"] == pytest.approx(cut[1]["loss"], rel=2e-6)
    torch.testing.assert_close(exported(tmp_path / "run"), exported(cut[0]), **CLOSE)


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--mesh data=3", "--mesh data=3 is for 3 devices.*there are 4.*data=2,model=2"),
        ("--mesh data=4,model=2", "is for 8 devices.*there are 4"),
        ("--mesh data=2,rows=2", "'rows=2'.*data and model"),
        ("--mesh model=2,model=2", "'model=2'.*each once"),
        ("--mesh data=2,model=²", "model=².*at least 1"),
        ("--mesh data", "--mesh data has data=;.*at least 1"),
        ("--mesh model=4", "model=4.*2 heads.*divisor of 2"),
    ],
)
def test_values_that_are_refused(refused, flags, pattern, monkeypatch):
    monkeypatch.setitem(encoders.SIZES, "tiny", (2, 64, 2))
    refused(pretrain, f"tiny {flags}", pattern)


def test_one_device_of_plain_pytorch_has_nothing_to_cut_and_several_hosts_are_refused(mesh):
    for layout, flag in ((TWO, "--mesh is data=2,model=2"), (FULL, "--shard-state is full")):
        with pytest.raises(InputError, match=f"{flag}, but --device cpu runs on one device.*--device xla"):
            sharding.arranged(CPU, layout)
    with pytest.raises(InputError, match="for the devices of one host, not of 2"):
        sharding.arranged(replace(mesh, process_count=2), TWO)
    assert sharding.arranged(replace(mesh, process_count=2), Layout()).process_count == 2


# ---- the tables ------------------------------------------------------------------------------------------------------
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
    known = partition.rules(data.model)
    wrong = replace(known, parameters=known.parameters | {rule: partition.OUT})
    with pytest.raises(InputError, match=pattern):
        sharding.to_device(data.model, sharding.arranged(mesh, TWO), lambda _: wrong)


def test_the_table_of_a_model_says_where_its_parameters_lie_and_one_without_is_refused(mesh):
    with pytest.raises(InputError, match="bert, roberta, distilbert, xlnet, not electra.*partition.py"):
        partition.rules(ElectraForMaskedLM(ElectraConfig(num_hidden_layers=0, vocab_size=8)))
    *_, state = opened(mesh, replace(TWO, shard_state="optimizer"))
    line = next(line for line in sharding.table(state.model) if "*.intermediate.dense.weight" in line)
    assert line.startswith("bert.encoder.layer.*.intermediate.dense.weight ")
    assert " 1 x 128 x 32 " in line and "[model, -]" in line and line.endswith("state [model, data]")
