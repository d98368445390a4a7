"""tpu/launch where the world is unkind: failed saves, restarts, full disks, wrong answers, firewalls, other users.

Over the same stand-ins as tests/test_launch.py; what a real systemd does stands in tests/test_pods.py.
"""

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from launch_bed import FOREVER, KEEPER, MAKEFILE, ROOT, send, wait, write_programs

from errors import InputError
from tpu.launch import hosts, keeper, launcher, request, worker, workers

one_worker = pytest.mark.parametrize("bed", [1], indirect=True)
NOT_FOUND = (
    "ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource 'projects/mine/locations/us-east5-b/nodes/my-tpu'"
    " was not found"
)


# ---- how a run ends ----------------------------------------------------------------------------------------------


@one_worker
def test_a_failed_save_is_not_called_saved(bed, here):
    client = bed.begin(args="unsaveable=1")
    code, _, err = here("stop")
    assert code == 0 and "worker 0: stopped unsaved: one, exit code 1" in err
    code, _, err = bed.ended(client)
    assert code == 1 and "worker 0 did not save: exit code 1" in err


@one_worker
def test_a_stop_during_the_installation_saves_nothing_and_says_so(bed, here):
    installation = "train:\n\t@python3 -I -S -c 'import time; time.sleep(100)'\n"
    (bed.project / "Makefile").write_text(installation)
    client = bed.start("train", "--run", "one")
    wait(lambda: bed.processes(0, "time.sleep(100)"))
    err = here("stop")[2]
    assert "worker 0: stopped before it trained: one" in err and "saved" not in err
    assert bed.ended(client)[0] == 143 and bed.idle()


@one_worker
def test_an_installation_that_fails_is_no_input_to_fix_and_is_tried_again(bed):
    """pip ends with 2 after a stalled download, as make does after every failure."""
    fails_once = "\t@[ -e $$HOME/tried ] || { touch $$HOME/tried; exit 2; }\n"
    (bed.project / "Makefile").write_text(MAKEFILE.replace("train:\n", "train:\n" + fails_once))
    code, out, err = bed.run("train", "--run", "one", "--retries", "1")
    assert code == 0 and "worker 0 failed before its trainer began, or beside it with exit code 1" in out, err
    assert "starting again, retry 1 of 1" in out and bed.starts() == [1]


@one_worker
def test_an_input_to_fix_is_not_tried_again(bed):
    (bed.project / "train.py").write_text("raise SystemExit(2)")
    code, out, _ = bed.run("train", "--run", "one", "--retries", "5")
    assert code == 2 and "retry" not in out


@one_worker
def test_a_unit_that_is_restarted_has_stopped_and_saved(bed, here):
    """As needrestart restarts services after an upgrade."""
    client = bed.begin("--retries", "3")
    (bed.home(0) / "unit/restart").touch()
    code, _, err = bed.ended(client)
    assert code == 143 and "the run was stopped on worker 0" in err
    wait(bed.idle)
    assert bed.saved() and bed.starts() == [1]
    assert not (bed.home(0) / "failed").exists()
    assert here("status")[1].count("one exit code 143") == 1
    bed.begin()


def test_a_worker_that_comes_back_is_lost_to_the_attempt(bed):
    """It reboots faster than silence is noticed, and a client that attaches starts it again there."""
    client = bed.begin(args="workers=2")
    bed.restart(1)
    attached = bed.start("train", "--run", "one", args=f"{FOREVER} workers=2")
    code, _, err = bed.ended(client)
    assert code == 1 and "worker 1 was restarted: what it trained is gone" in err
    assert bed.ended(attached)[0] != 0
    bed.check_idle(20)


def test_an_owner_tells_a_new_keeper_of_a_worker_to_leave():
    owner = keeper.Owner(2, 3, 60, "10.0.0.1 port 1", lambda *_: None)
    report = {"attempt": 0, "running": False, "code": None, "stopped": False, "tail": ""}
    owner.report(0, {**report, "incarnation": "a"})
    owner.report(1, {**report, "incarnation": "b"})
    assert owner.report(1, {**report, "incarnation": "c"})["do"] == "leave"
    assert owner.report(0, {**report, "incarnation": "a"})["do"] == "leave" and owner.code == 1


# ---- stop waits for nothing ----------------------------------------------------------------------------------------


@one_worker
def test_a_start_that_hangs_does_not_hold_up_a_stop(bed, here):
    real = (bed.remote / "systemd-run").rename(bed.remote / "real-run")
    # It comes through in the end: the run must not train, since a stop was there before.
    write_programs(bed.remote, **{"systemd-run": f"while [ -e {bed.folder}/hangs ]; do sleep 0.2; done; {real}"})
    (bed.folder / "hangs").touch()
    client = bed.start("train", "--run", "one", args=FOREVER)
    wait(lambda: bed.processes(0, "systemd-run"))
    begun = time.monotonic()
    code, _, err = here("stop")
    assert code == 0 and "nothing ran" in err and time.monotonic() - begun < 15, err
    (bed.folder / "hangs").unlink()
    assert bed.ended(client)[0] in (1, 143)
    bed.check_idle(20)
    assert bed.starts() == [0]


def test_sixteen_dead_workers_hold_no_place_of_a_stop(monkeypatch, capsys):
    options = launcher.read_options(["stop", "--tpu", "my-tpu"])
    launch = launcher.Launcher(options)
    launch.workers.count = 20
    dead = threading.Event()

    def call(number: int, action: str, **arguments: object) -> dict:
        if number < 16:
            dead.wait(20)
            raise workers.WorkerLost("dead")
        answered.append(number)
        return {"state": "idle"}

    answered = []
    monkeypatch.setattr(launch.workers, "call", call)
    stopping = threading.Thread(target=launch.stop_all, args=("",))
    stopping.start()
    wait(lambda: len(answered) == 4, 5)
    dead.set()
    stopping.join()
    assert capsys.readouterr().err.count("not reached: dead") == 16


def test_ctrl_c_in_a_stop_still_lists_what_it_knows(monkeypatch, capsys):
    launch = launcher.Launcher(launcher.read_options(["stop", "--tpu", "my-tpu"]))
    launch.workers.count = 2
    never = threading.Event()

    def call(number: int, action: str, **arguments: object) -> dict:
        if number:
            never.wait(20)
        return {"state": "idle"}

    monkeypatch.setattr(launch.workers, "call", call)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        launch.stop_all("")
    never.set()
    err = capsys.readouterr().err
    assert "worker 0: nothing ran" in err and "no answer yet from worker 1" in err


@one_worker
def test_another_users_run_has_its_whole_time_to_save(bed, here):
    """Its record, where its time to save stands, cannot be read by others."""
    bed.begin("--detach", args="saving=4")
    record = bed.home(0) / "run/start.json"
    record.rename(record.with_name("theirs"))
    code, _, err = here("stop", "--grace", "0.1")
    assert code == 0 and "stopped: a run of another user; what its trainer did is not known" in err, err
    assert "--force kills it" in err and bed.saved(), "killed while it saved"


@one_worker
def test_force_kills_another_users_run(bed, here):
    bed.begin("--detach", args="deaf=1")
    record = bed.home(0) / "run/start.json"
    record.rename(record.with_name("theirs"))
    begun = time.monotonic()
    assert here("stop", "--grace", "0.1", "--force")[0] == 0
    assert time.monotonic() - begun < 15
    bed.check_idle(5)


# ---- the log ---------------------------------------------------------------------------------------------------------


def make_log(folder: Path) -> keeper.Log:
    worker.open_log(folder)
    return keeper.Log(folder)


def test_a_full_disk_costs_a_part_of_the_log_and_not_the_run(tmp_path, monkeypatch):
    log = make_log(tmp_path / "one")
    log.write(b"before\n")
    real = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 4:
            return real(file, data[:4])  # the last that finds room
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(keeper.os, "write", full)
        log.write(b"lost\n")
        log.write(b"lost, too\n")
    assert log.recent.endswith(b"lost, too\n"), "what a failed worker shows of its end needs no disk"
    log.write(b"after\n")
    text = (tmp_path / "one/log").read_text()
    assert text.startswith("before\n") and text.endswith("bytes are not here\nafter\n")


def test_a_log_is_rotated_and_followed_through(tmp_path, monkeypatch, capfdbinary):
    monkeypatch.setattr(keeper, "SEGMENT", 1000)
    folder = tmp_path / "one"
    log = make_log(folder)
    lines = [f"line {number:04d}\n".encode() for number in range(1000)]
    for line in lines:
        log.write(line)
    parts = sorted(folder.glob("log.[0-9]*"))
    assert len(parts) == keeper.SEGMENTS and all(part.stat().st_size <= 1010 for part in parts)
    assert os.readlink(folder / "log") == parts[-1].name
    assert worker.open_log(folder) == worker.size_of(folder) == sum(map(len, lines))

    def read(at: int) -> bytes:
        for part in worker.parts_from(folder, at):
            at = worker.stream(part, at)
        assert at == worker.size_of(folder)
        answers = [json.loads(line[9:]) for line in capfdbinary.readouterr().out.splitlines() if line]
        return "".join(answer["data"] for answer in answers).encode()

    middle = int(parts[1].suffix[1:]) - 55  # five and a half lines of the part before
    assert read(middle) == b"".join(lines)[middle:]
    text = read(0)
    assert text.startswith(b"\n[xla-zoo] ") and b"were rotated away\n" in text and text.endswith(lines[-1])
    at = worker.end_of(folder, 95, 0)
    assert read(at) == b"".join(lines[-9:]), "whole lines"


@one_worker
def test_the_journal_which_others_may_read_has_the_keepers_own_lines_only(bed):
    (bed.project / "message").write_text("a secret of the data set")
    code, out, _ = bed.run("train", "--run", "one", args="fails=0 every=2")
    assert code == 3 and "a secret of the data set" in out
    journal = (bed.home(0) / "journal").read_text()
    assert "worker 0 failed with exit code 3" in journal
    assert "secret" not in journal and "step" not in journal


# ---- the network -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch, request):
    monkeypatch.setattr(keeper, "MOST_CONNECTIONS", getattr(request, "param", keeper.MOST_CONNECTIONS))
    owner = keeper.Owner(2, 0, 60, "127.0.0.1", lambda *_: None)
    server = keeper.Server(owner, "127.0.0.1", 0, "k" * 32)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(server: keeper.Server, sent: bytes) -> bytes:
    with socket.create_connection(server.server_address, timeout=5) as connection:
        connection.sendall(sent)
        try:
            return connection.makefile("rb").readline()
        except ConnectionResetError:
            return b""


REPORT = {"attempt": 0, "running": False, "code": None, "stopped": False, "tail": "", "incarnation": "a"}


def test_a_keeper_reads_nothing_without_its_key_and_never_much(server):
    message = json.dumps({"worker": 1, "report": REPORT}).encode() + b"\n"
    assert json.loads(ask(server, b"k" * 32 + message))["do"] == "wait"
    assert ask(server, b"x" * 32 + message) == b"" and list(server.owner.reports) == [1]
    tracemalloc.start()
    with socket.create_connection(server.server_address, timeout=5) as connection:
        connection.sendall(b"k" * 32)
        with pytest.raises(OSError):
            for _ in range(1000):
                connection.sendall(b"x" * (1 << 20))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_keeper_listens_where_the_workers_are_and_alone_it_does_not_listen(bed):
    client = bed.begin()
    start = json.loads((bed.home(0) / "run/start.json").read_text())
    assert start["address"] == "127.0.0.1" and start["port"]
    listening = Path("/proc/net/tcp").read_text()
    port = f":{start['port']:04X} "
    assert f"0100007F{port}" in listening and f"00000000{port}" not in listening
    bed.interrupt(client)


@one_worker
def test_one_worker_has_no_listener(bed):
    client = bed.begin()
    (pid,) = bed.processes(0, KEEPER)
    open_files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    assert not [name for name in open_files if name.startswith("socket:")]
    bed.interrupt(client)


def test_the_port_can_be_chosen_and_one_that_is_taken_is_named(bed):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = bed.run("train", "--run", "one", "--port", str(port))
        assert code == 2 and f"port {port} of worker 0 (127.0.0.1) cannot be used" in err and "--port N" in err
    code, _, err = bed.run("train", "--run", "two", "--port", str(port))
    assert code == 0, err


def said_while_alone(workers: int, place: str, monkeypatch) -> list[str]:
    """Returns what the owner says in 40 seconds in which only worker 0 has joined."""
    now, said = [0.0], []
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now[0])
    owner = keeper.Owner(workers, 0, 60, place, lambda text, *_: said.append(text))
    for seconds in range(40):
        now[0] = float(seconds)
        owner.report(0, REPORT)
    return said


def test_workers_that_cannot_reach_each_other_say_so_soon(monkeypatch):
    (hint,) = said_while_alone(3, "10.0.0.2 port 4711", monkeypatch)
    assert hint.startswith("worker 1, 2 has not reached worker 0 at 10.0.0.2 port 4711") and "firewall" in hint
    assert keeper.HINT < 30


# ---- the cloud -------------------------------------------------------------------------------------------------------


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
    assert code == 0 and len(asked) > 2, err
    # One that is really gone is believed.
    bed.set(state="DELETED")
    watched = workers.Workers(hosts.TpuVm("my-tpu", "us-east5-b"), 1)
    with pytest.raises(workers.TpuGone, match="there is no TPU VM my-tpu"):
        for _ in range(workers.CERTAIN):
            watched.check()
            watched.asked = 0


@one_worker
def test_a_login_that_ends_while_watching_does_not_end_the_run(bed):
    client = bed.begin()
    bed.wrong(times=0, match=" follow ", message="python3: command not found")  # any error that will not pass
    bed.drop_connections(0)
    code, _, err = bed.ended(client)
    assert code == 2 and "one continues on the TPU; make logs TPU=my-tpu ZONE=us-east5-b watches it again" in err
    assert not bed.idle()
    bed.heal()
    bed.stop()


# ---- the client ------------------------------------------------------------------------------------------------------


@one_worker
def test_a_client_without_a_terminal_or_room_for_the_log_leaves_the_run_alone(bed):
    client = bed.begin()
    client.send_signal(signal.SIGHUP)
    code, _, _ = bed.ended(client)
    assert code == 129 and not bed.idle()
    attached = bed.start("train", "--run", "one", args=FOREVER)
    wait(lambda: "attached; Ctrl-C stops one on all workers (make logs TPU=my-tpu" in attached.err.read_text())
    attached.send_signal(signal.SIGHUP)
    command = [sys.executable, "-I", "-S", f"{ROOT}/tpu/launch/launcher.py", *bed.arguments("logs")]
    environment = {"PATH": str(bed.bin), "HOME": str(bed.client_home)}
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, cwd=bed.project, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "standard output takes nothing more: No space left on device; one continues" in result.stderr
    assert not bed.idle()
    bed.stop()


def test_what_takes_long_is_said_every_few_seconds(monkeypatch, capsys):
    monkeypatch.setattr(workers, "TELL", 0.1)
    ready = threading.Event()
    threading.Timer(0.5, ready.set).start()
    workers.parallel(lambda number: number == 7 or ready.wait(5), range(8), "copying", 0, progress=lambda: ", 3 MB")
    err = capsys.readouterr().err
    assert "[launch] copying: workers 0, 1, 2, 3, 4 and 2 others, " in err and ", 3 MB" in err
    threading.Timer(0.5, ready.clear).start()
    workers.patient(lambda: time.sleep(0.4), "asking about my-tpu")
    assert "[launch] asking about my-tpu, 0 s" in capsys.readouterr().err


def test_input_is_sent_without_a_copy_for_each_worker(tmp_path):
    data = bytes(32 << 20)
    every = workers.Workers(hosts.TpuVm("my-tpu"), 1)
    tracemalloc.start()
    for number in range(3):
        with open(os.devnull, "wb") as sink:
            process = type("Process", (), {"stdin": sink})
            every.feed(number, process, data)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20 and every.sent == dict.fromkeys(range(3), len(data))
    tracemalloc.stop()


def test_commands_to_repeat_carry_the_flags_for_gcloud(bed, here):
    flags = ("--gcloud-flag=--internal-ip", "--gcloud-flag=--ssh-flag=-oA=b")
    code, _, err = here("logs", *flags[:1])
    assert code == 2 and "make status TPU=my-tpu ZONE=us-east5-b LAUNCH_ARGS=--gcloud-flag=--internal-ip" in err
    options = launcher.read_options(["logs", "--tpu", "my-tpu", *flags])
    launch = launcher.Launcher(options)
    assert "--gcloud-flag=--internal-ip --gcloud-flag=--ssh-flag=-oA=b" in launch.make("logs")
    assert launch.host.fetch("runs/one").endswith("--worker=0 --internal-ip --scp-flag=-oA=b")


# ---- what is sent --------------------------------------------------------------------------------------------------


def test_two_tpus_with_one_home_have_their_own_trees():
    one, other = hosts.TpuVm("my-tpu"), hosts.TpuVm("her-tpu")
    plain = hosts.SshHosts("ssh:me@a,b", ["me@a", "b"])
    folders = [one.folder(0), one.folder(1), other.folder(0), plain.folder(0), plain.folder(1)]
    assert folders == ["my-tpu/worker-0", "my-tpu/worker-1", "her-tpu/worker-0", "ssh-me_a/worker-0", "ssh-b/worker-1"]


def test_files_that_look_like_secrets_stay_here_and_are_named(bed, here):
    project = bed.project
    account = json.dumps({"type": "service_account", "private_key": "x"})
    secrets = {".env": "TOKEN=x", "deep/.env.local": "y", "deep/key.pem": "z", "gcp.json": account}
    others = {"config.json": '{"type": "linear"}', "list.json": "[1]", "broken.json": "{", "environment.env.py": ""}
    for name, text in {**secrets, **others}.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    bundle = request.make_bundle(project)
    assert sorted(bundle.left_out) == sorted(secrets)
    with tarfile.open(fileobj=io.BytesIO(bundle.content)) as archive:
        assert not set(archive.getnames()) & set(secrets) and set(others) <= set(archive.getnames())
    (project / "data").symlink_to("/mnt/data")
    (project / "up").symlink_to("../elsewhere")
    (project / "deep/fine").symlink_to("../train.py")
    code, _, err = here("train", "--run", "one")
    assert code == 0 and "left out, since they look like secrets: .env, deep/.env.local, deep/key.pem, gcp.json" in err
    assert "links out of the working tree, which are sent as they are: data -> /mnt/data, up -> ../elsewhere" in err


def test_names_are_the_same_whatever_the_locale_of_the_client(bed):
    name = "größe 木.py"
    (bed.project / name).write_text("x = 1")
    code = (
        "import sys; from pathlib import Path; from tpu.launch import request;"
        " sys.stdout.buffer.write(request.make_bundle(Path(sys.argv[1])).content)"
    )
    ascii_only = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(bed.project)]
    result = subprocess.run(command, cwd=ROOT, env=ascii_only, capture_output=True)
    assert result.returncode == 0, result.stderr
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        assert name in archive.getnames()
    worker.unpack(result.stdout, bed.folder / "tree", bed.folder / "manifest.json")
    assert (bed.folder / "tree" / name).read_text() == "x = 1"


@pytest.mark.parametrize(
    "name, secret",
    [
        ("TOKENIZERS_PARALLELISM", False),
        ("KEYBOARD", False),
        ("PWD", False),
        ("MONKEY_PATCH", False),
        ("hf_token", True),
        ("api_key", True),
        ("PGPASSWD", True),
        ("DB_PWD", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("MySecret", False),
        ("my_SECRET_x", True),
        ("DBPASSWORD", True),
    ],
)
def test_a_secret_is_known_by_the_parts_of_its_name(name, secret):
    if not secret:
        assert request.read_environment(f"{name}=x", [])[name] == "x"
        return
    with pytest.raises(InputError, match=f"{name} in ENV would stand in this machine's list of processes"):
        request.read_environment(f"{name}=x", [])


# ---- what somebody else tried: signals, files and neighbours --------------------------------------------------------


@one_worker
def test_sigterm_to_all_processes_of_the_unit_hides_no_failed_save(bed):
    """`systemctl kill` sends it to make and its shells, too, which then do not say how the trainer ended."""
    client = bed.begin(args="unsaveable=1 saving=1")
    bed.kill(0, number=signal.SIGTERM)
    code, _, err = bed.ended(client)
    assert code == 1 and "worker 0 did not save: exit code 1" in err
    wait(bed.idle)
    bed.begin(args="saving=1")
    bed.kill(0, number=signal.SIGTERM)
    wait(bed.idle)
    assert bed.saved()


@one_worker
def test_a_step_of_the_installation_whose_failure_make_ignores_does_not_train_after_a_stop(bed, here):
    """As the look for a Python, which `make stop` ends: what comes next must not begin."""
    ignored = "train:\n\t@python3 -I -S -c 'import time; time.sleep(100)' || true\n"
    (bed.project / "Makefile").write_text(MAKEFILE.replace("train:\n", ignored))
    client = bed.start("train", "--run", "one", args=FOREVER)
    wait(lambda: bed.processes(0, "time.sleep(100)"))
    begun = time.monotonic()
    err = here("stop")[2]
    assert "worker 0: stopped before it trained: one" in err and time.monotonic() - begun < 10, err
    assert bed.ended(client)[0] == 143 and bed.starts() == [0]


@pytest.mark.parametrize("content", ["", "rubbish\n", b"\xff\xfe"])
def test_an_exit_code_that_cannot_be_read_is_not_the_trainers(content, tmp_path):
    """As a full /run leaves it."""
    recorded = tmp_path / "code"
    recorded.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert keeper.read_code(recorded) is None
    assert keeper.exit_code(2, recorded) == keeper.UNKNOWN


@one_worker
def test_an_exit_code_that_cannot_be_written_is_no_failed_save(bed, here):
    makefile = MAKEFILE.replace("\t@", "\t@mkdir $(XLA_ZOO_EXIT_CODE); ")
    (bed.project / "Makefile").write_text(makefile)
    client = bed.begin()
    err = here("stop")[2]
    assert "unsaved" not in err and "or its Makefile records no exit code" in err
    assert bed.ended(client)[0] == 143 and bed.saved()


def test_a_journal_that_is_gone_does_not_end_the_decisions(monkeypatch):
    said = []

    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    log = type("Log", (), {"line": lambda self, text: said.append(text), "write": lambda self, data: said.append(data)})
    monkeypatch.setattr("builtins.print", broken)
    own = keeper.Keeper.__new__(keeper.Keeper)
    own.log = log()
    own.say("worker 0 failed")
    assert len(said) == 1


# ---- the log, in other hands


def test_other_files_beside_the_log_are_none_of_its_parts(tmp_path):
    """Somebody compresses a part, or logrotate does."""
    folder = tmp_path / "one"
    log = make_log(folder)
    log.write(b"text\n")
    for name in ("log.000000000000000.gz", "log.1", "log.2026-01-01"):
        (folder / name).write_bytes(b"other")
    again = make_log(folder)
    again.write(b"more\n")
    assert worker.size_of(folder) == 10 and (folder / "log").read_text() == "text\nmore\n"
    assert [part.name for part in worker.parts_from(folder, 0)] == ["log.000000000000000"]


def test_a_log_that_an_editor_has_replaced_costs_no_part_of_it(tmp_path, monkeypatch):
    """`sed -i` makes a file of the link."""
    monkeypatch.setattr(keeper, "SEGMENT", 10)
    folder = tmp_path / "one"
    log = make_log(folder)
    log.write(b"0123456789")
    log.write(b"more\n")
    (folder / "log").unlink()
    (folder / "log").write_text("edited")
    assert worker.open_log(folder) == 15
    assert (folder / f"log.{0:015d}").read_bytes() == b"0123456789" and (folder / "log").read_bytes() == b"more\n"
    assert [path.read_text() for path in folder.glob("log.old-*")] == ["edited"]


@pytest.mark.parametrize("how", ["removed", "emptied", "with its folder"])
def test_a_log_that_is_taken_away_begins_again(how, tmp_path):
    folder = tmp_path / "one"
    log = make_log(folder)
    log.write(b"before\n")
    at = worker.size_of(folder)
    (part,) = folder.glob("log.[0-9]*")
    if how == "emptied":
        os.truncate(part, 0)
    else:
        part.unlink()
    if how == "with its folder":
        (folder / "log").unlink()
        folder.rmdir()
    log.write(b"after\n")
    (newest,) = worker.parts_from(folder, at)
    assert newest.read_bytes() == b"after\n" and int(newest.suffix[1:]) == at
    assert (folder / "log").read_bytes() == b"after\n"


def test_the_end_of_a_log_of_one_long_line_is_shown(tmp_path):
    """A progress bar ends its lines by \\r."""
    folder = tmp_path / "one"
    make_log(folder).write(b"x" * 100_000)
    assert worker.end_of(folder, 1000, 0) == 99_000


def test_the_keepers_line_is_a_line_of_its_own(tmp_path):
    log = make_log(tmp_path / "one")
    log.line("[xla-zoo] first")
    log.write(b"epoch 1: 50%")
    log.line("[xla-zoo] worker 1 failed")
    assert (tmp_path / "one/log").read_text() == "[xla-zoo] first\nepoch 1: 50%\n[xla-zoo] worker 1 failed\n"


def test_memory_that_ran_out_in_an_earlier_attempt_is_not_said_again(tmp_path):
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert keeper.memory_kills(tmp_path) == 2
    events.write_text("low 0\noom_kill 0\n")
    assert keeper.memory_kills(tmp_path) == 0 and keeper.memory_kills(tmp_path / "none") == 0


# ---- the entry, as a container's first process


SAVES_SLOWLY = """import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), print("saved", flush=True), sys.exit(143)))
print("step", flush=True)
time.sleep(20)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a namespace of processes")
@pytest.mark.parametrize("shell", ["sh {root}/tpu/exit_code.sh ", "true; "])
def test_as_process_1_a_signal_to_all_processes_lets_the_trainer_save(shell, tmp_path):
    """As `kill -TERM -1` in the container, twice."""
    (tmp_path / "saves.py").write_text(SAVES_SLOWLY)
    (tmp_path / "Makefile").write_text(f"train:\n\t@{shell.format(root=ROOT)}{sys.executable} -I -S saves.py\n")
    out = tmp_path / "out"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "tpu.entry", "MODEL=bert"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    with out.open("w") as stdout:
        entry = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=stdout)
    wait(lambda: out.read_text() == "step\n")
    inside = [pid for pid in map(int, os.listdir(f"/proc/{entry.pid}/task")) if pid]
    children = Path(f"/proc/{entry.pid}/task/{inside[0]}/children").read_text().split()
    everything = set(map(int, children))
    while True:
        more = set()
        for pid in everything:
            more |= set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        if more <= everything:
            break
        everything |= more
    send(signal.SIGTERM, everything)
    time.sleep(0.3)
    send(signal.SIGTERM, map(int, children))
    code = entry.wait(timeout=20)
    assert "saved" in out.read_text()
    assert code == 143 or shell == "true; ", "the second has no program that says how it ended"


def test_an_entry_without_make_is_an_input_to_fix(tmp_path):
    """A crash would be started again a thousand times."""
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tpu.entry", "MODEL=bert"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("error: make cannot be started: No such file"), result


# ---- what is sent, from a less tidy folder


def test_secrets_are_known_in_capitals_in_folders_and_in_other_accounts_files(bed):
    project = bed.project
    account = {"type": "service_account", "private_key": "x" * 70_000}
    other = {"type": "impersonated_service_account"}
    secrets = {".ENV": "x", "server.PEM": "x", ".env-files/x": "", "large.json": json.dumps(account)}
    secrets |= {"key.JSON": json.dumps(other), "bom.json": "\ufeff" + json.dumps(other), ".envrc": "export X=y"}
    for name, text in secrets.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    for number in range(30):
        (project / "deep/.env").mkdir(exist_ok=True, parents=True)
        (project / f"deep/.env/file-{number}").write_text("x")
    bundle = request.make_bundle(project)
    secrets.pop(".env-files/x")
    assert sorted(bundle.left_out) == sorted([*secrets, "deep/.env/"]), "a folder is named once"


@pytest.mark.parametrize("how", ["unreadable", "shrinks", "removed"])
def test_a_file_that_cannot_be_packed_is_one_sentence(how, bed, here, monkeypatch):
    real, name = open, os.path.join(os.fsencode(bed.project), b"message")

    def opened(path: object, *rest: object, **more: object) -> object:
        if path == name:
            if how == "unreadable":
                raise PermissionError(13, "Permission denied", "message")
            if how == "removed":
                os.unlink(name)
            else:
                os.truncate(name, 1)
        return real(path, *rest, **more)

    monkeypatch.setattr(request, "open", opened, raising=False)
    code, _, err = here("train")
    assert code == 2 and "error: message cannot be read: " in err and "Traceback" not in err, err
    assert ".gitignore" in err


@one_worker
def test_odd_names_and_many_files_arrive(bed):
    names = ["-rf", "--help.py", "a\nb.py", "tab\tand space", "deep/" * 30 + "x", "x" * 200]
    for name in names:
        (bed.project / name).parent.mkdir(exist_ok=True, parents=True)
        (bed.project / name).write_text("x = 1")
    os.link(bed.project / "message", bed.project / "second")
    for number in range(500):
        (bed.project / f"many-{number}").write_text(str(number))
    code, _, err = bed.run("train", "--run", "one")
    assert code == 0, err
    tree = bed.zoo(0) / "tree"
    assert all((tree / name).read_text() == "x = 1" for name in names)
    assert (tree / "second").read_text() == "it broke" and (tree / "many-499").read_text() == "499"


# ---- the cloud, in other words


WARNED = "WARNING: a newer gcloud is there\n"


@one_worker
def test_what_gcloud_prints_before_its_answer_is_passed_over(bed, here, monkeypatch):
    node = json.dumps({"state": "READY", "health": "HEALTHY", "networkEndpoints": [{}], "acceleratorType": "v5e"})
    bed.wrong(verb="describe", out=f"{WARNED}{{not this}}\n{node}\n")
    code, _, err = here("status", "--lost-after", "0.1")
    assert code == 0 and "my-tpu: v5e, READY, HEALTHY, 1 worker" in err, err


@pytest.mark.parametrize(
    "said",
    [
        "HttpError accessing <https://tpu.googleapis.com/v2/x>: response: <{'status': '404'}>, content <Not Found>",
        "ResponseError: code=404, message=Resource 'projects/mine/nodes/my-tpu' was not found",
        "HTTPError 404: Requested entity was not found.",
    ],
)
def test_a_tpu_that_is_not_there_is_known_in_other_words(said, bed, here):
    bed.wrong(verb="describe", message=f"ERROR: (gcloud.compute.tpus.tpu-vm.describe) {said}")
    code, _, err = here("status", "--lost-after", "0.1")
    assert code == 75 and "there is no TPU VM my-tpu in this zone" in err, err


def test_a_refusal_in_the_middle_of_a_run_is_asked_again_before_it_is_believed(bed):
    """gcloud's rights and tokens come and go; the run is not to be left alone for one answer."""
    watched = workers.Workers(hosts.TpuVm("my-tpu", "us-east5-b"), 1)
    answers = [InputError("PERMISSION_DENIED")]

    def describe() -> hosts.Machine:
        if answers:
            raise answers.pop()
        return hosts.Machine(1, "my-tpu")

    watched.host.describe = describe

    def check() -> None:
        watched.asked = -workers.LONGEST_PAUSE
        watched.check()

    check()
    check()
    answers += [InputError("PERMISSION_DENIED")] * workers.CERTAIN
    with pytest.raises(InputError, match="PERMISSION_DENIED"):
        for _ in range(workers.CERTAIN):
            check()
    assert not answers


@one_worker
def test_gcloud_that_crashes_once_is_tried_again(bed, here):
    """Several at once lock each other out of their database."""
    here("status")
    bed.wrong(message="ERROR: gcloud crashed (OperationalError): database is locked")
    bed.set(attempts=1)
    code, _, err = here("train", "--run", "one")
    assert code == 0 and "trying again" in err, err


# ---- the client's own machine


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>&-", ">&-"])
@one_worker
def test_a_client_without_its_streams_does_what_it_is_asked(streams, bed):
    """As cron and some supervisors start programs."""
    words = shlex.join([sys.executable, "-I", "-S", f"{ROOT}/tpu/launch/launcher.py", *bed.arguments("train")])
    environment = {"PATH": f"{bed.bin}", "HOME": str(bed.client_home)}
    result = subprocess.run(
        ["/bin/sh", "-c", f"exec {words} {streams}"], cwd=bed.project, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    assert bed.starts() == [1]


@pytest.mark.parametrize("program", ["git", "ssh"])
def test_a_program_that_is_missing_here_is_named(program, bed, here):
    (bed.bin / program).unlink()
    words = ["status", "--tpu", "ssh:worker-0"] if program == "ssh" else ["train"]
    code, out, err = here(*words)
    assert code != 0 and f"{program} is not installed here" in out + err and "Traceback" not in err, err


@one_worker
def test_sigterm_ends_the_client_with_a_word_and_not_the_run(bed):
    """143 would say that the run was stopped."""
    client = bed.begin()
    client.terminate()
    code, _, err = bed.ended(client)
    assert code == 129 and "one continues on the TPU; make logs TPU=my-tpu" in err
    assert not bed.idle()
    bed.stop()


def test_a_third_ctrl_c_does_not_say_that_nothing_was_started(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch", "train", "--tpu", "my-tpu"])

    def train(launch: launcher.Launcher) -> int:
        launch.run, launch.begun = "one", True
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher.Launcher, "train", train)
    assert launcher.main() == 130
    err = capsys.readouterr().err
    assert "nothing was started" not in err and "make stop TPU=my-tpu ends it" in err


# ---- the worker's machine


@pytest.mark.parametrize("rule", ["a folder", "read-only"])
def test_needrestarts_folder_that_cannot_be_used_keeps_no_run_from_starting(rule, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(worker, "NEEDRESTART", tmp_path / "conf.d")
    monkeypatch.setattr(worker, "RUNTIME", tmp_path)
    monkeypatch.setattr(worker, "ROOT", [])
    (tmp_path / "conf.d").mkdir()
    if rule == "a folder":
        (tmp_path / "conf.d/xla-zoo.conf").mkdir()
    write_programs(tmp_path / "bin", install="echo 'install: cannot create: Read-only file system' >&2; exit 1;")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    worker.spare_from_needrestart()
    (answer,) = [line for line in capfd.readouterr().out.splitlines() if line]
    note = json.loads(answer[9:])["note"]
    assert note.startswith("needrestart may restart the run") and "systemd unit" not in note, note


def test_a_full_run_folder_at_the_end_leaves_no_variables_and_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "RUNTIME", tmp_path)
    start = {"token": "t", "run": "one", "environment": {"HF_TOKEN": "x"}, "code": 143, "trainer": 143, "apart": False}
    (tmp_path / "start.json").write_text(json.dumps(start))
    real, calls = keeper.write_json, []

    def full(path: Path, value: object) -> None:
        calls.append(path.name)
        if (tmp_path / "start.json").exists():
            raise OSError(28, "No space left on device")
        real(path, value)

    monkeypatch.setattr(keeper, "write_json", full)
    keeper.ended()
    assert not (tmp_path / "start.json").exists()
    (record,) = json.loads((tmp_path / "ended.json").read_text())
    assert record["code"] == 143 and not record["environment"]


@one_worker
def test_a_run_of_an_older_launcher_is_named(bed, here):
    """Its record has no folder and no address; it is stopped as any other."""
    client = bed.begin("--detach")
    assert bed.ended(client)[0] == 0
    record = bed.home(0) / "run/start.json"
    start = json.loads(record.read_text())
    del start["address"], start["folder"]
    record.write_text(json.dumps(start))
    for action in (("train", "--run", "one"), ("logs",)):
        code, _, err = here(*action, args=FOREVER if action[0] == "train" else "")
        assert code == 2 and "was started by another version of the launcher" in err and "make stop" in err, err
    assert here("stop")[0] == 0


def test_workers_that_ask_at_an_address_of_this_machine_alone_are_told_so(monkeypatch):
    """ssh through a tunnel ends at 127.0.0.1."""
    said = said_while_alone(2, "127.0.0.1 port 4711", monkeypatch)
    assert "only worker 0 itself has this address" in said[0], said


@one_worker
def test_a_copied_makefile_that_records_no_exit_code_is_not_said_to_have_trained_nothing(bed, here):
    (bed.project / "Makefile").write_text(MAKEFILE.replace("exec sh exit_code.sh ", ""))
    client = bed.begin()
    err = here("stop")[2]
    assert "stopped before it trained: one, or its Makefile records no exit code (tpu/exit_code.sh)" in err, err
    assert bed.ended(client)[0] == 143 and bed.saved()


@one_worker
def test_a_trainer_that_is_killed_when_its_time_is_over_is_not_called_out_of_memory(bed):
    client = bed.begin(args="deaf=1")
    bed.stop(0, "--grace", "1")
    code, _, err = bed.ended(client)
    assert code == 137 and "it did not end in its time to save, and was killed" in err and "out of memory" not in err


def test_a_record_of_ends_that_found_no_room_costs_only_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "RUNTIME", tmp_path)
    (tmp_path / "start.json").write_text(json.dumps({"token": "t", "run": "one", "environment": {"HF_TOKEN": "x"}}))
    (tmp_path / "ended.json").write_text('[{"tok')
    keeper.ended()
    (record,) = json.loads((tmp_path / "ended.json").read_text())
    assert record["run"] == "one" and not (tmp_path / "start.json").exists()


@one_worker
def test_a_clock_that_is_set_back_makes_no_old_end_a_new_one(bed, here):
    client = bed.begin()
    assert "stopped and saved" in here("stop")[2]
    bed.ended(client)
    path = bed.home(0) / "run/ended.json"
    (record,) = json.loads(path.read_text())
    record["ended"] += 86400
    path.write_text(json.dumps([record]))
    assert "worker 0: nothing ran" in here("stop")[2]


def test_a_busy_tpu_is_not_said_to_run_what_was_asked_for(bed):
    first = bed.begin()
    code, _, err = bed.run("train", "--run", "two", args=FOREVER)
    assert code == 2 and "my-tpu is busy: one" in err and "two" not in err, err
    bed.interrupt(first)


def test_a_keeper_that_no_systemd_stops_ends_a_deaf_trainer_itself(monkeypatch):
    """SIGTERM came by `systemctl kill`, or from anybody."""
    monkeypatch.setattr(keeper, "NOT_STOPPED", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    command = [sys.executable, "-I", "-S", "-c", deaf]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    process.stdout.readline()
    own = keeper.Keeper.__new__(keeper.Keeper)
    own.process, own.stopped, own.asked, own.killed_at, own.order = process, True, False, 0.0, {"grace": 0}

    def ended() -> bool:
        own.end()
        return process.poll() is not None

    wait(ended, 5)
    process.stdout.close()


@pytest.mark.parametrize("server", [32], indirect=True)
def test_a_neighbour_that_holds_connections_keeps_no_worker_out(server):
    """It opens as many as it can, and says nothing."""
    held = []
    for _ in range(keeper.MOST_CONNECTIONS + 10):
        held.append(socket.create_connection(server.server_address, timeout=5, source_address=("127.0.0.9", 0)))
    message = json.dumps({"worker": 1, "report": REPORT}).encode() + b"\n"
    assert json.loads(ask(server, b"k" * 32 + message) or b"{}").get("do") == "wait"
    for connection in held:
        connection.close()


@pytest.mark.parametrize("address, code", [("::1", 0), ("192.0.2.7", 2), ("fe80::1%eth9", 2)])
def test_ssh_reaches_a_worker_at_another_address(address, code, bed):
    """IPv6; behind a proxy, an address that is not the machine's own."""
    ssh = bed.bin / "ssh"
    ssh.write_text(ssh.read_text().replace("40000 127.0.0.1 22", f"40000 {address} 22"))
    found, _, err = bed.run("train", "--run", "one", args="workers=2")
    if code and "Address family not supported" in err:
        pytest.skip("no IPv6 here")
    assert found == code, err
    assert not code or "that is where ssh has reached it; give TPU=ssh: addresses" in err, err
