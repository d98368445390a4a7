"""Runs a preparation of a data set: what data/prepare/criteo.py, text.py and wmt.py have in common.

A preparation turns the user's files into a folder that training reads. Its passes are lists of tasks, and each task
leaves a file that is whole or not there. The same command resumes a killed preparation: it runs the tasks whose files
are missing. Besides the result, the folder has

    parts/       the files of the passes, deleted at the end; plan.json holds flags, sources and the size of chunks
    report.json  the plan and the figures of the result, written last

Files are known by their names and sizes: after a change that keeps the size, delete the folder. The command line takes
URLs of fsspec for both: see prepare_urls.
"""

import contextlib
import dataclasses
import glob
import gzip
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import splits
from data.prepare.files import read_json, whole, write_json
from data.remote import cache_folder, find_files, local_copy, open_store, retried
from errors import InputError

LAST = ("prepared.json", "report.json", "shards.json", "COMPLETE")  # what is uploaded last, in this order
UPLOADS = 8  # files uploaded at once


class Preparation:
    """One prepared folder: its plan, its passes and its report.

    Args:
        flags: the Flags of the program, with at least `data`, `out` and `workers`.
        sources: what is read, each with its `name` and its size in `bytes` or `rows`.
        not_planned: flags that a later call may change, besides data, out and workers.
        report: name of the report.
        complete: name of an empty file that is created after the report; default: none, the report is the last file.
        version: of the format, where the plan has one.
    """

    def __init__(
        self,
        flags,
        sources: list[dict],
        not_planned: Sequence[str] = (),
        report: str = "report.json",
        complete: str = "",
        version: int | None = None,
    ):
        self._began = time.monotonic()
        expect(flags, "workers", flags.workers >= 1, "at least 1")
        data = Path(flags.data).expanduser()
        if not flags.out and not data.exists():
            raise InputError(f"{data} is a data set of the hub; name the folder of the result with --out")
        default = (data if data.is_dir() else data.parent) / "prepared"
        self.out = Path(flags.out).expanduser() if flags.out else default
        self.parts = self.out / "parts"
        self._workers = flags.workers
        self._report, self._complete = self.out / report, self.out / (complete or report)
        planned = dataclasses.asdict(flags)
        for name in ("data", "out", "workers", *not_planned):
            del planned[name]
        self.plan = ({} if version is None else {"format": version}) | {"flags": planned, "sources": sources}

    @property
    def seconds(self) -> float:
        """Seconds since this call began, which may have resumed another."""
        return round(time.monotonic() - self._began, 1)

    def finished(self) -> dict | None:
        """Returns the report of a finished preparation, else None. Raises InputError if its plan was another."""
        if not self._complete.exists():
            return None
        report = read_json(self._report)
        self._check_plan(report)
        shutil.rmtree(self.parts, ignore_errors=True)
        print(f"{self.out} is already prepared", flush=True)
        return report

    def begin(self, name: str, size: int) -> int:
        """Creates the folder, or resumes an unfinished preparation.

        Returns the size of chunks: `size`, or what the first call noted as `name`, since chunks stay as they are cut.
        Raises InputError if the folder cannot be written or the unfinished preparation had another plan.
        """
        path = self.parts / "plan.json"
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._check_plan(read_json(path))
                print(f"resuming the unfinished preparation in {self.out}", flush=True)
            else:
                write_json(path, self.plan | {name: size})
        except OSError as error:
            what = f"{error.filename} cannot be written: {error.strerror}"
            raise InputError(f"{what}; choose another folder with --out") from error
        return read_json(path)[name]

    def _check_plan(self, found: dict) -> None:
        flags, sources = self.plan["flags"], self.plan["sources"]
        changes = [
            (f"--{name.replace('_', '-')}", found["flags"].get(name), value)
            for name, value in flags.items()
            if found["flags"].get(name) != value
        ]
        if found["sources"] != sources:
            changes.append(("sources", _described(found["sources"]), _described(sources)))
        for what, before, now in changes:
            raise InputError(
                f"{self.out} was prepared with other {what}: {before}, now {now}; choose another --out, or delete it"
            )

    def run(self, function: Callable, tasks: list[tuple], what: str) -> None:
        """Calls function(*task) for the tasks that are not done, in worker processes if there are several.

        The last item of a task is the path of the file that it leaves. The first exception stops all tasks.
        """
        tasks = [task for task in tasks if not task[-1].exists()]
        with tqdm(total=len(tasks), desc=what, disable=None) as bar:
            if self._workers == 1 or len(tasks) < 2:
                for task in tasks:
                    function(*task)
                    bar.update()
                return
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(min(self._workers, len(tasks)), context, _start_worker) as pool:
                try:
                    for future in as_completed([pool.submit(function, *task) for task in tasks]):
                        future.result()
                        bar.update()
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise

    def unpack(self, files: dict[Path, Path]) -> list[Path]:
        """Returns plain files for {copy: file of the user}: the user's own, or a copy of what is in a .gz file."""
        packed = [(path, copy) for copy, path in files.items() if path.suffix.lower() == ".gz"]
        self.run(_unpack, packed, "unpacking")
        return [copy if path.suffix.lower() == ".gz" else path for copy, path in files.items()]

    def finish(self, figures: dict) -> dict:
        """Writes the report, which is the plan and `figures`, deletes everything unfinished, and returns the report."""
        report = self.plan | figures
        for partial in self.out.glob("*.partial"):  # left by a call that was killed
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        write_json(self._report, report)
        if self._complete != self._report:
            self._complete.touch()
        shutil.rmtree(self.parts)
        return report


def _described(sources: list[dict]) -> str:
    names = [f"{one['name']} ({one['bytes']} bytes)" if "bytes" in one else _rows(one) for one in sources]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _rows(source: dict) -> str:
    return f"{source['name']} ({source['rows']} rows{' of ' + source['split'] if 'split' in source else ''})"


def _start_worker() -> None:
    """Ends a worker with its parent, even a killed one, and keeps its tokenizers to one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are as many as the cores

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def reading_gz(path: Path):
    """Turns the errors of a broken .gz file into an InputError that names `path`."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} cannot be decompressed: {error}; fetch it again") from error


def _unpack(path: Path, plain: Path) -> None:
    with reading_gz(path), gzip.open(path, "rb") as packed, whole(plain) as file:
        shutil.copyfileobj(packed, file, 1 << 20)


def save_arrays(path: Path, **arrays) -> None:
    """Writes an .npz file, whole or not at all."""
    with whole(path) as file:
        np.savez(file, **arrays)


def load_array(path: Path, name: str) -> np.ndarray:
    """Returns an array of an .npz file in memory: maps of hundreds of chunks would be as many open files."""
    with np.load(path) as arrays:
        return arrays[name]


def read_text(path: Path | str, name: str, start: int, stop: int) -> str:
    """Returns bytes [start, stop) of a file as text, without a byte order mark.

    Raises InputError, with `name` and the line, where they are not UTF-8.
    """
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(stop - start)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            file.seek(0)
            line = file.read(start + error.start).count(b"\n") + 1
            what = f"is not UTF-8 (byte 0x{data[error.start]:02x}: {error.reason})"
            raise InputError(f"{name} line {line} {what}; convert the file to UTF-8, or fix this line") from error
    return text.removeprefix("\ufeff") if start == 0 else text


@dataclasses.dataclass
class Splits:
    """Splits of a data set of `datasets`."""

    rows: dict[str, "datasets.Dataset"] = dataclasses.field(default_factory=dict)  # noqa: F821
    names: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # of each in `rows`, in the data set
    left_out: list[str] = dataclasses.field(default_factory=list)


def load_splits(
    data: str, expected: str, arguments: Callable[[Path], Sequence[str]], required: Sequence[str], optional: str
) -> Splits:
    """Opens the splits of `data`, a folder that `datasets` reads or the id of a data set on the hub.

    Args:
        expected: the text files that the program also reads, for messages.
        arguments: returns what load_dataset is called with, besides folders of save_to_disk.
        required, optional: splits that must be and that may be there: train, valid or test.

    Raises InputError if there is no such folder or data set, or a required split is missing.
    """
    folder = Path(data).expanduser()
    saved = folder / "dataset_dict.json", folder / "dataset_info.json"
    if folder.is_dir():
        if not any(path.exists() for path in saved) and not any(folder.glob("**/*.parquet")):
            found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
            raise InputError(f"{data} has neither {expected} nor parquet files; found {found}")
    elif not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", data) or data.endswith((".txt", ".gz")):
        raise InputError(f"there is no {data}; expected {expected}, or the id of a data set on the hub")
    import datasets  # takes two seconds, and text files do not need it

    try:
        if saved[0].exists():
            found = datasets.load_from_disk(str(folder))
        elif saved[1].exists():
            found = {"train": datasets.load_from_disk(str(folder))}
        else:
            found = datasets.load_dataset(*arguments(folder))
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        what = "cannot be read by datasets" if folder.is_dir() else "is neither here nor a data set of the hub"
        raise InputError(f"{data} {what}: {str(error).partition(chr(10))[0]}") from error
    names = {split: splits.named(found, split, data) for split in (*required, optional)}
    if not all(names[split] for split in required):
        words = {"train": "train", "valid": "validation", "test": "test"}
        wanted = " and ".join(words[split] for split in required)
        also = f"{words[optional]} if there is any"
        raise InputError(f"{data} has the splits {', '.join(found)}; expected {wanted}, and {also}")
    return Splits(
        rows={split: found[name] for split, name in names.items() if name},
        names={split: [f"its split {name}"] for split, name in names.items() if name},
        left_out=[f"its split {name}" for name in found if name not in names.values()],
    )


def expect(flags, name: str, fits: bool, expected: str) -> None:
    """Raises InputError, with the flag's value and what was expected, unless it fits."""
    if not fits:
        raise InputError(f"--{name.replace('_', '-')} is {getattr(flags, name)}; expected {expected}")


def prepare_urls(prepare: Callable[..., dict], data: str, out: str, **flags) -> dict:
    """Prepares a local copy of what is at a URL, and uploads a result that belongs to a URL; returns the report.

    Such a result is prepared on the local disk first, where a killed call resumes, and whole or not there: the files of
    LAST are uploaded when all others are.
    """
    if "://" in data and not out:
        raise InputError(f"{data} is a URL; name the folder or the URL of the result with --out")
    data = local_copy(data, "*", *_made_at(data))
    if "://" not in out:
        return prepare(data=data, out=out, **flags)
    (fs, root), stop, folder = open_store(out), threading.Event(), cache_folder(out) / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    there = []
    for name in LAST:
        try:
            retried(out, stop, fs.get_file, f"{root}/{name}", str(folder / f"{name}.partial"))
            os.replace(folder / f"{name}.partial", folder / name)
            there.append(name)
        except InputError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    done = bool({*there} - {"prepared.json"})
    if not done:  # better now than in an hour
        retried(out, stop, fs.makedirs, f"{root}/parts", exist_ok=True)
        retried(out, stop, fs.pipe_file, f"{root}/parts/unfinished", b"give the same `make data` command again")
    try:
        report = prepare(data=data, out=str(folder), **flags)
    except InputError as error:
        raise InputError(str(error).replace(str(folder), out) if done else str(error)) from error
    if not done:
        _upload(folder, out)
    shutil.rmtree(folder)
    return report


def _made_at(url: str) -> list[str]:
    """Returns the patterns that leave out what `make data` has made below a URL, which its reports tell."""
    if "://" not in url:
        return []
    (fs, _), stop, patterns = open_store(url), threading.Event(), []
    for path, (name, _, _) in find_files(url).items():
        folder, _, last = path.rpartition("/")
        if path in ("parts/plan.json", "parts/unfinished"):
            patterns.append("!parts/*")
            continue
        known = folder and (last in splits.REPORTS or path.endswith("/parts/plan.json"))
        if known and splits.is_report(retried(f"{url}/{path}", stop, fs.cat_file, name)):
            patterns.append(f"!{glob.escape(folder.removesuffix('/parts').lower())}/*")
    return patterns


def _upload(folder: Path, out: str) -> None:
    (fs, root), stop = open_store(out), threading.Event()

    def put(path: Path) -> None:
        to = f"{root}/{path.relative_to(folder)}"
        retried(out, stop, fs.makedirs, to.rpartition("/")[0], exist_ok=True)
        retried(f"{out}/{path.relative_to(folder)}", stop, fs.put_file, str(path), to)

    last = [folder / name for name in LAST if (folder / name).exists()]
    first = [path for path in sorted(folder.rglob("*")) if path.is_file() and path not in last]
    print(f"uploading {len(first + last)} files to {out}", flush=True)
    with ThreadPoolExecutor(UPLOADS) as pool:
        try:
            list(pool.map(put, first))
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    sizes = {path: size for path, (_, size, _) in find_files(out).items()}
    for path in first:
        if sizes.get(str(path.relative_to(folder))) != path.stat().st_size:
            raise InputError(f"{out} did not take {path} whole; give the same `make data` command again")
    stop.clear()
    for path in last:
        put(path)
    with contextlib.suppress(Exception):  # who may not delete leaves it: beside the report it means nothing
        fs.rm_file(f"{root}/parts/unfinished")


def main(flags: type, prepare: Callable[..., dict], summary: Callable[[dict], None], arguments: Sequence[str] | None):
    """Runs a program: reads its command line, prepares, prints a summary. InputError: one line and exit code 2."""
    import tyro

    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if flags.__module__ == "__main__" and spec else flags.__module__
    parsed = tyro.cli(flags, args=arguments, prog=f"python -m {module}")
    try:
        report = prepare_urls(prepare, **dataclasses.asdict(parsed))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    summary(report)
