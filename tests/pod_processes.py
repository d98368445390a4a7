"""Pods whose hosts are processes of this machine, and what they leave for a test; pod_host.py says
what of them is real."""

import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from multiprocessing import Pipe
from pathlib import Path

from helpers import environment
from pod_host import Deadlock, Job, Report

from errors import InputError, LostProcess

TESTS = Path(__file__).parent


class Pod:
    """What the hosts of a pod have done.

    Attributes:
        hosts: how many there are.
        folder: see Job.
        has_real_steps: no function stands for their steps.
        steps: every call of a step that took a batch.
        written: everything that was written below the folder.
        printed: what all hosts have printed.
        meetings, trained, outcomes, notes: of each host, see Report.
    """

    def __init__(self, job: Job, reports: list[Report], printed: str):
        self.folder = job.folder
        self.hosts = job.hosts
        self.has_real_steps = job.results is None
        self.steps = reports[0].steps
        self.written = list(itertools.chain.from_iterable(each.written for each in reports))
        self.meetings = [each.meetings for each in reports]
        self.trained = [each.trained for each in reports]
        self.outcomes = [each.outcome for each in reports]
        self.notes = [each.notes for each in reports]
        self.printed = printed

    def succeeded(self) -> "Pod":
        """Returns itself; raises what a host raised: if several did, not the consequence."""
        errors = [outcome for outcome in self.outcomes if isinstance(outcome, BaseException)]
        errors.sort(key=lambda error: isinstance(error, Deadlock | LostProcess))
        if errors:
            print(self.printed)
            raise errors[0]
        return self

    def refused(self, pattern: str) -> "Pod":
        """Returns itself; asserts that each host has ended in an InputError with the pattern."""
        for outcome in self.outcomes:
            assert isinstance(outcome, InputError), self.printed
            assert re.search(pattern, str(outcome)), self.outcomes
        return self

    def stopped(self) -> "Pod":
        """Returns itself; asserts that every host has ended with the exit code of SIGTERM."""
        codes = [getattr(outcome, "code", None) for outcome in self.outcomes]
        assert codes == [143] * self.hosts, self.printed
        return self


class Pods(AbstractContextManager):
    """Runs pods, one after the other, by a server that has the imports (pod_server.py).

    Args:
        folder: for files of the hosts.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._numbers = itertools.count()
        self._connection, other = Pipe()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "pod_server", str(other.fileno())],
            cwd=TESTS,
            env=environment(1, PYTHONPATH=f"{TESTS.parent}:{TESTS}"),
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
        other.close()

    def __exit__(self, *_) -> None:
        """Ends the server and what is left of its hosts."""
        self._connection.close()
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()

    def run(self, job: Job) -> Pod:
        """Runs a pod to its end, whatever that is."""
        place = self._folder / f"{next(self._numbers)}-"
        self._connection.send((job, str(place)))
        statuses = self._connection.recv()

        assert not any(statuses), f"hosts have ended with {statuses}: {printed(place, job)}"
        reports = []
        for host in range(job.hosts):
            reports.append(pickle.loads(Path(f"{place}{host}.pickle").read_bytes()))
        return Pod(job, reports, printed(place, job))


def printed(place: Path, job: Job) -> str:
    """Returns what the hosts of a pod have printed."""
    texts = []
    for host in range(job.hosts):
        path = Path(f"{place}{host}.txt")
        texts.append(path.read_text() if path.exists() else "")
    return "".join(texts)
