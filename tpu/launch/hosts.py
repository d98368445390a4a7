"""How to reach the workers: Cloud TPU VMs through gcloud, or plain ssh hosts.

Both have a `name`, `describe()`, and `ssh(worker, command)`, the words that run a shell command on a worker.

Host keys are checked, and nothing here switches that off. gcloud keeps the keys in a file of its own,
~/.ssh/google_compute_known_hosts, under names that contain a part of the key that the VM has published; it accepts the
key of a VM that it sees for the first time, and afterwards no other (its default of --strict-host-key-checking). Plain
ssh goes by your ssh configuration, and since nobody can answer its question here, it refuses a host that is not in
known_hosts: log in to it once before.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import Any

from errors import InputError
from tpu.launch.messages import explain_cloud

# A connection that is dead is noticed within a minute, and one that cannot be made within 15 s.
SSH_OPTIONS = ("-oConnectTimeout=15", "-oServerAliveInterval=15", "-oServerAliveCountMax=3")
CLOUD_SECONDS = 120
# The software of a TPU VM by what its type begins with.
VERSIONS = {"v6e": "v2-alpha-tpuv6e", "v5p": "v2-alpha-tpuv5", "v5litepod": "v2-alpha-tpuv5-lite"}
OLDER_VERSION = "tpu-ubuntu2204-base"


class Transient(Exception):
    """The cloud did not answer, or not as it should; the next attempt may succeed."""


@dataclass
class Machine:
    """The state of a TPU: its workers, one line about it, and, if it cannot train now, why and what to do.

    state: "ready"; "later": it will be; "sick": never again, but its workers can be reached; "gone": preempted or
    stopped; "absent": there is none of this name.
    """

    workers: int
    line: str
    problem: str = ""
    state: str = "ready"


@dataclass
class TpuVm:
    """A Cloud TPU VM or a slice of several, reached by `gcloud compute tpus tpu-vm`.

    zone, project: "" = gcloud's own configuration. flags: for its ssh, such as --internal-ip.
    """

    name: str
    zone: str = ""
    project: str = ""
    flags: list[str] = field(default_factory=list)

    def command(self, group: str, verb: str, *arguments: str) -> list[str]:
        """Returns a gcloud command that asks nothing (--quiet): its first ssh makes a key without a passphrase."""
        place = [f"--zone={self.zone}"] if self.zone else []
        place += [f"--project={self.project}"] if self.project else []
        return ["gcloud", "compute", "tpus", group, verb, *arguments, *place, "--quiet"]

    def text(self, verb: str, *arguments: str, group: str = "tpu-vm") -> str:
        """Returns a gcloud command to show."""
        return shlex.join(self.command(group, verb, *arguments)[:-1])

    def ssh(self, worker: int, command: str) -> list[str]:
        """Returns the words that run a shell command on a worker. gcloud repeats it after 255."""
        flags = [*(f"--ssh-flag={option}" for option in SSH_OPTIONS), *self.flags]
        return self.command("tpu-vm", "ssh", self.name, f"--worker={worker}", f"--command={command}", *flags)

    def fetch(self, folder: str) -> str:
        """Returns the command that copies a folder from worker 0, to show."""
        return self.text("scp", "--recurse", f"{self.name}:{folder}", "runs/", "--worker=0")

    def ask(self, group: str, verb: str, *arguments: str) -> dict[str, Any]:
        """Returns what gcloud answers as JSON, {} if there is no such thing. InputError: it never will. Transient."""
        if shutil.which("gcloud") is None:
            raise InputError(f"TPU={self.name} needs gcloud: https://cloud.google.com/sdk/docs/install")
        command = [*self.command(group, verb, self.name, *arguments), "--format=json"]
        streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            result = subprocess.run(command, timeout=CLOUD_SECONDS, **streams)
        except subprocess.TimeoutExpired:
            raise Transient(f"gcloud did not answer in {CLOUD_SECONDS} s: {shlex.join(command)}") from None
        if "NOT_FOUND" in result.stderr and result.returncode:
            return {}
        if result.returncode:
            final, why = explain_cloud(result.stderr)
            raise (InputError if final else Transient)(f"TPU={self.name}: {why}")
        try:
            answer = json.loads(result.stdout or "{}")
        except ValueError:
            answer = None
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]  # what create and delete answer
        if not isinstance(answer, dict) or (verb == "describe" and not answer):
            raise Transient(f"TPU={self.name}: gcloud's answer is not JSON: {result.stdout[:60]!r}")
        return answer

    def create(self, kind: str = "TYPE", version: str = "VERSION", *flags: str) -> str:
        """Returns the command that creates it, to show."""
        return self.text("create", self.name, f"--accelerator-type={kind}", f"--version={version}", *flags)

    def describe(self) -> Machine:
        """Returns state, health and number of workers. InputError: gcloud never will say, and why. Transient."""
        node = self.ask("tpu-vm", "describe")
        if not node:
            problem = (
                f"there is no TPU VM {self.name} in this zone and project: give ZONE= and PROJECT= (gcloud compute tpus"
                f" tpu-vm list --zone=- lists yours), create it ({self.create()}), or let CREATE=v6e-8 ask for it"
            )
            return Machine(0, f"{self.name}: not found", problem, "absent")
        state, health, kind = node.get("state", "?"), node.get("health", ""), node.get("acceleratorType", "TYPE")
        # A worker with several networks has an endpoint in each.
        workers = len(node.get("networkEndpoints", [])) // max(1, len(node.get("networkConfigs", [])))
        line = f"{self.name}: {kind}, {state}{', ' * bool(health)}{health}, {workers} worker{'s' * (workers != 1)}"
        scheduling = node.get("schedulingConfig", {})
        spot = ["--spot"] if scheduling.get("spot") or scheduling.get("preemptible") else []
        create = self.create(kind, node.get("runtimeVersion", "VERSION"), *spot)
        recreate = f"{self.text('delete', self.name)} && {create}"
        if "queuedResource" in node:
            request = node["queuedResource"].rpartition("/")[2]
            recreate = f"{self.text('delete', request, '--force', group='queued-resources')}, then ask for it again"
        wait = f"wait until {self.text('describe', self.name)} says READY and HEALTHY"
        if state in ("PREEMPTED", "TERMINATED"):
            now, problem = "gone", f"{state}: the cloud took it back; recreate it: {recreate}"
        elif state in ("STOPPED", "STOPPING", "HIDDEN", "HIDING", "SUSPENDED", "SUSPENDING"):
            now, problem = "gone", f"{state}; start it: {self.text('start', self.name)}"
        elif state == "DELETING":
            now, problem = "gone", f"being deleted; create it again: {create}"
        elif state == "REPAIRING" or health == "UNHEALTHY_MAINTENANCE":
            what = "in repair" if state == "REPAIRING" else "in a maintenance event"
            now, problem = "later", f"{what}: {wait}, or {recreate}"
        elif state != "READY":
            now, problem = "later", f"{state}, not READY yet: {wait}"
        elif re.match("UNHEALTHY|TIMEOUT", health):
            about = node.get("healthDescription", "no description")
            now, problem = "sick", f"{health} ({about}); recreate it: {recreate}"
        elif not workers:
            now, problem = "later", f"without a network endpoint: {wait}"
        else:
            return Machine(workers, line)
        return Machine(workers, line, f"{self.name} is {problem}", now)


@dataclass
class SshHosts:
    """Machines that ssh reaches by your own configuration, in the order of their process index."""

    name: str
    hosts: list[str]

    def describe(self) -> Machine:
        """Returns the number of hosts; nothing else is known."""
        return Machine(len(self.hosts), f"{self.name}: {len(self.hosts)} worker{'s' * (len(self.hosts) > 1)}")

    def fetch(self, folder: str) -> str:
        """Returns the command that copies a folder from worker 0, to show."""
        return shlex.join(["scp", "-r", f"{self.hosts[0]}:{folder}", "runs/"])

    def ssh(self, worker: int, command: str) -> list[str]:
        """Returns the words that run a shell command on a host."""
        # Nobody is there to answer a question.
        return ["ssh", "-T", "-oBatchMode=yes", *SSH_OPTIONS, "--", self.hosts[worker], command]


def choose(tpu: str, zone: str, project: str, flags: list[str]) -> TpuVm | SshHosts:
    """Returns the backend of TPU=name or TPU=ssh:host1,host2. InputError: it is neither."""
    if tpu.startswith("ssh:"):
        hosts = tpu[4:].split(",")
        if not all(re.fullmatch(r"[\w.@%\[\]:][\w.@%\[\]:-]*", host) for host in hosts):
            raise InputError(f"TPU={tpu} is not a list of hosts; write TPU=ssh:host1,host2, each as ssh takes it")
        if len(set(hosts)) < len(hosts):
            raise InputError(f"TPU={tpu} names a host twice; a host is one worker")
        return SshHosts(tpu, hosts)
    if tpu == "local":
        raise InputError("TPU=local is this machine: run make train there without TPU=")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", tpu):
        raise InputError(f"TPU={tpu} is not the name of a TPU VM (small letters, digits, hyphens), nor ssh:host1,host2")
    return TpuVm(tpu, zone, project, flags)
