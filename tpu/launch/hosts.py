"""How to reach the workers: Cloud TPU VMs through gcloud, or plain ssh hosts.

Both have a `name`; `describe()`; `ssh(worker, command)`, the words that run a shell command on a worker;
`folder(worker)`, the name of a worker's folder there; and `fetch(folder)`, a command to show.

Host keys are checked, and nothing here switches that off. gcloud keeps the keys in a file of its own,
~/.ssh/google_compute_known_hosts, under names that contain a part of the key that the VM has published; it accepts the
key of a VM that it sees for the first time, and afterwards no other (its default of --strict-host-key-checking). Plain
ssh goes by your ssh configuration, and since nobody can answer its question here, it refuses a host that is not in
known_hosts: log in to it once before.
"""

from __future__ import annotations

import contextlib
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
# There is no such TPU, in the words of several gclouds.
ABSENT = r"NOT_FOUND|was not found|(?i:\b404\b.{0,80}not found)"


class Transient(Exception):
    """The cloud did not answer, or not as it should; the next attempt may succeed."""


@dataclass
class Machine:
    """The state of a TPU: its workers, one line about it, and, if it cannot train now, why and what to do.

    state: "ready"; "later": it will be; "sick": never again, but its workers can be reached; "gone": preempted or
    stopped; "absent": there is none of this name. addresses: at which the workers are reached from outside; "": one
    has no such address.
    """

    workers: int
    line: str
    problem: str = ""
    state: str = "ready"
    addresses: tuple[str, ...] = ()


def read_node(text: str) -> dict[str, Any]:
    """Returns the JSON in gcloud's answer, before which warnings may stand. {}: it has none."""
    for line in re.finditer(r"^\{", text, re.MULTILINE):
        with contextlib.suppress(ValueError):
            return json.JSONDecoder().raw_decode(text, line.start())[0]
    return {}


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

    def folder(self, worker: int) -> str:
        """Returns the name of a worker's folder in its home, which workers and TPUs may share."""
        return f"{self.name}/worker-{worker}"

    def ssh(self, worker: int, command: str) -> list[str]:
        """Returns the words that run a shell command on a worker. gcloud repeats it after 255."""
        flags = [*(f"--ssh-flag={option}" for option in SSH_OPTIONS), *self.flags]
        return self.command("tpu-vm", "ssh", self.name, f"--worker={worker}", f"--command={command}", *flags)

    def fetch(self, folder: str) -> str:
        """Returns the command that copies a folder from worker 0, to show."""
        # --gcloud-flag=--ssh-flag=-oA=b is of ssh; scp has --scp-flag.
        flags = [flag.replace("--ssh-flag=", "--scp-flag=") for flag in self.flags]
        return self.text("scp", "--recurse", f"{self.name}:{folder}", "runs/", "--worker=0", *flags)

    def ask(self) -> dict[str, Any]:
        """Returns what gcloud says of the TPU, {} if there is none. InputError: it never will say it. Transient."""
        if shutil.which("gcloud") is None:
            raise InputError(f"TPU={self.name} needs gcloud: https://cloud.google.com/sdk/docs/install")
        command = [*self.command("tpu-vm", "describe", self.name), "--format=json"]
        streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            result = subprocess.run(command, timeout=CLOUD_SECONDS, **streams)
        except subprocess.TimeoutExpired:
            raise Transient(f"gcloud did not answer in {CLOUD_SECONDS} s: {shlex.join(command)}") from None
        if result.returncode and re.search(ABSENT, result.stderr):
            return {}
        if result.returncode:
            final, why = explain_cloud(result.stderr)
            kind = InputError if final else Transient
            raise kind(f"TPU={self.name}: {why}")
        node = read_node(result.stdout)
        if not node:
            raise Transient(f"TPU={self.name}: gcloud's answer is not JSON: {result.stdout[:60]!r}")
        return node

    def create(self, kind: str = "TYPE", version: str = "VERSION", *flags: str) -> str:
        """Returns the command that creates it, to show."""
        return self.text("create", self.name, f"--accelerator-type={kind}", f"--version={version}", *flags)

    def queue(self, kind: str = "TYPE", version: str = "VERSION") -> str:
        """Returns the command that asks for it and waits for capacity, to show."""
        what = [f"--node-id={self.name}", f"--accelerator-type={kind}", f"--runtime-version={version}"]
        return self.text("create", self.name, *what, group="queued-resources")

    def describe(self) -> Machine:
        """Returns state, health and number of workers. InputError: gcloud never will say, and why. Transient."""
        node = self.ask()
        if not node:
            problem = (
                f"there is no TPU VM {self.name} in this zone and project: give ZONE= and PROJECT= (gcloud compute tpus"
                f" tpu-vm list --zone=- lists yours), create it ({self.create()}), or wait for free chips"
                f" ({self.queue()})"
            )
            return Machine(0, f"{self.name}: not found", problem, "absent")
        return self.judge(node)

    def judge(self, node: dict[str, Any]) -> Machine:
        """Returns what gcloud's description of the TPU means for a run."""
        state = node.get("state", "?")
        health = node.get("health", "")
        kind = node.get("acceleratorType", "TYPE")
        # A worker with several networks has an endpoint in each.
        networks = max(1, len(node.get("networkConfigs", [])))
        ends = node.get("networkEndpoints", [])
        workers = len(ends) // networks
        addresses = tuple(end.get("accessConfig", {}).get("externalIp", "") for end in ends[::networks])
        said = ", ".join(word for word in (state, health) if word)
        line = f"{self.name}: {kind}, {said}, {workers} worker{'s' * (workers != 1)}"

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
        elif state == "REPAIRING":
            now, problem = "later", f"in repair: {wait}, or {recreate}"
        elif health == "UNHEALTHY_MAINTENANCE":
            now, problem = "later", f"in a maintenance event: {wait}, or {recreate}"
        elif state != "READY":
            now, problem = "later", f"{state}, not READY yet: {wait}"
        elif re.match("UNHEALTHY|TIMEOUT", health):
            about = node.get("healthDescription", "no description")
            now, problem = "sick", f"{health} ({about}); recreate it: {recreate}"
        elif not workers:
            now, problem = "later", f"without a network endpoint: {wait}"
        else:
            return Machine(workers, line, addresses=addresses)
        return Machine(workers, line, f"{self.name} is {problem}", now, addresses)


@dataclass
class SshHosts:
    """Machines that ssh reaches by your own configuration, in the order of their process index."""

    name: str
    hosts: list[str]

    def folder(self, worker: int) -> str:
        """Returns the name of a worker's folder in its home, which hosts may share."""
        host = re.sub(r"[^\w.-]", "_", self.hosts[worker])
        return f"ssh-{host}/worker-{worker}"

    def describe(self) -> Machine:
        """Returns the number of hosts; nothing else is known."""
        if shutil.which("ssh") is None:
            raise InputError(f"TPU={self.name} needs ssh, and ssh is not installed here: install openssh-client")
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
