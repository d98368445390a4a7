"""train/resnet50.py as its users run it: it learns, resumes exactly, keeps its graph contract and refuses bad input."""

import glob
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import safetensors.torch
import torch
import torchvision

from errors import InputError
from models.resnet import resnet
from train import resnet50
from train.common import checkpoint, cli, device, files

# The learning rate of TINY, and checkpoints often enough to kill a run between them.
LEARNS = replace(resnet50.TINY, save_every=20)


def records(path) -> dict[str, dict]:
    """The lines of metrics.jsonl without their timings, by step and kind."""
    lines = [json.loads(line) for line in open(f"{path}/metrics.jsonl")]
    return {f"{line['step']} {'eval' if 'eval/top1' in line else 'train'}": {**line, "timing": None} for line in lines}


def start(config, devices=4) -> subprocess.Popen:
    """The same training in a process group of its own, as the command line starts it, and with a worker process."""
    flags = ["--workers=1"] + [
        f"--{name.replace('_', '-')}={getattr(config, name)}" for name in ("runs", "name", "epochs", "save_every", "lr")
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "train.resnet50", "tiny", *flags],
        env={**os.environ, "CPU_NUM_DEVICES": str(devices)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_step(path, step: int, process: subprocess.Popen) -> None:
    """Returns when the process has logged `step`."""
    deadline = time.monotonic() + 300
    while not (os.path.exists(f"{path}/metrics.jsonl") and f'"step": {step}' in open(f"{path}/metrics.jsonl").read()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"step {step} never came"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An uninterrupted run: (its folder, the metrics that main returned, its config)."""
    config = replace(LEARNS, runs=str(tmp_path_factory.mktemp("runs")), name="whole")
    device.reset_graph_report()
    return f"{config.runs}/whole", resnet50.main(config), config


def test_it_learns(trained):
    _, metrics, _ = trained
    assert metrics["top1"] > 0.9  # chance is 0.1
    assert metrics["top5"] >= metrics["top1"]
    assert metrics["loss"] < 0.6  # chance is 2.3


@pytest.mark.slow
def test_it_learns_in_bfloat16(tmp_path):
    assert resnet50.main(replace(LEARNS, precision="bfloat16", runs=str(tmp_path)))["top1"] > 0.9


def test_without_a_learning_rate_it_does_not(tmp_path):
    metrics = resnet50.main(replace(LEARNS, lr=0.0, epochs=2, runs=str(tmp_path)))
    assert metrics["top1"] < 0.3


def test_run_folder_holds_everything_about_the_run(trained):
    path, metrics, config = trained
    assert {"config.json", "metrics.jsonl", "curves.png", "summary.json", "tb", "checkpoints", "export"} <= set(
        os.listdir(path)
    )
    summary = json.load(open(f"{path}/summary.json"))
    assert summary["metrics"] == metrics
    assert json.load(open(f"{path}/config.json"))["config"]["lr"] == config.lr
    assert len(os.listdir(f"{path}/checkpoints")) == config.keep


def test_graph_contract(trained):
    report = json.load(open(f"{trained[0]}/summary.json"))["report"]
    assert report["recompilations"] == report["fallbacks"] == []


def test_one_device_gives_the_losses_of_four_and_compiles_two_steps(trained, tmp_path):
    path, _, config = trained
    process = start(replace(config, runs=str(tmp_path), name="one", epochs=2), devices=1)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    one, four = records(tmp_path / "one"), records(path)
    # Warm-up is the same for 2 and 8 epochs: the first epoch's losses must agree. Rounding grows from step to step.
    for step, tolerance in ((1, 1e-5), (10, 1e-4), (20, 1e-3)):
        assert one[f"{step} train"]["loss"] == pytest.approx(four[f"{step} train"]["loss"], rel=tolerance), step
    report = json.load(open(tmp_path / "one/summary.json"))["report"]
    # The train step, the evaluation step, and the few operations by which hosts compare a number.
    assert report["graphs"] <= 3
    assert report["recompilations"] == report["fallbacks"] == []
    logged, evaluations, saves, agreements = 8, 2, 5, 3
    assert report["host_reads"] <= logged + evaluations + saves + agreements + 1  # and the export


def test_killed_and_terminated_it_goes_on_to_the_same_numbers(trained, tmp_path):
    path, _, config = trained
    config = replace(config, runs=str(tmp_path), name="killed")
    folder = tmp_path / "killed"
    for step, number in ((10, signal.SIGKILL), (70, signal.SIGKILL), (150, signal.SIGTERM)):
        process = start(config)  # step 10 is before the first checkpoint
        wait_for_step(folder, step, process)
        os.killpg(process.pid, number)  # a VM that is shut down signals the workers, too
        output = process.communicate(timeout=300)[0]
        if number == signal.SIGTERM:
            assert process.returncode == 143, output
            stopped = int(re.search(r"stopped by a signal at step (\d+): saved", output)[1])
    process = start(config)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert f"resuming after step {stopped}" in output
    assert records(folder) == records(path)  # every loss, learning rate and accuracy, bit for bit
    whole, killed = (safetensors.torch.load_file(f"{p}/export/model.safetensors") for p in (path, folder))
    for name, weight in whole.items():
        assert torch.equal(weight, killed[name]), name


def test_a_finished_run_is_not_trained_again(trained, capsys):
    _, metrics, config = trained
    assert resnet50.main(config) == metrics
    assert "is finished" in capsys.readouterr().out


def test_remote_run_folder(tmp_path, capsys):
    config = replace(LEARNS, epochs=2, runs="memory://zoo", name="remote")
    metrics = resnet50.main(config)
    assert resnet50.main(config) == metrics
    tensors, metadata = files.load_weights("memory://zoo/remote/export/model.safetensors")
    assert len(json.loads(metadata["classes"])) == 10 and tensors["fc.weight"].shape[0] == 10


def test_exported_resnet50_gives_torchvisions_logits(mesh, tmp_path):
    config = replace(resnet50.TINY, model="resnet50")
    model, _, _ = resnet50.build(config, 12, mesh)
    resnet50.export(str(tmp_path), model, config, [f"class {i}" for i in range(12)])
    weights, metadata = files.load_weights(str(tmp_path / "model.safetensors"))
    assert json.loads(metadata["classes"])[11] == "class 11"
    theirs = torchvision.models.resnet50(num_classes=12)
    theirs.load_state_dict(weights)
    ours = resnet("resnet50", 12)
    ours.load_state_dict(weights)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-5, atol=1e-5)


def test_weights_start_from_torchvisions_file_with_a_new_head_for_other_classes(tmp_path):
    theirs = torchvision.models.resnet50(num_classes=10)
    path = str(tmp_path / "theirs.safetensors")
    safetensors.torch.save_file(theirs.state_dict(), path)
    for classes in (10, 4):
        ours = resnet("resnet50", classes)
        head = ours.fc.weight.clone()
        resnet50.load_pretrained(ours, path)
        assert torch.equal(ours.state_dict()["layer3.2.conv1.weight"], theirs.state_dict()["layer3.2.conv1.weight"])
        assert torch.equal(ours.fc.weight, theirs.fc.weight if classes == 10 else head)
    with pytest.raises(InputError, match=r"does not fit --model: .* more tensors differ"):
        resnet50.load_pretrained(resnet("resnet101", 10), path)


def test_learning_rate_warms_up_linearly_and_falls_as_a_cosine():
    config = replace(resnet50.Config(), epochs=90, batch_size=1024, lr=0.1, warmup_epochs=5)
    rates = [resnet50.learning_rate(config, step, 100) for step in range(9000)]
    assert rates[0] == pytest.approx(0.4 / 500)
    assert rates[499] == pytest.approx(0.4) and max(rates) == pytest.approx(0.4)
    assert rates[500 + 4250] == pytest.approx(0.2, rel=1e-3)
    assert 0 < rates[-1] < 1e-6


def test_norms_and_biases_have_no_weight_decay(mesh):
    model, _, optimizer = resnet50.build(resnet50.TINY, 10, mesh)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        is_weight = name.endswith("weight") and "bn" not in name and "downsample.1" not in name
        assert (id(parameter) in decayed) == is_weight, name


def test_lars_trains(tmp_path):
    metrics = resnet50.main(replace(LEARNS, optimizer="lars", lr=40.0, epochs=3, runs=str(tmp_path)))
    assert metrics["top1"] > 0.3


class Ten:
    """Ten examples, of which the right classes are known; number 7 is unreadable (label -1)."""

    classes = ("a", "b", "c")

    def __len__(self):
        return 10

    def example(self, index, rng):
        return {"image": np.full((3, 32, 32), index, np.uint8), "label": np.int64(-1 if index == 7 else index % 3)}


class ByPixel(torch.nn.Module):
    """Says class (pixel % 3) for pixels below 5 and, with equal logits for all classes, nothing else; NaN for pixel
    6."""

    def forward(self, x):
        pixel = x[:, 0, 0, 0]
        one_hot = (torch.arange(3, device=x.device) == (pixel % 3)[:, None]).float()
        logits = torch.where(pixel[:, None] < 5, one_hot, torch.zeros_like(one_hot))
        return torch.where(pixel[:, None] == 6, torch.full_like(logits, float("nan")), logits)


def test_evaluation_counts_every_readable_example_once(mesh, capsys):
    step = device.compiled(resnet50.eval_step, mesh)

    class Cast(torch.nn.Module):
        def forward(self, x):
            return x.float()

    metrics = resnet50.evaluate(step, ByPixel(), Cast(), Ten(), replace(resnet50.TINY, batch_size=8), mesh)
    # 0 to 4 right; 5, 8 (class 2) wrong, 9 (class 0) right by order among equals; 6 NaN: wrong; 7 does not count.
    assert metrics["top1"] == pytest.approx(6 / 9)
    assert metrics["top5"] == pytest.approx(8 / 9)  # with three classes all but the NaN
    assert "evaluated 9 of 10 images" in capsys.readouterr().out


def collectives(norm_groups: int, folder) -> dict[str, int]:
    """Compiles the train step for four devices and reads the optimised module: the number of all-reduces, of other
    collectives, and of convolutions and matrix products that need an all-reduce's result."""
    program = f"""
from dataclasses import replace
from train import resnet50 as script
from train.common import device, loading
config = replace(script.TINY, norm_groups={norm_groups})
mesh = device.setup(0, "float32")
model, normalize, optimizer = script.build(config, 10, mesh)
data, _ = script.open_data(config)
with loading.parallel_loader(data, 64, mesh, train=True, stop=1) as loader:
    step = device.compiled(script.train_step, mesh)
    step(model.train(), normalize, optimizer, next(loader), config, mesh)["loss"].item()
"""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "XLA_FLAGS": flags}, check=True, capture_output=True
    )
    text = open(max(glob.glob(f"{folder}/*cpu_after_optimizations.txt"), key=os.path.getsize)).read()
    computations, entry = {}, ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            body = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif instruction := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)", line):
            body.append((instruction[1], instruction[2], re.findall(r"%([\w.\-]+)", instruction[3])))

    def heavy(op, names):
        called = [name for name in names if name in computations]
        return op in ("convolution", "dot") or any(heavy(o, n) for name in called for _, o, n in computations[name])

    counts, tainted = {"all-reduce": 0, "other": 0, "heavy": 0, "heavy after all-reduce": 0}, set()
    for name, op, operands in computations[entry]:
        counts["heavy"] += heavy(op, operands)
        if op == "all-reduce":
            counts["all-reduce"] += 1
            tainted.add(name)
        elif op.startswith(("all-", "collective-", "reduce-scatter")):
            counts["other"] += 1
        elif tainted & set(operands):
            tainted.add(name)
            counts["heavy after all-reduce"] += heavy(op, operands)
    return counts


def test_norm_per_device_needs_no_collective_in_the_forward_and_backward_pass(tmp_path):
    counts = collectives(4, tmp_path)
    with torch.device("meta"):
        model = resnet("resnet_tiny", 10)
    statistics = 2 * sum(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    assert counts["heavy"] > 50
    assert counts["heavy after all-reduce"] == 0
    assert counts["other"] == 0
    # Gradients, running statistics, loss and accuracy.
    assert counts["all-reduce"] <= len(list(model.parameters())) + statistics + 2


def test_norm_over_the_whole_batch_would(tmp_path):
    assert collectives(1, tmp_path)["heavy after all-reduce"] > 40


# ---- what the user can get wrong: one sentence, exit code 2, no traceback ----


def write_images(folder, count=2, size=40):
    folder.mkdir(parents=True)
    for i in range(count):
        PIL.Image.fromarray(np.random.default_rng(i).integers(0, 255, (size, size, 3), np.uint8)).save(
            folder / f"{i}.jpg"
        )


@pytest.fixture
def images(tmp_path):
    """Two classes of four training and two evaluation images."""
    for name in ("cat", "dog"):
        write_images(tmp_path / "images/train" / name, 4)
        write_images(tmp_path / "images/val" / name, 2)
    return tmp_path / "images"


def command(monkeypatch, capsys, *flags) -> tuple[int, str]:
    """Exit code and standard error of the script with these flags."""
    monkeypatch.setattr(sys, "argv", ["train/resnet50.py", "tiny", *map(str, flags)])
    with pytest.raises(SystemExit) as exit:
        cli.run(resnet50.main, resnet50.PRESETS)
    return exit.value.code, capsys.readouterr().err


def assert_one_sentence(result, *words):
    code, error = result
    assert code == 2
    assert error.startswith("error: ") and len(error.splitlines()) == 1 and "Traceback" not in error, error
    for word in words:
        assert word in error, error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lr", "-1"), ("--lr is -1.0", "at least 0")),
        (("--epochs", "0"), ("--epochs is 0", "at least 1")),
        (("--label-smoothing", "1"), ("--label-smoothing is 1.0", "below 1")),
        (("--warmup-epochs", "9"), ("--warmup-epochs is 9", "below --epochs, 8")),
        (("--batch-size", "30"), ("--batch-size 30", "--norm-groups 8")),
        (("--batch-size", "6", "--norm-groups", "0"), ("batch_size is 6", "4 devices", "nearest that does is 8")),
        (("--batch-size", "4096"), ("batch_size is 4096", "2048 examples")),
        (("--norm-groups", "2"), ("--norm-groups is 2", "1 or a multiple of 4 devices")),
        (("--image-size", "8"), ("--image-size is 8", "at least 32")),
        (("--data", ""), ("--data is missing", "synthetic")),
        (("--weights", "nowhere.safetensors"), ("there is no weights file nowhere.safetensors",)),
        (("--data", "/nowhere/at/all"), ("/nowhere/at/all",)),
    ],
)
def test_values_out_of_range(monkeypatch, capsys, tmp_path, flags, words):
    assert_one_sentence(command(monkeypatch, capsys, "--runs", tmp_path, *flags), *words)


def test_unknown_flag_suggests_the_right_one(monkeypatch, capsys):
    code, error = command(monkeypatch, capsys, "--batchsize", "8")
    assert code == 2 and "--batch-size" in error and "Traceback" not in error


def test_no_class_folders(monkeypatch, capsys, tmp_path):
    write_images(tmp_path / "images/train")
    assert_one_sentence(
        command(monkeypatch, capsys, "--data", tmp_path / "images", "--runs", tmp_path), "train", "class"
    )


def test_an_empty_class(monkeypatch, capsys, tmp_path, images):
    (images / "train/empty").mkdir()
    assert_one_sentence(command(monkeypatch, capsys, "--data", images, "--runs", tmp_path), "empty")


def test_truncated_jpeg_is_named_from_a_worker_process(monkeypatch, capsys, tmp_path, images):
    broken = images / "train/dog/2.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    flags = ("--data", images, "--runs", tmp_path, "--batch-size", 8, "--norm-groups", 4, "--workers", 1, "--epochs", 2)
    assert_one_sentence(command(monkeypatch, capsys, *flags), "dog/2.jpg", "--skip-broken")


def test_skip_broken_replaces_and_reports(monkeypatch, capsys, tmp_path, images):
    broken = images / "train/dog/2.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    (images / "val/dog/0.jpg").write_bytes(b"")
    config = replace(
        LEARNS, data=str(images), runs=str(tmp_path), batch_size=8, norm_groups=4, epochs=2, skip_broken=True
    )
    resnet50.main(config)
    assert re.search(r"[12] training images could not be decoded", capsys.readouterr().out)


def test_run_folder_that_cannot_be_made(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert_one_sentence(command(monkeypatch, capsys, "--runs", tmp_path / "file"), str(tmp_path / "file"))


def test_full_disk_ends_the_run_and_the_checkpoint_before_stays(monkeypatch, capsys, tmp_path):
    write = files.write_synced

    def full(fs, path, content):
        if "step_00000064" in path:
            raise OSError(28, "No space left on device")
        write(fs, path, content)

    flags = ("--runs", tmp_path, "--name", "full")
    monkeypatch.setattr(files, "write_synced", full)
    result = command(monkeypatch, capsys, *flags)
    assert_one_sentence(result, "checkpoint of step 64", "No space left on device", "step 50 is complete and safe")
    assert checkpoint.Checkpointer(f"{tmp_path}/full/checkpoints").complete_steps() == [32, 50]


def test_checkpoint_of_another_model(monkeypatch, capsys, tmp_path, mesh):
    config = replace(resnet50.TINY, model="resnet50")
    model, _, optimizer = resnet50.build(config, 10, mesh)
    with checkpoint.Checkpointer(f"{tmp_path}/run/checkpoints") as saved:
        saved.save(5, model, optimizer)
    assert_one_sentence(
        command(monkeypatch, capsys, "--runs", tmp_path, "--name", "run"), "another model", "step_00000005"
    )


def test_other_values_for_the_same_name(monkeypatch, capsys, trained):
    _, _, config = trained
    flags = ("--runs", config.runs, "--name", config.name, "--save-every", 20)
    assert_one_sentence(command(monkeypatch, capsys, *flags, "--lr", 0.1), "lr", "0.8", "0.1", "another --name")


def test_a_loss_that_is_not_finite_stops_the_run(monkeypatch, capsys, tmp_path):
    assert_one_sentence(command(monkeypatch, capsys, "--runs", tmp_path, "--lr", 1e12), "loss", "--lr")
