"""Stands in for gcloud: a TPU VM whose workers are hosts that the `ssh` in $FAKE_CLOUD/bin reaches as worker-<i>.

$FAKE_CLOUD/tpu.json says what the TPU is and what goes wrong; $FAKE_CLOUD/calls gets the arguments of each call. What
is imitated of the real `gcloud compute tpus tpu-vm describe|ssh` (GA, as of 2025):

    describe    JSON with state, health, acceleratorType, an entry of networkEndpoints for each worker in each of its
                two networks; exit code 1 and `ERROR: (gcloud.compute.tpus.tpu-vm.describe) …` for an error
    ssh         asks the API first: a PREEMPTED or STOPPED TPU is exit code 1, one in maintenance only a warning. In a
                fresh home it makes a key first, which fails where another call is at it. The exit code is the command's
    255         (ssh's own failure) the command is run again, with the rest of its input, up to 10 times, 5 s apart
                (here `attempts`, 0.2 s); then exit code 255

What goes wrong, `mishaps`: for a call of `verb` (default ssh) to `worker` with the text `match`, once or some `times`
(0: always). late: seconds before anything happens; message: what gcloud or ssh says and fails with; out: what describe
answers; bytes: the connection drops after so many, which the program there notices when it writes next; input: only so
many bytes (-1: all) get there before it drops, and no answer comes back.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CLOUD = Path(os.environ["FAKE_CLOUD"])
SSH_FAILED = 255


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def error(verb: str, text: str, code: int = 1) -> int:
    say(f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) {text}")
    return code


def mishap(tpu: dict, verb: str, worker: int, text: str) -> dict:
    """Returns the next thing that goes wrong with a call like this, {} if nothing does."""
    for entry in tpu["mishaps"]:
        entry = {"verb": "ssh", "worker": worker, "match": "", "times": 1, **entry}
        if (entry["verb"], entry["worker"]) == (verb, worker) and entry["match"] in text:
            if entry["times"] == 0:
                return entry
            for number in range(entry["times"]):
                with contextlib.suppress(FileExistsError):
                    (CLOUD / f"mishap-{entry['id']}-{number}").touch(exist_ok=False)
                    return entry
    return {}


def describe(tpu: dict) -> int:
    wrong = mishap(tpu, "describe", 0, "")
    if "out" in wrong:
        print(wrong["out"])
        return 0
    if wrong:
        say(wrong["message"])
        return 1
    place = f"projects/{tpu['project']}/locations/{tpu['zone']}/nodes/{tpu['name']}"
    if tpu["state"] == "DELETED":
        return error("describe", f"NOT_FOUND: Resource '{place}' was not found")
    workers = tpu["workers"]
    node = {"name": place, "id": "1234567890", "apiVersion": "V2", "state": tpu["state"], "health": tpu["health"]}
    node |= {"acceleratorType": f"v5litepod-{4 * workers}", "runtimeVersion": "v2-alpha-tpuv5-lite"}
    node |= {"schedulingConfig": {"spot": tpu.get("spot", False)}, **tpu.get("node", {})}
    node["networkConfigs"] = [{}, {}]
    ends = [(f"34.0.0.{worker}", f"10.{network}.0.{worker}") for worker in range(workers) for network in range(2)]
    node["networkEndpoints"] = [{"accessConfig": {"externalIp": outer}, "ipAddress": inner} for outer, inner in ends]
    print(json.dumps(node))
    return 0


def read(size: int) -> bytes:
    """Returns so much of the input (-1: all), and leaves the rest to the next program."""
    found = b""
    while len(found) != size and (more := os.read(0, min(size - len(found), 1 << 16) if size > 0 else 1 << 16)):
        found += more
    return found


def connect(tpu: dict, worker: int, command: str, options: list[str]) -> int:
    """Runs one ssh. Returns its exit code."""
    wrong = mishap(tpu, "ssh", worker, command)
    time.sleep(wrong.get("late", 0))
    if "message" in wrong:
        say(wrong["message"])
        return SSH_FAILED
    words = [CLOUD / "bin/ssh", *options, f"worker-{worker}", command]
    streams = {"stdout": subprocess.PIPE, "start_new_session": True}
    if "input" in wrong:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, **streams)
        process.communicate(read(wrong["input"]))
    else:
        process, left = subprocess.Popen(words, **streams), wrong.get("bytes", 1 << 60)
        while left:
            chunk = os.read(process.stdout.fileno(), min(left, 1 << 16))
            if not chunk:
                return process.wait()
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            left -= len(chunk)
        process.stdout.close()
    say("client_loop: send disconnect: Broken pipe")
    return SSH_FAILED


def ssh(tpu: dict, worker: int, command: str, options: list[str]) -> int:
    key = CLOUD / "made-key"
    if not key.exists():
        with key.with_suffix(".lock").open("w") as new:
            try:
                fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return error("ssh", "[/usr/bin/ssh-keygen] exited with return code [1].")
            time.sleep(0.2)
            key.touch()
    for attempt in range(tpu.get("attempts", 2)):
        if attempt:
            say("Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].")
            time.sleep(0.2)
        say(f"SSH: Attempting to connect to worker {worker}...")
        code = connect(tpu, worker, command, options)
        if code != SSH_FAILED:
            return code
    return error("ssh", "[/usr/bin/ssh] exited with return code [255].", SSH_FAILED)


def main() -> int:
    with (CLOUD / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    tpu = json.loads((CLOUD / "tpu.json").read_text())
    *group, verb, name = sys.argv[1:6]
    flags = dict(word[2:].partition("=")[::2] for word in sys.argv[6:])
    assert [*group, name] == ["compute", "tpus", "tpu-vm", tpu["name"]], sys.argv
    assert set(flags) <= {"zone", "project", "quiet", "format", "worker", "command", "ssh-flag", "internal-ip"}, flags
    if verb == "describe":
        assert flags["format"] == "json"
        return describe(tpu)
    if tpu["state"] in ("PREEMPTED", "TERMINATED"):
        return error(verb, f'This TPU has terminal state "{tpu["state"]}", so it cannot be used anymore.')
    if tpu["state"] != "READY":
        return error(verb, f'This TPU has state "{tpu["state"]}", so it cannot be currently connected to.')
    worker = int(flags["worker"])
    assert verb == "ssh" and 0 <= worker < tpu["workers"]
    options = [word.partition("=")[2] for word in sys.argv[6:] if word.startswith("--ssh-flag=")]
    return ssh(tpu, worker, flags["command"], options)


if __name__ == "__main__":
    sys.exit(main())
