"""What a run gets from this machine: the working tree, the arguments of `make train`, and the run's variables."""

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
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
# Files and folders, in small letters.
SECRET_FILES = (".env", ".envrc", ".env.*", "*.pem", "*.p12", "*.pfx", "id_rsa", "id_ecdsa", "id_ed25519", ".netrc")
SECRET_PARTS = {"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "CREDENTIALS"}
SECRET_ENDS = ("PASSWD", "PASSWORD", "PWD")
ACCOUNT_FILE = 1 << 20  # bytes; the JSON of an account's key has some 2,400
# "type" of Google's credentials: service_account, gdch_service_account, external_account_authorized_user and the like.
ACCOUNTS = ("service_account", "authorized_user", "external_account")
FOLDERS_NAMED = 3


@dataclass
class Bundle:
    """The working tree as it is sent.

    Attributes:
        name: its hash.
        content: a tar.gz.
        files: how many.
        left_out: the files that were left out since they look like secrets.
        links: those that point out of the tree, "data -> /mnt/data": on a worker they mean what is there, or nothing.
    """

    name: str
    content: bytes
    files: int
    left_out: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)


def make_bundle(folder: Path) -> Bundle:
    """Packs the working tree: tracked and untracked files, not the ignored and the deleted ones, and no secrets.

    The same tree gives the same bytes. InputError: not a git repository with a Makefile, a submodule, more than
    BUNDLE_MEGABYTES.
    """
    if not (folder / "Makefile").exists():
        raise InputError(f"{folder} has no Makefile; start a run from the project's folder")
    sizes, left_out, links = {}, [], []
    for name in listed(folder):
        path = os.path.join(os.fsencode(folder), name)
        if not os.path.lexists(path):
            continue
        secret = secret_part(path, name)
        if secret:
            left_out.append(shown(secret))
            continue
        if leads_out(path, name):
            links.append(f"{shown(name)} -> {shown(os.readlink(path))}")
        sizes[name] = os.lstat(path).st_size
    check_size(sizes)

    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as zipped,
        # Names are UTF-8 in it, whatever this machine's locale is.
        tarfile.open(
            fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        ) as archive,
    ):
        for name in sizes:
            try:
                add(archive, os.path.join(os.fsencode(folder), name), name)
            except OSError as error:
                raise InputError(
                    f"{shown(name)} cannot be read: {error.strerror or error}; a file that is not yours, or that"
                    " changes all the time, belongs into .gitignore"
                ) from None
    content = packed.getvalue()
    return Bundle(hashlib.sha256(content).hexdigest(), content, len(sizes), list(dict.fromkeys(left_out)), links)


def listed(folder: Path) -> list[bytes]:
    """Returns the names of the files that git tracks or does not ignore, sorted, as git has them: bytes."""
    if shutil.which("git") is None:
        raise InputError("git is not installed here, which lists the files that a run needs; install it")
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    result = subprocess.run(command, cwd=folder, capture_output=True)
    if result.returncode:
        raise InputError(f"git cannot list the files of {folder}: {result.stderr.decode(errors='replace').strip()}")
    return sorted({name for name in result.stdout.split(b"\0") if name})


def shown(name: bytes) -> str:
    """Returns a file's name for a message."""
    return name.decode("utf-8", "backslashreplace")


def secret_part(path: bytes, name: bytes) -> bytes:
    """Returns what of a file's name looks like something that is not to leave this machine: a folder, with a slash at
    its end, or the whole name, also of an account's key. b"": nothing does."""
    begun = b""
    for part in name.split(b"/"):
        begun += part
        small = os.fsdecode(part).lower()
        if any(fnmatchcase(small, pattern) for pattern in SECRET_FILES):
            return name if begun == name else begun + b"/"
        begun += b"/"
    return name if is_account(path) else b""


def is_account(path: bytes) -> bool:
    """Returns whether a file has Google's credentials in JSON."""
    status = os.lstat(path)
    if not path.lower().endswith(b".json") or not stat.S_ISREG(status.st_mode) or status.st_size > ACCOUNT_FILE:
        return False
    try:
        with open(path, encoding="utf-8-sig") as file:  # an editor may have put a mark before it
            found = json.load(file)
    except (OSError, ValueError):
        return False
    kind = found.get("type") if isinstance(found, dict) else None
    return isinstance(kind, str) and any(account in kind for account in ACCOUNTS)


def leads_out(path: bytes, name: bytes) -> bool:
    """Returns whether a file is a link to something that is not in the working tree."""
    if not os.path.islink(path):
        return False
    target = os.readlink(path)
    inside = os.path.normpath(os.path.join(os.path.dirname(name), target))
    return os.path.isabs(target) or inside.split(b"/")[0] == b".."


def check_size(sizes: dict[bytes, int]) -> None:
    """Raises InputError for a tree that is too large, with the folders that make it so."""
    total = sum(sizes.values())
    if total <= BUNDLE_MEGABYTES << 20:
        return
    folders = Counter()
    for name, size in sizes.items():
        top, slash, _ = name.partition(b"/")
        folders[top + slash] += size
    largest = [f"{size >> 20} MB in {shown(name)}" for name, size in folders.most_common(FOLDERS_NAMED)]
    raise InputError(
        f"the working tree has {total >> 20} MB, more than {BUNDLE_MEGABYTES} MB: {', '.join(largest)}; put data and"
        " outputs into .gitignore"
    )


def add(archive: tarfile.TarFile, path: bytes, name: bytes) -> None:
    """Adds a file or a link, without what differs between machines: owner, time, mode except x."""
    info = archive.gettarinfo(os.fsdecode(path), arcname=name.decode("utf-8", "surrogateescape"))
    if info is None or not (info.isreg() or info.issym() or info.islnk()):
        raise InputError(f"{shown(name)} is neither a file nor a link; repositories inside of this one are not copied")
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
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


def read_words(words: list[str], run: str) -> tuple[list[str], str]:
    """Returns the arguments of `make train` on the workers, without NAME=, and the run's name ("": none was given).

    Values arrive as they are: make would expand a `$`, so it is doubled. InputError: a word is not NAME=value.
    """
    kept = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InputError(f"{word} after -- is not an argument of make train; write NAME=value")
        if name in ("TPU", "ZONE", "PROJECT", "ENV", "RUN", "RETRIES"):
            raise InputError(f"{name}= is for this machine, not for the workers; give --{name.lower()}")
        if re.search(r"[\n\r\0]", value):
            raise InputError(f"{name}={value!r} has more than one line, of which make would make two; give one")
        if name == "NAME":
            if run and value and run != value:
                raise InputError(f"the run has two names, RUN={run} and NAME={value}; give one")
            run = run or value
        elif value:
            kept.append(f"{name}={value}".replace("$", "$$"))
    if run and not re.fullmatch(r"\w[\w.-]{0,99}", run, re.ASCII):
        raise InputError(f"RUN={run} is not the name of one folder; use up to 100 letters, digits and .-_")
    return kept, run


def runs_folder(words: list[str]) -> str:
    """Returns the folder where `make train` with these arguments puts its runs: --runs in ARGS, "" if there is none."""
    arguments = next((word[5:] for word in words if word.startswith("ARGS=")), "")
    try:
        parts = shlex.split(arguments)
    except ValueError:  # the shell on the worker will say so
        parts = arguments.split()
    folder = ""
    for number, part in enumerate(parts):
        if part.startswith("--runs="):
            folder = part[len("--runs=") :]
        elif part == "--runs":
            folder = "".join(parts[number + 1 : number + 2])
    return folder.rstrip("/").replace("$$", "$")  # see read_words


def is_secret_name(name: str) -> bool:
    """Returns whether a variable is named as secrets are: MY_KEY, hf_token, PGPASSWD; not TOKENIZERS_PARALLELISM."""
    upper = name.upper()
    if SECRET_PARTS.intersection(upper.split("_")):
        return True
    return upper.endswith(SECRET_ENDS) and upper != "PWD"


def read_environment(assignments: str, names: list[str]) -> dict[str, str]:
    """Returns the run's variables: those of ENV="A=b C='d e'", and the secrets that are set here.

    InputError: ENV is not a list of assignments, or has a secret; a secret named by --secret is not set here.
    """
    try:
        parts = shlex.split(assignments)
    except ValueError as error:
        raise InputError(f"ENV={assignments} cannot be read ({error}); write ENV=\"A=b C='d e'\"") from None
    environment = {name: os.environ[name] for name in SECRETS if os.environ.get(name)}
    for name in names:
        if name not in os.environ:
            raise InputError(f"--secret {name}: this variable is not set here; export it first")
        environment[name] = os.environ[name]
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InputError(f"{part} in ENV is not an assignment; write ENV=\"A=b C='d e'\"")
        if is_secret_name(name):
            how = "it travels by itself" if name in SECRETS else f"give --secret {name}"
            raise InputError(
                f"{name} in ENV would stand in this machine's list of processes: export it here, and {how}"
            )
        environment[name] = value
    return environment
