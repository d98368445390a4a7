"""Labelled images of a `datasets` data set; imagenet.py opens it."""

import os
from pathlib import Path

import datasets

from data import splits
from data.imagenet import Images, Split, check_classes, choose_splits, read_file
from errors import InputError

IMAGE_COLUMNS = ("image", "img")  # in a data set with several columns of images; then of labels
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target")


class HubImages(Images):
    """A data set of `datasets`: a folder of parquet or arrow files, one written by save_to_disk, or an id on the hub.

    The columns are found by their features, Image and ClassLabel; where there are several, or labels are integers, by
    their usual names. `datasets` copies parquet to its cache, so the data takes its size once more on disk.
    """

    def __init__(self, data: str, split: Split, image_size: int, skip_broken: bool = False):
        super().__init__(split, image_size, skip_broken)
        found = _load_splits(data)
        train, evaluation = choose_splits(found, data)
        name = train if split == "train" else evaluation
        if train is None or name is None:
            expected = "train, and one of val, validation, test"
            raise InputError(f"{data} has the splits {', '.join(found)}; expected {expected}")
        self.source = f"its split {name}"
        self.left_out = [f"its split {one}" for one in found if one not in (train, evaluation)]
        self._source, rows = f"{data}, split {name}", found[name]
        self._image, self._label, own_classes = _columns(rows, self._source)
        self.classes = _columns(found[train], f"{data}, split {train}")[2]
        if isinstance(rows.features[self._label], datasets.ClassLabel):
            check_classes(self._source, own_classes, self.classes)
        # such as the -1 that hub data sets write into a test split without labels
        strange = [label for label in rows.unique(self._label) if label not in range(len(self.classes))]
        if strange:
            expected = f"expected labels 0 to {len(self.classes) - 1} in {self._label}"
            raise InputError(f"{self._source} has the label {strange[0]}; {expected}")
        rows = rows.select_columns([self._image, self._label])
        self._rows = rows.cast_column(self._image, datasets.Image(decode=False))  # the bytes, for decode() above

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, index: int) -> tuple[bytes, int, str]:
        row = self._rows[index]
        image = row[self._image] or {"bytes": b""}
        if image["bytes"] is None:
            return read_file(image["path"]), row[self._label], image["path"]
        return image["bytes"], row[self._label], f"row {index} of {self._source}"


def _load_splits(data: str) -> dict[str, datasets.Dataset]:
    if os.path.exists(os.path.join(data, "state.json")):
        raise InputError(f"{data} is a single split written by save_to_disk; expected a DatasetDict with train and val")
    if os.path.exists(os.path.join(data, "parts", "plan.json")):  # shards of data/prepare/images.py, a part of them
        raise InputError(f"{data} is not prepared to its end; give the same `make data` command again")
    number = 5 * "[0-9]"
    if any(Path(data).glob(f"val-{number}-of-{number}.parquet")):  # as plain parquet they would train in another order
        remedy = (
            "copy shards.json there, too, or prepare the images again; for other images name the files validation-…"
        )
        raise InputError(f"{data} has shards of make data DATASET=images, but not their index shards.json; {remedy}")
    try:
        if os.path.exists(os.path.join(data, "dataset_dict.json")):
            return datasets.load_from_disk(data)
        if files := _without_made(data):
            return datasets.load_dataset(data, data_files=files)
        return datasets.load_dataset(data)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        what = "cannot be read by datasets" if os.path.isdir(data) else "is neither a folder nor a data set of the hub"
        raise InputError(f"{data} {what}: {str(error).partition(chr(10))[0]}") from error


def _without_made(data: str) -> dict[str, list[str]]:
    """Returns the files of each split in a folder that also has what `make data` has made of them, its default output:
    `datasets` would read the same images twice. Empty where there is nothing of the kind."""
    folder = Path(data)
    if not folder.is_dir():
        return {}
    for suffix in ("parquet", "arrow"):
        own = splits.below(folder, f"*.{suffix}")
        if own and set(own) < {path for path in folder.rglob(f"*.{suffix}") if path.is_file()}:
            files: dict[str, list[str]] = {}
            for path in own:
                split = splits.split_of_path(path.relative_to(folder)) or "train"
                files.setdefault(split, []).append(str(path))
            return files
    return {}


def _columns(rows: datasets.Dataset, source: str) -> tuple[str, str, list[str]]:
    """Returns the image column, the label column, and the class names."""
    kinds = rows.features
    images = [column for column, kind in kinds.items() if isinstance(kind, datasets.Image)]
    labels = [column for column, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
    labels = labels or [column for column in LABEL_COLUMNS if "int" in getattr(kinds.get(column), "dtype", "")]
    if not images or not labels:
        what = "label column (feature ClassLabel, or integers)" if images else "image column (feature Image)"
        listed = ", ".join(f"{column} ({getattr(kind, 'dtype', 'nested')})" for column, kind in kinds.items())
        raise InputError(f"{source} has no {what}; its columns: {listed}")
    image = next((column for column in IMAGE_COLUMNS if column in images), images[0])
    label = next((column for column in LABEL_COLUMNS if column in labels), labels[0])
    if isinstance(kinds[label], datasets.ClassLabel):
        return image, label, kinds[label].names
    highest = max((value for value in rows.unique(label) if value is not None), default=-1)
    return image, label, [str(value) for value in range(highest + 1)]
