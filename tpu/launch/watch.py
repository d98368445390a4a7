"""Watches a start of a run on all workers: streams the log of worker 0, and stops the others when one fails.

Only the standard library, Python 3.9 or later.
"""

from __future__ import annotations

import base64
import queue
import re
import sys
import threading
from dataclasses import dataclass
from typing import Any

from errors import InputError
from tpu.launch import hosts
from tpu.launch.connections import Aborted, Patience, WorkerLost
from tpu.launch.fleet import FAILED_GRACE, PRINTING, Fleet, Start, TpuGone, say

LAST_LINES = 25
RECENT = 32 * 1024  # bytes of the log so far that are shown when attaching

# What the log of a failed worker contains -> what it means and what to do.
KNOWN_MESSAGES = (
    (
        r"Failed to get global TPU topology",
        "libtpu did not find the chips of the other workers: the run must be started on all workers of the slice (do"
        " not set TPU_PROCESS_BOUNDS and the like), and the VM's software version must be the one for its TPU type"
        " (v6e: v2-alpha-tpuv6e); if both are so, recreate the TPU",
    ),
    (
        r"TPU is already in use by process|/dev/vfio/\d+\)?: Device or resource busy|/dev/accel\d+.*(?:busy|in use)",
        "another process on this worker holds the TPU: {stop} ends a run of ours; else find it there with"
        " `sudo lsof -w /dev/accel* /dev/vfio/*` and end it, it may be another user's",
    ),
    (
        r"RESOURCE_EXHAUSTED|Ran out of memory in memory space hbm|Out of memory while trying to allocate",
        "the program does not fit into the TPU's memory (HBM): a smaller --batch-size in ARGS, or more chips",
    ),
    (
        r"CPython 3\.11 is needed|python3\.11: (?:command )?not found|ensurepip is not available",
        f"there is no complete Python 3.11 on this worker: {hosts.GET_PYTHON}; install it on all workers",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk of this worker is full: remove what is not needed there",
    ),
    (
        r"^make: \*\*\* \[.*\] Killed",
        "a process was killed from outside, most likely since the worker ran out of memory (not the TPU's): fewer"
        " --workers in ARGS; `sudo dmesg | grep -i oom` there tells",
    ),
)


@dataclass
class Outcome:
    """How a start of the run ended. final: starting it again would not help."""

    code: int
    final: bool = False


class Follower:
    """One worker's log, or for workers other than 0 only its end, over connections that are made again.

    at: byte of the log to begin at; -1: the beginning, -n: its last n bytes.
    """

    def __init__(self, fleet: Fleet, start: Start, worker: int, at: int) -> None:
        self.fleet, self.start, self.worker, self.at = fleet, start, worker, at
        self.patience = Patience(fleet.lost_after)
        self.broken = False

    def run(self, events: queue.Queue) -> None:
        """Puts (worker, the answer with the end, or an exception) into `events`."""
        try:
            events.put((self.worker, self.follow()))
        except Aborted:
            pass
        except Exception as error:
            events.put((self.worker, error))

    def follow(self) -> dict[str, Any]:
        """Returns the answer with the end. InputError, TpuGone, WorkerLost: it will not come."""
        fleet, worker = self.fleet, self.worker
        while True:
            arguments = ["--at", str(self.at), *(["--last"] if worker else [])]
            command = fleet.host.ssh(worker, fleet.command(worker, "follow", self.start, *arguments))
            result = fleet.connections.run(command, on_answer=self.hear)
            if result.answer.get("state") == "ended":
                return result.answer
            if result.answer.get("state") == "unknown":
                raise WorkerLost(worker, "it does not have this run; was the machine replaced?")
            if not self.broken:
                why = hosts.why_broken(result.errors)
                say(f"{fleet.label(worker)}: the connection broke ({why}); the run continues, connecting again")
                self.broken = True
            fleet.retry(worker, result, self.patience)

    def hear(self, answer: dict[str, Any]) -> None:
        """Prints what an answer brings of the log, without what a repeated command repeats."""
        self.patience.renew()
        self.patience.pause = 0.25
        if self.broken:
            say(f"{self.fleet.label(self.worker)}: connected again")
            self.broken = False
        if "data" in answer:
            data = base64.b64decode(answer["data"])
            known = max(0, self.at - answer["at"]) if self.at >= 0 else 0
            self.at = max(self.at, answer["at"] + len(data))
            with PRINTING:
                sys.stdout.buffer.write(data[known:])
                sys.stdout.buffer.flush()


def watch(fleet: Fleet, start: Start, at: int, grace: float) -> Outcome:
    """Streams the log of worker 0 until all workers have ended, or one has failed; then none runs any more.

    at: see `Follower`; grace: seconds for the others to save when the run was stopped.
    """
    events: queue.Queue = queue.Queue()
    for worker in fleet.workers:
        follower = Follower(fleet, start, worker, at)
        threading.Thread(target=follower.run, args=(events,), daemon=True).start()
    left = set(fleet.workers)
    while left:
        worker, event = events.get()
        if isinstance(event, TpuGone):
            raise event
        if isinstance(event, (InputError, WorkerLost)):
            say(f"{event}; stopping the run on the others")
            fleet.stop_all(start, FAILED_GRACE)
            return Outcome(1, isinstance(event, InputError))
        if isinstance(event, BaseException):
            raise event
        if event["code"] == 0:
            left.discard(worker)
            continue
        if event["stopped"]:
            say(f"the run was stopped on {fleet.label(worker)}, exit code {event['code']}")
            fleet.stop_all(start, grace)
            return Outcome(event["code"], event["stopped"] == "asked")
        return failed(fleet, start, worker, event)
    return Outcome(0)


def failed(fleet: Fleet, start: Start, worker: int, event: dict) -> Outcome:
    """Says why a worker failed, and stops the others."""
    code = event["code"]
    end = base64.b64decode(event["tail"]).decode(errors="replace")
    if worker:
        with PRINTING:
            for line in end.splitlines()[-LAST_LINES:]:
                print(f"[worker {worker}] {line}", flush=True)
    if code is None:
        say(f"the run vanished from {fleet.label(worker)}: the machine was restarted, or its processes were killed")
    else:
        say(f"{fleet.label(worker)} failed with exit code {code}")
    for pattern, sentence in KNOWN_MESSAGES:
        if re.search(pattern, end, re.MULTILINE):
            say(f"what this means: {sentence.format(stop=fleet.make('stop'))}")
    if len(fleet.workers) > 1:
        say("stopping the run on the others")
    fleet.stop_all(start, FAILED_GRACE)
    # 2 is what a script gives for an input that the user must fix.
    return Outcome(1 if code is None else code, code == 2)
