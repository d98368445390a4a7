"""What a run gets from this machine: the working tree, the arguments of `make train`, and the run's
variables."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from errors import InputError

BUNDLE_MEGABYTES = 512
FOLDERS_NAMED = 3  # of a tree that is too large
# Variables that travel by themselves.
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
# Files and folders, in small letters.
SECRET_FILES = (
    ".env",
    ".envrc",
    ".env.*",
    "*.pem",
    "*.p12",
    "*.pfx",
    "id_rsa",
    "id_ecdsa",
    "id_ed25519",
    ".netrc",
)
# Words in, and ends of, the names of variables.
SECRET_WORDS = {"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "CREDENTIALS"}
SECRET_ENDS = ("PASSWD", "PASSWORD", "PWD")
ACCOUNT_FILE = 1 << 20  # most bytes; the JSON of an account's key has some 2,400
# In "type" of Google's credentials: service_account, gdch_service_account,
# external_account_authorized_user and the like.
ACCOUNTS = ("service_account", "authorized_user", "external_account")
OF_THIS_MACHINE = ("TPU", "ZONE", "PROJECT", "ENV", "RUN", "RETRIES")  # make's variables
VARIABLE = r"[A-Za-z_]\w*"
# What train/common/run_folder.py takes from it where the working tree has no .git.
GIT_VARIABLE = "XLA_ZOO_GIT"


@dataclass
class Bundle:
    """The working tree as it is sent.

    Attributes:
        name: its hash.
        content: a tar.gz.
        files: how many.
        left_out: the files that were left out since they look like secrets.
        links: those that point out of the tree, "data -> /mnt/data": on a worker they mean what is
            there, or nothing.
    """

    name: str
    content: bytes
    files: int
    left_out: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)


# ---- the working tree --------------------------------------------------------------------------


def make_bundle(folder: Path) -> Bundle:
    """Packs the working tree: tracked and untracked files, not the ignored and the deleted ones,
    and no secrets.

    The same tree gives the same bytes. InputError: not a git repository with a Makefile, a
    submodule, more than BUNDLE_MEGABYTES.
    """
    if not (folder / "Makefile").exists():
        raise InputError(f"{folder} has no Makefile; start a run from the project's folder")
    sizes = {}
    left_out = []
    links = []
    for name in listed(folder):
        path = os.path.join(os.fsencode(folder), name)
        if not os.path.lexists(path):
            continue
        secret = find_secret(path, name)
        if secret:
            left_out.append(shown(secret))
            continue
        if leads_out(path, name):
            links.append(f"{shown(name)} -> {shown(os.readlink(path))}")
        sizes[name] = os.lstat(path).st_size
    check_size(sizes)

    content = pack(folder, list(sizes))
    return Bundle(
        name=hashlib.sha256(content).hexdigest(),
        content=content,
        files=len(sizes),
        left_out=list(dict.fromkeys(left_out)),
        links=links,
    )


def listed(folder: Path) -> list[bytes]:
    """Returns the names of the files that git tracks or does not ignore, sorted, as git has them:
    bytes."""
    if shutil.which("git") is None:
        raise InputError(
            "git is not installed here, which lists the files that a run needs; install it"
        )
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    result = subprocess.run(command, cwd=folder, capture_output=True)
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip()
        raise InputError(f"git cannot list the files of {folder}: {said}")
    return sorted({name for name in result.stdout.split(b"\0") if name})


def git_state(folder: Path) -> dict[str, str]:
    """Returns the variable that tells a run of which commit and version its files are; {} where
    that is not known."""
    questions = {
        "commit": ["rev-parse", "HEAD"],
        "changes": ["status", "--porcelain", "-uno"],
        "version": ["describe", "--tags", "--always", "--dirty"],
    }
    said = {}
    for name, question in questions.items():
        result = subprocess.run(["git", *question], cwd=folder, capture_output=True, text=True)
        if result.returncode:  # no commit yet, say
            return {}
        said[name] = result.stdout.strip()
    dirty = bool(said.pop("changes"))
    return {GIT_VARIABLE: json.dumps({**said, "dirty": dirty})}


def shown(name: bytes) -> str:
    """Returns a file's name for a message."""
    return name.decode("utf-8", "backslashreplace")


def find_secret(path: bytes, name: bytes) -> bytes:
    """Returns what keeps a file on this machine since it looks like a secret: a folder above it,
    with a slash at its end, or the file itself, also an account's key. b"": nothing does."""
    path_so_far = b""
    for component in name.split(b"/"):
        path_so_far += component
        if is_secret_file(component):
            return name if path_so_far == name else path_so_far + b"/"
        path_so_far += b"/"
    return name if is_account(path) else b""


def is_secret_file(component: bytes) -> bool:
    """Returns whether a file or folder is named as those with secrets are."""
    small = os.fsdecode(component).lower()
    return any(fnmatchcase(small, pattern) for pattern in SECRET_FILES)


def is_account(path: bytes) -> bool:
    """Returns whether a file has Google's credentials in JSON."""
    status = os.lstat(path)
    if not path.lower().endswith(b".json") or not stat.S_ISREG(status.st_mode):
        return False
    if status.st_size > ACCOUNT_FILE:
        return False
    try:
        with open(path, encoding="utf-8-sig") as file:  # an editor may have put a mark before it
            found = json.load(file)
    except (OSError, ValueError):
        return False

    kind = found.get("type") if isinstance(found, dict) else None
    if not isinstance(kind, str):
        return False
    return any(account in kind for account in ACCOUNTS)


def leads_out(path: bytes, name: bytes) -> bool:
    """Returns whether a file is a link to something that is not in the working tree."""
    if not os.path.islink(path):
        return False
    target = os.readlink(path)
    if os.path.isabs(target):
        return True
    from_root = os.path.normpath(os.path.join(os.path.dirname(name), target))
    return from_root.split(b"/")[0] == b".."


def check_size(sizes: dict[bytes, int]) -> None:
    """Raises InputError for a tree that is too large, with the folders that make it so."""
    total = sum(sizes.values())
    if total <= BUNDLE_MEGABYTES << 20:
        return
    folders = Counter()
    for name, size in sizes.items():
        top, slash, _ = name.partition(b"/")
        folders[top + slash] += size
    largest = []
    for name, size in folders.most_common(FOLDERS_NAMED):
        largest.append(f"{size >> 20} MB in {shown(name)}")
    raise InputError(
        f"the working tree has {total >> 20} MB, more than {BUNDLE_MEGABYTES} MB:"
        f" {', '.join(largest)}; put data and outputs into .gitignore"
    )


def pack(folder: Path, names: list[bytes]) -> bytes:
    """Returns a tar.gz of these files, in which no time stands."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as zipped:
        # Names are UTF-8 in it, whatever this machine's locale is.
        utf_8 = {"encoding": "utf-8", "errors": "surrogateescape"}
        with tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT, **utf_8) as archive:
            for name in names:
                try:
                    add(archive, os.path.join(os.fsencode(folder), name), name)
                except OSError as error:
                    raise InputError(
                        f"{shown(name)} cannot be read: {error.strerror or error}; a file that is"
                        " not yours, or that changes all the time, belongs into .gitignore"
                    ) from None
    return packed.getvalue()


def add(archive: tarfile.TarFile, path: bytes, name: bytes) -> None:
    """Adds a file or a link, without what differs between machines: owner, time, mode except x."""
    name_in_archive = name.decode("utf-8", "surrogateescape")
    info = archive.gettarinfo(os.fsdecode(path), arcname=name_in_archive)
    if info is None or not (info.isreg() or info.issym() or info.islnk()):
        neither = f"{shown(name)} is neither a file nor a link"
        raise InputError(f"{neither}; repositories inside of this one are not copied")
    info.uid = 0
    info.gid = 0
    info.mtime = 0
    info.uname = ""
    info.gname = ""
    info.mode = 0o755 if info.mode & 0o100 else 0o644
    if info.issym():
        info.linkname = os.readlink(path).decode("utf-8", "surrogateescape")
        archive.addfile(info)
        return

    info.type = tarfile.REGTYPE  # also a file that has two names here
    info.linkname = ""
    info.size = os.lstat(path).st_size
    with open(path, "rb") as file:
        archive.addfile(info, file)


# ---- the arguments of make train ---------------------------------------------------------------


def read_words(words: list[str], run: str) -> tuple[list[str], str]:
    """Returns the arguments of `make train` on the workers, without NAME=, and the run's name ("":
    none was given).

    Values arrive as they are: make would expand a `$`, so it is doubled. InputError: a word is not
    NAME=value.
    """
    kept = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(VARIABLE, name):
            raise InputError(f"{word} after -- is not an argument of make train; write NAME=value")
        if name in OF_THIS_MACHINE:
            remedy = f"give --{name.lower()}"
            raise InputError(f"{name}= is for this machine, not for the workers; {remedy}")
        if re.search(r"[\n\r\0]", value):
            lines = f"{name}={value!r} has more than one line"
            raise InputError(f"{lines}, of which make would make two; give one")

        if name == "NAME":
            if run and value and run != value:
                raise InputError(f"the run has two names, RUN={run} and NAME={value}; give one")
            run = run or value
        elif value:
            kept.append(f"{name}={value}".replace("$", "$$"))
    if run and not re.fullmatch(r"\w[\w.-]{0,99}", run, re.ASCII):
        remedy = "use up to 100 letters, digits and .-_"
        raise InputError(f"RUN={run} is not the name of one folder; {remedy}")
    return kept, run


def runs_folder(words: list[str]) -> str:
    """Returns the folder where `make train` with these arguments puts its runs: --runs in ARGS, ""
    if there is none."""
    arguments = ""
    for word in words:
        if word.startswith("ARGS="):
            arguments = word[len("ARGS=") :]
            break
    try:
        flags = shlex.split(arguments)
    except ValueError:  # the shell on the worker will say so
        flags = arguments.split()

    folder = ""
    for number, flag in enumerate(flags):
        if flag.startswith("--runs="):
            folder = flag[len("--runs=") :]
        elif flag == "--runs":
            is_last = number + 1 == len(flags)
            folder = "" if is_last else flags[number + 1]
    return folder.rstrip("/").replace("$$", "$")  # see read_words


# ---- the run's variables -----------------------------------------------------------------------


def is_secret_name(name: str) -> bool:
    """Returns whether a variable is named as secrets are: MY_KEY, hf_token, PGPASSWD; not
    TOKENIZERS_PARALLELISM."""
    upper = name.upper()
    if SECRET_WORDS.intersection(upper.split("_")):
        return True
    return upper.endswith(SECRET_ENDS) and upper != "PWD"


def read_environment(assignments: str, names: list[str]) -> dict[str, str]:
    """Returns the run's variables: those of ENV="A=b C='d e'", and the secrets that are set here.

    InputError: ENV is not a list of assignments, or has a secret; a secret named by --secret is not
    set here.
    """
    example = "write ENV=\"A=b C='d e'\""
    try:
        words = shlex.split(assignments)
    except ValueError as error:
        raise InputError(f"ENV={assignments} cannot be read ({error}); {example}") from None

    environment = {}
    for name in SECRETS:
        if os.environ.get(name):
            environment[name] = os.environ[name]
    for name in names:
        if name not in os.environ:
            raise InputError(f"--secret {name}: this variable is not set here; export it first")
        environment[name] = os.environ[name]
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(VARIABLE, name):
            raise InputError(f"{word} in ENV is not an assignment; {example}")
        if name.startswith("MEGASCALE_"):
            raise InputError(
                f"{name} in ENV would be the same on all workers, and joins several slices: a run"
                " of the launcher is on one; leave it out, or use tpu/jobset.yaml (docs/tpu.md)"
            )
        if is_secret_name(name):
            remedy = "it travels by itself" if name in SECRETS else f"give --secret {name}"
            raise InputError(
                f"{name} in ENV would stand in this machine's list of processes: export it here,"
                f" and {remedy}"
            )
        environment[name] = value
    return environment
