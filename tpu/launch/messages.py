"""What gcloud, ssh and a trainer's log say when something fails, what it means, and what to do.

The tables have patterns, and what each means and what to do.
"""

from __future__ import annotations

import re

GET_PYTHON = (
    "CPython 3.11, 3.12 or 3.13 with venv, ensurepip and its shared library is needed, on Ubuntu"
    " 24.04 `sudo apt-get install -y python3.12-venv libpython3.12`, on 22.04"
    " `sudo add-apt-repository -y ppa:deadsnakes/ppa &&"
    " sudo apt-get install -y python3.11 python3.11-venv libpython3.11` (as GET_PYTHON=1 does),"
    " or give make PYTHON=/path/to/python3.11"
)

# ---- the log of a failed run -------------------------------------------------------------------

# GET_PYTHON stands for the text of that name.
LOG = {
    r"Failed to get global TPU topology": (
        "libtpu did not find the chips of the other workers: the run must be started on all workers"
        " of the slice (do not set TPU_PROCESS_BOUNDS and the like), and the VM's software version"
        " must be the one for its TPU type (v6e: v2-alpha-tpuv6e); if both are so, recreate the TPU"
    ),
    (
        r"TPU is already in use by process"
        r"|/dev/vfio/\d+\)?: Device or resource busy"
        r"|/dev/accel\d+.*(?:busy|in use)"
    ): (
        "another process on this worker holds the TPU, and none of a run of ours: find it there"
        " with `sudo lsof -w /dev/accel* /dev/vfio/*` and end it, it may be another user's"
    ),
    r"/tmp/libtpu_lockfile|probably owned by another user": (
        "libtpu's lock belongs to a process that is alive or has died, perhaps another user's: see"
        " what holds the chips there with `sudo lsof -w /dev/accel* /dev/vfio/*`; where it is"
        " nothing, `sudo rm /tmp/libtpu_lockfile`"
    ),
    (
        r"RESOURCE_EXHAUSTED"
        r"|Ran out of memory in memory space hbm"
        r"|Out of memory while trying to allocate"
    ): (
        "the program does not fit into the TPU's memory (HBM): a smaller --batch-size in ARGS, or"
        " more chips"
    ),
    (
        r"CPython 3\.11, 3\.12 or 3\.13 is needed"
        r"|python3\.1[123]: (?:command )?not found"
        r"|ensurepip is not available"
    ): (
        "there is no complete Python 3.11, 3.12 or 3.13 on this worker: GET_PYTHON; install it on"
        " all workers"
    ),
    r"libpython3\.\d+\.so\.1\.0": (
        "torch_xla is linked to this library, and the Python of this worker comes without it, as"
        " those of Ubuntu, Debian and deadsnakes do: GET_PYTHON; install it on all workers"
    ),
    r"Invalid TPU external name": (
        "this libtpu does not know these chips; the pinned one does not know TPU7x, which needs"
        " LIBTPU_VERSION=0.0.51"
    ),
    r"No space left on device|Disk quota exceeded": (
        "the disk of this worker is full: remove what is not needed there"
    ),
    r"Unknown command line flag": (
        "this worker's libtpu does not know a flag of LIBTPU_INIT_ARGS; if it is"
        " fibers_default_thread_stack_size, which the zoo adds, add --safe-forms to ARGS, which"
        ' does without (docs/tpu.md, "When the compiler dies")'
    ),
}
# A signal that ended the trainer, and what of its log says the same.
CRASHES = (132, 135, 139)  # SIGILL, SIGBUS, SIGSEGV
CRASH = r"^\*\*\* SIG(?:SEGV|BUS|ILL) .*received"
CRASHED = (
    'the process died without a traceback. If the last line before is "compiling …", it was libtpu,'
    ' the compiler, that died of a step: add --safe-forms to ARGS, or ENV="XLA_ZOO_SAFE_FORMS=1",'
    " for forms that ask less of it, and leave --remat out"
    ' (docs/tpu.md, "When the compiler dies")'
)
KILLED = 137
WAS_KILLED = (
    "a process was killed from outside, most likely since the worker ran out of memory (not the"
    " TPU's): fewer --workers in ARGS; `sudo dmesg | grep -i oom` there tells"
)

# ---- gcloud ------------------------------------------------------------------------------------

# Errors that may pass; so may one that is in no table. gcloud's own line is shown with each.
CLOUD_TRANSIENT = (
    r"\b429\b|(?i:rate.?limit)|Quota exceeded for quota metric",
    r"\b50[0234]\b|UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED",
    r"problem connecting|Unable to find the server",
    r"Network is unreachable|Connection (?:aborted|reset)",
    r"Max retries exceeded",
)
# Errors that will not pass, with what gcloud does not say: the names that make has for its flags,
# what else may be meant.
CLOUD_FINAL = {
    (
        r"active account|Reauthentication|refreshing your current auth tokens"
        r"|UNAUTHENTICATED|invalid_grant"
    ): "gcloud is not logged in: gcloud auth login",
    r"has not been used in project|SERVICE_DISABLED|is disabled": (
        "gcloud services enable tpu.googleapis.com"
    ),
    r"(?:attribute|property) \[(?:core/)?project\]": "give PROJECT=",
    r"(?:attribute|property) \[(?:compute/)?zone\]": "give ZONE=",
    r"PERMISSION_DENIED|Permission denied on": "or the zone's name is wrong",
    r"INVALID_ARGUMENT|Invalid value|unrecognized arguments": (
        "a value of TPU=, ZONE=, PROJECT= or --gcloud-flag is wrong"
    ),
}

# ---- ssh ---------------------------------------------------------------------------------------

# HOST stands for the name of one worker.
SSH_FINAL = {
    r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed": (
        "HOST is unknown to ssh or shows another host key than before: log in to it once with ssh"
        " and look why; a VM that was created again has a new key"
    ),
    r"python3: (?:command )?not found": "HOST has no python3",
    r"future feature annotations|invalid syntax": "HOST has a python3 that is older than 3.8",
    (
        r"gcloud crashed \((?:AttributeError|TypeError|KeyError|\w*ImportError|ModuleNotFoundError)"
        r"|unrecognized arguments"
    ): "gcloud does not know the command: gcloud components update",
}
SSH_TRANSIENT = {
    r"Permission denied \(": (
        "HOST does not accept your ssh key: if it has a passphrase, is it in the agent (ssh-add)?"
        " are you allowed?"
    ),
    r"Could not resolve hostname": "HOST is not a name that ssh can resolve",
}
# Other lines that are about the connection.
CONNECTION = r"^(?:ssh: .*|client_loop.*|.*[Cc]onnection .*|nothing heard.*)$"


def last_line(text: str) -> str:
    """Returns what gcloud said last, without its advice on how to log in."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    line = (errors or lines or ["no message"])[-1]
    if line.endswith("{"):  # an operation's error is printed as JSON
        message = re.search(r'"message":\s*"((?:[^"\\]|\\.)*)"', text)
        if message:
            return f"{line} {message[1]}"
    return line


def explain_cloud(text: str) -> tuple[bool, str]:
    """Returns whether another attempt is useless after this error of gcloud, and what it says."""
    said = last_line(text)
    for pattern in CLOUD_TRANSIENT:
        if re.search(pattern, text):
            return False, said
    for pattern, meaning in CLOUD_FINAL.items():
        if re.search(pattern, text):
            return True, f"{said} ({meaning})"
    return False, said


def explain_ssh(text: str, host: str) -> tuple[bool, str]:
    """Returns whether another attempt is useless after this error of ssh or gcloud, and what it
    says."""
    final = explain_with(SSH_FINAL, text, host)
    if final:
        return True, final
    transient = explain_with(SSH_TRANSIENT, text, host)
    if transient:
        return False, transient
    lines = re.findall(CONNECTION, text, re.MULTILINE)
    return False, lines[-1].strip() if lines else last_line(text)


def explain_with(table: dict[str, str], text: str, host: str) -> str:
    """Returns what the first pattern means that is found in a text, and the line that has it; "":
    none is found."""
    for pattern, meaning in table.items():
        found = re.search(f"^.*(?:{pattern}).*$", text, re.MULTILINE)
        if found:
            return f"{meaning.replace('HOST', host)} ({found[0].strip()})"
    return ""


def explain_log(text: str, code: int = 0) -> list[str]:
    """Returns what is known about the end of a failed run: of its log, and of the trainer's exit
    code."""
    found = []
    for pattern, meaning in LOG.items():
        if re.search(pattern, text, re.MULTILINE):
            found.append(meaning.replace("GET_PYTHON", GET_PYTHON))
    if code in CRASHES or re.search(CRASH, text, re.MULTILINE):
        found.append(CRASHED)
    if code == KILLED:
        found.append(WAS_KILLED)
    return found
