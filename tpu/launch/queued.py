"""A TPU that is asked for before a run and deleted after it: `make train CREATE=v6e-8`, by queued resources."""

from __future__ import annotations

import argparse
import time
from typing import Any

from errors import InputError
from tpu.launch import hosts
from tpu.launch.workers import TpuGone, WorkerLost, Workers, say

ASK_AGAIN = 15  # seconds between two looks at a request


class Request:
    """The queued resource of a TPU, and of its name."""

    def __init__(self, workers: Workers, options: argparse.Namespace) -> None:
        self.workers, self.options, self.host = workers, options, workers.host
        if not isinstance(self.host, hosts.TpuVm):
            raise InputError(f"CREATE={options.create} is for a TPU VM, not for TPU={self.host.name}")

    def ask(self, verb: str, *arguments: str) -> dict[str, Any]:
        """Returns what gcloud says of the request; asks until there is an answer."""
        return self.workers.patiently(lambda heard: self.host.ask("queued-resources", verb, *arguments))

    def deletion(self) -> str:
        """Returns the command that deletes the TPU."""
        return self.host.text("delete", self.host.name, "--force", group="queued-resources")

    def make(self, runs: str) -> None:
        """Asks for the TPU if it is not there, and waits until it is. runs: the folder of the run's results."""
        options, host, kind = self.options, self.host, self.options.create
        if "://" not in runs:
            raise InputError(f"CREATE={kind} deletes the TPU with its disks after the run: give ARGS='--runs gs://…'")
        if options.detach and not options.keep:
            raise InputError("--detach with CREATE= leaves nobody to delete the TPU: give --keep, and delete it later")
        if self.workers.patiently(lambda heard: host.describe()).state != "absent":
            return
        version = next((v for name, v in hosts.VERSIONS.items() if kind.startswith(name)), hosts.OLDER_VERSION)
        version = options.runtime_version or version
        flags = [f"--node-id={host.name}", f"--accelerator-type={kind}", f"--runtime-version={version}"]
        say(f"asking for {kind} ({version}{', spot' * options.spot}), which may take hours")
        state = self.state()
        try:
            if not state:
                self.ask("create", *flags, "--async", *(["--spot"] if options.spot else []))
            while (now := self.state()) != "ACTIVE":
                if now in ("FAILED", "SUSPENDED", "SUSPENDING", "DELETING"):
                    raise TpuGone(f"the request for {host.name} is {now}: delete it and ask again: {self.deletion()}")
                if now != state:
                    say(f"the request for {host.name} is {now or 'on its way'}")
                    state = now
                time.sleep(ASK_AGAIN)
        except KeyboardInterrupt:
            say(f"the request for {host.name} stays; the same command waits again, and this ends it: {self.deletion()}")
            raise

    def state(self) -> str:
        """Returns the state of the request, "" if there is none."""
        return self.ask("describe").get("state", {}).get("state", "")

    def finish(self, ended: bool) -> None:
        """Deletes the TPU when the run has ended everywhere: its results are in the bucket. Else says how to."""
        if self.options.keep or not ended:
            say(f"{self.host.name} stays, and is billed; delete it: {self.deletion()}")
            return
        say(f"deleting {self.host.name}")
        try:
            self.ask("delete", "--force")
        except (InputError, WorkerLost) as error:
            say(f"{error}; it may be there still, and is billed; delete it: {self.deletion()}")
