"""tpu/launch on real workers: systemd, sshd and a reboot are real; only gcloud and the TPU are not. See tests/pods.py.

What is trained is a Makefile and a script that takes a lock as a chip would, waits for its peers at every step as a
collective does, and saves on SIGTERM. Random sequences: `make test-all` runs few; SEQUENCES=300 SEED=1 runs many.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pods
import pytest

ROOT = Path(__file__).parent.parent
SEQUENCES = int(os.environ.get("SEQUENCES", 6))
SEED = int(os.environ.get("SEED", time.time()))
# What would take a test long: the time until a silent worker is lost.
SHORTER = (("keeper", "LOST = 40", "LOST = 8"), ("workers", "SILENCE = 60", "SILENCE = 12"))

TRAINING = ("python3\0", "train.py")  # what a trainer's command line has

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(pods.missing()), reason=pods.missing() or "it is there")]

MAKEFILE = 'train:\n\t@python3 -I -S train.py "$(NAME)" $(ARGS)\n'
TRAINER = r"""
import contextlib, fcntl, os, pathlib, signal, sys, time
name, *arguments = sys.argv[1:]
options = dict(argument.lstrip("-").split("=") for argument in arguments)
me, began = os.uname().nodename, time.time()
folder = pathlib.Path(options["runs"], name)
folder.mkdir(parents=True, exist_ok=True)
peers = [folder / f"at-worker-{number}" for number in range(int(options["workers"]))]
def say(*words):
    with contextlib.suppress(OSError):  # the disk may be full
        print(*words, flush=True)
def write(path, value):
    path.with_suffix(".new-" + me).write_text(str(value))
    path.with_suffix(".new-" + me).rename(path)
def finished():
    return (folder / "finish").exists()
def leaving():  # the workers agree on the last step
    with contextlib.suppress(FileNotFoundError):
        return (folder / "leaving").stat().st_mtime > began
chip = open("/tmp/chip", "w")
try:
    fcntl.flock(chip, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (folder / "two-trainers").touch()
    sys.exit("The TPU is already in use by process with pid 1")
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
checkpoint = folder / me
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
say("start at", step)
while not finished():
    step += 1
    write(folder / f"at-{me}", step)
    say("step", step)
    time.sleep(0.05)
    if stopped:
        write(folder / "leaving", step)
    while not leaving() and not finished() and any(not at.exists() or int(at.read_text()) < step - 1 for at in peers):
        time.sleep(0.05)  # in a collective: a signal's handler does not run there
    if leaving():
        time.sleep(float(options.get("saving", 0.5)))
        write(checkpoint, step)
        say("saved")
        sys.exit(143)
    if step % 10 == 0:
        write(checkpoint, step)
    if options.get("fails") == me and step == 25:
        sys.exit(int(options.get("code", 3)))
write(checkpoint, step)
say("end")
"""


class Trial:
    """A project, the launcher's command line, and the workers of a pod that it uses."""

    def __init__(self, pod: pods.Pod, folder: Path) -> None:
        self.pod, self.folder, self.home = pod, folder, folder / "home"
        self.project, self.launcher, self.shared = folder / "project", folder / "launcher", pod.folder / "shared"
        for path in (self.project / "data/deep", self.home, self.launcher):
            path.mkdir(parents=True)
        shutil.copytree(ROOT / "tpu/launch", self.launcher / "tpu/launch")
        shutil.copy(ROOT / "errors.py", self.launcher)
        for name, old, new in SHORTER:
            path = self.launcher / f"tpu/launch/{name}.py"
            assert old in path.read_text()
            path.write_text(path.read_text().replace(old, new))
        files = {"Makefile": MAKEFILE, "train.py": TRAINER, ".gitignore": "runs/\n", "data/deep/a": "a", "data/b": "b"}
        for name, text in files.items():
            (self.project / name).write_text(text)
        subprocess.run(["git", "init", "-q"], cwd=self.project, check=True)
        self.clients: list[subprocess.Popen] = []
        self.use(pod.workers)

    def use(self, workers: int) -> None:
        """Makes the TPU one of so many workers, all of them idle and empty."""
        self.workers = range(workers)
        self.pod.heal()
        for worker in range(self.pod.workers):
            if any(self.pod.path(worker, f"/home/me/{name}").exists() for name in ("xla-zoo", "fill")):
                self.pod.wait_reachable(worker)
                clean = "sudo systemctl kill -s KILL xla-zoo; sudo systemctl stop xla-zoo; sudo systemctl reset-failed"
                self.pod.ssh(worker, f"{clean}; sudo rm -rf /run/xla-zoo ~/xla-zoo ~/fill")
        for path in self.shared.iterdir():
            shutil.rmtree(path)
        self.pod.tpu(workers=workers, state="READY", health="HEALTHY")

    def start(self, action: str, *flags: str, args: str = "", tpu: str = "") -> subprocess.Popen:
        """Starts the launcher. Returns the process; its output is in the files `out` and `err`."""
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-S", "-m", "tpu.launch", action]
        command += ["--lost-after", "25"]
        command += ["--tpu", tpu] if tpu else ["--tpu", "my-tpu", "--zone", "us-east5-b"]
        words = [f"ARGS=--runs=/shared workers={len(self.workers)} {args}".strip()]
        command += ["--grace", "6"] if action == "train" else []
        command += [*flags, *(["--run", "one", "--", "MODEL=tiny", *words] if action == "train" else [])]
        environment = {"PATH": f"{self.pod.bin}:/usr/bin:/bin", "HOME": str(self.home), "PYTHONPATH": self.launcher}
        out, err = (self.folder / f"{name}-{len(self.clients)}" for name in ("out", "err"))
        with out.open("w") as stdout, err.open("w") as stderr:
            pipes = {"stdout": stdout, "stderr": stderr, "start_new_session": True}
            process = subprocess.Popen(command, cwd=self.project, env=environment, **pipes)
        process.out, process.err = out, err
        self.clients.append(process)
        return process

    def run(self, *arguments: str, **options: str) -> tuple[int, str, str]:
        """Runs the launcher to its end: exit code, standard output, standard error."""
        process = self.start(*arguments, **options)
        code, err = process.wait(120), process.err.read_text()
        assert "Traceback" not in err, err
        return code, process.out.read_text(), err

    def stop(self, code: int = 0, *flags: str) -> str:
        """Stops, and asserts the exit code. Returns standard error."""
        found, _, err = self.run("stop", *flags)
        assert found == code, err
        return err

    def trainers(self) -> list[int]:
        """The number of trainers on each worker."""
        return [len(self.pod.processes(worker, *TRAINING)) for worker in self.workers]

    def idle(self) -> bool:
        """Whether neither a trainer nor anything of a unit is left."""
        units = [self.pod.processes(worker, unit="/xla-zoo.service") for worker in self.workers]
        return not any(self.trainers()) and not any(units)

    def steps(self, name: str = "worker") -> list[int]:
        """The checkpoint of each worker, 0 if it has none; name="at-worker": the steps that are done."""
        paths = [self.shared / f"one/{name}-{worker}" for worker in self.workers]
        return [int(path.read_text()) if path.exists() else 0 for path in paths]

    def saved(self) -> bool:
        """Whether all checkpoints are those of the last step."""
        return self.steps() == self.steps("at-worker")

    def log(self, worker: int) -> str:
        """The log on a worker."""
        return self.pod.path(worker, f"/home/me/xla-zoo/worker-{worker}/jobs/one/log").read_text()

    def wait_training(self) -> None:
        """Waits until all workers train, and have done some steps."""
        goal = max(self.steps("at-worker")) + 3
        self.pod.wait(lambda: set(self.trainers()) == {1} and min(self.steps("at-worker")) > goal)

    def begin(self, *flags: str, **options: str) -> subprocess.Popen:
        """Starts a run, and returns its client when all workers train."""
        client = self.start("train", *flags, **options)
        self.wait_training()
        return client

    def finish(self, *clients: subprocess.Popen) -> None:
        """Lets the trainers come to their end, and asserts that their clients do."""
        (self.shared / "one/finish").touch()
        for client in clients:
            assert client.wait(60) == 0, client.err.read_text()

    def check_idle(self, seconds: float = 0) -> None:
        """Asserts that all is idle, at the latest after some seconds, and stays so."""
        self.pod.wait(self.idle, seconds)
        time.sleep(3)
        assert self.idle() and not (self.shared / "one/two-trainers").exists()

    def close(self) -> None:
        """Ends the clients, also those that were killed and left a gcloud behind."""
        for client in self.clients:
            client.kill()
            client.wait()
        self.pod.end_calls()


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
def trial(pod, tmp_path):
    trial = Trial(pod, tmp_path)
    yield trial
    trial.close()


def test_a_run_on_four_workers_to_its_end(trial):
    """Two launchers at the same time from a fresh home, and a third one later: one run. Then the same command again."""
    clients = [trial.start("train"), trial.start("train")]
    trial.wait_training()
    clients.append(trial.start("train"))
    viewer = trial.start("logs")
    trial.pod.wait(lambda: "step 30" in viewer.out.read_text())
    assert trial.trainers() == [1] * 4
    trial.finish(*clients, viewer)
    assert all(client.out.read_text().endswith("end\n") for client in [*clients, viewer])
    assert sum("runs already" in client.err.read_text() for client in clients) == 2
    trial.check_idle()
    code, out, _ = trial.run("train")
    assert code == 0 and out == f"start at {trial.steps()[0]}\nend\n"


@pytest.mark.parametrize("how", ["unreachable", "hangs", "drops", "maintenance"])
def test_stop_ends_all_that_it_reaches(trial, how):
    """Whatever one worker or the cloud's health word says. A worker that was not reached is named."""
    client = trial.begin("--retries", "3")
    if how == "unreachable":
        trial.pod.network(2, False)
    elif how == "maintenance":
        trial.pod.tpu(health="UNHEALTHY_MAINTENANCE")
    else:
        trial.pod.fault("ssh", 2, **({"hang": 1000} if how == "hangs" else {"bytes": 0}))
    missed = how != "maintenance"
    began = time.monotonic()
    err = trial.stop(missed)
    assert time.monotonic() < began + 75 and ("worker 2: not reached" in err) == missed
    # One that stop reaches late has saved already, with its peers.
    assert len(re.findall(r"worker \d: (?:stopped and saved|nothing ran)", err)) == 4 - missed, err
    trial.pod.wait(trial.idle, 30)  # worker 2 follows the owner, or finds that it is alone
    trial.pod.heal()
    trial.pod.tpu(health="HEALTHY")
    assert client.wait(60) == 143, client.err.read_text()
    assert "retry" not in trial.log(0) and (trial.saved() or how == "unreachable")
    trial.stop()
    trial.begin()


def test_stop_reaches_one_worker_before_the_others(trial):
    """Its peers leave with it. A checkpoint that takes long is waited for, as the start and not the stop has asked."""
    client = trial.begin("--retries", "3", "--grace", "30", args="saving=12")
    for worker in (0, 1, 3):
        trial.pod.fault("ssh", worker, hang=2, match=" stop ")
    trial.stop()
    assert client.wait(30) == 143
    trial.check_idle()
    assert trial.saved() and "retry" not in trial.log(0)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_machine_that_shuts_down_saves(trial, worker):
    trial.begin(args="saving=4")
    trial.pod.ssh(worker, "sudo systemctl reboot")
    trial.check_idle(60)
    assert trial.saved()
    trial.begin()


def test_a_viewer_that_cannot_reach_a_worker_changes_nothing(trial):
    trial.begin("--detach")
    for worker in (0, 1):
        trial.pod.fault("ssh", worker, refuse="ssh: connect to host: Connection timed out")
    viewer = trial.start("logs")
    time.sleep(35)  # more than --lost-after
    assert viewer.poll() is None and trial.trainers() == [1] * 4
    trial.pod.heal()
    trial.pod.wait(lambda: "step" in viewer.out.read_text())
    trial.stop()


def test_a_start_on_its_way_is_overtaken_by_a_stop(trial):
    """Its client is killed, its connections are not."""
    for worker in trial.workers:
        trial.pod.fault("ssh", worker, hang=8, match=" start ")
    client = trial.start("train")
    trial.pod.wait(lambda: " start " in (trial.pod.folder / "calls").read_text())
    client.kill()
    trial.stop()
    time.sleep(10)
    trial.check_idle()
    trial.pod.heal()
    trial.begin()


def test_a_stop_while_the_files_are_unpacked(trial):
    """The worker is at it, and slow, when the client is killed and the stop comes: then nothing starts."""
    trial.use(1)
    for number in range(3000):
        (trial.project / f"data/{number}").write_text(str(number))
    client = trial.start("train")
    tree = trial.pod.path(0, "/home/me/xla-zoo/worker-0/tree/data")
    trial.pod.wait(lambda: tree.exists() and len(os.listdir(tree)) > 50)
    assert trial.pod.kill(0, "-uc\0", "start\0", number=signal.SIGSTOP)
    client.kill()
    stop = trial.start("stop")
    with contextlib.suppress(subprocess.TimeoutExpired):
        stop.wait(6)
    trial.pod.kill(0, "-uc\0", "start\0", number=signal.SIGCONT)
    assert stop.wait(60) == 0
    trial.check_idle()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_connection_that_stalls_before_the_input_starts_nothing_twice(trial, worker):
    trial.use(2)
    for match in (" receive ", " start "):
        trial.pod.fault("ssh", worker, stall=4, match=match, once=True)
        client = trial.begin()
        trial.stop()
        assert client.wait(30) == 143
    trial.check_idle()


def test_a_full_disk_and_a_damaged_bundle(trial):
    """A run on a full disk is stopped and saves. A start there is an error with its cause; the same command heals."""
    trial.use(2)
    trial.begin("--detach")
    trial.pod.ssh(1, "sudo dd if=/dev/zero of=/home/me/fill bs=1M")
    trial.stop()
    assert trial.saved()
    trial.check_idle()
    (trial.project / "more").write_bytes(os.urandom(1 << 20))
    code, _, err = trial.run("train")
    assert code == 2 and "worker 1" in err and "No space left" in err, err
    trial.check_idle()
    trial.pod.ssh(1, "sudo rm /home/me/fill")
    for path in trial.pod.path(1, "/home/me/xla-zoo/worker-1/bundles").iterdir():
        os.truncate(path, path.stat().st_size // 2)
    trial.begin()


def test_the_log_is_removed_while_the_run_is_alive(trial):
    trial.use(2)
    client = trial.begin()
    for worker in trial.workers:
        trial.pod.path(worker, f"/home/me/xla-zoo/worker-{worker}/jobs/one/log").unlink()
    trial.wait_training()
    trial.stop()
    assert trial.saved() and client.wait(30) == 143, client.err.read_text()
    trial.finish(trial.begin())


def test_hosts_of_ssh_have_one_run_each(trial):
    trial.use(2)
    client = trial.begin(tpu="ssh:worker-0,worker-1")
    code, _, err = trial.run("train", tpu="ssh:worker-1")
    assert code == 2 and "worker-1" in err and trial.trainers() == [1, 1], err
    assert trial.run("stop", tpu="ssh:worker-1,worker-0")[0] == 0 and client.wait(30) == 143
    trial.check_idle()
    trial.pod.ssh(1, "sudo mv /usr/bin/systemd-run /usr/bin/systemctl /root")
    code, _, err = trial.run("train", tpu="ssh:worker-1")
    trial.pod.ssh(1, "sudo mv /root/systemd-run /root/systemctl /usr/bin")
    assert code == 2 and "systemd" in err and len(err.splitlines()) < 6, err


def test_the_keeper_is_killed(trial):
    """systemd kills what it leaves, and the others end, too."""
    client = trial.begin()
    assert trial.pod.kill(0, "keeper.py\0keep") == 1
    assert client.wait(30) == 137, client.err.read_text()
    trial.check_idle(60)
    assert min(trial.steps()) >= max(trial.steps()) - 10
    trial.begin()


@pytest.mark.parametrize("client", ["detached", "dead", "there"])
def test_the_workers_end_together_when_one_fails(trial, client):
    """Within a minute and without a client, which finds the exit code later; the checkpoint is kept."""
    process = trial.start("train", *["--detach"] * (client == "detached"), args="fails=worker-2 code=7")
    trial.pod.wait(lambda: all(trial.trainers()))
    if client == "dead":
        process.kill()
    trial.pod.wait(lambda: max(trial.steps("at-worker")) >= 25)
    trial.check_idle(60)
    assert min(trial.steps()) >= 20 and (client != "there" or process.wait(10) == 7)
    code, out, err = trial.run("logs")
    assert code == 7 and "worker 2 failed with exit code 7" in out + err


def test_retries_survive_the_client(trial):
    trial.begin("--retries", "2").kill()
    for _ in range(2):
        before = min(trial.steps())
        trial.pod.kill(3, *TRAINING)
        trial.pod.wait(lambda: trial.trainers()[3] == 1)
        trial.wait_training()
        assert int(re.findall(r"start at (\d+)", trial.log(3))[-1]) >= before
    trial.pod.kill(3, *TRAINING)
    trial.check_idle(60)
    assert trial.run("logs")[0] == 137


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_is_switched_off_and_on(trial, worker):
    client = trial.begin("--retries", "2")
    trial.pod.cut_power(worker)
    trial.check_idle(60)
    assert client.wait(60) == 1 and min(trial.steps()) >= max(trial.steps()) - 10
    trial.begin()


EARLY = (
    "me@10.7.0.11: Permission denied (publickey).",
    "ssh: Could not resolve hostname tpu: Temporary failure in name resolution",
)
QUOTA = "Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute' of service 'tpu'"
CLOUD = (
    {"refuse": "HTTPError 503: The service is currently unavailable."},
    {"refuse": f"RESOURCE_EXHAUSTED: {QUOTA}"},
    {"refuse": "There was a problem refreshing: ('Connection aborted.', ConnectionResetError(104, 'reset by peer'))"},
    {"say": ""},
    {"say": "<html><body>502 Bad Gateway</body></html>"},
)


class Sequence:
    """A random sequence of what users, machines and networks do: each public method is something that can happen."""

    def __init__(self, trial: Trial, seed: str) -> None:
        self._trial, self._pod, self._random = trial, trial.pod, random.Random(seed)
        trial.use(self._random.choice([1, 2, 2, 3, 4]))
        self._best = trial.steps()
        names = [name for name in dir(self) if not name.startswith("_")]
        often = ["start"] * 3 + ["stop"] * 2 + ["start_detached", "kill_client"]
        self._names = ["start", *self._random.choices(names + often, k=8)]

    def _any(self) -> int:
        return self._random.choice(self._trial.workers)

    def _end_starts(self, *but: subprocess.Popen) -> None:
        """Kills the clients that have not started yet, since it would be their right to do so after a stop."""
        for client in self._trial.clients:
            if client not in but and client.poll() is None and " runs" not in client.err.read_text():
                client.kill()

    def start(self) -> None:
        self._trial.start("train", "--retries", str(self._random.choice([0, 1, 3])))

    def start_detached(self) -> None:
        self._trial.start("train", "--detach")

    def watch(self) -> None:
        self._trial.start("logs")

    def kill_client(self) -> None:
        self._trial.clients[-1].kill()  # its gcloud and ssh live on

    def interrupt_client(self) -> None:
        client = self._trial.clients[-1]
        self._end_starts(client)
        client.send_signal(signal.SIGINT)
        client.wait(120)
        if "no process of the run is left" in client.err.read_text():
            self._trial.check_idle()

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
        files = sorted(path for path in self._pod.path(worker, "/home/me/xla-zoo").rglob("*") if path.is_file())
        for path in self._random.sample(files, min(1, len(files))):
            print("    of worker", worker, path.name, flush=True)
            path.unlink() if self._random.random() < 0.5 else os.truncate(path, path.stat().st_size // 2)

    def change_project(self) -> None:
        path = self._trial.project / f"data/deep/{self._random.randrange(3)}"
        path.unlink() if path.exists() else path.write_text(str(self._random.random()))

    def cloud_fails(self) -> None:
        self._pod.fault("describe", once=True, **self._random.choice(CLOUD))

    def ssh_fails(self) -> None:
        self._pod.fault("ssh", self._any(), once=True, refuse=self._random.choice(EARLY))

    def stop(self) -> None:
        """After a stop that says so, nothing runs, nothing starts that was on its way, and what was saved is there."""
        self._end_starts()
        code, _, err = self._trial.run("stop")
        print("   ", code, flush=True)
        if code == 0:
            self._trial.check_idle()
            for worker in map(int, re.findall(r"worker (\d): stopped and saved", err)):
                assert self._trial.steps()[worker] == self._trial.steps("at-worker")[worker], err

    def _check(self) -> None:
        """Asserts what always holds: one trainer a machine, no step back."""
        assert max(self._trial.trainers()) <= 1 and not (self._trial.shared / "one/two-trainers").exists()
        before, self._best = self._best, self._trial.steps()
        assert all(new >= old for new, old in zip(self._best, before, strict=True)), (self._best, before)

    def _end(self) -> None:
        """Asserts that after all that a stop succeeds, and the same command goes on and comes to its end."""
        self._pod.heal()
        for worker in self._trial.workers:
            self._pod.wait_reachable(worker)
            self._pod.ssh(worker, "sudo rm -f /home/me/fill")
        for client in self._trial.clients:
            client.kill()
        self._trial.stop()
        self._trial.check_idle()
        self._check()
        self._trial.finish(self._trial.begin())
        self._check()


@pytest.mark.parametrize("number", range(SEQUENCES))
def test_random_sequences(trial, number):
    sequence = Sequence(trial, f"{SEED}-{number}")
    print(f"seed {SEED}-{number}: {len(trial.workers)} workers: {' '.join(sequence._names)}", flush=True)
    for name in sequence._names:
        getattr(sequence, name)()
        sequence._check()
        time.sleep(sequence._random.choice([0, 0.5, 1, 3]))
    sequence._end()
