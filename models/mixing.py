"""Random erasing, mixup and cutmix of a batch on its device, in the compiled step.

    images = mixing.erase(images, batch["erased"])
    images = mixing.mix(images, batch["pasted"], batch["share"])

data/augmentation.py draws the boxes and shares, and says where they come from. The shapes are
fixed: a box is a comparison with the numbers of rows and columns.

An image's partner is its neighbour: 0 and 1, 2 and 3, … exchange. (torchvision rolls the batch by
one. Rolled over devices, an image would need one of another device, and rolled within each device
the numbers would depend on how many there are. In a batch of two images both are the same.)
"""

import torch
from torch import Tensor


def inside(boxes: Tensor, height: int, width: int) -> Tensor:
    """Returns whether each pixel is inside of the box of its image, bool [B, 1, height, width].

    Args:
        boxes: int32 [B, 4]: top, bottom, left, right; the second and the last are outside.
    """
    rows = torch.arange(height, dtype=boxes.dtype, device=boxes.device)
    columns = torch.arange(width, dtype=boxes.dtype, device=boxes.device)
    top, bottom, left, right = boxes[:, :, None].unbind(1)  # [B, 1] each
    in_rows = (rows >= top) & (rows < bottom)
    in_columns = (columns >= left) & (columns < right)
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def erase(images: Tensor, boxes: Tensor) -> Tensor:
    """Returns normalized images [B, C, H, W] with zeros, their mean, in their boxes [B, 4]."""
    is_erased = inside(boxes, *images.shape[2:])
    return torch.where(is_erased, torch.zeros_like(images), images)


def partners(rows: Tensor) -> Tensor:
    """Returns, for each of an even number of rows [B, ...], its partner."""
    pairs = rows.view(len(rows) // 2, 2, *rows.shape[1:])
    return pairs.flip(1).view(rows.shape)


def mix(images: Tensor, boxes: Tensor, shares: Tensor) -> Tensor:
    """Returns images [B, C, H, W] with their partner's pixels in their boxes [B, 4], and elsewhere
    their own and their partner's weighted by `shares` [B] and 1 - `shares`."""
    partner = partners(images)
    share = shares[:, None, None, None]
    blended = images * share + partner * (1 - share)
    return torch.where(inside(boxes, *images.shape[2:]), partner, blended)


def own_shares(boxes: Tensor, shares: Tensor, pixels: int) -> Tensor:
    """Returns the weight of each image's own label [B]; its partner's label has the rest.

    Args:
        boxes, shares: those of `mix`, one of which mixes nothing.
        pixels: of an image.
    """
    top, bottom, left, right = boxes.unbind(1)
    pasted = ((bottom - top) * (right - left)).float() / pixels
    return shares * (1 - pasted)
