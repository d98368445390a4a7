"""What users do with the launcher: run on processes (tests/test_launch.py) and on real workers
(tests/test_pods.py)."""

import re
import time
from collections.abc import Callable

from launch_bed import FOREVER, KEEPER, Bed, wait

Here = Callable[..., tuple[int, str, str]]  # the fixture `here`


def check_a_detached_run_is_watched(bed: Bed, here: Here) -> None:
    """One worker: --detach, status, logs, and `make logs | head`."""
    args = f"{FOREVER} kind=0"
    code, _, err = bed.run("train", "--run", "one", "--detach", args=args)
    assert code == 0
    assert "make logs TPU=my-tpu ZONE=us-east5-b" in err

    status = here("status")[1]
    assert re.search(rf"runs one \(MODEL=tiny 'ARGS=--runs={bed.runs} .*{args}'\), since", status)

    viewer = bed.start("logs")
    wait(lambda: "step 2\n" in viewer.out.read_text())
    assert viewer.out.read_text().startswith("start one at 0")
    assert "one continues" in bed.interrupt(viewer)
    assert not bed.idle()

    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    head = bed.start("logs", pipe=True, env=ascii_only)
    head.stdout.readline()
    head.stdout.close()
    assert head.wait(20) == 0
    assert "Traceback" not in head.err.read_text()

    bed.stop()


def check_the_same_command_attaches(bed: Bed, here: Here) -> None:
    """One worker: a second client attaches, another run is refused, and stop ends only what it
    names."""
    args = f"{FOREVER} kind=0"
    assert bed.run("train", "--run", "one", "--detach", args=args)[0] == 0
    client = bed.start("train", args=args)

    other_runs = [
        (["--detach"], "steps=5"),
        (["--detach", "--run", "two"], args),
    ]
    for flags, other_args in other_runs:
        code, _, err = here("train", *flags, args=other_args)
        assert code == 2
        assert "my-tpu is busy: one (MODEL=tiny" in err

    wait(lambda: "step 9\n" in client.out.read_text())
    # Nothing more is seen of it; the run and its end do not need it.
    (bed.zoo(0) / "jobs/one/log").unlink()

    code, _, err = here("stop", "--run", "two")
    assert code == 1
    assert "left alone, since RUN=two does not run there, but one" in err

    assert here("stop")[0] == 0
    code, _, err = bed.ended(client)
    assert code == 143
    assert "runs already; attaching to it" in err

    assert bed.starts() == [1]
    assert bed.idle()
    assert bed.saved()
    assert bed.run("logs")[0] == 143
    assert "one exit code 143" in here("status")[1]


def check_a_killed_keeper_takes_its_trainer_with_it(bed: Bed, here: Here) -> None:
    """One worker; its restart forgets the run."""
    bed.begin("--detach")
    assert bed.kill(0, KEEPER) == 1
    wait(bed.idle)

    code, out, err = here("logs")
    assert code == 137
    assert "the run ended with exit code 137 (signal)" in err
    assert "start one at" in out

    bed.restart(0)
    code, _, err = here("logs", "--run", "one")
    assert code == 2
    assert "does not know of RUN=one" in err


def check_launchers_killed_while_they_start_are_one_run(bed: Bed) -> None:
    """The run continues or has not begun; the next launcher attaches to it. There are never two
    trainers, which `bed` checks at its end."""
    for seconds in (0.2, 0.6, 1.3):
        client = bed.start("train", "--run", "one", args=FOREVER)
        time.sleep(seconds)
        client.kill()
        assert max(bed.starts()) <= 1, seconds
    bed.stop()


def check_launchers_at_once_are_one_run(bed: Bed) -> None:
    """One overtakes the other, whose run it begins."""
    before = bed.starts()
    overtaken = bed.wrong(match=" start ", late=4)
    first = bed.start("train", args=FOREVER)  # names no run, and attaches to the other's
    wait(overtaken.exists)
    second = bed.start("train", "--run", "one", args=FOREVER)

    def both_see_it() -> bool:
        if min(bed.starts()) <= max(before):
            return False
        return all("step" in client.out.read_text() for client in (first, second))

    wait(both_see_it)
    err = bed.interrupt(first)
    assert bed.starts() == [count + 1 for count in before]
    assert err.count("stopped and saved") == 2
    assert "runs already" in err
    assert bed.ended(second)[0] == 143
    assert bed.idle()  # what it asked the workers has ended, too


SSH_HOSTS = ("--tpu", "ssh:worker-0,worker-1")


def check_ssh_hosts_are_a_tpu(bed: Bed) -> None:
    """A connection that breaks, a run on a part of the hosts, which is not the same TPU, Ctrl-C."""
    client = bed.begin(*SSH_HOSTS, args="stray=1")
    wait(lambda: "step" in client.out.read_text())
    bed.drop_connections(0)
    wait(lambda: "connected again" in client.err.read_text())

    # A machine has one run, whatever it is called. Alone it would take itself for worker 0.
    for name in ("one", "two"):
        part = ("--tpu", "ssh:worker-1", "--run", name)
        code, _, err = bed.run("train", *part, args=f"{FOREVER} stray=1")
        assert code == 2
        assert "ssh:worker-1 is busy: one" in err
        assert "worker 1 of 2, since" in err

    stopped = bed.interrupt(client)
    assert stopped.count("stopped and saved: one, exit code 143") == 2
    assert bed.idle(), "also none of another session"
    assert "no process of the run is left" in stopped
    assert "RUN=one" in stopped
    assert "worker 1 (worker-1): " in stopped
    assert bed.saved()
    assert bed.calls() == []


def check_ssh_hosts_resume(bed: Bed) -> None:
    """After Ctrl-C, and after a stop of one host, which ends the run on all."""
    bed.interrupt(bed.begin(*SSH_HOSTS))
    checkpoint_step = bed.steps()[0]
    client = bed.begin(*SSH_HOSTS)
    assert f"start one at {checkpoint_step} with" in bed.log(0), "resumed"

    assert "stopped and saved: one" in bed.stop(0, "--tpu", "ssh:worker-1")
    assert bed.ended(client)[0] == 143

    code, _, err = bed.run("train", "--run", "one", *SSH_HOSTS, args="steps=3")
    assert code == 0
    assert f"scp -r worker-0:{bed.runs}/one runs/" in err
    assert bed.calls() == []
    assert bed.starts() == [3, 3]
