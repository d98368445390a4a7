"""Finds libpython3.x.so.1.0, which torch_xla's extension is linked to, for the interpreter that
runs this.

    python3.11 -m tpu.libpython
        before an installation: can torch_xla have the library?
    .venv/bin/python -m tpu.libpython install
        after it: puts the library where torch_xla looks, and imports torch_xla
    .venv/bin/python -m tpu.libpython environment
        at any time: is it there? Imports nothing

Each ends with 0, or with 2 and a sentence that says what to do. `make install` calls the first two,
`make doctor` the first and the last. Interpreters differ in where they have the library:

    linked to it        pyenv's with --enable-shared, the official image's: it is loaded before
                        torch_xla asks for it
    in a package apart  those of Debian, Ubuntu and deadsnakes do without it; the dynamic linker
                        finds the package's
    in a folder apart   uv's and conda's do without it, too, and have it in their own lib folder

In the last case the interpreter's RPATH points to that folder, but the dynamic linker ignores an
interpreter's RPATH when it loads for a library that has a RUNPATH, as torch_xla's extension does
(readelf -d _XLAC*.so). This RUNPATH ends with torch_xla/lib, a folder that the wheel does not have:
a link there makes the library findable.

Only the standard library, Python 3.9 or later, Linux.
"""

import ctypes
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGE = f"libpython{VERSION}"
LIBRARY = f"{PACKAGE}.so.1.0"
# Of interpreters with a folder of their own; it need not exist.
OWN_COPY = Path(sys.base_prefix, "lib", LIBRARY)


def is_found(lasting: bool = False) -> bool:
    """Returns whether the dynamic linker finds the library for an extension whose RUNPATH does not
    lead to it.

    `ctypes.CDLL(LIBRARY)` would answer another question, since it looks where the interpreter's
    RPATH points, too. So a program without an RPATH is asked to load the library first. The dynamic
    linker names what it cannot load, in any language.

    Args:
        lasting: also without this shell's LD_LIBRARY_PATH, which a later run, or the launcher's,
            need not have.
    """
    if LIBRARY in Path("/proc/self/maps").read_text():  # the interpreter is linked to it
        return True
    environment = {**os.environ, "LD_PRELOAD": LIBRARY}
    if lasting:
        environment.pop("LD_LIBRARY_PATH", None)
    result = subprocess.run(["/bin/sh", "-c", ":"], env=environment, stderr=subprocess.PIPE)
    return LIBRARY.encode() not in result.stderr


def loads(path: Path) -> bool:
    """Returns whether a file is a library that this process can load."""
    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True


def library_path() -> Path:
    """Returns where torch_xla's extension looks for the library.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.
    """
    package = importlib.util.find_spec("torch_xla")
    if package is None:
        raise ModuleNotFoundError("No module named 'torch_xla'")
    return Path(package.origin).parent / "lib" / LIBRARY


def link(path: Path) -> None:
    """Makes `path` a link to the interpreter's own copy."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(OWN_COPY)


def imports() -> bool:
    """Imports torch_xla. Returns False where it lacks the library; any other failure is raised as
    it is."""
    os.environ["PJRT_DEVICE"] = "CPU"  # no chip is looked for: another run may hold them
    try:
        importlib.import_module("torch_xla")
    except ImportError as error:
        if LIBRARY not in str(error):
            raise
        return False
    return True


def explain() -> str:
    """Returns the sentence for an interpreter that lacks the library."""
    interpreter = os.path.realpath(sys.executable)
    lack = f"torch_xla needs {LIBRARY}, and {interpreter} comes without it"
    if sys.base_prefix == "/usr":
        install = f"sudo apt-get install -y {PACKAGE} (GET_PYTHON=1 does)"
        return f"{lack}: install its package, {install}, and try again"
    apt = f"apt's with the package {PACKAGE} (on Ubuntu GET_PYTHON=1 installs both)"
    rebuilt = f"PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force {VERSION}"
    others = f"such as {apt}, uv's, or pyenv's after {rebuilt}"
    return f"{lack}: give make PYTHON= one that has it, {others}"


def main(arguments: list[str]) -> int:
    """Runs the command line. Returns the exit code."""
    found = is_found()
    lasting = is_found(lasting=True)
    own = loads(OWN_COPY)  # after these, which look whether it is loaded
    sentence = explain()
    if not arguments:
        good = found or own
    elif arguments == ["install"]:
        if own and not lasting:
            link(library_path())
        good = imports()
    else:
        good = found or loads(library_path())
        if own:
            lack = f"torch_xla needs {LIBRARY}, and {library_path()} is not there"
            sentence = f"{lack}: touch requirements.txt && make install"

    if not good:
        print(f"error: {sentence}", file=sys.stderr)
    return 0 if good else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
