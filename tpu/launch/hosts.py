"""How to reach the workers: Cloud TPU VMs through gcloud, or plain ssh hosts.

Both have a `name`, `describe()`, and `ssh(worker, command)`, the words that run a shell command on a worker.

Host keys are checked, and nothing here switches that off. gcloud keeps the keys in a file of its own,
~/.ssh/google_compute_known_hosts, under names that contain a part of the key that the VM has published; it accepts the
key of a VM that it sees for the first time, and afterwards no other (its default of --strict-host-key-checking). Plain
ssh goes by your ssh configuration, and since nobody can answer its question here, it refuses a host that is not in
known_hosts: log in to it once before.

Only the standard library, Python 3.9 or later.
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
from tpu.launch.messages import GCLOUD_ERRORS, last_line

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

    gone: it will not come back by itself (preempted, deleted, stopped, broken). Not gone, with a problem: it will be
    ready later. absent: there is none of this name. up: its workers can be reached, whatever its health.
    """

    workers: int
    line: str
    problem: str = ""
    gone: bool = False
    absent: bool = False
    up: bool = True


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
        """Returns the words that run a shell command on a worker. gcloud repeats it without its input after 255."""
        flags = [*(f"--ssh-flag={option}" for option in SSH_OPTIONS), *self.flags]
        return self.command("tpu-vm", "ssh", self.name, f"--worker={worker}", f"--command={command}", *flags)

    def ask(self, group: str, verb: str, *arguments: str) -> dict[str, Any]:
        """Returns what gcloud answers as JSON, {} if there is no such thing. InputError: it never will. Transient."""
        if shutil.which("gcloud") is None:
            raise InputError(
                f"TPU={self.name} needs gcloud, which is not installed here: https://cloud.google.com/sdk/docs/install"
            )
        command = [*self.command(group, verb, self.name, *arguments), "--format=json"]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=CLOUD_SECONDS, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise Transient(f"gcloud did not answer in {CLOUD_SECONDS} s: {shlex.join(command)}") from None
        if result.returncode and "NOT_FOUND" in result.stderr:
            return {}
        if result.returncode:
            for pattern, final, sentence in GCLOUD_ERRORS:
                if re.search(pattern, result.stderr):
                    kind = InputError if final else Transient
                    raise kind(f"TPU={self.name}: {sentence} ({last_line(result.stderr)})")
            raise Transient(f"TPU={self.name}: gcloud failed: {last_line(result.stderr)}")
        try:
            answer = json.loads(result.stdout or "{}")
        except ValueError:
            answer = None
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]  # what create and delete answer
        if not isinstance(answer, dict) or (verb == "describe" and not answer):
            raise Transient(f"TPU={self.name}: gcloud's answer is not JSON: {result.stdout[:60]!r}")
        return answer

    def describe(self) -> Machine:
        """Returns state, health and number of workers. InputError: gcloud never will say, and why. Transient."""
        node = self.ask("tpu-vm", "describe")
        if node:
            return self._machine(node)
        create = self._create("TYPE", "VERSION")
        problem = (
            f"there is no TPU VM {self.name} in this zone and project: give ZONE= and PROJECT= (gcloud compute tpus"
            f" tpu-vm list --zone=- lists yours), create it ({create}), or let CREATE=v6e-8 ask for it"
        )
        return Machine(0, f"{self.name}: not found", problem, gone=True, absent=True, up=False)

    def _create(self, kind: str, version: str, spot: bool = False) -> str:
        words = [self.name, f"--accelerator-type={kind}", f"--version={version}", *(["--spot"] if spot else [])]
        return self.text("create", *words)

    def _machine(self, node: dict) -> Machine:
        state, health = node.get("state", "STATE_UNSPECIFIED"), node.get("health", "")
        kind = node.get("acceleratorType", "TYPE")
        # A worker with several networks has an endpoint in each.
        workers = len(node.get("networkEndpoints", [])) // max(1, len(node.get("networkConfigs", [])))
        plural = "worker" if workers == 1 else "workers"
        line = f"{self.name}: {kind}, {state}{', ' + health if health else ''}, {workers} {plural}"
        scheduling = node.get("schedulingConfig", {})
        spot = scheduling.get("spot", False) or scheduling.get("preemptible", False)
        create = self._create(kind, node.get("runtimeVersion", "VERSION"), spot)
        recreate = f"{self.text('delete', self.name)} && {create}"
        if "queuedResource" in node:
            request = node["queuedResource"].rpartition("/")[2]
            recreate = f"{self.text('delete', request, '--force', group='queued-resources')}, then ask for it again"
        broken = node.get("healthDescription", "no description")
        wait = f"wait until {self.text('describe', self.name)} says READY and HEALTHY"
        problem, gone = "", True
        if state in ("PREEMPTED", "TERMINATED"):
            problem = f"{state}: the cloud took it back; recreate it: {recreate}"
        elif state in ("STOPPED", "STOPPING", "HIDDEN", "HIDING", "SUSPENDED", "SUSPENDING"):
            problem = f"{state}; start it: {self.text('start', self.name)}"
        elif state == "DELETING":
            problem = f"being deleted; create it again: {create}"
        elif state == "READY" and health != "UNHEALTHY_MAINTENANCE" and re.match("UNHEALTHY|TIMEOUT", health):
            problem = f"{health} ({broken}); recreate it: {recreate}"
        else:
            gone = False
            if state == "REPAIRING" or health == "UNHEALTHY_MAINTENANCE":
                problem = f"{'in repair' if state == 'REPAIRING' else 'in a maintenance event'}: {wait}, or {recreate}"
            elif state != "READY":
                problem = f"{state}, not READY yet: {wait}"
            elif not workers:
                problem = f"without a network endpoint: {wait}"
        return Machine(workers, line, problem and f"{self.name} is {problem}", gone, up=state == "READY")


@dataclass
class SshHosts:
    """Machines that ssh reaches, in the order of their process index. config: a file for ssh's -F, "" = your own."""

    name: str
    hosts: list[str]
    config: str = ""

    def describe(self) -> Machine:
        """Returns the number of hosts; nothing else is known."""
        return Machine(len(self.hosts), f"{self.name}: {len(self.hosts)} worker{'s' * (len(self.hosts) > 1)}")

    def ssh(self, worker: int, command: str) -> list[str]:
        """Returns the words that run a shell command on a host."""
        config = ["-F", self.config] if self.config else []
        # Nobody is there to answer a question.
        return ["ssh", "-T", *config, "-oBatchMode=yes", *SSH_OPTIONS, "--", self.hosts[worker], command]


def choose(tpu: str, zone: str, project: str, flags: list[str], config: str) -> TpuVm | SshHosts:
    """Returns the backend of TPU=name or TPU=ssh:host1,host2. InputError: it is neither."""
    if tpu.startswith("ssh:"):
        hosts = tpu[4:].split(",")
        if not all(re.fullmatch(r"[\w.@%\[\]:][\w.@%\[\]:-]*", host) for host in hosts):
            raise InputError(f"TPU={tpu} is not a list of hosts; write TPU=ssh:host1,host2, each as ssh takes it")
        if len(set(hosts)) < len(hosts):
            raise InputError(f"TPU={tpu} names a host twice; a host is one worker")
        return SshHosts(tpu, hosts, config)
    if tpu == "local":
        raise InputError("TPU=local is this machine: run make train there without TPU=")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", tpu):
        raise InputError(
            f"TPU={tpu} is not the name of a TPU VM (small letters, digits, hyphens); for other machines write"
            " TPU=ssh:host1,host2"
        )
    return TpuVm(tpu, zone, project, flags)
