"""Tests what is particular to train/resnet50.py; what it shares with the other scripts is in
test_scripts.py."""

import contextlib
import io
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import safetensors
import timm.optim
import torch
import torchvision
from helpers import DUMP, crash, environment, losses, page_code, read_program, stop_at

from data import imagenet
from errors import InputError
from models.resnet import Normalize, ResNet, decide_head, load_weights, resnet
from tpu.compiler import hlo
from train import resnet50
from train.common import device, files


@pytest.mark.slow
def test_it_learns_in_bfloat16(tmp_path):
    config = replace(resnet50.TINY, precision="bfloat16", runs=str(tmp_path))

    metrics = resnet50.main(config)

    assert metrics["top1"] > 0.9


# The export


def write_export(folder, model: ResNet, config: resnet50.Config, mesh) -> imagenet.SyntheticImages:
    """Writes the export of a model of 12 classes; returns the data that names these."""
    images = imagenet.SyntheticImages(1, config.image_size, 12, 0, "train")
    state = resnet50.State(model, None, None)
    resnet50.export(str(folder), state, resnet50.Data(images, images), config, mesh)
    return images


@dataclass(frozen=True)
class Export:
    """What an export of a ResNet-50 holds, and the model that it is of."""

    file: str
    model: ResNet
    classes: list[str]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def export(mesh, tmp_path_factory) -> Export:
    folder = tmp_path_factory.mktemp("export")
    torch.manual_seed(0)
    model = resnet("resnet50", 12)
    config = replace(resnet50.TINY, model="resnet50")
    images = write_export(folder, model, config, mesh)
    file = str(folder / "model.safetensors")
    return Export(file, model, list(images.classes), files.load_weights(file))


def test_torchvision_loads_the_export_and_finds_the_same_logits(export):
    theirs = torchvision.models.resnet50(num_classes=12)
    images = torch.randn(2, 3, 64, 64)

    theirs.load_state_dict(export.weights)

    with torch.no_grad():
        found = export.model.eval()(images)
        expected = theirs.eval()(images)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_export_names_its_classes(export):
    metadata = safetensors.safe_open(export.file, "pt").metadata()

    assert json.loads(metadata["classes"]) == export.classes


@pytest.mark.parametrize("classes", [12, 4])
def test_weights_have_a_new_head_for_another_number_of_classes(export, classes):
    model = resnet("resnet50", classes)
    new_head = model.fc.weight.clone()

    load_weights(model, export.weights, export.file)

    name = "layer3.2.conv1.weight"
    assert torch.equal(model.state_dict()[name], export.weights[name])
    expected_head = export.weights["fc.weight"] if classes == 12 else new_head
    assert torch.equal(model.fc.weight, expected_head)


def test_weights_of_another_model_are_refused(export):
    pattern = f"--weights {export.file} does not fit --model: .* more tensors differ"

    with pytest.raises(InputError, match=pattern):
        load_weights(resnet("resnet101", 12), export.weights, export.file)


@pytest.mark.parametrize("name", ["resnet50", "resnet_tiny"])
def test_the_page_classifies_a_new_picture_with_an_export(name, tmp_path, mesh, capsys):
    """As the run's own evaluation does: same pixels, same numbers, same class."""
    rng = np.random.default_rng(0)
    picture = tmp_path / "picture.jpg"
    image = PIL.Image.fromarray(rng.integers(0, 256, (70, 90, 3), np.uint8))
    image.resize((180, 140)).save(picture)
    config = replace(resnet50.TINY, model=name)
    model = resnet(name, 12)
    images = write_export(tmp_path / "runs/<name>/export", model, config, mesh)

    replaced = {"runs/<name>": f"{tmp_path}/runs/<name>"}
    code = page_code("exports.md", "ResNet-50 in torchvision", **replaced)
    code, tiny_arguments = code.split("from models.resnet import resnet")
    code = code.replace("picture.jpg", str(picture))
    if name == "resnet_tiny":
        theirs = 'model = torchvision.models.get_model(about["model"], num_classes=len(classes))'
        ours = f"from models.resnet import resnet{tiny_arguments}"
        assert theirs in code
        code = code.replace(theirs, ours)
    exec(code, {})

    pixels = imagenet.eval_crop(imagenet.decode(picture.read_bytes()), config.image_size)
    normalize = Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD)
    with torch.no_grad():
        logits = model.eval()(normalize(torch.from_numpy(pixels)[None]))
    expected = logits.softmax(1)[0]
    label, probability = capsys.readouterr().out.strip().rsplit(" ", 1)
    assert label == images.classes[expected.argmax()]
    assert float(probability) == pytest.approx(expected.max().item(), rel=1e-4)


# Weights and the names of their classes


@dataclass(frozen=True)
class Textures:
    """Two folders of the same pictures of ten classes.

    Sorted, as their folders are, the names of the second have another order than those of the
    first.
    """

    one: str
    two: str
    names: list[str]  # of the second, in the order of the first


@pytest.fixture(scope="module")
def textures(tmp_path_factory) -> Textures:
    folder = tmp_path_factory.mktemp("textures")
    rng = np.random.default_rng(0)
    names = {}
    for split, count in (("train", 130), ("val", 60)):
        images = imagenet.SyntheticImages(count, 32, 10, 0, "train")
        for index in range(count):
            pixels, label = images.example(index, rng).values()
            names[label] = f"{(label * 7 + 3) % 10} texture"
            for data, name in (("one", f"Texture {label}"), ("two", names[label])):
                path = folder / data / split / name / f"{index:03d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                PIL.Image.fromarray(pixels).save(path)

    in_order = [names[label] for label in range(10)]
    return Textures(f"{folder}/one", f"{folder}/two", in_order)


def renamed(file: str, to: Path, names: list[str] | None) -> str:
    """Writes the same weights with other names of their classes, or with none, as torchvision's.
    Returns the new file."""
    weights, metadata = files.load_with_metadata(file)
    if names is None:
        metadata = {}
    else:
        metadata = metadata | {"classes": json.dumps(names)}
    files.save_weights(str(to), weights, metadata)
    return str(to)


@dataclass(frozen=True)
class Evaluation:
    """A run without training."""

    top1: float
    output: str
    export: str  # the file of its weights


def evaluated(data: str, weights: str, runs: Path, name: str, **changes) -> Evaluation:
    """Evaluates weights on a folder of images: runs the trial with a learning rate of 0, but for
    `changes`."""
    config = replace(
        resnet50.TINY,
        lr=0.0,
        epochs=1,
        warmup_epochs=0.5,
        data=data,
        weights=weights,
        runs=str(runs),
        name=name,
    )
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        metrics = resnet50.main(replace(config, **changes))
    file = f"{runs}/{name}/export/model.safetensors"
    return Evaluation(metrics["top1"], output.getvalue(), file)


@pytest.fixture(scope="module")
def learned(run_of) -> str:
    """The weights of the trial's export, which knows the textures."""
    path, *_ = run_of("resnet50")
    return f"{path}/export/model.safetensors"


@pytest.fixture(scope="module")
def as_it_is(textures, learned, tmp_path_factory) -> Evaluation:
    """Evaluates the export on the first folder, whose names it has but for their case: texture 0,
    Texture 0."""
    return evaluated(textures.one, learned, tmp_path_factory.mktemp("runs"), "as it is")


@pytest.fixture(scope="module")
def same(as_it_is):
    """About the top-1 of the export. A run of rate 0 still updates the running statistics of its
    norms, each run with the pictures in another order."""
    return pytest.approx(as_it_is.top1, abs=0.1)


@pytest.fixture(scope="module")
def named(textures, learned, tmp_path_factory) -> Evaluation:
    """Evaluates on the second folder the export with the names of that folder's classes, in
    another order than that of its folders."""
    folder = tmp_path_factory.mktemp("runs")
    theirs = renamed(learned, folder / "named.safetensors", textures.names)
    return evaluated(textures.two, theirs, folder, "named")


@pytest.fixture(scope="module")
def nameless(learned, tmp_path_factory) -> str:
    """The export without names of classes."""
    return renamed(learned, tmp_path_factory.mktemp("weights") / "nameless.safetensors", None)


@pytest.mark.slow
def test_weights_whose_classes_have_the_datas_order_stay(as_it_is):
    assert as_it_is.top1 > 0.8
    assert "--weights" not in as_it_is.output


def test_weights_are_evaluated_by_the_names_of_their_classes(named, same, textures):
    assert named.top1 == same
    assert f"in the order {textures.names[0]}, {textures.names[1]}" in named.output


def test_the_next_export_has_the_datas_order_of_classes(named, textures):
    _, metadata = files.load_with_metadata(named.export)

    assert json.loads(metadata["classes"]) == sorted(textures.names)


@pytest.mark.slow
def test_the_next_export_is_evaluated_as_the_first(named, same, textures, tmp_path):
    again = evaluated(textures.two, named.export, tmp_path, "again")

    assert again.top1 == same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "pattern"),
    [
        ("none.safetensors", "there is no weights file .*none.safetensors"),
        ("text.pth", "text.pth is no state dict"),
        ("other.safetensors", "--weights .* does not fit --model: .* more tensors differ"),
    ],
)
def test_wrong_weights_are_refused_before_there_is_a_run(weights, pattern, tmp_path, refused):
    (tmp_path / "text.pth").write_text("no weights")
    files.save_weights(str(tmp_path / "other.safetensors"), {"a": torch.zeros(2)}, {})

    runs = tmp_path / "runs"
    refused(resnet50, f"tiny --weights {tmp_path}/{weights} --runs {runs}", pattern)
    assert not runs.exists()


def test_nameless_weights_are_refused_without_training(nameless, textures, refused):
    pattern = "nameless.safetensors does not name the 10 classes.*without training.*--labels"

    refused(resnet50, f"tiny --lr 0 --weights {nameless} --data {textures.two}", pattern)


@pytest.mark.slow
def test_nameless_weights_are_evaluated_as_stated(nameless, same, textures, tmp_path):
    labels = ",".join(textures.names)

    stated = evaluated(textures.two, nameless, tmp_path, "stated", labels=labels)

    assert stated.top1 == same


@pytest.mark.slow
def test_nameless_weights_are_trained_in_the_datas_order(nameless, textures, tmp_path):
    trained = evaluated(textures.one, nameless, tmp_path, "trained", lr=1e-9)

    assert "taken to be in the order Texture 0, Texture 1" in trained.output


@pytest.mark.slow
def test_weights_of_other_classes_are_not_evaluated(learned, textures, refused):
    flags = f"tiny --lr 0 --weights {learned} --data {textures.two}"

    refused(resnet50, flags, "classes texture 0, .*without training")


@pytest.mark.slow
def test_weights_of_other_classes_are_trained_with_a_new_head(learned, textures, tmp_path):
    other = evaluated(textures.two, learned, tmp_path, "other", lr=1e-9)

    pattern = "the head is new: .*classes texture 0.*the data has .* texture"
    assert re.search(pattern, other.output)


@pytest.mark.slow
def test_stated_labels_must_be_the_datas(nameless, textures, refused):
    flags = f"tiny --lr 0 --weights {nameless} --data {textures.two} --labels a,b"

    refused(resnet50, flags, "--labels is a,b; expected 0 texture,1 texture")


@pytest.mark.slow
def test_stated_labels_need_weights(textures, refused):
    flags = f"tiny --labels a,b --data {textures.two}"

    refused(resnet50, flags, "--labels is a,b; it is for the head of --weights")


CLASSES = ["ant", "bee", "cat", "dog"]


def test_a_head_follows_the_names_of_its_classes_to_the_logit():
    theirs = resnet("resnet_tiny", 4).eval()
    ours = resnet("resnet_tiny", 4).eval()
    weights = theirs.state_dict()
    metadata = {"classes": json.dumps(["Dog", "ANT", "cat", "bee"])}

    head = decide_head(weights, metadata, CLASSES, "file")
    load_weights(ours, weights, "file", head)

    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images)[:, [1, 3, 2, 0]])


def test_a_head_with_one_other_class_is_new():
    theirs = resnet("resnet_tiny", 4)
    ours = resnet("resnet_tiny", 4)
    new_head = ours.fc.weight.clone()
    weights = theirs.state_dict()
    metadata = {"classes": json.dumps(["ant", "bee", "cat", "eel"])}

    head = decide_head(weights, metadata, CLASSES, "file")
    load_weights(ours, weights, "file", head)

    assert torch.equal(ours.fc.weight, new_head)
    assert torch.equal(ours.conv1.weight, theirs.conv1.weight)


@pytest.mark.parametrize("classes", ["no JSON", '["ant"]', '{"ant": 0}'])
def test_metadata_that_does_not_name_each_class_is_refused(classes):
    weights = resnet("resnet_tiny", 4).state_dict()

    with pytest.raises(InputError, match="in its metadata, not the names of so many"):
        decide_head(weights, {"classes": classes}, CLASSES, "file")


def test_an_order_is_stated_for_as_many_classes_as_the_data_has():
    weights = resnet("resnet_tiny", 4).state_dict()
    pattern = "--labels states the order .* for 4 classes, the data has 2"

    with pytest.raises(InputError, match=pattern):
        decide_head(weights, {}, ["a", "b"], "file", ["a", "b"])


IMAGENET_HEAD = {"fc.bias": torch.zeros(1000)}
IMAGENET_IDS = [f"n{number:08d}" for number in range(1000)]
CATEGORIES = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.meta["categories"]
IMAGENET_NAMES = [f"{name}, and so on" for name in CATEGORIES]


@pytest.mark.parametrize("classes", [IMAGENET_IDS, IMAGENET_NAMES], ids=["ids", "names"])
def test_torchvisions_weights_have_imagenets_order(classes):
    head = decide_head(IMAGENET_HEAD, {}, classes, "resnet50.safetensors")

    assert head.rows == list(range(1000))
    assert not head.refusal_at_lr_0
    expected = "resnet50.safetensors does not name its 1,000 classes: they are taken for ImageNet's"
    assert expected in head.message


@pytest.mark.parametrize(
    "classes",
    [sorted(IMAGENET_NAMES), [f"class {number}" for number in range(1000)]],
    ids=["sorted", "other"],
)
def test_data_in_another_order_is_not_taken_for_imagenets(classes):
    head = decide_head(IMAGENET_HEAD, {}, classes, "file")

    assert "does not name the 1000 classes" in head.refusal_at_lr_0


# Training


@pytest.mark.slow  # test_glue.py has its twin
def test_micro_batches_with_the_same_norm_groups_change_no_loss(run_of, tmp_path):
    path, _, config = run_of("resnet50", "short")
    config = replace(
        config,
        update_every=2,
        norm_groups=config.norm_groups // 2,
        runs=str(tmp_path),
        name="cut",
    )

    stop_at(7, crash, resnet50.main, config)

    whole = losses(path)[:6]
    assert losses(tmp_path / "cut") == pytest.approx(whole, rel=1e-4)
    assert max(whole) - min(whole) > 0.01


OPTIMIZERS = {"sgd": torch.optim.SGD, "lars": timm.optim.Lars}


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_norms_and_biases_have_no_weight_decay(name, mesh):
    """LARS takes parameters without weight decay for those that it does not adapt to their norms,
    either."""
    config = replace(resnet50.TINY, optimizer=name)

    state = resnet50.build(config, resnet50.open_data(config), mesh)

    optimizer = state.optimizer
    assert type(optimizer) is OPTIMIZERS[name]
    assert all(group["momentum"] == 0.9 for group in optimizer.param_groups)
    decayed = set()
    for group in optimizer.param_groups:
        if group["weight_decay"]:
            decayed |= {id(parameter) for parameter in group["params"]}
    for name, parameter in state.model.named_parameters():
        is_norm = "bn" in name or "downsample.1" in name
        is_weight = name.endswith("weight") and not is_norm
        assert (id(parameter) in decayed) == is_weight, name


@pytest.mark.parametrize("label", [0.73, [0.25, 0.75]])
def test_labels_that_are_no_classes_are_refused_by_the_loss(label, tmp_path, monkeypatch, mesh):
    class Own(imagenet.SyntheticImages):
        def example(self, index, rng):
            own = imagenet.as_label(label, self.classes, f"picture {index}")
            return super().example(index, rng) | {"label": own}

    monkeypatch.setattr(imagenet, "SyntheticImages", Own)
    pattern = "a label of the images is float32 of shape .*change forward and eval_step"

    with pytest.raises(InputError, match=pattern):
        resnet50.main(replace(resnet50.TINY, runs=str(tmp_path)))


# Evaluation


class Ten:
    """Ten examples, of which the right classes are known; number 7 is unreadable (label -1)."""

    classes = ("a", "b", "c")

    def __len__(self):
        return 10

    def example(self, index, rng):
        label = -1 if index == 7 else index % 3
        return {"image": np.full((32, 32, 3), index, np.uint8), "label": np.int64(label)}


class ByPixel(torch.nn.Module):
    """Says class (pixel % 3) for pixels below 5 and, with equal logits for all classes, nothing
    else; NaN for 6."""

    def forward(self, x):
        pixel = x[:, 0, 0, :1].float()
        right = torch.arange(3, device=x.device) == pixel % 3
        logits = right & (pixel < 5)
        return torch.where(pixel == 6, float("nan"), logits.float())


def test_evaluation_counts_every_readable_example_once(mesh, capsys):
    state = resnet50.State(ByPixel(), torch.nn.Identity(), None)
    step = device.compiled(resnet50.eval_step, mesh)
    config = replace(resnet50.TINY, batch_size=8)

    metrics = resnet50.evaluate(step, state, Ten(), config, mesh)

    # 0 to 4 right; 5, 8 (class 2) wrong, 9 (class 0) right by order among equals; 6 NaN: wrong; 7
    # does not count.
    assert metrics["top1"] == pytest.approx(6 / 9)
    assert metrics["top5"] == pytest.approx(8 / 9)  # with three classes all but the NaN
    assert "evaluated 9 of 10 images" in capsys.readouterr().out


class Descending(torch.nn.Module):
    """Finds class 0 the most likely in each picture, class 1 the next, and so on."""

    def forward(self, x):
        logits = -torch.arange(8.0, device=x.device)
        return logits.expand(len(x), 8)


def test_top_1_and_top_5_end_at_their_numbers(mesh):
    """The right classes have the ranks 0 to 7: one of eight is the first, five are among the first
    five."""
    state = resnet50.State(Descending(), torch.nn.Identity(), None)
    labels = torch.arange(8)
    on_host = {"image": torch.zeros(8, 3, 4, 4), "label": labels, "mask": torch.ones(8)}
    batch = {name: device.upload(tensor, mesh) for name, tensor in on_host.items()}
    step = device.compiled(resnet50.eval_step, mesh)

    found = device.fetch_sums([step(state, batch, resnet50.TINY, mesh)])

    assert found["top1"] == 1
    assert found["top5"] == 5
    assert found["count"] == 8
    logits = -torch.arange(8.0).expand(8, 8)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert found["loss"] == pytest.approx(loss.item())


# Collectives

# Train steps of two stages on four devices: with a norm per device, then with one of the whole
# batch.
COMPILED = """
from dataclasses import replace
from models import resnet
from train import resnet50 as script
from train.common import device, loading

resnet.LAYERS["resnet_tiny"] = (1, 1)
mesh = device.setup(0, "float32")
for groups in (4, 1):
    config = replace(script.TINY, norm_groups=groups)
    data = script.open_data(config)
    state = script.build(config, data, mesh)
    state.model.train()
    step = device.compiled(script.train_step, mesh)
    with loading.parallel_loader(data.train, 64, mesh, train=True, stop=1) as loader:
        step(state, next(loader), config, mesh)["loss"].item()
"""


def is_heavy(instruction: hlo.Instruction, module: hlo.Module) -> bool:
    """Returns whether an instruction is, or calls, a convolution or matrix product."""
    if instruction.opcode in ("convolution", "dot"):
        return True
    for called in instruction.called:
        inside = module.computations[called].instructions
        if any(is_heavy(each, module) for each in inside):
            return True
    return False


def collectives(module: hlo.Module) -> Counter:
    """Returns the number of all-reduces, of other collectives, of convolutions and matrix products
    ("heavy"), and of those that need an all-reduce's result."""
    counts = Counter()
    tainted = set()  # ids of all-reduces and of what needs their results
    for instruction in module.entry.instructions:
        heavy = is_heavy(instruction, module)
        counts["heavy"] += heavy
        if instruction.opcode == "all-reduce":
            counts["all-reduce"] += 1
            tainted.add(instruction.id)
        elif instruction.opcode.startswith(("all-", "collective-", "reduce-scatter")):
            counts["other"] += 1
        elif tainted & set(instruction.operands):
            tainted.add(instruction.id)
            counts["heavy after all-reduce"] += heavy
    return counts


@pytest.mark.slow
def test_norm_per_device_needs_no_collective_before_the_update(tmp_path):
    """Neither the forward nor the backward pass waits for one."""
    flags = environment(XLA_FLAGS=DUMP.format(tmp_path))
    subprocess.run([sys.executable, "-c", COMPILED], env=flags, check=True)
    programs = tmp_path.glob("*cpu_after_optimizations.hlo.pb")
    steps = sorted(programs, key=lambda path: path.stat().st_size)[-2:]
    # Their names have a number.
    first, second = sorted(steps)

    per_device = collectives(read_program(first))
    whole = collectives(read_program(second))

    with torch.device("meta"):
        model = ResNet((1, 1), 10)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    statistics = 2 * len(norms)
    assert per_device["heavy"] > 25
    assert per_device["heavy after all-reduce"] == 0
    assert per_device["other"] == 0
    # Gradients, running statistics, loss and accuracy.
    assert per_device["all-reduce"] <= len(list(model.parameters())) + statistics + 2
    assert whole["heavy after all-reduce"] > 20, "norm over the whole batch does need them"


# What is refused


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--label-smoothing 1", "--label-smoothing is 1.0.*below 1"),
        ("--warmup-epochs 9", "--warmup-epochs is 9.*below --epochs, 8"),
        ("--batch-size 30", "--batch-size 30.* 8 --norm-groups"),
        (
            "--update-every 8",
            "--batch-size 64, in --update-every 8, .* 8 --norm-groups of at least 2",
        ),
        (
            "--batch-size 4 --update-every 4 --norm-groups 0",
            "--batch-size 4, .*-every 4, .* 1 --norm-groups of",
        ),
        (
            "--batch-size 4 --norm-groups 0 --workers 0",
            r"batch norm: .* \[4, .*4 groups of at least 2 .*--batch-size",
        ),
        ("--norm-groups 2", "--norm-groups is 2.*1 or a multiple of 4 devices"),
        ("--image-size 8", "--image-size is 8.*at least 32"),
        ("--weights nowhere.safetensors", "there is no weights file nowhere.safetensors"),
        ("--data /nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_values_that_are_refused(refused, flags, pattern):
    refused(resnet50, f"tiny {flags}", pattern)


# Broken images


@pytest.fixture
def colours(tmp_path) -> Path:
    """A folder of 39 pictures a split, of three classes, each of one colour."""
    folder = tmp_path / "images"
    for split in ("train", "val"):
        for number in range(39):
            file = folder / split / "abc"[number // 13] / f"{number:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.new("RGB", (32, 32), (number, 0, 0)).save(file)
    return folder


@pytest.mark.parametrize("broken", [0, 38])
def test_broken_first_and_last_images_are_found_before_step_1(broken, colours, tmp_path, refused):
    """Those of the evaluation split."""
    (path,) = colours.glob(f"val/*/{broken:02d}.png")
    path.write_bytes(b"")
    flags = f"tiny --batch-size 16 --data {colours} --runs {tmp_path}/runs --name run"

    refused(resnet50, flags, re.escape(str(path)))

    assert not (tmp_path / "runs").exists()


def test_an_evaluation_split_of_broken_images_is_refused(colours, tmp_path, refused):
    for path in colours.glob("val/*/*.png"):
        path.write_bytes(b"")
    flags = f"tiny --batch-size 16 --data {colours} --runs {tmp_path}/runs --name run"
    pattern = "none of the first and last images of the evaluation split"

    refused(resnet50, f"{flags} --skip-broken", pattern)

    assert not (tmp_path / "runs").exists()


@pytest.fixture
def noise(tmp_path) -> Path:
    """A folder of ten classes, as many as the trial has, whose training images of class d are
    broken."""
    folder = tmp_path / "noise"
    rng = np.random.default_rng(0)
    for split, count in (("train", 7), ("val", 1)):
        for name in "abcdefghij":
            images = folder / split / name
            images.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 255, (40, 40, 3), np.uint8)
                PIL.Image.fromarray(pixels).save(images / f"{number}.jpg")
    for path in (folder / "train/d").iterdir():
        path.write_bytes(path.read_bytes()[:300])
    return folder


def test_a_broken_image_stops_the_run(noise, refused):
    # From a worker process.
    flags = f"tiny --data {noise} --workers 1 --epochs 2"

    refused(resnet50, flags, r"train/d/\d.jpg.*--skip-broken")


def test_broken_images_are_replaced_and_reported(noise, tmp_path, capsys):
    (noise / "val/d/0.jpg").write_bytes(b"")
    # Ten classes in batches of 64, as in the trial: the same graphs.
    config = replace(
        resnet50.TINY, data=str(noise), epochs=2, skip_broken=True, runs=str(tmp_path / "runs")
    )

    resnet50.main(config)

    output = capsys.readouterr().out
    assert "evaluated 9 of 10 images" in output
    assert re.search(r"\b([2-9]|1\d) training images could not be decoded", output)
