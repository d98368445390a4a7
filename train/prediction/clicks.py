"""Predicts clicks by an export of train/dlrm.py that was trained on a user's own columns."""

import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from data import clicks
from data.remote import local_copy
from errors import InputError
from train import dlrm
from train.common import device, embedding, files
from train.common.mesh import Mesh
from train.prediction import answer_formats
from train.prediction.pieces import Piece, batch_rows

VMEM_KIB = 0  # libtpu's own
BATCH = 4096  # clicks, without --batch-size


def open_model(folder: str, config: Any) -> "Clicks":
    """Opens an export on the host, and the tables of --data.

    Raises:
        InputError: the export or the data cannot be read.
    """
    return Clicks(folder, config)


def exported_precision(folder: str) -> str:
    """Returns the precision of the run's evaluation; "" where the export does not say it."""
    path = os.path.join(folder, "model.safetensors")
    about = files.read_metadata(path)
    return json.loads(about.get("precision", '""'))


class Clicks:
    """A network for clicks, and the rows to predict: a Predictor of pieces.py."""

    def __init__(self, folder: str, config: Any):
        self.config = config
        self._folder = folder
        own = os.path.join(folder, "clicks")
        if not os.path.isdir(own):
            raise InputError(
                f"{config.model_dir} has no folder clicks, which says what the columns of a file "
                "become; it was not trained on clicks of `make data DATASET=clicks`"
            )
        self.columns = clicks.Columns.load(own)
        self._export = dlrm.read_export(folder)
        features = self._export.description.features
        if features != self.columns.features:
            raise InputError(
                f"{folder}/model.safetensors has the features {', '.join(features)}, and {own} "
                f"{', '.join(self.columns.features)}; give an export as a run has written it"
            )
        self.paths = _paths(config.data)
        for path in self.paths:
            clicks.read_header(path, self.columns.names.inputs)  # raises InputError
        self._found = clicks.Notes()

    @property
    def notes(self) -> list[str]:
        """Sentences for the user."""
        sentence = self._found.sentence()
        return [sentence] if sentence else []

    def to_answers(self, logits: np.ndarray) -> list[dict]:
        """Returns the probability of a click in each row of what `dlrm.eval_step` returns."""
        probabilities = answer_formats.sigmoid(logits[:, 0]).tolist()
        return [{"probability": probability} for probability in probabilities]

    def pieces(self, mesh: Mesh) -> Iterator[Piece]:
        """Yields the rows, a batch each, whose outputs the device computes."""
        # Slots for the worst case, all ids of a batch on one device: which inputs share a batch
        # must not decide whether they can be predicted.
        room = (float(mesh.num_devices), 1.0)
        state = dlrm.restore(self._export, self._tables(), mesh, exchange_room=room)
        step = device.compiled(dlrm.eval_step, mesh)
        batch_size = batch_rows(self.config.batch_size or BATCH, None, mesh.num_devices)
        first = 1
        for path in self.paths:
            of_file = 1
            for table in clicks.read_tables(path, self.columns.names.inputs, batch_size):
                count = table.num_rows
                inputs = list(range(first, first + count))
                where = [f"{path} row {of_file + row}" for row in range(count)]
                piece = Piece(inputs, where, [], np.empty(0, np.int64))
                batch, kept = self._encode(table, piece.errors)
                if len(kept):
                    uploaded = _uploaded(batch, batch_size, mesh)
                    config = None  # eval_step reads nothing of it
                    piece.outputs.append(step(state, uploaded, config, mesh))
                    piece.input_of_row = np.full(batch_size, -1)
                    piece.input_of_row[: len(kept)] = kept
                yield piece
                first += count
                of_file += count
        state.embeddings.check()

    def _encode(
        self, table: pa.Table, errors: dict[int, str]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the numbers of the rows that can be used, and which rows these are.

        Args:
            errors: gets why the others cannot.
        """
        kept = np.arange(table.num_rows)
        while True:
            try:
                notes = clicks.Notes()
                batch = self.columns.encode(table.take(kept), notes)
            except clicks.BadRow as error:
                errors[int(kept[error.row])] = error.why
                kept = np.delete(kept, error.row)
                continue
            self._found.add(notes.counts())
            return batch, kept

    def _tables(self) -> list[embedding.Table]:
        """Returns the tables of the export."""
        description = self._export.description
        features = zip(description.features, description.rows, self.columns.lookups, strict=True)
        tables = []
        for name, rows, lookups in features:
            tables.append(embedding.Table(name, rows, lookups))
        return tables


def _paths(data: str) -> list[Path]:
    """Returns the files of --data: one, or those of a pattern, sorted.

    Raises:
        InputError: there is none.
    """
    if data in ("", "-"):
        raise InputError("--data is missing: give a CSV or parquet file with the clicks to predict")
    root = os.path.expanduser(local_copy(data, "*"))
    if os.path.isdir(root):
        raise InputError(f"{data} is a folder; give its files, as {data.rstrip('/')}/*.csv")
    found = [root] if os.path.exists(root) else sorted(glob.glob(root))
    if not found:
        raise InputError(f"there is no file {data}; give a CSV or parquet file")
    return [Path(path) for path in found]


def _uploaded(batch: dict[str, np.ndarray], batch_size: int, mesh: Mesh) -> dict[str, Tensor]:
    """Returns a batch on the devices, filled up to `batch_size` rows, as an evaluation has it."""
    count = len(batch["dense"])
    batch = dict(batch)
    batch["label"] = np.zeros(count, np.float32)
    batch["mask"] = np.ones(count, np.float32)
    uploaded = {}
    for name, values in batch.items():
        filled = np.zeros((batch_size, *values.shape[1:]), values.dtype)
        filled[:count] = values
        uploaded[name] = device.upload(torch.from_numpy(filled), mesh)
    return uploaded
