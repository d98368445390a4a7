"""The preset modern of train/resnet50.py: its recipe, and a small run with strong augmentation and
averaged weights. test_augmentation.py has the augmentation itself."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
import torch
import torchvision
from helpers import (
    Net,
    assert_graph_contract,
    crash,
    equal,
    exported,
    losses,
    records,
    start,
    stop_at,
    summary,
)
from image_files import save
from torch.optim.swa_utils import AveragedModel

from data import imagenet, labelled_files, targets
from models import resnet
from train import resnet50
from train.common import checkpoint, device

IMAGENET = 1_281_167  # training images

# ---- the recipe ----------------------------------------------------------------------------------


def test_images_are_evaluated_as_torchvisions_weights_want_them():
    theirs = torchvision.models.ResNet50_Weights.IMAGENET1K_V2

    preset = resnet50.MODERN

    assert [preset.eval_size] == theirs.transforms().crop_size
    assert [preset.eval_resize] == theirs.transforms().resize_size
    assert "80.858" in str(theirs.meta["_metrics"])  # what the preset says of it


def test_weights_are_averaged_as_in_torchvisions_reference():
    """Its decay, 0.99998, is adjusted: 1 - decay is times batch, 32 steps, and 1 / epochs."""
    preset = resnet50.MODERN
    steps_per_epoch = IMAGENET // preset.batch_size
    total_steps = preset.epochs * steps_per_epoch

    found = resnet50.averaging(preset, total_steps, steps_per_epoch)

    assert found.every == 32
    theirs = (1 - 0.99998) * preset.batch_size * 32 / preset.epochs
    assert found.weight == pytest.approx(theirs, rel=2e-3)
    assert found.weight_at(5 * steps_per_epoch) == 1  # in the warm-up: a copy
    assert found.weight_at(5 * steps_per_epoch + 1) == found.weight


def test_a_short_run_moves_its_average_often():
    config = replace(resnet50.TINY, average=0.1, warmup_epochs=0.0)

    found = resnet50.averaging(config, total_steps=200, steps_per_epoch=20)

    assert (found.every, found.weight) == (2, 0.1)  # over 20 steps
    assert found.weight_at(2) == 1  # else the first weights would count
    of_ten_steps = resnet50.averaging(config, total_steps=10, steps_per_epoch=20)
    assert (of_ten_steps.every, of_ten_steps.weight) == (1, 1)


def reference_average(decay: float) -> AveragedModel:
    """Returns torchvision's ExponentialMovingAverage, of references/classification/utils.py."""

    def mean(average, newest, _):
        return decay * average + (1 - decay) * newest

    return AveragedModel(Net(), avg_fn=mean, use_buffers=True)


def test_the_average_moves_as_pytorchs_averaged_model(mesh):
    """Parameters and the statistics of batch norm."""
    theirs = reference_average(decay=0.75)
    on_host = Net()
    ours = device.to_device(Net(), mesh)
    step = device.compiled(resnet50.average_step, mesh)

    for number in range(3):
        with torch.no_grad():
            for tensor in [
                *on_host.parameters(),
                on_host.norm.running_mean,
                on_host.norm.running_var,
            ]:
                tensor.uniform_()
        model = device.to_device(Net(), mesh)
        model.load_state_dict(on_host.state_dict())
        for tensor in [*model.parameters(), *model.buffers()]:
            device.annotate_placement(tensor, mesh)
        theirs.update_parameters(on_host)  # the first call copies
        weight = torch.tensor(1.0 if number == 0 else 0.25).to(mesh.device)
        step(ours, model, weight, mesh)

    found = checkpoint.to_host(dict(ours.named_parameters()) | dict(ours.named_buffers()))
    for name, expected in theirs.module.state_dict().items():
        if name != "norm.num_batches_tracked":
            torch.testing.assert_close(found[name], expected)


# ---- a run ---------------------------------------------------------------------------------------
SHORT = replace(
    resnet50.TINY,
    augmentation="strong",
    eval_size=40,
    eval_resize=42,
    epochs=2,
    warmup_epochs=0.5,
    lr=0.4,
    average=0.1,
    log_every=1,
    save_every=20,
)
STAGES = (1, 1)  # of a network that is compiled quickly
FEWER_STAGES = f"""
from models import resnet
resnet.LAYERS["resnet_tiny"] = {STAGES}
"""


@pytest.fixture(autouse=True)
def fewer_stages(monkeypatch):
    monkeypatch.setitem(resnet.LAYERS, "resnet_tiny", STAGES)


@dataclass(frozen=True)
class Finished:
    """A run on four devices."""

    path: str
    metrics: dict[str, float]
    config: resnet50.Config


@pytest.fixture(scope="module")
def finished(mesh, tmp_path_factory) -> Finished:
    config = replace(SHORT, runs=str(tmp_path_factory.mktemp("modern")), name="run")
    device.graph_report(reset=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resnet.LAYERS, "resnet_tiny", STAGES)
        metrics = resnet50.main(config)
    return Finished(f"{config.runs}/run", metrics, config)


def test_it_learns_and_keeps_the_graph_contract(finished):
    assert finished.metrics["top1"] > 0.4  # chance: 0.1
    assert_graph_contract(finished.path)


def test_without_a_learning_rate_it_does_not_learn(tmp_path):
    metrics = resnet50.main(replace(SHORT, lr=0.0, epochs=1, runs=str(tmp_path)))

    assert metrics["top1"] < 0.2


def saved(finished: Finished) -> dict[str, torch.Tensor]:
    """Returns the state in the last checkpoint."""
    return safetensors.torch.load_file(
        f"{finished.path}/checkpoints/step_00000064/state.safetensors"
    )


def test_the_average_is_in_checkpoints_and_exported(finished):
    state = saved(finished)
    export = exported(finished.path)

    weight = export["fc.weight"]
    assert torch.equal(weight, state["model.average.fc.weight"])
    assert torch.equal(export["bn1.running_var"], state["model.average.bn1.running_var"])
    difference = (weight - state["model.trained.fc.weight"]).abs().max()
    assert difference > 1e-4


def test_the_average_is_what_is_evaluated(finished):
    """The export is, with the same numbers, by --evaluate: as many pixels, resized as much."""
    again = resnet50.main(resnet50.Config(evaluate=finished.path))

    assert again == pytest.approx(finished.metrics, rel=1e-6)


def test_the_export_says_how_its_images_are_prepared(finished):
    with safetensors.safe_open(f"{finished.path}/export/model.safetensors", "pt") as file:
        about = file.metadata()

    assert (about["image_size"], about["resize"]) == ("40", "42")
    assert len(json.loads(about["classes"])) == 10


@pytest.fixture
def folder(tmp_path) -> str:
    """A folder of pictures of 40 x 50 pixels."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            save(tmp_path / split / name / "0.png")
    return str(tmp_path)


def test_pictures_of_a_folder_have_the_presets_sizes(folder):
    """Trained on at one size, and evaluated at another, by a training and by --evaluate."""
    config = replace(SHORT, data=folder)
    data = resnet50.open_data(config)
    target = targets.Target("classes", ("cat", "dog"))
    learned = imagenet.Learned(target, labelled_files.Scale())
    its_own = SimpleNamespace(owns=lambda _: True)
    evaluated = resnet50.open_evaluation(config, its_own, learned)

    rng = np.random.default_rng(0)
    trained = data.train.example(0, rng)
    assert trained["image"].shape == (32, 32, 3)
    assert "share" in trained
    with open(f"{folder}/val/cat/0.png", "rb") as file:
        expected = imagenet.eval_crop(imagenet.decode(file.read()), size=40, resize=42)
    for images in (data.eval, evaluated):
        assert np.array_equal(images.example(0, rng)["image"], expected)


def test_resume_is_exact(finished, tmp_path):
    config = replace(finished.config, runs=str(tmp_path), name="stopped")

    stop_at(47, crash, resnet50.main, config)  # after the checkpoint of step 40

    assert resnet50.main(config) == finished.metrics
    assert records(f"{tmp_path}/stopped") == records(finished.path)
    assert equal(exported(f"{tmp_path}/stopped"), exported(finished.path))


@pytest.mark.slow  # a resume restores it, too
def test_the_best_average_is_exported(finished, tmp_path):
    """Not the best weights that are not averaged."""
    config = replace(finished.config, best="-top1", epochs=2, runs=str(tmp_path), name="best")

    metrics = resnet50.main(config)

    assert metrics["top1"] < finished.metrics["top1"]  # the worst: that of the first epoch
    again = resnet50.main(resnet50.Config(evaluate=f"{tmp_path}/best"))
    assert again == pytest.approx(metrics, rel=1e-6)


@pytest.mark.slow
def test_one_device_gives_the_losses_of_four(finished, tmp_path):
    config = replace(finished.config, runs=str(tmp_path), name="one")

    code, output = start(resnet50, config, devices=1, before=FEWER_STAGES)

    assert code == 0, output
    four = losses(finished.path)
    one = losses(tmp_path / "one")
    # Rounding grows from step to step.
    assert one[:10] == pytest.approx(four[:10], rel=1e-4)
    assert one[:30] == pytest.approx(four[:30], rel=5e-3)
    assert max(four[:30]) - min(four[:30]) > 0.2


@pytest.mark.slow
def test_micro_batches_give_the_losses_of_one_batch(finished, tmp_path):
    """With the same groups of batch norm."""
    groups = finished.config.norm_groups // 2
    config = replace(finished.config, update_every=2, norm_groups=groups, runs=str(tmp_path))

    stop_at(11, crash, resnet50.main, replace(config, name="cut"))

    whole = losses(finished.path)[:10]
    assert losses(tmp_path / "cut") == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow
def test_plain_pytorch_trains_it_too(tmp_path):
    config = replace(SHORT, device="cpu", runs=str(tmp_path), name="eager")

    code, output = start(resnet50, config, devices=1, before=FEWER_STAGES)

    assert code == 0, output
    assert summary(tmp_path / "eager")["metrics"]["top1"] > 0.4


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (
            "--augmentation strong --batch-size 72 --update-every 8",
            "--batch-size 72, in --update-every 8, makes micro-batches of 9; .*pairs.*even",
        ),
        ("--eval-resize 30", "--eval-resize is 30; .*at least the size of evaluated images, 32"),
        ("--eval-size 48 --eval-resize 40", "--eval-resize is 40; .* 48"),
        ("--average 1", "--average is 1.0; .*below 1"),
    ],
)
def test_values_that_are_refused(refused, words, pattern):
    refused(resnet50, f"tiny --norm-groups 1 {words}", pattern)
