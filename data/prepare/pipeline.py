"""Runs a preparation of a data set: what criteo.py, images.py, text.py and wmt.py have in common.

A preparation turns the user's files into a folder that training reads. Its passes are lists of
tasks, and each task leaves a file that is whole or not there. The same command resumes a killed
preparation: it runs the tasks whose files are missing. Besides the result, the folder has

    parts/       the files of the passes, deleted at the end; plan.json holds flags, sources and how
                 large a piece of work is
    report.json  the plan and the figures of the result, written last

sources.py says how the plan knows a file that has changed since. The command line takes URLs of
fsspec for the text and for the result, see `prepare_urls`.
"""

import contextlib
import dataclasses
import difflib
import glob
import gzip
import itertools
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data import splits
from data.prepare import sources as noted
from data.prepare.files import read_json, whole, write_json
from data.prepare.sources import SourceFile
from data.remote import cache_folder, find_files, local_copy, open_store, retried
from errors import InputError

# What is uploaded last, in this order. Each of them says that a preparation has ended; but after
# prepared.json, which is not yet the end, COMPLETE follows.
LAST = ("prepared.json", "report.json", "shards.json", "COMPLETE")
UPLOADS = 8  # files uploaded at once
UNFINISHED = "parts/unfinished"  # marks a URL whose upload has not ended


class Preparation:
    """One prepared folder: its plan, its passes and its report.

    Args:
        flags: the Flags of the program, with at least `data`, `out` and `workers`.
        files: that are read.
        rows: what else is read, as the plan has it: each with its `name`, its `rows`, and a mark of
            their content, see sources.py.
        not_planned: flags that a later call may change, besides data, out and workers.
        report: name of the report.
        complete: name of an empty file that is created after the report; default: none, the report
            is the last file.
        version: of the format, where the plan has one.
        added_flags: flags that older versions did not have -> the value that does what they did.
    """

    def __init__(
        self,
        flags,
        files: Sequence[SourceFile] = (),
        rows: Sequence[dict] = (),
        not_planned: Sequence[str] = (),
        report: str = "report.json",
        complete: str = "",
        version: int | None = None,
        added_flags: dict | None = None,
    ):
        self._began = time.monotonic()
        expect(flags, "workers", flags.workers >= 1, "at least 1")
        data = Path(flags.data).expanduser()
        if not flags.out and not data.exists():
            raise InputError(
                f"{data} is a data set of the hub; name the folder of the result with --out"
            )

        folder = data if data.is_dir() else data.parent
        self.out = folder / "prepared"
        if flags.out:
            self.out = Path(flags.out).expanduser()
        self.parts = self.out / "parts"
        self._workers = flags.workers
        self._files = files
        self._report = self.out / report
        self._complete = self.out / (complete or report)

        planned_flags = dataclasses.asdict(flags)
        for name in ("data", "out", "workers", *not_planned):
            del planned_flags[name]
        self.plan = {}
        if version is not None:
            self.plan["format"] = version
        self.plan["flags"] = planned_flags
        self.plan["sources"] = [*noted.note_files(files), *rows]
        self._added_flags = added_flags or {}

    @property
    def seconds(self) -> float:
        """Seconds since this call began, which may have resumed another."""
        return round(time.monotonic() - self._began, 1)

    def finished_report(self) -> dict | None:
        """Returns the report of a preparation that is already finished, else None.

        Of a finished one, what a killed call has left in `parts` is deleted. Raises InputError if
        its plan was another.
        """
        if not self._complete.exists():
            return None
        report = read_json(self._report)
        self._check_plan(report)
        shutil.rmtree(self.parts, ignore_errors=True)
        certain = ""
        if not noted.all_compared(report["sources"], self.plan["sources"]):
            certain = (
                " from files of these names and sizes; whether their content has changed is not "
                "known: if it has, delete the folder and give the same command again"
            )
        print(f"{self.out} is already prepared{certain}", flush=True)
        return report

    def begin_with_piece_size(self, name: str, size: int) -> int:
        """Creates the folder, or resumes an unfinished preparation.

        Args:
            name: of the size in plan.json.
            size: how large a piece of work is, in a new preparation.

        Returns: the size of pieces, which is that of the first call: a resumed preparation has
            pieces that were cut by it.
        Raises InputError: the folder cannot be written, or the unfinished preparation had another
            plan.
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
            raise InputError(
                f"{error.filename} cannot be written: {error.strerror}; "
                "choose another folder with --out"
            ) from error
        return read_json(path)[name]

    def _check_plan(self, found: dict) -> None:
        """Raises InputError if a plan that was found has other flags or sources."""
        for name, now in self.plan["flags"].items():
            before = found["flags"].get(name, self._added_flags.get(name))
            if before != now:
                flag = f"--{name.replace('_', '-')}"
                self._refuse(f"with other {flag}: {before}, now {now}")
        changes = noted.changes(found["sources"], self.plan["sources"])
        if changes:
            self._refuse(f"from other data: {noted.shown(changes)}")

    def _refuse(self, how: str) -> None:
        raise InputError(
            f"{self.out} was prepared {how}; choose another --out, or delete it to prepare it anew"
        )

    def run(self, function: Callable, tasks: list[tuple], what: str) -> None:
        """Calls function(*task) for the tasks that are not done, in processes if there are several.

        The first exception stops all tasks.

        Args:
            tasks: the last item of each is the path of the file that it leaves. A task whose file
                is there is done.
            what: name of the pass, for the progress bar.
        """
        tasks = [task for task in tasks if not task[-1].exists()]
        with tqdm(total=len(tasks), desc=what, disable=None) as bar:
            if self._workers == 1 or len(tasks) < 2:
                for task in tasks:
                    function(*task)
                    bar.update()
            else:
                self._run_in_processes(function, tasks, bar)

    def _run_in_processes(self, function: Callable, tasks: list[tuple], bar: tqdm) -> None:
        context = multiprocessing.get_context("spawn")
        processes = min(self._workers, len(tasks))
        with ProcessPoolExecutor(processes, context, _start_worker) as pool:
            try:
                futures = [pool.submit(function, *task) for task in tasks]
                for future in as_completed(futures):
                    future.result()
                    bar.update()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def decompress(self, copies: dict[Path, Path]) -> dict[Path, Path]:
        """Decompresses the user's .gz files.

        Args:
            copies: the user's files, plain and .gz -> the path of a decompressed copy.

        Returns: the user's files -> plain ones: itself for a plain file, else its copy.
        """
        plain = {}
        tasks = []
        for path, copy in copies.items():
            if path.suffix.lower() == ".gz":
                plain[path] = copy
                tasks.append((path, copy))
            else:
                plain[path] = path
        self.run(_decompress, tasks, "unpacking")
        return plain

    def finish(self, figures: dict) -> dict:
        """Writes the report and deletes everything unfinished.

        Returns the report, which is the plan and `figures`.
        Raises InputError: a file has changed since this call began.
        """
        self._check_files()
        report = self.plan | figures
        for partial in self.out.glob("*.partial"):  # left by a call that was killed
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink()
        write_json(self._report, report)
        if self._complete != self._report:
            self._complete.touch()
        shutil.rmtree(self.parts)
        return report

    def _check_files(self) -> None:
        """Raises InputError where a file has changed since this call began; the passes have then
        read two states of it. One that is gone was read before."""
        if not all(file.path.exists() for file in self._files):
            return
        now = noted.note_files(self._files)
        before = self.plan["sources"][: len(now)]
        changes = noted.changes(before, now) if now else []
        if changes:
            raise InputError(
                f"{noted.shown(changes)}: it changed while it was prepared, so that the result is "
                f"of two states; delete {self.out} and give the same command again"
            )


def _start_worker() -> None:
    """Ends the worker when its parent ends, even by SIGKILL; keeps its tokenizers to one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a worker per core

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def reading_gz(path: Path) -> Iterator[None]:
    """Turns the errors of a broken .gz file into an InputError that names `path`."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} cannot be decompressed: {error}; fetch it again") from error


def _decompress(path: Path, plain: Path) -> None:
    """Writes what is in a .gz file as a plain one."""
    with reading_gz(path), gzip.open(path, "rb") as compressed, whole(plain) as file:
        shutil.copyfileobj(compressed, file, 1 << 20)


def save_arrays(path: Path, **arrays) -> None:
    """Writes an .npz file, whole or not at all."""
    with whole(path) as file:
        np.savez(file, **arrays)


def load_array(path: Path, name: str) -> np.ndarray:
    """Returns an array of an .npz file in memory.

    It is not memory-mapped: the maps of hundreds of pieces would be as many open files.
    """
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
            bad_byte = data[error.start]
            raise InputError(
                f"{name} line {line} is not UTF-8 (byte 0x{bad_byte:02x}: {error.reason}); "
                "convert the file to UTF-8, or fix this line"
            ) from error
    if start == 0:
        text = text.removeprefix("\ufeff")
    return text


# Data sets of the library `datasets`


@dataclasses.dataclass
class Splits:
    """Splits of a data set of `datasets`.

    Attributes:
        datasets_by_split: by train, valid and test.
        names: what the data set calls each of these splits, as a report says it.
        left_out: its other splits, as a report says it.
    """

    datasets_by_split: dict[str, "datasets.Dataset"] = dataclasses.field(  # noqa: F821
        default_factory=dict
    )
    names: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)


def load_splits(
    data: str,
    expected: str,
    load_arguments: Callable[[Path], Sequence[str]],
    required: Sequence[str],
    optional: str,
) -> Splits:
    """Opens the splits of `data`: a folder that `datasets` reads, or the id of one on the hub.

    Args:
        expected: the text files that the program also reads, for messages.
        load_arguments: returns what load_dataset is called with for the folder `data`, which may
            not exist. It is not called for a folder of save_to_disk.
        required: splits that must be there, of train, valid and test.
        optional: a split that may be there.

    Raises InputError if there is no such folder or data set, or a required split is missing.
    """
    _check_loadable(data, expected)
    found = _load(data, load_arguments)

    names = {}
    for split in (*required, optional):
        name = splits.named(found, split, data)
        if name:
            names[split] = name
    if not all(split in names for split in required):
        words = {"train": "train", "valid": "validation", "test": "test"}
        wanted = " and ".join(words[split] for split in required)
        raise InputError(
            f"{data} has the splits {', '.join(found)}; "
            f"expected {wanted}, and {words[optional]} if there is any"
        )

    loaded = Splits()
    for split, name in names.items():
        loaded.datasets_by_split[split] = found[name]
        loaded.names[split] = [f"its split {name}"]
    for name in found:
        if name not in names.values():
            loaded.left_out.append(f"its split {name}")
    return loaded


def _check_loadable(data: str, expected: str) -> None:
    """Raises InputError for what is neither a folder that `datasets` reads nor like an id."""
    folder = Path(data).expanduser()
    if folder.is_dir():
        is_saved = _is_saved_dict(folder) or _is_saved_split(folder)
        if not is_saved and not any(folder.glob("**/*.parquet")):
            found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
            raise InputError(f"{data} has neither {expected} nor parquet files; found {found}")
        return
    is_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", data)
    if not is_id or data.endswith((".txt", ".gz")):
        raise InputError(
            f"there is no {data}; expected {expected}, or the id of a data set on the hub"
        )


def _is_saved_dict(folder: Path) -> bool:
    """Returns whether DatasetDict.save_to_disk has written a folder."""
    return (folder / "dataset_dict.json").exists()


def _is_saved_split(folder: Path) -> bool:
    """Returns whether Dataset.save_to_disk has written a folder, which then is one split."""
    return (folder / "dataset_info.json").exists()


def _load(data: str, load_arguments: Callable[[Path], Sequence[str]]) -> dict:
    """Returns the splits of a data set by their names; see `load_splits`."""
    import datasets  # takes two seconds, and text files do not need it

    folder = Path(data).expanduser()
    try:
        if _is_saved_dict(folder):
            return datasets.load_from_disk(str(folder))
        if _is_saved_split(folder):
            return {"train": datasets.load_from_disk(str(folder))}
        return datasets.load_dataset(*load_arguments(folder))
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        what = "is neither here nor a data set of the hub"
        if folder.is_dir():
            what = "cannot be read by datasets"
        reason = str(error).partition("\n")[0]
        raise InputError(f"{data} {what}: {reason}") from error


def expect(flags, name: str, fits: bool, expected: str) -> None:
    """Raises InputError, with the flag's value and what was expected, unless it fits."""
    if not fits:
        flag = f"--{name.replace('_', '-')}"
        raise InputError(f"{flag} is {getattr(flags, name)}; expected {expected}")


# URLs


def prepare_urls(prepare: Callable[..., dict], data: str, out: str, **flags) -> dict:
    """Prepares data at a path or a URL for a result at a path or a URL; returns the report.

    Data at a URL is copied to the local disk first. A result for a URL is prepared on the local
    disk, where a killed call resumes, and then uploaded. The files of LAST come when all others are
    there: so the result counts as whole or as not there.
    """
    if "://" in data and not out:
        raise InputError(f"{data} is a URL; name the folder or the URL of the result with --out")
    data = local_copy(data, "*", *_made_at(data))
    if "://" not in out:
        return prepare(data=data, out=out, **flags)

    folder = cache_folder(out) / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    is_finished = _fetch_reports(out, folder)
    if not is_finished:
        _begin_upload(out)
    try:
        report = prepare(data=data, out=str(folder), **flags)
    except InputError as error:
        message = str(error)
        if is_finished:
            message = message.replace(str(folder), out)
        raise InputError(message) from error
    if not is_finished:
        _upload(folder, out)
    shutil.rmtree(folder)
    return report


def _fetch_reports(out: str, folder: Path) -> bool:
    """Fetches the files of LAST from a URL; returns whether they say that the preparation ended."""
    fs, root = open_store(out)
    stop = threading.Event()
    is_finished = False
    for name in LAST:
        partial = folder / f"{name}.partial"
        try:
            retried(out, stop, fs.get_file, f"{root}/{name}", str(partial))
        except InputError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue
            raise
        os.replace(partial, folder / name)
        if name != "prepared.json":  # which is not yet the end, see LAST
            is_finished = True
    return is_finished


def _begin_upload(out: str) -> None:
    """Marks a URL as not finished.

    Where nothing can be written, this fails now and not after an hour of preparation.
    """
    fs, root = open_store(out)
    stop = threading.Event()
    content = b"give the same `make data` command again"
    retried(out, stop, fs.makedirs, f"{root}/parts", exist_ok=True)
    retried(out, stop, fs.pipe_file, f"{root}/{UNFINISHED}", content)


def _made_at(url: str) -> list[str]:
    """Returns the patterns that leave out what `make data` has made below a URL.

    They are found by their plans and reports. Returns [] for a local path.
    """
    if "://" not in url:
        return []
    fs, _ = open_store(url)
    stop = threading.Event()
    patterns = []
    for path, stored in find_files(url).items():
        if path in ("parts/plan.json", UNFINISHED):
            patterns.append("!parts/*")
            continue
        folder, _, name = path.rpartition("/")
        may_be_report = name in splits.REPORTS or path.endswith("/parts/plan.json")
        if not folder or not may_be_report:
            continue
        content = retried(f"{url}/{path}", stop, fs.cat_file, stored.name)
        if splits.is_report(content):
            made = folder.removesuffix("/parts").lower()
            patterns.append(f"!{glob.escape(made)}/*")
    return patterns


def _upload(folder: Path, out: str) -> None:
    """Uploads a prepared folder: the files of LAST when all others are there whole."""
    fs, root = open_store(out)
    last = [folder / name for name in LAST if (folder / name).exists()]
    first = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in last:
            first.append(path)
    print(f"uploading {len(first) + len(last)} files to {out}", flush=True)

    def upload(path: Path, stop: threading.Event) -> None:
        name = path.relative_to(folder)
        target = f"{root}/{name}"
        parent, _, _ = target.rpartition("/")
        retried(out, stop, fs.makedirs, parent, exist_ok=True)
        retried(f"{out}/{name}", stop, fs.put_file, str(path), target)

    _upload_at_once(upload, first)
    stored = find_files(out)
    for path in first:
        name = str(path.relative_to(folder))
        if name not in stored or stored[name].size != path.stat().st_size:
            raise InputError(
                f"{out} did not take {path} whole; give the same `make data` command again"
            )

    for path in last:
        upload(path, threading.Event())
    # Without the right to delete it stays: beside a report it has no effect.
    with contextlib.suppress(Exception):
        fs.rm_file(f"{root}/{UNFINISHED}")


def _upload_at_once(upload: Callable[[Path, threading.Event], None], paths: list[Path]) -> None:
    """Uploads files, UPLOADS at a time; the first error stops all, by the event of `upload`."""
    stop = threading.Event()
    with ThreadPoolExecutor(UPLOADS) as pool:
        try:
            list(pool.map(upload, paths, itertools.repeat(stop)))
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


# The command line


def main(
    flags_type: type,
    prepare: Callable[..., dict],
    summary: Callable[[dict], None],
    arguments: Sequence[str] | None,
) -> None:
    """Runs a program: reads its command line, prepares, prints a summary.

    An InputError is printed as one line, and the exit code is 2; so is a wrong command line.

    Args:
        flags_type: the program's dataclass of flags.
        prepare: takes them, and returns the report.
        summary: prints a report.
        arguments: of the command line; None: those of the process.
    """
    module = flags_type.__module__
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if module == "__main__" and spec:
        module = spec.name
    try:
        parsed = parse(flags_type, f"python -m {module}", arguments)
        report = prepare_urls(prepare, **dataclasses.asdict(parsed))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    summary(report)


def parse(flags_type: type, prog: str, arguments: Sequence[str] | None) -> Any:
    """Returns the flags of a command line.

    Args:
        prog: how the program is started.

    Raises:
        InputError: it cannot be used; one sentence says why.
    """
    import tyro
    from tyro import _errors  # private, hence tyro's exact version in requirements.txt

    def refuse(event: _errors.ParseErrorEvent) -> None:
        reason = _wrong(event, flags_type)
        raise InputError(f"{reason}; {prog} --help shows all flags")

    with _errors.on_parse_error(refuse):
        return tyro.cli(flags_type, args=arguments, prog=prog)


def _wrong(event: Any, flags_type: type) -> str:
    """Returns what is wrong with a command line, and the nearest that is right."""
    from tyro import _errors

    if isinstance(event, _errors.UnrecognizedArgs):
        unknown = event.tokens[0]
        known = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(flags_type)]
        return f"{unknown} is no flag{_nearest(unknown.partition('=')[0], known)}"
    if isinstance(event, _errors.MissingArgs):
        missing = [_flag(found.arg) for found in event.missing_arguments]
        return f"{', '.join(missing)} is missing"
    if isinstance(event, _errors.BadValue):
        return f"{_flag(event.argument)} needs {event.argument.lowered.metavar}"
    if isinstance(event, _errors.InstantiationFailure) and event.argument is not None:
        reason = " ".join(event.message.split())
        expected = event.argument.lowered.metavar
        return f"{_flag(event.argument)} cannot be used: {reason}; expected {expected}"
    return "the command line cannot be used"


def _flag(argument: Any) -> str:
    return argument.lowered.name_or_flags[-1]


def _nearest(word: str, known: Sequence[str]) -> str:
    """Returns a question after the most similar of the known words; "" if none is similar."""
    similar = difflib.get_close_matches(word, known, n=1)
    return f" (is it {similar[0]}?)" if similar else ""
