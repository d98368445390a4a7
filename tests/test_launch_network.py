"""What stands between client, cloud and workers of tpu/launch: ports, firewalls, gcloud's answers.

Over the stand-ins of tests/launch_bed.py.
"""

import json
import os
import socket
import threading
import tracemalloc
from pathlib import Path

import pytest
from launch_bed import FOREVER, KEEPER, one_worker

from errors import InputError
from tpu.launch import hosts, keeper, workers

NOT_FOUND = (
    "ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource"
    " 'projects/mine/locations/us-east5-b/nodes/my-tpu' was not found"
)


# ---- the keeper's server -----------------------------------------------------------------------


KEY = b"k" * 32
REPORT = {
    "attempt": 0,
    "running": False,
    "code": None,
    "stopped": False,
    "tail": "",
    "incarnation": "a",
}
MESSAGE = json.dumps({"worker": 1, "report": REPORT}).encode() + b"\n"


@pytest.fixture
def server(monkeypatch, request):
    """The server of a run of two workers; a test's parameter says how many connections it takes."""
    most = getattr(request, "param", keeper.MOST_CONNECTIONS)
    monkeypatch.setattr(keeper, "MOST_CONNECTIONS", most)
    owner = keeper.Owner(2, 0, 60, "127.0.0.1", lambda *_: None)
    server = keeper.Server(owner, "127.0.0.1", 0, KEY.decode())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(server: keeper.Server, sent: bytes) -> bytes:
    """Returns the server's answer, b"" for none."""
    with socket.create_connection(server.server_address, timeout=5) as connection:
        connection.sendall(sent)
        try:
            return connection.makefile("rb").readline()
        except ConnectionResetError:
            return b""


def test_a_keeper_reads_nothing_without_its_key(server):
    assert json.loads(ask(server, KEY + MESSAGE))["do"] == "wait"

    assert ask(server, b"x" * 32 + MESSAGE) == b""
    assert list(server.owner.reports) == [1]


def test_a_keeper_never_reads_much(server):
    tracemalloc.start()
    with socket.create_connection(server.server_address, timeout=5) as connection:
        connection.sendall(KEY)
        with pytest.raises(OSError):
            for _ in range(1000):
                connection.sendall(b"x" * (1 << 20))

    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("server", [32], indirect=True)
def test_a_neighbour_that_holds_connections_keeps_no_worker_out(server):
    """It opens as many as it can, and says nothing."""
    held = []
    for _ in range(keeper.MOST_CONNECTIONS + 10):
        neighbour = ("127.0.0.9", 0)
        connection = socket.create_connection(
            server.server_address, timeout=5, source_address=neighbour
        )
        held.append(connection)

    answer = ask(server, KEY + MESSAGE) or b"{}"
    assert json.loads(answer).get("do") == "wait"
    for connection in held:
        connection.close()


# ---- addresses and ports -----------------------------------------------------------------------


def test_a_keeper_listens_only_where_the_workers_are(bed):
    client = bed.begin()
    start = json.loads((bed.home(0) / "run/start.json").read_text())
    assert start["address"] == "127.0.0.1"
    assert start["port"]

    listening = Path("/proc/net/tcp").read_text()
    port = f":{start['port']:04X} "
    assert f"0100007F{port}" in listening
    assert f"00000000{port}" not in listening
    bed.interrupt(client)


@one_worker
def test_one_worker_has_no_listener(bed):
    client = bed.begin()
    (pid,) = bed.processes(0, KEEPER)
    open_files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    assert not [name for name in open_files if name.startswith("socket:")]
    bed.interrupt(client)


def test_a_port_that_is_taken_is_named_and_a_free_one_is_used(bed):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = bed.run("train", "--run", "one", "--port", str(port))
    assert code == 2
    assert f"port {port} of worker 0 (127.0.0.1) cannot be used" in err
    assert "--port N" in err

    code, _, err = bed.run("train", "--run", "two", "--port", str(port))
    assert code == 0, err


def said_while_alone(workers: int, address: str, monkeypatch) -> list[str]:
    """Returns what the owner at `address` says in 40 seconds in which only worker 0 has joined."""
    now = [0.0]
    said = []
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now[0])
    owner = keeper.Owner(workers, 0, 60, address, lambda text, *_: said.append(text))
    for second in range(40):
        now[0] = float(second)
        owner.report(0, REPORT)
    return said


def test_workers_that_cannot_reach_each_other_say_so_soon(monkeypatch):
    (hint,) = said_while_alone(3, "10.0.0.2 port 4711", monkeypatch)
    assert hint.startswith("worker 1, 2 has not reached worker 0 at 10.0.0.2 port 4711")
    assert "firewall" in hint
    assert keeper.HINT < 30


def test_an_address_of_worker_0_alone_is_named(monkeypatch):
    """ssh through a tunnel ends at 127.0.0.1."""
    said = said_while_alone(2, "127.0.0.1 port 4711", monkeypatch)
    assert "only worker 0 itself has this address" in said[0], said


@pytest.mark.parametrize("address, code", [("::1", 0), ("192.0.2.7", 2), ("fe80::1%eth9", 2)])
def test_ssh_reaches_a_worker_at_another_address(address, code, bed):
    """IPv6; behind a proxy, an address that is not the machine's own."""
    ssh = bed.bin / "ssh"
    ssh.write_text(ssh.read_text().replace("40000 127.0.0.1 22", f"40000 {address} 22"))

    found, _, err = bed.run("train", "--run", "one", args="workers=2")
    if code and "Address family not supported" in err:
        pytest.skip("no IPv6 here")
    assert found == code, err
    if code:
        assert "that is where ssh has reached it; give TPU=ssh: addresses" in err, err


# ---- gcloud's answers while a run is watched ---------------------------------------------------


def test_a_tpu_that_is_not_found_once_is_asked_for_again(bed, here, monkeypatch):
    monkeypatch.setattr(workers, "LONGEST_PAUSE", 0.1)
    bed.begin("--detach", args="steps=400")
    bed.wrong(verb="describe", message=NOT_FOUND)  # the second of the three answers below
    asked = []
    describe = hosts.TpuVm.describe

    def counted(host: hosts.TpuVm) -> hosts.Machine:
        asked.append(1)
        if len(asked) == 1:
            return hosts.Machine(2, "my-tpu")
        return describe(host)

    monkeypatch.setattr(hosts.TpuVm, "describe", counted)
    bed.wrong(match=" follow ", message="Connection closed by 34.0.0.1 port 22", times=4)
    bed.set(attempts=1)
    threading.Timer(3, (bed.shared / "one/finish").touch).start()

    code, _, err = here("logs")
    assert code == 0, err
    assert len(asked) > 2, err


def test_a_tpu_that_is_really_gone_is_believed(bed, monkeypatch):
    monkeypatch.setenv("PATH", str(bed.bin))
    monkeypatch.setattr(workers, "LONGEST_PAUSE", 0.1)
    bed.set(state="DELETED")
    watched = workers.Workers(hosts.TpuVm("my-tpu", "us-east5-b"), 1)

    with pytest.raises(workers.TpuGone, match="there is no TPU VM my-tpu"):
        for _ in range(workers.CERTAIN):
            watched.check()
            watched.asked = 0


def test_one_refusal_in_the_middle_of_a_run_is_not_believed():
    """gcloud's rights and tokens come and go; the run is not to be left alone for one answer."""
    watched = workers.Workers(hosts.TpuVm("my-tpu", "us-east5-b"), 1)
    refusals = [InputError("PERMISSION_DENIED")]

    def describe() -> hosts.Machine:
        if refusals:
            raise refusals.pop()
        return hosts.Machine(1, "my-tpu")

    def check() -> None:
        watched.asked = -workers.LONGEST_PAUSE
        watched.check()

    watched.host.describe = describe
    check()
    check()

    refusals += [InputError("PERMISSION_DENIED")] * workers.CERTAIN
    with pytest.raises(InputError, match="PERMISSION_DENIED"):
        for _ in range(workers.CERTAIN):
            check()
    assert not refusals


@one_worker
def test_a_login_that_ends_while_watching_does_not_end_the_run(bed):
    client = bed.begin()
    any_lasting_error = "python3: command not found"
    bed.wrong(times=0, match=" follow ", message=any_lasting_error)
    bed.drop_connections(0)

    code, _, err = bed.ended(client)
    assert code == 2
    command = "make logs TPU=my-tpu ZONE=us-east5-b"
    assert f"one continues on the TPU; {command} watches it again" in err
    assert not bed.idle()

    bed.heal()
    bed.stop()


@one_worker
def test_gcloud_that_crashes_once_is_tried_again(bed, here):
    """Several at once lock each other out of their database."""
    here("status")
    bed.wrong(message="ERROR: gcloud crashed (OperationalError): database is locked")
    bed.set(attempts=1)

    code, _, err = here("train", "--run", "one")
    assert code == 0, err
    assert "trying again" in err, err


# ---- gcloud's answers in other words -----------------------------------------------------------


WARNED = "WARNING: a newer gcloud is there\n"


@one_worker
def test_what_gcloud_prints_before_its_answer_is_passed_over(bed, here):
    node = {
        "state": "READY",
        "health": "HEALTHY",
        "networkEndpoints": [{}],
        "acceleratorType": "v5e",
    }
    bed.wrong(verb="describe", out=f"{WARNED}{{not this}}\n{json.dumps(node)}\n")

    code, _, err = here("status", "--lost-after", "0.1")
    assert code == 0, err
    assert "my-tpu: v5e, READY, HEALTHY, 1 worker" in err, err


@pytest.mark.parametrize(
    "said",
    [
        "HttpError accessing <https://tpu.googleapis.com/v2/x>:"
        " response: <{'status': '404'}>, content <Not Found>",
        "ResponseError: code=404, message=Resource 'projects/mine/nodes/my-tpu' was not found",
        "HTTPError 404: Requested entity was not found.",
    ],
)
def test_a_tpu_that_is_not_there_is_known_in_other_words(said, bed, here):
    bed.wrong(verb="describe", message=f"ERROR: (gcloud.compute.tpus.tpu-vm.describe) {said}")

    code, _, err = here("status", "--lost-after", "0.1")
    assert code == 75, err
    assert "there is no TPU VM my-tpu in this zone" in err, err


def test_a_busy_tpu_is_not_said_to_run_what_was_asked_for(bed):
    first = bed.begin()

    code, _, err = bed.run("train", "--run", "two", args=FOREVER)
    assert code == 2, err
    assert "my-tpu is busy: one" in err, err
    assert "two" not in err, err
    bed.interrupt(first)
