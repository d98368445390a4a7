"""How to reach the workers: Cloud TPU VMs through gcloud, or plain ssh hosts.

A backend has a `name`, `describe()`, and the argument lists of two commands, `ssh(worker, command)` and
`scp(worker, sources, folder)`. Everything else is the same for all backends.

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

from errors import InputError

# A connection that is dead is noticed within a minute, and one that cannot be made within 15 s.
SSH_OPTIONS = ("-oConnectTimeout=15", "-oServerAliveInterval=15", "-oServerAliveCountMax=3")
DESCRIBE_SECONDS = 120
GET_PYTHON = (
    "CPython 3.11 with venv and ensurepip is needed, on Ubuntu `sudo add-apt-repository -y ppa:deadsnakes/ppa && sudo"
    " apt-get install -y python3.11 python3.11-venv`, or give make PYTHON=/path/to/python3.11"
)


@dataclass
class Machine:
    """The state of a TPU: its workers, one line about it, and, if it cannot be used, why and what to do.

    `lost`: it will not come back by itself (preempted, deleted, stopped, in repair).
    """

    workers: int
    line: str
    problem: str = ""
    lost: bool = False


@dataclass
class TpuVm:
    """A Cloud TPU VM or a slice of several, reached by `gcloud compute tpus tpu-vm`.

    zone, project: "" = gcloud's own configuration. flags: for its ssh and scp, such as --internal-ip.
    """

    name: str
    zone: str = ""
    project: str = ""
    flags: list[str] = field(default_factory=list)

    def _command(self, verb: str, *arguments: str) -> list[str]:
        """Returns a gcloud command that asks nothing (--quiet): its first ssh makes a key without a passphrase."""
        place = [f"--zone={self.zone}"] if self.zone else []
        place += [f"--project={self.project}"] if self.project else []
        return ["gcloud", "compute", "tpus", "tpu-vm", verb, *arguments, *place, "--quiet"]

    def ssh(self, worker: int, command: str) -> list[str]:
        """Returns the words that run a shell command on a worker. gcloud repeats it without its input after 255."""
        options = [f"--ssh-flag={option}" for option in SSH_OPTIONS]
        options += [flag for flag in self.flags if not flag.startswith("--scp-flag")]
        return self._command("ssh", self.name, f"--worker={worker}", f"--command={command}", *options)

    def scp(self, worker: int, sources: list[str], folder: str) -> list[str]:
        """Returns the words that copy files into a folder of a worker's home."""
        options = [f"--scp-flag={option}" for option in SSH_OPTIONS]
        options += [flag for flag in self.flags if not flag.startswith("--ssh-flag")]
        target = f"{self.name}:{folder}/"
        return self._command("scp", *sources, target, f"--worker={worker}", *options)

    def text(self, verb: str, *arguments: str) -> str:
        """Returns a gcloud command to show."""
        return shlex.join(self._command(verb, *arguments)[:-1])

    def describe(self) -> Machine:
        """Returns state, health and number of workers. InputError: gcloud cannot say, and why."""
        if shutil.which("gcloud") is None:
            raise InputError(
                f"TPU={self.name} needs gcloud, which is not installed here: https://cloud.google.com/sdk/docs/install"
            )
        command = self._command("describe", self.name, "--format=json")
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=DESCRIBE_SECONDS, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise InputError(f"gcloud did not answer in {DESCRIBE_SECONDS} s; try: {shlex.join(command)}") from None
        if result.returncode:
            if "NOT_FOUND" in result.stderr:
                return Machine(0, f"{self.name}: not found", self._not_found(result.stderr), lost=True)
            raise InputError(explain_gcloud(result.stderr, self))
        return self._machine(json.loads(result.stdout))

    def _not_found(self, text: str) -> str:
        zones = "gcloud compute tpus tpu-vm list --zone=-"
        return (
            f"there is no TPU VM {self.name} in this zone and project: give ZONE= and PROJECT= ({zones} lists yours),"
            f" or create it: {self._create()} ({last_line(text)})"
        )

    def _create(self, kind: str = "TYPE", version: str = "VERSION", spot: bool = False) -> str:
        return self.text(
            "create",
            self.name,
            f"--accelerator-type={kind}",
            f"--version={version}",
            *(["--spot"] if spot else []),
        )

    def _machine(self, node: dict) -> Machine:
        state, health = node.get("state", "STATE_UNSPECIFIED"), node.get("health", "")
        kind = node.get("acceleratorType", "TYPE")
        # A worker with several networks has an endpoint in each.
        workers = len(node.get("networkEndpoints", [])) // max(1, len(node.get("networkConfigs", [])))
        plural = "worker" if workers == 1 else "workers"
        line = f"{self.name}: {kind}, {state}{', ' + health if health else ''}, {workers} {plural}"
        scheduling = node.get("schedulingConfig", {})
        spot = scheduling.get("spot", False) or scheduling.get("preemptible", False)
        delete = self.text("delete", self.name)
        recreate = f"{delete} && {self._create(kind, node.get('runtimeVersion', 'VERSION'), spot)}"
        if "queuedResource" in node:
            request = node["queuedResource"].rpartition("/")[2]
            recreate = (
                f"it belongs to the queued resource {request}, deleted and requested again (gcloud compute tpus"
                f" queued-resources delete {request} --force, then queued-resources create)"
            )
        if state in ("PREEMPTED", "TERMINATED"):
            sentence = f"{self.name} is {state}: the cloud took it back; recreate it: {recreate}"
            return Machine(workers, line, sentence, True)
        if state in ("STOPPED", "STOPPING", "HIDDEN", "HIDING", "SUSPENDED", "SUSPENDING"):
            start = self.text("start", self.name)
            return Machine(workers, line, f"{self.name} is {state}; start it: {start}", True)
        if state == "DELETING":
            create = self._create(kind, node.get("runtimeVersion", "VERSION"), spot)
            return Machine(workers, line, f"{self.name} is being deleted; create it again: {create}", True)
        if state == "REPAIRING" or health == "UNHEALTHY_MAINTENANCE":
            what = "in a maintenance event" if health == "UNHEALTHY_MAINTENANCE" else "in repair"
            watch = self.text("describe", self.name)
            sentence = f"{self.name} is {what}: wait until {watch} says READY and HEALTHY, or recreate it: {recreate}"
            return Machine(workers, line, sentence, True)
        if state != "READY":
            watch = self.text("describe", self.name)
            return Machine(workers, line, f"{self.name} is {state}, not READY yet: wait, and look with {watch}")
        if health.startswith("UNHEALTHY") or health == "TIMEOUT":
            why = node.get("healthDescription", "no description")
            return Machine(workers, line, f"{self.name} is {health} ({why}); recreate it: {recreate}", True)
        if not workers:
            return Machine(0, line, f"{self.name} has no network endpoint, so it has no worker that can be reached")
        return Machine(workers, line)


@dataclass
class SshHosts:
    """Machines that ssh reaches, in the order of their process index. config: a file for ssh's -F, "" = your own."""

    name: str
    hosts: list[str]
    config: str = ""

    def _options(self) -> list[str]:
        # Nobody is there to answer a question.
        return [*(["-F", self.config] if self.config else []), "-oBatchMode=yes", *SSH_OPTIONS]

    def describe(self) -> Machine:
        """Returns the number of hosts; nothing else is known."""
        plural = "worker" if len(self.hosts) == 1 else "workers"
        return Machine(len(self.hosts), f"{self.name}: {len(self.hosts)} {plural}")

    def ssh(self, worker: int, command: str) -> list[str]:
        """Returns the words that run a shell command on a host."""
        return ["ssh", "-T", *self._options(), "--", self.hosts[worker], command]

    def scp(self, worker: int, sources: list[str], folder: str) -> list[str]:
        """Returns the words that copy files into a folder of the home on a host."""
        return ["scp", "-q", *self._options(), "--", *sources, f"{self.hosts[worker]}:{folder}/"]


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


def last_line(text: str) -> str:
    """Returns what gcloud said last, without its advice on how to log in."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    line = (errors or lines or ["no message"])[-1]
    message = re.search(r'"message":\s*"((?:[^"\\]|\\.)*)"', text)  # an operation's error is printed as JSON
    return f"{line} {message[1]}" if message and line.endswith("{") else line


# What gcloud's errors contain -> what it means and what to do.
GCLOUD_ERRORS = (
    (
        r"no more capacity|ZONE_RESOURCE_POOL_EXHAUSTED|Insufficient reserved capacity|\"code\": 8\b",
        "the zone has no free TPUs of this type now: try later, another zone, or a queued resource (gcloud compute tpus"
        " queued-resources create)",
    ),
    (
        r"(?i)quota (?:limit )?'|quota.{0,40}exceeded|exceeded.{0,40}quota|quota_exceeded",
        "your project's quota of this TPU type is used up or 0 in this zone: see and raise it at"
        " https://console.cloud.google.com/iam-admin/quotas",
    ),
    (
        r"active account|Reauthentication|refreshing your current auth tokens|UNAUTHENTICATED|invalid_grant",
        "gcloud is not logged in: gcloud auth login",
    ),
    (
        r"has not been used in project|SERVICE_DISABLED|is disabled",
        "the Cloud TPU API is not enabled in this project: gcloud services enable tpu.googleapis.com",
    ),
    (
        r"(?:attribute|property) \[(?:core/)?project\]",
        "no project is known: give PROJECT=, or gcloud config set project",
    ),
    (
        r"(?:attribute|property) \[(?:compute/)?zone\]",
        "no zone is known: give ZONE=, or gcloud config set compute/zone",
    ),
    (
        r"PERMISSION_DENIED|Permission denied on",
        "your account may not use TPUs in this project, or the zone's name is wrong: look at the zone, and for the role"
        " TPU Admin at gcloud projects get-iam-policy",
    ),
    (r"INVALID_ARGUMENT|Invalid value", "gcloud rejects one of these values"),
    (r"problem connecting|Unable to find the server|Network is unreachable", "Google's API cannot be reached"),
)


def explain_gcloud(text: str, host: TpuVm) -> str:
    """Returns one sentence about an error of gcloud, with gcloud's own last line."""
    for pattern, sentence in GCLOUD_ERRORS:
        if re.search(pattern, text):
            return f"TPU={host.name}: {sentence} ({last_line(text)})"
    return f"TPU={host.name}: gcloud failed: {last_line(text)}"


# What makes another attempt useless -> what to do. {host} is one worker.
FINAL_SSH_ERRORS = (
    (
        r"Permission denied \(",
        "{host} does not accept your ssh key: if it has a passphrase, is it in the agent (ssh-add)? are you allowed?",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
        "{host} is unknown to ssh or shows another host key than before: log in to it once with ssh and look why; a VM"
        " that was created again has a new key",
    ),
    (r"Could not resolve hostname", "{host} is not a name that ssh can resolve"),
    (r"python3: (?:command )?not found", "{host} has no python3"),
    (r"future feature annotations", "{host} has a python3 that is older than 3.8"),
    (r"No space left on device|Disk quota exceeded", "the disk of {host} is full: remove what is not needed there"),
    (r"gcloud crashed|unrecognized arguments", "gcloud does not understand the command: gcloud components update"),
)


def final_ssh_error(text: str, host: str) -> str:
    """Returns one sentence about an error of ssh or scp after which another attempt is useless, else ""."""
    for pattern, sentence in FINAL_SSH_ERRORS:
        for line in text.splitlines():
            if re.search(pattern, line):
                return f"{sentence.format(host=host)} ({line.strip()})"
    return ""


def why_broken(text: str) -> str:
    """Returns the line in which ssh says why a connection broke; gcloud's own says only that it did."""
    lines = re.findall(r"^(?:ssh: .*|client_loop.*|.*[Cc]onnection .*|nothing heard.*)$", text, re.MULTILINE)
    return lines[-1].strip() if lines else last_line(text)
