"""The bundle that is copied to the workers: the working tree as a tar.gz that depends on the files' contents alone.

Only the standard library, Python 3.9 or later.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path

from errors import InputError

BUNDLE_MEGABYTES = 512


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
        raise InputError(
            f"git cannot list the files of {folder}, and only files that git does not ignore are copied"
            f" ({listed.stderr.decode(errors='replace').strip()})"
        )
    names = sorted({os.fsdecode(name) for name in listed.stdout.split(b"\0") if name})
    names = [name for name in names if os.path.lexists(folder / name)]
    sizes = {name: (folder / name).lstat().st_size for name in names}
    if sum(sizes.values()) > BUNDLE_MEGABYTES << 20:
        largest = max(names, key=sizes.__getitem__)
        raise InputError(
            f"the working tree has {sum(sizes.values()) >> 20} MB, more than {BUNDLE_MEGABYTES} MB, most of all"
            f" {largest} ({sizes[largest] >> 20} MB): put data and outputs into .gitignore"
        )
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            add_file(archive, folder / name, name)
    content = packed.getvalue()
    return hashlib.sha256(content).hexdigest()[:32], content, len(names)


def add_file(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Adds a file or a symbolic link without what differs between machines: owner, time, mode except x."""
    info = tarfile.TarInfo(name)
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        archive.addfile(info)
    elif stat.S_ISREG(mode):
        content = path.read_bytes()
        info.size, info.mode = len(content), 0o755 if mode & 0o100 else 0o644
        archive.addfile(info, io.BytesIO(content))
    else:
        raise InputError(
            f"{name} is neither a file nor a link; submodules and other repositories inside are not copied"
        )
