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
from models.dlrm import DLRM
from train import dlrm
from train.common import device, embedding, files
from train.common.embedding import pieces as table_pieces
from train.common.mesh import Mesh
from train.prediction import answers
from train.prediction.pieces import Piece, batch_rows

VMEM_KIB = 0  # libtpu's own
BATCH = 4096  # clicks, without --batch-size


def opened(folder: str, config: Any) -> "Clicks":
    """Opens an export on the host, and the tables of --data.

    Raises:
        InputError: the export or the data cannot be read.
    """
    return Clicks(folder, config)


class Clicks:
    """A network for clicks, and the rows to predict.

    Attributes:
        answers: what turns logits into answers.
    """

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
        path = os.path.join(folder, "model.safetensors")
        self._weights, about = files.load_with_metadata(path)
        self._about = {name: json.loads(value) for name, value in about.items()}
        if tuple(self._about["features"]) != self.columns.features:
            raise InputError(
                f"{path} has the features {', '.join(self._about['features'])}, and {own} "
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

    def answers(self, logits: np.ndarray) -> list[dict]:
        """Returns the probability of a click in each row of what `dlrm.eval_step` returns."""
        return [{"probability": share} for share in answers.sigmoid(logits[:, 0]).tolist()]

    def pieces(self, mesh: Mesh) -> Iterator[Piece]:
        """Yields the rows, a batch each, whose outputs the device computes."""
        state = dlrm.State(self._network(mesh), self._embeddings(mesh), optimizer=None)
        step = device.compiled(dlrm.eval_step, mesh)
        rows = batch_rows(self.config.batch_size or BATCH, None, mesh.num_devices)
        first = 1
        for path in self.paths:
            of_file = 1
            for table in clicks.read_tables(path, self.columns.names.inputs, rows):
                count = table.num_rows
                inputs = list(range(first, first + count))
                where = [f"{path} row {of_file + row}" for row in range(count)]
                piece = Piece(inputs, where, [], np.empty(0, np.int64))
                batch, kept = self._encode(table, piece.errors)
                if len(kept):
                    piece.outputs.append(step(state, _uploaded(batch, rows, mesh), None, mesh))
                    piece.rows = np.full(rows, -1)
                    piece.rows[: len(kept)] = kept
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

    def _network(self, mesh: Mesh) -> DLRM:
        """Returns the network without its tables, on the device."""
        about = self._about
        model = DLRM(
            about["num_dense"],
            len(about["features"]),
            about["dim"],
            about["bottom"],
            about["top"],
            about["interaction"],
            *about["cross"],
        )
        model.load_state_dict(self._weights)
        return device.to_device(model, mesh).eval()

    def _embeddings(self, mesh: Mesh) -> embedding.ShardedEmbeddingBags:
        """Returns the tables on the devices, sharded as in training."""
        tables = []
        features = zip(
            self._about["features"], self._about["rows"], self.columns.lookups, strict=True
        )
        for name, rows, lookups in features:
            tables.append(embedding.Table(name, rows, lookups))
        # So many slots that any ids find one, where one device has all of a batch.
        room = (float(mesh.num_devices), 1.0)
        bags = embedding.ShardedEmbeddingBags(
            tables, self._about["dim"], mesh, embedding.SGD(), lr=0.0, seed=0, room=room
        )
        shapes = {table_pieces.STEP: ()}
        for table in tables:
            shapes[f"{table.name}/weight/0/0"] = (table.rows, self._about["dim"])
        bags.load_pieces(shapes, self._read_table)
        return bags

    def _read_table(self, key: str) -> Tensor:
        """Returns a table of the export, or the count of updates, by its name in a checkpoint."""
        if key == table_pieces.STEP:
            return torch.zeros(())
        name = key.partition("/")[0]
        path = os.path.join(self._folder, "tables", f"{name}.safetensors")
        weights = files.load_weights(path)
        return weights[dlrm.TABLE_KEY.format(name)]


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


def _uploaded(batch: dict[str, np.ndarray], rows: int, mesh: Mesh) -> dict[str, Tensor]:
    """Returns a batch on the devices, filled up to `rows` rows, as an evaluation has it."""
    count = len(batch["dense"])
    batch = dict(batch)
    batch["label"] = np.zeros(count, np.float32)
    batch["mask"] = np.ones(count, np.float32)
    uploaded = {}
    for name, values in batch.items():
        filled = np.zeros((rows, *values.shape[1:]), values.dtype)
        filled[:count] = values
        uploaded[name] = device.upload(torch.from_numpy(filled), mesh)
    return uploaded
