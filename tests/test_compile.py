"""tpu/compiler/compile.py: a script's step, staged without numbers and compiled for TPUs.

Whatever compiles is slow and needs libtpu: `make guards`. Staging takes a process of its own: this one has devices.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hlo_modules
import pytest

from errors import InputError
from tpu.compiler import analysis, bundles, hlo, libtpu, pages, results, steps
from tpu.compiler import compile as compiling

ROOT = Path(__file__).parent.parent
needs_libtpu = hlo_modules.needs_libtpu
ACCEPT = 'if that is meant, run `make compile-all ARGS="guards"` and commit research/results/guards.json'


def environment_without_devices() -> dict[str, str]:
    """This process's environment for another one, without its four devices; libtpu is what the figures are of."""
    # torch_xla sets the third of these, and the devices of this process the last.
    left_out = ("CPU_NUM_DEVICES", "PJRT_DEVICE", "XLA_USE_SPMD", "LIBTPU_INIT_ARGS", "XLA_ZOO_SAFE_FORMS")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    if hlo_modules.installed():
        environment.setdefault("TPU_LIBRARY_PATH", str(libtpu.installed(libtpu.NEWEST)))
    return environment


def run(code: str, ends: int = 0) -> subprocess.CompletedProcess:
    """Runs Python code in a process for the CPU, which exits with `ends`."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment_without_devices())
    assert result.returncode == ends, result.stderr[-2000:]
    return result


@pytest.fixture(scope="module")
def server():
    """The process that forks one for each compile."""
    command = [sys.executable, str(ROOT / "tests/compile_server.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = environment_without_devices() | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def compiles(server, tmp_path):
    """A function that compiles a command line of tpu/compiler/compile.py in a process of its own."""

    def compiled(*arguments: str, ends: int = 0, variables: dict[str, str] | None = None):
        output, errors = tmp_path / "output.txt", tmp_path / "errors.txt"
        request = {"arguments": arguments, "variables": variables or {}, "output": str(output), "errors": str(errors)}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        result = subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())
        assert result.returncode == ends, result.stderr[-2000:]
        return result

    return compiled


def test_the_flags_after_two_dashes_are_the_scripts_and_a_batch_is_a_devices_or_else_the_recipes():
    options, job = compiling.parse(["resnet50", "--batch", "16", "--topology", "v5e:1x1", "--", "--image-size", "64"])
    config = job.config(8)
    assert (options.topology, job.preset, config.image_size, config.batch_size) == ("v5e:1x1", "full", 64, 128)
    assert config == compiling.replace(compiling.resnet50.Config(), image_size=64, batch_size=128)

    for arguments, batch_size, each in (
        ("bert --task mrpc", 32, 4),
        ("roberta --task pretrain", 8192, 1024),
        ("roberta --task pretrain --batch 32 -- --update-every 4", 32 * 8 * 4, 32),
        ("dlrm mlperf_v1", 2048, 256),
        ("transformer tpu --batch 256", 256 * 64 * 8, 256),  # tokens
        ("transformer base", 26_624, 13),
    ):
        _, job = compiling.parse(arguments.split())
        config = job.config(8)
        assert (config.batch_tokens if job.model == "transformer" else config.batch_size) == batch_size
        assert compiling.per_device(job, 8) == each and getattr(config, "model", job.model) == job.model
    for words, message in (
        ("big --task pretrain", "the preset 'big' of bert is not known; it is one of full, lamb, tiny"),
        ("--batch -1", "--batch is -1"),
        ("--program translate", "--program is translate, which bert does not do"),
        ("--json /tmp", "cannot write /tmp: give a file"),
        ("--dump /etc/passwd/x", "cannot write /etc/passwd/x: give a file"),
    ):
        with pytest.raises(InputError, match=message):
            compiling.main(["bert", *words.split()])
    with pytest.raises(InputError, match="--task is mrpc, of which resnet50 has none"):
        compiling.parse(["resnet50", "--task", "mrpc"])
    with pytest.raises(InputError, match="--update-every is 0; it must be at least 1"):
        compiling.parse(["resnet50", "--", "--update-every", "0"])[1].config(8)


def test_of_an_update_in_parts_one_part_is_compiled_and_the_usual_step_has_none(monkeypatch):
    monkeypatch.setattr(steps.staging, "inputs", lambda shapes, mesh: shapes)
    for arguments, batch in (("resnet50", steps.image_batch), ("bert --task mrpc", steps.sentence_batch)):
        _, job = compiling.parse(f"{arguments} --batch 16 -- --update-every 4".split())
        assert next(iter(batch(job.config(8), None).values()))[0][0] == 16 * 8
    with pytest.raises(InputError, match="--update-every is 4; the usual step has no parts"):
        steps.step(object(), job.config(8), None, {}, None, "", "")


def test_code_is_written_into_a_folder_whose_name_libtpu_can_read(monkeypatch, tmp_path):
    spaced = tmp_path / "a b"
    spaced.mkdir()
    monkeypatch.setattr(bundles.tempfile, "tempdir", str(spaced))
    with bundles.folder() as folder:
        assert " " not in folder
        with pytest.raises(RuntimeError, match="wrote no code"):
            bundles.read(folder)


INTERRUPTED = """
import runpy, sys
from tpu.compiler import libtpu

def interrupt(_):
    raise KeyboardInterrupt

libtpu.Topology = interrupt
sys.argv = ["compile", "dlrm", "tiny", "--effort", "fast", "--json", "/dev/null"]
runpy.run_module("tpu.compiler.compile", run_name="__main__")
"""


def test_ctrl_c_ends_a_compile_in_one_line_and_not_as_one_that_does_not_fit():
    ended = run(code=INTERRUPTED, ends=130)
    assert ended.stderr.splitlines()[-1] == "ended by Ctrl-C" and "Traceback" not in ended.stderr


VMEM = {"resnet50": "40960", "transformer": "32768", "bert": "", "xlnet": "", "xlnet --task pretrain": "32768"}


@pytest.mark.parametrize("model, kib", VMEM.items())
def test_libtpu_is_asked_for_the_vector_memory_that_a_run_of_the_script_asks_for(model, kib, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    monkeypatch.setattr(compiling.libtpu, "Topology", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compiling.main([*model.split(), "--effort", "fast"])
    assert os.environ["LIBTPU_INIT_ARGS"].partition("vmem_limit_kib=")[2] == kib


STAGING = """
import dataclasses, json, torch, traceback
from collections import namedtuple
from tpu.compiler import analysis, compile as compiling, hlo, staging
from train.common import device, embedding
from train.common.mesh import GraphError
from train.common.xla import backend
mesh = staging.setup(256, "TPU v5 lite", "float32")  # more than 8 bits count, as autograd of torch 2.9 does

State = namedtuple("State", "model optimizer")
tied = torch.nn.Linear(8, 8, bias=False)
model = torch.nn.Sequential(tied, torch.nn.BatchNorm1d(8), tied)
tied.weight is model[2].weight or exit("untied before")
device.to_device(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
device.init_optimizer_state(optimizer, mesh)
every = [embedding.Table("huge", 30_000_000, 1, plan="exchange"), embedding.Table("few", 8, 1, plan="data")]
bags = embedding.ShardedEmbeddingBags(every, 8, mesh, embedding.SGD(), 0.1, 0)
batch = staging.inputs({"ids": ((256, 2), torch.int32)}, mesh)

def train_step(state, bags, batches, mesh):
    embedded = bags(batches[0]["ids"])
    loss = state.model(embedded.sum(1)).square().mean()
    loss.backward()
    state.optimizer.step()
    bags.step()
    state.optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach()}

staged = staging.stage(train_step, State(model, optimizer), bags, [batch], mesh)
names = staged.parameters
found = {
    "products": {},
    "donated": sorted(names[number] for number in staged.donated),
    "shardings": {names[number]: sharding for number, sharding in staged.shardings.items() if names[number]},
    "outputs": staged.outputs,
    "shapes": [parameter.shape.text for parameter in hlo.parse(staged.module).parameters],
}

def reading_step(model, batch):
    if model(batch["ids"].float().sum(1, keepdim=True).expand(-1, 8)).sum() > 0:
        return batch["ids"] + 1
try:
    staging.stage(reading_step, model, batch)
except GraphError:
    found["error"] = traceback.format_exc()

models = (
    ["resnet50", "full", "--batch", "8", "--", "--model", "resnet_tiny", "--image-size", "32"],
    ["dlrm", "tiny", "--batch", "8", "--"],
    ["bert", "full", "--batch", "8", "--task", "pretrain", "--", "--size", "tiny"],
)
for precision, count in (("bfloat16", 2), ("fast_float32", 2), ("float32", 3)):
    backend.set_matmul_precision(precision)
    for arguments in models[:count]:
        _, job = compiling.parse([*arguments, "--precision", precision])
        _, staged = compiling.stage(job, dataclasses.replace(mesh, precision=precision), job.script)
        found["products"][f"{precision} {arguments[0]}"] = [
            [dot.opcode, dot.lhs, sorted(set(dot.precision))] for dot in analysis.dots(hlo.parse(staged.module))
        ]

backend.set_matmul_precision("float32")
found["forms"] = {}
jobs = {
    "bert": ["bert", "full", "--task", "pretrain", "--batch", "8", "--", "--precision", "float32", "--size", "tiny"],
    "dlrm": ["dlrm", "tiny", "--batch", "8", "--", "--precision", "float32"],
}
for name, words in jobs.items():
    for flag in ([], ["--safe-forms"], []):
        _, job = compiling.parse([*words, *flag])
        job = dataclasses.replace(job, program="evaluate")
        asked = dataclasses.replace(mesh, safe_forms=job.config(256).safe_forms)
        _, step = compiling.stage(job, asked, job.script)
        found["forms"].setdefault(name, []).append(hlo.fingerprint(step.module))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> dict:
    """What STAGING prints of its steps."""
    path = tmp_path_factory.mktemp("staging") / "stage.py"
    path.write_text(STAGING)
    return json.loads(run(code=f"import runpy; runpy.run_path({str(path)!r})").stdout.splitlines()[-1])


def test_float32_products_are_float32_unless_fast_ones_are_asked_for(staged):
    """The precision of every product of a step, forward and backward: a TPU's own is one pass of bfloat16."""
    found = staged["products"]
    assert len(found) == 7
    for key, products in found.items():
        wanted = "highest" if key.startswith("float32") else "default"
        other = [opcode for opcode, _, precision in products if precision != [wanted]]
        if key == "float32 resnet50":  # of 3 products a convolution two are backward: torch_xla 2.9 asks for nothing
            opcodes = [opcode for opcode, *_ in products]
            assert set(opcodes) == {"dot", "convolution"} and set(other) == {"convolution"}
            assert 3 * len(other) == 2 * opcodes.count("convolution")
            continue
        assert not other, (key, products)
        narrow = {"bf16"} if key.startswith("bfloat16") else {"f32"}
        assert narrow <= {kind for _, kind, _ in products} and len(products) >= 10, (key, products)


def test_a_staged_step_updates_in_place_what_it_trains_and_knows_how_it_is_sharded(staged):
    # A value that is read in the middle of a step is named with its line.
    message = "GraphError: reading_step reads a value of the device in the middle of the step"
    assert message in staged["error"] and re.search(r"stage.py:\d+: if model\(batch", staged["error"])
    names = [f"state.model.{name}" for name in ("0.weight", "1.bias", "1.weight")]
    names += [f"state.optimizer.0.{i}.{name}" for i in range(3) for name in ("exp_avg", "exp_avg_sq", "step")]
    names += ["bags.data.weight", "bags.exchange.weight", "bags.load"]  # exchange counts its load
    # The running statistics are changed inside of native batch norm.
    names += [f"state.model.1.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
    assert set(names) <= set(staged["donated"]) <= {*names, "bags.step_count"}
    assert staged["outputs"] == len(staged["donated"]) + 1
    shardings = staged["shardings"]  # of all that the step reads, the batch among it
    assert shardings["batches.0.ids"] == [["data", None], {"data": 256}]
    assert shardings["bags.exchange.weight"] == [["model", None], {"model": 256}]
    assert shardings["state.model.0.weight"][0] == [None, None]
    # 30 million rows of 8, in lines of 16 rows: a gigabyte that never existed.
    assert [shape for shape in staged["shapes"] if re.fullmatch(r"f32\[187\d+,128\]", shape)], staged["shapes"]


def test_safe_forms_are_another_program_where_there_is_attention_only(staged):
    """And a program that is staged again, after another, has the same fingerprint."""
    usual, safe, again = staged["forms"]["bert"]
    assert safe != usual == again
    usual, safe, again = staged["forms"]["dlrm"]
    assert safe == usual == again


CODE = """LB: loop body

     0   :  { %3 = vsyncpa [#allocation1], 0 } /* Start region 8 */
   0x1 LB: > { %s1 = sphi %s5, %s2 /* phi copy */
strides: (1) } /* Start region 9 :: Start region 10 */
   0x2   : > { %9 = sbr.rel (%p1_p0) target = $region20 }
   0x3 LB: >> { %s7 = sadd.s32 1, %s6 } /* Start region 11 */
   0x4   : >> { %p4_p6 = scmp.ge.s32.totalorder %s7, 16 /* loop exit test */ }
   0x5   : > { %50 = sbr.rel (!%p4_p6) target = $region11 }
   0x6 LB: >> { %p5_p2 = scmp.ne.s32.totalorder %s8, %s9 } /* Start region 12 */
   0x7   : > { %51 = sbr.rel (!%p5_p2) target = $region12 }
   0x7   : > { %p6_p1 = scmp.lt.s32.totalorder %s20_s1, 8  ;;  %s21_s1 = smov.u32 (!%p6_p1, %s20_s1), 8 }
   0x7   : > { %6820 = sst [smem:[#allocation46_spill]] %s21_s1  ;;  %s22_s1 = sld [smem:[#allocation46_spill]] }
   0x7 LB: >> { %p7_p2 = scmp.ge.s32.totalorder %s8, %s22_s1 } /* Start region 13 */
   0x7   : > { %51 = sbr.rel (!%p7_p2) target = $region13 }
   0x8   : > { %p8_p5 = scmp.ge.s32.totalorder %s2, 33 /* loop exit test */ } /* Start region 20 */
   0x9   :  { %10 = sbr.rel (!%p8_p5) target = $region9 }
   0xa   :  {}
"""


def test_the_bundles_of_a_loop_count_as_often_as_it_runs(tmp_path):
    expected = bundles.Bundles(2 + 33 * (8 + 16 * 3 + 8 * 2), unknown_loops=1)
    assert bundles.count(CODE) == expected, "of 15 bundles 13 are in the outer loop, 3 and 2 of them in inner ones"
    once = bundles.Bundles(2 + 33 * (8 + 16 * 3 + 2), unknown_loops=2)
    assert bundles.count(CODE.replace("(!%p6_p1, %s20_s1), 8", "(!%p6_p1, %s20_s1), 9")) == once, "it is no minimum"
    (tmp_path / "1795389652-scatter_fusion.1-01-final_bundles.txt").write_text(CODE)
    (tmp_path / "1795389653-scatter_fusion.1-00-schedule-analysis_final_bundles.txt").write_text("no code")
    equal = "key:scatter_fusion.1\nordinal:7\nequivalent_hlos[size=2]:\n  scatter_fusion.1\n  scatter_fusion.4\n"
    alone = "key:<top>\nordinal:0\nequivalent_hlos[size=0]:\n"
    (tmp_path / "1795389654-TLP-00-deduplication-map.txt").write_text(alone + equal)
    assert bundles.read(str(tmp_path)) == {"scatter_fusion.1": expected, "scatter_fusion.4": expected}


GROUPS = """
import json, sys, torch
from tpu.compiler import analysis, hlo, libtpu, staging
from train.common.sharding import groups
devices, spec = staging.setup(8, "TPU v5 lite", "float32"), (("data", "model"), None)
mesh, found = groups.axes(devices, data=4, model=2), {}
for name in ("group_sum", "group_mean", "all_gather", "reduce_scatter", "all_to_all"):
    def step(batch):
        x = batch["x"].detach().requires_grad_()
        y = groups.per_device(lambda x: getattr(groups, name)(x * x, mesh, "data"), mesh, [spec], spec)(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), x)
    staged = staging.stage(step, staging.inputs({"x": ((8 * 1024, 256), torch.float32)}, devices))
    shardings = {number: hlo.op_sharding(*sharding) for number, sharding in staged.shardings.items()}
    with libtpu.Topology("v5e:2x4") as topology:
        with topology.compile(hlo.with_parameter_shardings(staged.module, shardings), "fast") as program:
            every = analysis.collectives(hlo.parse(program.optimized))
    found[name] = [[one.kind, one.bytes * one.times, one.group_size] for one in every]
print(json.dumps(found))
"""


@needs_libtpu
def test_a_function_of_groups_is_one_collective_and_its_gradient_another():
    """And they move the bytes that docs/groups.md says."""
    result = run(code=GROUPS)
    part, page = 1024 * 256 * 4, (ROOT / "docs/groups.md").read_text()
    sums, back = ["all-reduce", part, 4], ["all-to-all", part, 4]
    expected = {"group_sum": [sums, sums], "group_mean": [sums, sums], "all_to_all": [back, back]}
    expected["all_gather"] = [["all-gather", part, 4], ["reduce-scatter", 4 * part, 4]]
    expected["reduce_scatter"] = [["reduce-scatter", part, 4], ["all-gather", part // 4, 4]]
    assert json.loads(result.stdout.splitlines()[-1]) == expected
    for name, collectives in expected.items():
        cells = " | ".join(f"{kind} {size:,}" for kind, size, _ in collectives)
        assert re.search(rf"`{name}`.* \| {cells} \|", page), name


# Before the steps, since it takes long: two processes end at about the same time.
@needs_libtpu
@pytest.mark.parametrize(
    "arguments, too_many, source",
    [
        ("dlrm tiny", 8_000_000, "train/common/embedding/"),
        pytest.param("bert full --task pretrain -- --size tiny", 4096, "models/", marks=pytest.mark.long),
    ],
)
def test_what_does_not_fit_says_what_takes_the_memory_and_what_would_fit(
    arguments, too_many, source, tmp_path, compiles
):
    own, _, flags = arguments.partition(" -- ")
    options = ["--batch", str(too_many), "--topology", "v5e:1x1", "--json", str(tmp_path / "report.json")]
    result = compiles(*own.split(), *options, "--", *flags.split(), ends=1)
    assert "does NOT fit" in result.stdout and source in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fits"] is False and report["needed"] > report["capacity"]
    assert 0 < report["largest_batch"] < too_many
    # Within a sixteenth.
    assert 0.85 * report["capacity"] < report["report"]["memory"]["needed"] <= report["capacity"]


# What may differ from research/results/guards.json, as a share of it.
TOLERANCES = {"cycles": 0.005} | dict.fromkeys(("bundles", "needed", "bytes_accessed", "collective_bytes"), 0.02)
TOLERANCES |= dict.fromkeys(("copies", "bytes_copied"), 0.05)


def figures(report: dict) -> dict:
    """Returns what is guarded of a report; cycles and bundles are 0 where there are none."""
    return {
        "libtpu": report["libtpu"],
        "cycles": report.get("cycles", 0),
        "bundles": report.get("uncounted", {}).get("bundles", 0),
        "needed": report["memory"]["needed"],
        "bytes_accessed": report["bytes_accessed"],
        "copies": report["copies"]["count"],
        "bytes_copied": report["copies"]["bytes"],
        "donated": report["donated"],
        "kept": report["kept_bytes"] if report.get("program", "train") != "train" else 0,
        "collectives": {kind: entry["count"] for kind, entry in report["collectives"].items()},
        "collective_bytes": sum(entry["bytes"] for entry in report["collectives"].values()),
    }


# The least bytes between two chips that share layers (Shoeybi et al. 2019, figure 4); a twentieth more is for the loss
# and for vectors. BERT, 16 rows of 512 tokens, width 256: in each of 4 layers 4 all-reduces in bfloat16, and one of the
# looked up embeddings in float32. The Transformer, 64 rows of 16, width 64: 4 in each of 2 layers of the encoder, 6 in
# each of 2 of the decoder, one of the gradients of the encoder's output and of the head's input each; two look-ups.
SHARED = {
    "bert, two chips a layer": (4 * 4 * 2 + 4) * 16 * 512 * 256,
    "transformer, two chips a layer": ((2 * 4 + 2 * 6 + 2) * 2 + 2 * 4) * 64 * 16 * 64,
}


def broken_promises(name: str, report: dict, module: hlo.Module) -> list[str]:
    """Returns a sentence for each rule that a step breaks, whatever its figures were."""
    kinds = {kind: entry["count"] for kind, entry in report["collectives"].items()}
    flags, trains = report["flags"], report["program"] == "train"
    rules = {
        "updates a tensor that it does not donate": report["donated"] != report["to_donate"],
        "moves data to or from the host": analysis.host_transfers(module) != [],
        "multiplies in float32": report["float32_products"] or not report["products"],
        # A seed of a few bytes per dropout, see models/layers.py: XLA does not divide draws among devices.
        "draws the random numbers of all devices on each": report["random_bytes"] >= (4096 if trains else 1),
        "adds gradients in more than 4 collectives": trains
        and kinds.get("all-reduce", 0) > (27 if "--mesh" in flags else 7 if "--shard-state" in flags else 4),
    }
    if "--mesh" in flags and trains:
        bound = SHARED[name]
        moved = sum(each.bytes * each.times for each in analysis.collectives(module) if each.group_size == 2)
        rules[f"moves {moved:,} bytes between the chips of a layer, of at least {bound:,}"] = moved > 1.05 * bound
    if "--shard-state" in flags and trains:
        # Of 4 layers' 6 matrices and the head's two.
        scatters = kinds.get("reduce-scatter", 0) / (2 if report["devices"] == 16 else 1)  # in two steps
        rings = "collective-permute" in kinds and report["devices"] == 8
        rules["sums gradients elsewhere than in 26 reduce-scatters"] = scatters != 26 or rings
        # Of vectors, and between the copies of a state, of which 64 chips have two. The weights have 23 MB.
        rules["all-reduces gradients that are cut"] = report["collectives"]["all-reduce"]["bytes"] > 3e6
    if report["devices"] > 1 and name == "resnet50":
        # Gradients, running statistics, loss and accuracy in two collectives; none in the forward pass.
        rules["asks another device in the forward pass"] = kinds != {"all-reduce": 2}
    if report["devices"] > 1 and name.startswith("dlrm"):
        # The largest table of MLPerf v1 has 39,979,771 rows of 128; a device's part of all tables is 12 GB. The batch
        # of all devices has 2048 rows of 26 lookups.
        moved = [each.result_bytes for each in analysis.collectives(module)]
        rules["gathers a table"] = not moved or max(moved) > 2048 * 26 * 128 * 4
    return [rule for rule, broken in rules.items() if broken]


# The longest first, so that two processes end at about the same time.
GUARDED = sorted(pages.wanted("guards"), key=lambda job: job[2] == "fast")


def guards(jobs: list[tuple[pages.Row, str, str]]) -> list:
    """Returns pytest's parameters, those marked that `make guards` leaves out."""
    parameters = []
    for row, topology, effort in jobs:
        marks = [pytest.mark.long] if (row.name, topology) in pages.LONG else []
        parameters.append(pytest.param(row, topology, effort, id=f"{row.name} on {topology}", marks=marks))
    return parameters


def test_what_the_version_of_tpu_vms_compiles_are_guarded_rows():
    rows = {row.name: row.besides for row in pages.GUARDS}
    assert set(pages.KINDS) == {name for name, besides in rows.items() if besides == libtpu.ON_TPU_VMS}
    assert {name for name, besides in rows.items() if not besides} == {
        "roberta",
        "xlnet",
        "dlrm, 8 steps a call",
        "transformer, two chips a layer, translate",
    }
    places = {(row.name, topology) for row, topology, _ in GUARDED}
    assert places >= set(pages.LONG), "a row is left out that is not there"


@needs_libtpu
@pytest.mark.parametrize("row, topology, effort", guards(GUARDED))
def test_a_step_costs_the_tpu_what_it_did(row, topology, effort, tmp_path, compiles):
    before = results.load(results.FOLDER / "guards.json").get(row.name, {}).get(topology)
    assert before, f"research/results/guards.json has no {row.name} on {topology}; {ACCEPT}"
    paths = tmp_path / "report.json", tmp_path / "module.pb"
    command = row.command(topology, effort, str(paths[0]))[3:]
    compiles(*command[:2], "--dump", str(paths[1]), *command[2:])
    report = json.loads(paths[0].read_text())
    assert broken_promises(row.name, report, hlo.parse(paths[1].read_bytes())) == []
    if os.environ.get("TPU_LIBRARY_PATH") and report["libtpu"] != before["libtpu"]:
        return  # of another library one knows that it has other figures
    if row.besides:
        beside = report["besides"]
        assert beside["libtpu"] == libtpu.ON_TPU_VMS
        assert "besides" in before, f"guards.json has no figure of libtpu {libtpu.ON_TPU_VMS} for it; {ACCEPT}"
        assert beside["needed"] == pytest.approx(before["besides"]["needed"], rel=TOLERANCES["needed"]), ACCEPT
    expected = figures(before)
    expected |= {name: pytest.approx(expected[name], rel=tolerance) for name, tolerance in TOLERANCES.items()}
    assert figures(report) == expected, ACCEPT


@needs_libtpu
@pytest.mark.parametrize("row", pages.SAFE, ids=[row.name for row in pages.SAFE])
def test_safe_forms_compile_on_a_tpu_vm_without_a_larger_stack(row, tmp_path, compiles):
    options = ["--libtpu", libtpu.ON_TPU_VMS, "--json", str(tmp_path / "report.json")]
    options += ["--topology", "v5e:1x1", "--batch", str(row.batch), "--program", row.program]
    options += ["--task", row.task] if row.task else []
    compiles(row.model, row.preset, *options, "--", *row.flags)

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["libtpu"] == libtpu.ON_TPU_VMS and report["memory"]["needed"] > 0
    assert "libtpu_init_args" not in report, "nothing but what the step asks for"


@needs_libtpu
def test_a_compiler_that_dies_is_told_in_a_sentence_with_what_helps(compiles):
    """A step with attention, on a stack that no form fits: whether the usual forms die on libtpu's own 64 KiB differs
    from run to run of the same program, see docs/tpu/versions.md."""
    options = ["--libtpu", libtpu.ON_TPU_VMS, "--topology", "v5e:1x1", "--batch", "8", "--task", "mrpc"]
    options += ["--program", "evaluate", "--effort", "fast"]
    small = {"LIBTPU_INIT_ARGS": "--fibers_default_thread_stack_size=16384"}
    died = compiles("bert", "full", *options, "--", "--lengths", "64", ends=compiling.DIED, variables=small)
    message = died.stderr[died.stderr.index("error: ") :].splitlines()[0]
    assert f"libtpu {libtpu.ON_TPU_VMS} died while it compiled (SIGSEGV, stack overflow)" in message
    assert "program evaluate, for v5e:1x1" in message and "add --safe-forms to ARGS" in message
