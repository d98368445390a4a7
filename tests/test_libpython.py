"""tpu/libpython.py: whether torch_xla finds the library that it is linked to, in any interpreter.

The last test has a real Debian with exactly the packages that tpu/get_python.sh names. It takes
minutes and a mirror.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu import libpython

ROOT = Path(__file__).parent.parent
# As if another library were needed, which no machine has.
STRANGE = "libpython9.9.so.1.0"
DRIVER = f"""
import sys
from pathlib import Path
from tpu import libpython
libpython.LIBRARY, libpython.PACKAGE = "{STRANGE}", "libpython9.9"
libpython.OWN_COPY = Path("own/{STRANGE}").absolute()
sys.exit(libpython.main(sys.argv[1:]))
"""
# A torch_xla that loads as the real one does: only where its RUNPATH leads to the library.
TORCH_XLA = f"""
from pathlib import Path
if not (Path(__file__).parent / "lib/{STRANGE}").exists():
    raise ImportError("{STRANGE}: Kann die Shared-Object-Datei nicht öffnen")
"""


# ---- the program -------------------------------------------------------------------------------


@pytest.fixture
def ask(tmp_path) -> Callable[..., tuple[int, str]]:
    """Calls the program in a folder, as an interpreter that is not linked to the library.

    Returns its exit code and standard error.
    """

    def call(*arguments: str) -> tuple[int, str]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "LC_ALL": "C.UTF-8",
        }
        no_other_package = "-S"
        result = subprocess.run(
            [sys.executable, no_other_package, "-c", DRIVER, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert not result.stdout
        return result.returncode, result.stderr

    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla/__init__.py").write_text(TORCH_XLA)
    return call


def put_own_copy(folder: Path) -> None:
    """Puts a library of that name where uv's and conda's interpreters have it."""
    loaded = Path("/proc/self/maps").read_text()
    any_library = re.search(r"/\S+/libm[.-]\S*", loaded)[0]
    (folder / "own").mkdir()
    shutil.copy(any_library, folder / "own" / STRANGE)


def test_this_interpreter_has_it():
    """It has imported torch_xla."""
    assert libpython.is_found()
    assert libpython.main([]) == 0
    assert libpython.main(["environment"]) == 0


@pytest.mark.parametrize("arguments", [[], ["install"], ["environment"]])
def test_an_interpreter_without_it_gets_a_sentence(ask, arguments):
    code, said = ask(*arguments)
    assert code == 2
    assert said.count("\n") == 1
    interpreter = os.path.realpath(sys.executable)
    lacks = f"torch_xla needs {STRANGE}, and {interpreter} comes without it:"
    assert said.startswith(f"error: {lacks}")
    if sys.base_prefix != "/usr":
        assert "--enable-shared" in said


def test_the_package_is_named_where_the_system_splits_it_off(monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    package = f"libpython{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"sudo apt-get install -y {package} " in libpython.explain()


def test_the_library_of_an_interpreters_own_folder_is_linked(ask, tmp_path):
    """To where torch_xla looks for it."""
    put_own_copy(tmp_path)
    assert ask() == (0, "")
    code, said = ask("environment")
    assert code == 2
    assert "touch requirements.txt && make install" in said

    for _ in range(2):  # also over the link of an installation before
        assert ask("install") == (0, "")
    assert ask("environment") == (0, "")

    (tmp_path / "own" / STRANGE).unlink()  # the interpreter was removed
    assert ask("environment")[0] == 2


def test_a_library_that_only_this_shell_finds_is_linked(ask, tmp_path, monkeypatch):
    """As with LD_LIBRARY_PATH of another interpreter's installation, which a later run does not
    have."""
    put_own_copy(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "own"))

    assert ask() == (0, "")
    assert ask("install") == (0, "")
    assert (tmp_path / "torch_xla/lib" / STRANGE).is_symlink()


def test_a_file_that_is_no_library_does_not_count(ask, tmp_path):
    put_own_copy(tmp_path)
    (tmp_path / "own" / STRANGE).write_text("#!/bin/sh\n")
    assert ask()[0] == 2


def test_another_failure_of_the_import_keeps_its_words(ask, tmp_path):
    failing = "raise ImportError('libGL.so.1: no such file')\n"
    (tmp_path / "torch_xla/__init__.py").write_text(failing)

    code, said = ask("install")
    assert code == 1
    assert said.splitlines()[-1] == "ImportError: libGL.so.1: no such file"


def test_a_missing_torch_xla_is_named(ask, tmp_path):
    shutil.rmtree(tmp_path / "torch_xla")
    put_own_copy(tmp_path)

    code, said = ask("install")
    assert code == 1
    assert said.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch_xla'"


# ---- a real Debian -----------------------------------------------------------------------------


# Runs a command within a root file system, $1, whose /zoo is the project and /site the
# environment's packages. What is written there is in memory and goes with the process.
WITHIN = """set -e
mount --make-rprivate /
mount -t tmpfs tmpfs $1/mnt
mkdir $1/mnt/upper $1/mnt/work $1/mnt/root
mount -t overlay -o lowerdir=$1,upperdir=$1/mnt/upper,workdir=$1/mnt/work overlay $1/mnt/root
cd $1/mnt/root
mkdir zoo site
mount --bind -o ro $2 zoo
mkdir $1/mnt/site $1/mnt/site-work
mount -t overlay -o lowerdir=$3,upperdir=$1/mnt/site,workdir=$1/mnt/site-work overlay site
mount -t proc proc proc
exec chroot . env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/root \\
    PYTHONPATH=/site PYTHONDONTWRITEBYTECODE=1 sh -c "cd /zoo; $4"
"""
# As uv and conda have it: the library lies in the interpreter's own folder.
APART = """
mkdir -p /opt/lib /opt/bin
cp /usr/bin/python3.11 /opt/bin
cp /usr/lib/*/libpython3.11.so.1.0 /opt/lib
ln -s /usr/lib/python3.11 /opt/lib
"""
PURGE = "dpkg --purge libpython3.11 >/dev/null"
IMPORT = "-c 'import torch, torch_xla; print(torch_xla.__version__)'"
IMPORT_FAILS = "ImportError: libpython3.11.so.1.0: "


def lacking() -> str:
    """Returns what keeps a root file system from being made and entered here, or ""."""
    if os.geteuid():
        return "needs root, for a root file system of Debian"
    if sys.version_info[:2] != (3, 11):
        needed = "an environment of Python 3.11, which Debian bookworm has"
        return f"needs {needed}; this one is {libpython.VERSION}"
    if shutil.which("mmdebstrap") is None:
        return "needs mmdebstrap: on Debian, apt-get install mmdebstrap"
    unshared = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    if unshared.returncode != 0:
        return "needs the right to mount, which this container has not"
    return ""


LACKING = lacking()


def make_debian(root: Path) -> None:
    """Makes a root file system with the packages that get_python.sh names. Skips the test without a
    mirror."""
    script = ["sh", str(ROOT / "tpu/get_python.sh"), "python3.11", "--packages"]
    named = subprocess.run(script, check=True, capture_output=True, text=True)
    packages = named.stdout.split()

    include = f"--include={','.join(packages)}"
    command = ["mmdebstrap", "--variant=minbase", include, "bookworm", str(root)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert "Unable to locate package" not in made.stderr, packages
    if made.returncode:
        cause = made.stderr.strip().splitlines()[-1]
        pytest.skip(f"mmdebstrap makes no root file system: {cause}")


@pytest.mark.slow
@pytest.mark.skipif(LACKING != "", reason=LACKING)
def test_torch_xla_runs_on_a_debian_with_the_packages_named(tmp_path):
    """With exactly those that get_python.sh names."""
    root = tmp_path / "debian"
    make_debian(root)
    site = Path(importlib.util.find_spec("torch_xla").origin).parent.parent
    version = importlib.metadata.version("torch_xla")

    def within(*commands: str) -> tuple[int, str, str]:
        script = " && ".join(command.strip() for command in commands)
        words = [str(root), str(ROOT), str(site), script]
        unshare = ["unshare", "--mount", "sh", "-c", WITHIN, "sh"]
        result = subprocess.run([*unshare, *words], capture_output=True, text=True)
        return result.returncode, result.stdout.strip(), result.stderr

    # Without the library's package it is what users of a TPU VM have seen, and here a sentence.
    code, _, said = within(PURGE, f"python3.11 {IMPORT}")
    assert code == 1
    assert IMPORT_FAILS in said
    for mode in ("", "install", "environment"):
        code, _, said = within(PURGE, f"python3.11 -m tpu.libpython {mode}")
        assert code == 2, said
        assert "sudo apt-get install -y libpython3.11" in said, said

    # With it all is there: environments can be made, and torch_xla is imported.
    code, _, _ = within("python3.11 -m tpu.libpython", "python3.11 -m venv /tmp/venv")
    assert code == 0
    code, out, said = within("python3.11 -m tpu.libpython install", f"python3.11 {IMPORT}")
    assert code == 0, said
    assert out == version, said

    # An interpreter with a folder of its own needs the link that `install` makes.
    apart = "/opt/bin/python3.11"
    code, _, said = within(APART, PURGE, f"{apart} -m tpu.libpython", f"{apart} {IMPORT}")
    assert code == 1
    assert IMPORT_FAILS in said
    install = f"{apart} -m tpu.libpython install"
    code, out, said = within(APART, PURGE, install, f"{apart} {IMPORT}")
    assert code == 0, said
    assert out == version, said
