"""tpu/libpython.py: whether torch_xla finds the library that it is linked to, in each kind of interpreter."""

import os
import re
import shutil
import subprocess
import sys
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


@pytest.fixture
def ask(tmp_path):
    """Calls the program in a folder, as an interpreter that is not linked to the library. -S: with no other package."""

    def call(*arguments: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "LC_ALL": "C.UTF-8"}
        command = [sys.executable, "-S", "-c", DRIVER, *arguments]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert not result.stdout
        return result.returncode, result.stderr

    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla/__init__.py").write_text(TORCH_XLA)
    return call


def put_own_copy(folder: Path) -> None:
    """Puts a library of that name where uv's and conda's interpreters have it."""
    some = re.search(r"/\S+/libm[.-]\S*", Path("/proc/self/maps").read_text())[0]
    (folder / "own").mkdir()
    shutil.copy(some, folder / "own" / STRANGE)


def test_this_interpreter_has_it():
    """It has imported torch_xla."""
    assert libpython.is_found() and libpython.main([]) == 0 and libpython.main(["environment"]) == 0


@pytest.mark.parametrize("arguments", [[], ["install"], ["environment"]])
def test_an_interpreter_without_it_gets_a_sentence(ask, arguments):
    code, said = ask(*arguments)
    assert code == 2 and said.count("\n") == 1
    assert said.startswith(
        f"error: torch_xla needs {STRANGE}, and {os.path.realpath(sys.executable)} comes without it:"
    )
    assert "--enable-shared" in said or sys.base_prefix == "/usr"


def test_the_package_is_named_where_the_system_splits_it_off(monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    assert f"sudo apt-get install -y libpython{sys.version_info[0]}.{sys.version_info[1]} " in libpython.explain()


def test_the_library_of_an_interpreters_own_folder_is_linked_to_where_torch_xla_looks(ask, tmp_path):
    put_own_copy(tmp_path)
    assert ask() == (0, "")
    code, said = ask("environment")
    assert code == 2 and "touch requirements.txt && make install" in said
    for _ in range(2):  # also over the link of an installation before
        assert ask("install") == (0, "")
    assert ask("environment") == (0, "")
    (tmp_path / "own" / STRANGE).unlink()  # the interpreter was removed
    assert ask("environment")[0] == 2


def test_a_file_that_is_no_library_does_not_count(ask, tmp_path):
    put_own_copy(tmp_path)
    (tmp_path / "own" / STRANGE).write_text("#!/bin/sh\n")
    assert ask()[0] == 2


def test_another_failure_of_the_import_keeps_its_words(ask, tmp_path):
    (tmp_path / "torch_xla/__init__.py").write_text("raise ImportError('libGL.so.1: no such file')\n")
    code, said = ask("install")
    assert code == 1 and said.splitlines()[-1] == "ImportError: libGL.so.1: no such file"
    shutil.rmtree(tmp_path / "torch_xla")
    put_own_copy(tmp_path)
    code, said = ask("install")
    assert code == 1 and said.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch_xla'"
