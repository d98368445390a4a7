"""tpu/launch on real workers: systemd, sshd and a reboot are real; only gcloud and the TPU are not.

Here is what tests/fake_systemd.py cannot show, over the workers of tests/pods.py. Of the random
sequences `make test-all` runs few; SEQUENCES=300 SEED=1 runs many.
"""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable

import launch_scenarios as scenarios
import pods
import pytest
from launch_bed import FOREVER, KEEPER, SHELL, TRAINER, one_worker

RESTARTS = "sudo systemctl restart xla-zoo.service"
SEQUENCES = int(os.environ.get("SEQUENCES", 6))
SEED = int(os.environ.get("SEED", time.time()))
FILL = "sudo dd if=/dev/zero of=/home/me/fill bs=1M"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(pods.missing()), reason=pods.missing() or "it is there"),
]


@pytest.fixture
def bed(tmp_path, request):
    try:
        pods.root()
    except subprocess.CalledProcessError as error:
        cause = error.stderr.strip().splitlines()[-1]
        pytest.skip(f"mmdebstrap makes no root file system: {cause}")
    bed = pods.Pod(tmp_path, getattr(request, "param", 2))
    yield bed
    bed.close()


# ---- what tests/test_launch.py has, too --------------------------------------------------------


@one_worker
def test_a_detached_run_is_watched(bed, here):
    scenarios.check_a_detached_run_is_watched(bed, here)


@one_worker
def test_the_same_command_attaches(bed, here):
    scenarios.check_the_same_command_attaches(bed, here)


@one_worker
def test_a_killed_keeper_takes_its_trainer_with_it(bed, here):
    scenarios.check_a_killed_keeper_takes_its_trainer_with_it(bed, here)


def test_launchers_killed_while_they_start_are_one_run(bed):
    scenarios.check_launchers_killed_while_they_start_are_one_run(bed)


def test_launchers_at_once_are_one_run(bed):
    scenarios.check_launchers_at_once_are_one_run(bed)


def test_ssh_hosts_are_a_tpu(bed):
    scenarios.check_ssh_hosts_are_a_tpu(bed)


def test_ssh_hosts_resume(bed):
    scenarios.check_ssh_hosts_resume(bed)


# ---- stops and restarts ------------------------------------------------------------------------


@pytest.mark.parametrize("bed", [3], indirect=True)
def test_stop_ends_all_that_it_reaches(bed):
    """A worker that was not reached is named, and finds that it is alone."""
    client = bed.begin("--retries", "3")
    bed.network(2, "down")
    began = time.monotonic()
    err = bed.stop(1)
    assert time.monotonic() < began + 75
    assert "worker 2: not reached" in err
    # One that stop reaches late has saved already, with its peers.
    reached = re.findall(r"worker \d: (?:stopped and saved|nothing ran)", err)
    assert len(reached) == 2, err

    bed.check_idle(30)
    bed.network(2, "up")
    assert bed.ended(client)[0] == 143
    assert "retry" not in bed.log(0)
    bed.stop()
    bed.begin()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_machine_that_is_shut_down_ends_all_which_save(bed, worker):
    client = bed.begin("--retries", "2", args="saving=4")
    bed.ssh(worker, "sudo systemctl reboot")
    bed.check_idle(60, stays=3)

    # What worker 0 knew of the end is gone with its memory.
    expected = 143 if worker else 1
    assert bed.ended(client)[0] == expected, client.err.read_text()
    assert bed.saved()
    bed.begin()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_machine_that_is_switched_off_ends_all(bed, worker):
    client = bed.begin("--retries", "2", args="saving=4")
    bed.restart(worker)
    bed.check_idle(60, stays=3)

    assert bed.ended(client)[0] == 1, client.err.read_text()
    checkpoints = bed.steps()
    assert bed.saved() or min(checkpoints) >= max(checkpoints) - 10
    bed.begin()


def test_a_restart_of_the_unit_is_a_stop_that_saves(bed):
    """As needrestart does it after an upgrade, where it is not told to leave the unit alone."""
    for worker in range(2):
        bed.ssh(worker, "sudo mkdir -p /etc/needrestart/conf.d")
    client = bed.begin("--retries", "2")
    rule = bed.ssh(1, "cat /etc/needrestart/conf.d/xla-zoo.conf").stdout
    assert r"{override_rc}{qr(^xla-zoo\.service$)} = 0;" in rule

    bed.ssh(1, RESTARTS)
    assert bed.ended(client)[0] == 143
    assert bed.saved()
    bed.check_idle(20)
    for worker in range(2):
        shown = bed.ssh(worker, "systemctl is-failed xla-zoo.service || true").stdout
        assert "failed" not in shown
    bed.begin()


@one_worker
def test_a_signal_to_the_whole_unit_loses_no_save(bed):
    """`systemctl kill` means all processes of a unit, make and its shells among them."""
    client = bed.begin(args="saving=2")
    bed.ssh(0, "sudo systemctl kill xla-zoo.service")
    assert bed.ended(client)[0] == 143
    assert bed.saved()
    bed.check_idle(20)

    client = bed.begin(args="saving=2 unsaveable=1")
    bed.ssh(0, "sudo systemctl kill xla-zoo.service")
    code, _, err = bed.ended(client)
    assert code == 1
    assert "worker 0 did not save: exit code 1" in err


# ---- full disks --------------------------------------------------------------------------------


def test_a_full_disk(bed):
    """A run on a full disk trains on, is stopped and saves.

    A start there is an error with its cause; with room again the same command works.
    """
    bed.begin("--detach")
    bed.ssh(0, FILL)  # where the log is
    steps = min(bed.steps("at-worker"))
    bed.wait(lambda: min(bed.steps("at-worker")) > steps + 20)
    bed.stop()
    assert bed.saved()
    bed.check_idle(stays=3)

    (bed.project / "more").write_bytes(os.urandom(1 << 20))
    code, _, err = bed.run("train", "--run", "one")
    assert code == 2, err
    assert "worker 0" in err, err
    assert "No space left" in err, err
    bed.check_idle()

    bed.ssh(0, "sudo rm /home/me/fill")
    bed.begin()


@one_worker
def test_a_full_run_folder(bed):
    """The end of a run is known, and its variables are gone."""
    client = bed.begin("--env", "SETTING=here")
    blocks = "sudo dd if=/dev/zero of=/run/fill bs=4k"
    last_bytes = "sudo dd if=/dev/zero of=/run/fill2 bs=1"
    assert "No space left" in bed.ssh(0, f"{blocks}; {last_bytes}").stderr

    steps = min(bed.steps("at-worker"))
    bed.wait(lambda: min(bed.steps("at-worker")) > steps + 5)
    err = bed.stop()
    assert bed.ended(client)[0] in (1, 143), err
    assert bed.saved(), err
    assert "unsaved" not in err, err
    assert bed.ssh(0, "sudo sh -c 'cat /run/xla-zoo-*/start.json'").returncode

    bed.ssh(0, "sudo rm /run/fill /run/fill2")
    bed.begin()


# ---- random sequences --------------------------------------------------------------------------


SSH_FAILURES = (
    "me@10.7.0.11: Permission denied (publickey).",
    "ssh: Could not resolve hostname tpu: Temporary failure in name resolution",
)
CLOUD_FAILURES = (
    {"message": "HTTPError 503: The service is currently unavailable."},
    {
        "message": "There was a problem refreshing:"
        " ('Connection aborted.', ConnectionResetError(104, 'reset by peer'))"
    },
    {"out": ""},
)


class Sequence:
    """What users, machines and networks do at random, see EVENTS.

    It asserts what must hold all the time and at the end.
    """

    def __init__(self, bed: pods.Pod, generator: random.Random) -> None:
        self.bed = bed
        self.random = generator
        self.best = bed.steps()  # the checkpoints, which never step back

    def any(self) -> int:
        """Returns one of the workers."""
        return self.random.randrange(self.bed.tpu["workers"])

    def end_starts(self, *but: subprocess.Popen) -> None:
        """Kills the clients that have not started yet, since it would be their right to do so after
        a stop."""
        for client in self.bed.clients:
            if client in but or client.poll() is not None:
                continue
            if " runs" not in client.err.read_text():
                client.kill()

    def interrupt(self) -> None:
        """Presses Ctrl-C in the newest client."""
        client = self.bed.clients[-1]
        self.end_starts(client)
        client.send_signal(signal.SIGINT)
        client.wait(120)
        if "no process of the run is left" in client.err.read_text():
            self.bed.check_idle(stays=3)

    def cut_network(self) -> None:
        """Cuts a worker off, for less or more than the time after which the others take it for
        lost."""
        worker = self.any()
        self.bed.network(worker, "down")
        time.sleep(self.random.choice([1, 4, 12]))
        self.bed.network(worker, "up")

    def delete_file(self) -> None:
        """Deletes, or cuts off, a file of the copy, of the bundles or of the log on a worker."""
        worker = self.any()
        files = sorted(path for path in self.bed.zoo(worker).rglob("*") if path.is_file())
        for path in self.random.sample(files, min(1, len(files))):
            print("    of worker", worker, path.name, flush=True)
            if self.random.random() < 0.5:
                path.unlink()
            else:
                os.truncate(path, path.stat().st_size // 2)

    def change_project(self) -> None:
        """Writes a file of the project, or deletes it if it is there."""
        path = self.bed.project / f"data/deep/{self.random.randrange(3)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.unlink()
        else:
            path.write_text(str(self.random.random()))

    def stop(self) -> None:
        """Stops. After a stop that says so nothing runs, nothing starts that was on its way, and
        what was saved is there."""
        self.end_starts()
        code, _, err = self.bed.run("stop")
        print("   ", code, flush=True)
        if code:
            return

        self.bed.check_idle(stays=3)
        for worker in map(int, re.findall(r"worker (\d): stopped and saved", err)):
            checkpoint_step = self.bed.steps()[worker]
            assert checkpoint_step == self.bed.steps("at-worker")[worker], err

    def check(self) -> None:
        """Asserts what always holds: one trainer per machine, and no step back."""
        assert max(self.bed.trainers()) <= 1
        assert not list(self.bed.shared.rglob("two-trainers"))

        before = self.best
        self.best = self.bed.steps()
        for new, old in zip(self.best, before, strict=True):
            assert new >= old, (self.best, before)

    def end(self) -> None:
        """Asserts that after all that a stop succeeds, and the same command resumes and comes to
        its end."""
        bed = self.bed
        bed.heal()
        for worker in range(bed.tpu["workers"]):
            bed.wait_reachable(worker)
            bed.ssh(worker, "sudo rm -f /home/me/fill")
        for client in bed.clients:
            client.kill()
        bed.stop()
        bed.check_idle(stays=3)
        self.check()

        client = bed.begin()
        (bed.shared / "one/finish").touch()
        assert bed.ended(client)[0] == 0
        self.check()


Event = Callable[[Sequence], object]


def start(*flags: str) -> Event:
    """Returns the event of a client that starts the run `one`."""
    return lambda now: now.bed.start("train", "--run", "one", *flags, args=FOREVER)


def kill(mark: str) -> Event:
    """Returns the event that kills the processes of any worker with this in their command lines."""
    return lambda now: now.bed.kill(now.any(), mark)


def on_a_worker(command: str) -> Event:
    """Returns the event of a command on any worker that can be reached."""
    return lambda now: now.bed.ssh(now.any(), command, "-oConnectTimeout=1")


EVENTS: dict[str, Event] = {
    "start": start(),
    "start with retries": start("--retries", "3"),
    "start detached": start("--detach"),
    "stop": Sequence.stop,
    "watch": lambda now: now.bed.start("logs"),
    "kill the client": lambda now: now.bed.clients[-1].kill(),  # its gcloud and ssh live on
    "interrupt the client": Sequence.interrupt,
    "kill a trainer": kill(TRAINER),
    "kill a shell": kill(SHELL),
    "kill a keeper": kill(KEEPER),
    "drop connections": lambda now: now.bed.drop_connections(now.any()),
    "reboot": on_a_worker("sudo systemctl reboot"),
    "cut the power": lambda now: now.bed.restart(now.any()),
    "restart the unit": on_a_worker(RESTARTS),
    "cut the network": Sequence.cut_network,
    "fill a disk": on_a_worker(FILL),
    "delete a file": Sequence.delete_file,
    "change the project": Sequence.change_project,
    "the cloud fails": lambda now: now.bed.wrong(
        verb="describe", **now.random.choice(CLOUD_FAILURES)
    ),
    "ssh fails": lambda now: now.bed.wrong(
        worker=now.any(), message=now.random.choice(SSH_FAILURES)
    ),
}
OFTEN = ["start", "start with retries", "start detached", "stop", "stop", "kill the client"]
WORKERS = (2, 4, 1, 3)  # of the sequences, in turn


@pytest.mark.parametrize(
    "bed, number",
    [(WORKERS[number % 4], number) for number in range(SEQUENCES)],
    indirect=["bed"],
)
def test_random_sequences(bed, number):
    seed = f"{SEED}-{number}"
    generator = random.Random(seed)
    names = ["start", *generator.choices([*EVENTS, *OFTEN], k=8)]
    print(f"seed {seed}: {bed.tpu['workers']} workers: {', '.join(names)}", flush=True)

    sequence = Sequence(bed, generator)
    for name in names:
        EVENTS[name](sequence)
        sequence.check()
        time.sleep(generator.choice([0, 0.5, 1, 3]))
    sequence.end()
