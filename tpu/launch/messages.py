"""What gcloud, ssh and a trainer's log say when something fails, what it means, and what to do.

Only the standard library, Python 3.9 or later.
"""

from __future__ import annotations

import re

GET_PYTHON = (
    "CPython 3.11, 3.12 or 3.13 with venv and ensurepip is needed, on Ubuntu 24.04 `sudo apt-get install -y"
    " python3.12-venv`, on 22.04 `sudo add-apt-repository -y ppa:deadsnakes/ppa && sudo apt-get install -y python3.11"
    " python3.11-venv`, or give make PYTHON=/path/to/python3.11"
)
# What the log of a failed run contains -> what it means and what to do.
KNOWN_MESSAGES = (
    (
        r"Failed to get global TPU topology",
        "libtpu did not find the chips of the other workers: the run must be started on all workers of the slice (do"
        " not set TPU_PROCESS_BOUNDS and the like), and the VM's software version must be the one for its TPU type"
        " (v6e: v2-alpha-tpuv6e); if both are so, recreate the TPU",
    ),
    (
        r"TPU is already in use by process|/dev/vfio/\d+\)?: Device or resource busy|/dev/accel\d+.*(?:busy|in use)",
        "another process on this worker holds the TPU, and none of a run of ours: find it there with"
        " `sudo lsof -w /dev/accel* /dev/vfio/*` and end it, it may be another user's",
    ),
    (
        r"RESOURCE_EXHAUSTED|Ran out of memory in memory space hbm|Out of memory while trying to allocate",
        "the program does not fit into the TPU's memory (HBM): a smaller --batch-size in ARGS, or more chips",
    ),
    (
        r"CPython 3\.11, 3\.12 or 3\.13 is needed|python3\.1[123]: (?:command )?not found|ensurepip is not available",
        f"there is no complete Python 3.11, 3.12 or 3.13 on this worker: {GET_PYTHON}; install it on all workers",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk of this worker is full: remove what is not needed there",
    ),
    (
        r"^(?:\[worker \d+\] )?make: \*\*\* \[.*\] (?:Killed|Error 137)",
        "a process was killed from outside, most likely since the worker ran out of memory (not the TPU's): fewer"
        " --workers in ARGS; `sudo dmesg | grep -i oom` there tells",
    ),
)
# What gcloud's errors contain -> whether asking again is useless, what it means and what to do.
GCLOUD_ERRORS = (
    (
        r"\b429\b|(?i:rate.?limit)|Quota exceeded for quota metric|\b50[0234]\b|UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED",
        False,
        "Google's API is busy",
    ),
    (
        r"no more capacity|ZONE_RESOURCE_POOL_EXHAUSTED|Insufficient reserved capacity|\"code\": 8\b",
        True,
        "the zone has no free TPUs of this type now: try later, another zone, or wait for one with CREATE=",
    ),
    (
        r"(?i)quota (?:limit )?'|quota.{0,40}exceeded|exceeded.{0,40}quota|quota_exceeded",
        True,
        "your project's quota of this TPU type is used up or 0 in this zone: see and raise it at"
        " https://console.cloud.google.com/iam-admin/quotas",
    ),
    (
        r"active account|Reauthentication|refreshing your current auth tokens|UNAUTHENTICATED|invalid_grant",
        True,
        "gcloud is not logged in: gcloud auth login",
    ),
    (
        r"has not been used in project|SERVICE_DISABLED|is disabled",
        True,
        "the Cloud TPU API is not enabled in this project: gcloud services enable tpu.googleapis.com",
    ),
    (
        r"(?:attribute|property) \[(?:core/)?project\]",
        True,
        "no project is known: give PROJECT=, or gcloud config set project",
    ),
    (
        r"(?:attribute|property) \[(?:compute/)?zone\]",
        True,
        "no zone is known: give ZONE=, or gcloud config set compute/zone",
    ),
    (
        r"PERMISSION_DENIED|Permission denied on",
        True,
        "your account may not use TPUs in this project, or the zone's name is wrong: look at the zone, and for the role"
        " TPU Admin at gcloud projects get-iam-policy",
    ),
    (r"INVALID_ARGUMENT|Invalid value|unrecognized arguments", True, "gcloud rejects one of these values"),
    (r"problem connecting|Unable to find the server|Network is unreachable", False, "Google's API cannot be reached"),
)
# The same for ssh. {host} is one worker.
SSH_ERRORS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
        True,
        "{host} is unknown to ssh or shows another host key than before: log in to it once with ssh and look why; a VM"
        " that was created again has a new key",
    ),
    (r"python3: (?:command )?not found", True, "{host} has no python3"),
    (r"future feature annotations|invalid syntax", True, "{host} has a python3 that is older than 3.8"),
    (
        r"gcloud crashed|unrecognized arguments",
        True,
        "gcloud does not know the command: gcloud components update",
    ),
    (
        r"Permission denied \(",
        False,
        "{host} does not accept your ssh key: if it has a passphrase, is it in the agent (ssh-add)? are you allowed?",
    ),
    (r"Could not resolve hostname", False, "{host} is not a name that ssh can resolve"),
)


def last_line(text: str) -> str:
    """Returns what gcloud said last, without its advice on how to log in."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    line = (errors or lines or ["no message"])[-1]
    message = re.search(r'"message":\s*"((?:[^"\\]|\\.)*)"', text)  # an operation's error is printed as JSON
    return f"{line} {message[1]}" if message and line.endswith("{") else line


def explain_ssh(text: str, host: str) -> tuple[bool, str]:
    """Returns whether another attempt is useless after this error of ssh or gcloud, and what it says."""
    for pattern, final, sentence in SSH_ERRORS:
        for line in text.splitlines():
            if re.search(pattern, line):
                return final, f"{sentence.format(host=host)} ({line.strip()})"
    lines = re.findall(r"^(?:ssh: .*|client_loop.*|.*[Cc]onnection .*|nothing heard.*)$", text, re.MULTILINE)
    return False, lines[-1].strip() if lines else last_line(text)


def explain_log(text: str) -> list[str]:
    """Returns what is known about the end of a failed run's log."""
    return [sentence for pattern, sentence in KNOWN_MESSAGES if re.search(pattern, text, re.MULTILINE)]
