"""The notebooks: what they are made of, and that they run and reach what they claim, on XLA's CPU
backend.

They hold the outputs of such a run, so that a reader sees what to expect. After a change, make them
anew: all, in five minutes on two CPU cores, or those that are named.

    python tests/test_notebooks.py [dlrm glue]

When the repository gets its address:
sed -i s,OWNER/xla-model-zoo,<owner>/<name>, notebooks/*.ipynb
"""

import fnmatch
import glob
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import IPython.core.magic
import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"


@dataclass(frozen=True)
class Claim:
    """The metric that a notebook's prediction is compared with."""

    metric: str
    least: float  # what it must reach: far from chance


CLAIMS = {
    "resnet50": Claim("top1", 0.9),
    "glue": Claim("accuracy", 0.95),
    "transformer": Claim("bleu", 90),
    "dlrm": Claim("auc", 0.78),
}
every_notebook = pytest.mark.parametrize("name", CLAIMS)
MAGIC = "%%zoo\n"  # the first line of a cell that runs with the zoo's Python


def execute(name: str, folder: Path):
    """Returns the notebook with the outputs of a run in `folder`.

    It installs nothing: the environment is this one.
    """
    (folder / "notebooks").mkdir()
    for part in ("train", "models", "data", "errors.py", "optional.py"):
        (folder / part).symlink_to(ROOT / part)
    (folder / ".venv").symlink_to(sys.prefix)

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        skip_cells_with_tag="install",
        resources={"metadata": {"path": str(folder / "notebooks")}},
    )
    client.execute(env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"})
    # Not the version of this machine's Python.
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def normalised(notebook: dict) -> str:
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def cells(name: str, kinds=("code",)) -> dict[str, str]:
    """Returns the source of each cell of these kinds by its id, in order."""
    found = {}
    for cell in read(name)["cells"]:
        if cell["cell_type"] in kinds:
            found[cell["id"]] = "".join(cell["source"])
    return found


def code_cells(name: str) -> list[dict]:
    return [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]


def printed(notebook: dict, cell_id: str) -> str:
    """Returns what a cell has printed."""
    for cell in notebook["cells"]:
        if cell["id"] == cell_id:
            return "".join("".join(output.get("text", "")) for output in cell["outputs"])
    raise KeyError(cell_id)


# ---- what a notebook is made of ------------------------------------------------------------------
@every_notebook
def test_a_notebook_is_valid_and_normalised(name):
    text = (FOLDER / f"{name}.ipynb").read_text()
    notebook = json.loads(text)

    nbformat.validate(json.loads(text))
    remedy = "keys in another order: write it with `python tests/test_notebooks.py`"
    assert text == normalised(notebook), remedy
    for cell in notebook["cells"]:
        assert cell["metadata"].keys() <= {"tags"}, "timings, or a tool's own notes"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook["metadata"]["kernelspec"] == kernel


@every_notebook
def test_the_badge_and_the_clone_have_one_address(name):
    parts = cells(name, ("code", "markdown"))
    address = r'^REPOSITORY = "([\w.-]+/[\w.-]+)"'
    repository = re.search(address, parts["set-up"], re.MULTILINE)[1]

    assert "colab-badge.svg" in parts["title"]
    notebook = f"{repository}/blob/main/notebooks/{name}.ipynb"
    assert f"https://colab.research.google.com/github/{notebook}" in parts["title"]


@every_notebook
def test_links_of_the_title_lead_somewhere(name):
    title = cells(name, ("markdown",))["title"]
    for target in re.findall(r"\]\((\.\.[^)]+)\)", title):
        assert (FOLDER / target).exists(), target


@every_notebook
@pytest.mark.parametrize("part", ["set-up-text", "set-up", "install-text", "install"])
def test_all_notebooks_install_with_the_same_cells(name, part):
    kinds = ("code", "markdown")
    assert cells(name, kinds)[part] == cells("dlrm", kinds)[part]


@every_notebook
def test_only_the_second_cell_installs(name):
    tagged = []
    for cell in read(name)["cells"]:
        if "install" in cell["metadata"].get("tags", []):
            tagged.append(cell["id"])

    assert tagged == ["install"]
    assert list(cells(name))[:2] == ["set-up", "install"]


@every_notebook
def test_cells_of_its_own_python_import_no_library(name):
    """This Python has whatever torch Colab or Kaggle give it."""
    for text in cells(name).values():
        if not text.startswith(MAGIC):
            library = r"^\s*(from|import) (torch|train|models|data|jax)"
            assert not re.search(library, text, re.MULTILINE)


@every_notebook
def test_pins_are_in_the_requirements_alone(name):
    text = normalised(read(name))
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        assert line.startswith("#") or line.split()[0] not in text


@every_notebook
def test_it_runs_the_script_and_holds_no_training_code(name):
    parts = cells(name)

    assert f"from train import {name}\n" in parts["train"]
    assert parts["train"].endswith(f"\n{name}.main(config)")
    training_code = r"\.backward\(|optimizer|torch_xla\.|import torch_xla|\.train\(\)"
    for text in parts.values():
        assert not re.search(training_code, text)
    assert "metrics.jsonl" in parts["plot"]
    assert f"runs/{name}-notebook/export" in parts["predict"]
    assert "\nassert " in parts["predict"]


@every_notebook
def test_the_full_recipe_in_the_comment_is_one(name):
    text = cells(name)["train"].removeprefix(MAGIC)
    (recipe,) = re.findall(r"^# (config = .+)$", text, re.MULTILINE)
    before = text[: text.index("config = ")]

    names = {}
    exec(before + recipe, names)

    config = names[name].validate(names["config"])
    assert config.data not in ("", "synthetic")
    assert config.name
    for module in re.findall(r'run\(PYTHON, "-m", "([\w.]+)"', text):
        assert importlib.util.find_spec(module), module


# ---- the outputs that it holds -------------------------------------------------------------------
@every_notebook
def test_outputs_are_small(name):
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 100_000


@every_notebook
def test_outputs_are_of_all_cells_but_the_installation(name):
    for cell in code_cells(name):
        not_run = cell["execution_count"] is None
        assert not_run == (cell["id"] == "install"), cell["id"]
    for part in ("devices", "train", "predict"):
        assert printed(read(name), part), part


@every_notebook
def test_outputs_have_one_picture_and_no_errors(name):
    pictures = 0
    for cell in code_cells(name):
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "display_data"), cell["id"]
            assert output.get("name", "stdout") == "stdout", cell["id"]
            if "image/png" in output.get("data", {}):
                pictures += 1
    assert pictures == 1


@every_notebook
def test_outputs_name_no_machine(name):
    machine = r"(^|[\s\"'(=])/\w|://|site-packages|[Ww]arning|\bpip\b"
    for cell in code_cells(name):
        for output in cell["outputs"]:
            picture = output.get("data", {}).get("text/plain", "")
            text = "".join(output.get("text", picture))
            assert not re.search(machine, text), text


# ---- the cell that sets up -----------------------------------------------------------------------
@pytest.fixture
def set_up(monkeypatch, tmp_path) -> Callable[..., dict]:
    """set_up(PJRT_DEVICE="TPU"): the names that the set-up cell makes with these variables, in a
    folder that is in no clone."""
    monkeypatch.setattr(IPython.core.magic, "register_cell_magic", lambda function: function)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def run_cell(**variables: str) -> dict:
        for key, value in variables.items():
            monkeypatch.setenv(key, value)
        names = {}
        exec(cells("dlrm")["set-up"], names)
        return names

    return run_cell


def test_the_zoos_process_gets_no_settings_meant_for_others(set_up, tmp_path):
    dropped = {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "TPU_LIBRARY_PATH": "/lib/libtpu.so",
        "TPU_PROCESS_ADDRESSES": "local",
        "TPU_WORKER_HOSTNAMES": "WARNING: could not look up",
    }
    kept = {
        "PYTHONPATH": "/env/python",
        "TPU_WORKER_ADDRS": "10.0.0.2",
        "PJRT_DEVICE": "TPU",
    }

    names = set_up(**dropped, **kept)

    assert not names["CLONE"]
    assert names["ZOO"] == tmp_path / "temporary/xla-model-zoo"
    environment = names["ENVIRONMENT"]
    assert environment["PYTHONPATH"] == str(names["ZOO"])
    assert (dropped | kept).keys() & environment.keys() == kept.keys()


@pytest.mark.parametrize("chips", [("/dev/accel0",), ("/dev/vfio/0", "/dev/vfio/1"), ()])
def test_where_there_are_chips_they_are_used_or_it_fails(chips, set_up, monkeypatch):
    monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter(chips, pattern))
    monkeypatch.delenv("PJRT_DEVICE")

    names = set_up()

    assert names["ENVIRONMENT"].get("PJRT_DEVICE") == ("TPU" if chips else None)


def test_a_command_shows_what_it_prints(set_up, capsys):
    code = "import os, sys; print(os.environ['A']); print('b', file=sys.stderr)"
    set_up()["run"](sys.executable, "-c", code, A="a")
    assert capsys.readouterr().out.split() == ["a", "b"]


def test_a_command_that_fails_ends_the_cell(set_up):
    with pytest.raises(SystemExit, match="exit code 3"):
        set_up()["run"](sys.executable, "-c", "raise SystemExit(3)")


def test_a_cell_of_a_zoo_that_is_not_installed_says_so(set_up):
    with pytest.raises(SystemExit, match="not installed: run the cell that installs"):
        set_up()["zoo"]("", "print(1)")


SAVES_WHEN_STOPPED = """
import signal
import sys
import time


def save(*_):
    print("saved")
    sys.exit(143)


signal.signal(signal.SIGTERM, save)
print("begun")
time.sleep(60)
"""


def test_the_stop_button_lets_a_run_save(set_up, capsys):
    names = set_up()
    stop_button = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))

    stop_button.start()
    with pytest.raises(SystemExit, match="exit code 143"):
        names["run"](sys.executable, "-c", SAVES_WHEN_STOPPED)
    stop_button.join()

    assert capsys.readouterr().out.split() == ["begun", "saved"]


# ---- the cell that installs ----------------------------------------------------------------------
@dataclass
class Installation:
    """The cell that installs, with stand-ins for its commands."""

    names: dict  # of the set-up cell
    commands: list[str] = field(default_factory=list)  # what it has run

    @property
    def zoo(self) -> Path:
        return self.names["ZOO"]

    def run_cell(self) -> None:
        exec(cells("dlrm")["install"], self.names)

    def install(self) -> None:
        """Leaves an installed zoo there, on a machine with a TPU."""
        (self.zoo / ".venv").mkdir(parents=True)
        (self.zoo / ".venv/.installed").touch()
        self.names["ENVIRONMENT"]["PJRT_DEVICE"] = "TPU"


@pytest.fixture
def installation(set_up, monkeypatch) -> Installation:
    made = Installation(set_up())

    def run(*command, **variables):
        made.commands.append(" ".join(map(str, command)))

    found = subprocess.CompletedProcess([], 0, stdout="/uv/python3.11\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **options: found)
    made.names["run"] = run
    made.names["REPOSITORY"] = "someone/zoo"
    return made


def test_an_address_that_is_not_filled_in_is_named(set_up):
    names = set_up()
    with pytest.raises(SystemExit, match="REPOSITORY in the cell above is not filled in"):
        exec(cells("dlrm")["install"], names)


def test_the_install_cell_clones_and_installs_with_uvs_python(installation):
    installation.run_cell()

    clone, get_uv, get_python, install = installation.commands
    url = "https://github.com/someone/zoo.git"
    assert clone == f"git clone --quiet --depth 1 {url} {installation.zoo}"
    assert "pip install --quiet uv==" in get_uv
    assert get_python.endswith("uv python install --quiet 3.11")
    assert install == f"make --quiet -C {installation.zoo} install PYTHON=/uv/python3.11"


def test_the_install_cell_adds_libtpu_where_it_is_missing(installation):
    installation.install()

    installation.run_cell()

    zoo = installation.zoo
    pip = f"{zoo}/.venv/bin/python -m pip install --quiet"
    assert installation.commands == [f"{pip} -r {zoo}/requirements-tpu.txt"]


def test_the_install_cell_keeps_a_libtpu_that_was_chosen(installation):
    """By LIBTPU_VERSION=."""
    installation.install()
    (installation.zoo / ".venv/.libtpu_version").write_text("0.0.51\n")

    installation.run_cell()

    assert not installation.commands


# ---- a run ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Executed:
    """A notebook after a run."""

    name: str
    notebook: dict
    folder: Path  # of the notebook, with its runs


@pytest.fixture(scope="module", params=CLAIMS)
def executed(request, tmp_path_factory) -> Executed:
    """An error in a cell, such as its assertion's, is raised here."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    return Executed(name, execute(name, folder), folder / "notebooks")


@pytest.mark.slow
def test_it_runs_and_reaches_what_it_claims(executed):
    claim = CLAIMS[executed.name]
    run = executed.folder / f"runs/{executed.name}-notebook"
    summary = json.loads((run / "summary.json").read_text())

    assert summary["metrics"][claim.metric] >= claim.least


@pytest.mark.slow
def test_it_draws_a_plot(executed):
    (plot,) = [cell for cell in executed.notebook["cells"] if cell["id"] == "plot"]
    assert any("image/png" in output.get("data", {}) for output in plot["outputs"])


@pytest.mark.slow
def test_the_outputs_that_are_kept_are_of_this_code(executed):
    """The same sizes, steps and number of lines."""
    kept = read(executed.name)

    first_lines = printed(executed.notebook, "train").splitlines()[:2]
    assert first_lines == printed(kept, "train").splitlines()[:2]
    for part in ("devices", "train", "predict"):
        lines = printed(executed.notebook, part).splitlines()
        assert len(lines) == len(printed(kept, part).splitlines()), part


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CLAIMS:
        with tempfile.TemporaryDirectory() as temporary:
            made = execute(chosen, Path(temporary))
        path = FOLDER / f"{chosen}.ipynb"
        path.write_text(normalised(json.loads(json.dumps(made))))
        print(f"notebooks/{chosen}.ipynb: {path.stat().st_size:,} bytes")
