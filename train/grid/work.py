"""The runs of a grid, one after the other, and their end."""

from __future__ import annotations

import shlex
import signal
import threading
import time
from pathlib import Path

from errors import InputError
from train.grid.axes import Grid
from train.grid.places import STOPPED, Child, Here, NoResult, Tpu, say
from train.grid.records import FAILED, FINISHED, RUNNING, UNFINISHED, GridFolder, Record
from train.grid.table import choose_metric, missing_runs, number, report

GONE = 75  # exit code where no TPU is left, as the launcher's
LOOK = 0.2  # seconds between two looks at what runs
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def catch_signals() -> list[int]:
    """Returns a list to which the signals that ask for a stop are added as they come. One that the
    shell ignores, as nohup does SIGHUP, stays ignored."""
    received: list[int] = []
    for number_of_signal in SIGNALS:
        if signal.getsignal(number_of_signal) is not signal.SIG_IGN:
            signal.signal(number_of_signal, lambda found, _frame: received.append(found))
    return received


class Work:
    """The runs of a grid, and the places that take one after the other.

    Args:
        received: signals that have come, see `catch_signals`.
    """

    def __init__(
        self,
        grid: Grid,
        records: list[Record],
        folder: GridFolder,
        places: list[Here | Tpu],
        received: list[int],
    ):
        self.grid = grid
        self.records = records
        self.folder = folder
        self.places = places
        self.received = received
        self.failure: InputError | None = None  # the grid's own, which ends it
        self._lock = threading.Lock()  # of the records, and of what follows
        self._taken: set[str] = set()  # names of the runs that were started
        self._children: dict[str, Child] = {}  # what runs, by the name of its run
        self._busy = 0  # places that train

    def do(self) -> int:
        """Starts all runs that are not finished, and waits for them; returns the exit code of the
        grid."""
        threads = []
        for place in self.places:
            thread = threading.Thread(target=self._work, args=(place,), daemon=True)
            thread.start()
            threads.append(thread)
        while any(thread.is_alive() for thread in threads):
            time.sleep(LOOK)
            self._hand_on_signals()

        if self.failure is not None:
            raise self.failure
        self.write()
        if not missing_runs(self.records, choose_metric(self.grid, self.records)):
            return 0
        if self.received:
            return STOPPED
        if all(place.unusable for place in self.places):
            return GONE
        return 1

    def _hand_on_signals(self) -> None:
        """Sends the signals that have come to what runs, and to what was started since."""
        with self._lock:
            running = []
            for record in self.records:
                if record.name in self._children:
                    running.append((self._place_of(record), self._children[record.name]))
        for place, child in running:
            while child.signals < len(self.received):
                child.send(place.signal(self.received[child.signals]))

    def _place_of(self, record: Record) -> Here | Tpu:
        (found,) = [place for place in self.places if place.name == record.place]
        return found

    # ---- a place -------------------------------------------------------------------------------

    def _work(self, place: Here | Tpu) -> None:
        """Trains one run after the other at a place, until none is left."""
        try:
            while not self.received and not place.unusable and self.failure is None:
                record = self._take(place)
                if record is not None:
                    self._train(place, record)
                elif self._busy:
                    time.sleep(LOOK)  # another place may give its run back
                else:
                    break
        except (InputError, OSError) as error:
            if isinstance(error, OSError):
                error = InputError(f"cannot start a run: {error}")
            self.failure = error
        if place.unusable:
            say(f"grid: {place.name} gets no further run: {place.unusable}")

    def _take(self, place: Here | Tpu) -> Record | None:
        """Returns the next run for a place; None where none is left. What may still run on a TPU is
        for that one alone, and comes first there."""
        with self._lock:
            ours = []
            others = []
            for record in self.records:
                if record.state == FINISHED or record.name in self._taken:
                    continue
                if record.state != RUNNING:
                    others.append(record)
                elif record.place == place.name:
                    ours.append(record)
            if not ours and not others:
                return None

            record = (ours or others)[0]
            self._taken.add(record.name)
            self._busy += 1
            record.place = place.name
            record.state = RUNNING
            record.why = ""
            record.exit_code = None
            record.command = shlex.join(place.command(self.grid, record))
            return record

    def _train(self, place: Here | Tpu, record: Record) -> None:
        """Trains a run to its end, and notes what came of it."""
        log = self.folder.log(record)
        try:
            self.write()
            finished = sum(one.state == FINISHED for one in self.records)
            done = f"{finished} of {len(self.records)} runs are finished"
            say(f"\ngrid: {done}; now {record.shown()}\n{record.command}")
            child = Child(place.command(self.grid, record), log, place.label)
            with self._lock:
                self._children[record.name] = child
            code = child.wait()
            self._note_end(place, record, child, code)
        finally:
            with self._lock:
                self._children.pop(record.name, None)
                self._busy -= 1
                if place.unusable and record.state == UNFINISHED:
                    self._taken.discard(record.name)  # another place may take it
        self.write()
        say(describe(record, log))

    def _note_end(self, place: Here | Tpu, record: Record, child: Child, code: int) -> None:
        """Notes what came of a run that has ended with this exit code."""
        summary = None
        problem = ""
        if code == 0:
            try:
                summary = place.read_summary(record)
            except NoResult as error:
                problem = f"it ended with exit code 0, but {error}"
        with self._lock:
            record.exit_code = code
            if summary is not None:
                record.finish(summary)
            elif problem:
                record.state = FAILED
                record.why = problem
            else:
                place.note_failure(child, code, record, bool(self.received))

    def write(self) -> None:
        """Writes the grid's files as things are."""
        with self._lock:
            content, page = report(self.grid, self.records)
            self.folder.write(content, page)


def describe(record: Record, log: Path) -> str:
    """Returns what came of a run, in a line."""
    if record.state != FINISHED:
        return f"grid: {record.shown()}: {record.state}, {record.why}; its log: {log}"
    words = [f"{name} {number(value)}" for name, value in record.metrics.items()]
    return f"grid: {record.shown()}: {'  '.join(words)}"
