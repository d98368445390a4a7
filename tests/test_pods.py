"""tpu/launch on real workers: systemd, sshd and a reboot are real; only gcloud and the TPU are not. See tests/pods.py.

Here is what tests/fake_systemd.py cannot show. Random sequences: `make test-all` runs few; SEQUENCES=300 SEED=1 runs
many.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pods
import pytest
from launch_bed import FOREVER, ROOT, Bed

SEQUENCES = int(os.environ.get("SEQUENCES", 6))
SEED = int(os.environ.get("SEED", time.time()))
# What would take a test long: the time until a silent worker is lost.
SHORTER = (("keeper", "LOST = 40", "LOST = 8"), ("workers", "SILENCE = 60", "SILENCE = 12"))
TRAINING = ("python3\0", "train.py")  # what a trainer's command line has

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(pods.missing()), reason=pods.missing() or "it is there")]


class Containers(Bed):
    """Workers of a pod, all of them idle and empty. Their trainers wait for each other at every step."""

    def __init__(self, pod: pods.Pod, folder: Path) -> None:
        self.pod, self.grace = pod, "6"
        for worker in range(pod.workers):
            pod.network(worker, True)
            if any(self.home(worker).joinpath(name).exists() for name in ("xla-zoo", "fill")):
                pod.wait_reachable(worker)
                clean = "sudo systemctl kill -s KILL xla-zoo; sudo systemctl stop xla-zoo; sudo systemctl reset-failed"
                pod.ssh(worker, f"{clean}; sudo rm -rf /run/xla-zoo ~/xla-zoo ~/fill ~/starts")
        for path in (pod.folder / "shared").iterdir():
            shutil.rmtree(path)
        for name in ("calls", "made-key", *(path.name for path in pod.folder.glob("mishap-*"))):
            (pod.folder / name).unlink(missing_ok=True)
        super().__init__(folder, pod.folder, pod.folder / "shared", pod.workers, ssh=str(pod.bin / "ssh"))
        self.runs, self.launcher = "/shared", folder / "launcher"
        shutil.copytree(ROOT / "tpu/launch", self.launcher / "tpu/launch")
        shutil.copy(ROOT / "errors.py", self.launcher)
        for name, old, new in SHORTER:
            path = self.launcher / f"tpu/launch/{name}.py"
            assert old in path.read_text()
            path.write_text(path.read_text().replace(old, new))

    def heal(self) -> None:
        """Removes all faults, and connects all workers."""
        super().heal()
        for worker in range(self.pod.workers):
            self.pod.network(worker, True)

    def arguments(self, action: str, *flags: str, args: str = "", **own) -> list[str]:
        return super().arguments(action, *flags, args=f"workers={self.tpu['workers']} saving=0.5 {args}".strip(), **own)

    def home(self, worker: int) -> Path:
        return self.pod.path(worker, "/home/me")

    def trainers(self) -> list[int]:
        """The number of trainers on each worker."""
        return [len(self.pod.processes(worker, *TRAINING)) for worker in range(self.tpu["workers"])]

    def idle(self) -> bool:
        """Whether neither a trainer nor anything of a unit is left."""
        units = [self.pod.processes(worker, unit="/xla-zoo.service") for worker in range(self.tpu["workers"])]
        return not any(self.trainers() + units)

    def finish(self, *clients: subprocess.Popen) -> None:
        """Lets the trainers come to their end, and asserts that their clients do."""
        (self.shared / "one/finish").touch()
        assert [self.ended(client)[0] for client in clients] == [0] * len(clients)


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    try:
        pods.root()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"mmdebstrap makes no root file system: {error.stderr.strip().splitlines()[-1]}")
    pod = pods.Pod(tmp_path_factory.mktemp("pod"), 4)
    yield pod
    pod.close()


@pytest.fixture
def bed(pod, tmp_path):
    bed = Containers(pod, tmp_path)
    yield bed
    bed.close()


def test_a_run_on_four_workers_to_its_end(bed):
    """Two launchers at the same time from a fresh home, and a third one later: one run. Then the same command again."""
    clients = [bed.start("train", "--run", "one", args=FOREVER), bed.begin(), bed.begin()]
    viewer = bed.start("logs")
    bed.wait_printed(viewer, "step 30")
    assert bed.trainers() == [1] * 4
    bed.finish(*clients, viewer)
    assert all(client.out.read_text().endswith("end\n") for client in [*clients, viewer])
    assert sum("runs already" in client.err.read_text() for client in clients) == 2
    bed.check_idle(stays=3)
    code, out, _ = bed.run("train", "--run", "one")
    assert code == 0 and out == f"start one at {bed.steps()[0]} with '' and None\nend\n"


def test_stop_ends_all_that_it_reaches(bed):
    """A worker that was not reached is named, and finds that it is alone."""
    client = bed.begin("--retries", "3")
    bed.pod.network(2, False)
    began = time.monotonic()
    err = bed.stop(1)
    assert time.monotonic() < began + 75 and "worker 2: not reached" in err
    # One that stop reaches late has saved already, with its peers.
    assert len(re.findall(r"worker \d: (?:stopped and saved|nothing ran)", err)) == 3, err
    bed.check_idle(30)
    bed.heal()
    assert bed.ended(client)[0] == 143 and "retry" not in bed.log(0)
    bed.stop()
    bed.begin()


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("how", ["shut down", "switched off"])
def test_a_machine_restarts(bed, worker, how):
    """The others end, too. With time to save, all have saved."""
    client = bed.begin("--retries", "2", args="saving=4")
    bed.pod.ssh(worker, "sudo systemctl reboot") if how == "shut down" else bed.pod.cut_power(worker)
    bed.check_idle(60, stays=3)
    # What worker 0 knew of the end is gone with its memory.
    assert bed.ended(client)[0] == (143 if how == "shut down" and worker else 1), client.err.read_text()
    assert bed.saved() or (how == "switched off" and min(bed.steps()) >= max(bed.steps()) - 10)
    bed.begin()


def test_a_full_disk(bed):
    """A run on a full disk is stopped and saves. A start there is an error with its cause; the same command heals."""
    bed.set(workers=2)
    bed.begin("--detach")
    bed.pod.ssh(1, "sudo dd if=/dev/zero of=/home/me/fill bs=1M")
    bed.stop()
    assert bed.saved()
    bed.check_idle(stays=3)
    (bed.project / "more").write_bytes(os.urandom(1 << 20))
    code, _, err = bed.run("train", "--run", "one")
    assert code == 2 and "worker 1" in err and "No space left" in err, err
    bed.check_idle()
    bed.pod.ssh(1, "sudo rm /home/me/fill")
    bed.begin()


def test_hosts_of_ssh_and_a_keeper_that_is_killed(bed):
    """Connections break. systemd kills what the keeper leaves, and the others end, too. Then all are stopped."""
    place = ("--tpu", "ssh:worker-0,worker-1,worker-2,worker-3")
    client = bed.begin(*place)
    assert bed.pod.kill(0, "sshd: me")
    bed.wait(lambda: "connected again" in client.err.read_text())
    assert bed.pod.kill(0, "keeper.py\0keep") == 1
    assert bed.ended(client)[0] == 137
    bed.check_idle(60)
    assert min(bed.steps()) >= max(bed.steps()) - 10
    client = bed.begin(*place)
    bed.stop(0, *place)
    assert bed.ended(client)[0] == 143 and bed.saved()


EARLY = (
    "me@10.7.0.11: Permission denied (publickey).",
    "ssh: Could not resolve hostname tpu: Temporary failure in name resolution",
)
CLOUD = (
    {"message": "HTTPError 503: The service is currently unavailable."},
    {"message": "There was a problem refreshing: ('Connection aborted.', ConnectionResetError(104, 'reset by peer'))"},
    {"out": ""},
)


class Sequence:
    """A random sequence of what users, machines and networks do: each public method is something that can happen."""

    def __init__(self, bed: Containers, seed: str) -> None:
        self._bed, self._pod, self._random = bed, bed.pod, random.Random(seed)
        bed.set(workers=self._random.choice([1, 2, 2, 3, 4]))
        self._best = bed.steps()
        names = [name for name in dir(self) if not name.startswith("_")]
        often = ["start"] * 3 + ["stop"] * 2 + ["start_detached", "kill_client"]
        self._names = ["start", *self._random.choices(names + often, k=8)]

    def _any(self) -> int:
        return self._random.randrange(self._bed.tpu["workers"])

    def _end_starts(self, *but: subprocess.Popen) -> None:
        """Kills the clients that have not started yet, since it would be their right to do so after a stop."""
        for client in self._bed.clients:
            if client not in but and client.poll() is None and " runs" not in client.err.read_text():
                client.kill()

    def start(self) -> None:
        retries = str(self._random.choice([0, 1, 3]))
        self._bed.start("train", "--run", "one", "--retries", retries, args=FOREVER)

    def start_detached(self) -> None:
        self._bed.start("train", "--run", "one", "--detach", args=FOREVER)

    def watch(self) -> None:
        self._bed.start("logs")

    def kill_client(self) -> None:
        self._bed.clients[-1].kill()  # its gcloud and ssh live on

    def interrupt_client(self) -> None:
        client = self._bed.clients[-1]
        self._end_starts(client)
        client.send_signal(signal.SIGINT)
        client.wait(120)
        if "no process of the run is left" in client.err.read_text():
            self._bed.check_idle(stays=3)

    def kill_trainer(self) -> None:
        self._pod.kill(self._any(), *TRAINING)

    def kill_keeper(self) -> None:
        self._pod.kill(self._any(), "keeper.py\0keep")

    def drop_connection(self) -> None:
        self._pod.kill(self._any(), "sshd: me")

    def reboot(self) -> None:
        self._pod.ssh(self._any(), "sudo systemctl reboot", "-oConnectTimeout=1")

    def cut_power(self) -> None:
        self._pod.cut_power(self._any())

    def cut_network(self) -> None:
        """Cuts a worker off, for less or more than the time after which the others take it for lost."""
        worker = self._any()
        self._pod.network(worker, False)
        time.sleep(self._random.choice([1, 4, 12]))
        self._pod.network(worker, True)

    def fill_disk(self) -> None:
        self._pod.ssh(self._any(), "sudo dd if=/dev/zero of=/home/me/fill bs=1M", "-oConnectTimeout=1")

    def delete_file(self) -> None:
        """Deletes, or cuts off, a file of the copy, of the bundles or of the log on a worker."""
        worker = self._any()
        files = sorted(path for path in self._bed.zoo(worker).rglob("*") if path.is_file())
        for path in self._random.sample(files, min(1, len(files))):
            print("    of worker", worker, path.name, flush=True)
            path.unlink() if self._random.random() < 0.5 else os.truncate(path, path.stat().st_size // 2)

    def change_project(self) -> None:
        path = self._bed.project / f"data/deep/{self._random.randrange(3)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink() if path.exists() else path.write_text(str(self._random.random()))

    def cloud_fails(self) -> None:
        self._bed.wrong(verb="describe", **self._random.choice(CLOUD))

    def ssh_fails(self) -> None:
        self._bed.wrong(worker=self._any(), message=self._random.choice(EARLY))

    def stop(self) -> None:
        """After a stop that says so, nothing runs, nothing starts that was on its way, and what was saved is there."""
        self._end_starts()
        code, _, err = self._bed.run("stop")
        print("   ", code, flush=True)
        if code == 0:
            self._bed.check_idle(stays=3)
            for worker in map(int, re.findall(r"worker (\d): stopped and saved", err)):
                assert self._bed.steps()[worker] == self._bed.steps("at-worker")[worker], err

    def _check(self) -> None:
        """Asserts what always holds: one trainer a machine, no step back."""
        assert max(self._bed.trainers()) <= 1 and not list(self._bed.shared.rglob("two-trainers"))
        before, self._best = self._best, self._bed.steps()
        assert all(new >= old for new, old in zip(self._best, before, strict=True)), (self._best, before)

    def _end(self) -> None:
        """Asserts that after all that a stop succeeds, and the same command goes on and comes to its end."""
        self._bed.heal()
        for worker in range(self._bed.tpu["workers"]):
            self._pod.wait_reachable(worker)
            self._pod.ssh(worker, "sudo rm -f /home/me/fill")
        for client in self._bed.clients:
            client.kill()
        self._bed.stop()
        self._bed.check_idle(stays=3)
        self._check()
        self._bed.finish(self._bed.begin())
        self._check()


@pytest.mark.parametrize("number", range(SEQUENCES))
def test_random_sequences(bed, number):
    sequence = Sequence(bed, f"{SEED}-{number}")
    print(f"seed {SEED}-{number}: {bed.tpu['workers']} workers: {' '.join(sequence._names)}", flush=True)
    for name in sequence._names:
        getattr(sequence, name)()
        sequence._check()
        time.sleep(sequence._random.choice([0, 0.5, 1, 3]))
    sequence._end()
