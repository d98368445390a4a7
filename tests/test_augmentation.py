"""The strong augmentation of images: what is drawn on the host (data/augmentation.py), and what the
device makes of it (models/mixing.py), beside torchvision's transforms with the same draws."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2
from torchvision.transforms.functional import InterpolationMode

from data import augmentation, imagenet
from models import mixing
from models.resnet import Normalize
from train import resnet50

SIZE = 40


class TorchDraws:
    """Draws as torchvision does, from torch's generator, with the methods of NumPy's."""

    def random(self) -> float:
        return torch.rand(1).item()

    def uniform(self, low: float, high: float) -> float:
        return torch.empty(1).uniform_(low, high).item()

    def integers(self, high: int) -> int:
        return torch.randint(high, (1,)).item()

    def beta(self, a: float, b: float) -> float:
        return torch.distributions.Beta(torch.tensor(a), torch.tensor(b)).sample().item()


DRAWN = TorchDraws()


def pictures(count: int, size: int = SIZE) -> np.ndarray:
    """Returns smooth pictures with all shades, uint8 [count, size, size, 3]."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (count, 6, 6, 3), np.uint8)
    made = []
    for pixels in small:
        made.append(np.asarray(Image.fromarray(pixels).resize((size, size))))
    return np.stack(made)


# ---- on the host ---------------------------------------------------------------------------------
def test_trivial_augment_is_torchvisions_byte_for_byte():
    (picture,) = pictures(1)
    theirs = transforms.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR)
    changed = 0
    for seed in range(300):
        torch.manual_seed(seed)
        expected = np.asarray(theirs(Image.fromarray(picture)))
        torch.manual_seed(seed)

        found = augmentation.trivial_augment(picture, DRAWN)

        assert np.array_equal(found, expected), seed
        changed += not np.array_equal(found, picture)
    assert 200 < changed < 290  # some operations leave a picture as it is


def test_all_operations_of_trivial_augment_are_drawn_equally(monkeypatch):
    names = Counter()

    def count(image, name, *_, **__):
        names[name] += 1
        return image

    monkeypatch.setattr(augmentation, "_apply_op", count)
    rng = np.random.default_rng(0)
    for _ in range(1400):
        augmentation.trivial_augment(np.zeros((2, 2, 3), np.uint8), rng)

    assert len(names) == 13  # and the identity
    assert all(70 < number < 130 for number in names.values())


def test_erased_boxes_are_torchvisions():
    image = torch.zeros(3, SIZE, SIZE)
    for seed in range(200):
        torch.manual_seed(seed)
        top, left, height, width, _ = transforms.RandomErasing.get_params(
            image, augmentation.ERASED_AREA, augmentation.ERASED_RATIO, [0.0]
        )
        torch.manual_seed(seed)

        found = augmentation.draw_erased(SIZE, DRAWN)

        assert found.tolist() == [top, top + height, left, left + width], seed
    defaults = transforms.RandomErasing()
    assert (defaults.scale, defaults.ratio) == (augmentation.ERASED_AREA, augmentation.ERASED_RATIO)


def test_nothing_is_erased_where_no_draw_fits():
    always_too_wide = TorchDraws()
    always_too_wide.uniform = lambda low, high: high

    assert not augmentation.draw_erased(1, always_too_wide).any()


def test_pasted_boxes_are_torchvisions():
    cutmix = v2.CutMix(alpha=augmentation.CUTMIX_ALPHA, num_classes=2)
    batch = torch.zeros(2, 3, SIZE, SIZE)
    empty = 0
    for seed in range(200):
        torch.manual_seed(seed)
        left, top, right, bottom = cutmix.make_params([batch])["box"]
        torch.manual_seed(seed)

        found = augmentation.draw_pasted(SIZE, DRAWN)

        assert found.tolist() == [top, bottom, left, right], seed
        empty += top == bottom
    assert empty < 20


def test_a_tenth_is_erased_and_half_is_mixed_as_a_whole():
    rng = np.random.default_rng(0)
    draws = [augmentation.draw(SIZE, rng) for _ in range(4000)]

    erased = np.mean([draw["erased"].any() for draw in draws])
    assert erased == pytest.approx(0.1, abs=0.02)
    shares = np.array([draw["share"] for draw in draws if draw["share"] < 1])
    assert len(shares) / len(draws) == pytest.approx(0.5, abs=0.03)
    assert shares.mean() == pytest.approx(0.5, abs=0.03)
    # The variance of Beta(a, a).
    assert shares.var() == pytest.approx(1 / (4 * (2 * augmentation.MIXUP_ALPHA + 1)), abs=0.01)
    for draw in draws:
        assert draw["share"] == 1 or not draw["pasted"].any()


def images(split: str, kind: str) -> imagenet.SyntheticImages:
    made = imagenet.SyntheticImages(8, 32, 4, seed=0, split=split)
    made.augmentation = kind
    return made


def test_an_example_is_decided_by_its_generator():
    one = images("train", "strong").example(3, np.random.default_rng((0, 1, 3)))
    same = images("train", "strong").example(3, np.random.default_rng((0, 1, 3)))
    other = images("train", "strong").example(3, np.random.default_rng((0, 2, 3)))

    assert one.keys() == {"image", "label", "erased", "pasted", "share"}
    for name, value in one.items():
        assert np.array_equal(value, same[name])
    assert not np.array_equal(one["image"], other["image"])


def test_crops_are_those_without_the_strong_augmentation(monkeypatch):
    """It draws after them."""
    monkeypatch.setattr(augmentation, "trivial_augment", lambda image, rng: image)

    plain = images("train", "crop").example(3, np.random.default_rng(0))
    strong = images("train", "strong").example(3, np.random.default_rng(0))

    assert plain.keys() == {"image", "label"}
    assert np.array_equal(plain["image"], strong["image"])


def test_evaluated_images_are_not_augmented():
    plain = images("eval", "crop").example(3, np.random.default_rng(0))
    strong = images("eval", "strong").example(3, np.random.default_rng(0))

    assert strong.keys() == {"image", "label"}
    assert np.array_equal(plain["image"], strong["image"])


# ---- on the device -------------------------------------------------------------------------------
CLASSES = 5


class Flat(torch.nn.Module):
    """A linear classifier of the pixels."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3 * SIZE * SIZE, CLASSES)

    def forward(self, x):
        return self.linear(x.flatten(1))


def reference(batch: dict, mixed: v2.Transform) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the images and the soft labels [B, CLASSES] that torchvision makes of a batch: each
    pair is a batch of its own."""
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    prepared = []
    for pixels, (top, bottom, left, right) in zip(batch["image"], batch["erased"], strict=True):
        image = normalize(transforms.functional.to_tensor(pixels.numpy()))
        erased = transforms.functional.erase(image, top, left, bottom - top, right - left, v=0.0)
        prepared.append(erased)

    made_images = []
    made_labels = []
    for first in range(0, len(prepared), 2):
        pair = torch.stack(prepared[first : first + 2])
        mixed_images, labels = mixed(pair, batch["label"][first : first + 2])
        made_images.append(mixed_images)
        made_labels.append(labels)
    return torch.cat(made_images), torch.cat(made_labels)


def strong_batch(**drawn) -> dict[str, torch.Tensor]:
    """Returns a batch of six images, two of them erased, with the same draw for all."""
    rng = np.random.default_rng(3)
    erased = [augmentation.NOTHING] * 6
    erased[1] = augmentation.draw_erased(SIZE, rng)
    erased[4] = augmentation.draw_erased(SIZE, rng)
    return {
        "image": torch.from_numpy(pictures(6)),
        "label": torch.tensor([0, 1, 2, 3, 4, 4]),
        "erased": torch.from_numpy(np.stack(erased)),
        "pasted": torch.tensor([drawn.get("pasted", [0, 0, 0, 0])] * 6, dtype=torch.int32),
        "share": torch.tensor([drawn.get("share", 1.0)] * 6),
    }


MIXED = {
    "mixup": (v2.MixUp, {"lam": 0.3}, {"share": 0.3}),
    "cutmix": (
        v2.CutMix,
        {"box": (20, 4, 38, 31), "lam_adjusted": 1 - 18 * 27 / SIZE**2},
        {"pasted": [4, 31, 20, 38]},
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_pictures_and_loss_are_torchvisions_of_equal_draws(name, monkeypatch):
    """Erasing after the normalization, mixing, soft labels and label smoothing included."""
    kind, parameters, drawn = MIXED[name]
    monkeypatch.setattr(kind, "make_params", lambda self, inputs: dict(parameters))
    batch = strong_batch(**drawn)
    expected, soft_labels = reference(batch, kind(num_classes=CLASSES))
    normalize = Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD)
    model = Flat()
    state = resnet50.State(model, normalize, optimizer=None)
    config = resnet50.Config(augmentation="strong", image_size=SIZE)
    mesh = EagerMesh()

    found = mixing.mix(
        mixing.erase(normalize(batch["image"]), batch["erased"]), batch["pasted"], batch["share"]
    )
    metrics = resnet50.forward(state, batch, config, mesh)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        logits = model(expected)
        loss = F.cross_entropy(logits, soft_labels, label_smoothing=config.label_smoothing)
        accuracy = (logits.argmax(1) == soft_labels.argmax(1)).float().mean()
    assert metrics["loss"].item() == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["accuracy"].item() == pytest.approx(accuracy.item())


class EagerMesh:
    """What `forward` needs of a mesh, in float32."""

    @staticmethod
    def autocast():
        return torch.no_grad()


def test_each_image_is_mixed_by_its_own_draw():
    batch = torch.arange(4.0)[:, None, None, None].expand(4, 1, 2, 2)
    boxes = torch.zeros(4, 4, dtype=torch.int32)
    boxes[3] = torch.tensor([0, 1, 0, 2])  # the upper half

    found = mixing.mix(batch, boxes, torch.tensor([1.0, 0.25, 0.5, 1.0]))

    assert found[:, 0].tolist() == [
        [[0, 0], [0, 0]],
        [[0.25, 0.25], [0.25, 0.25]],  # a quarter of 1, the rest of 0
        [[2.5, 2.5], [2.5, 2.5]],
        [[2, 2], [3, 3]],
    ]
    shares = mixing.own_shares(boxes, torch.tensor([1.0, 0.25, 0.5, 1.0]), pixels=4)
    assert shares.tolist() == [1, 0.25, 0.5, 0.5]
