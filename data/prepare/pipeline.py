"""For programs that prepare data sets: files that are whole or not there, and tasks that a kill does not undo."""

import contextlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from errors import InputError


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name only when it is finished."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(partial, "wb") as file:
        yield file
    os.replace(partial, path)


def run(function: Callable, tasks: list[tuple], workers: int, what: str) -> None:
    """Calls function(*task) for the tasks that are not done, in processes if there are several.

    The last argument of a task is a file, which is there when the task is done. The first exception ends it all.
    """
    tasks = [task for task in tasks if not task[-1].exists()]
    with tqdm(total=len(tasks), desc=what, disable=None) as bar:
        if workers == 1 or len(tasks) < 2:
            for task in tasks:
                function(*task)
                bar.update()
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(tasks)), context, _end_with_parent) as pool:
            try:
                for future in as_completed([pool.submit(function, *task) for task in tasks]):
                    future.result()
                    bar.update()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def _end_with_parent() -> None:
    """For a worker: without this, it would wait for work for ever after its parent is killed."""

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write_json(path: Path, contents: dict) -> None:
    """Writes a JSON file, see `whole`."""
    with whole(path) as file:
        file.write(json.dumps(contents, indent=1).encode())


def read_json(path: Path) -> dict:
    """Reads a JSON file. Raises InputError where that fails."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; delete the folder and prepare it again") from error
