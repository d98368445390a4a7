"""tpu/compiler/compile.py: a script's step, staged without numbers and compiled for TPUs.

Whatever compiles is slow and needs libtpu: `make guards`. Staging takes a process of its own,
because this one has devices already.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hlo_modules
import pytest

from errors import InputError
from research import tpu_cycles
from tpu.compiler import analysis, bundles, hlo, libtpu, pages, report, results, steps
from tpu.compiler import compile as compiling

ROOT = Path(__file__).parent.parent
needs_libtpu = hlo_modules.needs_libtpu
ACCEPT = (
    'if that is meant, run `make compile-all ARGS="guards"` and commit research/results/guards.json'
)


def environment_without_devices() -> dict[str, str]:
    """Returns the environment of a process without the four devices of this one.

    Both kinds of process use the version of libtpu that the figures are of.
    """
    left_out = (
        "CPU_NUM_DEVICES",
        "PJRT_DEVICE",
        "XLA_USE_SPMD",  # torch_xla sets it
        "LIBTPU_INIT_ARGS",
        "XLA_ZOO_SAFE_FORMS",  # the devices of this process set it
    )
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PYTHONPATH"] = str(ROOT)
    if hlo_modules.installed():
        environment.setdefault("TPU_LIBRARY_PATH", str(libtpu.installed(libtpu.NEWEST)))
    return environment


def run(*arguments: str, ends: int = 0) -> subprocess.CompletedProcess:
    """Runs Python for the CPU and asserts that it exits with `ends`."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment_without_devices(),
    )
    assert result.returncode == ends, result.stderr[-2000:]
    return result


def printed_json(helper: str) -> dict:
    """Runs a helper file and returns what its last line prints."""
    result = run(str(ROOT / "tests" / helper))
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def server():
    """The process that forks one for each compile."""
    command = [sys.executable, str(ROOT / "tests/compile_server.py")]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment_without_devices(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def compiles(server, tmp_path):
    """Compiles a command line in a process of its own, and asserts that it exits with `ends`."""

    def compiled(*arguments: str, ends: int = 0, variables: dict[str, str] | None = None):
        output = tmp_path / "output.txt"
        errors = tmp_path / "errors.txt"
        request = {
            "arguments": arguments,
            "variables": variables or {},
            "output": str(output),
            "errors": str(errors),
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())

        result = subprocess.CompletedProcess(
            arguments, code, stdout=output.read_text(), stderr=errors.read_text()
        )
        assert result.returncode == ends, result.stderr[-2000:]
        return result

    return compiled


# Command lines


def test_flags_after_two_dashes_are_the_scripts():
    own = ["resnet50", "--batch", "16", "--topology", "v5e:1x1"]
    options, job = compiling.parse([*own, "--", "--image-size", "64"])
    config = job.config(8)

    assert options.topology == "v5e:1x1"
    assert job.preset == "full"
    assert config.image_size == 64
    assert config.batch_size == 128
    defaults = compiling.resnet50.Config()
    assert config == compiling.replace(defaults, image_size=64, batch_size=128)


@pytest.mark.parametrize(
    ("arguments", "batch_size", "per_device"),
    [
        ("bert --task mrpc", 32, 4),
        ("roberta --task pretrain", 8192, 1024),
        ("roberta --task pretrain --batch 32 -- --update-every 4", 32 * 8 * 4, 32),
        ("resnet50 finetune", 256, 32),  # that of 100,000 images
        ("dlrm mlperf_v1", 2048, 256),
        ("transformer tpu --batch 256", 256 * 64 * 8, 256),  # tokens
        ("transformer base", 26_624, 13),
    ],
)
def test_batch_is_given_per_device_or_is_the_recipes(arguments, batch_size, per_device):
    _, job = compiling.parse(arguments.split())
    config = job.config(8)

    found = config.batch_tokens if job.model == "transformer" else config.batch_size
    assert found == batch_size
    assert compiling.per_device(job, 8) == per_device
    assert getattr(config, "model", job.model) == job.model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "big --task pretrain",
            "the preset 'big' of bert is not known; it is one of full, lamb, tiny",
        ),
        ("--batch -1", "--batch is -1"),
        ("--program translate", "--program is translate, which bert does not do"),
        ("--json /tmp", "cannot write /tmp: give a file"),
        ("--dump /etc/passwd/x", "cannot write /etc/passwd/x: give a file"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        compiling.main(["bert", *arguments.split()])


def test_a_task_that_a_model_does_not_have_is_refused():
    with pytest.raises(InputError, match="--task is mrpc, of which resnet50 has none"):
        compiling.parse(["resnet50", "--task", "mrpc"])


def test_flags_of_the_script_are_validated():
    _, job = compiling.parse(["resnet50", "--", "--update-every", "0"])
    with pytest.raises(InputError, match="--update-every is 0; it must be at least 1"):
        job.config(8)


@pytest.mark.parametrize(
    ("objective", "shape"),
    [
        ("classes", ((128,), steps.I64)),
        ("multilabel", ((128, 1000), steps.F32)),
        ("regression", ((128,), steps.F32)),
    ],
)
def test_labels_of_images_have_the_shape_of_their_objective(objective, shape, monkeypatch):
    monkeypatch.setattr(steps.staging, "inputs", lambda shapes, mesh: shapes)
    _, job = compiling.parse(f"resnet50 --batch 16 -- --objective {objective}".split())

    shapes = steps.image_batch(job.config(8), None)

    assert shapes["label"] == shape


@pytest.mark.parametrize(
    ("arguments", "describe_batch"),
    [("resnet50", steps.image_batch), ("bert --task mrpc", steps.sentence_batch)],
)
def test_one_micro_batch_of_an_update_is_compiled(arguments, describe_batch, monkeypatch):
    monkeypatch.setattr(steps.staging, "inputs", lambda shapes, mesh: shapes)
    _, job = compiling.parse(f"{arguments} --batch 16 -- --update-every 4".split())

    shapes = describe_batch(job.config(8), None)

    first_shape, _ = next(iter(shapes.values()))
    assert first_shape[0] == 16 * 8


def test_the_usual_step_refuses_gradient_accumulation(monkeypatch):
    monkeypatch.setattr(steps.staging, "inputs", lambda shapes, mesh: shapes)
    own = ["bert", "--task", "mrpc", "--batch", "16"]
    _, job = compiling.parse([*own, "--", "--update-every", "4"])
    with pytest.raises(InputError, match="--update-every is 4; the usual step has no parts"):
        steps.step(object(), job.config(8), None, {}, None, "", "")


def test_code_goes_into_a_folder_whose_name_libtpu_can_read(monkeypatch, tmp_path):
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


@pytest.mark.slow  # `make guards` runs it
def test_ctrl_c_ends_a_compile_in_one_line():
    """And not with the exit code of a step that does not fit."""
    ended = run("-c", INTERRUPTED, ends=130)
    assert ended.stderr.splitlines()[-1] == "ended by Ctrl-C"
    assert "Traceback" not in ended.stderr


VMEM = {  # KiB that a run of the script asks libtpu for; "": nothing
    "resnet50": "40960",
    "transformer": "32768",
    "bert": "",
    "bert --task pretrain": "32768",
    "xlnet": "",
    "xlnet --task pretrain": "32768",
}


@pytest.mark.parametrize("model, kib", VMEM.items())
def test_libtpu_is_asked_for_as_much_vmem_as_in_a_run(model, kib, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    monkeypatch.setattr(compiling.libtpu, "Topology", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compiling.main([*model.split(), "--effort", "fast"])
    assert os.environ["LIBTPU_INIT_ARGS"].partition("vmem_limit_kib=")[2] == kib


# Staged steps. `make guards` runs them, and the slow ones of this file, too.


@pytest.fixture(scope="module")
def staged() -> dict:
    """What staged_steps.py prints of its steps."""
    return printed_json("staged_steps.py")


def without_precision(wanted: str, products: list[list]) -> list[str]:
    """Returns the opcodes of products of which another precision is asked."""
    opcodes = []
    for opcode, _, precisions in products:
        if precisions != [wanted]:
            opcodes.append(opcode)
    return opcodes


@pytest.mark.slow
def test_products_are_float32_only_where_that_is_asked_for(staged):
    """The precision of every product of a step, forward and backward.

    A TPU's own is one pass of bfloat16.
    """
    found = dict(staged["products"])
    assert len(found) == 7
    del found["float32 resnet50"]  # the next test

    for key, products in found.items():
        precision = "highest" if key.startswith("float32") else "default"
        assert without_precision(precision, products) == [], (key, products)

        narrow = "bf16" if key.startswith("bfloat16") else "f32"
        types = {type_of_left for _, type_of_left, _ in products}
        assert narrow in types, (key, products)
        assert len(products) >= 10, (key, products)


@pytest.mark.slow
def test_convolutions_are_float32_in_the_forward_pass_only(staged):
    """Of 3 products a convolution two are backward, for which torch_xla 2.9 asks for nothing."""
    products = staged["products"]["float32 resnet50"]
    opcodes = [opcode for opcode, _, _ in products]
    other = without_precision("highest", products)

    assert set(opcodes) == {"dot", "convolution"}
    assert set(other) == {"convolution"}
    assert 3 * len(other) == 2 * opcodes.count("convolution")


@pytest.mark.slow
def test_a_value_read_in_a_staged_step_is_named_with_its_line(staged):
    message = "GraphError: reading_step reads a value of the device in the middle of the step"
    assert message in staged["error"]
    assert re.search(r"staged_steps.py:\d+: if model\(batch", staged["error"])


@pytest.mark.slow
def test_a_staged_step_donates_all_that_it_trains(staged):
    names = []
    for name in ("0.weight", "1.bias", "1.weight"):
        names.append(f"state.model.{name}")
    for parameter in range(3):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            names.append(f"state.optimizer.0.{parameter}.{name}")
    names += ["bags.data.weight", "bags.exchange.weight", "bags.slot_load"]
    # The running statistics are changed inside of native batch norm.
    for name in ("num_batches_tracked", "running_mean", "running_var"):
        names.append(f"state.model.1.{name}")

    assert set(names) <= set(staged["donated"]) <= {*names, "bags.step_count"}
    assert staged["outputs"] == len(staged["donated"]) + 1


@pytest.mark.slow
def test_a_staged_step_knows_the_sharding_of_all_that_it_reads(staged):
    shardings = staged["shardings"]  # the batch's among them
    assert shardings["batches.0.ids"] == [["data", None], {"data": 256}]
    assert shardings["bags.exchange.weight"] == [["model", None], {"model": 256}]
    assert shardings["state.model.0.weight"][0] == [None, None]


@pytest.mark.slow
def test_a_staged_table_takes_no_memory(staged):
    """30 million rows of 8, in lines of 16 rows: a gigabyte that never existed."""
    tables = [shape for shape in staged["shapes"] if re.fullmatch(r"f32\[187\d+,128\]", shape)]
    assert tables, staged["shapes"]


@pytest.mark.slow
def test_safe_forms_change_the_program_of_attention_only(staged):
    """And a program that is staged again, after another, has the same fingerprint."""
    usual, safe, again = staged["forms"]["bert"]
    assert safe != usual
    assert usual == again

    usual, safe, again = staged["forms"]["dlrm"]
    assert safe == usual
    assert usual == again


# The compiler's code

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
   0x7   : > { %p6_p1 = scmp.lt.s32.totalorder %s20_s1, 8  ;;  \
%s21_s1 = smov.u32 (!%p6_p1, %s20_s1), 8 }
   0x7   : > { %6820 = sst [smem:[#allocation46_spill]] %s21_s1  ;;  \
%s22_s1 = sld [smem:[#allocation46_spill]] }
   0x7 LB: >> { %p7_p2 = scmp.ge.s32.totalorder %s8, %s22_s1 } /* Start region 13 */
   0x7   : > { %51 = sbr.rel (!%p7_p2) target = $region13 }
   0x8   : > { %p8_p5 = scmp.ge.s32.totalorder %s2, 33 /* loop exit test */ } /* Start region 20 */
   0x9   :  { %10 = sbr.rel (!%p8_p5) target = $region9 }
   0xa   :  {}
"""
CODE_BUNDLES = bundles.Bundles(2 + 33 * (8 + 16 * 3 + 8 * 2), unknown_loops=1)


def test_bundles_of_a_loop_count_as_often_as_it_runs():
    counted = "of 15 bundles 13 are in the outer loop, 3 and 2 of them in inner ones"
    assert bundles.count(CODE) == CODE_BUNDLES, counted


def test_a_bound_that_is_not_a_minimum_leaves_a_loop_unknown():
    other = CODE.replace("(!%p6_p1, %s20_s1), 8", "(!%p6_p1, %s20_s1), 9")
    assert other != CODE

    once = bundles.Bundles(2 + 33 * (8 + 16 * 3 + 2), unknown_loops=2)
    assert bundles.count(other) == once


def test_equal_fusions_share_the_code_of_one(tmp_path):
    code = "1795389652-scatter_fusion.1-01-final_bundles.txt"
    (tmp_path / code).write_text(CODE)
    schedule = "1795389653-scatter_fusion.1-00-schedule-analysis_final_bundles.txt"
    (tmp_path / schedule).write_text("no code")
    alone = "key:<top>\nordinal:0\nequivalent_hlos[size=0]:\n"
    equal = (
        "key:scatter_fusion.1\n"
        "ordinal:7\n"
        "equivalent_hlos[size=2]:\n"
        "  scatter_fusion.1\n"
        "  scatter_fusion.4\n"
    )
    (tmp_path / "1795389654-TLP-00-deduplication-map.txt").write_text(alone + equal)

    found = bundles.read(str(tmp_path))

    assert found == {"scatter_fusion.1": CODE_BUNDLES, "scatter_fusion.4": CODE_BUNDLES}


# Collectives


@needs_libtpu
def test_a_group_function_and_its_gradient_are_two_collectives():
    """And they move the bytes that docs/groups.md says."""
    part = 1024 * 256 * 4
    group_sum = ["all-reduce", part, 4]
    exchange = ["all-to-all", part, 4]
    expected = {
        "group_sum": [group_sum, group_sum],
        "group_mean": [group_sum, group_sum],
        "all_gather": [["all-gather", part, 4], ["reduce-scatter", 4 * part, 4]],
        "reduce_scatter": [["reduce-scatter", part, 4], ["all-gather", part // 4, 4]],
        "all_to_all": [exchange, exchange],
    }
    assert printed_json("group_collectives.py") == expected

    page = (ROOT / "docs/groups.md").read_text()
    for name, collectives in expected.items():
        cells = " | ".join(f"{kind} {size:,}" for kind, size, _ in collectives)
        assert re.search(rf"`{name}`.* \| {cells} \|", page), name


# Before the steps, since it takes long: two processes end at about the same time.
@needs_libtpu
@pytest.mark.parametrize(
    "arguments, too_many, source",
    [
        ("dlrm tiny", 8_000_000, "train/common/embedding/"),
        pytest.param(
            "bert full --task pretrain -- --size tiny", 4096, "models/", marks=pytest.mark.long
        ),
    ],
)
def test_what_does_not_fit_says_why_and_which_batch_would(
    arguments, too_many, source, tmp_path, compiles
):
    own, _, flags = arguments.partition(" -- ")
    path = tmp_path / "report.json"
    options = ["--batch", str(too_many), "--topology", "v5e:1x1", "--json", str(path)]

    result = compiles(*own.split(), *options, "--", *flags.split(), ends=1)

    assert "does NOT fit" in result.stdout
    assert source in result.stdout
    report = json.loads(path.read_text())
    assert report["fits"] is False
    assert report["needed"] > report["capacity"]
    assert 0 < report["largest_batch"] < too_many
    # Within a sixteenth.
    needed = report["report"]["memory"]["needed"]
    assert 0.85 * report["capacity"] < needed <= report["capacity"]


# Guards

TOLERANCES = {  # what may differ from research/results/guards.json, as a share of it
    "cycles": 0.005,
    "bundles": 0.02,
    "needed": 0.02,
    "bytes_accessed": 0.02,
    "collective_bytes": 0.02,
    "copies": 0.05,
    "bytes_copied": 0.05,
}


def figures(report: dict) -> dict:
    """Returns what is guarded of a report; cycles and bundles are 0 where there are none."""
    trains = report.get("program", "train") == "train"
    kept = 0 if trains else report["kept_bytes"]
    collectives = report["collectives"]
    return {
        "libtpu": report["libtpu"],
        "cycles": report.get("cycles", 0),
        "bundles": report.get("uncounted", {}).get("bundles", 0),
        "needed": report["memory"]["needed"],
        "bytes_accessed": report["bytes_accessed"],
        "copies": report["copies"]["count"],
        "bytes_copied": report["copies"]["bytes"],
        "donated": report["donated"],
        "kept": kept,
        "collectives": {kind: entry["count"] for kind, entry in collectives.items()},
        "collective_bytes": sum(entry["bytes"] for entry in collectives.values()),
    }


# The least bytes between two chips that share layers (Shoeybi et al. 2019, figure 4); a twentieth
# more is for the loss and for vectors.
# BERT, 16 rows of 512 tokens, width 256: in each of 4 layers 4 all-reduces in bfloat16, and one of
# the looked up embeddings in float32.
# The Transformer, 64 rows of 16, width 64: 4 in each of 2 layers of the encoder, 6 in each of 2 of
# the decoder, one of the gradients of the encoder's output and of the head's input each; two
# look-ups.
SHARED = {
    "bert, two chips a layer": (4 * 4 * 2 + 4) * 16 * 512 * 256,
    "transformer, two chips a layer": ((2 * 4 + 2 * 6 + 2) * 2 + 2 * 4) * 64 * 16 * 64,
}


def broken_promises(name: str, report: dict, module: hlo.Module) -> list[str]:
    """Returns a sentence for each rule that a step breaks, whatever its figures were."""
    broken = broken_by_any_step(report, module)
    trains = report["program"] == "train"
    if trains and "--mesh" in report["flags"]:
        broken += broken_by_shared_layers(SHARED[name], module)
    if trains and "--shard-state" in report["flags"]:
        broken += broken_by_a_cut_state(report)
    if report["devices"] > 1 and name == "resnet50":
        broken += broken_by_batch_norm(report)
    if report["devices"] > 1 and name.startswith("dlrm"):
        broken += broken_by_tables(module)
    return broken


def counts(report: dict) -> dict[str, int]:
    """Returns the number of collectives by kind."""
    return {kind: entry["count"] for kind, entry in report["collectives"].items()}


def broken_by_any_step(report: dict, module: hlo.Module) -> list[str]:
    trains = report["program"] == "train"
    broken = []
    if report["donated"] != report["to_donate"]:
        broken.append("updates a tensor that it does not donate")
    if analysis.host_transfers(module) != []:
        broken.append("moves data to or from the host")
    if report["float32_products"] or not report["products"]:
        broken.append("multiplies in float32")

    # A seed of a few bytes per dropout, see models/layers.py: XLA does not divide draws among
    # devices.
    most_random_bytes = 4096 if trains else 1
    if report["random_bytes"] >= most_random_bytes:
        broken.append("draws the random numbers of all devices on each")

    if "--mesh" in report["flags"]:
        most_all_reduces = 27
    elif "--shard-state" in report["flags"]:
        most_all_reduces = 7
    else:
        most_all_reduces = 4
    if trains and counts(report).get("all-reduce", 0) > most_all_reduces:
        broken.append("adds gradients in more than 4 collectives")
    return broken


def broken_by_shared_layers(least: int, module: hlo.Module) -> list[str]:
    """Of a training step in which two chips share a layer, and move `least` bytes at least."""
    moved = 0
    for each in analysis.collectives(module):
        if each.group_size == 2:
            moved += each.bytes * each.times
    if moved > 1.05 * least:
        return [f"moves {moved:,} bytes between the chips of a layer, of at least {least:,}"]
    return []


def broken_by_a_cut_state(report: dict) -> list[str]:
    """Of a training step of 4 layers' 6 matrices and the head's two, whose state is cut."""
    broken = []
    scatters = counts(report).get("reduce-scatter", 0)
    if report["devices"] == 16:
        scatters /= 2  # in two steps
    rings = report["devices"] == 8 and "collective-permute" in counts(report)
    if scatters != 26 or rings:
        broken.append("sums gradients elsewhere than in 26 reduce-scatters")

    # Of vectors, and between the copies of a state, of which 64 chips have two. The weights have
    # 23 MB.
    if report["collectives"]["all-reduce"]["bytes"] > 3e6:
        broken.append("all-reduces gradients that are cut")
    return broken


def broken_by_batch_norm(report: dict) -> list[str]:
    """Of a step of ResNet-50 on several chips, each of which has its own groups."""
    # Gradients, running statistics, loss and accuracy; none in the forward pass.
    if counts(report) != {"all-reduce": 2}:
        return ["asks another device in the forward pass"]
    return []


def broken_by_tables(module: hlo.Module) -> list[str]:
    """Of a step of DLRM on several chips.

    The largest table of MLPerf v1 has 39,979,771 rows of 128; a device's part of all tables is
    12 GB. The batch of all devices has 2048 rows of 26 lookups.
    """
    moved = [each.result_bytes for each in analysis.collectives(module)]
    if not moved or max(moved) > 2048 * 26 * 128 * 4:
        return ["gathers a table"]
    return []


def guards() -> list:
    """Returns pytest's parameters (row, topology, effort).

    Those are marked that `make guards` leaves out. The longest come first, so that two processes
    end at about the same time.
    """
    full = []
    fast = []
    for row, topology, effort in pages.wanted("guards"):
        parameter = pytest.param(
            row,
            topology,
            effort,
            id=f"{row.name} on {topology}",
            marks=[pytest.mark.long] if (row.name, topology) in pages.LONG else [],
        )
        if effort == "fast":
            fast.append(parameter)
        else:
            full.append(parameter)
    return full + fast


def test_rows_beside_tpu_vms_libtpu_are_guarded_ones():
    names = {libtpu.ON_TPU_VMS: set(), "": set()}
    for row in pages.GUARDS:
        names[row.besides].add(row.name)

    assert names[libtpu.ON_TPU_VMS] == set(pages.KINDS)
    assert names[""] == {
        "roberta",
        "xlnet",
        "dlrm, 8 steps a call",
        "transformer, two chips a layer, translate",
    }
    # Cycles are guarded of both versions: a form that gains on one may lose on the other.
    assert {row.besides for row in pages.CYCLES} == {libtpu.ON_TPU_VMS}


def test_rows_that_make_guards_leaves_out_are_there():
    guarded = {(row.name, topology) for row, topology, _ in pages.wanted("guards")}
    assert guarded >= set(pages.LONG), "a row is left out that is not there"


@needs_libtpu
@pytest.mark.parametrize("row, topology, effort", guards())
def test_a_step_costs_the_tpu_what_it_did(row, topology, effort, tmp_path, compiles):
    before = results.load(results.FOLDER / "guards.json").get(row.name, {}).get(topology)
    assert before, f"research/results/guards.json has no {row.name} on {topology}; {ACCEPT}"
    report_path = tmp_path / "report.json"
    module_path = tmp_path / "module.pb"

    command = row.command(topology, effort, str(report_path))
    model, preset, *options = command[3:]  # after python -m tpu.compiler.compile
    compiles(model, preset, "--dump", str(module_path), *options)

    report = json.loads(report_path.read_text())
    assert broken_promises(row.name, report, hlo.parse(module_path.read_bytes())) == []
    if os.environ.get("TPU_LIBRARY_PATH") and report["libtpu"] != before["libtpu"]:
        return  # of another library one knows that it has other figures

    if row.besides:
        assert report["besides"]["libtpu"] == libtpu.ON_TPU_VMS
        missing = f"guards.json lacks figures of libtpu {libtpu.ON_TPU_VMS} for it; {ACCEPT}"
        assert before.get("besides", {}).keys() == report["besides"].keys(), missing
        for name, figure in before["besides"].items():
            if name != "libtpu":
                expected = pytest.approx(figure, rel=TOLERANCES[name])
                assert report["besides"][name] == expected, ACCEPT

    expected = figures(before)
    for name, tolerance in TOLERANCES.items():
        expected[name] = pytest.approx(expected[name], rel=tolerance)
    assert figures(report) == expected, ACCEPT


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize(
    "row, topology",
    tpu_cycles.STEPS + tpu_cycles.TABLES,
    ids=tpu_cycles.names_of(tpu_cycles.STEPS + tpu_cycles.TABLES),
)
def test_figures_of_tpu_vms_are_of_the_code(row, topology):
    """The published steps, whose forms once lost by the compiler that nobody had asked."""
    records = results.load(results.FOLDER / "stock_tpu_vm.json")
    command = f"run `python -m research.tpu_cycles {row.name!r} --on-tpu-vms` (minutes)"
    assert row.name in records, f"there is no figure; {command}"
    assert tpu_cycles.age(row, topology, records[row.name]) == "as the code", command


def test_the_report_says_what_travels_between_slices():
    """Of two slices of four devices and 800 bytes of gradients, so 200 for each device."""

    def sent(identifier: int, kind: str) -> bytes:
        attributes = hlo_modules.frontend_attributes(
            _xla_host_transfer_handler_name="xla_megascale_runtime",
            _xla_megascale_transfer_type=kind,
        )
        return hlo_modules.op(identifier, "send", "token[]", (1,), extra=attributes)

    operand = hlo_modules.op(1, "parameter", "f32[75]")
    sends = [sent(2, "ALL_REDUCE"), sent(3, "ALL_REDUCE"), sent(4, "ALL_TO_ALL")]
    computation = hlo_modules.computation(1, [operand, *sends], 1)
    four_devices = hlo_modules.message(15, hlo_modules.number(2, 4))  # its device assignment
    module = hlo.parse(hlo_modules.module([computation], extra=four_devices))
    two_slices = SimpleNamespace(slices=2, num_devices=8)

    found = report._between_slices(module, two_slices, gradient_bytes=800)

    assert found == {
        "slices": 2,
        "kinds": {
            "all-reduce": {"count": 2, "bytes": 600, "largest": 300},
            "all-to-all": {"count": 1, "bytes": 300, "largest": 300},
        },
        "bytes": 900,
        "least_sent": 300 + 300 + 150,
        "bound": 200,
    }
    *kinds, total = report._describe_between_slices(found)
    assert kinds[0].startswith("between 2 slices: all-reduce 2, 0.00 MB")
    assert "data-centre network" in total

    four_slices = SimpleNamespace(slices=4, num_devices=8)
    with pytest.raises(RuntimeError, match="program for 4 devices, and a slice has 2"):
        report._between_slices(module, four_slices, gradient_bytes=800)


@needs_libtpu
@pytest.mark.parametrize(
    "version", [pytest.param(libtpu.ON_TPU_VMS, marks=pytest.mark.long), libtpu.NEWEST]
)
def test_slices_send_each_other_gradients_only(version, tmp_path, compiles):
    path = tmp_path / "report.json"
    options = ["--task", "pretrain", "--topology", "2xv5e:2x4", "--batch", "8", "--json", str(path)]

    flags = ["--", "--size", "mini", "--shard-state", "full"]
    compiles("bert", "full", *options, "--libtpu", version, *flags)

    found = json.loads(path.read_text())
    assert found["libtpu"] == version
    assert found["host_transfers"] == 0
    assert found["donated"] == found["to_donate"]
    # Nothing is gathered between slices; 1.02 of the bound, which has no padding of the vocabulary.
    between = found["between_slices"]
    assert set(between["kinds"]) == {"all-reduce"}
    assert between["bound"] < between["least_sent"] < 1.1 * between["bound"]


@needs_libtpu
@pytest.mark.parametrize("row", pages.SAFE, ids=[row.name for row in pages.SAFE])
def test_safe_forms_compile_on_a_tpu_vm_with_its_own_stack(row, tmp_path, compiles):
    path = tmp_path / "report.json"
    options = [
        *("--libtpu", libtpu.ON_TPU_VMS),
        *("--json", str(path)),
        *("--topology", "v5e:1x1"),
        *("--batch", str(row.batch)),
        *("--program", row.program),
    ]
    if row.task:
        options += ["--task", row.task]

    compiles(row.model, row.preset, *options, "--", *row.flags)

    report = json.loads(path.read_text())
    assert report["libtpu"] == libtpu.ON_TPU_VMS
    assert report["memory"]["needed"] > 0
    assert "libtpu_init_args" not in report, "nothing but what the step asks for"


@needs_libtpu
def test_a_dead_compiler_is_a_sentence_that_says_what_helps(compiles):
    """A step with attention, on a stack that no form fits.

    Whether the usual forms die on libtpu's own 64 KiB differs from run to run of the same program,
    see docs/tpu/versions.md.
    """
    options = [
        *("--libtpu", libtpu.ON_TPU_VMS),
        *("--topology", "v5e:1x1"),
        *("--batch", "8"),
        *("--task", "mrpc"),
        *("--program", "evaluate"),
        *("--effort", "fast"),
    ]
    small_stack = {"LIBTPU_INIT_ARGS": "--fibers_default_thread_stack_size=16384"}
    command = ["bert", "full", *options, "--", "--lengths", "64"]

    died = compiles(*command, ends=compiling.DIED, variables=small_stack)

    message = died.stderr[died.stderr.index("error: ") :].splitlines()[0]
    how = f"libtpu {libtpu.ON_TPU_VMS} died while it compiled (SIGSEGV, stack overflow)"
    assert how in message
    assert "program evaluate, for v5e:1x1" in message
    assert "add --safe-forms to ARGS" in message
