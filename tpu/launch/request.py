"""What a run gets from this machine: the working tree, the arguments of `make train`, and the run's variables."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shlex
import subprocess
import tarfile
from pathlib import Path

from errors import InputError

BUNDLE_MEGABYTES = 512
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")


def make_bundle(folder: Path) -> tuple[str, bytes, int]:
    """Packs the working tree: tracked and untracked files, not the ignored and the deleted ones.

    Returns the hash (the bundle's name), the tar.gz and the number of files. The same tree gives the same bytes.
    InputError: not a git repository with a Makefile, a submodule, more than BUNDLE_MEGABYTES.
    """
    if not (folder / "Makefile").exists():
        raise InputError(f"{folder} has no Makefile; start a run from the project's folder")
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=folder, capture_output=True)
    if listed.returncode:
        raise InputError(f"git cannot list the files of {folder}: {listed.stderr.decode(errors='replace').strip()}")
    names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
    sizes = {name: (folder / name).lstat().st_size for name in sorted(names) if os.path.lexists(folder / name)}
    if (total := sum(sizes.values())) > BUNDLE_MEGABYTES << 20:
        largest = max(sizes, key=sizes.__getitem__)
        found = f"has {total >> 20} MB, more than {BUNDLE_MEGABYTES} MB, {sizes[largest] >> 20} MB of it {largest}"
        raise InputError(f"the working tree {found}: put data and outputs into .gitignore")
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sizes:
            archive.add(folder / name, name, recursive=False, filter=make_anonymous)
    content = packed.getvalue()
    return hashlib.sha256(content).hexdigest(), content, len(sizes)


def make_anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Takes away what differs between machines: owner, time, mode except x. InputError: neither a file nor a link."""
    if not (info.isreg() or info.issym() or info.islnk()):
        raise InputError(f"{info.name} is neither a file nor a link; repositories inside of this one are not copied")
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.mode & 0o100 else 0o644
    return info


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
        if re.search(r"TOKEN|KEY|SECRET|PASSWORD", name):
            how = "it travels by itself" if name in SECRETS else f"give --secret {name}"
            raise InputError(
                f"{name} in ENV would stand in this machine's list of processes: export it here, and {how}"
            )
        environment[name] = value
    return environment
