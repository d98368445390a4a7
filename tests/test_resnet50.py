"""What is particular to train/resnet50.py; what it shares with the other scripts is in test_scripts.py."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import safetensors
import timm
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
    assert resnet50.main(replace(resnet50.TINY, precision="bfloat16", runs=str(tmp_path)))["top1"] > 0.9


def test_an_export_is_torchvisions_and_weights_start_from_it_with_a_new_head_for_other_classes(tmp_path, mesh):
    images = imagenet.SyntheticImages(1, 64, 12, 0, "train")
    ours, theirs = resnet("resnet50", 12), torchvision.models.resnet50(num_classes=12)
    config, file = replace(resnet50.TINY, model="resnet50"), str(tmp_path / "model.safetensors")
    resnet50.export(str(tmp_path), resnet50.State(ours, None, None), resnet50.Data(images, images), config, mesh)
    assert json.loads(safetensors.safe_open(file, "pt").metadata()["classes"]) == list(images.classes)
    weights = files.load_weights(file)
    theirs.load_state_dict(weights)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-5, atol=1e-5)
    for classes in (12, 4):
        new = resnet("resnet50", classes)
        head = new.fc.weight.clone()
        load_weights(new, weights, file)
        assert torch.equal(new.state_dict()["layer3.2.conv1.weight"], weights["layer3.2.conv1.weight"])
        assert torch.equal(new.fc.weight, weights["fc.weight"] if classes == 12 else head)
    with pytest.raises(InputError, match=f"--weights {file} does not fit --model: .* more tensors differ"):
        load_weights(resnet("resnet101", 12), weights, file)


@pytest.fixture(scope="module")
def textures(tmp_path_factory):
    """Two folders of the same pictures of ten classes: their names are in one order in the first, in another in the
    second. And the names of the second in the order of the first."""
    folder = tmp_path_factory.mktemp("textures")
    rng, names = np.random.default_rng(0), {}
    for split, count in (("train", 130), ("val", 60)):
        images = imagenet.SyntheticImages(count, 32, 10, 0, "train")
        for index in range(count):
            pixels, label = images.example(index, rng).values()
            names[label] = f"{(label * 7 + 3) % 10} texture"
            for of, name in (("one", f"Texture {label}"), ("two", names[label])):
                path = folder / of / split / name / f"{index:03d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                PIL.Image.fromarray(pixels).save(path)
    return folder, [names[label] for label in range(10)]


def renamed(file: str, to, names: list[str] | None) -> str:
    """The same weights with other names of their classes, or with none, as torchvision's."""
    weights, metadata = files.load_with_metadata(file)
    metadata = {} if names is None else metadata | {"classes": json.dumps(names)}
    files.save_weights(str(to), weights, metadata)
    return str(to)


def evaluated(folder: str, weights: str, runs, name: str, **changes) -> float:
    """The top-1 of weights on a folder of images, without training."""
    still = replace(resnet50.TINY, lr=0.0, epochs=1, warmup_epochs=0.5, runs=str(runs))
    return resnet50.main(replace(still, data=folder, weights=weights, name=name, **changes))["top1"]


def test_weights_are_evaluated_by_the_names_of_their_classes(textures, run_of, tmp_path, capsys):
    """The trial's export knows the textures; the second folder has its names, in another order of files and classes."""
    (folder, names), (path, *_) = textures, run_of("resnet50")
    export = f"{path}/export/model.safetensors"
    expected = evaluated(f"{folder}/one", export, tmp_path, "as it is")  # in any case: texture 0, Texture 0
    assert expected > 0.8 and "--weights" not in capsys.readouterr().out
    same = pytest.approx(expected, abs=0.1)  # the statistics of its norms go on, in another order of pictures

    theirs = renamed(export, tmp_path / "named.safetensors", names)
    assert evaluated(f"{folder}/two", theirs, tmp_path, "named") == same
    assert f"in the order {names[0]}, {names[1]}" in capsys.readouterr().out
    again = f"{tmp_path}/named/export/model.safetensors"
    assert json.loads(files.load_with_metadata(again)[1]["classes"]) == sorted(names)


@pytest.mark.slow  # six runs
def test_weights_of_other_names_or_of_none(textures, run_of, tmp_path, capsys, refused):
    (folder, names), (path, *_) = textures, run_of("resnet50")
    export = f"{path}/export/model.safetensors"
    same = pytest.approx(evaluated(f"{folder}/one", export, tmp_path, "as it is"), abs=0.1)
    theirs = renamed(export, tmp_path / "named.safetensors", names)
    assert evaluated(f"{folder}/two", theirs, tmp_path, "named") == same
    again = f"{tmp_path}/named/export/model.safetensors"
    assert evaluated(f"{folder}/two", again, tmp_path, "again") == same

    nameless = renamed(export, tmp_path / "nameless.safetensors", None)
    flags = f"tiny --lr 0 --weights {nameless} --data {folder}/two"
    refused(resnet50, flags, "nameless.safetensors does not name the 10 classes.*without training.*--labels")
    assert evaluated(f"{folder}/two", nameless, tmp_path, "stated", labels=",".join(names)) == same
    capsys.readouterr()
    evaluated(f"{folder}/one", nameless, tmp_path, "trained", lr=1e-9)
    assert "taken to be in the order Texture 0, Texture 1" in capsys.readouterr().out
    refused(resnet50, f"tiny --lr 0 --weights {export} --data {folder}/two", "classes texture 0, .*without training")
    evaluated(f"{folder}/two", export, tmp_path, "other", lr=1e-9)
    assert re.search("the head is new: .*classes texture 0.*the data has .* texture", capsys.readouterr().out)
    refused(resnet50, f"{flags} --labels a,b", "--labels is a,b; expected 0 texture,1 texture")
    refused(resnet50, f"tiny --labels a,b --data {folder}/two", "--labels is a,b; it is for the head of --weights")


def test_a_head_follows_the_names_of_its_classes_to_the_logit():
    torch.manual_seed(0)
    theirs, classes = resnet("resnet_tiny", 4).eval(), ["ant", "bee", "cat", "dog"]
    metadata = {"classes": json.dumps(["Dog", "ANT", "cat", "bee"])}
    head = decide_head(theirs.state_dict(), metadata, classes, "file")
    ours = resnet("resnet_tiny", 4).eval()
    load_weights(ours, theirs.state_dict(), "file", head)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images)[:, [1, 3, 2, 0]])
    other = decide_head(theirs.state_dict(), {"classes": json.dumps(["ant", "bee", "cat", "eel"])}, classes, "file")
    new = resnet("resnet_tiny", 4)
    first = new.fc.weight.clone()
    load_weights(new, theirs.state_dict(), "file", other)
    assert torch.equal(new.fc.weight, first) and torch.equal(new.conv1.weight, theirs.conv1.weight)
    for wrong in ("no JSON", json.dumps(["ant"]), json.dumps({"ant": 0})):
        with pytest.raises(InputError, match="in its metadata, not the names of so many"):
            decide_head(theirs.state_dict(), {"classes": wrong}, classes, "file")
    with pytest.raises(InputError, match="--labels states the order .* for 4 classes, the data has 2"):
        decide_head(theirs.state_dict(), {}, ["a", "b"], "file", ["a", "b"])


def test_torchvisions_weights_have_imagenets_order_where_the_data_has():
    weights, ids = {"fc.bias": torch.zeros(1000)}, [f"n{number:08d}" for number in range(1000)]
    names = [f"{name}, and so on" for name in torchvision.models.ResNet50_Weights.IMAGENET1K_V1.meta["categories"]]
    for classes in (ids, names):
        head = decide_head(weights, {}, classes, "resnet50.safetensors")
        assert head.rows == list(range(1000)) and not head.refusal_at_lr_0
        assert "resnet50.safetensors does not name its 1,000 classes: they are taken for ImageNet's" in head.message
    for classes in (sorted(names), [f"class {number}" for number in range(1000)]):
        assert "does not name the 1000 classes" in decide_head(weights, {}, classes, "file").refusal_at_lr_0


@pytest.mark.parametrize("name", ["resnet50", "resnet_tiny"])
def test_the_page_classifies_a_new_picture_with_an_export(name, tmp_path, mesh, capsys):
    """As the run's own evaluation does: same pixels, same numbers, same class."""
    folder, rng = tmp_path / "runs/<name>/export", np.random.default_rng(0)
    picture = str(tmp_path / "picture.jpg")
    PIL.Image.fromarray(rng.integers(0, 256, (70, 90, 3), np.uint8)).resize((180, 140)).save(picture)
    images = imagenet.SyntheticImages(1, 32, 12, 0, "train")
    config, model = replace(resnet50.TINY, model=name), resnet(name, 12)
    resnet50.export(str(folder), resnet50.State(model, None, None), resnet50.Data(images, images), config, mesh)

    pixels = imagenet.eval_crop(imagenet.decode(open(picture, "rb").read()), config.image_size)
    normalize = Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD)
    with torch.no_grad():
        expected = model.eval()(normalize(torch.from_numpy(pixels)[None])).softmax(1)[0]

    code = page_code("exports.md", "ResNet-50 in torchvision", **{"runs/<name>": f"{tmp_path}/runs/<name>"})
    code, tiny = code.split("from models.resnet import resnet")
    code = code.replace("picture.jpg", picture)
    if name == "resnet_tiny":
        made = 'model = torchvision.models.get_model(about["model"], num_classes=len(classes))'
        assert made in code
        code = code.replace(made, f"from models.resnet import resnet{tiny}")
    exec(code, {})
    label, share = capsys.readouterr().out.strip().rsplit(" ", 1)
    assert label == images.classes[expected.argmax()] and float(share) == pytest.approx(expected.max().item(), rel=1e-4)


def test_parts_of_a_batch_give_the_numbers_of_all_of_it_with_the_same_groups_of_norms(run_of, tmp_path):
    path, _, config = run_of("resnet50", "short")
    parts = replace(config, update_every=2, norm_groups=config.norm_groups // 2, runs=str(tmp_path))
    stop_at(7, crash, resnet50.main, replace(parts, name="parts"))
    whole, found = losses(path)[:6], losses(tmp_path / "parts")
    assert found == pytest.approx(whole, rel=1e-4) and max(whole) - min(whole) > 0.01


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_norms_and_biases_have_no_weight_decay(name, mesh):
    """LARS takes parameters without weight decay for those that it does not adapt to their norms, either."""
    config = replace(resnet50.TINY, optimizer=name)
    model, _, optimizer = resnet50.build(config, resnet50.open_data(config), mesh)
    assert type(optimizer) is {"sgd": torch.optim.SGD, "lars": timm.optim.Lars}[name]
    assert all(group["momentum"] == 0.9 for group in optimizer.param_groups)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        is_weight = name.endswith("weight") and "bn" not in name and "downsample.1" not in name
        assert (id(parameter) in decayed) == is_weight, name


@pytest.mark.parametrize("broken", [0, 38])
def test_an_image_that_is_evaluated_first_or_last_is_read_before_step_1(broken, tmp_path, refused):
    for split in ("train", "val"):
        for number in range(39):
            file = tmp_path / f"images/{split}/{'abc'[number // 13]}/{number:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.new("RGB", (32, 32), (number, 0, 0)).save(file)
    (path,) = tmp_path.glob(f"images/val/*/{broken:02d}.png")
    path.write_bytes(b"")
    flags = f"--batch-size 16 --data {tmp_path}/images --runs {tmp_path}/runs --name run"
    refused(resnet50, f"tiny {flags}", re.escape(str(path)))
    for path in tmp_path.glob("images/val/*/*.png"):
        path.write_bytes(b"")
    refused(resnet50, f"tiny {flags} --skip-broken", "none of the first and last images of the evaluation split")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("label", [0.73, [0.25, 0.75]])
def test_labels_that_are_no_classes_are_refused_by_the_loss_that_is_for_classes(label, tmp_path, monkeypatch, mesh):
    class Own(imagenet.SyntheticImages):
        def example(self, index, rng):
            return super().example(index, rng) | {"label": imagenet.as_label(label, self.classes, f"picture {index}")}

    monkeypatch.setattr(imagenet, "SyntheticImages", Own)
    with pytest.raises(InputError, match="a label of the images is float32 of shape .*change forward and eval_step"):
        resnet50.main(replace(resnet50.TINY, runs=str(tmp_path)))


class Ten:
    """Ten examples, of which the right classes are known; number 7 is unreadable (label -1)."""

    classes = ("a", "b", "c")

    def __len__(self):
        return 10

    def example(self, index, rng):
        return {"image": np.full((32, 32, 3), index, np.uint8), "label": np.int64(-1 if index == 7 else index % 3)}


class ByPixel(torch.nn.Module):
    """Says class (pixel % 3) for pixels below 5 and, with equal logits for all classes, nothing else; NaN for 6."""

    def forward(self, x):
        pixel = x[:, 0, 0, :1].float()
        logits = (torch.arange(3, device=x.device) == pixel % 3) & (pixel < 5)
        return torch.where(pixel == 6, float("nan"), logits.float())


def test_evaluation_counts_every_readable_example_once(mesh, capsys):
    state, step = resnet50.State(ByPixel(), torch.nn.Identity(), None), device.compiled(resnet50.eval_step, mesh)
    metrics = resnet50.evaluate(step, state, Ten(), replace(resnet50.TINY, batch_size=8), mesh)
    # 0 to 4 right; 5, 8 (class 2) wrong, 9 (class 0) right by order among equals; 6 NaN: wrong; 7 does not count.
    assert metrics["top1"] == pytest.approx(6 / 9)
    assert metrics["top5"] == pytest.approx(8 / 9)  # with three classes all but the NaN
    assert "evaluated 9 of 10 images" in capsys.readouterr().out


class Descending(torch.nn.Module):
    """Finds class 0 the most likely in each picture, class 1 the next, and so on."""

    def forward(self, x):
        logits = -torch.arange(8.0, device=x.device)
        return logits.expand(len(x), 8)


def test_top_1_and_top_5_end_at_their_numbers(mesh):
    """The right classes have the ranks 0 to 7: one of eight is the first, five are among the first five."""
    state, labels = resnet50.State(Descending(), torch.nn.Identity(), None), torch.arange(8)
    batch = {"image": torch.zeros(8, 3, 4, 4), "label": labels, "mask": torch.ones(8)}
    batch = {name: device.upload(tensor, mesh) for name, tensor in batch.items()}
    step = device.compiled(resnet50.eval_step, mesh)
    found = device.fetch_sums([step(state, batch, resnet50.TINY, mesh)])
    assert (found["top1"], found["top5"], found["count"]) == (1, 5, 8)
    logits = -torch.arange(8.0).expand(8, 8)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert found["loss"] == pytest.approx(loss.item())


# Train steps of two stages on four devices: with a norm per device, then with one of the whole batch.
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
    with loading.parallel_loader(data.train, 64, mesh, train=True, stop=1) as loader:
        device.compiled(script.train_step, mesh)(state, next(loader), config, mesh)["loss"].item()
"""


def collectives(module: hlo.Module) -> Counter:
    """Returns the number of all-reduces, of other collectives, and of convolutions and matrix products that need an
    all-reduce's result."""

    def heavy(one: hlo.Instruction) -> bool:
        inside = (each for called in one.called for each in module.computations[called].instructions)
        return one.opcode in ("convolution", "dot") or any(map(heavy, inside))

    counts, tainted = Counter(), set()
    for one in module.entry.instructions:
        counts["heavy"] += heavy(one)
        if one.opcode == "all-reduce":
            counts["all-reduce"] += 1
            tainted.add(one.id)
        elif one.opcode.startswith(("all-", "collective-", "reduce-scatter")):
            counts["other"] += 1
        elif tainted & set(one.operands):
            tainted.add(one.id)
            counts["heavy after all-reduce"] += heavy(one)
    return counts


@pytest.mark.slow
def test_norm_per_device_needs_no_collective_in_the_forward_and_backward_pass(tmp_path):
    flags = environment(XLA_FLAGS=DUMP.format(tmp_path))
    subprocess.run([sys.executable, "-c", COMPILED], env=flags, check=True)
    steps = sorted(tmp_path.glob("*cpu_after_optimizations.hlo.pb"), key=lambda path: path.stat().st_size)[-2:]
    counts, whole = (collectives(read_program(path)) for path in sorted(steps))  # their names have a number
    with torch.device("meta"):
        model = ResNet((1, 1), 10)
    statistics = 2 * sum(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    assert counts["heavy"] > 25
    assert counts["heavy after all-reduce"] == counts["other"] == 0
    # Gradients, running statistics, loss and accuracy.
    assert counts["all-reduce"] <= len(list(model.parameters())) + statistics + 2
    assert whole["heavy after all-reduce"] > 20, "norm over the whole batch does need them"


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--label-smoothing 1", "--label-smoothing is 1.0.*below 1"),
        ("--warmup-epochs 9", "--warmup-epochs is 9.*below --epochs, 8"),
        ("--batch-size 30", "--batch-size 30.* 8 --norm-groups"),
        ("--update-every 8", "--batch-size 64, in --update-every 8, .* 8 --norm-groups of at least 2"),
        ("--batch-size 4 --update-every 4 --norm-groups 0", "--batch-size 4, .*-every 4, .* 1 --norm-groups of"),
        ("--batch-size 4 --norm-groups 0 --workers 0", r"batch norm: .* \[4, .*4 groups of at least 2 .*--batch-size"),
        ("--norm-groups 2", "--norm-groups is 2.*1 or a multiple of 4 devices"),
        ("--image-size 8", "--image-size is 8.*at least 32"),
        ("--weights nowhere.safetensors", "there is no weights file nowhere.safetensors"),
        ("--data /nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_values_that_are_refused(refused, flags, pattern):
    refused(resnet50, f"tiny {flags}", pattern)


def test_broken_images_stop_the_run_or_are_replaced_and_reported(refused, capsys, tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 7), ("val", 1)):
        for name in "abcdefghij":  # ten classes in batches of 64, as in the trial: the same graphs
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                image = PIL.Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8))
                image.save(tmp_path / split / name / f"{i}.jpg")
    for path in (tmp_path / "train/d").iterdir():
        path.write_bytes(path.read_bytes()[:300])
    # From a worker process.
    refused(resnet50, f"tiny --data {tmp_path} --workers 1 --epochs 2", r"train/d/\d.jpg.*--skip-broken")
    (tmp_path / "val/d/0.jpg").write_bytes(b"")
    config = replace(resnet50.TINY, data=str(tmp_path), epochs=2, skip_broken=True, runs=str(tmp_path / "runs"))
    resnet50.main(config)
    output = capsys.readouterr().out
    assert "evaluated 9 of 10 images" in output
    assert re.search(r"\b([2-9]|1\d) training images could not be decoded", output)
