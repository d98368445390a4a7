"""All tests run on XLA's CPU backend with four virtual devices, so that every test sees sharding as a pod would.

The variables must be set before torch_xla is imported. Runs on other numbers of devices start processes of their own.
"""

import os
import signal
from dataclasses import replace

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes share two cores: more threads of PyTorch's wait in turns
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's warnings about its own future
# A compiled program holds about 90 of the 65,530 memory maps that Linux gives a process: with the programs of all tests
# (2,048 are kept by default) it ends in a segmentation fault.
os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", "100")

# A shell ignores it in what it runs in the background, and processes that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

pytest.register_assert_rewrite("helpers")

# The groups that take minutes. They come first, so that no process is left with one of them at the end.
SLOW = ("transformer", "pretrain", "glue", "resnet50", "dlrm")


def pytest_configure(config):
    """Registers the mark where pytest-xdist, which knows it, is switched off."""
    config.addinivalue_line("markers", "xdist_group(name): tests that one process runs, since they share runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Groups tests for processes: those of one script share its runs, the others those of their file."""
    groups = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        groups[item] = mark.args[0] if mark else item.path.stem
        if not mark:
            item.add_marker(pytest.mark.xdist_group(groups[item]))
    items.sort(key=lambda item: SLOW.index(groups[item]) if groups[item] in SLOW else len(SLOW))


@pytest.fixture(scope="session", autouse=True)
def mesh():
    """Four devices, float32, strict. Set up before any test: a backward pass on the CPU before it breaks XLA's."""
    from train.common import device

    return device.setup(0, "float32")


@pytest.fixture(scope="session")
def run_of(mesh, tmp_path_factory):
    """Trains a configuration of trials.py once: run_of("glue", "short") is (its folder, its metrics, its config)."""
    from trials import TRIALS

    from train.common import device

    made = {}

    def get(name: str, which: str = "learns"):
        if (name, which) not in made:
            trial = TRIALS[name]
            config = replace(getattr(trial, which), runs=str(tmp_path_factory.mktemp(name)), name=which)
            device.reset_graph_report()
            made[name, which] = f"{config.runs}/{which}", trial.script.main(config), config
        return made[name, which]

    return get


@pytest.fixture
def compiled(monkeypatch) -> None:
    """Gives models on the CPU the form that they have on devices for which a program is compiled."""
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


@pytest.fixture
def cache(tmp_path, monkeypatch) -> None:
    """Keeps what `datasets` makes in a folder of the test, and `datasets` from the network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def refused(capsys, tmp_path):
    """Asserts that a script refuses a command line: refused(glue, "tiny --lr -1", "--lr is -1.*at least 0")."""
    from helpers import assert_refused

    def check(script, arguments, pattern, presets=None):
        words = arguments.split() if isinstance(arguments, str) else [str(word) for word in arguments]
        runs = [] if "--runs" in words or presets else ["--runs", tmp_path / "refused"]
        assert_refused([*words, *runs], pattern, script, capsys, presets)

    return check
