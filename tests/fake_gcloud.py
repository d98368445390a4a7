"""Stands in for gcloud: a TPU VM whose workers are hosts that `ssh` in $FAKE_CLOUD/bin reaches.

$FAKE_CLOUD/tpu.json says what the TPU is and what goes wrong; $FAKE_CLOUD/calls gets the arguments
of each call. What is imitated of the real `gcloud compute tpus tpu-vm describe|ssh` (GA, as of
2025):

    describe    JSON with state, health, acceleratorType, an entry of networkEndpoints for each
                worker in each of its two networks; exit code 1 and
                `ERROR: (gcloud.compute.tpus.tpu-vm.describe) …` for an error
    ssh         asks the API first: a PREEMPTED or STOPPED TPU is exit code 1, one in maintenance
                only a warning. In a fresh home it makes a key first, which fails where another
                call is at it. The exit code is the command's
    255         (ssh's own failure) the command is run again, with the rest of its input, up to 10
                times, 5 s apart (here `attempts`, 0.2 s); then exit code 255

Workers are reached as worker-<i>. What goes wrong stands in `mishaps`, each for a call of `verb`
(default ssh) to `worker` with the text `match`, once or some `times` (0: always):

    late        seconds before anything happens
    message     what gcloud or ssh says and fails with
    out         what describe answers
    bytes       the connection drops after so many, which the program there notices when it writes
                next
    input       only so many bytes (-1: all) get there before it drops, and no answer comes back
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
BLOCK = 1 << 16  # bytes that are read at once
FLAGS = {
    "zone",
    "project",
    "quiet",
    "format",
    "worker",
    "command",
    "ssh-flag",
    "internal-ip",
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def error(verb: str, text: str, code: int = 1) -> int:
    """Says an error as gcloud does. Returns the exit code."""
    say(f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) {text}")
    return code


def next_mishap(tpu: dict, verb: str, worker: int, text: str) -> dict:
    """Returns the next thing that goes wrong with a call like this, {} if nothing does.

    Counts it in the files mishap-<id>-<number>.
    """
    for stated in tpu["mishaps"]:
        mishap = {"verb": "ssh", "worker": worker, "match": "", "times": 1, **stated}
        if mishap["verb"] != verb or mishap["worker"] != worker:
            continue
        if mishap["match"] not in text:
            continue
        if mishap["times"] == 0:
            return mishap
        for number in range(mishap["times"]):
            with contextlib.suppress(FileExistsError):
                (CLOUD / f"mishap-{mishap['id']}-{number}").touch(exist_ok=False)
                return mishap
    return {}


def describe(tpu: dict) -> int:
    """Prints what the TPU is. Returns the exit code."""
    mishap = next_mishap(tpu, "describe", 0, "")
    if "out" in mishap:
        print(mishap["out"])
        return 0
    if mishap:
        say(mishap["message"])
        return 1

    name = f"projects/{tpu['project']}/locations/{tpu['zone']}/nodes/{tpu['name']}"
    if tpu["state"] == "DELETED":
        return error("describe", f"NOT_FOUND: Resource '{name}' was not found")

    endpoints = []
    for worker in range(tpu["workers"]):
        for network in range(2):
            external = {"externalIp": f"34.0.0.{worker}"}
            internal = f"10.{network}.0.{worker}"
            endpoints.append({"accessConfig": external, "ipAddress": internal})
    node = {
        "name": name,
        "id": "1234567890",
        "apiVersion": "V2",
        "state": tpu["state"],
        "health": tpu["health"],
        "acceleratorType": f"v5litepod-{4 * tpu['workers']}",
        "runtimeVersion": "v2-alpha-tpuv5-lite",
        "schedulingConfig": {"spot": tpu.get("spot", False)},
        **tpu.get("node", {}),
        "networkConfigs": [{}, {}],
        "networkEndpoints": endpoints,
    }
    print(json.dumps(node))
    return 0


def read(size: int) -> bytes:
    """Returns so many bytes of the input (-1: all), and leaves the rest to the next program."""
    found = b""
    while len(found) != size:
        wanted = BLOCK
        if size > 0:
            wanted = min(size - len(found), BLOCK)
        block = os.read(0, wanted)
        if not block:
            break
        found += block
    return found


def connect(tpu: dict, worker: int, command: str, options: list[str]) -> int:
    """Runs one ssh. Returns its exit code."""
    mishap = next_mishap(tpu, "ssh", worker, command)
    time.sleep(mishap.get("late", 0))
    if "message" in mishap:
        say(mishap["message"])
        return SSH_FAILED

    words = [CLOUD / "bin/ssh", *options, f"worker-{worker}", command]
    if "input" in mishap:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        process.communicate(read(mishap["input"]))
    else:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        if copy_output(process, mishap.get("bytes", 1 << 60)):
            return process.wait()
        process.stdout.close()
    say("client_loop: send disconnect: Broken pipe")
    return SSH_FAILED


def copy_output(process: subprocess.Popen, most: int) -> bool:
    """Copies at most so many bytes of its output. Returns whether that was all."""
    left = most
    while left:
        block = os.read(process.stdout.fileno(), min(left, BLOCK))
        if not block:
            return True
        sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()
        left -= len(block)
    return False


def make_key() -> bool:
    """Makes a key in a fresh home. Returns False where another call is at it."""
    key = CLOUD / "made-key"
    if key.exists():
        return True
    with key.with_suffix(".lock").open("w") as new:
        try:
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        time.sleep(0.2)
        key.touch()
    return True


def ssh(tpu: dict, worker: int, command: str, options: list[str]) -> int:
    """Runs a command on a worker, again where ssh itself fails. Returns the exit code."""
    if not make_key():
        return error("ssh", "[/usr/bin/ssh-keygen] exited with return code [1].")

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
    assert group == ["compute", "tpus", "tpu-vm"], sys.argv
    assert name == tpu["name"], sys.argv
    flags = {}
    ssh_flags = []
    for word in sys.argv[6:]:
        flag, _, value = word[2:].partition("=")
        flags[flag] = value
        if word.startswith("--ssh-flag="):
            ssh_flags.append(value)
    assert set(flags) <= FLAGS, flags

    if verb == "describe":
        assert flags["format"] == "json"
        return describe(tpu)

    state = tpu["state"]
    if state in ("PREEMPTED", "TERMINATED"):
        gone = f'This TPU has terminal state "{state}", so it cannot be used anymore.'
        return error(verb, gone)
    if state != "READY":
        not_now = f'This TPU has state "{state}", so it cannot be currently connected to.'
        return error(verb, not_now)

    worker = int(flags["worker"])
    assert verb == "ssh"
    assert 0 <= worker < tpu["workers"]
    return ssh(tpu, worker, flags["command"], ssh_flags)


if __name__ == "__main__":
    sys.exit(main())
