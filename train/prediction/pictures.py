"""Predicts pictures by an export of train/resnet50.py."""

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data import imagenet
from data import pictures as picture_files
from errors import InputError
from models.resnet import LAYERS, Normalize, resnet
from train import resnet50
from train.common import device, files, loading
from train.common.mesh import Mesh
from train.prediction import answer_formats
from train.prediction.pieces import Piece, batch_rows

VMEM_KIB = resnet50.VMEM_KIB
BATCH = 64  # pictures, without --batch-size
INPUTS = "a picture, a folder of pictures, a pattern, or - for paths from the standard input"


def open_model(folder: str, config: Any) -> "Pictures":
    """Opens an export on the host, and finds the pictures of --data.

    Raises:
        InputError: the export or the data cannot be read.
    """
    return Pictures(folder, config)


def exported_precision(folder: str) -> str:
    """Returns the precision of the run's evaluation; "" where the export does not say it."""
    path = os.path.join(folder, "model.safetensors")
    return files.read_metadata(path).get("precision", "")


class Pictures:
    """A network for pictures, and those to predict: a Predictor of pieces.py.

    Attributes:
        notes: sentences for the user.
    """

    def __init__(self, folder: str, config: Any):
        self.config = config
        self.notes: list[str] = []
        path = os.path.join(folder, "model.safetensors")
        self._weights, self._about = files.load_with_metadata(path)
        names = _names(self._about, path)
        self.resize, self.image_size = _sizes(self._about, config.image_size, path)
        self._objective = self._about.get("objective", "classes")
        self._format = answer_formats.of_objective(self._objective, names, config.top)
        self._network = _network(self._about, self._weights, len(names), path)

        self._state = None
        self._step = None

        found = picture_files.find(config.data or picture_files.STANDARD_INPUT)
        self.paths = found.paths
        if found.left_out:
            self.notes.append(f"{found.left_out:,} files of {config.data} are no pictures")

    def to_answers(self, logits: np.ndarray) -> list[dict]:
        """Returns the answers of logits [n, outputs]; a regression's are in the labels' unit."""
        if self._objective == "regression":
            logits = logits * float(self._about["label_std"]) + float(self._about["label_mean"])
        return self._format(logits)

    def pieces(self, mesh: Mesh) -> Iterator[Piece]:
        """Yields the pictures, a batch each, whose outputs the device computes."""
        if not self.paths:  # an empty standard input
            return
        self._prepare(mesh)
        dataset = picture_files.Pictures(self.paths, self.resize, self.image_size)
        batch_size = batch_rows(self.config.batch_size or BATCH, len(self.paths), mesh.num_devices)
        loader = loading.parallel_loader(
            dataset, batch_size, mesh, train=False, workers=self.config.workers
        )
        with loader:
            for number, batch in enumerate(loader):
                first = number * batch_size
                paths = self.paths[first : first + batch_size]
                input_of_row = np.arange(batch_size)
                input_of_row[len(paths) :] = -1
                broken = batch.pop("broken")
                yield Piece(
                    inputs=paths,
                    where=[""] * len(paths),
                    outputs=[self._step(self._state, batch, mesh)],
                    input_of_row=input_of_row,
                    broken=broken,
                    why_broken=partial(_why_broken, dataset, first),
                )

    def _prepare(self, mesh: Mesh) -> None:
        """Makes state and step in the first call, with the network on the device."""
        if self._state is None:
            model = device.to_device(self._network, mesh).eval()
            normalize = device.to_device(_normalize(self._about), mesh)
            self._state = resnet50.State(model, normalize, optimizer=None)
            self._step = device.compiled(predict_step, mesh)


def _why_broken(dataset: picture_files.Pictures, first: int, index: int) -> str:
    """Returns why a picture of a piece is broken, whose first one has the index `first` in the data
    set."""
    return dataset.why_broken(first + index)


def predict_step(state: resnet50.State, batch: dict[str, Tensor], mesh: Mesh) -> Tensor:
    """Returns the logits [B, classes] of the whole batch, float32, replicated."""
    with torch.no_grad():
        logits = resnet50.compute_logits(state, batch, mesh)
    device.replicate(logits, mesh)
    return logits


def _names(about: dict[str, str], path: str) -> list[str]:
    """Returns the names of a network's outputs."""
    try:
        names = json.loads(about["classes"])
    except ValueError:
        names = None
    if not isinstance(names, list) or not names:
        raise InputError(f"the metadata of {path} has no list of classes; export it again")
    return names


def _sizes(about: dict[str, str], wanted: int, path: str) -> tuple[int, int]:
    """Returns the pixels of the shorter side to resize to, and of the side of the square in the
    middle that is kept.

    Raises:
        InputError: neither --image-size nor the export says them, as exports of old versions.
    """
    if wanted:
        return imagenet.shorter_side(wanted), wanted
    if "image_size" not in about or "resize" not in about:
        raise InputError(
            f"{path} does not say how large its pictures are; "
            "give the --image-size that it was trained with"
        )
    return int(about["resize"]), int(about["image_size"])


def _network(
    about: dict[str, str], weights: dict[str, Tensor], outputs: int, path: str
) -> torch.nn.Module:
    """Returns the network of an export on the host; raises InputError where it is another one."""
    name = about["model"]
    if name not in LAYERS:
        raise InputError(f"{path} is a {name}; expected one of {', '.join(LAYERS)}")
    model = resnet(name, outputs)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).split("\n")[1].strip()
        raise InputError(f"{path} has not the weights of a {name}: {first}") from error
    return model


def _normalize(about: dict[str, str]) -> Normalize:
    """Returns the normalization that an export's metadata says, by default ImageNet's."""
    if "mean" not in about or "std" not in about:
        return Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD)
    mean = [255 * value for value in json.loads(about["mean"])]
    std = [255 * value for value in json.loads(about["std"])]
    return Normalize(tuple(mean), tuple(std))
