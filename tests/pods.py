"""Real workers for the launcher's tests: containers with systemd and sshd.

A pod is a process tree in namespaces of its own (processes, mounts, network, cgroups): when its
keeper's standard input ends, as it does however the test ends, nothing of it is left. Each worker
is a systemd-nspawn over one shared root file system, with a disk of 64 MB that outlives a reboot,
the address 10.7.0.1<i>, an account `me` that may use sudo, and /shared, which all have.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch_bed import ROOT, SHELL, TRAINER, Bed, processes, wait, write_programs

PACKAGES = "systemd,systemd-sysv,dbus,sudo,python3,openssh-server,make,procps"
CUSTOMIZE = r"""set -e
useradd --create-home --shell /bin/bash --password "*" me
echo "me ALL=(ALL) NOPASSWD: ALL" >/etc/sudoers.d/me
echo 5b1f6e9c2a7d4c3f8e0a9b8c7d6e5f40 >/etc/machine-id
rm -f /etc/hostname
for worker in 0 1 2 3; do echo 10.7.0.1$worker worker-$worker; done >>/etc/hosts
printf "UsePAM no\nUseDNS no\nMaxStartups 100\n" >/etc/ssh/sshd_config.d/pods.conf
# Nobody logs in at a console, and nothing is done by the clock.
systemctl mask getty.target console-getty.service systemd-logind.service timers.target
install -d -o me -g me -m 700 /home/me/.ssh
ssh-keygen -q -t ed25519 -N "" -f /root/key
install -o me -g me -m 600 /root/key.pub /home/me/.ssh/authorized_keys
"""
# Process 1 of the pod. $1: its folder, $2: number of workers, $3: the root file system.
INIT = r"""set -e
read pid rest </proc/self/stat
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/netns
ip link set lo up
ip link add bridge type bridge
ip address add 10.7.0.1/24 dev bridge
ip link set bridge up
worker=0
while [ $worker -lt $2 ]; do
    disk=$1/worker-$worker
    mkdir -p $disk /sys/fs/cgroup/worker-$worker
    mount -t tmpfs -o size=64m tmpfs $disk
    mkdir $disk/upper $disk/work $disk/root
    mount -t overlay -o lowerdir=$3,upperdir=$disk/upper,workdir=$disk/work overlay $disk/root
    ip netns add worker-$worker
    ip link add worker-$worker type veth peer name host0 netns worker-$worker
    ip link set worker-$worker master bridge up
    ip -n worker-$worker address add 10.7.0.1$worker/24 dev host0
    ip -n worker-$worker link set host0 up
    ip -n worker-$worker link set lo up
    (echo 0 >/sys/fs/cgroup/worker-$worker/cgroup.procs
    while :; do
        systemd-nspawn --quiet --boot --register=no --keep-unit --console=pipe \
            --machine=worker-$worker --network-namespace-path=/run/netns/worker-$worker \
            --directory=$disk/root --bind=$1/shared:/shared ||
            sleep 0.2
    done) </dev/null >>$1/console-$worker 2>&1 &
    worker=$((worker + 1))
done
echo $pid >$1/pid.new
mv $1/pid.new $1/pid
while :; do wait || sleep 1; done
"""
# Outlives a test that is killed, and cleans up. $1: the pod's cgroup, $2…: the command of its
# process 1.
KEEPER = r"""group=$1; shift
mkdir $group
(echo 0 >$group/cgroup.procs
exec unshare --mount --net --pid --cgroup --fork --kill-child "$@" </dev/null) &
cat >/dev/null
kill -KILL $!
wait
while [ -e $group ]; do find $group -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1; done
"""


@dataclass(frozen=True)
class Shorter:
    """A time of the launcher, in seconds, that is shortened since a test would wait for it."""

    module: str  # of tpu/launch
    old: str
    new: str


# The time until a silent worker is lost.
SHORTER = (
    Shorter("keeper", old="LOST = 40", new="LOST = 8"),
    Shorter("workers", old="SILENCE = 60", new="SILENCE = 12"),
)


def missing() -> str:
    """Returns what keeps a pod from being made here, or ""."""
    if os.geteuid():
        return "needs root, for containers"
    programs = ("systemd-nspawn", "mmdebstrap", "ip", "unshare", "nsenter", "ssh")
    lacking = ", ".join(name for name in programs if not shutil.which(name))
    if not lacking:
        return ""
    packages = "systemd-container mmdebstrap iproute2 openssh-client"
    return f"needs {lacking}: on Debian, apt-get install {packages}"


def root() -> Path:
    """Returns the root file system.

    It is made once (two minutes, and a Debian mirror) and then kept outside of the repository.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", "/var/tmp"), "xla-zoo-pods")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fingerprint = hashlib.sha256((PACKAGES + CUSTOMIZE).encode()).hexdigest()[:12]
    made = folder / fingerprint

    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            new = folder / "new"
            shutil.rmtree(new, ignore_errors=True)
            include = f"--include={PACKAGES}"
            hook = f"--customize-hook=chroot \"$1\" sh -c '{CUSTOMIZE}'"
            command = ["mmdebstrap", "--variant=minbase", include, hook, "bookworm", str(new)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            new.rename(made)
    return made


class Pod(Bed):
    """Workers that are containers. Their trainers wait for each other at every step."""

    grace = "6"

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__(folder, workers)
        self.runs = "/shared"
        self.options = f"workers={workers} saving=0.5"
        self.shared.chmod(0o777)
        self.shorten()
        self.boot()

        self.enter = f"{shutil.which('nsenter')} --net=/proc/{self.pid}/ns/net"
        self.configure_ssh()
        for worker in range(workers):
            self.wait_reachable(worker)

    def shorten(self) -> None:
        """Gives the tests a launcher that takes a silent worker for lost sooner."""
        self.launcher = self.folder / "launcher"
        shutil.copytree(ROOT / "tpu/launch", self.launcher / "tpu/launch")
        shutil.copy(ROOT / "errors.py", self.launcher)
        for time_limit in SHORTER:
            path = self.launcher / f"tpu/launch/{time_limit.module}.py"
            text = path.read_text()
            assert time_limit.old in text
            path.write_text(text.replace(time_limit.old, time_limit.new))

    def boot(self) -> None:
        """Starts the pod and its keeper, and waits for its process 1."""
        folder = self.folder
        lower = root()
        shutil.copy(lower / "root/key", folder / "key")

        self.cgroup = f"xla-zoo-pod-{os.getpid()}-{time.monotonic_ns()}"
        cgroups = Path("/sys/fs/cgroup/unified")
        if not cgroups.exists():
            cgroups = Path("/sys/fs/cgroup")
        init = ["sh", "-c", INIT, "init", str(folder), str(self.tpu["workers"]), str(lower)]
        command = ["sh", "-c", KEEPER, "keeper", f"{cgroups}/{self.cgroup}", *init]
        output = (folder / "keeper").open("w")
        self.keeper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
        )
        self.wait(lambda: (folder / "pid").exists())
        self.pid = int((folder / "pid").read_text())

    def configure_ssh(self) -> None:
        """Makes an `ssh` that reaches the workers by their names, in the pod's network."""
        config = self.folder / "ssh_config"
        lines = []
        for worker in range(self.tpu["workers"]):
            lines += [f"Host worker-{worker}", f" HostName 10.7.0.1{worker}"]
        lines += [
            "Host *",
            f" IdentityFile {self.folder}/key",
            " User me",
            " StrictHostKeyChecking no",
            " UserKnownHostsFile /dev/null",
            " LogLevel ERROR",
        ]
        config.write_text("\n".join(lines) + "\n")
        write_programs(self.bin, ssh=f"exec {self.enter} {shutil.which('ssh')} -F {config}")

    def wait(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds; fails at once if the pod has ended."""
        wait(lambda: self.keeper.poll() is not None or condition(), 60)
        assert self.keeper.poll() is None, (self.folder / "keeper").read_text()

    def wait_reachable(self, worker: int) -> None:
        """Waits until ssh reaches a worker."""

        def reachable() -> bool:
            return self.ssh(worker, "true", "-oConnectTimeout=2").returncode == 0

        self.wait(reachable)

    def ssh(self, worker: int, command: str, *options: str) -> subprocess.CompletedProcess:
        """Runs a command on a worker, past all faults but those of the network."""
        words = [str(self.bin / "ssh"), *options, f"worker-{worker}", command]
        return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def home(self, worker: int) -> Path:
        """Returns a worker's home, on its disk, also while the worker is down."""
        disk = f"{self.folder}/worker-{worker}/root"
        return Path(f"/proc/{self.pid}/root{disk}/home/me")

    def processes(self, worker: int, *words: str) -> list[int]:
        return processes(f"/{self.cgroup}/worker-{worker}/", *words, file="cgroup")

    def trainers(self) -> list[int]:
        """Returns the number of trainers on each worker."""
        found = []
        for worker in range(self.tpu["workers"]):
            # In one look: of two, a trainer that starts between them would be counted with its
            # shell.
            group = f"/{self.cgroup}/worker-{worker}/"
            trainers = processes(group, TRAINER, without=re.escape(SHELL), file="cgroup")
            found.append(len(trainers))
        return found

    def idle(self) -> bool:
        """Returns whether neither a trainer nor anything of a unit is left."""
        ours = set(processes(f"/{self.cgroup}/", file="cgroup"))
        in_units = set(processes("/xla-zoo.service", file="cgroup"))
        return not any(self.trainers()) and not ours & in_units

    def drop_connections(self, worker: int) -> None:
        self.kill(worker, "sshd: me")

    def restart(self, worker: int) -> None:
        self.kill(worker, "/systemd/systemd\0")

    def network(self, worker: int, state: str) -> None:
        """Cuts a worker off, or connects it.

        state: "down", where packets get lost and neither side is told, or "up"
        """
        command = [*self.enter.split(), "ip", "link", "set", f"worker-{worker}", state]
        subprocess.run(command, check=True)

    def close(self) -> None:
        """Ends everything."""
        super().close()
        self.keeper.stdin.close()
        self.keeper.wait()
