"""All tests run on XLA's CPU backend with four virtual devices, so that every test sees sharding as
a pod would. Where torch_xla is not installed, as in the environment of `make test-newest`, they run
on plain PyTorch.

The variables must be set before torch_xla is imported. Runs on other numbers of devices start
processes of their own.
"""

import gc
import importlib.util
import os
import re
import signal
import sys
import uuid
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4" if importlib.util.find_spec("torch_xla") else "1")
# Two processes share two cores: more threads of PyTorch's wait in turns.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's warnings about its own future
# A compiled program holds about 90 of the 65,530 memory maps that Linux gives a process: with the
# programs of all tests (2,048 are kept by default) it ends in a segmentation fault.
os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", "100")

# A shell ignores the first in what it runs in the background, and nohup the second: processes that
# tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest

pytest.register_assert_rewrite("helpers", "launch_scenarios")

# The order of tests, and which run in one process

# The scripts, those whose tests take longest first, so that no process is left with one of them at
# the end.
SCRIPTS = ("transformer", "pretrain", "glue", "squad", "resnet50", "dlrm", "tagging")
# Files whose tests have the script as their parameter.
OF_ALL_SCRIPTS = (
    "test_scripts.py",
    "test_golden.py",
    "test_eager.py",
    "test_older_runs.py",
    "test_evaluation.py",
)


def import_timm() -> None:
    """Imports timm as if wandb were not installed, which it would import, and which takes longer
    than torch. Tests of wandb import it themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        importlib.import_module("timm")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports and collects without the garbage collector, and keeps it from what has been imported:
    it would read these millions of objects again and again, and find nothing."""
    gc.disable()
    try:
        import_timm()
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def shares_runs_with(nodeid: str) -> str:
    """Returns the script whose runs a test uses, else the test's file."""
    file, _, test = nodeid.partition("::")
    if file.endswith(OF_ALL_SCRIPTS):
        parameter = re.search(r"\[(\w+)|$", test)
        name = parameter[1]
    else:
        name = Path(file).stem.removeprefix("test_")
    return name if name in SCRIPTS else file


def pytest_collection_modifyitems(items):
    """Begins with the tests of the scripts."""

    def rank(item) -> int:
        name = shares_runs_with(item.nodeid)
        return SCRIPTS.index(name) if name in SCRIPTS else len(SCRIPTS)

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Runs tests that share runs in one process.

    The marks of --dist loadgroup do nothing since pytest 9.2.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = shares_runs_with
    return scheduling


# Devices

BACKEND = "xla" if importlib.util.find_spec("torch_xla") else "cpu"


@pytest.fixture(scope="session", autouse=True)
def mesh():
    """Four devices, float32, strict; one without torch_xla. Set up before any test: a backward pass
    on the CPU before it breaks XLA's."""
    from train.common import device

    return device.setup(0, "float32", kind=BACKEND)


@pytest.fixture(autouse=True)
def as_if_alone(mesh):
    """A test's random numbers, its backend, and what it reads of its graphs, do not depend on the
    tests before it in its process."""
    import torch

    from train.common import device

    torch.manual_seed(0)
    device.graph_report(reset=True)
    yield
    # It may have run a script with --device cpu. Not before the next test, whose fixtures of its
    # module may train before this one is set up.
    device.choose_backend(BACKEND)


@pytest.fixture
def compiled(monkeypatch) -> None:
    """Gives models on the CPU the form that they have on devices for which a program is
    compiled."""
    from models import dlrm, layers, resnet, transformer

    monkeypatch.setattr(dlrm, "NATIVE_GATHER_DEVICES", ())
    monkeypatch.setattr(resnet, "NATIVE_NORM_DEVICES", ())
    for module in (layers, transformer):
        monkeypatch.setattr(module, "NATIVE_DEVICES", ())


@pytest.fixture(params=["native", "compiled"])
def form(request) -> None:
    """That of PyTorch's own kernels, or that of compiled devices."""
    if request.param == "compiled":
        request.getfixturevalue("compiled")


# Runs of the scripts


@pytest.fixture(scope="session")
def run_of(mesh, tmp_path_factory):
    """Trains a configuration of trials.py once: run_of("glue", "short") is (its folder, its
    metrics, its config)."""
    from trials import TRIALS

    from train.common import device, watch

    made = {}

    def train(name: str, which: str):
        trial = TRIALS[name]
        runs = str(tmp_path_factory.mktemp(name))
        config = replace(getattr(trial, which), runs=runs, name=which)
        device.graph_report(reset=True)
        # As its command does.
        main, presets = watch.watched(trial.script.main, {which: ("", config)})
        with pytest.MonkeyPatch.context() as patch:
            if which == "alike" and trial.alike_with:
                trial.alike_with(patch.setattr)
            metrics = main(presets[which][1])
        return f"{runs}/{which}", metrics, config

    def get(name: str, which: str = "learns"):
        if (name, which) not in made:
            made[name, which] = train(name, which)
        return made[name, which]

    return get


@pytest.fixture
def trained(request, run_of):
    """The run that learns, of the script after which a file of tests is named."""
    return run_of(request.module.__name__.removeprefix("test_"))


# Files and folders


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path) -> str:
    """A path on each of two file systems."""
    if request.param == "disk":
        return str(tmp_path / "checkpoints")
    return f"memory://{uuid.uuid4().hex}/checkpoints"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> None:
    """Keeps what `datasets` makes in a folder of the test, and `datasets` from the network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


# Command lines


@pytest.fixture
def refused(capsys, tmp_path):
    """Asserts that a script refuses a command line:

    refused(glue, "tiny --lr -1", "--lr is -1.*at least 0")
    """
    from helpers import assert_refused

    def check(script, arguments, pattern, presets=None):
        if isinstance(arguments, str):
            words = arguments.split()
        else:
            words = [str(word) for word in arguments]
        if "--runs" not in words and not presets:
            words += ["--runs", tmp_path / "refused"]
        assert_refused(words, pattern, script, capsys, presets)

    return check


@pytest.fixture
def bed(tmp_path, request):
    """Workers of a TPU that are processes of this machine, two or as many as a test's parameter
    says: launch_bed.py."""
    from launch_bed import Processes

    bed = Processes(tmp_path, getattr(request, "param", 2))
    yield bed
    bed.close()


@pytest.fixture
def here(bed, monkeypatch, capsys):
    """The launcher's command line in this process, which is quicker: (exit code, standard output,
    standard error)."""
    import sys

    from tpu.launch import launcher

    def call(*arguments: str, **own) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["launch", *bed.arguments(*arguments, **own)])
        monkeypatch.setenv("PATH", str(bed.bin))
        monkeypatch.setenv("HOME", str(bed.client_home))
        monkeypatch.chdir(bed.project)
        code = launcher.main()
        return code, *capsys.readouterr()

    return call
