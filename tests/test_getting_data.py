"""docs/getting_data.md: with stand-ins for what fetches and checks, its commands leave folders that
the scripts read; its checksums are those of the libraries."""

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io
from criteo_text import random_rows
from helpers import page_code
from image_files import encoded
from torchvision.datasets import imagenet

from data import criteo, glue, splits
from data.imagenet import open_imagenet
from data.prepare import criteo as clicks
from data.prepare import wmt

PAGE = Path(__file__).parent.parent / "docs/getting_data.md"
NOTHING = "exit 0"
# What a command of the page becomes, in shell; "$@" are its arguments.
STAND_INS = {
    "wget": NOTHING,
    "hf": NOTHING,
    "sha256sum": "cat > /dev/null",
    "md5sum": "cat > /dev/null",
    "make": 'echo make "$@"',
    "sacrebleu": 'echo "$@"',
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs the commands of a section, for a folder in the place of /data,
    and returns what they print."""
    programs = tmp_path / "programs"
    programs.mkdir()
    stand_ins = {**STAND_INS, "python": f'exec {sys.executable} "$@"'}
    for name, body in stand_ins.items():
        program = programs / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def run(heading: str) -> str:
        code = page_code("getting_data.md", heading, **{"/data/": f"{tmp_path}/"})
        result = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    """Writes an archive, packed where its name says so; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


# ---- checksums ---------------------------------------------------------------------------------
def test_each_checksum_has_one_file_and_is_a_checksum():
    page = PAGE.read_text()
    names = {}
    for digest, name in re.findall(r"^    ([0-9a-f]{32,}) {2}(\S+)$", page, re.MULTILINE):
        assert len(digest) in (32, 64), name
        assert names.setdefault(digest, name) == name
        assert name in page.replace(f"{digest}  {name}", ""), f"{name} is not fetched"
    assert len(names) == 17

    for word in re.findall(r"\b[0-9a-f]{30,}\b", page):
        assert len(word) in (32, 64), word


def test_the_checksums_of_imagenet_are_those_of_torchvision():
    rows = re.findall(r"^\| (ILSVRC\S+) \| .* \| (\w+) \|$", PAGE.read_text(), re.MULTILINE)

    assert sorted(rows) == sorted(imagenet.ARCHIVE_META.values())


# ---- commands ----------------------------------------------------------------------------------
def write_imagenet(folder: Path) -> dict[str, tuple[str, str]]:
    """Writes small archives of ImageNet's form; returns what torchvision knows of each, its name
    and MD5."""
    wnids = ["n01440764", "n01443537"]
    fields = ("id", "wnid", "words", "gloss", "num_children")
    synsets = np.zeros(2, dtype=[(name, object) for name in fields])
    for number, wnid in enumerate(wnids):
        synsets[number] = (number + 1, wnid, f"class {number}", "a class", 0)
    meta = io.BytesIO()
    scipy.io.savemat(meta, {"synsets": synsets})
    kit = "ILSVRC2012_devkit_t12/data"

    train = {}
    for wnid in wnids:
        pictures = {f"{wnid}_{number}.JPEG": encoded("RGB", "JPEG") for number in range(3)}
        inner = write_tar(folder / "inner.tar", pictures)
        train[f"{wnid}.tar"] = inner.read_bytes()
    inner.unlink()
    contents = {
        "train": train,
        "val": {f"ILSVRC2012_val_{n:08d}.JPEG": encoded("RGB", "JPEG") for n in (1, 2)},
        "devkit": {
            f"{kit}/meta.mat": meta.getvalue(),
            f"{kit}/ILSVRC2012_validation_ground_truth.txt": b"2\n1\n",
        },
    }

    archives = {}
    for key, files in contents.items():
        name = imagenet.ARCHIVE_META[key][0]
        path = write_tar(folder / name, files)
        archives[key] = (name, hashlib.md5(path.read_bytes()).hexdigest())
    return archives


def test_imagenet_becomes_a_folder_to_train_on(tmp_path, monkeypatch):
    folder = tmp_path / "imagenet"
    monkeypatch.setattr(imagenet, "ARCHIVE_META", write_imagenet(folder))
    code = page_code("getting_data.md", "ImageNet")
    in_python = re.search(r"python -c '(.*)'", code)[1]

    monkeypatch.chdir(folder)
    exec(in_python, {})

    train = open_imagenet(str(folder), "train", 32)
    val = open_imagenet(str(folder), "eval", 32)
    assert (len(train), len(val)) == (6, 2)
    assert train.classes == ["n01440764", "n01443537"]
    assert splits.said(train, val) == " (trained on train/, evaluated on val/)"


def test_the_corpora_of_wmt_become_parallel_text(tmp_path, run):
    folder = tmp_path / "wmt18"
    corpora = {
        "training-parallel-europarl-v7.tgz": "training/europarl-v7.de-en",
        "training-parallel-commoncrawl.tgz": "commoncrawl.de-en",
        "training-parallel-nc-v13.tgz": "training-parallel-nc-v13/news-commentary-v13.de-en",
        "rapid2016.tgz": "rapid2016.de-en",
    }
    for archive, name in corpora.items():
        files = {f"{name}.{language}": f"{name} {language}\n".encode() for language in ("en", "de")}
        write_tar(folder / archive, files)

    printed = run("WMT'18 English-German")

    found = wmt.find_text(folder / "text", "en", "de")
    names = {split: [path.name for path in files] for split, files in found.items()}
    assert names == {
        "train": ["train.en", "train.de"],
        "valid": ["newstest2016.en", "newstest2016.de"],
        "test": ["newstest2017.en", "newstest2017.de"],
    }
    for path, language in zip(found["train"], ("en", "de"), strict=True):
        assert path.read_text() == "".join(f"{name} {language}\n" for name in corpora.values())
    assert found["test"][1].read_text() == "-t wmt17 -l en-de --echo ref\n"
    assert "make data DATASET=wmt18" in printed


def test_the_archives_of_glue_become_its_folder(tmp_path, run):
    """MRPC is divided by the ids of its development set, with or without carriage returns."""
    folder = tmp_path / "glue"
    folder.mkdir()
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    rows = [f"{number % 2}\t{number}\t{number + 50}\tOne {number}\tTwo" for number in range(9)]
    text = "".join(f"{line}\r\n" for line in (header, *rows)).encode()
    for name in ("train", "test"):
        (folder / f"msr_paraphrase_{name}.txt").write_bytes(b"\xef\xbb\xbf" + text)
    (folder / "mrpc_dev_ids.tsv").write_text("2\t52\n7\t57\r\n8\t8\n")
    with zipfile.ZipFile(folder / "RTE.zip", "w") as archive:
        lines = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n"
        archive.writestr("RTE/train.tsv", lines)

    run("GLUE")

    train = glue.read(folder, "mrpc", "train")
    dev = glue.read(folder, "mrpc", "validation")
    assert dev.first == ["One 2", "One 7"]
    assert train.first == [f"One {number}" for number in (0, 1, 3, 4, 5, 6, 8)]
    assert list(dev.labels) == [0, 1]
    assert len(glue.read(folder, "rte", "train").labels) == 1
    test = (folder / "MRPC/test.tsv").read_text().splitlines()
    assert test[0] == "index\t#1 ID\t#2 ID\t#1 String\t#2 String"
    assert test[9] == "8\t8\t58\tOne 8\tTwo"


def test_the_archive_of_criteo_kaggle_is_prepared(tmp_path, run):
    name = "criteo-research-kaggle-display-advertising-challenge-dataset.tar.gz"
    train = b"\n".join(random_rows(20)) + b"\n"
    test = re.sub(rb"(?m)^\d\t", b"", train)
    write_tar(tmp_path / "kaggle" / name, {"train.txt": train, "test.txt": test})

    printed = run("Criteo Kaggle")

    assert "20 train.txt" in printed
    said = splits.sentence(clicks.find_sources(tmp_path / "kaggle").read_from())
    assert said == (
        "trained on train.txt but its last seventh, evaluated on the last seventh of train.txt; "
        "left out: test.txt"
    )


def test_the_parquet_files_of_criteo_become_its_text(tmp_path, run):
    lines = random_rows(30)
    names = ["label"]
    names += [f"integer_feature_{number}" for number in range(1, 14)]
    names += [f"categorical_feature_{number}" for number in range(1, 27)]
    parts = {"day=2015-02-15/part-1": 0, "day=2015-02-15/part-2": 10, "day=2015-02-16/part-1": 20}
    for part, first in parts.items():
        table = {}
        fields = [line.decode().split("\t") for line in lines[first : first + 10]]
        for name, column in zip(names, zip(*fields, strict=True), strict=True):
            values = [value or None for value in column]
            if "categorical" not in name:
                values = [None if value is None else int(value) for value in values]
            table[name] = pa.array(values, pa.string() if "categorical" in name else pa.int32())
        path = tmp_path / f"terabyte/data/{part}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table).select(names[::-1]), path)

    printed = run("Criteo Terabyte")

    for day, of_day in enumerate((lines[:20], lines[20:])):
        text = (tmp_path / f"terabyte/day_{day}").read_bytes()
        assert text.splitlines() == of_day
    found = clicks.find_sources(tmp_path / "terabyte")
    assert [path.name for path in (*found.train, *found.evaluation)] == ["day_0", "day_1"]
    assert "20 " in printed


def test_the_archive_of_movielens_is_trained_on(tmp_path, run):
    folder = tmp_path / "movielens"
    folder.mkdir()
    with zipfile.ZipFile(folder / "ml-100k.zip", "w") as archive:
        files = {"u.data": range(1, 9), "ua.base": range(1, 7), "ua.test": (7, 8)}
        for name, rows in files.items():
            archive.writestr(f"ml-100k/{name}", "".join(f"1\t{row}\t4\t0\n" for row in rows))

    run("MovieLens")

    logs = [criteo.open_clicks(str(folder / "ml-100k"), split) for split in ("train", "eval")]
    assert [len(log) for log in logs] == [6, 2]
    assert splits.said(*logs) == " (trained on ua.base, evaluated on ua.test; left out: u.data)"
