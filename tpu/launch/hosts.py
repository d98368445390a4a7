"""How to reach the workers: Cloud TPU VMs through gcloud, or plain ssh hosts.

Both have a `name`; `describe()`; `ssh(worker, command)`, the words that run a shell command on a
worker; `folder(worker)`, the name of a worker's folder there; and `fetch(folder)`, a command to
show.

Host keys are checked, and nothing here switches that off. gcloud keeps the keys in a file of its
own, ~/.ssh/google_compute_known_hosts, under names that contain a part of the key that the VM has
published; it accepts the key of a VM that it sees for the first time, and afterwards no other (its
default of --strict-host-key-checking). Plain ssh goes by your ssh configuration, and since nobody
can answer its question here, it refuses a host that is not in known_hosts: log in to it once
before.
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
STOPPED = ("STOPPED", "STOPPING", "HIDDEN", "HIDING", "SUSPENDED", "SUSPENDING")  # by somebody


class Transient(Exception):
    """The cloud did not answer, or not as it should; the next attempt may succeed."""


@dataclass
class Machine:
    """The state of a TPU.

    Attributes:
        workers: how many it has.
        line: one line about it.
        problem: why it cannot train now, and what to do; "": it can.
        state: "ready"; "later": it will be; "sick": never again, but its workers can be reached;
            "gone": preempted or stopped; "absent": there is none of this name.
        addresses: at which the workers are reached from outside; "": one has no such address.
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
            node, _ = json.JSONDecoder().raw_decode(text, line.start())
            return node
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

    # ---- commands ------------------------------------------------------------------------------

    def command(self, group: str, verb: str, *arguments: str) -> list[str]:
        """Returns a gcloud command that asks nothing (--quiet): its first ssh makes a key without a
        passphrase."""
        location = []
        if self.zone:
            location.append(f"--zone={self.zone}")
        if self.project:
            location.append(f"--project={self.project}")
        return ["gcloud", "compute", "tpus", group, verb, *arguments, *location, "--quiet"]

    def text(self, verb: str, *arguments: str, group: str = "tpu-vm") -> str:
        """Returns a gcloud command to show."""
        without_quiet = self.command(group, verb, *arguments)[:-1]
        return shlex.join(without_quiet)

    def folder(self, worker: int) -> str:
        """Returns the name of a worker's folder in its home, which workers and TPUs may share."""
        return f"{self.name}/worker-{worker}"

    def ssh(self, worker: int, command: str) -> list[str]:
        """Returns the words that run a shell command on a worker. gcloud repeats it after 255."""
        options = [f"--ssh-flag={option}" for option in SSH_OPTIONS]
        what = [self.name, f"--worker={worker}", f"--command={command}"]
        return self.command("tpu-vm", "ssh", *what, *options, *self.flags)

    def fetch(self, folder: str) -> str:
        """Returns the command that copies a folder from worker 0, to show."""
        # --gcloud-flag=--ssh-flag=-oA=b is of ssh; scp has --scp-flag.
        flags = [flag.replace("--ssh-flag=", "--scp-flag=") for flag in self.flags]
        source = f"{self.name}:{folder}"
        return self.text("scp", "--recurse", source, "runs/", "--worker=0", *flags)

    def create(self, kind: str = "TYPE", version: str = "VERSION", *flags: str) -> str:
        """Returns the command that creates it, to show."""
        what = [self.name, f"--accelerator-type={kind}", f"--version={version}"]
        return self.text("create", *what, *flags)

    def queue(self, kind: str = "TYPE", version: str = "VERSION") -> str:
        """Returns the command that asks for it and waits for capacity, to show."""
        node = f"--node-id={self.name}"
        what = [self.name, node, f"--accelerator-type={kind}", f"--runtime-version={version}"]
        return self.text("create", *what, group="queued-resources")

    # ---- state ---------------------------------------------------------------------------------

    def ask(self) -> dict[str, Any]:
        """Returns what gcloud says of the TPU, {} if there is none.

        InputError: it never will say it. Transient: it may, the next time.
        """
        if shutil.which("gcloud") is None:
            install = "https://cloud.google.com/sdk/docs/install"
            raise InputError(f"TPU={self.name} needs gcloud: {install}")
        command = [*self.command("tpu-vm", "describe", self.name), "--format=json"]
        try:
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CLOUD_SECONDS,
            )
        except subprocess.TimeoutExpired:
            silent = f"gcloud did not answer in {CLOUD_SECONDS} s"
            raise Transient(f"{silent}: {shlex.join(command)}") from None

        if result.returncode and re.search(ABSENT, result.stderr):
            return {}
        if result.returncode:
            final, why = explain_cloud(result.stderr)
            kind = InputError if final else Transient
            raise kind(f"TPU={self.name}: {why}")
        node = read_node(result.stdout)
        if not node:
            answer = repr(result.stdout[:60])
            raise Transient(f"TPU={self.name}: gcloud's answer is not JSON: {answer}")
        return node

    def describe(self) -> Machine:
        """Returns state, health and number of workers.

        InputError: gcloud never will say, and why. Transient: it may, the next time.
        """
        node = self.ask()
        if not node:
            problem = (
                f"there is no TPU VM {self.name} in this zone and project: give ZONE= and PROJECT="
                " (gcloud compute tpus tpu-vm list --zone=- lists yours), create it"
                f" ({self.create()}), or wait for free chips ({self.queue()})"
            )
            return Machine(0, f"{self.name}: not found", problem, "absent")
        return self.judge(node)

    def judge(self, node: dict[str, Any]) -> Machine:
        """Returns what gcloud's description of the TPU means for a run."""
        state = node.get("state", "?")
        health = node.get("health", "")
        # A worker with several networks has an endpoint in each.
        networks = max(1, len(node.get("networkConfigs", [])))
        endpoints = node.get("networkEndpoints", [])
        workers = len(endpoints) // networks
        addresses = []
        for endpoint in endpoints[::networks]:
            addresses.append(endpoint.get("accessConfig", {}).get("externalIp", ""))

        kind = node.get("acceleratorType", "TYPE")
        said = ", ".join(word for word in (state, health) if word)
        noun = "worker" if workers == 1 else "workers"
        machine = Machine(workers, f"{self.name}: {kind}, {said}, {workers} {noun}")
        machine.addresses = tuple(addresses)

        create = self.create_again(node)
        recreate = self.recreate(node, create)
        wait = f"wait until {self.text('describe', self.name)} says READY and HEALTHY"
        if state in ("PREEMPTED", "TERMINATED"):
            machine.state = "gone"
            problem = f"{state}: the cloud took it back; recreate it: {recreate}"
        elif state in STOPPED:
            machine.state = "gone"
            problem = f"{state}; start it: {self.text('start', self.name)}"
        elif state == "DELETING":
            machine.state = "gone"
            problem = f"being deleted; create it again: {create}"
        elif state == "REPAIRING":
            machine.state = "later"
            problem = f"in repair: {wait}, or {recreate}"
        elif health == "UNHEALTHY_MAINTENANCE":
            machine.state = "later"
            problem = f"in a maintenance event: {wait}, or {recreate}"
        elif state != "READY":
            machine.state = "later"
            problem = f"{state}, not READY yet: {wait}"
        elif re.match("UNHEALTHY|TIMEOUT", health):
            machine.state = "sick"
            about = node.get("healthDescription", "no description")
            problem = f"{health} ({about}); recreate it: {recreate}"
        elif node.get("multisliceNode"):
            # libtpu would wait for the others: the TPU's own metadata says how many there are.
            machine.state = "sick"
            problem = (
                "one of several slices, which a queued resource with --node-count has joined, and a"
                f" run of the launcher is on one; recreate it: {recreate} without --node-count, or"
                " train on several slices on GKE, by tpu/jobset.yaml (docs/tpu.md)"
            )
        elif not workers:
            machine.state = "later"
            problem = f"without a network endpoint: {wait}"
        else:
            return machine
        machine.problem = f"{self.name} is {problem}"
        return machine

    def create_again(self, node: dict[str, Any]) -> str:
        """Returns the command that creates a TPU like this one, to show."""
        scheduling = node.get("schedulingConfig", {})
        spot = []
        if scheduling.get("spot") or scheduling.get("preemptible"):
            spot = ["--spot"]
        kind = node.get("acceleratorType", "TYPE")
        return self.create(kind, node.get("runtimeVersion", "VERSION"), *spot)

    def recreate(self, node: dict[str, Any], create: str) -> str:
        """Returns what replaces this TPU by another, to show. create: the command for that one."""
        if "queuedResource" not in node:
            return f"{self.text('delete', self.name)} && {create}"
        request = node["queuedResource"].rpartition("/")[2]
        delete = self.text("delete", request, "--force", group="queued-resources")
        return f"{delete}, then ask for it again"


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
            lack = "ssh is not installed here: install openssh-client"
            raise InputError(f"TPU={self.name} needs ssh, and {lack}")
        count = len(self.hosts)
        noun = "workers" if count > 1 else "worker"
        return Machine(count, f"{self.name}: {count} {noun}")

    def fetch(self, folder: str) -> str:
        """Returns the command that copies a folder from worker 0, to show."""
        return shlex.join(["scp", "-r", f"{self.hosts[0]}:{folder}", "runs/"])

    def ssh(self, worker: int, command: str) -> list[str]:
        """Returns the words that run a shell command on a host."""
        # Nobody is there to answer a question.
        options = ["-T", "-oBatchMode=yes", *SSH_OPTIONS]
        return ["ssh", *options, "--", self.hosts[worker], command]


def choose(tpu: str, zone: str, project: str, flags: list[str]) -> TpuVm | SshHosts:
    """Returns the backend of TPU=name or TPU=ssh:host1,host2. InputError: it is neither."""
    if tpu.startswith("ssh:"):
        return choose_hosts(tpu)
    if tpu == "local":
        raise InputError("TPU=local is this machine: run make train there without TPU=")
    if "," in tpu:
        raise InputError(
            f"TPU={tpu} names several TPUs, and a run of the launcher is on one: give one; several"
            " slices train together on GKE, by tpu/jobset.yaml with replicas (docs/tpu.md)"
        )
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", tpu):
        raise InputError(
            f"TPU={tpu} is not the name of a TPU VM (small letters, digits, hyphens), nor"
            " ssh:host1,host2"
        )
    return TpuVm(tpu, zone, project, flags)


def choose_hosts(tpu: str) -> SshHosts:
    """Returns the hosts of ssh:host1,host2. InputError: it is no list of them."""
    hosts = tpu[len("ssh:") :].split(",")
    for host in hosts:
        if not re.fullmatch(r"[\w.@%\[\]:][\w.@%\[\]:-]*", host):
            remedy = "write TPU=ssh:host1,host2, each as ssh takes it"
            raise InputError(f"TPU={tpu} is not a list of hosts; {remedy}")
    if len(set(hosts)) < len(hosts):
        raise InputError(f"TPU={tpu} names a host twice; a host is one worker")
    return SshHosts(tpu, hosts)
