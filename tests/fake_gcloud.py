"""Stands in for gcloud in tests/test_launch.py: a TPU VM whose workers are local processes with a home folder each.

$FAKE_CLOUD/tpu.json says what the TPU is and what goes wrong; $FAKE_CLOUD/calls gets the arguments of each call. What
is imitated of the real `gcloud compute tpus tpu-vm describe|ssh|scp` (GA, as of 2025):

    describe    JSON with state, health, acceleratorType, one entry of networkEndpoints for each worker and network;
                exit code 1 and `ERROR: (gcloud.compute.tpus.tpu-vm.describe) …` for an error
    ssh, scp    ask the API first: a PREEMPTED or STOPPED TPU is exit code 1, one in maintenance only a warning
    ssh         the command line is given to the shell of the user's account; what is on standard error there and here
                is mixed; no variable of this environment arrives; the exit code is the command's
    255         (ssh's own failure) the command is run again, without its input, up to 10 times with 5 s between (here
                `attempts` and `pause`); then exit code 255
    a drop      cuts the output off after some bytes; the program there notices when it writes next
    latency     every call takes its time
"""

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


def describe(tpu: dict) -> int:
    if tpu.get("describe_error"):
        say(tpu["describe_error"])
        return 1
    place = f"projects/{tpu['project']}/locations/{tpu['zone']}/nodes/{tpu['name']}"
    if tpu["state"] == "DELETED":
        return error("describe", f"NOT_FOUND: Resource '{place}' was not found")
    networks = tpu.get("networks", 1)
    node = {"name": place, "id": "1234567890", "apiVersion": "V2", "state": tpu["state"], "health": tpu["health"]}
    node |= {"acceleratorType": f"v5litepod-{4 * tpu['workers']}", "runtimeVersion": "v2-alpha-tpuv5-lite"}
    node |= {"schedulingConfig": {"spot": tpu.get("spot", False)}, **tpu.get("node", {})}
    if networks > 1:
        node["networkConfigs"] = [{}] * networks
    ends = [(f"34.0.0.{worker}", f"10.{net}.0.{worker}") for worker in range(tpu["workers"]) for net in range(networks)]
    node["networkEndpoints"] = [{"accessConfig": {"externalIp": outer}, "ipAddress": inner} for outer, inner in ends]
    print(json.dumps(node))
    return 0


def mishap(tpu: dict, worker: int, text: str) -> dict:
    """The next thing that goes wrong with a call like this, once."""
    for number, entry in enumerate(tpu.get("mishaps", [])):
        used = CLOUD / f"mishap-{number}"
        if entry["worker"] == worker and entry["match"] in text and not used.exists():
            used.touch()
            return entry
    return {}


def connect(tpu: dict, worker: int, command: str, first: bool) -> int:
    """One ssh: its exit code."""
    if worker in tpu.get("unreachable", []):
        say(f"ssh: connect to host 34.0.0.{worker} port 22: Connection timed out")
        return SSH_FAILED
    wrong = mishap(tpu, worker, command)
    if wrong.get("how") == "before":
        say("Connection closed by 34.0.0.1 port 22")
        return SSH_FAILED
    home = CLOUD / f"home-{worker}"
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        cwd=home,
        env={"HOME": str(home), "PATH": tpu["path"], "USER": "me", **tpu.get("worker_environment", {})},
        stdin=None if first else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    limit = 0 if wrong.get("how") == "answer lost" else wrong.get("bytes", 1 << 60)
    while True:
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if wrong.get("how") == "answer lost" and chunk:
            continue
        if not chunk and not (wrong and limit == 0):
            return process.wait()
        sys.stdout.buffer.write(chunk[:limit])
        sys.stdout.buffer.flush()
        limit -= len(chunk)
        if limit <= 0:
            process.stdout.close()
            say("client_loop: send disconnect: Broken pipe")
            return SSH_FAILED


def ssh(tpu: dict, worker: int, command: str) -> int:
    for attempt in range(tpu.get("attempts", 2)):
        if attempt:
            say("Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].")
            time.sleep(tpu.get("pause", 0.2))
        say(f"SSH: Attempting to connect to worker {worker}...")
        code = connect(tpu, worker, command, attempt == 0)
        if code != SSH_FAILED:
            return code
    return error("ssh", "[/usr/bin/ssh] exited with return code [255].", SSH_FAILED)


def scp(tpu: dict, worker: int, sources: list[str], target: str) -> int:
    name, _, folder = target.partition(":")
    assert name == tpu["name"]
    say(f"SCP: Attempting to connect to worker {worker}...")
    wrong = mishap(tpu, worker, "scp")
    if worker in tpu.get("unreachable", []):
        say(f"ssh: connect to host 34.0.0.{worker} port 22: Connection timed out")
        return error("scp", "[/usr/bin/scp] exited with return code [255].", SSH_FAILED)
    if "message" in wrong:
        say(wrong["message"])
        return error("scp", "[/usr/bin/scp] exited with return code [1].")
    import shutil  # only here: it takes longer to import than most calls last

    for source in sources:
        copy = CLOUD / f"home-{worker}" / folder / Path(source).name
        shutil.copy(source, copy)
        if wrong:
            os.truncate(copy, copy.stat().st_size // 2)
            return error("scp", "[/usr/bin/scp] exited with return code [255].", SSH_FAILED)
    return 0


def main() -> int:
    arguments = sys.argv[1:]
    with (CLOUD / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    tpu = json.loads((CLOUD / "tpu.json").read_text())
    time.sleep(tpu.get("latency", 0))
    assert arguments[:3] == ["compute", "tpus", "tpu-vm"], arguments
    verb, *rest = arguments[3:]
    flags = dict(word[2:].partition("=")[::2] for word in rest if word.startswith("--"))
    names = [word for word in rest if not word.startswith("--")]
    assert set(flags) <= {"zone", "project", "quiet", "format", "worker", "command", "ssh-flag", "scp-flag"}, flags
    if flags.get("zone", tpu["zone"]) != tpu["zone"]:
        return error(verb, f"NOT_FOUND: Resource 'locations/{flags['zone']}/nodes/{names[0]}' was not found")
    if verb == "describe":
        assert names == [tpu["name"]] and flags["format"] == "json"
        return describe(tpu)
    if tpu["state"] in ("PREEMPTED", "TERMINATED"):
        return error(verb, f'This TPU has terminal state "{tpu["state"]}", so it cannot be used anymore.')
    if tpu["state"] != "READY":
        return error(verb, f'This TPU has state "{tpu["state"]}", so it cannot be currently connected to.')
    worker = int(flags["worker"])
    assert 0 <= worker < tpu["workers"]
    if verb == "scp":
        return scp(tpu, worker, names[:-1], names[-1])
    assert verb == "ssh" and names == [tpu["name"]]
    return ssh(tpu, worker, flags["command"])


if __name__ == "__main__":
    sys.exit(main())
