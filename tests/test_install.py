"""`make install`: the interpreter and its library, the order of what it does, and which libtpu.

apt, Python and pip are stand-ins that do nothing for each other: apt's packages are split as
Debian, Ubuntu and deadsnakes split them, so that one that was forgotten shows; pip takes the old
version away before the new one is there.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from run_make import NOT_HANDED_ON, ROOT, make
from terminal import Terminal

TPU_REQUIREMENTS = (ROOT / "requirements-tpu.txt").read_text()
PINNED = re.search(r"^libtpu==(\S+)", TPU_REQUIREMENTS, re.MULTILINE)[1]
APT_GET = """
case $1 in
update) touch $MACHINE/updated; exit;;
install) [ -e $MACHINE/updated ] || { echo "Unable to locate package" >&2; exit 100; };;
esac
if mkdir $MACHINE/busy 2>/dev/null; then echo "Could not get lock" >&2; exit 100; fi
echo "$@"
shift 2
case $1 in software-properties-common) cp $MACHINE/add-apt-repository $MACHINE/bin; exit;; esac
for package; do
    [ -e $MACHINE/offered/$package ] || { echo "Unable to locate package $package" >&2; exit 100; }
    touch $MACHINE/packages/$package
done
"""
ADD_APT_REPOSITORY = """
echo "$@"
touch $MACHINE/updated
for package in python3.11 python3.11-venv libpython3.11; do touch $MACHINE/offered/$package; done
"""
PYTHON = """
needs() { [ -e $MACHINE/packages/$1 ] || { echo "$2" >&2; exit $3; }; }
needs python3.11 "python3.11: not found" 127
case "$*" in
-c*ensurepip*) needs python3.11-venv "No module named 'ensurepip'" 1;;
-c*) ;;
"-m tpu.libpython") needs libpython3.11 "error: install libpython3.11" 2;;
"-m venv "*)
    needs python3.11-venv "ensurepip is not available" 1
    echo venv >>$MACHINE/done
    mkdir -p $3/bin
    cp $MACHINE/pip $MACHINE/python $3/bin;;
*) exit 9;;
esac
"""
PIP = """
echo "pip $*" >>$MACHINE/done
[ -z "$PIP_VERBOSE" ] || echo "Collecting $*"
site=${0%%/*}/../lib/python3.11/site-packages
version=
for word; do case $word in
    libtpu==0.0.51 | libtpu==0.0.52) version=${word#libtpu==};;
    libtpu==*) echo "ERROR: No matching distribution found for $word" >&2; exit 1;;
    requirements-tpu.txt) version=%s;;
esac; done
[ -n "$version" ] || exit 0
rm -rf $site/libtpu-*
[ ! -e $MACHINE/stalled ] || exit 2
mkdir -p $site/libtpu-$version.dist-info
"""
IN_VENV = """
echo "$*" >>$MACHINE/done
[ "$*" = "-m tpu.libpython install" ] || exit 9
[ ! -e $MACHINE/broken ] || { cat $MACHINE/broken >&2; exit 1; }
"""
PARTS_OF_PYTHON = ("python3.11", "python3.11-venv", "libpython3.11")  # apt's packages


class Machine:
    """What there is: the packages of apt, the environment, and what was done to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        for name in ("bin", "packages", "offered"):
            (folder / name).mkdir()

        programs = {
            "apt-get": APT_GET,
            "add-apt-repository": ADD_APT_REPOSITORY,
            "python3.11": PYTHON,
            "sudo": 'shift; exec "$@"',
            "apt-cache": "[ -e $MACHINE/offered/$2 ]",
        }
        for name, script in programs.items():
            self.write(f"bin/{name}", script)
        # What the programs install.
        self.write("add-apt-repository", ADD_APT_REPOSITORY)
        self.write("pip", PIP % PINNED)
        self.write("python", IN_VENV)
        of_the_system = (
            "make",
            "sh",
            "env",
            "id",
            "sleep",
            "mkdir",
            "cp",
            "rm",
            "touch",
            "cat",
            "echo",
        )
        for name in of_the_system:
            (folder / "bin" / name).symlink_to(shutil.which(name))

    def write(self, name: str, script: str) -> None:
        """Writes a program."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def has(self, *packages: str, offered: bool = True) -> None:
        """Installs packages of apt.

        offered: apt offers all of CPython
        """
        for package in packages:
            (self.folder / "packages" / package).touch()
        if offered:
            for package in PARTS_OF_PYTHON:
                (self.folder / "offered" / package).touch()

    def install(self, *arguments: str) -> subprocess.CompletedProcess:
        """Runs `make install`."""
        return make("install", f"VENV={self.venv}", *arguments, python="")

    def done(self) -> list[str]:
        """Returns what was done since it was last asked."""
        log = self.folder / "done"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def is_installed(self) -> bool:
        """Returns whether the environment has the stamp of a whole installation."""
        return (self.venv / ".installed").exists()

    def libtpu(self) -> list[str]:
        """Returns the versions of libtpu in the environment."""
        versions = []
        for folder in self.venv.glob("lib/python3.11/site-packages/libtpu-*"):
            versions.append(folder.name.removeprefix("libtpu-").removesuffix(".dist-info"))
        return versions


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Machine:
    """A machine without CPython."""
    machine = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("MACHINE", str(tmp_path))
    monkeypatch.setenv("PAUSE", "0.1")
    return machine


@pytest.fixture
def ready(bare) -> Machine:
    """A machine with all that CPython consists of."""
    bare.has(*PARTS_OF_PYTHON)
    return bare


# ---- the interpreter ---------------------------------------------------------------------------


PPA = "-y ppa:deadsnakes/ppa"
PACKAGES = "install -y python3.11 python3.11-venv libpython3.11"


def said_by_apt(made: subprocess.CompletedProcess) -> list[str]:
    """Returns the arguments of add-apt-repository and apt-get, which the stand-ins print."""
    said = []
    for line in made.stdout.splitlines():
        if line[0] == "-" or line.startswith("install"):
            said.append(line)
    return said


@pytest.mark.parametrize(
    "there, said",
    [
        ([], [PPA, PACKAGES]),  # Ubuntu 22.04
        (["python3.11"], [PACKAGES]),
        (["python3.11", "python3.11-venv"], [PACKAGES]),
        (["python3.11", "libpython3.11"], [PACKAGES]),
    ],
)
def test_get_python_installs_what_is_missing(bare, there, said):
    only_library_missing = "python3.11-venv" in there
    bare.has(*there, offered=bool(there))

    refused = bare.install()
    assert refused.returncode == 2
    assert not refused.stdout
    assert not bare.done()
    remedy = "libpython3.11" if only_library_missing else "on Ubuntu GET_PYTHON=1"
    assert remedy in refused.stderr

    # apt is busy at first.
    made = bare.install("GET_PYTHON=1")
    assert made.returncode == 0, made.stderr
    assert said_by_apt(made) == said
    assert "error" not in made.stderr


def test_get_python_brings_the_program_for_archives(bare):
    """It is missing in a container, and on a minimal host."""
    (bare.folder / "bin/add-apt-repository").unlink()

    made = bare.install("GET_PYTHON=1")
    assert made.returncode == 0, made.stderr
    assert said_by_apt(made) == ["install -y software-properties-common", PPA, PACKAGES]


def test_get_python_takes_the_systems_interpreter_by_its_path():
    command = ["sh", str(ROOT / "tpu/get_python.sh"), "/usr/bin/python3.12", "--packages"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "python3.12 python3.12-venv libpython3.12\n"


def test_get_python_is_not_called_where_nothing_is_missing(ready):
    made = ready.install("GET_PYTHON=1")
    assert made.returncode == 0
    assert not (ready.folder / "updated").exists()


def test_an_interpreter_that_apt_does_not_offer_gets_deadsnakes(bare):
    """python3.11 was built by hand."""
    bare.has("python3.11", "python3.11-venv", offered=False)

    made = bare.install("GET_PYTHON=1")
    assert made.returncode == 0
    assert made.stdout.splitlines()[:2] == [PPA, PACKAGES]


def test_get_python_refuses_another_name(bare):
    other = make("install", f"VENV={bare.venv}", "GET_PYTHON=1", python="nothing")
    assert other.returncode == 2
    assert "nothing cannot be installed" in other.stderr


def test_an_eager_environment_needs_no_library(bare):
    bare.has("python3.11", "python3.11-venv")

    made = bare.install("DEVICE=cpu")
    assert made.returncode == 0
    assert not any("libpython" in line for line in bare.done())


def test_install_imports_torch_xla_before_it_is_done(ready):
    (ready.folder / "broken").write_text("ImportError: libGL.so.1: no such file\n")
    failed = ready.install()
    assert failed.returncode == 2
    assert "ImportError: libGL.so.1" in failed.stderr
    assert ready.done()[-1] == "-m tpu.libpython install"
    assert not ready.is_installed()

    (ready.folder / "broken").unlink()
    assert ready.install().returncode == 0
    assert ready.is_installed()
    ready.done()
    assert ready.install().returncode == 0
    assert not ready.done(), "nothing is to be done"


# ---- what it says ------------------------------------------------------------------------------


def steps_said(text: str) -> list[str]:
    """Returns the steps that an installation names, such as "1 of 4"."""
    return re.findall(r"^(\d of \d): \w", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("given", "count"), [([], 4), (["CHIPS=/dev/accel0"], 5), (["DEVICE=cpu"], 3)]
)
def test_an_installation_says_each_step_and_what_it_takes(ready, given, count):
    said = ready.install(*given).stdout
    assert steps_said(said) == [f"{number} of {count}" for number in range(1, count + 1)]
    assert re.search(r"once: about \d minutes on two cores, 8 GB of disk", said)
    assert "Collecting" not in said


def test_an_installation_on_a_terminal_shows_what_pip_says(ready):
    terminal = Terminal(200)
    environment = {**os.environ, "PYTHON": "python3.11"}
    command = ["make", "install", f"VENV={ready.venv}"]
    for name in NOT_HANDED_ON - {"PYTHON"}:
        environment.pop(name, None)
    made = subprocess.run(command, cwd=ROOT, env=environment, stdout=terminal.stream)

    assert made.returncode == 0
    lines = terminal.lines()
    assert steps_said("\n".join(lines)) == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    assert len([line for line in lines if line.startswith("Collecting")]) == 2


def test_an_installation_that_is_there_says_nothing(ready):
    ready.install()
    assert steps_said(ready.install().stdout) == []


# ---- libtpu ------------------------------------------------------------------------------------


CHIPS = "CHIPS=/dev/accel0"


def test_libtpu_is_the_pinned_one_where_chips_are(ready):
    assert ready.install().returncode == 0
    assert ready.libtpu() == []

    shutil.rmtree(ready.venv)
    assert ready.install(CHIPS).returncode == 0
    assert ready.libtpu() == [PINNED]


def test_another_libtpu_is_installed_and_stays(ready):
    ready.install(CHIPS)
    assert ready.install(CHIPS, "LIBTPU_VERSION=0.0.51").returncode == 0
    assert ready.libtpu() == ["0.0.51"]
    assert (ready.venv / ".libtpu_version").read_text() == "0.0.51\n"
    ready.done()

    # The same again, and commands that do not name it, leave it.
    ready.install(CHIPS, "LIBTPU_VERSION=0.0.51")
    ready.install(CHIPS)
    assert not ready.done()

    (ready.venv / ".installed").unlink()
    ready.install(CHIPS)
    assert ready.libtpu() == ["0.0.51"]

    assert ready.install(CHIPS, "LIBTPU_VERSION=0.0.52").returncode == 0
    assert ready.libtpu() == ["0.0.52"]


def test_a_libtpu_that_was_replaced_by_hand_is_installed_again(ready):
    ready.install(CHIPS, "LIBTPU_VERSION=0.0.51")
    site = ready.venv / "lib/python3.11/site-packages"
    (site / "libtpu-0.0.51.dist-info").rename(site / "libtpu-0.0.40.dist-info")

    assert ready.install(CHIPS, "LIBTPU_VERSION=0.0.51").returncode == 0
    assert ready.libtpu() == ["0.0.51"]


def assert_next_install_starts_over(machine: Machine) -> None:
    """Asserts that a failed installation is not taken for one, nor its choice of libtpu."""
    assert not machine.is_installed()
    assert machine.install(CHIPS).returncode == 0
    assert machine.libtpu() == [PINNED]


def test_a_libtpu_whose_download_stalls_is_not_remembered(ready):
    ready.install(CHIPS)
    (ready.folder / "stalled").touch()
    failed = ready.install(CHIPS, "LIBTPU_VERSION=0.0.51")
    assert failed.returncode == 2
    assert "No matching distribution" not in failed.stderr

    (ready.folder / "stalled").unlink()
    assert_next_install_starts_over(ready)


def test_a_libtpu_that_does_not_exist_is_not_remembered(ready):
    ready.install(CHIPS)
    failed = ready.install(CHIPS, "LIBTPU_VERSION=0.0.99")
    assert failed.returncode == 2
    assert "No matching distribution" in failed.stderr

    assert_next_install_starts_over(ready)


def test_libtpu_version_of_the_shell_is_not_taken(ready, monkeypatch):
    monkeypatch.setenv("LIBTPU_VERSION", "0.0.51")
    assert ready.install(CHIPS).returncode == 0
    assert ready.libtpu() == [PINNED]

    monkeypatch.setenv("LIBTPU_VERSION", "; false")
    assert ready.install(CHIPS).returncode == 0


@pytest.mark.parametrize(
    "word",
    [
        "0.0",
        "0.0.51.1",
        "latest",
        "0..51",
        ".0.51",
        "0.0.51 0.0.52",
        "0.0.51;x",
        "v0.0.51",
        "0.0.51 ",
    ],
)
def test_a_libtpu_that_is_no_version_is_refused(ready, word):
    refusals = [
        ready.install(f"LIBTPU_VERSION={word}", CHIPS),
        ready.install(f"LIBTPU_VERSION={word}"),
        make("train", "MODEL=bert", "TPU=my-tpu", f"LIBTPU_VERSION={word}"),
    ]
    for refused in refusals:
        assert refused.returncode == 2
        assert f"LIBTPU_VERSION={word} is no version" in refused.stderr
    assert not ready.done()


def test_a_libtpu_without_chips_is_refused(ready):
    refused = ready.install("LIBTPU_VERSION=0.0.51")
    assert refused.returncode == 2
    assert "no chip is here; leave it out" in refused.stderr
    assert not ready.done()


def test_a_libtpu_without_xla_is_refused(ready):
    refused = ready.install("LIBTPU_VERSION=0.0.51", CHIPS, "DEVICE=cpu")
    assert refused.returncode == 2
    assert "DEVICE=cpu is without XLA; leave it out" in refused.stderr
    assert not ready.done()


def test_the_launcher_hands_the_version_on(monkeypatch):
    given = make("-n", "train", "MODEL=bert", "TPU=my-tpu", "LIBTPU_VERSION=0.0.51")
    assert '"LIBTPU_VERSION=$LIBTPU_VERSION"' in given.stdout

    monkeypatch.setenv("LIBTPU_VERSION", "0.0.51")
    of_the_shell = make("-n", "train", "MODEL=bert", "TPU=my-tpu")
    assert "LIBTPU_VERSION" not in of_the_shell.stdout


def test_skypilot_refuses_a_version_of_libtpu():
    words = ["MODEL=bert", "ENGINE=sky", "BUCKET=gs://b", "RUN=one", "LIBTPU_VERSION=0.0.51"]
    refused = make("train", *words)
    assert refused.returncode == 2
    assert "ENGINE=sky takes" in refused.stderr
