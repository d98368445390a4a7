"""Strong augmentation: what torchvision's new recipe adds to crop and mirror.

source    references/classification of torchvision; Vryniotis 2021, "How to Train State-Of-The-Art
          Models Using TorchVision's Latest Primitives" (PyTorch's blog)

    crop, mirror            data/imagenet.py             on the host, uint8
    trivial_augment         here                         on the host, uint8
    normalize               models/resnet.py             on the device, float32
    random erasing          models/mixing.py             on the device: what is erased is the mean
    mixup or cutmix         models/mixing.py             on the device, with the next image

The order is the recipe's. All is drawn here, from the example's own generator: an example gets the
numbers "erased", "pasted" and "share", which the device applies. With the same draws, pictures and
boxes are torchvision's.

One thing differs: the recipe draws mixup or cutmix once per batch of a GPU, this file once per
example (as timm's mode "elem"), so that no number depends on how many devices share a batch.
"""

import math

import numpy as np
from PIL import Image
from torchvision.transforms import InterpolationMode, TrivialAugmentWide
from torchvision.transforms.autoaugment import _apply_op

ERASE_PROBABILITY = 0.1
MIXUP_ALPHA = 0.2
CUTMIX_ALPHA = 1.0

# The defaults of torchvision's RandomErasing (Zhong et al. 2017, arXiv:1708.04896).
ERASED_AREA = (0.02, 0.33)  # share of the image
ERASED_RATIO = (0.3, 3.3)  # height / width
ERASE_TRIES = 10

# Of each operation the magnitudes to draw from, a tensor, and whether they may be negative.
OPERATIONS = TrivialAugmentWide()._augmentation_space(num_bins=31)
OPERATION_NAMES = tuple(OPERATIONS)
# They shift by whole pixels, where interpolation changes nothing and takes Pillow 30 times as long.
SHIFTS = ("TranslateX", "TranslateY")

NOTHING = np.zeros(4, np.int32)  # an empty box


def trivial_augment(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Applies one operation of TrivialAugment, drawn with its magnitude, to uint8 [S, S, 3].

    Source: Müller and Hutter 2021 (arXiv:2103.10158), "wide"; torchvision's TrivialAugmentWide with
    bilinear interpolation, on a Pillow image as in the recipe.
    """
    name = OPERATION_NAMES[rng.integers(len(OPERATION_NAMES))]
    if name == "Identity":
        return image

    magnitudes, is_signed = OPERATIONS[name]
    magnitude = 0.0
    if magnitudes.ndim:
        magnitude = float(magnitudes[rng.integers(len(magnitudes))])
    if is_signed and rng.integers(2):
        magnitude = -magnitude
    interpolation = InterpolationMode.BILINEAR
    if name in SHIFTS:
        interpolation = InterpolationMode.NEAREST
    changed = _apply_op(Image.fromarray(image), name, magnitude, interpolation, fill=None)
    return np.array(changed)  # a copy: Pillow's own memory cannot be written


def draw(size: int, rng: np.random.Generator) -> dict[str, np.ndarray | np.float32]:
    """Draws what the device does to an image of `size` pixels, square, and how it mixes it with its
    partner.

    Returns:
        "erased" and "pasted", int32 [4], boxes (top, bottom, left, right) of pixels, the bottom and
        the right ones not included: of the image erased, and replaced by the partner's; empty ones
        are zeros. "share", float32: the weight of the image outside of "pasted"; the partner has
        the rest.
    """
    erased = NOTHING
    if rng.random() < ERASE_PROBABILITY:
        erased = draw_erased(size, rng)
    if rng.random() < 0.5:
        share = np.float32(rng.beta(MIXUP_ALPHA, MIXUP_ALPHA))
        return {"erased": erased, "pasted": NOTHING, "share": share}
    return {"erased": erased, "pasted": draw_pasted(size, rng), "share": np.float32(1)}


def draw_erased(size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws the box of torchvision's RandomErasing; empty where ten draws do not fit the image."""
    shortest = math.log(ERASED_RATIO[0])
    tallest = math.log(ERASED_RATIO[1])
    for _ in range(ERASE_TRIES):
        area = size * size * rng.uniform(*ERASED_AREA)
        ratio = math.exp(rng.uniform(shortest, tallest))
        height = round(math.sqrt(area * ratio))
        width = round(math.sqrt(area / ratio))
        if height < size and width < size:
            top = int(rng.integers(size - height + 1))
            left = int(rng.integers(size - width + 1))
            return np.array([top, top + height, left, left + width], np.int32)
    return NOTHING


def draw_pasted(size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws the box of CutMix (Yun et al. 2019, arXiv:1905.04899) as torchvision does: around any
    pixel, cut at the edges."""
    own_area = rng.beta(CUTMIX_ALPHA, CUTMIX_ALPHA)  # share that the image would keep
    x = int(rng.integers(size))
    y = int(rng.integers(size))
    half = int(0.5 * math.sqrt(1 - own_area) * size)
    box = [y - half, y + half, x - half, x + half]
    return np.clip(box, 0, size).astype(np.int32)
