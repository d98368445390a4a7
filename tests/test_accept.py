"""tpu/accept over a trainer that is none (tests/fake_accepted.py), here and through the launcher (tests/launch_bed.py):
each fault is found and named, whatever fails the others are tried, and nothing is left running.

`make test-all` runs it with a real script, too.
"""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_bed import PYTHON, ROOT, TESTS, Processes, git, processes, send, wait, write_programs
from trials import TRIALS

from errors import InputError
from tpu.accept import __main__ as command_line
from tpu.accept import checks, expected, page
from tpu.accept.children import Child, Limits, read_report
from tpu.compiler import libtpu
from train.common import cli
from train.common.watch import report

MAKEFILE = """
RECORDED := $(if $(XLA_ZOO_EXIT_CODE),sh exit_code.sh )

train:
	@$(RECORDED)python3 -I -S train.py "$(MODEL)" "$(TASK)" "$(NAME)" $(ARGS)

compile:
	@$(RECORDED)python3 -I -S compile.py "$(OUT)" "$(TOPOLOGY)" "$(BATCH)" "$(LIBTPU_VERSION)"

doctor:
	@echo 'none  TPU: this machine has no chip: training here uses the CPU'
	@$(RECORDED)sh -c "[ ! -e sick ] || { echo 'fix   disk: 1 GB free: make room'; exit 1; }"
"""
# As make compile: exit code 3 where the compiler died.
COMPILE = """
import json, pathlib, sys
out, topology, batch, version = sys.argv[1:]
if pathlib.Path("dies").exists():
    sys.exit(print("error: libtpu 0.0.21 died (SIGSEGV): resnet50 full", file=sys.stderr) or 3)
seconds = None if topology.startswith("v6e") else 0.066
found = {"estimated_seconds": seconds, "roofline_seconds": {"flops": 0.016, "bytes": 0.03}, "cycles": 99_600_000}
pathlib.Path(out).write_text(json.dumps({**found, "memory": {"needed": 5 << 30}, "asked": [topology, batch, version]}))
"""
MARK = "ACCEPTED"  # a variable of all that a test starts


class Project:
    """A project of the stand-in trainer, in which `python3 -m tpu.accept` runs."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.environment = {**environment, MARK: str(folder)}
        self.clients: list[subprocess.Popen] = []
        folder.mkdir(exist_ok=True)
        self.runs.mkdir()
        texts = {"Makefile": MAKEFILE, "compile.py": COMPILE, "train.py": (TESTS / "fake_accepted.py").read_text()}
        texts["exit_code.sh"] = (ROOT / "tpu/exit_code.sh").read_text()
        texts[".gitignore"] = "runs/\n/accept-*\ntpu\nerrors.py\n.libtpu\n"
        for name, text in texts.items():
            (folder / name).write_text(text)
        for name in ("tpu", "errors.py"):
            (folder / name).symlink_to(ROOT / name)

    def set(self, **settings: object) -> None:
        """Says what hardware the trainer tells of, and what goes wrong in which run; see tests/fake_accepted.py."""
        (self.runs / "settings.json").write_text(json.dumps(settings))

    def install_compiler(self) -> None:
        (self.folder / ".libtpu/0.0.21").mkdir(parents=True)
        (self.folder / ".libtpu/0.0.21/.installed").touch()

    def start(self, *arguments: str) -> subprocess.Popen:
        words = [PYTHON, "-S", "-m", "tpu.accept", "--out", "accept-one", "--runs", str(self.runs), *arguments]
        out = (self.folder.parent / f"{self.folder.name}-out").open("w")
        client = subprocess.Popen(
            words, cwd=self.folder, env=self.environment, stdout=out, stderr=out, start_new_session=True
        )
        out.close()
        self.clients.append(client)
        return client

    def output(self) -> str:
        return (self.folder.parent / f"{self.folder.name}-out").read_text()

    def accept(self, *arguments: str, seconds: float = 120) -> tuple[int, dict[str, dict]]:
        """Returns the exit code and the checks by name."""
        code = self.start(*arguments).wait(seconds)
        assert "Traceback" not in self.output(), self.output()
        return code, self.checks()

    def found(self) -> dict:
        return json.loads((self.folder / "accept-one.json").read_text())

    def checks(self) -> dict[str, dict]:
        return {check["name"]: check for check in self.found()["checks"]}

    def log(self, name: str) -> str:
        return (self.folder / self.checks()[name]["log"]).read_text()

    def left(self) -> list[int]:
        """Returns what is left of all that was started: the trainer, its loader, make."""
        return processes(f"{MARK}={self.folder}\0")

    def close(self) -> None:
        for client in self.clients:
            client.kill()
            client.wait()
        send(signal.SIGKILL, self.left())


@pytest.fixture
def here(tmp_path):
    write_programs(tmp_path / "bin", python3=f"exec {PYTHON}")
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    project = Project(tmp_path / "project", {"PATH": path, "HOME": str(tmp_path)})
    yield project
    project.close()


QUICK = ("--silent", "8", "--limit", "100", "--ending", "40")
PATIENT = ("--silent", "20", "--limit", "120", "--ending", "60")  # a failed worker leaves the others 10 s


def test_all_that_is_promised_is_tried_and_the_page_says_what_was_measured(here):
    code, found = here.accept()
    assert code == 0, here.output()
    outcomes = {name: check["outcome"] for name, check in found.items()}
    special = {"checkpoint of all hosts", "step time and memory", "predict"}
    assert {outcome for name, outcome in outcomes.items() if name not in special} == {"ok"}, outcomes
    assert found["checkpoint of all hosts"]["why"] == "there is one host"
    assert found["step time and memory"]["why"] == "no estimate for a CPU"
    assert (outcomes["predict"], found["predict"]["why"]) == ("not there", "there is no make predict")
    for name in expected.LEARNED:
        trial, resumed = found[f"{name}: trial"], found[f"{name}: kill and resume"]
        assert trial["metrics"] == resumed["metrics"] and trial["exit_codes"] == [0]
        assert resumed["exit_codes"] == [137, 0] and trial["step"]["median"] == pytest.approx(0.01)
    assert found["stop and saved"]["exit_codes"] == [143, 143]
    assert "python: " not in here.output() and here.found()["versions"]["libtpu"] == "0.0.21"
    # What is written can be repeated as it is, and make's own words are not in the log of a run.
    command = found["dlrm: trial"]["commands"][0]
    again = subprocess.run(shlex.split(command), cwd=here.folder, env=here.environment, capture_output=True, text=True)
    assert again.returncode == 0 and '"event": "end"' in again.stdout
    assert "report {" in here.log("dlrm: trial") and command in here.log("dlrm: trial")
    text = (here.folder / "accept-one.md").read_text()
    for words in (
        "1 x CPU, 1 host",
        "top1 0.97",
        "a step 10.0 ms",
        "1.00 GiB of the host",
        "libtpu 0.0.21",
        "## How to",
    ):
        assert words in text, words
    assert not here.left()


def test_only_what_was_asked_for_is_tried(here):
    code, found = here.accept("--only", "dlrm", "predict")
    assert code == 0 and list(found) == ["dlrm: trial", "dlrm: kill and resume", "predict"]
    (here.folder / "Makefile").write_text(MAKEFILE + "\npredict: install\n")
    assert "does not call it yet" in here.accept("--only", "predict")[1]["predict"]["why"]


def test_what_doctor_finds_fails_and_the_rest_is_tried(here):
    (here.folder / "sick").touch()
    code, found = here.accept("--only", "doctor", "dlrm: trial")
    assert code == 1 and found["doctor"]["why"] == "disk: 1 GB free: make room"
    assert found["dlrm: trial"]["outcome"] == "ok" and found["doctor"]["notes"]


# Fault, the run that has it, the check that finds it, what it says of it, and exit codes of its programs.
FAULTS = [
    # In all runs: one that has another number than the resumed run fails both checks.
    ("wrong", "", "dlrm: trial", "a wrong number: auc is 0.2687; expected 0.78 to 0.86", [0]),
    ("nan", "dlrm", "dlrm: trial", "a wrong number: loss is nan at step 100", [0]),
    ("diverges", "dlrm", "dlrm: trial", "a value is not finite .*loss is nan at step 100", [2]),
    ("hangs", "dlrm", "dlrm: trial", "hangs.*printed nothing for 8 s.*after step 100.*was stopped", None),
    ("full disk", "dlrm", "dlrm: trial", r"a disk is full \(error: cannot write .*make room", [2]),
    (
        "SIGSEGV",
        "dlrm",
        "dlrm: trial",
        r"the compiler died of train_step .*SIGSEGV, exit code 139.*--safe-forms",
        [139],
    ),
    (
        "SIGABRT",
        "dlrm",
        "dlrm: trial",
        r"the compiler died of train_step .*SIGABRT, exit code 134.*--safe-forms",
        [134],
    ),
    ("oom", "dlrm", "dlrm: trial", "killed from outside.*137", [137]),
    ("no export", "dlrm", "dlrm: trial", "there is no export", [0]),
    ("blind", "dlrm", "dlrm: trial", "never evaluated", [0]),
    ("recompiles", "dlrm", "dlrm: trial", "1 recompilations, expected none: train_step", [0]),
    ("mute", "dlrm", "dlrm: trial", "did not report a result", [0]),
    ("drift", "killed", "dlrm: kill and resume", r"a wrong number: loss of step 160 is .*, not .* apart\)", [137, 0]),
    ("other result", "killed", "dlrm: kill and resume", "a wrong number: the final metrics are", [137, 0]),
    (
        "forgets",
        "killed",
        "dlrm: kill and resume",
        "did not resume, but began again; .*step_00000150/COMPLETE",
        [137, 0],
    ),
    ("immortal", "killed", "dlrm: kill and resume", "not killed after step 160, but ended", [0]),
    ("hangs", "killed", "dlrm: kill and resume", "hangs", None),
    ("unsaved", "stopped", "stop and saved", "nothing was saved", [143, 143]),
    ("polite", "stopped", "stop and saved", "ended with 0 when it was asked to stop, expected 143", [0]),
    ("deaf", "stopped", "stop and saved", "did not end within 2 s after it was asked to stop", [137]),
]


# One of each kind in every `make test`; the others are slow.
OFTEN = ("wrong", "hangs", "full disk", "SIGSEGV", "forgets", "unsaved")
MARKED = []
for each in FAULTS:
    marks = () if each[0] in OFTEN and each[:2] != ("hangs", "killed") else pytest.mark.slow
    MARKED.append(pytest.param(*each, marks=marks, id=f"{each[0]}-{each[1]}"))


@pytest.mark.parametrize(("fault", "run", "name", "pattern", "codes"), MARKED)
def test_a_fault_is_found_and_named_the_rest_is_tried_and_nothing_is_left(fault, run, name, pattern, codes, here):
    here.set(fault=fault, run=run)
    code, found = here.accept(
        "--only", "dlrm", "stop", "predict", *QUICK, *(["--ending", "2"] if fault == "deaf" else [])
    )
    check = found[name]
    assert code == 1 and check["outcome"] == "failed", here.output()
    assert re.search(pattern, check["why"]), check["why"]
    assert codes is None or check["exit_codes"] == codes
    assert check["last_lines"] and check["commands"] and check["log"]
    failed = {each for each, other in found.items() if other["outcome"] == "failed"}
    assert failed == {name} and found["predict"]["outcome"] == "not there"
    text = (here.folder / "accept-one.md").read_text()
    assert f"## {name} failed" in text and check["commands"][0] in text and check["last_lines"][-1] in text
    assert not here.left()


def test_a_run_that_never_starts_is_ended_after_its_limit(here):
    here.set(fault="no start", run="dlrm")
    code, found = here.accept("--only", "dlrm: trial", "--limit", "2", "--silent", "1")
    assert code == 1 and "not over after 2 s" in found["dlrm: trial"]["why"]
    assert "before its first step" in found["dlrm: trial"]["why"] and not here.left()


TPU = {"kind": "TPU v5 lite", "devices": 8, "seconds": 0.07}
SPEED = "step time and memory"


def speed(here: Project, *arguments: str, **settings: object) -> dict:
    """Returns the check of step time and memory on such a TPU."""
    here.set(**{**TPU, **settings})
    return here.accept("--only", "dlrm: trial", SPEED, *QUICK, *arguments)[1][SPEED]


def test_step_time_and_memory_stand_beside_the_estimate(here):
    here.install_compiler()
    check = speed(here)
    assert check["outcome"] == "ok", check
    assert check["estimate"]["factor"] == pytest.approx(0.07 / 0.066) and check["chip_bytes"] == 3 << 30
    assert json.loads((here.folder / "accept-one/estimate.json").read_text())["asked"] == ["v5e:2x4", "128", "0.0.21"]
    told = "70.0 ms, 1.06 times the compiler's estimate, 66.0 ms"
    assert told in check["notes"][0] and "3.00 GiB, estimated 5.00" in check["notes"][1]
    train, compile_ = (shlex.split(command) for command in check["commands"])
    assert {"MODEL=resnet50", "PRESET=full", "DATA=synthetic"} < set(train) and "--batch-size 1024" in train[-1]
    assert {"TOPOLOGY=v5e:2x4", "BATCH=128", "EFFORT=full"} < set(compile_)
    assert told in (here.folder / "accept-one.md").read_text()


def test_a_slow_chip_is_found_by_its_factor(here):
    here.install_compiler()
    why = speed(here, seconds=0.2)["why"]
    assert "200.0 ms, 3.03 times the compiler's estimate, 66.0 ms, more than 2 times: a slow chip" in why
    assert "the host is slow, and the chip is not known to be" in speed(here, seconds=0.2, wait=0.7)["why"]
    assert speed(here, "--slow", "4", seconds=0.2)["outcome"] == "ok"
    check = speed(here, kind="TPU v6 lite", seconds=0.2)
    assert "6.67 times the roofline (the clock is not published), 30.0 ms, more than 4 times" in check["why"]


def test_without_the_compiler_the_estimate_is_not_there_and_its_command_is(here):
    check = speed(here)
    assert check["outcome"] == "not there" and "measured: 70.0 ms" in check["why"]
    assert "make compile MODEL=resnet50 PRESET=full TOPOLOGY=v5e:2x4" in check["why"]
    assert "knows no topology of 3 devices of TPU v5 lite" in speed(here, devices=3)["why"]


def test_a_compiler_that_dies_on_this_machine_is_named(here):
    here.install_compiler()
    (here.folder / "dies").touch()
    check = speed(here)
    assert check["outcome"] == "failed" and "the compiler died on this machine: error: libtpu 0.0.21" in check["why"]


def test_ctrl_c_leaves_nothing_running_and_the_files(here):
    here.set(fault="deaf", run="stopped")  # a trainer that SIGTERM does not end, either
    client = here.start("--only", "dlrm: trial", "stop", "predict", "--ending", "1")
    wait(lambda: "stop and saved" in here.output() and processes(f"{MARK}={here.folder}\0", "-stopped"))
    client.send_signal(signal.SIGINT)
    client.send_signal(signal.SIGINT)  # an impatient second one does not interrupt the ending
    assert client.wait(60) == 130 and not here.left(), here.output()
    found = here.checks()
    assert found["dlrm: trial"]["outcome"] == "ok"
    assert [found[name]["why"] for name in ("stop and saved", "predict")] == ["Ctrl-C", "Ctrl-C"]
    assert "Ctrl-C" in (here.folder / "accept-one.md").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_other_signals_are_like_ctrl_c(number, here):
    here.set(fault="no start", run="dlrm")
    client = here.start("--only", "dlrm: trial")
    wait(lambda: processes(f"{MARK}={here.folder}\0", "train.py"))
    client.send_signal(number)
    assert client.wait(60) == 130 and not here.left()


class Pod(Project):
    """The project, a TPU of two workers that is not there, and the real launcher between them."""

    def __init__(self, folder: Path) -> None:
        self.bed = Processes(folder, 2)
        write_programs(self.bed.bin, python3=f"exec {PYTHON}", make="")
        path = f"{self.bed.bin}:/usr/bin:/bin"
        shutil.rmtree(self.bed.project)
        super().__init__(self.bed.project, {"PATH": path, "HOME": str(self.bed.client_home)})
        git(self.folder, "init", "-q")
        git(self.folder, "add", ".")
        self.set()

    def set(self, **settings: object) -> None:
        super().set(**{"kind": "TPU v5 lite", "devices": 8, "hosts": 2, **settings})

    def start(self, *arguments: str) -> subprocess.Popen:
        launch = ["--launch-args=--lost-after 25"]
        return super().start("--tpu", "my-tpu", "--zone", "us-east5-b", *launch, *arguments)

    def close(self) -> None:
        super().close()
        self.bed.close()


@pytest.fixture
def pod(tmp_path):
    pod = Pod(tmp_path)
    yield pod
    pod.close()


def test_two_workers_of_a_tpu(pod):
    code, found = pod.accept("--only", "doctor", "dlrm", "checkpoint", "stop", *PATIENT)
    assert code == 0, pod.output()
    assert {check["outcome"] for check in found.values()} == {"ok"}, found
    assert found["dlrm: kill and resume"]["exit_codes"] == [137, 0]
    assert found["stop and saved"]["exit_codes"] == [143, 143]
    assert "parts of 2 hosts" in found["checkpoint of all hosts"]["notes"][0]
    assert "TPU=my-tpu" in found["doctor"]["commands"][0]
    assert found["dlrm: trial"]["commands"][0].startswith("python3 -m tpu.launch train --tpu my-tpu --zone us-east5-b")
    assert "8 x TPU v5 lite, 2 hosts" in (pod.folder / "accept-one.md").read_text()
    pod.bed.check_idle()
    assert not pod.left()


POD_FAULTS = [
    ("wrong", "", "dlrm: trial", "a wrong number: auc is 0.2687"),
    ("hangs", "dlrm", "dlrm: trial", "hangs.*printed nothing for 20 s.*after step 100"),
    ("full disk", "dlrm", "dlrm: trial", "a disk is full"),
    ("SIGSEGV", "dlrm", "dlrm: trial", "the compiler died of train_step .*exit code 139.*--safe-forms"),
    ("drift", "killed", "dlrm: kill and resume", "a wrong number: loss of step"),
    ("part", "killed", "checkpoint of all hosts", "lacks tables-00001.json"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "run", "name", "pattern"), POD_FAULTS, ids=[each[0] for each in POD_FAULTS])
def test_a_fault_on_a_tpu_is_found_and_named_and_nothing_is_left(fault, run, name, pattern, pod):
    pod.set(fault=fault, run=run)
    code, found = pod.accept("--only", "dlrm", "checkpoint", "predict", *PATIENT)
    check = found[name]
    assert code == 1 and check["outcome"] == "failed", pod.output()
    assert re.search(pattern, check["why"]), check["why"]
    assert found["predict"]["outcome"] == "not there" and not pod.found()["left_running"]
    pod.bed.check_idle()
    assert not pod.left()


@pytest.mark.slow
def test_ctrl_c_ends_the_run_on_all_workers(pod):
    pod.set(fault="hangs", run="dlrm")
    client = pod.start("--only", "dlrm: trial", "predict")
    log = pod.folder / "accept-one/dlrm-trial.log"
    wait(lambda: log.exists() and '"step": 100' in log.read_text(), 60)
    client.send_signal(signal.SIGINT)
    assert client.wait(90) == 130, pod.output()
    pod.bed.check_idle()
    assert not pod.left() and pod.checks()["dlrm: trial"]["why"] == "Ctrl-C"


def test_when_the_tpu_is_gone_nothing_more_is_tried(pod):
    pod.bed.set(state="PREEMPTED")
    code, found = pod.accept("--only", "dlrm", "stop", *PATIENT)
    assert code == 1 and "the TPU is gone" in found["dlrm: trial"]["why"]
    for name in ("dlrm: kill and resume", "stop and saved"):
        assert found[name]["outcome"] == "not run" and "recreate it" in found[name]["why"]
    pod.bed.check_idle()


def test_what_cannot_be_used_is_refused(here):
    def refused(pattern: str, *arguments: str) -> None:
        assert here.start(*arguments).wait(30) == 2
        assert re.search(pattern, here.output()) and "Traceback" not in here.output(), here.output()

    refused("--only vgg begins no check; the checks are: doctor, resnet50: trial", "--only", "vgg")
    refused("--recipe bert-mrpc needs --data", "--recipe", "bert-mrpc")
    refused("--data is /data, but trials take none", "--data", "/data")
    refused("has no .git", "--tpu", "my-tpu")
    refused("invalid choice: 'vgg'", "--recipe", "vgg", "--data", "/data")
    (here.folder / "Makefile").rename(here.folder / "elsewhere")
    refused("has no Makefile; start it from the project's folder")


def test_a_full_disk_of_this_machine_fails_the_check_and_not_the_rest(here):
    """The folder of the logs is not there any more."""
    here.set(fault="no start", run="-dlrm")
    client = here.start("--only", "dlrm: trial", "predict", "--limit", "3")
    wait(lambda: (here.folder / "accept-one").exists())
    (here.folder / "accept-one.json.new").mkdir()  # no file can be written
    assert client.wait(60) == 1
    assert "warning: cannot write" in here.output() and "predict …" in here.output()


# The table of docs/results.md.


def result(recipe: str, **changes: object) -> dict:
    made = {"name": recipe, "recipe": recipe, "outcome": "ok", "seconds": 90.0, "metrics": {"auc": 0.8025}}
    return {**made, **changes}


def accepted(folder: Path, name: str, *results: dict) -> Path:
    hardware = {"kind": "TPU v6 lite", "devices": 8, "hosts": 1}
    content = {"written_by": "tpu.accept", "format": 1, "hardware": hardware, "checks": list(results)}
    (folder / name).write_text(json.dumps(content))
    return Path(name)


def test_the_table_is_that_of_the_files_that_are_committed():
    files = sorted(path.relative_to(ROOT) for path in ROOT.glob("docs/accepted/*.json"))
    text = (ROOT / page.RESULTS).read_text()
    assert page.with_table(text, files) == text, "python3 -m tpu.accept --table docs/accepted/*.json"


def test_the_table_has_a_row_for_each_result_and_says_what_was_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = accepted(tmp_path, "a.json", result("trial dlrm"), result("dlrm-v1", seconds=9000, outcome="ok"))
    second = accepted(
        tmp_path, "b.json", result("trial dlrm", metrics={"auc": 0.81}), result("trial glue", outcome="failed")
    )
    lines = page.table([second, first]).splitlines()
    assert "| trial: DLRM | 8 x TPU v6 lite, 1 host | 1.5 min | auc 0.8025 | [a](../a.json) |" in lines
    assert "| trial: DLRM | 8 x TPU v6 lite, 1 host | 1.5 min | auc 0.81 | [b](../b.json) |" in lines
    (row,) = [line for line in lines if "mlperf_v1" in line]
    assert "| 2.5 h | auc 0.8025 (AUC 0.8025) |" in row
    assert f"| trial: BERT, fine-tuning | {page.NEVER} | | | |" in lines
    assert len(lines) == 2 + len(expected.SCRIPTS) + len(expected.RECIPES) + 1


def test_a_table_is_written_between_its_marks_and_from_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    results = tmp_path / page.RESULTS
    results.parent.mkdir()

    def write_table(*names: str) -> int:
        monkeypatch.setattr(sys, "argv", ["accept", "--table", *names])
        return command_line.main()

    results.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    assert write_table("docs/accepted/*.json") == 0  # as the shell leaves it where there is no file
    text = results.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and page.NEVER in text and "old" not in text
    accepted(tmp_path, "a.json", result("trial dlrm"))
    assert write_table("a.json") == 0 and "TPU v6 lite" in results.read_text()
    (tmp_path / "other.json").write_text("[]")
    for name, pattern in (
        ("other.json", "was not written by make accept"),
        ("none.json", "none.json is not there"),
        (f"{tmp_path}/a.json", "cannot be linked to"),
    ):
        assert write_table(name) == 2 and pattern in capsys.readouterr().err
    results.write_text("no marks")
    assert write_table("a.json") == 2 and "put both back" in capsys.readouterr().err


def test_a_recipe_gets_into_the_table(here):
    code, found = here.accept("--recipe", "dlrm-v1", "--data", "gs://a bucket/clicks")
    assert code == 0, here.output()
    check = found["recipe dlrm-v1"]
    assert {"MODEL=dlrm", "PRESET=mlperf_v1", "DATA=gs://a bucket/clicks"} < set(shlex.split(check["commands"][0]))
    row = page.table([here.folder / "accept-one.json"])
    assert "| 1 x CPU, 1 host |" in row and "auc 0.806" in row


# What it knows of the scripts and of make.


@pytest.mark.parametrize("script", expected.SCRIPTS, ids=lambda script: script.name)
def test_what_is_known_of_a_script_is_so(script):
    trial = TRIALS[script.name]
    assert trial.learned is expected.LEARNED[script.name]  # in one place
    words = ["make", "-n", "train", *shlex.split(script.words), f"ARGS={script.long}"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment).stdout.replace(
        "\\\n", " "
    )
    (line,) = [line for line in printed.splitlines() if f"-m train.{script.name} tiny" in line]
    cli.parse(trial.script.PRESETS, "python -m train", shlex.split(line.partition(f"train.{script.name} ")[2]))
    tiny = trial.script.TINY
    every = getattr(tiny, "save_every", 0) or getattr(tiny, "eval_every", 0) or 64  # glue: 2,048 examples of 32
    assert script.kill_at > every and script.kill_at % every


def test_the_shapes_of_slices_are_those_of_make_compile():
    for kind, (generation, _) in expected.GENERATIONS.items():
        for chips in expected.SHAPES:
            devices = chips * libtpu.GENERATIONS[generation].devices_per_chip
            name = expected.topology(kind, devices)
            made = 1
            for size in name.partition(":")[2].split("x"):
                made *= int(size)
            assert made == chips and (name in libtpu.TOPOLOGIES or (chips == 8 and generation in ("v2", "v3"))), name
    assert set(libtpu.GENERATIONS) == {generation for generation, _ in expected.GENERATIONS.values()}
    assert expected.topology("TPU v5 lite", 3) == expected.topology("TPU v99", 8) == ""


def test_make_hands_over_what_it_was_given():
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }

    def printed(*given: str) -> str:
        command = ["make", "-n", "accept", "PYTHON=python3", *given]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        return " ".join(result.stdout.replace("\\\n", " ").split())

    assert printed() == 'python3 -m tpu.accept --python "python3"'
    whole = printed("TPU=my-tpu", "ZONE=z", "PROJECT=p", "RUNS=gs://b", "OUT=one", "ARGS=--only dlrm")
    assert whole.endswith('--zone "$ZONE" --project "$PROJECT" --runs "$RUNS" --out "$OUT" --only dlrm')


@pytest.mark.parametrize("path", sorted(ROOT.glob("tpu/accept/*.py")), ids=lambda path: path.name)
def test_it_needs_no_newer_python_and_no_package(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module.partition(".")[0] for module in modules} - {"errors", "tpu"} <= {
        "__future__",
        *sys.stdlib_module_names,
    }


# What a run reports: train/common/watch/report.py.


class FakeRun:
    """As much of a Run as the reporter asks."""

    def __init__(self, folder: Path, host: int = 0, hosts: int = 1) -> None:
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints/state").write_text("four")
        (folder / "config.json").write_text(
            '{"starts": [{"versions": {"torch": "0"}}, {"versions": {"torch": "2.9.0"}}]}'
        )
        self.mesh = SimpleNamespace(
            main_process=host == 0, process_index=host, process_count=hosts, kind="CPU", num_devices=hosts
        )
        self.path, self.start, self.total_steps, self.finished, self.summary = str(folder), 0, 20, False, None
        self.folder = SimpleNamespace(read=lambda name: (folder / name).read_bytes(), files=local_files())
        self.waited, self.said = [], []
        self.checkpoints = SimpleNamespace(wait=lambda: self.waited.append(1))

    def message(self, text: str) -> None:
        if self.mesh.main_process:
            self.said.append(text)


def local_files():
    import fsspec

    return fsspec.filesystem("file")


def test_a_run_reports_its_start_its_lines_with_every_digit_and_its_end(tmp_path):
    run = FakeRun(tmp_path / "run")
    with report.watcher(report.Flags(report=True))(run) as watch:
        watch.line(10, {"loss": 0.1 + 0.2, "lr": float("nan")}, {"training": 1.0})
        run.finished, run.summary = True, {"metrics": {"auc": 0.8}}
    child = Child(["true"], tmp_path / "log")
    child._file = (tmp_path / "log").open("w")
    for text in run.said:
        child._hear(text)
    start, line, end = child.events
    assert start["step"] == 0 and start["files"]["checkpoints/state"] == 4 and start["pid"] == os.getpid()
    assert start["started"]["versions"] == {"torch": "2.9.0"}
    assert line["values"]["loss"] == 0.1 + 0.2 and checks.not_finite(line["values"]) == "lr is nan"
    assert end["summary"] == {"metrics": {"auc": 0.8}} and end["chip_bytes"] is None and end["host_bytes"] > 0
    assert report.watcher(report.Flags()) is None
    with pytest.raises(InputError, match="--kill-at is -1; it must be a step"):
        report.watcher(report.Flags(kill_at=-1))


def test_an_unfinished_run_reports_no_end(tmp_path):
    run = FakeRun(tmp_path / "run")
    with pytest.raises(SystemExit), report.watcher(report.Flags(report=True))(run):
        raise SystemExit(143)
    assert len(run.said) == 1 and '"event": "start"' in run.said[0]


@pytest.mark.parametrize(("host", "start", "killed"), [(1, 0, True), (0, 0, False), (1, 12, False)])
def test_kill_at_kills_the_last_host_alone_once_its_checkpoints_are_written(host, start, killed, tmp_path, monkeypatch):
    run = FakeRun(tmp_path / "run", host, hosts=2)
    run.start = start
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number, len(run.waited))))
    with report.watcher(report.Flags(kill_at=10))(run) as watch:
        for step in range(start + 1, start + 11):
            watch.step(step)
    assert sent == ([(os.getpid(), signal.SIGKILL, 1)] if killed else [])
    assert run.said == []


def test_the_memory_of_chips_is_what_libtpu_tells(monkeypatch):
    answers = iter([["10", "20"], ["30", "5"], ["7", "7"]])

    def get_metric(name: str):
        assert name == "hbm_capacity_usage"
        return SimpleNamespace(data=lambda: next(answers))

    monitoring = SimpleNamespace(get_metric=get_metric)
    monkeypatch.setitem(sys.modules, "libtpu.sdk", SimpleNamespace(tpumonitoring=monitoring))
    monkeypatch.setattr(report, "LOOK_EVERY", 0.01)
    memory = report.ChipMemory("TPU v6 lite")
    memory.start()
    wait(lambda: memory.why)  # no answer is left
    memory.stop()
    assert memory.most == 30 and "StopIteration" in memory.why
    assert report.ChipMemory("CPU").why == "no chip: CPU"


def test_a_silent_compilation_is_no_hang(tmp_path):
    child = Child(["true"], tmp_path / "log")
    child._file = (tmp_path / "log").open("w")
    limits = Limits(whole=100, silent=5, ending=1)
    child.began = time.monotonic() - 50
    child._hear('report {"event": "start", "step": 0}')
    child.heard -= 50
    assert "in its first steps" in child._over_limit(limits)
    child._hear("compiling train_step with libtpu 0.0.21")
    child.heard -= 50
    assert child._over_limit(limits) == "" and child.place() == "compiling train_step with libtpu 0.0.21"
    child.began -= 100
    assert "not over after 100 s" in child._over_limit(limits) and "compiling train_step" in child._over_limit(limits)
    child._hear("compiled train_step in 50 s")
    assert child.place() == "in its first steps"


@pytest.mark.parametrize(
    ("line", "event", "rest"),
    [
        ('report {"event": "line", "step": 7}', {"event": "line", "step": 7}, ""),
        ('report {"event": "end"}warning: the disk is slow', {"event": "end"}, "warning: the disk is slow"),
        ('WARNING:root:report {"event": "end"}', {"event": "end"}, "WARNING:root:"),
        ('it prints report {"other": 1}', {}, 'it prints report {"other": 1}'),
        ("a report {is no JSON}", {}, "a report {is no JSON}"),
        ("step 7", {}, "step 7"),
    ],
)
def test_a_report_is_found_where_another_program_has_written_into_its_line(line, event, rest):
    assert read_report(line) == (event, rest)


@pytest.mark.slow
def test_a_real_script_is_accepted_on_this_cpu(tmp_path):
    given = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS", "CPU_NUM_DEVICES"}
    environment = {name: value for name, value in os.environ.items() if name not in given}
    words = ["--only", "dlrm", "stop", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "one")]
    result = subprocess.run(
        [sys.executable, "-m", "tpu.accept", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "one.json").read_text())
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    assert outcomes == dict.fromkeys(("dlrm: trial", "dlrm: kill and resume", "stop and saved"), "ok")
    assert found["checks"][1]["notes"] == ["killed after step 160, resumed after step 128"]
