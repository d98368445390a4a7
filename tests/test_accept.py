"""tpu/accept over a trainer that is none (tests/fake_accepted.py) and a prediction that is none
(tests/fake_predicted.py), here and through the launcher (tests/launch_bed.py): each fault is found
and named, whatever fails the others are tried, and nothing is left running.

`make test-all` runs it with a real script, too.
"""

import ast
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import PIL.Image
import pytest
from launch_bed import PYTHON, ROOT, TESTS, Processes, git, processes, send, wait, write_programs
from trials import TRIALS

from data import glue
from errors import InputError
from tpu.accept import __main__ as command_line
from tpu.accept import checks, expected, predictions, results
from tpu.accept.children import Child, Limits, read_report
from tpu.compiler import libtpu
from train.common import cli
from train.common.watch import report

MAKEFILE = """
RECORDED := $(if $(XLA_ZOO_EXIT_CODE),sh exit_code.sh )

train:
	@$(RECORDED)python3 -I -S train.py "$(MODEL)" "$(TASK)" "$(NAME)" $(ARGS)

predict:
	@$(RECORDED)python3 -I -S predict.py "$(MODEL_DIR)" "$(DATA)" "$(OUT)" $(ARGS)

compile:
	@$(RECORDED)python3 -I -S compile.py "$(OUT)" "$(TOPOLOGY)" "$(BATCH)" "$(LIBTPU_VERSION)"

doctor:
	@echo 'none  TPU: this machine has no chip: training here uses the CPU'
	@$(RECORDED)sh -c "[ ! -e sick ] || { echo 'fix   disk: 1 GB free: make room'; exit 1; }"
"""

# As make compile: exit code 3 where the compiler died.
COMPILE = """
import json
import pathlib
import sys

out, topology, batch, version = sys.argv[1:]
if pathlib.Path("dies").exists():
    print("error: libtpu 0.0.21 died (SIGSEGV): resnet50 full", file=sys.stderr)
    sys.exit(3)

found = {
    "estimated_seconds": None if topology.startswith("v6e") else 0.066,
    "roofline_seconds": {"flops": 0.016, "bytes": 0.03},
    "cycles": 99_600_000,
    "memory": {"needed": 5 << 30},
    "asked": [topology, batch, version],
}
pathlib.Path(out).write_text(json.dumps(found))
"""

GITIGNORE = "runs/\n/accept-*\ntpu\nerrors.py\n.libtpu\n"
MARK = "ACCEPTED"  # a variable of all that a test starts
OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of the make that runs these tests


class Project:
    """A project of the stand-in trainer, in which `python3 -m tpu.accept` runs."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.environment = {**environment, MARK: str(folder)}
        self.clients: list[subprocess.Popen] = []
        folder.mkdir(exist_ok=True)
        self.runs.mkdir()

        files = {
            "Makefile": MAKEFILE,
            "compile.py": COMPILE,
            "train.py": (TESTS / "fake_accepted.py").read_text(),
            "predict.py": (TESTS / "fake_predicted.py").read_text(),
            "exit_code.sh": (ROOT / "tpu/exit_code.sh").read_text(),
            ".gitignore": GITIGNORE,
        }
        for name, text in files.items():
            (folder / name).write_text(text)
        for name in ("tpu", "errors.py"):
            (folder / name).symlink_to(ROOT / name)

    def set(self, **settings: object) -> None:
        """Says what hardware the trainer reports, and what goes wrong in which run; see
        tests/fake_accepted.py."""
        (self.runs / "settings.json").write_text(json.dumps(settings))

    def install_compiler(self) -> None:
        (self.folder / ".libtpu/0.0.21").mkdir(parents=True)
        (self.folder / ".libtpu/0.0.21/.installed").touch()

    def start(self, *arguments: str) -> subprocess.Popen:
        command = [PYTHON, "-S", "-m", "tpu.accept", "--out", "accept-one", "--runs"]
        command += [str(self.runs), *arguments]
        with self._output_file.open("w") as out:
            client = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.clients.append(client)
        return client

    @property
    def _output_file(self) -> Path:
        return self.folder.parent / f"{self.folder.name}-out"

    def output(self) -> str:
        return self._output_file.read_text()

    def accept(self, *arguments: str, seconds: float = 120) -> tuple[int, dict[str, dict]]:
        """Returns the exit code and the checks by name."""
        code = self.start(*arguments).wait(seconds)
        assert "Traceback" not in self.output(), self.output()
        return code, self.checks()

    def found(self) -> dict:
        return json.loads((self.folder / "accept-one.json").read_text())

    def checks(self) -> dict[str, dict]:
        return {check["name"]: check for check in self.found()["checks"]}

    def page(self) -> str:
        """Returns the page that an acceptance writes for its reader."""
        return (self.folder / "accept-one.md").read_text()

    def log(self, name: str) -> str:
        return (self.folder / self.checks()[name]["log"]).read_text()

    def still_running(self) -> list[int]:
        """Returns the processes left of all that was started: the trainer, its loader, make."""
        return processes(f"{MARK}={self.folder}\0")

    def close(self) -> None:
        for client in self.clients:
            client.kill()
            client.wait()
        send(signal.SIGKILL, self.still_running())


def make_project(folder: Path) -> Project:
    """Returns a project whose runs are processes of this machine."""
    write_programs(folder / "bin", python3=f"exec {PYTHON}")
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder)}
    return Project(folder / "project", environment)


@pytest.fixture
def here(tmp_path) -> Iterator[Project]:
    project = make_project(tmp_path)
    yield project
    project.close()


QUICK = ("--silent", "8", "--limit", "100", "--ending", "40")
# A failed worker leaves the others 10 s.
PATIENT = ("--silent", "20", "--limit", "120", "--ending", "60")


# ---- without a fault -----------------------------------------------------------------------------
@dataclass
class Acceptance:
    """An acceptance of all that is promised."""

    project: Project
    code: int
    checks: dict[str, dict]  # by name


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Iterator[Acceptance]:
    project = make_project(tmp_path_factory.mktemp("whole"))
    code, found = project.accept()
    yield Acceptance(project, code, found)
    project.close()


def test_all_that_is_promised_is_tried(whole):
    assert whole.code == 0, whole.project.output()
    outcomes = {name: check["outcome"] for name, check in whole.checks.items()}
    not_run = (
        "checkpoint of all hosts",
        "step time and memory",
        "dlrm: predict",
        "tagging: predict",
    )
    for name, outcome in outcomes.items():
        if name not in not_run:
            assert outcome == "ok", (outcomes, whole.checks[name])

    assert whole.checks["checkpoint of all hosts"]["why"] == "there is one host"
    assert whole.checks["step time and memory"]["why"] == "no estimate for a CPU"
    assert "without columns" in whole.checks["dlrm: predict"]["why"]
    assert "are entities" in whole.checks["tagging: predict"]["why"]
    for name in ("transformer: predict", "pretrain: predict"):
        assert name not in outcomes
    assert "python: " not in whole.project.output()
    assert whole.project.found()["versions"]["libtpu"] == "0.0.21"
    assert not whole.project.still_running()


@pytest.mark.parametrize("script", expected.LEARNED)
def test_a_trial_and_its_resumed_run_have_the_same_metrics(script, whole):
    trial = whole.checks[f"{script}: trial"]
    resumed = whole.checks[f"{script}: kill and resume"]

    assert trial["metrics"] == resumed["metrics"]
    assert trial["exit_codes"] == [0]
    assert trial["step"]["median"] == pytest.approx(0.01)
    assert resumed["exit_codes"] == [137, 0]


def test_a_run_that_is_asked_to_stop_ends_with_143(whole):
    assert whole.checks["stop and saved"]["exit_codes"] == [143, 143]


def test_a_command_of_the_page_can_be_repeated_as_it_is(whole):
    """And make's own words are not in the log of a run."""
    project = whole.project
    command = whole.checks["dlrm: trial"]["commands"][0]

    again = subprocess.run(
        shlex.split(command),
        cwd=project.folder,
        env=project.environment,
        capture_output=True,
        text=True,
    )

    assert again.returncode == 0
    assert '"event": "end"' in again.stdout
    assert "report {" in project.log("dlrm: trial")
    assert command in project.log("dlrm: trial")
    assert not project.still_running()


MEASURED = (
    "1 x CPU, 1 host",
    "top1 0.97",
    "a step 10.0 ms",
    "1.00 GiB of the host",
    "libtpu 0.0.21",
    "## How to",
)


def test_the_page_says_what_was_measured(whole):
    text = whole.project.page()
    assert [words for words in MEASURED if words not in text] == []


def test_only_what_was_asked_for_is_tried(here):
    code, found = here.accept("--only", "dlrm", "step")

    assert code == 0
    names = ["dlrm: trial", "dlrm: kill and resume", "dlrm: predict", "step time and memory"]
    assert list(found) == names


# ---- faults --------------------------------------------------------------------------------------
def test_what_doctor_finds_fails_and_the_rest_is_tried(here):
    (here.folder / "sick").touch()

    code, found = here.accept("--only", "doctor", "dlrm: trial")

    assert code == 1
    assert found["doctor"]["why"] == "disk: 1 GB free: make room"
    assert found["doctor"]["notes"]
    assert found["dlrm: trial"]["outcome"] == "ok"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in a run, and what an acceptance says of it."""

    name: str  # in tests/fake_accepted.py
    run: str  # how the names of the runs end that have it; "": all
    check: str  # that finds it
    pattern: str  # in its reason
    codes: list[int] | None = None  # exit codes of its programs; None: any
    often: bool = False  # in every `make test`: one of each kind; the others are slow

    @property
    def id(self) -> str:
        return f"{self.name}-{self.run}"


TRIAL = "dlrm: trial"
RESUME = "dlrm: kill and resume"
STOP = "stop and saved"
NAN = "a value is not finite .*loss is nan at step 100"
SEGV = r"the compiler died of train_step .*SIGSEGV, exit code 139.*--safe-forms"
ABRT = r"the compiler died of train_step .*SIGABRT, exit code 134.*--safe-forms"
DISK = r"a disk is full \(error: cannot write .*make room"
DRIFT = r"a wrong number: loss of step 160 is .*, not .* apart\)"
OTHER_RESULT = "a wrong number: the final metrics are"
FORGETS = "did not resume, but began again; .*step_00000150/COMPLETE"
POLITE = "ended with 0 when it was asked to stop, expected 143"
DEAF = "did not end within 2 s after it was asked to stop"
FAULTS = [
    # In all runs: one that has another number than the resumed run fails both checks.
    Fault(
        name="wrong",
        run="",
        check=TRIAL,
        pattern="a wrong number: auc is 0.2687; expected 0.78 to 0.86",
        codes=[0],
        often=True,
    ),
    Fault("nan", "dlrm", TRIAL, "a wrong number: loss is nan at step 100", codes=[0]),
    Fault("diverges", "dlrm", TRIAL, NAN, codes=[2]),
    Fault(
        name="hangs",
        run="dlrm",
        check=TRIAL,
        pattern="hangs.*printed nothing for 8 s.*after step 100.*was stopped",
        often=True,
    ),
    Fault("full disk", "dlrm", TRIAL, DISK, codes=[2], often=True),
    Fault("SIGSEGV", "dlrm", TRIAL, SEGV, codes=[139], often=True),
    Fault("SIGABRT", "dlrm", TRIAL, ABRT, codes=[134]),
    Fault("oom", "dlrm", TRIAL, "killed from outside.*137", codes=[137]),
    Fault("no export", "dlrm", TRIAL, "there is no export", codes=[0]),
    Fault("blind", "dlrm", TRIAL, "never evaluated", codes=[0]),
    Fault("recompiles", "dlrm", TRIAL, "1 recompilations, expected none: train_step", codes=[0]),
    Fault("mute", "dlrm", TRIAL, "did not report a result", codes=[0]),
    Fault("drift", "killed", RESUME, DRIFT, codes=[137, 0]),
    Fault("other result", "killed", RESUME, OTHER_RESULT, codes=[137, 0]),
    Fault("forgets", "killed", RESUME, FORGETS, codes=[137, 0], often=True),
    Fault("immortal", "killed", RESUME, "not killed after step 160, but ended", codes=[0]),
    Fault("hangs", "killed", RESUME, "hangs"),
    Fault("unsaved", "stopped", STOP, "nothing was saved", codes=[143, 143], often=True),
    Fault("polite", "stopped", STOP, POLITE, codes=[0]),
    Fault("deaf", "stopped", STOP, DEAF, codes=[137]),
]


def with_marks(faults: list[Fault]) -> list:
    """Returns the faults as parameters of a test: those that are not tried often are slow."""
    parameters = []
    for fault in faults:
        marks = () if fault.often else pytest.mark.slow
        parameters.append(pytest.param(fault, marks=marks, id=fault.id))
    return parameters


@pytest.mark.parametrize("fault", with_marks(FAULTS))
def test_a_fault_is_found_and_named_and_the_rest_is_tried(fault, here):
    here.set(fault=fault.name, run=fault.run)
    limits = [*QUICK]
    if fault.name == "deaf":
        limits += ["--ending", "2"]

    code, found = here.accept("--only", "dlrm", "stop", "step", *limits)

    check = found[fault.check]
    assert code == 1
    assert check["outcome"] == "failed", here.output()
    assert re.search(fault.pattern, check["why"]), check["why"]
    if fault.codes is not None:
        assert check["exit_codes"] == fault.codes
    for field in ("last_lines", "commands", "log"):
        assert check[field], field

    failed = [name for name, other in found.items() if other["outcome"] == "failed"]
    assert failed == [fault.check]
    assert found[SPEED]["outcome"] == "not run"
    text = here.page()
    for words in (f"## {fault.check} failed", check["commands"][0], check["last_lines"][-1]):
        assert words in text
    assert not here.still_running()


def test_a_run_that_never_starts_is_ended_after_its_limit(here):
    here.set(fault="no start", run="dlrm")

    code, found = here.accept("--only", "dlrm: trial", "--limit", "2", "--silent", "1")

    assert code == 1
    assert "not over after 2 s" in found["dlrm: trial"]["why"]
    assert "before its first step" in found["dlrm: trial"]["why"]
    assert not here.still_running()


def test_a_full_disk_of_this_machine_fails_the_check_alone(here):
    """The folder of the logs is not there any more."""
    here.set(fault="no start", run="-dlrm")

    client = here.start("--only", "dlrm: trial", "step", "--limit", "3")
    wait(lambda: (here.folder / "accept-one").exists())
    (here.folder / "accept-one.json.new").mkdir()  # no file can be written

    assert client.wait(60) == 1
    assert "warning: cannot write" in here.output()
    assert f"{SPEED} …" in here.output()


REFUSED = [
    pytest.param(
        ["--only", "vgg"],
        "--only vgg begins no check; the checks are: doctor, resnet50: trial",
        id="check",
    ),
    pytest.param(["--recipe", "bert-mrpc"], "--recipe bert-mrpc needs --data", id="no data"),
    pytest.param(["--data", "/data"], "--data is /data, but trials take none", id="data"),
    pytest.param(["--tpu", "my-tpu"], "has no .git", id="no git"),
    pytest.param(["--recipe", "vgg", "--data", "/data"], "invalid choice: 'vgg'", id="recipe"),
]


def assert_refused(project: Project, arguments: list[str], pattern: str) -> None:
    assert project.start(*arguments).wait(30) == 2
    assert re.search(pattern, project.output()), project.output()
    assert "Traceback" not in project.output(), project.output()


@pytest.mark.parametrize(("arguments", "pattern"), REFUSED)
def test_what_cannot_be_used_is_refused(arguments, pattern, here):
    assert_refused(here, arguments, pattern)


def test_a_folder_without_a_makefile_is_refused(here):
    (here.folder / "Makefile").rename(here.folder / "elsewhere")
    assert_refused(here, [], "has no Makefile; start it from the project's folder")


# ---- step time and memory ------------------------------------------------------------------------
TPU = {"kind": "TPU v5 lite", "devices": 8, "seconds": 0.07}
SPEED = "step time and memory"


def speed(here: Project, *arguments: str, **settings: object) -> dict:
    """Returns the check of step time and memory on a TPU of 8 chips, or as `settings` say."""
    here.set(**{**TPU, **settings})
    _, found = here.accept("--only", "dlrm: trial", SPEED, *QUICK, *arguments)
    return found[SPEED]


def test_step_time_and_memory_stand_beside_the_estimate(here):
    here.install_compiler()

    check = speed(here)

    assert check["outcome"] == "ok", check
    assert check["estimate"]["factor"] == pytest.approx(0.07 / 0.066)
    assert check["chip_bytes"] == 3 << 30
    estimate = json.loads((here.folder / "accept-one/estimate.json").read_text())
    assert estimate["asked"] == ["v5e:2x4", "128", "0.0.21"]

    compared = "70.0 ms, 1.06 times the compiler's estimate, 66.0 ms"
    time_note, memory_note = check["notes"][:2]
    assert compared in time_note
    assert "3.00 GiB, estimated 5.00" in memory_note
    assert compared in here.page()

    train_words, compile_words = (shlex.split(command) for command in check["commands"])
    assert {"MODEL=resnet50", "PRESET=full", "DATA=synthetic"} < set(train_words)
    assert "--batch-size 1024" in train_words[-1]
    assert {"TOPOLOGY=v5e:2x4", "BATCH=128", "EFFORT=full"} < set(compile_words)


def test_a_slow_chip_is_found_by_its_factor(here):
    here.install_compiler()
    why = speed(here, seconds=0.2)["why"]
    compared = "200.0 ms, 3.03 times the compiler's estimate, 66.0 ms"
    assert f"{compared}, more than 2 times: a slow chip" in why


def test_a_slow_host_is_not_called_a_slow_chip(here):
    here.install_compiler()
    why = speed(here, seconds=0.2, wait=0.7)["why"]
    assert "the host is slow, and the chip is not known to be" in why


def test_the_factor_of_a_slow_chip_can_be_given(here):
    here.install_compiler()
    assert speed(here, "--slow", "4", seconds=0.2)["outcome"] == "ok"


def test_a_chip_of_unknown_clock_is_compared_with_its_roofline(here):
    here.install_compiler()
    why = speed(here, kind="TPU v6 lite", seconds=0.2)["why"]
    roofline = "6.67 times the roofline (the clock is not published), 30.0 ms"
    assert f"{roofline}, more than 4 times" in why


def test_without_the_compiler_the_estimates_command_is_named(here):
    check = speed(here)

    assert check["outcome"] == "not there"
    assert "measured: 70.0 ms" in check["why"]
    assert "make compile MODEL=resnet50 PRESET=full TOPOLOGY=v5e:2x4" in check["why"]


def test_a_number_of_devices_without_a_topology_is_named(here):
    why = speed(here, devices=3)["why"]
    assert "knows no topology of 3 devices of TPU v5 lite" in why


def test_a_compiler_that_dies_on_this_machine_is_named(here):
    here.install_compiler()
    (here.folder / "dies").touch()

    check = speed(here)

    assert check["outcome"] == "failed"
    assert "the compiler died on this machine: error: libtpu 0.0.21" in check["why"]


# ---- predictions ---------------------------------------------------------------------------------
GLUE = "glue: predict"


@pytest.mark.parametrize("script", ["resnet50", "glue"])
def test_predictions_stand_beside_those_of_plain_pytorch(script, whole):
    check = whole.checks[f"{script}: predict"]

    assert check["exit_codes"] == [0, 0, 0]
    metrics = check["metrics"]
    assert 0 < metrics["float32 apart"] < 1e-5
    assert metrics["float32 apart"] < metrics["bfloat16 apart"] < expected.APART["bfloat16"]
    assert metrics["float32 same label"] == 1
    plain, *on_device = check["commands"]
    assert "--device cpu" in plain
    assert "--precision float32" in plain
    assert [words for words in on_device if "--device" in words] == []
    for words in (f"MODEL_DIR={whole.project.runs}/", f"-{script}/export", "ARGS=--report"):
        assert words in plain


def test_the_page_says_how_predictions_compare(whole):
    text = whole.project.page()
    for words in ("pictures/s 896", "sentences/s 3968", "bfloat16 apart 0.0", "right 0.9"):
        assert words in text
    assert "896 by plain PyTorch on the CPU" in text
    table = "\n".join(table_of(whole.project.folder / "accept-one.json"))
    assert "| predict: ResNet-50 | 1 x CPU, 1 host |" in table


def predict(here: Project, *arguments: str, **settings: object) -> dict:
    """Returns the check of GLUE's predictions after its trial on a TPU of 8 chips."""
    here.set(**{**TPU, **settings})
    _, found = here.accept("--only", "glue: trial", GLUE, *QUICK, *arguments)
    assert found["glue: trial"]["outcome"] == "ok", found["glue: trial"]
    assert not here.still_running()
    return found[GLUE]


PREDICTIONS = {
    "predicts apart in float32": r"in float32 '(posi|nega)tive' of '.*' has the probability 0.*"
    "at most 0.0001 apart",
    "predicts far apart": "in bfloat16 .* at most 0.1 apart",
    "predicts nan": "line 8 of .* has the probability nan",
    "predicts in another order": "line 8 of .* is the answer for '.*', expected '",
    "predicts fewer": "has 2045 answers, expected 2048",
    "predicts other names": "has the classes .*LABEL_1.*, and negative, positive by plain PyTorch",
    "predicts an error": "line 8 of .* is an error: it is broken",
    "predicts alike": "all 2048 answers are 'positive'",
    "predicts swapped everywhere": "3.* % of the labels are right, expected 90 % or more",
    "predicts elsewhere": "it ran on 1 x CPU, and the trial on 8 x TPU v5 lite",
    "predicts recompiles": "1 recompilations, expected none: eval_step was compiled again",
    "predicts mute": "did not report a result",
    "predicts no file": "there are no answers: .*-device-bfloat16.jsonl was not written",
    "predicts SIGSEGV": "the compiler died of eval_step .*SIGSEGV, exit code 139.*--safe-forms",
    "predicts refused": "exit code 2: error: .* names neither classes nor features",
    "predicts nothing": "printed nothing for 8 s",
}
OFTEN = ("predicts far apart", "predicts swapped everywhere", "predicts refused")


def with_slow_ones(patterns: dict[str, str]) -> list:
    """Returns the faults of predictions as parameters of a test; most are slow ones."""
    parameters = []
    for fault, pattern in patterns.items():
        marks = () if fault in OFTEN else pytest.mark.slow
        parameters.append(pytest.param(fault, pattern, marks=marks, id=fault))
    return parameters


@pytest.mark.parametrize(("fault", "pattern"), with_slow_ones(PREDICTIONS))
def test_a_wrong_prediction_is_found_and_named(fault, pattern, here):
    check = predict(here, fault=fault)

    assert check["outcome"] == "failed", check
    assert re.search(pattern, check["why"]), check["why"]
    assert check["last_lines"]
    assert check["why"] in here.page()


def test_without_its_trial_nothing_is_predicted(here):
    code, found = here.accept("--only", GLUE)
    assert code == 0
    assert found[GLUE]["why"] == "there is no trial of glue that ended, to predict with"


def test_flags_of_the_device_are_handed_to_predictions(here):
    here.environment["CPU_NUM_DEVICES"] = "4"
    words = ["--words", "LIBTPU_VERSION=0.0.51", "--python", "python3.11"]

    check = predict(here, *words, "--train-args=--safe-forms")

    assert check["outcome"] == "ok", check
    plain, device, _ = check["commands"]
    assert "--safe-forms" in device

    assert plain.startswith("env -u CPU_NUM_DEVICES make predict")
    assert device.startswith("make predict LIBTPU_VERSION=0.0.51")
    assert "PYTHON=python3.11" in device


def test_the_launcher_cannot_predict_and_that_is_said(pod):
    _, found = pod.accept("--only", GLUE)
    assert 'on the TPU VM itself predicts make accept ARGS="--only glue"' in found[GLUE]["why"]


def test_pictures_are_files_that_pillow_reads(tmp_path):
    inputs = predictions.write_inputs("pictures", tmp_path)

    opened = [PIL.Image.open(name) for name in inputs.names]

    assert {(image.mode, image.size) for image in opened} == {("RGB", (40, 40))}
    contents = {image.tobytes() for image in opened}
    assert len(contents) == predictions.PICTURES
    deviations = [np.asarray(image).std(axis=(0, 1)).min() for image in opened]
    assert min(deviations) > 5, "a wave in each colour"


def test_what_a_sure_network_hides_is_found():
    """Logits of 8 and 9 of 2 classes: their probabilities are 0.0002 apart."""
    sure = [1 / (1 + math.exp(logit)) for logit in (8, 9)]
    assert abs(sure[0] - sure[1]) < 0.0003
    assert predictions.distance(sure[0], sure[1]) == pytest.approx(1 / 10, rel=0.01)
    assert predictions.distance(0.0, 0.0) == 0


def test_sentences_are_like_those_of_the_trial(tmp_path):
    inputs = predictions.write_inputs("sentences", tmp_path)
    real = glue.read("synthetic", "sst2", "train")
    known = {word.strip(".,") for sentence in real.first for word in sentence.split()}
    words_of = {}
    for label in (0, 1):
        own = [text for text, other in zip(real.first, real.labels, strict=True) if other == label]
        words_of[label] = {word.strip(".,") for text in own for word in text.split()}

    names = glue.find_task("sst2").labels
    for name, label in zip(inputs.names, inputs.right, strict=True):
        words = set(name.removesuffix(".").split())
        assert words <= known
        (number,) = words & set(predictions.NUMBERS)
        assert number in words_of[names.index(label)]
        assert number not in words_of[1 - names.index(label)]


# ---- signals -------------------------------------------------------------------------------------
def test_ctrl_c_leaves_nothing_running_and_writes_the_files(here):
    here.set(fault="deaf", run="stopped")  # a trainer that SIGTERM does not end, either
    mark = f"{MARK}={here.folder}\0"

    client = here.start("--only", "dlrm: trial", "stop", "step", "--ending", "1")
    wait(lambda: "stop and saved" in here.output() and processes(mark, "-stopped"))
    client.send_signal(signal.SIGINT)
    client.send_signal(signal.SIGINT)  # an impatient second one does not interrupt the ending

    assert client.wait(60) == 130, here.output()
    assert not here.still_running(), here.output()
    found = here.checks()
    assert found["dlrm: trial"]["outcome"] == "ok"
    assert found["stop and saved"]["why"] == "Ctrl-C"
    assert found[SPEED]["why"] == "Ctrl-C"
    assert "Ctrl-C" in here.page()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_other_signals_are_like_ctrl_c(number, here):
    here.set(fault="no start", run="dlrm")

    client = here.start("--only", "dlrm: trial")
    wait(lambda: processes(f"{MARK}={here.folder}\0", "train.py"))
    client.send_signal(number)

    assert client.wait(60) == 130
    assert not here.still_running()


# ---- on a TPU ------------------------------------------------------------------------------------
class Pod(Project):
    """The project, a TPU of two workers that is not there, and the real launcher between them."""

    def __init__(self, folder: Path) -> None:
        self.bed = Processes(folder, 2)
        write_programs(self.bed.bin, python3=f"exec {PYTHON}", make="")
        shutil.rmtree(self.bed.project)
        path = f"{self.bed.bin}:/usr/bin:/bin"
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
def pod(tmp_path) -> Iterator[Pod]:
    pod = Pod(tmp_path)
    yield pod
    pod.close()


@pytest.mark.slow
def test_two_workers_of_a_tpu(pod):
    code, found = pod.accept(
        "--only", "doctor", "dlrm: trial", "dlrm: kill", "checkpoint", "stop", *PATIENT
    )

    assert code == 0, pod.output()
    assert {check["outcome"] for check in found.values()} == {"ok"}, found
    assert found["dlrm: kill and resume"]["exit_codes"] == [137, 0]
    assert found["stop and saved"]["exit_codes"] == [143, 143]
    assert "parts of 2 hosts" in found["checkpoint of all hosts"]["notes"][0]
    assert "TPU=my-tpu" in found["doctor"]["commands"][0]
    launch = "python3 -m tpu.launch train --tpu my-tpu --zone us-east5-b"
    assert found["dlrm: trial"]["commands"][0].startswith(launch)
    assert "8 x TPU v5 lite, 2 hosts" in pod.page()
    pod.bed.check_idle()
    assert not pod.still_running()


TPU_SEGV = "the compiler died of train_step .*exit code 139.*--safe-forms"
TPU_FAULTS = [
    Fault("wrong", "", TRIAL, "a wrong number: auc is 0.2687"),
    Fault("hangs", "dlrm", TRIAL, "hangs.*printed nothing for 20 s.*after step 100"),
    Fault("full disk", "dlrm", TRIAL, "a disk is full"),
    Fault("SIGSEGV", "dlrm", TRIAL, TPU_SEGV),
    Fault("drift", "killed", RESUME, "a wrong number: loss of step"),
    Fault("part", "killed", "checkpoint of all hosts", "lacks tables-00001.json"),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", TPU_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_on_a_tpu_is_found_and_named(fault, pod):
    pod.set(fault=fault.name, run=fault.run)

    code, found = pod.accept("--only", "dlrm", "checkpoint", *PATIENT)

    check = found[fault.check]
    assert code == 1
    assert check["outcome"] == "failed", pod.output()
    assert re.search(fault.pattern, check["why"]), check["why"]
    assert found["dlrm: predict"]["outcome"] == "not run"
    assert not pod.found()["left_running"]
    pod.bed.check_idle()
    assert not pod.still_running()


@pytest.mark.slow
def test_ctrl_c_ends_the_run_on_all_workers(pod):
    pod.set(fault="hangs", run="dlrm")
    log = pod.folder / "accept-one/dlrm-trial.log"

    client = pod.start("--only", "dlrm: trial", "dlrm: predict")
    wait(lambda: log.exists() and '"step": 100' in log.read_text(), 60)
    client.send_signal(signal.SIGINT)

    assert client.wait(90) == 130, pod.output()
    pod.bed.check_idle()
    assert not pod.still_running()
    assert pod.checks()["dlrm: trial"]["why"] == "Ctrl-C"


def test_when_the_tpu_is_gone_nothing_more_is_tried(pod):
    pod.bed.set(state="PREEMPTED")

    code, found = pod.accept("--only", "dlrm", "stop", *PATIENT)

    assert code == 1
    assert "the TPU is gone" in found["dlrm: trial"]["why"]
    for name in ("dlrm: kill and resume", "stop and saved"):
        assert found[name]["outcome"] == "not run"
        assert "recreate it" in found[name]["why"]
    pod.bed.check_idle()


# ---- the tables of results -----------------------------------------------------------------------
def result(recipe: str, **changes: object) -> dict:
    """Returns a check of a recipe, as an acceptance writes it."""
    made = {
        "name": recipe,
        "recipe": recipe,
        "outcome": "ok",
        "seconds": 90.0,
        "metrics": {"auc": 0.8025},
    }
    return {**made, **changes}


TABLED = {"kind": "TPU v6 lite", "devices": 8, "hosts": 1}


def accepted(folder: Path, name: str, *checks: dict) -> Path:
    """Writes the file of an acceptance into the current folder; returns its name."""
    content = {
        "written_by": "tpu.accept",
        "format": 1,
        "hardware": TABLED,
        "git": {"version": "v1.2"},
        "checks": list(checks),
    }
    (folder / name).write_text(json.dumps(content))
    return Path(name)


def table_of(*files: Path, page: Path = results.RESULTS) -> list[str]:
    """Returns the lines of a page's table."""
    return results.table(results.read_all(list(files)), page).splitlines()


@pytest.mark.parametrize("path", results.PAGES)
def test_the_tables_are_those_of_the_committed_files(path):
    files = sorted(ROOT.glob("docs/accepted/*.json"))
    found = []
    for each in results.read_all(files):
        found.append(dataclasses.replace(each, path=each.path.relative_to(ROOT)))
    text = (ROOT / path).read_text()
    remedy = "python3 -m tpu.accept --table docs/accepted/*.json"
    assert results.with_table(text, found, path) == text, remedy


def test_the_table_has_a_row_for_each_result_and_what_never_ran(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long = result("dlrm-v1", seconds=9000, outcome="ok")
    first = accepted(tmp_path, "a.json", result("trial dlrm"), long)
    other = result("trial dlrm", metrics={"auc": 0.81})
    failed = result("trial glue", outcome="failed")
    second = accepted(tmp_path, "b.json", other, failed)

    lines = table_of(second, first)

    trial = "| trial: DLRM | 8 x TPU v6 lite, 1 host | 1.5 min"
    assert f"{trial} | auc 0.8025 | [a](../a.json), v1.2 |" in lines
    assert f"{trial} | auc 0.81 | [b](../b.json), v1.2 |" in lines
    (row,) = [line for line in lines if "mlperf_v1" in line]
    assert "Terabyte (AUC 0.8025, MLPerf) |" in row
    assert "| 2.5 h | auc 0.8025 | [a]" in row
    assert f"| trial: BERT, fine-tuning | {results.NEVER} | | | |" in lines
    header = 2
    second_trial_of_dlrm = 1
    predicting = sum(bool(script.predicts) for script in expected.SCRIPTS)
    rows = len(expected.SCRIPTS) + predicting + len(expected.RECIPES) + second_trial_of_dlrm
    assert len(lines) == header + rows


def test_the_readme_has_all_recipes_and_else_what_ran(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = accepted(tmp_path, "a.json", result("trial dlrm"))

    lines = table_of(file, page=results.README)

    assert "| 1.5 min | auc 0.8025 | [a](a.json), v1.2 |" in lines[2]
    assert len(lines) == 2 + 1 + len(expected.RECIPES)
    assert sum(results.NEVER in line for line in lines) == len(expected.RECIPES)


def grid(folder: Path, script: str, preset: str, words: str, **changes: object) -> Path:
    """Writes grid.json of two rates and two seeds into the current folder; returns its name."""
    runs = []
    for lr in ("2e-5", "3e-5"):
        for seed in ("0", "1"):
            flags = [*words.split(), "--lr", lr, "--seed", seed]
            values = {"lr": lr, "seed": seed}
            runs.append({"values": values, "flags": flags, "devices": TABLED, "version": "v1.3"})
    best = {
        "values": {"lr": "3e-5"},
        "n": 2,
        "mean": 0.85,
        "median": 0.85,
        "standard_deviation": 0.01414,
        "seconds": 61.5,
    }
    other = {**best, "values": {"lr": "2e-5"}, "mean": 0.8}
    content = {
        "script": script,
        "preset": preset,
        "runs": runs,
        "metric": "accuracy",
        "configurations": [best, other],
        "best": {"values": {"lr": "3e-5"}, "seed": "1"},
        **changes,
    }
    (folder / "grid.json").write_text(json.dumps(content))
    return Path("grid.json")


def test_a_grid_gives_its_best_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "--model bert --task mrpc --data /data/glue --workers 2"
    file = grid(tmp_path, "glue", "full", words)

    row = table_of(file)[-1]

    assert row == (
        "| `train.glue full --model bert --task mrpc --lr 3e-5` on glue | 8 x TPU v6 lite, 1 host "
        "| 1.0 min a run | accuracy 0.85 ± 0.014, median 0.85, 2 runs; the best of 2 "
        "configurations, on the same data | [grid](../grid.json), v1.3 |"
    )


def one_configuration(flags: list[str], n: int) -> dict:
    """Returns what a grid over seeds alone has, of n runs."""
    runs = []
    for seed in range(n):
        runs.append({"values": {"seed": str(seed)}, "flags": [*flags, "--seed", str(seed)]})
    configuration = {
        "values": {},
        "n": n,
        "mean": 0.85,
        "median": 0.85,
        "standard_deviation": 0.01 if n > 1 else None,
        "seconds": 61.5,
    }
    best = {"values": {}, "seed": "0"}
    return {"runs": runs, "configurations": [configuration], "best": best}


@pytest.mark.parametrize(
    ("script", "preset", "flags", "label"),
    [
        (
            "glue",
            "full",
            "--model bert --task mrpc --data /data/glue",
            "BERT-base, MRPC (F1 88.9 on the test set, Devlin et al. 2019), on glue",
        ),
        ("glue", "tiny", "--model bert --task sst2 --device cpu", "trial: BERT, fine-tuning"),
        ("glue", "tiny", "", "trial: BERT, fine-tuning"),
        ("dlrm", "tiny", "", "trial: DLRM"),
        ("dlrm", "tiny", "--epochs 2", "`train.dlrm tiny --epochs 2`"),
        ("dlrm", "mlperf_v1", "--plan data --data a/b/", "`train.dlrm mlperf_v1 --plan data` on b"),
    ],
)
def test_only_a_recipe_without_other_flags_is_one(
    script, preset, flags, label, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    changes = one_configuration(flags.split(), n=3)
    file = grid(tmp_path, script, preset, "", **changes)

    rows = [row for row in table_of(file) if "grid.json" in row]

    metric = "accuracy 0.85 ± 0.01, median 0.85, 3 runs"
    of_older_runs = f"unknown | 1.0 min a run | {metric} | [grid](../grid.json)"
    assert rows == [f"| {label} | {of_older_runs} |"]


def test_one_run_has_no_deviation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = grid(tmp_path, "dlrm", "tiny", "", **one_configuration([], n=1))
    assert "| accuracy 0.85, one run |" in "\n".join(table_of(file))


def summary(folder: Path, **changes: object) -> Path:
    """Writes summary.json of a run into the current folder; returns its name."""
    command = ".venv/bin/python -m train.resnet50 full --data=/data/images --name r --no-strict"
    content = {
        "name": "r",
        "version": "v1.2-dirty",
        "command": command,
        "devices": TABLED,
        "metrics": {"top1": 0.7634, "loss": None},
        "elapsed_seconds": 9000.0,
        **changes,
    }
    (folder / "r.json").write_text(json.dumps(content))
    return Path("r.json")


def test_a_runs_summary_gives_a_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = table_of(summary(tmp_path))

    (row,) = [line for line in lines if "r.json" in line]
    assert row == (
        "| ResNet-50 v1.5, ImageNet, 90 epochs (76.3 % top-1, Goyal et al. 2017), on images "
        "| 8 x TPU v6 lite, 1 host | 2.5 h | top1 0.7634, loss not finite; one run "
        "| [r](../r.json), v1.2-dirty |"
    )


def test_a_run_of_a_notebook_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = summary(tmp_path, command="python -m ipykernel_launcher -f x.json", version=None)
    assert table_of(file)[-1].startswith("| r | 8 x TPU")
    assert table_of(file)[-1].endswith("| [r](../r.json) |")


@pytest.fixture
def results_pages(tmp_path) -> list[Path]:
    """The two pages with an old table, in the test's folder."""
    pages = [tmp_path / path for path in results.PAGES]
    for path in pages:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    return pages


@pytest.fixture
def write_table(results_pages, tmp_path, monkeypatch) -> Callable[..., int]:
    """write_table("a.json"): writes the tables from this file, which is in the test's folder;
    returns the exit code."""
    monkeypatch.chdir(tmp_path)
    accepted(tmp_path, "a.json", result("trial dlrm"))

    def call(*names: str) -> int:
        monkeypatch.setattr(sys, "argv", ["accept", "--table", *names])
        return command_line.main()

    return call


def test_the_tables_are_written_between_their_marks(write_table, results_pages):
    # As the shell leaves it where there is no file.
    assert write_table("docs/accepted/*.json") == 0
    for path in results_pages:
        text = path.read_text()
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert results.NEVER in text
        assert "old" not in text

    assert write_table("a.json") == 0
    for path in results_pages:
        assert "TPU v6 lite" in path.read_text()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("other.json", "was not written by make accept, make grid or make train"),
        ("none.json", "none.json is not there"),
        ("{folder}/a.json", "cannot be linked to"),
        ("older.json", "older.json is not whole, or of another version"),
        ("cut.json", "cut.json is not whole, or of another version"),
        ("unfinished.json", "error: unfinished.json has no configuration of which all runs are"),
    ],
)
def test_a_table_of_other_files_is_refused(
    name, reason, write_table, results_pages, tmp_path, capsys
):
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "older.json").write_text('{"metrics": {}, "elapsed_seconds": 1}')
    (tmp_path / "cut.json").write_text('{"written_by": "tpu.accept", "format": 1}')
    grid(tmp_path, "dlrm", "tiny", "", best=None).rename("unfinished.json")

    assert write_table(name.format(folder=tmp_path)) == 2

    assert reason in capsys.readouterr().err
    assert "old" in results_pages[0].read_text()


def test_a_file_that_is_given_twice_has_one_row(write_table, results_pages, capsys):
    assert write_table("a.json", "./a.json") == 0
    assert "1 results of 1 files" in capsys.readouterr().out
    assert results_pages[1].read_text().count("TPU v6 lite") == 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_page_without_the_marks_is_refused(number, write_table, results_pages, capsys):
    results_pages[number].write_text("no marks")
    assert write_table("a.json") == 2
    assert "put both back" in capsys.readouterr().err
    assert "old" in results_pages[1 - number].read_text(), "both or none"


def test_a_recipe_gets_into_the_table(here):
    code, found = here.accept("--recipe", "dlrm-v1", "--data", "gs://a bucket/clicks")

    assert code == 0, here.output()
    words = shlex.split(found["recipe dlrm-v1"]["commands"][0])
    assert {"MODEL=dlrm", "PRESET=mlperf_v1", "DATA=gs://a bucket/clicks"} < set(words)
    table = "\n".join(table_of(here.folder / "accept-one.json"))
    assert "| 1 x CPU, 1 host |" in table
    assert "auc 0.806" in table


# ---- what it knows of the scripts and of make ----------------------------------------------------
def printed_by_make(*arguments: str) -> str:
    """Returns the commands that make would run, each in one line."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    command = ["make", "-n", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    return result.stdout.replace("\\\n", " ")


@pytest.mark.parametrize("script", expected.SCRIPTS, ids=lambda script: script.name)
def test_what_is_known_of_a_script_is_so(script):
    trial = TRIALS[script.name]
    assert trial.learned is expected.LEARNED[script.name]  # in one place

    printed = printed_by_make("train", *shlex.split(script.words), f"ARGS={script.long}")
    command = f"-m train.{script.name} tiny"
    (line,) = [line for line in printed.splitlines() if command in line]
    _, _, words = line.partition(f"train.{script.name} ")
    cli.parse(trial.script.PRESETS, "python -m train", shlex.split(words))

    tiny = trial.script.TINY
    steps_between_saves = getattr(tiny, "save_every", 0) or getattr(tiny, "eval_every", 0)
    if not steps_between_saves:
        steps_between_saves = 64  # glue: 2,048 examples of 32
    assert script.kill_at > steps_between_saves
    assert script.kill_at % steps_between_saves


def test_the_shapes_of_slices_are_those_of_make_compile():
    for kind, (generation, _) in expected.GENERATIONS.items():
        for chips in expected.SHAPES:
            devices = chips * libtpu.GENERATIONS[generation].devices_per_chip
            name = expected.topology(kind, devices)
            product = 1
            for size in name.partition(":")[2].split("x"):
                product *= int(size)
            assert product == chips, name
            known_without_compiler = chips == 8 and generation in ("v2", "v3")
            assert name in libtpu.TOPOLOGIES or known_without_compiler, name

    generations = {generation for generation, _ in expected.GENERATIONS.values()}
    assert set(libtpu.GENERATIONS) == generations
    assert expected.topology("TPU v5 lite", 3) == ""
    assert expected.topology("TPU v99", 8) == ""


def accept_of_make(*given: str) -> str:
    """Returns the command that `make accept` runs, after what it checks before."""
    printed = printed_by_make("accept", "PYTHON=python3", *given)
    _, program, arguments = " ".join(printed.split()).partition("python3 -m tpu.accept")
    return program + arguments


def test_make_accept_hands_over_what_it_was_given():
    assert accept_of_make() == 'python3 -m tpu.accept --python "python3"'

    given = ["TPU=my-tpu", "ZONE=z", "PROJECT=p", "RUNS=gs://b", "OUT=one", "ARGS=--only dlrm"]
    ends = '--zone "$ZONE" --project "$PROJECT" --runs "$RUNS" --out "$OUT" --only dlrm'
    assert accept_of_make(*given).endswith(ends)


@pytest.mark.parametrize("path", sorted(ROOT.glob("tpu/accept/*.py")), ids=lambda path: path.name)
def test_it_needs_no_newer_python_and_no_package(path):
    modules = set()
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}

    packages = {module.partition(".")[0] for module in modules}
    assert packages - {"errors", "tpu"} <= {"__future__", *sys.stdlib_module_names}


# ---- what a run reports: train/common/watch/report.py --------------------------------------------
class FakeRun:
    """As much of a Run as the reporter asks."""

    def __init__(self, folder: Path, host: int = 0, hosts: int = 1) -> None:
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints/state").write_text("four")
        starts = [{"versions": {"torch": "0"}}, {"versions": {"torch": "2.9.0"}}]
        (folder / "config.json").write_text(json.dumps({"starts": starts}))

        self.mesh = SimpleNamespace(
            main_process=host == 0,
            process_index=host,
            process_count=hosts,
            kind="CPU",
            num_devices=hosts,
        )
        self.path = str(folder)
        self.start = 0
        self.total_steps = 20
        self.finished = False
        self.summary = None
        self.folder = SimpleNamespace(
            read=lambda name: (folder / name).read_bytes(),
            fs=fsspec.filesystem("file"),
        )
        self.waits = 0  # for checkpoints
        self.said: list[str] = []
        self.checkpoints = SimpleNamespace(wait=self.wait_for_checkpoints)

    def wait_for_checkpoints(self) -> None:
        self.waits += 1

    def message(self, text: str) -> None:
        if self.mesh.main_process:
            self.said.append(text)


@pytest.fixture
def child(tmp_path) -> Iterator[Child]:
    """A child that was not started: tests give it the lines that it hears."""
    child = Child(["true"], tmp_path / "log")
    with (tmp_path / "log").open("w") as log:
        child._file = log
        yield child


def test_a_run_reports_its_start_its_lines_and_its_end(tmp_path, child):
    run = FakeRun(tmp_path / "run")

    with report.watcher(report.Flags(report=True))(run) as watch:
        watch.line(10, {"loss": 0.1 + 0.2, "lr": float("nan")}, {"training": 1.0})
        run.finished = True
        run.summary = {"metrics": {"auc": 0.8}}
    for text in run.said:
        child._hear(text)

    start, line, end = child.events
    assert start["step"] == 0
    assert start["files"]["checkpoints/state"] == 4
    assert start["pid"] == os.getpid()
    assert start["started"]["versions"] == {"torch": "2.9.0"}
    assert line["values"]["loss"] == 0.1 + 0.2, "every digit"
    assert checks.not_finite(line["values"]) == "lr is nan"
    assert end["summary"] == {"metrics": {"auc": 0.8}}
    assert end["chip_bytes"] is None
    assert end["host_bytes"] > 0


def test_an_unfinished_run_reports_no_end(tmp_path):
    run = FakeRun(tmp_path / "run")

    with pytest.raises(SystemExit), report.watcher(report.Flags(report=True))(run):
        raise SystemExit(143)

    assert len(run.said) == 1
    assert '"event": "start"' in run.said[0]


def test_without_flags_no_run_is_watched():
    assert report.watcher(report.Flags()) is None


def test_a_kill_before_the_first_step_is_refused():
    with pytest.raises(InputError, match="--kill-at is -1; it must be a step"):
        report.watcher(report.Flags(kill_at=-1))


@pytest.mark.parametrize(("host", "start", "killed"), [(1, 0, True), (0, 0, False), (1, 12, False)])
def test_kill_at_kills_the_last_host_after_its_checkpoints(
    host, start, killed, tmp_path, monkeypatch
):
    run = FakeRun(tmp_path / "run", host, hosts=2)
    run.start = start
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number, run.waits)))

    with report.watcher(report.Flags(kill_at=10))(run) as watch:
        for step in range(start + 1, start + 11):
            watch.step(step)

    once_after_one_wait = [(os.getpid(), signal.SIGKILL, 1)]
    assert sent == (once_after_one_wait if killed else [])
    assert run.said == []


def test_the_memory_of_chips_is_what_libtpu_reports(monkeypatch):
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

    assert memory.most == 30
    assert "StopIteration" in memory.why


def test_there_is_no_memory_of_chips_on_a_cpu():
    assert report.ChipMemory("CPU").why == "no chip: CPU"


def test_a_silent_compilation_is_no_hang(child):
    limits = Limits(whole=100, silent=5, ending=1)
    child.began = time.monotonic() - 50
    child._hear('report {"event": "start", "step": 0}')
    child.heard -= 50
    assert "in its first steps" in child._over_limit(limits)

    child._hear("compiling train_step with libtpu 0.0.21")
    child.heard -= 50
    assert child._over_limit(limits) == ""
    assert child.place() == "compiling train_step with libtpu 0.0.21"

    child.began -= 100
    assert "not over after 100 s" in child._over_limit(limits)
    assert "compiling train_step" in child._over_limit(limits)

    child._hear("compiled train_step in 50 s")
    assert child.place() == "in its first steps"


@pytest.mark.parametrize(
    ("line", "event", "rest"),
    [
        ('report {"event": "line", "step": 7}', {"event": "line", "step": 7}, ""),
        (
            'report {"event": "end"}warning: the disk is slow',
            {"event": "end"},
            "warning: the disk is slow",
        ),
        ('WARNING:root:report {"event": "end"}', {"event": "end"}, "WARNING:root:"),
        ('it prints report {"other": 1}', {}, 'it prints report {"other": 1}'),
        ("a report {is no JSON}", {}, "a report {is no JSON}"),
        ("step 7", {}, "step 7"),
    ],
)
def test_a_report_is_found_in_a_line_that_two_programs_wrote(line, event, rest):
    assert read_report(line) == (event, rest)


# ---- a real script -------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_real_script_is_accepted_on_this_cpu(tmp_path):
    given = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS", "CPU_NUM_DEVICES"}
    environment = {name: value for name, value in os.environ.items() if name not in given}
    command = [sys.executable, "-m", "tpu.accept", "--only", "dlrm", "stop"]
    command += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "one")]

    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "one.json").read_text())
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    names = ("dlrm: trial", "dlrm: kill and resume", "stop and saved")
    assert outcomes == {**dict.fromkeys(names, "ok"), "dlrm: predict": "not run"}
    assert found["checks"][1]["notes"] == ["killed after step 160, resumed after step 128"]
