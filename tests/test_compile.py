"""tpu/compiler/compile.py: a script's step, staged without numbers and compiled for TPUs.

What compiles is slow and needs libtpu: `make test-all`. Staging takes a process of its own, since this one has devices.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hlo_modules import installed

from errors import InputError
from tpu.compiler import compile as compiling
from tpu.compiler import hlo, pages

ROOT = Path(__file__).parent.parent


def run(*arguments: str, code: str = "") -> subprocess.CompletedProcess:
    """A process for the CPU without this one's four devices."""
    devices = ("CPU_NUM_DEVICES", "PJRT_DEVICE", "XLA_USE_SPMD")  # torch_xla sets the last
    environment = {name: value for name, value in os.environ.items() if name not in devices}
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "tpu.compiler.compile", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_flags_after_two_dashes_are_the_scripts():
    options, job = compiling.parse(["resnet50", "--batch", "16", "--topology", "v5e:1x1", "--", "--image-size", "64"])
    config = job.config(8)
    assert (options.topology, job.preset, config.image_size, config.batch_size) == ("v5e:1x1", "full", 64, 128)
    assert config == compiling.replace(compiling.resnet50.Config(), image_size=64, batch_size=128)


@pytest.mark.parametrize(
    "arguments, batch_size",
    [
        (["bert", "--task", "mrpc"], 32),
        (["roberta", "--task", "pretrain"], 8192),
        (["roberta", "--task", "pretrain", "--batch", "32", "--", "--update-every", "4"], 32 * 8 * 4),
        (["dlrm", "mlperf_v1"], 2048),
    ],
)
def test_a_batch_is_that_of_a_device_and_the_recipes_otherwise(arguments, batch_size):
    _, job = compiling.parse(arguments)
    config = job.config(8)
    assert config.batch_size == batch_size
    if job.script in (compiling.glue, compiling.pretrain):
        assert config.model == arguments[0]


def test_the_transformers_batch_is_in_rows():
    _, job = compiling.parse(["transformer", "tpu", "--batch", "256"])
    assert job.config(8).batch_tokens == 256 * 64 * 8
    assert compiling.per_device(job, 8) == 256
    _, job = compiling.parse(["transformer", "base"])
    assert compiling.per_device(job, 8) == 13


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="the preset 'big' of bert is not known; it is one of full, lamb, tiny"):
        compiling.parse(["bert", "big", "--task", "pretrain"])
    with pytest.raises(InputError, match="--batch is -1"):
        compiling.parse(["bert", "--batch", "-1"])


# ---- staging ---------------------------------------------------------------------------------------------------------

STAGING = """
import json, torch
from tpu.compiler import hlo
from train.common import device, embedding
from train.common.embedding import tables
from train.common.xla import staging
mesh = staging.setup(4, "TPU v5 lite", "bfloat16")
tied = torch.nn.Linear(8, 8, bias=False)
model = torch.nn.Sequential(tied, torch.nn.BatchNorm1d(8), tied)
tied.weight is model[2].weight or exit("untied before")
device.to_device(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
device.init_optimizer_state(optimizer, mesh)
every = [tables.Table("huge", 30_000_000, 1, plan="row"), tables.Table("few", 8, 1, plan="data")]
bags = embedding.ShardedEmbeddingBags(every, 8, mesh, tables.SGD(), 0.1, 0)
batch = staging.inputs({"ids": ((16, 2), torch.int32)}, mesh)

def train_step(model, bags, optimizer, batch, mesh):
    embedded = bags(batch["ids"])
    loss = model(embedded.sum(1)).square().mean()
    loss.backward()
    optimizer.step()
    bags.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach()}

staged = staging.stage(train_step, model, bags, optimizer, batch, mesh)
names = staged.parameters
print(json.dumps({
    "donated": sorted(names[number] for number in staged.donated),
    "held": sorted(name for name in names.values() if name),
    "shardings": {names[number]: sharding for number, sharding in staged.shardings.items() if names[number]},
    "outputs": staged.outputs,
    "shapes": {str(p.shape.text): p.parameter_number for p in hlo.parse(staged.module).parameters},
}))

def reading_step(model, batch):
    if model(batch["ids"].float().sum(1, keepdim=True).expand(-1, 8)).sum() > 0:
        return batch["ids"] + 1
staging.stage(reading_step, model, batch)
"""


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    path = tmp_path_factory.mktemp("staged") / "stage.py"
    path.write_text(STAGING)
    result = run(code=f"import runpy; runpy.run_path({str(path)!r})")
    assert "GraphError" in result.stderr, result.stderr[-2000:]
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{"))), result.stderr


def test_a_staged_step_updates_its_parameters_states_and_tables_in_place(staged):
    figures, _ = staged
    parameters = ["model.0.weight", "model.1.bias", "model.1.weight"]
    statistics = ["model.1.num_batches_tracked", "model.1.running_mean", "model.1.running_var"]
    states = [f"optimizer.0.{i}.{name}" for i in range(3) for name in ("exp_avg", "exp_avg_sq", "step")]
    tables_ = ["bags.data.weight", "bags.row.weight", "bags.step_count"]
    assert set(figures["donated"]) <= set(parameters + statistics + states + tables_)
    # The running statistics are changed inside of native batch norm.
    assert set(parameters + statistics + states + tables_[:2]) <= set(figures["donated"])
    assert figures["outputs"] == len(figures["donated"]) + 1
    assert "batch.ids" in figures["held"] and "batch.ids" not in figures["donated"]


def test_a_staged_step_knows_how_its_tensors_are_sharded_and_makes_no_numbers(staged):
    figures, _ = staged
    shardings = figures["shardings"]
    assert shardings["batch.ids"] == [["data", None], {"data": 4}]
    assert shardings["bags.row.weight"] == [["model", None], {"model": 4}]
    assert shardings["model.0.weight"][0] == [None, None]
    # 30 million rows of 8, in lines of 16 rows: a gigabyte that was never there.
    assert any(shape.startswith("f32[187") and shape.endswith(",128]") for shape in figures["shapes"]), figures[
        "shapes"
    ]


def test_a_value_that_is_read_in_the_middle_of_a_step_is_named_with_its_line(staged):
    _, error = staged
    assert "GraphError: reading_step reads a value of the device in the middle of the step" in error
    assert re.search(r"stage.py:\d+: if model\(batch", error)


def test_a_backward_pass_is_staged_for_256_devices():
    """autograd of torch 2.9 counts devices in 8 bits."""
    code = """
import torch
from train.common import device
from train.common.xla import staging
mesh = staging.setup(256, "TPU v5 lite", "bfloat16")
model = device.to_device(torch.nn.Linear(8, 8), mesh)
batch = staging.inputs({"x": ((256, 8), torch.float32)}, mesh)

def step(model, batch):
    model(batch["x"]).sum().backward()
    return [parameter.grad for parameter in model.parameters()]

staged = staging.stage(step, model, batch)
print([sharding[1] for sharding in staged.shardings.values()])
"""
    result = run(code=code)
    assert "{'data': 256}" in result.stdout, result.stderr[-2000:]


# ---- compiled --------------------------------------------------------------------------------------------------------


needs_libtpu = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed(), reason="libtpu is not installed: `make test-all` does that"),
]
TOLERANCES = {"needed": 0.02, "bytes_accessed": 0.02, "copies": 0.05, "bytes_copied": 0.05}
ACCEPT = 'if that is meant: make compile-all ARGS="guards", and commit docs/tpu/guards.json'


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Of a row of pages.GUARDS: (its report, its optimised module), each compiled once."""
    folder, known = tmp_path_factory.mktemp("compiled"), {}

    def get(name: str) -> tuple[dict, hlo.Module]:
        if name not in known:
            row = next(row for row in pages.GUARDS if row.name == name)
            paths = str(folder / f"{name}.json"), str(folder / f"{name}.pb")
            command = row.command(pages.GUARD_TOPOLOGY, "fast", paths[0])[3:]
            result = run(*command[:2], "--dump", paths[1], *command[2:])
            assert result.returncode == 0, result.stderr[-2000:]
            known[name] = json.loads(Path(paths[0]).read_text()), hlo.parse(Path(paths[1]).read_bytes())
        return known[name]

    return get


names = [row.name for row in pages.GUARDS]


@pytest.mark.parametrize("name", names)
class TestGuards:
    pytestmark = needs_libtpu

    def test_memory_bytes_copies_and_collectives_are_what_they_were(self, reports, name):
        report, _ = reports(name)
        before = json.loads((pages.DOCS / "guards.json").read_text())[name][pages.GUARD_TOPOLOGY]
        if before["libtpu"] != report["libtpu"]:
            pytest.skip(f"the figures are of libtpu {before['libtpu']}, this is {report['libtpu']}")
        counts = [{kind: c["count"] for kind, c in r["collectives"].items()} for r in (before, report)]
        assert counts[0] == counts[1], f"collectives changed; {ACCEPT}"
        assert report["donated"] == before["donated"], f"the number of donated buffers changed; {ACCEPT}"
        figures = [
            {
                "needed": r["memory"]["needed"],
                "bytes_accessed": r["bytes_accessed"],
                "copies": r["copies"]["count"],
                "bytes_copied": r["copies"]["bytes"],
            }
            for r in (before, report)
        ]
        for figure, tolerance in TOLERANCES.items():
            old, new = (each[figure] for each in figures)
            assert abs(new - old) <= tolerance * old, f"{figure}: {old:,} became {new:,}; {ACCEPT}"

    def test_everything_that_is_updated_is_donated_and_nothing_goes_to_the_host(self, reports, name):
        report, module = reports(name)
        assert report["donated"] == report["to_donate"] > 0
        assert hlo.host_transfers(module) == []

    def test_products_are_of_bfloat16(self, reports, name):
        report, _ = reports(name)
        assert report["products"] > 0 and report["float32_products"] == 0

    def test_no_device_draws_the_random_numbers_of_all(self, reports, name):
        """A seed of a few bytes a dropout, see models/layers.py: XLA does not divide draws among devices."""
        report, _ = reports(name)
        assert report["random_bytes"] < 4096

    def test_gradients_are_added_up_in_few_collectives(self, reports, name):
        report, _ = reports(name)
        assert report["collectives"]["all-reduce"]["count"] <= 4


class TestPromises:
    pytestmark = needs_libtpu

    def test_batch_norm_of_a_step_asks_no_other_device(self, reports):
        """All collectives together: gradients, running statistics, loss and accuracy, nothing in the forward pass."""
        report, _ = reports("resnet50")
        assert set(report["collectives"]) == {"all-reduce"}
        assert report["collectives"]["all-reduce"]["count"] == 2

    def test_no_table_is_gathered(self, reports):
        """The largest table of MLPerf v1 has 39,979,771 rows of 128; a device's part of all of them is 12 GB."""
        _, module = reports("dlrm")
        rows = 2048  # of the batch of all devices: each has 26 lookups of 128 numbers
        moved = [c.result_bytes for c in hlo.collectives(module)]
        assert moved and max(moved) <= rows * 26 * 128 * 4


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="libtpu is not installed: `make test-all` does that")
def test_what_does_not_fit_says_what_takes_the_memory_and_what_would_fit(tmp_path):
    arguments = ["bert", "full", "--task", "pretrain", "--batch", "4096", "--topology", "v5e:1x1"]
    result = run(*arguments, "--json", str(tmp_path / "report.json"), "--", "--size", "tiny")
    assert result.returncode == 1
    assert "does NOT fit" in result.stdout and "models/" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fits"] is False and report["needed"] > report["capacity"]
    assert 0 < report["largest_batch"] < 4096
    assert report["report"]["memory"]["needed"] <= report["capacity"]
    assert report["report"]["memory"]["needed"] > 0.85 * report["capacity"]  # within a sixteenth
