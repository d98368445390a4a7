"""Labelled images of a `datasets` data set; imagenet.py opens it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import datasets

from data import splits
from data.imagenet import Images, Split, check_classes, choose_splits, read_file
from errors import InputError

# In a data set with several columns of images, or of labels, the first of these names counts.
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target")


class HubImages(Images):
    """A data set of `datasets`: parquet or arrow files, one of save_to_disk, or an id on the hub.

    The columns are found by their features, Image and ClassLabel; where there are several, or
    labels are integers, by their usual names. `datasets` copies parquet to its cache, so the data
    takes its size once more on disk.
    """

    def __init__(self, data: str, split: Split, image_size: int, skip_broken: bool = False):
        super().__init__(split, image_size, skip_broken)
        self._open(data, _load_splits(data), split)

    def _open(self, data: str, found: dict[str, datasets.Dataset], split: str) -> None:
        """Takes the rows to train on, or those to evaluate on."""
        train, evaluation = choose_splits(found, data)
        name = train if split == "train" else evaluation
        if train is None or name is None:
            raise InputError(
                f"{data} has the splits {', '.join(found)}; "
                "expected train, and one of val, validation, test"
            )
        unused = [other for other in found if other not in (train, evaluation)]
        self.left_out = [f"its split {other}" for other in unused]
        classes = _find_columns(found[train], f"{data}, split {train}").classes
        self._take(data, name, found[name], classes)

    def _take(
        self, data: str, name: str, rows: datasets.Dataset, classes: list[str] | None
    ) -> None:
        """Takes the rows of a split; `classes` are those of the training images, None its own."""
        self.source = f"its split {name}"
        self._source = f"{data}, split {name}"
        columns = _find_columns(rows, self._source)
        self._image = columns.image
        self._label = columns.label
        self.classes = columns.classes if classes is None else classes
        if isinstance(rows.features[self._label], datasets.ClassLabel):
            check_classes(self._source, columns.classes, self.classes)
        self._check_labels(rows)

        rows = rows.select_columns([self._image, self._label])
        # Rows give the bytes of a file: imagenet.decode reads them.
        self._rows = rows.cast_column(self._image, datasets.Image(decode=False))

    def _check_labels(self, rows: datasets.Dataset) -> None:
        """Raises InputError for a label that is no class of the training split.

        Such as the -1 that hub data sets write into a test split without labels.
        """
        known = range(len(self.classes))
        for label in rows.unique(self._label):
            if label not in known:
                raise InputError(
                    f"{self._source} has the label {label}; "
                    f"expected labels 0 to {len(self.classes) - 1} in {self._label}"
                )

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, index: int) -> tuple[bytes, int, str]:
        row = self._rows[index]
        label = row[self._label]
        image = row[self._image]
        name = f"row {index} of {self._source}"
        if not image:
            return b"", label, name
        if image["bytes"] is None:
            return read_file(image["path"]), label, image["path"]
        return image["bytes"], label, name


class EvaluatedHubImages(HubImages):
    """A split of such a data set, with the classes that it has itself.

    Args:
        split: train, valid or test; "": valid, or test where there is no other.
    """

    def __init__(self, data: str, split: str, image_size: int, skip_broken: bool = False):
        super().__init__(data, split, image_size, skip_broken)
        self.split = "eval"

    def _open(self, data: str, found: dict[str, datasets.Dataset], split: str) -> None:
        _, name = choose_splits(found, data)
        if split:
            name = splits.named(found, split, data)
        if name is None:
            raise InputError(
                f"{data} has no {split or 'valid'} split, only {', '.join(found)}; "
                "give the one to evaluate on by --split"
            )
        self._take(data, name, found[name], classes=None)


def _load_splits(data: str) -> dict[str, datasets.Dataset]:
    """Opens all splits of a folder or of a data set on the hub, by their names.

    Raises InputError where `datasets` cannot, and for folders that it would take for something
    else: a single split of save_to_disk, and shards of data/prepare/images.py.
    """
    if os.path.exists(os.path.join(data, "state.json")):
        raise InputError(
            f"{data} is a single split written by save_to_disk; "
            "expected a DatasetDict with train and val"
        )
    _refuse_shards(data)
    try:
        if os.path.exists(os.path.join(data, "dataset_dict.json")):
            return datasets.load_from_disk(data)
        files = _files_beside_prepared(data)
        if files:
            return datasets.load_dataset(data, data_files=files)
        return datasets.load_dataset(data)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        first_line = str(error).partition("\n")[0]
        if os.path.isdir(data):
            raise InputError(f"{data} cannot be read by datasets: {first_line}") from error
        raise InputError(
            f"{data} is neither a folder nor a data set of the hub: {first_line}"
        ) from error


def _refuse_shards(data: str) -> None:
    """Raises InputError for shards of data/prepare/images.py without their index.

    As plain parquet they would be trained on in another order.
    """
    if os.path.exists(os.path.join(data, "parts", "plan.json")):
        raise InputError(
            f"{data} is not prepared to its end; give the same `make data` command again"
        )

    number = 5 * "[0-9]"
    if any(Path(data).glob(f"val-{number}-of-{number}.parquet")):
        raise InputError(
            f"{data} has shards of make data DATASET=images, but not their index shards.json; "
            "copy shards.json there, too, or prepare the images again; "
            "for other images name the files validation-…"
        )


def _files_beside_prepared(data: str) -> dict[str, list[str]]:
    """Returns the files of each split in a folder that `make data` has put its output into.

    That is its default output; `datasets` would read the same images twice. The result is empty
    where nothing in the folder was made by `make data`.
    """
    folder = Path(data)
    if not folder.is_dir():
        return {}

    for suffix in ("parquet", "arrow"):
        own = splits.below(folder, f"*.{suffix}")
        everything = {path for path in folder.rglob(f"*.{suffix}") if path.is_file()}
        if own and set(own) < everything:
            files: dict[str, list[str]] = {}
            for path in own:
                split = splits.split_of_path(path.relative_to(folder)) or "train"
                files.setdefault(split, []).append(str(path))
            return files
    return {}


@dataclass(frozen=True)
class _Columns:
    """The columns of a data set that are trained on."""

    image: str
    label: str
    classes: list[str]  # names, in the order of their numbers


def _find_columns(rows: datasets.Dataset, source: str) -> _Columns:
    """Returns the columns of images and of labels; raises InputError where either is missing.

    `source` names the rows, for messages.
    """
    features = rows.features
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    if not images:
        _refuse_columns(features, source, "image column (feature Image)")
    labels = _label_columns(features)
    if not labels:
        _refuse_columns(features, source, "label column (feature ClassLabel, or integers)")

    image = _first_usual(images, IMAGE_COLUMNS)
    label = _first_usual(labels, LABEL_COLUMNS)
    if isinstance(features[label], datasets.ClassLabel):
        classes = features[label].names
    else:
        numbers = [value for value in rows.unique(label) if value is not None]
        highest = max(numbers, default=-1)
        classes = [str(number) for number in range(highest + 1)]
    return _Columns(image, label, classes)


def _label_columns(features: datasets.Features) -> list[str]:
    """Returns the columns of ClassLabel; where there are none, integers under usual names."""
    labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if labels:
        return labels
    return [name for name in LABEL_COLUMNS if "int" in _type_name(features.get(name), "")]


def _refuse_columns(features: datasets.Features, source: str, missing: str) -> NoReturn:
    """Raises InputError for a missing column, with those that are there."""
    columns = []
    for name, kind in features.items():
        type_name = _type_name(kind, "nested")
        columns.append(f"{name} ({type_name})")
    raise InputError(f"{source} has no {missing}; its columns: {', '.join(columns)}")


def _type_name(feature: object, default: str) -> str:
    """Returns the type of a column such as "int64"; `default` where it has none, as a list."""
    return getattr(feature, "dtype", default)


def _first_usual(names: list[str], usual: tuple[str, ...]) -> str:
    """Returns the first of the `usual` names that is among `names`, else the first of `names`."""
    for name in usual:
        if name in names:
            return name
    return names[0]
